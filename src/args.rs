//! The command line: one subcommand per verb, each with its units and defaults in `--help`.
//!
//! Nothing here reads the environment or the disk; [`config`](crate::config) fills in what the user left out.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Parser, Subcommand, ValueEnum};
use model::device::Choice;
use net::security::{self, Role as TokenRole};
use proto::spec::WORKERS_MAX;

use crate::settings::{Flags, Role, roles};

/// Train deep-learning models on parameter servers with workers that may join, leave or die at any moment.
///
/// `ebb run JOB.toml` trains in this one process. For a cluster start `ebb master`, then `ebb ps` and `ebb worker` as many
/// as you like, and `ebb submit JOB.toml`. Exit code: 0 only on success, 1 when something failed, 2 for a wrong command
/// line, 130 or 143 after Ctrl-C or SIGTERM; `ebb master`, `ebb ps` and `ebb worker` then end with 0.
#[derive(Debug, Parser)]
#[command(name = "ebb", version, max_term_width = 100, disable_help_subcommand = true)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
    /// How log lines on stderr look; EBB_LOG or RUST_LOG says which there are (e.g. `info`, `debug,h2=info`)
    #[arg(long, global = true, value_enum, value_name = "FORMAT", default_value_t = LogFormat::Text, help_heading = "Log")]
    pub(crate) log: LogFormat,
    /// Write what this process's workers and ps do when, as a Chrome trace (open it in https://ui.perfetto.dev)
    #[arg(long, global = true, value_name = "FILE", help_heading = "Log")]
    pub(crate) trace: Option<PathBuf>,
}

/// How log lines look.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum LogFormat {
    /// For people.
    Text,
    /// One JSON object a line.
    Json,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Train a job with master, ps and workers all in this process
    Run(Run),
    /// Start the master: it hands out the data and knows who is alive
    Master(Flags<roles::Master>),
    /// Start a parameter server: it holds a part of the model
    Ps(Flags<roles::Ps>),
    /// Start a worker: it computes gradients
    Worker(Flags<roles::Worker>),
    /// Send a job to a master
    Submit(Submit),
    /// List the master's jobs, oldest first
    Jobs(Jobs),
    /// Show one job: state, progress, counters, metrics
    Status(OneJob),
    /// Follow a job until it ends; exit code 0 if it succeeds
    Watch(Watch),
    /// Set how many workers take part in a job; that changes its speed, never the trained bits
    Scale(Scale),
    /// Hold a job: nothing new is handed out, what its workers hold is finished
    Pause(OneJob),
    /// Let a paused job go on
    Resume(Resume),
    /// Stop a job; what is trained so far is exported first, and saved as a checkpoint where the job has some
    Cancel(Cancel),
    /// Write the results of a job that ended into a folder
    Fetch(Fetch),
    /// List, check and export checkpoints: those of a folder, or of a job of the master
    #[command(subcommand)]
    Checkpoint(Checkpoint),
    /// Ask one process whether it is alive, or ready; exit code 0 if it is
    Health(Health),
    /// Show the settings of a role, and where each comes from
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
    /// Print each setting's value, unit and origin (default, file, environment, flag), as the role would take them
    Show {
        #[command(subcommand)]
        role: ShowRole,
    },
}

/// Whose settings are shown.
#[derive(Debug, Subcommand)]
pub(crate) enum ShowRole {
    /// Those of `ebb master`
    Master(Show<roles::Master>),
    /// Those of `ebb ps`
    Ps(Show<roles::Ps>),
    /// Those of `ebb worker`
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
    /// Make another certificate of the authority that `init` made: for one more process or user, or before one expires
    Issue(CertsIssue),
    /// Make a token, and print its entry for the list of a server
    Token(CertsToken),
}

#[derive(Debug, clap::Args)]
pub(crate) struct CertsInit {
    /// Folder for the files, made if missing; nothing in it is overwritten
    #[arg(long, value_name = "DIR")]
    pub(crate) dir: PathBuf,
    /// Name or IP address by which master and ps are reached, besides this machine's own; may be repeated
    #[arg(long = "host", value_name = "HOST")]
    pub(crate) hosts: Vec<String>,
    /// A user and what the token is for; may be repeated [default: user=operate]
    #[arg(long = "user", value_name = "NAME=ROLE")]
    pub(crate) users: Vec<String>,
    /// Days until the certificates expire; the authority's own lasts ten years
    #[arg(long, value_name = "N", default_value_t = 365, value_parser = clap::value_parser!(u32).range(1..=3650))]
    pub(crate) days: u32,
    /// Let the group of the files read them too, except the authority's key: for containers of another user
    #[arg(long)]
    pub(crate) group_reads: bool,
}

#[derive(Debug, clap::Args)]
pub(crate) struct CertsIssue {
    /// For whom: `master`, `ps`, `ps-7` (one of several), `worker`, or a user
    #[arg(value_name = "NAME")]
    pub(crate) name: String,
    /// Folder that `init` made, with the authority's key
    #[arg(long, value_name = "DIR")]
    pub(crate) dir: PathBuf,
    /// Folder for the two files, made if missing; nothing in it is overwritten
    #[arg(long, value_name = "DIR")]
    pub(crate) out: PathBuf,
    /// Name or IP address by which a master or ps is reached, besides its machine's own; may be repeated
    #[arg(long = "host", value_name = "HOST")]
    pub(crate) hosts: Vec<String>,
    /// Days until it expires
    #[arg(long, value_name = "N", default_value_t = 365, value_parser = clap::value_parser!(u32).range(1..=3650))]
    pub(crate) days: u32,
    /// Let the group of the files read them too, except the authority's key: for containers of another user
    #[arg(long)]
    pub(crate) group_reads: bool,
}

#[derive(Debug, clap::Args)]
pub(crate) struct CertsToken {
    /// Whose it is, in logs and limits: 1 to 64 letters, digits, `.`, `_`, `-`, `@`
    #[arg(long, value_name = "NAME")]
    pub(crate) name: String,
    /// What it is for: read, submit, operate; worker, ps, master
    #[arg(long, value_name = "ROLE")]
    pub(crate) role: TokenRole,
    /// File for the token; one that is there is not overwritten
    #[arg(long, value_name = "FILE")]
    pub(crate) file: PathBuf,
    /// Jobs with this name that may be there at once without having ended [default: as many as the master takes]
    #[arg(long, value_name = "N")]
    pub(crate) jobs_max: Option<u64>,
    /// Bytes of the files of those jobs [default: as many as the master takes]
    #[arg(long, value_name = "BYTES")]
    pub(crate) artifact_bytes_max: Option<u64>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Checkpoint {
    /// List the checkpoints of a job, oldest first
    List(CheckpointList),
    /// Read checkpoints whole and compare every byte with its checksum; exit code 0 only if all are intact
    Verify(CheckpointVerify),
    /// Write the weights of a checkpoint as one safetensors file, and the job's TorchScript module with them where it has one
    Export(CheckpointExport),
}

/// Which checkpoints are meant.
#[derive(Debug, clap::Args)]
pub(crate) struct CheckpointPlace {
    /// Where they are, as a path or URL: the job file's checkpoint.url, or the job's folder in it
    #[arg(value_name = "URL", required_unless_present = "job", conflicts_with = "job")]
    pub(crate) folder: Option<String>,
    /// Those of a job of the master instead: its number, NAME-ID, or name (its newest job)
    #[arg(long, value_name = "JOB")]
    pub(crate) job: Option<String>,
    #[command(flatten)]
    pub(crate) reach: Reach,
}

#[derive(Debug, clap::Args)]
pub(crate) struct CheckpointList {
    #[command(flatten)]
    pub(crate) place: CheckpointPlace,
    /// Print one JSON object a checkpoint on stdout
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, clap::Args)]
pub(crate) struct CheckpointVerify {
    #[command(flatten)]
    pub(crate) place: CheckpointPlace,
    /// Only the checkpoint of this version [default: all]
    #[arg(long, value_name = "N")]
    pub(crate) version: Option<u64>,
    /// Print one JSON object a checkpoint on stdout
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, clap::Args)]
pub(crate) struct CheckpointExport {
    #[command(flatten)]
    pub(crate) place: CheckpointPlace,
    /// The checkpoint of this version [default: the newest]
    #[arg(long, value_name = "N")]
    pub(crate) version: Option<u64>,
    /// File to write; a TorchScript module goes beside it, ending in .pt. Files that are there are replaced
    #[arg(long, value_name = "FILE", default_value = "model.safetensors")]
    pub(crate) out: PathBuf,
}

/// Where the master is, for commands that need one.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct MasterUrl {
    /// URL of the master, or of several, of which the one that leads is found [env: EBB_MASTER] [default: http://127.0.0.1:4700]
    #[arg(long = "master", value_name = "URL[,URL..]", help_heading = "Master")]
    pub(crate) url: Option<String>,
    #[command(flatten)]
    pub(crate) keys: KeyFiles,
}

/// Certificates and a token: what this process shows, and whom it trusts. See docs/security.md.
#[derive(Clone, Debug, Default, clap::Args)]
#[command(next_help_heading = "Security")]
pub(crate) struct KeyFiles {
    /// Encrypt, and trust only those with a certificate of this authority (PEM) [env: EBB_TLS_CA]
    #[arg(long, value_name = "FILE")]
    pub(crate) tls_ca: Option<PathBuf>,
    /// This process's certificate (PEM) [env: EBB_TLS_CERT]
    #[arg(long, value_name = "FILE")]
    pub(crate) tls_cert: Option<PathBuf>,
    /// The certificate's private key (PEM) [env: EBB_TLS_KEY]
    #[arg(long, value_name = "FILE")]
    pub(crate) tls_key: Option<PathBuf>,
    /// The token to show, alone in a file [env: EBB_TOKEN_FILE]
    #[arg(long, value_name = "FILE")]
    pub(crate) token_file: Option<PathBuf>,
    /// Be reached from, and show a token to, other machines without certificates or tokens: only where everybody who can reach
    /// this network may do everything [env: EBB_INSECURE=1]
    #[arg(long)]
    pub(crate) insecure: bool,
}

impl KeyFiles {
    /// The key files of a user's command: flag over environment.
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
    /// How long to try while the master does not answer, e.g. `500ms`, `2m`
    #[arg(long, value_name = "DURATION", default_value = "30s", value_parser = humantime::parse_duration, help_heading = "Master")]
    pub(crate) master_timeout: Duration,
}

/// A job file and what to change in it.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct JobFile {
    /// The job file, see docs/job.md
    #[arg(value_name = "JOB.toml")]
    pub(crate) job: PathBuf,
    /// Change a setting of the job file, e.g. `--set optimizer.learning_rate=0.01`; may be repeated
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub(crate) overrides: Vec<String>,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Run {
    #[command(flatten)]
    pub(crate) file: JobFile,
    /// Number of workers; their number changes the speed, never the trained bits [default: the job's fleet.workers.min]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=256))]
    pub(crate) workers: Option<u32>,
    /// Number of parameter servers, each with a part of the model [default: the job's fleet.ps]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=256))]
    pub(crate) ps: Option<u32>,
    /// Folder for the results: created if missing, results of an earlier run in it are replaced [default: out/NAME with the job's name]
    #[arg(long, value_name = "DIR")]
    pub(crate) out: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) resume: GoOn,
    #[command(flatten)]
    pub(crate) compute: Compute,
    /// Print the result as one JSON object on stdout
    #[arg(long)]
    pub(crate) json: bool,
}

/// Whether a job goes on from what an earlier run left.
#[derive(Clone, Copy, Debug, Default, clap::Args)]
pub(crate) struct GoOn {
    /// Go on from the newest checkpoint that an earlier run left at checkpoint.url, also with another number of parameter servers
    #[arg(long)]
    pub(crate) resume: bool,
    /// Like --resume, and also within an epoch that was begun with another seed, order, or data: some of its records then train
    /// more than once, and others never
    #[arg(long)]
    pub(crate) resume_anyway: bool,
}

impl GoOn {
    /// By either flag.
    pub(crate) const fn is_asked(self) -> bool {
        self.resume || self.resume_anyway
    }
}

/// How a worker computes.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Compute {
    /// Threads of one gradient computation, per worker; another number gives other floating-point bits
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub(crate) threads: u32,
    /// Where to compute: cpu, cuda:N, or auto (the first CUDA device, otherwise the CPU)
    #[arg(long, value_name = "DEVICE", default_value_t = Choice::Auto)]
    pub(crate) device: Choice,
    /// Folder that the job's data paths start from, absolute ones too [default: the job file's folder]
    #[arg(long, value_name = "DIR")]
    pub(crate) data_root: Option<PathBuf>,
    /// Which instructions libtorch may use on the CPU. `portable` is slower, and lets machines with AVX2 and with AVX-512 give the same
    /// bits
    #[arg(long, value_enum, value_name = "WHICH", default_value_t = Instructions::Native)]
    pub(crate) numerics: Instructions,
}

/// Which instructions libtorch may use on the CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Instructions {
    /// All that the CPU has.
    Native,
    /// Those up to AVX2.
    Portable,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Submit {
    #[command(flatten)]
    pub(crate) file: JobFile,
    #[command(flatten)]
    pub(crate) reach: Reach,
    #[command(flatten)]
    pub(crate) resume: GoOn,
    /// Stay and show the job's progress until it ends; Ctrl-C leaves, the job goes on
    #[arg(long)]
    pub(crate) follow: bool,
    /// Folder for the results, as in `ebb run`
    #[arg(long, value_name = "DIR", requires = "follow")]
    pub(crate) out: Option<PathBuf>,
    /// Print the job, or with --follow its result, as one JSON object on stdout
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Jobs {
    #[command(flatten)]
    pub(crate) reach: Reach,
    /// Print one JSON object a job on stdout
    #[arg(long)]
    pub(crate) json: bool,
}

/// One job, and nothing else to say.
#[derive(Debug, clap::Args)]
pub(crate) struct OneJob {
    /// The job's number, NAME-ID, or name (its newest job)
    pub(crate) job: String,
    #[command(flatten)]
    pub(crate) reach: Reach,
    /// Print the job as one JSON object on stdout
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Resume {
    /// The job's number, NAME-ID, or name (its newest job)
    pub(crate) job: String,
    /// Go on with workers of this numerics class, from the newest checkpoint: for a job none of whose class is left. `ebb status`
    /// shows the classes that stand by
    #[arg(long, value_name = "CLASS")]
    pub(crate) numerics: Option<String>,
    #[command(flatten)]
    pub(crate) reach: Reach,
    /// Print the job as one JSON object on stdout
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Watch {
    /// The job's number, NAME-ID, or name (its newest job)
    pub(crate) job: String,
    #[command(flatten)]
    pub(crate) reach: Reach,
    /// Print each event as one JSON object on stdout
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Scale {
    /// The job's number, NAME-ID, or name (its newest job)
    pub(crate) job: String,
    #[command(flatten)]
    pub(crate) reach: Reach,
    /// Workers that take part at most, 1 to 65536; the others stand by. N are enough where fleet.workers.min is above N
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(WORKERS_MAX)))]
    pub(crate) workers: u32,
    /// Print the job as one JSON object on stdout
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Cancel {
    /// The job's number, NAME-ID, or name (its newest job)
    pub(crate) job: String,
    #[command(flatten)]
    pub(crate) reach: Reach,
    /// Stop at once, without exporting what is trained so far
    #[arg(long)]
    pub(crate) force: bool,
    /// Print the job as one JSON object on stdout
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Fetch {
    /// The job's number, NAME-ID, or name (its newest job)
    pub(crate) job: String,
    #[command(flatten)]
    pub(crate) reach: Reach,
    /// Folder for the results: created if missing, results of an earlier run in it are replaced
    #[arg(long, value_name = "DIR")]
    pub(crate) out: PathBuf,
    /// Print the result as one JSON object on stdout
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Health {
    /// URL of a master or ps, or of a worker's --health-listen [env: EBB_HEALTH] [default: http://127.0.0.1:4700]
    #[arg(value_name = "URL")]
    pub(crate) url: Option<String>,
    /// Whether it takes part, not only whether it answers: a master takes jobs, a ps or worker is known to its master
    #[arg(long)]
    pub(crate) ready: bool,
    /// How long to wait for the answer, e.g. `500ms`
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
    /// Which shell
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
    fn a_run_takes_its_flags() {
        let line =
            "ebb run job.toml --workers 3 --ps 2 --out o --set a.b=1 --set c=2 --threads 4 --device cuda:1";
        let Command::Run(run) = Cli::try_parse_from(line.split(' ')).unwrap().command else {
            panic!("not a run")
        };
        assert_eq!((run.workers, run.ps, run.compute.threads), (Some(3), Some(2), 4));
        assert_eq!(run.file.overrides, ["a.b=1", "c=2"]);
        assert_eq!(run.compute.device.to_string(), "cuda:1");
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
