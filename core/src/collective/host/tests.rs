//! Ranks as threads reduce, gather and exchange, and errors name missing ranks.

use super::{
    super::{Collective, Comm},
    HostCollective, HostComm,
};
use crate::{Code, DType, op::Reduction};
use rstest::rstest;
use std::{thread, time::Duration};

/// Runs `work` on every rank of a group, each on its own thread.
fn on_ranks<T: Send>(ranks: usize, work: impl Fn(HostComm) -> T + Sync) -> Vec<T> {
    let comms = HostComm::group(ranks).unwrap();
    thread::scope(|scope| {
        let work = &work;
        let threads: Vec<_> = comms.into_iter().map(|comm| scope.spawn(move || work(comm))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
}

#[rstest]
fn all_reduce_gives_every_rank_the_same(
    #[values(1, 2, 3, 4)] ranks: usize,
    #[values(0, 1, 100)] elements: usize,
) {
    let results = on_ranks(ranks, |comm| {
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
    let results = on_ranks(3, |comm| {
        let mut bytes = values[comm.rank()].to_le_bytes();
        comm.all_reduce(&mut bytes, dtype, reduction).unwrap();
        i32::from_le_bytes(bytes)
    });
    assert_eq!(results, [expected; 3]);
}

#[test]
fn ranks_gather_scatter_exchange_and_broadcast() {
    on_ranks(3, |comm| {
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

#[test]
fn messages_of_one_sender_arrive_in_order() {
    on_ranks(2, |comm| {
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

#[test]
fn a_missing_rank_is_named() {
    let results = on_ranks(3, |comm| {
        let comm = comm.with_timeout(Duration::from_millis(50));
        if comm.rank() == 1 { Ok(()) } else { comm.barrier() }
    });
    for error in [&results[0], &results[2]].map(|result| result.as_ref().unwrap_err()) {
        assert_eq!(error.code(), Code::Timeout);
        assert!(error.message().contains("rank 1"), "{error}");
    }
}

#[test]
fn ranks_with_different_collectives_are_both_named() {
    let results = on_ranks(2, |comm| {
        let mut bytes = vec![0; 4 * (1 + comm.rank())];
        comm.all_reduce(&mut bytes, DType::F32, Reduction::Sum)
    });
    for error in results.iter().map(|result| result.as_ref().unwrap_err()) {
        assert_eq!(error.code(), Code::Communication);
        assert!(error.message().contains("rank 0") && error.message().contains("rank 1"), "{error}");
    }
}

#[test]
fn abort_wakes_waiting_ranks() {
    let results = on_ranks(2, |comm| {
        if comm.rank() == 0 {
            comm.abort("out of memory");
            return comm.status();
        }
        comm.receive(&mut [0], 0)
    });
    assert!(results.iter().all(|result| result.as_ref().unwrap_err().message().contains("out of memory")));
}

#[test]
fn joining_names_missing_ranks_and_refuses_ranks_out_of_range() {
    let collective = HostCollective;
    let id = collective.group_id().unwrap();
    let error = collective.join(&id, 0, 2, Duration::from_millis(20)).unwrap_err();
    assert!(error.message().contains("rank 1"), "{error}");
    assert!(collective.join(&id, 2, 2, Duration::ZERO).is_err());

    let id = collective.group_id().unwrap();
    thread::scope(|scope| {
        let other = scope.spawn(|| collective.join(&id, 1, 2, Duration::from_secs(10)).unwrap().rank());
        assert_eq!(collective.join(&id, 0, 2, Duration::from_secs(10)).unwrap().ranks(), 2);
        assert_eq!(other.join().unwrap(), 1);
    });
}
