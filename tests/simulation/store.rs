//! The store of checkpoints: files in memory that outlive every process, on a disk that is slow, full, away, and tears what it writes.
//!
//! A call takes its time before and after what it does, so that a process may crash in between: with half a file written, or with all
//! of it and nobody who knows.

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

/// The store; clones are the same.
#[derive(Clone)]
pub(crate) struct Disk {
    /// What lies on it.
    pub(crate) files: Arc<InMemory>,
    /// Files may be damaged.
    rots: bool,
    /// No ps writes to this one.
    apart: bool,
    /// Checkpoints that are kept.
    keep: u64,
    /// Every checkpoint that was ever published, as it was then; where nothing rots.
    published: Arc<Mutex<Vec<Published>>>,
    state: Arc<Mutex<State>>,
}

/// A checkpoint when its manifest was written.
#[derive(Clone, Debug)]
pub(crate) struct Published {
    pub(crate) manifest: Manifest,
    pub(crate) weights: Vec<Values>,
}

struct State {
    dice: Dice,
    /// Longest time that one call takes.
    latency_ms: u64,
    /// Chances of one call: it fails; of a write: it is torn, or it succeeds and the answer is lost.
    fails: f32,
    torn: f32,
    unheard: f32,
    full: bool,
    away: bool,
}

/// What becomes of a write.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Write {
    Whole,
    /// Half of it lies there until the rest is written, or for ever.
    Torn,
    /// It is written, and an error is told.
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

    /// From now on there is no room, or again.
    pub(crate) fn fill(&self, full: bool) {
        self.state().full = full;
    }

    /// From now on nobody reaches it, or again.
    pub(crate) fn cut(&self, away: bool) {
        self.state().away = away;
    }

    /// It works, if not faster, from now on.
    pub(crate) fn heal(&self) {
        let mut state = self.state();
        (state.full, state.away) = (false, false);
        (state.fails, state.torn, state.unheard) = (0.0, 0.0, 0.0);
    }

    /// Somebody clears it up. What is on its way is not there yet, so nothing is waited for.
    pub(crate) fn clear(&self) {
        let files = self.files.list(None).try_collect::<Vec<_>>().now_or_never().expect("at once").unwrap();
        for file in files {
            self.files.delete(&file.location).now_or_never().expect("at once").unwrap();
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    /// Every checkpoint that has a manifest is whole: what has one was published, and what was published restores for as long as it is
    /// kept. Where nothing rots.
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

    /// What was ever published. Nothing is afterwards.
    pub(crate) fn take_published(&self) -> Vec<Published> {
        std::mem::take(&mut self.published.lock().unwrap())
    }

    /// A manifest was written: what it names is there and whole, or it should not have been written.
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

    /// A manifest was removed: there are as many as shall be kept without it.
    fn check_kept(&self) {
        let files = self.files.list(None).try_collect::<Vec<_>>().now_or_never().expect("at once").unwrap();
        let left = files.iter().filter(|file| file.location.filename() == Some(MANIFEST)).count();
        assert!(
            self.rots || left as u64 >= self.keep,
            "{left} checkpoints are left, of {} to be kept",
            self.keep
        );
    }

    /// Half of the time that a call takes.
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

    /// Whether it can be used now.
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

    /// Writes a file as luck has it.
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
