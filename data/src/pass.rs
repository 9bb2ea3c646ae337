//! What is learnt of a text file while it is opened.
//!
//! Nothing but the whole text says where its records are, so opening a text file reads all of it.
//! An index needs more of each file: the checksum, and the labels. Both are collected on the way,
//! so that a file on another machine is read once.

use std::collections::HashSet;

use proto::column::ColumnSpec;

use crate::column::{Column, Fault};
use crate::cuts::Cuts;
use crate::object::Content;
use crate::observer::Observer;
use crate::packed::Access;

/// Most distinct values of a column that are collected, and their bytes. Labels of more classes are
/// read again.
const VALUES_MAX: usize = 1 << 16;
const BYTES_MAX: usize = 16 << 20;

/// Returns the index of the column whose values are collected. `None`: those of no column.
pub(crate) type Collects<'a> = &'a dyn Fn(&[ColumnSpec]) -> Option<usize>;

/// One reading of a whole file.
#[derive(Clone, Copy)]
pub(crate) struct Pass<'a> {
    pub(crate) observer: &'a dyn Observer,
    pub(crate) collects: Collects<'a>,
    /// Where the blocks of the file are, if that is known.
    pub(crate) cuts: Option<&'a Cuts>,
    /// How the records are read later.
    pub(crate) access: Access,
}

impl Pass<'_> {
    /// Returns a reading that collects nothing and is not observed.
    pub(crate) const fn plain() -> Self {
        Pass { observer: &(), collects: &|_| None, cuts: None, access: Access::Anywhere }
    }

    /// Returns the collection of the values of one of these columns.
    pub(crate) fn values(&self, columns: &[ColumnSpec]) -> Option<Distinct> {
        let at = (self.collects)(columns)?;
        Some(Distinct::new(at, &columns[at]))
    }
}

/// What a reading has found.
#[derive(Debug, Default)]
pub(crate) struct Learnt {
    /// Identity of the content. `None`: the file is in memory or mapped, and is not read for it.
    pub(crate) content: Option<Content>,
    pub(crate) values: Option<Distinct>,
}

impl Learnt {
    /// Returns the distinct values of a column, if they were collected.
    pub(crate) fn values_of(&self, column: usize) -> Option<&Distinct> {
        self.values.as_ref().filter(|values| values.column == column)
    }

    /// Adds this file's content to `content`, if it is known and has `bytes`.
    pub(crate) fn content_after(&self, content: Content, bytes: usize) -> Option<Content> {
        let own = self.content.filter(|own| own.bytes == bytes as u64)?;
        Some(content.followed_by(own))
    }
}

/// The distinct values of a column, each with the first record that has it.
#[derive(Debug)]
pub(crate) struct Distinct {
    /// Index of the column in its file.
    column: usize,
    /// One record for each value.
    values: Column,
    /// Number of the first record with each value.
    records: Vec<u64>,
    /// Numbers of the first record without a value, and of the first one with a broken value.
    missing: Option<u64>,
    broken: Option<u64>,
    seen: HashSet<Box<[u8]>>,
    /// Number of the next record.
    next: u64,
    /// Whether there are too many values.
    is_full: bool,
}

impl Distinct {
    fn new(column: usize, spec: &ColumnSpec) -> Self {
        Self {
            column,
            values: Column::with_capacity(spec.clone(), 0),
            records: Vec::new(),
            missing: None,
            broken: None,
            seen: HashSet::new(),
            next: 0,
            is_full: false,
        }
    }

    /// Returns an empty column for the next records.
    pub(crate) fn batch(&self) -> Column {
        Column::with_capacity(self.values.spec().clone(), 0)
    }

    /// Returns the index of the column in its file.
    pub(crate) const fn column(&self) -> usize {
        self.column
    }

    /// Adds the values of the records that follow.
    pub(crate) fn add(&mut self, column: &Column) {
        for row in 0..column.records() {
            let record = self.next;
            self.next += 1;
            match column.fault(row) {
                Some(Fault::Missing) => self.missing = self.missing.or(Some(record)),
                Some(Fault::Broken(_)) => self.broken = self.broken.or(Some(record)),
                None if self.is_full || self.seen.contains(column.record(row)) => {}
                None => self.keep(column.record(row), record),
            }
        }
    }

    fn keep(&mut self, value: &[u8], record: u64) {
        if self.records.len() == VALUES_MAX || self.values.bytes().len() + value.len() > BYTES_MAX {
            self.is_full = true;
            return;
        }
        self.values.push(value);
        self.records.push(record);
        self.seen.insert(value.into());
    }

    /// Returns the values, if all of them are here.
    pub(crate) fn whole(self) -> Option<Self> {
        (!self.is_full).then_some(self)
    }

    /// Returns the column of the values, and the number of the first record with each of them.
    pub(crate) fn values(&self) -> (&Column, &[u64]) {
        (&self.values, &self.records)
    }

    /// Returns the first record without a value and the first one with a broken value, sorted.
    pub(crate) fn faults(&self) -> Vec<u64> {
        let mut faults: Vec<u64> = [self.missing, self.broken].into_iter().flatten().collect();
        faults.sort_unstable();
        faults
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use proto::column::ElementType;

    use super::*;

    fn spec() -> ColumnSpec {
        ColumnSpec::fixed("y", ElementType::U8, [])
    }

    proptest! {
        #[test]
        fn each_value_has_its_first_record(
            records in proptest::collection::vec(0u8..6, 0..40), batch in 1usize..9
        ) {
            // 0 stands for no value, 1 for a broken one.
            let mut distinct = Distinct::new(0, &spec());
            for part in records.chunks(batch) {
                let mut column = distinct.batch();
                for &value in part {
                    match value {
                        0 => column.push_missing(),
                        1 => column.push_broken(|| "bad".into()),
                        value => column.push(&[value]),
                    }
                }
                distinct.add(&column);
            }
            let first = |value: u8| records.iter().position(|&found| found == value).map(|at| at as u64);
            let (values, numbers) = distinct.values();
            let found: Vec<_> = values.bytes().iter().copied().zip(numbers.iter().copied()).collect();
            let mut expected: Vec<_> = (2..6).filter_map(|value| Some((value, first(value)?))).collect();
            expected.sort_by_key(|&(_, record)| record);
            prop_assert_eq!(found, expected);
            let mut faults: Vec<u64> = [0, 1].into_iter().filter_map(first).collect();
            faults.sort_unstable();
            prop_assert_eq!(distinct.faults(), faults);
        }

        #[test]
        fn contents_one_after_the_other_have_the_checksum_of_all_bytes(
            before in proptest::collection::vec(any::<u8>(), 0..50),
            own in proptest::collection::vec(any::<u8>(), 0..50),
        ) {
            let content = |bytes: &[u8]| Content { bytes: bytes.len() as u64, crc32c: crc32c::crc32c(bytes) };
            let learnt = Learnt { content: Some(content(&own)), values: None };
            let both = [&before[..], &own].concat();
            prop_assert_eq!(learnt.content_after(content(&before), own.len()), Some(content(&both)));
            prop_assert_eq!(learnt.content_after(content(&before), own.len() + 1), None);
        }
    }

    #[test]
    fn too_many_values_are_not_collected() {
        let mut distinct = Distinct::new(3, &ColumnSpec::fixed("y", ElementType::I64, []));
        let mut column = distinct.batch();
        (0..VALUES_MAX as i64).for_each(|value| column.push(&value.to_le_bytes()));
        distinct.add(&column);
        assert!(!distinct.is_full);
        column.push(&(-1i64).to_le_bytes());
        distinct.add(&column);
        assert!(distinct.whole().is_none());
        let mut long = Distinct::new(0, &ColumnSpec::ragged("y", ElementType::U8, []));
        let mut column = long.batch();
        column.push(&vec![0; BYTES_MAX + 1]);
        long.add(&column);
        assert!(long.whole().is_none());
    }
}
