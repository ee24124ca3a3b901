//! What planned worlds get on top of their shape where the command line names no kinds: rarer
//! faults and options, requests at edges, a slow wire. They draw from numbers of their own, so that
//! worlds of named kinds, which tests and reports name by seed, stay as they are.

use lockstep_core::options::{OnIoError, Protocol, ReadBalancing};

use crate::extras::{self, Extra};
use crate::faults::Fault;
use crate::operator::Settings;
use crate::plan::{LARGE_BLOCKS, SMALL_BLOCKS};
use crate::rng::{Rng, mixed};
use crate::world::{Config, MS, SlowWire};

/// What is special about a world.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Theme {
    /// Kinds that happen beside those of every world.
    pub kinds: Vec<Fault>,
    /// Kinds of every world that do not happen in this one.
    pub without: Vec<Fault>,
    /// Nodes whose disks have the metadata of 8.4.
    pub old_metadata: Vec<usize>,
    /// Requests reach the device's first and last blocks and cross borders of extents.
    pub edges: bool,
    /// The activity log has room for a few extents only, so that each write changes it.
    pub short_log: bool,
    /// Front ends read at once what was acknowledged, and reads may go to the peer.
    pub reads_back: bool,
    /// In a few words.
    pub words: &'static str,
}

/// The theme of a seed's world; changes the configuration accordingly.
pub(crate) fn choose(seed: u64, config: &mut Config, settings: &mut Settings) -> Theme {
    let mut rng = Rng::new(mixed(&[seed, 0x7468_656d_6573]));
    let mut theme = Theme {
        edges: rng.permille(300),
        ..Theme::default()
    };
    let pair = config.nodes == 2;
    match rng.below(100) {
        0..=9 if pair => {
            theme.words = "disk errors";
            theme.kinds = vec![Fault::ReadError, Fault::WriteError, Fault::FlushError];
        }
        10..=19 if pair => {
            theme.words = "verify";
            theme.kinds = vec![Fault::Verify, Fault::Balance];
            // All of a large device takes longer than the end of a world waits.
            config.blocks = config.blocks.min(SMALL_BLOCKS);
            extras::apply(Extra::Csums, seed, config, settings);
        }
        20..=24 if pair => {
            theme.words = "changed payloads";
            theme.kinds = vec![Fault::Corrupt];
            extras::apply(Extra::Integrity, seed, config, settings);
        }
        25..=34 if pair => {
            theme.words = "8.4's dialect";
            settings.resource.protocol_max = 101;
            // A new generation is no event for 8.4: connected nodes do not hear of it.
            theme.without = vec![Fault::NewUuid];
            theme.old_metadata = (0..2).filter(|_| rng.permille(500)).collect();
        }
        35..=44 => {
            theme.words = "few buffers";
            settings.net.max_buffers = rng.pick(&[32, 48, 128]);
            settings.net.max_epoch_size = rng.pick(&[1, 3, 20]);
        }
        _ => theme.words = "",
    }
    if rng.permille(300) {
        slow_wire(config, &mut rng);
        // All of a large device takes longer than the end of a world waits.
        config.blocks = config.blocks.min(SMALL_BLOCKS);
    }
    // Seeds that end otherwise keep the worlds that they had before there was this one.
    if pair && seed % 10 == 7 {
        config.blocks = config.blocks.max(LARGE_BLOCKS);
        config.resync_max_kib_s = 102_400;
        config.slow = None;
        settings.peer.c_max_rate_kib_s = config.resync_max_kib_s;
        settings.disk.al_extents = rng.pick(&[7, 12]);
        theme.short_log = true;
    }
    // The same of these.
    if seed % 10 == 4 && theme.old_metadata.is_empty() && config.metadata.is_external() {
        extras::apply(Extra::Pmem, seed, config, settings);
    }
    if pair && seed % 20 == 3 && theme.words.is_empty() {
        theme.words = "failing writes";
        theme.kinds = vec![Fault::WriteError; 6];
        settings.disk.on_io_error = OnIoError::PassOn;
    }
    if pair && seed % 20 == 13 {
        theme.reads_back = true;
        config.protocol = rng.pick(&[Protocol::A, Protocol::B]);
        settings.net.protocol = config.protocol;
        settings.disk.read_balancing = rng.pick(&[
            ReadBalancing::PreferRemote,
            ReadBalancing::RoundRobin,
            ReadBalancing::Striping(15),
        ]);
    }
    if theme.edges {
        config.blocks -= rng.below(100);
    }
    theme
}

/// Where requests begin in a world with requests at edges: the device's ends, and just before
/// borders of extents.
pub(crate) fn edges(regions: &mut [u64], blocks: u64, mut rng: Rng) {
    let count = regions.len();
    for (i, region) in regions.iter_mut().enumerate() {
        *region = match (i, count) {
            (0, _) => 0,
            (1, _) => blocks.saturating_sub(20),
            _ => (*region / 1024 * 1024 + 1024)
                .saturating_sub(rng.range(4, 20))
                .min(blocks - 20),
        };
    }
}

/// One direction between two nodes is slower than the others.
pub(crate) fn slow_wire(config: &mut Config, rng: &mut Rng) {
    let from = rng.below(config.nodes as u64) as usize;
    let to = (from + 1 + rng.below(config.nodes as u64 - 1) as usize) % config.nodes;
    config.slow = Some(SlowWire {
        from,
        to,
        stream: rng.pick(&[None, Some(0), Some(1)]),
        factor: rng.pick(&[5, 20, 60]),
    });
    // No wire is slower than a ping may take.
    config.net_delay = config.net_delay.min(MS);
}
