//! What the commands do.

use std::rc::Rc;
use std::time::{Duration, Instant};

use lockstep_format::conf::model::{Config, Resource, Volume};
use lockstep_format::conf::parse::parse_show;
use lockstep_format::conf::resolve::{ConnectionView, add_names};

use super::adjust::{self, Wishes};
use super::calls::{self, Call, OptionWords};
use super::commands::{Action, TimeClass};
use super::deferred::{self, AfterFailure, Schedule, Stage, Work};
use super::execute::{EXIT_EXEC, ErrorOutput};
use super::targets::Target;
use super::{App, EXIT_CONFIG, EXIT_USAGE, help, proxy};

impl App<'_> {
    /// Runs the command; returns the exit code.
    pub(super) fn dispatch(&mut self) -> u8 {
        let ignores_objects = matches!(
            self.command.action,
            Action::Nop
                | Action::ShResources
                | Action::ShConfigFiles
                | Action::ShModParms
                | Action::WaitAll
        );
        if ignores_objects && !self.args.objects.is_empty() {
            let _ = writeln!(self.err, "This command will ignore resource names!");
        }
        match self.command.action {
            Action::Nop => 0,
            Action::Dump | Action::DumpXml => self.dump(),
            Action::ShResources => self.sh_resources(),
            Action::ShConfigFiles => self.sh_config_files(),
            Action::ShModParms => self.sh_mod_parms(),
            Action::Status if self.args.objects.is_empty() => self.status(None),
            Action::WaitAll => self.wait_all(),
            _ => self.on_objects(),
        }
    }

    fn on_objects(&mut self) -> u8 {
        if self.args.objects.is_empty() {
            let usage = help::usage(Some(self.command));
            let _ = self.out.write_all(usage.as_bytes());
            let _ = writeln!(self.err, "No resource names specified");
            return EXIT_USAGE;
        }
        if self.command.action != Action::Handler {
            for resource in &mut Rc::make_mut(&mut self.config).resources {
                add_names(resource);
            }
        }
        if self.config.resources.is_empty() {
            let _ = writeln!(self.err, "no resources defined!");
            return EXIT_USAGE;
        }
        if self.means_all() && self.nothing_here() {
            return EXIT_USAGE;
        }
        let objects = self.objects();
        if let Some(code) = self.refuse(&objects.targets) {
            return code;
        }
        if self.command.checks_addresses
            && !(self.command.action == Action::Adjust && self.args.flag("skip-net"))
            && !self.addresses_are_ours(&objects.targets)
        {
            return EXIT_CONFIG;
        }
        let deferred = matches!(
            self.command.action,
            Action::Up | Action::Adjust | Action::ListAdjustable
        );
        if deferred {
            // Nothing is begun when an object is unknown.
            return match objects.code {
                0 => self.run_deferred(&objects.targets),
                code => code,
            };
        }
        let mut code = objects.code;
        for target in &objects.targets {
            let found = self.on_target(target);
            if found >= EXIT_EXEC || self.ended {
                return found;
            }
            code = code.max(found);
        }
        let is_proxy = matches!(self.command.action, Action::ProxyUp | Action::ProxyDown);
        if is_proxy && self.means_all() && !self.has_proxy(&objects.targets) {
            self.say_nothing_here();
            return EXIT_USAGE;
        }
        code
    }

    /// Says so when `all` is nothing on this node.
    fn nothing_here(&mut self) -> bool {
        let stacked = self.args.stacked;
        if !super::targets::all(&self.config, stacked).is_empty()
            || self
                .config
                .resources
                .iter()
                .any(|resource| resource.proxy_only)
        {
            return false;
        }
        self.say_nothing_here();
        true
    }

    fn say_nothing_here(&mut self) {
        let node = &self.node_name;
        let _ = match self.args.stacked {
            true => writeln!(
                self.err,
                "WARN: nothing stacked for this host ({node}), nothing to do in stacked mode!"
            ),
            false => writeln!(
                self.err,
                "WARN: no normal resources defined for this host ({node})!?\n\
                 Misspelled name of the local machine with the 'on' keyword ?"
            ),
        };
    }

    /// Whether the objects are `all`; what else may stand there does not count then.
    pub(super) fn means_all(&self) -> bool {
        self.args.objects.first().is_some_and(|word| word == "all")
    }

    fn has_proxy(&self, targets: &[Target]) -> bool {
        targets.iter().any(|target| {
            let views = target.connections(&self.config);
            let mut own = views
                .iter()
                .filter_map(|view| proxy::own_path(view, &self.node_name));
            own.next().is_some()
        })
    }

    /// Objects that the command cannot work on.
    pub(super) fn refuse(&mut self, targets: &[Target]) -> Option<u8> {
        let name = self.command.name;
        let whole = self.command.is_for_whole_resources();
        let must_choose = self.command.one_volume && !self.means_all();
        for target in targets {
            if target.is_sole_volume(&self.config) {
                continue;
            }
            let resource = &target.resource(&self.config).name;
            if whole && target.volume.is_some() {
                let _ = writeln!(
                    self.err,
                    "{name} operates on whole resources, but you specified a specific volume!"
                );
                return Some(EXIT_USAGE);
            }
            if must_choose && target.volume.is_none() {
                let _ = writeln!(
                    self.err,
                    "{name} requires a specific volume id, but none is specified.\n\
                     Try '{name} minor-<minor_number>' or '{name} {resource}/<vnr>'"
                );
                return Some(EXIT_USAGE);
            }
        }
        None
    }

    fn on_target(&mut self, target: &Target) -> u8 {
        let config = Rc::clone(&self.config);
        let resource = target.resource(&config);
        match self.command.action {
            Action::SetupResource => self.setup_resource(&config, resource),
            Action::Role => self.role(&config, target),
            Action::Status => self.status(Some(&resource.name)),
            Action::WaitConnect => self.wait(&config, target, "wait-connect"),
            Action::WaitSync => self.wait(&config, target, "wait-sync"),
            Action::Handler => self.handler(&config, target),
            Action::ShLower => self.sh_lower(resource),
            Action::SetupConnection | Action::SetupPath | Action::ForgetPeer => {
                self.each_connection(&config, target)
            }
            Action::ProxyUp | Action::ProxyDown => self.each_proxy(&config, target),
            _ => self.each_volume(&config, target),
        }
    }

    fn each_volume(&mut self, config: &Config, target: &Target) -> u8 {
        let resource = target.resource(config);
        for (index, volume) in target.volumes(config).into_iter().enumerate() {
            let code = match self.command.action {
                Action::ShVolume if self.command.name == "sh-resource" && index > 0 => 0,
                // Of a volume without peers nothing is asked, and so no disk.
                Action::Generations | Action::SetGenerations
                    if resource.hosts.len() > 1 && target.connections(config).is_empty() =>
                {
                    0
                }
                _ if self.command.needs_disk() && volume.disk_path().is_none() => {
                    self.end_for_lack_of_a_disk()
                }
                Action::SetupPeerDevice | Action::Generations | Action::SetGenerations => {
                    self.each_peer_device(config, target, volume)
                }
                Action::ShIp => self.sh_ip(config, target),
                _ => self.on_volume(config, target, resource, volume),
            };
            if code != 0 {
                return code;
            }
        }
        0
    }

    /// As with the original nothing more is done, not even for the other resources.
    fn end_for_lack_of_a_disk(&mut self) -> u8 {
        let _ = writeln!(
            self.err,
            "The {} command requires a local disk, but the configuration gives none.",
            self.command.name
        );
        self.ended = true;
        EXIT_CONFIG
    }

    fn on_volume(
        &mut self,
        config: &Config,
        target: &Target,
        resource: &Resource,
        volume: &Volume,
    ) -> u8 {
        let args = self.args;
        let words = OptionWords {
            config,
            cli: &args.options,
        };
        let name = &resource.name;
        let minor = volume.minor().unwrap_or_default().to_string();
        match self.command.action {
            Action::Attach => {
                for call in deferred::attach_calls(&words, volume) {
                    let code = self.call(name, &call);
                    if code != 0 {
                        return code;
                    }
                }
                0
            }
            Action::Invalidate => self.invalidate(target, resource, volume),
            Action::Outdate => self.outdate(resource, volume),
            Action::Resize => self.resize(resource, volume),
            Action::CheckResize => self.check_resize(resource, volume),
            Action::DiskState => self.disk_state(resource, volume),
            Action::CreateMd => self.create_md(config, resource, volume),
            Action::Meta => {
                let mut call = Call::meta(volume, [self.command.name]).with_options(&args.options);
                if self.command.name == "dump-superblock" && args.option("output-format").is_none()
                {
                    call = call.with(["--output-format=json".to_owned()]);
                }
                self.call(name, &call)
            }
            Action::ShVolume => self.sh_volume(resource, volume),
            Action::ShUdev => self.sh_udev(resource, volume),
            _ => {
                let call = match self.command.name {
                    "new-minor" => words.new_minor(resource, volume),
                    "disk-options" => words.disk_options(volume, &[]),
                    command => Call::setup([command, &minor]).with_options(&args.options),
                };
                let code = self.call(name, &call);
                if code == 0 {
                    self.register(&call);
                }
                code
            }
        }
    }

    fn setup_resource(&mut self, config: &Config, resource: &Resource) -> u8 {
        let args = self.args;
        let call = match self.command.name {
            "new-resource" => OptionWords {
                config,
                cli: &args.options,
            }
            .new_resource(resource),
            command => Call::setup([command, &resource.name]).with_options(&args.options),
        };
        let code = self.call(&resource.name, &call);
        if code == 0 {
            self.register(&call);
        }
        code
    }

    fn each_connection(&mut self, config: &Config, target: &Target) -> u8 {
        let resource = target.resource(config);
        let args = self.args;
        let words = OptionWords {
            config,
            cli: &args.options,
        };
        for view in target.connections(config) {
            let command = self.command.name;
            let id = view.peer_node_id();
            let name = &resource.name;
            let calls: Vec<Call> = match self.command.action {
                Action::SetupPath => view
                    .paths
                    .iter()
                    .map(|path| calls::path(command, name, id, path))
                    .collect(),
                Action::ForgetPeer => {
                    let code = self.forget_peer(config, target, &view);
                    if code != 0 {
                        return code;
                    }
                    continue;
                }
                _ if matches!(command, "new-peer" | "net-options") => {
                    vec![words.net(command, resource, &view, &[])]
                }
                _ => {
                    let call = Call::setup([command, name, &id.to_string()]);
                    vec![call.with_options(&args.options)]
                }
            };
            for call in calls {
                let code = self.call(name, &call);
                if code != 0 {
                    return code;
                }
            }
        }
        0
    }

    fn each_peer_device(&mut self, config: &Config, target: &Target, volume: &Volume) -> u8 {
        let resource = target.resource(config);
        let args = self.args;
        let words = OptionWords {
            config,
            cli: &args.options,
        };
        let name = &resource.name;
        let command = self.command.name;
        let set_generations = |id: &str| {
            let node = format!("--node-id={id}");
            Call::meta(volume, [&node, command]).with_options(&args.options)
        };
        if self.command.action == Action::SetGenerations && resource.hosts.len() == 1 {
            let id = resource
                .my_host()
                .and_then(|host| host.node_id)
                .unwrap_or_default();
            return self.call(name, &set_generations(&id.to_string()));
        }
        for view in target.connections(config) {
            let id = view.peer_node_id().to_string();
            let number = volume.number.to_string();
            let code = match self.command.action {
                Action::SetGenerations => self.call(name, &set_generations(&id)),
                Action::Generations => self.generations(resource, volume, &id),
                _ if command == "peer-device-options" => {
                    let call = words.peer_device(resource, &view, volume.number, &[]);
                    self.call(name, &call)
                }
                _ => {
                    let call = Call::setup([command, name, &id, &number]);
                    self.call(name, &call.with_options(&args.options))
                }
            };
            if code != 0 {
                return code;
            }
        }
        0
    }

    /// Runs or prints a call in the command's time class.
    pub(super) fn call(&mut self, resource: &str, call: &Call) -> u8 {
        self.call_with(resource, call, self.command.class, ErrorOutput::Shown)
    }

    fn call_with(
        &mut self,
        resource: &str,
        call: &Call,
        class: TimeClass,
        errors: ErrorOutput,
    ) -> u8 {
        self.executor
            .run(call, class, errors, resource, self.out, self.err)
    }

    /// Remembers the configuration of a resource or minor that was just created.
    fn register(&self, call: &Call) {
        let from_stdin = self.args.config_file.as_deref() == Some("-");
        if self.executor.dry_run || from_stdin || self.executor.directory.is_some() {
            return;
        }
        let link = match (call.words.first().map(String::as_str), &call.words[..]) {
            (Some("new-resource"), [_, name, ..]) => format!("drbd-resource-{name}.conf"),
            (Some("new-minor"), [_, _, minor, ..]) => format!("drbd-minor-{minor}.conf"),
            _ => return,
        };
        if let Some(file) = self.config.files.first() {
            self.system.register(&link, &file.path);
        }
    }

    fn invalidate(&mut self, target: &Target, resource: &Resource, volume: &Volume) -> u8 {
        let name = &resource.name;
        let minor = volume.minor().unwrap_or_default().to_string();
        let from = target
            .peer
            .map(|id| format!("--sync-from-peer-node-id={id}"));
        let call = Call::setup(["invalidate", &minor])
            .with_options(&self.args.options)
            .with(from);
        let code = self.call_with(name, &call, TimeClass::Short, ErrorOutput::OnlyFor(17));
        if matches!(code, 11 | 17) || (code == 0 && !self.executor.dry_run) {
            return code;
        }
        self.call(name, &Call::meta(volume, ["invalidate"]))
    }

    fn outdate(&mut self, resource: &Resource, volume: &Volume) -> u8 {
        let name = &resource.name;
        let minor = volume.minor().unwrap_or_default().to_string();
        // The extra resource name is what scripts see with the original (quirk 24.2).
        let call = Call::setup(["outdate", name, &minor]);
        let code = self.call_with(name, &call, TimeClass::Short, ErrorOutput::Hidden);
        let meta = Call::meta(volume, ["outdate"]);
        match code {
            0 if !self.executor.dry_run => 0,
            _ if volume.disk_path().is_none() => code,
            17 => 17,
            5 => match self.call(name, &meta) {
                0 => 0,
                _ => 5,
            },
            _ => self.call(name, &meta),
        }
    }

    fn disk_state(&mut self, resource: &Resource, volume: &Volume) -> u8 {
        let name = &resource.name;
        let minor = volume.minor().unwrap_or_default().to_string();
        let call = Call::setup(["dstate", &minor]);
        let code = self.call_with(name, &call, TimeClass::Short, ErrorOutput::Hidden);
        let done = (code == 0 && !self.executor.dry_run) || matches!(code, 11 | 17);
        if done || volume.disk_path().is_none() {
            return code;
        }
        self.call(name, &Call::meta(volume, ["dstate"]))
    }

    fn generations(&mut self, resource: &Resource, volume: &Volume, peer: &str) -> u8 {
        let name = &resource.name;
        let command = self.command.name;
        let call = Call::setup([command, name, peer, &volume.number.to_string()]);
        let code = self.call_with(name, &call, TimeClass::Short, ErrorOutput::Hidden);
        let done = (code == 0 && !self.executor.dry_run) || matches!(code, 11 | 17);
        if done {
            return code;
        }
        self.call(
            name,
            &Call::meta(volume, [&format!("--node-id={peer}"), command]),
        )
    }

    fn forget_peer(&mut self, config: &Config, target: &Target, view: &ConnectionView<'_>) -> u8 {
        let resource = target.resource(config);
        let name = &resource.name;
        let id = view.peer_node_id().to_string();
        let call = Call::setup(["forget-peer", name, &id]);
        let code = self.call_with(name, &call, TimeClass::Short, ErrorOutput::Hidden);
        if (code == 0 && !self.executor.dry_run) || matches!(code, 11 | 17) {
            return code;
        }
        for volume in target.volumes(config) {
            if volume.disk_path().is_none() {
                return self.end_for_lack_of_a_disk();
            }
            let node = format!("--node-id={id}");
            let code = self.call(name, &Call::meta(volume, [&node, "forget-peer"]));
            if code != 0 {
                return code;
            }
        }
        0
    }

    fn resize(&mut self, resource: &Resource, volume: &Volume) -> u8 {
        let minor = volume.minor().unwrap_or_default();
        let size = volume.settings.disk.get("size").map(str::to_owned);
        let given = self.args.option("size").map(str::to_owned);
        let configured = size.filter(|_| given.is_none());
        let call = Call::setup(["resize", &minor.to_string()])
            .with(configured.iter().map(|size| format!("--size={size}")))
            .with_options(&self.args.options);
        let calls = vec![call, Call::setup(["check-resize", &minor.to_string()])];
        self.resize_calls(
            &resource.name,
            minor,
            &calls,
            given.or(configured).is_some(),
        )
    }

    /// The calls of a resize, then the wait for the new size of the device.
    fn resize_calls(&mut self, resource: &str, minor: u32, calls: &[Call], has_size: bool) -> u8 {
        let path = format!("/sys/block/drbd{minor}/size");
        let before = std::fs::read_to_string(&path).ok();
        let [resize, check @ ..] = calls else {
            return 0;
        };
        let code = self.call_with(resource, resize, TimeClass::Medium, ErrorOutput::Shown);
        if code != 0 {
            return code;
        }
        for call in check {
            self.call_with(resource, call, TimeClass::Short, ErrorOutput::Hidden);
        }
        // Without such a file there is no kernel device whose size could be watched.
        if self.executor.dry_run || before.is_none() {
            return 0;
        }
        let wait = Duration::from_secs(if has_size { 10 } else { 3 });
        let deadline = Instant::now() + wait;
        while Instant::now() < deadline {
            if std::fs::read_to_string(&path).ok() != before {
                return 0;
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        1
    }

    fn check_resize(&mut self, resource: &Resource, volume: &Volume) -> u8 {
        let name = &resource.name;
        let minor = volume.minor().unwrap_or_default().to_string();
        let size = volume.settings.disk.get("size");
        let size = size.map(|size| format!("--size={size}"));
        let resize = Call::setup(["resize", &minor]).with(size);
        match self.call_with(name, &resize, TimeClass::Medium, ErrorOutput::Hidden) {
            0 => self.call(name, &Call::setup(["check-resize", &minor])),
            _ if volume.disk_path().is_none() => 0,
            _ => self.call(name, &Call::meta(volume, ["check-resize"])),
        }
    }

    fn create_md(&mut self, config: &Config, resource: &Resource, volume: &Volume) -> u8 {
        let args = self.args;
        let has_disk = |view: &ConnectionView<'_>, number: Option<u32>| {
            let mut volumes = view.peer.effective.iter();
            volumes.any(|volume| {
                volume.disk_path().is_some() && number.is_none_or(|number| number == volume.number)
            })
        };
        let views = Target::whole(position(config, resource)).connections(config);
        let peers = match args.option("max-peers") {
            Some(number) => number.to_owned(),
            None => views
                .iter()
                .filter(|view| has_disk(view, None))
                .count()
                .max(1)
                .to_string(),
        };
        let rest = args
            .options
            .iter()
            .filter(|option| option.name != "max-peers");
        let mut call =
            Call::meta(volume, ["create-md", &peers]).with(rest.map(|option| option.word.clone()));
        if args.option("effective-size").is_some() && args.option("diskful-peers").is_none() {
            let diskful = views
                .iter()
                .filter(|view| has_disk(view, Some(volume.number)));
            let ids: Vec<String> = diskful
                .map(|view| view.peer_node_id().to_string())
                .collect();
            call = call.with([format!("--diskful-peers={}", ids.join(","))]);
        }
        let name = &resource.name;
        let code = self.call(name, &call);
        if code != 0 || self.executor.dry_run {
            return code;
        }
        self.device_uuid(name, volume)
    }

    /// Gives new metadata a random device UUID unless it has one.
    fn device_uuid(&mut self, resource: &str, volume: &Volume) -> u8 {
        let read = self
            .executor
            .capture(&Call::meta(volume, ["read-dev-uuid"]));
        let found = read.ok().filter(|read| read.code == 0);
        let found = found.and_then(|read| u64::from_str_radix(read.stdout.trim(), 16).ok());
        if found.is_some_and(|uuid| uuid != 0) {
            return 0;
        }
        let mut bytes = [0_u8; 8];
        let random = std::fs::File::open("/dev/urandom")
            .and_then(|mut file| std::io::Read::read_exact(&mut file, &mut bytes));
        if let Err(error) = random {
            let _ = writeln!(
                self.err,
                "Can not read random bytes for a device UUID: {error}"
            );
            return EXIT_EXEC;
        }
        let uuid = format!("{:016X}", u64::from_ne_bytes(bytes).max(1));
        self.call(resource, &Call::meta(volume, ["write-dev-uuid", &uuid]))
    }

    fn role(&mut self, config: &Config, target: &Target) -> u8 {
        let name = &target.resource(config).name;
        let call = match target.peer {
            None => Call::setup(["role", name]),
            Some(id) => Call::setup(["peer-role", name, &id.to_string()]),
        };
        self.call(name, &call)
    }

    fn status(&mut self, resource: Option<&str>) -> u8 {
        let verbose = (0..self.args.verbose).map(|_| "--verbose".to_owned());
        let call = Call::setup(["status"])
            .with(resource.map(str::to_owned))
            .with(verbose)
            .with_options(&self.args.options);
        // The repeated -v is meant for the status, not for showing the call.
        self.executor.verbose = false;
        self.call(resource.unwrap_or(""), &call)
    }

    fn wait(&mut self, config: &Config, target: &Target, what: &str) -> u8 {
        let resource = target.resource(config);
        let name = &resource.name;
        let peer = target.peer.map(|id| id.to_string());
        let volume = target.volume.map(|number| number.to_string());
        let words: Vec<&str> = match (&peer, &volume) {
            (Some(peer), Some(volume)) => vec!["volume", name, peer, volume],
            (Some(peer), None) => vec!["connection", name, peer],
            (None, _) => vec!["resource", name],
        };
        let call = Call::setup([&format!("{what}-{}", words[0])])
            .with(words[1..].iter().map(|word| (*word).to_owned()))
            .with(self.startup_words(config, resource));
        self.call(name, &call)
    }

    /// Time limits of a wait. Resources on top of others wait for a short time only.
    fn startup_words(&self, config: &Config, resource: &Resource) -> Vec<String> {
        if self.args.stacked && !resource.sections.stacked_timeouts {
            let connect = resource
                .sections
                .net
                .get("connect-int")
                .and_then(|text| text.parse().ok());
            let seconds: u32 = connect.map_or(20, |seconds: u32| 2 * seconds);
            return vec!["--wfc-timeout".into(), seconds.to_string()];
        }
        OptionWords { config, cli: &[] }.words(&resource.sections.startup)
    }

    /// `wait-con-int`: one wait per resource, all at once. There is no dialogue: whoever wants to
    /// stop waiting interrupts the command.
    fn wait_all(&mut self) -> u8 {
        let config = Rc::clone(&self.config);
        let mut children = Vec::new();
        for target in super::targets::all(&config, self.args.stacked) {
            let resource = target.resource(&config);
            let words = self.startup_words(&config, resource);
            let call = Call::setup(["wait-connect-resource", &resource.name]).with(words);
            if self.executor.dry_run {
                self.call(&resource.name, &call);
                continue;
            }
            match self.executor.command(&call).spawn() {
                Ok(child) => children.push(child),
                Err(error) => {
                    let _ = writeln!(self.err, "Can not exec '{call}': {error}");
                }
            }
        }
        for mut child in children {
            let _ = child.wait();
        }
        0
    }

    fn each_proxy(&mut self, config: &Config, target: &Target) -> u8 {
        let resource = target.resource(config);
        let mut found = false;
        for view in target.connections(config) {
            let Some(path) = proxy::own_path(&view, &self.node_name) else {
                continue;
            };
            found = true;
            let calls = match self.command.action {
                Action::ProxyUp => proxy::up(resource, &view, path),
                _ => vec![proxy::down(resource, &view)],
            };
            for call in calls {
                let code = self.call(&resource.name, &call);
                if code != 0 {
                    return code;
                }
            }
        }
        if !found && !self.means_all() {
            let name = &resource.name;
            let _ = writeln!(
                self.err,
                "'{name}' not defined in your config (for this host)."
            );
            return EXIT_USAGE;
        }
        0
    }

    /// `up`, `adjust`, `sh-list-adjustable`.
    fn run_deferred(&mut self, targets: &[Target]) -> u8 {
        let config = Rc::clone(&self.config);
        let mut schedule = Schedule::default();
        if self.command.action == Action::Up {
            for target in targets {
                deferred::up(&mut schedule, &config, target);
            }
        } else {
            let running = match self.running(&config, targets) {
                Ok(running) => running,
                Err(code) => return code,
            };
            let connect =
                self.args.options.iter().filter(|option| {
                    matches!(option.name.as_str(), "tentative" | "discard-my-data")
                });
            let wishes = Wishes {
                skip_disk: self.args.flag("skip-disk"),
                skip_net: self.args.flag("skip-net"),
                connect_words: connect.map(|option| option.word.clone()).collect(),
            };
            for target in targets {
                let resource = target.resource(&config);
                let before = schedule.count();
                let known = running.resource(&resource.name);
                adjust::schedule(&mut schedule, &config, target, known, &wishes);
                if !wishes.skip_net {
                    self.adjust_proxies(&mut schedule, &config, target);
                }
                if self.command.action == Action::ListAdjustable {
                    if schedule.count() > before {
                        let _ = writeln!(self.out, "{}", resource.name);
                    }
                    schedule.truncate(before);
                }
            }
        }
        let with_progress = self.command.name == "adjust-with-progress";
        let after = if with_progress {
            AfterFailure::GoOn
        } else {
            AfterFailure::Stop
        };
        schedule.run(after, |resource, work| self.perform(resource, work))
    }

    /// The running state, as `drbdsetup show` tells it.
    fn running(&mut self, config: &Config, targets: &[Target]) -> Result<Config, u8> {
        let text = match &self.system.fake_show {
            Some(file) => std::fs::read_to_string(file).map_err(|error| error.to_string()),
            None => {
                let mut call = Call::setup(["show"]);
                if let [only] = targets {
                    call = call.with([only.resource(config).name.clone()]);
                }
                self.executor.capture(&call).map(|captured| captured.stdout)
            }
        };
        let text = match text {
            Ok(text) => text,
            Err(error) => {
                let _ = writeln!(self.err, "{error}");
                return Err(EXIT_EXEC);
            }
        };
        let parsed = parse_show(&text);
        super::report(&parsed.diagnostics, self.err);
        if parsed.is_valid() {
            Ok(parsed.config)
        } else {
            Err(EXIT_CONFIG)
        }
    }

    /// Schedules what the proxies of this node need.
    fn adjust_proxies(&mut self, schedule: &mut Schedule, config: &Config, target: &Target) {
        let resource = target.resource(config);
        let name = &resource.name;
        for view in target.connections(config) {
            let Some(path) = proxy::own_path(&view, &self.node_name) else {
                continue;
            };
            let running = self.executor.capture(&proxy::query(resource, &view));
            let running = running.ok().filter(|found| found.code == 0);
            let running = running.map(|found| found.stdout).unwrap_or_default();
            if proxy::is_as_configured(&running, path) {
                continue;
            }
            let down = proxy::down(resource, &view);
            schedule.call(Stage::NetPrepareDown, name, down, None);
            let up = Work::Calls(proxy::up(resource, &view, path), TimeClass::Short);
            schedule.add(Stage::NetPrepareUp, name, up, None);
        }
    }

    /// One piece of deferred work; true when it worked.
    fn perform(&mut self, resource: &str, work: &Work) -> bool {
        match work {
            Work::Calls(calls, class) => calls.iter().all(|call| {
                let worked = self.call_with(resource, call, *class, ErrorOutput::Shown) == 0;
                if worked {
                    self.register(call);
                }
                worked
            }),
            Work::Wait(call) => {
                let errors = ErrorOutput::Shown;
                let code = self.call_with(resource, call, TimeClass::Unlimited, errors);
                // 5: the time is over; the connection will come when it comes.
                matches!(code, 0 | 5)
            }
            Work::Resize { minor, calls, size } => {
                self.resize_calls(resource, *minor, calls, size.is_some()) == 0
            }
        }
    }
}

fn position(config: &Config, resource: &Resource) -> usize {
    config
        .resources
        .iter()
        .position(|known| known.name == resource.name)
        .unwrap_or_default()
}
