//! `drbdadm`: reads the configuration and makes the calls of `drbdsetup` and `drbdmeta` that bring
//! the running state to it.
//!
//! It never talks to the daemon itself: everything it does can be seen with `--dry-run`. All of the
//! configuration is checked before the first call is made.

mod actions;
mod adjust;
mod args;
mod calls;
mod commands;
mod deferred;
mod execute;
mod files;
mod help;
mod proxy;
mod queries;
mod system;
mod targets;

use std::io::Write;
use std::path::Path;
use std::process::ExitCode;
use std::rc::Rc;

use lockstep_daemon::handlers::HandlerEntry;
use lockstep_format::conf::model::{Config, Resource, Settings, SourceFile};
use lockstep_format::conf::options;
use lockstep_format::conf::parse::{Diagnostic, ParseOptions, Severity, parse};
use lockstep_format::conf::resolve::{Node, check_proxied, inherit, resolve, resync_after_minor};

use args::Args;
use commands::{Action, Command};
use execute::Executor;
use system::System;
use targets::Target;

/// Runs `drbdadm`. The first word is the name by which it was called.
pub(crate) fn run(words: &[String]) -> ExitCode {
    let program = words.first().map_or("drbdadm", String::as_str);
    let rest = words.get(1..).unwrap_or_default();
    // Not locked: calls that run within this process speak from threads of their own.
    let (mut out, mut err) = (std::io::stdout(), std::io::stderr());
    let code = run_with(&System::real(program), rest, &mut out, &mut err);
    let _ = out.flush();
    ExitCode::from(code)
}

/// What the configuration says of a handler of a resource, as `drbdadm -c config HANDLER RESOURCE`
/// would find it.
pub(crate) fn handler_entry(
    directory: &Path,
    config: &Path,
    resource: &str,
    handler: &str,
) -> HandlerEntry {
    let mut system = System::real("drbdadm");
    system.directory = Some(directory.to_owned());
    find_handler(&system, config, resource, handler).unwrap_or(HandlerEntry::Unknown)
}

/// None where the configuration cannot be read, or has the resource for something else.
fn find_handler(
    system: &System,
    config: &Path,
    resource: &str,
    handler: &str,
) -> Option<HandlerEntry> {
    let words = ["-c", config.to_str()?, handler, resource].map(str::to_owned);
    let args = args::parse(&words).ok()?;
    let command = args.command?;
    let mut silent = std::io::sink();
    let node_name = system.node_name(None, &mut silent);
    let config = load(system, &args, command, &node_name, &mut silent).ok()?;
    let Ok(target) = targets::find(&config, resource) else {
        return Some(HandlerEntry::NoResource);
    };
    let resource = target.resource(&config);
    if resource.lower().is_some() {
        return None;
    }
    Some(match queries::handler_command(resource, command.name) {
        Some(_) => HandlerEntry::Command,
        None => HandlerEntry::Nothing,
    })
}

/// Commands and options, for completions and manual pages.
pub(crate) fn words() -> Vec<crate::words::Command> {
    commands::COMMANDS
        .iter()
        .filter(|command| command.shown != commands::Shown::Nowhere)
        .map(|command| crate::words::Command {
            name: command.name,
            summary: String::new(),
            options: command.options().iter().map(|(name, _)| *name).collect(),
        })
        .collect()
}

/// Runs a command line on a system; returns the exit code.
fn run_with(system: &System, words: &[String], out: &mut dyn Write, err: &mut dyn Write) -> u8 {
    let args = match args::parse(words) {
        Ok(args) => args,
        Err(text) => {
            let _ = err.write_all(text.as_bytes());
            return EXIT_USAGE;
        }
    };
    if args.version {
        let _ = out.write_all(help::version(system.module_version).as_bytes());
        return 0;
    }
    if args.help {
        let _ = out.write_all(help::usage(args.command).as_bytes());
        return if args.command.is_some() {
            0
        } else {
            EXIT_USAGE
        };
    }
    let Some(command) = args.command else {
        let _ = out.write_all(help::usage(None).as_bytes());
        let _ = writeln!(err, "No command specified");
        return EXIT_USAGE;
    };
    if let Some(current) = args.renamed {
        let old = if current == "role" {
            "state"
        } else {
            "outdate-peer"
        };
        let _ = writeln!(
            err,
            "'drbdadm {old}' is deprecated, use 'drbdadm {current}' instead."
        );
    }
    if command.action == Action::HiddenCommands {
        let _ = out.write_all(help::hidden_commands().as_bytes());
        return 0;
    }
    let may_test = matches!(command.action, Action::Dump | Action::DumpXml | Action::Nop);
    if !args.config_to_test.is_empty() && !may_test {
        let _ = writeln!(
            err,
            "The --config-to-test (-t) option is only allowed with the dump and sh-nop commands"
        );
        return EXIT_USAGE;
    }
    let node_name = system.node_name(args.directory.as_deref(), err);
    let config = match load(system, &args, command, &node_name, err) {
        Ok(config) => Rc::new(config),
        Err(code) => return code,
    };
    let executor = system.executor(&args, &config.global);
    let mut app = App {
        system,
        args: &args,
        command,
        config,
        node_name,
        executor,
        out,
        err,
        ended: false,
    };
    let code = app.dispatch();
    let _ = app.out.flush();
    code
}

/// Everything that the actions work with.
struct App<'a> {
    system: &'a System,
    args: &'a Args,
    command: &'static Command,
    config: Rc<Config>,
    node_name: String,
    executor: Executor,
    out: &'a mut dyn Write,
    err: &'a mut dyn Write,
    /// Whether the remaining objects are left alone.
    ended: bool,
}

/// Reads, checks and completes the configuration. The error is the exit code.
fn load(
    system: &System,
    args: &Args,
    command: &Command,
    node_name: &str,
    err: &mut dyn Write,
) -> Result<Config, u8> {
    let main = system.main_config(args, command);
    let mut sources = vec![source(&main, err)?];
    let options = ParseOptions {
        module_version: system.module_version,
        excluded: args
            .config_to_exclude
            .iter()
            .map(|path| system::real_path(path))
            .collect(),
        ..ParseOptions::default()
    };
    for path in &args.config_to_test {
        sources.push(source(path, err)?);
    }
    let mut parsed = parse(&sources, &mut files::Disk, &options);
    report(&parsed.diagnostics, err);
    if !parsed.is_valid() {
        return Err(EXIT_CONFIG);
    }
    let config = &mut parsed.config;
    let node = Node {
        name: node_name,
        has_address: &*system.has_address,
    };
    check(resolve(config, &node), err)?;
    let is_dump = matches!(command.action, Action::Dump | Action::DumpXml);
    if !is_dump || args.dry_run || args.verbose > 0 {
        let checked = check(inherit(config), err);
        let needs_options = !matches!(
            (command.action, args.objects.is_empty()),
            (Action::Status, true) | (Action::ShResources | Action::ShModParms, _)
        );
        if needs_options {
            checked?;
            check(check_proxied(config), err)?;
        }
    }
    check_resync_after(config, system.is_interactive, err)?;
    Ok(parsed.config)
}

/// Reads one file that was named directly; `-` is stdin.
fn source(path: &str, err: &mut dyn Write) -> Result<(SourceFile, String), u8> {
    use lockstep_format::conf::parse::Files;
    if path == "-" {
        let mut text = String::new();
        if let Err(error) = std::io::Read::read_to_string(&mut std::io::stdin(), &mut text) {
            let _ = writeln!(err, "Can not read the configuration from stdin: {error}");
            return Err(EXIT_CONFIG);
        }
        let name = "STDIN".to_owned();
        return Ok((
            SourceFile {
                shown: name.clone(),
                path: name,
            },
            text,
        ));
    }
    match files::Disk.read(path) {
        Ok(found) => Ok((
            SourceFile {
                shown: path.to_owned(),
                path: found.path,
            },
            found.text,
        )),
        Err(error) => {
            let _ = writeln!(err, "Can not open '{path}': {error}");
            Err(EXIT_CONFIG)
        }
    }
}

/// Prints messages; an error among them ends the run.
fn check(diagnostics: Vec<Diagnostic>, err: &mut dyn Write) -> Result<(), u8> {
    report(&diagnostics, err);
    let bad = diagnostics
        .iter()
        .any(|found| found.severity == Severity::Error);
    if bad { Err(EXIT_CONFIG) } else { Ok(()) }
}

fn report(diagnostics: &[Diagnostic], err: &mut dyn Write) {
    for found in diagnostics {
        let _ = writeln!(err, "{}", found.text);
    }
}

/// Refers `resync-after` to a resource that is there. Without a terminal such a reference is
/// dropped instead of being an error, for a cluster manager must not fail because of it.
fn check_resync_after(
    config: &mut Config,
    is_interactive: bool,
    err: &mut dyn Write,
) -> Result<(), u8> {
    let mut unknown = Vec::new();
    for resource in &config.resources {
        for volume in resource
            .my_host()
            .into_iter()
            .flat_map(|host| &host.effective)
        {
            let settings = &volume.settings.disk.0;
            for setting in settings
                .iter()
                .filter(|setting| setting.name == "resync-after")
            {
                if resync_after_minor(config, &setting.value).is_none() {
                    let found = (&resource.name, setting.value.clone(), setting.pos);
                    if !unknown.contains(&found) {
                        unknown.push(found);
                    }
                }
            }
        }
    }
    for (resource, value, pos) in &unknown {
        let place = config.shown_place(*pos);
        let what = resync_after_fault(config, value);
        let _ = writeln!(err, "{place}: in resource {resource}:\n\t{what}");
    }
    if !unknown.is_empty() && is_interactive {
        return Err(EXIT_CONFIG);
    }
    drop_unknown_resync_after(config);
    Ok(())
}

/// Everywhere, so that a dump shows what holds; in resources of other nodes as well.
fn drop_unknown_resync_after(config: &mut Config) {
    let all = config.resources.iter().flat_map(disk_settings);
    let values = all.filter_map(|settings| settings.get("resync-after"));
    let known: Vec<String> = values
        .filter(|value| resync_after_minor(config, value).is_some())
        .map(str::to_owned)
        .collect();
    for resource in &mut config.resources {
        let hosts = resource.hosts.iter_mut();
        let volumes = hosts.flat_map(|host| host.volumes.iter_mut().chain(&mut host.effective));
        let volumes = volumes.chain(&mut resource.volumes);
        let sections = std::iter::once(&mut resource.sections.disk);
        for settings in sections.chain(volumes.map(|volume| &mut volume.settings)) {
            settings
                .disk
                .0
                .retain(|setting| setting.name != "resync-after" || known.contains(&setting.value));
        }
    }
}

/// Disk options of a resource and its volumes.
fn disk_settings(resource: &Resource) -> impl Iterator<Item = &Settings> {
    let hosts = resource.hosts.iter();
    let volumes = hosts.flat_map(|host| host.volumes.iter().chain(&host.effective));
    let volumes = volumes.chain(&resource.volumes);
    let sections = std::iter::once(&resource.sections.disk.disk);
    sections.chain(volumes.map(|volume| &volume.settings.disk))
}

/// What is wrong with a value of `resync-after`.
fn resync_after_fault(config: &Config, value: &str) -> String {
    let (name, number) = match value.split_once('/') {
        Some((name, number)) => (name, Some(number)),
        None => (value, None),
    };
    let Some(resource) = config.resource(name) else {
        return format!("resource '{value}' mentioned in 'resync-after' option is not known.");
    };
    match (resource.my_host(), number) {
        (None, _) => format!(
            "resource '{value}' mentioned in 'resync-after' option is not known on this host."
        ),
        (Some(_), Some(number)) => format!("resource '{name}' has no volume {number}"),
        (Some(host), None) => format!(
            "resync-after contains '{value}', which is ambiguous, since it contains {} volumes",
            host.effective.len()
        ),
    }
}

/// What the objects of the command line gave.
struct Objects {
    targets: Vec<Target>,
    /// 1 when some object is unknown, else 0.
    code: u8,
}

impl App<'_> {
    /// Finds the objects; says which are unknown.
    fn objects(&mut self) -> Objects {
        let mut objects = Objects {
            targets: Vec::new(),
            code: 0,
        };
        if self.means_all() {
            objects.targets = targets::all(&self.config, self.args.stacked);
            return objects;
        }
        for word in &self.args.objects {
            match targets::find(&self.config, word) {
                // Twice the same would create or begin the same thing twice.
                Ok(target) if objects.targets.contains(&target) => {}
                Ok(target) => objects.targets.push(target),
                Err(text) => {
                    let names = self
                        .config
                        .resources
                        .iter()
                        .map(|known| known.name.as_str());
                    let name = word.split([':', '/']).next().unwrap_or(word);
                    let near = options::nearest(name, names).filter(|near| *near != name);
                    let _ = self.err.write_all(text.as_bytes());
                    if let Some(near) = near {
                        let _ = writeln!(self.err, "\tdid you mean '{near}'?");
                    }
                    objects.code = EXIT_USAGE;
                }
            }
        }
        objects
    }

    /// Looks whether our own addresses are on this machine, unless that is switched off.
    fn addresses_are_ours(&mut self, targets: &[Target]) -> bool {
        let dry_without_terminal = self.args.dry_run && !self.system.is_interactive;
        if self.config.global.disable_ip_verification || dry_without_terminal {
            return true;
        }
        let mut fine = true;
        for target in targets {
            let resource = target.resource(&self.config);
            let Some(host) = resource.my_host() else {
                continue;
            };
            // As with the original, only the address of the host's section: those of connections
            // and paths may be translated on the way.
            for address in host
                .address
                .iter()
                .filter(|address| !(self.system.has_address)(address))
            {
                let place = self.config.place(host.pos);
                let (name, node, ip) = (&resource.name, &self.node_name, &address.host);
                let _ = writeln!(
                    self.err,
                    "{place}: in resource {name}, on {node}:\n\tIP {ip} not found on this host."
                );
                fine = false;
            }
        }
        fine
    }
}

/// Wrong use, or an unknown object.
const EXIT_USAGE: u8 = 1;
/// Invalid configuration.
const EXIT_CONFIG: u8 = 10;

#[cfg(test)]
mod tests;
