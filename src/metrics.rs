//! A role's numbers: for Prometheus at `/metrics` (`--metrics ADDR`), and for a collector by OTLP.

use anyhow::{Context as _, Result};
use axum::Router;
use axum::http::header::CONTENT_TYPE;
use axum::routing::get;
use opentelemetry::metrics::{AsyncInstrument, Meter};
use proto::metrics::{Board, Kind, Reading, prometheus};

use crate::App;
use crate::config;

/// The text format's name, so that Prometheus need not guess it.
const TEXT: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Shows what the role's board shows, until the process ends. Prints where.
///
/// # Errors
/// The address is none, or taken.
pub(crate) async fn serve(address: Option<&str>, app: &App) -> Result<()> {
    if let Some(meter) = &app.meter {
        app.board.read().iter().for_each(|reading| register(meter, reading, &app.board));
    }
    let Some(address) = app.environment.metrics(address) else { return Ok(()) };
    let (listener, address) = config::bind(address).await.context("--metrics")?;
    app.screen.print(&format!("metrics at http://{address}/metrics"))?;
    tokio::spawn(axum::serve(listener, router(app.board.clone())).into_future());
    Ok(())
}

fn router(board: Board) -> Router {
    Router::new().route("/metrics", get(async move || ([(CONTENT_TYPE, TEXT)], prometheus(&board.read()))))
}

/// Lets a collector's exporter read a number of the board.
fn register(meter: &Meter, reading: &Reading, board: &Board) {
    let Reading { name, help, kind, .. } = *reading;
    let board = board.clone();
    let observe = move |instrument: &dyn AsyncInstrument<f64>| {
        if let Some(reading) = board.read().iter().find(|reading| reading.name == name) {
            instrument.observe(reading.value, &[]);
        }
    };
    // The exporter keeps what is built.
    match kind {
        Kind::Counter => {
            let _ = meter.f64_observable_counter(name).with_description(help).with_callback(observe).build();
        }
        Kind::Gauge => {
            let _ = meter.f64_observable_gauge(name).with_description(help).with_callback(observe).build();
        }
    }
}
