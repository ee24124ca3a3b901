//! `lockstep inspect wire`: lists the packets in captures and proves that they are understood.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::{self, BufWriter, Write};
use std::path::Path;
use std::process::ExitCode;

use lockstep_format::wire::{Command, Stream};
use serde_json::Value;

use super::fields::fields;
use super::pcap::{Capture, Content, content};
use super::session::{Problem, Report, Seen, Sessions};
use super::tcp::{Direction, TcpId, TcpTable};

/// Port of RDMA over Ethernet.
const ROCE_PORT: u16 = 4791;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Output {
    Text,
    Json,
    Summary,
}

/// Runs `lockstep inspect wire ARGS`.
pub(crate) fn run(args: &[String]) -> ExitCode {
    let mut output = Output::Text;
    let mut files = Vec::new();
    for arg in args {
        match arg.as_str() {
            "--json" => output = Output::Json,
            "--summary" => output = Output::Summary,
            flag if flag.starts_with('-') => {
                return super::usage_error(&format!(
                    "lockstep inspect wire: unknown option {flag}"
                ));
            }
            file => files.push(file),
        }
    }
    if files.is_empty() {
        return super::usage_error("lockstep inspect wire: name a capture");
    }
    let mut good = true;
    for file in files {
        let mut out = BufWriter::new(io::stdout().lock());
        match inspect(Path::new(file), output, &mut out) {
            Ok(count) => good &= count.failures == 0,
            // The reader of the list has seen enough.
            Err(error) if is_broken_pipe(&error) => return ExitCode::SUCCESS,
            Err(error) => {
                drop(out);
                eprintln!("{file}: {error:#}");
                good = false;
            }
        }
    }
    if good {
        ExitCode::SUCCESS
    } else {
        ExitCode::from(1)
    }
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error
        .downcast_ref::<io::Error>()
        .is_some_and(|error| error.kind() == io::ErrorKind::BrokenPipe)
}

/// What a capture contained.
#[derive(Default)]
struct Count {
    packets: u64,
    commands: BTreeMap<Command, u64>,
    cut_off: u64,
    failures: u64,
    roce_frames: u64,
}

/// Lists one capture. An error means that the rest of the file could not be read.
fn inspect(path: &Path, output: Output, out: &mut impl Write) -> anyhow::Result<Count> {
    let mut capture = Capture::open(path)?;
    let mut table = TcpTable::default();
    let mut sessions = Sessions::default();
    let mut count = Count::default();
    let mut time_ns = 0;
    let end = loop {
        let link = capture.link();
        let frame = match capture.next_frame() {
            Ok(Some(frame)) => frame,
            Ok(None) => break Ok(()),
            Err(error) => break Err(error),
        };
        time_ns = frame.time_ns;
        match content(link, frame.bytes) {
            Content::Tcp(segment) => {
                let mut written = Ok(());
                table.push(&segment, |event| {
                    sessions.handle(event, &mut |report| {
                        let result = count.take(&report, time_ns, output, out);
                        written = std::mem::replace(&mut written, Ok(())).and(result);
                    });
                });
                written?;
            }
            Content::Udp { port: ROCE_PORT } => count.roce_frames += 1,
            Content::Udp { .. } | Content::Other => {}
        }
    };
    let gaps = table.gaps();
    let missing = |id: TcpId, direction: Direction| {
        let gap = gaps
            .iter()
            .find(|gap| gap.id == id && gap.direction == direction);
        gap.map(|gap| gap.missing)
    };
    let mut written = Ok(());
    sessions.finish(missing, &mut |report| {
        let result = count.take(&report, time_ns, output, out);
        written = std::mem::replace(&mut written, Ok(())).and(result);
    });
    written?;
    let text = count.summary(path, &sessions);
    if output == Output::Json {
        out.flush()?;
        eprintln!("{text}");
    } else {
        writeln!(out, "{text}")?;
        out.flush()?;
    }
    end?;
    if count.packets == 0 && count.failures == 0 {
        count.nothing_found()?;
    }
    Ok(count)
}

impl Count {
    fn take(
        &mut self,
        report: &Report<'_>,
        time_ns: u64,
        output: Output,
        out: &mut impl Write,
    ) -> io::Result<()> {
        match report {
            Report::Packet(seen) => {
                self.packets += 1;
                *self.commands.entry(seen.packet.command()).or_default() += 1;
                match output {
                    Output::Text => writeln!(out, "{}", text_line(seen, time_ns)),
                    Output::Json => writeln!(out, "{}", json_line(seen, time_ns)),
                    Output::Summary => Ok(()),
                }
            }
            Report::Problem { from, to, problem } => {
                if problem.is_failure() {
                    self.failures += 1;
                } else {
                    self.cut_off += 1;
                }
                let text = problem_text(problem);
                match output {
                    Output::Json => {
                        let object = serde_json::json!({
                            "time": seconds(time_ns),
                            "from": from.to_string(),
                            "to": to.to_string(),
                            "problem": text,
                            "failure": problem.is_failure(),
                        });
                        writeln!(out, "{object}")
                    }
                    Output::Text | Output::Summary => {
                        writeln!(out, "{} {from} -> {to}: {text}", seconds(time_ns))
                    }
                }
            }
        }
    }

    fn summary(&self, path: &Path, sessions: &Sessions) -> String {
        let Count {
            packets,
            cut_off,
            failures,
            ..
        } = self;
        format!(
            "{}: {} connections, {packets} packets of {} kinds, {failures} failures, \
             {cut_off} cut off by the sender's end, {} unused TCP connections, {} others",
            path.display(),
            sessions.connections(),
            self.commands.len(),
            sessions.attempts,
            sessions.others,
        )
    }

    /// A capture without a single packet of ours is not what somebody wanted to look at.
    fn nothing_found(&self) -> anyhow::Result<()> {
        if self.roce_frames > 0 {
            anyhow::bail!(
                "no replication stream over TCP, but {} frames of RDMA (RoCE, UDP port \
                 {ROCE_PORT}); the rdma transport is not decoded",
                self.roce_frames
            );
        }
        anyhow::bail!("no replication stream over TCP found")
    }
}

fn seconds(time_ns: u64) -> String {
    format!(
        "{}.{:06}",
        time_ns / 1_000_000_000,
        time_ns / 1000 % 1_000_000
    )
}

fn stream_name(stream: Stream) -> &'static str {
    match stream {
        Stream::Data => "data",
        Stream::Control => "ctl",
    }
}

fn text_line(seen: &Seen<'_>, time_ns: u64) -> String {
    let mut line = seconds(time_ns);
    let connection = seen
        .connection
        .map_or("-".to_owned(), |number| number.to_string());
    let stream = stream_name(seen.stream);
    // Writing to a string cannot fail.
    let _ = write!(
        line,
        " #{connection} {stream:4} {} -> {}",
        seen.from, seen.to
    );
    let _ = write!(
        line,
        " vol {} {}",
        seen.header.volume,
        seen.packet.command().name()
    );
    for (name, value) in fields(seen.packet) {
        match value {
            Value::String(text) => {
                let _ = write!(line, " {name}={text}");
            }
            Value::Array(items) => {
                let items: Vec<_> = items
                    .iter()
                    .map(|item| {
                        item.as_str()
                            .map_or_else(|| item.to_string(), str::to_owned)
                    })
                    .collect();
                let _ = write!(line, " {name}={}", items.join("|"));
            }
            other => {
                let _ = write!(line, " {name}={other}");
            }
        }
    }
    line
}

fn json_line(seen: &Seen<'_>, time_ns: u64) -> Value {
    let fields: serde_json::Map<_, _> = fields(seen.packet)
        .into_iter()
        .map(|(name, value)| (name.to_owned(), value))
        .collect();
    serde_json::json!({
        "time": seconds(time_ns),
        "connection": seen.connection,
        "stream": stream_name(seen.stream),
        "from": seen.from.to_string(),
        "to": seen.to.to_string(),
        "volume": (!seen.header.volume.is_none()).then_some(seen.header.volume.0),
        "packet": seen.packet.command().name(),
        "length": seen.header.len,
        "fields": fields,
    })
}

fn problem_text(problem: &Problem) -> String {
    match problem {
        Problem::Undecodable { error, bytes } => {
            format!("not decoded: {error}; bytes: {}", hex(bytes))
        }
        Problem::Differs {
            command,
            captured,
            encoded,
        } => format!(
            "{} encodes to other bytes: captured {} encoded {}",
            command.name(),
            hex(captured),
            hex(encoded)
        ),
        Problem::BitmapCode { what } => format!("P_COMPRESSED_BITMAP: {what}"),
        Problem::CutOff {
            command: Some(command),
            missing,
        } => {
            format!(
                "{} is cut off, {missing} bytes of payload are missing",
                command.name()
            )
        }
        Problem::CutOff { command: None, .. } => "a packet is cut off".to_owned(),
        Problem::Missing { bytes } => {
            format!("the capture lacks {bytes} bytes; what follows them is not decoded")
        }
        Problem::MissingChunk { sequence } => {
            format!("the capture lacks lb-tcp chunk {sequence}; what follows it is not decoded")
        }
        Problem::TooMuchPending => {
            "the capture lacks a segment; what follows it is not decoded".to_owned()
        }
        Problem::UnknownAlgorithm { name } => {
            format!("integrity algorithm '{name}' is not known; the rest is not decoded")
        }
        Problem::Tls => "the streams are encrypted with TLS, which is not decoded".to_owned(),
        Problem::NoBeginning => {
            "packets of a connection that began before the capture; not decoded".to_owned()
        }
        Problem::Chunk { sequence, len } => {
            format!("lb-tcp chunk {sequence} with {len} bytes is not possible")
        }
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
