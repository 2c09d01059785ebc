//! Every variable of the environment that this backend reads stands in the book.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::{collections::BTreeSet, fs, path::Path};

const PREFIX: &str = "DSRUN_CUDA_";

/// Names in the sources below a folder.
fn read_by(folder: &Path, names: &mut BTreeSet<String>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            read_by(&path, names);
            continue;
        }
        let text = fs::read_to_string(&path).unwrap();
        let is_part = |c: char| c.is_ascii_uppercase() || c == '_';
        names.extend(text.match_indices(PREFIX).map(|(at, _)| {
            let rest = &text[at..];
            rest[..rest.find(|c| !is_part(c)).unwrap_or(rest.len())].to_owned()
        }));
    }
}

#[test]
fn the_book_shows_every_variable() {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut names = BTreeSet::new();
    read_by(&package.join("src"), &mut names);
    assert!(names.contains("DSRUN_CUDA_LIBRARIES"), "{names:?}");
    let page = fs::read_to_string(package.join("../../docs/src/crates/cuda.md")).unwrap();
    for name in names {
        assert!(page.contains(&format!("| `{name}` |")), "{name} is in no table of the page of the backend");
    }
}
