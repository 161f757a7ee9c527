//! What a worker said about its end.

use everstep_core::agent::event::Words;
use everstep_core::message::Outcome;
use std::path::Path;

/// Returns whether the line begins with an exception's name, like a Python traceback's last line.
fn names_exception(line: &str) -> bool {
    let line = line.strip_prefix("[rank").and_then(|l| l.split_once("]: ")).map_or(line, |(_, rest)| rest);
    let name = line.split(':').next().unwrap_or_default();
    let path = name.chars().all(|c| c.is_alphanumeric() || matches!(c, '.' | '_'));
    line.starts_with("Fatal Python error")
        || (path && ["Error", "Exception", "Interrupt", "Exit"].iter().any(|end| name.ends_with(end)))
}

/// Returns how a worker explained its end: its error file (torch's format), else the exception on
/// stderr, else its last line there. A worker killed from outside explains nothing, and neither do
/// everstep's own messages: a worker may be a wrapper of another launch.
pub(super) fn of(error_file: &Path, last_lines: &str, own: Option<&str>, outcome: Outcome) -> Words {
    let from_file = || {
        let json: serde_json::Value = serde_json::from_slice(&std::fs::read(error_file).ok()?).ok()?;
        let message = &json["message"];
        message["message"].as_str().or_else(|| message.as_str()).map(str::to_owned)
    };
    let last_lines: String = last_lines.lines().filter(|l| !crate::log::is_own(l)).flat_map(|l| [l, "\n"]).collect();
    let lines: Vec<&str> = last_lines.lines().map(str::trim).filter(|l| !l.is_empty()).collect();
    let killed = matches!(outcome, Outcome::Signal(9 | 15));
    let last = || lines.iter().rposition(|l| names_exception(l)).or(lines.len().checked_sub(1));
    let from_stderr = || if killed { None } else { last().map(|begins| lines[begins..].join("\n")) };
    let said = own.map(str::to_owned).or_else(from_file);
    let text = [said.as_deref().unwrap_or_default(), &last_lines].join("\n");
    let told = said.or_else(from_stderr).unwrap_or_default();
    Words { message: first_sentence(&told).chars().take(300).collect(), text }
}

/// Returns the first line of a message, and the next one if that continues it.
fn first_sentence(message: &str) -> String {
    let mut lines = message.lines();
    let first = lines.next().unwrap_or_default();
    match lines.next() {
        Some(next) if first.ends_with(':') => format!("{first} {}", next.trim()),
        _ => first.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn last_words_are_the_exception_not_what_follows_it() {
        let said = |lines: &str, outcome| of(Path::new("/nonexistent"), lines, None, outcome).message;
        let long = "[rank1]:   File \"a.py\"\n[rank1]: RuntimeError: Expected it\n[rank1]:  In addition, set this\n";
        assert_eq!(said(long, Outcome::Code(1)), "[rank1]: RuntimeError: Expected it");
        assert_eq!(said("torch.cuda.OutOfMemoryError: no\nbye", Outcome::Code(1)), "torch.cuda.OutOfMemoryError: no");
        assert_eq!(said("Note: an Error\ngiving up", Outcome::Code(3)), "giving up");
        assert_eq!(said("ValueError: these differ:\n  a\n  b", Outcome::Code(1)), "ValueError: these differ: a");
        assert_eq!(said("warned in passing", Outcome::Signal(9)), "");
        assert_eq!(said("terminate called", Outcome::Signal(6)), "terminate called");
    }

    #[test]
    fn messages_of_everstep_are_never_the_cause() {
        let own = [
            "everstep: job inner: 1 rank here, 1 rank on 1 node; everstep status inner shows it, Ctrl-C stops it",
            "[default0]:everstep: cannot write /logs/stdout.log: No space left on device (os error 28)",
            "/site-packages/torch/nn/linear.py:9: UserWarning: everstep: 3 files could not be deleted",
            r#"{"from":"everstep","job":"inner","level":"info","message":"done after 0 s"}"#,
        ];
        let said = |lines: &[&str]| of(Path::new("/nonexistent"), &lines.join("\n"), None, Outcome::Code(3));
        assert_eq!(said(&own), Words { message: String::new(), text: "\n".into() });
        assert_eq!(said(&[&["no GPU here"], &own[..]].concat()).message, "no GPU here");
        // What only mentions everstep is the script's.
        assert_eq!(said(&["cannot import everstep"]).message, "cannot import everstep");
        assert_eq!(said(&[r#"{"from":"me"}"#]).message, r#"{"from":"me"}"#);
    }
}
