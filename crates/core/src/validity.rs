//! Which state changes are refused, and with which code (semantics.md, 3.3 and 3.4).

use alloc::format;
use alloc::string::String;

use lockstep_format::units::{NodeId, VolumeNr};
use lockstep_format::wire::{ConnState, DiskState, ReplState, Role};

use crate::command::ErrorCode;
use crate::open::Access;
use crate::options::Fencing;
use crate::resource::Resource;
use crate::state::{ReplSets, State};

/// Why a change was refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The code.
    pub code: ErrorCode,
    /// What stands in the way, in words.
    pub text: String,
}

fn refuse<T>(code: ErrorCode, text: impl Into<String>) -> Result<T, Refusal> {
    Err(Refusal {
        code,
        text: text.into(),
    })
}

impl Resource {
    /// Rules that hold even for facts. An edge that breaks one is a bug of this program or an
    /// operator's command in the wrong moment; facts are filtered before they get here.
    pub(crate) fn hard_validity(&self, old: &State, new: &State) -> Result<(), Refusal> {
        for (peer, after) in &new.connections {
            let before = old.conn(*peer);
            if before == after.conn {
                continue;
            }
            match before {
                ConnState::StandAlone if after.conn == ConnState::Disconnecting => {
                    return refuse(
                        ErrorCode::ALREADY_STANDALONE,
                        format!("the connection to node {peer} is StandAlone already"),
                    );
                }
                ConnState::StandAlone if after.conn != ConnState::Unconnected => {
                    return refuse(
                        ErrorCode::NEED_CONNECTION,
                        format!("node {peer} is not connected"),
                    );
                }
                ConnState::Timeout
                | ConnState::BrokenPipe
                | ConnState::NetworkFailure
                | ConnState::ProtocolError
                | ConnState::TearDown
                    if after.conn != ConnState::Unconnected
                        && after.conn != ConnState::Disconnecting =>
                {
                    return refuse(
                        ErrorCode::IN_TRANSIENT_STATE,
                        format!("the connection to node {peer} is being cleaned up"),
                    );
                }
                ConnState::Disconnecting if after.conn != ConnState::StandAlone => {
                    return refuse(
                        ErrorCode::IN_TRANSIENT_STATE,
                        format!("the connection to node {peer} is being closed"),
                    );
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Rules that an operator's or a peer's wish has to pass; facts do not.
    pub(crate) fn soft_validity(
        &self,
        old: &State,
        new: &State,
        ignore_openers: bool,
    ) -> Result<(), Refusal> {
        let becomes_primary = old.role != Role::Primary && new.role == Role::Primary;
        for (peer, c) in &new.connections {
            let two = self.may_both_be_primary(*peer);
            let was = old
                .connections
                .get(peer)
                .is_some_and(|o| o.peer_role == Role::Primary);
            if new.role == Role::Primary
                && c.peer_role == Role::Primary
                && !two
                && (becomes_primary || !was)
            {
                let text = match self.waits_for_demotion(*peer) {
                    true => format!(
                        "beside a third disk node {peer}, a kernel, can be Primary only when this node is Secondary"
                    ),
                    false => format!("node {peer} is Primary, and two Primaries are not allowed"),
                };
                return refuse(ErrorCode::TWO_PRIMARIES, text);
            }
            if new.role != Role::Primary
                && c.peer_role == Role::Primary
                && !was
                && !two
                && !old.fail_io
                && !self.waits_for_turn()
                && self.has_openers(Access::Read)
            {
                return refuse(
                    ErrorCode::PRIMARY_READER,
                    "a volume is held open for reading here",
                );
            }
        }
        if becomes_primary && self.in_handshake() && !planted!(self, PromotesInHandshake) {
            return refuse(
                ErrorCode::IN_TRANSIENT_STATE,
                "a connection is being established",
            );
        }
        if becomes_primary && old.fail_io {
            return refuse(
                ErrorCode::DEVICE_IN_USE,
                "openers of before the forced demotion still hold a volume",
            );
        }
        for (peer, c) in &new.connections {
            let before = old.conn(*peer);
            if c.conn == ConnState::Disconnecting && before == ConnState::StandAlone {
                return refuse(
                    ErrorCode::ALREADY_STANDALONE,
                    "the connection is StandAlone",
                );
            }
            if c.conn == ConnState::Connecting && before < ConnState::Unconnected {
                return refuse(ErrorCode::NO_NET_CONFIG, "the connection is not configured");
            }
        }
        for volume in new.devices.keys() {
            self.soft_device(*volume, old, new, becomes_primary, ignore_openers)?;
            self.soft_peers(*volume, old, new)?;
        }
        Ok(())
    }

    fn soft_device(
        &self,
        volume: VolumeNr,
        old: &State,
        new: &State,
        becomes_primary: bool,
        ignore_openers: bool,
    ) -> Result<(), Refusal> {
        let Some(after) = new.devices.get(&volume) else {
            return Ok(());
        };
        let before = old.disk(volume);
        let openers = self
            .devices
            .get(&volume)
            .map(|d| d.openers)
            .unwrap_or_default();
        let starts_attach = before < DiskState::Attaching && after.disk == DiskState::Attaching;
        let starts_detach = before > DiskState::Detaching && after.disk == DiskState::Detaching;
        if self.in_handshake() && (starts_attach || starts_detach) {
            return refuse(
                ErrorCode::IN_TRANSIENT_STATE,
                "a connection is being established",
            );
        }
        let demoted = old.role == Role::Primary && new.role == Role::Secondary;
        if demoted && openers.writers > 0 && !ignore_openers {
            return refuse(
                ErrorCode::DEVICE_IN_USE,
                format!("volume {volume} is held open for writing; unmount it first"),
            );
        }
        if before == DiskState::Diskless && after.disk > DiskState::Attaching {
            return refuse(
                ErrorCode::IS_DISKLESS,
                format!("volume {volume} has no disk"),
            );
        }
        let resync_ends = after.peers.iter().any(|(peer, p)| {
            old.peer_device(volume, *peer).repl.is_sync_target() && p.repl == ReplState::Established
        });
        if after.disk == DiskState::Outdated
            && before < DiskState::Outdated
            && !matches!(before, DiskState::Attaching | DiskState::Negotiating)
            && !resync_ends
        {
            return refuse(
                ErrorCode::LOWER_THAN_OUTDATED,
                format!("the disk of volume {volume} is {before:?}, lower than Outdated"),
            );
        }
        let loses_source = after.peers.iter().any(|(peer, p)| {
            let was = old.peer_device(volume, *peer);
            was.repl > ReplState::Off
                && was.disk == DiskState::UpToDate
                && (p.repl == ReplState::Off || p.disk != DiskState::UpToDate)
        });
        if before == DiskState::Negotiating && loses_source {
            // What this disk becomes without that peer is not what it may become with it before
            // the change is committed.
            return refuse(
                ErrorCode::IN_TRANSIENT_STATE,
                format!("the disk of volume {volume} is being attached"),
            );
        }
        let had_data = old.role == Role::Primary
            && old
                .devices
                .get(&volume)
                .is_some_and(|d| !d.data_accessible());
        let unchecked = planted!(self, PromotionUnchecked);
        if new.role == Role::Primary && !after.data_accessible() && !had_data && !unchecked {
            return refuse(
                ErrorCode::NO_UP_TO_DATE_DISK,
                format!("volume {volume} has no UpToDate data, neither here nor at a peer"),
            );
        }
        let had_quorum = old.devices.get(&volume).is_some_and(|d| d.have_quorum);
        let unasked = planted!(self, PromotesWithoutQuorum);
        if new.role == Role::Primary
            && !after.have_quorum
            && (becomes_primary || had_quorum)
            && !unasked
        {
            let n = self.count_quorum(volume, old, new);
            return refuse(
                ErrorCode::NO_QUORUM,
                if n.up_to_date < n.needed_up_to_date {
                    format!(
                        "volume {volume}: {} of {} nodes up_to_date, need {} for \
                         quorum-minimum-redundancy",
                        n.up_to_date, n.voters, n.needed_up_to_date
                    )
                } else {
                    format!(
                        "volume {volume}: {} of {} nodes visible, need {} for quorum",
                        n.up_to_date + n.present,
                        n.voters,
                        n.needed
                    )
                },
            );
        }
        let negotiating = after
            .peers
            .values()
            .filter(|p| p.disk == DiskState::Negotiating)
            .count()
            + usize::from(after.disk == DiskState::Negotiating);
        if negotiating > 1 && before != DiskState::Negotiating {
            return refuse(
                ErrorCode::IN_TRANSIENT_STATE,
                "another node attaches right now",
            );
        }
        Ok(())
    }

    fn soft_peers(&self, volume: VolumeNr, old: &State, new: &State) -> Result<(), Refusal> {
        let Some(after) = new.devices.get(&volume) else {
            return Ok(());
        };
        let own_before = old.disk(volume);
        for (peer, p) in &after.peers {
            let before = old.peer_device(volume, *peer);
            let net = self.connections.get(peer).map(|c| &c.net);
            let fences = net.is_some_and(|n| n.fencing >= Fencing::ResourceOnly);
            if fences
                && new.role == Role::Primary
                && p.repl < ReplState::Established
                && p.disk > DiskState::Outdated
                && !(old.role == Role::Primary
                    && before.repl < ReplState::Established
                    && before.disk > DiskState::Outdated)
            {
                return refuse(
                    ErrorCode::PRIMARY_NOP,
                    format!("node {peer} has to be fenced first"),
                );
            }
            if p.repl > ReplState::Established && before.repl <= ReplState::Established {
                // Between connected disks it goes by them as they were: the new state's are never
                // below Inconsistent in a resync. One that is being attached may have to be resynced
                // first, and what was asked for would take the place of that.
                let (ours, theirs) = if before.repl == ReplState::Established {
                    (own_before, before.disk)
                } else {
                    (after.disk, p.disk)
                };
                let what = if matches!(p.repl, ReplState::VerifyS | ReplState::VerifyT) {
                    "verify"
                } else {
                    "resync"
                };
                if ours < DiskState::Inconsistent {
                    return refuse(
                        ErrorCode::NO_LOCAL_DISK,
                        format!("volume {volume} has no attached disk here to {what}"),
                    );
                }
                if theirs < DiskState::Inconsistent {
                    return refuse(
                        ErrorCode::NO_REMOTE_DISK,
                        format!("volume {volume} has no attached disk at node {peer} to {what}"),
                    );
                }
            }
            if own_before > DiskState::Outdated
                && after.disk == DiskState::Outdated
                && !self.may_be_outdated(volume, new)
            {
                return refuse(
                    ErrorCode::CONNECTED_OUTDATES,
                    "a connected Primary keeps this disk current",
                );
            }
            let verifies = matches!(p.repl, ReplState::VerifyS | ReplState::VerifyT);
            if verifies && before.repl != p.repl {
                if self.spoken(*peer) < crate::legacy::WITH_VERIFY {
                    return refuse(
                        ErrorCode::NOT_SUPPORTED,
                        "the peer's protocol version has no online verify",
                    );
                }
                if net.is_none_or(|n| n.verify_alg.is_none()) {
                    return refuse(ErrorCode::NO_VERIFY_ALG, "verify-alg is not configured");
                }
                let theirs = self
                    .connections
                    .get(peer)
                    .map(|c| c.peer_verify_alg.as_str());
                let ours = net.and_then(|n| n.verify_alg.as_deref());
                if theirs != ours {
                    return refuse(
                        ErrorCode::NO_VERIFY_ALG,
                        format!(
                            "verify-alg differs: {:?} here, {:?} at node {peer}",
                            ours.unwrap_or_default(),
                            theirs.unwrap_or_default()
                        ),
                    );
                }
                if before.repl < ReplState::Established {
                    return refuse(ErrorCode::NEED_CONNECTION, "verify needs a connection");
                }
                if before.repl > ReplState::Established {
                    return refuse(ErrorCode::RESYNC_RUNNING, "a resync is running");
                }
            }
            // A full sync that has not marked everything yet is no resync by bitmap.
            let replaces = planted!(self, FullSyncReplaced);
            let starts = |repl| before.repl == repl && !replaces;
            let to_source = before.repl.is_sync_source() || starts(ReplState::StartingSyncS);
            let to_target = before.repl.is_sync_target() && !self.is_unasked(volume, *peer)
                || starts(ReplState::StartingSyncT);
            // Least of all the other way round: the target is a part of what its source has.
            let reverses = !planted!(self, ResyncReversed);
            if (p.repl == ReplState::WfBitmapS && (to_source || to_target && reverses))
                || (p.repl == ReplState::WfBitmapT && (to_target || to_source && reverses))
            {
                return refuse(ErrorCode::RESYNC_RUNNING, "a resync is running");
            }
            let starting = matches!(p.repl, ReplState::StartingSyncS | ReplState::StartingSyncT);
            if starting && before.repl != p.repl {
                if before.repl > ReplState::Established {
                    return refuse(ErrorCode::RESYNC_RUNNING, "a resync is running");
                }
                if before.repl < ReplState::Established {
                    return refuse(
                        ErrorCode::NEED_CONNECTION,
                        format!("node {peer} is not connected"),
                    );
                }
            }
            if !self.keeps_marks_for(volume, *peer)
                && before.disk <= DiskState::Attaching
                && p.disk > DiskState::Attaching
                && p.disk != DiskState::DUnknown
            {
                return refuse(
                    ErrorCode::ATTACH_NO_BITMAP,
                    format!(
                        "volume {volume} has no bitmap for node {peer} here (bitmap no): a disk \
                         there could not be brought up to date"
                    ),
                );
            }
        }
        Ok(())
    }

    /// Why nothing would change by a resync that is asked for.
    pub(crate) fn no_new_resync(&self, volume: VolumeNr, peer: NodeId) -> Refusal {
        if self.state.peer_device(volume, peer).repl > ReplState::Established {
            // It has only just begun, by an earlier command.
            let text = "a resync is starting".into();
            let code = ErrorCode::RESYNC_RUNNING;
            return Refusal { code, text };
        }
        Refusal {
            code: ErrorCode::NO_REMOTE_DISK,
            text: format!("volume {volume} has no attached disk at node {peer} to resync"),
        }
    }

    /// The changes that a peer misses can be marked: it is to have a bitmap, and has one if there is a
    /// disk here.
    fn keeps_marks_for(&self, volume: VolumeNr, peer: NodeId) -> bool {
        let Some(device) = self.devices.get(&volume) else {
            return true;
        };
        let wanted = device.peers.get(&peer).is_none_or(|pd| pd.options.bitmap);
        wanted && device.attached().is_none_or(|d| d.io.slot(peer).is_some())
    }

    /// The own disk may be called Outdated in `new` (semantics.md, 3.4 at the end).
    fn may_be_outdated(&self, volume: VolumeNr, new: &State) -> bool {
        let Some(device) = new.devices.get(&volume) else {
            return true;
        };
        if device.peers.values().any(|p| p.repl.becomes_target()) {
            return true;
        }
        if new.role == Role::Primary {
            return false;
        }
        let primaries = new
            .connections
            .iter()
            .filter(|(_, c)| c.peer_role == Role::Primary);
        let mut none = true;
        for (peer, _) in primaries {
            none = false;
            if new.peer_device(volume, *peer).disk == DiskState::Diskless {
                return true;
            }
        }
        none
    }
}
