//! The scripts that complete the command line in a shell, and the manual pages.
#![allow(clippy::unwrap_used, reason = "helpers of tests fail like tests")]

use rstest::rstest;
use std::process::{Command, Output};

fn dsrun(arguments: &[&str]) -> Output {
    let output = Command::new(env!("CARGO_BIN_EXE_dsrun")).args(arguments).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    output
}

fn text(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

#[rstest]
#[case("bash")]
#[case("zsh")]
#[case("fish")]
#[case("powershell")]
#[case("elvish")]
fn a_shell_completes_commands_and_flags(#[case] shell: &str) {
    let script = text(&dsrun(&["completions", shell]));
    for word in ["generate", "serve", "max-requests", "kv-dtype"] {
        assert!(script.contains(word), "{shell} does not know {word}");
    }
}

#[cfg(unix)]
#[test]
fn bash_completes_a_flag() {
    let folder = tempfile::tempdir().unwrap();
    let script = folder.path().join("dsrun.bash");
    std::fs::write(&script, dsrun(&["completions", "bash"]).stdout).unwrap();
    let line = format!(
        "source {}; COMP_WORDS=(dsrun serve --max-re); COMP_CWORD=2; _dsrun dsrun --max-re serve; echo ${{COMPREPLY[@]}}",
        script.display()
    );
    let output = Command::new("bash").args(["-c", &line]).output().unwrap();
    assert_eq!(text(&output).trim(), "--max-requests", "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn every_command_has_a_manual_page() {
    let folder = tempfile::tempdir().unwrap();
    let man = folder.path().join("man1");
    dsrun(&["man", "--out", man.to_str().unwrap()]);
    for (page, flag) in [("dsrun", "quiet"), ("dsrun-serve", "max"), ("dsrun-bench-latency", "prompt")] {
        let page = std::fs::read_to_string(man.join(format!("{page}.1"))).unwrap();
        assert!(page.contains(".TH") && page.contains(flag), "{page}");
    }
    assert!(text(&dsrun(&["man"])).contains(".SH NAME"));
}

#[test]
fn every_nested_command_has_a_page_with_its_flags() {
    let folder = tempfile::tempdir().unwrap();
    dsrun(&["man", "--out", folder.path().to_str().unwrap()]);
    let mut seen = Vec::new();
    let mut waiting = vec![Vec::<String>::new()];
    while let Some(command) = waiting.pop() {
        let arguments: Vec<&str> = command.iter().map(String::as_str).chain(["--help"]).collect();
        let help = text(&dsrun(&arguments));
        let name =
            ["dsrun"].into_iter().chain(command.iter().map(String::as_str)).collect::<Vec<_>>().join("-");
        let page = std::fs::read_to_string(folder.path().join(format!("{name}.1")))
            .unwrap_or_else(|error| panic!("{name}: {error}"));
        // A hyphen is escaped in a page.
        let page = page.replace("\\-", "-");
        assert!(page.contains(".SH NAME") && page.contains(".SH DESCRIPTION"), "{name}: {page}");
        let flags = flags(&help);
        assert!(flags.contains(&"--help"), "{name}: {help}");
        for flag in flags {
            // A page names a flag, then describes it.
            let name_of_flag = format!("\\fB{flag}\\fR");
            let mut lines = page.lines().skip_while(|line| *line != ".SH OPTIONS");
            let found = lines.find(|line| line.starts_with("\\fB") && line.contains(&name_of_flag));
            assert!(found.is_some(), "{name} has no {flag}: {page}");
            let description = lines.next().unwrap_or_default();
            assert!(
                description.starts_with(|c: char| c.is_alphanumeric()),
                "{name}, {flag}: {description:?}"
            );
        }
        waiting.extend(subcommands(&help).map(|inner| [&command[..], &[inner.to_owned()]].concat()));
        seen.push(format!("{name}.1"));
    }
    for name in ["dsrun-serve.1", "dsrun-bench-serve.1"] {
        assert!(seen.iter().any(|seen| seen == name), "{name} is not among {seen:?}");
    }
}

/// The long flags that a help text explains. Explanations stand further to the right.
fn flags(help: &str) -> Vec<&str> {
    let lines = help.lines().filter(|line| !line.starts_with("       ")).map(str::trim_start);
    let long = |line| {
        str::split_once(line, ", ").filter(|(short, _)| short.len() == 2).map_or(line, |(_, long)| long)
    };
    let names = lines.map(long).filter(|line| line.starts_with("--"));
    names.filter_map(|line| line.split([' ', '=', '[', ',']).next()).collect()
}

/// The commands that a help text lists.
fn subcommands(help: &str) -> impl Iterator<Item = &str> {
    let list = help.lines().skip_while(|line| *line != "Commands:").skip(1);
    let names = list.take_while(|line| line.starts_with("  ")).filter(|line| !line.starts_with("   "));
    names.filter_map(|line| line.split_whitespace().next()).filter(|name| *name != "help")
}
