//! Texts and exit codes for the return codes of commands (config-and-cli.md, 16).

/// What `drbdsetup` prints and returns for a failure.
pub(super) fn failure(object: &str, code: i32) -> (String, u8) {
    match code {
        102..=176 => (format!("{object}: Failure: ({code}) {}", text(code)), 10),
        -28..=-1 => {
            let exit = match code {
                -2 => 17,
                -16 => 5,
                -4 => 16,
                _ => 11,
            };
            (
                format!("{object}: State change failed: ({code}) {}", text(code)),
                exit,
            )
        }
        0 => (
            format!("{object}: State change failed: (0)unknown error."),
            11,
        ),
        _ => (
            format!(
                "{object}: Error code {code} unknown.\n\
                 You should update the drbd userland tools."
            ),
            20,
        ),
    }
}

/// The text of a return code.
pub(super) fn text(code: i32) -> &'static str {
    TEXTS
        .iter()
        .find(|(number, _)| *number == code)
        .map_or("unknown error", |(_, text)| text)
}

const TEXTS: &[(i32, &str)] = &[
    (101, "No further Information available."),
    (102, "Local address(port) already in use."),
    (103, "Remote address(port) already in use."),
    (104, "Can not open backing device."),
    (105, "Can not open meta device."),
    (107, "Lower device is not a block device."),
    (108, "Meta device is not a block device."),
    (111, "Low.dev. smaller than requested DRBD-dev. size."),
    (112, "Meta device too small."),
    (
        114,
        "Lower device is already claimed. This usually means it is mounted.",
    ),
    (
        115,
        "Meta device is already claimed. This usually means it is mounted.",
    ),
    (
        116,
        "Lower device / meta device / index combination invalid.",
    ),
    (
        118,
        "IO error(s) occurred during initial access to meta-data.",
    ),
    (
        119,
        "No valid meta-data signature found.\n\n\t==> Use 'drbdadm create-md res' to initialize meta-data area. <==\n",
    ),
    (
        120,
        "The 'cram-hmac-alg' you specified is not known in the kernel. (Maybe you need to modprobe it, or modprobe hmac?)",
    ),
    (121, "The 'cram-hmac-alg' you specified is not a digest."),
    (122, "kmalloc() failed. Out of memory?"),
    (123, "--discard-my-data not allowed when primary."),
    (124, "Device is attached to a disk (use detach first)"),
    (125, "Device has a net-config (use disconnect first)"),
    (126, "UnknownMandatoryTag"),
    (127, "Device minor not allocated"),
    (129, "Interrupted by Signal"),
    (130, "Resize not allowed during resync."),
    (131, "Need one Primary node to resize."),
    (132, "The resync-after minor number is invalid"),
    (133, "This would cause a resync-after dependency cycle"),
    (134, "Sync-pause flag is already set"),
    (135, "Sync-pause flag is already cleared"),
    (
        137,
        "Kernel does not know how to handle your request.\nMaybe API_VERSION mismatch?",
    ),
    (138, "Device does not have a disk-config"),
    (139, "Protocol C required"),
    (140, "vmalloc() failed. Out of memory?"),
    (
        141,
        "The 'data-integrity-alg' you specified is not known in the kernel. (Maybe you need to modprobe it, or modprobe hmac?)",
    ),
    (
        142,
        "The 'data-integrity-alg' you specified is not a digest.",
    ),
    (143, "Invalid cpu-mask."),
    (144, "CSUMSAlgNotAvail"),
    (145, "CSUMSAlgNotDigest"),
    (146, "VERIFYAlgNotAvail"),
    (147, "VERIFYAlgNotDigest"),
    (148, "Can not change csums-alg while resync is in progress"),
    (149, "Can not change verify-alg while online verify runs"),
    (
        150,
        "Can only attach to the data we lost last (see kernel log).",
    ),
    (151, "Need to be StandAlone"),
    (152, "Permission denied. CAP_SYS_ADMIN necessary"),
    (153, "Protocol version 93 required to use --assume-clean"),
    (
        154,
        "Fencing policy resource-and-stonith only with prot B or C allowed",
    ),
    (
        155,
        "on-congestion policy pull-ahead only with prot A allowed",
    ),
    (
        156,
        "Sync-pause flag is already cleared.\nNote: Resync pause caused by a local resync-after dependency.",
    ),
    (
        157,
        "Sync-pause flag is already cleared.\nNote: Resync pause caused by the peer node.",
    ),
    (158, "Unknown resource"),
    (159, "Resource still in use (delete all minors first)"),
    (160, "Minor still configured (down it first)"),
    (161, "Minor or volume exists already (delete it first)"),
    (162, "Invalid configuration request"),
    (
        163,
        "Prot version 100 required in order to change\nthese network options while connected",
    ),
    (
        164,
        "Can not clear allow_two_primaries as long as\nthere a primaries on both sides",
    ),
    (
        165,
        "Unclean meta-data found.\nYou need to 'drbdadm apply-al res'",
    ),
    (166, "DRBD need to be connected for online MD layout change"),
    (167, "Resulting AL area too big"),
    (168, "Resulting AL are too small"),
    (
        169,
        "Resulting AL does not fit into available meta data space",
    ),
    (
        170,
        "Implicit device shrinking not allowed. See kernel log.",
    ),
    (171, "Invalid peer-node-id"),
    (
        172,
        "Failed to create transport (drbd_transport_xxx module missing?)",
    ),
    (
        173,
        "Combination of local address(port) and remote address(port) already in use",
    ),
    (174, "Already exists"),
    (
        175,
        "A higher DRBD protocol level is required for this operation",
    ),
    (176, "Path collides with existing path"),
    (-1, "Multiple primaries not allowed by config"),
    (-2, "Need access to UpToDate data"),
    (-4, "Can not resync without local disk"),
    (-5, "Can not resync without remote disk"),
    (-6, "Refusing to be Outdated while Connected"),
    (-7, "Refusing to be Primary while peer is not outdated"),
    (-8, "Can not start OV/resync since it is already active"),
    (-9, "Can not disconnect a StandAlone device"),
    (-10, "State change was refused by peer node"),
    (
        -11,
        "Device is diskless, the requested operation requires a disk",
    ),
    (-12, "Device is held open by someone"),
    (-13, "Have no net/connection configuration"),
    (-14, "Need a verify algorithm to start online verify"),
    (-15, "State change requires a connection"),
    (-16, "Disk state is lower than outdated"),
    (-17, "Peer does not support protocol"),
    (-18, "In transient state, retry after next state change"),
    (-19, "Concurrent state changes detected and aborted"),
    (-20, "Other vol primary on peer not allowed by config"),
    (-21, "Interrupted state change"),
    (
        -22,
        "Peer may not become primary while device is opened read-only",
    ),
    (-23, "Timeout in operation"),
    (
        -24,
        "Primary nodes must be strongly connected among each other",
    ),
    (-25, "No quorum"),
    (-26, "Intentional diskless peer may not attach a disk"),
    (-27, "Disconnect chosen in handshake"),
    (-28, "Retry chosen in handshake"),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scripts_find_the_texts_and_exit_codes_they_match() {
        assert_eq!(
            failure("web", -2),
            (
                "web: State change failed: (-2) Need access to UpToDate data".into(),
                17
            )
        );
        assert_eq!(
            failure("web", -12),
            (
                "web: State change failed: (-12) Device is held open by someone".into(),
                11
            )
        );
        assert_eq!(
            failure("10", 158),
            ("10: Failure: (158) Unknown resource".into(), 10)
        );
        assert_eq!(failure("10", -16).1, 5);
        assert_eq!(failure("10", -4).1, 16);
        assert_eq!(failure("10", 999).1, 20);
    }

    #[test]
    fn every_code_of_the_core_has_a_text() {
        for code in (-28..=-1).filter(|code| *code != -3) {
            assert_ne!(text(code), "unknown error", "{code}");
        }
        for code in [
            104, 105, 111, 112, 118, 119, 120, 123, 124, 125, 127, 134, 135, 138, 141,
        ]
        .into_iter()
        .chain([150, 151, 158, 159, 161, 162, 165, 170, 171, 174, 175])
        {
            assert_ne!(text(code), "unknown error", "{code}");
        }
    }
}
