//! Rate limiting of weight loads per SM, tuned per device and shape.
//!
//! Results that blocks exchange queue behind all requested bytes. So small layers, which are dominated by latency, request few
//! bytes at a time, and large ones request at the rate of memory. The best setting depends on the device and the shape; it is
//! measured when the layers are first bound, with their own weights.

use super::{params, ranks};
use crate::{
    arch::{DeviceSpec, tuner},
    driver::{context::Context, kernel_struct::kernel_struct, launch::LaunchOp, raw::RawStream},
};
use dsrun_core::Error;
use params::{Model, Pacing};

/// Bytes that an SM may request per ten clocks: 0 for no limit, then from below the memory bandwidth to above it. An H200
/// delivers 184 per SM.
const PACES: [u32; 8] = [0, 110, 130, 150, 165, 180, 190, 205];
/// Ring slots that may be in flight to an SM. With an odd number of slots, of which there are at least five, up to two fewer than
/// there are (see [`unlimited`]); with an even number, a slot always belongs to the same team.
const IN_FLIGHT: [u32; 3] = [2, 1, 3];
/// The maximum number of teams of warps.
const TEAMS: usize = 2;
/// The maximum number of clocks of delay that an SM may catch up.
const CATCH_UP: u32 = 2000;
/// Keys that the token of the measurement attends to.
const KEYS: i32 = 256;
/// Entries of its block table, enough for pages of at least 8 keys. All entries are -1, so no key is read.
const PAGES: usize = 32;

fn paced(in_flight: u32, bytes_in_ten_clocks: u32) -> Pacing {
    let clocks_per_byte = (10u32 << 16).checked_div(bytes_in_ten_clocks).unwrap_or(0);
    Pacing { in_flight, clocks_per_byte, catch_up: CATCH_UP, unused: 0 }
}

/// The pacing of layers that fit into the ring buffers: as many slots in flight as possible.
///
/// Two teams of warps alternate on slots. If all slots could be in flight, one team could reach a slot that has not been filled
/// for the other team yet, and mistake the parity of its barrier for the next phase. A team is at most one of its own slots ahead
/// of the slots that have arrived in order, so two fewer in flight are safe.
pub(super) fn unlimited(slots: usize) -> Pacing {
    paced(u32::try_from(slots.saturating_sub(TEAMS).max(1)).unwrap_or(u32::MAX), 0)
}

/// The candidate pacings for layers that do not fit into the ring buffers.
pub(super) fn candidates() -> Vec<Pacing> {
    PACES.into_iter().flat_map(|pace| IN_FLIGHT.map(|in_flight| paced(in_flight, pace))).collect()
}

kernel_struct! {
    /// The token used for the measurement: alone in a sequence without pages, so no key is read and nothing is written to the
    /// cache.
    struct MeasuredToken {
        start: i32 = "int",
        length: i32 = "int",
        total: i32 = "int",
        position: i32 = "int",
        slot: i32 = "int",
        block_table: [i32; PAGES] = "int",
    }
}

/// The fastest pacing for these layers, of whose ranks this one plays all. `launch` makes a launch for given parameters; the measurement
/// does not change the real token, its cache or its results.
pub(super) fn tuned(
    context: &Context,
    device: &DeviceSpec,
    question: &str,
    model: &Model,
    [hidden_bytes, ranks]: [usize; 2],
    launch: &dyn Fn(&Model) -> Option<LaunchOp>,
) -> Pacing {
    let candidates = candidates();
    let best = (|| {
        let token = hidden_bytes.next_multiple_of(256);
        let parts = (2 * token + size_of::<MeasuredToken>()).next_multiple_of(256);
        let memory = context.allocate(parts + ranks::bytes_alone(ranks))?;
        let at = |offset: usize| memory + (2 * token + offset) as u64;
        let measured = MeasuredToken {
            start: 0,
            length: 1,
            total: KEYS,
            position: 0,
            slot: -1,
            block_table: [-1; PAGES],
        };
        let model = Model {
            x: memory,
            y: memory + token as u64,
            query_start: at(0),
            query_length: at(4),
            kv_length: at(8),
            positions: at(12),
            slots: at(16),
            block_table: at(20),
            block_table_columns: PAGES as i64,
            embedding: params::Embedding::default(),
            ranks: ranks::alone(model.ranks, ranks, memory + parts as u64, context)?,
            ..*model
        };
        let run = |index: usize, stream: RawStream| {
            let launch = launch(&Model { pacing: candidates[index], ..model });
            match &launch {
                Some(LaunchOp::Kernel(launch)) => launch.enqueue_on(context, stream),
                _ => Err(Error::internal("layers without a launch")),
            }
        };
        let best = context
            .write(at(0), &[measured])
            .map(|()| tuner::fastest(context, device, super::UNIT, question, candidates.len(), &run));
        context.release(memory);
        best
    })();
    let best = best.unwrap_or_else(|error| {
        tracing::debug!(%error, "the pacing of layers cannot be measured");
        0
    });
    candidates[best]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_team_cannot_come_round_to_a_slot_of_the_other_that_is_not_filled() {
        // The minimum number of slots of a ring are four.
        for slots in 4..33_u32 {
            let limit = slots - TEAMS as u32;
            assert!(unlimited(slots as usize).in_flight <= limit, "{slots} slots");
            let odd = slots % 2 == 1;
            assert!(!odd || candidates().iter().all(|pacing| pacing.in_flight <= limit), "{slots} slots");
        }
    }
}
