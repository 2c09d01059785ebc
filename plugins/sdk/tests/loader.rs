//! Loading of plugins written in C, valid and invalid ones: each error says precisely what is wrong.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

#[path = "support/cc.rs"]
mod cc;

use dsrun_core::{
    Code, DType, TensorDesc,
    checked::ValidCall,
    device::{Backend, DeviceOptions, MemoryUse},
    kernels::{CallDesc, OperandDesc},
    op::{Argmax, Cast, Op},
};
use dsrun_plugin_sdk::PluginBackend;
use rstest::rstest;
use std::path::Path;

fn call(op: impl Into<Op>, operand: TensorDesc, result: TensorDesc) -> ValidCall {
    let operands = vec![Some(OperandDesc::Tensor(operand))];
    CallDesc { op: op.into(), operands, results: vec![result], comm: None }.validate().unwrap()
}

fn cast(dtype: DType) -> ValidCall {
    call(Cast { dtype }, TensorDesc::dense(DType::F32, &[2, 4]), TensorDesc::dense(dtype, &[2, 4]))
}

#[rstest]
#[case::as_it_is(&[])]
#[case::with_more_than_this_version_knows(&["LARGER"])]
fn a_plugin_in_c_works(#[case] definitions: &[&str]) {
    let folder = tempfile::tempdir().unwrap();
    let library = cc::plugin(folder.path(), "right.so", definitions);
    let backend = PluginBackend::load(&library).unwrap();
    assert_eq!((backend.info().name.as_str(), backend.info().version.as_str()), ("c-plugin", "0.0.1"));
    assert_eq!(backend.library(), Some(library.as_path()));
    let devices = backend.devices().unwrap();
    assert_eq!(devices.len(), 1);
    assert_eq!(devices[0].name, library.display().to_string(), "the host tells the plugin its path");
    assert_eq!(devices[0].memory_bytes, None);

    let error = backend.open(3, &DeviceOptions::default()).unwrap_err();
    assert_eq!((error.code(), error.to_string().as_str()), (Code::InvalidArgument, "index.value: is not 0"));
    let device = backend.open(0, &DeviceOptions::default()).unwrap();
    assert_eq!((device.properties().name.as_str(), device.properties().alignment), ("the only one", 64));
    assert_eq!(device.properties().dtypes, [DType::F32]);
    assert_eq!(device.memory(), MemoryUse { used: 5, free: None });
    assert!(device.graphs().is_none() && device.collective().is_none());
    assert_eq!(device.stream().unwrap_err().message(), "this device runs nothing");

    let kernels = device.kernels();
    assert_eq!(kernels.query(&cast(DType::F32)).unwrap().workspace_bytes, 0);
    assert_eq!(
        kernels.query(&cast(DType::F16)).unwrap().workspace_bytes,
        128,
        "attributes are read as their struct"
    );
    let argmax = call(Argmax {}, TensorDesc::dense(DType::F32, &[2, 4]), TensorDesc::dense(DType::I32, &[2]));
    let support = kernels.query(&argmax).unwrap();
    assert!(!support.native);
    assert_eq!(support.reason, "only cast is supported");
}

#[rstest]
#[case::another_minor_version(&["MINOR=9"], Code::AbiMismatch, &["version 0.9", "this program 0.2"])]
#[case::another_major_version(&["OTHER_MAJOR"], Code::AbiMismatch, &["version 3", "this program 0.2"])]
#[case::no_symbol(&["NO_ENTRY"], Code::AbiMismatch, &["not a dsrun plugin", "`dsrun_plugin_entry_v0`"])]
#[case::truncated_table(&["TRUNCATED"], Code::AbiMismatch, &["dsr_plugin_api", "`memory`", "needs"])]
#[case::truncated_inner_table(&["TRUNCATED_OPS"], Code::AbiMismatch, &["dsr_op_api", "`enqueue`", "needs"])]
#[case::no_table_at_all(&["TINY"], Code::AbiMismatch, &["struct_size", "is 4"])]
#[case::null_slot(&["NULL_SLOT"], Code::AbiMismatch, &["dsr_memory_api", "`host_pointer`"])]
#[case::null_table(&["NO_OPS"], Code::AbiMismatch, &["dsr_plugin_api", "`op`"])]
#[case::no_table(&["NO_TABLE"], Code::AbiMismatch, &["is null"])]
#[case::aborts_on_panic(&["FLAGS=DSR_PLUGIN_ABORTS_ON_PANIC"], Code::AbiMismatch, &["panic = \"abort\""])]
#[case::unknown_flags(&["FLAGS=0x40"], Code::AbiMismatch, &["0x40"])]
#[case::no_name(&["NAME=\"\""], Code::AbiMismatch, &["no name"])]
#[case::its_own_error(&["REFUSES"], Code::Unavailable, &["libdriver.so.1 is missing"])]
fn wrong_plugins_are_refused(#[case] definitions: &[&str], #[case] code: Code, #[case] parts: &[&str]) {
    let folder = tempfile::tempdir().unwrap();
    let library = cc::plugin(folder.path(), "wrong.so", definitions);
    let error = PluginBackend::load(&library).unwrap_err();
    assert_eq!(error.code(), code, "{error}");
    for part in parts {
        assert!(error.to_string().contains(part), "{part:?} is missing in {error}");
    }
    assert_eq!(error.argument(), library.to_str(), "every error names the file");
}

#[test]
fn a_plugin_that_panics_while_it_lists_devices_is_poisoned() {
    let folder = tempfile::tempdir().unwrap();
    let library = cc::plugin(folder.path(), "panics.so", &["PANICS_WHEN_LISTED"]);
    let backend = PluginBackend::load(&library).unwrap();
    let error = backend.devices().unwrap_err();
    assert_eq!((error.code(), error.message()), (Code::Panic, "an uncaught exception"));
    let error = backend.open(0, &DeviceOptions::default()).unwrap_err();
    assert_eq!(error.code(), Code::Panic);
    assert!(error.message().contains("cannot be used"), "{error}");
}

#[test]
fn files_that_are_not_libraries_are_refused_with_the_reason_of_the_loader() {
    let folder = tempfile::tempdir().unwrap();
    let text = folder.path().join("text.so");
    std::fs::write(&text, "this is not a library, but long enough for a loader to read its header").unwrap();
    let error = PluginBackend::load(&text).unwrap_err();
    assert_eq!(error.code(), Code::Unavailable);
    assert!(error.message().len() > "cannot be opened: dlopen failed".len(), "{error}");
    assert!(error.message().starts_with("cannot be opened: "), "{error}");

    for (path, part) in
        [(folder.path().join("none.so"), "does not exist"), (folder.path().into(), "is not a file")]
    {
        let error = PluginBackend::load(&path).unwrap_err();
        assert_eq!(error.code(), Code::Unavailable);
        assert!(error.message().contains(part), "{error}");
    }
    let error = PluginBackend::load(Path::new("none.so")).unwrap_err();
    let absolute = std::env::current_dir().unwrap().join("none.so");
    assert_eq!(
        error.argument(),
        absolute.to_str(),
        "a bare name is a path, and not searched for by the system"
    );
}

#[test]
fn a_library_can_be_loaded_twice() {
    let folder = tempfile::tempdir().unwrap();
    let library = cc::plugin(folder.path(), "twice.so", &[]);
    let (first, second) = (PluginBackend::load(&library).unwrap(), PluginBackend::load(&library).unwrap());
    assert_eq!(first.devices().unwrap(), second.devices().unwrap());
}
