//! Brightness, contrast, saturation and hue, as torchvision adjusts images of bytes.
//!
//! The arithmetic is that of torchvision's version 2 on tensors, in `f32` and cut to bytes. Results
//! differ from it by at most 1 of 255, because PyTorch fuses some products and sums.

use super::{Image, below, between};

/// A change of the colours.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Adjust {
    /// Factor of all values. 0 gives black, 1 changes nothing.
    Brightness(f32),
    /// Factor of the distance to the image's mean grey. 0 gives this grey, 1 changes nothing.
    Contrast(f32),
    /// Factor of the distance to the pixel's grey. 0 gives a grey image, 1 changes nothing. A grey
    /// image stays as it is.
    Saturation(f32),
    /// Turn of the colour wheel, from -0.5 to 0.5 turns. A grey image stays as it is.
    Hue(f32),
}

/// Draws the adjustments of torchvision's `ColorJitter`: a random order of those with an interval,
/// and a uniform factor of each.
///
/// The order takes three draws, also of adjustments that are absent: `i = 0, 1, 2` exchanges places
/// `i` and `i + floor(draw * (4 - i))` of brightness, contrast, saturation, hue. Then each one with
/// an interval takes one draw, in the sequence brightness, contrast, saturation, hue.
pub(crate) fn color_jitter(
    brightness: Option<(f32, f32)>,
    contrast: Option<(f32, f32)>,
    saturation: Option<(f32, f32)>,
    hue: Option<(f32, f32)>,
    draw: &mut dyn FnMut() -> f64,
) -> Vec<Adjust> {
    let mut order = [0, 1, 2, 3];
    for place in 0..3 {
        order.swap(place, place + below(4 - place, draw));
    }
    let mut factor = |interval: Option<(f32, f32)>| {
        interval.map(|(low, high)| between((f64::from(low), f64::from(high)), draw) as f32)
    };
    let adjustments = [
        factor(brightness).map(Adjust::Brightness),
        factor(contrast).map(Adjust::Contrast),
        factor(saturation).map(Adjust::Saturation),
        factor(hue).map(Adjust::Hue),
    ];
    order.iter().filter_map(|&place| adjustments[place]).collect()
}

/// Changes the colours of an image.
pub(crate) fn adjusted(image: &mut Image, adjust: Adjust) {
    let rgb = image.channels == 3;
    match adjust {
        Adjust::Brightness(factor) => map(image, |value| f32::from(value) * factor),
        Adjust::Contrast(factor) => {
            let other = mean(image) * (1.0 - factor);
            map(image, |value| f32::from(value) * factor + other);
        }
        Adjust::Saturation(factor) if rgb => saturate(image, factor),
        Adjust::Hue(turns) if rgb => turn(image, turns),
        Adjust::Saturation(_) | Adjust::Hue(_) => {}
    }
}

/// Replaces each value by a function of it.
fn map(image: &mut Image, function: impl Fn(u8) -> f32) {
    // A cast to bytes cuts the fraction off and keeps the result within the range.
    let table: [u8; 256] = std::array::from_fn(|value| function(value as u8) as u8);
    for value in &mut image.values {
        *value = table[usize::from(*value)];
    }
}

/// Returns the grey of a pixel, a whole number. The weights are torchvision's.
fn grey([red, green, blue]: [u8; 3]) -> f32 {
    let exact = f32::from(red) * 0.2989 + f32::from(green) * 0.587 + f32::from(blue) * 0.114;
    f32::from(exact as u8)
}

/// Returns the mean grey of an image.
fn mean(image: &Image) -> f32 {
    let (sum, count): (u64, usize) = if image.channels == 3 {
        let pixels = image.values.as_chunks::<3>().0;
        (pixels.iter().map(|&pixel| grey(pixel) as u64).sum(), pixels.len())
    } else {
        (image.values.iter().map(|&value| u64::from(value)).sum(), image.values.len())
    };
    (sum as f64 / count.max(1) as f64) as f32
}

/// Multiplies the distance of each pixel to its grey.
fn saturate(image: &mut Image, factor: f32) {
    for pixel in image.values.as_chunks_mut::<3>().0 {
        let other = grey(*pixel) * (1.0 - factor);
        *pixel = pixel.map(|value| (f32::from(value) * factor + other) as u8);
    }
}

/// Turns the colour of each pixel on the colour wheel.
fn turn(image: &mut Image, turns: f32) {
    for pixel in image.values.as_chunks_mut::<3>().0 {
        let [hue, saturation, value] = hsv(pixel.map(|value| f32::from(value) * (1.0 / 255.0)));
        // torchvision's factor, so that only 1.0 gives more than 254.
        *pixel = rgb([fraction(hue + turns), saturation, value]).map(|value| (value * 255.999) as u8);
    }
}

/// Returns `turns` less whole turns, in `[0, 1]`. It takes numbers from -1 to 2.
fn fraction(turns: f32) -> f32 {
    if turns < 0.0 {
        turns + 1.0
    } else if turns >= 1.0 {
        turns - 1.0
    } else {
        turns
    }
}

/// Returns hue (in turns), saturation and value of a colour. All are in `[0, 1]`.
fn hsv([red, green, blue]: [f32; 3]) -> [f32; 3] {
    let most = red.max(green).max(blue);
    let least = red.min(green).min(blue);
    if most == least {
        return [0.0, 0.0, most];
    }
    let range = most - least;
    let from = |channel: f32| (most - channel) / range;
    let sixths = if red == most {
        from(blue) - from(green)
    } else if green == most {
        2.0 + from(red) - from(blue)
    } else {
        4.0 + from(green) - from(red)
    };
    [fraction(sixths * (1.0 / 6.0) + 1.0), range / most, most]
}

/// Returns the colour with this hue (in turns), saturation and value.
fn rgb([hue, saturation, value]: [f32; 3]) -> [f32; 3] {
    let sixths = hue * 6.0;
    let sector = sixths as u8;
    let within = saturation * (sixths - f32::from(sector));
    let low = (1.0 - saturation) * value;
    let falling = ((1.0 - within) * value).clamp(0.0, 1.0);
    let rising = ((within + (1.0 - saturation)) * value).clamp(0.0, 1.0);
    match sector {
        1 => [falling, value, low],
        2 => [low, value, rising],
        3 => [low, falling, value],
        4 => [rising, low, value],
        5 => [value, low, falling],
        _ => [value, rising, low],
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn pixel(values: [u8; 3]) -> Image {
        Image { height: 1, width: 1, channels: 3, values: values.to_vec() }
    }

    fn after(values: [u8; 3], adjust: Adjust) -> Vec<u8> {
        let mut image = pixel(values);
        adjusted(&mut image, adjust);
        image.values
    }

    #[test]
    fn a_third_of_a_turn_makes_red_green() {
        assert_eq!(after([255, 0, 0], Adjust::Hue(1.0 / 3.0)), [0, 255, 0]);
        assert_eq!(after([255, 0, 0], Adjust::Hue(-1.0 / 3.0)), [0, 0, 255]);
        assert_eq!(after([255, 0, 0], Adjust::Hue(0.5)), [0, 255, 255]);
    }

    #[test]
    fn a_factor_of_zero_gives_black_or_grey() {
        assert_eq!(after([200, 100, 50], Adjust::Brightness(0.0)), [0, 0, 0]);
        assert_eq!(after([200, 100, 50], Adjust::Saturation(0.0)), [124, 124, 124]);
        assert_eq!(after([200, 100, 50], Adjust::Contrast(0.0)), [124, 124, 124]);
    }

    #[test]
    fn a_grey_image_keeps_its_values_when_colours_change() {
        for adjust in [Adjust::Saturation(0.3), Adjust::Hue(0.3)] {
            let mut image = Image { height: 1, width: 3, channels: 1, values: vec![1, 2, 200] };
            adjusted(&mut image, adjust);
            assert_eq!(image.values, [1, 2, 200]);
        }
    }

    #[test]
    fn the_order_is_drawn_first_and_absent_adjustments_take_no_factor() {
        // 0 and 3 are exchanged, then 1 and 2, then 2 stays: hue, saturation, contrast, brightness.
        let mut draws = [0.99, 0.5, 0.0, 0.25, 0.75].into_iter();
        let mut draw = || draws.next().unwrap();
        let adjustments = color_jitter(Some((0.0, 2.0)), None, None, Some((-0.5, 0.5)), &mut draw);
        assert_eq!(adjustments, [Adjust::Hue(0.25), Adjust::Brightness(0.5)]);
        assert_eq!(draws.next(), None);
    }

    proptest! {
        #[test]
        fn an_adjustment_by_nothing_keeps_every_value(values: [u8; 3]) {
            prop_assert_eq!(after(values, Adjust::Brightness(1.0)), values);
            prop_assert_eq!(after(values, Adjust::Contrast(1.0)), values);
            prop_assert_eq!(after(values, Adjust::Saturation(1.0)), values);
            let turned = after(values, Adjust::Hue(0.0));
            prop_assert!(turned.iter().zip(values).all(|(&a, b)| a.abs_diff(b) <= 1), "{turned:?} of {values:?}");
        }

        #[test]
        fn every_order_comes_up_and_has_each_adjustment_once(
            draws in proptest::collection::vec(0.0_f64..1.0, 7),
        ) {
            let mut draws = draws.into_iter();
            let mut draw = || draws.next().unwrap();
            let all = Some((0.1, 0.4));
            let adjustments = color_jitter(all, all, all, all, &mut draw);
            let kinds: std::collections::HashSet<_> = adjustments.iter().map(std::mem::discriminant).collect();
            prop_assert_eq!(kinds.len(), 4);
        }

        #[test]
        fn no_adjustment_panics(values: [u8; 3], factor in prop::num::f32::ANY) {
            for adjust in [Adjust::Brightness, Adjust::Contrast, Adjust::Saturation, Adjust::Hue] {
                after(values, adjust(factor));
            }
        }
    }
}
