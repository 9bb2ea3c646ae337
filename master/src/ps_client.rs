//! Calls of the master to ps: open and close partitions, ask what they hold. Each is safe to
//! repeat. They share one connection to each ps.

use std::time::Duration;

use futures::future::try_join_all;
use net::channel::{Channel, Dialer, Purpose};
use net::ps_client::PsClients;
use proto::ids::{Era, JobId, Version};
use proto::pb;
use proto::pb::parameters_client::ParametersClient;
use proto::retry::Retry;
use proto::status::{Failure, Kind};

use crate::ps_address::PsAddress;

/// Longest wait for one answer: all of these are small.
const ANSWER: Duration = Duration::from_secs(10);

/// How long the connection to a ps is kept without calls. Each epoch has some, and a ps that left
/// is forgotten in time.
const IDLE: Duration = Duration::from_secs(600);

/// About three seconds of trying; who waits for the result decides what comes next.
const RETRY: Retry =
    Retry { first: Duration::from_millis(50), longest: Duration::from_secs(1), attempts_max: 7 };

/// Returns the clients of a master for its ps.
pub(crate) fn clients(dialer: Dialer) -> PsClients {
    PsClients::new(dialer, Purpose::Control, IDLE)
}

/// Opens partitions, each on its ps.
///
/// # Errors
/// The first that cannot be opened.
pub(crate) async fn open(
    clients: &PsClients,
    partitions: Vec<(PsAddress, pb::OpenRequest)>,
) -> Result<(), Failure> {
    try_join_all(partitions.iter().map(|(ps, request)| {
        call(clients, ps, "open", move |mut client| async move { client.open(request.clone()).await })
    }))
    .await
    .map(drop)
}

/// Lets a ps write a file to where a job's checkpoints shall lie.
///
/// # Errors
/// It does not answer, or cannot write there.
pub(crate) async fn probe(
    clients: &PsClients,
    ps: &PsAddress,
    request: &pb::ProbeRequest,
) -> Result<(), Failure> {
    let probing = |mut client: ParametersClient<Channel>| async move { client.probe(request.clone()).await };
    call(clients, ps, "probe", probing).await.map(drop)
}

/// Returns what the ps have applied of a job's partitions that live there, in no order. A ps that
/// does not know the job holds none.
///
/// # Errors
/// The first that does not answer.
pub(crate) async fn ledgers(
    clients: &PsClients,
    list: &[PsAddress],
    job: JobId,
) -> Result<Vec<pb::PartitionLedger>, Failure> {
    let request = pb::LedgerRequest { job: job.get() };
    let replies = try_join_all(list.iter().map(|ps| async move {
        let reply =
            call(clients, ps, "ledger", move |mut client| async move { client.ledger(request).await });
        match reply.await {
            Err(failure) if failure.kind == Kind::NotFound => Ok(Vec::new()),
            reply => reply.map(|reply| ps.own(reply.partitions)),
        }
    }));
    Ok(replies.await?.concat())
}

/// Lets the ps forget versions up to this one that they kept for measuring, except `best`.
///
/// # Errors
/// The first that does not answer.
pub(crate) async fn unpin(
    clients: &PsClients,
    list: &[PsAddress],
    job: JobId,
    era: Era,
    version: Version,
    best: Option<Version>,
) -> Result<(), Failure> {
    let keep = best.map_or(0, Version::get);
    let request = pb::UnpinRequest { job: job.get(), version: version.get(), era: era.get(), keep };
    let replies = list
        .iter()
        .map(|ps| call(clients, ps, "unpin", move |mut client| async move { client.unpin(request).await }));
    try_join_all(replies).await.map(drop)
}

/// Asks the ps for a checkpoint; says whether all of them will come to that version.
///
/// # Errors
/// The first that does not answer.
pub(crate) async fn save(
    clients: &PsClients,
    list: &[PsAddress],
    job: JobId,
    version: Version,
) -> Result<bool, Failure> {
    let request = pb::SaveRequest { job: job.get(), version: version.get() };
    let replies = list
        .iter()
        .map(|ps| call(clients, ps, "save", move |mut client| async move { client.save(request).await }));
    Ok(try_join_all(replies).await?.iter().all(|reply| reply.coming))
}

/// Lets the ps drop a job whose end is durable.
///
/// # Errors
/// The first that does not answer; it hears of the job's end with its next heartbeat.
pub(crate) async fn close(
    clients: &PsClients,
    list: &[PsAddress],
    request: pb::CloseRequest,
) -> Result<(), Failure> {
    let replies = list
        .iter()
        .map(|ps| call(clients, ps, "close", move |mut client| async move { client.close(request).await }));
    try_join_all(replies).await.map(drop)
}

async fn call<T, Fut>(
    clients: &PsClients,
    ps: &PsAddress,
    what: &str,
    call: impl Fn(ParametersClient<Channel>) -> Fut,
) -> Result<T, Failure>
where
    Fut: Future<Output = Result<tonic::Response<T>, tonic::Status>>,
{
    let client = clients.at(&ps.url)?;
    let seed = proto::random::key(0, &ps.name, 0);
    let visible = |attempt: u32, failure: &Failure| {
        if attempt == 1 {
            tracing::warn!(ps = ps.name, reason = %failure, "{what}: no answer; trying again");
        }
    };
    let attempt = || client.call(ANSWER, &call);
    let named = |failure: Failure| {
        Failure::new(failure.kind, format!("{what} on ps `{}` ({}): {}", ps.name, ps.url, failure.message))
    };
    net::retry::repeat(RETRY, seed, visible, attempt).await.map_err(named)
}
