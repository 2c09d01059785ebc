//! `dsrun completions` and `dsrun man`: what a shell and `man` know about the command line.

use crate::{
    arguments::{Completions, Man, command_line},
    terminal::Terminal,
};
use anyhow::{Context, Result};
use std::io::Write;

/// Prints the script that completes commands, flags and values in a shell.
pub(crate) fn completions(command: &Completions) -> Result<()> {
    let mut script = Vec::new();
    let mut line = command_line();
    let name = line.get_name().to_owned();
    clap_complete::generate(command.shell, &mut line, name, &mut script);
    std::io::stdout().lock().write_all(&script)?;
    Ok(())
}

/// Prints the manual page of the program, or writes those of all commands to a folder.
pub(crate) fn man(command: &Man, terminal: &Terminal) -> Result<()> {
    // A flag that the short help leaves out would have no description in its page.
    let line = command_line().mut_subcommands(|inner| inner.mut_args(|arg| arg.hide_short_help(false)));
    let Some(folder) = &command.out else {
        let mut page = Vec::new();
        clap_mangen::Man::new(line).render(&mut page)?;
        std::io::stdout().lock().write_all(&page)?;
        return Ok(());
    };
    let failed = || format!("the pages cannot be written to {}", folder.display());
    std::fs::create_dir_all(folder).with_context(failed)?;
    clap_mangen::generate_to(line, folder).with_context(failed)?;
    terminal.note(&format!("wrote the manual pages to {}", folder.display()));
    Ok(())
}
