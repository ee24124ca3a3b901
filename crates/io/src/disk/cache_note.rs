//! Notes of what disks have in their caches, for the next process on this node.
//!
//! A file for each disk that is open names the boot of the machine in which it was opened. A process that ends leaves
//! it behind, and whoever opens the disk in the same boot knows that the disk has kept what it acknowledged, flushed or
//! not. After a loss of power the boot is another one. An error of the disk takes the note away, as closing it does: the
//! disk may have been pulled. That a disk of another machine, or one that is pulled and put back behind a device mapper
//! while no daemon runs, has lost power alone cannot be seen here.

use std::io;
use std::path::{Path, PathBuf};

use lockstep_core::event::DiskCache;
use lockstep_format::units::NodeMask;

use super::Disk;

/// Where the kernel tells which boot this is.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// Where notes are, and of which boot of the machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CacheNotes {
    dir: PathBuf,
    boot: String,
}

impl CacheNotes {
    /// Notes in this directory of the boot that runs now.
    pub fn of_this_boot(dir: PathBuf) -> io::Result<CacheNotes> {
        let boot = std::fs::read_to_string(BOOT_ID)?;
        Ok(CacheNotes::of_boot(dir, boot.trim()))
    }

    /// Notes in this directory of a boot with this id.
    pub fn of_boot(dir: PathBuf, boot: &str) -> CacheNotes {
        CacheNotes {
            dir,
            boot: boot.to_owned(),
        }
    }

    /// The note of a disk that was opened now. Without one for disks that no other process sees.
    pub(crate) fn note(&self, disk: &Disk) -> Option<CacheNote> {
        let identity = disk.data().identity()?;
        let mut note = CacheNote {
            file: self.dir.join(&identity.name),
            line: format!("{} {}", self.boot, identity.instance),
            found: DiskCache::MayBeLost,
            has_failed: false,
        };
        note.found = note.read();
        Some(note)
    }
}

/// What tells a disk from others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Identity {
    /// A name that no other open disk of the machine has.
    pub(crate) name: String,
    /// Another one if another disk has the name.
    pub(crate) instance: u64,
}

/// The note of one open disk.
#[derive(Debug)]
pub(crate) struct CacheNote {
    file: PathBuf,
    line: String,
    found: DiskCache,
    has_failed: bool,
}

impl CacheNote {
    /// What the last process left when the disk was opened.
    pub(crate) fn found(&self) -> DiskCache {
        self.found
    }

    /// The disk keeps what it acknowledges, as long as the machine runs.
    pub(crate) fn write(&self, untold: NodeMask) {
        if self.has_failed {
            return;
        }
        let text = format!("{} {:x}\n", self.line, untold.0);
        if let Err(error) = replace(&self.file, &text) {
            let path = self.file.display();
            tracing::warn!(%path, %error, "a crash of this process will count as a loss of power");
            self.remove();
        }
    }

    /// An operation has failed, or the disk does not answer.
    pub(crate) fn disk_fails(&mut self) {
        if !self.has_failed {
            self.has_failed = true;
            self.remove();
        }
    }

    /// The disk is closed, and others may use it.
    pub(crate) fn remove(&self) {
        match std::fs::remove_file(&self.file) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                let path = self.file.display();
                tracing::error!(%path, %error, "cannot remove the note of a disk's cache; remove it");
            }
            _ => {}
        }
    }

    fn read(&self) -> DiskCache {
        let text = std::fs::read_to_string(&self.file).unwrap_or_default();
        let untold = text
            .strip_suffix('\n')
            .and_then(|text| text.strip_prefix(&self.line)?.strip_prefix(' '))
            .and_then(|mask| u64::from_str_radix(mask, 16).ok());
        match untold {
            Some(untold) => DiskCache::Kept {
                untold: NodeMask(untold),
            },
            None => DiskCache::MayBeLost,
        }
    }
}

/// The file has the old text or the new one.
fn replace(file: &Path, text: &str) -> io::Result<()> {
    if let Some(dir) = file.parent() {
        std::fs::create_dir_all(dir)?;
    }
    let new = file.with_extension("new");
    std::fs::write(&new, text)?;
    std::fs::rename(&new, file)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::RAM_PREFIX;

    const BOOT: &str = "7d0a66a5-5b4e-4cf4-8f2a-000000000001";
    const UNTOLD: NodeMask = NodeMask(0b101);

    fn image(dir: &Path, name: &str) -> Disk {
        let path = dir.join(name);
        if !path.exists() {
            std::fs::write(&path, vec![0; 1 << 20]).unwrap();
        }
        Disk::open(path.to_str().unwrap(), None).unwrap()
    }

    /// A process of this boot opens the disk.
    fn opened(dir: &Path, boot: &str, name: &str) -> CacheNote {
        let notes = CacheNotes::of_boot(dir.join("caches"), boot);
        notes.note(&image(dir, name)).unwrap()
    }

    #[test]
    fn the_next_process_of_the_same_boot_finds_the_note() {
        let dir = tempfile::tempdir().unwrap();
        let first = opened(dir.path(), BOOT, "a");
        assert_eq!(first.found(), DiskCache::MayBeLost, "nobody noted anything");
        first.write(UNTOLD);
        let kept = DiskCache::Kept { untold: UNTOLD };
        assert_eq!(opened(dir.path(), BOOT, "a").found(), kept);
        assert_eq!(opened(dir.path(), BOOT, "a").found(), kept);
        let other = opened(dir.path(), BOOT, "b");
        assert_eq!(other.found(), DiskCache::MayBeLost, "another disk");
    }

    #[test]
    fn another_boot_does_not_believe_it() {
        let dir = tempfile::tempdir().unwrap();
        opened(dir.path(), BOOT, "a").write(UNTOLD);
        for boot in ["7d0a66a5-5b4e-4cf4-8f2a-000000000002", "", &BOOT[..8]] {
            let next = opened(dir.path(), boot, "a");
            assert_eq!(next.found(), DiskCache::MayBeLost, "{boot}");
        }
    }

    #[test]
    fn a_disk_that_failed_or_is_closed_has_none() {
        let dir = tempfile::tempdir().unwrap();
        let mut note = opened(dir.path(), BOOT, "a");
        note.write(UNTOLD);
        note.disk_fails();
        note.write(UNTOLD);
        let next = opened(dir.path(), BOOT, "a");
        assert_eq!(next.found(), DiskCache::MayBeLost);
        next.write(UNTOLD);
        next.remove();
        let next = opened(dir.path(), BOOT, "a");
        assert_eq!(next.found(), DiskCache::MayBeLost);
    }

    #[test]
    fn a_note_that_is_cut_short_is_none() {
        let dir = tempfile::tempdir().unwrap();
        let note = opened(dir.path(), BOOT, "a");
        note.write(UNTOLD);
        let text = std::fs::read(&note.file).unwrap();
        for len in 0..text.len() {
            std::fs::write(&note.file, &text[..len]).unwrap();
            assert_eq!(note.read(), DiskCache::MayBeLost, "{len} bytes");
        }
    }

    #[test]
    fn memory_of_this_process_has_none() {
        let dir = tempfile::tempdir().unwrap();
        let notes = CacheNotes::of_this_boot(dir.path().join("caches")).unwrap();
        let path = format!("{RAM_PREFIX}1048576:no-note");
        let disk = Disk::open(&path, None).unwrap();
        assert!(notes.note(&disk).is_none());
    }
}
