//! What changes while the daemon runs and belongs to no connection: the log level, the identity,
//! and the memory of all buffers. DRBD's sockets and the carriers that are up notice nothing.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::core::config::{DaemonOptions, format_bytes};
use crate::core::{LinkId, WireId};
use crate::daemon::Security;
use crate::net::Reactor;
use crate::tls::{Identity, Tls};

/// Words for levels of other programs, and what they are here.
const LEVELS: [(&str, &str); 13] = [
    ("off", "off"),
    ("emerg", "error"),
    ("alert", "error"),
    ("crit", "error"),
    ("err", "error"),
    ("error", "error"),
    ("warning", "warn"),
    ("warn", "warn"),
    ("notice", "info"),
    ("info", "info"),
    ("debug", "debug"),
    ("trace", "trace"),
    ("all", "trace"),
];

type SetLevel = dyn Fn(&str) -> Result<(), String> + Send + Sync;

/// The level of the log, and how it is changed.
#[derive(Clone)]
pub struct LogLevel {
    level: String,
    set: Arc<SetLevel>,
}

impl LogLevel {
    /// `set` gets what `log_filter` has made of the words of an operator.
    pub fn new(
        level: &str,
        set: impl Fn(&str) -> Result<(), String> + Send + Sync + 'static,
    ) -> LogLevel {
        LogLevel {
            level: level.into(),
            set: Arc::new(set),
        }
    }
}

impl std::fmt::Debug for LogLevel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "LogLevel({})", self.level)
    }
}

type ReadIdentity = dyn Fn() -> Result<Security, String> + Send + Sync;

/// Where the identity came from, to be read again.
#[derive(Clone)]
pub struct IdentitySource(Arc<ReadIdentity>);

impl IdentitySource {
    /// `read` is called in the daemon's process, as its user.
    pub fn new(read: impl Fn() -> Result<Security, String> + Send + Sync + 'static) -> Self {
        IdentitySource(Arc::new(read))
    }
}

impl std::fmt::Debug for IdentitySource {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("IdentitySource")
    }
}

/// Keys and certificates, ready to be used.
pub(crate) fn identity_of(security: &Security) -> Result<Identity, String> {
    Ok(match security {
        Security::Insecure => Identity::Insecure,
        Security::Secrets(secrets) => Identity::Tls(Tls::from_secrets(secrets)?),
        Security::Keys { private, peers } => Identity::Tls(Tls::from_keys(private, peers)?),
        Security::Certificates {
            cert,
            key,
            authority,
            peer_names,
        } => Identity::Tls(Tls::from_files(cert, key, authority, peer_names)?),
    })
}

/// Reads secret, keys or certificates again, for carriers that come from now on. What is of no use
/// is refused, and what was read before stays in use.
pub(crate) fn reload(reactor: &mut Reactor) -> Result<String, String> {
    let stays = |error: String| {
        tracing::warn!(
            error,
            "a new identity was refused, the old one stays in use"
        );
        format!("the old identity stays in use: {error}")
    };
    let Some(source) = reactor.live.identity.clone() else {
        return Err(stays("it did not come from files".into()));
    };
    let identity = (source.0)().and_then(|security| identity_of(&security));
    let identity = identity.and_then(|identity| match identity {
        Identity::Tls(tls) => tls.check_dates().map(|()| Identity::Tls(tls)),
        Identity::Insecure => Err("--insecure has no files to read".into()),
    });
    reactor.set_identity(identity.map_err(stays)?);
    tracing::info!("the identity was read again; carriers from now on use it");
    Ok("note: new carriers use the new identity, those that are up stay\n".into())
}

/// Checks a level, or a list of levels and `MODULE=LEVEL`, and writes it with the names that the
/// log knows. A word that is no level is refused: it would be taken for a module and silence
/// everything else.
pub fn log_filter(text: &str) -> Result<String, String> {
    let one = |part: &str| {
        let (module, word) = match part.rsplit_once('=') {
            Some((module, word)) => (Some(module.trim()), word.trim()),
            None => (None, part.trim()),
        };
        let found = LEVELS.iter().find(|(is, _)| word.eq_ignore_ascii_case(is));
        match (module, found) {
            (Some(""), _) | (_, None) => Err(format!(
                "log level '{text}' is not valid; expected off, error, warn, info, debug or \
                 trace, or a list such as info,lockstep_proxy::net=debug"
            )),
            (Some(module), Some((_, level))) => Ok(format!("{module}={level}")),
            (None, Some((_, level))) => Ok((*level).to_string()),
        }
    };
    let parts: Result<Vec<String>, String> = text.split(',').map(one).collect();
    parts.map(|parts| parts.join(","))
}

/// What the daemon was started with, as far as commands change it.
#[derive(Debug)]
pub(crate) struct Live {
    pub(crate) log: Option<LogLevel>,
    pub(crate) identity: Option<IdentitySource>,
    /// Which connection each carrier is for, also when the engine has forgotten it.
    pub(crate) carriers: BTreeMap<WireId, LinkId>,
    log_at_start: String,
    memory_at_start: u64,
    floor_at_start: u64,
}

impl Live {
    pub(crate) fn new(
        log: Option<LogLevel>,
        identity: Option<IdentitySource>,
        options: &DaemonOptions,
    ) -> Live {
        Live {
            log_at_start: log.as_ref().map_or(String::new(), |log| log.level.clone()),
            log,
            identity,
            carriers: BTreeMap::new(),
            memory_at_start: options.memory_max_bytes,
            floor_at_start: options.memlimit_min_bytes,
        }
    }

    /// The level of the log now; empty where the log is not this daemon's.
    pub(crate) fn log_level(&self) -> &str {
        self.log.as_ref().map_or("", |log| &log.level)
    }

    /// Commands that set again what commands have changed.
    pub(crate) fn words(&self, options: &DaemonOptions) -> Vec<String> {
        let mut out = Vec::new();
        if self.log_level() != self.log_at_start {
            out.push(format!("set loglevel {}", self.log_level()));
        }
        for (option, now, at_start) in [
            ("memory-max", options.memory_max_bytes, self.memory_at_start),
            (
                "memlimit-min",
                options.memlimit_min_bytes,
                self.floor_at_start,
            ),
        ] {
            if now != at_start {
                out.push(format!("set daemon {option} {}", format_bytes(now)));
            }
        }
        out
    }
}

/// Changes the level of the log.
pub(crate) fn set_log_level(reactor: &mut Reactor, text: &str) -> Result<String, String> {
    let level = log_filter(text)?;
    let Some(log) = &mut reactor.live.log else {
        return Err("the log is not this daemon's: its level cannot be set here".into());
    };
    (log.set)(&level)?;
    tracing::info!(level, before = log.level, "the log level is another one");
    log.level = level;
    Ok(String::new())
}

#[cfg(test)]
mod tests {
    use super::log_filter;

    #[test]
    fn levels_have_several_names_and_what_is_none_is_refused() {
        for (given, meant) in [
            ("debug", "debug"),
            ("DEBUG", "debug"),
            ("warning", "warn"),
            ("notice", "info"),
            ("crit", "error"),
            (
                "info,lockstep_proxy::net=debug",
                "info,lockstep_proxy::net=debug",
            ),
            ("rustls = err", "rustls=error"),
        ] {
            assert_eq!(log_filter(given).as_deref(), Ok(meant));
        }
        // A lone word that is no level would be taken for the name of a module.
        for bad in [
            "",
            "loud",
            "7",
            "info,",
            "=debug",
            "info,x=loud",
            "lockstep_proxy",
        ] {
            let error = log_filter(bad).unwrap_err();
            assert!(error.contains("expected off, error"), "{bad}: {error}");
        }
    }
}
