//! `dsrun`: generate text with transformer models from the command line.
//!
//! Results go to standard output; memory plans, progress, statistics and errors go to standard error, so that the output
//! can be piped.

mod arguments;
mod client;
mod commands;
mod devices;
mod echo;
mod find_backend;
mod group;
mod input;
mod interrupt;
mod probe;
mod serve;
mod session;
mod terminal;
mod trace_file;

use arguments::Command;
use std::process::ExitCode;

fn main() -> ExitCode {
    let arguments = arguments::parse();
    let terminal = terminal::Terminal::new(arguments.quiet);
    start_log(arguments.log.as_deref(), &terminal);
    let run = match &arguments.command {
        Command::Generate(command) => commands::generate::run(command, &terminal),
        Command::Chat(command) => commands::chat::run(command, &terminal),
        Command::Pull(command) => commands::models::pull(command, &terminal),
        Command::Models(command) => commands::models::run(command, &terminal),
        Command::Inspect(command) => commands::inspect::run(command, &terminal),
        Command::Plan(command) => commands::plan::run(command, &terminal),
        Command::Logits(command) => commands::logits::run(command, &terminal),
        Command::Backends(command) => commands::backends::run(command),
        Command::Doctor(command) => commands::doctor::run(command),
        Command::Kernels(command) => commands::kernels::run(command, &terminal),
        Command::Serve(command) => commands::serve::run(command, &terminal),
        Command::Bench(command) => commands::bench::run(command, &terminal),
        Command::Eval(command) => commands::eval::run(command, &terminal),
        Command::Quantize(command) => commands::quantize::run(command, &terminal),
        Command::Completions(command) => commands::shell::completions(command),
        Command::Man(command) => commands::shell::man(command, &terminal),
    };
    match run {
        Ok(()) if interrupt::happened() => ExitCode::from(130),
        Ok(()) => ExitCode::SUCCESS,
        // The reader of the output has ended (`dsrun .. | head`), which is not a failure.
        Err(error) if is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) if error.is::<devices::Followed>() => ExitCode::SUCCESS,
        Err(error) => {
            let one_of_several = devices::tell_others(&error);
            terminal.error(&error);
            if one_of_several {
                exit_at_once();
            }
            ExitCode::FAILURE
        }
    }
}

/// Ends one of several processes after an error. A library may still be aborting what it exchanges with processes that have ended, which
/// can take NCCL longer than anyone waits; if libraries were unloaded meanwhile, as at a normal exit, the process would crash.
fn exit_at_once() {
    let _ = std::io::Write::flush(&mut std::io::stdout());
    #[cfg(unix)]
    signal_hook::low_level::exit(1);
}

/// Starts logging to standard error with the filter of `--log` or `DSRUN_LOG`; the default is `warn`.
fn start_log(filter: Option<&str>, terminal: &terminal::Terminal) {
    let filter = tracing_subscriber::EnvFilter::new(filter.unwrap_or("warn"));
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    log.with_ansi(terminal.has_colour()).with_target(false).init();
}

/// Whether an error is a write to a pipe without a reader.
fn is_broken_pipe(error: &anyhow::Error) -> bool {
    let kind = error.root_cause().downcast_ref::<std::io::Error>().map(std::io::Error::kind);
    kind == Some(std::io::ErrorKind::BrokenPipe)
}
