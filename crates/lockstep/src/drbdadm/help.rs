//! Usage and version texts.

use super::commands::{COMMANDS, Command, Shown, Takes};

/// Usage of the program, or of one command.
pub(super) fn usage(command: Option<&Command>) -> String {
    let name = command.map_or("COMMAND", |command| command.name);
    let mut text = format!("\nUSAGE: drbdadm {name} [OPTION...] {{all|RESOURCE...}}\n\n");
    text.push_str(GENERAL);
    match command {
        None => {
            text.push_str("\nCOMMANDS:\n");
            text.push_str(&columns(Shown::Usage));
        }
        Some(command) => {
            let options = command.options();
            if !options.is_empty() {
                text.push_str(&format!("\nOPTIONS FOR {name}:\n"));
            }
            for (option, takes) in options {
                text.push_str(&match takes {
                    Takes::Value => format!("  --{option}=...\n"),
                    Takes::MaybeValue => format!("  --{option}[=...]\n"),
                });
            }
        }
    }
    text.push_str(&format!(
        "\nVersion: {UTILS_VERSION} (api:2)\n{BUILD_TAG}\n\n"
    ));
    text
}

/// The lists of commands for scripts, handlers and experts.
pub(super) fn hidden_commands() -> String {
    let parts = [
        (
            "These additional commands are for shell scripts around drbdadm:",
            Shown::Scripts,
        ),
        (
            "These commands are called when something happens to a resource:",
            Shown::Handlers,
        ),
        (
            "These commands are for experts and developers:",
            Shown::Experts,
        ),
    ];
    let mut text = String::new();
    for (head, shown) in parts {
        text.push_str(&format!("\n{head}\n\n{}", columns(shown)));
    }
    text.push('\n');
    text
}

/// The lines of `--version`, for `eval` in a shell.
pub(super) fn version(module_version: Option<[u32; 3]>) -> String {
    let [major, minor, patch] = module_version.unwrap_or_default();
    let kernel = match module_version {
        Some(_) => format!("{major}.{minor}.{patch}"),
        None => "0".to_owned(),
    };
    format!(
        "DRBDADM_BUILDTAG={}\n\
         DRBDADM_API_VERSION=2\n\
         DRBD_KERNEL_VERSION_CODE=0x{major:02x}{minor:02x}{patch:02x}\n\
         DRBD_KERNEL_VERSION={kernel}\n\
         DRBDADM_VERSION_CODE=0x092200\n\
         DRBDADM_VERSION={UTILS_VERSION}\n",
        super::calls::shell_escaped(BUILD_TAG)
    )
}

/// Names of a group in two columns, sorted downwards.
fn columns(shown: Shown) -> String {
    let mut names: Vec<&str> = COMMANDS
        .iter()
        .filter(|command| command.shown == shown)
        .map(|command| command.name)
        .collect();
    names.sort_unstable();
    let rows = names.len().div_ceil(2);
    let mut text = String::new();
    for row in 0..rows {
        text.push_str(&format!(" {:35}", names[row]));
        if let Some(second) = names.get(row + rows) {
            text.push_str(&format!(" {second:35}"));
        }
        text.push('\n');
    }
    text
}

const GENERAL: &str = "\
GENERAL OPTIONS:
  --stacked, -S
  --dry-run, -d
  --verbose, -v
  --config-file=..., -c ...
  --config-to-test=..., -t ...
  --config-to-exclude=..., -E ...
  --drbdsetup=..., -s ...
  --drbdmeta=..., -m ...
  --drbd-proxy-ctl=..., -p ...
  --sh-varname=..., -n ...
  --version, -V
  --setup-option=..., -W ...
  --dir=..., -D ...
  --help, -h
";
/// Version of the interface that these tools offer.
const UTILS_VERSION: &str = "9.34.0";
/// Where other builds name their commit.
const BUILD_TAG: &str = concat!("Lockstep ", env!("CARGO_PKG_VERSION"));
