//! `drbdsetup events2`: the conversation with the daemon around the lines.

use std::io::{Read, Write};
use std::time::{SystemTime, UNIX_EPOCH};

use tz::TimeZone;

use lockstep_daemon::client::{Client, ClientError, Sender};
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
            raw: full && parsed.has("statistics"),
            diff: parsed.has("diff"),
            colour,
        },
        timestamps: parsed.has("timestamps"),
        zone: local_zone(),
        resource: super::chosen(parsed).map(str::to_owned),
    };
    let (poll, now) = (parsed.has("poll"), parsed.has("now"));
    if !(poll && now) {
        end_with_the_reader();
    }
    let result = Client::connect(place).and_then(|mut client| {
        if now {
            return watch.print_now(&mut client, poll);
        }
        watch.ask(&mut client, poll)?;
        if poll {
            refresh_on_request(client.sender()?);
        }
        watch.stream(&mut client)
    });
    match result {
        Ok(code) => code,
        Err(error) if Client::has_ended(&error) => {
            let object = parsed.words.first().map_or("all", String::as_str);
            eprintln!("{object}: module unloaded");
            MODULE_UNLOADED
        }
        Err(error) => super::lost("events2", &error),
    }
}

/// Exit code when the daemon ends under a watcher.
const MODULE_UNLOADED: u8 = 121;

/// Ends the program when nobody reads its output any more, also while nothing happens.
fn end_with_the_reader() {
    use rustix::event::{PollFd, PollFlags, poll};
    std::thread::spawn(|| {
        let out = std::io::stdout();
        loop {
            let mut fds = [PollFd::new(&out, PollFlags::empty())];
            match poll(&mut fds, None) {
                Ok(_) if fds[0].revents().intersects(PollFlags::ERR | PollFlags::HUP) => {
                    std::process::exit(0)
                }
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(_) => return,
            }
        }
    });
}

/// `--poll`: each `n` on standard input asks for fresh counters; its end is the program's end.
fn refresh_on_request(mut daemon: Sender) {
    std::thread::spawn(move || {
        while wait_for_request() {
            if daemon.send(&Request::Refresh).is_err() {
                // The receiving thread finds the same out and says it.
                return;
            }
        }
        // Nobody is in the middle of printing a group while this is held.
        let _out = std::io::stdout().lock();
        std::process::exit(0);
    });
}

/// Waits for an `n` on standard input; `false` at its end or for anything else.
fn wait_for_request() -> bool {
    let mut byte = [0];
    loop {
        match std::io::stdin().read(&mut byte) {
            Ok(1) if byte == *b"\n" => {}
            Ok(1) => return byte == *b"n",
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Ok(_) | Err(_) => return false,
        }
    }
}

struct Watch {
    detail: Detail,
    timestamps: bool,
    zone: TimeZone,
    resource: Option<String>,
}

impl Watch {
    fn ask(&self, client: &mut Client, on_request: bool) -> Result<(), ClientError> {
        let resource = self.resource.clone();
        client.send(&Request::Watch {
            statistics: self.detail.statistics,
            on_request,
            resource,
        })
    }

    /// `--now`: the state, with `--poll` again at each request.
    fn print_now(&self, client: &mut Client, poll: bool) -> Result<u8, ClientError> {
        loop {
            let resource = self.resource.clone();
            let reply = client.call(&Request::Report { resource })?;
            let lines = self.lines(&mut Known::default(), reply);
            if self.print(&lines).is_err() || !poll || !wait_for_request() {
                return Ok(0);
            }
        }
    }

    fn stream(&self, client: &mut Client) -> Result<u8, ClientError> {
        let mut known = Known::default();
        loop {
            let Some(reply) = client.receive(None)? else {
                continue;
            };
            let lines = self.lines(&mut known, reply);
            if self.print(&lines).is_err() {
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
            Reply::Renamed { name, new_name } => {
                known.rename(&name, &new_name);
                vec![format!("rename resource name:{name} new_name:{new_name}")]
            }
            Reply::Helper {
                resource,
                peer,
                volume,
                helper: name,
                status,
            } => {
                let peer = peer.map(|id| (id, known.called(&resource, id, status)));
                let peer = peer.as_ref().map(|(id, name)| (*id, name.as_str()));
                let seen = known.get(&resource);
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
            Reply::Done | Reply::Hello { .. } | Reply::Counts { .. } => Vec::new(),
        }
    }

    /// All lines at once, so that a group is never cut.
    fn print(&self, lines: &[String]) -> std::io::Result<()> {
        let stamp = if self.timestamps {
            timestamp(SystemTime::now(), &self.zone)
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
}

/// The zone of `TZ`, else of the machine, else UTC.
fn local_zone() -> TimeZone {
    let zone = match std::env::var("TZ") {
        Ok(name) => TimeZone::from_posix_tz(&name),
        Err(_) => TimeZone::local(),
    };
    zone.unwrap_or_else(|_| TimeZone::utc())
}

/// `2026-01-31T13:00:00.123456+01:00 `, in local time.
fn timestamp(at: SystemTime, zone: &TimeZone) -> String {
    let since = at.duration_since(UNIX_EPOCH).unwrap_or_default();
    let local = i64::try_from(since.as_secs()).ok();
    let local = local.and_then(|unix| zone.find_local_time_type(unix).ok());
    let offset_s = local.map_or(0, |local| local.ut_offset());
    let shown_s = since.as_secs().saturating_add_signed(offset_s.into());
    let sign = if offset_s < 0 { '-' } else { '+' };
    let offset_min = offset_s.unsigned_abs() / 60;
    let (days, seconds) = (shown_s / 86_400, shown_s % 86_400);
    let (year, month, day) = date(days);
    format!(
        "{year:04}-{month:02}-{day:02}T{:02}:{:02}:{:02}.{:06}{sign}{:02}:{:02} ",
        seconds / 3600,
        seconds / 60 % 60,
        seconds % 60,
        since.subsec_micros(),
        offset_min / 60,
        offset_min % 60
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
        let utc = TimeZone::utc();
        let at = |seconds| timestamp(UNIX_EPOCH + Duration::from_secs(seconds), &utc);
        assert_eq!(at(0), "1970-01-01T00:00:00.000000+00:00 ");
        assert_eq!(at(1_709_210_096), "2024-02-29T12:34:56.000000+00:00 ");
        assert_eq!(at(1_798_761_599), "2026-12-31T23:59:59.000000+00:00 ");
        assert_eq!(at(0).len(), 33);
        let zone = TimeZone::from_posix_tz("NST3:30NDT,M3.2.0,M11.1.0").unwrap();
        let at = |seconds| timestamp(UNIX_EPOCH + Duration::from_secs(seconds), &zone);
        assert_eq!(at(1_709_210_096), "2024-02-29T09:04:56.000000-03:30 ");
        assert_eq!(at(1_720_000_000), "2024-07-03T07:16:40.000000-02:30 ");
    }
}
