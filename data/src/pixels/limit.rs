//! The size of images that are decoded.

/// Largest number of pixels of an image: 67 million.
pub(super) const PIXELS_MAX: usize = 1 << 26;

/// Refuses images with too many pixels, or none.
pub(super) fn check_size(height: usize, width: usize) -> Result<(), String> {
    if height == 0 || width == 0 {
        return Err(format!("the image is empty: {width} x {height} pixels"));
    }
    if height.saturating_mul(width) > PIXELS_MAX {
        return Err(format!("{width} x {height} pixels are more than {PIXELS_MAX}; make the image smaller"));
    }
    Ok(())
}
