//! What a master, a ps and a worker can be told.

use std::path::PathBuf;

use model::device::Choice;
use net::security;
use serde::Serialize;

use super::{Kind, Of, Role, Setting, Settings};

const LIMITS: &str = "Limits";
const TIMES: &str = "Times";
pub(super) const SECURITY: &str = "Security";
const AVAILABILITY: &str = "High availability";
const GENERAL: &str = "Settings";

/// Libtorch may use all instructions that the CPU has.
const NATIVE: &str = "native";

/// Libtorch may use those up to AVX2.
pub(crate) const PORTABLE: &str = "portable";

/// `ebb master`.
#[derive(Clone, Debug, Default)]
pub(crate) struct Master;

/// `ebb ps`.
#[derive(Clone, Debug, Default)]
pub(crate) struct Ps;

/// `ebb worker`.
#[derive(Clone, Debug, Default)]
pub(crate) struct Worker;

const fn of_process(
    key: &'static str,
    kind: Kind,
    value_name: &'static str,
    default: Option<&'static str>,
    help: &'static str,
) -> Setting {
    let of = Of::Process(default);
    Setting { key, kind, value_name, heading: GENERAL, help, of, variable: None }
}

const fn option(
    key: &'static str,
    kind: Kind,
    value_name: &'static str,
    heading: &'static str,
    help: &'static str,
) -> Setting {
    Setting { key, kind, value_name, heading, help, of: Of::Options, variable: None }
}

impl Setting {
    const fn under(self, heading: &'static str) -> Self {
        Self { heading, ..self }
    }

    const fn named(self, variable: &'static str) -> Self {
        Self { variable: Some(variable), ..self }
    }
}

const LISTEN: &str = "Address to listen on, HOST:PORT; port 0 takes a free one, which is printed. Beyond this machine only with \
    certificates and tokens";

fn master_url() -> Setting {
    let help = "URL of the master, or of several, of which the one that leads is found";
    of_process("master", Kind::Text, "URL[,URL..]", Some("127.0.0.1:4700"), help).named("EBB_MASTER")
}

fn metrics() -> Setting {
    let help = "Show this process's numbers to Prometheus at http://ADDR/metrics, HOST:PORT; port 0 takes a free one, which is \
        printed. To whoever reaches it; beyond this machine only of a process with certificates";
    of_process("metrics", Kind::Text, "ADDR", None, help).named("EBB_METRICS")
}

fn store_patience() -> Setting {
    let help = "How long a checkpoint store that fails is tried again before the checkpoint is given up, by waits that double from 0.2s";
    option("store_patience", Kind::Duration, "DURATION", TIMES, help)
}

/// Certificates and a token: what the process shows, and whom it trusts.
fn keys() -> Vec<Setting> {
    let file =
        |key, help, variable| of_process(key, Kind::Path, "FILE", None, help).under(SECURITY).named(variable);
    let insecure = "Be reached from, and show a token to, other machines without certificates or tokens: only where everybody who \
        can reach this network may do everything";
    vec![
        file(
            "tls_ca",
            "Encrypt, and trust only those with a certificate of this authority (PEM)",
            "EBB_TLS_CA",
        ),
        file("tls_cert", "This process's certificate (PEM)", "EBB_TLS_CERT"),
        file("tls_key", "The certificate's private key (PEM)", "EBB_TLS_KEY"),
        file("token_file", "The token to show, alone in a file", "EBB_TOKEN_FILE"),
        of_process("insecure", Kind::Switch, "", None, insecure).under(SECURITY).named("EBB_INSECURE"),
    ]
}

/// Whom a server lets in.
fn tokens() -> Setting {
    let help = "The tokens that may call, as `ebb certs` writes them (TOML); without it every call is taken";
    of_process("tokens", Kind::Path, "FILE", None, help).under(SECURITY).named("EBB_TOKENS")
}

fn table(options: impl Serialize) -> toml::Table {
    toml::Table::try_from(options).expect("options are a table")
}

impl Role for Master {
    const NAME: &'static str = "master";

    fn settings() -> Vec<Setting> {
        let etcd = |key, kind, value_name, default, help| {
            of_process(key, kind, value_name, default, help).under(AVAILABILITY)
        };
        let mut settings = vec![
            of_process("listen", Kind::Text, "ADDR", Some("127.0.0.1:4700"), LISTEN),
            of_process(
                "data_dir",
                Kind::Path,
                "DIR",
                None,
                "Folder for the model files of jobs, and without --etcd for the journal; created if missing. Masters with one etcd \
                 need the same folder, on a file system that they share",
            ),
            metrics(),
            option(
                "heartbeat",
                Kind::Duration,
                "DURATION",
                TIMES,
                "How often workers and ps send a heartbeat. Longer suits thousands of processes",
            ),
            option(
                "death",
                Kind::Duration,
                "DURATION",
                TIMES,
                "Silence after which a process counts as gone; at least two heartbeats. Raise it where machines or networks pause for longer",
            ),
            option(
                "ps_grace",
                Kind::Duration,
                "DURATION",
                TIMES,
                "How long a job waits for a ps that lost its connection before another takes its place. Raise it where machines come back after longer",
            ),
            option(
                "stream_silence",
                Kind::Duration,
                "DURATION",
                TIMES,
                "Longest silence of a submission or an export, 1s to 30s. Raise it for clients on networks that pause for longer",
            ),
            store_patience(),
            option(
                "checkpoints",
                Kind::Texts,
                "PLACE",
                LIMITS,
                "Path or URL below which jobs may have their checkpoints; may be repeated. Without it they may name any place that master \
                 and ps can write",
            ),
            option(
                "jobs_max",
                Kind::Count,
                "N",
                LIMITS,
                "Jobs kept in memory. Beyond, the oldest that has ended is forgotten; when none has, submissions are refused",
            ),
            option(
                "members_max",
                Kind::Count,
                "N",
                LIMITS,
                "Processes registered at once, workers and ps together",
            ),
            option(
                "artifact_bytes_max",
                Kind::Bytes,
                "BYTES",
                LIMITS,
                "Bytes of all files of one submission or one export together",
            ),
            option(
                "incoming_bytes_max",
                Kind::Bytes,
                "BYTES",
                LIMITS,
                "Bytes of the files of all submissions and exports that are on their way in; at least artifact_bytes_max",
            ),
            etcd(
                "etcd",
                Kind::Text,
                "URL[,URL..]",
                None,
                "Be one of several masters: their journal is in the etcd with these members, which also elects the one that leads; \
                 the others stand by and take over",
            ),
            etcd(
                "etcd_prefix",
                Kind::Text,
                "PREFIX",
                Some("ebbflow/"),
                "What keys in etcd begin with; the same for the masters of one cluster, another for each cluster",
            ),
            etcd(
                "leader_ttl",
                Kind::Duration,
                "DURATION",
                Some("5s"),
                "How long a leader that died is waited for before another master takes over: whole seconds, 2s to 10m",
            ),
            etcd(
                "advertise",
                Kind::Text,
                "URL",
                None,
                "URL where others reach this master, told by those that stand by; without it http:// or https:// and the address it \
                 listens on",
            ),
        ];
        settings.extend(keys());
        settings.push(tokens());
        settings
    }

    fn defaults() -> toml::Table {
        table(master::Options::default())
    }

    fn violations(settings: &Settings) -> Vec<String> {
        let mut wrong = match settings.options::<master::Options>() {
            Ok(options) => options.validate().err().unwrap_or_default(),
            Err(why) => vec![why],
        };
        let alone = ["etcd_prefix", "leader_ttl", "advertise"].into_iter();
        let alone = alone.filter(|key| settings.is_given(key) && settings.text("etcd").is_none());
        wrong.extend(alone.map(|key| format!("{key}: is of use only with --etcd, which is not set")));
        wrong
    }
}

impl Role for Ps {
    const NAME: &'static str = "ps";

    fn settings() -> Vec<Setting> {
        let mut settings = vec![
            master_url(),
            of_process("listen", Kind::Text, "ADDR", Some("127.0.0.1:0"), LISTEN),
            of_process(
                "name",
                Kind::Text,
                "NAME",
                None,
                "Name that stays the same when this ps is started again; without it ps-HOST-PORT",
            ),
            of_process(
                "advertise",
                Kind::Text,
                "URL",
                None,
                "URL where workers reach this ps; without it http:// or https:// and the address it listens on",
            ),
            metrics(),
            option("threads", Kind::Count, "N", GENERAL, "Threads that apply updates, 1 to 1024"),
            option(
                "push_timeout",
                Kind::Duration,
                "DURATION",
                TIMES,
                "How long the chunks of one push may take to arrive. Raise it for slow networks",
            ),
            option(
                "drain",
                Kind::Duration,
                "DURATION",
                TIMES,
                "How long a ps that was told to leave waits until its jobs are saved. Raise it for large models on slow stores",
            ),
            store_patience(),
            option(
                "push_bytes_max",
                Kind::Bytes,
                "BYTES",
                LIMITS,
                "Bytes of pushes that may be on their way in at once, over all jobs. Raise it when workers report that this ps is full",
            ),
            option(
                "partition_bytes_max",
                Kind::Bytes,
                "BYTES",
                LIMITS,
                "Bytes of weights of the largest partition it takes. Memory is several times that",
            ),
            option(
                "steps_in_progress_max",
                Kind::Count,
                "N",
                LIMITS,
                "Steps of one partition that may be in progress in the modes bounded and async. Each costs at least one sum of the \
                 partition's size",
            ),
            option(
                "pulled_versions_max",
                Kind::Count,
                "N",
                LIMITS,
                "Older versions of one partition that may still be read. Each costs the partition's size",
            ),
            option("jobs_max", Kind::Count, "N", LIMITS, "Jobs at once"),
        ];
        settings.extend(keys());
        settings.push(tokens());
        settings
    }

    fn defaults() -> toml::Table {
        table(ps::Options::default())
    }

    fn violations(settings: &Settings) -> Vec<String> {
        // Name and URLs are the process's, and checked once it has them.
        let checked = settings.options::<ps::Options>().map(|options| options.validate());
        match checked {
            Ok(Err(ps::Error::Options(wrong))) => wrong,
            Ok(Err(error)) => vec![error.to_string()],
            Ok(Ok(())) => Vec::new(),
            Err(why) => vec![why],
        }
    }
}

impl Role for Worker {
    const NAME: &'static str = "worker";

    fn settings() -> Vec<Setting> {
        let mut settings = vec![
            master_url(),
            of_process("name", Kind::Text, "NAME", None, "Name for people; without it worker-HOST-PID"),
            of_process(
                "health_listen",
                Kind::Text,
                "ADDR",
                None,
                "Address on which to answer `ebb health` and health probes, HOST:PORT, to whoever reaches it; beyond this machine only \
                 of a process with certificates. Without it a worker listens on nothing",
            ),
            option(
                "threads",
                Kind::Count,
                "N",
                GENERAL,
                "Threads of one gradient computation, 1 to 1024; another number gives other floating-point bits",
            ),
            of_process(
                "device",
                Kind::Device,
                "DEVICE",
                Some("auto"),
                "Where to compute: cpu, cuda:N, or auto (the first CUDA device, otherwise the CPU)",
            ),
            of_process(
                "numerics",
                Kind::Text,
                "WHICH",
                Some(NATIVE),
                "Which instructions libtorch may use on the CPU: native, or portable, which is slower, and lets machines with AVX2 and \
                 with AVX-512 give the same bits",
            ),
            option(
                "data_root",
                Kind::Path,
                "DIR",
                GENERAL,
                "Folder that the job's data paths start from, absolute ones too; without it the job file's folder",
            ),
            option("scratch", Kind::Path, "DIR", GENERAL, "Folder for files that come with a job"),
            metrics(),
            option(
                "master_timeout",
                Kind::Duration,
                "DURATION",
                TIMES,
                "How long to keep trying to reach the master before giving up",
            ),
            option(
                "drain",
                Kind::Duration,
                "DURATION",
                TIMES,
                "How long a draining worker may take to finish its microbatch and hand back the rest",
            ),
            option(
                "prefetch",
                Kind::Count,
                "N",
                LIMITS,
                "Microbatches read ahead of the one that is computed",
            ),
            option(
                "pushes_in_flight_max",
                Kind::Count,
                "N",
                LIMITS,
                "Nodes of the reduction tree that may be on their way to the ps at once",
            ),
        ];
        settings.extend(keys());
        settings
    }

    fn defaults() -> toml::Table {
        table(worker::Options::default())
    }

    fn violations(settings: &Settings) -> Vec<String> {
        let mut wrong = match settings.options::<worker::Options>() {
            Ok(options) => options.validate().err().unwrap_or_default(),
            Err(why) => vec![why],
        };
        let numerics = settings.text("numerics").unwrap_or(NATIVE);
        if ![NATIVE, PORTABLE].contains(&numerics) {
            wrong.push(format!("numerics: `{numerics}` is neither {NATIVE} nor {PORTABLE}"));
        }
        wrong
    }
}

/// Where a worker computes.
///
/// # Errors
/// It is no device.
pub(crate) fn device(settings: &Settings) -> Result<Choice, model::Error> {
    settings.text("device").unwrap_or("auto").parse()
}

/// Where the certificates, the token and the list of tokens of a role are.
pub(crate) fn key_files(settings: &Settings) -> security::Options {
    let path = |key: &str| -> Option<PathBuf> { settings.path(key) };
    security::Options {
        ca: path("tls_ca"),
        cert: path("tls_cert"),
        key: path("tls_key"),
        token: path("token_file"),
        tokens: path("tokens"),
        insecure: settings.switch("insecure"),
    }
}
