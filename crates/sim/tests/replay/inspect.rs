//! The reader of captures that `lockstep inspect wire` uses.
#![allow(dead_code, reason = "`lockstep inspect` uses the rest")]

#[path = "../../../lockstep/src/inspect/pcap.rs"]
pub(crate) mod pcap;
#[path = "../../../lockstep/src/inspect/tcp.rs"]
pub(crate) mod tcp;
