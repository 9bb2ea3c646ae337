//! Files of a job: the names that both ends know, and how files travel: described by name, size and SHA-256, then in slices.

use bytes::Bytes;
use sha2::{Digest, Sha256};

use crate::pb;

/// The TorchScript module of a job that has one, whatever it is called on the user's disk; exported, the same with trained weights.
pub const SCRIPT: &str = "model.pt";

/// The weights that a job with `model.initial` begins with.
pub const INITIAL: &str = "initial.safetensors";

/// Content bytes of one message.
pub const SLICE_BYTES: usize = 1 << 20;

/// Name, size and hash of a file.
pub fn describe(name: &str, content: &[u8]) -> pb::Artifact {
    pb::Artifact { name: name.to_owned(), size: content.len() as u64, sha256: sha256_hex(content) }
}

/// SHA-256 in lower-case hex.
///
/// ```
/// assert!(proto::artifact::sha256_hex(b"").starts_with("e3b0c442"));
/// ```
pub fn sha256_hex(content: &[u8]) -> String {
    hex(&Sha256::digest(content))
}

/// Bytes in lower-case hex.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The content in slices of [`SLICE_BYTES`]; no copy.
pub fn slices(content: &Bytes) -> impl Iterator<Item = Bytes> + use<> {
    let content = content.clone();
    (0..content.len())
        .step_by(SLICE_BYTES)
        .map(move |at| content.slice(at..content.len().min(at + SLICE_BYTES)))
}
