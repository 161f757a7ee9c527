//! The file in a job's directory that records one of its agents, for commands on the same machine.

use crate::paths;
use everstep_wire::raw::Raw;
use serde::{Deserialize, Serialize};
use std::io;
use std::path::{Path, PathBuf};

/// Where an agent keeps things, and how it reaches its coordinator. Other versions may have written
/// a file, so any field may be missing.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct AgentFile {
    /// Host and port of the coordinator. Port 0 stands for one that this agent starts itself.
    pub endpoint: Option<String>,
    /// Name of the job.
    pub job: Option<String>,
    /// Directory of the worker logs that everstep keeps for itself.
    pub kept: Option<Raw>,
    /// Directory of the worker logs that the user asked for.
    pub logs: Option<Raw>,
    /// Directory of the boards and arenas in shared memory.
    pub memory: Option<Raw>,
    /// Name of the node.
    pub node: Option<String>,
    /// Process id of the agent.
    pub pid: Option<u32>,
    /// Directory of the coordinator's store.
    pub store: Option<Raw>,
    /// File with the token that the user named.
    pub token_file: Option<Raw>,
}

impl AgentFile {
    /// Returns the path of a node's file in the directory of its job.
    pub fn path(job: &str, node: &str) -> PathBuf {
        paths::job(job).join(format!("node-{node}.json"))
    }

    /// Reads a file. Returns `None` if it does not exist or this version cannot read it.
    pub fn read(path: &Path) -> Option<Self> {
        serde_json::from_slice(&std::fs::read(path).ok()?).ok()
    }

    /// Writes the file at `path` atomically.
    ///
    /// # Errors
    /// Fails if the file cannot be written.
    pub fn write(&self, path: &Path) -> io::Result<()> {
        paths::write_whole(path, &serde_json::to_vec(self)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_other_versions_are_read() {
        let older = r#"{"job": "a", "node": "0", "logs": [47, 255], "token_file": null, "unknown": {}}"#;
        let read: AgentFile = serde_json::from_str(older).unwrap();
        assert_eq!((read.node.as_deref(), read.kept, read.token_file), (Some("0"), None, None));
        assert!(read.logs.is_some_and(|logs| logs.0.to_str().is_none()));
    }

    #[test]
    fn no_field_is_left_out() {
        let written = serde_json::to_value(AgentFile { pid: Some(7), ..AgentFile::default() }).unwrap();
        let fields: Vec<&String> = written.as_object().unwrap().keys().collect();
        assert_eq!(fields, ["endpoint", "job", "kept", "logs", "memory", "node", "pid", "store", "token_file"]);
        assert!(written["endpoint"].is_null() && written["pid"] == 7);
    }
}
