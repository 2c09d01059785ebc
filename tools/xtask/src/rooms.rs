//! The step `rooms`: checks module layering, import cycles and file lengths. A room is a module directly below the `src` of a package,
//! or below one of the folders in [`FOLDERS`].
//!
//! - An import cycle has at most [`CIRCLE_FILES`] files of a crate.
//! - The rooms of a folder have no import cycles, and import only from the same or lower levels of the folder's order.
//! - No hand-written source file has more than [`FILE_LINES`] lines.
//!
//! Imports are the paths in Rust sources: `use` declarations, and paths in code. Re-exports are resolved to the file that
//! defines the item. Unit tests may import anything.

mod circles;
mod crate_map;
mod source;
mod table;

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

use crate::workspace::{Workspace, display_relative, fail_on, files_with_extension};
use circles::circles;
use crate_map::{Import, imports};
use table::{FOLDERS, Folder, LARGE_CIRCLES, LONG_FILES, MIXED_FOLDERS};

/// The maximum number of files in an import cycle.
const CIRCLE_FILES: usize = 6;

/// The maximum number of lines of a hand-written source file.
const FILE_LINES: usize = 600;

/// File extensions of source files.
const SOURCES: &[&str] = &["rs", "cu", "cuh", "c", "cpp", "h", "hpp", "py", "js", "css", "html", "sh"];

/// The maximum number of imports of a cycle that a message lists.
const SHOWN: usize = 20;

/// The step of `cargo xtask ci`.
pub(crate) fn check(workspace: &Workspace) -> Result<String> {
    let mut problems = Vec::new();
    let mut files = 0;
    let packages = workspace.metadata.workspace_packages();
    let folders: BTreeSet<String> = packages.into_iter().map(|package| workspace.folder(package)).collect();
    for folder in &folders {
        let imports = imports_of_package(workspace.root(), folder)?;
        problems.extend(circle_problems(folder, &imports, LARGE_CIRCLES));
        let source = format!("{folder}/src");
        for rules in folders_of(folder, &source) {
            problems.extend(room_problems(&rules, &imports, MIXED_FOLDERS));
        }
    }
    let top: BTreeSet<&str> = folders.iter().filter_map(|folder| folder.split('/').next()).collect();
    for (file, lines) in line_counts(workspace.root(), top)? {
        files += 1;
        problems.extend(length_problem(&file, lines, LONG_FILES));
    }
    problems.extend(missing_files(workspace.root(), LONG_FILES));
    fail_on(&problems, "the rules for rooms are broken; they are in tools/xtask/src/rooms/table.rs")?;
    Ok(format!("{files} source files of {} packages keep the rules for rooms", folders.len()))
}

/// The folders of a package that have rooms: those of the table, and always `source`.
fn folders_of<'a>(package: &str, source: &'a str) -> Vec<Folder<'a>> {
    let mut folders: Vec<Folder<'a>> =
        FOLDERS.iter().filter(|rules| rules.package() == Some(package)).copied().collect();
    if !folders.iter().any(|rules| rules.folder == source) {
        folders.push(Folder { folder: source, order: &[] });
    }
    folders
}

/// The imports between the source files of a package, with paths relative to the root of the repository.
fn imports_of_package(root: &Path, folder: &str) -> Result<Vec<Import>> {
    let source = root.join(folder).join("src");
    let mut found = Vec::new();
    for file in ["lib.rs", "main.rs"].map(|name| source.join(name)).iter().filter(|file| file.is_file()) {
        found.extend(imports(file)?);
    }
    for import in &mut found {
        for file in [&mut import.from, &mut import.to] {
            *file = format!("{folder}/src/{file}");
        }
    }
    Ok(found)
}

/// Reports import cycles with more files than the crate may have.
fn circle_problems(folder: &str, imports: &[Import], exceptions: &[(&str, usize)]) -> Vec<String> {
    let circles = circles(imports.iter().map(|import| (import.from.as_str(), import.to.as_str())));
    let exception = exceptions.iter().find(|(package, _)| *package == folder);
    let limit = exception.map_or(CIRCLE_FILES, |(_, files)| *files);
    let mut problems: Vec<String> = circles
        .iter()
        .filter(|circle| circle.len() > limit)
        .map(|circle| {
            let inside: BTreeSet<&str> = circle.iter().copied().collect();
            let within = imports
                .iter()
                .filter(|import| inside.contains(import.from.as_str()) && inside.contains(import.to.as_str()));
            let within: Vec<String> = within.map(shown).collect();
            format!(
                "{} files of {folder} form an import cycle, and at most {limit} may: move what they share into a file \
                 that imports none of them\n{}",
                circle.len(),
                listed(&within)
            )
        })
        .collect();
    let largest = circles.first().map_or(0, Vec::len);
    if exception.is_some() && largest <= CIRCLE_FILES {
        problems.push(format!(
            "LARGE_CIRCLES lets {limit} files of {folder} import each other, and at most {largest} do: remove the entry"
        ));
    }
    problems
}

/// Reports imports between rooms of a folder that violate the order or form a cycle.
fn room_problems(rules: &Folder<'_>, imports: &[Import], exceptions: &[&str]) -> Vec<String> {
    let between: Vec<(&str, &str, &Import)> = imports
        .iter()
        .filter_map(|import| Some((rules.room_of(&import.from)?, rules.room_of(&import.to)?, import)))
        .filter(|(from, to, _)| from != to)
        .collect();
    let mut problems = Vec::new();
    for (from, to, import) in &between {
        if let (Some(own), Some(other)) = (rules.level_of(from), rules.level_of(to))
            && other > own
        {
            problems.push(format!(
                "{}: room `{from}` of {} may not import from `{to}`: the order is {}; move the item down, or hand it in from \
                 above",
                shown(import),
                rules.folder,
                rules.shown_order()
            ));
        }
    }
    for circle in circles(between.iter().map(|(from, to, _)| (*from, *to))) {
        let inside = |room: &str| circle.contains(&room);
        let edges = between.iter().filter(|(from, to, _)| inside(from) && inside(to));
        let edges: Vec<String> = edges.map(|(_, _, import)| shown(import)).collect();
        problems.push(format!(
            "rooms {} of {} form an import cycle: move what they share into one of them, or into a room of its \
             own\n{}",
            circle.join(", "),
            rules.folder,
            listed(&edges)
        ));
    }
    if !exceptions.contains(&rules.folder) {
        return problems;
    }
    match problems.is_empty() {
        true => vec![format!(
            "MIXED_FOLDERS excepts {}, whose rooms are in order: remove the entry",
            rules.folder
        )],
        false => Vec::new(),
    }
}

fn shown(import: &Import) -> String {
    format!("{}:{} imports `{}` of {}", import.from, import.line, import.path, import.to)
}

/// Formats the first [`SHOWN`] lines below a message.
fn listed(lines: &[String]) -> String {
    let mut text: Vec<String> = lines.iter().take(SHOWN).map(|line| format!("      {line}")).collect();
    if lines.len() > SHOWN {
        text.push(format!("      and {} more", lines.len() - SHOWN));
    }
    text.join("\n")
}

/// The source files in these folders of the repository, with their line counts.
fn line_counts(root: &Path, folders: BTreeSet<&str>) -> Result<Vec<(String, usize)>> {
    let mut counts = Vec::new();
    for folder in folders {
        for extension in SOURCES {
            for path in files_with_extension(&root.join(folder), extension)? {
                let file = display_relative(&path, root);
                // Build output of a package outside the workspace, such as the plugin template.
                if file.split('/').any(|part| part == "target") {
                    continue;
                }
                let text = fs::read(&path).with_context(|| format!("cannot read {file}"))?;
                counts.push((file, text.split_inclusive(|byte| *byte == b'\n').count()));
            }
        }
    }
    Ok(counts)
}

/// Reports a file that is too long, or whose exception is not needed.
fn length_problem(file: &str, lines: usize, exceptions: &[&str]) -> Option<String> {
    let excepted = exceptions.contains(&file);
    match (lines > FILE_LINES, excepted) {
        (true, false) => Some(format!(
            "{file} has {lines} lines, and a hand-written file may have {FILE_LINES}: split it by what its parts are for, or \
             add it to LONG_FILES with the reason if it is a table or generated"
        )),
        (false, true) => {
            Some(format!("LONG_FILES excepts {file}, which has {lines} lines: remove the entry"))
        }
        _ => None,
    }
}

/// Reports exceptions for files that do not exist.
fn missing_files(root: &Path, exceptions: &[&str]) -> Vec<String> {
    let gone = exceptions.iter().filter(|file| !root.join(file).is_file());
    gone.map(|file| format!("LONG_FILES excepts {file}, which does not exist: remove the entry")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A folder with these files.
    pub(super) fn tree(files: &[(&str, &str)]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for (file, text) in files {
            let path = folder.path().join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        folder
    }

    /// Imports of a package `house` with these files in `src`.
    fn house(files: &[(&str, &str)]) -> Vec<Import> {
        let files: Vec<(String, &str)> =
            files.iter().map(|(file, text)| (format!("house/src/{file}"), *text)).collect();
        let files: Vec<(&str, &str)> = files.iter().map(|(file, text)| (file.as_str(), *text)).collect();
        imports_of_package(tree(&files).path(), "house").unwrap()
    }

    /// A ring of so many files.
    fn ring(count: usize) -> Vec<Import> {
        let modules: String = (0..count).map(|index| format!("mod m{index};\n")).collect();
        let mut files = vec![("lib.rs".to_owned(), modules)];
        for index in 0..count {
            let next = (index + 1) % count;
            files.push((
                format!("m{index}.rs"),
                format!("use crate::m{next}::S{next};\npub struct S{index};"),
            ));
        }
        let files: Vec<(&str, &str)> =
            files.iter().map(|(file, text)| (file.as_str(), text.as_str())).collect();
        house(&files)
    }

    #[test]
    fn a_circle_of_many_files_is_reported_with_its_imports() {
        assert_eq!(circle_problems("house", &ring(CIRCLE_FILES), &[]), Vec::<String>::new());
        let problems = circle_problems("house", &ring(CIRCLE_FILES + 1), &[]);
        assert_eq!(problems.len(), 1, "{problems:?}");
        for part in [
            "7 files of house",
            "move what they share",
            "house/src/m0.rs:1 imports `crate::m1::S1` of house/src/m1.rs",
        ] {
            assert!(problems[0].contains(part), "{}", problems[0]);
        }
    }

    #[test]
    fn a_large_circle_may_be_excepted_until_it_is_small() {
        let exceptions = [("house", 8)];
        assert_eq!(circle_problems("house", &ring(8), &exceptions), Vec::<String>::new());
        assert!(circle_problems("house", &ring(9), &exceptions)[0].contains("9 files"));
        assert!(circle_problems("house", &ring(6), &exceptions)[0].contains("remove the entry"));
    }

    const RULES: Folder<'static> =
        Folder { folder: "house/src", order: &[&["cellar"], &["hall", "stairs"], &["roof"]] };

    #[test]
    fn rooms_import_downwards_and_sideways() {
        let imports = house(&[
            (
                "lib.rs",
                "mod cellar;\nmod hall;\nmod stairs;\nmod garden;\nuse hall::table::Table;\nuse garden::Tree;",
            ),
            ("cellar.rs", "pub struct Wine;"),
            ("hall.rs", "pub mod table;\nuse crate::stairs::Step;"),
            ("hall/table.rs", "pub struct Table;\nuse crate::cellar::Wine;"),
            ("stairs.rs", "pub struct Step;\nuse crate::cellar::Wine;"),
            ("garden.rs", "pub struct Tree;\nuse crate::hall::table::Table;"),
        ]);
        assert_eq!(room_problems(&RULES, &imports, &[]), Vec::<String>::new());
    }

    #[test]
    fn an_import_against_the_order_is_reported_with_the_order() {
        let files = [
            ("lib.rs", "mod cellar;\nmod roof;"),
            ("cellar.rs", "mod shelf;"),
            ("cellar/shelf.rs", "\nuse crate::roof::Tile;"),
            ("roof.rs", "pub struct Tile;"),
        ];
        let problems = room_problems(&RULES, &house(&files), &[]);
        assert_eq!(problems.len(), 1, "{problems:?}");
        for part in
            ["house/src/cellar/shelf.rs:2", "`roof`", "cellar < hall, stairs < roof", "move the item down"]
        {
            assert!(problems[0].contains(part), "{}", problems[0]);
        }
        let excepted = ["house/src"];
        assert_eq!(room_problems(&RULES, &house(&files), &excepted), Vec::<String>::new());
    }

    #[test]
    fn a_circle_of_rooms_is_reported_whether_or_not_they_have_a_place_in_the_order() {
        let files = [
            ("lib.rs", "mod hall;\nmod garden;"),
            ("hall.rs", "pub mod door;\nuse crate::garden::Path;"),
            ("hall/door.rs", "pub struct Door;"),
            ("garden.rs", "pub struct Path;\nuse crate::hall::door::Door;"),
        ];
        let problems = room_problems(&RULES, &house(&files), &[]);
        assert_eq!(problems.len(), 1, "{problems:?}");
        for part in
            ["rooms garden, hall of house/src", "garden.rs:2 imports `crate::hall::door::Door`", "hall.rs:2"]
        {
            assert!(problems[0].contains(part), "{}", problems[0]);
        }
    }

    #[test]
    fn the_rooms_of_a_package_without_an_entry_are_checked() {
        let found = |package, source| -> Vec<(&str, usize)> {
            folders_of(package, source).iter().map(|folder| (folder.folder, folder.order.len())).collect()
        };
        assert_eq!(found("house", "house/src"), [("house/src", 0)]);
        let core = found("core", "core/src");
        assert!(core.len() == 1 && core[0].1 > 1, "{core:?}");
    }

    #[test]
    fn an_exception_for_rooms_in_order_is_reported() {
        let excepted = ["house/src"];
        let problems = room_problems(&RULES, &house(&[("lib.rs", "")]), &excepted);
        assert!(problems[0].contains("remove the entry"), "{problems:?}");
    }

    #[test]
    fn the_rooms_of_an_inner_folder_are_its_own() {
        let inner = Folder { folder: "house/src/hall", order: &[] };
        assert_eq!(inner.room_of("house/src/hall/door/hinge.rs"), Some("door"));
        assert_eq!(inner.room_of("house/src/hall/door.rs"), Some("door"));
        assert_eq!(inner.room_of("house/src/hall.rs"), None);
        assert_eq!(inner.room_of("house/src/hallway.rs"), None);
        assert_eq!(RULES.room_of("house/src/lib.rs"), None);
        assert_eq!(inner.package(), Some("house"));
    }

    #[test]
    fn long_files_are_reported_and_exceptions_expire() {
        let excepted = ["house/table.rs"];
        assert_eq!(length_problem("house/a.rs", FILE_LINES, &excepted), None);
        let problem = length_problem("house/a.rs", FILE_LINES + 1, &excepted).unwrap();
        assert!(problem.contains("house/a.rs has 601 lines") && problem.contains("split it"), "{problem}");
        assert_eq!(length_problem("house/table.rs", 2000, &excepted), None);
        assert!(length_problem("house/table.rs", 20, &excepted).unwrap().contains("remove the entry"));
        assert!(missing_files(Path::new("/does/not/exist"), &excepted)[0].contains("does not exist"));
    }

    #[test]
    fn lines_are_counted_in_sources_and_not_in_what_a_build_leaves() {
        let folder = tree(&[
            ("house/a.rs", "1\n2\n3"),
            ("house/kernels/b.cuh", "1\n"),
            ("house/notes.md", "1\n"),
            ("house/target/debug/c.rs", "1\n"),
            ("elsewhere/d.rs", "1\n"),
        ]);
        let mut counts = line_counts(folder.path(), BTreeSet::from(["house"])).unwrap();
        counts.sort();
        assert_eq!(counts, [("house/a.rs".to_owned(), 3), ("house/kernels/b.cuh".to_owned(), 1)]);
    }
}
