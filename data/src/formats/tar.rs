//! WebDataset: a tar archive whose members `KEY.EXTENSION` with one key, one after the other, are a
//! record. An extension is a column.
//!
//! | extension | column |
//! | --- | --- |
//! | `cls` | `i64`, `[]`, from decimal text |
//! | `npy` | a NumPy array: one value, or ragged in the first dimension |
//! | any other | the bytes of the member, ragged `u8` |
//!
//! The key ends at the first dot of the file's name: `a/1.seg.png` has the extension `seg.png`. The
//! last part of an extension says what it is: `mask.npy` is an array, too.
//! Extensions are in lower case, and columns are sorted by name. The extensions of the first record
//! are the columns. Others are left out, as are links, devices, and members without an extension.
//! Members are read where they lie and never written to a disk. A record without a member of the
//! first one has no value there, and a class that is no integer is broken.
//!
//! A member is a header of 512 bytes and its data, padded to a multiple of 512. Two headers of
//! zeros are the end (POSIX.1-2001, "pax Interchange Format"; GNU tar, "Basic Tar Format").

use std::ops::Range;

use bytes::Bytes;
use proto::column::{ColumnSpec, ElementType};

use super::array::Array;
use super::npy;
use crate::column::Column;
use crate::cuts::Cuts;
use crate::error::{Result, malformed, wrong};
use crate::format::{Outline, Source};
use crate::object::{Object, Scan};

/// Bytes of a header, and unit of a member's data.
const UNIT: usize = 512;

/// Last part of the extension of members with a class, and with an array.
const CLASS: &str = "cls";
const ARRAY: &str = "npy";

/// What the members of a column are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Class,
    Array,
    Bytes,
}

/// Opens a file. `known` says where its blocks are; then only the first record is read.
///
/// # Errors
/// The file is no tar archive, is cut off, or its first record has no members.
pub(crate) fn open(object: &Object, known: Option<&Cuts>) -> Result<Box<dyn Source>> {
    let mut cuts = Cuts::default();
    let mut key = None;
    let mut columns: Vec<(ColumnSpec, Kind)> = Vec::new();
    let mut members = Members { bytes: Scan::new(object, known.is_some()), at: 0 };
    while let Some(Member { begin, name, data }) = members.next()? {
        let Some((of_member, extension)) = split(&name) else { continue };
        if key.as_deref() != Some(of_member) {
            cuts.add(begin);
            key = Some(of_member.to_owned());
        }
        if cuts.records() != [1] && known.is_some() {
            break;
        }
        if cuts.records() == [1] && !columns.iter().any(|(column, _)| column.name == extension) {
            columns.push(column(&extension, &members.data(data)?));
        }
    }
    if columns.is_empty() {
        return wrong(
            object.path(),
            "no members KEY.EXTENSION, so that the columns are unknown; leave the file out, or write it as a WebDataset",
        );
    }
    let cuts = known.cloned().unwrap_or(cuts);
    columns.sort_by(|(a, _), (b, _)| a.name.cmp(&b.name));
    let (columns, kinds) = columns.into_iter().unzip();
    let outline = Outline { columns, blocks: cuts.records().to_vec() };
    Ok(Box::new(Tar { object: object.clone(), cuts, kinds, outline }))
}

/// Returns the column of an extension. `data` is its member in the first record.
fn column(extension: &str, data: &[u8]) -> (ColumnSpec, Kind) {
    let last = extension.rsplit('.').next().unwrap_or_default();
    if last == CLASS {
        return (ColumnSpec::fixed(extension, ElementType::I64, []), Kind::Class);
    }
    let array = npy::header(data).ok().filter(|_| last == ARRAY);
    match array.and_then(|array| column_of(extension, &array.shape, array.stored.dtype())) {
        Some(column) => (column, Kind::Array),
        None => (ColumnSpec::ragged(extension, ElementType::U8, []), Kind::Bytes),
    }
}

/// Returns the column of arrays of a shape. It does not depend on the size of the first dimension,
/// which may differ between records. `None`: no column holds them.
fn column_of(name: &str, shape: &[usize], dtype: ElementType) -> Option<ColumnSpec> {
    let column = match shape.split_first() {
        None => ColumnSpec::fixed(name, dtype, []),
        Some((_, rest)) => ColumnSpec::ragged(name, dtype, rest),
    };
    Some(column).filter(|column| column.width().is_some_and(|width| width > 0))
}

/// Splits a member's name into key and extension. `None`: it belongs to no record.
fn split(name: &str) -> Option<(&str, String)> {
    let file = name.rfind('/').map_or(0, |at| at + 1);
    let dot = file + name[file..].find('.')?;
    // Hidden files, such as those of macOS, have nothing before the dot.
    (dot > file).then(|| (&name[..dot], name[dot + 1..].to_lowercase()))
}

struct Tar {
    object: Object,
    cuts: Cuts,
    /// What the members of each column are.
    kinds: Vec<Kind>,
    outline: Outline,
}

impl Source for Tar {
    fn outline(&self) -> &Outline {
        &self.outline
    }

    fn cuts(&self) -> Option<&Cuts> {
        Some(&self.cuts)
    }

    /// Decodes columns. A class that is no integer is broken.
    ///
    /// # Errors
    /// A record has a member twice, an array has another type than in the first record, or the file
    /// cannot be read.
    fn read(&self, block: usize, columns: &[usize]) -> Result<Vec<Column>> {
        let records = self.outline.blocks[block] as usize;
        let column = |&at: &usize| Column::with_capacity(self.outline.columns[at].clone(), records);
        let mut out: Vec<_> = columns.iter().map(column).collect();
        let range = self.cuts.range(block, self.object.len());
        let end = range.end;
        let mut members = Members { at: range.start, bytes: Scan::over(&self.object, range)? };
        let (mut key, mut begun) = (String::new(), 0);
        while members.at < end {
            let Some(Member { begin, name, data }) = members.next()? else { break };
            let Some((of_member, extension)) = split(&name) else { continue };
            if begun == 0 || key != of_member {
                if begin >= end {
                    break;
                }
                complete(&mut out, begun);
                begun += 1;
                of_member.clone_into(&mut key);
            }
            let Some(at) = out.iter().position(|column| column.spec().name == extension) else {
                continue;
            };
            let column = &mut out[at];
            if column.records() == begun {
                return wrong(
                    self.object.path(),
                    format!("record `{key}`: a second `{extension}` at byte {begin}; remove it"),
                );
            }
            let data = members.data(data)?;
            match self.kinds[columns[at]] {
                Kind::Class => {}
                Kind::Bytes => {
                    column.push(&data);
                    continue;
                }
                Kind::Array => {
                    push_array(column, &data).map_err(|reason| {
                        let what = format!("member `{name}` at byte {begin}: {reason}");
                        malformed(self.object.path(), what)
                    })?;
                    continue;
                }
            }
            let text = String::from_utf8_lossy(&data);
            match text.trim().parse::<i64>() {
                Ok(class) => column.push(&class.to_le_bytes()),
                Err(_) => column.push_broken(|| {
                    let text: String = text.trim().chars().take(40).collect();
                    let place = format!("member `{name}` at byte {begin}");
                    format!("{place}: `{text}` is no class; expected an integer in decimal text").into()
                }),
            }
        }
        complete(&mut out, begun);
        if begun != records {
            return wrong(
                self.object.path(),
                format!("a block of {records} records has {begun} now; restore the file"),
            );
        }
        Ok(out)
    }
}

/// Appends an array, as the bytes of its member, to its column.
///
/// # Errors
/// The bytes are no array, or one of another column.
fn push_array(column: &mut Column, member: &[u8]) -> Result<(), String> {
    let Array { shape, stored, endian, range } = npy::header(member)?;
    let dtype = stored.dtype();
    if column_of(&column.spec().name, &shape, dtype).as_ref() != Some(column.spec()) {
        return Err(format!(
            "an array {dtype}{shape:?}, and the first record makes the column {}; all records must have one type and one              shape after the first dimension",
            column.spec()
        ));
    }
    if shape.contains(&0) && range.is_empty() {
        column.push(&[]);
        return Ok(());
    }
    let shape = [1].into_iter().chain(shape).collect();
    let values = Array { shape, stored, endian, range }.column(member, "array")?;
    column.push(values.bytes());
    Ok(())
}

/// Makes each column have `begun` records. The last record has no value in the others.
fn complete(columns: &mut [Column], begun: usize) {
    let lacking = columns.iter_mut().filter(|column| column.records() != begun);
    lacking.for_each(Column::push_missing);
}

/// A member that is a plain file.
struct Member {
    /// Place of its first header.
    begin: usize,
    name: String,
    data: Range<usize>,
}

/// Reads an archive's members, one after the other.
struct Members<'a> {
    bytes: Scan<'a>,
    /// Place of the next header.
    at: usize,
}

impl Members<'_> {
    /// Returns the next plain file. `None`: the end of the archive.
    ///
    /// # Errors
    /// The archive is cut off, damaged, or has bytes behind its end.
    fn next(&mut self) -> Result<Option<Member>> {
        let (object, mut begin) = (self.bytes.object(), self.at);
        // What special members say of the next one.
        let (mut long_name, mut long_size) = (None, None);
        loop {
            let at = self.at;
            let Some(header) = self.bytes.get(at..at + UNIT)? else { return self.cut_off("header", at) };
            let header = &*header;
            if header.iter().all(|&byte| byte == 0) {
                return self.end();
            }
            let (Some(size), true) = (number(&header[124..136]), is_whole(header)) else {
                let what =
                    if at == 0 { "no tar archive, or a damaged one" } else { "the archive is damaged" };
                return wrong(
                    self.object().path(),
                    format!("byte {at}: the checksum of a header does not fit: {what}; copy it again"),
                );
            };
            let kind = header[156];
            let size = match kind {
                // Links, devices and folders have no data, whatever their size says.
                b'1'..=b'6' => 0,
                b'x' | b'g' | b'L' | b'K' => size,
                _ => long_size.unwrap_or(size),
            };
            let begin_of_data = at + UNIT;
            let end = usize::try_from(size).ok().and_then(|size| begin_of_data.checked_add(size));
            let data = begin_of_data..end.unwrap_or(usize::MAX);
            if data.end > self.object().len() {
                return self.cut_off("data", at);
            }
            self.at = data.end.next_multiple_of(UNIT);
            match kind {
                b'x' => {
                    let broken = || {
                        malformed(
                            object.path(),
                            format!("byte {at}: a damaged pax header; copy the file again"),
                        )
                    };
                    let content = self.data(data)?;
                    for (key, value) in records(&content).ok_or_else(broken)? {
                        match key {
                            b"path" => long_name = Some(String::from_utf8_lossy(value).into_owned()),
                            b"size" => {
                                let size = std::str::from_utf8(value).ok().and_then(|size| size.parse().ok());
                                long_size = Some(size.ok_or_else(broken)?);
                            }
                            _ if key.starts_with(b"GNU.sparse") => return self.sparse(at),
                            _ => {}
                        }
                    }
                }
                b'L' => long_name = Some(text(&self.data(data)?)),
                b'S' => return self.sparse(at),
                b'0' | b'7' | 0 => {
                    let name = long_name.unwrap_or_else(|| short_name(header));
                    return Ok(Some(Member { begin, name, data }));
                }
                b'g' | b'K' => {}
                _ => {
                    // What came before belongs to a member that is no plain file.
                    (long_name, long_size, begin) = (None, None, self.at);
                }
            }
        }
    }

    /// Checks that nothing follows the end of the archive, which is where the next header would be.
    fn end(&self) -> Result<Option<Member>> {
        let (mut rest, mut at) = (self.object().reader(self.at), self.at);
        loop {
            let window = rest.window()?;
            if window.is_empty() {
                return Ok(None);
            }
            if let Some(after) = window.iter().position(|&byte| byte != 0) {
                return wrong(
                    self.object().path(),
                    format!(
                        "the archive ends at byte {}, and more follows at byte {}; archives cannot be joined like this: give \
                         them as several files",
                        self.at,
                        at + after
                    ),
                );
            }
            at += window.len();
        }
    }

    const fn object(&self) -> &Object {
        self.bytes.object()
    }

    /// Returns the data of a member.
    fn data(&mut self, data: Range<usize>) -> Result<Bytes> {
        match self.bytes.get(data.clone())? {
            Some(bytes) => Ok(bytes),
            None => self.cut_off("data", data.start),
        }
    }

    fn cut_off<T>(&self, what: &str, at: usize) -> Result<T> {
        let length = self.object().len();
        wrong(
            self.object().path(),
            format!(
                "the file of {length} bytes ends within the {what} of the member at byte {at}, without an end of the archive; the \
                 file is cut off or no tar archive, copy it again"
            ),
        )
    }

    fn sparse<T>(&self, at: usize) -> Result<T> {
        wrong(self.object().path(), format!("byte {at}: a sparse member; write the archive without --sparse"))
    }
}

/// Returns whether the checksum of a header fits. It is the sum of the header's bytes, with spaces
/// in place of the checksum.
fn is_whole(header: &[u8]) -> bool {
    let sum = |bytes: &[u8]| bytes.iter().map(|&byte| u64::from(byte)).sum::<u64>();
    let found = sum(&header[..148]) + 8 * u64::from(b' ') + sum(&header[156..]);
    number(&header[148..156]) == Some(found)
}

/// Reads a number of a header: octal digits, or big-endian bytes if the first bit is set.
fn number(field: &[u8]) -> Option<u64> {
    let (&first, rest) = field.split_first()?;
    if first & 0x80 != 0 {
        let high = u64::from(first & 0x7F);
        return rest.iter().try_fold(high, |all, &byte| Some(all.checked_mul(256)? | u64::from(byte)));
    }
    let digits = field.split(|&byte| byte == 0).next()?.trim_ascii();
    if digits.is_empty() {
        return Some(0);
    }
    u64::from_str_radix(std::str::from_utf8(digits).ok()?, 8).ok()
}

/// Returns a text that ends at its first zero.
fn text(field: &[u8]) -> String {
    String::from_utf8_lossy(field.split(|&byte| byte == 0).next().unwrap_or_default()).into_owned()
}

/// Returns the name in a header, with the folder that `ustar` archives put beside it.
fn short_name(header: &[u8]) -> String {
    let name = text(&header[..100]);
    // GNU's own headers have other fields in that place.
    let folder = if &header[257..263] == b"ustar\0" { text(&header[345..500]) } else { String::new() };
    if folder.is_empty() { name } else { format!("{folder}/{name}") }
}

/// Reads the lines `LENGTH KEY=VALUE` of a pax header, where the length counts the whole line.
/// `None`: one is damaged.
fn records(mut content: &[u8]) -> Option<Vec<(&[u8], &[u8])>> {
    let mut records = Vec::new();
    while !content.is_empty() {
        let space = content.iter().position(|&byte| byte == b' ')?;
        let length: usize = std::str::from_utf8(&content[..space]).ok()?.parse().ok()?;
        let line = content.get(space + 1..length)?.strip_suffix(b"\n")?;
        let equals = line.iter().position(|&byte| byte == b'=')?;
        records.push((&line[..equals], &line[equals + 1..]));
        content = &content[length..];
    }
    Some(records)
}

#[cfg(test)]
pub(crate) mod tests {
    use std::path::Path;

    use proptest::prelude::*;

    use super::*;
    use crate::column::Fault;

    /// Writes a member of a kind.
    fn member(kind: u8, name: &str, data: &[u8]) -> Vec<u8> {
        let mut bytes = vec![0; UNIT];
        bytes[..name.len()].copy_from_slice(name.as_bytes());
        bytes[124..136].copy_from_slice(format!("{:011o}\0", data.len()).as_bytes());
        bytes[156] = kind;
        bytes[257..265].copy_from_slice(b"ustar\x0000");
        signed(&mut bytes);
        bytes.extend(data);
        bytes.resize(bytes.len().next_multiple_of(UNIT), 0);
        bytes
    }

    /// Writes the checksum of a header.
    fn signed(header: &mut [u8]) {
        header[148..156].fill(b' ');
        let sum: u32 = header[..UNIT].iter().map(|&byte| u32::from(byte)).sum();
        header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    }

    /// Writes a pax header.
    fn pax(lines: &[(&str, &str)]) -> Vec<u8> {
        let line = |(key, value): &(&str, &str)| {
            let rest = format!(" {key}={value}\n");
            let length =
                (rest.len()..).find(|length| length.to_string().len() + rest.len() == *length).unwrap();
            format!("{length}{rest}")
        };
        member(b'x', "PaxHeaders/x", lines.iter().map(line).collect::<String>().as_bytes())
    }

    fn archive(members: &[Vec<u8>]) -> Vec<u8> {
        [&members.concat()[..], &[0; 2 * UNIT]].concat()
    }

    /// Writes an archive of files.
    pub(crate) fn files(files: &[(&str, &[u8])]) -> Vec<u8> {
        archive(&files.iter().map(|(name, data)| member(b'0', name, data)).collect::<Vec<_>>())
    }

    fn source(bytes: &[u8]) -> Result<Box<dyn Source>> {
        open(&Object::copy(Path::new("a.tar"), bytes.to_vec()), None)
    }

    fn read(bytes: &[u8]) -> Result<Vec<Column>> {
        let source = source(bytes)?;
        let all: Vec<_> = (0..source.outline().columns.len()).collect();
        let mut blocks = (0..source.outline().blocks.len()).map(|block| source.read(block, &all));
        blocks.next().expect("an archive has a record")
    }

    fn error(bytes: &[u8]) -> String {
        read(bytes).unwrap_err().to_string()
    }

    #[test]
    fn members_of_one_key_are_a_record() {
        let columns = read(&files(&[
            ("a/1.jpg", b"JPG"),
            ("a/1.cls", b" 7\n"),
            ("a/1.seg.PNG", b""),
            ("about", b"no extension"),
            ("a/._2.jpg", b"hidden"),
            ("a/2.seg.png", &[9; 600]),
            ("a/2.txt", b"not in the first record"),
            ("a/2.jpg", b"x"),
            ("a/2.cls", b"-1"),
        ]))
        .unwrap();
        let specs: Vec<_> = columns.iter().map(|column| column.spec().to_string()).collect();
        assert_eq!(specs, ["`cls` i64[]", "`jpg` u8[any]", "`seg.png` u8[any]"]);
        assert_eq!(columns[0].values(), Some(&[7i64, -1][..]));
        assert_eq!((columns[1].record(0), columns[1].record(1)), (&b"JPG"[..], &b"x"[..]));
        assert_eq!((columns[2].record(0), columns[2].record(1)), (&b""[..], &[9; 600][..]));
    }

    /// Returns a NumPy file.
    fn array(descr: &str, shape: &str, values: &[u8]) -> Vec<u8> {
        npy::tests::write(1, &npy::tests::header(descr, "False", shape), values)
    }

    #[test]
    fn arrays_are_values_or_ragged_in_their_first_dimension() {
        let one = |key: usize, value: u8, box_: &[u8], rows: &str, values: &[u8]| {
            vec![
                member(b'0', &format!("{key}.age.npy"), &array("|u1", "()", &[value])),
                member(b'0', &format!("{key}.box.npy"), &array(">i2", "(2,)", box_)),
                member(b'0', &format!("{key}.npy"), &array("|i1", rows, values)),
            ]
        };
        let members = [one(1, 7, &[0, 1, 0, 2], "(1, 2)", &[5, 6]), one(2, 9, &[0, 3, 0, 4], "(0, 2)", &[])];
        let columns = read(&archive(&members.concat())).unwrap();
        let specs: Vec<_> = columns.iter().map(|column| column.spec().to_string()).collect();
        assert_eq!(specs, ["`age.npy` u8[]", "`box.npy` i16[any]", "`npy` i8[any, 2]"]);
        assert_eq!(columns[0].bytes(), [7, 9]);
        assert_eq!(columns[1].values(), Some(&[1i16, 2, 3, 4][..]));
        assert_eq!((columns[2].bytes(), columns[2].ends()), (&[5, 6][..], Some(&[1, 1][..])));
    }

    #[test]
    fn an_array_that_differs_from_the_first_is_named() {
        let error = |second: Vec<u8>| {
            let first = array("<f4", "(1, 2)", &[0; 8]);
            error(&files(&[("1.x.npy", &first), ("2.x.npy", &second)]))
        };
        let message = error(array("<f4", "(1, 3)", &[0; 12]));
        assert!(
            message.contains("member `2.x.npy` at byte 1024: an array f32[1, 3], and the first"),
            "{message}"
        );
        assert!(error(array("<i4", "(1, 2)", &[0; 8])).contains("an array i32[1, 2]"));
        assert!(error(b"x".to_vec()).contains("member `2.x.npy` at byte 1024: no npy file"));
        assert!(error(array("<f4", "(1, 2)", &[0; 7])).contains("needs 8 bytes of values, found 7"));
        assert!(error(array("<f4", "(0, 2)", &[0; 4])).contains("found 4"));
        // What is no array in the first record is bytes in all.
        let columns = read(&files(&[("1.npy", b"x"), ("2.npy", b"yz")])).unwrap();
        assert_eq!(columns[0].spec(), &ColumnSpec::ragged("npy", ElementType::U8, []));
    }

    #[test]
    fn long_names_and_sizes_are_those_of_special_members() {
        let long = format!("{}/1", "d".repeat(150));
        let name = |extension: &str| format!("{long}.{extension}");
        let mut large = member(b'0', "cut", b"12");
        large[124..136].copy_from_slice(&[0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2]);
        signed(&mut large);
        let mut unsized_member = member(b'0', "cut", b"3");
        unsized_member[124..136].copy_from_slice(b"00000000000\0");
        signed(&mut unsized_member);
        let mut folder = member(b'0', "1.d", b"4");
        folder[345..495].copy_from_slice("d".repeat(150).as_bytes());
        signed(&mut folder);
        let columns = read(&archive(&[
            member(b'g', "pax_global_header", b"16 comment=hello\n"),
            member(b'L', "././@LongLink", format!("{}\0", name("a")).as_bytes()),
            large,
            pax(&[("mtime", "1.5"), ("path", &name("b")), ("size", "1")]),
            unsized_member,
            pax(&[("path", &name("c"))]),
            member(b'2', "link", b""),
            folder,
        ]))
        .unwrap();
        let found: Vec<_> =
            columns.iter().map(|column| (column.spec().name.as_str(), column.bytes())).collect();
        assert_eq!(found, [("a", &b"12"[..]), ("b", b"3"), ("d", b"4")]);
    }

    #[test]
    fn links_devices_and_folders_are_no_records() {
        let others = [b'1', b'2', b'3', b'4', b'5', b'6'].map(|kind| {
            let mut bytes = member(kind, "1.txt", b"");
            // Some writers give a link the size of its file.
            bytes[124..136].copy_from_slice(b"00000007777\0");
            signed(&mut bytes);
            bytes
        });
        let columns =
            read(&archive(&[others.concat(), member(0, "2.a", b"old"), member(b'7', "3.a", b"new")]))
                .unwrap();
        assert_eq!((columns.len(), columns[0].records(), columns[0].bytes()), (1, 2, &b"oldnew"[..]));
    }

    #[test]
    fn a_member_that_a_record_lacks_is_a_missing_value() {
        let first: [(&str, &[u8]); 3] = [("1.a", b""), ("1.b", b""), ("2.a", b"x")];
        let last: [(&str, &[u8]); 2] = [("3.a", b""), ("3.b", b"")];
        for all in [first.to_vec(), [&first[..], &last].concat()] {
            let columns = read(&files(&all)).unwrap();
            assert_eq!((columns[0].fault(1), columns[1].fault(1)), (None, Some(Fault::Missing)));
            assert_eq!((columns[0].record(1), columns[1].fault(0)), (&b"x"[..], None));
        }
    }

    #[test]
    fn a_class_that_is_no_integer_is_broken() {
        let columns = read(&files(&[("1.cls", b"1"), ("2.cls", b"cat"), ("3.cls", b"3")])).unwrap();
        assert_eq!((columns[0].fault(0), columns[0].fault(2)), (None, None));
        let Some(Fault::Broken(reason)) = columns[0].fault(1) else { panic!("{:?}", columns[0].fault(1)) };
        assert!(reason.contains("member `2.cls` at byte 1024: `cat` is no class"), "{reason}");
    }

    #[test]
    fn a_member_that_comes_twice_is_refused() {
        let message = error(&files(&[("1.a", b""), ("1.A", b"")]));
        assert!(message.contains("record `1`: a second `a` at byte 512"), "{message}");
    }

    #[test]
    fn a_member_that_nobody_uses_may_be_anything() {
        let source =
            source(&files(&[("1.a", b"x"), ("1.cls", b"1"), ("2.a", b"y"), ("3.a", b"z"), ("3.cls", b"c")]))
                .unwrap();
        assert_eq!(source.read(0, &[0]).unwrap()[0].bytes(), b"xyz");
    }

    #[test]
    fn archives_that_are_cut_off_or_joined_say_where() {
        let good = files(&[("1.a", &[1; 600]), ("2.a", &[2; 600])]);
        for (length, expected) in [
            (0, "a.tar: the file of 0 bytes ends within the header of the member at byte 0"),
            (100, "the file of 100 bytes ends within the header of the member at byte 0"),
            (1000, "ends within the data of the member at byte 0"),
            (
                1536,
                "ends within the header of the member at byte 1536, without an end of the archive; the file is cut off",
            ),
            (2047, "ends within the header of the member at byte 1536"),
            (3072, "ends within the header of the member at byte 3072"),
        ] {
            let message = error(&good[..length]);
            assert!(message.contains(expected), "{message}");
        }
        let message = error(&good.repeat(2));
        assert!(
            message.contains("the archive ends at byte 3072, and more follows at byte 4096"),
            "{message}"
        );
        // One header of zeros is an end, too.
        assert_eq!(read(&good[..good.len() - UNIT]).unwrap()[0].records(), 2);
    }

    #[test]
    fn files_that_are_no_archives_say_so() {
        let error = |bytes: &[u8]| error(bytes);
        assert!(
            error(&[b'x'; 600]).contains("byte 0: the checksum of a header does not fit: no tar archive")
        );
        assert!(error(&[0; 1024]).contains("no members KEY.EXTENSION"));
        assert!(error(&files(&[("a", b"")])).contains("no members KEY.EXTENSION"));
        assert!(error(&archive(&[member(b'S', "1.a", b"")])).contains("byte 0: a sparse member"));
        let sparse = [pax(&[("GNU.sparse.major", "1")]), member(b'0', "1.a", b"")];
        assert!(error(&archive(&sparse)).contains("a sparse member"));
        for damaged in [&b"9 path=1."[..], b"8 path=1\n", b"10 size=x\n", b"x"] {
            let bad = [member(b'x', "p", damaged), member(b'0', "1.a", b"")];
            assert!(error(&archive(&bad)).contains("byte 0: a damaged pax header"));
        }
        let mut bad = files(&[("1.a", b""), ("2.a", b"")]);
        bad[UNIT] = b'3';
        assert!(
            error(&bad).contains("byte 512: the checksum of a header does not fit: the archive is damaged")
        );
    }

    #[test]
    fn large_archives_have_several_blocks() {
        let pairs = (0..5).flat_map(|key| {
            [
                member(b'0', &format!("{key}.cls"), b"5"),
                member(b'0', &format!("{key}.bin"), &vec![key; 3 << 20]),
            ]
        });
        let source = source(&archive(&pairs.collect::<Vec<_>>())).unwrap();
        assert_eq!(source.outline().blocks, [2, 2, 1]);
        for (block, &records) in source.outline().blocks.iter().enumerate() {
            let columns = source.read(block, &[1, 0]).unwrap();
            assert_eq!((columns[0].records(), columns[1].records()), (records as usize, records as usize));
            assert_eq!(columns[1].record(0), vec![2 * block as u8; 3 << 20]);
        }
    }

    proptest! {
        #[test]
        fn what_is_written_is_read(
            rows in proptest::collection::vec((any::<i64>(), proptest::collection::vec(any::<u8>(), 0..1200)), 1..6),
        ) {
            let record = |(key, (class, data)): (usize, &(i64, Vec<u8>))| {
                [member(b'0', &format!("{key}.x"), data), member(b'0', &format!("{key}.cls"), class.to_string().as_bytes())]
            };
            let members: Vec<_> = rows.iter().enumerate().flat_map(record).collect();
            let columns = read(&archive(&members)).unwrap();
            for (at, (class, data)) in rows.iter().enumerate() {
                prop_assert_eq!(columns[0].record(at), class.to_le_bytes());
                prop_assert_eq!(columns[1].record(at), &data[..]);
            }
        }

        #[test]
        fn damaged_files_never_panic(
            edits in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..5),
            signs in any::<bool>(),
            cut in 0usize..6000,
        ) {
            let mut bytes = archive(&[
                pax(&[("path", "1.a"), ("size", "3")]),
                member(b'0', "x", b"abc"),
                member(b'L', "long", b"1.cls"),
                member(b'0', "x", b"12"),
            ]);
            for (at, value) in edits {
                let at = at.index(bytes.len());
                bytes[at] = value;
                if signs && at % (2 * UNIT) < UNIT {
                    let begin = at / UNIT * UNIT;
                    signed(&mut bytes[begin..begin + UNIT]);
                }
            }
            bytes.truncate(cut);
            let _ = read(&bytes);
        }
    }
}
