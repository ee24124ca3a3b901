//! Writes a configuration as text in the layout of `drbdadm dump`.
//!
//! What was written is printed; options come from the effective sections, so that after
//! [`inherit`](super::resolve::inherit) the inherited ones are shown in every place.

use alloc::format;
use alloc::string::{String, ToString};
use alloc::vec::Vec;

use super::lex::needs_quotes;
use super::model::{
    Config, Connection, Device, Disk, DiskSettings, Endpoint, Global, Host, HostKind, MetaDisk,
    Origin, Path, Proxy, Resource, Sections, Settings, Via, Volume,
};
use super::options::quoted;

/// `# FILE`, `global` and `common`: what stands before the resources.
pub fn head(config: &Config) -> String {
    let mut out = Writer::default();
    if let Some(file) = config.files.first() {
        out.line(&format!("# {}", file.path));
    }
    let lines = global_lines(&config.global);
    if !lines.is_empty() {
        out.open("global");
        for line in &lines {
            out.line(line);
        }
        out.close();
        out.line("");
    }
    if let Some(common) = &config.common {
        out.open("common");
        sections(&mut out, common);
        out.close();
        out.line("");
    }
    out.text
}

/// One resource with its two comment lines and the blank line behind it.
pub fn resource(config: &Config, resource: &Resource, node_name: &str) -> String {
    let mut out = Writer::default();
    let ignored = if resource.me.is_some() {
        "not ignored"
    } else {
        "ignored"
    };
    let stacked = if resource.lower().is_some() {
        "stacked"
    } else {
        "not stacked"
    };
    out.line(&format!(
        "# resource {} on {node_name}: {ignored}, {stacked}",
        text(&resource.name)
    ));
    out.line(&format!("# defined at {}", config.place(resource.pos)));
    out.open(&format!("resource {}", text(&resource.name)));
    if let Some(template) = &resource.template {
        out.line(&format!("template-file {};", text(&template.file)));
    }
    for volume in &resource.volumes {
        print_volume(&mut out, volume, &volume.settings);
    }
    for host in &resource.hosts {
        print_host(&mut out, host);
    }
    for connection in &resource.connections {
        if connection.origin == Origin::Written {
            print_connection(&mut out, connection);
        }
    }
    for mesh in &resource.meshes {
        out.open("connection-mesh");
        let hosts: String = mesh
            .hosts
            .iter()
            .map(|host| format!(" {}", text(host)))
            .collect();
        out.line(&format!("hosts{hosts};"));
        out.section("net", &mesh.net);
        out.close();
    }
    sections(&mut out, &resource.sections);
    out.close();
    out.line("");
    out.text
}

/// What the original shows of `global`: these four, where they are not the default.
fn global_lines(global: &Global) -> Vec<String> {
    let mut lines = Vec::new();
    if global.disable_ip_verification {
        lines.push("disable-ip-verification;".into());
    }
    if let Some(count) = shown_minor_count(global) {
        lines.push(format!("minor-count {count};"));
    }
    if let Some(seconds) = shown_dialog_refresh_s(global) {
        lines.push(format!("dialog-refresh {seconds};"));
    }
    let answer = global.usage_count.as_deref();
    if let Some(answer) = answer.filter(|answer| *answer != "ask") {
        lines.push(format!("usage-count {answer};"));
    }
    lines
}

/// `minor-count`, where it is not left to be computed.
pub(super) fn shown_minor_count(global: &Global) -> Option<u32> {
    global.minor_count.filter(|count| *count != 0)
}

/// `dialog-refresh`, where it is not the default of one second.
pub(super) fn shown_dialog_refresh_s(global: &Global) -> Option<u32> {
    global.dialog_refresh_s.filter(|seconds| *seconds != 1)
}

fn sections(out: &mut Writer, sections: &Sections) {
    out.section("options", &sections.options);
    out.section("net", &sections.net);
    print_disk_section(out, &sections.disk);
    if !sections.startup.is_empty() || sections.stacked_timeouts {
        out.open("startup");
        out.settings(&sections.startup);
        if sections.stacked_timeouts {
            out.line("stacked-timeouts;");
        }
        out.close();
    }
    print_proxy_options(out, "proxy", &sections.proxy, &sections.plugins);
    out.section("handlers", &sections.handlers);
}

fn print_disk_section(out: &mut Writer, disk: &DiskSettings) {
    if disk.is_empty() {
        return;
    }
    out.open("disk");
    out.settings(&disk.disk);
    out.settings(&disk.device);
    out.settings(&disk.peer_device);
    out.close();
}

fn print_proxy_options(out: &mut Writer, word: &str, settings: &Settings, plugins: &[String]) {
    if settings.is_empty() && plugins.is_empty() {
        return;
    }
    out.open(word);
    out.settings(settings);
    if !plugins.is_empty() {
        out.open("plugin");
        for line in plugins {
            out.line(&format!("{line};"));
        }
        out.close();
    }
    out.close();
}

/// A volume as written, with the options that hold for it.
fn print_volume(out: &mut Writer, volume: &Volume, settings: &DiskSettings) {
    if !volume.implicit {
        out.open(&format!("volume {}", volume.number));
    }
    print_disk_section(out, settings);
    if let Some(device) = &volume.device {
        out.named("device", &device_text(device));
    }
    match &volume.disk {
        None => {}
        Some(Disk::None) => out.named("disk", "none"),
        Some(Disk::Path(path)) => out.named("disk", &text(path)),
    }
    match &volume.meta_disk {
        None => {}
        Some(MetaDisk::Internal) => out.named("meta-disk", "internal"),
        Some(MetaDisk::Flexible(path)) => out.external_meta_disk(&text(path)),
        Some(MetaDisk::Indexed(path, index)) => {
            out.external_meta_disk(&format!("{} [{index}]", text(path)));
        }
    }
    if let Some(tiebreaker) = volume.tiebreaker {
        out.named("tiebreaker", if tiebreaker { "yes" } else { "no" });
    }
    if !volume.implicit {
        out.close();
    }
}

fn device_text(device: &Device) -> String {
    match &device.name {
        Some(name) => format!("{} minor {}", text(name), device.minor),
        None => format!("minor {}", device.minor),
    }
}

fn print_host(out: &mut Writer, host: &Host) {
    match &host.kind {
        HostKind::On | HostKind::ThisHost => {
            let names: String = host
                .names
                .iter()
                .map(|name| format!(" {}", text(name)))
                .collect();
            out.open(&format!("on{names}"));
        }
        HostKind::Floating => {
            let address = host
                .address
                .as_ref()
                .map(ToString::to_string)
                .unwrap_or_default();
            out.open(&format!("{:16} {address}", "floating"));
        }
        HostKind::Stacked { lower } => {
            out.open(&format!("stacked-on-top-of {}", text(lower)));
            let names: String = host.names.iter().map(|name| format!("{name} ")).collect();
            out.line(&format!("# on {names}"));
        }
    }
    if let Some(id) = host.node_id {
        out.line(&format!("node-id {id};"));
    }
    out.section("options", &host.options);
    let mut volumes: Vec<&Volume> = host.volumes.iter().collect();
    volumes.sort_by_key(|volume| volume.number);
    for volume in volumes {
        let effective = host.volume(volume.number).unwrap_or(volume);
        let mut volume = volume.clone();
        if volume.disk.is_none() && !volume.settings.is_empty() {
            // The original shows the disk of the resource where a host has options for it.
            volume.disk.clone_from(&effective.disk);
        }
        if volume.device.is_some() {
            // Inheriting has completed its name.
            volume.device.clone_from(&effective.device);
        }
        if effective.meta_disk.is_none() {
            // Without a disk, inheriting has removed it.
            volume.meta_disk = None;
        }
        print_volume(out, &volume, &effective.settings);
    }
    if host.kind != HostKind::Floating
        && let Some(address) = &host.address
    {
        out.line(&format!("{:16} {address};", "address"));
    }
    if let Some(proxy) = &host.proxy {
        print_proxy(out, "", proxy);
    }
    out.close();
}

/// A `proxy on` block; `before` stands before it on the same line.
fn print_proxy(out: &mut Writer, before: &str, proxy: &Proxy) {
    let hosts: String = proxy
        .hosts
        .iter()
        .map(|host| format!(" {}", text(host)))
        .collect();
    out.open(&format!("{before}proxy on{hosts}"));
    if let Some(inside) = &proxy.inside {
        out.line(&format!("{:16} {inside};", "inside"));
    }
    if let Some(outside) = &proxy.outside {
        out.line(&format!("{:16} {outside};", "outside"));
    }
    print_proxy_options(out, "options", &proxy.settings, &proxy.plugins);
    out.close();
}

fn print_connection(out: &mut Writer, connection: &Connection) {
    out.open("connection");
    for path in &connection.paths {
        print_path(out, connection, path);
    }
    out.section("net", &connection.net);
    out.section("disk", &connection.peer_device);
    for volume in &connection.volumes {
        let effective = connection
            .effective
            .iter()
            .find(|other| other.number == volume.number);
        out.open(&format!("volume {}", volume.number));
        out.section("disk", &effective.unwrap_or(volume).settings);
        out.close();
    }
    out.close();
}

fn print_path(out: &mut Writer, connection: &Connection, path: &Path) {
    if connection.explicit_paths {
        out.open("path");
    }
    for end in &path.ends {
        print_endpoint(out, end);
    }
    if connection.explicit_paths {
        out.close();
    }
}

fn print_endpoint(out: &mut Writer, end: &Endpoint) {
    let gap = " ".repeat(out.indent());
    let mut line = String::new();
    if let Some(name) = &end.host_name {
        line.push_str(&format!("host {}", text(name)));
        if let Some(port) = end.port {
            line.push_str(&format!(" port {port}"));
        }
    }
    if let Some(address) = &end.address {
        if !line.is_empty() {
            line.push_str(&format!(" {gap}"));
        }
        line.push_str(&format!("{:16}{address}", "address"));
    }
    match &end.via {
        None => out.line(&format!("{line};")),
        Some(Via::OutsideAddress(address)) => {
            out.line(&format!("{line} {gap}via outside-address {address};"));
        }
        Some(Via::Proxy(proxy)) => print_proxy(out, &format!("{line} {gap}via "), proxy),
    }
}

/// A text as it must be written to be read back.
fn text(text: &str) -> String {
    if needs_quotes(text) {
        quoted(text)
    } else {
        text.into()
    }
}

/// Text with indentation.
#[derive(Debug, Default)]
struct Writer {
    text: String,
    level: usize,
}

impl Writer {
    fn indent(&self) -> usize {
        self.level * INDENT
    }

    fn line(&mut self, line: &str) {
        if !line.is_empty() {
            self.text.extend(core::iter::repeat_n(' ', self.indent()));
        }
        self.text.push_str(line);
        self.text.push('\n');
    }

    fn open(&mut self, head: &str) {
        self.line(&format!("{head} {{"));
        self.level += 1;
    }

    fn close(&mut self) {
        self.level -= 1;
        self.line("}");
    }

    /// A name and a value that is written already.
    fn named(&mut self, name: &str, value: &str) {
        let width = NAME_COLUMN.saturating_sub(self.indent());
        self.line(&format!("{name:width$} {value:>3};"));
    }

    /// The original pads this one statement alike at every level.
    fn external_meta_disk(&mut self, value: &str) {
        self.line(&format!("{:16} {value};", "meta-disk"));
    }

    fn settings(&mut self, settings: &Settings) {
        for setting in &settings.0 {
            self.named(&setting.name, &text(&setting.value));
        }
    }

    fn section(&mut self, word: &str, settings: &Settings) {
        if !settings.is_empty() {
            self.open(word);
            self.settings(settings);
            self.close();
        }
    }
}

/// Blanks per level.
const INDENT: usize = 4;
/// Column up to which names are padded.
const NAME_COLUMN: usize = 24;
