//! Regions that are used again, because fresh memory from the system costs a page fault every 4
//! KiB.

use std::collections::HashMap;
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, PoisonError};

use proto::tensor::{DType, ExternalMemory, Values};

use super::{Memory, REGION_BYTES_MIN, Region};

/// A pool of regions of one memory, used again by requests of the same size. Clones are the same
/// pool.
#[derive(Clone)]
pub struct Regions(Arc<Shelf>);

struct Shelf {
    memory: Memory,
    spare: Mutex<Spare>,
}

/// Regions that are not in use.
#[derive(Default)]
struct Spare {
    by_size: HashMap<usize, OfSize>,
    /// Number of requests so far.
    asked: u64,
}

/// Regions of one size.
#[derive(Default)]
struct OfSize {
    regions: Vec<Region>,
    /// Number of the last request for this size.
    used: u64,
}

/// Number of requests without one for a size, after which regions of that size go back to the
/// system: the job that needed them has ended.
const FORGOTTEN: u64 = 4096;

/// Number of requests between two checks for unused sizes.
const LOOK: u64 = 256;

impl Spare {
    fn take(&mut self, bytes: usize) -> Option<Region> {
        self.asked += 1;
        let asked = self.asked;
        if asked.is_multiple_of(LOOK) {
            self.by_size.retain(|_, of| asked - of.used < FORGOTTEN);
        }
        let of = self.by_size.get_mut(&bytes)?;
        of.used = asked;
        of.regions.pop()
    }

    fn give(&mut self, region: Region) {
        let asked = self.asked;
        let of =
            self.by_size.entry(region.len()).or_insert_with(|| OfSize { regions: Vec::new(), used: asked });
        of.regions.push(region);
    }
}

/// A region that goes back to the pool when it is dropped.
pub struct Recycled {
    /// Always there, until it is dropped.
    region: Option<Region>,
    home: Regions,
}

impl Regions {
    /// Creates an empty pool.
    pub fn new(memory: Memory) -> Self {
        Self(Arc::new(Shelf { memory, spare: Mutex::default() }))
    }

    /// Returns the memory of the regions.
    pub fn memory(&self) -> &Memory {
        &self.0.memory
    }

    /// Takes a region of `bytes` with any content, on pages of its own. `None`: it is too small for
    /// a region, or there is no room; use other memory.
    pub fn take(&self, bytes: usize) -> Option<Recycled> {
        if bytes < REGION_BYTES_MIN {
            return None;
        }
        let spare = self.0.spare.lock().unwrap_or_else(PoisonError::into_inner).take(bytes);
        let region = spare.or_else(|| self.0.memory.take(bytes))?;
        Some(Recycled { region: Some(region), home: self.clone() })
    }

    /// `len` floats of any content. `None`: too few for a region, or there is no room; use other
    /// memory.
    pub fn floats(&self, len: usize) -> Option<Values> {
        let region = self.take(len * DType::F32.size())?;
        Some(Values::External(Box::new(region)))
    }
}

impl ExternalMemory for Recycled {
    fn bytes(&self) -> &[u8] {
        self
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        self
    }
}

impl fmt::Debug for Regions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Regions")
    }
}

impl Deref for Recycled {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.region.as_deref().unwrap_or_default()
    }
}

impl DerefMut for Recycled {
    fn deref_mut(&mut self) -> &mut [u8] {
        self.region.as_deref_mut().unwrap_or_default()
    }
}

impl AsRef<[u8]> for Recycled {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl Drop for Recycled {
    fn drop(&mut self) {
        let mut spare = self.home.0.spare.lock().unwrap_or_else(PoisonError::into_inner);
        self.region.take().into_iter().for_each(|region| spare.give(region));
    }
}

impl fmt::Debug for Recycled {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Recycled({} bytes)", self.len())
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn a_region_is_used_again_for_as_many_bytes() {
        let regions = Regions::new(Memory::with_bytes(4 * REGION_BYTES_MIN).unwrap());
        let first = regions.take(REGION_BYTES_MIN).unwrap();
        let at = first.as_ptr();
        drop(first);
        let other = regions.take(REGION_BYTES_MIN + 1).unwrap();
        assert_ne!(other.as_ptr(), at, "another size");
        let (again, new) = (regions.take(REGION_BYTES_MIN).unwrap(), regions.take(REGION_BYTES_MIN).unwrap());
        assert!(again.as_ptr() == at && new.as_ptr() != at);
        assert!(regions.take(REGION_BYTES_MIN - 1).is_none(), "too few");
        assert!(regions.take(2 * REGION_BYTES_MIN).is_none(), "no room");
    }

    #[test]
    fn a_size_that_nobody_needs_any_more_goes_back_to_the_system() {
        let regions = Regions::new(Memory::with_bytes(8 * REGION_BYTES_MIN).unwrap());
        let odd: Vec<_> = (0..3).map(|_| regions.take(2 * REGION_BYTES_MIN).unwrap()).collect();
        drop(odd);
        assert!(regions.take(4 * REGION_BYTES_MIN).is_none(), "the odd ones are kept");
        for _ in 0..FORGOTTEN + LOOK {
            assert!(regions.take(REGION_BYTES_MIN).is_some());
        }
        assert!(regions.take(4 * REGION_BYTES_MIN).is_some(), "the odd ones were given back");
    }
}
