//! What is checked and filled in before a job is sent: to a master, or to a cluster in this
//! process.

use std::path::{Path, PathBuf};

use model::Registry;
use proto::spec::{DataSet, FleetSpec, Format, JobSpec, data_url};
use store::Stores;

use crate::{Error, Result, Submission};

impl Submission {
    /// Gets the job ready for a master: reads the weights that it begins with, and replaces
    /// patterns in its lists of files.
    ///
    /// # Errors
    /// The weights or a folder cannot be read, the predictions exist, or the job writes to the
    /// memory of one process.
    pub async fn ready_for_master(&mut self, stores: &Stores) -> Result<()> {
        self.check_free(stores).await?;
        self.read_initial(stores).await?;
        let is_memory = |url: &str| url.starts_with("memory:");
        if self.spec.checkpoint.as_ref().is_some_and(|checkpoint| is_memory(&checkpoint.url)) {
            return Err(Error::CheckpointsInMemory);
        }
        check_predictions(&self.spec)?;
        replace_patterns(&mut self.spec, None).await
    }

    /// Gets the job ready for a cluster in this process, like
    /// [`ready_for_master`](Self::ready_for_master), and checks it by
    /// [`check_here`](Self::check_here).
    ///
    /// # Errors
    /// The weights, a folder or a data file cannot be read, the predictions exist, or `registry`
    /// lacks the network.
    pub async fn ready_for_here(
        &mut self,
        stores: &Stores,
        registry: &Registry,
        root: Option<&Path>,
    ) -> Result<()> {
        self.check_free(stores).await?;
        self.read_initial(stores).await?;
        replace_patterns(&mut self.spec, root).await?;
        self.check_here(registry, root)
    }

    /// Checks what only the process that trains can know, before anything is written or started.
    ///
    /// # Errors
    /// `registry` lacks the network, or local data files cannot be read: all of them, with the
    /// reasons.
    pub fn check_here(&self, registry: &Registry, root: Option<&Path>) -> Result<()> {
        if let Some(name) = &self.spec.model.builtin
            && !registry.names().contains(&name.as_str())
        {
            let known = registry.names().into_iter().map(str::to_owned).collect();
            return Err(Error::UnknownNetwork { name: name.clone(), known });
        }
        check_data(&self.spec, root)
    }

    /// Changes the job's fleet to these numbers of workers and ps, where they are given. They win
    /// over the job file.
    pub fn fit_fleet(&mut self, workers: Option<u32>, ps: Option<u32>) {
        fit_fleet(&mut self.spec.fleet, workers, ps);
    }
}

/// Checks that somebody can read the job's predictions when its processes have ended.
///
/// # Errors
/// They would be in the memory of a process.
pub fn check_predictions(spec: &JobSpec) -> Result<()> {
    match &spec.predict {
        Some(predict) if predict.url.starts_with("memory:") => Err(Error::PredictionsInMemory),
        _ => Ok(()),
    }
}

/// Replaces patterns in the job's lists of files by the files that fit them. Local paths are looked
/// up below `root` if given.
///
/// # Errors
/// A folder cannot be listed, no file fits, or the lists do not fit each other then.
pub async fn replace_patterns(spec: &mut JobSpec, root: Option<&Path>) -> Result<()> {
    let (data, root) = (spec.data.clone(), root.map(Path::to_owned));
    let replace = move || data::without_patterns(&data, root.as_deref());
    let replaced = tokio::task::spawn_blocking(replace).await;
    spec.data = replaced.map_err(|panic| Error::Panicked(panic.to_string()))??;
    Ok(spec.validate()?)
}

/// Checks that all local data files can be read. Patterns are replaced before.
///
/// # Errors
/// Some cannot: all of them, with the reasons.
pub fn check_data(spec: &JobSpec, root: Option<&Path>) -> Result<()> {
    if spec.data.format == Format::Index {
        // The records are the program's own.
        return Ok(());
    }
    let sets = [DataSet::Train, DataSet::Validation].into_iter().filter_map(|set| spec.data.files(set));
    let sets: Vec<_> = sets.collect();
    let files = sets.iter().flat_map(|files| files.lists.values().flatten());
    let local = files.filter(|file| !data_url::is_remote(file));
    let files: Vec<_> = local.map(|file| spec.data.locate(file, root)).collect();
    let wants_folders = spec.data.format == Format::Images;
    let why = |path: &Path| match std::fs::metadata(path) {
        Ok(found) if wants_folders => (!found.is_dir()).then(|| "it is no folder".to_owned()),
        Ok(found) => found.is_dir().then(|| "it is a folder".to_owned()),
        Err(error) => Some(error.to_string()),
    };
    let missing: Vec<(PathBuf, String)> =
        files.iter().filter_map(|path| Some((path.clone(), why(path)?))).collect();
    match missing.is_empty() {
        true => Ok(()),
        false => Err(Error::NoDataFiles { missing, files: files.len() }),
    }
}

fn fit_fleet(fleet: &mut FleetSpec, workers: Option<u32>, ps: Option<u32>) {
    if let Some(workers) = workers {
        fleet.workers.min = fleet.workers.min.min(workers);
        fleet.workers.max = fleet.workers.max.max(workers);
    }
    fleet.ps = ps.unwrap_or(fleet.ps);
}

#[cfg(test)]
mod tests {
    use proto::spec::{PredictSpec, WorkersSpec};

    use super::*;
    use crate::fake::{JOB, job_file};

    #[test]
    fn numbers_that_are_given_win_over_the_job_file() {
        let fitted = |workers, ps| {
            let mut fleet =
                FleetSpec { workers: WorkersSpec { min: 2, max: 4 }, ps: 2, ..FleetSpec::default() };
            fit_fleet(&mut fleet, workers, ps);
            (fleet.workers.min, fleet.workers.max, fleet.ps)
        };
        assert_eq!(fitted(None, None), (2, 4, 2));
        assert_eq!(fitted(Some(1), None), (1, 4, 2));
        assert_eq!(fitted(Some(7), Some(3)), (2, 7, 3));
    }

    #[test]
    fn predictions_in_the_memory_of_a_process_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let mut spec = Submission::read(&job_file(dir.path(), JOB), &[]).unwrap().spec;
        assert!(check_predictions(&spec).is_ok());
        for (url, is_good) in [("memory://p.npy", false), ("/out/p.npy", true), ("s3://b/p.npy", true)] {
            spec.predict = Some(PredictSpec::new(DataSet::Train, url.to_owned()));
            assert_eq!(check_predictions(&spec).is_ok(), is_good, "{url}");
        }
    }

    #[tokio::test]
    async fn checkpoints_in_the_memory_of_a_process_are_refused_at_a_master() {
        let dir = tempfile::tempdir().unwrap();
        let job = format!("{JOB}[checkpoint]\nurl = 'memory://c'\nevery_steps = 1\n");
        let mut submission = Submission::read(&job_file(dir.path(), &job), &[]).unwrap();
        let error = submission.ready_for_master(&Stores::default()).await.unwrap_err();
        assert!(matches!(error, Error::CheckpointsInMemory), "{error}");
    }

    #[test]
    fn a_network_that_is_not_known_is_named_with_those_that_are() {
        let dir = tempfile::tempdir().unwrap();
        let job = JOB.replace("builtin = 'linear'", "builtin = 'lineal'");
        let submission = Submission::read(&job_file(dir.path(), &job), &[]).unwrap();
        let error = submission.check_here(&Registry::default(), None).unwrap_err().to_string();
        assert!(error.contains("no network `lineal`") && error.contains("linear, "), "{error}");
    }

    #[test]
    fn records_of_a_program_are_no_files() {
        let job = serde_json::json!({
            "name": "loop",
            "epochs": 1,
            "model": { "builtin": proto::spec::PROGRAM, "loss": "module" },
            "data": { "format": "index", "train": { "files": ["100"] } },
            "batch": { "micro": 1 },
            "optimizer": { "kind": "sgd", "learning_rate": 1.0 },
        });
        check_data(&JobSpec::from_json(&job.to_string()).unwrap(), None).unwrap();
    }

    #[test]
    fn all_data_files_that_cannot_be_read_are_named() {
        let dir = tempfile::tempdir().unwrap();
        let submission = Submission::read(&job_file(dir.path(), JOB), &[]).unwrap();
        let root = dir.path().join("elsewhere");
        let error = submission.check_here(&Registry::default(), Some(&root)).unwrap_err().to_string();
        assert!(error.starts_with("1 of 1 data files") && error.contains("elsewhere"), "{error}");
        assert!(error.contains("No such file"), "{error}");
    }
}
