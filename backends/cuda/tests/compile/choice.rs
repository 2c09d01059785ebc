//! Chooses the kernels that the test compiles. Of all combinations of constants it takes a few, with every value of each constant of an
//! entry at least once.

use dsrun_core::DType;
use dsrun_cuda::KernelSpec;
use std::{
    collections::{BTreeMap, HashSet},
    env,
};

/// The environment variable that has all kernels compiled for all capabilities that need them.
const WHOLE: &str = "DSRUN_TEST_WHOLE";

/// What must be among the chosen kernels of an entry.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Feature<'a> {
    /// A kernel for the capability with this index.
    Capability(usize),
    /// A constant with this value: name and value.
    Value(&'a str, &'a str),
    /// A constant that is an element type, for the capability with this index: architectures load and multiply types in different ways.
    Element(usize, &'a str, &'a str),
}

/// The features of a kernel that is compiled for the capability with this index.
pub(crate) fn features<'a>(index: usize, spec: &'a KernelSpec) -> HashSet<Feature<'a>> {
    let of = |define: &'a (&'static str, String)| match DType::from_name(&define.1) {
        Some(_) => Feature::Element(index, define.0, &define.1),
        None => Feature::Value(define.0, &define.1),
    };
    spec.defines.iter().map(of).chain([Feature::Capability(index)]).collect()
}

/// Chooses from the kernels that each capability needs, greedily, until the chosen have all [`features`] of the needed. With
/// `DSRUN_TEST_WHOLE` it chooses all.
pub(crate) fn chosen<const N: usize>(needed: [HashSet<KernelSpec>; N]) -> [HashSet<KernelSpec>; N] {
    if env::var_os(WHOLE).is_some_and(|value| !value.is_empty()) {
        return needed;
    }
    let mut entries: BTreeMap<_, Vec<(usize, &KernelSpec)>> = BTreeMap::new();
    for (index, specs) in needed.iter().enumerate() {
        for spec in specs {
            entries.entry((spec.unit, spec.entry)).or_default().push((index, spec));
        }
    }
    let mut chosen = [(); N].map(|()| HashSet::new());
    for mut specs in entries.into_values() {
        // The same in every run.
        specs.sort_by_key(|(index, spec)| (format!("{spec:?}"), *index));
        let mut rest: Vec<_> =
            specs.into_iter().map(|(index, spec)| (index, spec, features(index, spec))).collect();
        // The one with the most new features, until none has any.
        while let Some((index, spec, new)) = rest.iter().max_by_key(|(.., new)| new.len()).cloned() {
            if new.is_empty() {
                break;
            }
            chosen[index].insert(spec.clone());
            rest.iter_mut().for_each(|(.., others)| others.retain(|one| !new.contains(one)));
        }
    }
    chosen
}
