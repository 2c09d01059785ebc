//! The page `docs/src/ops.md` is the op table of dsrun-core, and this test keeps it so.
//!
//! `cargo xtask docs` runs it with `DSRUN_UPDATE_DOCS=1`, which writes the page instead of comparing it. It is a test and no
//! part of the program so that `cargo xtask` still starts when dsrun-core does not compile.

use std::path::Path;
use std::{env, fs};

use dsrun_core::op::{Op, OperandSpec, Profile, ResultSpec, Signature};

const INTRODUCTION: &str = "\
# Op table

<!-- Generated from the signatures in dsrun-core by `cargo xtask docs`. Do not edit. -->

Every primitive op, by profile. A backend that names a profile has all of its ops. The documentation of each op's type in
`dsrun_core::op` is its full definition: shapes, edge cases, rounding. The C header `dsrun.h` has the same text.

An operand is written `name: type`, with `?` when it may be left out. `float` is f32, f16 or bf16; a `weight` is packed by the
backend and may have any weight format. A result `y = x` is the operand `x`, updated in place.
";

#[test]
fn the_op_table_is_up_to_date() {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/src/ops.md");
    let expected = render(Op::PRIMITIVES);
    if env::var_os("DSRUN_UPDATE_DOCS").is_some() {
        fs::write(&page, &expected).expect("docs/src/ops.md can be written");
    }
    let actual = fs::read_to_string(&page).unwrap_or_default().replace("\r\n", "\n");
    assert!(actual == expected, "docs/src/ops.md is not what dsrun-core says; run `cargo xtask docs`");
}

fn render(signatures: &[&Signature]) -> String {
    let mut page = String::from(INTRODUCTION);
    for profile in Profile::ALL {
        let rows: Vec<String> = signatures
            .iter()
            .filter(|signature| signature.profile == profile)
            .map(|signature| row(signature))
            .collect();
        if !rows.is_empty() {
            page += &format!(
                "\n## {}\n\n| op | computes | operands | results |\n|---|---|---|---|\n",
                profile.name()
            );
            page.extend(rows);
        }
    }
    page
}

fn row(signature: &Signature) -> String {
    let operand = |spec: &OperandSpec| {
        let optional = if spec.optional { "?" } else { "" };
        format!("`{}{optional}: {}`", spec.name, spec.kind.name())
    };
    let result = |spec: &ResultSpec| match spec.updates {
        Some(index) => format!("`{} = {}`", spec.name, signature.operands[index].name),
        None => format!("`{}`", spec.name),
    };
    let operands: Vec<_> = signature.operands.iter().map(operand).collect();
    let results: Vec<_> = signature.results.iter().map(result).collect();
    // A bar would end the cell, even within code.
    let summary = signature.summary.replace('|', "\\|");
    format!("| `{}` | {summary} | {} | {} |\n", signature.name, operands.join(", "), results.join(", "))
}

#[test]
fn a_row_shows_what_is_optional_and_what_is_updated() {
    const SIGNATURE: Signature = Signature {
        name: "made_up",
        profile: Profile::LlmMoe1,
        summary: "`a | b`",
        operands: &[
            OperandSpec { name: "cache", kind: dsrun_core::op::OperandKind::Any, optional: false },
            OperandSpec { name: "bias", kind: dsrun_core::op::OperandKind::Float, optional: true },
        ],
        results: &[ResultSpec { name: "cache", updates: Some(0) }, ResultSpec { name: "y", updates: None }],
    };
    let page = render(&[&SIGNATURE]);
    assert!(page.contains("## llm-moe-1\n") && !page.contains("## llm-core-1\n"), "{page}");
    assert!(
        page.ends_with("| `made_up` | `a \\| b` | `cache: any`, `bias?: float` | `cache = cache`, `y` |\n"),
        "{page}"
    );
}
