//! Progress of a worker's leases. The places that work report it: the fetcher, the reader of a
//! file, the call of the model, the exchange with the ps. Heartbeats carry it to the master, which
//! copies the work of a place that hangs.
//!
//! A place that cannot be interrupted keeps its handle when its lease has ended, so the master
//! still learns where it hangs.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use proto::pb::{self, Phase};
use tokio::time::Instant;

/// Progress of one lease. Each place that works has a clone.
#[derive(Clone, Debug, Default)]
pub(crate) struct Progress {
    place: Arc<Mutex<Place>>,
    /// Last progress of the worker. A lease that waits for its turn makes progress whenever the
    /// worker does.
    worker: Activity,
    /// Whether the lease waits for the place. `None`: the lease is where the place is.
    waited: Option<Arc<AtomicBool>>,
}

/// Time of a worker's last progress.
#[derive(Clone, Debug)]
pub(crate) struct Activity(Arc<Mutex<Instant>>);

#[derive(Debug)]
struct Place {
    phase: Phase,
    what: String,
    advanced: Instant,
    /// Whether the whole lease is computed.
    computed: bool,
}

impl Default for Place {
    fn default() -> Self {
        Self { phase: Phase::Queued, what: String::new(), advanced: Instant::now(), computed: false }
    }
}

impl Default for Activity {
    fn default() -> Self {
        Self(Arc::new(Mutex::new(Instant::now())))
    }
}

impl Progress {
    /// Returns the progress of a new lease of a worker.
    pub(crate) fn of(worker: &Activity) -> Self {
        Self { place: Arc::default(), worker: worker.clone(), waited: None }
    }

    /// Returns the handle of a place that works beside the lease. What it says is lost until
    /// `waited` is set, so that it never hides a place that hangs.
    pub(crate) fn beside(&self, waited: Arc<AtomicBool>) -> Self {
        Self { waited: Some(waited), ..self.clone() }
    }

    /// Enters another phase. `what` names its object: a file, a ps, records.
    pub(crate) fn enter(&self, phase: Phase, what: impl Into<String>) {
        let what = what.into();
        self.edit(|place| (place.phase, place.what) = (phase, what));
    }

    /// Notes that the lease waits for its turn.
    pub(crate) fn queue(&self) {
        self.enter(Phase::Queued, "");
    }

    /// Notes that the whole lease is computed. From now on it pushes.
    pub(crate) fn computed(&self) {
        self.enter(Phase::Pushing, "gradients");
        self.place.lock().unwrap_or_else(PoisonError::into_inner).computed = true;
    }

    /// Notes that the computed gradients wait for room on a ps. Returns false, and changes nothing,
    /// while a part of the lease is still to be computed: an answer of a ps does not show that the
    /// worker makes progress with the computation.
    pub(crate) fn refused(&self, what: impl Into<String>) -> bool {
        let what = what.into();
        let mut place = self.place.lock().unwrap_or_else(PoisonError::into_inner);
        if place.computed && self.is_waited() {
            (place.phase, place.what, place.advanced) = (Phase::WaitingForRoom, what, Instant::now());
        }
        place.computed
    }

    /// Notes progress within the phase.
    pub(crate) fn advance(&self) {
        self.edit(|_| {});
    }

    fn is_waited(&self) -> bool {
        self.waited.as_ref().is_none_or(|waited| waited.load(Ordering::Relaxed))
    }

    fn edit(&self, edit: impl FnOnce(&mut Place)) {
        if !self.is_waited() {
            return;
        }
        let now = Instant::now();
        let mut place = self.place.lock().unwrap_or_else(PoisonError::into_inner);
        edit(&mut place);
        place.advanced = now;
        *self.worker.0.lock().unwrap_or_else(PoisonError::into_inner) = now;
    }

    /// Writes the progress into a heartbeat.
    pub(crate) fn say(&self, said: &mut pb::LeaseProgress) {
        let place = self.place.lock().unwrap_or_else(PoisonError::into_inner);
        let advanced = match place.phase {
            Phase::Queued => *self.worker.0.lock().unwrap_or_else(PoisonError::into_inner),
            _ => place.advanced,
        };
        said.phase = place.phase.into();
        said.what.clone_from(&place.what);
        said.idle_ms = u64::try_from(advanced.elapsed().as_millis()).unwrap_or(u64::MAX);
    }

    /// Returns whether a place still works although the lease has ended. The caller has the only
    /// other handle.
    pub(crate) fn lingers(&self) -> bool {
        let place = self.place.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::strong_count(&self.place) > 1 && place.phase != Phase::Queued
    }
}

impl data::Observer for Progress {
    fn open(&self, file: &Path) {
        self.enter(Phase::Reading, file.display().to_string());
    }

    fn advance(&self) {
        self.edit(|_| {});
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn said(progress: &Progress) -> (Phase, u64) {
        let mut said = pb::LeaseProgress::default();
        progress.say(&mut said);
        (said.phase(), said.idle_ms)
    }

    #[tokio::test(start_paused = true)]
    async fn a_place_is_idle_until_it_advances_and_a_queued_lease_while_the_worker_is() {
        let worker = Activity::default();
        let (works, waits) = (Progress::of(&worker), Progress::of(&worker));
        works.enter(Phase::Reading, "x.gz");
        tokio::time::advance(Duration::from_secs(7)).await;
        assert_eq!((said(&works), said(&waits)), ((Phase::Reading, 7000), (Phase::Queued, 7000)));
        works.advance();
        assert_eq!((said(&works), said(&waits)), ((Phase::Reading, 0), (Phase::Queued, 0)));
    }

    #[tokio::test(start_paused = true)]
    async fn who_is_refused_gets_on_when_all_is_computed_and_nothing_else_does() {
        let worker = Activity::default();
        let (computes, sends, waits) = (Progress::of(&worker), Progress::of(&worker), Progress::of(&worker));
        computes.enter(Phase::Computing, "microbatch 3");
        sends.computed();
        tokio::time::advance(Duration::from_secs(7)).await;
        assert_eq!((computes.refused("ps"), sends.refused("ps")), (false, true));
        assert_eq!(said(&sends), (Phase::WaitingForRoom, 0));
        assert_eq!((said(&computes), said(&waits)), ((Phase::Computing, 7000), (Phase::Queued, 7000)));
    }

    #[tokio::test(start_paused = true)]
    async fn a_place_beside_a_lease_says_nothing_until_the_lease_waits_for_it() {
        let worker = Activity::default();
        let (computes, waits) = (Progress::of(&worker), Progress::of(&worker));
        computes.enter(Phase::Computing, "microbatch 3");
        let waited = Arc::<AtomicBool>::default();
        let beside = computes.beside(waited.clone());
        tokio::time::advance(Duration::from_secs(7)).await;
        beside.enter(Phase::Retrying, "ps");
        beside.advance();
        assert_eq!((said(&computes), said(&waits)), ((Phase::Computing, 7000), (Phase::Queued, 7000)));
        waited.store(true, Ordering::Relaxed);
        beside.advance();
        assert_eq!((said(&computes), said(&waits)), ((Phase::Computing, 0), (Phase::Queued, 0)));
        computes.computed();
        waited.store(false, Ordering::Relaxed);
        beside.refused("ps");
        assert_eq!(said(&computes).0, Phase::Pushing);
    }

    #[test]
    fn a_place_lingers_as_long_as_it_has_its_handle() {
        let held = Progress::default();
        let place = held.clone();
        place.enter(Phase::Computing, "microbatch 3");
        assert!(held.lingers());
        drop(place);
        assert!(!held.lingers());
    }
}
