//! What the log says about the protocol between a coordinator and its agents, and about what an
//! agent does: at debug, and at trace what recurs with every step.

use everstep_core::agent::command::{Command, CrewCommand};
use everstep_core::message::{CrewOrder, CrewReport, Order, Report};
use std::fmt::{self, Debug, Display, Write};

/// Characters of a message's content that are kept.
const LENGTH_MAX: usize = 400;

/// The beginning of what a value looks like. Nothing is formatted unless it is written.
struct Brief<'a, T>(&'a T);

/// Passes on a limited number of characters, then fails.
struct Limited<'a, 'b> {
    to: &'a mut fmt::Formatter<'b>,
    left: usize,
}

impl Write for Limited<'_, '_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let end = text.char_indices().nth(self.left).map_or(text.len(), |(at, _)| at);
        let (kept, rest) = text.split_at(end);
        self.left -= kept.chars().count();
        self.to.write_str(kept)?;
        if rest.is_empty() { Ok(()) } else { Err(fmt::Error) }
    }
}

impl<T: Debug> Display for Brief<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let whole = write!(Limited { to: f, left: LENGTH_MAX }, "{:?}", self.0).is_ok();
        if whole { Ok(()) } else { f.write_char('…') }
    }
}

fn note(recurs: bool, what: &str, content: &impl Debug) {
    let content = Brief(content);
    if recurs {
        tracing::trace!("{what}: {content}");
    } else {
        tracing::debug!("{what}: {content}");
    }
}

/// An order of the coordinator, sent or received.
pub fn order(order: &Order) {
    let recurs = |order: &CrewOrder| {
        matches!(order, CrewOrder::Replicate { .. } | CrewOrder::Committed { .. } | CrewOrder::Durable(_))
    };
    note(matches!(order, Order::Crew(_, order) if recurs(order)), "order", order);
}

/// A report of an agent, sent or received.
pub fn report(report: &Report) {
    let recurs = |report: &CrewReport| matches!(report, CrewReport::Sealed(_) | CrewReport::Replicated(_));
    note(matches!(report, Report::Crew(_, report) if recurs(report)), "report", report);
}

/// Something that an agent does.
pub fn command(command: &Command) {
    let recurs = |command: &CrewCommand| {
        matches!(command, CrewCommand::Replicate { .. } | CrewCommand::Committed { .. } | CrewCommand::Durable(_))
    };
    match command {
        Command::Send(sent) => report(sent),
        Command::Crew(_, of_crew) => note(recurs(of_crew), "does", command),
        _ => note(false, "does", command),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_values_are_cut_between_characters() {
        let text = "é".repeat(LENGTH_MAX);
        let brief = Brief(&text).to_string();
        assert_eq!(brief.chars().count(), LENGTH_MAX + 1);
        assert!(brief.ends_with('…') && brief.starts_with("\"é"));
        assert_eq!(Brief(&7).to_string(), "7");
    }
}
