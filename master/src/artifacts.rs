//! The data folder: files that jobs were submitted with and files that they ended with.
//!
//! ```text
//!   data_dir/lock                     held by the one master that uses the folder
//!   data_dir/starts                   how often a master started here
//!   data_dir/identity                 of the masters that share the folder, instead of `starts`
//!   data_dir/incoming/START/N/NAME    being received; gone after a restart
//!   data_dir/jobs/ID/input/SHA256     submitted with the job
//!   data_dir/jobs/ID/output/SHA256    exported at its end
//! ```
//!
//! A name is checked before it becomes a path. Files appear under `jobs` only whole, with the size
//! and hash that were announced: they are received beside and renamed. They are named by their hash
//! and never replaced, so a master that no longer leads can do no harm here: which files a job has
//! is in the journal. What the journal is to refer to is durable before: the content of a file when
//! it was received, its folders when a job adopts it, the number of a start before an id of it is
//! given away. A disk may be slow, or a share away: whatever waits for it does so in [`waiting`],
//! and never under a lock that a heartbeat needs.

use std::fs::{self, File, TryLockError};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use proto::artifact::{SCRIPT, SLICE_BYTES, hex};
use proto::checkpoint::manifest::Script;
use proto::convert::{artifact_name, required};
use proto::ids::JobId;
use proto::pb::artifact_part::Part;
use proto::pb::{Artifact, ArtifactPart};
use proto::status::{Failure, Kind};
use sha2::{Digest, Sha256};
use tokio::runtime::{Handle, RuntimeFlavor};

use crate::config::Options;
use crate::error::{Error, Result};
use crate::incoming::{Incoming as Reserved, Reservation};

/// Files of one submission or export.
pub(crate) const FILES_MAX: usize = 64;

/// Which files of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Folder {
    /// Submitted with it.
    Input,
    /// Exported at its end.
    Output,
}

impl Folder {
    const fn name(self) -> &'static str {
        match self {
            Self::Input => "input",
            Self::Output => "output",
        }
    }
}

/// Limits on the bytes of files that the master is receiving.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BytesMax {
    /// Limit of one stream, in bytes.
    pub(crate) one: u64,
    /// Limit of all streams together, in bytes.
    pub(crate) all: u64,
}

impl BytesMax {
    pub(crate) const fn of(options: &Options) -> Self {
        Self { one: options.artifact_bytes_max, all: options.incoming_bytes_max }
    }
}

/// Makes durable what was written: a seam for tests of power losses.
pub(crate) trait Disk: std::fmt::Debug + Send + Sync {
    /// Returns the content of a file.
    fn sync_file(&self, file: &File, path: &Path) -> io::Result<()>;

    /// Returns which files and folders a folder has, by name.
    fn sync_folder(&self, path: &Path) -> io::Result<()>;
}

/// Survives a power loss.
#[derive(Debug)]
pub(crate) struct Synced;

impl Disk for Synced {
    fn sync_file(&self, file: &File, _: &Path) -> io::Result<()> {
        file.sync_all()
    }

    fn sync_folder(&self, path: &Path) -> io::Result<()> {
        File::open(path)?.sync_all()
    }
}

/// Survives the end of the process and no more: for masters whose jobs end with it.
#[derive(Debug)]
pub(crate) struct Unsynced;

impl Disk for Unsynced {
    fn sync_file(&self, _: &File, _: &Path) -> io::Result<()> {
        Ok(())
    }

    fn sync_folder(&self, _: &Path) -> io::Result<()> {
        Ok(())
    }
}

/// The lock of a data folder. It ends with this value, also if a child process that begins just
/// then still has a copy of the open file.
#[derive(Debug)]
struct Lock(File);

impl Drop for Lock {
    fn drop(&mut self) {
        // If this fails, closing the file ends the lock.
        let _ = self.0.unlock();
    }
}

/// A data folder that no other master can use until this is dropped.
#[derive(Debug)]
pub(crate) struct Held {
    root: PathBuf,
    disk: Arc<dyn Disk>,
    _lock: Lock,
}

/// The data folder of the one master that holds it.
#[derive(Debug)]
pub(crate) struct Artifacts {
    root: PathBuf,
    disk: Arc<dyn Disk>,
    /// Where files are received.
    incoming: PathBuf,
    /// Starts of a master in this folder, this one included.
    pub(crate) starts: u64,
    /// The newest job that left files here.
    pub(crate) newest_job: JobId,
    next_incoming: AtomicU64,
    /// Limit of one stream, in bytes.
    bytes_max: u64,
    reserved: Reserved,
    /// Held until dropped.
    _lock: Lock,
}

impl Artifacts {
    /// Takes the folder for one master alone.
    pub(crate) fn hold(root: &Path, disk: Arc<dyn Disk>) -> Result<Held> {
        let lock = Self::take(root, File::try_lock)?;
        Ok(Held { root: root.to_owned(), disk, _lock: lock })
    }

    /// Creates missing folders and removes files that were being received. The journal knows of
    /// `starts` earlier starts.
    pub(crate) fn open(held: Held, bytes_max: BytesMax, starts: u64) -> Result<Self> {
        let root = &held.root;
        let starts = count_start(root, starts, held.disk.as_ref()).map_err(at(&root.join("starts")))?;
        let incoming = root.join("incoming");
        match fs::remove_dir_all(&incoming) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(at(&incoming)(error)),
            _ => Self::begin(held, bytes_max, starts),
        }
    }

    /// Opens a folder that the masters of the journal `identity` share. The caller is the leader of
    /// start number `starts`.
    pub(crate) fn share(root: &Path, bytes_max: BytesMax, starts: u64, identity: u64) -> Result<Self> {
        let lock = Self::take(root, File::try_lock_shared)?;
        let held = Held { root: root.to_owned(), disk: Arc::new(Synced), _lock: lock };
        let (path, next) = (root.join("identity"), root.join(format!("identity.{starts}")));
        if Self::identity(root)?.is_none() {
            let text = format!("{identity:016x}\n");
            replace(root, &path, &next, &text, held.disk.as_ref()).map_err(at(&path))?;
        }
        Self::check(root, identity)?;
        // A master that led before may still be writing there, and so keep it from being removed:
        // the next one will do it.
        let _ = fs::remove_dir_all(root.join("incoming"));
        Self::begin(held, bytes_max, starts)
    }

    /// Refuses a folder that is not the one of the masters of the journal `identity`.
    pub(crate) fn check(root: &Path, identity: u64) -> Result<()> {
        let found = match Self::identity(root)? {
            Some(found) if found == identity => return Ok(()),
            Some(found) => format!("the data folder of master {found:016x}"),
            None => "a data folder that no leader has used".to_owned(),
        };
        Err(Error::NotShared { path: root.to_owned(), found, expected: identity })
    }

    /// Returns the identity of the masters that share the folder, or `None` before the first leads.
    pub(crate) fn identity(root: &Path) -> Result<Option<u64>> {
        let path = root.join("identity");
        let text = match fs::read_to_string(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(at(&path)(error)),
        };
        let wrong = |error| io::Error::new(io::ErrorKind::InvalidData, format!("`{}`: {error}", text.trim()));
        u64::from_str_radix(text.trim(), 16).map(Some).map_err(wrong).map_err(at(&path))
    }

    fn take(root: &Path, lock: impl FnOnce(&File) -> Result<(), TryLockError>) -> Result<Lock> {
        fs::create_dir_all(root).map_err(at(root))?;
        let path = root.join("lock");
        let file = File::create(&path).map_err(at(&path))?;
        lock(&file).map_err(|error| match error {
            TryLockError::WouldBlock => Error::Busy(root.to_owned()),
            TryLockError::Error(source) => Error::File { path, source },
        })?;
        Ok(Lock(file))
    }

    fn begin(held: Held, bytes_max: BytesMax, starts: u64) -> Result<Self> {
        let Held { root, disk, _lock } = held;
        let (incoming, jobs) = (root.join("incoming"), root.join("jobs"));
        let incoming = incoming.join(starts.to_string());
        for folder in [&incoming, &jobs] {
            fs::create_dir_all(folder).map_err(at(folder))?;
        }
        // Also the journal's file is in there.
        disk.sync_folder(&root).map_err(at(&root))?;
        let mut newest_job = JobId(0);
        for entry in fs::read_dir(&jobs).map_err(at(&jobs))? {
            let name = entry.map_err(at(&jobs))?.file_name();
            let id = name.to_str().and_then(|name| name.parse().ok()).map_or(JobId(0), JobId);
            newest_job = newest_job.max(id);
        }
        let next_incoming = AtomicU64::new(1);
        let BytesMax { one: bytes_max, all } = bytes_max;
        let reserved = Reserved::new(all);
        Ok(Self { root, disk, incoming, starts, newest_job, next_incoming, bytes_max, reserved, _lock })
    }

    /// Returns a place for the files of one stream of an owner.
    pub(crate) fn receive(&self, owner: &str) -> Result<Receiving, Failure> {
        let number = self.next_incoming.fetch_add(1, Ordering::Relaxed);
        let folder = self.incoming.join(number.to_string());
        waiting(|| fs::create_dir(&folder)).map_err(|error| unusable(&folder, &error))?;
        let received = Received { folder, artifacts: Vec::new(), reservation: self.reserved.begin(owner) };
        let (disk, bytes_max) = (self.disk.clone(), self.bytes_max);
        Ok(Receiving { received, current: None, bytes: 0, bytes_max, disk })
    }

    /// Gives received files to a job. They are its own also after a power loss. Repeating it, or
    /// doing it twice at once, changes nothing.
    pub(crate) fn adopt(
        &self,
        received: &Received,
        job: JobId,
        folder: Folder,
    ) -> Result<Vec<Artifact>, Failure> {
        let target = self.folder(job, folder);
        let moving = || {
            fs::create_dir_all(&target).map_err(|error| unusable(&target, &error))?;
            for artifact in &received.artifacts {
                let path = target.join(&artifact.sha256);
                match fs::rename(received.folder.join(&artifact.name), &path) {
                    // It was moved before.
                    Err(error) if error.kind() == io::ErrorKind::NotFound && path.is_file() => {}
                    moved => moved.map_err(|error| unusable(&path, &error))?,
                }
            }
            // From the files up: the folder of the job, and that it is there.
            for folder in target.ancestors().take_while(|folder| *folder != self.root) {
                self.disk.sync_folder(folder).map_err(|error| unusable(folder, &error))?;
            }
            Ok(received.artifacts.clone())
        };
        waiting(moving)
    }

    /// Returns a file as a stream's messages: its header, then its content. Read as they are asked
    /// for.
    pub(crate) fn parts(
        &self,
        job: JobId,
        folder: Folder,
        artifact: &Artifact,
    ) -> impl Iterator<Item = Result<ArtifactPart, Failure>> + Send + use<> {
        let path = self.folder(job, folder).join(&artifact.sha256);
        let header = ArtifactPart { part: Some(Part::Header(artifact.clone())) };
        let slices = match waiting(|| File::open(&path)) {
            Ok(file) => Ok(Slices { path, file: Some(file) }),
            Err(error) => Err(unusable(&path, &error)),
        };
        let (slices, failure) = match slices {
            Ok(slices) => (Some(slices), None),
            Err(failure) => (None, Some(Err(failure))),
        };
        std::iter::once(Ok(header)).chain(failure).chain(slices.into_iter().flatten())
    }

    /// Returns the module that a job was submitted with, in slices; read as they are asked for.
    pub(crate) fn script(
        &self,
        job: JobId,
        script: &Script,
    ) -> impl Iterator<Item = proto::checkpoint::Result<Bytes>> + Send + use<> {
        let Script { bytes, sha256 } = script.clone();
        let artifact = Artifact { name: SCRIPT.to_owned(), size: bytes, sha256 };
        self.parts(job, Folder::Input, &artifact).filter_map(move |part| match part.map(|part| part.part) {
            Ok(Some(Part::Content(content))) => Some(Ok(content)),
            Ok(_) => None,
            Err(failure) => Some(Err(proto::checkpoint::Error::Store {
                what: "read",
                file: SCRIPT.to_owned(),
                reason: failure.message,
            })),
        })
    }

    fn folder(&self, job: JobId, folder: Folder) -> PathBuf {
        self.root.join("jobs").join(job.to_string()).join(folder.name())
    }
}

/// Does what may wait for the disk, while other tasks of a runtime with several threads go on. A
/// runtime with one thread, as that of a simulation, has nobody else to let them go on.
fn waiting<T>(work: impl FnOnce() -> T) -> T {
    match Handle::try_current().map(|runtime| runtime.runtime_flavor()) {
        Ok(RuntimeFlavor::MultiThread) => tokio::task::block_in_place(work),
        _ => work(),
    }
}

/// Does what may wait for the disk and what nobody waits for.
pub(crate) fn later(work: impl FnOnce() + Send + 'static) {
    match Handle::try_current() {
        Ok(runtime) if runtime.runtime_flavor() == RuntimeFlavor::MultiThread => {
            drop(runtime.spawn_blocking(work));
        }
        _ => work(),
    }
}

fn at(path: &Path) -> impl FnOnce(io::Error) -> Error + use<> {
    let path = path.to_owned();
    move |source| Error::File { path, source }
}

/// Reads, adds one and writes; in two files, so that a crash leaves one of the two numbers. A
/// number that a power loss has torn is survived by the one of the journal.
fn count_start(root: &Path, journal: u64, disk: &dyn Disk) -> io::Result<u64> {
    let (path, next) = (root.join("starts"), root.join("starts.next"));
    let found = match fs::read(&path) {
        Ok(bytes) => {
            let text = String::from_utf8_lossy(&bytes);
            text.trim().parse::<u64>().unwrap_or_else(|error| {
                let path = path.display();
                tracing::warn!(
                    "{path}: `{}` is no number of starts ({error}); the journal counts {journal}",
                    text.trim()
                );
                0
            })
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => 0,
        Err(error) => return Err(error),
    };
    let starts = found.max(journal) + 1;
    replace(root, &path, &next, &format!("{starts}\n"), disk)?;
    Ok(starts)
}

/// Writes a file of a folder whole, by the name `next` in between.
fn replace(folder: &Path, path: &Path, next: &Path, text: &str, disk: &dyn Disk) -> io::Result<()> {
    let mut file = File::create(next)?;
    file.write_all(text.as_bytes())?;
    disk.sync_file(&file, next)?;
    fs::rename(next, path)?;
    disk.sync_folder(folder)
}

/// A stream of files on its way in. Dropped half-way, it leaves nothing behind.
#[derive(Debug)]
pub(crate) struct Receiving {
    received: Received,
    current: Option<Incoming>,
    /// Announced so far, over all files.
    bytes: u64,
    bytes_max: u64,
    disk: Arc<dyn Disk>,
}

#[derive(Debug)]
struct Incoming {
    announced: Artifact,
    path: PathBuf,
    file: File,
    hash: Sha256,
    bytes: u64,
}

impl Receiving {
    /// Makes room for what the next message announces, before [`accept`](Self::accept) takes it.
    /// `check` is asked whether the owner may have as many bytes as all its streams bring then.
    /// Calls no file system.
    ///
    /// # Errors
    /// What `check` says, or all streams together bring too much.
    pub(crate) fn reserve(
        &mut self,
        part: &ArtifactPart,
        check: impl FnOnce(u64) -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        match &part.part {
            Some(Part::Header(artifact)) => self.received.reservation.add(artifact.size, check),
            _ => Ok(()),
        }
    }

    /// Takes the next message of the stream.
    pub(crate) fn accept(&mut self, part: ArtifactPart) -> Result<(), Failure> {
        match required("ArtifactPart", "part", part.part)? {
            Part::Header(artifact) => self.begin(artifact),
            Part::Content(content) => match &mut self.current {
                Some(incoming) => incoming.write(&content),
                None => {
                    Err(Failure::new(Kind::Malformed, "ArtifactPart.content: expected a header before it"))
                }
            },
        }
    }

    /// Ends the stream, whose last file has to be whole, and returns the files.
    pub(crate) fn finish(mut self) -> Result<Received, Failure> {
        self.end()?;
        Ok(self.received)
    }

    fn begin(&mut self, artifact: Artifact) -> Result<(), Failure> {
        self.end()?;
        let Artifact { name, size, sha256 } = &artifact;
        artifact_name(name)?;
        let malformed = |message: String| Failure::new(Kind::Malformed, message);
        if sha256.len() != 64
            || !sha256.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte))
        {
            return Err(malformed(format!("artifact `{name}`: sha256 is not 64 lower-case hex digits")));
        }
        if self.received.artifacts.iter().any(|other| other.name == *name) {
            return Err(malformed(format!("artifact `{name}`: sent twice; each name once")));
        }
        if self.received.artifacts.len() == FILES_MAX {
            return Err(malformed(format!(
                "artifact `{name}`: one more than the {FILES_MAX} files that a job may have"
            )));
        }
        self.bytes = self.bytes.saturating_add(*size);
        if self.bytes > self.bytes_max {
            let (bytes, max) = (self.bytes, self.bytes_max);
            return Err(malformed(format!(
                "artifact `{name}`: {bytes} bytes with those before it, this master takes {max} (artifact_bytes_max)"
            )));
        }
        let path = self.received.folder.join(name);
        let file = waiting(|| File::create(&path)).map_err(|error| unusable(&path, &error))?;
        self.current = Some(Incoming { announced: artifact, path, file, hash: Sha256::new(), bytes: 0 });
        Ok(())
    }

    fn end(&mut self) -> Result<(), Failure> {
        let Some(Incoming { announced, path, file, hash, bytes }) = self.current.take() else {
            return Ok(());
        };
        let Artifact { name, size, sha256 } = &announced;
        let wrong = |what: String| {
            Err(Failure::new(Kind::Malformed, format!("artifact `{name}`: {what}; send it again")))
        };
        if bytes != *size {
            return wrong(format!("{bytes} bytes came, {size} were announced"));
        }
        let found = hex(&hash.finalize());
        if found != *sha256 {
            return wrong(format!("its sha256 is {found}, {sha256} was announced"));
        }
        // Here, where nobody else waits for it.
        waiting(|| self.disk.sync_file(&file, &path)).map_err(|error| unusable(&path, &error))?;
        self.received.artifacts.push(announced);
        Ok(())
    }
}

impl Incoming {
    fn write(&mut self, content: &Bytes) -> Result<(), Failure> {
        self.bytes += content.len() as u64;
        if self.bytes > self.announced.size {
            let Artifact { name, size, .. } = &self.announced;
            return Err(Failure::new(
                Kind::Malformed,
                format!("artifact `{name}`: more than the {size} bytes that were announced"),
            ));
        }
        self.hash.update(content);
        waiting(|| self.file.write_all(content)).map_err(|error| unusable(&self.path, &error))
    }
}

/// Whole files that belong to nobody yet; removed when dropped.
#[derive(Debug)]
pub(crate) struct Received {
    folder: PathBuf,
    pub(crate) artifacts: Vec<Artifact>,
    /// Given back after the files are gone: fields are dropped last.
    reservation: Reservation,
}

impl Received {
    /// Bytes that all streams of the owner bring, those of these files included.
    pub(crate) fn of_owner(&self) -> u64 {
        self.reservation.of_owner()
    }

    /// Ends the reservation: a job owns the files from now on and counts them.
    pub(crate) fn given(&mut self) {
        self.reservation.give_back();
    }
}

impl Drop for Received {
    fn drop(&mut self) {
        // After adoption it is empty; at worst the next start cleans up.
        let _ = waiting(|| fs::remove_dir_all(&self.folder));
    }
}

/// A file's content in messages.
struct Slices {
    path: PathBuf,
    /// `None` after the end or an error.
    file: Option<File>,
}

impl Iterator for Slices {
    type Item = Result<ArtifactPart, Failure>;

    fn next(&mut self) -> Option<Self::Item> {
        let mut slice = Vec::with_capacity(SLICE_BYTES);
        let file = self.file.as_mut()?;
        match waiting(|| file.take(SLICE_BYTES as u64).read_to_end(&mut slice)) {
            Ok(0) => {
                self.file = None;
                None
            }
            Ok(_) => Some(Ok(ArtifactPart { part: Some(Part::Content(slice.into())) })),
            Err(error) => {
                self.file = None;
                Some(Err(unusable(&self.path, &error)))
            }
        }
    }
}

/// Returns the failure for a file of the master that cannot be read or written.
fn unusable(path: &Path, error: &io::Error) -> Failure {
    Failure::new(Kind::Internal, format!("master's {}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;
    use std::ffi::OsString;
    use std::os::unix::fs::MetadataExt as _;
    use std::sync::Mutex;

    use proto::artifact::describe;

    use super::*;

    const MAX: BytesMax = BytesMax { one: 100, all: 150 };

    fn open(root: &Path) -> Artifacts {
        open_with(root, Arc::new(Unsynced), 0)
    }

    fn open_with(root: &Path, disk: Arc<dyn Disk>, journal: u64) -> Artifacts {
        let held = Artifacts::hold(root, disk).expect("nobody else has it");
        Artifacts::open(held, MAX, journal).expect("a folder")
    }

    /// What a folder has: each entry's name, inode, and whether it is a folder.
    type Entries = Vec<(OsString, u64, bool)>;

    /// A disk that loses what was not synced when the power fails. It knows, by inode, what each
    /// synced file and folder had.
    #[derive(Debug, Default)]
    struct Lossy {
        files: Mutex<HashMap<u64, Vec<u8>>>,
        folders: Mutex<HashMap<u64, Entries>>,
        /// Handles of all inodes above. A file system gives the inode of a removed file to a new
        /// one, unless somebody has the removed one open.
        open: Mutex<HashMap<u64, File>>,
    }

    impl Disk for Lossy {
        fn sync_file(&self, _: &File, path: &Path) -> io::Result<()> {
            let (inode, _) = self.keep_open(path)?;
            self.files.lock().unwrap().insert(inode, fs::read(path)?);
            Ok(())
        }

        fn sync_folder(&self, path: &Path) -> io::Result<()> {
            let mut entries = Vec::new();
            for entry in fs::read_dir(path)? {
                let entry = entry?;
                let (inode, is_folder) = self.keep_open(&entry.path())?;
                entries.push((entry.file_name(), inode, is_folder));
            }
            let (inode, _) = self.keep_open(path)?;
            self.folders.lock().unwrap().insert(inode, entries);
            Ok(())
        }
    }

    impl Lossy {
        /// Keeps a file or folder open. Returns its inode, and whether it is a folder.
        fn keep_open(&self, path: &Path) -> io::Result<(u64, bool)> {
            let file = File::open(path)?;
            let found = file.metadata()?;
            self.open.lock().unwrap().insert(found.ino(), file);
            Ok((found.ino(), found.is_dir()))
        }

        /// Returns what is there when the power is back: files that were named and never synced are
        /// empty.
        fn after_power_loss(&self, root: &Path) -> tempfile::TempDir {
            let left = tempfile::tempdir().expect("a folder");
            self.copy(fs::metadata(root).expect("a folder").ino(), left.path());
            left
        }

        fn copy(&self, folder: u64, to: &Path) {
            let entries = self.folders.lock().unwrap().get(&folder).cloned().unwrap_or_default();
            for (name, inode, is_folder) in entries {
                let path = to.join(name);
                if is_folder {
                    fs::create_dir(&path).expect("made");
                    self.copy(inode, &path);
                } else {
                    let content = self.files.lock().unwrap().get(&inode).cloned().unwrap_or_default();
                    fs::write(&path, content).expect("written");
                }
            }
        }
    }

    #[test]
    fn files_that_a_job_has_survive_a_power_loss() {
        let (root, disk) = (tempfile::tempdir().expect("a folder"), Arc::new(Lossy::default()));
        let artifacts = open_with(root.path(), disk.clone(), 0);
        let two = [describe("a", b"hello"), describe("b", b"")];
        for (job, folder) in
            [(JobId(3), Folder::Input), (JobId(3), Folder::Output), (JobId(4), Folder::Input)]
        {
            let parts = vec![header(two[0].clone()), content(b"hel"), content(b"lo"), header(two[1].clone())];
            let received = receive(&artifacts, parts).expect("whole");
            artifacts.adopt(&received, job, folder).expect("a move");
            // The record of the job may be durable from here on.
            let left = disk.after_power_loss(root.path());
            let after = open(left.path());
            let parts: Vec<_> = after.parts(job, folder, &two[0]).map(Result::unwrap).collect();
            assert_eq!(parts, [header(two[0].clone()), content(b"hello")], "{job} {folder:?}");
            assert_eq!(after.newest_job, job);
        }
    }

    #[test]
    fn the_number_of_a_start_is_never_used_again_after_a_power_loss() {
        let (mut root, disk) = (tempfile::tempdir().expect("a folder"), Arc::new(Lossy::default()));
        for expected in 1..5 {
            assert_eq!(open_with(root.path(), disk.clone(), 0).starts, expected);
            root = disk.after_power_loss(root.path());
        }
    }

    #[test]
    fn a_torn_number_of_starts_is_survived_by_that_of_the_journal() {
        let root = tempfile::tempdir().expect("a folder");
        for (torn, journal, expected) in
            [(&b""[..], 7, 8), (b"\0\0\0", 8, 9), (b"\xff\xfe", 9, 10), (b"3\n", 10, 11), (b"99\n", 11, 100)]
        {
            fs::write(root.path().join("starts"), torn).expect("written");
            assert_eq!(open_with(root.path(), Arc::new(Synced), journal).starts, expected, "{torn:?}");
        }
    }

    #[test]
    fn the_identity_of_a_shared_folder_is_never_half_written() {
        let root = tempfile::tempdir().expect("a folder");
        let disk = Lossy::default();
        let (path, next) = (root.path().join("identity"), root.path().join("identity.1"));
        replace(root.path(), &path, &next, "00000000000000ab\n", &disk).expect("written");
        let left = disk.after_power_loss(root.path());
        assert_eq!(Artifacts::identity(left.path()).expect("whole"), Some(0xab));
    }

    fn header(artifact: Artifact) -> ArtifactPart {
        ArtifactPart { part: Some(Part::Header(artifact)) }
    }

    fn content(bytes: &'static [u8]) -> ArtifactPart {
        ArtifactPart { part: Some(Part::Content(Bytes::from_static(bytes))) }
    }

    fn receive(artifacts: &Artifacts, parts: Vec<ArtifactPart>) -> Result<Received, Failure> {
        let mut receiving = artifacts.receive("anna")?;
        parts.into_iter().try_for_each(|part| receiving.accept(part))?;
        receiving.finish()
    }

    fn is_empty(folder: &Path) -> bool {
        fs::read_dir(folder).expect("a folder").next().is_none()
    }

    #[test]
    fn files_go_in_and_come_out_the_same() {
        let root = tempfile::tempdir().expect("a folder");
        let artifacts = open(root.path());
        let two = [describe("a", b"hello"), describe("b", b"")];
        let parts = vec![header(two[0].clone()), content(b"hel"), content(b"lo"), header(two[1].clone())];
        let received = receive(&artifacts, parts).expect("whole");
        assert_eq!(artifacts.adopt(&received, JobId(3), Folder::Input).expect("a move"), two);
        let parts: Vec<_> = artifacts.parts(JobId(3), Folder::Input, &two[0]).map(Result::unwrap).collect();
        assert_eq!(parts, [header(two[0].clone()), content(b"hello")]);
        assert_eq!(artifacts.parts(JobId(3), Folder::Input, &two[1]).count(), 1);
        drop(received);
        assert!(is_empty(&root.path().join("incoming/1")));
    }

    #[test]
    fn the_module_of_a_job_is_read_for_its_checkpoints() {
        let root = tempfile::tempdir().expect("a folder");
        let artifacts = open(root.path());
        let module = describe(SCRIPT, b"PK module");
        let received =
            receive(&artifacts, vec![header(module.clone()), content(b"PK module")]).expect("whole");
        artifacts.adopt(&received, JobId(3), Folder::Input).expect("a move");
        let script = Script { bytes: module.size, sha256: module.sha256 };
        let slices: Vec<_> = artifacts.script(JobId(3), &script).collect();
        assert_eq!(slices, [Ok(Bytes::from_static(b"PK module"))]);
        assert!(artifacts.script(JobId(4), &script).all(|slice| slice.is_err()));
    }

    #[test]
    fn what_was_not_announced_is_refused_and_leaves_nothing() {
        let root = tempfile::tempdir().expect("a folder");
        let artifacts = open(root.path());
        let good = describe("a", b"hello");
        let named = |name: &str| header(Artifact { name: name.to_owned(), ..good.clone() });
        for (parts, expected) in [
            (vec![named("../a"), content(b"hello")], "plain file name"),
            (vec![content(b"hello")], "expected a header before it"),
            (vec![ArtifactPart { part: None }], "ArtifactPart.part"),
            (vec![named("a"), content(b"hell")], "4 bytes came, 5 were announced"),
            (vec![named("a"), content(b"hello!")], "more than the 5 bytes"),
            (vec![named("a"), content(b"hallo")], "was announced"),
            (vec![named("a"), content(b"hello"), named("a"), content(b"hello")], "sent twice"),
            (vec![header(Artifact { sha256: "xyz".into(), ..good.clone() })], "64 lower-case hex"),
            (vec![header(Artifact { size: 101, ..good.clone() })], "artifact_bytes_max"),
        ] {
            let failure = receive(&artifacts, parts).unwrap_err();
            assert!(failure.kind == Kind::Malformed && failure.message.contains(expected), "{failure}");
            assert!(is_empty(&root.path().join("incoming/1")), "{expected}");
        }
    }

    #[test]
    fn streams_that_end_in_any_way_give_back_what_they_reserved() {
        let root = tempfile::tempdir().expect("a folder");
        let artifacts = open(root.path());
        let large = header(Artifact { size: 90, ..describe("a", b"hello") });
        let reserve = |stream: &mut Receiving| stream.reserve(&large, |_| Ok(()));
        let begin = || artifacts.receive("anna").expect("a folder");
        let (mut one, mut two) = (begin(), begin());
        reserve(&mut one).expect("there is room");
        assert_eq!(reserve(&mut two).unwrap_err().kind, Kind::Full);
        // It broke.
        drop(one);
        reserve(&mut two).expect("there is room again");
        assert!(two.accept(content(b"x")).is_err());
        drop(two);
        // It was not whole.
        let mut three = begin();
        reserve(&mut three).expect("there is room again");
        three.accept(large.clone()).expect("announced");
        assert!(three.finish().is_err());
        // It was, and its files were given to a job, or not.
        let small = [header(describe("a", b"hello")), content(b"hello")];
        let mut four = begin();
        for part in small {
            four.reserve(&part, |_| Ok(())).expect("there is room again");
            four.accept(part).expect("good");
        }
        let mut received = four.finish().expect("whole");
        assert_eq!(received.of_owner(), 5);
        artifacts.adopt(&received, JobId(1), Folder::Input).expect("a move");
        assert_eq!(received.of_owner(), 5, "until the job is known");
        received.given();
        assert_eq!(begin().finish().expect("nothing").of_owner(), 0);
    }

    #[test]
    fn a_restart_counts_itself_and_keeps_only_what_is_whole() {
        let root = tempfile::tempdir().expect("a folder");
        let artifacts = open(root.path());
        assert_eq!((artifacts.starts, artifacts.newest_job), (1, JobId(0)));
        let received = receive(&artifacts, vec![header(describe("a", b""))]).expect("whole");
        artifacts.adopt(&received, JobId(7), Folder::Output).expect("a move");
        let half = artifacts.receive("anna").expect("a folder");
        std::mem::forget(half);
        drop(artifacts);
        let artifacts = open(root.path());
        assert_eq!((artifacts.starts, artifacts.newest_job), (2, JobId(7)));
        assert!(is_empty(&root.path().join("incoming/2")) && !root.path().join("incoming/1").exists());
    }

    #[test]
    fn a_second_master_is_refused() {
        let root = tempfile::tempdir().expect("a folder");
        let first = open(root.path());
        assert!(matches!(Artifacts::hold(root.path(), Arc::new(Unsynced)), Err(Error::Busy(_))));
        drop(first);
        open(root.path());
    }

    #[test]
    fn a_later_export_leaves_an_earlier_one_readable() {
        let root = tempfile::tempdir().expect("a folder");
        let artifacts = open(root.path());
        let exports = ["old", "new"].map(|text| (describe("model", text.as_bytes()), text));
        for (artifact, text) in &exports {
            let parts = vec![header(artifact.clone()), content(text.as_bytes())];
            let received = receive(&artifacts, parts).expect("whole");
            artifacts.adopt(&received, JobId(1), Folder::Output).expect("a move");
        }
        for (artifact, text) in &exports {
            let parts: Vec<_> =
                artifacts.parts(JobId(1), Folder::Output, artifact).map(Result::unwrap).collect();
            assert_eq!(parts, [header(artifact.clone()), content(text.as_bytes())]);
        }
    }

    #[test]
    fn masters_share_a_folder_only_with_those_of_their_journal() {
        let root = tempfile::tempdir().expect("a folder");
        let no_leader = Artifacts::check(root.path(), 7).unwrap_err().to_string();
        assert!(no_leader.contains("no leader has used"), "{no_leader}");
        let first = Artifacts::share(root.path(), MAX, 1, 7).expect("a folder");
        let half = first.receive("anna").expect("a folder");
        // The first one may still run when the second is elected: it finds its uploads gone, and
        // that is all.
        let second = Artifacts::share(root.path(), MAX, 2, 7).expect("the same folder");
        assert!(!half.received.folder.exists() && is_empty(&root.path().join("incoming/2")));
        assert!(matches!(
            Artifacts::share(root.path(), MAX, 1, 8),
            Err(Error::NotShared { expected: 8, .. })
        ));
        let alone = Artifacts::hold(root.path(), Arc::new(Unsynced));
        assert!(matches!(alone, Err(Error::Busy(_))), "a master that is alone");
        drop((first, second));
        open(root.path());
    }
}
