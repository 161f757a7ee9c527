//! Converts rows of samples, in any order, to series of one sample per second.

use everstep_core::median::median;
use everstep_detector::catalogue::by_name;
use everstep_detector::{Metric, Series, group_numbers};
use parquet::errors::ParquetError;
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// Most samples held in memory: 4 GiB of them.
const MOST: usize = 1 << 30;
/// Longest time in seconds that a sample stands for. If samples are further than a second apart,
/// each stands for the time until the next one.
const HOLDS: i64 = 60;
/// Seconds between samples beyond which verdicts are noticeably delayed.
const COARSE: i64 = 5;

/// A table that cannot become series.
#[derive(Debug, thiserror::Error)]
pub enum TableError {
    #[error("it cannot be read as a table: {0}")]
    Csv(#[from] csv::Error),
    #[error("it cannot be read as Parquet: {0}")]
    Parquet(#[from] ParquetError),
    /// The file is damaged in a way that the reader of Parquet does not notice.
    #[error("it cannot be read as Parquet: {0}")]
    DamagedParquet(&'static str),
    #[error(
        "the header has no column {name}: tables need time,machine[,role][,domain][,episode] and either one column \
         per metric or metric,value (found: {})",
        found.join(",")
    )]
    NoColumn { name: &'static str, found: Vec<String> },
    #[error("the first line names no metric")]
    NoMetric,
    #[error("line {line}: {text:?} is not a time (seconds, or 2026-01-31T12:00:00Z)")]
    Time { line: u64, text: String },
    #[error("line {line}: {text:?} of {metric} is not a number")]
    Value { line: u64, metric: String, text: String },
    #[error("line {line}: the time is not a number")]
    NotFinite { line: u64 },
    #[error("line {line}: the machine has no name")]
    NoMachine { line: u64 },
    #[error("line {line}: machine {machine} has two roles; a machine has one in a run")]
    TwoRoles { line: u64, machine: String },
    #[error(
        "line {line}: machine {machine} has two values of {metric} for second {second}; each machine may have only \
         one (do two machines share a name?)"
    )]
    TwoValues { line: u64, machine: String, metric: String, second: i64 },
    #[error("there are no samples: a table has rows of time, machine and metrics")]
    Empty,
    #[error(
        "{}{seconds} seconds of {machines} machines and {metrics} metrics are too much to load at once; split the \
         file by time, or check that the times are in seconds",
        of_episode(episode)
    )]
    TooLarge { episode: String, seconds: usize, machines: usize, metrics: usize },
}

/// Returns the beginning of a message about an episode.
fn of_episode(name: &str) -> String {
    if name.is_empty() { String::new() } else { format!("episode {name}: ") }
}

/// One sample, or several of one machine at one time.
#[derive(Clone, Debug, Default)]
pub struct Row {
    /// The run of the job, if a file contains several.
    pub episode: String,
    /// Seconds since 1970, or since any other origin.
    pub time: f64,
    /// Name of the machine.
    pub machine: String,
    /// Its role: machines with the same role are compared.
    pub role: Option<String>,
    /// Its failure domain.
    pub domain: Option<String>,
    /// Values by metric.
    pub values: Vec<(String, f32)>,
    /// Line in the file, for messages.
    pub line: u64,
}

/// Samples of one run.
#[derive(Clone, Debug)]
pub struct Episode {
    /// Its name; empty if there is only one.
    pub name: String,
    pub series: Series,
    /// Names of the machines.
    pub machines: Vec<String>,
    /// Time of the first second.
    pub first: i64,
}

/// The user's descriptions of metrics, which override what their names imply.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Described {
    #[serde(default)]
    pub metric: Vec<Metric>,
}

/// What was read, with warnings.
#[derive(Clone, Debug, Default)]
pub struct Read {
    /// Episodes in the order of their names.
    pub episodes: Vec<Episode>,
    /// Warnings for the user.
    pub warnings: Vec<String>,
}

#[derive(Default)]
struct Building {
    machines: BTreeMap<String, (Option<String>, Option<String>)>,
    samples: HashMap<(String, i64, usize), f32>,
    times: BTreeMap<String, BTreeSet<i64>>,
}

/// Converts rows to series.
///
/// # Errors
/// Fails if there are no rows, if a machine has two values at one time, or if there is too much for
/// memory.
pub fn series(rows: impl Iterator<Item = Result<Row, TableError>>, described: &Described) -> Result<Read, TableError> {
    let mut metrics: Vec<String> = Vec::new();
    let mut numbers: HashMap<String, usize> = HashMap::new();
    let mut all: BTreeMap<String, Building> = BTreeMap::new();
    let mut not_numbers = 0u64;
    for row in rows {
        let row = row?;
        if !row.time.is_finite() {
            return Err(TableError::NotFinite { line: row.line });
        }
        if row.machine.is_empty() {
            return Err(TableError::NoMachine { line: row.line });
        }
        let of = all.entry(row.episode.clone()).or_default();
        let about = of.machines.entry(row.machine.clone()).or_insert((row.role.clone(), row.domain.clone()));
        if row.role.is_some() && about.0.is_some() && about.0 != row.role {
            return Err(TableError::TwoRoles { line: row.line, machine: row.machine });
        }
        let second = row.time.floor() as i64;
        for (name, value) in row.values {
            let number = *numbers.entry(name.clone()).or_insert_with(|| {
                metrics.push(name);
                metrics.len() - 1
            });
            if !value.is_finite() {
                not_numbers += 1;
                continue;
            }
            if of.samples.insert((row.machine.clone(), second, number), value).is_some() {
                let metric = metrics.get(number).cloned().unwrap_or_default();
                return Err(TableError::TwoValues { line: row.line, machine: row.machine, metric, second });
            }
        }
        of.times.entry(row.machine).or_default().insert(second);
    }
    if all.is_empty() || metrics.is_empty() {
        return Err(TableError::Empty);
    }
    let mut read = Read::default();
    let metrics = described_as(&metrics, described, &mut read.warnings);
    if not_numbers > 0 {
        read.warnings.push(format!("{not_numbers} values are not numbers and count as missing"));
    }
    for (name, of) in all {
        read.episodes.push(episode(name, of, &metrics, &mut read.warnings)?);
    }
    Ok(read)
}

fn described_as(names: &[String], described: &Described, warnings: &mut Vec<String>) -> Vec<Metric> {
    let mut unknown = Vec::new();
    let of = |name: &String| {
        if let Some(said) = described.metric.iter().find(|m| m.name == *name) {
            return said.clone();
        }
        let (metric, known) = by_name(name);
        if !known {
            unknown.push(name.clone());
        }
        metric
    };
    let metrics = names.iter().map(of).collect();
    if !unknown.is_empty() {
        warnings.push(format!(
            "unknown metrics {}: treated as host metrics for which any deviation is bad; describe them with --metrics \
             FILE",
            unknown.join(", ")
        ));
    }
    for missing in described.metric.iter().filter(|m| !names.contains(&m.name)) {
        warnings.push(format!("--metrics describes {}, which does not occur in the samples", missing.name));
    }
    metrics
}

/// Returns the usual time between a machine's samples, in seconds.
fn interval(times: &BTreeMap<String, BTreeSet<i64>>) -> i64 {
    let apart = times.values().flat_map(|t| t.iter().zip(t.iter().skip(1)).map(|(a, b)| b - a));
    median(apart).unwrap_or(1).max(1)
}

fn episode(name: String, of: Building, metrics: &[Metric], warnings: &mut Vec<String>) -> Result<Episode, TableError> {
    let called = of_episode(&name);
    let first = of.times.values().filter_map(|t| t.first()).min().copied().unwrap_or(0);
    let last = of.times.values().filter_map(|t| t.last()).max().copied().unwrap_or(first);
    let machines: Vec<String> = of.machines.keys().cloned().collect();
    let seconds = usize::try_from(last.saturating_sub(first)).unwrap_or(usize::MAX).saturating_add(1);
    let samples = seconds.saturating_mul(machines.len()).saturating_mul(metrics.len());
    if samples > MOST {
        return Err(TableError::TooLarge { episode: name, seconds, machines: machines.len(), metrics: metrics.len() });
    }
    if machines.len() < 3 {
        warnings
            .push(format!("{called}{} machines: with fewer than three, no outlier can be identified", machines.len()));
    }
    let roles = group_numbers(of.machines.values().map(|(role, _)| role.clone()));
    let mut series = Series::new(metrics.to_vec(), roles, seconds);
    if of.machines.values().any(|(_, domain)| domain.is_some()) {
        series.domains = group_numbers(of.machines.values().map(|(_, domain)| domain.clone()));
    }
    let apart = interval(&of.times);
    if apart > COARSE {
        warnings.push(format!("{called}samples are {apart} s apart: detection times are only that precise"));
    }
    let holds = if apart > 1 { (apart + apart / 2).min(HOLDS) } else { 1 };
    let numbers: HashMap<&String, usize> = machines.iter().zip(0..).collect();
    let mut sorted: Vec<((String, i64, usize), f32)> = of.samples.into_iter().collect();
    // Later samples override earlier ones that are still held.
    sorted.sort_by_key(|((_, second, _), _)| *second);
    for ((machine, second, metric), value) in sorted {
        let Some(machine) = numbers.get(&machine) else { continue };
        for held in 0..holds {
            // In this order: a second may be the largest that there is.
            let at = usize::try_from((second - first).saturating_add(held)).unwrap_or(usize::MAX);
            if let Some(cell) = series.row_mut(metric, at).get_mut(*machine) {
                *cell = value;
            }
        }
    }
    Ok(Episode { name, series, machines, first })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(time: f64, machine: &str, value: f32, line: u64) -> Result<Row, TableError> {
        let values = vec![("cpu".into(), value), ("fan".into(), 1.0)];
        Ok(Row { time, machine: machine.into(), values, line, ..Row::default() })
    }

    #[test]
    fn rows_in_any_order_become_series() {
        let rows = vec![row(102.9, "b", 2.0, 3), row(100.0, "a", 1.0, 1), row(101.2, "a", f32::NAN, 2)];
        let read = series(rows.into_iter(), &Described::default()).unwrap();
        let [of] = &read.episodes[..] else { panic!("{read:?}") };
        assert_eq!((of.first, of.machines.join(","), of.series.seconds()), (100, "a,b".into(), 3));
        assert_eq!((of.series.at(0, 0, 0), of.series.at(0, 2, 1)), (1.0, 2.0));
        assert!(of.series.at(0, 1, 0).is_nan());
        assert!(read.warnings.iter().any(|w| w.contains("fan")) && read.warnings.iter().any(|w| w.contains("missing")));
    }

    #[test]
    fn a_machine_twice_is_said_and_where() {
        let twice = series(vec![row(1.0, "a", 1.0, 2), row(1.4, "a", 2.0, 3)].into_iter(), &Described::default());
        assert!(twice.unwrap_err().to_string().contains("line 3: machine a has two values of cpu"));
        assert!(series(std::iter::empty(), &Described::default()).is_err());
        let far = series(vec![row(0.0, "a", 1.0, 2), row(1.7e12, "b", 2.0, 3)].into_iter(), &Described::default());
        assert!(far.unwrap_err().to_string().contains("check that the times are in seconds"));
        // 2^63 is beyond the last second that can be counted, so it is taken for that one.
        let last = series(
            [9.223_372_036_854_775e18, 1e19].map(|time| row(time, "a", 1.0, 1)).into_iter(),
            &Described::default(),
        );
        assert_eq!(last.unwrap().episodes[0].series.seconds(), 1024);
    }

    #[test]
    fn what_comes_every_quarter_minute_is_held_until_the_next() {
        let rows = (0..9).flat_map(|n| ["a", "b", "c"].map(|m| row(f64::from(n) * 15.0, m, n as f32, 1)));
        let read = series(rows, &Described::default()).unwrap();
        let series = &read.episodes[0].series;
        assert!((0..121).all(|second| series.at(0, second, 1) == (second / 15) as f32));
        assert!(read.warnings.iter().any(|w| w.contains("15 s apart")));
    }
}
