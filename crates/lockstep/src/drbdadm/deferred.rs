//! Calls that are collected first and run stage by stage, for `up` and `adjust`.

use lockstep_format::conf::model::{Config, Volume};

use super::calls::{Call, OptionWords};
use super::commands::TimeClass;
use super::targets::Target;

/// When a call's turn is. The order of the variants is the order of the stages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Stage {
    Prerequisite,
    Resource,
    DiskPrepareDown,
    DiskPrepareUp,
    NetDisconnect,
    NetPrepareDown,
    NetPrepareUp,
    NetPath,
    Net,
    PeerDevice,
    Disk,
    NetConnect,
    WaitConnect,
}

impl Stage {
    pub(super) const ALL: [Stage; 13] = [
        Stage::Prerequisite,
        Stage::Resource,
        Stage::DiskPrepareDown,
        Stage::DiskPrepareUp,
        Stage::NetDisconnect,
        Stage::NetPrepareDown,
        Stage::NetPrepareUp,
        Stage::NetPath,
        Stage::Net,
        Stage::PeerDevice,
        Stage::Disk,
        Stage::NetConnect,
        Stage::WaitConnect,
    ];

    /// Whether a failure makes the rest for the resource pointless.
    pub(super) const fn is_essential(self) -> bool {
        matches!(
            self,
            Stage::Prerequisite
                | Stage::DiskPrepareDown
                | Stage::DiskPrepareUp
                | Stage::NetPrepareDown
                | Stage::NetPrepareUp
        )
    }
}

/// What is done at a turn.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Work {
    /// Calls one after another; the first failure ends them.
    Calls(Vec<Call>, TimeClass),
    /// A wait that may also run into its time limit.
    Wait(Call),
    /// A change of size with what follows it, for a minor.
    Resize {
        minor: u32,
        calls: Vec<Call>,
        size: Option<String>,
    },
}

/// Index of a deferred piece of work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Id(usize);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Progress {
    Pending,
    /// Run, cancelled, or skipped after an error.
    Over,
}

#[derive(Clone, Debug)]
struct Deferred {
    stage: Stage,
    resource: String,
    work: Work,
    after: Option<Id>,
    progress: Progress,
}

/// Work of one run of `up` or `adjust`.
#[derive(Clone, Debug, Default)]
pub(super) struct Schedule {
    all: Vec<Deferred>,
}

/// How a run of a schedule goes on after a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AfterFailure {
    Stop,
    GoOn,
}

impl Schedule {
    pub(super) fn add(
        &mut self,
        stage: Stage,
        resource: &str,
        work: Work,
        after: Option<Id>,
    ) -> Id {
        let progress = Progress::Pending;
        self.all.push(Deferred {
            stage,
            resource: resource.into(),
            work,
            after,
            progress,
        });
        Id(self.all.len() - 1)
    }

    pub(super) fn call(
        &mut self,
        stage: Stage,
        resource: &str,
        call: Call,
        after: Option<Id>,
    ) -> Id {
        self.add(
            stage,
            resource,
            Work::Calls(vec![call], TimeClass::Short),
            after,
        )
    }

    pub(super) fn cancel(&mut self, id: Id) {
        self.all[id.0].progress = Progress::Over;
    }

    pub(super) fn is_depended_on(&self, id: Id) -> bool {
        self.all.iter().any(|work| work.after == Some(id))
    }

    /// Pieces of work so far; those added later have a count of at least this.
    pub(super) fn count(&self) -> usize {
        self.all.len()
    }

    /// Drops what was added behind a count.
    pub(super) fn truncate(&mut self, count: usize) {
        self.all.truncate(count);
    }

    /// Runs everything with `perform`, which returns whether it worked. Returns 0 or 1.
    pub(super) fn run(
        mut self,
        after_failure: AfterFailure,
        mut perform: impl FnMut(&str, &Work) -> bool,
    ) -> u8 {
        let mut failed_resources: Vec<String> = Vec::new();
        let mut code = 0;
        loop {
            let mut moved = false;
            for stage in Stage::ALL {
                let mut stage_failed = false;
                for index in 0..self.all.len() {
                    let work = &self.all[index];
                    if work.stage != stage || work.progress == Progress::Over {
                        continue;
                    }
                    let ready = work
                        .after
                        .is_none_or(|id| self.all[id.0].progress == Progress::Over);
                    if !ready {
                        continue;
                    }
                    moved = true;
                    let worked = failed_resources.contains(&work.resource)
                        || perform(&work.resource, &work.work);
                    if !worked {
                        stage_failed = true;
                        if stage.is_essential() {
                            failed_resources.push(work.resource.clone());
                        }
                    }
                    self.all[index].progress = Progress::Over;
                }
                if stage_failed {
                    code = 1;
                    if after_failure == AfterFailure::Stop {
                        return code;
                    }
                }
            }
            if !moved {
                return code;
            }
        }
    }
}

/// The three calls of `attach`.
pub(super) fn attach_calls(words: &OptionWords<'_>, volume: &Volume) -> Vec<Call> {
    vec![
        Call::meta(volume, ["repair-md"]),
        Call::meta(volume, ["apply-al"]),
        words.attach(volume),
    ]
}

/// Schedules everything for a resource that is not there yet; of its connections only one, if one is
/// named.
pub(super) fn up(schedule: &mut Schedule, config: &Config, target: &Target) {
    let resource = target.resource(config);
    let words = OptionWords { config, cli: &[] };
    let name = &resource.name;
    let Some(host) = resource.my_host() else {
        return;
    };
    let first = schedule.call(
        Stage::Prerequisite,
        name,
        words.new_resource(resource),
        None,
    );
    for volume in &host.effective {
        let call = words.new_minor(resource, volume);
        let minor = schedule.call(Stage::DiskPrepareUp, name, call, Some(first));
        if volume.disk_path().is_some() {
            let calls = Work::Calls(attach_calls(&words, volume), TimeClass::Medium);
            schedule.add(Stage::Disk, name, calls, Some(minor));
        }
    }
    for view in target.connections(config) {
        let call = words.net("new-peer", resource, &view, &[]);
        let peer = schedule.call(Stage::NetPrepareUp, name, call, Some(first));
        for path in &view.paths {
            let call = super::calls::path("new-path", name, view.peer_node_id(), path);
            schedule.call(Stage::NetPath, name, call, Some(peer));
        }
        let connect = Call::setup(["connect", name, &view.peer_node_id().to_string()]);
        schedule.call(Stage::NetConnect, name, connect, Some(peer));
        for volume in &host.effective {
            let settings = super::calls::peer_device_settings(&view, volume.number);
            if !settings.is_empty() {
                let call = words.peer_device(resource, &view, volume.number, &[]);
                schedule.call(Stage::PeerDevice, name, call, Some(peer));
            }
        }
    }
}
