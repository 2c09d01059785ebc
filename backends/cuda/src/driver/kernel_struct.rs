//! Parameter structs of kernels, declared once in Rust; the CUDA declarations are generated.
//!
//! [`kernel_struct`] declares a `repr(C)` struct and records its fields, so that [`declaration`] can write the same struct in
//! CUDA C++. Static assertions check that sizes and alignments, and thereby all offsets, agree whenever a kernel is compiled. The
//! generated headers are committed under `kernels/` for readers; a test compares them with the sources, and `cargo run -p
//! dsrun-cuda --example kernel_headers` writes them.

use std::fmt::Write;

/// An address on the device; 0 for none.
pub(crate) type Pointer = u64;

/// A field of a parameter struct.
pub(crate) struct Field {
    pub(crate) name: &'static str,
    /// Its doc comment, by line.
    pub(crate) doc: &'static [&'static str],
    /// Its type in CUDA C++; the element type for an array.
    pub(crate) cuda_type: &'static str,
    /// The length of the array; 0 if it is not an array.
    pub(crate) length: usize,
    pub(crate) bytes: usize,
    pub(crate) alignment: usize,
}

/// A parameter struct of kernels.
pub(crate) trait KernelStruct: Copy + 'static {
    /// Its name in CUDA C++.
    const NAME: &'static str;
    /// Its doc comment, by line.
    const DOC: &'static [&'static str];
    /// Its fields in order.
    const FIELDS: &'static [Field];
}

/// The length of a field, if it is an array.
pub(crate) trait Length {
    const LENGTH: usize;
}

macro_rules! scalars {
    ($($scalar:ty),*) => { $(impl Length for $scalar { const LENGTH: usize = 0; })* };
}

scalars!(u32, i32, f32, u64, i64);

impl<T, const N: usize> Length for [T; N] {
    const LENGTH: usize = N;
}

/// Declares a parameter struct. Each field is followed by its type in CUDA C++, or the element type for an array.
macro_rules! kernel_struct {
    (
        $(#[doc = $doc:literal])*
        $vis:vis struct $name:ident {
            $($(#[doc = $field_doc:literal])* $field_vis:vis $field:ident: $type:ty = $cuda:literal,)*
        }
    ) => {
        $(#[doc = $doc])*
        #[repr(C)]
        #[derive(Clone, Copy, Debug, Default, PartialEq)]
        $vis struct $name {
            $($(#[doc = $field_doc])* $field_vis $field: $type,)*
        }

        impl $crate::driver::kernel_struct::KernelStruct for $name {
            const NAME: &'static str = stringify!($name);
            const DOC: &'static [&'static str] = &[$($doc),*];
            const FIELDS: &'static [$crate::driver::kernel_struct::Field] = &[$(
                $crate::driver::kernel_struct::Field {
                    name: stringify!($field),
                    doc: &[$($field_doc),*],
                    cuda_type: $cuda,
                    length: <$type as $crate::driver::kernel_struct::Length>::LENGTH,
                    bytes: size_of::<$type>(),
                    alignment: align_of::<$type>(),
                },
            )*];
        }

        impl $crate::driver::kernel_struct::Length for $name {
            const LENGTH: usize = 0;
        }
    };
}

pub(crate) use kernel_struct;

fn comment(doc: &[&str], indent: &str) -> String {
    let text: Vec<&str> = doc.iter().map(|line| line.trim()).collect();
    match text.join(" ") {
        empty if empty.is_empty() => String::new(),
        text => format!("{indent}/* {text} */\n"),
    }
}

/// The struct in CUDA C++, with assertions of its size and its fields' sizes and alignments. They imply the offsets: the same rule
/// places the fields of a `repr(C)` struct. NVRTC before CUDA 13.1 has no `offsetof` that an assertion may use.
pub(crate) fn declaration<T: KernelStruct>() -> String {
    let mut text = comment(T::DOC, "");
    let _ = writeln!(text, "struct {} {{", T::NAME);
    for field in T::FIELDS {
        text += &comment(field.doc, "    ");
        let length = if field.length > 0 { format!("[{}]", field.length) } else { String::new() };
        let _ = writeln!(text, "    {} {}{length};", field.cuda_type, field.name);
    }
    text += "};\n";
    let _ = writeln!(text, "static_assert(sizeof({0}) == {1}, \"{0} as in Rust\");", T::NAME, size_of::<T>());
    for Field { name, bytes, alignment, .. } in T::FIELDS {
        let member = format!("{}::{name}", T::NAME);
        let _ = writeln!(
            text,
            "static_assert(sizeof({member}) == {bytes} && alignof(decltype({member})) == {alignment}, \"{} as in Rust\");",
            T::NAME
        );
    }
    text
}

/// The generated header of the parameters of a kernel source: its name below `kernels/`, and its text.
pub(crate) fn params_header(unit: &str, declarations: &[String]) -> (String, String) {
    (format!("{unit}_params.cuh"), header(&format!("Parameters of the kernels in {unit}.cu."), declarations))
}

/// A generated header: a sentence about its contents, and the declarations.
pub(crate) fn header(about: &str, declarations: &[String]) -> String {
    format!(
        "/*\n * {about}\n *\n * Generated from Rust by `cargo run -p dsrun-cuda --example kernel_headers`.\n */\n{}",
        declarations.join("\n")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    kernel_struct! {
        /// A pair.
        pub(crate) struct Pair {
            /// The first.
            pub(crate) first: u32 = "u32",
            pub(crate) second: [Pointer; 2] = "const float*",
        }
    }

    #[test]
    fn the_declaration_asserts_sizes_and_alignments() {
        let expected = "/* A pair. */\nstruct Pair {\n    /* The first. */\n    u32 first;\n    const float* second[2];\n};\n\
                        static_assert(sizeof(Pair) == 24, \"Pair as in Rust\");\n\
                        static_assert(sizeof(Pair::first) == 4 && alignof(decltype(Pair::first)) == 4, \"Pair as in Rust\");\n\
                        static_assert(sizeof(Pair::second) == 16 && alignof(decltype(Pair::second)) == 8, \"Pair as in Rust\");\n";
        assert_eq!(declaration::<Pair>(), expected);
    }
}
