//! The operator's commands (semantics.md, 6 and 7).

use alloc::boxed::Box;
use alloc::format;
use alloc::vec::Vec;

use lockstep_format::disk::v09::PeerFlags;
use lockstep_format::units::{NodeId, VolumeNr};
use lockstep_format::wire::{ConnState, DiskState, ReplState, Role, UuidFlags};

use crate::command::{Answer, Command, CommandError, ErrorCode};
use crate::data::BitmapThen;
use crate::device::{AfterMeta, LostDisk};
use crate::event::CommandId;
use crate::generation::Rotation;
use crate::open::{Access, OpenStep};
use crate::options::{Fencing, Quorum};
use crate::promote::not_compared;
use crate::resource::Resource;
use crate::time::{Duration, Instant};
use crate::timers::Timer;
use crate::transition::Change;
use crate::twopc::{WishKind, command_error};
use crate::validity::Refusal;

/// How often a waiting command looks again.
pub(crate) const RETRY: Duration = Duration::from_millis(100);

/// A command that waits for something.
#[derive(Debug)]
pub(crate) struct Waiting {
    pub(crate) id: CommandId,
    pub(crate) what: Wait,
    pub(crate) until: Instant,
}

/// What it waits for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Wait {
    /// Things to settle before a promotion is tried.
    Promote {
        force: bool,
        force_up_to_date: bool,
        outdate_absent: bool,
        tries: u32,
    },
    /// A moment, before the next step: what stands against it may go by itself.
    Pause { at: Instant, then: Box<Wait> },
    /// A two-phase commit under way for a promotion.
    Promoting {
        force: bool,
        force_up_to_date: bool,
        outdate_absent: bool,
        tries: u32,
    },
    /// Handlers that fence peers, for a promotion that was refused.
    Fencing {
        force: bool,
        force_up_to_date: bool,
        outdate_absent: bool,
        tries: u32,
        refusal: Refusal,
    },
    /// The writes in flight, before a demotion.
    Demote,
    /// Writes that only this disk keeps, before it is detached.
    Detach(VolumeNr),
    /// A two-phase commit under way for a detach.
    Detaching(VolumeNr),
    /// A connection to be StandAlone.
    StandAlone(NodeId),
    /// A disk to be gone.
    Diskless(VolumeNr),
    /// A disconnect under way.
    Disconnecting(NodeId),
    /// All connections StandAlone and all disks gone.
    Down,
    /// An opener's turn.
    Open {
        volume: VolumeNr,
        access: Access,
        step: OpenStep,
    },
    /// The marks of a disk that was invalidated without a peer.
    Invalidated(VolumeNr),
    /// The metadata of disks that a forced promotion calls good.
    Forced,
    /// No IO in flight, for `suspend-io`.
    Quiet,
}

pub(crate) fn no_peer(peer: NodeId) -> CommandError {
    CommandError {
        code: ErrorCode::ERR_INVALID_REQUEST,
        text: format!("there is no connection to node {peer}"),
    }
}

pub(crate) fn no_volume(volume: VolumeNr) -> CommandError {
    CommandError {
        code: ErrorCode::ERR_MINOR_INVALID,
        text: format!("there is no volume {volume}"),
    }
}

pub(crate) fn fail<T>(
    code: ErrorCode,
    text: impl Into<alloc::string::String>,
) -> Result<T, CommandError> {
    Err(CommandError {
        code,
        text: text.into(),
    })
}

impl Resource {
    pub(crate) fn run_command(&mut self, id: CommandId, command: Command) {
        let result = match command {
            Command::NewPeer { peer, net } => self.new_peer(peer, net),
            Command::DelPeer { peer } => self.del_peer(peer),
            Command::NetOptions { peer, net } => self.net_options(peer, net),
            Command::Connect {
                peer,
                discard_my_data,
                tentative,
            } => self.command_connect(peer, discard_my_data, tentative),
            Command::Disconnect { peer, force } => {
                self.command_disconnect(id, peer, force);
                return;
            }
            Command::NewVolume {
                volume,
                minor,
                diskless,
            } => self.new_volume(volume, minor, diskless),
            Command::DelVolume { volume } => self.del_volume(volume),
            Command::Attach {
                volume,
                data_path,
                meta_path,
                index,
                options,
            } => {
                self.command_attach(id, volume, data_path, meta_path, index, options);
                return;
            }
            Command::Detach {
                volume,
                force,
                diskless,
            } => {
                self.command_detach(id, volume, force, diskless);
                return;
            }
            Command::DiskOptions { volume, options } => self.disk_options(volume, options),
            Command::PeerDeviceOptions {
                peer,
                volume,
                options,
            } => self.peer_device_options(peer, volume, options),
            Command::ResourceOptions { options } => {
                self.options = options;
                // Quorum and suspension follow the options.
                self.recalculate();
                Ok(Answer::Done)
            }
            Command::Primary { force } => {
                self.command_primary(id, force);
                return;
            }
            Command::Secondary { force } => {
                self.command_secondary(id, force);
                return;
            }
            Command::Open {
                volume,
                open: true,
                write,
            } => {
                self.command_open(id, volume, write);
                return;
            }
            Command::Open {
                volume,
                open: false,
                write,
            } => self.close_volume(volume, write),
            Command::Outdate { volume } => {
                let change = Change::new().disk(volume, DiskState::Outdated);
                self.simple_change(volume, change)
            }
            Command::Invalidate {
                volume,
                from,
                reset_bitmap,
            } => {
                self.command_invalidate(id, volume, from, reset_bitmap);
                return;
            }
            Command::InvalidateRemote {
                peer,
                volume,
                reset_bitmap,
            } => {
                self.command_invalidate_remote(id, peer, volume, reset_bitmap);
                return;
            }
            Command::PauseSync { peer, volume } => self.pause(peer, volume, true),
            Command::ResumeSync { peer, volume } => self.pause(peer, volume, false),
            Command::NewCurrentUuid {
                volume,
                clear_bitmap,
                force_resync,
            } => match self.command_new_current_uuid(id, volume, clear_bitmap, force_resync) {
                Ok(()) => return,
                Err(error) => Err(error),
            },
            Command::SuspendIo => {
                self.hard_change(Change::new().susp_user(true));
                let until = Instant(u64::MAX);
                self.waiting.push(Waiting {
                    id,
                    what: Wait::Quiet,
                    until,
                });
                return;
            }
            Command::ResumeIo => {
                let mut change = Change::new().susp_user(false).susp_nod(false);
                for peer in self.connections.keys() {
                    change = change.susp_fen(*peer, false);
                }
                self.hard_change(change);
                Ok(Answer::Done)
            }
            Command::Verify {
                peer,
                volume,
                start,
                stop,
            } => match self.command_verify(id, peer, volume, start, stop) {
                Ok(()) => return,
                Err(error) => Err(error),
            },
            Command::Resize {
                volume,
                size_sectors,
                assume_clean,
                assume_peer_has_space,
            } => {
                let flags = crate::resize::flags_of(assume_clean, assume_peer_has_space);
                self.command_resize(id, volume, size_sectors, flags);
                return;
            }
            Command::ForgetPeer { peer } => self.forget_peer(peer),
            Command::ResyncOrder { volume, verdict } => self.resync_order(volume, verdict),
            Command::Down => {
                self.command_down(id);
                return;
            }
        };
        self.answer(id, result);
    }

    fn simple_change(&mut self, volume: VolumeNr, change: Change) -> Result<Answer, CommandError> {
        if !self.devices.contains_key(&volume) {
            return Err(no_volume(volume));
        }
        match self.soft_change(change) {
            Ok(true) => Ok(Answer::Done),
            Ok(false) => Ok(Answer::NothingToDo),
            Err(refusal) => Err(command_error(refusal)),
        }
    }

    // Roles.

    /// Looks at every waiting command; called after each input.
    pub(crate) fn settle_commands(&mut self) {
        self.settle_give_way();
        self.settle_auto_demote();
        self.settle_turns();
        self.settle_unasked();
        if self.waiting.is_empty() {
            return;
        }
        let now = self.now;
        let waiting = core::mem::take(&mut self.waiting);
        for item in waiting {
            let expired = now >= item.until;
            match item.what {
                Wait::Promote {
                    force,
                    force_up_to_date,
                    outdate_absent,
                    tries,
                } if self.settled() || expired => {
                    if !force && self.may_stand_by() {
                        self.stand_by(true);
                        self.answer(item.id, Ok(Answer::Done));
                        continue;
                    }
                    if let Some(volume) = self.not_compared_yet().filter(|_| !force) {
                        self.answer(item.id, Err(command_error(not_compared(volume))));
                        continue;
                    }
                    let kind = WishKind::Promote {
                        force_up_to_date,
                        outdate_absent,
                    };
                    let what = Wait::Promoting {
                        force,
                        force_up_to_date,
                        outdate_absent,
                        tries,
                    };
                    self.waiting.push(Waiting { what, ..item });
                    self.wish(kind, Some(item.id));
                }
                Wait::Pause { at, then } if now >= at => {
                    self.ping_everybody();
                    let what = *then;
                    self.waiting.push(Waiting { what, ..item });
                }
                Wait::Fencing {
                    force,
                    force_up_to_date,
                    outdate_absent,
                    tries,
                    refusal,
                } if !self.is_fencing() => {
                    let fenced = self.all_are_fenced();
                    let alone = refusal.code == ErrorCode::NO_UP_TO_DATE_DISK;
                    if !fenced && !force {
                        self.answer(item.id, Err(command_error(refusal)));
                        continue;
                    }
                    let what = Wait::Promote {
                        force,
                        force_up_to_date: force_up_to_date || alone,
                        outdate_absent: outdate_absent || !fenced,
                        tries,
                    };
                    self.waiting.push(Waiting { what, ..item });
                }
                Wait::Open {
                    volume,
                    access,
                    step,
                } => self.open_step(item, volume, access, step),
                Wait::StandAlone(peer) if self.state.conn(peer) == ConnState::StandAlone => {
                    self.answer(item.id, Ok(Answer::Done));
                }
                Wait::Diskless(volume)
                    if self.state.disk(volume) == DiskState::Diskless
                        && self.devices.get(&volume).is_none_or(|d| d.disk.is_none()) =>
                {
                    self.answer(item.id, Ok(Answer::Done));
                }
                Wait::Down if self.down_step() => {
                    self.answer(item.id, Ok(Answer::Done));
                }
                Wait::Demote if self.requests_are_through() => {
                    self.wish(WishKind::Demote { force: false }, Some(item.id));
                }
                Wait::Detach(volume) if self.may_lose_disk(volume) => {
                    let what = Wait::Detaching(volume);
                    self.waiting.push(Waiting { what, ..item });
                    self.wish(WishKind::Detach(volume), Some(item.id));
                }
                Wait::Invalidated(volume) if self.invalidation_ended(volume) => {
                    let result = match self.with_disk(volume) {
                        Ok(_) => Ok(Answer::Done),
                        Err(_) => Err(crate::attach::taken_away(volume)),
                    };
                    self.answer(item.id, result);
                }
                Wait::Forced if self.forced_is_durable() => {
                    self.answer(item.id, Ok(Answer::Done));
                }
                Wait::Quiet if self.io_is_quiet() => {
                    self.answer(item.id, Ok(Answer::Done));
                }
                _ => self.waiting.push(item),
            }
        }
        if !self.waiting.is_empty() {
            let at = self.now + RETRY;
            self.timers.set_earliest(Timer::CommandRetry, at);
        }
    }

    pub(crate) fn retry_commands(&mut self) {
        // `settle` looks at them after every timer.
    }

    /// A two-phase commit that a command waits for has ended.
    pub(crate) fn wish_answered(
        &mut self,
        id: CommandId,
        kind: &WishKind,
        result: Result<Answer, Refusal>,
    ) {
        let position = self.waiting.iter().position(|w| w.id == id);
        let waiting = position.map(|i| self.waiting.swap_remove(i));
        if matches!(kind, WishKind::Detach(_)) {
            self.admission_changed();
        }
        match (waiting.map(|w| (w.what, w.until)), result) {
            (
                Some((
                    Wait::Promoting {
                        force,
                        force_up_to_date,
                        outdate_absent,
                        tries,
                    },
                    until,
                )),
                Err(refusal),
            ) => {
                let retry =
                    self.next_promotion(force, force_up_to_date, outdate_absent, tries, &refusal);
                match retry {
                    Some(what) => {
                        let again = self.now + RETRY.times(2);
                        let until = if until < again { again } else { until };
                        self.waiting.push(Waiting { id, what, until });
                        let at = self.now + RETRY;
                        self.timers.set_earliest(Timer::CommandRetry, at);
                    }
                    None => self.answer(id, Err(command_error(refusal))),
                }
            }
            (Some((Wait::Open { volume, .. }, until)), result) => {
                self.open_answered(id, volume, until, result);
            }
            (Some((Wait::Disconnecting(peer), _)), Err(refusal)) => {
                self.disconnect_failed(id, peer, refusal);
            }
            (Some((Wait::Disconnecting(peer), until)), Ok(_)) => {
                let what = Wait::StandAlone(peer);
                self.waiting.push(Waiting { id, what, until });
            }
            (_, Err(refusal)) => self.answer(id, Err(command_error(refusal))),
            (_, Ok(answer)) => match kind {
                WishKind::Detach(volume) => {
                    let until = Instant(u64::MAX);
                    self.waiting.push(Waiting {
                        id,
                        what: Wait::Diskless(*volume),
                        until,
                    });
                }
                WishKind::ForceUpToDate(volume) => {
                    if !self.force_next(id, Some(*volume)) {
                        self.answer_when_forced(id);
                    }
                }
                WishKind::Promote {
                    force_up_to_date, ..
                } => {
                    // Asked for in words: closing the last opener does not demote.
                    self.explicit_primary = true;
                    match force_up_to_date {
                        true => self.answer_when_forced(id),
                        false => self.answer(id, Ok(answer)),
                    }
                }
                _ => self.answer(id, Ok(answer)),
            },
        }
    }

    // Connections.

    fn command_disconnect(&mut self, id: CommandId, peer: NodeId, force: bool) {
        let Some(c) = self.state.connections.get(&peer).copied() else {
            self.answer(id, Err(no_peer(peer)));
            return;
        };
        if c.conn == ConnState::StandAlone {
            self.answer(id, Ok(Answer::NothingToDo));
            return;
        }
        let until = Instant(u64::MAX);
        if force || c.conn != ConnState::Connected {
            self.hard_disconnect(peer, !force);
            self.waiting.push(Waiting {
                id,
                what: Wait::StandAlone(peer),
                until,
            });
            return;
        }
        let fences = self
            .connections
            .get(&peer)
            .is_some_and(|x| x.net.fencing >= Fencing::ResourceOnly)
            || self.options.quorum != Quorum::Off;
        let own = self.state.role;
        let outdate_peer = fences && own == Role::Primary && c.peer_role != Role::Primary;
        let outdate_self = fences && own != Role::Primary && c.peer_role == Role::Primary;
        self.waiting.push(Waiting {
            id,
            what: Wait::Disconnecting(peer),
            until,
        });
        self.wish(
            WishKind::Disconnect {
                peer,
                outdate_self,
                outdate_peer,
            },
            Some(id),
        );
    }

    fn hard_disconnect(&mut self, peer: NodeId, graceful: bool) {
        match self.state.conn(peer) {
            ConnState::StandAlone | ConnState::Disconnecting => {}
            _ => {
                let mut change = Change::new().conn(peer, ConnState::Disconnecting);
                change.graceful = graceful;
                self.hard_change(change);
            }
        }
    }

    fn disconnect_failed(&mut self, id: CommandId, peer: NodeId, refusal: Refusal) {
        let until = Instant(u64::MAX);
        match refusal.code {
            ErrorCode::CW_FAILED_BY_PEER
            | ErrorCode::NEED_CONNECTION
            | ErrorCode::IS_DISKLESS
            | ErrorCode::LOWER_THAN_OUTDATED
            | ErrorCode::CONCURRENT_ST_CHG
            | ErrorCode::IN_TRANSIENT_STATE
            | ErrorCode::TIMEOUT => {
                let lost = self.state.conn(peer) != ConnState::Connected;
                if lost || refusal.code != ErrorCode::CW_FAILED_BY_PEER {
                    self.hard_disconnect(peer, true);
                    self.waiting.push(Waiting {
                        id,
                        what: Wait::StandAlone(peer),
                        until,
                    });
                } else {
                    self.answer(id, Err(command_error(refusal)));
                }
            }
            ErrorCode::ALREADY_STANDALONE => self.answer(id, Ok(Answer::Done)),
            _ => self.answer(id, Err(command_error(refusal))),
        }
    }

    /// A connection has reached StandAlone.
    pub(crate) fn connection_is_down(&mut self, _peer: NodeId) {
        self.settle_commands();
    }

    fn pause(&mut self, peer: NodeId, volume: VolumeNr, on: bool) -> Result<Answer, CommandError> {
        let Some(device) = self.state.devices.get(&volume) else {
            return Err(no_volume(volume));
        };
        let Some(p) = device.peers.get(&peer) else {
            return Err(no_peer(peer));
        };
        if p.susp_user == on {
            return if on {
                fail(
                    ErrorCode::ERR_PAUSE_IS_SET,
                    "the sync-pause flag is set already",
                )
            } else {
                Err(crate::resync_order::resume_refusal(p))
            };
        }
        self.hard_change(Change::new().pause_user(volume, peer, on));
        Ok(Answer::Done)
    }

    // Disks.

    fn command_detach(&mut self, id: CommandId, volume: VolumeNr, force: bool, diskless: bool) {
        let Some(device) = self.devices.get_mut(&volume) else {
            self.answer(id, Err(no_volume(volume)));
            return;
        };
        if diskless {
            device.intentional_diskless = true;
        }
        let own = self.state.disk(volume);
        if own == DiskState::Diskless {
            self.answer(id, Ok(Answer::NothingToDo));
            return;
        }
        let until = Instant(u64::MAX);
        if force {
            self.hard_change(Change::new().disk(volume, DiskState::Failed));
            self.force_detach(volume);
            self.waiting.push(Waiting {
                id,
                what: Wait::Diskless(volume),
                until,
            });
            return;
        }
        let connected = self
            .state
            .devices
            .get(&volume)
            .is_some_and(|d| d.peers.values().any(|p| p.repl >= ReplState::Established));
        if connected {
            self.close_epoch();
            let what = Wait::Detach(volume);
            self.waiting.push(Waiting { id, what, until });
            return;
        }
        let mut change = Change::new().disk(volume, DiskState::Detaching);
        change.graceful = true;
        match self.soft_change(change) {
            Ok(_) => self.waiting.push(Waiting {
                id,
                what: Wait::Diskless(volume),
                until,
            }),
            Err(refusal) => self.answer(id, Err(command_error(refusal))),
        }
    }

    fn command_invalidate(
        &mut self,
        id: CommandId,
        volume: VolumeNr,
        from: Option<NodeId>,
        reset_bitmap: bool,
    ) {
        if self
            .devices
            .get(&volume)
            .is_none_or(|d| d.attached().is_none())
        {
            let text = format!("volume {volume} has no disk");
            self.answer(id, fail(ErrorCode::ERR_NO_DISK, text));
            return;
        }
        let peers: Vec<NodeId> = self
            .state
            .devices
            .get(&volume)
            .map(|d| {
                d.peers
                    .iter()
                    .filter(|(n, p)| {
                        from.is_none_or(|f| f == **n)
                            && p.repl >= ReplState::Established
                            && p.disk >= DiskState::Inconsistent
                    })
                    .map(|(n, _)| *n)
                    .collect()
            })
            .unwrap_or_default();
        let best = peers
            .iter()
            .copied()
            .rev()
            .max_by_key(|n| self.state.peer_device(volume, *n).disk);
        if let Some(peer) = best {
            let repl = if reset_bitmap {
                ReplState::StartingSyncT
            } else {
                ReplState::WfBitmapT
            };
            self.wish(WishKind::Resync { volume, peer, repl }, Some(id));
            return;
        }
        if from.is_some() {
            let text = "the given peer is not connected or has no disk";
            self.answer(id, fail(ErrorCode::NEED_CONNECTION, text));
            return;
        }
        let change = Change::new().disk(volume, DiskState::Inconsistent);
        if let Err(refusal) = self.check_change(&change) {
            self.answer(id, Err(command_error(refusal)));
            return;
        }
        if !planted!(self, InvalidatedAloneUnmarked) {
            self.set_all_slots(volume);
            // Until the marks are durable the metadata call for a full copy.
            self.note_full_copy(volume, true);
        }
        self.hard_change(change);
        self.write_superblock(volume);
        self.write_bitmap(volume, BitmapThen::Invalidated);
        self.waiting.push(Waiting {
            id,
            what: Wait::Invalidated(volume),
            until: Instant(u64::MAX),
        });
    }

    fn note_full_copy(&mut self, volume: VolumeNr, wanted: bool) {
        if let Some(disk) = self.devices.get_mut(&volume).and_then(|d| d.attached_mut()) {
            for node in (0..NodeId::COUNT).map(NodeId) {
                let flags = &mut disk.generations.slot_mut(node).flags;
                flags.set(PeerFlags::FULL_SYNC, wanted);
            }
        }
    }

    /// The marks of an invalidated disk are durable.
    pub(crate) fn invalidated(&mut self, volume: VolumeNr) {
        self.note_full_copy(volume, false);
        self.write_superblock(volume);
    }

    /// Nothing is left to write of an invalidation, or the disk has gone.
    fn invalidation_ended(&self, volume: VolumeNr) -> bool {
        let device = self.devices.get(&volume);
        let disk = device.and_then(crate::device::Device::attached);
        disk.is_none_or(|disk| {
            let noted = crate::attach::superblock_calls_for_all(&disk.generations);
            !noted && self.meta_is_durable(volume)
        })
    }

    fn command_invalidate_remote(
        &mut self,
        id: CommandId,
        peer: NodeId,
        volume: VolumeNr,
        reset_bitmap: bool,
    ) {
        if !self.connections.contains_key(&peer) {
            self.answer(id, Err(no_peer(peer)));
            return;
        }
        if let Err(error) = self.with_disk(volume) {
            self.answer(id, Err(error));
            return;
        }
        let repl = if reset_bitmap {
            ReplState::StartingSyncS
        } else {
            ReplState::WfBitmapS
        };
        if self.state.peer_device(volume, peer).repl >= ReplState::Established {
            self.wish(WishKind::Resync { volume, peer, repl }, Some(id));
            return;
        }
        let text = format!("node {peer} is not connected");
        self.answer(id, fail(ErrorCode::NEED_CONNECTION, text));
    }

    /// A volume that has a disk.
    fn with_disk(&self, volume: VolumeNr) -> Result<&crate::device::Device, CommandError> {
        let device = self.devices.get(&volume).ok_or_else(|| no_volume(volume))?;
        match device.attached() {
            Some(_) => Ok(device),
            None => fail(
                ErrorCode::ERR_NO_DISK,
                format!("volume {volume} has no disk"),
            ),
        }
    }

    fn command_verify(
        &mut self,
        id: CommandId,
        peer: NodeId,
        volume: VolumeNr,
        start: Option<u64>,
        stop: Option<u64>,
    ) -> Result<(), CommandError> {
        if !self.connections.contains_key(&peer) {
            return Err(no_peer(peer));
        }
        let size = self.with_disk(volume)?.size_sectors;
        let start_at = start.unwrap_or(0);
        if start_at >= size.max(1) || stop.is_some_and(|stop| stop <= start_at) {
            return Err(CommandError {
                code: ErrorCode::ERR_INVALID_REQUEST,
                text: format!(
                    "nothing to verify from sector {start_at} to {}: the volume has {size} sectors",
                    stop.unwrap_or(size)
                ),
            });
        }
        if stop.is_some() && !crate::legacy::has_stop_sector(self.spoken(peer)) {
            return Err(CommandError {
                code: ErrorCode::ERR_INVALID_REQUEST,
                text: format!("the protocol version of node {peer} has no stop sector of a verify"),
            });
        }
        match self.state.peer_device(volume, peer).repl {
            ReplState::Established => self.verify_wanted(volume, peer, start, stop),
            // No change of state would come of it: what the operator wants would be dropped.
            ReplState::VerifyS => {
                return fail(
                    ErrorCode::RESYNC_RUNNING,
                    format!("volume {volume} is being verified with node {peer} already"),
                );
            }
            // The rules for changes of state say what is wrong with the others.
            _ => {}
        }
        let repl = ReplState::VerifyS;
        self.wish(WishKind::Resync { volume, peer, repl }, Some(id));
        Ok(())
    }

    fn command_new_current_uuid(
        &mut self,
        id: CommandId,
        volume: VolumeNr,
        clear_bitmap: bool,
        force_resync: bool,
    ) -> Result<(), CommandError> {
        let created = lockstep_format::units::Uuid::JUST_CREATED;
        let Some(device) = self.devices.get(&volume) else {
            return Err(no_volume(volume));
        };
        // One that is on its way may be older than what applications have seen, and one that leaves
        // may have been Inconsistent before.
        let own = self.state.disk(volume);
        let here = own >= DiskState::Inconsistent;
        let Some(disk) = device.attached().filter(|_| here) else {
            return fail(
                ErrorCode::ERR_NO_DISK,
                format!("volume {volume} is {own:?}: it has no disk in use"),
            );
        };
        let fresh = disk.generations.current == created;
        if !clear_bitmap && !fresh && own == DiskState::Inconsistent {
            return fail(
                ErrorCode::NO_UP_TO_DATE_DISK,
                format!("volume {volume} is {own:?}: its data are no generation"),
            );
        }
        let option = clear_bitmap || force_resync;
        let old = |peer: &NodeId| {
            let knows = crate::legacy::WITH_COMPRESSED_BITMAP;
            self.is_established(*peer) && self.spoken(*peer) < knows
        };
        if let Some(peer) = self
            .connections
            .keys()
            .find(|peer| clear_bitmap && old(peer))
        {
            return fail(
                ErrorCode::ERR_INVALID_REQUEST,
                format!("the protocol version of node {peer} cannot skip the first resync"),
            );
        }
        if let Some(peer) = self.joining_peer(volume).filter(|_| option) {
            return fail(
                ErrorCode::ERR_CONNECTED,
                format!(
                    "the disk of node {peer}, which is connected, does not take part in volume \
                     {volume} yet; wait until it is attached and Established"
                ),
            );
        }
        let mut qualifying = Vec::new();
        for (peer, p) in &self
            .state
            .devices
            .get(&volume)
            .map(|d| d.peers.clone())
            .unwrap_or_default()
        {
            if p.repl == ReplState::Off {
                continue;
            }
            if !(option && p.repl == ReplState::Established && fresh) {
                return fail(
                    ErrorCode::ERR_CONNECTED,
                    format!(
                        "volume {volume} is connected to node {peer}; a new current UUID needs \
                         all peers disconnected, or --clear-bitmap on disks that were just created"
                    ),
                );
            }
            qualifying.push(*peer);
        }
        let views = self.peer_views(volume);
        let dagtag = self.io.dagtag;
        let role = self.state.role;
        let mut rng = self.rng.clone();
        if clear_bitmap {
            for peer in self.connections.keys().copied().collect::<Vec<_>>() {
                self.clear_slot(volume, peer);
            }
        }
        let Some(disk) = self.devices.get_mut(&volume).and_then(|d| d.attached_mut()) else {
            return Err(no_volume(volume));
        };
        let rotation = Rotation {
            peers: &views,
            weak: lockstep_format::units::NodeMask::EMPTY,
            dagtag,
        };
        let base = disk.generations.clone();
        if disk
            .generations
            .new_current_by_command(&rotation, role, &mut rng)
            .is_none()
        {
            disk.generations.current = rng.uuid();
            disk.generations.set_primary_bit(role);
        }
        let mut change = Change::new();
        if clear_bitmap {
            let all = qualifying.iter().copied().collect();
            disk.generations.zero_slots(all);
            change = change.disk(volume, DiskState::UpToDate);
            for peer in &qualifying {
                // A node without a disk gets none by it.
                if self.state.peer_device(volume, *peer).disk > DiskState::Diskless {
                    change = change.peer_disk(volume, *peer, DiskState::UpToDate);
                }
            }
        } else if force_resync {
            change = change.disk(volume, DiskState::UpToDate);
        }
        self.rng = rng;
        self.write_bitmap(volume, BitmapThen::Nothing);
        let flags = if clear_bitmap {
            UuidFlags::SKIP_INITIAL_SYNC
        } else {
            UuidFlags::RESYNC
        };
        for peer in qualifying {
            self.send_uuids(peer, volume, flags);
            if force_resync && let Some(pd) = self.peer_device_mut(volume, peer) {
                pd.consider_resync = true;
            }
        }
        self.hard_change(change);
        let early = planted!(self, CommandExposesEarly);
        if let Some(device) = self.devices.get_mut(&volume) {
            let uuid = device.current_uuid();
            // With an option marks are gone, and peers may have heard of it: there is no way back.
            if option || early {
                device.exposed_uuid = uuid;
            } else {
                device.unmade = Some((base, uuid));
            }
            self.after_superblock(volume, AfterMeta::NamedByCommand(id, uuid));
        }
        Ok(())
    }

    /// The peer skipped the initial sync: so does this just created node (12.8).
    pub(crate) fn skip_initial_sync(
        &mut self,
        peer: NodeId,
        volume: VolumeNr,
        current: lockstep_format::units::Uuid,
    ) {
        let role = self.state.role;
        let peers: Vec<NodeId> = self.connections.keys().copied().collect();
        for other in peers {
            self.clear_slot(volume, other);
        }
        let Some(disk) = self.devices.get_mut(&volume).and_then(|d| d.attached_mut()) else {
            return;
        };
        disk.generations.adopt_without_resync(current, peer, role);
        self.write_superblock(volume);
        self.write_bitmap(volume, BitmapThen::Nothing);
        let change = Change::new().disk(volume, DiskState::UpToDate).peer_disk(
            volume,
            peer,
            DiskState::UpToDate,
        );
        self.hard_change(change);
        for other in self.established_peers().iter() {
            self.send_uuids(other, volume, UuidFlags::empty());
        }
    }

    fn forget_peer(&mut self, peer: NodeId) -> Result<Answer, CommandError> {
        if self.connections.contains_key(&peer) {
            return fail(
                ErrorCode::ERR_NET_CONFIGURED,
                format!("there is a connection to node {peer}; delete it first"),
            );
        }
        if peer == self.node_id || peer.0 >= NodeId::COUNT {
            return fail(
                ErrorCode::ERR_INVALID_PEER_NODE_ID,
                format!("node id {peer} is not a peer"),
            );
        }
        let volumes: Vec<VolumeNr> = self.devices.keys().copied().collect();
        for volume in volumes {
            self.fork_for_forgotten(volume, peer);
            let Some(disk) = self.devices.get_mut(&volume).and_then(|d| d.attached_mut()) else {
                continue;
            };
            if let Some(forgotten) = disk.generations.forget_peer(peer, false)
                && !planted!(self, ForgottenKeepsBits)
            {
                match forgotten.copy_from {
                    Some(from) => disk.io.bitmap.copy_slot(from, forgotten.freed),
                    None => disk.io.bitmap.fill(forgotten.freed, true),
                }
            }
            disk.io.set_slot(peer, None);
            self.write_superblock(volume);
            self.write_bitmap(volume, BitmapThen::Nothing);
        }
        Ok(Answer::Done)
    }

    // Secondary.

    /// A demotion waits for the writes in flight: acknowledged by a Secondary, they would be
    /// missing at the node that became Primary meanwhile.
    fn command_secondary(&mut self, id: CommandId, force: bool) {
        if self.waits_for_turn() {
            let result = self.stop_standing_by(force);
            self.answer(id, result);
            return;
        }
        if !self.is_demoting() {
            self.keep_turn();
        }
        let mut change = Change::new().role(Role::Secondary);
        change.ignore_openers = force;
        let waits = !force && self.check_change(&change).is_ok() && !self.requests_are_through();
        if !waits {
            self.wish(WishKind::Demote { force }, Some(id));
            return;
        }
        self.close_epoch();
        self.waiting.push(Waiting {
            id,
            what: Wait::Demote,
            until: Instant(u64::MAX),
        });
    }

    // Down.

    fn command_down(&mut self, id: CommandId) {
        let waits = self.waits_for_turn();
        if self.state.role == Role::Primary || waits {
            let open = self.has_openers(crate::open::Access::Write);
            if open {
                let text = "a volume is held open; unmount it first";
                self.answer(id, fail(ErrorCode::DEVICE_IN_USE, text));
                return;
            }
            self.explicit_primary = false;
            if waits {
                let _ = self.stop_standing_by(false);
            } else if !self.requests_are_through() {
                self.close_epoch();
            }
        }
        let until = Instant(u64::MAX);
        self.waiting.push(Waiting {
            id,
            what: Wait::Down,
            until,
        });
    }

    /// One step of `down`; true when everything is gone.
    fn down_step(&mut self) -> bool {
        if self.now < self.down_pause {
            return false;
        }
        if self.state.role == Role::Primary {
            if self.twopc.current.is_none() && self.requests_are_through() {
                self.wish(WishKind::Demote { force: false }, None);
            }
            return false;
        }
        let peers: Vec<NodeId> = self.connections.keys().copied().collect();
        let mut all = true;
        for peer in peers {
            match self.state.conn(peer) {
                ConnState::StandAlone => {}
                ConnState::Connected => {
                    all = false;
                    let peer_primary = self
                        .state
                        .connections
                        .get(&peer)
                        .is_some_and(|c| c.peer_role == Role::Primary);
                    let fences = self.fencing_of(peer) >= Fencing::ResourceOnly;
                    let outdate_self = peer_primary
                        && (fences || self.options.quorum != Quorum::Off)
                        && !planted!(self, DownStaysCurrent);
                    self.wish(
                        WishKind::Disconnect {
                            peer,
                            outdate_self,
                            outdate_peer: false,
                        },
                        None,
                    );
                }
                ConnState::Disconnecting => all = false,
                _ => {
                    all = false;
                    self.hard_disconnect(peer, true);
                }
            }
        }
        if !all {
            return false;
        }
        let volumes: Vec<VolumeNr> = self.devices.keys().copied().collect();
        for volume in volumes {
            match self.state.disk(volume) {
                DiskState::Diskless => {
                    all &= self.devices.get(&volume).is_none_or(|d| d.disk.is_none());
                }
                DiskState::Detaching | DiskState::Failed | DiskState::Attaching => all = false,
                _ => {
                    all = false;
                    let mut change = Change::new().disk(volume, DiskState::Detaching);
                    change.graceful = true;
                    self.hard_change(change);
                }
            }
        }
        all
    }

    /// Something on a disk failed: what `on-io-error` says (semantics.md, 8.4).
    pub(crate) fn disk_failed(&mut self, volume: VolumeNr, fault: crate::data::DiskFault) {
        let own = self.state.disk(volume);
        if own == DiskState::Attaching {
            if fault == crate::data::DiskFault::Meta {
                self.attach_cannot_write(volume);
            }
            return;
        }
        if own <= DiskState::Failed {
            if fault == crate::data::DiskFault::Meta {
                self.leave_ungracefully(volume);
            }
            return;
        }
        let Some(disk) = self.devices.get_mut(&volume).and_then(|d| d.disk.as_mut()) else {
            return;
        };
        let pass_on = disk.options.on_io_error == crate::options::OnIoError::PassOn;
        let path = disk.data_path.clone();
        self.log(
            crate::report::Level::Error,
            None,
            Some(volume),
            format!("{path}: {fault:?} error on the disk"),
        );
        let passes = fault == crate::data::DiskFault::Data || planted!(self, MetaErrorPassedOn);
        let to = if pass_on && passes {
            if own <= DiskState::Inconsistent || planted!(self, PassOnKeepsDisk) {
                return;
            }
            DiskState::Inconsistent
        } else {
            if let Some(device) = self.devices.get_mut(&volume) {
                device.lost_disk = Some(match fault {
                    crate::data::DiskFault::Data => LostDisk::Data,
                    crate::data::DiskFault::Meta => LostDisk::Meta,
                });
            }
            DiskState::Failed
        };
        self.hard_change(Change::new().disk(volume, to));
    }
}
