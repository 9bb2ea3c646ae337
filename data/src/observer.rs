//! Progress of a reader of files, for callers that must distinguish slow reading from none.

use std::path::Path;

/// An observer of the reading of files. `()` ignores everything.
pub trait Observer {
    /// Notes that a reader begins `file`, or waits until another thread of this process has read
    /// it.
    fn open(&self, file: &Path);

    /// Notes that a reader has another piece of its file.
    fn advance(&self);
}

impl Observer for () {
    fn open(&self, _: &Path) {}

    fn advance(&self) {}
}
