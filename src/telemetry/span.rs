//! A span while it lasts: its times, its fields, and the log lines in it.

use std::fmt;
use std::time::SystemTime;

use net::timeline::Place;
use opentelemetry::trace::{Event as Line, SpanKind, Status};
use opentelemetry::{KeyValue, Value};
use opentelemetry_sdk::trace::SpanEvents;
use tokio::time::Instant;
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Metadata};

/// The field with the kind of a span: `client` or `server` for the ends of a call. It is no
/// attribute.
const KIND: &str = "otel.kind";

/// The facts of a span, until it ends.
pub(crate) struct Open {
    pub(crate) begin: SystemTime,
    begun: Instant,
    pub(crate) fields: Fields,
    pub(crate) events: SpanEvents,
    pub(crate) status: Status,
}

/// A span that has ended.
pub(crate) struct Ended {
    pub(crate) metadata: &'static Metadata<'static>,
    pub(crate) open: Open,
    pub(crate) place: Place,
    pub(crate) end: SystemTime,
}

/// The fields of a span or of a log line that have a value.
pub(crate) struct Fields {
    pub(crate) kind: SpanKind,
    pub(crate) list: Vec<KeyValue>,
}

impl Open {
    pub(super) fn new(fields: Fields) -> Self {
        let (begin, begun) = (now(), Instant::now());
        Self { begin, begun, fields, events: SpanEvents::default(), status: Status::Unset }
    }

    /// Returns the end of the span, if it ends now: never before its begin, even if the clock was
    /// set back.
    pub(super) fn end(&self) -> SystemTime {
        self.begin + self.begun.elapsed()
    }
}

#[expect(
    clippy::disallowed_methods,
    reason = "spans of several processes lie beside each other by the time of day"
)]
fn now() -> SystemTime {
    SystemTime::now()
}

impl Open {
    pub(super) fn hear(&mut self, level: Level, line: Line, max: usize) {
        if level == Level::ERROR && self.status == Status::Unset {
            self.status = Status::error("");
        }
        match self.events.len() < max {
            true => self.events.events.push(line),
            false => self.events.dropped_count += 1,
        }
    }
}

pub(super) fn line(event: &Event<'_>) -> Line {
    let metadata = event.metadata();
    let mut fields = Fields::with_capacity(metadata.fields().len() + 2);
    fields.list.push(KeyValue::new("level", metadata.level().as_str()));
    fields.list.push(KeyValue::new("target", metadata.target()));
    event.record(&mut fields);
    let message = fields.list.iter().position(|field| field.key.as_str() == "message");
    let message = message.map(|at| fields.list.remove(at).value.to_string());
    Line::new(message.unwrap_or_else(|| metadata.name().to_owned()), now(), fields.list, 0)
}

impl Fields {
    pub(super) fn with_capacity(capacity: usize) -> Self {
        Self { kind: SpanKind::Internal, list: Vec::with_capacity(capacity) }
    }

    fn set(&mut self, field: &Field, value: impl Into<Value>) {
        let before = self.list.iter_mut().find(|before| before.key.as_str() == field.name());
        match before {
            Some(before) => before.value = value.into(),
            None => self.list.push(KeyValue::new(field.name(), value)),
        }
    }
}

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.set(field, format!("{value:?}"));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        match (field.name(), value) {
            (KIND, "client") => self.kind = SpanKind::Client,
            (KIND, "server") => self.kind = SpanKind::Server,
            (KIND, _) => {}
            _ => self.set(field, value.to_owned()),
        }
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.set(field, value);
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.set(field, value);
    }

    /// Numbers of OTLP have a sign, so a number that does not fit travels as text.
    fn record_u64(&mut self, field: &Field, value: u64) {
        match i64::try_from(value) {
            Ok(value) => self.set(field, value),
            Err(_) => self.set(field, value.to_string()),
        }
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        self.set(field, value);
    }
}
