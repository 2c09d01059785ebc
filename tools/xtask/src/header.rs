//! The C header of the plugin ABI, `plugins/sdk/include/dsrun.h`.

use anyhow::{Context, Result, ensure};

use crate::workspace::cargo;

/// Writes the header, by running the test that compares it in its writing mode.
pub(crate) fn generate() -> Result<()> {
    let test = "the_header_is_up_to_date";
    let status = cargo()
        .args(["test", "--quiet", "--package", "xtask", "--test", "header", "--", "--exact", test])
        .env("DSRUN_UPDATE_HEADER", "1")
        .status()
        .context("cargo could not be started")?;
    ensure!(status.success(), "the header was not written; cargo ended with {status}");
    Ok(())
}
