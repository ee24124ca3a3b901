//! Options that planned worlds have only where the command line names them. Each draws from
//! numbers of its own, so the worlds without them stay as they are.

use lockstep_core::options::{Fencing, OnCongestion, OnLoss, Protocol, Quorum};
use lockstep_format::wire::alg::DigestAlg;

use crate::disk::Where;
use crate::operator::Settings;
use crate::plan::{LARGE_BLOCKS, SMALL_BLOCKS};
use crate::rng::{Rng, mixed};
use crate::themes::slow_wire;
use crate::turns::Turns;
use crate::world::Config;

/// A part of the configuration that is off by default.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extra {
    /// `data-integrity-alg`.
    Integrity,
    /// `csums-alg`.
    Csums,
    /// `rs-discard-granularity`.
    Thin,
    /// `on-congestion` with protocol A and a low limit.
    Congestion,
    /// Bitmap blocks of 4 KiB to 1 MiB, another size on each node.
    Blocks,
    /// `fencing`, and handlers that take their time and answer this and that.
    Handlers,
    /// `allow-two-primaries`: two nodes, both Primary, with fencing.
    TwoPrimaries,
    /// Metadata on persistent memory.
    Pmem,
    /// All kinds of faults that are named happen, not some of them.
    Every,
    /// All requests go to the same few blocks, and some wires are slow.
    Hot,
    /// The activity log has room for a few extents of a large volume only.
    ShortLog,
    /// Requests come in bursts, with pauses in which nodes come to rest.
    Bursts,
    /// A peer that does not answer is given up soon, a disk that hangs does so for long, and in half
    /// of the worlds nothing but the peer notices it.
    Impatient,
    /// Some disks keep what is discarded, and more is discarded and zeroed.
    KeptDiscards,
    /// A third node without a disk, in worlds of two Primaries of DRBD 9's dialect.
    TieBreaker,
    /// A stream of data may stand still for long while pings pass, and cluster-wide changes are given
    /// up soon.
    Numb,
    /// Nodes prove to each other that they know `shared-secret`.
    Secret,
    /// Front ends that open and close volumes change roles (`auto-promote`).
    Openers,
    /// The dialect of DRBD 8.3, or an early one of 8.4: one volume, short requests, and nothing that
    /// came later.
    Old,
    /// Metadata at the end of the devices, also where these grow.
    Internal,
    /// `al-updates no`: two nodes without an activity log.
    NoLog,
    /// Protocol A or B.
    Async,
    /// The activity log has more slots than one of its blocks repeats, on a large volume.
    LongLog,
    /// Three volumes whose resyncs wait for each other (`resync-after`, `max-parallel-resyncs`).
    Turns,
    /// A third disk, in worlds of two Primaries of DRBD 9's dialect.
    ThirdDisk,
    /// Applications go on writing while their node is demoted.
    Hasty,
    /// A handover is a live migration.
    Migrations,
    /// No fault is planned and no request before the ends: how the survivors of a Primary come to rest, in little time.
    Quiet,
}

/// All of them with the words of the command line.
pub const EXTRAS: [(Extra, &str); 28] = [
    (Extra::Integrity, "integrity"),
    (Extra::Csums, "csums"),
    (Extra::Thin, "thin"),
    (Extra::Congestion, "congestion"),
    (Extra::Blocks, "blocks"),
    (Extra::Handlers, "handlers"),
    (Extra::TwoPrimaries, "two-primaries"),
    (Extra::Pmem, "pmem"),
    (Extra::Every, "every"),
    (Extra::Hot, "hot"),
    (Extra::ShortLog, "short-log"),
    (Extra::Bursts, "bursts"),
    (Extra::Impatient, "impatient"),
    (Extra::KeptDiscards, "kept-discards"),
    (Extra::TieBreaker, "tie-breaker"),
    (Extra::Numb, "numb"),
    (Extra::Secret, "secret"),
    (Extra::Openers, "openers"),
    (Extra::Old, "old"),
    (Extra::Internal, "internal"),
    (Extra::NoLog, "no-log"),
    (Extra::Async, "async"),
    (Extra::LongLog, "long-log"),
    (Extra::Turns, "turns"),
    (Extra::ThirdDisk, "third-disk"),
    (Extra::Hasty, "hasty"),
    (Extra::Migrations, "migrations"),
    (Extra::Quiet, "quiet"),
];

/// The word of one.
pub fn word(extra: Extra) -> &'static str {
    EXTRAS
        .iter()
        .find(|(e, _)| *e == extra)
        .map_or("unknown", |(_, word)| word)
}

/// All words, for people.
pub fn known() -> String {
    let words: Vec<_> = EXTRAS.iter().map(|(_, word)| *word).collect();
    words.join(", ")
}

/// Those of a list of words separated by commas.
pub fn parse(list: &str) -> Result<Vec<Extra>, String> {
    list.split(',')
        .filter(|w| !w.is_empty())
        .map(|word| {
            EXTRAS
                .iter()
                .find(|(_, name)| *name == word)
                .map(|(extra, _)| *extra)
                .ok_or_else(|| format!("no option is called {word}; there are {}", known()))
        })
        .collect()
}

/// Switches one on in the configuration of a seed's world.
pub(crate) fn apply(extra: Extra, seed: u64, config: &mut Config, settings: &mut Settings) {
    let mut rng = Rng::new(mixed(&[seed, 0x6578_7472_6173, extra as u64]));
    match extra {
        Extra::Integrity => {
            let alg = rng.pick(&DigestAlg::ALL);
            settings.net.data_integrity_alg = Some(alg.name().into());
        }
        Extra::Csums => {
            let alg = rng.pick(&DigestAlg::ALL);
            settings.net.csums_alg = Some(alg.name().into());
            settings.net.csums_after_crash_only = rng.permille(100);
        }
        Extra::Thin => {
            settings.disk.rs_discard_granularity_bytes = rng.pick(&[4096, 65536, 1 << 20]);
        }
        Extra::Blocks => {
            // Internal metadata of other sizes would make devices of other sizes.
            if !config.metadata.is_external() {
                config.metadata = Where::External;
            }
            config.bitmap_shifts = (0..config.nodes).map(|_| rng.range(12, 21) as u8).collect();
        }
        Extra::Pmem => config.metadata = Where::Persistent,
        Extra::Internal => config.metadata = Where::Internal,
        Extra::NoLog => {
            config.nodes = 2;
            config.diskless = 0;
            settings.disk.al_updates = false;
        }
        Extra::Async => {
            config.protocol = rng.pick(&[Protocol::A, Protocol::B]);
            settings.net.protocol = config.protocol;
        }
        Extra::Every | Extra::Bursts | Extra::KeptDiscards | Extra::Quiet => {}
        Extra::Hot => {
            config.blocks = config.blocks.min(SMALL_BLOCKS);
            if rng.permille(600) {
                slow_wire(config, &mut rng);
            }
        }
        Extra::TieBreaker => {
            config.nodes = 3;
            config.diskless = 1;
            settings.resource.protocol_max = 124;
            if rng.permille(500) {
                settings.resource.quorum = Quorum::Majority;
            }
        }
        Extra::ThirdDisk => {
            config.nodes = 3;
            settings.resource.protocol_max = 124;
            if rng.permille(500) {
                settings.resource.quorum = Quorum::Majority;
            }
        }
        Extra::Numb => settings.resource.twopc_timeout_tenths = rng.pick(&[10, 30]),
        Extra::Secret => {
            let alg = rng.pick(&["sha1", "sha256", "md5"]);
            settings.net.cram_hmac_alg = Some(alg.into());
            settings.net.shared_secret = Some("a secret of the world".into());
        }
        Extra::Openers => settings.openers = true,
        Extra::Hasty => settings.hasty = true,
        Extra::Migrations => {
            // Beside clients alone two disks may both be Primary at once.
            config.diskless = config.diskless.min(1);
            config.nodes = config.nodes.max(3 + config.diskless);
            config.protocol = Protocol::C;
            settings.net.protocol = Protocol::C;
            settings.net.allow_two_primaries = true;
            settings.net.fencing = Fencing::DontCare;
            settings.resource.protocol_max = 124;
            // Without it a second Primary that has just lost the first one would part from it.
            settings.resource.quorum = Quorum::Majority;
            settings.resource.on_no_quorum = OnLoss::SuspendIo;
            settings.migrates = true;
        }
        Extra::Turns => {
            config.volumes = 3;
            let turns = settings.turns.insert(Turns::default());
            turns.max_parallel = rng.pick(&[0, 1, 1, 2]);
            if turns.max_parallel == 0 || rng.permille(500) {
                // In a row, or two behind one, from either end.
                let (near, far) = rng.pick(&[(0, 2), (2, 0)]);
                turns.after[1] = Some(near);
                turns.after[far as usize] = Some(rng.pick(&[1, near]));
            }
        }
        Extra::Old => {
            config.nodes = 2;
            config.volumes = 1;
            config.diskless = 0;
            config.blocks = config.blocks.min(SMALL_BLOCKS);
            settings.resource.protocol_max =
                rng.pick(&[86, 88, 89, 90, 91, 93, 94, 95, 96, 99, 100]);
        }
        Extra::Impatient => {
            settings.net.timeout_tenths = 10;
            settings.net.ping_int_s = 3;
            settings.net.connect_int_s = 3;
            settings.net.ko_count = rng.pick(&[1, 2]);
            if rng.permille(500) {
                settings.disk.disk_timeout_tenths = 0;
            }
        }
        Extra::ShortLog | Extra::LongLog => {
            config.blocks = config.blocks.max(LARGE_BLOCKS);
            config.resync_max_kib_s = 102_400;
            config.slow = None;
            settings.peer.c_max_rate_kib_s = config.resync_max_kib_s;
            settings.disk.al_extents = match extra {
                Extra::LongLog => rng.pick(&[920, 1237, 6433]),
                _ => rng.pick(&[7, 12]),
            };
        }
        Extra::Congestion => {
            config.protocol = Protocol::A;
            settings.net.protocol = Protocol::A;
            settings.net.on_congestion = OnCongestion::PullAhead;
            settings.net.congestion_fill_sectors = rng.pick(&[8, 32, 128]);
        }
        Extra::Handlers => {
            config.handlers = true;
            let names = crate::handlers::NAMES;
            settings.resource.handlers = names.iter().map(|name| name.to_string()).collect();
            settings.net.fencing = match rng.below(3) {
                0 => Fencing::DontCare,
                1 if config.protocol != Protocol::A => Fencing::ResourceAndStonith,
                _ => Fencing::ResourceOnly,
            };
        }
        Extra::TwoPrimaries => {
            config.nodes = 2;
            config.diskless = 0;
            config.protocol = Protocol::C;
            settings.net.protocol = Protocol::C;
            settings.net.allow_two_primaries = true;
            settings.net.fencing = Fencing::ResourceAndStonith;
            settings.resource.handlers = vec!["fence-peer".into()];
            // Numbers of its own: its place in the list says nothing.
            let mut rng = Rng::new(mixed(&[seed, 0x6578_7472_6173, 5]));
            if rng.permille(500) {
                settings.resource.protocol_max = 101;
            }
        }
    }
}
