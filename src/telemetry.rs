//! Log lines on stderr, and spans by OTLP when the user names a collector (`OTEL_EXPORTER_OTLP_ENDPOINT`).

use anyhow::{Context as _, Result};
use opentelemetry::trace::TracerProvider as _;
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::SdkTracerProvider;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;
use tracing_subscriber::{EnvFilter, Layer as _};

use crate::args::LogFormat;
use crate::config::Environment;
use crate::screen::Screen;

/// Sends the last spans when it is dropped; drop it before the runtime.
#[derive(Debug)]
#[must_use = "spans are sent until it is dropped"]
pub(crate) struct Telemetry(Option<SdkTracerProvider>);

/// Starts both. `level` is what is logged when the environment does not say; `service` names this process in traces.
/// Call it inside the runtime that carries the exporter's connection.
///
/// # Errors
/// A filter that is none, or a collector's address that is none.
pub(crate) fn start(
    environment: &Environment,
    format: LogFormat,
    level: &str,
    service: &'static str,
    screen: &Screen,
) -> Result<Telemetry> {
    let filter = filter(environment.log.as_deref().unwrap_or(level))?;
    let screen = screen.clone();
    let lines = tracing_subscriber::fmt::layer().with_writer(move || screen.clone()).with_target(false);
    let lines = match format {
        LogFormat::Text => lines.with_ansi(false).compact().boxed(),
        LogFormat::Json => lines.json().boxed(),
    };
    let provider = if environment.otlp { Some(exporter(service)?) } else { None };
    let spans = match &provider {
        None => None,
        Some(provider) => {
            let layer = tracing_opentelemetry::layer().with_tracer(provider.tracer("ebbflow"));
            // The exporter's own transport must not be traced: each export would cause the next.
            let quiet = "h2=off,hyper=off,tonic=off,tower=off,opentelemetry=off";
            let filter = self::filter(&format!("{},{quiet}", environment.log.as_deref().unwrap_or("info")))?;
            Some(layer.with_filter(filter))
        }
    };
    // A user's own program may have a subscriber already; then its wishes count.
    let _ = tracing_subscriber::registry().with(lines.with_filter(filter)).with(spans).try_init();
    Ok(Telemetry(provider))
}

fn filter(directives: &str) -> Result<EnvFilter> {
    EnvFilter::try_new(directives).with_context(|| {
        format!(
            "EBB_LOG (or RUST_LOG): `{directives}` is no filter; expected e.g. `info` or `warn,master=debug`"
        )
    })
}

fn exporter(service: &'static str) -> Result<SdkTracerProvider> {
    let exporter = opentelemetry_otlp::SpanExporter::builder().with_tonic().build();
    let exporter = exporter.context("OTEL_EXPORTER_OTLP_ENDPOINT: expected e.g. http://localhost:4317")?;
    let resource = Resource::builder().with_service_name(service).build();
    Ok(SdkTracerProvider::builder().with_batch_exporter(exporter).with_resource(resource).build())
}

impl Drop for Telemetry {
    fn drop(&mut self) {
        if let Some(provider) = self.0.take() {
            // A collector that is away must not keep the program from leaving.
            let _ = provider.shutdown_with_timeout(std::time::Duration::from_secs(2));
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
