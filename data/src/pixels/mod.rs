//! Pure operations on images: from the bytes of a file to the values that a model takes.
//!
//! The results are those of torchvision and Pillow. Decoding, resizing and cropping give the same
//! bits on every processor and in every build, because the trained bits depend on them. Nothing
//! here draws random numbers: the caller passes a function that does, and each operation documents
//! the order of its draws.
//!
//! | file | what |
//! | --- | --- |
//! | `decode.rs`, `jpeg.rs` | JPEG, PNG and WebP |
//! | `limit.rs` | how large an image may be |
//! | `geometry.rs` | crops, flips, and the windows that random crops take |
//! | `resize.rs` | another size |
//! | `color.rs` | brightness, contrast, saturation and hue |
//! | `normalize.rs` | values of a model: floats, or bytes, one channel after the other |

mod color;
mod decode;
mod geometry;
#[cfg(test)]
mod golden;
mod jpeg;
mod limit;
mod normalize;
mod resize;

pub(crate) use color::{Adjust, adjusted, color_jitter};
pub(crate) use decode::{Encoding, decode, decode_rows, rgb, size};
pub(crate) use geometry::{
    Window, center, cropped, flipped_horizontally, flipped_vertically, random_resized_window, short_side,
};
pub(crate) use normalize::{normalization, normalized, planar};
pub(crate) use resize::resized;

/// An image in memory: rows of pixels, channels side by side.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Image {
    pub(crate) height: usize,
    pub(crate) width: usize,
    /// 1 (grey) or 3 (red, green, blue).
    pub(crate) channels: usize,
    /// `[height, width, channels]`.
    pub(crate) values: Vec<u8>,
}

impl Image {
    /// Returns the number of values in a row.
    fn row(&self) -> usize {
        self.width * self.channels
    }
}

/// Returns a uniform integer below `count`. It takes one draw.
fn below(count: usize, draw: &mut dyn FnMut() -> f64) -> usize {
    // A product just below `count` may round up to it.
    ((draw() * count as f64) as usize).min(count.saturating_sub(1))
}

/// Returns a uniform number of the interval. It takes one draw.
fn between(interval: (f64, f64), draw: &mut dyn FnMut() -> f64) -> f64 {
    interval.0 + (interval.1 - interval.0) * draw()
}
