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
//! | `pattern.rs` | files whose names fit a pattern |
//! | `format.rs`, `formats/` | what a format does; one file for each format |
//! | `lengths.rs` | ragged columns to which the job gives a fixed length |
//! | `column.rs`, `cast.rs` | a column's values; their conversion to another type |
//! | `table.rs` | the records of files that belong together |
//! | `cache.rs` | open files and decoded blocks of the process |
//! | `schema.rs` | the columns of a table that a model takes, and the label |
//! | `transform.rs`, `transform/` | what the job makes of a column's values, record by record |
//! | `pixels.rs`, `pixels/` | images: decoders, filters, colours |
//! | `index.rs` | what a job learns of a file before it trains: counts, columns, checksum |
//! | `dataset.rs`, `batch.rs` | the records of all files, and some of them side by side |
//! | `inspect.rs` | a look at one file, for people |
//! | `measure.rs` | how fast the input pipeline of a job is |
//! | `observer.rs` | the progress of a reader |

mod batch;
mod cache;
mod cast;
pub mod column;
mod dataset;
pub mod error;
mod format;
mod formats;
mod index;
mod inspect;
mod lengths;
mod measure;
mod object;
pub mod observer;
mod pattern;
mod pixels;
mod remote;
mod schema;
mod table;
#[cfg(test)]
mod tests;
mod transform;

pub use batch::Batch;
pub use cache::{default_memory, limit_memory};
pub use column::Column;
pub use dataset::Dataset;
pub use error::{Error, Result};
pub use index::{Indexed, index, index_observed};
pub use inspect::{Inspected, inspect};
pub use measure::{Measured, measure};
pub use object::Content;
pub use observer::Observer;
pub use pattern::without_patterns;
pub use remote::{allow_urls, every_url, use_store_settings, wrong_prefixes};
