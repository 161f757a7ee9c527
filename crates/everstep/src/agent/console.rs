//! Console messages at the moments that people wait for.

use super::Driver;
use everstep_core::coordinator::wording::counted;
use everstep_core::coordinator::wording::describe;
use everstep_core::id::NodeId;
use everstep_core::message::{CrewReport, Report, Start};

impl Driver {
    /// Announces that workers start, for the first time or again.
    pub(super) fn announce_start(&mut self, start: &Start) {
        self.restarts = start.restarts;
        let (place, job) = (&start.place, &self.template.job);
        let world = format!("{} on {}", counted(place.world_size, "rank"), counted(place.group_world_size, "node"));
        if std::mem::replace(&mut self.started, true) {
            let budget = if self.template.torchrun.max_restarts_given {
                format!(" of {}", start.max_restarts)
            } else {
                String::new()
            };
            // Whoever reads this may wonder why the script begins again.
            let from = if self.checkpointed {
                ""
            } else {
                "; everstep restores nothing, because no rank here has used an everstep.CheckpointManager"
            };
            crate::say!("restart {}{budget}: {world}{from}", start.restarts);
        } else {
            let here = counted(place.slot.workers, "rank");
            crate::say!("job {job}: {here} here, {world}; everstep status {job} shows it, Ctrl-C stops it");
        }
    }

    /// Announces a failed worker.
    pub(super) fn announce(&self, report: &Report) {
        if let Report::Crew(_, CrewReport::WorkerFailed(failure)) = report {
            crate::say_warning!("{}", describe(&NodeId(self.template.node.clone()), Some(failure)));
        }
    }

    /// Announces that the job is done.
    pub(super) fn announce_end(&self) {
        // After a restart, a count that began at the restart does not cover the whole job.
        let of_all = self.progress.values().filter(|p| self.restarts == 0 || !p.counted);
        let steps = of_all.filter_map(|p| p.step).max();
        let steps = steps.map_or_else(String::new, |n| format!(" at step {n}"));
        let seconds = self.start.elapsed().as_secs();
        let time = if seconds < 120 { format!("{seconds} s") } else { format!("{} min", seconds / 60) };
        match self.restarts {
            0 => crate::say!("done{steps} after {time}"),
            n => crate::say!(
                "done{steps} after {time} and {}; everstep explain --job {} tells what happened",
                counted(n, "restart"),
                self.template.job
            ),
        }
    }
}
