//! `everstep run`: from torchrun's options to an agent.

mod command;
mod meet;
mod node;
mod options;
mod outstanding;
mod spelling;

pub use options::{RunOptions, duration};
pub use spelling::uniform;

use super::{Failure, classify, plan, runtime};
use crate::agent::End;
use crate::agent::agent_file::AgentFile;
use crate::agent::connection::Target;
use crate::agent::file_timer;
use crate::agent::launch::{Template, Torchrun};
use crate::agent::streams::{Console, Std, Streams};
use crate::paths;
use everstep_core::agent::Config;
use everstep_core::exit_code::ExitCode;
use everstep_core::id::{Generation, Incarnation, JobId, NodeId};
use everstep_core::spec::{JobSpec, Policy, RESTARTS_PER_DAY, RestartBudget};
use everstep_wire::private::{Directory, Root};
use everstep_wire::raw::Raw;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// How long a world waits for missing nodes by default.
const JOIN_TIMEOUT: Duration = Duration::from_mins(10);
/// The same for a job on one node whose generated name only its agent knows. No other node can
/// join, but the agent may have been suspended for a while.
const NAMELESS_TIMEOUT: Duration = Duration::from_secs(90);

/// `everstep check`: takes part in a check of the nodes and starts no workers.
pub fn check(o: &RunOptions) -> Result<i32, Failure> {
    start(&RunOptions { only_check: true, ..o.clone() })
}

/// Runs an agent and returns the job's exit code.
pub fn run(o: &RunOptions) -> Result<i32, Failure> {
    if let Some(shell) = &o.print_completion {
        return super::completion::print(shell);
    }
    let done = start(o);
    if o.exit_codes == "torchrun" {
        // torchrun ends with 0 or 1, or with 2 after a usage error.
        return done
            .map(|code| i32::from(code != 0))
            .map_err(|f| Failure { code: f.code.min(ExitCode::Usage.number()), ..f });
    }
    done
}

/// Returns what the nodes of a job must agree on. The job's name is set later, with the meeting
/// place.
fn spec(o: &RunOptions) -> Result<JobSpec, Failure> {
    let (nodes_min, nodes_max) = o.nodes()?;
    let restarts = o.max_restarts.map_or(RestartBudget::PerDayAfterFirstStep(RESTARTS_PER_DAY), RestartBudget::Exactly);
    let spec = JobSpec {
        job: JobId(String::new()),
        nodes_min,
        nodes_max,
        node_unit: o.node_unit,
        spares: o.spares,
        restarts,
        detect_timeout_ms: u64::try_from(o.detect_timeout.as_millis()).unwrap_or(u64::MAX),
        join_timeout_ms: u64::try_from(o.join_timeout()?.unwrap_or(JOIN_TIMEOUT).as_millis()).unwrap_or(u64::MAX),
        policy: o.policy(),
        check: o.check_when(),
    };
    spec.validate().map_err(|e| Failure::usage(e.to_string()))?;
    Ok(spec)
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(1, |d| u64::try_from(d.as_nanos()).unwrap_or(1))
}

/// Returns how to reach the coordinator. If this node may start it, the store's directory is
/// created.
fn target(o: &RunOptions, meet: &meet::Meet, spec: &JobSpec) -> Result<Target, Failure> {
    let store = &meet.store;
    // Problems with these files are reported here and now, not in a coordinator's log.
    let notify = o.notify.as_ref().map(std::path::absolute).transpose();
    let notify = notify.map_err(|e| Failure::config(format!("cannot use --notify: {e}")))?;
    notify.as_deref().map(crate::notify::routes::read).transpose().map_err(Failure::config)?;
    let provisioner = o.provisioner.as_deref().map(command::provisioner).transpose()?;
    plan::known(o.cluster.as_deref(), o.jobs.as_deref())?;
    super::detect::ready(o.detector.as_deref())?;
    let whole = |path: &Path| {
        std::path::absolute(path).map_err(|e| Failure::config(format!("cannot use {}: {e}", path.display())))
    };
    let known = o.cluster.as_deref().zip(o.jobs.as_deref());
    let detector = o.detector.as_deref().map(whole).transpose()?;
    let known = known.map(|(cluster, jobs)| Ok::<_, Failure>((whole(cluster)?, whole(jobs)?))).transpose()?;
    if meet.may_host {
        if spec.policy == Policy::Act && provisioner.is_none() {
            return Err(Failure::usage(
                "--policy act needs a program that carries out requests; give --provisioner PROGRAM, or use --policy advise",
            ));
        }
        paths::open_store(store).map_err(|e| {
            Failure::config(format!("cannot use the store {}: {e}; give another --store", store.display()))
        })?;
    }
    Ok(Target {
        endpoint: meet.endpoint.clone(),
        store: store.clone(),
        token_file: o.token_file.clone(),
        notify,
        provisioner,
        detector,
        known,
        insecure: o.insecure,
        may_host: meet.may_host,
        silence: spec.ladder().silence,
        patience: spec.ladder().orphan,
    })
}

/// Takes part in a rendezvous for a torchrun agent, which runs the workers (`everstep.torchrun`).
pub fn rendezvous(o: &RunOptions) -> Result<i32, Failure> {
    if o.log_format == "json" {
        crate::log::in_json();
    }
    let mut spec = spec(o)?;
    let meet = meet::meet(o, spec.nodes_max)?;
    crate::log::set("job", meet.job.as_str());
    spec.job = JobId(meet.job.clone());
    let (node, _lock) = node::node_id(o, &meet, spec.nodes_max)?;
    let target = target(o, &meet, &spec)?;
    let config = Config {
        node: NodeId(node),
        incarnation: Incarnation(now()),
        spec,
        host: meet.host,
        workers: 1,
        store_port: 0,
        replica_port: 0,
        held: Generation(0),
        domain: String::new(),
        role: o.role.clone(),
        named: true,
        shutdown_grace: Duration::ZERO,
        stop_signals: Vec::new(),
        table: classify::table(o.failure_table.as_deref())?,
    };
    let runtime = runtime()?;
    let end = runtime.block_on(crate::agent::external::run(config, meet.place, target));
    // A read of standard input may block forever.
    runtime.shutdown_background();
    end.map_err(|e| Failure::new(ExitCode::Failed, format!("cannot take part in the rendezvous: {e}")))
}

fn start(o: &RunOptions) -> Result<i32, Failure> {
    if o.log_format == "json" {
        crate::log::in_json();
    }
    let mut spec = spec(o)?;
    let workers = options::workers(&o.nproc_per_node)?;
    let stop_signals = o.stop_signals()?;
    let streams = streams(o)?;
    // "default" is torch's name for its own log handling.
    if let Some(plugin) = o.logs_specs.as_ref().filter(|plugin| *plugin != "default") {
        return Err(Failure::usage(format!(
            "--logs-specs {plugin} is a plug-in written in Python; run it with torchrun --rdzv-backend everstep --logs-specs {plugin}"
        )));
    }
    let program = if o.only_check { command::Program::default() } else { command::program(o)? };
    let meet = meet::meet(o, spec.nodes_max)?;
    crate::log::set("job", meet.job.as_str());
    spec.job = JobId(meet.job.clone());
    if spec.nodes_max == 1 && meet.endpoint.ends_with(":0") && o.job_name().is_none() && o.join_timeout()?.is_none() {
        spec.join_timeout_ms = NAMELESS_TIMEOUT.as_millis() as u64;
    }
    let (node, lock) = node::node_id(o, &meet, spec.nodes_max)?;
    let nanos = now();
    let target = target(o, &meet, &spec)?;
    let streams = open_logs(o, &meet, nanos, streams)?;
    let (memory, _in_use) = node::open_memory(&meet.job, &node)?;
    // Other commands may run in other directories.
    let whole = |path: &Path| Raw::from(std::path::absolute(path).unwrap_or_else(|_| path.to_path_buf()));
    let about = AgentFile {
        endpoint: Some(meet.endpoint.clone()),
        job: Some(meet.job.clone()),
        kept: Some(whole(&streams.kept)),
        logs: Some(whole(&streams.logs)),
        memory: Some(Raw::from(&memory)),
        node: Some(node.clone()),
        pid: Some(std::process::id()),
        store: Some(whole(&meet.store)),
        token_file: o.token_file.as_deref().map(whole),
    };
    let _ = about.write(&AgentFile::path(&meet.job, &node));
    crate::log::keep_in(&paths::agent_log(&meet.job, &node));
    let logs = streams.logs.clone();
    let template = template(o, &meet, &node, program, streams, memory);
    if let Some(preload) = &template.preload {
        crate::preload::write(preload).map_err(|e| {
            let remedy = if paths::is_full(&e) { format!("; {}", paths::MAKE_ROOM) } else { String::new() };
            Failure::config(format!("cannot write {}: {e}{}{remedy}", preload.display(), crate::guard::advice(&e)))
        })?;
    }
    let config = Config {
        node: NodeId(node),
        incarnation: Incarnation(nanos),
        spec,
        host: meet.host,
        workers,
        store_port: meet.master_port.unwrap_or(0),
        replica_port: 0,
        held: Generation(0),
        domain: o.failure_domain.clone().unwrap_or_default(),
        role: o.role.clone(),
        named: o.job_name().is_some(),
        shutdown_grace: Duration::from_secs(shutdown_timeout(o)),
        stop_signals,
        table: classify::table(o.failure_table.as_deref())?,
    };
    let runtime = runtime()?;
    let end = runtime.block_on(crate::agent::run(config, template, meet.place, target, &lock));
    outstanding::complete(runtime, end.as_ref().is_ok_and(|end| end.hurried));
    let end = end.map_err(|e| Failure::config(format!("cannot run an agent here: {e}{}", crate::guard::advice(&e))))?;
    say_end(o, &meet.job, &end, &logs);
    Ok(end.code)
}

/// Creates the directories for the workers' output. Returns the streams with them.
fn open_logs(o: &RunOptions, meet: &meet::Meet, nanos: u64, streams: Streams) -> Result<Streams, Failure> {
    let folder = format!("{}_{:08x}", meet.run_id.replace('/', "-"), nanos as u32);
    let kept = paths::job(&meet.job).join("logs").join(&folder);
    let no_logs = o.log_dir.as_deref() == Some(Path::new("/dev/null"));
    let logs = if no_logs { kept.clone() } else { o.log_dir.as_ref().map_or(kept.clone(), |d| d.join(&folder)) };
    for directory in [&logs, &kept] {
        Directory::root(directory, Root::Named).map_err(|e| {
            Failure::config(format!("cannot write logs to {}: {e}; give another --log-dir", directory.display()))
        })?;
    }
    Ok(Streams { logs, kept, no_logs, ..streams })
}

/// Returns what all workers of this node have in common.
fn template(
    o: &RunOptions,
    meet: &meet::Meet,
    node: &str,
    program: command::Program,
    streams: Streams,
    memory: PathBuf,
) -> Template {
    let short = everstep_checkpoint::arena::job_hash(&format!("{}/{node}", meet.job));
    Template {
        argv: program.argv,
        python: crate::interpreter::python(),
        warm: program.warm.filter(|_| !o.no_warm && o.numa_binding.is_none()),
        preload: (!o.no_preload).then(|| paths::job(&meet.job).join("preload")),
        job: meet.job.clone(),
        node: node.to_owned(),
        streams,
        socket: paths::memory().join(format!("{:08x}.sock", short as u32)),
        timer_file: file_timer::wanted(&memory.join("timer")),
        memory,
        torchrun: Torchrun {
            run_id: meet.run_id.clone(),
            role: o.role.clone(),
            max_restarts_given: o.max_restarts.is_some(),
            signals_to_handle: o.signals_to_handle.clone(),
            virtual_local_rank: o.virtual_local_rank,
            numa_binding: o.numa_binding.clone(),
        },
        kernel_log: Some(o.kernel_log.clone()).filter(|p| p != Path::new("off")),
        nvml: Some(o.nvml.clone()).filter(|p| p != Path::new("off")),
    }
}

/// Says how a job that failed has ended, and passes the first worker's error on.
fn say_end(o: &RunOptions, job: &str, end: &End, logs: &Path) {
    if end.code != 0 && o.only_check {
        tracing::error!("{}", end.why);
    } else if end.code != 0 {
        if let Some((file, code)) = &end.first_error {
            copy_error(file, *code);
        }
        tracing::error!("{}", end.why);
        let (code, logs) = (end.code, logs.display());
        // If a signal ended the job, or it was refused, the cause is known.
        let known = (129..=192).contains(&code) || code == ExitCode::Refused.number();
        let see = if known { String::new() } else { format!("; see: everstep logs {job} --first-cause") };
        tracing::error!("job {job} ended with exit code {code}; logs in {logs}{see}");
    }
}

/// Returns where the workers' output goes, as far as the options decide it.
fn streams(o: &RunOptions) -> Result<Streams, Failure> {
    let template = Some(o.log_line_prefix_template.clone()).filter(|t| !t.is_empty());
    let template = template.or_else(|| std::env::var("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE").ok());
    Ok(Streams {
        redirects: Std::parse("--redirects", &o.redirects).map_err(Failure::usage)?,
        tee: Std::parse("--tee", &o.tee).map_err(Failure::usage)?,
        console: Console { ranks: o.console_ranks()?, prefix: template },
        stdout_filters: options::comma_list(&o.duplicate_stdout_filters),
        stderr_filters: options::comma_list(&o.duplicate_stderr_filters),
        ..Streams::default()
    })
}

/// Like torchrun: copies the first worker's error to the file that our parent process named
/// (`ErrorHandler.dump_error_file`).
fn copy_error(from: &Path, code: i32) {
    let Some(to) = std::env::var_os("TORCHELASTIC_ERROR_FILE").filter(|p| !p.is_empty()) else { return };
    let Some(mut error) = std::fs::read(from).ok().and_then(|b| serde_json::from_slice::<serde_json::Value>(&b).ok())
    else {
        return;
    };
    if error["message"].is_object() {
        error["message"]["errorCode"] = code.into();
    }
    if let Err(e) = std::fs::write(&to, error.to_string()) {
        crate::say_warning!("cannot write {}: {e}", to.display());
    }
}

fn shutdown_timeout(o: &RunOptions) -> u64 {
    let from_environment = || std::env::var("TORCH_ELASTIC_SHUTDOWN_TIMEOUT").ok()?.parse().ok();
    o.shutdown_timeout.or_else(from_environment).unwrap_or(30)
}
