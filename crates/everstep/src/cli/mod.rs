//! The command line: parsing and dispatch. Data goes to standard output, talk to standard error.

mod approve;
mod ckpt;
mod classify;
mod completion;
mod detect;
mod doctor;
mod export;
mod facts;
mod goodput;
mod incidents;
mod inject;
mod interpreter;
mod logs;
mod memory;
mod metrics;
mod notify;
mod picture;
mod plan;
mod remove_ipc;
mod run;
mod simulate;
mod size;
mod stacks;
mod status;
mod throughput;
mod trace;

use crate::listening::Place;
use clap::{Parser, Subcommand};
use everstep_planner::Problem;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// Exit code for a wrong command line.
pub const USAGE: i32 = 2;

/// A failure as the command line ends with it: a code and a sentence that says what to do.
pub struct Failure {
    pub code: i32,
    pub why: String,
}

impl Failure {
    fn usage(why: impl Into<String>) -> Self {
        Failure { code: USAGE, why: why.into() }
    }

    fn config(why: impl Into<String>) -> Self {
        Failure { code: 78, why: why.into() }
    }

    fn end(self) -> i32 {
        crate::say!("{}", self.why);
        self.code
    }
}

/// A file that the user has named.
fn text(path: &Path) -> Result<String, Failure> {
    std::fs::read_to_string(path).map_err(|e| Failure::usage(format!("cannot read {}: {e}", path.display())))
}

/// A file that the user wants written.
fn write(path: &Path, text: &str) -> Result<(), Failure> {
    std::fs::write(path, text).map_err(|e| Failure::config(format!("cannot write {}: {e}", path.display())))
}

#[derive(Parser)]
#[command(name = "everstep", version, about = "Keeps large PyTorch training runs stepping.", propagate_version = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run a training script on this node; takes torchrun's options.
    Run(Box<run::Options>),
    /// Which of these nodes are bad or slow; takes the options of run that say where the nodes meet, on each of them.
    Check(Box<run::Options>),
    /// What all jobs of this user are doing.
    Status(status::Options),
    /// What the workers wrote.
    Logs(logs::Options),
    /// Which share of the held time went into new steps.
    Goodput(goodput::Options),
    /// What happened, why, what was lost, what was done, whether it worked, what next.
    Explain(incidents::Explain),
    /// Incidents of a job: list, show.
    Incidents(incidents::Options),
    /// Where the ranks of a running job are, grouped, the odd one on top.
    Stacks(stacks::Options),
    /// Say yes to what a job asks for about machines (--policy advise).
    Approve(approve::Options),
    /// What Prometheus reads of a running job.
    Metrics(metrics::Options),
    /// Break something on a running job, to see what happens.
    Inject(inject::Options),
    /// Checkpoints in memory and on durable storage: list, look into, verify, prune, export, import.
    Ckpt(ckpt::Options),
    /// What a job needs per node, before it starts, and what its copies are worth.
    Memory(memory::Options),
    /// How the nodes of a cluster should be split over its jobs, and why.
    Plan(Box<plan::Options>),
    /// What the same failures would have cost under several policies, down to where every node's time went.
    Simulate(simulate::Options),
    /// Spares, copies, checkpoints and detection that reach a goal, and which of them pays most.
    Size(size::Options),
    /// Which machine behaves unlike its peers, on samples from a file or a Prometheus server.
    Detect(Box<detect::Options>),
    /// What a trace of failures is like; generated ones.
    Trace(trace::Options),
    /// What a text of an error says: its class, whose fault it is, what is done.
    Classify(classify::Options),
    /// Send a message to each place of a file for --notify, to see that it arrives.
    Notify(notify::Options),
    /// Check this machine: shared memory, limits, leftovers; print the timeouts.
    Doctor(doctor::Options),
    /// Run a coordinator (agents start one where none answers).
    #[command(hide = true)]
    Coordinator {
        /// where to listen
        #[arg(long)]
        bind: String,
        /// other machines may reach it without encryption
        #[arg(long, requires = "token_file")]
        insecure: bool,
        /// directory of the store
        #[arg(long)]
        store: PathBuf,
        /// the token, if not the store's own
        #[arg(long)]
        token_file: Option<PathBuf>,
        /// where notices go
        #[arg(long)]
        notify: Option<PathBuf>,
        /// who provides machines
        #[arg(long)]
        provisioner: Option<PathBuf>,
        /// which machine behaves unlike its peers: settings
        #[arg(long)]
        detector: Option<PathBuf>,
        /// what is known of nodes and jobs, to plan for several
        #[arg(long, requires = "jobs")]
        cluster: Option<PathBuf>,
        /// see cluster
        #[arg(long)]
        jobs: Option<PathBuf>,
    },
    /// Takes part in a rendezvous for torchrun (--rdzv-backend everstep); started by its plug-in only.
    #[command(hide = true)]
    Rendezvous(Box<run::Options>),
    /// The process between an agent and its workers; started by agents only.
    #[command(hide = true)]
    Guard {
        /// descriptor of the node lock
        lock: i32,
        /// descriptor of the workers' standard input
        input: i32,
        /// how many files the workers may open
        files: Option<u64>,
    },
}

/// A thread that was had is kept: the next one may be refused.
const KEEP_THREADS: std::time::Duration = std::time::Duration::from_secs(365 * 24 * 3600);

/// Runs the command line; returns the exit code.
pub fn main() -> i32 {
    let mut arguments: Vec<OsString> = std::env::args_os().collect();
    let command = arguments.get(1).map(|c| c.to_string_lossy().into_owned()).unwrap_or_default();
    if ["run", "rendezvous", "check"].contains(&command.as_str()) {
        match run::uniform(&arguments.split_off(2)) {
            Ok(rest) if command == "check" && rest.iter().any(|a| a == "--") => {
                return Failure::usage("everstep check runs no script; leave it away").end();
            }
            Ok(rest) => {
                arguments.extend(rest);
                if command == "check" {
                    // No script is what is asked for here.
                    arguments.extend(["--".into(), OsString::new()]);
                }
            }
            Err(failure) => return failure.end(),
        }
    }
    let cli = match Cli::try_parse_from(arguments) {
        Ok(cli) => cli,
        Err(e) => {
            let _ = e.print();
            return if e.use_stderr() { USAGE } else { 0 };
        }
    };
    if ["run", "rendezvous", "check", "coordinator"].contains(&command.as_str()) {
        crate::descriptors::raise();
    }
    if let Err(failure) = usable(&command) {
        return failure.end();
    }
    let done = match cli.command {
        Command::Run(options) => run::run(&options),
        Command::Rendezvous(options) => run::rendezvous(&options),
        Command::Check(options) => run::check(&options),
        Command::Status(options) => status::run(&options),
        Command::Logs(options) => logs::run(&options),
        Command::Goodput(options) => goodput::run(&options),
        Command::Explain(options) => incidents::explain(&options),
        Command::Incidents(options) => incidents::run(&options),
        Command::Stacks(options) => stacks::run(&options),
        Command::Approve(options) => approve::run(&options),
        Command::Metrics(options) => metrics::run(&options),
        Command::Plan(options) => plan::run(&options),
        Command::Simulate(options) => simulate::run(&options),
        Command::Size(options) => size::run(&options),
        Command::Detect(options) => detect::run(&options),
        Command::Trace(options) => trace::run(&options),
        Command::Inject(options) => inject::run(&options),
        Command::Ckpt(options) => ckpt::run(&options),
        Command::Memory(options) => memory::run(&options),
        Command::Classify(options) => classify::run(&options),
        Command::Notify(options) => notify::run(&options),
        Command::Doctor(options) => doctor::run(&options),
        Command::Coordinator { bind, insecure, store, token_file, notify, provisioner, detector, cluster, jobs } => {
            let known = plan::known(cluster.as_deref(), jobs.as_deref());
            known.and_then(|known| {
                let detector = detect::ready(detector.as_deref())?;
                coordinator(
                    (&bind, insecure),
                    &store,
                    token_file.as_deref(),
                    notify.as_deref(),
                    provisioner,
                    (known, detector),
                )
            })
        }
        Command::Guard { lock, input, files } => {
            crate::descriptors::inherit(files);
            return crate::guard::run(lock, input);
        }
    };
    done.unwrap_or_else(Failure::end)
}

/// Commands that keep something on this machine, or look at what is kept, do so only where no other user can interfere.
fn usable(command: &str) -> Result<(), Failure> {
    const LOOKING: [&str; 11] = [
        "status",
        "logs",
        "goodput",
        "explain",
        "incidents",
        "stacks",
        "approve",
        "metrics",
        "inject",
        "ckpt",
        "doctor",
    ];
    let found = match command {
        "run" | "rendezvous" | "check" => crate::places::ready(),
        _ if LOOKING.contains(&command) => crate::places::inspect(),
        _ => Ok(()),
    };
    found.map_err(Failure::config)
}

fn coordinator(
    (bind, insecure): (&str, bool),
    store: &Path,
    token_file: Option<&Path>,
    notify: Option<&Path>,
    provisioner: Option<PathBuf>,
    known: (Option<Problem>, crate::detect::settings::Ready),
) -> Result<i32, Failure> {
    let routes = notify.map_or(Ok(Vec::new()), crate::notify::routes::read).map_err(Failure::config)?;
    let bad = || Failure::usage(format!("--bind {bind} is not HOST:PORT"));
    let (host, port) = bind.rsplit_once(':').ok_or_else(bad)?;
    let host = host.trim_start_matches('[').trim_end_matches(']');
    let place = Place::at(host, insecure).map_err(Failure::config)?;
    let place = (place, port.parse().map_err(|_| bad())?);
    let done = runtime()?.block_on(crate::coordinator::run(place, store, token_file, routes, provisioner, known));
    done.map(|()| 0).map_err(|e| Failure { code: e.code, why: e.why })
}

/// One thread, and another one for what blocks: agents and coordinators wait, they do not compute.
fn runtime() -> Result<tokio::runtime::Runtime, Failure> {
    let failed = |e: std::io::Error| Failure { code: 1, why: format!("cannot start: {e}") };
    let built = tokio::runtime::Builder::new_current_thread().enable_all().thread_keep_alive(KEEP_THREADS).build();
    let runtime = built.map_err(failed)?;
    // While one thread is there, work for which the system gives no other waits for it; without any, tokio panics. Whether
    // there will be one cannot be asked: a thread started on trial still counts for a while after its end.
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| {}));
    let first = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| runtime.spawn_blocking(|| {})));
    std::panic::set_hook(hook);
    if first.is_err() {
        // Ending it in good order takes a thread, too.
        std::mem::forget(runtime);
        return Err(Failure {
            code: 78,
            why: "cannot start a thread: raise the limit of processes (ulimit -u, or pids.max of the control group)"
                .into(),
        });
    }
    Ok(runtime)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        use clap::CommandFactory;
        Cli::command().debug_assert();
    }
}
