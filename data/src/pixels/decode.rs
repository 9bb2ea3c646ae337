//! Images from the bytes of a file: JPEG, PNG and WebP.
//!
//! The pixels are those of Pillow's `Image.open(..).convert("RGB")` and `.convert("L")`. An alpha
//! channel is dropped, and the orientation of EXIF is ignored. An animation gives its first
//! picture.

use std::io::Cursor;

use super::limit::{PIXELS_MAX, check_size};
use super::{Image, jpeg};
use crate::guarded::guarded;

/// Most bytes of memory that a decoder may take beside the pixels.
const DECODER_BYTES_MAX: usize = 8 * PIXELS_MAX;

/// Encoding of an image in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Encoding {
    Jpeg,
    Png,
    WebP,
}

impl Encoding {
    /// Returns the encoding that the first bytes of a file show, if they are those of an image.
    pub(crate) const fn of(bytes: &[u8]) -> Option<Self> {
        match bytes {
            [0xff, 0xd8, 0xff, ..] => Some(Self::Jpeg),
            [0x89, b'P', b'N', b'G', ..] => Some(Self::Png),
            [b'R', b'I', b'F', b'F', _, _, _, _, b'W', b'E', b'B', b'P', ..] => Some(Self::WebP),
            _ => None,
        }
    }

    /// Returns the usual ending of a file's name.
    pub(crate) const fn ending(self) -> &'static str {
        match self {
            Self::Jpeg => "jpg",
            Self::Png => "png",
            Self::WebP => "webp",
        }
    }
}

/// Returns the encoding of a file with an image.
///
/// # Errors
/// The bytes are no JPEG, PNG or WebP.
fn encoding(bytes: &[u8]) -> Result<Encoding, String> {
    Encoding::of(bytes).ok_or_else(|| match bytes {
        [] => "the image has no bytes".to_owned(),
        _ => format!("no JPEG, PNG or WebP: the first bytes are {:02x?}", &bytes[..bytes.len().min(8)]),
    })
}

/// Decodes a file with an image. `channels` is 1 (grey) or 3 (red, green, blue).
///
/// # Errors
/// The bytes are no JPEG, PNG or WebP, are damaged, or the image has more than 2^26 pixels.
pub(crate) fn decode(bytes: &[u8], channels: usize) -> Result<Image, String> {
    decode_rows(bytes, channels, |height, _| height)
}

/// Decodes the top rows of an image. `rows` gets height and width, and returns how many rows are
/// wanted. The image has its whole height, and other rows may be black.
///
/// # Errors
/// Those of [`decode`], except that damage below these rows may stay unnoticed.
pub(crate) fn decode_rows(
    bytes: &[u8],
    channels: usize,
    rows: impl FnOnce(usize, usize) -> usize,
) -> Result<Image, String> {
    let image = match encoding(bytes)? {
        Encoding::Jpeg => jpeg::decode(bytes, rows)?,
        Encoding::Png => guarded(|| png(bytes)).map_err(|error| format!("the PNG is damaged: {error}"))?,
        Encoding::WebP => guarded(|| webp(bytes)).map_err(|error| format!("the WebP is damaged: {error}"))?,
    };
    Ok(if channels == 1 { grey(image) } else { rgb(image) })
}

/// Returns height and width of an image from the header of its file.
///
/// # Errors
/// The bytes are no JPEG, PNG or WebP, or the header is damaged.
pub(crate) fn size(bytes: &[u8]) -> Result<(usize, usize), String> {
    match encoding(bytes)? {
        Encoding::Jpeg => jpeg::size(bytes),
        Encoding::Png => guarded(|| {
            let limits = png::Limits { bytes: DECODER_BYTES_MAX };
            let mut decoder = png::Decoder::new_with_limits(Cursor::new(bytes), limits);
            decoder.read_header_info().map(|info| (info.height as usize, info.width as usize))
        })
        .map_err(|error| format!("the PNG is damaged: {error}")),
        Encoding::WebP => guarded(|| {
            let decoder = image_webp::WebPDecoder::new(Cursor::new(bytes))?;
            let (width, height) = decoder.dimensions();
            Ok::<_, image_webp::DecodingError>((height as usize, width as usize))
        })
        .map_err(|error| format!("the WebP is damaged: {error}")),
    }
}

fn png(bytes: &[u8]) -> Result<Image, String> {
    let limits = png::Limits { bytes: DECODER_BYTES_MAX };
    let mut decoder = png::Decoder::new_with_limits(Cursor::new(bytes), limits);
    decoder.set_transformations(png::Transformations::EXPAND | png::Transformations::STRIP_16);
    decoder.set_ignore_text_chunk(true);
    decoder.set_ignore_iccp_chunk(true);
    let mut reader = decoder.read_info().map_err(|error| error.to_string())?;
    let (height, width) = (reader.info().height as usize, reader.info().width as usize);
    check_size(height, width)?;
    let size = reader.output_buffer_size().ok_or("it is too large")?;
    let mut values = vec![0; size];
    let frame = reader.next_frame(&mut values).map_err(|error| error.to_string())?;
    values.truncate(frame.buffer_size());
    Ok(opaque(height, width, frame.color_type.samples(), values))
}

fn webp(bytes: &[u8]) -> Result<Image, String> {
    let mut decoder = image_webp::WebPDecoder::new(Cursor::new(bytes)).map_err(|error| error.to_string())?;
    decoder.set_memory_limit(DECODER_BYTES_MAX);
    let (width, height) = decoder.dimensions();
    let (height, width) = (height as usize, width as usize);
    check_size(height, width)?;
    let channels = if decoder.has_alpha() { 4 } else { 3 };
    let mut values = vec![0; height * width * channels];
    decoder.read_image(&mut values).map_err(|error| error.to_string())?;
    Ok(opaque(height, width, channels, values))
}

/// Drops the alpha channel of an image that has one.
fn opaque(height: usize, width: usize, channels: usize, values: Vec<u8>) -> Image {
    let (channels, values) = match channels {
        2 => (1, values.as_chunks::<2>().0.iter().map(|&[grey, _]| grey).collect()),
        4 => (3, values.as_chunks::<4>().0.iter().flat_map(|&[r, g, b, _]| [r, g, b]).collect()),
        _ => (channels, values),
    };
    Image { height, width, channels, values }
}

/// Returns the image with one channel.
fn grey(image: Image) -> Image {
    if image.channels == 1 {
        return image;
    }
    // Weights and rounding of Pillow: ITU-R 601-2, in 16 bits.
    let grey = |&[r, g, b]: &[u8; 3]| {
        ((u32::from(r) * 19595 + u32::from(g) * 38470 + u32::from(b) * 7471 + 0x8000) >> 16) as u8
    };
    let values = image.values.as_chunks::<3>().0.iter().map(grey).collect();
    Image { channels: 1, values, ..image }
}

/// Returns the image with three channels.
pub(crate) fn rgb(image: Image) -> Image {
    if image.channels == 3 {
        return image;
    }
    let values = image.values.iter().flat_map(|&grey| [grey; 3]).collect();
    Image { channels: 3, values, ..image }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const FILES: [&[u8]; 9] = [
        include_bytes!("golden/420.jpg"),
        include_bytes!("golden/progressive.jpg"),
        include_bytes!("golden/restart.jpg"),
        include_bytes!("golden/cmyk.jpg"),
        include_bytes!("golden/grey.jpg"),
        include_bytes!("golden/rgba.png"),
        include_bytes!("golden/palette.png"),
        include_bytes!("golden/lossy.webp"),
        include_bytes!("golden/lossless.webp"),
    ];

    #[test]
    fn an_error_says_what_was_found() {
        assert_eq!(decode(b"", 3).unwrap_err(), "the image has no bytes");
        assert_eq!(
            decode(b"GIF89a", 3).unwrap_err(),
            "no JPEG, PNG or WebP: the first bytes are [47, 49, 46, 38, 39, 61]"
        );
        assert_eq!(decode(&FILES[0][..900], 3).unwrap_err(), "the JPEG ends within its data; copy it again");
        assert!(decode(&FILES[5][..900], 3).unwrap_err().starts_with("the PNG is damaged: "));
        assert!(decode(&FILES[7][..300], 3).unwrap_err().starts_with("the WebP is damaged: "));
    }

    #[test]
    fn the_size_in_the_header_is_that_of_the_pixels() {
        for file in FILES {
            let image = decode(file, 3).unwrap();
            assert_eq!(size(file), Ok((image.height, image.width)));
        }
        assert!(size(b"GIF89a").unwrap_err().contains("no JPEG, PNG or WebP"));
        for file in FILES {
            assert!(size(&file[..16]).is_err(), "{:?}", Encoding::of(file));
        }
    }

    #[test]
    fn the_wanted_rows_are_those_of_the_whole_image() {
        for (file, channels) in FILES.into_iter().flat_map(|file| [(file, 1), (file, 3)]) {
            let whole = decode(file, channels).unwrap();
            for rows in [0, 1, 7, 8, 15, 16, 17, whole.height - 1, whole.height, whole.height + 9] {
                let part = decode_rows(file, channels, |height, width| {
                    assert_eq!((height, width), (whole.height, whole.width));
                    rows
                });
                let part = part.unwrap();
                assert_eq!((part.height, part.width), (whole.height, whole.width));
                let wanted = rows.min(whole.height) * whole.row();
                assert_eq!(part.values[..wanted], whole.values[..wanted], "{rows} rows");
                assert_eq!(part.values.len(), whole.values.len());
            }
        }
    }

    #[test]
    fn a_jpeg_that_is_cut_off_is_refused_whatever_rows_are_wanted() {
        for length in [900, FILES[0].len() - 2] {
            let error = decode_rows(&FILES[0][..length], 3, |_, _| 1).unwrap_err();
            assert_eq!(error, "the JPEG ends within its data; copy it again");
        }
    }

    #[test]
    fn a_large_image_is_refused_before_memory_is_taken() {
        let mut jpeg = FILES[0].to_vec();
        let frame = jpeg.windows(2).position(|pair| pair == [0xff, 0xc0]).unwrap();
        jpeg[frame + 5..frame + 9].fill(0x80);
        let error = decode(&jpeg, 3).unwrap_err();
        assert_eq!(error, "32896 x 32896 pixels are more than 67108864; make the image smaller");
    }

    #[test]
    fn a_channel_of_16_bits_keeps_its_high_byte() {
        let mut bytes = Vec::new();
        let mut encoder = png::Encoder::new(&mut bytes, 2, 1);
        encoder.set_color(png::ColorType::Grayscale);
        encoder.set_depth(png::BitDepth::Sixteen);
        encoder.write_header().unwrap().write_image_data(&[0x12, 0xff, 0xab, 0x00]).unwrap();
        assert_eq!(decode(&bytes, 1).unwrap().values, [0x12, 0xab]);
    }

    proptest! {
        #[test]
        fn damaged_images_never_panic(
            file in 0..FILES.len(),
            damages in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
            length in proptest::option::of(any::<prop::sample::Index>()),
        ) {
            let mut bytes = FILES[file].to_vec();
            for (place, value) in damages {
                let place = place.index(bytes.len());
                bytes[place] = value;
            }
            if let Some(length) = length {
                bytes.truncate(length.index(bytes.len()));
            }
            let _ = size(&bytes);
            for channels in [1, 3] {
                if let Ok(image) = decode(&bytes, channels) {
                    prop_assert_eq!(image.values.len(), image.height * image.width * channels);
                }
            }
        }
    }
}
