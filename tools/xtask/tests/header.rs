//! The C header `plugins/sdk/include/dsrun.h` matches the Rust types it is generated from, for C and C++ compilers too.
//!
//! `cargo xtask header` runs this with `DSRUN_UPDATE_HEADER=1`, which writes the header instead of comparing it. It is a
//! test and no part of the program so that `cargo xtask` still starts when those types do not compile.

use std::ffi::OsStr;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

use dsrun_core::op::{
    AttributeSpec, IN_PROMPT, Op, OperandSpec, Profile, ResultSpec, SAMPLING_COLUMNS, SamplingColumn,
    Signature,
};
use dsrun_core::{BlockFormat, Code, DType, GroupFormat, WeightFormat};
use dsrun_plugin_sdk::layout::STRUCTS;
use dsrun_test_support::{TestResult, c_compiler, cpp_compiler, test_main};

test_main![
    the_header_is_up_to_date,
    c_lays_everything_out_as_rust_does,
    cpp_lays_everything_out_as_rust_does,
    the_cpp_helper_compiles_and_is_used_as_its_comment_says,
    the_cpp_helper_turns_exceptions_into_statuses,
    an_attribute_struct_is_the_words_of_its_op,
];

const PREAMBLE: &str = include_str!("header/preamble.h");
const HELPERS: &str = include_str!("header/helpers.h");
const CPP: &str = include_str!("../../../plugins/sdk/include/dsrun.hpp");

fn the_header_is_up_to_date() {
    let path = sdk().join("include/dsrun.h");
    let expected = header();
    if env::var_os("DSRUN_UPDATE_HEADER").is_some() {
        fs::write(&path, &expected).expect("plugins/sdk/include/dsrun.h can be written");
    }
    let actual = fs::read_to_string(&path).unwrap_or_default().replace("\r\n", "\n");
    assert!(actual == expected, "plugins/sdk/include/dsrun.h is out of date; run `cargo xtask header`");
}

fn c_lays_everything_out_as_rust_does() {
    compile(&c_compiler(), "-std=c11", "layout.c", &layout_checks("_Static_assert", "_Alignof"));
}

fn cpp_lays_everything_out_as_rust_does() -> TestResult {
    compile(&cpp_compiler()?, "-std=c++17", "layout.cpp", &layout_checks("static_assert", "alignof"));
    Ok(())
}

fn the_cpp_helper_compiles_and_is_used_as_its_comment_says() -> TestResult {
    let example: String =
        CPP.lines().filter_map(|line| line.strip_prefix(" *     ")).map(|line| format!("{line}\n")).collect();
    assert!(example.contains("dsr::guard"), "the example is gone from the comment");
    let source = format!("#include \"dsrun.hpp\"\nstatic const dsr_host_api *host;\n{example}");
    compile(
        &cpp_compiler()?,
        "-std=c++17",
        "helper.cpp",
        &(source
            + "int main(int count, char **) { return count > 9 && allocate(nullptr, 0, 0, nullptr) == nullptr; }\n"),
    );
    Ok(())
}

fn the_cpp_helper_turns_exceptions_into_statuses() -> TestResult {
    compile(&cpp_compiler()?, "-std=c++17", "guard.cpp", include_str!("header/helper.cpp"));
    Ok(())
}

fn an_attribute_struct_is_the_words_of_its_op() {
    for (signature, specs) in Op::PRIMITIVES.iter().zip(Op::ATTRIBUTES) {
        for spec in *specs {
            let four_bytes = ["float", "uint32_t", "int32_t"].contains(&spec.in_c.type_name);
            assert!(four_bytes, "{}.{} is {}", signature.name, spec.name, spec.in_c.type_name);
        }
    }
}

fn sdk() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../plugins/sdk")
}

/// The whole header.
fn header() -> String {
    let mut config = cbindgen::Config {
        language: cbindgen::Language::C,
        cpp_compat: true,
        usize_is_size_t: true,
        no_includes: true,
        documentation: true,
        documentation_style: cbindgen::DocumentationStyle::C99,
        style: cbindgen::Style::Both,
        line_length: 100,
        tab_width: 4,
        ..cbindgen::Config::default()
    };
    // Types alone have no function that would ask for them.
    config.export.include = STRUCTS.iter().map(|layout| layout.name.to_owned()).collect();
    config.export.include.push("dsr_plugin_entry".to_owned());
    let source = sdk().join("src");
    let bindings = cbindgen::Builder::new()
        .with_config(config)
        .with_src(source.join("raw/constants.rs"))
        .with_src(source.join("raw/handles.rs"))
        .with_src(source.join("raw.rs"))
        .with_src(source.join("raw/tables.rs"))
        .generate()
        .expect("cbindgen reads the raw types");
    let mut types = Vec::new();
    bindings.write(&mut types);
    let types = String::from_utf8(types).expect("the header is text");
    let body = types.trim().to_owned();
    format!("{PREAMBLE}\n{}\n{body}\n\n{}\n{HELPERS}", numbers(), op_declarations())
}

/// `#define`s of all numbers that are declared with the Rust types they stand for.
fn numbers() -> String {
    let mut text = String::new();
    let define = |text: &mut String, prefix: &str, name: &str, number: u32, comment: &str| {
        let name = format!("DSR_{prefix}_{}", screaming(name));
        writeln!(text, "#define {name} {number}{comment}").expect("text takes text");
    };
    text += "// What kind of failure an error is.\n";
    for code in Code::ALL {
        define(&mut text, "CODE", &format!("{code:?}"), code as u32, "");
    }
    text += "\n// Element types.\n";
    for dtype in DType::ALL {
        define(&mut text, "DTYPE", dtype.name(), dtype as u32, "");
    }
    text += "\n\
        // Storage formats of weights: an element type's number, a block format's of GGUF files, or DSR_FORMAT_GROUP plus one of\n\
        // each of DSR_GROUP_*.\n";
    text += &definition(BlockFormat::DOCUMENTATION);
    text += &definition(GroupFormat::DOCUMENTATION);
    let dense = DType::ALL.into_iter().map(WeightFormat::Dense);
    for format in dense.chain(BlockFormat::ALL.into_iter().map(WeightFormat::Block)) {
        define(&mut text, "FORMAT", &format.name(), format.number(), "");
    }
    define(&mut text, "FORMAT", "group", WeightFormat::GROUPS, "");
    for (name, number, meaning) in GroupFormat::FIELDS {
        define(&mut text, "GROUP", name, *number, &comment(meaning));
    }
    text += "\n// Sets of ops that a device has all of.\n";
    for profile in Profile::ALL {
        define(&mut text, "PROFILE", &profile.name().replace('-', "_"), profile as u32, "");
    }
    text += "\n// Ops. What each computes stands with its attributes, at the end of this file.\n";
    for (signature, number) in Op::PRIMITIVES.iter().zip(Op::NUMBERS) {
        define(&mut text, "OP", signature.name, *number, &comment(signature.summary));
    }
    define(&mut text, "OP", "region", Op::REGION_NUMBER, " // a fused op: see dsr_region");
    let retired: Vec<String> = Op::RETIRED_NUMBERS.iter().map(ToString::to_string).collect();
    writeln!(text, "// Numbers of ops that no longer exist, never used again: {}.", retired.join(", "))
        .expect("text takes text");
    text += "\n// Values of attributes.\n";
    let mut seen = Vec::new();
    for (name, values) in Op::ATTRIBUTES.iter().copied().flatten().filter_map(|spec| spec.in_c.choice) {
        if seen.contains(&name) {
            continue;
        }
        seen.push(name);
        for (value, number, documentation) in values {
            define(&mut text, &screaming(name), value, *number, &comment(documentation));
        }
    }
    text += "\n// Columns of a row of sampling parameters, and how many there are.\n";
    for column in SamplingColumn::ALL {
        define(&mut text, "SAMPLING", column.name(), *column as u32, &comment(column.documentation()));
    }
    define(&mut text, "SAMPLING", "columns", SAMPLING_COLUMNS as u32, "");
    text += "\n// Set in a request's count of a token if the token stands in its prompt.\n";
    define(&mut text, "IN", "prompt", IN_PROMPT as u32, "");
    text
}

/// Behind a number: what it means.
fn comment(meaning: &str) -> String {
    format!(" // {}", plain(meaning.trim()))
}

/// What every op takes, gives and computes, and a struct for its attributes if it has any.
fn op_declarations() -> String {
    let mut text = String::from(
        "// Ops: operands and results of each, in order; its definition; and its attributes for dsr_call_desc.attributes. An\n\
         // operand with `?` may be left out; a result `y = x` is the operand x, updated in place.\n\n",
    );
    let ops = Op::PRIMITIVES.iter().zip(Op::DOCUMENTATION).zip(Op::ATTRIBUTES);
    for ((signature, documentation), specs) in ops {
        text += &wrapped(&operands(signature));
        text += &definition(documentation);
        if specs.is_empty() {
            text.push('\n');
            continue;
        }
        let name = format!("dsr_{}_attributes", signature.name);
        writeln!(text, "typedef struct {name} {{").expect("text takes text");
        for spec in *specs {
            writeln!(text, "    // {}\n    {} {};", meaning(spec), spec.in_c.type_name, spec.name)
                .expect("text takes text");
        }
        writeln!(text, "}} {name};\n").expect("text takes text");
    }
    text
}

/// An op's documentation as comment lines. Its table of operands becomes a list.
fn definition(documentation: &str) -> String {
    let mut text = String::from("//\n");
    for line in documentation.trim().lines().map(str::trim) {
        let cells: Vec<&str> =
            line.trim_matches('|').split('|').map(str::trim).filter(|cell| !cell.is_empty()).collect();
        let line = match cells.as_slice() {
            _ if !line.starts_with('|') => line.to_owned(),
            ["operand", ..] => continue,
            [rule, ..] if rule.starts_with("---") => continue,
            [operand, rest @ ..] => format!("  {}: {}", operand.replace('→', "->"), rest.join("; ")),
            [] => continue,
        };
        let line = plain(&with_names_of_c(&line));
        text += format!("// {line}").trim_end();
        text.push('\n');
    }
    text
}

/// What Rust documentation refers to, by its names in C.
fn with_names_of_c(line: &str) -> String {
    let mut line = line.replace("super::", "").replace("IN_PROMPT", "DSR_IN_PROMPT");
    for signature in Op::PRIMITIVES {
        let words = signature.name.split('_').map(|word| word[..1].to_uppercase() + &word[1..]);
        line = line.replace(&format!("[`{}`]", words.collect::<String>()), signature.name);
    }
    line
}

/// As comment lines of at most 100 characters.
fn wrapped(text: &str) -> String {
    let mut lines = vec![String::from("//")];
    for word in text.split(' ') {
        if lines.last().is_some_and(|line| line.len() + 1 + word.len() > 100) {
            lines.push(String::from("//    "));
        }
        let line = lines.last_mut().expect("there is a line");
        *line += " ";
        *line += word;
    }
    lines.join("\n") + "\n"
}

/// `linear(x: float, weight: weight, bias?: float) -> y`
fn operands(signature: &Signature) -> String {
    let operand = |spec: &OperandSpec| {
        format!("{}{}: {}", spec.name, if spec.optional { "?" } else { "" }, spec.kind.name())
    };
    let result = |spec: &ResultSpec| match spec.updates {
        Some(operand) => format!("{} = {}", spec.name, signature.operands[operand].name),
        None => spec.name.to_owned(),
    };
    let operands: Vec<String> = signature.operands.iter().map(operand).collect();
    let results: Vec<String> = signature.results.iter().map(result).collect();
    let results = if results.is_empty() { String::new() } else { format!(" -> {}", results.join(", ")) };
    format!("{}({}){results}", signature.name, operands.join(", "))
}

fn meaning(spec: &AttributeSpec) -> String {
    let text = plain(spec.documentation.trim());
    match spec.in_c.choice {
        Some((name, _)) => format!("{text} DSR_{}_*.", screaming(name)),
        None => text,
    }
}

/// Without the marks of Rust documentation, and without what would end a comment.
fn plain(text: &str) -> String {
    text.replace("[`", "").replace("`]", "").replace('`', "").replace("*/", "* /").replace("/*", "/ *")
}

/// `GatedActivation`, `gated_activation` as `GATED_ACTIVATION`; digits stay with what they follow.
fn screaming(name: &str) -> String {
    let mut result = String::new();
    let mut previous = '_';
    for character in name.chars() {
        if character.is_uppercase() && previous.is_lowercase() {
            result.push('_');
        }
        result.extend(character.to_uppercase());
        previous = character;
    }
    result
}

/// A source that compiles only if the compiler lays every struct out as Rust does.
fn layout_checks(assert: &str, align: &str) -> String {
    let mut text = String::from("#include \"dsrun.h\"\n#include <stddef.h>\n");
    let mut check = |condition: String, what: String| {
        writeln!(text, "{assert}({condition}, \"{what}\");").expect("text takes text");
    };
    for layout in STRUCTS {
        check(format!("sizeof({}) == {}", layout.name, layout.size), format!("size of {}", layout.name));
        check(
            format!("{align}({}) == {}", layout.name, layout.alignment),
            format!("alignment of {}", layout.name),
        );
        for field in layout.fields {
            let place = format!("offsetof({}, {}) == {}", layout.name, field.name, field.offset);
            check(place, format!("{}.{}", layout.name, field.name));
        }
    }
    for (signature, specs) in Op::PRIMITIVES.iter().zip(Op::ATTRIBUTES).filter(|(_, specs)| !specs.is_empty())
    {
        let name = format!("dsr_{}_attributes", signature.name);
        check(format!("sizeof({name}) == {}", 4 * specs.len()), format!("size of {name}"));
        for (index, spec) in specs.iter().enumerate() {
            let place = format!("offsetof({name}, {}) == {}", spec.name, 4 * index);
            check(place, format!("{name}.{}", spec.name));
        }
    }
    text + "int main(void) { return 0; }\n"
}

/// Compiles a source against the header, with every warning an error, and runs what comes out.
fn compile(compiler: &OsStr, standard: &str, name: &str, source: &str) {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let (file, program) = (folder.path().join(name), folder.path().join("program"));
    fs::write(&file, source).expect("the source can be written");
    let output = Command::new(compiler)
        .args([standard, "-Wall", "-Wextra", "-pedantic", "-Werror", "-o"])
        .arg(&program)
        .arg("-I")
        .arg(sdk().join("include"))
        .arg(&file)
        .output()
        .expect("the compiler starts");
    assert!(output.status.success(), "{name}:\n{}", String::from_utf8_lossy(&output.stderr));
    let output = Command::new(&program).output().expect("the program starts");
    assert!(output.status.success(), "{name}:\n{}", String::from_utf8_lossy(&output.stderr));
}
