//! Classification of texts: an exception with its traceback, the last lines of a worker, or a line
//! of the kernel log.

use super::kernel;
use super::table::{Class, Rule, Severity, Table};

/// A class, and the evidence for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found<'t, 's> {
    /// The class that was found.
    pub class: &'t Class,
    /// The matching line of the text, trimmed.
    pub line: &'s str,
    /// Where such lines come from.
    pub source: &'t str,
}

/// A line, and the same line in lower case.
type Line<'s> = (&'s str, String);

impl Table {
    /// Finds the class of a text by the first rule that matches any of its lines: rules for causes
    /// precede rules for their consequences, wherever they are in the text. If several lines match,
    /// the last one is returned. Warnings, and source lines in a traceback, are considered only if
    /// nothing else matches. Returns `None` if nothing matches.
    #[must_use]
    pub fn classify<'s>(&self, text: &'s str) -> Option<Found<'_, 's>> {
        let (mut told, mut remarks) = (Vec::new(), Vec::new());
        let mut of_program = false;
        for line in text.lines().map(str::trim).filter(|l| !l.is_empty()) {
            let lower = line.to_lowercase();
            // A source line in a traceback may contain any words.
            let frame = is_frame(&lower);
            let remark = frame || of_program || is_remark(&lower);
            of_program = frame;
            if remark { &mut remarks } else { &mut told }.push((line, lower));
        }
        self.of_numbers(&told).or_else(|| self.of_rules(&told)).or_else(|| self.of_rules(&remarks))
    }

    /// Finds the most severe of the driver's error numbers. Numbers that need no action, or follow
    /// from others, are ignored.
    fn of_numbers<'s>(&self, lines: &[Line<'s>]) -> Option<Found<'_, 's>> {
        let seen = lines.iter().filter_map(|(line, _)| Some((*line, self.of_number(&kernel::numbered(line)?)?.0)));
        let (line, class) =
            seen.filter(|(_, c)| !c.follows && c.severity < Severity::Sev3).min_by_key(|(_, c)| c.severity)?;
        Some(Found { class, line, source: "NVIDIA's Xid catalogue" })
    }

    fn of_rules<'s>(&self, lines: &[Line<'s>]) -> Option<Found<'_, 's>> {
        self.rules.iter().find_map(|rule| {
            let (line, _) = lines.iter().rfind(|(_, lower)| rule.fits(lower))?;
            Some(Found { class: self.class(&rule.class)?, line, source: &rule.source })
        })
    }
}

/// Matches `File "train.py", line 3, in main`: the location in a traceback. A source line follows.
fn is_frame(lower: &str) -> bool {
    lower.contains("file \"") && lower.contains("\", line ")
}

/// Returns whether the exception at the end of a text was raised in a backward pass of autograd, or
/// where DDP prepares for one. Tracebacks before the last one are of exceptions that the script has
/// handled.
#[must_use]
pub fn in_backward(text: &str) -> bool {
    let (_, last) = text.rsplit_once("Traceback (most recent call last)").unwrap_or_default();
    let autograd =
        |line: &str| is_frame(&line.to_lowercase()) && line.contains("/torch/autograd/") && line.contains("backward");
    // Only called with gradients enabled, before the second pass.
    last.lines().any(|line| autograd(line) || line.contains("self.reducer._rebuild_buckets()"))
}

/// Matches lines that did not end the program: `UserWarning: …`, `[rank0]:[W1122 …`, `[I1122 …`.
fn is_remark(lower: &str) -> bool {
    let bare =
        lower.strip_prefix("[rank").and_then(|l| l.split_once("]:")).map_or(lower, |(_, rest)| rest).trim_start();
    let glog = |letter: &str| bare.strip_prefix(letter).is_some_and(|l| l.starts_with(|c: char| c.is_ascii_digit()));
    lower.contains("warning:") || lower.contains("warnings.warn") || glog("[w") || glog("[i")
}

impl Rule {
    fn fits(&self, lower: &str) -> bool {
        self.line.iter().any(|p| p.is_in(lower)) && !self.unless.iter().any(|p| p.is_in(lower))
    }
}

#[cfg(test)]
mod tests {
    use super::in_backward;

    const BACKWARD: &str = r#"Traceback (most recent call last):
  File "train.py", line 9, in <module>
    loss.backward()
  File "/usr/lib/python3/site-packages/torch/_tensor.py", line 647, in backward
    torch.autograd.backward(
  File "/usr/lib/python3/site-packages/torch/autograd/graph.py", line 829, in _engine_run_backward
    return Variable._execution_engine.run_backward(
RuntimeError: Connection closed by peer
"#;
    const BARRIER: &str = r#"Traceback (most recent call last):
  File "train.py", line 12, in backward
    dist.barrier()
  File "/usr/lib/python3/site-packages/torch/distributed/distributed_c10d.py", line 4159, in barrier
    work.wait()
RuntimeError: Connection closed by peer
"#;

    #[test]
    fn a_pass_of_autograd_is_seen_in_the_last_traceback() {
        assert!(in_backward(BACKWARD) && !in_backward(BARRIER) && !in_backward("loss.backward()"));
        assert!(in_backward(&[BARRIER, BACKWARD].concat()) && !in_backward(&[BACKWARD, BARRIER].concat()));
        let ddp =
            BARRIER.replace("    work.wait()", "    if torch.is_grad_enabled() and self.reducer._rebuild_buckets():");
        assert!(in_backward(&ddp));
        let prefixed: String = BACKWARD.lines().map(|l| format!("[rank0]: {l}\n")).collect();
        assert!(in_backward(&prefixed));
    }
}
