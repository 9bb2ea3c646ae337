//! Makes batches from files. A data set is the records of its files in order, and a batch is any
//! list of them.
//!
//! A record is a set of named, typed columns. Values stay in the type of their file until a batch
//! is made. Plain files are mapped into memory, and files on other machines are read part by part.
//! The features and labels of a record depend only on the specification and the files.
//!
//! | file | what |
//! | --- | --- |
//! | `object.rs` | a file: its bytes, and whether it has changed |
//! | `remote.rs`, `remote/` | files on web servers and in object stores |
//! | `folder.rs` | the images of a folder, on a disk or in an object store |
//! | `packed.rs` | compressed files, whole or piece by piece |
//! | `pattern.rs` | files whose names fit a pattern |
//! | `format.rs`, `formats/` | what a format does; one file for each format |
//! | `cuts.rs` | where a file is cut into blocks |
//! | `guarded.rs` | decoders of other projects, which may panic |
//! | `pass.rs` | what is learnt of a text file while it is opened |
//! | `lengths.rs` | ragged columns to which the job gives a fixed length |
//! | `missing.rs` | what takes the place of a missing value |
//! | `element.rs` | the types of a column's elements |
//! | `column.rs`, `cast.rs` | a column's values; their conversion to another type |
//! | `table.rs` | the records of files that belong together |
//! | `tables.rs` | the open files of the process |
//! | `cache.rs` | decoded blocks of the process, and pieces of files |
//! | `room.rs` | the memory of decoded blocks and of files that are held whole |
//! | `any_order.rs` | whether files suit an order in which any record may be next |
//! | `windows.rs` | whether the blocks of windows that are read side by side fit into memory |
//! | `schema.rs` | the columns of a table that a model takes, and the label |
//! | `transform.rs`, `transform/` | what the job makes of a column's values, record by record |
//! | `pixels.rs`, `pixels/` | images: decoders, filters, colours |
//! | `levels.rs` | what bytes become, for inputs that are sent to a device as bytes |
//! | `index.rs` | what a job learns of a file before it trains: counts, columns, checksum |
//! | `dataset.rs`, `batch.rs` | the records of all files, and some of them side by side |
//! | `inspect.rs` | a look at one file, for people |
//! | `preview.rs` | what a person sees of a record |
//! | `sheet.rs`, `sheet/` | a picture with some images of a file |
//! | `sample.rs` | some records of a file |
//! | `convert.rs`, `convert/` | the records of files in another format |
//! | `predictions.rs`, `predictions/` | files of a model's outputs, and their parts joined |
//! | `mixup.rs` | records of a batch mixed with each other |
//! | `finite.rs` | values that are NaN or infinite |
//! | `tokenizer.rs` | files by which a text becomes tokens |
//! | `measure.rs`, `clock.rs` | how fast the input pipeline of a job is; the time |
//! | `observer.rs` | the progress of a reader |
//! | `fuzz.rs` | decoders as plain functions, for tests with damaged bytes |

mod any_order;
mod batch;
mod cache;
mod cast;
mod clock;
pub mod column;
mod convert;
mod cuts;
mod dataset;
mod element;
pub mod error;
mod finite;
mod folder;
mod format;
mod formats;
#[doc(hidden)]
pub mod fuzz;
mod guarded;
mod index;
mod inspect;
mod lengths;
mod levels;
mod measure;
mod memory;
mod missing;
mod mixup;
mod object;
pub mod observer;
mod packed;
mod pass;
mod pattern;
mod pixels;
pub mod predictions;
mod preview;
mod remote;
mod room;
mod sample;
mod schema;
mod sheet;
mod table;
mod tables;
#[cfg(test)]
mod tests;
mod tokenizer;
mod transform;
mod version;
mod windows;

pub use batch::{Batch, DeviceValues};
pub use cache::default_memory;
pub use column::Column;
pub use convert::{Conversion, Converted, ShardSize, ShardStore, convert};
pub use cuts::Cuts;
pub use dataset::{BadRecord, Dataset};
pub use error::{Error, Result};
pub use finite::NotFinite;
pub use index::{Indexed, KnownIndex, index, index_observed, is_unchanged};
pub use inspect::{ImageSizes, Inspected, inspect};
pub use levels::Levels;
pub use measure::{Measured, measure};
pub use memory::memory_limit;
pub use mixup::mixed;
pub use object::Content;
pub use observer::Observer;
pub use packed::unpacked_bytes;
pub use pattern::without_patterns;
pub use remote::{
    PATIENCE, PATIENCE_MAX, allow_urls, be_patient_for, every_url, parse_patience, patience,
    use_store_settings, wrong_prefixes,
};
pub use room::{limit_blocks, limit_memory};
pub use sheet::{ContactSheet, contact_sheet};
pub use tokenizer::Tokenizer;
