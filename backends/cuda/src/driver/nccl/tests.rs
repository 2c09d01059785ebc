//! The use of NCCL, against a stand-in.

use super::*;
use dsrun_test_support::compile_c_library;
use rstest::rstest;
use std::path::{Path, PathBuf};

/// A stand-in for NCCL that keeps no memory and exchanges nothing, but checks and counts calls.
struct Fake {
    nccl: Result<Arc<Nccl>>,
    library: Handle,
    _folder: tempfile::TempDir,
}

impl Fake {
    fn new(definitions: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("libnccl.so.2");
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fake_nccl.c");
        let arguments = definitions.iter().map(|definition| format!("-D{definition}").into());
        compile_c_library(&path, arguments.chain([source]).collect::<Vec<PathBuf>>());
        // SAFETY: the library is our own, and has no initialisers.
        let open = || unsafe { Handle::new(&path) }.unwrap();
        Self { nccl: Nccl::of(open()), library: open(), _folder: folder }
    }

    fn nccl(&self) -> &Arc<Nccl> {
        self.nccl.as_ref().unwrap()
    }

    fn join(&self, timeout: Duration) -> Result<Arc<NcclComm>> {
        NcclComm::join(self.nccl(), self.nccl().unique_id()?, 1, 2, timeout).map(Arc::new)
    }

    /// A number that the library counts.
    fn count(&self, name: &str) -> i64 {
        // SAFETY: the library declares its counters so.
        unsafe { **self.library.get::<*const i64>(name.as_bytes()).unwrap() }
    }

    /// Waits for a number that another thread counts up.
    fn wait_for(&self, name: &str, expected: i64) {
        let start = Instant::now();
        while self.count(name) != expected && start.elapsed() < SECOND {
            thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(self.count(name), expected, "{name}");
    }
}

const SECOND: Duration = Duration::from_secs(1);

fn refused(definitions: &[&str]) -> Error {
    Fake::new(definitions).nccl.err().unwrap()
}

#[test]
fn a_missing_library_is_named_with_where_it_was_looked_for() {
    let error = Nccl::open_named("libnccl-that-nobody-has.so.2").unwrap_err();
    assert_eq!(error.code(), Code::Unavailable);
    for part in ["libnccl-that-nobody-has.so.2 is missing", "pip install", "LD_LIBRARY_PATH"] {
        assert!(error.message().contains(part), "{error}");
    }
}

#[test]
fn a_library_that_is_too_old_or_incomplete_is_refused() {
    let old = refused(&["VERSION=21705"]);
    assert_eq!(old.code(), Code::Unavailable);
    assert!(old.message().contains("NCCL 2.17.5, but 2.18.0 or newer is needed"), "{old}");
    let ancient = refused(&["VERSION=2708"]);
    assert!(ancient.message().contains("NCCL 2.7.8"), "{ancient}");
    let incomplete = refused(&["WITHOUT_FINALIZE"]);
    assert!(incomplete.message().contains("lacks its function finalize"), "{incomplete}");
}

#[test]
fn ranks_connect_without_blocking_and_leave_in_order() {
    let fake = Fake::new(&["BUSY_POLLS=5"]);
    let comm = fake.join(SECOND).unwrap();
    assert_eq!(fake.nccl().version(), 22_809);
    assert!(fake.count("polls") > 5);
    assert_eq!(comm.status(), Ok(()));
    drop(comm);
    assert_eq!([fake.count("finalized"), fake.count("destroyed"), fake.count("aborted")], [1, 1, 0]);
}

#[test]
fn a_rank_that_does_not_connect_in_time_is_given_up() {
    let fake = Fake::new(&["BUSY_POLLS=1000000000"]);
    let error = fake.join(Duration::from_millis(20)).unwrap_err();
    assert_eq!(error.code(), Code::Timeout);
    assert!(error.message().contains("connecting rank 1 of 2"), "{error}");
    fake.wait_for("aborted", 1);
    assert_eq!(fake.count("destroyed"), 0);
}

#[test]
fn an_init_that_fails_says_why() {
    let fake = Fake::new(&["INIT_STATUS=5"]);
    let error = fake.join(SECOND).unwrap_err();
    assert_eq!(error.code(), Code::Communication);
    assert!(error.message().contains("fake error 5 (5); the last words"), "{error}");
}

#[test]
fn an_error_behind_an_operation_is_told() {
    let fake = Fake::new(&["FAILURE=6"]);
    let comm = fake.join(SECOND).unwrap();
    assert_eq!(comm.status(), Ok(()));
    call(&comm, Operation::AllReduce(Reduction::Sum), DType::BF16).unwrap();
    let error = comm.status().unwrap_err();
    assert_eq!(error.code(), Code::Communication);
    assert!(error.message().contains("fake error 6"), "{error}");
    assert!(call(&comm, Operation::AllGather, DType::F32).is_ok_and(|()| comm.status().is_err()));
}

#[test]
fn an_aborted_group_takes_no_operations_and_is_not_destroyed_again() {
    let fake = Fake::new(&[]);
    let comm = fake.join(SECOND).unwrap();
    comm.abort();
    comm.abort();
    fake.wait_for("aborted", 1);
    let error = call(&comm, Operation::AllGather, DType::F32).unwrap_err();
    assert!(error.message().contains("aborted"), "{error}");
    assert!(comm.status().is_err());
    drop(comm);
    assert_eq!([fake.count("finalized"), fake.count("destroyed"), fake.count("aborted")], [0, 0, 1]);
}

fn call(comm: &Arc<NcclComm>, operation: Operation, dtype: DType) -> Result<()> {
    let call = NcclCall { comm: comm.clone(), operation, from: 4096, to: 8192, count: 10, dtype };
    call.enqueue(Raw(ptr::null_mut()))
}

/// The function, the addresses, the count, the type and the reduction, root or peer that NCCL gets.
#[rstest]
#[case(Operation::AllReduce(Reduction::Mean), DType::BF16, [1, 4096, 8192, 10, 9, 4])]
#[case(Operation::AllReduce(Reduction::Max), DType::I32, [1, 4096, 8192, 10, 2, 2])]
#[case(Operation::AllGather, DType::U8, [2, 4096, 8192, 10, 1, 0])]
#[case(Operation::ReduceScatter(Reduction::Min), DType::F16, [3, 4096, 8192, 10, 6, 3])]
#[case(Operation::Broadcast(1), DType::F32, [4, 4096, 8192, 10, 7, 1])]
#[case(Operation::Send(0), DType::U32, [5, 4096, 0, 10, 3, 0])]
#[case(Operation::Receive(0), DType::I8, [6, 0, 8192, 10, 0, 0])]
// The last block of both that is exchanged: 10 elements of 2 bytes on.
#[case(Operation::AllToAll(2), DType::BF16, [6, 0, 8212, 10, 9, 1])]
fn operations_are_what_nccl_calls_them(
    #[case] operation: Operation,
    #[case] dtype: DType,
    #[case] expected: [i64; 6],
) {
    let fake = Fake::new(&["BUSY_CALLS=3"]);
    let comm = fake.join(SECOND).unwrap();
    call(&comm, operation, dtype).unwrap();
    let names = ["function", "from", "to", "count", "dtype", "number"];
    assert_eq!(names.map(|name| fake.count(name)), expected);
    let grouped = i64::from(matches!(operation, Operation::AllToAll(_)));
    assert_eq!([fake.count("groups_begun"), fake.count("groups_ended")], [grouped; 2]);
}
