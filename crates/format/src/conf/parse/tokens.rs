//! Single tokens and option statements, with their error texts.

use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;

use super::super::lex::{Kind, Token};
use super::super::model::{Address, Family, Pos, Setting, Settings};
use super::super::options::{self, OptionSpec, Set, ValueError};
use super::{Abort, Dialect, Parser, Severity};

impl Parser<'_, '_, '_> {
    pub(super) fn pos(&self, token: &Token) -> Pos {
        Pos {
            file: self.file,
            line: token.line,
        }
    }

    /// The next token; broken ones are reported here.
    pub(super) fn next(&mut self) -> Result<Token, Abort> {
        let token = match self.peeked.take() {
            Some(token) => token,
            None => self.lexer.next(),
        };
        if let Kind::Broken(what) = token.kind {
            let pos = self.pos(&token);
            let start: String = token.text.chars().take(SHOWN_CHARS).collect();
            self.state
                .report(Severity::Error, Some(pos), format!("{what}: '{start}...'"));
            return Err(Abort);
        }
        Ok(token)
    }

    pub(super) fn peek(&mut self) -> Result<&Token, Abort> {
        let token = self.next()?;
        Ok(self.peeked.insert(token))
    }

    /// Reports a token that may not stand where it does.
    pub(super) fn wrong(&mut self, token: &Token, expected: &str) -> Abort {
        let known = expected
            .split(['|', ' ', '\n', '\t'])
            .filter(|word| !word.is_empty());
        let near = options::nearest(&token.text, known).map(String::from);
        self.report_wrong(token, expected, near);
        Abort
    }

    fn report_wrong(&mut self, token: &Token, expected: &str, near: Option<String>) {
        let got = match token.kind {
            Kind::End => "end of file",
            _ => token.text.as_str(),
        };
        let mut text = format!("Parse error: '{expected}' expected,\n\tbut got '{got}'");
        if let Some(near) = near.filter(|near| near != got) {
            text.push_str(&format!("\n\tdid you mean '{near}'?"));
        }
        let pos = self.pos(token);
        self.state.report(Severity::Error, Some(pos), text);
    }

    /// Reports an unknown option with all that the sets know.
    pub(super) fn wrong_option(&mut self, token: &Token, sets: &[Set]) -> Abort {
        let specs = || sets.iter().flat_map(|set| options::all(*set));
        let names: Vec<&str> = specs().map(|spec| spec.name).collect();
        let bare = token.text.strip_prefix("no-").unwrap_or(&token.text);
        let near = options::nearest(bare, names.iter().copied()).map(String::from);
        self.report_wrong(token, &names.join(" | "), near);
        Abort
    }

    pub(super) fn wrong_value(&mut self, spec: &OptionSpec, value: &Token, error: &ValueError) {
        let mut shown: String = value.text.chars().take(SHOWN_CHARS).collect();
        if shown.len() < value.text.len() {
            shown.push_str("...");
        }
        let name = spec.name;
        let mut text =
            format!("Parse error: while parsing value ('{shown}')\nfor {name}. Value is {error}.");
        match error {
            ValueError::NotAllowed { .. } => {
                let words = error.allowed_words().unwrap_or_default();
                text.push_str(&format!("\nAllowed values are: {words}"));
                let near = options::nearest(&value.text, words.split(" | "));
                if let Some(near) = near {
                    text.push_str(&format!("\ndid you mean '{near}'?"));
                }
            }
            ValueError::TooLong { max_len_bytes } => {
                text.push_str(&format!("\nmax len: {max_len_bytes}"));
            }
            ValueError::NotANumber | ValueError::TooSmall | ValueError::TooBig => {
                text.push_str(&format!("\nallowed: {}", spec.allowed()));
            }
            ValueError::NotYesNo => {}
        }
        let pos = self.pos(value);
        self.state.report(Severity::Error, Some(pos), text);
    }

    pub(super) fn expect(&mut self, operator: char) -> Result<(), Abort> {
        let token = self.next()?;
        if token.is(operator) {
            return Ok(());
        }
        let mut buffer = [0; 4];
        Err(self.wrong(&token, operator.encode_utf8(&mut buffer)))
    }

    /// Takes an operator if it is next.
    pub(super) fn accept(&mut self, operator: char) -> Result<bool, Abort> {
        if self.peek()?.is(operator) {
            self.peeked = None;
            return Ok(true);
        }
        Ok(false)
    }

    /// Takes an unquoted word if it is next.
    pub(super) fn accept_word(&mut self, word: &str) -> Result<bool, Abort> {
        if self.peek()?.is_word(word) {
            self.peeked = None;
            return Ok(true);
        }
        Ok(false)
    }

    pub(super) fn text(&mut self, expected: &str) -> Result<Token, Abort> {
        let token = self.next()?;
        if token.is_text() {
            Ok(token)
        } else {
            Err(self.wrong(&token, expected))
        }
    }

    /// A name: like [`Self::text`], but without quotes no word of the language, number or address.
    pub(super) fn name(&mut self, expected: &str) -> Result<Token, Abort> {
        let token = self.text(expected)?;
        if token.kind == Kind::Word && is_taken(&token.text) {
            let text = format!(
                "Parse error: '{expected}' expected,\n\tbut got '{}'\n\tput it in quotes if it is \
                 meant as a name",
                token.text
            );
            let pos = self.pos(&token);
            self.state.report(Severity::Error, Some(pos), text);
            return Err(Abort);
        }
        Ok(token)
    }

    pub(super) fn value_text(&mut self, name: &str) -> Result<Token, Abort> {
        let token = self.next()?;
        if token.is_text() {
            Ok(token)
        } else {
            Err(self.wrong(&token, &format!("value of {name}")))
        }
    }

    /// An integer in a range; outside of it an error is reported and the nearest number taken.
    pub(super) fn integer(&mut self, what: &str, min: u32, max: u32) -> Result<(u32, Pos), Abort> {
        let token = self.next()?;
        let digits = token.is_text() && token.text.bytes().all(|byte| byte.is_ascii_digit());
        if !digits || token.text.is_empty() {
            return Err(self.wrong(&token, &format!("{what} (a number)")));
        }
        let pos = self.pos(&token);
        let number: u64 = token.text.parse().unwrap_or(u64::MAX);
        if number < u64::from(min) || number > u64::from(max) {
            let shown = &token.text;
            let text = format!("{what} {shown} => {number} out of range [{min}..{max}].");
            self.state.report(Severity::Error, Some(pos), text);
            return Ok((number.clamp(u64::from(min), u64::from(max)) as u32, pos));
        }
        Ok((number as u32, pos))
    }

    /// The first word of the next statement, none at the closing brace.
    pub(super) fn statement(&mut self) -> Result<Option<Token>, Abort> {
        let token = self.next()?;
        if token.is('}') {
            return Ok(None);
        }
        if token.kind == Kind::End {
            return Err(self.wrong(&token, "}"));
        }
        Ok(Some(token))
    }

    /// Names up to a `;` or `{`, which is taken too and returned.
    pub(super) fn names(&mut self, what: &str) -> Result<(Vec<String>, char), Abort> {
        let mut found = Vec::new();
        while found.is_empty() || self.peek()?.is_text() {
            found.push(self.name(what)?.text);
        }
        let token = self.next()?;
        match token.kind {
            Kind::Operator(end @ (';' | '{')) => Ok((found, end)),
            _ => Err(self.wrong(&token, what)),
        }
    }

    /// Texts up to a `;` or `{`, which is taken too and returned.
    pub(super) fn texts(&mut self, what: &str) -> Result<(Vec<String>, char), Abort> {
        let mut found = Vec::new();
        loop {
            let token = self.next()?;
            match token.kind {
                Kind::Word | Kind::Quoted => found.push(token.text),
                Kind::Operator(end @ (';' | '{')) if !found.is_empty() => return Ok((found, end)),
                _ => return Err(self.wrong(&token, what)),
            }
        }
    }

    /// `skip`: everything up to the end of the next balanced block.
    pub(super) fn skip(&mut self) -> Result<(), Abort> {
        let mut depth = 0_u32;
        loop {
            let token = self.next()?;
            match token.kind {
                Kind::Operator('{') => depth += 1,
                Kind::Operator('}') => {
                    if depth <= 1 {
                        return Ok(());
                    }
                    depth -= 1;
                }
                Kind::End => return Err(self.wrong(&token, "}")),
                _ => {}
            }
        }
    }

    /// `addr` of the grammar.
    pub(super) fn address(&mut self) -> Result<Address, Abort> {
        let first = self.next()?;
        let family = match first.text.as_str() {
            _ if first.kind != Kind::Word => None,
            "ipv4" => Some(Family::Ipv4),
            "ipv6" => Some(Family::Ipv6),
            "ssocks" | "sci" => Some(Family::Ssocks),
            "sdp" => Some(Family::Sdp),
            _ => None,
        };
        let host = match family {
            Some(Family::Ipv6) => {
                self.expect('[')?;
                let host = self.lexer.until_bracket();
                self.expect(']')?;
                if !is_ipv6(&host.text) {
                    return Err(self.wrong(&host, "IPv6 address"));
                }
                host
            }
            Some(_) => self.next()?,
            None => first,
        };
        if family != Some(Family::Ipv6) && !is_ipv4(&host.text) {
            return Err(self.wrong(&host, "ssocks | sdp | ipv4 | ipv6 | <ipv4 address> "));
        }
        self.expect(':')?;
        let (port, _) = self.integer("port", 1, 65535)?;
        let port = u16::try_from(port).unwrap_or(u16::MAX);
        Ok(Address {
            family: family.unwrap_or(Family::Ipv4),
            host: host.text,
            port,
        })
    }

    /// One option statement whose name was read already; stored in the list of its set.
    ///
    /// The first set that knows the name gets it.
    pub(super) fn option(
        &mut self,
        name: &Token,
        lists: &mut [(Set, &mut Settings)],
    ) -> Result<(), Abort> {
        let show = self.state.options.dialect == Dialect::Show;
        if show && name.text == "_unknown" {
            let unknown = self.text("option name")?;
            let pos = self.pos(&unknown);
            let setting = Setting {
                name: unknown.text,
                value: String::new(),
                pos,
                unknown: true,
            };
            for (set, list) in lists.iter_mut() {
                if options::find(*set, &setting.name).is_some() {
                    list.0.push(setting);
                    break;
                }
            }
            return self.expect(';');
        }
        let found = lists
            .iter()
            .position(|(set, _)| find(*set, &name.text).is_some());
        let Some(index) = found else {
            if show && name.text == "discard-my-data" {
                while !self.next()?.is(';') {}
                return Ok(());
            }
            let sets: Vec<Set> = lists.iter().map(|(set, _)| *set).collect();
            return Err(self.wrong_option(name, &sets));
        };
        let Some((spec, negated)) = find(lists[index].0, &name.text) else {
            return Err(Abort);
        };
        let pos = self.pos(name);
        let value = match self.peek()?.is(';') {
            true => None,
            false => Some(self.value_text(spec.name)?),
        };
        self.expect(';')?;
        let is_bool = matches!(spec.kind, options::Kind::Bool { .. } | options::Kind::Flag);
        let text = match value {
            None if is_bool => String::from(if negated { "no" } else { "yes" }),
            None => {
                let end = Token {
                    kind: Kind::Operator(';'),
                    text: ";".into(),
                    line: name.line,
                };
                self.report_wrong(&end, &format!("value of {}", spec.name), None);
                return Ok(());
            }
            Some(value) => {
                // The value of resync-after is a resource name here, a minor only further on.
                if (spec.name != "resync-after" || show)
                    && let Err(error) = spec.parse(&value.text)
                {
                    self.wrong_value(spec, &value, &error);
                }
                value.text
            }
        };
        lists[index].1.push(spec.name, &text, pos);
        Ok(())
    }
}

/// Looks an option up by its name or, for booleans, by `no-NAME`.
fn find(set: Set, name: &str) -> Option<(&'static OptionSpec, bool)> {
    if let Some(spec) = options::find(set, name) {
        return Some((spec, false));
    }
    let spec = options::find(set, name.strip_prefix("no-")?)?;
    matches!(spec.kind, options::Kind::Bool { .. } | options::Kind::Flag).then_some((spec, true))
}

fn is_ipv4(text: &str) -> bool {
    text.parse::<core::net::Ipv4Addr>().is_ok()
}

/// Whether an unquoted word is something else than a name: a word of the language, a number with or
/// without a unit, a version, an address.
fn is_taken(text: &str) -> bool {
    let digits = text.trim_end_matches(['M', 'K', 'G', 's']);
    let is_number = (1..=8).contains(&digits.len())
        && digits.bytes().all(|byte| byte.is_ascii_digit())
        && text.len() <= digits.len() + 1;
    let mut parts = text.split('.');
    let is_dotted = matches!(text.split('.').count(), 3 | 4)
        && parts.all(|part| {
            (1..=3).contains(&part.len()) && part.bytes().all(|byte| byte.is_ascii_digit())
        });
    is_number
        || is_dotted
        || WORDS.contains(&text)
        || text.starts_with("require-drbd-module-version-")
}

/// Words that are no names without quotes.
const WORDS: &[&str] = &[
    "_is_standalone",
    "_peer_node_id",
    "_remote_host",
    "_this_host",
    "address",
    "ask",
    "cmd-timeout-long",
    "cmd-timeout-medium",
    "cmd-timeout-short",
    "common",
    "connection",
    "connection-mesh",
    "device",
    "dialog-refresh",
    "disable-ip-verification",
    "disk",
    "flexible-meta-disk",
    "floating",
    "global",
    "handlers",
    "host",
    "hosts",
    "include",
    "inside",
    "ipv4",
    "ipv6",
    "meta-disk",
    "minor",
    "minor-count",
    "net",
    "no",
    "node-id",
    "on",
    "options",
    "outside",
    "path",
    "port",
    "proxy",
    "resource",
    "sci",
    "sdp",
    "skip",
    "ssocks",
    "stacked-on-top-of",
    "startup",
    "syncer",
    "template-file",
    "udev-always-use-vnr",
    "usage-count",
    "via",
    "volume",
    "yes",
];

/// IPv6, with an optional scope behind `%`.
fn is_ipv6(text: &str) -> bool {
    let (address, scope) = text.split_once('%').unwrap_or((text, "x"));
    address.parse::<core::net::Ipv6Addr>().is_ok() && !scope.is_empty()
}

/// Characters of a wrong text that are shown.
const SHOWN_CHARS: usize = 20;
