//! The ranks of a group that are threads of one process: their mailboxes, and how far they have come.

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

/// How long a rank waits on the host for those that it shares a device with.
const MEETING_TIMEOUT: Duration = Duration::from_secs(60);
/// How long it waits for the other end of a message: its sender computes what is in it.
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
    /// The collectives of all ranks that each rank has come to.
    reached: Vec<AtomicU64>,
    /// Those that each rank has enqueued.
    enqueued: Vec<AtomicU64>,
    /// The messages that each rank has come to send to each other one, by sender and receiver.
    offered: Vec<AtomicU64>,
    /// Those that it has enqueued.
    sent: Vec<AtomicU64>,
    /// The messages that each rank has come to receive, by sender and receiver.
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

    /// Forgets a group that all have joined, or will not.
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

    /// The count of a sender and a receiver.
    fn pair<'a>(&self, counts: &'a [AtomicU64], from: usize, to: usize) -> &'a AtomicU64 {
        &counts[from * self.ranks() + to]
    }

    /// Brings a rank together with those that it is about to exchange data with: they have come to their part too, and have loaded
    /// the kernels for it, which those that wait on a device may keep out.
    ///
    /// Along a chain of messages from lower ranks to higher ones, the first rank goes on when the last has come, and each of the
    /// others when the one before it has enqueued what it sends: no kernel waits for one that is yet to be loaded. No two ranks
    /// wait for each other, because a rank says first what it has come to; it only puts off saying that it awaits messages of lower ranks
    /// until higher ones await its own, and waits only for lower ones to enqueue.
    ///
    /// # Errors
    /// If a rank does not come in time, or the group fails, which `check` says.
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

    /// Waits until those whose data a rank waits for have enqueued their part.
    ///
    /// # Errors
    /// As [`Self::before`].
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
            // Only this rank counts what it awaits.
            let message = self.pair(&self.awaited, peer, rank).load(Ordering::Acquire);
            let sent = || self.pair(&self.sent, peer, rank).load(Ordering::Acquire) >= message;
            let missing = || (!sent()).then(|| format!("rank {peer}"));
            wait(MEETING_TIMEOUT, "to enqueue what it sends", missing, check)?;
        }
        let Some(first) = first else { return Ok(()) };
        wait(MEETING_TIMEOUT, "to enqueue a collective", || below(&self.enqueued, first), check)
    }
}

/// Names the ranks whose count is below a number, if there are any.
fn below(counts: &[AtomicU64], number: u64) -> Option<String> {
    let behind = |rank: &usize| counts[*rank].load(Ordering::Acquire) < number;
    let behind: Vec<String> = (0..counts.len()).filter(behind).map(|rank| format!("rank {rank}")).collect();
    (!behind.is_empty()).then(|| behind.join(", "))
}

/// Waits until there is nothing missing.
///
/// # Errors
/// If the group fails, or `timeout` passes; then says what is missing.
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
