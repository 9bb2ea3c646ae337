//! Bytes in the integers of a register tensor, see
//! [`TensorRole::Register`](crate::tensor::TensorRole).
//!
//! A step makes each integer the larger one of what it was and what the microbatches report. So
//! each integer begins with a stamp, which is larger for a later step, and the bytes of the latest
//! step win:
//!
//! ```text
//! element  0                  1                    2
//!          stamp | length     stamp | 4 bytes      stamp | 4 bytes
//! ```
//!
//! The stamp is the number of the step plus 1. Elements behind the length keep what earlier, longer
//! bytes left there. Nobody reads them. A register of zeros holds no bytes.
//!
//! This is a last-writer-wins register of Shapiro et al., "Conflict-free Replicated Data Types"
//! (SSS 2011).

use crate::error::{Error, Result};
use crate::ids::Step;

/// Most bytes of a register.
pub const BYTES_MAX: usize = 16 << 20;

/// Returns the number of elements for so many bytes.
///
/// ```
/// assert_eq!(proto::register::elements(5), 3);
/// ```
pub const fn elements(bytes: usize) -> usize {
    1 + bytes.div_ceil(4)
}

/// Checks that a register takes these bytes in this step.
///
/// # Errors
/// The bytes do not fit, or the step is too late for a stamp.
pub fn check(elements: usize, step: Step, bytes: &[u8]) -> Result<()> {
    let error = |field, expected, found| Error::Field { message: "register", field, expected, found };
    let room = 4 * elements.saturating_sub(1);
    if bytes.len() > room {
        return Err(error("bytes", format!("at most {room}"), bytes.len().to_string()));
    }
    match i32::try_from(step.get()) {
        Ok(step) if step < i32::MAX => Ok(()),
        _ => Err(error("step", format!("below {}", i32::MAX), step.to_string())),
    }
}

/// Replaces the bytes of a register in a step.
///
/// # Errors
/// Those of [`check`]. Then nothing is written.
pub fn write(register: &mut [i64], step: Step, bytes: &[u8]) -> Result<()> {
    check(register.len(), step, bytes)?;
    let stamp = (step.get() as i64 + 1) << 32;
    let word = |bytes: &[u8]| {
        let mut word = [0; 4];
        word[..bytes.len()].copy_from_slice(bytes);
        stamp | i64::from(u32::from_le_bytes(word))
    };
    let length = (bytes.len() as u32).to_le_bytes();
    let words = std::iter::once(&length[..]).chain(bytes.chunks(4)).map(word);
    register.iter_mut().zip(words).for_each(|(element, word)| *element = word);
    Ok(())
}

/// Returns the bytes of a register.
pub fn read(register: &[i64]) -> Vec<u8> {
    let Some((&first, words)) = register.split_first() else { return Vec::new() };
    let length = first as u32 as usize;
    let mut bytes: Vec<u8> = Vec::with_capacity(length.min(4 * words.len()));
    bytes.extend(words.iter().take(length.div_ceil(4)).flat_map(|&word| (word as u32).to_le_bytes()));
    bytes.truncate(length);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the register after a step that one microbatch writes in and another one does not.
    fn after(before: &[i64], step: u64, bytes: &[u8]) -> Vec<i64> {
        let mut written = vec![0; before.len()];
        write(&mut written, Step(step), bytes).unwrap();
        before.iter().zip(&written).map(|(before, written)| *before.max(written)).collect()
    }

    #[test]
    fn the_bytes_of_the_latest_step_win_whatever_their_size_and_order() {
        let empty = vec![0; elements(9)];
        assert!(read(&empty).is_empty());
        let long = after(&empty, 3, b"\xff\xff\xff\xff\xff\xff\xff\xff\xff");
        assert_eq!(read(&long), [0xff; 9]);
        let short = after(&long, 4, b"ab");
        assert_eq!(read(&short), b"ab");
        assert_eq!(read(&after(&short, 5, b"")), b"");
        assert_eq!(read(&after(&short, 2, b"earlier")), b"ab");
        assert_eq!(read(&after(&short, 5, b"\0\0\0\0\0")), [0; 5]);
    }

    #[test]
    fn what_does_not_fit_changes_nothing() {
        let mut register = vec![0; elements(4)];
        write(&mut register, Step(0), b"abcd").unwrap();
        let before = register.clone();
        let error = write(&mut register, Step(1), b"abcde").unwrap_err().to_string();
        assert_eq!(error, "register.bytes: expected at most 4, found 5");
        let error = write(&mut register, Step(i32::MAX as u64), b"").unwrap_err().to_string();
        assert!(error.starts_with("register.step: expected below 2147483647"), "{error}");
        assert_eq!(register, before);
        write(&mut register, Step(i32::MAX as u64 - 1), b"end").unwrap();
        assert_eq!(read(&register), b"end");
    }

    #[test]
    fn a_length_beyond_the_register_reads_what_is_there() {
        assert_eq!(read(&[(1 << 32) | 0xffff_ffff, 0x6463_6261]), b"abcd");
        assert!(read(&[]).is_empty());
    }
}
