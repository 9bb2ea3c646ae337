//! Memory and journal are bounded: what is forgotten leaves nothing behind, and what has ended is
//! small and in pages.

use std::sync::Arc;

use master::{Batch, MemoryStore, Store};
use prost::Message as _;
use proto::pb;
use proto::pb::JobState;
use proto::pb::event::Kind as Event;
use proto::status::{Failure, Kind};

use crate::harness::{Cluster, Worker, job, soon};

/// Entries of jobs that have ended, as a master writes them, each with some events.
fn ended(jobs: std::ops::RangeInclusive<u64>, reason: &str, events: u64) -> Batch {
    let of = |job: u64| {
        let status = pb::JobStatus {
            job,
            name: format!("old-{job}"),
            state: JobState::Succeeded.into(),
            reason: reason.to_owned(),
            ..Default::default()
        };
        let record = pb::JobRecord { job, ended: Some(status), ..Default::default() };
        let event = move |sequence| {
            let kind = Event::Warning(pb::WarningEvent { message: format!("event {sequence}") });
            let event = pb::Event { sequence, unix_ms: 1, kind: Some(kind) };
            (format!("event/{job:020}/{sequence:020}"), Some(event.encode_to_vec()))
        };
        let record = (format!("job/{job:020}"), Some(record.encode_to_vec()));
        std::iter::once(record).chain((1..=events).map(event))
    };
    jobs.flat_map(of).collect()
}

async fn events_in(disk: &MemoryStore, job: u64) -> usize {
    let prefix = format!("event/{job:020}/");
    disk.load().await.expect("memory").keys().filter(|key| key.starts_with(&prefix)).count()
}

#[tokio::test]
async fn what_has_ended_is_listed_in_pages_that_fit_into_messages_and_is_told_like_any_job() {
    let disk = MemoryStore::default();
    let reason = "x".repeat(4000);
    disk.commit(&ended(1..=900, &reason, 3)).await.expect("memory");
    let cluster = Cluster::mortal(Arc::new(disk)).await;
    let live = cluster.submit(&job(|_| ()), &[]).await.expect("room");
    for limit in [0, 7, 1000] {
        let (mut found, mut after, mut pages) = (Vec::new(), 0, 0);
        loop {
            let request = pb::ListRequest { after, limit };
            let page = cluster.jobs().list(request).await.expect("a page").into_inner();
            assert!(page.jobs.len() <= if limit == 0 { 1000 } else { limit as usize });
            assert!(page.encoded_len() <= (1 << 20) + 16, "{}", page.encoded_len());
            found.extend(page.jobs.into_iter().map(|job| job.job));
            pages += 1;
            if page.next == 0 {
                break;
            }
            after = page.next;
        }
        assert!(found.into_iter().eq(1..=901), "{limit}");
        assert!(pages > 2, "{pages} pages");
    }
    assert_eq!(live, "digits-901");
    for name in ["234", "old-234"] {
        let status = cluster.status(name).await.expect("a job");
        assert_eq!((status.job, status.state(), &status.reason), (234, JobState::Succeeded, &reason));
    }
    assert_eq!(cluster.status("old").await.expect("the newest").job, 900);
    let numbers: Vec<_> = cluster.events("old-234").await.iter().map(|event| event.sequence).collect();
    assert_eq!(numbers, [1, 2, 3]);
    let paused = cluster.jobs().pause(pb::PauseRequest { job: "old".to_owned() }).await.unwrap_err();
    let paused = Failure::from(paused);
    assert!(paused.kind == Kind::Ended && paused.message.contains("old-900 cannot be paused"), "{paused}");
    let cancel = pb::CancelRequest { job: "old".to_owned(), force: true };
    let cancelled = cluster.jobs().cancel(cancel).await.expect("it stays as it is").into_inner();
    assert_eq!(cancelled.state(), JobState::Succeeded);
    let unknown = cluster.status("new").await.unwrap_err().message;
    assert!(unknown.contains("there are digits-901, old-900, old-899, "), "{unknown}");
    assert!(unknown.ends_with("old-882, .."), "{unknown}");
}

#[tokio::test]
async fn a_forgotten_job_leaves_nothing_behind() {
    let disk = MemoryStore::default();
    // As many as a master keeps.
    disk.commit(&ended(1..=1000, "trained", 3)).await.expect("memory");
    let cluster = Cluster::mortal(Arc::new(disk.clone())).await;
    let name = cluster.submit(&job(|_| ()), &[]).await.expect("room");
    cluster.jobs().cancel(pb::CancelRequest { job: name.clone(), force: true }).await.expect("a job");
    let told = cluster.events(&name).await;
    let missing = cluster.status("1").await.unwrap_err();
    assert_eq!(missing.kind, Kind::NotFound, "{missing}");
    let left = disk.load().await.expect("memory");
    let records = [1, 2].map(|job: u64| left.contains_key(&format!("job/{job:020}")));
    assert_eq!((records, events_in(&disk, 1).await, events_in(&disk, 2).await), ([false, true], 0, 3));
    assert_eq!(events_in(&disk, 1001).await, told.len());
    // After a restart, too: its status and its events.
    let status = cluster.status(&name).await.expect("a job");
    let cluster = cluster.kill(Arc::new(disk)).await;
    assert_eq!(cluster.status(&name).await.expect("a job"), status);
    assert_eq!(cluster.events(&name).await, told);
}

#[tokio::test]
async fn what_an_earlier_version_left_behind_is_removed_once() {
    let disk = MemoryStore::default();
    let mut old = ended(1..=2, "trained", 17_000);
    old.keys.remove(&format!("job/{:020}", 1)).expect("a record");
    disk.commit(&old).await.expect("memory");
    let cluster = Cluster::mortal(Arc::new(disk.clone())).await;
    assert_eq!((events_in(&disk, 1).await, events_in(&disk, 2).await), (0, 16_384));
    let told = cluster.events("2").await;
    let numbers = [told.first(), told.last()].map(|event| event.expect("one").sequence);
    assert_eq!((numbers, told.len()), ([617, 17_000], 16_384));
}

#[tokio::test]
async fn a_burst_of_workers_is_few_events_in_each_job() {
    let cluster = Cluster::start().await;
    let name = cluster.submit(&job(|_| ()), &[]).await.expect("room");
    let begun = tokio::time::Instant::now();
    let mut workers = Vec::new();
    for number in 0..100 {
        workers.push(Worker::join(&cluster, &format!("w{number}")).await);
    }
    let mut watched = cluster.watch(&name, 0).await;
    let (mut events, mut named) = (0, 0);
    let all_told = async {
        loop {
            let event = watched.message().await.expect("open").expect("it lives");
            if let Some(Event::Fleet(fleet)) = event.kind {
                events += 1;
                named += fleet.reason.matches("worker `").count();
                if fleet.workers == 100 {
                    return;
                }
            }
        }
    };
    soon("news of the last worker", all_told).await;
    // One a second, each of which names eight changes at most.
    let seconds = begun.elapsed().as_secs();
    assert!(
        events <= seconds + 2 && named as u64 <= 8 * events,
        "{events} events, {named} names, {seconds} s"
    );
}

#[tokio::test]
async fn a_heartbeat_with_too_many_leases_is_refused_with_the_limit() {
    let cluster = Cluster::start().await;
    let mut worker = Worker::join(&cluster, "a").await;
    let incarnation = worker.incarnation;
    let beat = |leases: u64| pb::HeartbeatRequest {
        incarnation,
        leases: (1..=leases).map(|lease| pb::LeaseProgress { lease, ..Default::default() }).collect(),
        ..Default::default()
    };
    let reply = worker.beat_with(beat(1024)).await.expect("so many may be");
    assert_eq!(reply.leases_lost.len(), 1024, "none of them is a lease");
    let refused = worker.beat_with(beat(1025)).await.unwrap_err();
    assert_eq!(refused.kind, Kind::Malformed);
    assert!(refused.message.contains("at most 1024, found 1025"), "{refused}");
}

#[tokio::test]
async fn a_watcher_that_is_behind_reads_the_journal_and_misses_nothing() {
    let disk = MemoryStore::default();
    let cluster = Cluster::mortal(Arc::new(disk)).await;
    let name = cluster.submit(&job(|_| ()), &[]).await.expect("room");
    // Each is an event: more than memory keeps.
    for workers in 1..=1100 {
        let request = pb::ScaleRequest { job: name.clone(), workers: 1 + workers % 2 };
        cluster.jobs().scale(request).await.expect("it lives");
    }
    let newest = 1100;
    let mut watched = cluster.watch(&name, 0).await;
    for expected in 1..=newest {
        let event = soon("an event", watched.message()).await.expect("open").expect("it lives");
        assert_eq!(event.sequence, expected);
    }
}
