//! A node: life cycle of the daemon, control socket, what tools are told, handlers.

pub mod board;
pub mod client;
mod devices;
mod handlers;
pub mod lockstepd;
mod mailbox;
pub mod names;
pub mod node;
pub mod options;
pub mod place;
pub mod protocol;
pub mod report;
mod server;
