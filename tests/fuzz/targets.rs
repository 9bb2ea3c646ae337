//! All decoders of bytes from outside. `fuzz/` gives them to libFuzzer, and the tests beside this
//! file to a generator of their own.

use std::path::Path;

use bytes::Bytes;
use prost::Message as _;
use proto::checkpoint::data::Partition;
use proto::checkpoint::manifest::Manifest;
use proto::metrics::Evaluation;
use proto::pb;
use proto::spec::JobSpec;

/// A decoder that takes any bytes. It ignores errors, and must not panic.
pub(crate) type Target = (&'static str, fn(&[u8]));

/// Decoders that are not of data files.
const OTHERS: [Target; 8] = [
    ("chunks", |bytes| drop(net::bulk::messages::<pb::Chunks>(Bytes::copy_from_slice(bytes)))),
    ("evaluated", |bytes| drop(pb::Evaluated::decode(bytes).map(Evaluation::try_from))),
    ("job_file", job_file),
    ("job_json", |bytes| drop(std::str::from_utf8(bytes).map(JobSpec::from_json))),
    ("manifest", |bytes| drop(Manifest::decode("fuzzed", bytes))),
    ("manifest_with_checksum", manifest_with_checksum),
    ("partition", |bytes| drop(Partition::decode("fuzzed", bytes.len() as u64, bytes))),
    ("partition_with_length", partition_with_length),
];

/// Returns all decoders.
pub(crate) fn all() -> Vec<Target> {
    data::fuzz::TARGETS.into_iter().chain(OTHERS).collect()
}

fn job_file(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    let _ = proto::spec::parse(&text, Path::new("job.toml"), &[]);
}

/// Decodes the body of a manifest behind a checksum that fits.
fn manifest_with_checksum(body: &[u8]) {
    for format in 1..=3 {
        let begin = format!("{{\"format\":{format},\"crc32c\":\"{:08x}\",\"checkpoint\":", crc32c(body));
        let text = [begin.as_bytes(), body, b"}\n"].concat();
        if let Ok(manifest) = Manifest::decode("fuzzed", &text) {
            let again = Manifest::decode("fuzzed", manifest.encode().as_bytes());
            assert_eq!(again.as_ref(), Ok(&manifest), "a manifest that is read can be written");
        }
    }
}

/// Decodes the header of a partition behind a length that fits.
fn partition_with_length(text: &[u8]) {
    let header = [&(text.len() as u64).to_le_bytes()[..], text].concat();
    for values in [0, 4, 1 << 20] {
        let _ = Partition::decode("fuzzed", header.len() as u64 + values, &header);
    }
}

/// Returns the CRC-32C of bytes, bit by bit: neither side of a comparison should use the other's
/// code.
fn crc32c(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(u32::MAX, |crc, &byte| {
        (0..8).fold(crc ^ u32::from(byte), |crc, _| (crc >> 1) ^ (0x82F6_3B78 * (crc & 1)))
    })
}
