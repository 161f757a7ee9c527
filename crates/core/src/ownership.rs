//! Ownership of a checkpoint directory: whether a job may write to it, has to wait, or is refused.
//! The logic is pure: the caller reads records and carries out verdicts.
//!
//! The owner replaces its record every [`RENEWAL`]. Epochs only rise: to take over a directory, a
//! job creates the record of the next epoch, and file systems and object stores let only one job do
//! so. Clocks of different machines are never compared: a reader judges by how long it has itself
//! seen a record unchanged.

use crate::id::RunId;
use crate::time::Time;
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// Interval at which the owner replaces its record.
pub const RENEWAL: Duration = Duration::from_secs(2);
/// A record that has not changed for this long no longer has an owner.
pub const SILENCE: Duration = Duration::from_secs(30);

/// Identifies a process among all others, including later ones that get the same process id.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ProcessId {
    /// The kernel's boot id and PID namespace, in which the process id is valid.
    pub place: String,
    /// Process id.
    pub pid: u32,
    /// Start time of the process, in the kernel's clock ticks.
    pub started: u64,
}

/// The ownership record of a directory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// Identity of the directory.
    pub run: RunId,
    /// Number of owners so far, this one included.
    pub epoch: u64,
    /// Identity of the owner. All agents of one run of a job share it, and so does a later start
    /// that the job's coordinator takes for the same run.
    pub life: String,
    /// Name of the owner's job, for people.
    pub job: String,
    /// Name of the owner's host, for people.
    pub host: String,
    /// The process that renews the record.
    pub process: ProcessId,
    /// Number of machines on which the owner's ranks run.
    pub nodes: u32,
    /// Rises with every renewal, which shows that the owner is alive.
    pub beat: u64,
    /// Whether the owner has released the directory.
    #[serde(default)]
    pub released: bool,
}

/// What a job may do with a directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// This job already owns it, in this epoch.
    Ours {
        /// Epoch of the record.
        epoch: u64,
    },
    /// It has no owner: create the record of this epoch.
    Claim {
        /// Epoch of the record to create.
        epoch: u64,
    },
    /// Its owner may be dead: check again within this time.
    Wait {
        /// Time until the record counts as abandoned.
        left: Duration,
    },
    /// Its owner is alive: the directory cannot be claimed.
    Refuse,
}

/// One reader's observations of a record over time.
#[derive(Clone, Debug)]
pub struct Watch {
    life: String,
    silence: Duration,
    seen: Option<(Record, Time)>,
}

impl Watch {
    /// Creates the view of a reader that is, or wants to be, the owner with identity `life`.
    #[must_use]
    pub fn new(life: String, silence: Duration) -> Self {
        Watch { life, silence, seen: None }
    }

    /// Judges the newest record, read at `now` on this reader's own clock. `dead` means that the
    /// record's process has certainly ended, which only its own machine can determine.
    pub fn judge(&mut self, now: Time, record: Option<&Record>, dead: bool) -> Verdict {
        let Some(record) = record else { return Verdict::Claim { epoch: 1 } };
        // Another job may be claiming a record that was released.
        if record.life == self.life && !record.released {
            return Verdict::Ours { epoch: record.epoch };
        }
        // The file of a record names its epoch, so it may be any number.
        let Some(next) = record.epoch.checked_add(1) else { return Verdict::Refuse };
        let next = Verdict::Claim { epoch: next };
        // If ranks run on several machines, one dead process does not mean a dead job.
        if record.released || (dead && record.nodes <= 1) {
            return next;
        }
        match &self.seen {
            Some((before, since)) if before == record => {
                let quiet = now.since(*since);
                if quiet >= self.silence { next } else { Verdict::Wait { left: self.silence.saturating_sub(quiet) } }
            }
            // The record changed while it was watched.
            Some(_) => {
                self.seen = Some((record.clone(), now));
                Verdict::Refuse
            }
            None => {
                self.seen = Some((record.clone(), now));
                Verdict::Wait { left: self.silence }
            }
        }
    }
}

/// The time in which one job owns one directory. It lasts until a later job takes the directory
/// over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lease {
    /// Identity of the directory.
    pub run: RunId,
    /// Epoch of the owner.
    pub epoch: u64,
}

impl Lease {
    /// Returns whether the owner may still publish: the directory has not been replaced by one of
    /// another `run` (`None`: it has none), and no later owner has taken it over, by the `newest`
    /// epoch on record.
    #[must_use]
    pub fn lasts(self, run: Option<RunId>, newest: Option<u64>) -> bool {
        run.is_none_or(|run| run == self.run) && newest.is_none_or(|newest| newest <= self.epoch)
    }
}

/// Returns the message that explains why a second job may not use a directory.
#[must_use]
pub fn refusal(directory: &str, owner: &Record) -> String {
    let Record { job, host, process, .. } = owner;
    let what = if job.is_empty() { "a job without everstep run".to_owned() } else { format!("job {job}") };
    format!(
        "{directory} belongs to {what} (host {host}, pid {}), which is running; end that job first, or give this one another directory",
        process.pid
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;
    use std::fmt::Write as _;

    fn record(epoch: u64, life: &str, beat: u64) -> Record {
        Record {
            run: RunId(1),
            epoch,
            life: life.into(),
            job: life.into(),
            host: "h".into(),
            process: ProcessId::default(),
            nodes: 1,
            beat,
            released: false,
        }
    }

    #[test]
    fn a_directory_goes_to_one_job_at_a_time() {
        let mut watch = Watch::new("b".into(), SILENCE);
        assert_eq!(watch.judge(Time(0), None, false), Verdict::Claim { epoch: 1 });
        assert_eq!(watch.judge(Time(0), Some(&record(4, "b", 1)), false), Verdict::Ours { epoch: 4 });
        let owner = record(4, "a", 1);
        assert_eq!(watch.judge(Time(0), Some(&owner), true), Verdict::Claim { epoch: 5 }, "dead on this host");
        let released = Record { released: true, ..owner.clone() };
        assert_eq!(watch.judge(Time(0), Some(&released), false), Verdict::Claim { epoch: 5 });
        let own = Record { released: true, ..record(4, "b", 1) };
        assert_eq!(watch.judge(Time(0), Some(&own), false), Verdict::Claim { epoch: 5 }, "another may have seen it");
        assert_eq!(watch.judge(Time(0), Some(&record(u64::MAX, "a", 1)), true), Verdict::Refuse, "none comes next");
        assert_eq!(watch.judge(Time(0), Some(&owner), false), Verdict::Wait { left: SILENCE });
        assert_eq!(watch.judge(Time(29_999), Some(&owner), false), Verdict::Wait { left: Duration::from_millis(1) });
        assert_eq!(watch.judge(Time(30_000), Some(&owner), false), Verdict::Claim { epoch: 5 });
        assert_eq!(watch.judge(Time(30_001), Some(&record(4, "a", 2)), false), Verdict::Refuse, "it lives");
    }

    #[test]
    fn a_tenure_ends_with_a_later_owner_or_with_the_directory() {
        let own = Lease { run: RunId(1), epoch: 4 };
        assert!(own.lasts(Some(RunId(1)), Some(4)) && own.lasts(None, None), "its files may be gone");
        assert!(!own.lasts(Some(RunId(1)), Some(5)));
        assert!(!own.lasts(Some(RunId(2)), Some(4)) && !own.lasts(Some(RunId(2)), None), "made anew by another job");
    }

    #[test]
    fn one_dead_process_of_several_machines_is_not_a_dead_job() {
        let owner = Record { nodes: 2, ..record(1, "a", 1) };
        let mut watch = Watch::new("b".into(), SILENCE);
        assert!(matches!(watch.judge(Time(0), Some(&owner), true), Verdict::Wait { .. }));
    }

    #[derive(Clone, Debug)]
    enum Act {
        /// A job reads the newest record, and claims the directory if it may.
        Look(usize),
        Renew(usize),
        /// The check before a publication, and the publication itself, with any other acts in
        /// between.
        Check(usize),
        Publish(usize),
        Crash(usize),
        Pass(u64),
    }

    fn act() -> impl Strategy<Value = Act> {
        prop_oneof![
            3 => (0..3usize).prop_map(Act::Look),
            2 => (0..3usize).prop_map(Act::Renew),
            3 => (0..3usize).prop_map(Act::Check),
            3 => (0..3usize).prop_map(Act::Publish),
            1 => (0..3usize).prop_map(Act::Crash),
            3 => (0..40_000u64).prop_map(Act::Pass),
        ]
    }

    /// One of several jobs. Its clock is off by any amount, and it may be paused between any two of
    /// its acts.
    struct Actor {
        watch: Watch,
        skew: u64,
        epoch: Option<u64>,
        checked: bool,
        beat: u64,
    }

    proptest! {
        /// Publications are visible only in the order of epochs: after a later owner has published,
        /// no earlier one does, whatever the pauses, crashes and clocks. A job that renews in time
        /// is never taken over.
        #[test]
        fn an_owner_that_is_late_publishes_nothing(acts in prop::collection::vec(act(), 0..120), skews in prop::array::uniform3(0u64..10_000_000)) {
            let (mut now, mut records): (u64, BTreeMap<u64, Record>) = (0, BTreeMap::new());
            let mut renewed: BTreeMap<u64, u64> = BTreeMap::new();
            let new = |i: usize| Actor { watch: Watch::new(format!("job-{i}"), SILENCE), skew: skews[i], epoch: None, checked: false, beat: 0 };
            let mut jobs: Vec<Actor> = (0..3).map(new).collect();
            let (mut newest_published, mut lives) = (0, 0);
            for act in acts {
                match act {
                    Act::Pass(ms) => now += ms,
                    Act::Crash(i) => { let skew = jobs[i].skew; lives += 1; jobs[i] = Actor { skew, ..new(i) }; write!(jobs[i].watch.life, ".{lives}").expect("a string takes it"); }
                    Act::Look(i) if jobs[i].epoch.is_none() => {
                        let newest = records.last_key_value().map(|(_, r)| r.clone());
                        let job = &mut jobs[i];
                        match job.watch.judge(Time(now + job.skew), newest.as_ref(), false) {
                            Verdict::Ours { epoch } => job.epoch = Some(epoch),
                            Verdict::Claim { epoch } => {
                                if let Some(owner) = &newest {
                                    prop_assert!(now - renewed[&owner.epoch] >= 30_000, "taken from an owner that renews");
                                }
                                // Exclusive creation.
                                prop_assert!(!records.contains_key(&epoch));
                                records.insert(epoch, record(epoch, &job.watch.life, 0));
                                renewed.insert(epoch, now);
                                job.epoch = Some(epoch);
                            }
                            Verdict::Wait { .. } | Verdict::Refuse => {}
                        }
                    }
                    Act::Renew(i) => if let Some(epoch) = jobs[i].epoch {
                        jobs[i].beat += 1;
                        records.insert(epoch, record(epoch, &jobs[i].watch.life, jobs[i].beat));
                        renewed.insert(epoch, now);
                    },
                    Act::Check(i) => if let Some(epoch) = jobs[i].epoch {
                        jobs[i].checked = Lease { run: RunId(1), epoch }.lasts(Some(RunId(1)), records.last_key_value().map(|(e, _)| *e));
                    },
                    Act::Publish(i) => if let Some(epoch) = jobs[i].epoch.filter(|_| jobs[i].checked) {
                        // A publication becomes visible, the record is read once more, and the
                        // publication is withdrawn if another job owns the directory by now.
                        let stays = Lease { run: RunId(1), epoch }.lasts(Some(RunId(1)), records.last_key_value().map(|(e, _)| *e));
                        if stays {
                            prop_assert!(epoch >= newest_published);
                            newest_published = epoch;
                        }
                        jobs[i].checked = false;
                    },
                    Act::Look(_) => {}
                }
            }
        }
    }
}
