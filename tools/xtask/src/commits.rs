//! The step `commits`: the subjects of commits are `module: imperative`, as CONTRIBUTING.md asks.
//!
//! The commits after [`BASE`], the last one before the rule was enforced, are checked. In a shallow clone without it, all
//! commits are checked.

use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

use crate::workspace::{Workspace, fail_on};

/// The last commit that is exempt from the rule.
const BASE: &str = "f7fcd57471a056a3fddbfb53522061a8fedc296d";

/// How many characters a subject may have.
const LENGTH: usize = 72;

/// Imperative verbs that look like a plural, a past tense or a participle.
const VERBS: &[&str] =
    &["alias", "bring", "embed", "exceed", "feed", "focus", "need", "ping", "seed", "shed", "speed"];

/// The step of `cargo xtask ci`.
pub(crate) fn check(workspace: &Workspace) -> Result<String> {
    let root = workspace.root();
    if !root.join(".git").exists() {
        return Ok("no commits to check: this is not a git repository".to_owned());
    }
    let commits = commits_after(root, BASE)?;
    let problems: Vec<String> = commits
        .iter()
        .filter_map(|(hash, subject)| Some(format!("{hash} `{subject}`: {}", problem(subject)?)))
        .collect();
    fail_on(
        &problems,
        "commits whose subjects are not `module: imperative`; reword them with `git rebase -i`",
    )?;
    Ok(format!("{} commits have subjects that say where and what", commits.len()))
}

/// Short hashes and subjects of the commits after `base`, or of all commits if `base` is not one of them. Merges are skipped.
fn commits_after(root: &Path, base: &str) -> Result<Vec<(String, String)>> {
    let has_base = git(root, &["cat-file", "-e", &format!("{base}^{{commit}}")])?.is_some();
    let range = if has_base { format!("{base}..HEAD") } else { "HEAD".to_owned() };
    let log = git(root, &["log", "--no-merges", "--format=%h%x09%s", &range])?;
    let log =
        log.with_context(|| format!("`git log {range}` failed; run it in the repository to see why"))?;
    let commits = log.lines().filter_map(|line| line.split_once('\t'));
    Ok(commits.map(|(hash, subject)| (hash.to_owned(), subject.to_owned())).collect())
}

/// The output of git; `None` if it fails.
fn git(root: &Path, arguments: &[&str]) -> Result<Option<String>> {
    let output = Command::new("git")
        // A checkout may belong to another user than the one that runs the checks.
        .arg("-c")
        .arg(format!("safe.directory={}", root.display()))
        .args(arguments)
        .current_dir(root)
        .stdin(Stdio::null())
        .output()
        .context("git could not be started")?;
    let text = String::from_utf8(output.stdout).context("git prints something that is not UTF-8")?;
    Ok(output.status.success().then_some(text))
}

/// The problem with a subject, and what to do; `None` if it is fine.
fn problem(subject: &str) -> Option<String> {
    check_subject(subject).err().map(|error| error.to_string())
}

fn check_subject(subject: &str) -> Result<()> {
    let length = subject.chars().count();
    ensure!(
        length <= LENGTH,
        "it has {length} characters, and may have {LENGTH}: leave the reasons to the body"
    );
    let (module, rest) = subject
        .split_once(": ")
        .context("it names no module: write `module: what is done`, such as `core: refuse empty programs`")?;
    let is_name = |name: &str| {
        !name.is_empty()
            && name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || "-_/.".contains(c))
    };
    ensure!(
        module.split(", ").all(is_name),
        "`{module}` is not the name of a module: use lower case, and commas between several"
    );
    ensure!(!rest.ends_with('.'), "it ends with a full stop: remove it");
    let verb = rest.split_whitespace().next().context("nothing follows the module: say what is done")?;
    let is_capitalised = verb.chars().next().is_some_and(char::is_uppercase)
        && verb.chars().skip(1).all(char::is_lowercase)
        && verb.len() > 1;
    ensure!(!is_capitalised, "`{verb}` is capitalised: write in lower case");
    let other_form = ["ed", "ing", "s"].into_iter().any(|end| verb.ends_with(end) && !verb.ends_with("ss"));
    ensure!(
        !other_form || VERBS.contains(&verb),
        "`{verb}` is not an imperative: begin with what the commit does, such as `add` or `replace`, or add the verb to \
         tools/xtask/src/commits.rs"
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case("core: refuse programs that read a state twice")]
    #[case("candle: repack Q4_1 weights at load")]
    #[case("docs: explain placements")]
    #[case("cuda, core: pass hidden sizes by name")]
    #[case("plugins/sdk: split the loader from the tables")]
    #[case("xtask: embed the table")]
    #[case("core: `Region` encodes its body once")]
    fn accepts(#[case] subject: &str) {
        assert_eq!(problem(subject), None);
    }

    #[rstest]
    #[case("fix the loader", "names no module")]
    #[case("Core: fix the loader", "`Core`")]
    #[case("the loader: fix it", "`the loader`")]
    #[case("core: Fix the loader", "capitalised")]
    #[case("core: fix the loader.", "full stop")]
    #[case("core:", "names no module")]
    #[case("core: ", "nothing follows")]
    #[case("core: fixed the loader", "`fixed`")]
    #[case("core: fixes the loader", "`fixes`")]
    #[case("core: fixing the loader", "`fixing`")]
    #[case("docs: lines and the embedding", "`lines`")]
    #[case("core: refuse programs that read a state twice, and say which of its values", "74 characters")]
    fn refuses_and_says_what_to_do(#[case] subject: &str, #[case] part: &str) {
        let problem = problem(subject).unwrap();
        assert!(problem.contains(part), "{problem}");
    }

    /// A repository whose commits have these subjects, the first one first, and their hashes.
    fn repository(subjects: &[&str]) -> (tempfile::TempDir, Vec<String>) {
        let folder = tempfile::tempdir().unwrap();
        let run = |arguments: &[&str]| git(folder.path(), arguments).unwrap().unwrap().trim().to_owned();
        run(&["init", "--quiet"]);
        let hashes = subjects
            .iter()
            .map(|subject| {
                let who =
                    ["-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"];
                run(&[&who[..], &["commit", "--quiet", "--allow-empty", "-m", subject]].concat());
                run(&["rev-parse", "HEAD"])
            })
            .collect();
        (folder, hashes)
    }

    #[test]
    fn the_commits_after_the_base_are_checked_and_all_if_it_is_not_there() {
        let (folder, hashes) = repository(&["Old", "core: add a", "core: add b"]);
        let subjects = |base: &str| {
            let commits = commits_after(folder.path(), base).unwrap();
            commits.into_iter().map(|(_, subject)| subject).collect::<Vec<_>>()
        };
        assert_eq!(subjects(&hashes[0]), ["core: add b", "core: add a"]);
        assert_eq!(subjects(BASE), ["core: add b", "core: add a", "Old"]);
    }
}
