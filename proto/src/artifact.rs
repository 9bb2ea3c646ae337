//! Files of a job: the names that both ends know, and how files travel. A description (name, size,
//! SHA-256) goes first, then the content in slices.

use bytes::Bytes;
use sha2::{Digest, Sha256};

use crate::pb;

/// Name of a job's TorchScript module, whatever the file is called on the user's disk. The exported
/// module has this name too, with trained weights.
pub const SCRIPT: &str = "model.pt";

/// Name of the weights file of a job with `model.initial`.
pub const INITIAL: &str = "initial.safetensors";

/// Returns the name of the file of a tokenizer with this SHA-256 in hex.
///
/// ```
/// let name = proto::artifact::tokenizer("e3b0c44298fc1c149afb");
/// assert_eq!(name, "tokenizer-e3b0c44298fc1c14.json");
/// ```
pub fn tokenizer(sha256: &str) -> String {
    format!("{TOKENIZER}{}.json", sha256.get(..16).unwrap_or(sha256))
}

/// Returns whether a file of a job is a tokenizer.
pub fn is_tokenizer(name: &str) -> bool {
    name.starts_with(TOKENIZER)
}

/// Begin of the name of each file of a tokenizer.
const TOKENIZER: &str = "tokenizer-";

/// Content bytes of one message, at most.
pub const SLICE_BYTES: usize = 1 << 20;

/// Returns the name, size and hash of a file.
pub fn describe(name: &str, content: &[u8]) -> pb::Artifact {
    pb::Artifact { name: name.to_owned(), size: content.len() as u64, sha256: sha256_hex(content) }
}

/// Returns the SHA-256 of `content` in lower-case hex.
///
/// ```
/// assert!(proto::artifact::sha256_hex(b"").starts_with("e3b0c442"));
/// ```
pub fn sha256_hex(content: &[u8]) -> String {
    hex(&Sha256::digest(content))
}

/// Returns `bytes` in lower-case hex.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Cuts `content` into slices of [`SLICE_BYTES`] without copying it. The last slice may be shorter.
pub fn slices(content: &Bytes) -> impl Iterator<Item = Bytes> + use<> {
    let content = content.clone();
    (0..content.len())
        .step_by(SLICE_BYTES)
        .map(move |at| content.slice(at..content.len().min(at + SLICE_BYTES)))
}
