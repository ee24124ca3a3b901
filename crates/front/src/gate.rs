//! Opens a volume when its block device is used, because nobody tells a front end when its block
//! device is opened: the first read opens the volume for reading, the first write for writing, with
//! all that follows from it (`auto-promote`). It stays open until its owner finds that nobody uses
//! the device any more.
//!
//! What a reader of a Secondary has seen may be in its page cache. If another node changes the data
//! meanwhile, all further requests fail until nobody uses the device, so that nothing is written
//! that was derived from old data.

use std::sync::mpsc::sync_channel;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use lockstep_core::command::CommandError;
use lockstep_core::event::RequestId;
use lockstep_io::port::{PortEvent, PortSink, VolumePort, VolumeProperties};

use crate::apart::apart;
use crate::usage::{self, BlockNumber};

/// How long requests are refused at once after a promotion that failed: many of them wait behind the
/// first, and each try takes up to `auto-promote-timeout`.
const REFUSAL: Duration = Duration::from_secs(1);
/// How often somebody who waits looks whether the device is given up.
const GIVEN_UP_CHECK: Duration = Duration::from_millis(100);
/// How long the kernel may take to tell whether somebody has claimed the device.
const CLAIM_TIMEOUT: Duration = Duration::from_secs(5);

/// What a request does to the volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Access {
    /// It only looks.
    Read,
    /// It changes data.
    Write,
}

/// A device's use of its volume, as long as somebody seems to use it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Session {
    /// How the volume is open. None if every open was refused, or the data have changed elsewhere.
    pub access: Option<Access>,
    /// Requests so far, to see later whether there were more.
    pub uses: u64,
}

/// A request may go on; the volume stays open at least until this is dropped.
pub(crate) struct Pass<'a>(&'a Shared);

impl Drop for Pass<'_> {
    fn drop(&mut self) {
        self.0.lock().inside -= 1;
    }
}

/// A request may not go on, for this reason.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refused(pub String);

/// The opener of a device's volume.
pub struct Gate {
    shared: Arc<Shared>,
    /// The block device, once there is one.
    number: OnceLock<BlockNumber>,
}

struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    /// Apart from the state: a port may answer while it is asked.
    port: Mutex<Option<Box<dyn VolumePort + Send>>>,
}

#[derive(Default)]
struct State {
    /// Passes that are out.
    inside: u32,
    /// It is open for reading, for writing.
    open: [bool; 2],
    /// An open without an answer yet, and what the sink knew when it was asked for.
    asked: Option<Asked>,
    answer: Option<(u64, Result<(), CommandError>)>,
    next_id: u64,
    /// Tries to open for writing are refused until then.
    refused: Option<(Instant, String)>,
    /// Another node may be changing the data now.
    changed_elsewhere: bool,
    /// It has done so since the session began.
    stale: bool,
    uses: u64,
    gone: bool,
}

#[derive(Clone, Copy)]
struct Asked {
    id: u64,
    access: Access,
    changed_elsewhere: bool,
}

impl Gate {
    /// `connect` gives the gate a port of its own.
    pub(crate) fn new(
        connect: &mut dyn FnMut(Box<dyn PortSink>) -> Box<dyn VolumePort + Send>,
    ) -> Gate {
        let shared = Arc::new(Shared {
            state: Mutex::default(),
            changed: Condvar::new(),
            port: Mutex::default(),
        });
        // The port owns its sink, so the sink must not own the port.
        let port = connect(Box::new(Sink(Arc::downgrade(&shared))));
        *shared.port() = Some(port);
        Gate {
            shared,
            number: OnceLock::new(),
        }
    }

    pub(crate) fn set_number(&self, number: BlockNumber) {
        // A device keeps its number for life.
        let _ = self.number.set(number);
    }

    /// Opens the volume for this, if it is not open yet; the answer may take `auto-promote-timeout`.
    pub fn open(&self, access: Access) -> Result<(), Refused> {
        self.enter(access, &|| false).map(drop)
    }

    /// A pass if the volume is open in that way already.
    pub(crate) fn try_pass(&self, access: Access) -> Option<Pass<'_>> {
        let mut state = self.shared.lock();
        let open = state.open[1] || (access == Access::Read && state.open[0]);
        if !open || state.never().is_some() {
            return None;
        }
        state.uses += 1;
        state.inside += 1;
        Some(Pass(&self.shared))
    }

    /// The same for a request, until `given_up`. What is submitted while the pass lives reaches the
    /// volume while it is open.
    pub(crate) fn enter(
        &self,
        access: Access,
        given_up: &dyn Fn() -> bool,
    ) -> Result<Pass<'_>, Refused> {
        self.shared.lock().uses += 1;
        match (self.try_enter(access, given_up), access) {
            // Who claims a device is going to write, and may have to wait for another node's demotion
            // (a mount begins with reading).
            (Err(_), Access::Read) if self.is_claimed() => self.try_enter(Access::Write, given_up),
            (result, _) => result,
        }
    }

    fn try_enter(&self, access: Access, given_up: &dyn Fn() -> bool) -> Result<Pass<'_>, Refused> {
        let mut state = self.shared.lock();
        let mut own: Option<u64> = None;
        loop {
            if let Some(reason) = state.never() {
                return Err(Refused(reason.to_owned()));
            }
            if state.open[1] || (access == Access::Read && state.open[0]) {
                state.inside += 1;
                return Ok(Pass(&self.shared));
            }
            if let Some((_, result)) = state.answer.take_if(|(id, _)| Some(*id) == own) {
                own = None;
                if let Err(error) = result {
                    return Err(Refused(error.text));
                }
                // It was closed again meanwhile, or the data have changed.
                continue;
            }
            if own.is_none() && state.asked.is_none() {
                if access == Access::Write
                    && let Some((until, text)) = &state.refused
                    && Instant::now() < *until
                {
                    return Err(Refused(text.clone()));
                }
                let id = state.ask(access);
                own = Some(id);
                drop(state);
                if let Some(port) = &mut *self.shared.port() {
                    port.open(RequestId(id), access == Access::Write);
                }
                state = self.shared.lock();
                continue;
            }
            if given_up() {
                return Err(Refused("the device is given up".into()));
            }
            let waited = self.shared.changed.wait_timeout(state, GIVEN_UP_CHECK);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// How the device is used now; none if it is not.
    pub fn session(&self) -> Option<Session> {
        let state = self.shared.lock();
        let open = state.open[0] || state.open[1] || state.stale;
        let access = match state.open {
            _ if state.stale => None,
            [_, true] => Some(Access::Write),
            [true, false] => Some(Access::Read),
            [false, false] => None,
        };
        let uses = state.uses;
        open.then_some(Session { access, uses })
    }

    /// Closes the volume, unless the device was used after `uses` or is being used right now.
    pub fn close(&self, uses: u64) -> bool {
        let mut state = self.shared.lock();
        if state.uses != uses || state.inside > 0 || state.asked.is_some() {
            return false;
        }
        let open = std::mem::take(&mut state.open);
        state.stale = false;
        state.refused = None;
        // With the state locked, so that whoever comes now asks for an open behind these.
        if let Some(port) = &mut *self.shared.port() {
            for (n, open) in open.into_iter().enumerate() {
                if open {
                    port.close(n == 1);
                }
            }
        }
        true
    }

    /// The device is not served any more: closes the volume, whoever still looks at this gate.
    pub(crate) fn end(&self) {
        {
            let mut state = self.shared.lock();
            state.gone = true;
            state.open = [false; 2];
            state.asked = None;
        }
        self.shared.changed.notify_all();
        let port = self.shared.port().take();
        drop(port);
    }

    /// Asks the kernel on another thread: it may wait for this device's own requests.
    fn is_claimed(&self) -> bool {
        let Some(&number) = self.number.get() else {
            return false;
        };
        let (tell, told) = sync_channel(1);
        let asked = std::thread::Builder::new()
            .name("claimed".into())
            .spawn(move || {
                let claimed = apart(|| usage::claimed(number)).unwrap_or(false);
                // Nobody may wait for it any more.
                let _ = tell.send(claimed);
            });
        asked.is_ok() && told.recv_timeout(CLAIM_TIMEOUT).unwrap_or(false)
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn port(&self) -> MutexGuard<'_, Option<Box<dyn VolumePort + Send>>> {
        self.port.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn never(&self) -> Option<&'static str> {
        if self.gone {
            Some("the volume is gone")
        } else if self.stale {
            Some("another node has changed the data; close the device everywhere first")
        } else {
            None
        }
    }

    fn ask(&mut self, access: Access) -> u64 {
        let id = self.next_id;
        self.next_id += 1;
        self.asked = Some(Asked {
            id,
            access,
            changed_elsewhere: self.changed_elsewhere,
        });
        id
    }

    fn answered(&mut self, id: u64, result: Result<(), CommandError>) {
        let Some(asked) = self.asked.take_if(|asked| asked.id == id) else {
            return;
        };
        match &result {
            Ok(()) => {
                self.open[usize::from(asked.access == Access::Write)] = true;
                if self.changed_elsewhere && !asked.changed_elsewhere {
                    self.stale = asked.access == Access::Read;
                }
            }
            // For all who wait, whichever of them wakes up first.
            Err(error) if asked.access == Access::Write => {
                tracing::warn!(id, %error, "the volume cannot be opened for writing");
                self.refused = Some((Instant::now() + REFUSAL, error.text.clone()));
            }
            Err(_) => {}
        }
        self.answer = Some((id, result));
    }

    fn properties(&mut self, new: &VolumeProperties) {
        // Whatever it was, a promotion may succeed now.
        self.refused = None;
        let begins = new.changed_elsewhere && !self.changed_elsewhere;
        self.changed_elsewhere = new.changed_elsewhere;
        if begins && self.open == [true, false] {
            tracing::warn!("another node changes the data under a reader of this node's device");
            self.stale = true;
        }
    }
}

struct Sink(Weak<Shared>);

impl PortSink for Sink {
    fn event(&mut self, event: PortEvent) {
        let Some(shared) = self.0.upgrade() else {
            return;
        };
        {
            let mut state = shared.lock();
            match event {
                PortEvent::Opened { id, result } => state.answered(id.0, result),
                PortEvent::Changed(new) => state.properties(&new),
                PortEvent::Gone => {
                    state.gone = true;
                    state.asked = None;
                }
                PortEvent::Done(_) => {}
            }
        }
        shared.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use lockstep_core::command::ErrorCode;
    use lockstep_io::pool::IoBuf;
    use lockstep_io::port::{PortRequest, SubmitError};

    use super::*;

    /// A volume that answers every open at once.
    #[derive(Clone, Default)]
    struct Volume(Arc<Answers>);

    #[derive(Default)]
    struct Answers {
        refuses_writers: AtomicBool,
        /// What was asked, `-` before a close.
        asked: Mutex<Vec<&'static str>>,
        sink: Mutex<Option<Box<dyn PortSink>>>,
    }

    impl Volume {
        fn tell(&self, event: PortEvent) {
            if let Some(sink) = &mut *self.0.sink.lock().unwrap() {
                sink.event(event);
            }
        }

        fn changed_elsewhere(&self, changed_elsewhere: bool) {
            self.tell(PortEvent::Changed(VolumeProperties {
                changed_elsewhere,
                ..VolumeProperties::default()
            }));
        }

        fn asked(&self) -> Vec<&'static str> {
            std::mem::take(&mut *self.0.asked.lock().unwrap())
        }
    }

    impl VolumePort for Volume {
        fn properties(&self) -> VolumeProperties {
            VolumeProperties::default()
        }

        fn alloc(&self, _: usize) -> Option<IoBuf> {
            None
        }

        fn submit(&mut self, request: PortRequest) -> Result<(), SubmitError> {
            Err(SubmitError::Gone(request))
        }

        fn kick(&mut self) {}

        fn open(&mut self, id: RequestId, write: bool) {
            let word = if write { "write" } else { "read" };
            self.0.asked.lock().unwrap().push(word);
            let refuses = write && self.0.refuses_writers.load(Ordering::Relaxed);
            let result = if refuses {
                Err(CommandError {
                    code: ErrorCode::TWO_PRIMARIES,
                    text: "node 1 is Primary".into(),
                })
            } else {
                Ok(())
            };
            self.tell(PortEvent::Opened { id, result });
        }

        fn close(&mut self, write: bool) {
            let word = if write { "-write" } else { "-read" };
            self.0.asked.lock().unwrap().push(word);
        }
    }

    fn gate() -> (Gate, Volume) {
        let volume = Volume::default();
        let port = volume.clone();
        let gate = Gate::new(&mut |sink| {
            *volume.0.sink.lock().unwrap() = Some(sink);
            Box::new(port.clone())
        });
        (gate, volume)
    }

    #[test]
    fn a_volume_is_opened_as_far_as_it_is_used_and_closed_when_it_is_not() {
        let (gate, volume) = gate();
        assert_eq!(gate.session(), None);
        assert!(gate.try_pass(Access::Read).is_none(), "not open");
        gate.open(Access::Read).unwrap();
        gate.open(Access::Read).unwrap();
        assert_eq!(volume.asked(), ["read"]);
        assert!(gate.try_pass(Access::Write).is_none());
        gate.open(Access::Write).unwrap();
        assert_eq!(volume.asked(), ["write"]);
        let session = gate.session().unwrap();
        assert_eq!(session.access, Some(Access::Write));

        let pass = gate.try_pass(Access::Read).unwrap();
        let uses = gate.session().unwrap().uses;
        assert!(!gate.close(session.uses), "used since");
        assert!(!gate.close(uses), "used now");
        drop(pass);
        assert!(gate.close(uses));
        assert_eq!(volume.asked(), ["-read", "-write"]);
        assert_eq!(gate.session(), None);
    }

    #[test]
    fn requests_behind_a_refused_one_do_not_wait_for_another_promotion() {
        let (gate, volume) = gate();
        volume.0.refuses_writers.store(true, Ordering::Relaxed);
        let refused = gate.open(Access::Write).unwrap_err();
        assert_eq!(refused, Refused("node 1 is Primary".into()));
        assert_eq!(gate.open(Access::Write).unwrap_err(), refused);
        assert_eq!(volume.asked(), ["write"]);
        // Something has changed, so it may go now.
        volume.0.refuses_writers.store(false, Ordering::Relaxed);
        volume.changed_elsewhere(false);
        gate.open(Access::Write).unwrap();
        assert_eq!(volume.asked(), ["write"]);
    }

    #[test]
    fn who_waited_for_a_refused_promotion_asks_for_no_other() {
        let (gate, volume) = gate();
        volume.0.refuses_writers.store(true, Ordering::Relaxed);
        // Another one has asked, and has not seen the answer yet.
        let id = gate.shared.lock().ask(Access::Write);
        volume.clone().open(RequestId(id), true);
        let refused = gate.open(Access::Write).unwrap_err();
        assert_eq!(refused, Refused("node 1 is Primary".into()));
        assert_eq!(volume.asked(), ["write"]);
    }

    #[test]
    fn who_has_read_old_data_cannot_write() {
        let (gate, volume) = gate();
        gate.open(Access::Read).unwrap();
        volume.changed_elsewhere(true);
        volume.changed_elsewhere(false);
        for access in [Access::Read, Access::Write] {
            let refused = gate.open(access).unwrap_err();
            assert!(
                refused.0.contains("another node has changed"),
                "{refused:?}"
            );
        }
        assert!(gate.try_pass(Access::Read).is_none());
        let session = gate.session().unwrap();
        assert_eq!(session.access, None);
        assert!(gate.close(session.uses), "all users have gone");
        gate.open(Access::Write).unwrap();
        // A writer is Primary: nobody else changes anything.
        volume.changed_elsewhere(true);
        gate.open(Access::Read).unwrap();
    }

    #[test]
    fn a_device_that_is_not_served_any_more_has_closed_its_volume() {
        let (gate, volume) = gate();
        gate.open(Access::Write).unwrap();
        let ports = Arc::strong_count(&volume.0);
        // Whoever looks how it is used.
        let gate = Arc::new(gate);
        let looker = gate.clone();
        gate.end();
        assert_eq!(Arc::strong_count(&volume.0), ports - 1, "the port lives");
        assert_eq!(volume.asked(), ["write"]);
        assert_eq!(looker.session(), None);
        assert!(looker.open(Access::Write).is_err());
        assert!(volume.asked().is_empty());
    }

    #[test]
    fn a_volume_that_has_gone_is_not_waited_for() {
        let (gate, volume) = gate();
        volume.tell(PortEvent::Gone);
        assert!(gate.open(Access::Read).is_err());
        assert!(volume.asked().is_empty());
    }
}
