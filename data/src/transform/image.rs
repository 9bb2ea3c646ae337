//! Transforms of images: which images they take, and which they make.

use proto::column::{ColumnSpec, ElementType};
use proto::random::Keyed;
use proto::spec::Transform;
use proto::spec::transform::Size;

use super::Kind;
use crate::pixels::{self, Image, Window};

/// Returns what a transform of images makes of a kind.
///
/// # Errors
/// The kind is no image, and why.
pub(super) fn fit(kind: &Kind, transform: &Transform) -> Result<Kind, String> {
    if let Transform::Decode { channels } = transform {
        return match kind {
            Kind::Values(spec) if spec.ragged && spec.dtype == ElementType::U8 && spec.shape.is_empty() => {
                Ok(Kind::Image { channels: *channels, size: None })
            }
            Kind::Values(spec) => Err(format!("it takes the bytes of a file, u8[any], and this is {spec}")),
            Kind::Image { .. } => Err("the image is decoded already; remove it".to_owned()),
        };
    }
    let (channels, size) = match kind {
        Kind::Image { channels, size } => (*channels, *size),
        Kind::Values(spec) => of_column(spec)?,
    };
    let size = match transform {
        Transform::Resize { size: Size::One(side) } => {
            size.map(|(height, width)| pixels::short_side(height, width, *side))
        }
        Transform::Resize { size }
        | Transform::CenterCrop { size }
        | Transform::RandomCrop { size, .. }
        | Transform::RandomResizedCrop { size, .. } => Some(size.both()),
        _ => size,
    };
    Ok(Kind::Image { channels, size })
}

/// Returns channels and size of the images that lie in a column.
fn of_column(spec: &ColumnSpec) -> Result<(usize, Option<(usize, usize)>), String> {
    match (spec.dtype, spec.ragged, spec.shape.as_slice()) {
        (ElementType::U8, false, &[height, width] | &[height, width, 1]) => Ok((1, Some((height, width)))),
        (ElementType::U8, false, &[height, width, 3]) => Ok((3, Some((height, width)))),
        (ElementType::U8, true, []) => Err("these are the bytes of files; put `decode` before it".to_owned()),
        _ => Err(format!("it takes images, u8[height, width] or u8[height, width, 3], and this is {spec}")),
    }
}

/// Returns the image that lies in a column.
pub(super) fn stored(spec: &ColumnSpec, raw: &[u8]) -> Image {
    let side = |place| spec.shape.get(place).copied().unwrap_or(1);
    Image { height: side(0), width: side(1), channels: side(2), values: raw.to_vec() }
}

/// Returns how many rows from the top of an image a transform looks at.
pub(super) fn rows(transform: &Transform, height: usize, width: usize, random: &mut Keyed) -> usize {
    match transform {
        Transform::CenterCrop { size } => {
            let (to_height, to_width) = size.both();
            let (top, _) = pixels::center(height, width, to_height, to_width);
            usize::try_from(top).map_or(height, |top| top + to_height)
        }
        Transform::RandomResizedCrop { scale, ratio, .. } => {
            let window =
                pixels::random_resized_window(height, width, *scale, *ratio, &mut || random.next_f64());
            window.top + window.height
        }
        _ => height,
    }
}

/// Changes an image.
pub(super) fn apply(transform: &Transform, mut image: Image, random: &mut Keyed) -> Image {
    let mut draw = || random.next_f64();
    let (height, width) = (image.height, image.width);
    match transform {
        Transform::Resize { size } => {
            let (to_height, to_width) = match *size {
                Size::One(side) => pixels::short_side(height, width, side),
                Size::Both(height, width) => (height, width),
            };
            pixels::resized(&image, Window { top: 0, left: 0, height, width }, to_height, to_width)
        }
        Transform::CenterCrop { size } => {
            let (to_height, to_width) = size.both();
            let (top, left) = pixels::center(height, width, to_height, to_width);
            pixels::cropped(&image, top, left, to_height, to_width)
        }
        Transform::RandomCrop { size, padding } => {
            let (to_height, to_width) = size.both();
            let mut place = |side: usize, to: usize| {
                let free = (side + 2 * padding).saturating_sub(to) + 1;
                let begin = ((draw() * free as f64) as usize).min(free - 1);
                begin as isize - *padding as isize
            };
            let (top, left) = (place(height, to_height), place(width, to_width));
            pixels::cropped(&image, top, left, to_height, to_width)
        }
        Transform::RandomResizedCrop { size, scale, ratio } => {
            let window = pixels::random_resized_window(height, width, *scale, *ratio, &mut draw);
            let (to_height, to_width) = size.both();
            pixels::resized(&image, window, to_height, to_width)
        }
        Transform::HorizontalFlip { p } => {
            if draw() < *p {
                pixels::flipped_horizontally(&mut image);
            }
            image
        }
        Transform::VerticalFlip { p } => {
            if draw() < *p {
                pixels::flipped_vertically(&mut image);
            }
            image
        }
        Transform::ColorJitter { .. } => {
            for adjust in adjustments(transform, random) {
                pixels::adjusted(&mut image, adjust);
            }
            image
        }
        _ => image,
    }
}

/// Draws the adjustments of a colour jitter, in their order. Other transforms have none.
pub(super) fn adjustments(transform: &Transform, random: &mut Keyed) -> Vec<pixels::Adjust> {
    let Transform::ColorJitter { brightness, contrast, saturation, hue } = transform else {
        return Vec::new();
    };
    let factors = |by: f32| (by > 0.0).then_some(((1.0 - by).max(0.0), 1.0 + by));
    let (brightness, contrast, saturation) = (factors(*brightness), factors(*contrast), factors(*saturation));
    let hue = (*hue > 0.0).then_some((-hue, *hue));
    pixels::color_jitter(brightness, contrast, saturation, hue, &mut || random.next_f64())
}
