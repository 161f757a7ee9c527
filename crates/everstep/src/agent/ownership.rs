//! Ownership of checkpoint directories. A directory is claimed when the job's first worker names
//! it, renewed by the agent that publishes, and released when the job ends here.

use super::input::{Input, Owned};
use super::leftovers::Heir;
use super::slot_files::Destination;
use super::{Driver, End};
use crate::paths;
use everstep_checkpoint::arena::run_label;
use everstep_checkpoint::persist::{self, Claim, ClaimError, Claimant, Target};
use everstep_checkpoint::retain::Policy;
use everstep_core::agent::event::Event;
use everstep_core::exit_code::ExitCode;
use everstep_core::id::{Generation, Incarnation};
use everstep_core::message::ExitReason;
use everstep_core::ownership::SILENCE;
use everstep_wire::raw::from_text;
use everstep_wire::worker::{Persist, Reply, WorkerId};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::oneshot;

/// How long the end of a job waits for storage to record the release.
const RELEASE: Duration = Duration::from_secs(10);

/// The claims of one agent, by directory, each with whether this agent renews it.
#[derive(Clone, Default)]
pub struct Claims(Arc<Mutex<BTreeMap<PathBuf, (bool, Claim)>>>);

impl Claims {
    /// Returns the epoch in which this job owns the directory. If the directory was just taken over
    /// from a job that ended without releasing it, `inherit` is called with that job's name first.
    fn epoch(&self, directory: &Path, who: &Claimant, inherit: impl FnOnce(&str)) -> Result<u64, ClaimError> {
        let mut claims = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((leads, claim)) = claims.remove(directory) {
            if !claim.is_of(&who.life) {
                claim.release();
            } else if leads == who.leads && claim.is_current() {
                let epoch = claim.epoch();
                claims.insert(directory.to_owned(), (leads, claim));
                return Ok(epoch);
            } else {
                // Publishing has moved to another agent of this job, or to this one.
                claim.hand_over();
            }
        }
        let claim = persist::claim(directory, who, |line| crate::say!("{line}"))?;
        if let Some(predecessor) = claim.predecessor() {
            inherit(predecessor);
        }
        let epoch = claim.epoch();
        claims.insert(directory.to_owned(), (who.leads, claim));
        Ok(epoch)
    }

    /// Releases the claims of other runs than this one, which would be taken for those of another
    /// job. May block.
    fn release_others(&self, life: &str) {
        let mut claims = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        for (_, (_, claim)) in claims.extract_if(.., |_, (_, claim)| !claim.is_of(life)) {
            claim.release();
        }
    }

    /// Ends all claims, and releases them if the job is `over`, so that the next owner need not
    /// wait.
    pub async fn end(&self, over: bool) {
        // While the lock is taken, a claim is waiting and owns nothing yet.
        let claims = self.0.try_lock().map(|mut claims| std::mem::take(&mut *claims)).unwrap_or_default();
        if !claims.is_empty() {
            // If they are not released in time, the next owner waits until the claims time out.
            let end = move |(_, claim): (bool, Claim)| if over { claim.release() } else { claim.hand_over() };
            let released = tokio::task::spawn_blocking(move || claims.into_values().for_each(end));
            let _ = tokio::time::timeout(RELEASE, released).await;
        }
    }
}

impl Driver {
    /// Handles a worker's request to write its checkpoints to a directory.
    pub(super) fn persist_to(&mut self, from: WorkerId, persist: Persist, answer: oneshot::Sender<Reply>) {
        let WorkerId { generation, rank, local_rank } = from;
        let Persist { directory, run, keep, keep_every, keep_epochs, bandwidth, exactly } = persist;
        paths::remember_checkpoints(&self.template.job, &directory);
        let every = (keep_every > 0).then(|| Duration::from_secs(keep_every));
        let keep = Policy { last: keep as usize, every, epochs: keep_epochs, abandoned: false };
        let target = if exactly { Target::Exactly } else { Target::Branch };
        let to = Destination { rank, directory: from_text(&directory), run, epoch: 0, keep, bandwidth, target };
        self.claim((generation, local_rank), to, answer);
    }

    /// Claims the directory that a worker has named. This may have to wait for the previous owner,
    /// so it runs in a thread of its own.
    fn claim(&mut self, who: (Generation, u32), to: Destination, answer: oneshot::Sender<Reply>) {
        let Some(crew) = &self.crew else { return };
        let (job, nodes, leads) = (self.template.job.clone(), crew.nodes, crew.slot.first_rank.0 == 0);
        let claimant = Claimant { life: self.life(crew.began), job, nodes, leads, silence: SILENCE };
        let (claims, inbox) = (self.claims.clone(), self.inbox.clone());
        let (node, world_size) = (self.template.node.clone(), u64::from(crew.world_size));
        tokio::task::spawn_blocking(move || {
            let inherit = |predecessor: &str| {
                // Only a single-node job is certain to have had its memory here.
                let heir = Heir { predecessor, job: &claimant.job, node: &node, run: to.run, world_size };
                if claimant.nodes == 1 && heir.adopt() {
                    crate::say!(
                        "job {predecessor} ended with its launcher; using the checkpoints that it left in memory"
                    );
                }
            };
            let result = claims.epoch(&to.directory, &claimant, inherit);
            let _ = inbox.send(Input::Owned(Box::new(Owned { who, to, result, answer })));
        });
    }

    /// Releases what this agent has claimed for an earlier run of the job.
    pub(super) fn leave_earlier_runs(&self, began: Incarnation) {
        let (claims, life) = (self.claims.clone(), self.life(began));
        tokio::task::spawn_blocking(move || claims.release_others(&life));
    }

    /// Returns an identity that all agents of this run of the job share and no other job has, even
    /// after the coordinator restarts.
    fn life(&self, began: Incarnation) -> String {
        let secret = self.target.token().map(|t| t.reveal().to_owned()).unwrap_or_default();
        // Not the secret itself: anyone who can read the checkpoints can read the record.
        format!("{:016x}", run_label(&format!("{secret} {} {}", self.template.job, began.0)))
    }

    /// Handles the result of [`Driver::claim`].
    pub(super) async fn owned(&mut self, owned: Owned) {
        let Owned { who: (generation, local_rank), to, result, answer } = owned;
        match result {
            Ok(epoch) => {
                let to = Destination { epoch, ..to };
                let crew = self.crew.as_mut().filter(|c| c.generation == generation);
                if let Some(worker) = crew.and_then(|c| c.workers.get_mut(&local_rank)) {
                    self.final_save.belongs(local_rank, to.clone());
                    worker.destination = Some(to);
                }
                let _ = answer.send(Reply::Owned { epoch });
            }
            Err(e) => {
                let why = format!("cannot use the checkpoint directory: {e}");
                match &e {
                    // First, so that the worker's end is not taken for a failure.
                    ClaimError::Refused(_) => {
                        self.event(Event::Refused(ExitReason { code: ExitCode::Refused.number(), why })).await;
                    }
                    // This may be this node's trouble alone: the others, or a spare, go on without
                    // it.
                    ClaimError::Io(..) => {
                        self.end =
                            Some(End { code: ExitCode::Refused.number(), why, first_error: None, hurried: false });
                    }
                }
                let _ = answer.send(Reply::Refused { why: e.to_string() });
            }
        }
    }
}
