//! Keeps a connection to the coordinator open, and starts a coordinator where that is this node's job.

use crate::agent::Input;
use crate::coordinator::endpoint_file;
use everstep_core::message::Order;
use everstep_wire::client::{ConnectError, attach};
use everstep_wire::envelope::ToAgent;
use everstep_wire::token::Token;
use rustix::fs::OFlags;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use tokio::sync::mpsc;

/// Pause between two tries.
const RETRY: Duration = Duration::from_millis(50);
/// A coordinator that was started gets this long to listen before another start is tried.
const START: Duration = Duration::from_millis(1500);
/// Something else on the coordinator's port is given this long to turn into one.
const STRANGER: Duration = Duration::from_secs(3);

/// How to reach the coordinator.
#[derive(Clone, Debug)]
pub struct Target {
    /// `HOST:PORT`; port 0 means: look into the store's directory.
    pub endpoint: String,
    /// The store's directory.
    pub store: PathBuf,
    /// Where the token is, if not in the store's directory.
    pub token_file: Option<PathBuf>,
    /// Where notices go, for a coordinator that is started here.
    pub notify: Option<PathBuf>,
    /// Program that provides machines, for a coordinator that is started here.
    pub provisioner: Option<PathBuf>,
    /// Which machine behaves unlike its peers: settings, for a coordinator that is started here.
    pub detector: Option<PathBuf>,
    /// What is known of nodes and jobs: the coordinator plans for several.
    pub known: Option<(PathBuf, PathBuf)>,
    /// This node may start the coordinator.
    pub may_host: bool,
    /// Silence after which the connection is given up.
    pub silence: Duration,
}

impl Target {
    /// Where the coordinator listens, as far as is known.
    pub fn endpoint_now(&self) -> Option<String> {
        if !self.endpoint.ends_with(":0") {
            return Some(self.endpoint.clone());
        }
        let about = std::fs::read(endpoint_file(&self.store)).ok()?;
        let about: serde_json::Value = serde_json::from_slice(&about).ok()?;
        about["endpoint"].as_str().map(str::to_owned)
    }

    /// The job's secret.
    ///
    /// # Errors
    /// Those of reading its file.
    pub fn token(&self) -> std::io::Result<Token> {
        match &self.token_file {
            Some(path) => Token::read(path),
            None if self.may_host => Token::at(&self.store.join("token")),
            None => Token::read(&self.store.join("token")),
        }
    }
}

/// Runs for the life of the agent.
pub async fn run(target: Target, inbox: mpsc::UnboundedSender<Input>) {
    let mut coordinator: Option<(Child, Instant)> = None;
    let mut stranger_since: Option<Instant> = None;
    let mut last_endpoint: Option<String> = None;
    loop {
        let token = match target.token() {
            Ok(token) => token,
            // The node that makes it may be a moment later than this one.
            Err(e) if target.token_file.is_none() && e.kind() == std::io::ErrorKind::NotFound => {
                tokio::time::sleep(RETRY).await;
                continue;
            }
            Err(e) => {
                let why = format!("no token for the coordinator: {e}; copy its token file here and give --token-file");
                let _ = inbox.send(Input::Fatal { code: 78, why });
                return;
            }
        };
        let endpoint = target.endpoint_now();
        let attempt = match &endpoint {
            Some(endpoint) => Some(attach(endpoint, &token).await),
            None => None,
        };
        match attempt {
            Some(Ok((lines, mut orders))) => {
                stranger_since = None;
                last_endpoint = endpoint;
                let _ = inbox.send(Input::Connected(lines));
                while let Ok(Some(line)) = tokio::time::timeout(target.silence, orders.recv()).await {
                    // A refused connection is of no use; the next one may be accepted.
                    let refused = matches!(&line, ToAgent::Order { order: Order::Refused { .. }, .. });
                    let _ = inbox.send(Input::Line(line));
                    if refused {
                        break;
                    }
                }
                let _ = inbox.send(Input::Disconnected);
                tokio::time::sleep(RETRY).await;
                continue;
            }
            Some(Err(e @ (ConnectError::NotCoordinator { .. } | ConnectError::Unauthorized { .. }))) => {
                let since = *stranger_since.get_or_insert_with(Instant::now);
                if since.elapsed() > STRANGER {
                    let _ = inbox.send(Input::Fatal { code: 78, why: e.to_string() });
                    return;
                }
            }
            Some(Err(ConnectError::Unreachable { .. })) | None => stranger_since = None,
        }
        if target.may_host && stranger_since.is_none() {
            if let Some((child, started)) = &mut coordinator {
                match child.try_wait() {
                    Ok(Some(status)) if status.code() == Some(78) => {
                        let log = std::fs::read_to_string(target.store.join("coordinator.log")).unwrap_or_default();
                        let last = log.lines().next_back().unwrap_or("the coordinator could not start");
                        let why = last.strip_prefix("everstep: ").unwrap_or(last).to_owned();
                        let _ = inbox.send(Input::Fatal { code: 78, why });
                        return;
                    }
                    Ok(Some(_)) => coordinator = None,
                    _ if started.elapsed() > START => coordinator = None,
                    _ => {}
                }
            }
            if coordinator.is_none() {
                // A restarted coordinator listens where the first one did: others know it by that address.
                let bind = last_endpoint.clone().unwrap_or_else(|| target.endpoint.clone());
                match start(&bind, &target) {
                    Ok(child) => coordinator = Some((child, Instant::now())),
                    Err(e) => {
                        let why = format!("cannot start the coordinator: {e}");
                        let _ = inbox.send(Input::Fatal { code: 78, why });
                        return;
                    }
                }
            }
        }
        tokio::time::sleep(RETRY).await;
    }
}

fn start(bind: &str, target: &Target) -> std::io::Result<Child> {
    let store = crate::places::open_store(&target.store)?;
    let log = store.file("coordinator.log", OFlags::WRONLY | OFlags::CREATE | OFlags::APPEND)?;
    let mut command = Command::new(std::env::current_exe()?);
    command.arg("coordinator").arg("--bind").arg(bind).arg("--store").arg(&target.store);
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
    // SAFETY: setsid is async-signal-safe. A session of its own: it outlives the agent and its terminal.
    unsafe {
        command.pre_exec(|| rustix::process::setsid().map(|_| ()).map_err(Into::into));
    }
    command.spawn()
}
