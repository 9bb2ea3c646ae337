//! JPEG, by libjpeg-turbo's decoder (the crate `mozjpeg`).
//!
//! Pillow and torchvision decode with the same library, so the pixels are theirs. They do not
//! depend on the processor: the vector instructions of libjpeg-turbo compute what its C code
//! computes. A build has them if the program `nasm` is there.

use std::any::Any;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};

use mozjpeg::{ColorSpace, Decompress};

use super::Image;
use super::limit::check_size;

/// Decodes a JPEG to one channel if it is grey, otherwise to three. `rows` gets height and width,
/// and returns how many rows from the top are wanted. The others may be black.
///
/// # Errors
/// The file is cut off or damaged in these rows, or the image is too large.
pub(super) fn decode(bytes: &[u8], rows: impl FnOnce(usize, usize) -> usize) -> Result<Image, String> {
    let decoded = catch_unwind(AssertUnwindSafe(|| read(bytes, rows)));
    decoded.unwrap_or_else(|panic| Err(damaged(&text(&*panic))))
}

/// Returns height and width from the header of a JPEG.
///
/// # Errors
/// The header is damaged.
pub(super) fn size(bytes: &[u8]) -> Result<(usize, usize), String> {
    let read = || {
        let decoder = Decompress::new_mem(bytes).map_err(|error| damaged(&error.to_string()))?;
        let (width, height) = decoder.size();
        Ok((height, width))
    };
    catch_unwind(AssertUnwindSafe(read)).unwrap_or_else(|panic| Err(damaged(&text(&*panic))))
}

fn read(bytes: &[u8], rows: impl FnOnce(usize, usize) -> usize) -> Result<Image, String> {
    let failed = |error: io::Error| damaged(&error.to_string());
    let decoder = Decompress::new_mem(bytes).map_err(failed)?;
    let (width, height) = decoder.size();
    check_size(height, width)?;
    if !is_whole(bytes) {
        return Err("the JPEG ends within its data; copy it again".to_owned());
    }
    let (channels, space) = match decoder.color_space() {
        ColorSpace::JCS_GRAYSCALE => (1, ColorSpace::JCS_GRAYSCALE),
        ColorSpace::JCS_CMYK | ColorSpace::JCS_YCCK => (4, ColorSpace::JCS_CMYK),
        _ => (3, ColorSpace::JCS_RGB),
    };
    let mut decoder = decoder.to_colorspace(space).map_err(failed)?;
    let mut values = vec![0; height * width * channels];
    let wanted = rows(height, width).min(height) * width * channels;
    decoder.read_scanlines_into(&mut values[..wanted]).map_err(failed)?;
    if channels == 4 {
        values = values.as_chunks().0.iter().flat_map(inked).collect();
    }
    Ok(Image { height, width, channels: channels.min(3), values })
}

fn damaged(what: &str) -> String {
    format!("the JPEG is damaged: {}", what.trim_start_matches("libjpeg fatal error: "))
}

/// Returns the text of a panic, by which the library reports what it cannot decode.
fn text(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("unknown").to_owned()
}

/// Returns whether the end of the image follows its last scan. The library fills up what is
/// missing with grey.
fn is_whole(bytes: &[u8]) -> bool {
    let mut pairs = bytes.windows(2).rev();
    // Within a scan no byte 0xFF is followed by one of these.
    pairs.find_map(|pair| match pair {
        [0xFF, 0xD9] => Some(true),
        [0xFF, 0xDA] => Some(false),
        _ => None,
    }) == Some(true)
}

/// Returns red, green and blue of four inks as Pillow rounds them. A file has them inverted: 255 is
/// no ink.
fn inked(&[cyan, magenta, yellow, black]: &[u8; 4]) -> [u8; 3] {
    [cyan, magenta, yellow].map(|ink| {
        let product = u32::from(255 - ink) * u32::from(black) + 128;
        black - (((product >> 8) + product) >> 8) as u8
    })
}
