//! `lockstep proxy top`: the state of all connections in the terminal, with a short history.

use std::collections::{BTreeMap, VecDeque};
use std::fmt::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use lockstep_proxy::{Request, request};
use serde_json::Value;

use super::{default_socket, options};

/// Points of the history graph.
const HISTORY: usize = 60;
const BARS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

/// The last values of one connection.
#[derive(Default)]
struct History {
    fill: VecDeque<f64>,
    drain: VecDeque<f64>,
    ratio: VecDeque<f64>,
    lag: VecDeque<f64>,
}

/// Shows the state until interrupted, or once.
pub(super) fn run(args: &[String]) -> ExitCode {
    match watch(args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("lockstep proxy top: {error}");
            ExitCode::FAILURE
        }
    }
}

fn watch(args: &[String]) -> Result<(), String> {
    let (mut socket, mut every, mut once): (PathBuf, f64, bool) = (default_socket(), 1.0, false);
    for (name, value) in options(args, &["once"])? {
        match name.as_str() {
            "socket" => socket = value.into(),
            "interval" => {
                every = value
                    .parse()
                    .ok()
                    .filter(|seconds| (0.1..=3600.0).contains(seconds))
                    .ok_or("--interval is 0.1 to 3600 seconds")?;
            }
            "once" => once = true,
            _ => {
                return Err(format!(
                    "unknown option --{name}; known: socket, interval, once"
                ));
            }
        }
    }
    let wanted = Request {
        commands: vec!["show connections".into()],
        json: true,
        ..Request::default()
    };
    let mut histories = BTreeMap::new();
    loop {
        let answer = request(&socket, &wanted)?.pop().ok_or("no answer")?;
        let state: Value =
            serde_json::from_str(&answer.text).map_err(|error| format!("answer: {error}"))?;
        let page = draw(&state, &mut histories);
        if once {
            print!("{page}");
            return Ok(());
        }
        // Home, page, clear the rest.
        let page = match rustix::termios::tcgetwinsize(std::io::stdout()) {
            Ok(size) => fit(&page, size.ws_col.into(), size.ws_row.into()),
            Err(_) => page,
        };
        print!("\x1b[H\x1b[2J{page}");
        let _ = std::io::Write::flush(&mut std::io::stdout());
        std::thread::sleep(Duration::from_secs_f64(every));
    }
}

fn draw(state: &Value, histories: &mut BTreeMap<String, History>) -> String {
    let number = |value: &Value, key: &str| value[key].as_f64().unwrap_or(0.0);
    let mib = |bytes: f64| bytes / 1048576.0;
    let mut out = format!(
        "Lockstep proxy {}   memory {:.1} of {:.0} MiB   spill {:.1} MiB   codec jobs {}\n\n",
        state["version"].as_str().unwrap_or("?"),
        mib(number(state, "memory_used_bytes")),
        mib(number(state, "memory_max_bytes")),
        mib(number(state, "spill_used_bytes")),
        number(state, "codec_jobs"),
    );
    for link in state["connections"].as_array().into_iter().flatten() {
        let name = link["name"].as_str().unwrap_or("?");
        let text = |key: &str| {
            link[key]
                .as_str()
                .filter(|text| !text.is_empty())
                .unwrap_or("-")
        };
        let fill = number(link, "buffered_memory_bytes") / number(link, "memlimit_bytes").max(1.0);
        let (drain, lag) = (
            number(link, "drain_rate"),
            number(link, "oldest_byte_age_ms") / 1000.0,
        );
        let history = histories.entry(name.into()).or_default();
        for (line, value) in [
            (&mut history.fill, fill),
            (&mut history.drain, drain),
            (&mut history.ratio, number(link, "ratio")),
            (&mut history.lag, lag),
        ] {
            line.push_back(value);
            if line.len() > HISTORY {
                line.pop_front();
            }
        }
        let _ = writeln!(
            out,
            "{name}  {}  codec {}  ratio {:.2}  carriers {}  rtt {:.1} ms  control p99 {:.1} ms  blocked by {}",
            text("state"),
            text("codec"),
            number(link, "ratio"),
            number(link, "bulk_carriers"),
            number(link, "rtt_us") / 1000.0,
            number(link, "control_p99_us") / 1000.0,
            text("blocked_by"),
        );
        let rows = [
            (
                "fill",
                format!("{:5.1} %  ", fill * 100.0),
                graph(&history.fill, Some(1.0)),
            ),
            (
                "drain",
                format!("{:5.1} MiB/s", mib(drain)),
                graph(&history.drain, None),
            ),
            (
                "ratio",
                format!("{:5.2}    ", number(link, "ratio")),
                graph(&history.ratio, None),
            ),
            ("lag", format!("{lag:5.1} s  "), graph(&history.lag, None)),
        ];
        for (what, value, line) in rows {
            let _ = writeln!(out, "  {what:5} {value:>13}  {line}");
        }
        if link["last_error"]
            .as_str()
            .is_some_and(|text| !text.is_empty())
        {
            let _ = writeln!(out, "  {}", text("last_error"));
        }
        out.push('\n');
    }
    out
}

/// Cuts a page to a terminal's size; a line says how much is missing below. 0 is unknown.
fn fit(page: &str, columns: usize, rows: usize) -> String {
    let cut = |line: &str| match columns {
        0 => line.to_string(),
        _ => line.chars().take(columns).collect(),
    };
    let lines: Vec<String> = page.lines().map(cut).collect();
    // The cursor stands on the row below the last line.
    if rows < 3 || lines.len() < rows {
        return lines.join("\n") + "\n";
    }
    let shown = rows - 2;
    let more = format!("... {} more lines", lines.len() - shown);
    lines[..shown].join("\n") + "\n" + &cut(&more) + "\n"
}

fn graph(values: &VecDeque<f64>, full: Option<f64>) -> String {
    let most = full.unwrap_or_else(|| values.iter().copied().fold(0.0, f64::max));
    values
        .iter()
        .map(|value| {
            let part = if most > 0.0 {
                (value / most).clamp(0.0, 1.0)
            } else {
                0.0
            };
            BARS[(part * 7.0).round() as usize]
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_fits_a_small_terminal() {
        let page = "one line\n▅▅▅▅\nthree\nfour\nfive\n";
        assert_eq!(fit(page, 0, 0), page);
        assert_eq!(fit(page, 80, 24), page);
        assert_eq!(fit(page, 3, 24), "one\n▅▅▅\nthr\nfou\nfiv\n");
        assert_eq!(fit(page, 80, 4), "one line\n▅▅▅▅\n... 3 more lines\n");
        assert_eq!(fit(page, 80, 5).lines().count(), 4);
    }

    #[test]
    fn a_page_shows_each_connection_with_its_history() {
        let state = serde_json::json!({
            "version": "1", "memory_used_bytes": 1048576, "memory_max_bytes": 4194304,
            "connections": [{
                "name": "r0-b-a", "state": "Connected", "codec": "lz4", "ratio": 2.5,
                "memlimit_bytes": 100, "buffered_memory_bytes": 50, "drain_rate": 1048576,
                "oldest_byte_age_ms": 1500, "last_error": "line cut"
            }]
        });
        let mut histories = BTreeMap::new();
        draw(&state, &mut histories);
        let page = draw(&state, &mut histories);
        for part in [
            "r0-b-a  Connected  codec lz4  ratio 2.50",
            "50.0 %",
            "1.5 s",
            "line cut",
            "▅▅",
        ] {
            assert!(page.contains(part), "{part} is not in\n{page}");
        }
    }
}
