//! The journal as one redb file in the data folder: each commit is synced to the disk.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use redb::{Database, ReadableDatabase, ReadableTable, TableDefinition};

use super::{Batch, Store, StoreError};
use crate::error::{Error, Result};

const TABLE: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("journal");

/// A file of keys and values. One process at a time may have it open.
#[derive(Clone, Debug)]
pub struct FileStore {
    database: Arc<Database>,
}

impl FileStore {
    /// Opens the file, or makes it. A file that was torn by a crash is repaired to its last commit.
    ///
    /// # Errors
    /// It cannot be read, or is no journal.
    pub fn open(path: &Path) -> Result<Self> {
        let unusable = |reason: redb::Error| Error::Journal { path: path.to_owned(), reason: reason.into() };
        let database = Database::create(path).map_err(|error| unusable(error.into()))?;
        Ok(Self { database: Arc::new(database) })
    }
}

#[async_trait::async_trait]
impl Store for FileStore {
    async fn load(&self) -> Result<BTreeMap<String, Vec<u8>>, StoreError> {
        let transaction = self.database.begin_read()?;
        let table = match transaction.open_table(TABLE) {
            Ok(table) => table,
            Err(redb::TableError::TableDoesNotExist(_)) => return Ok(BTreeMap::new()),
            Err(error) => return Err(error.into()),
        };
        let mut all = BTreeMap::new();
        for entry in table.iter()? {
            let (key, value) = entry?;
            all.insert(key.value().to_owned(), value.value().to_owned());
        }
        Ok(all)
    }

    async fn commit(&self, batch: &Batch) -> Result<(), StoreError> {
        let (database, batch) = (self.database.clone(), batch.clone());
        tokio::task::spawn_blocking(move || {
            let transaction = database.begin_write()?;
            {
                let mut table = transaction.open_table(TABLE)?;
                for (key, value) in &batch {
                    match value {
                        Some(value) => drop(table.insert(key.as_str(), value.as_slice())?),
                        None => drop(table.remove(key.as_str())?),
                    }
                }
            }
            transaction.commit()?;
            Ok::<_, StoreError>(())
        })
        .await?
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn what_was_committed_is_there_after_it_was_opened_again() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("journal.redb");
        let store = FileStore::open(&path).expect("made");
        assert!(store.load().await.expect("empty").is_empty());
        let batch = Batch::from([("a".to_owned(), Some(vec![1])), ("b".to_owned(), Some(vec![2]))]);
        store.commit(&batch).await.expect("written");
        store.commit(&Batch::from([("a".to_owned(), None)])).await.expect("written");
        drop(store);
        let found = FileStore::open(&path).expect("there").load().await.expect("readable");
        assert_eq!(found, BTreeMap::from([("b".to_owned(), vec![2])]));
    }

    #[test]
    fn a_file_that_is_no_journal_is_refused_by_name() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("journal.redb");
        std::fs::write(&path, b"weights, not a journal").expect("written");
        let error = FileStore::open(&path).expect_err("no journal").to_string();
        assert!(error.contains("journal.redb"), "{error}");
    }
}
