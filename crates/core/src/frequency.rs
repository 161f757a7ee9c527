//! How often to checkpoint (CheckFreq §4.2 and §4.3, with the rule reconstructed from its prose):
//! as often as a budget for the stall allows, and never before the last checkpoint is written.
//!
//! Times are in seconds and are measured by the caller. [`rate`] adapts to the measurements.

pub mod rate;

use serde::{Deserialize, Serialize};

/// Maximum number of iterations without a checkpoint in a profile; it is also limited to 1 % of an
/// epoch (CheckFreq §4.2).
pub const PROFILED: u64 = 50;
/// Maximum interval in steps, whatever was measured.
pub const EVERY_MAX: u64 = 1_000_000;

/// Target of the first copy (C2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Mode {
    /// This node's memory.
    Host,
    /// The device's memory, before this node's.
    Device,
}

/// Measured costs, in seconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Costs {
    /// Ti: an iteration without a checkpoint.
    pub iteration: f64,
    /// Tw: from the start of an iteration to its weight update.
    pub update: f64,
    /// Tc: a copy to this node's memory.
    pub host_copy: f64,
    /// Ts: the write to storage.
    pub write: f64,
    /// Tg: a copy within the device's memory, if that has room for one (m ≤ Mmax − M).
    pub device_copy: Option<f64>,
}

/// What limits an interval from below.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Bound {
    /// Nothing: every step is checkpointed.
    None,
    /// The budget for the stall.
    Budget,
    /// The write of the last checkpoint.
    Write,
    /// Failures are so rare that more checkpoints would cost more than they save (Young and Daly).
    Failures,
}

/// An interval and the reason for it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Choice {
    /// Target of the first copy.
    pub mode: Mode,
    /// k: iterations from one checkpoint to the next.
    pub every: u64,
    /// o: time for which a checkpoint stalls the training loop, in seconds.
    pub stall: f64,
    /// What limits k.
    pub bound: Bound,
}

fn steps(n: f64) -> u64 {
    // The quotient of equal measurements may slightly exceed the whole number that it should be.
    (n - 1e-9).ceil().clamp(1.0, EVERY_MAX as f64) as u64
}

/// Applies the rule `k = max(1, ⌈o/(p·Ti)⌉, ⌈(Tf−o)/Ti⌉)`.
#[must_use]
pub fn choose(costs: &Costs, budget: f64) -> Choice {
    let Costs { iteration, update, host_copy, write, device_copy } = *costs;
    let (mut mode, mut stall, mut whole) = (Mode::Host, (host_copy - update).max(0.0), host_copy + write);
    if let Some(device) = device_copy.filter(|device| *device <= stall) {
        (mode, stall, whole) = (Mode::Device, device, device + host_copy + write);
    }
    let (every, bound) = interval(iteration, budget, stall, whole - stall);
    Choice { mode, every, stall, bound }
}

/// Returns the iterations between checkpoints that stall the loop for `stall` and are then written
/// for `write` seconds.
fn interval(iteration: f64, budget: f64, stall: f64, write: f64) -> (u64, Bound) {
    if iteration <= 0.0 {
        return (1, Bound::None);
    }
    let for_budget = if budget > 0.0 { steps(stall / (budget * iteration)) } else { EVERY_MAX };
    let for_write = steps(write / iteration);
    let bound = match () {
        () if for_budget.max(for_write) <= 1 => Bound::None,
        () if for_write > for_budget => Bound::Write,
        () => Bound::Budget,
    };
    (for_budget.max(for_write), bound)
}

/// Returns the seconds between checkpoints that minimize the loss if failures are `mtbf` seconds
/// apart: `√(2·o·MTBF)` (Young, Daly).
#[must_use]
pub fn young_daly(stall: f64, mtbf: f64) -> f64 {
    (2.0 * stall.max(0.0) * mtbf.max(0.0)).sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn costs(iteration: f64, host_copy: f64, write: f64) -> Costs {
        Costs { iteration, update: 0.0, host_copy, write, device_copy: None }
    }

    #[test]
    fn a_stall_of_one_iteration_at_five_percent_is_every_twentieth() {
        let choice = choose(&costs(0.3, 0.3, 0.0), 0.05);
        assert_eq!((choice.every, choice.bound), (20, Bound::Budget));
    }

    #[test]
    fn a_copy_hidden_by_the_iteration_stalls_nothing_and_storage_bounds_the_rate() {
        let choice = choose(&Costs { update: 0.2, ..costs(0.3, 0.2, 2.9) }, 0.01);
        assert_eq!(choice, Choice { mode: Mode::Host, every: 11, stall: 0.0, bound: Bound::Write });
        assert_eq!(choose(&Costs { update: 0.2, ..costs(0.3, 0.1, 0.1) }, 0.01).bound, Bound::None);
    }

    #[test]
    fn the_device_is_used_where_its_copy_stalls_less() {
        let with = |device| Costs { update: 0.1, device_copy: Some(device), ..costs(1.0, 0.5, 1.0) };
        assert_eq!(choose(&with(0.01), 0.01).mode, Mode::Device);
        assert_eq!(choose(&with(0.45), 0.01).mode, Mode::Host);
    }

    #[test]
    fn failures_bound_the_interval() {
        assert!((young_daly(2.0, 10_000.0) - 200.0).abs() < 1e-9);
    }

    proptest! {
        #[test]
        fn the_rule_keeps_the_budget_and_waits_for_the_write(
            iteration in 1e-3..10.0f64, update in 0.0..5.0f64, copy in 0.0..60.0f64, write in 0.0..600.0f64, budget in 0.001..0.5f64,
            device in proptest::option::of(0.0..5.0f64),
        ) {
            let c = Costs { iteration, update, host_copy: copy, write, device_copy: device };
            let choice = choose(&c, budget);
            let k = choice.every as f64;
            prop_assert!(choice.stall <= budget * k * iteration + 1e-6);
            let whole = if choice.mode == Mode::Device { device.unwrap() } else { 0.0 } + copy + write;
            prop_assert!(whole - choice.stall <= k * iteration + 1e-6);
            // A shorter interval would violate one of the two.
            if choice.every > 1 {
                let fewer = k - 1.0;
                prop_assert!(choice.stall > budget * fewer * iteration - 1e-6 || whole - choice.stall > fewer * iteration - 1e-6);
            }
        }
    }
}
