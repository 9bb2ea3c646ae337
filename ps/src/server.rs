//! A ps process: serves its partitions, belongs to the fleet, forgets jobs that have ended, and
//! leaves in good order.

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::future::Future;
use std::io;
use std::time::Duration;

use futures::Stream;
use net::channel::{Accepted, Dialer, Io, Listener, Purpose};
use net::failover::Failover;
use net::session::{Registered, Session};
use proto::PROGRAM_VERSION;
use proto::ids::JobId;
use proto::pb;
use proto::pb::parameters_server::ParametersServer;
use tokio::sync::oneshot;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tonic_health::pb::health_server::HealthServer;
use tonic_health::server::{HealthReporter, HealthService, health_reporter};

use crate::error::{Error, Result};
use crate::partitions::{MasterStart, Ps};
use crate::service::{Bulk, Service};

/// How long calls in flight may go on after the shutdown was asked for.
const GRACE: Duration = Duration::from_secs(1);

/// How long a new master may take to name the jobs that it knows, before those of the old one are
/// closed: a reply that it sent before it opened a job here may still be on its way.
const SETTLE: Duration = Duration::from_secs(1);

/// Runs a ps until `shutdown`: serves `incoming` connections and is a member of the fleet of the
/// master in its options. Then its jobs are saved where they stand, for as long as its options
/// allow, so that nothing of them is trained again, and it leaves.
///
/// # Errors
/// The master refuses this ps for good (another program version, a bad name), its URL is none, or
/// the server breaks.
pub async fn run<I, T>(ps: Ps, incoming: I, dialer: Dialer, shutdown: CancellationToken) -> Result<()>
where
    I: Stream<Item = io::Result<Accepted<T>>> + Send,
    T: Io,
{
    let serving = |ps, health, stopping| serve_with(ps, incoming, health, stopping);
    take_part(ps, serving, dialer, shutdown).await
}

/// Runs a ps as [`run`] does, with threads of its own for the connections of `listener`; see
/// [`serve_on_threads`].
///
/// # Errors
/// The errors of [`run`], or a thread cannot be started.
pub async fn run_on_threads(
    ps: Ps,
    listener: Listener,
    dialer: Dialer,
    shutdown: CancellationToken,
) -> Result<()> {
    let serving = |ps, health, stopping| serve_on_threads_with(ps, listener, health, stopping);
    take_part(ps, serving, dialer, shutdown).await
}

/// Serves as long as this ps is a member of the fleet.
async fn take_part<S>(
    ps: Ps,
    serving: impl FnOnce(Ps, HealthReporter, CancellationToken) -> S,
    dialer: Dialer,
    shutdown: CancellationToken,
) -> Result<()>
where
    S: Future<Output = Result<()>>,
{
    let options = ps.options();
    ps.dials_with(dialer.clone());
    let refused = |failure| Error::Session { master: options.master.clone(), failure };
    let masters = Failover::new(&dialer, &options.master, Purpose::Control).map_err(refused)?;
    let (session, driver) = Session::start(
        masters,
        pb::RegisterRequest {
            role: pb::ProcessRole::Ps.into(),
            name: options.name.clone(),
            program_version: PROGRAM_VERSION.to_owned(),
            url: options.url.clone(),
            ..Default::default()
        },
    );
    // Whichever way this function ends, pulls that wait are answered.
    let stopping = CancellationToken::new();
    let _stop = stopping.clone().drop_guard();
    let (health, _) = health_reporter();
    tokio::select! {
        biased;
        served = serving(ps.clone(), health.clone(), stopping.clone()) => served,
        failure = driver => Err(refused(failure)),
        // What it holds is lost. Its successor loads a checkpoint, as after any loss of a ps.
        failure = ps.device_failure() => Err(Error::Device(failure)),
        never = net::health::follow(&health, &session) => match never {},
        never = leave(&ps, &session, &shutdown, &stopping) => match never {},
        never = close_ended_jobs(&ps, &session) => match never {},
        never = report_checkpoints(&ps, &session) => match never {},
    }
}

/// Serves like [`serve`], on a few threads with a runtime each that share the connections. One
/// thread reads a connection's socket and adds up its gradients. The threads of one shared runtime
/// would move each message between cores twice.
///
/// # Errors
/// A thread cannot be started, or the server breaks.
pub async fn serve_on_threads(ps: Ps, listener: Listener, shutdown: CancellationToken) -> Result<()> {
    let (health, _) = health_reporter();
    net::health::set_ready(&health, true).await;
    serve_on_threads_with(ps, listener, health, shutdown).await
}

/// Serves on threads; the caller says by `health` whether this ps is ready.
async fn serve_on_threads_with(
    ps: Ps,
    listener: Listener,
    health: HealthReporter,
    shutdown: CancellationToken,
) -> Result<()> {
    let threads = ps.options().threads;
    let mut serving = Vec::new();
    for number in 0..threads {
        let (ps, listener, health, shutdown) =
            (ps.clone(), listener.try_clone()?, health.clone(), shutdown.clone());
        let (ended_tx, ended) = oneshot::channel();
        // All wait for connections at the one socket; who is free takes the next.
        let thread = move || {
            let serving = async { serve_with(ps, listener.accept()?, health, shutdown).await };
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            let served = runtime.map_err(Error::from).and_then(|runtime| runtime.block_on(serving));
            let _ = ended_tx.send(served);
        };
        std::thread::Builder::new().name(format!("connections-{number}")).spawn(thread)?;
        serving.push(async move { ended.await.unwrap_or_else(|_| Err(Error::ThreadEnded)) });
    }
    futures::future::try_join_all(serving).await.map(drop)
}

/// Serves gRPC without a master until `shutdown`: parameters, health and reflection. It then
/// accepts no more connections, lets calls in flight finish within a second, and returns.
///
/// # Errors
/// The server breaks.
pub async fn serve<I, T>(ps: Ps, incoming: I, shutdown: CancellationToken) -> Result<()>
where
    I: Stream<Item = io::Result<Accepted<T>>> + Send,
    T: Io,
{
    let (health, _) = health_reporter();
    net::health::set_ready(&health, true).await;
    serve_with(ps, incoming, health, shutdown).await
}

/// Serves connections; the caller says by `health` whether this ps is ready.
async fn serve_with<I, T>(
    ps: Ps,
    incoming: I,
    health: HealthReporter,
    shutdown: CancellationToken,
) -> Result<()>
where
    I: Stream<Item = io::Result<Accepted<T>>> + Send,
    T: Io,
{
    health.set_serving::<ParametersServer<Service>>().await;
    let schema = || {
        tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(pb::FILE_DESCRIPTOR_SET)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
    };
    // The second is what Python's grpcio-reflection and older grpcurl ask for.
    let (reflection, reflection_alpha) = (schema().build_v1()?, schema().build_v1alpha()?);
    let parameters = Bulk::new(Service::new(ps, shutdown.clone()));
    let serving = net::channel::server()
        .add_service(parameters)
        .add_service(HealthServer::new(HealthService::from_health_reporter(health.clone())))
        .add_service(reflection)
        .add_service(reflection_alpha)
        .serve_with_incoming_shutdown(incoming, shutdown.cancelled());
    let overdue = async {
        shutdown.cancelled().await;
        health.set_not_serving::<ParametersServer<Service>>().await;
        net::health::set_ready(&health, false).await;
        tokio::time::sleep(GRACE).await;
    };
    tokio::select! {
        biased;
        served = serving => Ok(served?),
        () = overdue => {
            tracing::info!("leaving while connections are still open");
            Ok(())
        }
    }
}

/// Begins to stop when its jobs are saved after `shutdown`, or cannot be. Never ends by itself.
async fn leave(
    ps: &Ps,
    session: &Session,
    shutdown: &CancellationToken,
    stopping: &CancellationToken,
) -> Infallible {
    shutdown.cancelled().await;
    let drain = ps.options().drain;
    // Without a master nobody could complete a checkpoint.
    let (mut incarnations, mut replies) = (session.incarnations(), session.replies());
    if ps.has_something_to_save() && incarnations.borrow_and_update().is_some() {
        tracing::info!("leaving when the jobs are saved, or after {drain:?}");
        session.report(|beat| {
            beat.draining = true;
            true
        });
        let let_go = async {
            tokio::select! {
                biased;
                reply = replies.wait_for(|reply| reply.may_leave) => reply.is_ok(),
                _ = incarnations.wait_for(Option::is_none) => false,
            }
        };
        match tokio::time::timeout(drain, let_go).await {
            Ok(true) => tracing::info!("the jobs are saved; leaving"),
            Ok(false) => tracing::warn!("the master is gone, so nobody completes a checkpoint; leaving"),
            Err(_) => tracing::warn!("the jobs are not saved after {drain:?}; leaving"),
        }
    }
    stopping.cancel();
    std::future::pending().await
}

/// Closes the jobs that the master says are over. Never ends by itself.
async fn close_ended_jobs(ps: &Ps, session: &Session) -> Infallible {
    let mut incarnations = session.incarnations();
    let mut replies = session.replies();
    let mut current: Option<(Registered, Instant)> = None;
    loop {
        let changed = tokio::select! {
            biased;
            changed = incarnations.changed() => changed.map(|()| None),
            changed = replies.changed() => changed.map(|()| Some(replies.borrow_and_update().clone())),
        };
        match (changed, current) {
            (Ok(None), _) => {
                let registered = *incarnations.borrow_and_update();
                registered.inspect(|&Registered { master, starts, .. }| {
                    ps.registered_with(MasterStart { master, starts });
                });
                current = registered.map(|registered| (registered, Instant::now()));
                // What was not read yet comes from the session before.
                replies.mark_unchanged();
            }
            (Ok(Some(reply)), Some((registered, since))) => {
                for job in ended(&reply, &ps.jobs(), registered.master, since.elapsed() >= SETTLE) {
                    ps.close(job);
                }
            }
            (Ok(Some(_)), None) => {}
            // The session's driver is gone, and with it whoever could say anything.
            (Err(_), _) => return std::future::pending().await,
        }
    }
}

/// Tells the master of checkpoints, at each heartbeat until it has taken what it was told. Never
/// ends by itself.
async fn report_checkpoints(ps: &Ps, session: &Session) -> Infallible {
    let mut reports = ps.reports();
    let mut replies = session.replies();
    loop {
        let replied = tokio::select! {
            biased;
            changed = reports.changed() => changed.map(|()| false),
            changed = replies.changed() => changed.map(|()| true),
        };
        match replied {
            Ok(true) => {
                let taken = replies.borrow_and_update().reports_taken.clone();
                ps.reports_taken(&taken);
            }
            Ok(false) => {
                let reported = reports.borrow_and_update();
                session.report(|beat| {
                    reported.fill(beat);
                    true
                });
            }
            // The session's driver is gone, and with it whoever could listen.
            Err(_) => return std::future::pending().await,
        }
    }
}

/// Returns which of `open` jobs (with the process start of the master that opened each) are over by
/// a reply of `master`. `settled`: it has had the time to name all jobs that it knows.
fn ended(reply: &pb::HeartbeatReply, open: &BTreeMap<JobId, u64>, master: u64, settled: bool) -> Vec<JobId> {
    let alive: BTreeSet<JobId> = reply.jobs.iter().copied().map(JobId).collect();
    let over = |&(&job, &opened_by): &(&JobId, &u64)| {
        // A job above the newest began after this reply was made. Another master counted otherwise.
        let known = if opened_by == master { job.get() <= reply.newest_job } else { settled };
        known && !alive.contains(&job)
    };
    open.iter().filter(over).map(|(&job, _)| job).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ended_of(jobs: &[u64], newest_job: u64, open: &[(u64, u64)], settled: bool) -> Vec<u64> {
        let reply = pb::HeartbeatReply { jobs: jobs.to_vec(), newest_job, ..Default::default() };
        let open = open.iter().map(|&(job, master)| (JobId(job), master)).collect();
        ended(&reply, &open, 70, settled).into_iter().map(JobId::get).collect()
    }

    #[test]
    fn a_job_that_the_master_no_longer_lists_is_over() {
        assert_eq!(ended_of(&[2], 3, &[(1, 70), (2, 70), (3, 70)], false), [1, 3]);
    }

    #[test]
    fn a_job_that_began_after_the_reply_is_not_over() {
        assert_eq!(ended_of(&[2], 3, &[(2, 70), (4, 70)], true), [0; 0]);
    }

    #[test]
    fn jobs_of_another_master_are_over_once_the_new_one_had_time_to_list_them() {
        let open = [(1, 69), (2, 69), (9, 69)];
        assert_eq!(ended_of(&[2], 2, &open, false), [0; 0]);
        assert_eq!(ended_of(&[2], 2, &open, true), [1, 9]);
    }
}
