//! The step `dependencies`: the dependency rule, which says which parts of the repository may depend on which.
//!
//! ```text
//! core <- backends/host <- backends/* <- plugins/*
//! core <- plugins/sdk <- plugins/*
//! core <- models <- engine <- tools, which may also use plugins/sdk
//! conformance-tests may use all of these but tools
//! ```
//!
//! The rule applies to normal and build dependencies. Development dependencies are free: a test may use any backend.
//! One edge is an exception by design, [`DEFAULT_BACKEND`].

use anyhow::Result;
use cargo_metadata::DependencyKind;

use crate::backend_names::{BackendNames, HOST_SUPPORT};
use crate::workspace::{Workspace, fail_on};

/// The only program that links a backend: `dsrun` registers the CPU backend, so that there is always a device.
const DEFAULT_BACKEND: (&str, &str) = ("tools/dsrun", "backends/cpu");

/// A top-level part of the repository.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Room {
    Core,
    /// The shared support of backends that compute in host memory.
    HostSupport,
    Backend,
    PluginSdk,
    Plugin,
    Models,
    Engine,
    Tool,
    Conformance,
}

impl Room {
    /// The room of a package, by its folder; `None` if the folder is in no room.
    fn of(folder: &str) -> Option<Self> {
        let (top, rest) = folder.split_once('/').unwrap_or((folder, ""));
        match (top, rest.is_empty()) {
            ("core", _) => Some(Self::Core),
            ("backends", false) if folder == HOST_SUPPORT => Some(Self::HostSupport),
            ("backends", false) => Some(Self::Backend),
            ("plugins", false) if rest == "sdk" => Some(Self::PluginSdk),
            ("plugins", false) => Some(Self::Plugin),
            ("models", _) => Some(Self::Models),
            ("engine", _) => Some(Self::Engine),
            ("tools", false) => Some(Self::Tool),
            ("conformance-tests", _) => Some(Self::Conformance),
            _ => None,
        }
    }

    /// The rooms whose packages this room may use.
    fn may_use(self) -> &'static [Self] {
        match self {
            Self::Core => &[],
            Self::HostSupport | Self::PluginSdk | Self::Models => &[Self::Core],
            Self::Backend => &[Self::Core, Self::HostSupport],
            Self::Plugin => &[Self::Core, Self::Backend, Self::PluginSdk],
            Self::Engine => &[Self::Core, Self::Models],
            Self::Tool => &[Self::Core, Self::PluginSdk, Self::Models, Self::Engine],
            Self::Conformance => &[
                Self::Core,
                Self::HostSupport,
                Self::Backend,
                Self::PluginSdk,
                Self::Plugin,
                Self::Models,
                Self::Engine,
            ],
        }
    }

    /// Whether an external crate that belongs to a backend (`candle-core`, `wgpu`, ..) may be used here.
    fn may_use_backend_crates(self) -> bool {
        matches!(self, Self::Backend | Self::Plugin | Self::Conformance)
    }

    fn name(self) -> &'static str {
        match self {
            Self::Core => "core",
            Self::HostSupport => HOST_SUPPORT,
            Self::Backend => "backends",
            Self::PluginSdk => "plugins/sdk",
            Self::Plugin => "plugins",
            Self::Models => "models",
            Self::Engine => "engine",
            Self::Tool => "tools",
            Self::Conformance => "conformance-tests",
        }
    }
}

/// A workspace package and its dependencies, without development dependencies.
struct Member {
    name: String,
    /// Relative to the root, with `/`.
    folder: String,
    dependencies: Vec<String>,
}

/// The step of `cargo xtask ci`.
pub(crate) fn check(workspace: &Workspace) -> Result<String> {
    let members = members(workspace);
    let names = BackendNames::new(members.iter().map(|member| member.folder.as_str()));
    fail_on(&violations(&members, &names), "the dependency rule is broken")?;
    Ok(format!("{} packages keep the dependency rule", members.len()))
}

fn members(workspace: &Workspace) -> Vec<Member> {
    workspace
        .metadata
        .workspace_packages()
        .into_iter()
        .map(|package| Member {
            name: package.name.to_string(),
            folder: workspace.folder(package),
            dependencies: package
                .dependencies
                .iter()
                .filter(|dependency| dependency.kind != DependencyKind::Development)
                .map(|dependency| dependency.name.clone())
                .collect(),
        })
        .collect()
}

/// One sentence for each dependency that breaks the rule, and for each package outside the known folders.
fn violations(members: &[Member], backend_names: &BackendNames) -> Vec<String> {
    let mut found = Vec::new();
    for member in members {
        let Some(room) = Room::of(&member.folder) else {
            found.push(format!(
                "{} lies in `{}`, which is not a room of the house: move it, or give the folder a room and a \
                 rule in tools/xtask/src/dependency_rule.rs",
                member.name, member.folder
            ));
            continue;
        };
        for dependency in &member.dependencies {
            match members.iter().find(|other| other.name == *dependency) {
                Some(other) => found.extend(inner_violation(member, room, other)),
                None if !room.may_use_backend_crates() && backend_names.first_in(dependency).is_some() => {
                    found.push(format!(
                        "{} ({}) depends on `{dependency}`, a crate of one backend: only backends and plugins \
                         may; reach it through the traits of dsrun-core",
                        member.name, member.folder
                    ));
                }
                None => {}
            }
        }
    }
    found
}

/// The sentence for an edge between two workspace packages, if it breaks the rule.
fn inner_violation(member: &Member, room: Room, other: &Member) -> Option<String> {
    // A package outside the known folders is reported separately.
    let other_room = Room::of(&other.folder)?;
    let is_default = (member.folder.as_str(), other.folder.as_str()) == DEFAULT_BACKEND;
    if is_default || room.may_use().contains(&other_room) {
        return None;
    }
    let allowed = match room.may_use() {
        [] => "nothing of ours".to_owned(),
        rooms => rooms.iter().map(|room| room.name()).collect::<Vec<_>>().join(", "),
    };
    Some(format!(
        "{} ({}) depends on {} ({}): {} may use {allowed}",
        member.name,
        member.folder,
        other.name,
        other.folder,
        room.name()
    ))
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    /// Every room once, with no edges.
    const HOUSE: &[(&str, &str)] = &[
        ("dsrun-core", "core"),
        ("dsrun-host", "backends/host"),
        ("dsrun-cpu", "backends/cpu"),
        ("dsrun-candle", "backends/candle"),
        ("dsrun-wgpu", "backends/wgpu"),
        ("dsrun-plugin-sdk", "plugins/sdk"),
        ("plugin-wgpu", "plugins/wgpu"),
        ("dsrun-models", "models"),
        ("dsrun-engine", "engine"),
        ("dsrun", "tools/dsrun"),
        ("xtask", "tools/xtask"),
        ("dsrun-conformance", "conformance-tests"),
    ];

    fn violations_of(members: &[(&str, &str)], edges: &[(&str, &str)]) -> Vec<String> {
        let members: Vec<_> = members
            .iter()
            .map(|(name, folder)| Member {
                name: (*name).to_owned(),
                folder: (*folder).to_owned(),
                dependencies: edges
                    .iter()
                    .filter(|(from, _)| from == name)
                    .map(|(_, to)| (*to).to_owned())
                    .collect(),
            })
            .collect();
        let names = BackendNames::new(members.iter().map(|member| member.folder.as_str()));
        violations(&members, &names)
    }

    #[rstest]
    #[case("dsrun-host", "dsrun-core")]
    #[case("dsrun-candle", "dsrun-core")]
    #[case("dsrun-candle", "dsrun-host")]
    #[case("plugin-wgpu", "dsrun-wgpu")]
    #[case("plugin-wgpu", "dsrun-core")]
    #[case("plugin-wgpu", "dsrun-plugin-sdk")]
    #[case("dsrun-plugin-sdk", "dsrun-core")]
    #[case("dsrun", "dsrun-plugin-sdk")]
    #[case("dsrun-conformance", "dsrun-plugin-sdk")]
    #[case("dsrun-models", "dsrun-core")]
    #[case("dsrun-engine", "dsrun-models")]
    #[case("dsrun", "dsrun-engine")]
    #[case("dsrun", "dsrun-cpu")]
    #[case("xtask", "dsrun-core")]
    #[case("dsrun-conformance", "dsrun-wgpu")]
    #[case("dsrun-conformance", "plugin-wgpu")]
    #[case("dsrun-conformance", "dsrun-engine")]
    #[case("dsrun-candle", "candle-core")]
    #[case("dsrun-engine", "serde")]
    #[case("dsrun-engine", "scandalous")]
    fn allows(#[case] from: &str, #[case] to: &str) {
        assert_eq!(violations_of(HOUSE, &[(from, to)]), Vec::<String>::new());
    }

    #[rstest]
    #[case("dsrun-core", "dsrun-models")]
    #[case("dsrun-core", "dsrun-candle")]
    #[case("dsrun-candle", "dsrun-models")]
    #[case("dsrun-candle", "dsrun-wgpu")]
    #[case("dsrun-host", "dsrun-cpu")]
    #[case("dsrun-engine", "dsrun-host")]
    #[case("plugin-wgpu", "dsrun-engine")]
    #[case("dsrun-candle", "dsrun-plugin-sdk")]
    #[case("dsrun-plugin-sdk", "dsrun-candle")]
    #[case("dsrun-plugin-sdk", "plugin-wgpu")]
    #[case("dsrun-engine", "dsrun-plugin-sdk")]
    #[case("dsrun-models", "dsrun-engine")]
    #[case("dsrun-models", "dsrun-candle")]
    #[case("dsrun-engine", "dsrun-candle")]
    #[case("dsrun-engine", "dsrun-conformance")]
    #[case("dsrun", "dsrun-candle")]
    #[case("dsrun", "plugin-wgpu")]
    #[case("xtask", "dsrun-candle")]
    #[case("xtask", "dsrun")]
    #[case("dsrun-conformance", "dsrun")]
    #[case("dsrun-models", "candle-core")]
    #[case("dsrun-engine", "cudarc")]
    #[case("dsrun", "wgpu")]
    fn refuses_and_names_both_ends(#[case] from: &str, #[case] to: &str) {
        let found = violations_of(HOUSE, &[(from, to)]);
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(found[0].starts_with(from) && found[0].contains(to), "{}", found[0]);
    }

    #[test]
    fn reports_every_broken_edge() {
        let edges =
            [("dsrun-core", "dsrun-engine"), ("dsrun-models", "dsrun-core"), ("dsrun-models", "wgpu")];
        assert_eq!(violations_of(HOUSE, &edges).len(), 2);
    }

    #[rstest]
    #[case("scripts/helper")]
    #[case("backends")]
    #[case("coreutils")]
    fn a_package_outside_the_house_is_reported(#[case] folder: &str) {
        let found = violations_of(&[("helper", folder)], &[]);
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(found[0].contains(&format!("`{folder}`")), "{}", found[0]);
    }
}
