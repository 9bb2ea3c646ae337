//! A journal in memory: for masters that need none, and for simulations, where it outlives the master that wrote it.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use super::{Batch, Store, StoreError};

/// Keys and values in memory; clones share them.
#[derive(Clone, Debug, Default)]
pub struct MemoryStore(Arc<Mutex<BTreeMap<String, Vec<u8>>>>);

#[async_trait::async_trait]
impl Store for MemoryStore {
    async fn load(&self) -> Result<BTreeMap<String, Vec<u8>>, StoreError> {
        Ok(self.0.lock().unwrap_or_else(PoisonError::into_inner).clone())
    }

    async fn commit(&self, batch: &Batch) -> Result<(), StoreError> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        for (key, value) in batch {
            match value {
                Some(value) => drop(all.insert(key.clone(), value.clone())),
                None => drop(all.remove(key)),
            }
        }
        Ok(())
    }
}
