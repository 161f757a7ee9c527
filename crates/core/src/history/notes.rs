//! Notes for people on a job's latest run, about facts that are not incidents.

use super::entry::Entry;
use crate::coordinator::command::Fact;
use crate::coordinator::wording::unconfirmed;

/// Exit codes from here on mean that a signal stopped the job.
const SIGNALLED: i32 = 128;

/// Returns the notes on a job's latest run, one sentence each: ends that nothing confirms, and why
/// the job could not continue if no incident shows that.
#[must_use]
pub fn notes(entries: &[Entry]) -> Vec<String> {
    let mut notes: Vec<String> = Vec::new();
    let (mut incident, mut over) = (false, false);
    for Entry { fact, .. } in entries {
        match fact {
            Fact::GenerationStarted { restarts, .. } => {
                // Whatever was not known about an earlier generation does not matter any more.
                notes.clear();
                if *restarts == 0 && over {
                    (incident, over) = (false, false);
                }
            }
            Fact::IncidentOpened { .. } => incident = true,
            Fact::EndUnconfirmed { node, rank, pid, step, .. } => {
                // A coordinator that started in between records it again.
                let what = unconfirmed(node, *rank, *pid, *step);
                if !notes.contains(&what) {
                    notes.push(what);
                }
            }
            Fact::Ended { code, why } => {
                over = true;
                if !incident && (1..SIGNALLED).contains(code) {
                    notes.push(format!("the job ended with exit code {code}: {why}"));
                }
            }
            _ => {}
        }
    }
    notes
}
