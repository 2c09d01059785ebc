//! The step `docs`: every link in the Markdown of the repository has a target, and the summary of the book lists all pages.
//!
//! The step reads the pages of the book in `docs/` and the Markdown files of the root, and does not follow links to other
//! sites. A page of the book may link only to the book, because only the book is published.

use std::collections::{BTreeSet, HashMap};
use std::fs;
use std::path::{Component, Path, PathBuf};

use anyhow::{Context, Result, ensure};
use pulldown_cmark::{Event, Options, Parser, Tag, TagEnd};

use crate::workspace::{Workspace, cargo, display_relative, fail_on, files_with_extension};

/// The step of `cargo xtask ci`.
pub(crate) fn check(workspace: &Workspace) -> Result<String> {
    let root = workspace.root();
    let pages = pages(root)?;
    let summary = Path::new("docs/src/SUMMARY.md");
    ensure!(pages.contains_key(summary), "docs/src/SUMMARY.md is missing: it lists the pages of the book");
    let mut problems = link_problems(&pages, |path| root.join(path).exists());
    problems.extend(unlisted_pages(&pages, summary));
    fail_on(&problems, "the documentation has broken links or unlisted pages")?;
    let links: usize = pages.values().map(|page| page.links.len()).sum();
    Ok(format!("{links} links of {} pages have targets", pages.len()))
}

/// Writes the generated pages, by running the test that compares them in the mode that writes them.
pub(crate) fn generate() -> Result<()> {
    let status = cargo()
        .args(["test", "--quiet", "--package", "xtask", "--test", "op_table"])
        .env("DSRUN_UPDATE_DOCS", "1")
        .status()
        .context("cargo could not be started")?;
    ensure!(status.success(), "the pages were not written; cargo ended with {status}");
    Ok(())
}

/// The links and headings of a Markdown file.
#[derive(Debug, Default, PartialEq, Eq)]
struct Page {
    links: Vec<Link>,
    /// The names of the headings as a link would write them after `#`.
    anchors: BTreeSet<String>,
}

#[derive(Debug, PartialEq, Eq)]
struct Link {
    line: usize,
    target: String,
}

/// All pages by their path from the root.
fn pages(root: &Path) -> Result<HashMap<PathBuf, Page>> {
    let mut files = files_with_extension(&root.join("docs"), "md")?;
    for entry in fs::read_dir(root).with_context(|| format!("cannot list {}", root.display()))? {
        let path = entry.with_context(|| format!("cannot list {}", root.display()))?.path();
        if path.is_file() && path.extension().is_some_and(|extension| extension == "md") {
            files.push(path);
        }
    }
    files
        .into_iter()
        .map(|file| {
            let shown = display_relative(&file, root);
            let text = fs::read_to_string(&file).with_context(|| format!("cannot read {shown}"))?;
            Ok((PathBuf::from(shown), read_page(&text)))
        })
        .collect()
}

fn read_page(text: &str) -> Page {
    let mut page = Page::default();
    let mut heading: Option<String> = None;
    for (event, range) in Parser::new_ext(text, Options::ENABLE_TABLES).into_offset_iter() {
        match event {
            Event::Start(Tag::Link { dest_url, .. } | Tag::Image { dest_url, .. }) => {
                let line = 1 + text[..range.start].matches('\n').count();
                page.links.push(Link { line, target: dest_url.into_string() });
            }
            Event::Start(Tag::Heading { .. }) => heading = Some(String::new()),
            Event::End(TagEnd::Heading(_)) => {
                if let Some(title) = heading.take() {
                    let anchor = anchor(&title);
                    // A repeated title gets a number, as in the renderer of the book.
                    let mut name = anchor.clone();
                    let mut count = 0;
                    while !page.anchors.insert(name.clone()) {
                        count += 1;
                        name = format!("{anchor}-{count}");
                    }
                }
            }
            Event::Text(part) | Event::Code(part) => {
                if let Some(title) = &mut heading {
                    title.push_str(&part);
                }
            }
            _ => {}
        }
    }
    page
}

/// The anchor of a heading: its title in lower case, with `-` for spaces and without punctuation.
fn anchor(title: &str) -> String {
    title
        .chars()
        .filter_map(|character| match character {
            ' ' => Some('-'),
            '-' | '_' => Some(character),
            _ if character.is_alphanumeric() => Some(character.to_ascii_lowercase()),
            _ => None,
        })
        .collect()
}

/// One sentence for each link without a target. `exists` tests for files that are not pages.
fn link_problems(pages: &HashMap<PathBuf, Page>, exists: impl Fn(&Path) -> bool) -> Vec<String> {
    let mut problems = Vec::new();
    for (path, page) in pages {
        for link in &page.links {
            if let Some(problem) = link_problem(path, &link.target, pages, &exists) {
                problems.push(format!("{}:{}: `{}` {problem}", path.display(), link.line, link.target));
            }
        }
    }
    problems.sort();
    problems
}

fn link_problem(
    from: &Path,
    target: &str,
    pages: &HashMap<PathBuf, Page>,
    exists: impl Fn(&Path) -> bool,
) -> Option<String> {
    if target.contains("://") || target.starts_with("mailto:") {
        return None;
    }
    if target.starts_with('/') {
        return Some("starts at a root that differs between readers; make it relative".to_owned());
    }
    let (file, anchor) = target.split_once('#').unwrap_or((target, ""));
    if file.is_empty() && anchor.is_empty() {
        return Some("names no target".to_owned());
    }
    let path = match file {
        "" => from.to_path_buf(),
        _ => match resolve(from.parent().unwrap_or(Path::new("")), file) {
            Some(path) => path,
            None => return Some("leads out of the repository".to_owned()),
        },
    };
    let book = Path::new("docs/src");
    if from.starts_with(book) && !path.starts_with(book) {
        return Some("leads out of the book; link to the repository's web address instead".to_owned());
    }
    match pages.get(&path) {
        Some(page) if anchor.is_empty() || page.anchors.contains(anchor) => None,
        Some(_) => Some(format!("names a heading that {} does not have", path.display())),
        None if exists(&path) => None,
        None => Some(format!("leads to {}, which does not exist", path.display())),
    }
}

/// Resolves `relative` against `folder`; `None` if the path leaves the root.
fn resolve(folder: &Path, relative: &str) -> Option<PathBuf> {
    let mut path = folder.to_path_buf();
    for part in Path::new(relative).components() {
        match part {
            Component::Normal(name) => path.push(name),
            Component::CurDir => {}
            Component::ParentDir => {
                if !path.pop() {
                    return None;
                }
            }
            Component::RootDir | Component::Prefix(_) => return None,
        }
    }
    Some(path)
}

/// Pages of the book that its summary does not list, which the renderer would omit silently.
fn unlisted_pages(pages: &HashMap<PathBuf, Page>, summary: &Path) -> Vec<String> {
    let folder = summary.parent().unwrap_or(Path::new(""));
    let listed: BTreeSet<PathBuf> = pages
        .get(summary)
        .iter()
        .flat_map(|page| &page.links)
        .filter_map(|link| resolve(folder, &link.target))
        .collect();
    let mut problems: Vec<String> = pages
        .keys()
        .filter(|path| path.starts_with(folder) && *path != summary && !listed.contains(*path))
        .map(|path| format!("{} is not listed in {}", path.display(), summary.display()))
        .collect();
    problems.sort();
    problems
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    fn made_up(files: &[(&str, &str)]) -> HashMap<PathBuf, Page> {
        files.iter().map(|(path, text)| (PathBuf::from(path), read_page(text))).collect()
    }

    /// A small repository: a readme, a book with a summary and two pages, one of them in a folder.
    fn repository(extra: &str) -> HashMap<PathBuf, Page> {
        made_up(&[
            ("README.md", "[licence](LICENSE-MIT) [core](docs/src/crates/core.md#two-words)"),
            ("docs/src/SUMMARY.md", "- [Intro](intro.md)\n- [Core](./crates/core.md)"),
            ("docs/src/intro.md", extra),
            ("docs/src/crates/core.md", "# Two words\n\n[back](../intro.md), [here](#two-words)"),
        ])
    }

    fn problems_of(extra: &str) -> Vec<String> {
        let mut problems = link_problems(&repository(extra), |path| path == Path::new("LICENSE-MIT"));
        problems.extend(unlisted_pages(&repository(extra), Path::new("docs/src/SUMMARY.md")));
        problems
    }

    #[rstest]
    #[case("no links")]
    #[case("[a](crates/core.md) [b](https://example.org/x) [c](mailto:a@example.org) <https://example.org>")]
    #[case("`[code](missing.md)`")]
    #[case("```\n[code](missing.md)\n```")]
    #[case("# A `title`!\n\n[a](#a-title)")]
    #[case("# A\n# A\n\n[second](#a-1)")]
    fn accepts(#[case] extra: &str) {
        assert_eq!(problems_of(extra), Vec::<String>::new());
    }

    #[rstest]
    #[case("\n[a](missing.md)", "docs/src/intro.md:2: `missing.md`")]
    #[case("| a |\n|---|\n| [a](missing.md) |", "intro.md:3")]
    #[case("![a](missing.png)", "missing.png")]
    #[case("[a]\n\n[a]: missing.md", "missing.md")]
    #[case("[a](crates/core.md#three)", "heading")]
    #[case("[a](#nowhere)", "heading")]
    #[case("[a](../../README.md)", "out of the book")]
    #[case("[a](../../../other)", "out of the repository")]
    #[case("[a](/docs/src/intro.md)", "make it relative")]
    #[case("[a]()", "no target")]
    fn refuses_and_says_where(#[case] extra: &str, #[case] part: &str) {
        let problems = problems_of(extra);
        assert_eq!(problems.len(), 1, "{problems:?}");
        assert!(problems[0].contains(part), "{}", problems[0]);
    }

    #[test]
    fn a_page_that_is_not_listed_is_found() {
        let mut pages = repository("");
        pages.insert(PathBuf::from("docs/src/lost.md"), Page::default());
        let problems = unlisted_pages(&pages, Path::new("docs/src/SUMMARY.md"));
        assert_eq!(problems, ["docs/src/lost.md is not listed in docs/src/SUMMARY.md"]);
    }
}
