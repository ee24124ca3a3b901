//! The commands of `drbdsetup`: arguments, options, help (config-and-cli.md, 9).

use lockstep_format::conf::options::{self, Kind, OptionSpec, Set};

/// One command.
#[derive(Debug)]
pub(super) struct Verb {
    pub(super) name: &'static str,
    pub(super) summary: &'static str,
    /// Names of the arguments; optional ones are in brackets.
    pub(super) arguments: &'static [&'static str],
    sets: &'static [Set],
    flags: &'static [Flag],
    /// A form of DRBD 8.4: understood, not listed.
    pub(super) of_84: bool,
}

/// An option that is not in the option table: how something is printed.
#[derive(Debug)]
pub(super) struct Flag {
    pub(super) name: &'static str,
    short: char,
    pub(super) value: FlagValue,
}

/// Whether such an option has a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FlagValue {
    None,
    Optional,
    Needed,
}

impl Verb {
    /// Options of the table that this command takes.
    pub(super) fn specs(&self) -> impl Iterator<Item = &'static OptionSpec> + Clone {
        let creation = matches!(
            self.name,
            "new-resource" | "new-minor" | "new-peer" | "attach"
        ) || self.of_84;
        self.sets
            .iter()
            .flat_map(|set| options::all(*set))
            .filter(move |spec| creation || spec.change != options::Change::AtCreation)
            .chain(options::command(match (self.of_84, self.name) {
                (true, "wait-connect" | "wait-sync") => "wait-connect-volume",
                (_, name) => name,
            }))
    }

    /// The spec of an option, by its whole name or an unambiguous beginning.
    pub(super) fn spec(&self, name: &str) -> Option<&'static OptionSpec> {
        options::find_abbreviated(self.specs(), name)
    }

    /// The flag with this name or an unambiguous beginning of it.
    pub(super) fn flag(&self, name: &str) -> Option<&'static Flag> {
        if let Some(exact) = self.flags.iter().find(|flag| flag.name == name) {
            return Some(exact);
        }
        let mut matching = self.flags.iter().filter(|flag| flag.name.starts_with(name));
        let first = matching.next()?;
        matching.next().is_none().then_some(first)
    }

    /// The flag with this letter, or the name of the option of a `wait-*` command.
    pub(super) fn short(&self, letter: char) -> Option<&'static str> {
        if let Some(flag) = self.flags.iter().find(|flag| flag.short == letter) {
            return Some(flag.name);
        }
        match (self.name.starts_with("wait-"), letter) {
            (true, 't') => Some("wfc-timeout"),
            (true, 'd') => Some("degr-wfc-timeout"),
            (true, 'o') => Some("outdated-wfc-timeout"),
            (true, 'w') => Some("wait-after-sb"),
            _ => None,
        }
    }

    /// Names of all options.
    pub(super) fn option_names(&self) -> Vec<&'static str> {
        let specs = self.specs().map(|spec| spec.name);
        specs
            .chain(self.flags.iter().map(|flag| flag.name))
            .collect()
    }

    /// Number of arguments that have to be given.
    pub(super) fn needed(&self) -> usize {
        self.arguments
            .iter()
            .filter(|name| !name.starts_with('['))
            .count()
    }

    /// `--help` of the command.
    pub(super) fn usage(&self) -> String {
        let mut words = format!("USAGE: drbdsetup {}", self.name);
        for argument in self.arguments {
            match (self.name, *argument) {
                (_, "[resource]") | ("down", _) => words.push_str(" { {resource} | all }"),
                // For the call that the original's drbdadm makes; not for people.
                ("outdate", "[minor]") => {}
                _ => words.push_str(&format!(" {{{argument}}}")),
            }
        }
        let mut out = format!("drbdsetup {} - {}\n\n{words}\n", self.name, self.summary);
        let waits = self.name.starts_with("wait-");
        let of_spec = |spec: &'static OptionSpec| match spec.name {
            "set-defaults" => "[--set-defaults]".to_owned(),
            name if waits => format!("[--{name}=...]"),
            name => format!("[--{name}={}]", value_words(spec)),
        };
        let of_flag = |flag: &Flag| match flag.value {
            FlagValue::None => format!("[--{}]", flag.name),
            FlagValue::Optional | FlagValue::Needed => format!("[--{}=...]", flag.name),
        };
        let (first, others): (Vec<_>, Vec<_>) =
            self.specs().partition(|spec| spec.name == "set-defaults");
        let specs = first.into_iter().chain(others).map(of_spec);
        let mut column = 0;
        for word in specs.chain(self.flags.iter().map(of_flag)) {
            if column > 0 && column + 1 + word.len() <= USAGE_COLUMNS {
                out.push(' ');
                column += 1 + word.len();
            } else {
                out.push_str(if column > 0 { "\n    " } else { "    " });
                column = 4 + word.len();
            }
            out.push_str(&word);
        }
        if column > 0 {
            out.push('\n');
        }
        out
    }

    /// `xml-help` of the command.
    pub(super) fn xml(&self) -> String {
        let mut out = format!(
            "<command name=\"{}\">\n\t<summary>{}</summary>\n",
            self.name, self.summary
        );
        for argument in self.arguments {
            match (self.name, *argument) {
                // The original takes one minor; ours bears its drbdadm's call too.
                ("outdate", "[minor]") => {}
                (_, "[resource]") | ("down", _) => out.push_str(
                    "\t<group>\n\t\t<argument>resource</argument>\n\
                     \t\t<argument>all</argument>\n\t</group>\n",
                ),
                _ => out.push_str(&format!("\t<argument>{argument}</argument>\n")),
            }
        }
        let (first, others): (Vec<_>, Vec<_>) =
            self.specs().partition(|spec| spec.name == "set-defaults");
        for spec in first.into_iter().chain(others) {
            out.push_str(&self.xml_option(spec));
        }
        for flag in self.flags {
            let kind = match flag.value {
                FlagValue::None => "flag",
                FlagValue::Optional | FlagValue::Needed => "string",
            };
            out.push_str(&format!(
                "\t<option name=\"{}\" type=\"{kind}\">\n\t</option>\n",
                flag.name
            ));
        }
        out.push_str("</command>\n");
        out
    }

    fn xml_option(&self, spec: &OptionSpec) -> String {
        // Time limits are numbers by their rule, but the original says "string" of them.
        if self.name.starts_with("wait-") {
            let name = spec.name;
            return format!("\t<option name=\"{name}\" type=\"string\">\n\t</option>\n");
        }
        xml_option(spec)
    }
}

fn value_words(spec: &OptionSpec) -> String {
    match spec.kind {
        Kind::Number { min, max, .. } => format!("({min} ... {max})"),
        Kind::Bool { .. } | Kind::Flag => "{yes|no}".to_owned(),
        Kind::Enum { symbols, .. } => {
            let names: Vec<&str> = symbols.iter().map(|symbol| symbol.name).collect();
            format!("{{{}}}", names.join("|"))
        }
        Kind::NumberOrSymbol {
            min, max, symbols, ..
        } => {
            let names: Vec<&str> = symbols.iter().map(|symbol| symbol.name).collect();
            format!("{{{}}}|({min} ... {max})", names.join("|"))
        }
        Kind::Text { .. } | Kind::Key { .. } => "<str>".to_owned(),
    }
}

/// Width of the usage of a command.
const USAGE_COLUMNS: usize = 80;

fn xml_option(spec: &OptionSpec) -> String {
    let name = spec.name;
    let (kind, body) = match spec.kind {
        Kind::Number {
            scale,
            min,
            max,
            default,
            unit,
            ..
        } => {
            let mut body = format!(
                "\t\t<min>{min}</min>\n\t\t<max>{max}</max>\n\t\t<default>{default}</default>\n\
                 \t\t<unit_prefix>{}</unit_prefix>\n",
                scale.prefix()
            );
            if !unit.is_empty() {
                body.push_str(&format!("\t\t<unit>{unit}</unit>\n"));
            }
            ("numeric", body)
        }
        Kind::Bool { default } => {
            let default = if default { "yes" } else { "no" };
            ("boolean", format!("\t\t<default>{default}</default>\n"))
        }
        Kind::Flag if name == "set-defaults" => ("flag", String::new()),
        Kind::Flag => ("boolean", "\t\t<default>no</default>\n".to_owned()),
        Kind::Enum { symbols, .. } => {
            let lines = symbols
                .iter()
                .map(|s| format!("\t\t<handler>{}</handler>\n", s.name));
            ("handler", lines.collect())
        }
        Kind::NumberOrSymbol {
            min,
            max,
            symbols,
            default,
        } => {
            let mut body = format!(
                "\t\t<min>{min}</min>\n\t\t<max>{max}</max>\n\t\t<default>{default}</default>\n"
            );
            for symbol in symbols {
                body.push_str(&format!("\t\t<symbol>{}</symbol>\n", symbol.name));
            }
            ("numeric-or-symbol", body)
        }
        Kind::Text { .. } | Kind::Key { .. } => ("string", String::new()),
    };
    format!("\t<option name=\"{name}\" type=\"{kind}\">\n{body}\t</option>\n")
}

/// The command with this name.
pub(super) fn find(name: &str) -> Option<&'static Verb> {
    VERBS.iter().find(|verb| verb.name == name)
}

/// The general help.
pub(super) fn help() -> String {
    let mut out = "drbdsetup - Configure replicated devices.\n\n\
                   USAGE: drbdsetup command {arguments} [options]\n\nCommands:\n"
        .to_owned();
    for verb in VERBS {
        out.push_str(&format!("    {} - {}\n", verb.name, verb.summary));
    }
    out.push_str(
        "\nUse 'drbdsetup help command' for command-specific help.\n\
         The node is the one in /run/lockstep or in the directory LOCKSTEP_DIR.\n",
    );
    out
}

const RPV: &[&str] = &["resource", "peer_node_id", "volume"];
const RP: &[&str] = &["resource", "peer_node_id"];
const R: &[&str] = &["resource"];
const M: &[&str] = &["minor"];
const R_OPTIONAL: &[&str] = &["[resource]"];

const fn verb(
    name: &'static str,
    arguments: &'static [&'static str],
    sets: &'static [Set],
    summary: &'static str,
) -> Verb {
    Verb {
        name,
        summary,
        arguments,
        sets,
        flags: &[],
        of_84: false,
    }
}

/// Forms of DRBD 8.4, where a resource has one peer without a number and minors stand for volumes.
const VERBS_84: &[Verb] = &[
    of_84("new-resource", R, &[Set::Resource]),
    of_84(
        "connect",
        &["resource", "local-addr", "remote-addr"],
        &[Set::Net],
    ),
    of_84(
        "disconnect",
        &["resource", "local-addr", "remote-addr"],
        &[],
    ),
    of_84(
        "attach",
        &["minor", "lower_dev", "meta_data_dev", "meta_data_index"],
        &[Set::Disk, Set::PeerDevice, Set::Net],
    ),
    of_84("wait-connect", M, &[]),
    of_84("wait-sync", M, &[]),
];

const fn of_84(
    name: &'static str,
    arguments: &'static [&'static str],
    sets: &'static [Set],
) -> Verb {
    Verb {
        of_84: true,
        ..verb(name, arguments, sets, "As in DRBD 8.4.")
    }
}

/// The form of DRBD 8.4 of the command with this name.
pub(super) fn find_84(name: &str) -> Option<&'static Verb> {
    VERBS_84.iter().find(|verb| verb.name == name)
}

const fn flag(name: &'static str, short: char, value: FlagValue) -> Flag {
    Flag { name, short, value }
}

const STATUS_FLAGS: &[Flag] = &[
    flag("verbose", 'v', FlagValue::None),
    flag("statistics", 's', FlagValue::None),
    flag("color", 'c', FlagValue::Optional),
    flag("json", 'j', FlagValue::None),
];

const EVENTS_FLAGS: &[Flag] = &[
    flag("timestamps", 'T', FlagValue::None),
    flag("statistics", 's', FlagValue::None),
    flag("now", 'n', FlagValue::None),
    flag("poll", 'p', FlagValue::None),
    flag("full", 'f', FlagValue::None),
    flag("color", 'c', FlagValue::Optional),
    flag("diff", 'i', FlagValue::Optional),
    flag("rcvbuf", 'r', FlagValue::Needed),
];

const SHOW_FLAGS: &[Flag] = &[
    flag("show-defaults", 'D', FlagValue::None),
    flag("json", 'j', FlagValue::None),
];

/// Every command, in the order of the help.
pub(super) const VERBS: &[Verb] = &[
    verb("primary", R, &[], "Make this node Primary for a resource."),
    verb(
        "secondary",
        R,
        &[],
        "Make this node Secondary for a resource.",
    ),
    verb(
        "attach",
        &["minor", "lower_dev", "meta_data_dev", "meta_data_index"],
        &[Set::Disk],
        "Attach a disk to a volume.",
    ),
    verb(
        "disk-options",
        M,
        &[Set::Disk],
        "Change the disk options of a volume.",
    ),
    verb("detach", M, &[], "Detach the disk of a volume."),
    verb("connect", RP, &[], "Start to connect to a peer."),
    verb(
        "new-peer",
        RP,
        &[Set::Net],
        "Make a peer known to a resource.",
    ),
    verb("del-peer", RP, &[], "Remove a peer from a resource."),
    verb(
        "new-path",
        &["resource", "peer_node_id", "local-addr", "remote-addr"],
        &[],
        "Add a pair of addresses over which a peer is reached.",
    ),
    verb(
        "del-path",
        &["resource", "peer_node_id", "local-addr", "remote-addr"],
        &[],
        "Remove a pair of addresses.",
    ),
    verb(
        "net-options",
        RP,
        &[Set::Net],
        "Change the network options of a connection.",
    ),
    verb("disconnect", RP, &[], "End the connection to a peer."),
    verb("resize", M, &[], "Take over a changed size of the disks."),
    verb(
        "resource-options",
        R,
        &[Set::Resource],
        "Change the options of a resource.",
    ),
    verb(
        "peer-device-options",
        RPV,
        &[Set::PeerDevice],
        "Change the resync options of a volume towards a peer.",
    ),
    verb("new-current-uuid", M, &[], "Start a new data generation."),
    verb(
        "invalidate",
        M,
        &[],
        "Replace the local data of a volume by a peer's.",
    ),
    verb(
        "invalidate-remote",
        RPV,
        &[],
        "Replace a peer's data of a volume by ours.",
    ),
    verb(
        "pause-sync",
        RPV,
        &[],
        "Pause the resync of a volume with a peer.",
    ),
    verb("resume-sync", RPV, &[], "Let a paused resync go on."),
    verb(
        "suspend-io",
        M,
        &[],
        "Suspend the I/O of the volume's resource.",
    ),
    verb("resume-io", M, &[], "Let suspended I/O go on."),
    // The original takes a minor only, but its drbdadm calls it with resource and minor.
    verb(
        "outdate",
        &["minor", "[minor]"],
        &[],
        "Mark the local data of a volume as outdated.",
    ),
    verb(
        "verify",
        RPV,
        &[],
        "Compare the data of a volume with a peer's.",
    ),
    verb(
        "down",
        R,
        &[],
        "Take down a resource and everything that belongs to it.",
    ),
    verb("role", R, &[], "Show the role of this node."),
    verb("cstate", RP, &[], "Show the state of a connection."),
    verb("peer-role", RP, &[], "Show the role of a peer."),
    verb("dstate", M, &[], "Show the disk states of a volume."),
    verb(
        "udev",
        M,
        &[],
        "Show the names of a volume's device for udev.",
    ),
    verb(
        "show-gi",
        RPV,
        &[],
        "Show the data generation identifiers with a legend.",
    ),
    verb("get-gi", RPV, &[], "Show the data generation identifiers."),
    Verb {
        flags: SHOW_FLAGS,
        ..verb(
            "show",
            R_OPTIONAL,
            &[],
            "Show the configuration that is in effect.",
        )
    },
    Verb {
        flags: STATUS_FLAGS,
        ..verb("status", R_OPTIONAL, &[], "Show the state of resources.")
    },
    Verb {
        flags: EVENTS_FLAGS,
        ..verb(
            "events2",
            R_OPTIONAL,
            &[],
            "Show the state of resources and each change.",
        )
    },
    verb(
        "wait-connect-volume",
        RPV,
        &[],
        "Wait until a volume is connected.",
    ),
    verb(
        "wait-connect-connection",
        RP,
        &[],
        "Wait until a connection is up.",
    ),
    verb(
        "wait-connect-resource",
        R,
        &[],
        "Wait until all connections are up.",
    ),
    verb(
        "wait-sync-volume",
        RPV,
        &[],
        "Wait until a volume is in sync.",
    ),
    verb(
        "wait-sync-connection",
        RP,
        &[],
        "Wait until all volumes of a connection are in sync.",
    ),
    verb(
        "wait-sync-resource",
        R,
        &[],
        "Wait until a resource is in sync.",
    ),
    verb(
        "new-resource",
        &["resource", "node_id"],
        &[Set::Resource],
        "Create a resource.",
    ),
    verb(
        "new-minor",
        &["resource", "minor", "volume"],
        &[Set::Device],
        "Create a new replicated device within a resource.",
    ),
    verb("del-minor", M, &[], "Remove a volume."),
    verb("del-resource", R, &[], "Remove a resource."),
    verb(
        "check-resize",
        M,
        &[],
        "Remember the size of a volume's disk for the day it has grown.",
    ),
    verb(
        "rename-resource",
        &["resource", "new_name"],
        &[],
        "Give a resource another name.",
    ),
    verb(
        "forget-peer",
        RP,
        &[],
        "Free the metadata slot of a peer that will not return.",
    ),
];
