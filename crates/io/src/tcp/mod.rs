//! Links over TCP: listeners, pairing of two connections, socket options (wire.md, 2).

pub mod acceptor;
pub mod pairing;
pub mod socket;

pub use acceptor::{Acceptor, ListenGuard};
pub use socket::{Path, PeerNet, address_is_larger};
