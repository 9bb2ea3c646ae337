//! Workers that wait for work: one of thousands can be notified without waking the others.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use proto::ids::IncarnationId;
use tokio::sync::Notify;

/// The workers whose requests for work are open.
#[derive(Debug, Default)]
pub(crate) struct Asking {
    /// Each worker with the number of its open requests and the signal that wakes them.
    workers: Mutex<BTreeMap<IncarnationId, (usize, Arc<Notify>)>>,
}

/// One open request.
#[derive(Debug)]
pub(crate) struct Request<'a> {
    asking: &'a Asking,
    worker: IncarnationId,
    news: Arc<Notify>,
}

impl Asking {
    /// Opens a worker's request for work, which lasts until the returned value is dropped.
    pub(crate) fn ask(&self, worker: IncarnationId) -> Request<'_> {
        let mut workers = self.workers();
        let (requests, news) = workers.entry(worker).or_default();
        *requests += 1;
        Request { asking: self, worker, news: news.clone() }
    }

    /// Wakes the requests of this worker: there may be work for it.
    pub(crate) fn tell(&self, worker: IncarnationId) {
        if let Some((_, news)) = self.workers().get(&worker) {
            news.notify_waiters();
        }
    }

    /// Wakes the requests of all workers: there may be work for them.
    pub(crate) fn tell_all(&self) {
        self.workers().values().for_each(|(_, news)| news.notify_waiters());
    }

    fn workers(&self) -> MutexGuard<'_, BTreeMap<IncarnationId, (usize, Arc<Notify>)>> {
        self.workers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Request<'_> {
    /// Returns the next time that there may be work. Listens from its first poll on, or from when
    /// it is enabled.
    pub(crate) fn news(&self) -> tokio::sync::futures::Notified<'_> {
        self.news.notified()
    }
}

impl Drop for Request<'_> {
    fn drop(&mut self) {
        let mut workers = self.asking.workers();
        if let Some((requests, _)) = workers.get_mut(&self.worker) {
            *requests -= 1;
            if *requests == 0 {
                workers.remove(&self.worker);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;

    #[test]
    fn news_reach_whom_they_are_for() {
        let asking = Asking::default();
        let requests = [1, 2, 2].map(|worker| asking.ask(IncarnationId(worker)));
        let mut news = requests.each_ref().map(|request| Box::pin(request.news()));
        news.iter_mut().for_each(|news| assert!(!news.as_mut().enable()));
        asking.tell(IncarnationId(2));
        asking.tell(IncarnationId(3));
        assert_eq!(news.each_mut().map(|news| news.now_or_never().is_some()), [false, true, true]);
        let mut news = requests.each_ref().map(|request| Box::pin(request.news()));
        news.iter_mut().for_each(|news| assert!(!news.as_mut().enable()));
        asking.tell_all();
        assert_eq!(news.each_mut().map(|news| news.now_or_never().is_some()), [true; 3]);
    }

    #[test]
    fn whoever_asks_no_more_is_forgotten() {
        let asking = Asking::default();
        let (first, second) = (asking.ask(IncarnationId(1)), asking.ask(IncarnationId(1)));
        drop(first);
        assert_eq!(asking.workers().len(), 1);
        drop(second);
        assert!(asking.workers().is_empty());
    }
}
