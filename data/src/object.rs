//! A data file: its bytes, its place for errors, and the state in which it was opened.
//!
//! A plain file is mapped into memory, so the process holds only what it reads, and the system may
//! take that back. A compressed file is unpacked into memory as a whole.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use bytes::Bytes;
use flate2::read::MultiGzDecoder;
use memmap2::Mmap;

use crate::column::FileBytes;
use crate::error::{Error, Result, malformed, wrong};
use crate::observer::Observer;

/// Bytes that are read from a file at once.
const PIECE_BYTES: usize = 4 << 20;

/// First bytes of a gzip file and of a Zstandard frame.
const GZIP: [u8; 2] = [0x1F, 0x8B];
const ZSTD: [u8; 4] = [0x28, 0xB5, 0x2F, 0xFD];

/// Identity of the content of one group of files: all bytes, without compression, in the order of
/// the lists' names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Content {
    /// Size in bytes.
    pub bytes: u64,
    /// CRC-32C of the bytes.
    pub crc32c: u32,
}

/// State of a file at one moment. Files of equal stamps have equal content.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Stamp {
    pub(crate) path: PathBuf,
    bytes: u64,
    modified: Option<SystemTime>,
}

impl Stamp {
    /// Looks at a file.
    ///
    /// # Errors
    /// The file is missing.
    pub(crate) fn of(path: &Path) -> Result<Self> {
        let file = |source| Error::File { path: path.to_owned(), source };
        let metadata = path.metadata().map_err(file)?;
        let path = path.canonicalize().map_err(file)?;
        Ok(Self { path, bytes: metadata.len(), modified: metadata.modified().ok() })
    }
}

/// A file that is open.
#[derive(Clone, Debug)]
pub(crate) struct Object {
    path: PathBuf,
    bytes: Arc<dyn FileBytes>,
    /// The file, if it is mapped. Otherwise the process has a copy.
    mapped: Option<Arc<Opened>>,
}

/// A mapped file, and its state when it was mapped.
#[derive(Debug)]
struct Opened {
    file: File,
    bytes: u64,
    modified: Option<SystemTime>,
}

/// A mapped file.
#[derive(Debug)]
struct Mapped(Mmap);

impl FileBytes for Mapped {
    fn bytes(&self) -> &[u8] {
        &self.0
    }
}

/// Bytes of a file that outlive their reader.
struct Owner(Arc<dyn FileBytes>);

impl AsRef<[u8]> for Owner {
    fn as_ref(&self) -> &[u8] {
        self.0.bytes()
    }
}

impl Object {
    /// Opens a file. Unpacks it if it starts with the first bytes of gzip or Zstandard, whatever
    /// its name, and reports the progress to `observer`. The call blocks.
    ///
    /// # Errors
    /// The file is missing or cannot be read, or its compression is damaged.
    pub(crate) fn open(path: &Path, observer: &dyn Observer) -> Result<Self> {
        observer.open(path);
        let failed = |source| Error::File { path: path.to_owned(), source };
        let mut file = File::open(path).map_err(failed)?;
        let metadata = file.metadata().map_err(failed)?;
        // A pipe or a device has no bytes to map.
        if !metadata.is_file() || metadata.len() == 0 {
            let mut bytes = Vec::new();
            while file.by_ref().take(PIECE_BYTES as u64).read_to_end(&mut bytes).map_err(failed)? > 0 {
                observer.advance();
            }
            return Self::unpacked(path, &bytes, observer)?.map_or_else(|| Ok(Self::copy(path, bytes)), Ok);
        }
        #[expect(unsafe_code, reason = "maps a file")]
        // SAFETY: bytes that another process changes meanwhile are wrong values, and `check` finds
        // such changes. No value of a type with invalid bit patterns is made of them.
        let mapped = unsafe { Mmap::map(&file) }.map_err(failed)?;
        match Self::unpacked(path, &mapped, observer)? {
            Some(object) => Ok(object),
            None => {
                let opened = Opened { bytes: metadata.len(), modified: metadata.modified().ok(), file };
                let bytes = Arc::new(Mapped(mapped));
                Ok(Self { path: path.to_owned(), bytes, mapped: Some(Arc::new(opened)) })
            }
        }
    }

    /// Returns the object of a file's bytes, which are unpacked like those of a file.
    ///
    /// # Errors
    /// The compression is damaged.
    pub(crate) fn of(path: &Path, bytes: &[u8]) -> Result<Self> {
        let unpacked = Self::unpacked(path, bytes, &())?;
        Ok(unpacked.unwrap_or_else(|| Self::copy(path, bytes.to_vec())))
    }

    /// Returns the object of a file's bytes.
    pub(crate) fn copy(path: &Path, bytes: Vec<u8>) -> Self {
        Self { path: path.to_owned(), bytes: Arc::new(bytes), mapped: None }
    }

    fn unpacked(path: &Path, packed: &[u8], observer: &dyn Observer) -> Result<Option<Self>> {
        let damaged = |what: &str, error: &std::io::Error| {
            malformed(path, format!("damaged {what}: {error}; copy or download it again"))
        };
        let (what, mut reader): (_, Box<dyn Read + '_>) = if packed.starts_with(&GZIP) {
            ("gzip", Box::new(MultiGzDecoder::new(packed)))
        } else if packed.starts_with(&ZSTD) {
            let reader = zstd::stream::read::Decoder::new(packed);
            ("Zstandard", Box::new(reader.map_err(|error| damaged("Zstandard", &error))?))
        } else {
            return Ok(None);
        };
        let mut plain = Vec::new();
        while reader
            .by_ref()
            .take(PIECE_BYTES as u64)
            .read_to_end(&mut plain)
            .map_err(|error| damaged(what, &error))?
            > 0
        {
            observer.advance();
        }
        Ok(Some(Self::copy(path, plain)))
    }

    /// Returns the path, for errors.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the bytes without compression.
    pub(crate) fn bytes(&self) -> &[u8] {
        self.bytes.bytes()
    }

    /// Returns the bytes for values that stay where they are.
    pub(crate) fn share(&self) -> Arc<dyn FileBytes> {
        self.bytes.clone()
    }

    /// Returns the bytes for decoders that keep parts of them.
    pub(crate) fn buffer(&self) -> Bytes {
        Bytes::from_owner(Owner(self.share()))
    }

    /// Checks that nobody has written to a mapped file since it was opened. A file that was removed
    /// or replaced stays as it was for those who have it open.
    ///
    /// # Errors
    /// Somebody has.
    pub(crate) fn check(&self) -> Result<()> {
        let Some(Opened { file, bytes, modified }) = self.mapped.as_deref() else { return Ok(()) };
        let same = |now: std::fs::Metadata| (now.len(), now.modified().ok()) == (*bytes, *modified);
        if file.metadata().is_ok_and(same) {
            return Ok(());
        }
        wrong(
            &self.path,
            "the file has changed since this worker opened it, so its records may be others; restore it, or submit \
             the job anew",
        )
    }

    /// Adds this content to `content`, piece by piece.
    pub(crate) fn hash(&self, content: Content, observer: &dyn Observer) -> Content {
        self.bytes().chunks(PIECE_BYTES).fold(content, |Content { bytes, crc32c }, piece| {
            observer.advance();
            Content { bytes: bytes + piece.len() as u64, crc32c: crc32c::crc32c_append(crc32c, piece) }
        })
    }
}
