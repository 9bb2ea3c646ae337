//! A process's part in a job, on threads of its own: a whole cluster, or a worker of another one.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use client::results::{WorstRecords, metrics};
use client::security::Keys;
use client::{Client, Dialer, Followed, Local, PsMemory, Submission, report};
use kernels::Device;
use kernels::device::Devices;
use kernels::telemetry::Observer;
use model::{Model, Registry};
use net::memory::Memory;
use net::relay::Line;
use proto::numerics::Numerics;
use proto::spec::{JobSpec, PROGRAM};
use store::Stores;
use tokio_util::sync::CancellationToken;
use worker::{Connector, ProgramDevice, ReadAhead, Watched};

use super::driven::{Description, Driven, STATE};
use super::{Ahead, Message};
use crate::failure::message;

/// Longest time without an answer of a master.
const PATIENCE: Duration = Duration::from_secs(60);

/// The CUDA devices of this process, each opened once, whatever jobs it has.
static DEVICES: LazyLock<Devices> = LazyLock::new(ebbflow::devices);

/// Where a process takes part, and how.
pub(super) struct Place {
    pub(super) threads: usize,
    /// Numerics class of the program's model. `None`: it computes nothing.
    pub(super) numerics: Option<Numerics>,
    /// URL of the master. `None`: one in this process.
    pub(super) master: Option<String>,
    /// Name of the worker.
    pub(super) name: Option<String>,
    /// What this process shows to the cluster of that master, and trusts.
    pub(super) keys: Keys,
    /// The descriptor by which this process reaches its agent. `None`: it has no agent.
    pub(super) agent: Option<i32>,
    /// The submitted script that this process is one of; 0: none.
    pub(super) script: u64,
    /// Device of the program's model. `None`: the CPU.
    pub(super) device: Option<ProgramDevice>,
    /// Number in this process of the CUDA device on which the loop takes weights and leaves
    /// gradients. `None`: it does so on the host.
    pub(super) cuda: Option<usize>,
    /// Bytes of that device that a ps of this process may take; 0: half of those that are free.
    /// `None`: it keeps the model on the host.
    pub(super) ps_bytes_max: Option<u64>,
    /// Time during which a request for data by URL is repeated.
    pub(super) data_patience: Duration,
    /// Where the loop hears which records it will be asked for. `None`: it does not.
    pub(super) ahead: Option<Sender<Ahead>>,
}

impl Place {
    /// Returns where a ps of this process keeps the model.
    ///
    /// # Errors
    /// The kernels cannot use the device.
    fn ps_memory(&self) -> Result<PsMemory, String> {
        let Some((ordinal, bytes_max)) = self.cuda.zip(self.ps_bytes_max) else {
            return Ok(PsMemory::default());
        };
        let memory = DEVICES.cuda(ordinal).and_then(|device| device.memory());
        let memory = memory.map_err(|reason| {
            format!("ps_device = 'cuda': {reason}; or leave it out, and the ps keeps the model on the host")
        })?;
        // The other half is for PyTorch, which takes memory as it needs it.
        let half = memory.map_or(0, |(free, _)| free / 2);
        let bytes_max = if bytes_max == 0 { half } else { bytes_max };
        Ok(PsMemory { device: model::Device::Cuda(ordinal), bytes_max: Some(bytes_max) })
    }

    /// Returns what tells the loop of the microbatches that are read ahead.
    fn read_ahead(&self) -> Option<ReadAhead> {
        let ahead = self.ahead.clone()?;
        Some(ReadAhead::new(move |microbatch, batch| {
            // Nobody listens after the end.
            let _ = ahead.send(Ahead::Train(microbatch.epoch.get(), batch.records.clone()));
        }))
    }

    /// Returns the ways to the ps of another process.
    fn connector(&self, dialer: &Dialer, watched: &Watched) -> Connector {
        // An agent forwards calls, and cannot lend memory.
        let memory = if self.agent.is_some() { None } else { Memory::new().ok() };
        let (dialer, metrics) = (dialer.clone(), watched.metrics.clone());
        match (memory, self.cuda) {
            (Some(memory), Some(ordinal)) => {
                Connector::device_memory(dialer, memory, ordinal, DEVICES.clone(), metrics)
            }
            (Some(memory), None) => Connector::shared_memory(dialer, memory, metrics),
            (None, _) => Connector::socket(dialer),
        }
    }
}

/// Returns the device on which a loop takes weights and leaves gradients. The host, if the kernels
/// cannot use the device; the log says why. It may take seconds.
fn opened(devices: &Devices, cuda: Option<usize>) -> Device {
    let Some(ordinal) = cuda else { return Device::default() };
    devices.cuda(ordinal).unwrap_or_else(|reason| {
        let what = "weights and gradients go to and from the loop through memory of the host";
        tracing::warn!(%reason, "{what}");
        Device::default()
    })
}

/// Runs the part of this process until the job ends or `stop`. Tells all of it over `link`.
pub(super) fn run(
    spec: JobSpec,
    what: Arc<Description>,
    place: &Place,
    link: &Sender<Message>,
    stop: &CancellationToken,
) {
    let part = Part { spec, exported: Arc::default(), link, stop };
    let registry = part.registry(what, place);
    // Two: one may serve the master while a ps applies an update on the other.
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let ended = match runtime {
        Ok(runtime) => {
            let ended = runtime.block_on(async {
                match &place.master {
                    None => part.alone(place, registry).await,
                    Some(master) => part.together(master, place, registry).await,
                }
            });
            // A call of the model cannot be interrupted.
            runtime.shutdown_timeout(Duration::from_secs(1));
            ended
        }
        Err(error) => Err(error.to_string()),
    };
    let message = match ended {
        Ok(Some(message)) => message,
        Ok(None) => return,
        Err(reason) => Message::Broken(reason),
    };
    // Nobody listens after the end.
    let _ = link.send(message);
}

/// The part of this process in a job.
struct Part<'a> {
    spec: JobSpec,
    /// Whether this process wrote the files of the job.
    exported: Arc<AtomicBool>,
    link: &'a Sender<Message>,
    stop: &'a CancellationToken,
}

impl Part<'_> {
    fn registry(&self, what: Arc<Description>, place: &Place) -> Registry {
        let (link, exported) = (self.link.clone(), self.exported.clone());
        let (ahead, cuda) = (place.ahead.clone(), place.cuda);
        Registry::default().with(PROGRAM, move |context| {
            let (link, exported, ahead) = (link.clone(), exported.clone(), ahead.clone());
            let device = opened(&context.devices, cuda);
            let driven = Driven::new(what.clone(), link, exported, ahead, device);
            Ok(Box::new(driven) as Box<dyn Model>)
        })
    }

    /// Runs a whole cluster in this process. Returns the last message; `None` after `stop`.
    async fn alone(&self, place: &Place, registry: Registry) -> Result<Option<Message>, String> {
        // The device of the program's model is its own affair.
        let options = client::Options {
            threads: place.threads,
            ps_memory: place.ps_memory()?,
            open: DEVICES.clone(),
            data_patience: place.data_patience,
            program: self.spec.name.clone(),
            numerics: place.numerics.clone(),
            read_ahead: place.read_ahead(),
            ..client::Options::default()
        };
        let mut local = Local::start(options, Stores::default(), registry).await.map_err(whole)?;
        let client = local.client(PATIENCE);
        let ended = tokio::select! {
            biased;
            () = self.stop.cancelled() => Ok(None),
            error = local.failure() => Err(whole(error)),
            ended = async { self.follow(&client, &self.submit(&client, 0).await?).await } => {
                ended.map(Some).map_err(whole)
            }
        };
        local.stop().await;
        ended
    }

    /// Runs a worker of the cluster of `master`. The job is there before the worker is, so that a
    /// process that describes another job never takes part.
    async fn together(
        &self,
        master: &str,
        place: &Place,
        registry: Registry,
    ) -> Result<Option<Message>, String> {
        let dialer = match place.agent {
            Some(number) => through(number)?,
            None => {
                let keys = place.keys.clone();
                let dialer = Dialer::nearest().with(keys.clone());
                // Replaced files are read again while the job trains.
                tokio::spawn(async move { keys.follow().await });
                dialer
            }
        };
        let client = Client::new(&dialer, master, PATIENCE).map_err(whole)?;
        let job = tokio::select! {
            biased;
            () = self.stop.cancelled() => return Ok(None),
            job = self.submit(&client, place.script) => job.map_err(whole)?,
        };
        let options = worker::Options {
            name: place.name.clone().unwrap_or_else(|| format!("script-{}", std::process::id())),
            threads: place.threads,
            data_patience: place.data_patience,
            program: self.spec.name.clone(),
            script: place.script,
            numerics: place.numerics.clone(),
            devices: DEVICES.clone(),
            program_device: place.device.clone(),
            read_ahead: place.read_ahead(),
            // The program reads with its user's rights.
            data_urls: data::every_url(),
            ..worker::Options::default()
        };
        // The first answer of a driver takes a while. Without one nothing is known of the device.
        let ordinals: Vec<_> = place.cuda.into_iter().collect();
        let watching = tokio::task::spawn_blocking(move || Observer::start(&ordinals));
        let watching = watching.await.unwrap_or_default();
        let latest = place.cuda.map(|ordinal| watching.devices().latest(ordinal));
        let watched = Watched { device: latest.unwrap_or_default(), ..Watched::default() };
        let connector = place.connector(&dialer, &watched);
        let leave = CancellationToken::new();
        let stores = Stores::default();
        let working =
            worker::run(options, master, dialer, connector, registry, stores, watched, leave.clone());
        tokio::pin!(working);
        let ended = tokio::select! {
            biased;
            () = self.stop.cancelled() => Ok(None),
            // It returns only with an error, since nobody has told it to leave.
            left = &mut working => return left.map(|()| None).map_err(|error| error.to_string()),
            ended = self.follow(&client, &job) => ended.map(Some).map_err(whole),
        };
        leave.cancel();
        if let Err(error) = working.await {
            tracing::debug!(reason = %error, "the worker left");
        }
        ended
    }

    /// Submits the job, or takes part in it where it lives, once this process has its data files.
    /// Returns its name.
    async fn submit(&self, client: &Client, script: u64) -> client::Result<String> {
        let mut submission = Submission::new(&self.spec)?;
        client::replace_patterns(&mut submission.spec, None).await?;
        client::check_data(&submission.spec, None)?;
        submission.join = true;
        submission.script = script;
        Ok(client.submit(submission).await?.name)
    }

    /// Follows the job to its end.
    async fn follow(&self, client: &Client, job: &str) -> client::Result<Message> {
        let mut follow = client.follow(job);
        let status = loop {
            match follow.next().await? {
                Followed::Event(event) => {
                    if let Some(line) = metrics::full_line(&event) {
                        let _ = self.link.send(Message::Event(line, sums(event)));
                    }
                }
                Followed::Ended(status) => break status,
            }
        };
        let weights = client.weights(&status).await?;
        let has_state = status.artifacts.iter().any(|artifact| artifact.name == STATE);
        let state = if has_state { client.file(&status, STATE).await? } else { None };
        let exported = self.exported.load(Ordering::Relaxed);
        let summary = report::Summary::new(&status).to_text();
        Ok(Message::Ended(summary, weights, exported, state, WorstRecords::of(&status)))
    }
}

/// Returns the sums of the loop's own metrics in an event.
fn sums(event: client::Event) -> Vec<(String, Vec<f64>)> {
    match event.kind {
        client::Kind::Evaluation(evaluation) => {
            evaluation.sums.into_iter().map(|(name, sum)| (name, sum.values)).collect()
        }
        _ => Vec::new(),
    }
}

/// Returns the dialer of a process that reaches the cluster by way of its agent.
pub(crate) fn through(number: i32) -> Result<Dialer, String> {
    let line = Line::inherited(number).map_err(|error| {
        format!(
            "EBBFLOW_AGENT is {number}, which is not the socket of an agent here ({error}); join the job in the process that \
             the agent started, or let a child inherit the descriptor"
        )
    })?;
    Ok(Dialer::through(line))
}

#[expect(clippy::needless_pass_by_value, reason = "`map_err` gives it by value")]
fn whole(error: client::Error) -> String {
    message(&error)
}
