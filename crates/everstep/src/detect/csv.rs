//! Comma-separated tables. Wide: `time,machine[,role][,domain][,episode],METRIC,…`; long:
//! `time,machine,…,metric,value`. Times are RFC 3339, or seconds since 1970 or any other origin.

use super::table::{Row, TableError};
use std::io::Read;

/// Parses a time, and returns seconds.
pub fn time(text: &str) -> Option<f64> {
    let text = text.trim();
    if let Ok(seconds) = text.parse::<f64>() {
        return Some(seconds);
    }
    let at = chrono::DateTime::parse_from_rfc3339(text).ok()?;
    Some(at.timestamp_millis() as f64 / 1000.0)
}

/// The columns of a table.
struct Columns {
    time: usize,
    machine: usize,
    role: Option<usize>,
    domain: Option<usize>,
    episode: Option<usize>,
    /// In a long table: metric and value.
    long: Option<(usize, usize)>,
    metrics: Vec<(usize, String)>,
}

impl Columns {
    fn of(header: &[String]) -> Result<Columns, TableError> {
        let at = |name: &str| header.iter().position(|h| h.trim().eq_ignore_ascii_case(name));
        let need = |name: &'static str| at(name).ok_or_else(|| TableError::NoColumn { name, found: header.to_vec() });
        let (time, machine) = (need("time")?, need("machine")?);
        let (role, domain, episode) = (at("role"), at("domain"), at("episode"));
        let long = at("metric").zip(at("value"));
        let taken: Vec<usize> = [Some(time), Some(machine), role, domain, episode].into_iter().flatten().collect();
        let rest = header.iter().enumerate().filter(|(n, name)| !taken.contains(n) && !name.trim().is_empty());
        let metrics: Vec<(usize, String)> = rest.map(|(n, name)| (n, name.trim().to_owned())).collect();
        if metrics.is_empty() {
            return Err(TableError::NoMetric);
        }
        Ok(Columns { time, machine, role, domain, episode, long, metrics })
    }

    fn row(&self, field: impl Fn(usize) -> String, line: u64) -> Result<Row, TableError> {
        let text = |n: Option<usize>| n.map(&field).filter(|f| !f.is_empty());
        let said = field(self.time);
        let time = time(&said).ok_or(TableError::Time { line, text: said })?;
        let value = |n: usize, name: &str| -> Result<f32, TableError> {
            let said = field(n);
            match said.to_ascii_lowercase().as_str() {
                // The various spellings of a missing value.
                "" | "nan" | "null" | "none" | "na" | "n/a" | "-" => Ok(f32::NAN),
                _ => said.parse().map_err(|_| TableError::Value { line, metric: name.to_owned(), text: said }),
            }
        };
        let values = match self.long {
            Some((metric, at)) => {
                let name = field(metric);
                let found = value(at, &name)?;
                vec![(name, found)]
            }
            None => self
                .metrics
                .iter()
                .map(|(n, name)| Ok((name.clone(), value(*n, name)?)))
                .collect::<Result<_, TableError>>()?,
        };
        Ok(Row {
            episode: text(self.episode).unwrap_or_default(),
            time,
            machine: field(self.machine),
            role: text(self.role),
            domain: text(self.domain),
            values,
            line,
        })
    }
}

/// Returns all rows of a table.
///
/// # Errors
/// Fails if the first line does not name the required columns.
pub fn rows(from: impl Read + 'static) -> Result<impl Iterator<Item = Result<Row, TableError>>, TableError> {
    let mut reader = csv::ReaderBuilder::new().trim(csv::Trim::All).from_reader(from);
    let header = reader.headers()?;
    let columns = Columns::of(&header.iter().map(str::to_owned).collect::<Vec<_>>())?;
    Ok(reader.into_records().map(move |record| {
        let record = record?;
        let line = record.position().map_or(0, csv::Position::line);
        columns.row(|n| record.get(n).unwrap_or("").to_owned(), line)
    }))
}

/// Returns the rows of a table that another format was read into.
///
/// # Errors
/// Those of [`rows`].
pub fn of_fields(
    header: Vec<String>,
    records: impl Iterator<Item = Result<Vec<String>, TableError>>,
) -> Result<impl Iterator<Item = Result<Row, TableError>>, TableError> {
    let columns = Columns::of(&header)?;
    Ok((1u64..).zip(records).map(move |(line, record)| {
        let record = record?;
        columns.row(|n| record.get(n).cloned().unwrap_or_default(), line)
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &'static str) -> Result<Vec<Row>, String> {
        rows(text.as_bytes()).and_then(Iterator::collect).map_err(|e| e.to_string())
    }

    #[test]
    fn wide_and_long_tables_say_the_same() {
        let wide = read("time,machine,role,cpu,gpu-duty\n1,a,x,0.5,\n2026-01-31T12:00:00Z,b,x,nan,1\n").unwrap();
        assert_eq!((wide[0].values[0].1, wide[1].time, wide[1].role.as_deref()), (0.5, 1_769_860_800.0, Some("x")));
        assert!(wide[0].values[1].1.is_nan() && wide[1].values[0].1.is_nan());
        let long = read("machine, time, metric, value\na, 1, cpu, 0.5\n").unwrap();
        assert_eq!((long[0].machine.as_str(), &long[0].values[0]), ("a", &("cpu".into(), 0.5)));
    }

    #[test]
    fn what_is_wrong_is_said_with_its_line() {
        assert!(read("when,machine,cpu\n1,a,2\n").unwrap_err().contains("no column time"));
        assert!(read("time,machine\n1,a\n").unwrap_err().contains("no metric"));
        assert!(
            read("time,machine,cpu\n1,a,2\n1,b,many\n")
                .unwrap_err()
                .contains("line 3: \"many\" of cpu is not a number")
        );
        assert!(read("time,machine,cpu\nsoon,a,2\n").unwrap_err().contains("line 2: \"soon\" is not a time"));
        assert!(read("time,machine,cpu\n1,a\n").is_err());
    }
}
