//! The coordinator's end: long-lived streams from agents, and requests from the command line.

use crate::admission::{self, Admission, Pass, Trouble};
use crate::client::LineSplitter;
use crate::envelope::{ToAgent, ToCoordinator, decode, decode_first, encode};
use crate::limits::{HTTP_HEADER_BYTES_MAX, HTTP_STREAMS_MAX, PROOF_TIMEOUT};
use crate::output::{Approval, Approved, CoordinatorStatus, FIRST, InjectAnswer};
use crate::token::Token;
use axum::body::{Body, Bytes};
use axum::extract::{Path, Request, State};
use axum::http::{StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Extension, Json, Router};
use everstep_core::coordinator::request::NotApproved;
use everstep_core::id::NodeId;
use everstep_core::injection::Injection;
use futures_util::StreamExt;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto::Builder;
use hyper_util::service::TowerToHyperService;
use serde::Serialize;
use std::sync::Arc;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
use tokio::sync::{Notify, mpsc, oneshot};

/// Why a request is not answered any more.
const ENDING: &str = "the coordinator is ending";

/// Why a request about machines was not approved.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ApproveError {
    #[error("this coordinator has no job {job}")]
    UnknownJob { job: String },
    #[error(transparent)]
    Request(#[from] NotApproved),
}

/// Why no fault was injected.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InjectError {
    #[error("this coordinator has no job {job}")]
    UnknownJob { job: String },
    #[error("job {job} has no rank {rank} in training")]
    NoRank { job: String, rank: u32 },
    #[error("node {node} is not attached")]
    NotAttached { node: NodeId },
}

/// Input for the coordinator's driver.
pub enum Inbound {
    /// An agent opened a stream. Messages sent into `orders` reach it; dropping `orders` closes the
    /// stream.
    Attached {
        /// Sends messages to the agent.
        orders: mpsc::UnboundedSender<ToAgent>,
        /// Messages from the agent; ends when the connection does.
        lines: mpsc::UnboundedReceiver<ToCoordinator>,
    },
    /// A request for the status of all jobs.
    Status(oneshot::Sender<CoordinatorStatus>),
    /// A request for Prometheus metrics.
    Metrics(oneshot::Sender<String>),
    /// A request to stop a job.
    Stop {
        /// Name of the job.
        job: String,
        /// Receives whether the job is known.
        done: oneshot::Sender<bool>,
    },
    /// A request for the stacks of a job's workers.
    Stacks {
        /// Name of the job.
        job: String,
        /// Receives whether the job is known.
        done: oneshot::Sender<bool>,
    },
    /// A person approves a request about machines.
    Approve {
        /// Name of the job.
        job: String,
        /// Number of the request within the job.
        request: u64,
        /// Receives what was approved, or the reason why it was not.
        done: oneshot::Sender<Result<String, ApproveError>>,
    },
    /// A request to inject a fault.
    Inject {
        /// Name of the job.
        job: String,
        /// The fault to inject.
        injection: Injection,
        /// Receives the node, or the reason why nothing was injected.
        done: oneshot::Sender<Result<NodeId, InjectError>>,
    },
}

#[derive(Clone)]
struct Shared {
    inbox: mpsc::UnboundedSender<Inbound>,
    token: Token,
}

/// Serves until the process ends. `report` receives a message when accepting fails.
pub async fn serve(listener: TcpListener, token: Token, inbox: mpsc::UnboundedSender<Inbound>, report: fn(&str)) {
    let router = router(token, inbox);
    let (admission, mut trouble) = (Admission::default(), Trouble::default());
    loop {
        let (stream, peer) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(e) => {
                let (pause, line) = trouble.failed("from agents", &e);
                line.as_deref().into_iter().for_each(report);
                tokio::time::sleep(pause).await;
                continue;
            }
        };
        trouble.over();
        let Ok(local) = stream.local_addr() else { continue };
        let Some(pass) = admission.admit(admission::caller(local, peer)) else { continue };
        let _ = stream.set_nodelay(true);
        tokio::spawn(converse(stream, router.clone(), pass));
    }
}

/// Returns the service that answers requests which present the token.
pub fn router(token: Token, inbox: mpsc::UnboundedSender<Inbound>) -> Router {
    let shared = Shared { inbox, token };
    Router::new()
        .route("/v1/attach", post(attach))
        .route("/v1/status", get(status))
        .route("/metrics", get(metrics))
        .route("/v1/jobs/{job}/stop", post(stop))
        .route("/v1/jobs/{job}/stacks", post(stacks))
        .route("/v1/jobs/{job}/inject", post(inject))
        .route("/v1/jobs/{job}/approve", post(approve))
        .layer(middleware::from_fn_with_state(shared.clone(), authorize))
        .with_state(shared)
}

/// Notifies the connection that one of its requests has presented the token.
#[derive(Clone, Default)]
struct Proof(Arc<Notify>);

/// Serves one connection. It is closed after [`PROOF_TIMEOUT`] unless a request has presented the
/// token.
pub async fn converse(stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static, router: Router, pass: Pass) {
    let proof = Proof::default();
    let service = TowerToHyperService::new(router.layer(Extension(proof.clone())));
    let mut builder = Builder::new(TokioExecutor::new());
    builder.http1().timer(TokioTimer::new()).header_read_timeout(PROOF_TIMEOUT).max_buf_size(HTTP_HEADER_BYTES_MAX);
    let mut streams = builder.http2();
    streams.max_concurrent_streams(HTTP_STREAMS_MAX).max_header_list_size(HTTP_HEADER_BYTES_MAX as u32);
    let connection = builder.serve_connection(TokioIo::new(stream), service);
    tokio::pin!(connection);
    tokio::select! {
        _ = &mut connection => return,
        () = proof.0.notified() => drop(pass),
        () = tokio::time::sleep(PROOF_TIMEOUT) => return,
    }
    let _ = connection.await;
}

async fn authorize(State(shared): State<Shared>, request: Request, next: Next) -> Response {
    let given = request.headers().get(header::AUTHORIZATION).and_then(|v| v.to_str().ok());
    match given.and_then(|v| v.strip_prefix("Bearer ")) {
        Some(token) if shared.token.matches(token) => {
            if let Some(Proof(shown)) = request.extensions().get() {
                shown.notify_one();
            }
            next.run(request).await
        }
        _ => (StatusCode::UNAUTHORIZED, "a token is needed: Authorization: Bearer …\n").into_response(),
    }
}

async fn attach(State(shared): State<Shared>, request: Request) -> Response {
    let (lines_in, lines) = mpsc::unbounded_channel();
    let (orders, mut orders_out) = mpsc::unbounded_channel::<ToAgent>();
    if shared.inbox.send(Inbound::Attached { orders, lines }).is_err() {
        return StatusCode::SERVICE_UNAVAILABLE.into_response();
    }
    tokio::spawn(async move {
        let mut body = request.into_body().into_data_stream();
        let mut splitter = LineSplitter::default();
        let mut first = true;
        while let Some(Ok(data)) = body.next().await {
            for line in splitter.push(&data) {
                let message = if std::mem::take(&mut first) { decode_first(&line) } else { decode(&line) };
                let Some(message) = message else { return };
                if lines_in.send(message).is_err() {
                    return;
                }
            }
            if splitter.overflowed() {
                return;
            }
        }
    });
    let stream = async_lines(move |cx| orders_out.poll_recv(cx));
    Response::new(Body::from_stream(stream))
}

fn async_lines(
    mut poll: impl FnMut(&mut std::task::Context<'_>) -> std::task::Poll<Option<ToAgent>> + Send + 'static,
) -> impl futures_util::Stream<Item = Result<Bytes, std::io::Error>> + Send {
    futures_util::stream::poll_fn(move |cx| {
        poll(cx).map(|next| {
            next.map(|order| {
                let bytes = encode(&order).map_err(std::io::Error::other)?;
                Ok(bytes.into())
            })
        })
    })
}

async fn status(State(shared): State<Shared>) -> Response {
    let (answer, value) = oneshot::channel();
    let _ = shared.inbox.send(Inbound::Status(answer));
    match value.await {
        Ok(value) => Json(value).into_response(),
        Err(_) => StatusCode::SERVICE_UNAVAILABLE.into_response(),
    }
}

/// Returns the metrics as OpenMetrics text.
async fn metrics(State(shared): State<Shared>) -> Response {
    let (answer, page) = oneshot::channel();
    let _ = shared.inbox.send(Inbound::Metrics(answer));
    match page.await {
        Ok(page) => {
            let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
            ([(header::CONTENT_TYPE, kind)], page).into_response()
        }
        Err(_) => StatusCode::SERVICE_UNAVAILABLE.into_response(),
    }
}

/// The answer to a request for stacks, if the job is known.
#[derive(Serialize)]
struct StacksAnswer {
    /// The job's agents were asked. The stacks arrive later, in the event log.
    asked: bool,
}

async fn stacks(State(shared): State<Shared>, Path(job): Path<String>) -> Response {
    let (done, known) = oneshot::channel();
    let _ = shared.inbox.send(Inbound::Stacks { job, done });
    match known.await {
        Ok(true) => Json(StacksAnswer { asked: true }).into_response(),
        _ => StatusCode::NOT_FOUND.into_response(),
    }
}

async fn approve(
    State(shared): State<Shared>,
    Path(job): Path<String>,
    Json(Approval { request }): Json<Approval>,
) -> Json<Approved> {
    let (done, answer) = oneshot::channel();
    let _ = shared.inbox.send(Inbound::Approve { job, request, done });
    Json(match answer.await {
        Ok(Ok(what)) => Approved::Approved(what),
        Ok(Err(why)) => Approved::Why(why.to_string()),
        Err(_) => Approved::Why(ENDING.to_owned()),
    })
}

async fn inject(
    State(shared): State<Shared>,
    Path(job): Path<String>,
    Json(injection): Json<Injection>,
) -> Json<InjectAnswer> {
    let (done, answer) = oneshot::channel();
    let _ = shared.inbox.send(Inbound::Inject { job, injection, done });
    let why = |why| InjectAnswer { version: FIRST, injected: false, node: None, why: Some(why) };
    Json(match answer.await {
        Ok(Ok(node)) => InjectAnswer { version: FIRST, injected: true, node: Some(node), why: None },
        Ok(Err(error)) => why(error.to_string()),
        Err(_) => why(ENDING.to_owned()),
    })
}

/// The answer to a request to stop a job, if it is known.
#[derive(Serialize)]
struct StopAnswer {
    stopping: bool,
}

async fn stop(State(shared): State<Shared>, Path(job): Path<String>) -> Response {
    let (done, known) = oneshot::channel();
    let _ = shared.inbox.send(Inbound::Stop { job, done });
    match known.await {
        Ok(true) => Json(StopAnswer { stopping: true }).into_response(),
        _ => StatusCode::NOT_FOUND.into_response(),
    }
}
