//! Opens a volume for those who have opened its device for writing, whether they write or not.
//!
//! The kernel tells that somebody has opened a device, not who and what for, so it is looked for, on a
//! thread: that takes milliseconds, and a promotion up to `auto-promote-timeout`.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use lockstep_front::BlockNumber;
use lockstep_front::gate::{Access, Gate};

/// Looks at one device.
#[derive(Clone, Default)]
pub(crate) struct Opener {
    /// Held by the thread that looks.
    looking: Arc<Mutex<()>>,
    /// Another one waits behind it, and will see what is new.
    waiting: Arc<AtomicBool>,
}

impl Opener {
    /// Somebody has opened the device.
    pub(crate) fn opened(&self, number: BlockNumber, gate: Arc<Gate>) {
        if self.waiting.swap(true, Ordering::SeqCst) {
            return;
        }
        let opener = self.clone();
        let thread = std::thread::Builder::new().name("opener".into());
        let looks = thread.spawn(move || opener.look(number, &gate));
        if let Err(error) = looks {
            self.waiting.store(false, Ordering::SeqCst);
            tracing::warn!(%error, "a device's user counts from its first request only");
        }
    }

    fn look(&self, number: BlockNumber, gate: &Gate) {
        let looking = self.looking.lock().unwrap_or_else(PoisonError::into_inner);
        self.waiting.store(false, Ordering::SeqCst);
        // Without knowing, the first request counts. A refusal is in the log and meets the next write.
        if is_open_for_writing(gate) || !number.has_writer().unwrap_or(false) {
            return;
        }
        let _ = gate.open(Access::Write);
        drop(looking);
    }
}

fn is_open_for_writing(gate: &Gate) -> bool {
    let session = gate.session();
    session.is_some_and(|session| session.access == Some(Access::Write))
}
