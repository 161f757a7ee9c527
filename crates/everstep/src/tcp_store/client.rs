//! One client of the process-group store: torch's protocol, within limits.

use super::keys::Shared;
use super::memory_budget::{ENTRY, Held};
use everstep_wire::admission::Pass;
use everstep_wire::limits::{
    PROOF_TIMEOUT, STORE_KEY_BYTES_MAX, STORE_KEYS_MAX, STORE_REQUEST_BYTES_MAX, STORE_REQUEST_TIMEOUT,
    STORE_VALUE_BYTES_MAX,
};
use std::io::{self, IoSlice};
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, BufReader};

const MAGIC: u32 = 0x3C85_F7CE;
const STOP_WAITING: u8 = 0;
const WAIT_CANCELED: u8 = 1;

/// The first byte of a request (`QueryType` in torch's `TCPStoreBackend.hpp`).
mod query {
    pub const SET: u8 = 1;
    pub const COMPARE_SET: u8 = 2;
    pub const GET: u8 = 3;
    pub const ADD: u8 = 4;
    pub const CHECK: u8 = 5;
    pub const WAIT: u8 = 6;
    pub const COUNT_KEYS: u8 = 7;
    pub const DELETE_KEY: u8 = 8;
    pub const APPEND: u8 = 9;
    pub const MULTI_GET: u8 = 10;
    pub const MULTI_SET: u8 = 11;
    pub const CANCEL_WAIT: u8 = 12;
    pub const PING: u8 = 13;
    pub const QUEUE_PUSH: u8 = 14;
    pub const QUEUE_POP: u8 = 15;
    pub const QUEUE_LEN: u8 = 16;
    pub const LIST_KEYS: u8 = 17;
}

/// Serves one client until it disconnects. Its pass is returned after the handshake.
///
/// # Errors
/// `StorageFull` if the store would hold too much; other errors if the client is gone or does not
/// speak the protocol.
pub async fn converse(
    reader: impl AsyncRead + Unpin,
    writer: impl AsyncWrite + Unpin,
    shared: Arc<Shared>,
    pass: Pass,
) -> io::Result<()> {
    Client { reader: BufReader::new(reader), writer, shared, within: STORE_REQUEST_TIMEOUT }.run(pass).await
}

struct Client<R, W> {
    reader: BufReader<R>,
    writer: W,
    shared: Arc<Shared>,
    /// Time for a request, and for taking its answer.
    within: Duration,
}

fn malformed(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.to_owned())
}

async fn in_time<T>(within: Duration, what: impl Future<Output = io::Result<T>>) -> io::Result<T> {
    tokio::time::timeout(within, what).await.map_err(|_| io::ErrorKind::TimedOut)?
}

impl<R: AsyncRead + Unpin, W: AsyncWrite + Unpin> Client<R, W> {
    /// Reads bytes, for which `besides` more are reserved.
    async fn bytes(&mut self, limit: u64, besides: u64) -> io::Result<Held> {
        let length = self.reader.read_u64_le().await?;
        if length > limit {
            return Err(malformed("too long"));
        }
        let reserved = self.shared.reserve(length + besides)?;
        // Memory grows with the bytes received, not with the announced length.
        let mut bytes = Vec::new();
        (&mut self.reader).take(length).read_to_end(&mut bytes).await?;
        bytes.shrink_to_fit();
        if bytes.len() as u64 == length {
            Ok(Held::new(bytes, reserved))
        } else {
            Err(io::ErrorKind::UnexpectedEof.into())
        }
    }

    async fn key(&mut self) -> io::Result<Held> {
        self.bytes(STORE_KEY_BYTES_MAX, ENTRY).await
    }

    async fn value(&mut self) -> io::Result<Held> {
        self.bytes(STORE_VALUE_BYTES_MAX, 0).await
    }

    async fn keys(&mut self) -> io::Result<Vec<Held>> {
        let count = self.reader.read_u64_le().await?;
        if count > STORE_KEYS_MAX {
            return Err(malformed("too many keys"));
        }
        let (mut keys, mut bytes) = (Vec::new(), 0);
        for _ in 0..count {
            let key = self.key().await?;
            bytes += key.len() as u64;
            if bytes > STORE_REQUEST_BYTES_MAX {
                return Err(malformed("keys too long"));
            }
            keys.push(key);
        }
        Ok(keys)
    }

    /// Sends a value after its length, both at once and without a copy.
    async fn reply_value(&mut self, value: &[u8]) -> io::Result<()> {
        let length = (value.len() as u64).to_le_bytes();
        let sent = self.writer.write_vectored(&[IoSlice::new(&length), IoSlice::new(value)]).await?;
        self.writer.write_all(length.get(sent..).unwrap_or_default()).await?;
        self.writer.write_all(value.get(sent.saturating_sub(length.len())..).unwrap_or_default()).await
    }

    async fn reply_key(&mut self, key: &[u8]) -> io::Result<()> {
        let value = self.shared.get(key);
        self.reply_value(value.as_deref().map_or(&[][..], |held| &**held)).await
    }

    async fn run(mut self, pass: Pass) -> io::Result<()> {
        let magic = async { Ok::<_, io::Error>((self.reader.read_u8().await?, self.reader.read_u32_le().await?)) };
        if tokio::time::timeout(PROOF_TIMEOUT, magic).await.map_err(|_| io::ErrorKind::TimedOut)?? != (0, MAGIC) {
            return Err(malformed("not a TCPStore client"));
        }
        drop(pass);
        loop {
            let query = self.reader.read_u8().await?;
            match query {
                query::WAIT => self.wait().await?,
                query => in_time(self.within, self.answer(query)).await?,
            }
        }
    }

    /// Carries out one request other than a wait, and answers if an answer is due.
    async fn answer(&mut self, query: u8) -> io::Result<()> {
        match query {
            query::SET => {
                let (key, value) = (self.key().await?, self.value().await?);
                self.shared.set(key, value);
            }
            query::COMPARE_SET => {
                let (key, expected, desired) = (self.key().await?, self.value().await?, self.value().await?);
                let now = self.shared.compare_set(key, expected, desired);
                self.reply_value(&now).await?;
            }
            query::GET => {
                let key = self.key().await?;
                self.reply_key(&key).await?;
            }
            query::ADD => {
                let (key, amount) = (self.key().await?, self.reader.read_i64_le().await?);
                let sum = self.shared.add(key, amount)?;
                self.writer.write_i64_le(sum).await?;
            }
            query::CHECK => {
                let keys = self.keys().await?;
                let ready = self.shared.all_there(&keys);
                self.writer.write_u8(u8::from(!ready)).await?;
            }
            query::COUNT_KEYS => {
                let count = self.shared.count();
                self.writer.write_i64_le(i64::try_from(count).unwrap_or(i64::MAX)).await?;
            }
            query::DELETE_KEY => {
                let key = self.key().await?;
                let gone = self.shared.delete(&key);
                self.writer.write_i64_le(i64::from(gone)).await?;
            }
            query::APPEND => {
                let (key, more) = (self.key().await?, self.value().await?);
                self.shared.append(key, more)?;
            }
            query::MULTI_GET => self.multi_get().await?,
            query::MULTI_SET => self.multi_set().await?,
            // A cancellation that crossed the answer to its wait.
            query::CANCEL_WAIT => {}
            query::PING => {
                let nonce = self.reader.read_u32_le().await?;
                self.writer.write_u32_le(nonce).await?;
            }
            query::QUEUE_PUSH => {
                let (key, value) = (self.key().await?, self.value().await?);
                self.shared.push(key, value);
            }
            query::QUEUE_POP => self.queue_pop().await?,
            query::QUEUE_LEN => {
                let key = self.key().await?;
                let count = self.shared.queued(&key);
                self.writer.write_i64_le(i64::try_from(count).unwrap_or(i64::MAX)).await?;
            }
            query::LIST_KEYS => self.list_keys().await?,
            _ => return Err(malformed("unknown query")),
        }
        Ok(())
    }

    /// Answers with the values of several keys.
    async fn multi_get(&mut self) -> io::Result<()> {
        for key in self.keys().await? {
            self.reply_key(&key).await?;
        }
        Ok(())
    }

    /// Sets several keys.
    async fn multi_set(&mut self) -> io::Result<()> {
        let count = self.reader.read_u64_le().await?;
        if count > STORE_KEYS_MAX {
            return Err(malformed("too many keys"));
        }
        for _ in 0..count {
            let (key, value) = (self.key().await?, self.value().await?);
            self.shared.set(key, value);
        }
        Ok(())
    }

    /// Takes a value from a queue, if it has one.
    async fn queue_pop(&mut self) -> io::Result<()> {
        let key = self.key().await?;
        let value = self.shared.pop(&key);
        self.writer.write_i64_le(i64::from(value.is_some())).await?;
        if let Some(value) = value {
            self.reply_value(&value).await?;
        }
        Ok(())
    }

    /// Answers with the names of all keys.
    async fn list_keys(&mut self) -> io::Result<()> {
        let (keys, _reserved) = self.shared.names()?;
        self.writer.write_i64_le(i64::try_from(keys.len()).unwrap_or(i64::MAX)).await?;
        for key in keys {
            self.reply_value(&key).await?;
        }
        Ok(())
    }

    /// Answers when all keys exist, or when the client cancels. Only the wait itself may take any
    /// time.
    async fn wait(&mut self) -> io::Result<()> {
        let keys = in_time(self.within, self.keys()).await?;
        let shared = self.shared.clone();
        let answer = match shared.wait(keys)? {
            None => STOP_WAITING,
            Some(wait) => tokio::select! {
                () = wait.wake.notified() => STOP_WAITING,
                query = self.reader.read_u8() => match query? {
                    query::CANCEL_WAIT => WAIT_CANCELED,
                    _ => return Err(malformed("query during a wait")),
                },
            },
        };
        in_time(self.within, self.writer.write_u8(answer)).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use everstep_wire::admission::{Admission, Caller};
    use tokio::io::{DuplexStream, duplex, split};

    const HANDSHAKE: [u8; 5] = [0, 0xce, 0xf7, 0x85, 0x3c];

    fn text(bytes: &[u8]) -> Vec<u8> {
        [&(bytes.len() as u64).to_le_bytes()[..], bytes].concat()
    }

    async fn connect(
        shared: &Arc<Shared>,
        within: Duration,
    ) -> (DuplexStream, tokio::task::JoinHandle<io::Result<()>>) {
        let (mut near, far) = duplex(1 << 10);
        let (reader, writer) = split(far);
        let pass = Admission::default().admit(Caller::Own).unwrap();
        let client = Client { reader: BufReader::new(reader), writer, shared: shared.clone(), within };
        let served = tokio::spawn(client.run(pass));
        near.write_all(&HANDSHAKE).await.unwrap();
        (near, served)
    }

    #[tokio::test]
    async fn what_has_arrived_stays_counted_until_the_request_is_over() {
        let shared = Arc::new(Shared::default());
        let (mut client, served) = connect(&shared, STORE_REQUEST_TIMEOUT).await;
        let expected = vec![7; 5000];
        client.write_all(&[&[query::COMPARE_SET][..], &text(b"k"), &text(&expected)].concat()).await.unwrap();
        while !shared.audit().is_err_and(|why| why.to_string().starts_with("5097 bytes are counted")) {
            tokio::task::yield_now().await;
        }
        client.write_all(&text(b"desired")).await.unwrap();
        let mut reply = vec![0; 8 + expected.len()];
        client.read_exact(&mut reply).await.unwrap();
        assert_eq!(reply, text(&expected));
        drop(client);
        assert!(served.await.unwrap().is_err());
        shared.audit().unwrap();
    }

    #[tokio::test]
    async fn a_client_that_stops_in_a_request_or_does_not_read_is_given_up_and_one_that_waits_is_not() {
        const SHORT: Duration = Duration::from_millis(200);
        let shared = Arc::new(Shared::default());
        let (mut waits, _waited) = connect(&shared, SHORT).await;
        waits.write_all(&[&[query::WAIT][..], &1u64.to_le_bytes(), &text(b"later")].concat()).await.unwrap();
        let (mut stops, stopped) = connect(&shared, SHORT).await;
        stops.write_all(&[&[query::SET][..], &text(b"k"), &text(&[0; 5000])[..100]].concat()).await.unwrap();
        assert_eq!(stopped.await.unwrap().unwrap_err().kind(), io::ErrorKind::TimedOut);
        let (mut deaf, given_up) = connect(&shared, SHORT).await;
        let set_and_get = [&[query::SET][..], &text(b"k"), &text(&[0; 5000]), &[query::GET], &text(b"k")].concat();
        deaf.write_all(&set_and_get).await.unwrap();
        assert_eq!(given_up.await.unwrap().unwrap_err().kind(), io::ErrorKind::TimedOut);
        let (mut sets, _served) = connect(&shared, SHORT).await;
        sets.write_all(&[&[query::SET][..], &text(b"later"), &text(b"")].concat()).await.unwrap();
        assert_eq!(waits.read_u8().await.unwrap(), STOP_WAITING);
    }
}
