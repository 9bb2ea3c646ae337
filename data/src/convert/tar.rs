//! Shards of WebDataset: a member for each column of each record, named `RECORD.EXTENSION`. Texts,
//! images and other bytes stay as they are.
//!
//! Nothing in a shard depends on the time or the user: equal records give equal bytes.

use super::npy::header as npy_header;
use super::sink::{Shard, Sink};
use super::whole::Whole;
use super::written::is_bytes;
use crate::column::Column;
use crate::error::Result;

/// Bytes of a header, and unit of a member's data.
const UNIT: usize = 512;

/// Largest size that the digits of a header hold.
const DIGITS_MAX: u64 = 0o777_7777_7777;

/// A shard of a WebDataset.
pub(super) struct Tar {
    file: Whole,
    /// Extension of each column.
    extensions: Vec<String>,
    /// Number of the next record over all shards.
    next: u64,
}

impl Tar {
    pub(super) fn open(shard: &Shard<'_>) -> Result<Self> {
        let extensions = shard.columns.iter().map(|column| column.found.name.clone()).collect();
        Ok(Self { file: shard.file()?, extensions, next: shard.first })
    }

    fn member(&mut self, extension: usize, data: &[&[u8]]) -> Result<()> {
        let name = format!("{:09}.{}", self.next, self.extensions[extension]);
        let bytes: usize = data.iter().map(|part| part.len()).sum();
        self.file.append(&header(&name, bytes as u64))?;
        data.iter().try_for_each(|part| self.file.append(part))?;
        self.file.append(&[0; UNIT][..bytes.next_multiple_of(UNIT) - bytes])
    }
}

impl Sink for Tar {
    fn add(&mut self, columns: &[Column]) -> Result<()> {
        for row in 0..columns.first().map_or(0, Column::records) {
            for (at, column) in columns.iter().enumerate() {
                let (spec, values) = (column.spec(), column.record(row));
                if is_bytes(spec) {
                    self.member(at, &[values])?;
                } else if self.extensions[at].rsplit('.').next() == Some("cls") {
                    let class = bytemuck::pod_read_unaligned::<i64>(values).to_string();
                    self.member(at, &[class.as_bytes()])?;
                } else {
                    let mut shape = spec.shape.clone();
                    if spec.ragged {
                        let one = spec.dtype.size() * shape.iter().product::<usize>();
                        shape.insert(0, values.len() / one.max(1));
                    }
                    self.member(at, &[&npy_header(spec.dtype, &shape), values])?;
                }
            }
            self.next += 1;
        }
        Ok(())
    }

    fn finish(self: Box<Self>) -> Result<Vec<Whole>> {
        let mut file = self.file;
        file.append(&[0; 2 * UNIT])?;
        Ok(vec![file])
    }
}

/// Returns the header of a plain file (POSIX.1-1988, "ustar").
fn header(name: &str, bytes: u64) -> [u8; UNIT] {
    let mut header = [0; UNIT];
    let mut put = |at: usize, text: &[u8]| header[at..at + text.len()].copy_from_slice(text);
    put(0, name.as_bytes());
    put(100, b"0000644\0");
    put(108, b"0000000\0");
    put(116, b"0000000\0");
    if bytes <= DIGITS_MAX {
        put(124, format!("{bytes:011o}\0").as_bytes());
    } else {
        // GNU's form of larger numbers: big-endian, and the first bit set.
        put(124, &[0x80, 0, 0, 0]);
        put(128, &bytes.to_be_bytes());
    }
    put(136, b"00000000000\0");
    put(148, b"        ");
    put(156, b"0");
    put(257, b"ustar\x0000");
    let sum: u32 = header.iter().map(|&byte| u32::from(byte)).sum();
    header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    header
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_has_name_size_and_checksum() {
        let found = header("000000007.jpg", 600);
        assert!(found.starts_with(b"000000007.jpg\0"));
        assert_eq!(&found[124..136], b"00000001130\0");
        let others = found.iter().enumerate().filter(|(at, _)| !(148..156).contains(at));
        let sum: u32 = others.map(|(_, &byte)| u32::from(byte)).sum::<u32>() + 8 * 32;
        assert_eq!(&found[148..156], format!("{sum:06o}\0 ").as_bytes());
        assert_eq!(&header("x", DIGITS_MAX)[124..136], b"77777777777\0");
        assert_eq!(&header("x", DIGITS_MAX + 1)[124..136], [0x80, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0]);
    }
}
