//! The choice among the formats that can be written.

use proto::spec::Format;

use super::arrow::{Arrow, Parquet};
use super::jsonl::Jsonl;
use super::npy::Npy;
use super::safetensors::Safetensors;
use super::sink::{Shard, Sink};
use super::tar::Tar;
use super::tfrecord::Tfrecord;
use crate::error::Result;

/// Begins to write a shard.
///
/// # Errors
/// A file cannot be written.
pub(super) fn open(shard: &Shard<'_>) -> Result<Box<dyn Sink>> {
    Ok(match shard.format {
        Format::Arrow => Box::new(Arrow::open(shard)?),
        Format::Npy => Box::new(Npy::open(shard)?),
        Format::Tar => Box::new(Tar::open(shard)?),
        Format::Tfrecord => Box::new(Tfrecord::open(shard)?),
        Format::Jsonl => Box::new(Jsonl::open(shard)?),
        Format::Safetensors => Box::new(Safetensors::open(shard)?),
        // Other formats were refused before.
        _ => Box::new(Parquet::open(shard)?),
    })
}
