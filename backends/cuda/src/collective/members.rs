//! The ranks of a group within one process: their mailboxes, and their progress.

use super::mailbox::Mailbox;
use crate::driver::rendezvous::Turn;
use dsrun_core::{Code, Error, Result, collective::GroupId};
use std::{
    collections::HashMap,
    sync::{
        Arc, LazyLock, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

/// How long a rank waits on the host for ranks that share its device.
const MEETING_TIMEOUT: Duration = Duration::from_secs(60);
/// How long it waits for the peer of a message, whose sender may first have to compute it.
const MESSAGE_TIMEOUT: Duration = Duration::from_secs(600);

/// The groups that ranks are still joining.
static JOINING: LazyLock<Mutex<HashMap<GroupId, Arc<Members>>>> = LazyLock::new(Mutex::default);

fn joining() -> MutexGuard<'static, HashMap<GroupId, Arc<Members>>> {
    JOINING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The members of a group.
#[derive(Debug)]
pub(super) struct Members {
    mailboxes: Mutex<Vec<Option<Arc<Mailbox>>>>,
    /// For each rank, the number of collectives that it has reached.
    reached: Vec<AtomicU64>,
    /// For each rank, the number of collectives that it has enqueued.
    enqueued: Vec<AtomicU64>,
    /// The number of messages that a rank has reached sending, by sender and receiver.
    offered: Vec<AtomicU64>,
    /// The number of messages that a rank has enqueued, by sender and receiver.
    sent: Vec<AtomicU64>,
    /// The number of messages that a rank has reached receiving, by sender and receiver.
    awaited: Vec<AtomicU64>,
}

impl Members {
    fn new(ranks: usize) -> Self {
        let counters = |count: usize| (0..count).map(|_| AtomicU64::new(0)).collect();
        Self {
            mailboxes: Mutex::new(vec![None; ranks]),
            reached: counters(ranks),
            enqueued: counters(ranks),
            offered: counters(ranks * ranks),
            sent: counters(ranks * ranks),
            awaited: counters(ranks * ranks),
        }
    }

    /// The members of a group that is being joined.
    pub(super) fn of_group(id: &GroupId, ranks: usize) -> Arc<Self> {
        joining().entry(*id).or_insert_with(|| Arc::new(Self::new(ranks))).clone()
    }

    /// Removes a group from the registry, when all ranks have joined it or joining has failed.
    pub(super) fn forget(id: &GroupId) {
        joining().remove(id);
    }

    fn locked(&self) -> MutexGuard<'_, Vec<Option<Arc<Mailbox>>>> {
        self.mailboxes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds the mailbox of a rank.
    pub(super) fn add(&self, rank: usize, mailbox: Arc<Mailbox>) {
        self.locked()[rank] = Some(mailbox);
    }

    /// The mailboxes of all ranks.
    ///
    /// # Errors
    /// If one is missing.
    pub(super) fn mailboxes(&self) -> Result<Vec<Arc<Mailbox>>> {
        let all: Option<Vec<_>> = self.locked().iter().cloned().collect();
        all.ok_or_else(|| Error::internal("a rank has added no mailbox to its group"))
    }

    fn ranks(&self) -> usize {
        self.reached.len()
    }

    /// The counter of a sender and a receiver.
    fn pair<'a>(&self, counts: &'a [AtomicU64], from: usize, to: usize) -> &'a AtomicU64 {
        &counts[from * self.ranks() + to]
    }

    /// Waits until the ranks that this rank is about to exchange data with have reached the same exchange and have loaded its
    /// kernels, which they could not do while a kernel of this rank waits on a shared device.
    ///
    /// Along a chain of messages from lower to higher ranks, the first rank continues when the last has arrived, and each other
    /// rank when its predecessor has enqueued its send, so no kernel waits for one that is not loaded yet. There is no deadlock:
    /// a rank announces what it has reached before it waits. Only the announcement that it awaits messages of lower ranks is
    /// delayed until higher ranks await its own messages, and it only waits for lower ranks to enqueue.
    ///
    /// # Errors
    /// If a rank does not arrive in time, or `check` reports that the group has failed.
    pub(super) fn before(&self, rank: usize, turns: &[Turn], check: &dyn Fn() -> Result<()>) -> Result<()> {
        let (mut first, mut sends, mut receives) = (None, Vec::new(), Vec::new());
        for turn in turns {
            match *turn {
                Turn::All => {
                    let number = self.reached[rank].fetch_add(1, Ordering::AcqRel) + 1;
                    first.get_or_insert(number);
                }
                Turn::Send(peer) => {
                    let count = self.pair(&self.offered, rank, peer);
                    sends.push((peer, count.fetch_add(1, Ordering::AcqRel) + 1));
                }
                Turn::Receive(peer) => receives.push(peer),
            }
        }
        let come_to_receive =
            |peer: usize| self.pair(&self.awaited, peer, rank).fetch_add(1, Ordering::AcqRel) + 1;
        let is_awaited = |(peer, message): (usize, u64)| {
            let awaited = || self.pair(&self.awaited, rank, peer).load(Ordering::Acquire) >= message;
            let missing = || (!awaited()).then(|| format!("rank {peer}"));
            wait(MESSAGE_TIMEOUT, "to come to what it receives", missing, check)
        };
        let (lower, higher): (Vec<usize>, Vec<usize>) = receives.into_iter().partition(|peer| *peer < rank);
        let higher: Vec<(usize, u64)> =
            higher.into_iter().map(|peer| (peer, come_to_receive(peer))).collect();
        sends.iter().filter(|(peer, _)| *peer > rank).try_for_each(|send| is_awaited(*send))?;
        let lower: Vec<(usize, u64)> = lower.into_iter().map(|peer| (peer, come_to_receive(peer))).collect();
        sends.iter().filter(|(peer, _)| *peer < rank).try_for_each(|send| is_awaited(*send))?;
        for (peer, message) in higher {
            let offered = || self.pair(&self.offered, peer, rank).load(Ordering::Acquire) >= message;
            let missing = || (!offered()).then(|| format!("rank {peer}"));
            wait(MESSAGE_TIMEOUT, "to come to what it sends", missing, check)?;
        }
        for (peer, message) in lower {
            let sent = || self.pair(&self.sent, peer, rank).load(Ordering::Acquire) >= message;
            let missing = || (!sent()).then(|| format!("rank {peer}"));
            wait(MESSAGE_TIMEOUT, "to enqueue what it sends", missing, check)?;
        }
        let Some(first) = first else { return Ok(()) };
        wait(MEETING_TIMEOUT, "to come to a collective", || below(&self.reached, first), check)
    }

    /// Waits until the ranks whose data this rank waits for have enqueued their part.
    ///
    /// # Errors
    /// Same as [`Self::before`].
    pub(super) fn after(&self, rank: usize, turns: &[Turn], check: &dyn Fn() -> Result<()>) -> Result<()> {
        let mut first = None;
        for turn in turns {
            match *turn {
                Turn::All => {
                    let number = self.enqueued[rank].fetch_add(1, Ordering::AcqRel) + 1;
                    first.get_or_insert(number);
                }
                Turn::Send(peer) => {
                    self.pair(&self.sent, rank, peer).fetch_add(1, Ordering::AcqRel);
                }
                Turn::Receive(_) => {}
            }
        }
        for turn in turns {
            let Turn::Receive(peer) = *turn else { continue };
            // Only this rank writes the counter of what it awaits.
            let message = self.pair(&self.awaited, peer, rank).load(Ordering::Acquire);
            let sent = || self.pair(&self.sent, peer, rank).load(Ordering::Acquire) >= message;
            let missing = || (!sent()).then(|| format!("rank {peer}"));
            wait(MEETING_TIMEOUT, "to enqueue what it sends", missing, check)?;
        }
        let Some(first) = first else { return Ok(()) };
        wait(MEETING_TIMEOUT, "to enqueue a collective", || below(&self.enqueued, first), check)
    }
}

/// Lists the ranks whose counter is below a number, if there are any.
fn below(counts: &[AtomicU64], number: u64) -> Option<String> {
    let behind = |rank: &usize| counts[*rank].load(Ordering::Acquire) < number;
    let behind: Vec<String> = (0..counts.len()).filter(behind).map(|rank| format!("rank {rank}")).collect();
    (!behind.is_empty()).then(|| behind.join(", "))
}

/// Waits until `missing` returns nothing.
///
/// # Errors
/// If the group fails, or after `timeout`; then names what is missing.
fn wait(
    timeout: Duration,
    what: &str,
    missing: impl Fn() -> Option<String>,
    check: &dyn Fn() -> Result<()>,
) -> Result<()> {
    let start = Instant::now();
    loop {
        let Some(missing) = missing() else { return Ok(()) };
        let waited = start.elapsed();
        if waited < Duration::from_micros(50) {
            std::hint::spin_loop();
            continue;
        }
        check()?;
        if waited > timeout {
            let message = format!("waited {waited:.1?} for {missing} {what}");
            return Err(Error::new(Code::Timeout, message));
        }
        thread::sleep(Duration::from_micros(20));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STEPS: usize = 300;

    fn fine() -> Result<()> {
        Ok(())
    }

    /// Runs ranks that go through the same steps. Calls `ready` with a rank, a step and the steps that all ranks have enqueued when the
    /// rank may enqueue, and `seen` when it goes on to the next step.
    fn run(
        turns: &[&[Turn]],
        ready: impl Fn(usize, usize, &[AtomicU64]) + Sync,
        seen: impl Fn(usize, usize, &[AtomicU64]) + Sync,
    ) {
        let members = Members::new(turns.len());
        let enqueued: Vec<AtomicU64> = turns.iter().map(|_| AtomicU64::new(0)).collect();
        let (members, enqueued, ready, seen) = (&members, &enqueued, &ready, &seen);
        thread::scope(|scope| {
            for (rank, turns) in turns.iter().enumerate() {
                scope.spawn(move || {
                    for step in 0..STEPS {
                        thread::sleep(Duration::from_micros((step * 13 + rank * 29) as u64 % 60));
                        members.before(rank, turns, &fine).unwrap();
                        ready(rank, step, enqueued);
                        enqueued[rank].store(step as u64 + 1, Ordering::SeqCst);
                        members.after(rank, turns, &fine).unwrap();
                        seen(rank, step, enqueued);
                    }
                });
            }
        });
    }

    #[test]
    fn ranks_go_on_when_all_have_enqueued_a_collective() {
        let all: &[Turn] = &[Turn::All, Turn::All];
        let seen = |_, step: usize, enqueued: &[AtomicU64]| {
            let counts: Vec<u64> = enqueued.iter().map(|count| count.load(Ordering::SeqCst)).collect();
            // The others have, and may have gone one step further.
            assert!(
                counts.iter().all(|count| (step as u64 + 1..=step as u64 + 2).contains(count)),
                "{counts:?}"
            );
        };
        run(&[all; 4], |_, _, _| {}, seen);
    }

    /// What has been enqueued by a rank.
    fn steps(enqueued: &[AtomicU64], rank: usize) -> usize {
        enqueued[rank].load(Ordering::SeqCst) as usize
    }

    #[test]
    fn a_stage_enqueues_behind_the_one_before_it_when_the_last_is_ready() {
        let stages: [&[Turn]; 3] = [
            &[Turn::Send(1), Turn::Send(1)],
            &[Turn::Receive(0), Turn::Send(2), Turn::Receive(0)],
            &[Turn::Receive(1)],
        ];
        let ready = |rank: usize, step: usize, enqueued: &[AtomicU64]| {
            if let Some(before) = rank.checked_sub(1) {
                let sent = steps(enqueued, before);
                assert!(sent > step, "rank {rank} is to receive in step {step} what was not sent: {sent}");
            }
            // A stage that is still in the step before has yet to load kernels.
            for later in rank + 1..3 {
                let ended = steps(enqueued, later);
                assert!(ended + 1 > step, "rank {later} is {} steps behind rank {rank}", step - ended);
            }
        };
        run(&stages, ready, |_, _, _| {});
    }

    #[test]
    fn ranks_that_exchange_messages_in_turn_do_not_wait_in_circles() {
        let pair: [&[Turn]; 2] = [&[Turn::Send(1), Turn::Receive(1)], &[Turn::Receive(0), Turn::Send(0)]];
        run(&pair, |_, _, _| {}, |_, _, _| {});
        let ring: [&[Turn]; 4] = [
            &[Turn::Send(1), Turn::Receive(3)],
            &[Turn::Send(2), Turn::Receive(0)],
            &[Turn::Send(3), Turn::Receive(1)],
            &[Turn::Send(0), Turn::Receive(2)],
        ];
        run(&ring, |_, _, _| {}, |_, _, _| {});
    }

    #[test]
    fn a_wait_ends_with_what_is_missing_or_why_the_group_failed() {
        let error = wait(Duration::ZERO, "to come", || Some("rank 1".into()), &fine).unwrap_err();
        assert_eq!(error.code(), Code::Timeout);
        assert!(error.message().contains("for rank 1 to come"), "{error}");
        let failed = || Err(Error::new(Code::Communication, "over"));
        let members = Members::new(3);
        let error = members.before(1, &[Turn::All], &failed).unwrap_err();
        assert_eq!(error.message(), "over");
        assert_eq!(below(&members.reached, 1).as_deref(), Some("rank 0, rank 2"));
    }
}
