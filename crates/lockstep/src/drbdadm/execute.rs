//! Prints or runs calls.

use std::io::Write;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use super::calls::{Call, Program};
use super::commands::TimeClass;
use crate::drbdmeta::PLAIN_FILES_VARIABLE;

/// Where the helper programs are and how calls are made.
#[derive(Clone, Debug)]
pub(super) struct Executor {
    pub(super) dry_run: bool,
    /// Calls are printed before they are run.
    pub(super) verbose: bool,
    /// Name of a shell variable that is set before each printed call.
    pub(super) sh_varname: Option<String>,
    pub(super) drbdsetup: Helper,
    pub(super) drbdmeta: Helper,
    pub(super) proxy_ctl: Helper,
    /// Directory of the node, handed on to helpers.
    pub(super) directory: Option<PathBuf>,
    pub(super) limits: TimeLimits,
}

/// A program to run.
#[derive(Clone, Debug)]
pub(super) struct Helper {
    pub(super) path: PathBuf,
    /// Its name for itself, by which one binary with several names knows what to be.
    pub(super) name: &'static str,
    /// It is the program that runs now.
    pub(super) is_self: bool,
}

/// Longest times of calls.
#[derive(Clone, Copy, Debug)]
pub(super) struct TimeLimits {
    pub(super) short: Option<Duration>,
    pub(super) medium: Option<Duration>,
    pub(super) long: Option<Duration>,
}

/// What becomes of the error output of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ErrorOutput {
    Shown,
    /// Discarded.
    Hidden,
    /// Discarded unless the call exits with this code.
    OnlyFor(u8),
}

/// What a call with captured output gave.
#[derive(Clone, Debug)]
pub(super) struct Captured {
    pub(super) code: u8,
    pub(super) stdout: String,
}

impl Executor {
    /// Runs or prints a call; 0 when only printed.
    pub(super) fn run(
        &self,
        call: &Call,
        class: TimeClass,
        errors: ErrorOutput,
        resource: &str,
        out: &mut dyn Write,
        err: &mut dyn Write,
    ) -> u8 {
        if self.dry_run || self.verbose {
            if let Some(variable) = &self.sh_varname {
                let _ = writeln!(out, "{variable}={}", super::calls::shell_escaped(resource));
            }
            let _ = writeln!(out, "{call}");
        }
        if self.dry_run {
            return 0;
        }
        // The child writes to the same place; what we have printed comes first.
        let _ = out.flush();
        let is_self = match call.program {
            Program::Setup => self.drbdsetup.is_self,
            Program::Meta => self.drbdmeta.is_self,
            Program::ProxyCtl | Program::Shell => false,
        };
        if is_self && errors == ErrorOutput::Shown && is_quick(call) {
            return self.run_within(call, class, err);
        }
        let mut command = self.command(call);
        command.stderr(match errors {
            ErrorOutput::Shown => Stdio::inherit(),
            ErrorOutput::Hidden => Stdio::null(),
            ErrorOutput::OnlyFor(_) => Stdio::piped(),
        });
        let child = match command.spawn() {
            Ok(child) => child,
            Err(error) => {
                let name = command.get_program().to_string_lossy().into_owned();
                let _ = writeln!(err, "Can not exec {name}: {error}");
                return EXIT_EXEC;
            }
        };
        self.finish(child, call, class, errors, err)
    }

    /// Without a process of its own. A node with hundreds of resources makes thousands of calls
    /// when it comes up, and each process would take longer than the call; and where a daemon was
    /// killed, the users of its devices wait for them.
    fn run_within(&self, call: &Call, class: TimeClass, err: &mut dyn Write) -> u8 {
        let (sender, receiver) = channel();
        let (directory, words) = (self.directory.clone(), call.words.clone());
        let tool = match call.program {
            Program::Meta => crate::drbdmeta::run_within,
            Program::Setup | Program::ProxyCtl | Program::Shell => crate::drbdsetup::run_within,
        };
        // A thread of its own, which is left behind if the daemon does not answer in time.
        std::thread::spawn(move || {
            let code = tool(directory.as_deref(), &words);
            // Nobody waits any more after the limit.
            let _ = sender.send(code);
        });
        let answer = match self.limit(class) {
            Some(limit) => receiver.recv_timeout(limit),
            None => receiver.recv().map_err(RecvTimeoutError::from),
        };
        let code = match answer {
            Ok(code) => code,
            Err(RecvTimeoutError::Timeout) => {
                let limit = self.limit(class).unwrap_or_default().as_secs();
                let _ = writeln!(
                    err,
                    "Command '{call}' did not terminate within {limit} seconds"
                );
                return EXIT_EXEC;
            }
            Err(RecvTimeoutError::Disconnected) => EXIT_EXEC,
        };
        if code >= LEAST_REPORTED {
            let _ = writeln!(err, "Command '{call}' terminated with exit code {code}");
        }
        code
    }

    fn finish(
        &self,
        mut child: Child,
        call: &Call,
        class: TimeClass,
        errors: ErrorOutput,
        err: &mut dyn Write,
    ) -> u8 {
        // A reader of its own, so that a helper with much to say is not held up by a full pipe.
        let reader = child.stderr.take().map(|mut pipe| {
            std::thread::spawn(move || {
                let mut text = Vec::new();
                let _ = std::io::Read::read_to_end(&mut pipe, &mut text);
                text
            })
        });
        let status = match wait(&mut child, self.limit(class)) {
            Ok(Some(status)) => status,
            Ok(None) => {
                let _ = child.kill();
                let _ = child.wait();
                let limit = self.limit(class).unwrap_or_default().as_secs();
                let _ = writeln!(
                    err,
                    "Command '{call}' did not terminate within {limit} seconds"
                );
                return EXIT_EXEC;
            }
            Err(error) => {
                let _ = writeln!(err, "Waiting for '{call}': {error}");
                return EXIT_EXEC;
            }
        };
        let code = exit_code(status);
        let said = reader
            .and_then(|reader| reader.join().ok())
            .unwrap_or_default();
        if errors == ErrorOutput::OnlyFor(code) {
            let _ = err.write_all(&said);
        }
        if code >= LEAST_REPORTED && errors == ErrorOutput::Shown {
            let _ = writeln!(err, "Command '{call}' terminated with exit code {code}");
        }
        code
    }

    /// Runs a query even in a dry run and returns what it printed; error output is discarded.
    pub(super) fn capture(&self, call: &Call) -> Result<Captured, String> {
        let mut command = self.command(call);
        let output = command
            .stdin(Stdio::null())
            .stderr(Stdio::null())
            .output()
            .map_err(|error| {
                format!(
                    "Can not exec {}: {error}",
                    command.get_program().to_string_lossy()
                )
            })?;
        let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
        Ok(Captured {
            code: exit_code(output.status),
            stdout,
        })
    }

    /// The process of a call.
    pub(super) fn command(&self, call: &Call) -> Command {
        let helper = match call.program {
            Program::Setup => &self.drbdsetup,
            Program::Meta => &self.drbdmeta,
            Program::ProxyCtl => &self.proxy_ctl,
            Program::Shell => {
                let mut command = Command::new(Program::Shell.name());
                command.args(&call.words);
                return command;
            }
        };
        let mut command = Command::new(&helper.path);
        if call.program == Program::Meta {
            // A disk that the configuration names may be a file. `--force` would allow that too,
            // but would also answer every question with yes.
            command.env(PLAIN_FILES_VARIABLE, "1");
        }
        command.arg0(helper.name).args(&call.words);
        if let Some(directory) = &self.directory {
            command.env("LOCKSTEP_DIR", directory);
        }
        command
    }

    fn limit(&self, class: TimeClass) -> Option<Duration> {
        match class {
            TimeClass::Short => self.limits.short,
            TimeClass::Medium => self.limits.medium,
            TimeClass::Long => self.limits.long,
            TimeClass::Unlimited => None,
        }
    }
}

/// The calls of which `up` has several for each resource.
fn is_quick(call: &Call) -> bool {
    let word = |index: usize| call.words.get(index).map_or("", String::as_str);
    match call.program {
        Program::Setup => matches!(
            word(0),
            "new-resource"
                | "new-minor"
                | "new-peer"
                | "new-path"
                | "peer-device-options"
                | "attach"
                | "connect"
        ),
        // Minor, format, device and index come first.
        Program::Meta => matches!(word(4), "repair-md" | "apply-al"),
        Program::ProxyCtl | Program::Shell => false,
    }
}

/// Waits for the end of a child; none when the time is over first.
fn wait(child: &mut Child, limit: Option<Duration>) -> std::io::Result<Option<ExitStatus>> {
    let Some(limit) = limit else {
        return child.wait().map(Some);
    };
    let deadline = Instant::now() + limit;
    let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
    let Some(pid) = pid else {
        return child.wait().map(Some);
    };
    let handle = pidfd_open(pid, PidfdFlags::empty())?;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(None);
        }
        let timeout = rustix::event::Timespec {
            tv_sec: left.as_secs().try_into().unwrap_or(i64::MAX),
            tv_nsec: left.subsec_nanos().into(),
        };
        match poll(&mut [PollFd::new(&handle, PollFlags::IN)], Some(&timeout)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// The exit code; a child that was killed counts as a failure to run it.
fn exit_code(status: ExitStatus) -> u8 {
    match (status.code(), status.signal()) {
        (Some(code), _) => u8::try_from(code & 0xff).unwrap_or(EXIT_EXEC),
        (None, _) => EXIT_EXEC,
    }
}

/// A helper could not be run or did not end in time.
pub(super) const EXIT_EXEC: u8 = 20;
/// Smallest exit code of a helper that is worth a line.
const LEAST_REPORTED: u8 = 10;
