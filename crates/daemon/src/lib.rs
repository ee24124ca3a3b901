//! A node: life cycle of the daemon, control socket, what tools are told, handlers.

pub mod client;
pub mod names;
pub mod options;
pub mod place;
pub mod protocol;
pub mod report;
