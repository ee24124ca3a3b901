//! The command line: general options, the command, its options, the objects.

use super::commands::{self, COMMANDS, Command, Takes};

/// What the command line says.
#[derive(Clone, Debug, Default)]
pub(super) struct Args {
    pub(super) stacked: bool,
    pub(super) dry_run: bool,
    /// How often `-v` was given.
    pub(super) verbose: u32,
    pub(super) config_file: Option<String>,
    pub(super) config_to_test: Vec<String>,
    pub(super) config_to_exclude: Vec<String>,
    pub(super) drbdsetup: Option<String>,
    pub(super) drbdmeta: Option<String>,
    pub(super) proxy_ctl: Option<String>,
    pub(super) sh_varname: Option<String>,
    /// `--dir`: the directory of a node, as in the environment variable `LOCKSTEP_DIR`.
    pub(super) directory: Option<String>,
    pub(super) version: bool,
    pub(super) help: bool,
    pub(super) command: Option<&'static Command>,
    /// Current name of a command that was given under an old one.
    pub(super) renamed: Option<&'static str>,
    /// Options for the calls: those of the command, then those passed on verbatim.
    pub(super) options: Vec<CallOption>,
    pub(super) objects: Vec<String>,
}

/// An option that goes on to `drbdsetup` or `drbdmeta`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct CallOption {
    /// Name without dashes; the verbatim word if it has none.
    pub(super) name: String,
    /// Value behind `=`.
    pub(super) value: Option<String>,
    /// The word as it goes on.
    pub(super) word: String,
}

impl CallOption {
    fn verbatim(word: &str) -> Self {
        let bare = word.trim_start_matches('-');
        let (name, value) = match bare.split_once('=') {
            Some((name, value)) => (name, Some(value.to_owned())),
            None => (bare, None),
        };
        CallOption {
            name: name.to_owned(),
            value,
            word: word.to_owned(),
        }
    }
}

impl Args {
    /// The value of a command's option; an empty text when it has none.
    pub(super) fn option(&self, name: &str) -> Option<&str> {
        let found = self
            .options
            .iter()
            .rev()
            .find(|option| option.name == name)?;
        Some(found.value.as_deref().unwrap_or(""))
    }

    /// Whether a flag is set: given without a value or with `yes`.
    pub(super) fn flag(&self, name: &str) -> bool {
        matches!(self.option(name), Some("" | "yes"))
    }
}

/// Reads the words behind the program's name. The error is the text for stderr; exit code 1.
pub(super) fn parse(words: &[String]) -> Result<Args, String> {
    let mut args = Args::default();
    let mut given: Vec<CallOption> = Vec::new();
    let mut verbatim = Vec::new();
    let mut positional = Vec::new();
    let mut words = words.iter();
    while let Some(word) = words.next() {
        if word == "--" {
            positional.extend(words.by_ref().cloned());
        } else if let Some(long) = word.strip_prefix("--") {
            let (name, value) = match long.split_once('=') {
                Some((name, value)) => (name, Some(value.to_owned())),
                None => (long, None),
            };
            if let Some(general) = general(name) {
                let value = value_of(&mut args, general, value, &mut words, word)?;
                set_general(&mut args, &mut verbatim, general, value);
                continue;
            }
            let (name, takes) = command_option(name).ok_or_else(|| unknown(word, None))?;
            let value = match (takes, value) {
                (_, Some(value)) => Some(value),
                (Takes::MaybeValue, None) => None,
                (Takes::Value, None) => {
                    let next = words.next().cloned();
                    Some(next.ok_or_else(|| needs_value(word))?)
                }
            };
            let word = match &value {
                Some(value) => format!("--{name}={value}"),
                None => format!("--{name}"),
            };
            given.push(CallOption {
                name: name.to_owned(),
                value,
                word,
            });
        } else if let Some(letters) = word.strip_prefix('-').filter(|rest| !rest.is_empty()) {
            for (index, letter) in letters.char_indices() {
                let general = GENERAL.iter().find(|known| known.letter == letter);
                let Some(general) = general else {
                    return Err(format!(
                        "drbdadm: invalid option -- '{letter}'\ntry 'drbdadm help'\n"
                    ));
                };
                let rest = &letters[index + letter.len_utf8()..];
                let attached = (general.has_value && !rest.is_empty()).then(|| rest.to_owned());
                let has_attached = attached.is_some();
                let value = value_of(&mut args, general, attached, &mut words, word)?;
                set_general(&mut args, &mut verbatim, general, value);
                if has_attached {
                    break;
                }
            }
        } else {
            positional.push(word.clone());
        }
    }
    take_positional(&mut args, &mut verbatim, positional)?;
    check_options(&args, &given)?;
    for option in &mut given {
        // The old name of `primary --force`.
        if option.name == "overwrite-data-of-peer" {
            *option = CallOption::verbatim("--force");
        }
    }
    args.options = verbatim;
    args.options.append(&mut given);
    Ok(args)
}

/// Finds the command among the words; what stands before it goes on to the calls.
fn take_positional(
    args: &mut Args,
    verbatim: &mut Vec<CallOption>,
    positional: Vec<String>,
) -> Result<(), String> {
    let mut positional = positional.into_iter();
    for word in positional.by_ref() {
        if word == "help" {
            args.help = true;
        } else if let Some((command, renamed)) = commands::find(&word) {
            args.command = Some(command);
            args.renamed = renamed;
            break;
        } else if word.starts_with('-') {
            verbatim.push(CallOption::verbatim(&word));
        } else {
            return Err(format!(
                "drbdadm: Unknown command '{word}'{}\n",
                near(&word)
            ));
        }
    }
    args.objects.extend(positional);
    Ok(())
}

fn near(word: &str) -> String {
    let names = COMMANDS.iter().map(|command| command.name);
    match lockstep_format::conf::options::nearest(word, names) {
        Some(name) => format!("\n\tdid you mean '{name}'?"),
        None => String::new(),
    }
}

/// Options that some other command has are refused here.
fn check_options(args: &Args, given: &[CallOption]) -> Result<(), String> {
    let Some(command) = args.command else {
        return Ok(());
    };
    let known = command.options();
    for option in given {
        if !known.iter().any(|(name, _)| *name == option.name) {
            return Err(unknown(&option.word, Some(command.name)));
        }
    }
    Ok(())
}

fn unknown(word: &str, command: Option<&str>) -> String {
    let help = command.map(|name| format!(" {name}")).unwrap_or_default();
    format!("drbdadm: unrecognized option '{word}'\ntry 'drbdadm help{help}'\n")
}

fn needs_value(word: &str) -> String {
    format!("drbdadm: option '{word}' requires an argument\ntry 'drbdadm help'\n")
}

/// An option of any command by its name or an unambiguous beginning.
fn command_option(name: &str) -> Option<(&'static str, Takes)> {
    let all = || COMMANDS.iter().flat_map(Command::options);
    if let Some(exact) = all().find(|(known, _)| *known == name) {
        return Some(exact);
    }
    let mut found = all().filter(|(known, _)| known.starts_with(name));
    let first = found.next()?;
    found.all(|(known, _)| known == first.0).then_some(first)
}

/// An option of the program itself.
struct General {
    name: &'static str,
    letter: char,
    has_value: bool,
}

const fn flag(name: &'static str, letter: char) -> General {
    General {
        name,
        letter,
        has_value: false,
    }
}

const fn valued(name: &'static str, letter: char) -> General {
    General {
        name,
        letter,
        has_value: true,
    }
}

/// The general options; `D` is ours.
static GENERAL: [General; 14] = [
    flag("stacked", 'S'),
    flag("dry-run", 'd'),
    flag("verbose", 'v'),
    valued("config-file", 'c'),
    valued("config-to-test", 't'),
    valued("config-to-exclude", 'E'),
    valued("drbdsetup", 's'),
    valued("drbdmeta", 'm'),
    valued("drbd-proxy-ctl", 'p'),
    valued("sh-varname", 'n'),
    valued("setup-option", 'W'),
    flag("version", 'V'),
    flag("help", 'h'),
    valued("dir", 'D'),
];

/// A general option by its name or an unambiguous beginning that no command's option has.
fn general(name: &str) -> Option<&'static General> {
    if let Some(exact) = GENERAL.iter().find(|known| known.name == name) {
        return Some(exact);
    }
    if command_option(name).is_some() {
        return None;
    }
    let mut found = GENERAL.iter().filter(|known| known.name.starts_with(name));
    let first = found.next()?;
    found.next().is_none().then_some(first)
}

fn value_of<'a>(
    args: &mut Args,
    general: &General,
    attached: Option<String>,
    words: &mut impl Iterator<Item = &'a String>,
    word: &str,
) -> Result<String, String> {
    if !general.has_value {
        if attached.is_some() {
            return Err(format!(
                "drbdadm: option '{word}' doesn't allow an argument\n"
            ));
        }
        match general.letter {
            'S' => args.stacked = true,
            'd' => args.dry_run = true,
            'v' => args.verbose += 1,
            'V' => args.version = true,
            _ => args.help = true,
        }
        return Ok(String::new());
    }
    match attached {
        Some(value) => Ok(value),
        None => words.next().cloned().ok_or_else(|| needs_value(word)),
    }
}

fn set_general(args: &mut Args, verbatim: &mut Vec<CallOption>, general: &General, value: String) {
    match general.letter {
        'c' => args.config_file = Some(value),
        't' => args.config_to_test.push(value),
        'E' => args.config_to_exclude.push(value),
        's' => args.drbdsetup = Some(value),
        'm' => args.drbdmeta = Some(value),
        'p' => args.proxy_ctl = Some(value),
        'n' => args.sh_varname = Some(value),
        'D' => args.directory = Some(value),
        'W' => verbatim.push(CallOption::verbatim(&value)),
        _ => {}
    }
}
