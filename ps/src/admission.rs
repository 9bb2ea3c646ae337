//! What may come in: openings that agree with themselves, and pushes for which there is memory.
//!
//! Always true here: the memory of a push is reserved before its first value arrives, and given
//! back when the push has been taken up or refused, whatever the reason.

use std::sync::Arc;

use crate::error::{Error, Result};
use crate::metrics::Metrics;
use crate::opening::{Opening, Place};

/// Checks that the parts of an opening agree with each other, and that its partition has at most
/// `bytes_max` bytes of weights.
pub(crate) fn check(opening: &Opening, bytes_max: u64) -> Result<()> {
    let Opening { address, partitions, tensors, plan, spec, homes, placement: _, restore: _, script: _ } =
        opening;
    let place = Place::from(*address);
    spec.validate()?;
    let contradiction = |what, expected: String, found: String| {
        if expected == found { Ok(()) } else { Err(Error::Contradiction { place, what, expected, found }) }
    };
    contradiction("number of partitions", spec.fleet.ps.to_string(), partitions.to_string())?;
    if opening.needs_others() {
        contradiction("homes of partitions", partitions.to_string(), homes.len().to_string())?;
    }
    contradiction("plan", format!("{:?}", spec.plan(plan.records)), format!("{plan:?}"))?;
    if address.partition.get() >= *partitions {
        let (expected, found) = (format!("a number below {partitions}"), address.partition.to_string());
        return Err(Error::Contradiction { place, what: "partition", expected, found });
    }
    // Before the layout lists its chunks: their number is bounded by this.
    let elements = |shape: &[usize]| shape.iter().fold(1u64, |all, &size| all.saturating_mul(size as u64));
    let bytes = tensors.iter().fold(0u64, |all, tensor| {
        all.saturating_add(elements(&tensor.shape).saturating_mul(tensor.dtype().size() as u64))
    });
    let bytes = bytes / u64::from(*partitions);
    if bytes > bytes_max { Err(Error::PartitionTooLarge { place, bytes, bytes_max }) } else { Ok(()) }
}

/// The limit of the memory that pushes may take: of those on their way in, and of the sums that
/// wait for others. All partitions of a ps share it.
#[derive(Debug)]
pub(crate) struct Admission {
    metrics: Arc<Metrics>,
    bytes_max: u64,
}

impl Admission {
    /// Returns the limit of a ps that counts in `metrics`.
    pub(crate) const fn new(metrics: Arc<Metrics>, bytes_max: u64) -> Self {
        Self { metrics, bytes_max }
    }

    /// Reserves memory for a push of `bytes` to `place`. A push that `is_needed_first` may also
    /// take the room of sums that wait for others, because it lets their step end.
    ///
    /// # Errors
    /// [`Error::PushesFull`]. Then nothing is reserved.
    pub(crate) fn reserve(
        &self,
        place: Place,
        bytes: usize,
        is_needed_first: impl FnOnce() -> bool,
    ) -> Result<Reserved> {
        let (metrics, bytes, bytes_max) = (&self.metrics, bytes as u64, self.bytes_max);
        let held = metrics.push_bytes_held.get();
        let room = bytes_max.saturating_sub(held);
        if metrics.push_bytes_in_flight.add_below(bytes, room)
            || (held > 0 && is_needed_first() && metrics.push_bytes_in_flight.add_below(bytes, bytes_max))
        {
            return Ok(Reserved { metrics: metrics.clone(), bytes });
        }
        let in_flight_bytes = metrics.push_bytes_in_flight.get() + held;
        Err(Error::PushesFull { place, bytes, in_flight_bytes, bytes_max })
    }
}

/// Memory for a push on its way in; given back when dropped.
#[derive(Debug)]
pub(crate) struct Reserved {
    metrics: Arc<Metrics>,
    bytes: u64,
}

impl Drop for Reserved {
    fn drop(&mut self) {
        self.metrics.push_bytes_in_flight.sub(self.bytes);
    }
}
