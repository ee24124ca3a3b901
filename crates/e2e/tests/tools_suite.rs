//! Tools that others wrote for DRBD, unchanged, on Lockstep.

#[path = "tools/console.rs"]
mod console;
#[path = "tools/consumers.rs"]
mod consumers;
#[path = "tools/corpus.rs"]
mod corpus;
#[path = "tools/exporters.rs"]
mod exporters;
#[path = "tools/form84.rs"]
mod form84;
#[path = "tools/lines.rs"]
mod lines;
#[path = "tools/metadata.rs"]
mod metadata;
#[path = "tools/monitor.rs"]
mod monitor;
#[path = "tools/newcomer.rs"]
mod newcomer;
#[path = "tools/nodes.rs"]
mod nodes;
#[path = "tools/pacemaker.rs"]
mod pacemaker;
#[path = "tools/package.rs"]
mod package;
#[path = "tools/proxy.rs"]
mod proxy;
#[path = "tools/proxy_unit.rs"]
mod proxy_unit;
#[path = "tools/reactor.rs"]
mod reactor;
#[path = "tools/stock.rs"]
mod stock;
#[path = "tools/units.rs"]
mod units;
#[path = "tools/user_systemd.rs"]
mod user_systemd;
#[path = "tools/wrong.rs"]
mod wrong;
