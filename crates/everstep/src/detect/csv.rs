//! Comma-separated tables. Wide: `time,machine[,role][,domain][,episode],METRIC,…`; long:
//! `time,machine,…,metric,value`. Times are RFC 3339, or seconds since 1970 or any other origin.

use super::table::Row;
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
    fn of(header: &[String]) -> Result<Columns, String> {
        let at = |name: &str| header.iter().position(|h| h.trim().eq_ignore_ascii_case(name));
        let need = |name: &str| {
            at(name).ok_or_else(|| {
                format!(
                    "the header has no column {name}: tables need time,machine[,role][,domain][,episode] and either one column per metric or metric,value (found: {})",
                    header.join(",")
                )
            })
        };
        let (time, machine) = (need("time")?, need("machine")?);
        let (role, domain, episode) = (at("role"), at("domain"), at("episode"));
        let long = at("metric").zip(at("value"));
        let taken: Vec<usize> = [Some(time), Some(machine), role, domain, episode].into_iter().flatten().collect();
        let rest = header.iter().enumerate().filter(|(n, name)| !taken.contains(n) && !name.trim().is_empty());
        let metrics: Vec<(usize, String)> = rest.map(|(n, name)| (n, name.trim().to_owned())).collect();
        if metrics.is_empty() {
            return Err("the first line names no metric".into());
        }
        Ok(Columns { time, machine, role, domain, episode, long, metrics })
    }

    fn row(&self, field: impl Fn(usize) -> String, line: u64) -> Result<Row, String> {
        let text = |n: Option<usize>| n.map(&field).filter(|f| !f.is_empty());
        let said = field(self.time);
        let time = time(&said)
            .ok_or_else(|| format!("line {line}: {said:?} is not a time (seconds, or 2026-01-31T12:00:00Z)"))?;
        let value = |n: usize, name: &str| -> Result<f32, String> {
            let said = field(n);
            match said.to_ascii_lowercase().as_str() {
                // The various spellings of a missing value.
                "" | "nan" | "null" | "none" | "na" | "n/a" | "-" => Ok(f32::NAN),
                _ => said.parse().map_err(|_| format!("line {line}: {said:?} of {name} is not a number")),
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
                .collect::<Result<_, String>>()?,
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
pub fn rows(from: impl Read + 'static) -> Result<impl Iterator<Item = Result<Row, String>>, String> {
    let mut reader = csv::ReaderBuilder::new().trim(csv::Trim::All).from_reader(from);
    let header = reader.headers().map_err(|e| format!("it cannot be read as a table: {e}"))?;
    let columns = Columns::of(&header.iter().map(str::to_owned).collect::<Vec<_>>())?;
    Ok(reader.into_records().map(move |record| {
        let record = record.map_err(|e| format!("it cannot be read as a table: {e}"))?;
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
    records: impl Iterator<Item = Result<Vec<String>, String>>,
) -> Result<impl Iterator<Item = Result<Row, String>>, String> {
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
        rows(text.as_bytes())?.collect()
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
