//! From a command line to a request of the control protocol.

use lockstep_daemon::protocol::Request;

use super::args::{Parsed, address, minor, number};

/// The request, or what is wrong with the words.
pub(super) fn build(mut p: Parsed) -> Result<Request, String> {
    let set_defaults = p.take_bool("set-defaults").unwrap_or(false);
    let word = p.words[0].clone();
    let resource = || word.clone();
    let minor_of = || minor(&word);
    let peer = |p: &Parsed| number("peer node id", &p.words[1]);
    let volume = |p: &Parsed| number("volume", &p.words[2]);
    Ok(match p.verb.name {
        "new-resource" => Request::NewResource {
            resource: resource(),
            node_id: number("node id", &p.words[1])?,
            options: p.options,
        },
        "resource-options" => Request::ResourceOptions {
            resource: resource(),
            options: p.options,
            set_defaults,
        },
        "del-resource" => Request::DelResource {
            resource: resource(),
        },
        "rename-resource" => Request::RenameResource {
            resource: resource(),
            new_name: p.words[1].clone(),
        },
        "down" => Request::Down {
            resource: resource(),
        },
        "new-minor" => Request::NewMinor {
            resource: resource(),
            minor: minor(&p.words[1])?,
            volume: volume(&p)?,
            options: p.options,
        },
        "del-minor" => Request::DelMinor { minor: minor_of()? },
        "attach" => Request::Attach {
            minor: minor_of()?,
            data_path: disk_path(&p.words[1])?,
            meta_path: match p.words[2].as_str() {
                "internal" => "internal".to_owned(),
                path => disk_path(path)?,
            },
            meta_index: match p.words[3].as_str() {
                "-3" => "internal".to_owned(),
                "-2" | "flex-external" => "flexible".to_owned(),
                other => other.to_owned(),
            },
            options: p.options,
        },
        "disk-options" => Request::DiskOptions {
            minor: minor_of()?,
            options: p.options,
            set_defaults,
        },
        "detach" => Request::Detach {
            force: p.take_bool("force").unwrap_or(false),
            diskless: p.take_bool("diskless").unwrap_or(false),
            minor: minor_of()?,
        },
        "new-peer" => Request::NewPeer {
            resource: resource(),
            peer: peer(&p)?,
            options: p.options,
        },
        "del-peer" => Request::DelPeer {
            force: p.take_bool("force").unwrap_or(false),
            resource: resource(),
            peer: peer(&p)?,
        },
        "net-options" => Request::NetOptions {
            resource: resource(),
            peer: peer(&p)?,
            options: p.options,
            set_defaults,
        },
        "new-path" | "del-path" => {
            let (local, remote) = (address(&p.words[2])?, address(&p.words[3])?);
            let (resource, peer) = (resource(), peer(&p)?);
            match p.verb.name {
                "new-path" => Request::NewPath {
                    resource,
                    peer,
                    local,
                    remote,
                },
                _ => Request::DelPath {
                    resource,
                    peer,
                    local,
                    remote,
                },
            }
        }
        "connect" => Request::Connect {
            discard_my_data: p.take_bool("discard-my-data").unwrap_or(false),
            tentative: p.take_bool("tentative").unwrap_or(false),
            resource: resource(),
            peer: peer(&p)?,
        },
        "disconnect" => Request::Disconnect {
            force: p.take_bool("force").unwrap_or(false),
            resource: resource(),
            peer: peer(&p)?,
        },
        "peer-device-options" => Request::PeerDeviceOptions {
            resource: resource(),
            peer: peer(&p)?,
            volume: volume(&p)?,
            options: p.options,
            set_defaults,
        },
        "primary" => Request::Primary {
            force: p.take_bool("force").unwrap_or(false),
            resource: resource(),
        },
        "secondary" => Request::Secondary {
            force: p.take_bool("force").unwrap_or(false),
            resource: resource(),
        },
        "outdate" => Request::Outdate {
            minor: minor(p.words.get(1).unwrap_or(&word))?,
        },
        "invalidate" => Request::Invalidate {
            from: p
                .take_number("sync-from-peer-node-id")
                .and_then(|n| u32::try_from(n).ok()),
            reset_bitmap: p.take_bool("reset-bitmap").unwrap_or(true),
            minor: minor_of()?,
        },
        "invalidate-remote" => Request::InvalidateRemote {
            reset_bitmap: p.take_bool("reset-bitmap").unwrap_or(true),
            resource: resource(),
            peer: peer(&p)?,
            volume: volume(&p)?,
        },
        "pause-sync" => Request::PauseSync {
            resource: resource(),
            peer: peer(&p)?,
            volume: volume(&p)?,
        },
        "resume-sync" => Request::ResumeSync {
            resource: resource(),
            peer: peer(&p)?,
            volume: volume(&p)?,
        },
        "verify" => Request::Verify {
            start_sector: p.take_number("start").and_then(|n| u64::try_from(n).ok()),
            stop_sector: p.take_number("stop").and_then(|n| u64::try_from(n).ok()),
            resource: resource(),
            peer: peer(&p)?,
            volume: volume(&p)?,
        },
        "suspend-io" => Request::SuspendIo { minor: minor_of()? },
        "resume-io" => Request::ResumeIo { minor: minor_of()? },
        "new-current-uuid" => Request::NewCurrentUuid {
            clear_bitmap: p.take_bool("clear-bitmap").unwrap_or(false),
            force_resync: p.take_bool("force-resync").unwrap_or(false),
            minor: minor_of()?,
        },
        "resize" => {
            for name in ["al-stripes", "al-stripe-size-kB"] {
                if p.options.contains_key(name) {
                    return Err(format!(
                        "resize --{name}: the layout of the activity log is changed offline, \
                         with `drbdadm create-md` after a backup"
                    ));
                }
            }
            Request::Resize {
                size_sectors: p
                    .take_number("size")
                    .and_then(|n| u64::try_from(n).ok())
                    .unwrap_or(0),
                assume_clean: p.take_bool("assume-clean").unwrap_or(false),
                assume_peer_has_space: p.take_bool("assume-peer-has-space").unwrap_or(false),
                minor: minor_of()?,
            }
        }
        "forget-peer" => Request::ForgetPeer {
            resource: resource(),
            peer: peer(&p)?,
        },
        other => return Err(format!("{other}: this command asks and changes nothing")),
    })
}

/// The path of a disk as the daemon sees it, which has another working directory.
fn disk_path(path: &str) -> Result<String, String> {
    if path.starts_with("ram:") {
        return Ok(path.to_owned());
    }
    let absolute = std::path::absolute(path).map_err(|error| format!("{path}: {error}"))?;
    absolute
        .into_os_string()
        .into_string()
        .map_err(|_| format!("{path}: the path is not UTF-8"))
}

#[cfg(test)]
mod tests {
    use super::super::{args, verbs::VERBS};
    use super::*;

    fn request(line: &str) -> Result<Request, String> {
        let args: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
        build(args::parse(&args).unwrap())
    }

    #[test]
    fn drbdadm_s_calls_become_requests() {
        assert_eq!(
            request("new-minor web 11 1"),
            Ok(Request::NewMinor {
                resource: "web".into(),
                minor: 11,
                volume: 1,
                options: Default::default()
            })
        );
        let attach = request("attach 10 /dev/vg/a /dev/vg/m flexible --al-extents=6007").unwrap();
        assert!(matches!(attach, Request::Attach { meta_index, .. } if meta_index == "flexible"));
        assert_eq!(
            request("outdate web 11"),
            Ok(Request::Outdate { minor: 11 })
        );
        assert_eq!(
            request("invalidate 10 --reset-bitmap=no"),
            Ok(Request::Invalidate {
                minor: 10,
                from: None,
                reset_bitmap: false
            })
        );
        assert_eq!(
            request("verify web 1 0 --start=4096s"),
            Ok(Request::Verify {
                resource: "web".into(),
                peer: 1,
                volume: 0,
                start_sector: Some(4096),
                stop_sector: None
            })
        );
        assert!(request("resize 10 --al-stripes=4").is_err());
    }

    #[test]
    fn every_command_is_a_request_or_a_query() {
        let queries = [
            "role",
            "cstate",
            "peer-role",
            "dstate",
            "udev",
            "show-gi",
            "get-gi",
            "check-resize",
        ];
        for verb in VERBS {
            let name = verb.name;
            if queries.contains(&name)
                || ["show", "status", "events2"].contains(&name)
                || name.starts_with("wait-")
            {
                continue;
            }
            let words: Vec<&str> = verb
                .arguments
                .iter()
                .filter(|a| !a.starts_with('['))
                .map(|a| {
                    if a.ends_with("-addr") {
                        "ipv4:127.0.0.1:7000"
                    } else {
                        "1"
                    }
                })
                .collect();
            assert!(
                request(&format!("{name} {}", words.join(" "))).is_ok(),
                "{name}"
            );
        }
    }
}
