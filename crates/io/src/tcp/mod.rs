//! Links over TCP: listeners, pairing of two connections, socket options (wire.md, 2).

pub mod acceptor;
pub mod first;
pub mod info;
pub mod namespace;
pub mod pairing;
pub mod socket;

pub use acceptor::{Acceptor, ListenGuard};
pub use info::TcpInfo;
pub use namespace::NetNamespace;
pub use socket::{Path, PeerNet, address_is_larger};

/// Addresses for tests that nobody else on the machine uses.
#[cfg(test)]
pub(crate) mod test_address {
    use std::net::{Ipv4Addr, SocketAddr, TcpListener};
    use std::sync::atomic::{AtomicU32, Ordering};

    /// A loopback address of this call alone, with a port that is free there.
    pub(crate) fn unique() -> SocketAddr {
        static NEXT: AtomicU32 = AtomicU32::new(1);
        let count = NEXT.fetch_add(1, Ordering::Relaxed);
        // 127/8 by process and call; the first 127.0.x.x are left to others.
        let low = ((std::process::id() % (1 << 13)) << 10) | (count % (1 << 10));
        let ip = Ipv4Addr::from((127 << 24) + (1 << 23) + low);
        TcpListener::bind((ip, 0)).unwrap().local_addr().unwrap()
    }
}
