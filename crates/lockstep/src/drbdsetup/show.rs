//! `drbdsetup show` (config-and-cli.md, 12): the text that `drbdadm adjust` reads, and JSON.

use lockstep_core::state::ConnState;
use lockstep_daemon::names::Named;
use lockstep_daemon::report::{ConnectionReport, DeviceReport, OptionTexts, ResourceReport};
use lockstep_format::conf::options::{self, Kind, OptionSpec, OptionValue, Set};

use super::status_json::{address, address_parts, string};

/// Which drbdadm reads the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Dialect {
    /// Ours, and drbd-utils from 9.32 on.
    Current,
    /// drbd-utils 9.22: no device options, `_is_standalone` in place of `_cstate`.
    V922,
}

/// Whether options with their default are printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Defaults {
    Hidden,
    Shown,
}

/// All resources as text.
pub(super) fn text(resources: &[ResourceReport], defaults: Defaults, dialect: Dialect) -> String {
    let mut out = String::new();
    for r in resources {
        let mut printer = Printer {
            out: String::new(),
            indent: 0,
            defaults,
            dialect,
        };
        printer.resource(r);
        out.push_str(&printer.out);
        out.push('\n');
    }
    out
}

struct Printer {
    out: String,
    indent: usize,
    defaults: Defaults,
    dialect: Dialect,
}

impl Printer {
    fn line(&mut self, text: &str) {
        self.out.push_str(&" ".repeat(self.indent * 4));
        self.out.push_str(text);
        self.out.push('\n');
    }

    fn open(&mut self, text: &str) {
        self.line(&format!("{text} {{"));
        self.indent += 1;
    }

    fn close(&mut self) {
        self.indent -= 1;
        self.line("}");
    }

    /// A block of options; nothing if it would be empty.
    fn section(&mut self, name: &str, sets: &[(Set, &OptionTexts)]) {
        let mut lines = Vec::new();
        for (set, texts) in sets {
            for spec in options::all(*set) {
                lines.extend(self.option(*set, spec, texts));
            }
        }
        if lines.is_empty() {
            return;
        }
        self.open(name);
        for line in lines {
            self.line(&line);
        }
        self.close();
    }

    fn option(&self, set: Set, spec: &OptionSpec, texts: &OptionTexts) -> Option<String> {
        let old = self.dialect == Dialect::V922;
        if old && (set == Set::Device || !spec.since.is_empty()) {
            return None;
        }
        let value = value_of(spec, texts);
        let is_default = spec.is_default(&value);
        if is_default && (self.defaults == Defaults::Hidden || value.show() == "\"\"") {
            return None;
        }
        let comment = match (spec.unit(), is_default) {
            ("", false) => String::new(),
            ("", true) => " # default".to_owned(),
            (unit, false) => format!(" # {unit}"),
            (unit, true) => format!(" # {unit}, default"),
        };
        Some(format!("{:<16}\t{};{comment}", spec.name, value.show()))
    }

    fn resource(&mut self, r: &ResourceReport) {
        self.open(&format!("resource {}", quoted(&r.name)));
        let compatible = r.options.get("drbd8-api-compatibility");
        if compatible.is_some_and(|value| value == "yes") && self.dialect == Dialect::Current {
            self.line("# This resource is in drbd-8.4 compatibility mode!");
        }
        self.section("options", &[(Set::Resource, &r.options)]);
        self.open("_this_host");
        self.line(&format!("node-id\t\t\t{};", r.node_id));
        for device in &r.devices {
            self.device(device);
        }
        self.close();
        for connection in &r.connections {
            self.connection(connection);
        }
        self.close();
    }

    fn device(&mut self, d: &DeviceReport) {
        self.open(&format!("volume {}", d.volume));
        self.line(&format!("device\t\t\tminor {};", d.minor));
        if let Some(disk) = &d.disk {
            self.line(&format!("disk\t\t\t{};", quoted(&disk.data_path)));
            let meta = match disk.meta_index.as_str() {
                "internal" => "internal".to_owned(),
                "flexible" => quoted(&disk.meta_path),
                index => format!("{} [ {index} ]", quoted(&disk.meta_path)),
            };
            self.line(&format!("meta-disk\t\t\t{meta};"));
        } else if d.client {
            self.line("disk\t\t\tnone;");
        }
        let none = OptionTexts::new();
        let attached = if d.disk.is_some() {
            &d.disk_options
        } else {
            &none
        };
        let device = (Set::Device, &d.device_options);
        if d.disk.is_some() {
            self.section("disk", &[(Set::Disk, attached), device]);
        } else {
            self.section("disk", &[device]);
        }
        self.close();
    }

    fn connection(&mut self, c: &ConnectionReport) {
        self.open("connection");
        self.line(&format!("_peer_node_id {};", c.peer_node_id));
        for path in &c.paths {
            self.open("path");
            self.line(&format!("_this_host {};", path_end(&path.local)));
            self.line(&format!("_remote_host {};", path_end(&path.remote)));
            self.close();
        }
        match self.dialect {
            Dialect::Current => self.line(&format!("_cstate {};", c.state.text())),
            Dialect::V922 if c.state == ConnState::StandAlone => self.line("_is_standalone;"),
            Dialect::V922 => {}
        }
        self.section("net", &[(Set::Net, &c.options)]);
        for peer_device in &c.peer_devices {
            let before = self.out.len();
            self.open(&format!("volume {}", peer_device.volume));
            let opened = self.out.len();
            self.section("disk", &[(Set::PeerDevice, &peer_device.options)]);
            if self.out.len() == opened {
                self.out.truncate(before);
                self.indent -= 1;
            } else {
                self.close();
            }
        }
        self.close();
    }
}

/// The value that holds: the one that was given, else the default.
fn value_of(spec: &OptionSpec, texts: &OptionTexts) -> OptionValue {
    texts
        .get(spec.name)
        .and_then(|text| spec.parse(text).ok())
        .unwrap_or_else(|| spec.default())
}

fn quoted(text: &str) -> String {
    OptionValue::Text(text.to_owned()).show()
}

/// `ipv4 10.1.0.1:7790`, `ipv6 [::1]:7790`.
fn path_end(address: &str) -> String {
    address.replacen(':', " ", 1)
}

/// All resources as JSON, with defaults.
pub(super) fn json(resources: &[ResourceReport]) -> String {
    if resources.is_empty() {
        return "[\n]\n".to_owned();
    }
    let all: Vec<String> = resources.iter().map(json_resource).collect();
    format!("[\n{}\n]\n", all.join(",\n"))
}

/// A JSON value that is laid out over several lines.
enum Json {
    Text(String),
    Object(Vec<(String, Json)>),
    Array(Vec<Json>),
    /// Already rendered.
    Raw(String),
}

impl Json {
    fn render(&self, indent: usize, out: &mut String) {
        let pad = |out: &mut String, indent: usize| out.push_str(&" ".repeat(indent));
        match self {
            Json::Text(text) => out.push_str(&string(text)),
            Json::Raw(text) => out.push_str(text),
            Json::Object(members) => {
                out.push_str("{\n");
                for (index, (key, value)) in members.iter().enumerate() {
                    pad(out, indent + 4);
                    out.push_str(&format!("\"{key}\": "));
                    value.render(indent + 4, out);
                    out.push_str(if index + 1 < members.len() {
                        ",\n"
                    } else {
                        "\n"
                    });
                }
                pad(out, indent);
                out.push('}');
            }
            Json::Array(elements) => {
                out.push_str("[\n");
                for (index, element) in elements.iter().enumerate() {
                    pad(out, indent + 4);
                    element.render(indent + 4, out);
                    out.push_str(if index + 1 < elements.len() {
                        ",\n"
                    } else {
                        "\n"
                    });
                }
                pad(out, indent);
                out.push(']');
            }
        }
    }
}

fn json_options(sets: &[(Set, &OptionTexts)]) -> Json {
    let mut members = Vec::new();
    for (set, texts) in sets {
        for spec in options::all(*set) {
            let value = value_of(spec, texts);
            let json = match (&spec.kind, &value) {
                (Kind::Flag, _) => Json::Text(value.to_string()),
                (_, OptionValue::Bool(yes)) => Json::Raw(yes.to_string()),
                _ => Json::Text(value.to_string()),
            };
            members.push((spec.name.to_owned(), json));
        }
    }
    Json::Object(members)
}

fn number(value: impl ToString) -> Json {
    Json::Raw(value.to_string())
}

fn json_resource(r: &ResourceReport) -> String {
    let volumes = r.devices.iter().map(json_device).collect();
    let mut members = vec![
        ("resource".to_owned(), Json::Text(r.name.clone())),
        (
            "options".to_owned(),
            json_options(&[(Set::Resource, &r.options)]),
        ),
        (
            "_this_host".to_owned(),
            Json::Object(vec![
                ("node-id".to_owned(), number(r.node_id)),
                ("volumes".to_owned(), Json::Array(volumes)),
            ]),
        ),
    ];
    if !r.connections.is_empty() {
        let connections = r.connections.iter().map(json_connection).collect();
        members.push(("connections".to_owned(), Json::Array(connections)));
    }
    let mut out = "    ".to_owned();
    Json::Object(members).render(4, &mut out);
    out
}

fn json_device(d: &DeviceReport) -> Json {
    let mut members = vec![
        ("volume_nr".to_owned(), number(d.volume)),
        ("device_minor".to_owned(), number(d.minor)),
    ];
    let device = (Set::Device, &d.device_options);
    let mut sets = vec![device];
    if let Some(disk) = &d.disk {
        members.push((
            "backing-disk".to_owned(),
            Json::Text(disk.data_path.clone()),
        ));
        match disk.meta_index.as_str() {
            "internal" => members.push(("meta-disk".to_owned(), Json::Text("internal".into()))),
            index => {
                members.push(("meta-disk".to_owned(), Json::Text(disk.meta_path.clone())));
                if index != "flexible" {
                    members.push(("meta-disk-index".to_owned(), number(index)));
                }
            }
        }
        sets.insert(0, (Set::Disk, &d.disk_options));
    } else if d.client {
        // The original prints this key twice; consumers take the last one.
        members.push(("disk".to_owned(), Json::Text("none".into())));
    }
    members.push(("disk".to_owned(), json_options(&sets)));
    Json::Object(members)
}

fn json_connection(c: &ConnectionReport) -> Json {
    let host = |text: &str| match address_parts(text) {
        Some(_) => Json::Raw(address("                        ", text)),
        None => Json::Text(text.to_owned()),
    };
    let paths = c.paths.iter().map(|p| {
        Json::Object(vec![
            ("this_host".to_owned(), host(&p.local)),
            ("remote_host".to_owned(), host(&p.remote)),
        ])
    });
    let mut members = vec![("paths".to_owned(), Json::Array(paths.collect()))];
    if c.state == ConnState::StandAlone {
        members.push(("_is_standalone".to_owned(), Json::Raw("true".to_owned())));
    }
    members.push(("_cstate".to_owned(), Json::Text(c.state.text().to_owned())));
    members.push(("net".to_owned(), json_options(&[(Set::Net, &c.options)])));
    if !c.peer_devices.is_empty() {
        let volumes = c.peer_devices.iter().map(|p| {
            Json::Object(vec![
                ("volume_nr".to_owned(), number(p.volume)),
                (
                    "disk".to_owned(),
                    json_options(&[(Set::PeerDevice, &p.options)]),
                ),
            ])
        });
        members.push(("volumes".to_owned(), Json::Array(volumes.collect())));
    }
    members.push(("_peer_node_id".to_owned(), number(c.peer_node_id)));
    Json::Object(members)
}

#[cfg(test)]
mod tests {
    use super::super::sample;
    use super::*;

    #[test]
    fn text_of_the_specification() {
        let mut web = sample::web();
        web.connections.truncate(1);
        assert_eq!(
            text(&[web], Defaults::Hidden, Dialect::Current),
            "resource \"web\" {
    options {
        quorum          \tmajority;
        on-no-quorum    \tio-error;
    }
    _this_host {
        node-id\t\t\t0;
        volume 0 {
            device\t\t\tminor 10;
            disk\t\t\t\"/dev/vg0/web0\";
            meta-disk\t\t\tinternal;
            disk {
                al-extents      \t6007;
            }
        }
        volume 1 {
            device\t\t\tminor 11;
            disk\t\t\tnone;
            disk {
                diskless        \tyes;
            }
        }
    }
    connection {
        _peer_node_id 1;
        path {
            _this_host ipv4 10.1.0.1:7790;
            _remote_host ipv4 10.1.0.2:7790;
        }
        _cstate Connected;
        net {
            cram-hmac-alg   \t\"sha256\";
            shared-secret   \t\"s3 cret\";
            max-buffers     \t8000;
            _name           \t\"bravo\";
        }
        volume 0 {
            disk {
                c-min-rate      \t4096k; # bytes/second
            }
        }
    }
}

"
        );
    }

    #[test]
    fn the_old_dialect_has_no_new_words() {
        let mut web = sample::web();
        web.connections[1].state = ConnState::StandAlone;
        let text = text(&[web], Defaults::Hidden, Dialect::V922);
        assert!(
            !text.contains("_cstate") && !text.contains("diskless"),
            "{text}"
        );
        assert!(text.contains("        _is_standalone;\n"), "{text}");
    }

    #[test]
    fn json_shows_defaults_and_types() {
        let mut web = sample::web();
        web.devices.remove(1);
        let value: serde_json::Value = serde_json::from_str(&json(&[web])).unwrap();
        assert_eq!(value[0]["options"]["auto-promote"], true);
        assert_eq!(value[0]["options"]["peer-ack-window"], "4096s");
        assert_eq!(
            value[0]["_this_host"]["volumes"][0]["disk"]["diskless"],
            "no"
        );
        assert_eq!(value[0]["connections"][0]["net"]["protocol"], "C");
        assert_eq!(
            value[0]["connections"][0]["paths"][0]["this_host"]["port"],
            7790
        );
    }
}
