//! What a configuration says: resources, hosts, volumes, connections, paths.
//!
//! The parser fills the parts that were written; [`super::resolve`] fills the effective ones.

use alloc::string::String;
use alloc::vec::Vec;
use core::fmt;

use super::options::Set;

/// A line of a file of the configuration.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pos {
    /// Index into [`Config::files`].
    pub file: u32,
    /// Line, counted from 1.
    pub line: u32,
}

/// Name of a file that was read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourceFile {
    /// Name for error messages: as it was given.
    pub shown: String,
    /// Absolute path, for "defined at" and as identity.
    pub path: String,
}

/// One option statement.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Setting {
    /// Name from the option table.
    pub name: String,
    /// Value exactly as written; `yes` or `no` for booleans without a value.
    pub value: String,
    /// Where it was written, not where it was inherited to.
    pub pos: Pos,
    /// `_unknown NAME;` in the output of `show`: the running side does not know the option.
    pub unknown: bool,
}

/// Options in the order in which they go on a command line.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Settings(pub Vec<Setting>);

impl Settings {
    /// The value of an option, the last one when it was written several times.
    pub fn get(&self, name: &str) -> Option<&str> {
        self.0
            .iter()
            .rev()
            .find(|setting| setting.name == name)
            .map(|found| found.value.as_str())
    }

    /// Whether nothing is set.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Appends an option.
    pub fn push(&mut self, name: &str, value: &str, pos: Pos) {
        let (name, value) = (String::from(name), String::from(value));
        self.0.push(Setting {
            name,
            value,
            pos,
            unknown: false,
        });
    }

    /// Puts an option before all others.
    pub fn push_front(&mut self, name: &str, value: &str, pos: Pos) {
        let (name, value) = (String::from(name), String::from(value));
        self.0.insert(
            0,
            Setting {
                name,
                value,
                pos,
                unknown: false,
            },
        );
    }
}

/// The three sets that share the word `disk`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DiskSettings {
    /// Options of `attach`.
    pub disk: Settings,
    /// Options of `new-minor`.
    pub device: Settings,
    /// Options of peer devices.
    pub peer_device: Settings,
}

impl DiskSettings {
    /// Whether nothing is set.
    pub fn is_empty(&self) -> bool {
        self.disk.is_empty() && self.device.is_empty() && self.peer_device.is_empty()
    }
}

/// Address family of a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Family {
    /// IPv4.
    Ipv4,
    /// IPv6.
    Ipv6,
    /// SuperSockets.
    Ssocks,
    /// Sockets direct protocol.
    Sdp,
}

impl Family {
    /// The word of the configuration.
    pub const fn name(self) -> &'static str {
        match self {
            Family::Ipv4 => "ipv4",
            Family::Ipv6 => "ipv6",
            Family::Ssocks => "ssocks",
            Family::Sdp => "sdp",
        }
    }
}

/// Address and port of one end of a path.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Address {
    /// Its family.
    pub family: Family,
    /// Numeric address without brackets.
    pub host: String,
    /// Port, 1 to 65535.
    pub port: u16,
}

impl Address {
    /// `ADDR:PORT`, with brackets around IPv6.
    pub fn plain(&self) -> String {
        match self.family {
            Family::Ipv6 => alloc::format!("[{}]:{}", self.host, self.port),
            _ => alloc::format!("{}:{}", self.host, self.port),
        }
    }

    /// `FAMILY:ADDR:PORT`, as on the command lines of `drbdsetup`.
    pub fn argument(&self) -> String {
        alloc::format!("{}:{}", self.family.name(), self.plain())
    }
}

/// `FAMILY ADDR:PORT`, as in the configuration.
impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.family.name(), self.plain())
    }
}

/// A `device` statement.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Device {
    /// Name, if one was written, completed to `/dev/...`.
    pub name: Option<String>,
    /// Minor number.
    pub minor: u32,
    /// Where it was written.
    pub pos: Pos,
}

/// A `disk` statement.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Disk {
    /// `none`: this host is diskless for the volume.
    None,
    /// Path of the backing device.
    Path(String),
}

/// A `meta-disk` statement.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MetaDisk {
    /// At the end of the disk itself.
    Internal,
    /// A device of its own.
    Flexible(String),
    /// A slot of fixed size on a shared device.
    Indexed(String, u32),
}

impl MetaDisk {
    /// The index word of `drbdsetup attach`.
    pub fn attach_index(&self) -> String {
        match self {
            MetaDisk::Internal => "internal".into(),
            MetaDisk::Flexible(_) => "flexible".into(),
            MetaDisk::Indexed(_, index) => alloc::format!("{index}"),
        }
    }

    /// The index word of `drbdmeta`.
    pub fn drbdmeta_index(&self) -> String {
        match self {
            MetaDisk::Flexible(_) => "flex-external".into(),
            _ => self.attach_index(),
        }
    }
}

/// A volume as written in one place, or the effective one of a host.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Volume {
    /// Volume number.
    pub number: u32,
    /// Whether it was written without the word `volume`.
    pub implicit: bool,
    /// The device.
    pub device: Option<Device>,
    /// The backing disk.
    pub disk: Option<Disk>,
    /// The metadata.
    pub meta_disk: Option<MetaDisk>,
    /// Whether this diskless volume may break ties.
    pub tiebreaker: Option<bool>,
    /// The options of its `disk` section.
    pub settings: DiskSettings,
    /// Whether a `disk` section was written, even an empty one.
    pub disk_pos: Option<Pos>,
    /// Where it was written.
    pub pos: Pos,
}

impl Volume {
    /// The backing device, if there is one.
    pub fn disk_path(&self) -> Option<&str> {
        match &self.disk {
            Some(Disk::Path(path)) => Some(path),
            Some(Disk::None) | None => None,
        }
    }

    /// The device that holds the metadata.
    pub fn meta_device(&self) -> Option<&str> {
        match &self.meta_disk {
            None => None,
            Some(MetaDisk::Internal) => self.disk_path(),
            Some(MetaDisk::Flexible(path) | MetaDisk::Indexed(path, _)) => Some(path),
        }
    }

    /// The minor number, if a device was given.
    pub fn minor(&self) -> Option<u32> {
        self.device.as_ref().map(|device| device.minor)
    }
}

/// A `proxy on` block.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Proxy {
    /// Hosts that run it.
    pub hosts: Vec<String>,
    /// Address towards the DRBD node.
    pub inside: Option<Address>,
    /// Address towards the peer's proxy.
    pub outside: Option<Address>,
    /// Options.
    pub settings: Settings,
    /// Plugin lines.
    pub plugins: Vec<String>,
    /// Where it was written.
    pub pos: Pos,
}

/// How a host section was introduced.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HostKind {
    /// `on NAME`.
    On,
    /// `floating ADDRESS`.
    Floating,
    /// `stacked-on-top-of RESOURCE`.
    Stacked {
        /// The lower resource.
        lower: String,
    },
    /// `_this_host` in the output of `show`.
    ThisHost,
}

/// A host section.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Host {
    /// How it was introduced.
    pub kind: HostKind,
    /// Names; for stacked sections those of the lower resource.
    pub names: Vec<String>,
    /// Node id, written or invented.
    pub node_id: Option<u32>,
    /// Address.
    pub address: Option<Address>,
    /// Proxy in the old style.
    pub proxy: Option<Proxy>,
    /// Volumes as written here.
    pub volumes: Vec<Volume>,
    /// Effective volumes, ascending by number.
    pub effective: Vec<Volume>,
    /// Options of the host, which are read and printed but never applied.
    pub options: Settings,
    /// Where it was written.
    pub pos: Pos,
}

impl Host {
    /// The effective volume of a number.
    pub fn volume(&self, number: u32) -> Option<&Volume> {
        self.effective.iter().find(|volume| volume.number == number)
    }

    /// All names joined with `_`, the name of a connection to this host.
    pub fn joined_name(&self) -> String {
        self.names.join("_")
    }
}

/// Detour of one end of a path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Via {
    /// Through a proxy.
    Proxy(Proxy),
    /// Under another address as seen from the peer.
    OutsideAddress(Address),
}

/// One end of a path.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Endpoint {
    /// Name of the host; none in floating style.
    pub host_name: Option<String>,
    /// Own address.
    pub address: Option<Address>,
    /// Own port on the host's address.
    pub port: Option<u16>,
    /// Detour.
    pub via: Option<Via>,
    /// Index of the host in [`Resource::hosts`].
    pub host: Option<usize>,
    /// Where it was written.
    pub pos: Pos,
}

/// A path.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Path {
    /// Both ends in the order written.
    pub ends: Vec<Endpoint>,
    /// Own address, in the output of `show` only.
    pub this_host: Option<Address>,
    /// The peer's address, in the output of `show` only.
    pub remote_host: Option<Address>,
    /// Where it was written.
    pub pos: Pos,
}

/// Where a connection comes from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Origin {
    /// A `connection` section.
    #[default]
    Written,
    /// A `connection-mesh` section.
    Mesh,
    /// A resource with two hosts and no connection at all.
    Implied,
}

/// Options for one volume of a connection.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PeerVolume {
    /// Volume number.
    pub number: u32,
    /// Options of the peer device.
    pub settings: Settings,
}

/// A connection.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Connection {
    /// Where it comes from.
    pub origin: Origin,
    /// A name that was written and is ignored, but found by `RESOURCE:NAME`.
    pub name: Option<String>,
    /// Paths in the order written.
    pub paths: Vec<Path>,
    /// Whether the paths were written with the word `path`.
    pub explicit_paths: bool,
    /// Options of the connection.
    pub net: Settings,
    /// Options of all its peer devices.
    pub peer_device: Settings,
    /// Options of single peer devices as written.
    pub volumes: Vec<PeerVolume>,
    /// Effective options of each peer device, ascending by number.
    pub effective: Vec<PeerVolume>,
    /// Peer's node id in the output of `show`.
    pub peer_node_id: Option<u32>,
    /// Connection state in the output of `show`.
    pub state: Option<String>,
    /// Where it was written.
    pub pos: Pos,
}

/// A `connection-mesh`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Mesh {
    /// Hosts of which each pair is connected.
    pub hosts: Vec<String>,
    /// Options of these connections.
    pub net: Settings,
    /// Where it was written.
    pub pos: Pos,
}

/// The sections that `common`, templates and resources share.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sections {
    /// `options`.
    pub options: Settings,
    /// `net`.
    pub net: Settings,
    /// `disk`.
    pub disk: DiskSettings,
    /// `startup`.
    pub startup: Settings,
    /// `stacked-timeouts` in `startup`.
    pub stacked_timeouts: bool,
    /// `proxy`.
    pub proxy: Settings,
    /// `plugin` lines in `proxy`.
    pub plugins: Vec<String>,
    /// `handlers`.
    pub handlers: Settings,
}

impl Sections {
    /// The options of a set.
    pub fn of(&self, set: Set) -> Option<&Settings> {
        match set {
            Set::Net => Some(&self.net),
            Set::Disk => Some(&self.disk.disk),
            Set::Device => Some(&self.disk.device),
            Set::PeerDevice => Some(&self.disk.peer_device),
            Set::Resource => Some(&self.options),
            Set::Startup => Some(&self.startup),
            Set::Handlers => Some(&self.handlers),
            Set::Proxy => Some(&self.proxy),
            Set::Global => None,
        }
    }
}

/// A template of a resource.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Template {
    /// File name as written.
    pub file: String,
    /// What it says.
    pub sections: Sections,
}

/// A resource.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Resource {
    /// Its name.
    pub name: String,
    /// Shared sections.
    pub sections: Sections,
    /// Volumes written at resource level.
    pub volumes: Vec<Volume>,
    /// Host sections.
    pub hosts: Vec<Host>,
    /// Connections: written ones, then those of meshes, or the implied one.
    pub connections: Vec<Connection>,
    /// Meshes.
    pub meshes: Vec<Mesh>,
    /// Template that replaces `common`.
    pub template: Option<Template>,
    /// Index of the host that this node is; none when the resource is not for this node.
    pub me: Option<usize>,
    /// Whether this node only runs a proxy for the resource.
    pub proxy_only: bool,
    /// Where it was written.
    pub pos: Pos,
}

impl Resource {
    /// Whether a host section lies on top of another resource.
    pub fn is_stacked(&self) -> bool {
        self.hosts
            .iter()
            .any(|host| matches!(host.kind, HostKind::Stacked { .. }))
    }

    /// The host that this node is.
    pub fn my_host(&self) -> Option<&Host> {
        self.me.map(|index| &self.hosts[index])
    }

    /// The resource below the section of this node.
    pub fn lower(&self) -> Option<&str> {
        match self.my_host().map(|host| &host.kind) {
            Some(HostKind::Stacked { lower }) => Some(lower),
            _ => None,
        }
    }
}

/// The `global` section. `None` and `false` mean not written.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Global {
    /// Addresses are not looked for on this machine.
    pub disable_ip_verification: bool,
    /// Links of single volumes contain the number too.
    pub udev_always_use_vnr: bool,
    /// Minors to make room for.
    pub minor_count: Option<u32>,
    /// Seconds between redraws of a dialogue.
    pub dialog_refresh_s: Option<u32>,
    /// Seconds for short calls.
    pub cmd_timeout_short_s: Option<u32>,
    /// Seconds for medium calls.
    pub cmd_timeout_medium_s: Option<u32>,
    /// Seconds for long calls.
    pub cmd_timeout_long_s: Option<u32>,
    /// Answer about the usage count.
    pub usage_count: Option<String>,
}

/// Which generation's style a file is written in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Style {
    /// Nothing says so.
    #[default]
    Ambiguous,
    /// Node ids had to be invented.
    V8,
    /// A word of version 9 was used.
    V9,
}

/// A whole configuration.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Config {
    /// Files that were read, the main one first.
    pub files: Vec<SourceFile>,
    /// `global`.
    pub global: Global,
    /// `common`.
    pub common: Option<Sections>,
    /// Resources in the order read.
    pub resources: Vec<Resource>,
    /// Style of the files.
    pub style: Style,
}

impl Config {
    /// The resource of a name.
    pub fn resource(&self, name: &str) -> Option<&Resource> {
        self.resources.iter().find(|resource| resource.name == name)
    }

    /// `PATH:LINE` of a position, with the absolute path.
    pub fn place(&self, pos: Pos) -> String {
        let path = self
            .files
            .get(pos.file as usize)
            .map_or("", |file| file.path.as_str());
        alloc::format!("{path}:{}", pos.line)
    }

    /// `FILE:LINE` of a position, with the file's name as it was given.
    pub fn shown_place(&self, pos: Pos) -> String {
        let shown = self
            .files
            .get(pos.file as usize)
            .map_or("", |file| file.shown.as_str());
        alloc::format!("{shown}:{}", pos.line)
    }
}
