//! A data file: its bytes, its place for errors, and the state in which it was opened.
//!
//! | file | its bytes |
//! | --- | --- |
//! | local | mapped into memory |
//! | on another machine | fetched part by part (`remote.rs`) |
//! | folder of images | each image by itself (`folder.rs`) |
//! | compressed | unpacked piece by piece, or in memory as a whole (`packed.rs`) |
//! | on a server that gives no parts | in memory as a whole (`room.rs`) |
//!
//! Of a mapped file the process holds only what it reads, and the system may take that back.

use std::fs::File;
use std::io::{self, BufRead, Read};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::SystemTime;

use bytes::Bytes;
use memmap2::{Advice, Mmap};
use proto::spec::Format;

use crate::column::{Aligned, FileBytes, Memory};
use crate::error::{Error, Result, wrong};
use crate::folder::Folder;
use crate::observer::Observer;
use crate::packed::{self, Access, Packed};
use crate::remote::{self, Remote};
use crate::room::{self, Held, Whole};
use crate::version;

/// Bytes that are read from a file at once.
const PIECE_BYTES: usize = 4 << 20;

/// Most bytes of a file on another machine that a reader fetches at once.
const WINDOW_BYTES: usize = 8 << 20;

/// Bytes of the first parts of a file that are read at once.
const SHORT_BYTES: usize = 256 << 10;

/// Identity of the content of one group of files: all bytes, without compression, in the order of
/// the lists' names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Content {
    /// Size in bytes.
    pub bytes: u64,
    /// CRC-32C of the bytes.
    pub crc32c: u32,
}

impl Content {
    /// Adds the bytes that follow.
    pub(crate) fn add(&mut self, bytes: &[u8]) {
        self.bytes += bytes.len() as u64;
        self.crc32c = crc32c::crc32c_append(self.crc32c, bytes);
    }

    /// Returns the identity of this content and of another one behind it.
    pub(crate) fn followed_by(self, other: Self) -> Self {
        Self {
            bytes: self.bytes + other.bytes,
            crc32c: crc32c::crc32c_combine(self.crc32c, other.crc32c, other.bytes as usize),
        }
    }
}

/// Returns the bytes of a file on another machine that a reader fetches at once: whole pieces, if
/// one fits into memory.
fn window_bytes() -> usize {
    let (piece, most) = (remote::PIECE_BYTES as usize, room::bytes_max());
    let most = usize::try_from(most).unwrap_or(WINDOW_BYTES).min(WINDOW_BYTES);
    if most > piece { most - most % piece } else { most }
}

/// State of a file at one moment. Files of equal stamps have equal content.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Stamp {
    pub(crate) path: PathBuf,
    bytes: u64,
    modified: Option<SystemTime>,
    /// Whether it is a plain file of this machine.
    is_file: bool,
    /// A file on another machine.
    remote: Option<Arc<Remote>>,
    /// A folder of images in an object store.
    folder: Option<Arc<Folder>>,
}

impl Stamp {
    /// Looks at a file, or at a folder of images. Nothing is behind the name of record numbers.
    /// Reports the progress to `observer`. The call blocks.
    ///
    /// # Errors
    /// The file is missing, or its server does not say what it has.
    pub(crate) fn of(path: &Path, format: Format, observer: &dyn Observer) -> Result<Self> {
        let path_of = path.to_owned();
        let stamp =
            Self { path: path_of, bytes: 0, modified: None, is_file: false, remote: None, folder: None };
        match (remote::url(path), format) {
            (_, Format::Index) => Ok(stamp),
            (Some(_), Format::Images) => {
                let folder = Folder::open(path, observer)?;
                Ok(Self { folder: Some(Arc::new(folder)), ..stamp })
            }
            (Some(url), _) => Ok(Self { remote: Some(Arc::new(Remote::open(url)?)), ..stamp }),
            (None, _) => {
                let file = |source| Error::File { path: path.to_owned(), source };
                let metadata = path.metadata().map_err(file)?;
                let path = path.canonicalize().map_err(file)?;
                let (bytes, modified) = (metadata.len(), metadata.modified().ok());
                Ok(Self { path, bytes, modified, is_file: metadata.is_file(), ..stamp })
            }
        }
    }

    /// Returns whether the file is on another machine.
    pub(crate) const fn is_remote(&self) -> bool {
        self.remote.is_some()
    }

    /// Returns the state of the file as a text: its size, and its version or the time of its
    /// modification. `None`: nothing but its size is known, or it is a folder or no file at all.
    pub(crate) fn state(&self) -> Option<String> {
        if let Some(remote) = &self.remote {
            let state = remote.state();
            return Some(format!("{}#{}", state.bytes, state.version()))
                .filter(|_| !state.version().is_empty());
        }
        let since = self.modified?.duration_since(SystemTime::UNIX_EPOCH).ok()?;
        // The time of a folder says nothing of the files in it.
        self.is_file.then(|| format!("{}@{}.{:09}", self.bytes, since.as_secs(), since.subsec_nanos()))
    }

    /// Opens the file or folder that the stamp was made of. A file on another machine is not looked
    /// at a second time.
    ///
    /// # Errors
    /// Those of [`Object::open`] and [`Folder::open`].
    pub(crate) fn object(
        &self,
        path: &Path,
        format: Format,
        access: Access,
        observer: &dyn Observer,
    ) -> Result<Object> {
        match (&self.folder, &self.remote, format) {
            (Some(folder), ..) => Ok(Object::of_folder(folder.clone())),
            (None, Some(remote), _) => Object::open_remote(path, remote, access, observer),
            (None, None, Format::Index) => Ok(Object::copy(path, Vec::new())),
            (None, None, Format::Images) => Ok(Object::of_folder(Folder::open(path, observer)?.into())),
            (None, None, _) => Object::open(path, access, observer),
        }
    }
}

/// A file that is open.
#[derive(Clone, Debug)]
pub(crate) struct Object {
    path: PathBuf,
    place: Place,
    /// See [`version`](Self::version).
    version: String,
}

/// Where the bytes of a file are.
#[derive(Clone, Debug)]
enum Place {
    /// In the memory of this process.
    Here {
        bytes: Arc<dyn FileBytes>,
        /// These bytes again, for parts of them.
        shared: Bytes,
        /// The file, if it is mapped. Otherwise the process has a copy.
        mapped: Option<Arc<Opened>>,
    },
    Remote {
        file: Arc<Remote>,
        access: Access,
    },
    Packed(Arc<Packed>),
    /// A folder of images has no bytes of its own.
    Folder(Arc<Folder>),
}

/// A mapped file, and its state when it was mapped.
#[derive(Debug)]
struct Opened {
    file: File,
    bytes: u64,
    modified: Option<SystemTime>,
    /// Whether its blocks are read, in any order.
    is_in_blocks: AtomicBool,
}

/// A mapped file.
#[derive(Debug)]
struct Mapped(Mmap);

impl FileBytes for Mapped {
    fn bytes(&self) -> &[u8] {
        &self.0
    }

    fn expect_parts(&self) {
        // A system that refuses reads more than it has to.
        drop(self.0.advise(Advice::Random));
    }

    fn expect(&self, range: Range<usize>) {
        // The bytes are read when they are used, at the latest.
        drop(self.0.advise_range(Advice::WillNeed, range.start, range.len()));
    }
}

impl FileBytes for Bytes {
    fn bytes(&self) -> &[u8] {
        self
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
    /// The file is missing or cannot be read, its compression is damaged, or it is too large
    /// without compression.
    pub(crate) fn open(path: &Path, access: Access, observer: &dyn Observer) -> Result<Self> {
        observer.open(path);
        if let Some(url) = remote::url(path) {
            return Self::open_remote(path, &Remote::open(url)?.into(), access, observer);
        }
        let failed = |source| Error::File { path: path.to_owned(), source };
        let mut file = File::open(path).map_err(failed)?;
        let metadata = file.metadata().map_err(failed)?;
        // A pipe or a device has no bytes to map.
        if !metadata.is_file() || metadata.len() == 0 {
            let (mut bytes, mut held) = (Vec::new(), Held::default());
            loop {
                let piece = file.by_ref().take(PIECE_BYTES as u64).read_to_end(&mut bytes);
                match piece.map_err(failed)? {
                    0 => return packed::unpacked(Self::whole(path, bytes, held), access, observer),
                    more => held.grow(more as u64).map_err(|full| full.at(path, "it cannot be mapped"))?,
                }
                observer.advance();
            }
        }
        #[expect(unsafe_code, reason = "maps a file")]
        // SAFETY: bytes that another process changes meanwhile are wrong values, and `check` finds
        // such changes. No value of a type with invalid bit patterns is made of them.
        let mapped = unsafe { Mmap::map(&file) }.map_err(failed)?;
        let opened = Opened {
            bytes: metadata.len(),
            modified: metadata.modified().ok(),
            file,
            is_in_blocks: AtomicBool::new(false),
        };
        let version = opened.modified.and_then(version::of_local).unwrap_or_default();
        let object = Self::here(path, Arc::new(Mapped(mapped)), Some(Arc::new(opened)));
        Ok(Self { version, ..packed::unpacked(object, access, observer)? })
    }

    /// Opens a file on another machine.
    ///
    /// # Errors
    /// Those of [`open`](Self::open).
    pub(crate) fn open_remote(
        path: &Path,
        remote: &Arc<Remote>,
        access: Access,
        observer: &dyn Observer,
    ) -> Result<Self> {
        let version = remote.state().version();
        let object = if remote.state().has_ranges {
            Self::of_remote(path, remote, access)
        } else {
            let bytes_max = room::bytes_max();
            let bytes = remote.state().bytes;
            let held = match bytes <= bytes_max {
                true => Held::of(bytes).map_err(|full| full.at(path, "its server gives no parts of it"))?,
                // Refused with its own message.
                false => Held::default(),
            };
            Self::whole(path, remote.whole(bytes_max)?, held)
        };
        let object = Self { version, ..packed::unpacked(object, access, observer)? };
        if object.is_here() {
            // Nobody reads the bytes with compression again.
            remote.forget();
        }
        Ok(object)
    }

    /// Returns the bytes of a file on another machine, as its server gives them.
    pub(crate) fn of_remote(path: &Path, remote: &Arc<Remote>, access: Access) -> Self {
        let place = Place::Remote { file: remote.clone(), access };
        Self { path: path.to_owned(), place, version: String::new() }
    }

    /// Returns a folder of images as the file of its records.
    pub(crate) fn of_folder(folder: Arc<Folder>) -> Self {
        let (path, version) = (folder.path().to_owned(), folder.version());
        Self { path, place: Place::Folder(folder), version }
    }

    /// Returns the folder of images, which is opened if the file is any other.
    ///
    /// # Errors
    /// Those of [`Folder::open`].
    pub(crate) fn folder(&self, observer: &dyn Observer) -> Result<Arc<Folder>> {
        match &self.place {
            Place::Folder(folder) => Ok(folder.clone()),
            Place::Here { .. } | Place::Remote { .. } | Place::Packed(_) => {
                Ok(Folder::open(&self.path, observer)?.into())
            }
        }
    }

    /// Returns the object of a file's bytes, which are unpacked like those of a file.
    ///
    /// # Errors
    /// The compression is damaged, or the bytes are too many without it.
    pub(crate) fn of(path: &Path, bytes: &[u8]) -> Result<Self> {
        packed::unpacked(Self::copy(path, bytes.to_vec()), Access::Anywhere, &())
    }

    /// Returns the object of a file's bytes.
    pub(crate) fn copy(path: &Path, bytes: Vec<u8>) -> Self {
        Self::here(path, Arc::new(bytes), None)
    }

    /// Returns the object of a file's bytes, which have their place in the room.
    pub(crate) fn whole(path: &Path, bytes: impl FileBytes + 'static, held: Held) -> Self {
        Self::here(path, Arc::new(Whole::new(bytes, held)), None)
    }

    fn here(path: &Path, bytes: Arc<dyn FileBytes>, mapped: Option<Arc<Opened>>) -> Self {
        let shared = Bytes::from_owner(Owner(bytes.clone()));
        Self { path: path.to_owned(), place: Place::Here { bytes, shared, mapped }, version: String::new() }
    }

    /// Returns the object of a compressed file that is read in sequence.
    pub(crate) fn of_packed(packed: Arc<Packed>) -> Self {
        let path = packed.file().path().to_owned();
        Self { path, place: Place::Packed(packed), version: String::new() }
    }

    /// Returns the path, for errors.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the number of bytes, without compression.
    pub(crate) fn len(&self) -> usize {
        match &self.place {
            Place::Here { shared, .. } => shared.len(),
            Place::Remote { file, .. } => file.state().bytes as usize,
            Place::Packed(packed) => packed.len(),
            Place::Folder(_) => 0,
        }
    }

    /// Returns whether all bytes are in the memory of this process, so that parts of them cost
    /// nothing.
    pub(crate) const fn is_here(&self) -> bool {
        matches!(self.place, Place::Here { .. })
    }

    /// Returns the order in which records of a file on another machine are read. `None`: it is not
    /// there.
    pub(crate) const fn remote_access(&self) -> Option<Access> {
        match &self.place {
            Place::Remote { access, .. } => Some(*access),
            Place::Here { .. } | Place::Packed(_) | Place::Folder(_) => None,
        }
    }

    /// Returns the bytes that [`slice`](Self::slice) fetches at once for any part of the file. 0:
    /// only the part.
    pub(crate) const fn piece_bytes(&self) -> u64 {
        match &self.place {
            Place::Remote { .. } => remote::PIECE_BYTES,
            Place::Here { .. } | Place::Packed(_) | Place::Folder(_) => 0,
        }
    }

    /// Returns whether the file is compressed and its bytes are unpacked piece by piece.
    pub(crate) const fn is_packed(&self) -> bool {
        matches!(self.place, Place::Packed(_))
    }

    /// Returns the text that tells this content from another one of the same size, see
    /// [`version`](crate::version). Empty: there is none.
    pub(crate) fn version(&self) -> &str {
        &self.version
    }

    /// Returns a part of the bytes. It copies none that are in memory.
    ///
    /// # Errors
    /// The file ends before the part does, has changed since it was opened, or cannot be read.
    pub(crate) fn slice(&self, range: Range<usize>) -> Result<Bytes> {
        if range.start > range.end || range.end > self.len() {
            return wrong(
                &self.path,
                format!(
                    "it has {} bytes and should have bytes {range:?}; it is damaged, copy it again",
                    self.len()
                ),
            );
        }
        match &self.place {
            Place::Here { shared, .. } => Ok(shared.slice(range)),
            Place::Remote { file, .. } => file.read(range.start as u64..range.end as u64),
            Place::Packed(packed) => packed.read(range),
            // The range is empty.
            Place::Folder(_) => Ok(Bytes::new()),
        }
    }

    /// Says that blocks of the file are read from now on, in any order. From then on the system
    /// reads from a disk what [`slice_to_keep`](Self::slice_to_keep) is asked for, and nothing that
    /// lies around it.
    pub(crate) fn read_in_blocks(&self) {
        if let Place::Here { bytes, mapped: Some(opened), .. } = &self.place
            && !opened.is_in_blocks.swap(true, Ordering::Relaxed)
        {
            bytes.expect_parts();
        }
    }

    /// Begins to read a part of a file from the disk whose blocks are read.
    fn expect(&self, range: Range<usize>) {
        if let Place::Here { bytes, mapped: Some(opened), .. } = &self.place
            && opened.is_in_blocks.load(Ordering::Relaxed)
            && range.start < range.end
            && range.end <= self.len()
        {
            bytes.expect(range);
        }
    }

    /// Returns a part of the bytes of which the caller keeps its own form. What other machines send
    /// is not kept beside it.
    ///
    /// # Errors
    /// Those of [`slice`](Self::slice).
    pub(crate) fn slice_to_keep(&self, range: Range<usize>) -> Result<Bytes> {
        match &self.place {
            Place::Remote { file, .. } if range.start <= range.end && range.end <= self.len() => {
                file.read_to_keep(range.start as u64..range.end as u64)
            }
            _ => {
                self.expect(range.clone());
                self.slice(range)
            }
        }
    }

    /// Returns a part of the bytes for values that stay where they are. Those that are in no memory
    /// are copied, because a column's memory is aligned.
    ///
    /// # Errors
    /// Those of [`slice`](Self::slice).
    pub(crate) fn memory(&self, range: Range<usize>) -> Result<Memory> {
        let part = self.slice_to_keep(range.clone())?;
        Ok(match &self.place {
            Place::Here { bytes, .. } => Memory::File { bytes: bytes.clone(), range },
            Place::Remote { .. } | Place::Packed(_) | Place::Folder(_) => {
                let mut own = Aligned::with_capacity(part.len());
                own.extend(&part);
                Memory::Owned(own)
            }
        })
    }

    /// Returns the end of the bytes from `at` on that a reader takes at once.
    fn window_end(&self, at: usize) -> usize {
        match &self.place {
            Place::Here { .. } | Place::Folder(_) => self.len(),
            Place::Remote { .. } => self.len().min(at.saturating_add(window_bytes())),
            // A part of one piece is not copied.
            Place::Packed(packed) => packed.len().min((at / packed::PIECE_BYTES + 1) * packed::PIECE_BYTES),
        }
    }

    /// Returns a reader of the bytes from `at` on.
    pub(crate) fn reader(&self, at: usize) -> Reader {
        self.reader_for(at, &Failure::default())
    }

    /// Returns a reader of the bytes from `at` on, whose error `failure` remembers.
    pub(crate) fn reader_for(&self, at: usize, failure: &Failure) -> Reader {
        Reader { object: self.clone(), at, window: Bytes::new(), failure: failure.clone(), content: None }
    }

    /// Returns a reader of all bytes that computes their identity if they are on another machine.
    pub(crate) fn learning_reader(&self) -> Reader {
        let is_remote = matches!(self.place, Place::Remote { .. });
        Reader { content: is_remote.then(Content::default), ..self.reader(0) }
    }

    /// Forgets the parts of a remote file that were read.
    #[cfg(all(test, feature = "cloud"))]
    pub(crate) fn forget(&self) {
        if let Place::Remote { file: remote, .. } = &self.place {
            remote.forget();
        }
    }

    /// Returns the number of the line in which a byte lies, from 1.
    ///
    /// # Errors
    /// The file has changed since it was opened, or cannot be read.
    pub(crate) fn line(&self, byte: usize) -> Result<usize> {
        let (mut reader, mut line, mut left) = (self.reader(0), 1, byte);
        while left > 0 {
            let window = reader.window()?;
            if window.is_empty() {
                break;
            }
            let before = &window[..left.min(window.len())];
            line += before.iter().filter(|&&byte| byte == b'\n').count();
            left -= before.len();
        }
        Ok(line)
    }

    /// Checks that nobody has written to a mapped file since it was opened. A file that was removed
    /// or replaced stays as it was for those who have it open. A file on another machine is checked
    /// with each part that is read.
    ///
    /// # Errors
    /// Somebody has.
    pub(crate) fn check(&self) -> Result<()> {
        let Opened { file, bytes, modified, .. } = match &self.place {
            Place::Here { mapped: Some(opened), .. } => &**opened,
            Place::Packed(packed) => return packed.file().check(),
            Place::Here { mapped: None, .. } | Place::Remote { .. } | Place::Folder(_) => return Ok(()),
        };
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
    ///
    /// # Errors
    /// The file has changed since it was opened, or cannot be read.
    pub(crate) fn hash(&self, mut content: Content, observer: &dyn Observer) -> Result<Content> {
        if let Place::Packed(packed) = &self.place {
            return Ok(content.followed_by(packed.content()));
        }
        let (mut reader, mut at) = (self.reader(0), 0);
        loop {
            let window = reader.window()?;
            if window.is_empty() {
                return Ok(content);
            }
            for piece in window.chunks(PIECE_BYTES) {
                observer.advance();
                self.expect(at..at + piece.len());
                at += piece.len();
                content.add(piece);
            }
        }
    }
}

/// Reads a file in sequence.
#[derive(Debug)]
pub(crate) struct Reader {
    object: Object,
    /// Place behind the window.
    at: usize,
    /// Bytes that are read from the file and not yet from the reader.
    window: Bytes,
    failure: Failure,
    /// Identity of the bytes that were read from the file. `None`: nobody wants it.
    content: Option<Content>,
}

impl Reader {
    /// Returns the bytes that follow: all of a file that is in memory, otherwise some. Empty: the
    /// end.
    ///
    /// # Errors
    /// The file has changed since it was opened, or cannot be read.
    pub(crate) fn window(&mut self) -> Result<Bytes> {
        if !self.window.is_empty() {
            return Ok(std::mem::take(&mut self.window));
        }
        let end = self.object.window_end(self.at);
        if self.at >= end {
            return Ok(Bytes::new());
        }
        let window = self.object.slice(self.at..end)?;
        self.at = end;
        if let Some(content) = &mut self.content {
            content.add(&window);
        }
        Ok(window)
    }

    /// Returns the identity of the bytes that were read from the file, if it is computed.
    pub(crate) const fn content(&self) -> Option<Content> {
        self.content
    }

    /// Returns what remembers the error of this reader, for the time after a decoder took it.
    pub(crate) fn failure(&self) -> Failure {
        self.failure.clone()
    }
}

impl BufRead for Reader {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        if self.window.is_empty() {
            self.window = self.window().map_err(|error| self.failure.keep(error))?;
        }
        Ok(&self.window)
    }

    fn consume(&mut self, bytes: usize) {
        bytes::Buf::advance(&mut self.window, bytes);
    }
}

impl Read for Reader {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let bytes = self.fill_buf()?.read(out)?;
        self.consume(bytes);
        Ok(bytes)
    }
}

/// The error of a reader. Decoders of other projects turn it into a text, and then it would look
/// like a damaged file.
#[derive(Clone, Debug, Default)]
pub(crate) struct Failure(Arc<Mutex<Option<Error>>>);

impl Failure {
    /// Keeps an error, and returns one for a decoder.
    pub(crate) fn keep(&self, error: Error) -> io::Error {
        let text = error.to_string();
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
        io::Error::other(text)
    }

    /// Returns the error of the reader, or another one if the reader had none.
    pub(crate) fn or(&self, other: impl FnOnce() -> Error) -> Error {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take().unwrap_or_else(other)
    }
}

/// Parts of a file in about their order. A part is often in the window that was read for the one
/// before.
#[derive(Debug)]
pub(crate) struct Scan<'a> {
    object: &'a Object,
    /// Place and bytes of the window.
    begin: usize,
    window: Bytes,
    /// Whether little more is read than what is asked for.
    is_short: bool,
}

impl<'a> Scan<'a> {
    /// Begins with this part of the file in the window.
    ///
    /// # Errors
    /// Those of [`Object::slice`].
    pub(crate) fn over(object: &'a Object, range: Range<usize>) -> Result<Self> {
        Ok(Self { object, begin: range.start, window: object.slice_to_keep(range)?, is_short: false })
    }

    /// Begins a scan of the whole file, or with `is_short` of its first parts.
    pub(crate) fn new(object: &'a Object, is_short: bool) -> Self {
        Self { object, begin: 0, window: Bytes::new(), is_short }
    }

    /// Returns the file.
    pub(crate) const fn object(&self) -> &'a Object {
        self.object
    }

    /// Returns a part of the file. `None`: the file ends before.
    ///
    /// # Errors
    /// The file has changed since it was opened, or cannot be read.
    pub(crate) fn get(&mut self, range: Range<usize>) -> Result<Option<Bytes>> {
        if range.start > range.end || range.end > self.object.len() {
            return Ok(None);
        }
        let end = self.begin + self.window.len();
        if range.start < self.begin || range.end > end {
            self.window = match self.is_short {
                true => {
                    let end = self.object.len().min(range.start + SHORT_BYTES);
                    self.object.slice_to_keep(range.start..end.max(range.end))?
                }
                false => {
                    let end = range.end.max(self.object.window_end(range.start));
                    self.object.slice(range.start..end)?
                }
            };
            self.begin = range.start;
        }
        Ok(Some(self.window.slice(range.start - self.begin..range.end - self.begin)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mapped_file_that_is_read_in_blocks_has_the_same_bytes() {
        let (dir, plain) =
            (tempfile::tempdir().unwrap(), (0..=255).cycle().take(100_000).collect::<Vec<u8>>());
        let path = dir.path().join("a");
        std::fs::write(&path, &plain).unwrap();
        let object = Object::open(&path, Access::Anywhere, &()).unwrap();
        let content = object.hash(Content::default(), &()).unwrap();
        object.read_in_blocks();
        object.read_in_blocks();
        for range in [0..100_000, 5000..5001, 70_001..99_999, 7..7] {
            assert_eq!(&*object.slice_to_keep(range.clone()).unwrap(), &plain[range.clone()], "{range:?}");
        }
        assert!(object.slice_to_keep(5..100_001).unwrap_err().to_string().contains("it has 100000 bytes"));
        assert_eq!(object.hash(Content::default(), &()).unwrap(), content);
    }

    #[test]
    fn parts_of_a_file_are_those_of_its_bytes() {
        let bytes: Vec<u8> = (0..100).collect();
        let object = Object::copy(Path::new("a"), bytes.clone());
        assert_eq!((object.len(), &*object.slice(3..7).unwrap()), (100, &[3, 4, 5, 6][..]));
        assert!(object.slice(7..101).unwrap_err().to_string().contains("a: it has 100 bytes"));
        let mut read = Vec::new();
        object.reader(90).read_to_end(&mut read).unwrap();
        assert_eq!(read, bytes[90..]);
        let mut scan = Scan::over(&object, 10..20).unwrap();
        for range in [12..15, 90..100, 0..5] {
            assert_eq!(scan.get(range.clone()).unwrap().unwrap(), bytes[range]);
        }
        assert_eq!(scan.get(90..101).unwrap(), None);
    }
}
