//! What a batch has of the columns of a table: the arguments of a model, and the label.
//!
//! Without `data.inputs` the model takes one argument, `features`, as f32: the column `features`,
//! or all columns but the label side by side. A model of token files takes `tokens`, as if
//! `data.inputs` named it. With `data.inputs` each argument is a column in its own type and shape,
//! except that f64 becomes f32, the type of a model's weights. `data.dtypes` sets another type.
//!
//! A column with transforms counts here as what they make of it. A missing value is replaced before
//! its transforms, if the job says by what.

use std::sync::Arc;
use std::time::Duration;

use proto::column::{ColumnSpec, ElementType};
use proto::spec::{
    DataSet, DataSpec, FEATURES, Format, InputSpec, JobSpec, LABELS, Loss, MissingRule, MissingSpec,
    Normalize, OnError,
};

use crate::cast::each_i64;
use crate::clock;
use crate::column::{Chosen, Column, Fault, each_f64};
use crate::error::{Error, Result, malformed, wrong};
use crate::levels::Levels;
use crate::missing::Missing;
use crate::observer::Observer;
use crate::table::{Place, Reader, Table};
use crate::transform::{self, Draws, Pipeline};

/// Most names of columns in one list of a message.
const NAMES_SHOWN: usize = 20;

/// Labels between two calls of an observer.
const LABELS_OBSERVED: u64 = 4096;

/// Columns of a batch, and where they come from.
#[derive(Clone, Debug)]
pub(crate) struct Schema {
    inputs: Vec<Input>,
    /// `None`: the table has none, and the job needs none.
    label: Option<Place>,
    /// Type and shape of the label in a batch.
    labels: ColumnSpec,
    /// Whether labels are read with the records. Otherwise those of a batch are zeros.
    reads_labels: bool,
    /// Whether labels are classes.
    classes: bool,
    /// Class that does not count.
    ignored: i64,
    /// Columns of the inputs, then the label, if there is one. Type and shape are those that the
    /// transforms make.
    wanted: Vec<Place>,
    /// Transforms of each column in `wanted` that has some.
    pipelines: Vec<Option<Arc<Pipeline>>>,
    /// What takes the place of a missing value in each column in `wanted`.
    missing: Vec<Missing>,
    /// What happens to a record with a value that cannot be decoded.
    on_error: OnError,
    /// Whether each column of a batch has the values of one column of the table, if their types
    /// allow it.
    is_plain: bool,
}

/// The columns of a table, after their transforms.
struct Columns<'a> {
    data: &'a DataSpec,
    table: &'a Table,
    places: Vec<Place>,
    /// Transforms of each column in `places` that has some.
    pipelines: Vec<Option<Arc<Pipeline>>>,
}

/// An argument of a model.
#[derive(Clone, Debug)]
struct Input {
    spec: ColumnSpec,
    /// Indices of its columns among `wanted`.
    columns: std::ops::Range<usize>,
    /// Scaling to f32. `None`: the values keep their bits, or become those of another type.
    normalize: Option<Normalize>,
}

/// A value or a block that cannot be read into a batch.
#[derive(Debug)]
pub(crate) enum Unfit {
    /// A value that the type in the batch has no place for.
    Value {
        place: Place,
        value: f64,
        dtype: ElementType,
    },
    /// Values that a transform does not take.
    Transform {
        place: Place,
        reason: String,
    },
    /// A value that cannot be decoded.
    Broken {
        place: Place,
        reason: String,
    },
    /// A value that the file lacks.
    Missing {
        place: Place,
        rule: MissingRule,
    },
    Block(Error),
}

impl From<Error> for Unfit {
    fn from(error: Error) -> Self {
        Self::Block(error)
    }
}

impl Unfit {
    /// Returns the error of a record of a table.
    pub(crate) fn at(self, table: &Table, record: u64) -> Error {
        let (place, reason) = match self {
            Self::Block(error) => return error,
            other => other.described(table, record),
        };
        malformed(table.path_of(&place), reason)
    }

    /// Returns the column, and what is wrong with a record of a table, without the file's path,
    /// which is another one on other workers.
    ///
    /// # Panics
    /// If a whole block cannot be read.
    pub(crate) fn described(self, table: &Table, record: u64) -> (Place, String) {
        let of = |place: &Place| format!("column `{}` of {}", place.spec.name, table.record(place, record));
        match self {
            Self::Transform { place, reason } | Self::Broken { place, reason } => {
                let reason = format!("{}: {reason}", of(&place));
                (place, reason)
            }
            Self::Missing { place, .. } => {
                let name = &place.spec.name;
                let reason = format!(
                    "{} has no value; fill it, or set data.missing.{name} to a value or to \"skip\"",
                    of(&place)
                );
                (place, reason)
            }
            Self::Value { place, value, dtype } => {
                let name = &place.spec.name;
                let reason = format!(
                    "column `{name}`: {value} of record {record} is no value of type {dtype}; mend it, or set another type \
                     in data.dtypes"
                );
                (place, reason)
            }
            Self::Block(error) => panic!("a block that cannot be read is no bad record: {error}"),
        }
    }
}

impl Schema {
    /// Finds the job's columns in a table of a data set.
    ///
    /// # Errors
    /// A column is missing, or has a type or a shape that a batch cannot have, or a transform does
    /// not fit its column.
    pub(crate) fn new(spec: &JobSpec, set: DataSet, table: &Table) -> Result<Self> {
        let reads_labels = spec.needs_labels(set);
        let columns = Columns::new(spec, set, table)?;
        let label = columns.label(reads_labels)?;
        let mut wanted = Vec::new();
        let inputs = match spec.data.named_inputs() {
            None => vec![columns.features(label.as_ref(), &mut wanted)?],
            Some(inputs) => {
                let arguments = inputs.arguments().into_iter();
                arguments
                    .map(|(name, input)| columns.argument(name, &input, &mut wanted))
                    .collect::<Result<_>>()?
            }
        };
        let classes = spec.model.loss.wants_classes();
        let labels = match &label {
            Some(label) if reads_labels => labels(spec, table, label)?,
            _ => ColumnSpec::fixed(LABELS, if classes { ElementType::I64 } else { ElementType::F32 }, []),
        };
        wanted.extend(label.clone());
        let pipelines: Vec<_> = wanted.iter().map(|place| columns.pipeline(place)).collect();
        let missing = wanted.iter().map(|place| columns.missing(place)).collect::<Result<_>>()?;
        let (ignored, on_error) = (spec.model.ignore_index, spec.data.on_error);
        let schema = Self {
            inputs,
            label,
            labels,
            reads_labels,
            classes,
            ignored,
            wanted,
            pipelines,
            missing,
            on_error,
            is_plain: false,
        };
        Ok(Self { is_plain: schema.is_plain(), ..schema })
    }

    fn is_plain(&self) -> bool {
        let is_alike = |(own, place): (&ColumnSpec, &Place)| own.shape == place.spec.shape;
        let columns = self.inputs.iter().map(|input| &input.spec).chain([&self.labels]);
        self.reads_labels
            && self.wanted.len() == self.inputs.len() + 1
            && self.inputs.iter().all(|input| input.normalize.is_none() && input.columns.len() == 1)
            && columns.zip(&self.wanted).all(is_alike)
            && self.pipelines.iter().all(Option::is_none)
    }

    /// Returns the schema of batches whose inputs keep their bytes, and what the bytes of each
    /// input become. An input without levels is the same in both.
    pub(crate) fn of_bytes(&self) -> (Self, Vec<Option<Levels>>) {
        let mut schema = self.clone();
        let levels = (0..self.inputs.len()).map(|input| schema.keep_bytes(input)).collect();
        schema.is_plain = schema.is_plain();
        (schema, levels)
    }

    /// Lets an input keep its bytes, if it becomes floats byte by byte. Returns what they become.
    fn keep_bytes(&mut self, input: usize) -> Option<Levels> {
        let Input { spec, columns, normalize } = &mut self.inputs[input];
        if spec.dtype != ElementType::F32 || columns.len() != 1 {
            return None;
        }
        let (place, pipeline) = (&mut self.wanted[columns.start], &mut self.pipelines[columns.start]);
        let (kept, levels) = match &*pipeline {
            Some(made) if made.spec().dtype == ElementType::F32 => {
                let (before, levels) = made.of_bytes()?;
                (Some(Arc::new(before)).filter(|before| !before.is_empty()), levels)
            }
            kept if place.spec.dtype == ElementType::U8 => {
                (kept.clone(), Levels::new(1, 1, |_, byte| f32::from(byte)))
            }
            _ => return None,
        };
        let levels = match normalize {
            Some(normalize) => levels.then(|level| scaled(f64::from(level), *normalize)),
            None => levels,
        };
        if !levels.are_finite() {
            return None;
        }
        (spec.dtype, *normalize) = (ElementType::U8, None);
        (place.spec.dtype, *pipeline) = (ElementType::U8, kept);
        Some(levels)
    }

    /// Returns the columns that are read with the records.
    pub(crate) fn read_columns(&self) -> &[Place] {
        match (&self.label, self.reads_labels) {
            (Some(_), false) => &self.wanted[..self.wanted.len() - 1],
            _ => &self.wanted,
        }
    }

    /// Returns the columns of the inputs as `table` has them, before all transforms.
    pub(crate) fn stored<'a>(&self, table: &'a Table) -> impl Iterator<Item = &'a Place> {
        let inputs = self.inputs.last().map_or(0, |input| input.columns.end);
        let names = self.wanted[..inputs].iter().map(|place| &place.spec.name);
        names.filter_map(|name| table.columns().iter().find(|place| place.spec.name == *name))
    }

    /// Returns whether a record with this defect is skipped. A block that cannot be read is no
    /// record.
    pub(crate) const fn skips(&self, unfit: &Unfit) -> bool {
        match unfit {
            Unfit::Block(_) => false,
            Unfit::Missing { rule, .. } => matches!(rule, MissingRule::Skip),
            Unfit::Broken { .. } | Unfit::Transform { .. } | Unfit::Value { .. } => {
                matches!(self.on_error, OnError::Skip)
            }
        }
    }

    /// Returns a record's values of column `wanted`: those of the file, or what takes their place.
    fn values<'a>(
        &'a self,
        wanted: usize,
        column: &'a Column,
        row: usize,
    ) -> std::result::Result<&'a [u8], Unfit> {
        let place = || self.wanted[wanted].clone();
        match (column.fault(row), &self.missing[wanted]) {
            (None, _) => Ok(column.record(row)),
            (Some(Fault::Broken(reason)), _) => {
                Err(Unfit::Broken { place: place(), reason: reason.to_owned() })
            }
            (Some(Fault::Missing), Missing::Fill(value)) => Ok(value),
            (Some(Fault::Missing), Missing::Rule(rule)) => {
                Err(Unfit::Missing { place: place(), rule: *rule })
            }
        }
    }

    /// Returns the inputs of a batch.
    pub(crate) fn inputs(&self) -> Vec<ColumnSpec> {
        self.inputs.iter().map(|input| input.spec.clone()).collect()
    }

    /// Returns the name of the column from which a value of an input comes. `value` is its number
    /// within a record.
    pub(crate) fn column(&self, input: usize, value: usize) -> &str {
        let columns = &self.wanted[self.inputs[input].columns.clone()];
        let column = if columns.len() == 1 { &columns[0] } else { &columns[value] };
        &column.spec.name
    }

    /// Returns the labels of a batch.
    pub(crate) fn labels(&self) -> ColumnSpec {
        self.labels.clone()
    }

    /// Returns the first column of `other` that differs, with that of this schema, for people.
    pub(crate) fn differs(&self, other: &Self) -> Option<(String, String)> {
        let specs = |schema: &Self| {
            let inputs = schema.inputs().into_iter().chain([schema.labels()]);
            let stored =
                schema.read_columns().iter().zip(&schema.pipelines).map(|(place, pipeline)| match pipeline {
                    Some(pipeline) => pipeline.column().to_string(),
                    None => place.spec.dtype.to_string(),
                });
            inputs.map(|spec| spec.to_string()).chain(stored).collect::<Vec<_>>()
        };
        let (own, others) = (specs(self), specs(other));
        own.into_iter().zip(others).find(|(own, other)| own != other).map(|(own, other)| (other, own))
    }

    /// Returns the names of this schema's columns and those of `other`, for people, if they differ.
    /// Inputs come first, the label last.
    pub(crate) fn renamed(&self, other: &Self) -> Option<(String, String)> {
        let names = |schema: &Self| -> Vec<String> {
            schema.read_columns().iter().map(|place| place.spec.name.clone()).collect()
        };
        let (own, others) = (names(self), names(other));
        let equal = own.iter().zip(&others).take_while(|(own, other)| own == other).count();
        (own != others).then(|| (listed(&own, equal), listed(&others, equal)))
    }

    /// Returns a reader of a table's columns.
    pub(crate) fn reader(&self, table: &Arc<Table>) -> Reader {
        table.reader(self.read_columns())
    }

    /// Appends some records to the columns of a batch, column by column, if they need nothing but
    /// to be copied. Returns whether it has done so. `records` are in the blocks that `reader` has
    /// at hand.
    pub(crate) fn copy(
        &self,
        reader: &Reader,
        records: &[u64],
        inputs: &mut [Column],
        labels: &mut Column,
    ) -> bool {
        let columns = || inputs.iter().chain([&*labels]);
        if !self.is_plain || !reader.at_hand().zip(columns()).all(|((block, _), column)| column.takes(block))
        {
            return false;
        }
        let chosen = Chosen::new(records);
        for ((block, first), column) in reader.at_hand().zip(inputs.iter_mut().chain([labels])) {
            column.extend_from(block, chosen, first);
        }
        true
    }

    /// Appends some records to the columns of a batch like [`copy`](Self::copy), straight from the
    /// files. Returns whether it has done so.
    ///
    /// # Errors
    /// A file cannot be read.
    pub(crate) fn direct(
        &self,
        reader: &Reader,
        records: &[u64],
        inputs: &mut [Column],
        labels: &mut Column,
    ) -> Result<bool> {
        let columns = || inputs.iter().chain([&*labels]);
        let is_direct = self.is_plain && reader.is_direct(columns());
        if is_direct {
            reader.direct(records, inputs.iter_mut().chain([labels]))?;
        }
        Ok(is_direct)
    }

    /// Appends a record to the columns of a batch.
    ///
    /// # Errors
    /// A block is damaged, or a value is missing, broken, or does not fit the batch. Then the
    /// columns are left with a part of the record.
    pub(crate) fn read(
        &self,
        reader: &mut Reader,
        record: u64,
        draws: Draws,
        inputs: &mut [Column],
        labels: &mut Column,
    ) -> std::result::Result<(), Unfit> {
        let (mut unfit, mut result) = (None, Vec::new());
        // The input whose columns come now. They come in the order of `wanted`.
        let mut at = 0;
        reader.record(record, |wanted, column, row| {
            if unfit.is_some() {
                return;
            }
            let (mut raw, mut from) = match self.values(wanted, column, row) {
                Ok(raw) => (raw, column.spec().dtype),
                Err(found) => {
                    unfit = Some(found);
                    return;
                }
            };
            while self.inputs.get(at).is_some_and(|input| input.columns.end <= wanted) {
                at += 1;
            }
            if let Some(pipeline) = &self.pipelines[wanted] {
                let to = match self.inputs.get(at) {
                    None => Some(&mut *labels),
                    Some(Input { normalize: None, .. }) => Some(&mut inputs[at]),
                    Some(Input { normalize: Some(_), .. }) => None,
                };
                // Values of the batch's own type are made where they stay.
                let (room, is_in_place) = match to {
                    Some(to) if to.spec().dtype == pipeline.spec().dtype => (to.grow(), true),
                    _ => {
                        result.resize(pipeline.bytes(), 0);
                        (result.as_mut_slice(), false)
                    }
                };
                if let Err(reason) = pipeline.apply(raw, draws, room) {
                    unfit = Some(Unfit::Transform { place: self.wanted[wanted].clone(), reason });
                    return;
                }
                if is_in_place {
                    return;
                }
                (raw, from) = (&result, pipeline.spec().dtype);
            }
            let fitted = match self.inputs.get(at) {
                None => labels.grow_as(from, raw),
                Some(Input { normalize: None, .. }) => inputs[at].grow_as(from, raw),
                Some(Input { normalize: Some(normalize), columns, .. }) => {
                    let nth = wanted - columns.start;
                    let room = if nth == 0 { inputs[at].grow() } else { inputs[at].last_mut() };
                    scale(*normalize, from, raw, &mut room[nth * size_of::<f32>()..]);
                    Ok(())
                }
            };
            if let Err((value, dtype)) = fitted {
                unfit = Some(Unfit::Value { place: self.wanted[wanted].clone(), value, dtype });
            }
        })?;
        if !self.reads_labels {
            labels.grow();
        }
        unfit.map_or(Ok(()), Err)
    }

    /// Reads a record and transforms it, and adds the time of each step to that of the same name.
    ///
    /// # Errors
    /// A block is damaged, or a value does not fit a transform.
    pub(crate) fn time(
        &self,
        reader: &mut Reader,
        record: u64,
        draws: Draws,
        steps: &mut Vec<(String, Duration)>,
    ) -> std::result::Result<(), Unfit> {
        let (mut unfit, mut transforming) = (None, Duration::ZERO);
        let began = clock::now();
        reader.record(record, |wanted, column, row| {
            let raw = match self.values(wanted, column, row) {
                Ok(raw) => raw,
                Err(found) => {
                    unfit = unfit.take().or(Some(found));
                    return;
                }
            };
            let Some(pipeline) = &self.pipelines[wanted] else { return };
            let begun = clock::now();
            if let Err(reason) = pipeline.time(raw, draws, steps) {
                let place = self.wanted[wanted].clone();
                unfit = unfit.take().or(Some(Unfit::Transform { place, reason }));
            }
            transforming += begun.elapsed();
        })?;
        transform::add(steps, "read", began.elapsed().saturating_sub(transforming));
        unfit.map_or(Ok(()), Err)
    }

    /// Returns the smallest and the largest label of a table, or `None` if labels are no classes or
    /// there are no labels. It reads all labels, unless those of the table are known, and leaves
    /// out those of records that the job skips because of their label. In files that the job
    /// predicts it leaves out every label that is missing, broken, or no class. Reports the
    /// progress to `observer`.
    ///
    /// # Errors
    /// A label is missing, broken, or no class.
    pub(crate) fn label_range(
        &self,
        table: &Arc<Table>,
        observer: &dyn Observer,
    ) -> Result<Option<(i64, i64)>> {
        let Some(label) = self.label.as_ref().filter(|_| self.classes) else { return Ok(None) };
        let mut reader = table.reader(std::slice::from_ref(label));
        let mut labels = Labels::new(self, label, table);
        let Some(distinct) = table.distinct(label) else {
            for record in 0..table.records() {
                if record.is_multiple_of(LABELS_OBSERVED) {
                    observer.advance();
                }
                let mut found = Ok(());
                reader.record(record, |_, column, row| found = labels.add(column, row, record))?;
                found?;
            }
            return Ok(labels.range);
        };
        // The first record of each value, and of each fault, stands for all of them.
        let (values, records) = distinct.values();
        let known = records.iter().enumerate().map(|(row, &record)| (record, Some(row)));
        let mut all: Vec<_> = known.chain(distinct.faults().into_iter().map(|fault| (fault, None))).collect();
        all.sort_unstable();
        for (record, row) in all {
            let mut found = Ok(());
            match row {
                Some(row) => found = labels.add(values, row, record),
                None => reader.record(record, |_, column, row| found = labels.add(column, row, record))?,
            }
            found?;
        }
        Ok(labels.range)
    }
}

/// The range of the labels that were seen.
struct Labels<'a> {
    schema: &'a Schema,
    table: &'a Table,
    /// The label's column, and its index among those that are wanted.
    place: &'a Place,
    label: usize,
    /// Result of the label's transforms.
    result: Vec<u8>,
    range: Option<(i64, i64)>,
}

impl<'a> Labels<'a> {
    fn new(schema: &'a Schema, place: &'a Place, table: &'a Table) -> Self {
        let label = schema.wanted.len() - 1;
        let bytes = schema.pipelines[label].as_ref().map_or(0, |pipeline| pipeline.bytes());
        Self { schema, table, place, label, result: vec![0; bytes], range: None }
    }

    /// Takes the label of a record: that in `row` of `column`.
    ///
    /// # Errors
    /// It is missing, broken, or no class, and the job does not skip the record.
    fn add(&mut self, column: &Column, row: usize, record: u64) -> Result<()> {
        let Self { schema, table, place, label, .. } = *self;
        let unfit = |unfit: Unfit| match !schema.reads_labels || schema.skips(&unfit) {
            true => Ok(()),
            false => Err(unfit.at(table, record)),
        };
        let (mut raw, mut dtype) = match schema.values(label, column, row) {
            Ok(raw) => (raw, column.spec().dtype),
            Err(found) => return unfit(found),
        };
        if let Some(pipeline) = &schema.pipelines[label] {
            if let Err(reason) = pipeline.apply(raw, Draws { epoch: 0, record }, &mut self.result) {
                return unfit(Unfit::Transform { place: place.clone(), reason });
            }
            (raw, dtype) = (&self.result, pipeline.spec().dtype);
        }
        let (range, mut no_class) = (&mut self.range, None);
        each_i64(dtype, raw, |class, value| match class {
            Some(class) if class == schema.ignored => {}
            Some(class) => {
                let (min, max) = range.unwrap_or((class, class));
                *range = Some((class.min(min), class.max(max)));
            }
            None => no_class = Some(value),
        });
        match no_class {
            Some(value) if schema.reads_labels && schema.on_error == OnError::Fail => wrong(
                table.path_of(place),
                format!(
                    "label {value} of record {record} is no class number; mend it, or use a loss on values such as mse"
                ),
            ),
            _ => Ok(()),
        }
    }
}

/// Returns the index of the label among a file's columns. `None`: they have no such column.
pub(crate) fn label_index(data: &DataSpec, names: &[&str]) -> Option<usize> {
    let of_name = |label: &str| names.iter().position(|name| *name == label);
    match &data.label {
        Some(label) => of_name(label).or_else(|| label.parse().ok().filter(|&at: &usize| at < names.len())),
        None => {
            of_name(LABELS).or_else(|| names.len().checked_sub(1).filter(|_| data.format.orders_columns()))
        }
    }
}

impl<'a> Columns<'a> {
    fn new(spec: &'a JobSpec, set: DataSet, table: &'a Table) -> Result<Self> {
        let data = &spec.data;
        let mut places = table.columns().to_vec();
        // A label that is not needed may have settings, and no column.
        let needs_label = spec.needs_labels(set);
        let is_label = |name: &String| name == data.label.as_deref().unwrap_or(LABELS);
        let known = |name: &String| {
            places.iter().any(|place| place.spec.name == *name) || !needs_label && is_label(name)
        };
        let named = data.transforms.keys().map(|name| ("data.transforms", name));
        let named =
            named.chain(data.validation_transforms.keys().map(|name| ("data.validation_transforms", name)));
        let named = named.chain(data.missing.keys().map(|name| ("data.missing", name)));
        if let Some((key, name)) = named.clone().find(|(_, name)| !known(name)) {
            return wrong(table.path(), no_column(key, name, table.columns()));
        }
        let mut pipelines = Vec::with_capacity(places.len());
        for place in &mut places {
            let transforms = data.transforms_of(set, &place.spec.name);
            let pipeline =
                (!transforms.is_empty()).then(|| Pipeline::new(&place.spec, transforms)).transpose();
            let pipeline = pipeline.map_err(|reason| {
                let key = match set {
                    DataSet::Validation if data.validation_transforms.contains_key(&place.spec.name) => {
                        "data.validation_transforms"
                    }
                    _ => "data.transforms",
                };
                malformed(table.path_of(place), format!("{key}.{}: {reason}", place.spec.name))
            })?;
            if let Some(pipeline) = &pipeline {
                place.spec = pipeline.spec().clone();
            }
            pipelines.push(pipeline.map(Arc::new));
        }
        Ok(Self { data, table, places, pipelines })
    }

    /// Returns what takes the place of a missing value of a column.
    fn missing(&self, wanted: &Place) -> Result<Missing> {
        let name = &wanted.spec.name;
        let stored = self.table.columns().iter().find(|place| place.spec.name == *name);
        let stored = stored.map_or(&wanted.spec, |place| &place.spec);
        let missing = match self.data.missing.get(name) {
            Some(missing) => Missing::new(missing, stored),
            // TensorFlow reads a feature that a record lacks as an empty list.
            None if self.data.format == Format::Tfrecord && stored.ragged => Ok(Missing::Fill(Vec::new())),
            None => Missing::new(&MissingSpec::Rule(MissingRule::Fail), stored),
        };
        missing
            .map_err(|reason| malformed(self.table.path_of(wanted), format!("data.missing.{name}: {reason}")))
    }

    fn pipeline(&self, wanted: &Place) -> Option<Arc<Pipeline>> {
        let at = self.places.iter().position(|place| place.spec.name == wanted.spec.name)?;
        self.pipelines[at].clone()
    }

    /// Returns the column of the label. `None`: there is none, and none is needed.
    fn label(&self, is_needed: bool) -> Result<Option<Place>> {
        let names: Vec<_> = self.places.iter().map(|place| place.spec.name.as_str()).collect();
        let name = self.data.label.as_deref().unwrap_or(LABELS);
        match label_index(self.data, &names) {
            Some(at) => Ok(Some(self.places[at].clone())),
            None if is_needed => wrong(self.table.path(), no_column("data.label", name, &self.places)),
            None => Ok(None),
        }
    }

    /// Returns the only input of a job that names none.
    fn features(&self, label: Option<&Place>, wanted: &mut Vec<Place>) -> Result<Input> {
        let (data, table) = (self.data, self.table);
        let is_label = |place: &Place| label.is_some_and(|label| place.spec.name == label.spec.name);
        let columns: Vec<Place> = self.places.iter().filter(|place| !is_label(place)).cloned().collect();
        let found = match columns.as_slice() {
            [] => {
                return wrong(
                    table.path(),
                    "no column beside the label; a record needs at least one feature",
                );
            }
            [one] if !one.spec.ragged => one.spec.shape.clone(),
            [one] => return wrong(table.path_of(one), not_fixed(table, one)),
            several => {
                if let Some(place) =
                    several.iter().find(|place| place.spec.ragged || !place.spec.shape.is_empty())
                {
                    return wrong(
                        table.path(),
                        format!(
                            "column {} is no single number, so it cannot lie beside others in `features`; name the columns \
                             that the model takes in data.inputs",
                            place.spec
                        ),
                    );
                }
                vec![several.len()]
            }
        };
        let found = if found.is_empty() { vec![1] } else { found };
        let width: usize = found.iter().product();
        let shape = match &data.shape {
            None => found,
            Some(shape) => {
                let values = shape.iter().try_fold(1usize, |values, &size| values.checked_mul(size));
                if values != Some(width) {
                    return wrong(
                        table.path(),
                        format!(
                            "records of shape {found:?}, {width} values, cannot be given data.shape = {shape:?}"
                        ),
                    );
                }
                shape.clone()
            }
        };
        let begin = wanted.len();
        wanted.extend(columns);
        Ok(Input {
            spec: ColumnSpec::fixed(FEATURES, ElementType::F32, shape),
            columns: begin..wanted.len(),
            normalize: Some(data.normalize),
        })
    }

    /// Returns an argument that the job names.
    fn argument(&self, name: &str, input: &InputSpec, wanted: &mut Vec<Place>) -> Result<Input> {
        let (data, table) = (self.data, self.table);
        let begin = wanted.len();
        for column in input.columns() {
            let place = self.places.iter().find(|place| place.spec.name == *column);
            let place = place
                .ok_or_else(|| malformed(table.path(), no_column("data.inputs", column, &self.places)))?;
            wanted.push(place.clone());
        }
        let columns = begin..wanted.len();
        let places = &wanted[columns.clone()];
        match input {
            InputSpec::One(column) => {
                let spec = &places[0].spec;
                if spec.ragged {
                    return wrong(table.path_of(&places[0]), not_fixed(table, &places[0]));
                }
                let own = if spec.dtype == ElementType::F64 { ElementType::F32 } else { spec.dtype };
                let dtype = data.dtypes.get(column).copied().unwrap_or(own);
                let spec = ColumnSpec { name: name.to_owned(), dtype, ..spec.clone() };
                Ok(Input { spec, columns, normalize: None })
            }
            InputSpec::Several(_) => {
                if let Some(place) =
                    places.iter().find(|place| place.spec.ragged || !place.spec.shape.is_empty())
                {
                    return wrong(
                        table.path(),
                        format!(
                            "column {} is no single number, so it cannot lie beside others in `{name}`",
                            place.spec
                        ),
                    );
                }
                let spec = ColumnSpec::fixed(name, ElementType::F32, [places.len()]);
                Ok(Input { spec, columns, normalize: Some(Normalize::default()) })
            }
        }
    }
}

/// Returns the labels of a batch: classes as i64, values as f32. With `data.inputs` they keep their
/// shape, and labels of a script's own loss also their type. Without it one class a record is `[]`,
/// and values are `[k]`. A program that drives its model gets them as with `data.inputs`.
fn labels(spec: &JobSpec, table: &Table, label: &Place) -> Result<ColumnSpec> {
    let stored = &label.spec;
    if stored.ragged {
        return wrong(table.path_of(label), not_fixed(table, label));
    }
    let (named, loss) = (spec.data.named_inputs().is_some() || spec.is_driven(), spec.model.loss);
    let own = if stored.dtype == ElementType::F64 { ElementType::F32 } else { stored.dtype };
    let dtype = match loss {
        _ if loss.wants_classes() => ElementType::I64,
        Loss::Module if named => own,
        _ => ElementType::F32,
    };
    let width = stored.shape.iter().product::<usize>();
    let shape = match (named, loss.wants_classes()) {
        (true, _) => stored.shape.clone(),
        (false, true) if width == 1 => Vec::new(),
        (false, true) => stored.shape.clone(),
        (false, false) => vec![width],
    };
    Ok(ColumnSpec::fixed(LABELS, dtype, shape))
}

fn no_column(key: &str, name: &str, columns: &[Place]) -> String {
    let known: Vec<_> = columns.iter().take(20).map(|place| place.spec.name.as_str()).collect();
    let more = if columns.len() > 20 { ", .." } else { "" };
    format!(
        "{key} = \"{name}\": no such column; there are {}{more}, and numbers go from 0 to {}",
        known.join(", "),
        columns.len().saturating_sub(1)
    )
}

/// Returns some names as text, among them number `shown`.
fn listed(names: &[String], shown: usize) -> String {
    let begin = if shown < NAMES_SHOWN { 0 } else { shown };
    let some: Vec<_> = names.iter().skip(begin).take(NAMES_SHOWN).map(|name| format!("`{name}`")).collect();
    let (before, after) = (begin > 0, begin + some.len() < names.len());
    format!("{}{}{}", if before { ".., " } else { "" }, some.join(", "), if after { ", .." } else { "" })
}

fn not_fixed(table: &Table, place: &Place) -> String {
    let found = table.two_lengths(place);
    let found: Vec<_> =
        found.iter().map(|(record, length)| format!("record {record} has {length} elements")).collect();
    let found = if found.is_empty() { String::new() } else { format!(": {}", found.join(", ")) };
    format!(
        "column {} has no fixed size{found}; a model takes columns of one shape: use the transform `pad`, or give its \
         length in data.lengths if all records have the same",
        place.spec
    )
}

/// Computes `out[i] = (raw[i] / scale - mean) / std` in f32.
fn scale(normalize: Normalize, from: ElementType, raw: &[u8], out: &mut [u8]) {
    let mut places = out.as_chunks_mut().0.iter_mut();
    each_f64(from, raw, |value| {
        if let Some(place) = places.next() {
            *place = scaled(value, normalize).to_le_bytes();
        }
    });
}

/// Computes `(value / scale - mean) / std` in f32.
fn scaled(value: f64, Normalize { scale, mean, std }: Normalize) -> f32 {
    (value as f32 / scale - mean) / std
}
