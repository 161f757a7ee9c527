//! Connects the coordinator's records with the routes: keeps track of the jobs, of the notices that
//! are being sent, and of those already sent.

use super::{Numbered, Settled, routes::Route, start};
use chrono::DateTime;
use everstep_core::coordinator::command::Fact;
use everstep_core::history::{Entry, LogLine};
use everstep_core::notify::{Deliveries, Notice, Notifier};
use std::collections::BTreeMap;
use std::path::Path;
use tokio::sync::mpsc;

/// The notices of all jobs of a coordinator.
pub struct Dispatcher {
    jobs: BTreeMap<String, Notifier>,
    routes: Vec<mpsc::UnboundedSender<Numbered>>,
    settled: mpsc::UnboundedReceiver<Settled>,
    deliveries: Deliveries,
}

/// What became of notices.
#[derive(Debug, Default, PartialEq)]
pub struct News {
    /// The job and the fact to record for each notice that is settled.
    pub facts: Vec<(String, Fact)>,
    /// Notices that were given up on a route, and why, for users.
    pub warnings: Vec<String>,
}

/// Formats a time, UTC.
pub fn when(micros: u64) -> String {
    let at = i64::try_from(micros).ok().and_then(DateTime::from_timestamp_micros);
    at.map_or("?".into(), |at| at.format("%Y-%m-%d %H:%M:%SZ").to_string())
}

impl Dispatcher {
    /// Continues where an earlier life of the coordinator ended, from its records.
    pub fn open(routes: Vec<Route>, records: &Path) -> Self {
        let (sender, settled) = mpsc::unbounded_channel();
        let routes = start(routes, &sender);
        let mut dispatcher = Dispatcher { jobs: BTreeMap::new(), routes, settled, deliveries: Deliveries::default() };
        if !dispatcher.routes.is_empty() {
            let text = crate::events_file::read(records).unwrap_or_default();
            text.lines().filter_map(|l| serde_json::from_str(l).ok()).for_each(|line| dispatcher.add(line));
        }
        dispatcher
    }

    /// Returns true if a notice is still being sent.
    pub fn busy(&self) -> bool {
        !self.deliveries.is_empty()
    }

    /// Takes in a recorded line.
    pub fn add(&mut self, line: LogLine) {
        if self.routes.is_empty() {
            return;
        }
        let notifier = self.jobs.entry(line.job.0.clone()).or_insert_with(|| Notifier::new(&line.job.0));
        match line.fact {
            Fact::Notified { incident, status, run } => notifier.mark_sent(run, incident, status),
            _ => notifier.add(Entry::from(line)),
        }
    }

    /// Sends the notices that are due at `now`. Returns what became of earlier ones.
    pub fn send_due(&mut self, now: u64) -> News {
        let notices: Vec<Notice> = self.jobs.values_mut().flat_map(|n| n.due(now, when)).collect();
        for notice in notices {
            let number = self.deliveries.sent(&notice, self.routes.len());
            for route in &self.routes {
                let _ = route.send((number, notice.clone()));
            }
        }
        let mut news = News::default();
        while let Ok(Settled { number, fate, warning }) = self.settled.try_recv() {
            news.facts.extend(self.deliveries.settled(number, fate));
            news.warnings.extend(warning);
        }
        news
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use everstep_core::coordinator::command::Action;
    use everstep_core::id::{Generation, JobId, NodeId};
    use everstep_core::notify::Status;
    use std::time::Duration;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    /// The records of a job that failed.
    fn records() -> Vec<LogLine> {
        let (generation, node) = (Generation(1), NodeId("1".into()));
        let facts = [
            Fact::GenerationStarted { generation, world_size: 2, restarts: 0 },
            Fact::IncidentOpened { incident: 1, generation, node, failure: None, action: Action::Fail },
            Fact::Ended { code: 1, why: "no restart left".into() },
        ];
        let line = |(ts, fact)| LogLine { ts, job: JobId("j".into()), fact };
        [100.25, 110.5, 110.75].into_iter().zip(facts).map(line).collect()
    }

    /// Opens the dispatcher of a coordinator with these records and two webhooks.
    fn opened(records: &[LogLine], urls: [&str; 2]) -> Dispatcher {
        let dir = tempfile::tempdir().unwrap();
        let lines: Vec<String> = records.iter().map(|l| serde_json::to_string(l).unwrap()).collect();
        std::fs::write(dir.path().join("events.jsonl"), lines.join("\n")).unwrap();
        let routes = urls.map(|url| Route::Webhook { url: url.into(), secret: None });
        Dispatcher::open(routes.into(), &dir.path().join("events.jsonl"))
    }

    /// Starts a webhook that accepts everything. Returns its address.
    async fn webhook() -> String {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/hook", listener.local_addr().unwrap());
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                let (mut raw, mut part) = (Vec::new(), [0; 4096]);
                while !raw.ends_with(b"}") {
                    let n = stream.read(&mut part).await.unwrap();
                    assert_ne!(n, 0, "the request ends early");
                    raw.extend_from_slice(&part[..n]);
                }
                let answer = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n";
                stream.write_all(answer).await.unwrap();
                let _ = stream.shutdown().await;
            }
        });
        url
    }

    /// Lets the dispatcher work until it has sent everything, at most for five seconds. Returns the
    /// news.
    async fn works(dispatcher: &mut Dispatcher) -> News {
        let mut all = News::default();
        for _ in 0..500 {
            let News { facts, warnings } = dispatcher.send_due(200_000_000);
            all.facts.extend(facts);
            all.warnings.extend(warnings);
            if !dispatcher.busy() {
                break;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        all
    }

    fn notified() -> (String, Fact) {
        ("j".into(), Fact::Notified { incident: 1, status: Status::Person, run: 100_250_000 })
    }

    #[tokio::test]
    async fn a_notice_is_recorded_when_it_has_arrived_and_not_sent_again_then() {
        let url = webhook().await;
        let mut dispatcher = opened(&records(), [&url, &url]);
        assert_eq!(dispatcher.send_due(200_000_000), News::default(), "it is queued");
        assert!(dispatcher.busy());
        assert_eq!(works(&mut dispatcher).await.facts, [notified()]);
        let (job, fact) = notified();
        let mut records = records();
        records.push(LogLine { ts: 111.0, job: JobId(job), fact });
        let mut next = opened(&records, [&url, &url]);
        assert_eq!(next.send_due(200_000_000), News::default());
        assert!(!next.busy(), "an earlier coordinator has sent it");
    }

    #[tokio::test]
    async fn a_notice_that_has_not_arrived_everywhere_is_sent_by_the_next_coordinator() {
        let url = webhook().await;
        // Nobody listens there.
        let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let mut dispatcher = opened(&records(), [&url, &format!("http://{silent}/hook")]);
        for _ in 0..50 {
            assert_eq!(dispatcher.send_due(200_000_000), News::default(), "one route has not accepted it");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        assert!(dispatcher.busy());
        drop(dispatcher);
        let mut next = opened(&records(), [&url, &url]);
        assert_eq!(works(&mut next).await.facts, [notified()]);
    }

    #[tokio::test]
    async fn a_notice_that_a_route_refuses_is_settled_with_a_warning() {
        let url = webhook().await;
        let mut dispatcher = opened(&records(), [&url, "no address"]);
        let News { facts, warnings } = works(&mut dispatcher).await;
        assert_eq!(facts, [notified()]);
        assert!(matches!(&warnings[..], [one] if one.contains("webhook route")), "{warnings:?}");
    }
}
