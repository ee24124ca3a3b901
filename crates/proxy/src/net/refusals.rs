//! Carriers that did not authenticate. The end that waits to be dialled has no other sign of a wrong
//! secret, so what it refused last is kept and shown: for each configured peer, and one for all other
//! addresses, which anybody may use.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::time::Instant;

/// The last refusal by listener and configured peer; `None` is any other address. There are never
/// more than listeners and connections.
#[derive(Debug, Default)]
pub(super) struct Refusals(BTreeMap<(SocketAddr, Option<IpAddr>), Refusal>);

#[derive(Debug)]
struct Refusal {
    from: String,
    reason: String,
    at: Instant,
    count: u64,
}

impl Refusals {
    /// Keeps a refusal in the place of an earlier one.
    pub(super) fn note(
        &mut self,
        listener: SocketAddr,
        known: Option<IpAddr>,
        from: &str,
        reason: &str,
        at: Instant,
    ) {
        let count = self.0.get(&(listener, known)).map_or(0, |last| last.count);
        let refusal = Refusal {
            from: from.into(),
            reason: reason.into(),
            at,
            count: count + 1,
        };
        self.0.insert((listener, known), refusal);
    }

    /// A carrier of this configured peer was accepted: what was refused before is over.
    pub(super) fn clear(&mut self, listener: SocketAddr, peer: IpAddr) {
        self.0.remove(&(listener, Some(peer)));
    }

    /// The listener is closed.
    pub(super) fn forget(&mut self, listener: SocketAddr) {
        self.0.retain(|(at, _), _| *at != listener);
    }

    /// What to show of a connection that is not up.
    pub(super) fn text(&self, listener: SocketAddr, peer: IpAddr, now: Instant) -> Option<String> {
        let of_peer = self.0.get(&(listener, Some(peer)));
        let refusal = of_peer.or_else(|| self.0.get(&(listener, None)))?;
        let seconds = now.saturating_duration_since(refusal.at).as_secs();
        Some(format!(
            "a carrier from {} was refused {seconds} s ago ({} in all): {}",
            refusal.from, refusal.count, refusal.reason
        ))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn the_last_refusal_of_a_peer_goes_before_that_of_strangers_until_it_is_let_in() {
        let mut refusals = Refusals::default();
        let at: SocketAddr = "192.0.2.1:7715".parse().unwrap();
        let peer: IpAddr = "192.0.2.2".parse().unwrap();
        let begun = Instant::now();
        let now = begun + Duration::from_secs(5);
        assert_eq!(refusals.text(at, peer, now), None);
        refusals.note(at, None, "198.51.100.7:9", "no TLS", begun);
        let text = refusals.text(at, peer, now).unwrap();
        assert_eq!(
            text,
            "a carrier from 198.51.100.7:9 was refused 5 s ago (1 in all): no TLS"
        );
        refusals.note(at, Some(peer), "192.0.2.2:4000", "another secret", begun);
        refusals.note(at, Some(peer), "192.0.2.2:4001", "another secret", now);
        let text = refusals.text(at, peer, now).unwrap();
        assert!(text.contains("192.0.2.2:4001 was refused 0 s ago (2 in all)"));
        refusals.clear(at, peer);
        assert!(refusals.text(at, peer, now).unwrap().contains("no TLS"));
        refusals.forget(at);
        assert_eq!(refusals.text(at, peer, now), None);
    }
}
