//! Requests the warm process, from which workers are forked when the job restarts.

use super::Driver;
use super::launch::raw;
use crate::guard::protocol::{Request as GuardRequest, Template as GuardTemplate};
use everstep_checkpoint::step_board::Word;
use everstep_wire::raw::Raw;
use std::collections::BTreeMap;

impl Driver {
    /// Requests a warm process, unless its workers would behave differently from new processes.
    pub(super) fn warm_up(&mut self) {
        let Some((_, preload)) = self.template.warm.zip(self.template.preload.as_ref()) else { return };
        let changed = self.crew.iter().flat_map(|c| c.workers.values()).any(|w| w.board.get(Word::WarmUnsafe) != 0);
        if changed {
            crate::say_warning!(
                "restarts will be slower, because each worker imports torch again: the script changes its CPU affinity \
                 before it imports torch"
            );
            return;
        }
        let python = self.template.argv.first().cloned().unwrap_or_default();
        let program = crate::preload::template(preload);
        let mut env = self.template.common_environment();
        self.template.set_defaults(&mut env, self.workers);
        // A process that carries the job's name belongs to the job, even to outside observers.
        env.insert("EVERSTEP_JOB".into(), self.template.job.clone().into());
        env.insert("EVERSTEP_NODE".into(), self.template.node.clone().into());
        match self.changed_at_import() {
            Some(changed) => env.insert("EVERSTEP_WARM_AT_IMPORT".into(), changed.into()),
            None => {
                return crate::say_warning!(
                    "restarts will be slower, because each worker imports torch again: ranks set different environment \
                     variables before they import torch"
                );
            }
        };
        // What the script had imported by its first step, and what differs from worker to worker
        // (see preload/frameworks.py).
        let (modules, ranks) =
            (self.template.memory.join("local-0-modules"), self.template.memory.join("own-variables"));
        let own = serde_json::json!(self.own_variables).to_string();
        if crate::paths::write_whole(&ranks, own.as_bytes()).is_ok() {
            env.insert("EVERSTEP_WARM_MODULES".into(), modules.into());
            env.insert("EVERSTEP_WARM_RANKS".into(), ranks.into());
        }
        let argv = vec![Raw(python), Raw::from("-u"), Raw::from(program)];
        if let Err(why) = self.ask_guard(&GuardRequest::Warm(GuardTemplate { argv, env: raw(env) })) {
            crate::say_warning!("restarts will be slower, because each worker imports torch again: {why}");
        }
    }

    /// Returns what the script changes before it imports torch, as recorded by the workers. Returns
    /// `None` unless all of them change the same.
    fn changed_at_import(&self) -> Option<String> {
        let note = |local: u32| std::fs::read_to_string(self.template.memory.join(format!("local-{local}-at-import")));
        let mut notes = (0..self.workers).map(|local| note(local).unwrap_or_else(|_| "{}".into()));
        let first = notes.next()?;
        let parsed = |text: &str| serde_json::from_str::<BTreeMap<String, Option<String>>>(text).ok();
        let all = parsed(&first)?;
        notes.all(|note| parsed(&note).as_ref() == Some(&all)).then_some(first)
    }
}
