//! The embedded carrier: a ps of this process, called as the object that it is.
//!
//! Nothing is encoded. The ps keeps references to the chunks of a push, and a pull reads the
//! buffers of the ps where they lie.

use std::collections::BTreeMap;
use std::sync::Arc;

use proto::parameters::Parameters;
use proto::status::{Failure, Kind};

/// The ps of this process, by URL.
pub(super) struct Embedded(BTreeMap<String, Arc<dyn Parameters>>);

impl Embedded {
    pub(super) const fn new(ps: BTreeMap<String, Arc<dyn Parameters>>) -> Self {
        Self(ps)
    }

    /// The ps at `url`, which is its own carrier.
    ///
    /// # Errors
    /// This process has no such ps.
    pub(super) fn at(&self, url: &str) -> Result<Arc<dyn Parameters>, Failure> {
        let missing = || Failure::new(Kind::NotFound, format!("no ps at {url} in this process"));
        self.0.get(url).cloned().ok_or_else(missing)
    }
}
