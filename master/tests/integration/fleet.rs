//! What workers and ps see: leases that come back at once, late reports that change nothing,
//! versions that must fit.

use std::time::Duration;

use proto::pb;
use proto::pb::JobState;
use proto::pb::fleet_client::FleetClient;
use proto::pb::lease::Work;
use proto::spec::DeviceKind;
use proto::status::{Failure, Kind};

use crate::fake_ps::FakePs;
use crate::harness::{Cluster, Worker, job, microbatches, read_artifacts, soon, trained};

/// Returns a cluster with a job that trains, a ps, and worker `a` with the first lease of training.
async fn training(spec: &proto::spec::JobSpec) -> (Cluster, FakePs, Worker, pb::Lease) {
    let cluster = Cluster::start().await;
    let ps = FakePs::start(&cluster.url, "ps-0").await;
    let mut worker = Worker::join(&cluster, "a").await;
    cluster.submit(spec, &[]).await.expect("a good job");
    let lease = worker.until_training().await;
    (cluster, ps, worker, lease)
}

#[tokio::test]
async fn a_killed_workers_lease_is_granted_to_another_at_once() {
    // Leases hold longer than anything is waited for, as does the silence after which a process
    // counts as gone. There is one step in all: `b` finds nothing else, also if it asks before the
    // master knows that `a` is dead.
    let spec = job(|spec| {
        spec.epochs = 1;
        spec.batch.effective = Some(8);
        spec.limits.lease = Duration::from_secs(3600);
    });
    let (cluster, _ps, a, lease) = training(&spec).await;
    let mut b = Worker::join(&cluster, "b").await;
    let waiting = tokio::spawn(async move {
        let lease = b.lease().await;
        (b, lease)
    });
    drop(a);
    let (mut b, again) = soon("the lease of the dead", waiting).await.expect("no panic");
    assert_eq!((microbatches(&again).0, again.attempt), (microbatches(&lease).0, 2));
    assert_ne!(again.id, lease.id);
    b.do_task(&again).await;
    b.until_exported().await;
    cluster.reach("digits", JobState::Succeeded).await;
    let status = cluster.status("digits").await.expect("a job");
    assert_eq!((status.leases_expired, status.workers_seen), (1, 2));
}

#[tokio::test]
async fn whoever_is_beaten_by_a_copy_hears_of_it_without_asking() {
    let (cluster, _ps, mut a, lease) = training(&job(|spec| spec.epochs = 20)).await;
    a.do_task(&lease).await;
    let held = a.until_training().await;
    let mut b = Worker::join(&cluster, "b").await;
    // All else waits for what `a` holds and does not compute.
    let copy = b.until_training().await;
    assert_eq!((microbatches(&copy), copy.attempt), (microbatches(&held), 2));
    b.do_task(&copy).await;
    assert_eq!(a.reply().await.leases_lost, [held.id]);
    assert_eq!(cluster.master.metrics().leases_copied, 1);
}

#[tokio::test]
async fn a_report_of_a_lease_that_ended_is_not_accepted() {
    let (cluster, _ps, mut a, lease) = training(&job(|_| ())).await;
    let (first, count) = microbatches(&lease);
    assert_eq!(a.complete(&lease, trained(first, count)).await, Ok(true));
    assert_eq!(a.complete(&lease, trained(first, count)).await, Ok(false), "a repeat");
    // And of a process that the fleet has given up: it must register again.
    let next = a.lease().await;
    let (incarnation, mut fleet) = (a.incarnation, a.fleet.clone());
    drop(a);
    cluster.until("it is given up", |cluster| cluster.master.metrics().workers_live == 0).await;
    let mut b = Worker::join(&cluster, "b").await;
    let again = b.lease().await;
    assert_eq!((microbatches(&again).0, again.attempt), (microbatches(&next).0, 2));
    let report = Some(trained(first, count));
    let request =
        pb::CompleteRequest { incarnation, lease: next.id, result: report, more: true, ..Default::default() };
    let failure = Failure::from(fleet.complete(request).await.unwrap_err());
    assert!(failure.kind == Kind::Fenced && failure.message.contains("register again"), "{failure}");
    let metrics = cluster.master.metrics();
    assert_eq!((metrics.reports_late, metrics.leases_expired), (1, 1));
}

#[tokio::test]
async fn the_answer_to_a_report_brings_the_next_work() {
    let (cluster, _ps, mut a, step) = training(&job(|_| ())).await;
    a.do_task(&step).await;
    let first = a.lease().await;
    assert_eq!(microbatches(&first), (4, 12), "all that is left");
    let trained = a.work(&first).await;
    let answer = a.report(&first, trained.clone(), true).await.unwrap();
    let second = answer.next.expect("the first epoch is to be measured");
    assert!(answer.accepted && second.id > first.id, "{first:?} {second:?}");
    // A repeat changes nothing, but whoever repeats it may still have work: the first answer may be
    // lost.
    let answer = a.report(&first, trained, true).await.unwrap();
    let third = answer.next.expect("the second epoch is to be measured");
    assert!(!answer.accepted && third.id > second.id);
    // Nobody gets what was not asked for.
    let measured = a.work(&second).await;
    assert_eq!(a.report(&second, measured, false).await.unwrap().next, None);
    let measured = a.work(&third).await;
    a.beat(&[&third], true).await;
    let answer = a.report(&third, measured, true).await.unwrap();
    assert_eq!(answer, pb::CompleteReply { accepted: true, next: None }, "it drains");
    let metrics = cluster.master.metrics();
    assert_eq!(metrics.leases_granted, metrics.leases_completed);
}

#[tokio::test]
async fn a_draining_worker_hands_back_the_rest_and_leaves() {
    let (cluster, _ps, mut a, lease) = training(&job(|_| ())).await;
    assert_eq!(microbatches(&lease), (0, 4));
    a.beat(&[&lease], true).await;
    assert_eq!(a.maybe_lease(Duration::from_millis(50)).await, None, "it takes no more work");
    a.hand_back(&lease, 3).await;
    drop(a);
    let mut b = Worker::join(&cluster, "b").await;
    let rest = b.lease().await;
    assert_eq!(microbatches(&rest), (3, 1), "the rest of step 0");
    b.do_task(&rest).await;
    b.until_exported().await;
    cluster.reach("digits", JobState::Succeeded).await;
    let events = cluster.events("digits").await;
    let train = |event: &pb::Event| match &event.kind {
        Some(pb::event::Kind::Train(event)) => Some((event.step, event.loss)),
        _ => None,
    };
    let losses: Vec<_> = events.iter().filter_map(train).collect();
    assert_eq!(losses, [(0, 1.5), (1, 5.5), (2, 9.5), (3, 13.5)], "as if one worker had done it all");
    assert_eq!(cluster.status("digits").await.expect("a job").leases_expired, 0);
}

#[tokio::test]
async fn heartbeats_renew_leases_and_tell_which_are_lost() {
    let (cluster, _ps, mut a, lease) = training(&job(|_| ())).await;
    let mut b = Worker::join(&cluster, "b").await;
    let reply = a.beat(&[&lease], false).await;
    assert_eq!((reply.leases_lost, reply.jobs, reply.newest_job), (vec![], vec![1], 1));
    let reply = b.beat(&[&lease], false).await;
    assert_eq!(reply.leases_lost, [lease.id], "a lease of another worker");
    a.do_task(&lease).await;
    assert_eq!(a.beat(&[&lease], false).await.leases_lost, [lease.id], "it is done");
    a.until_exported().await;
    cluster.reach("digits", JobState::Succeeded).await;
    let reply = a.beat(&[], false).await;
    assert_eq!((reply.jobs, reply.newest_job), (vec![], 1), "a job that ended is to be forgotten");
}

#[tokio::test]
async fn an_answer_that_never_arrived_is_given_to_another_soon() {
    let cluster = Cluster::with(|options| {
        options.heartbeat = Duration::from_millis(50);
        options.death = Duration::from_secs(2);
    })
    .await;
    let _ps = FakePs::start(&cluster.url, "ps-0").await;
    let (mut a, mut b) = (Worker::join(&cluster, "a").await, Worker::join(&cluster, "b").await);
    cluster.submit(&job(|_| ()), &[]).await.expect("a good job");
    let lost = a.lease().await;
    // Both live, and `a` never names the lease.
    let found = loop {
        a.beat(&[], false).await;
        b.beat(&[], false).await;
        if let Some(found) = b.maybe_lease(Duration::from_millis(50)).await {
            break found;
        }
    };
    assert_eq!((found.work, found.attempt), (lost.work, 2));
    a.beat(&[], false).await;
}

#[tokio::test]
async fn another_program_version_is_refused_by_both_names() {
    let cluster = Cluster::start().await;
    let mut fleet = FleetClient::new(cluster.channel());
    let register = |version: &str, role: pb::ProcessRole| pb::RegisterRequest {
        role: role.into(),
        name: "w".to_owned(),
        program_version: version.to_owned(),
        ..Default::default()
    };
    let refused = fleet.register(register("99.1.0", pb::ProcessRole::Worker)).await.unwrap_err();
    let failure = Failure::from(refused);
    assert_eq!(failure.kind, Kind::Incompatible);
    for part in ["99.1.0", proto::PROGRAM_VERSION, "install one version"] {
        assert!(failure.message.contains(part), "{failure}");
    }
    for (role, expected) in
        [(pb::ProcessRole::Unspecified, "RegisterRequest.role"), (pb::ProcessRole::Ps, "RegisterRequest.url")]
    {
        let failure =
            Failure::from(fleet.register(register(proto::PROGRAM_VERSION, role)).await.unwrap_err());
        assert!(failure.kind == Kind::Malformed && failure.message.contains(expected), "{failure}");
    }
}

#[tokio::test]
async fn an_unknown_incarnation_must_register_again() {
    let cluster = Cluster::start().await;
    let mut fleet = FleetClient::new(cluster.channel());
    let lease = fleet.lease(pb::LeaseRequest { incarnation: 77, wait_ms: 1000 }).await;
    assert_eq!(Failure::from(lease.unwrap_err()).kind, Kind::Fenced);
    let beat = pb::HeartbeatRequest { incarnation: 77, ..Default::default() };
    let stream = fleet.heartbeat(tokio_stream::iter([beat])).await;
    assert_eq!(Failure::from(stream.unwrap_err()).kind, Kind::Fenced);
}

#[tokio::test]
async fn a_worker_reads_what_the_job_came_with() {
    let cluster = Cluster::start().await;
    let _ps = FakePs::start(&cluster.url, "ps-0").await;
    let script = vec![7; 3 << 20];
    let spec = job(|spec| {
        spec.model.script = Some("nets/model.pt".to_owned());
        spec.model.builtin = None;
    });
    cluster.submit(&spec, &[("model.pt", &script)]).await.expect("a good job");
    let mut worker = Worker::join(&cluster, "a").await;
    let reply = worker.fleet.job(pb::JobRequest { job: 1 }).await.expect("a job").into_inner();
    assert_eq!(proto::spec::JobSpec::from_json(&reply.spec_json).expect("good"), spec);
    assert_eq!((reply.artifacts[0].size, reply.train_records.len(), reply.placement), (3 << 20, 0, None));
    let download = |name: &str| pb::DownloadRequest { job: 1, name: name.to_owned() };
    let stream = worker.fleet.download(download("model.pt")).await.expect("a file").into_inner();
    assert_eq!(read_artifacts(stream).await.expect("whole")["model.pt"], script);
    for (name, kind) in [("other.pt", Kind::NotFound), ("../../lock", Kind::Malformed)] {
        let failure = Failure::from(worker.fleet.download(download(name)).await.unwrap_err());
        assert_eq!(failure.kind, kind, "{failure}");
    }
    worker.until_training().await;
    let reply = worker.fleet.job(pb::JobRequest { job: 1 }).await.expect("a job").into_inner();
    assert_eq!((reply.train_records, reply.label_max), (vec![10], Some(9)));
    assert_eq!(reply.placement.expect("open").partitions[0].ps, "ps-0");
    let failure = Failure::from(worker.fleet.job(pb::JobRequest { job: 9 }).await.unwrap_err());
    assert_eq!(failure.kind, Kind::NotFound);
}

#[tokio::test]
async fn an_upload_is_taken_only_whole_and_from_who_exports() {
    let (cluster, _ps, mut a, lease) = training(&job(|_| ())).await;
    let fenced = a.upload(&lease, &[("m", b"x")]).await.unwrap_err();
    assert_eq!(fenced.kind, Kind::Fenced, "{fenced}");
    a.do_task(&lease).await;
    let export = loop {
        let lease = a.lease().await;
        if matches!(lease.work, Some(Work::Export(_))) {
            break lease;
        }
        a.do_task(&lease).await;
    };
    let refused = a.upload(&export, &[("../escape", b"x")]).await.unwrap_err();
    assert!(refused.kind == Kind::Malformed && refused.message.contains("plain file name"), "{refused}");
    let exported = pb::complete_request::Result::Exported(pb::Exported {
        artifacts: vec![proto::artifact::describe("m", b"x")],
    });
    let early = a.complete(&export, exported.clone()).await.unwrap_err();
    assert!(early.message.contains("call Upload first"), "{early}");
    a.upload(&export, &[("m", b"y")]).await.expect("whole");
    assert!(a.complete(&export, exported.clone()).await.is_err(), "other content than was reported");
    a.upload(&export, &[("m", b"x")]).await.expect("whole");
    assert_eq!(a.complete(&export, exported.clone()).await, Ok(true));
    assert_eq!(a.complete(&export, exported).await, Ok(false), "a repeat");
    cluster.reach("digits", JobState::Succeeded).await;
    assert_eq!(cluster.fetch("digits").await.expect("files")["m"], b"x");
}

#[tokio::test]
async fn a_job_waits_for_a_ps_that_is_gone_for_good_until_another_takes_over() {
    let cluster = Cluster::with(|options| options.ps_grace = Duration::from_millis(100)).await;
    let ps = FakePs::start(&cluster.url, "ps-0").await;
    let mut worker = Worker::join(&cluster, "a").await;
    cluster.submit(&job(|_| ()), &[]).await.expect("a good job");
    let lease = worker.until_training().await;
    drop(ps);
    let reason = cluster.reach("digits", JobState::Pending).await;
    assert_eq!(reason, "waits for ps `ps-0` to come back or for another ps");
    assert_eq!(worker.complete(&lease, trained(0, 16)).await, Ok(false), "its lease has ended");
    let spare = FakePs::start(&cluster.url, "ps-1").await;
    let again = worker.until_training().await;
    let Some(Work::Train(task)) = again.work else { panic!("{again:?}") };
    assert_eq!((task.first, task.era, lease.placement, again.placement), (0, 1, 1, 2));
    assert_eq!(spare.calls()[..2], ["open 0 of job 1", "ledger of job 1"]);
}

#[tokio::test]
async fn a_ps_that_comes_back_without_its_partitions_is_given_them_again() {
    let (cluster, ps, mut worker, lease) = training(&job(|_| ())).await;
    drop(ps);
    let _again = FakePs::start(&cluster.url, "ps-0").await;
    // The worker may be given a second lease before the master hears of it.
    let again = loop {
        let again = worker.until_training().await;
        assert!(again.id > lease.id, "{again:?}");
        if again.placement == 2 {
            break again;
        }
    };
    worker.do_task(&again).await;
    worker.until_exported().await;
    cluster.reach("digits", JobState::Succeeded).await;
    let warning = "ps `ps-0` lost its part of the model; no checkpoint, so training starts again from version 0 (era 1)";
    let warned = |event: &pb::Event| match &event.kind {
        Some(pb::event::Kind::Warning(event)) => event.message == warning,
        _ => false,
    };
    assert!(cluster.events("digits").await.iter().any(warned));
}

#[tokio::test]
async fn a_ps_that_does_not_hold_a_partition_is_asked_as_soon_as_a_worker_says_so() {
    let (cluster, ps, mut worker, lease) = training(&job(|_| ())).await;
    // It lives, and its heartbeats come: nothing but the worker's word says that something is
    // wrong.
    ps.accounts.lock().expect("unpoisoned").open.clear();
    let mut held = lease;
    let rewound = async {
        loop {
            let (incarnation, lease) = (worker.incarnation, held.id);
            let trained = Some(pb::Trained::default());
            let request = pb::ReleaseRequest { incarnation, lease, trained, not_held: Some(0) };
            worker.fleet.release(request).await.expect("known");
            held = worker.until_training().await;
            let Some(Work::Train(task)) = held.work else { panic!("{held:?}") };
            // The master may hand the work out before the ps has answered.
            if task.era == 1 {
                break task.first;
            }
        }
    };
    assert_eq!(soon("the job is rewound", rewound).await, 0, "trained again from version 0");
    assert_eq!(cluster.status("digits").await.expect("a job").state(), JobState::Running);
}

#[tokio::test]
async fn the_status_of_a_job_says_why_a_worker_is_idle() {
    const MOMENT: Duration = Duration::from_millis(50);
    // One step in all: who comes first has all of it.
    let spec = job(|spec| {
        spec.epochs = 1;
        spec.batch.effective = Some(8);
        spec.fleet.workers.max = 2;
    });
    let (cluster, _ps, mut a, held) = training(&spec).await;
    let idle = async |job: &str| cluster.status(job).await.expect("a job").idle;
    assert_eq!(idle("digits").await, []);
    let (mut b, c) = (Worker::join(&cluster, "b").await, Worker::join(&cluster, "c").await);
    let words = |idle: &[pb::Idle]| {
        let group = |idle: &pb::Idle| (idle.why(), idle.workers.join(" "), idle.reason.clone());
        idle.iter().map(group).collect::<Vec<_>>()
    };
    let stands_by =
        || (pb::Why::StandsBy, "c".to_owned(), "standing by, the job takes at most 2 workers".to_owned());
    let not_asked = (pb::Why::NotAsked, "b".to_owned(), "no request for work yet".to_owned());
    assert_eq!(words(&idle("digits").await), [not_asked, stands_by()]);
    assert_eq!(b.maybe_lease(MOMENT).await, None);
    let nothing_left = (pb::Why::NothingLeft, "b".to_owned(), "epoch 1 of 1 has no task left".to_owned());
    assert_eq!(words(&idle("digits").await), [stands_by(), nothing_left]);
    // A later job has work for the two that are idle.
    cluster.submit(&job(|spec| spec.name = "later".to_owned()), &[]).await.expect("a good job");
    let index = b.lease().await;
    let busy = (pb::Why::WorksElsewhere, "a".to_owned(), "at work for digits-1".to_owned());
    assert!(words(&idle("later").await).contains(&busy));
    let busy = (pb::Why::WorksElsewhere, "b".to_owned(), "at work for later-2".to_owned());
    assert!(words(&idle("digits").await).contains(&busy));
    // A list of all jobs looks at no worker.
    let list = cluster.jobs().list(pb::ListRequest::default()).await.expect("a list").into_inner();
    assert!(list.jobs.iter().all(|job| job.idle.is_empty()));
    drop((b, c, index));
    a.do_task(&held).await;
    a.until_exported().await;
    cluster.reach("digits", JobState::Succeeded).await;
    assert_eq!(idle("digits").await, [], "it has ended");
}

#[tokio::test]
async fn status_and_metrics_tell_the_devices_of_the_workers_that_take_part() {
    let cluster = Cluster::start().await;
    let _ps = FakePs::start(&cluster.url, "ps-0").await;
    let _a = Worker::join_on(&cluster, "a", "cuda:0", 80 << 30).await;
    let _b = Worker::join_on(&cluster, "b", "cuda:0", 80 << 30).await;
    let _c = Worker::join(&cluster, "c").await;
    let job = cluster.submit(&job(|_| ()), &[]).await.expect("a good job");
    let taking_part = async {
        loop {
            let devices = cluster.status(&job).await.expect("a job").devices;
            if devices.iter().map(|group| group.count).sum::<u32>() == 3 {
                return devices;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let devices = soon("all workers take part", taking_part).await;
    let told =
        |group: &pb::WorkersOnDevice| (group.device.clone(), group.memory_bytes, group.workers.clone());
    let named = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect::<Vec<_>>();
    let told: Vec<_> = devices.iter().map(told).collect();
    let cuda = ("cuda:0".to_owned(), 80_u64 << 30, named(&["a", "b"]));
    assert_eq!(told, [cuda, ("cpu".to_owned(), 0, named(&["c"]))]);
    assert_eq!(devices[0].numerics.as_ref().expect("a class").class, "unknown");
    let metrics = cluster.master.metrics();
    assert_eq!((metrics.workers_live, metrics.workers_cuda_live), (3, 2));
}

#[tokio::test]
async fn a_job_for_cuda_devices_waits_for_one_with_enough_memory_and_says_why() {
    let cluster = Cluster::start().await;
    let _ps = FakePs::start(&cluster.url, "ps-0").await;
    let mut cpu = Worker::join(&cluster, "cpu").await;
    let mut small = Worker::join_on(&cluster, "small", "cuda:0", 8 << 30).await;
    let spec = job(|spec| {
        spec.fleet.device = Some(DeviceKind::Cuda);
        spec.fleet.device_memory = Some(16 << 30);
    });
    let job = cluster.submit(&spec, &[]).await.expect("a good job");
    let told = "waits for workers (0 of 1 live) on a CUDA device with at least 16.0 GiB; standing by are 1 on cpu, 1 on \
                cuda:0 with 8.0 GiB";
    let waiting = async {
        loop {
            let status = cluster.status(&job).await.expect("a job");
            if status.state() == JobState::Pending && status.reason == told {
                return status;
            }
            assert!(!status.state().is_end(), "{status:?}");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let status = soon(told, waiting).await;
    let why: Vec<_> = status.idle.iter().map(|idle| (idle.why(), idle.workers.join(","))).collect();
    let other = |name: &str| (pb::Why::OtherDevice, name.to_owned());
    assert!(why.contains(&other("cpu")) && why.contains(&other("small")), "{why:?}");
    for worker in [&mut cpu, &mut small] {
        assert!(worker.maybe_lease(Duration::ZERO).await.is_none());
    }
    let mut large = Worker::join_on(&cluster, "large", "cuda:1", 80 << 30).await;
    large.until_exported().await;
    cluster.reach(&job, JobState::Succeeded).await;
    assert_eq!(cluster.status(&job).await.expect("a job").workers_seen, 1);
}
