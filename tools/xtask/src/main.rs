//! Project tasks. `cargo xtask ci` runs all checks, whose steps are in [`ci`]. `cargo xtask docs` writes the generated pages of
//! the book, `cargo xtask header` writes the C header of the plugin ABI, and `cargo xtask install` installs programs and plugins.

// A command-line tool: its output is its purpose.
#![allow(clippy::print_stdout, clippy::print_stderr)]

mod arguments;
mod backend_names;
mod ci;
mod commits;
mod dependency_rule;
mod documentation;
mod fuzz;
mod guide;
mod header;
mod install;
mod licences;
mod rooms;
mod rust_tokens;
mod template;
mod workspace;

use std::process::ExitCode;

use arguments::Task;

fn main() -> ExitCode {
    let result = match fuzz::compile() {
        Some(compiled) => compiled,
        None => run(),
    };
    match result {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::from(2)
        }
    }
}

/// Runs the task that the arguments name. Returns whether it succeeded.
fn run() -> anyhow::Result<bool> {
    match arguments::parse(std::env::args().skip(1)) {
        Ok(Task::Help) => {
            print!("{}", arguments::USAGE);
            Ok(true)
        }
        Ok(Task::List) => {
            ci::list();
            Ok(true)
        }
        Ok(Task::Ci { only }) => ci::run(&only),
        Ok(Task::Docs) => documentation::generate().map(|()| true),
        Ok(Task::Header) => header::generate().map(|()| true),
        Ok(Task::Install { prefix, profile }) => install::run(&prefix, profile).map(|installed| {
            print!("{}", install::report(&installed, &prefix));
            true
        }),
        Err(error) => Err(error),
    }
}
