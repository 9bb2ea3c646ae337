//! The values of a model: one channel after the other (CHW), as floats or as bytes.

use super::Image;
use crate::levels::Levels;

/// Returns `(value / 255 - mean) / std` of the bytes of each channel, for images of `pixels`
/// pixels.
///
/// The bits are those of torchvision's `ToDtype(float32, scale=True)` and `Normalize`. So `value /
/// 255` is a product with 1/255, and the difference is divided and not multiplied.
///
/// # Panics
/// `mean` or `std` has fewer values than channels.
pub(crate) fn normalization(channels: usize, pixels: usize, mean: &[f32], std: &[f32]) -> Levels {
    Levels::new(channels, pixels, |channel, value| {
        (f32::from(value) * (1.0 / 255.0) - mean[channel]) / std[channel]
    })
}

/// Writes the levels of each channel's values to `out`, one channel after the other.
///
/// # Panics
/// `out` has another length than the image, or there are fewer tables than channels.
pub(crate) fn normalized(image: &Image, levels: &Levels, out: &mut [f32]) {
    let table = |channel: usize| levels.table(channel.min(image.channels - 1));
    let tables = [table(0), table(1), table(2)];
    separated(image, out, |channel, value| tables[channel][usize::from(value)]);
}

/// Copies an image's bytes to `out`, one channel after the other.
///
/// # Panics
/// `out` has another length than the image.
pub(crate) fn planar(image: &Image, out: &mut [u8]) {
    separated(image, out, |_, value| value);
}

/// Writes a function of each value to `out`, one channel after the other.
fn separated<T>(image: &Image, out: &mut [T], function: impl Fn(usize, u8) -> T) {
    assert_eq!(out.len(), image.values.len(), "an image of {} x {}", image.height, image.width);
    if image.channels == 1 {
        for (out, &value) in out.iter_mut().zip(&image.values) {
            *out = function(0, value);
        }
        return;
    }
    let count = out.len() / 3;
    let (red, rest) = out.split_at_mut(count);
    let (green, blue) = rest.split_at_mut(count);
    let pixels = image.values.as_chunks::<3>().0;
    for (((pixel, red), green), blue) in pixels.iter().zip(red).zip(green).zip(blue) {
        *red = function(0, pixel[0]);
        *green = function(1, pixel[1]);
        *blue = function(2, pixel[2]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn channels_stand_one_after_the_other() {
        let image = Image { height: 1, width: 2, channels: 3, values: vec![0, 51, 102, 153, 204, 255] };
        let mut bytes = [0; 6];
        planar(&image, &mut bytes);
        assert_eq!(bytes, [0, 153, 51, 204, 102, 255]);
        let mut floats = [0.0; 6];
        normalized(&image, &normalization(3, 2, &[0.0, 0.5, 1.0], &[1.0, 0.5, 2.0]), &mut floats);
        let expected = [0.0, 0.6, -0.6, 0.6, -0.3, 0.0];
        for (ours, exact) in floats.iter().zip(expected) {
            assert!((ours - exact).abs() < 1e-6, "{floats:?}");
        }
    }

    #[test]
    fn a_grey_image_has_one_plane() {
        let image = Image { height: 2, width: 1, channels: 1, values: vec![0, 255] };
        let mut floats = [0.0; 2];
        normalized(&image, &normalization(1, 2, &[0.5], &[0.25]), &mut floats);
        assert_eq!(floats, [-2.0, 2.0]);
    }
}
