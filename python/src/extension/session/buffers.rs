//! Memory that Python fills with the answer to a request, tensor by tensor.

use std::sync::Arc;

use proto::tensor::Values;

use super::region::{Region, address};

/// The memory of each tensor. One that was taken is not here any more.
pub(in crate::extension) struct Buffers {
    left: Vec<Option<Arc<Values>>>,
    addresses: Vec<usize>,
}

impl Buffers {
    pub(in crate::extension) fn new(mut values: Vec<Values>) -> Self {
        let addresses = values.iter_mut().map(address).collect();
        Self { left: values.into_iter().map(|values| Some(Arc::new(values))).collect(), addresses }
    }

    /// Returns the regions of the first `count` tensors, for writing. `None`: one was taken.
    pub(in crate::extension) fn regions(&self, count: usize) -> Option<Vec<Region>> {
        let region = |(values, &address): (&Option<Arc<Values>>, &usize)| {
            Some(Region::of_buffer(values.as_ref()?, address))
        };
        self.left.iter().zip(&self.addresses).take(count).map(region).collect()
    }

    /// Takes what a tensor has. `None`: it was taken, or there is no such tensor.
    pub(in crate::extension) fn take(&mut self, tensor: usize) -> Option<Values> {
        self.left.get_mut(tensor)?.take().map(taken)
    }

    /// Takes what is left, with the number of each tensor.
    pub(in crate::extension) fn rest(self) -> impl Iterator<Item = (usize, Values)> {
        let numbered = self.left.into_iter().enumerate();
        numbered.filter_map(|(tensor, values)| Some((tensor, taken(values?))))
    }
}

/// A view that is still alive keeps the memory; this is a copy then. What lies on a device is
/// shared: nobody writes there any more.
fn taken(values: Arc<Values>) -> Values {
    Arc::try_unwrap(values).unwrap_or_else(|shared| Values::clone(&shared))
}
