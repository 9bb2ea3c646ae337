//! Spans that follow a microbatch through the roles: lease, load, pull, compute, push, and the update that its gradient ends in.
//!
//! They have one target of their own, below the level of the log: who wants them asks for them, `--trace FILE` on one machine and OTLP
//! across machines. Between processes a call carries its span as W3C trace context (`traceparent`) in gRPC's metadata. Always true here:
//! without a collector no span has a context, so nothing is formatted, parsed or kept.
//!
//! ```text
//! task ─┬─ lease ── grant (master)                 a worker's lease, from asking for it to the report
//!       ├─ pull ─┬─ pull (ps)                      one for each partition
//!       ├─ load, compute
//!       └─ push ─┬─ push (ps) ── apply             below the push that came last, linked to every push of the step
//! ```

use http::{HeaderMap, HeaderName, HeaderValue};
use opentelemetry::Context;
use opentelemetry::global::get_text_map_propagator;
use opentelemetry::propagation::{Extractor, Injector};
use opentelemetry::trace::{SpanContext, TraceContextExt as _};
use tonic::Request;
use tracing::Span;
use tracing_opentelemetry::OpenTelemetrySpanExt as _;

/// Target of these spans, all at the level `debug`.
pub const TARGET: &str = "timeline";

/// A span as others refer to it after it has ended.
#[derive(Clone, Debug)]
pub struct Mark(SpanContext);

impl Mark {
    /// That of the current span; none without a collector.
    pub fn current() -> Option<Self> {
        let span = Span::current();
        if span.is_disabled() {
            return None;
        }
        let mark = span.context().span().span_context().clone();
        mark.is_valid().then_some(Self(mark))
    }
}

/// A call whose span at the other end becomes a child of the current one.
pub fn carry<T>(message: T) -> Request<T> {
    let mut request = Request::new(message);
    inject(request.metadata_mut().as_mut());
    request
}

/// Adds the current span to the headers of a call, so that its span at the other end becomes a child of it.
pub fn inject(headers: &mut HeaderMap) {
    if let Some(Mark(mark)) = Mark::current() {
        let context = Context::new().with_remote_span_context(mark);
        get_text_map_propagator(|propagator| propagator.inject_context(&context, &mut Carrier(headers)));
    }
}

/// Makes `span` a child of the caller's, if the caller sent one. Before `span` is first entered.
pub fn follow(span: &Span, headers: &HeaderMap) {
    if span.is_disabled() {
        return;
    }
    let context = get_text_map_propagator(|propagator| {
        propagator.extract_with_context(&Context::new(), &Reader(headers))
    });
    if context.span().span_context().is_valid() {
        // Without a collector there is nothing to set.
        let _ = span.set_parent(context);
    }
}

/// Makes `span` what follows from all of `marks`: a child of the last one, with a link to each. Before `span` is first entered.
///
/// A span has one parent, and what several calls bring about together belongs to the trace of each: that is what links are for.
pub fn join(span: &Span, marks: Vec<Mark>) {
    if let Some(Mark(last)) = marks.last() {
        let _ = span.set_parent(Context::new().with_remote_span_context(last.clone()));
    }
    marks.into_iter().for_each(|Mark(mark)| span.add_link(mark));
}

struct Carrier<'a>(&'a mut HeaderMap);

impl Injector for Carrier<'_> {
    fn set(&mut self, key: &str, value: String) {
        if let (Ok(key), Ok(value)) = (HeaderName::from_bytes(key.as_bytes()), HeaderValue::try_from(value)) {
            self.0.insert(key, value);
        }
    }
}

struct Reader<'a>(&'a HeaderMap);

impl Extractor for Reader<'_> {
    fn get(&self, key: &str) -> Option<&str> {
        self.0.get(key)?.to_str().ok()
    }

    fn keys(&self) -> Vec<&str> {
        self.0.keys().map(HeaderName::as_str).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_collector_nothing_is_carried() {
        assert!(Mark::current().is_none());
        assert!(carry(()).metadata().is_empty());
        let mut headers = HeaderMap::new();
        inject(&mut headers);
        assert!(headers.is_empty());
        follow(&tracing::debug_span!(target: TARGET, "grant"), &headers);
    }
}
