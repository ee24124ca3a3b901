//! Writes a configuration as `drbdadm dump-xml` does.

use alloc::format;
use alloc::string::String;

use super::dump::{shown_dialog_refresh_s, shown_minor_count};
use super::model::{
    Address, Config, Connection, Disk, DiskSettings, Endpoint, Host, HostKind, MetaDisk, Path,
    Proxy, Resource, Sections, Settings, Volume,
};
use super::resolve::{end_address, end_proxy};

/// A whole configuration, `<config>` around it.
pub fn config(config: &Config) -> String {
    let mut out = Writer::default();
    let file = config.files.first().map_or("", |file| file.path.as_str());
    out.open("config", &[("file", file)]);
    let global = &config.global;
    let minor_count = shown_minor_count(global);
    let refresh_s = shown_dialog_refresh_s(global);
    if global.disable_ip_verification || minor_count.is_some() || refresh_s.is_some() {
        out.open("global", &[]);
        if global.disable_ip_verification {
            out.empty("disable-ip-verification", &[]);
        }
        if let Some(count) = minor_count {
            out.empty("minor-count", &[("count", &format!("{count}"))]);
        }
        if let Some(refresh) = refresh_s {
            out.empty("dialog-refresh", &[("refresh", &format!("{refresh}"))]);
        }
        out.close("global");
    }
    if let Some(common) = &config.common {
        out.open("common", &[]);
        print_sections(&mut out, common);
        out.close("common");
    }
    for resource in &config.resources {
        print_resource(&mut out, config, resource);
    }
    out.close("config");
    out.text
}

/// One resource on its own.
pub fn resource(config: &Config, resource: &Resource) -> String {
    let mut out = Writer::default();
    print_resource(&mut out, config, resource);
    out.text
}

fn print_resource(out: &mut Writer, config: &Config, resource: &Resource) {
    let place = config.place(resource.pos);
    out.open(
        "resource",
        &[("name", &resource.name), ("conf-file-line", &place)],
    );
    if let Some(template) = &resource.template {
        // The original leaves this element open, which no XML reader accepts.
        out.empty("template", &[("file", &template.file)]);
    }
    for host in &resource.hosts {
        print_host(out, host);
    }
    for connection in &resource.connections {
        print_connection(out, resource, connection);
    }
    print_sections(out, &resource.sections);
    out.close("resource");
}

fn print_host(out: &mut Writer, host: &Host) {
    match host.kind {
        HostKind::Floating => out.open("host", &[("floating", "1")]),
        _ => out.open("host", &[("name", &host.names.join(" "))]),
    }
    out.settings_section("options", &host.options);
    for volume in &host.effective {
        print_volume(out, volume);
    }
    if let Some(address) = &host.address {
        let line = address_element("address", address);
        out.line(&line);
    }
    out.close("host");
}

fn print_volume(out: &mut Writer, volume: &Volume) {
    out.open("volume", &[("vnr", &format!("{}", volume.number))]);
    print_disk_section(out, &volume.settings);
    if let Some(device) = &volume.device {
        let name = escaped(device.name.as_deref().unwrap_or(""));
        out.line(&format!(
            "<device minor=\"{}\">{name}</device>",
            device.minor
        ));
    }
    match &volume.disk {
        None => {}
        Some(Disk::None) if volume.meta_disk.is_none() => out.line("<disk></disk>"),
        Some(Disk::None) => out.line("<disk>none</disk>"),
        Some(Disk::Path(path)) => out.line(&format!("<disk>{}</disk>", escaped(path))),
    }
    match &volume.meta_disk {
        None => {}
        Some(MetaDisk::Internal) => out.line("<meta-disk>internal</meta-disk>"),
        Some(MetaDisk::Flexible(path)) => {
            out.line(&format!("<meta-disk>{}</meta-disk>", escaped(path)));
        }
        Some(MetaDisk::Indexed(path, index)) => {
            let path = escaped(path);
            out.line(&format!("<meta-disk index=\"{index}\">{path}</meta-disk>"));
        }
    }
    out.close("volume");
}

fn print_connection(out: &mut Writer, resource: &Resource, connection: &Connection) {
    out.open("connection", &[]);
    for path in &connection.paths {
        print_path(out, resource, connection, path);
    }
    out.settings_section("net", &connection.net);
    out.settings_section("disk", &connection.peer_device);
    for volume in &connection.volumes {
        let effective = connection
            .effective
            .iter()
            .find(|other| other.number == volume.number);
        out.open("volume", &[("vnr", &format!("{}", volume.number))]);
        out.settings_section("disk", &effective.unwrap_or(volume).settings);
        out.close("volume");
    }
    out.close("connection");
}

fn print_path(out: &mut Writer, resource: &Resource, connection: &Connection, path: &Path) {
    if connection.explicit_paths {
        out.open("path", &[]);
    }
    for end in &path.ends {
        print_endpoint(out, resource, end);
    }
    if connection.explicit_paths {
        out.close("path");
    }
}

fn print_endpoint(out: &mut Writer, resource: &Resource, end: &Endpoint) {
    let host = end.host.map(|host| &resource.hosts[host]);
    let name = match (&end.host_name, host) {
        (Some(name), _) => name.clone(),
        (None, Some(host)) => match host.kind {
            HostKind::Stacked { .. } => host.joined_name(),
            _ => host.names.first().cloned().unwrap_or_default(),
        },
        (None, None) => String::new(),
    };
    let address = end_address(resource, end);
    let address = address.map(|address| address_element("address", &address));
    let address = address.unwrap_or_default();
    match end_proxy(resource, end) {
        None => out.line(&format!(
            "<host name=\"{}\">{address}</host>",
            escaped(&name)
        )),
        Some(proxy) => {
            out.open("host", &[("name", &name)]);
            out.line(&address);
            print_proxy(out, proxy);
            out.close("host");
        }
    }
}

fn print_proxy(out: &mut Writer, proxy: &Proxy) {
    out.open("proxy", &[("hostname", &proxy.hosts.join(" "))]);
    if let Some(inside) = &proxy.inside {
        out.line(&address_element("inside", inside));
    }
    if let Some(outside) = &proxy.outside {
        out.line(&address_element("outside", outside));
    }
    print_proxy_options(out, "options", &proxy.settings, &proxy.plugins);
    out.close("proxy");
}

fn print_proxy_options(out: &mut Writer, name: &str, settings: &Settings, plugins: &[String]) {
    if settings.is_empty() && plugins.is_empty() {
        return;
    }
    out.open("section", &[("name", name)]);
    out.settings(settings);
    if !plugins.is_empty() {
        out.open("section", &[("name", "plugin")]);
        for line in plugins {
            out.empty("option", &[("name", line)]);
        }
        out.close("section");
    }
    out.close("section");
}

fn print_sections(out: &mut Writer, sections: &Sections) {
    out.settings_section("options", &sections.options);
    out.settings_section("net", &sections.net);
    print_disk_section(out, &sections.disk);
    if !sections.startup.is_empty() || sections.stacked_timeouts {
        out.open("section", &[("name", "startup")]);
        out.settings(&sections.startup);
        if sections.stacked_timeouts {
            out.empty("option", &[("name", "stacked-timeouts")]);
        }
        out.close("section");
    }
    print_proxy_options(out, "proxy", &sections.proxy, &sections.plugins);
    out.settings_section("handlers", &sections.handlers);
}

fn print_disk_section(out: &mut Writer, disk: &DiskSettings) {
    if disk.is_empty() {
        return;
    }
    out.open("section", &[("name", "disk")]);
    out.settings(&disk.disk);
    out.settings(&disk.device);
    out.settings(&disk.peer_device);
    out.close("section");
}

fn address_element(name: &str, address: &Address) -> String {
    let (family, port, host) = (address.family.name(), address.port, escaped(&address.host));
    format!("<{name} family=\"{family}\" port=\"{port}\">{host}</{name}>")
}

fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '\'' => out.push_str("&apos;"),
            '"' => out.push_str("&quot;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '&' => out.push_str("&amp;"),
            other => out.push(other),
        }
    }
    out
}

/// Text with indentation.
#[derive(Debug, Default)]
struct Writer {
    text: String,
    level: usize,
}

impl Writer {
    fn line(&mut self, line: &str) {
        self.text.extend(core::iter::repeat_n(' ', 4 * self.level));
        self.text.push_str(line);
        self.text.push('\n');
    }

    fn tag(name: &str, attributes: &[(&str, &str)], end: &str) -> String {
        let mut tag = format!("<{name}");
        for (attribute, value) in attributes {
            tag.push_str(&format!(" {attribute}=\"{}\"", escaped(value)));
        }
        tag.push_str(end);
        tag
    }

    fn open(&mut self, name: &str, attributes: &[(&str, &str)]) {
        self.line(&Self::tag(name, attributes, ">"));
        self.level += 1;
    }

    fn close(&mut self, name: &str) {
        self.level -= 1;
        self.line(&format!("</{name}>"));
    }

    fn empty(&mut self, name: &str, attributes: &[(&str, &str)]) {
        self.line(&Self::tag(name, attributes, "/>"));
    }

    fn settings(&mut self, settings: &Settings) {
        for setting in &settings.0 {
            self.empty(
                "option",
                &[("name", &setting.name), ("value", &setting.value)],
            );
        }
    }

    fn settings_section(&mut self, name: &str, settings: &Settings) {
        if !settings.is_empty() {
            self.open("section", &[("name", name)]);
            self.settings(settings);
            self.close("section");
        }
    }
}
