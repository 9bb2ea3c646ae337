//! Transforms: what happens to a column's values between the files and the model.
//!
//! Each transform is a table `{ op = "NAME", .. }` in `data.transforms.COLUMN` of the job file. The
//! transforms of a column run in their order, for each record by itself. Those that draw random
//! numbers draw them from (seed, epoch, record, column, place in the list), so every worker makes
//! the same values.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::column::ElementType;

/// Change of a column's values in one record.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "snake_case", deny_unknown_fields, expecting = "a table with `op`")]
pub enum Transform {
    /// Decodes the bytes of a JPEG, PNG or WebP file to an image.
    Decode {
        /// Channels of the image: 3 (RGB) or 1 (grey). Default 3.
        #[serde(default = "rgb")]
        channels: usize,
    },
    /// Resizes an image, bilinear and antialiased (torchvision's `Resize`).
    Resize {
        /// Height and width, or the length of the shorter side.
        size: Size,
    },
    /// Cuts out the centre of an image (torchvision's `CenterCrop`).
    CenterCrop {
        /// Height and width, or both as one number.
        size: Size,
    },
    /// Cuts out a random part of an image (torchvision's `RandomCrop`).
    RandomCrop {
        /// Height and width, or both as one number.
        size: Size,
        /// Pixels of 0 that are added on each side before. Default 0.
        #[serde(default)]
        padding: usize,
    },
    /// Cuts out a part of random area and shape, and resizes it (torchvision's
    /// `RandomResizedCrop`).
    RandomResizedCrop {
        /// Height and width, or both as one number.
        size: Size,
        /// Least and greatest share of the image's area. Default `[0.08, 1]`.
        #[serde(default = "areas")]
        scale: (f64, f64),
        /// Least and greatest width divided by height. Default `[0.75, 1.3333333333333333]`.
        #[serde(default = "ratios")]
        ratio: (f64, f64),
    },
    /// Swaps left and right of an image (torchvision's `RandomHorizontalFlip`).
    HorizontalFlip {
        /// Probability. Default 0.5.
        #[serde(default = "half")]
        p: f64,
    },
    /// Swaps top and bottom of an image (torchvision's `RandomVerticalFlip`).
    VerticalFlip {
        /// Probability. Default 0.5.
        #[serde(default = "half")]
        p: f64,
    },
    /// Changes the colours of an image at random, in random order (torchvision's `ColorJitter`).
    ColorJitter {
        /// Factor from `[max(0, 1 - brightness), 1 + brightness]`. Default 0.
        #[serde(default)]
        brightness: f32,
        /// Factor like that of the brightness. Default 0.
        #[serde(default)]
        contrast: f32,
        /// Factor like that of the brightness. Default 0.
        #[serde(default)]
        saturation: f32,
        /// Shift from `[-hue, hue]`, of a whole turn; at most 0.5. Default 0.
        #[serde(default)]
        hue: f32,
    },
    /// Makes f32 of an image, `(value / 255 - mean) / std` for each channel (torchvision's
    /// `ToDtype` with `scale` and `Normalize`), or `(value - mean) / std` of numbers.
    Normalize {
        /// One number, or one for each channel. Default 0.
        #[serde(default = "zero")]
        mean: Numbers,
        /// One number, or one for each channel. Default 1.
        #[serde(default = "one")]
        std: Numbers,
    },
    /// Gives values another type. Integers take no fractions.
    Cast {
        /// Type of the values.
        dtype: ElementType,
    },
    /// Adds a last dimension of `classes` values, f32: 1 in the place of the class, else 0
    /// (`torch.nn.functional.one_hot`).
    OneHot {
        /// Number of classes.
        classes: usize,
    },
    /// Computes the natural logarithm of `value + add`, f32.
    Log {
        /// Summand; 1 makes `torch.log1p` of it. Default 0.
        #[serde(default)]
        add: f64,
    },
    /// Bounds values (`torch.clamp`). NaN stays NaN.
    Clip {
        /// Least value. Default: no bound.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        min: Option<f64>,
        /// Greatest value. Default: no bound.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        max: Option<f64>,
    },
    /// Gives each integer, or each text, a number from 0 to `buckets - 1`, i64. Others may get the
    /// same one.
    Hash {
        /// Number of buckets.
        buckets: u64,
    },
    /// Gives each integer, or each text, its place in a list, i64.
    Vocabulary {
        /// The list. Each entry once.
        values: Vec<Word>,
        /// Number of what is not in the list. Default: it is an error.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        default: Option<i64>,
    },
    /// Gives a text the numbers of its tokens, a ragged i64 column (the `encode` of Hugging Face's
    /// `tokenizers`).
    Tokenize {
        /// A `tokenizer.json`. A relative path starts from the job file's folder.
        file: String,
        /// Whether the tokens that the file adds at the begin and the end are there. Default true.
        #[serde(default = "yes", skip_serializing_if = "is_yes")]
        add_special_tokens: bool,
        /// SHA-256 of the file's content in lower-case hex. The sender of the job sets it, not the
        /// user.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        sha256: Option<String>,
    },
    /// Gives a ragged column a fixed length: cuts off what is too much, and fills up with `value`.
    Pad {
        /// Elements of each record.
        length: usize,
        /// Value of the elements that are added. Default 0.
        #[serde(default)]
        value: f64,
        /// End at which elements are cut off or added. Default `end`.
        #[serde(default)]
        side: Side,
    },
}

/// Size of an image in pixels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged, expecting = "a number of pixels, or `[height, width]`")]
pub enum Size {
    /// One number.
    One(usize),
    /// Height and width.
    Both(usize, usize),
}

impl Size {
    /// Returns height and width, where one number stands for both.
    pub const fn both(self) -> (usize, usize) {
        match self {
            Self::One(size) => (size, size),
            Self::Both(height, width) => (height, width),
        }
    }
}

/// One number for all channels, or one for each.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged, expecting = "a number, or a list of numbers")]
pub enum Numbers {
    /// One number.
    One(f32),
    /// One for each channel.
    Each(Vec<f32>),
}

impl Numbers {
    /// Returns the numbers. One stands for all.
    pub fn list(&self) -> &[f32] {
        match self {
            Self::One(number) => std::slice::from_ref(number),
            Self::Each(numbers) => numbers,
        }
    }
}

/// Entry of a vocabulary.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(untagged, expecting = "a text or an integer")]
pub enum Word {
    /// An integer.
    Integer(i64),
    /// A text.
    Text(String),
}

/// End of a list.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Side {
    /// The first elements.
    Start,
    /// The last elements.
    #[default]
    End,
}

impl Transform {
    /// Returns the name in job files.
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Decode { .. } => "decode",
            Self::Resize { .. } => "resize",
            Self::CenterCrop { .. } => "center_crop",
            Self::RandomCrop { .. } => "random_crop",
            Self::RandomResizedCrop { .. } => "random_resized_crop",
            Self::HorizontalFlip { .. } => "horizontal_flip",
            Self::VerticalFlip { .. } => "vertical_flip",
            Self::ColorJitter { .. } => "color_jitter",
            Self::Normalize { .. } => "normalize",
            Self::Cast { .. } => "cast",
            Self::OneHot { .. } => "one_hot",
            Self::Log { .. } => "log",
            Self::Clip { .. } => "clip",
            Self::Hash { .. } => "hash",
            Self::Vocabulary { .. } => "vocabulary",
            Self::Tokenize { .. } => "tokenize",
            Self::Pad { .. } => "pad",
        }
    }

    /// Returns whether the result differs between epochs.
    pub const fn is_random(&self) -> bool {
        matches!(
            self,
            Self::RandomCrop { .. }
                | Self::RandomResizedCrop { .. }
                | Self::HorizontalFlip { .. }
                | Self::VerticalFlip { .. }
                | Self::ColorJitter { .. }
        )
    }

    /// Makes the path of a file absolute. It starts from the job file's folder.
    pub(super) fn settle(&mut self, folder: &Path) {
        if let Self::Tokenize { file, .. } = self
            && !file.is_empty()
            && !file.contains("://")
        {
            *file = folder.join(&*file).to_string_lossy().into_owned();
        }
    }

    /// Checks ranges. `key` is the list's key in the job file.
    pub(super) fn validate(&self, key: &str, check: &mut impl FnMut(bool, String)) {
        let mut check = |ok: bool, what: String| check(ok, format!("{key}, {}: {what}", self.name()));
        let positive = |numbers: &[f32]| numbers.iter().all(|number| number.is_finite() && *number > 0.0);
        match self {
            Self::Decode { channels } => {
                check(matches!(channels, 1 | 3), format!("channels = {channels}; 3 is RGB, 1 is grey"));
            }
            Self::Resize { size }
            | Self::CenterCrop { size }
            | Self::RandomCrop { size, .. }
            | Self::RandomResizedCrop { size, .. } => {
                let (height, width) = size.both();
                check(
                    (1..=SIDE_MAX).contains(&height) && (1..=SIDE_MAX).contains(&width),
                    format!("{height} x {width} pixels; a side has 1 to {SIDE_MAX}"),
                );
                if let Self::RandomResizedCrop { scale, ratio, .. } = self {
                    check(
                        0.0 < scale.0 && scale.0 <= scale.1 && scale.1 <= 1.0,
                        format!(
                            "scale = [{}, {}]; shares of the area from above 0 to 1, the smaller one first",
                            scale.0, scale.1
                        ),
                    );
                    check(
                        0.0 < ratio.0 && ratio.0 <= ratio.1 && ratio.1.is_finite(),
                        format!("ratio = [{}, {}]; numbers above 0, the smaller one first", ratio.0, ratio.1),
                    );
                }
                if let Self::RandomCrop { padding, .. } = self {
                    check(*padding <= SIDE_MAX, format!("padding = {padding}; at most {SIDE_MAX}"));
                }
            }
            Self::HorizontalFlip { p } | Self::VerticalFlip { p } => {
                check((0.0..=1.0).contains(p), format!("p = {p}; a probability is from 0 to 1"));
            }
            Self::ColorJitter { brightness, contrast, saturation, hue } => {
                for (name, value) in
                    [("brightness", brightness), ("contrast", contrast), ("saturation", saturation)]
                {
                    check(value.is_finite() && *value >= 0.0, format!("{name} = {value}; 0 or more"));
                }
                check((0.0..=0.5).contains(hue), format!("hue = {hue}; from 0 to 0.5"));
            }
            Self::Normalize { mean, std } => {
                check(
                    mean.list().iter().all(|mean| mean.is_finite()),
                    "mean: numbers must be finite".to_owned(),
                );
                check(positive(std.list()), "std: numbers must be above 0".to_owned());
            }
            Self::OneHot { classes } => {
                check(
                    (1..=CLASSES_MAX).contains(classes),
                    format!("classes = {classes}; from 1 to {CLASSES_MAX}"),
                );
            }
            Self::Log { add } => check(add.is_finite(), format!("add = {add}; must be finite")),
            Self::Clip { min, max } => {
                check(min.is_some() || max.is_some(), "give `min`, `max` or both".to_owned());
                let bound = |bound: &Option<f64>, open| bound.unwrap_or(open);
                let (min, max) = (bound(min, f64::NEG_INFINITY), bound(max, f64::INFINITY));
                check(min <= max, format!("min = {min}, max = {max}; the smaller one first"));
            }
            Self::Hash { buckets } => {
                check((1..=1 << 62).contains(buckets), format!("buckets = {buckets}; from 1 to 2^62"));
            }
            Self::Vocabulary { values, .. } => {
                check(!values.is_empty(), "values: an empty list knows nothing".to_owned());
                let mut seen = std::collections::HashSet::new();
                let twice = values.iter().find(|word| !seen.insert(*word));
                check(twice.is_none(), format!("values: {twice:?} stands there twice; keep one"));
                let texts = values.iter().filter(|word| matches!(word, Word::Text(_))).count();
                check(
                    texts == 0 || texts == values.len(),
                    "values: texts and integers in one list; give all as texts or all as integers".to_owned(),
                );
            }
            Self::Tokenize { file, sha256, .. } => {
                check(
                    !file.is_empty() && !file.contains("://"),
                    format!("file = \"{file}\"; the path of a tokenizer.json on this machine"),
                );
                let is_hash = |hash: &String| hash.len() == 64 && hash.bytes().all(is_lower_hex);
                check(
                    sha256.as_ref().is_none_or(is_hash),
                    "sha256: 64 digits of lower-case hex, or nothing".to_owned(),
                );
            }
            Self::Pad { length, value, .. } => {
                check(
                    (1..=super::BLOCK_MAX).contains(length),
                    format!("length = {length}; from 1 to {}", super::BLOCK_MAX),
                );
                check(value.is_finite(), format!("value = {value}; must be finite"));
            }
            Self::Cast { .. } => {}
        }
    }
}

/// Most pixels of a side of an image.
pub const SIDE_MAX: usize = 16_384;

/// Most classes of a one-hot column.
pub const CLASSES_MAX: usize = 1 << 20;

const fn is_lower_hex(byte: u8) -> bool {
    byte.is_ascii_digit() || matches!(byte, b'a'..=b'f')
}

const fn yes() -> bool {
    true
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
const fn is_yes(value: &bool) -> bool {
    *value
}

const fn rgb() -> usize {
    3
}

const fn half() -> f64 {
    0.5
}

const fn areas() -> (f64, f64) {
    (0.08, 1.0)
}

const fn ratios() -> (f64, f64) {
    (3.0 / 4.0, 4.0 / 3.0)
}

const fn zero() -> Numbers {
    Numbers::One(0.0)
}

const fn one() -> Numbers {
    Numbers::One(1.0)
}
