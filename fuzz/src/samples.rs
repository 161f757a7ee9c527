//! What must hold of tables of samples, whatever format they were read from.

use everstep::detect::table::{Described, Row, TableError, series};
use std::collections::BTreeSet;

/// Most samples that a table may become here. The product allows 4 GiB of them, because a user's
/// table may cover days.
const SAMPLES_MAX: i128 = 4 << 20;

/// Converts rows to series.
///
/// # Panics
/// If the series do not fit the table.
pub fn check(rows: impl Iterator<Item = Result<Row, TableError>>) {
    let Ok(rows) = rows.collect::<Result<Vec<Row>, _>>() else { return };
    if samples(&rows) > SAMPLES_MAX {
        return;
    }
    let machines: BTreeSet<String> = rows.iter().map(|row| row.machine.clone()).collect();
    let Ok(read) = series(rows.into_iter().map(Ok), &Described::default()) else { return };
    for episode in &read.episodes {
        assert!(episode.series.seconds() > 0 && !episode.machines.is_empty());
        assert_eq!(episode.series.machines(), episode.machines.len());
        assert!(episode.machines.iter().all(|machine| machines.contains(machine)));
    }
}

/// Returns an upper bound of the number of samples.
fn samples(rows: &[Row]) -> i128 {
    // As in `series`, times that are out of range are taken for the first or the last second.
    let seconds = || rows.iter().map(|row| i128::from(row.time.floor() as i64));
    let span = seconds().max().unwrap_or(0) - seconds().min().unwrap_or(0) + 1;
    let metrics: BTreeSet<&str> =
        rows.iter().flat_map(|row| row.values.iter().map(|(name, _)| name.as_str())).collect();
    span * rows.len() as i128 * metrics.len() as i128
}
