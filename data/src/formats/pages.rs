//! The sizes that a page of Parquet announces.
//!
//! A decoder takes as much memory as the header of a page says before it reads the page. So all
//! headers are read here first. It is a struct in the compact protocol of Thrift:
//!
//! ```text
//! field = number behind the last one, 4 bits | type, 4 bits | value        0 ends a struct
//! ```
//!
//! The decoder trusts the numbers of known fields and not their types, and takes the last one of
//! equal fields. So known fields must have their types, and numbers must ascend.

/// How many times as large as its compressed bytes a page can be. A block of Zstandard, the densest
/// of all, makes 128 KiB of 4 bytes.
const RATIO_MAX: u64 = 1 << 16;

/// Most structs within each other in a header.
const DEPTH_MAX: usize = 16;

/// Types of values.
const TRUE: u8 = 1;
const FALSE: u8 = 2;
const I32: u8 = 5;
const STRUCT: u8 = 12;

/// Structs whose fields the decoder knows.
#[derive(Clone, Copy, Debug)]
enum Known {
    Page,
    Data,
    DataV2,
    Dictionary,
    /// No other field has a meaning.
    Nothing,
}

impl Known {
    /// Returns whether a field may have this type, and what is in it if it is a struct.
    const fn field(self, number: i64, kind: u8) -> (bool, Self) {
        let (expected, inside) = match (self, number) {
            (Self::Page, 1..=4) | (Self::Data, 1..=4) => (I32, Self::Nothing),
            (Self::DataV2, 1..=6) | (Self::Dictionary, 1..=2) => (I32, Self::Nothing),
            (Self::Page, 5) => (STRUCT, Self::Data),
            (Self::Page, 7) => (STRUCT, Self::Dictionary),
            (Self::Page, 8) => (STRUCT, Self::DataV2),
            (Self::Page, 6) | (Self::Data, 5) | (Self::DataV2, 8) => (STRUCT, Self::Nothing),
            (Self::DataV2, 7) | (Self::Dictionary, 3) => {
                return (kind == TRUE || kind == FALSE, Self::Nothing);
            }
            _ => return (true, Self::Nothing),
        };
        (kind == expected, inside)
    }
}

/// Checks the pages of a column of a row group before a decoder takes memory for them.
///
/// # Errors
/// A page has more than `bytes_max` bytes, or more than its compressed bytes can make, or its
/// header is malformed.
pub(super) fn check(mut pages: &[u8], bytes_max: u64) -> Result<(), String> {
    while !pages.is_empty() {
        let Some((bytes, packed)) = sizes(&mut pages) else {
            return Err("the header of a page is damaged; copy the file again".to_owned());
        };
        check_sizes(bytes, packed, bytes_max)?;
        // A decoder refuses a page that ends behind its column.
        pages = usize::try_from(packed).ok().and_then(|packed| pages.get(packed..)).unwrap_or_default();
    }
    Ok(())
}

fn check_sizes(bytes: u64, packed: u64, bytes_max: u64) -> Result<(), String> {
    if bytes > packed.saturating_mul(RATIO_MAX) {
        return Err(format!(
            "the header of a page announces {bytes} bytes, which {packed} bytes cannot make; copy the file again"
        ));
    }
    if bytes > bytes_max {
        return Err(format!(
            "a page has {bytes} bytes without compression, more than the {bytes_max} of data_memory; raise it, or write \
             the file with smaller pages"
        ));
    }
    Ok(())
}

/// Reads the header of a page. Returns the bytes of the page, without compression and with it.
/// `None`: the header is malformed.
fn sizes(bytes: &mut &[u8]) -> Option<(u64, u64)> {
    let mut found = [None; 2];
    fields(bytes, Known::Page, DEPTH_MAX, &mut |number, value| match number {
        2 => found[0] = Some(value),
        3 => found[1] = Some(value),
        _ => {}
    })?;
    let size = |value: Option<i32>| u64::try_from(value?).ok();
    Some((size(found[0])?, size(found[1])?))
}

/// Reads the fields of a struct, and calls `take` with each `i32` of a page.
fn fields(bytes: &mut &[u8], known: Known, depth: usize, take: &mut dyn FnMut(i64, i32)) -> Option<()> {
    let mut last = 0;
    loop {
        let head = byte(bytes)?;
        let kind = head & 15;
        if kind == 0 {
            return Some(());
        }
        let number = match head >> 4 {
            0 => signed(bytes)?,
            delta => last + i64::from(delta),
        };
        let (fits, inside) = known.field(number, kind);
        if !fits || number <= last || number > i64::from(i16::MAX) {
            return None;
        }
        last = number;
        match (known, kind) {
            (Known::Page, I32) => take(number, signed(bytes)? as i32),
            (_, STRUCT) => fields(bytes, inside, depth.checked_sub(1)?, &mut |_, _| {})?,
            (_, TRUE | FALSE) => {}
            _ => skip(bytes, kind)?,
        }
    }
}

/// Passes over a number or a text. No writer has lists, sets or maps in the header of a page.
fn skip(bytes: &mut &[u8], kind: u8) -> Option<()> {
    match kind {
        3 => byte(bytes).map(drop),
        4..=6 => unsigned(bytes).map(drop),
        7 => pass(bytes, 8),
        8 => {
            let length = unsigned(bytes)?;
            pass(bytes, length)
        }
        _ => None,
    }
}

fn pass(bytes: &mut &[u8], count: u64) -> Option<()> {
    *bytes = bytes.get(usize::try_from(count).ok()?..)?;
    Some(())
}

fn byte(bytes: &mut &[u8]) -> Option<u8> {
    let (&first, rest) = bytes.split_first()?;
    *bytes = rest;
    Some(first)
}

/// Reads a number of 7 bits a byte, the lowest ones first.
fn unsigned(bytes: &mut &[u8]) -> Option<u64> {
    let mut value = 0;
    for shift in (0..63).step_by(7) {
        let next = byte(bytes)?;
        value |= u64::from(next & 127) << shift;
        if next < 128 {
            return Some(value);
        }
    }
    None
}

/// Reads a number whose lowest bit is its sign.
fn signed(bytes: &mut &[u8]) -> Option<i64> {
    let value = unsigned(bytes)?;
    Some((value >> 1) as i64 ^ -((value & 1) as i64))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The header of a data page of 300 bytes, 200 with compression, with 9 values.
    const HEADER: [u8; 18] =
        [0x15, 0, 0x15, 0xD8, 4, 0x15, 0x90, 3, 0x2C, 0x15, 18, 0x15, 0, 0x15, 6, 0x15, 6, 0];

    fn header(end: &[u8]) -> Vec<u8> {
        [&HEADER[..], end].concat()
    }

    fn sizes(mut header: &[u8]) -> Option<(u64, u64)> {
        super::sizes(&mut header)
    }

    #[test]
    fn each_header_has_the_sizes_of_its_page() {
        assert_eq!(sizes(&header(&[0, 7, 7])), Some((300, 200)));
        for end in 0..HEADER.len() + 1 {
            assert_eq!(sizes(&header(&[0])[..end]), None, "{end} bytes");
        }
        let page = [&header(&[0])[..], &[9; 200]].concat();
        let two = [&page[..], &page].concat();
        assert_eq!(check(&two, 300), Ok(()));
        let said = check(&two, 299).unwrap_err();
        assert!(said.contains("a page has 300 bytes without compression, more than the 299 of data_memory"));
        let said = check(&[&page[..], &[9; 9]].concat(), 300).unwrap_err();
        assert!(said.contains("the header of a page is damaged"), "{said}");
    }

    #[test]
    fn a_page_that_its_bytes_cannot_make_is_refused() {
        // 2 GiB less a byte, of 200.
        let huge = [&[0x15, 0, 0x15, 0xFE, 0xFF, 0xFF, 0xFF, 0x0F][..], &HEADER[5..], &[0]].concat();
        assert_eq!(sizes(&huge), Some((i32::MAX as u64, 200)));
        let page = [&header(&[0])[..], &[9; 200], &huge].concat();
        let said = check(&page, u64::MAX).unwrap_err();
        assert!(said.contains("announces 2147483647 bytes, which 200 bytes cannot make"), "{said}");
    }

    #[test]
    fn a_header_that_a_decoder_may_read_in_another_way_is_refused() {
        // The second field again, behind the fifth.
        assert_eq!(sizes(&header(&[5, 4, 2, 0])), None);
        // A size as another type, or below zero.
        assert_eq!(sizes(&[0x15, 0, 0x18, 1, 9, 0x15, 2, 0]), None);
        assert_eq!(sizes(&[0x15, 0, 0x15, 1, 0x15, 2, 0]), None);
        // A count of values as a text.
        assert_eq!(sizes(&[0x15, 0, 0x15, 2, 0x15, 2, 0x2C, 0x18, 1, 9, 0, 0]), None);
        // Unknown fields are passed over.
        assert_eq!(sizes(&header(&[0x98, 2, 1, 1, 0x17, 0, 0, 0, 0, 0, 0, 0, 0, 0])), Some((300, 200)));
    }
}
