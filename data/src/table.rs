//! The records of one file (pair): features and labels.

use std::io::Read;
use std::path::{Path, PathBuf};

use flate2::read::MultiGzDecoder;
use proto::spec::{DataSpec, Format};

use crate::array::Array;
use crate::error::{Error, Result, wrong};
use crate::observer::Observer;
use crate::{csv, idx, npy};

/// Bytes that are read from a file at once.
const PIECE_BYTES: u64 = 4 << 20;

/// Identity of the content of one file (pair): the features, then the labels, without compression.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Content {
    /// Size in bytes.
    pub bytes: u64,
    /// CRC-32C of the bytes.
    pub crc32c: u32,
}

impl Content {
    fn and(self, bytes: &[u8]) -> Self {
        Self { bytes: self.bytes + bytes.len() as u64, crc32c: crc32c::crc32c_append(self.crc32c, bytes) }
    }
}

/// The records of a file (pair). It has as many features as labels, and at least one value of each
/// in a record.
#[derive(Debug)]
pub(crate) struct Table {
    /// Path of the file of features, for errors.
    pub(crate) path: PathBuf,
    pub(crate) features: Array,
    pub(crate) labels: Array,
    /// Identity of the content.
    pub(crate) content: Content,
    /// Path of the file of labels.
    labels_path: PathBuf,
}

impl Table {
    /// Reads the file of features at `path`, and the file of labels. A CSV file has both.
    ///
    /// # Errors
    /// A file is missing, malformed, or does not fit its partner.
    pub(crate) fn load(
        spec: &DataSpec,
        path: PathBuf,
        labels: Option<PathBuf>,
        observer: &dyn Observer,
    ) -> Result<Self> {
        let bytes = unpacked(&path, observer)?;
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
        let bytes = unpacked(&labels_path, observer)?;
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

    /// Checks that every label is one class number. Returns the smallest and the largest class, or
    /// `None` without records.
    ///
    /// # Errors
    /// A record has several labels, or a label is no whole number.
    pub(crate) fn classes(&self) -> Result<Option<(i64, i64)>> {
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

    /// Returns the number of values of one record's label.
    ///
    /// # Errors
    /// It is not `expected`.
    pub(crate) fn label_width(&self, expected: Option<usize>) -> Result<usize> {
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

    /// Returns the shape of one record's features: `wanted`, or the file's own.
    ///
    /// # Errors
    /// A record has another number of values than `wanted`.
    pub(crate) fn shape(&self, wanted: Option<&[usize]>) -> Result<Vec<usize>> {
        let found = self.features.record_shape();
        let Some(shape) = wanted else { return Ok(found.to_vec()) };
        let values = shape.iter().try_fold(1usize, |values, &size| values.checked_mul(size));
        if values != Some(self.features.width()) {
            return wrong(
                &self.path,
                format!(
                    "records of shape {found:?}, {} values, cannot be given data.shape = {shape:?}",
                    self.features.width()
                ),
            );
        }
        Ok(shape.to_vec())
    }
}

/// Reads a file, and reports each piece to `observer`.
fn read(path: &Path, observer: &dyn Observer) -> std::io::Result<Vec<u8>> {
    let mut file = std::fs::File::open(path)?;
    let mut bytes = Vec::with_capacity(usize::try_from(file.metadata()?.len()).unwrap_or(0));
    while file.by_ref().take(PIECE_BYTES).read_to_end(&mut bytes)? > 0 {
        observer.advance();
    }
    Ok(bytes)
}

/// Reads a file, and decompresses it if it starts with gzip's magic bytes, whatever its name.
fn unpacked(path: &Path, observer: &dyn Observer) -> Result<Vec<u8>> {
    observer.open(path);
    let bytes = read(path, observer).map_err(|source| Error::File { path: path.to_owned(), source })?;
    if !bytes.starts_with(&[0x1F, 0x8B]) {
        return Ok(bytes);
    }
    let mut plain = Vec::new();
    match MultiGzDecoder::new(bytes.as_slice()).read_to_end(&mut plain) {
        Ok(_) => Ok(plain),
        Err(error) => wrong(path, format!("damaged gzip: {error}; copy or download it again")),
    }
}
