//! The settings of a master, a ps and a worker.

use std::path::PathBuf;

use model::device::Choice;
use net::security;
use serde::Serialize;

use super::{Kind, Of, Role, Setting, Settings, scripts};

const LIMITS: &str = "Limits";
const TIMES: &str = "Times";
/// The heading of everything about certificates and tokens.
pub(crate) const SECURITY: &str = "Security";
const AVAILABILITY: &str = "High availability";
const GENERAL: &str = "Settings";
const SCRIPTS: &str = "Scripts of users";

/// The help of `data_patience`, which every command has that reads the data of a job.
pub(crate) const DATA_PATIENCE: &str = "Time during which a failed request for data by URL is repeated, with waits that \
    double from 0.2s. Then the task fails. At most 10min; a few attempts are made in any case";

/// libtorch may use all instructions of the CPU.
const NATIVE: &str = "native";

/// libtorch may use instructions up to AVX2.
pub(crate) const PORTABLE: &str = "portable";

/// The role of `ebb master`.
#[derive(Clone, Debug, Default)]
pub(crate) struct Master;

/// The role of `ebb ps`.
#[derive(Clone, Debug, Default)]
pub(crate) struct Ps;

/// The role of `ebb worker`.
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

const LISTEN: &str = "Address to listen on, HOST:PORT. Port 0 takes a free port and prints it. An address that \
    other machines reach needs certificates and tokens";

fn master_url() -> Setting {
    let help = "URL of the master. With several masters, their URLs: the leader is found";
    of_process("master", Kind::Text, "URL[,URL..]", Some("127.0.0.1:4700"), help).named("EBB_MASTER")
}

fn metrics() -> Setting {
    let help = "Address of metrics for Prometheus, HOST:PORT, as http://ADDR/metrics. Port 0 takes a free port and \
        prints it. Every process that reaches the address may read them; an address that other machines reach needs \
        certificates";
    of_process("metrics", Kind::Text, "ADDR", None, help).named("EBB_METRICS")
}

fn store_patience() -> Setting {
    let help = "Time during which a failed call to a checkpoint store is repeated, with waits that double from 0.2s. \
        Then the checkpoint is given up";
    option("store_patience", Kind::Duration, "DURATION", TIMES, help)
}

/// Certificates and a token of the process, and the authority that it trusts.
fn keys() -> Vec<Setting> {
    let file =
        |key, help, variable| of_process(key, Kind::Path, "FILE", None, help).under(SECURITY).named(variable);
    let insecure = "Permit connections with other machines without certificates or tokens. Use it only in a network in \
        which everybody may do everything";
    vec![
        file(
            "tls_ca",
            "Certificate of the authority (PEM). Connections are encrypted, and only holders of its certificates are \
             trusted",
            "EBB_TLS_CA",
        ),
        file("tls_cert", "Certificate of this process (PEM)", "EBB_TLS_CERT"),
        file("tls_key", "Private key of this process's certificate (PEM)", "EBB_TLS_KEY"),
        file("token_file", "File with nothing but the token of this process", "EBB_TOKEN_FILE"),
        of_process("insecure", Kind::Switch, "", None, insecure).under(SECURITY).named("EBB_INSECURE"),
    ]
}

/// Returns the tokens that a server accepts.
fn tokens() -> Setting {
    let help = "List of the tokens that may call, as `ebb certs` writes it (TOML). Without a list every call is accepted";
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
                "Folder for the files of jobs and, without --etcd, for the journal. It is created if missing. Masters with \
                 one etcd need the same folder, on a file system that they share",
            ),
            metrics(),
            option(
                "heartbeat",
                Kind::Duration,
                "DURATION",
                TIMES,
                "Time between two heartbeats of a worker or ps. Raise it for thousands of processes",
            ),
            option(
                "death",
                Kind::Duration,
                "DURATION",
                TIMES,
                "Silence after which a process counts as dead, at least two heartbeats. Raise it if machines or networks \
                 pause for longer",
            ),
            option(
                "ps_grace",
                Kind::Duration,
                "DURATION",
                TIMES,
                "Time that a job waits for a lost ps before another ps replaces it. Raise it if machines take longer to \
                 come back",
            ),
            option(
                "stream_silence",
                Kind::Duration,
                "DURATION",
                TIMES,
                "Longest silence of a submission or an export, 1s to 30s. Raise it for clients on networks that pause \
                 for longer",
            ),
            option(
                "script_linger",
                Kind::Duration,
                "DURATION",
                TIMES,
                "Time that processes of a script have after the end of its last job, before they are ended",
            ),
            store_patience(),
            option(
                "checkpoints",
                Kind::Texts,
                "PLACE",
                LIMITS,
                "Path or URL below which jobs may have their checkpoints. May be repeated. Without it jobs may name any \
                 place that master and ps can write",
            ),
            option(
                "jobs_max",
                Kind::Count,
                "N",
                LIMITS,
                "Largest number of jobs in memory. Beyond it the oldest ended job is forgotten; if no job has ended, \
                 submissions are refused",
            ),
            option(
                "members_max",
                Kind::Count,
                "N",
                LIMITS,
                "Largest number of registered processes, workers and ps together",
            ),
            option(
                "artifact_bytes_max",
                Kind::Bytes,
                "BYTES",
                LIMITS,
                "Largest size of the files of one submission or one export together, in bytes",
            ),
            option(
                "incoming_bytes_max",
                Kind::Bytes,
                "BYTES",
                LIMITS,
                "Largest size of the files of all arriving submissions and exports, in bytes, at least \
                 artifact_bytes_max",
            ),
            etcd(
                "etcd",
                Kind::Text,
                "URL[,URL..]",
                None,
                "URLs of the members of an etcd, for one of several masters. The etcd has their journal and elects the \
                 leader; the other masters stand by and take over",
            ),
            etcd(
                "etcd_prefix",
                Kind::Text,
                "PREFIX",
                Some("ebbflow/"),
                "Begin of all keys in etcd. The masters of one cluster share it; each cluster has its own",
            ),
            etcd(
                "leader_ttl",
                Kind::Duration,
                "DURATION",
                Some("5s"),
                "Time after the death of a leader until another master takes over: whole seconds, 2s to 10m",
            ),
            etcd(
                "advertise",
                Kind::Text,
                "URL",
                None,
                "URL where other processes reach this master; the masters that stand by tell it. Without it http:// or \
                 https:// and the listening address",
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
                "Name of this ps. It must stay the same after a restart. Without it ps-HOST-PORT",
            ),
            of_process(
                "advertise",
                Kind::Text,
                "URL",
                None,
                "URL where workers and other ps reach this ps. Without it http:// or https:// and the listening address",
            ),
            metrics(),
            of_process(
                "device",
                Kind::Device,
                "DEVICE",
                Some("cpu"),
                "Device that keeps and updates the partitions: cpu; cuda:N; GPU-UUID or MIG-UUID, as nvidia-smi -L spells \
                 them; or auto (the first CUDA device, otherwise the CPU). The trained bits do not depend on it",
            ),
            option("threads", Kind::Count, "N", GENERAL, "Number of threads that apply updates, 1 to 1024"),
            option(
                "push_timeout",
                Kind::Duration,
                "DURATION",
                TIMES,
                "Longest time for the transfer of one push or one pull. Raise it for slow networks",
            ),
            option(
                "drain",
                Kind::Duration,
                "DURATION",
                TIMES,
                "Time that a leaving ps waits until its jobs are saved. Raise it for large models on slow stores",
            ),
            store_patience(),
            option(
                "push_bytes_max",
                Kind::Bytes,
                "BYTES",
                LIMITS,
                "Largest size of arriving pushes and waiting sums of all jobs, in bytes. Raise it if workers report that \
                 this ps is full",
            ),
            option(
                "partition_bytes_max",
                Kind::Bytes,
                "BYTES",
                LIMITS,
                "Largest size of the weights of a partition, in bytes. Its memory is several times as large",
            ),
            option(
                "device_bytes_max",
                Kind::Bytes,
                "BYTES",
                LIMITS,
                "Memory of a CUDA device that partitions may take, in bytes. Without it what is free at the start. Lower \
                 it if other processes need the device",
            ),
            option(
                "steps_in_progress_max",
                Kind::Count,
                "N",
                LIMITS,
                "Largest number of unfinished steps of a partition in the modes bounded and async. Each takes at least one \
                 sum of the partition's size",
            ),
            option(
                "pulled_versions_max",
                Kind::Count,
                "N",
                LIMITS,
                "Largest number of older versions of a partition that are still being read. Each takes the partition's \
                 size",
            ),
            option("jobs_max", Kind::Count, "N", LIMITS, "Largest number of jobs at a time"),
        ];
        settings.extend(keys());
        settings.push(tokens());
        settings
    }

    fn defaults() -> toml::Table {
        table(ps::Options::default())
    }

    fn violations(settings: &Settings) -> Vec<String> {
        // The process checks name and URLs once it has them.
        let checked = settings.options::<ps::Options>().map(|options| options.validate());
        let mut wrong = match checked {
            Ok(Err(ps::Error::Options(wrong))) => wrong,
            Ok(Err(error)) => vec![error.to_string()],
            Ok(Ok(())) => Vec::new(),
            Err(why) => vec![why],
        };
        if let Ok(choice) = device(settings)
            && choice.is_several()
        {
            wrong.push(one_device(&choice));
        }
        wrong
    }
}

impl Role for Worker {
    const NAME: &'static str = "worker";

    fn settings() -> Vec<Setting> {
        let mut settings = vec![
            master_url(),
            of_process(
                "name",
                Kind::Text,
                "NAME",
                None,
                "Name of this worker, for people. Without it worker-HOST-PID",
            ),
            of_process(
                "health_listen",
                Kind::Text,
                "ADDR",
                None,
                "Address for `ebb health` and health probes, HOST:PORT. Every process that reaches it gets an answer; an \
                 address that other machines reach needs certificates. Without it a worker does not listen",
            ),
            option(
                "threads",
                Kind::Count,
                "N",
                GENERAL,
                "Number of threads of one gradient computation, 1 to 1024. Another number gives other floating-point bits",
            ),
            of_process(
                "device",
                Kind::Device,
                "DEVICE",
                Some("auto"),
                "Devices to compute on, each with a worker of its own in this process: cpu; cuda:N, or several such as \
                 cuda:0,2; GPU-UUID or MIG-UUID, as nvidia-smi -L spells them; all (every CUDA device, at least one); or \
                 auto (every CUDA device, otherwise the CPU)",
            ),
            of_process(
                "exchange_device",
                Kind::Device,
                "DEVICE",
                Some("auto"),
                "Memory in which gradients and weights are exchanged with a ps of this host: cuda:N, or a device by its UUID, \
                 for a ps on this CUDA device; cpu (memory of the host alone); or auto (the CUDA device of --device, otherwise the CPU). What refuses is logged once, \
                 and memory of the host is used. The trained bits do not depend on it",
            ),
            of_process(
                "numerics",
                Kind::Text,
                "WHICH",
                Some(NATIVE),
                "Instructions that libtorch may use on the CPU: native or portable. portable is slower; machines with AVX2 \
                 and with AVX-512 then give the same bits",
            ),
            of_process(
                "torchscript",
                Kind::Switch,
                "",
                None,
                "Compute TorchScript jobs by the PyTorch of this Python, on the CPU. All jobs of this worker then have the \
                 numerics class of that PyTorch. It is for `ebb` of the Python package; a program that is linked to \
                 libtorch takes such jobs without it",
            ),
            option(
                "data_root",
                Kind::Path,
                "DIR",
                GENERAL,
                "Folder that all data paths of a job start from, absolute paths too. Without it the job file's folder",
            ),
            option(
                "data_urls",
                Kind::Texts,
                "PREFIX",
                LIMITS,
                "Beginning of URLs that jobs may read, such as s3://bucket/data. May be repeated. Without it jobs may name \
                 any URL, but no web server of this machine",
            ),
            option("scratch", Kind::Path, "DIR", GENERAL, "Folder for the files that come with a job"),
            of_process(
                "scripts",
                Kind::Switch,
                "",
                None,
                "Run processes of Python scripts that users send with `ebb submit SCRIPT.py`. Everyone who may send \
                 scripts to the master then has the rights of this worker",
            )
            .under(SCRIPTS),
            of_process(
                "script_processes",
                Kind::Count,
                "N",
                None,
                "Largest number of processes of scripts at a time, 1 to 256. Without it one for each CUDA device of \
                 --device, otherwise 1",
            )
            .under(SCRIPTS),
            of_process(
                "script_user",
                Kind::Text,
                "NAME",
                None,
                "User as whom scripts run, so that they cannot read the files of this worker. It must then run as root. \
                 Without it scripts run as the user of this worker",
            )
            .under(SCRIPTS),
            of_process(
                "script_requirements",
                Kind::Text,
                "INDEX_URL",
                None,
                "Install what the requirements.txt of a script names, wheels of this index alone, in an environment for each \
                 owner. Without it nothing is installed, and a script whose requirements the interpreter does not satisfy \
                 does not run here",
            )
            .under(SCRIPTS),
            of_process(
                "script_requirements_time",
                Kind::Duration,
                "DURATION",
                Some("10m"),
                "Longest time for the install of one requirements.txt",
            )
            .under(SCRIPTS),
            of_process(
                "script_requirements_disk",
                Kind::Bytes,
                "BYTES",
                Some("4GiB"),
                "Largest size of what one requirements.txt installs, in bytes. There are as many environments as processes, \
                 and 4 that no process uses",
            )
            .under(SCRIPTS),
            of_process(
                "python",
                Kind::Path,
                "PROGRAM",
                None,
                "Python interpreter of scripts. Without it that of VIRTUAL_ENV, else python3",
            )
            .under(SCRIPTS)
            .named("EBB_PYTHON"),
            metrics(),
            option(
                "master_timeout",
                Kind::Duration,
                "DURATION",
                TIMES,
                "Time after which a worker gives up on a master that does not answer",
            ),
            option(
                "drain",
                Kind::Duration,
                "DURATION",
                TIMES,
                "Time in which a draining worker finishes its microbatch and hands back the rest",
            ),
            option("data_patience", Kind::Duration, "DURATION", TIMES, DATA_PATIENCE),
            option("prefetch", Kind::Count, "N", LIMITS, "Number of microbatches that are read ahead"),
            option(
                "data_threads",
                Kind::Count,
                "N",
                LIMITS,
                "Microbatches that are read and transformed at once. Without it one for each processor, at most 8",
            ),
            option(
                "data_memory",
                Kind::Bytes,
                "BYTES",
                LIMITS,
                "Memory for decoded data of all jobs. Without it a quarter of what the process may use",
            ),
            option(
                "pushes_in_flight_max",
                Kind::Count,
                "N",
                LIMITS,
                "Largest number of nodes of the reduction tree on their way to the ps",
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
        if let Err(why) = exchange_device(settings) {
            wrong.push(why);
        }
        wrong.extend(scripts::violations(settings));
        wrong
    }
}

/// Returns the device whose memory a worker exports: one, or the device of the worker (`auto`).
///
/// # Errors
/// The setting names no device, or several.
pub(crate) fn exchange_device(settings: &Settings) -> Result<Choice, String> {
    let choice = settings.text("exchange_device").unwrap_or("auto").parse();
    let choice: Choice = choice.map_err(|error: model::Error| format!("exchange_device: {error}"))?;
    if choice.is_several() {
        return Err(format!(
            "exchange_device: one device, found `{choice}`; with auto each worker of this process exports memory of its own"
        ));
    }
    Ok(choice)
}

/// Returns what is wrong with several devices for a ps.
pub(crate) fn one_device(choice: &Choice) -> String {
    format!("device: a ps has one device, found `{choice}`; start a ps for each device")
}

/// Returns the devices of a worker, or the device of a ps.
///
/// # Errors
/// The setting names no device.
pub(crate) fn device(settings: &Settings) -> Result<Choice, model::Error> {
    settings.text("device").unwrap_or("auto").parse()
}

/// Returns the files with the certificates, the token and the list of tokens of a role.
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
