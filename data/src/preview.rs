//! What a person sees of a record: its image, made small, or its text.
//!
//! A preview depends on the record's bytes alone, so it is the same on every machine.

use proto::column::{ColumnSpec, ElementType};
use proto::worst::{PREVIEW_BYTES_MAX, PREVIEW_CHARACTERS_MAX, Preview};

use crate::column::Column;
use crate::pixels::{self, Image, Window};

/// Longer side of a preview's image in pixels: the first one whose file is small enough. Without
/// any compression a file of the last one is.
const SIDES: [usize; 2] = [128, 64];

/// Returns whether a column may have something to see.
pub(crate) fn is_visible(spec: &ColumnSpec) -> bool {
    raw(spec).is_some() || is_bytes(spec)
}

/// Adds what there is to see of a record's value in a column. The first image counts, and the first
/// text.
pub(crate) fn add(preview: &mut Preview, column: &Column, row: usize) {
    if column.fault(row).is_some() {
        return;
    }
    let bytes = column.record(row);
    if raw(column.spec()).is_some() || pixels::Encoding::of(bytes).is_some() {
        if preview.png.is_empty()
            && let Ok(image) = decoded(column, row)
        {
            preview.png = small(&image).into();
        }
    } else if preview.text.is_empty()
        && let Some(text) = text(bytes)
    {
        preview.text = text.chars().take(PREVIEW_CHARACTERS_MAX).collect();
    }
}

/// Returns the image as a PNG file of at most [`PREVIEW_BYTES_MAX`]. A small image keeps its size.
fn small(image: &Image) -> Vec<u8> {
    let files = SIDES.into_iter().map(|side| match image.height.max(image.width) > side {
        true => png(&fitted(image, side)),
        false => png(image),
    });
    files.flatten().find(|file| file.len() <= PREVIEW_BYTES_MAX).unwrap_or_default()
}

/// Returns whether a column may hold the bytes of files, or texts.
pub(crate) fn is_bytes(spec: &ColumnSpec) -> bool {
    spec.ragged && spec.dtype == ElementType::U8 && spec.shape.is_empty()
}

/// Returns the text that these bytes are. `None`: they are no text.
pub(crate) fn text(bytes: &[u8]) -> Option<&str> {
    let text = std::str::from_utf8(bytes).ok()?;
    (!text.chars().any(|c| c.is_control() && !c.is_whitespace())).then_some(text)
}

/// Returns height, width and channels of a column of pixels.
pub(crate) fn raw(spec: &ColumnSpec) -> Option<(usize, usize, usize)> {
    if spec.ragged || spec.dtype != ElementType::U8 {
        return None;
    }
    match spec.shape[..] {
        [height, width] => Some((height, width, 1)),
        [height, width, channels @ (1 | 3)] => Some((height, width, channels)),
        _ => None,
    }
}

/// Returns the image of a record with three channels.
pub(crate) fn decoded(column: &Column, row: usize) -> std::result::Result<Image, String> {
    let bytes = column.record(row);
    match raw(column.spec()) {
        Some((height, width, channels)) => {
            Ok(pixels::rgb(Image { height, width, channels, values: bytes.to_vec() }))
        }
        None => pixels::decode(bytes, 3),
    }
}

/// Returns the image with `side` pixels as its longer side.
pub(crate) fn fitted(image: &Image, side: usize) -> Image {
    let longer = image.height.max(image.width);
    let scaled = |length: usize| ((length * side + longer / 2) / longer).clamp(1, side);
    let whole = Window { top: 0, left: 0, height: image.height, width: image.width };
    pixels::resized(image, whole, scaled(image.height), scaled(image.width))
}

/// Encodes an image of three channels.
pub(crate) fn png(image: &Image) -> std::result::Result<Vec<u8>, png::EncodingError> {
    let mut bytes = Vec::new();
    let mut encoder = png::Encoder::new(&mut bytes, image.width as u32, image.height as u32);
    encoder.set_color(png::ColorType::Rgb);
    encoder.set_depth(png::BitDepth::Eight);
    let mut writer = encoder.write_header()?;
    writer.write_image_data(&image.values)?;
    writer.finish()?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of_pixels(shape: [usize; 3], values: &[u8]) -> Preview {
        let mut column = Column::with_capacity(ColumnSpec::fixed("x", ElementType::U8, shape), 1);
        column.push(values);
        let mut preview = Preview::default();
        add(&mut preview, &column, 0);
        preview
    }

    fn of_bytes(values: &[&[u8]]) -> Preview {
        let mut column = Column::with_capacity(ColumnSpec::ragged("x", ElementType::U8, []), values.len());
        values.iter().for_each(|value| column.push(value));
        let mut preview = Preview::default();
        (0..values.len()).for_each(|row| add(&mut preview, &column, row));
        preview
    }

    /// Returns bytes that do not compress.
    fn noise(count: usize) -> Vec<u8> {
        (0..count as u64).map(|at| proto::random::key(1, "noise", at) as u8).collect()
    }

    fn size(preview: &Preview) -> (usize, usize) {
        pixels::size(&preview.png).unwrap()
    }

    #[test]
    fn a_small_image_keeps_its_pixels_and_a_large_one_becomes_small() {
        let few = of_pixels([2, 3, 1], &[1, 2, 3, 4, 5, 6]);
        let grey = pixels::decode(&few.png, 3).unwrap();
        assert_eq!((grey.height, grey.width), (2, 3));
        assert_eq!(grey.values, [1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4, 5, 5, 5, 6, 6, 6]);
        assert_eq!(size(&of_pixels([256, 64, 3], &[200; 256 * 64 * 3])), (128, 32));
        assert_eq!(size(&of_pixels([128, 128, 3], &[200; 128 * 128 * 3])), (128, 128));
    }

    #[test]
    fn an_image_that_does_not_compress_becomes_smaller() {
        for side in [65, 128, 500] {
            let found = of_pixels([side, side, 3], &noise(side * side * 3));
            let kept = if side == 65 { 65 } else { 64 };
            assert_eq!(size(&found), (kept, kept), "{side}");
            assert!(found.png.len() <= PREVIEW_BYTES_MAX, "{}", found.png.len());
        }
    }

    #[test]
    fn bytes_are_an_image_a_text_or_nothing_to_see() {
        let jpeg: &[u8] = include_bytes!("pixels/golden/420.jpg");
        let found = of_bytes(&[b"\x00\x01", &jpeg[..jpeg.len() / 2], "é\nb".as_bytes(), jpeg, b"later"]);
        assert_eq!(found.text, "é\nb");
        let whole = pixels::decode(jpeg, 3).unwrap();
        assert_eq!(pixels::decode(&found.png, 3).unwrap(), whole, "the golden image is small");
        assert_eq!(of_bytes(&[b"\xFF", b"", b"a\x07"]), Preview::default());
        let long = of_bytes(&["é".repeat(1001).as_bytes()]);
        assert_eq!(long.text.chars().count(), PREVIEW_CHARACTERS_MAX);
    }

    #[test]
    fn columns_of_numbers_show_nothing() {
        let floats = ColumnSpec::fixed("x", ElementType::F32, [28, 28]);
        let bytes = ColumnSpec::fixed("x", ElementType::U8, [784]);
        assert!(!is_visible(&floats) && !is_visible(&bytes));
        assert!(is_visible(&ColumnSpec::fixed("x", ElementType::U8, [28, 28])));
        assert!(is_visible(&ColumnSpec::ragged("x", ElementType::U8, [])));
    }
}
