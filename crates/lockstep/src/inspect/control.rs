//! `lockstep inspect control`: runs a tool and shows what it says to the daemon and hears from it.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::Arc;
use std::time::Instant;

use lockstep_daemon::place::{CONTROL_VARIABLE, Place};
use serde_json::Value;

/// How much of a line is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Length {
    Short,
    Full,
}

/// Longest line that is shown unless all of it is wanted, in bytes.
const SHORT_BYTES: usize = 300;

/// Runs `lockstep inspect control ARGS`.
pub(super) fn run(args: &[String]) -> ExitCode {
    let (length, words) = match args.split_first() {
        Some((word, rest)) if word == "--full" => (Length::Full, rest),
        _ => (Length::Short, args),
    };
    let Some((program, args)) = words.split_first() else {
        return super::usage_error("lockstep inspect control: say which command to run");
    };
    if program.starts_with('-') {
        return super::usage_error(&format!(
            "lockstep inspect control: unknown option '{program}'"
        ));
    }
    match watch(&Place::find(None), length, program, args) {
        Ok(code) => ExitCode::from(code),
        Err(problem) => {
            eprintln!("lockstep inspect control: {problem}");
            ExitCode::FAILURE
        }
    }
}

/// Removes itself at the end.
struct Directory(PathBuf);

impl Drop for Directory {
    fn drop(&mut self) {
        // What cannot be removed is an empty directory below the temporary ones.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn watch(place: &Place, length: Length, program: &str, args: &[String]) -> Result<u8, String> {
    let real = place.control_socket();
    if let Err(error) = UnixStream::connect(&real) {
        return Err(format!("no daemon answers at {}: {error}", real.display()));
    }
    let name = format!("lockstep-inspect-{}", std::process::id());
    let dir = Directory(std::env::temp_dir().join(name));
    let told = |error: std::io::Error| format!("{}: {error}", dir.0.display());
    std::fs::DirBuilder::new()
        .mode(0o700)
        .create(&dir.0)
        .map_err(told)?;
    let socket = dir.0.join("control.sock");
    let listener = UnixListener::bind(&socket).map_err(told)?;
    std::thread::spawn(move || accept(&listener, &real, length));
    let status = Command::new(program)
        .args(args)
        .env(CONTROL_VARIABLE, &socket)
        .status()
        .map_err(|error| format!("{program}: {error}"))?;
    Ok(status
        .code()
        .and_then(|code| u8::try_from(code).ok())
        .unwrap_or(u8::MAX))
}

fn accept(listener: &UnixListener, real: &Path, length: Length) {
    let begun = Instant::now();
    for (index, client) in listener.incoming().flatten().enumerate() {
        let shown = move |arrow: &str, line: &[u8]| {
            let seconds = begun.elapsed().as_secs_f64();
            eprintln!(
                "{seconds:10.6} #{} {arrow} {}",
                index + 1,
                text(line, length)
            );
        };
        let shown = Arc::new(shown);
        let both = UnixStream::connect(real)
            .and_then(|daemon| Ok((daemon.try_clone()?, client.try_clone()?, daemon)));
        let (daemon_out, client_out, daemon) = match both {
            Ok(both) => both,
            Err(error) => {
                eprintln!("lockstep inspect control: {}: {error}", real.display());
                continue;
            }
        };
        let to_daemon = shown.clone();
        std::thread::spawn(move || pass(client, daemon_out, |line| to_daemon("->", line)));
        std::thread::spawn(move || pass(daemon, client_out, |line| shown("<-", line)));
    }
}

/// Passes lines on until one side hangs up. A line is shown before it is passed on, so that what
/// is seen is in order.
fn pass(from: UnixStream, mut to: UnixStream, show: impl Fn(&[u8])) {
    let mut from = BufReader::new(from);
    let mut line = Vec::new();
    while from.read_until(b'\n', &mut line).is_ok_and(|len| len > 0) {
        show(&line);
        if to.write_all(&line).is_err() {
            break;
        }
        line.clear();
    }
    // The other side learns the end, if it is still there.
    let _ = to.shutdown(std::net::Shutdown::Write);
}

/// A line as it is shown, without secrets.
fn text(line: &[u8], length: Length) -> String {
    let mut text = match serde_json::from_slice::<Value>(line) {
        Ok(mut value) => {
            hide(&mut value);
            value.to_string()
        }
        Err(_) => format!("{} bytes that are not JSON", line.len()),
    };
    if length == Length::Short && text.len() > SHORT_BYTES {
        let all = text.len();
        let mut at = SHORT_BYTES;
        while !text.is_char_boundary(at) {
            at -= 1;
        }
        text.truncate(at);
        text.push_str(&format!("... ({all} bytes)"));
    }
    text
}

fn hide(value: &mut Value) {
    match value {
        Value::Object(members) => {
            for (key, value) in members {
                if key == "shared-secret" {
                    *value = Value::from("(hidden)");
                } else {
                    hide(value);
                }
            }
        }
        Value::Array(values) => values.iter_mut().for_each(hide),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_are_not_shown_and_long_lines_are_cut() {
        let line = br#"{"do":"new-peer","options":{"shared-secret":"s3cret","_name":"bravo"}}"#;
        let shown = text(line, Length::Full);
        assert!(
            !shown.contains("s3cret") && shown.contains("bravo"),
            "{shown}"
        );
        let long = format!("{{\"text\":\"{}\"}}", "\u{e4}".repeat(500));
        let shown = text(long.as_bytes(), Length::Short);
        assert!(shown.ends_with("... (1011 bytes)"), "{shown}");
        assert_eq!(text(b"hello\n", Length::Short), "6 bytes that are not JSON");
    }
}
