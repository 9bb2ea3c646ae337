//! The tokens that a server accepts: a list of hashes, so that a reader of the list cannot make
//! calls.
//!
//! ```text
//! [[token]]
//! name = "anna"              # bearer, in logs; two tokens of one name share its limits
//! role = "submit"            # read, submit, operate; script; worker, ps, master
//! sha256 = "9f86d081884c..." # of the token, 64 hex digits
//! jobs_max = 4               # jobs of that name that have not ended; absent: the master's limit
//! artifact_bytes_max = 1000  # bytes of the files of those jobs; absent: the master's limit
//! scripts = true             # may send scripts, whose code agents run; absent: no
//! ```
//!
//! A token is 32 random bytes in hex, so it cannot be guessed, and a fast hash is as good as a slow
//! one. A shown token is hashed and compared with the whole list in constant time, so the time does
//! not tell which entry matched.

use std::sync::Arc;

use proto::artifact::sha256_hex;
use serde::Deserialize;
use sha2::{Digest as _, Sha256};
use subtle::{ConditionallySelectable as _, ConstantTimeEq as _};

use super::table::TokenRole;

/// Most entries of one list.
const TOKENS_MAX: usize = 10_000;

/// Shortest token in bytes that a client shows. Shorter ones could be guessed.
const TOKEN_BYTES_MIN: usize = 16;

/// Longest token in bytes that a client shows.
const TOKEN_BYTES_MAX: usize = 512;

/// One entry of a list of tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Token {
    /// Name of the bearer.
    pub name: String,
    /// TokenRole of the bearer.
    pub role: TokenRole,
    /// Most jobs of this name that have not ended.
    pub jobs_max: Option<u64>,
    /// Most bytes of the files of those jobs.
    pub artifact_bytes_max: Option<u64>,
    /// Whether the bearer may send scripts. Agents run the code in them.
    pub scripts: bool,
    sha256: [u8; 32],
}

/// A list of tokens.
#[derive(Clone, Debug, Default)]
pub struct Tokens(Vec<Arc<Token>>);

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default)]
    token: Vec<Entry>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    name: String,
    role: TokenRole,
    sha256: String,
    jobs_max: Option<u64>,
    artifact_bytes_max: Option<u64>,
    #[serde(default)]
    scripts: bool,
}

impl Tokens {
    /// Reads a list of tokens.
    ///
    /// # Errors
    /// The text is malformed; the error says where.
    pub fn parse(text: &str) -> Result<Self, String> {
        let file: File = toml::from_str(text).map_err(|error| error.to_string().trim().to_owned())?;
        if file.token.is_empty() {
            return Err("no [[token]] in it, so nobody could call; `ebb certs token` makes one".to_owned());
        }
        if file.token.len() > TOKENS_MAX {
            return Err(format!("{} tokens, at most {TOKENS_MAX} are taken", file.token.len()));
        }
        let mut tokens: Vec<Arc<Token>> = Vec::with_capacity(file.token.len());
        for Entry { name, role, sha256, jobs_max, artifact_bytes_max, scripts } in file.token {
            if !is_name(&name) {
                return Err(format!(
                    "token `{}`: the name must be 1 to 64 letters, digits, `.`, `_`, `-` or `@`",
                    name.escape_debug()
                ));
            }
            let sha256 =
                digest(&sha256).ok_or_else(|| format!("token `{name}`: sha256 is not 64 hex digits"))?;
            if scripts && !role.may_send_scripts() {
                return Err(format!(
                    "token `{name}`: scripts = true is for the roles submit and operate; this one is `{role}`"
                ));
            }
            if tokens.iter().any(|other| other.sha256 == sha256) {
                return Err(format!("token `{name}`: the same token is in the list twice"));
            }
            tokens.push(Arc::new(Token { name, role, jobs_max, artifact_bytes_max, scripts, sha256 }));
        }
        Ok(Self(tokens))
    }

    /// Returns the entry of a shown token. The search takes equally long for good and bad tokens.
    pub fn find(&self, shown: &[u8]) -> Option<Arc<Token>> {
        let shown: [u8; 32] = Sha256::digest(shown).into();
        let mut found = 0u64;
        for (index, token) in (1u64..).zip(&self.0) {
            found.conditional_assign(&index, token.sha256.ct_eq(&shown));
        }
        let index = usize::try_from(found).ok()?.checked_sub(1)?;
        self.0.get(index).cloned()
    }

    /// Returns the number of tokens.
    pub const fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns whether the list is empty.
    pub const fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// Returns the lines of a list for one token.
pub fn entry(
    name: &str,
    role: TokenRole,
    token: &str,
    jobs_max: Option<u64>,
    bytes_max: Option<u64>,
    scripts: bool,
) -> String {
    let mut text = format!(
        "[[token]]\nname = \"{name}\"\nrole = \"{role}\"\nsha256 = \"{}\"\n",
        sha256_hex(token.as_bytes())
    );
    text.extend(jobs_max.map(|max| format!("jobs_max = {max}\n")));
    text.extend(bytes_max.map(|max| format!("artifact_bytes_max = {max}\n")));
    text.extend(scripts.then_some("scripts = true\n"));
    text
}

/// Writes `random` bytes as a token.
pub fn written(random: [u8; 32]) -> String {
    format!("ebb-{}", proto::artifact::hex(&random))
}

/// Returns whether a token may have this name.
pub fn is_name(name: &str) -> bool {
    let fine = |byte: u8| byte.is_ascii_alphanumeric() || b"._-@".contains(&byte);
    (1..=64).contains(&name.len()) && name.bytes().all(fine)
}

/// Returns the token in a file: its only line.
///
/// # Errors
/// The file has something else; the error says what.
pub(super) fn from_file(text: &str) -> Result<&str, String> {
    let token = text.trim();
    if !(TOKEN_BYTES_MIN..=TOKEN_BYTES_MAX).contains(&token.len()) {
        return Err(format!(
            "{} bytes; expected a token of {TOKEN_BYTES_MIN} to {TOKEN_BYTES_MAX}, as `ebb certs token` makes it",
            token.len()
        ));
    }
    match token.bytes().all(|byte| byte.is_ascii_graphic()) {
        true => Ok(token),
        false => Err("more than one line, or letters that no token has".to_owned()),
    }
}

fn digest(hex: &str) -> Option<[u8; 32]> {
    let mut bytes = [0; 32];
    if hex.len() != 64 || !hex.bytes().all(|digit| digit.is_ascii_hexdigit()) {
        return None;
    }
    for (byte, at) in bytes.iter_mut().zip((0..).step_by(2)) {
        *byte = u8::from_str_radix(&hex[at..at + 2], 16).ok()?;
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ANNA: &str = "anna's token, long enough";

    fn list() -> String {
        let worker = entry("gpu-1", TokenRole::Worker, "a worker's token", None, None, false);
        format!("{}\n{worker}", entry("anna", TokenRole::Submit, ANNA, Some(4), Some(1000), true))
    }

    #[test]
    fn a_token_is_found_by_itself_alone() {
        let tokens = Tokens::parse(&list()).unwrap();
        assert_eq!((tokens.len(), tokens.is_empty()), (2, false));
        let anna = tokens.find(ANNA.as_bytes()).unwrap();
        assert_eq!((anna.name.as_str(), anna.role), ("anna", TokenRole::Submit));
        assert_eq!((anna.jobs_max, anna.artifact_bytes_max), (Some(4), Some(1000)));
        let worker = tokens.find(b"a worker's token").unwrap();
        assert_eq!((worker.role, worker.scripts, anna.scripts), (TokenRole::Worker, false, true));
        for wrong in ["", "anna", &ANNA[1..], &format!("{ANNA} "), &sha256_hex(ANNA.as_bytes())] {
            assert!(tokens.find(wrong.as_bytes()).is_none(), "{wrong}");
        }
    }

    #[test]
    fn a_list_holds_no_token() {
        assert!(!list().contains(ANNA));
    }

    #[test]
    fn a_wrong_list_is_refused_with_what_is_wrong() {
        let twice = format!("{}{}", list(), entry("anna2", TokenRole::Read, ANNA, None, None, false));
        for (text, expected) in [
            (String::new(), "no [[token]]"),
            (list().replace("submit", "root"), "root"),
            (list().replace("jobs_max", "jobs"), "jobs"),
            (list().replace("anna", "an na"), "the name must be"),
            (list().replace("sha256 = \"", "sha256 = \"0"), "64 hex digits"),
            (list().replace("role = \"submit\"", "role = \"read\""), "scripts = true is for the roles"),
            (twice, "twice"),
        ] {
            let error = Tokens::parse(&text).unwrap_err();
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn a_token_file_is_one_line() {
        let token = written([7; 32]);
        assert_eq!(from_file(&format!("{token}\n")), Ok(token.as_str()));
        for wrong in ["", "short", "two words that are long enough", &"x".repeat(513)] {
            assert!(from_file(wrong).is_err(), "{wrong}");
        }
    }
}
