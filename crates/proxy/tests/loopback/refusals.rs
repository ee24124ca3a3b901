//! What the end that waits to be dialled shows of carriers that it refuses.

use super::*;

#[test]
fn the_end_that_waits_shows_whom_it_refused_and_why_until_the_peer_is_let_in() {
    let at = |port| SocketAddr::from((fresh_ip(), port));
    let (inside_a, inside_b, outside_a, outside_b) = (at(7815), at(7815), at(7715), at(7715));
    let (drbd_a, drbd_b) = (at(7915), at(7915));
    let waiting = Daemon::start(options(secret())).unwrap();
    let error = || {
        let error = connection(&waiting)["last_error"].clone();
        error.as_str().unwrap().to_string()
    };
    ok(
        &waiting,
        &format!("add connection b {inside_b} {outside_a} {outside_b} {drbd_b} --dial=never"),
    );
    // A stranger is named, but the peer goes before it.
    let mut stranger = TcpStream::connect(outside_b).unwrap();
    stranger.write_all(b"GET / HTTP/1.0\r\n\r\n").unwrap();
    let own = stranger.local_addr().unwrap().to_string();
    wait("the refusal of a stranger", || error().contains(&own));
    let dialling = |security: Security| {
        let daemon = Daemon::start(options(security)).unwrap();
        let add =
            format!("add connection a {inside_a} {outside_b} {outside_a} {drbd_a} --dial=always");
        ok(&daemon, &add);
        daemon
    };
    let wrong = dialling(Security::Secrets(vec![SharedSecret::for_all(
        b"another secret of 32 characters!",
    )]));
    let told = format!("a carrier from {}:", outside_a.ip());
    wait("the refusal of the peer", || error().contains(&told));
    assert!(error().contains(" was refused "), "{}", error());
    let shown = ok(&waiting, "show connections");
    assert!(shown.contains(&told), "{shown}");
    drop(wrong);
    let _right = dialling(secret());
    wait("session", || connection(&waiting)["bulk_carriers"] == 1);
    assert_eq!(error(), "");
}
