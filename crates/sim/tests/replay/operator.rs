//! What the operator and the applications of the captured node did.

use std::collections::BTreeMap;

use lockstep_core::command::Command;
use lockstep_core::options::{OnLoss, PeerDeviceOptions, Protocol, ResourceOptions};
use lockstep_format::units::{NodeId, Sector, VolumeNr};
use lockstep_format::wire::{Packet, ReplState};

use crate::capture::{Item, Seen, What};
use crate::compare::Replay;
use crate::packets::{is_cut_off, set_runs};

impl<'a> Replay<'a> {
    pub(crate) fn operator(&mut self, text: &str, ahead: &[Item]) {
        let words: Vec<&str> = text.split_whitespace().collect();
        let volume = VolumeNr(0);
        match words[..] {
            ["drbdadm", "up", ..] => {
                let setup = self.setup;
                let peers = self.peers.clone();
                self.node.diskless = setup.diskless.clone();
                // Options of peer devices stand in the section of the disk, and go with one.
                let peer_disk = match setup.diskless.contains(&self.me) {
                    true => PeerDeviceOptions::default(),
                    false => setup.peer_disk.clone(),
                };
                self.node.up(&peers, &setup.net, &setup.disk, &peer_disk);
            }
            ["drbdadm", "primary", ref rest @ ..] => {
                let force = rest.contains(&"--force");
                self.node.command(Command::Primary { force });
            }
            ["drbdadm", "secondary", ..] => {
                self.node.command(Command::Secondary { force: false });
            }
            ["drbdadm", "down", ..] => {
                self.node.command(Command::Down);
            }
            ["drbdadm", "disconnect", ref rest @ ..] => {
                for peer in self.meant(rest) {
                    self.node
                        .command(Command::Disconnect { peer, force: false });
                }
            }
            ["drbdadm", "connect", ref rest @ ..] => {
                let discard = rest.contains(&"--discard-my-data");
                for peer in self.meant(rest) {
                    self.node.connect(peer, discard);
                }
            }
            ["(link", "to", peer, "lost)"] => {
                let number = peer.strip_prefix("node").and_then(|n| n.parse::<u8>().ok());
                let peer = NodeId(number.expect("the number of a node") - 1);
                // When they are sent is free, so those of the end may be missing.
                self.peer_acks.remove(&peer);
                self.down(peer);
            }
            ["(wl", ..] | ["wl", ..] if self.is_cluster() => self.write_suspended(ahead),
            ["(QEMU", "killed:", ..] => {
                self.node.power_cut(self.setup.options.clone());
                self.forget_links();
            }
            ["printf", "\"0", "67584", what, ..] => self.node.broken = what == "error\"",
            ["drbdadm", "new-current-uuid", ref rest @ ..] => {
                self.node.command(Command::NewCurrentUuid {
                    volume,
                    clear_bitmap: rest.contains(&"--clear-bitmap"),
                    force_resync: false,
                });
            }
            ["drbdadm", ref rest @ ..] if rest.contains(&"resize") => {
                // The configuration was changed before; the packets say to what.
                let wanted = ahead.iter().find_map(|item| match &item.what {
                    What::Packet(seen) if seen.from == self.me => match &seen.packet {
                        Packet::TwopcPrepRsz(resize) => Some(resize.user_size.0),
                        Packet::Sizes(sizes) => Some(sizes.u_size.0),
                        _ => None,
                    },
                    _ => None,
                });
                self.node.command(Command::Resize {
                    volume,
                    size_sectors: wanted.unwrap_or(0),
                    assume_clean: rest.contains(&"--assume-clean"),
                    assume_peer_has_space: false,
                });
            }
            ["drbdadm", "detach", ..] => {
                self.node.command(Command::Detach {
                    volume,
                    force: false,
                    diskless: false,
                });
            }
            ["drbdadm", "attach", ..] => self.node.attach(&self.setup.disk.clone()),
            ["drbdadm", "invalidate", ..] => {
                self.node.command(Command::Invalidate {
                    volume,
                    from: None,
                    reset_bitmap: !text.contains("--reset-bitmap=no"),
                });
            }
            ["drbdadm", "invalidate-remote", ..] => {
                for peer in self.peers.clone() {
                    self.node.command(Command::InvalidateRemote {
                        peer,
                        volume,
                        reset_bitmap: true,
                    });
                }
            }
            ["drbdsetup", "net-options", _, _, ref rest @ ..] => {
                for option in rest {
                    match option.split_once('=') {
                        Some(("--protocol", "A")) => self.net.protocol = Protocol::A,
                        Some(("--protocol", "C")) => self.net.protocol = Protocol::C,
                        Some(("--csums-alg", alg)) => self.net.csums_alg = Some(alg.into()),
                        Some(("--verify-alg", alg)) => self.net.verify_alg = Some(alg.into()),
                        _ => panic!("net-options {option}"),
                    }
                }
                for peer in self.peers.clone() {
                    let net = self.net.clone();
                    self.node.command(Command::NetOptions { peer, net });
                }
            }
            ["drbdsetup", "disk-options", _, "--c-plan-ahead=0", rate] => {
                let mib = rate
                    .strip_prefix("--resync-rate=")
                    .and_then(|rate| rate.strip_suffix('M')?.parse::<u32>().ok());
                self.peer_disk.resync_rate_kib_s = mib.expect("a number of MiB") * 1024;
                for peer in self.peers.clone() {
                    let options = self.peer_disk.clone();
                    self.node.command(Command::PeerDeviceOptions {
                        peer,
                        volume,
                        options,
                    });
                }
            }
            // What no quorum means changes at this.
            ["drbdadm", "adjust", ..] if self.is_cluster() => {
                let options = ResourceOptions {
                    on_no_quorum: OnLoss::IoError,
                    ..self.setup.options.clone()
                };
                self.node.command(Command::ResourceOptions { options });
            }
            // Between a disconnect and this the configuration changed, or not.
            ["drbdadm", "adjust", ..] => {
                for peer in self.peers.clone() {
                    let net = self.net.clone();
                    self.node.command(Command::NetOptions { peer, net });
                    self.node.connect(peer, false);
                }
            }
            [_, "cram-hmac-alg", "and", "shared-secret", "removed", ..] => {
                self.net.cram_hmac_alg = None;
                self.net.shared_secret = None;
            }
            // Blocks of the lower disk, behind the node's back.
            ["for", "o", "in", ref blocks @ ..] => {
                for block in blocks {
                    let block: u64 = block.parse().expect("the number of a block");
                    self.node.plant(block, 666);
                }
            }
            ["drbdsetup", "verify", _, start, stop] => {
                let sector = |word: &str, name| {
                    let text = word.strip_prefix(name)?.strip_suffix('s')?;
                    text.parse::<u64>().ok()
                };
                for peer in self.peers.clone() {
                    self.node.command(Command::Verify {
                        peer,
                        volume,
                        start: sector(start, "--start="),
                        stop: sector(stop, "--stop="),
                    });
                }
            }
            ["drbdadm", "verify", ..] => {
                for peer in self.peers.clone() {
                    self.node.command(Command::Verify {
                        peer,
                        volume,
                        start: None,
                        stop: None,
                    });
                }
            }
            // This asks drbdmeta, which refuses to touch a disk that is attached.
            ["drbdadm", "outdate", ..] => {}
            ["drbdadm", "pause-sync", ..] => {
                for peer in self.peers.clone() {
                    self.node.command(Command::PauseSync { peer, volume });
                }
            }
            ["drbdadm", "resume-sync", ..] => {
                for peer in self.peers.clone() {
                    self.node.command(Command::ResumeSync { peer, volume });
                }
            }
            ref words
                if self.node.links.is_empty()
                    && (words.contains(&"randw") || words.contains(&"seqw")) =>
            {
                self.write_alone(ahead);
            }
            // Reads, checksums and reports do nothing that is on the wire; writes come with the
            // packets that they caused.
            _ => {}
        }
    }

    /// A write without a connection waits, and goes out when there is one.
    fn write_suspended(&mut self, ahead: &[Item]) {
        if !self.node.links.is_empty() {
            return;
        }
        let next = ahead.iter().find_map(|item| match &item.what {
            What::Packet(seen) if seen.from == self.me => match &seen.packet {
                Packet::Data(data) => Some((seen, data.sector)),
                _ => None,
            },
            _ => None,
        });
        if let Some((seen, sector)) = next {
            self.node.write(sector, seen.payload.clone(), false);
            self.copies.begun(seen);
        }
    }

    /// Writes without a connection: where they went is in the bitmap that the node sends next,
    /// and what was written in the resync, if the node is its source.
    pub(crate) fn write_alone(&mut self, ahead: &[Item]) {
        let mut theirs = Vec::new();
        let mut mine = None;
        // A plain bitmap comes in parts, of which the last is empty.
        let mut plain: BTreeMap<NodeId, (u64, Vec<u64>)> = BTreeMap::new();
        for (index, item) in ahead.iter().enumerate() {
            let What::Packet(seen) = &item.what else {
                continue;
            };
            let whole = match &seen.packet {
                Packet::CompressedBitmap(code) => set_runs(code),
                Packet::Bitmap(part) if part.words.is_empty() => plain
                    .remove(&seen.from)
                    .map_or(Vec::new(), |(_, bits)| bits),
                Packet::Bitmap(part) => {
                    let (from, bits) = plain.entry(seen.from).or_default();
                    let set = |i: &u64| part.words[(i / 8) as usize] >> (i % 8) & 1 == 1;
                    let count = part.words.len() as u64 * 8;
                    bits.extend((0..count).filter(set).map(|i| *from + i));
                    *from += count;
                    continue;
                }
                _ => continue,
            };
            if seen.from == self.me {
                mine = Some((whole, &ahead[index..]));
                break;
            } else if seen.to == self.me {
                theirs = whole;
            }
        }
        let Some((mine, after)) = mine else { return };
        // A target's bitmap is both together.
        let bits = mine.into_iter().filter(|bit| !theirs.contains(bit));
        for bit in bits {
            let from = (bit * 4096) as usize;
            let mut bytes = self.node.data[from..from + 4096].to_vec();
            let shown = after.iter().find_map(|item| match &item.what {
                What::Packet(seen) if seen.from == self.me => match &seen.packet {
                    Packet::RsDataReply(data)
                        if data.sector.0 <= bit * 8
                            && bit * 8 < data.sector.end_of(data.payload_len).0 =>
                    {
                        let at = ((bit * 8 - data.sector.0) * 512) as usize;
                        Some(seen.payload[at..at + 4096].to_vec())
                    }
                    Packet::RsDeallocated(desc)
                        if desc.sector.0 <= bit * 8
                            && bit * 8 < desc.sector.end_of(desc.size_bytes).0 =>
                    {
                        Some(vec![0; 4096])
                    }
                    Packet::RsDeallocatedId(ack)
                        if ack.sector.0 <= bit * 8
                            && bit * 8 < ack.sector.end_of(ack.size_bytes).0 =>
                    {
                        Some(vec![0; 4096])
                    }
                    _ => None,
                },
                _ => None,
            });
            if let Some(shown) = shown {
                bytes = shown;
            }
            self.node.write(Sector(bit * 8), bytes, false);
        }
    }

    /// The peers that a command names: `r0:node3` one, `r0` all.
    pub(crate) fn meant(&self, words: &[&str]) -> Vec<NodeId> {
        let named = words.iter().find_map(|word| {
            let number = word.strip_prefix("r0:node")?.parse::<u8>().ok()?;
            Some(NodeId(number - 1))
        });
        match named {
            Some(peer) => vec![peer],
            None => self.peers.clone(),
        }
    }

    /// A peer loses its power, or its cable. The kernel notices when it does not answer a ping.
    pub(crate) fn lose(&mut self, peer: NodeId) {
        if self.node.links.contains_key(&peer) {
            self.lost = Some(peer);
            // When they are sent is free, so those of the end may be missing.
            self.peer_acks.remove(&peer);
            self.down(peer);
        }
    }

    /// Who has no power or no cable answers no ping; the kernels' logs say when they noticed.
    pub(crate) fn cut_off(&mut self, what: &What) {
        if let What::Command { node, text } = what
            && self.is_cluster()
            && is_cut_off(text)
        {
            let lost = self.peers.iter().filter(|p| *node == self.me || *p == node);
            self.node.cut_off.extend(lost);
        }
    }

    /// There are two peers: the order of their packets is open.
    pub(crate) fn is_cluster(&self) -> bool {
        self.peers.len() > 1
    }

    pub(crate) fn is_lost(&self, seen: &Seen) -> bool {
        if self.is_cluster() {
            return !self.node.links.contains_key(&seen.to);
        }
        self.lost == Some(seen.to) && !self.node.links.contains_key(&seen.to)
    }

    /// The applications of a Primary go on when it has taken its peer for lost.
    pub(crate) fn writes_while_lost(&mut self, ahead: &[Item]) {
        if self.lost.take().is_some() {
            self.write_alone(ahead);
        }
    }

    /// Whether a demotion stands behind writes in one line of the shell, which has one time: it
    /// comes when the packets show it.
    pub(crate) fn follows_writes(&self, items: &[Item], index: usize) -> bool {
        let What::Command { text, .. } = &items[index].what else {
            return false;
        };
        let before = index.checked_sub(1).map(|before| &items[before]);
        let writes = before.is_some_and(|before| match &before.what {
            What::Command { node, text } => {
                *node == self.me && text.contains("wl ") && before.time_ns == items[index].time_ns
            }
            _ => false,
        });
        writes && text.starts_with("drbdadm secondary") && !self.node.links.is_empty()
    }

    pub(crate) fn follows_disconnect(&self, items: &[Item], index: usize) -> bool {
        let own =
            |item: &&Item| matches!(&item.what, What::Command { node, .. } if *node == self.me);
        let text = |item: &Item| match &item.what {
            What::Command { text, .. } => text.clone(),
            _ => String::new(),
        };
        let before = items[..index].iter().rfind(own);
        text(&items[index]).starts_with("wl ")
            && before.is_some_and(|before| text(before).starts_with("drbdadm disconnect"))
            && !self.node.links.is_empty()
    }

    /// The applications write on while the kernel sends marks. It went Ahead because two writes
    /// were on their way.
    pub(crate) fn congest(&mut self, ahead: &[Item]) {
        let mut own = ahead.iter().filter_map(|item| match &item.what {
            What::Packet(seen) if seen.from == self.me => Some(&seen.packet),
            _ => None,
        });
        let goes_ahead = |packet: &&Packet| match packet {
            Packet::State(state) => state.repl == ReplState::Ahead,
            _ => false,
        };
        let marked = match own.next() {
            Some(Packet::Data(_)) => {
                let next = own.filter(|p| matches!(p, Packet::Data(_) | Packet::State(_)));
                self.congested |= next.take(2).any(|p| goes_ahead(&p));
                None
            }
            Some(state) if goes_ahead(&state) => {
                self.pulled_ahead = true;
                own.find_map(|packet| match packet {
                    Packet::OutOfSync(mark) => Some(*mark),
                    _ => None,
                })
            }
            Some(Packet::OutOfSync(mark)) => {
                self.congested = false;
                for peer in self.peers.clone() {
                    self.ack_epochs(peer);
                }
                let first = std::mem::take(&mut self.pulled_ahead);
                (!first).then_some(*mark)
            }
            _ => None,
        };
        if let Some(mark) = marked {
            let from = (mark.sector.0 * 512) as usize;
            let bytes = self.node.data[from..from + mark.size_bytes as usize].to_vec();
            self.node.write(mark.sector, bytes, false);
        }
    }
}
