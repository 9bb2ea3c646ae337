//! A copy of a job's results at a URL, which stays when the machine of the user goes.

use std::fmt;
use std::path::{Path, PathBuf};

use bytes::Bytes;
use proto::checkpoint::Error as StoreError;
use store::{Folder, Stores};
use tokio::io::AsyncReadExt as _;

use super::{METRICS, SKIPPED, SUMMARY, TENSORBOARD, WORST, Written};
use crate::report::MODEL;
use crate::{Error, Result};

/// Parts of a file that are in flight at once.
const PARTS_MAX: usize = 4;

/// Bytes that are read from a file at once.
const READ_BYTES: usize = 1 << 20;

/// A folder of a store for the copy.
#[derive(Clone, Debug)]
pub struct Copy {
    stores: Stores,
    folder: Folder,
}

impl fmt::Display for Copy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.folder.fmt(f)
    }
}

impl Copy {
    /// Opens the folder, and finds out now, not after hours of training, whether it can be written.
    /// `replaces`: it may have results, which the copy replaces.
    ///
    /// # Errors
    /// The URL leads nowhere, the folder cannot be written, or has results that are to stay.
    pub async fn prepare(stores: &Stores, url: &str, replaces: bool) -> Result<Self> {
        let folder = stores.open(url)?;
        let copy = Self { stores: stores.clone(), folder };
        if !replaces {
            for file in [SUMMARY, METRICS, MODEL] {
                match copy.patiently(|| copy.folder.size(file)).await {
                    Ok(_) => return Err(Error::HasResults { file: copy.folder.shown(file) }),
                    Err(StoreError::Missing { .. }) => {}
                    Err(error) => return Err(error.into()),
                }
            }
        }
        copy.patiently(|| copy.folder.write("probe", Bytes::from_static(b"can this folder be written?")))
            .await?;
        copy.patiently(|| copy.folder.remove_file("probe")).await?;
        Ok(copy)
    }

    /// Copies the results, the model first and the summary last: a folder that has a summary is
    /// complete.
    ///
    /// # Errors
    /// A file cannot be read or written.
    pub async fn take(&self, written: &Written) -> Result<()> {
        let taken = self.files(written).await;
        taken.map_err(|source| Error::NotCopied {
            dir: written.dir.clone(),
            url: self.to_string(),
            source: Box::new(source),
        })
    }

    async fn files(&self, written: &Written) -> Result<()> {
        // Without it nobody takes results of an earlier job for those of this one.
        self.patiently(|| self.folder.remove_file(SUMMARY)).await?;
        // Those that not every job writes.
        for name in
            [SKIPPED, WORST].into_iter().filter(|&name| !written.files.iter().any(|file| file == name))
        {
            self.patiently(|| self.folder.remove_file(name)).await?;
        }
        let (folders, files): (Vec<_>, Vec<_>) =
            written.files.iter().filter(|name| *name != SUMMARY).partition(|name| *name == TENSORBOARD);
        for name in files {
            self.file(&self.folder, &written.dir.join(name), name).await?;
        }
        for name in folders {
            for path in files_of(&written.dir.join(name))? {
                let Some(file) = path.file_name().and_then(|file| file.to_str()) else { continue };
                self.file(&self.folder.below(name), &path, file).await?;
            }
        }
        self.file(&self.folder, &written.dir.join(SUMMARY), SUMMARY).await
    }

    async fn file(&self, folder: &Folder, path: &Path, name: &str) -> Result<()> {
        copy_whole(&self.stores, folder, path, name).await
    }

    async fn patiently<T, F: Future<Output = proto::checkpoint::Result<T>>>(
        &self,
        attempt: impl Fn() -> F,
    ) -> proto::checkpoint::Result<T> {
        self.stores.patiently(|_| {}, attempt).await
    }
}

/// Copies a file of the disk to a folder of a store. There it is whole, or it does not exist.
///
/// # Errors
/// The file cannot be read or written.
pub(crate) async fn copy_whole(stores: &Stores, folder: &Folder, path: &Path, name: &str) -> Result<()> {
    let retried = stores.patiently(
        |_| {},
        || async {
            // A file that cannot be read is no failure of the store, and no retry mends it.
            match upload(folder, path, name).await {
                Err(Error::Checkpoint(error)) => Err(error),
                other => Ok(other),
            }
        },
    );
    retried.await?
}

async fn upload(folder: &Folder, path: &Path, name: &str) -> Result<()> {
    let unread = super::file::file_error("read", path);
    let mut file = match tokio::fs::File::open(path).await {
        Ok(file) => file,
        Err(error) => return Err(unread(error)),
    };
    let mut upload = folder.upload(name).await?;
    loop {
        let mut piece = Vec::with_capacity(READ_BYTES);
        match (&mut file).take(READ_BYTES as u64).read_to_end(&mut piece).await {
            Ok(0) => return Ok(upload.finish().await?),
            Ok(_) => upload.put(piece.into(), PARTS_MAX).await?,
            Err(error) => {
                upload.abort().await;
                return Err(unread(error));
            }
        }
    }
}

/// Returns the files of a folder, sorted.
fn files_of(folder: &Path) -> Result<Vec<PathBuf>> {
    let unread = |source| super::file::file_error("read", folder)(source);
    let entries = std::fs::read_dir(folder).map_err(unread)?;
    let mut files: Vec<_> = entries.map(|entry| Ok(entry.map_err(unread)?.path())).collect::<Result<_>>()?;
    files.retain(|path| path.is_file());
    files.sort();
    Ok(files)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    /// Returns a folder of results, and what is written in it.
    fn results() -> (tempfile::TempDir, Written) {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join(TENSORBOARD)).unwrap();
        for (name, content) in [(MODEL, "weights"), (METRICS, "{}\n"), (SUMMARY, "{}"), ("notes.txt", "mine")]
        {
            fs::write(dir.path().join(name), content).unwrap();
        }
        fs::write(dir.path().join(TENSORBOARD).join("events"), "").unwrap();
        let files = [MODEL, METRICS, SUMMARY, TENSORBOARD].map(str::to_owned).to_vec();
        let written = Written { dir: dir.path().to_owned(), files, copy: None };
        (dir, written)
    }

    #[tokio::test]
    async fn a_copy_has_the_results_and_nothing_else() {
        let ((_dir, written), stores) = (results(), Stores::default());
        let copy = Copy::prepare(&stores, "memory://results/one", false).await.unwrap();
        assert_eq!(copy.folder.list().await.unwrap(), [""; 0], "nothing stays of the preparation");
        copy.take(&written).await.unwrap();
        let mut names = copy.folder.list().await.unwrap();
        names.sort();
        assert_eq!(names, [METRICS, MODEL, SUMMARY, TENSORBOARD]);
        assert_eq!(copy.folder.read(MODEL, 100).await.unwrap(), "weights");
        assert_eq!(copy.folder.below(TENSORBOARD).size("events").await.unwrap(), 0);
    }

    #[tokio::test]
    async fn results_of_an_earlier_job_stay_unless_it_goes_on() {
        let ((_dir, written), stores) = (results(), Stores::default());
        let url = "memory://results/two";
        Copy::prepare(&stores, url, false).await.unwrap().take(&written).await.unwrap();
        let error = Copy::prepare(&stores, url, false).await.unwrap_err().to_string();
        assert!(
            error.contains("memory://results/two/summary.json") && error.contains("choose another"),
            "{error}"
        );
        let again = Copy::prepare(&stores, url, true).await.unwrap();
        fs::write(written.dir.join(MODEL), "more weights").unwrap();
        again.take(&written).await.unwrap();
        assert_eq!(again.folder.read(MODEL, 100).await.unwrap(), "more weights");
    }

    #[tokio::test]
    async fn a_copy_that_lacks_a_file_has_no_summary() {
        let ((_dir, written), stores) = (results(), Stores::default());
        let copy = Copy::prepare(&stores, "memory://results/three", false).await.unwrap();
        fs::remove_file(written.dir.join(METRICS)).unwrap();
        let error = copy.take(&written).await.unwrap_err();
        assert!(error.to_string().contains("their copy at memory://results/three is not"), "{error}");
        let cause = std::error::Error::source(&error).unwrap().to_string();
        assert!(cause.contains("cannot read") && cause.contains(METRICS), "{cause}");
        assert!(matches!(copy.folder.size(SUMMARY).await, Err(StoreError::Missing { .. })));
    }

    #[tokio::test]
    async fn a_url_that_leads_nowhere_is_refused_before_the_job() {
        for url in ["ftp://host/results", "results"] {
            assert!(Copy::prepare(&Stores::default(), url, false).await.is_err(), "{url}");
        }
    }
}
