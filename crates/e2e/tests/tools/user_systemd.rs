//! An instance of systemd for a user, with a `/run` of its own in a mount namespace of its own:
//! units of the package run under a real manager without the machine's systemd or its bus.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Result, ensure};
use lockstep_e2e::machine_has;

use crate::nodes::binary;

/// Starts the instance, and ends it however the story went. `told NAME COMMAND` prints a line for
/// the test to compare; 77 says that no instance can run here.
const PRELUDE: &str = r#"
set -u
mount -t tmpfs none /run
mkdir -p /run/systemd/system /run/user
export XDG_RUNTIME_DIR=/run/user SYSTEMD_UNIT_PATH=$HERE/units:/usr/lib/systemd/user
/lib/systemd/systemd --user >"$HERE/log" 2>&1 &
instance=$!
trap 'systemctl --user exit; wait $instance; cat "$HERE/log" >&2' EXIT
tries=0
until systemctl --user is-system-running >/dev/null 2>&1; do
    tries=$((tries + 1))
    [ $tries -lt 100 ] || exit 77
    kill -0 $instance || exit 77
    sleep 0.1
done
told() { echo "$1: $(eval "$2" 2>&1)"; }
"#;

/// Directories of one instance; they go with it.
pub(crate) struct Instance {
    dir: tempfile::TempDir,
}

impl Instance {
    /// `bin` with these names of our binary, and an empty `units`; `None`, and the reason is
    /// printed, where the machine cannot run one.
    pub(crate) fn prepare(names: &[&str]) -> Result<Option<Instance>> {
        let can_run = machine_has("root", rustix::process::geteuid().is_root())
            && Path::new("/usr/bin/unshare").exists()
            && Path::new("/lib/systemd/systemd").exists();
        if !can_run {
            eprintln!("skipped: this machine lacks systemd or unshare");
            return Ok(None);
        }
        let dir = tempfile::Builder::new()
            .prefix("lockstep-units-")
            .tempdir()?;
        let instance = Instance { dir };
        for part in ["bin", "units"] {
            fs::create_dir(instance.path(part))?;
        }
        for name in names {
            std::os::unix::fs::symlink(binary()?, instance.path("bin").join(name))?;
        }
        Ok(Some(instance))
    }

    /// A file or directory of the instance; the story knows it as `$HERE/name`.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Where everything is.
    pub(crate) fn root(&self) -> String {
        self.dir.path().display().to_string()
    }

    /// Writes a program.
    pub(crate) fn place_program(&self, name: &str, text: &str) -> Result<()> {
        let path = self.path(name);
        fs::write(&path, text)?;
        let made = Command::new("chmod").arg("755").arg(path).status()?;
        ensure!(made.success(), "chmod");
        Ok(())
    }

    /// Runs the story as a node's and compares what it told.
    pub(crate) fn tells(&self, node: &str, story: &str, wanted: &str) -> Result<()> {
        let story = format!("{PRELUDE}{story}");
        let output = Command::new("timeout")
            .args(["90", "unshare", "--mount", "bash", "-c", &story])
            .env("HERE", self.dir.path())
            .env("__DRBD_NODE__", node)
            .env_remove("LOCKSTEP_DIR")
            .stdin(Stdio::null())
            .output()?;
        let log = String::from_utf8_lossy(&output.stderr);
        if output.status.code() == Some(77) {
            eprintln!("skipped: no user instance of systemd can run here:\n{log}");
            return Ok(());
        }
        let told = String::from_utf8_lossy(&output.stdout);
        ensure!(told == wanted, "{told}\n--- log:\n{log}");
        Ok(())
    }
}
