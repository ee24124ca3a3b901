//! A server of a mountable device that is killed: without a holder all I/O fails at once and the
//! next server cleans up; with one the I/O waits and goes on. Needs root, FUSE and loop devices.
//!
//! The servers are processes of their own: this test program again, with its volume in a file.

mod support;

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use lockstep_core::event::{RequestError, RequestId, RequestKind};
use lockstep_front::apart::apart;
use lockstep_front::device::{DeviceSpec, DeviceState, MountedDevice, clean_leftovers};
use lockstep_front::hold::HoldClient;
use lockstep_front::{BlockAccess, BlockNumber, LoopNumber};
use lockstep_io::pool::IoBuf;
use lockstep_io::port::{
    Completion, PortEvent, PortRequest, PortSink, SubmitError, VolumePort, VolumeProperties,
};
use support::{can_use_devices, have_programs};

const SIZE: u64 = 32 << 20;

static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

fn can_mount() -> Option<MutexGuard<'static, ()>> {
    let guard = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    can_use_devices().then_some(guard)
}

/// A volume in a file, whose requests run when it is kicked.
struct FilePort {
    file: File,
    sink: Box<dyn PortSink>,
    queued: Vec<PortRequest>,
    /// Says so and never answers when it is to flush.
    stuck: bool,
}

fn properties() -> VolumeProperties {
    VolumeProperties {
        size_bytes: SIZE,
        logical_block_bytes: 512,
        physical_block_bytes: 4096,
        discard: false,
        discard_granularity_bytes: 0,
        max_request_bytes: 1 << 20,
        max_discard_bytes: 1 << 20,
        readable: true,
        writable: true,
        changed_elsewhere: false,
    }
}

impl VolumePort for FilePort {
    fn properties(&self) -> VolumeProperties {
        properties()
    }

    fn alloc(&self, len: usize) -> Option<IoBuf> {
        IoBuf::standalone(len).ok()
    }

    fn submit(&mut self, request: PortRequest) -> Result<(), SubmitError> {
        self.queued.push(request);
        Ok(())
    }

    fn kick(&mut self) {
        for request in std::mem::take(&mut self.queued) {
            let PortRequest {
                id,
                kind,
                sector,
                len,
                mut buf,
                ..
            } = request;
            if self.stuck && kind == RequestKind::Flush {
                println!("stuck");
                continue;
            }
            let (len, offset) = (len as usize, sector.0 * 512);
            let result = match (kind, &mut buf) {
                (RequestKind::Read, Some(buf)) => {
                    self.file.read_exact_at(&mut buf[..len], offset).is_ok()
                }
                (RequestKind::Write { .. }, Some(buf)) => {
                    self.file.write_all_at(&buf[..len], offset).is_ok()
                }
                (RequestKind::Flush, _) => true,
                _ => false,
            };
            let result = if result {
                Ok(())
            } else {
                Err(RequestError::Unsupported)
            };
            self.sink
                .event(PortEvent::Done(Completion { id, result, buf }));
        }
        self.sink.batch_end();
    }

    fn open(&mut self, _id: RequestId, _write: bool) {}

    fn close(&mut self, _write: bool) {}
}

fn spec(owner: &str) -> DeviceSpec {
    DeviceSpec {
        owner: owner.into(),
        name: "r0/0".into(),
        properties: properties(),
        links: Vec::new(),
        readers: 1,
        access: BlockAccess::ReadWrite,
        opening: lockstep_front::device::Opening::Never,
        discards: lockstep_front::device::Discards::AsVolume,
    }
}

/// Checks the servers' volume; as a child process it is the server or the holder.
#[test]
fn child() {
    let argument = |name: &str| std::env::var(name).ok();
    if argument("FRONT_TEST_ROLE").as_deref() == Some("holder") {
        let listener = std::io::stdin().as_fd().try_clone_to_owned().unwrap();
        // If the test fails, nothing waits for ever.
        lockstep_front::hold::run(listener, Some(Duration::from_secs(30))).unwrap();
        return;
    }
    let (Some(owner), Some(path)) = (argument("FRONT_TEST_OWNER"), argument("FRONT_TEST_FILE"))
    else {
        the_volume_keeps_what_it_is_given();
        return;
    };
    let mut connect = |sink: Box<dyn PortSink>| -> Box<dyn VolumePort + Send> {
        let file = File::options().read(true).write(true).open(&path).unwrap();
        Box::new(FilePort {
            file,
            sink,
            queued: Vec::new(),
            stuck: argument("FRONT_TEST_STUCK").is_some(),
        })
    };
    let holder = argument("FRONT_TEST_HOLD").map(|hold| {
        let mut command = this_program();
        command.env("FRONT_TEST_ROLE", "holder");
        HoldClient::connect_or_start(Path::new(&hold), &mut command)
            .unwrap()
            .0
    });
    let held = holder
        .as_ref()
        .map(|holder| holder.list().unwrap())
        .unwrap_or_default();
    let device = match held.into_iter().next() {
        Some(held) => {
            let state = DeviceState::from_line(&held.state).unwrap();
            MountedDevice::resume(&spec(&owner), held.descriptor, state, &mut connect).unwrap()
        }
        None => MountedDevice::create(&spec(&owner), &mut connect).unwrap(),
    };
    if let Some(holder) = &holder {
        let descriptor = device.descriptor().unwrap();
        holder
            .store("r0/0", &device.state().to_line(), descriptor.as_fd())
            .unwrap();
    }
    println!("device={}", device.state().number.0);
    if argument("FRONT_TEST_STUCK").is_some() {
        // Waits for the flush that this very process does not answer.
        let number = device.state().number.into();
        apart(|| BlockNumber::settled_usage(number)).unwrap();
    }
    // Until the test closes our input or kills us.
    std::io::stdin().read_to_end(&mut Vec::new()).unwrap();
    device.detach().map_err(|(_, error)| error).unwrap();
    if let Some(holder) = &holder {
        holder.remove("r0/0").unwrap();
    }
}

fn the_volume_keeps_what_it_is_given() {
    struct Tell(std::sync::mpsc::Sender<PortEvent>);
    impl PortSink for Tell {
        fn event(&mut self, event: PortEvent) {
            self.0.send(event).unwrap();
        }
    }
    let dir = tempfile::tempdir().unwrap();
    let path = volume_file(dir.path());
    let file = File::options().read(true).write(true).open(path).unwrap();
    let (sender, events) = std::sync::mpsc::channel();
    let mut port = FilePort {
        file,
        sink: Box::new(Tell(sender)),
        queued: Vec::new(),
        stuck: false,
    };
    for kind in [RequestKind::Write { fua: false }, RequestKind::Read] {
        let mut buf = port.alloc(4096).unwrap();
        buf.fill(if kind == RequestKind::Read { 0 } else { 7 });
        port.submit(PortRequest {
            id: RequestId(1),
            kind,
            sector: lockstep_format::units::Sector(8),
            len: 4096,
            buf: Some(buf),
            buf_offset: 0,
        })
        .unwrap();
        port.kick();
        let PortEvent::Done(done) = events.recv().unwrap() else {
            panic!("no completion")
        };
        done.result.unwrap();
        assert!(done.buf.unwrap()[..4096].iter().all(|byte| *byte == 7));
    }
}

fn this_program() -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "child", "--nocapture", "--test-threads=1"]);
    command
}

struct Server {
    child: Child,
    number: LoopNumber,
    input: Option<ChildStdin>,
    _output: BufReader<ChildStdout>,
}

impl Server {
    fn start(owner: &str, file: &Path, hold: Option<&Path>) -> Server {
        let mut command = this_program();
        command
            .env("FRONT_TEST_OWNER", owner)
            .env("FRONT_TEST_FILE", file)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        if let Some(hold) = hold {
            command.env("FRONT_TEST_HOLD", hold);
        }
        let mut child = command.spawn().unwrap();
        // Kept open, so that the child can print to its end.
        let mut output = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        let number = loop {
            line.clear();
            assert!(
                output.read_line(&mut line).unwrap() > 0,
                "the server tells its device"
            );
            if let Some((_, number)) = line.trim().split_once("device=") {
                break number.parse().unwrap();
            }
        };
        let input = child.stdin.take();
        Server {
            child,
            number: LoopNumber(number),
            input,
            _output: output,
        }
    }

    fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    fn stop(mut self) {
        drop(self.input.take());
        assert!(
            self.child.wait().unwrap().success(),
            "the server detaches its device"
        );
    }
}

fn volume_file(dir: &Path) -> std::path::PathBuf {
    let path = dir.join("volume");
    File::create(&path).unwrap().set_len(SIZE).unwrap();
    path
}

#[test]
fn a_server_that_is_killed_while_it_waits_for_its_own_device_ends() {
    let Some(_guard) = can_mount() else { return };
    let dir = tempfile::tempdir().unwrap();
    let file = volume_file(dir.path());
    let owner = format!("{}-stuck", std::process::id());
    let mut child = this_program()
        .env("FRONT_TEST_OWNER", &owner)
        .env("FRONT_TEST_FILE", &file)
        .env("FRONT_TEST_STUCK", "1")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut output = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    while !line.trim_end().ends_with("stuck") {
        line.clear();
        assert!(output.read_line(&mut line).unwrap() > 0);
    }
    child.kill().unwrap();
    let begin = Instant::now();
    while child.try_wait().unwrap().is_none() {
        assert!(
            begin.elapsed() < Duration::from_secs(20),
            "a killed server stays"
        );
        std::thread::sleep(Duration::from_millis(10));
    }
    clean_leftovers(&owner, &[]).unwrap();
}

#[test]
fn a_killed_server_gives_errors_and_its_device_is_cleaned_up() {
    let Some(_guard) = can_mount() else { return };
    let dir = tempfile::tempdir().unwrap();
    let file = volume_file(dir.path());
    let owner = format!("{}-kill", std::process::id());
    let server = Server::start(&owner, &file, None);
    let number = server.number;
    let opened = File::options()
        .read(true)
        .custom_flags(libc::O_DIRECT)
        .open(number.path())
        .unwrap();
    let mut buf = IoBuf::standalone(4096).unwrap();
    opened.read_exact_at(&mut buf[..4096], 0).unwrap();
    server.kill();
    assert!(
        opened.read_at(&mut buf[..4096], 4096).is_err(),
        "an error, no hanging"
    );

    let left = clean_leftovers(&owner, &[]).unwrap();
    assert_eq!(left.len(), 1);
    assert_eq!((left[0].number, left[0].name.as_str()), (number, "r0/0"));
    let users = left[0].in_use.clone().expect("this test has it open");
    let own = format!("process {} ", std::process::id());
    assert!(users.iter().any(|user| user.starts_with(&own)), "{users:?}");
    drop(opened);

    // It went with its last user, or goes with the next look.
    let left = clean_leftovers(&owner, &[]).unwrap();
    assert!(
        left.iter().all(|leftover| leftover.in_use.is_none()),
        "{left:?}"
    );
    assert!(clean_leftovers(&owner, &[]).unwrap().is_empty());
}

#[test]
fn with_a_holder_verified_io_survives_kills_of_its_server() {
    let Some(_guard) = can_mount() else { return };
    if !have_programs(&["fio"]) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let file = volume_file(dir.path());
    let hold = dir.path().join("hold.sock");
    let owner = format!("{}-hold", std::process::id());
    let mut server = Server::start(&owner, &file, Some(&hold));
    let number = server.number;
    let before = completed_writes(number);
    let mut fio = Command::new("fio")
        .args([
            "--name=check",
            "--ioengine=libaio",
            "--direct=1",
            "--rw=randwrite",
            "--bs=4k",
        ])
        .args([
            "--iodepth=16",
            "--verify=crc32c",
            "--do_verify=1",
            "--verify_fatal=1",
        ])
        .args(["--size=24m", "--loops=3", "--output-format=terse"])
        .arg(format!("--filename={}", number.path().display()))
        .current_dir(dir.path())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    for round in 1..=3u64 {
        // Some more writes have been seen, so the kill comes in the middle of them.
        wait_for_writes(number, before + round * 1500);
        server.kill();
        server = Server::start(&owner, &file, Some(&hold));
        assert_eq!(server.number, number);
    }
    assert!(fio.wait().unwrap().success(), "no error and nothing lost");
    server.stop();
    assert!(clean_leftovers(&owner, &[]).unwrap().is_empty());
}

/// Returns when the device has completed so many writes.
fn wait_for_writes(number: LoopNumber, count: u64) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while completed_writes(number) < count {
        assert!(Instant::now() < deadline, "the device makes no progress");
        std::thread::yield_now();
    }
}

/// The kernel counts over all bindings of the number.
fn completed_writes(number: LoopNumber) -> u64 {
    let stat = format!("/sys/block/loop{}/stat", number.0);
    let text = std::fs::read_to_string(stat).unwrap();
    text.split_whitespace().nth(4).unwrap().parse().unwrap()
}
