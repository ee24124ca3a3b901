//! How much processor time the proxy's threads have had, by name.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::Duration;

/// Microseconds by the name of the thread, those of a pool together. Empty where the kernel does
/// not count.
pub(crate) fn cpu_us() -> BTreeMap<String, u64> {
    let mut times = BTreeMap::new();
    let tasks = std::fs::read_dir("/proc/self/task").into_iter().flatten();
    for task in tasks.flatten() {
        // A thread may end while it is looked at.
        if let Some((name, us)) = one(&task.path()) {
            *times.entry(name).or_insert(0) += us;
        }
    }
    times
}

/// The numbers of this process's threads.
pub(crate) fn ids() -> BTreeSet<u32> {
    let tasks = std::fs::read_dir("/proc/self/task").into_iter().flatten();
    let name = |task: std::io::Result<std::fs::DirEntry>| task.ok()?.file_name().into_string().ok();
    tasks
        .filter_map(name)
        .filter_map(|id| id.parse().ok())
        .collect()
}

/// Processor time of these threads, as far as they live.
pub(crate) fn cpu_of(ids: &BTreeSet<u32>) -> Duration {
    let task = |id: &u32| one(Path::new(&format!("/proc/self/task/{id}")));
    let us = ids.iter().filter_map(task).map(|(_, us)| us).sum();
    Duration::from_micros(us)
}

fn one(task: &Path) -> Option<(String, u64)> {
    let name = std::fs::read_to_string(task.join("comm")).ok()?;
    let times = std::fs::read_to_string(task.join("schedstat")).ok()?;
    let ns: u64 = times.split_whitespace().next()?.parse().ok()?;
    let name = name.trim().trim_end_matches(|c: char| c.is_ascii_digit());
    Some((name.trim_end_matches('-').to_string(), ns / 1000))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_of_a_pool_are_counted_together() {
        let (ready, wait) = std::sync::mpsc::channel();
        let (end, ends): (Vec<_>, Vec<_>) =
            (0..2).map(|_| std::sync::mpsc::channel::<()>()).unzip();
        let threads: Vec<_> = ends
            .into_iter()
            .enumerate()
            .map(|(number, end)| {
                let ready = ready.clone();
                let work = move || {
                    ready.send(()).unwrap();
                    let _ = end.recv();
                };
                let thread = std::thread::Builder::new().name(format!("some-pool-{number}"));
                thread.spawn(work).unwrap()
            })
            .collect();
        (0..2).for_each(|_| wait.recv().unwrap());
        assert!(cpu_us().contains_key("some-pool"), "{:?}", cpu_us());
        // Two of the pool, the test's own and the first of the process.
        assert!(ids().len() >= 4, "{:?}", ids());
        assert!(cpu_of(&ids()) > Duration::ZERO);
        assert_eq!(cpu_of(&BTreeSet::new()), Duration::ZERO);
        drop(end);
        threads
            .into_iter()
            .for_each(|thread| thread.join().unwrap());
    }
}
