//! Files with compression: gzip and Zstandard.
//!
//! Only the bytes before say what a compressed byte means. So such a file is unpacked from its
//! front, and how it is read says what is in memory:
//!
//! | records are read | bytes without compression |
//! | --- | --- |
//! | in any order | held as a whole (`room.rs`), or refused |
//! | in sequence, and the file is small | held as a whole |
//! | in sequence | pieces of [`PIECE_BYTES`] in the cache (`cache.rs`) |
//!
//! A piece that is not in the cache is decoded by a decoder that stands at it or before it. Pieces
//! that the decoder passes go into the cache, too, because a window of records is read in any
//! order. Without such a decoder, another one begins at the front of the file:
//!
//! ```text
//! decoders      0 .. 5           9 ..          each stands behind the last piece that it made
//! piece 7       0 .. 7           9 ..
//! piece 4       0 .. 4   .. 7    9 ..          from the front
//! ```

use std::io::{self, Read};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use flate2::read::MultiGzDecoder;
use proto::spec::{DataSet, JobSpec};

use crate::any_order;
use crate::cache;
use crate::error::{Result, malformed, wrong};
use crate::object::{Content, Failure, Object, Reader};
use crate::observer::Observer;
use crate::room::{self, Held};

/// Bytes that are unpacked at once, and kept in the cache.
pub(crate) const PIECE_BYTES: usize = 2 << 20;

/// Most decoders of a file. Each serves a reader that is elsewhere in the file.
pub(crate) const DECODERS_MAX: usize = 4;

/// Bytes that are unpacked at once of a file that is read to its end.
const READ_BYTES: usize = 4 << 20;

/// Binary logarithms of the window of a Zstandard frame: what every decoder takes, and the most
/// that is taken if `data_memory` has twice as much.
const WINDOW_LOG: u32 = 23;
const WINDOW_LOG_MAX: u32 = 27;

/// Bytes that all decoders of this process have made.
static UNPACKED: AtomicU64 = AtomicU64::new(0);

/// Returns the bytes without compression that this process has made of compressed files. A file
/// that is decoded again counts again.
pub fn unpacked_bytes() -> u64 {
    UNPACKED.load(Ordering::Relaxed)
}

/// Order in which the records of a file are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    /// Any record may be next.
    Anywhere,
    /// The next record lies near the one before, or behind it, but for a new beginning now and
    /// then.
    InSequence,
}

impl Access {
    /// Returns how a job reads a data set.
    pub(crate) fn of(spec: &JobSpec, set: DataSet) -> Self {
        let shuffles = set == DataSet::Train && any_order::is_order_of(spec);
        // A fraction is drawn from everywhere.
        match shuffles || spec.data.validation_fraction.is_some() {
            true => Self::Anywhere,
            false => Self::InSequence,
        }
    }
}

/// A compression.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Codec {
    Gzip,
    Zstandard,
}

impl Codec {
    /// Returns the compression of a file by its first bytes.
    ///
    /// # Errors
    /// The file cannot be read.
    fn of(file: &Object) -> Result<Option<Self>> {
        let first = file.slice_to_keep(0..file.len().min(4))?;
        Ok(match *first {
            [0x1F, 0x8B, ..] => Some(Self::Gzip),
            [0x28, 0xB5, 0x2F, 0xFD] => Some(Self::Zstandard),
            _ => None,
        })
    }

    const fn name(self) -> &'static str {
        match self {
            Self::Gzip => "gzip",
            Self::Zstandard => "Zstandard",
        }
    }
}

/// Returns the file without compression, or the file itself if it has none. Reports the progress to
/// `observer`.
///
/// # Errors
/// The compression is damaged, or the records are read in any order and do not fit into memory.
pub(crate) fn unpacked(file: Object, access: Access, observer: &dyn Observer) -> Result<Object> {
    unpacked_within(file, access, room::bytes_max(), observer)
}

/// Returns the file without compression. If its records are read in any order, it may have
/// `bytes_max`.
fn unpacked_within(file: Object, access: Access, bytes_max: u64, observer: &dyn Observer) -> Result<Object> {
    let Some(codec) = Codec::of(&file)? else { return Ok(file) };
    let what = codec.name();
    let mut decoder = Decoder::open(&file, codec)?;
    let (mut plain, mut held) = (Vec::new(), Held::default());
    loop {
        let more = decoder.append(&mut plain, READ_BYTES)?;
        if more == 0 {
            plain.shrink_to_fit();
            return Ok(Object::whole(file.path(), plain, held));
        }
        observer.advance();
        if access == Access::InSequence {
            match held.grow_in_share(more as u64) {
                Ok(()) => continue,
                Err(_) => break,
            }
        }
        // A small file can become more than any memory.
        if plain.len() as u64 > bytes_max {
            return wrong(
                file.path(),
                format!(
                    "without {what} the file has more than {bytes_max} bytes, the limit for compressed files whose \
                     records are read in any order (data_memory); set data.shuffle = \"window\", which reads them in \
                     sequence, raise data_memory, unpack the file, or write it in another format by `ebb data convert`"
                ),
            );
        }
        let full = |full: room::Full| {
            let before = plain.len() - more;
            let what = format!(
                "without {what} it has more than {before} bytes, all of which an order other than data.shuffle = \
                 \"window\" needs in memory"
            );
            full.at(file.path(), what)
        };
        held.grow(more as u64).map_err(full)?;
    }
    drop(held);
    let mut content = Content::default();
    content.add(&plain);
    drop(plain);
    in_pieces(file, decoder, content, observer)
}

/// Returns a file that is unpacked piece by piece. `content` is what `decoder` has made of it. The
/// rest is unpacked here, because formats ask for its length.
///
/// # Errors
/// The compression is damaged.
fn in_pieces(
    file: Object,
    mut decoder: Decoder,
    mut content: Content,
    observer: &dyn Observer,
) -> Result<Object> {
    let mut plain = Vec::new();
    while decoder.append(&mut plain, READ_BYTES)? > 0 {
        content.add(&plain);
        plain.clear();
        observer.advance();
    }
    let (id, codec) = (cache::next_file(), decoder.codec);
    Ok(Object::of_packed(Arc::new(Packed { id, file, codec, content, decoders: Mutex::default() })))
}

/// Returns a file that is unpacked piece by piece, however small it is.
///
/// # Errors
/// It has no compression, or a damaged one.
pub(crate) fn always_in_pieces(file: Object) -> Result<Object> {
    let Some(codec) = Codec::of(&file)? else { return wrong(file.path(), "no compression") };
    let decoder = Decoder::open(&file, codec)?;
    in_pieces(file, decoder, Content::default(), &())
}

/// A compressed file that is read in sequence.
pub(crate) struct Packed {
    /// Number in this process.
    id: u64,
    /// The file with compression.
    file: Object,
    codec: Codec,
    /// Identity of the bytes without compression.
    content: Content,
    /// The one that was used last is the last one.
    decoders: Mutex<Vec<Decoder>>,
}

impl Packed {
    /// Returns the file with compression.
    pub(crate) const fn file(&self) -> &Object {
        &self.file
    }

    /// Returns the identity of the bytes without compression.
    pub(crate) const fn content(&self) -> Content {
        self.content
    }

    /// Returns the number of bytes without compression.
    pub(crate) const fn len(&self) -> usize {
        self.content.bytes as usize
    }

    /// Reads a part of the bytes without compression, which must have that many. The call blocks.
    ///
    /// # Errors
    /// The part does not fit into `data_memory`, or the file cannot be read, or has changed.
    pub(crate) fn read(&self, range: Range<usize>) -> Result<Bytes> {
        if range.is_empty() {
            return Ok(Bytes::new());
        }
        room::check_part(self.file.path(), range.len() as u64)?;
        let (first, last) = (range.start / PIECE_BYTES, (range.end - 1) / PIECE_BYTES);
        let part = |number: usize| {
            let piece = self.piece(number as u64)?;
            let begin = number * PIECE_BYTES;
            let end = (range.end - begin).min(piece.len());
            Ok(piece.slice(range.start.saturating_sub(begin)..end))
        };
        if first == last {
            return part(first);
        }
        let mut bytes = Vec::with_capacity(range.len());
        for number in first..=last {
            bytes.extend_from_slice(&part(number)?);
        }
        Ok(bytes.into())
    }

    /// Returns a piece from the cache or from a decoder. Other readers of the file wait.
    ///
    /// # Errors
    /// The file cannot be read, or has changed.
    fn piece(&self, number: u64) -> Result<Bytes> {
        if let Some(piece) = cache::known_piece(self.id, number) {
            return Ok(piece);
        }
        let mut decoders = self.decoders.lock().unwrap_or_else(PoisonError::into_inner);
        // A reader before may have passed it.
        if let Some(piece) = cache::known_piece(self.id, number) {
            return Ok(piece);
        }
        let mut decoder = match nearest(decoders.iter().map(|decoder| decoder.next), number) {
            Some(at) => decoders.remove(at),
            None => Decoder::open(&self.file, self.codec)?,
        };
        // A long way to the piece does not take the place of all else.
        let kept = room::cache_bytes() / 2 / PIECE_BYTES as u64;
        loop {
            let at = decoder.next;
            let left = self.len().saturating_sub(at as usize * PIECE_BYTES);
            let mut piece = Vec::with_capacity(left.min(PIECE_BYTES));
            if decoder.append(&mut piece, left.min(PIECE_BYTES))? != left.min(PIECE_BYTES) {
                return wrong(
                    self.file.path(),
                    "the file has fewer bytes without compression than when it was opened; restore it, or submit the \
                     job anew",
                );
            }
            decoder.next += 1;
            let piece = Bytes::from(piece);
            if number - at <= kept {
                cache::keep_piece(self.id, at, piece.clone());
            }
            if at < number {
                continue;
            }
            if left > PIECE_BYTES {
                if decoders.len() == DECODERS_MAX {
                    decoders.remove(0);
                }
                decoders.push(decoder);
            }
            return Ok(piece);
        }
    }
}

impl std::fmt::Debug for Packed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Packed")
            .field("file", &self.file)
            .field("codec", &self.codec)
            .field("content", &self.content)
            .finish_non_exhaustive()
    }
}

impl Drop for Packed {
    fn drop(&mut self) {
        cache::forget_pieces(self.id);
    }
}

/// Returns the decoder that stands nearest before a piece, or at it. `places` are the pieces at
/// which the decoders stand.
fn nearest(places: impl Iterator<Item = u64>, piece: u64) -> Option<usize> {
    let before = places.enumerate().filter(|(_, next)| *next <= piece);
    before.max_by_key(|(_, next)| *next).map(|(at, _)| at)
}

/// Unpacks a file from its front.
struct Decoder {
    file: Object,
    codec: Codec,
    bytes: Box<dyn Read + Send>,
    /// Remembers the error of the file below.
    failure: Failure,
    /// Number of the piece that follows.
    next: u64,
}

impl Decoder {
    /// Begins at the front.
    ///
    /// # Errors
    /// There is no memory for a decoder.
    fn open(file: &Object, codec: Codec) -> Result<Self> {
        let reader = file.reader(0);
        let failure = reader.failure();
        let bytes: Box<dyn Read + Send> = match codec {
            Codec::Gzip => Box::new(MultiGzDecoder::new(reader)),
            Codec::Zstandard => match zstandard(reader) {
                Ok(decoder) => Box::new(decoder),
                Err(error) => return wrong(file.path(), format!("Zstandard: {error}")),
            },
        };
        Ok(Self { file: file.clone(), codec, bytes, failure, next: 0 })
    }

    /// Appends the next bytes, as many as there are and at most so many. Returns their number.
    ///
    /// # Errors
    /// The compression is damaged, or the file cannot be read.
    fn append(&mut self, out: &mut Vec<u8>, bytes_max: usize) -> Result<usize> {
        let more = self.bytes.by_ref().take(bytes_max as u64).read_to_end(out).map_err(|error| {
            let what = self.codec.name();
            // The words of the library.
            let text = match error.to_string() {
                text if text.contains("requires too much memory") => {
                    let most = 1u64 << window_log_max(room::bytes_max());
                    format!(
                        "a {what} frame with a window of more than {most} bytes; raise data_memory to twice the window, \
                         which has 128 MiB at most, or compress the file without a long window (`--long`)"
                    )
                }
                text => format!("damaged {what}: {text}; copy or download it again"),
            };
            self.failure.or(|| malformed(self.file.path(), text))
        })?;
        UNPACKED.fetch_add(more as u64, Ordering::Relaxed);
        Ok(more)
    }
}

/// Returns a decoder whose window is bounded.
///
/// # Errors
/// There is no memory for it.
fn zstandard(reader: Reader) -> io::Result<zstd::stream::read::Decoder<'static, Reader>> {
    let mut decoder = zstd::stream::read::Decoder::with_buffer(reader)?;
    decoder.window_log_max(window_log_max(room::bytes_max()))?;
    Ok(decoder)
}

/// Returns the binary logarithm of the largest window of a frame. A window is at most half of
/// `bytes`, but what every decoder takes is always taken.
fn window_log_max(bytes: u64) -> u32 {
    bytes.max(1).ilog2().saturating_sub(1).clamp(WINDOW_LOG, WINDOW_LOG_MAX)
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::path::Path;

    use flate2::Compression;
    use flate2::write::GzEncoder;
    use proptest::prelude::*;

    use super::*;

    fn gzip(bytes: &[u8]) -> Vec<u8> {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
        encoder.write_all(bytes).unwrap();
        encoder.finish().unwrap()
    }

    /// Returns bytes of which no two pieces are equal.
    fn bytes(count: usize) -> Vec<u8> {
        (0..count as u32).map(|at| (at.wrapping_mul(0x9E37_79B9) >> 24) as u8 ^ (at >> 16) as u8).collect()
    }

    #[test]
    fn a_small_file_that_becomes_larger_than_the_limit_is_refused_by_name() {
        let small = gzip(&vec![0; 3 * READ_BYTES]);
        let large = zstd::encode_all(&vec![0; 3 * READ_BYTES][..], 3).unwrap();
        for (packed, what) in [(small, "gzip"), (large, "Zstandard")] {
            let open = |bytes_max| {
                let object = Object::copy(Path::new("bomb"), packed.clone());
                unpacked_within(object, Access::Anywhere, bytes_max, &())
            };
            let bytes_max = 2 * READ_BYTES as u64;
            let said = open(bytes_max).unwrap_err().to_string();
            assert!(said.contains(&format!("bomb: without {what} the file has more than {bytes_max} bytes")));
            assert!(said.contains("data_memory") && said.contains("\"window\""), "{said}");
            assert_eq!(open(3 * READ_BYTES as u64).unwrap().len(), 3 * READ_BYTES);
        }
    }

    #[test]
    fn parts_in_any_order_are_those_of_the_plain_file() {
        let plain = bytes(5 * PIECE_BYTES + 77);
        let both = [&gzip(&plain[..PIECE_BYTES + 5])[..], &gzip(&plain[PIECE_BYTES + 5..])].concat();
        for packed in [gzip(&plain), both, zstd::encode_all(&plain[..], 1).unwrap()] {
            let object = always_in_pieces(Object::copy(Path::new("a"), packed)).unwrap();
            assert!(object.is_packed() && !object.is_here());
            assert_eq!(object.len(), plain.len());
            let parts = [
                0..10,
                4 * PIECE_BYTES - 3..4 * PIECE_BYTES + 3,
                PIECE_BYTES..3 * PIECE_BYTES,
                5 * PIECE_BYTES..plain.len(),
                2 * PIECE_BYTES + 1..2 * PIECE_BYTES + 2,
                7..7,
                0..plain.len(),
            ];
            for part in parts {
                assert!(object.slice(part.clone()).unwrap() == plain[part.clone()], "{part:?}");
            }
            assert!(object.slice(0..plain.len() + 1).is_err());
            let mut read = Vec::new();
            object.reader(PIECE_BYTES + 9).read_to_end(&mut read).unwrap();
            assert!(read == plain[PIECE_BYTES + 9..]);
            let mut content = Content::default();
            content.add(b"before");
            let both = object.hash(content, &()).unwrap();
            content.add(&plain);
            assert_eq!(both, content);
        }
    }

    #[test]
    fn a_cut_off_file_is_damaged_and_a_plain_one_stays_as_it_is() {
        for (whole, what) in
            [(gzip(&bytes(9999)), "gzip"), (zstd::encode_all(&bytes(9999)[..], 1).unwrap(), "Zstandard")]
        {
            let cut = Object::copy(Path::new("cut"), whole[..whole.len() - 5].to_vec());
            let said = always_in_pieces(cut).unwrap_err().to_string();
            assert!(said.contains(&format!("cut: damaged {what}")), "{said}");
        }
        let plain = Object::copy(Path::new("a"), vec![0x1F]);
        assert!(!unpacked(plain, Access::InSequence, &()).unwrap().is_packed());
    }

    #[test]
    fn a_window_of_a_frame_takes_half_of_the_memory_at_most() {
        let logs = [0, 1 << 20, 1 << 24, 1 << 26, (1 << 27) - 1, 1 << 27, 1 << 40].map(window_log_max);
        assert_eq!(logs, [23, 23, 23, 25, 25, 26, 27]);
    }

    proptest! {
        #[test]
        fn the_nearest_decoder_before_a_piece_goes_on(
            places in proptest::collection::vec(0u64..9, 0..6), piece in 0u64..9
        ) {
            match nearest(places.iter().copied(), piece) {
                Some(at) => {
                    prop_assert!(places[at] <= piece);
                    let between = places[at] + 1..=piece;
                    prop_assert!(!places.iter().any(|place| between.contains(place)));
                }
                None => prop_assert!(places.iter().all(|&place| place > piece)),
            }
        }
    }
}
