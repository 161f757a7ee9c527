//! What a job asks for while it handles one event.

use super::command::{Command, Fact};
use crate::id::{JobId, PersistId, Session};
use crate::message::Order;

/// The commands of one job, in order.
#[derive(Debug)]
pub(super) struct Output {
    job: JobId,
    commands: Vec<Command>,
}

impl Output {
    /// Returns an output without commands.
    pub(super) fn new(job: JobId) -> Self {
        Output { job, commands: Vec::new() }
    }

    /// Records a fact for people.
    pub(super) fn record(&mut self, fact: Fact) {
        self.commands.push(Command::Record { job: self.job.clone(), fact });
    }

    /// Sends an order now.
    pub(super) fn send(&mut self, session: Session, order: Order) {
        self.send_after(None, session, order);
    }

    /// Sends an order when this write has succeeded.
    pub(super) fn send_after(&mut self, after: Option<PersistId>, session: Session, order: Order) {
        self.commands.push(Command::Send { session, order, after });
    }

    /// Sends an order to each of these connections now.
    pub(super) fn send_each(&mut self, sessions: impl IntoIterator<Item = Session>, order: &Order) {
        for session in sessions {
            self.send(session, order.clone());
        }
    }

    /// Shows a sentence on the console of an agent.
    pub(super) fn notice(&mut self, session: Session, what: String) {
        self.send(session, Order::Notice { what });
    }

    /// Returns the facts so far.
    pub(super) fn facts(&self) -> impl Iterator<Item = &Fact> {
        self.commands.iter().filter_map(|c| if let Command::Record { fact, .. } = c { Some(fact) } else { None })
    }

    /// Returns the commands.
    pub(super) fn into_commands(self) -> Vec<Command> {
        self.commands
    }
}
