//! What clippy cannot see: file and line length, heads of files, words that must not be there.

use std::path::{Path, PathBuf};

/// Lines of a file without its tests (style.md, 4).
const MOST_LINES: usize = 1200;

pub(crate) fn check(root: &Path) -> Result<(), String> {
    eprintln!("== tidy");
    let mut wrong = Vec::new();
    for file in files_ending(&root.join("crates"), "rs")? {
        let text = std::fs::read_to_string(&file).map_err(|e| format!("{file:?}: {e}"))?;
        let name = file
            .strip_prefix(root)
            .unwrap_or(&file)
            .display()
            .to_string();
        wrong.extend(faults(&name, &text));
    }
    for file in files_ending(&root.join("docs"), "md")? {
        let text = std::fs::read_to_string(&file).map_err(|e| format!("{file:?}: {e}"))?;
        let name = file.strip_prefix(root).unwrap_or(&file).display();
        wrong.extend(conflicts(&text).map(|line| format!("{name}:{line}: half of a merge")));
    }
    if wrong.is_empty() {
        Ok(())
    } else {
        Err(format!("tidy:\n  {}", wrong.join("\n  ")))
    }
}

fn faults(name: &str, text: &str) -> Vec<String> {
    let mut wrong = Vec::new();
    let is_test = name.contains("/tests/") || name.ends_with("tests.rs");
    if !text.starts_with("//!") {
        wrong.push(format!("{name}: does not start with a //! paragraph"));
    }
    let code = text
        .split("#[cfg(test)]\nmod tests {")
        .next()
        .unwrap_or_default();
    let lines = code.lines().count();
    if lines > MOST_LINES && !is_test {
        wrong.push(format!("{name}: {lines} lines, more than {MOST_LINES}"));
    }
    // Spelled apart, so that this file does not find itself.
    let unfinished = ["TO", "DO"].concat();
    let forgotten = ["FIX", "ME"].concat();
    let debugging = ["dbg", "!("].concat();
    for (number, line) in text.lines().enumerate() {
        for word in [&unfinished, &forgotten, &debugging] {
            if line.contains(word.as_str()) {
                wrong.push(format!("{name}:{}: {word}", number + 1));
            }
        }
        let ignored = ["#[ig", "nore"].concat();
        if line.trim_start().starts_with(&ignored) {
            wrong.push(format!(
                "{name}:{}: an ignored test proves nothing",
                number + 1
            ));
        }
    }
    wrong
}

/// The lines where a merge left its marks.
fn conflicts(text: &str) -> impl Iterator<Item = usize> + '_ {
    let marks = |line: &str| line.starts_with("<<<<<<< ") || line.starts_with(">>>>>>> ");
    let lines = text.lines().enumerate();
    lines.filter_map(move |(number, line)| marks(line).then_some(number + 1))
}

fn files_ending(directory: &Path, end: &str) -> Result<Vec<PathBuf>, String> {
    let mut found = Vec::new();
    let entries = std::fs::read_dir(directory).map_err(|e| format!("{directory:?}: {e}"))?;
    for entry in entries {
        let path = entry.map_err(|e| format!("{directory:?}: {e}"))?.path();
        if path.is_dir() {
            found.extend(files_ending(&path, end)?);
        } else if path.extension().is_some_and(|e| e == end) {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::{conflicts, faults};

    #[test]
    fn a_file_without_a_head_and_with_leftovers_is_found() {
        let leftovers = ["// TO", "DO: later\n"].concat();
        assert_eq!(faults("crates/a/src/b.rs", &leftovers).len(), 2);
        assert!(faults("crates/a/src/b.rs", "//! What it owns.\n").is_empty());
        let long = "//! Head.\n".to_string() + &"x\n".repeat(1300);
        assert_eq!(faults("crates/a/src/b.rs", &long).len(), 1);
    }

    #[test]
    fn the_marks_of_a_merge_are_found_in_documents() {
        let text = "one\n<<<<<<< HEAD\ntwo\n=======\nthree\n>>>>>>> theirs\n";
        assert_eq!(conflicts(text).collect::<Vec<_>>(), [2, 6]);
        assert_eq!(conflicts("Title\n=======\n").count(), 0);
    }
}
