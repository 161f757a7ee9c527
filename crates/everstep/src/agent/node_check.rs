//! This node's part in a node check. A Python process does the work and lives as long as the check,
//! so that torch is imported only once and a bad device harms that process instead of the agent.

use super::launch::Environment;
use super::{Driver, Input};
use everstep_core::agent::event::Event;
use everstep_core::message::{Check, Checked, Partner};
use everstep_core::node_check::Speed;
use serde::{Deserialize, Serialize};
use std::ffi::{OsStr, OsString};
use std::process::Stdio;
use std::time::Duration;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
use tokio::sync::mpsc;

/// How long a node waits for its partner, in the first round and later. In the first round, the
/// partner imports torch.
const WAIT: (Duration, Duration) = (Duration::from_mins(1), Duration::from_secs(15));
/// How long a part may take: after this, it never ends.
const PART: Duration = Duration::from_secs(140);

/// A part of a check, as the process reads it (see `python/everstep/node_check.py`).
#[derive(Serialize)]
struct Question<'a> {
    /// Whether the node's own speed is measured.
    measure: bool,
    tests: Vec<Test<'a>>,
    /// How long to wait for each partner, in seconds.
    wait: u64,
}

/// A test of a pair.
#[derive(Serialize)]
struct Test<'a> {
    /// Whether this node is the first of the pair.
    first: bool,
    /// Where the pair meets.
    host: &'a str,
    /// The same on both nodes.
    name: String,
    port: u16,
}

/// The process's answer (see `python/everstep/node_check.py`).
#[derive(Deserialize)]
struct Answer {
    speed: Option<Measured>,
    pairs: Vec<Option<u64>>,
    cannot: Option<String>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Measured {
    Speed(Speed),
    Failed { error: String },
}

/// The Python process that does the work.
struct Helper {
    _child: Child,
    to: ChildStdin,
    from: Lines<BufReader<ChildStdout>>,
}

impl Helper {
    fn start(python: &OsStr, env: &Environment) -> std::io::Result<Self> {
        let mut command = Command::new(python);
        command.args(crate::interpreter::module("node_check")).env_clear().envs(env).kill_on_drop(true);
        crate::descriptors::restore(command.as_std_mut());
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn()?;
        let (to, from) = child.stdin.take().zip(child.stdout.take()).ok_or_else(|| std::io::Error::other("no pipe"))?;
        Ok(Helper { _child: child, to, from: BufReader::new(from).lines() })
    }

    async fn ask(&mut self, question: &Question<'_>) -> Option<Answer> {
        let line = serde_json::to_string(question).ok()? + "\n";
        self.to.write_all(line.as_bytes()).await.ok()?;
        let answer = tokio::time::timeout(PART, self.from.next_line()).await.ok()?.ok()??;
        serde_json::from_str(&answer).ok()
    }
}

/// Starts a task that does the parts sent to it, one after another.
fn start(
    node: String,
    python: OsString,
    env: Environment,
    inbox: mpsc::UnboundedSender<Input>,
) -> mpsc::UnboundedSender<Check> {
    let (parts, mut asked) = mpsc::unbounded_channel();
    tokio::spawn(async move {
        let mut helper = None;
        while let Some(part) = asked.recv().await {
            if helper.is_none() {
                helper = Helper::start(&python, &env).ok();
            }
            let answer = match &mut helper {
                Some(helper) => Some(helper.ask(&question(&node, &part)).await),
                None => None,
            };
            if !matches!(answer, Some(Some(_))) {
                helper = None;
            }
            let _ = inbox.send(Input::Core(Event::Checked(checked(part, answer, &python.to_string_lossy()))));
        }
    });
    parts
}

impl Driver {
    pub(super) fn check(&mut self, part: Check) {
        // Both nodes of a pair meet in the store of one of them.
        self.store.open();
        let template = &self.template;
        let checker = self.checker.get_or_insert_with(|| {
            start(template.node.clone(), template.python.clone(), template.common_environment(), self.inbox.clone())
        });
        let _ = checker.send(part);
    }
}

fn question<'a>(node: &str, part: &'a Check) -> Question<'a> {
    let test = |p: &'a Partner| {
        let (a, b) = if p.first { (node, p.node.0.as_str()) } else { (p.node.0.as_str(), node) };
        let name = format!("{}/{}/{a}+{b}", part.check.0, part.round);
        Test { first: p.first, host: &p.host, name, port: p.port }
    };
    let wait = if part.round == 1 { WAIT.0 } else { WAIT.1 };
    let tests = part.partners.iter().map(test).collect();
    Question { measure: part.measure, tests, wait: wait.as_secs() }
}

/// Converts the process's answer: `None` if it did not start, `Some(None)` if it did not answer.
fn checked(part: Check, answer: Option<Option<Answer>>, python: &str) -> Checked {
    let Check { check, round, measure, partners } = part;
    let base = Checked { check, round, ..Checked::default() };
    let failed = || partners.iter().map(|p| (p.node.clone(), None)).collect();
    match answer {
        None => Checked { cannot: Some(format!("{python} cannot be started")), ..base },
        Some(None) => {
            let speed = measure.then(|| Err("the process that checks it ended".into()));
            Checked { speed, pairs: failed(), ..base }
        }
        Some(Some(answer)) => {
            let speed = answer.speed.map(|s| match s {
                Measured::Speed(speed) => Ok(speed),
                Measured::Failed { error } => Err(error),
            });
            let pairs = partners.iter().map(|p| p.node.clone()).zip(answer.pairs).collect();
            Checked { speed, pairs, cannot: answer.cannot, ..base }
        }
    }
}
