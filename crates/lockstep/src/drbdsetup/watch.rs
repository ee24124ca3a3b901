//! `drbdsetup events2`: the conversation with the daemon around the lines.

use std::io::{Read, Write};
use std::time::{SystemTime, UNIX_EPOCH};

use lockstep_daemon::client::{Client, ClientError};
use lockstep_daemon::place::Place;
use lockstep_daemon::protocol::{Reply, Request};

use super::args::Parsed;
use super::events::{Detail, Known, helper};

/// Prints events until standard output hangs up or the daemon ends.
pub(super) fn events2(place: &Place, parsed: &Parsed) -> u8 {
    let colour = match super::colour(parsed) {
        Ok(colour) => colour,
        Err(code) => return code,
    };
    let full = parsed.has("full");
    let watch = Watch {
        detail: Detail {
            statistics: full || parsed.has("statistics"),
            full,
            diff: parsed.has("diff"),
            colour,
        },
        timestamps: parsed.has("timestamps"),
        resource: super::chosen(parsed).map(str::to_owned),
    };
    if parsed.has("poll") {
        return watch.poll(place, parsed.has("now"));
    }
    let result = Client::connect(place).and_then(|mut client| {
        watch.ask(&mut client)?;
        watch.stream(&mut client, parsed.has("now"))
    });
    match result {
        Ok(code) => code,
        Err(error) => super::lost("events2", &error),
    }
}

struct Watch {
    detail: Detail,
    timestamps: bool,
    resource: Option<String>,
}

impl Watch {
    fn ask(&self, client: &mut Client) -> Result<(), ClientError> {
        let resource = self.resource.clone();
        client.send(&Request::Watch {
            statistics: self.detail.statistics,
            resource,
        })
    }

    fn stream(&self, client: &mut Client, now_only: bool) -> Result<u8, ClientError> {
        let mut known = Known::default();
        loop {
            let Some(reply) = client.receive(None)? else {
                continue;
            };
            let is_initial = matches!(reply, Reply::Report { .. });
            let lines = self.lines(&mut known, reply);
            if self.print(&lines).is_err() {
                return Ok(0);
            }
            if is_initial && now_only {
                return Ok(0);
            }
        }
    }

    fn lines(&self, known: &mut Known, reply: Reply) -> Vec<String> {
        match reply {
            Reply::Report { resources } => {
                let mut lines: Vec<String> = resources
                    .into_iter()
                    .flat_map(|resource| known.initial(resource, self.detail))
                    .collect();
                lines.push("exists -".to_owned());
                lines
            }
            Reply::Changed { resource } => known.changed(*resource, self.detail),
            Reply::Removed { name } => known.removed(&name, self.detail),
            Reply::Helper {
                resource,
                peer,
                volume,
                helper: name,
                status,
            } => {
                let seen = known.get(&resource);
                let peer = peer.map(|id| {
                    let found =
                        seen.and_then(|r| r.connections.iter().find(|c| c.peer_node_id == id));
                    (id, found.map_or("", |c| c.name.as_str()))
                });
                let volume = volume.map(|number| {
                    let found = seen.and_then(|r| r.devices.iter().find(|d| d.volume == number));
                    (number, found.map_or(0, |d| d.minor))
                });
                vec![helper(&resource, peer, volume, &name, status)]
            }
            Reply::Failed { text, .. } => {
                eprintln!("events2: {text}");
                Vec::new()
            }
            Reply::Done | Reply::Hello { .. } => Vec::new(),
        }
    }

    /// All lines at once, so that a group is never cut.
    fn print(&self, lines: &[String]) -> std::io::Result<()> {
        let stamp = if self.timestamps {
            timestamp(SystemTime::now())
        } else {
            String::new()
        };
        let mut text = String::new();
        for line in lines {
            text.push_str(&stamp);
            text.push_str(line);
            text.push('\n');
        }
        let mut out = std::io::stdout().lock();
        out.write_all(text.as_bytes())?;
        out.flush()
    }

    /// `--poll`: each `n` on standard input asks for the state again.
    fn poll(&self, place: &Place, now_only: bool) -> u8 {
        let mut known = Known::default();
        let mut first = true;
        loop {
            let reports = match super::reports(place, self.resource.as_deref()) {
                Ok(reports) => reports,
                Err(error) => return super::lost("events2", &error),
            };
            let lines = if first || now_only {
                self.lines(&mut known, Reply::Report { resources: reports })
            } else {
                reports
                    .into_iter()
                    .flat_map(|r| known.changed(r, self.detail))
                    .collect()
            };
            first = false;
            if self.print(&lines).is_err() {
                return 0;
            }
            let mut byte = [b'\n'];
            while byte == [b'\n'] {
                match std::io::stdin().read(&mut byte) {
                    Ok(1) => {}
                    Ok(_) | Err(_) => return 0,
                }
            }
            if byte != [b'n'] {
                return 0;
            }
        }
    }
}

/// `2026-01-31T12:00:00.123456+00:00 `, in UTC.
fn timestamp(at: SystemTime) -> String {
    let since = at.duration_since(UNIX_EPOCH).unwrap_or_default();
    let (days, seconds) = (since.as_secs() / 86_400, since.as_secs() % 86_400);
    let (year, month, day) = date(days);
    format!(
        "{year:04}-{month:02}-{day:02}T{:02}:{:02}:{:02}.{:06}+00:00 ",
        seconds / 3600,
        seconds / 60 % 60,
        seconds % 60,
        since.subsec_micros()
    )
}

/// The civil date of a day since 1970-01-01.
fn date(days: u64) -> (u64, u64, u64) {
    let leap = |year: u64| {
        (year.is_multiple_of(4) && !year.is_multiple_of(100)) || year.is_multiple_of(400)
    };
    let mut left = days;
    let mut year = 1970;
    while left >= 365 + u64::from(leap(year)) {
        left -= 365 + u64::from(leap(year));
        year += 1;
    }
    let february = 28 + u64::from(leap(year));
    let months = [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
    let mut month = 1;
    for length in months {
        if left < length {
            break;
        }
        left -= length;
        month += 1;
    }
    (year, month, left + 1)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn timestamps_have_33_characters_with_the_blank() {
        let at = |seconds| timestamp(UNIX_EPOCH + Duration::from_secs(seconds));
        assert_eq!(at(0), "1970-01-01T00:00:00.000000+00:00 ");
        assert_eq!(at(1_709_210_096), "2024-02-29T12:34:56.000000+00:00 ");
        assert_eq!(at(1_798_761_599), "2026-12-31T23:59:59.000000+00:00 ");
        assert_eq!(at(0).len(), 33);
    }
}
