//! `everstep inject`: break something on a running job, to see that it recovers and says what happened.

use super::{Failure, runtime, status};
use clap::{Args, ValueEnum};
use everstep_wire::envelope::{Injected, Injection};
use serde_json::{Value, json};
use std::time::Duration;

/// What can be broken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Kind {
    /// Kill a worker
    Kill,
    /// Stop a worker (SIGSTOP)
    Hang,
    /// Let a worker run a part of the time only
    Slow,
    /// Kill a worker as the kernel does when memory is used up
    Oom,
    /// Tell of an error of a GPU, as in the kernel's log
    Xid,
    /// Cut a node off from the coordinator
    Netsplit,
    /// Let durable storage of a node be full
    DiskFull,
    /// Change a byte of a copy that a node keeps for another one
    CorruptReplica,
}

#[derive(Args, Clone, Debug)]
pub struct Options {
    /// What to break
    kind: Kind,
    /// In which job; not needed when only one runs here
    #[arg(long)]
    job: Option<String>,
    /// At which rank; faults of a machine happen on the one that it is on
    #[arg(long, default_value_t = 0)]
    rank: u32,
    /// For how long, where it does not last by itself (slow, netsplit, disk-full)
    #[arg(long = "for", default_value = "10s", value_parser = super::run::duration, value_name = "TIME")]
    lasts: Duration,
    /// Part of the time that a slow worker runs, in percent
    #[arg(long, default_value_t = 40, value_parser = clap::value_parser!(u8).range(1..=99))]
    percent: u8,
    /// Number of the GPU's error (xid)
    #[arg(long, default_value_t = 79)]
    code: u32,
    /// As JSON
    #[arg(long)]
    json: bool,
}

impl Options {
    fn injection(&self) -> Injection {
        let fault = match self.kind {
            Kind::Kill => Injected::Kill,
            Kind::Hang => Injected::Hang,
            Kind::Slow => Injected::Slow { percent: self.percent },
            Kind::Oom => Injected::Oom,
            Kind::Xid => Injected::Xid { code: self.code },
            Kind::Netsplit => Injected::Netsplit,
            Kind::DiskFull => Injected::DiskFull,
            Kind::CorruptReplica => Injected::CorruptReplica,
        };
        let milliseconds = u64::try_from(self.lasts.as_millis()).unwrap_or(u64::MAX);
        Injection { fault, rank: self.rank, milliseconds }
    }
}

/// Asks the job's coordinator for it.
pub fn run(o: &Options) -> Result<i32, Failure> {
    let runtime = runtime()?;
    let job = status::one(&runtime, o.job.as_deref())?;
    let name = job["job"].as_str().unwrap_or_default();
    let answer =
        status::ask_coordinator(&runtime, &job, &format!("/v1/jobs/{name}/inject"), Some(&json!(o.injection())))?;
    let answer: Value = serde_json::from_slice(&answer).unwrap_or_default();
    if o.json {
        println!("{answer}");
    }
    match answer["why"].as_str() {
        Some(why) => Err(Failure { code: 1, why: why.into() }),
        None => {
            if !o.json {
                println!(
                    "{:?} at rank {} of job {name}, node {}; see: everstep explain",
                    o.kind,
                    o.rank,
                    answer["node"].as_str().unwrap_or("?")
                );
            }
            Ok(0)
        }
    }
}
