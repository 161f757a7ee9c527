//! Keeps a connection to the coordinator open, and starts a coordinator if this node may.
//!
//! Until the first connection, an error ends the agent with a message. After it, no error does:
//! whatever happens to the coordinator (it is stopped, another program takes its port, the
//! connection is reset), the workers keep training and this module keeps trying. The core decides
//! when that has lasted too long.

mod stuck;

use super::input::Input;
use crate::coordinator::EndpointFile;
use crate::paths::{MAKE_ROOM, is_full};
use everstep_core::agent::event::Event;
use everstep_core::exit_code::ExitCode;
use everstep_core::message::Order;
use everstep_wire::client::{ConnectError, attach};
use everstep_wire::envelope::ToAgent;
use everstep_wire::token::Token;
use rustix::fs::OFlags;
use std::io;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};
use tokio::sync::mpsc;

/// Shortest and longest pause between two attempts.
const RETRY: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(1));
/// A connection lost for longer than this is reported.
const WORTH_A_LINE: Duration = Duration::from_secs(2);
/// A first connection that takes longer than this is reported.
const WORTH_A_FIRST_LINE: Duration = Duration::from_secs(5);
/// A coordinator that has failed this often, over at least this time, without being reached is not
/// started again.
const MOST_FAILURES: (u32, Duration) = (10, Duration::from_secs(10));
/// How long a coordinator may take to listen before another start is tried.
const START: Duration = Duration::from_millis(1500);
/// How long another program may occupy the coordinator's port before the agent gives up.
const STRANGER: Duration = Duration::from_secs(3);
/// The same for a program that accepts connections but does not answer, as a coordinator on a busy
/// machine does.
const SILENT_STRANGER: Duration = Duration::from_secs(15);

/// How to reach the coordinator.
#[derive(Clone, Debug)]
pub struct Target {
    /// `HOST:PORT`. If the port is 0, the endpoint is read from the store's directory.
    pub endpoint: String,
    /// The store's directory.
    pub store: PathBuf,
    /// The token file, if it is not in the store's directory.
    pub token_file: Option<PathBuf>,
    /// Destinations of notifications, for a coordinator started here.
    pub notify: Option<PathBuf>,
    /// The program that provides machines, for a coordinator started here.
    pub provisioner: Option<PathBuf>,
    /// Settings of the detector, for a coordinator started here.
    pub detector: Option<PathBuf>,
    /// The descriptions of the cluster and of its jobs, if the coordinator plans for several jobs.
    pub known: Option<(PathBuf, PathBuf)>,
    /// Other machines may reach the coordinator without encryption.
    pub insecure: bool,
    /// This node may start the coordinator.
    pub may_host: bool,
    /// The connection is given up after this much silence.
    pub silence: Duration,
    /// How long to wait for the first connection.
    pub patience: Duration,
}

impl Target {
    /// Returns the address where the coordinator listens, if it is known.
    pub fn endpoint_now(&self) -> Option<String> {
        if !self.endpoint.ends_with(":0") {
            return Some(self.endpoint.clone());
        }
        EndpointFile::read(&self.store).map(|about| about.endpoint)
    }

    /// Returns the job's secret.
    ///
    /// # Errors
    /// Fails if the token file cannot be read.
    pub fn token(&self) -> std::io::Result<Token> {
        match &self.token_file {
            Some(path) => Token::read(path),
            None if self.may_host => Token::at(&self.store.join("token")),
            None => Token::read(&self.store.join("token")),
        }
    }

    /// Returns why there is no token, for the user.
    fn without_token(&self, why: &std::io::Error) -> String {
        let path = self.token_file.clone().unwrap_or_else(|| self.store.join("token"));
        if is_full(why) {
            return format!("cannot write {}: {why}; {MAKE_ROOM}", path.display());
        }
        // Other errors name the file themselves.
        let place = why.raw_os_error().map_or_else(String::new, |_| format!(" in {}", path.display()));
        format!("no token for the coordinator{place}: {why}; copy its token file here and give --token-file")
    }
}

/// The state of the attempts to connect.
struct Tries {
    /// How long to wait for the first connection.
    patience: Duration,
    /// There was a connection before.
    attached: bool,
    /// When the connection was lost, or first failed.
    since: Option<Instant>,
    /// The cause, once it has been reported.
    reported: Option<String>,
    /// Since when another program answers in the coordinator's place.
    stranger: Option<Instant>,
}

impl Tries {
    fn new(patience: Duration) -> Self {
        Tries { patience, attached: false, since: None, reported: None, stranger: None }
    }

    fn lost_for(&self) -> Duration {
        self.since.map_or(Duration::ZERO, |at| at.elapsed())
    }

    /// Waits longer and longer, so that a port that refuses connections is not hammered for hours.
    async fn pause(&self) {
        tokio::time::sleep((self.lost_for() / 20).clamp(RETRY.0, RETRY.1)).await;
    }

    fn connected(&mut self) {
        if self.reported.is_some() {
            let (what, seconds) = (if self.attached { "is back" } else { "answers" }, self.lost_for().as_secs());
            crate::say!("the coordinator {what} after {seconds} s");
        }
        *self = Tries { attached: true, ..Tries::new(self.patience) };
    }

    /// Reports a failed attempt, once there has been no connection for a while.
    fn failed(&mut self, why: impl std::fmt::Display) {
        self.since.get_or_insert_with(Instant::now);
        if self.reported.is_some() || self.lost_for() < if self.attached { WORTH_A_LINE } else { WORTH_A_FIRST_LINE } {
            return;
        }
        let why = why.to_string();
        if self.attached {
            crate::say_warning!("the coordinator does not answer ({why}); this node continues and keeps trying");
        } else {
            crate::say_warning!("no coordinator answers yet ({why}); retrying for {} s", self.patience.as_secs());
        }
        self.reported = Some(why);
    }
}

/// Forwards the coordinator's messages until the connection ends.
async fn follow(mut orders: mpsc::UnboundedReceiver<ToAgent>, silence: Duration, inbox: &mpsc::UnboundedSender<Input>) {
    while let Ok(Some(line)) = tokio::time::timeout(silence, orders.recv()).await {
        // A refused connection is useless; the next one may be accepted.
        let refused = matches!(&line, ToAgent::Order { order: Order::Refused(_), .. });
        let _ = inbox.send(Input::Line(line));
        if refused {
            return;
        }
    }
}

/// Connects again and again, for the life of the agent.
pub async fn run(target: Target, inbox: mpsc::UnboundedSender<Input>) {
    let mut host = Host::default();
    let mut stuck = stuck::Stuck::default();
    let mut tries = Tries::new(target.patience);
    let mut token: Option<Token> = None;
    loop {
        match target.token() {
            Ok(found) => token = Some(found),
            // The directory may come back; the token does not change.
            Err(_) if tries.attached => {}
            // The node that creates the token may start a moment later than this one.
            Err(e) if target.token_file.is_none() && e.kind() == std::io::ErrorKind::NotFound => {}
            Err(e) => {
                let _ = inbox.send(Input::Fatal { code: ExitCode::Refused.number(), why: target.without_token(&e) });
                return;
            }
        }
        let Some(token) = &token else {
            tries.failed(format_args!("there is no token in {}", target.store.display()));
            tokio::time::sleep(RETRY.0).await;
            continue;
        };
        let endpoint = target.endpoint_now();
        let attempt = match &endpoint {
            Some(endpoint) => Some(attach(endpoint, token).await),
            None => None,
        };
        let mut other = false;
        match attempt {
            Some(Ok((lines, orders))) => {
                tries.connected();
                host.last_endpoint = endpoint;
                host.failures = None;
                let _ = inbox.send(Input::Connected(lines));
                follow(orders, target.silence, &inbox).await;
                let _ = inbox.send(Input::Disconnected);
                tries.since = Some(Instant::now());
                tokio::time::sleep(RETRY.0).await;
                continue;
            }
            Some(Err(e @ ConnectError::Unreachable { .. })) => {
                tries.stranger = None;
                tries.failed(&e);
            }
            Some(Err(e)) => {
                other = true;
                tries.failed(&e);
                let since = *tries.stranger.get_or_insert_with(Instant::now);
                let patience = if matches!(e, ConnectError::Silent { .. }) { SILENT_STRANGER } else { STRANGER };
                if !tries.attached && since.elapsed() > patience {
                    let _ = inbox.send(Input::Fatal { code: ExitCode::Refused.number(), why: e.to_string() });
                    return;
                }
            }
            None => {
                tries.stranger = None;
                tries.failed("it has not published its address");
            }
        }
        if tries.attached && target.may_host && stuck.look(&target.store) {
            let _ = inbox.send(Input::Core(Event::CoordinatorStuck));
        }
        if target.may_host
            && (tries.attached || !other)
            && let Err(why) = host.ensure(&target, other)
        {
            let why = why.to_string();
            if !tries.attached {
                let _ = inbox.send(Input::Fatal { code: ExitCode::Refused.number(), why });
                return;
            }
            tries.failed(&why);
        }
        tries.pause().await;
    }
}

/// The coordinator that this node starts when none answers.
#[derive(Default)]
struct Host {
    process: Option<(Child, Instant)>,
    /// Length of the log when the coordinator was started.
    log_from: u64,
    /// Number of failures since a coordinator was last reached, and when they began.
    failures: Option<(u32, Instant)>,
    /// Where the coordinator was last reached: other nodes know it by that address.
    last_endpoint: Option<String>,
}

/// Why this node has no coordinator.
#[derive(Debug, thiserror::Error)]
enum HostError {
    /// With its own last words.
    #[error("{0}")]
    Refused(String),
    #[error("the coordinator could not start, and {} does not say why; {MAKE_ROOM}", log.display())]
    Silent { log: PathBuf },
    #[error("the coordinator has failed each of the {count} times it was started ({status}){said}; its log is {}", log.display())]
    Failed { count: u32, status: ExitStatus, said: String, log: PathBuf },
    #[error("cannot start the coordinator: {0}{advice}", advice = crate::guard::advice(.0))]
    Start(#[from] io::Error),
}

impl Host {
    /// Starts a coordinator, unless one is already starting. `other` is true if another program
    /// answers at its endpoint.
    fn ensure(&mut self, target: &Target, other: bool) -> Result<(), HostError> {
        if let Some((child, started)) = &mut self.process {
            match child.try_wait() {
                // Another coordinator owns the store: wait for it.
                Ok(Some(status)) if status.success() => self.process = None,
                Ok(Some(status)) => {
                    self.process = None;
                    let last = last_words(&target.store, self.log_from);
                    if status.code() == Some(ExitCode::Refused.number()) {
                        let silent = || HostError::Silent { log: log_of(&target.store) };
                        return Err(last.map_or_else(silent, HostError::Refused));
                    }
                    let (count, since) = self.failures.map_or((1, Instant::now()), |(n, since)| (n + 1, since));
                    self.failures = Some((count, since));
                    if count >= MOST_FAILURES.0 && since.elapsed() >= MOST_FAILURES.1 {
                        let said = last.map(|line| format!("; its last log line: {line}")).unwrap_or_default();
                        return Err(HostError::Failed { count, status, said, log: log_of(&target.store) });
                    }
                }
                _ if started.elapsed() > START => self.process = None,
                _ => return Ok(()),
            }
        }
        // If any port will do, avoid the one that the other program occupies.
        let bind = self.last_endpoint.clone().filter(|_| !(other && target.endpoint.ends_with(":0")));
        let bind = bind.unwrap_or_else(|| target.endpoint.clone());
        self.log_from = std::fs::metadata(log_of(&target.store)).map_or(0, |m| m.len());
        let child = start(&bind, target)?;
        self.process = Some((child, Instant::now()));
        Ok(())
    }
}

fn log_of(store: &Path) -> PathBuf {
    store.join("coordinator.log")
}

/// Returns the last line of the log after its first `from` bytes.
fn last_words(store: &Path, from: u64) -> Option<String> {
    let log = std::fs::read(log_of(store)).ok()?;
    let new = String::from_utf8_lossy(log.get(usize::try_from(from).ok()?..)?);
    let line = new.lines().next_back()?;
    Some(line.strip_prefix("everstep: ").unwrap_or(line).to_owned())
}

fn start(bind: &str, target: &Target) -> std::io::Result<Child> {
    let log = crate::paths::open_store(&target.store)
        .and_then(|store| store.file("coordinator.log", OFlags::WRONLY | OFlags::CREATE | OFlags::APPEND))
        .map_err(|e| std::io::Error::new(e.kind(), format!("cannot write {}: {e}", log_of(&target.store).display())))?;
    let mut command = Command::new(std::env::current_exe()?);
    command.arg("coordinator").arg("--bind").arg(bind).arg("--store").arg(&target.store);
    if target.insecure {
        command.arg("--insecure");
    }
    if let Some(path) = &target.token_file {
        command.arg("--token-file").arg(path);
    }
    if let Some(path) = &target.notify {
        command.arg("--notify").arg(path);
    }
    if let Some(path) = &target.provisioner {
        command.arg("--provisioner").arg(path);
    }
    if let Some(path) = &target.detector {
        command.arg("--detector").arg(path);
    }
    if let Some((cluster, jobs)) = &target.known {
        command.arg("--cluster").arg(cluster).arg("--jobs").arg(jobs);
    }
    command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
    // Its standard error is read for why it could not start; it keeps a log of its own.
    command.env_remove(crate::log::VARIABLE);
    // SAFETY: setsid is async-signal-safe. In its own session, the coordinator outlives the agent
    // and its terminal.
    unsafe {
        command.pre_exec(|| rustix::process::setsid().map(|_| ()).map_err(Into::into));
    }
    crate::descriptors::restore(&mut command);
    command.spawn()
}
