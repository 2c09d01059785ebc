//! Holds the template for backends in Rust, `plugins/template`, to the suite: as the plugin that its README says to build.

#[path = "support/built.rs"]
mod built;

use dsrun_conformance::{
    runner::Status,
    subject::Subject,
    suite::{DRAWN, Group, SEED, groups},
};
use dsrun_core::{DType, device::DeviceOptions, op::Profile};
use dsrun_plugin_sdk::PluginBackend;
use std::env;

/// The ops of the template, as in its `tests/suite.rs`.
const OPS: &[&str] = &["add", "columns", "rms_norm"];

fn subject() -> Subject {
    let file = format!("{}template{}", env::consts::DLL_PREFIX, env::consts::DLL_SUFFIX);
    let plugin = PluginBackend::load(&built::example("template", &file)).expect("the plugin loads");
    Subject::plugin(plugin, 0, DeviceOptions::default()).expect("the device opens")
}

/// Some that it lacks, of which the suite makes cases quickly.
const OTHERS: &[&str] = &["argmax", "cast", "layer_norm", "rope"];

#[test]
fn its_ops_are_right() {
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
    for op in OTHERS {
        let of_op = |group: &Group| group.op() == *op && group.dtype() == Some(DType::F32);
        let items: Vec<_> = groups().filter(of_op).flat_map(|group| group.items(SEED, 0)).take(5).collect();
        assert!(!items.is_empty(), "the suite has no cases of {op}");
        for item in items {
            let report = item.run(&subject);
            assert!(matches!(&report.status, Status::Unsupported(reason) if !reason.is_empty()), "{report}");
        }
    }
}

#[test]
fn its_own_test_names_the_same_ops() {
    let list = OPS.iter().map(|op| format!("{op:?}")).collect::<Vec<_>>().join(", ");
    let own = include_str!("../../plugins/template/tests/suite.rs");
    assert!(
        own.contains(&format!("const OPS: &[&str] = &[{list}];")),
        "OPS differ from those of its own test"
    );
}
