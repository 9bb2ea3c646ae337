//! All tasks but training: counting records, placing a model, evaluating it, exporting it.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use data::predictions::Predictions;
use data::{Batch, Tokenizer};
use model::Upcoming;
use model::export;
use model::weights::{Spare, Weights};
use proto::ids::{Epoch, Era, IncarnationId, LeaseId, Version};
use proto::parameters::{Target, Want};
use proto::pb::complete_request::Result as Report;
use proto::pb::{self, Phase};
use proto::spec::{DataSet, Format, JobSpec, Purpose};

use crate::bad::Asker;
use crate::blocking::blocking;
use crate::config::{Inline, Options};
use crate::error::{Error, Result};
use crate::exchange::Connector;
use crate::initial;
use crate::job::Job;
use crate::master_client::MasterClient;
use crate::predict;
use crate::progress::Progress;
use crate::trainer;
use crate::worst::{self, WorstRecords};

/// Task that counts the records of one file (pair).
pub(crate) struct Index {
    spec: Arc<JobSpec>,
    set: DataSet,
    file: usize,
    root: Option<PathBuf>,
    inline: Option<Inline>,
    /// What an earlier task found, if the file is as it was.
    known: Option<pb::Indexed>,
    /// Tokenizers of the job, which the process keeps meanwhile.
    _tokenizers: Vec<Arc<Tokenizer>>,
}

impl Index {
    pub(crate) fn new(
        spec: JobSpec,
        task: &pb::IndexTask,
        options: &Options,
        tokenizers: Vec<Arc<Tokenizer>>,
    ) -> Result<Self> {
        let set = match task.set() {
            pb::DataSet::Validation => DataSet::Validation,
            pb::DataSet::Train | pb::DataSet::Unspecified => DataSet::Train,
        };
        let file = task.file as usize;
        if spec.data.files(set).is_none_or(|files| file >= files.len()) {
            return Err(Error::Task {
                what: "index".to_owned(),
                reason: format!("the job has no {set:?} file {file}"),
            });
        }
        Ok(Self {
            spec: Arc::new(spec),
            set,
            file,
            root: options.data_root.clone(),
            inline: options.inline.clone(),
            known: task.known.clone(),
            _tokenizers: tokenizers,
        })
    }

    pub(crate) async fn run(self, progress: Progress) -> Result<Report> {
        let inline = self.inline.clone();
        if let Some(known) = self.known {
            let (spec, root, place) = (self.spec.clone(), self.root.clone(), progress.clone());
            let stamp = known.stamp.clone();
            let is_unchanged =
                move || data::is_unchanged(&spec, self.set, self.file, root.as_deref(), &stamp, &place);
            if blocking(inline.as_ref(), is_unchanged).await? {
                tracing::debug!(set = ?self.set, file = self.file, "the file is as it was when it was indexed");
                return Ok(Report::Indexed(known));
            }
        }
        let index =
            move || data::index_observed(&self.spec, self.set, self.file, self.root.as_deref(), &progress);
        let indexed = blocking(inline.as_ref(), index).await?;
        Ok(Report::Indexed(pb::Indexed {
            records: indexed.records,
            inputs: indexed.inputs.iter().map(pb::Column::from).collect(),
            label_min: indexed.labels.map(|(min, _)| min),
            label_max: indexed.labels.map(|(_, max)| max),
            crc32c: Some(indexed.content.crc32c),
            bytes: indexed.content.bytes,
            version: indexed.version,
            stamp: indexed.stamp,
            cuts: indexed.cuts.as_ref().map(pb::Cuts::from),
            ..pb::Indexed::default()
        }))
    }
}

/// Names the model's tensors, tries it on records, and pushes version 0, unless all partitions get
/// their weights from a checkpoint.
pub(crate) async fn init(
    job: &Arc<Job>,
    task: &pb::InitTask,
    master: &MasterClient,
    incarnation: IncarnationId,
    lease: LeaseId,
    connector: &Connector,
    progress: &Progress,
) -> Result<Report> {
    let (seed, spec) = (job.spec.seed, job.spec.clone());
    // A model that does not fit its data must fail now, not after an hour of placement and waiting.
    let records = job.clone();
    let file = job.initial.clone();
    progress.enter(Phase::Reading, "the first records, to try the model");
    let place = progress.clone();
    let (tensors, values, note) = job
        .compute
        .call(move |loaded| {
            // In the model's thread, because a file on another machine takes its time.
            let batch = match spec.purpose {
                // The program has not begun its loop. It sees at once what does not fit.
                _ if spec.is_driven() => None,
                Purpose::Train => Some(records.first_batch()?),
                Purpose::Evaluate | Purpose::Predict => Some(records.first_measured()?),
            };
            place.enter(Phase::Computing, "the first records, to try the model");
            let tensors = loaded.model.tensors();
            let mut values = loaded.model.initial(seed)?;
            let mut note = String::new();
            if let Some(path) = file {
                let content = std::fs::read(&path).map_err(|source| Error::File { path, source })?;
                let taken = initial::take(&content, &tensors, &mut values)?;
                note = if spec.purpose.trains() { taken.report() } else { taken.whole()? };
            }
            let values = Weights::new(values, Spare::default());
            let Some(batch) = batch else { return Ok((tensors, values, note)) };
            let model = loaded.with(&values)?;
            match spec.purpose {
                Purpose::Train => drop(model.gradients(&batch, 0)?),
                Purpose::Evaluate => {}
                Purpose::Predict => {
                    let outputs = model.predict(&batch)?;
                    Predictions::default().add(&batch.records, &outputs)?;
                    predict::check_size(&outputs.spec().shape, records.measured()?.len())?;
                    return Ok((tensors, values, note));
                }
            }
            let measured = match WorstRecords::of(&spec) {
                Some(mut worst) => worst.evaluate(model, &batch)?,
                None => model.evaluate(&batch)?,
            };
            let metrics = &spec.model.metrics;
            if let Some(metric) = metrics.iter().find(|metric| !measured.tallies.contains_key(*metric)) {
                return Err(Error::Task {
                    what: format!("metric `{metric}`"),
                    reason: "this model does not report it; remove it from model.metrics".to_owned(),
                });
            }
            measured.check(metrics)?;
            Ok((tensors, values, note))
        })
        .await?;
    progress.enter(Phase::Pushing, "the description of the model");
    let described = tensors.iter().map(pb::TensorSpec::from).collect();
    let (placement, restoring) = master.describe(incarnation, lease, described).await?;
    job.place(placement, connector)?;
    if restoring {
        return Ok(Report::Initialized(pb::Initialized::default()));
    }
    // A job that goes on keeps its order, whatever this worker has.
    if job.spec.purpose == Purpose::Train && job.spec.data.format != Format::Index {
        job.train.check_order(&job.spec)?;
    }
    progress.enter(Phase::Pushing, "version 0");
    let ps = job.placed()?.ps.at(Era(task.era)).saying(progress);
    ps.push(Target::Initial, values.to_vec()).await?;
    Ok(Report::Initialized(pb::Initialized { note }))
}

/// Evaluates a data shard of the validation set at a version, without bad records.
pub(crate) async fn evaluate(
    job: &Arc<Job>,
    task: &pb::EvaluateTask,
    asker: &Asker,
    progress: &Progress,
) -> Result<Report> {
    let version = Version(task.version);
    let weights = pull(job, Era(task.era), Want::Exact(version), progress).await?;
    let data = job.validation.clone().ok_or_else(|| Error::Task {
        what: "evaluate".to_owned(),
        reason: "the job has no validation records".to_owned(),
    })?;
    let (begin, end, micro) = (task.begin, task.end, job.spec.batch.micro as usize);
    progress.enter(Phase::Computing, format!("validation records {begin} to {}", end.saturating_sub(1)));
    let (place, skipped, job_of) = (progress.clone(), job.skipped(), job.clone());
    let epoch = Epoch(version.get().div_ceil(job.plan.steps_per_epoch()).saturating_sub(1));
    let evaluated = job.compute.call(move |loaded| {
        let mut bad = Vec::new();
        let starts = (begin..end).step_by(micro);
        let batches = starts.map(|at| -> data::Result<Batch> {
            place.advance();
            let records = at..end.min(at + micro as u64);
            let (batch, found) = data.read(Epoch(0), records, &skipped.validation)?;
            bad.extend(found);
            job_of.notice(&data, &batch);
            Ok(batch)
        });
        let worst = WorstRecords::of(&job_of.spec);
        let model = loaded.with(&weights)?;
        model.announce(Upcoming::Evaluation { epoch, records: &(begin..end), micro });
        let mut evaluated = trainer::evaluate(model, batches, worst)?;
        worst::show(&mut evaluated.worst, &data, job_of.spec.previews())?;
        Ok((evaluated, bad))
    });
    let (evaluated, bad) = evaluated.await?;
    asker.skip(DataSet::Validation, &bad).await?;
    Ok(Report::Evaluated(evaluated))
}

/// Writes a version's files and sends them to the master.
pub(crate) async fn export(
    job: &Arc<Job>,
    task: &pb::ExportTask,
    master: &MasterClient,
    incarnation: IncarnationId,
    lease: LeaseId,
    progress: &Progress,
) -> Result<Report> {
    let want = task.version.map_or(Want::AtLeast(Version(0)), |version| Want::Exact(Version(version)));
    let weights = pull(job, Era(task.era), want, progress).await?;
    let tensors = job.placed()?.layout.tensors().to_vec();
    progress.enter(Phase::Computing, "the files of the model");
    let place = progress.clone();
    let files = job.compute.call(move |loaded| {
        let _place = place;
        let mut files = BTreeMap::new();
        let model = loaded.with(&weights)?;
        for (name, content) in model.export()? {
            files.insert(name, content.into());
        }
        let content = export::safetensors(&tensors, &weights.on_host()?, &model.constants()?)?;
        files.insert("model.safetensors".to_owned(), content.into());
        Ok(files)
    });
    let files = files.await?;
    progress.enter(Phase::Pushing, "the files of the model, to the master");
    let artifacts = master.upload(incarnation, lease, files).await?;
    Ok(Report::Exported(pb::Exported { artifacts }))
}

pub(crate) async fn pull(job: &Job, era: Era, want: Want, progress: &Progress) -> Result<Weights> {
    progress.enter(Phase::Pulling, format!("{want:?}"));
    let pulled = job.placed()?.ps.at(era).saying(progress).pull(want).await?;
    pulled.ok_or_else(|| Error::Task {
        what: format!("{want:?}"),
        reason: "the parameter servers no longer keep this version".to_owned(),
    })
}
