//! The commands of `drbdadm`: names, options, what they work on.

use lockstep_format::conf::options::{self, Change, Kind, OptionSpec, Set};

/// What a command does; the arguments are in the tables of the specification, section 6.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Action {
    /// One `drbdsetup` call per resource.
    SetupResource,
    /// One `drbdsetup` call per volume.
    SetupVolume,
    /// The same for volumes with a disk.
    SetupDisk,
    /// One `drbdsetup` call per connection.
    SetupConnection,
    /// One `drbdsetup` call per path.
    SetupPath,
    /// One `drbdsetup` call per volume and connection.
    SetupPeerDevice,
    /// One `drbdmeta` call per volume with a disk.
    Meta,
    Up,
    Adjust,
    ListAdjustable,
    Attach,
    Invalidate,
    Outdate,
    Resize,
    CheckResize,
    Role,
    DiskState,
    Generations,
    SetGenerations,
    ForgetPeer,
    Status,
    CreateMd,
    WaitConnect,
    WaitSync,
    WaitAll,
    ProxyUp,
    ProxyDown,
    Dump,
    DumpXml,
    Nop,
    ShResources,
    ShVolume,
    ShIp,
    ShLower,
    ShConfigFiles,
    ShModParms,
    ShUdev,
    Handler,
    HiddenCommands,
}

/// In which list of commands a command is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Shown {
    Usage,
    Scripts,
    Handlers,
    Experts,
    Nowhere,
}

/// How long a call may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TimeClass {
    Short,
    Medium,
    Long,
    /// Whatever the configuration says.
    Unlimited,
}

/// One command.
#[derive(Clone, Copy, Debug)]
pub(super) struct Command {
    pub(super) name: &'static str,
    pub(super) action: Action,
    pub(super) shown: Shown,
    pub(super) class: TimeClass,
    /// Options from the option table.
    sets: &'static [Set],
    /// Options that only the command line has, with `=` when they need a value.
    extra: &'static [&'static str],
    /// Whether own addresses must exist on this machine.
    pub(super) checks_addresses: bool,
    /// Whether one volume must be named, unless all resources are meant or there is no other.
    pub(super) one_volume: bool,
}

impl Command {
    /// Whether it ends with an error at a volume without a disk.
    pub(super) fn needs_disk(&self) -> bool {
        use Action::{
            Attach, CreateMd, Generations, Invalidate, Meta, Resize, SetGenerations, SetupDisk,
        };
        matches!(
            self.action,
            Attach
                | CreateMd
                | Generations
                | Invalidate
                | Meta
                | Resize
                | SetGenerations
                | SetupDisk
        ) || matches!(self.name, "disk-options" | "sh-md-dev" | "sh-md-idx")
    }

    /// Whether it refuses an object that is one volume among others.
    pub(super) fn is_for_whole_resources(&self) -> bool {
        use Action::{
            Dump, DumpXml, ForgetPeer, Role, SetupConnection, SetupPath, SetupResource, Status, Up,
        };
        matches!(
            self.action,
            Dump | DumpXml
                | ForgetPeer
                | Role
                | SetupConnection
                | SetupPath
                | SetupResource
                | Status
                | Up
        )
    }

    /// Names of all options of the command with what follows them.
    pub(super) fn options(&self) -> Vec<(&'static str, Takes)> {
        let set_options = self.sets.iter().flat_map(|set| options::all(*set));
        let is_change = self.name.ends_with("-options");
        let kept = set_options.filter(|spec| {
            spec.name != "_name" && !(is_change && spec.change == Change::AtCreation)
        });
        let table = kept.chain(options::command(self.name));
        let mut all: Vec<_> = table.map(|spec| (spec.name, takes(spec))).collect();
        for name in self.extra {
            all.push(match name.strip_suffix('=') {
                Some(name) => (name, Takes::Value),
                None => (*name, Takes::MaybeValue),
            });
        }
        all
    }
}

/// What follows an option.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Takes {
    /// A value, behind `=` or as the next word.
    Value,
    /// A value only behind `=`.
    MaybeValue,
}

fn takes(spec: &OptionSpec) -> Takes {
    match spec.kind {
        Kind::Bool { .. } | Kind::Flag => Takes::MaybeValue,
        _ => Takes::Value,
    }
}

/// Looks a command up, under its old names too; the second part is the notice for an old name.
pub(super) fn find(name: &str) -> Option<(&'static Command, Option<&'static str>)> {
    let (current, is_old) = match name {
        "state" => ("role", true),
        "outdate-peer" => ("fence-peer", true),
        other => (other, false),
    };
    let command = COMMANDS.iter().find(|command| command.name == current)?;
    Some((command, is_old.then_some(command.name)))
}

const fn command(name: &'static str, action: Action) -> Command {
    Command {
        name,
        action,
        shown: Shown::Usage,
        class: TimeClass::Short,
        sets: &[],
        extra: &[],
        checks_addresses: false,
        one_volume: false,
    }
}

impl Command {
    const fn medium(mut self) -> Self {
        self.class = TimeClass::Medium;
        self
    }
    const fn long(mut self) -> Self {
        self.class = TimeClass::Long;
        self
    }
    const fn unlimited(mut self) -> Self {
        self.class = TimeClass::Unlimited;
        self
    }
    const fn sets(mut self, sets: &'static [Set]) -> Self {
        self.sets = sets;
        self
    }
    const fn extra(mut self, extra: &'static [&'static str]) -> Self {
        self.extra = extra;
        self
    }
    const fn ip(mut self) -> Self {
        self.checks_addresses = true;
        self
    }
    const fn one_volume(mut self) -> Self {
        self.one_volume = true;
        self
    }
    const fn shown(mut self, shown: Shown) -> Self {
        self.shown = shown;
        self
    }
}

/// All commands. Handlers stand at the end.
pub(super) static COMMANDS: &[Command] = &[
    command("attach", Action::Attach)
        .medium()
        .sets(&[Set::Disk]),
    command("disk-options", Action::SetupVolume).sets(&[Set::Disk]),
    command("detach", Action::SetupDisk),
    command("connect", Action::SetupConnection).ip(),
    command("net-options", Action::SetupConnection)
        .sets(&[Set::Net])
        .ip(),
    command("disconnect", Action::SetupConnection),
    command("up", Action::Up).ip(),
    command("resource-options", Action::SetupResource).sets(&[Set::Resource]),
    command("peer-device-options", Action::SetupPeerDevice).sets(&[Set::PeerDevice]),
    command("down", Action::SetupResource).medium(),
    command("primary", Action::SetupResource)
        .medium()
        .extra(&["overwrite-data-of-peer"]),
    command("secondary", Action::SetupResource).medium(),
    command("invalidate", Action::Invalidate),
    command("invalidate-remote", Action::SetupPeerDevice).medium(),
    command("outdate", Action::Outdate),
    command("resize", Action::Resize).medium(),
    command("verify", Action::SetupPeerDevice),
    command("pause-sync", Action::SetupPeerDevice),
    command("resume-sync", Action::SetupPeerDevice),
    command("adjust", Action::Adjust).ip().extra(ADJUST_OPTIONS),
    command("adjust-with-progress", Action::Adjust)
        .ip()
        .extra(ADJUST_OPTIONS),
    command("wait-connect", Action::WaitConnect)
        .unlimited()
        .ip(),
    command("wait-con-int", Action::WaitAll).unlimited().ip(),
    command("wait-sync", Action::WaitSync).unlimited().ip(),
    command("role", Action::Role),
    command("cstate", Action::SetupConnection),
    command("dstate", Action::DiskState),
    command("status", Action::Status).extra(&["statistics"]),
    command("show-gi", Action::Generations),
    command("get-gi", Action::Generations),
    command("dump", Action::Dump).ip(),
    command("dump-xml", Action::DumpXml).ip(),
    command("create-md", Action::CreateMd)
        .long()
        .extra(CREATE_MD_OPTIONS),
    command("dump-md", Action::Meta).long().extra(&["force"]),
    command("wipe-md", Action::Meta).long().extra(&["force"]),
    command("apply-al", Action::Meta).long(),
    command("repair-md", Action::Meta).long(),
    command("dump-superblock", Action::Meta)
        .long()
        .extra(&["output-format="]),
    command("forget-peer", Action::ForgetPeer),
    command("new-peer", Action::SetupConnection)
        .sets(&[Set::Net])
        .ip(),
    command("del-peer", Action::SetupConnection).ip(),
    command("new-path", Action::SetupPath).ip(),
    command("del-path", Action::SetupPath).ip(),
    command("hidden-commands", Action::HiddenCommands),
    command("new-resource", Action::SetupResource)
        .sets(&[Set::Resource])
        .shown(Shown::Scripts),
    command("proxy-up", Action::ProxyUp).shown(Shown::Scripts),
    command("proxy-down", Action::ProxyDown).shown(Shown::Scripts),
    command("sh-dev", Action::ShVolume).shown(Shown::Scripts),
    command("sh-ip", Action::ShIp).shown(Shown::Scripts),
    command("sh-ll-dev", Action::ShVolume).shown(Shown::Scripts),
    command("sh-lr-of", Action::ShLower).shown(Shown::Scripts),
    command("sh-md-dev", Action::ShVolume).shown(Shown::Scripts),
    command("sh-md-idx", Action::ShVolume).shown(Shown::Scripts),
    command("sh-minor", Action::ShVolume).shown(Shown::Scripts),
    command("sh-mod-parms", Action::ShModParms).shown(Shown::Scripts),
    command("sh-nop", Action::Nop).shown(Shown::Scripts),
    command("sh-resource", Action::ShVolume).shown(Shown::Scripts),
    command("sh-resources", Action::ShResources).shown(Shown::Scripts),
    command("sh-list-adjustable", Action::ListAdjustable)
        .ip()
        .extra(ADJUST_OPTIONS)
        .shown(Shown::Scripts),
    command("sh-list-config-file", Action::ShConfigFiles).shown(Shown::Scripts),
    command("sh-udev", Action::ShUdev)
        .one_volume()
        .shown(Shown::Scripts),
    command("check-resize", Action::CheckResize).shown(Shown::Experts),
    command("del-minor", Action::SetupVolume).shown(Shown::Experts),
    command("new-current-uuid", Action::SetupVolume)
        .one_volume()
        .shown(Shown::Experts),
    command("new-minor", Action::SetupVolume)
        .sets(&[Set::Device])
        .shown(Shown::Experts),
    command("resume-io", Action::SetupVolume).shown(Shown::Experts),
    command("set-gi", Action::SetGenerations)
        .one_volume()
        .shown(Shown::Experts),
    command("suspend-io", Action::SetupVolume).shown(Shown::Experts),
    handler("after-resync-target"),
    handler("before-resync-source"),
    handler("before-resync-target"),
    handler("disconnected"),
    handler("fence-peer"),
    handler("initial-split-brain"),
    handler("local-io-error"),
    handler("out-of-sync"),
    handler("pri-lost"),
    handler("pri-lost-after-sb"),
    handler("pri-on-incon-degr"),
    handler("quorum-lost"),
    handler("split-brain"),
    handler("unfence-peer"),
    command("state", Action::Role).shown(Shown::Nowhere),
    command("outdate-peer", Action::Handler).shown(Shown::Nowhere),
];

const fn handler(name: &'static str) -> Command {
    command(name, Action::Handler)
        .unlimited()
        .shown(Shown::Handlers)
}

const ADJUST_OPTIONS: &[&str] = &["skip-disk", "skip-net", "tentative", "discard-my-data"];
const CREATE_MD_OPTIONS: &[&str] = &[
    "max-peers=",
    "peer-max-bio-size=",
    "al-stripes=",
    "al-stripe-size-kB=",
    "force",
    "effective-size=",
    "bitmap-block-size=",
    "diskful-peers=",
    "initial-current-uuid=",
    "consistent",
    "uptodate",
    "peers-outdated",
    "rotate-uuids",
];
