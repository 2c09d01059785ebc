//! Registration and lookup of backends.

use dsrun_core::{
    Code, Error, Result,
    device::{Backend, BackendInfo, Device, DeviceInfo, DeviceOptions},
    registry::Registry,
};
use rstest::rstest;
use std::sync::Arc;

#[derive(Debug)]
struct Named(BackendInfo);

impl Backend for Named {
    fn info(&self) -> &BackendInfo {
        &self.0
    }

    fn devices(&self) -> Result<Vec<DeviceInfo>> {
        Ok(Vec::new())
    }

    fn open(&self, index: usize, _: &DeviceOptions) -> Result<Arc<dyn Device>> {
        Err(Error::new(Code::Unavailable, format!("no device {index}")))
    }
}

fn named(name: &str, version: &str) -> Arc<dyn Backend> {
    Arc::new(Named(BackendInfo { name: name.into(), version: version.into(), description: String::new() }))
}

fn names(registry: &Registry) -> Vec<&str> {
    registry.backends().iter().map(|backend| backend.info().name.as_str()).collect()
}

#[test]
fn the_first_backend_is_the_default() {
    let mut registry = Registry::new();
    for name in ["zeta", "alpha-2", "0"] {
        registry.register(named(name, "1")).unwrap();
    }
    assert_eq!(names(&registry), ["zeta", "alpha-2", "0"]);
    assert_eq!(registry.backend(None).unwrap().info().name, "zeta");
    assert_eq!(registry.backend(Some("alpha-2")).unwrap().info().name, "alpha-2");
}

#[test]
fn a_name_cannot_be_registered_twice() {
    let mut registry = Registry::new();
    registry.register(named("twin", "1")).unwrap();
    let error = registry.register(named("twin", "2")).unwrap_err();
    assert!(error.message().contains("`twin`"), "{error}");
    assert_eq!(names(&registry), ["twin"]);
    assert_eq!(registry.backend(Some("twin")).unwrap().info().version, "1");
}

#[rstest]
fn names_are_lower_case_letters_digits_and_dashes(
    #[values("", "Cuda", "my backend", "cuda_12", "über", "a.b", "a/b", "a\n")] name: &str,
) {
    let mut registry = Registry::new();
    let error = registry.register(named(name, "1")).unwrap_err();
    assert!(error.message().contains(&format!("{name:?}")), "{error}");
    assert!(registry.backends().is_empty());
}

#[test]
fn errors_of_unknown_backends_list_the_registered_ones() {
    let mut registry = Registry::new();
    assert_eq!(registry.backend(None).unwrap_err().code(), Code::Unavailable);
    registry.register(named("one", "1")).unwrap();
    registry.register(named("two", "1")).unwrap();
    let error = registry.backend(Some("three")).unwrap_err();
    assert_eq!(error.code(), Code::Unavailable);
    assert!(error.message().contains("`three`") && error.message().contains("one, two"), "{error}");
    // Lookup is exact.
    assert!(registry.backend(Some("on")).is_err() && registry.backend(Some("One")).is_err());
}
