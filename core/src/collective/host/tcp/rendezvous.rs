//! How the ranks of a group find and connect to each other.
//!
//! The process that makes the id of a group listens at the address in it. Each rank connects there and sends the address at
//! which it listens; once all have, each receives the addresses of all. Then each rank connects to the ranks with lower
//! numbers. Connections that do not know the group's secret are dropped.

use crate::{
    Code, Error, Result,
    collective::{GroupId, host::missing_ranks},
};
use std::{
    hash::{BuildHasher, Hasher, RandomState},
    io::{ErrorKind, Read, Write},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs},
    thread,
    time::{Duration, Instant},
};

/// The first byte of the id of a group that is connected by TCP. That of a group of threads is 0.
const OVER_TCP: u8 = 1;

/// The time between two polls for a new connection.
const POLL: Duration = Duration::from_millis(2);

/// The time between two attempts to connect to a group that does not exist yet.
const REACH_INTERVAL: Duration = Duration::from_millis(100);

/// The time in which a new connection must identify itself.
const HELLO_TIMEOUT: Duration = Duration::from_secs(2);

/// The time after which nobody is expected to join a group any more.
const UNUSED_TIMEOUT: Duration = Duration::from_secs(3600);

/// The maximum number of members of a group, so that an unknown sender cannot make this process allocate memory for more.
const MOST_MEMBERS: u32 = 1 << 16;

/// A value that only the ranks of a group know.
type Secret = [u8; 16];

/// The first message of a rank: its number, where it listens, and how long it waits.
#[derive(Clone, Copy, Debug)]
struct Hello {
    secret: Secret,
    rank: u32,
    ranks: u32,
    port: u16,
    timeout_ms: u64,
}

impl Hello {
    const BYTES: usize = 34;

    fn to_bytes(self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[..16].copy_from_slice(&self.secret);
        bytes[16..20].copy_from_slice(&self.rank.to_le_bytes());
        bytes[20..24].copy_from_slice(&self.ranks.to_le_bytes());
        bytes[24..26].copy_from_slice(&self.port.to_le_bytes());
        bytes[26..].copy_from_slice(&self.timeout_ms.to_le_bytes());
        bytes
    }

    /// Reads the first message of a connection. `None` if it does not arrive in time, lacks the secret, or names an impossible
    /// number of members.
    fn read(stream: &mut TcpStream, secret: &Secret) -> Option<Self> {
        let mut bytes = [0; Self::BYTES];
        stream.set_nonblocking(false).ok()?;
        stream.set_read_timeout(Some(HELLO_TIMEOUT)).ok()?;
        stream.read_exact(&mut bytes).ok()?;
        stream.set_read_timeout(None).ok()?;
        let number = |start: usize| u32::from_le_bytes([0, 1, 2, 3].map(|index| bytes[start + index]));
        let timeout = [0, 1, 2, 3, 4, 5, 6, 7].map(|index| bytes[26 + index]);
        let hello = Self {
            secret: *bytes.first_chunk()?,
            rank: number(16),
            ranks: number(20),
            port: u16::from_le_bytes([bytes[24], bytes[25]]),
            timeout_ms: u64::from_le_bytes(timeout),
        };
        (hello.secret == *secret && (1..=MOST_MEMBERS).contains(&hello.ranks)).then_some(hello)
    }
}

/// Makes the id of a group, and waits for its ranks in the background.
///
/// # Errors
/// If nothing can listen at `host`.
pub(in super::super) fn group_id(host: IpAddr) -> Result<GroupId> {
    let at =
        |error: std::io::Error| Error::new(Code::Unavailable, format!("cannot listen at {host}: {error}"));
    let listener = TcpListener::bind((host, 0)).map_err(at)?;
    let port = listener.local_addr().map_err(at)?.port();
    let secret = random();
    let mut id = [0; 128];
    id[0] = OVER_TCP;
    id[1..17].copy_from_slice(&secret);
    let address = match host {
        IpAddr::V4(address) => address.to_ipv6_mapped(),
        IpAddr::V6(address) => address,
    };
    id[17..33].copy_from_slice(&address.octets());
    id[33..35].copy_from_slice(&port.to_le_bytes());
    super::spawn("dsrun-rendezvous".into(), move || introduce("rank", &listener, &secret))?;
    Ok(GroupId(id))
}

/// The secret of processes that meet at a known address.
const PROCESSES: Secret = *b"dsrun processes\n";

/// Joins the processes that meet at an address. Returns the connection to each, and none to this one.
///
/// # Errors
/// As [`super::TcpRank::meet`].
pub(super) fn meet(
    noun: &'static str,
    meeting: &str,
    rank: usize,
    ranks: usize,
    timeout: Duration,
) -> Result<Vec<Option<TcpStream>>> {
    let unknown = |error: std::io::Error| {
        let message = format!("is `{meeting}`, which cannot be resolved: {error}");
        Error::invalid(message).at("rendezvous")
    };
    if rank == 0 {
        let addresses: Vec<SocketAddr> = meeting.to_socket_addrs().map_err(unknown)?.collect();
        let listener = listen_at(meeting, &addresses).map_err(|error| {
            let hint =
                if error.kind() == ErrorKind::AddrInUse { ", because another program does" } else { "" };
            Error::new(Code::Unavailable, format!("cannot listen at {meeting}{hint}: {error}"))
        })?;
        super::spawn("dsrun-rendezvous".into(), move || introduce(noun, &listener, &PROCESSES))?;
    }
    let member = Member { noun, rank, ranks, secret: PROCESSES, remote: !names_this_machine(meeting) };
    member.connect(timeout, || {
        meeting.to_socket_addrs()?.next().ok_or_else(|| ErrorKind::AddrNotAvailable.into())
    })
}

/// Listens at the first address that is one of this machine, or at the port of all its addresses.
fn listen_at(meeting: &str, addresses: &[SocketAddr]) -> std::io::Result<TcpListener> {
    let everywhere = || {
        let port = addresses.first().map_or(0, SocketAddr::port);
        TcpListener::bind((Ipv4Addr::UNSPECIFIED, port))
    };
    // Some systems resolve their own name to an address that others cannot reach.
    if addresses.iter().all(|address| address.ip().is_loopback()) && !names_this_machine(meeting) {
        return everywhere();
    }
    match TcpListener::bind(addresses) {
        // The address may be that of a service which forwards to this machine.
        Err(error) if error.kind() == ErrorKind::AddrNotAvailable => everywhere(),
        bound => bound,
    }
}

/// Whether a host and port denote the local machine, so that all processes run on it.
fn names_this_machine(meeting: &str) -> bool {
    let host = meeting.rsplit_once(':').map_or(meeting, |(host, _)| host).trim_matches(['[', ']']);
    host == "localhost" || host.parse().is_ok_and(|address: IpAddr| address.is_loopback())
}

/// Whether the ranks of a group are connected by TCP.
pub(in super::super) fn is_over_tcp(id: &GroupId) -> bool {
    id.0[0] == OVER_TCP
}

/// The address at which the ranks of a group meet.
#[cfg(test)]
pub(in super::super) fn address(id: &GroupId) -> SocketAddr {
    parts(id).1
}

/// The secret of a group, and the address at which its ranks meet.
fn parts(id: &GroupId) -> (Secret, SocketAddr) {
    let (mut secret, mut address) = ([0; 16], [0; 16]);
    secret.copy_from_slice(&id.0[1..17]);
    address.copy_from_slice(&id.0[17..33]);
    let port = u16::from_le_bytes([id.0[33], id.0[34]]);
    (secret, SocketAddr::new(Ipv6Addr::from(address).to_canonical(), port))
}

/// The hasher of the standard library is seeded by the system.
fn random() -> Secret {
    let half = || RandomState::new().build_hasher().finish().to_le_bytes();
    let mut secret = [0; 16];
    secret[..8].copy_from_slice(&half());
    secret[8..].copy_from_slice(&half());
    secret
}

/// The first byte of the answer to a rank: the addresses of all ranks follow, or the reason why there is no group.
const JOINED: u8 = 0;
const REFUSED: u8 = 1;
const TIMED_OUT: u8 = 2;

/// The first byte of the answer, and the reason why there is no group.
type Refusal = (u8, String);

/// A rank that has connected.
struct Joined {
    rank: usize,
    stream: TcpStream,
    address: SocketAddr,
}

/// Waits for all ranks of a group, and tells each the addresses of all, or why there is no group.
fn introduce(noun: &str, listener: &TcpListener, secret: &Secret) {
    let mut joined = Vec::new();
    let result = gather(noun, listener, secret, &mut joined);
    if result.is_err() {
        // Those that are connecting at this moment get the reason too.
        while let Ok((mut stream, address)) = listener.accept() {
            if let Some(hello) = Hello::read(&mut stream, secret) {
                joined.push(Joined { rank: hello.rank as usize, stream, address });
            }
        }
    }
    joined.sort_by_key(|member| member.rank);
    let (answer, text) = match result {
        Ok(()) => {
            let addresses = joined.iter().map(|member| member.address.to_string());
            (JOINED, addresses.collect::<Vec<_>>().join(" "))
        }
        Err(refusal) => refusal,
    };
    // Number 0 last: it is usually in this process, which may exit once it has its answer.
    for member in joined.iter_mut().rev() {
        // If the rank has exited, the others fail when they connect to it.
        let _ = answer_to(&mut member.stream, answer, &text);
    }
}

fn answer_to(stream: &mut TcpStream, answer: u8, text: &str) -> std::io::Result<()> {
    stream.set_write_timeout(Some(HELLO_TIMEOUT))?;
    stream.write_all(&[answer])?;
    stream.write_all(&(text.len() as u32).to_le_bytes())?;
    stream.write_all(text.as_bytes())
}

/// Waits for all ranks of a group. `joined` receives those that have connected, also when they are refused.
fn gather(
    noun: &str,
    listener: &TcpListener,
    secret: &Secret,
    joined: &mut Vec<Joined>,
) -> std::result::Result<(), Refusal> {
    listener.set_nonblocking(true).map_err(|error| (REFUSED, error.to_string()))?;
    let (mut timeout, mut start) = (UNUSED_TIMEOUT, Instant::now());
    let mut size = None;
    loop {
        match listener.accept() {
            Ok((mut stream, from)) => {
                let Some(hello) = Hello::read(&mut stream, secret) else { continue };
                let (rank, ranks) = (hello.rank as usize, hello.ranks as usize);
                let size = *size.get_or_insert_with(|| {
                    (timeout, start) = (Duration::from_millis(hello.timeout_ms), Instant::now());
                    ranks
                });
                let twice = joined.iter().any(|member| member.rank == rank);
                joined.push(Joined { rank, stream, address: SocketAddr::new(from.ip(), hello.port) });
                if ranks != size || rank >= ranks {
                    let reason = format!("{noun} {rank} joins a group of {ranks}, but others one of {size}");
                    return Err((REFUSED, reason));
                }
                if twice {
                    return Err((REFUSED, format!("{noun} {rank} joins a second time")));
                }
                if joined.len() == size {
                    return Ok(());
                }
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                if start.elapsed() >= timeout {
                    let present = |rank| joined.iter().any(|member| member.rank == rank);
                    let missing = missing_ranks(noun, (0..size.unwrap_or(0)).map(present));
                    let reason = format!("joining the group waited {timeout:?} for {missing}");
                    return Err((TIMED_OUT, reason));
                }
                thread::sleep(POLL);
            }
            Err(error) => return Err((REFUSED, format!("cannot accept a connection: {error}"))),
        }
    }
}

/// Joins a group. Returns the connection to each rank, and none to this one.
///
/// # Errors
/// If the group cannot be reached, a rank is missing when the time is over, or the ranks disagree on their number.
pub(super) fn connect(
    id: &GroupId,
    rank: usize,
    ranks: usize,
    timeout: Duration,
) -> Result<Vec<Option<TcpStream>>> {
    let (secret, meeting) = parts(id);
    Member { noun: "rank", rank, ranks, secret, remote: !meeting.ip().is_loopback() }
        .connect(timeout, || Ok(meeting))
}

/// The member that joins.
struct Member {
    noun: &'static str,
    rank: usize,
    ranks: usize,
    secret: Secret,
    /// Whether others may run on other machines.
    remote: bool,
}

/// The end of a limited wait.
#[derive(Clone, Copy)]
struct Limit {
    timeout: Duration,
    /// None if it is beyond the range of the clock.
    end: Option<Instant>,
}

impl Limit {
    fn new(timeout: Duration) -> Self {
        Self { timeout, end: Instant::now().checked_add(timeout) }
    }

    fn left(self) -> Duration {
        self.end.map_or(self.timeout, |end| end.saturating_duration_since(Instant::now()))
    }

    /// The remaining time, at least 1 ms because the system rejects 0.
    fn for_system(self) -> Duration {
        self.left().max(Duration::from_millis(1))
    }
}

impl Member {
    fn failed(&self, what: &str) -> impl Fn(std::io::Error) -> Error + use<> {
        let message = format!("{} {} {what}", self.noun, self.rank);
        move |error| Error::new(Code::Communication, format!("{message}: {error}"))
    }

    fn connect(
        &self,
        timeout: Duration,
        meeting: impl Fn() -> std::io::Result<SocketAddr>,
    ) -> Result<Vec<Option<TcpStream>>> {
        let limit = Limit::new(timeout);
        let mut introduction = self.reach(limit, meeting)?;
        let failed = self.failed("cannot join its group");
        let (own, met) = (
            introduction.local_addr().map_err(&failed)?.ip(),
            introduction.peer_addr().map_err(&failed)?.ip(),
        );
        let hidden = self.remote && own.is_loopback();
        let listen = if hidden { Ipv4Addr::UNSPECIFIED.into() } else { own };
        let listener = TcpListener::bind((listen, 0)).map_err(self.failed("cannot listen for the others"))?;
        let hello = Hello {
            secret: self.secret,
            rank: self.rank as u32,
            ranks: self.ranks as u32,
            port: listener.local_addr().map_err(&failed)?.port(),
            timeout_ms: u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX),
        };
        introduction.write_all(&hello.to_bytes()).map_err(&failed)?;
        // The process that listens has its own limit, whose message names the missing ranks.
        introduction.set_read_timeout(Some(limit.for_system() + HELLO_TIMEOUT)).map_err(&failed)?;
        let ended = |error: std::io::Error| match error.kind() {
            ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset => {
                std::io::Error::other(format!("what gathers it at {met} has ended"))
            }
            _ => error,
        };
        let addresses = read_answer(&mut introduction).map_err(|error| failed(ended(error)))??;
        if addresses.len() != self.ranks {
            let message = format!("{} addresses came for {} members", addresses.len(), self.ranks);
            return Err(Error::new(Code::Communication, message));
        }
        let mut streams: Vec<Option<TcpStream>> = (0..self.ranks).map(|_| None).collect();
        for (peer, mut address) in addresses.into_iter().enumerate().take(self.rank) {
            // A member on the machine where the group meets may have sent a loopback address.
            if self.remote && address.ip().is_loopback() {
                address.set_ip(met);
            }
            let failed = self.failed(&format!("cannot connect to {} {peer} at {address}", self.noun));
            let mut stream = TcpStream::connect_timeout(&address, limit.for_system()).map_err(&failed)?;
            stream.write_all(&hello.to_bytes()).map_err(failed)?;
            streams[peer] = Some(stream);
        }
        self.accept(limit, &listener, &mut streams)?;
        Ok(streams)
    }

    /// Connects to the address at which the group meets; nothing may be listening there yet.
    fn reach(&self, limit: Limit, meeting: impl Fn() -> std::io::Result<SocketAddr>) -> Result<TcpStream> {
        loop {
            let reached =
                meeting().and_then(|address| TcpStream::connect_timeout(&address, limit.for_system()));
            match reached {
                Ok(stream) => return Ok(stream),
                Err(error) if limit.left().is_zero() => {
                    let timeout = limit.timeout;
                    let message = format!(
                        "{} {} waited {timeout:?} for its group to begin: {error}",
                        self.noun, self.rank
                    );
                    return Err(Error::new(Code::Timeout, message));
                }
                Err(_) => thread::sleep(limit.left().min(REACH_INTERVAL)),
            }
        }
    }

    /// Accepts the connections of the members above this one.
    fn accept(&self, limit: Limit, listener: &TcpListener, streams: &mut [Option<TcpStream>]) -> Result<()> {
        let failed = self.failed("cannot accept a connection");
        listener.set_nonblocking(true).map_err(&failed)?;
        while streams.iter().skip(self.rank + 1).any(Option::is_none) {
            match listener.accept() {
                Ok((mut stream, _)) => {
                    let Some(hello) = Hello::read(&mut stream, &self.secret) else { continue };
                    if let Some(place) = streams.get_mut(hello.rank as usize) {
                        place.get_or_insert(stream);
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    if limit.left().is_zero() {
                        let present = |(peer, stream): (usize, &Option<TcpStream>)| {
                            peer <= self.rank || stream.is_some()
                        };
                        let missing = missing_ranks(self.noun, streams.iter().enumerate().map(present));
                        let message = format!("joining the group waited {:?} for {missing}", limit.timeout);
                        return Err(Error::new(Code::Timeout, message));
                    }
                    thread::sleep(POLL);
                }
                Err(error) => return Err(failed(error)),
            }
        }
        Ok(())
    }
}

/// Reads the addresses of all ranks, or the reason why there is no group.
fn read_answer(stream: &mut TcpStream) -> std::io::Result<Result<Vec<SocketAddr>>> {
    let mut head = [0; 5];
    stream.read_exact(&mut head)?;
    let [answer, length @ ..] = head;
    let mut text = Vec::new();
    stream.take(u64::from(u32::from_le_bytes(length))).read_to_end(&mut text)?;
    let text = String::from_utf8_lossy(&text);
    match answer {
        JOINED => {}
        TIMED_OUT => return Ok(Err(Error::new(Code::Timeout, text))),
        _ => return Ok(Err(Error::new(Code::Communication, text))),
    }
    let wrong = |text: &str| std::io::Error::new(ErrorKind::InvalidData, format!("`{text}` is no address"));
    let address = |text: &str| text.parse::<SocketAddr>().map_err(|_| wrong(text));
    Ok(Ok(text.split_whitespace().map(address).collect::<std::io::Result<_>>()?))
}
