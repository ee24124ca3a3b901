//! In whose words `show` is printed: its text is read by the `drbdadm` that called, and the one of
//! drbd-utils before 9.32 stops at words that it does not know (config-and-cli.md, 20.2).

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::show::Dialect;

/// The dialect of `LOCKSTEP_SHOW_DIALECT` (`9.22` or `current`), else that of the `drbdadm` that
/// called this program. A drbdadm passes no option of ours, so it is asked for its version.
pub(super) fn of_reader() -> Dialect {
    match std::env::var("LOCKSTEP_SHOW_DIALECT").as_deref() {
        Ok("9.22") => return Dialect::V922,
        Ok("current") => return Dialect::Current,
        Ok(_) | Err(_) => {}
    }
    calling_drbdadm()
        .and_then(|program| version_of(&program))
        .map_or(Dialect::Current, of_version)
}

/// The program that called, if it is a drbdadm of others: ours is called `lockstep` as a file.
fn calling_drbdadm() -> Option<PathBuf> {
    let parent = rustix::process::getppid()?;
    let link = format!("/proc/{}/exe", parent.as_raw_nonzero());
    let program = std::fs::read_link(link).ok()?;
    is_drbdadm(&program).then_some(program)
}

fn is_drbdadm(program: &Path) -> bool {
    program.file_name().is_some_and(|name| name == "drbdadm")
}

/// `DRBDADM_VERSION_CODE` of a drbdadm.
fn version_of(program: &Path) -> Option<u32> {
    let output = Command::new(program)
        .arg("--version")
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .output()
        .ok()?;
    version_code(&String::from_utf8_lossy(&output.stdout))
}

fn version_code(text: &str) -> Option<u32> {
    let code = text
        .lines()
        .find_map(|line| line.strip_prefix("DRBDADM_VERSION_CODE=0x"))?;
    u32::from_str_radix(code.trim(), 16).ok()
}

fn of_version(code: u32) -> Dialect {
    if code < FIRST_CURRENT {
        Dialect::V922
    } else {
        Dialect::Current
    }
}

/// 9.32.0 as a version code.
const FIRST_CURRENT: u32 = 9 << 16 | 32 << 8;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_version_of_the_reader_decides() {
        let text = "DRBDADM_API_VERSION=2\nDRBDADM_VERSION_CODE=0x091600\n";
        assert_eq!(version_code(text), Some(0x09_1600));
        assert_eq!(of_version(0x09_1600), Dialect::V922);
        assert_eq!(of_version(0x09_1f00), Dialect::V922);
        assert_eq!(of_version(0x09_2000), Dialect::Current);
        assert_eq!(version_code("something else"), None);
        assert!(is_drbdadm(Path::new("/usr/sbin/drbdadm")));
        assert!(!is_drbdadm(Path::new("/usr/bin/lockstep")));
    }
}
