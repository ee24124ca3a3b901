//! A second look at this node's open disk: how large it is now, and for whom that was asked
//! (semantics.md, 22.3 and 22.4). What follows from it is in `resize.rs` and `resize_local.rs`.

use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;

use lockstep_format::units::{NodeId, VolumeNr};
use lockstep_format::wire::DeviceDescFlags;

use crate::command::ErrorCode;
use crate::device::{Device, LocalDisk};
use crate::event::{DiskInfo, Output};
use crate::report::Level;
use crate::resize::{AfterResize, ResizeWish, refusal};
use crate::resize_local::Found;
use crate::resource::{Pending, Resource};
use crate::time::Duration;
use crate::timers::Timer;
use crate::twopc::command_error;
use crate::validity::Refusal;

/// Why the disk is looked at again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ProbeFor {
    /// This node's command.
    Command(ResizeWish),
    /// The vote in another node's transaction.
    Vote { tid: u32, initiator: NodeId },
    /// A link to a peer is there: the disk may have grown while the two were apart.
    Connect {
        peer: NodeId,
        /// Sectors it had room for before.
        room: u64,
    },
    /// A connected peer's size has changed.
    Follow {
        peer: NodeId,
        flags: DeviceDescFlags,
        /// It has had to wait: what the peer said may be over.
        late: bool,
    },
}

/// The looks at a disk in the order in which they were asked for. Their answers may come in another one: what an
/// earlier look saw says nothing about the disk any more once a later one was answered, and would be taken for a disk
/// that has shrunk.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Looks {
    asked: u64,
    answered: u64,
}

impl Looks {
    fn begin(&mut self) -> u64 {
        self.asked += 1;
        self.asked
    }

    fn is_newest(&mut self, number: u64) -> bool {
        let newest = number >= self.answered;
        self.answered = self.answered.max(number);
        newest
    }

    /// The disk was opened: nobody has looked at it later.
    pub(crate) fn opened(&mut self) {
        self.answered = self.begin();
    }
}

/// How long a handshake waits for a look at the disks: a disk that hangs keeps nobody from connecting.
const LOOK_PATIENCE: Duration = Duration::from_millis(500);

impl Resource {
    /// A peer comes: the two agree on a size by what their disks are now. The handshake waits for the
    /// answer, but not for long; what is found later the peer hears afterwards.
    pub(crate) fn look_at_disks(&mut self, peer: NodeId) {
        let known = |d: &LocalDisk| d.layout.is_some() && d.may_resize();
        let looked: Vec<(VolumeNr, u64)> = self
            .devices
            .iter()
            .filter_map(|(volume, device)| {
                let disk = device.attached().filter(|disk| known(disk))?;
                Some((*volume, disk.usable_sectors()))
            })
            .collect();
        for (volume, room) in looked {
            self.probe_disk(volume, ProbeFor::Connect { peer, room });
            if let Some(device) = self.devices.get_mut(&volume) {
                device.growth.looked_at = Some(self.now);
            }
        }
    }

    /// A disk is being looked at for a peer that connects.
    pub(crate) fn looks_at_disks(&self) -> bool {
        let looks = |d: &Device| {
            d.growth
                .looked_at
                .is_some_and(|at| self.now - at < LOOK_PATIENCE)
        };
        self.devices.values().any(looks)
    }

    /// A look has ended: the handshake that waited for it goes on.
    fn look_ended(&mut self, volume: VolumeNr, peer: NodeId) {
        if let Some(device) = self.devices.get_mut(&volume) {
            device.growth.looked_at = None;
        }
        let waits = self.timers.is_set(Timer::ConnectTwopc(peer));
        if waits && !self.looks_at_disks() {
            self.timers.set(Timer::ConnectTwopc(peer), self.now);
        }
    }

    /// The disk was looked at for a peer that connects.
    pub(crate) fn looked_at_connect(&mut self, volume: VolumeNr, peer: NodeId, room: u64) {
        if self.own_limit(volume).is_none_or(|limit| limit <= room) {
            return;
        }
        if self.is_established(peer) && self.is_lockstep(peer) {
            self.send_sizes(peer, volume);
        }
        let Some(device) = self.devices.get_mut(&volume) else {
            return;
        };
        let begun = device.peers.iter().filter(|(_, pd)| pd.sent_handshake);
        device.growth.untold = begun.map(|(peer, _)| *peer).collect();
    }

    /// A handshake has ended in which a peer may have been told of less room than there is.
    pub(crate) fn tell_room(&mut self, peer: NodeId) {
        let lockstep = self.is_lockstep(peer);
        let silent = planted!(self, RoomUntold);
        let untold = self.devices.iter_mut().filter_map(|(volume, device)| {
            let untold = device.growth.untold.contains(peer);
            device.growth.untold = device.growth.untold.without(peer);
            (untold && lockstep && !silent).then_some(*volume)
        });
        for volume in untold.collect::<Vec<_>>() {
            self.send_sizes(peer, volume);
        }
    }

    pub(crate) fn probe_disk(&mut self, volume: VolumeNr, wanted: ProbeFor) {
        let looks = self.devices.get_mut(&volume).map(|d| &mut d.growth.looks);
        let number = looks.map_or(0, Looks::begin);
        let connects = matches!(wanted, ProbeFor::Connect { .. });
        let tag = self.tags.insert(Pending::Probe(volume, number, wanted));
        self.output(match connects {
            true => Output::LookAtDisk { tag, volume },
            false => Output::ProbeDisk { tag, volume },
        });
    }

    pub(crate) fn disk_probed(
        &mut self,
        volume: VolumeNr,
        number: u64,
        wanted: ProbeFor,
        result: Result<DiskInfo, String>,
    ) {
        let device = self.devices.get_mut(&volume);
        let is_past = device.is_some_and(|d| !d.growth.looks.is_newest(number));
        let attached = self.devices.get(&volume).and_then(|d| d.attached());
        if is_past && result.is_ok() && attached.is_some() {
            self.probe_disk(volume, wanted);
            return;
        }
        if let ProbeFor::Connect { peer, .. } = wanted {
            self.look_ended(volume, peer);
        }
        let failed = match (result, self.devices.get(&volume).and_then(|d| d.attached())) {
            (Err(text), _) => refusal(ErrorCode::ERR_OPEN_DISK, text),
            // Detached meanwhile: the peer meets a node without a disk.
            (Ok(_), None) if matches!(wanted, ProbeFor::Connect { .. }) => return,
            (Ok(_), None) => refusal(
                ErrorCode::ERR_NO_DISK,
                format!("volume {volume} has lost its disk"),
            ),
            (Ok(info), Some(disk)) => match disk.compare_info(&info) {
                Err(text) => refusal(ErrorCode::ERR_DISK_TOO_SMALL, text),
                Ok(Found::Moved(_))
                    if !disk.may_resize()
                        && matches!(wanted, ProbeFor::Follow { .. } | ProbeFor::Connect { .. }) =>
                {
                    if let ProbeFor::Follow { peer, flags, .. } = wanted {
                        self.follow_later(volume, peer, flags);
                    }
                    return;
                }
                Ok(Found::Moved(_)) if !disk.may_resize() => refusal(
                    ErrorCode::IN_TRANSIENT_STATE,
                    format!("volume {volume} is being resized or detached"),
                ),
                Ok(found) => {
                    self.adopt_info(volume, info, found, AfterResize::Probed(wanted));
                    return;
                }
            },
        };
        self.probe_failed(wanted, failed);
    }

    pub(crate) fn probe_failed(&mut self, wanted: ProbeFor, cause: Refusal) {
        match wanted {
            ProbeFor::Command(wish) => self.answer(wish.id, Err(command_error(cause))),
            ProbeFor::Vote { tid, initiator } => {
                let Some(t) = self.twopc.current.as_mut() else {
                    return;
                };
                if t.tid != tid || t.initiator != initiator {
                    return;
                }
                if let Some(vote) = t.resize.as_mut() {
                    vote.probing = false;
                }
                if cause.code == ErrorCode::IN_TRANSIENT_STATE {
                    t.retry = true;
                } else {
                    t.refusal = Some(cause);
                }
                self.twopc_progress();
            }
            ProbeFor::Follow { peer, .. } | ProbeFor::Connect { peer, .. } => {
                self.log(Level::Error, Some(peer), None, cause.text);
            }
        }
    }
}
