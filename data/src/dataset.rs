//! The records of one data set of a job: all files one after the other, for random access.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use proto::column::ColumnSpec;
use proto::ids::Epoch;
use proto::spec::{DataSet, JobSpec, Records};
use proto::worst::Preview;

use crate::any_order;
use crate::batch::Batch;
use crate::column::Column;
use crate::error::{Error, Result, wrong};
use crate::finite::{NotFinite, not_finite};
use crate::index::KnownIndex;
use crate::levels::Levels;
use crate::observer::Observer;
use crate::packed::Access;
use crate::pass::Pass;
use crate::preview;
use crate::room;
use crate::schema::{Schema, Unfit};
use crate::table::{Reader, Table};
use crate::tables;
use crate::transform::Draws;
use crate::version;
use crate::windows;

/// A record that the job skips, because a value is missing or cannot be decoded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BadRecord {
    /// Number of the record over all files of its data set.
    pub record: u64,
    /// Column, place in the file, and what was found. The text names no folder of this machine, so
    /// that all workers find the same one.
    pub reason: String,
}

/// The records of one data set of a job, for random access.
#[derive(Debug)]
pub struct Dataset {
    pub(crate) tables: Vec<Arc<Table>>,
    /// Number of each table's first record over all files.
    starts: Vec<u64>,
    records: Records,
    /// What a batch has of each table's columns. They differ only in the places of the columns.
    schemas: Vec<Schema>,
    /// What a batch has of them if inputs keep their bytes.
    of_bytes: Vec<Schema>,
    /// What the bytes of each input become.
    levels: Vec<Option<Levels>>,
    /// Seed of random transforms: the job's.
    seed: u64,
}

impl Dataset {
    /// Opens the files of a data set, below `root` if given. Files that another data set of this
    /// process has open are shared. The call blocks.
    ///
    /// # Errors
    /// The job has no such set, or a file is missing, malformed, or does not fit the specification
    /// or the other files.
    pub fn open(spec: &JobSpec, set: DataSet, root: Option<&Path>) -> Result<Arc<Self>> {
        Self::open_observed(spec, set, root, &(), |_| None)
    }

    /// Opens the files of a data set like [`open`](Self::open), and reports the progress of the
    /// reading to `observer`. `known` says what an index found in the file with this number, so
    /// that the file need not be read for it.
    ///
    /// # Errors
    /// Those of [`open`](Self::open).
    pub fn open_observed<'a>(
        spec: &JobSpec,
        set: DataSet,
        root: Option<&Path>,
        observer: &dyn Observer,
        known: impl Fn(usize) -> Option<&'a KnownIndex>,
    ) -> Result<Arc<Self>> {
        let source = spec.data.files_of(set).ok_or(Error::NoSuchSet(set))?;
        let files = spec.data.files(source).ok_or(Error::NoSuchSet(set))?;
        let access = Access::of(spec, set);
        let open = |file| {
            let pass = Pass { observer, access, ..Pass::plain() };
            tables::open(&spec.data, &files, file, root, known(file), pass)
        };
        let tables: Vec<_> = (0..files.len()).map(open).collect::<Result<_>>()?;
        let Some(first) = tables.first() else { return Err(Error::NoSuchSet(set)) };

        let mut schemas = vec![Schema::new(spec, set, first)?];
        for table in &tables[1..] {
            let (schema, other) = (&schemas[0], Schema::new(spec, set, table)?);
            if let Some((expected, found)) = schema.renamed(&other) {
                return wrong(
                    table.path(),
                    format!(
                        "its columns are {found}; those of {} are {expected}; all files of a set must have the same columns \
                         in the same order: write them anew, or name the columns in data.inputs and data.label",
                        first.path().display()
                    ),
                );
            }
            if let Some((found, expected)) = schema.differs(&other) {
                return wrong(
                    table.path(),
                    format!(
                        "records have {found}, those of {} have {expected}; all files of a set must agree: convert or \
                         leave out those that differ",
                        first.path().display()
                    ),
                );
            }
            schemas.push(other);
        }
        if let Some(windows) = windows::of(spec).filter(|_| set == DataSet::Train) {
            windows::check_packed(&tables, windows, room::bytes_max())?;
        }
        let in_files: Vec<u64> = tables.iter().map(|table| table.records()).collect();
        let records = spec.data.records(set, &in_files, spec.seed).map_err(Error::Specification)?;
        let starts = in_files.iter().scan(0, |next, &records| Some(std::mem::replace(next, *next + records)));
        let (of_bytes, mut levels): (_, Vec<_>) = schemas.iter().map(Schema::of_bytes).unzip();
        Ok(Arc::new(Self {
            starts: starts.collect(),
            records: records.ok_or(Error::NoSuchSet(set))?,
            schemas,
            of_bytes,
            // The transforms of all tables are the same.
            levels: levels.swap_remove(0),
            seed: spec.seed,
            tables,
        }))
    }

    /// Checks that each file has as many records and bytes as when the job was indexed, because the
    /// order of records depends on the counts. 0 bytes are unknown. A file must also have its
    /// version, as far as that can be compared (`version.rs`).
    ///
    /// # Errors
    /// The first file with another number or version.
    pub fn check(&self, records: &[u64], bytes: &[u64], versions: &[String]) -> Result<()> {
        for (at, table) in self.tables.iter().enumerate() {
            let number = |list: &[u64], found| list.get(at).copied().unwrap_or(found);
            let (records, bytes) = (number(records, table.records()), number(bytes, 0));
            let bytes = if bytes == 0 { table.bytes() } else { bytes };
            if (table.records(), table.bytes()) != (records, bytes) {
                return Err(Error::Changed {
                    path: table.path().to_owned(),
                    expected: (records, bytes),
                    found: (table.records(), table.bytes()),
                });
            }
            let (found, then) = (table.version(), versions.get(at).map_or("", String::as_str));
            if let Some((found, then)) = version::difference(&found, then) {
                return wrong(
                    table.path(),
                    format!(
                        "the file has changed since the job was indexed: it is version {found} now, it was {then}; \
                         restore it, or submit the job anew"
                    ),
                );
            }
        }
        Ok(())
    }

    /// Checks that the records cost about as much as they have bytes in the order in which the job
    /// trains them. It reads nothing. The set is the training data of `spec`.
    ///
    /// # Errors
    /// The order is `records`, and a record costs more than 4 times its bytes. Or it is `window`,
    /// and the blocks of the windows that are read side by side do not fit into memory.
    pub fn check_order(&self, spec: &JobSpec) -> Result<()> {
        if let Some(windows) = windows::of(spec) {
            let tables = self.tables.iter().zip(&self.schemas);
            let tables: Vec<_> = tables.map(|(table, schema)| (&**table, schema)).collect();
            return windows::check(&tables, windows, room::bytes_max());
        }
        if !any_order::is_order_of(spec) {
            return Ok(());
        }
        let in_files: Vec<u64> = self.tables.iter().map(|table| table.records()).collect();
        let shards = self.records.shards(&in_files);
        // Records of a fraction lie in all files alike.
        let all: u64 = in_files.iter().sum();
        let share = |of: u64| (u128::from(of) * u128::from(self.len()) / u128::from(all.max(1))) as u64;
        let used = match shards.len() == in_files.len() {
            true => shards,
            false => in_files.into_iter().map(share).collect(),
        };
        let tables = self.tables.iter().zip(&self.schemas).zip(used);
        let tables: Vec<_> = tables.map(|((table, schema), used)| (&**table, schema, used)).collect();
        any_order::check(&tables, room::bytes_max())
    }

    /// Returns the number of records.
    pub const fn len(&self) -> u64 {
        self.records.len()
    }

    /// Returns false: a data set has at least one record.
    pub const fn is_empty(&self) -> bool {
        self.records.is_empty()
    }

    /// Returns how many of the set's records lie in each file, in order.
    pub fn shards(&self) -> Vec<u64> {
        let in_files: Vec<u64> = self.tables.iter().map(|table| table.records()).collect();
        self.records.shards(&in_files)
    }

    /// Returns the inputs of a batch, each named after the argument that takes it.
    pub fn inputs(&self) -> Vec<ColumnSpec> {
        self.schemas[0].inputs()
    }

    /// Returns what the bytes of each input become, in [`read_bytes`](Self::read_bytes). `None`:
    /// the input is there as in other batches.
    pub fn levels(&self) -> &[Option<Levels>] {
        &self.levels
    }

    /// Returns the bytes of a record in a batch, with its label.
    pub fn record_bytes(&self) -> u64 {
        let columns = self.inputs().into_iter().chain([self.schemas[0].labels()]);
        columns.map(|spec| (spec.width().unwrap_or(0) * spec.dtype.size()) as u64).sum()
    }

    /// Returns the smallest and the largest class in the files, or `None` if labels are no classes.
    /// It reads all labels.
    ///
    /// # Errors
    /// A label is no class.
    pub fn label_range(&self) -> Result<Option<(i64, i64)>> {
        let ranges =
            self.tables.iter().zip(&self.schemas).map(|(table, schema)| schema.label_range(table, &()));
        let ranges = ranges.collect::<Result<Vec<_>>>()?.into_iter().flatten();
        Ok(ranges.reduce(|a, b| (a.0.min(b.0), a.1.max(b.1))))
    }

    /// Returns the records with these numbers within this data set, in the order of `records`.
    /// Random transforms draw from `epoch` and the record's number over all files.
    ///
    /// # Errors
    /// There is no such record, a file is damaged or has changed, or a value is missing, cannot be
    /// decoded, or does not fit a transform or the type that the model gets.
    pub fn batch(&self, epoch: Epoch, records: impl IntoIterator<Item = u64>) -> Result<Batch> {
        let fail = |unfit: Unfit, table: &Table, row, _| Err(unfit.at(table, row));
        self.gather(&self.schemas, epoch, records, &BTreeSet::new(), fail)
    }

    /// Returns records like [`batch`](Self::batch), without bad ones: without those in `skipped`,
    /// which has numbers over all files and which are not read, and without others that the job
    /// skips. The second list has those others.
    ///
    /// # Errors
    /// Those of [`batch`](Self::batch) that the job does not skip.
    pub fn read(
        &self,
        epoch: Epoch,
        records: impl IntoIterator<Item = u64>,
        skipped: &BTreeSet<u64>,
    ) -> Result<(Batch, Vec<BadRecord>)> {
        self.read_by(&self.schemas, epoch, records, skipped)
    }

    /// Returns records like [`read`](Self::read), with bytes in the place of floats that are made
    /// of single bytes: [`levels`](Self::levels) has these floats.
    ///
    /// # Errors
    /// Those of [`read`](Self::read).
    pub fn read_bytes(
        &self,
        epoch: Epoch,
        records: impl IntoIterator<Item = u64>,
        skipped: &BTreeSet<u64>,
    ) -> Result<(Batch, Vec<BadRecord>)> {
        self.read_by(&self.of_bytes, epoch, records, skipped)
    }

    fn read_by(
        &self,
        schemas: &[Schema],
        epoch: Epoch,
        records: impl IntoIterator<Item = u64>,
        skipped: &BTreeSet<u64>,
    ) -> Result<(Batch, Vec<BadRecord>)> {
        let mut bad = Vec::new();
        let skip = |unfit: Unfit, table: &Table, row, record| {
            if !schemas[0].skips(&unfit) {
                return Err(unfit.at(table, row));
            }
            let (_, reason) = unfit.described(table, row);
            bad.push(BadRecord { record, reason });
            Ok(())
        };
        let batch = self.gather(schemas, epoch, records, skipped, skip)?;
        Ok((batch, bad))
    }

    /// Returns a batch, as `schemas` have it for each table, of the records that are not in
    /// `skipped`. `on_unfit` gets each record that
    /// has no place in it: its defect, its table, its number there, and its number over all files.
    ///
    /// # Errors
    /// There is no such record, a file has changed, or the error of `on_unfit`.
    fn gather(
        &self,
        schemas: &[Schema],
        epoch: Epoch,
        records: impl IntoIterator<Item = u64>,
        skipped: &BTreeSet<u64>,
        mut on_unfit: impl FnMut(Unfit, &Table, u64, u64) -> Result<()>,
    ) -> Result<Batch> {
        let of_epoch = Draws::epoch(self.seed, epoch.0);
        let in_files = |record| {
            let exists = record < self.len();
            exists
                .then(|| self.records.in_files(record))
                .ok_or(Error::NoRecord { record, records: self.len() })
        };
        let mut records: Vec<u64> = records.into_iter().map(in_files).collect::<Result<_>>()?;
        records.retain(|record| !skipped.contains(record));
        let empty = |spec| Column::with_capacity(spec, records.len());
        let mut batch = Batch {
            samples: 0,
            inputs: schemas[0].inputs().into_iter().map(empty).collect(),
            labels: empty(schemas[0].labels()),
            records: Vec::with_capacity(records.len()),
            placed: Default::default(),
        };
        let mut readers: Vec<_> = self.tables.iter().map(|_| None).collect();
        let mut rest = records.as_slice();
        while let Some(&next) = rest.first() {
            let at = self.locate(next).0;
            let (table, schema, start) = (&self.tables[at], &schemas[at], self.starts[at]);
            let reader = match &mut readers[at] {
                Some(reader) => reader,
                none => {
                    table.check()?;
                    none.insert(schema.reader(table))
                }
            };
            let in_table = |record: &&u64| (start..start + table.records()).contains(*record);
            let rows: Vec<u64> = rest.iter().take_while(in_table).map(|record| record - start).collect();
            let (in_table, after) = rest.split_at(rows.len());
            rest = after;
            if schema.direct(reader, &rows, &mut batch.inputs, &mut batch.labels)? {
                batch.records.extend(in_table);
            } else {
                self.gather_rows((at, schema), reader, &rows, of_epoch, &mut batch, &mut on_unfit)?;
            }
        }
        batch.samples = batch.records.len();
        Ok(batch)
    }

    /// Appends rows of table `at` to a batch of `schema`, as many together as blocks allow.
    ///
    /// # Errors
    /// What `on_unfit` returns for a row that cannot be read. Otherwise the batch is without it.
    fn gather_rows(
        &self,
        (at, schema): (usize, &Schema),
        reader: &mut Reader,
        mut rows: &[u64],
        of_epoch: u64,
        batch: &mut Batch,
        on_unfit: &mut impl FnMut(Unfit, &Table, u64, u64) -> Result<()>,
    ) -> Result<()> {
        let (table, start) = (&self.tables[at], self.starts[at]);
        while !rows.is_empty() {
            // Rows in the blocks of the next one. A row whose block cannot be read is read alone,
            // so that it is told.
            let here = reader.run(rows);
            let (run, after) = rows.split_at(*here.as_ref().unwrap_or(&1));
            rows = after;
            if here.is_ok() && schema.copy(reader, run, &mut batch.inputs, &mut batch.labels) {
                batch.records.extend(run.iter().map(|row| start + row));
                continue;
            }
            for &row in run {
                let record = start + row;
                let draws = Draws { epoch: of_epoch, record };
                match schema.read(reader, row, draws, &mut batch.inputs, &mut batch.labels) {
                    Ok(()) => batch.records.push(record),
                    Err(unfit) => {
                        on_unfit(unfit, table, row, record)?;
                        // A part of it may be there.
                        let whole = batch.records.len();
                        batch.inputs.iter_mut().for_each(|column| column.truncate(whole));
                        batch.labels.truncate(whole);
                    }
                }
            }
        }
        Ok(())
    }

    /// Returns the first values of a batch's inputs that are NaN or infinite. `batch` is of this
    /// data set.
    pub fn not_finite(&self, batch: &Batch) -> Option<NotFinite> {
        let found =
            batch.inputs.iter().zip(0..).find_map(|(input, at)| Some((at, input, not_finite(input)?)));
        let (at, input, (value, is_nan, count)) = found?;
        let width = (input.bytes().len() / input.spec().dtype.size() / batch.samples).max(1);
        let column = self.schemas[0].column(at, value % width).to_owned();
        Some(NotFinite {
            column,
            record: batch.records[value / width],
            is_nan,
            count,
            samples: batch.samples,
        })
    }

    /// Returns what a person sees of these records, which have numbers over all files: the first
    /// image and the first text of their inputs, before all transforms. `None`: there is neither.
    /// The call blocks.
    ///
    /// # Errors
    /// A file is damaged or has changed.
    pub fn previews(&self, records: &[u64]) -> Result<Vec<Option<Preview>>> {
        let mut previews = vec![None; records.len()];
        let mut readers: Vec<_> = self.tables.iter().map(|_| None).collect();
        let mut order: Vec<usize> = (0..records.len()).collect();
        // A block is decoded once.
        order.sort_unstable_by_key(|&at| records[at]);
        for at in order {
            let (file, row) = self.locate(records[at]);
            let table = &self.tables[file];
            let reader = readers[file].get_or_insert_with(|| {
                let stored = self.schemas[file].stored(table);
                let visible: Vec<_> =
                    stored.filter(|place| preview::is_visible(&place.spec)).cloned().collect();
                (!visible.is_empty()).then(|| table.reader(&visible))
            });
            let Some(reader) = reader else { continue };
            table.check()?;
            let mut found = Preview::default();
            reader.record(row, |_, column, row| preview::add(&mut found, column, row))?;
            previews[at] = Some(found).filter(|found| *found != Preview::default());
        }
        Ok(previews)
    }

    /// Reads and transforms one record, and adds the time of each step to that of the same name.
    ///
    /// # Errors
    /// Those of [`read`](Self::read).
    pub(crate) fn time(&self, epoch: Epoch, record: u64, steps: &mut Vec<(String, Duration)>) -> Result<()> {
        let record = self.records.in_files(record);
        let (at, row) = self.locate(record);
        let draws = Draws { epoch: Draws::epoch(self.seed, epoch.0), record };
        let schema = &self.schemas[at];
        let mut reader = schema.reader(&self.tables[at]);
        match schema.time(&mut reader, row, draws, steps) {
            Err(unfit) if !schema.skips(&unfit) => Err(unfit.at(&self.tables[at], row)),
            _ => Ok(()),
        }
    }

    /// Returns the index of the table that holds a record, and the record's number within it.
    fn locate(&self, record: u64) -> (usize, u64) {
        let table = self.starts.partition_point(|&start| start <= record) - 1;
        (table, record - self.starts[table])
    }
}
