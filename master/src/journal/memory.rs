//! A journal in memory: for masters that need none, and for simulations, where it outlives the
//! master that wrote it.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use super::{Batch, Count, Entry, Store};
use crate::error::StoreError;

/// Keys and values in memory; clones share them.
#[derive(Clone, Debug, Default)]
pub struct MemoryStore(Arc<Mutex<BTreeMap<String, Vec<u8>>>>);

#[async_trait::async_trait]
impl Store for MemoryStore {
    async fn load(&self) -> Result<BTreeMap<String, Vec<u8>>, StoreError> {
        Ok(self.0.lock().unwrap_or_else(PoisonError::into_inner).clone())
    }

    async fn read(&self, range: &Range<String>, count: Count) -> Result<Vec<Entry>, StoreError> {
        let all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let inside = all.range(range.clone()).map(|(key, value)| (key.clone(), value.clone()));
        Ok(match count {
            Count::Oldest(max) => inside.take(max).collect(),
            Count::Newest(max) => {
                let mut newest: Vec<_> = inside.rev().take(max).collect();
                newest.reverse();
                newest
            }
        })
    }

    async fn commit(&self, batch: &Batch) -> Result<(), StoreError> {
        batch.apply(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner));
        Ok(())
    }
}
