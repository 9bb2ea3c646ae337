//! Log lines on stderr. Spans and numbers by OTLP, if the user names a collector
//! (`OTEL_EXPORTER_OTLP_ENDPOINT`). The timeline of this process as a Chrome trace, if the user
//! names a file (`--trace`).

pub(crate) mod devices;
mod export;
pub(crate) mod metrics;
mod span;
mod spans;
mod timeline;

use std::fs::File;
use std::path::Path;

use anyhow::{Context as _, Result};
use net::timeline::TARGET;
use opentelemetry::metrics::{Meter, MeterProvider as _};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::metrics::SdkMeterProvider;
use tokio::runtime::Runtime;
use tracing::Level;
use tracing_subscriber::Layer as _;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;

use self::export::Sending;
use self::spans::Spans;
use self::timeline::{Ending, Timeline};
use crate::args::LogFormat;
use crate::config::{Batches, Environment};
use crate::terminal::screen::Screen;

/// The name of the program's scope of spans and numbers.
const SCOPE: &str = "ebbflow";

/// Telemetry of this process. Its drop sends the last spans and numbers, and ends the timeline's
/// file.
#[must_use = "spans are sent until it is dropped"]
pub(crate) struct Telemetry {
    sending: Option<Sending>,
    numbers: Option<SdkMeterProvider>,
    /// The runtime of the connections to the collector. They take no time of the runtime that
    /// trains.
    exporting: Option<Runtime>,
    _timeline: Option<Ending>,
}

/// Starts logs, spans, numbers and the timeline. `trace` is the file of the timeline, `level` the
/// filter of log lines if the environment has none, `service` the name of this process in traces.
///
/// # Errors
/// The filter or the collector's address is wrong, or the timeline's file cannot be written.
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
    let exporting = environment.otlp.then(exporting).transpose()?;
    let (sending, numbers) = match &exporting {
        None => (None, None),
        Some(runtime) => {
            let _in_runtime = runtime.enter();
            (Some(sending(service, environment.batches, runtime)?), Some(number_exporter(service)?))
        }
    };
    let (file, _timeline) = trace.map(|path| timeline(path, service)).transpose()?.unzip();
    let export = sending.as_ref().map(Sending::export);
    let wanted = match &export {
        None => Targets::new().with_target(TARGET, Level::DEBUG),
        Some(_) => {
            // The exporter's own transport must not be traced: each export would cause the next.
            let quiet = "h2=off,hyper=off,tonic=off,tower=off,opentelemetry=off";
            let level = environment.log.as_deref().unwrap_or("info");
            self::filter(&format!("{level},{TARGET}=debug,{quiet}"))?
        }
    };
    let spans = (export.is_some() || file.is_some()).then(|| Spans { file, export }.with_filter(wanted));
    // A user's own program may have a subscriber already; then its wishes count.
    let lines = lines.with_filter(filter);
    let _ = tracing_subscriber::registry().with(lines).with(spans).try_init();
    Ok(Telemetry { sending, numbers, exporting, _timeline })
}

/// Returns a filter by target and level, which are decided once for each place in the code. A
/// filter by the spans around would be asked at every poll of every future that has a span.
fn filter(directives: &str) -> Result<Targets> {
    let filter = directives.parse().ok().filter(|_| !directives.contains('['));
    filter.with_context(|| {
        format!(
            "EBB_LOG (or RUST_LOG): `{directives}` is no filter; expected targets and levels, e.g. `info` or `warn,master=debug`"
        )
    })
}

/// The message for a wrong address of the collector.
const ADDRESS: &str = "OTEL_EXPORTER_OTLP_ENDPOINT: expected e.g. http://localhost:4317";

fn sending(service: &'static str, batches: Batches, runtime: &Runtime) -> Result<Sending> {
    let exporter = opentelemetry_otlp::SpanExporter::builder().with_tonic().build().context(ADDRESS)?;
    Ok(Sending::start(exporter, (SCOPE, &resource(service)), batches, runtime.handle()))
}

fn number_exporter(service: &'static str) -> Result<SdkMeterProvider> {
    let exporter = opentelemetry_otlp::MetricExporter::builder().with_tonic().build().context(ADDRESS)?;
    Ok(SdkMeterProvider::builder().with_periodic_exporter(exporter).with_resource(resource(service)).build())
}

fn resource(service: &'static str) -> Resource {
    Resource::builder().with_service_name(service).build()
}

/// Returns a runtime of one thread, which sleeps between exports.
fn exporting() -> Result<Runtime> {
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    runtime
        .worker_threads(1)
        .thread_name("telemetry")
        .enable_all()
        .build()
        .context("start the exporters' runtime")
}

fn timeline(path: &Path, service: &'static str) -> Result<(Timeline, Ending)> {
    let begun = File::create(path).and_then(|file| Timeline::new(file, service));
    begun.with_context(|| format!("--trace {}: cannot be written", path.display()))
}

impl Telemetry {
    /// Returns the meter that registers numbers for the collector, if there is one.
    pub(crate) fn meter(&self) -> Option<Meter> {
        self.numbers.as_ref().map(|provider| provider.meter(SCOPE))
    }
}

impl Drop for Telemetry {
    fn drop(&mut self) {
        // A collector that is away must not keep the program from leaving.
        let patience = std::time::Duration::from_secs(2);
        if let Some(sending) = self.sending.take() {
            sending.end(patience);
        }
        if let Some(provider) = self.numbers.take() {
            let _ = provider.shutdown_with_timeout(patience);
        }
        // Not waited for: a collector that is away keeps its task busy.
        if let Some(runtime) = self.exporting.take() {
            runtime.shutdown_background();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_filter_that_is_none_names_the_variable() {
        assert!(filter("warn,master=debug,h2=off").is_ok());
        for none in ["master=loud", "[job]=debug", "master[{id}]=debug"] {
            assert!(filter(none).unwrap_err().to_string().contains("EBB_LOG"), "{none}");
        }
    }
}
