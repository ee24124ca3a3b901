//! Colour codes of `status` and `events2`, and lines that wrap at field boundaries.

use lockstep_core::state::{ConnState, DiskState, ReplState, Role};

/// Whether colour codes are printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Colour {
    /// Yes.
    On,
    /// No.
    Off,
}

/// Whose state it is: own states are bold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    Own,
    Peer,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Class {
    Primary,
    Good,
    Bad,
    Transitional,
    Normal,
}

impl Colour {
    fn paint(self, side: Side, class: Class, text: &str) -> String {
        let code = match (side, class) {
            (Side::Own, Class::Primary) => "1;36",
            (Side::Own, Class::Good) => "1;32",
            (Side::Own, Class::Bad) => "1;31",
            (Side::Own, Class::Transitional) => "1",
            (Side::Peer, Class::Primary) => "36",
            (Side::Peer, Class::Good) => "32",
            (Side::Peer, Class::Bad) => "31",
            (Side::Peer, Class::Transitional) | (_, Class::Normal) => "",
        };
        if self == Colour::Off || code.is_empty() {
            text.to_owned()
        } else {
            format!("\x1b[{code}m{text}\x1b[0m")
        }
    }

    pub(crate) fn role(self, side: Side, role: Role, text: &str) -> String {
        let class = match role {
            Role::Primary => Class::Primary,
            Role::Secondary => Class::Normal,
            Role::Unknown => Class::Transitional,
        };
        self.paint(side, class, text)
    }

    pub(crate) fn conn(self, state: ConnState, text: &str) -> String {
        let class = match state {
            ConnState::StandAlone | ConnState::Connecting => Class::Bad,
            ConnState::Connected => Class::Normal,
            _ => Class::Transitional,
        };
        self.paint(Side::Own, class, text)
    }

    pub(crate) fn repl(self, state: ReplState, text: &str) -> String {
        let class = match state {
            ReplState::Established
            | ReplState::VerifyS
            | ReplState::VerifyT
            | ReplState::PausedSyncS
            | ReplState::Ahead => Class::Normal,
            ReplState::SyncSource | ReplState::SyncTarget | ReplState::PausedSyncT => Class::Bad,
            _ => Class::Transitional,
        };
        let side = match state {
            ReplState::SyncTarget | ReplState::PausedSyncT | ReplState::Behind => Side::Own,
            _ => Side::Peer,
        };
        self.paint(side, class, text)
    }

    pub(crate) fn disk(self, side: Side, state: DiskState, intended: bool, text: &str) -> String {
        let class = match state {
            DiskState::Diskless if intended => Class::Good,
            DiskState::Diskless | DiskState::Inconsistent | DiskState::Outdated => Class::Bad,
            DiskState::UpToDate => Class::Good,
            _ => Class::Transitional,
        };
        self.paint(side, class, text)
    }

    pub(crate) fn quorum(self, quorum: bool) -> String {
        let class = if quorum { Class::Good } else { Class::Bad };
        self.paint(Side::Own, class, yes_no(quorum))
    }

    pub(crate) fn failing(self, failing: bool) -> String {
        let class = if failing { Class::Bad } else { Class::Good };
        self.paint(Side::Own, class, yes_no(failing))
    }

    /// A mark before something that is not good.
    pub(crate) fn failing_mark(self, text: &str) -> String {
        self.paint(Side::Own, Class::Bad, text)
    }

    pub(crate) fn open(self, open: bool) -> String {
        let class = if open { Class::Primary } else { Class::Normal };
        self.paint(Side::Own, class, yes_no(open))
    }
}

/// `yes` or `no`.
pub(crate) fn yes_no(value: bool) -> &'static str {
    if value { "yes" } else { "no" }
}

/// Builds lines of fields. A line that would get longer than the width goes on in a new one.
#[derive(Debug)]
pub(crate) struct Wrapped {
    out: String,
    /// Visible characters of the present line behind its indent.
    column: usize,
    width: usize,
    first_indent: usize,
    indent: usize,
    fresh: bool,
}

impl Wrapped {
    pub(crate) fn new(width: usize) -> Wrapped {
        Wrapped {
            out: String::new(),
            column: 0,
            width,
            first_indent: 0,
            indent: 0,
            fresh: true,
        }
    }

    /// Starts an item: its first line has one indent, what follows another.
    pub(crate) fn item(&mut self, first_indent: usize, indent: usize) {
        self.end_line();
        self.first_indent = first_indent;
        self.indent = indent;
    }

    /// Goes on with the same item in a new line.
    pub(crate) fn next_line(&mut self) {
        self.end_line();
        self.first_indent = self.indent;
    }

    /// A field that may contain colour codes.
    pub(crate) fn field(&mut self, text: &str) {
        let len = visible(text);
        if self.fresh {
            self.out.push_str(&" ".repeat(self.first_indent));
            self.column = len;
        } else if self.column + 1 + len > self.width {
            self.out.push('\n');
            self.out.push_str(&" ".repeat(self.indent));
            self.column = len;
        } else {
            self.out.push(' ');
            self.column += 1 + len;
        }
        self.out.push_str(text);
        self.fresh = false;
    }

    pub(crate) fn end_line(&mut self) {
        if !self.fresh {
            self.out.push('\n');
        }
        self.fresh = true;
    }

    pub(crate) fn blank_line(&mut self) {
        self.end_line();
        self.out.push('\n');
    }

    pub(crate) fn finish(mut self) -> String {
        self.end_line();
        self.out
    }
}

/// Characters that are seen: without colour codes.
fn visible(text: &str) -> usize {
    let mut count = 0;
    let mut in_code = false;
    for c in text.chars() {
        match (in_code, c) {
            (false, '\x1b') => in_code = true,
            (false, _) => count += 1,
            (true, 'm') => in_code = false,
            (true, _) => {}
        }
    }
    count
}
