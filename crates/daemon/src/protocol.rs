//! The control protocol: one JSON request per line, then its answers, one JSON object per line.
//!
//! `docs/control-protocol.md` is the page for people. A change of a field's meaning raises
//! [`VERSION`]; a new request or a new optional field does not.

use serde::{Deserialize, Serialize};

use crate::metrics::{AckCounts, VolumeCounts};
use crate::report::{OptionTexts, ResourceReport};

/// Version of the protocol.
pub const VERSION: u32 = 1;

/// Longest request in bytes, the newline included. More ends the conversation.
pub const MAX_REQUEST_BYTES: usize = 256 << 10;

/// What a tool asks. Tagged by `do`, words as in `drbdsetup`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Request {
    /// Who answers; answered by [`Reply::Hello`].
    Hello {
        /// The tool's version of the protocol.
        version: u32,
    },
    /// The resource of this name, or all; answered by [`Reply::Report`].
    Report {
        /// A resource; all if not given.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        resource: Option<String>,
    },
    /// Reports now and at each change until the tool hangs up: [`Reply::Report`] for the first,
    /// then [`Reply::Changed`], [`Reply::Removed`] and [`Reply::Helper`].
    Watch {
        /// Also when only counters changed.
        #[serde(default)]
        statistics: bool,
        /// Counters are looked at when this client sends [`Request::Refresh`] (or another client
        /// asks), not once a second.
        #[serde(default)]
        on_request: bool,
        /// A resource; all if not given.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        resource: Option<String>,
    },
    /// Reports are made anew. A watcher, who may send nothing else, is told of what has changed;
    /// others get [`Reply::Done`].
    Refresh,
    /// What users of the volumes have asked for; answered by [`Reply::Counts`].
    Counts,
    /// Orderly end of the daemon: everything down, then exit.
    Stop,
    /// `new-resource`.
    NewResource {
        /// Name.
        resource: String,
        /// Node id of this node.
        node_id: u32,
        /// Options.
        #[serde(default)]
        options: OptionTexts,
    },
    /// `del-resource`.
    DelResource {
        /// Name.
        resource: String,
    },
    /// `rename-resource`.
    RenameResource {
        /// Name.
        resource: String,
        /// Name from then on.
        new_name: String,
    },
    /// `down`: everything of the resource.
    Down {
        /// Name.
        resource: String,
    },
    /// `resource-options`.
    ResourceOptions {
        /// Name.
        resource: String,
        /// Options.
        #[serde(default)]
        options: OptionTexts,
        /// Options that are not named get their defaults.
        #[serde(default)]
        set_defaults: bool,
    },
    /// `new-minor`.
    NewMinor {
        /// Name.
        resource: String,
        /// Minor number.
        minor: u32,
        /// Volume number.
        volume: u32,
        /// Options.
        #[serde(default)]
        options: OptionTexts,
    },
    /// `del-minor`.
    DelMinor {
        /// Minor number.
        minor: u32,
    },
    /// `attach`.
    Attach {
        /// Minor number.
        minor: u32,
        /// Data device.
        data_path: String,
        /// Metadata device; `internal` or the data device for internal metadata.
        meta_path: String,
        /// `internal`, `flexible`, or a number.
        meta_index: String,
        /// Options.
        #[serde(default)]
        options: OptionTexts,
    },
    /// `disk-options`.
    DiskOptions {
        /// Minor number.
        minor: u32,
        /// Options.
        #[serde(default)]
        options: OptionTexts,
        /// Options that are not named get their defaults.
        #[serde(default)]
        set_defaults: bool,
    },
    /// `detach`.
    Detach {
        /// Minor number.
        minor: u32,
        /// Do not wait for IO.
        #[serde(default)]
        force: bool,
        /// It is meant to have no disk from now on.
        #[serde(default)]
        diskless: bool,
    },
    /// `new-peer`.
    NewPeer {
        /// Name.
        resource: String,
        /// Node id of the peer.
        peer: u32,
        /// Options.
        #[serde(default)]
        options: OptionTexts,
    },
    /// `del-peer`.
    DelPeer {
        /// Name.
        resource: String,
        /// Node id of the peer.
        peer: u32,
        /// Disconnect without asking the peer.
        #[serde(default)]
        force: bool,
    },
    /// `net-options`.
    NetOptions {
        /// Name.
        resource: String,
        /// Node id of the peer.
        peer: u32,
        /// Options.
        #[serde(default)]
        options: OptionTexts,
        /// Options that are not named get their defaults.
        #[serde(default)]
        set_defaults: bool,
    },
    /// `new-path`.
    NewPath {
        /// Name.
        resource: String,
        /// Node id of the peer.
        peer: u32,
        /// Own address, `ipv4:ADDR:PORT` or `ipv6:[ADDR]:PORT`.
        local: String,
        /// The peer's address.
        remote: String,
    },
    /// `del-path`.
    DelPath {
        /// Name.
        resource: String,
        /// Node id of the peer.
        peer: u32,
        /// Own address.
        local: String,
        /// The peer's address.
        remote: String,
    },
    /// `connect`.
    Connect {
        /// Name.
        resource: String,
        /// Node id of the peer.
        peer: u32,
        /// Give up own changes in a split brain.
        #[serde(default)]
        discard_my_data: bool,
        /// Only report what would be decided.
        #[serde(default)]
        tentative: bool,
    },
    /// `disconnect`.
    Disconnect {
        /// Name.
        resource: String,
        /// Node id of the peer.
        peer: u32,
        /// Do not ask the peer.
        #[serde(default)]
        force: bool,
    },
    /// `peer-device-options`.
    PeerDeviceOptions {
        /// Name.
        resource: String,
        /// Node id of the peer.
        peer: u32,
        /// Volume number.
        volume: u32,
        /// Options.
        #[serde(default)]
        options: OptionTexts,
        /// Options that are not named get their defaults.
        #[serde(default)]
        set_defaults: bool,
    },
    /// `primary`.
    Primary {
        /// Name.
        resource: String,
        /// Even without UpToDate data.
        #[serde(default)]
        force: bool,
    },
    /// `secondary`.
    Secondary {
        /// Name.
        resource: String,
        /// Even if in use.
        #[serde(default)]
        force: bool,
    },
    /// `outdate`.
    Outdate {
        /// Minor number.
        minor: u32,
    },
    /// `invalidate`.
    Invalidate {
        /// Minor number.
        minor: u32,
        /// Node to sync from.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        from: Option<u32>,
        /// A full sync.
        #[serde(default = "yes")]
        reset_bitmap: bool,
    },
    /// `invalidate-remote`.
    InvalidateRemote {
        /// Name.
        resource: String,
        /// Node id of the peer.
        peer: u32,
        /// Volume number.
        volume: u32,
        /// A full sync.
        #[serde(default = "yes")]
        reset_bitmap: bool,
    },
    /// `pause-sync`.
    PauseSync {
        /// Name.
        resource: String,
        /// Node id of the peer.
        peer: u32,
        /// Volume number.
        volume: u32,
    },
    /// `resume-sync`.
    ResumeSync {
        /// Name.
        resource: String,
        /// Node id of the peer.
        peer: u32,
        /// Volume number.
        volume: u32,
    },
    /// `verify`.
    Verify {
        /// Name.
        resource: String,
        /// Node id of the peer.
        peer: u32,
        /// Volume number.
        volume: u32,
        /// First sector.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        start_sector: Option<u64>,
        /// Sector to stop before.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        stop_sector: Option<u64>,
    },
    /// `suspend-io`.
    SuspendIo {
        /// Minor number.
        minor: u32,
    },
    /// `resume-io`.
    ResumeIo {
        /// Minor number.
        minor: u32,
    },
    /// `new-current-uuid`.
    NewCurrentUuid {
        /// Minor number.
        minor: u32,
        /// Both sides count as equal.
        #[serde(default)]
        clear_bitmap: bool,
        /// Everything is resynchronised.
        #[serde(default)]
        force_resync: bool,
    },
    /// `resize`.
    Resize {
        /// Minor number.
        minor: u32,
        /// Wanted size; 0 is all that the disks offer.
        #[serde(default)]
        size_sectors: u64,
        /// The new area needs no resync.
        #[serde(default)]
        assume_clean: bool,
        /// Do not wait for the peer's consent.
        #[serde(default)]
        assume_peer_has_space: bool,
    },
    /// `forget-peer`.
    ForgetPeer {
        /// Name.
        resource: String,
        /// Node id of the peer.
        peer: u32,
    },
}

fn yes() -> bool {
    true
}

/// What the daemon answers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "is", rename_all = "kebab-case")]
pub enum Reply {
    /// The command was carried out.
    Done,
    /// The command was refused or failed.
    Failed {
        /// DRBD's return code: negative for state changes, above 101 for commands; 0 if the
        /// request itself was wrong.
        code: i32,
        /// What was found, what is needed.
        text: String,
    },
    /// Who answers.
    Hello {
        /// Version of the protocol.
        version: u32,
        /// Version of the program.
        program: String,
        /// Process id of the daemon.
        pid: u32,
    },
    /// All resources asked for, by name.
    Report {
        /// The resources.
        resources: Vec<ResourceReport>,
    },
    /// What users of the volumes have asked for.
    Counts {
        /// By resource and volume; volumes that were never used are missing.
        volumes: Vec<VolumeCounts>,
        /// How long peers take to acknowledge writes.
        #[serde(default)]
        acks: Vec<AckCounts>,
    },
    /// A resource came into being or changed.
    Changed {
        /// The resource as it is now.
        resource: Box<ResourceReport>,
    },
    /// A resource has another name from now on.
    Renamed {
        /// Its name before.
        name: String,
        /// Its name now.
        new_name: String,
    },
    /// A resource has gone.
    Removed {
        /// Its name.
        name: String,
    },
    /// A handler is about to run or has ended.
    Helper {
        /// Name of the resource.
        resource: String,
        /// The peer it is about.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        peer: Option<u8>,
        /// The volume it is about.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        volume: Option<u16>,
        /// Name of the handler.
        helper: String,
        /// Wait status word; not given while it runs.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        status: Option<i32>,
    },
}

/// Reads a request. The error is a text for the tool's user.
pub fn parse_request(line: &[u8]) -> Result<Request, String> {
    serde_json::from_slice(line).map_err(|error| format!("bad request: {error}"))
}

/// Writes a message with its newline.
pub fn to_line<T: Serialize>(message: &T) -> Vec<u8> {
    let mut line = serde_json::to_vec(message).expect("the messages have only string keys");
    line.push(b'\n');
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bytes that are cut, doubled or replaced anywhere give a request or a text, never a panic.
    #[test]
    fn mutated_requests_never_panic() {
        let lines: [&[u8]; 4] = [
            br#"{"do":"new-resource","resource":"web","node_id":0,"options":{"quorum":"all"}}"#,
            br#"{"do":"attach","minor":1,"data_path":"/a","meta_path":"/b","meta_index":"-3"}"#,
            br#"{"do":"verify","resource":"w","peer":1,"volume":0,"start_sector":18446744073709551615}"#,
            br#"{"do":"watch","statistics":true,"on_request":false}"#,
        ];
        let mut state = 0x2545_f491_4f6c_dd1d_u64;
        let mut next = |below: usize| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state as usize % below.max(1)
        };
        let (mut good, mut bad) = (0, 0);
        for round in 0..20_000 {
            let mut line = lines[round % lines.len()].to_vec();
            for _ in 0..next(4) {
                let at = next(line.len());
                match next(4) {
                    0 => line.truncate(at),
                    1 if at < line.len() => line[at] = next(256) as u8,
                    2 => line.insert(at, b"{}[]\",:\\0-"[next(10)]),
                    _ => line.extend_from_within(at..),
                }
            }
            match parse_request(&line) {
                Ok(_) => good += 1,
                Err(text) => {
                    assert!(!text.is_empty());
                    bad += 1;
                }
            }
        }
        assert!(good > 1000 && bad > 1000, "{good} {bad}");
    }

    #[test]
    fn requests_are_written_in_the_words_of_the_tools() {
        let request = Request::NewPath {
            resource: "web".into(),
            peer: 1,
            local: "ipv4:10.0.0.1:7790".into(),
            remote: "ipv4:10.0.0.2:7790".into(),
        };
        let line = String::from_utf8(to_line(&request)).unwrap();
        assert_eq!(
            line,
            "{\"do\":\"new-path\",\"resource\":\"web\",\"peer\":1,\
             \"local\":\"ipv4:10.0.0.1:7790\",\"remote\":\"ipv4:10.0.0.2:7790\"}\n"
        );
        assert_eq!(parse_request(line.trim_end().as_bytes()).unwrap(), request);
    }

    #[test]
    fn a_wrong_request_is_named() {
        let unknown = parse_request(b"{\"do\":\"explode\"}").unwrap_err();
        assert!(unknown.contains("explode"), "{unknown}");
        let missing = parse_request(b"{\"do\":\"del-minor\"}").unwrap_err();
        assert!(missing.contains("minor"), "{missing}");
        let excess = parse_request(b"{\"do\":\"del-minor\",\"minor\":1,\"mijor\":2}").unwrap_err();
        assert!(excess.contains("mijor"), "{excess}");
        assert!(parse_request(b"").is_err());
        assert!(parse_request(b"{\"do\":\"del-minor\",\"minor\":-1}").is_err());
        assert!(parse_request(b"{\"do\":\"del-minor\",\"minor\":4294967296}").is_err());
    }

    /// Cuts and bit flips of valid requests: never a panic, and what parses can be written again.
    #[test]
    fn damaged_requests_never_panic() {
        let seeds: [&[u8]; 4] = [
            b"{\"do\":\"new-resource\",\"resource\":\"web\",\"node_id\":0,\"options\":{\"a\":\"b\"}}",
            b"{\"do\":\"attach\",\"minor\":1,\"data_path\":\"/d\",\"meta_path\":\"/m\",\"meta_index\":\"0\"}",
            b"{\"do\":\"watch\",\"statistics\":true}",
            b"{\"do\":\"verify\",\"resource\":\"r\",\"peer\":1,\"volume\":0,\"start_sector\":8}",
        ];
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        let mut random = move || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state as usize
        };
        for _ in 0..20_000 {
            let mut line = seeds[random() % seeds.len()].to_vec();
            for _ in 0..random() % 4 {
                let at = random() % line.len();
                match random() % 4 {
                    0 => line[at] ^= 1 << (random() % 8),
                    1 => line.truncate(at.max(1)),
                    2 => line.insert(at, b"{}[]\",:\\0"[random() % 9]),
                    _ => line[at] = b"{}[]\",:\\9"[random() % 9],
                }
            }
            if let Ok(request) = parse_request(&line) {
                let again = to_line(&request);
                assert_eq!(parse_request(again.trim_ascii_end()), Ok(request));
            }
        }
    }
}
