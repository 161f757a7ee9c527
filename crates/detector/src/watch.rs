//! Watches a running job: samples of its machines go in as they arrive, verdicts come out. Samples
//! that are more than two seconds late count as missing.

use crate::alarms::Named;
use crate::catalogue::KNOWN;
use crate::clock::Clock;
use crate::models::Models;
use crate::rings::{KEPT, Rings};
use crate::robust::{Robust, Settings};
use crate::{Detector, Family, Metric, Series, Verdict, group_numbers};

/// Seconds to wait for late samples.
const LATE: u64 = 2;
/// Seconds between runs of a detector that looks back.
const EVERY: u64 = 60;

/// The choice of a detector.
#[derive(Clone, Debug)]
pub enum Which {
    /// Compares machines with the median of their role.
    Robust(Settings),
    /// Minder's detector.
    LstmVae(Box<Models>),
}

#[derive(Clone, Debug)]
enum Looks {
    Stream(Box<Robust>),
    Back(Box<Models>),
}

/// The machines of one world of a job.
#[derive(Clone, Debug)]
pub struct Watch {
    rings: Rings,
    clocks: Vec<Clock>,
    /// Reported role of each machine; 0 until it reports one.
    reported_roles: Vec<u32>,
    /// The same, as small numbers.
    roles: Vec<u32>,
    domains: Vec<u32>,
    looks: Looks,
    named: Named,
    /// The next second to examine.
    next: Option<u64>,
    /// A row without samples, for seconds in which no machine reported any.
    nothing: Vec<f32>,
    families: Vec<Family>,
}

impl Watch {
    /// Creates a watch for `machines` machines; `domains` is empty if their failure domains are
    /// unknown. All machines have the same role until [`Watch::set_role`] is called.
    #[must_use]
    pub fn new(machines: usize, domains: &[u32], which: &Which) -> Watch {
        let roles = vec![0; machines];
        let metrics: Vec<Metric> = KNOWN.iter().map(crate::catalogue::Known::metric).collect();
        let looks = match which {
            Which::Robust(settings) => Looks::Stream(Box::new(Robust::new(&metrics, &roles, domains, *settings))),
            Which::LstmVae(models) => Looks::Back(models.clone()),
        };
        let families = metrics.iter().map(|m| m.family).collect();
        Watch {
            rings: Rings::new(metrics, roles.clone(), domains.to_vec()),
            clocks: vec![Clock::default(); machines],
            reported_roles: roles.clone(),
            roles,
            domains: domains.to_vec(),
            looks,
            named: Named::default(),
            next: None,
            nothing: vec![f32::NAN; machines],
            families,
        }
    }

    /// Sets a machine's role: any number that is equal for machines that do the same; 0 is ignored.
    /// If the machines group differently than before, the baselines are learned anew.
    pub fn set_role(&mut self, machine: usize, role: u32) {
        match self.reported_roles.get_mut(machine) {
            Some(reported) if role != 0 && *reported != role => *reported = role,
            _ => return,
        }
        let roles = group_numbers(&self.reported_roles);
        if roles != self.roles {
            if let Looks::Stream(robust) = &mut self.looks {
                **robust = robust.anew(&roles, &self.domains);
            }
            self.rings.set_roles(roles.clone());
            self.roles = roles;
        }
    }

    /// Adds samples of a machine, by their index in the catalogue, with the timestamp `sent_ms` by
    /// its own clock, received at `received_ms`.
    pub fn put(&mut self, machine: usize, sent_ms: u64, received_ms: u64, samples: impl Iterator<Item = (usize, f32)>) {
        let Some(clock) = self.clocks.get_mut(machine) else { return };
        let at = clock.place(sent_ms, received_ms) / 1000;
        self.next.get_or_insert(at);
        self.rings.put(machine, at, samples);
    }

    /// Examines the seconds that are due, and returns the first new verdict.
    pub fn advance(&mut self, now_ms: u64) -> Option<Verdict> {
        let until = (now_ms / 1000).checked_sub(LATE)?;
        let mut next = self.next?;
        // After a long pause, only the seconds still kept are examined.
        next = next.max(until.saturating_sub(KEPT as u64 - 1));
        let mut new = None;
        while next <= until && new.is_none() {
            let verdict = match &mut self.looks {
                Looks::Stream(robust) => match self.rings.second(next) {
                    Some(rows) => robust.second(rows),
                    None => robust.second(KNOWN.iter().map(|_| self.nothing.as_slice())),
                },
                Looks::Back(models) if next.is_multiple_of(EVERY) => models.first(&self.rings.series(next, KEPT)),
                Looks::Back(_) => None,
            };
            let second = usize::try_from(next).unwrap_or(usize::MAX);
            (new, _) = self.named.news(second, verdict);
            next += 1;
        }
        self.next = Some(next);
        new
    }

    /// Returns the samples kept from the last quarter of an hour, up to the last second examined.
    #[must_use]
    pub fn series(&self) -> Series {
        self.rings.series(self.next.unwrap_or(0).saturating_sub(1), KEPT)
    }

    /// Returns whether a verdict has independent evidence: two families of metrics, or samples that
    /// stopped arriving.
    #[must_use]
    pub fn is_sure(&self, verdict: &Verdict) -> bool {
        let mut families = verdict.metrics.iter().filter_map(|m| self.families.get(*m));
        let first = families.next();
        first.is_none() || families.any(|f| Some(f) != first)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalogue::number;

    #[test]
    fn a_machine_is_named_once_though_clocks_differ_and_samples_are_missing() {
        let settings =
            Settings { one_family_s: 20, two_families_s: 20, dead_s: 20, known_s: 30, ..Settings::default() };
        let mut watch = Watch::new(5, &[], &Which::Robust(settings));
        let (cpu, memory) = (number("cpu").unwrap(), number("memory").unwrap());
        let mut found = Vec::new();
        for second in 0..200u64 {
            let heard = 1_700_000_000_000 + second * 1000;
            for machine in 0..5 {
                if (second * 7 + machine as u64 * 3).is_multiple_of(23) {
                    continue;
                }
                let said = heard - 20 + machine as u64 * 90_000;
                let noise = ((second * 7919 + machine as u64 * 104_729) % 101) as f32 / 1000.0;
                let bad = machine == 2 && second > 100;
                let of = [
                    (cpu, 1.0 + noise + if bad { 1.0 } else { 0.0 }),
                    (memory, if bad { 3e9 } else { 1e9 }),
                    (999, 1.0),
                ];
                watch.put(machine, said, heard, of.into_iter());
            }
            found.extend(watch.advance(heard).map(|v| (second, watch.is_sure(&v), v)));
        }
        let [(at, sure, verdict)] = &found[..] else { panic!("{found:?}") };
        assert!((110..140).contains(at) && verdict.machines == [2] && !*sure, "{found:?}");
        assert_eq!(
            watch.advance(1_700_000_000_000 + 300_000).map(|v| v.metrics.len()),
            Some(0),
            "all have ceased to tell"
        );
    }

    /// Returns the machines named among nine, of which the `last` ones are another pipeline stage,
    /// if those in `more` have more to do from the 100th second on.
    fn stages(last: usize, told: bool, more: std::ops::Range<usize>) -> Vec<Vec<usize>> {
        let settings = Settings { one_family_s: 40, two_families_s: 20, known_s: 30, ..Settings::default() };
        let mut watch = Watch::new(9, &[], &Which::Robust(settings));
        let cpu = number("cpu").unwrap();
        let mut found = Vec::new();
        for second in 0..300u64 {
            let heard = 1_700_000_000_000 + second * 1000;
            for machine in 0..9 {
                let is_last = machine >= 9 - last;
                if told && second >= 5 {
                    watch.set_role(machine, if is_last { 77 } else { 1234 });
                }
                let noise = ((second * 7919 + machine as u64 * 104_729) % 101) as f32 / 500.0;
                let level = if is_last { 6.0 } else { 4.0 };
                let more = if second > 100 && more.contains(&machine) { 3.0 } else { 0.0 };
                watch.put(machine, heard, heard, [(cpu, level + noise + more)].into_iter());
            }
            found.extend(watch.advance(heard).map(|v| v.machines));
        }
        found
    }

    #[test]
    fn stages_are_compared_within_themselves() {
        // Longer sequences: all machines of the last stage have more to do.
        assert_eq!(stages(3, true, 6..9), [[0; 0]; 0]);
        assert_eq!(stages(3, false, 6..9), [[6, 7, 8]]);
        assert_eq!(stages(3, true, 7..8), [[7]]);
        assert_eq!(stages(3, true, 2..3), [[2]]);
    }

    #[test]
    fn a_stage_of_one_machine_is_compared_with_all_by_its_own_past() {
        assert_eq!(stages(1, true, 3..4), [[3]]);
        assert_eq!(stages(1, true, 8..9), [[8]]);
        assert_eq!(stages(2, true, 8..9), [[8]]);
    }
}
