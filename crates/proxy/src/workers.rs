//! The codec pool: threads of low priority that code and decode chunks. Decoding goes first, for it
//! frees memory at both ends.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::codec::{decode, encode, looks_compressible};
use crate::core::frame::Bytes;
use crate::core::history::Prefix;
use crate::core::plugin::CodecSpec;
use crate::core::stats::Took;
use crate::core::{Input, JobId};
use crate::load::Load;
use crate::mail::Post;

/// Work for the pool.
#[derive(Debug)]
pub(crate) enum Work {
    Encode {
        job: JobId,
        spec: CodecSpec,
        raw: Bytes,
        sample: bool,
        prefix: Prefix,
    },
    Decode {
        job: JobId,
        codec: u8,
        raw_len: u32,
        crc: u32,
        payload: Bytes,
        prefix: Prefix,
    },
}

#[derive(Debug, Default)]
struct Queue {
    encode: VecDeque<Work>,
    decode: VecDeque<Work>,
    stop: bool,
}

/// The threads and their queue. The core limits how much is in it.
#[derive(Debug)]
pub(crate) struct Workers {
    shared: Arc<(Mutex<Queue>, Condvar)>,
    threads: Vec<JoinHandle<()>>,
}

impl Workers {
    /// Starts `count` threads at nice level +10 relative to the caller.
    pub(crate) fn start(count: usize, post: &Post) -> std::io::Result<Workers> {
        let shared = Arc::new((Mutex::new(Queue::default()), Condvar::new()));
        let load = Arc::new(Load::new(count.max(1)));
        let mut threads = Vec::new();
        for number in 0..count.max(1) {
            let (shared, load, post) = (Arc::clone(&shared), Arc::clone(&load), post.clone());
            let thread = std::thread::Builder::new()
                .name(format!("codec-{number}"))
                .spawn(move || work(&shared, &load, &post))?;
            threads.push(thread);
        }
        Ok(Workers { shared, threads })
    }

    /// Hands over a piece of work.
    pub(crate) fn push(&self, work: Work) {
        let (queue, wake) = &*self.shared;
        let mut queue = queue.lock().unwrap_or_else(PoisonError::into_inner);
        match work {
            Work::Encode { .. } => queue.encode.push_back(work),
            Work::Decode { .. } => queue.decode.push_back(work),
        }
        wake.notify_one();
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        let (queue, wake) = &*self.shared;
        queue.lock().unwrap_or_else(PoisonError::into_inner).stop = true;
        wake.notify_all();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

fn work(shared: &(Mutex<Queue>, Condvar), load: &Load, post: &Post) {
    // On Linux this is the thread's own priority. Without the right to it the pool works as well.
    let _ = rustix::process::nice(10);
    let (queue, wake) = shared;
    loop {
        let mut held = queue.lock().unwrap_or_else(PoisonError::into_inner);
        let work = loop {
            if held.stop {
                return;
            }
            let next = held.decode.pop_front().or_else(|| held.encode.pop_front());
            match next {
                Some(work) => break work,
                None => held = wake.wait(held).unwrap_or_else(PoisonError::into_inner),
            }
        };
        drop(held);
        let (begun, cpu) = (Instant::now(), thread_cpu());
        let took = || Took {
            wall: begun.elapsed(),
            cpu: thread_cpu().saturating_sub(cpu),
        };
        let answer = match work {
            Work::Encode {
                job,
                spec,
                raw,
                sample,
                prefix,
            } => {
                let hopeless = sample && spec != CodecSpec::None && !looks_compressible(&raw);
                let spec = if hopeless { CodecSpec::None } else { spec };
                let coded = encode(&spec, &raw, &prefix);
                Input::Encoded(job, coded, took())
            }
            Work::Decode {
                job,
                codec,
                raw_len,
                crc,
                payload,
                prefix,
            } => {
                let result = decode(codec, raw_len as usize, crc, &payload, &prefix);
                Input::Decoded(job, result, took())
            }
        };
        let spent = took().cpu;
        post.input(answer);
        if let Some(millicores) = load.account(spent) {
            post.input(Input::FreeCores(millicores));
        }
    }
}

/// Processor time of this thread.
fn thread_cpu() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec.max(0) as u64, time.tv_nsec.max(0) as u32)
}
