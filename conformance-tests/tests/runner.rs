//! Tests of the suite itself, against a device that knows the answers: it must pass every case, and must fail as soon as it
//! misbehaves in one way.

#[path = "runner/playback.rs"]
mod playback;

use dsrun_conformance::{
    case::Case,
    cases::TABLES,
    runner::{self, Report, Status},
};
use dsrun_core::{DType, device::Device, op::Op};
use playback::{Fault, PlaybackDevice};
use rstest::rstest;
use std::sync::Arc;

/// Runs a case on devices that play back its expected results, with a fault.
fn play(case: &Case, fault: Fault) -> Report {
    let devices: Vec<Arc<dyn Device>> =
        case.calls.iter().map(|call| PlaybackDevice::open(call, fault) as Arc<dyn Device>).collect();
    runner::run(case, &devices)
}

fn cases(op: &str, dtype: DType) -> Vec<Case> {
    TABLES.iter().filter(|table| table.op == op).flat_map(|table| (table.cases)(dtype)).collect()
}

/// One test for each element type, so that they run side by side.
#[rstest]
fn right_answers_pass_every_case(
    #[values(DType::F32, DType::F16, DType::BF16, DType::I32, DType::I8, DType::U8, DType::U32)] dtype: DType,
) {
    for table in TABLES.iter().filter(|table| table.dtypes.contains(&dtype)) {
        for case in (table.cases)(dtype) {
            // A work list is made by another call than the one played back.
            if case.calls.iter().any(|call| matches!(call.op, Op::PagedAttention(_))) {
                continue;
            }
            let report = play(&case, Fault::None);
            assert!(report.passed(), "{report}");
        }
    }
}

#[rstest]
#[case::wrong_element("rms_norm", Fault::WrongElement, "are wrong")]
#[case::wrong_integer("argmax", Fault::WrongElement, "are wrong")]
#[case::writes_past_the_extent("rms_norm/f32/extent", Fault::WritesAll, "must be left alone")]
#[case::writes_skipped_rows("gather_rows/f32/some", Fault::WritesAll, "must be left alone")]
#[case::writes_gaps("add/f32/strided", Fault::WritesGaps, "gap between rows")]
#[case::writes_behind("add", Fault::WritesBehind, "behind its end")]
#[case::writes_in_front("add", Fault::WritesInFront, "in front of it")]
#[case::changes_operands("add", Fault::ChangesOperand, "was changed")]
#[case::differs_from_run_to_run("add/f32/prime", Fault::Wavers, "runs again")]
#[case::overruns_the_workspace("add", Fault::OverrunsWorkspace, "around the workspace")]
#[case::keeps_memory("add", Fault::Leaks, "more after the call")]
#[case::writes_nothing("add", Fault::WritesNothing, "are wrong")]
#[case::truncates_to_half("rms_norm/f32/prime", Fault::HalfPrecision, "are wrong")]
fn misbehaviour_is_caught(#[case] of: &str, #[case] fault: Fault, #[case] expected: &str) {
    let op = of.split('/').next().unwrap_or(of);
    let wanted = |case: &Case| if of.contains('/') { case.id == of } else { case.id.ends_with("/prime") };
    let case = cases(op, DType::F32).into_iter().find(wanted).unwrap();
    assert!(play(&case, Fault::None).passed());
    let report = play(&case, fault);
    let Status::Failed(failures) = &report.status else { panic!("{report}") };
    assert!(failures.iter().any(|failure| failure.contains(expected)), "{report}");
}

#[test]
fn ranks_that_get_unlike_bits_are_caught() {
    let wanted = |case: &Case| case.id == "all_reduce_sum/f32/odd_over_3";
    let case = cases("all_reduce", DType::F32).into_iter().find(wanted).unwrap();
    assert!(play(&case, Fault::None).passed());
    // Within the gate on every rank, but not the same.
    let devices: Vec<Arc<dyn Device>> = case
        .calls
        .iter()
        .enumerate()
        .map(|(rank, call)| {
            let fault = if rank == 1 { Fault::LastBit } else { Fault::None };
            PlaybackDevice::open(call, fault) as Arc<dyn Device>
        })
        .collect();
    let report = runner::run(&case, &devices);
    assert_eq!(report.status, Status::Failed(vec!["ranks got different bits".into()]));
}

#[test]
fn a_device_that_declines_is_unsupported_with_its_reason() {
    let case = cases("add", DType::F16).remove(0);
    let report = play(&case, Fault::Declines);
    assert!(
        matches!(&report.status, Status::Unsupported(reason) if reason.contains("not today")),
        "{report}"
    );
}
