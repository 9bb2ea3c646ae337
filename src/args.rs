//! The command line: one subcommand for each verb, with units and defaults in `--help`.
//!
//! This file reads neither the environment nor the disk. [`config`](crate::config) fills in what
//! the user left out.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Parser, Subcommand, ValueEnum};
use client::Start;
use model::device::Choice;
use net::security::{self, TokenRole};
use proto::script::PROCESSES_MAX;
use proto::size;
use proto::spec::{BLOCK_MAX, DataSet, WORKERS_MAX};

use crate::launch::variables::variable;
use crate::settings::{Flags, Role, roles};

/// Train deep-learning models on parameter servers with workers that may join, leave or die at any
/// moment.
///
/// `ebb run JOB.toml` trains in this one process, and `ebb run SCRIPT.py` trains a PyTorch loop in
/// processes of this host. For a cluster, start `ebb master`, any number of `ebb ps` and `ebb
/// worker`, and then run `ebb submit JOB.toml` or `ebb submit SCRIPT.py`. Exit code: 0 on success,
/// 1 after a failure, 2 for a wrong command line, 3 when workers of this process lost their device,
/// 130 after Ctrl-C, 143 after SIGTERM. `ebb master`, `ebb ps` and `ebb worker` exit with 0 after
/// Ctrl-C and SIGTERM.
#[derive(Debug, Parser)]
#[command(name = "ebb", version, max_term_width = 100, disable_help_subcommand = true)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
    /// Format of log lines on stderr. EBB_LOG or RUST_LOG selects the lines, e.g. `info` or
    /// `debug,h2=info`
    #[arg(
        long,
        global = true,
        value_enum,
        value_name = "FORMAT",
        default_value_t = LogFormat::Text,
        help_heading = "Log"
    )]
    pub(crate) log: LogFormat,
    /// File for a Chrome trace of what the workers and ps of this process do. Open it in
    /// https://ui.perfetto.dev [default: no trace]
    #[arg(long, global = true, value_name = "FILE", help_heading = "Log")]
    pub(crate) trace: Option<PathBuf>,
}

/// The format of log lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum LogFormat {
    /// Text for people
    Text,
    /// One JSON object per line
    Json,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Train a job with a master, ps and workers in this process. The workers of a Python script
    /// are processes of their own
    Run(Run),
    /// Measure a trained model on the validation records of its job. Without --master this process
    /// does it
    Evaluate(Evaluate),
    /// Write what a trained model says of each record into one file. Without --master this process
    /// does it
    Predict(Predict),
    /// Start a master: it hands out the data and knows which processes are alive
    Master(Flags<roles::Master>),
    /// Start a parameter server (ps): it holds a part of the model
    Ps(Flags<roles::Ps>),
    /// Start a worker: it computes gradients
    Worker(Flags<roles::Worker>),
    /// Send a job to a master, or a Python script whose processes run on the cluster's workers
    Submit(Submit),
    /// List the master's jobs, oldest first
    Jobs(Jobs),
    /// Show one job: state, progress, counters, metrics
    Status(OneJob),
    /// Follow a job until it ends. Exit code 0 if it succeeds
    Watch(OneJob),
    /// Print what the processes of a submitted script said
    Logs(Logs),
    /// Set how many workers take part in a job. This changes its speed, never the trained bits
    Scale(Scale),
    /// Hold a job: its workers finish what they have and get nothing new
    Pause(OneJob),
    /// Let a paused job go on
    Resume(Resume),
    /// Stop a job. First its model is exported, and saved as a checkpoint if the job has
    /// checkpoints
    Cancel(Cancel),
    /// Write the results of an ended job into a folder
    Fetch(Fetch),
    /// List, check and export the checkpoints in a folder or of a job
    #[command(subcommand)]
    Checkpoint(Checkpoint),
    /// Look at data files
    #[command(subcommand)]
    Data(Data),
    /// Ask a process whether it is alive or ready. Exit code 0 if it is
    Health(Health),
    /// Show the settings of a role and the source of each one
    #[command(subcommand)]
    Config(Config),
    /// Make certificates and tokens for a cluster
    #[command(subcommand)]
    Certs(Certs),
    /// Print the completion script of a shell
    Completions(Completions),
}

#[derive(Debug, Subcommand)]
pub(crate) enum Config {
    /// Print the value, unit and origin (default, file, environment, flag) of each setting of a
    /// role
    Show {
        #[command(subcommand)]
        role: ShowRole,
    },
}

/// The role whose settings are shown.
#[derive(Debug, Subcommand)]
pub(crate) enum ShowRole {
    /// Settings of `ebb master`
    Master(Show<roles::Master>),
    /// Settings of `ebb ps`
    Ps(Show<roles::Ps>),
    /// Settings of `ebb worker`
    Worker(Show<roles::Worker>),
}

#[derive(Debug, clap::Args)]
pub(crate) struct Show<R: Role> {
    #[command(flatten)]
    pub(crate) flags: Flags<R>,
    /// Print one JSON object on stdout
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Certs {
    /// Make an authority, and a certificate and a token for each role and user
    Init(CertsInit),
    /// Make another certificate by the authority of `init`: for one more process or user, or to
    /// replace one before it expires
    Issue(CertsIssue),
    /// Make a token and print its entry for the token list of a server
    Token(CertsToken),
}

#[derive(Debug, clap::Args)]
pub(crate) struct CertsInit {
    /// Folder for the files. It is created if missing; no file in it is overwritten
    #[arg(long, value_name = "DIR")]
    pub(crate) dir: PathBuf,
    /// Host name or IP address of a master or ps, besides localhost. May be repeated
    #[arg(long = "host", value_name = "HOST")]
    pub(crate) hosts: Vec<String>,
    /// A user, and the role of the user's token: read, submit, operate, or script for programs with
    /// ebbflow.join. `submit+scripts` and `operate+scripts` may also send scripts. May be repeated
    /// [default: user=operate]
    #[arg(long = "user", value_name = "NAME=ROLE")]
    pub(crate) users: Vec<String>,
    /// Days until the certificates expire. The authority's own certificate lasts ten years
    #[arg(long, value_name = "N", default_value_t = 365, value_parser = clap::value_parser!(u32).range(1..=3650))]
    pub(crate) days: u32,
    /// Let the group of the files read them, except the authority's key. Useful for containers that
    /// run as another user
    #[arg(long)]
    pub(crate) group_reads: bool,
}

#[derive(Debug, clap::Args)]
pub(crate) struct CertsIssue {
    /// Holder of the certificate: `master`, `ps`, `ps-7` (one of several), `worker`, or a user
    #[arg(value_name = "NAME")]
    pub(crate) name: String,
    /// Folder of `ebb certs init`, with the authority's key
    #[arg(long, value_name = "DIR")]
    pub(crate) dir: PathBuf,
    /// Folder for the two files. It is created if missing; no file in it is overwritten
    #[arg(long, value_name = "DIR")]
    pub(crate) out: PathBuf,
    /// Host name or IP address of the master or ps, besides localhost. May be repeated
    #[arg(long = "host", value_name = "HOST")]
    pub(crate) hosts: Vec<String>,
    /// Days until the certificate expires
    #[arg(long, value_name = "N", default_value_t = 365, value_parser = clap::value_parser!(u32).range(1..=3650))]
    pub(crate) days: u32,
    /// Let the group of the files read them, except the authority's key. Useful for containers that
    /// run as another user
    #[arg(long)]
    pub(crate) group_reads: bool,
}

#[derive(Debug, clap::Args)]
pub(crate) struct CertsToken {
    /// Name of the holder, for logs and limits: 1 to 64 letters, digits, `.`, `_`, `-`, `@`
    #[arg(long, value_name = "NAME")]
    pub(crate) name: String,
    /// What the token permits: read, submit, operate, worker, ps, master, or script
    #[arg(long, value_name = "ROLE")]
    pub(crate) role: TokenRole,
    /// File for the token. An existing file is not overwritten
    #[arg(long, value_name = "FILE")]
    pub(crate) file: PathBuf,
    /// Largest number of unfinished jobs of this holder [default: the master's limit]
    #[arg(long, value_name = "N")]
    pub(crate) jobs_max: Option<u64>,
    /// Largest size of the files of these jobs together, in bytes [default: the master's limit]
    #[arg(long, value_name = "BYTES")]
    pub(crate) artifact_bytes_max: Option<u64>,
    /// Let the holder send scripts, whose code runs on workers with --scripts. For the roles submit
    /// and operate
    #[arg(long)]
    pub(crate) scripts: bool,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Data {
    /// Print the columns of a file with their types and shapes, the number of records, and the
    /// first ones
    Inspect(DataInspect),
    /// Write data files in another format, as shards that a job reads
    Convert(DataConvert),
    /// Measure how fast the input pipeline of a job is without a model: reading, each transform,
    /// and whole batches
    Bench(DataBench),
}

#[derive(Debug, clap::Args)]
pub(crate) struct DataBench {
    #[command(flatten)]
    pub(crate) file: JobFile,
    /// Folder below which the job's data paths are looked up [default: the job file's folder]
    #[arg(long, value_name = "DIR")]
    pub(crate) data_root: Option<PathBuf>,
    /// Threads that make batches [default: one for each processor, at most 8]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub(crate) data_threads: Option<u32>,
    /// Memory for decoded data, such as 256MiB [default: a quarter of what the process may use]
    #[arg(long, value_name = "BYTES", value_parser = proto::size::parse)]
    pub(crate) data_memory: Option<u64>,
    /// Time of the measurement, in seconds
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub(crate) seconds: u64,
    /// Print one JSON object on stdout
    #[arg(long)]
    pub(crate) json: bool,
}

/// How files are read that no job file describes.
#[derive(Clone, Debug, Default, clap::Args)]
pub(crate) struct Reading {
    /// Format of the files, as in a job file [default: what the name says; `images` for a folder,
    /// `tokens` with --token-type]
    #[arg(long, value_name = "FORMAT")]
    pub(crate) format: Option<String>,
    /// CSV: the first line is a record and does not name the columns
    #[arg(long)]
    pub(crate) no_header: bool,
    /// Number of elements of each record of a ragged column, which then has a fixed shape. May be
    /// repeated
    #[arg(long = "length", value_name = "COLUMN=N", value_parser = length)]
    pub(crate) lengths: Vec<(String, usize)>,
    /// Token files: type of the values, u16 or u32
    #[arg(long, value_name = "TYPE", requires = "block")]
    pub(crate) token_type: Option<String>,
    /// Token files: tokens of one record
    #[arg(long, value_name = "N", requires = "token_type", value_parser = clap::value_parser!(u64).range(1..=BLOCK_MAX as u64))]
    pub(crate) block: Option<u64>,
    /// Token files: values from the begin of a record to the begin of the next one [default: the
    /// block]
    #[arg(long, value_name = "N", requires = "token_type", value_parser = clap::value_parser!(u64).range(1..=u64::from(u32::MAX)))]
    pub(crate) stride: Option<u64>,
}

/// Parses `COLUMN=N`. A name may have the sign in it.
fn length(text: &str) -> Result<(String, usize), String> {
    let number = text.rsplit_once('=').map(|(column, number)| (column, number.parse::<usize>()));
    match number {
        Some((column, Ok(number))) if !column.is_empty() && number > 0 => Ok((column.to_owned(), number)),
        _ => Err("expected COLUMN=N with a number of at least 1, e.g. image=784".to_owned()),
    }
}

#[derive(Debug, clap::Args)]
pub(crate) struct DataInspect {
    /// Data file, its URL, or folder of images
    #[arg(value_name = "FILE")]
    pub(crate) file: PathBuf,
    #[command(flatten)]
    pub(crate) reading: Reading,
    /// Number of records to print
    #[arg(long, value_name = "N", default_value_t = 3)]
    pub(crate) records: u64,
    /// File for a picture (PNG) with images side by side and their classes. An existing file is
    /// replaced
    #[arg(long, value_name = "FILE.png")]
    pub(crate) contact_sheet: Option<PathBuf>,
    /// Images on the picture, evenly spread over the file, 1 to 1024
    #[arg(long, value_name = "N", default_value_t = 32, requires = "contact_sheet", value_parser = clap::value_parser!(u64).range(1..=1024))]
    pub(crate) images: u64,
    /// Column whose values stand below the images [default: the class; `class`, `cls`, `label`,
    /// `labels`, `target` or `y`]
    #[arg(long, value_name = "COLUMN", requires = "contact_sheet")]
    pub(crate) label: Option<String>,
    /// Print one JSON object on stdout
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, clap::Args)]
pub(crate) struct DataConvert {
    /// Data files with the same columns, their URLs, or folders of images. The last part of a name
    /// may have `*` in it. Files of one array each (idx, npy) are given as COLUMN=FILE, e.g.
    /// `features=x.npy labels=y.npy`; a repeated column has several files
    #[arg(value_name = "SOURCE", required = true)]
    pub(crate) sources: Vec<String>,
    #[command(flatten)]
    pub(crate) reading: Reading,
    /// Format of the shards: parquet, arrow, npy, tar, tfrecord, jsonl or safetensors
    #[arg(long, value_name = "FORMAT")]
    pub(crate) to: String,
    /// Folder for the shards and for `data.toml`, the section of a job file that reads them: a
    /// path, or a URL (file://, s3://, gs://, az://). It is created if missing
    #[arg(long, value_name = "FOLDER")]
    pub(crate) out: PathBuf,
    /// Number of records of a shard, at least 1. The last shard may have fewer
    #[arg(long, value_name = "N", conflicts_with = "shard_bytes", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) records_per_shard: Option<u64>,
    /// Bytes of the values of a shard, about, e.g. `64MiB` [default: 128MiB]
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    pub(crate) shard_bytes: Option<u64>,
    /// Write the records in an order that this seed draws from all of them, so that each shard has
    /// records of all classes. It suits folders of images, arrays and token files. Of other formats
    /// a whole block is decoded for each record, unless all blocks fit into a quarter of the memory
    #[arg(long, value_name = "SEED")]
    pub(crate) shuffle: Option<u64>,
    /// Threads that read and write [default: one for each processor, at most 8]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub(crate) threads: Option<u32>,
    /// Replace the shards of an earlier conversion in the folder
    #[arg(long)]
    pub(crate) overwrite: bool,
    /// Print one JSON object on stdout
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Checkpoint {
    /// List the checkpoints of a job, oldest first
    List(CheckpointList),
    /// Read whole checkpoints and compare every byte with its checksum. Exit code 0 if all are
    /// intact
    Verify(CheckpointVerify),
    /// Write the weights of a checkpoint as a safetensors file, and the job's TorchScript module
    /// with these weights if it has one
    Export(CheckpointExport),
}

/// The place of the checkpoints.
#[derive(Debug, clap::Args)]
pub(crate) struct CheckpointPlace {
    /// Path or URL of the checkpoints: checkpoint.url of the job file, or the job's folder in it
    #[arg(value_name = "URL", required_unless_present = "job", conflicts_with = "job")]
    pub(crate) folder: Option<String>,
    /// Job of the master whose checkpoints are meant: its number, NAME-ID, or name (the newest job
    /// of that name)
    #[arg(long, value_name = "JOB")]
    pub(crate) job: Option<String>,
    #[command(flatten)]
    pub(crate) reach: Reach,
}

#[derive(Debug, clap::Args)]
pub(crate) struct CheckpointList {
    #[command(flatten)]
    pub(crate) place: CheckpointPlace,
    /// Print one JSON object per checkpoint on stdout
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, clap::Args)]
pub(crate) struct CheckpointVerify {
    #[command(flatten)]
    pub(crate) place: CheckpointPlace,
    /// Version of the only checkpoint to read [default: all checkpoints]
    #[arg(long, value_name = "N")]
    pub(crate) version: Option<u64>,
    /// Print one JSON object per checkpoint on stdout
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, clap::Args)]
pub(crate) struct CheckpointExport {
    #[command(flatten)]
    pub(crate) place: CheckpointPlace,
    /// Version of the checkpoint [default: the newest]
    #[arg(long, value_name = "N")]
    pub(crate) version: Option<u64>,
    /// File for the weights. A TorchScript module goes beside it, with the ending .pt. Existing
    /// files are replaced
    #[arg(long, value_name = "FILE", default_value = "model.safetensors")]
    pub(crate) out: PathBuf,
}

/// The master, and the keys to reach it.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct MasterUrl {
    /// URL of the master. With several masters, their URLs: the leader is found [env: EBB_MASTER]
    /// [default: http://127.0.0.1:4700]
    #[arg(long = "master", value_name = "URL[,URL..]", help_heading = "Master")]
    pub(crate) url: Option<String>,
    #[command(flatten)]
    pub(crate) keys: KeyFiles,
}

/// Certificates and a token. See docs/security.md.
#[derive(Clone, Debug, Default, clap::Args)]
pub(crate) struct KeyFiles {
    /// Certificate of the authority (PEM). Connections are encrypted, and only holders of its
    /// certificates are trusted [env: EBB_TLS_CA]
    #[arg(long, value_name = "FILE", help_heading = roles::SECURITY)]
    pub(crate) tls_ca: Option<PathBuf>,
    /// Certificate of this process (PEM) [env: EBB_TLS_CERT]
    #[arg(long, value_name = "FILE", help_heading = roles::SECURITY)]
    pub(crate) tls_cert: Option<PathBuf>,
    /// Private key of this process's certificate (PEM) [env: EBB_TLS_KEY]
    #[arg(long, value_name = "FILE", help_heading = roles::SECURITY)]
    pub(crate) tls_key: Option<PathBuf>,
    /// File with nothing but the token of this process [env: EBB_TOKEN_FILE]
    #[arg(long, value_name = "FILE", help_heading = roles::SECURITY)]
    pub(crate) token_file: Option<PathBuf>,
    /// Permit connections with other machines without certificates or tokens. Use it only in a
    /// network in which everybody may do everything [env: EBB_INSECURE=1]
    #[arg(long, help_heading = roles::SECURITY)]
    pub(crate) insecure: bool,
}

impl KeyFiles {
    /// Returns the key files of a user's command: flag over environment.
    pub(crate) fn over(&self, environment: &security::Options) -> security::Options {
        let or = |flag: &Option<PathBuf>, environment: &Option<PathBuf>| {
            flag.clone().or_else(|| environment.clone())
        };
        security::Options {
            ca: or(&self.tls_ca, &environment.ca),
            cert: or(&self.tls_cert, &environment.cert),
            key: or(&self.tls_key, &environment.key),
            token: or(&self.token_file, &environment.token),
            tokens: None,
            insecure: self.insecure || environment.insecure,
        }
    }
}

/// Where the master is, and how long a user waits for it.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Reach {
    #[command(flatten)]
    pub(crate) master: MasterUrl,
    /// Time after which a command gives up on a master that does not answer, e.g. `500ms` or `2m`
    #[arg(
        long,
        value_name = "DURATION",
        default_value = "30s",
        value_parser = humantime::parse_duration,
        help_heading = "Master"
    )]
    pub(crate) master_timeout: Duration,
}

/// A job file, and changes of its settings.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct JobFile {
    /// Job file, see docs/job.md. `ebb submit` takes a Python script, too
    #[arg(value_name = "JOB.toml")]
    pub(crate) job: PathBuf,
    /// Change a setting of the job file, e.g. `--set optimizer.learning_rate=0.01`. May be repeated
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub(crate) overrides: Vec<String>,
}

/// A copy of the results.
#[derive(Clone, Debug, Default, clap::Args)]
pub(crate) struct Upload {
    /// URL or absolute path of a folder to which the results are copied too once they are complete,
    /// summary.json last, e.g. `s3://bucket/results/mine`. It must have no results yet, unless the
    /// job resumes
    // `url` is the master's, and one command has both.
    #[arg(id = "upload", long = "upload", value_name = "URL")]
    pub(crate) url: Option<String>,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Run {
    /// Job file, see docs/job.md, or a Python script (.py) that calls `ebbflow.join`
    #[arg(value_name = "JOB.toml|SCRIPT.py")]
    pub(crate) job: PathBuf,
    /// Change a setting of the job file, e.g. `--set optimizer.learning_rate=0.01`. May be repeated
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub(crate) overrides: Vec<String>,
    /// Number of workers, 1 to 256. It changes the speed, never the trained bits. They take turns
    /// on the devices. Each worker of a script is a process, which sees its device alone [default:
    /// one for each CUDA device, within fleet.workers of the job file, otherwise its
    /// fleet.workers.min; for a script one for each device that --device names, otherwise 1]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=256))]
    pub(crate) workers: Option<u32>,
    /// Number of parameter servers, 1 to 256, each with a part of the model [default: fleet.ps of
    /// the job file, 1 for a script]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=256))]
    pub(crate) ps: Option<u32>,
    /// Folder for the results. It is created if missing; results of an earlier run in it are
    /// replaced. For a script it has the output of each process too, as logs/worker-N.log [default:
    /// out/NAME with the name of the job, or of the script]
    #[arg(long, value_name = "DIR")]
    pub(crate) out: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) upload: Upload,
    #[command(flatten)]
    pub(crate) resume: GoOn,
    #[command(flatten)]
    pub(crate) compute: Compute,
    #[command(flatten)]
    pub(crate) ps_memory: PsMemory,
    /// Print the result as one JSON object on stdout, one for each job of a script
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) script: Script,
    #[command(flatten)]
    pub(crate) launch: Launch,
}

/// Where the ps of this process keep the model.
#[derive(Clone, Debug, Default, clap::Args)]
pub(crate) struct PsMemory {
    /// Memory in which the parameter servers keep the model: cpu, memory of the host; or a CUDA
    /// device: cuda:N; GPU-UUID or MIG-UUID, as nvidia-smi -L spells them. The trained bits do not
    /// depend on it [default: cpu]
    #[arg(long, value_name = "DEVICE", value_parser = Choice::one, conflicts_with = "on")]
    pub(crate) ps_device: Option<Choice>,
    /// Bytes of that CUDA device that each parameter server may take, such as 8GiB [default: an
    /// equal share of what is free, and of half of it if a worker computes there too]
    #[arg(long, value_name = "BYTES", value_parser = size::parse, requires = "ps_device")]
    pub(crate) ps_device_bytes_max: Option<u64>,
}

/// Machines of a platform, on which a script runs.
#[derive(Debug, Default, clap::Args)]
pub(crate) struct Launch {
    /// Start a master, the ps and an agent for each process on machines of this platform, and take
    /// everything away at the end. It needs the Python package `ebbflow`, here and on the machines
    #[arg(long, value_name = "PLATFORM", value_enum, help_heading = "Launch")]
    pub(crate) on: Option<Platform>,
    /// Processors of each process of the script [default: 1]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=256), requires = "on",
        help_heading = "Launch")]
    pub(crate) cpus: Option<u32>,
    /// Give each process of the script a GPU
    #[arg(long, requires = "on", help_heading = "Launch")]
    pub(crate) gpu: bool,
    /// Image with Python, `ebbflow` and what the script imports, for Kubernetes and Compose
    #[arg(long, value_name = "IMAGE", requires = "on", help_heading = "Launch")]
    pub(crate) image: Option<String>,
    /// File or folder of this host that the script sees at the same path, for Compose. May be
    /// repeated. With `:ro` behind it the script cannot write it
    #[arg(long = "mount", value_name = "PATH[:ro]", requires = "on", help_heading = "Launch")]
    pub(crate) mounts: Vec<OsString>,
}

/// What starts roles on its machines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Platform {
    Slurm,
    Ray,
    Kubernetes,
    Compose,
    /// This host, for tests.
    #[value(hide = true)]
    Local,
}

impl Platform {
    /// Its name in arguments.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Slurm => "slurm",
            Self::Ray => "ray",
            Self::Kubernetes => "kubernetes",
            Self::Compose => "compose",
            Self::Local => "local",
        }
    }
}

/// What only the processes of a script have.
#[derive(Debug, Default, clap::Args)]
pub(crate) struct Script {
    /// Python interpreter of a script [env: EBB_PYTHON] [default: the one of VIRTUAL_ENV, else
    /// python3]
    #[arg(long, value_name = "PROGRAM", help_heading = "Script")]
    pub(crate) python: Option<PathBuf>,
    /// Variable of the environment of a script. May be repeated. Not EBB*, LD_*, PYTHON* or PATH
    #[arg(long = "env", value_name = "NAME=VALUE", value_parser = variable, help_heading = "Script")]
    pub(crate) variables: Vec<(String, String)>,
    /// Arguments of a script, after `--`
    #[arg(last = true, value_name = "ARGUMENT", help_heading = "Script")]
    pub(crate) arguments: Vec<OsString>,
}

/// A job that does not train, and the model with which it computes.
#[derive(Debug, clap::Args)]
pub(crate) struct Measure {
    #[command(flatten)]
    pub(crate) file: JobFile,
    /// Weights of the model: a safetensors file, a folder of results, or a path or URL of
    /// checkpoints, of which the newest counts. They must fit the whole network
    #[arg(long, value_name = "FILE|FOLDER|URL")]
    pub(crate) model: String,
    /// Number of workers in this process, 1 to 256. It changes the speed, never the result
    /// [default: one for each CUDA device, within fleet.workers of the job file, otherwise its
    /// fleet.workers.min]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=256))]
    pub(crate) workers: Option<u32>,
    /// Number of parameter servers in this process, 1 to 256 [default: fleet.ps of the job file]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=256))]
    pub(crate) ps: Option<u32>,
    #[command(flatten)]
    pub(crate) compute: Compute,
    #[command(flatten)]
    pub(crate) reach: Reach,
    /// Print the result as one JSON object on stdout
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Evaluate {
    #[command(flatten)]
    pub(crate) measure: Measure,
    /// Folder for metrics.jsonl and summary.json [default: the metrics are only printed]
    #[arg(long, value_name = "DIR")]
    pub(crate) out: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) upload: Upload,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Predict {
    #[command(flatten)]
    pub(crate) measure: Measure,
    /// File for the predictions, a path or a URL that every worker reaches. Its ending says the
    /// format: .jsonl, .npy or .parquet. It must not exist
    #[arg(long, value_name = "FILE|URL")]
    pub(crate) out: String,
    /// Records to predict
    #[arg(long, value_enum, value_name = "SET", default_value_t = On::Validation)]
    pub(crate) on: On,
    /// Largest size of the file in bytes. Larger predictions stay in numbered files, in the folder
    /// FILE.parts with a manifest.json [default: 1 GiB]
    #[arg(long, value_name = "BYTES")]
    pub(crate) join_bytes_max: Option<u64>,
}

/// Records to predict.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum On {
    /// data.validation, or the validation_fraction, of the job file
    Validation,
    /// data.train of the job file
    Train,
}

impl On {
    /// Returns the data set.
    pub(crate) const fn set(self) -> DataSet {
        match self {
            Self::Validation => DataSet::Validation,
            Self::Train => DataSet::Train,
        }
    }
}

/// Whether a job goes on from the checkpoints of an earlier run.
#[derive(Clone, Copy, Debug, Default, clap::Args)]
pub(crate) struct GoOn {
    /// Go on from the newest checkpoint of an earlier run at checkpoint.url. The number of
    /// parameter servers may differ
    #[arg(long)]
    pub(crate) resume: bool,
    /// Like --resume, but also within an epoch that began with another seed, order, or data. Some
    /// records of that epoch then train more than once, and others never
    #[arg(long)]
    pub(crate) resume_anyway: bool,
}

impl GoOn {
    /// Returns whether the job goes on, by either flag.
    pub(crate) const fn is_asked(self) -> bool {
        self.resume || self.resume_anyway
    }

    /// Returns where the job begins.
    pub(crate) const fn start(self) -> Start {
        match (self.resume, self.resume_anyway) {
            (_, true) => Start::ResumeAnyway,
            (true, false) => Start::Resume,
            (false, false) => Start::New,
        }
    }
}

/// How the workers of this process compute.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Compute {
    /// Threads of one gradient computation, per worker, 1 to 1024. Another number gives other
    /// floating-point bits
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub(crate) threads: u32,
    /// Devices to compute on: cpu; cuda:N, or several such as cuda:0,2; GPU-UUID or MIG-UUID, as
    /// nvidia-smi -L spells them; all (every CUDA device, at least one); or auto (every CUDA
    /// device, otherwise the CPU). A worker keeps to one device
    #[arg(long, value_name = "DEVICE", default_value_t = Choice::Auto)]
    pub(crate) device: Choice,
    /// Folder that all data paths of the job start from, absolute paths too [default: the job
    /// file's folder]
    #[arg(long, value_name = "DIR")]
    pub(crate) data_root: Option<PathBuf>,
    #[arg(long, value_name = "DURATION", default_value = "1m", value_parser = data::parse_patience,
        help = roles::DATA_PATIENCE)]
    pub(crate) data_patience: Duration,
    /// Instructions that libtorch may use on the CPU. `portable` is slower; machines with AVX2 and
    /// with AVX-512 then give the same bits
    #[arg(long, value_enum, value_name = "WHICH", default_value_t = Instructions::Native)]
    pub(crate) numerics: Instructions,
}

/// Instructions that libtorch may use on the CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Instructions {
    /// All instructions of the CPU
    Native,
    /// Instructions up to AVX2
    Portable,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Submit {
    #[command(flatten)]
    pub(crate) file: JobFile,
    /// Number of processes of a script, 1 to 1024. They run on workers that were started with
    /// --scripts [default: 1]
    #[arg(long, value_name = "N", help_heading = "Script", value_parser = clap::value_parser!(u32).range(1..=i64::from(PROCESSES_MAX)))]
    pub(crate) workers: Option<u32>,
    /// Name of a script [default: the name of its file]
    #[arg(long, value_name = "NAME", help_heading = "Script")]
    pub(crate) name: Option<String>,
    /// Variable of the environment of a script. May be repeated. Not EBB*, LD_*, PYTHON* or PATH
    #[arg(long = "env", value_name = "NAME=VALUE", value_parser = variable, help_heading = "Script")]
    pub(crate) variables: Vec<(String, String)>,
    /// Variable of the environment of a script whose value is that of this command's environment.
    /// The value is stored nowhere, and left out of logs. May be repeated
    #[arg(long = "secret", value_name = "NAME", help_heading = "Script")]
    pub(crate) secrets: Vec<String>,
    /// Arguments of a script, after `--`
    #[arg(last = true, value_name = "ARGUMENT", help_heading = "Script")]
    pub(crate) arguments: Vec<String>,
    #[command(flatten)]
    pub(crate) reach: Reach,
    #[command(flatten)]
    pub(crate) resume: GoOn,
    /// Show the job's progress until it ends. After Ctrl-C the job goes on
    #[arg(long)]
    pub(crate) follow: bool,
    /// Folder for the results, as in `ebb run` [default: no results are written]
    #[arg(long, value_name = "DIR", requires = "follow")]
    pub(crate) out: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) upload: Upload,
    /// Print the job, or with --follow its result, as one JSON object on stdout
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Jobs {
    #[command(flatten)]
    pub(crate) reach: Reach,
    /// Print one JSON object per job on stdout
    #[arg(long)]
    pub(crate) json: bool,
}

/// One job of the master.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct OneJob {
    /// Job: its number, NAME-ID, or name (the newest job of that name)
    pub(crate) job: String,
    #[command(flatten)]
    pub(crate) reach: Reach,
    /// Print JSON on stdout, one object per line
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Logs {
    /// Job: its number, NAME-ID, or name (the newest job of that name)
    pub(crate) job: String,
    /// Process to read, by its number or its name, such as train-7-0 [default: all of them]
    #[arg(long, value_name = "W", value_parser = process)]
    pub(crate) worker: Option<u32>,
    /// Go on with new lines until the script is over. After Ctrl-C the script goes on
    #[arg(long)]
    pub(crate) follow: bool,
    #[command(flatten)]
    pub(crate) reach: Reach,
}

/// Parses the number of a process, or a name that ends with it.
fn process(text: &str) -> Result<u32, String> {
    client::logs::process(text)
        .ok_or_else(|| "expected a number, or a name that ends with one, such as train-7-0".to_owned())
}

#[derive(Debug, clap::Args)]
pub(crate) struct Resume {
    #[command(flatten)]
    pub(crate) one: OneJob,
    /// Numerics class in which a job goes on that has no worker of its own class left, from its
    /// newest checkpoint. `ebb status` lists the classes that stand by
    #[arg(long, value_name = "CLASS")]
    pub(crate) numerics: Option<String>,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Scale {
    #[command(flatten)]
    pub(crate) one: OneJob,
    /// Largest number of workers that take part, 1 to 65536. Other workers stand by. If
    /// fleet.workers.min is above N, the job trains with N workers
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(WORKERS_MAX)))]
    pub(crate) workers: u32,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Cancel {
    #[command(flatten)]
    pub(crate) one: OneJob,
    /// Stop at once, without an export of what is trained so far
    #[arg(long)]
    pub(crate) force: bool,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Fetch {
    #[command(flatten)]
    pub(crate) one: OneJob,
    /// Folder for the results. It is created if missing; results of an earlier run in it are
    /// replaced
    #[arg(long, value_name = "DIR")]
    pub(crate) out: PathBuf,
    #[command(flatten)]
    pub(crate) upload: Upload,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Health {
    /// URL of a master or ps, or of the --health-listen of a worker [env: EBB_HEALTH] [default:
    /// http://127.0.0.1:4700]
    #[arg(value_name = "URL")]
    pub(crate) url: Option<String>,
    /// Ask whether the process takes part, not only whether it answers: a master accepts jobs, a ps
    /// or worker is registered with its master
    #[arg(long)]
    pub(crate) ready: bool,
    /// Time to wait for the answer, e.g. `500ms`
    #[arg(long, value_name = "DURATION", default_value = "2s", value_parser = humantime::parse_duration)]
    pub(crate) timeout: Duration,
    /// Print the answer as one JSON object on stdout
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) keys: KeyFiles,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Completions {
    /// Shell that the script is for
    #[arg(value_enum)]
    pub(crate) shell: clap_complete::Shell,
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_flag_and_argument_says_what_it_is() {
        for verb in Cli::command().get_subcommands() {
            assert!(verb.get_about().is_some(), "{} has no description", verb.get_name());
            for arg in verb.get_arguments() {
                assert!(arg.get_help().is_some(), "{} {} has no help", verb.get_name(), arg.get_id());
            }
        }
    }

    #[test]
    fn under_security_stand_keys_alone() {
        let verbs = ["submit", "fetch", "status", "jobs", "watch", "health"];
        for verb in Cli::command().get_subcommands().filter(|verb| verbs.contains(&verb.get_name())) {
            let keys: Vec<_> = verb
                .get_arguments()
                .filter(|arg| arg.get_help_heading() == Some(roles::SECURITY))
                .map(|arg| arg.get_id().as_str())
                .collect();
            assert_eq!(
                keys,
                ["tls_ca", "tls_cert", "tls_key", "token_file", "insecure"],
                "{}",
                verb.get_name()
            );
        }
    }

    #[test]
    fn keys_come_from_flags_then_from_the_environment() {
        let path = |name: &str| Some(PathBuf::from(name));
        let environment = security::Options { ca: path("ca"), token: path("t"), ..Default::default() };
        let flags = KeyFiles { token_file: path("mine"), insecure: true, ..KeyFiles::default() };
        let found = flags.over(&environment);
        assert_eq!(
            (found.ca, found.token, found.tokens, found.insecure),
            (path("ca"), path("mine"), None, true)
        );
    }

    #[test]
    fn verbs_that_read_data_take_the_patience_of_a_worker() {
        let patience = |line: &str| match Cli::try_parse_from(line.split(' ')).unwrap().command {
            Command::Run(run) => run.compute.data_patience,
            Command::Evaluate(evaluate) => evaluate.measure.compute.data_patience,
            Command::Predict(predict) => predict.measure.compute.data_patience,
            other => panic!("{other:?}"),
        };
        for verb in ["run j.toml", "evaluate j.toml --model m", "predict j.toml --model m --out p.npy"] {
            let default = worker::Options::default().data_patience;
            assert_eq!(patience(&format!("ebb {verb}")), default, "{verb}");
            let set = patience(&format!("ebb {verb} --data-patience 1500ms"));
            assert_eq!(set, Duration::from_millis(1500), "{verb}");
        }
        for (text, reason) in [("11m", "at most 600s"), ("soon", "is no duration")] {
            let line = ["ebb", "run", "j.toml", "--data-patience", text];
            let said = Cli::try_parse_from(line).unwrap_err().to_string();
            assert!(said.contains("--data-patience") && said.contains(reason), "{said}");
        }
    }

    #[test]
    fn a_run_takes_its_flags() {
        let line =
            "ebb run job.toml --workers 3 --ps 2 --out o --set a.b=1 --set c=2 --threads 4 --device cuda:1";
        let Command::Run(run) = Cli::try_parse_from(line.split(' ')).unwrap().command else {
            panic!("not a run")
        };
        assert_eq!((run.workers, run.ps, run.compute.threads), (Some(3), Some(2), 4));
        assert_eq!(run.overrides, ["a.b=1", "c=2"]);
        assert_eq!(run.compute.device.to_string(), "cuda:1");
    }

    #[test]
    fn a_script_has_its_own_arguments_after_two_dashes() {
        let parse = |line: &str| match Cli::try_parse_from(line.split(' ')).map(|cli| cli.command) {
            Ok(Command::Run(run)) => Ok(run),
            other => Err(format!("{other:?}")),
        };
        let run = parse("ebb run a.py --workers 4 --env A=1 --env B=x=y -- --lr 0.1 --workers 7").unwrap();
        assert_eq!((run.workers, run.script.arguments.len()), (Some(4), 4));
        let pair = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        assert_eq!(run.script.variables, [pair("A", "1"), pair("B", "x=y")]);
        assert!(parse("ebb run a.py --lr 0.1").is_err() && parse("ebb run a.py 0.1").is_err());
        assert!(parse("ebb run a.py --env PATH=/x").unwrap_err().contains("--python"));
    }

    #[test]
    fn a_process_is_named_by_its_number() {
        assert_eq!((process("3"), process("my-train-7-12")), (Ok(3), Ok(12)));
        assert!(process("train").is_err() && process("7-").is_err());
    }

    #[test]
    fn a_model_is_measured_here_or_at_a_master() {
        let parse = |line: &str| Cli::try_parse_from(line.split(' ')).map(|cli| cli.command);
        let Ok(Command::Evaluate(here)) = parse("ebb evaluate job.toml --model out --workers 3") else {
            panic!("no evaluation")
        };
        assert_eq!((here.measure.reach.master.url, here.measure.workers, here.out), (None, Some(3), None));
        let line = "ebb predict job.toml --model s3://b/c --out p.npy --on train --master http://m:1";
        let Ok(Command::Predict(there)) = parse(line) else { panic!("no prediction") };
        assert_eq!((there.on.set(), there.measure.reach.master.url.is_some()), (DataSet::Train, true));
        assert!(
            parse("ebb evaluate job.toml").is_err() && parse("ebb predict job.toml --model out").is_err()
        );
    }

    #[test]
    fn checkpoints_are_named_by_their_folder_or_by_their_job() {
        let parse = |line: &str| Cli::try_parse_from(line.split(' '));
        assert!(parse("ebb checkpoint list checkpoints/").is_ok());
        assert!(parse("ebb checkpoint export --job digits --version 7 --out m.safetensors").is_ok());
        assert!(parse("ebb checkpoint verify").is_err());
        assert!(parse("ebb checkpoint verify here --job digits").is_err());
    }

    #[test]
    fn sizes_have_units_and_lengths_have_columns() {
        assert_eq!(
            (size::parse("4096"), size::parse("64MiB"), size::parse("3 kB")),
            (Ok(4096), Ok(64 << 20), Ok(3000))
        );
        for wrong in ["", "MiB", "0", "1.5GB", "1TB", "-1", "99999999999999999999", "20000000000GiB"] {
            assert!(size::parse(wrong).is_err(), "{wrong}");
        }
        assert_eq!(
            (length("x=784"), length("a=b=1")),
            (Ok(("x".to_owned(), 784)), Ok(("a=b".to_owned(), 1)))
        );
        for wrong in ["x", "x=", "=3", "x=0", "x=-1", "x=y"] {
            assert!(length(wrong).is_err(), "{wrong}");
        }
        let parse = |line: &str| Cli::try_parse_from(line.split(' '));
        assert!(parse("ebb data convert a.csv b.csv --to parquet --out o --records-per-shard 5").is_ok());
        assert!(parse("ebb data convert --to parquet --out o").is_err());
        assert!(
            parse("ebb data convert a --to tar --out o --records-per-shard 5 --shard-bytes 1MB").is_err()
        );
        assert!(parse("ebb data inspect t.bin --block 8").is_err());
        assert!(parse("ebb data inspect d --images 8").is_err());
    }

    #[test]
    fn a_wrong_value_is_a_usage_error_that_says_what_is_expected() {
        let wrong =
            |line: &str| Cli::try_parse_from(line.split(' ')).unwrap_err().to_string().replace('\n', " ");
        assert!(wrong("ebb run job.toml --workers 0").contains("1..=256"));
        assert!(wrong("ebb worker --device gpu").contains("cuda:N"));
        assert!(wrong("ebb status").contains("<JOB>"));
        assert!(wrong("ebb scale digits").contains("--workers <N>"));
        assert!(wrong("ebb scale digits --workers 0").contains("1..=65536"));
        assert!(wrong("ebb jobs --master-timeout soon").contains("--master-timeout"));
        assert!(wrong("ebb submit job.toml --out o").contains("--follow"));
        assert!(wrong("ebb master --data-dir d --leader-ttl soon").contains("--leader-ttl"));
    }
}
