//! Alarms over a long time: which machines were named, and for how long. A machine that stays bad
//! is one alarm.

use crate::models::Models;
use crate::robust::{Robust, Settings};
use crate::{Detector, Series, Verdict};

/// Seconds without being named after which a machine counts as recovered.
const WELL: usize = 60;
/// Seconds between looks of a detector that looks back, and the seconds it looks back (Minder,
/// section 5: every 8 minutes at 15).
const EVERY: usize = 480;
const BACK: usize = 900;

/// Machines that were named together.
#[derive(Clone, Debug, PartialEq)]
pub struct Alarm {
    /// The first verdict that named them.
    pub verdict: Verdict,
    /// Last second in which any of them was named.
    pub until: usize,
}

/// The machines that have been named and have not recovered since.
#[derive(Clone, Debug, Default)]
pub struct Named {
    /// Machine, number of its alarm, and the second in which it was last named.
    open: Vec<(usize, usize, usize)>,
    alarms: usize,
}

impl Named {
    /// Returns the part of this second's verdict that is new (machines that were not named before),
    /// and the numbers of the alarms that it continues.
    pub fn news(&mut self, second: usize, verdict: Option<Verdict>) -> (Option<Verdict>, Vec<usize>) {
        self.open.retain(|(_, _, last)| second.saturating_sub(*last) <= WELL);
        let Some(verdict) = verdict else { return (None, Vec::new()) };
        let mut goes_on = Vec::new();
        let mut new = Vec::new();
        for machine in &verdict.machines {
            match self.open.iter_mut().find(|(m, ..)| m == machine) {
                Some((_, alarm, last)) => {
                    *last = second;
                    goes_on.push(*alarm);
                }
                None => new.push(*machine),
            }
        }
        goes_on.dedup();
        if new.is_empty() {
            return (None, goes_on);
        }
        self.open.extend(new.iter().map(|m| (*m, self.alarms, second)));
        self.alarms += 1;
        (Some(Verdict { machines: new, ..verdict }), goes_on)
    }
}

fn gather(verdicts: impl Iterator<Item = (usize, Option<Verdict>)>) -> Vec<Alarm> {
    let (mut named, mut alarms): (Named, Vec<Alarm>) = (Named::default(), Vec::new());
    for (second, verdict) in verdicts {
        let (new, goes_on) = named.news(second, verdict);
        for at in goes_on {
            if let Some(alarm) = alarms.get_mut(at) {
                alarm.until = second;
            }
        }
        alarms.extend(new.map(|verdict| Alarm { verdict, until: second }));
    }
    alarms
}

/// Returns all alarms of the robust detector.
#[must_use]
pub fn robust(settings: &Settings, series: &Series) -> Vec<Alarm> {
    let mut robust = Robust::new(&series.metrics, &series.roles, &series.domains, *settings);
    let rows = |second: usize| (0..series.metrics.len()).map(move |metric| series.row(metric, second));
    gather((0..series.seconds()).map(|second| (second, robust.second(rows(second)))))
}

/// Returns all alarms of trained models, run on Minder's schedule.
#[must_use]
pub fn minder(models: &Models, series: &Series) -> Vec<Alarm> {
    let looks = (0..=series.seconds().saturating_sub(BACK) / EVERY).map(|n| n * EVERY);
    gather(looks.map(|from| {
        let part = series.part(from, BACK.min(series.seconds()));
        let verdict = models.first(&part).map(|v| Verdict { at: from + v.at, ..v });
        (from + part.seconds() - 1, verdict)
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalogue::by_name;

    #[test]
    fn a_machine_that_stays_bad_is_one_alarm_and_one_that_comes_back_another() {
        let mut series = Series::new(vec![by_name("gpu-duty").0, by_name("net").0], vec![0; 8], 2400);
        for second in 0..2400 {
            for metric in 0..2 {
                for (machine, value) in series.row_mut(metric, second).iter_mut().enumerate() {
                    let noise = ((second * 7919 + machine * 104_729 + metric) % 1009) as f32 / 1009.0 - 0.5;
                    let bad = machine == 3 && ((500..900).contains(&second) || second > 1700);
                    *value = (10.0 + noise) * if bad { 0.5 } else { 1.0 };
                }
            }
        }
        let alarms = robust(&Settings::default(), &series);
        assert_eq!(alarms.len(), 2, "{alarms:?}");
        assert!(alarms.iter().all(|a| a.verdict.machines == [3] && a.verdict.metrics.len() == 2));
        assert!((560..640).contains(&alarms[0].verdict.at) && (880..1000).contains(&alarms[0].until), "{alarms:?}");
        assert!(alarms[1].verdict.at > 1700 && alarms[1].until > 2380);
    }
}
