//! Reads configuration text into the [model](super::model), with errors that name file and line.
//!
//! Wrong values are collected, so that one run shows them all; a wrong word ends the run. The first
//! line of an error is the original's; a line behind it says what would be right.

mod body;
mod connection;
mod tokens;

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;

use super::lex::{Lexer, Token};
use super::model::{Config, Pos, Resource, SourceFile, Style};
use super::options::Set;

/// What a caller does for `include`, `template-file` and nothing else.
pub trait Files {
    /// Paths that match a pattern relative to the directory of `including`, sorted.
    ///
    /// A pattern without wildcards gives itself, whether it exists or not.
    fn expand(&mut self, including: &str, pattern: &str) -> Vec<String>;

    /// Reads a file.
    fn read(&mut self, path: &str) -> Result<FileText, FileError>;
}

/// A file that was read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileText {
    /// Absolute real path: two names of one file have the same.
    pub path: String,
    /// Its text.
    pub text: String,
}

/// Why a file cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FileError {
    /// It does not exist.
    #[error("no such file")]
    Missing,
    /// It exists; the text says what is wrong.
    #[error("{0}")]
    Unreadable(String),
}

/// A [`Files`] without files, for texts that include nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoFiles;

impl Files for NoFiles {
    fn expand(&mut self, _: &str, _: &str) -> Vec<String> {
        Vec::new()
    }
    fn read(&mut self, _: &str) -> Result<FileText, FileError> {
        Err(FileError::Missing)
    }
}

/// Which of the two texts in this language is read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Dialect {
    /// A configuration file.
    #[default]
    File,
    /// The output of `drbdsetup show`.
    Show,
}

/// How to read.
#[derive(Clone, Debug, Default)]
pub struct ParseOptions {
    /// Which text this is.
    pub dialect: Dialect,
    /// Version that `require-drbd-module-version-*` compares with.
    pub module_version: Option<[u32; 3]>,
    /// Real paths of files that count as read already.
    pub excluded: Vec<String>,
}

/// How bad a message is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Severity {
    /// The configuration is usable.
    Warning,
    /// It is not.
    Error,
}

/// A message about the configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Diagnostic {
    /// How bad it is.
    pub severity: Severity,
    /// Where, if there is a place.
    pub pos: Option<Pos>,
    /// The whole text, beginning with `FILE:LINE: ` when there is a place; may have several lines.
    pub text: String,
}

/// What reading gave.
#[derive(Clone, Debug, Default)]
pub struct Parsed {
    /// The configuration as far as it was understood. Not to be used when not [`Parsed::is_valid`].
    pub config: Config,
    /// Messages in the order found.
    pub diagnostics: Vec<Diagnostic>,
}

impl Parsed {
    /// Whether there is no error.
    pub fn is_valid(&self) -> bool {
        !self
            .diagnostics
            .iter()
            .any(|found| found.severity == Severity::Error)
    }
}

/// Reads a configuration, main file first; further files (`--config-to-test`) behind it.
pub fn parse(
    sources: &[(SourceFile, String)],
    files: &mut dyn Files,
    options: &ParseOptions,
) -> Parsed {
    let mut state = State {
        parsed: Parsed::default(),
        files,
        options,
        read: options.excluded.iter().cloned().collect(),
        unique: BTreeMap::new(),
        repeated: Vec::new(),
    };
    for (file, text) in sources {
        if state.parse_file(file.clone(), text, 0).is_err() {
            break;
        }
    }
    state.parsed
}

/// Reads the output of `drbdsetup show`.
pub fn parse_show(text: &str) -> Parsed {
    let name = String::from("drbdsetup show");
    let file = SourceFile {
        shown: name.clone(),
        path: name,
    };
    let options = ParseOptions {
        dialect: Dialect::Show,
        ..ParseOptions::default()
    };
    parse(&[(file, String::from(text))], &mut NoFiles, &options)
}

/// Reading stops: an error that leaves no way to go on was reported.
#[derive(Debug)]
struct Abort;

/// What all files of a run share.
struct State<'a> {
    parsed: Parsed,
    files: &'a mut dyn Files,
    options: &'a ParseOptions,
    read: BTreeSet<String>,
    unique: BTreeMap<(&'static str, String), Pos>,
    /// Keys of sections that were there before.
    repeated: Vec<String>,
}

impl State<'_> {
    /// Reads one file; one that was read before is skipped in silence.
    fn parse_file(&mut self, file: SourceFile, text: &str, depth: usize) -> Result<(), Abort> {
        if self.read.contains(&file.path) {
            return Ok(());
        }
        if depth > DEEPEST_INCLUDE || self.parsed.config.files.len() >= MOST_FILES {
            let text = format!(
                "{}: too many include files (at most {MOST_FILES}, nested {DEEPEST_INCLUDE} deep).",
                file.shown
            );
            self.report(Severity::Error, None, text);
            return Err(Abort);
        }
        let index = self.add_file(file);
        let mut parser = Parser::new(self, text, index, depth);
        parser.file()
    }

    fn add_file(&mut self, file: SourceFile) -> u32 {
        self.read.insert(file.path.clone());
        self.parsed.config.files.push(file);
        self.parsed.config.files.len() as u32 - 1
    }

    /// Stores a message, with the place in front.
    fn report(&mut self, severity: Severity, pos: Option<Pos>, text: String) {
        if self.parsed.diagnostics.len() >= MOST_DIAGNOSTICS {
            return;
        }
        let text = match pos {
            Some(pos) => format!("{}: {text}", self.parsed.config.shown_place(pos)),
            None => text,
        };
        self.parsed.diagnostics.push(Diagnostic {
            severity,
            pos,
            text,
        });
    }

    /// Reports an error unless `key` is used for the first time.
    fn claim(&mut self, what: &'static str, key: String, pos: Pos) {
        if self.options.dialect == Dialect::Show {
            return;
        }
        let is_within = |outer: &String| {
            let rest = key.strip_prefix(outer.as_str());
            rest.is_some_and(|rest| rest.is_empty() || rest.starts_with(':'))
        };
        if self.repeated.iter().any(is_within) {
            return;
        }
        match self.unique.get(&(what, key.clone())) {
            None => {
                self.unique.insert((what, key), pos);
            }
            Some(&first) => {
                let shown = what.trim_end_matches(" of resource");
                let here = format!("conflicting use of {shown} '{key}' ...");
                self.report(Severity::Error, Some(pos), here);
                self.report(
                    Severity::Error,
                    Some(first),
                    format!("{shown} '{key}' first used here."),
                );
                if what.ends_with(" section") {
                    // What is inside a repeated section is repeated too; that is said once.
                    self.repeated.push(key.replace(": on ", ":"));
                }
            }
        }
    }
}

/// Reads one file.
struct Parser<'p, 'a, 't> {
    state: &'p mut State<'a>,
    lexer: Lexer<'t>,
    peeked: Option<Token>,
    file: u32,
    depth: usize,
}

impl<'p, 'a, 't> Parser<'p, 'a, 't> {
    fn new(state: &'p mut State<'a>, text: &'t str, file: u32, depth: usize) -> Self {
        Parser {
            state,
            lexer: Lexer::new(text),
            peeked: None,
            file,
            depth,
        }
    }

    /// `file` of the grammar.
    fn file(&mut self) -> Result<(), Abort> {
        loop {
            let token = self.next()?;
            if token.kind == super::lex::Kind::End {
                return Ok(());
            }
            match token.text.as_str() {
                _ if token.kind != super::lex::Kind::Word => return Err(self.wrong(&token, TOP)),
                "global" => self.global(&token)?,
                "common" => self.common(&token)?,
                "resource" => self.resource()?,
                "skip" => self.skip()?,
                "include" => self.include()?,
                word => match word.strip_prefix("require-drbd-module-version-") {
                    Some(comparison) => self.require(comparison, &token)?,
                    None => return Err(self.wrong(&token, TOP)),
                },
            }
        }
    }

    fn global(&mut self, token: &Token) -> Result<(), Abort> {
        let pos = self.pos(token);
        self.state.claim("global section", "global".into(), pos);
        if !self.state.parsed.config.resources.is_empty() {
            let text =
                "You should put the global {} section\n\tin front of any resource {} section";
            self.state.report(Severity::Warning, Some(pos), text.into());
        }
        self.expect('{')?;
        while let Some(token) = self.statement()? {
            self.global_statement(&token)?;
        }
        Ok(())
    }

    fn global_statement(&mut self, token: &Token) -> Result<(), Abort> {
        let Some(spec) = super::options::find(Set::Global, &token.text) else {
            return Err(self.wrong_option(token, &[Set::Global]));
        };
        if matches!(spec.kind, super::options::Kind::Flag) {
            match spec.name {
                "disable-ip-verification" => {
                    self.state.parsed.config.global.disable_ip_verification = true;
                }
                _ => self.state.parsed.config.global.udev_always_use_vnr = true,
            }
            return self.expect(';');
        }
        let value = self.value_text(spec.name)?;
        let pos = self.pos(&value);
        self.state.claim("global option", spec.name.into(), pos);
        let number = match spec.parse(&value.text) {
            Ok(parsed) => parsed
                .number()
                .and_then(|number| u32::try_from(number).ok()),
            Err(error) => {
                self.wrong_value(spec, &value, &error);
                None
            }
        };
        let global = &mut self.state.parsed.config.global;
        match spec.name {
            "minor-count" => global.minor_count = number,
            "dialog-refresh" => global.dialog_refresh_s = number,
            "cmd-timeout-short" => global.cmd_timeout_short_s = number,
            "cmd-timeout-medium" => global.cmd_timeout_medium_s = number,
            "cmd-timeout-long" => global.cmd_timeout_long_s = number,
            _ => global.usage_count = Some(value.text),
        }
        self.expect(';')
    }

    fn common(&mut self, token: &Token) -> Result<(), Abort> {
        let pos = self.pos(token);
        self.state.claim("common section", "common".into(), pos);
        let mut shell = Resource {
            name: "common".into(),
            pos,
            ..Resource::default()
        };
        self.expect('{')?;
        self.resource_body(&mut shell, body::Place::Common)?;
        self.state.parsed.config.common = Some(shell.sections);
        Ok(())
    }

    fn resource(&mut self) -> Result<(), Abort> {
        let name = self.name("resource name")?;
        let pos = self.pos(&name);
        if name.text.is_empty() || name.text.chars().any(char::is_control) {
            let what = match name.text.is_empty() {
                true => "Resource name is empty.",
                false => "Resource name contains control characters.",
            };
            self.state.report(Severity::Error, Some(pos), what.into());
            return Err(Abort);
        }
        self.state.claim("resource section", name.text.clone(), pos);
        // "Defined at" names the line of the brace.
        let brace = self.peek()?.line;
        let pos = Pos { line: brace, ..pos };
        let mut resource = Resource {
            name: name.text,
            pos,
            ..Resource::default()
        };
        self.expect('{')?;
        self.resource_body(&mut resource, body::Place::Resource)?;
        self.state.parsed.config.resources.push(resource);
        Ok(())
    }

    fn include(&mut self) -> Result<(), Abort> {
        let pattern = self.text("file name or pattern")?;
        let pos = self.pos(&pattern);
        self.expect(';')?;
        let including = self.state.parsed.config.files[self.file as usize]
            .path
            .clone();
        let has_wildcard = pattern.text.contains(['*', '?', '[']);
        for path in self.state.files.expand(&including, &pattern.text) {
            match self.state.files.read(&path) {
                Ok(found) => {
                    let file = SourceFile {
                        shown: path,
                        path: found.path,
                    };
                    self.state.parse_file(file, &found.text, self.depth + 1)?;
                }
                Err(FileError::Missing) if has_wildcard => {
                    let text = format!("include file '{path}' vanished while it was looked for.");
                    self.state.report(Severity::Warning, Some(pos), text);
                }
                Err(error) => {
                    let text = format!("Failed to open include file '{path}'.\n\t{error}");
                    self.state.report(Severity::Error, Some(pos), text);
                }
            }
        }
        Ok(())
    }

    fn require(&mut self, comparison: &str, token: &Token) -> Result<(), Abort> {
        self.state.parsed.config.style = Style::V9;
        let wanted = self.text("version like 9.1.7")?;
        let pos = self.pos(token);
        let Some(wanted_version) = version(&wanted.text) else {
            return Err(self.wrong(&wanted, "version like 9.1.7"));
        };
        self.expect(';')?;
        let Some(found) = self.state.options.module_version else {
            let text = "Could not get drbd-module-version, Module not loaded?";
            self.state.report(Severity::Error, Some(pos), text.into());
            return Ok(());
        };
        let (holds, sign) = match comparison {
            "eq" => (found == wanted_version, "=="),
            "ne" => (found != wanted_version, "!="),
            "gt" => (found > wanted_version, ">"),
            "ge" => (found >= wanted_version, ">="),
            "lt" => (found < wanted_version, "<"),
            "le" => (found <= wanted_version, "<="),
            _ => return Err(self.wrong(token, TOP)),
        };
        if !holds {
            let [major, minor, patch] = found;
            let text = format!(
                "Validation error: drbd-module-version {major}.{minor}.{patch} {sign} {} \
                 not true",
                wanted.text
            );
            self.state.report(Severity::Error, Some(pos), text);
        }
        Ok(())
    }
}

/// `N.N.N` as numbers.
pub fn version(text: &str) -> Option<[u32; 3]> {
    let mut parts = text.split('.');
    let mut next = || parts.next()?.parse().ok();
    let found = [next()?, next()?, next()?];
    parts.next().is_none().then_some(found)
}

/// What may stand at the top of a file.
const TOP: &str = "global | common | resource | skip | include |\n\t\
    require-drbd-module-version-{eq,ne,gt,ge,lt,le}";
/// Most files of one configuration.
const MOST_FILES: usize = 20_000;
/// Deepest nesting of `include`.
const DEEPEST_INCLUDE: usize = 32;
/// Most messages that are kept; the first ones tell enough.
const MOST_DIAGNOSTICS: usize = 1000;
