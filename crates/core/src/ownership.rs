//! Who owns a directory of checkpoints: whether a job may write into it, has to wait, or is refused. Pure: what was read goes in, what to do
//! comes out.
//!
//! The owner replaces its record every [`RENEWAL`]. Epochs only rise: whoever takes a directory over creates the record of the next one,
//! which a file system and a store let only one of several do. Clocks of different machines are never compared: a reader judges by how
//! long it has itself watched a record that did not change.

use crate::id::RunId;
use crate::time::Time;
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// The owner replaces its record this often.
pub const RENEWAL: Duration = Duration::from_secs(2);
/// A record that has not changed for this long has no owner any more.
pub const SILENCE: Duration = Duration::from_secs(30);

/// A process that can be told from every other one, also from one that gets its number later.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ProcessId {
    /// The kernel's boot id and its namespace of process numbers: only there the number means anything.
    pub place: String,
    /// Its number.
    pub pid: u32,
    /// When it started, in the kernel's ticks.
    pub started: u64,
}

/// What a directory says of its owner.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// The directory's identity.
    pub run: RunId,
    /// Counts the owners.
    pub epoch: u64,
    /// The owner. All agents of one job have the same one; so has a later start that the job's coordinator knows.
    pub life: String,
    /// Its name, for people.
    pub job: String,
    /// Name of its host, for people.
    pub host: String,
    /// The process that renews this.
    pub process: ProcessId,
    /// Machines that its ranks run on.
    pub nodes: u32,
    /// Counts renewals.
    pub beat: u64,
    /// The owner has let go.
    #[serde(default)]
    pub released: bool,
}

/// What to do about a directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It is this job's already, in this epoch.
    Ours {
        /// the record's
        epoch: u64,
    },
    /// Nobody has it: create the record of this epoch.
    Claim {
        /// the next one
        epoch: u64,
    },
    /// Its owner may be gone: look again, for at most this long.
    Wait {
        /// until the record counts as abandoned
        left: Duration,
    },
    /// Its owner lives.
    Refuse,
}

/// One reader's view of a record over time.
#[derive(Clone, Debug)]
pub struct Watch {
    life: String,
    silence: Duration,
    seen: Option<(Record, Time)>,
}

impl Watch {
    /// A reader that is, or wants to be, the owner called `life`.
    #[must_use]
    pub fn new(life: String, silence: Duration) -> Self {
        Watch { life, silence, seen: None }
    }

    /// Judges the newest record, as it was read at `now` of this reader's own clock. `dead`: its process has certainly ended, which only
    /// its own machine can tell.
    pub fn judge(&mut self, now: Time, record: Option<&Record>, dead: bool) -> Verdict {
        let Some(record) = record else { return Verdict::Claim { epoch: 1 } };
        if record.life == self.life {
            return Verdict::Ours { epoch: record.epoch };
        }
        let next = Verdict::Claim { epoch: record.epoch + 1 };
        // With ranks on several machines, one dead process does not mean a dead job.
        if record.released || (dead && record.nodes <= 1) {
            return next;
        }
        match &self.seen {
            Some((before, since)) if before == record => {
                let quiet = now.since(*since);
                if quiet >= self.silence { next } else { Verdict::Wait { left: self.silence - quiet } }
            }
            // It changed while we looked.
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

/// An owner of `epoch` may still publish: nobody has taken the directory over since.
#[must_use]
pub fn may_publish(epoch: u64, newest: Option<u64>) -> bool {
    newest.is_none_or(|newest| newest <= epoch)
}

/// Why a second job may not use a directory, for people.
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
        assert_eq!(watch.judge(Time(0), Some(&owner), false), Verdict::Wait { left: SILENCE });
        assert_eq!(watch.judge(Time(29_999), Some(&owner), false), Verdict::Wait { left: Duration::from_millis(1) });
        assert_eq!(watch.judge(Time(30_000), Some(&owner), false), Verdict::Claim { epoch: 5 });
        assert_eq!(watch.judge(Time(30_001), Some(&record(4, "a", 2)), false), Verdict::Refuse, "it lives");
    }

    #[test]
    fn one_dead_process_of_several_machines_is_not_a_dead_job() {
        let owner = Record { nodes: 2, ..record(1, "a", 1) };
        let mut watch = Watch::new("b".into(), SILENCE);
        assert!(matches!(watch.judge(Time(0), Some(&owner), true), Verdict::Wait { .. }));
    }

    #[derive(Clone, Debug)]
    enum Act {
        /// A job looks, claims if it may.
        Look(usize),
        Renew(usize),
        /// The check before a publication, and the publication itself, with anything in between.
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

    /// One of several jobs: its clock is off by any amount, and it may be paused between any two of its steps.
    struct Actor {
        watch: Watch,
        skew: u64,
        epoch: Option<u64>,
        checked: bool,
        beat: u64,
    }

    proptest! {
        /// What is published stays only in the order of epochs: once a later owner has published, nobody earlier does, whatever the
        /// pauses, crashes and clocks; and a job that renews in time is never taken over.
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
                    Act::Crash(i) => { let skew = jobs[i].skew; lives += 1; jobs[i] = Actor { skew, ..new(i) }; jobs[i].watch.life += &format!(".{lives}"); }
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
                        jobs[i].checked = may_publish(epoch, records.last_key_value().map(|(e, _)| *e));
                    },
                    Act::Publish(i) => if let Some(epoch) = jobs[i].epoch.filter(|_| jobs[i].checked) {
                        // It becomes visible, is looked at once more, and taken back if somebody else has the directory by now.
                        let stays = may_publish(epoch, records.last_key_value().map(|(e, _)| *e));
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
