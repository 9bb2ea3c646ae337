//! Spans that follow a microbatch from the worker's lease to the update that its gradient ends in.
//!
//! They have one target of their own, below the level of the log: `--trace FILE` asks for them on
//! one machine, and OTLP across machines. A push carries its span to the ps as W3C trace context
//! (`traceparent`) in gRPC's metadata. Always true here: without a collector no span has a
//! [`Place`], so nothing is formatted and sent.
//!
//! A step has about a dozen spans, because they cost the processors that train. A call has one
//! span, at the process that waits for it, and none at the process that serves it.
//!
//! ```text
//! task ─┬─ lease, pull, compute      a worker's lease, from asking for it to the report
//!       └─ push ── apply (ps)        below the last push, linked to every push of the step
//! checkpoint (ps)                    one partition of a version, written to the store
//! ```

use http::{HeaderMap, HeaderValue};
use opentelemetry::{SpanId, TraceFlags, TraceId};
use tracing::Span;
use tracing_subscriber::Registry;
use tracing_subscriber::registry::LookupSpan as _;

/// Target of these spans, all at the level `debug`.
pub const TARGET: &str = "timeline";

/// Header of W3C trace context.
const HEADER: &str = "traceparent";

/// Reference to a span, valid in other processes and after the span has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark {
    /// Trace of the span.
    pub trace: TraceId,
    /// Id of the span.
    pub span: SpanId,
    /// Whether the trace is collected. The begin of the trace decides it.
    pub sampled: bool,
    /// Whether it is a span of another process.
    pub remote: bool,
}

/// Place of a span among all spans. A subscriber that collects spans keeps it among the extensions
/// of each span.
#[derive(Clone, Debug)]
pub struct Place {
    /// Mark of the span itself.
    pub mark: Mark,
    /// None for the root of a trace.
    pub parent: Option<Mark>,
    /// What it follows from.
    pub links: Vec<Mark>,
}

impl Mark {
    /// Returns the mark of the current span, or `None` without a collector.
    pub fn current() -> Option<Self> {
        placed(&Span::current(), |place| place.mark)
    }

    /// The span of a call's sender; none without a collector there.
    pub fn of(headers: &HeaderMap) -> Option<Self> {
        headers.get(HEADER).and_then(Self::parse)
    }

    /// Formats the mark as the value of `traceparent`: `00-<trace>-<span>-<flags>`.
    fn header(self) -> Option<HeaderValue> {
        let flags = TraceFlags::default().with_sampled(self.sampled);
        let mut header =
            HeaderValue::try_from(format!("00-{}-{}-{flags:02x}", self.trace, self.span)).ok()?;
        // Every call has another value. In a connection's table of headers it would displace
        // headers that repeat.
        header.set_sensitive(true);
        Some(header)
    }

    fn parse(header: &HeaderValue) -> Option<Self> {
        let mut parts = header.to_str().ok()?.split('-');
        let mut next = |digits| parts.next().filter(|part| part.len() == digits && !part.starts_with('+'));
        let (version, trace, span, flags) = (next(2)?, next(32)?, next(16)?, next(2)?);
        let (trace, span) = (TraceId::from_hex(trace).ok()?, SpanId::from_hex(span).ok()?);
        let known = version != "ff" && trace != TraceId::INVALID && span != SpanId::INVALID;
        let sampled = TraceFlags::new(u8::from_str_radix(flags, 16).ok()?).is_sampled();
        known.then_some(Self { trace, span, sampled, remote: true })
    }
}

impl Place {
    /// Returns the place of the span `span` below `parent`, whose trace it shares.
    pub fn below(parent: Mark, span: SpanId) -> Self {
        Self { mark: Mark { span, remote: false, ..parent }, parent: Some(parent), links: Vec::new() }
    }
}

/// Calls `act` with the place of a span, if it has one.
fn placed<T>(span: &Span, act: impl FnOnce(&mut Place) -> T) -> Option<T> {
    span.with_subscriber(|(id, subscriber)| {
        let span = subscriber.downcast_ref::<Registry>()?.span(id)?;
        span.extensions_mut().get_mut::<Place>().map(act)
    })?
}

/// Adds the current span to the headers of a call, for [`Mark::of`] at the other end.
pub fn inject(headers: &mut HeaderMap) {
    if let Some(header) = Mark::current().and_then(Mark::header) {
        headers.insert(HEADER, header);
    }
}

/// Makes `span` what follows from all of `marks`: a child of the last one, with a link to each.
/// Before `span` is first entered.
///
/// A span has one parent. The joint result of several calls belongs to the trace of each, which
/// links express.
pub fn join(span: &Span, marks: Vec<Mark>) {
    placed(span, |place| {
        if let Some(&last) = marks.last() {
            *place = Place { links: marks, ..Place::below(last, place.mark.span) };
        }
    });
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn without_a_collector_nothing_is_carried() {
        assert!(Mark::current().is_none());
        let mut headers = HeaderMap::new();
        inject(&mut headers);
        assert!(headers.is_empty());
        assert_eq!(Mark::of(&headers), None);
        join(&tracing::debug_span!(target: TARGET, "apply"), Vec::new());
    }

    #[test]
    fn a_header_is_what_trace_context_shows_as_its_example() {
        let header = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
        let mark = Mark::parse(&HeaderValue::from_static(header)).expect("it is one");
        assert_eq!(
            (mark.trace, mark.sampled),
            (TraceId::from(0x4bf9_2f35_77b3_4da6_a3ce_929d_0e0e_4736), true)
        );
        assert_eq!(mark.span, SpanId::from(0x00f0_67aa_0ba9_02b7));
        assert_eq!(mark.header().expect("it is one"), header);
    }

    #[test]
    fn what_is_no_header_is_passed_over() {
        for none in [
            "",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7",
            "ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
            "00-00000000000000000000000000000000-00f067aa0ba902b7-01",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01",
            "00-4bf92f3577b34da6a3ce929d0e0e473g-00f067aa0ba902b7-01",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-+0f067aa0ba902b7-01",
        ] {
            assert_eq!(Mark::parse(&HeaderValue::from_static(none)), None, "{none}");
        }
    }

    proptest! {
        #[test]
        fn a_mark_is_read_as_it_was_written(trace in 1_u128.., span in 1_u64.., sampled: bool) {
            let mark = Mark { trace: trace.into(), span: span.into(), sampled, remote: true };
            prop_assert_eq!(mark.header().and_then(|header| Mark::parse(&header)), Some(mark));
        }

        #[test]
        fn any_header_is_read_or_passed_over(text in "\\PC{0,60}") {
            if let Ok(header) = HeaderValue::try_from(text) {
                let _ = Mark::parse(&header);
            }
        }
    }
}
