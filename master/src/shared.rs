//! The edge around the books: their lock, the clock, and the effects that follow from each action.
//!
//! [`act`](Shared::act) is the only way to the books. It holds the lock for one action, hands the
//! changes to the journal under the lock, and then starts the effects. An effect speaks to a ps or
//! a store once the journal has the changes that it follows from.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use net::channel::Dialer;
use net::ps_client::PsClients;
use proto::checkpoint::manifest::Script;
use proto::ids::{IncarnationId, JobId, LeaseId};
use proto::status::{Failure, Kind};
use store::Stores;
use tokio::sync::broadcast;
use tokio_util::sync::CancellationToken;
use tonic::Status;
use tracing::Instrument;

use crate::artifacts::{self, Artifacts, Received};
use crate::asking::Asking;
use crate::books::Books;
use crate::checkpoints;
use crate::clock::{Clock, Now};
use crate::etcd::Leadership;
use crate::job::Effect;
use crate::journal::{Journal, Mark, Overdue};
use crate::metrics::Metrics;
use crate::ps_client;

/// A journal whose write takes longer than this makes a master that is not ready.
const OVERDUE: Duration = Duration::from_secs(5);

/// Recalls that a busy heartbeat stream may be behind.
const RECALLS: usize = 256;

/// Longest wait for open calls at a shutdown.
pub(crate) const SHUTDOWN: Duration = Duration::from_secs(5);

/// The state that all calls, the ticks and the writer of the journal share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) artifacts: Artifacts,
    /// Calls the ps.
    pub(crate) ps_clients: PsClients,
    /// Files of exports that are not completed yet. A thread may take this lock under the lock of
    /// the books, and never the other way round.
    pub(crate) uploads: Mutex<BTreeMap<(IncarnationId, LeaseId), Arc<Received>>>,
    /// A submission holds this lock from the moment that it gets a number until the books have the
    /// job. It moves the job's files between the two.
    pub(crate) submitting: tokio::sync::Mutex<()>,
    /// The stores of checkpoints.
    pub(crate) stores: Stores,
    /// Everything that a restart must know.
    pub(crate) journal: Journal,
    /// Wakes workers for which there may be work.
    pub(crate) work: Asking,
    /// Leases whose holders need not go on.
    pub(crate) recalls: broadcast::Sender<(IncarnationId, LeaseId)>,
    /// Long calls end.
    pub(crate) stopping: CancellationToken,
    /// Longest silence of a stream that brings something.
    pub(crate) stream_silence: Duration,
    /// The proof that this master leads; `None` for a master that is alone.
    pub(crate) leadership: Option<Arc<Leadership>>,
    books: Mutex<Books>,
    clock: Clock,
}

/// Everything that the books of a master have around them.
pub(crate) struct Surroundings {
    pub(crate) stores: Stores,
    pub(crate) dialer: Dialer,
    pub(crate) artifacts: Artifacts,
    pub(crate) journal: Journal,
    pub(crate) clock: Clock,
    pub(crate) stream_silence: Duration,
}

impl Shared {
    /// Returns the shared state of a master that serves `books`.
    pub(crate) fn new(books: Books, around: Surroundings, leadership: Option<Arc<Leadership>>) -> Self {
        let Surroundings { stores, dialer, artifacts, journal, clock, stream_silence } = around;
        Self {
            artifacts,
            stores,
            ps_clients: ps_client::clients(dialer),
            uploads: Mutex::default(),
            submitting: tokio::sync::Mutex::default(),
            work: Asking::default(),
            recalls: broadcast::Sender::new(RECALLS),
            stopping: CancellationToken::new(),
            stream_silence,
            leadership,
            journal,
            books: Mutex::new(books),
            clock,
        }
    }

    /// Runs `action` on the books under one short lock, and then starts the effects of the change.
    /// Heartbeats wait for this lock, so `action` calls no file system.
    pub(crate) fn act<T>(self: &Arc<Self>, action: impl FnOnce(&mut Books, Now) -> T) -> T {
        let mut books = self.books.lock().unwrap_or_else(PoisonError::into_inner);
        // The time is taken under the lock, so that it never steps back between two actions.
        let result = action(&mut books, self.clock.now());
        let (effects, changes) = (books.take_effects(), books.take_changes());
        let (news, news_for) = (books.take_news(), books.take_news_for());
        // Under the lock, so that it is written in the order in which it happened.
        let written = self.journal.append(books.take_batch(self.clock.now()));
        drop(books);
        for change in changes {
            tracing::info!("{}", change.reason);
        }
        for (job, effect) in effects {
            if let Effect::Recall(worker, _) = effect {
                self.work.tell(worker);
            }
            self.follow(job, effect, written);
        }
        match news {
            true => self.work.tell_all(),
            false => news_for.into_iter().for_each(|worker| self.work.tell(worker)),
        }
        result
    }

    /// Returns whether no other master can act for this cluster.
    pub(crate) fn leads(&self) -> bool {
        let leadership = self.leadership.as_ref();
        leadership.is_none_or(|leadership| leadership.is_certain(tokio::time::Instant::now()))
    }

    /// Removes the files of exports whose lease has ended.
    pub(crate) fn drop_ended_uploads(self: &Arc<Self>) {
        let ended: Vec<_> = self.act(|books, _| {
            let mut uploads = self.uploads.lock().unwrap_or_else(PoisonError::into_inner);
            uploads.extract_if(.., |&(worker, lease), _| books.exported_by(worker, lease).is_none()).collect()
        });
        if !ended.is_empty() {
            artifacts::later(move || drop(ended));
        }
    }

    /// Waits until every change so far survives a restart. A caller waits before it tells others of
    /// a change.
    ///
    /// # Errors
    /// The master stops, or no longer leads, and could not write the changes.
    pub(crate) async fn durable(&self) -> Result<(), Status> {
        let left = async {
            self.stopping.cancelled().await;
            tokio::time::sleep(SHUTDOWN).await;
        };
        tokio::select! {
            biased;
            () = self.journal.durable(self.journal.newest()) => Ok(()),
            () = left => Err(leaving()),
        }
    }

    /// Checks that the journal is written in time. Training does not wait for the journal; calls
    /// that answer only durable changes do.
    ///
    /// # Errors
    /// The journal is overdue for so long that no caller should wait for it; the message has the
    /// reason.
    pub(crate) fn check_journal(&self) -> Result<(), Failure> {
        let Some(Overdue { waited, reason }) = self.journal.overdue().filter(|late| late.waited > OVERDUE)
        else {
            return Ok(());
        };
        let (seconds, reason) = (waited.as_secs(), reason.unwrap_or_else(|| "no answer".to_owned()));
        let message = format!(
            "this master has not been able to write its journal for {seconds} s ({reason}); jobs that run go on, others are taken \
             once it can"
        );
        Err(Failure::new(Kind::Full, message))
    }

    /// Returns the counts of this master so far.
    pub(crate) fn metrics(&self) -> Metrics {
        let books = self.books.lock().unwrap_or_else(PoisonError::into_inner).metrics();
        Metrics {
            journal_failures: self.journal.failures(),
            journal_overdue_seconds: self.journal.overdue().map_or(0, |overdue| overdue.waited.as_secs()),
            ..books
        }
    }

    /// Starts an effect. `written`: the journal's mark of the change that the effect follows from.
    pub(crate) fn follow(self: &Arc<Self>, job: JobId, effect: Effect, written: Mark) {
        match &effect {
            Effect::Tell(state, reason) => return tracing::info!(%job, "{}: {reason}", state.name()),
            Effect::Lost(lease) => return tracing::debug!(%job, lease = lease.get(), "lease lost"),
            // Without a listener nobody holds anything.
            Effect::Recall(worker, lease) => return drop(self.recalls.send((*worker, *lease))),
            _ => {}
        }
        // A heartbeat stream may be dropped with the runtime itself; then there is nobody left to
        // tell.
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
        let shared = self.clone();
        let speaking = async move {
            shared.speak_when_durable(job, effect, written).await;
        };
        runtime.spawn(speaking.instrument(tracing::info_span!("job", id = %job)));
    }

    /// Speaks once the change that the effect follows from is durable. A master that stops or no
    /// longer leads says nothing; then the answer is `false`.
    pub(crate) async fn speak_when_durable(
        self: &Arc<Self>,
        job: JobId,
        effect: Effect,
        written: Mark,
    ) -> bool {
        // A journal that can no longer be written must not keep all this in memory.
        tokio::select! {
            biased;
            () = self.stopping.cancelled() => return false,
            () = self.journal.durable(written) => {}
        }
        if !self.leads() {
            return false;
        }
        tokio::select! {
            biased;
            () = self.stopping.cancelled() => false,
            () = self.speak(job, effect) => true,
        }
    }

    /// Speaks to ps and brings the job their answer.
    async fn speak(self: &Arc<Self>, id: JobId, effect: Effect) {
        match effect {
            Effect::Ask(placement, ps) => {
                let ledgers = ps_client::ledgers(&self.ps_clients, &ps, id).await;
                self.act(|books, now| books.job_mut(id).map(|job| job.on_ledgers(now, placement, ledgers)));
            }
            Effect::Train(placement) => {
                self.act(|books, now| books.job_mut(id).map(|job| job.train(now, placement)));
            }
            Effect::Clear => {
                self.act(|books, now| books.job_mut(id).map(|job| job.clear(now)));
            }
            Effect::Verify(ps, incarnation) => {
                let ledgers = ps_client::ledgers(&self.ps_clients, std::slice::from_ref(&ps), id).await;
                self.act(|books, now| {
                    books.job_mut(id).map(|job| job.on_ps_answer(now, &ps, incarnation, ledgers))
                });
            }
            Effect::Unpin(ps, era, version, best) => {
                let unpinned = ps_client::unpin(&self.ps_clients, &ps, id, era, version, best).await;
                if let Err(failure) = unpinned {
                    tracing::warn!(%version, reason = %failure, "a ps keeps versions that nobody needs");
                }
            }
            Effect::Look(place) => {
                let found = checkpoints::look(&self.stores, &place).await;
                self.act(|books, now| books.job_mut(id).map(|job| job.on_found(now, found)));
            }
            Effect::Save(ps, version) => {
                let coming = ps_client::save(&self.ps_clients, &ps, id, version).await;
                self.act(|books, now| {
                    books.job_mut(id).map(|job| job.on_save_answered(now, version, coming))
                });
            }
            Effect::Publish(place, manifest, keep) => {
                let script = |script: &Script| self.artifacts.script(id, script);
                let written = checkpoints::publish(&self.stores, &place, &manifest, keep, script).await;
                let written = written.map_err(|error| error.to_string());
                self.act(|books, now| books.job_mut(id).map(|job| job.on_published(now, written)));
            }
            Effect::Finish(ps) => {
                let ledgers = ps_client::ledgers(&self.ps_clients, &ps, id).await;
                self.act(|books, now| books.job_mut(id).map(|job| job.on_finished(now, ledgers)));
            }
            Effect::Close(ps, era) => {
                let request = self.act(|books, now| books.close(now, id, era));
                if let Err(failure) = ps_client::close(&self.ps_clients, &ps, request).await {
                    tracing::warn!(reason = %failure, "a ps did not close the job; its heartbeat will tell it to");
                }
            }
            Effect::Tell(..) | Effect::Lost(_) | Effect::Recall(..) => {}
        }
    }
}

/// Returns the status with which long calls end at a shutdown.
pub(crate) fn leaving() -> Status {
    Failure::new(Kind::Unavailable, "the master is shutting down").into()
}
