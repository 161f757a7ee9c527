//! The process-group store, served outside the ranks: torch's TCPStore protocol.
//!
//! Each generation has its own store. A restart therefore never sees a key of an earlier one, and
//! no rank hosts a store whose death would end the job.
//!
//! The protocol is that of the client in torch 2.6 to 2.15
//! (`torch/csrc/distributed/c10d/TCPStore.cpp`): one byte of query type, then strings as 64-bit
//! length and bytes, integers as 64 bits, all little endian.

use crate::agent::connection::Target;
use crate::listening::Place;
use everstep::tcp_store::client::converse;
use everstep::tcp_store::keys::Shared;
use everstep_wire::admission::{self, Admission, Caller, Pass, Trouble};
use everstep_wire::limits::{CONNECT_TIMEOUT, PROOF_TIMEOUT, STORE_CLIENTS_MAX, STORE_FORWARDED_MAX};
use rustix::process::{Resource, getrlimit};
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;

/// How often a store that is about to end checks whether it may.
const DRAIN_LOOK: Duration = Duration::from_millis(5);
/// How long a forwarded connection counts as one whose caller has not authenticated. The
/// coordinator has closed it by then if that is so.
const FORWARDED_PROOF: Duration = PROOF_TIMEOUT.saturating_mul(2);

/// State shared between the store and its listener.
#[derive(Default)]
struct Gate {
    /// The keys of the running generation. Between two generations, it is `None`: clients are
    /// turned away and try again.
    keys: Option<Arc<Shared>>,
    clients: Vec<JoinHandle<()>>,
    /// When `clients` reaches this length, finished ones are removed.
    sweep_at: usize,
    /// Number of connections between other nodes and the coordinator.
    through: usize,
}

/// The process-group store of this node. Dropping it closes the port and every connection.
///
/// If the system chooses the port, every generation has its own. If the user fixes it
/// (`--master-port`), the listener stays and the keys change. HTTP/2 connections to a fixed port
/// are forwarded to the coordinator, so that nodes need to know only one port.
pub struct PgStore {
    place: Place,
    port: u16,
    fixed: bool,
    /// There was no port for the next generation.
    pub short: bool,
    gate: Arc<Mutex<Gate>>,
    server: JoinHandle<()>,
}

impl Drop for PgStore {
    fn drop(&mut self) {
        self.server.abort();
        self.close();
    }
}

fn locked(gate: &Mutex<Gate>) -> std::sync::MutexGuard<'_, Gate> {
    gate.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

impl PgStore {
    /// Listens at `place`, on `port` or, if it is 0, on a free port. Connections for the
    /// coordinator are forwarded to `control`, if given.
    ///
    /// # Errors
    /// Fails if the port cannot be bound.
    pub async fn start(place: &Place, port: u16, control: Option<Target>) -> io::Result<Self> {
        let listener = place.bind(port).await?;
        let bound = listener.local_addr().map(|a: SocketAddr| a.port())?;
        let gate = Arc::new(Mutex::new(Gate::default()));
        let server = tokio::spawn(accept(listener, gate.clone(), control));
        Ok(PgStore { place: place.clone(), port: bound, fixed: port > 0, short: false, gate, server })
    }

    /// Ends a generation: drops its keys and connections, so that the next one finds nothing of it.
    ///
    /// # Errors
    /// Fails if a new port cannot be bound.
    pub async fn renew(&mut self) -> io::Result<()> {
        self.close();
        if !self.fixed {
            *self = PgStore::start(&self.place.clone(), 0, None).await?;
        }
        Ok(())
    }

    /// Begins a generation: its ranks are served from now on.
    pub fn open(&self) {
        let mut gate = locked(&self.gate);
        gate.keys.get_or_insert_default();
    }

    fn close(&self) {
        let mut gate = locked(&self.gate);
        gate.keys = None;
        gate.clients.drain(..).for_each(|c| c.abort());
    }

    /// Waits until no other node is connected to the coordinator through this store.
    pub async fn drained(&self) {
        while locked(&self.gate).through > 0 {
            tokio::time::sleep(DRAIN_LOOK).await;
        }
    }

    /// Returns the port.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port
    }
}

/// Accepts connections for ever. The protocol has no secret, so other users of this machine are
/// turned away at once.
async fn accept(listener: TcpListener, gate: Arc<Mutex<Gate>>, control: Option<Target>) {
    let (admission, mut trouble, most) = (Admission::default(), Trouble::default(), most_clients());
    loop {
        let (stream, peer) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(e) => {
                let (pause, line) = trouble.failed("for the process-group store", &e);
                line.into_iter().for_each(|line| crate::say_warning!("{line}"));
                tokio::time::sleep(pause).await;
                continue;
            }
        };
        trouble.over();
        let Ok(local) = stream.local_addr() else { continue };
        let caller = admission::caller(local, peer);
        if matches!(caller, Caller::User(_)) {
            continue;
        }
        let Some(pass) = admission.admit(caller) else { continue };
        let (gate, control) = (gate.clone(), control.clone());
        tokio::spawn(async move {
            if let Some(control) = &control {
                match tokio::time::timeout(PROOF_TIMEOUT, is_http(&stream)).await {
                    Ok(true) => return forward(stream, control, &gate, pass).await,
                    Ok(false) => {}
                    Err(_) => return,
                }
            }
            let mut gate = locked(&gate);
            if let Some(keys) = gate.keys.clone() {
                if gate.clients.len() >= gate.sweep_at.min(most) {
                    gate.clients.retain(|c| !c.is_finished());
                    gate.sweep_at = 2 * gate.clients.len() + 64;
                }
                if gate.clients.len() < most {
                    gate.clients.push(tokio::spawn(serve(stream, keys, pass)));
                }
            }
        });
    }
}

/// Returns how many clients are served: some descriptors are left for the rest of this process.
fn most_clients() -> usize {
    let descriptors = getrlimit(Resource::Nofile).current.and_then(|n| usize::try_from(n).ok());
    descriptors.map_or(STORE_CLIENTS_MAX, |n| STORE_CLIENTS_MAX.min(n - n / 4))
}

/// Serves one client. An error ends only its connection.
async fn serve(stream: TcpStream, shared: Arc<Shared>, pass: Pass) {
    let _ = stream.set_nodelay(true);
    let (reader, writer) = stream.into_split();
    if let Err(e) = converse(reader, writer, shared, pass).await
        && e.kind() == io::ErrorKind::StorageFull
    {
        crate::say_warning!("{e}; closing the connection of the rank that needs more");
    }
}

/// Returns whether this is an HTTP/2 connection: it begins with `P`, a TCPStore client with 0.
async fn is_http(stream: &TcpStream) -> bool {
    let mut first = [0u8; 1];
    matches!(stream.peek(&mut first).await, Ok(1)) && first[0] == b'P'
}

/// Forwards a connection, unless there are too many.
async fn forward(stream: TcpStream, control: &Target, gate: &Mutex<Gate>, pass: Pass) {
    {
        let mut gate = locked(gate);
        if gate.through >= STORE_FORWARDED_MAX {
            return;
        }
        gate.through += 1;
    }
    let _ = let_through(stream, control, pass, FORWARDED_PROOF).await;
    locked(gate).through -= 1;
}

/// Connects `stream` with the coordinator, and returns the pass after the time `unproven`.
async fn let_through(mut stream: TcpStream, control: &Target, pass: Pass, unproven: Duration) -> io::Result<()> {
    let Some(endpoint) = control.endpoint_now() else { return Ok(()) };
    let mut coordinator = tokio::time::timeout(CONNECT_TIMEOUT, TcpStream::connect(endpoint)).await??;
    // The other node sends its token at once. If the coordinator has ended, another user of this
    // machine may have taken its port.
    admission::check_peer(coordinator.local_addr()?, coordinator.peer_addr()?)?;
    let _ = stream.set_nodelay(true);
    let _ = coordinator.set_nodelay(true);
    // Ends when either side does; both then open a new connection.
    let through = tokio::io::copy_bidirectional(&mut stream, &mut coordinator);
    tokio::pin!(through);
    tokio::select! {
        done = &mut through => return done.map(|_| ()),
        () = tokio::time::sleep(unproven) => drop(pass),
    }
    through.await.map(|_| ())
}

#[cfg(test)]
mod tests {
    use super::*;
    use everstep_wire::limits::UNPROVEN_PER_USER;
    use std::io::Read;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    const ANOTHER: u32 = 65_534;

    fn target(endpoint: SocketAddr) -> Target {
        Target {
            endpoint: endpoint.to_string(),
            store: "/".into(),
            token_file: None,
            notify: None,
            provisioner: None,
            detector: None,
            known: None,
            insecure: true,
            may_host: false,
            silence: Duration::ZERO,
            patience: Duration::ZERO,
        }
    }

    async fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        (near, listener.accept().await.unwrap().0)
    }

    #[tokio::test]
    async fn no_token_is_forwarded_to_another_user_on_the_coordinators_old_port() {
        let listen = || {
            let other = rustix::process::Uid::from_raw(ANOTHER);
            rustix::thread::set_thread_uid(other).ok().map(|()| std::net::TcpListener::bind("127.0.0.1:0").unwrap())
        };
        // Only root can be another user.
        let Some(listener) = std::thread::spawn(listen).join().unwrap() else { return };
        let control = target(listener.local_addr().unwrap());
        let (mut node, stream) = pair().await;
        node.write_all(b"Authorization: Bearer secret").await.unwrap();
        node.shutdown().await.unwrap();
        let heard = std::thread::spawn(move || {
            let mut heard = Vec::new();
            // A reset is silence, too.
            let _ = listener.accept().unwrap().0.read_to_end(&mut heard);
            heard
        });
        let pass = Admission::default().admit(Caller::Own).unwrap();
        let refused = let_through(stream, &control, pass, FORWARDED_PROOF).await.unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::PermissionDenied);
        assert_eq!(heard.join().unwrap(), b"");
    }

    #[tokio::test]
    async fn a_forwarded_connection_that_stays_open_counts_as_unproven_only_at_first() {
        let coordinator = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let control = target(coordinator.local_addr().unwrap());
        let (admission, other) = (Admission::default(), Caller::User(ANOTHER));
        let mut waiting: Vec<_> = (0..UNPROVEN_PER_USER).map(|_| admission.admit(other).unwrap()).collect();
        let pass = waiting.pop().unwrap();
        let (mut node, stream) = pair().await;
        let through =
            tokio::spawn(async move { let_through(stream, &control, pass, Duration::from_millis(300)).await });
        let (mut there, _) = coordinator.accept().await.unwrap();
        assert!(admission.admit(other).is_none());
        while admission.admit(other).is_none() {
            tokio::time::sleep(DRAIN_LOOK).await;
        }
        node.write_all(b"still open").await.unwrap();
        let mut heard = [0; 10];
        there.read_exact(&mut heard).await.unwrap();
        assert_eq!(&heard, b"still open");
        drop((node, there));
        through.await.unwrap().unwrap();
    }
}
