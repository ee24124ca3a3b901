//! The port of a volume that is not there.

use lockstep_core::event::RequestId;
use lockstep_io::pool::IoBuf;
use lockstep_io::port::{PortRequest, SubmitError, VolumePort, VolumeProperties};

/// Stands for a volume that has gone.
pub(crate) struct NoVolume;

impl VolumePort for NoVolume {
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

    fn open(&mut self, _: RequestId, _: bool) {}

    fn close(&mut self, _: bool) {}
}
