//! What happens in a planned world, written down before it starts: its shape, its faults and its
//! requests. Each item has a number and chance of its own, so that one can be left out without
//! changing the others; that is what makes a failure small enough to read.

use std::fmt;

use lockstep_core::event::RequestKind;
use lockstep_core::options::{
    AfterSplitBrain, OnIoError, OnLoss, OnSuspendedPrimaryOutdated, Protocol, Quorum,
};

use crate::disk::Where;
use crate::extras::{self, Extra};
use crate::faults::{self, Fault};
use crate::operator::Settings;
use crate::pair::{self, Shares};
use crate::rng::{Rng, mixed};
use crate::themes::{self, Theme};
use crate::world::{self, Config, MS, SECOND, Weather};

/// How large worlds are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Size {
    /// As the seed says.
    #[default]
    Any,
    /// The measure of speed: 2 nodes, 1 volume of 32 MiB, 2,000 requests, 20 faults.
    Small,
}

/// A set of numbers, written as `0-4,7`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Numbers(Vec<(u32, u32)>);

impl Numbers {
    /// Of sorted numbers.
    pub fn of(sorted: &[u32]) -> Self {
        let mut ranges: Vec<(u32, u32)> = Vec::new();
        for number in sorted {
            match ranges.last_mut() {
                Some((_, last)) if *last + 1 == *number => *last = *number,
                _ => ranges.push((*number, *number)),
            }
        }
        Numbers(ranges)
    }

    /// From the command line; `none` is the empty set.
    pub fn parse(text: &str) -> Result<Self, String> {
        if text == "none" {
            return Ok(Numbers::default());
        }
        let number = |word: &str| {
            word.parse::<u32>()
                .map_err(|_| format!("{word:?} is no number; a list looks like 0-4,7"))
        };
        text.split(',')
            .map(|part| match part.split_once('-') {
                Some((from, to)) => Ok((number(from)?, number(to)?)),
                None => number(part).map(|n| (n, n)),
            })
            .collect::<Result<_, _>>()
            .map(Numbers)
    }

    /// It is in the set.
    pub fn has(&self, number: u32) -> bool {
        self.0
            .iter()
            .any(|(from, to)| (*from..=*to).contains(&number))
    }
}

impl fmt::Display for Numbers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return f.write_str("none");
        }
        for (i, (from, to)) in self.0.iter().enumerate() {
            let comma = if i > 0 { "," } else { "" };
            if from == to {
                write!(f, "{comma}{from}")?;
            } else {
                write!(f, "{comma}{from}-{to}")?;
            }
        }
        Ok(())
    }
}

/// What the command line fixes of a planned world; the rest follows from the seed.
#[derive(Clone, Debug, Default)]
pub struct Orders {
    /// How large.
    pub size: Size,
    /// Number of nodes.
    pub nodes: Option<usize>,
    /// Number of volumes.
    pub volumes: Option<u16>,
    /// Kinds of faults to draw from; none are those that are on by default.
    pub kinds: Option<Vec<Fault>>,
    /// Options that worlds have only by name.
    pub extras: Vec<Extra>,
    /// Only the faults with these numbers.
    pub only_faults: Option<Numbers>,
    /// Only the requests with these numbers.
    pub only_requests: Option<Numbers>,
}

impl Orders {
    /// The command that runs the world of a seed under these orders.
    pub fn command(&self, seed: u64) -> String {
        let mut text = format!("cargo run --release -p lockstep-sim -- swarm --seed {seed}");
        if self.size == Size::Small {
            text += " --small";
        }
        if let Some(nodes) = self.nodes {
            text += &format!(" --nodes {nodes}");
        }
        if let Some(volumes) = self.volumes {
            text += &format!(" --volumes {volumes}");
        }
        if let Some(kinds) = &self.kinds {
            let words: Vec<_> = kinds.iter().map(|k| faults::word(*k)).collect();
            text += &format!(" --faults {}", words.join(","));
        }
        if !self.extras.is_empty() {
            let words: Vec<_> = self.extras.iter().map(|e| extras::word(*e)).collect();
            text += &format!(" --with {}", words.join(","));
        }
        if let Some(only) = &self.only_faults {
            text += &format!(" --only-faults {only}");
        }
        if let Some(only) = &self.only_requests {
            text += &format!(" --only-requests {only}");
        }
        text
    }
}

/// A fault of the plan.
#[derive(Clone, Debug)]
pub struct PlannedFault {
    /// Its number.
    pub number: u32,
    /// When, from the start of the trouble, in nanoseconds.
    pub at: u64,
    /// What.
    pub fault: Fault,
    /// For where and how bad.
    pub seed: u64,
    /// It ends so much later.
    pub lasts: u64,
}

/// A request of the plan.
#[derive(Clone, Debug)]
pub struct PlannedRequest {
    /// Its number.
    pub number: u32,
    /// When, from the start of the trouble, in nanoseconds; later if the Primary is not there.
    pub at: u64,
    /// What.
    pub kind: RequestKind,
    /// Volume.
    pub volume: u16,
    /// First block.
    pub block: u64,
    /// Blocks.
    pub count: u64,
}

/// Everything that is fixed before a world starts.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The seed.
    pub seed: u64,
    /// What the world is made of.
    pub config: Config,
    /// What the operator configures.
    pub settings: Settings,
    /// Faults by time.
    pub faults: Vec<PlannedFault>,
    /// Requests by time.
    pub requests: Vec<PlannedRequest>,
    /// Requests in flight at most.
    pub depth: usize,
    /// The replicas get in sync by copying everything first.
    pub full_sync: bool,
    /// The marks are compared with the raw images all the time, not only at faults.
    pub watches: bool,
    /// Typical time until the operator promotes an heir.
    pub takeover: u64,
    /// Disks hang for long, and no write may wait for a peer's longer than this, in nanoseconds.
    pub answers_within: Option<u64>,
    /// What is special about it.
    pub theme: Theme,
    /// Both nodes are Primary.
    pub shares: Option<Shares>,
    /// A bit for each node whose disks keep what is discarded.
    pub keeps_discarded: u64,
    /// Verifies are among what may happen.
    verifies: bool,
    /// It measures the speed.
    small: bool,
    /// A stream of data that stands still does so for long.
    pub numb: bool,
}

/// What the parts of a plan draw from: one stream for each, by name.
#[derive(Clone, Copy)]
enum Part {
    Nodes = 1,
    Shape,
    Kinds,
    Pace,
    Load,
    Fault,
    Request,
    Roles,
    Edges,
    Shares,
    Bursts,
}

impl Plan {
    /// The plan of a seed.
    pub fn new(seed: u64, orders: &Orders) -> Plan {
        let part = |part: Part, number: u64| Rng::new(mixed(&[seed, part as u64, number]));
        let small = orders.size == Size::Small;
        let (mut config, mut settings) =
            shape(seed, orders, part(Part::Nodes, 0), part(Part::Shape, 0));
        roles(orders, &mut config, &mut settings, part(Part::Roles, 0));
        for extra in &orders.extras {
            extras::apply(*extra, seed, &mut config, &mut settings);
        }
        if orders.extras.contains(&Extra::ThirdDisk) {
            config.nodes = orders.nodes.unwrap_or(3).max(3);
        }
        let plain = orders.extras.iter().all(|extra| *extra == Extra::Quiet);
        let theme = match orders.kinds.is_none() && plain && !small {
            true => themes::choose(seed, &mut config, &mut settings),
            false => Theme::default(),
        };
        let mut pace = part(Part::Pace, 0);
        let count = if small { 20 } else { pace.range(0, 25) };
        let pause = match small {
            true => 100 * MS,
            false => pace.pick(&[20 * MS, 100 * MS, 500 * MS, 2 * SECOND]),
        };
        let mut kinds = kinds(orders, part(Part::Kinds, 0));
        kinds.extend(&theme.kinds);
        kinds.retain(|kind| !theme.without.contains(kind));
        if kinds.iter().any(|kind| faults::ERRORS.contains(kind)) {
            // Protocols A and B promise nothing once the Primary's own disk, and then its link, fail.
            config.protocol = Protocol::C;
            settings.net.protocol = Protocol::C;
        }
        if kinds.contains(&Fault::BadBlock) {
            settings.disk.on_io_error = OnIoError::PassOn;
        }
        if kinds.contains(&Fault::Protocol) {
            // The least that any of them promises.
            settings.net.protocol = config.protocol;
            config.protocol = Protocol::A;
        }
        let old = orders.extras.contains(&Extra::Old);
        let mut theme = theme;
        if old {
            // As with the theme of 8.4's dialect.
            kinds.retain(|kind| *kind != Fault::NewUuid);
            let chosen = mixed(&[seed, 0x6f6c64]);
            theme.old_metadata = (0..2).filter(|node| chosen >> node & 1 == 1).collect();
        }
        if !kinds.iter().all(|kind| faults::CALM.contains(kind)) {
            kinds.retain(|kind| *kind != Fault::Promote);
        }
        let shares = orders.extras.contains(&Extra::TwoPrimaries).then(|| {
            kinds.retain(|kind| pair::KINDS.contains(kind));
            let mut rng = part(Part::Shares, 0);
            // The first writes to the same place end a connection of DRBD 9.
            let common = match settings.resource.protocol_max {
                // Who is right then, nobody can tell a third disk.
                _ if orders.extras.contains(&Extra::ThirdDisk) => [0; 4],
                101 => [0, 100, 500, 1000],
                _ => [0, 0, 5, 30],
            };
            Shares {
                common_permille: rng.pick(&common),
            }
        });
        let mut faults: Vec<PlannedFault> = Vec::new();
        let mut at = 0;
        for number in 0..count as u32 {
            let mut rng = part(Part::Fault, u64::from(number));
            // Some follow the one before at once.
            let close = rng.permille(250);
            at += rng.delay(if close { 2 * MS } else { pause });
            let Some(fault) = (!kinds.is_empty()).then(|| rng.pick(&kinds)) else {
                break;
            };
            faults.push(PlannedFault {
                number,
                at,
                fault,
                seed: rng.bits(),
                lasts: rng.delay(pause.max(200 * MS) * 2),
            });
        }
        let mut requests = requests(
            &config,
            small,
            pause * (count + 1),
            part(Part::Load, 0),
            theme.edges.then(|| part(Part::Edges, 0)),
            |n| part(Part::Request, n),
        );
        if orders.extras.contains(&Extra::Hot) {
            gather(&mut requests, &config);
        }
        if orders.extras.contains(&Extra::Bursts) {
            let pause = part(Part::Bursts, 0).pick(&[50 * MS, 300 * MS, SECOND]);
            for request in &mut requests {
                request.at = request.at / pause * pause;
            }
        }
        if orders.extras.contains(&Extra::KeptDiscards) {
            empty_more(&mut requests, seed);
        }
        if old {
            // Nothing in these dialects empties blocks.
            for request in &mut requests {
                if matches!(
                    request.kind,
                    RequestKind::Discard | RequestKind::Zeroes { .. }
                ) {
                    request.kind = RequestKind::Write { fua: true };
                }
            }
        }
        if orders.extras.contains(&Extra::Quiet) {
            faults.clear();
            requests.clear();
        }
        let keep = |only: &Option<Numbers>, number| only.as_ref().is_none_or(|o| o.has(number));
        let large = config.blocks > SMALL_BLOCKS;
        let answers_within = orders.extras.contains(&Extra::Impatient).then(|| {
            let net = &settings.net;
            // Those before it may have waited as long, and somebody may connect meanwhile.
            u64::from(net.timeout_tenths) * 100 * MS * u64::from(net.ko_count) * 3 + 4 * SECOND
        });
        let skips = settings.resource.protocol_max >= SKIPS_FIRST_SYNC;
        let redundant = settings.resource.quorum_minimum_redundancy != Quorum::Off;
        Plan {
            seed,
            config,
            settings,
            faults: faults
                .into_iter()
                .filter(|f| keep(&orders.only_faults, f.number))
                .collect(),
            requests: requests
                .into_iter()
                .filter(|r| keep(&orders.only_requests, r.number))
                .collect(),
            depth: if small {
                16
            } else {
                pace.range(1, 20) as usize
            },
            // A first copy alone is never enough for a minimum redundancy.
            full_sync: (!small && !large && pace.permille(400) && !redundant) || !skips,
            watches: !small && (seed.is_multiple_of(8) || theme.short_log),
            takeover: pace.pick(&[5 * MS, 50 * MS, 500 * MS]),
            answers_within,
            theme,
            shares,
            keeps_discarded: match orders.extras.contains(&Extra::KeptDiscards) {
                true => mixed(&[seed, 0x6b65_7074]),
                false => 0,
            },
            verifies: [Fault::Verify, Fault::VerifyPart, Fault::VerifySpot]
                .iter()
                .any(|kind| kinds.contains(kind)),
            small,
            numb: orders.extras.contains(&Extra::Numb),
        }
    }

    /// Once all is well a verify has to find what a disk has silently changed.
    pub fn verifies(&self) -> bool {
        // Whatever is marked, nodes of 8.4 with equal generations copy nothing.
        let modern = self.settings.resource.protocol_max > 101;
        self.verifies && modern && self.config.nodes == 2 && self.shares.is_none()
    }

    /// Once all is well it has to stay so.
    pub fn goes_on(&self) -> bool {
        self.shares.is_none() && !self.small
    }

    /// In words: what kind of world it is.
    pub fn describe(&self) -> String {
        let c = &self.config;
        let mut words: Vec<&str> = self.faults.iter().map(|f| faults::word(f.fault)).collect();
        words.sort_unstable();
        words.dedup();
        let diskless = match c.diskless {
            0 => String::new(),
            count => format!(" ({count} without disks)"),
        };
        let quorum = match self.settings.resource.quorum {
            Quorum::Off => String::new(),
            quorum => format!(
                " quorum {quorum:?}, {:?},",
                self.settings.resource.on_no_quorum
            ),
        };
        let theme = match (self.theme.words, self.theme.edges) {
            ("", false) => String::new(),
            (words, false) => format!(" {words},"),
            ("", true) => " requests at edges,".into(),
            (words, true) => format!(" {words}, requests at edges,"),
        };
        let theme = match self.theme.short_log {
            true => format!("{theme} short activity log,"),
            false => theme,
        };
        let theme = match self.theme.reads_back {
            true => format!("{theme} reads back,"),
            false => theme,
        };
        let slow = c.slow.map_or_else(String::new, |s| {
            format!(
                " slow from {} to {},",
                world::name(s.from),
                world::name(s.to)
            )
        });
        let shares = self.shares.map_or_else(String::new, |s| {
            let dialect = self.settings.resource.protocol_max;
            format!(
                " two Primaries (protocol to {dialect}, {} of 1000 requests in common),",
                s.common_permille
            )
        });
        format!(
            "{} nodes{diskless},{shares}{quorum}{theme}{slow} protocol {:?}, {} volumes of {} MiB, metadata {:?}, {} requests, {} faults ({})",
            c.nodes,
            c.protocol,
            c.volumes,
            c.blocks / 256,
            c.metadata,
            self.requests.len(),
            self.faults.len(),
            words.join(" ")
        )
    }
}

/// First version in which the first sync can be skipped.
const SKIPS_FIRST_SYNC: u32 = 90;
/// Blocks of a small volume.
pub(crate) const SMALL_BLOCKS: u64 = 8192;
pub(crate) const LARGE_BLOCKS: u64 = 131_072;

fn shape(seed: u64, orders: &Orders, mut topology: Rng, mut rng: Rng) -> (Config, Settings) {
    let small = orders.size == Size::Small;
    let nodes = match topology.below(20) {
        0..=11 => 2,
        12..=17 => 3,
        18 => 4,
        _ => 5,
    };
    let volumes = match topology.below(10) {
        0..=7 => 1,
        8 => 2,
        _ => 3,
    };
    let protocol = match rng.below(8) {
        0 => Protocol::A,
        1 => Protocol::B,
        _ => Protocol::C,
    };
    let large = rng.permille(250);
    let times = [MS / 20, MS / 5, MS, MS * 5];
    let mut config = Config {
        seed,
        nodes: orders.nodes.unwrap_or(nodes),
        protocol,
        volumes: orders.volumes.unwrap_or(volumes),
        blocks: if large { LARGE_BLOCKS } else { SMALL_BLOCKS },
        net_delay: rng.pick(&times),
        disk_delay: rng.pick(&times),
        resync_max_kib_s: rng.pick(&[2048, 10_240, 102_400]),
        trace: false,
        weather: Weather::ByPlace,
        metadata: Where::External,
        diskless: 0,
        slow: None,
        handlers: false,
        bitmap_shifts: Vec::new(),
        bandwidth: rng
            .permille(300)
            .then(|| rng.pick(&[2 << 20, 12 << 20, 120 << 20])),
    };
    if small {
        config.nodes = orders.nodes.unwrap_or(2);
        config.volumes = orders.volumes.unwrap_or(1);
        config.blocks = SMALL_BLOCKS;
        config.protocol = Protocol::C;
        config.net_delay = MS / 10;
        config.disk_delay = MS / 10;
        config.resync_max_kib_s = 102_400;
        config.bandwidth = None;
    }
    let mut settings = Settings::new(config.protocol, config.resync_max_kib_s);
    if rng.permille(600) || small {
        settings.net.timeout_tenths = 20;
        settings.net.ping_int_s = 3;
        settings.net.connect_int_s = 3;
    }
    settings.peer.resync_without_replication = config.seed % 4 != 1;
    settings.connect_first = rng.permille(300);
    settings.net.max_epoch_size = rng.pick(&[20, 2048]);
    settings.net.use_rle = rng.permille(700);
    settings.disk.on_io_error =
        rng.pick(&[OnIoError::Detach, OnIoError::Detach, OnIoError::PassOn]);
    if rng.permille(400) && !small {
        config.metadata = Where::Internal;
    }
    (config, settings)
}

/// What `diskless` and `quorum` among the kinds make of a world.
fn roles(orders: &Orders, config: &mut Config, settings: &mut Settings, mut rng: Rng) {
    let wants = |kind| orders.kinds.as_ref().is_some_and(|k| k.contains(&kind));
    let loss = |rng: &mut Rng| rng.pick(&[OnLoss::SuspendIo, OnLoss::SuspendIo, OnLoss::IoError]);
    let resource = &mut settings.resource;
    if wants(Fault::Diskless) {
        let most = (config.nodes as u64 - 1).clamp(1, 2);
        config.diskless = 1 + usize::from(most > 1 && rng.permille(250));
        resource.on_no_data_accessible = loss(&mut rng);
    }
    if wants(Fault::HangDisk) {
        settings.disk.disk_timeout_tenths = rng.pick(&[3, 10, 40]);
    }
    if (wants(Fault::Resize) || wants(Fault::GrowOne) || wants(Fault::CutResize))
        && !config.metadata.is_external()
    {
        config.metadata = Where::External;
    }
    if wants(Fault::Takeover) {
        config.protocol = Protocol::C;
        settings.net.protocol = Protocol::C;
        // With this policy, and with its counterpart, nobody has to be there.
        settings.net.rr_conflict = AfterSplitBrain::RetryConnect;
        resource.quorum = Quorum::Majority;
        resource.on_no_quorum = OnLoss::SuspendIo;
        resource.on_no_data_accessible = OnLoss::SuspendIo;
        if rng.permille(600) {
            resource.on_suspended_primary_outdated = OnSuspendedPrimaryOutdated::ForceSecondary;
        }
    } else if wants(Fault::Quorum) {
        // One copy alone would never be enough for these.
        let copies = config.nodes - config.diskless;
        resource.quorum = match rng.below(8) {
            _ if copies < 2 => Quorum::Majority,
            0 => Quorum::All,
            1 => Quorum::Number(2),
            _ => Quorum::Majority,
        };
        if rng.permille(200) && copies > 1 {
            resource.quorum_minimum_redundancy = Quorum::Number(2);
        }
        if wants(Fault::Outdate) {
            // Until the last one is left. What protocol A acknowledges before, the others may not have.
            resource.quorum = Quorum::Majority;
            resource.quorum_minimum_redundancy = Quorum::Off;
            config.protocol = Protocol::C;
            settings.net.protocol = Protocol::C;
        }
        resource.on_no_quorum = loss(&mut rng);
    }
}

/// Kinds that planned worlds draw from unless the command line says otherwise. The others find
/// faults of the core that are not mended yet, or nothing can be demanded under them.
pub const DEFAULT_KINDS: &[Fault] = &[
    Fault::Reset,
    Fault::Partition,
    Fault::OneWay,
    Fault::Stall,
    Fault::Crash,
    Fault::PowerCut,
    Fault::PowerCutAll,
    Fault::Handover,
    Fault::Disconnect,
    Fault::Detach,
    Fault::Invalidate,
    Fault::Pause,
    Fault::Down,
    Fault::Isolate,
    Fault::LateLink,
    Fault::Freeze,
    Fault::Clock,
    Fault::SlowDisk,
    Fault::PowerCutTwice,
    Fault::Suspend,
    Fault::Options,
    Fault::NewUuid,
];

fn kinds(orders: &Orders, mut rng: Rng) -> Vec<Fault> {
    let all = orders.extras.contains(&Extra::Every);
    let on: Vec<(Fault, bool)> = faults::all()
        .map(|(fault, _)| (fault, rng.permille(400)))
        .collect();
    let wanted = orders.kinds.as_deref().unwrap_or(DEFAULT_KINDS);
    let chosen: Vec<Fault> = on
        .iter()
        .filter(|(fault, on)| *on && wanted.contains(fault))
        .map(|(fault, _)| *fault)
        .collect();
    if chosen.is_empty() || all {
        wanted.to_vec()
    } else {
        chosen
    }
}

/// Requests over the time of the trouble and a little longer, so that some come while it heals.
fn requests(
    config: &Config,
    small: bool,
    time: u64,
    mut rng: Rng,
    edges: Option<Rng>,
    of: impl Fn(u64) -> Rng,
) -> Vec<PlannedRequest> {
    let count = if small {
        2000
    } else {
        rng.pick(&[30, 100, 300, 600])
    };
    let time = time.max(200 * MS) * rng.pick(&[6, 10, 13]) / 10;
    let gap = time / count;
    let mut regions: Vec<u64> = if config.blocks > SMALL_BLOCKS && rng.permille(700) {
        // One per extent, more extents than the activity log has room for.
        (0..120).map(|i| i * 1024 + 17).collect()
    } else {
        let count = rng.range(1, 6);
        (0..count).map(|_| rng.below(config.blocks - 64)).collect()
    };
    let at_edges = edges.is_some();
    if let Some(rng) = edges {
        themes::edges(&mut regions, config.blocks, rng);
    }
    let weights = [
        40 + rng.below(60),
        rng.below(60),
        rng.below(12),
        rng.below(12),
        rng.below(8) * u64::from(rng.permille(400)),
        rng.below(8) * u64::from(rng.permille(400)),
    ];
    let total: u64 = weights.iter().sum();
    let mut at = 0;
    (0..count)
        .map(|number| {
            let mut rng = of(number);
            at += rng.delay(gap) * 2 / 3;
            let mut pick = rng.below(total);
            let mut kind = 0;
            while pick >= weights[kind] {
                pick -= weights[kind];
                kind += 1;
            }
            let kind = match kind {
                0 => RequestKind::Write { fua: false },
                1 => RequestKind::Read,
                2 => RequestKind::Flush,
                3 => RequestKind::Write { fua: true },
                4 => RequestKind::Discard,
                _ => RequestKind::Zeroes { unmap: false },
            };
            let block = rng.pick(&regions) + rng.below(16);
            let count = match rng.below(10) {
                0 => rng.range(8, 33),
                1..=4 => rng.range(1, 9),
                _ => 1,
            };
            let (block, count) = match kind {
                RequestKind::Flush => (0, 0),
                _ => (block, count),
            };
            let volume = rng.below(u64::from(config.volumes)) as u16;
            let (mut kind, mut block, mut count) = (kind, block, count);
            if at_edges {
                block = block.min(config.blocks - 1);
                count = count.min(config.blocks - block);
                if kind == (RequestKind::Zeroes { unmap: false }) {
                    let unmap = rng.permille(500);
                    kind = RequestKind::Zeroes { unmap };
                }
            }
            PlannedRequest {
                number: number as u32,
                at,
                kind,
                volume,
                block,
                count,
            }
        })
        .collect()
}

/// A part of the writes are discards and zero-outs instead.
fn empty_more(requests: &mut [PlannedRequest], seed: u64) {
    for request in requests {
        if !matches!(request.kind, RequestKind::Write { .. }) {
            continue;
        }
        request.kind = match mixed(&[seed, 0x65_6d70_7479, u64::from(request.number)]) % 12 {
            0 | 1 => RequestKind::Discard,
            2 | 3 => RequestKind::Zeroes { unmap: true },
            4 => RequestKind::Zeroes { unmap: false },
            _ => request.kind,
        };
    }
}

/// All requests go to the same few blocks.
fn gather(requests: &mut [PlannedRequest], config: &Config) {
    let middle = config.blocks / 2;
    for request in requests.iter_mut().filter(|r| r.count > 0) {
        request.block = middle + request.block % 6;
        request.count = request.count.min(3);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leaving_one_fault_out_changes_no_other() {
        let all = Plan::new(
            5,
            &Orders {
                size: Size::Small,
                ..Orders::default()
            },
        );
        let some = Plan::new(
            5,
            &Orders {
                size: Size::Small,
                only_faults: Some(Numbers::parse("0-6,8").unwrap()),
                only_requests: Some(Numbers::parse("3").unwrap()),
                ..Orders::default()
            },
        );
        assert_eq!(all.faults.len(), 20);
        assert_eq!(all.requests.len(), 2000);
        assert_eq!(some.faults.len(), 8);
        let (a, b) = (&all.faults[8], &some.faults[7]);
        assert_eq!(
            (a.at, a.fault, a.seed, a.lasts),
            (b.at, b.fault, b.seed, b.lasts)
        );
        assert_eq!(some.requests.len(), 1);
        let (a, b) = (&all.requests[3], &some.requests[0]);
        assert_eq!(
            (a.at, a.kind, a.block, a.count),
            (b.at, b.kind, b.block, b.count)
        );
    }

    #[test]
    fn a_list_of_numbers_reads_what_it_writes() {
        for text in ["none", "3", "0-4,7", "1,3,5-6"] {
            assert_eq!(Numbers::parse(text).unwrap().to_string(), text);
        }
        assert_eq!(Numbers::of(&[0, 1, 2, 9]).to_string(), "0-2,9");
        assert!(Numbers::parse("1-x").is_err());
    }
}
