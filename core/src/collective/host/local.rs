//! Groups of threads of this process.
//!
//! Every collective is one exchange: each rank deposits its bytes, labelled with the collective it runs, waits until all ranks
//! have, and reads the deposits it needs.

use super::{
    super::GroupId, HostTransport, MESSAGE_PATIENCE, concatenate, missing_ranks, monitor::Monitor,
    reduce::reduce,
};
use crate::{Code, DType, Error, Result, op::Reduction};
use std::{
    collections::{HashMap, VecDeque},
    sync::{Arc, LazyLock, Mutex, PoisonError},
    time::Duration,
};

/// The groups that ranks are still joining.
static JOINING: LazyLock<Mutex<HashMap<GroupId, Arc<Group>>>> = LazyLock::new(Mutex::default);

#[derive(Debug)]
struct Group {
    ranks: usize,
    state: Monitor<State>,
}

impl Group {
    fn new(ranks: usize) -> Self {
        let state = State { joined: vec![false; ranks], deposits: vec![None; ranks], ..State::default() };
        Self { ranks, state: Monitor::new(state) }
    }
}

#[derive(Debug, Default)]
struct State {
    joined: Vec<bool>,
    /// The number of completed exchanges. A rank may start one only after all ranks have left the previous one.
    round: u64,
    deposits: Vec<Option<Deposit>>,
    /// The number of ranks that have left the exchange.
    left: usize,
    /// Messages not received yet, by sender and receiver.
    messages: HashMap<(usize, usize), VecDeque<Arc<[u8]>>>,
}

/// The contribution of a rank to an exchange.
#[derive(Clone, Debug)]
struct Deposit {
    label: String,
    bytes: Arc<[u8]>,
}

/// A rank of a group of threads.
#[derive(Debug)]
pub(super) struct LocalRank {
    group: Arc<Group>,
    rank: usize,
    timeout: Duration,
}

impl LocalRank {
    /// All ranks of a new group.
    pub(super) fn group(ranks: usize) -> Vec<Self> {
        let group = Arc::new(Group::new(ranks));
        (0..ranks).map(|rank| Self::new(&group, rank)).collect()
    }

    fn new(group: &Arc<Group>, rank: usize) -> Self {
        Self { group: group.clone(), rank, timeout: super::DEFAULT_TIMEOUT }
    }

    pub(super) fn join(id: &GroupId, rank: usize, ranks: usize, timeout: Duration) -> Result<Self> {
        let mut joining = JOINING.lock().unwrap_or_else(PoisonError::into_inner);
        let group = joining.entry(*id).or_insert_with(|| Arc::new(Group::new(ranks))).clone();
        if group.ranks != ranks {
            let message = format!("is {ranks}, but other ranks joined a group of {}", group.ranks);
            return Err(Error::invalid(message).at("ranks"));
        }
        let mut state = group.state.lock();
        if std::mem::replace(&mut state.joined[rank], true) {
            return Err(Error::invalid(format!("is {rank}, which has already joined")).at("rank"));
        }
        if state.joined.iter().all(|joined| *joined) {
            joining.remove(id);
        }
        drop(joining);
        group.state.notify();
        let all = |state: &mut State| Ok(state.joined.iter().all(|joined| *joined).then_some(()));
        let missing = |state: &State| missing_ranks("rank", state.joined.iter().copied());
        let waited = group.state.wait(state, timeout, "joining a group", all, missing).map(drop);
        if let Err(error) = waited {
            JOINING.lock().unwrap_or_else(PoisonError::into_inner).remove(id);
            return Err(error);
        }
        Ok(Self::new(&group, rank))
    }

    pub(super) fn set_timeout(&mut self, timeout: Duration) {
        self.timeout = timeout;
    }

    /// The bytes of every rank, in the order of ranks.
    pub(super) fn gather(&self, bytes: &[u8]) -> Result<Vec<Arc<[u8]>>> {
        self.exchange(format!("all_gather of {} bytes", bytes.len()), bytes)
    }

    /// Deposits `bytes`, and returns the deposits of all ranks in the order of ranks.
    fn exchange(&self, label: String, bytes: &[u8]) -> Result<Vec<Arc<[u8]>>> {
        let shared = &self.group.state;
        // The slot is occupied while slower ranks read the deposits of the previous exchange.
        let free = |state: &mut State| Ok(state.deposits[self.rank].is_none().then_some(()));
        let busy = |_: &State| "the ranks of the previous collective".to_owned();
        let (mut state, ()) = shared.wait(shared.lock(), self.timeout, &label, free, busy)?;
        let round = state.round;
        state.deposits[self.rank] = Some(Deposit { label: label.clone(), bytes: bytes.into() });
        shared.notify();
        let all = |state: &mut State| {
            Ok((state.round != round || state.deposits.iter().all(Option::is_some)).then_some(()))
        };
        let missing = |state: &State| missing_ranks("rank", state.deposits.iter().map(Option::is_some));
        let (mut state, ()) = shared.wait(state, self.timeout, &label, all, missing)?;
        let deposits: Vec<Deposit> = state.deposits.iter().flatten().cloned().collect();
        if let Some((rank, other)) = deposits.iter().enumerate().find(|(_, deposit)| deposit.label != label) {
            let message = format!("rank {} runs {label}, but rank {rank} runs {}", self.rank, other.label);
            return Err(shared.fail(state, Error::new(Code::Communication, message)));
        }
        state.left += 1;
        if state.left == self.group.ranks {
            state.left = 0;
            state.round += 1;
            state.deposits.fill(None);
            shared.notify();
        }
        Ok(deposits.into_iter().map(|deposit| deposit.bytes).collect())
    }
}

impl HostTransport for LocalRank {
    fn all_reduce(&self, bytes: &mut [u8], dtype: DType, reduction: Reduction) -> Result<()> {
        let parts = self.exchange(format!("all_reduce of {} {dtype} bytes", bytes.len()), bytes)?;
        reduce(bytes, &parts, 0, dtype, reduction)
    }

    fn reduce_scatter(
        &self,
        source: &[u8],
        destination: &mut [u8],
        dtype: DType,
        reduction: Reduction,
    ) -> Result<()> {
        let parts = self.exchange(format!("reduce_scatter of {} {dtype} bytes", source.len()), source)?;
        let offset = self.rank * destination.len();
        reduce(destination, &parts, offset, dtype, reduction)
    }

    fn all_gather(&self, source: &[u8], destination: &mut [u8]) -> Result<()> {
        concatenate(&self.gather(source)?, destination);
        Ok(())
    }

    fn all_to_all(&self, source: &[u8], destination: &mut [u8]) -> Result<()> {
        let parts = self.exchange(format!("all_to_all of {} bytes", source.len()), source)?;
        let block = source.len() / self.group.ranks;
        if block > 0 {
            for (part, out) in parts.iter().zip(destination.chunks_exact_mut(block)) {
                out.copy_from_slice(&part[self.rank * block..][..block]);
            }
        }
        Ok(())
    }

    fn broadcast(&self, bytes: &mut [u8], root: usize) -> Result<()> {
        let own: &[u8] = if self.rank == root { bytes } else { &[] };
        let parts = self.exchange(format!("broadcast of {} bytes from rank {root}", bytes.len()), own)?;
        bytes.copy_from_slice(&parts[root]);
        Ok(())
    }

    fn barrier(&self) -> Result<()> {
        self.exchange("barrier".into(), &[]).map(drop)
    }

    fn send(&self, bytes: &[u8], peer: usize) -> Result<()> {
        let mut state = self.group.state.lock();
        if let Some(failure) = state.failure() {
            return Err(failure.clone());
        }
        state.messages.entry((self.rank, peer)).or_default().push_back(bytes.into());
        self.group.state.notify();
        Ok(())
    }

    fn receive(&self, bytes: &mut [u8], peer: usize) -> Result<()> {
        let key = (peer, self.rank);
        let arrived = |state: &mut State| Ok(state.messages.get_mut(&key).and_then(VecDeque::pop_front));
        let missing = |_: &State| format!("a message of rank {peer}");
        let message = self.group.state.take(
            self.timeout.saturating_mul(MESSAGE_PATIENCE),
            "receive",
            arrived,
            missing,
        )?;
        if message.len() != bytes.len() {
            let text = format!("rank {peer} sent {} bytes, expected {}", message.len(), bytes.len());
            return Err(Error::new(Code::Communication, text));
        }
        bytes.copy_from_slice(&message);
        Ok(())
    }

    fn status(&self) -> Result<()> {
        self.group.state.lock().failure().cloned().map_or(Ok(()), Err)
    }

    fn abort(&self, reason: &str) {
        let message = format!("rank {} aborted: {reason}", self.rank);
        let shared = &self.group.state;
        drop(shared.fail(shared.lock(), Error::new(Code::Communication, message)));
    }
}
