//! Collectives over threads of one process, through host memory.
//!
//! Every collective is built on one exchange: each rank lays down its bytes with a label of what it is doing, waits until
//! all have, and reads what it needs. Reductions combine the ranks in their order in f32, so every rank gets the same
//! bits. A rank that does something else, comes too late or aborts fails the whole group, with a message that names it.

use super::{Collective, Comm, GroupId};
use crate::{Code, DType, Error, Result, op::Reduction};
use std::{
    collections::HashMap,
    sync::{
        Arc, Condvar, LazyLock, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

/// How long a collective waits for the other ranks.
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(60);

/// Groups whose ranks are still gathering.
static GATHERING: LazyLock<Mutex<HashMap<GroupId, Arc<Group>>>> = LazyLock::new(Mutex::default);

/// Host collectives within this process.
#[derive(Debug, Default)]
pub struct HostCollective;

impl Collective for HostCollective {
    fn group_id(&self) -> Result<GroupId> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let mut id = [0; 128];
        id[..8].copy_from_slice(&NEXT.fetch_add(1, Ordering::Relaxed).to_le_bytes());
        Ok(GroupId(id))
    }

    fn join(&self, id: &GroupId, rank: usize, ranks: usize, timeout: Duration) -> Result<Arc<dyn Comm>> {
        HostComm::join(id, rank, ranks, timeout).map(|comm| Arc::new(comm) as Arc<dyn Comm>)
    }
}

/// Collectives over memory of the host, by other means than threads of this copy of the crate: what a plugin is given by
/// the program it is loaded into. The methods mean what those of [`HostComm`] do.
#[allow(missing_docs, reason = "documented at HostComm")]
#[allow(clippy::missing_errors_doc, reason = "documented at HostComm")]
pub trait HostTransport: Send + Sync + std::fmt::Debug {
    fn all_reduce(&self, bytes: &mut [u8], dtype: DType, reduction: Reduction) -> Result<()>;
    fn reduce_scatter(
        &self,
        source: &[u8],
        destination: &mut [u8],
        dtype: DType,
        reduction: Reduction,
    ) -> Result<()>;
    /// `destination` takes the bytes of every rank, in the order of ranks.
    fn all_gather(&self, source: &[u8], destination: &mut [u8]) -> Result<()>;
    fn all_to_all(&self, source: &[u8], destination: &mut [u8]) -> Result<()>;
    fn broadcast(&self, bytes: &mut [u8], root: usize) -> Result<()>;
    fn barrier(&self) -> Result<()>;
    fn send(&self, bytes: &[u8], peer: usize) -> Result<()>;
    fn receive(&self, bytes: &mut [u8], peer: usize) -> Result<()>;
    fn status(&self) -> Result<()>;
    fn abort(&self, reason: &str);
}

/// A rank of a group of threads, or of a group that another [`HostTransport`] reaches.
#[derive(Debug)]
pub struct HostComm {
    group: Arc<Group>,
    rank: usize,
    timeout: Duration,
    /// Does everything, if there; `group` then only knows how many ranks there are.
    transport: Option<Box<dyn HostTransport>>,
}

#[derive(Debug)]
struct Group {
    ranks: usize,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    joined: Vec<bool>,
    failure: Option<Error>,
    /// Counts exchanges. A rank that finished round `n` may enter round `n + 1` only when all have left `n`.
    round: u64,
    deposits: Vec<Option<Deposit>>,
    left: usize,
    messages: HashMap<(usize, usize), std::collections::VecDeque<Deposit>>,
}

#[derive(Clone, Debug)]
struct Deposit {
    label: String,
    bytes: Arc<[u8]>,
}

impl Group {
    fn lock(&self) -> MutexGuard<'_, State> {
        // A rank that panicked while it held the lock has failed; the others see that by their timeouts.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until `ready`, the group fails, or time runs out.
    fn wait<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        timeout: Duration,
        what: &str,
        ready: impl Fn(&State) -> bool,
        missing: impl Fn(&State) -> String,
    ) -> Result<MutexGuard<'a, State>> {
        // None if the limit is further off than the clock can say.
        let deadline = Instant::now().checked_add(timeout);
        loop {
            if let Some(failure) = &state.failure {
                return Err(failure.clone());
            }
            if ready(&state) {
                return Ok(state);
            }
            let left =
                deadline.map_or(timeout, |deadline| deadline.saturating_duration_since(Instant::now()));
            if left.is_zero() {
                let message = format!("{what} waited {timeout:?} for {}", missing(&state));
                let error = Error::new(Code::Timeout, message);
                state.failure = Some(error.clone());
                self.changed.notify_all();
                return Err(error);
            }
            state = self
                .changed
                .wait_timeout(state, left)
                .map_or_else(|poisoned| poisoned.into_inner().0, |(state, _)| state);
        }
    }
}

fn ranks_without(present: impl Iterator<Item = bool>) -> String {
    let missing: Vec<String> =
        present.enumerate().filter(|(_, present)| !present).map(|(rank, _)| rank.to_string()).collect();
    format!("rank {}", missing.join(", "))
}

impl HostComm {
    /// Makes a whole group at once, one member per rank.
    ///
    /// # Errors
    /// If `ranks` is 0.
    pub fn group(ranks: usize) -> Result<Vec<Self>> {
        if ranks == 0 {
            return Err(Error::invalid("is 0, must be at least 1").at("ranks"));
        }
        let group = Arc::new(Group::new(ranks));
        Ok((0..ranks)
            .map(|rank| Self { group: group.clone(), rank, timeout: DEFAULT_TIMEOUT, transport: None })
            .collect())
    }

    /// Joins a group as [`Collective::join`] does.
    ///
    /// # Errors
    /// As there.
    pub fn join(id: &GroupId, rank: usize, ranks: usize, timeout: Duration) -> Result<Self> {
        if rank >= ranks {
            return Err(Error::invalid(format!("is {rank}, must be below {ranks}")).at("rank"));
        }
        let mut gathering = GATHERING.lock().unwrap_or_else(PoisonError::into_inner);
        let group = gathering.entry(*id).or_insert_with(|| Arc::new(Group::new(ranks))).clone();
        if group.ranks != ranks {
            return Err(Error::invalid(format!("is {ranks}, other ranks said {}", group.ranks)).at("ranks"));
        }
        let mut state = group.lock();
        if std::mem::replace(&mut state.joined[rank], true) {
            return Err(Error::invalid(format!("{rank} has joined already")).at("rank"));
        }
        if state.joined.iter().all(|joined| *joined) {
            gathering.remove(id);
        }
        drop(gathering);
        group.changed.notify_all();
        let all = |state: &State| state.joined.iter().all(|joined| *joined);
        let missing = |state: &State| ranks_without(state.joined.iter().copied());
        let waited = group.wait(state, timeout, "joining a group", all, missing).map(drop);
        if let Err(error) = waited {
            GATHERING.lock().unwrap_or_else(PoisonError::into_inner).remove(id);
            return Err(error);
        }
        Ok(Self { group, rank, timeout: DEFAULT_TIMEOUT, transport: None })
    }

    /// A rank of a group that a transport reaches, which also decides how long to wait.
    ///
    /// # Errors
    /// If there is no such rank.
    pub fn over(transport: Box<dyn HostTransport>, rank: usize, ranks: usize) -> Result<Self> {
        if rank >= ranks {
            return Err(Error::invalid(format!("is {rank}, must be below {ranks}")).at("rank"));
        }
        let group = Arc::new(Group { ranks, state: Mutex::default(), changed: Condvar::new() });
        Ok(Self { group, rank, timeout: DEFAULT_TIMEOUT, transport: Some(transport) })
    }

    /// The same membership with another limit on how long a collective waits.
    #[must_use]
    pub fn with_timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Lays down `bytes`, and gives what every rank laid down, in the order of ranks.
    fn exchange(&self, label: String, bytes: &[u8]) -> Result<Vec<Arc<[u8]>>> {
        let group = &*self.group;
        let state = group.lock();
        // The slot is still taken while slower ranks read the round before.
        let free = |state: &State| state.deposits[self.rank].is_none();
        let busy = |_: &State| "the ranks of the collective before".to_owned();
        let mut state = group.wait(state, self.timeout, &label, free, busy)?;
        let round = state.round;
        state.deposits[self.rank] = Some(Deposit { label: label.clone(), bytes: bytes.into() });
        group.changed.notify_all();
        let all = |state: &State| state.round != round || state.deposits.iter().all(Option::is_some);
        let missing = |state: &State| ranks_without(state.deposits.iter().map(Option::is_some));
        let mut state = group.wait(state, self.timeout, &label, all, missing)?;
        let deposits: Vec<Deposit> = state.deposits.iter().flatten().cloned().collect();
        if let Some((rank, other)) = deposits.iter().enumerate().find(|(_, deposit)| deposit.label != label) {
            let message = format!("rank {} does {label}, but rank {rank} does {}", self.rank, other.label);
            let error = Error::new(Code::Communication, message);
            state.failure = Some(error.clone());
            group.changed.notify_all();
            return Err(error);
        }
        state.left += 1;
        if state.left == group.ranks {
            state.left = 0;
            state.round += 1;
            state.deposits.fill(None);
            group.changed.notify_all();
        }
        Ok(deposits.into_iter().map(|deposit| deposit.bytes).collect())
    }

    /// Reduces `bytes` over all ranks, in place.
    ///
    /// # Errors
    /// If ranks disagree, time runs out, or the group was aborted.
    pub fn all_reduce(&self, bytes: &mut [u8], dtype: DType, reduction: Reduction) -> Result<()> {
        if let Some(transport) = &self.transport {
            return transport.all_reduce(bytes, dtype, reduction);
        }
        let parts = self.exchange(format!("all_reduce of {} {dtype} bytes", bytes.len()), bytes)?;
        reduce(bytes, &parts, 0, dtype, reduction)
    }

    /// Reduces the same range of every rank's `source` into `destination`: the one that starts at this rank's share.
    ///
    /// # Errors
    /// As [`Self::all_reduce`], or if the lengths do not fit.
    pub fn reduce_scatter(
        &self,
        source: &[u8],
        destination: &mut [u8],
        dtype: DType,
        reduction: Reduction,
    ) -> Result<()> {
        if destination.len().checked_mul(self.group.ranks) != Some(source.len()) {
            return Err(Error::invalid("source is not as long as all ranks' shares"));
        }
        if let Some(transport) = &self.transport {
            return transport.reduce_scatter(source, destination, dtype, reduction);
        }
        let parts = self.exchange(format!("reduce_scatter of {} {dtype} bytes", source.len()), source)?;
        let offset = self.rank * destination.len();
        reduce(destination, &parts, offset, dtype, reduction)
    }

    /// Every rank's bytes, in the order of ranks.
    ///
    /// # Errors
    /// As [`Self::all_reduce`].
    pub fn all_gather(&self, bytes: &[u8]) -> Result<Vec<Arc<[u8]>>> {
        if let Some(transport) = &self.transport {
            let length = bytes.len().checked_mul(self.group.ranks);
            let mut all = vec![0; length.ok_or_else(|| Error::invalid("all ranks' bytes overflow"))?];
            transport.all_gather(bytes, &mut all)?;
            let rank = |rank: usize| all[rank * bytes.len()..][..bytes.len()].into();
            return Ok((0..self.group.ranks).map(rank).collect());
        }
        self.exchange(format!("all_gather of {} bytes", bytes.len()), bytes)
    }

    /// Block `j` of this rank's `source` goes to rank `j`; block `j` of `destination` comes from rank `j`.
    ///
    /// # Errors
    /// As [`Self::all_reduce`], or if the lengths do not fit.
    pub fn all_to_all(&self, source: &[u8], destination: &mut [u8]) -> Result<()> {
        if source.len() != destination.len() || !source.len().is_multiple_of(self.group.ranks) {
            return Err(Error::invalid("blocks of all_to_all are not equally long"));
        }
        if let Some(transport) = &self.transport {
            return transport.all_to_all(source, destination);
        }
        let parts = self.exchange(format!("all_to_all of {} bytes", source.len()), source)?;
        let block = source.len() / self.group.ranks;
        if block > 0 {
            for (part, out) in parts.iter().zip(destination.chunks_exact_mut(block)) {
                out.copy_from_slice(&part[self.rank * block..][..block]);
            }
        }
        Ok(())
    }

    /// Gives every rank the bytes of `root`, in place.
    ///
    /// # Errors
    /// As [`Self::all_reduce`], or if there is no rank `root`.
    pub fn broadcast(&self, bytes: &mut [u8], root: usize) -> Result<()> {
        if root >= self.group.ranks {
            return Err(Error::invalid(format!("is {root}, must be below {}", self.group.ranks)).at("root"));
        }
        if let Some(transport) = &self.transport {
            return transport.broadcast(bytes, root);
        }
        let own: &[u8] = if self.rank == root { bytes } else { &[] };
        let parts = self.exchange(format!("broadcast of {} bytes from rank {root}", bytes.len()), own)?;
        bytes.copy_from_slice(&parts[root]);
        Ok(())
    }

    /// Waits until all ranks are here.
    ///
    /// # Errors
    /// As [`Self::all_reduce`].
    pub fn barrier(&self) -> Result<()> {
        if let Some(transport) = &self.transport {
            return transport.barrier();
        }
        self.exchange("barrier".into(), &[]).map(drop)
    }

    /// Sends bytes to a rank. Does not wait for it.
    ///
    /// # Errors
    /// If there is no such rank or the group has failed.
    pub fn send(&self, bytes: &[u8], peer: usize) -> Result<()> {
        self.check_peer(peer)?;
        if let Some(transport) = &self.transport {
            return transport.send(bytes, peer);
        }
        let mut state = self.group.lock();
        if let Some(failure) = &state.failure {
            return Err(failure.clone());
        }
        let deposit = Deposit { label: "send".into(), bytes: bytes.into() };
        state.messages.entry((self.rank, peer)).or_default().push_back(deposit);
        self.group.changed.notify_all();
        Ok(())
    }

    /// Receives what a rank sends. Messages of one sender come in order.
    ///
    /// # Errors
    /// If there is no such rank, its message has another length, or as [`Self::all_reduce`].
    pub fn receive(&self, bytes: &mut [u8], peer: usize) -> Result<()> {
        self.check_peer(peer)?;
        if let Some(transport) = &self.transport {
            return transport.receive(bytes, peer);
        }
        let key = (peer, self.rank);
        let there = |state: &State| state.messages.get(&key).is_some_and(|queue| !queue.is_empty());
        let missing = |_: &State| format!("a message of rank {peer}");
        let mut state = self.group.wait(self.group.lock(), self.timeout, "receive", there, missing)?;
        let message = state.messages.get_mut(&key).and_then(std::collections::VecDeque::pop_front);
        let message = message.ok_or_else(|| Error::internal("a message vanished"))?;
        if message.bytes.len() != bytes.len() {
            let text = format!("rank {peer} sent {} bytes, {} expected", message.bytes.len(), bytes.len());
            return Err(Error::new(Code::Communication, text));
        }
        bytes.copy_from_slice(&message.bytes);
        Ok(())
    }

    fn check_peer(&self, peer: usize) -> Result<()> {
        if peer < self.group.ranks && peer != self.rank {
            return Ok(());
        }
        let message = format!("is {peer}, must be another rank below {}", self.group.ranks);
        Err(Error::invalid(message).at("peer"))
    }
}

impl Group {
    fn new(ranks: usize) -> Self {
        let state = State { joined: vec![false; ranks], deposits: vec![None; ranks], ..State::default() };
        Self { ranks, state: Mutex::new(state), changed: Condvar::new() }
    }
}

impl Comm for HostComm {
    fn rank(&self) -> usize {
        self.rank
    }

    fn ranks(&self) -> usize {
        self.group.ranks
    }

    fn status(&self) -> Result<()> {
        if let Some(transport) = &self.transport {
            return transport.status();
        }
        self.group.lock().failure.clone().map_or(Ok(()), Err)
    }

    fn abort(&self, reason: &str) {
        if let Some(transport) = &self.transport {
            return transport.abort(reason);
        }
        let mut state = self.group.lock();
        let message = format!("rank {} aborted: {reason}", self.rank);
        state.failure.get_or_insert_with(|| Error::new(Code::Communication, message));
        self.group.changed.notify_all();
    }
}

/// Combines the bytes at `offset` of all parts into `out`, element by element, in the order of ranks.
fn reduce(
    out: &mut [u8],
    parts: &[Arc<[u8]>],
    offset: usize,
    dtype: DType,
    reduction: Reduction,
) -> Result<()> {
    let parts: Vec<&[u8]> = parts.iter().map(|part| &part[offset..][..out.len()]).collect();
    match dtype {
        DType::F32 => combine(out, &parts, f32::from_le_bytes, f32::to_le_bytes, &float(reduction)),
        DType::F16 => combine(
            out,
            &parts,
            |bytes| half::f16::from_le_bytes(bytes).to_f32(),
            |x| half::f16::from_f32(x).to_le_bytes(),
            &float(reduction),
        ),
        DType::BF16 => combine(
            out,
            &parts,
            |bytes| half::bf16::from_le_bytes(bytes).to_f32(),
            |x| half::bf16::from_f32(x).to_le_bytes(),
            &float(reduction),
        ),
        DType::I32 => {
            let whole = whole(reduction)?;
            combine(out, &parts, |b| i64::from(i32::from_le_bytes(b)), |x| (x as i32).to_le_bytes(), &whole);
        }
        DType::U32 => {
            let whole = whole(reduction)?;
            combine(out, &parts, |b| i64::from(u32::from_le_bytes(b)), |x| (x as u32).to_le_bytes(), &whole);
        }
        DType::I8 => {
            combine(out, &parts, |[b]: [u8; 1]| i64::from(b as i8), |x| [x as i8 as u8], &whole(reduction)?);
        }
        DType::U8 => combine(out, &parts, |[b]: [u8; 1]| i64::from(b), |x| [x as u8], &whole(reduction)?),
    }
    Ok(())
}

fn float(reduction: Reduction) -> impl Fn(&mut dyn Iterator<Item = f32>) -> f32 {
    move |ranks| match reduction {
        Reduction::Sum => ranks.sum(),
        Reduction::Max => ranks.fold(f32::NEG_INFINITY, f32::max),
        Reduction::Min => ranks.fold(f32::INFINITY, f32::min),
        Reduction::Mean => {
            let (sum, count) = ranks.fold((0.0, 0.0), |(sum, count), x| (sum + x, count + 1.0));
            sum / count
        }
    }
}

fn whole(reduction: Reduction) -> Result<impl Fn(&mut dyn Iterator<Item = i64>) -> i64> {
    if reduction == Reduction::Mean {
        return Err(Error::invalid("cannot be the mean of integers").at("reduction"));
    }
    Ok(move |ranks: &mut dyn Iterator<Item = i64>| match reduction {
        Reduction::Max => ranks.max().unwrap_or(0),
        Reduction::Min => ranks.min().unwrap_or(0),
        Reduction::Sum | Reduction::Mean => ranks.fold(0, i64::wrapping_add),
    })
}

fn combine<const N: usize, T>(
    out: &mut [u8],
    parts: &[&[u8]],
    read: impl Fn([u8; N]) -> T,
    write: impl Fn(T) -> [u8; N],
    fold: &impl Fn(&mut dyn Iterator<Item = T>) -> T,
) {
    for (index, out) in out.as_chunks_mut::<N>().0.iter_mut().enumerate() {
        let mut ranks =
            parts.iter().filter_map(|part| part.as_chunks::<N>().0.get(index)).map(|bytes| read(*bytes));
        *out = write(fold(&mut ranks));
    }
}

#[cfg(test)]
mod tests;
