//! Lists of transforms against their definition in Python, and lists that do not fit.

use proptest::prelude::*;
use serde::Deserialize;

use super::*;
use crate::cast::cast;
use crate::column::each_f64;

#[derive(Deserialize)]
struct Case {
    column: ColumnSpec,
    values: serde_json::Value,
    transforms: Vec<Transform>,
    seed: u64,
    epoch: u64,
    record: u64,
    shape: Vec<usize>,
    result: Vec<f64>,
}

fn bytes(dtype: ElementType, values: &[f64]) -> Vec<u8> {
    let mut out = vec![0; values.len() * dtype.size()];
    cast(ElementType::F64, bytemuck::cast_slice(values), dtype, &mut out).unwrap();
    out
}

#[test]
fn transforms_are_those_of_their_definition() {
    let text = include_str!("../../../tests/golden/transforms.json");
    let cases: Vec<Case> = serde_json::from_str(text).unwrap();
    assert!(cases.len() > 15);
    for case in cases {
        let Case { column, values, transforms, seed, epoch, record, shape, result } = case;
        let raw = match &values {
            serde_json::Value::String(text) => text.as_bytes().to_vec(),
            values => {
                let numbers: Vec<f64> = serde_json::from_value(values.clone()).unwrap();
                bytes(column.dtype, &numbers)
            }
        };
        let pipeline = Pipeline::new(&column, &transforms).unwrap();
        assert_eq!(pipeline.spec().shape, shape, "{transforms:?}");
        let mut out = vec![0; pipeline.bytes()];
        pipeline.apply(&raw, Draws { epoch: Draws::epoch(seed, epoch), record }, &mut out).unwrap();
        let mut found = Vec::new();
        each_f64(pipeline.spec().dtype, &out, |value| found.push(value));
        assert_eq!(found, result, "{transforms:?} of record {record} in epoch {epoch}");
    }
}

#[derive(Deserialize)]
struct Drawn {
    seed: u64,
    epoch: u64,
    record: u64,
    column: String,
    place: usize,
    #[serde(flatten)]
    what: What,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum What {
    Window { image: (usize, usize), scale: (f64, f64), ratio: (f64, f64), window: [usize; 4] },
    Adjustments { by: [f32; 4], adjustments: Vec<(String, f64)> },
}

#[test]
fn windows_and_adjustments_are_drawn_as_defined() {
    let cases: Vec<Drawn> = serde_json::from_str(include_str!("../../../tests/golden/draws.json")).unwrap();
    assert!(cases.len() > 100);
    for Drawn { seed, epoch, record, column, place, what } in cases {
        let draws = Draws { epoch: Draws::epoch(seed, epoch), record };
        let mut random = draws.of(&format!("{column}/{place}"));
        match what {
            What::Window { image: (height, width), scale, ratio, window } => {
                let mut draw = || random.next_f64();
                let found = pixels::random_resized_window(height, width, scale, ratio, &mut draw);
                let found = [found.top, found.left, found.height, found.width];
                assert_eq!(found, window, "{height} x {width}, {scale:?}, {ratio:?}, record {record}");
            }
            What::Adjustments { by: [brightness, contrast, saturation, hue], adjustments } => {
                let jitter = Transform::ColorJitter { brightness, contrast, saturation, hue };
                let found = image::adjustments(&jitter, &mut random);
                let expected: Vec<_> = adjustments
                    .iter()
                    .map(|(name, factor)| match (name.as_str(), *factor as f32) {
                        ("brightness", factor) => pixels::Adjust::Brightness(factor),
                        ("contrast", factor) => pixels::Adjust::Contrast(factor),
                        ("saturation", factor) => pixels::Adjust::Saturation(factor),
                        (_, turns) => pixels::Adjust::Hue(turns),
                    })
                    .collect();
                assert_eq!(
                    found,
                    expected,
                    "{by:?}, record {record}",
                    by = [brightness, contrast, saturation, hue]
                );
            }
        }
    }
}

/// Rows below a crop are not decoded.
#[test]
fn a_crop_after_decoding_is_that_of_the_whole_image() {
    let jpeg = include_bytes!("../pixels/golden/420.jpg");
    let file = ColumnSpec::ragged("image", ElementType::U8, []);
    let crops = [
        r#"{"op": "random_resized_crop", "size": 9}"#,
        r#"{"op": "random_resized_crop", "size": [5, 7], "scale": [0.05, 0.1]}"#,
        r#"{"op": "center_crop", "size": 10}"#,
        r#"{"op": "center_crop", "size": [999, 3]}"#,
        r#"{"op": "random_crop", "size": 8, "padding": 4}"#,
    ];
    for (crop, record) in crops.into_iter().flat_map(|crop| (0..20).map(move |record| (crop, record))) {
        let transforms: Vec<Transform> =
            serde_json::from_str(&format!(r#"[{{"op": "decode", "channels": 3}}, {crop}]"#)).unwrap();
        let pipeline = Pipeline::new(&file, &transforms).unwrap();
        let draws = Draws { epoch: Draws::epoch(4, 1), record };
        let mut found = vec![0; pipeline.bytes()];
        pipeline.apply(jpeg, draws, &mut found).unwrap();
        let whole = pixels::decode(jpeg, 3).unwrap();
        let cropped = image::apply(&transforms[1], whole, &mut draws.of("image/1"));
        let mut expected = vec![0; found.len()];
        pixels::planar(&cropped, &mut expected);
        assert!(found == expected, "{crop} of record {record}");
    }
}

fn fit(column: &ColumnSpec, transforms: &str) -> Result<ColumnSpec, String> {
    let transforms: Vec<Transform> = serde_json::from_str(transforms).unwrap();
    Pipeline::new(column, &transforms).map(|pipeline| pipeline.spec().clone())
}

#[test]
fn a_list_gives_a_column_its_type_and_shape() {
    let file = || ColumnSpec::ragged("image", ElementType::U8, []);
    let decoded = |rest: &str| fit(&file(), &format!(r#"[{{"op": "decode"}}, {rest}]"#)).unwrap().to_string();
    assert_eq!(decoded(r#"{"op": "resize", "size": [20, 30]}"#), "`image` u8[3, 20, 30]");
    assert_eq!(
        decoded(r#"{"op": "resize", "size": 256}, {"op": "center_crop", "size": 224}, {"op": "normalize"}"#),
        "`image` f32[3, 224, 224]"
    );
    let stored = ColumnSpec::fixed("image", ElementType::U8, [40, 60]);
    let found =
        fit(&stored, r#"[{"op": "resize", "size": 20}, {"op": "color_jitter", "hue": 0.1}]"#).unwrap();
    assert_eq!(found.to_string(), "`image` u8[1, 20, 30]");
}

#[test]
fn lists_that_do_not_fit_say_what_is_missing() {
    let file = || ColumnSpec::ragged("x", ElementType::U8, []);
    let numbers = || ColumnSpec::fixed("x", ElementType::F32, [3]);
    for (column, transforms, expected) in [
        (file(), r#"[{"op": "decode"}]"#, "images of any size cannot lie in one batch; add `resize`"),
        (file(), r#"[{"op": "decode"}, {"op": "resize", "size": 9}]"#, "images of any size"),
        (file(), r#"[{"op": "decode"}, {"op": "normalize"}]"#, "1, `normalize`: the images have any size"),
        (
            file(),
            r#"[{"op": "resize", "size": 9}]"#,
            "0, `resize`: these are the bytes of files; put `decode`",
        ),
        (file(), r#"[{"op": "decode"}, {"op": "decode"}]"#, "1, `decode`: the image is decoded already"),
        (file(), r#"[{"op": "decode"}, {"op": "log"}]"#, "1, `log`: it takes numbers, and this is an image"),
        (numbers(), r#"[{"op": "decode"}]"#, "it takes the bytes of a file, u8[any], and this is `x` f32[3]"),
        (numbers(), r#"[{"op": "vertical_flip"}]"#, "it takes images, u8[height, width]"),
        (
            numbers(),
            r#"[{"op": "pad", "length": 3}]"#,
            "it takes a ragged column, and `x` f32[3] has one length",
        ),
        (
            numbers(),
            r#"[{"op": "one_hot", "classes": 3}]"#,
            "it takes integers, and this is `x` f32[3]; put `cast`",
        ),
        (
            numbers(),
            r#"[{"op": "normalize", "mean": [1, 2]}]"#,
            "mean: 2 numbers, and the last dimension has 3",
        ),
        (numbers(), r#"[{"op": "hash", "buckets": 3}]"#, "it takes integers or a text"),
        (
            file(),
            r#"[{"op": "vocabulary", "values": [1]}]"#,
            "the column has texts, and values has the integer 1",
        ),
    ] {
        let message = fit(&column, transforms).unwrap_err();
        assert!(message.contains(expected), "{expected} missing in {message}");
    }
    let channels =
        r#"[{"op": "decode"}, {"op": "center_crop", "size": 8}, {"op": "normalize", "std": [1, 2]}]"#;
    assert!(fit(&file(), channels).unwrap_err().contains("std: 2 numbers for 3 channels"));
}

#[test]
fn values_that_do_not_fit_are_named() {
    let error = |column: &ColumnSpec, raw: &[u8], transforms: &str| {
        let transforms: Vec<Transform> = serde_json::from_str(transforms).unwrap();
        let pipeline = Pipeline::new(column, &transforms).unwrap();
        pipeline.values(raw, Draws { epoch: 0, record: 0 }).unwrap_err()
    };
    let integers = ColumnSpec::fixed("x", ElementType::I8, [2]);
    let floats = ColumnSpec::fixed("x", ElementType::F32, []);
    let text = ColumnSpec::ragged("x", ElementType::U8, []);
    for (column, raw, transforms, expected) in [
        (&integers, &[1, 5][..], r#"[{"op": "one_hot", "classes": 5}]"#, "5 is no class from 0 to 4"),
        (&integers, &[0xFF, 0], r#"[{"op": "log"}]"#, "-1 + 0 is below 0 and has no logarithm"),
        (&integers, &[9, 1], r#"[{"op": "vocabulary", "values": [1, 2]}]"#, "9 is not in the vocabulary"),
        (&text, b"red", r#"[{"op": "vocabulary", "values": ["blue"]}]"#, "`red` is not in the vocabulary"),
        (
            &floats,
            &2.5f32.to_le_bytes(),
            r#"[{"op": "cast", "dtype": "i32"}]"#,
            "2.5 is no value of type i32",
        ),
        (&text, b"no image", r#"[{"op": "decode"}, {"op": "resize", "size": [2, 2]}]"#, "JPEG"),
    ] {
        let message = error(column, raw, transforms);
        assert!(message.contains(expected), "{expected} missing in {message}");
    }
}

#[test]
fn images_may_come_after_numbers() {
    let values = |column: &ColumnSpec, raw: &[u8], transforms: &str| {
        let transforms: Vec<Transform> = serde_json::from_str(transforms).unwrap();
        Pipeline::new(column, &transforms).unwrap().values(raw, Draws { epoch: 0, record: 0 }).unwrap()
    };
    let stored = ColumnSpec::fixed("x", ElementType::U8, [1, 2]);
    let flipped = r#"[{"op": "clip", "max": 5}, {"op": "horizontal_flip", "p": 1}]"#;
    assert_eq!(values(&stored, &[9, 3], flipped), [3, 5]);
    let file = ColumnSpec::ragged("x", ElementType::U8, []);
    let decoded = r#"[{"op": "clip", "min": 0}, {"op": "decode"}, {"op": "center_crop", "size": 4}]"#;
    let direct = r#"[{"op": "decode"}, {"op": "center_crop", "size": 4}]"#;
    let png = include_bytes!("../pixels/golden/rgb.png");
    assert_eq!(values(&file, png, decoded), values(&file, png, direct));
}

#[test]
fn random_transforms_differ_between_epochs_and_records_alone() {
    let column = ColumnSpec::fixed("image", ElementType::U8, [16, 16, 3]);
    let transforms =
        r#"[{"op": "random_crop", "size": 8}, {"op": "color_jitter", "brightness": 0.4, "hue": 0.1}]"#;
    let transforms: Vec<Transform> = serde_json::from_str(transforms).unwrap();
    let pipeline = Pipeline::new(&column, &transforms).unwrap();
    let raw: Vec<u8> = (0..16 * 16 * 3).map(|at| (at * 31 % 251) as u8).collect();
    let values =
        |epoch, record| pipeline.values(&raw, Draws { epoch: Draws::epoch(5, epoch), record }).unwrap();
    assert_eq!(values(1, 1), values(1, 1));
    assert_ne!(values(1, 1), values(2, 1));
    assert_ne!(values(1, 1), values(1, 2));
}

proptest! {
    /// What is made in place has the bytes of what is made step by step.
    #[test]
    fn both_ways_make_the_same_values(
        raw in proptest::collection::vec(any::<u8>(), 6 * 5 * 3..=6 * 5 * 3),
        epoch in 0u64..3,
        record in 0u64..100,
        normalizes in any::<bool>(),
        offset in 0usize..4,
    ) {
        let column = ColumnSpec::fixed("image", ElementType::U8, [6, 5, 3]);
        let mut transforms = vec![
            Transform::HorizontalFlip { p: 0.5 },
            Transform::RandomCrop { size: proto::spec::transform::Size::Both(4, 3), padding: 1 },
        ];
        if normalizes {
            transforms.push(Transform::Normalize { mean: Numbers::One(0.5), std: Numbers::Each(vec![1.0, 2.0, 3.0]) });
        }
        let pipeline = Pipeline::new(&column, &transforms).unwrap();
        let draws = Draws { epoch: Draws::epoch(9, epoch), record };
        let mut out = vec![0; pipeline.bytes() + offset];
        pipeline.apply(&raw, draws, &mut out[offset..]).unwrap();
        prop_assert_eq!(&out[offset..], pipeline.values(&raw, draws).unwrap());
    }
}
