//! Each claim holds for both implementations.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use super::{Done, Errno, Fd, Memory, Op, Ring, RingKind, SendList, Wait, open};
use crate::pool::{BufRef, IoBuf};

fn both(claim: impl Fn(&mut dyn Ring)) {
    for kind in [RingKind::Epoll, RingKind::Uring] {
        match open(Some(kind)) {
            Ok(mut ring) => {
                assert_eq!(ring.kind(), kind);
                claim(&mut *ring);
                assert_eq!(ring.in_flight(), 0);
            }
            Err(error) => eprintln!("skipped: {kind:?} ({error})"),
        }
    }
}

/// Turns until an operation completes.
fn next(ring: &mut dyn Ring) -> Done {
    loop {
        if let Some(done) = ring.pop() {
            return done;
        }
        ring.turn(Wait::Forever).unwrap();
    }
}

fn buffer(fill: u8) -> BufRef {
    let mut buf = IoBuf::standalone(8192).unwrap();
    buf.fill(fill);
    buf.share()
}

fn pair() -> (Fd, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let ours = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let theirs = listener.accept().unwrap().0;
    (Arc::new(OwnedFd::from(ours)), theirs)
}

fn recv(fd: &Fd, len: usize) -> Op {
    Op::Recv {
        fd: fd.clone(),
        into: Memory::Bytes(vec![0; len]),
        start: 0,
        len: len as u32,
    }
}

#[test]
fn a_file_keeps_what_was_written() {
    both(|ring| {
        let fd: Fd = Arc::new(OwnedFd::from(tempfile::tempfile().unwrap()));
        for (n, durable) in [(0u64, false), (1, true)] {
            let write = Op::Write {
                fd: fd.clone(),
                buf: buffer(n as u8 + 5),
                start: 0,
                len: 4096,
                offset: n * 4096,
                durable,
            };
            ring.push(n, write);
        }
        let mut tokens = [next(ring), next(ring)].map(|done| {
            assert_eq!(done.result, Ok(4096));
            done.token
        });
        tokens.sort_unstable();
        assert_eq!(tokens, [0, 1]);
        ring.push(2, Op::Sync { fd: fd.clone() });
        assert_eq!(next(ring).result, Ok(0));
        let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        ring.push(
            3,
            Op::Fallocate {
                fd: fd.clone(),
                mode,
                offset: 0,
                len: 4096,
            },
        );
        let punched = next(ring).result.is_ok();
        let buf = buffer(0xEE);
        ring.push(
            4,
            Op::Read {
                fd,
                buf: buf.clone(),
                start: 96,
                len: 8096,
                offset: 4000,
            },
        );
        // The file ends at 8192, so the read is short.
        assert_eq!(next(ring).result, Ok(4192));
        let first = if punched { 0 } else { 5 };
        buf.with_bytes(0, 8192, |bytes| {
            assert!(bytes[..96].iter().all(|byte| *byte == 0xEE));
            assert!(bytes[96..192].iter().all(|byte| *byte == first));
            assert!(bytes[192..4288].iter().all(|byte| *byte == 6));
            assert!(bytes[4288..].iter().all(|byte| *byte == 0xEE));
        });
    });
}

#[test]
fn an_error_comes_with_its_number() {
    both(|ring| {
        let fd: Fd = Arc::new(OwnedFd::from(std::fs::File::open("/").unwrap()));
        ring.push(
            7,
            Op::Read {
                fd,
                buf: buffer(0),
                start: 0,
                len: 512,
                offset: 0,
            },
        );
        let done = next(ring);
        assert_eq!((done.token, done.result), (7, Err(Errno(libc::EISDIR))));
    });
}

#[test]
fn a_receive_waits_for_bytes_and_sees_the_end() {
    both(|ring| {
        let (ours, mut theirs) = pair();
        ring.push(1, recv(&ours, 100));
        ring.turn(Wait::No).unwrap();
        assert!(ring.pop().is_none());
        theirs.write_all(b"hello").unwrap();
        let Done {
            op:
                Op::Recv {
                    into: Memory::Bytes(bytes),
                    ..
                },
            result,
            ..
        } = next(ring)
        else {
            panic!("a receive gives its memory back")
        };
        assert_eq!((result, &bytes[..6]), (Ok(5), &b"hello\0"[..]));
        drop(theirs);
        ring.push(2, recv(&ours, 100));
        assert_eq!(next(ring).result, Ok(0));
    });
}

#[test]
fn a_gathered_send_goes_on_when_the_peer_reads() {
    both(|ring| {
        let (ours, mut theirs) = pair();
        let block = {
            let mut block = IoBuf::standalone(1 << 20).unwrap();
            block
                .iter_mut()
                .enumerate()
                .for_each(|(n, byte)| *byte = (n / 7) as u8);
            block.share()
        };
        let mut list = SendList::default();
        let mut expected = Vec::new();
        for n in 0..20u8 {
            list.push_head(|head| -> Result<(), ()> {
                head.extend_from_slice(&[n; 16]);
                Ok(())
            })
            .unwrap();
            list.push_buf(block.clone(), 512, (1 << 20) - 512);
            expected.extend_from_slice(&[n; 16]);
            block.with_bytes(512, (1 << 20) - 512, |bytes| {
                expected.extend_from_slice(bytes)
            });
        }
        // More than the socket takes at once: the reader starts only when the send has stalled.
        ring.push(
            1,
            Op::Send {
                fd: ours.clone(),
                list,
            },
        );
        let mut reader = None;
        loop {
            let done = match ring.pop() {
                Some(done) => done,
                None => {
                    ring.turn(Wait::No).unwrap();
                    match ring.pop() {
                        Some(done) => done,
                        None => {
                            let mut theirs = theirs.try_clone().unwrap();
                            let len = expected.len();
                            reader.get_or_insert_with(|| {
                                std::thread::spawn(move || {
                                    let mut bytes = vec![0; len];
                                    theirs.read_exact(&mut bytes).unwrap();
                                    bytes
                                })
                            });
                            next(ring)
                        }
                    }
                }
            };
            let Op::Send { fd, mut list } = done.op else {
                panic!("a send comes back")
            };
            list.advance(done.result.unwrap() as usize);
            if list.left() == 0 {
                break;
            }
            ring.push(1, Op::Send { fd, list });
        }
        match reader {
            Some(reader) => assert!(reader.join().unwrap() == expected),
            None => {
                let mut bytes = vec![0; expected.len()];
                theirs.read_exact(&mut bytes).unwrap();
                assert!(bytes == expected);
            }
        }
    });
}

#[test]
fn a_connect_succeeds_or_says_why_not() {
    both(|ring| {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let socket = |ring: &mut dyn Ring, token| {
            let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None);
            let fd: Fd = Arc::new(OwnedFd::from(socket.unwrap()));
            let address = Box::new(socket2::SockAddr::from(address));
            ring.push(
                token,
                Op::Connect {
                    fd: fd.clone(),
                    address,
                },
            );
            fd
        };
        let fd = socket(ring, 1);
        assert_eq!(next(ring).result, Ok(0));
        let mut accepted = listener.accept().unwrap().0;
        accepted.write_all(b"x").unwrap();
        ring.push(2, recv(&fd, 1));
        assert_eq!(next(ring).result, Ok(1));
        drop(listener);
        socket(ring, 3);
        assert_eq!(next(ring).result, Err(Errno(libc::ECONNREFUSED)));
    });
}

#[test]
fn a_cancelled_wait_completes_and_gives_its_memory_back() {
    both(|ring| {
        let (ours, _theirs) = pair();
        let key = ring.push(9, recv(&ours, 10));
        ring.turn(Wait::No).unwrap();
        ring.cancel(key);
        let done = next(ring);
        assert_eq!((done.token, done.result), (9, Err(Errno::CANCELED)));
        assert!(
            matches!(done.op, Op::Recv { into: Memory::Bytes(bytes), .. } if bytes.len() == 10)
        );
        ring.cancel(key);
    });
}

#[test]
fn a_poll_reports_readiness() {
    both(|ring| {
        let (ours, mut theirs) = pair();
        ring.push(
            1,
            Op::Poll {
                fd: ours.clone(),
                events: libc::POLLIN,
            },
        );
        ring.turn(Wait::No).unwrap();
        assert!(ring.pop().is_none());
        theirs.write_all(b"!").unwrap();
        let events = next(ring).result.unwrap();
        assert_ne!(events & libc::POLLIN as u32, 0);
        // Still readable: a second poll sees it at once, although no new byte came.
        ring.push(
            2,
            Op::Poll {
                fd: ours,
                events: libc::POLLIN,
            },
        );
        assert_eq!(next(ring).token, 2);
    });
}

#[test]
fn closures_run_elsewhere_and_a_waker_ends_the_wait() {
    both(|ring| {
        let here = std::thread::current().id();
        for n in 0..20u32 {
            let work = move || {
                assert_ne!(std::thread::current().id(), here);
                if n.is_multiple_of(2) {
                    Ok(n)
                } else {
                    Err(Errno(n as i32))
                }
            };
            ring.push(u64::from(n), Op::Blocking(Some(Box::new(work))));
        }
        let mut seen = [false; 20];
        for _ in 0..20 {
            let done = next(ring);
            let n = done.token as u32;
            assert_eq!(
                done.result,
                if n.is_multiple_of(2) {
                    Ok(n)
                } else {
                    Err(Errno(n as i32))
                }
            );
            seen[n as usize] = true;
        }
        assert_eq!(seen, [true; 20]);
        let waker = ring.waker();
        let thread = std::thread::spawn(move || waker.wake());
        ring.turn(Wait::Forever).unwrap();
        thread.join().unwrap();
        ring.turn(Wait::AtMost(Duration::from_micros(100))).unwrap();
        assert!(ring.pop().is_none());
    });
}

#[test]
fn a_ring_that_ends_takes_its_operations_with_it() {
    for kind in [RingKind::Epoll, RingKind::Uring] {
        let Ok(mut ring) = open(Some(kind)) else {
            eprintln!("skipped: {kind:?}");
            continue;
        };
        let (ours, mut theirs) = pair();
        let buf = buffer(1);
        let into = Memory::Buf(buf.clone());
        ring.push(
            1,
            Op::Recv {
                fd: ours,
                into,
                start: 0,
                len: 8192,
            },
        );
        ring.turn(Wait::No).unwrap();
        drop(ring);
        // The descriptor and the memory are free again, and the peer sees the end.
        assert!(buf.try_into_buf().is_ok());
        assert_eq!(theirs.read(&mut [0]).unwrap(), 0);
    }
}

#[test]
fn more_operations_than_the_queue_holds_all_complete() {
    both(|ring| {
        let fd: Fd = Arc::new(OwnedFd::from(tempfile::tempfile().unwrap()));
        let buf = buffer(3);
        for n in 0..3000u64 {
            let (fd, buf) = (fd.clone(), buf.clone());
            let len = 512;
            ring.push(
                n,
                Op::Write {
                    fd,
                    buf,
                    start: 0,
                    len,
                    offset: n * 512,
                    durable: false,
                },
            );
        }
        let mut sum = 0;
        for _ in 0..3000 {
            let done = next(ring);
            assert_eq!(done.result, Ok(512));
            sum += done.token;
        }
        assert_eq!(sum, 2999 * 3000 / 2);
    });
}
