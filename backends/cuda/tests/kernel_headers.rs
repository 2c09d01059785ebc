//! Generated headers of kernels are those of the structs.

use std::{fs, path::Path};

#[test]
fn generated_headers_are_current() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels");
    for (name, text) in dsrun_cuda::generated_headers() {
        let found = fs::read_to_string(folder.join(&name)).unwrap_or_default();
        assert_eq!(
            found, text,
            "kernels/{name} is old: run `cargo run -p dsrun-cuda --example kernel_headers`"
        );
    }
}
