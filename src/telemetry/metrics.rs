//! A role's numbers: for Prometheus at `/metrics` (`--metrics ADDR`), and for a collector by OTLP.
//!
//! Everybody who reaches that address may read them, without certificate or token. Connections that
//! make no request are closed.

use std::io;
use std::net::SocketAddr;

use anyhow::{Context as _, Result};
use axum::Router;
use axum::extract::ConnectInfo;
use axum::extract::connect_info::Connected;
use axum::http::header::CONTENT_TYPE;
use axum::routing::get;
use axum::serve::{IncomingStream, Listener};
use futures::StreamExt as _;
use futures::stream::BoxStream;
use net::channel::{Accepted, Io};
use net::metrics::{Board, Kind, Reading, prometheus};
use net::security::{Guest, Options};
use opentelemetry::KeyValue;
use opentelemetry::metrics::{AsyncInstrument, Meter};

use crate::config;
use crate::locks;
use crate::terminal::screen::Screen;

/// The name of the text format, so that Prometheus need not guess it.
const TEXT: &str = "text/plain; version=0.0.4; charset=utf-8";

/// The numbers of this process, and where they are shown.
#[derive(Clone, Debug, Default)]
pub(crate) struct Numbers {
    board: Board,
    /// Registers them for a collector, if there is one.
    meter: Option<Meter>,
}

impl Numbers {
    /// Numbers that go to the collector of `meter`, if there is one.
    pub(crate) fn new(meter: Option<Meter>) -> Self {
        Self { board: Board::default(), meter }
    }

    /// Returns the board on which a role shows its numbers.
    pub(crate) const fn board(&self) -> &Board {
        &self.board
    }

    /// Serves what the board shows, until the process ends. Prints the address on `screen`.
    ///
    /// # Errors
    /// `address` is wrong or taken, or other machines reach it while this process has no `keys`.
    pub(crate) async fn serve(&self, address: Option<&str>, keys: &Options, screen: &Screen) -> Result<()> {
        if let Some(meter) = &self.meter {
            // Readings of one name follow each other.
            let mut readings = read(&self.board);
            readings.dedup_by_key(|reading| reading.name);
            readings.iter().for_each(|reading| register(meter, reading, &self.board));
        }
        let Some(address) = address else { return Ok(()) };
        let (listener, address) = config::bind_to_show(address, keys).await.context("--metrics")?;
        screen.print(&format!("metrics at http://{address}/metrics"))?;
        let entrance = Entrance { connections: locks::watchers().open(listener, None).boxed(), address };
        let service = router(self.board.clone()).into_make_service_with_connect_info::<Asker>();
        tokio::spawn(axum::serve(entrance, service).into_future());
        Ok(())
    }
}

fn router(board: Board) -> Router {
    let show = async move |ConnectInfo(Asker(guest)): ConnectInfo<Asker>| {
        guest.prove();
        ([(CONTENT_TYPE, TEXT)], prometheus(&read(&board)))
    };
    Router::new().route("/metrics", get(show))
}

/// Returns the numbers of the role, and the memory of its process.
fn read(board: &Board) -> Vec<Reading> {
    let mut readings = board.read();
    let used = memory_bytes("/proc/self/status", "VmRSS:");
    let (used_help, limit_help) = (
        "Memory of this process that is resident.",
        "Memory that this process may use: the limit of its control groups, or what the machine has.",
    );
    readings.extend(used.map(|used| Reading::gauge("ebb_process_memory_bytes", used_help, used)));
    let limit = data::memory_limit();
    readings.push(Reading::gauge("ebb_process_memory_limit_bytes", limit_help, limit));
    readings
}

/// Returns the bytes in a line `NAME   NUMBER kB` of a file of the kernel. `None` without such a
/// file.
fn memory_bytes(file: &str, name: &str) -> Option<u64> {
    let text = std::fs::read_to_string(file).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    Some(1024 * line.split_whitespace().next()?.parse::<u64>().ok()?)
}

/// The connections of a door, in the form that axum takes.
struct Entrance {
    connections: BoxStream<'static, io::Result<Accepted<Box<dyn Io>>>>,
    address: SocketAddr,
}

impl Listener for Entrance {
    type Io = Accepted<Box<dyn Io>>;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Self::Io, SocketAddr) {
        loop {
            match self.connections.next().await {
                Some(Ok(connection)) => return (connection, self.address),
                Some(Err(_)) => {}
                None => std::future::pending().await,
            }
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        Ok(self.address)
    }
}

/// The sender of a request.
#[derive(Clone, Debug)]
struct Asker(Guest);

impl Connected<IncomingStream<'_, Entrance>> for Asker {
    fn connect_info(stream: IncomingStream<'_, Entrance>) -> Self {
        Self(stream.io().guest().clone())
    }
}

/// Registers a number of the board for a collector's exporter, for all devices.
fn register(meter: &Meter, reading: &Reading, board: &Board) {
    let Reading { name, help, kind, .. } = *reading;
    let board = board.clone();
    let observe = move |instrument: &dyn AsyncInstrument<f64>| {
        for reading in read(&board).iter().filter(|reading| reading.name == name) {
            let device = reading.device.map(|device| KeyValue::new("device", format!("cuda:{device}")));
            instrument.observe(reading.value, device.as_slice());
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
