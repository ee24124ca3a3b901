//! A node: life cycle of the daemon, control socket, what tools are told, handlers.

// Deliberate bugs are for the simulator's own test; a node that has them must not be built.
const _: () = assert!(
    !lockstep_core::planted::COMPILED_IN,
    "lockstep-core was built with its feature `planted`"
);

mod address;
pub mod board;
pub mod client;
mod devices;
mod foreign;
mod generations;
pub mod handlers;
mod holding;
mod incoming;
pub mod lockstepd;
mod mailbox;
pub mod meter;
pub mod metrics;
mod minors;
pub mod names;
mod namespaces;
mod no_volume;
pub mod node;
mod notify;
mod opener;
pub mod options;
mod path_pairs;
mod peers;
pub mod place;
pub mod proc_drbd;
mod progress;
pub mod protocol;
pub mod report;
mod resync_order;
mod server;
mod touched;
mod watching;
