//! Cost of jobs that have ended for a master: 100,000 of them with 10,000,000 events, in the
//! journal file of a real master.
//!
//! The journal is written as masters write it, 1,000 jobs in each commit. Then a process of its own
//! opens it, serves it, and reads the list of all jobs through TCP, page by page. Expected, with
//! the bytes of one entry:
//!
//! | figure                 | limit   | because                                                 |
//! | ---------------------- | ------- | ------------------------------------------------------- |
//! | bytes on disk          | 1.8 GB  | 10 M events x 125 bytes, records 1.2 kB, pages 2/3 full |
//! | memory of the master   | 100 MiB | 100,000 jobs x 600 bytes, and 30 MiB without jobs       |
//! | start                  | 2 s     | 100,000 records are decoded, 20 us each; no events      |
//! | first page of the list | 20 ms   | 1,000 statuses, 300 bytes each                          |
//! | all pages              | 2 s     | 100 of them                                             |
//!
//! An event has 47 bytes of key, 60 of value and 18 of redb. A job has 300 bytes of status in
//! memory, and its places in two maps.
//!
//! `cargo bench --no-default-features --bench journal -- --bench` takes some minutes and 4 GB of
//! disk. Without `--bench` a hundredth of it shows that it works.
#![expect(clippy::disallowed_methods, reason = "a bench measures a real process in real time")]

#[path = "../support/report.rs"]
mod report;

use std::ops::Range;
use std::path::Path;
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use master::{Batch, FileStore, Master, Options, Store as _};
use net::channel::{Dialer, Purpose, accept};
use prost::Message as _;
use proto::pb;
use proto::pb::event::Kind;
use proto::pb::jobs_client::JobsClient;
use report::{Figure, Target};
use store::Stores;
use tokio_util::sync::CancellationToken;

/// Allocator of `ebb`.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const EVENTS_PER_JOB: u64 = 100;
const JOBS_PER_COMMIT: u64 = 1000;

const SPEC: &str = r#"
name = "digits"
epochs = 20
model = { builtin = "mlp", metrics = ["accuracy"] }
data = { format = "idx", train = { features = ["images.gz"], labels = ["labels.gz"] }, validation_fraction = 0.2 }
batch = { micro = 16, effective = 64 }
optimizer = { kind = "adam", learning_rate = 0.001 }
"#;

fn main() -> ExitCode {
    let mut args = std::env::args().skip(1);
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("a runtime");
    if args.next().as_deref() == Some("restart") {
        let folder = args.next().expect("a folder");
        runtime.block_on(restart(Path::new(&folder)));
        return ExitCode::SUCCESS;
    }
    let full = std::env::args().any(|arg| arg == "--bench");
    let jobs = if full { 100_000 } else { 1_000 };
    let target = Path::new(env!("CARGO_MANIFEST_DIR")).join("target/bench");
    std::fs::create_dir_all(&target).expect("a folder for results");
    let folder = tempfile::tempdir_in(&target).expect("a folder");
    let written = runtime.block_on(write(folder.path(), jobs));
    let bytes = std::fs::metadata(folder.path().join("journal.redb")).expect("a journal").len();
    let scale = jobs as f64 / 100_000.0;
    let mut samples: [Vec<f64>; 4] = Default::default();
    for _ in 0..if full { 3 } else { 1 } {
        let said = Command::new(std::env::current_exe().expect("this program"))
            .arg("restart")
            .arg(folder.path())
            .output()
            .expect("it starts");
        assert!(said.status.success(), "{}", String::from_utf8_lossy(&said.stderr));
        let said = String::from_utf8(said.stdout).expect("numbers");
        let numbers = said.split_whitespace().map(|number| number.parse::<f64>().expect("a number"));
        samples.iter_mut().zip(numbers).for_each(|(samples, number)| samples.push(number));
    }
    let [start, memory, first, all] = samples;
    let target_of = |bound: f64| full.then_some(Target::Below(bound));
    let figures = [
        Figure::new("written, s", "s", vec![written.as_secs_f64()], 60.0 * scale, None),
        Figure::new("journal, MB", "MB", vec![bytes as f64 / 1e6], 1800.0 * scale, target_of(3600.0)),
        Figure::new("start of the master, s", "s", start, 2.0 * scale, target_of(10.0)),
        Figure::new("memory of the master, MiB", "MiB", memory, 30.0 + 70.0 * scale, target_of(300.0)),
        Figure::new("first page of the list, ms", "ms", first, 20.0, target_of(200.0)),
        Figure::new("all pages of the list, s", "s", all, 2.0 * scale, target_of(10.0)),
    ];
    report::print(&figures);
    if full {
        report::write(&figures, &target.join("journal.json"));
    }
    ExitCode::SUCCESS
}

/// Fills the journal of a master that has none yet.
async fn write(folder: &Path, jobs: u64) -> Duration {
    drop(open(folder).await);
    let spec = proto::spec::parse(SPEC, Path::new("job.toml"), &[]).expect("a good job").to_json();
    let store = FileStore::open(&folder.join("journal.redb")).expect("a journal");
    let begin = Instant::now();
    for first in (1..=jobs).step_by(JOBS_PER_COMMIT as usize) {
        let batch = batch(first..first + JOBS_PER_COMMIT, &spec);
        store.commit(&batch).await.expect("room on the disk");
    }
    begin.elapsed()
}

fn batch(jobs: Range<u64>, spec: &str) -> Batch {
    let mut batch = Batch::default();
    for job in jobs {
        let status = pb::JobStatus {
            job,
            name: format!("digits-{job}"),
            state: pb::JobState::Succeeded.into(),
            reason: "trained 20 epochs".to_owned(),
            epochs: 20,
            steps: 460,
            steps_done: 460,
            microbatches_applied: 1840,
            samples_applied: 29_440,
            workers_seen: 4,
            wall_ms: 60_000,
            training_ms: 50_000,
            loss: Some(0.07),
            final_metrics: [("loss".to_owned(), 0.08), ("accuracy".to_owned(), 0.97)].into(),
            artifacts: ["model.safetensors", "model.pt"]
                .map(|name| proto::artifact::describe(name, name.as_bytes()))
                .to_vec(),
            ..Default::default()
        };
        let record =
            pb::JobRecord { job, spec_json: spec.to_owned(), ended: Some(status), ..Default::default() };
        batch.keys.insert(format!("job/{job:020}"), Some(record.encode_to_vec()));
        for sequence in 1..=EVENTS_PER_JOB {
            let train = pb::TrainEvent {
                step: 4 * sequence,
                epoch: sequence / 5,
                loss: 1.0 / sequence as f64,
                samples: 64,
                samples_per_second: 1000.0,
                workers: 4,
                learning_rate: 0.001,
                steps: 460,
                epochs: 20,
                workers_standby: 0,
            };
            let event = pb::Event { sequence, unix_ms: 1_790_000_000_000, kind: Some(Kind::Train(train)) };
            batch.keys.insert(format!("event/{job:020}/{sequence:020}"), Some(event.encode_to_vec()));
        }
    }
    batch
}

async fn open(folder: &Path) -> Master {
    let options = Options { data_dir: folder.to_owned(), jobs_max: 200_000, ..Options::default() };
    Master::open(options, Stores::default(), Dialer::tcp()).await.expect("a master")
}

/// Starts a master and reads its list. Prints the seconds of the start, the memory, the
/// milliseconds of the first page and the seconds of all pages.
async fn restart(folder: &Path) {
    let begin = Instant::now();
    let master = open(folder).await;
    let started = begin.elapsed();
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let url = format!("http://{}", listener.local_addr().expect("bound"));
    let stop = CancellationToken::new();
    let serving = {
        let stop = stop.clone();
        tokio::spawn(async move { master.serve(accept(listener), stop).await })
    };
    let mut jobs = JobsClient::new(Dialer::tcp().channel(&url, Purpose::Control).expect("a URL"));
    jobs.list(pb::ListRequest { after: 0, limit: 1 }).await.expect("it serves");
    let begin = Instant::now();
    let (mut request, mut found, mut first) = (pb::ListRequest::default(), 0, None);
    loop {
        let page = jobs.list(request).await.expect("a page").into_inner();
        first.get_or_insert_with(|| begin.elapsed());
        found += page.jobs.len();
        request.after = page.next;
        if page.next == 0 {
            break;
        }
    }
    let all = begin.elapsed();
    assert!(found >= 1_000, "{found} jobs");
    let first = first.expect("a page");
    println!(
        "{} {} {} {}",
        started.as_secs_f64(),
        memory_mib(),
        first.as_secs_f64() * 1e3,
        all.as_secs_f64()
    );
    stop.cancel();
    serving.await.expect("no panic").expect("served");
}

/// Returns the resident memory of this process.
fn memory_mib() -> f64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("Linux");
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("its memory");
    line.trim().trim_end_matches(" kB").parse::<f64>().expect("a number") / 1024.0
}
