//! Which part of an image an operation takes, and copies of it: crops and flips.

use super::{Image, below, between};

/// A part of an image. It has at least one pixel and lies inside the image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Window {
    pub(crate) top: usize,
    pub(crate) left: usize,
    pub(crate) height: usize,
    pub(crate) width: usize,
}

/// Copies a part of an image, which may lie partly or wholly outside. Pixels outside are zero, as
/// in `torchvision.transforms.functional.crop`.
pub(crate) fn cropped(image: &Image, top: isize, left: isize, height: usize, width: usize) -> Image {
    let channels = image.channels;
    let mut values = vec![0; height * width * channels];
    let rows = inside(top, height, image.height);
    let columns = inside(left, width, image.width);
    if rows.count > 0 && columns.count > 0 {
        let from = image.values.chunks_exact(image.row()).skip(rows.source).take(rows.count);
        let to = values.chunks_exact_mut(width * channels).skip(rows.target);
        let length = columns.count * channels;
        for (from, to) in from.zip(to) {
            to[columns.target * channels..][..length]
                .copy_from_slice(&from[columns.source * channels..][..length]);
        }
    }
    Image { height, width, channels, values }
}

/// The common part of a crop and an image along one axis.
struct Common {
    /// Where it begins in the image.
    source: usize,
    /// Where it begins in the crop.
    target: usize,
    count: usize,
}

/// Intersects a crop of `length` from `start` on with an image of `size`.
fn inside(start: isize, length: usize, size: usize) -> Common {
    let target = if start < 0 { start.unsigned_abs() } else { 0 };
    let source = if start < 0 { 0 } else { start.unsigned_abs() };
    let count = length.saturating_sub(target).min(size.saturating_sub(source));
    Common { source, target, count }
}

/// Exchanges left and right.
pub(crate) fn flipped_horizontally(image: &mut Image) {
    if image.values.is_empty() {
        return;
    }
    let row = image.row();
    if image.channels == 1 {
        image.values.chunks_exact_mut(row).for_each(<[u8]>::reverse);
        return;
    }
    for row in image.values.chunks_exact_mut(row) {
        row.as_chunks_mut::<3>().0.reverse();
    }
}

/// Exchanges top and bottom.
pub(crate) fn flipped_vertically(image: &mut Image) {
    let row = image.row();
    for top in 0..image.height / 2 {
        let (above, below) = image.values.split_at_mut((image.height - 1 - top) * row);
        above[top * row..][..row].swap_with_slice(&mut below[..row]);
    }
}

/// Returns the height and width of an image after its shorter side became `size`. The ratio of the
/// sides stays; the longer side is rounded down, as torchvision's `resize` with one number does.
pub(crate) fn short_side(height: usize, width: usize, size: usize) -> (usize, usize) {
    let (short, long) = (height.min(width), height.max(width));
    let long = (size as u128 * long as u128 / short.max(1) as u128) as usize;
    if width <= height { (long, size) } else { (size, long) }
}

/// Returns top and left of a crop in the middle, rounded as torchvision's `center_crop` rounds.
/// Both are negative where the crop is larger than the image.
pub(crate) fn center(height: usize, width: usize, crop_height: usize, crop_width: usize) -> (isize, isize) {
    (middle(height, crop_height), middle(width, crop_width))
}

/// Returns the start of a crop in the middle of one axis.
fn middle(size: usize, crop: usize) -> isize {
    if crop > size {
        // torchvision first pads the image to the size of the crop, less in front than behind.
        return -(((crop - size) / 2) as isize);
    }
    // Python's `round` goes to the even neighbour from one half.
    let twice = size - crop;
    (twice / 2 + usize::from(twice % 4 == 3)) as isize
}

/// Tries of [`random_resized_window`] before it takes the middle.
const TRIES: usize = 10;

/// Draws the part of an image that torchvision's `RandomResizedCrop` takes. `scale` is the interval
/// of the window's share of the area, `ratio` that of width over height.
///
/// Each of up to ten tries draws the area (uniform), then the logarithm of the ratio (uniform). The
/// first window that fits then draws its top and its left, as uniform integers. So the function
/// takes 4, 6, .. 22 draws, or 20 if no window fits. Then it returns the largest window in the
/// middle whose ratio is in the interval. torchvision computes the ratio in `f32`, this function in
/// `f64`.
pub(crate) fn random_resized_window(
    height: usize,
    width: usize,
    scale: (f64, f64),
    ratio: (f64, f64),
    draw: &mut dyn FnMut() -> f64,
) -> Window {
    // Of `libm`, because the standard library's functions round differently on other systems.
    let logarithms = (libm::log(ratio.0), libm::log(ratio.1));
    let area = height as f64 * width as f64;
    for _ in 0..TRIES {
        let area = area * between(scale, draw);
        let ratio = libm::exp(between(logarithms, draw));
        let window_width = (area * ratio).sqrt().round_ties_even();
        let window_height = (area / ratio).sqrt().round_ties_even();
        let fits = |side: f64, limit: usize| side >= 1.0 && side <= limit as f64;
        if fits(window_width, width) && fits(window_height, height) {
            let (window_height, window_width) = (window_height as usize, window_width as usize);
            let top = below(height - window_height + 1, draw);
            let left = below(width - window_width + 1, draw);
            return Window { top, left, height: window_height, width: window_width };
        }
    }
    widest(height, width, ratio)
}

/// Returns the largest window in the middle whose ratio is in the interval.
fn widest(height: usize, width: usize, ratio: (f64, f64)) -> Window {
    let (least, most) = (ratio.0.min(ratio.1), ratio.0.max(ratio.1));
    let of_image = width as f64 / height as f64;
    let side = |exact: f64, limit: usize| (exact.round_ties_even() as usize).clamp(1, limit.max(1));
    let (window_height, window_width) = if of_image < least {
        (side(width as f64 / least, height), width)
    } else if of_image > most {
        (height, side(height as f64 * most, width))
    } else {
        (height, width)
    };
    Window {
        top: (height - window_height) / 2,
        left: (width - window_width) / 2,
        height: window_height,
        width: window_width,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Returns an image whose values count up.
    fn counting(height: usize, width: usize, channels: usize) -> Image {
        let values = (0..height * width * channels).map(|index| index as u8).collect();
        Image { height, width, channels, values }
    }

    #[test]
    fn pixels_outside_the_image_are_zero() {
        let image = counting(2, 2, 1);
        assert_eq!(cropped(&image, -1, -1, 3, 3).values, [0, 0, 0, 0, 0, 1, 0, 2, 3]);
        assert_eq!(cropped(&image, 1, 1, 2, 2).values, [3, 0, 0, 0]);
        assert_eq!(cropped(&image, 5, 0, 1, 2).values, [0, 0]);
        assert_eq!(cropped(&image, -9, 0, 1, 2).values, [0, 0]);
        assert_eq!(cropped(&image, isize::MIN, isize::MAX, 1, 1).values, [0]);
        assert_eq!(cropped(&image, 0, 0, 0, 2).values, Vec::<u8>::new());
    }

    #[test]
    fn a_flip_exchanges_pixels_and_not_channels() {
        let mut image = counting(1, 3, 3);
        flipped_horizontally(&mut image);
        assert_eq!(image.values, [6, 7, 8, 3, 4, 5, 0, 1, 2]);
        let mut image = counting(3, 2, 1);
        flipped_vertically(&mut image);
        assert_eq!(image.values, [4, 5, 2, 3, 0, 1]);
    }

    #[test]
    fn halves_are_rounded_to_the_even_neighbour() {
        // (3 - 2) / 2 = 0.5, (5 - 2) / 2 = 1.5, (7 - 2) / 2 = 2.5, (9 - 2) / 2 = 3.5
        assert_eq!([3, 5, 7, 9].map(|size| middle(size, 2)), [0, 2, 2, 4]);
        assert_eq!([2, 3, 4, 5, 6].map(|crop| middle(2, crop)), [0, 0, -1, -1, -2]);
    }

    #[test]
    fn the_shorter_side_gets_the_size() {
        assert_eq!(short_side(375, 500, 256), (256, 341));
        assert_eq!(short_side(500, 375, 256), (341, 256));
        assert_eq!(short_side(7, 7, 3), (3, 3));
        assert_eq!(short_side(1, usize::MAX, 1), (1, usize::MAX));
    }

    #[test]
    fn a_window_that_never_fits_falls_back_to_the_middle_after_twenty_draws() {
        let mut draws = 0;
        let mut draw = || {
            draws += 1;
            0.5
        };
        let window = random_resized_window(10, 100, (1.0, 1.0), (0.75, 4.0 / 3.0), &mut draw);
        assert_eq!(window, Window { top: 0, left: 43, height: 10, width: 13 });
        assert_eq!(draws, 20);
    }

    proptest! {
        #[test]
        fn two_flips_give_the_image_back(height in 0_usize..9, width in 0_usize..9, rgb: bool) {
            let image = counting(height, width, if rgb { 3 } else { 1 });
            for flip in [flipped_horizontally, flipped_vertically] {
                let mut twice = image.clone();
                flip(&mut twice);
                flip(&mut twice);
                prop_assert_eq!(&twice, &image);
            }
        }

        #[test]
        fn a_crop_has_the_pixels_of_its_place(
            (top, left) in (-9_isize..9, -9_isize..9), (height, width) in (0_usize..9, 0_usize..9), rgb: bool,
        ) {
            let image = counting(5, 7, if rgb { 3 } else { 1 });
            let crop = cropped(&image, top, left, height, width);
            prop_assert_eq!(crop.values.len(), height * width * image.channels);
            for (index, &value) in crop.values.iter().enumerate() {
                let (pixel, channel) = (index / image.channels, index % image.channels);
                let (row, column) = ((pixel / width) as isize + top, (pixel % width) as isize + left);
                let within = (0..5).contains(&row) && (0..7).contains(&column);
                let at = |row: isize, column: isize| (row * 7 + column) as usize * image.channels + channel;
                prop_assert_eq!(value, if within { image.values[at(row, column)] } else { 0 });
            }
        }

        #[test]
        fn windows_lie_inside_the_image(
            (height, width) in (1_usize..400, 1_usize..400),
            scale in (0.0_f64..1.5, 0.0_f64..1.5),
            ratio in (0.01_f64..50.0, 0.01_f64..50.0),
            draws in proptest::collection::vec(0.0_f64..1.0, 22),
        ) {
            let mut draws = draws.into_iter();
            let mut draw = || draws.next().unwrap();
            let window = random_resized_window(height, width, scale, ratio, &mut draw);
            prop_assert!(window.height >= 1 && window.top + window.height <= height, "{window:?}");
            prop_assert!(window.width >= 1 && window.left + window.width <= width, "{window:?}");
        }

        #[test]
        fn a_centered_crop_has_equal_borders((size, crop) in (0_usize..99, 0_usize..99)) {
            let before = middle(size, crop);
            let after = size as isize - crop as isize - before;
            prop_assert!((before - after).abs() <= 1);
        }
    }
}
