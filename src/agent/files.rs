//! Descriptions and bundles of scripts, each fetched once and unpacked into a private folder.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context as _, Result};
use client::bundle::unpack;
use net::failover::Failover;
use proto::convert::required;
use proto::pb;
use proto::pb::artifact_part::Part as File;
use proto::pb::bundle_reply::Part;
use proto::pb::scripts_client::ScriptsClient;
use proto::retry::Retry;
use proto::script::BUNDLE_BYTES_MAX;
use proto::status::{Failure, Kind};
use tokio::sync::Mutex;

use crate::launch::user::User;

/// A script whose files are on this machine.
#[derive(Debug)]
pub(super) struct Unpacked {
    pub(super) description: pb::Script,
    /// Values of its secrets. They are in memory alone.
    pub(super) secrets: Vec<pb::Secret>,
    /// Folder of its files.
    pub(super) folder: PathBuf,
}

/// The scripts whose files are on this machine.
#[derive(Debug)]
pub(super) struct Files {
    client: ScriptsClient<Failover>,
    parent: PathBuf,
    /// The user to whom the files belong. `None`: that of this process.
    user: Option<User>,
    unpacked: Mutex<BTreeMap<u64, Arc<Unpacked>>>,
}

impl Files {
    /// Creates an empty place for files below the folder `parent`.
    pub(super) fn new(client: ScriptsClient<Failover>, parent: &Path, user: Option<User>) -> Self {
        Self { client, parent: parent.to_owned(), user, unpacked: Mutex::default() }
    }

    /// Returns the files of a script. The first call fetches them.
    ///
    /// # Errors
    /// The master does not know the script, the bundle is refused, or the disk is full.
    pub(super) async fn get(&self, script: u64) -> Result<Arc<Unpacked>> {
        // Another process of the script waits here until they are there.
        let mut unpacked = self.unpacked.lock().await;
        if let Some(found) = unpacked.get(&script) {
            return Ok(found.clone());
        }
        let fetch = || fetch(self.client.clone(), script);
        let fetched = net::retry::repeat(Retry::unlimited(), script, |_, _| {}, fetch).await;
        let (description, secrets, artifact, content) = fetched.context("fetch the script")?;
        // The master checked it too. Users' text comes here by way of another process.
        proto::script::check(&description).context("the script's description")?;
        proto::secret::check(&description.secrets, &secrets).context("the script's secrets")?;
        let (parent, user) = (self.parent.clone(), self.user.clone());
        let unpacking = tokio::task::spawn_blocking(move || {
            let folder = unpack(&content, &artifact.sha256, &parent)?;
            user.map_or(Ok(()), |user| user.give(&folder)).context("give the files to --script-user")?;
            anyhow::Ok(folder)
        });
        let folder = unpacking.await.context("unpack the script")?.context("unpack the script")?;
        let found = Arc::new(Unpacked { description, secrets, folder });
        unpacked.insert(script, found.clone());
        Ok(found)
    }

    /// Removes the files of all scripts but these.
    pub(super) fn keep(&self, scripts: &BTreeSet<u64>) {
        // While files are fetched, the next call removes the others.
        let Ok(mut unpacked) = self.unpacked.try_lock() else { return };
        let others = unpacked.extract_if(.., |script, _| !scripts.contains(script)).collect::<Vec<_>>();
        for (script, gone) in others {
            // The same files may have come with another script.
            if unpacked.values().all(|kept| kept.folder != gone.folder)
                && let Err(reason) = std::fs::remove_dir_all(&gone.folder)
            {
                tracing::warn!(script, %reason, "the files of a script stay");
            }
        }
    }
}

async fn fetch(
    mut client: ScriptsClient<Failover>,
    script: u64,
) -> Result<(pb::Script, Vec<pb::Secret>, pb::Artifact, Vec<u8>), Failure> {
    let malformed = |message: String| Failure::new(Kind::Malformed, message);
    let replies = client.bundle(pb::BundleRequest { script }).await.map_err(Failure::from)?;
    let mut replies = replies.into_inner();
    let (mut description, mut secrets) = (None, Vec::new());
    let (mut artifact, mut content) = (None::<pb::Artifact>, Vec::new());
    while let Some(reply) = replies.message().await.map_err(Failure::from)? {
        match required("BundleReply", "part", reply.part)? {
            Part::Script(script) => description = Some(script),
            Part::Secrets(values) => secrets = values.secrets,
            Part::Artifact(part) => match required("ArtifactPart", "part", part.part)? {
                File::Header(header) => artifact = Some(header),
                File::Content(slice) => {
                    content.extend_from_slice(&slice);
                    if content.len() as u64 > BUNDLE_BYTES_MAX {
                        return Err(malformed(format!("a bundle of more than {BUNDLE_BYTES_MAX} bytes")));
                    }
                }
            },
        }
    }
    Ok((
        required("BundleReply", "script", description)?,
        secrets,
        required("BundleReply", "artifact", artifact)?,
        content,
    ))
}
