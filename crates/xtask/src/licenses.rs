//! The licences of everything that is linked in: only those that style.md, 12 allows.

use std::path::Path;
use std::process::Command;

use serde_json::Value;

/// SPDX names that a dependency may offer.
const ALLOWED: &[&str] = &[
    "MIT",
    "Apache-2.0",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "ISC",
    "Zlib",
    "0BSD",
    "Unlicense",
    "Unicode-3.0",
    "CC0-1.0",
    "MIT-0",
    "Apache-2.0 WITH LLVM-exception",
    "OpenSSL",
];

pub(crate) fn check(root: &Path) -> Result<(), String> {
    eprintln!("== licenses");
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--format-version", "1", "--locked"])
        .current_dir(root)
        .output()
        .map_err(|e| format!("cargo metadata: {e}"))?;
    if !output.status.success() {
        return Err(format!(
            "cargo metadata: {}",
            String::from_utf8_lossy(&output.stderr)
        ));
    }
    let metadata: Value =
        serde_json::from_slice(&output.stdout).map_err(|e| format!("cargo metadata: {e}"))?;
    let mut wrong = Vec::new();
    for package in metadata["packages"].as_array().into_iter().flatten() {
        let name = package["name"].as_str().unwrap_or_default();
        let license = package["license"].as_str().unwrap_or_default();
        if !acceptable(license) {
            wrong.push(format!("{name}: licence {license:?}"));
        }
    }
    if wrong.is_empty() {
        Ok(())
    } else {
        Err(format!("licenses:\n  {}", wrong.join("\n  ")))
    }
}

/// Every part joined by AND has an alternative joined by OR that is allowed.
fn acceptable(license: &str) -> bool {
    let plain = license.replace(['(', ')'], " ").replace('/', " OR ");
    !plain.trim().is_empty()
        && plain.split(" AND ").all(|part| {
            part.split(" OR ")
                .any(|name| ALLOWED.contains(&name.trim()))
        })
}

#[cfg(test)]
mod tests {
    use super::acceptable;

    #[test]
    fn one_good_alternative_is_enough_but_every_part_needs_one() {
        assert!(acceptable("MIT OR GPL-2.0"));
        assert!(acceptable("MIT/Apache-2.0"));
        assert!(acceptable("(MIT OR Apache-2.0) AND Unicode-3.0"));
        assert!(!acceptable("GPL-3.0"));
        assert!(!acceptable("MIT AND GPL-2.0"));
        assert!(!acceptable(""));
    }
}
