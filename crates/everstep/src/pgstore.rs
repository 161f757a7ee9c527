//! The process-group store, served outside the ranks: torch's TCPStore protocol.
//!
//! Each generation has a store of its own, so a restart never sees a key of an
//! earlier one, and no rank hosts a store whose death would end the job.
//! Protocol as spoken by the client in torch 2.6 to 2.15 (`torch/csrc/distributed/c10d/TCPStore.cpp`):
//! one byte of query type, then strings as 64-bit length and bytes, integers as 64 bits, all little endian.

use crate::agent::connection::Target;
use everstep_wire::limits::{STORE_KEY_BYTES_MAX, STORE_KEYS_MAX, STORE_VALUE_BYTES_MAX};
use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;
use tokio::task::JoinHandle;

const MAGIC: u32 = 0x3C85_F7CE;
const STOP_WAITING: u8 = 0;
const WAIT_CANCELED: u8 = 1;

/// How often a store that is to end looks whether it may.
const DRAIN_LOOK: Duration = Duration::from_millis(5);

#[derive(Default)]
struct Keys {
    values: BTreeMap<Vec<u8>, Vec<u8>>,
    queues: BTreeMap<Vec<u8>, VecDeque<Vec<u8>>>,
}

#[derive(Default)]
struct Shared {
    keys: Mutex<Keys>,
    changed: Notify,
}

impl Shared {
    fn with<T>(&self, act: impl FnOnce(&mut Keys) -> T) -> T {
        match self.keys.lock() {
            Ok(mut keys) => act(&mut keys),
            Err(poisoned) => act(&mut poisoned.into_inner()),
        }
    }

    fn change<T>(&self, act: impl FnOnce(&mut Keys) -> T) -> T {
        let result = self.with(act);
        self.changed.notify_waiters();
        result
    }

    fn all_there(&self, keys: &[Vec<u8>]) -> bool {
        self.with(|k| {
            keys.iter().all(|key| k.values.contains_key(key) || k.queues.get(key).is_some_and(|q| !q.is_empty()))
        })
    }
}

/// What a listener does with those who come.
#[derive(Default)]
struct Gate {
    /// The keys of the running generation; `None` between two: whoever comes is sent away and tries again.
    keys: Option<Arc<Shared>>,
    clients: Vec<JoinHandle<()>>,
    /// Connections between other nodes and the coordinator.
    through: usize,
}

/// The process-group store of this node. Dropping it closes the port and every connection.
///
/// With a port of the system's choice, every generation has a port of its own. With a port that the
/// user has fixed (`--master-port`) the listener stays, the keys change, and whoever speaks HTTP/2
/// there is let through to the coordinator: nodes need to know one port only.
pub struct PgStore {
    host: String,
    port: u16,
    fixed: bool,
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
    /// Listens on `host`, at a free port or at `port`; then also for the coordinator that `control` leads to.
    ///
    /// # Errors
    /// Those of binding.
    pub async fn start(host: &str, port: u16, control: Option<Target>) -> io::Result<Self> {
        let listener = TcpListener::bind((host, port)).await?;
        let bound = listener.local_addr().map(|a: SocketAddr| a.port())?;
        let gate = Arc::new(Mutex::new(Gate::default()));
        let server = tokio::spawn(accept(listener, gate.clone(), control));
        Ok(PgStore { host: host.to_owned(), port: bound, fixed: port > 0, gate, server })
    }

    /// A generation is over: its keys and connections go, and the next one finds nothing of it.
    ///
    /// # Errors
    /// Those of binding.
    pub async fn renew(&mut self) -> io::Result<()> {
        self.close();
        if !self.fixed {
            *self = PgStore::start(&self.host.clone(), 0, None).await?;
        }
        Ok(())
    }

    /// A generation begins: its ranks are served.
    pub fn open(&self) {
        let mut gate = locked(&self.gate);
        gate.keys.get_or_insert_default();
    }

    fn close(&self) {
        let mut gate = locked(&self.gate);
        gate.keys = None;
        gate.clients.drain(..).for_each(|c| c.abort());
    }

    /// Waits until no other node needs the way to the coordinator that leads through here.
    pub async fn drained(&self) {
        while locked(&self.gate).through > 0 {
            tokio::time::sleep(DRAIN_LOOK).await;
        }
    }

    /// Its port.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port
    }
}

async fn accept(listener: TcpListener, gate: Arc<Mutex<Gate>>, control: Option<Target>) {
    while let Ok((stream, _)) = listener.accept().await {
        let (gate, control) = (gate.clone(), control.clone());
        tokio::spawn(async move {
            if let Some(control) = &control
                && is_http(&stream).await
            {
                locked(&gate).through += 1;
                let_through(stream, control).await;
                locked(&gate).through -= 1;
                return;
            }
            let mut gate = locked(&gate);
            if let Some(keys) = gate.keys.clone() {
                gate.clients.retain(|c| !c.is_finished());
                gate.clients.push(tokio::spawn(serve(stream, keys)));
            }
        });
    }
}

/// The first byte of an HTTP/2 connection is a `P`; that of a TCPStore client is 0.
async fn is_http(stream: &TcpStream) -> bool {
    let mut first = [0u8; 1];
    matches!(stream.peek(&mut first).await, Ok(1)) && first[0] == b'P'
}

async fn let_through(mut stream: TcpStream, control: &Target) {
    let Some(endpoint) = control.endpoint_now() else { return };
    if let Ok(mut coordinator) = TcpStream::connect(endpoint).await {
        let _ = stream.set_nodelay(true);
        let _ = coordinator.set_nodelay(true);
        // Ends with either side; both then open a new connection.
        let _ = tokio::io::copy_bidirectional(&mut stream, &mut coordinator).await;
    }
}

async fn serve(stream: TcpStream, shared: Arc<Shared>) {
    let _ = stream.set_nodelay(true);
    let (reader, writer) = stream.into_split();
    // An error ends this one connection: the client has gone or does not speak the protocol.
    let _ = Client { reader: BufReader::new(reader), writer, shared }.run().await;
}

struct Client {
    reader: BufReader<OwnedReadHalf>,
    writer: OwnedWriteHalf,
    shared: Arc<Shared>,
}

fn malformed(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.to_owned())
}

impl Client {
    async fn bytes(&mut self, limit: u64) -> io::Result<Vec<u8>> {
        let length = self.reader.read_u64_le().await?;
        if length > limit {
            return Err(malformed("too long"));
        }
        let mut bytes = vec![0; usize::try_from(length).map_err(io::Error::other)?];
        self.reader.read_exact(&mut bytes).await?;
        Ok(bytes)
    }

    async fn key(&mut self) -> io::Result<Vec<u8>> {
        self.bytes(STORE_KEY_BYTES_MAX).await
    }

    async fn value(&mut self) -> io::Result<Vec<u8>> {
        self.bytes(STORE_VALUE_BYTES_MAX).await
    }

    async fn keys(&mut self) -> io::Result<Vec<Vec<u8>>> {
        let count = self.reader.read_u64_le().await?;
        if count > STORE_KEYS_MAX {
            return Err(malformed("too many keys"));
        }
        let mut keys = Vec::new();
        for _ in 0..count {
            keys.push(self.key().await?);
        }
        Ok(keys)
    }

    async fn reply_value(&mut self, value: &[u8]) -> io::Result<()> {
        let mut message = (value.len() as u64).to_le_bytes().to_vec();
        message.extend_from_slice(value);
        self.writer.write_all(&message).await
    }

    async fn run(mut self) -> io::Result<()> {
        if self.reader.read_u8().await? != 0 || self.reader.read_u32_le().await? != MAGIC {
            return Err(malformed("not a TCPStore client"));
        }
        loop {
            let query = self.reader.read_u8().await?;
            self.answer(query).await?;
        }
    }

    async fn answer(&mut self, query: u8) -> io::Result<()> {
        match query {
            1 => {
                let (key, value) = (self.key().await?, self.value().await?);
                self.shared.change(|k| k.values.insert(key, value));
            }
            2 => {
                let (key, expected, desired) = (self.key().await?, self.value().await?, self.value().await?);
                let now = self.shared.change(|k| compare_set(k, key, expected, desired));
                self.reply_value(&now).await?;
            }
            3 => {
                let key = self.key().await?;
                let value = self.shared.with(|k| k.values.get(&key).cloned()).unwrap_or_default();
                self.reply_value(&value).await?;
            }
            4 => {
                let (key, amount) = (self.key().await?, self.reader.read_i64_le().await?);
                let sum = self.shared.change(|k| add(k, key, amount));
                self.writer.write_i64_le(sum).await?;
            }
            5 => {
                let keys = self.keys().await?;
                let ready = self.shared.all_there(&keys);
                self.writer.write_u8(u8::from(!ready)).await?;
            }
            6 => self.wait().await?,
            7 => {
                let count = self.shared.with(|k| k.values.len() + k.queues.len());
                self.writer.write_i64_le(i64::try_from(count).unwrap_or(i64::MAX)).await?;
            }
            8 => {
                let key = self.key().await?;
                let gone = self.shared.change(|k| k.values.remove(&key).is_some() | k.queues.remove(&key).is_some());
                self.writer.write_i64_le(i64::from(gone)).await?;
            }
            9 => {
                let (key, more) = (self.key().await?, self.value().await?);
                self.shared.change(|k| k.values.entry(key).or_default().extend(more));
            }
            10 => {
                for key in self.keys().await? {
                    let value = self.shared.with(|k| k.values.get(&key).cloned()).unwrap_or_default();
                    self.reply_value(&value).await?;
                }
            }
            11 => {
                let count = self.reader.read_u64_le().await?;
                if count > STORE_KEYS_MAX {
                    return Err(malformed("too many keys"));
                }
                for _ in 0..count {
                    let (key, value) = (self.key().await?, self.value().await?);
                    self.shared.change(|k| k.values.insert(key, value));
                }
            }
            // A cancellation that crossed the answer to its wait.
            12 => {}
            13 => {
                let nonce = self.reader.read_u32_le().await?;
                self.writer.write_u32_le(nonce).await?;
            }
            14 => {
                let (key, value) = (self.key().await?, self.value().await?);
                self.shared.change(|k| k.queues.entry(key).or_default().push_back(value));
            }
            15 => {
                let key = self.key().await?;
                let value = self.shared.change(|k| k.queues.get_mut(&key).and_then(VecDeque::pop_front));
                self.writer.write_i64_le(i64::from(value.is_some())).await?;
                if let Some(value) = value {
                    self.reply_value(&value).await?;
                }
            }
            16 => {
                let key = self.key().await?;
                let count = self.shared.with(|k| k.queues.get(&key).map_or(0, VecDeque::len));
                self.writer.write_i64_le(i64::try_from(count).unwrap_or(i64::MAX)).await?;
            }
            17 => {
                let keys: Vec<Vec<u8>> =
                    self.shared.with(|k| k.values.keys().chain(k.queues.keys()).cloned().collect());
                self.writer.write_i64_le(i64::try_from(keys.len()).unwrap_or(i64::MAX)).await?;
                for key in keys {
                    self.reply_value(&key).await?;
                }
            }
            _ => return Err(malformed("unknown query")),
        }
        Ok(())
    }

    /// Answers when all keys are there, or when the client cancels.
    async fn wait(&mut self) -> io::Result<()> {
        let keys = self.keys().await?;
        loop {
            let shared = self.shared.clone();
            let changed = shared.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            if self.shared.all_there(&keys) {
                return self.writer.write_u8(STOP_WAITING).await;
            }
            tokio::select! {
                () = changed => {}
                query = self.reader.read_u8() => match query? {
                    12 => return self.writer.write_u8(WAIT_CANCELED).await,
                    _ => return Err(malformed("query during a wait")),
                },
            }
        }
    }
}

/// As TCPStore: sets when the value is the expected one, or when the key is new and nothing is expected.
fn compare_set(k: &mut Keys, key: Vec<u8>, expected: Vec<u8>, desired: Vec<u8>) -> Vec<u8> {
    match k.values.get(&key) {
        None if expected.is_empty() => {
            k.values.insert(key, desired.clone());
            desired
        }
        None => expected,
        Some(now) if *now == expected => {
            k.values.insert(key, desired.clone());
            desired
        }
        Some(now) => now.clone(),
    }
}

/// As TCPStore: numbers are kept as decimal text.
fn add(k: &mut Keys, key: Vec<u8>, amount: i64) -> i64 {
    let value = k.values.entry(key).or_default();
    let now = std::str::from_utf8(value).ok().and_then(|t| t.trim().parse::<i64>().ok()).unwrap_or(0);
    let sum = now.wrapping_add(amount);
    *value = sum.to_string().into_bytes();
    sum
}
