//! `drbdsetup`: one request to the daemon, in the words, texts and exit codes of the original.

mod args;
mod calls84;
mod codes;
mod dialect;
mod events;
mod gi;
pub(crate) mod paint;
mod request;
#[cfg(test)]
pub(crate) mod sample;
mod show;
pub(crate) mod status;
mod status_json;
mod verbs;
mod wait;
mod watch;

use std::io::{IsTerminal, Write};
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use lockstep_daemon::client::{Client, ClientError};
use lockstep_daemon::names::Named;
use lockstep_daemon::place::{Place, REGISTRY};
use lockstep_daemon::protocol::{Reply, Request};
use lockstep_daemon::report::{ConnectionReport, DeviceReport, ResourceReport};

use args::{Parsed, Wrong};
use paint::Colour;

/// Exit code of wrong usage and of a daemon that cannot be asked.
const USAGE: u8 = 20;
/// Exit code of an object that is not known.
const UNKNOWN_OBJECT: u8 = 10;

/// Runs `drbdsetup ARGS`.
pub(crate) fn run(args: &[String]) -> ExitCode {
    ExitCode::from(run_to_code(args))
}

/// A command that changes something, in the process of another tool; gives its exit code.
pub(crate) fn run_within(directory: Option<&Path>, args: &[String]) -> u8 {
    match args::parse(args) {
        Ok(parsed) => change(&Place::find(directory), parsed),
        Err(wrong) => usage_error(wrong),
    }
}

/// Commands and options, for completions and manual pages.
pub(crate) fn words() -> Vec<crate::words::Command> {
    verbs::VERBS
        .iter()
        .map(|verb| crate::words::Command {
            name: verb.name,
            summary: verb.summary.to_owned(),
            options: verb.option_names(),
        })
        .collect()
}

fn run_to_code(args: &[String]) -> u8 {
    match args.first().map(String::as_str) {
        None | Some("-h" | "--help") => return print_help(USAGE),
        Some("help") => return help_of(args.get(1), verbs::Verb::usage),
        Some("xml-help") => return help_of(args.get(1), verbs::Verb::xml),
        Some("version" | "--version" | "-V") => {
            println!("DRBDSETUP_VERSION={}", env!("CARGO_PKG_VERSION"));
            return 0;
        }
        Some(_) => {}
    }
    let mut parsed = match args::parse(args) {
        Ok(parsed) => parsed,
        Err(wrong) => return usage_error(wrong),
    };
    if parsed.help {
        print!("{}", parsed.verb.usage());
        return 0;
    }
    let place = Place::find(None);
    if parsed.verb.of_84 {
        return calls84::run(&place, parsed);
    }
    match parsed.verb.name {
        "status" => status(&place, &parsed),
        "show" => show(&place, &parsed),
        "events2" => watch::events2(&place, &parsed),
        "role" | "cstate" | "peer-role" | "dstate" | "udev" | "get-gi" | "show-gi" => {
            query(&place, &parsed)
        }
        name if name.starts_with("wait-") => waiting(&place, &mut parsed),
        "down" if parsed.words[0] == "all" => down_all(&place),
        "check-resize" => check_resize(&place, &parsed),
        _ => change(&place, parsed),
    }
}

fn print_help(code: u8) -> u8 {
    print!("{}", verbs::help());
    code
}

fn help_of(name: Option<&String>, text: fn(&verbs::Verb) -> String) -> u8 {
    match name.map(|name| (name, verbs::find(name))) {
        None => print_help(USAGE),
        Some((_, Some(verb))) => {
            print!("{}", text(verb));
            0
        }
        Some((name, None)) => {
            eprintln!("{name}: unknown command");
            print_help(USAGE)
        }
    }
}

fn usage_error(wrong: Wrong) -> u8 {
    match wrong {
        Wrong::Unknown { verb, word, near } => {
            match verb {
                Some(verb) => eprintln!("{verb}: unrecognized option '{word}'"),
                None => eprintln!("drbdsetup: unknown command '{word}'"),
            }
            if let Some(near) = near {
                eprintln!("\tdid you mean '{near}'?");
            }
            print!("{}", verbs::help());
        }
        Wrong::Missing { verb, number } => {
            eprintln!("Missing argument {number} to command");
            if let Some(verb) = verbs::find(verb) {
                print!("{}", verb.usage());
            }
        }
        Wrong::Excess(words) => eprintln!("Excess arguments: {words}"),
        Wrong::Value(text) => eprintln!("{text}"),
    }
    USAGE
}

/// A command that changes something.
fn change(place: &Place, parsed: Parsed) -> u8 {
    let name = parsed.verb.name;
    let object = parsed.words[0].clone();
    let request = match request::build(parsed) {
        Ok(request) => request,
        Err(text) => {
            eprintln!("{text}");
            return USAGE;
        }
    };
    if let Request::Attach {
        data_path,
        meta_path,
        ..
    } = &request
        && let Err(text) = can_be_opened(&[data_path, meta_path])
    {
        eprintln!("{text}");
        return USAGE;
    }
    let autostart = std::env::var_os("LOCKSTEP_AUTOSTART").is_none_or(|value| value != "no");
    let client = if name == "new-resource" && autostart {
        Client::connect_or_start(place)
    } else {
        Client::connect(place)
    };
    let mut client = match client {
        Ok(client) => client,
        // Without a daemon nothing is up, connected or Primary: these have nothing to do.
        Err(ClientError::NotRunning { .. })
            if matches!(name, "down" | "secondary" | "disconnect" | "detach") =>
        {
            return 0;
        }
        Err(error) => return lost(&object, &error),
    };
    let registered = registered(&mut client, &request);
    let mut pause = Duration::from_millis(1000 / 16);
    loop {
        match client.call(&request) {
            Ok(Reply::Failed {
                code: IN_TRANSIENT_STATE,
                ..
            }) => {
                std::thread::sleep(pause);
                pause = (pause * 2).min(Duration::from_secs(10));
            }
            Ok(Reply::Failed {
                code: UNKNOWN_RESOURCE,
                ..
            }) if name == "down" => return 0,
            Ok(reply) => {
                if reply == Reply::Done {
                    forget(&registered);
                    if let Request::RenameResource { resource, new_name } = &request {
                        rename_registered(resource, new_name);
                    }
                }
                return answered(&object, reply);
            }
            Err(error) => return lost(&object, &error),
        }
    }
}

/// Disks that cannot be opened are told by name before the daemon is asked, as the original does.
fn can_be_opened(paths: &[&str]) -> Result<(), String> {
    let disks = paths
        .iter()
        .filter(|path| **path != "internal" && !path.starts_with("ram:"));
    for path in disks {
        let mut how = std::fs::File::options();
        how.read(true)
            .write(true)
            .open(path)
            .map_err(|error| format!("Can not open device '{path}': {error}"))?;
    }
    Ok(())
}

/// The links by which drbdadm finds the configuration of what is going to be removed.
fn registered(client: &mut Client, request: &Request) -> Vec<String> {
    match request {
        Request::DelMinor { minor } => vec![format!("drbd-minor-{minor}.conf")],
        Request::DelResource { resource } => vec![format!("drbd-resource-{resource}.conf")],
        Request::Down { resource } => {
            let mut links = vec![format!("drbd-resource-{resource}.conf")];
            let one = Request::Report {
                resource: Some(resource.clone()),
            };
            if let Ok(Reply::Report { resources }) = client.call(&one) {
                let devices = resources.iter().flat_map(|resource| &resource.devices);
                links.extend(devices.map(|device| format!("drbd-minor-{}.conf", device.minor)));
            }
            links
        }
        _ => Vec::new(),
    }
}

/// Removes such links. One that was never made is as good as removed.
fn forget(links: &[String]) {
    for link in links {
        let _ = std::fs::remove_file(std::path::Path::new(REGISTRY).join(link));
    }
}

/// The link of a resource goes with its name. One that was never made needs no other name.
fn rename_registered(name: &str, new_name: &str) {
    let link =
        |name: &str| std::path::Path::new(REGISTRY).join(format!("drbd-resource-{name}.conf"));
    let _ = std::fs::rename(link(name), link(new_name));
}

/// Stores the size of the disk, so that `drbdmeta check-resize` finds the metadata after the disk
/// has grown while it was not attached.
fn check_resize(place: &Place, parsed: &Parsed) -> u8 {
    let object = &parsed.words[0];
    let minor = match args::minor(object) {
        Ok(minor) => minor,
        Err(text) => {
            eprintln!("{text}");
            return USAGE;
        }
    };
    let resources = match reports(place, None) {
        Ok(resources) => resources,
        Err(error) => return lost(object, &error),
    };
    let Some((_, device)) = device(&resources, minor) else {
        eprintln!("{object}: No such device");
        return UNKNOWN_OBJECT;
    };
    match &device.disk {
        None => answered(
            object,
            Reply::Failed {
                code: NO_DISK,
                text: String::new(),
            },
        ),
        Some(disk) => crate::drbdmeta::remember(minor, &disk.meta_path, &disk.meta_index),
    }
}

/// `ERR_NO_DISK`.
const NO_DISK: i32 = 138;

/// `SS_IN_TRANSIENT_STATE`: the same request is sent again.
const IN_TRANSIENT_STATE: i32 = -18;
/// `ERR_RES_NOT_KNOWN`: downing what is not there succeeds.
const UNKNOWN_RESOURCE: i32 = 158;

fn answered(object: &str, reply: Reply) -> u8 {
    match reply {
        Reply::Done => 0,
        Reply::Failed { code: 0, text } => {
            eprintln!("{object}: {text}");
            USAGE
        }
        Reply::Failed { code, text } => {
            let (line, exit) = codes::failure(object, code);
            eprintln!("{line}");
            if !text.is_empty() {
                eprintln!("additional info from kernel:\n{text}");
            }
            exit
        }
        other => {
            eprintln!("{object}: lockstepd gave an unexpected answer: {other:?}");
            USAGE
        }
    }
}

fn lost(object: &str, error: &ClientError) -> u8 {
    let mut text = error.to_string();
    if let Some(source) = std::error::Error::source(error) {
        text.push_str(&format!(": {source}"));
    }
    eprintln!("{object}: {text}");
    USAGE
}

/// Asks for reports; without a daemon there are none.
fn reports(place: &Place, name: Option<&str>) -> Result<Vec<ResourceReport>, ClientError> {
    let resource = name.map(str::to_owned);
    match Client::connect(place)?.call(&Request::Report { resource })? {
        Reply::Report { resources } => Ok(resources),
        other => Err(ClientError::Unknown {
            text: format!("{other:?}"),
        }),
    }
}

/// The same; a daemon that does not run means that nothing is configured, with a hint.
fn reports_or_none(place: &Place, name: Option<&str>) -> Result<Vec<ResourceReport>, ClientError> {
    match reports(place, name) {
        Err(error @ ClientError::NotRunning { .. }) => {
            eprintln!("{error}");
            Ok(Vec::new())
        }
        other => other,
    }
}

/// The resource that is asked for; `all` is everything.
fn chosen(parsed: &Parsed) -> Option<&str> {
    parsed
        .words
        .first()
        .map(String::as_str)
        .filter(|name| *name != "all")
}

fn colour(parsed: &Parsed) -> Result<Colour, u8> {
    let wanted = parsed.flags.iter().rev().find(|(flag, _)| *flag == "color");
    let on = match wanted.map(|(_, value)| value.as_deref()) {
        Some(None | Some("always")) => true,
        Some(Some("never")) => false,
        None | Some(Some("auto")) => std::io::stdout().is_terminal(),
        Some(Some(other)) => {
            eprintln!("--color={other}: write always, auto or never");
            return Err(USAGE);
        }
    };
    Ok(if on { Colour::On } else { Colour::Off })
}

/// Characters per line of the terminal.
fn width() -> usize {
    let size = rustix::termios::tcgetwinsize(std::io::stdout());
    size.ok()
        .map(|size| usize::from(size.ws_col))
        .filter(|width| *width > 0)
        .unwrap_or(80)
}

fn status(place: &Place, parsed: &Parsed) -> u8 {
    let colour = match colour(parsed) {
        Ok(colour) => colour,
        Err(code) => return code,
    };
    let name = chosen(parsed);
    let resources = match reports_or_none(place, name) {
        Ok(resources) => resources,
        Err(error) => return lost("status", &error),
    };
    let text = if parsed.has("json") {
        status_json::text(&resources)
    } else if resources.is_empty() {
        NOTHING.to_owned()
    } else {
        let style = status::Style {
            verbose: parsed.has("verbose"),
            statistics: parsed.has("statistics"),
            raw: parsed
                .flags
                .iter()
                .filter(|(flag, _)| *flag == "verbose")
                .count()
                > 1,
            colour,
            terminal: std::io::stdout().is_terminal(),
            width: width(),
        };
        status::text(&resources, style)
    };
    if let Err(code) = print(&text) {
        return code;
    }
    match name {
        Some(name) if resources.is_empty() => {
            eprintln!("{name}: No such resource");
            UNKNOWN_OBJECT
        }
        _ => 0,
    }
}

/// What `status` and `show` say without resources.
const NOTHING: &str = "# No currently configured DRBD found.\n";

fn show(place: &Place, parsed: &Parsed) -> u8 {
    let name = chosen(parsed);
    let resources = match reports_or_none(place, name) {
        Ok(resources) => resources,
        Err(error) => return lost("show", &error),
    };
    let text = if parsed.has("json") {
        show::json(&resources)
    } else if resources.is_empty() && name.is_none() {
        NOTHING.to_owned()
    } else {
        let defaults = if parsed.has("show-defaults") {
            show::Defaults::Shown
        } else {
            show::Defaults::Hidden
        };
        show::text(&resources, defaults, dialect::of_reader())
    };
    print(&text).err().unwrap_or(0)
}

/// Prints; a reader that has gone ends the program without noise.
fn print(text: &str) -> Result<(), u8> {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes())
        .and_then(|()| out.flush())
        .map_err(|_| 1)
}

/// A small query: one line of state.
fn query(place: &Place, parsed: &Parsed) -> u8 {
    let object = parsed.words[0].clone();
    let resources = match reports(place, None) {
        Ok(resources) => resources,
        Err(error) => return lost(&object, &error),
    };
    match query_line(&resources, parsed) {
        Ok(line) => print(&format!("{line}\n")).err().unwrap_or(0),
        Err((text, code)) => {
            eprintln!("{object}: {text}");
            code
        }
    }
}

type QueryResult = Result<String, (String, u8)>;

fn query_line(resources: &[ResourceReport], parsed: &Parsed) -> QueryResult {
    let unknown = |text: &str| (text.to_owned(), UNKNOWN_OBJECT);
    let number = |text: &str| args::number("argument", text).map_err(|text| (text, USAGE));
    let resource = || resources.iter().find(|r| r.name == parsed.words[0]);
    match parsed.verb.name {
        "role" => {
            let resource = resource().ok_or_else(|| unknown("Unknown resource"))?;
            Ok(resource.role.text().to_owned())
        }
        "dstate" | "udev" => {
            let minor = args::minor(&parsed.words[0]).map_err(|text| (text, USAGE))?;
            let (resource, device) =
                device(resources, minor).ok_or_else(|| unknown("No such device"))?;
            match parsed.verb.name {
                "dstate" => Ok(dstate(resource, device)),
                _ => Ok(udev(resource, device)),
            }
        }
        name => {
            let peer = number(&parsed.words[1])?;
            let connection = resource().and_then(|r| connection(r, peer));
            match name {
                "cstate" | "peer-role" => {
                    let found = connection.ok_or_else(|| unknown("No such connection"))?;
                    let state = found.state.text();
                    Ok(if name == "cstate" {
                        state
                    } else {
                        found.role.text()
                    }
                    .to_owned())
                }
                _ => {
                    let volume = number(&parsed.words[2])?;
                    let line = gi_line(resource(), connection, volume)?;
                    Ok(if name == "show-gi" {
                        gi::with_legend(&line)
                    } else {
                        line
                    })
                }
            }
        }
    }
}

fn gi_line(
    resource: Option<&ResourceReport>,
    connection: Option<&ConnectionReport>,
    volume: u32,
) -> QueryResult {
    let none = || ("No such peer device".to_owned(), UNKNOWN_OBJECT);
    let of_volume = |number: u16| u32::from(number) == volume;
    let resource = resource.ok_or_else(none)?;
    let peer_device = connection
        .and_then(|c| c.peer_devices.iter().find(|p| of_volume(p.volume)))
        .ok_or_else(none)?;
    let device = resource
        .devices
        .iter()
        .find(|d| of_volume(d.volume))
        .ok_or_else(none)?;
    match device.disk {
        Some(_) => Ok(gi::line(device, peer_device)),
        None => Err(("Device has no disk".to_owned(), 1)),
    }
}

fn device(resources: &[ResourceReport], minor: u32) -> Option<(&ResourceReport, &DeviceReport)> {
    resources
        .iter()
        .find_map(|r| Some((r, r.devices.iter().find(|d| d.minor == minor)?)))
}

fn connection(resource: &ResourceReport, peer: u32) -> Option<&ConnectionReport> {
    resource
        .connections
        .iter()
        .find(|c| u32::from(c.peer_node_id) == peer)
}

fn dstate(resource: &ResourceReport, device: &DeviceReport) -> String {
    let mut line = device.disk_state.text().to_owned();
    for connection in &resource.connections {
        for peer in connection
            .peer_devices
            .iter()
            .filter(|p| p.volume == device.volume)
        {
            line.push('/');
            line.push_str(peer.disk_state.text());
        }
    }
    line
}

fn udev(resource: &ResourceReport, device: &DeviceReport) -> String {
    let mut out = format!(
        "DEVICE=drbd{}\nSYMLINK_BY_RES=drbd/by-res/{}/{}",
        device.minor, resource.name, device.volume
    );
    if let Some(disk) = &device.disk {
        let path = disk
            .data_path
            .strip_prefix("/dev/")
            .unwrap_or(&disk.data_path);
        let path = path.trim_start_matches('/');
        out.push_str(&format!("\nSYMLINK_BY_DISK=drbd/by-disk/{path}"));
    }
    out
}

fn waiting(place: &Place, parsed: &mut Parsed) -> u8 {
    let mut seconds = |name: &str| {
        let given = parsed.take_number(name).unwrap_or(0);
        u64::try_from(given).unwrap_or(0)
    };
    let (limits, notices) = wait::Limits::of_seconds(
        seconds("wfc-timeout"),
        seconds("degr-wfc-timeout"),
        seconds("outdated-wfc-timeout"),
    );
    for notice in notices {
        eprintln!("{notice}");
    }
    let after_split_brain = parsed.take_bool("wait-after-sb").unwrap_or(false);
    let number = |at: usize| {
        parsed
            .words
            .get(at)
            .map(|text| args::number("argument", text))
    };
    let (peer, volume) = match (number(1).transpose(), number(2).transpose()) {
        (Ok(peer), Ok(volume)) => (peer, volume),
        (Err(text), _) | (_, Err(text)) => {
            eprintln!("{text}");
            return USAGE;
        }
    };
    let wanted = wait::Wanted {
        sync: parsed.verb.name.starts_with("wait-sync"),
        peer,
        volume,
        limits,
        after_split_brain,
    };
    let resource = &parsed.words[0];
    let waited =
        Client::connect(place).and_then(|mut client| wait::wait(&mut client, resource, wanted));
    match waited {
        Ok(wait::Waited::Done) => 0,
        Ok(wait::Waited::TimedOut) => 5,
        Err(error) => lost(resource, &error),
    }
}

/// Every resource is downed; the first failure is the result.
fn down_all(place: &Place) -> u8 {
    let resources = match reports(place, None) {
        Ok(resources) => resources,
        Err(ClientError::NotRunning { .. }) => return 0,
        Err(error) => return lost("all", &error),
    };
    let mut result = 0;
    for resource in resources {
        let args = ["down".to_owned(), resource.name];
        let code = run_to_code(&args);
        if result == 0 {
            result = code;
        }
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ask(line: &str) -> QueryResult {
        let args: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
        query_line(&[sample::web()], &args::parse(&args).unwrap())
    }

    #[test]
    fn small_queries_answer_in_one_word() {
        assert_eq!(ask("role web").unwrap(), "Primary");
        assert_eq!(ask("cstate web 2").unwrap(), "Connecting");
        assert_eq!(ask("peer-role web 1").unwrap(), "Secondary");
        assert_eq!(ask("dstate 10").unwrap(), "UpToDate/Inconsistent/DUnknown");
        assert_eq!(ask("10 dstate").unwrap(), "UpToDate/Inconsistent/DUnknown");
        assert_eq!(
            ask("udev 10").unwrap(),
            "DEVICE=drbd10\nSYMLINK_BY_RES=drbd/by-res/web/0\n\
             SYMLINK_BY_DISK=drbd/by-disk/vg0/web0"
        );
    }

    #[test]
    fn a_disk_that_cannot_be_opened_is_named_before_the_daemon_is_asked() {
        assert_eq!(can_be_opened(&["ram:1M", "internal", "/dev/null"]), Ok(()));
        let missing = can_be_opened(&["/dev/null", "/nonexistent/disk"]).unwrap_err();
        assert!(
            missing.starts_with("Can not open device '/nonexistent/disk': No such file"),
            "{missing}"
        );
    }

    #[test]
    fn unknown_objects_have_the_codes_that_scripts_test() {
        assert_eq!(
            ask("role nope").unwrap_err(),
            ("Unknown resource".into(), 10)
        );
        assert_eq!(
            ask("cstate web 7").unwrap_err(),
            ("No such connection".into(), 10)
        );
        assert_eq!(ask("dstate 99").unwrap_err(), ("No such device".into(), 10));
        assert_eq!(
            ask("get-gi web 1 9").unwrap_err(),
            ("No such peer device".into(), 10)
        );
        assert_eq!(
            ask("get-gi web 1 1").unwrap_err(),
            ("Device has no disk".into(), 1)
        );
    }
}
