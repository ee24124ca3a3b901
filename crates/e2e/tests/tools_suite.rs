//! Tools that others wrote for DRBD, unchanged, on Lockstep.

#[path = "tools/nodes.rs"]
mod nodes;
#[path = "tools/stock.rs"]
mod stock;
