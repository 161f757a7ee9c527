//! Turns a place in a world into command lines and environments: everything torchrun exports, and
//! our own variables.

use super::macros::substitute_raw;
use super::numa::BindingError;
use super::streams::{Streams, Who};
use crate::guard::protocol::{Launch, LocalWorker, Warm};
use everstep_core::id::Generation;
use everstep_core::message::Start;
use everstep_wire::raw::Raw;
use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

/// Variables that are withheld from the user's programs.
pub const TOKENS: [&str; 2] = ["EVERSTEP_TOKEN_FILE", "EVERSTEP_TOKEN"];

/// A Python entry point.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Entry {
    /// A file, as in `python FILE`.
    Script,
    /// A module, as in `python -m MODULE`.
    Module,
}

/// What all workers of a node have in common.
#[derive(Clone, Debug)]
pub struct Template {
    /// Program and arguments; `${local_rank}` is replaced in the arguments.
    pub argv: Vec<OsString>,
    /// The Python interpreter.
    pub python: OsString,
    /// How a warm process can run the same program, or `None` if it must not.
    pub warm: Option<Entry>,
    /// Directory to put on Python's path, so that scripts are watched even if they do not import
    /// everstep.
    pub preload: Option<PathBuf>,
    /// Job name.
    pub job: String,
    /// Node id.
    pub node: String,
    /// Where output goes.
    pub streams: Streams,
    /// The agent's socket.
    pub socket: PathBuf,
    /// Directory of boards and arenas.
    pub memory: PathBuf,
    /// torchrun's options, as far as workers see them.
    pub torchrun: Torchrun,
    /// The pipe of torch's timers, if the user has enabled them.
    pub timer_file: Option<PathBuf>,
    /// Where to read the kernel's log.
    pub kernel_log: Option<PathBuf>,
    /// NVIDIA's management library.
    pub nvml: Option<PathBuf>,
}

/// torchrun's options that the workers' environment depends on.
#[derive(Clone, Debug)]
pub struct Torchrun {
    /// `--rdzv-id`, exported as `TORCHELASTIC_RUN_ID`.
    pub run_id: String,
    /// `--role`.
    pub role: String,
    /// `--max-restarts` was given, and `TORCHELASTIC_MAX_RESTARTS` reports it. Otherwise the
    /// variable is 0, torchrun's default.
    pub max_restarts_given: bool,
    /// `--signals-to-handle`.
    pub signals_to_handle: String,
    /// `--virtual-local-rank`.
    pub virtual_local_rank: bool,
    /// `--numa-binding`.
    pub numa_binding: Option<String>,
}

/// Variables by name, as bytes: they need not be text.
pub type Environment = BTreeMap<OsString, OsString>;

/// Converts an environment for the guard.
pub fn raw(env: Environment) -> Vec<(Raw, Raw)> {
    env.into_iter().map(|(name, value)| (Raw(name), Raw(value))).collect()
}

/// Returns the path of a worker's step board.
pub fn board_path(memory: &Path, local_rank: u32) -> PathBuf {
    memory.join(format!("local-{local_rank}-board"))
}

/// Returns the path of the profile of a worker's collectives, which its successor reads.
pub fn profile_path(memory: &Path, local_rank: u32) -> PathBuf {
    memory.join(format!("local-{local_rank}-profile"))
}

impl Template {
    /// Returns the launch of one worker.
    ///
    /// # Errors
    /// [`LaunchError`]: this worker cannot have what the options ask for.
    pub fn launch(&self, generation: Generation, start: &Start, local: u32) -> Result<Launch, LaunchError> {
        let rank = start.place.slot.first_rank.0 + local;
        let local_text = local.to_string();
        let mut argv = self.argv.iter();
        let program = argv.next().cloned().unwrap_or_default();
        let arguments = argv.map(|a| substitute_raw(a, &[("local_rank", local_text.as_str())]));
        let argv: Vec<Raw> = std::iter::once(program).chain(arguments).map(Raw).collect();
        let warm = self.warm.map(|entry| Warm {
            module: entry == Entry::Module,
            argv: argv.iter().skip(if entry == Entry::Module { 3 } else { 2 }).cloned().collect(),
        });
        let cpus = match &self.torchrun.numa_binding {
            Some(mode) => super::numa::cpus(Path::new("/"), mode, local)?,
            None => Vec::new(),
        };
        Ok(Launch {
            worker: LocalWorker { generation, local_rank: local },
            argv,
            warm,
            env: raw(self.environment(generation, start, local)?),
            cpus,
            stdout: self.streams.output(start.restarts, local, false),
            stderr: self.streams.output(start.restarts, local, true),
            prefix: self.streams.prefix(&Who { role: &self.torchrun.role, rank, local_rank: local }),
        })
    }

    /// Returns the environment that all workers share with a warm process.
    pub fn common_environment(&self) -> Environment {
        let mut env: Environment = std::env::vars_os().collect();
        for name in TOKENS {
            env.remove(OsStr::new(name));
        }
        env
    }

    /// Returns, by local rank, the variables of these launches that this process lacks or has with
    /// another value. Variables that are not text are omitted: no import reads them.
    pub fn own_variables(&self, launches: &[Launch]) -> BTreeMap<u32, BTreeMap<String, String>> {
        let common = self.common_environment();
        let own = |launch: &Launch| {
            let differs = launch.env.iter().filter(|(name, value)| common.get(&name.0) != Some(&value.0));
            differs.filter_map(|(n, v)| Some((n.0.to_str()?.to_owned(), v.0.to_str()?.to_owned()))).collect()
        };
        launches.iter().map(|launch| (launch.worker.local_rank, own(launch))).collect()
    }

    fn environment(&self, generation: Generation, start: &Start, local: u32) -> Result<Environment, LaunchError> {
        let mut env = self.common_environment();
        let (place, slot) = (&start.place, &start.place.slot);
        let rank = (slot.first_rank.0 + local).to_string();
        let max_restarts = if self.torchrun.max_restarts_given { start.max_restarts } else { 0 };
        let mut set = |name: &str, value: String| env.insert(name.into(), value.into());
        set("RANK", rank);
        set("LOCAL_RANK", if self.torchrun.virtual_local_rank { "0".into() } else { local.to_string() });
        set("WORLD_SIZE", place.world_size.to_string());
        set("LOCAL_WORLD_SIZE", slot.workers.to_string());
        set("GROUP_RANK", place.group_rank.to_string());
        set("GROUP_WORLD_SIZE", place.group_world_size.to_string());
        set("ROLE_RANK", (place.first_role_rank + local).to_string());
        set("ROLE_WORLD_SIZE", place.role_world_size.to_string());
        set("ROLE_NAME", self.torchrun.role.clone());
        set("MASTER_ADDR", place.leader_host.clone());
        set("MASTER_PORT", place.leader_port.to_string());
        set("TORCHELASTIC_RESTART_COUNT", start.restarts.to_string());
        set("TORCHELASTIC_MAX_RESTARTS", max_restarts.to_string());
        set("TORCHELASTIC_RUN_ID", self.torchrun.run_id.clone());
        set("TORCHELASTIC_USE_AGENT_STORE", "True".into());
        set("TORCHELASTIC_SIGNALS_TO_HANDLE", self.torchrun.signals_to_handle.clone());
        set("EVERSTEP_JOB", self.job.clone());
        set("EVERSTEP_NODE", self.node.clone());
        set("EVERSTEP_GENERATION", generation.0.to_string());
        set("EVERSTEP_LOCAL_RANK", local.to_string());
        let mut path = |name: &str, value: PathBuf| env.insert(name.into(), value.into());
        path("TORCHELASTIC_ERROR_FILE", self.streams.error_file(start.restarts, local));
        path("EVERSTEP_STACKS", self.streams.stacks(start.restarts, local));
        path("EVERSTEP_SOCKET", self.socket.clone());
        path("EVERSTEP_SPILL", crate::paths::node_spill(&self.job, &self.node));
        path("EVERSTEP_BOARD", board_path(&self.memory, local));
        if let Some(timer) = &self.timer_file {
            path(super::file_timer::FILE, timer.clone());
        }
        self.set_defaults(&mut env, slot.workers);
        if self.torchrun.virtual_local_rank {
            virtual_device(&mut env, local)?;
        }
        if let Some(preload) = &self.preload {
            put_on_path(&mut env, preload);
        }
        Ok(env)
    }

    /// Sets the variables that torchrun sets unless the user has.
    pub fn set_defaults(&self, env: &mut Environment, workers: u32) {
        env.entry("TORCH_NCCL_ASYNC_ERROR_HANDLING".into()).or_insert_with(|| "1".into());
        if workers > 1 {
            env.entry("OMP_NUM_THREADS".into()).or_insert_with(|| "1".into());
        }
    }
}

/// Puts the preload first on Python's path. It removes itself again (see
/// `preload/sitecustomize.py`).
fn put_on_path(env: &mut Environment, preload: &Path) {
    let mut path = preload.as_os_str().to_owned();
    if let Some(users) = env.get(OsStr::new("PYTHONPATH")).filter(|users| !users.is_empty()) {
        path.push(":");
        path.push(users);
    }
    env.insert("PYTHONPATH".into(), path);
    env.insert("EVERSTEP_PRELOAD".into(), preload.into());
}

/// Why a worker cannot have what the options ask for.
#[derive(Debug, thiserror::Error)]
pub enum LaunchError {
    #[error("local rank {local} exceeds the devices in {variable}={list}")]
    Device { local: u32, variable: &'static str, list: String },
    #[error(transparent)]
    Binding(#[from] BindingError),
}

/// `--virtual-local-rank`: the worker sees only its own device
/// (`local_elastic_agent._set_local_rank_env`).
fn virtual_device(env: &mut Environment, local: u32) -> Result<(), LaunchError> {
    let text = |name: &str| env.get(OsStr::new(name)).map(|v| v.to_string_lossy().into_owned());
    let given = |name: &str| text(name).filter(|v| !v.is_empty());
    let (source, list) = match given("HIP_VISIBLE_DEVICES") {
        Some(list) => ("HIP_VISIBLE_DEVICES", Some(list)),
        None => ("CUDA_VISIBLE_DEVICES", text("CUDA_VISIBLE_DEVICES")),
    };
    let device = match list {
        Some(list) => {
            let devices: Vec<&str> = list.split(',').map(str::trim).collect();
            let own = devices.get(local as usize).map(|d| (*d).to_owned());
            own.ok_or_else(|| LaunchError::Device { local, variable: source, list: list.clone() })?
        }
        None => local.to_string(),
    };
    if source == "HIP_VISIBLE_DEVICES" {
        env.insert("HIP_VISIBLE_DEVICES".into(), device.clone().into());
    }
    env.insert("CUDA_VISIBLE_DEVICES".into(), device.into());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_virtual_rank_sees_its_own_device() {
        let mut env = Environment::from([("CUDA_VISIBLE_DEVICES".into(), "4,7".into())]);
        virtual_device(&mut env, 1).unwrap();
        assert_eq!(env[OsStr::new("CUDA_VISIBLE_DEVICES")], "7");
        assert!(virtual_device(&mut env, 1).is_err());
    }

    #[test]
    fn the_users_python_path_is_kept_behind_ours() {
        let mut env = Environment::from([("PYTHONPATH".into(), "/a:/b".into())]);
        put_on_path(&mut env, Path::new("/p"));
        assert_eq!(env[OsStr::new("PYTHONPATH")], "/p:/a:/b");
    }
}
