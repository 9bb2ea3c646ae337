//! Descriptions and bundles of scripts, each fetched once and unpacked into a private folder.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::Write as _;
use std::os::unix::fs::PermissionsExt as _;
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
use proto::requirements::{FILE, Requirements};
use proto::retry::Retry;
use proto::script::BUNDLE_BYTES_MAX;
use proto::status::{Failure, Kind};
use tokio::sync::Mutex;

use crate::launch::user::User;

/// A script whose files are on this machine.
#[derive(Debug)]
pub(super) struct Unpacked {
    pub(super) description: pb::Script,
    /// Name of the token that submitted it. Empty on a master without tokens.
    pub(super) owner: String,
    /// Values of its secrets. They are in memory alone.
    pub(super) secrets: Vec<pb::Secret>,
    /// Folder of its files, which no other script has.
    pub(super) folder: PathBuf,
    /// File with its requirements, as they were checked. Its processes cannot change this file if
    /// they run as another user. `None`: it has none.
    pub(super) requirements: Option<PathBuf>,
}

/// A script as the master sends it.
#[derive(Debug, Default)]
struct Fetched {
    description: Option<pb::Script>,
    owner: String,
    secrets: Vec<pb::Secret>,
    artifact: Option<pb::Artifact>,
    content: Vec<u8>,
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
        let Fetched { description, owner, secrets, artifact, content } =
            fetched.context("fetch the script")?;
        let description = required("BundleReply", "script", description)?;
        let artifact = required("BundleReply", "artifact", artifact)?;
        // The master checked it too. Users' text comes here by way of another process.
        proto::script::check(&description).context("the script's description")?;
        proto::secret::check(&description.secrets, &secrets).context("the script's secrets")?;
        let (parent, user) = (self.parent.clone(), self.user.clone());
        let unpacking = tokio::task::spawn_blocking(move || {
            let folder = unpack(&content, &artifact.sha256, script, &parent)?;
            user.map_or(Ok(()), |user| user.give(&folder)).context("give the files to --script-user")?;
            let required = requirements(&content)?;
            let path = required.map(|required| write(&required, &parent, script)).transpose();
            anyhow::Ok((folder, path.with_context(|| format!("write {FILE}"))?))
        });
        let (folder, requirements) =
            unpacking.await.context("unpack the script")?.context("unpack the script")?;
        let found = Arc::new(Unpacked { description, owner, secrets, folder, requirements });
        unpacked.insert(script, found.clone());
        Ok(found)
    }

    /// Removes the files of all scripts but these.
    pub(super) fn keep(&self, scripts: &BTreeSet<u64>) {
        // While files are fetched, the next call removes the others.
        let Ok(mut unpacked) = self.unpacked.try_lock() else { return };
        let others = unpacked.extract_if(.., |script, _| !scripts.contains(script)).collect::<Vec<_>>();
        for (script, gone) in others {
            gone.requirements.iter().for_each(|path| drop(fs::remove_file(path)));
            if let Err(reason) = fs::remove_dir_all(&gone.folder) {
                tracing::warn!(script, %reason, "the files of a script stay");
            }
        }
    }
}

/// Returns what a bundle requires; `None`: nothing.
fn requirements(bundle: &[u8]) -> Result<Option<Requirements>> {
    let files = proto::bundle::decode(bundle).map_err(anyhow::Error::msg)?;
    let Some(file) = files.iter().find(|file| file.path == FILE) else { return Ok(None) };
    let found = Requirements::parse(file.content).map_err(anyhow::Error::msg).context(FILE)?;
    Ok((!found.is_empty()).then_some(found))
}

/// Writes requirements into a file that everybody may read who knows its path.
fn write(requirements: &Requirements, parent: &Path, script: u64) -> std::io::Result<PathBuf> {
    let path = parent.join(format!("{script}-{FILE}"));
    let mut file = fs::File::create(&path)?;
    file.write_all(requirements.to_string().as_bytes())?;
    file.set_permissions(fs::Permissions::from_mode(0o444))?;
    Ok(path)
}

async fn fetch(mut client: ScriptsClient<Failover>, script: u64) -> Result<Fetched, Failure> {
    let malformed = |message: String| Failure::new(Kind::Malformed, message);
    let replies = client.bundle(pb::BundleRequest { script }).await.map_err(Failure::from)?;
    let (mut replies, mut fetched) = (replies.into_inner(), Fetched::default());
    while let Some(reply) = replies.message().await.map_err(Failure::from)? {
        if !reply.owner.is_empty() {
            fetched.owner = reply.owner;
        }
        match required("BundleReply", "part", reply.part)? {
            Part::Script(script) => fetched.description = Some(script),
            Part::Secrets(values) => fetched.secrets = values.secrets,
            Part::Artifact(part) => match required("ArtifactPart", "part", part.part)? {
                File::Header(header) => fetched.artifact = Some(header),
                File::Content(slice) => {
                    fetched.content.extend_from_slice(&slice);
                    if fetched.content.len() as u64 > BUNDLE_BYTES_MAX {
                        return Err(malformed(format!("a bundle of more than {BUNDLE_BYTES_MAX} bytes")));
                    }
                }
            },
        }
    }
    Ok(fetched)
}

#[cfg(test)]
mod tests {
    use proto::bundle::{File, encode};

    use super::*;

    #[test]
    fn requirements_come_from_one_file_and_are_checked_again() {
        let bundle = |path, content| encode(vec![File { path, executable: false, content }]).unwrap();
        let found = requirements(&bundle(FILE, b"numpy # arrays\n")).unwrap().unwrap();
        assert_eq!(found.to_string(), "numpy\n");
        assert_eq!(requirements(&bundle(FILE, b"# nothing\n")).unwrap(), None);
        assert_eq!(requirements(&bundle("a/requirements.txt", b"--pre")).unwrap(), None);
        let said = format!("{:#}", requirements(&bundle(FILE, b"numpy\n--pre\n")).unwrap_err());
        assert!(said.starts_with("requirements.txt: line 2: `--pre`"), "{said}");
        let dir = tempfile::tempdir().unwrap();
        let path = write(&found, dir.path(), 7).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "numpy\n");
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o444);
    }
}
