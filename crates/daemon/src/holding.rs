//! Devices that outlive the daemon: what it gives to its holder, and what becomes of the devices
//! that a killed daemon of this node left there.
//!
//! The I/O of such a device waits. It may go on only with the data that its users saw last, on a
//! Primary. So with each device goes the current UUID of its volume: another node that was promoted
//! meanwhile has made a new one, and a resync from there brings it here. Then all I/O of the device
//! fails, and its users have to start anew. Those that this node made itself since then are told
//! apart by [`Generations`].

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::os::fd::{AsFd, OwnedFd};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use lockstep_core::state::{ConnState, DiskState, ReplSets, ReplState, Role};
use lockstep_front::BlockNumber;
use lockstep_front::block::{BlockDevice, BlockState};
use lockstep_front::hold::HoldClient;

use crate::generations::{Generations, plain};
use crate::place::Place;
use crate::report::ResourceReport;

/// Resource and volume.
pub(crate) type Key = (String, u16);

/// A device whose I/O waits.
pub(crate) struct Left {
    /// Its FUSE connection, if it has one.
    pub(crate) descriptor: OwnedFd,
    /// What its next server has to know.
    pub(crate) state: BlockState,
    /// How its resource became Primary.
    pub(crate) promotion: Promotion,
    uuid: u64,
}

/// How a resource became Primary.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Promotion {
    /// It is not: the next daemon begins anew. The holder has to know of the device all the same,
    /// to end its wait.
    Never,
    /// By command.
    Explicit,
    /// By its device's use; it is demoted when that ends.
    Automatic,
}

/// What is to be done with a waiting device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// Nothing can be said yet.
    Wait,
    /// The data is what the users saw, and nobody else is Primary: promote.
    Promote,
    /// Serve it.
    Resume,
    /// Its data is no longer what its users saw, for this reason.
    Fail(String),
}

/// The daemon's side of its holder.
pub(crate) struct Holding {
    client: Option<HoldClient>,
    left: BTreeMap<Key, Left>,
    /// What the holder was told last.
    told: BTreeMap<Key, String>,
    generations: Arc<Generations>,
    /// The holder has their memory.
    keeps_generations: bool,
}

impl Holding {
    /// Finds or starts the holder and takes what it has. Without `patience` no holder is wanted, and
    /// what an old one has is given up.
    pub(crate) fn start(
        place: &Place,
        patience: Option<Duration>,
        generations: Arc<Generations>,
    ) -> std::io::Result<Holding> {
        let path = place.hold_socket();
        let mut holding = Holding {
            client: None,
            left: BTreeMap::new(),
            told: BTreeMap::new(),
            generations,
            keeps_generations: false,
        };
        let client = match patience {
            Some(patience) => {
                let mut command = Command::new(std::env::current_exe()?);
                command.args(["hold", "--seconds", &patience.as_secs().to_string()]);
                let (client, started) = HoldClient::connect_or_start(&path, &mut command)?;
                let told = match started {
                    Some(_) => Ok(()),
                    None => client.set_patience(patience),
                };
                match told {
                    Ok(()) => client,
                    // Its time was over at this moment.
                    Err(error) if error.kind() == ErrorKind::BrokenPipe => {
                        HoldClient::start(&path, &mut command)?.0
                    }
                    // An older version has started it.
                    Err(error) => {
                        tracing::warn!(%error, "the holder's time stays what it was started with");
                        client
                    }
                }
            }
            None => match HoldClient::connect(&path) {
                Ok(client) => client,
                // The usual case: there is none.
                Err(_) => return Ok(holding),
            },
        };
        for held in client.list()? {
            if patience.is_some() && held.key == GENERATIONS {
                holding.generations.go_on(held.descriptor)?;
                holding.keeps_generations = true;
                continue;
            }
            let parsed = patience.and_then(|_| parse(&held.key, &held.state));
            match parsed {
                // It is taken away with all that dead daemons left.
                Some((_, _, _, Promotion::Never)) => client.remove(&held.key)?,
                Some((key, state, uuid, promotion)) => {
                    let descriptor = held.descriptor;
                    holding.left.insert(
                        key,
                        Left {
                            descriptor,
                            state,
                            promotion,
                            uuid,
                        },
                    );
                }
                None => {
                    if held.key != GENERATIONS {
                        tracing::warn!(device = held.key, "a dead daemon's device is given up");
                    }
                    client.remove(&held.key)?;
                }
            }
        }
        if patience.is_some() && !holding.keeps_generations {
            holding.generations.keep()?;
        }
        holding.client = patience.map(|_| client);
        Ok(holding)
    }

    /// Whether devices are to outlive this daemon.
    pub(crate) fn is_wanted(&self) -> bool {
        self.client.is_some()
    }

    /// Devices that wait.
    pub(crate) fn waiting(&self) -> Vec<BlockNumber> {
        self.left.values().map(|left| left.state.number()).collect()
    }

    /// Volumes whose devices wait.
    pub(crate) fn keys(&self) -> Vec<Key> {
        self.left.keys().cloned().collect()
    }

    /// Judges every waiting device.
    pub(crate) fn judge(&self, reports: &[ResourceReport]) -> Vec<(Key, Verdict)> {
        let of_one = |(key, left): (&Key, &Left)| {
            let report = reports.iter().find(|report| report.name == key.0);
            let verdict = report.map_or(Verdict::Wait, |r| {
                judge(r, key.1, left.uuid, &self.generations)
            });
            (key.clone(), verdict)
        };
        self.left.iter().map(of_one).collect()
    }

    /// The waiting device's resource was not promoted by command.
    pub(crate) fn is_automatic(&self, key: &Key) -> bool {
        let left = self.left.get(key);
        left.is_some_and(|left| left.promotion == Promotion::Automatic)
    }

    /// Hands a waiting device out, to be served or given up.
    pub(crate) fn take(&mut self, key: &Key) -> Option<Left> {
        self.left.remove(key)
    }

    /// Keeps the holder up to date about a device that is served.
    pub(crate) fn keep(
        &mut self,
        key: &Key,
        device: &BlockDevice,
        uuid: u64,
        promotion: Promotion,
    ) {
        let Some(client) = &self.client else { return };
        let word = match promotion {
            Promotion::Never => NEVER,
            Promotion::Explicit => EXPLICIT,
            Promotion::Automatic => AUTOMATIC,
        };
        let line = device.state().to_line();
        let uuid = match promotion {
            Promotion::Never => 0,
            Promotion::Explicit | Promotion::Automatic => uuid,
        };
        let text = format!("{line};{:016x};{word}", plain(uuid));
        if self.told.get(key) == Some(&text) {
            return;
        }
        // First of all what it takes to judge the device.
        let known = match self.keeps_generations {
            true => Ok(()),
            false => self
                .generations
                .with_memory(|memory| client.store(GENERATIONS, "", memory)),
        };
        let stored = known
            .and_then(|()| device.descriptor())
            .and_then(|fd| client.store(&name(key), &text, fd.as_fd()));
        match stored {
            Ok(()) => {
                self.keeps_generations = true;
                self.told.insert(key.clone(), text);
            }
            Err(error) => {
                tracing::warn!(%error, device = name(key), "the device will not outlive the daemon");
            }
        }
    }

    /// The device is gone for good.
    pub(crate) fn forget(&mut self, key: &Key) {
        self.told.remove(key);
        let Some(client) = &self.client else { return };
        let mut removed = client.remove(&name(key));
        if self.told.is_empty() && self.left.is_empty() && self.keeps_generations {
            // A holder that has nothing ends with its daemon.
            removed = removed.and(client.remove(GENERATIONS));
            self.keeps_generations = false;
        }
        if let Err(error) = removed {
            tracing::warn!(%error, device = name(key), "the holder does not answer");
        }
    }
}

fn name(key: &Key) -> String {
    format!("{}/{}", key.0, key.1)
}

/// What the holder keeps their memory as; devices have a slash.
const GENERATIONS: &str = "generations";
const NEVER: &str = "never";
const EXPLICIT: &str = "explicit";
const AUTOMATIC: &str = "automatic";

fn parse(key: &str, state: &str) -> Option<(Key, BlockState, u64, Promotion)> {
    let (resource, volume) = key.rsplit_once('/')?;
    let (line, rest) = state.split_once(';')?;
    let (uuid, word) = rest.split_once(';')?;
    let promotion = match word {
        NEVER => Promotion::Never,
        EXPLICIT => Promotion::Explicit,
        AUTOMATIC => Promotion::Automatic,
        _ => return None,
    };
    let key = (resource.to_owned(), volume.parse().ok()?);
    let uuid = u64::from_str_radix(uuid, 16).ok()?;
    Some((key, BlockState::from_line(line)?, uuid, promotion))
}

/// What becomes of a device that was served with the data generation `uuid`.
fn judge(report: &ResourceReport, volume: u16, uuid: u64, generations: &Generations) -> Verdict {
    let Some(device) = report.devices.iter().find(|d| d.volume == volume) else {
        return Verdict::Wait;
    };
    if let Some(peer) = report.connections.iter().find(|c| c.role == Role::Primary) {
        return Verdict::Fail(format!("{} is Primary", peer.name));
    }
    let of_volume = report
        .connections
        .iter()
        .flat_map(|c| c.peer_devices.iter().filter(|p| p.volume == volume));
    // After a crash of its Primary the survivor's data of the same generation may win: it has all
    // that was acknowledged, and what was not is repeated. Only after the resync does the UUID tell
    // whether it was that, or the data of another Primary.
    if of_volume.clone().any(|p| p.repl_state.becomes_target()) {
        return Verdict::Wait;
    }
    if device.current_uuid == 0 || device.disk_state < DiskState::Inconsistent {
        return Verdict::Wait;
    }
    if !generations.descends(uuid, plain(device.current_uuid)) {
        return Verdict::Fail("its data has been changed by another node".into());
    }
    if report.role == Role::Primary {
        return Verdict::Resume;
    }
    // A peer that is not seen may be Primary. With quorum it could not write.
    let all_seen = report
        .connections
        .iter()
        .all(|c| c.state == ConnState::Connected)
        && of_volume
            .clone()
            .all(|p| p.repl_state >= ReplState::Established);
    let by_quorum = report.options.get("quorum").is_some_and(|q| q != "off");
    if device.disk_state == DiskState::UpToDate && (all_seen || (by_quorum && device.quorum)) {
        Verdict::Promote
    } else {
        Verdict::Wait
    }
}

#[cfg(test)]
mod tests {
    use lockstep_front::LoopNumber;

    use super::*;
    use crate::report::{ConnectionReport, DeviceReport, OptionTexts, PeerDeviceReport};

    const UUID: u64 = 0x1234_5678_9abc_def0;

    fn peer(id: u8) -> ConnectionReport {
        ConnectionReport {
            peer_node_id: id,
            name: format!("node{id}"),
            state: ConnState::Connected,
            role: Role::Secondary,
            congested: false,
            ap_in_flight_sectors: 0,
            rs_in_flight_sectors: 0,
            tls: false,
            protocol_version: 122,
            options: OptionTexts::new(),
            paths: Vec::new(),
            peer_devices: vec![PeerDeviceReport {
                flags: 0,
                degraded: false,
                volume: 0,
                repl_state: ReplState::Established,
                disk_state: DiskState::UpToDate,
                client: false,
                resync_suspended: Vec::new(),
                options: OptionTexts::new(),
                received_sectors: 0,
                sent_sectors: 0,
                out_of_sync_sectors: 0,
                pending: 0,
                unacked: 0,
                bitmap_uuid: 0,
                resync: None,
            }],
        }
    }

    /// Restarted, attached and connected, nothing has changed.
    fn restarted() -> ResourceReport {
        ResourceReport {
            name: "r0".into(),
            node_id: 0,
            role: Role::Secondary,
            suspended: Vec::new(),
            force_io_failures: false,
            may_promote: true,
            promotion_score: 0,
            write_ordering: "flush".into(),
            options: OptionTexts::new(),
            devices: vec![DeviceReport {
                volume: 0,
                minor: 0,
                disk_state: DiskState::UpToDate,
                lost_disk: None,
                client: false,
                quorum: true,
                open: false,
                disk: None,
                device_options: OptionTexts::new(),
                disk_options: OptionTexts::new(),
                logical_block_bytes: 512,
                size_sectors: 8,
                read_sectors: 0,
                written_sectors: 0,
                al_writes: 0,
                bm_writes: 0,
                upper_pending: 0,
                lower_pending: 0,
                al_suspended: false,
                current_uuid: UUID | 1,
                history_uuids: Vec::new(),
                flags: 0,
            }],
            connections: vec![peer(1), peer(2)],
        }
    }

    fn judged(report: &ResourceReport, volume: u16) -> Verdict {
        judge(report, volume, UUID, &Generations::default())
    }

    #[test]
    fn an_unchanged_volume_is_promoted_and_then_served() {
        let mut report = restarted();
        assert_eq!(judged(&report, 0), Verdict::Promote);
        report.role = Role::Primary;
        assert_eq!(judged(&report, 0), Verdict::Resume);
        assert_eq!(judged(&report, 1), Verdict::Wait, "not yet there");
    }

    #[test]
    fn another_primary_or_its_data_fails_the_device() {
        let fails = |report: &ResourceReport| matches!(judged(report, 0), Verdict::Fail(_));
        let mut report = restarted();
        report.connections[1].role = Role::Primary;
        assert!(fails(&report));
        let mut report = restarted();
        report.devices[0].current_uuid = 42;
        assert!(fails(&report), "resynced from a node that was Primary");
        report.role = Role::Primary;
        assert!(fails(&report), "also if an operator promoted");
    }

    #[test]
    fn a_generation_of_its_own_making_keeps_the_device() {
        let generations = Generations::default();
        generations.made(UUID, 42);
        let mut report = restarted();
        report.devices[0].current_uuid = 42 | 1;
        assert_eq!(judge(&report, 0, UUID, &generations), Verdict::Promote);
        report.role = Role::Primary;
        assert_eq!(judge(&report, 0, UUID, &generations), Verdict::Resume);
        report.devices[0].current_uuid = 44;
        let verdict = judge(&report, 0, UUID, &generations);
        assert!(matches!(verdict, Verdict::Fail(_)), "another node's");
    }

    #[test]
    fn a_resync_from_another_node_is_waited_for() {
        let mut report = restarted();
        report.connections[0].peer_devices[0].repl_state = ReplState::SyncTarget;
        assert_eq!(judged(&report, 0), Verdict::Wait);
        report.devices[0].disk_state = DiskState::Inconsistent;
        report.connections[0].peer_devices[0].repl_state = ReplState::Established;
        assert_eq!(judged(&report, 0), Verdict::Wait);
    }

    #[test]
    fn a_peer_that_is_not_seen_may_be_primary() {
        let mut report = restarted();
        report.connections[1].state = ConnState::Connecting;
        assert_eq!(judged(&report, 0), Verdict::Wait);
        report.options.insert("quorum".into(), "majority".into());
        assert_eq!(judged(&report, 0), Verdict::Promote);
        report.devices[0].quorum = false;
        assert_eq!(judged(&report, 0), Verdict::Wait);
    }

    #[test]
    fn what_the_holder_keeps_comes_back() {
        let text = "2 3 1048576 4096 57 1;00000000000000ff;automatic";
        let ((resource, volume), state, uuid, promotion) = parse("a/b/7", text).unwrap();
        assert_eq!(promotion, Promotion::Automatic);
        assert_eq!((resource.as_str(), volume, uuid), ("a/b", 7, 255));
        assert_eq!(state.number(), BlockNumber::Loop(LoopNumber(3)));
        assert!(parse("r0/0", "2 3 1048576 4096 57 1").is_none(), "no UUID");
        assert!(parse("r0", text).is_none(), "no volume");
    }
}
