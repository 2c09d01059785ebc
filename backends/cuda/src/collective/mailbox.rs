//! Peer exchange: ranks exchange data by plain stores of one GPU to the memory of another.
//!
//! A rank owns a mailbox, to which the others write packets: 8 bytes of data in two words, each with the number of its round. So
//! data carries its own flag, and stores need no ordering. Rounds are counted on the device, so a captured graph can be replayed.
//! Large all-reduces exchange only the addresses of tensors in mailboxes.
//! `kernels/collective/exchange.cuh` has the protocol.

use super::members::Members;
use crate::driver::{context::Context, raw::Raw};
use cudarc::driver::sys;
use dsrun_core::{Code, Error, Result};
use std::{fmt, ptr, sync::Arc, time::Duration};

/// How long a kernel waits for another rank to reach the same collective.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);
/// The maximum number of ranks of an exchange.
pub(crate) const MAX_RANKS: usize = 8;
/// The maximum number of blocks of a kernel that exchanges data. Small, because the blocks of all ranks that share a GPU have to
/// be resident at once.
pub(crate) const BLOCKS: usize = 32;
/// Threads of a block.
pub(crate) const THREADS: usize = 256;
/// The maximum number of packets of a thread in a round, for each rank.
pub(crate) const DEPTH: usize = 4;
/// The maximum number of blocks of a direct all-reduce. As the blocks of all ranks that share a GPU have to be resident at once, there
/// are few of them.
pub(crate) const DIRECT_BLOCKS: usize = 96;
/// The number of blocks of a direct all-reduce that are resident on a multiprocessor at once, at least.
pub(crate) const DIRECT_BLOCKS_AT_ONCE: usize = 3;
/// Rounds that a rank may send before the receiver has taken the first.
pub(crate) const CREDITS: usize = 4;

/// Bytes of a rank's part of a result that the ranks of a decoder sum in its launch.
pub(crate) const PART_BYTES: usize = 16 << 10;
/// The number of such results that have places of their own; later ones have them again. `kernels/decoder/ranks.cuh` says why they
/// suffice.
pub(crate) const RESULT_SETS: usize = 16;

/// Each byte of a part that has not arrived.
pub(crate) const NO_PART: u8 = 0xff;

/// Bytes of a packet.
const PACKET: usize = 16;
/// Bytes of the packets of a round from one rank.
const ROUND: usize = BLOCKS * THREADS * DEPTH * PACKET;
/// Bytes of the packets of collectives from one rank: of two rounds.
const COLLECTIVE: usize = 2 * ROUND;
/// Bytes of the packets that one rank sends.
const SENT: usize = CREDITS * ROUND;
/// Bytes of what a block of a direct all-reduce says about its rank: three addresses and strides, and the number of the last one that it
/// has ended.
const DIRECT: usize = 6 * PACKET + size_of::<u32>();
/// Bytes of one receiver's acknowledged round numbers, by thread.
const TAKEN: usize = BLOCKS * THREADS * size_of::<u32>();
/// Bytes of the numbers of started rounds, by block.
const COUNTS: usize = BLOCKS * size_of::<u32>();

/// Bytes of the probe that ranks write to each other to test peer access.
const PROBE: usize = 4096;

/// A timeout as kernels take it.
pub(crate) fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// The probe pattern of a rank.
fn probe(rank: usize) -> Vec<u8> {
    (0..PROBE).map(|place| ((place * 11 + rank * 37) % 251) as u8 + 1).collect()
}

/// The byte offsets of the parts of a mailbox.
#[derive(Clone, Copy, Debug)]
struct Places {
    ranks: usize,
}

impl Places {
    /// Packets of collectives from a rank.
    fn collective(self, from: usize) -> usize {
        from * COLLECTIVE
    }

    /// Packets that a rank sends.
    fn sent(self, from: usize) -> usize {
        self.ranks * COLLECTIVE + from * SENT
    }

    /// The acknowledged rounds of a receiver.
    fn taken(self, by: usize) -> usize {
        self.sent(self.ranks) + by * TAKEN
    }

    /// The round counters of collectives.
    fn rounds(self) -> usize {
        self.taken(self.ranks)
    }

    /// The rounds sent to a rank.
    fn sends(self, to: usize) -> usize {
        self.rounds() + (1 + to) * COUNTS
    }

    /// The rounds received from a rank.
    fn receives(self, from: usize) -> usize {
        self.sends(self.ranks) + from * COUNTS
    }

    /// What the blocks of a rank say in direct all-reduces.
    fn direct(self, from: usize) -> usize {
        self.receives(self.ranks) + from * DIRECT_BLOCKS * DIRECT
    }

    /// The counters of direct all-reduces, by block.
    fn direct_counts(self) -> usize {
        self.direct(self.ranks)
    }

    /// The parts of results that a rank has a part of, in sets of one of each rank.
    fn parts(self, from: usize) -> usize {
        let start = (self.direct_counts() + DIRECT_BLOCKS * size_of::<u32>()).next_multiple_of(PART_BYTES);
        start + from * PART_BYTES
    }

    /// The counter of such results.
    fn results(self) -> usize {
        self.parts(self.ranks * RESULT_SETS)
    }

    /// The bytes of the mailbox.
    fn bytes(self) -> usize {
        self.results() + size_of::<u32>()
    }
}

/// State shared by kernels and the host, in pinned memory: `ExchangeState` of the kernels.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct State {
    /// The abort flag: whether all waits are to end.
    ended: u32,
    _unused: u32,
    /// The wait that timed out, encoded; 0 if none has.
    given_up: u64,
}

/// A rank's mailbox.
pub(crate) struct Mailbox {
    context: Arc<Context>,
    memory: u64,
    /// The address of the owner's flag, see [`Context::failed_word`](crate::driver::context::Context::failed_word).
    failed: u64,
    state: Raw<State>,
    /// The device address of the state.
    state_address: u64,
    places: Places,
    multiprocessors: usize,
}

impl fmt::Debug for Mailbox {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Mailbox({:#x}, {} bytes)", self.memory, self.places.bytes())
    }
}

/// A wait of a kernel that timed out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct GivenUp {
    /// The rank that was waited for.
    pub(crate) peer: usize,
    pub(crate) block: usize,
}

impl Mailbox {
    /// An empty mailbox for a group of this many ranks, on a GPU with so many multiprocessors.
    ///
    /// # Errors
    /// If there is too little memory.
    pub(super) fn new(context: &Arc<Context>, multiprocessors: usize, ranks: usize) -> Result<Self> {
        context.enter()?;
        let places = Places { ranks };
        let bytes = places.bytes();
        let failed = context.failed_word()?;
        let (mut memory, mut state, mut state_address) = (0, ptr::null_mut(), 0);
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
        // SAFETY: the pointers are to places of the right type. Memory of this kind, unlike that of pools, is mapped for every GPU that
        // has peer access to this one.
        let status = unsafe { sys::cuMemAlloc_v2(&raw mut memory, bytes) };
        context.check_with(status, || format!("allocating {bytes} bytes to exchange data in"))?;
        let made = (|| {
            // SAFETY: the memory is `bytes` long. What is pinned is as long as it is said to be, and is written only if it was allocated.
            unsafe {
                context.check(sys::cuMemsetD8_v2(memory, 0, bytes), "clearing memory")?;
                let (parts, part_bytes) =
                    (memory + places.parts(0) as u64, places.results() - places.parts(0));
                context.check(sys::cuMemsetD8_v2(parts, NO_PART, part_bytes), "clearing memory")?;
                context.check(sys::cuCtxSynchronize(), "waiting for memory to be cleared")?;
                let status = sys::cuMemHostAlloc(&raw mut state, size_of::<State>(), flags);
                context.check(status, "pinning host memory")?;
                ptr::write_bytes(state.cast::<State>(), 0, 1);
                let status = sys::cuMemHostGetDevicePointer_v2(&raw mut state_address, state, 0);
                context.check(status, "mapping pinned memory")
            }
        })();
        // From here on, dropping the mailbox frees the memory.
        let mailbox = Self {
            context: context.clone(),
            memory,
            failed,
            state: Raw(state.cast()),
            state_address,
            places,
            multiprocessors,
        };
        made.map(|()| mailbox)
    }

    pub(super) fn context(&self) -> &Context {
        &self.context
    }

    /// Aborts the waits of the owner's kernels.
    fn end(&self) {
        // SAFETY: the memory lives as long as `self`; devices read it whole.
        unsafe { (&raw mut (*self.state.0).ended).write_volatile(1) };
    }

    /// The wait of a kernel of the owner that timed out.
    fn given_up(&self) -> Option<GivenUp> {
        // SAFETY: the memory lives as long as `self`; the device writes it whole.
        let bits = unsafe { (&raw const (*self.state.0).given_up).read_volatile() };
        (bits != 0).then_some(GivenUp { peer: (bits >> 32) as usize & 0xFF, block: bits as u32 as usize })
    }
}

impl Drop for Mailbox {
    fn drop(&mut self) {
        self.context.settle();
        if self.context.enter_anyway().is_ok() {
            // SAFETY: allocated by `new` and freed once. The mailboxes of a group live until its last member is dropped, and every
            // member waits for its device first.
            unsafe {
                sys::cuMemFree_v2(self.memory);
                if !self.state.0.is_null() {
                    sys::cuMemFreeHost(self.state.0.cast());
                }
            }
        }
    }
}

/// A rank's view of the mailboxes of its group.
#[derive(Debug)]
pub(crate) struct Exchange {
    rank: usize,
    mailboxes: Vec<Arc<Mailbox>>,
    members: Arc<Members>,
}

impl Exchange {
    pub(super) fn new(rank: usize, mailboxes: Vec<Arc<Mailbox>>, members: Arc<Members>) -> Self {
        let exchange = Self { rank, mailboxes, members };
        if exchange.shares_device() {
            exchange.own().context.note_shared(true);
        }
        exchange
    }

    fn own(&self) -> &Mailbox {
        &self.mailboxes[self.rank]
    }

    /// The progress of ranks that share a device.
    pub(super) fn members(&self) -> &Members {
        &self.members
    }

    /// The number of ranks on a device.
    fn on_device(&self, device: i32) -> usize {
        self.mailboxes.iter().filter(|mailbox| mailbox.context.device() == device).count()
    }

    /// Whether this rank shares its device with another one.
    fn shares_device(&self) -> bool {
        self.on_device(self.own().context.device()) > 1
    }

    /// Whether any ranks of the group share a device. All ranks get the same answer, also one that has a device of its own.
    pub(super) fn any_share_device(&self) -> bool {
        self.mailboxes.iter().any(|mailbox| self.on_device(mailbox.context.device()) > 1)
    }

    /// Whether the blocks of a direct all-reduce of all ranks that share a GPU are resident at once. All ranks get the same answer.
    pub(crate) fn direct_fits(&self) -> bool {
        self.mailboxes.iter().all(|mailbox| {
            let sharing = self.on_device(mailbox.context.device());
            sharing * DIRECT_BLOCKS <= mailbox.multiprocessors * DIRECT_BLOCKS_AT_ONCE
        })
    }

    /// The address, in each rank's mailbox, of this rank's packets of collectives.
    pub(crate) fn to(&self) -> [u64; MAX_RANKS] {
        let place = |rank: usize| {
            let at = |mailbox: &Arc<Mailbox>| mailbox.memory + mailbox.places.collective(self.rank) as u64;
            self.mailboxes.get(rank).map_or(0, at)
        };
        std::array::from_fn(place)
    }

    /// The address, in this rank's mailbox, of the packets of all ranks.
    pub(crate) fn from(&self) -> u64 {
        self.own().memory + self.own().places.collective(0) as u64
    }

    /// The round counters of collectives.
    pub(crate) fn rounds(&self) -> u64 {
        self.own().memory + self.own().places.rounds() as u64
    }

    /// The addresses for direct all-reduces: what this rank says in each rank's mailbox, what all ranks say in its own, and the
    /// counters.
    pub(crate) fn direct(&self) -> ([u64; MAX_RANKS], u64, u64) {
        let own = self.own();
        let at = |mailbox: &Arc<Mailbox>| mailbox.memory + mailbox.places.direct(self.rank) as u64;
        let to = std::array::from_fn(|rank| self.mailboxes.get(rank).map_or(0, at));
        let [from, counts] = [own.places.direct(0), own.places.direct_counts()];
        (to, own.memory + from as u64, own.memory + counts as u64)
    }

    /// The addresses for results that are summed in a decoder's launch: this rank's parts in each rank's mailbox, the parts of all
    /// ranks in its own, and the counter of results.
    pub(crate) fn parts(&self) -> ([u64; MAX_RANKS], u64, u64) {
        let own = self.own();
        let at = |mailbox: &Arc<Mailbox>| mailbox.memory + mailbox.places.parts(self.rank) as u64;
        let to = std::array::from_fn(|rank| self.mailboxes.get(rank).map_or(0, at));
        (to, own.memory + own.places.parts(0) as u64, own.memory + own.places.results() as u64)
    }

    /// Whether all ranks have GPUs of their own and of one kind, so that all of them decide alike which calls run in one launch.
    pub(crate) fn is_even(&self) -> bool {
        let kind = self.own().multiprocessors;
        !self.any_share_device() && self.mailboxes.iter().all(|mailbox| mailbox.multiprocessors == kind)
    }

    /// The state shared by kernels and the host.
    pub(crate) fn state(&self) -> u64 {
        self.own().state_address
    }

    /// The flag that a wait of this rank has failed.
    pub(crate) fn failed(&self) -> u64 {
        self.own().failed
    }

    /// The addresses for sending to a rank: its packets, the rounds it has acknowledged, and the counter of rounds sent to it.
    pub(crate) fn sending(&self, to: usize) -> [u64; 3] {
        let (own, peer) = (self.own(), &self.mailboxes[to]);
        [
            peer.memory + peer.places.sent(self.rank) as u64,
            own.memory + own.places.taken(to) as u64,
            own.memory + own.places.sends(to) as u64,
        ]
    }

    /// The addresses for receiving from a rank: its packets, the rounds to acknowledge, and the counter of rounds received.
    pub(crate) fn receiving(&self, from: usize) -> [u64; 3] {
        let (own, peer) = (self.own(), &self.mailboxes[from]);
        [
            own.memory + own.places.sent(from) as u64,
            peer.memory + peer.places.taken(self.rank) as u64,
            own.memory + own.places.receives(from) as u64,
        ]
    }

    /// Writes the probe pattern of this rank to every mailbox.
    ///
    /// # Errors
    /// If a device failed.
    pub(super) fn write_probes(&self, context: &Context) -> Result<()> {
        let own = self.own().memory + self.own().places.collective(self.rank) as u64;
        context.write_bytes(own, &probe(self.rank))?;
        let others = self.to().into_iter().take(self.mailboxes.len()).filter(|to| *to != own);
        others.into_iter().try_for_each(|to| context.copy(to, own, PROBE))
    }

    /// Checks the probes of the other ranks, and clears them.
    ///
    /// # Errors
    /// [`Code::Unsupported`] if something else has arrived.
    pub(super) fn check_probes(&self, context: &Context) -> Result<()> {
        let mut found = vec![0; PROBE];
        for (rank, mailbox) in self.mailboxes.iter().enumerate() {
            let place = self.from() + self.own().places.collective(rank) as u64;
            context.read_bytes(place, &mut found)?;
            context.fill(place, PROBE, 0)?;
            if found != probe(rank) {
                let (from, to) = (mailbox.context.device(), context.device());
                let message = format!(
                    "GPU {from} has peer access to GPU {to}, but what it writes there does not arrive; access control (ACS) or an \
                     IOMMU may be in the way"
                );
                return Err(Error::unsupported(message));
            }
        }
        Ok(())
    }

    /// Aborts the waits of the kernels of all ranks.
    pub(super) fn end(&self) {
        self.mailboxes.iter().for_each(|mailbox| mailbox.end());
    }

    /// Aborts the waits of the kernels of this rank.
    pub(super) fn end_own(&self) {
        self.own().end();
    }

    /// Reports a wait of a kernel of this rank that timed out.
    ///
    /// # Errors
    /// Names the rank that was waited for.
    pub(super) fn check(&self) -> Result<()> {
        let Some(GivenUp { peer, block }) = self.own().given_up() else { return Ok(()) };
        let message = format!(
            "rank {} gave up waiting for data of rank {peer}, which did not come to the same collective (block {block})",
            self.rank
        );
        Err(Error::new(Code::Timeout, message))
    }
}

impl Drop for Exchange {
    fn drop(&mut self) {
        if self.shares_device() {
            self.own().context.note_shared(false);
        }
        // The last member frees memory that kernels of this rank write to, so wait for them.
        self.own().context.settle();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parts_of_a_mailbox_follow_each_other() {
        for ranks in 1..=MAX_RANKS {
            let places = Places { ranks };
            let mut starts: Vec<(usize, usize)> = Vec::new();
            starts.extend((0..ranks).map(|rank| (places.collective(rank), COLLECTIVE)));
            starts.extend((0..ranks).map(|rank| (places.sent(rank), SENT)));
            starts.extend((0..ranks).map(|rank| (places.taken(rank), TAKEN)));
            starts.push((places.rounds(), COUNTS));
            starts.extend((0..ranks).map(|rank| (places.sends(rank), COUNTS)));
            starts.extend((0..ranks).map(|rank| (places.receives(rank), COUNTS)));
            starts.extend((0..ranks).map(|rank| (places.direct(rank), DIRECT_BLOCKS * DIRECT)));
            starts.push((places.direct_counts(), DIRECT_BLOCKS * size_of::<u32>()));
            let mut end = 0;
            for (start, bytes) in starts {
                assert_eq!(start, end);
                assert!(start.is_multiple_of(PACKET));
                end = start + bytes;
            }
            // Parts are aligned to their size.
            assert!(places.parts(0) - end < PART_BYTES && places.parts(0).is_multiple_of(PART_BYTES));
            assert_eq!(places.parts(ranks), places.parts(0) + ranks * PART_BYTES);
            assert_eq!(places.results() - places.parts(0), RESULT_SETS * ranks * PART_BYTES);
            assert_eq!(places.bytes(), places.results() + size_of::<u32>());
        }
    }
}
