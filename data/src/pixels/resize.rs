//! Another size of a part of an image.

use fast_image_resize::images::{TypedCroppedImage, TypedImage, TypedImageRef};
use fast_image_resize::pixels::{InnerPixel, U8, U8x3};
use fast_image_resize::{FilterType, PixelTrait, ResizeAlg, ResizeOptions, Resizer};

use super::{Image, Window, cropped};

/// Resizes a part of an image, bilinear and without aliasing, as torchvision's `resize` with
/// `antialias=True` does after `crop`. Pixels outside the part do not count.
///
/// Weights have 16 bits and sums 32, so that every processor gives the same bits.
///
/// # Panics
/// The window is empty, or not inside the image.
pub(crate) fn resized(image: &Image, window: Window, height: usize, width: usize) -> Image {
    resized_by(&mut Resizer::new(), image, window, height, width)
}

fn resized_by(resizer: &mut Resizer, image: &Image, window: Window, height: usize, width: usize) -> Image {
    if (window.height, window.width) == (height, width) {
        return cropped(image, window.top as isize, window.left as isize, height, width);
    }
    let mut values = vec![0; height * width * image.channels];
    if !values.is_empty() {
        match image.channels {
            1 => resize::<U8>(resizer, image, window, height, width, &mut values),
            _ => resize::<U8x3>(resizer, image, window, height, width, &mut values),
        }
    }
    Image { height, width, channels: image.channels, values }
}

fn resize<P: PixelTrait + InnerPixel>(
    resizer: &mut Resizer,
    image: &Image,
    window: Window,
    height: usize,
    width: usize,
    out: &mut [u8],
) {
    let options =
        ResizeOptions::new().resize_alg(ResizeAlg::Convolution(FilterType::Bilinear)).use_alpha(false);
    let place = || format!("{window:?} of {} x {} pixels", image.width, image.height);
    let source = TypedImageRef::<P>::from_buffer(image.width as u32, image.height as u32, &image.values)
        .unwrap_or_else(|error| panic!("{error}: {}", place()));
    let (left, top) = (window.left as u32, window.top as u32);
    let part = TypedCroppedImage::from_ref(&source, left, top, window.width as u32, window.height as u32)
        .unwrap_or_else(|error| panic!("{error}: {}", place()));
    let mut target = TypedImage::<P>::from_buffer(width as u32, height as u32, out)
        .unwrap_or_else(|error| panic!("{error}: {}", place()));
    resizer.resize_typed(&part, &mut target, &options).unwrap_or_else(|error| panic!("{error}: {}", place()));
}

#[cfg(test)]
#[expect(unsafe_code, reason = "chooses the instructions of the resizer")]
mod tests {
    use fast_image_resize::CpuExtensions;
    use proptest::prelude::*;

    use super::*;

    /// Returns the instruction sets of this machine that the resizer uses.
    fn extensions() -> Vec<CpuExtensions> {
        #[cfg(target_arch = "x86_64")]
        let all = [CpuExtensions::Sse4_1, CpuExtensions::Avx2];
        #[cfg(target_arch = "aarch64")]
        let all = [CpuExtensions::Neon];
        all.into_iter().filter(CpuExtensions::is_supported).collect()
    }

    fn resizer(extensions: CpuExtensions) -> Resizer {
        let mut resizer = Resizer::new();
        // SAFETY: the machine has these instructions.
        unsafe { resizer.set_cpu_extensions(extensions) };
        resizer
    }

    fn whole(image: &Image) -> Window {
        Window { top: 0, left: 0, height: image.height, width: image.width }
    }

    #[test]
    fn a_pixel_outside_the_window_does_not_count() {
        let mut image = Image { height: 4, width: 4, channels: 1, values: vec![9; 16] };
        image.values[..4].fill(255);
        let window = Window { top: 1, left: 0, height: 3, width: 4 };
        assert_eq!(resized(&image, window, 8, 2).values, [9; 16]);
    }

    proptest! {
        #[test]
        fn a_constant_image_stays_constant(
            (height, width) in (1_usize..70, 1_usize..70),
            (to_height, to_width) in (1_usize..70, 1_usize..70),
            value: u8,
            rgb: bool,
        ) {
            let channels = if rgb { 3 } else { 1 };
            let image = Image { height, width, channels, values: vec![value; height * width * channels] };
            let result = resized(&image, whole(&image), to_height, to_width);
            prop_assert_eq!(result.values, vec![value; to_height * to_width * channels]);
        }

        #[test]
        fn every_instruction_set_gives_the_same_bits(
            (height, width) in (1_usize..90, 1_usize..90),
            (to_height, to_width) in (1_usize..90, 1_usize..90),
            (top, left) in (0.0_f64..1.0, 0.0_f64..1.0),
            seed: u32,
            rgb: bool,
        ) {
            let channels = if rgb { 3 } else { 1 };
            let mut state = seed;
            let mut byte = || {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                // Many extreme values, so that sums overflow if they can.
                match state >> 30 { 0 => 0, 1 => 255, _ => (state >> 16) as u8 }
            };
            let values = (0..height * width * channels).map(|_| byte()).collect();
            let image = Image { height, width, channels, values };
            let (top, left) = ((top * height as f64) as usize, (left * width as f64) as usize);
            let window = Window { top, left, height: height - top, width: width - left };
            let plain =
                resized_by(&mut resizer(CpuExtensions::None), &image, window, to_height, to_width);
            for one in extensions() {
                let other = resized_by(&mut resizer(one), &image, window, to_height, to_width);
                prop_assert!(plain == other, "{one:?}");
            }
        }
    }
}
