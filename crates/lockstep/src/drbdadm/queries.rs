//! Commands that only print: dumps, values for scripts; and handlers, which only run a shell.

use std::collections::BTreeMap;
use std::rc::Rc;

use lockstep_format::conf::model::{Config, Disk, Resource, Volume};
use lockstep_format::conf::resolve::add_names;
use lockstep_format::conf::{dump, dump_xml};

use super::calls::{Call, Program};
use super::commands::Action;
use super::targets::{self, Target};
use super::{App, EXIT_CONFIG, EXIT_USAGE};

impl App<'_> {
    /// `dump` and `dump-xml`, of everything or of the named resources.
    pub(super) fn dump(&mut self) -> u8 {
        let is_xml = self.command.action == Action::DumpXml;
        let everything = self.args.objects.is_empty() || self.means_all();
        if everything {
            let mut own = targets::all(&self.config, false);
            own.extend(targets::all(&self.config, true));
            if !self.addresses_are_ours(&own) {
                return EXIT_CONFIG;
            }
            let text = match is_xml {
                true => dump_xml::config(&self.config),
                false => {
                    let parts = self.config.resources.iter();
                    let parts =
                        parts.map(|part| dump::resource(&self.config, part, &self.node_name));
                    dump::head(&self.config) + &parts.collect::<String>()
                }
            };
            return self.print(&text);
        }
        for resource in &mut Rc::make_mut(&mut self.config).resources {
            add_names(resource);
        }
        let objects = self.objects();
        if let Some(code) = self.refuse(&objects.targets) {
            return code;
        }
        self.addresses_are_ours(&objects.targets);
        for target in &objects.targets {
            let resource = target.resource(&self.config);
            let text = match is_xml {
                true => dump_xml::resource(&self.config, resource),
                false => dump::resource(&self.config, resource, &self.node_name),
            };
            self.print(&text);
        }
        objects.code
    }

    fn print(&mut self, text: &str) -> u8 {
        let _ = self.out.write_all(text.as_bytes());
        0
    }

    pub(super) fn sh_resources(&mut self) -> u8 {
        for target in targets::all(&self.config, self.args.stacked) {
            let name = target.resource(&self.config).name.clone();
            self.print(&format!("{name}\n"));
        }
        0
    }

    pub(super) fn sh_config_files(&mut self) -> u8 {
        for resource in &self.config.resources {
            let place = self.config.place(resource.pos);
            let _ = writeln!(self.out, "{place}:{}", resource.name);
        }
        0
    }

    pub(super) fn sh_mod_parms(&mut self) -> u8 {
        let hosts = self.config.resources.iter().filter_map(Resource::my_host);
        let minors: usize = hosts.map(|host| host.effective.len()).sum();
        let computed = (minors + 3).clamp(32, 255);
        let count = self
            .config
            .global
            .minor_count
            .map_or(computed, |count| count as usize);
        self.print(&format!("minor_count={count}\n"))
    }

    pub(super) fn sh_lower(&mut self, resource: &Resource) -> u8 {
        match resource.lower() {
            Some(lower) if self.args.stacked => {
                let text = format!("{lower}\n");
                self.print(&text)
            }
            _ => {
                let _ = writeln!(self.err, "sh-lower-resource only available in stacked mode");
                EXIT_USAGE
            }
        }
    }

    pub(super) fn sh_volume(&mut self, resource: &Resource, volume: &Volume) -> u8 {
        let minor = volume.minor().unwrap_or_default();
        let value = match self.command.name {
            "sh-resource" => resource.name.clone(),
            "sh-dev" => format!("/dev/drbd{minor}"),
            "sh-minor" => minor.to_string(),
            "sh-ll-dev" => volume.disk_path().unwrap_or("none").to_owned(),
            "sh-md-dev" => volume.meta_device().unwrap_or("none").to_owned(),
            _ => match &volume.meta_disk {
                Some(meta) => meta.attach_index(),
                None => "none".to_owned(),
            },
        };
        self.print(&format!("{value}\n"))
    }

    pub(super) fn sh_ip(&mut self, config: &Config, target: &Target) -> u8 {
        for view in target.connections(config) {
            for path in &view.paths {
                let _ = writeln!(self.out, "{}", path.own.host);
            }
        }
        0
    }

    pub(super) fn sh_udev(&mut self, resource: &Resource, volume: &Volume) -> u8 {
        let minor = volume.minor().unwrap_or_default();
        let short = volume.implicit && !self.config.global.udev_always_use_vnr;
        let name = match short {
            true => resource.name.clone(),
            false => format!("{}/{}", resource.name, volume.number),
        };
        let name = name.replace(' ', "_");
        let mut text = format!(
            "DEVICE=drbd{minor}\nSYMLINK=drbd/by-res/{name}\nSYMLINK_BY_RES=drbd/by-res/{name}\n"
        );
        if let Some(Disk::Path(path)) = &volume.disk {
            let path = path.strip_prefix("/dev/").unwrap_or(path);
            text.push_str(&format!("SYMLINK_BY_DISK=drbd/by-disk/{path}\n"));
        }
        self.print(&text)
    }

    /// Runs the command of a handler with the environment that handlers expect.
    pub(super) fn handler(&mut self, config: &Config, target: &Target) -> u8 {
        let resource = target.resource(config);
        let command = handler_command(resource, self.command.name);
        let Some(command) = command else { return 0 };
        let words = vec!["-c".to_owned(), command.to_owned()];
        let call = Call {
            program: Program::Shell,
            words,
        };
        if self.executor.dry_run {
            return self.call(&resource.name, &call);
        }
        let _ = self.out.flush();
        let status = self
            .executor
            .command(&call)
            .envs(environment(config, target))
            .status();
        match status {
            Ok(status) => status
                .code()
                .and_then(|code| u8::try_from(code).ok())
                .unwrap_or(20),
            Err(error) => {
                let _ = writeln!(self.err, "Can not exec {}: {error}", Program::Shell.name());
                20
            }
        }
    }
}

/// What a resource's configuration has for a handler.
pub(super) fn handler_command<'a>(resource: &'a Resource, name: &str) -> Option<&'a str> {
    let handlers = &resource.sections.handlers;
    let old_name = (name == "fence-peer").then_some("outdate-peer");
    handlers
        .get(name)
        .or(old_name.and_then(|old| handlers.get(old)))
}

/// Variables for a handler besides those that the engine has set.
fn environment(config: &Config, target: &Target) -> BTreeMap<String, String> {
    let resource = target.resource(config);
    let mut all = BTreeMap::new();
    if let Some(file) = config.files.first() {
        all.insert("DRBD_CONF".to_owned(), file.path.clone());
    }
    all.insert("DRBD_RESOURCE".to_owned(), resource.name.clone());
    for host in &resource.hosts {
        if let Some(id) = host.node_id {
            all.insert(format!("DRBD_NODE_ID_{id}"), host.names.join(" "));
        }
    }
    let own = resource.my_host().and_then(|host| host.node_id);
    if let (Some(id), None) = (own, std::env::var_os("DRBD_MY_NODE_ID")) {
        all.insert("DRBD_MY_NODE_ID".to_owned(), id.to_string());
    }
    let volumes = target.volumes(config);
    let joined = |value: &dyn Fn(&Volume) -> String| {
        volumes
            .iter()
            .map(|volume| value(volume))
            .collect::<Vec<_>>()
            .join(" ")
    };
    let minor = |volume: &Volume| volume.minor().unwrap_or_default().to_string();
    all.insert("DRBD_MINOR".to_owned(), joined(&minor));
    all.insert(
        "DRBD_VOLUME".to_owned(),
        joined(&|volume| volume.number.to_string()),
    );
    let disk = |volume: &Volume| volume.disk_path().unwrap_or("none").to_owned();
    all.insert("DRBD_LL_DISK".to_owned(), joined(&disk));
    all
}
