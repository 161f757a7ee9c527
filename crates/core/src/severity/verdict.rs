//! The step from the evidence of one failure to its class.

use super::table::{Class, Scope, Severity, Table};
use crate::message::{Cause, Outcome};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The class of one failure, with all that people are told about it, so that nobody needs the table
/// it came from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Verdict {
    /// Name of the class.
    pub class: String,
    /// What is at fault.
    pub scope: Scope,
    /// What is tried first.
    pub severity: Severity,
    /// Whether it mostly follows from a failure somewhere else.
    pub follows: bool,
    /// What happened, as half a sentence.
    pub what: String,
    /// What a person can do, as a sentence.
    pub advice: String,
    /// The line that shows it; empty if the class does not come from a text.
    pub line: String,
}

impl Verdict {
    pub(super) fn of(class: &Class, line: &str) -> Self {
        Verdict {
            class: class.name.clone(),
            scope: class.scope,
            severity: class.severity,
            follows: class.follows,
            what: class.what.clone(),
            advice: class.advice.clone(),
            line: line.chars().take(LINE_MAX).collect(),
        }
    }
}

impl Verdict {
    /// Returns whether the machine itself failed.
    #[must_use]
    pub fn is_of_machine(&self) -> bool {
        self.severity == Severity::Sev1 && self.scope == Scope::Node
    }

    /// Returns whether the verdict explains why a process ended, not only how.
    #[must_use]
    pub fn says_why(&self) -> bool {
        !SILENT.contains(&self.class.as_str())
    }
}

/// Classes of processes that ended without an explanation.
const SILENT: &[&str] =
    &[UNKNOWN, "exception", "killed", "crashed", "hung", "interrupted", "not-started", "trainer-vanished"];
/// Maximum number of characters kept of a line.
const LINE_MAX: usize = 300;
/// Class of failures without any evidence.
const UNKNOWN: &str = "unknown";

impl Table {
    /// Classifies a worker's failure by how it ended and by the text it left (its exception, and
    /// the last lines it wrote to stderr). For a worker that was killed, the text is ignored: it
    /// was written before and does not explain the end.
    #[must_use]
    pub fn judge(&self, cause: &Cause, text: &str) -> Verdict {
        let killed = matches!(cause, Cause::Exited(Outcome::Signal(9 | 15)) | Cause::TrainerVanished { .. });
        if let Some(found) = self.classify(text).filter(|_| !killed) {
            return Verdict::of(found.class, found.line);
        }
        let name = match cause {
            Cause::Hung { .. } => "hung",
            Cause::NotStarted => "not-started",
            Cause::TrainerVanished { .. } => "trainer-vanished",
            Cause::Exited(Outcome::Signal(9)) => "killed",
            Cause::Exited(Outcome::Signal(1 | 2 | 15)) => "interrupted",
            Cause::Exited(Outcome::Signal(4 | 6 | 7 | 8 | 11)) => "crashed",
            Cause::Exited(_) | Cause::Fenced => UNKNOWN,
        };
        self.named(name)
    }

    /// Returns the verdict of the class `name`, or of the unknown class if the table does not have
    /// it.
    #[must_use]
    pub fn named(&self, name: &str) -> Verdict {
        self.class(name).or_else(|| self.class(UNKNOWN)).map_or_else(nothing, |class| Verdict::of(class, ""))
    }
}

fn nothing() -> Verdict {
    Verdict {
        class: UNKNOWN.into(),
        scope: Scope::Unknown,
        severity: Severity::Sev2,
        follows: false,
        what: String::new(),
        advice: String::new(),
        line: String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::HangEvidence;

    fn class(cause: Cause, text: &str) -> String {
        Table::built_in().judge(&cause, text).class
    }

    #[test]
    fn what_it_said_comes_before_how_it_ended() {
        let text = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.";
        assert_eq!(class(Cause::Exited(Outcome::Code(1)), text), "cuda-out-of-memory");
        assert_eq!(class(Cause::Exited(Outcome::Signal(6)), text), "cuda-out-of-memory");
        assert_eq!(class(Cause::Exited(Outcome::Signal(9)), text), "killed");
    }

    #[test]
    fn how_it_ended_says_something_too() {
        let signal = |s| class(Cause::Exited(Outcome::Signal(s)), "step 3 loss 2.1");
        assert_eq!([signal(9), signal(11), signal(6), signal(15)], ["killed", "crashed", "crashed", "interrupted"]);
        assert_eq!(class(Cause::Exited(Outcome::Code(3)), ""), "unknown");
        assert_eq!(class(Cause::NotStarted, ""), "not-started");
        assert_eq!(class(Cause::Hung { evidence: HangEvidence::Stopped, silence_ms: 2000 }, ""), "hung");
    }

    #[test]
    fn all_that_is_said_without_a_text_is_in_the_table() {
        for name in
            ["hung", "not-started", "trainer-vanished", "killed", "interrupted", "crashed", "unknown", "node-lost"]
        {
            assert_eq!(Table::built_in().named(name).class, name);
        }
    }
}
