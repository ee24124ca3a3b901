//! A program whose lines are read while it runs.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use lockstep_e2e::PATIENCE;

/// A program whose lines are read while it runs; it is killed at the end at the latest.
pub(crate) struct Lines {
    child: Child,
    lines: Receiver<String>,
    /// Every line so far.
    pub(crate) seen: Vec<String>,
}

impl Lines {
    /// Starts it.
    pub(crate) fn start(mut command: Command) -> Result<Lines> {
        // It must not outlive the test that reads it.
        command.process_group(0);
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let out = child.stdout.take().context("standard output")?;
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(out).lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    return;
                }
            }
        });
        Ok(Lines {
            child,
            lines,
            seen: Vec::new(),
        })
    }

    /// Writes to its standard input.
    pub(crate) fn say(&mut self, text: &str) -> Result<()> {
        let input = self.child.stdin.as_mut().context("standard input")?;
        input.write_all(text.as_bytes())?;
        Ok(input.flush()?)
    }

    /// Reads on to the first line that fits, and gives it.
    pub(crate) fn until(&mut self, what: &str, fits: impl Fn(&str) -> bool) -> Result<String> {
        let end = Instant::now() + PATIENCE;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            match self.lines.recv_timeout(left) {
                Ok(line) => {
                    self.seen.push(line.clone());
                    if fits(&line) {
                        return Ok(line);
                    }
                }
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {
                    bail!("no line: {what}; seen:\n{}", self.seen.join("\n"));
                }
            }
        }
    }

    /// Closes its standard input and waits for its end.
    pub(crate) fn end(mut self) -> Result<Option<i32>> {
        drop(self.child.stdin.take());
        let begin = Instant::now();
        while begin.elapsed() < PATIENCE {
            if let Some(status) = self.child.try_wait()? {
                return Ok(status.code());
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        bail!("it does not end; seen:\n{}", self.seen.join("\n"))
    }
}

impl Drop for Lines {
    fn drop(&mut self) {
        // It has ended, or ends now.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
