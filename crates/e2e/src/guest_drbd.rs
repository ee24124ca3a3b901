//! Kernel DRBD 8.4 in guests: its configuration, its state, and a pair of such nodes.

use std::fs;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::guest::{Guest, GuestSetup, HOST_IN_GUEST, HostFiles};

/// The port that a guest's DRBD listens on.
pub const DRBD_PORT: u16 = 7788;

/// Bounds connecting and small resyncs; DRBD itself retries every ten seconds.
pub const DRBD_LIMIT: Duration = Duration::from_secs(150);

/// What the kernel logs as an error although only the link is gone.
pub(crate) const LOST_LINK: &[&str] = &[
    "meta connection shut down by peer.",
    "PingAck did not arrive in time.",
    "sock_recvmsg returned -11",
    "sock_recvmsg returned -104",
    "sock_sendmsg returned -104",
    "sock_sendmsg returned -32",
    // A cut that outlasts `timeout` while nobody reads; with ko-count 0 nothing follows from it.
    "sock_sendmsg time expired, ko = 4294967295",
    // A packet of which only the beginning came.
    "error receiving Data, e: -5 l: ",
];

/// Limits of DRBD for an emulated machine with other work; a resource's own words come first.
const PATIENT: &str = "ping-timeout 100; socket-check-timeout 10; connect-int 3;";

/// One device's line of `/proc/drbd`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DrbdState {
    /// Connection state, such as `Connected`.
    pub connection: String,
    /// Own role and the peer's, such as `Primary/Secondary`.
    pub roles: String,
    /// Own disk state and the peer's, such as `UpToDate/UpToDate`.
    pub disks: String,
    /// What has to be resynced, in KiB.
    pub out_of_sync_kib: u64,
}

/// Reads the state of a minor; an unconfigured one has the connection state `Unconfigured`.
pub fn drbd_state(guest: &Guest, minor: u32) -> Result<DrbdState> {
    parse_state(&guest.sh("cat /proc/drbd")?, minor)
}

fn parse_state(text: &str, minor: u32) -> Result<DrbdState> {
    let head = format!("{minor}: cs:");
    let mut lines = text.lines();
    let line = lines
        .find(|line| line.trim_start().starts_with(&head))
        .with_context(|| format!("no minor {minor} in /proc/drbd:\n{text}"))?;
    let field = |line: &str, name: &str| {
        line.split_whitespace()
            .find_map(|word| word.strip_prefix(name).map(str::to_string))
            .unwrap_or_default()
    };
    Ok(DrbdState {
        connection: field(line, "cs:"),
        roles: field(line, "ro:"),
        disks: field(line, "ds:"),
        out_of_sync_kib: field(lines.next().unwrap_or(""), "oos:")
            .parse()
            .unwrap_or(0),
    })
}

/// Waits until a state is reached; the failure shows the last one.
pub fn wait_state(
    guest: &Guest,
    what: &str,
    limit: Duration,
    condition: impl Fn(&DrbdState) -> bool,
) -> Result<DrbdState> {
    let mut last = None;
    guest
        .wait(what, limit, |guest| {
            let state = drbd_state(guest, 0)?;
            let reached = condition(&state);
            last = Some(state);
            Ok(reached)
        })
        .with_context(|| format!("last state: {last:?}"))?;
    last.context("a wait asks at least once")
}

/// How a pair of kernel nodes is made. The resource is `r0`, its device `/dev/drbd0`.
#[derive(Clone, Debug)]
pub struct PairSetup {
    /// Size of each disk in MiB.
    pub disk_mib: u64,
    /// Lines for the `net` section.
    pub net: String,
    /// Lines for the `disk` section.
    pub disk: String,
    /// Access of the guests to the host's files.
    pub host_files: HostFiles,
}

impl PairSetup {
    /// 32 MiB, fixed resync rate (the controller of 8.4 is slow on small disks).
    pub fn new(net: &str) -> PairSetup {
        PairSetup {
            disk_mib: 32,
            net: net.to_string(),
            disk: "c-plan-ahead 0; resync-rate 100M;".to_string(),
            host_files: HostFiles::Hidden,
        }
    }
}

/// Two guests with kernel DRBD 8.4, `alfa` and `bravo`.
pub struct Pair84 {
    /// One node.
    pub alfa: Guest,
    /// The other.
    pub bravo: Guest,
    setup: PairSetup,
    ports: (u16, u16),
    disks: tempfile::TempDir,
}

impl Pair84 {
    /// Boots both. `join` gets where the host reaches their DRBDs, makes what joins them, and
    /// answers with the ports of 127.0.0.1 that alfa and bravo connect to for their peer.
    pub fn start(
        setup: &PairSetup,
        join: impl FnOnce(SocketAddr, SocketAddr) -> Result<(u16, u16)>,
    ) -> Result<Pair84> {
        let disks = tempfile::Builder::new()
            .prefix("lockstep-pair-")
            .tempdir()?;
        let boot = |name: &str| -> Result<Guest> {
            let disk = disks.path().join(name);
            fs::File::create(&disk)?.set_len(setup.disk_mib << 20)?;
            Guest::start(GuestSetup {
                disks: vec![disk],
                ports: vec![DRBD_PORT],
                host_files: setup.host_files,
                ..GuestSetup::new(name)
            })
        };
        let (alfa, bravo) = (boot("alfa")?, boot("bravo")?);
        let ports = join(alfa.address(DRBD_PORT), bravo.address(DRBD_PORT))?;
        let pair = Pair84 {
            setup: setup.clone(),
            ports,
            alfa,
            bravo,
            disks,
        };
        for guest in [&pair.alfa, &pair.bravo] {
            pair.write_configuration(guest)?;
            guest.sh("yes yes | drbdadm create-md --force r0")?;
        }
        Ok(pair)
    }

    /// Boots bravo after a power cut and brings its DRBD up again.
    pub fn restart_bravo(&self) -> Result<()> {
        self.bravo.boot()?;
        self.write_configuration(&self.bravo)?;
        self.bravo.sh("drbdadm up r0").map(drop)
    }

    /// Changes the `net` section of the running nodes.
    pub fn adjust(&mut self, net: &str) -> Result<()> {
        self.setup.net = net.to_string();
        for guest in [&self.alfa, &self.bravo] {
            self.write_configuration(guest)?;
            guest.sh("drbdadm adjust r0")?;
        }
        Ok(())
    }

    /// Changes the `net` and `disk` sections of the running nodes and the ports that they connect to.
    pub fn readjust(&mut self, net: &str, disk: &str, ports: (u16, u16)) -> Result<()> {
        self.setup.disk = disk.to_string();
        self.ports = ports;
        self.adjust(net)
    }

    fn write_configuration(&self, guest: &Guest) -> Result<()> {
        let port = if guest.name() == "alfa" {
            self.ports.0
        } else {
            self.ports.1
        };
        guest.write_file(
            "/etc/drbd.conf",
            &configuration(&self.setup, guest.name(), port),
        )
    }

    /// Brings both up and waits for the connection.
    pub fn connect(&self) -> Result<()> {
        for guest in [&self.alfa, &self.bravo] {
            guest.sh("drbdadm up r0")?;
        }
        for guest in [&self.alfa, &self.bravo] {
            wait_state(guest, "Connected", DRBD_LIMIT, |s| {
                s.connection == "Connected"
            })?;
        }
        Ok(())
    }

    /// [`Pair84::connect`] with disks that count as equal, alfa Primary.
    pub fn connect_clean(&self) -> Result<()> {
        self.connect()?;
        self.alfa
            .sh("drbdadm new-current-uuid --clear-bitmap r0/0 && drbdadm primary r0")?;
        self.wait_in_sync()
    }

    /// Waits until both are Connected and UpToDate with nothing out of sync.
    pub fn wait_in_sync(&self) -> Result<()> {
        for guest in [&self.alfa, &self.bravo] {
            wait_state(guest, "everything in sync", DRBD_LIMIT, |s| {
                s.connection == "Connected"
                    && s.disks == "UpToDate/UpToDate"
                    && s.out_of_sync_kib == 0
            })?;
        }
        Ok(())
    }

    /// Takes both down (nothing may be mounted) and compares the data on the lower disks; no line
    /// of a kernel's log may be an error, but for the words for a lost link.
    pub fn check_same_data(&self) -> Result<()> {
        self.alfa.sh("drbdadm secondary r0")?;
        let bytes: u64 = self
            .alfa
            .sh("cat /sys/block/drbd0/size")?
            .trim()
            .parse::<u64>()?
            * 512;
        ensure!(bytes > 0, "the device has no size");
        for guest in [&self.alfa, &self.bravo] {
            guest.sh("drbdadm down r0 && sync")?;
            let mut errors = guest.kernel_errors()?;
            errors.retain(|line| !LOST_LINK.iter().any(|text| line.contains(text)));
            ensure!(errors.is_empty(), "{}: {errors:#?}", guest.name());
        }
        let (a, b) = (fs::read(self.disk("alfa"))?, fs::read(self.disk("bravo"))?);
        let differs = (0..bytes as usize).find(|&at| a[at] != b[at]);
        ensure!(
            differs.is_none(),
            "the disks differ from byte {differs:?} on, of {bytes}"
        );
        Ok(())
    }

    /// File of a node's disk.
    pub fn disk(&self, name: &str) -> PathBuf {
        self.disks.path().join(name)
    }
}

/// `drbd.conf` for one of the two guests, whose peer it reaches through a port of the host.
fn configuration(setup: &PairSetup, own: &str, peer_port: u16) -> String {
    let mut text = format!(
        "global {{ usage-count no; }}\ncommon {{ net {{ {PATIENT} }} }}\n\
         resource r0 {{\n net {{ {} }}\n disk {{ {} }}\n",
        setup.net, setup.disk
    );
    for name in ["alfa", "bravo"] {
        let address = if name == own {
            format!("{}:{DRBD_PORT}", crate::guest::GUEST_ADDRESS)
        } else {
            format!("{HOST_IN_GUEST}:{peer_port}")
        };
        text += &format!(
            " on {name} {{ device /dev/drbd0 minor 0; disk /dev/vda; meta-disk internal; \
             address {address}; }}\n"
        );
    }
    text + "}\n"
}

#[cfg(test)]
mod tests {
    use super::parse_state;

    #[test]
    fn a_resync_in_proc_drbd_is_understood() {
        let text = "version: 8.4.11 (api:1/proto:86-101)\n\
             \x20 0: cs:SyncSource ro:Primary/Secondary ds:UpToDate/Inconsistent A r-----\n\
             \x20   ns:1216 nr:0 dw:3136 dr:2944 al:9 bm:0 lo:0 pe:4 ua:2 ap:0 ep:1 wo:f oos:2944\n\
             \x20 1: cs:Unconfigured\n";
        let state = parse_state(text, 0).unwrap();
        assert_eq!(state.connection, "SyncSource");
        assert_eq!(state.disks, "UpToDate/Inconsistent");
        assert_eq!(state.out_of_sync_kib, 2944);
        assert_eq!(parse_state(text, 1).unwrap().connection, "Unconfigured");
        assert!(parse_state(text, 2).is_err());
    }
}
