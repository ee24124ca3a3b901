//! Measurements side by side: the bare floor, the raw disk, Lockstep, in one run.
//!
//! Figures of different runs or machines say nothing; the ratios of one run do
//! (docs/performance.md).

pub mod clusters;
pub mod engine;
pub mod extents;
pub mod floor;
pub mod fronts;
pub mod nbd;
pub mod raw;
pub mod run;
pub mod scale;
pub mod stats;
