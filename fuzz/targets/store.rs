//! Clients of the process-group store (`everstep/tcp_store/`), which serves torch's TCPStore
//! protocol. An input is what two clients send, in pieces: a byte whose lowest bit is the number of
//! the client and whose other bits are the length, followed by that many bytes. Their handshakes
//! come first.
//!
//! Queries must not panic, a client that is gone must not stay, and all bytes that the store holds
//! must be counted, because the count is what limits them.
#![cfg_attr(fuzzing, no_main)]

use everstep::tcp_store::client::converse;
use everstep::tcp_store::keys::Shared;
use everstep_wire::admission::{Admission, Caller};
use std::sync::Arc;
use tokio::io::{AsyncWriteExt, DuplexStream, duplex, sink};
use tokio::runtime::Builder;
use tokio::task::{JoinHandle, yield_now};

everstep_fuzz::target!(check);

/// A `VALIDATE` query, with the number that says that TCPStore is spoken.
const HANDSHAKE: [u8; 5] = [0, 0xce, 0xf7, 0x85, 0x3c];
/// Bytes that a connection holds; more than an input has.
const STREAM_BYTES: usize = 1 << 20;
/// Number of times that a task runs before it waits for a piece: for each client, to read it and to
/// be woken by the other one.
const TURNS: usize = 4;

fn check(input: &[u8]) {
    let runtime = Builder::new_current_thread().enable_time().build().expect("a runtime needs no resources");
    let shared = Arc::new(Shared::default());
    runtime.block_on(exchange(input, &shared));
    shared.audit().expect("all bytes are counted");
}

async fn exchange(mut input: &[u8], shared: &Arc<Shared>) {
    let (admission, mut streams, mut clients) = (Admission::default(), Vec::new(), Vec::new());
    for _ in 0..2 {
        let (stream, client) = connect(&admission, shared.clone());
        streams.push(stream);
        clients.push(client);
        send(&mut streams, clients.len() - 1, &HANDSHAKE).await;
    }
    while let Some((head, rest)) = input.split_first() {
        let (piece, rest) = rest.split_at(usize::from(head >> 1).min(rest.len()));
        send(&mut streams, usize::from(head & 1), piece).await;
        input = rest;
    }
    drop(streams);
    for client in clients {
        client.await.expect("a client does not panic");
    }
}

fn connect(admission: &Admission, shared: Arc<Shared>) -> (DuplexStream, JoinHandle<()>) {
    let (near, far) = duplex(STREAM_BYTES);
    let pass = admission.admit(Caller::Own).expect("the first connections are admitted");
    let client = tokio::spawn(async move {
        // An error ends the connection.
        let _ = converse(far, sink(), shared, pass).await;
    });
    (near, client)
}

async fn send(streams: &mut [DuplexStream], client: usize, piece: &[u8]) {
    if let Some(stream) = streams.get_mut(client) {
        // The store may have closed the connection.
        let _ = stream.write_all(piece).await;
    }
    for _ in 0..TURNS {
        yield_now().await;
    }
}
