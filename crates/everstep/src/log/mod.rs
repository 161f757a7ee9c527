//! everstep's own messages: lines for people, and a record for whoever looks for a defect.
//!
//! [`say!`](crate::say!) and [`say_warning!`](crate::say_warning!) write a line for people. The
//! macros of `tracing` at the levels debug and trace describe what the drivers do. Both go to
//! standard error if `EVERSTEP_LOG` selects them (by default, only the lines for people), and to
//! the log file of the agent or coordinator that this process is. Workers' output is never changed.

pub mod exchange;
mod file;
mod lines;
mod queue;

use crate::failure::Failure;
use file::Rotating;
pub use file::before;
use lines::{Format, Lines, Output};
pub use queue::flush;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;
use std::sync::{Mutex, OnceLock, PoisonError};
use tracing::Subscriber;
use tracing::level_filters::LevelFilter;
use tracing_subscriber::filter::{FilterExt, filter_fn};
use tracing_subscriber::layer::{Filter, SubscriberExt};
use tracing_subscriber::{EnvFilter, Layer};

/// Selects what goes to standard error, as in `debug` or `everstep::agent=trace`.
pub const VARIABLE: &str = "EVERSTEP_LOG";
/// Lines for people.
const ON_CONSOLE: &str = "off,everstep=info";
/// Lines for people, what the drivers do, and what libraries warn of.
const IN_FILE: &str = "warn,everstep=debug";

/// The format of what goes to standard error.
static FORMAT: OnceLock<Format> = OnceLock::new();
/// The log file, once this process has one.
static FILE: Mutex<Option<Rotating>> = Mutex::new(None);
/// What this process is: these fields belong to the messages of all its threads. They are not those
/// of a span, which threads would have to enter.
static PROCESS: Mutex<BTreeMap<String, Value>> = Mutex::new(BTreeMap::new());

/// Begins to write messages.
///
/// # Errors
/// If `EVERSTEP_LOG` cannot be read as a filter.
pub fn start() -> Result<(), Failure> {
    let chosen = std::env::var_os(VARIABLE).filter(|v| !v.is_empty());
    let chosen =
        chosen.map(|v| v.into_string().map_err(|v| (v.to_string_lossy().into_owned(), "not UTF-8".to_owned())));
    let filter = match chosen {
        None => Ok(EnvFilter::new(ON_CONSOLE)),
        Some(Ok(text)) => EnvFilter::try_new(of_everstep(&text)).map_err(|e| (text, e.to_string())),
        Some(Err(wrong)) => Err(wrong),
    };
    let (filter, wrong) = match filter {
        Ok(filter) => (filter, None),
        Err(wrong) => (EnvFilter::new(ON_CONSOLE), Some(wrong)),
    };
    let console =
        Lines::new(Output::new(|| *FORMAT.get().unwrap_or(&Format::Text), |line| queue::push(to_console, line)))
            .with_filter(of_messages(filter));
    let kept = Lines::new(Output::new(|| Format::Json, |line| queue::push(to_file, line)))
        .with_filter(of_messages(EnvFilter::new(IN_FILE)));
    // Fails only if there is another subscriber, which then gets the messages.
    let _ = tracing::subscriber::set_global_default(tracing_subscriber::registry().with(console).with(kept));
    match wrong {
        None => Ok(()),
        Some((text, why)) => Err(Failure::usage(format!(
            "{VARIABLE}={text} is not a valid log filter ({why}); give a level, such as debug, or PART=LEVEL, such as \
             everstep::agent=trace"
        ))),
    }
}

/// Applies a filter to messages only. A span that it hid would be missing from the messages that it
/// lets pass.
fn of_messages<S: Subscriber>(filter: EnvFilter) -> impl Filter<S>
where
    EnvFilter: Filter<S>,
{
    let own = |about: &tracing::Metadata<'_>| about.is_span() && about.target().starts_with("everstep");
    filter.or(filter_fn(own).with_max_level_hint(LevelFilter::INFO))
}

/// A level alone is that of everstep, not that of its libraries.
fn of_everstep(text: &str) -> String {
    if text.contains(['=', ',', '[']) { text.to_owned() } else { format!("off,everstep={text}") }
}

/// Switches standard error to lines of JSON.
pub fn in_json() {
    let _ = FORMAT.set(Format::Json);
}

/// Keeps messages in this file from now on. Without it, nothing is kept, and nobody needs to know.
/// Whoever keeps messages runs for long, and from now on it does not wait for them to be written.
pub fn keep_in(path: &Path) {
    *FILE.lock().unwrap_or_else(PoisonError::into_inner) = Rotating::open(path).ok();
    queue::start();
}

/// Adds a field to all messages of this process, from now on.
pub fn set(field: &str, value: impl Into<Value>) {
    PROCESS.lock().unwrap_or_else(PoisonError::into_inner).insert(field.to_owned(), value.into());
}

/// How a process writes messages, for one that it starts.
#[derive(Default, Serialize, Deserialize)]
#[serde(default)]
struct HandOver {
    fields: BTreeMap<String, Value>,
    /// Standard error gets lines of JSON.
    json: bool,
}

/// Returns the format and the fields of this process, for [`take_over`].
pub fn hand_on() -> String {
    let all = HandOver { fields: process(), json: matches!(FORMAT.get(), Some(Format::Json)) };
    serde_json::to_string(&all).unwrap_or_default()
}

/// Writes messages like the process that started this one.
pub fn take_over(from: &str) {
    let HandOver { fields, json } = serde_json::from_str(from).unwrap_or_default();
    if json {
        in_json();
    }
    PROCESS.lock().unwrap_or_else(PoisonError::into_inner).extend(fields);
}

/// Returns the fields that [`set`] has added.
fn process() -> BTreeMap<String, Value> {
    PROCESS.lock().unwrap_or_else(PoisonError::into_inner).clone()
}

/// Returns whether a line is one of everstep's messages, as this program or the Python package
/// writes them, or another launcher with a prefix.
pub fn is_own(line: &str) -> bool {
    let line = line.trim_start();
    let line = line.strip_prefix('[').and_then(|l| l.split_once("]:")).map_or(line, |(_, rest)| rest.trim_start());
    line.starts_with(lines::NAME) || line.contains("Warning: everstep: ") || lines::is_json(line)
}

fn to_console(line: &str) {
    // Whoever reads it may have gone.
    let _ = writeln!(std::io::stderr(), "{line}");
}

fn to_file(line: &str) {
    if let Some(file) = FILE.lock().unwrap_or_else(PoisonError::into_inner).as_mut() {
        file.write(line);
    }
}

/// Writes a line for people: format string and arguments, as for `println!`.
#[macro_export]
macro_rules! say {
    ($($what:tt)*) => { ::tracing::info!($($what)*) };
}

/// Like [`say!`](crate::say!), for a line that reports a failure. People see no difference; in
/// JSON, and to `EVERSTEP_LOG`, its level is warn.
#[macro_export]
macro_rules! say_warning {
    ($($what:tt)*) => { ::tracing::warn!($($what)*) };
}
