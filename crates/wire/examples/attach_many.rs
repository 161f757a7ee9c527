//! Many agents from one process: attaches N nodes to a coordinator, and measures how long after the
//! last join every one of them has its place in the world. `attach_many ENDPOINT TOKEN_FILE N`;
//! prints JSON.

use everstep_core::id::{Generation, Incarnation, JobId, NodeId};
use everstep_core::message::{CrewOrder, Hello, Order};
use everstep_core::spec::{JobSpec, RestartBudget};
use everstep_wire::client::attach;
use everstep_wire::envelope::{ToAgent, ToCoordinator, VERSION};
use everstep_wire::token::Token;
use std::time::{Duration, Instant};
use tokio::sync::mpsc;

fn hello(node: u32, nodes: u32) -> Box<Hello> {
    Box::new(Hello {
        node: NodeId(node.to_string()),
        incarnation: Incarnation(1),
        spec: JobSpec {
            job: JobId("scale".into()),
            nodes_min: nodes,
            nodes_max: nodes,
            node_unit: 1,
            spares: 0,
            restarts: RestartBudget::Exactly(0),
            detect_timeout_ms: 30_000,
            join_timeout_ms: 600_000,
            policy: everstep_core::spec::Policy::Observe,
            check: everstep_core::spec::CheckWhen::OnTrouble,
        },
        host: format!("10.0.{}.{}", node / 256, node % 256),
        workers: 8,
        store_port: 29_500,
        replica_port: 0,
        domain: String::new(),
        role: String::new(),
        seen: Generation(0),
        began: None,
        running: None,
        stop: None,
        shutdown_grace_ms: 0,
    })
}

/// Keeps the stream open, and tells when the place in the world has come.
async fn wait_for_place(mut orders: mpsc::UnboundedReceiver<ToAgent>, done: mpsc::UnboundedSender<Instant>) {
    while let Some(line) = orders.recv().await {
        if let ToAgent::Order { order: Order::Crew(_, CrewOrder::Start(_)), .. } = line {
            let _ = done.send(Instant::now());
        }
    }
}

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let [_, endpoint, token, nodes] = &arguments[..] else {
        eprintln!("usage: attach_many ENDPOINT TOKEN_FILE NODES");
        std::process::exit(2);
    };
    let token = Token::read(std::path::Path::new(token)).expect("a token file with mode 0600");
    let nodes: u32 = nodes.parse().expect("a number of nodes");
    let (done, mut places) = mpsc::unbounded_channel();
    let mut lines = Vec::new();
    let began = Instant::now();
    for node in 0..nodes {
        let (line, orders) = attach(endpoint, &token).await.expect("a coordinator that answers");
        tokio::spawn(wait_for_place(orders, done.clone()));
        let _ = line.send(ToCoordinator::Hello { version: VERSION, hello: hello(node, nodes) });
        lines.push(line);
    }
    let sent = Instant::now();
    let mut latest = began;
    for _ in 0..nodes {
        match tokio::time::timeout(Duration::from_mins(1), places.recv()).await {
            Ok(Some(at)) => latest = latest.max(at),
            _ => {
                eprintln!("not every node was given a place within 60 s");
                std::process::exit(1);
            }
        }
    }
    println!(
        "{{\"nodes\": {nodes}, \"from_last_join\": {:.4}, \"from_first_join\": {:.4}}}",
        latest.duration_since(sent).as_secs_f64(),
        latest.duration_since(began).as_secs_f64()
    );
}
