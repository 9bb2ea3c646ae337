//! A column's values, contiguous and in the column's own type.
//!
//! ```text
//! fixed    [2 records, 3]      v00 v01 v02 v10 v11 v12
//! ragged   [2 records, any]    v00 v01 | v10 v11 v12        ends = [2, 5]
//! ```

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use proto::column::{ColumnSpec, ElementType};

use crate::cast::cast;
pub use crate::element::Element;
pub(crate) use crate::element::each_f64;

/// Alignment in bytes of a batch's columns. libtorch computes with memory of this alignment as with
/// its own, so that it may use a batch where it lies.
pub const ALIGNMENT: usize = 64;

#[derive(Clone, Copy, Debug, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C, align(64))]
struct Line([u8; ALIGNMENT]);

/// Bytes whose first one lies at a multiple of [`ALIGNMENT`]. They grow at their end.
#[derive(Clone, Default)]
pub struct Aligned {
    lines: Vec<Line>,
    len: usize,
}

impl Aligned {
    /// Returns no bytes, with room for `capacity`.
    pub fn with_capacity(capacity: usize) -> Self {
        Self { lines: Vec::with_capacity(capacity.div_ceil(ALIGNMENT)), len: 0 }
    }

    /// Returns `len` zeros.
    pub fn zeros(len: usize) -> Self {
        Self { lines: vec![<Line as bytemuck::Zeroable>::zeroed(); len.div_ceil(ALIGNMENT)], len }
    }

    /// Appends `len` zeros, and returns them for writing.
    pub fn grow(&mut self, len: usize) -> &mut [u8] {
        let begin = self.len;
        self.len += len;
        self.lines.resize(self.len.div_ceil(ALIGNMENT), <Line as bytemuck::Zeroable>::zeroed());
        let end = self.len;
        &mut bytemuck::cast_slice_mut(&mut self.lines)[begin..end]
    }

    /// Returns how many bytes of memory are taken.
    pub(crate) fn capacity(&self) -> usize {
        self.lines.capacity() * ALIGNMENT
    }

    /// Gives back memory that holds no bytes.
    pub(crate) fn shrink(&mut self) {
        self.lines.shrink_to_fit();
    }

    /// Appends bytes.
    pub fn extend(&mut self, bytes: &[u8]) {
        // At once: the line that the last bytes begin would double the memory.
        let lines = (self.len + bytes.len()).div_ceil(ALIGNMENT);
        self.lines.reserve(lines.saturating_sub(self.lines.len()));
        let mut rest = bytes;
        if self.len.is_multiple_of(ALIGNMENT) {
            let (lines, after) = bytes.as_chunks();
            self.extend_lines(lines.iter().copied());
            rest = after;
        }
        self.grow(rest.len()).copy_from_slice(rest);
    }

    /// Appends lines of bytes, without zeros in their place first.
    ///
    /// It is part of its caller, so that the compiler knows how many values make a line. Otherwise
    /// it takes twice as long.
    ///
    /// # Panics
    /// If a line is begun.
    #[inline(always)]
    pub(crate) fn extend_lines(&mut self, lines: impl ExactSizeIterator<Item = [u8; ALIGNMENT]>) {
        assert!(self.len.is_multiple_of(ALIGNMENT), "{} bytes end within a line", self.len);
        self.len += lines.len() * ALIGNMENT;
        self.lines.extend(lines.map(Line));
    }

    /// Drops all bytes from `len` on.
    pub(crate) fn truncate(&mut self, len: usize) {
        if len < self.len {
            // The next bytes that grow there must be zeros.
            self[len..].fill(0);
            self.len = len;
            self.lines.truncate(len.div_ceil(ALIGNMENT));
        }
    }
}

impl std::ops::Deref for Aligned {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.lines)[..self.len]
    }
}

impl std::ops::DerefMut for Aligned {
    fn deref_mut(&mut self) -> &mut [u8] {
        let len = self.len;
        &mut bytemuck::cast_slice_mut(&mut self.lines)[..len]
    }
}

impl fmt::Debug for Aligned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes", self.len)
    }
}

impl PartialEq for Aligned {
    fn eq(&self, other: &Self) -> bool {
        **self == **other
    }
}

/// Memory of a column's values.
#[derive(Clone, Debug)]
pub enum Memory {
    /// Memory of the column's own.
    Owned(Aligned),
    /// A part of bytes that others share: a file's, in its alignment, or values that a decoder
    /// made.
    File {
        /// Bytes of the file, or of the decoder.
        bytes: Arc<dyn FileBytes>,
        /// Part with the values.
        range: Range<usize>,
    },
}

/// The bytes of a file, mapped or in memory.
pub trait FileBytes: Send + Sync + fmt::Debug {
    /// Returns all bytes.
    fn bytes(&self) -> &[u8];

    /// Tells the system that parts will be read which lie anywhere. Default: all bytes are in
    /// memory.
    fn expect_parts(&self) {}

    /// Begins to read a part from the disk. Default: it is in memory.
    fn expect(&self, _range: Range<usize>) {}

    /// Returns the bytes of memory that only a column holds. Default: none, the file's owner holds
    /// them.
    fn owned_bytes(&self) -> usize {
        0
    }
}

/// Values that a decoder made, as the memory of one column.
#[derive(Debug)]
pub(crate) struct Decoded<T>(pub(crate) Vec<T>);

impl<T: Element + fmt::Debug + Send + Sync> FileBytes for Decoded<T> {
    fn bytes(&self) -> &[u8] {
        bytemuck::cast_slice(&self.0)
    }

    fn owned_bytes(&self) -> usize {
        size_of_val(self.0.as_slice())
    }
}

impl FileBytes for Aligned {
    fn bytes(&self) -> &[u8] {
        self
    }
}

impl FileBytes for Vec<u8> {
    fn bytes(&self) -> &[u8] {
        self
    }
}

/// Records that are copied from each column of a block.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Chosen<'a> {
    /// Their numbers.
    records: &'a [u64],
    /// Whether they lie one after the other.
    is_run: bool,
}

impl<'a> Chosen<'a> {
    pub(crate) fn new(records: &'a [u64]) -> Self {
        Self { records, is_run: records.windows(2).all(|pair| pair[0] + 1 == pair[1]) }
    }
}

/// Some records' values of one column.
#[derive(Clone, Debug)]
pub struct Column {
    spec: ColumnSpec,
    records: usize,
    /// Bytes of one record of a fixed column, or of one element of a ragged one.
    stride: usize,
    memory: Memory,
    /// End of each record of a ragged column, counted in elements of `shape`.
    ends: Option<Vec<u64>>,
    /// Records without a value of this column. Most columns have none.
    faults: Option<Box<Faults>>,
}

/// Descriptions of broken values that a column keeps. Later ones are called alike.
const BROKEN_DESCRIBED: usize = 100;

/// Records that have no value of a column. Zeros, or an empty list, stand in its place.
#[derive(Clone, Debug, Default, PartialEq)]
struct Faults {
    /// A bit for each record: its value is missing.
    missing: Vec<u64>,
    /// Records with a value that cannot be decoded, and what was found there.
    broken: BTreeMap<usize, Arc<str>>,
}

/// The reason why a record has no value of a column.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault<'a> {
    /// The file has none.
    Missing,
    /// It cannot be decoded. The text says where it is and what was found.
    Broken(&'a str),
}

impl fmt::Display for Fault<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing => f.write_str("there is no value"),
            Self::Broken(reason) => f.write_str(reason),
        }
    }
}

impl Column {
    /// Returns a column without records, with room for `records`.
    ///
    /// # Panics
    /// If the shape is larger than memory. Readers check shapes that come from files.
    pub fn with_capacity(spec: ColumnSpec, records: usize) -> Self {
        let stride = stride(&spec);
        let bytes = if spec.ragged { 0 } else { records.saturating_mul(stride) };
        let ends = spec.ragged.then(|| Vec::with_capacity(records));
        Self {
            spec,
            records: 0,
            stride,
            memory: Memory::Owned(Aligned::with_capacity(bytes)),
            ends,
            faults: None,
        }
    }

    /// Returns a column of fixed shape over the little-endian values of `records` records.
    ///
    /// # Panics
    /// If the bytes are not those of so many records, or the column is ragged.
    pub fn fixed(spec: ColumnSpec, records: usize, memory: Memory) -> Self {
        assert!(!spec.ragged, "the column {spec} is ragged");
        let (stride, len) = (stride(&spec), memory.bytes().len());
        assert_eq!(records.checked_mul(stride), Some(len), "bytes of {records} records of {spec}");
        Self { records, spec, stride, memory, ends: None, faults: None }
    }

    /// Returns a column of f32 over `[records, shape..]` values, row-major, which it copies.
    ///
    /// # Panics
    /// If there are more or fewer values.
    pub fn floats(name: &str, shape: &[usize], records: usize, values: &[f32]) -> Self {
        let mut memory = Aligned::with_capacity(size_of_val(values));
        memory.extend(bytemuck::cast_slice(values));
        Self::fixed(ColumnSpec::fixed(name, ElementType::F32, shape), records, Memory::Owned(memory))
    }

    /// Returns a ragged column over little-endian values. `ends` counts elements of `shape`.
    ///
    /// # Panics
    /// If the last end is not that of the values, an end is below the one before, or the column has
    /// a fixed shape.
    pub fn ragged(spec: ColumnSpec, memory: Memory, ends: Vec<u64>) -> Self {
        assert!(spec.ragged, "the column {spec} has a fixed shape");
        let (stride, len) = (stride(&spec), memory.bytes().len());
        let last = ends.last().copied().unwrap_or_default();
        assert!(ends.is_sorted() && last.checked_mul(stride as u64) == Some(len as u64), "ends for {spec}");
        Self { records: ends.len(), spec, stride, memory, ends: Some(ends), faults: None }
    }

    /// Returns the name, the type and the shape.
    pub const fn spec(&self) -> &ColumnSpec {
        &self.spec
    }

    /// Returns the number of records.
    pub const fn records(&self) -> usize {
        self.records
    }

    /// Returns all values as little-endian bytes.
    pub fn bytes(&self) -> &[u8] {
        self.memory.bytes()
    }

    /// Gives back memory that holds no values.
    pub(crate) fn shrink(&mut self) {
        if let Memory::Owned(bytes) = &mut self.memory {
            bytes.shrink();
        }
        if let Some(ends) = &mut self.ends {
            ends.shrink_to_fit();
        }
    }

    /// Returns the bytes of memory that the column owns.
    pub fn owned_bytes(&self) -> usize {
        let ends = self.ends.as_ref().map_or(0, |ends| ends.len() * size_of::<u64>());
        let faults = self.faults.as_ref().map_or(0, |faults| faults.bytes());
        ends + faults
            + match &self.memory {
                Memory::Owned(bytes) => bytes.capacity(),
                Memory::File { bytes, .. } => bytes.owned_bytes(),
            }
    }

    /// Returns the values of one record, as little-endian bytes.
    ///
    /// # Panics
    /// If there is no such record.
    pub fn record(&self, record: usize) -> &[u8] {
        let range = match &self.ends {
            None => record * self.stride..(record + 1) * self.stride,
            Some(ends) => {
                let begin = if record == 0 { 0 } else { ends[record - 1] as usize };
                begin * self.stride..ends[record] as usize * self.stride
            }
        };
        &self.bytes()[range]
    }

    /// Returns the end of each record of a ragged column, counted in elements of its shape.
    pub fn ends(&self) -> Option<&[u64]> {
        self.ends.as_deref()
    }

    /// Returns the values. `None`: they have another type, or lie unaligned in a file.
    pub fn values<T: Element>(&self) -> Option<&[T]> {
        (T::DTYPE == self.spec.dtype).then(|| bytemuck::try_cast_slice(self.bytes()).ok())?
    }

    /// Appends one record of a fixed column, as little-endian bytes.
    ///
    /// # Panics
    /// If the length is not that of one record, or the column lies in a file.
    pub fn push(&mut self, record: &[u8]) {
        match &mut self.ends {
            None => assert_eq!(record.len(), self.stride, "a record of {}", self.spec),
            Some(ends) => {
                assert!(record.len().is_multiple_of(self.stride), "a record of {}", self.spec);
                let before = ends.last().copied().unwrap_or_default();
                ends.push(before + (record.len() / self.stride) as u64);
            }
        }
        self.memory.owned().extend(record);
        self.records += 1;
    }

    /// Appends one record of a fixed column, and returns its bytes for writing. They are zeros.
    ///
    /// # Panics
    /// If the column is ragged or lies in a file.
    pub fn grow(&mut self) -> &mut [u8] {
        let stride = self.stride;
        self.room_for(1).grow(stride)
    }

    /// Appends one record whose values have the type `from`, as values of the column's type.
    ///
    /// # Errors
    /// The first value for which the column's type has no place, with that type. The record is
    /// appended nevertheless.
    ///
    /// # Panics
    /// If the number of values is not that of one record, or the column is ragged or lies in a
    /// file.
    pub(crate) fn grow_as(&mut self, from: ElementType, values: &[u8]) -> Result<(), (f64, ElementType)> {
        let dtype = self.spec.dtype;
        cast(from, values, dtype, self.grow()).map_err(|value| (value, dtype))
    }

    /// Returns whether [`extend_from`](Self::extend_from) takes records of `other`: both have
    /// records of one shape, each record of `other` has a value, and each possible value is one of
    /// this column's type.
    pub(crate) fn takes(&self, other: &Self) -> bool {
        use ElementType::{Bool, I8, I16, I32, I64, U8};
        let (from, to) = (other.spec.dtype, self.spec.dtype);
        let fits = from == to || to == I64 && matches!(from, Bool | U8 | I8 | I16 | I32);
        let is_fixed = self.ends.is_none() && other.ends.is_none();
        fits && is_fixed && self.spec.shape == other.spec.shape && other.faults.is_none()
    }

    /// Appends records of another column, of which this one [`takes`](Self::takes) records. The
    /// other column's first record has the number `first`.
    ///
    /// # Panics
    /// If `other` has no such record, or this column lies in a file.
    pub(crate) fn extend_from(&mut self, other: &Self, chosen: Chosen<'_>, first: u64) {
        let (stride, from, records) = (self.stride, other.bytes(), chosen.records);
        if self.spec.dtype != other.spec.dtype {
            for record in records {
                let values = other.record((record - first) as usize);
                self.grow_as(other.spec.dtype, values).expect("a type that fits");
            }
            return;
        }
        self.records += records.len();
        let to = self.memory.owned();
        match (records, stride) {
            ([], _) | (_, 0) => {}
            _ if chosen.is_run => {
                let begin = (records[0] - first) as usize * stride;
                to.extend(&from[begin..begin + records.len() * stride]);
            }
            (_, 1) => copy_rows::<1>(from, records, first, to),
            (_, 2) => copy_rows::<2>(from, records, first, to),
            (_, 4) => copy_rows::<4>(from, records, first, to),
            (_, 8) => copy_rows::<8>(from, records, first, to),
            _ => records
                .iter()
                .for_each(|record| to.extend(&from[(record - first) as usize * stride..][..stride])),
        }
    }

    /// Returns the memory of a fixed column, to which the values of so many more records are
    /// appended.
    ///
    /// # Panics
    /// If the column is ragged or lies in a file.
    pub(crate) fn room_for(&mut self, records: usize) -> &mut Aligned {
        assert!(self.ends.is_none(), "records of the ragged column {}", self.spec);
        self.records += records;
        self.memory.owned()
    }

    /// Returns the bytes of the last record of a fixed column, for writing.
    ///
    /// # Panics
    /// If there is none, or the column is ragged or lies in a file.
    pub(crate) fn last_mut(&mut self) -> &mut [u8] {
        assert!(self.ends.is_none() && self.records > 0, "the last record of {}", self.spec);
        let begin = (self.records - 1) * self.stride;
        &mut self.memory.owned()[begin..]
    }

    /// Gives a ragged column the fixed shape of records with `length` elements each. The shape gets
    /// no dimension for the length 1. A record of another length is broken; `describe` gets its
    /// number and its length.
    ///
    /// # Panics
    /// If the column has a fixed shape, or such a record is larger than memory.
    #[must_use]
    pub(crate) fn of_length(mut self, length: usize, describe: impl Fn(usize, u64) -> String) -> Self {
        let ends = self.ends.take().unwrap_or_else(|| panic!("the column {} has a fixed shape", self.spec));
        let begins = [0].into_iter().chain(ends.iter().copied());
        let lengths: Vec<u64> = begins.zip(&ends).map(|(begin, end)| end - begin).collect();
        let spec = self.spec.clone().of_length(length);
        if lengths.iter().all(|&found| found == length as u64) {
            return Self { faults: self.faults, ..Self::fixed(spec, self.records, self.memory) };
        }
        let mut fixed = Self::with_capacity(spec, self.records);
        fixed.faults = self.faults.take();
        let mut begin = 0;
        for (record, &found) in lengths.iter().enumerate() {
            let end = begin + found as usize * self.stride;
            let room = fixed.grow();
            if found == length as u64 {
                room.copy_from_slice(&self.memory.bytes()[begin..end]);
            } else if fixed.fault(record).is_none() {
                fixed.set_broken(record, || describe(record, found).into());
            }
            begin = end;
        }
        fixed
    }

    /// Appends a record that has no value of this column.
    ///
    /// # Panics
    /// If the column lies in a file.
    pub(crate) fn push_missing(&mut self) {
        self.push_nothing();
        self.set_missing(self.records - 1);
    }

    /// Appends a record whose value cannot be decoded. `describe` says where it is and what was
    /// found.
    ///
    /// # Panics
    /// If the column lies in a file.
    pub(crate) fn push_broken(&mut self, describe: impl FnOnce() -> Arc<str>) {
        self.push_nothing();
        self.set_broken(self.records - 1, describe);
    }

    fn push_nothing(&mut self) {
        if self.ends.is_some() {
            self.push(&[]);
        } else {
            self.grow();
        }
    }

    /// Says that a record has no value of this column. What lies in its place does not count.
    pub(crate) fn set_missing(&mut self, record: usize) {
        let missing = &mut self.faults.get_or_insert_default().missing;
        let (word, bit) = (record / 64, record % 64);
        if missing.len() <= word {
            missing.resize(word + 1, 0);
        }
        missing[word] |= 1 << bit;
    }

    /// Says that a record's value cannot be decoded. What lies in its place does not count.
    /// `describe` says where it is and what was found.
    pub(crate) fn set_broken(&mut self, record: usize, describe: impl FnOnce() -> Arc<str>) {
        let broken = &mut self.faults.get_or_insert_default().broken;
        if broken.contains_key(&record) {
            return;
        }
        let reason = match broken.len() < BROKEN_DESCRIBED {
            true => describe(),
            false => Arc::from("a value that cannot be decoded, like many before it"),
        };
        broken.insert(record, reason);
    }

    /// Returns why a record has no value of this column. `None`: it has one.
    pub(crate) fn fault(&self, record: usize) -> Option<Fault<'_>> {
        let faults = self.faults.as_deref()?;
        if let Some(reason) = faults.broken.get(&record) {
            return Some(Fault::Broken(reason));
        }
        let word = faults.missing.get(record / 64).copied().unwrap_or_default();
        ((word >> (record % 64)) & 1 == 1).then_some(Fault::Missing)
    }

    /// Drops the records from number `records` on.
    ///
    /// # Panics
    /// If the column is ragged or lies in a file.
    pub(crate) fn truncate(&mut self, records: usize) {
        assert!(self.ends.is_none(), "records of the ragged column {}", self.spec);
        if records < self.records {
            self.records = records;
            self.memory.owned().truncate(records * self.stride);
        }
    }

    /// Makes copies of the column share its values, instead of each having its own.
    #[must_use]
    pub(crate) fn shared(mut self) -> Self {
        if let Memory::Owned(bytes) = self.memory {
            let range = 0..bytes.len();
            self.memory = Memory::File { bytes: Arc::new(bytes), range };
        }
        self
    }

    /// Gives the column another name.
    #[must_use]
    pub fn named(mut self, name: impl Into<String>) -> Self {
        self.spec.name = name.into();
        self
    }

    /// Gives the records of a fixed column another shape with as many elements.
    ///
    /// # Panics
    /// If the number of elements differs.
    #[must_use]
    pub fn shaped(mut self, shape: Vec<usize>) -> Self {
        let spec = ColumnSpec { shape, ..self.spec.clone() };
        assert_eq!(spec.width(), self.spec.width(), "{} as {spec}", self.spec);
        self.spec = spec;
        self
    }
}

impl PartialEq for Column {
    fn eq(&self, other: &Self) -> bool {
        self.spec == other.spec
            && self.ends == other.ends
            && self.bytes() == other.bytes()
            && self.faults == other.faults
    }
}

impl Faults {
    /// Bytes of memory, about.
    fn bytes(&self) -> usize {
        let described: usize = self.broken.values().take(BROKEN_DESCRIBED).map(|reason| reason.len()).sum();
        size_of_val(self.missing.as_slice()) + 64 * self.broken.len() + described
    }
}

impl Memory {
    fn bytes(&self) -> &[u8] {
        match self {
            Self::Owned(bytes) => bytes,
            Self::File { bytes, range } => &bytes.bytes()[range.clone()],
        }
    }

    fn owned(&mut self) -> &mut Aligned {
        match self {
            Self::Owned(bytes) => bytes,
            Self::File { .. } => panic!("values of a file do not grow"),
        }
    }
}

/// Appends records of `N` bytes, of which `from` has number `first` and those after it.
fn copy_rows<const N: usize>(from: &[u8], records: &[u64], first: u64, to: &mut Aligned) {
    let from = from.as_chunks::<N>().0;
    let copy = |places: &mut [u8], records: &[u64]| {
        let places = places.as_chunks_mut::<N>().0.iter_mut();
        places.zip(records).for_each(|(place, record)| *place = from[(record - first) as usize]);
    };
    let mut rest = records;
    if to.len.is_multiple_of(ALIGNMENT) {
        let lines = records.chunks_exact(ALIGNMENT / N);
        rest = lines.remainder();
        to.extend_lines(lines.map(|records| {
            let mut line = [0; ALIGNMENT];
            copy(&mut line, records);
            line
        }));
    }
    copy(to.grow(rest.len() * N), rest);
}

/// Returns the bytes of a record's values, or of one element of a ragged column.
///
/// # Panics
/// If they are more than memory has.
fn stride(spec: &ColumnSpec) -> usize {
    let width = spec.width().unwrap_or_else(|| panic!("{spec} is larger than memory"));
    width * spec.dtype.size()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_holds_no_values_is_given_back() {
        let mut column = Column::with_capacity(ColumnSpec::ragged("x", ElementType::U8, []), 0);
        (0..100).for_each(|at| column.push(&vec![at; 1000]));
        column.shrink();
        let taken = column.owned_bytes();
        assert!((100_800..100_800 + ALIGNMENT).contains(&taken), "{taken}");
        assert_eq!((column.record(0), column.record(99)), (&[0; 1000][..], &[99; 1000][..]));
    }

    #[test]
    fn columns_of_a_batch_begin_at_an_aligned_address() {
        for records in [1, 3, 1000] {
            let mut column = Column::with_capacity(ColumnSpec::fixed("x", ElementType::I16, [3]), 1);
            for record in 0..records {
                column.push(bytemuck::cast_slice(&[record as i16, 1, 2]));
            }
            assert!(column.bytes().as_ptr().addr().is_multiple_of(ALIGNMENT));
            assert_eq!(column.values::<i16>().unwrap()[3 * (records - 1)], records as i16 - 1);
            assert_eq!((column.records(), column.bytes().len()), (records, 6 * records));
        }
    }

    #[test]
    fn bytes_that_come_at_once_take_their_own_memory_alone() {
        let bytes = vec![7; 100 * ALIGNMENT + 1];
        let mut one = Aligned::with_capacity(0);
        one.extend(&bytes);
        assert_eq!(one.capacity(), 101 * ALIGNMENT);
        assert!(*one == bytes[..]);
    }

    #[test]
    fn a_ragged_column_keeps_the_end_of_each_record() {
        let mut column = Column::with_capacity(ColumnSpec::ragged("t", ElementType::I32, [2]), 3);
        for record in [&[1, 2][..], &[], &[3, 4, 5, 6]] {
            column.push(bytemuck::cast_slice::<i32, u8>(record));
        }
        assert_eq!(column.ends(), Some(&[1, 1, 3][..]));
        assert_eq!(column.record(2), bytemuck::cast_slice::<i32, u8>(&[3, 4, 5, 6]));
        assert!(column.record(1).is_empty());
        let bytes: Vec<u8> = column.bytes().to_vec();
        let range = 0..bytes.len();
        let file = Memory::File { bytes: Arc::new(bytes), range };
        assert_eq!(Column::ragged(column.spec().clone(), file, vec![1, 1, 3]), column);
    }

    #[test]
    #[should_panic(expected = "a record of `x` f32[2]")]
    fn a_record_of_another_length_is_refused() {
        Column::with_capacity(ColumnSpec::fixed("x", ElementType::F32, [2]), 1).push(&[0; 4]);
    }

    #[test]
    fn records_without_a_value_are_known_by_their_number() {
        let mut column = Column::with_capacity(ColumnSpec::fixed("x", ElementType::U8, [2]), 70);
        for record in 0..70 {
            match record {
                0 | 65 => column.push_missing(),
                66 => column.push_broken(|| "line 67: no number".into()),
                _ => column.push(&[record, 1]),
            }
        }
        let faults: Vec<_> = (0..70).filter_map(|record| Some((record, column.fault(record)?))).collect();
        let broken = Fault::Broken("line 67: no number");
        assert_eq!(faults, [(0, Fault::Missing), (65, Fault::Missing), (66, broken)]);
        assert_eq!((column.record(66), column.record(67)), (&[0, 0][..], &[67, 1][..]));
        let mut texts = Column::with_capacity(ColumnSpec::ragged("t", ElementType::U8, []), 2);
        texts.push_missing();
        texts.push(b"Ann");
        assert_eq!((texts.fault(0), texts.fault(1)), (Some(Fault::Missing), None));
        assert_eq!((texts.record(0), texts.record(1)), (&b""[..], &b"Ann"[..]));
    }

    #[test]
    fn a_column_does_not_keep_a_text_for_each_of_many_broken_values() {
        let mut column = Column::with_capacity(ColumnSpec::fixed("x", ElementType::U8, []), 1);
        for record in 0..BROKEN_DESCRIBED + 2 {
            column.push_broken(|| format!("line {record}").into());
        }
        assert_eq!(column.fault(BROKEN_DESCRIBED - 1), Some(Fault::Broken("line 99")));
        let later = "a value that cannot be decoded, like many before it";
        assert_eq!(column.fault(BROKEN_DESCRIBED + 1), Some(Fault::Broken(later)));
    }

    #[test]
    fn dropped_records_leave_zeros_for_the_next_ones() {
        let mut column = Column::with_capacity(ColumnSpec::fixed("x", ElementType::U8, [40]), 2);
        (0..4).for_each(|record| column.push(&[record + 1; 40]));
        column.truncate(1);
        column.truncate(3);
        assert_eq!((column.records(), column.bytes()), (1, &[1; 40][..]));
        assert_eq!(column.grow(), [0; 40]);
        column.grow();
        assert_eq!(column.bytes()[40..], [0; 80]);
    }

    #[test]
    fn records_of_any_width_are_copied_together_as_one_by_one() {
        for width in [0, 1, 2, 3, 4, 5, 8, 70] {
            let spec = ColumnSpec::fixed("x", ElementType::U8, [width]);
            let mut from = Column::with_capacity(spec.clone(), 5);
            (0..5).for_each(|record| from.push(&vec![record * 50; width]));
            let (mut together, mut alone) =
                (Column::with_capacity(spec.clone(), 4), Column::with_capacity(spec, 4));
            together.push(&vec![9; width]);
            alone.push(&vec![9; width]);
            assert!(together.takes(&from));
            for records in [&[14, 10, 10, 13][..], &[11, 12, 13], &[12], &[]] {
                together.extend_from(&from, Chosen::new(records), 10);
                records.iter().for_each(|record| alone.push(from.record((record - 10) as usize)));
                assert_eq!(together, alone, "{width}");
            }
        }
    }

    #[test]
    fn many_records_fill_whole_lines() {
        let mut from = Column::with_capacity(ColumnSpec::fixed("x", ElementType::I16, []), 500);
        (0..500i16).for_each(|value| from.push(&value.to_le_bytes()));
        for count in [31, 32, 33, 64, 100] {
            let records: Vec<u64> = (0..count).map(|at| at * 7 % 500).collect();
            let mut found = Column::with_capacity(from.spec().clone(), 0);
            found.extend_from(&from, Chosen::new(&records), 0);
            found.extend_from(&from, Chosen::new(&records), 0);
            let expected: Vec<i16> = records.iter().chain(&records).map(|&record| record as i16).collect();
            assert_eq!(found.values(), Some(expected.as_slice()), "{count}");
        }
    }

    #[test]
    fn integers_of_any_type_are_taken_as_classes() {
        for dtype in [ElementType::U8, ElementType::I8, ElementType::I16, ElementType::I32, ElementType::Bool]
        {
            let mut from = Column::with_capacity(ColumnSpec::fixed("y", dtype, []), 2);
            (0..2).for_each(|value| from.grow()[0] = value);
            let mut classes = Column::with_capacity(ColumnSpec::fixed("y", ElementType::I64, []), 2);
            assert!(classes.takes(&from) && !from.takes(&classes));
            classes.extend_from(&from, Chosen::new(&[6, 5, 6]), 5);
            assert_eq!(classes.values(), Some(&[1i64, 0, 1][..]));
        }
    }

    #[test]
    fn records_of_another_form_or_without_a_value_are_not_copied_together() {
        let column = |dtype, shape: &[usize]| {
            let mut column = Column::with_capacity(ColumnSpec::fixed("x", dtype, shape), 1);
            column.grow();
            column
        };
        let own = column(ElementType::F32, &[2]);
        assert!(own.takes(&column(ElementType::F32, &[2])));
        assert!(!own.takes(&column(ElementType::I32, &[2])) && !own.takes(&column(ElementType::F32, &[3])));
        let ragged = Column::with_capacity(ColumnSpec::ragged("x", ElementType::F32, [2]), 0);
        assert!(!own.takes(&ragged) && !ragged.takes(&own));
        let mut missing = column(ElementType::F32, &[2]);
        missing.set_missing(0);
        assert!(!own.takes(&missing));
    }
}
