//! Every option of `everstep run`: torchrun's (torch 2.15, `torch/distributed/run.py`), then ours.

use crate::failure::Failure;
use clap::Args;
use clap::builder::FalseyValueParser;
use everstep_core::spec::{CheckWhen, Policy};
use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

#[derive(Args, Clone, Debug)]
pub struct RunOptions {
    /// Number of nodes, N or MIN:MAX
    #[arg(long, env = "PET_NNODES", default_value = "1:1")]
    pub nnodes: String,
    /// Workers per node: a number, cpu, gpu or auto
    #[arg(long, env = "PET_NPROC_PER_NODE", default_value = "1")]
    pub nproc_per_node: String,
    /// How nodes meet: static (--master-addr, --master-port), c10d or everstep (--rdzv-endpoint)
    #[arg(long, env = "PET_RDZV_BACKEND")]
    pub rdzv_backend: Option<String>,
    /// HOST:PORT where the nodes meet; the agent on HOST starts the coordinator
    #[arg(long, env = "PET_RDZV_ENDPOINT", default_value = "", hide_default_value = true)]
    pub rdzv_endpoint: String,
    /// Id of the job, the same on all nodes
    #[arg(long, env = "PET_RDZV_ID", default_value = "none")]
    pub rdzv_id: String,
    /// Rendezvous settings, key=value,…: join_timeout (seconds) and is_host are used; other
    /// timeouts follow --detect-timeout
    #[arg(long, env = "PET_RDZV_CONF", default_value = "", hide_default_value = true)]
    pub rdzv_conf: String,
    /// Run on one node, with a rendezvous on loopback
    #[arg(long, env = "PET_STANDALONE", value_parser = FalseyValueParser::new())]
    pub standalone: bool,
    /// Maximum number of restarts of the whole job [default: 10 per day, once a step has completed]
    #[arg(long, env = "PET_MAX_RESTARTS")]
    pub max_restarts: Option<u32>,
    /// Accepted for compatibility with torchrun and ignored: nothing is polled
    #[arg(long, env = "PET_MONITOR_INTERVAL", default_value_t = 0.1)]
    pub monitor_interval: f64,
    /// Accepted for compatibility with torchrun and ignored: workers are separate processes
    #[arg(long, env = "PET_START_METHOD", default_value = "spawn", value_parser = ["spawn", "fork", "forkserver"])]
    pub start_method: String,
    /// Accepted for compatibility with torchrun and ignored: see everstep status and events.jsonl
    #[arg(long, env = "PET_EVENT_LOG_HANDLER", default_value = "null")]
    pub event_log_handler: String,
    /// Role of the workers: the prefix of their log lines, and ROLE_NAME
    #[arg(long, env = "PET_ROLE", default_value = "default")]
    pub role: String,
    /// Run the script as a Python module
    #[arg(short = 'm', long, env = "PET_MODULE", value_parser = FalseyValueParser::new())]
    pub module: bool,
    /// Run the script as a program, without Python
    #[arg(long, env = "PET_NO_PYTHON", value_parser = FalseyValueParser::new())]
    pub no_python: bool,
    /// Run the script with runpy.run_path and record its exceptions in the error file
    #[arg(long, env = "PET_RUN_PATH", value_parser = FalseyValueParser::new())]
    pub run_path: bool,
    /// Directory for logs
    #[arg(long, env = "PET_LOG_DIR")]
    pub log_dir: Option<PathBuf>,
    /// Streams to write to files only: 0 none, 1 stdout, 2 stderr, 3 both; or per local rank,
    /// 0:3,1:1
    #[arg(short = 'r', long, env = "PET_REDIRECTS", default_value = "0")]
    pub redirects: String,
    /// Streams to write to files and, with a prefix, to the console: values as for --redirects
    #[arg(short = 't', long, env = "PET_TEE", default_value = "0")]
    pub tee: String,
    /// Prefix of teed lines; ${role_name}, ${rank}, ${local_rank} and ${hostname} are replaced
    #[arg(long, env = "PET_LOG_LINE_PREFIX_TEMPLATE", default_value = "", hide_default_value = true)]
    pub log_line_prefix_template: String,
    /// Show only these local ranks on the console, for example 0,1
    #[arg(long, env = "PET_LOCAL_RANKS_FILTER", default_value = "", hide_default_value = true)]
    pub local_ranks_filter: String,
    /// Also write teed stdout lines that contain one of these strings to filtered_stdout.log (a,b;
    /// write ,, for a comma)
    #[arg(long, env = "PET_DUPLICATE_STDOUT_FILTERS", default_value = "", hide_default_value = true)]
    pub duplicate_stdout_filters: String,
    /// Also write teed stderr lines that contain one of these strings to filtered_stderr.log
    #[arg(long, env = "PET_DUPLICATE_STDERR_FILTERS", default_value = "", hide_default_value = true)]
    pub duplicate_stderr_filters: String,
    /// Id of this node; with --rdzv-backend static, its rank [default: SLURM_NODEID, else the host
    /// name; 0 if static or a single node]
    #[arg(long, env = "PET_NODE_RANK")]
    pub node_rank: Option<String>,
    /// Address of node 0 (--rdzv-backend static) [default: 127.0.0.1]
    #[arg(long, env = "PET_MASTER_ADDR")]
    pub master_addr: Option<String>,
    /// Port of the process-group store on node 0 (--rdzv-backend static) [default: 29500; any free
    /// port for a single node]
    #[arg(long, env = "PET_MASTER_PORT")]
    pub master_port: Option<u16>,
    /// Host or address at which other nodes reach this one
    #[arg(long, env = "PET_LOCAL_ADDR")]
    pub local_addr: Option<String>,
    /// Log plug-in: only default works here; others need torchrun --rdzv-backend everstep
    #[arg(long)]
    pub logs_specs: Option<String>,
    /// Bind each worker to the processors near its accelerator
    #[arg(long, value_parser = ["node", "socket", "exclusive", "core-complex"])]
    pub numa_binding: Option<String>,
    /// Signals that stop the whole job; SIGUSR1, SIGUSR2 and SIGCONT are passed on to the workers
    /// unless listed
    #[arg(long, env = "PET_SIGNALS_TO_HANDLE", default_value = "SIGTERM,SIGINT,SIGHUP,SIGQUIT")]
    pub signals_to_handle: String,
    /// Seconds from SIGTERM to SIGKILL when the job stops [default: TORCH_ELASTIC_SHUTDOWN_TIMEOUT,
    /// else 30]
    #[arg(long, env = "PET_SHUTDOWN_TIMEOUT", value_parser = whole_seconds)]
    pub shutdown_timeout: Option<u64>,
    /// Show each worker its own accelerator as device 0, with LOCAL_RANK=0
    #[arg(long, env = "PET_VIRTUAL_LOCAL_RANK", value_parser = FalseyValueParser::new())]
    pub virtual_local_rank: bool,
    /// Print a completion script for this shell and exit
    #[arg(long, value_parser = ["bash", "zsh", "fish", "tcsh"], exclusive = true)]
    pub print_completion: Option<String>,

    /// Use only multiples of this number of nodes
    #[arg(long, env = "EVERSTEP_NODE_UNIT", default_value_t = 1)]
    pub node_unit: u32,
    /// Number of nodes beyond MAX to keep ready, with torch imported
    #[arg(long, env = "EVERSTEP_SPARES", default_value_t = 0)]
    pub spares: u32,

    /// Failure domain of this node, such as its rack or switch; copies go to nodes in other domains
    #[arg(long, env = "EVERSTEP_FAILURE_DOMAIN", value_name = "NAME")]
    pub failure_domain: Option<String>,
    /// Your own error classes and patterns, checked before the built-in ones (TOML; see everstep
    /// classify --table)
    #[arg(long, env = "EVERSTEP_FAILURE_TABLE", value_name = "FILE")]
    pub failure_table: Option<PathBuf>,
    /// Where to report incidents: webhooks, Slack, PagerDuty, DingTalk and others (TOML; test it
    /// with everstep notify)
    #[arg(long, env = "EVERSTEP_NOTIFY", value_name = "FILE")]
    pub notify: Option<PathBuf>,
    /// Format of everstep's own messages: text, or one JSON object per line
    #[arg(long, env = "EVERSTEP_LOG_FORMAT", default_value = "text", value_parser = ["text", "json"])]
    pub log_format: String,
    /// Kernel log to watch for GPU errors and processes killed for lack of memory; a regular file
    /// is followed, "off" disables it
    #[arg(long, env = "EVERSTEP_KERNEL_LOG", value_name = "FILE", default_value = crate::agent::kernel_log::DEVICE)]
    pub kernel_log: PathBuf,
    /// NVIDIA management library to load, if present, for GPU memory errors, links, temperatures
    /// and Xids; "off" disables it
    #[arg(long, env = "EVERSTEP_NVML", value_name = "FILE", default_value = crate::agent::counters::nvml::LIBRARY)]
    pub nvml: PathBuf,
    /// Directory of the coordinator's store, on the node named by --rdzv-endpoint
    #[arg(long, env = "EVERSTEP_STORE")]
    pub store: Option<PathBuf>,
    /// Time to detect a failure, from which all timeouts follow, for example 2s or 500ms
    #[arg(long, env = "EVERSTEP_DETECT_TIMEOUT", default_value = "2s", value_parser = duration)]
    pub detect_timeout: Duration,
    /// How long to wait for missing nodes [default: 600s; 90s for an unnamed job on one node, which
    /// no other node can join]
    #[arg(long, env = "EVERSTEP_JOIN_TIMEOUT", value_parser = duration)]
    pub join_timeout: Option<Duration>,
    /// Allow addresses other than loopback without TLS; requires --token-file
    #[arg(long, env = "EVERSTEP_INSECURE", value_parser = FalseyValueParser::new())]
    pub insecure: bool,
    /// File with the coordinator's token (mode 0600)
    #[arg(long, env = "EVERSTEP_TOKEN_FILE")]
    pub token_file: Option<PathBuf>,
    /// Name of the job; a job restarted under the same name resumes from its checkpoints in memory
    #[arg(long, env = "EVERSTEP_NAME")]
    pub name: Option<String>,
    /// How far everstep may go with a bad or missing machine: observe only reports it, advise waits
    /// for everstep approve, act cordons or requests machines without asking (requires
    /// --provisioner)
    #[arg(long, env = "EVERSTEP_POLICY", default_value = "observe", value_parser = ["observe", "advise", "act"])]
    pub policy: String,
    /// Program that carries out requests about machines, each one JSON on standard input; used only
    /// on the node named by --rdzv-endpoint
    #[arg(long, env = "EVERSTEP_PROVISIONER", value_name = "PROGRAM")]
    pub provisioner: Option<PathBuf>,
    /// Settings of the detector of machines that behave unlike their peers (TOML;
    /// docs/guide/detector.md); read only on the node named by --rdzv-endpoint
    #[arg(long, env = "EVERSTEP_DETECTOR", value_name = "FILE")]
    pub detector: Option<PathBuf>,
    /// The cluster, as for everstep plan: jobs with the same --rdzv-endpoint share its nodes
    /// (TOML); read only on the node named by --rdzv-endpoint
    #[arg(long, env = "EVERSTEP_CLUSTER", value_name = "FILE", requires = "jobs")]
    pub cluster: Option<PathBuf>,
    /// The jobs for --cluster: their weights, and what each achieves on different numbers of nodes;
    /// ids are the jobs' --name (TOML)
    #[arg(long, env = "EVERSTEP_JOBS", value_name = "FILE", requires = "cluster")]
    pub jobs: Option<PathBuf>,
    /// Check the nodes before the first start, one by one and in pairs, and exclude bad ones
    #[arg(long, env = "EVERSTEP_CHECK", value_parser = FalseyValueParser::new())]
    pub check: bool,
    /// Never check the nodes, not even after unexplained failures
    #[arg(long, env = "EVERSTEP_NO_CHECK", value_parser = FalseyValueParser::new(), conflicts_with = "check")]
    pub no_check: bool,
    /// Whether to check the nodes and start no workers (`everstep check`).
    #[arg(skip)]
    pub only_check: bool,
    /// Exit codes: everstep's own, or torchrun's 0 and 1
    #[arg(long, env = "EVERSTEP_EXIT_CODES", default_value = "everstep", value_parser = ["everstep", "torchrun"])]
    pub exit_codes: String,
    /// Do not watch scripts that do not import everstep
    #[arg(long, env = "EVERSTEP_NO_PRELOAD", value_parser = FalseyValueParser::new())]
    pub no_preload: bool,
    /// Do not keep a process with torch imported for restarts
    #[arg(long, env = "EVERSTEP_NO_WARM", value_parser = FalseyValueParser::new())]
    pub no_warm: bool,
    /// Script to run, and its arguments
    #[arg(
        required_unless_present = "print_completion",
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "SCRIPT"
    )]
    pub script: Vec<OsString>,
}

impl RunOptions {
    /// Returns how far everstep goes with remedies for machines.
    pub fn policy(&self) -> Policy {
        match self.policy.as_str() {
            "act" => Policy::Act,
            "advise" => Policy::Advise,
            _ => Policy::Observe,
        }
    }

    /// Returns when the nodes are checked.
    pub fn check_when(&self) -> CheckWhen {
        match (self.only_check, self.check, self.no_check) {
            (true, ..) => CheckWhen::Only,
            (_, true, _) => CheckWhen::First,
            (_, _, true) => CheckWhen::Never,
            _ => CheckWhen::OnTrouble,
        }
    }
}

/// Parses a length of time of at most twelve days.
pub fn duration(text: &str) -> Result<Duration, String> {
    crate::cli::duration::parse(text, Duration::from_hours(288))
}

/// Parses a time in whole seconds, as torchrun has it.
fn whole_seconds(text: &str) -> Result<u64, String> {
    text.parse().map_err(|_| format!("{text:?} is not a whole number of seconds; write it like 30"))
}

impl RunOptions {
    /// Returns `--nnodes` as (MIN, MAX).
    pub fn nodes(&self) -> Result<(u32, u32), Failure> {
        let bad =
            || Failure::usage(format!("--nnodes {:?} is neither a number nor MIN:MAX, like 2 or 2:4", self.nnodes));
        let (min, max) = self.nnodes.split_once(':').unwrap_or((&self.nnodes, &self.nnodes));
        Ok((min.parse().map_err(|_| bad())?, max.parse().map_err(|_| bad())?))
    }

    /// Returns the name under which the job can be found again, if it has one.
    pub fn job_name(&self) -> Option<String> {
        // An id may be any text, but a job's name becomes part of paths.
        let plain = |c: char| if c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-') { c } else { '-' };
        let given = !self.standalone && self.rdzv_id != "none" && !self.rdzv_id.is_empty();
        let id = || self.rdzv_id.chars().map(plain).take(63).collect::<String>().trim_start_matches('.').to_owned();
        self.name.clone().or_else(|| given.then(id))
    }

    /// Returns `--rdzv-conf` as pairs.
    pub fn conf(&self) -> Result<Vec<(&str, &str)>, Failure> {
        let parts = self.rdzv_conf.split(',').map(str::trim).filter(|p| !p.is_empty());
        let pair = |p| {
            let bad = || Failure::usage(format!("--rdzv-conf {:?} is not a list of key=value", self.rdzv_conf));
            str::split_once(p, '=')
                .map(|(k, v)| (k.trim(), v.trim()))
                .filter(|(k, v)| !k.is_empty() && !v.is_empty())
                .ok_or_else(bad)
        };
        parts.map(pair).collect()
    }

    /// Returns how long a world waits for missing nodes; `None` if the user did not set it.
    pub fn join_timeout(&self) -> Result<Option<Duration>, Failure> {
        let conf = self.conf()?;
        let Some((_, value)) = conf.iter().find(|(k, _)| *k == "join_timeout") else { return Ok(self.join_timeout) };
        let seconds = value.parse::<f64>().ok().filter(|s| *s > 0.0 && *s < 1e6);
        let bad = || Failure::usage(format!("--rdzv-conf join_timeout={value} is not a number of seconds"));
        Ok(Some(self.join_timeout.unwrap_or(Duration::from_secs_f64(seconds.ok_or_else(bad)?))))
    }

    /// Returns `--local-ranks-filter` as a list; an empty one means all ranks.
    pub fn console_ranks(&self) -> Result<Vec<u32>, Failure> {
        if self.local_ranks_filter.is_empty() {
            return Ok(Vec::new());
        }
        let bad = |_| {
            Failure::usage(format!(
                "--local-ranks-filter {:?} is not a list of numbers like 0,1,2",
                self.local_ranks_filter
            ))
        };
        self.local_ranks_filter.split(',').map(|r| r.trim().parse().map_err(bad)).collect()
    }

    /// Returns `--signals-to-handle` as numbers.
    pub fn stop_signals(&self) -> Result<Vec<i32>, Failure> {
        let names = self.signals_to_handle.split(',').map(str::trim).filter(|s| !s.is_empty());
        let number = |name: &str| {
            let known = [("HUP", 1), ("INT", 2), ("QUIT", 3), ("USR1", 10), ("USR2", 12), ("TERM", 15), ("CONT", 18)];
            let short = name.strip_prefix("SIG").unwrap_or(name);
            known.iter().find(|(n, _)| *n == short).map(|(_, number)| *number).ok_or_else(|| {
                Failure::usage(format!(
                    "--signals-to-handle: {name} cannot be handled; use SIGTERM, SIGINT, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2 or SIGCONT"
                ))
            })
        };
        names.map(number).collect()
    }
}

/// Returns the number of workers that `--nproc-per-node` asks for.
///
/// # Errors
/// Fails if the text is neither a number nor a known word, or names a device that this machine
/// lacks.
pub fn workers(text: &str) -> Result<u32, Failure> {
    let cpus = || rustix::thread::sched_getaffinity(None).map_or(1, |set| set.count());
    let gpus = || {
        let named = |e: std::fs::DirEntry| e.file_name().to_str()?.strip_prefix("nvidia")?.parse::<u32>().ok();
        let count = std::fs::read_dir("/dev").into_iter().flatten().flatten().filter_map(named).count();
        match std::env::var("CUDA_VISIBLE_DEVICES") {
            Ok(list) if count > 0 => list.split(',').filter(|d| !d.trim().is_empty()).count().min(count),
            _ => count,
        }
    };
    let gpus = || u32::try_from(gpus()).unwrap_or(0);
    match text {
        "cpu" => Ok(cpus()),
        "gpu" | "auto" => match (gpus(), text) {
            (0, "gpu") => {
                Err(Failure::usage("--nproc-per-node gpu, but this machine has no GPU; give a number or cpu"))
            }
            (0, _) => Ok(cpus()),
            (n, _) => Ok(n),
        },
        "xpu" => Err(Failure::usage("--nproc-per-node xpu, but this machine has no XPU; give a number or cpu")),
        number => match number.parse() {
            Ok(n) if (1..=4096).contains(&n) => Ok(n),
            _ => Err(Failure::usage(format!(
                "--nproc-per-node {number:?} is not a number of workers; give 1 or more, cpu, gpu or auto"
            ))),
        },
    }
}

/// Splits a list at commas, where `,,` stands for a literal comma.
pub fn comma_list(text: &str) -> Vec<String> {
    let escaped = text.replace(",,", "\u{0}");
    let parts = escaped.split(',').map(|p| p.replace('\u{0}', ","));
    parts.filter(|p| !p.is_empty()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn filters_may_contain_commas() {
        assert_eq!(comma_list("a,b,,c,d"), ["a", "b,c", "d"]);
        assert!(comma_list("").is_empty());
    }
}
