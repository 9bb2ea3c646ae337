//! The edge to the stores where checkpoints lie: what is there of a job, and the manifest that
//! completes one.

use std::collections::BTreeMap;
use std::fmt;

use bytes::Bytes;
use futures::future::{join_all, try_join_all};
use net::ps_client::PsClients;
use proto::checkpoint::manifest::{Manifest, Script};
use proto::checkpoint::trained_on::TrainedOn;
use proto::checkpoint::{Error, MANIFEST, PROBE, Result, folder_name};
use proto::ids::{PartitionId, Version};
use proto::numerics::Since;
use proto::pb;
use proto::plan::Plan;
use proto::selection::Selection;
use store::data_file::DataFile;
use store::found::Found;
use store::{Folder, Stores};

use crate::ps_address::PsAddress;
use crate::ps_client;

/// Largest file of a probe that makes sense: it has the name of a ps.
const PROBE_BYTES_MAX: u64 = 1 << 10;

/// Where the checkpoints of one job lie.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    /// URL of the folder, as the specification writes it.
    pub(crate) url: String,
    /// Name of the job.
    pub(crate) job: String,
}

impl Place {
    /// Returns the folder of a version, as a ps is told.
    pub(crate) fn folder(&self, version: Version) -> String {
        format!("{self}/{}", folder_name(version))
    }

    fn open(&self, stores: &Stores) -> Result<Folder> {
        Ok(stores.open(&self.url)?.below(&self.job))
    }
}

/// The job's folder, for people.
impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.url.trim_end_matches('/'), self.job)
    }
}

/// What a job needs to know of the checkpoints that are there.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Candidates {
    /// Those with an intact manifest, oldest first.
    pub(crate) intact: Vec<Candidate>,
    /// The numerics classes that computed them.
    pub(crate) numerics: BTreeMap<Version, Vec<Since>>,
    /// What is wrong with the others that are complete.
    pub(crate) damaged: Vec<(Version, String)>,
}

/// An intact checkpoint, as far as a job must know it to choose one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Candidate {
    /// Steps that are in it.
    pub(crate) version: Version,
    /// Which training it is of.
    pub(crate) run: String,
    /// The numbers of its microbatches.
    pub(crate) plan: Plan,
    /// Its steps are whole epochs.
    pub(crate) ends_epoch: bool,
    /// What it was trained with, where it says so.
    pub(crate) trained_on: Option<TrainedOn>,
    /// Best version of the job when it was completed.
    pub(crate) selection: Option<Selection>,
}

impl From<Manifest> for Candidate {
    fn from(manifest: Manifest) -> Self {
        let ends_epoch = manifest.ends_epoch();
        let Manifest { version, run, plan, trained_on, selection, .. } = manifest;
        Self { version, run, plan, ends_epoch, trained_on, selection }
    }
}

/// Looks for the checkpoints of a job.
///
/// # Errors
/// The store cannot be read, after some time of trying.
pub(crate) async fn look(stores: &Stores, place: &Place) -> Result<Candidates> {
    let folder = place.open(stores)?;
    let found = patiently(stores, || Found::look(&folder)).await?;
    let numerics = found.manifests.iter().map(|(version, manifest)| (*version, manifest.numerics.clone()));
    Ok(Candidates {
        numerics: numerics.collect(),
        intact: found.manifests.into_values().map(Candidate::from).collect(),
        damaged: found.damaged.iter().map(|(&version, error)| (version, error.to_string())).collect(),
    })
}

/// Whether a ps and this master see one store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Probed {
    /// What each ps wrote is here.
    Shared,
    /// What this ps wrote is not here; what to tell users.
    Apart(String),
    /// The store, or a ps, did not do it now; what to tell users.
    Unclear(String),
}

/// Looks whether each ps writes to the store that this master reads: a ps writes a file, and it
/// must be found here. `name` is a name that was never used before.
pub(crate) async fn probe(
    stores: &Stores,
    clients: &PsClients,
    place: &Place,
    ps: &[PsAddress],
    name: &str,
) -> Probed {
    let one = async |index: usize, ps: &PsAddress| -> Result<Option<String>, String> {
        let file = format!("{PROBE}{name}-{index}");
        let (url, job) = (place.url.clone(), place.job.clone());
        let request = pb::ProbeRequest { url, job, file: file.clone() };
        ps_client::probe(clients, ps, &request).await.map_err(|failure| failure.to_string())?;
        let folder = place.open(stores).map_err(|error| error.to_string())?;
        match patiently(stores, || folder.read(&file, PROBE_BYTES_MAX)).await {
            Ok(_) => {
                let removed = folder.remove_file(&file).await;
                removed.map(|()| None).map_err(|error| error.to_string())
            }
            Err(Error::Missing { file }) => Ok(Some(format!(
                "ps `{}` and the master do not see one store at checkpoint.url: the ps has written `{file}`, and the master \
                 does not find it; let the URL lead to a file system that all ps and the master share, or to an object store",
                ps.name
            ))),
            Err(error) => Err(error.to_string()),
        }
    };
    let probes = join_all(ps.iter().enumerate().map(|(index, ps)| one(index, ps))).await;
    let mut unclear = None;
    for probe in probes {
        match probe {
            Ok(None) => {}
            Ok(Some(apart)) => return Probed::Apart(apart),
            Err(reason) => unclear = unclear.or(Some(reason)),
        }
    }
    unclear.map_or(Probed::Shared, Probed::Unclear)
}

/// Completes a checkpoint, and then removes what it supersedes. `script` reads the job's module,
/// which is written with its first checkpoint. Every file must be seen here first, whole and with
/// the header that its ps reported: a manifest of anything else would be a checkpoint that cannot
/// be restored, and in its name those that can be would be removed.
///
/// # Errors
/// A file is not here as it was reported, or the module or the manifest cannot be written, after
/// some time of trying: there is no such checkpoint. What cannot be removed is only logged.
pub(crate) async fn publish<I: Iterator<Item = Result<Bytes>> + Send>(
    stores: &Stores,
    place: &Place,
    manifest: &Manifest,
    keep: u32,
    script: impl Fn(&Script) -> I,
) -> Result<()> {
    let folder = place.open(stores)?;
    if let Some(named) = &manifest.script {
        patiently(stores, || keep_script(&folder, named, script(named))).await?;
    }
    let text = Bytes::from(manifest.encode());
    let complete = folder.below(&folder_name(manifest.version));
    let seen = async |partition: usize| {
        let partition = PartitionId(partition as u32);
        patiently(stores, || DataFile::open(&complete, manifest, partition)).await.map(drop)
    };
    try_join_all((0..manifest.files.len()).map(seen)).await?;
    patiently(stores, || complete.write(MANIFEST, text.clone())).await?;
    if let Err(error) = prune(&folder, manifest, keep).await {
        tracing::warn!(%place, %error, "an old checkpoint is not removed; the next one tries again");
    }
    Ok(())
}

/// Writes the job's module, unless it lies there.
async fn keep_script(
    folder: &Folder,
    script: &Script,
    mut slices: impl Iterator<Item = Result<Bytes>> + Send,
) -> Result<()> {
    let name = script.file_name();
    match folder.size(&name).await {
        Ok(bytes) if bytes == script.bytes => return Ok(()),
        Ok(_) | Err(Error::Missing { .. }) => {}
        Err(error) => return Err(error),
    }
    let mut upload = folder.upload(&name).await?;
    let written = loop {
        match slices.next() {
            Some(Ok(slice)) => {
                if let Err(error) = upload.put(slice, 1).await {
                    break Err(error);
                }
            }
            Some(Err(error)) => break Err(error),
            None => break Ok(()),
        }
    };
    match written {
        Ok(()) => upload.finish().await,
        Err(error) => {
            upload.abort().await;
            Err(error)
        }
    }
}

/// Removes superseded checkpoints, each with its manifest first: a half removed one is no
/// checkpoint.
async fn prune(folder: &Folder, newest: &Manifest, keep: u32) -> Result<()> {
    let found = Found::look(folder).await?;
    let best = newest.selection.as_ref().map(|selection| selection.best);
    for version in found.superseded(&newest.run, newest.version, keep, best) {
        folder.below(&folder_name(version)).remove(MANIFEST).await?;
    }
    Ok(())
}

async fn patiently<T, Fut: Future<Output = Result<T>>>(
    stores: &Stores,
    attempt: impl Fn() -> Fut,
) -> Result<T> {
    let tell = |error: &Error| tracing::warn!(%error, "the checkpoint store fails; trying again");
    stores.patiently(tell, attempt).await
}
