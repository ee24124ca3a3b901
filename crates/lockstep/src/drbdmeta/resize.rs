//! Moves internal metadata after its device has grown (`check-resize`), remembers where it was,
//! and keeps two tools from working on one minor.

use std::fs::File;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use lockstep_daemon::place::Place;
use lockstep_format::disk::Magic;
use lockstep_format::disk::any::AnySuperBlock;
use lockstep_format::disk::layout::Layout;
use lockstep_format::disk::store;

use super::options::Failure;
use super::{Found, NO_METADATA, Tool, UNCLEAN, io_failure};

/// What is known of a device from the last change of its metadata.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct LastKnown {
    size_bytes: u64,
    device_uuid: u64,
}

impl LastKnown {
    fn parse(text: &str) -> Option<Self> {
        let mut lines = text.lines();
        let (size, _) = lines.next()?.split_once('\t')?;
        let uuid = lines.next().and_then(|line| line.strip_prefix("uuid:\t"));
        Some(Self {
            size_bytes: size.parse().ok()?,
            device_uuid: u64::from_str_radix(uuid.unwrap_or("0"), 16).ok()?,
        })
    }

    fn print(self, device: &str) -> String {
        let uuid = match self.device_uuid {
            0 => String::new(),
            uuid => format!("uuid:\t{uuid:016X}\n"),
        };
        format!("{}\t{device}\n{uuid}", self.size_bytes)
    }
}

impl Tool<'_> {
    /// The file about this minor; without a minor nothing is stored or believed, since such runs
    /// would share one file for different devices.
    fn last_known_path(&self) -> Option<PathBuf> {
        let minor = self.line.target.minor?;
        let directory = self
            .line
            .options
            .state_directory
            .as_deref()
            .unwrap_or("/var/lib/drbd");
        Some(PathBuf::from(directory).join(format!("drbd-minor-{minor}.lkbd")))
    }

    /// Stores the size of the device with internal metadata. Best effort, as in the original:
    /// without it only `check-resize` cannot help.
    pub(super) fn remember_place(&mut self) {
        let Some(path) = self.last_known_path() else {
            return;
        };
        if !self.line.target.placement.is_internal() {
            let _ = std::fs::remove_file(path);
            return;
        }
        let Ok(found) = self.find(NO_METADATA) else {
            return;
        };
        let known = LastKnown {
            size_bytes: found.device.size_bytes(),
            device_uuid: found.superblock.device_uuid(),
        };
        let text = known.print(&self.line.target.device);
        let written = path
            .parent()
            .map_or(Ok(()), std::fs::create_dir_all)
            .and_then(|()| std::fs::write(&path, text));
        if let Err(error) = written {
            let _ = writeln!(self.err, "cannot store {}: {error}", path.display());
        }
    }

    pub(super) fn forget_place(&self) {
        if let Some(path) = self.last_known_path() {
            let _ = std::fs::remove_file(path);
        }
    }

    /// Finds internal metadata at its old place and moves it to the end of the grown device.
    pub(super) fn check_resize(&mut self) -> Result<u8, Failure> {
        let nothing = "no suitable meta data found :(";
        if !self.line.target.placement.is_internal() {
            return self.find(nothing).map(|_| 0);
        }
        match self.find(nothing) {
            Ok(_) => return Ok(0),
            Err(failure) if failure.text != nothing => return Err(failure),
            Err(_) => {}
        }
        self.move_to_the_end(nothing)
    }

    /// Before each attach: metadata of a device that has grown since is moved first, as the original
    /// does for `apply-al`.
    pub(super) fn find_or_move(&mut self) -> Result<Found, Failure> {
        match self.find(NO_METADATA) {
            Err(failure) if failure.text == NO_METADATA && !self.line.options.tentative => {
                self.move_to_the_end(NO_METADATA)?;
                self.find(NO_METADATA)
            }
            found => found,
        }
    }

    /// Moves internal metadata from where it was last seen.
    fn move_to_the_end(&mut self, nothing: &str) -> Result<u8, Failure> {
        let missing = || Failure::failed(nothing);
        if !self.line.target.placement.is_internal() {
            return Err(missing());
        }
        let path = self.last_known_path().ok_or_else(missing)?;
        let text = std::fs::read_to_string(path).map_err(|_| missing())?;
        let known = LastKnown::parse(&text).ok_or_else(missing)?;
        self.move_from(known.size_bytes, Some(known.device_uuid), nothing)
    }

    /// Moves metadata that was written when the device had `old_bytes`.
    pub(super) fn move_from(
        &mut self,
        old_bytes: u64,
        device_uuid: Option<u64>,
        nothing: &str,
    ) -> Result<u8, Failure> {
        let missing = || Failure::failed(nothing);
        let placement = self.line.target.placement;
        let mut device = self.open()?;
        let new_bytes = device.size_bytes();
        if old_bytes >= new_bytes {
            return Err(missing());
        }
        let sector = lockstep_format::disk::layout::superblock_sector(placement, old_bytes);
        let at = sector.ok_or_else(missing)? * lockstep_format::disk::SECTOR_BYTES;
        let block = store::read_block(&mut device, at).map_err(io_failure)?;
        if Magic::of(&block).is_none() {
            return Err(missing());
        }
        let mut superblock = AnySuperBlock::decode(&block).map_err(|_| missing())?;
        let other_format = superblock.format() != self.line.target.format;
        if other_format || device_uuid.is_some_and(|uuid| uuid != superblock.device_uuid()) {
            return Err(missing());
        }
        if !superblock.is_clean() {
            return Err(Failure::failed(UNCLEAN));
        }
        let old = superblock
            .layout(placement, old_bytes)
            .map_err(|_| missing())?;
        let new = Layout::new(placement, superblock.geometry(), new_bytes)
            .map_err(|e| Failure::failed(e.to_string()))?;
        self.note("Moving the internal meta data to its proper location\n")?;
        store::move_internal(&mut device, &old, &new, &mut superblock).map_err(io_failure)?;
        self.say("Internal drbd meta data successfully moved.\nOld meta data region zeroed.\n")?;
        Ok(0)
    }
}

/// Takes the write lock of a minor, waiting at most one second. Minors are a node's own, so the
/// lock of a node with a directory of its own lies there, where also its user may write.
pub(super) fn lock_minor(place: &Place, minor: u32) -> Result<File, Failure> {
    let own = (!place.is_default()).then(|| place.dir().to_owned());
    let directory = own
        .into_iter()
        .chain(["/run/lock", "/var/lock", "/tmp"].map(PathBuf::from))
        .find(|path| path.is_dir())
        .unwrap_or_else(|| "/tmp".into());
    let lock = directory.join(format!("drbd-147-{minor}"));
    let path = lock.display();
    let file = File::options()
        .create(true)
        .truncate(false)
        .write(true)
        .open(&lock)
        .map_err(|e| Failure::usage(format!("cannot open the lock file {path}: {e}")))?;
    let deadline = Instant::now() + Duration::from_secs(1);
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(file),
            Err(_) if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(50)),
            Err(_) => {
                let text = format!("minor {minor} is locked by another tool ({path})");
                return Err(Failure::usage(text));
            }
        }
    }
}
