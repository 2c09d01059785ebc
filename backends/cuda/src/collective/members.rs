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

    /// Brings a rank together with those that it is about to exchange data with: they have come to their part too.
    ///
    /// # Errors
    /// If a rank does not come in time, or the group fails, which `check` says.
    pub(super) fn before(&self, rank: usize, turns: &[Turn], check: &dyn Fn() -> Result<()>) -> Result<()> {
        // This rank says first what it has come to, so that no two wait for each other.
        let mut first = None;
        let (mut sends, mut receives) = (Vec::new(), Vec::new());
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
                Turn::Receive(peer) => {
                    let count = self.pair(&self.awaited, peer, rank);
                    receives.push((peer, count.fetch_add(1, Ordering::AcqRel) + 1));
                }
            }
        }
        for (peer, message) in sends {
            let awaited = || self.pair(&self.awaited, rank, peer).load(Ordering::Acquire) >= message;
            let missing = || (!awaited()).then(|| format!("rank {peer}"));
            wait(MESSAGE_TIMEOUT, "to come to what it receives", missing, check)?;
        }
        for (peer, message) in receives {
            let offered = || self.pair(&self.offered, peer, rank).load(Ordering::Acquire) >= message;
            let missing = || (!offered()).then(|| format!("rank {peer}"));
            wait(MESSAGE_TIMEOUT, "to come to what it sends", missing, check)?;
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

    /// Runs ranks that go through the same steps, and notes who has enqueued what when another one goes on.
    fn run(turns: &[&[Turn]], seen: impl Fn(usize, usize, &[AtomicU64]) + Sync) {
        let members = Members::new(turns.len());
        let enqueued: Vec<AtomicU64> = turns.iter().map(|_| AtomicU64::new(0)).collect();
        let (members, enqueued, seen) = (&members, &enqueued, &seen);
        thread::scope(|scope| {
            for (rank, turns) in turns.iter().enumerate() {
                scope.spawn(move || {
                    for step in 0..STEPS {
                        thread::sleep(Duration::from_micros((step * 13 + rank * 29) as u64 % 60));
                        members.before(rank, turns, &fine).unwrap();
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
        run(&[all; 4], |_, step, enqueued| {
            let counts: Vec<u64> = enqueued.iter().map(|count| count.load(Ordering::SeqCst)).collect();
            // The others have, and may have gone one step further.
            assert!(
                counts.iter().all(|count| (step as u64 + 1..=step as u64 + 2).contains(count)),
                "{counts:?}"
            );
        });
    }

    #[test]
    fn stages_that_receive_and_send_in_one_step_do_not_wait_in_circles() {
        let stages: [&[Turn]; 3] = [
            &[Turn::Send(1), Turn::Send(1)],
            &[Turn::Receive(0), Turn::Send(2), Turn::Receive(0)],
            &[Turn::Receive(1)],
        ];
        run(&stages, |rank, step, enqueued| {
            if let Some(before) = rank.checked_sub(1) {
                let sent = enqueued[before].load(Ordering::SeqCst);
                assert!(sent > step as u64, "rank {rank} received in step {step} what was not sent: {sent}");
            }
        });
    }

    #[test]
    fn ranks_that_exchange_messages_in_turn_do_not_wait_in_circles() {
        run(&[&[Turn::Send(1), Turn::Receive(1)], &[Turn::Receive(0), Turn::Send(0)]], |_, _, _| {});
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
