//! A provider of machines, as a job sees it. It fulfils some requests, fails others, and never
//! receives a request that is not in the store.

use crate::world::{Happening, World};
use everstep_core::coordinator::request::{NotProvisioned, Request};
use everstep_core::id::JobId;
use everstep_core::invariant::InvariantId;

impl World {
    pub(crate) fn provision(&mut self, index: usize, job: JobId, request: &Request) {
        let records = self.store.records();
        let held = records.iter().flat_map(|(record, _)| record.machines.requests());
        if !held.clone().any(|r| r.id == request.id && r.remedy == request.remedy) {
            let what = format!("request {} has left, and the store does not hold it", request.id);
            self.oracle.violations.push(crate::oracle::Violation {
                invariant: InvariantId::PersistBeforePromise,
                at: self.now,
                what,
            });
        }
        let delay = self.rng.range(5, 3000);
        let result = if self.rng.percent(70) { Ok(()) } else { Err(NotProvisioned("no machine is free".into())) };
        self.at(delay, Happening::Provisioned { index, job, id: request.id, result });
    }
}
