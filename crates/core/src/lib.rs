//! Lockstep's replication core: every decision, no IO.
//!
//! One value, `Resource`, per resource. Whatever happens is an [`event::Input`], whatever is
//! wanted an [`event::Output`]; there is no socket, file, thread, clock or randomness in here.
#![no_std]
#![forbid(unsafe_code)]
extern crate alloc;

#[macro_use]
pub mod planted;

pub mod added;
pub mod admin;
pub mod al;
pub mod attach;
pub mod auth;
mod before_resync;
mod between;
pub mod bitmap;
mod block_sizes;
pub mod change;
pub mod command;
pub mod compare;
pub mod compare84;
mod congestion;
pub mod connection;
mod crashed_copy;
pub mod data;
pub mod device;
mod disk_look;
mod disk_timeout;
pub mod event;
pub mod exposed;
mod exposed_disk;
mod far;
pub mod fencing;
pub mod few;
mod followers;
mod forced;
mod frozen;
pub mod generation;
mod given_up;
pub mod handshake;
pub mod integrity;
pub mod interval;
mod late;
pub mod leaving;
mod legacy;
pub mod look_again;
mod lost_cache;
mod metadata;
mod mid_resync;
mod net_update;
pub mod objects;
pub mod open;
pub mod options;
mod persistent;
mod promote;
pub mod rate;
mod reconcile;
pub mod report;
mod resize;
mod resize_local;
pub mod resource;
pub mod resync;
pub mod resync_order;
pub mod rng;
pub mod rule;
pub mod sanitize;
pub mod second_look;
mod sizes;
pub mod snapshot;
pub mod state;
mod superblock;
pub mod tags;
pub mod time;
pub mod timers;
mod told;
pub mod transition;
mod turns;
mod two_primaries;
pub mod twopc;
pub mod twopc_peer;
pub mod unasked;
mod unwritten;
pub mod uuid_spread;
pub mod uuids;
pub mod uuids_of;
pub mod validity;
mod vote;
