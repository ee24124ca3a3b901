//! The calls of `drbdsetup` and `drbdmeta` that commands are made of, as words.

use lockstep_format::conf::model::{Config, Disk, Resource, Setting, Settings, Volume};
use lockstep_format::conf::options::{self, Change, Set};
use lockstep_format::conf::resolve::{ConnectionView, PathView, resync_after_minor};

use super::args::CallOption;

/// The program that a call runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Program {
    Setup,
    Meta,
    ProxyCtl,
    Shell,
}

impl Program {
    /// Name in printed calls.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Program::Setup => "drbdsetup",
            Program::Meta => "drbdmeta",
            Program::ProxyCtl => "drbd-proxy-ctl",
            Program::Shell => "/bin/sh",
        }
    }
}

/// One call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Call {
    pub(super) program: Program,
    pub(super) words: Vec<String>,
}

impl Call {
    pub(super) fn setup<const N: usize>(words: [&str; N]) -> Self {
        Call {
            program: Program::Setup,
            words: words.map(str::to_owned).to_vec(),
        }
    }

    /// A call of `drbdmeta` for a volume: `MINOR v09 DEVICE INDEX`, then the words.
    pub(super) fn meta<const N: usize>(volume: &Volume, words: [&str; N]) -> Self {
        let minor = volume.minor().unwrap_or_default().to_string();
        let device = volume.meta_device().unwrap_or("none").to_owned();
        let index = volume.meta_disk.as_ref().map(|meta| meta.drbdmeta_index());
        let mut all = vec![minor, "v09".to_owned(), device, index.unwrap_or_default()];
        all.extend(words.map(str::to_owned));
        Call {
            program: Program::Meta,
            words: all,
        }
    }

    pub(super) fn with(mut self, words: impl IntoIterator<Item = String>) -> Self {
        self.words.extend(words);
        self
    }

    pub(super) fn with_options(self, options: &[CallOption]) -> Self {
        self.with(options.iter().map(|option| option.word.clone()))
    }
}

/// The call as one line for a shell, without the line's end.
impl std::fmt::Display for Call {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.program.name())?;
        self.words
            .iter()
            .try_for_each(|word| write!(f, " {}", shell_escaped(word)))
    }
}

/// Puts a backslash before every character that is special to some shell.
pub(super) fn shell_escaped(word: &str) -> String {
    let mut out = String::with_capacity(word.len());
    for c in word.chars() {
        if !(c.is_ascii_alphanumeric() || "%+./:=@_-".contains(c)) {
            out.push('\\');
        }
        out.push(c);
    }
    out
}

/// Makes the words of options out of settings.
#[derive(Clone, Copy)]
pub(super) struct OptionWords<'a> {
    pub(super) config: &'a Config,
    /// Options of the command line, which hide those of the file.
    pub(super) cli: &'a [CallOption],
}

impl OptionWords<'_> {
    /// `--NAME=VALUE` for each setting of a set that the command line does not give.
    pub(super) fn words(&self, settings: &Settings) -> Vec<String> {
        let given = |setting: &&Setting| !self.cli.iter().any(|cli| cli.name == setting.name);
        settings
            .0
            .iter()
            .filter(given)
            .filter_map(|setting| self.word(setting))
            .collect()
    }

    fn word(&self, setting: &Setting) -> Option<String> {
        let name = &setting.name;
        if name == "resync-after" {
            // Unknown names were reported when the configuration was checked.
            let minor = resync_after_minor(self.config, &setting.value)?;
            return Some(format!("--{name}={minor}"));
        }
        Some(format!("--{name}={}", setting.value))
    }

    pub(super) fn new_resource(&self, resource: &Resource) -> Call {
        let id = resource
            .my_host()
            .and_then(|host| host.node_id)
            .unwrap_or_default();
        Call::setup(["new-resource", &resource.name, &id.to_string()])
            .with(self.words(&resource.sections.options))
            .with_options(self.cli)
    }

    pub(super) fn new_minor(&self, resource: &Resource, volume: &Volume) -> Call {
        let minor = volume.minor().unwrap_or_default().to_string();
        let call = Call::setup([
            "new-minor",
            &resource.name,
            &minor,
            &volume.number.to_string(),
        ]);
        let diskless = volume
            .disk_path()
            .is_none()
            .then(|| "--diskless".to_owned());
        let mut device = volume.settings.device.clone();
        device.0.retain(|setting| setting.name != "diskless");
        call.with(diskless)
            .with(self.words(&device))
            .with_options(self.cli)
    }

    pub(super) fn attach(&self, volume: &Volume) -> Call {
        let minor = volume.minor().unwrap_or_default().to_string();
        let disk = volume.disk_path().unwrap_or("none");
        let index = volume
            .meta_disk
            .as_ref()
            .map(|meta| meta.attach_index())
            .unwrap_or_default();
        Call::setup([
            "attach",
            &minor,
            disk,
            volume.meta_device().unwrap_or(disk),
            &index,
        ])
        .with(self.words(&volume.settings.disk))
        .with_options(self.cli)
    }

    /// `new-peer` or `net-options`; `more` stands before the options.
    pub(super) fn net(
        &self,
        command: &str,
        resource: &Resource,
        view: &ConnectionView<'_>,
        more: &[&str],
    ) -> Call {
        let mut net = view.connection.net.clone();
        if command == "net-options" {
            net.0.retain(|setting| !is_fixed(Set::Net, &setting.name));
        }
        Call::setup([command, &resource.name, &view.peer_node_id().to_string()])
            .with(more.iter().map(|word| (*word).to_owned()))
            .with(self.words(&net))
            .with_options(self.cli)
    }

    /// `peer-device-options`; `more` stands before the options.
    pub(super) fn peer_device(
        &self,
        resource: &Resource,
        view: &ConnectionView<'_>,
        number: u32,
        more: &[&str],
    ) -> Call {
        let peer = view.peer_node_id().to_string();
        Call::setup([
            "peer-device-options",
            &resource.name,
            &peer,
            &number.to_string(),
        ])
        .with(more.iter().map(|word| (*word).to_owned()))
        .with(self.words(&peer_device_settings(view, number)))
        .with_options(self.cli)
    }

    /// `disk-options` or its form that resets what is not named.
    pub(super) fn disk_options(&self, volume: &Volume, more: &[&str]) -> Call {
        let mut disk = volume.settings.disk.clone();
        disk.0.retain(|setting| !is_fixed(Set::Disk, &setting.name));
        Call::setup([
            "disk-options",
            &volume.minor().unwrap_or_default().to_string(),
        ])
        .with(more.iter().map(|word| (*word).to_owned()))
        .with(self.words(&disk))
        .with_options(self.cli)
    }
}

/// `new-path` or `del-path`.
pub(super) fn path(command: &str, resource: &str, peer: u32, path: &PathView<'_>) -> Call {
    let (own, other) = (path.own.argument(), path.connect_to.argument());
    Call::setup([command, resource, &peer.to_string(), &own, &other])
}

/// Options of a peer device with those that follow from the peer's volume.
pub(super) fn peer_device_settings(view: &ConnectionView<'_>, number: u32) -> Settings {
    let found = view
        .connection
        .effective
        .iter()
        .find(|volume| volume.number == number);
    let mut settings = found
        .map(|volume| volume.settings.clone())
        .unwrap_or_default();
    if let Some(volume) = view.peer.volume(number) {
        let pos = view.connection.pos;
        if volume.disk == Some(Disk::None) && settings.get("bitmap").is_none() {
            settings.push("bitmap", "no", pos);
        }
        if volume.tiebreaker == Some(false) && settings.get("peer-tiebreaker").is_none() {
            settings.push("peer-tiebreaker", "no", pos);
        }
    }
    settings
}

/// Whether an option can be given only when its object is created.
pub(super) fn is_fixed(set: Set, name: &str) -> bool {
    options::find(set, name).is_some_and(|spec| spec.change == Change::AtCreation)
}
