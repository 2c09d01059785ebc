//! The text form of programs: it round-trips, and no text makes the parser panic or allocate without bound.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

#[path = "support/types.rs"]
mod types;

use dsrun_core::{
    DType, TensorType, WeightExpr, WeightFormat, WeightType,
    op::{Add, AllReduce, Broadcast, Cast, Linear, MeshAxis, OperandType, Reduction, RmsNorm, Send},
    placement::Placement,
    program::{Lane, Program, ProgramBuilder, SegmentKind, ValueId},
    region::well_known,
};
use proptest::prelude::*;
use rstest::rstest;
use std::{
    alloc::{GlobalAlloc, Layout, System},
    cell::Cell,
    sync::Arc,
};
use types::operand;

/// An allocator that counts the bytes each thread allocates.
struct Counting;

thread_local! {
    static ALLOCATED: Cell<usize> = const { Cell::new(0) };
}

// SAFETY: every call is passed unchanged to the system allocator; the counter neither allocates nor unwinds.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // Allocations while a thread ends, after its counter is destroyed, do not count.
        let _ = ALLOCATED.try_with(|allocated| allocated.set(allocated.get().saturating_add(layout.size())));
        // SAFETY: the caller's promises are those of this method.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: `pointer` came from `alloc` above, so from the system's allocator, with this layout.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// Parses a text and checks that allocations are in proportion to its length.
fn parse(text: &str) -> dsrun_core::Result<Program> {
    let before = ALLOCATED.get();
    let parsed = text.parse();
    let allocated = ALLOCATED.get() - before;
    assert!(allocated <= 64 * 1024 + 1024 * text.len(), "{allocated} bytes for a text of {}", text.len());
    parsed
}

/// A text with every construct, as the writer formats it.
const EVERYTHING: &str = r#"program "every \"thing\"\\ \n\t\u{1} ünï" {
  extents t, r.x-1
  %0 = input "ids": i32[?t]
  %1 = weight "embed": q4_1[96, 64] = concat(0, tensor("a"), slice(0, 2, 34, tensor("b \"quoted\"\n")))
  %2 = weight "mixed": f32[12, 64] = pad(1, 1, scale(-0.5, permute(interleave(2, tensor("c"), tensor("d")), 3, 0, 1, 2)))
  %3 = vector "norm": f32[64] = cast(f32, tensor("norm"))
  %4 = vector "odd": f32[3] = constant(0.1, -inf, 1e-30)
  %5 = vector "none": f32[0] = constant()
  %6 = state "kv": f16[$pages, 2, 16, 32] @ pipeline=partial, tensor=sharded(1)
  %7 = input "slots": i32[?t]
  %8 = state "scalar": u32[]
  %9 = input "pages": i32[?r.x-1] @ data=sharded(0)
  %15 = state "v": f16[$pages, 2, 16, 32]
  segment "first\tone": graph
  %10: f32[?t, 64] @ tensor=partial = embed{dtype=f32, first_row=0, position_offset=0}(%0, %1, _, _)
  %11: f32[?t, 64] @ data=partial, expert=sharded(1), %12: f32[?t, 64] = region "add_rms_norm" (3) { %3 = add{alpha=1.0}(%0, %1, _, _); %4 = rms_norm{eps=1e-5, weight_offset=0.0}(%3, %2); return %3, %4 }(%10, %10, %3)
  %13: f16[$pages, 2, 16, 32], %14: f16[$pages, 2, 16, 32] = kv_write(%6, %15, %11, %12, %7)
  %16: f32[?t, 64] = all_reduce{axis=tensor, reduction=sum}(%12)
  send{axis=pipeline, peer=3}(%16)
  send{axis=pipeline, peer=3}(%16) on copy
  %17: f16[?r.x-1, 1024] = page_gather(%13, %9) on copy
  segment "mask": host
  segment "": wait
  segment "last": eager
  %18: f32[?t, 96] = linear{dtype=f32}(%16, %1, _) on communication
  %19: i32[?t] = argmax(%18)
  barrier{axis=data}() on compute
  output %19, %17, %0
}
"#;

#[test]
fn every_construct_round_trips() {
    let program = parse(EVERYTHING).unwrap();
    assert_eq!(program.to_string().parse::<Program>().unwrap(), program);
    assert_eq!(program.to_string(), EVERYTHING);
    assert_eq!(program.name, "every \"thing\"\\ \n\t\u{1} ünï");
    assert_eq!(program.nodes.len(), 10);
    assert_eq!(program.nodes[5].lane, Lane::Copy);
    assert_eq!(program.nodes[9].lane, Lane::Compute);
    let kinds: Vec<SegmentKind> = program.segments.iter().map(|segment| segment.kind).collect();
    assert_eq!(kinds, [SegmentKind::Graph, SegmentKind::Host, SegmentKind::Wait, SegmentKind::Eager]);
    let kv = program.value(ValueId::new(6)).unwrap().placements;
    assert_eq!(kv.get(MeshAxis::Tensor), Placement::Sharded(1));
    assert_eq!(kv.get(MeshAxis::Pipeline), Placement::Partial);
    assert_eq!(kv.get(MeshAxis::Data), Placement::Replicated);
}

#[test]
fn whitespace_is_ignored() {
    let text = "program\"p\"{extents t %0=input\"x\":f32[?t,8]segment\"s\":graph%1:f32[?t,8]=cast{dtype=f32}(%0)output%1}";
    let program = parse(text).unwrap();
    assert_eq!(parse(&text.replace(',', "\n,\r\n\t")).unwrap(), program);
    assert_eq!(program.nodes[0].call.op, Cast { dtype: DType::F32 }.into());
}

#[test]
fn the_documented_text_is_valid() {
    let source = include_str!("../src/ir/program/text.rs");
    let (_, text) = source.split_once("//! ```text\n").unwrap();
    let (text, _) = text.split_once("//! ```\n").unwrap();
    let text: String =
        text.lines().map(|line| format!("{}\n", line.trim_start_matches("//!").trim_start())).collect();
    let program = parse(&text).unwrap();
    assert_eq!((program.name.as_str(), program.nodes.len()), ("llama", 1));
    assert_eq!(parse(&program.to_string()).unwrap(), program);
}

#[test]
fn an_empty_program_is_valid() {
    let program = Program::default();
    assert_eq!(parse(&program.to_string()).unwrap(), program);
}

/// Line 4 of a small program, and the message of its error after the line number.
#[rstest]
#[case::unknown_op("%1: f32[?t, 8] = relu(%0)", "there is no op `relu`")]
#[case::unknown_op_with_attributes("%1: f32[?t, 8] = relu{slope=1}(%0)", "there is no op `relu`")]
#[case::unknown_attribute(
    "%1: f32[?t, 8] = cast{dtypes=f32}(%0)",
    "cast.dtypes: is not an attribute of the op"
)]
#[case::attribute_twice("%1: f32[?t, 8] = cast{dtype=f32, dtype=f32}(%0)", "cast.dtype: is given twice")]
#[case::attribute_missing("%1: f32[?t, 8] = cast(%0)", "cast.dtype: is missing")]
#[case::attribute_wrong(
    "%1: f32[?t, 8] = cast{dtype=f33}(%0)",
    "cast.dtype: is `f33`, which is not a valid value"
)]
#[case::no_type("%1 cast{dtype=f32}(%0)", "expected `:`, found `cast{dtype=f32}(%0)`")]
#[case::unknown_type("%1: f31[?t] = cast{dtype=f32}(%0)", "expected an element type, found `f31[?t]")]
#[case::negative_size("%1: f32[-1] = cast{dtype=f32}(%0)", "expected a size, found `-1]")]
#[case::huge_size("%1: f32[99999999999999999999] = cast{dtype=f32}(%0)", "expected a size")]
#[case::number_too_large("%4294967296: f32[?t, 8] = cast{dtype=f32}(%0)", "expected the number of a value")]
#[case::declared_twice("%0: f32[?t, 8] = cast{dtype=f32}(%0)", "%0 is declared twice")]
#[case::unknown_lane("%1: f32[?t, 8] = cast{dtype=f32}(%0) on disk", "expected a lane, found `disk`")]
#[case::unknown_axis(
    "%1: f32[?t, 8] @ model=partial = cast{dtype=f32}(%0)",
    "expected a mesh axis, found `model"
)]
#[case::unknown_placement("%1: f32[?t, 8] @ data=split = cast{dtype=f32}(%0)", "unknown placement `split`")]
#[case::unknown_declaration("%1 = output_of \"x\": f32[8]", "unknown declaration `output_of`")]
#[case::unknown_format("%1 = weight \"w\": q9[8, 8] = tensor(\"w\")", "expected a weight format")]
#[case::unknown_expression(
    "%1 = weight \"w\": f32[8, 8] = invert(tensor(\"w\"))",
    "unknown weight expression `invert`"
)]
#[case::no_expression("%1 = weight \"w\": f32[8, 8] }", "expected `=`")]
#[case::unknown_segment("segment \"x\": later", "expected a segment kind")]
#[case::open_quote("segment \"x: graph", "expected a closing quote")]
#[case::bad_escape("segment \"\\u{110000}\": graph", "expected a character code")]
#[case::bad_region("%1: f32[?t, 8] = region \"r\" (1) { return %0 }(%0)", "a region needs a body")]
#[case::region_in_region(
    "%1: f32[8] = region \"r\" (1) { %1 = region \"q\" (1) { return %0 }(%0); return %1 }(%0)",
    "a region needs a body"
)]
#[case::region_of_wrong_form(
    "%1: f32[?t, 8] = region \"r\" (1) { %1, %2 = cast{dtype=f16}(%0); return %2 }(%0)",
    "call 0 has 1 operands and 2 results"
)]
#[case::hidden_operands(
    "%1: f32[?t, 8] = region \"r\" (18446744073709551615) { %1 = cast{dtype=f16}(%0); return %1 }(%0)",
    "at most 4096"
)]
fn errors_name_the_line(#[case] line: &str, #[case] message: &str) {
    let text = format!(
        "program \"p\" {{\n  %0 = input \"x\": f32[?t, 8]\n  segment \"s\": graph\n{line}\n  output %1\n}}\n"
    );
    let error = parse(&text).unwrap_err().to_string();
    assert!(error.contains("line 4") && error.contains(message), "{error}");
}

#[rstest]
#[case::empty_text("", "line 1: expected `program`")]
#[case::something_else("{}", "line 1: expected `program`")]
#[case::no_end("program \"p\" {\n", "line 2: expected a word, found ``")]
#[case::text_after_the_end(
    "program \"p\" { output }\n\nx",
    "line 3: expected the end of the text, found `x`"
)]
#[case::never_declared("program \"p\" {\n%1 = input \"x\": f32[1]\noutput %1 }", "%0 is never declared")]
#[case::before_a_segment(
    "program \"p\" {\nbarrier{axis=data}()\noutput }",
    "line 2: a call precedes the first segment"
)]
#[case::wrong_word_on_a_later_line(
    "program \"p\" {\n%0: \n\n f31[8] = x",
    "line 4: expected an element type, found `f31"
)]
#[case::invalid("program \"p\" {\n%0 = input \"x\": f32[?t]\noutput %0 }", "%0: size ?t has no extent")]
fn invalid_programs_are_refused(#[case] text: &str, #[case] message: &str) {
    let error = parse(text).unwrap_err().to_string();
    assert!(error.contains(message), "{error}");
}

#[test]
fn deeply_nested_expressions_are_refused() {
    let nested = |depth: usize| {
        let expr = format!("{}tensor(\"w\"){}", "scale(2.0, ".repeat(depth), ")".repeat(depth));
        format!("program \"p\" {{\n%0 = vector \"w\": f32[8] = {expr}\noutput }}\n")
    };
    parse(&nested(64)).unwrap();
    assert!(
        parse(&nested(65))
            .unwrap_err()
            .to_string()
            .contains("line 2: weight expressions are nested too deeply")
    );
    assert!(parse(&nested(100_000)).is_err());
}

/// Time and memory are in proportion to the number of declarations.
#[test]
fn long_texts_are_read() {
    let inputs: String =
        (0..20_000).map(|index| format!("%{index} = input \"{index:07}\": f32[1]\n")).collect();
    let program = parse(&format!("program \"long\" {{\n{inputs}output }}\n")).unwrap();
    assert_eq!(program.values.len(), 20_000);
}

fn weight_expr() -> impl Strategy<Value = WeightExpr> {
    let number = || prop_oneof![0..100usize, Just(usize::MAX)];
    let factor = || any::<f32>().prop_filter("equal to itself", |factor| !factor.is_nan());
    let leaf = prop_oneof![
        any::<String>().prop_map(WeightExpr::Tensor),
        proptest::collection::vec(factor(), 0..4).prop_map(WeightExpr::Constant),
    ];
    leaf.prop_recursive(4, 16, 3, move |inner| {
        let boxed = inner.clone().prop_map(Box::new);
        let parts = proptest::collection::vec(inner, 0..4);
        prop_oneof![
            (boxed.clone(), number(), number(), number())
                .prop_map(|(of, dimension, start, end)| WeightExpr::Slice { of, dimension, start, end }),
            (parts.clone(), number()).prop_map(|(parts, dimension)| WeightExpr::Concat { parts, dimension }),
            (parts, number()).prop_map(|(parts, block)| WeightExpr::Interleave { parts, block }),
            (boxed.clone(), proptest::collection::vec(number(), 0..4))
                .prop_map(|(of, rows)| WeightExpr::Permute { of, rows }),
            boxed.clone().prop_map(|of| WeightExpr::Transpose { of }),
            (boxed.clone(), proptest::collection::vec(number(), 0..4))
                .prop_map(|(of, shape)| WeightExpr::Reshape { of, shape }),
            (boxed.clone(), factor()).prop_map(|(of, factor)| WeightExpr::Scale { of, factor }),
            (boxed.clone(), prop::sample::select(DType::ALL.as_slice()))
                .prop_map(|(of, dtype)| WeightExpr::Cast { of, dtype }),
            (boxed, number(), number()).prop_map(|(of, before, after)| WeightExpr::Pad { of, before, after }),
        ]
    })
}

/// A step of building a program: the kind of addition, and the numbers and names for it.
type Step = (u8, usize, usize, f32, String, WeightExpr);

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let number = -1e30f32..1e30;
    proptest::collection::vec(
        (0..12u8, 0..1000usize, 0..1000usize, number, any::<String>(), weight_expr()),
        0..24,
    )
}

/// Builds a program of rows of eight floats, step by step. Invalid steps are skipped.
fn build(name: String, steps: Vec<Step>) -> Program {
    let mut program = ProgramBuilder::new(name);
    let rows = program.bounded("rows");
    let plane = TensorType::new(DType::F32, [rows, 8.into()]);
    let vector = TensorType::new(DType::F32, [8usize]);
    let norm = program.state("norm", vector.clone()).unwrap();
    let mut planes = vec![program.input("x", plane.clone()).unwrap()];
    let mut placed = Vec::new();
    for (kind, first, second, number, text, expr) in steps {
        let (a, b) = (planes[first % planes.len()], planes[second % planes.len()]);
        let rms_norm = RmsNorm { eps: number.abs(), weight_offset: number };
        match kind {
            0 => planes.extend(program.input(text, plane.clone()).ok()),
            1 => planes.extend(program.state(text, plane.clone()).ok()),
            2 => {
                let _ = program.vector(text, expr, vector.clone());
            }
            3 => {
                let Some(OperandType::Weight(weight)) = operand("weight q8_0[3, 64]") else { panic!() };
                let _ = program.weight(text, expr, weight);
            }
            4 => planes
                .push(program.call(Add { alpha: number }, [Some(a), Some(b), None, Some(norm)]).unwrap()),
            5 => planes.push(program.call(rms_norm, [Some(a), Some(norm)]).unwrap()),
            // An updated value cannot be used again.
            6 if planes.len() > 1 => {
                planes.retain(|plane| *plane != a);
                planes.push(
                    program.call(Broadcast { axis: MeshAxis::Data, root: second as u32 }, [Some(a)]).unwrap(),
                );
            }
            7 if planes.len() > 1 => {
                let op = AllReduce { axis: MeshAxis::Expert, reduction: Reduction::Max };
                planes.retain(|plane| *plane != a);
                planes.push(program.call(op, [Some(a)]).unwrap());
            }
            8 => {
                program.calls(Send { axis: MeshAxis::Data, peer: second as u32 }, [Some(a)]).unwrap();
            }
            9 => {
                let region = well_known::add_rms_norm(Add { alpha: number }, rms_norm).unwrap();
                let op = dsrun_core::op::Op::Region(Arc::new(region));
                planes.extend(program.calls(op, [a, b, norm].map(Some)).unwrap());
            }
            10 => {
                program.call(Cast { dtype: DType::BF16 }, [Some(a)]).unwrap();
            }
            11 if first % 3 == 0 => program.segment(text, SegmentKind::Eager),
            _ => placed.push((a, MeshAxis::ALL[second % 4], first)),
        }
    }
    let mut program = program.finish(&planes).unwrap();
    for (id, axis, number) in placed {
        let placement =
            [Placement::Replicated, Placement::Partial, Placement::Sharded(number % 2)][number % 3];
        program.values[id.index()].placements.set(axis, placement);
        let node = number % program.nodes.len().max(1);
        if let Some(node) = program.nodes.get_mut(node) {
            node.lane = Lane::ALL[number % 3];
        }
    }
    program.validate().unwrap();
    program
}

/// A change to a text: its kind, place and length, and the inserted piece.
type Change = (u8, usize, usize, usize);

fn changed(text: &str, changes: &[Change]) -> String {
    const PIECES: &[&str] = &[
        "",
        "%",
        "\"",
        "(",
        ")",
        "{",
        "}",
        "[",
        "]",
        ",",
        ":",
        "=",
        "_",
        "@",
        "?",
        "$",
        "\\u{",
        "-1",
        "0",
        "1e999",
        "NaN",
        "4294967295",
        "4294967296",
        "18446744073709551615",
        "region \"r\" (",
        "output",
        "segment",
        "extents",
        "\0",
        "ß",
        "constant(",
        "permute(",
        "f32",
        "q4_0",
        "return",
        "\n",
    ];
    let mut text: Vec<char> = text.chars().collect();
    for (kind, at, length, piece) in changes {
        let start = at % (text.len() + 1);
        let end = (start + length % 40).min(text.len());
        let piece = PIECES[piece % PIECES.len()].chars();
        match kind {
            0 => text.truncate(start),
            1 => drop(text.drain(start..end)),
            2 => drop(text.splice(start..start, text[start..end].to_vec())),
            3 => drop(text.splice(start..end, piece)),
            4 => drop(text.splice(start..start, piece)),
            _ => text.rotate_left(start),
        }
    }
    text.into_iter().collect()
}

proptest! {
    #[test]
    fn programs_round_trip(name in any::<String>(), steps in steps()) {
        let program = build(name, steps);
        let text = program.to_string();
        prop_assert_eq!(text.parse::<Program>().unwrap(), program);
    }

    /// A changed text is refused with a message, or parsed to a program that round-trips.
    #[test]
    fn changed_texts_are_refused_or_round_trip(changes in proptest::collection::vec((0..6u8, any::<usize>(), any::<usize>(), any::<usize>()), 1..6)) {
        let text = changed(EVERYTHING, &changes);
        match parse(&text) {
            Err(error) => prop_assert!(!error.message().is_empty()),
            Ok(program) => {
                let again = parse(&program.to_string()).unwrap();
                prop_assert_eq!(again.to_string(), program.to_string());
                let lowered = program.lower_regions(&mut |_| Ok(false)).unwrap();
                lowered.validate().unwrap();
            }
        }
    }

    #[test]
    fn any_text_is_refused(text in any::<String>()) {
        prop_assert!(parse(&text).is_err());
        let inside = format!("program \"p\" {{\n{text}");
        prop_assert!(parse(&inside).is_err());
    }

    /// A truncated text is refused.
    #[test]
    fn truncated_texts_are_refused(length in 0..EVERYTHING.trim_end().chars().count()) {
        let text: String = EVERYTHING.trim_end().chars().take(length).collect();
        prop_assert!(parse(&text).is_err());
    }
}

#[test]
fn factors_and_quantisation_round_trip() {
    let format = WeightFormat::from_name("int4g32z_bf16").unwrap();
    let of = Box::new(WeightExpr::tensor("w"));
    let of = Box::new(WeightExpr::Factors { of, factors: vec![0.1, -2.5e-9, 3.0], rows: true });
    let expr = WeightExpr::Quantise { of, format, search: true };
    let weight = WeightType { format, shape: vec![3, 32] };
    let mut builder = ProgramBuilder::new("quantised");
    let weight = builder.weight("w", expr, weight).unwrap();
    let x = builder.input("x", TensorType::new(DType::F32, [2usize, 32])).unwrap();
    let linear = Linear { dtype: DType::F32 };
    let y = builder.call(linear, [Some(x), Some(weight), None]).unwrap();
    let program = builder.finish(&[y]).unwrap();
    let text = program.to_string();
    let expr = "= quantise(int4g32z_bf16, search, factors(rows, tensor(\"w\"), 0.1, -2.5e-9, 3.0))";
    assert!(text.contains(expr), "{text}");
    assert_eq!(text.parse::<Program>().unwrap(), program);
    assert!(text.replace("search", "find").parse::<Program>().is_err());
}
