//! A store in memory that fails as told: full, failing for a while, standing still; and what is on
//! it can be spoilt.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use bytes::Bytes;
use futures::stream::BoxStream;
use futures::{FutureExt, StreamExt, TryStreamExt};
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{
    CopyOptions, Error, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, ObjectStore,
    ObjectStoreExt, PutMultipartOptions, PutOptions, PutPayload, PutResult, Result, UploadPart,
};
use tokio::sync::Semaphore;

/// The store; clones are the same.
#[derive(Clone, Debug)]
pub(crate) struct Faulty {
    pub(crate) memory: Arc<InMemory>,
    faults: Arc<Faults>,
}

#[derive(Debug)]
struct Faults {
    /// Every write is answered that the disk is full.
    full: AtomicBool,
    /// Number of writes that fail.
    failing: AtomicU32,
    /// Number of reads that fail.
    failing_reads: AtomicU32,
    /// A part is written when it gets one of these.
    open: Semaphore,
}

impl Faults {
    fn write(&self) -> Result<()> {
        if self.full.load(Ordering::Relaxed) {
            return Err(error(std::io::Error::from_raw_os_error(28)));
        }
        count_down(&self.failing)
    }
}

fn count_down(left: &AtomicU32) -> Result<()> {
    let fails = left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)).is_ok();
    if fails { Err(error(std::io::Error::other("the disk went away"))) } else { Ok(()) }
}

fn error(source: std::io::Error) -> Error {
    Error::Generic { store: "faulty", source: Box::new(source) }
}

impl Faulty {
    /// Creates a store without faults.
    pub(crate) fn new() -> Self {
        let faults = Faults {
            full: AtomicBool::default(),
            failing: AtomicU32::default(),
            failing_reads: AtomicU32::default(),
            open: Semaphore::new(Semaphore::MAX_PERMITS),
        };
        Self { memory: Arc::default(), faults: Arc::new(faults) }
    }

    pub(crate) fn fill_up(&self) {
        self.faults.full.store(true, Ordering::Relaxed);
    }

    pub(crate) fn fail_writes(&self, count: u32) {
        self.faults.failing.store(count, Ordering::Relaxed);
    }

    pub(crate) fn fail_reads(&self, count: u32) {
        self.faults.failing_reads.store(count, Ordering::Relaxed);
    }

    /// Blocks every write of a part until [`go_on`](Self::go_on).
    pub(crate) fn stand_still(&self) {
        self.faults.open.forget_permits(Semaphore::MAX_PERMITS);
    }

    pub(crate) fn go_on(&self) {
        self.faults.open.add_permits(Semaphore::MAX_PERMITS);
    }

    /// Changes the bytes of a file behind everybody's back; `None` removes it.
    pub(crate) async fn spoil(&self, path: &str, change: impl FnOnce(Vec<u8>) -> Option<Vec<u8>>) {
        let path = Path::from(path);
        let bytes =
            self.memory.get(&path).await.expect("a file in memory").bytes().await.expect("a file in memory");
        match change(bytes.to_vec()) {
            Some(bytes) => drop(self.memory.put(&path, bytes.into()).await.expect("a file in memory")),
            None => self.memory.delete(&path).await.expect("a file in memory"),
        }
    }

    /// Returns every file with its bytes.
    pub(crate) async fn files(&self) -> Vec<(String, Bytes)> {
        let listed: Vec<_> = self.memory.list(None).try_collect().await.expect("a file in memory");
        let mut files = Vec::new();
        for ObjectMeta { location, .. } in listed {
            let bytes = self
                .memory
                .get(&location)
                .await
                .expect("a file in memory")
                .bytes()
                .await
                .expect("a file in memory");
            files.push((location.to_string(), bytes));
        }
        files.sort();
        files
    }
}

impl fmt::Display for Faulty {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("faulty")
    }
}

#[async_trait::async_trait]
impl ObjectStore for Faulty {
    async fn put_opts(&self, path: &Path, payload: PutPayload, options: PutOptions) -> Result<PutResult> {
        self.faults.write()?;
        self.memory.put_opts(path, payload, options).await
    }

    async fn put_multipart_opts(
        &self,
        path: &Path,
        options: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        let upload = self.memory.put_multipart_opts(path, options).await?;
        Ok(Box::new(FaultyUpload { upload, faults: self.faults.clone() }))
    }

    async fn get_opts(&self, path: &Path, options: GetOptions) -> Result<GetResult> {
        count_down(&self.faults.failing_reads)?;
        self.memory.get_opts(path, options).await
    }

    async fn get_ranges(&self, path: &Path, ranges: &[Range<u64>]) -> Result<Vec<Bytes>> {
        count_down(&self.faults.failing_reads)?;
        self.memory.get_ranges(path, ranges).await
    }

    fn delete_stream(&self, paths: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        self.memory.delete_stream(paths)
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        self.memory.list(prefix).boxed()
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.memory.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.memory.copy_opts(from, to, options).await
    }
}

#[derive(Debug)]
struct FaultyUpload {
    upload: Box<dyn MultipartUpload>,
    faults: Arc<Faults>,
}

#[async_trait::async_trait]
impl MultipartUpload for FaultyUpload {
    fn put_part(&mut self, payload: PutPayload) -> UploadPart {
        let (part, faults) = (self.upload.put_part(payload), self.faults.clone());
        async move {
            drop(faults.open.acquire().await);
            faults.write()?;
            part.await
        }
        .boxed()
    }

    async fn complete(&mut self) -> Result<PutResult> {
        self.upload.complete().await
    }

    async fn abort(&mut self) -> Result<()> {
        self.upload.abort().await
    }
}
