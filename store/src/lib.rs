//! Stores of checkpoints: folders on local disks, in object stores, or in the memory of a process.
//!
//! [`proto::checkpoint`] describes the content. This crate opens, lists, reads and writes. Readers
//! of data open object stores here too (`cloud`).

#[cfg(feature = "cloud")]
pub mod cloud;
pub mod data_file;
mod direct;
pub mod found;
pub mod location;
mod stores;

pub use stores::{Folder, PART_BYTES, PATIENCE, PATIENCE_MAX, Stores};
