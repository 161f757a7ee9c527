//! The command line: parsing and dispatch. Data goes to standard output, messages to standard
//! error.

mod approve;
mod charts;
mod ckpt;
mod classify;
mod completion;
mod detect;
mod doctor;
mod duration;
mod event_log;
mod explain;
mod export;
mod goodput;
mod help;
mod incidents;
mod inject;
mod logs;
mod memory;
mod metrics;
mod notify;
mod plan;
mod remove_ipc;
mod run;
mod schema;
mod simulate;
mod size;
mod stacks;
mod status;
mod throughput;
mod trace;

use crate::coordinator::Setup;
use crate::failure::Failure;
use crate::listening::Place;
use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use everstep_core::exit_code::ExitCode;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// Reads a file that the user named.
fn text(path: &Path) -> Result<String, Failure> {
    crate::user_file::read(path).map_err(|e| Failure::usage(format!("cannot read {}: {e}", path.display())))
}

/// Writes a file that the user asked for.
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
    /// Run a training script on this node, with torchrun's options
    Run(Box<run::RunOptions>),
    /// Find bad or slow nodes; run this on every node, with the same rendezvous options as for run
    Check(Box<run::RunOptions>),
    /// Show the state of this user's running jobs
    Status(status::StatusOptions),
    /// Print the output of a job's workers
    Logs(logs::LogsOptions),
    /// Show goodput: the share of the ranks' time spent on new training steps
    Goodput(goodput::GoodputOptions),
    /// Explain an incident: its cause, what was lost, the response, the outcome, and what to do
    /// next
    Explain(explain::Explain),
    /// List, show, export and rate the incidents of a job
    Incidents(incidents::IncidentsOptions),
    /// Print the stacks of a running job's ranks, grouped, with the outlier first
    Stacks(stacks::StacksOptions),
    /// Approve a job's request about a machine (--policy advise)
    Approve(approve::ApproveOptions),
    /// Print a running job's metrics for Prometheus
    Metrics(metrics::MetricsOptions),
    /// Inject a fault into a running job
    Inject(inject::InjectOptions),
    /// List, inspect, verify, prune, export and import checkpoints
    Ckpt(ckpt::CkptOptions),
    /// Estimate the memory that a job needs per node, and the failures that its copies survive
    Memory(memory::MemoryOptions),
    /// Plan how to divide the nodes of a cluster among its jobs
    Plan(Box<plan::PlanOptions>),
    /// Simulate the same failures under several policies and compare where every node's time went
    Simulate(simulate::SimulateOptions),
    /// Find the spares, copies, checkpoint interval and detection time that reach a goal
    Size(size::SizeOptions),
    /// Find machines that behave unlike their peers, in samples from files or Prometheus
    Detect(Box<detect::DetectOptions>),
    /// Describe a trace of failures, or generate one
    Trace(trace::TraceOptions),
    /// Print the JSON schema of what a command prints with --json, or of the event log
    Schema(schema::SchemaOptions),
    /// Classify an error message: its class, what is at fault, and the response
    Classify(classify::ClassifyOptions),
    /// Send a test message to every route in a file for --notify
    Notify(notify::NotifyOptions),
    /// Check this machine's shared memory, limits and leftovers, and print the timeouts
    Doctor(doctor::DoctorOptions),
    /// Run a coordinator (agents start one when none answers)
    #[command(hide = true)]
    Coordinator {
        /// Address to listen on, HOST:PORT
        #[arg(long)]
        bind: String,
        /// Allow other machines to connect without encryption
        #[arg(long, requires = "token_file")]
        insecure: bool,
        /// Directory of the store
        #[arg(long)]
        store: PathBuf,
        /// File with the token, if not the store's own
        #[arg(long)]
        token_file: Option<PathBuf>,
        /// File of the routes for notices (TOML)
        #[arg(long)]
        notify: Option<PathBuf>,
        /// Program that provides machines
        #[arg(long)]
        provisioner: Option<PathBuf>,
        /// File of the detector's settings (TOML)
        #[arg(long)]
        detector: Option<PathBuf>,
        /// File of the cluster, for planning across jobs (TOML)
        #[arg(long, requires = "jobs")]
        cluster: Option<PathBuf>,
        /// File of the jobs, for --cluster (TOML)
        #[arg(long)]
        jobs: Option<PathBuf>,
    },
    /// Take part in a rendezvous for torchrun (--rdzv-backend everstep); started only by its
    /// plug-in
    #[command(hide = true)]
    Rendezvous(Box<run::RunOptions>),
    /// Run the process between an agent and its workers; started only by agents
    #[command(hide = true)]
    Guard {
        /// Descriptor of the node lock
        lock: i32,
        /// Descriptor of the workers' standard input
        input: i32,
        /// Number of files that a worker may open
        files: Option<u64>,
        /// Format of messages, and what they belong to
        #[arg(long)]
        log: String,
    },
}

/// Prints a document of [`everstep_wire::output`] on one line.
fn print_json(document: &impl serde::Serialize) -> Result<(), Failure> {
    let failed = |e| Failure::new(ExitCode::Failed, format!("this cannot be written as JSON: {e}"));
    println!("{}", serde_json::to_string(document).map_err(failed)?);
    Ok(())
}

/// Threads are never given up, because the system may refuse the next one.
const KEEP_THREADS: std::time::Duration = std::time::Duration::from_hours(8760);

/// Returns what the arguments ask for, or the exit code after an error or a help text was printed.
fn parsed(arguments: Vec<OsString>) -> Result<Cli, i32> {
    let matches = help::arranged(Cli::command()).try_get_matches_from(arguments);
    matches.and_then(|m| Cli::from_arg_matches(&m)).map_err(|e| {
        let _ = e.print();
        if e.use_stderr() { ExitCode::Usage.number() } else { ExitCode::Done.number() }
    })
}

/// Runs the command line and returns the exit code.
pub fn main() -> i32 {
    if let Err(failure) = crate::log::start() {
        return failure.end();
    }
    let mut arguments: Vec<OsString> = std::env::args_os().collect();
    let command = arguments.get(1).map(|c| c.to_string_lossy().into_owned()).unwrap_or_default();
    if ["run", "rendezvous", "check"].contains(&command.as_str()) {
        match run::uniform(&arguments.split_off(2)) {
            Ok(rest) if command == "check" && rest.iter().any(|a| a == "--") => {
                return Failure::usage("everstep check runs no script; omit it").end();
            }
            Ok(rest) => {
                arguments.extend(rest);
                if command == "check" {
                    // `check` has no script, but the parser requires one.
                    arguments.extend(["--".into(), OsString::new()]);
                }
            }
            Err(failure) => return failure.end(),
        }
    }
    let cli = match parsed(arguments) {
        Ok(cli) => cli,
        Err(code) => return code,
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
        Command::Explain(options) => explain::explain(&options),
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
        Command::Schema(options) => schema::run(&options),
        Command::Classify(options) => classify::run(&options),
        Command::Notify(options) => notify::run(&options),
        Command::Doctor(options) => doctor::run(&options),
        Command::Coordinator { bind, insecure, store, token_file, notify, provisioner, detector, cluster, jobs } => {
            let known = plan::known(cluster.as_deref(), jobs.as_deref());
            known.and_then(|known| {
                let detector = detect::ready(detector.as_deref())?;
                let (place, port) = bound(&bind, insecure)?;
                let (directory, token_file) = (store.as_path(), token_file.as_deref());
                let routes = notify.as_deref().map_or(Ok(Vec::new()), crate::notify::routes::read);
                let routes = routes.map_err(Failure::config)?;
                coordinator(Setup { place, port, directory, token_file, routes, provisioner, known, detector })
            })
        }
        Command::Guard { lock, input, files, log } => {
            crate::log::take_over(&log);
            crate::descriptors::inherit(files);
            return crate::guard::run(lock, input);
        }
    };
    done.unwrap_or_else(Failure::end)
}

/// Refuses to run where another user could interfere with this user's files. This concerns the
/// commands that write or read everstep's records on this machine.
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
        "run" | "rendezvous" | "check" => crate::paths::ready(),
        _ if LOOKING.contains(&command) => crate::paths::inspect(),
        _ => Ok(()),
    };
    found.map_err(Failure::config)
}

/// Returns where a coordinator listens, for `--bind HOST:PORT`.
fn bound(bind: &str, insecure: bool) -> Result<(Place, u16), Failure> {
    let bad = || Failure::usage(format!("--bind {bind} is not HOST:PORT"));
    let (host, port) = bind.rsplit_once(':').ok_or_else(bad)?;
    let host = host.trim_start_matches('[').trim_end_matches(']');
    let place = Place::at(host, insecure).map_err(Failure::config)?;
    Ok((place, port.parse().map_err(|_| bad())?))
}

fn coordinator(setup: Setup<'_>) -> Result<i32, Failure> {
    crate::log::keep_in(&crate::paths::coordinator_log(setup.directory));
    let done = runtime()?.block_on(crate::coordinator::run(setup));
    done.map(|()| 0).map_err(|e| Failure { code: e.code, why: e.why })
}

/// Builds a runtime of one thread, plus one for blocking calls: agents and coordinators wait rather
/// than compute.
fn runtime() -> Result<tokio::runtime::Runtime, Failure> {
    let failed = |e: std::io::Error| Failure::new(ExitCode::Failed, format!("cannot start: {e}"));
    let built = tokio::runtime::Builder::new_current_thread().enable_all().thread_keep_alive(KEEP_THREADS).build();
    let runtime = built.map_err(failed)?;
    // Once one blocking thread exists, work for which the system refuses another waits for it. With
    // none, tokio panics. Whether a thread will be available cannot be tested in advance: a trial
    // thread still counts for a while after it ends.
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| {}));
    let first = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| runtime.spawn_blocking(|| {})));
    std::panic::set_hook(hook);
    if first.is_err() {
        // An orderly shutdown needs a thread, too.
        std::mem::forget(runtime);
        let why = "cannot start a thread: raise the limit of processes (ulimit -u, or pids.max of the control group)";
        return Err(Failure::config(why));
    }
    Ok(runtime)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        help::arranged(Cli::command()).debug_assert();
    }
}
