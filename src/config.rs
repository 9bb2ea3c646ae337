//! What the user did not say on the command line: environment, then default. The only reader of the environment.
#![expect(clippy::disallowed_methods, reason = "this is the one file that reads the environment")]

use std::net::SocketAddr;

use anyhow::{Context as _, Result, bail};
use proto::channel::Dialer;
use proto::checkpoint::store::Stores;

/// Where a master listens unless told otherwise.
const MASTER: &str = "http://127.0.0.1:4700";

/// Everything that comes from outside the command line, read once at the start.
#[derive(Clone, Debug, Default)]
pub(crate) struct Environment {
    /// `EBB_MASTER`.
    master: Option<String>,
    /// `EBB_HEALTH`.
    health: Option<String>,
    /// `EBB_LOG`, else `RUST_LOG`: which log lines there are.
    pub(crate) log: Option<String>,
    /// Whether `OTEL_EXPORTER_OTLP_ENDPOINT` (or its `TRACES` or `METRICS` form) is set; the exporter reads the value itself.
    pub(crate) otlp: bool,
    /// `EBB_METRICS`: where a role shows its numbers.
    metrics: Option<String>,
    /// `EBB_SOCKETS`: `tcp`, or the default `nearest`.
    sockets: Option<String>,
    /// This program as the user calls it.
    pub(crate) program: String,
    /// This machine, for default names.
    host: String,
    /// Object stores with their settings: `AWS_...`, `GOOGLE_...`, `AZURE_...`.
    pub(crate) stores: Stores,
}

impl Environment {
    /// Reads it.
    pub(crate) fn read() -> Self {
        let get = |name: &str| std::env::var(name).ok().filter(|value| !value.trim().is_empty());
        let program = std::env::args_os().next().map(std::path::PathBuf::from);
        let program = program.and_then(|path| Some(path.file_name()?.to_string_lossy().into_owned()));
        let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        Self {
            master: get("EBB_MASTER"),
            sockets: get("EBB_SOCKETS"),
            health: get("EBB_HEALTH"),
            log: get("EBB_LOG").or_else(|| get("RUST_LOG")),
            metrics: get("EBB_METRICS"),
            otlp: get("OTEL_EXPORTER_OTLP_ENDPOINT").is_some()
                || get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT").is_some()
                || get("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT").is_some(),
            program: program.unwrap_or_else(|| "ebb".to_owned()),
            stores: Stores::new(
                std::env::vars_os()
                    .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
                    .filter(|(name, _)| {
                        ["AWS_", "GOOGLE_", "AZURE_"].iter().any(|begin| name.starts_with(begin))
                    })
                    .collect(),
            ),
            host: if host.trim().is_empty() { "localhost".to_owned() } else { host.trim().to_owned() },
        }
    }

    /// URLs of the masters, separated by commas: flag over environment over default.
    pub(crate) fn master(&self, flag: Option<&str>) -> String {
        urls(flag.or(self.master.as_deref()).unwrap_or(MASTER))
    }

    /// Where a role shows its numbers, if anywhere: flag over environment.
    pub(crate) fn metrics<'a>(&'a self, flag: Option<&'a str>) -> Option<&'a str> {
        flag.or(self.metrics.as_deref())
    }

    /// How connections are opened: over the nearest way there is, unless the user says TCP.
    ///
    /// # Errors
    /// Some other word.
    pub(crate) fn dialer(&self) -> Result<Dialer> {
        match self.sockets.as_deref() {
            None | Some("nearest") => Ok(Dialer::nearest()),
            Some("tcp") => Ok(Dialer::tcp()),
            Some(other) => bail!(
                "EBB_SOCKETS=`{other}`; expected `nearest` (Unix sockets to processes of this host) or `tcp`"
            ),
        }
    }

    /// URL of the process whose health is asked for, found in the same way: argument over environment over default.
    pub(crate) fn health(&self, argument: Option<&str>) -> String {
        self.master(Some(argument.or(self.health.as_deref()).unwrap_or(MASTER)))
    }

    /// Name of a ps that listens on `address` and was given none.
    pub(crate) fn ps_name(&self, address: SocketAddr) -> String {
        format!("ps-{}-{}", self.host, address.port())
    }

    /// Name of a worker that was given none.
    pub(crate) fn worker_name(&self) -> String {
        format!("worker-{}-{}", self.host, std::process::id())
    }
}

/// A list of URLs with commas, each written out: `HOST:PORT` is taken for `http://HOST:PORT`.
pub(crate) fn urls(list: &str) -> String {
    let written = |url: &str| match url.trim_end_matches('/') {
        url if url.contains("://") => url.to_owned(),
        host => format!("http://{host}"),
    };
    proto::failover::urls(list).map(written).collect::<Vec<_>>().join(",")
}

/// URL where others reach a server that listens on `address`: what the user says, else that address.
///
/// # Errors
/// It listens on every interface and the user did not say which one others reach.
pub(crate) fn advertised(flag: Option<&str>, address: SocketAddr) -> Result<String> {
    match flag {
        Some(url) if url.contains("://") => Ok(url.trim_end_matches('/').to_owned()),
        Some(host) => Ok(format!("http://{host}")),
        None if address.ip().is_unspecified() => bail!(
            "--listen {address} is every interface of this machine; say with --advertise http://HOST:PORT where others reach it"
        ),
        None => Ok(format!("http://{address}")),
    }
}

/// Takes the address `listen`.
///
/// # Errors
/// It is no address, or somebody else has it.
pub(crate) async fn bind(listen: &str) -> Result<(tokio::net::TcpListener, SocketAddr)> {
    let listener = tokio::net::TcpListener::bind(listen).await.with_context(|| {
        format!(
            "cannot listen on {listen}; expected HOST:PORT of this machine that is free (port 0 takes any)"
        )
    })?;
    let address = listener.local_addr().context("the address of the listening socket")?;
    Ok((listener, address))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_flag_wins_over_the_environment_over_the_default() {
        let with = |master: Option<&str>| Environment {
            master: master.map(str::to_owned),
            ..Environment::default()
        };
        assert_eq!(with(None).master(None), "http://127.0.0.1:4700");
        assert_eq!(with(Some("http://m:1/")).master(None), "http://m:1");
        assert_eq!(with(Some("http://m:1")).master(Some("10.0.0.7:2")), "http://10.0.0.7:2");
        assert_eq!(with(Some("m:1, http://n:1/")).master(None), "http://m:1,http://n:1");
    }

    #[test]
    fn a_ps_on_every_interface_must_say_where_it_is_reached() {
        let everywhere: SocketAddr = "0.0.0.0:4701".parse().unwrap();
        assert!(advertised(None, everywhere).unwrap_err().to_string().contains("--advertise"));
        assert_eq!(advertised(Some("10.0.0.7:4701"), everywhere).unwrap(), "http://10.0.0.7:4701");
        let one: SocketAddr = "[::1]:4701".parse().unwrap();
        assert_eq!(advertised(None, one).unwrap(), "http://[::1]:4701");
    }

    #[tokio::test]
    async fn a_taken_address_is_an_error_that_names_it() {
        let (_listener, address) = bind("127.0.0.1:0").await.unwrap();
        let error = bind(&address.to_string()).await.unwrap_err().to_string();
        assert!(error.contains(&address.to_string()), "{error}");
    }
}
