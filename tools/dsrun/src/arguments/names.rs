//! The command line with an environment variable for every flag, and with the help that fits each command.

use super::Arguments;
use clap::{Arg, ArgAction, Command, CommandFactory, FromArgMatches};

/// Flags for comparing techniques, which the commands for users accept without listing them.
const FOR_COMPARISON: &[&str] =
    &["no_fuse", "no_launch_ahead", "prompts_first", "no_graphs", "micro_batches"];

/// Flags that few need, which the commands for users list in `--help` but not in `-h`.
const FOR_FEW: &[&str] = &[
    "log",
    "trace",
    "kv_dtype",
    "exact",
    "step_tokens",
    "weights_in",
    "experts",
    "kv_in",
    "host_memory",
    "resident_layers",
    "prefix_cache_host",
    "prefix_cache",
    "prefix_cache_size",
    "pp",
    "mesh",
    "stages",
    "devices",
    "share_device",
    "shard",
    "launcher",
    "rendezvous",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "threads",
    "weights",
    "speculate",
    "draft",
];

/// The commands for users.
const FOR_USERS: [&str; 2] = ["generate", "chat"];

/// Parses the command line of the process. Exits after help and errors, as clap does.
pub(crate) fn parse() -> Arguments {
    let matches = command().get_matches();
    let mut arguments = Arguments::from_arg_matches(&matches).unwrap_or_else(|error| error.exit());
    arguments.command.take_given_model();
    arguments
}

/// The command line.
pub(crate) fn command() -> Command {
    let mut command = with_variables(Arguments::command());
    for name in FOR_USERS {
        command = command.mut_subcommand(name, |command| {
            command.mut_args(|arg| {
                let name = arg.get_id().as_str();
                let (hidden, rare) = (FOR_COMPARISON.contains(&name), FOR_FEW.contains(&name));
                arg.hide(hidden).hide_short_help(rare)
            })
        });
    }
    command
}

/// Gives every flag of a command and of its subcommands its environment variable.
fn with_variables(command: Command) -> Command {
    let names: Vec<String> = command.get_subcommands().map(|command| command.get_name().to_owned()).collect();
    let command = command.mut_args(with_variable);
    names.into_iter().fold(command, |command, name| command.mut_subcommand(name, with_variables))
}

fn with_variable(arg: Arg) -> Arg {
    let help = matches!(
        arg.get_action(),
        ArgAction::Help | ArgAction::HelpShort | ArgAction::HelpLong | ArgAction::Version
    );
    match arg.get_long() {
        Some(long) if !help && arg.get_env().is_none() => {
            let variable = variable(long);
            if std::env::var(&variable).is_ok_and(|value| is_service_link(&value)) {
                return arg;
            }
            let arg = arg.env(variable).hide_env(true);
            match arg.get_action() {
                ArgAction::SetTrue => arg.value_parser(switch),
                _ => arg,
            }
        }
        _ => arg,
    }
}

/// The value of the variable of a flag that takes none.
fn switch(text: &str) -> Result<bool, &'static str> {
    match text.to_ascii_lowercase().as_str() {
        "1" | "true" | "yes" | "on" => Ok(true),
        "" | "0" | "false" | "no" | "off" => Ok(false),
        _ => Err("must be true, yes, on or 1, or false, no, off, 0 or empty"),
    }
}

/// Whether Kubernetes set a variable: for a service called `dsrun`, every container gets `DSRUN_PORT=tcp://ADDRESS:PORT`.
fn is_service_link(value: &str) -> bool {
    ["tcp://", "udp://", "sctp://"].iter().any(|scheme| value.starts_with(scheme))
}

/// The environment variable of a flag.
fn variable(flag: &str) -> String {
    format!("DSRUN_{}", flag.to_ascii_uppercase().replace('-', "_"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_short_help_of_the_commands_for_users_is_short() {
        let mut commands = command();
        for flag in FOR_COMPARISON.iter().chain(FOR_FEW) {
            let mut named = FOR_USERS.iter().filter_map(|name| commands.find_subcommand(name));
            let found = named.any(|command| command.get_arguments().any(|arg| arg.get_id() == flag));
            assert!(found || *flag == "log", "no command for users has a flag {flag}");
        }
        for name in FOR_USERS {
            let command = commands.find_subcommand_mut(name).expect("there is such a command");
            let text = command.render_help().to_string();
            assert!(text.lines().count() < 80, "{text}");
            for heading in ["Model:", "Engine:", "Device:", "Several devices:", "Sampling:"] {
                assert!(text.lines().any(|line| line == heading), "{heading} is missing in\n{text}");
            }
        }
    }

    #[test]
    fn variables_of_flags_without_values_are_true_or_false() {
        for (text, expected) in
            [("1", true), ("TRUE", true), ("on", true), ("", false), ("0", false), ("No", false)]
        {
            assert_eq!(switch(text), Ok(expected), "{text}");
        }
        for text in ["maybe", "2", "-1", " true"] {
            assert!(switch(text).is_err(), "{text}");
        }
    }

    #[test]
    fn flags_have_the_names_of_other_programs_too() {
        for line in [
            "dsrun generate -c 512 x",
            "dsrun generate --ctx-size 512 --temp 0 --n-predict 3 x",
            "dsrun generate --max-model-len 512 x",
            "dsrun serve -m a/b -c 512 --max-num-seqs 8 --api-key secret",
            "dsrun serve --model a/b --max-num-batched-tokens 256 --parallel 2",
            "dsrun serve a/b --tensor-parallel-size 2 --dtype auto --kv-cache-dtype f16 --alias name -t 2",
            "dsrun serve a/b --pipeline-parallel-size 2 --ssl-certfile cert.pem --ssl-keyfile key.pem",
            "dsrun generate -t 2 --tensor-parallel-size 2 --dtype auto x",
            "dsrun models list",
            "dsrun inspect --fused",
            "dsrun inspect --step 4",
        ] {
            let parsed = command().try_get_matches_from(line.split(' '));
            assert!(parsed.is_ok(), "{line}: {}", parsed.expect_err("it is refused"));
        }
    }

    #[test]
    fn the_help_for_users_does_not_list_what_is_for_comparison() {
        for name in FOR_USERS {
            let mut command = command();
            let help = command.find_subcommand_mut(name).expect("a command").render_long_help().to_string();
            assert!(!help.contains("comparison") && help.contains("--temperature"), "{help}");
        }
    }

    #[test]
    fn variables_of_kubernetes_are_told_from_those_of_flags() {
        assert!(is_service_link("tcp://10.0.0.7:8000"));
        assert!(!is_service_link("8000") && !is_service_link("") && !is_service_link("owner/name"));
    }

    #[test]
    fn every_flag_has_a_variable() {
        fn without(command: &Command, names: &str) -> Vec<String> {
            let below = |command: &Command| without(command, &format!("{names} {}", command.get_name()));
            let shows = |arg: &&Arg| ["help", "version"].contains(&arg.get_id().as_str());
            let flags = command.get_arguments().filter(|arg| arg.get_long().is_some() && !shows(arg));
            let mine =
                flags.filter(|arg| arg.get_env().is_none()).map(|arg| format!("{names} --{}", arg.get_id()));
            mine.chain(command.get_subcommands().flat_map(below)).collect()
        }
        let command = command();
        assert_eq!(without(&command, "dsrun"), [""; 0]);
        let serve = command.find_subcommand("serve").expect("a command");
        let variable = |id: &str| {
            let arg = serve.get_arguments().find(|arg| arg.get_id() == id).expect("a flag");
            arg.get_env().map(|name| name.to_string_lossy().into_owned())
        };
        assert_eq!(variable("max_requests").as_deref(), Some("DSRUN_MAX_REQUESTS"));
        assert_eq!(variable("port").as_deref(), Some("DSRUN_PORT"));
    }
}
