//! The nodes' time accounts, as the coordinator keeps them. Decides which of them to record.

use everstep_core::coordinator::command::Fact;
use everstep_core::id::{Generation, Incarnation, NodeId};
use everstep_core::ledger::Account;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// How often a growing account is recorded. With many nodes it is less often, so that the records
/// grow no faster than with a few.
const WRITE: Duration = Duration::from_secs(15);
const FEW: usize = 8;

/// The owner of an account.
pub type Owner = (String, NodeId, Incarnation);

#[derive(Default)]
struct Kept {
    accounts: BTreeMap<Generation, (Account, bool)>,
    written: Option<Instant>,
}

/// The accounts of all owners.
#[derive(Default)]
pub struct TimeLedger(BTreeMap<Owner, Kept>);

impl TimeLedger {
    /// Updates a node's accounts of its latest generations. Returns the facts to record.
    pub fn update(&mut self, owner: &Owner, accounts: Vec<Account>) -> Vec<Fact> {
        let pause = WRITE * u32::try_from(self.0.len() / FEW + 1).unwrap_or(u32::MAX);
        let kept = self.0.entry(owner.clone()).or_default();
        let newest = accounts.last().map(|a| a.generation);
        for account in accounts {
            let known = kept.accounts.get(&account.generation);
            if known.is_none_or(|(old, _)| *old != account) {
                kept.accounts.insert(account.generation, (account, false));
            }
        }
        let due = kept.written.is_none_or(|at| at.elapsed() >= pause);
        let lines = kept.unwritten(owner, |generation| due || Some(generation) != newest);
        if due {
            kept.written = Some(Instant::now());
        }
        lines
    }

    /// Returns the facts to record when a node falls silent: its last report counts.
    pub fn silent(&mut self, owner: &Owner) -> Vec<Fact> {
        self.0.get_mut(owner).map(|kept| kept.unwritten(owner, |_| true)).unwrap_or_default()
    }
}

impl Kept {
    fn unwritten(&mut self, (_, node, incarnation): &Owner, is_due: impl Fn(Generation) -> bool) -> Vec<Fact> {
        let due = self.accounts.iter_mut().filter(|(generation, (_, written))| !*written && is_due(**generation));
        due.map(|(_, (account, written))| {
            *written = true;
            Fact::Spent { node: node.clone(), incarnation: *incarnation, account: account.clone() }
        })
        .collect()
    }
}
