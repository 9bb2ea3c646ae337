//! What becomes of a span: a tracing layer that keeps it while it lasts, and then writes it to the timeline's file, sends it to the
//! collector, or both.
//!
//! The layer is our own, and one for both: a step has several dozen spans, and they cost the processors that train. What each
//! takes, and what it took with tracing-opentelemetry, is in `docs/performance.md`.

use std::fmt;
use std::sync::Arc;
use std::time::SystemTime;

use net::timeline::{Place, TARGET};
use opentelemetry::trace::{Event as Line, SpanKind, Status};
use opentelemetry::{KeyValue, Value};
use opentelemetry_sdk::trace::SpanEvents;
use tokio::time::Instant;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};
use tracing_subscriber::Layer;
use tracing_subscriber::layer::Context;
use tracing_subscriber::registry::LookupSpan;

use crate::telemetry::export::Export;
use crate::telemetry::timeline::Timeline;

/// The field that is no attribute of a span: `client` or `server` for the ends of a call.
const KIND: &str = "otel.kind";

/// The layer. Register it behind a filter for the spans that are wanted.
pub(crate) struct Spans {
    pub(crate) file: Option<Timeline>,
    pub(crate) export: Option<Arc<Export>>,
}

/// What is kept of a span until it ends.
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

/// The fields of a span, or of a line of the log, that have a value.
pub(crate) struct Fields {
    pub(crate) kind: SpanKind,
    pub(crate) list: Vec<KeyValue>,
}

impl Open {
    fn new(fields: Fields) -> Self {
        let (begin, begun) = (now(), Instant::now());
        Self { begin, begun, fields, events: SpanEvents::default(), status: Status::Unset }
    }

    /// No earlier than it began, also when the clock was set back meanwhile.
    fn end(&self) -> SystemTime {
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

impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for Spans {
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        let Some(span) = context.span(id) else { return };
        let mut open = Open::new(Fields::with_capacity(attributes.fields().len()));
        attributes.record(&mut open.fields);
        let place = self.export.as_ref().map(|export| {
            let parent = span.parent();
            let parent = parent.and_then(|parent| Some(parent.extensions().get::<Place>()?.mark));
            export.place(parent, attributes.metadata(), &open.fields)
        });
        let mut extensions = span.extensions_mut();
        extensions.insert(open);
        if let Some(place) = place {
            extensions.insert(place);
        }
    }

    fn on_record(&self, id: &Id, values: &Record<'_>, context: Context<'_, S>) {
        let Some(span) = context.span(id) else { return };
        if let Some(open) = span.extensions_mut().get_mut::<Open>() {
            values.record(&mut open.fields);
        }
    }

    /// A line of the log is an event of the span that it is said in.
    fn on_event(&self, event: &Event<'_>, context: Context<'_, S>) {
        let Some(export) = &self.export else { return };
        let Some(span) = context.event_span(event) else { return };
        // Before the span's lock is taken: what is said may say something itself while it is written out.
        let line = line(event);
        if let Some(open) = span.extensions_mut().get_mut::<Open>() {
            open.hear(*event.metadata().level(), line, export.events_max());
        }
    }

    fn on_close(&self, id: Id, context: Context<'_, S>) {
        let Some(span) = context.span(&id) else { return };
        // Taken out first: what the file or the exporter may have to say must not find the span's lock taken.
        let mut extensions = span.extensions_mut();
        let (open, place) = (extensions.remove::<Open>(), extensions.remove::<Place>());
        drop(extensions);
        let Some(open) = open else { return };
        let (metadata, end) = (span.metadata(), open.end());
        if let Some(file) = self.file.as_ref().filter(|_| metadata.target() == TARGET) {
            let root = span.scope().last().map_or_else(|| span.id(), |root| root.id());
            file.write(metadata, &root, (open.begin, end), &open.fields.list);
        }
        if let (Some(export), Some(place)) = (&self.export, place) {
            export.send(Ended { metadata, open, place, end });
        }
    }
}

impl Open {
    fn hear(&mut self, level: Level, line: Line, max: usize) {
        if level == Level::ERROR && self.status == Status::Unset {
            self.status = Status::error("");
        }
        match self.events.len() < max {
            true => self.events.events.push(line),
            false => self.events.dropped_count += 1,
        }
    }
}

fn line(event: &Event<'_>) -> Line {
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
    fn with_capacity(capacity: usize) -> Self {
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

    /// OTLP's numbers have a sign: those that do not fit travel as text.
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
