//! Where the time of every rank went: each microsecond from the moment a job reserves a place for a
//! rank until it releases it has exactly one of sixteen categories.
//!
//! ```text
//!  worker: step board ──> agent: one Meter per worker ──> NodeLedger
//!                                ──> coordinator: record of the job ──> everstep goodput
//! ```
//!
//! An agent keeps the ledger of its own node, in totals that only grow: what the coordinator misses
//! while it restarts is in the next report. `goodput = productive / all` (Google's runtime goodput;
//! the effective time of DLRover and Meta also counts `degraded`).

mod meter;
mod node_ledger;

pub use meter::{Meter, Reading};
pub use node_ledger::{Account, End, NodeLedger, Steps};

use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ops::{Add, AddAssign};

macro_rules! categories {
    ($($(#[$doc:meta])* $name:ident = $text:literal),* $(,)?) => {
        /// What a rank's time is spent on.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
        pub enum Category { $($(#[$doc])* #[serde(rename = $text)] $name),* }

        impl Category {
            /// All categories, in the order in which they are printed.
            pub const ALL: [Category; 16] = [$(Category::$name),*];

            /// Returns the category's name, as in `checkpoint_stall`.
            #[must_use]
            pub fn name(self) -> &'static str {
                match self { $(Category::$name => $text),* }
            }
        }
    };
}

categories! {
    /// A new step, up to its usual duration.
    Productive = "productive",
    /// Time of a new step beyond that.
    Degraded = "degraded",
    /// Steps that had been completed before.
    Recompute = "recompute",
    /// The training loop waits for checkpoints.
    CheckpointStall = "checkpoint_stall",
    /// The training loop waits for data.
    DataStall = "data_stall",
    /// Evaluation and other sections of the script.
    Eval = "eval",
    /// From the start of the processes until they can restore or step.
    Init = "init",
    /// Time of the first step after a start beyond the usual duration of a step.
    Warmup = "warmup",
    /// Reading a checkpoint.
    Restore = "restore",
    /// From the last completed step until a failure is declared.
    Detect = "detect",
    /// From then until it is known which nodes train next.
    Decide = "decide",
    /// A place that waits for others before the job's first start.
    Schedule = "schedule",
    /// A spare.
    SpareIdle = "spare_idle",
    /// An excluded machine.
    ExcludedIdle = "excluded_idle",
    /// The job was asked to stop.
    Suspended = "suspended",
    /// Time without an explanation.
    Unknown = "unknown",
}

/// Microseconds by category.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Spent([u64; 16]);

impl Spent {
    /// Returns the microseconds of one category.
    #[must_use]
    pub fn of(&self, category: Category) -> u64 {
        self.0.get(category as usize).copied().unwrap_or(0)
    }

    /// Adds microseconds to one category.
    pub fn put(&mut self, category: Category, micros: u64) {
        if let Some(total) = self.0.get_mut(category as usize) {
            *total += micros;
        }
    }

    /// Subtracts what had been spent earlier, category by category.
    #[must_use]
    pub fn less(mut self, earlier: &Spent) -> Spent {
        self.0.iter_mut().zip(earlier.0).for_each(|(now, before)| *now = now.saturating_sub(before));
        self
    }

    /// Returns the sum of all categories.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.0.iter().sum()
    }

    /// Returns the share of the time that went into new steps, from 0 to 1.
    #[must_use]
    pub fn goodput(&self) -> f64 {
        if self.total() == 0 { 0.0 } else { self.of(Category::Productive) as f64 / self.total() as f64 }
    }

    /// Iterates over the categories with any time, in order.
    pub fn iter(&self) -> impl Iterator<Item = (Category, u64)> + '_ {
        Category::ALL.into_iter().map(|c| (c, self.of(c))).filter(|(_, micros)| *micros > 0)
    }
}

impl AddAssign for Spent {
    fn add_assign(&mut self, other: Spent) {
        for (category, micros) in other.iter() {
            self.put(category, micros);
        }
    }
}

impl Add for Spent {
    type Output = Spent;
    fn add(mut self, other: Spent) -> Spent {
        self += other;
        self
    }
}

impl Serialize for Spent {
    fn serialize<S: serde::Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_map(self.iter())
    }
}

impl<'de> Deserialize<'de> for Spent {
    fn deserialize<D: serde::Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let named = BTreeMap::<Category, u64>::deserialize(from)?;
        let mut spent = Spent::default();
        named.into_iter().for_each(|(category, micros)| spent.put(category, micros));
        Ok(spent)
    }
}

impl JsonSchema for Spent {
    fn schema_name() -> Cow<'static, str> {
        "Spent".into()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        BTreeMap::<Category, u64>::json_schema(generator)
    }
}
