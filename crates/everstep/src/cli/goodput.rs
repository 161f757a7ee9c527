//! `everstep goodput`: which share of the held time went into new steps.

use super::{Failure, facts};
use clap::Args;
use everstep_core::goodput::{Goodput, Span, goodput};
use serde_json::{Value, json};
use std::time::{SystemTime, UNIX_EPOCH};

#[derive(Args, Clone, Debug)]
pub struct Options {
    /// The job; without it all jobs whose records are on this machine
    job: Option<String>,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Say how it is computed
    #[arg(long)]
    explain: bool,
}

const EXPLANATION: &str = "\
goodput = productive / held.
  held        ranks x seconds from the start of a generation to the start of the next one, the end, or now
  productive  new steps x the generation's median step time x ranks
  new steps   steps beyond the highest that an earlier generation had completed
What is missing is start-up, restarts, waiting, repeated steps, and steps that took longer than the median.";

/// Generations of a job's latest run, from the facts that its coordinator wrote down.
fn spans(facts: &[Value], now: f64) -> Vec<Span> {
    let mut spans: Vec<(u64, Span)> = Vec::new();
    for line in facts {
        let (ts, fact) = (line["ts"].as_f64().unwrap_or(now), &line["fact"]);
        if let Some(started) = fact.get("GenerationStarted") {
            if started["restarts"] == 0 && fact_ended(spans.last().map(|(_, s)| s), now) {
                spans.clear();
            }
            if let Some((_, last)) = spans.last_mut() {
                last.to = ts;
            }
            let ranks = started["world_size"].as_u64().and_then(|n| u32::try_from(n).ok()).unwrap_or(0);
            let span = Span { from: ts, to: now, ranks, ..Span::default() };
            spans.push((started["generation"].as_u64().unwrap_or(0), span));
        } else if let Some(restored) = fact.get("Restored") {
            if let Some((_, last)) = spans.last_mut() {
                last.restored = restored["step"].as_u64().unwrap_or(0);
            }
        } else if let Some(progress) = fact.get("Progress") {
            let generation = progress["generation"].as_u64().unwrap_or(0);
            if let Some((_, span)) = spans.iter_mut().rev().find(|(g, _)| *g == generation) {
                span.step = span.step.max(progress["step"].as_u64().unwrap_or(0));
                span.step_micros.extend(progress["step_us"].as_u64());
            }
        } else if fact.get("Ended").is_some()
            && let Some((_, last)) = spans.last_mut()
        {
            last.to = ts;
        }
    }
    spans.into_iter().map(|(_, s)| s).collect()
}

/// The run before this one has ended: its last generation is closed.
fn fact_ended(last: Option<&Span>, now: f64) -> bool {
    last.is_some_and(|s| s.to < now)
}

/// Prints the goodput of one job or of all.
pub fn run(o: &Options) -> Result<i32, Failure> {
    if o.explain {
        println!("{EXPLANATION}");
        if o.job.is_none() {
            return Ok(0);
        }
    }
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |d| d.as_secs_f64());
    let found: Vec<(String, usize, Goodput)> = facts::told(o.job.as_deref())
        .into_iter()
        .map(|told| {
            let spans = spans(&told.lines, now);
            (told.job, spans.len(), goodput(&spans))
        })
        .filter(|(_, generations, _)| *generations > 0)
        .collect();
    if o.json {
        let rows = found.iter().map(|(job, generations, g)| {
            json!({"job": job, "goodput": g.ratio(), "held_rank_seconds": g.held, "productive_rank_seconds": g.productive,
                "new_steps": g.new_steps, "repeated_steps": g.repeated_steps, "generations": generations})
        });
        println!("{}", json!({"version": 1, "jobs": rows.collect::<Vec<_>>()}));
    }
    if found.is_empty() {
        return Err(facts::none_of(o.job.as_deref()));
    }
    if !o.json {
        for (job, generations, g) in &found {
            println!(
                "{job}  goodput {:.1} %  held {:.0} rank-s  productive {:.0} rank-s  new steps {}  repeated {}  generations {generations}",
                g.ratio() * 100.0,
                g.held,
                g.productive,
                g.new_steps,
                g.repeated_steps
            );
        }
    }
    Ok(0)
}
