//! Samples from a Prometheus server, for every known metric that it has, through its HTTP API
//! (`/api/v1/query_range`).

use super::table::Row;
use everstep_detector::catalogue::KNOWN;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::time::Duration;

/// A server that takes longer to answer counts as down.
const PATIENCE: Duration = Duration::from_secs(30);
/// Points requested at once (the server's own limit is 11,000).
const POINTS: i64 = 10_000;

/// What to request.
#[derive(Clone, Debug)]
pub struct Asked {
    /// Address of the server.
    pub url: String,
    /// Start and end, in seconds since 1970.
    pub span: (i64, i64),
    /// Seconds between points.
    pub step: i64,
    /// Range of rates, in Prometheus' notation.
    pub window: String,
    /// Label that names the machine.
    pub machine: String,
    /// More matchers, such as `job="training"`.
    pub matchers: String,
    /// The user's own queries, by metric.
    pub own: BTreeMap<String, String>,
}

#[derive(Deserialize)]
struct Answer {
    status: String,
    #[serde(default)]
    error: String,
    data: Option<Data>,
}

#[derive(Deserialize)]
struct Data {
    result: Vec<Found>,
}

#[derive(Deserialize)]
struct Found {
    metric: BTreeMap<String, String>,
    values: Vec<(f64, String)>,
}

/// Returns the machine `10.0.0.7` for `10.0.0.7:9100`, so that exporters on different ports agree.
fn machine(label: &str) -> String {
    match label.rsplit_once(':') {
        Some((host, port)) if port.chars().all(|c| c.is_ascii_digit()) && !host.is_empty() => host.to_owned(),
        _ => label.to_owned(),
    }
}

impl Asked {
    /// Returns the queries by metric.
    fn queries(&self) -> Vec<(String, String)> {
        let fill = |query: &str| {
            query.replace("{window}", &self.window).replace("{host}", &self.machine).replace("{jobs}", &self.matchers)
        };
        let known = KNOWN.iter().filter(|k| !self.own.contains_key(&k.name));
        let known = known.filter_map(|k| Some((k.name.clone(), fill(k.prometheus.as_ref()?))));
        known.chain(self.own.iter().map(|(name, query)| (name.clone(), fill(query)))).collect()
    }
}

/// Why a server's samples cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum QueryError {
    /// The client cannot be set up on this machine.
    #[error(transparent)]
    Client(reqwest::Error),
    #[error("cannot query {url}: {}; is a Prometheus server running there?", innermost(source))]
    Unreachable { url: String, source: reqwest::Error },
    #[error("cannot read the answer of {url}: {source}")]
    Answer { url: String, source: reqwest::Error },
    #[error("{url} responds ({status}), but not like a Prometheus server; use the URL without /api/v1")]
    NotPrometheus { url: String, status: reqwest::StatusCode },
    #[error("{url} refuses the query {query}: {error}")]
    Refused { url: String, query: String, error: String },
    #[error(
        "{url} has no known metrics (node_exporter's, DCGM-exporter's) in this period, or none with the label {label}; \
         see --since, --until and --machine-label"
    )]
    NoMetrics { url: String, label: String },
}

/// Returns the message of the first cause, which is the most precise one.
fn innermost(error: &reqwest::Error) -> String {
    std::iter::successors(Some(error as &dyn std::error::Error), |e| e.source())
        .last()
        .map_or(String::new(), ToString::to_string)
}

async fn ask(
    client: &reqwest::Client,
    of: &Asked,
    query: &str,
    time: RangeInclusive<i64>,
) -> Result<Vec<Found>, QueryError> {
    let url = format!("{}/api/v1/query_range", of.url.trim_end_matches('/'));
    let form = [
        ("query", query.to_owned()),
        ("start", time.start().to_string()),
        ("end", time.end().to_string()),
        ("step", of.step.to_string()),
    ];
    let body: Vec<String> = form.iter().map(|(key, value)| format!("{key}={}", encoded(value))).collect();
    let sent =
        client.post(&url).header("content-type", "application/x-www-form-urlencoded").body(body.join("&")).send().await;
    let server = || of.url.clone();
    let answer = sent.map_err(|source| QueryError::Unreachable { url: server(), source })?;
    let status = answer.status();
    let text = answer.text().await.map_err(|source| QueryError::Answer { url: server(), source })?;
    let answer: Answer =
        serde_json::from_str(&text).map_err(|_| QueryError::NotPrometheus { url: server(), status })?;
    match answer.data.filter(|_| answer.status == "success") {
        Some(data) => Ok(data.result),
        None => Err(QueryError::Refused { url: server(), query: query.to_owned(), error: answer.error }),
    }
}

/// Percent-encodes a value for a form.
fn encoded(text: &str) -> String {
    let of = |byte: u8| match byte {
        b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'~' => char::from(byte).to_string(),
        _ => format!("%{byte:02X}"),
    };
    text.bytes().map(of).collect()
}

/// Returns everything that a server has for a period.
///
/// # Errors
/// Fails if there is no such server, if it refuses a query, or if it has no known metric.
pub async fn rows(of: &Asked) -> Result<Vec<Row>, QueryError> {
    let client = reqwest::Client::builder().timeout(PATIENCE).no_proxy().build().map_err(QueryError::Client)?;
    let mut all: BTreeMap<(String, i64), Vec<(String, f32)>> = BTreeMap::new();
    for (name, query) in of.queries() {
        let mut start = of.span.0;
        while start <= of.span.1 {
            let end = (start + POINTS * of.step).min(of.span.1);
            for found in ask(&client, of, &query, start..=end).await? {
                let Some(label) = found.metric.get(&of.machine) else { continue };
                for (at, value) in found.values {
                    let value = value.parse().unwrap_or(f32::NAN);
                    let of_machine = all.entry((machine(label), at.floor() as i64)).or_default();
                    // Two exporters on one machine may have the same metric.
                    if of_machine.iter().all(|(n, _)| *n != name) {
                        of_machine.push((name.clone(), value));
                    }
                }
            }
            start = end + of.step;
        }
    }
    if all.is_empty() {
        return Err(QueryError::NoMetrics { url: of.url.clone(), label: of.machine.clone() });
    }
    let row = |((machine, at), values)| Row { time: at as f64, machine, values, ..Row::default() };
    Ok(all.into_iter().map(row).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn machines_are_hosts_and_queries_are_whole() {
        assert_eq!((machine("10.0.0.7:9100").as_str(), machine("gpu-7").as_str()), ("10.0.0.7", "gpu-7"));
        assert_eq!(encoded("a b{x=\"1\"}"), "a%20b%7Bx%3D%221%22%7D");
        let asked = Asked {
            url: String::new(),
            span: (0, 1),
            step: 1,
            window: "1m".into(),
            machine: "instance".into(),
            matchers: "job=\"x\"".into(),
            own: BTreeMap::from([("cpu".into(), "mine[{window}]".into())]),
        };
        let queries = asked.queries();
        assert!(queries.iter().all(|(_, q)| !q.contains("{window}") && !q.contains("{host}") && !q.contains("{jobs}")));
        assert!(queries.contains(&("cpu".into(), "mine[1m]".into())) && queries.len() > 10);
    }
}
