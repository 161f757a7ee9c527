//! Where the output of workers goes: log files and the console, according to torchrun's options.

use super::macros::substitute;
use crate::guard::protocol::Output;
use everstep_wire::private::{Directory, Root};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Name of the file with the stacks of a hung worker.
pub const STACKS_FILE: &str = "stacks.txt";

/// A choice of streams per local rank, as in `-r` and `-t`: 0 none, 1 out, 2 err, 3 both.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Std {
    all: u8,
    ranks: BTreeMap<u32, u8>,
}

/// An option that chooses no streams.
#[derive(Debug, thiserror::Error)]
#[error("{option} {text:?} is neither 0, 1, 2, 3 nor a list like 0:3,1:1")]
pub struct NotStreams {
    option: String,
    text: String,
}

impl Std {
    /// Parses `3` or `0:3,1:1`.
    ///
    /// # Errors
    /// [`NotStreams`].
    pub fn parse(option: &str, text: &str) -> Result<Self, NotStreams> {
        let bad = || NotStreams { option: option.into(), text: text.into() };
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

/// What reaches the console.
#[derive(Clone, Debug, Default)]
pub struct Console {
    /// Only these local ranks; all if empty.
    pub ranks: Vec<u32>,
    /// `--log-line-prefix-template`.
    pub prefix: Option<String>,
}

/// All streams of a node's workers.
#[derive(Clone, Debug, Default)]
pub struct Streams {
    /// Directory with `attempt_K/LOCAL_RANK/` for requested streams and error files.
    pub logs: PathBuf,
    /// The same for streams that nobody requested; `everstep logs` shows them.
    pub kept: PathBuf,
    /// `--log-dir /dev/null`: everything goes to the console, and there are no error files.
    pub no_logs: bool,
    /// `-r`.
    pub redirects: Std,
    /// `-t`.
    pub tee: Std,
    /// Console options.
    pub console: Console,
    /// `--duplicate-stdout-filters`.
    pub stdout_filters: Vec<String>,
    /// `--duplicate-stderr-filters`.
    pub stderr_filters: Vec<String>,
}

/// Returns the directory of one attempt's logs.
pub fn attempt(logs: &Path, restarts: u32) -> PathBuf {
    logs.join(format!("attempt_{restarts}"))
}

/// A worker's identity, for the prefix of its lines.
pub struct Who<'a> {
    /// `--role`.
    pub role: &'a str,
    /// Global rank.
    pub rank: u32,
    /// Rank on its node.
    pub local_rank: u32,
}

impl Streams {
    /// Returns the path of a worker's error file, or an empty path if it should have none.
    pub fn error_file(&self, restarts: u32, local_rank: u32) -> PathBuf {
        if self.no_logs {
            return PathBuf::new();
        }
        attempt(&self.logs, restarts).join(local_rank.to_string()).join("error.json")
    }

    /// Returns the file to which a worker writes the stacks of its threads on request.
    pub fn stacks(&self, restarts: u32, local_rank: u32) -> PathBuf {
        attempt(&self.kept, restarts).join(local_rank.to_string()).join(STACKS_FILE)
    }

    /// Returns the prefix of a worker's teed lines.
    pub fn prefix(&self, who: &Who<'_>) -> String {
        let template = self.console.prefix.as_deref().unwrap_or("[${role_name}${local_rank}]:");
        let hostname = rustix::system::uname().nodename().to_string_lossy().into_owned();
        substitute(
            template,
            &[
                ("role_name", who.role),
                ("rank", &who.rank.to_string()),
                ("local_rank", &who.local_rank.to_string()),
                ("hostname", &hostname),
            ],
        )
    }

    /// Returns where a worker's standard output (`is_stderr` false) or standard error goes.
    pub fn output(&self, restarts: u32, local_rank: u32, is_stderr: bool) -> Output {
        let (bit, name, needles) =
            if is_stderr { (2, "stderr.log", &self.stderr_filters) } else { (1, "stdout.log", &self.stdout_filters) };
        let redirect = self.redirects.of(local_rank) & bit != 0 && !self.no_logs;
        let tee = self.tee.of(local_rank) & bit != 0 && !self.no_logs;
        let shown = self.console.ranks.is_empty() || self.console.ranks.contains(&local_rank);
        let asked = redirect || tee;
        let root = attempt(if asked { &self.logs } else { &self.kept }, restarts);
        let filtered = root.join(name.replace("std", "filtered_std"));
        Output {
            file: root.join(local_rank.to_string()).join(name).into(),
            asked,
            console: shown && (tee || !redirect),
            prefixed: tee,
            filtered: (tee && shown && !needles.is_empty()).then(|| filtered.into()),
            needles: needles.clone(),
        }
    }

    /// Creates the directories of an attempt, empty.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn prepare(&self, restarts: u32, workers: u32) -> std::io::Result<()> {
        for root in [&self.logs, &self.kept] {
            let (root, name) = (Directory::root(root, Root::Named)?, attempt(Path::new(""), restarts));
            root.remove_tree(&name)?;
            let attempt = root.make(&name)?;
            for local in 0..workers {
                attempt.make(local.to_string())?;
            }
        }
        Ok(())
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

    #[test]
    fn a_rank_that_is_filtered_out_is_kept_but_not_shown() {
        let mut streams = Streams { tee: Std::parse("-t", "1").unwrap(), ..Streams::default() };
        streams.console.ranks = vec![0];
        let (shown, hidden) = (streams.output(0, 0, false), streams.output(0, 1, false));
        assert!(shown.console && shown.prefixed && shown.asked);
        assert!(!hidden.console && hidden.asked);
        assert!(!streams.output(0, 1, true).console);
    }
}
