//! Placeholder of the crate's root; its modules follow.
#![no_std]
#![forbid(unsafe_code)]
extern crate alloc;
pub mod conf;
