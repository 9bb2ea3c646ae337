//! One of several masters: stands by until it is elected, leads until it is not, and stands by
//! again.
//!
//! A master that stands by answers every call with who leads. One that was elected takes up the
//! journal like after a restart; what it knew from an earlier lead is gone by then, and read again.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use futures::Stream;
use net::channel::{Accepted, Dialer};
use net::metrics::Board;
use store::Stores;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::config::{ElectionOptions, Options};
use crate::error::{Error, Result};
use crate::etcd::{Client, Election, EtcdStore, Leadership};
use crate::gate::Gate;
use crate::journal::{keys, master_record};
use crate::server::Master;

/// Longest wait for one answer of etcd, at least.
const PATIENCE: Duration = Duration::from_secs(1);

/// Wait of a master that could not read the journal, before it tries again.
const AGAIN: Duration = Duration::from_secs(1);

/// Longest wait for calls that are being refused, before this master leads.
const REFUSED: Duration = Duration::from_secs(1);

/// What a master has from outside.
#[derive(Debug)]
pub struct Outside {
    /// Where checkpoints lie.
    pub stores: Stores,
    /// How it reaches ps, and etcd.
    pub dialer: Dialer,
    /// Where its numbers are shown while it leads.
    pub board: Board,
}

/// Runs one of several masters until `shutdown`.
///
/// # Errors
/// Options that contradict themselves, a data folder that is not the one of the other masters, a
/// journal that cannot be read, or a server that cannot go on.
pub async fn run_elected<IO>(
    options: Options,
    election: ElectionOptions,
    outside: Outside,
    incoming: impl Stream<Item = io::Result<Accepted<IO>>> + Send,
    shutdown: CancellationToken,
) -> Result<()>
where
    IO: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let wrong: Vec<_> =
        [options.validate(), election.validate()].into_iter().filter_map(Result::err).collect();
    if !wrong.is_empty() {
        return Err(Error::Options(wrong.concat()));
    }
    let patience = (election.ttl / 4).max(PATIENCE);
    // etcd has locks of its own, and no business with this cluster's.
    let client = Client::new(&outside.dialer.without_keys(), &election.etcd, &election.prefix, patience)
        .map_err(|failure| Error::Options(vec![format!("etcd: {failure}")]))?;
    let campaign = Election::new(client.clone(), election.url, election.ttl);
    let mut incoming = std::pin::pin!(incoming);
    while !shutdown.is_cancelled() {
        let stop = shutdown.child_token();
        let (leader_tx, leader) = watch::channel(None);
        let elected = async {
            let _stop = stop.clone().drop_guard();
            tokio::select! {
                biased;
                () = shutdown.cancelled() => Ok(None),
                error = foreign_folder(&options, &client) => Err(error),
                leadership = campaign.campaign(&leader_tx) => Ok(Some(Arc::new(leadership))),
            }
        };
        let refusing = refuse(incoming.as_mut(), leader, stop.clone());
        let (elected, refused) = tokio::join!(elected, refusing);
        let Some(leadership) = elected? else { break };
        // Refusing ends by itself only if the server is broken, which the next one shows too.
        drop(refused);
        let led = lead(&options, &outside, &client, &leadership, incoming.as_mut(), &shutdown).await;
        leadership.resign().await;
        led?;
    }
    Ok(())
}

/// Leads until the lead is lost, or until `shutdown`.
async fn lead<IO>(
    options: &Options,
    outside: &Outside,
    client: &Client,
    leadership: &Arc<Leadership>,
    incoming: impl Stream<Item = io::Result<Accepted<IO>>> + Send,
    shutdown: &CancellationToken,
) -> Result<()>
where
    IO: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let store = Arc::new(EtcdStore::new(client.clone(), leadership.clone()));
    let stop = shutdown.child_token();
    let serving = async {
        let (stores, dialer) = (outside.stores.clone(), outside.dialer.clone());
        let opening = Master::elected(options.clone(), stores, dialer, store, leadership.clone());
        let master = tokio::select! {
            biased;
            () = leadership.lost().cancelled() => return Ok(()),
            () = stop.cancelled() => return Ok(()),
            master = opening => master,
        };
        let master = match master {
            // etcd may be well for the next one, or for this one later.
            Err(error @ Error::Store(_)) => {
                tracing::error!(reason = %error, "this master was elected and cannot lead; giving the lead back");
                tokio::time::sleep(AGAIN).await;
                return Ok(());
            }
            master => master?,
        };
        tracing::info!("this master leads");
        outside.board.show(master.readings());
        master.serve(incoming, stop.clone()).await
    };
    let keeping = async {
        leadership.keep().await;
        stop.cancel();
        std::future::pending::<()>().await;
    };
    tokio::select! {
        biased;
        served = serving => served,
        () = keeping => unreachable!("never ends"),
    }
}

/// Tells everybody who leads, until `stop`.
async fn refuse<IO>(
    incoming: impl Stream<Item = io::Result<Accepted<IO>>> + Send,
    leader: watch::Receiver<Option<String>>,
    stop: CancellationToken,
) -> Result<()>
where
    IO: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let (reporter, health) = tonic_health::server::health_reporter();
    net::health::set_ready(&reporter, false).await;
    let serving = net::channel::server()
        .layer(Gate::StandingBy(leader))
        .add_service(health)
        .serve_with_incoming_shutdown(incoming, stop.clone().cancelled_owned());
    let overdue = async {
        stop.cancelled().await;
        tokio::time::sleep(REFUSED).await;
    };
    tokio::select! {
        biased;
        served = serving => Ok(served?),
        () = overdue => Ok(()),
    }
}

/// Ends with an error when the data folder is not that of the journal in etcd, before anybody
/// relies on this master.
async fn foreign_folder(options: &Options, client: &Client) -> Error {
    loop {
        // A journal that cannot be read, or is not there yet, is looked at again.
        if let Ok(Some(record)) = EtcdStore::peek(client, keys::MASTER).await {
            let record = master_record(&record);
            match record.and_then(|record| crate::server::check_folder(&options.data_dir, &record)) {
                Err(error) => return error,
                Ok(()) => return std::future::pending().await,
            }
        }
        tokio::time::sleep(AGAIN).await;
    }
}
