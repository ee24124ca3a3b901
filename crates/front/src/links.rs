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
}
