//! What `drbdadm` finds on the machine: names, addresses, helpers, versions.

use std::io::{IsTerminal, Write};
use std::net::{IpAddr, UdpSocket};
use std::path::{Path, PathBuf};
use std::time::Duration;

use lockstep_format::conf::model::{Address, Family, Global};
use lockstep_format::conf::parse::version;

use super::args::Args;
use super::commands::{Action, Command};
use super::execute::{Executor, Helper, TimeLimits};
use super::files;

/// The machine as far as it matters.
pub(super) struct System {
    /// Name by which the program was called.
    pub(super) program: String,
    /// Name of the machine.
    pub(super) host_name: String,
    /// Name from the environment that replaces it.
    pub(super) pretended_name: Option<String>,
    /// Directory of the node from the environment.
    pub(super) directory: Option<PathBuf>,
    /// Whether an address is configured here.
    pub(super) has_address: Box<dyn Fn(&Address) -> bool>,
    /// Whether stdin and stdout are terminals.
    pub(super) is_interactive: bool,
    /// Version of DRBD that runs here.
    pub(super) module_version: Option<[u32; 3]>,
    /// File that replaces the output of `drbdsetup show`, for tests.
    pub(super) fake_show: Option<PathBuf>,
    /// Where links from resources and minors to their configurations lie.
    pub(super) registry: PathBuf,
}

impl System {
    /// This machine.
    pub(super) fn real(program: &str) -> Self {
        let variable = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
        let host_name = rustix::system::uname()
            .nodename()
            .to_string_lossy()
            .into_owned();
        System {
            program: program.to_owned(),
            host_name,
            pretended_name: variable("__DRBD_NODE__"),
            directory: variable("LOCKSTEP_DIR").map(PathBuf::from),
            has_address: Box::new(is_configured),
            is_interactive: std::io::stdin().is_terminal() && std::io::stdout().is_terminal(),
            module_version: module_version(variable("DRBD_DRIVER_VERSION_OVERRIDE")),
            fake_show: variable("FAKE_DRBDSETUP_SHOW").map(PathBuf::from),
            registry: PathBuf::from(lockstep_daemon::place::REGISTRY),
        }
    }

    /// Directory of the node: the option, else the environment.
    fn node_directory(&self, option: Option<&str>) -> Option<PathBuf> {
        let directory = option
            .map(PathBuf::from)
            .or_else(|| self.directory.clone())?;
        // Helpers may change their directory before they use it.
        Some(std::path::absolute(&directory).unwrap_or(directory))
    }

    /// Name of this node: from the environment, a file `node-name` in the node's directory, or
    /// the machine's.
    pub(super) fn node_name(&self, directory: Option<&str>, err: &mut dyn Write) -> String {
        if let Some(name) = &self.pretended_name {
            let _ = writeln!(
                err,
                "\n   found __DRBD_NODE__ in environment\n   PRETENDING that I am >>{name}<<\n"
            );
            return name.clone();
        }
        let file = self
            .node_directory(directory)
            .map(|directory| directory.join("node-name"));
        let name = file.and_then(|file| std::fs::read_to_string(file).ok());
        match name
            .as_deref()
            .map(str::trim)
            .filter(|name| !name.is_empty())
        {
            Some(name) => name.to_owned(),
            None => self.host_name.clone(),
        }
    }

    /// The configuration to read.
    pub(super) fn main_config(&self, args: &Args, command: &Command) -> String {
        if let Some(file) = &args.config_file {
            return file.clone();
        }
        let directory = self.node_directory(args.directory.as_deref());
        let called_by_engine = matches!(command.action, Action::Handler | Action::ShUdev);
        if called_by_engine
            && directory.is_none()
            && let Some(object) = args.objects.first()
            && let Some(link) = self.registered(object)
        {
            return link;
        }
        files::default_config(directory.as_deref())
            .to_string_lossy()
            .into_owned()
    }

    /// The configuration from which a resource or minor was brought up.
    fn registered(&self, object: &str) -> Option<String> {
        let name = match object.strip_prefix("minor-") {
            Some(minor) => format!("drbd-minor-{minor}.conf"),
            None => format!("drbd-resource-{}.conf", object.split([':', '/']).next()?),
        };
        let target = std::fs::canonicalize(self.registry.join(name)).ok()?;
        Some(target.to_string_lossy().into_owned())
    }

    /// Remembers from which configuration a resource or minor was brought up.
    ///
    /// A convenience for handlers: where the links cannot be made, they read the default file.
    pub(super) fn register(&self, name: &str, config: &str) {
        let link = self.registry.join(name);
        let _ = std::fs::create_dir_all(&self.registry);
        let _ = std::fs::remove_file(&link);
        let _ = std::os::unix::fs::symlink(config, link);
    }

    /// How calls are made.
    pub(super) fn executor(&self, args: &Args, global: &Global) -> Executor {
        let helper = |name: &'static str, option: &Option<String>| match option {
            Some(path) => Helper {
                path: PathBuf::from(path),
                name,
                is_self: false,
            },
            None => self.helper(name),
        };
        let limit = |seconds: Option<u32>, default: u32| {
            let seconds = seconds.unwrap_or(default);
            (seconds > 0).then(|| Duration::from_secs(seconds.into()))
        };
        Executor {
            dry_run: args.dry_run,
            verbose: args.verbose > 0,
            sh_varname: args.sh_varname.clone(),
            drbdsetup: helper("drbdsetup", &args.drbdsetup),
            drbdmeta: helper("drbdmeta", &args.drbdmeta),
            proxy_ctl: helper("drbd-proxy-ctl", &args.proxy_ctl),
            directory: self.node_directory(args.directory.as_deref()),
            limits: TimeLimits {
                short: limit(global.cmd_timeout_short_s, 5),
                medium: limit(global.cmd_timeout_medium_s, 600),
                long: limit(global.cmd_timeout_long_s, 0),
            },
        }
    }

    /// A helper beside this program, else this program itself under the helper's name.
    fn helper(&self, name: &'static str) -> Helper {
        let beside = Path::new(&self.program)
            .parent()
            .filter(|dir| !dir.as_os_str().is_empty());
        let beside = beside
            .map(|dir| dir.join(name))
            .filter(|path| is_executable(path));
        let is_other = name == "drbd-proxy-ctl";
        let path = match beside {
            Some(path) => path,
            None if is_other => PathBuf::from(name),
            None => std::env::current_exe().unwrap_or_else(|_| PathBuf::from(name)),
        };
        let real = |path: &Path| std::fs::canonicalize(path).ok();
        let own = std::env::current_exe().ok();
        let is_self = own.is_some_and(|own| real(&own).is_some() && real(&own) == real(&path));
        Helper {
            path,
            name,
            is_self,
        }
    }
}

/// The real path of a file; the path itself where there is none.
pub(super) fn real_path(path: &str) -> String {
    match std::fs::canonicalize(path) {
        Ok(real) => real.to_string_lossy().into_owned(),
        Err(_) => path.to_owned(),
    }
}

fn is_executable(path: &Path) -> bool {
    use std::os::unix::fs::PermissionsExt;
    std::fs::metadata(path)
        .is_ok_and(|found| found.is_file() && found.permissions().mode() & 0o111 != 0)
}

/// An address is ours when a socket can be bound to it.
fn is_configured(address: &Address) -> bool {
    let (host, scope) = match address.host.split_once('%') {
        Some((host, scope)) => (host, Some(scope)),
        None => (address.host.as_str(), None),
    };
    let Ok(ip) = host.parse::<IpAddr>() else {
        return false;
    };
    if !matches!(address.family, Family::Ipv4 | Family::Ipv6) {
        return true;
    }
    match (ip, scope) {
        (IpAddr::V6(ip), Some(scope)) => {
            let index = std::fs::read_to_string(format!("/sys/class/net/{scope}/ifindex"));
            let index = index
                .ok()
                .and_then(|text| text.trim().parse().ok())
                .unwrap_or(0);
            UdpSocket::bind(std::net::SocketAddrV6::new(ip, 0, 0, index)).is_ok()
        }
        _ => UdpSocket::bind((ip, 0)).is_ok(),
    }
}

/// The version that configurations ask for: from the environment, of a kernel module that is
/// loaded, or the one whose behaviour this program has.
fn module_version(variable: Option<String>) -> Option<[u32; 3]> {
    if let Some(text) = variable {
        return version(&text);
    }
    let loaded = std::fs::read_to_string("/proc/drbd").ok();
    let loaded = loaded
        .as_deref()
        .and_then(|text| text.strip_prefix("version:"));
    let loaded = loaded.and_then(|text| version(text.split_whitespace().next()?));
    loaded.or(Some(OWN_VERSION))
}

/// The version of DRBD whose behaviour Lockstep has.
const OWN_VERSION: [u32; 3] = [9, 3, 3];
