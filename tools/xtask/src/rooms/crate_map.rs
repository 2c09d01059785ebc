//! The modules of a crate, and the imports between its files.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

use super::source::{ModuleSource, NamedPath};

/// The maximum number of re-exports that are followed for a path.
const MAX_REEXPORTS: usize = 16;

/// An import of one file from another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Import {
    /// The file that contains the path, relative to the crate's source folder, with `/`.
    pub(super) from: String,
    pub(super) line: usize,
    /// The path as written in the source.
    pub(super) path: String,
    /// The file that defines the item, after resolving re-exports.
    pub(super) to: String,
}

/// All modules of a crate; the root is the first.
struct CrateMap {
    modules: Vec<Module>,
}

type ModuleId = usize;

struct Module {
    file: String,
    parent: Option<ModuleId>,
    children: HashMap<String, ModuleId>,
    source: ModuleSource,
}

/// What a path resolves to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Target {
    Module(ModuleId),
    /// An item defined in this module.
    ItemOf(ModuleId),
}

/// All imports between the files of the crate with this root file: one for each pair of files, in order.
pub(super) fn imports(root: &Path) -> Result<Vec<Import>> {
    let folder = root.parent().context("a source file lies in a folder")?;
    let mut map = CrateMap { modules: Vec::new() };
    let name = root.file_name().unwrap_or_default().to_string_lossy();
    map.add_file(folder, &name, Path::new(""), None)?;
    Ok(map.imports())
}

impl CrateMap {
    /// Reads a file and the files of its modules, which are in the folder `inside`, relative to `folder`.
    fn add_file(
        &mut self,
        folder: &Path,
        file: &str,
        inside: &Path,
        parent: Option<ModuleId>,
    ) -> Result<ModuleId> {
        let text = fs::read_to_string(folder.join(file))
            .with_context(|| format!("cannot read {}", folder.join(file).display()))?;
        let source = ModuleSource::parse(&text)
            .with_context(|| format!("cannot read {}", folder.join(file).display()))?;
        self.add(folder, file, inside, parent, source)
    }

    fn add(
        &mut self,
        folder: &Path,
        file: &str,
        inside: &Path,
        parent: Option<ModuleId>,
        mut source: ModuleSource,
    ) -> Result<ModuleId> {
        let id = self.modules.len();
        let (files, inline) = (std::mem::take(&mut source.files), std::mem::take(&mut source.inline));
        self.modules.push(Module { file: file.to_owned(), parent, children: HashMap::new(), source });
        for name in files {
            let path = inside.join(format!("{name}.rs"));
            let shown = shown(&path);
            ensure!(
                folder.join(&path).is_file(),
                "{file} declares `mod {name};`, and {shown} does not exist: a module `foo` lies in `foo.rs`"
            );
            let child = self.add_file(folder, &shown, &inside.join(&name), Some(id))?;
            self.modules[id].children.insert(name, child);
        }
        for (name, source) in inline {
            let child = self.add(folder, file, &inside.join(&name), Some(id), source)?;
            self.modules[id].children.insert(name, child);
        }
        Ok(id)
    }

    fn imports(&self) -> Vec<Import> {
        let mut found: BTreeMap<(&str, &str), Import> = BTreeMap::new();
        for (id, module) in self.modules.iter().enumerate() {
            for path in &module.source.paths {
                let target = match self.resolve(id, &path.segments, 0) {
                    Some(Target::ItemOf(target)) => target,
                    Some(Target::Module(target)) if path.glob => target,
                    // Importing a module by itself is not counted: the paths that begin with its name are.
                    Some(Target::Module(_)) | None => continue,
                };
                let (from, to) = (module.file.as_str(), self.modules[target].file.as_str());
                if from != to {
                    found.entry((from, to)).or_insert_with(|| Import {
                        from: from.to_owned(),
                        line: path.line,
                        path: path.segments.join("::"),
                        to: to.to_owned(),
                    });
                }
            }
        }
        found.into_values().collect()
    }

    /// Resolves a path in a module; `None` if it is outside the crate or a name of the prelude.
    fn resolve(&self, module: ModuleId, path: &[String], reexports: usize) -> Option<Target> {
        let (first, rest) = path.split_first()?;
        let start = match first.as_str() {
            "crate" => Target::Module(0),
            "self" => Target::Module(module),
            "super" => Target::Module(self.modules[module].parent?),
            name => self.name_in(module, name, reexports)?,
        };
        rest.iter().try_fold(start, |target, segment| match target {
            // The rest of the path is an associated item or a variant.
            Target::ItemOf(_) => Some(target),
            Target::Module(module) if segment == "super" => {
                Some(Target::Module(self.modules[module].parent?))
            }
            Target::Module(module) => self.name_in(module, segment, reexports),
        })
    }

    /// Resolves a name in a module.
    fn name_in(&self, id: ModuleId, name: &str, reexports: usize) -> Option<Target> {
        let module = &self.modules[id];
        if let Some(child) = module.children.get(name) {
            return Some(Target::Module(*child));
        }
        if module.source.items.contains(name) {
            return Some(Target::ItemOf(id));
        }
        if reexports == MAX_REEXPORTS {
            return None;
        }
        let binds = |path: &&NamedPath| path.binds.as_deref() == Some(name) && path.segments != [name];
        if let Some(path) = module.source.paths.iter().find(binds) {
            return self.resolve(id, &path.segments, reexports + 1);
        }
        module.source.paths.iter().filter(|path| path.glob).find_map(|path| {
            match self.resolve(id, &path.segments, reexports + 1)? {
                Target::Module(target) if target != id => self.name_in(target, name, reexports + 1),
                _ => None,
            }
        })
    }
}

fn shown(path: &Path) -> String {
    let parts: PathBuf = path.components().collect();
    parts.components().map(|part| part.as_os_str().to_string_lossy()).collect::<Vec<_>>().join("/")
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;
    use crate::rooms::tests::tree;

    /// Imports of a crate with these files, as `from:line to`.
    fn imports_of(files: &[(&str, &str)]) -> Vec<String> {
        let folder = tree(files);
        let found = imports(&folder.path().join("lib.rs")).unwrap();
        found.iter().map(|import| format!("{}:{} {}", import.from, import.line, import.to)).collect()
    }

    #[rstest]
    #[case::from_the_root("use crate::b::B;", &["a.rs:1 b.rs"])]
    #[case::of_a_sibling("use super::b::B;", &["a.rs:1 b.rs"])]
    #[case::in_a_body("fn f() {\n    crate::b::g()\n}", &["a.rs:2 b.rs"])]
    #[case::below_a_sibling("use crate::b::{c::C, B};", &["a.rs:1 b.rs", "a.rs:1 b/c.rs"])]
    #[case::through_a_module_name("use crate::b::c;\n\nfn f() { c::g() }", &["a.rs:3 b/c.rs"])]
    #[case::of_everything("use crate::b::*;", &["a.rs:1 b.rs"])]
    #[case::of_a_reexport("use crate::b::D;", &["a.rs:1 b/c.rs"])]
    #[case::of_a_renamed_reexport("use crate::b::Renamed;", &["a.rs:1 b/c.rs"])]
    #[case::of_a_reexported_everything("use crate::E;", &["a.rs:1 b/c.rs"])]
    #[case::of_a_variant("use crate::b::B::Variant;", &["a.rs:1 b.rs"])]
    #[case::of_another_crate("use b::B;\nuse std::fmt;\nfn f() { Vec::new() }", &[])]
    #[case::of_itself("use self::inner::A; mod inner { pub struct A; use super::f; } fn f() {}", &[])]
    #[case::from_inside("mod inner { use super::super::b::B; }", &["a.rs:1 b.rs"])]
    #[case::in_tests("#[cfg(test)]\nmod tests { use crate::b::B; }", &[])]
    fn imports_are_found(#[case] source: &str, #[case] expected: &[&str]) {
        let files = [
            ("lib.rs", "mod a;\nmod b;\npub use b::c::*;"),
            ("a.rs", source),
            ("b.rs", "pub mod c;\npub enum B { Variant }\npub fn g() {}\npub use c::{D, E as Renamed};"),
            ("b/c.rs", "pub struct C;\npub struct D;\npub struct E;\npub fn g() {}"),
        ];
        let found = imports_of(&files);
        let of_a: Vec<&str> =
            found.iter().map(String::as_str).filter(|line| line.starts_with("a.rs")).collect();
        assert_eq!(of_a, expected);
    }

    #[test]
    fn a_parent_imports_what_it_takes_from_its_modules() {
        let files = [
            ("lib.rs", "mod a;\nmod b;\nuse a::A;\nfn f() { b::g() }"),
            ("a.rs", "pub struct A;"),
            ("b.rs", "pub fn g() {}"),
        ];
        assert_eq!(imports_of(&files), ["lib.rs:3 a.rs", "lib.rs:4 b.rs"]);
    }

    #[test]
    fn a_module_without_a_file_is_reported() {
        let folder = tree(&[("lib.rs", "mod a;")]);
        let message = imports(&folder.path().join("lib.rs")).unwrap_err().to_string();
        assert!(message.contains("`mod a;`") && message.contains("a.rs"), "{message}");
    }
}
