//! Takes the values of secrets out of what a process says. Pure.
//!
//! `key=hunter2-and-more!` becomes `key=[secret KEY]!`. A value is found as it is. Another encoding
//! of it, such as Base64, is not.

use std::borrow::Cow;
use std::sync::Arc;

use proto::secret::lines;

/// The lines of a script's secrets, and what is shown in their place. Clones share them.
#[derive(Clone, Default)]
pub(crate) struct Redaction(Arc<[(String, String)]>);

impl std::fmt::Debug for Redaction {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Redaction").field(&self.0.len()).finish()
    }
}

impl Redaction {
    /// Creates the redaction of secrets with their names.
    pub(crate) fn new<'a>(secrets: impl IntoIterator<Item = (&'a str, &'a str)>) -> Self {
        let of_secret = |(name, value): (&'a str, &'a str)| {
            lines(value).map(move |line| (line.to_owned(), format!("[secret {name}]")))
        };
        let mut all: Vec<_> = secrets.into_iter().flat_map(of_secret).collect();
        // A secret may be a part of another one.
        all.sort_by_key(|(line, _)| std::cmp::Reverse(line.len()));
        Self(all.into())
    }

    /// Returns `line` without secrets.
    pub(crate) fn apply<'a>(&self, line: &'a str) -> Cow<'a, str> {
        let mut line = Cow::Borrowed(line);
        for (secret, instead) in self.0.iter() {
            if line.contains(secret) {
                line = Cow::Owned(line.replace(secret, instead));
            }
        }
        line
    }

    /// Returns the length of the end of `bytes` with which a secret may begin. A long line is cut
    /// before it, because the halves of a secret are not found.
    pub(crate) fn begun(&self, bytes: &[u8]) -> usize {
        let begun = |secret: &[u8]| {
            (1..secret.len().min(bytes.len() + 1)).rev().find(|&count| bytes.ends_with(&secret[..count]))
        };
        self.0.iter().filter_map(|(secret, _)| begun(secret.as_bytes())).max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::launch::lines::Lines;

    const KEY: &str = "hunter2-and-more";

    fn redaction() -> Redaction {
        Redaction::new([
            ("KEY", KEY),
            ("PEM", "-----BEGIN\nabcdefghij\nshort\n"),
            ("MORE", "hunter2-and-more-still"),
        ])
    }

    #[test]
    fn values_are_replaced_by_their_names() {
        let redaction = redaction();
        for (line, expected) in [
            ("nothing", "nothing"),
            ("key=hunter2-and-more!", "key=[secret KEY]!"),
            ("hunter2-and-more-still", "[secret MORE]"),
            ("hunter2-and-morehunter2-and-more", "[secret KEY][secret KEY]"),
            ("abcdefghij", "[secret PEM]"),
            ("short", "short"),
        ] {
            assert_eq!(redaction.apply(line), expected);
        }
        assert!(!format!("{redaction:?}").contains("hunter2"));
        assert_eq!(Redaction::default().apply("hunter2"), "hunter2");
    }

    proptest! {
        /// However its bytes come, a line without an end is not cut within a value.
        #[test]
        fn no_cut_goes_through_a_value(before in 0usize..2 * 8192, parts in 1usize..5000, after in 0usize..9000) {
            let redaction = Redaction::new([("KEY", KEY)]);
            let text = format!("{}{KEY}{}", "x".repeat(before), "y".repeat(after));
            let (mut lines, mut said) = (Lines::of(redaction.clone()), Vec::new());
            for part in text.as_bytes().chunks(parts) {
                lines.push(part, |line| said.push(redaction.apply(line).into_owned()));
            }
            lines.finish(|line| said.push(redaction.apply(line).into_owned()));
            let all = said.concat();
            prop_assert_eq!(all.matches("[secret KEY]").count(), 1);
            prop_assert!(!all.contains("hunter2") && all.len() == text.len() - KEY.len() + "[secret KEY]".len());
        }
    }
}
