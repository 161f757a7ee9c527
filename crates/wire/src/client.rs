//! The agent's end of the long-lived stream, and single requests for the command line.

use crate::envelope::{ToAgent, ToCoordinator, decode, encode};
use crate::limits::{CONNECT_TIMEOUT, FRAME_BYTES_MAX};
use crate::token::Token;
use bytes::Bytes;
use http_body_util::{BodyExt, Full, combinators::BoxBody};
use hyper::body::Incoming;
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::net::TcpStream;
use tokio::sync::mpsc;

/// Why no connection could be established.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// Nothing listens at the endpoint, or not yet.
    #[error("{endpoint} does not answer: {source}")]
    Unreachable {
        /// Endpoint of the coordinator, as `HOST:PORT`.
        endpoint: String,
        /// The operating system's error.
        source: std::io::Error,
    },
    /// Something else listens at the endpoint.
    #[error("{endpoint} responds, but is not an everstep coordinator; use another port in --rdzv-endpoint")]
    NotCoordinator {
        /// Endpoint of the coordinator, as `HOST:PORT`.
        endpoint: String,
    },
    /// The endpoint accepted the connection but did not answer in time: something else listens
    /// there, or a coordinator on a busy machine.
    #[error(
        "{endpoint} accepts connections but does not answer; if that is not an everstep coordinator, use another port in --rdzv-endpoint"
    )]
    Silent {
        /// Endpoint of the coordinator, as `HOST:PORT`.
        endpoint: String,
    },
    /// The coordinator rejected the token.
    #[error("{endpoint} refuses this token; use the token file of the coordinator that runs there")]
    Unauthorized {
        /// Endpoint of the coordinator, as `HOST:PORT`.
        endpoint: String,
    },
}

type Body = BoxBody<Bytes, std::convert::Infallible>;

async fn request(endpoint: &str, request: Request<Body>) -> Result<Response<Incoming>, ConnectError> {
    let unreachable = |source| ConnectError::Unreachable { endpoint: endpoint.into(), source };
    let timed_out = || unreachable(std::io::ErrorKind::TimedOut.into());
    let stream = tokio::time::timeout(CONNECT_TIMEOUT, TcpStream::connect(endpoint))
        .await
        .map_err(|_| timed_out())?
        .map_err(unreachable)?;
    let _ = stream.set_nodelay(true);
    // Never send the token to another user of this machine.
    let ends = stream.local_addr().and_then(|local| Ok((local, stream.peer_addr()?)));
    ends.and_then(|(local, peer)| crate::admission::check_peer(local, peer)).map_err(|e| match e.kind() {
        std::io::ErrorKind::PermissionDenied => ConnectError::NotCoordinator { endpoint: endpoint.into() },
        _ => unreachable(e),
    })?;
    let not_ours = |_| ConnectError::NotCoordinator { endpoint: endpoint.into() };
    let handshake = hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(stream));
    let (mut sender, connection) = handshake.await.map_err(not_ours)?;
    tokio::spawn(connection);
    let response = tokio::time::timeout(CONNECT_TIMEOUT, sender.send_request(request))
        .await
        .map_err(|_| ConnectError::Silent { endpoint: endpoint.into() })?
        .map_err(not_ours)?;
    match response.status() {
        StatusCode::OK => Ok(response),
        StatusCode::UNAUTHORIZED => Err(ConnectError::Unauthorized { endpoint: endpoint.into() }),
        // The coordinator is shutting down.
        StatusCode::SERVICE_UNAVAILABLE => Err(unreachable(std::io::ErrorKind::ConnectionAborted.into())),
        _ => Err(ConnectError::NotCoordinator { endpoint: endpoint.into() }),
    }
}

fn build(endpoint: &str, method: &str, path: &str, token: &Token, body: Body) -> Result<Request<Body>, ConnectError> {
    Request::builder()
        .method(method)
        .uri(format!("http://{endpoint}{path}"))
        .header("content-type", "application/json")
        .header("authorization", format!("Bearer {}", token.reveal()))
        .body(body)
        .map_err(|_| ConnectError::NotCoordinator { endpoint: endpoint.into() })
}

/// Sends a request without content and returns the whole answer.
///
/// # Errors
/// See [`ConnectError`].
pub async fn ask(endpoint: &str, method: &str, path: &str, token: &Token) -> Result<Vec<u8>, ConnectError> {
    ask_with(endpoint, method, path, token, &serde_json::Value::Null).await
}

/// Sends a request with JSON content and returns the whole answer.
///
/// # Errors
/// See [`ConnectError`].
pub async fn ask_with(
    endpoint: &str,
    method: &str,
    path: &str,
    token: &Token,
    what: &impl serde::Serialize,
) -> Result<Vec<u8>, ConnectError> {
    let body = Full::new(Bytes::from(serde_json::to_vec(what).unwrap_or_default())).boxed();
    let response = request(endpoint, build(endpoint, method, path, token, body)?).await?;
    let bytes = response.into_body().collect().await;
    bytes.map(|b| b.to_bytes().to_vec()).map_err(|_| ConnectError::NotCoordinator { endpoint: endpoint.into() })
}

/// Opens the long-lived stream. Messages sent into the first channel reach the coordinator. The
/// second channel yields the coordinator's messages, and ends when the connection does.
///
/// # Errors
/// See [`ConnectError`].
pub async fn attach(
    endpoint: &str,
    token: &Token,
) -> Result<(mpsc::UnboundedSender<ToCoordinator>, mpsc::UnboundedReceiver<ToAgent>), ConnectError> {
    let (lines_in, mut lines) = mpsc::unbounded_channel::<ToCoordinator>();
    let (mut frames, body) = http_body_util::channel::Channel::<Bytes, std::convert::Infallible>::new(64);
    tokio::spawn(async move {
        while let Some(line) = lines.recv().await {
            let Ok(bytes) = encode(&line) else { continue };
            if frames.send_data(bytes.into()).await.is_err() {
                return;
            }
        }
    });
    let response = request(endpoint, build(endpoint, "POST", "/v1/attach", token, body.boxed())?).await?;
    let (orders_in, orders) = mpsc::unbounded_channel();
    tokio::spawn(async move {
        let mut body = response.into_body();
        let mut splitter = LineSplitter::default();
        while let Some(Ok(frame)) = body.frame().await {
            let Ok(data) = frame.into_data() else { continue };
            for line in splitter.push(&data) {
                let Some(message) = decode(&line) else { return };
                if orders_in.send(message).is_err() {
                    return;
                }
            }
            if splitter.overflowed() {
                return;
            }
        }
    });
    Ok((lines_in, orders))
}

/// Splits a byte stream into lines.
#[derive(Default)]
pub struct LineSplitter {
    rest: Vec<u8>,
}

impl LineSplitter {
    /// Adds bytes and returns the lines that are now complete.
    pub fn push(&mut self, data: &[u8]) -> Vec<Vec<u8>> {
        // The rest from before contains no newline, so no byte is scanned twice, however small the
        // pieces are.
        let mut scanned = self.rest.len();
        self.rest.extend_from_slice(data);
        let (mut lines, mut begin) = (Vec::new(), 0);
        while let Some(length) = self.rest.iter().skip(scanned).position(|b| *b == b'\n') {
            let end = scanned + length;
            lines.push(self.rest.get(begin..end).unwrap_or_default().to_vec());
            (begin, scanned) = (end + 1, end + 1);
        }
        self.rest.drain(..begin);
        lines
    }

    /// Returns whether an incomplete line is longer than [`FRAME_BYTES_MAX`].
    #[must_use]
    pub fn overflowed(&self) -> bool {
        self.rest.len() > FRAME_BYTES_MAX
    }
}
