//! State of a worker for a job: specification, data, model, and the way to its partitions.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock};

use data::{BadRecord, Batch, Cuts, Dataset, KnownIndex};
use model::{Context, Device, Inputs, Registry};
use proto::artifact::{INITIAL, is_tokenizer};
use proto::convert;
use proto::ids::{Epoch, JobId, MicrobatchId};
use proto::pb::{self, Phase};
use proto::placement::Layout;
use proto::plan::{EpochOrder, Microbatch, Plan};
use proto::spec::{Consistency, DataSet, JobSpec};

use crate::artifact::Artifact;
use crate::bad::Skipped;
use crate::blocking::blocking;
use crate::compute::Compute;
use crate::config::Options;
use crate::error::{Error, Result};
use crate::exchange::{Connector, Partitions};
use crate::master_client::MasterClient;
use crate::progress::Progress;
use crate::tokenizers;

/// An indexed job: its records are counted, so its plan is fixed.
pub(crate) struct Job {
    pub(crate) id: JobId,
    pub(crate) spec: Arc<JobSpec>,
    pub(crate) consistency: Consistency,
    pub(crate) plan: Plan,
    pub(crate) train: Arc<Dataset>,
    pub(crate) validation: Option<Arc<Dataset>>,
    pub(crate) compute: Compute,
    /// How records of the training data get to the device of the model.
    inputs: Inputs,
    /// Placement, known once `Init` has described the model. A placement of a higher number
    /// replaces it.
    placed: RwLock<Option<Arc<Placed>>>,
    /// Records that are left out, as the master said last.
    skipped: RwLock<Arc<Skipped>>,
    /// Orders of the epochs that were read last.
    orders: Mutex<[(Epoch, Arc<EpochOrder>); 2]>,
    /// Whether weights were pulled before, so that their memory and the connections exist.
    weighed: AtomicBool,
    /// What was noticed in the records first.
    noticed: OnceLock<String>,
    /// Name of this worker.
    worker: String,
    /// Files of the job, which stay open. `initial` is a path to one of them.
    _files: Arc<BTreeMap<String, Artifact>>,
    /// Path of the weights to begin with.
    pub(crate) initial: Option<PathBuf>,
    /// Folder of this job within the folder of the parts of predictions.
    pub(crate) parts: String,
}

/// The records of one microbatch.
pub(crate) struct Read {
    pub(crate) microbatch: Microbatch,
    /// The good records.
    pub(crate) batch: Batch,
    /// Records that were left out, and that the master may not know.
    pub(crate) bad: Vec<BadRecord>,
}

/// Placement of the model.
pub(crate) struct Placed {
    number: u64,
    pub(crate) layout: Arc<Layout>,
    pub(crate) ps: Partitions,
}

impl Job {
    /// Opens the data and builds the model, whose gradients may lie in memory of `connector`.
    #[allow(
        clippy::too_many_arguments,
        reason = "called once; a structure of the same fields would say it twice"
    )]
    pub(crate) async fn open(
        id: JobId,
        reply: &pb::JobReply,
        options: &Options,
        device: Device,
        registry: &Registry,
        master: &MasterClient,
        connector: &Connector,
        progress: &Progress,
    ) -> Result<Self> {
        let spec = Arc::new(specification(reply)?);
        let _tokenizers = tokenizers::load(id, &spec, reply, options, master, progress).await?;
        let train = open_data(&spec, DataSet::Train, reply, options, progress).await?;
        train.check(&reply.train_records, &reply.train_bytes, &reply.train_versions)?;
        let validation = match spec.data.validates() {
            true => Some(open_data(&spec, DataSet::Validation, reply, options, progress).await?),
            false => None,
        };
        if let (Some(data), Some(DataSet::Validation)) =
            (&validation, spec.data.files_of(DataSet::Validation))
        {
            data.check(&reply.validation_records, &reply.validation_bytes, &reply.validation_versions)?;
        }
        let files = download(id, &reply.artifacts, &options.scratch, master, progress).await?;
        let files = Arc::new(files);
        let path = |(name, file): (&String, &Artifact)| (name.clone(), file.path());
        let mut artifacts: BTreeMap<_, _> = files.iter().map(path).collect();
        let initial = artifacts.remove(INITIAL).filter(|_| spec.model.initial.is_some());
        let context = Context {
            spec: spec.clone(),
            inputs: train.inputs(),
            label_max: reply.label_max,
            artifacts,
            device,
            devices: options.devices.clone(),
            threads: options.threads,
        };
        let registry = registry.clone();
        // The place that works has a handle of its own.
        let compiling = progress.clone();
        let build = move || {
            let model = &context.spec.model;
            let name = model.builtin.as_deref().or(model.script.as_deref()).unwrap_or_default();
            compiling.enter(Phase::Compiling, format!("`{name}`"));
            Ok(registry.build(&context)?)
        };
        // The model may read them again, and may outlive the job by one call.
        let memory = connector.gradient_memory();
        let compute = Compute::start(options.inline.as_ref(), files.clone(), memory, build).await?;
        let inputs = Inputs::new(compute.device_of_inputs(), &train, spec.data.mixup.is_some());
        let plan = spec.plan(train.len());
        let consistency = spec.consistency.resolve();
        let first = (Epoch(0), Arc::new(spec.order(&train.shards(), Epoch(0))));
        let job = Self {
            id,
            orders: Mutex::new([first.clone(), first]),
            spec,
            consistency,
            plan,
            train,
            validation,
            compute,
            inputs,
            placed: RwLock::default(),
            skipped: RwLock::default(),
            weighed: AtomicBool::new(false),
            noticed: OnceLock::new(),
            worker: options.name.clone(),
            _files: files,
            initial,
            parts: reply.parts.clone(),
        };
        Ok(job)
    }

    /// Sets the placement, unless a newer one is known.
    pub(crate) fn place(&self, placement: pb::Placement, connector: &Connector) -> Result<()> {
        let wrong = |error: proto::Error| Error::Call { what: "placement".to_owned(), failure: error.into() };
        let tensors = convert::tensors(placement.tensors).map_err(wrong)?;
        let layout = Layout::new(tensors, placement.partitions.len() as u32).map_err(wrong)?;
        let layout = Arc::new(layout);
        // Workers that retry must not do so at the same moments.
        let seed = proto::random::key(self.spec.seed, &self.worker, 0);
        let ps = Partitions::new(
            connector,
            self.id,
            layout.clone(),
            &placement.partitions,
            self.spec.limits,
            seed,
        )?
        .exchanging(self.spec.exchange.dtype)
        .on(self.compute.device().clone());
        let number = placement.number;
        let mut placed = self.placed.write().unwrap_or_else(PoisonError::into_inner);
        if placed.as_ref().is_none_or(|placed| placed.number < number) {
            *placed = Some(Arc::new(Placed { number, layout, ps }));
        }
        Ok(())
    }

    /// Returns the data set that a job without training goes over.
    pub(crate) fn measured(&self) -> Result<Arc<Dataset>> {
        let set = match self.spec.measured_set() {
            Some(DataSet::Train) => Some(&self.train),
            Some(DataSet::Validation) | None => self.validation.as_ref(),
        };
        set.cloned().ok_or_else(|| Error::Task {
            what: format!("job {}", self.id),
            reason: "the job has no validation records".to_owned(),
        })
    }

    /// Returns whether the placement of this number, or a later one, is known.
    pub(crate) fn is_placed(&self, number: u64) -> bool {
        let placed = self.placed.read().unwrap_or_else(PoisonError::into_inner);
        placed.as_ref().is_some_and(|placed| placed.number >= number)
    }

    /// Returns the placement of the model.
    pub(crate) fn placed(&self) -> Result<Arc<Placed>> {
        let missing = || Error::Task {
            what: format!("job {}", self.id),
            reason: "the master handed out work before the model was placed".to_owned(),
        };
        self.placed.read().unwrap_or_else(PoisonError::into_inner).clone().ok_or_else(missing)
    }

    /// Returns the records that are left out, as the master said last.
    pub(crate) fn skipped(&self) -> Arc<Skipped> {
        self.skipped.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Sets the records that are left out.
    pub(crate) fn skip(&self, skipped: Skipped) {
        *self.skipped.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(skipped);
    }

    /// Notes that weights for training were pulled. Returns whether that is the first time.
    pub(crate) fn first_weights(&self) -> bool {
        !self.weighed.swap(true, Ordering::Relaxed)
    }

    /// Returns the order of an epoch. Reading ahead needs those of two epochs at most.
    fn order(&self, epoch: Epoch) -> Arc<EpochOrder> {
        let mut orders = self.orders.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, order)) = orders.iter().find(|(of, _)| *of == epoch) {
            return order.clone();
        }
        let order = Arc::new(self.spec.order(&self.train.shards(), epoch));
        orders.rotate_right(1);
        orders[0] = (epoch, order.clone());
        order
    }

    /// Reads the records of one microbatch, without bad ones. The call blocks.
    pub(crate) fn read(&self, id: MicrobatchId) -> Result<Read> {
        let microbatch = self.plan.microbatch(id);
        let order = self.order(microbatch.epoch);
        let (begin, end) = microbatch.positions;
        let records = order.records(begin..end);
        let skipped = self.skipped();
        let (batch, bad) = self.inputs.read(&self.train, microbatch.epoch, records, &skipped.train)?;
        self.notice(&self.train, &batch);
        let batch = match self.spec.data.mixup {
            Some(mixup) => data::mixed(batch, mixup.share(self.spec.seed, id.get()), mixup.classes)?,
            None => batch,
        };
        Ok(Read { microbatch, batch: self.inputs.placed(batch), bad })
    }

    /// Looks for values in a batch of `data` that are NaN or infinite, until some were found in
    /// this job.
    pub(crate) fn notice(&self, data: &Dataset, batch: &Batch) {
        if self.noticed.get().is_some() {
            return;
        }
        if let Some(found) = data.not_finite(batch)
            && self.noticed.set(found.to_string()).is_ok()
        {
            tracing::warn!(job = %self.id, "{found}");
        }
    }

    /// Returns what was noticed in the records first. `None`: nothing yet.
    pub(crate) fn warning(&self) -> Option<String> {
        self.noticed.get().cloned()
    }

    /// Reads the first microbatch that has a good record. The call blocks.
    pub(crate) fn first_batch(&self) -> Result<Batch> {
        let reads = (0..self.plan.microbatches_per_epoch()).map(|id| {
            let Read { batch, bad, .. } = self.read(MicrobatchId(id))?;
            Ok((batch, bad))
        });
        first_good(self.spec.data.skipped_max(self.train.len()), reads)
    }

    /// Reads the first records with a good one of the data set that a job without training goes
    /// over. The call blocks.
    pub(crate) fn first_measured(&self) -> Result<Batch> {
        let (data, skipped) = (self.measured()?, self.skipped());
        let skipped = match self.spec.measured_set() {
            Some(DataSet::Train) => &skipped.train,
            Some(DataSet::Validation) | None => &skipped.validation,
        };
        let micro = u64::from(self.spec.batch.micro);
        let reads = (0..data.len())
            .step_by(micro as usize)
            .map(|begin| Ok(data.read(Epoch(0), begin..data.len().min(begin + micro), skipped)?));
        first_good(self.spec.data.skipped_max(data.len()), reads)
    }
}

/// Returns the first batch that has a good record, unless more than `bad_max` bad ones come before
/// it.
fn first_good(
    bad_max: u64,
    reads: impl IntoIterator<Item = Result<(Batch, Vec<BadRecord>)>>,
) -> Result<Batch> {
    let (mut seen, mut first) = (0, None);
    for read in reads {
        let (batch, bad) = read?;
        if batch.samples > 0 {
            return Ok(batch);
        }
        seen += bad.len() as u64;
        first = first.or_else(|| bad.into_iter().next());
        if seen > bad_max {
            break;
        }
    }
    let first = match first {
        Some(BadRecord { record, reason }) => format!("record {record}: {reason}"),
        None => "the job skips all of them".to_owned(),
    };
    let reason = format!(
        "{seen} bad records and no good one before them, at most {bad_max} may be skipped (data.max_bad); {first}; clean \
         the data, or raise data.max_bad"
    );
    Err(Error::Impossible { what: "a record to try the model on".to_owned(), reason })
}

/// Reads and checks the specification.
pub(crate) fn specification(reply: &pb::JobReply) -> Result<JobSpec> {
    JobSpec::from_json(&reply.spec_json)
        .map_err(|error| Error::Call { what: "job specification".to_owned(), failure: error.into() })
}

async fn open_data(
    spec: &Arc<JobSpec>,
    set: DataSet,
    reply: &pb::JobReply,
    options: &Options,
    progress: &Progress,
) -> Result<Arc<Dataset>> {
    let (spec, root, progress) = (spec.clone(), options.data_root.clone(), progress.clone());
    let known = match spec.data.files_of(set) {
        Some(DataSet::Validation) => &reply.validation_known,
        Some(DataSet::Train) | None => &reply.train_known,
    };
    // What is malformed is read from the file.
    let read = |known: &pb::KnownFile| {
        let cuts = Cuts::read(known.cuts.as_ref()?)?;
        Some((known.file as usize, KnownIndex { stamp: known.stamp.clone(), cuts }))
    };
    let known: BTreeMap<_, _> = known.iter().filter_map(read).collect();
    let open =
        move || Dataset::open_observed(&spec, set, root.as_deref(), &progress, |file| known.get(&file));
    blocking(options.inline.as_ref(), open).await
}

async fn download(
    id: JobId,
    artifacts: &[pb::Artifact],
    folder: &Path,
    master: &MasterClient,
    progress: &Progress,
) -> Result<BTreeMap<String, Artifact>> {
    let mut files = BTreeMap::new();
    for artifact in artifacts.iter().filter(|artifact| !is_tokenizer(&artifact.name)) {
        progress.enter(Phase::Opening, format!("download of `{}`", artifact.name));
        files.insert(artifact.name.clone(), master.download(id, artifact, folder).await?);
    }
    Ok(files)
}

#[cfg(test)]
mod tests {
    use proto::tensor::Values;

    use super::*;

    /// Returns reads of one bad record each, and one of a good record at last.
    fn reads(bad: u64) -> impl Iterator<Item = Result<(Batch, Vec<BadRecord>)>> {
        let batch =
            |samples: usize| Batch::of(&vec![0.5; samples], &[1], &Values::I64(vec![0; samples]), samples);
        let found = move |record| BadRecord { record, reason: format!("column `{record}` has no value") };
        let good = std::iter::once_with(move || Ok((batch(1), Vec::new())));
        (0..bad).map(move |record| Ok((batch(0), vec![found(record)]))).chain(good)
    }

    #[test]
    fn the_model_is_tried_on_the_first_good_record_after_as_many_bad_ones_as_the_job_may_skip() {
        assert_eq!(first_good(40, reads(40)).unwrap().samples, 1);
        let error = first_good(40, reads(41)).unwrap_err();
        assert!(error.is_fatal(), "{error}");
        let said = error.to_string();
        assert!(
            said.contains("record 0: column `0` has no value") && said.contains("data.max_bad"),
            "{said}"
        );
        assert!(first_good(40, reads(40).take(40)).is_err(), "no record is good");
    }
}
