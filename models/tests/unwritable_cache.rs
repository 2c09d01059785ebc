//! A cache that cannot be written: a read-only folder, and a full disk. Each test needs rights that the user may lack: the
//! first one must not be root, the second one must be allowed to mount.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]
#![cfg_attr(not(target_os = "linux"), allow(unused_imports, reason = "some tests are for one system"))]

#[allow(dead_code, reason = "these tests use a part of it")]
#[path = "fetch/common.rs"]
mod common;
#[allow(dead_code, reason = "these tests use a part of it")]
#[path = "fetch/mock_hub.rs"]
mod mock_hub;

use std::fs;
use std::path::Path;
use std::process::Command;

use common::{ID, assert_says, files_under, hub};
use dsrun_models::fetch::{Silent, Source, list_cached, resolve};
use dsrun_test_support::{Missing, TestResult, test_main};

test_main![
    #[cfg(unix)]
    a_read_only_cache_serves_and_refuses_new_models,
    #[cfg(target_os = "linux")]
    a_full_disk_is_named_and_nothing_half_written_stays,
];

#[cfg(unix)]
fn a_read_only_cache_serves_and_refuses_new_models() -> TestResult {
    use std::os::unix::fs::PermissionsExt as _;
    let cache = tempfile::tempdir().unwrap();
    let (_hub, options) = hub(cache.path());
    resolve(ID, &options, &mut Silent).unwrap();
    let models = cache.path().join("models");
    let permit = |mode| fs::set_permissions(&models, fs::Permissions::from_mode(mode)).unwrap();
    permit(0o555);
    if fs::write(models.join("probe"), b"").is_ok() {
        return Err(Missing::circumstance("this user, such as root, may write to read-only folders"));
    }
    assert_eq!(resolve(ID, &options, &mut Silent).unwrap().source, Source::Cache);
    let outcome = resolve("ann/tiny@v2", &options, &mut Silent);
    permit(0o755);
    assert_says(outcome, &["denied", "set DSRUN_CACHE to a folder that you can write to", "models"]);
    Ok(())
}

/// Where this is ignored, the same error is still tested on a writer that is always full.
#[cfg(target_os = "linux")]
fn a_full_disk_is_named_and_nothing_half_written_stays() -> TestResult {
    struct Unmount<'a>(&'a Path);
    impl Drop for Unmount<'_> {
        fn drop(&mut self) {
            let _ = Command::new("umount").arg(self.0).status();
        }
    }
    let disk = tempfile::tempdir().unwrap();
    let mounted =
        Command::new("mount").args(["-t", "tmpfs", "-o", "size=256k", "tmpfs"]).arg(disk.path()).output();
    if !mounted.is_ok_and(|output| output.status.success()) {
        return Err(Missing::circumstance("this user may not mount a small file system"));
    }
    let _unmount = Unmount(disk.path());
    let (_hub, options) = hub(disk.path());
    assert_says(
        resolve(ID, &options, &mut Silent),
        &["cannot write", "model.safetensors", "free some space", "DSRUN_CACHE"],
    );
    let left = files_under(disk.path());
    assert!(left.iter().all(|file| !file.contains("safetensors")), "{left:?}");
    assert!(!list_cached(&options).unwrap()[0].complete);
    Ok(())
}
