//! Disks that do not answer and are given up.

use super::*;

const DETACH: Command = Command::Detach {
    volume: VOLUME,
    force: true,
    diskless: false,
};

#[test]
fn what_a_dead_disk_holds_ends_at_once_and_its_memory_stays() {
    on_both_rings(|ring| {
        let env = env();
        let Some(node) = Node::new(ring, &env) else {
            return;
        };
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(DISK_BYTES).unwrap();
        let path = file.path().to_str().unwrap();
        let plan = FaultPlan::of_path(path);
        node.attach(path);
        let mut port = node.port();
        port.write(0, &pattern(4096, 1)).unwrap();
        plan.hold().unwrap();
        let bytes = pattern(4096, 2);
        let ids = [
            port.submit(RequestKind::Write { fua: false }, 0, Some(&bytes), 4096),
            port.submit(RequestKind::Read, 0, None, 4096),
            port.submit(RequestKind::Write { fua: true }, 8, Some(&bytes), 4096),
        ];
        // Detached without waiting; the requests end with it, in whatever order.
        node.run(DETACH).unwrap();
        let mut ended = Vec::new();
        while ended.len() < ids.len() {
            match port.event() {
                PortEvent::Done(done) => {
                    assert_eq!(done.result, Err(RequestError::Io));
                    ended.push(done.id.0);
                }
                PortEvent::Changed(_) => {}
                other => panic!("{other:?}"),
            }
        }
        ended.sort_unstable();
        assert_eq!(ended, ids);
        // The memory of the operations is not given to others.
        let held = std::iter::from_fn(|| port.port.alloc(4096)).collect::<Vec<_>>();
        drop(held);
        let error = node.run(attach(path)).unwrap_err();
        assert!(error.text.contains("3 operations"), "{error}");
        // Nor can anybody else open it.
        assert!(crate::disk::Disk::open(path, None).is_err());
        plan.release().unwrap();
        // The ring returns the operations in a turn of its own time.
        while let Err(error) = node.run(attach(path)) {
            let known = ["operations of its last use", "in use by"];
            assert!(
                known.iter().any(|text| error.text.contains(text)),
                "{error}"
            );
            std::thread::yield_now();
        }
        assert!(
            port.read(0, 4096) == pattern(4096, 1),
            "what was given up did not happen"
        );
        node.run(Command::Detach {
            volume: VOLUME,
            force: false,
            diskless: false,
        })
        .unwrap();
    });
}

#[test]
fn a_close_that_waits_for_a_dead_disk_ends_when_it_is_given_up() {
    on_both_rings(|ring| {
        let env = env();
        let Some(node) = Node::new(ring, &env) else {
            return;
        };
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(DISK_BYTES).unwrap();
        let path = file.path().to_str().unwrap();
        let plan = FaultPlan::of_path(path);
        node.attach(path);
        let mut port = node.port();
        plan.hold().unwrap();
        let id = port.submit(RequestKind::Read, 0, None, 4096);
        let gentle = Command::Detach {
            volume: VOLUME,
            force: false,
            diskless: false,
        };
        let waits = node.shard.command(node.id, gentle);
        let forced = node.shard.command(node.id, DETACH);
        waits.recv().unwrap().unwrap();
        forced.recv().unwrap().unwrap();
        assert_eq!(port.finish(id), Err(RequestError::Io));
        plan.release().unwrap();
    });
}
