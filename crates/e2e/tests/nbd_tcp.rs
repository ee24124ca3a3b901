//! `lockstepd --nbd-listen`: volumes over TCP.

use std::fs;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail, ensure};
use lockstep_e2e::guest_host::HostNode;
use lockstep_e2e::net::address;
use lockstep_e2e::{Cluster, PATIENCE, Setup, binary, can_mount, has_program, run};

/// Where the daemons of a cluster listen, each in its own network.
const PORT: u16 = 10_809;

/// `NBD_FLAG_CAN_MULTI_CONN` of an export.
const CAN_MULTI_CONN: u16 = 1 << 8;
/// `NBD_FLAG_READ_ONLY` of an export.
const READ_ONLY: u16 = 1 << 1;
const READ: u16 = 0;
const WRITE: u16 = 1;
const FLUSH: u16 = 3;

/// An NBD client that says only what it is told to: no library mends a broken conversation.
struct Client {
    stream: TcpStream,
    flags: u16,
}

impl Client {
    /// Opens an export; `Err` of the inner result is the server's refusal.
    fn open(to: &str, export: &str) -> Result<Result<Client, String>> {
        let mut stream = TcpStream::connect(to).with_context(|| format!("connecting to {to}"))?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        let mut greeting = [0; 18];
        stream.read_exact(&mut greeting)?;
        ensure!(&greeting[..16] == b"NBDMAGICIHAVEOPT", "{greeting:?}");
        let mut out = Vec::from(3_u32.to_be_bytes());
        out.extend_from_slice(b"IHAVEOPT");
        out.extend_from_slice(&7_u32.to_be_bytes());
        out.extend_from_slice(&(export.len() as u32 + 6).to_be_bytes());
        out.extend_from_slice(&(export.len() as u32).to_be_bytes());
        out.extend_from_slice(export.as_bytes());
        out.extend_from_slice(&[0, 0]);
        stream.write_all(&out)?;
        let mut flags = 0;
        loop {
            let mut head = [0; 20];
            stream.read_exact(&mut head)?;
            ensure!(head[..8] == 0x0003_e889_0455_65a9_u64.to_be_bytes());
            let word = |at: usize| u32::from_be_bytes(head[at..at + 4].try_into().unwrap());
            let mut body = vec![0; word(16) as usize];
            stream.read_exact(&mut body)?;
            match word(12) {
                1 => return Ok(Ok(Client { stream, flags })),
                3 if body[..2] == [0, 0] => flags = u16::from_be_bytes([body[10], body[11]]),
                3 => {}
                error if error >> 31 == 1 => {
                    return Ok(Err(String::from_utf8_lossy(&body).into_owned()));
                }
                other => bail!("reply of type {other}"),
            }
        }
    }

    /// Opens an export, which must succeed.
    fn opened(to: &str, export: &str) -> Result<Client> {
        Client::open(to, export)?.map_err(anyhow::Error::msg)
    }

    fn request(&mut self, command: u16, offset: u64, len: u32) -> Result<()> {
        let mut out = Vec::from(0x2560_9513_u32.to_be_bytes());
        out.extend_from_slice(&[0, 0]);
        out.extend_from_slice(&command.to_be_bytes());
        out.extend_from_slice(b"a cookie");
        out.extend_from_slice(&offset.to_be_bytes());
        out.extend_from_slice(&len.to_be_bytes());
        Ok(self.stream.write_all(&out)?)
    }

    fn reply(&mut self) -> Result<()> {
        let mut head = [0; 16];
        self.stream.read_exact(&mut head)?;
        ensure!(head[..4] == 0x6744_6698_u32.to_be_bytes(), "{head:?}");
        ensure!(head[4..8] == [0; 4], "error {:?}", &head[4..8]);
        ensure!(&head[8..] == b"a cookie", "{head:?}");
        Ok(())
    }

    fn write(&mut self, offset: u64, bytes: &[u8]) -> Result<()> {
        self.request(WRITE, offset, bytes.len() as u32)?;
        self.stream.write_all(bytes)?;
        self.reply()
    }

    fn read(&mut self, offset: u64, len: usize) -> Result<Vec<u8>> {
        self.request(READ, offset, len as u32)?;
        self.reply()?;
        let mut bytes = vec![0; len];
        self.stream.read_exact(&mut bytes)?;
        Ok(bytes)
    }

    fn flush(&mut self) -> Result<()> {
        self.request(FLUSH, 0, 0)?;
        self.reply()
    }
}

/// One node with the volume `r0/0` of 16 MiB, UpToDate and Secondary, and its two TCP addresses.
fn node(dir: &Path, options: &str) -> Result<(HostNode, [String; 2])> {
    let mut node = HostNode::new(dir, "alfa", 8495)?;
    let disk = dir.join("disk");
    fs::File::create(&disk)?.set_len(16 << 20)?;
    node.write_configuration(&format!(
        "resource r0 {{ options {{ {options} }} on alfa {{ node-id 0; address ipv4 127.0.0.1:1; \
         volume 0 {{ device minor 8495; disk {}; meta-disk internal; }} }} }}\n",
        disk.display()
    ))?;
    // The system chooses ports that are free.
    let listen = ["--nbd-listen", "127.0.0.1:0", "--nbd-listen=127.0.0.2:0"];
    node.set_daemon_args(&["--no-device", listen[0], listen[1], listen[2]]);
    node.start_daemon()?;
    // The warning comes before the daemon answers.
    let log = fs::read_to_string(dir.join("node-alfa/log"))?;
    let mut addresses = Vec::new();
    for line in log.lines().filter(|l| l.contains("authentication")) {
        let expected = "NBD has neither authentication nor encryption: whoever reaches this \
                        address reads and writes every volume";
        ensure!(line.contains(" WARN ") && line.contains(expected), "{log}");
        let (_, address) = line.rsplit_once("address=").context("the address")?;
        addresses.push(address.trim().to_owned());
    }
    let tcp: [String; 2] = addresses
        .try_into()
        .map_err(|_| anyhow!("two addresses, two warnings: {log}"))?;
    ensure!(tcp[0].starts_with("127.0.0.1:") && tcp[1].starts_with("127.0.0.2:"));
    node.adm(&["create-md", "--force", "r0"])?;
    node.adm(&["up", "r0"])?;
    node.adm(&["primary", "--force", "r0"])?;
    node.adm(&["secondary", "r0"])?;
    Ok((node, tcp))
}

fn directory() -> Result<tempfile::TempDir> {
    Ok(tempfile::Builder::new().prefix("lockstep-tcp-").tempdir()?)
}

fn role_is(node: &HostNode, role: &str) -> Result<bool> {
    Ok(node.status()?["role"] == role)
}

#[test]
fn a_volume_is_written_over_tcp_and_read_over_the_socket() -> Result<()> {
    if !has_program("qemu-io") || !has_program("nbdinfo") {
        return Ok(());
    }
    let dir = directory()?;
    let (_node, [tcp, _]) = node(dir.path(), "")?;
    run(Command::new("qemu-io")
        .args(["-f", "raw", "-c", "write -P 7 4k 1M", "-c", "flush"])
        .arg(format!("nbd://{tcp}/r0/0")))?;
    let socket = dir.path().join("node-alfa/nbd.sock");
    run(Command::new("qemu-io")
        .args(["-f", "raw", "-c", "read -P 7 4k 1M", "-c", "read -P 0 0 4k"])
        .arg(format!("nbd+unix:///r0/0?socket={}", socket.display())))?;
    let list = Command::new("nbdinfo")
        .args(["--list", "--json"])
        .arg(format!("nbd://{tcp}"))
        .output()?;
    let list: serde_json::Value = serde_json::from_slice(&list.stdout)
        .with_context(|| String::from_utf8_lossy(&list.stderr).into_owned())?;
    let exports = list["exports"].as_array().context("a list")?;
    ensure!(exports.len() == 1, "{list}");
    ensure!(exports[0]["export-name"] == "r0/0", "{list}");
    ensure!(exports[0]["can_multi_conn"] == true, "{list}");
    Ok(())
}

#[test]
fn two_connections_share_a_volume_and_one_may_go_in_the_middle_of_a_write() -> Result<()> {
    let dir = directory()?;
    let (node, tcp) = node(dir.path(), "")?;
    let mut first = Client::opened(&tcp[0], "r0/0")?;
    let mut second = Client::opened(&tcp[1], "r0/0")?;
    ensure!(first.flags & second.flags & CAN_MULTI_CONN != 0);
    ensure!((first.flags | second.flags) & READ_ONLY == 0);
    ensure!(role_is(&node, "Primary")?, "an open for writing promotes");

    // What one has written is read by the other at once, and flushed by it.
    let (old, new) = (vec![0x11; 256 << 10], vec![0x22; 256 << 10]);
    first.write(1 << 20, &old)?;
    ensure!(second.read(1 << 20, old.len())? == old);
    second.flush()?;
    second.write(1 << 20, &new[..4096])?;
    ensure!(first.read(1 << 20, 4096)? == new[..4096]);
    first.write(1 << 20, &old[..4096])?;

    // Half of a write, then nothing more.
    first.request(WRITE, 1 << 20, new.len() as u32)?;
    first.stream.write_all(&new[..new.len() / 2])?;
    first.stream.shutdown(Shutdown::Write)?;
    let mut rest = Vec::new();
    // A reset is as good as an end.
    let _ = first.stream.read_to_end(&mut rest);
    ensure!(rest.is_empty(), "half of a write was answered: {rest:?}");

    // The other goes on, and finds no byte that never arrived.
    let found = second.read(1 << 20, old.len())?;
    ensure!(found[old.len() / 2..] == old[old.len() / 2..]);
    let blocks = found.chunks(4096);
    let whole = |block: &[u8]| block == &old[..4096] || block == &new[..4096];
    ensure!(
        blocks.into_iter().all(whole),
        "a block is neither old nor new"
    );
    second.write(1 << 20, &new)?;
    ensure!(second.read(1 << 20, new.len())? == new);
    ensure!(
        role_is(&node, "Primary")?,
        "the other still has the volume open"
    );
    drop(second);
    node.wait("the last client has gone", |n| role_is(n, "Secondary"))
}

#[test]
fn a_secondary_without_auto_promote_refuses_tcp_clients_with_its_reason() -> Result<()> {
    let dir = directory()?;
    let (node, [tcp, _]) = node(dir.path(), "auto-promote no;")?;
    let Err(text) = Client::open(&tcp, "r0/0")? else {
        bail!("a Secondary without auto-promote was opened");
    };
    ensure!(text.contains("auto-promote is off"), "{text}");
    let Err(text) = Client::open(&tcp, "r0/1")? else {
        bail!("a volume that does not exist was opened");
    };
    ensure!(text.contains("r0/1"), "{text}");
    node.adm(&["primary", "r0"])?;
    let mut client = Client::opened(&tcp, "r0/0")?;
    client.write(0, &[5; 4096])?;
    drop(client);
    node.wait("the volume is free", |n| {
        Ok(n.tool("drbdadm", &["secondary", "r0"])?.status.success())
    })
}

#[test]
fn a_client_writes_from_another_node_and_is_refused_beside_the_primary() -> Result<()> {
    if !can_mount() {
        return Ok(());
    }
    let mut setup = Setup::quick(87, 2);
    for word in ["--no-device", "--nbd-listen", &format!("0.0.0.0:{PORT}")] {
        setup.daemon.push(word.to_owned());
    }
    let cluster = Cluster::new(&setup)?;
    cluster.wait("the connection", |c| {
        Ok(c.is_connected(0)? && c.is_connected(1)?)
    })?;
    cluster.adm(0, &["new-current-uuid", "--clear-bitmap", "r0/0"])?;
    cluster.wait_in_sync()?;
    let [alfa, bravo] = [0, 1].map(|node| format!("{}:{PORT}", address(node)));
    let from = |node, to: &str| cluster.network().inside(node, || Client::open(to, "r0/0"));

    let mut client = from(1, &alfa)?.map_err(anyhow::Error::msg)?;
    let bytes = vec![0x77; 1 << 20];
    client.write(2 << 20, &bytes)?;
    // It waits for `auto-promote-timeout`, then it can neither be written nor read.
    let Err(text) = from(0, &bravo)? else {
        bail!("opened beside a Primary");
    };
    ensure!(text.contains("Primary"), "{text}");
    drop(client);
    cluster.wait("the writer's node is Secondary", |c| {
        Ok(c.status(0)?["role"] == "Secondary")
    })?;
    let mut client = from(0, &bravo)?.map_err(anyhow::Error::msg)?;
    ensure!(client.read(2 << 20, bytes.len())? == bytes);
    Ok(())
}

/// `lockstepd` with some arguments, to its end, which must come by itself.
fn lockstepd(dir: &Path, args: &[&str]) -> Result<Output> {
    let program: PathBuf = dir.join("lockstepd");
    if !program.exists() {
        std::os::unix::fs::symlink(binary()?, &program)?;
    }
    let mut child = Command::new(program)
        .args(args)
        .env("LOCKSTEP_DIR", dir.join("node"))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    let begin = std::time::Instant::now();
    while child.try_wait()?.is_none() {
        if begin.elapsed() > PATIENCE {
            child.kill()?;
            child.wait()?;
            bail!("lockstepd {args:?} does not end");
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(child.wait_with_output()?)
}

#[test]
fn a_wrong_address_and_a_port_in_use_end_the_daemon_with_a_reason() -> Result<()> {
    let dir = directory()?;
    let help = lockstepd(dir.path(), &["--help"])?;
    let text = String::from_utf8(help.stdout)?;
    ensure!(help.status.success(), "{text}");
    ensure!(text.contains("[--nbd-listen ADDRESS]..."), "{text}");
    ensure!(text.contains("for trusted networks only"), "{text}");

    for wrong in ["10809", "localhost", "127.0.0.1", "127.0.0.1:65536", ""] {
        let output = lockstepd(dir.path(), &["--nbd-listen", wrong])?;
        let text = String::from_utf8(output.stderr)?;
        ensure!(output.status.code() == Some(2), "{wrong}: {text}");
        let expected = format!("lockstepd: --nbd-listen {wrong}: ADDRESS:PORT is needed\n");
        ensure!(text.starts_with(&expected), "{wrong}: {text}");
    }
    let output = lockstepd(dir.path(), &["--nbd-listen"])?;
    let text = String::from_utf8(output.stderr)?;
    ensure!(output.status.code() == Some(2), "{text}");
    ensure!(text.contains("--nbd-listen needs a value"), "{text}");
    ensure!(
        !dir.path().join("node").exists(),
        "nothing was begun for them"
    );

    let taken = TcpListener::bind("127.0.0.1:0")?;
    let address = taken.local_addr()?.to_string();
    let output = lockstepd(dir.path(), &["--no-device", "--nbd-listen", &address])?;
    let text = String::from_utf8(output.stderr)?;
    ensure!(output.status.code() == Some(1), "{text}");
    ensure!(
        text.contains(&format!("cannot listen on {address}")),
        "{text}"
    );
    ensure!(text.contains("Address already in use"), "{text}");
    Ok(())
}

/// Two nodes on this machine, in sync; the first one exports `r0/0` at the address.
fn pair(dir: &Path) -> Result<([HostNode; 2], String)> {
    let free = || -> Result<u16> { Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?.port()) };
    let mut text = String::from("resource r0 {\n net { protocol C; connect-int 1; }\n");
    for (id, name) in ["alfa", "bravo"].into_iter().enumerate() {
        let disk = dir.join(name);
        fs::File::create(&disk)?.set_len(16 << 20)?;
        text += &format!(
            " on {name} {{ node-id {id}; address ipv4 127.0.0.1:{}; volume 0 {{ device minor {}; \
             disk {}; meta-disk internal; }} }}\n",
            free()?,
            8496 + id,
            disk.display()
        );
    }
    text += "}\n";
    let mut nodes = [
        HostNode::new(dir, "alfa", 8496)?,
        HostNode::new(dir, "bravo", 8497)?,
    ];
    let tcp = format!("127.0.0.1:{}", free()?);
    nodes[0].set_daemon_args(&["--no-device", "--nbd-listen", &tcp]);
    nodes[1].set_daemon_args(&["--no-device"]);
    for node in &mut nodes {
        node.write_configuration(&text)?;
        node.start_daemon()?;
        node.adm(&["create-md", "--force", "r0"])?;
        node.adm(&["up", "r0"])?;
    }
    nodes[0].wait("the connection", |n| Ok(n.state(0)?[0] == "Connected"))?;
    nodes[0].adm(&["new-current-uuid", "--clear-bitmap", "r0/0"])?;
    nodes[0].wait("both in sync", |node| node.is_in_sync(0))?;
    Ok((nodes, tcp))
}

/// Opens the export as soon as there is one to write, as a client does that lost its server.
fn come_back(tcp: &str) -> Result<Client> {
    let begin = std::time::Instant::now();
    loop {
        match Client::open(tcp, "r0/0") {
            Ok(Ok(client)) if client.flags & READ_ONLY == 0 => return Ok(client),
            Ok(Ok(_)) => bail!("the export is read-only now"),
            // It is not there yet, or its volume is not.
            Ok(Err(_)) | Err(_) => {}
        }
        ensure!(begin.elapsed() < PATIENCE, "no server");
        // Polled: a server that is not there yet tells nobody when it comes.
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_client_that_comes_back_after_a_kill_writes_on() -> Result<()> {
    let dir = directory()?;
    let (mut nodes, tcp) = pair(dir.path())?;
    let mut client = Client::opened(&tcp, "r0/0")?;
    // The peer is there when the client comes back, or only when the node is Primary for it, alone.
    for (kill, late) in [false, true, false, true].into_iter().enumerate() {
        let byte = kill as u8 + 1;
        client.write(1 << 20, &[byte; 64 << 10])?;
        client.flush()?;
        // Nobody waits for these; the client sends them again.
        client.request(WRITE, 64 << 10, 64 << 10)?;
        client.stream.write_all(&[byte; 64 << 10])?;
        client.request(FLUSH, 0, 0)?;
        nodes[0].kill_daemon()?;
        if late {
            nodes[1].adm(&["disconnect", "r0"])?;
        }
        let to = tcp.clone();
        let back = std::thread::spawn(move || come_back(&to));
        nodes[0].start_daemon()?;
        nodes[0].adm(&["up", "r0"])?;
        let back = back.join().map_err(|_| anyhow!("a panic"))?;
        client = back.with_context(|| format!("kill {kill}: {}", nodes[0].report()))?;
        ensure!(role_is(&nodes[0], "Primary")?, "kill {kill}");
        if late {
            nodes[1].adm(&["connect", "r0"])?;
        }
        // It has sent nothing until now.
        nodes[0].wait("both in sync", |node| node.is_in_sync(0))?;
        let written = client
            .read(1 << 20, 64 << 10)
            .and_then(|read| {
                ensure!(read == [byte; 64 << 10], "what was durable is gone");
                client.flush()
            })
            .and_then(|()| client.write(64 << 10, &[byte; 64 << 10]))
            .and_then(|()| client.flush());
        written.with_context(|| format!("kill {kill}: {}", nodes[0].report()))?;
    }
    let read = |name: &str| fs::read(dir.path().join(name));
    let (alfa, bravo) = (read("alfa")?, read("bravo")?);
    ensure!(alfa[..15 << 20] == bravo[..15 << 20], "the replicas differ");
    ensure!(alfa[64 << 10..128 << 10] == [4; 64 << 10]);
    Ok(())
}
