//! The step `licences`: all dependencies have an allowed licence and come from crates.io.
//!
//! The step checks every package that one of the supported platforms needs to build or test. A package without a licence
//! expression fails.

use std::collections::{HashMap, HashSet};

use anyhow::Result;
use cargo_metadata::{DependencyKind, Metadata, Package, PackageId, TargetKind};
use spdx::{Expression, ParseMode};

use crate::workspace::{Workspace, fail_on};

/// Licences that every package may have.
const ALLOWED: &[&str] = &[
    "0BSD",
    "Apache-2.0",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "BSL-1.0",
    "ISC",
    "MIT",
    "Unicode-3.0",
    "Unlicense",
    "Zlib",
];

/// Additional licences for packages that are only used to build or test, and are not linked into shipped programs.
const ALLOWED_FOR_TOOLS: &[&str] = &["MPL-2.0"];

/// Licence exceptions that only add permissions; a licence with one of them is allowed where the licence is.
const ALLOWED_EXCEPTIONS: &[&str] = &["LLVM-exception"];

/// The step of `cargo xtask ci`.
pub(crate) fn check(workspace: &Workspace) -> Result<String> {
    let metadata = &workspace.metadata;
    let shipped = shipped_packages(metadata);
    let mut problems = Vec::new();
    for package in &metadata.packages {
        let role = if shipped.contains(&package.id) { Role::Shipped } else { Role::Tool };
        if let Err(reason) = check_licence(package.license.as_deref(), role) {
            problems.push(format!("{} {}: {reason}", package.name, package.version));
        }
        // The template for backends is a workspace of its own.
        let ours = package.manifest_path.starts_with(&metadata.workspace_root);
        if let Some(reason) = source_problem(package, ours) {
            problems.push(format!("{} {}: {reason}", package.name, package.version));
        }
    }
    fail_on(&problems, "packages whose licence or source is not allowed; see tools/xtask/src/licences.rs")?;
    Ok(format!(
        "{} packages, {} of them shipped, have allowed licences",
        metadata.packages.len(),
        shipped.len()
    ))
}

/// The use of a package.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    /// The package is linked into a shipped program or library.
    Shipped,
    /// The package is only used to build or test.
    Tool,
}

/// Checks whether an SPDX expression can be satisfied with allowed licences.
fn check_licence(expression: Option<&str>, role: Role) -> Result<(), String> {
    let Some(text) = expression else {
        return Err("it states no SPDX licence expression".to_owned());
    };
    // Lax: crates from before 2018 write `MIT/Apache-2.0` for `MIT OR Apache-2.0`.
    let parsed = Expression::parse_mode(text, ParseMode::LAX)
        .map_err(|error| format!("`{text}` is not an SPDX expression: {}", error.reason))?;
    let allowed = |requirement: &spdx::LicenseReq| {
        let Some(licence) = requirement.license.id() else { return false };
        let licence_allowed = ALLOWED.contains(&licence.name)
            || (role == Role::Tool && ALLOWED_FOR_TOOLS.contains(&licence.name));
        let exception_allowed = requirement
            .addition
            .as_ref()
            .is_none_or(|addition| addition.id().is_some_and(|id| ALLOWED_EXCEPTIONS.contains(&id.name)));
        licence_allowed && exception_allowed
    };
    if parsed.evaluate(allowed) {
        return Ok(());
    }
    match role {
        Role::Shipped => Err(format!("`{text}` is not allowed in what we ship")),
        Role::Tool => Err(format!("`{text}` is not allowed, even for a build tool")),
    }
}

/// The problem with the source of a package, if there is one.
fn source_problem(package: &Package, ours: bool) -> Option<String> {
    match &package.source {
        Some(source) if source.is_crates_io() => None,
        Some(source) => Some(format!("it comes from {source}, not from crates.io")),
        None if ours => None,
        None => Some(format!("it is a path outside the repository: {}", package.manifest_path)),
    }
}

/// The packages that are linked into ours: those reachable over normal dependencies and not through a procedural macro.
fn shipped_packages(metadata: &Metadata) -> HashSet<PackageId> {
    let procedural_macros: HashSet<&PackageId> = metadata
        .packages
        .iter()
        .filter(|package| package.targets.iter().any(|target| target.kind.contains(&TargetKind::ProcMacro)))
        .map(|package| &package.id)
        .collect();
    let normal_edges: HashMap<&PackageId, Vec<&PackageId>> = metadata
        .resolve
        .iter()
        .flat_map(|resolve| &resolve.nodes)
        .map(|node| {
            let is_normal = |kind: &cargo_metadata::DepKindInfo| kind.kind == DependencyKind::Normal;
            let normal = node.deps.iter().filter(|dependency| dependency.dep_kinds.iter().any(is_normal));
            (&node.id, normal.map(|dependency| &dependency.pkg).collect())
        })
        .collect();
    let reached = reach(metadata.workspace_members.iter().collect(), |package| {
        let next = normal_edges.get(package).map(Vec::as_slice).unwrap_or_default();
        next.iter().copied().filter(|package| !procedural_macros.contains(package)).collect()
    });
    reached.into_iter().cloned().collect()
}

/// All nodes reachable from `start`, including `start`.
fn reach<T: Copy + Eq + std::hash::Hash>(start: Vec<T>, next: impl Fn(T) -> Vec<T>) -> HashSet<T> {
    let mut reached: HashSet<T> = start.iter().copied().collect();
    let mut pending = start;
    while let Some(current) = pending.pop() {
        pending.extend(next(current).into_iter().filter(|&found| reached.insert(found)));
    }
    reached
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case("MIT")]
    #[case("MIT OR Apache-2.0")]
    #[case("MIT/Apache-2.0")]
    #[case("GPL-3.0-only OR MIT")]
    #[case("(MIT OR Apache-2.0) AND Unicode-3.0")]
    #[case("Apache-2.0 WITH LLVM-exception")]
    #[case("BSD-3-Clause AND Zlib")]
    fn takes_for_everything(#[case] expression: &str) {
        assert_eq!(check_licence(Some(expression), Role::Shipped), Ok(()));
        assert_eq!(check_licence(Some(expression), Role::Tool), Ok(()));
    }

    #[rstest]
    #[case("GPL-3.0-only")]
    #[case("MIT AND GPL-2.0-or-later")]
    #[case("GPL-2.0-only WITH Classpath-exception-2.0")]
    #[case("MIT WITH Classpath-exception-2.0")]
    #[case("LicenseRef-ours")]
    #[case("Permissive, mostly")]
    #[case("")]
    fn refuses_for_everything(#[case] expression: &str) {
        assert!(check_licence(Some(expression), Role::Shipped).is_err());
        assert!(check_licence(Some(expression), Role::Tool).is_err());
    }

    #[test]
    fn a_package_without_an_expression_is_refused() {
        assert!(check_licence(None, Role::Tool).is_err());
    }

    #[test]
    fn the_mozilla_licence_is_for_tools_only() {
        assert_eq!(check_licence(Some("MPL-2.0"), Role::Tool), Ok(()));
        let reason = check_licence(Some("MPL-2.0"), Role::Shipped).unwrap_err();
        assert!(reason.contains("MPL-2.0") && reason.contains("ship"), "{reason}");
    }

    #[test]
    fn reach_follows_edges_and_ends_in_circles() {
        // 1 -> 2 -> 3 -> 1, and 4 -> 1.
        let next = |node: u32| match node {
            1 => vec![2],
            2 => vec![3],
            3 | 4 => vec![1],
            _ => vec![],
        };
        assert_eq!(reach(vec![1], next), HashSet::from([1, 2, 3]));
        assert_eq!(reach(vec![4], next), HashSet::from([1, 2, 3, 4]));
    }
}
