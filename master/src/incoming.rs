//! The bytes of files that are on their way in, over all streams: what they may be together, and
//! what of them is whose. Pure.
//!
//! A stream reserves the bytes of a file before the file is made. It gives them back when it ends,
//! however it ends, or when a job has taken its files. So streams side by side have no more than
//! one after the other.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use proto::status::{Failure, Kind};

/// Everything that is reserved; clones are the same.
#[derive(Clone, Debug)]
pub(crate) struct Incoming {
    bytes_max: u64,
    by_owner: Arc<Mutex<BTreeMap<String, u64>>>,
}

/// What one stream has reserved; given back when it is dropped.
#[derive(Debug)]
pub(crate) struct Reservation {
    incoming: Incoming,
    owner: String,
    bytes: u64,
}

impl Incoming {
    /// Creates a count of incoming bytes that is empty.
    pub(crate) fn new(bytes_max: u64) -> Self {
        Self { bytes_max, by_owner: Arc::default() }
    }

    /// Creates a reservation of this owner that is empty.
    pub(crate) fn begin(&self, owner: &str) -> Reservation {
        Reservation { incoming: self.clone(), owner: owner.to_owned(), bytes: 0 }
    }

    fn by_owner(&self) -> MutexGuard<'_, BTreeMap<String, u64>> {
        self.by_owner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Reservation {
    /// Reserves `bytes` more. `check` is asked whether the owner may have as many as all its
    /// streams have then.
    ///
    /// # Errors
    /// What `check` says, or too many bytes are on their way in. Then nothing has changed.
    pub(crate) fn add(
        &mut self,
        bytes: u64,
        check: impl FnOnce(u64) -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        let mut by_owner = self.incoming.by_owner();
        let of_owner = by_owner.get(&self.owner).copied().unwrap_or_default().saturating_add(bytes);
        check(of_owner)?;
        let others: u64 = by_owner.iter().filter(|(owner, _)| **owner != self.owner).map(|(_, of)| of).sum();
        let (together, max) = (others.saturating_add(of_owner), self.incoming.bytes_max);
        if together > max {
            let message = format!(
                "files on their way in would be {together} bytes together, and this master takes {max} at once \
                 (incoming_bytes_max); try again when others have arrived"
            );
            return Err(Failure::new(Kind::Full, message));
        }
        by_owner.insert(self.owner.clone(), of_owner);
        self.bytes += bytes;
        Ok(())
    }

    /// Ends it before it is dropped: the files are somebody's.
    pub(crate) fn give_back(&mut self) {
        let mut by_owner = self.incoming.by_owner();
        let bytes = std::mem::take(&mut self.bytes);
        let left = by_owner.get(&self.owner).copied().unwrap_or_default().saturating_sub(bytes);
        match left {
            0 => drop(by_owner.remove(&self.owner)),
            left => drop(by_owner.insert(self.owner.clone(), left)),
        }
    }

    /// Bytes of all streams of the owner, this one included.
    pub(crate) fn of_owner(&self) -> u64 {
        self.incoming.by_owner().get(&self.owner).copied().unwrap_or_default()
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.give_back();
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn at_most(max: u64) -> impl Fn(u64) -> Result<(), Failure> {
        move |bytes| if bytes > max { Err(Failure::new(Kind::Denied, "the owner's")) } else { Ok(()) }
    }

    #[test]
    fn streams_side_by_side_have_no_more_than_one_after_the_other() {
        let incoming = Incoming::new(100);
        let (mut one, mut two, mut other) =
            (incoming.begin("anna"), incoming.begin("anna"), incoming.begin("ben"));
        assert_eq!(one.add(40, at_most(50)), Ok(()));
        assert_eq!(two.add(11, at_most(50)).unwrap_err().kind, Kind::Denied);
        assert_eq!(two.add(10, at_most(50)), Ok(()));
        assert_eq!((one.of_owner(), two.of_owner(), other.of_owner()), (50, 50, 0));
        let full = other.add(51, at_most(u64::MAX)).unwrap_err();
        assert!(full.kind == Kind::Full && full.message.contains("101 bytes together"), "{full}");
        assert_eq!(other.add(u64::MAX, at_most(u64::MAX)).unwrap_err().kind, Kind::Full);
        drop(one);
        assert_eq!(other.add(90, at_most(u64::MAX)), Ok(()));
        drop((two, other));
        assert!(incoming.by_owner().is_empty());
    }

    proptest! {
        #[test]
        fn what_is_reserved_is_what_streams_that_are_there_have(
            steps in proptest::collection::vec((0usize..6, 0u64..60, any::<bool>()), 0..60)
        ) {
            let incoming = Incoming::new(200);
            let mut streams: Vec<_> = (0..6).map(|_| None).collect();
            for (index, bytes, ends) in steps {
                let stream: &mut Option<Reservation> = &mut streams[index];
                if ends {
                    *stream = None;
                } else {
                    let owner = if index < 3 { "anna" } else { "ben" };
                    let stream = stream.get_or_insert_with(|| incoming.begin(owner));
                    let _ = stream.add(bytes, at_most(120));
                }
                let of = |which: std::ops::Range<usize>| -> u64 {
                    streams[which].iter().flatten().map(|stream| stream.bytes).sum()
                };
                let found = |owner| incoming.by_owner().get(owner).copied().unwrap_or_default();
                prop_assert_eq!((found("anna"), found("ben")), (of(0..3), of(3..6)));
                prop_assert!(of(0..3) <= 120 && of(3..6) <= 120 && of(0..6) <= 200);
            }
        }
    }
}
