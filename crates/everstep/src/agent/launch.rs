//! From a slot in a world to command lines and environments: everything torchrun exports, and ours.

use crate::guard::protocol::{Launch, Output};
use everstep_core::id::Generation;
use everstep_core::message::{Slot, World};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Where a stream of the workers goes, as `-r` and `-t` say it: 0 none, 1 out, 2 err, 3 both, per local rank.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Std {
    all: u8,
    ranks: BTreeMap<u32, u8>,
}

impl Std {
    /// Parses `3` or `0:3,1:1`.
    ///
    /// # Errors
    /// A sentence for the user.
    pub fn parse(option: &str, text: &str) -> Result<Self, String> {
        let bad = || format!("{option} {text:?} is neither 0, 1, 2, 3 nor a list like 0:3,1:1");
        let value = |t: &str| t.trim().parse::<u8>().ok().filter(|v| *v <= 3).ok_or_else(bad);
        if !text.contains(':') {
            return Ok(Std { all: value(text)?, ranks: BTreeMap::new() });
        }
        let mut ranks = BTreeMap::new();
        for part in text.split(',') {
            let (rank, to) = part.split_once(':').ok_or_else(bad)?;
            ranks.insert(rank.trim().parse().map_err(|_| bad())?, value(to)?);
        }
        Ok(Std { all: 0, ranks })
    }

    fn of(&self, local_rank: u32) -> u8 {
        self.ranks.get(&local_rank).copied().unwrap_or(self.all)
    }
}

/// What all workers of a node have in common.
#[derive(Clone, Debug)]
pub struct Template {
    /// Program and arguments; `${local_rank}` in an argument is replaced.
    pub argv: Vec<String>,
    /// `--rdzv-id`, exported as `TORCHELASTIC_RUN_ID`.
    pub run_id: String,
    /// Job name.
    pub job: String,
    /// Node id.
    pub node: String,
    /// Directory with `attempt_K/LOCAL_RANK/`.
    pub logs: PathBuf,
    /// `-r`.
    pub redirects: Std,
    /// `-t`.
    pub tee: Std,
    /// `--role`.
    pub role: String,
    /// The agent's socket.
    pub socket: PathBuf,
    /// Directory of boards and arenas.
    pub memory: PathBuf,
}

/// Directory of one worker's logs.
pub fn worker_logs(logs: &Path, restarts: u32, local_rank: u32) -> PathBuf {
    logs.join(format!("attempt_{restarts}")).join(local_rank.to_string())
}

/// The step board of a worker.
pub fn board_path(memory: &Path, local_rank: u32) -> PathBuf {
    memory.join(format!("local-{local_rank}-board"))
}

impl Template {
    /// The launch of one worker.
    pub fn launch(
        &self,
        generation: Generation,
        world: &World,
        slot: &Slot,
        restarts: u32,
        max: u32,
        local: u32,
    ) -> Launch {
        let directory = worker_logs(&self.logs, restarts, local);
        let stream = |bit: u8, name: &str| {
            let (redirect, tee) = (self.redirects.of(local) & bit != 0, self.tee.of(local) & bit != 0);
            Output {
                file: directory.join(name).display().to_string(),
                asked: redirect || tee,
                console: tee || !redirect,
                prefixed: tee,
            }
        };
        let argv = self.argv.iter().map(|a| a.replace("${local_rank}", &local.to_string())).collect();
        Launch {
            generation: generation.0,
            local_rank: local,
            argv,
            env: self.environment(generation, world, slot, restarts, max, local).into_iter().collect(),
            stdout: stream(1, "stdout.log"),
            stderr: stream(2, "stderr.log"),
            prefix: format!("[{}{local}]:", self.role),
        }
    }

    fn environment(
        &self,
        generation: Generation,
        world: &World,
        slot: &Slot,
        restarts: u32,
        max: u32,
        local: u32,
    ) -> BTreeMap<String, String> {
        let mut env: BTreeMap<String, String> = std::env::vars().collect();
        for name in ["EVERSTEP_TOKEN_FILE", "EVERSTEP_TOKEN"] {
            env.remove(name);
        }
        let leader = world.slots.first().unwrap_or(slot);
        let group = world.slots.iter().position(|s| s.node == slot.node).unwrap_or(0);
        let rank = slot.first_rank.0 + local;
        let error_file = worker_logs(&self.logs, restarts, local).join("error.json");
        let mut set = |name: &str, value: String| env.insert(name.into(), value);
        set("RANK", rank.to_string());
        set("LOCAL_RANK", local.to_string());
        set("WORLD_SIZE", world.size().to_string());
        set("LOCAL_WORLD_SIZE", slot.workers.to_string());
        set("GROUP_RANK", group.to_string());
        set("GROUP_WORLD_SIZE", world.slots.len().to_string());
        set("ROLE_RANK", rank.to_string());
        set("ROLE_WORLD_SIZE", world.size().to_string());
        set("ROLE_NAME", self.role.clone());
        set("MASTER_ADDR", leader.host.clone());
        set("MASTER_PORT", leader.store_port.to_string());
        set("TORCHELASTIC_RESTART_COUNT", restarts.to_string());
        set("TORCHELASTIC_MAX_RESTARTS", max.to_string());
        set("TORCHELASTIC_RUN_ID", self.run_id.clone());
        set("TORCHELASTIC_USE_AGENT_STORE", "True".into());
        set("TORCHELASTIC_ERROR_FILE", error_file.display().to_string());
        set("EVERSTEP_JOB", self.job.clone());
        set("EVERSTEP_NODE", self.node.clone());
        set("EVERSTEP_GENERATION", generation.0.to_string());
        set("EVERSTEP_SOCKET", self.socket.display().to_string());
        set("EVERSTEP_SPILL", crate::places::node_spill(&self.job, &self.node).display().to_string());
        set("EVERSTEP_BOARD", board_path(&self.memory, local).display().to_string());
        let default = |env: &mut BTreeMap<String, String>, name: &str, value: &str| {
            env.entry(name.into()).or_insert_with(|| value.into());
        };
        default(&mut env, "TORCH_NCCL_ASYNC_ERROR_HANDLING", "1");
        if slot.workers > 1 {
            default(&mut env, "OMP_NUM_THREADS", "1");
        }
        env
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn redirects_are_parsed_as_torchrun_does() {
        assert_eq!(Std::parse("-r", "3").unwrap().of(7), 3);
        let some = Std::parse("-r", "0:3,12:1").unwrap();
        assert_eq!((some.of(0), some.of(12), some.of(1)), (3, 1, 0));
        assert!(Std::parse("-r", "4").is_err() && Std::parse("-r", "0:x").is_err());
    }
}
