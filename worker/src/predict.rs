//! Predicting: a part of the records into a file, and all parts into one file.
//!
//! Each file is written whole under its name, or not at all. Whatever is written twice has the same
//! bytes, so a worker that lost its lease does no harm.

use std::sync::Arc;

use bytes::Bytes;
use data::predictions::{Join, Predictions};
use proto::checkpoint::Error as StoreError;
use proto::ids::{Epoch, Era, Version};
use proto::parameters::Want;
use proto::pb::complete_request::Result as Report;
use proto::pb::{self, Phase};
use proto::predictions::{MANIFEST, PredictionFormat, is_up_to, part_records, parts};
use serde_json::json;
use store::{Folder, Stores};

use crate::error::{Error, Result};
use crate::job::Job;
use crate::other_tasks::pull;
use crate::progress::Progress;

/// Largest part that is read to be joined. Only parts that fit together are joined.
const PART_BYTES_MAX: u64 = 1 << 40;

/// Most bytes of the outputs of one part, which a worker holds in memory as f32.
const OUTPUT_BYTES_MAX: u64 = 4 << 30;

/// Parts of an upload that are on their way at once.
const UPLOADS_MAX: usize = 4;

/// Place and format of a job's predictions.
struct Place {
    folder: Folder,
    /// Name of the joined file.
    file: String,
    /// Folder of the parts of all jobs with this file.
    all: Folder,
    /// Name of this job's folder in it.
    own: String,
    /// This job's folder.
    parts: Folder,
    format: PredictionFormat,
}

impl Place {
    fn of(job: &Job, stores: &Stores) -> Result<Self> {
        let missing = |reason: &str| Error::Task { what: "predict".to_owned(), reason: reason.to_owned() };
        let spec =
            job.spec.predict.as_ref().ok_or_else(|| missing("the job names no place for predictions"))?;
        let format = spec.format().ok_or_else(|| missing("the ending of predict.url names no format"))?;
        let (folder, file) = spec.place();
        let folder = stores.open(&folder)?;
        if job.parts.is_empty() {
            return Err(missing("the master names no folder for the parts; start a master of this version"));
        }
        let all = folder.below(&spec.parts_folder());
        let parts = all.below(&job.parts);
        Ok(Self { folder, file: file.to_owned(), all, own: job.parts.clone(), parts, format })
    }
}

/// Checks that a worker can hold the outputs of a part, when so many records have outputs of this
/// shape each.
///
/// # Errors
/// They are too large on every worker.
pub(crate) fn check_size(shape: &[usize], records: u64) -> Result<()> {
    let part = part_records(records).min(records);
    let bytes = shape.iter().fold(4 * part, |bytes, &length| bytes.saturating_mul(length as u64));
    if bytes <= OUTPUT_BYTES_MAX {
        return Ok(());
    }
    let reason = format!(
        "the outputs of a part of {part} records have {bytes} bytes ({shape:?} for each record), expected at most \
         {OUTPUT_BYTES_MAX}; let the model return fewer values, or predict fewer records"
    );
    Err(Error::Impossible { what: "predict".to_owned(), reason })
}

/// Writes the predictions of a range of records.
pub(crate) async fn predict(
    job: &Arc<Job>,
    task: &pb::PredictTask,
    stores: &Stores,
    progress: &Progress,
) -> Result<Report> {
    let place = Place::of(job, stores)?;
    let weights = pull(job, Era(task.era), Want::Exact(Version(0)), progress).await?;
    let data = job.measured()?;
    let (begin, end, micro) = (task.begin, task.end, u64::from(job.spec.batch.micro));
    progress.enter(Phase::Computing, format!("records {begin} to {}", end.saturating_sub(1)));
    let (computing, format, job_of) = (progress.clone(), place.format, job.clone());
    let content = job.compute.call(move |loaded| {
        let model = loaded.with(&weights)?;
        let mut predictions = Predictions::default();
        for at in (begin..end).step_by(micro as usize) {
            computing.advance();
            let batch = data.batch(Epoch(0), at..end.min(at + micro))?;
            job_of.notice(&data, &batch);
            predictions.add(&batch.records, &model.predict(&batch)?)?;
        }
        Ok(Bytes::from(predictions.encode(format)?))
    });
    let content = content.await?;
    let name = place.format.part_name(&(begin..end));
    progress.enter(Phase::Pushing, format!("`{}`", place.parts.shown(&name)));
    let write = || async { place.parts.write(&name, content.clone()).await };
    stores.patiently(tell, write).await?;
    Ok(Report::Predicted(pb::Predicted { samples: end - begin, bytes: content.len() as u64 }))
}

/// Joins all parts in their order into one file, or writes the manifest of parts that stay.
pub(crate) async fn join(
    job: &Job,
    task: &pb::JoinTask,
    stores: &Stores,
    progress: &Progress,
) -> Result<Report> {
    let place = Place::of(job, stores)?;
    progress.enter(Phase::Pushing, format!("`{}`", place.folder.shown(&place.file)));
    let attempt = || async {
        match task.keep {
            true => manifest(&place, task.records, progress).await,
            false => join_parts(&place, task.records, progress).await,
        }
    };
    // Only the store is tried again.
    let judged = || async {
        match attempt().await {
            Ok(bytes) => Ok(Ok(bytes)),
            Err(Error::Store(error)) => Err(error),
            Err(error) => Ok(Err(error)),
        }
    };
    let bytes = stores.patiently(tell, judged).await??;
    Ok(Report::Joined(pb::Joined { bytes }))
}

/// Returns the size of the file in bytes.
async fn join_parts(place: &Place, records: u64, progress: &Progress) -> Result<u64> {
    let mut upload = place.folder.upload(&place.file).await?;
    let mut join = Join::new(place.format, records);
    let mut bytes = 0;
    let joining = async {
        for part in parts(records) {
            let content = place.parts.read(&place.format.part_name(&part), PART_BYTES_MAX).await?;
            progress.advance();
            let content = join.add(part.end - part.start, content)?;
            bytes += content.len() as u64;
            upload.put(content, UPLOADS_MAX).await?;
        }
        let rest = join.finish()?;
        bytes += rest.len() as u64;
        upload.put(rest, UPLOADS_MAX).await?;
        Ok::<_, Error>(())
    };
    let joined = joining.await;
    match joined {
        Ok(()) => {
            upload.finish().await?;
            Ok(bytes)
        }
        Err(error) => {
            upload.abort().await;
            Err(error)
        }
    }
}

/// Lists the parts. Returns their size together in bytes.
async fn manifest(place: &Place, records: u64, progress: &Progress) -> Result<u64> {
    let (mut files, mut sum) = (Vec::new(), 0);
    for part in parts(records) {
        let name = place.format.part_name(&part);
        let bytes = place.parts.size(&name).await?;
        progress.advance();
        let file = format!("{}/{name}", place.own);
        files.push(json!({ "file": file, "records": [part.start, part.end], "bytes": bytes }));
        sum += bytes;
    }
    let manifest =
        json!({ "format": place.format.to_string(), "records": records, "bytes": sum, "files": files });
    let text = format!("{manifest:#}\n");
    place.all.write(MANIFEST, text.into()).await?;
    Ok(sum)
}

/// Removes the parts, which are joined. It is no failure if some stay.
pub(crate) async fn clear(job: &Job, stores: &Stores, progress: &Progress) -> Result<Report> {
    let place = Place::of(job, stores)?;
    progress.enter(Phase::Pushing, format!("`{}`", place.all));
    let remove = || remove_parts(&place, progress);
    let note = match stores.patiently(tell, remove).await {
        Ok(()) => String::new(),
        Err(error) => {
            format!("the predictions are whole, and their parts in {} cannot be removed: {error}", place.all)
        }
    };
    Ok(Report::Cleared(pb::Cleared { note }))
}

/// Removes the folder of this job, and those of earlier ones unless a manifest may name their
/// parts. A job that began later may have parts here.
async fn remove_parts(place: &Place, progress: &Progress) -> Result<(), StoreError> {
    let lists_parts = match place.all.size(MANIFEST).await {
        Ok(_) => true,
        Err(StoreError::Missing { .. }) => false,
        Err(error) => return Err(error),
    };
    for name in place.all.list().await? {
        if name != place.own && (lists_parts || !is_up_to(&name, &place.own)) {
            continue;
        }
        let folder = place.all.below(&name);
        for file in folder.list().await? {
            folder.remove_file(&file).await?;
            progress.advance();
        }
        folder.sweep()?;
    }
    place.all.remove_if_empty()
}

fn tell(error: &StoreError) {
    tracing::warn!(reason = %error, "the store of the predictions fails; trying again");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outputs_that_no_worker_can_hold_are_refused_with_their_size() {
        assert!(check_size(&[1 << 22], 1 << 20).is_ok(), "4 GiB");
        assert!(check_size(&[1 << 22, 2], 128).is_ok(), "a small data set has a small part");
        let error = check_size(&[1 << 22, 2], 1 << 20).unwrap_err();
        assert!(error.is_fatal(), "{error}");
        assert!(error.to_string().contains("256 records have 8589934592 bytes"), "{error}");
        assert!(check_size(&[usize::MAX, 2], 1).is_err());
    }
}
