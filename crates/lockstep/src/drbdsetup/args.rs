//! Command lines of `drbdsetup`: words, options in any place, both word orders.

use std::net::{IpAddr, ToSocketAddrs};

use lockstep_daemon::report::OptionTexts;
use lockstep_format::conf::options::{Kind, Set, ValueError, find as find_option, nearest};

use super::verbs::{FlagValue, VERBS, Verb, find, find_84};

/// A command line that was understood.
#[derive(Debug)]
pub(super) struct Parsed {
    pub(super) verb: &'static Verb,
    pub(super) words: Vec<String>,
    /// Options of the option table by their whole names.
    pub(super) options: OptionTexts,
    /// Other options with their value, if one was given.
    pub(super) flags: Vec<(&'static str, Option<String>)>,
    pub(super) help: bool,
}

/// What is wrong with a command line.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Wrong {
    /// Unknown command, or unknown option of one: the general help is shown.
    Unknown {
        verb: Option<&'static str>,
        word: String,
        /// The nearest known one.
        near: Option<&'static str>,
    },
    /// The command's usage is shown.
    Missing { verb: &'static str, number: usize },
    /// More words than the command takes.
    Excess(String),
    /// A value that does not fit.
    Value(String),
}

/// Understands a command line without the program's name. What is wrong may be right in DRBD 8.4.
pub(super) fn parse(args: &[String]) -> Result<Parsed, Wrong> {
    let wrong = match split_verb(args, find) {
        Ok((verb, rest)) => match parse_for(verb, rest) {
            Ok(parsed) => return Ok(parsed),
            Err(wrong) => wrong,
        },
        Err(wrong) => wrong,
    };
    match split_verb(args, find_84) {
        Ok((verb, rest)) => parse_for(verb, rest).map_err(|_| wrong),
        Err(_) => Err(wrong),
    }
}

fn parse_for(verb: &'static Verb, rest: Vec<String>) -> Result<Parsed, Wrong> {
    let mut parsed = Parsed {
        verb,
        words: Vec::new(),
        options: OptionTexts::new(),
        flags: Vec::new(),
        help: false,
    };
    let mut rest = rest.into_iter();
    while let Some(word) = rest.next() {
        if word == "--" {
            parsed.words.extend(rest.by_ref());
        } else if word == "--help" || word == "-h" {
            parsed.help = true;
        } else if let Some(option) = word.strip_prefix("--") {
            let (name, value) = match option.split_once('=') {
                Some((name, value)) => (name, Some(value.to_owned())),
                None => (option, None),
            };
            parsed.option(name, value, &mut rest)?;
        } else if word.len() > 1 && word.starts_with('-') {
            let letters = &word[1..];
            for letter in letters.chars() {
                let unknown = || Wrong::Unknown {
                    verb: Some(verb.name),
                    word: word.clone(),
                    near: None,
                };
                let name = verb.short(letter).ok_or_else(unknown)?;
                parsed.option(name, None, &mut rest)?;
            }
        } else {
            parsed.words.push(word);
        }
    }
    if parsed.help {
        return Ok(parsed);
    }
    let needed = verb.needed();
    if parsed.words.len() < needed {
        return Err(Wrong::Missing {
            verb: verb.name,
            number: parsed.words.len() + 1,
        });
    }
    if parsed.words.len() > verb.arguments.len() {
        return Err(Wrong::Excess(
            parsed.words[verb.arguments.len()..].join(" "),
        ));
    }
    Ok(parsed)
}

/// The command is the first word, or the second if only that is one.
fn split_verb(
    args: &[String],
    find: fn(&str) -> Option<&'static Verb>,
) -> Result<(&'static Verb, Vec<String>), Wrong> {
    let name = |at: usize| args.get(at).map_or("", String::as_str);
    if let Some(verb) = find(name(0)) {
        return Ok((verb, args[1..].to_vec()));
    }
    if let Some(verb) = find(name(1)) {
        let mut rest = vec![args[0].clone()];
        rest.extend_from_slice(&args[2..]);
        return Ok((verb, rest));
    }
    let word = name(0).to_owned();
    let near = nearest(&word, VERBS.iter().map(|verb| verb.name));
    let verb = None;
    Err(Wrong::Unknown { verb, word, near })
}

/// A size of a buffer. One that is too large or too small is not used as it is, but taken.
fn check_bytes(name: &str, text: &str) -> Result<(), Wrong> {
    let spec = find_option(Set::Net, "rcvbuf-size").expect("a size in bytes");
    match spec.parse(text) {
        Err(ValueError::NotANumber) => Err(Wrong::Value(format!(
            "Parse error while parsing value ('{text}') for {name}. \
             Value is not a number; allowed is a number of bytes, also with the suffix k, m or g"
        ))),
        _ => Ok(()),
    }
}

impl Parsed {
    fn option(
        &mut self,
        name: &str,
        value: Option<String>,
        rest: &mut impl Iterator<Item = String>,
    ) -> Result<(), Wrong> {
        let verb = self.verb;
        let unknown = || Wrong::Unknown {
            verb: Some(verb.name),
            word: format!("--{name}"),
            near: nearest(name, verb.option_names().into_iter()),
        };
        let without_value =
            |name: &str| Wrong::Value(format!("{}: option '--{name}' needs a value", verb.name));
        if let Some(flag) = self.verb.flag(name) {
            let value = match (flag.value, value) {
                (FlagValue::Needed, None) => {
                    Some(rest.next().ok_or_else(|| without_value(flag.name))?)
                }
                (FlagValue::None, Some(_)) => return Err(unknown()),
                (_, value) => value,
            };
            if let (FlagValue::Needed, Some(text)) = (flag.value, &value) {
                check_bytes(flag.name, text)?;
            }
            self.flags.push((flag.name, value));
            return Ok(());
        }
        // The name that old scripts use.
        let name = match (self.verb.name, name) {
            ("primary", "overwrite-data-of-peer") => "force",
            ("connect", "dry-run") => "tentative",
            _ => name,
        };
        let spec = self.verb.spec(name).ok_or_else(unknown)?;
        let value = match (value, &spec.kind) {
            (Some(value), _) => value,
            (None, Kind::Bool { .. } | Kind::Flag) => "yes".to_owned(),
            (None, _) => rest.next().ok_or_else(|| without_value(spec.name))?,
        };
        let checked = spec
            .parse(&value)
            .map_err(|error| self.bad_value(spec.name, &value, error))?;
        self.options
            .insert(spec.name.to_owned(), checked.to_string());
        Ok(())
    }

    fn bad_value(&self, name: &str, value: &str, error: ValueError) -> Wrong {
        let spec = self.verb.spec(name);
        let allowed = spec.map_or_else(String::new, |spec| spec.allowed());
        match (self.verb.name.starts_with("wait-"), &error) {
            (true, ValueError::TooBig | ValueError::TooSmall) => Wrong::Value(format!(
                "{} => {value} out of range [0..300000]",
                name.replace('-', "_")
            )),
            _ => Wrong::Value(format!(
                "Parse error while parsing value ('{value}') for {name}. \
                 Value is {error}; allowed is {allowed}"
            )),
        }
    }

    /// A flag was given.
    pub(super) fn has(&self, name: &str) -> bool {
        self.flags.iter().any(|(flag, _)| *flag == name)
    }

    /// Takes a boolean option of a command out of the options.
    pub(super) fn take_bool(&mut self, name: &str) -> Option<bool> {
        self.options.remove(name).map(|value| value == "yes")
    }

    /// Takes a number out of the options, in the option's storage unit.
    pub(super) fn take_number(&mut self, name: &str) -> Option<i64> {
        let text = self.options.remove(name)?;
        self.verb.spec(name)?.parse(&text).ok()?.number()
    }
}

/// A minor number: digits or a device's name.
pub(super) fn minor(text: &str) -> Result<u32, String> {
    let digits = text
        .rsplit('/')
        .next()
        .unwrap_or(text)
        .trim_start_matches("drbd");
    let named = text.starts_with("/dev/drbd") || text.bytes().all(|b| b.is_ascii_digit());
    match digits.parse() {
        Ok(minor) if named && minor < 1 << 20 => Ok(minor),
        _ => Err(format!(
            "Cannot determine minor device number of device '{text}'"
        )),
    }
}

/// A node id or volume number.
pub(super) fn number(what: &str, text: &str) -> Result<u32, String> {
    text.parse()
        .map_err(|_| format!("{what} '{text}' is not a number"))
}

/// `[local:|peer:][ipv4:|ipv6:]ADDR[:PORT]` as `ipv4:ADDR:PORT` or `ipv6:[ADDR]:PORT`.
pub(super) fn address(text: &str) -> Result<String, String> {
    let rest = text
        .strip_prefix("local:")
        .or_else(|| text.strip_prefix("peer:"))
        .unwrap_or(text);
    for family in ["sdp:", "ssocks:"] {
        if rest.starts_with(family) {
            return Err(format!(
                "address '{text}': connections run over ipv4 and ipv6 only"
            ));
        }
    }
    let plain = rest
        .strip_prefix("ipv4:")
        .or_else(|| rest.strip_prefix("ipv6:"))
        .unwrap_or(rest);
    let bad =
        || format!("'{text}' is not an address: write ipv4:ADDRESS:PORT or ipv6:[ADDRESS]:PORT");
    let (host, port) = match plain
        .strip_prefix('[')
        .and_then(|inner| inner.split_once(']'))
    {
        Some((host, port)) => (
            host,
            port.strip_prefix(':')
                .or(Some(port).filter(|p| p.is_empty())),
        ),
        None => match plain.split_once(':') {
            Some((host, port)) => (host, Some(port)),
            None => (plain, Some("")),
        },
    };
    let port: u16 = match port.ok_or_else(bad)? {
        "" => DEFAULT_PORT,
        port => port.parse().map_err(|_| bad())?,
    };
    let resolved = match host.parse::<IpAddr>() {
        Ok(ip) => ip,
        Err(_) => (host, port)
            .to_socket_addrs()
            .map_err(|error| format!("address '{text}': {error}"))?
            .next()
            .ok_or_else(bad)?
            .ip(),
    };
    Ok(match resolved {
        IpAddr::V4(ip) => format!("ipv4:{ip}:{port}"),
        IpAddr::V6(ip) => format!("ipv6:[{ip}]:{port}"),
    })
}

/// The port of an address without one.
const DEFAULT_PORT: u16 = 7788;

#[cfg(test)]
mod tests {
    use super::*;

    fn line(text: &str) -> Result<Parsed, Wrong> {
        let args: Vec<String> = text.split_whitespace().map(str::to_owned).collect();
        parse(&args)
    }

    #[test]
    fn both_word_orders_are_one() {
        for text in ["dstate 10", "10 dstate"] {
            let parsed = line(text).unwrap();
            assert_eq!(
                (parsed.verb.name, parsed.words),
                ("dstate", vec!["10".to_owned()])
            );
        }
    }

    #[test]
    fn an_option_without_its_value_is_no_unknown_option() {
        for (text, option) in [
            ("events2 --rcvbuf", "rcvbuf"),
            ("net-options r 1 --ping-int", "ping-int"),
            ("net-options r 1 --after-sb-0", "after-sb-0pri"),
        ] {
            let wrong = line(text).unwrap_err();
            let Wrong::Value(said) = &wrong else {
                panic!("{text}: {wrong:?}")
            };
            assert!(
                said.contains(&format!("'--{option}' needs a value")),
                "{said}"
            );
        }
    }

    #[test]
    fn the_size_of_a_receive_buffer_is_a_number() {
        for good in ["events2 --rcvbuf=2m", "events2 --rcvbuf 1", "events2 -r 1g"] {
            assert!(line(good).is_ok(), "{good}");
        }
        for bad in ["events2 --rcvbuf=x", "events2 -r 1q", "events2 --rcvbuf="] {
            let Err(Wrong::Value(said)) = line(bad) else {
                panic!("{bad}")
            };
            assert!(said.contains("is not a number"), "{said}");
        }
    }

    #[test]
    fn the_forms_of_84_are_understood() {
        let parsed = line("connect r 10.0.0.1:7788 ipv4:10.0.0.2:7788 --protocol=A").unwrap();
        assert!(parsed.verb.of_84);
        assert_eq!(parsed.options["protocol"], "A");
        assert!(
            line("attach 1 /dev/a /dev/a internal --c-max-rate=4M")
                .unwrap()
                .verb
                .of_84
        );
        assert!(line("new-resource r").unwrap().verb.of_84);
        assert!(line("0 wait-connect").unwrap().verb.of_84);
        for text in ["connect r 1", "new-resource r 0", "disconnect r 1 --force"] {
            assert!(!line(text).unwrap().verb.of_84, "{text}");
        }
        // What is wrong in both is told in today's words.
        assert_eq!(
            line("connect r 1 2 3").unwrap_err(),
            Wrong::Excess("2 3".into())
        );
    }

    #[test]
    fn options_stand_anywhere_and_may_be_cut_short() {
        let parsed =
            line("attach --al-ext=6007 1 --size 1M /dev/a --md-flushes=no /dev/b flexible")
                .unwrap();
        assert_eq!(parsed.words, ["1", "/dev/a", "/dev/b", "flexible"]);
        assert_eq!(parsed.options["al-extents"], "6007");
        assert_eq!(parsed.options["size"], "2048s");
        assert_eq!(parsed.options["md-flushes"], "no");
        assert_eq!(line("primary r --force").unwrap().options["force"], "yes");
        assert!(line("status -vs").unwrap().has("statistics"));
    }

    #[test]
    fn what_is_wrong_is_named() {
        let unknown = |verb, word: &str, near| Wrong::Unknown {
            verb,
            word: word.into(),
            near,
        };
        assert_eq!(
            line("frobnicate").unwrap_err(),
            unknown(None, "frobnicate", None)
        );
        assert_eq!(
            line("attahc 1 a b c").unwrap_err(),
            unknown(None, "attahc", Some("attach"))
        );
        assert_eq!(
            line("net-options r 1 --pign-int=3").unwrap_err(),
            unknown(Some("net-options"), "--pign-int", Some("ping-int"))
        );
        assert_eq!(
            line("new-minor a").unwrap_err(),
            Wrong::Missing {
                verb: "new-minor",
                number: 2
            }
        );
        assert_eq!(line("role a b c").unwrap_err(), Wrong::Excess("b c".into()));
        assert!(matches!(
            line("net-options r 1 --timeout=9999"),
            Err(Wrong::Value(_))
        ));
        assert_eq!(
            line("wait-connect-resource r --wfc-timeout 300001").unwrap_err(),
            Wrong::Value("wfc_timeout => 300001 out of range [0..300000]".into())
        );
        // A fixed option cannot be changed later.
        assert!(line("net-options r 1 --transport=tcp").is_err());
        assert!(line("new-peer r 1 --transport=tcp").is_ok());
    }

    /// Command lines of words in any order, some of them cut or doubled.
    #[test]
    fn mutated_command_lines_never_panic() {
        let words = [
            "attach",
            "connect",
            "new-peer",
            "events2",
            "wait-sync-resource",
            "verify",
            "resize",
            "web",
            "10",
            "-1",
            "/dev/drbd7",
            "ipv4:10.0.0.1:7788",
            "[fd00::1]:1",
            "--force",
            "--size=1G",
            "--size",
            "--timeout=\u{221e}",
            "--c-max-rate=99999999999999999999",
            "-",
            "--",
            "-vsx",
            "--=",
            "--protocol",
            "A",
            "--set-defaults",
            "--help=no",
            "",
        ];
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        let mut next = |below: usize| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state as usize % below
        };
        let (mut good, mut bad) = (0, 0);
        for _ in 0..50_000 {
            let mut line: Vec<String> = vec![words[next(7)].to_owned()];
            for _ in 0..next(6) {
                let word = words[next(words.len())];
                let end = word.chars().count() - next(3).min(word.chars().count());
                line.insert(next(line.len() + 1), word.chars().take(end).collect());
            }
            match parse(&line) {
                Ok(parsed) => {
                    good += 1;
                    if !parsed.help && !parsed.words.is_empty() {
                        let _ = super::super::request::build(parsed);
                    }
                }
                Err(_) => bad += 1,
            }
            let _ = minor(&line[0]);
        }
        assert!(good > 500 && bad > 500, "{good} {bad}");
    }

    #[test]
    fn addresses_get_family_and_port() {
        assert_eq!(address("10.0.0.1").unwrap(), "ipv4:10.0.0.1:7788");
        assert_eq!(
            address("local:ipv4:10.0.0.1:7790").unwrap(),
            "ipv4:10.0.0.1:7790"
        );
        assert_eq!(
            address("ipv6:[fd00::1]:7790").unwrap(),
            "ipv6:[fd00::1]:7790"
        );
        assert_eq!(address("[fd00::1]").unwrap(), "ipv6:[fd00::1]:7788");
        assert!(address("ipv4:10.0.0.1:99999").is_err());
        assert!(address("ssocks:1.2.3.4").is_err());
    }

    #[test]
    fn minors_are_numbers_or_devices() {
        assert_eq!(minor("10"), Ok(10));
        assert_eq!(minor("/dev/drbd10"), Ok(10));
        assert!(minor("drbd10").is_err());
        assert!(minor("-1").is_err());
        assert!(minor("").is_err());
    }
}
