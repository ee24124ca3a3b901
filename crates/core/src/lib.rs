//! Lockstep's replication core: every decision, no IO.
//!
//! One value, `Resource`, per resource. Whatever happens is an [`event::Input`], whatever is
//! wanted an [`event::Output`]; there is no socket, file, thread, clock or randomness in here.
#![no_std]
#![forbid(unsafe_code)]
extern crate alloc;

pub mod al;
pub mod auth;
pub mod bitmap;
pub mod command;
pub mod compare;
pub mod compare84;
pub mod event;
pub mod exposed;
pub mod generation;
pub mod interval;
pub mod options;
pub mod rate;
pub mod report;
pub mod rng;
pub mod state;
pub mod tags;
pub mod time;
pub mod timers;
pub mod uuids;
