//! everstep's own messages on standard error: a sentence after its name, or a line of JSON for log
//! collectors (`--log-format json`). Workers' lines are never changed.

use chrono::{SecondsFormat, Utc};
use serde_json::json;
use std::fmt::Arguments;
use std::sync::OnceLock;

struct Who {
    job: String,
    node: String,
}

static IN_JSON: OnceLock<Who> = OnceLock::new();

/// Switches to lines of JSON, on behalf of this node of this job.
pub fn in_json(job: &str, node: &str) {
    let _ = IN_JSON.set(Who { job: job.into(), node: node.into() });
}

/// Writes one line; see [`say!`](crate::say!).
pub fn line(message: Arguments<'_>) {
    match IN_JSON.get() {
        None => eprintln!("everstep: {message}"),
        Some(Who { job, node }) => {
            let time = Utc::now().to_rfc3339_opts(SecondsFormat::Millis, true);
            let message = message.to_string();
            eprintln!("{}", json!({"time": time, "from": "everstep", "job": job, "node": node, "message": message}));
        }
    }
}

/// Writes a message: format string and arguments, as for `println!`.
#[macro_export]
macro_rules! say {
    ($($what:tt)*) => { $crate::say::line(format_args!($($what)*)) };
}
