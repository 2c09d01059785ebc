//! Runs the conformance suite for the ops of this backend, and checks that it refuses other ops.

use dsrun_backend_my_backend::MyBackend;
use dsrun_conformance::{
    runner::Status,
    subject::Subject,
    suite::{DRAWN, Group, SEED, groups},
};
use dsrun_core::{DType, device::DeviceOptions, op::Profile};
use std::sync::Arc;

/// The ops of this backend.
const OPS: &[&str] = &["add", "columns", "rms_norm"];

fn subject() -> Subject {
    Subject::linked(Arc::new(MyBackend::new()), 0, DeviceOptions::default()).expect("the device opens")
}

#[test]
fn every_op_it_has_is_right() {
    let subject = subject();
    for op in OPS {
        let of_op = |group: &Group| group.op() == *op && group.dtype() == Some(DType::F32);
        let items: Vec<_> = groups().filter(of_op).flat_map(|group| group.items(SEED, DRAWN)).collect();
        assert!(!items.is_empty(), "the suite has no cases of {op}");
        for item in items {
            let report = item.run(&subject);
            let optional = !item.is_required(&subject, &[Profile::LlmCore1]);
            let refused = matches!(report.status, Status::Unsupported(_));
            assert!(report.passed() || (refused && optional), "{report}");
        }
    }
}

#[test]
fn other_ops_are_refused_with_a_reason() {
    let subject = subject();
    for group in groups().filter(|group| group.dtype() == Some(DType::F32) && !OPS.contains(&group.op())) {
        let Some(item) = group.items(SEED, 0).into_iter().next() else { continue };
        let report = item.run(&subject);
        assert!(matches!(&report.status, Status::Unsupported(reason) if !reason.is_empty()), "{report}");
    }
}
