//! Log lines on stderr; spans and numbers by OTLP when the user names a collector (`OTEL_EXPORTER_OTLP_ENDPOINT`); the timeline of
//! this process as a Chrome trace when the user names a file (`--trace`).

use std::fs::File;
use std::path::Path;

use anyhow::{Context as _, Result};
use opentelemetry::metrics::{Meter, MeterProvider as _};
use opentelemetry::trace::TracerProvider as _;
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::metrics::SdkMeterProvider;
use opentelemetry_sdk::propagation::TraceContextPropagator;
use opentelemetry_sdk::trace::SdkTracerProvider;
use proto::timeline;
use tracing::Level;
use tracing_chrome::{ChromeLayerBuilder, FlushGuard, TraceStyle};
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;
use tracing_subscriber::{EnvFilter, Layer as _};

use crate::args::LogFormat;
use crate::config::Environment;
use crate::screen::Screen;

/// What the program's scope of spans and numbers is called.
const SCOPE: &str = "ebbflow";

/// Sends the last spans and numbers, and writes the last of the timeline, when it is dropped; drop it before the runtime.
#[must_use = "spans are sent until it is dropped"]
pub(crate) struct Telemetry {
    spans: Option<SdkTracerProvider>,
    numbers: Option<SdkMeterProvider>,
    _timeline: Option<FlushGuard>,
}

/// Starts all of it. `trace` is the file of the timeline. `level` is what is logged when the environment does not say; `service` names this process in traces.
/// Call it inside the runtime that carries the exporter's connection.
///
/// # Errors
/// A filter that is none, or a collector's address that is none.
pub(crate) fn start(
    environment: &Environment,
    format: LogFormat,
    level: &str,
    service: &'static str,
    trace: Option<&Path>,
    screen: &Screen,
) -> Result<Telemetry> {
    let filter = filter(environment.log.as_deref().unwrap_or(level))?;
    let screen = screen.clone();
    let lines = tracing_subscriber::fmt::layer().with_writer(move || screen.clone()).with_target(false);
    let lines = match format {
        LogFormat::Text => lines.with_ansi(false).compact().boxed(),
        LogFormat::Json => lines.json().boxed(),
    };
    let (spans, numbers) = match environment.otlp {
        true => (Some(span_exporter(service)?), Some(number_exporter(service)?)),
        false => (None, None),
    };
    let span_layer = match &spans {
        None => None,
        Some(provider) => {
            opentelemetry::global::set_text_map_propagator(TraceContextPropagator::new());
            // Where a span stands in the code, and on which thread, says nothing to who reads traces, and would be most of a span's bytes.
            let layer = tracing_opentelemetry::layer()
                .with_location(false)
                .with_threads(false)
                .with_target(false)
                .with_tracked_inactivity(false)
                .with_tracer(provider.tracer(SCOPE));
            // The exporter's own transport must not be traced: each export would cause the next.
            let quiet = "h2=off,hyper=off,tonic=off,tower=off,opentelemetry=off";
            let level = environment.log.as_deref().unwrap_or("info");
            let filter = self::filter(&format!("{level},{}=debug,{quiet}", timeline::TARGET))?;
            Some(layer.with_filter(filter))
        }
    };
    let (timeline_layer, _timeline) = match trace.map(timeline_file).transpose()? {
        None => (None, None),
        Some(file) => {
            let builder =
                ChromeLayerBuilder::new().writer(file).trace_style(TraceStyle::Async).include_args(true);
            let (layer, guard) = builder.build();
            let only = Targets::new().with_target(timeline::TARGET, Level::DEBUG);
            (Some(layer.with_filter(only)), Some(guard))
        }
    };
    // A user's own program may have a subscriber already; then its wishes count.
    let lines = lines.with_filter(filter);
    let _ = tracing_subscriber::registry().with(lines).with(span_layer).with(timeline_layer).try_init();
    Ok(Telemetry { spans, numbers, _timeline })
}

fn filter(directives: &str) -> Result<EnvFilter> {
    EnvFilter::try_new(directives).with_context(|| {
        format!(
            "EBB_LOG (or RUST_LOG): `{directives}` is no filter; expected e.g. `info` or `warn,master=debug`"
        )
    })
}

/// What is said where the collector's address is none.
const ADDRESS: &str = "OTEL_EXPORTER_OTLP_ENDPOINT: expected e.g. http://localhost:4317";

fn span_exporter(service: &'static str) -> Result<SdkTracerProvider> {
    let exporter = opentelemetry_otlp::SpanExporter::builder().with_tonic().build().context(ADDRESS)?;
    Ok(SdkTracerProvider::builder().with_batch_exporter(exporter).with_resource(resource(service)).build())
}

fn number_exporter(service: &'static str) -> Result<SdkMeterProvider> {
    let exporter = opentelemetry_otlp::MetricExporter::builder().with_tonic().build().context(ADDRESS)?;
    Ok(SdkMeterProvider::builder().with_periodic_exporter(exporter).with_resource(resource(service)).build())
}

fn resource(service: &'static str) -> Resource {
    Resource::builder().with_service_name(service).build()
}

fn timeline_file(path: &Path) -> Result<File> {
    File::create(path).with_context(|| format!("--trace {}: cannot be written", path.display()))
}

impl Telemetry {
    /// Where numbers for the collector are registered, if there is one.
    pub(crate) fn meter(&self) -> Option<Meter> {
        self.numbers.as_ref().map(|provider| provider.meter(SCOPE))
    }
}

impl Drop for Telemetry {
    fn drop(&mut self) {
        // A collector that is away must not keep the program from leaving.
        let patience = std::time::Duration::from_secs(2);
        if let Some(provider) = self.spans.take() {
            let _ = provider.shutdown_with_timeout(patience);
        }
        if let Some(provider) = self.numbers.take() {
            let _ = provider.shutdown_with_timeout(patience);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_filter_that_is_none_names_the_variable() {
        assert!(filter("warn,master=debug").is_ok());
        assert!(filter("master=loud").unwrap_err().to_string().contains("EBB_LOG"));
    }
}
