//! Requests that a peer of an old version does not take as they are: longer than it takes, or
//! durable by themselves. They go in pieces, each like a request of its own, and end together; the
//! last piece of a durable one is a flush.

use alloc::collections::BTreeMap;

use lockstep_format::units::{NodeId, Sector};

use super::slab::Key;
use super::write::AppRequest;
use crate::event::{Payload, Request, RequestError, RequestId, RequestKind};
use crate::resource::Resource;

/// Numbers of pieces have this bit; those of front ends count up from zero.
const PIECE: u64 = 1 << 63;

#[derive(Debug)]
struct Whole {
    /// Pieces that are left.
    left: u32,
    /// The first error.
    result: Result<(), RequestError>,
    /// The flush that comes behind them.
    flush: Option<Request>,
}

/// What the end of a request means.
#[derive(Debug)]
pub(crate) enum Ended {
    /// Other pieces are still under way.
    Partly,
    /// This is the answer for the front end.
    Whole(RequestId, Result<(), RequestError>),
    /// The flush is next.
    Flush(Request),
}

/// Requests of which pieces are under way.
#[derive(Debug, Default)]
pub(crate) struct Pieces {
    next: u64,
    /// The request that a piece belongs to.
    whole_of: BTreeMap<RequestId, RequestId>,
    wholes: BTreeMap<RequestId, Whole>,
}

impl Pieces {
    /// Requests that have not ended.
    pub(super) fn len(&self) -> usize {
        self.wholes.len() + self.whole_of.len()
    }

    /// A request ended, or a piece of one.
    pub(crate) fn done(&mut self, id: RequestId, result: Result<(), RequestError>) -> Ended {
        if id.0 & PIECE == 0 {
            return Ended::Whole(id, result);
        }
        let Some(name) = self.whole_of.remove(&id) else {
            return Ended::Partly;
        };
        let Some(whole) = self.wholes.get_mut(&name) else {
            return Ended::Partly;
        };
        whole.result = whole.result.and(result);
        whole.left -= 1;
        if whole.left > 0 {
            return Ended::Partly;
        }
        let result = whole.result;
        let flush = whole.flush.take();
        self.wholes.remove(&name);
        match flush {
            Some(flush) if result.is_ok() => Ended::Flush(flush),
            _ => Ended::Whole(name, result),
        }
    }

    fn piece_of(&mut self, whole: RequestId) -> RequestId {
        let id = RequestId(PIECE | self.next);
        self.next += 1;
        self.whole_of.insert(id, whole);
        id
    }
}

impl Resource {
    /// The write, if the peer's version can carry it; if not, the connection ends with a text.
    pub(super) fn carried(&mut self, peer: NodeId, key: Key) -> Option<&AppRequest> {
        let req = self.io.requests.get(key)?;
        let (kind, size_bytes) = (req.kind, req.size_bytes);
        if !self.can_carry(peer, kind, size_bytes) {
            // The connection is over, and this write was never among those that it took with it.
            let req = self.io.requests.get_mut(key)?;
            req.ok.remove(peer);
            req.pending.remove(peer);
            req.unsettled.remove(peer);
            return None;
        }
        let req = self.io.requests.get_mut(key)?;
        // Sent now, it is newer than the marks of a resync before.
        req.replaced.remove(peer);
        Some(req)
    }

    /// Takes a request that a peer would not take as it is; false if it can go unchanged.
    pub(crate) fn goes_in_pieces(&mut self, request: &Request) -> bool {
        let most = self.longest_request();
        let durable = request.kind == RequestKind::Write { fua: true } && self.lacks_durability();
        let moves = matches!(request.kind, RequestKind::Read | RequestKind::Write { .. });
        let Some(payload) = request.payload.filter(|_| moves) else {
            return false;
        };
        if request.len <= most && !durable {
            return false;
        }
        let count = request.len.div_ceil(most);
        let whole = Whole {
            left: count,
            result: Ok(()),
            flush: (durable && !planted!(self, DurablePiecesNotFlushed)).then_some(Request {
                kind: RequestKind::Flush,
                sector: Sector(0),
                len: 0,
                payload: None,
                ..*request
            }),
        };
        self.io.pieces.wholes.insert(request.id, whole);
        let kind = match request.kind {
            RequestKind::Write { .. } if durable => RequestKind::Write { fua: false },
            kind => kind,
        };
        for start in (0..request.len).step_by(most as usize) {
            let len = most.min(request.len - start);
            let piece = Request {
                id: self.io.pieces.piece_of(request.id),
                kind,
                sector: Sector(request.sector.0 + u64::from(start) / Sector::SIZE),
                len,
                payload: Some(Payload {
                    buf: payload.buf,
                    offset: payload.offset + start,
                    len,
                }),
                ..*request
            };
            self.take_request(piece);
        }
        true
    }
}
