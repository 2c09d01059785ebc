//! The families of faults: each fault is one of the CPU backend's ops with one mistake, in this process, and the cases of the op
//! must catch it. Harmless variants of the backend must pass.
//!
//! `cargo test -p dsrun-conformance --test families -- extent_ignored::linear` runs one.

#![allow(dead_code, reason = "the plugin of mutants uses the rest")]

#[path = "../mutants/change.rs"]
mod change;
#[path = "../mutants/families.rs"]
mod families;
#[path = "../mutants/faults.rs"]
mod faults;
#[path = "../mutants/faulty_caches.rs"]
mod faulty_caches;
#[path = "../mutants/faulty_calls.rs"]
mod faulty_calls;
#[path = "../mutants/faulty_experts.rs"]
mod faulty_experts;
#[path = "../mutants/faulty_groups.rs"]
mod faulty_groups;
#[path = "../mutants/faulty_latents.rs"]
mod faulty_latents;
#[path = "../mutants/faulty_masks.rs"]
mod faulty_masks;
#[path = "../mutants/faulty_process.rs"]
mod faulty_process;
#[path = "../mutants/harmless.rs"]
mod harmless;
#[path = "support/items.rs"]
mod items;
#[path = "../mutants/late.rs"]
mod late;
#[path = "../mutants/number_families.rs"]
mod number_families;
#[path = "../mutants/raw.rs"]
mod raw;
#[path = "../mutants/snapshot.rs"]
mod snapshot;
#[path = "../mutants/tensor.rs"]
mod tensor;
#[path = "../mutants/wrap.rs"]
mod wrap;

use dsrun_conformance::{
    runner::Status,
    subject::Subject,
    suite::{Item, groups},
};
use dsrun_core::device::DeviceOptions;
use families::{Member, OPS, families, members};
use faults::Fault;
use harmless::{HARMLESS, Harmless};
use items::items_of;
use libtest_mimic::{Arguments, Failed, Trial};
use std::{fs, path::Path, sync::Arc};
use wrap::MutantBackend;

fn main() {
    let arguments = Arguments::from_args();
    let members = members();
    let caught = members.into_iter().map(|member| Trial::test(member.name(), move || is_caught(&member)));
    let harmless = HARMLESS
        .iter()
        .map(|harmless| Trial::test(format!("harmless::{}", harmless.fault.name), move || passes(harmless)));
    let book = Trial::test("the_book_shows_them_all", the_book_shows_them_all);
    let trials = caught.chain(harmless).chain([book]).collect();
    libtest_mimic::run(&arguments, trials).exit();
}

/// The items of the group with this name, without random ones; none if there is no such group.
fn items(group: &str) -> Arc<Vec<Item>> {
    let group = groups().find(|found| found.name() == group);
    group.map_or_else(Arc::default, |group| items_of(group, 0, usize::MAX))
}

/// A device of the CPU backend with a fault.
fn subject(fault: &Fault) -> Result<Subject, Failed> {
    let options = DeviceOptions { threads: Some(1), ..DeviceOptions::default() };
    let fault: &'static Fault = Box::leak(Box::new(*fault));
    Ok(Subject::linked(Arc::new(MutantBackend::new(fault, String::new())), 0, options)?)
}

/// Whether an id is meant by one that may end with `*`.
fn is_meant(pattern: &str, id: &str) -> bool {
    pattern.strip_suffix('*').map_or(pattern == id, |start| id.starts_with(start))
}

fn is_caught(member: &Member) -> Result<(), Failed> {
    let subject = subject(&member.fault)?;
    let items = match member.caught_by.starts_with("check/") {
        true => items(&member.caught_by),
        false => items(&format!("{}/{}", member.op.op, member.op.dtype)),
    };
    let meant: Vec<&Item> = items.iter().filter(|item| is_meant(&member.caught_by, &item.id)).collect();
    if meant.is_empty() {
        return Err(format!("there is no case {}", member.caught_by).into());
    }
    for item in &meant {
        if matches!(item.run(&subject).status, Status::Failed(_)) {
            return Ok(());
        }
    }
    Err(format!("{} {}: {} does not catch it", member.op.op, member.family.about, member.caught_by).into())
}

fn passes(harmless: &Harmless) -> Result<(), Failed> {
    let subject = subject(&harmless.fault)?;
    let mut ran = 0;
    let mut check = |group: &str, patterns: &[String]| {
        for item in
            items(group).iter().filter(|item| patterns.iter().any(|pattern| is_meant(pattern, &item.id)))
        {
            ran += 1;
            let report = item.run(&subject);
            if let Status::Failed(_) = report.status {
                return Err(Failed::from(format!("a backend that {} fails: {report}", harmless.about)));
            }
        }
        Ok(())
    };
    for op in OPS {
        check(&format!("{}/{}", op.op, op.dtype), &op.small_cases())?;
    }
    for id in harmless.checks {
        check(id, &[(*id).to_owned()])?;
    }
    if ran < 70 { Err(format!("only {ran} cases ran").into()) } else { Ok(()) }
}

/// The table in the book is that of the families.
fn the_book_shows_them_all() -> Result<(), Failed> {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/src/crates/conformance.md");
    let page = fs::read_to_string(page)?;
    let missing: Vec<String> = families()
        .map(|family| format!("| `{}` | {} |", family.name, family.about))
        .chain(HARMLESS.iter().map(|harmless| format!("| `{}` | {} |", harmless.fault.name, harmless.about)))
        .filter(|row| !page.lines().any(|line| line == row))
        .collect();
    if missing.is_empty() {
        return Ok(());
    }
    Err(format!("docs/src/crates/conformance.md lacks\n{}", missing.join("\n")).into())
}
