//! The one table of options: name, section, type, unit, default, range, since when, help.
//!
//! The parser of `drbd.conf`, the options of `drbdsetup`, the output of `show`, the help texts and
//! the typed structures of the replication core all come from this table, so that none of them can
//! disagree. [`find`] looks a name up, [`OptionSpec::parse`] checks a value, [`all`] iterates in
//! the order in which the tools print.

mod distance;
mod table;
mod typed;
mod value;

pub use distance::nearest;
pub use table::{all, command};
pub use typed::{
    AfterSb0pri, AfterSb1pri, AfterSb2pri, DeviceOptions, DiskOptions, Fencing, NetOptions,
    OnCongestion, OnIoError, OnNoDataAccessible, OnNoQuorum, OnSuspendedPrimaryOutdated,
    PeerDeviceOptions, Protocol, Quorum, ReadBalancing, ResourceOptions, ResyncAfter, RrConflict,
    SetError,
};
pub(in crate::conf) use value::quoted;
pub use value::{OptionValue, ValueError};

use alloc::string::String;

/// Which table an option belongs to; each corresponds to a section of the file or a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Set {
    /// `net` sections; `new-peer`, `net-options`.
    Net,
    /// `disk` sections of a host or volume; `attach`, `disk-options`.
    Disk,
    /// `disk` sections too; `new-minor`.
    Device,
    /// `disk` sections of a connection; `peer-device-options`.
    PeerDevice,
    /// `options` sections; `new-resource`, `resource-options`.
    Resource,
    /// `startup` sections; the `wait-*` commands.
    Startup,
    /// `handlers` sections; every value is a shell command.
    Handlers,
    /// `proxy` sections.
    Proxy,
    /// The `global` section.
    Global,
}

impl Set {
    /// Every set, in the order of the specification.
    pub const ALL: [Set; 9] = [
        Set::Net,
        Set::Disk,
        Set::Device,
        Set::PeerDevice,
        Set::Resource,
        Set::Startup,
        Set::Handlers,
        Set::Proxy,
        Set::Global,
    ];

    /// The section of `drbd.conf` in which the options of this set are written.
    pub const fn section(self) -> &'static str {
        match self {
            Set::Net => "net",
            Set::Disk | Set::Device | Set::PeerDevice => "disk",
            Set::Resource => "options",
            Set::Startup => "startup",
            Set::Handlers => "handlers",
            Set::Proxy => "proxy",
            Set::Global => "global",
        }
    }
}

/// What a number without a suffix means, and in which unit values are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scale {
    /// Plain number.
    One,
    /// KiB.
    Kib,
    /// Sectors of 512 bytes.
    Sector,
}

impl Scale {
    /// Bytes (or plain units) per stored unit.
    pub const fn factor(self) -> u64 {
        match self {
            Scale::One => 1,
            Scale::Kib => 1024,
            Scale::Sector => 512,
        }
    }

    /// The letter that `show` appends to a number: empty, `k` or `s`.
    pub const fn suffix(self) -> &'static str {
        match self {
            Scale::One => "",
            Scale::Kib => "k",
            Scale::Sector => "s",
        }
    }

    /// The `unit_prefix` of `xml-help`: `1`, `k` or `s`.
    pub const fn prefix(self) -> &'static str {
        match self {
            Scale::One => "1",
            Scale::Kib => "k",
            Scale::Sector => "s",
        }
    }
}

/// One word that an enumeration accepts, with the number that stands for it in the kernel's API.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Symbol {
    /// The word as written in the file.
    pub name: &'static str,
    /// The number of the kernel's interface.
    pub code: u32,
}

/// What a number outside its range leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OutOfRange {
    /// The value is refused.
    Refuse,
    /// The nearest allowed number is taken in silence, as the original does for `al-extents`.
    Clamp,
}

/// The type of an option with everything needed to check and print its values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A number in `scale`; range and default are in that scale.
    Number {
        /// What a number without a suffix means.
        scale: Scale,
        /// Smallest allowed stored number.
        min: i64,
        /// Largest allowed stored number.
        max: i64,
        /// Stored number when the option is not given. May lie outside of the range: "not set".
        default: i64,
        /// What happens outside the range.
        out_of_range: OutOfRange,
        /// Unit text that `show` and `xml-help` print, empty when they print none.
        unit: &'static str,
    },
    /// `yes` or `no`.
    Bool {
        /// Value when the option is not given.
        default: bool,
    },
    /// Like a boolean with the default no, but `no` is not sent at all.
    Flag,
    /// One of a list of words.
    Enum {
        /// The words in the order in which tools print them.
        symbols: &'static [Symbol],
        /// Word when the option is not given.
        default: &'static str,
        /// Whether upper and lower case are the same.
        case: Case,
    },
    /// A number or one of a list of words.
    NumberOrSymbol {
        /// Smallest allowed number.
        min: i64,
        /// Largest allowed number.
        max: i64,
        /// The words.
        symbols: &'static [Symbol],
        /// Word when the option is not given.
        default: &'static str,
    },
    /// Free text; the default is empty.
    Text {
        /// Longest text in bytes.
        max_len_bytes: usize,
    },
    /// Description of a key in the kernel's key rings; the default is unset.
    Key {
        /// Type of the key: `keyring` or `user`.
        key_type: &'static str,
    },
}

/// Whether upper and lower case letters are the same in the words of an enumeration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Case {
    /// They differ.
    Sensitive,
    /// They do not.
    Ignored,
}

/// When an option may be given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// At creation and later.
    Anytime,
    /// Only when the object is created (`new-peer`, `attach`, `new-minor`), not with `*-options`.
    AtCreation,
    /// Only on a command line, never in a file.
    CommandOnly,
}

/// One row of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OptionSpec {
    /// Name in the file and, behind `--`, on the command line.
    pub name: &'static str,
    /// Type, range, default, unit.
    pub kind: Kind,
    /// When it may be given.
    pub change: Change,
    /// First version of the original's tools that knows it; empty for "from the beginning".
    pub since: &'static str,
    /// One sentence for people.
    pub help: &'static str,
}

impl OptionSpec {
    /// Checks a value as written in a file or behind `--name=`.
    pub fn parse(&self, text: &str) -> Result<OptionValue, ValueError> {
        value::parse(&self.kind, text)
    }

    /// The value that holds when the option is not given.
    pub fn default(&self) -> OptionValue {
        value::default(&self.kind)
    }

    /// Whether `value` is the default, which `show` leaves out.
    pub fn is_default(&self, value: &OptionValue) -> bool {
        *value == self.default()
    }

    /// Whether two spellings mean the same (`100M` and `102400k`, `yes` and no value at all).
    ///
    /// Values that do not parse are compared as text.
    pub fn same_value(&self, left: &str, right: &str) -> bool {
        match (self.parse(left), self.parse(right)) {
            (Ok(left), Ok(right)) => left == right,
            _ => left == right,
        }
    }

    /// Unit that is printed behind a value in `show`, empty when there is none.
    pub const fn unit(&self) -> &'static str {
        match self.kind {
            Kind::Number { unit, .. } => unit,
            _ => "",
        }
    }

    /// What is allowed here, for error messages: `1..600 (1/10 seconds), default 60`.
    pub fn allowed(&self) -> String {
        value::allowed(&self.kind)
    }
}

/// Looks up an option of a set by its whole name.
pub fn find(set: Set, name: &str) -> Option<&'static OptionSpec> {
    all(set).iter().find(|spec| spec.name == name)
}

/// Looks up an option by its name or an unambiguous beginning of it, as `getopt` does.
///
/// A whole name wins over longer names that begin with it.
pub fn find_abbreviated<'a>(
    specs: impl Iterator<Item = &'a OptionSpec> + Clone,
    name: &str,
) -> Option<&'a OptionSpec> {
    if let Some(exact) = specs.clone().find(|spec| spec.name == name) {
        return Some(exact);
    }
    let mut matching = specs.filter(|spec| spec.name.starts_with(name));
    let first = matching.next()?;
    match matching.next() {
        None => Some(first),
        Some(_) => None,
    }
}

#[cfg(test)]
mod tests;
