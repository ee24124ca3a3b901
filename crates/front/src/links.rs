//! The symbolic links that lead to a device: made when it is served, removed when it goes.

use std::io;
use std::path::{Path, PathBuf};

use crate::device::DeviceError;

/// The links that were made to a device.
#[derive(Debug, Default)]
pub(crate) struct Links(Vec<PathBuf>);

impl Links {
    /// Makes the links of the volume `name` to its device.
    pub(crate) fn make(
        &mut self,
        name: &str,
        device: &Path,
        links: &[PathBuf],
    ) -> Result<(), DeviceError> {
        for link in links {
            make_link(device, link).map_err(|source| DeviceError::Link {
                name: name.to_owned(),
                link: link.clone(),
                source,
            })?;
            self.0.push(link.clone());
        }
        Ok(())
    }

    /// Removes those that still lead to the device.
    pub(crate) fn remove(&mut self, device: &Path) {
        for link in std::mem::take(&mut self.0) {
            // Somebody else's link of the same name stays.
            if std::fs::read_link(&link).is_ok_and(|target| target == device)
                && let Err(error) = std::fs::remove_file(&link)
            {
                tracing::warn!(link = %link.display(), %error, "a link could not be removed");
            }
        }
    }
}

/// Removes the links of volumes below `root` that a dead server of this node left: their device has
/// gone or will go, and its number may be somebody else's by now. Links to the devices in `keep` stay.
pub fn clean_links(root: &Path, keep: &[PathBuf]) {
    let mut links: Vec<PathBuf> = entries(root)
        .filter(|path| is_number_of(path, "drbd"))
        .collect();
    for resource in entries(&root.join("drbd/by-res")) {
        links.extend(entries(&resource).filter(|path| is_number_of(path, "")));
    }
    for link in links {
        // What is no link to such a device is not ours.
        let Ok(target) = std::fs::read_link(&link) else {
            continue;
        };
        let of_volume = ["/dev/loop", "/dev/ublkb"]
            .into_iter()
            .any(|kind| is_number_of(&target, kind));
        if !of_volume || keep.contains(&target) {
            continue;
        }
        match std::fs::remove_file(&link) {
            Ok(()) => tracing::info!(link = %link.display(), "removed a dead daemon's link"),
            Err(error) => {
                tracing::warn!(link = %link.display(), %error, "a link could not be removed");
            }
        }
    }
}

fn entries(directory: &Path) -> impl Iterator<Item = PathBuf> {
    // One that is not there has none.
    let found = std::fs::read_dir(directory).ok();
    found.into_iter().flatten().flatten().map(|e| e.path())
}

/// The name, or for a `prefix` with a directory the whole path, is the prefix and a number.
fn is_number_of(path: &Path, prefix: &str) -> bool {
    let text = match prefix.starts_with('/') {
        true => path.to_str(),
        false => path.file_name().and_then(|name| name.to_str()),
    };
    let digits = text.and_then(|text| text.strip_prefix(prefix));
    digits.is_some_and(|d| !d.is_empty() && d.bytes().all(|b| b.is_ascii_digit()))
}

/// Makes or replaces a symbolic link in one step, and its directory if need be.
fn make_link(target: &Path, link: &Path) -> io::Result<()> {
    if let Ok(metadata) = std::fs::symlink_metadata(link)
        && !metadata.file_type().is_symlink()
    {
        return Err(io::ErrorKind::AlreadyExists.into());
    }
    let directory = link.parent().ok_or(io::ErrorKind::InvalidInput)?;
    std::fs::create_dir_all(directory)?;
    let mut new = link.as_os_str().to_owned();
    new.push(format!(".{}", std::process::id()));
    let new = PathBuf::from(new);
    match std::fs::remove_file(&new) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    std::os::unix::fs::symlink(target, &new)?;
    std::fs::rename(&new, link)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_replaces_a_link_but_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let link = dir.path().join("by-res/r0/0");
        make_link(Path::new("/dev/loop1"), &link).unwrap();
        make_link(Path::new("/dev/loop2"), &link).unwrap();
        assert_eq!(std::fs::read_link(&link).unwrap(), Path::new("/dev/loop2"));
        let file = dir.path().join("file");
        std::fs::write(&file, "x").unwrap();
        assert!(make_link(Path::new("/dev/loop1"), &file).is_err());
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "x");
    }

    #[test]
    fn links_of_the_dead_go_and_others_stay() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        let (kept, gone) = (Path::new("/dev/loop1"), Path::new("/dev/ublkb2"));
        make_link(kept, &at("drbd0")).unwrap();
        make_link(gone, &at("drbd1")).unwrap();
        make_link(kept, &at("drbd/by-res/r0/0")).unwrap();
        make_link(gone, &at("drbd/by-res/r0/1")).unwrap();
        make_link(Path::new("/dev/sda"), &at("drbd2")).unwrap();
        make_link(gone, &at("other3")).unwrap();
        std::fs::write(at("drbd4"), "a file").unwrap();
        clean_links(dir.path(), &[kept.to_owned()]);
        for name in ["drbd0", "drbd2", "other3", "drbd4", "drbd/by-res/r0/0"] {
            assert!(at(name).symlink_metadata().is_ok(), "{name}");
        }
        for name in ["drbd1", "drbd/by-res/r0/1"] {
            assert!(at(name).symlink_metadata().is_err(), "{name}");
        }
        clean_links(&at("nowhere"), &[]);
    }
}
