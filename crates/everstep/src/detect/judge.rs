//! Scores alarms against known faults, without any adjustment: an alarm is right if its machine was
//! faulty at the time.

use super::table::Episode;
use everstep_core::median::median_of_floats;
use everstep_detector::alarms::Alarm;
use std::io::Read;

/// A known fault.
#[derive(Clone, Debug, PartialEq)]
pub struct Fault {
    /// The run that it belongs to.
    pub episode: String,
    /// The faulty machine.
    pub machine: String,
    /// Start and end, in the samples' time.
    pub span: (f64, f64),
}

/// A table of faults that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum FaultsError {
    #[error("it cannot be read as a table: {0}")]
    Csv(#[from] csv::Error),
    #[error("there is no column {name}; the file needs machine,start,end[,episode]")]
    NoColumn { name: &'static str },
    #[error("line {line}: {text:?} is not a time")]
    Time { line: u64, text: String },
    #[error("line {line}: the fault ends before it begins")]
    EndsBeforeStart { line: u64 },
}

/// Reads `machine,start,end[,episode]`.
///
/// # Errors
/// Fails if a column is missing or a line is invalid; the error has the line's number.
pub fn faults(from: impl Read) -> Result<Vec<Fault>, FaultsError> {
    let mut reader = csv::ReaderBuilder::new().trim(csv::Trim::All).from_reader(from);
    let header = reader.headers()?.clone();
    let at = |name: &str| header.iter().position(|h| h.eq_ignore_ascii_case(name));
    let need = |name: &'static str| at(name).ok_or(FaultsError::NoColumn { name });
    let (machine, start, end, episode) = (need("machine")?, need("start")?, need("end")?, at("episode"));
    let mut all = Vec::new();
    for record in reader.records() {
        let record = record?;
        let line = record.position().map_or(0, csv::Position::line);
        let time = |n: usize| {
            let said = record.get(n).unwrap_or("");
            super::csv::time(said).ok_or_else(|| FaultsError::Time { line, text: said.to_owned() })
        };
        let span = (time(start)?, time(end)?);
        if span.1 < span.0 {
            return Err(FaultsError::EndsBeforeStart { line });
        }
        let text = |n: Option<usize>| n.and_then(|n| record.get(n)).unwrap_or("").to_owned();
        all.push(Fault { episode: text(episode), machine: text(Some(machine)), span });
    }
    Ok(all)
}

/// How good alarms were.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Score {
    /// For each reported fault, the seconds from its start to the first alarm.
    pub right: Vec<f64>,
    /// Number of reported machines that were not faulty.
    pub wrong: usize,
    /// Number of faults that were not reported.
    pub missed: usize,
    /// Machine-days examined.
    pub days: f64,
}

impl Score {
    /// Adds one more run.
    pub fn add(&mut self, of: &Episode, alarms: &[Alarm], faults: &[Fault]) {
        let here: Vec<&Fault> = faults.iter().filter(|f| f.episode == of.name).collect();
        let mut found = vec![false; here.len()];
        for alarm in alarms {
            let at = of.first as f64 + alarm.verdict.at as f64;
            for machine in alarm.verdict.machines.iter().filter_map(|m| of.machines.get(*m)) {
                let fits = |f: &&Fault| f.machine == *machine && at >= f.span.0 && at <= f.span.1 + 1.0;
                match here.iter().position(fits) {
                    Some(fault) if found.get(fault) == Some(&false) => {
                        found[fault] = true;
                        self.right.push(at - here[fault].span.0);
                    }
                    // A repeated alarm for the same fault.
                    Some(_) => {}
                    None => self.wrong += 1,
                }
            }
        }
        self.missed += found.iter().filter(|f| !**f).count();
        self.days += (of.series.machines() * of.series.seconds()) as f64 / 86_400.0;
    }

    /// Returns the share of reported machines that were faulty; `None` if none was reported.
    #[must_use]
    pub fn precision(&self) -> Option<f64> {
        let named = self.right.len() + self.wrong;
        (named > 0).then(|| self.right.len() as f64 / named as f64)
    }

    /// Returns the share of faults that were reported; `None` if there were none.
    #[must_use]
    pub fn recall(&self) -> Option<f64> {
        let all = self.right.len() + self.missed;
        (all > 0).then(|| self.right.len() as f64 / all as f64)
    }

    /// Returns the median seconds from the start of a fault to its alarm.
    #[must_use]
    pub fn delay(&self) -> Option<f64> {
        median_of_floats(self.right.iter().copied())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use everstep_detector::{Series, Verdict};

    #[test]
    fn right_wrong_and_missed() {
        let machines = ["a", "b", "c"].map(String::from).to_vec();
        let of =
            Episode { name: String::new(), series: Series::new(vec![], vec![0; 3], 86_400), machines, first: 1000 };
        let alarm = |machines: &[usize], at| {
            let verdict = Verdict { machines: machines.to_vec(), at, metrics: vec![], score: 1.0, group: false };
            Alarm { verdict, until: at }
        };
        let faults = faults("machine,start,end\na,1100,1500\nc,1100,1500\n".as_bytes()).unwrap();
        let mut score = Score::default();
        score.add(&of, &[alarm(&[0], 160), alarm(&[0, 1], 300), alarm(&[2], 700)], &faults);
        assert_eq!((score.right.clone(), score.wrong, score.missed, score.days), (vec![60.0], 2, 1, 3.0));
        assert_eq!((score.precision(), score.recall(), score.delay()), (Some(1.0 / 3.0), Some(0.5), Some(60.0)));
        let no_end = super::faults("machine,start\na,1\n".as_bytes()).unwrap_err();
        assert!(no_end.to_string().contains("no column end"));
    }
}
