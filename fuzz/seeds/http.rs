//! What clients send to the coordinator's server. HTTP/2 is recorded from the client of `wire`;
//! HTTP/1, which only other programs speak, is written here.

use crate::{Seeds, wire};
use everstep_core::id::Generation;
use everstep_core::injection::{Injected, Injection};
use everstep_fuzz::coordinator::{JOB, TOKEN, answer};
use everstep_wire::admission::{Admission, Caller};
use everstep_wire::client::{ask_with, attach};
use everstep_wire::envelope::{ToCoordinator, encode};
use everstep_wire::server::{converse, router};
use everstep_wire::token::Token;
use serde_json::{Value, json};
use std::error::Error;
use std::io;
use tokio::io::{AsyncReadExt, AsyncWriteExt, copy, duplex, split};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

/// A fixed port, because requests contain it.
const ENDPOINT: &str = "127.0.0.1:29517";
/// Bytes that a connection holds in each direction.
const STREAM_BYTES: usize = 64 << 10;

pub fn requests() -> Result<Seeds, Box<dyn Error>> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let mut seeds = plain()?;
    let injection = Injection { fault: Injected::Xid { code: 79 }, rank: 0, milliseconds: 0 };
    let posts = [
        ("h2-status", "GET", "/v1/status".to_owned(), Value::Null),
        ("h2-stop", "POST", format!("/v1/jobs/{JOB}/stop"), Value::Null),
        ("h2-inject", "POST", format!("/v1/jobs/{JOB}/inject"), serde_json::to_value(injection)?),
        ("h2-approve", "POST", format!("/v1/jobs/{JOB}/approve"), json!({"request": 1})),
    ];
    for (name, method, path, body) in posts {
        seeds.push((name, runtime.block_on(recorded(method, &path, &body))?));
    }
    seeds.push(("h2-attach", runtime.block_on(attached())?));
    Ok(seeds)
}

/// Returns requests in HTTP/1.
fn plain() -> serde_json::Result<Seeds> {
    let request = |line: &str, token: &str, rest: &str| {
        format!("{line} HTTP/1.1\r\nhost: c\r\nauthorization: Bearer {token}\r\n{rest}").into_bytes()
    };
    let line = encode(&wire::greeting())?;
    let chunk = [format!("{:x}\r\n", line.len()).as_bytes(), &line, b"\r\n0\r\n\r\n"].concat();
    let head = request("POST /v1/attach", TOKEN, "transfer-encoding: chunked\r\n\r\n");
    let body = r#"{"request":1}"#;
    let json = format!("content-type: application/json\r\ncontent-length: {}\r\n\r\n{body}", body.len());
    let two = [request("GET /metrics", TOKEN, "\r\n"), request("GET /v1/status", TOKEN, "connection: close\r\n\r\n")];
    Ok(vec![
        ("h1-two-requests", two.concat()),
        ("h1-approve", request(&format!("POST /v1/jobs/{JOB}/approve"), TOKEN, &json)),
        ("h1-stacks", request("POST /v1/jobs/other/stacks", TOKEN, "content-length: 0\r\n\r\n")),
        ("h1-wrong-secret", request("GET /v1/status", "guess", "\r\n")),
        ("h1-attach", [head, chunk].concat()),
    ])
}

/// Records one request of the client and the end of its connection.
async fn recorded(method: &str, path: &str, body: &Value) -> Result<Vec<u8>, Box<dyn Error>> {
    let recorder = recorder().await?;
    ask_with(ENDPOINT, method, path, &Token::from_text(TOKEN), body).await?;
    Ok(recorder.await??)
}

/// Records the stream of an agent: its greeting, and a keep-alive after the answer.
async fn attached() -> Result<Vec<u8>, Box<dyn Error>> {
    let recorder = recorder().await?;
    let (lines, mut orders) = attach(ENDPOINT, &Token::from_text(TOKEN)).await?;
    lines.send(wire::greeting())?;
    orders.recv().await.ok_or("the coordinator does not answer")?;
    lines.send(ToCoordinator::Ping { generation: Generation(0), ranks: Vec::new() })?;
    orders.recv().await.ok_or("the coordinator does not answer")?;
    drop((lines, orders));
    Ok(recorder.await??)
}

/// Serves one connection, and returns what its client has sent.
async fn recorder() -> io::Result<JoinHandle<io::Result<Vec<u8>>>> {
    let listener = TcpListener::bind(ENDPOINT).await?;
    Ok(tokio::spawn(async move { record(listener.accept().await?.0).await }))
}

async fn record(stream: TcpStream) -> io::Result<Vec<u8>> {
    let (inbox, requests) = mpsc::unbounded_channel();
    tokio::spawn(answer(requests));
    let (near, far) = duplex(STREAM_BYTES);
    let pass = Admission::default().admit(Caller::Own).ok_or(io::ErrorKind::ConnectionRefused)?;
    tokio::spawn(converse(far, router(Token::from_text(TOKEN), inbox), pass));
    let ((mut from, mut to), (mut answers, mut requests)) = (stream.into_split(), split(near));
    tokio::spawn(async move { copy(&mut answers, &mut to).await });
    let (mut sent, mut piece) = (Vec::new(), vec![0; STREAM_BYTES]);
    loop {
        let length = from.read(&mut piece).await?;
        let Some(piece) = piece.get(..length).filter(|piece| !piece.is_empty()) else { return Ok(sent) };
        sent.extend_from_slice(piece);
        requests.write_all(piece).await?;
    }
}
