//! What happens while a call goes on: a caller may show it, and need not.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use proto::status::Failure;

/// Something that a user may want to know, and that ends no call.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Notice {
    /// The master does not answer. The call is tried again.
    Waiting {
        /// The master's URLs.
        url: String,
        /// The newest failed attempt.
        failure: Failure,
        /// Time since the first attempt.
        waited: Duration,
        /// Time after which the call fails.
        patience: Duration,
    },
    /// The stream of a job's events broke. It is opened again.
    LostSight {
        /// The job's name.
        job: String,
        /// Why it broke.
        failure: Failure,
    },
    /// A folder of results has a model of an earlier job. It gets another name until this job has a
    /// model.
    SetAside {
        /// The earlier model.
        model: PathBuf,
        /// The model's file name meanwhile.
        name: String,
        /// The job that the folder belongs to now.
        job: String,
    },
}

impl fmt::Display for Notice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Waiting { url, failure, waited, patience } => {
                let (waited, patience) = (waited.as_secs(), patience.as_secs_f32().ceil());
                write!(f, "waiting for the master at {url}: {failure} ({waited} of {patience} s)")
            }
            Self::LostSight { job, failure } => {
                write!(f, "lost sight of {job}: {failure}; looking again")
            }
            Self::SetAside { model, name, job } => {
                write!(f, "note: the earlier {} is kept as {name} until {job} has a model", model.display())
            }
        }
    }
}

/// A function that gets each notice.
type Hear = dyn Fn(&Notice) + Send + Sync;

/// A function that gets notices, or none by default. Clones share the function.
#[derive(Clone, Default)]
pub struct Notices(Option<Arc<Hear>>);

impl Notices {
    /// Notices for `hear`, which must return soon: a call waits for it.
    pub fn new(hear: impl Fn(&Notice) + Send + Sync + 'static) -> Self {
        Self(Some(Arc::new(hear)))
    }

    pub(crate) fn tell(&self, notice: &Notice) {
        if let Some(hear) = &self.0 {
            hear(notice);
        }
    }
}

impl fmt::Debug for Notices {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() { "Notices(to a function)" } else { "Notices(nowhere)" })
    }
}
