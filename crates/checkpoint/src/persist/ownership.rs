//! Who owns a directory of checkpoints: records beside the checkpoints, renewed by their owner.
//! [`everstep_core::ownership`] decides what they mean.
//!
//! Each epoch has a record of its own, whose creation is exclusive: of several jobs that want the
//! next epoch, one gets it. Only its owner replaces it after that, and the newest epoch counts, so
//! that no lock is needed, on a file system or in a store.

use super::identity::{create, drawn, known_run, run_id};
use super::owning_process::{has_ended, this_process};
use crate::format::digest::crc;
use crate::format::mark::Mark;
use crate::storage::Storage;
use crate::unique_id::unique_id;
use everstep_core::id::RunId;
use everstep_core::ownership::{Lease, ProcessId, RENEWAL, Record, Verdict, Watch, refusal};
use everstep_core::time::Time;
use std::io;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

const LOOK: Duration = Duration::from_millis(200);
/// How many times to list the records again if the newest one is removed while it is being read.
const LISTINGS: u32 = 20;
/// Run id of a record that cannot be read.
const DAMAGED: RunId = RunId(0);
/// Time, beyond the silence, for the leading process of the job to claim the directory for all.
const LEADER: Duration = Duration::from_secs(30);

/// A process that wants to own a directory.
#[derive(Clone, Debug)]
pub struct Claimant {
    /// See [`Record::life`].
    pub life: String,
    /// Name of the job; empty outside `everstep run`.
    pub job: String,
    /// Number of machines that its ranks run on.
    pub nodes: u32,
    /// Whether it claims and renews; otherwise another process of the same job does.
    pub leads: bool,
    /// See [`everstep_core::ownership::SILENCE`].
    pub silence: Duration,
}

impl Claimant {
    /// Returns a claimant for a job in which only this process claims the directory, with a new
    /// life.
    ///
    /// # Errors
    /// Those of the kernel's random numbers.
    pub fn alone(silence: Duration) -> io::Result<Self> {
        Ok(Claimant { life: drawn()?.to_string(), job: String::new(), nodes: 1, leads: true, silence })
    }
}

/// Ownership of a directory by this job, for as long as this value lives.
#[derive(Debug)]
pub struct Claim {
    record: Arc<Mutex<Record>>,
    storage: Arc<dyn Storage>,
    stop: Option<(Sender<()>, JoinHandle<()>)>,
    predecessor: Option<String>,
}

/// Why a directory cannot be claimed.
#[derive(Debug, thiserror::Error)]
pub enum ClaimError {
    /// Another job owns the directory; the message names it.
    #[error("{0}")]
    Refused(String),
    /// The directory cannot be read or written.
    #[error("cannot own the checkpoint directory {0}: {1}")]
    Io(String, io::Error),
}

impl Claim {
    /// Takes ownership of the directory, or joins the processes of the same job that own it. Waits
    /// if the owner may have ended, and then passes a line of text to `notice`.
    ///
    /// # Errors
    /// [`ClaimError`].
    pub(super) fn take(
        storage: Arc<dyn Storage>,
        directory: String,
        who: &Claimant,
        mut notice: impl FnMut(String),
    ) -> Result<Self, ClaimError> {
        let failed = |e| ClaimError::Io(directory.clone(), e);
        let run = run_id(&*storage).map_err(failed)?;
        let start = Instant::now();
        let mut watch = Watch::new(who.life.clone(), who.silence);
        let mut told = false;
        loop {
            let found = newest(&*storage).map_err(failed)?.map(|record| of_this_run(record, run));
            let dead = found.as_ref().is_some_and(|r| has_ended(&r.process));
            let now = Time(u64::try_from(start.elapsed().as_millis()).unwrap_or(u64::MAX));
            match watch.judge(now, found.as_ref(), dead) {
                Verdict::Ours { epoch } if newest_epoch(&*storage).map_err(failed)? == Some(epoch) => {
                    return Self::hold(&storage, &directory, who, own_record(run, epoch, who), &mut notice)
                        .map_err(failed);
                }
                Verdict::Claim { epoch } if who.leads => {
                    let record = own_record(run, epoch, who);
                    let bytes = serde_json::to_vec(&record).map_err(|e| failed(e.into()))?;
                    let created = storage.create_new(&storage.owner_name(epoch), bytes).map_err(failed)?;
                    // The record of a past epoch has been removed, so its creation succeeds again.
                    if created && newest_epoch(&*storage).map_err(failed)? != Some(epoch) {
                        let _ = storage.remove(&storage.owner_name(epoch));
                    } else if created {
                        forget_older(&*storage, epoch);
                        let predecessor = found.filter(|r| dead && !r.released).map(|r| r.job);
                        let mut claim = Self::hold(&storage, &directory, who, record, &mut notice).map_err(failed)?;
                        claim.predecessor = predecessor;
                        return Ok(claim);
                    }
                    // Another job was first, or the store ignores conditions: the record shows the
                    // owner.
                }
                // The agent that leads this job may be about to claim it, or be refused itself.
                Verdict::Refuse if who.leads || start.elapsed() > who.silence + LEADER => {
                    let owner = found.as_ref().map(|r| refusal(&directory, r));
                    return Err(ClaimError::Refused(owner.unwrap_or_default()));
                }
                Verdict::Wait { left } => {
                    if let Some(owner) = found.filter(|_| !told && start.elapsed() > RENEWAL * 2) {
                        told = true;
                        notice(format!(
                            "{directory} belongs to job {:?} (host {}, pid {}), which has been silent for {} s; taking over in {} s",
                            owner.job,
                            owner.host,
                            owner.process.pid,
                            start.elapsed().as_secs(),
                            left.as_secs()
                        ));
                    }
                }
                Verdict::Ours { .. } | Verdict::Refuse => {}
                Verdict::Claim { .. } => {
                    if start.elapsed() > who.silence + LEADER {
                        let what = "the node that publishes checkpoints has not claimed it; check that all nodes use the same directory";
                        return Err(failed(io::Error::new(io::ErrorKind::TimedOut, what)));
                    }
                }
            }
            std::thread::sleep(LOOK);
        }
    }

    fn hold(
        storage: &Arc<dyn Storage>,
        directory: &str,
        who: &Claimant,
        record: Record,
        notice: &mut impl FnMut(String),
    ) -> io::Result<Self> {
        let (held, storage) = (Arc::new(Mutex::new(record)), storage.clone());
        if !who.leads {
            return Ok(Claim { record: held, storage, stop: None, predecessor: None });
        }
        renew(&*storage, &held)?;
        let (stop, stopped) = channel::<()>();
        let (record, of) = (held.clone(), storage.clone());
        let thread = std::thread::Builder::new().name("everstep-owner".into()).spawn(move || {
            while stopped.recv_timeout(RENEWAL) == Err(RecvTimeoutError::Timeout) {
                // If storage fails for a while, others see silence, and this owner does not publish
                // either.
                let _ = renew(&*of, &record);
            }
        });
        // Without a thread, the claim is not renewed: a later start may take over after the
        // silence, and then this job can no longer publish.
        let thread = thread.inspect_err(|e| {
            notice(format!(
                "cannot start a thread to renew the claim on {directory} ({e}); another job may take it over"
            ));
        });
        Ok(Claim { record: held, storage, stop: thread.ok().map(|thread| (stop, thread)), predecessor: None })
    }

    /// Returns the job that this claim was taken over from, if it had ended on this machine without
    /// releasing the directory.
    #[must_use]
    pub fn predecessor(&self) -> Option<&str> {
        self.predecessor.as_deref()
    }

    /// Returns the epoch of this ownership.
    #[must_use]
    pub fn epoch(&self) -> u64 {
        self.record.lock().unwrap_or_else(PoisonError::into_inner).epoch
    }

    /// Returns the directory's identity.
    #[must_use]
    pub fn run(&self) -> RunId {
        self.record.lock().unwrap_or_else(PoisonError::into_inner).run
    }

    /// Returns whether the claim was made for this life (see [`Record::life`]).
    #[must_use]
    pub fn is_of(&self, life: &str) -> bool {
        self.record.lock().unwrap_or_else(PoisonError::into_inner).life == life
    }

    /// Returns whether this job still owns the directory: it was neither taken over nor released.
    #[must_use]
    pub fn is_current(&self) -> bool {
        let own = Lease { run: self.run(), epoch: self.epoch() };
        let lasts = |run, newest: Option<Record>| {
            own.lasts(run, newest.as_ref().map(|r| r.epoch)) && newest.is_none_or(|r| !r.released)
        };
        known_run(&*self.storage).and_then(|run| Ok(lasts(run, newest(&*self.storage)?))).unwrap_or(false)
    }

    /// Stops renewing the claim, because another process of the same job renews it.
    pub fn hand_over(mut self) {
        self.end();
    }

    /// Releases the directory, so that the next owner need not wait.
    pub fn release(mut self) {
        let renewed = self.stop.is_some();
        self.end();
        let mut record = self.record.lock().unwrap_or_else(PoisonError::into_inner);
        record.released = true;
        let process = record.process.clone();
        drop(record);
        // Another process of the same job may be renewing it by now.
        if renewed && newest(&*self.storage).is_ok_and(|r| r.is_none_or(|r| r.process == process)) {
            let _ = renew(&*self.storage, &self.record);
        }
    }

    fn end(&mut self) {
        if let Some((stop, thread)) = self.stop.take() {
            drop(stop);
            let _ = thread.join();
        }
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.end();
    }
}

fn own_record(run: RunId, epoch: u64, who: &Claimant) -> Record {
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let (life, job) = (who.life.clone(), who.job.clone());
    let process = this_process();
    // A beat that no other process of this job has used, so that every observer sees a change.
    Record { run, epoch, life, job, host, process, nodes: who.nodes, beat: unique_id() >> 16, released: false }
}

/// Replaces the record, unless another job has taken the directory over. If the files of the
/// directory were deleted, it still belongs to this run.
fn renew(storage: &dyn Storage, record: &Mutex<Record>) -> io::Result<()> {
    let record = {
        let mut record = record.lock().unwrap_or_else(PoisonError::into_inner);
        record.beat += 1;
        record.clone()
    };
    let (run, newest) = state(storage)?;
    if run.is_none() && !record.released && !create(storage, record.run)? {
        // Another job was faster.
        return Ok(());
    }
    if (Lease { run: record.run, epoch: record.epoch }).lasts(run, newest) {
        storage.replace(&storage.owner_name(record.epoch), serde_json::to_vec(&record)?)?;
    }
    Ok(())
}

/// Returns the directory's run id, if it has one, and the newest epoch on record.
fn state(storage: &dyn Storage) -> io::Result<(Option<RunId>, Option<u64>)> {
    Ok((known_run(storage)?, newest_epoch(storage)?))
}

/// Returns the newest epoch on record; `None` when the directory has never had an owner.
pub(super) fn newest_epoch(storage: &dyn Storage) -> io::Result<Option<u64>> {
    Ok(storage.owners()?.into_iter().max())
}

/// Returns the newest record; `None` when the directory has never had an owner.
///
/// # Errors
/// Those of the file system or store.
fn newest(storage: &dyn Storage) -> io::Result<Option<Record>> {
    for look in 0..LISTINGS {
        if look > 0 {
            std::thread::sleep(LOOK);
        }
        let Some(epoch) = newest_epoch(storage)? else { return Ok(None) };
        // The next owner removes the records of those before it.
        if let Some(bytes) = storage.recall(&storage.owner_name(epoch))? {
            return Ok(Some(read(epoch, &bytes)));
        }
    }
    Err(io::Error::other("the record of its owner is listed, but cannot be read"))
}

fn read(epoch: u64, bytes: &[u8]) -> Record {
    // A record that cannot be read still has an owner, and its checksum shows whether it changes.
    let damaged = |_| Record {
        run: DAMAGED,
        epoch,
        life: "?".into(),
        job: "?".into(),
        host: "?".into(),
        process: ProcessId::default(),
        nodes: u32::MAX,
        beat: crc(bytes),
        released: false,
    };
    let record: Record = serde_json::from_slice(bytes).unwrap_or_else(damaged);
    Record { epoch, ..record }
}

/// Marks the record of another run as released: after a copy, the owner of the original directory
/// does not own this one.
fn of_this_run(record: Record, run: RunId) -> Record {
    let of_another = record.run != run && record.run != DAMAGED;
    Record { released: record.released || of_another, ..record }
}

/// Fails once another job owns the directory, with a message that names it. Marks without an epoch
/// belong to no owner.
///
/// # Errors
/// `PermissionDenied` in this case; those of the file system or store.
pub(super) fn still_owned(storage: &dyn Storage, mark: &Mark) -> io::Result<()> {
    if mark.epoch == 0 {
        return Ok(());
    }
    let (run, newest_epoch) = state(storage)?;
    if (Lease { run: mark.run, epoch: mark.epoch }).lasts(run, newest_epoch) {
        return Ok(());
    }
    let by = newest(storage)
        .ok()
        .flatten()
        .map_or_else(String::new, |r| format!(" by job {:?} (host {}, pid {})", r.job, r.host, r.process.pid));
    let how = match run {
        Some(run) if run != mark.run => format!("removed or replaced, and is now owned{by}"),
        _ => format!("taken over{by} while this job did not renew its claim"),
    };
    let what = format!("the directory was {how}; this job can no longer publish checkpoints there");
    Err(io::Error::new(io::ErrorKind::PermissionDenied, what))
}

/// Returns whether an error of [`still_owned`] means that another job owns the directory, rather
/// than that the check itself failed.
pub(super) fn is_lost(e: &io::Error) -> bool {
    e.kind() == io::ErrorKind::PermissionDenied && e.raw_os_error().is_none()
}

/// Deletes the records of past owners, which have no meaning any more.
fn forget_older(storage: &dyn Storage, epoch: u64) {
    for older in storage.owners().unwrap_or_default().into_iter().filter(|e| *e < epoch) {
        let _ = storage.remove(&storage.owner_name(older));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::persist::{claim, still_owned};
    use std::fs;

    fn who(life: &str, silence: Duration) -> Claimant {
        Claimant { life: life.into(), job: life.into(), nodes: 1, leads: true, silence }
    }

    const SHORT: Duration = Duration::from_millis(1500);

    #[test]
    fn a_second_job_is_refused_by_name_and_the_first_goes_on() {
        let scratch = tempfile::tempdir().unwrap();
        let first = claim(scratch.path(), &who("first", SHORT), |_| ()).unwrap();
        let long = Duration::from_mins(1);
        let refused = claim(scratch.path(), &who("second", long), |_| ()).unwrap_err().to_string();
        assert!(refused.contains("job first") && refused.contains(&std::process::id().to_string()), "{refused}");
        assert!(first.is_current());
        // Another process of the same job shares it.
        let shared = claim(scratch.path(), &Claimant { leads: false, ..who("first", SHORT) }, |_| ()).unwrap();
        assert_eq!(shared.epoch(), first.epoch());
        first.release();
        assert_eq!(claim(scratch.path(), &who("second", long), |_| ()).unwrap().epoch(), 2);
    }

    #[test]
    fn a_past_epoch_is_not_claimed_again() {
        let scratch = tempfile::tempdir().unwrap();
        let first = claim(scratch.path(), &who("first", SHORT), |_| ()).unwrap();
        let storage = first.storage.clone();
        first.release();
        // The same job must claim it anew: another one may be claiming it too.
        let again = claim(scratch.path(), &who("first", SHORT), |_| ()).unwrap();
        assert_eq!(again.epoch(), 2);
        assert_eq!(storage.owners().unwrap(), [2]);
        // A slow job had read the first record before it was removed.
        assert!(storage.create_new(&storage.owner_name(1), Vec::new()).unwrap());
        assert!(again.is_current());
        let third = claim(scratch.path(), &who("third", Duration::from_mins(1)), |_| ()).unwrap_err();
        assert!(third.to_string().contains("job first"), "{third}");
    }

    #[test]
    fn of_one_job_only_who_leads_is_refused() {
        let scratch = tempfile::tempdir().unwrap();
        let first = claim(scratch.path(), &who("first", SHORT), |_| ()).unwrap();
        let path = scratch.path().to_owned();
        let follows = Claimant { leads: false, ..who("second", Duration::from_mins(1)) };
        let waits = std::thread::spawn(move || claim(&path, &follows, |_| ()).map(|c| c.epoch()));
        std::thread::sleep(RENEWAL + LOOK * 3);
        first.release();
        let second = claim(scratch.path(), &who("second", SHORT), |_| ()).unwrap();
        assert_eq!((waits.join().unwrap().unwrap(), second.epoch()), (2, 2));
    }

    #[test]
    fn an_owner_that_is_silent_loses_the_directory_and_may_not_publish() {
        let scratch = tempfile::tempdir().unwrap();
        let first = claim(scratch.path(), &who("first", SHORT), |_| ()).unwrap();
        let mark = |claim: &Claim| Mark { run: claim.run(), epoch: claim.epoch(), generation: 1, attempt: 0 };
        let old = mark(&first);
        still_owned(scratch.path(), &old).unwrap();
        first.hand_over();
        let second = claim(scratch.path(), &who("second", SHORT), |_| ()).unwrap();
        assert_eq!(second.epoch(), 2);
        assert!(still_owned(scratch.path(), &old).unwrap_err().to_string().contains("taken over by job \"second\""));
        still_owned(scratch.path(), &mark(&second)).unwrap();
    }

    fn mark_of(claim: &Claim) -> Mark {
        Mark { run: claim.run(), epoch: claim.epoch(), generation: 0, attempt: 0 }
    }

    #[test]
    fn a_directory_that_another_job_makes_anew_is_that_job_s() {
        let scratch = tempfile::tempdir().unwrap();
        let out = scratch.path().join("out");
        fs::create_dir(&out).unwrap();
        let first = claim(&out, &who("first", SHORT), |_| ()).unwrap();
        fs::remove_dir_all(&out).unwrap();
        still_owned(&out, &mark_of(&first)).unwrap();
        fs::create_dir(&out).unwrap();
        let second = claim(&out, &who("second", SHORT), |_| ()).unwrap();
        let refused = still_owned(&out, &mark_of(&first)).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::PermissionDenied);
        assert!(refused.to_string().contains("removed or replaced, and is now owned by job \"second\""), "{refused}");
        assert!(!first.is_current() && second.is_current());
        // Neither a renewal nor the release of the first one touches the record of the second.
        renew(&*first.storage, &first.record).unwrap();
        first.release();
        let now = newest(&*second.storage).unwrap().unwrap();
        assert!(now.life == "second" && !now.released, "{now:?}");
        still_owned(&out, &mark_of(&second)).unwrap();
        assert!(matches!(claim(&out, &who("third", Duration::from_mins(1)), |_| ()), Err(ClaimError::Refused(_))));
    }

    #[test]
    fn a_directory_whose_files_were_deleted_stays_the_running_job_s() {
        let scratch = tempfile::tempdir().unwrap();
        let first = claim(scratch.path(), &who("first", SHORT), |_| ()).unwrap();
        for file in fs::read_dir(scratch.path()).unwrap() {
            fs::remove_file(file.unwrap().path()).unwrap();
        }
        renew(&*first.storage, &first.record).unwrap();
        assert_eq!(run_id(&*first.storage).unwrap(), first.run());
        assert!(matches!(
            claim(scratch.path(), &who("second", Duration::from_mins(1)), |_| ()),
            Err(ClaimError::Refused(_))
        ));
    }

    #[test]
    fn of_many_that_want_an_abandoned_directory_one_gets_it() {
        let scratch = tempfile::tempdir().unwrap();
        let got: Vec<_> = std::thread::scope(|s| {
            let path = scratch.path();
            let jobs: Vec<_> = (0..6)
                .map(|i| s.spawn(move || claim(path, &who(&format!("job-{i}"), Duration::from_mins(1)), |_| ())))
                .collect();
            jobs.into_iter().map(|t| t.join().unwrap()).collect()
        });
        assert_eq!(got.iter().filter(|g| g.is_ok()).count(), 1);
    }
}
