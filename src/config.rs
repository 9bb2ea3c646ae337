//! The environment, for what the user did not say on the command line. No other file reads it.
#![expect(clippy::disallowed_methods, reason = "this is the one file that reads the environment")]

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use net::channel::{Dialer, Listener};
use net::memory::Memory;
use net::security::{self, Keys};
use store::Stores;

use crate::launch::devices::VISIBLE;

/// The default address of a master.
const MASTER: &str = "127.0.0.1:4700";

/// The environment of the process, read once at the start.
#[derive(Clone, Debug, Default)]
pub(crate) struct Environment {
    /// The value of `EBB_MASTER`.
    master: Option<String>,
    /// The value of `EBB_HEALTH`.
    health: Option<String>,
    /// The values of `EBB_TLS_CA`, `EBB_TLS_CERT`, `EBB_TLS_KEY`, `EBB_TOKEN_FILE` and
    /// `EBB_INSECURE`.
    pub(crate) keys: security::Options,
    /// The filter of log lines: `EBB_LOG`, else `RUST_LOG`.
    pub(crate) log: Option<String>,
    /// True if `OTEL_EXPORTER_OTLP_ENDPOINT` is set, or its `TRACES` or `METRICS` form. The
    /// exporter reads the value itself.
    pub(crate) otlp: bool,
    /// The values of `OTEL_BSP_SCHEDULE_DELAY`, `OTEL_BSP_MAX_QUEUE_SIZE` and
    /// `OTEL_BSP_MAX_EXPORT_BATCH_SIZE`.
    pub(crate) batches: Batches,
    /// All variables that begin with `EBB_`: the settings of roles.
    variables: BTreeMap<String, String>,
    /// `EBB_SOCKETS`: `tcp`, `unix`, or the default `nearest`.
    sockets: Option<String>,
    /// The program's name as the user typed it.
    pub(crate) program: String,
    /// The name of this machine, for default names.
    host: String,
    /// The folder for what this user's processes may make again: `XDG_CACHE_HOME`, else
    /// `HOME/.cache`.
    cache: Option<PathBuf>,
    /// The Python environment that the user has activated: `VIRTUAL_ENV`.
    virtual_env: Option<PathBuf>,
    /// Object stores with their settings: `AWS_...`, `GOOGLE_...`, `AZURE_...`.
    pub(crate) stores: Stores,
}

/// Settings of the queue of spans: variables of OpenTelemetry's batch processor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Batches {
    /// Longest time that a span waits for others: `OTEL_BSP_SCHEDULE_DELAY`, in milliseconds.
    pub(crate) delay: Duration,
    /// Largest number of waiting spans: `OTEL_BSP_MAX_QUEUE_SIZE`. Further spans are dropped.
    pub(crate) queue_max: usize,
    /// Largest number of spans in one call: `OTEL_BSP_MAX_EXPORT_BATCH_SIZE`.
    pub(crate) batch_max: usize,
}

/// A call costs as much as sending 100 spans. Batches of 512, the specification's default, take
/// memory that the exporter's thread has no other use for.
impl Default for Batches {
    fn default() -> Self {
        Self { delay: Duration::from_secs(5), queue_max: 2048, batch_max: 256 }
    }
}

/// Returns the value of `GLIBC_TUNABLES`, the user's settings of the C library.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
pub(crate) fn c_tunables() -> String {
    std::env::var("GLIBC_TUNABLES").unwrap_or_default()
}

/// True if the environment has a variable, which a library reads.
pub(crate) fn is_set(name: &str) -> bool {
    std::env::var_os(name).is_some()
}

/// Returns the value of a variable that a user names as a secret, if it has one.
pub(crate) fn secret(name: &str) -> Option<OsString> {
    std::env::var_os(name)
}

/// Returns the devices to which CUDA limits this process, as the user wrote them. `None`: all.
pub(crate) fn visible_devices() -> Option<String> {
    std::env::var(VISIBLE).ok()
}

/// Returns the variables by which programs and their libraries are found.
pub(crate) fn programs() -> Vec<(String, String)> {
    let found = |name: &str| Some((name.to_owned(), std::env::var(name).ok()?));
    ["PATH", "LD_LIBRARY_PATH"].into_iter().filter_map(found).collect()
}

/// True if a variable, which a library reads, has this value.
pub(crate) fn is(name: &str, value: &str) -> bool {
    std::env::var_os(name).is_some_and(|found| found == value)
}

/// Reads the settings of the queue of spans. A value that is no number above zero counts as not
/// set, as OpenTelemetry wants it.
fn batches(get: impl Fn(&str) -> Option<String>) -> Batches {
    let number = |name: &str| get(name)?.trim().parse::<u32>().ok().filter(|&number| number > 0);
    let size = |name: &str, default: usize| number(name).map_or(default, |number| number as usize);
    let default = Batches::default();
    let delay = number("OTEL_BSP_SCHEDULE_DELAY").map(|millis| Duration::from_millis(millis.into()));
    let queue_max = size("OTEL_BSP_MAX_QUEUE_SIZE", default.queue_max);
    let batch_max = size("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", default.batch_max).min(queue_max);
    Batches { delay: delay.unwrap_or(default.delay), queue_max, batch_max }
}

impl Environment {
    /// Reads the environment of a program with this name or path.
    pub(crate) fn read(program: Option<&OsString>) -> Self {
        let get = |name: &str| std::env::var(name).ok().filter(|value| !value.trim().is_empty());
        let file = |name: &str| std::env::var_os(name).filter(|path| !path.is_empty()).map(PathBuf::from);
        let program = program.map(Path::new);
        let program = program.and_then(|path| Some(path.file_name()?.to_string_lossy().into_owned()));
        let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        Self {
            master: get("EBB_MASTER"),
            sockets: get("EBB_SOCKETS"),
            health: get("EBB_HEALTH"),
            keys: security::Options {
                ca: file("EBB_TLS_CA"),
                cert: file("EBB_TLS_CERT"),
                key: file("EBB_TLS_KEY"),
                token: file("EBB_TOKEN_FILE"),
                tokens: None,
                insecure: get("EBB_INSECURE")
                    .is_some_and(|value| ["1", "true", "yes"].contains(&value.as_str())),
            },
            log: get("EBB_LOG").or_else(|| get("RUST_LOG")),
            variables: std::env::vars_os()
                .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
                .filter(|(name, value)| name.starts_with("EBB_") && !value.trim().is_empty())
                .collect(),
            otlp: get("OTEL_EXPORTER_OTLP_ENDPOINT").is_some()
                || get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT").is_some()
                || get("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT").is_some(),
            batches: batches(get),
            cache: file("XDG_CACHE_HOME").or_else(|| file("HOME").map(|home| home.join(".cache"))),
            virtual_env: file("VIRTUAL_ENV"),
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

    /// URLs of the masters, separated by commas: flag over environment over default. `HOST:PORT`
    /// becomes an https:// or http:// URL, as `keys` say.
    pub(crate) fn master(&self, flag: Option<&str>, keys: &Keys) -> String {
        urls(flag.or(self.master.as_deref()).unwrap_or(MASTER), keys.scheme())
    }

    /// Returns the CUDA devices for the roles of this process. None is open yet.
    pub(crate) fn devices(&self) -> kernels::device::Devices {
        kernels::device::Devices::new(self.kernels())
    }

    /// Returns the folder for compiled kernels of CUDA devices, if there is a place for it.
    pub(crate) fn kernels(&self) -> Option<PathBuf> {
        self.cache.as_ref().map(|folder| folder.join("ebbflow/kernels"))
    }

    /// Returns the Python interpreter of scripts: flag over `EBB_PYTHON` over the environment that
    /// the user has activated over `python3`.
    pub(crate) fn python(&self, flag: Option<&Path>) -> PathBuf {
        let given = flag.or(self.variable("EBB_PYTHON").map(Path::new)).map(Path::to_owned);
        let activated = || self.virtual_env.as_ref().map(|folder| folder.join("bin/python"));
        given.or_else(activated).unwrap_or_else(|| "python3".into())
    }

    /// Names of all variables that begin with `EBB_`.
    pub(crate) fn own_variables(&self) -> impl Iterator<Item = &str> {
        self.variables.keys().map(String::as_str)
    }

    /// Returns the value of a variable that begins with `EBB_`.
    pub(crate) fn variable(&self, name: &str) -> Option<&str> {
        self.variables.get(name).map(String::as_str)
    }

    /// Creates an environment that has only these variables.
    #[cfg(test)]
    pub(crate) fn with(variables: &[(&str, &str)]) -> Self {
        let variables = variables.iter().map(|&(name, value)| (name.to_owned(), value.to_owned()));
        Self { variables: variables.collect(), ..Self::default() }
    }

    /// Returns a dialer that takes the nearest way to a process, or TCP if the user says so.
    ///
    /// # Errors
    /// `EBB_SOCKETS` has another word.
    pub(crate) fn dialer(&self) -> Result<Dialer> {
        Ok(if self.ways()? == Ways::Tcp { Dialer::tcp() } else { Dialer::nearest() })
    }

    /// Returns a listener at `tcp`, and at a Unix socket beside it unless the user says TCP.
    ///
    /// # Errors
    /// `EBB_SOCKETS` has another word, or the system refuses the socket.
    pub(crate) fn listener(&self, tcp: tokio::net::TcpListener) -> Result<Listener> {
        Ok(if self.ways()? == Ways::Tcp { Listener::tcp(tcp)? } else { Listener::beside(tcp)? })
    }

    /// Memory that processes of this host and this user may read. `None` if the system has no such
    /// memory, or the user forbids it.
    ///
    /// # Errors
    /// `EBB_SOCKETS` has another word.
    pub(crate) fn memory(&self) -> Result<Option<Memory>> {
        if self.ways()? != Ways::Nearest {
            return Ok(None);
        }
        let none = |error: &std::io::Error| tracing::debug!(%error, "no memory that others could read");
        Ok(Memory::new().inspect_err(none).ok())
    }

    fn ways(&self) -> Result<Ways> {
        match self.sockets.as_deref() {
            None | Some("nearest") => Ok(Ways::Nearest),
            Some("unix") => Ok(Ways::Unix),
            Some("tcp") => Ok(Ways::Tcp),
            Some(other) => bail!(
                "EBB_SOCKETS=`{other}`; expected `nearest` (shared memory and Unix sockets to processes of this host), `unix` (without \
                 the memory) or `tcp`"
            ),
        }
    }

    /// URL of the process whose health is asked for: argument over environment over default.
    pub(crate) fn health(&self, argument: Option<&str>, keys: &Keys) -> String {
        self.master(Some(argument.or(self.health.as_deref()).unwrap_or(MASTER)), keys)
    }

    /// Returns the default name of a ps that listens on `address`.
    pub(crate) fn ps_name(&self, address: SocketAddr) -> String {
        format!("ps-{}-{}", self.host, address.port())
    }

    /// Returns the default name of a worker.
    pub(crate) fn worker_name(&self) -> String {
        format!("worker-{}-{}", self.host, std::process::id())
    }
}

/// The ways between processes of one host. Each includes the ways after it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ways {
    /// Shared memory.
    Nearest,
    /// Unix sockets.
    Unix,
    /// TCP, as between hosts.
    Tcp,
}

/// Returns a list of URLs with commas, in full: `HOST:PORT` becomes `SCHEME://HOST:PORT`.
pub(crate) fn urls(list: &str, scheme: &str) -> String {
    let written = |url: &str| match url.trim_end_matches('/') {
        url if url.contains("://") => url.to_owned(),
        host => format!("{scheme}://{host}"),
    };
    net::failover::urls(list).map(written).collect::<Vec<_>>().join(",")
}

/// URL where others reach a server that listens on `address`: the user's, else the address.
///
/// # Errors
/// The URL contradicts the keys; or the server listens on every interface and the user gave no URL.
pub(crate) fn advertised(flag: Option<&str>, address: SocketAddr, keys: &Keys) -> Result<String> {
    let scheme = keys.scheme();
    match flag {
        Some(url) if url.contains("://") && !url.starts_with(&format!("{scheme}://")) => bail!(
            "--advertise {url}: expected {scheme}://HOST:PORT, as this process {}",
            if keys.encrypts() { "has certificates" } else { "has no certificates" }
        ),
        Some(url) if url.contains("://") => Ok(url.trim_end_matches('/').to_owned()),
        Some(host) => Ok(format!("{scheme}://{host}")),
        None if address.ip().is_unspecified() => bail!(
            "--listen {address} is every interface of this machine; say with --advertise {scheme}://HOST:PORT where others reach it"
        ),
        None => Ok(format!("{scheme}://{address}")),
    }
}

/// Listens on the address `listen`.
///
/// # Errors
/// `listen` is no address of this machine, or it is taken.
pub(crate) async fn bind(listen: &str) -> Result<(tokio::net::TcpListener, SocketAddr)> {
    let listener = tokio::net::TcpListener::bind(listen).await.with_context(|| {
        format!(
            "cannot listen on {listen}; expected HOST:PORT of this machine that is free (port 0 takes any)"
        )
    })?;
    let address = listener.local_addr().context("the address of the listening socket")?;
    Ok((listener, address))
}

/// Listens on the address of a server with these keys.
///
/// # Errors
/// `listen` is no address of this machine, it is taken, or other machines reach it while the server
/// has no certificates and tokens.
pub(crate) async fn bind_with(
    listen: &str,
    keys: &security::Options,
) -> Result<(tokio::net::TcpListener, SocketAddr)> {
    let (listener, address) = bind(listen).await?;
    // The address that the name led to; nothing was accepted yet.
    keys.may_listen(address.ip())?;
    Ok((listener, address))
}

/// Listens on an address that shows this process's health or numbers.
///
/// # Errors
/// `listen` is no address of this machine, it is taken, or other machines reach it while the
/// process has no certificates.
pub(crate) async fn bind_to_show(
    listen: &str,
    keys: &security::Options,
) -> Result<(tokio::net::TcpListener, SocketAddr)> {
    let (listener, address) = bind(listen).await?;
    keys.may_show(address.ip())?;
    Ok((listener, address))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_flag_wins_over_the_environment_over_the_default() {
        let master = |master: Option<&str>, flag| {
            let environment = Environment { master: master.map(str::to_owned), ..Environment::default() };
            environment.master(flag, &Keys::default())
        };
        assert_eq!(master(None, None), "http://127.0.0.1:4700");
        assert_eq!(master(Some("http://m:1/"), None), "http://m:1");
        assert_eq!(master(Some("http://m:1"), Some("10.0.0.7:2")), "http://10.0.0.7:2");
        assert_eq!(master(Some("m:1, http://n:1/"), None), "http://m:1,http://n:1");
    }

    #[test]
    fn the_interpreter_is_the_flags_then_the_environments() {
        let python = |environment: &Environment, flag: Option<&str>| {
            environment.python(flag.map(Path::new)).display().to_string()
        };
        let mut environment = Environment::default();
        assert_eq!(python(&environment, None), "python3");
        environment.virtual_env = Some("/venv".into());
        assert_eq!(python(&environment, None), "/venv/bin/python");
        let wheel = Environment {
            virtual_env: environment.virtual_env,
            ..Environment::with(&[("EBB_PYTHON", "/p")])
        };
        assert_eq!(python(&wheel, None), "/p");
        assert_eq!(python(&wheel, Some("mine")), "mine");
        assert!(wheel.own_variables().eq(["EBB_PYTHON"]));
    }

    #[test]
    fn batches_are_as_the_environment_has_them() {
        let set = |name: &str| {
            let value = match name {
                "OTEL_BSP_SCHEDULE_DELAY" => "100",
                "OTEL_BSP_MAX_QUEUE_SIZE" => " 50 ",
                "OTEL_BSP_MAX_EXPORT_BATCH_SIZE" => "60",
                _ => panic!("{name} is not asked for"),
            };
            Some(value.to_owned())
        };
        let delay = Duration::from_millis(100);
        assert_eq!(batches(set), Batches { delay, queue_max: 50, batch_max: 50 });
        assert_eq!(batches(|_| None), Batches::default());
        assert_eq!(batches(|_| Some("-1".to_owned())), Batches::default());
    }

    #[test]
    fn a_ps_on_every_interface_must_say_where_it_is_reached() {
        let advertised = |flag, address| advertised(flag, address, &Keys::default());
        let everywhere: SocketAddr = "0.0.0.0:4701".parse().unwrap();
        assert!(advertised(None, everywhere).unwrap_err().to_string().contains("--advertise"));
        assert_eq!(advertised(Some("10.0.0.7:4701"), everywhere).unwrap(), "http://10.0.0.7:4701");
        let one: SocketAddr = "[::1]:4701".parse().unwrap();
        assert_eq!(advertised(None, one).unwrap(), "http://[::1]:4701");
        let error = advertised(Some("https://10.0.0.7:4701"), one).unwrap_err().to_string();
        assert!(error.contains("no certificates"), "{error}");
    }

    #[tokio::test]
    async fn a_taken_address_is_an_error_that_names_it() {
        let (_listener, address) = bind("127.0.0.1:0").await.unwrap();
        let error = bind(&address.to_string()).await.unwrap_err().to_string();
        assert!(error.contains(&address.to_string()), "{error}");
    }

    #[tokio::test]
    async fn other_machines_are_not_let_in_without_locks() {
        let error = bind_with("0.0.0.0:0", &security::Options::default()).await.unwrap_err().to_string();
        assert!(error.contains("--insecure") && error.contains("ebb certs init"), "{error}");
        bind_to_show("0.0.0.0:0", &security::Options::default()).await.unwrap_err();
        let insecure = security::Options { insecure: true, ..Default::default() };
        bind_with("0.0.0.0:0", &insecure).await.unwrap();
        bind_to_show("0.0.0.0:0", &insecure).await.unwrap();
    }
}
