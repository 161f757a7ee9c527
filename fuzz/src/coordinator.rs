//! A stand-in for the coordinator behind its server.

use everstep_core::id::{Epoch, Incarnation, NodeId};
use everstep_core::message::Order;
use everstep_wire::envelope::{ToAgent, ToCoordinator};
use everstep_wire::output::CoordinatorStatus;
use everstep_wire::server::{ApproveError, Inbound, InjectError};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender};

/// The token of its requests. It is short, so that mutations keep it.
pub const TOKEN: &str = "token";
/// The only job that it knows.
pub const JOB: &str = "job";

/// Answers requests until the server is gone, and returns the number of requests.
pub async fn answer(mut inbox: UnboundedReceiver<Inbound>) -> usize {
    let mut requests = 0;
    while let Some(request) = inbox.recv().await {
        requests += 1;
        // Nobody listens if the connection is gone.
        match request {
            Inbound::Attached { orders, lines } => {
                tokio::spawn(converse(orders, lines));
            }
            Inbound::Status(done) => drop(done.send(status())),
            Inbound::Metrics(done) => drop(done.send("# EOF\n".into())),
            Inbound::Stop { job, done } | Inbound::Stacks { job, done } => drop(done.send(job == JOB)),
            Inbound::Approve { job, request, done } => {
                let known = job == JOB;
                let _ = done.send(known.then(|| format!("request {request}")).ok_or(ApproveError::UnknownJob { job }));
            }
            Inbound::Inject { job, injection, done } => {
                let known = job == JOB;
                let node = known.then(|| NodeId(format!("{injection:?}")));
                let _ = done.send(node.ok_or(InjectError::UnknownJob { job }));
            }
        }
    }
    requests
}

fn status() -> CoordinatorStatus {
    CoordinatorStatus { version: 1, epoch: Epoch(1), pid: 1, endpoint: String::new(), jobs: Vec::new() }
}

/// Sends an order for each message of an agent.
async fn converse(orders: UnboundedSender<ToAgent>, mut lines: UnboundedReceiver<ToCoordinator>) {
    while let Some(message) = lines.recv().await {
        let epoch = Epoch(1);
        let order = match message {
            ToCoordinator::Hello { .. } => {
                ToAgent::Order { epoch, order: Order::Welcome { epoch, began: Incarnation(1) } }
            }
            ToCoordinator::Report(_) => ToAgent::Stacks,
            _ => ToAgent::Ping,
        };
        if orders.send(order).is_err() {
            return;
        }
    }
}
