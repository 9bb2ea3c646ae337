//! What a batch has of the columns of a table: the arguments of a model, and the label.
//!
//! Without `data.inputs` the model takes one argument, `features`, as f32: the column `features`,
//! or all columns but the label side by side. A model of token files takes `tokens`, as if
//! `data.inputs` named it. With `data.inputs` each argument is a column in its own type and shape,
//! except that f64 becomes f32, the type of a model's weights. `data.dtypes` sets another type.

use std::sync::Arc;

use proto::column::{ColumnSpec, ElementType};
use proto::spec::{DataSpec, FEATURES, InputSpec, JobSpec, LABELS, Loss, Normalize};

use crate::cast::each_i64;
use crate::column::{Column, each_f64};
use crate::error::{Error, Result, malformed, wrong};
use crate::table::{Place, Reader, Table};

/// Columns of a batch, and where they come from.
#[derive(Debug)]
pub(crate) struct Schema {
    inputs: Vec<Input>,
    label: Place,
    /// Type and shape of the label in a batch.
    labels: ColumnSpec,
    /// Whether labels are classes.
    classes: bool,
    /// Class that does not count.
    ignored: i64,
    /// All columns that are read: those of the inputs, then the label.
    wanted: Vec<Place>,
}

/// An argument of a model.
#[derive(Debug)]
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
        match self {
            Self::Block(error) => error,
            Self::Value { place, value, dtype } => malformed(
                table.path_of(&place),
                format!(
                    "column `{}`: {value} of record {record} is no value of type {dtype}; mend it, or set another type in \
                     data.dtypes",
                    place.spec.name
                ),
            ),
        }
    }
}

impl Schema {
    /// Finds the job's columns in a table.
    ///
    /// # Errors
    /// A column is missing, or has a type or a shape that a batch cannot have.
    pub(crate) fn new(spec: &JobSpec, table: &Table) -> Result<Self> {
        let data = &spec.data;
        let label = label(data, table)?;
        let mut wanted = Vec::new();
        let inputs = match data.named_inputs() {
            None => vec![features(data, table, &label, &mut wanted)?],
            Some(inputs) => {
                let arguments = inputs.arguments().into_iter();
                arguments
                    .map(|(name, input)| argument(data, table, name, &input, &mut wanted))
                    .collect::<Result<_>>()?
            }
        };
        let classes = spec.model.loss.wants_classes();
        let labels = labels(spec, table, &label)?;
        wanted.push(label.clone());
        let ignored = spec.model.ignore_index;
        Ok(Self { inputs, label, labels, classes, ignored, wanted })
    }

    /// Returns the inputs of a batch.
    pub(crate) fn inputs(&self) -> Vec<ColumnSpec> {
        self.inputs.iter().map(|input| input.spec.clone()).collect()
    }

    /// Returns the labels of a batch.
    pub(crate) fn labels(&self) -> ColumnSpec {
        self.labels.clone()
    }

    /// Returns the first column of `other` that differs, with that of this schema, for people.
    pub(crate) fn differs(&self, other: &Self) -> Option<(String, String)> {
        let specs = |schema: &Self| {
            let inputs = schema.inputs().into_iter().chain([schema.labels()]);
            let stored = schema.wanted.iter().map(|place| place.spec.dtype);
            inputs
                .map(|spec| spec.to_string())
                .chain(stored.map(|dtype| dtype.to_string()))
                .collect::<Vec<_>>()
        };
        let (own, others) = (specs(self), specs(other));
        own.into_iter().zip(others).find(|(own, other)| own != other).map(|(own, other)| (other, own))
    }

    /// Returns a reader of a table's columns.
    pub(crate) fn reader(&self, table: &Arc<Table>) -> Reader {
        table.reader(&self.wanted)
    }

    /// Appends a record to the columns of a batch.
    ///
    /// # Errors
    /// A block is damaged, or a value does not fit the batch. Then the columns are left with a part
    /// of the record.
    pub(crate) fn read(
        &self,
        reader: &mut Reader,
        record: u64,
        inputs: &mut [Column],
        labels: &mut Column,
    ) -> std::result::Result<(), Unfit> {
        let mut unfit = None;
        // The input whose columns come now. They come in the order of `wanted`.
        let mut at = 0;
        reader.record(record, |wanted, column, row| {
            let (raw, from) = (column.record(row), column.spec().dtype);
            while self.inputs.get(at).is_some_and(|input| input.columns.end <= wanted) {
                at += 1;
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
                let place = self.wanted[wanted].clone();
                unfit = unfit.take().or(Some(Unfit::Value { place, value, dtype }));
            }
        })?;
        unfit.map_or(Ok(()), Err)
    }

    /// Returns the smallest and the largest label of a table, or `None` if labels are no classes or
    /// there are no records. It reads all labels.
    ///
    /// # Errors
    /// A label is no class.
    pub(crate) fn label_range(&self, table: &Arc<Table>) -> Result<Option<(i64, i64)>> {
        if !self.classes {
            return Ok(None);
        }
        let mut reader = table.reader(std::slice::from_ref(&self.label));
        let mut range: Option<(i64, i64)> = None;
        for record in 0..table.records() {
            let mut found = Ok(());
            reader.record(record, |_, column, row| {
                each_i64(column.spec().dtype, column.record(row), |class, value| match class {
                    Some(class) if class == self.ignored => {}
                    Some(class) => {
                        let (min, max) = range.unwrap_or((class, class));
                        range = Some((class.min(min), class.max(max)));
                    }
                    None => found = Err(value),
                });
            })?;
            if let Err(value) = found {
                return wrong(
                    table.path_of(&self.label),
                    format!(
                        "label {value} of record {record} is no class number; mend it, or use a loss on values such as mse"
                    ),
                );
            }
        }
        Ok(range)
    }
}

/// Returns the column of the label.
fn label(data: &DataSpec, table: &Table) -> Result<Place> {
    let columns = table.columns();
    let Some(label) = &data.label else {
        let of_name = columns.iter().find(|place| place.spec.name == LABELS);
        let last = columns.last().filter(|_| data.format.orders_columns());
        return of_name
            .or(last)
            .cloned()
            .ok_or_else(|| malformed(table.path(), no_column("data.label", LABELS, table)));
    };
    let named = columns.iter().find(|place| place.spec.name == *label);
    let numbered = || label.parse::<usize>().ok().and_then(|at| columns.get(at));
    let found = named.or_else(numbered).cloned();
    found.ok_or_else(|| malformed(table.path(), no_column("data.label", label, table)))
}

/// Returns the labels of a batch: classes as i64, values as f32. With `data.inputs` they keep their
/// shape, and labels of a script's own loss also their type. Without it one class a record is `[]`,
/// and values are `[k]`.
fn labels(spec: &JobSpec, table: &Table, label: &Place) -> Result<ColumnSpec> {
    let stored = &label.spec;
    if stored.ragged {
        return wrong(table.path_of(label), not_fixed(stored));
    }
    let (named, loss) = (spec.data.named_inputs().is_some(), spec.model.loss);
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

fn no_column(key: &str, name: &str, table: &Table) -> String {
    let columns = table.columns();
    let known: Vec<_> = columns.iter().take(20).map(|place| place.spec.name.as_str()).collect();
    let more = if columns.len() > 20 { ", .." } else { "" };
    format!(
        "{key} = \"{name}\": no such column; there are {}{more}, and numbers go from 0 to {}",
        known.join(", "),
        columns.len().saturating_sub(1)
    )
}

/// Returns the only input of a job that names none.
fn features(data: &DataSpec, table: &Table, label: &Place, wanted: &mut Vec<Place>) -> Result<Input> {
    let is_label = |place: &Place| place.spec.name == label.spec.name;
    let columns: Vec<Place> = table.columns().iter().filter(|place| !is_label(place)).cloned().collect();
    let found = match columns.as_slice() {
        [] => return wrong(table.path(), "no column beside the label; a record needs at least one feature"),
        [one] if !one.spec.ragged => one.spec.shape.clone(),
        [one] => return wrong(table.path(), not_fixed(&one.spec)),
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
fn argument(
    data: &DataSpec,
    table: &Table,
    name: &str,
    input: &InputSpec,
    wanted: &mut Vec<Place>,
) -> Result<Input> {
    let begin = wanted.len();
    for column in input.columns() {
        let place = table.columns().iter().find(|place| place.spec.name == *column);
        let place = place.ok_or_else(|| malformed(table.path(), no_column("data.inputs", column, table)))?;
        wanted.push(place.clone());
    }
    let columns = begin..wanted.len();
    let places = &wanted[columns.clone()];
    match input {
        InputSpec::One(column) => {
            let spec = &places[0].spec;
            if spec.ragged {
                return wrong(table.path(), not_fixed(spec));
            }
            let own = if spec.dtype == ElementType::F64 { ElementType::F32 } else { spec.dtype };
            let dtype = data.dtypes.get(column).copied().unwrap_or(own);
            let spec = ColumnSpec { name: name.to_owned(), dtype, ..spec.clone() };
            Ok(Input { spec, columns, normalize: None })
        }
        InputSpec::Several(_) => {
            if let Some(place) = places.iter().find(|place| place.spec.ragged || !place.spec.shape.is_empty())
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

fn not_fixed(spec: &ColumnSpec) -> String {
    format!(
        "column {spec} has another size in each record; this version gives models columns of one shape: save it padded, \
         or give its length in data.lengths if all records have the same"
    )
}

/// Computes `out[i] = (raw[i] / scale - mean) / std` in f32.
fn scale(Normalize { scale, mean, std }: Normalize, from: ElementType, raw: &[u8], out: &mut [u8]) {
    let mut places = out.as_chunks_mut().0.iter_mut();
    each_f64(from, raw, |value| {
        if let Some(place) = places.next() {
            *place = ((value as f32 / scale - mean) / std).to_le_bytes();
        }
    });
}
