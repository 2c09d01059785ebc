//! Collectives over handles of the device in one process.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

#[path = "support/bench.rs"]
mod bench;

use bench::{Bench, desc, tensor};
use dsrun_core::{
    DType, TensorDesc,
    collective::{Comm, host::HostComm},
    kernels::{Argument, Binding},
    op::{AllGather, AllReduce, MeshAxis, Op, Receive, ReduceScatter, Reduction, Send as SendOp},
};
use dsrun_cpu::CpuBackend;
use rstest::rstest;
use std::{sync::Arc, thread};

/// Runs `work` as every rank of a group, each on a thread; all on one handle, or each on its own.
fn as_ranks<T: Send>(
    ranks: usize,
    shared: bool,
    work: impl Fn(usize, &Bench, Arc<dyn Comm>) -> T + Sync,
) -> Vec<T> {
    let backend = CpuBackend::new();
    let one = Bench::new(&backend, 1);
    let comms = HostComm::group(ranks).unwrap();
    thread::scope(|scope| {
        let threads: Vec<_> = comms
            .into_iter()
            .enumerate()
            .map(|(rank, comm)| {
                let (work, one, backend) = (&work, &one, &backend);
                scope.spawn(move || {
                    let own = (!shared).then(|| Bench::new(backend, 1));
                    work(rank, own.as_ref().unwrap_or(one), Arc::new(comm))
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

#[rstest]
fn strided_bounded_rows_are_reduced_in_place(#[values(false, true)] shared: bool) {
    let x = TensorDesc { strides: vec![3, 1], ..TensorDesc::dense(DType::F32, &[3, 2]) }.with_extent();
    let found = as_ranks(2, shared, |rank, bench, comm| {
        let slice = bench.upload(&[1.0 + rank as f32; 8]);
        let binding = Binding { slice, extent: Some(bench.upload(&[2])) };
        let operands = vec![Some((tensor(x.clone()), Argument::Tensor(binding.clone())))];
        let op = AllReduce { axis: MeshAxis::Tensor, reduction: Reduction::Sum };
        bench.run_with(op, operands, vec![(x.clone(), binding.clone())], Some(comm)).unwrap();
        bench.download::<f32>(&binding.slice)
    });
    for (rank, found) in found.into_iter().enumerate() {
        let own = 1.0 + rank as f32;
        assert_eq!(found, [3.0, 3.0, own, 3.0, 3.0, own, own, own]);
    }
}

#[rstest]
#[case(false, [0, 1, 10, 11, 2, 3, 12, 13])]
#[case(true, [0, 1, 2, 3, 10, 11, 12, 13])]
fn gathering_puts_ranks_side_by_side_or_below(#[case] rows: bool, #[case] expected: [i32; 8]) {
    let found = as_ranks(2, false, |rank, bench, comm| {
        let x = [0, 1, 2, 3].map(|x| x + 10 * rank as i32);
        let y = Binding::new(bench.upload(&[0i32; 8]));
        let shape = if rows { [4, 2] } else { [2, 4] };
        let op = AllGather { axis: MeshAxis::Tensor, ranks: 2, rows };
        let results = vec![(desc(DType::I32, &shape), y.clone())];
        bench.run_with(op, vec![Some(bench.operand(&x, &[2, 2]))], results, Some(comm)).unwrap();
        bench.download::<i32>(&y.slice)
    });
    assert!(found.iter().all(|found| *found == expected), "{found:?}");
}

#[rstest]
#[case(false, [[0, 2, 8, 10], [4, 6, 12, 14]])]
#[case(true, [[0, 2, 4, 6], [8, 10, 12, 14]])]
fn scattering_shares_out_features_or_rows(#[case] rows: bool, #[case] expected: [[i32; 4]; 2]) {
    let found = as_ranks(2, false, |_, bench, comm| {
        let x: Vec<i32> = (0..8).collect();
        let y = Binding::new(bench.upload(&[0i32; 4]));
        let shape = if rows { [1, 4] } else { [2, 2] };
        let op = ReduceScatter { axis: MeshAxis::Tensor, ranks: 2, rows, reduction: Reduction::Sum };
        let results = vec![(desc(DType::I32, &shape), y.clone())];
        bench.run_with(op, vec![Some(bench.operand(&x, &[2, 4]))], results, Some(comm)).unwrap();
        bench.download::<i32>(&y.slice)
    });
    assert_eq!(found, expected);
}

#[test]
fn a_receive_gets_the_tensor_of_its_send() {
    let found = as_ranks(2, true, |rank, bench, comm| {
        let x = bench.operand(&[5, 6, 7], &[1, 3]);
        if rank == 0 {
            let op = SendOp { axis: MeshAxis::Pipeline, peer: 1 };
            bench.run_with(Op::Send(op), vec![Some(x)], vec![], Some(comm)).unwrap();
            return vec![];
        }
        let y = Binding::new(bench.upload(&[0i32; 3]));
        let operand = (tensor(desc(DType::I32, &[1, 3])), Argument::Tensor(y.clone()));
        let op = Receive { axis: MeshAxis::Pipeline, peer: 0 };
        let results = vec![(desc(DType::I32, &[1, 3]), y.clone())];
        bench.run_with(op, vec![Some(operand)], results, Some(comm)).unwrap();
        bench.download::<i32>(&y.slice)
    });
    assert_eq!(found[1], [5, 6, 7]);
}
