//! Decoders of files' bytes as plain functions, for tests with damaged bytes (`tests/fuzz/`).
//!
//! A target reads all that a file has, and says whether it met no error: damaged bytes may be
//! refused.

use std::path::Path;

use proto::spec::{DataSpec, FilesSpec, Format, TokenType, TokensSpec};

use crate::formats::{self, tfrecord};
use crate::object::{Content, Object};
use crate::packed::always_in_pieces;
use crate::pixels;
use crate::tokenizer::Tokenizer;

/// Name that the bytes have in errors.
const NAME: &str = "fuzzed";

/// Reads some bytes, whatever they are. Returns whether they were read to the end without an error.
pub type Target = fn(&[u8]) -> bool;

/// Decoders, by their names.
pub const TARGETS: [(&str, Target); 20] = [
    ("arrow", |bytes| file(Format::Arrow, bytes)),
    ("csv", |bytes| file(Format::Csv, bytes)),
    ("csv_without_header", csv_without_header),
    ("example", example),
    ("idx", |bytes| file(Format::Idx, bytes)),
    ("jpeg", image),
    ("jsonl", |bytes| file(Format::Jsonl, bytes)),
    ("npy", |bytes| file(Format::Npy, bytes)),
    ("npz", |bytes| file(Format::Npz, bytes)),
    ("packed", packed),
    ("parquet", |bytes| file(Format::Parquet, bytes)),
    ("png", image),
    ("safetensors", |bytes| file(Format::Safetensors, bytes)),
    ("tar", |bytes| file(Format::Tar, bytes)),
    ("tar_with_checksums", tar_with_checksums),
    ("tfrecord", |bytes| file(Format::Tfrecord, bytes)),
    ("tokenizer", tokenizer),
    ("tokens", tokens),
    ("tsv", |bytes| file(Format::Tsv, bytes)),
    ("webp", image),
];

/// Reads all columns of all blocks of a file.
fn all(spec: &DataSpec, bytes: &[u8]) -> bool {
    let object = Object::copy(Path::new(NAME), bytes.to_vec());
    let Ok(source) = formats::open(spec, &object, "x", Path::new(NAME), &()) else { return false };
    let columns: Vec<usize> = (0..source.outline().columns.len()).collect();
    let mut is_read = true;
    for block in 0..source.outline().blocks.len() {
        let read = source.read(block, &columns);
        is_read &= read.is_ok();
        for column in read.into_iter().flatten() {
            // A record that does not lie in the column's memory would panic.
            let last = column.records().checked_sub(1);
            [Some(0), last].into_iter().flatten().take(column.records()).for_each(|record| {
                std::hint::black_box(column.record(record));
            });
        }
    }
    is_read
}

fn file(format: Format, bytes: &[u8]) -> bool {
    all(&DataSpec::of(format, FilesSpec::default()), bytes)
}

fn csv_without_header(bytes: &[u8]) -> bool {
    all(&DataSpec { header: false, ..DataSpec::of(Format::Csv, FilesSpec::default()) }, bytes)
}

/// Reads tokens. The first byte says how they are cut.
fn tokens(bytes: &[u8]) -> bool {
    let Some((&cut, values)) = bytes.split_first() else { return false };
    let dtype = if cut & 1 == 0 { TokenType::U16 } else { TokenType::U32 };
    let stride = (cut & 2 != 0).then_some(usize::from(cut >> 5) + 1);
    let spec = TokensSpec { dtype, block: usize::from(cut >> 2 & 7) + 1, stride };
    all(&DataSpec { tokens: Some(spec), ..DataSpec::of(Format::Tokens, FilesSpec::default()) }, values)
}

/// Reads a `tf.train.Example` between checksums that fit.
fn example(bytes: &[u8]) -> bool {
    file(Format::Tfrecord, &tfrecord::framed(bytes))
}

/// Reads an archive in which the checksum of whatever may be a header fits.
fn tar_with_checksums(bytes: &[u8]) -> bool {
    let mut bytes = bytes.to_vec();
    for header in bytes.chunks_exact_mut(512).filter(|header| header.iter().any(|&byte| byte != 0)) {
        header[148..156].fill(b' ');
        let sum: u32 = header.iter().map(|&byte| u32::from(byte)).sum();
        header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    }
    // The end of an archive.
    bytes.extend([0; 1024]);
    file(Format::Tar, &bytes)
}

/// Reads a tokenizer, and splits a text by it.
fn tokenizer(bytes: &[u8]) -> bool {
    let Ok(tokenizer) = Tokenizer::read(bytes) else { return false };
    tokenizer.encode("Hello, world! naïve 東京 <s>", true).is_ok()
}

/// Unpacks gzip or Zstandard, as a whole and piece by piece.
fn packed(bytes: &[u8]) -> bool {
    let content = |object: Object| object.hash(Content::default(), &());
    let whole = Object::of(Path::new(NAME), bytes).and_then(content);
    let pieces = always_in_pieces(Object::copy(Path::new(NAME), bytes.to_vec())).and_then(content);
    if let (Ok(whole), Ok(pieces)) = (&whole, &pieces) {
        assert_eq!(whole, pieces);
    }
    whole.is_ok()
}

/// Decodes an image to one channel and to three.
fn image(bytes: &[u8]) -> bool {
    let mut is_read = pixels::size(bytes).is_ok();
    for channels in [1, 3] {
        match pixels::decode(bytes, channels) {
            Ok(image) => assert_eq!(image.values.len(), image.height * image.width * channels),
            Err(_) => is_read = false,
        }
    }
    is_read
}
