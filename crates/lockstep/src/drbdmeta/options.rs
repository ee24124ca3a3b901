//! The command line of `drbdmeta` (section 18 of the metadata specification).

use lockstep_format::conf::options::nearest;
use lockstep_format::disk::any::Format;
use lockstep_format::disk::layout::{BitmapBlock, Placement};
use lockstep_format::disk::store::BitmapInit;
use lockstep_format::units::{NodeId, NodeMask};

/// A reason to stop: exit code and what to print on stderr.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Failure {
    /// Exit code.
    pub(crate) code: u8,
    /// Text for stderr, without the last line end; may be empty.
    pub(crate) text: String,
}

impl Failure {
    /// Wrong usage and things that cannot be opened: exit code 20.
    pub(crate) fn usage(text: impl Into<String>) -> Self {
        Self {
            code: 20,
            text: text.into(),
        }
    }

    /// Bad values and I/O errors: exit code 10.
    pub(crate) fn value(text: impl Into<String>) -> Self {
        Self {
            code: 10,
            text: text.into(),
        }
    }

    /// A command that did not do its work: exit code 1.
    pub(crate) fn failed(text: impl Into<String>) -> Self {
        Self {
            code: 1,
            text: text.into(),
        }
    }
}

/// All options.
#[derive(Clone, Debug, Default)]
pub(crate) struct Options {
    pub(crate) force: bool,
    pub(crate) quiet: bool,
    pub(crate) verbose: u32,
    pub(crate) dry_run: bool,
    pub(crate) tentative: bool,
    pub(crate) ignore_sanity_checks: bool,
    pub(crate) node_id: Option<NodeId>,
    pub(crate) al_stripes: Option<u64>,
    pub(crate) al_stripe_size_kib: Option<u64>,
    pub(crate) bitmap_block: Option<BitmapBlock>,
    pub(crate) initialize_bitmap: Option<BitmapInit>,
    pub(crate) peer_max_bio_bytes: Option<u32>,
    pub(crate) effective_sectors: Option<u64>,
    pub(crate) diskful_peers: Option<NodeMask>,
    pub(crate) initial_current_uuid: Option<InitialUuid>,
    pub(crate) consistent: bool,
    pub(crate) up_to_date: bool,
    pub(crate) peers_outdated: bool,
    pub(crate) rotate_uuids: bool,
    pub(crate) output_format: Option<String>,
    pub(crate) state_directory: Option<String>,
}

/// Value of `--initial-current-uuid`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum InitialUuid {
    /// `generate`.
    Random,
    /// A number; bit 0 is dropped.
    Value(u64),
}

/// Which volume and where its metadata is.
#[derive(Clone, Debug)]
pub(crate) struct Target {
    /// Minor number, `None` for `-`.
    pub(crate) minor: Option<u32>,
    pub(crate) format: Format,
    pub(crate) device: String,
    pub(crate) placement: Placement,
}

/// A parsed command line.
#[derive(Clone, Debug)]
pub(crate) struct CommandLine {
    pub(crate) options: Options,
    pub(crate) target: Target,
    pub(crate) command: &'static Command,
    pub(crate) arguments: Vec<String>,
}

/// How a command uses `--node-id`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NodeIdUse {
    /// Refused.
    None,
    /// Required for v09.
    Required,
}

/// One row of the table of commands.
#[derive(Debug)]
pub(crate) struct Command {
    pub(crate) name: &'static str,
    pub(crate) node_id: NodeIdUse,
    pub(crate) modifies: bool,
    pub(crate) usage: &'static str,
}

const fn command(
    name: &'static str,
    node_id: NodeIdUse,
    modifies: bool,
    usage: &'static str,
) -> Command {
    Command {
        name,
        node_id,
        modifies,
        usage,
    }
}

/// All commands.
pub(crate) static COMMANDS: [Command; 18] = [
    command("get-gi", NodeIdUse::Required, false, "--node-id {val} "),
    command("show-gi", NodeIdUse::Required, false, "--node-id {val} "),
    command("dump-md", NodeIdUse::None, false, ""),
    command("restore-md", NodeIdUse::None, true, "file"),
    command("verify-dump", NodeIdUse::None, false, "file"),
    command("apply-al", NodeIdUse::None, true, ""),
    command("wipe-md", NodeIdUse::None, true, ""),
    command("outdate", NodeIdUse::None, true, ""),
    command("invalidate", NodeIdUse::None, true, ""),
    command("dstate", NodeIdUse::None, false, ""),
    command("check-resize", NodeIdUse::None, true, ""),
    command("create-md", NodeIdUse::None, true, CREATE_USAGE),
    command("forget-peer", NodeIdUse::Required, true, "--node-id {val} "),
    command("repair-md", NodeIdUse::None, true, ""),
    command("set-gi", NodeIdUse::Required, true, "--node-id {val} gi"),
    command("read-dev-uuid", NodeIdUse::None, false, ""),
    command("write-dev-uuid", NodeIdUse::None, true, "uuid"),
    command(
        "dump-superblock",
        NodeIdUse::None,
        false,
        "[--output-format {val}]",
    ),
];

const CREATE_USAGE: &str = "[--peer-max-bio-size {val}] [--al-stripes {val}] \
                            [--al-stripe-size-kB {val}] {max_peers}";

/// Commands with what they take, for completions and manual pages.
pub(crate) fn words() -> Vec<crate::words::Command> {
    COMMANDS
        .iter()
        .map(|command| {
            let options = command.usage.split(['[', ']', ' ']);
            let options = options.filter_map(|word| word.strip_prefix("--"));
            crate::words::Command {
                name: command.name,
                summary: String::new(),
                options: options.collect(),
            }
        })
        .collect()
}

/// The usage text.
pub(crate) fn usage() -> String {
    let mut text = String::from(
        "\nUSAGE: drbdmeta [--force] DEVICE FORMAT [FORMAT ARGS...] COMMAND [CMD ARGS...]\n\n\
         FORMATS:\n  v08 device index\n  v09 device index\n\nCOMMANDS:\n",
    );
    for command in &COMMANDS {
        text += &format!("  {} {}\n", command.name, command.usage);
    }
    text
}

/// Parses everything behind the program's name.
pub(crate) fn parse(args: &[String]) -> Result<CommandLine, Failure> {
    let (options, words) = parse_options(args)?;
    let mut words = words.into_iter();
    let mut next = |what: &str| {
        words
            .next()
            .ok_or_else(|| Failure::usage(format!("{what} missing")))
    };
    let minor = parse_minor(&next("device")?)?;
    let format_name = next("format")?;
    let format = match format_name.as_str() {
        "v08" => Format::V08,
        "v09" => Format::V09,
        "v06" | "v07" => {
            return Err(Failure::usage(format!(
                "Format '{format_name}' is not supported; v08 and v09 are."
            )));
        }
        _ => return Err(Failure::usage(format!("Unknown format '{format_name}'."))),
    };
    let device = next("device name")?;
    let placement = parse_index(&next("index")?)?;
    let command_name = next("command")?;
    let command = COMMANDS
        .iter()
        .find(|c| c.name == command_name)
        .or_else(|| {
            let raw = command_name == "hexdump-superblock";
            raw.then(|| COMMANDS.last().expect("the table is not empty"))
        })
        .ok_or_else(|| {
            let names = COMMANDS.iter().map(|command| command.name);
            let near = match nearest(&command_name, names) {
                Some(near) => format!("\n\tdid you mean '{near}'?"),
                None => String::new(),
            };
            Failure::usage(format!("Unknown command '{command_name}'.{near}"))
        })?;
    let target = Target {
        minor,
        format,
        device,
        placement,
    };
    let mut line = CommandLine {
        options,
        target,
        command,
        arguments: words.collect(),
    };
    if command_name == "hexdump-superblock" {
        line.options.output_format = Some("hex".to_owned());
    }
    check_combination(&mut line)?;
    Ok(line)
}

fn check_combination(line: &mut CommandLine) -> Result<(), Failure> {
    let name = line.command.name;
    let creates = name == "create-md";
    let options = &mut line.options;
    match (line.command.node_id, line.target.format, options.node_id) {
        (NodeIdUse::Required, Format::V09, None) => {
            let text = format!("The {name} command requires the --node-id option");
            return Err(Failure::value(text));
        }
        (NodeIdUse::Required, Format::V08, None) => options.node_id = Some(NodeId(0)),
        (NodeIdUse::None, _, Some(_)) => {
            let text = format!("The {name} command does not accept the --node-id option");
            return Err(Failure::value(text));
        }
        _ => {}
    }
    let striped = options.al_stripes.is_some() || options.al_stripe_size_kib.is_some();
    if striped && !creates && name != "restore-md" {
        return Err(Failure::value(
            "The --al-stripe* options are only allowed with create-md and restore-md",
        ));
    }
    let only_create = [
        (options.bitmap_block.is_some(), "bitmap-block-size"),
        (
            options.initialize_bitmap.is_some() && name != "check-resize",
            "initialize-bitmap",
        ),
        (options.peer_max_bio_bytes.is_some(), "peer-max-bio-size"),
        (options.effective_sectors.is_some(), "effective-size"),
        (options.diskful_peers.is_some(), "diskful-peers"),
        (
            options.initial_current_uuid.is_some(),
            "initial-current-uuid",
        ),
        (options.consistent, "consistent"),
        (options.up_to_date, "uptodate"),
        (options.peers_outdated, "peers-outdated"),
        (options.rotate_uuids, "rotate-uuids"),
    ];
    let v09_only = [
        "bitmap-block-size",
        "diskful-peers",
        "initial-current-uuid",
        "consistent",
        "uptodate",
        "peers-outdated",
        "rotate-uuids",
    ];
    for (given, option) in only_create {
        if given && !creates {
            let text = format!("The --{option} option is only allowed with create-md");
            return Err(Failure::value(text));
        }
        if given && line.target.format == Format::V08 && v09_only.contains(&option) {
            return Err(Failure::value(format!("{option} not supported with 'v08'")));
        }
    }
    Ok(())
}

fn parse_minor(word: &str) -> Result<Option<u32>, Failure> {
    if word == "-" {
        return Ok(None);
    }
    let digits = word.strip_prefix("/dev/drbd").unwrap_or(word);
    digits
        .parse()
        .ok()
        .filter(|minor| *minor < 1 << 20)
        .map(Some)
        .ok_or_else(|| Failure::usage(format!("Cannot determine minor device number of '{word}'")))
}

fn parse_index(word: &str) -> Result<Placement, Failure> {
    match word {
        "internal" | "flex-internal" => Ok(Placement::Internal),
        "flex-external" => Ok(Placement::FlexExternal),
        _ => word
            .parse()
            .map(Placement::Indexed)
            .map_err(|_| Failure::usage(format!("'{word}' is not a valid index number."))),
    }
}

/// Long name, short letter, whether a value follows.
const TABLE: [(&str, Option<char>, bool); 22] = [
    ("force", Some('f'), false),
    ("quiet", Some('q'), false),
    ("verbose", Some('v'), false),
    ("dry-run", None, false),
    ("tentative", None, false),
    ("ignore-sanity-checks", None, false),
    ("node-id", Some('i'), true),
    ("al-stripes", Some('s'), true),
    ("al-stripe-size-kB", Some('z'), true),
    ("bitmap-block-size", Some('B'), true),
    ("initialize-bitmap", Some('b'), true),
    ("peer-max-bio-size", Some('p'), true),
    ("effective-size", Some('Z'), true),
    ("diskful-peers", Some('D'), true),
    ("initial-current-uuid", None, true),
    ("consistent", None, false),
    ("uptodate", None, false),
    ("peers-outdated", None, false),
    ("rotate-uuids", None, false),
    ("output-format", Some('o'), true),
    ("var-lib-drbd", None, true),
    ("help", Some('h'), false),
];

fn parse_options(args: &[String]) -> Result<(Options, Vec<String>), Failure> {
    let mut options = Options::default();
    let mut words = Vec::new();
    let mut args = args.iter();
    while let Some(arg) = args.next() {
        if arg == "--" {
            words.extend(args.by_ref().cloned());
        } else if let Some(long) = arg.strip_prefix("--") {
            let (name, value) = match long.split_once('=') {
                Some((name, value)) => (name, Some(value.to_owned())),
                None => (long, None),
            };
            let row = TABLE.iter().find(|row| row.0 == name);
            let Some((name, _, takes)) = row else {
                return Err(Failure::usage(format!("unrecognized option '{arg}'")));
            };
            let value = match (takes, value) {
                (true, None) => Some(value_of(name, args.next())?),
                (false, Some(_)) => {
                    return Err(Failure::usage(format!("option '--{name}' takes no value")));
                }
                (_, value) => value,
            };
            set_option(&mut options, name, &value.unwrap_or_default())?;
        } else if arg.len() > 1 && arg.starts_with('-') && !is_negative_number(arg) {
            let mut letters = arg[1..].chars();
            while let Some(letter) = letters.next() {
                let row = TABLE.iter().find(|row| row.1 == Some(letter));
                let Some((name, _, takes)) = row else {
                    return Err(Failure::usage(format!("invalid option -- '{letter}'")));
                };
                if !takes {
                    set_option(&mut options, name, "")?;
                    continue;
                }
                let rest: String = letters.by_ref().collect();
                let value = if rest.is_empty() {
                    value_of(name, args.next())?
                } else {
                    rest
                };
                set_option(&mut options, name, &value)?;
            }
        } else {
            words.push(arg.clone());
        }
    }
    if words.is_empty() {
        return Err(Failure::usage(usage()));
    }
    Ok((options, words))
}

fn is_negative_number(word: &str) -> bool {
    word[1..].bytes().all(|b| b.is_ascii_digit())
}

fn value_of(name: &str, value: Option<&String>) -> Result<String, Failure> {
    value
        .cloned()
        .ok_or_else(|| Failure::usage(format!("option '--{name}' requires an argument")))
}

fn set_option(options: &mut Options, name: &str, value: &str) -> Result<(), Failure> {
    let bad = || Failure::value(format!("invalid value '{value}' for --{name}"));
    match name {
        "force" => options.force = true,
        "quiet" => options.quiet = true,
        "verbose" => options.verbose += 1,
        "dry-run" => options.dry_run = true,
        "tentative" => options.tentative = true,
        "ignore-sanity-checks" => options.ignore_sanity_checks = true,
        "node-id" => {
            let id = value.parse().ok().and_then(NodeId::new).ok_or_else(bad)?;
            options.node_id = Some(id);
        }
        "al-stripes" => options.al_stripes = Some(number(value, 1).ok_or_else(bad)?),
        "al-stripe-size-kB" => {
            options.al_stripe_size_kib = Some(number(value, 1024).ok_or_else(bad)?);
        }
        "bitmap-block-size" => {
            let bytes = number(value, 1).and_then(|n| u32::try_from(n).ok());
            let block = bytes.and_then(BitmapBlock::from_bytes).ok_or_else(|| {
                Failure::value(format!(
                    "bitmap-block-size must be a power of 2 within [4k .. 1M], not '{value}'"
                ))
            })?;
            options.bitmap_block = Some(block);
        }
        "initialize-bitmap" => {
            options.initialize_bitmap = Some(match value {
                "automatic" | "zeroout" | "pwrite" => BitmapInit::Clear,
                "skip" => BitmapInit::Keep,
                "set-all" => BitmapInit::Set,
                _ => return Err(bad()),
            });
        }
        "peer-max-bio-size" => {
            let bytes = number(value, 1).filter(|n| *n <= 1 << 20).ok_or_else(bad)?;
            options.peer_max_bio_bytes = Some(bytes as u32);
        }
        "effective-size" => options.effective_sectors = Some(number(value, 512).ok_or_else(bad)?),
        "diskful-peers" => options.diskful_peers = Some(node_list(value).ok_or_else(bad)?),
        "initial-current-uuid" => {
            options.initial_current_uuid = Some(initial_uuid(value).ok_or_else(bad)?);
        }
        "consistent" => options.consistent = true,
        "uptodate" => options.up_to_date = true,
        "peers-outdated" => options.peers_outdated = true,
        "rotate-uuids" => options.rotate_uuids = true,
        "output-format" => {
            if !["auto", "hex", "bin", "binary", "json"].contains(&value) {
                return Err(bad());
            }
            options.output_format = Some(value.to_owned());
        }
        "var-lib-drbd" => options.state_directory = Some(value.to_owned()),
        _ => return Err(Failure::usage(usage())),
    }
    Ok(())
}

fn initial_uuid(value: &str) -> Option<InitialUuid> {
    if value == "generate" {
        return Some(InitialUuid::Random);
    }
    let digits = value.strip_prefix("0x").unwrap_or(value);
    let uuid = u64::from_str_radix(digits, 16).ok()? & !1;
    (uuid != 0).then_some(InitialUuid::Value(uuid))
}

fn node_list(value: &str) -> Option<NodeMask> {
    if let Some(hex) = value.strip_prefix("0x") {
        let mask = u64::from_str_radix(hex, 16).ok()?;
        return (mask >> 32 == 0).then_some(NodeMask(mask));
    }
    value
        .split(',')
        .map(|id| NodeId::new(id.trim().parse().ok()?))
        .collect()
}

/// A number in units of `unit` bytes; with a suffix (s, k, K, M, G) it is converted, rounding up.
pub(crate) fn number(value: &str, unit: u64) -> Option<u64> {
    let last = value.chars().last()?;
    let factor: u64 = match last {
        's' => 512,
        'k' | 'K' => 1 << 10,
        'M' => 1 << 20,
        'G' => 1 << 30,
        _ => return value.parse().ok(),
    };
    let digits: u64 = value[..value.len() - 1].parse().ok()?;
    Some(digits.checked_mul(factor)?.div_ceil(unit))
}
