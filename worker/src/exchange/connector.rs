//! The choice of a carrier: how this worker reaches the ps at a URL.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use kernels::device::Devices;
use model::{Allocator, OwnMemory};
use net::channel::{Dialer, Purpose};
use net::memory::{Memory, Regions};
use net::ps_client::PsClient;
use proto::ids::JobId;
use proto::parameters::Parameters;
use proto::status::Failure;

use super::embedded::Embedded;
use super::exported::Exporter;
use super::shared_memory::{GradientMemory, SharedMemory};
use super::socket::Socket;
use crate::metrics::Metrics;

/// Turns the URL of a ps into a carrier. Clones share their carriers.
#[derive(Clone)]
pub struct Connector(Arc<Shared>);

struct Shared {
    by: By,
    /// One for each ps of a job, while somebody uses it. Jobs share none: a ps serves a connection
    /// on one thread, and a push that rests there keeps one of the connection's calls.
    carriers: Mutex<HashMap<(JobId, String), Weak<dyn Parameters>>>,
}

/// The carriers.
enum By {
    Embedded(Embedded),
    Socket(Dialer),
    SharedMemory {
        dialer: Dialer,
        /// Copies of what does not lie in the memory yet.
        regions: Regions,
        /// The device of this worker, for a ps on it.
        exporter: Option<Arc<Exporter>>,
        metrics: Arc<Metrics>,
    },
}

impl fmt::Debug for Connector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Connector")
    }
}

impl Connector {
    /// Calls to the ps of this process, which are `ps` by URL.
    pub fn embedded(ps: BTreeMap<String, Arc<dyn Parameters>>) -> Self {
        Self::by(By::Embedded(Embedded::new(ps)))
    }

    /// Calls by gRPC over connections of `dialer`.
    pub fn socket(dialer: Dialer) -> Self {
        Self::by(By::Socket(dialer))
    }

    /// Shared memory with each ps that is a process of this host and this user, as `dialer` finds
    /// out: gradients lie in `memory`. Other ps are reached as by [`socket`](Self::socket).
    pub fn shared_memory(dialer: Dialer, memory: Memory, metrics: Arc<Metrics>) -> Self {
        Self::by(By::SharedMemory { dialer, regions: Regions::new(memory), exporter: None, metrics })
    }

    /// Connects as [`shared_memory`](Self::shared_memory) does. Gradients for a ps on the CUDA
    /// device `ordinal` of `devices` lie in memory of that device. It is opened when such a ps is
    /// met.
    pub fn device_memory(
        dialer: Dialer,
        memory: Memory,
        ordinal: usize,
        devices: Devices,
        metrics: Arc<Metrics>,
    ) -> Self {
        let exporter = Some(Arc::new(Exporter::new(ordinal, devices)));
        Self::by(By::SharedMemory { dialer, regions: Regions::new(memory), exporter, metrics })
    }

    fn by(by: By) -> Self {
        Self(Arc::new(Shared { by, carriers: Mutex::default() }))
    }

    /// The ps at `url`, for `job`; connects when it is first used.
    ///
    /// # Errors
    /// The address is no URL, or this process has no such ps.
    pub(super) fn connect(&self, job: JobId, url: &str) -> Result<Arc<dyn Parameters>, Failure> {
        let mut carriers = self.0.carriers.lock().unwrap_or_else(PoisonError::into_inner);
        carriers.retain(|_, carrier| carrier.strong_count() > 0);
        if let Some(carrier) = carriers.get(&(job, url.to_owned())).and_then(Weak::upgrade) {
            return Ok(carrier);
        }
        let ps = |dialer| PsClient::new(dialer, url, Purpose::Bulk);
        let carrier: Arc<dyn Parameters> = match &self.0.by {
            By::Embedded(embedded) => embedded.at(url)?,
            By::Socket(dialer) => Arc::new(Socket::new(ps(dialer)?)),
            By::SharedMemory { dialer, regions, exporter, metrics } => {
                let (regions, exporter) = (regions.clone(), exporter.clone());
                Arc::new(SharedMemory::new(ps(dialer)?, regions, exporter, metrics.clone()))
            }
        };
        carriers.insert((job, url.to_owned()), Arc::downgrade(&carrier));
        Ok(carrier)
    }

    /// Memory for the gradients of one model. What lies there needs no copy on its way to a ps of
    /// this host. It goes back to the system when the allocator and the last gradient are dropped.
    pub(crate) fn gradient_memory(&self) -> Box<dyn Allocator> {
        match &self.0.by {
            By::Embedded(_) | By::Socket(_) => Box::new(OwnMemory),
            By::SharedMemory { regions, .. } => {
                Box::new(GradientMemory(Regions::new(regions.memory().clone())))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn one_job_has_one_carrier_for_each_ps_until_nobody_uses_it() {
        let connector = Connector::socket(Dialer::tcp());
        let [one, other] = ["http://127.0.0.1:1", "http://127.0.0.1:2"];
        let first = connector.connect(JobId(1), one).unwrap();
        assert!(Arc::ptr_eq(&first, &connector.connect(JobId(1), one).unwrap()));
        assert!(!Arc::ptr_eq(&first, &connector.connect(JobId(1), other).unwrap()));
        assert!(!Arc::ptr_eq(&first, &connector.connect(JobId(2), one).unwrap()));
        let weak = Arc::downgrade(&first);
        drop(first);
        assert_eq!(weak.strong_count(), 0, "the connection is closed");
        assert!(connector.connect(JobId(1), "no url").is_err());
    }
}
