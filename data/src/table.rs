//! The records of one group of files that belong together: one file with all columns, or one file
//! for each column.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use proto::column::ColumnSpec;
use proto::spec::{DataSpec, FilesSpec};

use crate::any_order::{self, Drawn};
use crate::cache::{self, Blocks};
use crate::column::Column;
use crate::cuts::Cuts;
use crate::error::{Error, Result, wrong};
use crate::format::Source;
use crate::formats;
use crate::object::{Content, Object, Stamp};
use crate::observer::Observer;
use crate::pass::{Distinct, Pass};

/// Number of the next table of this process.
static NEXT: AtomicU64 = AtomicU64::new(0);

/// The records of a group of files. All files have as many records.
pub(crate) struct Table {
    /// Number in this process.
    id: u64,
    parts: Vec<Part>,
    columns: Vec<Place>,
    records: u64,
    /// State of the files before they were opened.
    stamp: String,
}

/// A file of a table.
struct Part {
    object: Object,
    source: Box<dyn Source>,
    /// First record of each block, and the number of records.
    starts: Vec<u64>,
}

/// Place of a column.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    pub(crate) spec: ColumnSpec,
    part: usize,
    /// Index among the part's columns.
    index: usize,
}

/// A file of a table that is to be opened.
#[derive(Clone, Debug)]
pub(crate) struct Named {
    /// Name of the file's list, which names the column of a format whose files have one.
    pub(crate) list: String,
    pub(crate) path: PathBuf,
    pub(crate) stamp: Stamp,
}

impl Named {
    /// Looks at file number `file` of each list.
    ///
    /// # Errors
    /// A file is missing.
    pub(crate) fn all(
        spec: &DataSpec,
        files: &FilesSpec,
        file: usize,
        root: Option<&Path>,
        observer: &dyn Observer,
    ) -> Result<Vec<Self>> {
        let named = files.group(file).map(|(list, name)| {
            let path = spec.locate(name, root);
            // Called here because another worker of this process may be reading the file already.
            observer.open(&path);
            let stamp = Stamp::of(&path, spec.format, observer)?;
            Ok(Self { list: list.to_owned(), path, stamp })
        });
        named.collect()
    }

    /// Returns the states of files as a text. Empty: that of one of them says too little.
    pub(crate) fn stamp(named: &[Self]) -> String {
        let states: Option<Vec<_>> = named.iter().map(|file| file.stamp.state()).collect();
        states.unwrap_or_default().join(" ")
    }
}

impl Table {
    /// Opens file number `file` of each list.
    ///
    /// # Errors
    /// A file is missing, malformed, or has another number of records than its partner.
    #[cfg(test)]
    pub(crate) fn open(
        spec: &DataSpec,
        files: &FilesSpec,
        file: usize,
        root: Option<&Path>,
        observer: &dyn Observer,
    ) -> Result<Self> {
        let pass = Pass { observer, ..Pass::plain() };
        Self::of(spec, &Named::all(spec, files, file, root, observer)?, root, pass)
    }

    /// Opens files that belong together. `pass` says what is learnt of files that are read to be
    /// opened.
    ///
    /// # Errors
    /// A file is missing, malformed, or has another number of records than its partner.
    pub(crate) fn of(spec: &DataSpec, files: &[Named], root: Option<&Path>, pass: Pass<'_>) -> Result<Self> {
        let (mut parts, mut columns): (Vec<Part>, Vec<Place>) = (Vec::new(), Vec::new());
        let first = spec.locate(spec.train.name(0), root);
        for Named { list, path, stamp } in files {
            let object = stamp.object(path, spec.format, pass.access, pass.observer)?;
            let source = formats::open_collecting(spec, &object, list, &first, pass)?;
            let ends = source.outline().blocks.iter().scan(0u64, |end, &records| {
                *end = end.saturating_add(records);
                Some(*end)
            });
            let starts = [0].into_iter().chain(ends).collect();
            let place =
                |(index, spec): (usize, &ColumnSpec)| Place { spec: spec.clone(), part: parts.len(), index };
            columns.extend(source.outline().columns.iter().enumerate().map(place));
            parts.push(Part { object, source, starts });
        }
        let Some(first) = parts.first() else {
            return Err(Error::NoSuchFile { file: 0, files: 0 });
        };
        let records = first.records();
        for other in &parts[1..] {
            if other.records() != records {
                return wrong(
                    other.object.path(),
                    format!(
                        "{} records, {records} in {}; the two files belong to different data",
                        other.records(),
                        first.object.path().display()
                    ),
                );
            }
        }
        Ok(Self {
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            parts,
            columns,
            records,
            stamp: Named::stamp(files),
        })
    }

    /// Returns the number of records.
    pub(crate) const fn records(&self) -> u64 {
        self.records
    }

    /// Returns the bytes of all files without compression.
    pub(crate) fn bytes(&self) -> u64 {
        self.parts.iter().map(|part| part.source.bytes(&part.object)).sum()
    }

    /// Returns whether a file is compressed and is unpacked piece by piece.
    pub(crate) fn is_packed(&self) -> bool {
        self.parts.iter().any(|part| part.object.is_packed())
    }

    /// Returns the columns, in the order of the lists' names and of the files.
    pub(crate) fn columns(&self) -> &[Place] {
        &self.columns
    }

    /// Returns the path of the first file, for errors.
    pub(crate) fn path(&self) -> &Path {
        self.parts[0].object.path()
    }

    /// Returns the path of a column's file, for errors.
    pub(crate) fn path_of(&self, column: &Place) -> &Path {
        self.parts[column.part].object.path()
    }

    /// Returns a record as errors name it: its number, and its name in a column's file.
    pub(crate) fn record(&self, column: &Place, record: u64) -> String {
        match self.parts[column.part].source.name(record) {
            Some(name) => format!("record {record}, `{name}`"),
            None => format!("record {record}"),
        }
    }

    /// Returns the first record of a ragged column and its length, and the first record with
    /// another length. It decodes the first block, so it is for errors. Empty: nothing can be read
    /// there.
    pub(crate) fn two_lengths(&self, column: &Place) -> Vec<(usize, u64)> {
        let source = &self.parts[column.part].source;
        if source.outline().records() == 0 {
            return Vec::new();
        }
        // The caller reports an error already.
        let Ok(read) = source.read(0, &[column.index]) else { return Vec::new() };
        let ends = read[0].ends().unwrap_or_default();
        let begins = [0].into_iter().chain(ends.iter().copied());
        let lengths = begins.zip(ends).map(|(begin, end)| end - begin).enumerate();
        let mut known = lengths.filter(|&(record, _)| read[0].fault(record).is_none());
        let first = known.next();
        let other = known.find(|&(_, length)| first.is_some_and(|(_, of_first)| of_first != length));
        first.into_iter().chain(other).collect()
    }

    /// Reads all bytes and returns their identity.
    ///
    /// # Errors
    /// A file cannot be read, or has changed.
    pub(crate) fn content(&self, observer: &dyn Observer) -> Result<Content> {
        let add = |content, part: &Part| part.source.content(&part.object, content, observer);
        self.parts.iter().try_fold(Content::default(), add)
    }

    /// Returns the distinct values of a column, if they were collected when the table was opened.
    pub(crate) fn distinct(&self, column: &Place) -> Option<&Distinct> {
        self.parts[column.part].source.distinct(column.index)
    }

    /// Returns what tells the files from other ones of the same size, one after the other. Empty:
    /// there is nothing.
    pub(crate) fn version(&self) -> String {
        let versions: Vec<_> = self.parts.iter().map(|part| part.object.version()).collect();
        if versions.iter().all(|version| version.is_empty()) { String::new() } else { versions.join(" ") }
    }

    /// Returns the state of the files before they were opened. Empty: it says too little.
    pub(crate) fn stamp(&self) -> &str {
        &self.stamp
    }

    /// Returns where the blocks of the only file are, in a format of which only the whole file says
    /// so.
    pub(crate) fn cuts(&self) -> Option<&Cuts> {
        match self.parts.as_slice() {
            [part] => part.source.cuts(),
            _ => None,
        }
    }

    /// Checks that no file has changed since it was opened.
    ///
    /// # Errors
    /// The first file that has.
    pub(crate) fn check(&self) -> Result<()> {
        self.parts.iter().try_for_each(|part| part.object.check())
    }

    /// Returns what it costs to read columns `wanted` of the files in any order. The data set has
    /// `used` of the records.
    pub(crate) fn drawn(&self, wanted: &[Place], used: u64) -> Vec<Drawn> {
        let of_part = |(at, part): (usize, &Part)| {
            let is_wanted =
                |index: usize| wanted.iter().any(|place| (place.part, place.index) == (at, index));
            let columns = part.source.outline().columns.iter().enumerate();
            let columns: Vec<&ColumnSpec> =
                columns.filter(|(index, _)| is_wanted(*index)).map(|(_, spec)| spec).collect();
            (!columns.is_empty()).then(|| part.drawn(&columns, used))
        };
        self.parts.iter().enumerate().filter_map(of_part).collect()
    }

    /// Returns the blocks of columns `wanted`.
    pub(crate) fn reader(self: &Arc<Self>, wanted: &[Place]) -> Reader {
        let mut of_parts: Vec<Vec<usize>> = vec![Vec::new(); self.parts.len()];
        let mut places = Vec::with_capacity(wanted.len());
        for Place { part, index, .. } in wanted {
            let columns = &mut of_parts[*part];
            let at = columns.iter().position(|other| other == index).unwrap_or_else(|| {
                columns.push(*index);
                columns.len() - 1
            });
            places.push((*part, at));
        }
        let columns = of_parts.into_iter().map(Arc::from).collect();
        Reader { table: self.clone(), columns, places, current: vec![None; self.parts.len()] }
    }

    fn block(&self, part: usize, block: usize, columns: &Arc<[usize]>) -> Result<Blocks> {
        let Part { object, source, .. } = &self.parts[part];
        let read = || {
            if !source.is_in_place() {
                object.read_in_blocks();
            }
            let mut columns = source.read(block, columns)?;
            // A decoder that learns sizes on its way has taken up to twice the memory.
            columns.iter_mut().for_each(Column::shrink);
            Ok(columns)
        };
        let key = cache::Key { table: self.id, part, block, columns: columns.clone() };
        cache::block(&key, read)
    }
}

impl Part {
    fn records(&self) -> u64 {
        self.starts.last().copied().unwrap_or_default()
    }

    /// Returns what it costs to read these columns in any order.
    fn drawn(&self, columns: &[&ColumnSpec], used: u64) -> Drawn {
        let (records, bytes) = (self.records(), self.source.bytes(&self.object));
        let block = || any_order::block_bytes(&self.source.outline().blocks, bytes);
        let together = || block().max(self.source.piece_bytes(&self.object).min(bytes));
        Drawn {
            used,
            records,
            bytes,
            together: (!self.source.is_in_place()).then(together),
            decoded: any_order::decoded_bytes(columns, &self.source.outline().columns, records, bytes),
        }
    }
}

/// A reader of some columns of a table, which keeps the blocks that it read last.
pub(crate) struct Reader {
    table: Arc<Table>,
    /// Indices of the columns in each part.
    columns: Vec<Arc<[usize]>>,
    /// Part of each wanted column, and its place among the part's.
    places: Vec<(usize, usize)>,
    /// The block at hand of each part, with its records.
    current: Vec<Option<(Range<u64>, Blocks)>>,
}

impl Reader {
    /// Calls `take` with each wanted column's block that has `record`, and the record's number
    /// there.
    ///
    /// # Errors
    /// A block is damaged.
    ///
    /// # Panics
    /// If the table has no such record.
    pub(crate) fn record(&mut self, record: u64, mut take: impl FnMut(usize, &Column, usize)) -> Result<()> {
        self.seek(record)?;
        for (wanted, &(part, at)) in self.places.iter().enumerate() {
            if let Some((records, columns)) = &self.current[part] {
                take(wanted, &columns[at], (record - records.start) as usize);
            }
        }
        Ok(())
    }
}

impl Reader {
    /// Reads the blocks that have a record.
    ///
    /// # Errors
    /// A block is damaged.
    ///
    /// # Panics
    /// If the table has no such record.
    fn seek(&mut self, record: u64) -> Result<()> {
        assert!(record < self.table.records, "record {record} of {}", self.table.records);
        for (part, columns) in self.columns.iter().enumerate().filter(|(_, columns)| !columns.is_empty()) {
            let current = &mut self.current[part];
            if !current.as_ref().is_some_and(|(records, _)| records.contains(&record)) {
                let starts = &self.table.parts[part].starts;
                let block = starts.partition_point(|&start| start <= record) - 1;
                *current = Some((starts[block]..starts[block + 1], self.table.block(part, block, columns)?));
            }
        }
        Ok(())
    }

    /// Reads the blocks that have the first one of some records. Returns how many of the records,
    /// from the first one on, lie in these blocks.
    ///
    /// # Errors
    /// A block is damaged.
    ///
    /// # Panics
    /// If there is no record, or the table has no such record.
    pub(crate) fn run(&mut self, records: &[u64]) -> Result<usize> {
        self.seek(records[0])?;
        let here = |record: &&u64| {
            **record < self.table.records
                && self.current.iter().flatten().all(|(records, _)| records.contains(*record))
        };
        Ok(records.iter().take_while(here).count())
    }

    /// Returns each wanted column of the blocks at hand, with the number of its first record.
    pub(crate) fn at_hand(&self) -> impl Iterator<Item = (&Column, u64)> {
        let column = |&(part, at): &(usize, usize)| {
            let (records, columns) = self.current[part].as_ref()?;
            Some((&columns[at], records.start))
        };
        self.places.iter().filter_map(column)
    }

    /// Appends the values of records in each wanted column to a column of `out`, without the rest
    /// of their blocks. Each file must be [direct](Self::is_direct).
    ///
    /// # Errors
    /// A file cannot be read.
    pub(crate) fn direct<'a>(
        &self,
        records: &[u64],
        out: impl Iterator<Item = &'a mut Column>,
    ) -> Result<()> {
        self.places.iter().zip(out).try_for_each(|(&(part, at), out)| {
            self.table.parts[part].source.direct(records, self.columns[part][at], out)
        })
    }

    /// Returns whether each wanted column of any record can be appended to that of `out` without
    /// the rest of a block.
    pub(crate) fn is_direct<'a>(&self, out: impl Iterator<Item = &'a Column>) -> bool {
        self.places.iter().zip(out).all(|(&(part, at), out)| {
            self.table.parts[part].source.is_direct(self.columns[part][at], out.spec().dtype)
        })
    }
}

impl std::fmt::Debug for Table {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Table")
            .field("path", &self.path())
            .field("records", &self.records)
            .finish_non_exhaustive()
    }
}

impl Drop for Table {
    fn drop(&mut self) {
        cache::forget(self.id);
    }
}
