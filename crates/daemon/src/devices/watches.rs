//! What tells the thread of devices to look: mounts, and opens and closes of its devices.

use std::sync::Arc;
use std::sync::mpsc::{SyncSender, TrySendError};

use lockstep_front::closes::{Closes, Touch};

use super::Order;

/// Has the devices looked at whenever something is mounted or unmounted.
pub(super) fn watch_mounts(orders: SyncSender<Order>) -> std::io::Result<()> {
    use rustix::event::{PollFd, PollFlags, poll};
    let mounts = std::fs::File::open("/proc/self/mountinfo")?;
    let watch = move || {
        loop {
            let mut fds = [PollFd::new(&mounts, PollFlags::PRI)];
            match poll(&mut fds, None) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => return tracing::warn!(%error, "mounts are seen a second later"),
            }
            match orders.try_send(Order::Look) {
                Ok(()) | Err(TrySendError::Full(_)) => {}
                Err(TrySendError::Disconnected(_)) => return,
            }
        }
    };
    let thread = std::thread::Builder::new().name("mounts".into());
    thread.spawn(watch).map(drop)
}

/// Has a device looked at when somebody has opened it, or closed it and could write.
pub(super) fn watch_closes(closes: Arc<Closes>, orders: SyncSender<Order>) -> std::io::Result<()> {
    let watch = move || {
        loop {
            let touches = match closes.wait() {
                Ok(touches) => touches,
                Err(error) => return tracing::warn!(%error, "closed devices are seen later"),
            };
            for (number, touch) in touches {
                let order = match touch {
                    Touch::Opened => Order::Opened(number),
                    Touch::Closed => Order::Closed(number),
                };
                // With a full queue it is looked at soon anyway.
                if let Err(TrySendError::Disconnected(_)) = orders.try_send(order) {
                    return;
                }
            }
        }
    };
    let thread = std::thread::Builder::new().name("closes".into());
    thread.spawn(watch).map(drop)
}
