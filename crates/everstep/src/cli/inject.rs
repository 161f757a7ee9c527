//! `everstep inject`: injects a fault into a running job, to test its recovery and what it reports.

use super::{Failure, print_json, runtime, status};
use clap::builder::PossibleValue;
use clap::{Args, ValueEnum};
use everstep_core::exit_code::ExitCode;
use everstep_core::injection::{Injected, Injection};
use everstep_wire::output::InjectAnswer;
use std::time::Duration;

/// The faults that can be injected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Kind {
    /// Kill a worker (SIGKILL)
    Kill,
    /// Stop a worker (SIGSTOP)
    Hang,
    /// Let a worker run only part of the time
    Slow,
    /// Kill a worker like the kernel's out-of-memory killer
    Oom,
    /// Report a GPU error, as if from the kernel log
    Xid,
    /// Cut a node off from the coordinator
    Netsplit,
    /// Make a node's durable storage appear full
    DiskFull,
    /// Flip a bit in a copy that a node keeps for another
    CorruptReplica,
}

#[derive(Args, Clone, Debug)]
pub struct InjectOptions {
    /// Fault to inject
    kind: Kind,
    /// Job; optional if only one runs here
    #[arg(long)]
    job: Option<String>,
    /// Rank to affect; faults of a machine affect the node of this rank
    #[arg(long, default_value_t = 0)]
    rank: u32,
    /// Duration of the fault, such as 10s or 500ms (slow, netsplit, disk-full)
    #[arg(long = "for", default_value = "10s", value_parser = super::run::duration, value_name = "TIME")]
    lasts: Duration,
    /// Percent of the time that a slow worker runs
    #[arg(long, default_value_t = 40, value_parser = clap::value_parser!(u8).range(1..=99))]
    percent: u8,
    /// Number of the GPU error (Xid)
    #[arg(long, default_value_t = 79)]
    code: u32,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

impl InjectOptions {
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

/// Sends the fault to the job's coordinator.
pub fn run(o: &InjectOptions) -> Result<i32, Failure> {
    let runtime = runtime()?;
    let job = status::one(&runtime, o.job.as_deref())?;
    let name = &job.status.job;
    let answer = status::ask_coordinator(&runtime, &job, &format!("/v1/jobs/{name}/inject"), Some(&o.injection()))?;
    let nonsense = |e| Failure::new(ExitCode::Failed, format!("the coordinator's answer cannot be read: {e}"));
    let answer: InjectAnswer = serde_json::from_slice(&answer).map_err(nonsense)?;
    if o.json {
        print_json(&answer)?;
    }
    match (answer.why, answer.node) {
        (Some(why), _) => Err(Failure::new(ExitCode::Failed, why)),
        (None, Some(node)) if !o.json => {
            let kind = o.kind.to_possible_value();
            let kind = kind.as_ref().map_or("fault", PossibleValue::get_name);
            println!("injecting {kind} into rank {} of job {name}, node {node}; see: everstep explain", o.rank);
            Ok(0)
        }
        (None, _) => Ok(0),
    }
}
