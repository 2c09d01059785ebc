//! How fast multiprocessors ask memory for weights, before it is measured.
//!
//! Results that blocks exchange wait behind everything that memory was asked for. So small layers, which wait most, ask for little at a
//! time, and large ones at the pace of memory.

use super::params::Pacing;
use crate::arch::DeviceSpec;

/// Up to so many bytes of weights of a layer one slot is on its way to each multiprocessor at a time: with a pace, and without.
const ONE_AT_A_PACE: usize = 48 << 20;
const ONE_AT_A_TIME: usize = 80 << 20;
/// Beyond so many, layers wait so little that all multiprocessors may ask as they have room.
const UNPACED: usize = 512 << 20;
/// Bytes in ten clocks of a multiprocessor that the memory of an H200 gives; slower memory does not notice. Larger layers gain from a
/// little more.
const PACE: usize = 180;
const FASTER_PACE: usize = 190;
const FASTER_FROM: usize = 256 << 20;
/// For how many clocks a multiprocessor that fell behind may go faster.
const CATCH_UP: u32 = 2000;

/// A pace of so many bytes in ten clocks; 0 for none.
fn paced(in_flight: usize, bytes: usize) -> Pacing {
    let clocks_per_byte = if bytes == 0 { 0 } else { (10 * (1 << 16) / bytes) as u32 };
    Pacing { in_flight: in_flight as u32, clocks_per_byte, catch_up: CATCH_UP, unused: 0 }
}

/// The pacing of layers of so many bytes of weights, `integers` or dense. `ring` are the slots of a ring that holds a layer whole.
pub(super) fn initial(bytes: usize, ring: Option<usize>, integers: bool, device: &DeviceSpec) -> Pacing {
    if let Some(slots) = ring {
        return paced(slots, 0);
    }
    let has_pace = device.capability == 90;
    let one = if has_pace && !integers { ONE_AT_A_PACE } else { ONE_AT_A_TIME };
    let pace = match bytes {
        _ if bytes <= one || !has_pace => 0,
        _ if integers || bytes <= FASTER_FROM => PACE,
        _ if bytes <= UNPACED => FASTER_PACE,
        _ => 0,
    };
    let in_flight = match bytes {
        _ if bytes <= one => 1,
        _ if integers || bytes <= UNPACED => 2,
        _ => 3,
    };
    paced(in_flight, pace)
}
