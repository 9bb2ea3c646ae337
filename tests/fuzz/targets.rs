//! All decoders of bytes from outside. `fuzz/` gives them to libFuzzer, and the tests beside this
//! file to a generator of their own.

use std::path::{Component, Path};

use bytes::Bytes;
use net::security::tokens::Tokens;
use proto::checkpoint::Error;
use proto::checkpoint::data::Partition;
use proto::checkpoint::manifest::{FORMAT, Manifest};
use proto::pb;
use proto::requirements::Requirements;
use proto::spec::JobSpec;

use crate::messages;

/// A decoder that takes any bytes, and must not panic. It returns whether it read them to the end
/// without an error.
pub(crate) type Target = (&'static str, data::fuzz::Target);

/// Size of a file in which every header of a partition has its values.
const LONG: u64 = 1 << 40;

/// Decoders that are not of data files.
const OTHERS: [Target; 17] = [
    ("bundle", bundle),
    ("chunks", |bytes| net::bulk::messages::<pb::Chunks>(Bytes::copy_from_slice(bytes)).is_ok()),
    ("evaluated", messages::evaluated),
    ("job_file", job_file),
    ("job_json", |bytes| std::str::from_utf8(bytes).is_ok_and(|text| JobSpec::from_json(text).is_ok())),
    ("manifest", |bytes| Manifest::decode("fuzzed", bytes).is_ok()),
    ("manifest_with_checksum", manifest_with_checksum),
    ("numerics", messages::numerics),
    ("open", messages::open),
    ("partition", partition),
    ("partition_with_length", partition_with_length),
    ("pull", messages::pull),
    ("push", messages::push),
    ("pushed", messages::pushed),
    ("record", master::fuzz::record),
    ("requirements", requirements),
    ("token_list", |bytes| std::str::from_utf8(bytes).is_ok_and(|text| Tokens::parse(text).is_ok())),
];

/// Returns all decoders.
pub(crate) fn all() -> Vec<Target> {
    data::fuzz::TARGETS.into_iter().chain(OTHERS).collect()
}

/// Decodes a bundle. What is read is written as the same bytes, and stays below its folder.
fn bundle(bytes: &[u8]) -> bool {
    let Ok(files) = proto::bundle::decode(bytes) else { return false };
    let plain = |part: Component<'_>| matches!(part, Component::Normal(_));
    assert!(files.iter().all(|file| Path::new(file.path).components().all(plain)));
    assert_eq!(proto::bundle::encode(files).as_deref(), Ok(bytes));
    true
}

/// Reads requirements. What is read is read as the same, and has no options but hashes.
fn requirements(bytes: &[u8]) -> bool {
    let Ok(read) = Requirements::parse(bytes) else { return false };
    let text = read.to_string();
    assert!(text.split_whitespace().all(|word| !word.starts_with('-') || word.starts_with("--hash=")));
    assert_eq!(Requirements::parse(text.as_bytes()), Ok(read));
    true
}

fn job_file(bytes: &[u8]) -> bool {
    let text = String::from_utf8_lossy(bytes);
    proto::spec::parse(&text, Path::new("job.toml"), &[]).is_ok()
}

/// Decodes the body of a manifest behind a checksum that fits.
fn manifest_with_checksum(body: &[u8]) -> bool {
    let mut is_read = false;
    for format in 1..=FORMAT {
        let begin = format!("{{\"format\":{format},\"crc32c\":\"{:08x}\",\"checkpoint\":", crc32c(body));
        let text = [begin.as_bytes(), body, b"}\n"].concat();
        if let Ok(manifest) = Manifest::decode("fuzzed", &text) {
            let again = Manifest::decode("fuzzed", manifest.encode().as_bytes());
            assert_eq!(again.as_ref(), Ok(&manifest), "a manifest that is read can be written");
            is_read = true;
        }
    }
    is_read
}

/// Decodes the header of a partition in a file that has nothing else, and in one as long as the
/// header says.
fn partition(header: &[u8]) -> bool {
    let decode = |file_bytes| Partition::decode("fuzzed", file_bytes, header);
    let _ = decode(header.len() as u64);
    match decode(LONG) {
        Err(Error::Truncated { expected_bytes, .. }) => decode(expected_bytes).is_ok(),
        other => other.is_ok(),
    }
}

/// Decodes the header of a partition behind a length that fits.
fn partition_with_length(text: &[u8]) -> bool {
    let header = [&(text.len() as u64).to_le_bytes()[..], text].concat();
    for values in [0, 4, 1 << 20] {
        let _ = Partition::decode("fuzzed", header.len() as u64 + values, &header);
    }
    partition(&header)
}

/// Returns the CRC-32C of bytes, bit by bit: neither side of a comparison should use the other's
/// code.
fn crc32c(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(u32::MAX, |crc, &byte| {
        (0..8).fold(crc ^ u32::from(byte), |crc, _| (crc >> 1) ^ (0x82F6_3B78 * (crc & 1)))
    })
}
