//! Weights that a worker has pulled, in memory that the next pull uses again.
//!
//! Always true here: each job keeps at most one unused set of buffers. Fresh memory from the system
//! costs a page fault every 4 KiB, which takes longer than the copy into it.

use std::borrow::Cow;
use std::fmt;
use std::ops::Deref;
use std::sync::{Arc, Mutex, PoisonError};

use kernels::Device;
use proto::placement::Layout;
use proto::tensor::{DType, TensorSpec, Values};

use crate::error::{Error, Result};

/// The whole model at one version, in the model's order of tensors. In arrival order each partition
/// is at its newest version.
///
/// Clones are the same weights. The last one gives the memory back.
#[derive(Clone, Debug)]
pub struct Weights(Arc<Held>);

struct Held {
    values: Vec<Values>,
    home: Spare,
}

/// Unused memory for one set of weights. Clones are the same memory.
#[derive(Clone, Default)]
pub struct Spare {
    unused: Arc<Mutex<Option<Vec<Values>>>>,
    /// In whose memory floats lie.
    device: Device,
}

impl Weights {
    /// Creates weights in buffers that return to `home` when the last clone is dropped.
    pub fn new(values: Vec<Values>, home: Spare) -> Self {
        Self(Arc::new(Held { values, home }))
    }

    /// Returns whether `other` is a clone of these weights.
    pub fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Weights {
    /// Returns the values in memory of the host: as they are, or a copy of those on a device.
    ///
    /// # Errors
    /// The device failed.
    pub fn on_host(&self) -> Result<Cow<'_, [Values]>> {
        if self.0.values.iter().all(|values| !matches!(values, Values::Device(_))) {
            return Ok(Cow::Borrowed(self));
        }
        let fetch = |values: &Values| values.on_host().map(Cow::into_owned);
        let fetched = self.0.values.iter().map(fetch).collect::<std::result::Result<_, _>>();
        let failed = |reason| Error::Engine { what: "read weights from the device".to_owned(), reason };
        fetched.map(Cow::Owned).map_err(failed)
    }
}

impl From<Vec<Values>> for Weights {
    /// Creates weights whose memory is not used again.
    fn from(values: Vec<Values>) -> Self {
        Self::new(values, Spare::default())
    }
}

impl Deref for Weights {
    type Target = [Values];

    fn deref(&self) -> &[Values] {
        &self.0.values
    }
}

impl fmt::Debug for Held {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} tensors", self.values.len())
    }
}

impl fmt::Debug for Spare {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Spare")
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.home.put(std::mem::take(&mut self.values));
    }
}

impl Spare {
    /// Returns memory of which floats lie on `device`.
    pub fn on(device: Device) -> Self {
        Self { unused: Arc::default(), device }
    }

    /// Returns whether floats lie in memory of a device.
    pub fn is_on_device(&self) -> bool {
        !self.device.is_host()
    }

    /// Returns buffers for all tensors of `layout`, with any content. A `Spare` serves one layout
    /// only.
    ///
    /// # Errors
    /// The device has too little free memory.
    pub fn take(&self, layout: &Layout) -> Result<Vec<Values>> {
        let spare = self.unused.lock().unwrap_or_else(PoisonError::into_inner).take();
        let zeros = |tensor: &TensorSpec| match tensor.dtype() {
            DType::F32 => Ok(self.device.zeros(DType::F32, tensor.len())?.into()),
            DType::I64 => Ok(tensor.zeros()),
        };
        spare.map_or_else(|| layout.tensors().iter().map(zeros).collect(), Ok)
    }

    /// Keeps buffers for the next use. A set that is kept already goes back to the system.
    pub fn put(&self, values: Vec<Values>) {
        let before = self.unused.lock().unwrap_or_else(PoisonError::into_inner).replace(values);
        drop(before);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_used_again_only_when_the_last_clone_is_gone() {
        let layout = Layout::new(vec![TensorSpec::parameter("w", [8])], 1).unwrap();
        let home = Spare::default();
        let first = Weights::new(home.take(&layout).unwrap(), home.clone());
        let (address, clone) = (first[0].bytes().as_ptr(), first.clone());
        assert!(first.is(&clone));
        drop(first);
        let second = Weights::new(home.take(&layout).unwrap(), home.clone());
        assert_ne!(second[0].bytes().as_ptr(), address, "a clone still reads it");
        assert!(!second.is(&clone));
        drop(clone);
        assert_eq!(home.take(&layout).unwrap()[0].bytes().as_ptr(), address);
    }
}
