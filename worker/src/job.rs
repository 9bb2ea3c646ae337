//! What a worker knows of a job it works on: specification, data, model, and the way to its partitions.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use proto::convert;
use proto::ids::{JobId, MicrobatchId};
use proto::pb;
use proto::placement::Layout;
use proto::plan::{Microbatch, Plan, RecordOrder};
use proto::spec::{Consistency, DataSet, JobSpec, Shuffle};

use crate::compute::Compute;
use crate::config::Options;
use crate::data::{Batch, Dataset};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::master_client::MasterClient;
use crate::model::{Context, Registry};
use crate::ps_client::{Connector, PsClient};

/// A job that is indexed: its records are counted, so its plan is fixed.
pub(crate) struct Job {
    pub(crate) id: JobId,
    pub(crate) spec: Arc<JobSpec>,
    pub(crate) consistency: Consistency,
    pub(crate) plan: Plan,
    pub(crate) train: Arc<Dataset>,
    pub(crate) validation: Option<Arc<Dataset>>,
    pub(crate) compute: Compute,
    /// Known once `Init` has described the model.
    partitions: OnceLock<(Arc<Layout>, PsClient)>,
    folder: PathBuf,
}

impl Job {
    /// Opens the data and builds the model.
    pub(crate) async fn open(
        id: JobId,
        reply: &pb::JobReply,
        options: &Options,
        device: Device,
        registry: &Registry,
        master: &MasterClient,
    ) -> Result<Self> {
        let spec = Arc::new(specification(reply)?);
        let train = open_data(&spec, DataSet::Train, options).await?;
        let has_validation = spec.data.validation.is_some() || spec.data.validation_fraction.is_some();
        let validation = match has_validation {
            true => Some(open_data(&spec, DataSet::Validation, options).await?),
            false => None,
        };
        let folder = options.scratch.join(format!("ebb-{}-{}-{id}", std::process::id(), options.name));
        let artifacts = download(id, &reply.artifacts, &folder, master).await?;
        let context = Context {
            spec: spec.clone(),
            features: train.shape().to_vec(),
            label_max: reply.label_max,
            artifacts,
            device,
            threads: options.threads,
        };
        let registry = registry.clone();
        let compute = Compute::start(options.threaded, move || registry.build(&context)).await?;
        let plan = spec.plan(train.len());
        let consistency = spec.consistency.resolve();
        let job = Self {
            id,
            spec,
            consistency,
            plan,
            train,
            validation,
            compute,
            partitions: OnceLock::new(),
            folder,
        };
        Ok(job)
    }

    /// Takes over where the model lives.
    pub(crate) fn place(&self, placement: pb::Placement, connector: &Connector) -> Result<()> {
        let wrong = |error: proto::Error| Error::Call { what: "placement".to_owned(), failure: error.into() };
        let tensors = convert::tensors(placement.tensors).map_err(wrong)?;
        let layout = Layout::new(tensors, placement.partitions.len() as u32).map_err(wrong)?;
        let layout = Arc::new(layout);
        let client = PsClient::new(
            connector,
            self.id,
            layout.clone(),
            &placement.partitions,
            self.spec.limits,
            self.spec.seed,
        )?;
        // Equal for the whole life of a job, so whoever is second brings the same.
        let _ = self.partitions.set((layout, client));
        Ok(())
    }

    pub(crate) fn is_placed(&self) -> bool {
        self.partitions.get().is_some()
    }

    /// The model's layout and its partitions.
    pub(crate) fn partitions(&self) -> Result<&(Arc<Layout>, PsClient)> {
        let missing = || Error::Engine {
            what: format!("job {}", self.id),
            reason: "the master handed out work before the model was placed".to_owned(),
        };
        self.partitions.get().ok_or_else(missing)
    }

    /// Reads the records of one microbatch.
    pub(crate) fn read(&self, id: MicrobatchId) -> Result<(Microbatch, Batch)> {
        let microbatch = self.plan.microbatch(id);
        let shuffle = self.spec.data.shuffle == Shuffle::Records;
        let order = RecordOrder::new(self.plan.records, self.spec.seed, microbatch.epoch, shuffle);
        let (begin, end) = microbatch.positions;
        let batch = self.train.batch((begin..end).map(|position| order.record(position)))?;
        Ok((microbatch, batch))
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        // Only what `download` put there; a leftover in the temporary folder harms nobody.
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

/// The specification, checked.
pub(crate) fn specification(reply: &pb::JobReply) -> Result<JobSpec> {
    JobSpec::from_json(&reply.spec_json)
        .map_err(|error| Error::Call { what: "job specification".to_owned(), failure: error.into() })
}

/// Runs `read` where it may block.
pub(crate) async fn blocking<T, F>(threaded: bool, read: F) -> Result<T>
where
    T: Send + 'static,
    F: FnOnce() -> Result<T> + Send + 'static,
{
    if !threaded {
        return read();
    }
    let panicked = |error| Error::Engine { what: "a reading thread".to_owned(), reason: format!("{error}") };
    tokio::task::spawn_blocking(read).await.map_err(panicked)?
}

async fn open_data(spec: &Arc<JobSpec>, set: DataSet, options: &Options) -> Result<Arc<Dataset>> {
    let (spec, root) = (spec.clone(), options.data_root.clone());
    blocking(options.threaded, move || Dataset::open(&spec, set, root.as_deref())).await
}

async fn download(
    id: JobId,
    artifacts: &[pb::Artifact],
    folder: &Path,
    master: &MasterClient,
) -> Result<BTreeMap<String, PathBuf>> {
    let mut paths = BTreeMap::new();
    for artifact in artifacts {
        paths.insert(artifact.name.clone(), master.download(id, artifact, folder).await?);
    }
    Ok(paths)
}
