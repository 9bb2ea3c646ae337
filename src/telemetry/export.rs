//! Sends spans to a collector. Spans that have ended wait in a queue until there is a batch of
//! them, or for a few seconds.
//!
//! The exporter and its variables are OpenTelemetry's; the queue is our own. The queue of
//! OpenTelemetry's SDK has a thread and room for a few hundred spans in several places. The system
//! must clear memory that a process never used before, 2 MiB at a time: in a job of seconds this
//! cost more than all else about spans. Here a span waits as it is, and is converted just before it
//! is sent. The thread that ends a span waits for nothing, and wakes the sender once for a batch.

use std::mem;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use net::timeline::{Mark, Place};
use opentelemetry::trace::{Link, SpanContext, TraceState};
use opentelemetry::{InstrumentationScope, SpanId, TraceFlags};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::{Config, SamplingDecision, SpanData, SpanExporter, SpanLinks};
use tokio::runtime::Handle;
use tokio::sync::Notify;
use tracing::{Metadata, info, warn};

use super::span::{Ended, Fields};
use crate::config::Batches;

/// The queue of spans that have ended.
pub(crate) struct Export {
    /// The sampler, the limits and the ids, from the environment.
    config: Config,
    scope: InstrumentationScope,
    batches: Batches,
    queue: Mutex<Vec<Ended>>,
    /// Wakes the sender: there is a batch, or the process ends.
    due: Notify,
    ending: AtomicBool,
    dropping: AtomicBool,
}

/// The task that sends spans, until [`end`](Self::end).
pub(crate) struct Sending {
    export: Arc<Export>,
    /// A channel that closes when the last span has been sent.
    sent: Receiver<()>,
}

impl Sending {
    /// Begins to send by `exporter`, in a task of `runtime`.
    pub(crate) fn start(
        mut exporter: impl SpanExporter + 'static,
        (scope, resource): (&'static str, &Resource),
        batches: Batches,
        runtime: &Handle,
    ) -> Self {
        exporter.set_resource(resource);
        let export = Arc::new(Export {
            config: Config::default(),
            scope: InstrumentationScope::builder(scope).build(),
            batches,
            queue: Mutex::default(),
            due: Notify::new(),
            ending: AtomicBool::new(false),
            dropping: AtomicBool::new(false),
        });
        let (sending, sent) = channel();
        runtime.spawn(export.clone().run(exporter, sending));
        Self { export, sent }
    }

    pub(crate) fn export(&self) -> Arc<Export> {
        self.export.clone()
    }

    /// Sends the remaining spans, for `patience` at most. Spans that end later are dropped.
    pub(crate) fn end(self, patience: Duration) {
        self.export.ending.store(true, Ordering::Relaxed);
        self.export.due.notify_one();
        // Sent or given up: the process ends either way.
        let _ = self.sent.recv_timeout(patience);
    }
}

impl Export {
    /// Returns the place of a new span: below its parent, or as the root of a trace that the
    /// sampler may drop.
    pub(crate) fn place(&self, parent: Option<Mark>, metadata: &Metadata<'_>, fields: &Fields) -> Place {
        let span = self.config.id_generator.new_span_id();
        if let Some(parent) = parent {
            return Place::below(parent, span);
        }
        let trace = self.config.id_generator.new_trace_id();
        let Fields { kind, list } = fields;
        let sampled = self.config.sampler.should_sample(None, trace, metadata.name(), kind, list, &[]);
        let sampled = sampled.decision == SamplingDecision::RecordAndSample;
        Place { mark: Mark { trace, span, sampled, remote: false }, parent: None, links: Vec::new() }
    }

    /// Largest number of log lines that a span keeps.
    pub(crate) fn events_max(&self) -> usize {
        self.config.span_limits.max_events_per_span as usize
    }

    pub(crate) fn send(&self, ended: Ended) {
        if !ended.place.mark.sampled || self.ending.load(Ordering::Relaxed) {
            return;
        }
        let mut queue = self.queue();
        let full = queue.len() >= self.batches.queue_max;
        if !full {
            queue.push(ended);
        }
        let due = queue.len() == self.batches.batch_max;
        drop(queue);
        if due {
            self.due.notify_one();
        }
        if full && !self.dropping.swap(true, Ordering::Relaxed) {
            warn!(
                "spans end faster than the collector takes them; what OTEL_BSP_MAX_QUEUE_SIZE has no room for is dropped"
            );
        }
    }

    async fn run(self: Arc<Self>, exporter: impl SpanExporter, _sending: Sender<()>) {
        let (mut taken, mut failing) = (Vec::new(), false);
        loop {
            // A batch is there, or the time is over: everything in the queue is sent.
            let _ = tokio::time::timeout(self.batches.delay, self.due.notified()).await;
            let ending = self.ending.load(Ordering::Relaxed);
            mem::swap(&mut taken, &mut *self.queue());
            let mut spans = taken.drain(..).map(|ended| self.data(ended)).peekable();
            while spans.peek().is_some() {
                let batch = spans.by_ref().take(self.batches.batch_max).collect();
                let exported = exporter.export(batch).await;
                match &exported {
                    Err(error) if !failing => warn!(%error, "the collector takes no spans"),
                    Ok(()) if failing => info!("the collector takes spans again"),
                    _ => {}
                }
                failing = exported.is_err();
            }
            if ending {
                return;
            }
        }
    }

    fn queue(&self) -> MutexGuard<'_, Vec<Ended>> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the exporter's form of a span.
    fn data(&self, Ended { metadata, open, place, end }: Ended) -> SpanData {
        let limits = &self.config.span_limits;
        let mut attributes = open.fields.list;
        let dropped_attributes_count = cut(&mut attributes, limits.max_attributes_per_span);
        let mut links = SpanLinks::default();
        links.links = place.links.into_iter().map(|mark| Link::with_context(context(mark))).collect();
        links.dropped_count = cut(&mut links.links, limits.max_links_per_span);
        SpanData {
            span_context: context(place.mark),
            parent_span_id: place.parent.map_or(SpanId::INVALID, |parent| parent.span),
            parent_span_is_remote: place.parent.is_some_and(|parent| parent.remote),
            span_kind: open.fields.kind,
            name: metadata.name().into(),
            start_time: open.begin,
            end_time: end,
            attributes,
            dropped_attributes_count,
            events: open.events,
            links,
            status: open.status,
            instrumentation_scope: self.scope.clone(),
        }
    }
}

fn context(Mark { trace, span, sampled, remote }: Mark) -> SpanContext {
    let flags = TraceFlags::default().with_sampled(sampled);
    SpanContext::new(trace, span, flags, remote, TraceState::default())
}

/// Removes all but the first `max`. Returns the number of those removed.
fn cut<T>(list: &mut Vec<T>, max: u32) -> u32 {
    let more = list.len().saturating_sub(max as usize);
    list.truncate(max as usize);
    more as u32
}

#[cfg(test)]
mod tests {
    use net::timeline::{inject, join};
    use opentelemetry::trace::{SpanKind, Status};
    use opentelemetry::{KeyValue, Value};
    use opentelemetry_sdk::error::OTelSdkResult;
    use tracing::field::Empty;
    use tracing::{debug_span, error, subscriber};
    use tracing_subscriber::layer::SubscriberExt as _;

    use super::*;
    use crate::telemetry::spans::Spans;

    #[derive(Clone, Debug, Default)]
    struct Collector(Arc<Mutex<Vec<Vec<SpanData>>>>);

    impl SpanExporter for Collector {
        async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
            self.0.lock().expect("no panic").push(batch);
            Ok(())
        }
    }

    /// Returns the batches in which `spans` arrive.
    fn collected(batches: Batches, spans: impl FnOnce()) -> Vec<Vec<SpanData>> {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let (runtime, collector) = (runtime.expect("a runtime"), Collector::default());
        let resource = Resource::builder_empty().build();
        let sending = Sending::start(collector.clone(), ("test", &resource), batches, runtime.handle());
        let layer = Spans { file: None, export: Some(sending.export()) };
        subscriber::with_default(tracing_subscriber::registry().with(layer), spans);
        sending.end(Duration::from_secs(60));
        mem::take(&mut *collector.0.lock().expect("no panic"))
    }

    fn marked(span: &tracing::Span) -> Mark {
        span.in_scope(Mark::current).expect("it is collected")
    }

    #[test]
    fn spans_arrive_with_their_parents_links_kinds_and_fields() {
        let mut marks = Vec::new();
        let patient = Batches { delay: Duration::from_secs(3600), ..Batches::default() };
        let batches = collected(patient, || {
            let task = debug_span!(parent: None, "task", lease = Empty, job = Empty);
            task.record("lease", 7_u64);
            let call =
                debug_span!(parent: &task, "push", otel.kind = "client", step = u64::MAX, whole = true);
            let mut sent = tonic::Request::new(());
            call.in_scope(|| inject(sent.metadata_mut().as_mut()));
            let sender = Mark::of(sent.metadata().as_ref()).expect("it is carried");
            let apply = debug_span!(parent: None, "apply", otel.kind = "server");
            let of_another_trace = marked(&debug_span!(parent: None, "other"));
            join(&apply, vec![of_another_trace, sender]);
            let below = debug_span!(parent: &apply, "below");
            marks = [&task, &call, &apply, &below].map(marked).to_vec();
        });
        let [spans] = &batches[..] else { panic!("{batches:?}") };
        let named = |name| spans.iter().find(|span| span.name == name).expect("it arrived");
        let all = ["task", "push", "apply", "below"].map(named);
        for (span, mark) in all.iter().zip(&marks) {
            assert_eq!(span.span_context, context(*mark));
            assert_eq!(mark.trace, marks[0].trace);
            assert!(span.start_time <= span.end_time, "{span:?}");
        }
        let parents = all.map(|span| (span.parent_span_id, span.parent_span_is_remote));
        let expected =
            [(SpanId::INVALID, false), (marks[0].span, false), (marks[1].span, true), (marks[2].span, false)];
        assert_eq!(parents, expected);
        let kinds = all.map(|span| span.span_kind.clone());
        assert_eq!(kinds, [SpanKind::Internal, SpanKind::Client, SpanKind::Server, SpanKind::Internal]);
        let links: Vec<_> = all[2].links.iter().map(|link| link.span_context.span_id()).collect();
        assert_eq!(links, [named("other").span_context.span_id(), marks[1].span]);
        assert_eq!(all[0].attributes, [KeyValue::new("lease", 7)]);
        let step = KeyValue::new("step", Value::from(u64::MAX.to_string()));
        assert_eq!(all[1].attributes, [step, KeyValue::new("whole", true)]);
    }

    #[test]
    fn lines_of_the_log_are_events_of_their_span() {
        let batches = collected(Batches::default(), || {
            let _span = debug_span!("push").entered();
            tracing::info!(partition = 3, "again");
            error!("given up");
        });
        let [span] = &batches[0][..] else { panic!("{batches:?}") };
        let names: Vec<_> = span.events.iter().map(|event| event.name.as_ref()).collect();
        assert_eq!((names, &span.status), (vec!["again", "given up"], &Status::error("")));
        assert!(span.events[0].attributes.contains(&KeyValue::new("partition", 3)));
    }

    #[test]
    fn what_the_queue_has_no_room_for_is_dropped() {
        let hour = Duration::from_secs(3600);
        let batches = collected(Batches { delay: hour, queue_max: 5, batch_max: 100 }, || {
            (0..7).for_each(|_| drop(debug_span!("span")));
        });
        assert_eq!(batches.iter().map(Vec::len).collect::<Vec<_>>(), [5]);
    }

    #[test]
    fn a_batch_does_not_wait_and_is_no_larger_than_it_may_be() {
        let hour = Duration::from_secs(3600);
        let batches = collected(Batches { delay: hour, queue_max: 2048, batch_max: 3 }, || {
            (0..10).for_each(|_| drop(debug_span!("span")));
        });
        let sizes: Vec<_> = batches.iter().map(Vec::len).collect();
        assert!(sizes.iter().all(|&size| size <= 3) && sizes.iter().sum::<usize>() == 10, "{sizes:?}");
    }

    #[test]
    fn a_trace_that_its_caller_does_not_collect_is_not_collected_here() {
        let batches = collected(Batches::default(), || {
            let caller = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00";
            let mut sent = tonic::Request::new(());
            sent.metadata_mut().insert("traceparent", caller.parse().expect("a header"));
            let apply = debug_span!(parent: None, "apply");
            join(&apply, vec![Mark::of(sent.metadata().as_ref()).expect("it is carried")]);
            drop(debug_span!(parent: &apply, "below"));
            drop(debug_span!(parent: None, "other"));
        });
        let names: Vec<_> = batches.iter().flatten().map(|span| span.name.as_ref()).collect();
        assert_eq!(names, ["other"]);
    }
}
