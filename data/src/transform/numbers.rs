//! Transforms of numbers.

use proto::column::{ColumnSpec, ElementType};
use proto::spec::Transform;
use proto::spec::transform::{Numbers, Side};

use crate::cast::{cast, each_i64};
use crate::column::each_f64;
use crate::levels::Levels;

/// Change of one record's numbers.
#[derive(Clone, Debug)]
pub(super) enum Change {
    /// Values in another type.
    Cast(ElementType),
    /// `(value - mean) / std` in f32. Numbers repeat over the values.
    Normalize {
        mean: Vec<f32>,
        std: Vec<f32>,
    },
    /// Natural logarithm of `value + add`, f32.
    Log {
        add: f64,
    },
    /// Bounds, in the values' own type.
    Clip {
        min: f64,
        max: f64,
    },
    OneHot {
        classes: usize,
    },
    /// Elements of a record, each of `stride` bytes, filled up with `fill`.
    Pad {
        length: usize,
        stride: usize,
        fill: Vec<u8>,
        side: Side,
    },
}

impl Change {
    /// Returns the change that a transform makes of such values, and what comes of them.
    ///
    /// # Errors
    /// The transform does not take such values, and why.
    pub(super) fn new(spec: &ColumnSpec, transform: &Transform) -> Result<(Self, ColumnSpec), String> {
        let of_type = |dtype| ColumnSpec { dtype, ..spec.clone() };
        match transform {
            Transform::Cast { dtype } => Ok((Self::Cast(*dtype), of_type(*dtype))),
            Transform::Normalize { mean, std } => {
                let last = spec.shape.last().copied().unwrap_or(1);
                let mean = repeated(mean, last, "mean")?;
                let std = repeated(std, last, "std")?;
                Ok((Self::Normalize { mean, std }, of_type(ElementType::F32)))
            }
            Transform::Log { add } => Ok((Self::Log { add: *add }, of_type(ElementType::F32))),
            Transform::Clip { min, max } => {
                let (min, max) = (min.unwrap_or(f64::NEG_INFINITY), max.unwrap_or(f64::INFINITY));
                for bound in [min, max].into_iter().filter(|bound| bound.is_finite()) {
                    number(bound, spec.dtype)?;
                }
                Ok((Self::Clip { min, max }, spec.clone()))
            }
            Transform::OneHot { classes } => {
                if spec.dtype.is_float() {
                    return Err(format!("it takes integers, and this is {spec}; put `cast` before it"));
                }
                let mut to = of_type(ElementType::F32);
                to.shape.push(*classes);
                Ok((Self::OneHot { classes: *classes }, to))
            }
            Transform::Pad { length, value, side } => {
                if !spec.ragged {
                    return Err(format!("it takes a ragged column, and {spec} has one length already"));
                }
                let fill = number(*value, spec.dtype)?;
                let width = spec.width().ok_or("a record is larger than any memory")?;
                let mut to = ColumnSpec { ragged: false, ..spec.clone() };
                to.shape.insert(0, *length);
                let stride = width * spec.dtype.size();
                Ok((Self::Pad { length: *length, stride, fill, side: *side }, to))
            }
            _ => Err("it takes images".to_owned()),
        }
    }

    /// Returns what each byte becomes, if the change makes a float of each value by itself. `None`:
    /// it does not, or values of type `from` are no bytes.
    pub(super) fn levels(&self, from: ElementType) -> Option<Levels> {
        let tables = match self {
            Self::Cast(ElementType::F32) | Self::Log { .. } => 1,
            Self::Normalize { mean, std } => mean.len().max(std.len()),
            _ => return None,
        };
        if from != ElementType::U8 || tables > Levels::TABLES_MAX {
            return None;
        }
        // A value of each table in turn, as the change repeats its numbers.
        let bytes: Vec<u8> = (0..=u8::MAX).flat_map(|byte| std::iter::repeat_n(byte, tables)).collect();
        let floats = self.apply(from, &bytes).ok()?;
        let floats = floats.as_chunks().0;
        Some(Levels::new(tables, 1, |table, byte| {
            f32::from_le_bytes(floats[usize::from(byte) * tables + table])
        }))
    }

    /// Changes one record's values of type `from`.
    ///
    /// # Errors
    /// A value that the change has no place for.
    pub(super) fn apply(&self, from: ElementType, values: &[u8]) -> Result<Vec<u8>, String> {
        let count = values.len() / from.size();
        match self {
            Self::Cast(to) => {
                let mut out = vec![0; count * to.size()];
                cast(from, values, *to, &mut out)
                    .map_err(|value| format!("{value} is no value of type {to}"))?;
                Ok(out)
            }
            Self::Normalize { mean, std } => {
                let mut out = Vec::with_capacity(count * size_of::<f32>());
                let mut at = 0;
                each_f64(from, values, |value| {
                    let normal = (value as f32 - mean[at % mean.len()]) / std[at % std.len()];
                    out.extend_from_slice(&normal.to_le_bytes());
                    at += 1;
                });
                Ok(out)
            }
            Self::Log { add } => {
                let mut out = Vec::with_capacity(count * size_of::<f32>());
                let mut wrong = None;
                each_f64(from, values, |value| {
                    if value + add < 0.0 {
                        wrong = wrong.or(Some(value));
                    }
                    // Not the C library's logarithm, which differs between versions.
                    out.extend_from_slice(&(libm::log(value + add) as f32).to_le_bytes());
                });
                wrong.map_or(Ok(out), |value| {
                    Err(format!(
                        "{value} + {add} is below 0 and has no logarithm; clip it before, or set `add`"
                    ))
                })
            }
            Self::Clip { min, max } => clipped(from, values, *min, *max),
            Self::OneHot { classes } => {
                let mut out = vec![0; count * classes * size_of::<f32>()];
                let mut wrong = None;
                let mut rows = out.chunks_exact_mut(classes * size_of::<f32>());
                each_i64(from, values, |class, value| {
                    let place = class.and_then(|class| usize::try_from(class).ok()).filter(|at| at < classes);
                    match (rows.next(), place) {
                        (Some(row), Some(at)) => {
                            row[4 * at..4 * at + 4].copy_from_slice(&1f32.to_le_bytes());
                        }
                        _ => wrong = wrong.or(Some(value)),
                    }
                });
                wrong.map_or(Ok(out), |value| Err(format!("{value} is no class from 0 to {}", classes - 1)))
            }
            Self::Pad { length, stride, fill, side } => {
                let bytes = length * stride;
                let missing = bytes.saturating_sub(values.len());
                let filling = fill.iter().copied().cycle().take(missing);
                Ok(match side {
                    Side::End => {
                        let kept = &values[..values.len().min(bytes)];
                        kept.iter().copied().chain(filling).collect()
                    }
                    Side::Start => {
                        let kept = &values[values.len().saturating_sub(bytes)..];
                        filling.chain(kept.iter().copied()).collect()
                    }
                })
            }
        }
    }
}

/// Returns values within bounds. Their type stays.
fn clipped(dtype: ElementType, values: &[u8], min: f64, max: f64) -> Result<Vec<u8>, String> {
    let mut out = values.to_vec();
    let mut places = out.chunks_exact_mut(dtype.size());
    let mut wrong = None;
    each_f64(dtype, values, |value| {
        let Some(place) = places.next() else { return };
        let bound = if value < min {
            min
        } else if value > max {
            max
        } else {
            return;
        };
        if cast(ElementType::F64, &bound.to_le_bytes(), dtype, place).is_err() {
            wrong = wrong.or(Some(bound));
        }
    });
    wrong.map_or(Ok(out), |bound| Err(format!("the bound {bound} is no value of type {dtype}")))
}

/// Returns the bytes of a number in a type.
fn number(value: f64, dtype: ElementType) -> Result<Vec<u8>, String> {
    let mut bytes = vec![0; dtype.size()];
    cast(ElementType::F64, &value.to_le_bytes(), dtype, &mut bytes)
        .map_err(|value| format!("{value} is no value of type {dtype}"))?;
    Ok(bytes)
}

/// Returns the numbers for the values of the last dimension.
fn repeated(numbers: &Numbers, last: usize, name: &str) -> Result<Vec<f32>, String> {
    match numbers {
        Numbers::One(number) => Ok(vec![*number]),
        Numbers::Each(numbers) if numbers.len() == last => Ok(numbers.clone()),
        Numbers::Each(numbers) => Err(format!(
            "{name}: {} numbers, and the last dimension has {last}; give one, or one for each",
            numbers.len()
        )),
    }
}
