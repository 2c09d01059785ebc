//! The book's table of kernels for products is the list that they are chosen from.

#![allow(clippy::unwrap_used, reason = "a test")]

use std::{fs, path::Path};

#[test]
fn book_has_the_table_of_products() {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/src/crates/cuda.md");
    let text = fs::read_to_string(page).unwrap();
    let table =
        format!("<!-- table of products -->\n\n{}\n<!-- end of table -->\n", dsrun_cuda::gemm_table());
    assert!(
        text.contains(&table),
        "docs/src/crates/cuda.md has an old table: run `cargo run -p dsrun-cuda --example gemm_table`"
    );
}
