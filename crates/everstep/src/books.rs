//! The nodes' books, as the coordinator keeps them: which accounts are worth a line in its records.

use everstep_core::id::{Generation, Incarnation, NodeId};
use everstep_core::ledger::Account;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// An account that grows is written down this often; with many nodes less often, so that records grow no faster than with a few.
const WRITE: Duration = Duration::from_secs(15);
const FEW: usize = 8;

/// Whose book.
pub type Owner = (String, NodeId, Incarnation);

#[derive(Default)]
struct Kept {
    accounts: BTreeMap<Generation, (Account, bool)>,
    written: Option<Instant>,
}

/// All books.
#[derive(Default)]
pub struct Books(BTreeMap<Owner, Kept>);

impl Books {
    /// A node tells of its latest generations. Returns what is to be written down.
    pub fn heard(&mut self, owner: &Owner, accounts: Vec<Account>) -> Vec<Value> {
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

    /// A node says nothing more for now: what it said last counts.
    pub fn silent(&mut self, owner: &Owner) -> Vec<Value> {
        self.0.get_mut(owner).map(|kept| kept.unwritten(owner, |_| true)).unwrap_or_default()
    }
}

impl Kept {
    fn unwritten(&mut self, (_, node, incarnation): &Owner, is_due: impl Fn(Generation) -> bool) -> Vec<Value> {
        let due = self.accounts.iter_mut().filter(|(generation, (_, written))| !*written && is_due(**generation));
        due.map(|(_, (account, written))| {
            *written = true;
            json!({"Spent": {"node": node, "incarnation": incarnation, "account": account}})
        })
        .collect()
    }
}
