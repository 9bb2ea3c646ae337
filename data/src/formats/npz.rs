//! Archives of NumPy arrays (`numpy.savez`, `numpy.savez_compressed`): each array is a column, and
//! its first dimension counts the records.
//!
//! An archive is a ZIP file (PKWARE, "APPNOTE.TXT - .ZIP File Format Specification", 4.3):
//!
//! ```text
//! (local header | member)..  (entry of a member)..  [ZIP64 end | its locator]  end
//!                            directory
//! ```
//!
//! Stored members stay in the file. Deflated members are unpacked when the file is opened. Members
//! without the ending `.npy` are no arrays.

use std::io::Read;
use std::ops::Range;

use bytes::Bytes;
use flate2::Crc;
use flate2::read::DeflateDecoder;

use super::array::{self, Values};
use super::npy;
use crate::error::{Flaw, Result, malformed, wrong};
use crate::format::Source;
use crate::object::Object;
use crate::room::{self, Held};

/// First bytes of the parts of an archive, and their bytes without names and comments.
const LOCAL: (&[u8], usize) = (b"PK\x03\x04", 30);
const ENTRY: (&[u8], usize) = (b"PK\x01\x02", 46);
const END: (&[u8], usize) = (b"PK\x05\x06", 22);
const END_64: (&[u8], usize) = (b"PK\x06\x06", 56);
const LOCATOR_64: (&[u8], usize) = (b"PK\x06\x07", 20);

/// Value of a field of 32 bits whose number lies in the ZIP64 part.
const IN_64: u64 = u32::MAX as u64;

/// Most bytes that Deflate makes of one byte.
const RATIO_MAX: u64 = 1032;

/// Opens a file.
///
/// # Errors
/// The file is no archive, a member is damaged or no array of numbers, or arrays have other numbers
/// of records, or all of them do not fit into `data_memory` without compression.
pub(crate) fn open(object: &Object) -> Result<Box<dyn Source>> {
    open_within(object, room::bytes_max())
}

/// Opens a file whose compressed arrays have at most `bytes_max` bytes together when unpacked.
fn open_within(object: &Object, bytes_max: u64) -> Result<Box<dyn Source>> {
    let members = members(object)?.ok_or_else(|| {
        malformed(
            object.path(),
            "no npz file, or a damaged one: its directory of members cannot be read; copy it again, or save it with \
             numpy.savez",
        )
    })?;
    // Members that overlap would make a small file unpack into more memory than there is.
    let packed: u64 = members.iter().fold(0, |all, member| all.saturating_add(member.packed));
    if packed > object.len() as u64 {
        return wrong(
            object.path(),
            format!(
                "the members have {packed} bytes, the file has {}; the file is damaged, copy it again",
                object.len()
            ),
        );
    }
    let mut columns: Vec<Values> = Vec::new();
    let mut share = Share { bytes_max, left: bytes_max };
    for member in &members {
        let Some(name) = member.name.strip_suffix(".npy") else { continue };
        let named = |reason: String| format!("array `{name}`: {reason}");
        if columns.iter().any(|column| column.name() == name) {
            let reason = "the archive has two arrays of this name; save it anew";
            return wrong(object.path(), named(reason.to_owned()));
        }
        columns.push(values(object, member, name, &mut share).map_err(|flaw| flaw.at(object.path(), named))?);
    }
    array::open(object, columns)
}

/// Most memory for the unpacked arrays of one file, which stay until the file is closed.
struct Share {
    bytes_max: u64,
    /// Bytes that no array has taken.
    left: u64,
}

/// Returns the array of a member. An unpacked one takes its bytes of `share` and of the room.
fn values(object: &Object, member: &Member, name: &str, share: &mut Share) -> Result<Values, Flaw> {
    if member.encrypted {
        return Err("is encrypted; save it without a password".to_owned().into());
    }
    let Some(range) = member.range(object)? else {
        return Err("is not where the directory says; the file is damaged, copy it again".to_owned().into());
    };
    match member.method {
        0 => Ok(npy::array(object, range)?.values(object, name)?),
        8 => {
            member.check_size(share)?;
            let needed = || format!("array `{name}` has {} bytes without compression", member.unpacked);
            let held = Held::of(member.unpacked).map_err(|full| full.at(object.path(), needed()))?;
            let unpacked = Object::whole(object.path(), member.inflate(&object.slice_to_keep(range)?)?, held);
            Ok(npy::array(&unpacked, 0..unpacked.len())?.values(&unpacked, name)?)
        }
        method => {
            let reason = format!(
                "is compressed by method {method}, expected 0 (stored) or 8 (Deflate); save it with numpy.savez"
            );
            Err(reason.into())
        }
    }
}

/// A member as the directory describes it.
#[derive(Debug, PartialEq)]
struct Member {
    name: String,
    encrypted: bool,
    method: u64,
    crc: u64,
    /// Bytes in the file.
    packed: u64,
    /// Bytes without compression.
    unpacked: u64,
    /// Place of the local header.
    header: u64,
}

impl Member {
    /// Returns the part of the file with the bytes of the member. `None`: there is none.
    fn range(&self, file: &Object) -> Result<Option<Range<usize>>> {
        let Some(header) = part_of(file, self.header, LOCAL)? else { return Ok(None) };
        let range = || {
            // The local header has a name and extra fields of its own lengths.
            let (name, extra) = (number(&header, 26, 2)?, number(&header, 28, 2)?);
            let begin = usize::try_from(self.header + LOCAL.1 as u64 + name + extra).ok()?;
            let end = begin.checked_add(usize::try_from(self.packed).ok()?)?;
            (end <= file.len()).then_some(begin..end)
        };
        Ok(range())
    }

    /// Takes the bytes of the member without compression of `share`.
    ///
    /// # Errors
    /// The member cannot have so many, or they do not fit.
    fn check_size(&self, share: &mut Share) -> Result<(), String> {
        let expected = self.unpacked;
        if expected > self.packed.saturating_mul(RATIO_MAX) {
            let packed = self.packed;
            return Err(damaged(&format!("{packed} bytes cannot become {expected}")));
        }
        share.left = share.left.checked_sub(expected).ok_or_else(|| {
            format!(
                "has {expected} bytes without compression, more than the {} that the arrays before leave of the {} of \
                 data_memory; raise it, or save the arrays with numpy.savez",
                share.left, share.bytes_max
            )
        })?;
        Ok(())
    }

    /// Unpacks the bytes of the member.
    fn inflate(&self, packed: &[u8]) -> Result<Vec<u8>, String> {
        let expected = self.unpacked;
        let mut bytes = Vec::new();
        let room = usize::try_from(expected).ok().and_then(|room| bytes.try_reserve_exact(room).ok());
        room.ok_or_else(|| format!("has {expected} bytes, for which there is no memory"))?;
        let read = DeflateDecoder::new(packed).take(expected + 1).read_to_end(&mut bytes);
        read.map_err(|error| damaged(&error.to_string()))?;
        let mut crc = Crc::new();
        crc.update(&bytes);
        if (bytes.len() as u64, u64::from(crc.sum())) != (expected, self.crc) {
            return Err(damaged("its length or its checksum is not that of the directory"));
        }
        Ok(bytes)
    }
}

fn damaged(what: &str) -> String {
    format!("damaged Deflate: {what}; copy the file again")
}

/// Reads the directory. `None`: it is damaged, or there is none.
///
/// # Errors
/// The file cannot be read.
fn members(file: &Object) -> Result<Option<Vec<Member>>> {
    // A comment may follow the end, and the locator of the ZIP64 end precedes it.
    let tail_bytes = END.1 + usize::from(u16::MAX) + LOCATOR_64.1;
    let tail_begin = file.len().saturating_sub(tail_bytes);
    let tail = file.slice_to_keep(tail_begin..file.len())?;
    let Some(at) = end(&tail) else { return Ok(None) };
    let Some(mut directory) = directory(&tail[at..]) else { return Ok(None) };
    if directory.is_in_64 {
        let locator = at.checked_sub(LOCATOR_64.1).and_then(|at| part(&tail, at, LOCATOR_64));
        let Some(place) = locator.and_then(|locator| number(locator, 8, 8)) else { return Ok(None) };
        let Some(end) = part_of(file, place, END_64)? else { return Ok(None) };
        let (Some(size), Some(begin)) = (number(&end, 40, 8), number(&end, 48, 8)) else { return Ok(None) };
        directory = Directory { begin, size, is_in_64: true };
    }
    let Some(entries) = at_place(file, directory.begin, directory.size)? else { return Ok(None) };
    Ok(entries_of(&entries))
}

/// Place of the directory in the file.
struct Directory {
    begin: u64,
    size: u64,
    /// Whether the ZIP64 end has the numbers.
    is_in_64: bool,
}

/// Reads the end of the directory.
fn directory(end: &[u8]) -> Option<Directory> {
    let (size, begin) = (number(end, 12, 4)?, number(end, 16, 4)?);
    let is_in_64 = number(end, 10, 2)? == u64::from(u16::MAX) || size == IN_64 || begin == IN_64;
    Some(Directory { begin, size, is_in_64 })
}

/// Reads the entries of the directory. `None`: one is damaged.
fn entries_of(mut rest: &[u8]) -> Option<Vec<Member>> {
    let mut members = Vec::new();
    while !rest.is_empty() {
        let length = |at| Some(number(rest, at, 2)? as usize);
        let (name, extra, comment) = (length(28)?, length(30)?, length(32)?);
        let extra_begin = ENTRY.1 + name;
        let extra_end = extra_begin + extra;
        members.push(member(
            part(rest, 0, ENTRY)?,
            rest.get(ENTRY.1..extra_begin)?,
            rest.get(extra_begin..extra_end)?,
        )?);
        rest = rest.get(extra_end + comment..)?;
    }
    Some(members)
}

/// Returns bytes of a file. `None`: it has no such bytes.
///
/// # Errors
/// The file cannot be read.
fn at_place(file: &Object, begin: u64, bytes: u64) -> Result<Option<Bytes>> {
    let range = || {
        let begin = usize::try_from(begin).ok()?;
        let end = begin.checked_add(usize::try_from(bytes).ok()?)?;
        (end <= file.len()).then_some(begin..end)
    };
    range().map(|range| file.slice_to_keep(range)).transpose()
}

/// Returns a part of an archive at `at`, like [`part`].
///
/// # Errors
/// The file cannot be read.
fn part_of(file: &Object, at: u64, (signature, length): (&[u8], usize)) -> Result<Option<Bytes>> {
    Ok(at_place(file, at, length as u64)?.filter(|part| part.starts_with(signature)))
}

/// Returns the place of the end of the directory. A comment may follow it.
fn end(file: &[u8]) -> Option<usize> {
    let last = file.len().checked_sub(END.1)?;
    let first = last.saturating_sub(usize::from(u16::MAX));
    let is_end = |&at: &usize| {
        let comment = part(file, at, END).and_then(|end| number(end, 20, 2));
        comment == Some((last - at) as u64)
    };
    (first..=last).rev().find(is_end)
}

/// Reads an entry of the directory.
fn member(entry: &[u8], name: &[u8], mut extra: &[u8]) -> Option<Member> {
    let mut large = &b""[..];
    while let (Some(id), Some(length)) = (number(extra, 0, 2), number(extra, 2, 2)) {
        let field = extra.get(4..4 + length as usize)?;
        if id == 1 {
            large = field;
        }
        extra = &extra[4 + length as usize..];
    }
    // The ZIP64 field has the numbers, in this order, that 32 bits do not hold.
    let mut number_at = |at| match number(entry, at, 4)? {
        IN_64 => {
            let value = number(large, 0, 8)?;
            large = &large[8..];
            Some(value)
        }
        value => Some(value),
    };
    let (unpacked, packed, header) = (number_at(24)?, number_at(20)?, number_at(42)?);
    Some(Member {
        name: String::from_utf8_lossy(name).into_owned(),
        encrypted: number(entry, 8, 2)? & 1 == 1,
        method: number(entry, 10, 2)?,
        crc: number(entry, 16, 4)?,
        packed,
        unpacked,
        header,
    })
}

/// Returns a part of an archive at `at`, without names and comments. `None`: none begins there.
fn part<'a>(file: &'a [u8], at: usize, (signature, length): (&[u8], usize)) -> Option<&'a [u8]> {
    file.get(at..at.checked_add(length)?).filter(|part| part.starts_with(signature))
}

/// Returns the little-endian number of `size` bytes at `at`.
fn number(bytes: &[u8], at: usize, size: usize) -> Option<u64> {
    let raw = bytes.get(at..at + size)?;
    Some(raw.iter().rev().fold(0, |all, &byte| all << 8 | u64::from(byte)))
}

#[cfg(test)]
pub(crate) mod tests {
    use std::io::Write;
    use std::path::Path;

    use flate2::Compression;
    use flate2::write::DeflateEncoder;
    use proptest::prelude::*;

    use super::*;
    use crate::column::Column;

    /// Returns the bytes of an array of i16.
    pub(crate) fn array(values: &[i16], shape: &str) -> Vec<u8> {
        let values: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        npy::tests::write(1, &npy::tests::header("<i2", "False", shape), &values)
    }

    /// Writes an archive. `large` puts sizes and places into ZIP64 fields, as for files above 4 GB.
    pub(crate) fn write(members: &[(&str, Vec<u8>)], deflate: bool, large: bool) -> Vec<u8> {
        let (mut file, mut directory) = (Vec::new(), Vec::new());
        for (name, bytes) in members {
            let mut crc = Crc::new();
            crc.update(bytes);
            let mut packed = bytes.clone();
            if deflate {
                let mut encoder = DeflateEncoder::new(Vec::new(), Compression::default());
                encoder.write_all(bytes).unwrap();
                packed = encoder.finish().unwrap();
            }
            let header = file.len() as u64;
            let short = |number: u64| if large { u32::MAX } else { number as u32 };
            let numbers = [bytes.len() as u64, packed.len() as u64, header];
            let field: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
            let mut extra = vec![9, 0, 2, 0, 7, 7];
            if large {
                extra.extend([1, 0, 24, 0]);
                extra.extend(field);
            }
            let method = [if deflate { 8 } else { 0 }, 0];
            let sizes = [crc.sum(), short(numbers[1]), short(numbers[0])].map(u32::to_le_bytes).concat();
            let name_length = (name.len() as u16).to_le_bytes();
            let extra_length = (extra.len() as u16).to_le_bytes();
            // The local header has a longer extra field than the directory, as NumPy writes it.
            file.extend([LOCAL.0, &[20, 0, 0, 0], &method, &[0; 4], &sizes, &name_length, &[3, 0]].concat());
            file.extend([name.as_bytes(), &[0; 3], &packed].concat());
            directory
                .extend([ENTRY.0, &[20, 0, 20, 0, 0, 0], &method, &[0; 4], &sizes, &name_length].concat());
            directory.extend([&extra_length[..], &[0; 10], &short(header).to_le_bytes()].concat());
            directory.extend([name.as_bytes(), &extra].concat());
        }
        let (begin, size) = (file.len() as u64, directory.len() as u64);
        file.extend(directory);
        let at = file.len() as u64;
        let count = members.len() as u16;
        if large {
            file.extend([END_64.0, &44u64.to_le_bytes(), &[0; 12], &[0; 16]].concat());
            file.extend([size.to_le_bytes(), begin.to_le_bytes()].concat());
            file.extend([LOCATOR_64.0, &[0; 4], &at.to_le_bytes(), &[1, 0, 0, 0]].concat());
        }
        let short = |number: u64| if large { u32::MAX } else { number as u32 }.to_le_bytes();
        file.extend([END.0, &[0; 4], &count.to_le_bytes(), &count.to_le_bytes()].concat());
        file.extend([&short(size)[..], &short(begin), &[2, 0], b"hi"].concat());
        file
    }

    fn read(bytes: &[u8]) -> Result<Vec<Column>> {
        let source = open(&Object::copy(Path::new("a.npz"), bytes.to_vec()))?;
        source.read(0, &(0..source.outline().columns.len()).collect::<Vec<_>>())
    }

    fn error(bytes: &[u8]) -> String {
        read(bytes).unwrap_err().to_string()
    }

    fn two() -> [(&'static str, Vec<u8>); 3] {
        [
            ("x.npy", array(&[1, 2, 3, 4], "(2, 2)")),
            ("about.txt", b"no array".to_vec()),
            ("a.npy", array(&[5, 6], "(2,)")),
        ]
    }

    #[test]
    fn arrays_are_columns_in_the_order_of_the_archive() {
        for (deflate, large) in [(false, false), (false, true), (true, false), (true, true)] {
            let columns = read(&write(&two(), deflate, large)).unwrap();
            let specs: Vec<_> = columns.iter().map(|column| column.spec().to_string()).collect();
            assert_eq!(specs, ["`x` i16[2]", "`a` i16[]"], "deflate {deflate}, large {large}");
            assert_eq!(columns[0].bytes(), bytemuck::cast_slice::<i16, u8>(&[1, 2, 3, 4]));
            assert_eq!(columns[1].record(1), 6i16.to_le_bytes());
            assert_eq!(columns[0].owned_bytes(), 0);
        }
    }

    #[test]
    fn arrays_that_are_no_columns_say_why() {
        let named =
            |name: &'static str, bytes| error(&write(&[two()[0].clone(), (name, bytes)], false, false));
        let message = named("y.npy", array(&[1], "(1,)"));
        assert!(message.contains("array `y` has 1 records, array `x` has 2"), "{message}");
        assert!(named("x.npy", array(&[1, 2], "(2,)")).contains("array `x`: the archive has two arrays"));
        assert!(named("y.npy", b"PK".to_vec()).contains("a.npz: array `y`: no npy file"));
        assert!(named("y.npy", array(&[1], "()")).contains("array `y`: holds a single value"));
        assert!(error(&write(&[("a.txt", vec![])], false, false)).contains("the file has no arrays"));
    }

    #[test]
    fn members_that_cannot_be_unpacked_say_why() {
        let good = write(&two(), true, false);
        let entry = good.windows(4).position(|window| window == ENTRY.0).unwrap();
        let damaged = |at: usize, bytes: &[u8]| {
            let mut bad = good.clone();
            bad[entry + at..entry + at + bytes.len()].copy_from_slice(bytes);
            error(&bad)
        };
        assert!(damaged(16, &[0; 4]).contains("array `x`: damaged Deflate: its length or its checksum"));
        assert!(damaged(24, &[1, 0, 0, 0]).contains("damaged Deflate: its length"));
        assert!(damaged(24, &[0, 0, 0, 0x7F]).contains("cannot become 2130706432"));
        assert!(damaged(20, &[0, 0, 0, 0x7F]).contains("the members have 21307"));
        assert!(damaged(8, &[1]).contains("array `x`: is encrypted"));
        assert!(damaged(10, &[12]).contains("array `x`: is compressed by method 12"));
        assert!(damaged(42, &[1]).contains("array `x`: is not where the directory says"));
    }

    #[test]
    fn unpacked_arrays_have_room_together_or_are_refused() {
        let [x, _, a] = two();
        let all = (x.1.len() + a.1.len()) as u64;
        let open = |deflate, bytes_max| {
            let file = Object::copy(Path::new("a.npz"), write(&two(), deflate, false));
            open_within(&file, bytes_max).map(drop).map_err(|error| error.to_string())
        };
        assert_eq!(open(true, all), Ok(()));
        let said = open(true, all - 1).unwrap_err();
        assert!(said.contains("array `a`: has ") && said.contains("data_memory"), "{said}");
        assert_eq!(open(false, 0), Ok(()), "a stored array stays in the file");
    }

    #[test]
    fn files_that_are_no_archives_say_so() {
        let good = write(&two(), false, false);
        for bad in [&b""[..], b"\x93NUMPY", &good[..good.len() - 3], &good[30..]] {
            let message = error(bad);
            assert!(message.contains("a.npz: no npz file, or a damaged one"), "{message}");
        }
    }

    proptest! {
        #[test]
        fn what_is_written_is_read(
            rows in proptest::collection::vec(any::<[i16; 2]>(), 0..6),
            deflate in any::<bool>(),
            large in any::<bool>(),
        ) {
            let values: Vec<i16> = rows.iter().flatten().copied().collect();
            let file = write(&[("x.npy", array(&values, &format!("({}, 2)", rows.len())))], deflate, large);
            let columns = read(&file).unwrap();
            prop_assert_eq!(columns[0].records(), rows.len());
            prop_assert_eq!(columns[0].bytes(), bytemuck::cast_slice::<i16, u8>(&values));
        }

        #[test]
        fn damaged_files_never_panic(
            deflate in any::<bool>(),
            large in any::<bool>(),
            edits in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..5),
            cut in any::<prop::sample::Index>(),
            is_cut in any::<bool>(),
        ) {
            let mut bytes = write(&two(), deflate, large);
            for (at, value) in edits {
                let at = at.index(bytes.len());
                bytes[at] = value;
            }
            if is_cut {
                bytes.truncate(cut.index(bytes.len()));
            }
            for column in read(&bytes).into_iter().flatten() {
                (0..column.records().min(50)).for_each(|record| drop(column.record(record).to_vec()));
            }
        }
    }
}
