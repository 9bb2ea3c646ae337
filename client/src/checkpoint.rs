//! What lies in a folder of checkpoints, for a user who names the folder.

use proto::checkpoint::manifest::Manifest;
use proto::checkpoint::{folder_name, version_of};
use store::data_file::weights;
use store::found::Found;
use store::{Folder, Stores};

use crate::{Error, Result};

/// Returns the folder of one job below `url`, and what it has. `url` is the job file's
/// `checkpoint.url`, or the job's folder in it; a path may be relative.
///
/// # Errors
/// There are no checkpoints, there are those of several jobs, or the store cannot be read.
pub async fn look(stores: &Stores, url: &str) -> Result<(Folder, Found)> {
    let folder = folder(stores, url).await?;
    let found = Found::look(&folder).await?;
    if found.is_empty() {
        return Err(Error::NoneComplete { folder: folder.to_string(), begun: found.incomplete.len() });
    }
    Ok((folder, found))
}

/// Returns the weights of the newest intact checkpoint below `url`, as the bytes of a safetensors
/// file.
///
/// # Errors
/// There is no intact checkpoint, or the store cannot be read.
pub async fn newest_weights(stores: &Stores, url: &str) -> Result<Vec<u8>> {
    let (folder, found) = look(stores, url).await?;
    let Some((_, manifest)) = found.manifests.last_key_value() else {
        return Err(Error::NoneIntact { folder: folder.to_string() });
    };
    safetensors(&folder, manifest).await
}

async fn safetensors(folder: &Folder, manifest: &Manifest) -> Result<Vec<u8>> {
    let values = weights(&folder.below(&folder_name(manifest.version)), manifest).await?;
    Ok(model::export::safetensors(&manifest.tensors, &values, &[])?)
}

/// Returns the folder of one job: the one that `url` names, or the only one in it.
async fn folder(stores: &Stores, url: &str) -> Result<Folder> {
    let absolute = match url.contains("://") {
        true => url.to_owned(),
        false => {
            let unknown = |source| Error::Path { path: url.to_owned(), source };
            std::path::absolute(url).map_err(unknown)?.display().to_string()
        }
    };
    let folder = stores.open(&absolute)?;
    let names = folder.list().await?;
    if names.iter().any(|name| version_of(name).is_some()) {
        return Ok(folder);
    }
    let mut jobs = Vec::new();
    for name in names {
        let below = folder.below(&name).list().await.unwrap_or_default();
        if below.iter().any(|name| version_of(name).is_some()) {
            jobs.push(name);
        }
    }
    let url = url.to_owned();
    match &jobs[..] {
        [job] => Ok(folder.below(job)),
        [] => Err(Error::NoCheckpoints { url }),
        [first, ..] => Err(Error::SeveralJobs { url, first: folder.shown(first), jobs }),
    }
}
