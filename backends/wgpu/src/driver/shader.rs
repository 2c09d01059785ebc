//! Generates shader sources from WGSL files and the declarations of a dispatch.
//!
//! WGSL has no generics and no preprocessor. This module provides both:
//!
//! - every tensor of a dispatch gets a binding, and functions that read and write its elements as f32 (or i32, u32),
//!   whatever type is stored;
//! - parameters of a call become a uniform struct `P`, or a constant `P` if a pipeline is compiled for them; numbers that select a
//!   pipeline become `override` constants, and numbers that size arrays of a function become `const`;
//! - lines between `#if NAME` and `#endif` (with an optional `#else`) are kept only if the flag `NAME` is set, or, for
//!   `#if !NAME`, is not set;
//! - lines between `#each N COUNT` and `#endeach` are repeated as often as the constant `COUNT` says, with the number of the
//!   repetition for `$N`. So variables that must be in registers have names, not indices.

use dsrun_core::DType;
use std::fmt::Write;

/// The functions of all shaders.
const PRELUDE: &str = include_str!("../../kernels/prelude.wgsl");
/// The function that reads a weight.
const WEIGHT: &str = include_str!("../../kernels/weight.wgsl");

/// The flag of shaders that use cooperative matrices.
pub(crate) const MATRICES: &str = "MATRICES";
/// The flag of shaders in which loops replace cooperative matrices.
pub(crate) const EMULATED: &str = "EMULATED";

/// The stored form of the elements of a weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum WeightElement {
    /// f32.
    F32,
    /// f16, two to a word.
    F16,
    /// bf16, two to a word.
    BF16,
    /// Unsigned integers with two f32 for each group: the scale, and the zero point or the minimum.
    Integers {
        /// Bits of an integer, 4 or 8.
        bits: u32,
        /// Whether the second number is the minimum.
        minimum: bool,
    },
    /// Floats of 4 bits (a sign, two bits of exponent, one of significand) with two f32 for each group, of which the first is half
    /// the scale and the second is not used.
    Floats4,
}

impl WeightElement {
    /// Whether groups of elements have scales.
    pub(crate) fn is_quantised(self) -> bool {
        matches!(self, Self::Integers { .. } | Self::Floats4)
    }

    fn flags(self) -> Vec<&'static str> {
        match self {
            Self::F32 => vec!["F32"],
            Self::F16 => vec!["F16", "HALF"],
            Self::BF16 => vec!["BF16", "HALF"],
            Self::Floats4 => vec!["QUANTISED", "INT4", "FLOATS"],
            Self::Integers { bits, minimum } => {
                let mut flags = vec!["QUANTISED"];
                flags.push(if bits == 4 { "INT4" } else { "INT8" });
                flags.extend(minimum.then_some("MINIMUM"));
                flags
            }
        }
    }
}

/// The element type of a binding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Element {
    /// f32, read and written as such.
    F32,
    /// f16, converted to f32 and back.
    F16,
    /// bf16, converted to f32 and back.
    BF16,
    /// Signed integers.
    I32,
    /// Unsigned integers and raw words.
    U32,
    /// Words of four bytes each, whose bytes may be written by different threads.
    Bytes,
    /// Words of a weight, read as vectors of four.
    Weight(WeightElement),
}

impl Element {
    /// The element for a tensor of a type.
    pub(crate) fn of(dtype: DType) -> Self {
        match dtype {
            DType::F16 => Self::F16,
            DType::BF16 => Self::BF16,
            DType::I32 => Self::I32,
            DType::U32 => Self::U32,
            DType::I8 | DType::U8 => Self::Bytes,
            _ => Self::F32,
        }
    }

    /// The WGSL type of the array that is bound; `vectors` makes each item four elements.
    fn array(self, vectors: bool) -> &'static str {
        match (self, vectors) {
            (Self::F32, false) => "array<f32>",
            (Self::F32, true) => "array<vec4<f32>>",
            (Self::F16, false) => "array<f16>",
            (Self::F16, true) => "array<vec4<f16>>",
            (Self::BF16, false) => "array<u16>",
            (Self::BF16, true) => "array<vec2<u32>>",
            (Self::I32, _) => "array<i32>",
            (Self::U32, false) => "array<u32>",
            (Self::U32, true) => "array<vec4<u32>>",
            (Self::Weight(_), _) => "array<vec4<u32>>",
            (Self::Bytes, _) => "array<atomic<u32>>",
        }
    }

    /// Functions that read and write elements of the array `name_data`.
    fn accessors(self, name: &str, vectors: bool, read_only: bool) -> String {
        let n = name;
        let mut text = match (self, vectors) {
            (Self::F32, false) => format!("fn {n}_get(i: u32) -> f32 {{ return {n}_data[i]; }}\n"),
            (Self::F16, false) => format!("fn {n}_get(i: u32) -> f32 {{ return f32({n}_data[i]); }}\n"),
            (Self::BF16, false) => {
                format!("fn {n}_get(i: u32) -> f32 {{ return bitcast<f32>(u32({n}_data[i]) << 16u); }}\n")
            }
            (Self::I32, _) => format!("fn {n}_get(i: u32) -> i32 {{ return {n}_data[i]; }}\n"),
            (Self::U32, false) => format!("fn {n}_get(i: u32) -> u32 {{ return {n}_data[i]; }}\n"),
            (Self::F32, true) => format!("fn {n}_get4(i: u32) -> vec4<f32> {{ return {n}_data[i]; }}\n"),
            (Self::F16, true) => {
                format!("fn {n}_get4(i: u32) -> vec4<f32> {{ return vec4<f32>({n}_data[i]); }}\n")
            }
            (Self::BF16, true) => {
                format!("fn {n}_get4(i: u32) -> vec4<f32> {{ return widen_bf16({n}_data[i]); }}\n")
            }
            (Self::Weight(element), _) => selected(WEIGHT, &element.flags()).replace("NAME", n),
            (Self::U32, true) | (Self::Bytes, _) => String::new(),
        };
        if read_only {
            return text;
        }
        text.push_str(&match (self, vectors) {
            (Self::F32, false) => format!("fn {n}_set(i: u32, v: f32) {{ {n}_data[i] = v; }}\n"),
            (Self::F16, false) => format!("fn {n}_set(i: u32, v: f32) {{ {n}_data[i] = f16(v); }}\n"),
            (Self::BF16, false) => {
                format!("fn {n}_set(i: u32, v: f32) {{ {n}_data[i] = u16(round_bf16(v)); }}\n")
            }
            (Self::I32, _) => format!("fn {n}_set(i: u32, v: i32) {{ {n}_data[i] = v; }}\n"),
            (Self::U32, false) => format!("fn {n}_set(i: u32, v: u32) {{ {n}_data[i] = v; }}\n"),
            // Other threads may write the other bytes of the word at the same time.
            (Self::Bytes, _) => format!(
                "fn {n}_set(i: u32, v: u32) {{ let shift = 8u * (i % 4u); \
                 atomicAnd(&{n}_data[i / 4u], ~(0xffu << shift)); \
                 atomicOr(&{n}_data[i / 4u], (v & 0xffu) << shift); }}\n"
            ),
            _ => String::new(),
        });
        text
    }
}

/// A tensor that a shader reads or writes.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Tensor {
    /// The name in the shader.
    pub(crate) name: &'static str,
    /// The element type.
    pub(crate) element: Element,
    /// Whether four elements are read at a time.
    pub(crate) vectors: bool,
    /// Whether its buffer is never written by a dispatch.
    pub(crate) read_only: bool,
    /// Whether it is bound; one that is not reads as zeros.
    pub(crate) present: bool,
    /// Whether its number of rows may be in device memory.
    pub(crate) bounded: bool,
}

/// The type of a parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum ParamType {
    /// An unsigned integer.
    U32,
    /// A float.
    F32,
}

impl ParamType {
    /// The WGSL type.
    fn name(self) -> &'static str {
        match self {
            Self::U32 => "u32",
            Self::F32 => "f32",
        }
    }

    /// The WGSL literal of a value, which is finite.
    fn literal(self, bits: u32) -> String {
        match self {
            Self::U32 => format!("{bits}u"),
            Self::F32 => format!("{:e}f", f32::from_bits(bits)),
        }
    }
}

/// A shader without the values of its `override` constants.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Shader {
    /// The WGSL files that it consists of.
    pub(crate) parts: Vec<&'static str>,
    /// The entry point.
    pub(crate) entry: &'static str,
    /// The tensors, in the order of their bindings.
    pub(crate) tensors: Vec<Tensor>,
    /// The fields of the uniform struct.
    pub(crate) params: Vec<(String, ParamType)>,
    /// The parameters that are constants, if there are any, with the bits of their values.
    pub(crate) fixed: Vec<(String, ParamType, u32)>,
    /// The names of the `override` constants.
    pub(crate) overrides: Vec<&'static str>,
    /// The `const` numbers.
    pub(crate) constants: Vec<(&'static str, u32)>,
    /// The flags that are set.
    pub(crate) flags: Vec<&'static str>,
}

impl Shader {
    /// Whether there is a binding with the row counts of bounded tensors, after the tensors.
    pub(crate) fn has_extents(&self) -> bool {
        self.tensors.iter().any(|tensor| tensor.bounded)
    }

    /// The tensors that have a binding.
    pub(crate) fn bound(&self) -> impl Iterator<Item = &Tensor> {
        self.tensors.iter().filter(|tensor| tensor.present)
    }

    /// The WGSL text.
    pub(crate) fn source(&self) -> String {
        let mut text = String::new();
        let uses = |element| self.bound().any(|tensor| tensor.element == element);
        let has = |flag| self.flags.contains(&flag);
        if uses(Element::F16) || has(MATRICES) {
            text.push_str("enable f16;\n");
        }
        if has(MATRICES) && !has(EMULATED) {
            text.push_str("enable wgpu_cooperative_matrix;\n");
        }
        if uses(Element::BF16) {
            text.push_str("enable wgpu_int16;\n");
        }
        for name in &self.overrides {
            let _ = writeln!(text, "override {name}: u32;");
        }
        for (name, value) in &self.constants {
            let _ = writeln!(text, "const {name}: u32 = {value}u;");
        }
        text.push_str("struct Params {\n");
        for (name, kind) in &self.params {
            let _ = writeln!(text, "    {name}: {},", kind.name());
        }
        text.push_str("}\n");
        // The uniform holds what is known only when a call is bound, if the other parameters are constants.
        let uniform = if self.fixed.is_empty() { "P" } else { "E" };
        if !self.fixed.is_empty() {
            text.push_str("struct Fixed {\n");
            for (name, kind, _) in &self.fixed {
                let _ = writeln!(text, "    {name}: {},", kind.name());
            }
            let values: Vec<String> = self.fixed.iter().map(|(_, kind, bits)| kind.literal(*bits)).collect();
            let _ = writeln!(text, "}}\nconst P = Fixed({});", values.join(", "));
        }
        let mut binding = 0;
        for tensor in self.bound() {
            let (name, array) = (tensor.name, tensor.element.array(tensor.vectors));
            // A buffer must not have both read-only and writable bindings in a dispatch, and the tensors of a call may share a
            // buffer, so only tensors with a separate buffer are read-only.
            let access = if tensor.read_only { "read" } else { "read_write" };
            let _ =
                writeln!(text, "@group(0) @binding({binding}) var<storage, {access}> {name}_data: {array};");
            text.push_str(&tensor.element.accessors(name, tensor.vectors, tensor.read_only));
            binding += 1;
        }
        if self.has_extents() {
            let _ =
                writeln!(text, "@group(0) @binding({binding}) var<storage, read_write> extents: array<i32>;");
            binding += 1;
        }
        let _ = writeln!(text, "@group(0) @binding({binding}) var<uniform> {uniform}: Params;");
        for tensor in &self.tensors {
            let (name, present) = (tensor.name, tensor.present);
            let _ = writeln!(text, "const {name}_here: bool = {present};");
            if !present {
                let zero = match tensor.element {
                    Element::Weight(_) => {
                        "fn NAME_get4(row: u32, k: u32) -> vec4<f32> { return vec4<f32>(); }"
                    }
                    Element::I32 => "fn NAME_get(i: u32) -> i32 { return 0; }",
                    Element::U32 | Element::Bytes => "fn NAME_get(i: u32) -> u32 { return 0u; }",
                    _ if tensor.vectors => "fn NAME_get4(i: u32) -> vec4<f32> { return vec4<f32>(); }",
                    _ => "fn NAME_get(i: u32) -> f32 { return 0.0; }",
                };
                text.push_str(&zero.replace("NAME", name));
                text.push('\n');
            }
            if matches!(tensor.element, Element::Weight(element) if element.is_quantised()) {
                let _ = writeln!(text, "fn {name}_exponent() -> u32 {{ return {uniform}.{name}_exponent; }}");
            }
            let _ = if tensor.bounded {
                writeln!(
                    text,
                    "fn {name}_live() -> u32 {{ let at = {uniform}.{name}_extent; let count = u32(max(extents[select(at, 0u, at == NONE)], 0)); return select(min(count, P.{name}_rows), P.{name}_rows, at == NONE); }}"
                )
            } else {
                writeln!(text, "fn {name}_live() -> u32 {{ return P.{name}_rows; }}")
            };
        }
        for part in std::iter::once(PRELUDE).chain(self.parts.iter().copied()) {
            text.push_str(&selected(&repeated(part, &self.constants), &self.flags));
        }
        text
    }
}

/// A source with its repetitions written out; a count that is no constant is none.
fn repeated(source: &str, constants: &[(&str, u32)]) -> String {
    let mut text = String::with_capacity(source.len());
    let mut lines = source.lines();
    while let Some(line) = lines.next() {
        let Some(header) = line.trim_start().strip_prefix("#each ") else {
            text.push_str(line);
            text.push('\n');
            continue;
        };
        let (mut body, mut depth) = (String::new(), 1);
        for line in lines.by_ref() {
            let trimmed = line.trim_start();
            depth += usize::from(trimmed.starts_with("#each "));
            depth -= usize::from(trimmed.starts_with("#endeach"));
            if depth == 0 {
                break;
            }
            body.push_str(line);
            body.push('\n');
        }
        let (name, count) = header.trim().split_once(' ').unwrap_or((header, ""));
        let count = constants.iter().find(|(constant, _)| *constant == count).map_or(0, |(_, count)| *count);
        for number in 0..count {
            text.push_str(&repeated(&body.replace(&format!("${name}"), &number.to_string()), constants));
        }
    }
    text
}

/// The lines of a source that its flags select.
fn selected(source: &str, flags: &[&str]) -> String {
    let mut text = String::with_capacity(source.len());
    let mut kept: Vec<bool> = Vec::new();
    for line in source.lines() {
        let trimmed = line.trim_start();
        if let Some(name) = trimmed.strip_prefix("#if ") {
            let name = name.trim();
            kept.push(match name.strip_prefix('!') {
                Some(name) => !flags.contains(&name),
                None => flags.contains(&name),
            });
        } else if trimmed.starts_with("#else") {
            if let Some(last) = kept.last_mut() {
                *last = !*last;
            }
        } else if trimmed.starts_with("#endif") {
            kept.pop();
        } else if kept.iter().all(|kept| *kept) {
            text.push_str(line);
            text.push('\n');
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_repeated() {
        let source =
            "a\n#each I TWO\nb$I\n#each J THREE\nc$I$J\n#endeach\n#endeach\nd\n#each I NONE\ne\n#endeach\n";
        let constants = [("TWO", 2), ("THREE", 3)];
        assert_eq!(repeated(source, &constants), "a\nb0\nc00\nc01\nc02\nb1\nc10\nc11\nc12\nd\n");
    }

    #[test]
    fn flags_select_lines() {
        let source = "a\n#if X\nb\n#if !Y\nc\n#else\nd\n#endif\n#else\ne\n#endif\nf\n";
        assert_eq!(selected(source, &[]), "a\ne\nf\n");
        assert_eq!(selected(source, &["X"]), "a\nb\nc\nf\n");
        assert_eq!(selected(source, &["X", "Y"]), "a\nb\nd\nf\n");
    }
}
