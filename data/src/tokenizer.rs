//! Tokenizers: files `tokenizer.json` of Hugging Face's `tokenizers`, by which a text becomes the
//! numbers of its tokens.
//!
//! A process keeps the tokenizers in use, and those that it read last, by the SHA-256 of their
//! files. So each file is parsed once for all data files, data sets and workers, and what is kept
//! never changes. Everything here runs in the caller's thread.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use proto::artifact::sha256_hex;
use tokenizers::{PaddingStrategy, PostProcessor as _};

use crate::guarded::guarded;

/// Largest file in bytes. The tokenizers of today have up to 40 MB.
const BYTES_MAX: usize = 256 << 20;

/// Most tokens to which a file may fill up a text. The package takes 100 bytes for each of them.
/// The transform `pad` fills up to more.
const PADDED_MAX: usize = 1 << 20;

/// Tokenizers that a process keeps although nothing uses them.
const UNUSED_MAX: usize = 4;

/// A tokenizer.
pub struct Tokenizer {
    /// SHA-256 of the file in lower-case hex.
    sha256: String,
    inner: tokenizers::Tokenizer,
}

/// Tokenizers of this process.
struct Known {
    all: Vec<Weak<Tokenizer>>,
    /// Those that were read last.
    newest: VecDeque<Arc<Tokenizer>>,
}

static KNOWN: Mutex<Known> = Mutex::new(Known { all: Vec::new(), newest: VecDeque::new() });

impl Known {
    fn find(&self, sha256: &str) -> Option<Arc<Tokenizer>> {
        self.all.iter().filter_map(Weak::upgrade).find(|tokenizer| tokenizer.sha256 == sha256)
    }

    /// Keeps a tokenizer, and returns it. Returns the one of the same file instead, if another
    /// thread has parsed that file meanwhile.
    fn keep(&mut self, read: Tokenizer) -> Arc<Tokenizer> {
        if let Some(known) = self.find(&read.sha256) {
            return known;
        }
        let read = Arc::new(read);
        self.all.retain(|weak| weak.strong_count() > 0);
        self.all.push(Arc::downgrade(&read));
        self.newest.push_back(read.clone());
        if self.newest.len() > UNUSED_MAX {
            self.newest.pop_front();
        }
        read
    }
}

impl Tokenizer {
    /// Returns the tokenizer of a file's content.
    ///
    /// # Errors
    /// The content is no tokenizer, or one whose tokens are random.
    pub fn read(content: &[u8]) -> Result<Arc<Self>, String> {
        let sha256 = sha256_hex(content);
        if let Some(known) = Self::known(&sha256) {
            return Ok(known);
        }
        let read = Self { sha256, inner: parse(content)? };
        Ok(KNOWN.lock().unwrap_or_else(PoisonError::into_inner).keep(read))
    }

    /// Returns the tokenizer whose file has this SHA-256, if the process keeps it.
    pub fn known(sha256: &str) -> Option<Arc<Self>> {
        KNOWN.lock().unwrap_or_else(PoisonError::into_inner).find(sha256)
    }

    /// Returns the tokenizer of a file, whose content must have this SHA-256 if one is given.
    ///
    /// # Errors
    /// The file cannot be read, has another content, or is no tokenizer.
    pub(crate) fn open(file: &str, sha256: Option<&str>) -> Result<Arc<Self>, String> {
        if let Some(known) = sha256.and_then(Self::known) {
            return Ok(known);
        }
        let content = std::fs::read(file).map_err(|error| format!("{file}: {error}"))?;
        let found = sha256_hex(&content);
        if let Some(expected) = sha256.filter(|expected| **expected != found) {
            return Err(format!(
                "{file}: its SHA-256 is {found}, and was {expected} when the job was submitted; restore the file, or \
                 submit the job anew"
            ));
        }
        Self::read(&content).map_err(|reason| format!("{file}: {reason}"))
    }

    /// Returns the numbers of a text's tokens. `special` says whether those are there that the file
    /// adds at the begin and the end.
    ///
    /// # Errors
    /// The tokenizer has no token for a part of the text.
    pub(crate) fn encode(&self, text: &str, special: bool) -> Result<Vec<u32>, String> {
        let encoded = guarded(|| self.inner.encode_fast(text, special))?;
        Ok(encoded.get_ids().to_vec())
    }
}

impl fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tokenizer").field("sha256", &self.sha256).finish_non_exhaustive()
    }
}

fn parse(content: &[u8]) -> Result<tokenizers::Tokenizer, String> {
    // Threads of its own would add to those of `--data-threads`.
    tokenizers::utils::parallelism::set_parallelism(false);
    if content.len() > BYTES_MAX {
        return Err(format!("{} bytes, a tokenizer has at most {BYTES_MAX}", content.len()));
    }
    let advice = "save one in Python by `tokenizer.save(\"tokenizer.json\")` of the package `tokenizers`, or \
                  `tokenizer.backend_tokenizer.save(..)` of a fast one of `transformers`";
    let inner = guarded(|| tokenizers::Tokenizer::from_bytes(content))
        .map_err(|error| format!("no tokenizer.json ({error}); {advice}"))?;
    check_lengths(&inner)?;
    let json: serde_json::Value = serde_json::from_slice(content).map_err(|error| error.to_string())?;
    // Tokens that are drawn at random would differ between workers.
    for setting in ["dropout", "alpha"] {
        let share = json["model"][setting].as_f64().unwrap_or_default();
        if share != 0.0 {
            return Err(format!(
                "model.{setting} = {share} draws tokens at random, and every worker must make the same ones; set it to null"
            ));
        }
    }
    Ok(inner)
}

/// Checks lengths that the package checks only where a program sets them, and not in files.
fn check_lengths(tokenizer: &tokenizers::Tokenizer) -> Result<(), String> {
    if let Some(padding) = tokenizer.get_padding() {
        let fixed = match padding.strategy {
            PaddingStrategy::Fixed(length) => length,
            PaddingStrategy::BatchLongest => 0,
        };
        let length = fixed.max(padding.pad_to_multiple_of.unwrap_or(0));
        if length > PADDED_MAX {
            return Err(format!(
                "padding: it fills texts up to {length} tokens, at most {PADDED_MAX} are taken"
            ));
        }
    }
    if let Some(truncation) = tokenizer.get_truncation() {
        let (length, stride) = (truncation.max_length, truncation.stride);
        let added = tokenizer.get_post_processor().map_or(0, |processor| processor.added_tokens(false));
        if length.checked_sub(added).is_none_or(|room| stride > 0 && stride >= room) {
            return Err(format!(
                "truncation: max_length = {length} has no room for {added} special tokens and a stride of {stride}; \
                 raise max_length, or set stride to 0"
            ));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/tokens/bpe.json");

    fn parsed(sha256: &str) -> Tokenizer {
        Tokenizer { sha256: sha256.to_owned(), inner: parse(&std::fs::read(FILE).unwrap()).unwrap() }
    }

    #[test]
    fn a_file_that_two_threads_have_parsed_is_one_tokenizer() {
        let mut known = Known { all: Vec::new(), newest: VecDeque::new() };
        let first = known.keep(parsed("a"));
        assert!(Arc::ptr_eq(&first, &known.keep(parsed("a"))));
        assert!(Arc::ptr_eq(&first, &known.find("a").unwrap()));
        assert_eq!((known.all.len(), known.newest.len()), (1, 1));
    }

    #[test]
    fn the_newest_tokenizers_are_kept_although_nothing_uses_them() {
        let mut known = Known { all: Vec::new(), newest: VecDeque::new() };
        let used = known.keep(parsed("used"));
        for number in 0..=UNUSED_MAX {
            known.keep(parsed(&number.to_string()));
        }
        assert!(known.find("0").is_none());
        assert!(Arc::ptr_eq(&used, &known.find("used").unwrap()));
        assert!((1..=UNUSED_MAX).all(|number| known.find(&number.to_string()).is_some()));
    }
}
