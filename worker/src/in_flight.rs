//! Pushes on their way to the ps, of all leases of a worker. Their number is bounded, except for
//! the first push of each job.
//!
//! Each push holds a gradient in memory. So at most `pushes_in_flight_max` are sent at once, and
//! nothing more is computed while another push waits for its turn.
//!
//! A push that precedes all others of its job is exempt from both rules. A ps with little room
//! accepts that push and refuses the others, so if it waited for their end, all would wait forever.
//! A worker holds few leases at a time, so there are few exempt pushes.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use proto::ids::{JobId, MicrobatchId};
use tokio::sync::watch;

/// Pushes without an acknowledgement. Clones are of the same worker.
#[derive(Clone, Debug)]
pub(crate) struct InFlight {
    max: usize,
    pushes: Arc<Mutex<Pushes>>,
    changes: Arc<watch::Sender<()>>,
}

#[derive(Debug, Default)]
struct Pushes {
    begun: u64,
    all: BTreeMap<Key, Stage>,
}

/// Job, first microbatch of the node, and number of pushes begun before.
type Key = (JobId, MicrobatchId, u64);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Waits,
    Sent,
}

impl Pushes {
    /// Returns whether no push of this job precedes this microbatch.
    fn is_first(&self, job: JobId, microbatch: MicrobatchId) -> bool {
        self.all.range((job, MicrobatchId(0), 0)..(job, microbatch, 0)).next().is_none()
    }

    /// Returns the number of the push that has waited longest.
    fn oldest_waiting(&self) -> Option<u64> {
        let waiting = self.all.iter().filter(|(_, stage)| **stage == Stage::Waits);
        waiting.map(|((_, _, number), _)| *number).min()
    }

    fn sent(&self) -> usize {
        self.all.values().filter(|stage| **stage == Stage::Sent).count()
    }
}

impl InFlight {
    pub(crate) fn new(max: usize) -> Self {
        Self { max, pushes: Arc::default(), changes: Arc::new(watch::Sender::new(())) }
    }

    /// Begins a push of a node that starts with `microbatch`. The push ends when the returned value
    /// is dropped.
    pub(crate) fn begin(&self, job: JobId, microbatch: MicrobatchId) -> Pushing {
        let mut pushes = self.lock();
        let key = (job, microbatch, pushes.begun);
        pushes.begun += 1;
        pushes.all.insert(key, Stage::Waits);
        Pushing { of: self.clone(), key }
    }

    /// Returns whether memory has room for the gradient of `microbatch`: no push waits for its
    /// turn, or all pushes of its job come later.
    pub(crate) fn has_room(&self, job: JobId, microbatch: MicrobatchId) -> bool {
        let pushes = self.lock();
        pushes.oldest_waiting().is_none() || pushes.is_first(job, microbatch)
    }

    /// Waits until a push is sent or ends after this call.
    pub(crate) fn changed(&self) -> impl Future<Output = ()> + use<> {
        let mut changes = self.changes.subscribe();
        async move {
            if changes.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Pushes> {
        self.pushes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One push. It ends when it is dropped.
#[derive(Debug)]
pub(crate) struct Pushing {
    of: InFlight,
    key: Key,
}

impl Pushing {
    /// Waits until the push may be sent.
    pub(crate) async fn turn(&self) {
        loop {
            let changed = self.of.changed();
            if self.try_turn() {
                self.of.changes.send_replace(());
                return;
            }
            changed.await;
        }
    }

    fn try_turn(&self) -> bool {
        let mut pushes = self.of.lock();
        let (job, microbatch, number) = self.key;
        let turn = (pushes.sent() < self.of.max && pushes.oldest_waiting() == Some(number))
            || pushes.is_first(job, microbatch);
        if turn {
            pushes.all.insert(self.key, Stage::Sent);
        }
        turn
    }
}

impl Drop for Pushing {
    fn drop(&mut self) {
        self.of.lock().all.remove(&self.key);
        self.of.changes.send_replace(());
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;

    const JOB: JobId = JobId(7);

    #[test]
    fn pushes_are_bounded_and_what_goes_before_all_others_passes() {
        let in_flight = InFlight::new(2);
        let push = |microbatch| in_flight.begin(JOB, MicrobatchId(microbatch));
        let sent = |push: &Pushing| push.turn().now_or_never().is_some();
        let [five, six] = [push(5), push(6)];
        assert!(sent(&five) && sent(&six) && in_flight.has_room(JOB, MicrobatchId(7)));
        let [seven, eight] = [push(7), push(8)];
        assert!(!sent(&eight) && !sent(&seven));
        assert!(!in_flight.has_room(JOB, MicrobatchId(9)) && in_flight.has_room(JOB, MicrobatchId(4)));
        // Microbatches of another job have an order of their own.
        assert!(in_flight.has_room(JobId(8), MicrobatchId(9)));
        let four = push(4);
        assert!(sent(&four) && !sent(&seven));
        drop(four);
        assert!(!sent(&seven));
        drop(six);
        assert!(!sent(&eight) && sent(&seven), "one after the other");
        drop(five);
        assert!(sent(&eight) && in_flight.has_room(JOB, MicrobatchId(9)));
    }

    #[tokio::test]
    async fn a_push_that_ends_lets_the_next_one_go() {
        let in_flight = InFlight::new(1);
        let [one, two] = [1, 2].map(|microbatch| in_flight.begin(JOB, MicrobatchId(microbatch)));
        one.turn().await;
        let next = tokio::spawn(async move { two.turn().await });
        tokio::task::yield_now().await;
        drop(one);
        next.await.unwrap();
    }
}
