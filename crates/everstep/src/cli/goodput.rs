//! `everstep goodput`: where the time of every rank went.

use super::{Failure, event_log, print_json};
use clap::{Args, ValueEnum};
use everstep_core::history::{Sums, sums};
use everstep_core::ledger::{Category, Spent};
use everstep_wire::output::{Goodput, JobGoodput};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// How to break the time down.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum By {
    /// By what the time was spent on
    Category,
    /// By the node where it was spent
    Node,
    /// By the incident that caused it
    Incident,
}

/// The denominator of goodput.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Base {
    /// Time during which the job held its ranks
    Held,
    /// Held time plus the time spent waiting for requested ranks
    Wallclock,
}

#[derive(Args, Clone, Debug)]
pub struct GoodputOptions {
    /// Job [default: all jobs with records on this machine]
    job: Option<String>,
    /// Only the most recent period, such as 90m, 12h or 7d
    #[arg(long, value_parser = span, value_name = "TIME")]
    since: Option<Duration>,
    /// Break the time down
    #[arg(long, value_enum)]
    by: Option<By>,
    /// Denominator of goodput
    #[arg(long, value_enum, default_value = "held")]
    base: Base,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Explain how goodput is computed
    #[arg(long)]
    explain: bool,
}

const EXPLANATION: &str = "\
goodput = productive / held. Every microsecond of every rank, from the time its agent joins until
the agent exits, falls into exactly one category:
  productive        a new step, up to its usual duration (median of the latest 1000)
  degraded          time of a new step beyond its usual duration
  recompute         steps that had already been completed
  checkpoint_stall  the loop waits for a snapshot or a save
  data_stall        the loop waits for its data loader
  eval              sections of the script (everstep.section)
  init              starting the processes, until their first step or restore, and stopping them
  warmup            time of the first step after a start beyond the usual duration
  restore           reading a checkpoint
  detect            from the last completed step until the failure is declared
  decide            from then until the processes are restarted
  schedule          waiting for other nodes before the first start
  spare_idle        a spare, or a node that is not in the world
  excluded_idle     an excluded node
  suspended         after the job was asked to stop
  unknown           unfinished steps and time without an explanation
A new step is one beyond the highest step that the job had completed. If neither the script nor its
optimizer nor a scheduler has a step number, new steps after a restart cannot be told apart from
repeated ones: their time counts as unknown, and so do the numbers of new and repeated steps. Steps
are counted from the agents' reports; if every agent that completed a step is lost before it
reports, the numbers are lower bounds (\"at least\"). The categories add up to the held time.";

/// Parses a length of time of at most ten years.
fn span(text: &str) -> Result<Duration, String> {
    super::duration::parse(text, Duration::from_hours(87_600))
}

/// One job's sums, over the whole period.
struct Of {
    job: String,
    sums: Sums,
    whole: u64,
    /// Time is that of a recent period; steps are always those of the whole run.
    recent: bool,
}

impl Of {
    fn share(&self, micros: u64) -> f64 {
        if self.whole == 0 { 0.0 } else { micros as f64 / self.whole as f64 }
    }

    fn document(&self) -> JobGoodput {
        let (sums, total) = (&self.sums, self.sums.total());
        let (productive, degraded) = (total.of(Category::Productive), total.of(Category::Degraded));
        JobGoodput {
            job: self.job.clone(),
            goodput: self.share(productive),
            goodput_time: self.share(productive + degraded),
            held_rank_seconds: total.total() as f64 / 1e6,
            productive_rank_seconds: productive as f64 / 1e6,
            held_us: total.total(),
            queued_us: sums.queued,
            spent_us: total,
            nodes: sums.nodes.clone(),
            incidents: sums.incidents.clone(),
            steps: sums.steps,
            new_steps: sums.new_steps,
            repeated_steps: sums.repeated_steps,
            maybe_more_new_steps: sums.maybe_more_new,
            maybe_more_repeated_steps: sums.maybe_more_repeated,
            generations: sums.generations,
        }
    }

    fn print(&self, by: Option<By>) {
        let total = self.sums.total();
        let productive = total.of(Category::Productive);
        let number = |n: Option<u64>, maybe_more: bool| match n {
            Some(n) if maybe_more => format!("at least {n}"),
            Some(n) => n.to_string(),
            None => "unknown".to_owned(),
        };
        println!(
            "{}  goodput {}{:.1} %  held {:.0} rank-s  productive {:.0} rank-s  new steps {}  repeated {}  generations {}{}",
            self.job,
            if self.sums.new_steps.is_none() { "at least " } else { "" },
            self.share(productive) * 100.0,
            total.total() as f64 / 1e6,
            productive as f64 / 1e6,
            number(self.sums.new_steps, self.sums.maybe_more_new),
            number(self.sums.repeated_steps, self.sums.maybe_more_repeated),
            self.sums.generations,
            if self.recent { "  (steps and generations: since the start)" } else { "" }
        );
        let parts = |of: &Spent| {
            let mut parts: Vec<(Category, u64)> = of.iter().collect();
            parts.sort_by_key(|(_, micros)| std::cmp::Reverse(*micros));
            let each = parts.iter().take(4).map(|(c, micros)| format!("{} {:.1} s", c.name(), *micros as f64 / 1e6));
            each.collect::<Vec<_>>().join(", ")
        };
        match by {
            None => {}
            Some(By::Category) => {
                for (category, micros) in total.iter() {
                    println!(
                        "  {:<17} {:>12.1} rank-s  {:>5.1} %",
                        category.name(),
                        micros as f64 / 1e6,
                        self.share(micros) * 100.0
                    );
                }
                if self.whole > total.total() {
                    let queued = self.whole - total.total();
                    println!(
                        "  {:<17} {:>12.1} rank-s  {:>5.1} %",
                        "(queued)",
                        queued as f64 / 1e6,
                        self.share(queued) * 100.0
                    );
                }
            }
            Some(By::Node) => {
                for (node, of) in &self.sums.nodes {
                    println!(
                        "  node {node:<12} {:>5.1} %  of {:.1} rank-s: {}",
                        of.goodput() * 100.0,
                        of.total() as f64 / 1e6,
                        parts(of)
                    );
                }
            }
            Some(By::Incident) => {
                for (incident, of) in &self.sums.incidents {
                    println!(
                        "  inc-{incident:<6} {:>10.1} rank-s  {:>5.1} %  {}",
                        of.total() as f64 / 1e6,
                        self.share(of.total()) * 100.0,
                        parts(of)
                    );
                }
            }
        }
    }
}

/// Prints the goodput of one job or of all.
pub fn run(o: &GoodputOptions) -> Result<i32, Failure> {
    if o.explain {
        println!("{EXPLANATION}");
        if o.job.is_none() {
            return Ok(0);
        }
    }
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let since = o.since.map(|s| u64::try_from(now.saturating_sub(s).as_micros()).unwrap_or(0));
    let found: Vec<Of> = event_log::read(o.job.as_deref())
        .into_iter()
        .map(|facts| {
            let sums = sums(&facts.entries(), since);
            let queued = if o.base == Base::Wallclock { sums.queued } else { 0 };
            Of { job: facts.job, whole: sums.total().total() + queued, sums, recent: since.is_some() }
        })
        .filter(|of| of.sums.generations > 0)
        .collect();
    if o.json {
        print_json(&Goodput { version: 2, jobs: found.iter().map(Of::document).collect() })?;
    }
    if found.is_empty() {
        return Err(event_log::none_of(o.job.as_deref()));
    }
    if !o.json {
        found.iter().for_each(|of| of.print(o.by));
    }
    Ok(0)
}
