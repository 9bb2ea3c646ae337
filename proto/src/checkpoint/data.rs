//! The data file of one partition: a safetensors file with weights, slots, and the ledger in its
//! metadata.
//!
//! Each chunk and section has an entry of its own, so that a restore into another number of
//! partitions reads exactly the chunks that it needs:
//!
//! ```text
//! weights.1200/layer.0.weight@262144      weights of version 1200, from element 262144 on
//! slot.exp_avg/layer.0.weight@262144      the optimizer's slot beside them
//! ```
//!
//! A job with a delay computes its next steps from older versions, so the file has those too.
//! Entries lie one after the other in the order of the header.

use std::fmt;

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::{ALIGNED, AppliedSteps, Error, Result};
use crate::ids::{PartitionId, Step, Version};
use crate::tensor::DType;

/// Format that this program writes.
const FORMAT: u64 = 3;

/// Oldest format. Each file is written in the oldest format that has all of its fields, so that
/// older programs can read it.
const PLAIN: u64 = 1;

/// First format with `samples_skipped`.
const WITH_SKIPPED: u64 = 2;

/// First format with `overflows`.
const WITH_OVERFLOWS: u64 = 3;

/// Longest header in bytes: the limit of other readers of safetensors.
pub const HEADER_BYTES_MAX: u64 = 100_000_000;

const METADATA: &str = "__metadata__";

/// Header of a data file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Partition {
    /// Number of steps applied.
    pub version: Version,
    /// Partition whose values the file holds.
    pub partition: PartitionId,
    /// Number of partitions of the checkpoint.
    pub partitions: u32,
    /// Applied steps of the partition.
    pub applied: AppliedSteps,
    /// Entries after the header, in the order of the file.
    pub entries: Vec<Entry>,
}

/// Values of one chunk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Kind of the values.
    pub section: Section,
    /// Name of the chunk's tensor.
    pub tensor: String,
    /// The chunk's first element within the tensor.
    pub offset: usize,
    /// Type of the values.
    pub dtype: DType,
    /// Number of values.
    pub len: usize,
    /// CRC-32C of the values' bytes.
    pub crc32c: u32,
}

/// Kind of an entry's values.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Section {
    /// Weights of this version.
    Weights(Version),
    /// Optimizer slot of this name.
    Slot(String),
}

impl fmt::Display for Section {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Weights(version) => write!(f, "weights.{version}"),
            Self::Slot(name) => write!(f, "slot.{name}"),
        }
    }
}

impl Entry {
    /// Returns the entry's name in the file, `section/tensor@offset`.
    pub fn name(&self) -> String {
        format!("{}/{}@{}", self.section, self.tensor, self.offset)
    }

    /// Returns the size of the values in bytes; saturates.
    pub const fn bytes(&self) -> u64 {
        (self.len as u64).saturating_mul(self.dtype.size() as u64)
    }
}

/// Metadata of a safetensors file, which allows strings only.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Metadata {
    format: String,
    version: String,
    partition: String,
    partitions: String,
    watermark: String,
    applied_above: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    samples_skipped: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    overflows: Option<String>,
    crc32c: String,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Tensor {
    dtype: String,
    shape: Vec<usize>,
    data_offsets: [u64; 2],
}

impl Partition {
    /// Returns the size of all values after the header, in bytes; saturates.
    pub fn data_bytes(&self) -> u64 {
        self.entries.iter().fold(0, |sum: u64, entry| sum.saturating_add(entry.bytes()))
    }

    /// Encodes the header: its length, then JSON, padded so that the values begin at a multiple of
    /// [`ALIGNED`]. The length does not depend on the checksums.
    pub fn encode(&self) -> Bytes {
        let list = |numbers: &mut dyn Iterator<Item = String>| numbers.collect::<Vec<_>>().join(" ");
        let counted = |count: u64| Some(count).filter(|&count| count > 0).map(|count| count.to_string());
        let skipped = counted(self.applied.samples_skipped);
        let overflows = counted(self.applied.overflows);
        let format = match (&overflows, &skipped) {
            (Some(_), _) => WITH_OVERFLOWS,
            (None, Some(_)) => WITH_SKIPPED,
            (None, None) => PLAIN,
        };
        let metadata = Metadata {
            format: format.to_string(),
            version: self.version.to_string(),
            partition: self.partition.to_string(),
            partitions: self.partitions.to_string(),
            watermark: self.applied.watermark.to_string(),
            applied_above: list(&mut self.applied.above.iter().map(Step::to_string)),
            samples_skipped: skipped,
            overflows,
            crc32c: list(&mut self.entries.iter().map(|entry| format!("{:08x}", entry.crc32c))),
        };
        let json = |value| serde_json::to_value(value).expect("strings and numbers");
        let mut header = Map::from_iter([(METADATA.to_owned(), json(metadata))]);
        let mut at = 0;
        for entry in &self.entries {
            let end = at + entry.bytes();
            let dtype = dtype_name(entry.dtype).to_owned();
            let tensor = Tensor { dtype, shape: vec![entry.len], data_offsets: [at, end] };
            let tensor = serde_json::to_value(tensor).expect("strings and numbers");
            header.insert(entry.name(), tensor);
            at = end;
        }
        let mut text = serde_json::to_string(&header).expect("strings and numbers");
        let length = (8 + text.len()).next_multiple_of(ALIGNED) - 8;
        text.extend(std::iter::repeat_n(' ', length - text.len()));
        let mut bytes = (text.len() as u64).to_le_bytes().to_vec();
        bytes.extend_from_slice(text.as_bytes());
        bytes.into()
    }

    /// Returns the length of a file's header, including the 8 bytes of its length. `prefix` is the
    /// begin of the file, `file_bytes` its size.
    ///
    /// # Errors
    /// [`Error::Truncated`] when the file is shorter than its header, [`Error::Damaged`] when the
    /// length is above [`HEADER_BYTES_MAX`].
    pub fn header_bytes(file: &str, file_bytes: u64, prefix: &[u8]) -> Result<u64> {
        let Some(length) = prefix.first_chunk() else {
            let (file, found_bytes) = (file.to_owned(), prefix.len() as u64);
            return Err(Error::Truncated { file, expected_bytes: 8, found_bytes });
        };
        let length = u64::from_le_bytes(*length);
        if length > HEADER_BYTES_MAX {
            return Err(damaged(file, format!("a header of {length} bytes, at most {HEADER_BYTES_MAX}")));
        }
        if length + 8 > file_bytes {
            let file = file.to_owned();
            return Err(Error::Truncated { file, expected_bytes: length + 8, found_bytes: file_bytes });
        }
        Ok(length + 8)
    }

    /// Reads the header of a file of `file_bytes`, as [`encode`](Self::encode) wrote it.
    ///
    /// # Errors
    /// [`Error::Future`], [`Error::Truncated`], or [`Error::Damaged`] with what is wrong.
    pub fn decode(file: &str, file_bytes: u64, header: &[u8]) -> Result<Self> {
        let wrong = |what: String| damaged(file, format!("its header: {what}"));
        let bytes = Self::header_bytes(file, file_bytes, header)?;
        if bytes != header.len() as u64 {
            return Err(wrong(format!("{} bytes of {bytes}", header.len())));
        }
        let json = |error: serde_json::Error| wrong(error.to_string());
        let mut header: Map<String, Value> = serde_json::from_slice(&header[8..]).map_err(json)?;
        let metadata = header.shift_remove(METADATA).unwrap_or_default();
        let format = metadata.get("format").and_then(Value::as_str).and_then(|format| format.parse().ok());
        match format {
            Some(1..=FORMAT) => {}
            Some(found) if found > FORMAT => {
                return Err(Error::Future { file: file.to_owned(), found, known: FORMAT });
            }
            _ => return Err(wrong("no format; this is no partition of a checkpoint".to_owned())),
        }
        let metadata: Metadata = serde_json::from_value(metadata).map_err(json)?;
        let number = |text: &str| text.parse::<u64>().map_err(|_| wrong(format!("`{text}` is no number")));
        let small = |text: &str| text.parse::<u32>().map_err(|_| wrong(format!("`{text}` is no number")));
        let above = metadata.applied_above.split_whitespace().map(|step| number(step).map(Step));
        let applied = AppliedSteps {
            watermark: Step(number(&metadata.watermark)?),
            above: above.collect::<Result<_>>()?,
            samples_skipped: metadata.samples_skipped.as_deref().map_or(Ok(0), number)?,
            overflows: metadata.overflows.as_deref().map_or(Ok(0), number)?,
        };
        let checksums = metadata.crc32c.split_whitespace().map(|checksum| {
            u32::from_str_radix(checksum, 16).map_err(|_| wrong(format!("`{checksum}` is no checksum")))
        });
        let checksums = checksums.collect::<Result<Vec<_>>>()?;
        if checksums.len() != header.len() {
            return Err(wrong(format!("{} checksums for {} entries", checksums.len(), header.len())));
        }
        let mut at = 0;
        let mut entries = Vec::with_capacity(header.len());
        for ((name, tensor), crc32c) in header.into_iter().zip(checksums) {
            let tensor: Tensor = serde_json::from_value(tensor).map_err(json)?;
            let entry = entry(&name, &tensor, crc32c).ok_or_else(|| wrong(format!("entry `{name}`")))?;
            let end = at + entry.bytes();
            if tensor.data_offsets != [at, end] || end > file_bytes {
                return Err(wrong(format!("entry `{name}` lies at {:?}", tensor.data_offsets)));
            }
            at = end;
            entries.push(entry);
        }
        if bytes + at != file_bytes {
            return Err(Error::Truncated {
                file: file.to_owned(),
                expected_bytes: bytes + at,
                found_bytes: file_bytes,
            });
        }
        Ok(Self {
            version: Version(number(&metadata.version)?),
            partition: PartitionId(small(&metadata.partition)?),
            partitions: small(&metadata.partitions)?,
            applied,
            entries,
        })
    }
}

fn damaged(file: &str, what: String) -> Error {
    Error::Damaged { file: file.to_owned(), what }
}

const fn dtype_name(dtype: DType) -> &'static str {
    match dtype {
        DType::F32 => "F32",
        DType::I64 => "I64",
    }
}

fn entry(name: &str, tensor: &Tensor, crc32c: u32) -> Option<Entry> {
    let (section, rest) = name.split_once('/')?;
    let (tensor_name, offset) = rest.rsplit_once('@')?;
    let section = match section.split_once('.')? {
        ("weights", version) => Section::Weights(Version(version.parse().ok()?)),
        ("slot", name) => Section::Slot(name.to_owned()),
        _ => return None,
    };
    let dtype = [DType::F32, DType::I64].into_iter().find(|&dtype| dtype_name(dtype) == tensor.dtype)?;
    let [len] = tensor.shape[..] else { return None };
    // No sum of sizes overflows with this limit.
    let fits = (len as u64) < 1 << 48;
    let entry =
        Entry { section, tensor: tensor_name.to_owned(), offset: offset.parse().ok()?, dtype, len, crc32c };
    (fits && entry.name() == name).then_some(entry)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn entries() -> impl Strategy<Value = Vec<Entry>> {
        let section = prop_oneof![
            any::<u64>().prop_map(|version| Section::Weights(Version(version))),
            "[a-z_]{1,9}".prop_map(Section::Slot),
        ];
        let entry = (section, ".{1,12}", 0usize..1 << 40, any::<bool>(), 1usize..5000, any::<u32>())
            .prop_map(|(section, tensor, offset, integer, len, crc32c)| {
                let dtype = if integer { DType::I64 } else { DType::F32 };
                Entry { section, tensor, offset, dtype, len, crc32c }
            });
        proptest::collection::vec(entry, 0..9).prop_map(|mut entries| {
            entries.sort_by_key(Entry::name);
            entries.dedup_by_key(|entry| entry.name());
            entries
        })
    }

    fn partitions() -> impl Strategy<Value = Partition> {
        (
            any::<u64>(),
            any::<u32>(),
            any::<u32>(),
            any::<u64>(),
            proptest::collection::btree_set(any::<u64>(), 0..5),
            (0u64..3, 0u64..3),
            entries(),
        )
            .prop_map(
                |(
                    version,
                    partition,
                    partitions,
                    watermark,
                    above,
                    (samples_skipped, overflows),
                    entries,
                )| Partition {
                    version: Version(version),
                    partition: PartitionId(partition),
                    partitions,
                    applied: AppliedSteps {
                        watermark: Step(watermark),
                        above: above.into_iter().map(Step).collect(),
                        samples_skipped,
                        overflows,
                    },
                    entries,
                },
            )
    }

    fn decode(partition: &Partition, header: &[u8]) -> Result<Partition> {
        Partition::decode("p", partition.encode().len() as u64 + partition.data_bytes(), header)
    }

    proptest! {
        #[test]
        fn a_header_is_read_as_it_was_written(partition in partitions()) {
            prop_assert_eq!(decode(&partition, &partition.encode()).unwrap(), partition);
        }

        #[test]
        fn other_programs_can_read_the_file(partition in partitions()) {
            let mut file = partition.encode().to_vec();
            file.resize(file.len() + partition.data_bytes() as usize, 0);
            let (_, metadata) = safetensors::SafeTensors::read_metadata(&file).unwrap();
            prop_assert_eq!(metadata.tensors().len(), partition.entries.len());
        }

        #[test]
        fn any_bytes_are_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..200), file_bytes in any::<u64>()) {
            let _ = Partition::decode("p", file_bytes, &bytes);
            let mut framed = (bytes.len() as u64).to_le_bytes().to_vec();
            framed.extend(&bytes);
            let _ = Partition::decode("p", file_bytes, &framed);
        }

        #[test]
        fn a_flipped_byte_is_read_or_refused(partition in partitions(), at in any::<prop::sample::Index>(), flip in 1u8..) {
            let mut header = partition.encode().to_vec();
            let at = at.index(header.len());
            header[at] ^= flip;
            let _ = decode(&partition, &header);
        }

        #[test]
        fn a_truncated_header_is_refused(partition in partitions(), at in any::<prop::sample::Index>()) {
            let header = partition.encode();
            prop_assert!(decode(&partition, &header[..at.index(header.len())]).is_err());
        }
    }

    #[test]
    fn a_later_format_and_a_foreign_file_have_names_of_their_own() {
        let framed = |json: &str| {
            let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
            bytes.extend(json.as_bytes());
            let length = bytes.len() as u64;
            Partition::decode("p", length, &bytes).unwrap_err()
        };
        let future = framed(r#"{"__metadata__":{"format":"4","rows":"7"}}"#);
        assert_eq!(future, Error::Future { file: "p".to_owned(), found: 4, known: 3 });
        assert!(framed("{}").to_string().contains("this is no partition of a checkpoint"));
    }

    #[test]
    fn a_header_longer_than_its_file_takes_no_memory() {
        let error = Partition::header_bytes("p", 100, &u64::MAX.to_le_bytes()).unwrap_err();
        assert!(matches!(error, Error::Damaged { .. }), "{error}");
        let error = Partition::header_bytes("p", 100, &93u64.to_le_bytes()).unwrap_err();
        assert_eq!(error, Error::Truncated { file: "p".to_owned(), expected_bytes: 101, found_bytes: 100 });
    }
}
