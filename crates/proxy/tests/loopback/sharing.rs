//! One session for all connections between two proxies: its TCP connections, who may use it, and
//! that trouble with one connection is nothing to another.

use super::*;

/// Two proxies with addresses of their own.
struct Sites {
    a: Daemon,
    b: Daemon,
    ip_a: Ipv4Addr,
    ip_b: Ipv4Addr,
    drbd_ip: Ipv4Addr,
}

impl Sites {
    fn start(a: Security, b: Security) -> Sites {
        let (ip_a, ip_b, drbd_ip) = (fresh_ip(), fresh_ip(), fresh_ip());
        Sites {
            a: Daemon::start(options(a)).unwrap(),
            b: Daemon::start(options(b)).unwrap(),
            ip_a,
            ip_b,
            drbd_ip,
        }
    }

    /// Configures connection `r{number}`, with ports of its own, at both ends. Its DRBD at b.
    fn add(&self, number: u16, extra: &str) -> TcpListener {
        let at = |ip: Ipv4Addr, port: u16| SocketAddr::from((ip, port + number));
        let (outside_a, outside_b) = (at(self.ip_a, 8000), at(self.ip_b, 8000));
        let drbd = TcpListener::bind(at(self.drbd_ip, 9000)).unwrap();
        let (inside, far) = (at(self.ip_b, 7000), drbd.local_addr().unwrap());
        let add = format!("add connection r{number} {inside} {outside_a} {outside_b} {far}");
        ok(&self.b, &format!("{add} {extra}"));
        let (inside, far) = (at(self.ip_a, 7000), at(self.ip_a, 9000));
        let add = format!("add connection r{number} {inside} {outside_b} {outside_a} {far}");
        ok(&self.a, &format!("{add} {extra}"));
        drbd
    }

    /// Opens a data socket of DRBD from a to b.
    fn open(&self, number: u16, drbd: &TcpListener) -> (TcpStream, TcpStream) {
        let mut near = TcpStream::connect((self.ip_a, 7000 + number)).unwrap();
        near.write_all(&DATA).unwrap();
        let (mut far, _) = drbd.accept().unwrap();
        receive(&mut far, &DATA);
        for socket in [&near, &far] {
            socket.set_read_timeout(Some(PATIENCE)).unwrap();
        }
        (near, far)
    }

    fn wait_up(&self, count: usize) {
        wait("all connections", || {
            [&self.a, &self.b].iter().all(|daemon| {
                let state = daemon.state();
                let list = state["connections"].as_array().unwrap();
                let up = |c: &&serde_json::Value| c["bulk_carriers"].as_u64() > Some(0);
                list.iter().filter(up).count() == count
            })
        });
    }

    /// Established TCP connections between the two, as the kernel counts them at one end.
    fn tcp_connections(&self) -> usize {
        let hex = |ip: Ipv4Addr| format!("{:08X}", u32::from_le_bytes(ip.octets()));
        let (a, b) = (hex(self.ip_a), hex(self.ip_b));
        let table = std::fs::read_to_string("/proc/net/tcp").unwrap();
        let established = |line: &&str| {
            let words: Vec<&str> = line.split_whitespace().collect();
            words[1].starts_with(&a) && words[2].starts_with(&b) && words[3] == "01"
        };
        table.lines().skip(1).filter(established).count()
    }

    fn sessions(&self) -> [Vec<serde_json::Value>; 2] {
        [&self.a, &self.b].map(|daemon| daemon.state()["peers"].as_array().unwrap().clone())
    }
}

#[test]
fn all_connections_of_two_proxies_share_one_session_and_its_two_tcp_connections() {
    const COUNT: u16 = 20;
    let sites = Sites::start(secret(), secret());
    let drbds: Vec<TcpListener> = (0..COUNT).map(|number| sites.add(number, "")).collect();
    sites.wait_up(usize::from(COUNT));
    wait("two TCP connections", || sites.tcp_connections() == 2);
    let [a, b] = sites.sessions();
    assert_eq!((a.len(), b.len()), (1, 1), "{a:?} {b:?}");
    assert_eq!(a[0]["id"], b[0]["id"]);
    assert_eq!(a[0]["id"].as_str().unwrap().len(), 32);
    assert_eq!(a[0]["connections"].as_array().unwrap().len(), 20);
    assert_eq!(a[0]["tcp_connections"], 2);
    // Each is connected with its own DRBD.
    let mut open: Vec<(TcpStream, TcpStream)> = Vec::new();
    for (number, drbd) in (0..COUNT).zip(&drbds) {
        let mut ends = sites.open(number, drbd);
        let text = format!("for connection {number} only");
        ends.0.write_all(text.as_bytes()).unwrap();
        receive(&mut ends.1, text.as_bytes());
        open.push(ends);
    }
    // One more and one less, while the session stands.
    let more = sites.add(COUNT, "");
    sites.wait_up(usize::from(COUNT) + 1);
    sites.open(COUNT, &more);
    ok(&sites.b, "del connection r3");
    let (mut near, mut far) = open.remove(3);
    assert!(is_reset(&mut near) && is_reset(&mut far));
    for (near, far) in &mut open {
        near.write_all(b"still here").unwrap();
        receive(far, b"still here");
    }
    assert_eq!(sites.tcp_connections(), 2);
    assert_eq!(sites.sessions()[0][0]["id"], a[0]["id"]);
    // More carriers for one are more for all; the session stays.
    ok(&sites.a, "set carriers r5 3");
    ok(&sites.b, "set carriers r5 3");
    wait("four TCP connections", || sites.tcp_connections() == 4);
    ok(&sites.a, "set carriers r5 1");
    ok(&sites.b, "set carriers r5 1");
    wait("two again", || sites.tcp_connections() == 2);
    for (near, far) in &mut open {
        near.write_all(b"and still").unwrap();
        receive(far, b"and still");
    }
    // Nobody needs it any more.
    drop(open);
    for number in (0..=COUNT).filter(|number| *number != 3) {
        ok(&sites.a, &format!("del connection r{number}"));
    }
    wait("the end of the session", || {
        sites.tcp_connections() == 0 && sites.sessions().iter().all(Vec::is_empty)
    });
}

#[test]
fn trouble_with_one_connection_is_nothing_to_another() {
    let sites = Sites::start(secret(), secret());
    let extra = "--memlimit=4M --max-lag=0";
    let drbds: Vec<TcpListener> = (0..2).map(|number| sites.add(number, extra)).collect();
    sites.wait_up(2);
    let (stuck, deaf) = sites.open(0, &drbds[0]);
    let (near, mut far) = sites.open(1, &drbds[1]);
    // DRBD at the far end takes nothing: every buffer on the way is full.
    let hog = spawn(move || {
        let mut stuck = stuck;
        let _ = stuck.write_all(&sample(60_000_000, 1));
        stuck
    });
    wait("a full buffer", || {
        let state = connection(&sites.a);
        state["blocked_by"] == "memory" || state["blocked_by"] == "lag"
    });
    let data = sample(30_000_000, 2);
    let sender = send(near, data.clone());
    receive(&mut far, &data);
    let mut near = sender.join().unwrap();
    assert!(connection(&sites.a)["buffered_raw_bytes"].as_u64() > Some(1_000_000));
    // It is reset in the middle of everything.
    let sender = send(near.try_clone().unwrap(), data.clone());
    receive(&mut far, &data[..1_000_000]);
    let hard: socket2::Socket = deaf.into();
    hard.set_linger(Some(Duration::ZERO)).unwrap();
    drop(hard);
    receive(&mut far, &data[1_000_000..]);
    sender.join().unwrap();
    drop(hog.join().unwrap());
    near.write_all(b"still here").unwrap();
    receive(&mut far, b"still here");
    let state = sites.a.state();
    assert_eq!(
        connection(&sites.b)["counters"]["streams_reset"],
        1,
        "its DRBD has reset it"
    );
    assert_eq!(state["connections"][1]["counters"]["streams_reset"], 0);
    assert_eq!(state["connections"][1]["counters"]["resent_bytes"], 0);
}

#[test]
fn each_secret_has_a_session_of_its_own_and_carries_its_own_connections_only() {
    let secrets = || {
        let secret = |letter: u8, list: &str| SharedSecret {
            secret: vec![letter; 32],
            connections: Some(list.into()),
        };
        Security::Secrets(vec![secret(b'a', "r0,r2"), secret(b'b', "r1,r3")])
    };
    let sites = Sites::start(secrets(), secrets());
    let drbds: Vec<TcpListener> = (0..4).map(|number| sites.add(number, "")).collect();
    sites.wait_up(4);
    wait("a session for each secret", || sites.tcp_connections() == 4);
    for sessions in sites.sessions() {
        let mut found: Vec<Vec<&str>> = sessions
            .iter()
            .map(|session| {
                let names = session["connections"].as_array().unwrap();
                let mut names: Vec<&str> = names.iter().filter_map(|name| name.as_str()).collect();
                names.sort_unstable();
                names
            })
            .collect();
        found.sort();
        assert_eq!(found, [["r0", "r2"], ["r1", "r3"]]);
    }
    for (number, drbd) in (0..4).zip(&drbds) {
        sites.open(number, drbd);
    }
}

#[test]
fn a_peer_gets_only_its_own_connections_into_the_session() {
    let keys = || lockstep_proxy::generate_keys().unwrap();
    let ((private_a, public_a), (private_b, public_b)) = (keys(), keys());
    let identity = |private: &str, peers: &str| Security::Keys {
        private: private.into(),
        peers: vec![peers.into()],
    };
    let sites = Sites::start(
        identity(&private_a, &public_b),
        identity(&private_b, &format!("{public_a}=r0,r2")),
    );
    let drbds: Vec<TcpListener> = (0..3).map(|number| sites.add(number, "")).collect();
    wait("the refusal", || {
        let state = sites.a.state();
        let error = state["connections"][1]["last_error"].clone();
        let told = error
            .as_str()
            .is_some_and(|text| text.contains("may not use it"));
        let up = |at: usize| state["connections"][at]["bulk_carriers"].as_u64() > Some(0);
        told && up(0) && up(2) && !up(1)
    });
    sites.open(0, &drbds[0]);
    sites.open(2, &drbds[2]);
    assert_eq!(
        sites.sessions()[1][0]["connections"]
            .as_array()
            .unwrap()
            .len(),
        2
    );
}

#[test]
fn proxies_that_dial_each_other_at_once_keep_one_session() {
    let sites = Sites::start(secret(), secret());
    let drbds: Vec<TcpListener> = (0..6)
        .map(|number| sites.add(number, "--dial=always"))
        .collect();
    wait("one session", || {
        let [a, b] = sites.sessions();
        let all = |list: &[serde_json::Value]| {
            list.len() == 1 && list[0]["connections"].as_array().unwrap().len() == 6
        };
        all(&a) && all(&b) && a[0]["id"] == b[0]["id"] && sites.tcp_connections() == 2
    });
    sites.wait_up(6);
    for (number, drbd) in (0..6).zip(&drbds) {
        sites.open(number, drbd);
    }
}
