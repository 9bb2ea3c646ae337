//! The secrets of the members' sessions. Pure.
//!
//! A secret is a function of the incarnation and of a key that only this start of the master has.
//! So nothing is kept for each member, and a secret of an earlier start is worth nothing.

use net::session::{Secret, Shown};
use proto::ids::IncarnationId;
use proto::status::{Failure, Kind};
use sha2::{Digest, Sha256};

/// Random bytes that no other process knows.
#[derive(Clone)]
pub(crate) struct Key(pub(crate) [u8; 32]);

impl std::fmt::Debug for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Key(..)")
    }
}

impl Key {
    /// Returns what the process of this incarnation is told.
    pub(crate) fn secret(&self, incarnation: IncarnationId) -> Secret {
        let mut hash = Sha256::new();
        hash.update(self.0);
        hash.update(incarnation.get().to_be_bytes());
        Secret::from_bytes(&hash.finalize()[..16]).expect("16 bytes")
    }

    /// Checks whether a call that speaks for `incarnation` is of its process.
    ///
    /// # Errors
    /// It proves to be of another process, or proves nothing.
    pub(crate) fn check(&self, shown: Option<Shown>, incarnation: IncarnationId) -> Result<(), Failure> {
        let denied = |what: &str| {
            Failure::new(
                Kind::Denied,
                format!(
                    "a call for incarnation {incarnation} {what}; a process speaks for itself, start it again"
                ),
            )
        };
        let shown = shown.ok_or_else(|| denied("without the secret of its session"))?;
        if !self.secret(shown.incarnation).is(&shown.secret) {
            return Err(denied("with a secret that this master did not give"));
        }
        if shown.incarnation != incarnation {
            // A process that registered again meets this with what it began before.
            let message =
                format!("incarnation {} cannot speak for incarnation {incarnation}", shown.incarnation);
            return Err(Failure::new(Kind::Fenced, message));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_process_that_was_told_the_secret_speaks_for_an_incarnation() {
        let (key, other) = (Key([1; 32]), Key([2; 32]));
        let shown = |key: &Key, incarnation| {
            let incarnation = IncarnationId(incarnation);
            Some(Shown { incarnation, secret: key.secret(incarnation) })
        };
        let kind = |shown| key.check(shown, IncarnationId(7)).map_err(|failure| failure.kind);
        assert_eq!(kind(shown(&key, 7)), Ok(()));
        assert_eq!(kind(None), Err(Kind::Denied));
        assert_eq!(kind(shown(&other, 7)), Err(Kind::Denied), "of another start of the master");
        assert_eq!(kind(shown(&key, 8)), Err(Kind::Fenced), "of another process");
        let stolen = Shown { incarnation: IncarnationId(7), secret: key.secret(IncarnationId(8)) };
        assert_eq!(kind(Some(stolen)), Err(Kind::Denied));
    }
}
