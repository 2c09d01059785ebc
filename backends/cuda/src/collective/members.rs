//! The ranks of a group that are threads of one process: their mailboxes, and how far they have come.

use super::mailbox::Mailbox;
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
    /// The messages that each rank has enqueued for each other one, by sender and receiver.
    sent: Vec<AtomicU64>,
    /// The messages that each rank has come to receive, by sender and receiver.
    received: Vec<AtomicU64>,
}

impl Members {
    fn new(ranks: usize) -> Self {
        let counters = |count: usize| (0..count).map(|_| AtomicU64::new(0)).collect();
        Self {
            mailboxes: Mutex::new(vec![None; ranks]),
            reached: counters(ranks),
            enqueued: counters(ranks),
            sent: counters(ranks * ranks),
            received: counters(ranks * ranks),
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

    /// Says that a rank has come to its next collectives of all ranks, and returns the number of the first.
    pub(super) fn come(&self, rank: usize, collectives: usize) -> u64 {
        self.reached[rank].fetch_add(collectives as u64, Ordering::AcqRel) + 1
    }

    /// The ranks that have not come to a collective yet.
    pub(super) fn behind(&self, collective: u64) -> Vec<usize> {
        below(&self.reached, collective)
    }

    /// Says that a rank has enqueued its next collectives of all ranks, and returns the number of the first.
    pub(super) fn enqueue(&self, rank: usize, collectives: usize) -> u64 {
        self.enqueued[rank].fetch_add(collectives as u64, Ordering::AcqRel) + 1
    }

    /// The ranks that have not enqueued a collective yet.
    pub(super) fn not_enqueued(&self, collective: u64) -> Vec<usize> {
        below(&self.enqueued, collective)
    }

    /// Says that a rank has enqueued a message.
    pub(super) fn send(&self, from: usize, to: usize) {
        self.sent[from * self.ranks() + to].fetch_add(1, Ordering::AcqRel);
    }

    /// The number of the next message of a rank to another one.
    pub(super) fn next_message(&self, from: usize, to: usize) -> u64 {
        self.sent[from * self.ranks() + to].load(Ordering::Acquire) + 1
    }

    /// Whether a rank is about to receive a message, or has.
    pub(super) fn is_awaited(&self, from: usize, to: usize, message: u64) -> bool {
        self.received[from * self.ranks() + to].load(Ordering::Acquire) >= message
    }

    /// Says that a rank is about to receive a message, and returns its number.
    pub(super) fn receive(&self, from: usize, to: usize) -> u64 {
        self.received[from * self.ranks() + to].fetch_add(1, Ordering::AcqRel) + 1
    }

    /// Whether a rank has enqueued a message.
    pub(super) fn is_sent(&self, from: usize, to: usize, message: u64) -> bool {
        self.sent[from * self.ranks() + to].load(Ordering::Acquire) >= message
    }
}

/// The ranks whose count is below a number.
fn below(counts: &[AtomicU64], number: u64) -> Vec<usize> {
    (0..counts.len()).filter(|rank| counts[*rank].load(Ordering::Acquire) < number).collect()
}

/// Waits until there is nothing missing.
///
/// # Errors
/// If the group fails, or `timeout` passes; then says what is missing.
pub(super) fn wait(
    timeout: Duration,
    what: &str,
    missing: impl Fn() -> Option<String>,
    check: impl Fn() -> Result<()>,
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

    #[test]
    fn ranks_wait_for_those_behind() {
        let members = Members::new(3);
        assert_eq!(members.come(0, 2), 1);
        assert_eq!(members.come(2, 1), 1);
        assert_eq!(members.behind(1), [1]);
        assert_eq!(members.come(1, 1), 1);
        assert!(members.behind(1).is_empty());
        assert_eq!(members.behind(2), [1, 2]);
        assert_eq!(members.enqueue(1, 1), 1);
        assert_eq!(members.not_enqueued(1), [0, 2]);
        assert_eq!(members.next_message(0, 1), 1);
        assert!(!members.is_awaited(0, 1, 1));
        assert_eq!(members.receive(0, 1), 1);
        assert!(members.is_awaited(0, 1, 1) && !members.is_awaited(0, 1, 2));
        assert!(!members.is_sent(0, 1, 1));
        members.send(0, 1);
        assert!(members.is_sent(0, 1, 1) && !members.is_sent(1, 0, 1));
    }

    #[test]
    fn a_wait_ends_with_what_is_missing_or_why_the_group_failed() {
        let none = || Ok(());
        let error = wait(Duration::ZERO, "to come", || Some("rank 1".into()), none).unwrap_err();
        assert_eq!(error.code(), Code::Timeout);
        assert!(error.message().contains("for rank 1 to come"), "{error}");
        let failed = || Err(Error::new(Code::Communication, "over"));
        let error = wait(Duration::from_secs(9), "x", || Some("rank 1".into()), failed).unwrap_err();
        assert_eq!(error.message(), "over");
        assert!(wait(Duration::ZERO, "x", || None, failed).is_ok());
    }
}
