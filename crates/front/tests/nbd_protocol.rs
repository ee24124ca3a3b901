//! The NBD server against a client of our own: what the usual programs do not send (extended
//! headers, broken requests, disappearing clients) and garbage.

mod support;

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::atomic::Ordering;
use std::time::Duration;

use lockstep_core::command::{CommandError, ErrorCode};
use lockstep_core::event::RequestError;
use lockstep_front::nbd::NbdLimits;
use lockstep_front::ram::{Hold, RamVolume, Runs};
use support::TestServer;

const MIB: usize = 1 << 20;
const EINVAL: u32 = 22;
const ENOSPC: u32 = 28;
const FUA: u16 = 1;
const DF: u16 = 4;
const FAST_ZERO: u16 = 16;
const PAYLOAD_LEN: u16 = 32;
const READ: u16 = 0;
const WRITE: u16 = 1;
const DISC: u16 = 2;
const FLUSH: u16 = 3;
const TRIM: u16 = 4;
const CACHE: u16 = 5;
const WRITE_ZEROES: u16 = 6;
const BLOCK_STATUS: u16 = 7;

#[derive(Clone, Copy, PartialEq)]
enum Style {
    Simple,
    Structured,
    Extended,
}

struct Client {
    stream: UnixStream,
    style: Style,
    cookie: u64,
}

/// One chunk of a reply: flags, type, cookie, body.
struct Chunk {
    last: bool,
    kind: u16,
    cookie: u64,
    body: Vec<u8>,
}

impl Client {
    fn raw(server: &TestServer) -> UnixStream {
        let stream = UnixStream::connect(&server.socket).unwrap();
        stream
            .set_read_timeout(Some(Duration::from_secs(30)))
            .unwrap();
        stream
    }

    fn connect(server: &TestServer, style: Style, export: &str) -> Client {
        let mut client = Client {
            stream: Self::raw(server),
            style,
            cookie: 0,
        };
        let mut greeting = [0; 18];
        client.stream.read_exact(&mut greeting).unwrap();
        assert_eq!(&greeting[..16], b"NBDMAGICIHAVEOPT");
        client.stream.write_all(&3u32.to_be_bytes()).unwrap();
        match style {
            Style::Simple => {}
            Style::Structured => assert_eq!(client.option(8, &[])[0].0, 1),
            Style::Extended => assert_eq!(client.option(11, &[])[0].0, 1),
        }
        if style != Style::Simple {
            let mut query = name(export);
            query.extend_from_slice(&1u32.to_be_bytes());
            query.extend_from_slice(&name("base:allocation"));
            assert_eq!(client.option(10, &query).len(), 2);
        }
        let mut go = name(export);
        go.extend_from_slice(&[0, 1, 0, 3]);
        assert_eq!(client.option(7, &go).last().unwrap().0, 1);
        client
    }

    /// Sends an option and returns type and body of each reply.
    fn option(&mut self, number: u32, data: &[u8]) -> Vec<(u32, Vec<u8>)> {
        let mut bytes = b"IHAVEOPT".to_vec();
        bytes.extend_from_slice(&number.to_be_bytes());
        bytes.extend_from_slice(&(data.len() as u32).to_be_bytes());
        bytes.extend_from_slice(data);
        self.stream.write_all(&bytes).unwrap();
        let mut replies = Vec::new();
        loop {
            let mut head = [0; 20];
            self.stream.read_exact(&mut head).unwrap();
            let kind = u32::from_be_bytes(head[12..16].try_into().unwrap());
            let mut body = vec![0; u32::from_be_bytes(head[16..].try_into().unwrap()) as usize];
            self.stream.read_exact(&mut body).unwrap();
            replies.push((kind, body));
            if kind == 1 || kind >> 31 == 1 {
                return replies;
            }
        }
    }

    fn send(&mut self, command: u16, flags: u16, offset: u64, length: u64, data: &[u8]) -> u64 {
        self.cookie += 1;
        let mut bytes = match self.style {
            Style::Simple | Style::Structured => 0x2560_9513u32,
            Style::Extended => 0x21e4_1c71,
        }
        .to_be_bytes()
        .to_vec();
        let flags = match (self.style, command) {
            (Style::Extended, WRITE) => flags | PAYLOAD_LEN,
            _ => flags,
        };
        bytes.extend_from_slice(&flags.to_be_bytes());
        bytes.extend_from_slice(&command.to_be_bytes());
        bytes.extend_from_slice(&self.cookie.to_be_bytes());
        bytes.extend_from_slice(&offset.to_be_bytes());
        match self.style {
            Style::Extended => bytes.extend_from_slice(&length.to_be_bytes()),
            _ => bytes.extend_from_slice(&(length as u32).to_be_bytes()),
        }
        bytes.extend_from_slice(data);
        self.stream.write_all(&bytes).unwrap();
        self.cookie
    }

    fn chunk(&mut self) -> Chunk {
        let len = if self.style == Style::Extended {
            32
        } else {
            20
        };
        let mut head = vec![0; len];
        self.stream.read_exact(&mut head).unwrap();
        let magic = if self.style == Style::Extended {
            0x6e8a_278cu32
        } else {
            0x668e_33ef
        };
        assert_eq!(head[..4], magic.to_be_bytes());
        let body_len = match self.style {
            Style::Extended => u64::from_be_bytes(head[24..].try_into().unwrap()) as usize,
            _ => u32::from_be_bytes(head[16..].try_into().unwrap()) as usize,
        };
        let mut body = vec![0; body_len];
        self.stream.read_exact(&mut body).unwrap();
        Chunk {
            last: head[5] & 1 == 1,
            kind: u16::from_be_bytes([head[6], head[7]]),
            cookie: u64::from_be_bytes(head[8..16].try_into().unwrap()),
            body,
        }
    }

    /// Reads the reply to one request that returns no data: its error number, 0 for none.
    fn status(&mut self) -> u32 {
        if self.style == Style::Simple {
            let mut head = [0; 16];
            self.stream.read_exact(&mut head).unwrap();
            assert_eq!(head[..4], 0x6744_6698u32.to_be_bytes());
            return u32::from_be_bytes(head[4..8].try_into().unwrap());
        }
        let chunk = self.chunk();
        assert!(chunk.last && chunk.cookie == self.cookie);
        match chunk.kind {
            0 => 0,
            0x8001 => u32::from_be_bytes(chunk.body[..4].try_into().unwrap()),
            kind => panic!("unexpected chunk type {kind}"),
        }
    }

    fn ask(&mut self, command: u16, flags: u16, offset: u64, length: u64, data: &[u8]) -> u32 {
        self.send(command, flags, offset, length, data);
        self.status()
    }

    /// Reads the bytes of one read, however they are cut.
    fn read(&mut self, offset: u64, len: usize) -> Result<Vec<u8>, u32> {
        self.send(READ, 0, offset, len as u64, &[]);
        let mut data = vec![0; len];
        if self.style == Style::Simple {
            match self.status() {
                0 => self.stream.read_exact(&mut data).unwrap(),
                error => return Err(error),
            }
            return Ok(data);
        }
        let mut covered = 0;
        loop {
            let chunk = self.chunk();
            assert_eq!(chunk.cookie, self.cookie);
            match chunk.kind {
                1 => {
                    let at = u64::from_be_bytes(chunk.body[..8].try_into().unwrap()) - offset;
                    let bytes = &chunk.body[8..];
                    data[at as usize..at as usize + bytes.len()].copy_from_slice(bytes);
                    covered += bytes.len();
                }
                kind => {
                    assert_eq!(kind, 0x8001);
                    return Err(u32::from_be_bytes(chunk.body[..4].try_into().unwrap()));
                }
            }
            if chunk.last {
                assert_eq!(covered, len, "the chunks cover the request");
                return Ok(data);
            }
        }
    }
}

fn name(text: &str) -> Vec<u8> {
    let mut bytes = (text.len() as u32).to_be_bytes().to_vec();
    bytes.extend_from_slice(text.as_bytes());
    bytes
}

fn setup(size: usize) -> (RamVolume, TestServer) {
    let ram = RamVolume::new(size as u64, Runs::OwnThread).unwrap();
    let server = TestServer::start(&[("r0/0", &ram)], NbdLimits::default());
    (ram, server)
}

fn pattern(len: usize, seed: u8) -> Vec<u8> {
    (0..len).map(|at| (at / 509) as u8 ^ seed).collect()
}

#[test]
fn all_three_header_styles_carry_all_commands() {
    for style in [Style::Simple, Style::Structured, Style::Extended] {
        let (ram, server) = setup(40 * MIB);
        let mut client = Client::connect(&server, style, "r0/0");
        let data = pattern(5 * MIB, 3);
        assert_eq!(client.ask(WRITE, 0, 512, data.len() as u64, &data), 0);
        assert!(client.read(512, data.len()).unwrap() == data);
        assert_eq!(client.ask(WRITE, FUA, 0, 512, &[9; 512]), 0);
        assert_eq!(client.read(0, 512).unwrap(), [9; 512]);
        assert_eq!(client.ask(FLUSH, 0, 0, 0, &[]), 0);
        assert_eq!(client.ask(CACHE, 0, 0, 4096, &[]), 0);
        assert_eq!(client.ask(WRITE_ZEROES, FUA | FAST_ZERO, 512, 4096, &[]), 0);
        assert_eq!(client.read(512, 4096).unwrap(), [0; 4096]);
        assert_eq!(client.ask(TRIM, 0, 0, 40 * MIB as u64, &[]), 0);
        assert_eq!(client.read(0, 512).unwrap(), [0; 512]);
        let counts = ram.counts();
        assert_eq!(counts.fua_writes.load(Ordering::Relaxed), 1);
        assert_eq!(
            counts.flushes.load(Ordering::Relaxed),
            2,
            "one for the zeroes with FUA"
        );
        client.send(DISC, 0, 0, 0, &[]);
        assert_eq!(
            client.stream.read(&mut [0]).unwrap(),
            0,
            "goodbye closes the connection"
        );
    }
}

#[test]
fn block_status_says_that_all_is_data() {
    let (_ram, server) = setup(8 * MIB);
    let mut client = Client::connect(&server, Style::Structured, "r0/0");
    client.send(BLOCK_STATUS, 0, 4096, 8192, &[]);
    let chunk = client.chunk();
    assert_eq!((chunk.kind, chunk.last), (5, true));
    assert_eq!(chunk.body, [0, 0, 0, 1, 0, 0, 32, 0, 0, 0, 0, 0]);
    let mut client = Client::connect(&server, Style::Extended, "r0/0");
    client.send(BLOCK_STATUS, 0, 0, 8 * MIB as u64, &[]);
    let chunk = client.chunk();
    assert_eq!((chunk.kind, chunk.body.len()), (6, 24));
    let mut client = Client::connect(&server, Style::Simple, "r0/0");
    assert_eq!(client.ask(BLOCK_STATUS, 0, 0, 4096, &[]), EINVAL);
}

#[test]
fn wrong_requests_fail_alone_and_the_connection_lives() {
    let size = 8 * MIB as u64;
    for style in [Style::Simple, Style::Structured, Style::Extended] {
        let (ram, server) = setup(size as usize);
        let mut client = Client::connect(&server, style, "r0/0");
        let block = [1; 512];
        assert_eq!(client.read(1, 512), Err(EINVAL), "unaligned offset");
        assert_eq!(client.read(0, 100), Err(EINVAL), "unaligned length");
        assert_eq!(client.read(size, 512), Err(EINVAL), "beyond the end");
        assert_eq!(
            client.read(u64::MAX - 511, 512),
            Err(EINVAL),
            "beyond all ends"
        );
        assert_eq!(client.ask(WRITE, 0, 1, 512, &block), EINVAL);
        assert_eq!(client.ask(WRITE, 0, size, 512, &block), ENOSPC);
        assert_eq!(client.ask(WRITE, 0, size - 512, 1024, &[1; 1024]), ENOSPC);
        assert_eq!(
            client.ask(WRITE, DF, 0, 512, &block),
            EINVAL,
            "a flag of another command"
        );
        assert_eq!(client.ask(WRITE_ZEROES, 0, size, 512, &[]), ENOSPC);
        assert_eq!(client.ask(TRIM, 0, size, 512, &[]), EINVAL);
        assert_eq!(client.ask(77, 0, 0, 512, &[]), EINVAL, "unknown command");
        assert_eq!(
            client.ask(CACHE, 0x8000, 0, 512, &[]),
            EINVAL,
            "unknown flag"
        );
        if style == Style::Extended {
            assert_eq!(
                client.ask(TRIM, PAYLOAD_LEN, 0, 512, &block),
                EINVAL,
                "payload skipped"
            );
        }
        assert_eq!(
            client.ask(WRITE, 0, size - 512, 512, &block),
            0,
            "still in step"
        );
        assert_eq!(client.read(size - 512, 512).unwrap(), block);
        assert_eq!(ram.counts().writes.load(Ordering::Relaxed), 1);

        for (error, number) in [
            (RequestError::Io, 5),
            (RequestError::ReadOnly, 1),
            (RequestError::NoMedium, 108),
            (RequestError::Unsupported, 95),
            (RequestError::Invalid, EINVAL),
        ] {
            ram.fail_requests(Some(error));
            assert_eq!(client.ask(WRITE, 0, 0, 512, &block), number);
            let large = vec![1; 3 * MIB];
            assert_eq!(client.ask(WRITE, 0, 0, large.len() as u64, &large), number);
            assert_eq!(client.read(0, 512), Err(number));
        }
        ram.fail_requests(None);
        assert_eq!(client.ask(FLUSH, 0, 0, 0, &[]), 0);

        // Without data for now: the volume itself says what becomes of a request.
        ram.change(|properties| properties.size_bytes = 0);
        ram.fail_requests(Some(RequestError::Io));
        assert_eq!(client.ask(WRITE, 0, 0, 512, &block), 5);
    }
}

#[test]
fn many_requests_run_at_the_same_time_within_the_limits() {
    let ram = RamVolume::new(64 << 20, Runs::OwnThread).unwrap();
    let limits = NbdLimits {
        requests_per_connection: 8,
        bytes_per_connection: 64 << 10,
        ..NbdLimits::default()
    };
    let server = TestServer::start(&[("r0/0", &ram)], limits);
    let mut client = Client::connect(&server, Style::Structured, "r0/0");
    let mut writer = client.stream.try_clone().unwrap();
    // 500 reads of 64 KiB, none of whose replies is taken before all are asked for.
    let mut asked = Vec::new();
    for cookie in 0..500u64 {
        asked.extend_from_slice(&0x2560_9513u32.to_be_bytes());
        asked.extend_from_slice(&[0; 4]);
        asked.extend_from_slice(&cookie.to_be_bytes());
        asked.extend_from_slice(&(cookie * 65536).to_be_bytes());
        asked.extend_from_slice(&65536u32.to_be_bytes());
    }
    let sender = std::thread::spawn(move || writer.write_all(&asked).unwrap());
    let mut seen = vec![false; 500];
    for _ in 0..500 {
        let chunk = client.chunk();
        assert_eq!(
            (chunk.kind, chunk.body.len(), chunk.last),
            (1, 8 + 65536, true)
        );
        assert!(!std::mem::replace(&mut seen[chunk.cookie as usize], true));
    }
    sender.join().unwrap();
}

#[test]
fn a_small_pool_and_a_full_port_slow_requests_down_but_lose_none() {
    let properties = RamVolume::new(8 << 20, Runs::Inline).unwrap().properties();
    let ram = RamVolume::with(properties, Runs::OwnThread, 256 << 10, 2).unwrap();
    ram.change(|properties| properties.max_request_bytes = 16 << 10);
    let server = TestServer::start(&[("r0/0", &ram)], NbdLimits::default());
    let threads: Vec<_> = (0..4u64)
        .map(|number| {
            let mut client = Client::connect(&server, Style::Structured, "r0/0");
            std::thread::spawn(move || {
                let data = pattern(2 * MIB, number as u8);
                let offset = number * 2 * MIB as u64;
                for _ in 0..5 {
                    assert_eq!(client.ask(WRITE, 0, offset, data.len() as u64, &data), 0);
                    assert!(client.read(offset, data.len()).unwrap() == data);
                }
            })
        })
        .collect();
    for thread in threads {
        thread.join().unwrap();
    }
}

#[test]
fn a_client_that_vanishes_in_the_middle_leaves_nothing_behind() {
    let (ram, server) = setup(8 * MIB);
    ram.hold(Hold::Stopped);
    let mut clients = Vec::new();
    // `open` is held too, so the clients only get as far as asking for it.
    for _ in 0..3 {
        let mut stream = Client::raw(&server);
        stream.write_all(&3u32.to_be_bytes()).unwrap();
        let mut go = name("r0/0");
        go.extend_from_slice(&[0, 0]);
        let mut bytes = b"IHAVEOPT\0\0\0\x07".to_vec();
        bytes.extend_from_slice(&(go.len() as u32).to_be_bytes());
        bytes.extend_from_slice(&go);
        stream.write_all(&bytes).unwrap();
        clients.push(stream);
    }
    drop(clients);
    ram.hold(Hold::Running);

    let mut client = Client::connect(&server, Style::Structured, "r0/0");
    ram.hold(Hold::Stopped);
    for block in 0..32 {
        client.send(READ, 0, block * 4096, 4096, &[]);
    }
    client.send(WRITE, 0, 0, 1 << 20, &[7; 4096]);
    drop(client);
    ram.hold(Hold::Running);

    let mut client = Client::connect(&server, Style::Structured, "r0/0");
    assert_eq!(
        client.read(0, 512).unwrap(),
        [0; 512],
        "half a write is no write"
    );
    assert!(server.server.user_count("r0/0") >= 1);
    drop(server);
    assert_eq!(ram.counts().opened.load(Ordering::SeqCst), 0);
}

#[test]
fn a_removed_volume_and_a_stopping_server_end_their_connections() {
    let (ram, server) = setup(8 * MIB);
    let mut client = Client::connect(&server, Style::Structured, "r0/0");
    assert_eq!(client.ask(WRITE, 0, 0, 512, &[1; 512]), 0);
    ram.remove();
    assert_eq!(
        client.stream.read(&mut [0; 64]).unwrap(),
        0,
        "closed when the volume went"
    );

    let (_ram, server2) = setup(8 * MIB);
    let mut client = Client::connect(&server2, Style::Structured, "r0/0");
    assert_eq!(client.ask(FLUSH, 0, 0, 0, &[]), 0);
    let path = server2.socket.clone();
    server2.server.stop();
    assert_eq!(client.stream.read(&mut [0; 64]).unwrap(), 0);
    assert!(!path.exists(), "the socket's file is removed");
    drop(server);
}

#[test]
fn connections_over_the_limit_are_closed_at_once() {
    let ram = RamVolume::new(1 << 20, Runs::OwnThread).unwrap();
    let limits = NbdLimits {
        connections: 2,
        ..NbdLimits::default()
    };
    let server = TestServer::start(&[("r0/0", &ram)], limits);
    let first = Client::connect(&server, Style::Simple, "r0/0");
    let _second = Client::connect(&server, Style::Simple, "r0/0");
    assert_eq!(Client::raw(&server).read(&mut [0]).unwrap(), 0);
    drop(first);
    // The place becomes free when the server has seen the end.
    let mut byte = [0];
    while Client::raw(&server).read(&mut byte).unwrap() == 0 {}
}

#[test]
fn a_handshake_that_takes_too_long_is_ended() {
    let ram = RamVolume::new(1 << 20, Runs::OwnThread).unwrap();
    let limits = NbdLimits {
        handshake_timeout: Duration::from_millis(50),
        ..NbdLimits::default()
    };
    let server = TestServer::start(&[("r0/0", &ram)], limits);
    let mut rest = Vec::new();
    Client::raw(&server).read_to_end(&mut rest).unwrap();
    assert_eq!(rest.len(), 18, "the greeting, then the end");
}

#[test]
fn a_second_server_does_not_take_a_living_socket_but_a_dead_one() {
    let (ram, server) = setup(1 << 20);
    let exports = || {
        let volumes = [("r0/0".to_string(), ram.clone())].into();
        std::sync::Arc::new(support::RamExports(volumes))
    };
    let listen = [lockstep_front::nbd::Listen::Unix(server.socket.clone())];
    let start = || lockstep_front::nbd::NbdServer::start(exports(), &listen, NbdLimits::default());
    let error = start().err().unwrap().to_string();
    assert!(error.contains("another process listens"), "{error}");
    let dir = tempfile::tempdir().unwrap();
    let dead = dir.path().join("dead");
    drop(std::os::unix::net::UnixListener::bind(&dead).unwrap());
    assert!(dead.exists());
    let listen = [lockstep_front::nbd::Listen::Unix(dead.clone())];
    let second =
        lockstep_front::nbd::NbdServer::start(exports(), &listen, NbdLimits::default()).unwrap();
    UnixStream::connect(&dead).unwrap();
    second.stop();
}

/// A few thousand mutated conversations: no panic, no hang, the server still serves.
#[test]
fn garbage_neither_stops_the_server_nor_grows_it() {
    let (_ram, server) = setup(4 * MIB);
    let mut valid = 3u32.to_be_bytes().to_vec();
    let mut add = |number: u32, data: &[u8]| {
        valid.extend_from_slice(b"IHAVEOPT");
        valid.extend_from_slice(&number.to_be_bytes());
        valid.extend_from_slice(&(data.len() as u32).to_be_bytes());
        valid.extend_from_slice(data);
    };
    add(8, &[]);
    let mut query = name("r0/0");
    query.extend_from_slice(&1u32.to_be_bytes());
    query.extend_from_slice(&name("base:allocation"));
    add(10, &query);
    add(3, &[]);
    let mut go = name("r0/0");
    go.extend_from_slice(&[0, 1, 0, 3]);
    add(7, &go);
    for (command, len) in [(0u16, 4096u32), (1, 512), (6, 4096), (7, 4096), (3, 0)] {
        valid.extend_from_slice(&0x2560_9513u32.to_be_bytes());
        valid.extend_from_slice(&[0, 0]);
        valid.extend_from_slice(&command.to_be_bytes());
        valid.extend_from_slice(&[0; 16]);
        valid.extend_from_slice(&len.to_be_bytes());
        if command == 1 {
            valid.extend_from_slice(&[5; 512]);
        }
    }
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    let mut random = |below: usize| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state % below as u64) as usize
    };
    for _ in 0..1500 {
        let mut bytes = valid.clone();
        for _ in 0..1 + random(4) {
            let at = random(bytes.len());
            match random(4) {
                0 => bytes[at] = random(256) as u8,
                1 => bytes[at] ^= 1 << random(8),
                2 => {
                    bytes.remove(at);
                }
                _ => bytes.truncate(at.max(1)),
            }
        }
        let mut stream = Client::raw(&server);
        // The server may close in the middle.
        let _ = stream.write_all(&bytes);
        let _ = stream.shutdown(std::net::Shutdown::Write);
        let mut answer = Vec::new();
        let _ = stream.take(1 << 20).read_to_end(&mut answer);
        assert!(answer.starts_with(b"NBDMAGIC") || answer.is_empty());
    }
    let mut client = Client::connect(&server, Style::Structured, "r0/0");
    assert_eq!(client.ask(FLUSH, 0, 0, 0, &[]), 0);
}

#[test]
fn a_server_stops_although_its_volume_answers_nothing() {
    let (ram, server) = setup(1 << 20);
    let mut client = Client::connect(&server, Style::Structured, "r0/0");
    ram.hold(Hold::Stopped);
    client.send(READ, 0, 0, 4096, &[]);
    // This needs no volume, and its answer shows that the read has been taken, too.
    assert_eq!(client.ask(CACHE, 0, 0, 4096, &[]), 0);
    server.server.stop();
    assert_eq!(client.stream.read(&mut [0; 64]).unwrap(), 0);
    ram.hold(Hold::Running);
}

/// A client that has been greeted, and the payload of `NBD_OPT_GO` for `r0/0`.
fn before_go(server: &TestServer) -> (Client, Vec<u8>) {
    let mut client = Client {
        stream: Client::raw(server),
        style: Style::Simple,
        cookie: 0,
    };
    let mut greeting = [0; 18];
    client.stream.read_exact(&mut greeting).unwrap();
    client.stream.write_all(&3u32.to_be_bytes()).unwrap();
    let mut go = name("r0/0");
    go.extend_from_slice(&[0, 0]);
    (client, go)
}

#[test]
fn a_reason_that_is_past_when_the_volume_can_be_read_makes_no_export_read_only() {
    let ram = RamVolume::new(8 * MIB as u64, Runs::OwnThread).unwrap();
    let server = TestServer::start(&[("r0/0", &ram)], NbdLimits::default());
    for (code, count, read_only) in [
        (ErrorCode::NO_UP_TO_DATE_DISK, 1, false),
        (ErrorCode::NO_QUORUM, 1, false),
        // It holds for another volume of the resource.
        (ErrorCode::NO_UP_TO_DATE_DISK, 2, true),
        (ErrorCode::TWO_PRIMARIES, 1, true),
    ] {
        let text = "not yet".into();
        ram.refuse_opens(Some(CommandError { code, text }), count);
        let (mut client, go) = before_go(&server);
        let replies = client.option(7, &go);
        // NBD_INFO_EXPORT: type, size, flags.
        let (_, info) = replies
            .iter()
            .find(|r| r.0 == 3 && r.1[..2] == [0, 0])
            .unwrap();
        let flags = u16::from_be_bytes([info[10], info[11]]);
        assert_eq!(flags & 2 != 0, read_only, "{code:?} {count} times");
        drop(client);
    }
}

#[test]
fn what_cannot_be_written_for_a_moment_is_refused_and_not_read_only() {
    let ram = RamVolume::new(8 * MIB as u64, Runs::OwnThread).unwrap();
    let server = TestServer::start(&[("r0/0", &ram)], NbdLimits::default());
    ram.refuse_open(Some(CommandError {
        code: ErrorCode::IN_TRANSIENT_STATE,
        text: "the connection is being made".into(),
    }));
    let (mut client, go) = before_go(&server);
    let (kind, text) = client.option(7, &go).pop().unwrap();
    assert_eq!(kind >> 31, 1, "an export is given out");
    let text = String::from_utf8_lossy(&text).into_owned();
    assert!(text.contains("is being made; try again"), "{text}");
    // The same connection may ask again.
    ram.refuse_open(None);
    assert_eq!(client.option(7, &go).pop().unwrap().0, 1);
}
