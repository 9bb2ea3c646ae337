//! The operations give the pixels of torchvision 0.26 and Pillow 13 (`golden/pixels.py`).

use std::path::{Path, PathBuf};

use safetensors::SafeTensors;
use serde_json::Value;

use super::color::Adjust;
use super::*;

fn path(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("src/pixels/golden").join(name)
}

/// One line of `cases.json`, with the pixels that the other program made.
struct Case<'a> {
    fields: Value,
    expected: Option<Image>,
    bytes: &'a [u8],
}

impl Case<'_> {
    fn name(&self) -> &str {
        self.fields["name"].as_str().unwrap()
    }

    fn text(&self, field: &str) -> &str {
        self.fields[field].as_str().unwrap()
    }

    fn count(&self, field: &str) -> usize {
        self.fields[field].as_u64().unwrap() as usize
    }

    fn numbers(&self, field: &str) -> Vec<f64> {
        self.fields[field].as_array().unwrap().iter().map(|number| number.as_f64().unwrap()).collect()
    }

    fn counts<const COUNT: usize>(&self, field: &str) -> [usize; COUNT] {
        let numbers: Vec<_> = self.numbers(field).into_iter().map(|number| number as usize).collect();
        numbers.try_into().unwrap()
    }

    /// Checks that no value differs by more than `bound`. It returns how many values differ.
    fn check(&self, image: &Image, bound: u8) -> usize {
        let expected = self.expected.as_ref().unwrap();
        let name = self.name();
        assert_eq!(
            (image.height, image.width, image.channels),
            (expected.height, expected.width, expected.channels),
            "{name}"
        );
        let differences = image.values.iter().zip(&expected.values).map(|(&a, &b)| a.abs_diff(b));
        let most = differences.clone().max().unwrap_or(0);
        let count = differences.filter(|&difference| difference > 0).count();
        println!("{name}: {count} of {} values differ, by at most {most}", image.values.len());
        assert!(most <= bound, "{name}: {most} > {bound}\n{:?}\n{:?}", image.values, expected.values);
        count
    }
}

/// Calls `test` for each case of an operation.
fn each(op: &str, mut test: impl FnMut(&Case)) {
    let cases: Vec<Value> =
        serde_json::from_str(&std::fs::read_to_string(path("cases.json")).unwrap()).unwrap();
    let content = std::fs::read(path("expected.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&content).unwrap();
    let mut count = 0;
    for fields in cases.into_iter().filter(|case| case["op"] == op) {
        let tensor = tensors.tensor(fields["name"].as_str().unwrap()).ok();
        let bytes = tensor.as_ref().map_or(&[][..], |tensor| tensor.data());
        let expected = tensor.as_ref().map(|tensor| {
            let &[height, width, channels] = tensor.shape() else { panic!("{fields}") };
            Image { height, width, channels, values: bytes.to_vec() }
        });
        test(&Case { fields, expected, bytes });
        count += 1;
    }
    assert!(count > 0, "no case of {op}");
}

/// Decodes a file of the golden folder.
fn image(file: &str, channels: usize) -> Image {
    decode(&std::fs::read(path(file)).unwrap(), channels).unwrap_or_else(|error| panic!("{file}: {error}"))
}

/// Returns the part of an image.
fn part(image: &Image, [top, left, height, width]: [usize; 4]) -> Image {
    cropped(image, top as isize, left as isize, height, width)
}

#[test]
fn decoded_pixels_are_those_of_torchvision_and_pillow() {
    each("decode", |case| {
        let bound = if case.text("file") == "cmyk.jpg" { 1 } else { 0 };
        case.check(&image(case.text("file"), case.count("channels")), bound);
    });
}

#[test]
fn resized_images_are_within_one_of_torchvision() {
    let main = image("420.jpg", 3);
    each("resize", |case| {
        let [height, width] = case.counts("to");
        let window = Window {
            top: case.count("top"),
            left: case.count("left"),
            height: case.count("height"),
            width: case.count("width"),
        };
        let source = if case.count("channels") == 3 { main.clone() } else { image("420.jpg", 1) };
        case.check(&resized(&source, window, height, width), 1);
    });
}

#[test]
fn crops_and_flips_are_those_of_torchvision() {
    let main = part(&image("420.jpg", 3), [0, 0, 11, 14]);
    each("crop", |case| {
        let box_ = case.numbers("box");
        let crop = cropped(&main, box_[0] as isize, box_[1] as isize, box_[2] as usize, box_[3] as usize);
        case.check(&crop, 0);
    });
    each("center", |case| {
        let [height, width] = case.counts("to");
        let (top, left) = center(main.height, main.width, height, width);
        case.check(&cropped(&main, top, left, height, width), 0);
    });
    each("flip", |case| {
        let mut flipped = main.clone();
        if case.fields["horizontal"] == true {
            flipped_horizontally(&mut flipped);
        } else {
            flipped_vertically(&mut flipped);
        }
        case.check(&flipped, 0);
    });
}

#[test]
fn sizes_and_windows_are_those_of_torchvision() {
    each("short_side", |case| {
        let [height, width] = case.counts("shape");
        assert_eq!(<[usize; 2]>::from(short_side(height, width, case.count("size"))), case.counts("to"));
    });
    each("window", |case| {
        let [height, width] = case.counts("shape");
        let pair = |field: &str| (case.numbers(field)[0], case.numbers(field)[1]);
        let mut draws = case.numbers("draws").into_iter();
        let mut draw = || draws.next().unwrap();
        let window = random_resized_window(height, width, pair("scale"), pair("ratio"), &mut draw);
        let Window { top, left, height, width } = window;
        assert_eq!([top, left, height, width], case.counts("window"), "{}", case.name());
    });
}

#[test]
fn adjusted_colours_are_within_one_of_torchvision() {
    let main = part(&image("420.jpg", 3), [4, 12, 18, 29]);
    each("input", |case| {
        case.check(&main, 0);
    });
    each("adjust", |case| {
        let factor = case.fields["factor"].as_f64().unwrap() as f32;
        let adjust = match case.text("kind") {
            "brightness" => Adjust::Brightness(factor),
            "contrast" => Adjust::Contrast(factor),
            "saturation" => Adjust::Saturation(factor),
            kind => {
                assert_eq!(kind, "hue");
                Adjust::Hue(factor)
            }
        };
        let mut image = main.clone();
        adjusted(&mut image, adjust);
        case.check(&image, 1);
    });
    each("adjust_grey", |case| {
        let values = main.values.iter().step_by(3).copied().collect();
        let mut grey = Image { channels: 1, values, ..main.clone() };
        adjusted(&mut grey, Adjust::Contrast(case.fields["factor"].as_f64().unwrap() as f32));
        case.check(&grey, 1);
    });
}

#[test]
fn normalized_values_have_the_bits_of_torchvision() {
    each("normalize", |case| {
        let values = (0..=255).flat_map(|value| [value; 3]).collect();
        let ramp = Image { height: 16, width: 16, channels: 3, values };
        let single = |field: &str| -> Vec<f32> { case.numbers(field).iter().map(|&n| n as f32).collect() };
        let mut ours = vec![0.0; 3 * 256];
        normalized(&ramp, &normalization(3, 256, &single("mean"), &single("std")), &mut ours);
        let ours: Vec<u8> = ours.iter().flat_map(|value| value.to_le_bytes()).collect();
        assert!(ours == case.bytes);
    });
}
