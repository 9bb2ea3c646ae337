//! A program without the feature `cloud`: it reads no URL.

use std::ops::Range;

use bytes::Bytes;
use proto::spec::data_url;

use super::{Listed, State};
use crate::error::{Error, Result};
use crate::observer::Observer;

/// A file on another machine, which nothing opens here.
#[derive(Debug, PartialEq)]
#[allow(dead_code, reason = "such a program never makes one")]
pub(crate) struct Remote {
    url: String,
    state: State,
}

impl Remote {
    /// Refuses a file.
    ///
    /// # Errors
    /// Always.
    pub(crate) fn open(url: &str) -> Result<Self> {
        Err(refused(url))
    }

    /// Returns the state in which the file was opened.
    pub(crate) const fn state(&self) -> &State {
        &self.state
    }

    /// Refuses to read.
    ///
    /// # Errors
    /// Always.
    pub(crate) fn read(&self, _: Range<u64>) -> Result<Bytes> {
        Err(refused(&self.url))
    }

    /// Refuses to read.
    ///
    /// # Errors
    /// Always.
    pub(crate) fn read_to_keep(&self, _: Range<u64>) -> Result<Bytes> {
        Err(refused(&self.url))
    }

    /// Forgets nothing.
    pub(crate) const fn forget(&self) {}

    /// Refuses to read.
    ///
    /// # Errors
    /// Always.
    pub(crate) fn whole(&self, _: u64) -> Result<Bytes> {
        Err(refused(&self.url))
    }
}

/// A folder of an object store, which nothing opens here.
#[derive(Debug)]
#[allow(dead_code, reason = "such a program never makes one")]
pub(crate) struct Folder {
    url: String,
}

impl Folder {
    /// Refuses a folder.
    ///
    /// # Errors
    /// Always.
    pub(crate) fn open(url: &str) -> Result<Self> {
        Err(refused(url))
    }

    /// Refuses to list folders.
    ///
    /// # Errors
    /// Always.
    pub(crate) fn subfolders(&self) -> Result<Vec<String>> {
        Err(refused(&self.url))
    }

    /// Refuses to list files.
    ///
    /// # Errors
    /// Always.
    pub(crate) fn files(&self, _: fn(&str) -> bool, _: &dyn Observer) -> Result<Vec<Listed>> {
        Err(refused(&self.url))
    }

    /// Refuses to read.
    ///
    /// # Errors
    /// Always.
    pub(crate) fn read(&self, _: &str, _: u64, _: &str) -> Result<Bytes> {
        Err(refused(&self.url))
    }
}

/// Refuses to list a folder.
///
/// # Errors
/// Always.
pub(crate) fn list(folder: &str, _: bool) -> Result<Vec<String>> {
    Err(refused(folder))
}

fn refused(url: &str) -> Error {
    let reason = "this program reads local files only: it was built without the feature `cloud`; build it with that \
                  feature, or copy the file";
    Error::Remote { url: data_url::shown(url), reason: reason.to_owned() }
}
