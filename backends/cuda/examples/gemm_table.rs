//! Writes the table of kernels for products into the book.

use std::{fs, io, path::Path};

fn main() -> io::Result<()> {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/src/crates/cuda.md");
    let text = fs::read_to_string(&page)?;
    let (before, rest) = text.split_once(BEGIN).ok_or_else(missing)?;
    let (_, after) = rest.split_once(END).ok_or_else(missing)?;
    fs::write(page, format!("{before}{BEGIN}{}{END}{after}", dsrun_cuda::gemm_table()))
}

const BEGIN: &str = "<!-- table of products -->\n\n";
const END: &str = "\n<!-- end of table -->\n";

fn missing() -> io::Error {
    io::Error::other("docs/src/crates/cuda.md lacks the comments around the table of products")
}
