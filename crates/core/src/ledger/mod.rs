//! Where the time of every rank went: each microsecond from the moment a job holds a place for a rank to the moment it gives it back has
//! exactly one of sixteen categories.
//!
//! ```text
//!  worker: step board ──> agent: Meter per worker ──> Book of the node ──> coordinator writes it down ──> everstep goodput
//! ```
//!
//! An agent keeps the book of its own node, in totals that only grow: what the coordinator misses while it is restarted is in the next report.
//! `goodput = productive / all` (Google's runtime goodput, DLRover's and Meta's effective time count `degraded`, too).

mod book;
mod meter;
mod sum;

pub use book::{Account, Book, End, Steps};
pub use meter::{Meter, Reading};
pub use sum::{Sums, sums};

use serde::{Deserialize, Serialize};
use std::ops::{Add, AddAssign};

macro_rules! categories {
    ($($(#[$doc:meta])* $name:ident = $text:literal),* $(,)?) => {
        /// What the time of a rank is spent on.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        pub enum Category { $($(#[$doc])* #[serde(rename = $text)] $name),* }

        impl Category {
            /// All of them, in the order in which they are printed.
            pub const ALL: [Category; 16] = [$(Category::$name),*];

            /// Its name, as in `checkpoint_stall`.
            #[must_use]
            pub fn name(self) -> &'static str {
                match self { $(Category::$name => $text),* }
            }
        }
    };
}

categories! {
    /// A new step, up to what a step usually takes.
    Productive = "productive",
    /// What a new step takes beyond that.
    Degraded = "degraded",
    /// Steps that had been completed before.
    Recompute = "recompute",
    /// The loop waits for checkpoints.
    CheckpointStall = "checkpoint_stall",
    /// The loop waits for data.
    DataStall = "data_stall",
    /// Evaluation and other sections of the script.
    Eval = "eval",
    /// From the start of the processes to where they can restore or step.
    Init = "init",
    /// What the first step of a start takes beyond what a step usually takes.
    Warmup = "warmup",
    /// Reading a checkpoint.
    Restore = "restore",
    /// From the last step that was completed to where a failure was declared.
    Detect = "detect",
    /// From there to where it is known who trains next.
    Decide = "decide",
    /// A place that waits for others before the job's first start.
    Schedule = "schedule",
    /// A spare.
    SpareIdle = "spare_idle",
    /// A machine that is left out.
    ExcludedIdle = "excluded_idle",
    /// The job was asked to stop.
    Suspended = "suspended",
    /// Nobody knows.
    Unknown = "unknown",
}

/// Microseconds by category.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Spent([u64; 16]);

impl Spent {
    /// Microseconds of one category.
    #[must_use]
    pub fn of(&self, category: Category) -> u64 {
        self.0.get(category as usize).copied().unwrap_or(0)
    }

    /// More of one category.
    pub fn put(&mut self, category: Category, micros: u64) {
        if let Some(total) = self.0.get_mut(category as usize) {
            *total += micros;
        }
    }

    /// Without what had been spent earlier.
    #[must_use]
    pub fn less(mut self, earlier: &Spent) -> Spent {
        self.0.iter_mut().zip(earlier.0).for_each(|(now, before)| *now = now.saturating_sub(before));
        self
    }

    /// All of it.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.0.iter().sum()
    }

    /// Share of the time that went into new steps, 0 to 1.
    #[must_use]
    pub fn goodput(&self) -> f64 {
        if self.total() == 0 { 0.0 } else { self.of(Category::Productive) as f64 / self.total() as f64 }
    }

    /// Categories that have something, in order.
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
        let named = std::collections::BTreeMap::<Category, u64>::deserialize(from)?;
        let mut spent = Spent::default();
        named.into_iter().for_each(|(category, micros)| spent.put(category, micros));
        Ok(spent)
    }
}
