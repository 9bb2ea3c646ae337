//! A tracing layer that keeps a span while it lasts, and then writes it to the timeline's file,
//! sends it to the collector, or both.
//!
//! One layer of our own does both: a step has about a dozen spans, and they cost time of the
//! processors that train. `docs/performance.md` has the times, and
//! `docs/measurements/2026-11-22.md` those of tracing-opentelemetry.

use std::sync::Arc;

use net::timeline::{Place, TARGET};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Subscriber};
use tracing_subscriber::Layer;
use tracing_subscriber::layer::Context;
use tracing_subscriber::registry::LookupSpan;

use super::export::Export;
use super::span::{Ended, Fields, Open, line};
use super::timeline::Timeline;

/// The layer. Register it behind a filter for the wanted spans.
pub(crate) struct Spans {
    pub(crate) file: Option<Timeline>,
    pub(crate) export: Option<Arc<Export>>,
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

    /// A log line is an event of the span around it.
    fn on_event(&self, event: &Event<'_>, context: Context<'_, S>) {
        let Some(export) = &self.export else { return };
        let Some(span) = context.event_span(event) else { return };
        // Before the span's lock is taken: what is said may say something itself while it is
        // written out.
        let line = line(event);
        if let Some(open) = span.extensions_mut().get_mut::<Open>() {
            open.hear(*event.metadata().level(), line, export.events_max());
        }
    }

    fn on_close(&self, id: Id, context: Context<'_, S>) {
        let Some(span) = context.span(&id) else { return };
        // Taken out first: what the file or the exporter may have to say must not find the span's
        // lock taken.
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
