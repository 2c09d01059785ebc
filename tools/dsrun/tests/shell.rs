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
