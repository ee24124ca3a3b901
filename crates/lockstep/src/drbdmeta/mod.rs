//! `drbdmeta`: creates, shows and repairs metadata on a device (sections 18 to 23 of the
//! metadata specification). Words, options and exit codes are those of the original; its known
//! defects are not.

mod create;
pub(crate) mod device;
mod existing;
mod options;
mod raw;
mod resize;
mod state;
mod text;

#[cfg(test)]
mod tests;

use std::io::{self, BufRead, IsTerminal, Write};
use std::path::Path;
use std::process::ExitCode;

use lockstep_core::state::DiskState;
use lockstep_daemon::client::Client;
use lockstep_daemon::place::Place;
use lockstep_daemon::protocol::{Reply, Request};
use lockstep_format::disk::any::{AnySuperBlock, Format};
use lockstep_format::disk::layout::{Layout, Placement, superblock_sector};
use lockstep_format::disk::store::{self, Store};
use lockstep_format::disk::{Magic, SECTOR_BYTES};

use device::{Access, Device, OpenError, PlainFile};
pub(crate) use options::words;
use options::{CommandLine, Failure};

/// Runs the tool; `args` are the words behind the program's name.
pub(crate) fn run(args: &[String]) -> ExitCode {
    // `drbdadm` says so about the disks that its configuration names.
    let plain = match std::env::var_os(PLAIN_FILES_VARIABLE).is_some_and(|set| set == "1") {
        true => PlainFile::Allowed,
        false => PlainFile::Refused,
    };
    ExitCode::from(run_to_code(
        &Place::find(None),
        args,
        plain,
        terminal_answer,
    ))
}

/// Runs a call of `drbdadm` about a disk of its configuration, in this process; returns the exit code.
pub(crate) fn run_within(directory: Option<&Path>, args: &[String]) -> u8 {
    let place = Place::find(directory);
    run_to_code(&place, args, PlainFile::Allowed, terminal_answer)
}

fn run_to_code(
    place: &Place,
    args: &[String],
    plain: PlainFile,
    answer: fn() -> Option<String>,
) -> u8 {
    if let Some(minor) = options::parse(args)
        .ok()
        .and_then(|line| changed_minor(&line))
        && is_attached(place, minor)
    {
        eprintln!("Device '{minor}' is configured!");
        return 20;
    }
    // Not locked: several may speak at the same time within one process.
    let mut out = io::BufWriter::new(io::stdout());
    let code = execute(place, args, plain, &mut out, &mut io::stderr(), answer);
    match out.flush() {
        Ok(()) => code,
        Err(_) => 10,
    }
}

/// Stores where the metadata of an attached disk lies, for `check-resize` after the disk has grown.
pub(crate) fn remember(minor: u32, meta_path: &str, meta_index: &str) -> u8 {
    let index = match meta_index {
        "flexible" => "flex-external",
        other => other,
    };
    let minor = minor.to_string();
    let args = ["--force", &minor, "v09", meta_path, index, "dstate"].map(str::to_owned);
    let line = match options::parse(&args) {
        Ok(line) => line,
        Err(failure) => {
            eprintln!("{}", failure.text);
            return failure.code;
        }
    };
    let place = Place::find(None);
    let mut tool = Tool {
        place: &place,
        line: &line,
        args: &args,
        plain: PlainFile::Allowed,
        out: &mut io::sink(),
        err: &mut io::stderr(),
        answer: || None,
    };
    tool.remember_place();
    0
}

/// The minor whose metadata a command changes, if it names one.
fn changed_minor(line: &CommandLine) -> Option<u32> {
    line.target.minor.filter(|_| line.command.modifies)
}

/// The daemon of this node has a disk attached to this minor. Without a daemon nothing is; one
/// that does not answer still holds its disks by locks on them.
fn is_attached(place: &Place, minor: u32) -> bool {
    let request = Request::Report { resource: None };
    let reply = Client::connect(place).and_then(|mut client| client.call(&request));
    let Ok(Reply::Report { resources }) = reply else {
        return false;
    };
    resources
        .iter()
        .flat_map(|resource| &resource.devices)
        .any(|device| device.minor == minor && device.disk_state != DiskState::Diskless)
}

/// Asks on the terminal; `None` if there is none.
fn terminal_answer() -> Option<String> {
    let stdin = io::stdin();
    if !stdin.is_terminal() {
        return None;
    }
    let mut line = String::new();
    stdin.lock().read_line(&mut line).ok()?;
    Some(line)
}

/// Runs one command line with the given outputs; `answer` reads a line of confirmation.
fn execute(
    place: &Place,
    args: &[String],
    plain: PlainFile,
    out: &mut dyn Write,
    err: &mut dyn Write,
    answer: fn() -> Option<String>,
) -> u8 {
    let result = options::parse(args).and_then(|line| {
        Tool {
            place,
            line: &line,
            args,
            plain,
            out: &mut *out,
            err: &mut *err,
            answer,
        }
        .run()
    });
    match result {
        Ok(code) => code,
        Err(Failure { code, text }) => {
            if !text.is_empty() {
                let _ = out.flush();
                let _ = writeln!(err, "{text}");
            }
            code
        }
    }
}

/// One run of the tool.
struct Tool<'a> {
    place: &'a Place,
    line: &'a CommandLine,
    args: &'a [String],
    /// Whether a plain file may be a disk without `--force`.
    plain: PlainFile,
    out: &'a mut dyn Write,
    err: &'a mut dyn Write,
    answer: fn() -> Option<String>,
}

/// Metadata that was found where it should be.
struct Found {
    device: Device,
    superblock: AnySuperBlock,
    layout: Layout,
}

impl Found {
    fn write_superblock(&mut self) -> Result<(), Failure> {
        store::write_superblock(&mut self.device, &self.layout, &self.superblock)
            .map_err(io_failure)
    }
}

const NO_METADATA: &str = "No valid meta data found";
const UNCLEAN: &str = "Found meta data is \"unclean\", please apply-al first";

fn io_failure(error: io::Error) -> Failure {
    Failure::value(format!("I/O error on the metadata device: {error}"))
}

impl Tool<'_> {
    fn run(&mut self) -> Result<u8, Failure> {
        let command = self.line.command;
        let _lock = match self.line.target.minor {
            Some(minor) if command.modifies => Some(resize::lock_minor(self.place, minor)?),
            _ => None,
        };
        let code = match command.name {
            "create-md" => self.create_md(),
            "dump-md" => self.dump_md(),
            "restore-md" => self.restore_md(),
            "verify-dump" => self.verify_dump(),
            "apply-al" => self.apply_al(),
            "get-gi" => self.get_gi(),
            "show-gi" => self.show_gi(),
            "set-gi" => self.set_gi(),
            "dstate" => self.dstate(),
            "outdate" => self.outdate(),
            "invalidate" => self.invalidate(),
            "wipe-md" => self.wipe_md(),
            "forget-peer" => self.forget_peer(),
            "repair-md" => self.repair_md(),
            "check-resize" => self.check_resize(),
            "read-dev-uuid" => self.read_dev_uuid(),
            "write-dev-uuid" => self.write_dev_uuid(),
            "dump-superblock" => self.dump_superblock(),
            name => Err(Failure::usage(format!("Unknown command '{name}'."))),
        }?;
        if command.modifies && code == 0 && command.name != "wipe-md" {
            self.remember_place();
        }
        Ok(code)
    }

    fn say(&mut self, text: &str) -> Result<(), Failure> {
        self.out.write_all(text.as_bytes()).map_err(output_failure)
    }

    fn note(&mut self, text: &str) -> Result<(), Failure> {
        self.out.flush().map_err(output_failure)?;
        self.err.write_all(text.as_bytes()).map_err(output_failure)
    }

    /// Asks for `yes`. Without a terminal the answer is no, with `--force` it is yes.
    fn confirm(&mut self, question: &str) -> Result<bool, Failure> {
        let options = &self.line.options;
        if options.force && options.quiet {
            return Ok(true);
        }
        self.note(&format!("\n{question}\n"))?;
        if self.line.options.force {
            self.note("*** confirmation forced via --force option ***\n")?;
            return Ok(true);
        }
        match (self.answer)() {
            Some(line) => Ok(line.trim() == "yes"),
            None => {
                self.note("stdin not a TTY, not waiting for confirmation\n")?;
                Ok(false)
            }
        }
    }

    fn argument(&self, index: usize, name: &str) -> Result<&str, Failure> {
        let word = self.line.arguments.get(index).map(String::as_str);
        word.ok_or_else(|| Failure::usage(format!("{name} argument missing")))
    }

    fn open(&mut self) -> Result<Device, Failure> {
        let options = &self.line.options;
        let target = &self.line.target;
        let access = match self.line.command.modifies {
            true if options.dry_run || options.tentative => Access::DryRun,
            true => Access::Write,
            false => Access::Read,
        };
        let shared_device = matches!(target.placement, Placement::Indexed(_));
        let plain = match options.force {
            true => PlainFile::Allowed,
            false => self.plain,
        };
        // The raw dump looks at anything.
        let plain = if self.line.command.name == "dump-superblock" {
            PlainFile::Allowed
        } else {
            plain
        };
        Device::open(&target.device, access, !shared_device, plain).map_err(open_failure)
    }

    fn superblock_byte(&self, device: &Device) -> Result<u64, Failure> {
        let size = device.size_bytes();
        let target = &self.line.target;
        let sector = superblock_sector(target.placement, size).ok_or_else(|| {
            let expected = match target.placement {
                Placement::Indexed(slot) => u64::from(slot) << 27,
                Placement::Internal | Placement::FlexExternal => 0,
            };
            Failure::value(format!(
                "Device too small: expecting meta data block at\nbyte offset {expected}, but {} \
                 is only {size} bytes.",
                target.device
            ))
        })?;
        Ok(sector * SECTOR_BYTES)
    }

    /// Opens the device and reads metadata of the format that was asked for. `none` is the text
    /// when there is none.
    fn find(&mut self, none: &str) -> Result<Found, Failure> {
        let mut device = self.open()?;
        let at = self.superblock_byte(&device)?;
        let block = store::read_block(&mut device, at).map_err(io_failure)?;
        let target = &self.line.target;
        let wanted = match (Magic::of(&block), target.format) {
            (Some(Magic::V08 | Magic::V08Unclean), Format::V08)
            | (Some(Magic::V09), Format::V09) => true,
            // An attach takes v08 as it is, and `drbdadm` runs these two before each.
            (Some(Magic::V08 | Magic::V08Unclean), Format::V09) => {
                matches!(self.line.command.name, "apply-al" | "repair-md")
            }
            (Some(Magic::V06 | Magic::V07), _) | (Some(Magic::V09), Format::V08) | (None, _) => {
                false
            }
        };
        if !wanted {
            return Err(Failure::failed(none));
        }
        let with_reason = |reason: String| Failure::failed(format!("{NO_METADATA}\n{reason}"));
        let mut superblock =
            AnySuperBlock::decode(&block).map_err(|e| with_reason(e.to_string()))?;
        let layout = superblock
            .layout(target.placement, device.size_bytes())
            .map_err(|e| with_reason(e.to_string()))?;
        if let Some((found, usable)) = store::clip_effective_size(&layout, &mut superblock) {
            let text = format!("# la-size-sect was too big ({found}), truncated ({usable})!\n");
            self.say(&text)?;
        }
        Ok(Found {
            device,
            superblock,
            layout,
        })
    }

    fn apply_al(&mut self) -> Result<u8, Failure> {
        let mut found = self.find_or_move()?;
        let result = store::apply_al(&mut found.device, &found.layout, &mut found.superblock);
        let report = |tool: &mut Self, corrupt: u32| match corrupt {
            0 => Ok(()),
            n => tool.note(&format!("{n} corrupt AL transactions found\n")),
        };
        let applied = match result {
            Ok(applied) => applied,
            Err(store::ApplyError::Store(error)) => return Err(io_failure(error)),
            Err(store::ApplyError::Log {
                corrupt_blocks,
                error,
            }) => {
                report(self, corrupt_blocks)?;
                self.note(&format!("{}\n", log_error_text(error)))?;
                return Ok(log_error_code(error));
            }
        };
        report(self, applied.corrupt_blocks)?;
        if let Some(error) = applied.ignored {
            self.note(&format!("{}\n", log_error_text(error)))?;
            self.note("Error ignored, no need to apply the AL\n")?;
        }
        for (extent, byte) in &applied.beyond {
            self.note(&format!(
                "extent {} beyond end of bitmap! ({byte} >= {})\n",
                extent.0, applied.bitmap_bytes
            ))?;
        }
        if applied.everything_marked.is_some() {
            self.note(
                "The activity log does not cover everything that may have been written; all \
                 blocks are marked as out-of-sync.\n",
            )?;
        }
        let marked = !applied.extents.is_empty() || !applied.beyond.is_empty();
        if marked || applied.everything_marked.is_some() {
            let sectors = applied.newly_set_bits * found.layout.geometry().bitmap_block.sectors();
            let size = lockstep_format::disk::gi::size_words(sectors);
            self.note(&format!(
                "Marked additional {size} as out-of-sync based on AL.\n"
            ))?;
        }
        Ok(0)
    }
}

fn log_error_text(error: lockstep_format::disk::al::ReplayError) -> &'static str {
    use lockstep_format::disk::al::ReplayError;
    match error {
        ReplayError::NoTransaction { .. } => "No valid AL update transaction found.",
        ReplayError::NoData | ReplayError::AreaSize { .. } => {
            "No usable activity log found. Do you need to create-md?"
        }
    }
}

fn log_error_code(error: lockstep_format::disk::al::ReplayError) -> u8 {
    use lockstep_format::disk::al::ReplayError;
    match error {
        ReplayError::NoTransaction { .. } => 2,
        ReplayError::NoData | ReplayError::AreaSize { .. } => 1,
    }
}

fn output_failure(error: io::Error) -> Failure {
    Failure::value(format!("cannot write the output: {error}"))
}

fn open_failure(error: OpenError) -> Failure {
    Failure::usage(error.to_string())
}

/// 64 random bits that are neither zero nor the UUID of a device just created, primary bit clear.
fn random_uuid() -> Result<u64, Failure> {
    use std::io::Read;
    let mut bytes = [0; 8];
    loop {
        std::fs::File::open("/dev/urandom")
            .and_then(|mut file| file.read_exact(&mut bytes))
            .map_err(|e| Failure::value(format!("cannot read /dev/urandom: {e}")))?;
        let uuid = u64::from_ne_bytes(bytes) & !1;
        if uuid > 4 {
            return Ok(uuid);
        }
    }
}

/// Reads a piece from the start of a device.
fn read_start(device: &mut Device, len: usize) -> Result<Vec<u8>, Failure> {
    let mut bytes = vec![0; len];
    device.read(0, &mut bytes).map_err(io_failure)?;
    Ok(bytes)
}

/// Environment variable that lets plain files stand in for block devices, as `--force` does.
pub(crate) const PLAIN_FILES_VARIABLE: &str = "LOCKSTEP_PLAIN_FILES";

/// For tests of other tools that need metadata.
#[cfg(test)]
pub(crate) mod tests_support {
    /// Runs a command line and returns the exit code.
    pub(crate) fn run_drbdmeta(line: &str) -> u8 {
        let words: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
        let (place, plain) = (super::Place::find(None), super::PlainFile::Refused);
        let (mut out, mut err) = (Vec::new(), Vec::new());
        super::execute(&place, &words, plain, &mut out, &mut err, || None)
    }
}
