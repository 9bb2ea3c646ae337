//! How a reader of files says that it gets on, to those who must tell slow reading from none.

use std::path::Path;

/// An observer of the reading of files. `()` is one that ignores everything.
pub trait Observer {
    /// A reader begins `file`, or waits until another thread of this process has read it.
    fn open(&self, file: &Path);

    /// A reader has another piece of its file.
    fn advance(&self);
}

impl Observer for () {
    fn open(&self, _: &Path) {}

    fn advance(&self) {}
}
