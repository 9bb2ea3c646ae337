//! Memory for microbatches that are read ahead of the computation.
//!
//! The reader of a lease takes a [`Place`] before it reads a microbatch, and the place is free when
//! the computation takes the microbatch. Places of all leases share a number of bytes. Beside them
//! each lease has one place of its own. So a microbatch may be larger than the room, and a lease
//! never waits for microbatches of another one that is computed later.

use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Bytes of one permit. The number of permits of a place has 32 bits.
const UNIT: u64 = 4096;

/// The room that all leases share.
#[derive(Clone, Debug)]
pub(crate) struct Room {
    permits: Arc<Semaphore>,
    all: u32,
}

/// The places of one lease.
#[derive(Clone, Debug)]
pub(crate) struct Places {
    room: Room,
    own: Arc<Semaphore>,
    /// Permits of a microbatch.
    permits: u32,
}

/// The place of one microbatch, until it is dropped.
#[derive(Debug)]
pub(crate) struct Place(#[expect(dead_code, reason = "held until it is dropped")] OwnedSemaphorePermit);

impl Room {
    /// Returns an empty room.
    pub(crate) fn new(bytes: u64) -> Self {
        let all = permits(bytes).max(1);
        Self { permits: Arc::new(Semaphore::new(all as usize)), all }
    }

    /// Returns the places of a lease whose microbatches have so many bytes.
    pub(crate) fn places(&self, bytes: u64) -> Places {
        let permits = permits(bytes).clamp(1, self.all);
        Places { room: self.clone(), own: Arc::new(Semaphore::new(1)), permits }
    }
}

impl Places {
    /// Waits for a place for one microbatch.
    pub(crate) async fn take(&self) -> Place {
        let shared = self.room.permits.clone().acquire_many_owned(self.permits);
        let permit = tokio::select! {
            biased;
            own = self.own.clone().acquire_owned() => own,
            shared = shared => shared,
        };
        Place(permit.expect("nobody closes a room"))
    }
}

fn permits(bytes: u64) -> u32 {
    u32::try_from(bytes.div_ceil(UNIT)).unwrap_or(u32::MAX >> 1)
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;

    fn now(places: &Places) -> Option<Place> {
        places.take().now_or_never()
    }

    #[test]
    fn a_lease_has_one_place_beside_those_of_the_room() {
        let room = Room::new(3 * UNIT);
        let (first, second) = (room.places(UNIT), room.places(2 * UNIT));
        let taken: Vec<_> = std::iter::from_fn(|| now(&first)).collect();
        assert_eq!(taken.len(), 1 + 3);
        let own = now(&second);
        assert!(own.is_some(), "a full room must not stop another lease");
        assert!(now(&second).is_none());
        drop(own);
        assert!(now(&second).is_some());
        drop(taken);
        let taken: Vec<_> = std::iter::from_fn(|| now(&second)).collect();
        assert_eq!(taken.len(), 1 + 1, "one byte too few for another one");
    }

    #[test]
    fn a_microbatch_that_is_larger_than_the_room_takes_all_of_it() {
        let room = Room::new(UNIT);
        let (large, small) = (room.places(u64::MAX), room.places(1));
        let taken: Vec<_> = std::iter::from_fn(|| now(&large)).collect();
        assert_eq!(taken.len(), 2);
        let own: Vec<_> = std::iter::from_fn(|| now(&small)).collect();
        assert_eq!(own.len(), 1, "its own place alone");
    }

    #[test]
    fn who_waits_gets_the_place_that_is_free_first() {
        let room = Room::new(UNIT);
        let places = room.places(UNIT);
        let (own, shared) = (now(&places), now(&places));
        let mut waiting = Box::pin(places.take());
        assert!(waiting.as_mut().now_or_never().is_none());
        drop(shared);
        let place = waiting.now_or_never();
        assert!(place.is_some() && now(&places).is_none());
        drop(own);
        assert!(now(&places).is_some());
    }
}
