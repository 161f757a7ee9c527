//! What Prometheus reads from a coordinator (`GET /metrics`, with the job's token as bearer).
//! Counters are computed from the records, so they continue across lives of the coordinator. Gauges
//! show what its nodes last reported. Nothing is broken down by rank or step.

use everstep_core::history::sums;
use everstep_core::history::{Entry, Incident, LogLine, Outcome, incidents};
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Registry, Unit};
use std::collections::BTreeMap;
use std::sync::atomic::AtomicU64;

type Labels = Vec<(&'static str, String)>;
type Gauges = Family<Labels, Gauge<f64, AtomicU64>>;
type Counters = Family<Labels, Counter<f64, AtomicU64>>;

/// Windows of the share of time that went into new steps, in seconds, besides the whole run.
const WINDOWS: [(&str, u64); 3] = [("1h", 3600), ("24h", 86_400), ("7d", 604_800)];

/// The current state of a job.
#[derive(Debug, Default)]
pub struct Live {
    pub job: String,
    /// The step that all ranks have completed.
    pub step: Option<u64>,
    /// Median duration of a step, in microseconds.
    pub step_us: Option<u64>,
    /// Number of ranks that train, that wait for the next generation, that are kept ready, and that
    /// were requested at most.
    pub world: [(&'static str, u32); 4],
    /// Newest step on durable storage, and newest step in other nodes' memory.
    pub checkpoints: [(&'static str, Option<u64>); 2],
    pub restarts: u32,
    /// By node: its state (the name of a `NodeState`), and seconds since it was last heard.
    pub nodes: BTreeMap<String, (&'static str, f64)>,
}

fn of(run: &str) -> Labels {
    vec![("run", run.to_owned())]
}

fn with(run: &str, more: &[(&'static str, &str)]) -> Labels {
    of(run).into_iter().chain(more.iter().map(|(k, v)| (*k, (*v).to_owned()))).collect()
}

/// Returns the metrics as OpenMetrics text. `records` are the recorded lines, and `now` is in
/// microseconds since 1970.
pub fn page(live: &[Live], records: &str, now: u64) -> String {
    let mut registry = Registry::with_prefix("everstep");
    let version = vec![("version", env!("CARGO_PKG_VERSION"))];
    registry.register("build", "Version", prometheus_client::metrics::info::Info::new(version));
    let leader = Gauges::default();
    leader.get_or_create(&Vec::new()).set(1.0);
    registry.register("coordinator_leader", "1 if this coordinator is the leader", leader);
    of_now(&mut registry, live);
    of_records(&mut registry, &read(records), now);
    let mut text = String::new();
    // Writing to a string does not fail.
    let _ = encode(&mut text, &registry);
    text
}

/// Parses the records, by job.
fn read(records: &str) -> BTreeMap<String, Vec<Entry>> {
    let mut found: BTreeMap<String, Vec<Entry>> = BTreeMap::new();
    for line in records.lines().filter_map(|l| serde_json::from_str::<LogLine>(l).ok()) {
        found.entry(line.job.0.clone()).or_default().push(Entry::from(line));
    }
    found
}

fn of_now(registry: &mut Registry, live: &[Live]) {
    let [step, world, age, restarts, node, heard] = std::array::from_fn(|_| Gauges::default());
    let length = Gauges::default();
    for job in live {
        let run = job.job.as_str();
        if let Some(at) = job.step {
            step.get_or_create(&of(run)).set(at as f64);
            for (tier, newest) in job.checkpoints {
                if let Some(newest) = newest {
                    age.get_or_create(&with(run, &[("tier", tier)])).set(at.saturating_sub(newest) as f64);
                }
            }
        }
        if let Some(micros) = job.step_us {
            length.get_or_create(&of(run)).set(micros as f64 / 1e6);
        }
        for (state, ranks) in job.world {
            world.get_or_create(&with(run, &[("state", state)])).set(f64::from(ranks));
        }
        restarts.get_or_create(&of(run)).set(f64::from(job.restarts));
        for (id, (state, silence)) in &job.nodes {
            node.get_or_create(&with(run, &[("node", id), ("state", state)])).set(1.0);
            heard.get_or_create(&with(run, &[("node", id)])).set(*silence);
        }
    }
    registry.register("last_step", "Step that all ranks have completed", step);
    registry.register_with_unit("step_duration", "Median length of a step", Unit::Seconds, length);
    registry.register("world_size", "Ranks", world);
    registry.register("checkpoint_age_steps", "Steps since the newest checkpoint", age);
    registry.register("run_restarts", "Restarts of this run", restarts);
    registry.register("node_state", "1 for the state that a node is in", node);
    registry.register_with_unit("heartbeat_age", "Time since a node's last heartbeat", Unit::Seconds, heard);
}

fn of_records(registry: &mut Registry, jobs: &BTreeMap<String, Vec<Entry>>, now: u64) {
    let [spent, steps, count, lost, stage] = std::array::from_fn(|_| Counters::default());
    let [share, open] = std::array::from_fn(|_| Gauges::default());
    for (run, entries) in jobs {
        let whole = sums(entries, None);
        for (category, micros) in whole.total().iter() {
            spent.get_or_create(&with(run, &[("category", category.name())])).inc_by(micros as f64 / 1e6);
        }
        for (kind, n) in [("new", whole.new_steps), ("recompute", whole.repeated_steps)] {
            // Unknown values are not served.
            if let Some(n) = n {
                steps.get_or_create(&with(run, &[("kind", kind)])).inc_by(n as f64);
            }
        }
        share.get_or_create(&with(run, &[("window", "all")])).set(whole.total().goodput());
        for (window, seconds) in WINDOWS {
            let since = now.saturating_sub(seconds * 1_000_000);
            let goodput = sums(entries, Some(since)).total().goodput();
            share.get_or_create(&with(run, &[("window", window)])).set(goodput);
        }
        let told = incidents(entries);
        let unfinished = told.iter().filter(|i| i.outcome == Outcome::Open).count();
        open.get_or_create(&of(run)).set(unfinished as f64);
        for incident in &told {
            let class = incident.class();
            count.get_or_create(&with(run, &[("class", class), ("outcome", outcome(incident))])).inc();
            let of_script = || incident.began.and_then(|b| b.again());
            if let Some(steps) = incident.restored.as_ref().map(|r| r.steps_lost).or_else(of_script) {
                lost.get_or_create(&with(run, &[("class", class)])).inc_by(steps as f64);
            }
            for (name, micros) in incident.stages() {
                stage.get_or_create(&with(run, &[("stage", name)])).inc_by(micros as f64 / 1e6);
            }
        }
    }
    registry.register_with_unit("gpu", "Rank time, by category", Unit::Seconds, spent);
    registry.register("steps", "Steps that all ranks have completed", steps);
    registry.register("goodput_ratio", "Share of the held time that went into new steps", share);
    registry.register("incidents", "Incidents", count);
    registry.register("incident_open", "Open incidents", open);
    registry.register("lost_steps", "Steps recomputed because of failures", lost);
    registry.register_with_unit("incident_stage", "Duration of incidents, by stage", Unit::Seconds, stage);
}

fn outcome(of: &Incident) -> &'static str {
    match of.outcome {
        Outcome::Open => "open",
        Outcome::Repeating => "repeating",
        Outcome::Recovered => "recovered",
        Outcome::GoesOn => "goes_on",
        Outcome::Superseded { .. } => "superseded",
        Outcome::Ended { .. } => "ended",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_are_what_was_written_down() {
        let live = Live {
            job: "j\"1".into(),
            step: Some(7),
            checkpoints: [("durable", Some(4)), ("peer", None)],
            ..Live::default()
        };
        let records = r#"{"ts":1.0,"job":"j","fact":{"NodeJoined":{"node":"0","again":false}}}
{"ts":2.0,"job":"j","fact":{"GenerationStarted":{"generation":1,"world_size":2,"restarts":0}}}
{"ts":9.0,"job":"j","fact":{"IncidentOpened":{"incident":1,"generation":1,"node":"0","failure":null,"action":"Reconfigure"}}}
{"ts":10.5,"job":"j","fact":{"GenerationStarted":{"generation":2,"world_size":2,"restarts":1}}}
not json"#;
        let text = page(&[live], records, 11_000_000);
        for line in [
            "everstep_build_info{version=\"0.1.0\"} 1",
            "everstep_last_step{run=\"j\\\"1\"} 7.0",
            "everstep_checkpoint_age_steps{run=\"j\\\"1\",tier=\"durable\"} 3.0",
            "everstep_incidents_total{run=\"j\",class=\"node-lost\",outcome=\"open\"} 1.0",
            "everstep_incident_stage_seconds_total{run=\"j\",stage=\"regroup\"} 1.5",
            "everstep_incident_open{run=\"j\"} 1.0",
        ] {
            assert!(text.contains(line), "{line} is not in\n{text}");
        }
        assert!(text.ends_with("# EOF\n"));
    }
}
