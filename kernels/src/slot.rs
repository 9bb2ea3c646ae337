//! The values that an optimizer keeps beside the weights, as an update takes them.

/// One slot of the elements that an update changes, in storage or in a slice of host memory.
#[derive(Debug)]
pub enum Slot<'a, S: ?Sized> {
    /// The slot changes where it lies.
    InPlace(&'a mut S),
    /// The slot is read in one place and written to another, because a checkpoint needs it as it
    /// is. What `to` holds before does not matter.
    Moved {
        /// The slot before the update.
        from: &'a S,
        /// The slot after the update.
        to: &'a mut S,
    },
}
