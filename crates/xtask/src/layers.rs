//! Which crate may use which (docs/architecture.md): the arrows of the design, checked against
//! what cargo says.

use std::path::Path;
use std::process::Command;

use serde_json::Value;

/// Crate and the crates of this workspace that it may use.
const ALLOWED: &[(&str, &[&str])] = &[
    ("lockstep-format", &[]),
    ("lockstep-core", &["lockstep-format"]),
    ("lockstep-io", &["lockstep-format", "lockstep-core"]),
    (
        "lockstep-front",
        &["lockstep-format", "lockstep-core", "lockstep-io"],
    ),
    (
        "lockstep-daemon",
        &[
            "lockstep-format",
            "lockstep-core",
            "lockstep-io",
            "lockstep-front",
        ],
    ),
    ("lockstep-proxy", &["lockstep-format", "lockstep-io"]),
    ("lockstep-sim", &["lockstep-format", "lockstep-core"]),
    (
        "lockstep-bench",
        &[
            "lockstep-format",
            "lockstep-core",
            "lockstep-io",
            "lockstep-front",
            "lockstep-daemon",
        ],
    ),
    (
        "lockstep",
        &[
            "lockstep-format",
            "lockstep-core",
            "lockstep-io",
            "lockstep-front",
            "lockstep-daemon",
            "lockstep-proxy",
            "lockstep-bench",
        ],
    ),
    ("lockstep-e2e", &[]),
    ("xtask", &[]),
];

/// External crates that `format` and `core` may use (style.md, 12).
const CORE_SIDE: &[&str] = &[
    "bitflags",
    "hmac",
    "md-5",
    "sha1",
    "sha2",
    "thiserror",
    "tracing",
    "zerocopy",
];

pub(crate) fn check(root: &Path) -> Result<(), String> {
    eprintln!("== layers");
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--no-deps", "--format-version", "1", "--locked"])
        .current_dir(root)
        .output()
        .map_err(|e| format!("cargo metadata: {e}"))?;
    let metadata: Value =
        serde_json::from_slice(&output.stdout).map_err(|e| format!("cargo metadata: {e}"))?;
    let mut wrong = Vec::new();
    for package in metadata["packages"].as_array().into_iter().flatten() {
        let name = package["name"].as_str().unwrap_or_default();
        let Some((_, allowed)) = ALLOWED.iter().find(|(n, _)| *n == name) else {
            wrong.push(format!("{name}: not in the list of layers"));
            continue;
        };
        for dependency in package["dependencies"].as_array().into_iter().flatten() {
            let uses = dependency["name"].as_str().unwrap_or_default();
            let for_tests = dependency["kind"].as_str() == Some("dev");
            if let Some(text) = refused(name, allowed, uses, for_tests) {
                wrong.push(text);
            }
        }
    }
    wrong.extend(planted_bugs_that_could_ship(&metadata));
    for name in ["format", "core"] {
        let path = root.join(format!("crates/{name}/src/lib.rs"));
        let text = std::fs::read_to_string(&path).map_err(|e| format!("{path:?}: {e}"))?;
        for needed in ["#![no_std]", "#![forbid(unsafe_code)]"] {
            if !text.contains(needed) {
                wrong.push(format!("crates/{name}/src/lib.rs: lacks {needed}"));
            }
        }
    }
    if wrong.is_empty() {
        Ok(())
    } else {
        Err(format!("layers:\n  {}", wrong.join("\n  ")))
    }
}

/// The core's deliberate bugs are for the simulator's own test: only its feature of the same name,
/// which nothing turns on by itself, may ask for them.
fn planted_bugs_that_could_ship(metadata: &Value) -> Vec<String> {
    const BUGS: &str = "planted";
    let mut wrong = Vec::new();
    for package in metadata["packages"].as_array().into_iter().flatten() {
        let name = package["name"].as_str().unwrap_or_default();
        for dependency in package["dependencies"].as_array().into_iter().flatten() {
            let features = dependency["features"].as_array().into_iter().flatten();
            if features.into_iter().any(|f| f.as_str() == Some(BUGS)) {
                let uses = dependency["name"].as_str().unwrap_or_default();
                wrong.push(format!("{name} turns on the deliberate bugs of {uses}"));
            }
        }
        for (feature, implied) in package["features"].as_object().into_iter().flatten() {
            let implies = implied.as_array().into_iter().flatten().any(|f| {
                let f = f.as_str().unwrap_or_default();
                f == BUGS || f.ends_with("/planted")
            });
            if implies && !(name == "lockstep-sim" && feature == BUGS) {
                wrong.push(format!(
                    "feature {feature} of {name} turns on deliberate bugs"
                ));
            }
        }
    }
    wrong
}

fn refused(name: &str, allowed: &[&str], uses: &str, for_tests: bool) -> Option<String> {
    let ours = uses == "lockstep" || uses == "xtask" || uses.starts_with("lockstep-");
    if ours && !allowed.contains(&uses) && !for_tests {
        return Some(format!("{name} must not use {uses}"));
    }
    let core_side = name == "lockstep-format" || name == "lockstep-core";
    if core_side && !ours && !for_tests && !CORE_SIDE.contains(&uses) {
        return Some(format!("{name} must not use the external crate {uses}"));
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_arrow_against_the_layers_is_refused() {
        assert!(refused("lockstep-core", &["lockstep-format"], "lockstep-io", false).is_some());
        assert!(refused("lockstep-core", &["lockstep-format"], "libc", false).is_some());
        assert!(
            refused(
                "lockstep-core",
                &["lockstep-format"],
                "lockstep-format",
                false
            )
            .is_none()
        );
        assert!(refused("lockstep-io", &["lockstep-core"], "libc", false).is_none());
    }

    #[test]
    fn deliberate_bugs_are_only_for_the_simulators_own_feature() {
        let package = |name: &str, features: Value, asks: Value| {
            serde_json::json!({ "packages": [{
                "name": name,
                "features": features,
                "dependencies": [{ "name": "lockstep-core", "features": asks }],
            }]})
        };
        let own = serde_json::json!({ "planted": ["lockstep-core/planted"] });
        let none = serde_json::json!([]);
        let ok = package("lockstep-sim", own.clone(), none.clone());
        assert_eq!(planted_bugs_that_could_ship(&ok), Vec::<String>::new());
        let ships = package("lockstep-daemon", own, none.clone());
        assert_eq!(planted_bugs_that_could_ship(&ships).len(), 1);
        let default = serde_json::json!({ "default": ["planted"] });
        let on = package("lockstep-sim", default, none);
        assert_eq!(planted_bugs_that_could_ship(&on).len(), 1);
        let asks = package(
            "lockstep",
            serde_json::json!({}),
            serde_json::json!(["planted"]),
        );
        assert_eq!(planted_bugs_that_could_ship(&asks).len(), 1);
    }

    #[test]
    fn the_workspace_keeps_its_layers() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"))
            .ancestors()
            .nth(2)
            .unwrap();
        assert_eq!(check(root), Ok(()));
    }
}
