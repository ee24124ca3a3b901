//! The last known report of every resource, and who is told when one changes.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::mailbox::{Mailbox, Subscription};
use crate::protocol::Reply;
use crate::report::{ConnectionReport, DeviceReport, PeerDeviceReport, ResourceReport};

/// Reports and watchers of a node.
#[derive(Debug, Default)]
pub struct Board {
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    reports: BTreeMap<String, ResourceReport>,
    watchers: Vec<Watcher>,
}

#[derive(Debug)]
struct Watcher {
    mailbox: Arc<Mailbox>,
    resource: Option<String>,
    statistics: Statistics,
}

/// When a watcher is told that only counters changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Statistics {
    /// Never.
    No,
    /// When they were looked at because somebody asked.
    OnRequest,
    /// Once a second.
    Regularly,
}

impl Board {
    /// Takes a newer report; `true` if more than counters changed.
    pub(crate) fn publish(&self, report: ResourceReport) -> bool {
        let mut inner = self.lock();
        let old = inner.reports.get(&report.name);
        if old == Some(&report) {
            return false;
        }
        let state_changed = old.map(without_counters) != Some(without_counters(&report));
        let progress = has_progress(&report);
        let name = report.name.clone();
        inner.reports.insert(name.clone(), report.clone());
        if inner.watchers.is_empty() {
            return state_changed;
        }
        let message = Reply::Changed {
            resource: Box::new(report),
        };
        inner.tell(&name, &message, |w| {
            state_changed || progress || w.statistics != Statistics::No
        });
        state_changed
    }

    /// A resource has gone.
    pub(crate) fn remove(&self, name: &str) {
        let mut inner = self.lock();
        if inner.reports.remove(name).is_some() {
            inner.tell(
                name,
                &Reply::Removed {
                    name: name.to_owned(),
                },
                |_| true,
            );
        }
    }

    /// A resource has another name from now on.
    pub(crate) fn rename(&self, name: &str, new_name: &str) {
        let mut inner = self.lock();
        if let Some(mut report) = inner.reports.remove(name) {
            new_name.clone_into(&mut report.name);
            inner.reports.insert(new_name.to_owned(), report);
        }
        // Whoever watches the old name follows the resource.
        for watcher in &mut inner.watchers {
            if let Some(watched) = &mut watcher.resource
                && watched == name
            {
                new_name.clone_into(watched);
            }
        }
        let message = Reply::Renamed {
            name: name.to_owned(),
            new_name: new_name.to_owned(),
        };
        inner.tell(new_name, &message, |_| true);
    }

    /// A handler starts or has ended. Nobody hears of what is gone.
    pub(crate) fn helper(&self, message: &Reply) {
        let Reply::Helper { resource, peer, .. } = message else {
            return;
        };
        let mut inner = self.lock();
        let is_known = inner.reports.get(resource).is_some_and(|report| {
            let connections = || report.connections.iter();
            peer.is_none_or(|peer| connections().any(|c| c.peer_node_id == peer))
        });
        if is_known {
            inner.tell(resource, message, |_| true);
        }
    }

    /// The present reports, and every later change without a gap.
    pub(crate) fn watch(
        &self,
        resource: Option<String>,
        statistics: Statistics,
    ) -> (Vec<ResourceReport>, Subscription) {
        let (mailbox, subscription) = Subscription::new();
        let mut inner = self.lock();
        let reports = inner
            .reports
            .values()
            .filter(|report| resource.as_ref().is_none_or(|name| *name == report.name))
            .cloned()
            .collect();
        inner.watchers.push(Watcher {
            mailbox,
            resource,
            statistics,
        });
        (reports, subscription)
    }

    /// Somebody watches.
    pub(crate) fn is_watched(&self) -> bool {
        let mut inner = self.lock();
        inner.watchers.retain(|w| !w.mailbox.is_closed());
        !inner.watchers.is_empty()
    }

    /// Every watcher's conversation ends.
    pub(crate) fn close(&self) {
        for watcher in std::mem::take(&mut self.lock().watchers) {
            watcher.mailbox.close();
        }
    }

    /// A resource as last seen.
    pub fn report(&self, name: &str) -> Option<ResourceReport> {
        self.lock().reports.get(name).cloned()
    }

    /// All resources as last seen.
    pub fn reports(&self) -> Vec<ResourceReport> {
        self.lock().reports.values().cloned().collect()
    }

    /// Resources that resync or verify.
    pub(crate) fn in_progress(&self) -> Vec<String> {
        let inner = self.lock();
        let reports = inner.reports.iter().filter(|(_, r)| has_progress(r));
        reports.map(|(name, _)| name.clone()).collect()
    }

    /// Somebody wants to know counters too.
    pub(crate) fn wants_statistics(&self) -> bool {
        self.lock()
            .watchers
            .iter()
            .any(|w| w.statistics == Statistics::Regularly && !w.mailbox.is_closed())
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    fn tell(&mut self, resource: &str, message: &Reply, wants: impl Fn(&Watcher) -> bool) {
        self.watchers.retain(|watcher| {
            let chosen = watcher
                .resource
                .as_deref()
                .is_none_or(|name| name == resource);
            if !chosen || !wants(watcher) {
                return true;
            }
            watcher.mailbox.put(message.clone())
        });
    }
}

/// A resync or verify runs somewhere.
fn has_progress(report: &ResourceReport) -> bool {
    report
        .connections
        .iter()
        .flat_map(|connection| &connection.peer_devices)
        .any(|peer_device| peer_device.resync.is_some())
}

/// The report with every counter zero: what is left is state and configuration.
fn without_counters(report: &ResourceReport) -> ResourceReport {
    let mut report = report.clone();
    report.devices.iter_mut().for_each(clear_device);
    report.connections.iter_mut().for_each(clear_connection);
    report
}

fn clear_device(d: &mut DeviceReport) {
    d.read_sectors = 0;
    d.written_sectors = 0;
    d.al_writes = 0;
    d.bm_writes = 0;
    d.upper_pending = 0;
    d.lower_pending = 0;
    d.al_suspended = false;
}

fn clear_connection(c: &mut ConnectionReport) {
    c.ap_in_flight_sectors = 0;
    c.rs_in_flight_sectors = 0;
    c.peer_devices.iter_mut().for_each(clear_peer_device);
}

fn clear_peer_device(p: &mut PeerDeviceReport) {
    p.received_sectors = 0;
    p.sent_sectors = 0;
    p.out_of_sync_sectors = 0;
    p.pending = 0;
    p.unacked = 0;
    p.resync = None;
}
