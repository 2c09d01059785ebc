//! Ranks reduce, gather and exchange, over threads and over TCP, and errors name missing ranks.

use super::{
    super::{Collective, Comm, GroupId},
    HostCollective, HostComm,
    tcp::{self, TcpRank},
};
use crate::{Code, DType, op::Reduction};
use rstest::rstest;
use std::{
    io::Write,
    net::{Ipv4Addr, TcpListener, TcpStream},
    thread,
    time::{Duration, Instant},
};

/// What connects the ranks of a group.
#[derive(Clone, Copy, Debug)]
enum Over {
    Threads,
    Tcp,
}

impl Over {
    fn id(self) -> GroupId {
        let host = match self {
            Self::Threads => None,
            Self::Tcp => Some(Ipv4Addr::LOCALHOST.into()),
        };
        HostCollective.group_id(host).unwrap()
    }
}

/// Runs `work` on every rank of a group, each on its own thread.
fn on_ranks<T: Send>(over: Over, ranks: usize, work: impl Fn(HostComm) -> T + Sync) -> Vec<T> {
    let work = &work;
    thread::scope(|scope| {
        let comms: Vec<_> = match over {
            Over::Threads => HostComm::group(ranks).unwrap(),
            Over::Tcp => {
                let id = over.id();
                let join = move |rank| HostComm::join(&id, rank, ranks, Duration::from_secs(20)).unwrap();
                let join = |rank| scope.spawn(move || join(rank));
                let joining: Vec<_> = (0..ranks).map(join).collect();
                joining.into_iter().map(|thread| thread.join().unwrap()).collect()
            }
        };
        let threads: Vec<_> = comms.into_iter().map(|comm| scope.spawn(move || work(comm))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
}

#[rstest]
fn all_reduce_gives_every_rank_the_same(
    #[values(Over::Threads, Over::Tcp)] over: Over,
    #[values(1, 2, 3, 4)] ranks: usize,
    // The largest is cut into shares that differ in length.
    #[values(0, 1, 100, 9001)] elements: usize,
) {
    let results = on_ranks(over, ranks, |comm| {
        let mine: Vec<u8> =
            (0..elements).flat_map(|index| ((index + comm.rank() * 7) as f32).to_le_bytes()).collect();
        let mut sums = mine.clone();
        for _ in 0..5 {
            sums.copy_from_slice(&mine);
            comm.all_reduce(&mut sums, DType::F32, Reduction::Sum).unwrap();
        }
        sums
    });
    let offsets: usize = (0..ranks).map(|rank| rank * 7).sum();
    let expected: Vec<f32> = (0..elements).map(|index| (index * ranks + offsets) as f32).collect();
    assert!(results.iter().all(|result| floats(result) == expected));
}

#[rstest]
#[case(DType::I32, Reduction::Max, [3, 9, 5], 9)]
#[case(DType::I32, Reduction::Min, [-3, 9, 5], -3)]
#[case(DType::I32, Reduction::Sum, [i32::MAX, 1, 0], i32::MIN)]
fn integers_reduce_exactly(
    #[case] dtype: DType,
    #[case] reduction: Reduction,
    #[case] values: [i32; 3],
    #[case] expected: i32,
) {
    let results = on_ranks(Over::Threads, 3, |comm| {
        let mut bytes = values[comm.rank()].to_le_bytes();
        comm.all_reduce(&mut bytes, dtype, reduction).unwrap();
        i32::from_le_bytes(bytes)
    });
    assert_eq!(results, [expected; 3]);
}

#[rstest]
fn ranks_gather_scatter_exchange_and_broadcast(#[values(Over::Threads, Over::Tcp)] over: Over) {
    on_ranks(over, 3, |comm| {
        let rank = comm.rank() as u8;
        let gathered: Vec<u8> = comm.all_gather(&[rank, rank]).unwrap().concat();
        assert_eq!(gathered, [0, 0, 1, 1, 2, 2]);

        let mut share = [0];
        comm.reduce_scatter(&[rank, 10 + rank, 20 + rank], &mut share, DType::U8, Reduction::Sum).unwrap();
        assert_eq!(share, [[3], [33], [63]][comm.rank()]);

        let mut exchanged = [0; 3];
        comm.all_to_all(&[rank * 10, rank * 10 + 1, rank * 10 + 2], &mut exchanged).unwrap();
        assert_eq!(exchanged, [rank, 10 + rank, 20 + rank]);

        let mut bytes = [rank; 4];
        comm.broadcast(&mut bytes, 2).unwrap();
        assert_eq!(bytes, [2; 4]);
        comm.barrier().unwrap();
    });
}

#[rstest]
fn messages_of_one_sender_arrive_in_order(#[values(Over::Threads, Over::Tcp)] over: Over) {
    on_ranks(over, 2, |comm| {
        for number in 0..10u8 {
            if comm.rank() == 0 {
                comm.send(&[number], 1).unwrap();
            } else {
                let mut bytes = [0];
                comm.receive(&mut bytes, 0).unwrap();
                assert_eq!(bytes, [number]);
            }
        }
    });
}

#[rstest]
fn a_missing_rank_is_named(#[values(Over::Threads, Over::Tcp)] over: Over) {
    let results = on_ranks(over, 3, |comm| {
        let comm = comm.with_timeout(Duration::from_millis(50));
        let result = if comm.rank() == 1 { Ok(()) } else { comm.barrier() };
        // A rank that has ended is no missing one.
        (result, comm)
    });
    for error in [&results[0].0, &results[2].0].map(|result| result.as_ref().unwrap_err()) {
        assert_eq!(error.code(), Code::Timeout);
        assert!(error.message().contains("rank 1"), "{error}");
    }
}

#[rstest]
fn ranks_with_different_collectives_are_both_named(#[values(Over::Threads, Over::Tcp)] over: Over) {
    let results = on_ranks(over, 2, |comm| {
        let mut bytes = vec![0; 4 * (1 + comm.rank())];
        comm.all_reduce(&mut bytes, DType::F32, Reduction::Sum)
    });
    for error in results.iter().map(|result| result.as_ref().unwrap_err()) {
        assert_eq!(error.code(), Code::Communication);
        assert!(error.message().contains("rank 0") && error.message().contains("rank 1"), "{error}");
    }
}

#[rstest]
fn abort_wakes_waiting_ranks(#[values(Over::Threads, Over::Tcp)] over: Over) {
    let results = on_ranks(over, 2, |comm| {
        if comm.rank() == 0 {
            comm.abort("out of memory");
            return comm.status();
        }
        comm.receive(&mut [0], 0)
    });
    assert!(results.iter().all(|result| result.as_ref().unwrap_err().message().contains("out of memory")));
}

#[rstest]
fn joining_names_missing_ranks_and_refuses_ranks_out_of_range(
    #[values(Over::Threads, Over::Tcp)] over: Over,
) {
    let (collective, id) = (HostCollective, over.id());
    let error = collective.join(&id, 0, 2, Duration::from_millis(20)).unwrap_err();
    assert_eq!(error.code(), Code::Timeout);
    assert!(error.message().contains("rank 1"), "{error}");
    assert!(collective.join(&id, 2, 2, Duration::ZERO).is_err());

    let id = over.id();
    thread::scope(|scope| {
        let other = scope.spawn(|| collective.join(&id, 1, 2, Duration::from_secs(10)).unwrap().rank());
        assert_eq!(collective.join(&id, 0, 2, Duration::from_secs(10)).unwrap().ranks(), 2);
        assert_eq!(other.join().unwrap(), 1);
    });
}

#[rstest]
#[case(1, 3, "rank 1 joins a group of 3, but others one of 2")]
#[case(0, 2, "rank 0 joins a second time")]
fn ranks_that_disagree_over_tcp_are_told(#[case] rank: usize, #[case] ranks: usize, #[case] reason: &str) {
    let id = Over::Tcp.id();
    thread::scope(|scope| {
        let first = scope.spawn(|| HostComm::join(&id, 0, 2, Duration::from_secs(10)).unwrap_err());
        thread::sleep(Duration::from_millis(50));
        let second = HostComm::join(&id, rank, ranks, Duration::from_secs(10)).unwrap_err();
        for error in [first.join().unwrap(), second] {
            assert!(error.message().contains(reason), "{error}");
        }
    });
}

#[test]
fn a_rank_that_ends_is_named_at_once() {
    let results = on_ranks(Over::Tcp, 3, |comm| {
        if comm.rank() == 2 {
            return comm.barrier();
        }
        comm.barrier().unwrap();
        // Far below the timeout, because the connection says so.
        let start = Instant::now();
        let ended = comm.barrier();
        assert!(start.elapsed() < Duration::from_secs(10));
        ended
    });
    assert!(results[2].is_ok());
    for error in results[..2].iter().map(|result| result.as_ref().unwrap_err()) {
        assert!(error.message().contains("has ended"), "{error}");
    }
}

#[test]
fn strangers_do_not_disturb_a_group() {
    let id = Over::Tcp.id();
    let address = tcp::address(&id);
    thread::scope(|scope| {
        let other = scope.spawn(|| HostComm::join(&id, 1, 2, Duration::from_secs(10)).unwrap());
        let mut stranger = TcpStream::connect(address).unwrap();
        stranger.write_all(&[0xAB; 64]).unwrap();
        let own = HostComm::join(&id, 0, 2, Duration::from_secs(10)).unwrap();
        scope.spawn(move || other.join().unwrap().barrier().unwrap());
        own.barrier().unwrap();
    });
}

/// A port that nothing listens at now.
fn free_port() -> u16 {
    TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap().port()
}

#[test]
fn processes_meet_at_an_address_in_any_order() {
    let meeting = format!("localhost:{}", free_port());
    let join = |rank| TcpRank::meet("process", &meeting, rank, 3, Duration::from_secs(20)).unwrap();
    thread::scope(|scope| {
        let others = [2, 1].map(|rank| {
            scope.spawn(move || {
                let process = join(rank);
                let all = process.gather_within(Duration::from_secs(20), "names", &vec![rank as u8; rank]);
                assert_eq!(all.unwrap().concat(), [1, 2, 2]);
                process.send_message(&[7; 5], 0).unwrap();
                process.receive_message(Duration::from_secs(20), 0).unwrap_err()
            })
        });
        // The others try until this one is there.
        thread::sleep(Duration::from_millis(150));
        let process = join(0);
        let all = process.gather_within(Duration::from_secs(20), "names", &[]).unwrap();
        assert_eq!(all.concat(), [1, 2, 2]);
        for other in [2, 1] {
            assert_eq!(&*process.receive_message(Duration::from_secs(20), other).unwrap(), [7; 5]);
        }
        process.abort_group("the disk is full");
        for error in others.map(|other| other.join().unwrap()) {
            assert!(error.message().contains("process 0 aborted: the disk is full"), "{error}");
        }
    });
}

#[test]
fn a_stranger_that_claims_many_members_is_ignored() {
    let meeting = format!("127.0.0.1:{}", free_port());
    let join = |rank| TcpRank::meet("process", &meeting, rank, 2, Duration::from_secs(20)).unwrap();
    thread::scope(|scope| {
        let own = scope.spawn(|| join(0));
        let mut stranger = loop {
            if let Ok(stream) = TcpStream::connect(&meeting) {
                break stream;
            }
        };
        let mut hello = b"dsrun processes\n".to_vec();
        hello.extend([0xFF; 18]);
        stranger.write_all(&hello).unwrap();
        assert_eq!(join(1).ranks(), 2);
        assert_eq!(own.join().unwrap().ranks(), 2);
    });
}

#[test]
fn processes_that_cannot_meet_say_why() {
    let limit = Duration::from_millis(150);
    let taken = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let port = taken.local_addr().unwrap().port();
    let error = TcpRank::meet("process", &format!("127.0.0.1:{port}"), 0, 2, limit).unwrap_err();
    assert!(error.message().contains("because another program does"), "{error}");
    let error = TcpRank::meet("process", &format!("127.0.0.1:{}", free_port()), 0, 3, limit).unwrap_err();
    assert!(error.message().contains("process 1, 2"), "{error}");
    let error = TcpRank::meet("process", &format!("127.0.0.1:{}", free_port()), 1, 3, limit).unwrap_err();
    assert!(error.message().contains("waited 150ms for its group to begin"), "{error}");
    let error = TcpRank::meet("process", "no colon", 0, 2, limit).unwrap_err();
    assert!(error.to_string().contains("no colon"), "{error}");
}
