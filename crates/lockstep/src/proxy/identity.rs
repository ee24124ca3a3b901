//! What the command line of the daemon says about its identity. The files are read at the start,
//! and again whenever the daemon is asked to.

use std::path::{Path, PathBuf};

use lockstep_proxy::{Security, SharedSecret};

/// Options about the identity, as they were given.
#[derive(Clone, Debug, Default)]
pub(super) struct IdentityOptions {
    /// `FILE` or `FILE=CONNECTIONS`.
    secrets: Vec<String>,
    key: Option<PathBuf>,
    peer_keys: Vec<String>,
    cert: Option<PathBuf>,
    cert_key: Option<PathBuf>,
    authority: Option<PathBuf>,
    peer_names: Vec<String>,
    /// More peers, one a line.
    peers: Option<PathBuf>,
    insecure: bool,
}

impl IdentityOptions {
    /// Takes an option; false if it is not about the identity.
    pub(super) fn take(&mut self, name: &str, value: &str) -> bool {
        let path = || Some(PathBuf::from(value));
        match name {
            "secret-file" => self.secrets.push(value.into()),
            "key-file" => self.key = path(),
            "peer-key" => self.peer_keys.push(value.into()),
            "cert" => self.cert = path(),
            "cert-key" => self.cert_key = path(),
            "ca" => self.authority = path(),
            "peer-name" => self.peer_names.push(value.into()),
            "peer-file" => self.peers = path(),
            "insecure" => self.insecure = true,
            _ => return false,
        }
        true
    }

    /// Reads the files and says which identity it is; there must be exactly one.
    pub(super) fn read(&self) -> Result<Security, String> {
        let mut ways = Vec::new();
        if !self.secrets.is_empty() {
            let secrets: Result<_, String> = self.secrets.iter().map(|text| secret(text)).collect();
            ways.push(Security::Secrets(secrets?));
        }
        if let Some(path) = &self.key {
            let private = text_of("key-file", path)?.trim().to_string();
            let peers = self.with_file(&self.peer_keys)?;
            ways.push(Security::Keys { private, peers });
        }
        match (&self.cert, &self.cert_key, &self.authority) {
            (Some(cert), Some(key), Some(authority)) => {
                ways.push(Security::Certificates {
                    cert: cert.clone(),
                    key: key.clone(),
                    authority: authority.clone(),
                    peer_names: self.with_file(&self.peer_names)?,
                });
            }
            (None, None, None) => {}
            _ => return Err("--cert, --cert-key and --ca belong together".into()),
        }
        if self.insecure {
            ways.push(Security::Insecure);
        }
        let way = match (ways.pop(), ways.is_empty()) {
            (Some(way), true) => way,
            (Some(_), false) => return Err("choose one identity only".into()),
            (None, _) => {
                return Err(
                    "no identity: give --secret-file, --key-file, --cert or, inside a VPN, \
                            --insecure"
                        .into(),
                );
            }
        };
        match way {
            Security::Secrets(_) | Security::Insecure if self.peers.is_some() => {
                Err("--peer-file is for --key-file and --cert".into())
            }
            way => Ok(way),
        }
    }

    /// Files with a secret or a private key that every user may read.
    pub(super) fn exposed(&self) -> Vec<String> {
        let secrets = self.secrets.iter().map(|text| {
            let name = text.split_once('=').map_or(text.as_str(), |(name, _)| name);
            Path::new(name)
        });
        let keys = [&self.key, &self.cert_key];
        let keys = keys.into_iter().filter_map(|key| key.as_deref());
        secrets
            .chain(keys)
            .filter(|path| is_exposed(path))
            .map(|path| path.display().to_string())
            .collect()
    }

    /// The peers of the command line, and those of the file.
    fn with_file(&self, given: &[String]) -> Result<Vec<String>, String> {
        let mut peers = given.to_vec();
        if let Some(path) = &self.peers {
            let text = text_of("peer-file", path)?;
            let lines = text.lines().map(|line| line.split('#').next());
            let lines = lines.map(|line| line.unwrap_or_default().trim());
            let before = peers.len();
            peers.extend(lines.filter(|line| !line.is_empty()).map(String::from));
            if peers.len() == before {
                // Certificates without any name would let every peer in.
                return Err(format!("--peer-file {} names no peer", path.display()));
            }
        }
        Ok(peers)
    }
}

fn is_exposed(path: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    // Whether it can be read at all is said when it is read. A device is nobody's secret.
    std::fs::metadata(path).is_ok_and(|file| file.is_file() && file.mode() & 0o004 != 0)
}

fn text_of(option: &str, path: &Path) -> Result<String, String> {
    std::fs::read_to_string(path).map_err(|error| format!("--{option} {}: {error}", path.display()))
}

/// `FILE` or `FILE=CONNECTIONS`.
fn secret(text: &str) -> Result<SharedSecret, String> {
    let (file, connections) = match text.split_once('=') {
        Some((file, list)) => (file, Some(list.to_string())),
        None => (text, None),
    };
    let secret = std::fs::read(file).map_err(|error| format!("--secret-file {file}: {error}"))?;
    Ok(SharedSecret {
        secret,
        connections,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_adds_peers_and_is_read_each_time() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name).display().to_string();
        std::fs::write(at("key"), "ab\n").unwrap();
        let mut options = IdentityOptions::default();
        assert!(options.take("key-file", &at("key")) && options.take("peer-key", "00=r0"));
        assert!(options.take("peer-file", &at("peers")) && !options.take("rate", "1M"));
        let missing = options.read().unwrap_err();
        assert!(missing.contains("--peer-file") && missing.contains("peers"));
        let peers = || match options.read().unwrap() {
            Security::Keys { private, peers } => {
                assert_eq!(private, "ab");
                peers
            }
            other => panic!("{other:?}"),
        };
        std::fs::write(at("peers"), "# all sites\n 01=r1-* # bob\n\n02=r2\n").unwrap();
        assert_eq!(peers(), ["00=r0", "01=r1-*", "02=r2"]);
        std::fs::write(at("peers"), "# none\n").unwrap();
        assert!(options.read().unwrap_err().contains("names no peer"));
        // A secret is for root and the proxy only.
        use std::os::unix::fs::PermissionsExt;
        let mut options = IdentityOptions::default();
        options.take("secret-file", &format!("{}=r0", at("key")));
        options.take("secret-file", "/dev/null=r1");
        for (mode, exposed) in [(0o640, vec![]), (0o644, vec![at("key")])] {
            let mode = std::fs::Permissions::from_mode(mode);
            std::fs::set_permissions(at("key"), mode).unwrap();
            assert_eq!(options.exposed(), exposed);
        }
        let mut options = IdentityOptions::default();
        options.take("insecure", "");
        options.take("peer-file", "x");
        assert!(options.read().unwrap_err().contains("is for --key-file"));
    }
}
