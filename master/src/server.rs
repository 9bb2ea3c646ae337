//! The start of a master: its data folder, the jobs of its journal, and the server itself.

use std::fs::File;
use std::io::{self, Read as _};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use futures::Stream;
use net::channel::{Accepted, Dialer, MESSAGE_BYTES_MAX};
use net::metrics::Reading;
use proto::pb;
use proto::pb::fleet_server::FleetServer;
use proto::pb::jobs_server::JobsServer;
use proto::pb::scripts_server::ScriptsServer;
use store::Stores;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_util::sync::CancellationToken;
use tonic_health::server::HealthReporter;

use crate::artifacts::{Artifacts, BytesMax, Disk, Held, Synced, Unsynced};
use crate::books::Books;
use crate::clock::{Clock, Now};
use crate::config::Options;
use crate::error::{Error, Result};
use crate::etcd::{EtcdStore, Leadership};
use crate::gate::Gate;
use crate::journal::{Batch, FileStore, Found, Journal, MemoryStore, Store, keep_identity};
use crate::metrics::Metrics;
use crate::secrets::Key;
use crate::service::{FleetService, JobsService, ScriptsService};
use crate::shared::{SHUTDOWN, Shared, Surroundings};

/// How often deadlines are looked at.
const TICK: Duration = Duration::from_millis(100);

/// Runs a master until `shutdown`.
///
/// # Errors
/// See [`Master::open`] and [`Master::serve`].
pub async fn run<IO>(
    options: Options,
    stores: Stores,
    incoming: impl Stream<Item = io::Result<Accepted<IO>>> + Send,
    dialer: Dialer,
    shutdown: CancellationToken,
) -> Result<()>
where
    IO: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    Master::open(options, stores, dialer).await?.serve(incoming, shutdown).await
}

/// A master: its books and its data folder. A clone is cheap and is the same master.
#[derive(Clone, Debug)]
pub struct Master {
    shared: Arc<Shared>,
}

impl Master {
    /// Takes the data folder, and the jobs of the earlier start that its journal has.
    ///
    /// # Errors
    /// [`Error::Options`] with every violation; a data folder that cannot be used or that another
    /// master uses.
    pub async fn open(options: Options, stores: Stores, dialer: Dialer) -> Result<Self> {
        options.validate().map_err(Error::Options)?;
        let disk: Arc<dyn Disk> = if options.journal { Arc::new(Synced) } else { Arc::new(Unsynced) };
        let held = Artifacts::hold(&options.data_dir, disk)?;
        let store: Arc<dyn Store> = match options.journal {
            true => Arc::new(FileStore::open(&options.data_dir.join("journal.redb"))?),
            false => Arc::new(MemoryStore::default()),
        };
        Self::alone(options, stores, dialer, held, store, Clock::start()).await
    }

    /// Takes up the journal of several masters, as the one that leads.
    ///
    /// # Errors
    /// A data folder that cannot be used or is not that of the journal, or a journal that cannot be
    /// read.
    pub(crate) async fn elected(
        options: Options,
        stores: Stores,
        dialer: Dialer,
        store: Arc<EtcdStore>,
        leadership: Arc<Leadership>,
    ) -> Result<Self> {
        let clock = Clock::start();
        let mut found = Found::load(store.as_ref()).await?;
        check_folder(&options.data_dir, &found.master)?;
        // Before an id is given away that another lead may have used.
        let starts = found.master.starts + 1;
        let identity = match found.master.identity {
            // A leader that died before it wrote a journal may have marked the folder.
            0 => Artifacts::identity(&options.data_dir)?.unwrap_or_else(|| fresh_identity(&clock, starts)),
            identity => identity,
        };
        let artifacts = Artifacts::share(&options.data_dir, BytesMax::of(&options), starts, identity)?;
        let kept = kept(&mut found, identity, starts);
        store.commit(&kept).await.map_err(Error::Store)?;
        let (stores, stream_silence) = (options.limit(stores)?, options.stream_silence);
        let books = restored(options, identity, &artifacts, clock.now(), found)?;
        let journal = Journal::new(store);
        let around = Surroundings { stores, dialer, artifacts, journal, clock, stream_silence };
        Ok(Self::start(books, around, Some(leadership)))
    }

    /// Opens a master with a journal in `store`, and a clock that may be wrong.
    #[doc(hidden)]
    pub async fn open_with(
        options: Options,
        stores: Stores,
        dialer: Dialer,
        store: Arc<dyn Store>,
        clock: Clock,
    ) -> Result<Self> {
        options.validate().map_err(Error::Options)?;
        let held = Artifacts::hold(&options.data_dir, Arc::new(Unsynced))?;
        Self::alone(options, stores, dialer, held, store, clock).await
    }

    async fn alone(
        options: Options,
        stores: Stores,
        dialer: Dialer,
        held: Held,
        store: Arc<dyn Store>,
        clock: Clock,
    ) -> Result<Self> {
        let mut found = Found::load(store.as_ref()).await?;
        let artifacts = Artifacts::open(held, BytesMax::of(&options), found.master.starts)?;
        let starts = artifacts.starts;
        let identity = match found.master.identity {
            0 => fresh_identity(&clock, starts),
            identity => identity,
        };
        // Before an id of this start is given away: the folder may lose its count of them.
        let journal = Journal::new(store);
        journal.append(kept(&mut found, identity, starts));
        journal.flush().await;
        let (stores, stream_silence) = (options.limit(stores)?, options.stream_silence);
        let books = restored(options, identity, &artifacts, clock.now(), found)?;
        let around = Surroundings { stores, dialer, artifacts, journal, clock, stream_silence };
        Ok(Self::start(books, around, None))
    }

    fn start(books: Books, around: Surroundings, leadership: Option<Arc<Leadership>>) -> Self {
        Self { shared: Arc::new(Shared::new(books, around, leadership)) }
    }

    /// Serves `incoming` connections until `shutdown`; then long calls end and open ones get a
    /// moment.
    ///
    /// # Errors
    /// The server cannot go on.
    pub async fn serve<IO>(
        &self,
        incoming: impl Stream<Item = io::Result<Accepted<IO>>> + Send,
        shutdown: CancellationToken,
    ) -> Result<()>
    where
        IO: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        let shared = &self.shared;
        let (reporter, health) = tonic_health::server::health_reporter();
        net::health::set_ready(&reporter, true).await;
        let schema = || {
            tonic_reflection::server::Builder::configure()
                .register_encoded_file_descriptor_set(pb::FILE_DESCRIPTOR_SET)
        };
        let reflection = schema().build_v1().expect("our own schema is well-formed");
        // What Python's grpcio-reflection and older grpcurl ask for.
        let reflection_alpha = schema().build_v1alpha().expect("our own schema is well-formed");
        let (jobs, fleet) = (JobsService::new(shared.clone()), FleetService::new(shared.clone()));
        let scripts = ScriptsService::new(shared.clone());
        let gate = shared.leadership.clone().map_or(Gate::Open, Gate::Leading);
        let serving = net::channel::server()
            .layer(gate)
            .add_service(health)
            .add_service(reflection)
            .add_service(reflection_alpha)
            .add_service(JobsServer::new(jobs).max_decoding_message_size(MESSAGE_BYTES_MAX))
            .add_service(FleetServer::new(fleet).max_decoding_message_size(MESSAGE_BYTES_MAX))
            .add_service(ScriptsServer::new(scripts).max_decoding_message_size(MESSAGE_BYTES_MAX))
            .serve_with_incoming_shutdown(incoming, shared.stopping.clone().cancelled_owned());
        let stopped = async {
            shutdown.cancelled().await;
            net::health::set_ready(&reporter, false).await;
            shared.stopping.cancel();
            tokio::time::sleep(SHUTDOWN).await;
        };
        let served = tokio::select! {
            biased;
            served = serving => Ok(served?),
            () = stopped => {
                tracing::warn!("calls were still open {SHUTDOWN:?} after the shutdown began; leaving them");
                Ok(())
            }
            () = tick(shared, &reporter) => unreachable!("ticks for ever"),
            () = shared.journal.write() => unreachable!("writes for ever"),
        };
        if shared.leads() {
            // What happened last is worth a moment; a store that fails is not waited for.
            let _ = tokio::time::timeout(SHUTDOWN, shared.journal.flush()).await;
        }
        served
    }

    /// Returns a function that reads the numbers of this master, for exporters of metrics.
    pub fn readings(&self) -> impl Fn() -> Vec<Reading> + Send + Sync + 'static {
        let master = self.clone();
        move || master.metrics().readings()
    }

    /// Returns the counts of this master so far.
    pub fn metrics(&self) -> Metrics {
        self.shared.metrics()
    }
}

/// Returns a key that nobody can guess.
fn random() -> Result<Key> {
    let path = Path::new("/dev/urandom");
    let mut key = [0; 32];
    let read = File::open(path).and_then(|mut file| file.read_exact(&mut key));
    read.map(|()| Key(key)).map_err(|source| Error::File { path: path.to_owned(), source })
}

async fn tick(shared: &Arc<Shared>, health: &HealthReporter) {
    let mut ready = true;
    let mut ticks = tokio::time::interval(TICK);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        shared.act(Books::on_tick);
        shared.drop_ended_uploads();
        let is_ready = shared.check_journal().is_ok();
        // At a shutdown somebody else has said that it is not.
        if is_ready != ready && !shared.stopping.is_cancelled() {
            net::health::set_ready(health, is_ready).await;
            ready = is_ready;
        }
    }
}

/// Returns the first batch of a start. It removes the entries that earlier versions left over, and
/// marks that they are gone.
fn kept(found: &mut Found, identity: u64, starts: u64) -> Batch {
    let mut batch = std::mem::take(&mut found.left_over);
    batch.append(keep_identity(identity, starts));
    batch
}

/// Returns the books, with the jobs that earlier starts wrote down.
fn restored(options: Options, identity: u64, artifacts: &Artifacts, now: Now, found: Found) -> Result<Books> {
    let mut books = Books::new(options, random()?, identity, artifacts.starts, artifacts.newest_job);
    let mut unreadable = found.unreadable;
    books.set_indexes(found.indexes);
    found.ended.into_iter().for_each(|(id, job)| books.archive(id, job));
    for (record, log) in found.jobs {
        unreadable.extend(books.restore(now, record, log).err());
    }
    for record in found.scripts {
        let script = record.script;
        if let Err(reason) = books.restore_script(now, record) {
            tracing::error!(script, reason, "a script of the journal cannot be taken up; it stays as it is");
        }
    }
    for job in unreadable {
        tracing::error!(job = job.name, reason = job.reason, "a job cannot be taken up; it stays as it is");
        books.keep(job);
    }
    Ok(books)
}

/// Returns an identity that no other master has.
fn fresh_identity(clock: &Clock, starts: u64) -> u64 {
    (clock.now().unix_ms << 16) | (starts & 0xFFFF)
}

/// Refuses a data folder that is not the one of a journal that several masters share, by the
/// journal's record of the master.
pub(crate) fn check_folder(folder: &Path, record: &pb::MasterRecord) -> Result<()> {
    match record.identity {
        0 => Ok(()),
        identity => Artifacts::check(folder, identity),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::sync::atomic::{AtomicU32, Ordering};

    use proto::ids::JobId;

    use super::*;
    use crate::error::StoreError;
    use crate::etcd::tests::{client, elected, server::Etcd};
    use crate::job::Effect;

    async fn open(folder: &Path) -> Master {
        let options = Options { data_dir: folder.to_owned(), ..Options::default() };
        Master::open(options, Stores::default(), Dialer::tcp()).await.expect("a good folder")
    }

    /// Returns the number that the next process to register gets.
    fn incarnation(master: &Master) -> u64 {
        let request = pb::RegisterRequest {
            name: "w".to_owned(),
            role: pb::ProcessRole::Worker.into(),
            program_version: proto::PROGRAM_VERSION.to_owned(),
            ..Default::default()
        };
        master.shared.act(|books, now| books.register(now, &request)).expect("registered").incarnation
    }

    #[tokio::test]
    async fn no_incarnation_comes_again_when_the_number_of_starts_is_lost_or_torn() {
        let folder = tempfile::tempdir().expect("a folder");
        let mut newest = 0;
        for torn in [None, Some(&b""[..]), Some(b"\0\0"), Some(b"1\n")] {
            let next = incarnation(&open(folder.path()).await);
            assert!(next > newest, "{next} after {newest}, {torn:?}");
            newest = next;
            let starts = folder.path().join("starts");
            match torn {
                None => std::fs::remove_file(starts).expect("it was there"),
                Some(bytes) => std::fs::write(starts, bytes).expect("written"),
            }
        }
        assert!(incarnation(&open(folder.path()).await) > newest);
    }

    /// Opens empty, and then takes nothing for ever.
    #[derive(Debug, Default)]
    struct Stuck(AtomicU32);

    #[async_trait::async_trait]
    impl Store for Stuck {
        async fn load(&self) -> Result<BTreeMap<String, Vec<u8>>, StoreError> {
            Ok(BTreeMap::new())
        }

        async fn commit(&self, _: &Batch) -> Result<(), StoreError> {
            match self.0.fetch_add(1, Ordering::Relaxed) {
                0 => Ok(()),
                _ => std::future::pending().await,
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_master_that_no_longer_leads_frees_all_it_knew_although_its_journal_was_never_written() {
        let folder = tempfile::tempdir().expect("a folder");
        let options = Options { data_dir: folder.path().to_owned(), ..Options::default() };
        let (dialer, store, clock) = (Dialer::tcp(), Arc::<Stuck>::default(), Clock::at_rate(1.0));
        let master =
            Master::open_with(options, Stores::default(), dialer, store, clock).await.expect("opened");
        let known = Arc::downgrade(&master.shared);
        // Something to write down, a call that waits for it, and an effect that does.
        let shared = master.shared.clone();
        master.shared.act(|books, now| {
            let file = proto::spec::parse(JOB, Path::new("job.toml"), &[]).expect("a good job");
            let id = books.admit(&file).expect("room");
            books.submit(now, id, file, Vec::new(), None, String::new())
        });
        let call = tokio::spawn(async move { shared.durable().await });
        let ask = Effect::Ask(1, Vec::new());
        master.shared.follow(JobId(1), ask, master.shared.journal.newest());
        let shutdown = CancellationToken::new();
        shutdown.cancel();
        let nobody = futures::stream::pending::<io::Result<Accepted<tokio::io::DuplexStream>>>();
        master.serve(nobody, shutdown).await.expect("served");
        drop(master);
        assert!(call.await.expect("no panic").is_err(), "it was never durable");
        let freed = async {
            while known.strong_count() > 0 {
                tokio::time::sleep(TICK).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(60), freed).await.expect("somebody holds it");
    }

    #[tokio::test]
    async fn a_master_that_no_longer_leads_says_nothing_to_a_ps() {
        let Some(etcd) = Etcd::start() else { return };
        let folder = tempfile::tempdir().expect("a folder");
        let options = Options { data_dir: folder.path().to_owned(), ..Options::default() };
        let leadership = elected(&etcd, "http://a:1").await;
        let store = Arc::new(EtcdStore::new(client(&etcd), leadership.clone()));
        let master = Master::elected(options, Stores::default(), Dialer::tcp(), store, leadership.clone());
        let shared = master.await.expect("elected").shared;
        let (nobody, durable) = (Effect::Finish(Vec::new()), shared.journal.newest());
        assert!(shared.speak_when_durable(JobId(1), nobody.clone(), durable).await, "it leads");
        leadership.lose("a test takes the lead away");
        assert!(!shared.speak_when_durable(JobId(1), nobody, durable).await, "another may lead");
    }

    const JOB: &str = r#"
name = "digits"
epochs = 2
model = { builtin = "softmax" }
data = { format = "idx", train = { features = ["x.gz"], labels = ["y.gz"] } }
batch = { micro = 1, effective = 4 }
optimizer = { kind = "sgd", learning_rate = 0.5 }
"#;
}
