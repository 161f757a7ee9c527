//! `everstep run`: from torchrun's options to an agent.

use super::{Failure, runtime};
use crate::agent::connection::Target;
use crate::agent::launch::{Std, Template};
use crate::places;
use clap::Args;
use clap::builder::FalseyValueParser;
use everstep_core::agent::Config;
use everstep_core::id::{Incarnation, JobId, NodeId};
use everstep_core::spec::{JobSpec, RESTARTS_PER_DAY, RestartBudget};
use rustix::fs::{FlockOperation, flock};
use std::fs::File;
use std::net::ToSocketAddrs;
use std::path::PathBuf;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// An earlier agent's guard may hold the node for a moment.
const NODE_LOCK_WAIT: Duration = Duration::from_secs(5);
/// torchrun's port for the c10d rendezvous.
const DEFAULT_PORT: u16 = 29400;

#[derive(Args, Clone, Debug)]
pub struct Options {
    /// Number of nodes, N or MIN:MAX
    #[arg(long, env = "PET_NNODES", default_value = "1:1")]
    nnodes: String,
    /// Workers per node: a number, cpu, gpu or auto
    #[arg(long, env = "PET_NPROC_PER_NODE", default_value = "1")]
    nproc_per_node: String,
    /// HOST:PORT where the nodes meet; the agent on HOST starts the coordinator
    #[arg(long, env = "PET_RDZV_ENDPOINT", default_value = "")]
    rdzv_endpoint: String,
    /// Id of the job, the same on all nodes
    #[arg(long, env = "PET_RDZV_ID", default_value = "none")]
    rdzv_id: String,
    /// One node: meet on loopback
    #[arg(long, env = "PET_STANDALONE", value_parser = FalseyValueParser::new())]
    standalone: bool,
    /// Restarts of the whole job; without it, 10 a day once a step was completed
    #[arg(long, env = "PET_MAX_RESTARTS")]
    max_restarts: Option<u32>,
    /// Id of this node; without it a stable one is kept on disk
    #[arg(long, env = "PET_NODE_RANK")]
    node_rank: Option<String>,
    /// Run the script as a Python module
    #[arg(short = 'm', long, env = "PET_MODULE", value_parser = FalseyValueParser::new())]
    module: bool,
    /// Run the script as a program of its own
    #[arg(long, env = "PET_NO_PYTHON", value_parser = FalseyValueParser::new())]
    no_python: bool,
    /// Directory for logs
    #[arg(long, env = "PET_LOG_DIR")]
    log_dir: Option<PathBuf>,
    /// Streams that go to files only: 0 none, 1 out, 2 err, 3 both, or per local rank 0:3,1:1
    #[arg(short = 'r', long, env = "PET_REDIRECTS", default_value = "0")]
    redirects: String,
    /// Streams that go to files and, with a prefix, to the console
    #[arg(short = 't', long, env = "PET_TEE", default_value = "0")]
    tee: String,
    /// Role of the workers, for logs
    #[arg(long, env = "PET_ROLE", default_value = "default")]
    role: String,
    /// Host that other nodes reach this one by
    #[arg(long, env = "PET_LOCAL_ADDR")]
    local_addr: Option<String>,
    /// Seconds between TERM and KILL when the job stops
    #[arg(long, env = "PET_SHUTDOWN_TIMEOUT", default_value_t = 30)]
    shutdown_timeout: u64,
    /// Directory of the coordinator's store, on the node that --rdzv-endpoint names
    #[arg(long, env = "EVERSTEP_STORE")]
    store: Option<PathBuf>,
    /// The one knob for all timeouts, for example 2s or 500ms
    #[arg(long, env = "EVERSTEP_DETECT_TIMEOUT", default_value = "2s", value_parser = duration)]
    detect_timeout: Duration,
    /// How long a world that lacks nodes waits for them
    #[arg(long, env = "EVERSTEP_JOIN_TIMEOUT", default_value = "600s", value_parser = duration)]
    join_timeout: Duration,
    /// Allow addresses other than loopback without TLS; needs --token-file
    #[arg(long, env = "EVERSTEP_INSECURE", value_parser = FalseyValueParser::new())]
    insecure: bool,
    /// File with the coordinator's token (mode 0600)
    #[arg(long, env = "EVERSTEP_TOKEN_FILE")]
    token_file: Option<PathBuf>,
    /// Name of the job; a job started again under its name finds its memory checkpoints
    #[arg(long, env = "EVERSTEP_NAME")]
    name: Option<String>,
    /// The script and its arguments
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "SCRIPT")]
    script: Vec<String>,
}

/// True for options that are followed by their value.
pub fn takes_value(option: &str) -> bool {
    !matches!(
        option,
        "--standalone"
            | "-m"
            | "--module"
            | "--no-python"
            | "--insecure"
            | "-h"
            | "--help"
            | "--json"
            | "--watch"
            | "--clean"
            | "--first-cause"
    )
}

fn duration(text: &str) -> Result<Duration, String> {
    let bad = || format!("{text:?} is no duration; write it like 2s or 500ms");
    let (number, scale) = if let Some(n) = text.strip_suffix("ms") {
        (n, 0.001)
    } else if let Some(n) = text.strip_suffix('s') {
        (n, 1.0)
    } else {
        (text, 1.0)
    };
    let seconds = number.parse::<f64>().map_err(|_| bad())? * scale;
    if seconds > 0.0 && seconds < 1e6 { Ok(Duration::from_secs_f64(seconds)) } else { Err(bad()) }
}

fn range(text: &str) -> Result<(u32, u32), Failure> {
    let bad = || Failure::usage(format!("--nnodes {text:?} is neither a number nor MIN:MAX, like 2 or 2:4"));
    let (min, max) = text.split_once(':').unwrap_or((text, text));
    Ok((min.parse().map_err(|_| bad())?, max.parse().map_err(|_| bad())?))
}

fn workers(text: &str) -> Result<u32, Failure> {
    let cpus = || std::thread::available_parallelism().map_or(1, |n| u32::try_from(n.get()).unwrap_or(1));
    let gpus = || {
        let named = |e: std::fs::DirEntry| e.file_name().to_str()?.strip_prefix("nvidia")?.parse::<u32>().ok();
        let count = std::fs::read_dir("/dev").into_iter().flatten().flatten().filter_map(named).count();
        u32::try_from(count).unwrap_or(0)
    };
    match text {
        "cpu" => Ok(cpus()),
        "gpu" | "auto" => match (gpus(), text) {
            (0, "gpu") => {
                Err(Failure::usage("--nproc-per-node gpu, but this machine has no GPU; give a number or cpu"))
            }
            (0, _) => Ok(cpus()),
            (n, _) => Ok(n),
        },
        number => match number.parse() {
            Ok(n) if (1..=4096).contains(&n) => Ok(n),
            _ => Err(Failure::usage(format!(
                "--nproc-per-node {number:?} is no number of workers; give 1 or more, cpu, gpu or auto"
            ))),
        },
    }
}

fn is_loopback(host: &str) -> bool {
    host == "localhost" || host.parse::<std::net::IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

/// True when `host` is an address of this machine: a socket can be bound to it.
fn is_local(host: &str) -> bool {
    let addresses = (host, 0).to_socket_addrs().into_iter().flatten();
    addresses.into_iter().any(|a| std::net::UdpSocket::bind(a).is_ok())
}

/// The address that this machine uses to reach `host`.
fn own_address(host: &str, port: u16) -> Option<String> {
    let socket = std::net::UdpSocket::bind("0.0.0.0:0").ok()?;
    socket.connect((host, port)).ok()?;
    socket.local_addr().ok().map(|a| a.ip().to_string())
}

struct Rendezvous {
    endpoint: String,
    host: String,
    may_host: bool,
    job: String,
    store: PathBuf,
}

fn rendezvous(o: &Options, nodes_max: u32) -> Result<Rendezvous, Failure> {
    let nanos = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_nanos());
    let given = Some(o.rdzv_id.as_str()).filter(|id| *id != "none" && !id.is_empty());
    let named = o.name.as_deref().or(given);
    if o.standalone || (o.rdzv_endpoint.is_empty() && nodes_max == 1) {
        if nodes_max > 1 {
            return Err(Failure::usage("--standalone runs one node; for more give --rdzv-endpoint HOST:PORT instead"));
        }
        let job = named.map_or_else(|| format!("job-{}-{}", std::process::id(), nanos % 1_000_000), str::to_owned);
        places::check_name("job name", &job).map_err(Failure::usage)?;
        let store = o.store.clone().unwrap_or_else(|| places::job(&job).join("store"));
        let (endpoint, host) = ("127.0.0.1:0".to_owned(), o.local_addr.clone().unwrap_or_else(|| "127.0.0.1".into()));
        return Ok(Rendezvous { endpoint, host, may_host: true, job, store });
    }
    if o.rdzv_endpoint.is_empty() {
        return Err(Failure::usage(format!(
            "--nnodes {} needs --rdzv-endpoint HOST:PORT, the same on all nodes",
            o.nnodes
        )));
    }
    let (host, port) = match o.rdzv_endpoint.rsplit_once(':') {
        Some((host, port)) => {
            let port = port.parse::<u16>().ok().filter(|p| *p > 0);
            (
                host.to_owned(),
                port.ok_or_else(|| {
                    Failure::usage(format!("--rdzv-endpoint {} has no port between 1 and 65535", o.rdzv_endpoint))
                })?,
            )
        }
        None => (o.rdzv_endpoint.clone(), DEFAULT_PORT),
    };
    let resolves = (host.as_str(), port).to_socket_addrs().is_ok_and(|mut a| a.next().is_some());
    if !resolves {
        return Err(Failure {
            code: 69,
            why: format!("--rdzv-endpoint {host} is not a known host; check the name, or give an address"),
        });
    }
    if !is_loopback(&host) && !o.insecure {
        return Err(Failure::config(format!(
            "{host} is not loopback and there is no TLS yet; to go on all the same, put one token on all nodes and say so:\n  install -m 600 /dev/null TOKEN && head -c 24 /dev/urandom | od -An -tx1 | tr -d ' \\n' > TOKEN\n  everstep run --insecure --token-file TOKEN …"
        )));
    }
    if !is_loopback(&host) && o.token_file.is_none() {
        return Err(Failure::config("--insecure needs --token-file, the same token in a 0600 file on all nodes"));
    }
    if o.insecure {
        eprintln!("everstep: INSECURE: the control plane on {host}:{port} is not encrypted");
    }
    let job = named.unwrap_or("none").to_owned();
    places::check_name("job name", &job).map_err(Failure::usage)?;
    let store = o.store.clone().unwrap_or_else(|| {
        places::state().join("coordinators").join(format!("{}_{port}", host.replace([':', '/'], "_")))
    });
    let own = o
        .local_addr
        .clone()
        .or_else(|| if is_loopback(&host) { Some("127.0.0.1".into()) } else { own_address(&host, port) });
    let own = own.ok_or_else(|| {
        Failure::config(format!("no route to {host}; give --local-addr, the address other nodes reach this one by"))
    })?;
    Ok(Rendezvous { endpoint: format!("{host}:{port}"), may_host: is_local(&host), host: own, job, store })
}

/// Takes the lock of a node id; held by the agent and, after it, by its guard.
fn lock_node(job: &str, node: &str, wait: Duration) -> Result<Option<File>, Failure> {
    let directory = places::job(job);
    let unusable = |e: std::io::Error| {
        Failure::config(format!(
            "cannot use {}: {e}; set EVERSTEP_STATE_DIR to a directory you can write",
            directory.display()
        ))
    };
    std::fs::create_dir_all(&directory).map_err(unusable)?;
    let file = File::create(directory.join(format!("node-{node}.lock"))).map_err(unusable)?;
    let start = Instant::now();
    while flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
        if start.elapsed() >= wait {
            return Ok(None);
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(Some(file))
}

fn node_id(o: &Options, job: &str, nodes_max: u32) -> Result<(String, File), Failure> {
    let given = o.node_rank.clone().or_else(|| std::env::var("SLURM_NODEID").ok()).filter(|n| !n.is_empty());
    let named = given.or_else(|| (nodes_max == 1).then(|| "0".to_owned()));
    if let Some(node) = named {
        places::check_name("--node-rank", &node).map_err(Failure::usage)?;
        let lock = lock_node(job, &node, NODE_LOCK_WAIT)?;
        let taken = || {
            Failure::config(format!(
                "node id {node} of job {job} is already in use on this machine; give each node its own --node-rank, or end the other agent"
            ))
        };
        return Ok((node.clone(), lock.ok_or_else(taken)?));
    }
    // Several agents may share a machine: each takes the first free id of this host.
    let host = rustix::system::uname()
        .nodename()
        .to_string_lossy()
        .replace(|c: char| !c.is_ascii_alphanumeric() && c != '-', "-");
    for i in 0..256 {
        let node = if i == 0 { host.clone() } else { format!("{host}-{i}") };
        if let Some(lock) = lock_node(job, &node, Duration::ZERO)? {
            return Ok((node, lock));
        }
    }
    Err(Failure::config("256 agents of this job run on this machine; give --node-rank"))
}

fn argv(o: &Options) -> Result<Vec<String>, Failure> {
    let script = o.script.first().ok_or_else(|| Failure::usage("no script to run"))?;
    if o.module && o.no_python {
        return Err(Failure::usage("-m and --no-python cannot be used together"));
    }
    let python = std::env::var("PYTHON_EXEC").ok().filter(|p| !p.is_empty()).unwrap_or_else(|| {
        let in_environment = std::env::var("VIRTUAL_ENV").ok().map(|v| format!("{v}/bin/python"));
        let beside = std::env::current_exe().ok().and_then(|e| Some(e.parent()?.join("python").display().to_string()));
        let found = |p: &String| std::path::Path::new(p).is_file();
        in_environment.filter(found).or(beside.filter(found)).unwrap_or_else(|| "python3".into())
    });
    let mut argv = match (o.no_python, o.module) {
        (true, _) => Vec::new(),
        (false, true) => vec![python, "-u".into(), "-m".into()],
        (false, false) => {
            if !std::path::Path::new(script).is_file() {
                return Err(Failure::usage(format!(
                    "script {script} does not exist; check the path, or use -m for a module"
                )));
            }
            vec![python, "-u".into()]
        }
    };
    argv.extend(o.script.iter().cloned());
    Ok(argv)
}

/// Runs an agent; the exit code is the job's.
pub fn run(o: &Options) -> Result<i32, Failure> {
    let (nodes_min, nodes_max) = range(&o.nnodes)?;
    let restarts = o.max_restarts.map_or(RestartBudget::PerDayAfterFirstStep(RESTARTS_PER_DAY), RestartBudget::Exactly);
    let mut spec = JobSpec {
        job: JobId(String::new()),
        nodes_min,
        nodes_max,
        node_unit: 1,
        restarts,
        detect_timeout_ms: u64::try_from(o.detect_timeout.as_millis()).unwrap_or(u64::MAX),
        join_timeout_ms: u64::try_from(o.join_timeout.as_millis()).unwrap_or(u64::MAX),
    };
    spec.validate().map_err(|e| Failure::usage(e.to_string()))?;
    let workers = workers(&o.nproc_per_node)?;
    let (redirects, tee) = (
        Std::parse("--redirects", &o.redirects).map_err(Failure::usage)?,
        Std::parse("--tee", &o.tee).map_err(Failure::usage)?,
    );
    let argv = argv(o)?;
    let meet = rendezvous(o, nodes_max)?;
    spec.job = JobId(meet.job.clone());
    let (node, lock) = node_id(o, &meet.job, nodes_max)?;
    let nanos = SystemTime::now().duration_since(UNIX_EPOCH).map_or(1, |d| u64::try_from(d.as_nanos()).unwrap_or(1));
    let run_id = if o.rdzv_id == "none" { meet.job.clone() } else { o.rdzv_id.clone() };
    let logs = o
        .log_dir
        .clone()
        .unwrap_or_else(|| places::job(&meet.job).join("logs"))
        .join(format!("{run_id}_{:08x}", nanos as u32));
    std::fs::create_dir_all(&logs).map_err(|e| {
        Failure::config(format!("cannot write logs to {}: {e}; give another --log-dir", logs.display()))
    })?;
    let memory = places::node_memory(&meet.job, &node);
    std::fs::create_dir_all(&memory).map_err(|e| {
        Failure::config(format!(
            "cannot use {}: {e}; set EVERSTEP_SHM_DIR to a directory you can write",
            memory.display()
        ))
    })?;
    let about = serde_json::json!({"job": meet.job, "node": node, "pid": std::process::id(), "logs": logs, "store": meet.store, "endpoint": meet.endpoint, "memory": memory, "token_file": o.token_file});
    let _ =
        places::write_whole(&places::job(&meet.job).join(format!("node-{node}.json")), about.to_string().as_bytes());
    let short = everstep_checkpoint::arena::job_hash(&format!("{}/{node}", meet.job));
    let template = Template {
        argv,
        run_id,
        job: meet.job.clone(),
        node: node.clone(),
        logs: logs.clone(),
        redirects,
        tee,
        role: o.role.clone(),
        socket: places::memory().join(format!("{:08x}.sock", short as u32)),
        memory,
    };
    let target = Target {
        endpoint: meet.endpoint,
        store: meet.store,
        token_file: o.token_file.clone(),
        may_host: meet.may_host,
        silence: spec.ladder().silence,
    };
    let config = Config {
        node: NodeId(node),
        incarnation: Incarnation(nanos),
        spec,
        host: meet.host,
        workers,
        store_port: 0,
        named: o.name.is_some() || o.rdzv_id != "none",
        shutdown_grace: Duration::from_secs(o.shutdown_timeout),
    };
    if target.may_host {
        let store = &target.store;
        std::fs::create_dir_all(store).map_err(|e| {
            Failure::config(format!("cannot use the store {}: {e}; give another --store", store.display()))
        })?;
    }
    let end = runtime()?.block_on(crate::agent::run(config, template, target, &lock));
    let end = end.map_err(|e| Failure { code: 1, why: format!("cannot run an agent here: {e}") })?;
    if end.code != 0 {
        eprintln!("everstep: {}", end.why);
        eprintln!(
            "everstep: job {} ended with exit code {}; logs in {}; see: everstep logs {} --first-cause",
            meet.job,
            end.code,
            logs.display(),
            meet.job
        );
    }
    Ok(end.code)
}
