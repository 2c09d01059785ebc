//! Writes the headers of kernels that are generated from Rust structs.

use std::{fs, io, path::Path};

fn main() -> io::Result<()> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels");
    for (name, text) in dsrun_cuda::generated_headers() {
        fs::write(folder.join(name), text)?;
    }
    Ok(())
}
