//! Makes batches from files. A data set is the records of its files in order, and a batch is any
//! list of them.
//!
//! All files of a data set are in memory, once per process, as compact as on disk. Every format is
//! one file here, which turns a file's bytes into arrays. The features and labels of a record
//! depend only on the specification and the files.
//!
//! | file | what |
//! | --- | --- |
//! | `array.rs` | a file's values, as compact as on disk |
//! | `csv.rs`, `idx.rs`, `npy.rs` | one format each |
//! | `table.rs`, `cache.rs` | the records of one file (pair); one copy of them per process |
//! | `index.rs` | what a job learns of a file before it trains: counts, shape, checksum |
//! | `dataset.rs`, `batch.rs` | the records of all files, and some of them side by side |
//! | `observer.rs` | the progress of a reader |

mod array;
mod batch;
mod cache;
mod csv;
mod dataset;
pub mod error;
mod idx;
mod index;
mod npy;
pub mod observer;
mod table;
#[cfg(test)]
mod tests;

pub use batch::Batch;
pub use dataset::Dataset;
pub use error::{Error, Result};
pub use index::{Indexed, index, index_observed};
pub use observer::Observer;
pub use table::Content;
