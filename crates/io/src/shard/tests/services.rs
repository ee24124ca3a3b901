//! Services on a shard, and a shard that ends early.

use super::*;

/// A service that counts bytes of a socket and the wakes it got.
struct Counter {
    fd: crate::ring::Fd,
    report: Sender<String>,
}

impl Service for Counter {
    fn start(&mut self, cx: &mut ServiceCx<'_>) {
        cx.poll(9, self.fd.clone(), libc::POLLIN);
    }

    fn completed(&mut self, cx: &mut ServiceCx<'_>, done: Done) {
        assert_eq!(done.token, 9);
        let mut bytes = [0; 64];
        let count = rustix::io::read(&*self.fd, &mut bytes).unwrap();
        self.report.send(format!("{count} bytes")).unwrap();
        cx.poll(9, self.fd.clone(), libc::POLLIN);
    }

    fn turn(&mut self, cx: &mut ServiceCx<'_>) {
        assert!(cx.pool().free_bytes() > 0);
        self.report.send("turn".to_owned()).unwrap();
    }
}

#[test]
fn a_service_lives_on_the_shard() {
    use std::io::Write;
    on_both_rings(|ring| {
        let env = env();
        let Some(node) = Node::new(ring, &env) else {
            return;
        };
        let (ours, mut theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        let fd = Arc::new(std::os::fd::OwnedFd::from(ours));
        let ((report, reports), (give, waker)) = (channel(), channel());
        let id = node.shard.add_service(move |waker| {
            give.send(waker).unwrap();
            Box::new(Counter { fd, report })
        });
        let waker = waker.recv().unwrap();
        theirs.write_all(b"abc").unwrap();
        assert_eq!(reports.recv().unwrap(), "3 bytes");
        waker.wake();
        assert_eq!(reports.recv().unwrap(), "turn");
        node.shard.remove_service(id.unwrap());
        assert!(reports.recv().is_err());
    });
}

#[test]
fn nobody_waits_for_a_shard_that_a_bug_has_ended() {
    on_both_rings(|ring| {
        let env = env();
        let Some(node) = Node::new(ring, &env) else {
            return;
        };
        let mut port = node.port();
        assert!(node.shard.is_running());
        let bug = Command::NewPeer {
            peer: NodeId(1),
            net: NetOptions::default(),
        };
        assert!(node.shard.command(node.id, bug).recv().is_err());
        assert!(port.events.recv().is_err());
        let (id, kind, sector) = (RequestId(1), RequestKind::Flush, Sector(0));
        let request = PortRequest {
            id,
            kind,
            sector,
            len: 0,
            buf: None,
            buf_offset: 0,
        };
        assert!(matches!(
            port.port.submit(request),
            Err(SubmitError::Gone(_))
        ));
        assert!(node.shard.snapshot(node.id).is_err());
        assert!(node.shard.stop().is_err());
        assert!(!node.shard.is_running());
    });
}
