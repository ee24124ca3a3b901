//! What is known of the other end of a carrier: which connections it may use, and a value that ties
//! proofs to the TLS connection on which they are sent.

use std::sync::Arc;

/// Names of connections, or patterns with `*`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Names(Arc<[String]>);

/// The other end of a carrier.
#[derive(Clone, Debug, Default)]
pub(crate) struct Peer {
    /// Known to the two ends of this TLS connection and to nobody else; zero without TLS.
    pub(crate) binding: [u8; 32],
    /// Which of the known identities it has proved; carriers with different ones never share a
    /// session.
    pub(crate) identity: [u8; 32],
    /// `None`: every connection that is configured here.
    pub(crate) may_use: Option<Names>,
}

impl Names {
    /// No connection at all.
    pub(crate) fn none() -> Names {
        Names(Arc::new([]))
    }

    /// Reads `NAME,NAME,...`.
    pub(crate) fn parse(text: &str) -> Result<Names, String> {
        let names: Arc<[String]> = text.split(',').map(str::to_string).collect();
        if names.iter().any(|name| name.is_empty()) {
            return Err(format!("'{text}' is no list of connections: NAME,NAME,..."));
        }
        Ok(Names(names))
    }

    /// Both lists together.
    pub(crate) fn and(&self, other: &Names) -> Names {
        Names(self.0.iter().chain(other.0.iter()).cloned().collect())
    }

    /// Whether a connection is among them.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.0.iter().any(|pattern| matches(pattern, name))
    }
}

impl Peer {
    /// Why the peer must not use a connection.
    pub(crate) fn refusal(&self, name: &str) -> Option<String> {
        let refused = self.may_use.as_ref().is_some_and(|names| !names.has(name));
        refused.then(|| format!("connection {name}: the identity of the peer may not use it"))
    }
}

/// `*` stands for any text.
fn matches(pattern: &str, name: &str) -> bool {
    let Some((head, rest)) = pattern.split_once('*') else {
        return pattern == name;
    };
    let Some(name) = name.strip_prefix(head) else {
        return false;
    };
    (0..=name.len()).any(|at| name.is_char_boundary(at) && matches(rest, &name[at..]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_names_connections_exactly_or_by_pattern() {
        let names = Names::parse("r0-bob-alice,web-*,*-carol-*").unwrap();
        for name in ["r0-bob-alice", "web-", "web-x", "db-carol-alice"] {
            assert!(names.has(name), "{name}");
        }
        for name in [
            "r0-bob-alice2",
            "r0",
            "",
            "xweb-x",
            "db-carol",
            "db-bob-alice",
        ] {
            assert!(!names.has(name), "{name}");
        }
        assert!(Names::parse("*").unwrap().has("anything"));
        assert!(!Names::none().has("anything"));
        assert!(Names::parse("a,,b").is_err() && Names::parse("").is_err());
        let both = names.and(&Names::parse("db").unwrap());
        assert!(both.has("db") && both.has("web-1"));
    }

    #[test]
    fn without_a_list_everything_that_is_configured_may_be_used() {
        let mut peer = Peer::default();
        assert_eq!(peer.refusal("r0"), None);
        peer.may_use = Some(Names::none());
        assert!(peer.refusal("r0").unwrap().contains("r0"));
    }
}
