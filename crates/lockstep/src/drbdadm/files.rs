//! Files for the parser: wildcards of `include`, reading, the default configuration.

use std::fs;
use std::path::{Path, PathBuf};

use lockstep_format::conf::parse::{FileError, FileText, Files};

/// The file system.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Disk;

impl Files for Disk {
    fn expand(&mut self, including: &str, pattern: &str) -> Vec<String> {
        let directory = Path::new(including).parent().unwrap_or(Path::new("/"));
        if !pattern.contains(['*', '?', '[']) {
            return vec![directory.join(pattern).to_string_lossy().into_owned()];
        }
        let (root, relative) = match pattern.strip_prefix('/') {
            Some(relative) => (PathBuf::from("/"), relative),
            None => (directory.to_owned(), pattern),
        };
        let mut found = vec![root];
        for part in relative.split('/').filter(|part| !part.is_empty()) {
            found = found.iter().flat_map(|base| step(base, part)).collect();
        }
        let mut found: Vec<String> = found
            .iter()
            .map(|path| path.to_string_lossy().into_owned())
            .collect();
        found.sort();
        found
    }

    fn read(&mut self, path: &str) -> Result<FileText, FileError> {
        let unreadable = |error: std::io::Error| match error.kind() {
            std::io::ErrorKind::NotFound => FileError::Missing,
            _ => FileError::Unreadable(error.to_string()),
        };
        let real = fs::canonicalize(path).map_err(unreadable)?;
        let bytes = fs::read(&real).map_err(unreadable)?;
        let text = String::from_utf8(bytes)
            .map_err(|_| FileError::Unreadable("it is not UTF-8 text".to_owned()))?;
        Ok(FileText {
            path: real.to_string_lossy().into_owned(),
            text,
        })
    }
}

/// One part of a pattern below one directory.
fn step(base: &Path, part: &str) -> Vec<PathBuf> {
    if !part.contains(['*', '?', '[']) {
        let path = base.join(part);
        return if path.exists() {
            vec![path]
        } else {
            Vec::new()
        };
    }
    let Ok(entries) = fs::read_dir(base) else {
        return Vec::new();
    };
    entries
        .filter_map(Result::ok)
        .filter_map(|entry| entry.file_name().into_string().ok())
        // A leading dot must be written out.
        .filter(|name| !name.starts_with('.') || part.starts_with('.'))
        .filter(|name| matches(part, name))
        .map(|name| base.join(name))
        .collect()
}

/// Whether a name matches a pattern of `*`, `?` and `[...]`.
fn matches(pattern: &str, name: &str) -> bool {
    let pattern: Vec<char> = pattern.chars().collect();
    let name: Vec<char> = name.chars().collect();
    // Where to go on when the last star has to take one more character.
    let mut retry: Option<(usize, usize)> = None;
    let (mut at, mut pos) = (0, 0);
    while pos < name.len() {
        if pattern.get(at) == Some(&'*') {
            retry = Some((at + 1, pos + 1));
            at += 1;
            continue;
        }
        let taken = match pattern.get(at) {
            Some('?') => Some(1),
            Some('[') => set(&pattern[at..], name[pos]),
            Some(c) => (*c == name[pos]).then_some(1),
            None => None,
        };
        match (taken, retry) {
            (Some(len), _) => {
                at += len;
                pos += 1;
            }
            (None, Some((after_star, next))) => {
                (at, pos) = (after_star, next);
                retry = Some((after_star, next + 1));
            }
            (None, None) => return false,
        }
    }
    pattern[at..].iter().all(|c| *c == '*')
}

/// Length of a `[...]` when `c` is in it. Without a closing bracket it is a plain character.
fn set(pattern: &[char], c: char) -> Option<usize> {
    let negated = matches!(pattern.get(1), Some('!' | '^'));
    let first = if negated { 2 } else { 1 };
    let Some(len) = pattern.iter().skip(first + 1).position(|c| *c == ']') else {
        return (c == '[').then_some(1);
    };
    let members = &pattern[first..first + 1 + len];
    let mut found = false;
    let mut index = 0;
    while index < members.len() {
        if members.get(index + 1) == Some(&'-') && index + 2 < members.len() {
            found |= (members[index]..=members[index + 2]).contains(&c);
            index += 3;
        } else {
            found |= members[index] == c;
            index += 1;
        }
    }
    (found != negated).then_some(first + 1 + len + 1)
}

/// Directory of the machine's own node, whose configuration lies below `/etc`.
const DEFAULT_DIR: &str = "/run/lockstep";

/// The configuration that is used when none is named.
pub(super) fn default_config(directory: Option<&Path>) -> PathBuf {
    if let Some(directory) = directory.filter(|directory| *directory != Path::new(DEFAULT_DIR)) {
        return directory.join("drbd.conf");
    }
    let names = [
        "drbd-90", "drbd-84", "drbd-83", "drbd-82", "drbd-08", "drbd",
    ];
    let mut paths = names
        .iter()
        .map(|name| PathBuf::from(format!("/etc/{name}.conf")));
    paths
        .find(|path| path.exists())
        .unwrap_or_else(|| PathBuf::from("/etc/drbd.conf"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_match_as_in_a_shell() {
        for (pattern, name, wanted) in [
            ("*.res", "a.res", true),
            ("*.res", "a.res.bak", false),
            ("a?c", "abc", true),
            ("a?c", "ac", false),
            ("[a-c]x", "bx", true),
            ("[!a-c]x", "bx", false),
            ("[]x]", "]", true),
            ("[x", "[x", true),
            ("*a*b*", "xxaxxbxx", true),
            ("*a*b", "xxaxxbxx", false),
            ("**", "", true),
        ] {
            assert_eq!(matches(pattern, name), wanted, "{pattern} {name}");
        }
    }

    #[test]
    fn includes_are_relative_sorted_and_skip_hidden_files() {
        let dir = tempfile::tempdir().unwrap();
        let sub = dir.path().join("d");
        fs::create_dir(&sub).unwrap();
        for name in ["b.res", "a.res", ".c.res", "d.txt"] {
            fs::write(sub.join(name), "").unwrap();
        }
        let main = dir.path().join("drbd.conf").to_string_lossy().into_owned();
        let found = Disk.expand(&main, "d/*.res");
        let names: Vec<_> = found
            .iter()
            .filter_map(|path| path.strip_prefix(&main[..main.len() - 9]))
            .collect();
        assert_eq!(names, ["d/a.res", "d/b.res"]);
        assert_eq!(Disk.expand(&main, "x.conf").len(), 1);
    }
}
