//! `lockstep status`, `explain`, `top`, `recover`, `proc`: for people, beside the compatible tools.

mod advice;
mod explain;
mod recover;
mod top;
mod tree;

use std::io::{IsTerminal, Write};
use std::process::ExitCode;
use std::time::Duration;

use lockstep_daemon::client::Client;
use lockstep_daemon::place::Place;
use lockstep_daemon::protocol::{Reply, Request};
use lockstep_daemon::report::ResourceReport;

use crate::drbdsetup::paint::Colour;

const USAGE: &str = "\
Usage: lockstep status [--color[=always|auto|never]] [RESOURCE]
       lockstep explain RESOURCE
       lockstep top [--interval SECONDS] [--once]
       lockstep recover RESOURCE [--peer NAME] [--peer-status FILE]
                        [--keep-mine | --discard-mine [--yes]]
       lockstep proc

  status    the resources as a tree; for each state that is not good why, and what to do
  explain   generations, quorum, who waits for whom
  top       requests, their times, and resyncs, live
  recover   shows what each side of a split brain would lose; then, if told, ends it
  proc      the state as /proc/drbd of DRBD 8.4 has it, one peer per volume

The node is the one in /run/lockstep or in the directory LOCKSTEP_DIR.
Exit code: 0 if it was done, 1 if not, 2 for wrong usage; of status 3 if something is not good.";

/// Exit code of `status` when there is advice.
const NOT_GOOD: u8 = 3;

enum Wrong {
    Usage(String),
    Failed(String),
}

impl From<String> for Wrong {
    fn from(text: String) -> Wrong {
        Wrong::Failed(text)
    }
}

/// Runs one of the commands.
pub(crate) fn run(command: &str, args: &[String]) -> ExitCode {
    if args.iter().any(|word| word == "--help" || word == "-h") {
        println!("{USAGE}");
        return ExitCode::SUCCESS;
    }
    let place = Place::find(None);
    let result = match command {
        "status" => status(&place, args),
        "explain" => explain(&place, args),
        "top" => live(&place, args),
        "proc" => proc_drbd(&place, args),
        _ => recovery(args).and_then(|wanted| Ok(recover::run(&place, &wanted).map(|()| 0)?)),
    };
    match result {
        Ok(code) => ExitCode::from(code),
        Err(Wrong::Usage(problem)) => {
            eprintln!("lockstep {command}: {problem}\n\n{USAGE}");
            ExitCode::from(2)
        }
        Err(Wrong::Failed(problem)) => {
            eprintln!("lockstep {command}: {problem}");
            ExitCode::FAILURE
        }
    }
}

fn reports(place: &Place, resource: Option<&str>) -> Result<Vec<ResourceReport>, String> {
    let request = Request::Report {
        resource: resource.map(str::to_owned),
    };
    let reply = Client::connect(place)
        .and_then(|mut client| client.call(&request))
        .map_err(|error| error.to_string())?;
    match (reply, resource) {
        (Reply::Report { resources }, Some(name)) if resources.is_empty() => {
            Err(format!("resource '{name}' is not up on this node"))
        }
        (Reply::Report { resources }, _) => Ok(resources),
        (other, _) => Err(format!("an unexpected answer: {other:?}")),
    }
}

fn print(text: &str) {
    // A reader that has gone wants no more.
    let _ = std::io::stdout().write_all(text.as_bytes());
}

fn status(place: &Place, args: &[String]) -> Result<u8, Wrong> {
    let mut colour = std::io::stdout().is_terminal();
    let mut resource = None;
    for word in args {
        match word.as_str() {
            "--color" | "--color=always" => colour = true,
            "--color=auto" => {}
            "--color=never" => colour = false,
            flag if flag.starts_with('-') => return Err(unknown(flag)),
            name if resource.is_none() => resource = Some(name),
            more => return Err(Wrong::Usage(format!("'{more}' is one word too many"))),
        }
    }
    let resources = reports(place, resource)?;
    let colour = if colour { Colour::On } else { Colour::Off };
    if resources.is_empty() {
        print("nothing is configured; drbdadm up RESOURCE\n");
    }
    print(&tree::text(&resources, colour));
    let bad = resources.iter().any(|r| !advice::of_resource(r).is_empty());
    Ok(if bad { NOT_GOOD } else { 0 })
}

fn explain(place: &Place, args: &[String]) -> Result<u8, Wrong> {
    let [name] = args else {
        return Err(Wrong::Usage("name one resource".to_owned()));
    };
    for report in reports(place, Some(name))? {
        print(&explain::text(&report));
    }
    Ok(0)
}

fn proc_drbd(place: &Place, args: &[String]) -> Result<u8, Wrong> {
    if let Some(word) = args.first() {
        return Err(Wrong::Usage(format!("'{word}' is one word too many")));
    }
    print(&lockstep_daemon::proc_drbd::text(&reports(place, None)?));
    Ok(0)
}

fn live(place: &Place, args: &[String]) -> Result<u8, Wrong> {
    let (mut every, mut once) = (Duration::from_secs(1), false);
    let mut words = args.iter();
    while let Some(word) = words.next() {
        match word.split_once('=').unwrap_or((word, "")) {
            ("--once", "") => once = true,
            ("--interval", value) => {
                let text = match value {
                    "" => words.next().map_or("", String::as_str),
                    value => value,
                };
                let seconds: Option<f64> = text.parse().ok();
                let seconds = seconds.filter(|s| (0.1..=3600.0).contains(s));
                let wrong = || Wrong::Usage("--interval is 0.1 to 3600 seconds".to_owned());
                every = Duration::from_secs_f64(seconds.ok_or_else(wrong)?);
            }
            (other, _) => return Err(unknown(other)),
        }
    }
    top::run(place, every, once)?;
    Ok(0)
}

fn recovery(args: &[String]) -> Result<recover::Wanted, Wrong> {
    let mut wanted = recover::Wanted {
        resource: String::new(),
        peer: None,
        peer_status: None,
        choice: recover::Choice::Look,
        confirmed: false,
    };
    let mut words = args.iter();
    while let Some(word) = words.next() {
        let (name, value) = match word.split_once('=') {
            Some((name, value)) => (name, Some(value.to_owned())),
            None => (word.as_str(), None),
        };
        let mut needed = || {
            let missing = || Wrong::Usage(format!("{name} needs a value"));
            value
                .clone()
                .or_else(|| words.next().cloned())
                .ok_or_else(missing)
        };
        match name {
            "--peer" => wanted.peer = Some(needed()?),
            "--peer-status" => wanted.peer_status = Some(needed()?),
            "--keep-mine" | "--discard-mine" if wanted.choice != recover::Choice::Look => {
                return Err(Wrong::Usage("choose one side".to_owned()));
            }
            "--keep-mine" => wanted.choice = recover::Choice::KeepMine,
            "--discard-mine" => wanted.choice = recover::Choice::DiscardMine,
            "--yes" => wanted.confirmed = true,
            flag if flag.starts_with('-') => return Err(unknown(flag)),
            name if wanted.resource.is_empty() => name.clone_into(&mut wanted.resource),
            more => return Err(Wrong::Usage(format!("'{more}' is one word too many"))),
        }
    }
    if wanted.resource.is_empty() {
        return Err(Wrong::Usage("name one resource".to_owned()));
    }
    Ok(wanted)
}

fn unknown(flag: &str) -> Wrong {
    Wrong::Usage(format!("unknown option '{flag}'"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(line: &str) -> Result<recover::Wanted, Wrong> {
        let args: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
        recovery(&args)
    }

    #[test]
    fn recover_discards_nothing_that_was_not_asked_for() {
        let Ok(look) = parsed("web") else {
            panic!("one word is enough to look")
        };
        assert_eq!(look.choice, recover::Choice::Look);
        assert!(parsed("").is_err() && parsed("a b").is_err() && parsed("a --force").is_err());
        assert!(parsed("web --keep-mine --discard-mine").is_err());
        let Ok(wanted) = parsed("web --discard-mine --peer-status=f --peer bravo") else {
            panic!("a whole line")
        };
        assert_eq!(wanted.choice, recover::Choice::DiscardMine);
        assert_eq!(wanted.peer.as_deref(), Some("bravo"));
        assert!(!wanted.confirmed);
    }
}
