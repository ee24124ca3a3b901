//! The operator: brings nodes up as a daemon would, promotes only legitimate heirs, and changes
//! things at random without ever making two generations of data.

use std::collections::{BTreeMap, BTreeSet};

use lockstep_core::command::{Command, MetaIndex};
use lockstep_core::options::{
    DiskOptions, NetOptions, PeerDeviceOptions, Protocol, ReadBalancing, ResourceOptions,
};
use lockstep_core::report::Snapshot;
use lockstep_core::state::{ConnState, DiskState, ReplState, Role};
use lockstep_format::units::{NodeId, Uuid, VolumeNr};

use crate::disk::{Lose, Where};
use crate::limits::Limits;
use crate::openers::Drivers;
use crate::rng::Rng;
use crate::sometimes;
use crate::takeover::Takeover;
use crate::turns::Turns;
use crate::world::{Config, MAX_VOLUMES, SECOND, Weather, World, name};

/// Options that differ between worlds.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Options of every connection.
    pub net: NetOptions,
    /// Options of every disk.
    pub disk: DiskOptions,
    /// Options of the resource.
    pub resource: ResourceOptions,
    /// Options towards every peer.
    pub peer: PeerDeviceOptions,
    /// Nodes connect before their disks are attached.
    pub connect_first: bool,
    /// Front ends that open and close volumes change roles.
    pub openers: bool,
    /// Applications go on writing while their node is demoted.
    pub hasty: bool,
    /// A handover is a live migration: both nodes are Primary in turn for a while.
    pub migrates: bool,
    /// The order of resyncs of every node.
    pub turns: Option<Turns>,
}

impl Settings {
    /// Defaults with a small activity log.
    pub fn new(protocol: Protocol, resync_max_kib_s: u32) -> Self {
        Settings {
            net: NetOptions {
                protocol,
                verify_alg: Some("crc32c".into()),
                ..NetOptions::default()
            },
            disk: DiskOptions {
                al_extents: 67,
                ..DiskOptions::default()
            },
            resource: ResourceOptions::default(),
            peer: PeerDeviceOptions {
                c_max_rate_kib_s: resync_max_kib_s,
                ..PeerDeviceOptions::default()
            },
            connect_first: false,
            openers: false,
            hasty: false,
            migrates: false,
            turns: None,
        }
    }
}

/// Where a node stands for the operator.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Stage {
    Down,
    Attaching(Vec<u64>),
    Up,
    GoingDown(u64),
}

/// The operator's knowledge.
#[derive(Debug)]
pub struct Operator {
    /// Options.
    pub settings: Settings,
    stages: Vec<Stage>,
    /// The node that is Primary.
    pub primary: Option<usize>,
    pub(crate) promoting: Option<(usize, u64)>,
    pub(crate) demoting: Option<(usize, u64)>,
    /// A promotion that has to be refused.
    trying: Option<(usize, u64)>,
    /// Of each volume the nodes that have all its data, a bit each. Who has all of every volume
    /// may become Primary; that may be nobody, if a Primary without some disk served the other
    /// volumes alone.
    pub(crate) heirs: Vec<u32>,
    holders: Vec<u32>,
    /// Nodes that lost power with data that were not flushed, until they are in sync again. Only
    /// who lives on knows that they may lack something: if all others restart before that, what
    /// was not flushed may be lost.
    lossy: u32,
    /// The mask that `holders` was made of last; 0 if it may be older.
    seen: [u32; MAX_VOLUMES],
    /// Primaries without power, as bits: what they did not flush may be lost if they come back first.
    pending_loss: u32,
    /// Who was promoted after that, what it had served then, and the bits from before.
    pub(crate) heir: Option<(usize, u64, u32)>,
    /// Peer pairs that the operator keeps apart.
    apart: BTreeSet<(usize, usize)>,
    paused: BTreeSet<(usize, usize, u16)>,
    detached: BTreeSet<(usize, u16)>,
    /// Sizes that volumes were to have last; 0 for as large as they can be.
    sizes: [u64; MAX_VOLUMES],
    /// All nodes were in sync once.
    pub ready: bool,
    /// No promotion from now on.
    pub calm: bool,
    pub(crate) takeover: Option<Takeover>,
    /// A Primary that takes none of the disks which came back, and since when.
    pub(crate) refusing: Option<(usize, u64)>,
    /// Primaries that stay frozen and apart from others, and since when.
    pub(crate) stuck: BTreeMap<usize, u64>,
    /// Since when a frozen Primary has been connected to everybody, and nobody has been where its applications are.
    pub(crate) outlived: BTreeMap<usize, u64>,
    /// A Primary that stood still when another node took over.
    pub(crate) frozen: Option<usize>,
    /// Promotions since a node had a follower.
    lonely_promotions: u32,
    pub(crate) drivers: Drivers,
    /// The other one of two Primaries that take turns.
    pub(crate) guest: Option<crate::migrate::Guest>,
}

pub(crate) fn peer_id(n: usize) -> NodeId {
    NodeId(n as u8)
}

impl Operator {
    /// Nobody is up.
    pub fn new(settings: Settings, config: &Config) -> Self {
        let (nodes, volumes) = (config.nodes, config.volumes);
        let storage = nodes - config.diskless;
        Operator {
            settings,
            stages: vec![Stage::Down; nodes],
            primary: None,
            promoting: None,
            demoting: None,
            trying: None,
            heirs: vec![(1 << storage) - 1; usize::from(volumes)],
            holders: vec![0; usize::from(volumes)],
            lossy: 0,
            seen: [0; MAX_VOLUMES],
            pending_loss: 0,
            heir: None,
            apart: BTreeSet::new(),
            sizes: [0; MAX_VOLUMES],
            paused: BTreeSet::new(),
            detached: BTreeSet::new(),
            ready: false,
            calm: false,
            takeover: None,
            refusing: None,
            stuck: BTreeMap::new(),
            outlived: BTreeMap::new(),
            frozen: None,
            lonely_promotions: 0,
            drivers: Drivers::default(),
            guest: None,
        }
    }

    /// A Primary that refuses a connection, because it would have to take over the peer's data
    /// under its users, waits for somebody who demotes it.
    fn demote_refused(&mut self, w: &mut World) {
        let Some(primary) = self.primary.filter(|p| self.is_up(*p)) else {
            return;
        };
        let refuses = |why: &str| {
            let log = w.nodes[primary].log.iter().rev();
            let mut recent = log.take_while(|line| line.at + 3 * SECOND > w.now);
            recent.any(|line| line.text.contains(why))
        };
        let (ends, retries) = (
            refuses("sync-target-primary-disconnect"),
            refuses("sync-target-primary-reconnect"),
        );
        let frozen = w.view(primary).is_some_and(|view| !view.quorate);
        if frozen && (ends || retries) || self.is_stuck(w, primary) {
            // The others have newer data together. A demotion that has begun waits for the frozen requests.
            self.demoting = None;
            self.demote_with(w, true);
        } else if ends {
            self.demote(w);
        } else if self.nobody_has_all(w, primary) && self.demote_with(w, true) {
            w.unflushed_may_be_lost();
        }
    }

    /// The node's process runs and its configuration is applied.
    pub fn is_up(&self, node: usize) -> bool {
        self.stages[node] == Stage::Up
    }

    /// The node is down.
    pub fn is_down(&self, node: usize) -> bool {
        self.stages[node] == Stage::Down
    }

    /// Starts a node and applies its configuration.
    pub fn start(&mut self, w: &mut World, node: usize) {
        if self.stages[node] != Stage::Down {
            return;
        }
        if self.pending_loss & 1 << node != 0 && w.has_disk(node) {
            self.pending_loss = 0;
            w.unflushed_may_be_lost();
        }
        w.limits = Limits::of(&self.settings, w.limits);
        w.start(node, self.settings.resource.clone());
        let nodes = w.nodes.len();
        let volumes = w.config.volumes;
        for volume in 0..volumes {
            w.command(
                node,
                Command::NewVolume {
                    volume: VolumeNr(volume),
                    minor: u32::from(volume),
                    diskless: !w.has_disk(node),
                },
            );
        }
        for peer in (0..nodes).filter(|p| *p != node) {
            self.new_peer(w, node, peer);
        }
        let attaches = match w.has_disk(node) {
            true => (0..volumes).map(|v| self.attach(w, node, v)).collect(),
            false => Vec::new(),
        };
        self.detached.retain(|(n, _)| *n != node);
        self.paused.retain(|(n, ..)| *n != node);
        self.stages[node] = Stage::Attaching(attaches);
        if self.settings.connect_first {
            self.connect_all(w, node);
        }
    }

    /// The node is told of a peer.
    pub(crate) fn new_peer(&self, w: &mut World, node: usize, peer: usize) {
        let mut net = self.settings.net.clone();
        net.peer_name = name(peer).to_string();
        let options = self.peer_options(w, peer);
        let peer = peer_id(peer);
        w.command(node, Command::NewPeer { peer, net });
        for volume in 0..w.config.volumes {
            w.command(
                node,
                Command::PeerDeviceOptions {
                    peer,
                    volume: VolumeNr(volume),
                    options: options.clone(),
                },
            );
        }
    }

    /// Options towards a peer: one that is meant to have no disk needs no bitmap.
    fn peer_options(&self, w: &World, peer: usize) -> PeerDeviceOptions {
        PeerDeviceOptions {
            bitmap: w.has_disk(peer),
            ..self.settings.peer.clone()
        }
    }

    fn attach(&self, w: &mut World, node: usize, volume: u16) -> u64 {
        let (meta_path, index) = match w.config.metadata {
            Where::External | Where::Persistent => {
                (Some(format!("meta{volume}")), MetaIndex::FlexExternal)
            }
            Where::Internal => (None, MetaIndex::Internal),
        };
        w.command(
            node,
            Command::Attach {
                volume: VolumeNr(volume),
                data_path: format!("data{volume}"),
                meta_path,
                index,
                options: self.settings.disk.clone(),
            },
        )
    }

    /// Connects what is StandAlone and not kept apart.
    pub fn connect_all(&mut self, w: &mut World, node: usize) {
        let Some(snapshot) = w.snapshot(node) else {
            return;
        };
        for connection in snapshot.connections {
            let peer = usize::from(connection.peer.0);
            let pair = (node.min(peer), node.max(peer));
            if connection.state == ConnState::StandAlone && !self.apart.contains(&pair) {
                w.command(
                    node,
                    Command::Connect {
                        peer: connection.peer,
                        discard_my_data: false,
                        tentative: false,
                    },
                );
            }
        }
    }

    /// Nodes that have all data and may become Primary.
    pub fn heirs(&self) -> Vec<usize> {
        members(self.heirs.iter().fold(u32::MAX, |all, of| all & of))
    }

    /// Nodes without disks that are up and see the data of an heir.
    pub fn clients(&self, w: &mut World) -> Vec<usize> {
        let clients = w.storage().end..w.nodes.len();
        clients
            .filter(|n| self.is_up(*n) && self.sees_heir_data(w, *n))
            .collect()
    }

    /// The node dies; the operator learns who may take over.
    pub fn crash(&mut self, w: &mut World, node: usize, lose: Lose) {
        let Some(view) = w.view(node).filter(|_| !self.is_promotions_source(w, node)) else {
            return;
        };
        let succeeded = self.frozen == Some(node);
        if succeeded {
            self.frozen = None;
        }
        let guest = self.is_early_guest(w, node, &view);
        if (view.role == Role::Primary && !succeeded && !guest) || self.primary == Some(node) {
            for volume in 0..self.heirs.len() {
                self.heirs[volume] = self.heirs_of(w, node, view.holders[volume], volume);
            }
            self.primary = None;
            self.pending_loss = self.left_unused(w, node);
            if lose == Lose::Unflushed && w.has_disk(node) {
                self.pending_loss |= 1 << node;
            }
            w.trace(node, || "== the Primary dies".into());
        } else if self.primary.is_none() && lose == Lose::Unflushed && !succeeded {
            self.pending_loss |= self.may_overwrite(w, node);
            let mut alone = false;
            for heirs in self.heirs.iter_mut().filter(|h| **h & 1 << node != 0) {
                if heirs.count_ones() > 1 {
                    *heirs &= !(1 << node);
                } else {
                    alone = true;
                }
            }
            if alone {
                w.unflushed_may_be_lost();
            }
        }
        if lose == Lose::Unflushed && w.has_disk(node) {
            self.lost_power(node);
        }
        if let Some(snapshot) = w.snapshot(node) {
            mark_crash(w, &snapshot, self.stages[node] != Stage::Up);
        }
        self.forget(node);
        w.crash(node, lose);
        let all_down = (0..w.nodes.len()).all(|n| !w.is_up(n));
        sometimes!(w.marks, all_down, "all-nodes-down");
        if self.primary.is_none() {
            let witness = w.storage().any(|n| w.is_up(n) && self.lossy & 1 << n == 0);
            // Nor does another one help that lives on, if the last copy was not compared with it.
            let sound = |heirs: &u32| *heirs & !self.lossy != 0;
            if self.lossy != 0 && (!witness || !self.heirs.iter().all(sound)) {
                w.unflushed_may_be_lost();
            }
            let heirs = self.heirs();
            w.trace(node, || format!("== heirs: {heirs:?}"));
        }
    }

    /// What the node's disk had not flushed may be gone. If nobody who has it stays, it is.
    pub(crate) fn lost_power(&mut self, node: usize) {
        self.lossy |= 1 << node;
    }

    /// The node is gone.
    pub(crate) fn forget(&mut self, node: usize) {
        self.stages[node] = Stage::Down;
        self.drivers.forget(node);
        if self.promoting.is_some_and(|(n, _)| n == node) {
            self.promoting = None;
        }
        if self.demoting.is_some_and(|(n, _)| n == node) {
            self.demoting = None;
        }
        if self.trying.is_some_and(|(n, _)| n == node) {
            self.trying = None;
        }
        self.guest = self.guest.filter(|guest| guest.node != node);
    }

    /// Nodes that have everything of a volume which this Primary acknowledged.
    fn heirs_of(&self, w: &World, node: usize, holders: u32, volume: usize) -> u32 {
        // A peer that fell and came back while this node did not notice may have lost something.
        let holders = members(holders)
            .into_iter()
            .filter(|peer| *peer == node || w.shares_link(node, *peer))
            .fold(0, |all, peer| all | 1 << peer);
        if w.config.protocol != Protocol::C && holders & 1 << node != 0 {
            return 1 << node;
        }
        match (holders, self.last_holders(w, node, volume)) {
            (0, 0) => 1 << node,
            (0, last) => last,
            (now, _) => now,
        }
    }

    /// Who had everything when anybody had: a disk that went just before is not known to the operator yet.
    fn last_holders(&self, w: &World, node: usize, volume: usize) -> u32 {
        match w.seen.last_holders(node, volume) {
            0 => self.holders[volume],
            last => last,
        }
    }

    /// Looks at answers and goes on.
    pub fn tick(&mut self, w: &mut World) {
        for node in 0..w.nodes.len() {
            match self.stages[node].clone() {
                Stage::Attaching(commands) => {
                    let answers: Vec<_> = commands
                        .iter()
                        .filter_map(|c| w.nodes[node].answers.get(c))
                        .collect();
                    let excused = w.nodes[node].disks.iter().any(|d| d.trouble.happened);
                    if let Some(Err(error)) = answers.iter().find(|a| a.is_err())
                        && !excused
                    {
                        let text = format!("{} cannot attach: {}", name(node), error.text);
                        w.fail(text);
                        return;
                    }
                    if answers.len() == commands.len() {
                        self.stages[node] = Stage::Up;
                        self.connect_all(w, node);
                    }
                }
                Stage::GoingDown(command) => {
                    if let Some(answer) = w.nodes[node].answers.get(&command) {
                        let answer = answer.clone();
                        w.trace(node, || format!("== down: {answer:?}"));
                        self.forget(node);
                        w.crash(node, Lose::InFlight);
                    }
                }
                Stage::Down | Stage::Up => {}
            }
        }
        if let Some((node, command)) = self.promoting
            && let Some(answer) = w.nodes[node].answers.get(&command)
        {
            let went_well = answer.is_ok();
            self.promoting = None;
            self.promotion_ended(node, went_well);
            if went_well {
                sometimes!(w.marks, self.ready, "heir-promoted");
                if let Some(frozen) = self.frozen.filter(|frozen| *frozen != node) {
                    w.give_up_writes(frozen);
                }
                self.took_role(node, w.nodes[node].served);
            }
        }
        if let Some((node, command)) = self.demoting
            && let Some(answer) = w.nodes[node].answers.get(&command).cloned()
            && self.demotion_is_over(w, node)
        {
            self.demoting = None;
            if answer.is_ok()
                && let Some(view) = w.view(node)
            {
                for volume in 0..self.heirs.len() {
                    self.heirs[volume] = match view.holders[volume] {
                        0 => self.last_holders(w, node, volume),
                        now => now,
                    };
                }
                self.primary = None;
                self.pending_loss = self.left_unused(w, node);
            }
        }
        if let Some((node, command)) = self.trying
            && let Some(answer) = w.nodes[node].answers.get(&command)
        {
            self.trying = None;
            if answer.is_ok() {
                let primary = self.primary.map_or('?', name);
                w.fail(format!("{} became Primary beside {primary}", name(node)));
            }
        }
        self.look_at_frozen(w);
        self.look_at_stranger(w);
        crate::turns::take(self, w);
        crate::migrate::follow(self, w);
        self.learn(w);
    }

    /// The node is Primary from now on, and has served so many requests before.
    pub(crate) fn took_role(&mut self, node: usize, served: u64) {
        self.primary = Some(node);
        let others = std::mem::take(&mut self.pending_loss) & !(1 << node);
        self.heir = (others != 0).then_some((node, served, others));
    }

    /// Keeps the sets of nodes with all data up to date.
    fn learn(&mut self, w: &mut World) {
        if let Some(primary) = self.primary {
            if let Some(view) = w.view(primary)
                && self.seen != view.holders
            {
                self.seen = view.holders;
                for (volume, holders) in self.holders.iter_mut().enumerate() {
                    // A peer that went shortly before the last disk is no heir.
                    match (view.holders[volume], w.seen.last_holders(primary, volume)) {
                        (0, 0) => {}
                        (0, last) => *holders = last,
                        (now, _) => *holders = now,
                    }
                }
            }
        } else {
            self.seen = [0; MAX_VOLUMES];
            if self.promoting.is_none() {
                for volume in 0..self.heirs.len() {
                    for heir in members(self.heirs[volume]) {
                        self.heirs[volume] |= mutual_holders(w, heir, volume);
                    }
                }
            }
        }
        if self.lossy != 0 {
            self.forget_loss(w);
        }
    }

    /// Who is in sync with a node that lost nothing lacks nothing.
    fn forget_loss(&mut self, w: &mut World) {
        let sources = self.primary.map_or_else(|| self.heirs(), |p| vec![p]);
        for source in sources {
            if self.lossy & 1 << source == 0 {
                let in_sync = (0..self.heirs.len()).fold(u32::MAX, |all, volume| {
                    all & mutual_holders(w, source, volume)
                });
                self.lossy &= !in_sync;
            }
        }
    }

    /// A promotion or demotion is under way.
    pub fn is_changing(&self) -> bool {
        let asked = [self.promoting, self.demoting, self.trying];
        asked.iter().any(Option::is_some) || self.is_inviting()
    }

    /// The Primary may get new requests.
    pub fn accepts_io(&self) -> Option<usize> {
        match self.demoting {
            Some((node, _)) => self.settings.hasty.then_some(node),
            None => self.primary,
        }
    }

    /// Makes one of the heirs Primary.
    pub fn promote(&mut self, w: &mut World, node: usize, force: bool) -> bool {
        if self.primary.is_some() || self.is_changing() || !self.is_up(node) {
            return false;
        }
        if !force && !self.heirs().contains(&node) && w.has_disk(node) {
            return false;
        }
        if !force && self.would_forget_ancestor(w, node) {
            return false;
        }
        let may_lack = w.bad_node == Some(node) || !w.has_disk(node);
        if !force && may_lack && !self.sees_heir_data(w, node) {
            return false;
        }
        let command = self.promotion(w, node, force);
        let command = w.command(node, command);
        self.promoting = Some((node, command));
        true
    }

    /// Tries to make a node Primary that hears of the Primary, itself or through a third node. Only
    /// where no link breaks by itself (`faults::CALM`).
    pub fn try_promote(&mut self, w: &mut World, node: usize) -> bool {
        let Some(primary) = self.primary.filter(|p| *p != node && self.is_up(*p)) else {
            return false;
        };
        let rests = w.nodes.iter().all(|n| n.commands.is_empty());
        let meets = |a: usize, b: usize| {
            let connected = |of: usize, to: usize| {
                let snapshot = w.snapshot(of);
                snapshot.is_some_and(|s| {
                    let mut to_peer = s.connections.iter().filter(|c| c.peer == peer_id(to));
                    to_peer.any(|c| c.state == ConnState::Connected)
                })
            };
            !self.apart.contains(&(a.min(b), a.max(b))) && connected(a, b) && connected(b, a)
        };
        let third = |n: &usize| *n != node && *n != primary;
        let hears = meets(node, primary)
            || (0..w.nodes.len())
                .filter(third)
                .any(|n| meets(node, n) && meets(n, primary));
        if self.is_changing() || !self.is_up(node) || !rests || !hears {
            return false;
        }
        let command = w.command(node, Command::Primary { force: false });
        self.trying = Some((node, command));
        true
    }

    /// With 8.4 each promotion without a follower makes a generation, and the peer is told of the
    /// last two ancestors only. One more, and a peer whose resync was cut off would take this data
    /// for unrelated: the operator lets the peer come back first.
    fn would_forget_ancestor(&mut self, w: &mut World, node: usize) -> bool {
        if self.settings.resource.protocol_max > 101 || w.config.weather != Weather::ByPlace {
            return false;
        }
        let is_followed =
            (0..self.heirs.len()).all(|volume| mutual_holders(w, node, volume).count_ones() > 1);
        if is_followed {
            self.lonely_promotions = 0;
        }
        let forgets = self.lonely_promotions >= ANCESTORS_84;
        self.lonely_promotions += u32::from(!forgets);
        forgets
    }

    /// Makes the Primary Secondary.
    pub fn demote(&mut self, w: &mut World) -> bool {
        self.demote_with(w, false)
    }

    fn demote_with(&mut self, w: &mut World, force: bool) -> bool {
        let Some(node) = self.primary else {
            return false;
        };
        if self.is_changing() || !self.is_up(node) {
            return false;
        }
        let command = self.give_demotion(w, node, force);
        self.demoting = Some((node, command));
        true
    }

    /// Takes a Secondary down properly.
    pub fn down(&mut self, w: &mut World, node: usize) -> bool {
        if self.primary == Some(node)
            || self.is_changing()
            || !self.is_up(node)
            || self.primary.is_none()
        {
            return false;
        }
        let command = w.command(node, Command::Down);
        self.stages[node] = Stage::GoingDown(command);
        true
    }

    /// Disconnects two nodes until `reconnect`.
    pub fn disconnect(&mut self, w: &mut World, node: usize, peer: usize, force: bool) -> bool {
        if !self.is_up(node) || self.is_changing() {
            return false;
        }
        let peer_node = peer_id(peer);
        self.apart.insert((node.min(peer), node.max(peer)));
        w.command(
            node,
            Command::Disconnect {
                peer: peer_node,
                force,
            },
        );
        true
    }

    /// Ends a separation.
    pub fn reconnect(&mut self, w: &mut World) -> bool {
        let Some(pair) = self.apart.pop_first() else {
            return false;
        };
        for node in [pair.0, pair.1] {
            if self.is_up(node) {
                self.connect_all(w, node);
            }
        }
        true
    }

    /// The first node takes the disk of the second for UpToDate.
    fn holds(&self, w: &mut World, node: usize, whose: usize, volume: u16) -> bool {
        let view = w.view(node);
        view.is_some_and(|v| v.holders[usize::from(volume)] & 1 << whose != 0)
    }

    /// Takes a disk away; the node goes on without.
    pub fn detach(&mut self, w: &mut World, node: usize, volume: u16, force: bool) -> bool {
        let may = self.is_up(node) && w.has_disk(node);
        if !may || self.is_changing() || self.primary.is_none() {
            return false;
        }
        // With protocols A and B the Primary's own disk may be the only one with all data. Where it has
        // none, the last of its peers may not have written yet what it has acknowledged.
        let only = w.config.protocol != Protocol::C
            && self
                .primary
                .is_some_and(|primary| primary == node || !self.holds(w, primary, primary, volume));
        let force = force && !(only && w.config.weather == Weather::ByPlace);
        // Who had everything until now must be known: without its disk the node cannot tell.
        self.learn(w);
        self.detached.insert((node, volume));
        w.nodes[node].disks[usize::from(volume)].is_forced |= force;
        w.command(
            node,
            Command::Detach {
                volume: VolumeNr(volume),
                force,
                diskless: false,
            },
        );
        true
    }

    /// Gives disks back.
    pub fn reattach(&mut self, w: &mut World) -> bool {
        let mut done = false;
        for (node, volume) in self.detached.clone() {
            if !self.is_up(node) {
                continue;
            }
            let diskless = w.snapshot(node).is_some_and(|s| {
                s.devices
                    .iter()
                    .any(|d| d.volume.0 == volume && d.disk_state == DiskState::Diskless)
            });
            if diskless && !w.nodes[node].disks[usize::from(volume)].open {
                self.attach(w, node, volume);
                self.detached.remove(&(node, volume));
                done = true;
            }
        }
        done
    }

    /// Attaches what has no disk, as an operator does who looks at `status`.
    fn attach_diskless(&mut self, w: &mut World, node: usize) {
        let Some(snapshot) = w.snapshot(node).filter(|_| w.has_disk(node)) else {
            return;
        };
        for device in snapshot.devices {
            let volume = device.volume.0;
            if device.disk_state == DiskState::Diskless
                && !w.nodes[node].disks[usize::from(volume)].open
            {
                self.attach(w, node, volume);
            }
        }
    }

    /// Changes options of a connection and of a resync.
    pub fn change_options(
        &mut self,
        w: &mut World,
        rng: &mut Rng,
        node: usize,
        peer: usize,
        volume: u16,
    ) {
        let mut net = self.settings.net.clone();
        net.peer_name = name(peer).to_string();
        net.max_epoch_size = rng.pick(&[1, 20, 2048]);
        w.limits.epoch = w.limits.epoch.max(net.max_epoch_size);
        net.ping_int_s = rng.pick(&[1, 3, 10]);
        let mut options = self.peer_options(w, peer);
        options.c_max_rate_kib_s = rng.pick(&[2048, 10_240, 102_400]);
        let peer = peer_id(peer);
        w.command(node, Command::NetOptions { peer, net });
        w.command(
            node,
            Command::PeerDeviceOptions {
                peer,
                volume: VolumeNr(volume),
                options,
            },
        );
    }

    /// Takes away a disk that reported errors and is not whole since then, without a resync that
    /// would mend it; it is attached again later, as an operator does after a repair.
    fn replace_bad_disks(&mut self, w: &mut World, node: usize) {
        let Some(snapshot) = w.snapshot(node) else {
            return;
        };
        for device in &snapshot.devices {
            let volume = usize::from(device.volume.0);
            let mut peers = snapshot
                .connections
                .iter()
                .flat_map(|c| &c.peer_devices)
                .filter(|p| p.volume == device.volume);
            let idle =
                peers.all(|p| matches!(p.repl_state, ReplState::Off | ReplState::Established));
            if w.nodes[node].disks[volume].had_errors
                && device.disk_state == DiskState::Inconsistent
                && idle
                && w.nodes[node].commands.is_empty()
            {
                w.command(
                    node,
                    Command::Detach {
                        volume: device.volume,
                        force: false,
                        diskless: false,
                    },
                );
            }
        }
    }

    /// Throws a Secondary's data away while the Primary has all.
    pub fn invalidate(&mut self, w: &mut World, node: usize, volume: u16, reset: bool) -> bool {
        let Some(primary) = self.may_invalidate(w, node) else {
            return false;
        };
        w.expect_rot(node, volume, reset);
        w.command(
            node,
            Command::Invalidate {
                volume: VolumeNr(volume),
                from: Some(peer_id(primary)),
                reset_bitmap: reset,
            },
        );
        true
    }

    /// The Primary, if it has all data and this other node has some to throw away.
    pub(crate) fn may_invalidate(&self, w: &World, node: usize) -> Option<usize> {
        let primary = self.primary.filter(|primary| *primary != node)?;
        let up = self.is_up(node) && self.is_up(primary) && w.has_disk(node);
        let is_good = |s: &Snapshot| {
            let mut disks = s.devices.iter();
            disks.all(|d| d.disk_state == DiskState::UpToDate)
        };
        let good = up && !self.is_changing() && w.snapshot(primary).is_some_and(|s| is_good(&s));
        good.then_some(primary)
    }

    /// Starts an online verify.
    pub fn verify(
        &mut self,
        w: &mut World,
        node: usize,
        peer: usize,
        volume: u16,
        blocks: Option<(u64, u64)>,
    ) {
        if self.is_up(node) {
            w.command(
                node,
                Command::Verify {
                    peer: peer_id(peer),
                    volume: VolumeNr(volume),
                    start: blocks.map(|(first, _)| first * 8),
                    stop: blocks.map(|(_, end)| end * 8),
                },
            );
        }
    }

    /// Makes a volume larger, after all its disks, or smaller again, but never smaller than it was
    /// at first.
    pub fn resize(&mut self, w: &mut World, rng: &mut Rng, node: usize, volume: u16) {
        if !self.is_up(node) {
            return;
        }
        let v = usize::from(volume);
        let (first, now) = (w.config.blocks, w.nodes[0].disks[v].content.len() as u64);
        let mut size_sectors = 0;
        if rng.permille(700) && now < first + GROWN_MOST_BLOCKS {
            let blocks = rng.pick(&[1, 8, 300, 1024]);
            for n in w.storage() {
                w.nodes[n].disks[v].grow(n, blocks);
            }
            w.trace(node, || {
                format!("== the disks of volume {volume} grow by {blocks} blocks")
            });
        } else if rng.permille(700) {
            size_sectors = rng.range(first, now + 1) * 8;
        }
        self.sizes[v] = size_sectors;
        resize_to(w, node, volume, size_sectors);
    }

    /// As large as all disks are.
    pub(crate) fn resize_at_most(&mut self, w: &mut World, node: usize, volume: u16) {
        self.sizes[usize::from(volume)] = 0;
        resize_to(w, node, volume, 0);
    }

    /// A volume that became smaller on some nodes only: no node lets a connection shrink what it
    /// uses, so whoever was away when the others were told is told now.
    fn shrink_the_rest(&self, w: &mut World, node: usize) {
        let Some(snapshot) = w.snapshot(node) else {
            return;
        };
        let alone = snapshot
            .connections
            .iter()
            .any(|c| c.state == ConnState::StandAlone);
        for device in snapshot.devices.iter().filter(|_| alone) {
            // What was asked for last may have been refused for want of the other node.
            let smallest = smallest(w, device.volume);
            let wanted = match self.sizes[usize::from(device.volume.0)] {
                0 => smallest,
                wanted => wanted.min(smallest),
            };
            if wanted != 0 && device.size_sectors > wanted {
                resize_to(w, node, device.volume.0, wanted);
            }
        }
    }

    /// Changes `read-balancing` until the next attach.
    pub fn balance(&mut self, w: &mut World, node: usize, volume: u16, policy: ReadBalancing) {
        if self.is_up(node) {
            let options = DiskOptions {
                read_balancing: policy,
                ..self.settings.disk.clone()
            };
            let volume = VolumeNr(volume);
            w.command(node, Command::DiskOptions { volume, options });
        }
    }

    /// Pauses or resumes a resync.
    pub fn toggle_pause(&mut self, w: &mut World, node: usize, peer: usize, volume: u16) -> bool {
        if !self.is_up(node) {
            return false;
        }
        let key = (node, peer, volume);
        let (peer, volume) = (peer_id(peer), VolumeNr(volume));
        let command = if self.paused.remove(&key) {
            Command::ResumeSync { peer, volume }
        } else {
            self.paused.insert(key);
            Command::PauseSync { peer, volume }
        };
        w.command(node, command);
        true
    }

    /// Undoes everything that keeps the nodes from converging. Call it again and again.
    pub fn heal(&mut self, w: &mut World) {
        while self.reconnect(w) {}
        self.same_secret(w);
        for node in 0..w.nodes.len() {
            self.start(w, node);
        }
        for (node, peer, volume) in std::mem::take(&mut self.paused) {
            // Also of a node that goes down: its peer may not let it before the resync is over.
            if w.is_up(node) {
                w.command(
                    node,
                    Command::ResumeSync {
                        peer: peer_id(peer),
                        volume: VolumeNr(volume),
                    },
                );
            }
        }
        self.all_in_order(w);
        self.detached.clear();
        self.demote_frozen(w);
        self.demote_left_behind(w);
        self.demote_refused(w);
        for node in 0..w.nodes.len() {
            if self.is_up(node) {
                self.replace_bad_disks(w, node);
                self.attach_diskless(w, node);
                self.shrink_the_rest(w, node);
                self.connect_all(w, node);
            }
        }
    }
}

/// Both are up, and this volume is of one generation on both.
fn same_generation(w: &World, a: usize, b: usize, volume: usize) -> bool {
    let of = |node: usize| generations(w, node)?.get(&(volume as u16)).copied();
    let of_a = of(a);
    of_a.is_some() && of_a == of(b)
}

/// The generation of each volume of a node that is up.
pub(crate) fn generations(w: &World, node: usize) -> Option<BTreeMap<u16, Uuid>> {
    let snapshot = w.nodes[node].resource.as_ref()?.snapshot();
    let devices = snapshot.devices.iter();
    Some(
        devices
            .map(|d| (d.volume.0, d.current_uuid.without_primary_bit()))
            .collect(),
    )
}

/// The smallest size of a volume on the nodes that know one; 0 if none does.
fn smallest(w: &World, volume: VolumeNr) -> u64 {
    let snapshots = (0..w.nodes.len()).filter_map(|node| w.snapshot(node));
    let devices = snapshots.flat_map(|s| s.devices);
    let sizes = devices
        .filter(|d| d.volume == volume)
        .map(|d| d.size_sectors);
    sizes.filter(|size| *size != 0).min().unwrap_or(0)
}

fn resize_to(w: &mut World, node: usize, volume: u16, size_sectors: u64) {
    w.command(
        node,
        Command::Resize {
            volume: VolumeNr(volume),
            size_sectors,
            assume_clean: false,
            assume_peer_has_space: false,
        },
    );
}

/// Ancestors that nodes of 8.4 tell each other.
const ANCESTORS_84: u32 = 2;

/// Blocks by which a volume's disks grow at most.
pub(crate) const GROWN_MOST_BLOCKS: u64 = 4096;

fn mark_crash(w: &mut World, snapshot: &Snapshot, is_starting: bool) {
    sometimes!(w.marks, is_starting, "crash-while-attaching");
    sometimes!(w.marks, snapshot.role == Role::Primary, "crash-of-primary");
    let is = |state: ReplState| {
        let mut all = snapshot.connections.iter().flat_map(|c| &c.peer_devices);
        all.any(|p| p.repl_state == state)
    };
    sometimes!(w.marks, is(ReplState::SyncTarget), "crash-of-sync-target");
    sometimes!(w.marks, is(ReplState::SyncSource), "crash-of-sync-source");
}

/// The members of a mask of nodes.
pub(crate) fn members(mask: u32) -> Vec<usize> {
    (0..32).filter(|n| mask & 1 << n != 0).collect()
}

/// Nodes, a bit each, that a node which holds a volume's data takes for holders of them and that
/// think so of it; none if it does not hold them itself. Who is of another generation may have lost the
/// connection, and not know that yet: of what follows it has nothing.
pub(crate) fn mutual_holders(w: &mut World, node: usize, volume: usize) -> u32 {
    let mine = w.view(node).map_or(0, |v| v.holders[volume]);
    if mine & 1 << node == 0 {
        return 0;
    }
    members(mine)
        .into_iter()
        .filter(|peer| {
            let theirs = w.view(*peer).map_or(0, |v| v.holders[volume]);
            *peer == node || theirs & 1 << node != 0 && same_generation(w, node, *peer, volume)
        })
        .fold(0, |all, peer| all | 1 << peer)
}

/// For each volume the nodes that have all its data according to this one, a bit each: itself if
/// UpToDate, and the UpToDate peers to which it replicates.
pub fn holders(node: usize, snapshot: &Snapshot) -> [u32; MAX_VOLUMES] {
    let mut found = [0; MAX_VOLUMES];
    for device in &snapshot.devices {
        if device.disk_state == DiskState::UpToDate {
            found[usize::from(device.volume.0)] |= 1 << node;
        }
    }
    for connection in &snapshot.connections {
        if connection.state != ConnState::Connected {
            continue;
        }
        for p in &connection.peer_devices {
            let follows = p.disk_state == DiskState::UpToDate
                && matches!(
                    p.repl_state,
                    ReplState::Established
                        | ReplState::SyncTarget
                        | ReplState::PausedSyncT
                        | ReplState::VerifyS
                        | ReplState::VerifyT
                );
            if follows {
                found[usize::from(p.volume.0)] |= 1 << connection.peer.0;
            }
        }
    }
    found
}
