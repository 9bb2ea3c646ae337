//! Transforms of a column: what the job's list makes of one record's values.
//!
//! A list is checked against its column once, before the first record ([`Pipeline::new`]). That
//! gives the type and the shape of the result, which a batch needs. Then each record's values pass
//! through the list by themselves ([`Pipeline::apply`]).
//!
//! ```text
//! `image` u8[any] --decode--> image, any size --random_resized_crop--> image 224 x 224
//!                 --normalize--> f32[3, 224, 224]
//! ```
//!
//! Between its transforms an image has its channels side by side, because decoders and filters work
//! so. The model gets it as PyTorch has it: `[channels, height, width]`.

mod image;
mod numbers;
mod tokens;
mod words;

use std::time::Duration;

use proto::column::{ColumnSpec, ElementType};
use proto::random::{Keyed, key};
use proto::spec::Transform;
use proto::spec::transform::Numbers;

use crate::clock;
use crate::levels::Levels;
use crate::pixels::{self, Image};

/// What passes through a list of transforms.
#[derive(Clone, Debug, PartialEq)]
enum Kind {
    /// An image.
    Image {
        channels: usize,
        /// Height and width, if all records have the same.
        size: Option<(usize, usize)>,
    },
    /// Little-endian values.
    Values(ColumnSpec),
}

impl Kind {
    /// Returns type and shape of such values in a batch, in a column of this name.
    ///
    /// # Errors
    /// Images of any size have no place there.
    fn made(&self, name: &str) -> Result<ColumnSpec, String> {
        match self {
            Self::Values(spec) => Ok(ColumnSpec { name: name.to_owned(), ..spec.clone() }),
            Self::Image { channels, size: Some((height, width)) } => {
                Ok(ColumnSpec::fixed(name, ElementType::U8, [*channels, *height, *width]))
            }
            Self::Image { size: None, .. } => {
                Err("images of any size cannot lie in one batch; add `resize` with two sides, `center_crop` or another \
                     transform that gives them one size"
                    .to_owned())
            }
        }
    }
}

/// One record's values between two transforms.
enum Value {
    Image(Image),
    Values(Vec<u8>),
}

/// A list of transforms that fits its column.
#[derive(Debug)]
pub(crate) struct Pipeline {
    steps: Vec<Step>,
    /// Column that the list begins with.
    from: ColumnSpec,
    /// Type and shape of the result.
    to: ColumnSpec,
}

/// Adds a time to that of the same name.
pub(crate) fn add(steps: &mut Vec<(String, Duration)>, name: &str, time: Duration) {
    match steps.iter_mut().find(|(known, _)| known == name) {
        Some((_, total)) => *total += time,
        None => steps.push((name.to_owned(), time)),
    }
}

/// A transform, and what it begins with.
#[derive(Clone, Debug)]
struct Step {
    name: &'static str,
    /// Words that precede the record in its key.
    purpose: String,
    from: Kind,
    action: Action,
}

/// What a step does.
#[derive(Clone, Debug)]
enum Action {
    Pixels(Transform),
    /// Makes f32 `[channels, height, width]`.
    Normalize(Levels),
    Numbers(numbers::Change),
    Words(words::Lookup),
    Tokens(tokens::Tokens),
}

/// Source of the random numbers of one record.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Draws {
    /// Key of (seed, epoch).
    pub(crate) epoch: u64,
    /// Number of the record over all files of its data set.
    pub(crate) record: u64,
}

impl Draws {
    /// Returns the key of an epoch.
    pub(crate) fn epoch(seed: u64, epoch: u64) -> u64 {
        key(seed, "transform", epoch)
    }

    fn of(self, purpose: &str) -> Keyed {
        Keyed::new(self.epoch, purpose, self.record)
    }
}

impl Pipeline {
    /// Fits a list of transforms to a column.
    ///
    /// # Errors
    /// The transform that cannot have what the one before makes, and why.
    pub(crate) fn new(column: &ColumnSpec, transforms: &[Transform]) -> Result<Self, String> {
        let (mut kind, mut steps) = (Kind::Values(column.clone()), Vec::new());
        for (place, transform) in transforms.iter().enumerate() {
            let failed = |reason| format!("{place}, `{}`: {reason}", transform.name());
            let (action, next) = fit(&kind, transform).map_err(failed)?;
            steps.push(Step {
                name: transform.name(),
                purpose: format!("{}/{place}", column.name),
                from: kind,
                action,
            });
            kind = next;
        }
        let to = kind.made(&column.name)?;
        if to.width().is_none() {
            return Err(format!("a record would be {to}, larger than any memory"));
        }
        Ok(Self { steps, from: column.clone(), to })
    }

    /// Returns the list without its last transform, which makes floats of bytes one by one, and
    /// what each byte becomes. `None`: the last transform does something else.
    pub(crate) fn of_bytes(&self) -> Option<(Self, Levels)> {
        let (last, before) = self.steps.split_last()?;
        let levels = match &last.action {
            Action::Normalize(levels) => levels.clone(),
            Action::Numbers(change) => change.levels(last.dtype())?,
            Action::Pixels(_) | Action::Words(_) | Action::Tokens(_) => return None,
        };
        let to = last.from.made(&self.to.name).ok()?;
        Some((Self { steps: before.to_vec(), from: self.from.clone(), to }, levels))
    }

    /// Returns whether the list changes nothing.
    pub(crate) const fn is_empty(&self) -> bool {
        self.steps.is_empty()
    }

    /// Returns the column that the list begins with.
    pub(crate) const fn column(&self) -> &ColumnSpec {
        &self.from
    }

    /// Returns the bytes of one record's result. 0: it is ragged.
    pub(crate) fn bytes(&self) -> usize {
        let width = self.to.width().filter(|_| !self.to.ragged);
        width.unwrap_or_default() * self.to.dtype.size()
    }

    /// Returns the type and the shape of the result.
    pub(crate) const fn spec(&self) -> &ColumnSpec {
        &self.to
    }

    /// Transforms one record's values. `out` takes the result; it has the bytes of one record.
    ///
    /// # Errors
    /// The values do not fit a transform, and why.
    ///
    /// # Panics
    /// If `out` has another length, or the result is ragged.
    pub(crate) fn apply(&self, raw: &[u8], draws: Draws, out: &mut [u8]) -> Result<(), String> {
        let (last, before) = match self.steps.split_last() {
            Some((last, before)) => (Some(last), before),
            None => (None, &[][..]),
        };
        let mut value = self.begin(raw, draws)?;
        for step in before {
            value = step.apply(value, draws)?;
        }
        match (last, value) {
            // The largest result of all is written where it stays.
            (Some(Step { action: Action::Normalize(levels), .. }), Value::Image(image)) => {
                let normalize = |out: &mut [f32]| pixels::normalized(&image, levels, out);
                match bytemuck::try_cast_slice_mut(out) {
                    Ok(out) => normalize(out),
                    Err(_) => {
                        let mut values = vec![0f32; out.len() / size_of::<f32>()];
                        normalize(&mut values);
                        out.copy_from_slice(bytemuck::cast_slice(&values));
                    }
                }
            }
            (last, value) => {
                let value = match last {
                    Some(step) => step.apply(value, draws)?,
                    None => value,
                };
                match value {
                    Value::Image(image) => pixels::planar(&image, out),
                    Value::Values(bytes) => out.copy_from_slice(&bytes),
                }
            }
        }
        Ok(())
    }

    /// Transforms one record's values, and adds the time of each transform to that of the same
    /// name.
    ///
    /// # Errors
    /// Those of [`apply`](Self::apply).
    pub(crate) fn time(
        &self,
        raw: &[u8],
        draws: Draws,
        steps: &mut Vec<(String, Duration)>,
    ) -> Result<(), String> {
        let mut begun = clock::now();
        let mut value = self.begin(raw, draws)?;
        for step in &self.steps {
            value = step.apply(value, draws)?;
            add(steps, &format!("{} {}", step.purpose, step.name), begun.elapsed());
            begun = clock::now();
        }
        Ok(())
    }

    /// Transforms the values of one record of a column whose result is ragged.
    ///
    /// # Errors
    /// Those of [`apply`](Self::apply).
    #[cfg(test)]
    fn values(&self, raw: &[u8], draws: Draws) -> Result<Vec<u8>, String> {
        let mut value = self.begin(raw, draws)?;
        for step in &self.steps {
            value = step.apply(value, draws)?;
        }
        Ok(match value {
            Value::Values(bytes) => bytes,
            Value::Image(image) => {
                let mut out = vec![0; image.values.len()];
                pixels::planar(&image, &mut out);
                out
            }
        })
    }

    fn begin(&self, raw: &[u8], draws: Draws) -> Result<Value, String> {
        match self.steps.as_slice() {
            // A decoder takes the bytes where they are, and leaves out what the next step drops.
            [Step { action: Action::Pixels(Transform::Decode { channels }), .. }, rest @ ..] => {
                let rows = |height, width| match rest {
                    [Step { action: Action::Pixels(transform), purpose, .. }, ..] => {
                        image::rows(transform, height, width, &mut draws.of(purpose))
                    }
                    _ => height,
                };
                pixels::decode_rows(raw, *channels, rows).map(Value::Image)
            }
            _ => Ok(Value::Values(raw.to_vec())),
        }
    }
}

impl Step {
    fn apply(&self, value: Value, draws: Draws) -> Result<Value, String> {
        Ok(match (&self.action, value) {
            (Action::Pixels(Transform::Decode { .. }), value @ Value::Image(_)) => value,
            (Action::Pixels(Transform::Decode { channels }), Value::Values(bytes)) => {
                Value::Image(pixels::decode(&bytes, *channels)?)
            }
            (Action::Pixels(transform), value) => {
                let image = match (value, &self.from) {
                    (Value::Values(values), Kind::Values(spec)) => image::stored(spec, &values),
                    (Value::Image(image), _) => image,
                    (Value::Values(_), Kind::Image { .. }) => {
                        return Err(format!("`{}` got no image", self.name));
                    }
                };
                Value::Image(image::apply(transform, image, &mut draws.of(&self.purpose)))
            }
            (Action::Normalize(levels), Value::Image(image)) => {
                let mut values = vec![0f32; image.values.len()];
                pixels::normalized(&image, levels, &mut values);
                Value::Values(bytemuck::cast_slice(&values).to_vec())
            }
            (Action::Numbers(change), Value::Values(values)) => {
                Value::Values(change.apply(self.dtype(), &values)?)
            }
            (Action::Words(lookup), Value::Values(values)) => {
                Value::Values(lookup.apply(self.dtype(), &values)?)
            }
            (Action::Tokens(tokens), Value::Values(values)) => Value::Values(tokens.apply(&values)?),
            (action, _) => return Err(format!("a step has other values than were planned: {action:?}")),
        })
    }

    const fn dtype(&self) -> ElementType {
        match &self.from {
            Kind::Values(spec) => spec.dtype,
            Kind::Image { .. } => ElementType::U8,
        }
    }
}

/// Returns what a transform does to values of a kind, and the kind of its result.
fn fit(kind: &Kind, transform: &Transform) -> Result<(Action, Kind), String> {
    match transform {
        Transform::Decode { .. }
        | Transform::Resize { .. }
        | Transform::CenterCrop { .. }
        | Transform::RandomCrop { .. }
        | Transform::RandomResizedCrop { .. }
        | Transform::HorizontalFlip { .. }
        | Transform::VerticalFlip { .. }
        | Transform::ColorJitter { .. } => {
            let next = image::fit(kind, transform)?;
            Ok((Action::Pixels(transform.clone()), next))
        }
        Transform::Normalize { mean, std } => match kind {
            Kind::Image { channels, size } => {
                let (height, width) =
                    size.ok_or("the images have any size; give them one size before, e.g. by `center_crop`")?;
                let spec = ColumnSpec::fixed("", ElementType::F32, [*channels, height, width]);
                let (mean, std) =
                    (of_channels(mean, *channels, "mean")?, of_channels(std, *channels, "std")?);
                let levels = pixels::normalization(*channels, height.saturating_mul(width), &mean, &std);
                Ok((Action::Normalize(levels), Kind::Values(spec)))
            }
            Kind::Values(spec) => numbers_of(spec, transform),
        },
        Transform::Hash { .. } | Transform::Vocabulary { .. } => {
            let (lookup, spec) = words::Lookup::new(values(kind)?, transform)?;
            Ok((Action::Words(lookup), Kind::Values(spec)))
        }
        Transform::Tokenize { file, sha256, add_special_tokens } => {
            let (tokens, spec) =
                tokens::Tokens::new(values(kind)?, file, sha256.as_deref(), *add_special_tokens)?;
            Ok((Action::Tokens(tokens), Kind::Values(spec)))
        }
        Transform::Cast { .. }
        | Transform::OneHot { .. }
        | Transform::Log { .. }
        | Transform::Clip { .. }
        | Transform::Pad { .. } => numbers_of(values(kind)?, transform),
    }
}

fn numbers_of(spec: &ColumnSpec, transform: &Transform) -> Result<(Action, Kind), String> {
    let (change, spec) = numbers::Change::new(spec, transform)?;
    Ok((Action::Numbers(change), Kind::Values(spec)))
}

fn values(kind: &Kind) -> Result<&ColumnSpec, String> {
    match kind {
        Kind::Values(spec) => Ok(spec),
        Kind::Image { .. } => {
            Err("it takes numbers, and this is an image; put `normalize` before it".to_owned())
        }
    }
}

/// Returns a number for each channel.
fn of_channels(numbers: &Numbers, channels: usize, name: &str) -> Result<Vec<f32>, String> {
    match numbers {
        Numbers::One(number) => Ok(vec![*number; channels]),
        Numbers::Each(numbers) if numbers.len() == channels => Ok(numbers.clone()),
        Numbers::Each(numbers) => Err(format!(
            "{name}: {} numbers for {channels} channels; give one, or one for each",
            numbers.len()
        )),
    }
}

#[cfg(test)]
mod tests;
