//! Spans that follow a microbatch through the roles: lease, load, pull, compute, push, and the update that its gradient ends in.
//!
//! They have one target of their own, below the level of the log: who wants them asks for them, `--trace FILE` on one machine and OTLP
//! across machines. Between processes a call carries its span as W3C trace context (`traceparent`) in gRPC's metadata.

use http::HeaderMap;
use opentelemetry::global::get_text_map_propagator;
use opentelemetry::propagation::{Extractor, Injector};
use tonic::Request;
use tonic::metadata::{MetadataKey, MetadataMap, MetadataValue};
use tracing::Span;
use tracing_opentelemetry::OpenTelemetrySpanExt as _;

/// Target of these spans, all at the level `debug`.
pub const TARGET: &str = "timeline";

/// A call whose span at the other end becomes a child of the current one.
pub fn carry<T>(message: T) -> Request<T> {
    let mut request = Request::new(message);
    let context = Span::current().context();
    get_text_map_propagator(|propagator| {
        propagator.inject_context(&context, &mut Carrier(request.metadata_mut()));
    });
    request
}

/// Makes `span` a child of the caller's, if the caller sent one. Before `span` is first entered.
pub fn follow(span: &Span, headers: &HeaderMap) {
    let context = get_text_map_propagator(|propagator| propagator.extract(&Reader(headers)));
    // Without a collector there is nothing to set.
    let _ = span.set_parent(context);
}

struct Carrier<'a>(&'a mut MetadataMap);

impl Injector for Carrier<'_> {
    fn set(&mut self, key: &str, value: String) {
        if let (Ok(key), Ok(value)) =
            (MetadataKey::from_bytes(key.as_bytes()), MetadataValue::try_from(value))
        {
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
        self.0.keys().map(http::HeaderName::as_str).collect()
    }
}
