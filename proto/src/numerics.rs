//! The numerics class of a worker: a name for how its arithmetic rounds.
//!
//! Two workers of different classes may give different bits for the same microbatch. Equal classes
//! are necessary for equal bits and do not prove them: the class is a hash of facts and of the
//! results of a fixed set of operations, not of every operation.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::ids::Version;
use crate::pb;

/// Longest name of a class, in bytes.
const CLASS_BYTES_MAX: usize = 64;

/// Longest text of facts, in bytes.
const FACTS_BYTES_MAX: usize = 512;

/// The numerics class of a worker, with the facts behind it for people.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Numerics {
    /// Name of the class: 1 to 64 lower-case letters, digits and `-`. Two workers with equal names
    /// are of one class.
    pub class: String,
    /// Facts that decide the class, for people. At most 512 bytes.
    pub facts: String,
}

impl Numerics {
    /// Computes the class of a worker from its facts and from the results of its fixed set of
    /// operations.
    pub fn computed(facts: &str, results: &[u8]) -> Self {
        let hash = crate::artifact::sha256_hex(&[facts.as_bytes(), &[0], results].concat());
        Self { class: hash[..12].to_owned(), facts: facts.to_owned() }
    }

    /// Returns the class of a worker that names none.
    pub fn unknown() -> Self {
        Self { class: "unknown".to_owned(), facts: "the worker says nothing of its arithmetic".to_owned() }
    }
}

/// Writes class and facts, as in `3fa94c1d22e0 (libtorch 2.11.0, ..)`.
impl fmt::Display for Numerics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.class, self.facts)
    }
}

impl From<Numerics> for pb::Numerics {
    fn from(Numerics { class, facts }: Numerics) -> Self {
        Self { class, facts }
    }
}

impl TryFrom<pb::Numerics> for Numerics {
    type Error = Error;

    fn try_from(pb::Numerics { class, facts }: pb::Numerics) -> Result<Self> {
        let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
        let wrong = |field, expected: &str, found: String| Error::Field {
            message: "Numerics",
            field,
            expected: expected.to_owned(),
            found,
        };
        if !(1..=CLASS_BYTES_MAX).contains(&class.len()) || !class.chars().all(plain) {
            let found = class.escape_debug().to_string();
            return Err(wrong("class", "1 to 64 lower-case letters, digits or `-`", found));
        }
        if facts.len() > FACTS_BYTES_MAX || facts.chars().any(char::is_control) {
            let found = facts.escape_debug().to_string();
            return Err(wrong("facts", "at most 512 bytes without control characters", found));
        }
        Ok(Self { class, facts })
    }
}

/// A numerics class and the version from which it computed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Since {
    /// First version from which the class computed.
    pub version: Version,
    /// Class of the workers.
    pub numerics: Numerics,
}

/// Adds to `history` that `numerics` computes from `version` on. Entries from `version` on are void
/// and removed.
pub fn note(history: &mut Vec<Since>, version: Version, numerics: &Numerics) {
    history.retain(|since| since.version < version);
    if history.last().is_none_or(|since| since.numerics.class != numerics.class) {
        history.push(Since { version, numerics: numerics.clone() });
    }
}

impl From<&Since> for pb::NumericsSince {
    fn from(Since { version, numerics }: &Since) -> Self {
        Self { version: version.get(), numerics: Some(numerics.clone().into()) }
    }
}

impl TryFrom<pb::NumericsSince> for Since {
    type Error = Error;

    fn try_from(since: pb::NumericsSince) -> Result<Self> {
        let numerics = crate::convert::required("NumericsSince", "numerics", since.numerics)?;
        Ok(Self { version: Version(since.version), numerics: numerics.try_into()? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn class(name: &str) -> Numerics {
        Numerics { class: name.to_owned(), facts: String::new() }
    }

    #[test]
    fn facts_and_results_both_decide_the_class() {
        let class = |facts, results: &[u8]| Numerics::computed(facts, results).class;
        assert_eq!(class("a", b"1"), class("a", b"1"));
        assert_ne!(class("a", b"1"), class("b", b"1"));
        assert_ne!(class("a", b"1"), class("a", b"2"));
        assert!(Numerics::try_from(pb::Numerics::from(Numerics::computed("a", b"1"))).is_ok());
    }

    #[test]
    fn a_class_that_nobody_could_type_is_refused() {
        for bad in ["", "A", "a b", "a\n", &"a".repeat(65)] {
            let message = pb::Numerics { class: bad.to_owned(), facts: String::new() };
            assert!(Numerics::try_from(message).is_err(), "{bad:?}");
        }
        let message = pb::Numerics { class: "a".to_owned(), facts: "\u{1b}[2J".to_owned() };
        assert!(Numerics::try_from(message).unwrap_err().to_string().contains("control characters"));
    }

    #[test]
    fn the_history_names_each_class_once_and_forgets_what_was_rewound() {
        let mut history = Vec::new();
        let mut noted = |version, name| {
            note(&mut history, Version(version), &class(name));
            history
                .iter()
                .map(|since| (since.version.get(), since.numerics.class.clone()))
                .collect::<Vec<_>>()
        };
        let expected = |list: &[(u64, &str)]| {
            list.iter().map(|&(version, name)| (version, name.to_owned())).collect::<Vec<_>>()
        };
        assert_eq!(noted(0, "a"), expected(&[(0, "a")]));
        assert_eq!(noted(7, "a"), expected(&[(0, "a")]));
        assert_eq!(noted(7, "b"), expected(&[(0, "a"), (7, "b")]));
        assert_eq!(noted(5, "b"), expected(&[(0, "a"), (5, "b")]), "rewound to 5");
        assert_eq!(noted(0, "b"), expected(&[(0, "b")]));
    }
}
