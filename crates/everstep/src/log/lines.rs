//! Messages as lines: a sentence after everstep's name, or a JSON object for log collectors.

use chrono::{SecondsFormat, Utc};
use serde_json::{Map, Value, json};
use std::fmt::Debug;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};
use tracing_subscriber::layer::{Context, Layer};
use tracing_subscriber::registry::{LookupSpan, Scope};

/// Where `tracing` puts the text of a message.
const MESSAGE: &str = "message";
/// What a sentence begins with.
pub const NAME: &str = "everstep: ";

/// How lines are written.
#[derive(Clone, Copy)]
pub enum Format {
    /// A sentence; below the level info, with what it belongs to.
    Text,
    /// A JSON object with `time`, `from`, `level`, `target`, `message`, and the fields of the
    /// message, of the spans around it and of the process.
    Json,
}

/// Where lines go, and in which format.
pub struct Output {
    format: fn() -> Format,
    write: fn(String),
}

impl Output {
    /// The format is asked for with each line.
    pub fn new(format: fn() -> Format, write: fn(String)) -> Self {
        Output { format, write }
    }
}

/// Writes each message as a line.
pub struct Lines {
    output: Output,
}

/// Fields of a span or of a message, by name.
#[derive(Clone, Default)]
struct Fields(Map<String, Value>);

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.0.insert(field.name().into(), format!("{value:?}").into());
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.0.insert(field.name().into(), value.into());
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.0.insert(field.name().into(), value.into());
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.0.insert(field.name().into(), value.into());
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.0.insert(field.name().into(), value.into());
    }
}

impl Lines {
    /// Lines for this output.
    pub fn new(output: Output) -> Self {
        Lines { output }
    }
}

impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for Lines {
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        let mut fields = Fields::default();
        attributes.record(&mut fields);
        if let Some(span) = context.span(id) {
            span.extensions_mut().replace(fields);
        }
    }

    fn on_record(&self, id: &Id, values: &Record<'_>, context: Context<'_, S>) {
        if let Some(span) = context.span(id)
            && let Some(fields) = span.extensions_mut().get_mut::<Fields>()
        {
            values.record(fields);
        }
    }

    fn on_event(&self, event: &Event<'_>, context: Context<'_, S>) {
        let mut own = Fields::default();
        event.record(&mut own);
        let message = own.0.remove(MESSAGE).and_then(|m| m.as_str().map(str::to_owned)).unwrap_or_default();
        let line = match (self.output.format)() {
            Format::Text => text(event.metadata(), &message, &own),
            Format::Json => {
                let mut around = Fields(super::process().into_iter().collect());
                for span in context.event_scope(event).into_iter().flat_map(Scope::from_root) {
                    if let Some(fields) = span.extensions().get::<Fields>() {
                        around.0.extend(fields.0.clone());
                    }
                }
                json(event.metadata(), &message, around, own)
            }
        };
        (self.output.write)(line);
    }
}

fn text(about: &Metadata<'_>, message: &str, fields: &Fields) -> String {
    let level = match *about.level() {
        Level::DEBUG | Level::TRACE => format!("{} {}: ", about.level().as_str().to_lowercase(), about.target()),
        _ => String::new(),
    };
    let shown = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    let fields: String = fields.0.iter().map(|(name, value)| format!(" {name}={}", shown(value))).collect();
    format!("{NAME}{level}{message}{fields}")
}

fn json(about: &Metadata<'_>, message: &str, around: Fields, own: Fields) -> String {
    let mut line = around.0;
    line.extend(own.0);
    let time = Utc::now().to_rfc3339_opts(SecondsFormat::Millis, true);
    line.insert("time".into(), time.into());
    line.insert("from".into(), "everstep".into());
    line.insert("level".into(), about.level().as_str().to_lowercase().into());
    line.insert("target".into(), about.target().into());
    line.insert(MESSAGE.into(), message.into());
    json!(line).to_string()
}

/// Returns whether a line is an object as in [`Format::Json`].
pub fn is_json(line: &str) -> bool {
    line.starts_with('{')
        && serde_json::from_str::<Value>(line).is_ok_and(|line| line["from"] == "everstep" && line[MESSAGE].is_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;
    use tracing_subscriber::layer::SubscriberExt;

    thread_local! {
        static WRITTEN: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
    }

    fn lines(format: fn() -> Format, work: impl FnOnce()) -> Vec<String> {
        let output = Output::new(format, |line| WRITTEN.with_borrow_mut(|w| w.push(line)));
        let subscriber = tracing_subscriber::registry().with(Lines::new(output));
        tracing::subscriber::with_default(subscriber, work);
        WRITTEN.take()
    }

    #[test]
    fn people_read_sentences() {
        let written = lines(
            || Format::Text,
            || {
                tracing::info!("job {} is done", "a");
                tracing::debug!(rank = 3, "it was told");
            },
        );
        assert_eq!(written[0], "everstep: job a is done");
        assert!(
            written[1].starts_with("everstep: debug everstep::log::lines::tests: it was told rank=3"),
            "{written:?}"
        );
    }

    #[test]
    fn collectors_read_the_fields_of_all_spans_as_they_are_now() {
        let written = lines(
            || Format::Json,
            || {
                let span = tracing::info_span!("agent", job = "a", node = "n", generation = tracing::field::Empty);
                let _inside = span.enter();
                tracing::info!("first");
                span.record("generation", 7);
                tracing::info!(rank = 3, "second \"one\"");
            },
        );
        let read: Vec<Value> = written.iter().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(
            (&read[0]["job"], &read[0]["node"], &read[0]["generation"]),
            (&json!("a"), &json!("n"), &Value::Null)
        );
        assert_eq!((&read[1]["generation"], &read[1]["rank"]), (&json!(7), &json!(3)));
        assert_eq!((&read[1]["message"], &read[1]["level"]), (&json!("second \"one\""), &json!("info")));
        assert!(read.iter().all(|line| line["from"] == "everstep" && line["time"].is_string()));
    }
}
