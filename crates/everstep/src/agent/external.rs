//! An agent for workers that torchrun's own agent runs: only the rendezvous is ours (entry point
//! `torchrun.handlers`, `python/everstep/torchrun.py`).
//!
//! Lines on standard input: `next` (the previous workers are gone and a place in a world is
//! wanted), `done`, `failed`. Each line on standard output is a [`Notice`] in JSON. Decisions are
//! made by the same state machine as in every agent.

use super::Input;
use super::connection::{self, Target};
use crate::listening::Place;
use crate::tcp_store::PgStore;
use everstep_core::agent::command::{Command, CrewCommand};
use everstep_core::agent::event::{CrewEvent, Event, WorkerExit};
use everstep_core::agent::{Agent, Config};
use everstep_core::exit_code::ExitCode;
use everstep_core::id::Generation;
use everstep_core::message::{Outcome, Start};
use everstep_core::time::Time;
use everstep_wire::envelope::{ToAgent, ToCoordinator, VERSION};
use serde::Serialize;
use std::time::{Duration, Instant};
use tokio::io::AsyncBufReadExt;
use tokio::sync::mpsc;

/// A line for `python/everstep/torchrun.py`, which tells the variants apart by their fields.
#[derive(Serialize)]
#[serde(untagged)]
enum Notice<'a> {
    /// A place in a world.
    Place { generation: Generation, host: &'a str, port: u16, rank: u32, world_size: u32 },
    /// The world is about to be formed anew.
    Waiting { waiting: bool },
    /// This node takes no further part.
    End { end: i32, why: &'a str },
}

struct External {
    core: Agent,
    start: Instant,
    link: Option<mpsc::UnboundedSender<ToCoordinator>>,
    store: PgStore,
    /// The generation whose workers torchrun's agent runs.
    running: Option<Generation>,
    /// The generation whose workers must end before anything else happens.
    to_end: Option<Generation>,
    /// torchrun's agent has ended its workers: it wants the next place, or none.
    stopped: bool,
    end: Option<i32>,
}

/// Takes part until the job is over or torchrun's agent is gone.
///
/// # Errors
/// Fails if the process-group store cannot listen.
pub async fn run(mut config: Config, place: Place, target: Target) -> std::io::Result<i32> {
    let (inbox, mut inputs) = mpsc::unbounded_channel();
    let store = PgStore::start(&place, 0, None).await?;
    config.store_port = store.port();
    let ladder = config.spec.ladder();
    tokio::spawn(connection::run(target, inbox));
    let mut lines = tokio::io::BufReader::new(tokio::io::stdin()).lines();
    let mut ping = tokio::time::interval(ladder.ping);
    let mut external = External {
        core: Agent::new(config, Time(0)),
        start: Instant::now(),
        link: None,
        store,
        running: None,
        to_end: None,
        stopped: true,
        end: None,
    };
    while external.end.is_none() {
        let deadline = external.core.deadline();
        let deadline = deadline.map_or(Duration::from_hours(1), |at| at.since(external.now()));
        tokio::select! {
            input = inputs.recv() => external.input(input).await,
            line = lines.next_line() => match line? {
                Some(line) => external.line(&line).await,
                // torchrun's agent ended without a message: this node is lost.
                None => return Ok(ExitCode::Failed.number()),
            },
            () = tokio::time::sleep(deadline) => external.event(Event::Tick).await,
            _ = ping.tick() => if let Some(link) = &external.link {
                let _ = link.send(ToCoordinator::Ping { generation: Generation(0), ranks: Vec::new() });
            },
        }
    }
    Ok(external.end.unwrap_or(ExitCode::Failed.number()))
}

impl Notice<'_> {
    fn send(&self) {
        use std::io::Write;
        let mut out = std::io::stdout().lock();
        let line = serde_json::to_string(self).map_err(std::io::Error::from);
        let _ = line.and_then(|line| writeln!(out, "{line}")).and_then(|()| out.flush());
    }
}

impl External {
    fn now(&self) -> Time {
        Time(u64::try_from(self.start.elapsed().as_millis()).unwrap_or(u64::MAX))
    }

    async fn input(&mut self, input: Option<Input>) {
        match input {
            Some(Input::Connected(lines)) => {
                let hello = Box::new(self.core.hello());
                let _ = lines.send(ToCoordinator::Hello { version: VERSION, hello });
                self.link = Some(lines);
                self.event(Event::Connected).await;
            }
            Some(Input::Disconnected) => {
                self.link = None;
                self.event(Event::Disconnected).await;
            }
            Some(Input::Line(ToAgent::Order { epoch, order })) => self.event(Event::Order { epoch, order }).await,
            Some(Input::Fatal { code, why }) => self.over(code, &why),
            _ => {}
        }
    }

    fn over(&mut self, code: i32, why: &str) {
        Notice::End { end: code, why }.send();
        self.end = Some(code);
    }

    async fn line(&mut self, line: &str) {
        match line {
            "done" | "failed" => {
                self.stopped = true;
                self.exited(Outcome::Code(i32::from(line == "failed"))).await;
            }
            _ => {
                self.stopped = true;
                // It asks for a new world while the old one runs, so its workers have failed here.
                if self.running.is_some() && self.to_end.is_none() {
                    self.exited(Outcome::Code(1)).await;
                }
                self.gone().await;
            }
        }
    }

    async fn exited(&mut self, outcome: Outcome) {
        let Some(generation) = self.running else { return };
        let message = "reported by its torchrun agent".to_owned();
        self.event(Event::Crew(
            generation,
            CrewEvent::WorkerExited(WorkerExit { local_rank: 0, pid: 0, outcome, asked: false, words: message.into() }),
        ))
        .await;
    }

    /// Reports that the workers to be ended are gone: only then does torchrun's agent ask for a
    /// world.
    async fn gone(&mut self) {
        let Some(generation) = self.to_end.take() else { return };
        self.running = None;
        if let Err(e) = self.store.renew().await {
            return self.over(ExitCode::Failed.number(), &format!("no port for the process-group store: {e}"));
        }
        let store_port = self.store.port();
        self.event(Event::Crew(generation, CrewEvent::WorkersGone { store_port })).await;
    }

    async fn event(&mut self, event: Event) {
        self.core.handle(self.now(), event);
        let mut gone = false;
        while let Some(command) = self.core.poll() {
            match command {
                Command::Send(report) => {
                    if let Some(link) = &self.link {
                        let _ = link.send(ToCoordinator::Report(report));
                    }
                }
                Command::Crew(generation, CrewCommand::Spawn(Start { place, .. })) => {
                    self.running = Some(generation);
                    self.stopped = false;
                    self.store.open();
                    let notice = Notice::Place {
                        generation,
                        host: &place.leader_host,
                        port: place.leader_port,
                        rank: place.group_rank,
                        world_size: place.group_world_size,
                    };
                    notice.send();
                }
                Command::Crew(generation, CrewCommand::Kill { .. }) => {
                    self.to_end = Some(generation);
                    gone = self.stopped;
                    Notice::Waiting { waiting: true }.send();
                }
                Command::Exit { reason, .. } => self.over(reason.code, &reason.why),
                _ => {}
            }
        }
        if gone {
            Box::pin(self.gone()).await;
        }
    }
}
