//! Access to stores: a folder on a local disk, in an object store, or in the memory of this
//! process.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::TryStreamExt;
use object_store::local::LocalFileSystem;
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt, WriteMultipart};
use proto::checkpoint::{Error, Result};
use proto::retry::{Pause, Retry};

#[cfg(feature = "cloud")]
use crate::cloud::open;
use crate::direct::Direct;
use crate::location::{Allowed, Location};

/// Default time for retries of a failing store.
pub const PATIENCE: Duration = Duration::from_secs(13);

/// Longest time for retries that a process may set.
pub const PATIENCE_MAX: Duration = Duration::from_secs(600);

/// Wait before the first retry of a failing store. It doubles each time.
const FIRST_WAIT: Duration = Duration::from_millis(200);

/// Returns as many retries as fit into `patience`.
fn retry(patience: Duration) -> Retry {
    let waits = (patience.as_millis() / FIRST_WAIT.as_millis() + 1).ilog2();
    Retry { first: FIRST_WAIT, longest: Duration::from_secs(10), attempts_max: waits + 1 }
}

/// Bytes of one part of an upload. S3 requires at least 5 MiB; its limit of 10,000 parts then
/// allows 78 GiB.
pub const PART_BYTES: usize = 8 << 20;

/// Opens stores by their URLs. Clones share the content of `memory://`.
#[derive(Clone)]
pub struct Stores {
    memory: Arc<InMemory>,
    settings: Arc<BTreeMap<String, String>>,
    instead: Option<Arc<dyn ObjectStore>>,
    /// Places whose URLs may be opened.
    allowed: Arc<Allowed>,
    /// Retries of a failing store.
    retry: Retry,
}

impl Default for Stores {
    fn default() -> Self {
        Self {
            memory: Arc::default(),
            settings: Arc::default(),
            instead: None,
            allowed: Arc::default(),
            retry: retry(PATIENCE),
        }
    }
}

impl Stores {
    /// Creates stores with the settings of object stores (credentials, regions, endpoints) under
    /// their usual names, such as `AWS_REGION`.
    pub fn new(settings: BTreeMap<String, String>) -> Self {
        Self { settings: Arc::new(settings), ..Self::default() }
    }

    /// Returns the settings of object stores, which are secrets.
    pub fn settings(&self) -> &BTreeMap<String, String> {
        &self.settings
    }

    /// Creates stores whose every URL leads to a path in `store`, for tests and simulated faults.
    pub fn only(store: Arc<dyn ObjectStore>) -> Self {
        Self { instead: Some(store), ..Self::default() }
    }

    /// Restricts the stores to these places.
    #[must_use]
    pub fn within(self, allowed: Allowed) -> Self {
        Self { allowed: Arc::new(allowed), ..self }
    }

    /// Sets for about how long a failing store is tried again.
    #[must_use]
    pub fn patient_for(self, patience: Duration) -> Self {
        Self { retry: retry(patience), ..self }
    }

    /// Calls `attempt` until it succeeds, fails for good, or the retries are used up. `on_retry`
    /// gets the first failure that is followed by another attempt.
    ///
    /// # Errors
    /// The last failure.
    pub async fn patiently<T, Fut: Future<Output = Result<T>>>(
        &self,
        on_retry: impl Fn(&Error),
        attempt: impl Fn() -> Fut,
    ) -> Result<T> {
        repeat(self.retry, on_retry, attempt).await
    }

    /// Calls `attempt` until it succeeds or fails for good.
    ///
    /// # Errors
    /// A failure that retries cannot mend.
    pub async fn for_as_long_as_it_takes<T, Fut: Future<Output = Result<T>>>(
        &self,
        on_retry: impl Fn(&Error),
        attempt: impl Fn() -> Fut,
    ) -> Result<T> {
        repeat(Retry { attempts_max: u32::MAX, ..self.retry }, on_retry, attempt).await
    }

    /// Returns the folder that a URL or an absolute path names. It does not access the store.
    ///
    /// # Errors
    /// [`Error::Url`], [`Error::NotAllowed`].
    pub fn open(&self, url: &str) -> Result<Folder> {
        let wrong = |reason: String| Error::Url { url: url.to_owned(), reason };
        let location = Location::of(url)?;
        self.allowed.check(url, &location)?;
        let mut disk = None;
        let mut local = || -> Arc<dyn ObjectStore> { disk.insert(local()).clone() };
        let (store, path): (Arc<dyn ObjectStore>, _) = match url.split_once("://") {
            None => {
                let path = Path::from_absolute_path(url).map_err(|error| wrong(error.to_string()))?;
                (local(), path)
            }
            Some((scheme, rest)) => {
                let parsed = url::Url::parse(url).map_err(|error| wrong(error.to_string()))?;
                if scheme == "memory" {
                    (self.memory.clone(), Path::from(rest))
                } else {
                    let opened = open(&parsed, &self.settings);
                    let (store, path) = opened.map_err(|error| wrong(error.to_string()))?;
                    (if scheme == "file" { local() } else { store }, path)
                }
            }
        };
        if path != *location.path() {
            return Err(wrong(format!("it leads to `{path}`, and `{}` was checked", location.path())));
        }
        let disk = disk.filter(|_| self.instead.is_none());
        Ok(Folder { store: self.instead.clone().unwrap_or(store), disk, path, name: url.to_owned() })
    }
}

async fn repeat<T, Fut: Future<Output = Result<T>>>(
    retry: Retry,
    on_retry: impl Fn(&Error),
    attempt: impl Fn() -> Fut,
) -> Result<T> {
    let judge = |failures, error: Error| {
        if !error.is_retryable() || retry.is_last(failures) {
            return Err(error);
        }
        if failures == 0 {
            on_retry(&error);
        }
        Ok(Pause::Growing)
    };
    retry.run(0, tokio::time::sleep, judge, attempt).await
}

/// Opens the store of a URL. Returns the store and the path in it.
#[cfg(not(feature = "cloud"))]
fn open(
    url: &url::Url,
    _settings: &BTreeMap<String, String>,
) -> object_store::Result<(Arc<dyn ObjectStore>, Path)> {
    object_store::parse_url(url).map(|(store, path)| (store.into(), path))
}

/// Leaves out the values of the settings, which are secrets.
impl fmt::Debug for Stores {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stores").field("settings", &self.settings.keys()).finish_non_exhaustive()
    }
}

/// Opens the local disk. A file reported as written survives a power loss. A folder disappears with
/// its last file, as in an object store.
fn local() -> Arc<LocalFileSystem> {
    Arc::new(LocalFileSystem::new().with_fsync(true).with_automatic_cleanup(true))
}

/// A folder of a store.
#[derive(Clone, Debug)]
pub struct Folder {
    store: Arc<dyn ObjectStore>,
    /// Handle of the store if it is a local disk.
    disk: Option<Arc<LocalFileSystem>>,
    path: Path,
    name: String,
}

impl fmt::Display for Folder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.name.fmt(f)
    }
}

impl Folder {
    /// Returns a folder below this one. `names` are separated by `/`.
    #[must_use]
    pub fn below(&self, names: &str) -> Self {
        let path = names.split('/').fold(self.path.clone(), Path::join);
        Self { store: self.store.clone(), disk: self.disk.clone(), path, name: self.shown(names) }
    }

    /// Returns the name of a file of this folder in errors.
    pub fn shown(&self, file: &str) -> String {
        format!("{}/{file}", self.name.trim_end_matches('/'))
    }

    /// Returns the size of a file in bytes.
    ///
    /// # Errors
    /// [`Error::Missing`], [`Error::Store`].
    pub async fn size(&self, file: &str) -> Result<u64> {
        let meta = self.store.head(&self.at(file)).await;
        Ok(meta.map_err(|error| self.failed("read", file, error))?.size)
    }

    /// Reads a whole file of at most `bytes_max`.
    ///
    /// # Errors
    /// [`Error::Missing`], [`Error::Store`], and [`Error::Damaged`] for a larger file.
    pub async fn read(&self, file: &str, bytes_max: u64) -> Result<Bytes> {
        let bytes = self.size(file).await?;
        if bytes > bytes_max {
            let what = format!("{bytes} bytes, at most {bytes_max} make sense");
            return Err(Error::Damaged { file: self.shown(file), what });
        }
        // Not read as a range, because an empty file has no valid range.
        let got = self.store.get(&self.at(file)).await.map_err(|error| self.failed("read", file, error))?;
        got.bytes().await.map_err(|error| self.failed("read", file, error))
    }

    /// Reads parts of a file. Adjacent parts are read in one request.
    ///
    /// # Errors
    /// [`Error::Missing`], [`Error::Store`], [`Error::Truncated`].
    pub async fn ranges(&self, file: &str, ranges: &[Range<u64>]) -> Result<Vec<Bytes>> {
        let read = self.store.get_ranges(&self.at(file), ranges).await;
        let read = read.map_err(|error| self.failed("read", file, error))?;
        for (range, bytes) in ranges.iter().zip(&read) {
            let found_bytes = range.start + bytes.len() as u64;
            if found_bytes != range.end {
                let file = self.shown(file);
                return Err(Error::Truncated { file, expected_bytes: range.end, found_bytes });
            }
        }
        Ok(read)
    }

    /// Writes a small file atomically: it has all its bytes, or it does not exist.
    ///
    /// # Errors
    /// [`Error::Store`].
    pub async fn write(&self, file: &str, bytes: Bytes) -> Result<()> {
        let written = self.store.put(&self.at(file), bytes.into()).await;
        written.map(drop).map_err(|error| self.failed("write", file, error))
    }

    /// Begins to write a large file, which exists after [`Upload::finish`].
    ///
    /// # Errors
    /// [`Error::Store`].
    pub async fn upload(&self, file: &str) -> Result<Upload> {
        let upload = self.store.put_multipart(&self.at(file)).await;
        let upload = upload.map_err(|error| self.failed("write", file, error))?;
        let parts = WriteMultipart::new_with_chunk_size(upload, PART_BYTES);
        Ok(Upload { parts, folder: self.clone(), file: file.to_owned() })
    }

    /// Begins to write a large file on a local disk. Its name begins with `stem`. The first
    /// `head_bytes` and the whole name follow at the [end](OnDisk::finish). Returns `None` for
    /// other stores, where files are written from their beginning.
    ///
    /// # Errors
    /// [`Error::Store`].
    ///
    /// # Panics
    /// If `head_bytes` is no multiple of [`ALIGNED`](super::ALIGNED).
    pub fn on_disk(&self, stem: &str, head_bytes: usize) -> Result<Option<OnDisk>> {
        let Some(disk) = &self.disk else { return Ok(None) };
        let path = disk.path_to_filesystem(&self.at(stem));
        let path = path.map_err(|error| self.failed("write", stem, error))?;
        let file = Direct::create(&path, head_bytes).map_err(|error| self.not_written(stem, &error))?;
        Ok(Some(OnDisk { file, folder: self.clone(), stem: stem.to_owned() }))
    }

    /// Returns the names of the files and folders directly in this folder.
    ///
    /// # Errors
    /// [`Error::Store`].
    pub async fn list(&self) -> Result<Vec<String>> {
        let listed = self.store.list_with_delimiter(Some(&self.path)).await;
        let listed = listed.map_err(|error| self.failed("list", "", error))?;
        let files = listed.objects.into_iter().map(|object| object.location);
        let names = files.chain(listed.common_prefixes);
        Ok(names.filter_map(|path| path.filename().map(str::to_owned)).collect())
    }

    /// Removes a file. A missing file is no error.
    ///
    /// # Errors
    /// [`Error::Store`].
    pub async fn remove_file(&self, file: &str) -> Result<()> {
        match self.store.delete(&self.at(file)).await {
            Ok(()) | Err(object_store::Error::NotFound { .. }) => Ok(()),
            Err(error) => Err(self.failed("remove", file, error)),
        }
    }

    /// Removes this folder and everything below it, the file `first` before all others. Missing
    /// files are no error.
    ///
    /// # Errors
    /// [`Error::Store`].
    pub async fn remove(&self, first: &str) -> Result<()> {
        self.remove_file(first).await?;
        let files: Vec<_> = self
            .store
            .list(Some(&self.path))
            .map_ok(|object| object.location)
            .try_collect()
            .await
            .map_err(|error| self.failed("list", "", error))?;
        for file in files {
            match self.store.delete(&file).await {
                Ok(()) | Err(object_store::Error::NotFound { .. }) => {}
                Err(error) => return Err(self.failed("remove", file.as_ref(), error)),
            }
        }
        Ok(())
    }

    /// Removes this folder from a local disk with everything in it, also what killed writers left
    /// there. Other stores have no such files.
    ///
    /// # Errors
    /// [`Error::Store`].
    pub fn sweep(&self) -> Result<()> {
        let Some(disk) = &self.disk else { return Ok(()) };
        let path = disk.path_to_filesystem(&self.path).map_err(|error| self.failed("remove", "", error))?;
        match std::fs::remove_dir_all(path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                Err(Error::Store { what: "remove", file: self.name.clone(), reason: with_sources(&error) })
            }
            _ => Ok(()),
        }
    }

    /// Removes this folder from a local disk if nothing is in it. Other stores have no such
    /// folders.
    ///
    /// # Errors
    /// [`Error::Store`].
    pub fn remove_if_empty(&self) -> Result<()> {
        use std::io::ErrorKind::{DirectoryNotEmpty, NotFound};
        let Some(disk) = &self.disk else { return Ok(()) };
        let path = disk.path_to_filesystem(&self.path).map_err(|error| self.failed("remove", "", error))?;
        match std::fs::remove_dir(path) {
            Err(error) if !matches!(error.kind(), DirectoryNotEmpty | NotFound) => {
                Err(Error::Store { what: "remove", file: self.name.clone(), reason: with_sources(&error) })
            }
            _ => Ok(()),
        }
    }

    fn at(&self, file: &str) -> Path {
        self.path.clone().join(file)
    }

    fn not_written(&self, file: &str, error: &std::io::Error) -> Error {
        Error::Store { what: "write", file: self.shown(file), reason: with_sources(error) }
    }

    fn failed(&self, what: &'static str, file: &str, error: object_store::Error) -> Error {
        let file = self.shown(file);
        match error {
            object_store::Error::NotFound { .. } => Error::Missing { file },
            error => Error::Store { what, file, reason: with_sources(&error) },
        }
    }
}

/// Writes an error with its sources. The store's own text often lacks the cause ("no space left on
/// device").
fn with_sources(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text = format!("{text}: {cause_text}");
        }
        source = cause.source();
    }
    text
}

/// A large file that is being written. If it is dropped, it leaves nothing under its name.
#[derive(Debug)]
pub struct Upload {
    parts: WriteMultipart,
    folder: Folder,
    file: String,
}

impl Upload {
    /// Adds bytes. Waits while `parts_max` parts are in flight.
    ///
    /// # Errors
    /// [`Error::Store`] if an earlier part failed. The caller must then drop the upload.
    pub async fn put(&mut self, bytes: Bytes, parts_max: usize) -> Result<()> {
        self.parts.put(bytes);
        let waited = self.parts.wait_for_capacity(parts_max).await;
        waited.map_err(|error| self.folder.failed("write", &self.file, error))
    }

    /// Waits until the file is durable under its name.
    ///
    /// # Errors
    /// [`Error::Store`]; the file does not exist then.
    pub async fn finish(self) -> Result<()> {
        let finished = self.parts.finish().await;
        finished.map(drop).map_err(|error| self.folder.failed("write", &self.file, error))
    }

    /// Gives up. It tries to leave no parts behind.
    pub async fn abort(self) {
        let _ = self.parts.abort().await;
    }
}

/// A large file that is being written to a local disk. If it is dropped, it leaves nothing.
#[derive(Debug)]
pub struct OnDisk {
    file: Direct,
    folder: Folder,
    stem: String,
}

impl OnDisk {
    /// Adds bytes after the beginning. Waits while too many writes are in flight.
    ///
    /// # Errors
    /// [`Error::Store`] if bytes were not written. The caller must then drop the file.
    pub async fn put(&mut self, bytes: Bytes) -> Result<()> {
        self.file.put(bytes).await.map_err(|error| self.folder.not_written(&self.stem, &error))
    }

    /// Writes the beginning, and waits until the file is durable under its name.
    ///
    /// # Errors
    /// [`Error::Store`]; the file does not exist then.
    ///
    /// # Panics
    /// If the length of `head` is not the `head_bytes` of [`Folder::on_disk`].
    pub async fn finish(self, name: &str, head: &[u8]) -> Result<()> {
        let Self { file, folder, .. } = self;
        file.finish(name, head).await.map_err(|error| folder.not_written(name, &error))
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use proto::checkpoint::ALIGNED;

    use super::*;

    async fn holds_what_was_written(stores: &Stores, url: &str) {
        let folder = stores.open(url).unwrap().below("a job/v0000000003");
        let large = Bytes::from((0..PART_BYTES + 10).map(|at| at as u8).collect::<Vec<_>>());
        let mut upload = folder.upload("large").await.unwrap();
        upload.put(large.slice(..7), 1).await.unwrap();
        upload.put(large.slice(7..), 1).await.unwrap();
        assert!(
            matches!(folder.size("large").await, Err(Error::Missing { .. })),
            "not before it is finished"
        );
        upload.finish().await.unwrap();
        folder.write("small", Bytes::from_static(b"words")).await.unwrap();
        let again = stores.open(url).unwrap().below("a job");
        assert_eq!(again.list().await.unwrap(), ["v0000000003"]);
        let again = again.below("v0000000003");
        assert_eq!(again.size("large").await.unwrap(), large.len() as u64);
        let ranges = again.ranges("large", &[3..9, 100..100 + 5, 9..10]).await.unwrap();
        assert_eq!(ranges, [large.slice(3..9), large.slice(100..105), large.slice(9..10)]);
        assert_eq!(again.read("small", 5).await.unwrap(), "words");
        assert!(matches!(again.read("small", 4).await, Err(Error::Damaged { .. })));
        assert!(matches!(again.read("none", 4).await, Err(Error::Missing { .. })));
        again.remove("small").await.unwrap();
        assert_eq!(again.list().await.unwrap(), [""; 0]);
        again.remove("small").await.unwrap();
    }

    #[tokio::test]
    async fn a_local_folder_holds_what_was_written() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("check points").to_str().unwrap().to_owned();
        holds_what_was_written(&Stores::default(), &path).await;
        let path = folder.path().join("url").to_str().unwrap().to_owned();
        holds_what_was_written(&Stores::default(), &format!("file://{path}")).await;
        let job = Stores::default().open(&path).unwrap().below("a job");
        job.write("x", Bytes::new()).await.unwrap();
        assert!(std::path::Path::new(&path).join("a job/x").is_file(), "a path that people find");
    }

    #[tokio::test]
    async fn a_folder_with_something_in_it_is_not_removed_as_empty() {
        let folder = tempfile::tempdir().unwrap();
        let disk = Stores::default().open(folder.path().to_str().unwrap()).unwrap();
        let job = disk.below("a job");
        job.below("one").write("x", Bytes::new()).await.unwrap();
        job.remove_if_empty().unwrap();
        assert_eq!(job.below("one").list().await.unwrap(), ["x"]);
        job.below("one").sweep().unwrap();
        job.remove_if_empty().unwrap();
        assert!(!folder.path().join("a job").exists());
        job.remove_if_empty().unwrap();
    }

    #[tokio::test]
    async fn memory_holds_what_was_written_for_all_clones() {
        let stores = Stores::default();
        holds_what_was_written(&stores.clone(), "memory://somewhere").await;
        let folder = stores.open("memory://somewhere").unwrap();
        folder.write("x", Bytes::new()).await.unwrap();
        assert_eq!(stores.clone().open("memory://somewhere").unwrap().list().await.unwrap(), ["x"]);
        assert_eq!(Stores::default().open("memory://somewhere").unwrap().list().await.unwrap(), [""; 0]);
    }

    #[tokio::test]
    async fn a_file_on_a_disk_gets_its_beginning_and_its_name_last() {
        let folder = tempfile::tempdir().unwrap();
        let disk = Stores::default().open(folder.path().to_str().unwrap()).unwrap().below("a job");
        let mut file = disk.on_disk("x", ALIGNED).unwrap().expect("a disk");
        file.put(Bytes::from_static(b"values")).await.unwrap();
        file.finish("x-7", &[1; ALIGNED]).await.unwrap();
        assert_eq!(disk.list().await.unwrap(), ["x-7"]);
        let read = disk.read("x-7", 2 * ALIGNED as u64).await.unwrap();
        assert_eq!(read[ALIGNED - 1..], *b"\x01values");
        let memory = Stores::default().open("memory://somewhere").unwrap();
        assert!(memory.on_disk("x", ALIGNED).unwrap().is_none());
        let nowhere = Stores::default().open("/proc/nowhere").unwrap();
        let error = nowhere.on_disk("x", ALIGNED).unwrap_err();
        assert!(matches!(&error, Error::Store { what: "write", .. }), "{error}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_store_is_tried_for_as_long_as_said_and_what_cannot_pass_is_not() {
        let store = || Error::Store { what: "write", file: "x".to_owned(), reason: "no space".to_owned() };
        for (stores, secs, attempts) in [
            (Stores::default(), 6.0..=13.0, 7),
            (Stores::default().patient_for(Duration::from_millis(1400)), 0.7..=1.4, 4),
            (Stores::default().patient_for(Duration::ZERO), 0.0..=0.0, 1),
        ] {
            let (tried, told) = (Cell::new(0), Cell::new(0));
            let tell = |_: &Error| told.set(told.get() + 1);
            let failing = |error: fn() -> Error, times: u32| {
                tried.set(0);
                let tried = &tried;
                move || async move {
                    tried.set(tried.get() + 1);
                    if tried.get() > times { Ok(tried.get()) } else { Err(error()) }
                }
            };
            let before = tokio::time::Instant::now();
            assert_eq!(stores.patiently(tell, failing(store, u32::MAX)).await, Err(store()));
            let took = before.elapsed().as_secs_f32();
            assert!(secs.contains(&took), "{took}");
            assert_eq!((tried.get(), told.get()), (attempts, u32::from(attempts > 1)), "one failure is told");
            let missing = || Error::Missing { file: "x".to_owned() };
            assert_eq!(stores.patiently(tell, failing(missing, 9)).await, Err(missing()));
            assert_eq!(tried.get(), 1);
            assert_eq!(stores.for_as_long_as_it_takes(tell, failing(store, 30)).await, Ok(31));
        }
    }

    #[test]
    fn nothing_but_the_allowed_places_is_opened() {
        let allowed = Allowed::of(&["/runs".to_owned()]).unwrap();
        let stores = Stores::default().within(allowed);
        assert!(stores.open("/runs/a").is_ok() && stores.clone().open("file:///runs").is_ok());
        for url in ["/", "/runs-of-others", "file:///runs/../etc", "memory://runs"] {
            assert!(matches!(stores.open(url), Err(Error::NotAllowed { .. })), "{url}");
        }
    }

    #[test]
    fn urls_that_lead_nowhere_are_refused() {
        for url in ["ftp://host/x", "s3://", "http://host/x"] {
            let error = Stores::default().open(url).unwrap_err().to_string();
            assert!(error.contains(url), "{error}");
        }
    }

    #[test]
    fn secrets_are_not_printed() {
        let stores = Stores::new(BTreeMap::from([("AWS_SECRET_ACCESS_KEY".to_owned(), "hush".to_owned())]));
        assert!(!format!("{stores:?}").contains("hush"));
    }
}
