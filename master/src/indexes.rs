//! What workers found in the files of jobs, kept for later jobs and for the next start of the
//! master (ADR 35). Pure.
//!
//! **Always true:** an entry is a claim about a file in one state, which `Indexed.stamp` names. A
//! worker compares the file with it before the entry counts.

use std::collections::{BTreeMap, BTreeSet};

use prost::Message as _;
use proto::pb;

use crate::journal::{Batch, keys};

/// Most bytes of all entries, as they are in the journal.
const BYTES_MAX: usize = 32 << 20;

/// Indexes of files by the key of the file (`JobSpec::index_keys`).
#[derive(Debug, Default)]
pub(crate) struct Indexes {
    entries: BTreeMap<String, Entry>,
    /// Numbers of the last uses, with the keys.
    uses: BTreeSet<(u64, String)>,
    bytes: usize,
    /// Number of the next use.
    next: u64,
}

#[derive(Debug)]
struct Entry {
    found: pb::Indexed,
    used: u64,
    bytes: usize,
}

impl Indexes {
    /// Returns what was found in a file.
    pub(crate) fn get(&self, key: &str) -> Option<&pb::Indexed> {
        self.entries.get(key).map(|entry| &entry.found)
    }

    /// Keeps what was found in a file. Drops the entries that were not used for longest, if there
    /// are too many. `batch` gets the changes of the journal; it does not hear of a use alone.
    pub(crate) fn keep(&mut self, key: String, found: pb::Indexed, batch: &mut Batch) {
        let is_known = self.get(&key) == Some(&found);
        let record = pb::IndexRecord { found: Some(found), used: self.next };
        if !is_known {
            batch.set(keys::index(&key), record.encode_to_vec());
        }
        self.restore(key, record);
        while self.bytes > BYTES_MAX
            && let Some((_, key)) = self.uses.pop_first()
        {
            self.bytes -= self.entries.remove(&key).map_or(0, |entry| entry.bytes);
            batch.remove(keys::index(&key));
        }
    }

    /// Takes an entry, for example one of an earlier start of the master.
    pub(crate) fn restore(&mut self, key: String, record: pb::IndexRecord) {
        let bytes = key.len() + record.encoded_len();
        let pb::IndexRecord { found, used } = record;
        let Some(found) = found else { return };
        if let Some(before) = self.entries.insert(key.clone(), Entry { found, used, bytes }) {
            self.bytes -= before.bytes;
            self.uses.remove(&(before.used, key.clone()));
        }
        self.bytes += bytes;
        self.uses.insert((used, key));
        self.next = self.next.max(used.saturating_add(1));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(records: u64, bytes: usize) -> pb::Indexed {
        pb::Indexed { records, stamp: "s".repeat(bytes), ..Default::default() }
    }

    #[test]
    fn the_next_start_of_a_master_has_what_was_kept_and_nothing_is_written_twice() {
        let (mut first, mut batch) = (Indexes::default(), Batch::default());
        first.keep("a".to_owned(), found(7, 3), &mut batch);
        first.keep("a".to_owned(), found(9, 3), &mut batch);
        assert_eq!((first.get("a"), first.get("b")), (Some(&found(9, 3)), None));
        let mut again = Indexes::default();
        for (key, value) in &batch.keys {
            let record = pb::IndexRecord::decode(value.as_deref().unwrap()).unwrap();
            again.restore(keys::index_of(key).unwrap().to_owned(), record);
        }
        assert_eq!(again.get("a"), Some(&found(9, 3)));
        let mut nothing = Batch::default();
        again.keep("a".to_owned(), found(9, 3), &mut nothing);
        assert!(nothing.is_empty());
    }

    #[test]
    fn the_entries_that_were_not_used_for_longest_go_first() {
        let (mut indexes, mut batch) = (Indexes::default(), Batch::default());
        let large = BYTES_MAX / 3;
        for key in ["a", "b", "a"] {
            indexes.keep(key.to_owned(), found(1, large), &mut batch);
        }
        indexes.keep("c".to_owned(), found(1, large), &mut batch);
        let known = ["a", "b", "c"].map(|key| indexes.get(key).is_some());
        assert_eq!(known, [true, false, true]);
        assert_eq!(batch.keys[&keys::index("b")], None);
        assert!(indexes.bytes <= BYTES_MAX && indexes.uses.len() == 2);
    }
}
