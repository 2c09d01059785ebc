//! Groups of ranks in several processes, connected by TCP.
//!
//! Each pair of ranks has a connection, with a thread at either end that reads what the peer sends into an inbox. A write
//! therefore never waits for a peer that is writing itself. Every collective is one or two exchanges: each rank sends a frame,
//! labelled with the collective it runs, to every other rank, and waits for theirs.
//!
//! Every rank sends a keep-alive frame once per second, so that a rank that has stopped can be distinguished from an idle one.

mod frame;
mod rendezvous;

use super::{
    super::GroupId, DEFAULT_TIMEOUT, HostTransport, MESSAGE_PATIENCE, concatenate, missing_ranks,
    monitor::Monitor, reduce::reduce,
};
use crate::{Code, DType, Error, Result, op::Reduction};
use frame::{Frame, Kind};
#[cfg(test)]
pub(super) use rendezvous::address;
pub(super) use rendezvous::{group_id, is_over_tcp};
use std::{
    collections::VecDeque,
    io::ErrorKind,
    net::{IpAddr, Ipv4Addr, Shutdown, TcpStream},
    ops::Range,
    sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError},
    thread::{self, JoinHandle},
    time::Duration,
};

/// An all-reduce of more bytes is a reduce-scatter and an all-gather, which send less if there are more than two ranks.
const WHOLE_BYTES: usize = 32 << 10;

/// The time between two keep-alive frames.
const ALIVE_INTERVAL: Duration = Duration::from_secs(1);

/// The time after which a rank that sends nothing, not even a keep-alive frame, counts as failed.
const SILENCE: Duration = Duration::from_secs(20);

/// A member of a group that is connected by TCP: a rank, or a process.
#[derive(Debug)]
pub struct TcpRank {
    /// What messages call a member.
    noun: &'static str,
    rank: usize,
    timeout: Duration,
    /// The connection to each rank, and none to this one.
    peers: Arc<Vec<Option<Peer>>>,
    inboxes: Arc<Monitor<Vec<Inbox>>>,
    readers: Vec<JoinHandle<()>>,
    alive: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Peer {
    writer: Mutex<TcpStream>,
    /// The same connection, to end it while it is being written to.
    connection: TcpStream,
}

/// What a peer has sent and no collective has taken yet.
#[derive(Debug, Default)]
struct Inbox {
    exchanged: VecDeque<Frame>,
    messages: VecDeque<Frame>,
    /// Why no more frames can arrive, once that is so.
    end: Option<String>,
}

impl Inbox {
    /// # Errors
    /// If the awaited frame has not arrived and never will, because the sender has ended.
    fn check(&self, missing: bool) -> Result<()> {
        match &self.end {
            Some(end) if missing => Err(Error::new(Code::Communication, end.clone())),
            _ => Ok(()),
        }
    }
}

impl TcpRank {
    /// Joins a group as rank `rank`, and waits until all have joined.
    ///
    /// # Errors
    /// As [`Collective::join`](super::super::Collective::join).
    pub(super) fn join(id: &GroupId, rank: usize, ranks: usize, timeout: Duration) -> Result<Self> {
        Self::connected("rank", rank, rendezvous::connect(id, rank, ranks, timeout)?)
    }

    /// Joins the processes that meet at `meeting`, a host and a port, as number `rank` of `ranks`, and waits until all have
    /// joined. Number 0 listens there. `noun` names a member in messages.
    ///
    /// The others may start before number 0.
    ///
    /// # Errors
    /// If the address cannot be found, the port is taken, or not all have joined within `timeout`; the message names those that
    /// are missing.
    pub fn meet(
        noun: &'static str,
        meeting: &str,
        rank: usize,
        ranks: usize,
        timeout: Duration,
    ) -> Result<Self> {
        super::check_rank(rank, ranks)?;
        Self::connected(noun, rank, rendezvous::meet(noun, meeting, rank, ranks, timeout)?)
    }

    fn connected(noun: &'static str, rank: usize, streams: Vec<Option<TcpStream>>) -> Result<Self> {
        let inboxes = Arc::new(Monitor::new(streams.iter().map(|_| Inbox::default()).collect::<Vec<_>>()));
        let mut readers = Vec::new();
        let connect = |(peer, stream): (usize, Option<TcpStream>)| {
            let Some(stream) = stream else { return Ok(None) };
            let name = format!("{noun} {peer}");
            let (peer, reader) = Peer::start(stream, peer, name, &inboxes)?;
            readers.push(reader);
            Ok(Some(peer))
        };
        let peers = Arc::new(streams.into_iter().enumerate().map(connect).collect::<Result<Vec<_>>>()?);
        let (group, watched) = (peers.clone(), inboxes.clone());
        let work = move || stay_alive(&group, &watched);
        let alive = spawn("dsrun-alive".into(), work)?;
        Ok(Self { noun, rank, timeout: DEFAULT_TIMEOUT, peers, inboxes, readers, alive: Some(alive) })
    }

    pub(super) fn set_timeout(&mut self, timeout: Duration) {
        self.timeout = timeout;
    }

    /// The number of this member.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// The number of members.
    pub fn ranks(&self) -> usize {
        self.peers.len()
    }

    /// The address by which the others reach this member; loopback if there are none.
    pub fn address(&self) -> IpAddr {
        let first = self.others().next().and_then(|(_, peer)| peer.connection.local_addr().ok());
        first.map_or(Ipv4Addr::LOCALHOST.into(), |address| address.ip())
    }

    /// The other ranks.
    fn others(&self) -> impl Iterator<Item = (usize, &Peer)> {
        self.peers.iter().enumerate().filter_map(|(rank, peer)| Some((rank, peer.as_ref()?)))
    }

    /// Sends a frame to rank `peer`.
    fn write(&self, peer: usize, kind: Kind, label: &str, bytes: &[u8]) -> Result<()> {
        let Some(connection) = &self.peers[peer] else { return Ok(()) };
        let sent = connection.write(self.timeout, kind, label, bytes);
        sent.map_err(|error| {
            // If the peer ended, its abort frame or its reader gives the reason.
            let state = self.inboxes.lock();
            let known = state.failure().cloned();
            let unsent = || match error.kind() {
                ErrorKind::BrokenPipe | ErrorKind::ConnectionReset => {
                    format!("{} {peer} has ended", self.noun)
                }
                _ => format!("{label} cannot be sent to {} {peer}: {error}", self.noun),
            };
            let message = state[peer].end.clone().unwrap_or_else(unsent);
            self.inboxes.fail(state, known.unwrap_or_else(|| Error::new(Code::Communication, message)))
        })
    }

    /// Sends `part(rank)` to every other rank, and returns what the others sent, in the order of ranks. This rank's own part is
    /// `own`.
    fn exchange<'a>(
        &self,
        label: &str,
        own: &[u8],
        part: impl Fn(usize) -> &'a [u8],
    ) -> Result<Vec<Arc<[u8]>>> {
        self.exchange_within(self.timeout, label, own, part)
    }

    fn exchange_within<'a>(
        &self,
        timeout: Duration,
        label: &str,
        own: &[u8],
        part: impl Fn(usize) -> &'a [u8],
    ) -> Result<Vec<Arc<[u8]>>> {
        for (peer, _) in self.others() {
            self.write(peer, Kind::Exchange, label, part(peer))?;
        }
        let all = |inboxes: &mut Vec<Inbox>| {
            for (peer, _) in self.others() {
                inboxes[peer].check(inboxes[peer].exchanged.is_empty())?;
                // A peer that runs another collective may never run this one, so do not wait for it.
                if let Some(other) = inboxes[peer].exchanged.front().filter(|other| other.label != label) {
                    let (noun, rank, other) = (self.noun, self.rank, &other.label);
                    let message = format!("{noun} {rank} runs {label}, but {noun} {peer} runs {other}");
                    return Err(Error::new(Code::Communication, message));
                }
            }
            let arrived = self.others().all(|(peer, _)| !inboxes[peer].exchanged.is_empty());
            Ok(arrived.then(|| {
                let taken = inboxes.iter_mut().map(|inbox| inbox.exchanged.pop_front());
                taken.map(|frame| frame.map_or_else(|| own.into(), |frame| frame.bytes)).collect()
            }))
        };
        let missing = |inboxes: &Vec<Inbox>| {
            let present = |(rank, inbox): (usize, &Inbox)| rank == self.rank || !inbox.exchanged.is_empty();
            missing_ranks(self.noun, inboxes.iter().enumerate().map(present))
        };
        self.inboxes.take(timeout, label, all, missing)
    }

    /// The bytes of every member, in the order of their numbers; their lengths may differ. `label` names them in messages.
    ///
    /// # Errors
    /// If not all have sent theirs within `timeout`, a member has ended, or the group was aborted.
    pub fn gather_within(&self, timeout: Duration, label: &str, bytes: &[u8]) -> Result<Vec<Arc<[u8]>>> {
        self.exchange_within(timeout, label, bytes, |_| bytes)
    }

    /// Sends bytes to another member without waiting for it.
    ///
    /// # Errors
    /// If the member has ended, or receives nothing for a minute, or the group was aborted.
    pub fn send_message(&self, bytes: &[u8], peer: usize) -> Result<()> {
        self.status()?;
        self.write(peer, Kind::Message, "a message", bytes)
    }

    /// Receives the next message of another member, of any length.
    ///
    /// # Errors
    /// If none comes within `timeout`, the member has ended, or the group was aborted.
    pub fn receive_message(&self, timeout: Duration, peer: usize) -> Result<Arc<[u8]>> {
        let arrived = |inboxes: &mut Vec<Inbox>| {
            let message = inboxes[peer].messages.pop_front();
            inboxes[peer].check(message.is_none())?;
            Ok(message.map(|message| message.bytes))
        };
        let missing = |_: &Vec<Inbox>| format!("a message of {} {peer}", self.noun);
        self.inboxes.take(timeout, "receive", arrived, missing)
    }

    /// Makes every wait in the group, on every member, fail at once with this reason.
    pub fn abort_group(&self, reason: &str) {
        let message = format!("{} {} aborted: {reason}", self.noun, self.rank);
        drop(self.inboxes.fail(self.inboxes.lock(), Error::new(Code::Communication, message)));
        for (_, peer) in self.others() {
            peer.abort(reason);
        }
    }

    /// The bytes of every rank, in the order of ranks.
    pub(super) fn gather(&self, bytes: &[u8]) -> Result<Vec<Arc<[u8]>>> {
        self.exchange(&format!("all_gather of {} bytes", bytes.len()), bytes, |_| bytes)
    }
}

impl HostTransport for TcpRank {
    fn all_reduce(&self, bytes: &mut [u8], dtype: DType, reduction: Reduction) -> Result<()> {
        let label = format!("all_reduce of {} {dtype} bytes", bytes.len());
        if self.ranks() < 3 || bytes.len() <= WHOLE_BYTES {
            let parts = self.exchange(&label, bytes, |_| bytes)?;
            return reduce(bytes, &parts, 0, dtype, reduction);
        }
        // Each rank reduces a share, in the order of ranks, and sends it to the others.
        let shares = shares(bytes.len(), dtype.bytes(), self.ranks());
        let own = shares[self.rank].clone();
        let parts = self.exchange(&label, &bytes[own.clone()], |rank| &bytes[shares[rank].clone()])?;
        let mut reduced = vec![0; own.len()];
        reduce(&mut reduced, &parts, 0, dtype, reduction)?;
        let parts = self.exchange(&label, &reduced, |_| &reduced)?;
        for (share, part) in shares.into_iter().zip(parts) {
            bytes[share].copy_from_slice(&part);
        }
        Ok(())
    }

    fn reduce_scatter(
        &self,
        source: &[u8],
        destination: &mut [u8],
        dtype: DType,
        reduction: Reduction,
    ) -> Result<()> {
        let length = destination.len();
        let share = |rank: usize| &source[rank * length..][..length];
        let label = format!("reduce_scatter of {} {dtype} bytes", source.len());
        let parts = self.exchange(&label, share(self.rank), share)?;
        reduce(destination, &parts, 0, dtype, reduction)
    }

    fn all_gather(&self, source: &[u8], destination: &mut [u8]) -> Result<()> {
        concatenate(&self.gather(source)?, destination);
        Ok(())
    }

    fn all_to_all(&self, source: &[u8], destination: &mut [u8]) -> Result<()> {
        let block = source.len() / self.ranks();
        let part = |rank: usize| &source[rank * block..][..block];
        let parts = self.exchange(&format!("all_to_all of {} bytes", source.len()), part(self.rank), part)?;
        concatenate(&parts, destination);
        Ok(())
    }

    fn broadcast(&self, bytes: &mut [u8], root: usize) -> Result<()> {
        let own: &[u8] = if self.rank == root { bytes } else { &[] };
        let label = format!("broadcast of {} bytes from rank {root}", bytes.len());
        let parts = self.exchange(&label, own, |_| own)?;
        bytes.copy_from_slice(&parts[root]);
        Ok(())
    }

    fn barrier(&self) -> Result<()> {
        self.exchange("barrier", &[], |_| &[]).map(drop)
    }

    fn send(&self, bytes: &[u8], peer: usize) -> Result<()> {
        self.send_message(bytes, peer)
    }

    fn receive(&self, bytes: &mut [u8], peer: usize) -> Result<()> {
        let message = self.receive_message(self.timeout.saturating_mul(MESSAGE_PATIENCE), peer)?;
        if message.len() != bytes.len() {
            let text = format!("rank {peer} sent {} bytes, expected {}", message.len(), bytes.len());
            return Err(Error::new(Code::Communication, text));
        }
        bytes.copy_from_slice(&message);
        Ok(())
    }

    fn status(&self) -> Result<()> {
        self.inboxes.lock().failure().cloned().map_or(Ok(()), Err)
    }

    fn abort(&self, reason: &str) {
        self.abort_group(reason);
    }
}

impl Drop for TcpRank {
    fn drop(&mut self) {
        for (_, peer) in self.others() {
            // The peer may have ended before.
            let _ = peer.connection.shutdown(Shutdown::Both);
        }
        let ended =
            Error::new(Code::Communication, format!("{} {} has left its group", self.noun, self.rank));
        drop(self.inboxes.fail(self.inboxes.lock(), ended));
        for thread in self.readers.drain(..).chain(self.alive.take()) {
            // A reader ends with its connection, the other thread with the group, and neither has a result.
            drop(thread.join());
        }
    }
}

fn spawn(name: String, work: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>> {
    thread::Builder::new().name(name).spawn(work).map_err(|error| {
        Error::new(Code::Unavailable, format!("cannot start a thread for a group of ranks: {error}"))
    })
}

/// Sends keep-alive frames to all peers until the group has failed or ended.
fn stay_alive(peers: &[Option<Peer>], inboxes: &Monitor<Vec<Inbox>>) {
    while !inboxes.fails_within(ALIVE_INTERVAL) {
        for peer in peers.iter().flatten() {
            // A connection that is being written to needs no keep-alive frame.
            if let Ok(writer) = peer.writer.try_lock() {
                // A peer that has ended is noticed by its reader.
                let _ = send_frame(writer, ALIVE_INTERVAL, Kind::Alive, "", &[]);
            }
        }
    }
}

impl Peer {
    /// Starts the thread that reads what a peer sends.
    fn start(
        stream: TcpStream,
        peer: usize,
        name: String,
        inboxes: &Arc<Monitor<Vec<Inbox>>>,
    ) -> Result<(Self, JoinHandle<()>)> {
        let failed = |error: std::io::Error| {
            Error::new(Code::Unavailable, format!("the connection to {name} cannot be set up: {error}"))
        };
        // Small frames go out at once.
        stream.set_nodelay(true).map_err(failed)?;
        stream.set_read_timeout(Some(SILENCE)).map_err(failed)?;
        let writer = Mutex::new(stream.try_clone().map_err(failed)?);
        let (mut incoming, inboxes) = (stream.try_clone().map_err(failed)?, inboxes.clone());
        let reader = spawn(format!("dsrun-from-{peer}"), move || read(&mut incoming, peer, &name, &inboxes))?;
        Ok((Self { writer, connection: stream }, reader))
    }

    fn write(&self, timeout: Duration, kind: Kind, label: &str, bytes: &[u8]) -> std::io::Result<()> {
        let writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
        send_frame(writer, timeout, kind, label, bytes)
    }

    /// Tells the peer why this rank aborts. If the connection is busy, it is shut down instead.
    fn abort(&self, reason: &str) {
        let told = match self.writer.try_lock() {
            Ok(writer) => send_frame(writer, Duration::from_secs(1), Kind::Abort, reason, &[]).is_ok(),
            Err(TryLockError::Poisoned(_) | TryLockError::WouldBlock) => false,
        };
        if !told {
            // The peer may have ended before.
            let _ = self.connection.shutdown(Shutdown::Both);
        }
    }
}

fn send_frame(
    mut writer: MutexGuard<'_, TcpStream>,
    timeout: Duration,
    kind: Kind,
    label: &str,
    bytes: &[u8],
) -> std::io::Result<()> {
    // The system takes no limit of 0.
    writer.set_write_timeout(Some(timeout.max(Duration::from_millis(1))))?;
    frame::write(&mut *writer, kind, label, bytes)
}

/// Puts what a peer sends into its inbox, until the connection ends.
fn read(stream: &mut TcpStream, peer: usize, name: &str, inboxes: &Monitor<Vec<Inbox>>) {
    loop {
        let read = frame::read(stream);
        let mut state = inboxes.lock();
        match read {
            Ok((Kind::Alive, _)) => continue,
            Ok((Kind::Exchange, frame)) => state[peer].exchanged.push_back(frame),
            Ok((Kind::Message, frame)) => state[peer].messages.push_back(frame),
            Ok((Kind::Abort, frame)) => {
                let message = format!("{name} aborted: {}", frame.label);
                drop(inboxes.fail(state, Error::new(Code::Communication, message)));
                return;
            }
            Err(error) => {
                state[peer].end = Some(match error.kind() {
                    ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset | ErrorKind::BrokenPipe => {
                        format!("{name} has ended")
                    }
                    ErrorKind::WouldBlock | ErrorKind::TimedOut => {
                        format!("{name} has sent nothing for {SILENCE:?}")
                    }
                    _ => format!("{name} has ended: {error}"),
                });
                inboxes.notify();
                return;
            }
        }
        inboxes.notify();
    }
}

/// Divides `bytes` into a range for each rank, each of whole elements.
fn shares(bytes: usize, element: usize, ranks: usize) -> Vec<Range<usize>> {
    let start = |rank: usize| bytes / element * rank / ranks * element;
    (0..ranks).map(|rank| start(rank)..start(rank + 1)).collect()
}
