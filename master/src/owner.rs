//! Whose a job is, and what its owner may have at once.

use net::security::Caller;
use proto::status::{Failure, Kind};

/// The submitter of a job: the bearer of a token, or a caller that needs none and has no limits.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Owner {
    /// The token's name; empty without one.
    pub(crate) name: String,
    pub(crate) jobs_max: Option<u64>,
    pub(crate) artifact_bytes_max: Option<u64>,
}

/// What an owner has at the moment: jobs that have not ended, and bytes of the files that they were
/// submitted with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Holding {
    pub(crate) jobs: u64,
    pub(crate) artifact_bytes: u64,
}

impl Owner {
    pub(crate) fn of(caller: &Caller) -> Self {
        caller.token().map_or_else(Self::default, |token| Self {
            name: token.name.clone(),
            jobs_max: token.jobs_max,
            artifact_bytes_max: token.artifact_bytes_max,
        })
    }

    /// Checks whether one more job with files of `bytes` fits beside what the owner has.
    ///
    /// # Errors
    /// Which limit it would pass.
    pub(crate) fn check(&self, has: Holding, bytes: u64) -> Result<(), Failure> {
        let name = &self.name;
        if let Some(max) = self.jobs_max.filter(|&max| has.jobs >= max) {
            let message = format!(
                "`{name}` has {} jobs that have not ended, and its token takes {max} (jobs_max); wait for one, or cancel it",
                has.jobs
            );
            return Err(Failure::new(Kind::Denied, message));
        }
        let together = has.artifact_bytes.saturating_add(bytes);
        if let Some(max) = self.artifact_bytes_max.filter(|&max| together > max) {
            let message = format!(
                "the files of this job and of the others of `{name}` that have not ended are {together} bytes, and its token \
                 takes {max} (artifact_bytes_max); wait for one, or cancel it"
            );
            return Err(Failure::new(Kind::Denied, message));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_owner_has_as_much_as_the_token_says_and_no_more() {
        let anna = Owner { name: "anna".into(), jobs_max: Some(2), artifact_bytes_max: Some(100) };
        let check = |jobs, artifact_bytes, bytes| anna.check(Holding { jobs, artifact_bytes }, bytes);
        assert_eq!(check(1, 60, 40), Ok(()));
        for (refused, limit) in [(check(2, 0, 0), "jobs_max"), (check(1, 60, 41), "artifact_bytes_max")] {
            let failure = refused.unwrap_err();
            assert!(failure.kind == Kind::Denied && failure.message.contains(limit), "{failure}");
            assert!(failure.message.contains("`anna`"), "{failure}");
        }
        assert!(check(0, u64::MAX, u64::MAX).is_err());
        assert_eq!(Owner::default().check(Holding { jobs: 9, artifact_bytes: 9 }, 9), Ok(()));
    }
}
