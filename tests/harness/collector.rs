//! A collector of traces and metrics on loopback. It receives OTLP over gRPC and keeps the spans.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use opentelemetry_proto::tonic::collector::metrics::v1::metrics_service_server::{
    MetricsService, MetricsServiceServer,
};
use opentelemetry_proto::tonic::collector::metrics::v1::{
    ExportMetricsServiceRequest, ExportMetricsServiceResponse,
};
use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::{
    TraceService, TraceServiceServer,
};
use opentelemetry_proto::tonic::collector::trace::v1::{
    ExportTraceServiceRequest, ExportTraceServiceResponse,
};
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::common::v1::{AnyValue, KeyValue};
use opentelemetry_proto::tonic::trace::v1::ResourceSpans;
use opentelemetry_proto::tonic::trace::v1::span::SpanKind;
use tonic::{Request, Response, Status};

/// A received span.
#[derive(Clone, Debug)]
pub struct Span {
    /// Name of the sending process's service.
    pub service: String,
    pub name: String,
    pub trace: Vec<u8>,
    pub id: Vec<u8>,
    /// Id of the parent, empty for the root of a trace.
    pub parent: Vec<u8>,
    /// Trace and span of each link.
    pub links: Vec<(Vec<u8>, Vec<u8>)>,
    pub kind: SpanKind,
    pub begin_ns: u64,
    pub end_ns: u64,
    attributes: BTreeMap<String, Value>,
}

impl Span {
    /// Returns whether an attribute is there and true.
    pub fn is(&self, name: &str) -> bool {
        matches!(self.attributes.get(name), Some(Value::BoolValue(true)))
    }

    /// Returns an attribute that is a number. Numbers too large for OTLP's signed ones travel as
    /// text.
    pub fn number(&self, name: &str) -> Option<i64> {
        match self.attributes.get(name)? {
            Value::IntValue(number) => Some(*number),
            Value::StringValue(text) => text.parse().ok(),
            _ => None,
        }
    }

    /// Returns an attribute that is text.
    pub fn text(&self, name: &str) -> Option<&str> {
        match self.attributes.get(name)? {
            Value::StringValue(text) => Some(text),
            _ => None,
        }
    }
}

/// Received exports, kept undecoded: a bench that measures the cost of sending must not pay for
/// decoding.
#[derive(Clone, Debug, Default)]
struct Seen {
    exports: Arc<Mutex<Vec<ExportTraceServiceRequest>>>,
    numbers: Arc<AtomicU64>,
}

/// A running collector. It ends with its handle.
#[derive(Debug)]
pub struct Collector {
    /// URL to which processes send, for `OTEL_EXPORTER_OTLP_ENDPOINT`.
    pub url: String,
    seen: Seen,
    _runtime: tokio::runtime::Runtime,
}

impl Collector {
    pub fn start() -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let runtime = runtime.expect("a runtime");
        let listener = runtime.block_on(tokio::net::TcpListener::bind("127.0.0.1:0")).expect("a free port");
        let url = format!("http://{}", listener.local_addr().expect("it is bound"));
        let seen = Seen::default();
        let serving = tonic::transport::Server::builder()
            .add_service(TraceServiceServer::new(seen.clone()))
            .add_service(MetricsServiceServer::new(seen.clone()))
            .serve_with_incoming(tokio_stream::wrappers::TcpListenerStream::new(listener));
        runtime.spawn(serving);
        Self { url, seen, _runtime: runtime }
    }

    /// Takes the received spans.
    pub fn take(&self) -> Vec<Span> {
        let exports = std::mem::take(&mut *self.seen.exports.lock().unwrap_or_else(PoisonError::into_inner));
        exports.into_iter().flat_map(spans).collect()
    }

    /// Returns the number of received exports of metrics.
    pub fn reports_of_numbers(&self) -> u64 {
        self.seen.numbers.load(Ordering::Relaxed)
    }
}

#[tonic::async_trait]
impl TraceService for Seen {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        self.exports.lock().unwrap_or_else(PoisonError::into_inner).push(request.into_inner());
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

#[tonic::async_trait]
impl MetricsService for Seen {
    async fn export(
        &self,
        _: Request<ExportMetricsServiceRequest>,
    ) -> Result<Response<ExportMetricsServiceResponse>, Status> {
        self.numbers.fetch_add(1, Ordering::Relaxed);
        Ok(Response::new(ExportMetricsServiceResponse::default()))
    }
}

fn spans(export: ExportTraceServiceRequest) -> Vec<Span> {
    let of_process = |of_process: ResourceSpans| {
        let process = attributes(of_process.resource.unwrap_or_default().attributes);
        let service = match process.get("service.name") {
            Some(Value::StringValue(name)) => name.clone(),
            _ => String::new(),
        };
        let spans = of_process.scope_spans.into_iter().flat_map(|scope| scope.spans);
        spans.map(move |span| Span {
            service: service.clone(),
            kind: span.kind(),
            name: span.name,
            trace: span.trace_id,
            id: span.span_id,
            parent: span.parent_span_id,
            links: span.links.into_iter().map(|link| (link.trace_id, link.span_id)).collect(),
            begin_ns: span.start_time_unix_nano,
            end_ns: span.end_time_unix_nano,
            attributes: attributes(span.attributes),
        })
    };
    export.resource_spans.into_iter().flat_map(of_process).collect()
}

fn attributes(list: Vec<KeyValue>) -> BTreeMap<String, Value> {
    let value =
        |KeyValue { key, value, .. }: KeyValue| Some((key, value.and_then(|AnyValue { value }| value)?));
    list.into_iter().filter_map(value).collect()
}
