//! The coordinator's HTTP server (`wire/server.rs`). An input is everything that one client sends,
//! in HTTP/1 or HTTP/2; then it closes its end.
//!
//! The server must not panic, must close the connection after the client has done so, and must pass
//! on no request of a client that does not present the token.
#![cfg_attr(fuzzing, no_main)]

use everstep_fuzz::coordinator::{TOKEN, answer};
use everstep_wire::admission::{Admission, Caller};
use everstep_wire::server::{converse, router};
use everstep_wire::token::Token;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex, split};
use tokio::runtime::Builder;
use tokio::sync::mpsc;
use tokio::time::timeout;

everstep_fuzz::target!(check);

/// Bytes that a connection holds in each direction.
const STREAM_BYTES: usize = 64 << 10;
/// Time after which a connection counts as left open. The clock only moves while all tasks wait.
const PATIENCE: Duration = Duration::from_mins(1);

fn check(input: &[u8]) {
    let mut runtime = Builder::new_current_thread();
    let runtime = runtime.enable_time().start_paused(true).build().expect("a runtime needs no resources");
    let requests = runtime.block_on(requests(input.to_vec()));
    // HTTP/2 compresses headers, so that the token need not be visible there.
    let hidden = input.starts_with(b"PRI") || input.windows(TOKEN.len()).any(|w| w == TOKEN.as_bytes());
    assert!(requests == 0 || hidden, "{requests} requests without the token");
}

/// Sends what a client sends, and returns the number of requests that reach the coordinator.
async fn requests(sent: Vec<u8>) -> usize {
    let (inbox, received) = mpsc::unbounded_channel();
    let coordinator = tokio::spawn(answer(received));
    let (client, server) = duplex(STREAM_BYTES);
    let pass = Admission::default().admit(Caller::Own).expect("the first connection is admitted");
    let served = tokio::spawn(converse(server, router(Token::from_text(TOKEN), inbox), pass));
    let (mut answers, mut client) = split(client);
    tokio::spawn(async move {
        // The server may close first.
        let _ = client.write_all(&sent).await;
        let _ = client.shutdown().await;
    });
    let mut text = Vec::new();
    let read = timeout(PATIENCE, answers.read_to_end(&mut text)).await;
    assert!(read.is_ok(), "the connection stays open after its client has gone");
    timeout(PATIENCE, served).await.expect("a connection ends").expect("a connection does not panic");
    let coordinator = timeout(PATIENCE, coordinator).await;
    coordinator.expect("requests end with their connection").expect("the coordinator does not panic")
}
