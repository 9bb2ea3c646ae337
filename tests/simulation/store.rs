//! The store of checkpoints: files in memory that outlive every process, on a disk that is slow,
//! sometimes full or unreachable, and tears writes.
//!
//! A call takes time before and after its effect, so that a process may crash in between: with half
//! a file written, or with a whole file and no answer.

use std::fmt;
use std::io;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use bytes::Bytes;
use ebbflow::random::Keyed;
use ebbflow::tensor::Values;
use futures::stream::BoxStream;
use futures::{FutureExt, StreamExt, TryStreamExt};
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{
    CopyOptions, Error, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, ObjectStore,
    ObjectStoreExt, PutMultipartOptions, PutOptions, PutPayload, PutResult, Result, UploadPart,
};
use proto::checkpoint::manifest::Manifest;
use proto::checkpoint::{MANIFEST, folder_name};
use proto::ids::PartitionId;
use store::Stores;
use store::data_file::{self, DataFile};
use store::found::Found;

use crate::checks;
use crate::plan::{CHECKPOINTS, Dice, JOB, Plan};

/// The store. Clones are the same store.
#[derive(Clone)]
pub(crate) struct Disk {
    /// Files on the store.
    pub(crate) files: Arc<InMemory>,
    /// Whether files may be damaged.
    rots: bool,
    /// Whether no ps writes to this store.
    apart: bool,
    /// Number of checkpoints to keep.
    keep: u64,
    /// Every published checkpoint, as it was then. Empty where files may be damaged.
    published: Arc<Mutex<Vec<Published>>>,
    state: Arc<Mutex<State>>,
}

/// A checkpoint at the moment when its manifest was written.
#[derive(Clone, Debug)]
pub(crate) struct Published {
    pub(crate) manifest: Manifest,
    pub(crate) weights: Vec<Values>,
}

struct State {
    dice: Dice,
    /// Longest time that one call takes.
    latency_ms: u64,
    /// Chances that a call fails, that a write is torn, and that a write succeeds and its answer is
    /// lost.
    fails: f32,
    torn: f32,
    unheard: f32,
    full: bool,
    away: bool,
}

/// Effect of a write.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Write {
    Whole,
    /// Half of the file exists until the rest is written, or forever.
    Torn,
    /// The file is written, and the writer gets an error.
    Unheard,
}

impl Disk {
    pub(crate) fn new(seed: u64, plan: &Plan) -> Self {
        let state = State {
            dice: Dice(Keyed::new(seed, "disk", 0)),
            latency_ms: plan.store_ms,
            fails: plan.store_fails,
            torn: plan.store_torn,
            unheard: plan.store_unheard,
            full: false,
            away: false,
        };
        Self {
            files: Arc::default(),
            rots: plan.rot > 0.0,
            apart: plan.apart,
            keep: plan.saves.map_or(0, |saves| saves.keep),
            published: Arc::default(),
            state: Arc::new(Mutex::new(state)),
        }
    }

    /// Sets whether the disk is full from now on.
    pub(crate) fn fill(&self, full: bool) {
        self.state().full = full;
    }

    /// Sets whether the store is unreachable from now on.
    pub(crate) fn cut(&self, away: bool) {
        self.state().away = away;
    }

    /// Ends all faults. The store stays slow.
    pub(crate) fn heal(&self) {
        let mut state = self.state();
        (state.full, state.away) = (false, false);
        (state.fails, state.torn, state.unheard) = (0.0, 0.0, 0.0);
    }

    /// Removes all files. Writes in flight have not created theirs yet, so nothing is awaited.
    pub(crate) fn clear(&self) {
        let files = self.files.list(None).try_collect::<Vec<_>>().now_or_never().expect("at once").unwrap();
        for file in files {
            self.files.delete(&file.location).now_or_never().expect("at once").unwrap();
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    /// Checks that every checkpoint with a manifest was published, and that each published one can
    /// be restored for as long as it is kept. It needs a store without damage.
    pub(crate) fn check_manifests(&self) {
        let folder = Stores::only(self.files.clone()).open(CHECKPOINTS).expect("a folder").below(JOB);
        let found = Found::look(&folder).now_or_never().expect("at once").expect("it can be read");
        for (version, manifest) in found.manifests {
            let folder = folder.below(&folder_name(version));
            for partition in (0..manifest.files.len() as u32).map(PartitionId) {
                let read = async { DataFile::open(&folder, &manifest, partition).await?.verify().await };
                let read = read.now_or_never().expect("at once");
                assert!(read.is_ok(), "version {version} was published and cannot be restored: {read:?}");
            }
            checks::count("published checkpoints read whole");
        }
    }

    /// Takes the published checkpoints. None is published afterwards.
    pub(crate) fn take_published(&self) -> Vec<Published> {
        std::mem::take(&mut self.published.lock().unwrap())
    }

    /// Notes that a manifest was written, and checks that the files that it names are complete.
    fn publish(&self, path: &Path) {
        assert!(!self.apart, "{path} was published, and no ps writes to this store");
        if self.rots {
            return;
        }
        self.check_manifests();
        let job = Stores::only(self.files.clone()).open(CHECKPOINTS).expect("a folder").below(JOB);
        let found = Found::look(&job).now_or_never().expect("at once").expect("it can be read");
        let written =
            found.manifests.into_iter().find(|(version, _)| path.as_ref().contains(&folder_name(*version)));
        let (version, manifest) = written.expect("it was written just now");
        let folder = job.below(&folder_name(version));
        let weights =
            data_file::weights(&folder, &manifest).now_or_never().expect("at once").expect("it is whole");
        self.published.lock().unwrap().push(Published { manifest, weights });
    }

    /// Checks after the removal of a manifest that enough of them are left.
    fn check_kept(&self) {
        let files = self.files.list(None).try_collect::<Vec<_>>().now_or_never().expect("at once").unwrap();
        let left = files.iter().filter(|file| file.location.filename() == Some(MANIFEST)).count();
        assert!(
            self.rots || left as u64 >= self.keep,
            "{left} checkpoints are left, of {} to be kept",
            self.keep
        );
    }

    /// Waits for half of the time that a call takes.
    async fn wait(&self) {
        let ms = {
            let mut state = self.state();
            let longest = state.latency_ms;
            state.dice.range(0, longest / 2)
        };
        if ms > 0 {
            tokio::time::sleep(Duration::from_millis(ms)).await;
        }
    }

    /// Returns an error if the store cannot be used now.
    fn reached(&self) -> Result<()> {
        let mut state = self.state();
        let fails = state.fails;
        if state.away || state.dice.happens(fails) {
            checks::count("calls of the store that failed");
            return Err(error(io::Error::other("the store is away")));
        }
        Ok(())
    }

    fn writes(&self) -> Result<Write> {
        self.reached()?;
        let mut state = self.state();
        if state.full {
            checks::count("writes to a full disk");
            return Err(error(io::Error::from_raw_os_error(libc::ENOSPC)));
        }
        let (torn, unheard) = (state.torn, state.unheard);
        Ok(match (state.dice.happens(torn), state.dice.happens(unheard)) {
            (true, _) => Write::Torn,
            (_, true) => Write::Unheard,
            _ => Write::Whole,
        })
    }

    /// Writes a file with random faults.
    async fn put(&self, path: &Path, payload: PutPayload, options: PutOptions) -> Result<PutResult> {
        self.wait().await;
        let write = self.writes()?;
        if write == Write::Torn {
            checks::count("torn files of checkpoints");
            let bytes = Bytes::from_iter(payload.iter().flatten().copied());
            let half = bytes.slice(..bytes.len() / 2);
            self.files.put(path, half.into()).await?;
            self.wait().await;
            // The process may be gone by now, or the disk full.
            self.writes()?;
        }
        let put = self.files.put_opts(path, payload, options).await?;
        if path.filename() == Some(MANIFEST) {
            self.publish(path);
        }
        self.wait().await;
        match write {
            Write::Unheard => {
                checks::count("writes that succeeded unheard");
                Err(error(io::Error::other("the answer was lost")))
            }
            _ => Ok(put),
        }
    }
}

fn error(source: io::Error) -> Error {
    Error::Generic { store: "simulated", source: Box::new(source) }
}

impl fmt::Debug for Disk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("simulated")
    }
}

impl fmt::Display for Disk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("simulated")
    }
}

#[async_trait::async_trait]
impl ObjectStore for Disk {
    async fn put_opts(&self, path: &Path, payload: PutPayload, options: PutOptions) -> Result<PutResult> {
        self.put(path, payload, options).await
    }

    async fn put_multipart_opts(
        &self,
        path: &Path,
        _: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        self.wait().await;
        self.reached()?;
        Ok(Box::new(Upload { disk: self.clone(), path: path.clone(), parts: Vec::new() }))
    }

    async fn get_opts(&self, path: &Path, options: GetOptions) -> Result<GetResult> {
        self.wait().await;
        self.reached()?;
        self.files.get_opts(path, options).await
    }

    async fn get_ranges(&self, path: &Path, ranges: &[Range<u64>]) -> Result<Vec<Bytes>> {
        self.wait().await;
        self.reached()?;
        self.files.get_ranges(path, ranges).await
    }

    fn delete_stream(&self, paths: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        let disk = self.clone();
        let deleted = paths.and_then(move |path| {
            let disk = disk.clone();
            async move {
                disk.wait().await;
                disk.reached()?;
                let was_there = disk.files.head(&path).await.is_ok();
                disk.files.delete(&path).await?;
                if was_there && path.filename() == Some(MANIFEST) {
                    disk.check_kept();
                }
                Ok(path)
            }
        });
        deleted.boxed()
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        match self.reached() {
            Ok(()) => self.files.list(prefix).boxed(),
            Err(error) => futures::stream::iter([Err(error)]).boxed(),
        }
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.wait().await;
        self.reached()?;
        self.files.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.files.copy_opts(from, to, options).await
    }
}

/// A file whose parts are kept until it is complete.
#[derive(Debug)]
struct Upload {
    disk: Disk,
    path: Path,
    parts: Vec<PutPayload>,
}

#[async_trait::async_trait]
impl MultipartUpload for Upload {
    fn put_part(&mut self, payload: PutPayload) -> UploadPart {
        self.parts.push(payload);
        let disk = self.disk.clone();
        async move {
            disk.wait().await;
            disk.reached()
        }
        .boxed()
    }

    async fn complete(&mut self) -> Result<PutResult> {
        let payload = self.parts.iter().flat_map(|part| part.iter().cloned()).collect();
        self.disk.put(&self.path, payload, PutOptions::default()).await
    }

    async fn abort(&mut self) -> Result<()> {
        Ok(())
    }
}
