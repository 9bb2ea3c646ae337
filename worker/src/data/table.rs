//! The records of one file (pair): features and labels side by side.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use flate2::read::MultiGzDecoder;
use proto::pb::Phase;
use proto::spec::{DataSpec, FilesSpec, Format};

use super::array::Array;
use super::cache::{self, Key, Stamp};
use super::{Content, csv, idx, npy, wrong};
use crate::error::{Error, Result};
use crate::progress::Progress;

/// What is read of a file at once.
const PIECE_BYTES: u64 = 4 << 20;

/// As many features as labels; a record has at least one value of each.
#[derive(Debug)]
pub(super) struct Table {
    /// The file of features, for errors.
    pub(super) path: PathBuf,
    pub(super) features: Array,
    pub(super) labels: Array,
    /// What tells its content from another's.
    pub(super) content: Content,
    /// The file of labels.
    labels_path: PathBuf,
}

impl Table {
    /// Reads file (pair) number `file` of `files`, or finds it in memory.
    ///
    /// # Errors
    /// A file is missing, is not what the format says, or does not fit its partner.
    pub(super) fn open(
        spec: &DataSpec,
        files: &FilesSpec,
        file: usize,
        root: Option<&Path>,
        progress: &Progress,
    ) -> Result<Arc<Self>> {
        let locate = |list: &[String]| list.get(file).map(|name| spec.locate(name, root));
        let Some(features) = locate(&files.features) else {
            let reason = format!("the job has {} such files, none has number {file}", files.features.len());
            return Err(Error::Engine { what: "data files".to_owned(), reason });
        };
        let labels = locate(&files.labels);
        // Another worker of this process may be reading it already.
        progress.enter(Phase::Reading, features.display().to_string());
        let stamps = [Some(&features), labels.as_ref()].into_iter().flatten().map(|path| Stamp::of(path));
        let key = Key {
            format: spec.format,
            columns: (spec.label.clone(), spec.header),
            files: stamps.collect::<Result<_>>()?,
        };
        cache::get(key, || Self::load(spec, features, labels, progress))
    }

    fn load(spec: &DataSpec, path: PathBuf, labels: Option<PathBuf>, progress: &Progress) -> Result<Self> {
        let bytes = unpacked(&path, progress)?;
        let content = Content::default().and(&bytes);
        let read = match spec.format {
            Format::Idx => idx::read,
            Format::Npy => npy::read,
            Format::Csv => {
                let (features, labels) = csv::read(&path, &bytes, spec.label.as_deref(), spec.header)?;
                return Self::new(path.clone(), features, path, labels, content);
            }
        };
        let features = read(&path, bytes)?;
        let Some(labels_path) = labels else {
            return wrong(&path, "has no file of labels beside it; name one for it in `labels`");
        };
        let bytes = unpacked(&labels_path, progress)?;
        let content = content.and(&bytes);
        let labels = read(&labels_path, bytes)?;
        Self::new(path, features, labels_path, labels, content)
    }

    fn new(
        path: PathBuf,
        features: Array,
        labels_path: PathBuf,
        labels: Array,
        content: Content,
    ) -> Result<Self> {
        if features.width() == 0 {
            return wrong(&path, format!("a record of shape {:?} has no values", features.record_shape()));
        }
        if features.records() != labels.records() {
            return wrong(
                &labels_path,
                format!(
                    "{} labels for the {} records of {}; the two files belong to different data",
                    labels.records(),
                    features.records(),
                    path.display()
                ),
            );
        }
        Ok(Self { path, features, labels, content, labels_path })
    }

    /// Checks that every label is one class number, and answers the smallest and the largest; `None` without records.
    ///
    /// # Errors
    /// Several labels a record, or one that is no whole number.
    pub(super) fn classes(&self) -> Result<Option<(i64, i64)>> {
        self.label_width(Some(1))?;
        let mut range = None;
        for record in 0..self.labels.records() {
            let mut label = [0.0];
            self.labels.read(record, &mut label, |value| value);
            let class = label[0] as i64;
            if class as f64 != label[0] {
                return wrong(
                    &self.labels_path,
                    format!(
                        "label {} of record {record} is no class number; mend it, or use a loss on values such as mse",
                        label[0]
                    ),
                );
            }
            let (min, max) = range.unwrap_or((class, class));
            range = Some((class.min(min), class.max(max)));
        }
        Ok(range)
    }

    /// Values of one record's label.
    ///
    /// # Errors
    /// There are not `expected`.
    pub(super) fn label_width(&self, expected: Option<usize>) -> Result<usize> {
        let found = self.labels.width();
        if found == 0 || expected.is_some_and(|expected| expected != found) {
            let expected = expected.map_or("1 or more".to_owned(), |width| width.to_string());
            let shape = self.labels.record_shape();
            return wrong(
                &self.labels_path,
                format!(
                    "a label has shape {shape:?}, {found} values, expected {expected}; are features and labels swapped?"
                ),
            );
        }
        Ok(found)
    }
}

/// A file's content. Says at each piece that it gets on.
fn read(path: &Path, progress: &Progress) -> std::io::Result<Vec<u8>> {
    let mut file = std::fs::File::open(path)?;
    let mut bytes = Vec::with_capacity(usize::try_from(file.metadata()?.len()).unwrap_or(0));
    while file.by_ref().take(PIECE_BYTES).read_to_end(&mut bytes)? > 0 {
        progress.advance();
    }
    Ok(bytes)
}

/// A file's content, decompressed when it starts with gzip's magic, whatever its name.
fn unpacked(path: &Path, progress: &Progress) -> Result<Vec<u8>> {
    progress.enter(Phase::Reading, path.display().to_string());
    let bytes = read(path, progress).map_err(|source| Error::File { path: path.to_owned(), source })?;
    if !bytes.starts_with(&[0x1F, 0x8B]) {
        return Ok(bytes);
    }
    let mut plain = Vec::new();
    match MultiGzDecoder::new(bytes.as_slice()).read_to_end(&mut plain) {
        Ok(_) => Ok(plain),
        Err(error) => wrong(path, format!("damaged gzip: {error}; copy or download it again")),
    }
}
