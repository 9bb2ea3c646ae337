//! A job in words for users, numbers with their units. Pure functions of what the master says.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::time::Duration;

use client::report::{MODEL, final_metrics, measures, model_sha256, predictions};
use client::results::Written;
use client::{JobPurpose, JobState, JobStatus};
use proto::{pb, size};

/// `running: 3 workers`, or the state alone when there is no reason.
pub(crate) fn state_with_reason(state: JobState, reason: &str) -> String {
    let state = state.name();
    if reason.is_empty() { state.to_owned() } else { format!("{state}: {reason}") }
}

/// Returns a measured value: four significant digits, exponents only where they are needed.
pub(crate) fn value(value: f64) -> String {
    let size = value.abs();
    if value == 0.0 || !value.is_finite() {
        format!("{value}")
    } else if !(1e-3..1e6).contains(&size) {
        format!("{value:.3e}")
    } else {
        let before = size.log10().floor().max(-1.0) as usize;
        let digits = if size < 1.0 { 4 } else { 3usize.saturating_sub(before) };
        format!("{value:.digits$}")
    }
}

/// Returns a rate without false precision.
pub(crate) fn rate(per_second: f64) -> String {
    if per_second >= 100.0 { format!("{per_second:.0}") } else { format!("{per_second:.1}") }
}

/// `3.2 s`, `4 min 05 s`, `2 h 07 min`.
pub(crate) fn duration(time: Duration) -> String {
    let seconds = time.as_secs();
    match seconds {
        0..60 => format!("{:.1} s", time.as_secs_f64()),
        60..3600 => format!("{} min {:02} s", seconds / 60, seconds % 60),
        _ => format!("{} h {:02} min", seconds / 3600, seconds / 60 % 60),
    }
}

/// `1 worker`, `3 workers`.
pub(crate) fn count(number: u64, one: &str, many: &str) -> String {
    format!("{number} {}", if number == 1 { one } else { many })
}

/// `3 steps changed no weight, because the gradient overflowed`, or nothing.
fn overflowed(status: &JobStatus) -> String {
    match status.overflows {
        0 => String::new(),
        overflows => {
            let steps = count(overflows, "step", "steps");
            format!("{steps} changed no weight, because the gradient overflowed")
        }
    }
}

/// `3 workers (+2 standing by)`.
pub(crate) fn workers(taking_part: u32, standing_by: u32) -> String {
    format!("{}{}", count(taking_part.into(), "worker", "workers"), standby(standing_by, " standing by"))
}

fn standby(number: u32, words: &str) -> String {
    if number == 0 { String::new() } else { format!(" (+{number}{words})") }
}

/// Returns the workers of a job and its bounds: `2 workers (+1 standing by), wants 1 to 2`.
pub(crate) fn workers_wanted(status: &JobStatus) -> String {
    let now = workers(status.workers, status.workers_standby);
    match (status.workers_min, status.workers_max) {
        (min, max) if min == max => format!("{now}, wants {max}"),
        (min, max) => format!("{now}, wants {min} to {max}"),
    }
}

/// `loss 0.0812, accuracy 0.9750`, the loss first.
pub(crate) fn metrics(metrics: &BTreeMap<String, f64>) -> String {
    let loss = metrics.get_key_value("loss");
    let others = metrics.iter().filter(|(name, _)| *name != "loss");
    let parts: Vec<_> =
        loss.into_iter().chain(others).map(|(name, &number)| format!("{name} {}", value(number))).collect();
    parts.join(", ")
}

/// Metrics of each validation set, by the name that a line gives it.
fn by_set(all: &BTreeMap<String, f64>) -> BTreeMap<&str, BTreeMap<String, f64>> {
    let mut sets = BTreeMap::<_, BTreeMap<_, _>>::new();
    for (name, &number) in all {
        let (set, metric) = name.split_once('/').unwrap_or((VALIDATION, name));
        sets.entry(set).or_default().insert(metric.to_owned(), number);
    }
    sets
}

/// Returns the best version of a job that selects one: `step 460, accuracy 0.9889`.
fn best(status: &JobStatus) -> Option<String> {
    let pb::Selection { metric, best, value: number, last, stopped, .. } = status.selection.as_ref()?;
    let stopped = if *stopped { format!("; stopped early at step {last}") } else { String::new() };
    Some(format!("step {best}, {metric} {}{stopped}", value(*number)))
}

/// Name of the set `data.validation` for people.
pub(crate) const VALIDATION: &str = "validation";

/// One job, for `ebb status`.
pub(crate) fn status(status: &JobStatus) -> String {
    let mut text = String::new();
    let mut line = |name: &str, content: String| {
        if !content.is_empty() {
            let _ = writeln!(text, "{name:10} {content}");
        }
    };
    line("job", status.name.clone());
    line("state", state_with_reason(status.state(), &status.reason));
    line("progress", progress(status));
    line(
        "applied",
        format!(
            "{} samples in {} microbatches; {} duplicates dropped, {} leases expired",
            status.samples_applied,
            status.microbatches_applied,
            status.duplicates_dropped,
            status.leases_expired
        ),
    );
    line("overflows", overflowed(status));
    let workers = Some(workers_wanted(status)).filter(|_| !status.state().is_end());
    line(
        "workers",
        workers.into_iter().chain([format!("{} so far", status.workers_seen)]).collect::<Vec<_>>().join("; "),
    );
    for group in &status.devices {
        line("device", on_device(group));
    }
    for idle in &status.idle {
        line("idle", idle_workers(idle));
    }
    for hang in &status.hangs {
        line("hangs", hangs(hang));
    }
    let shown = |numerics: &pb::Numerics| format!("{} ({})", numerics.class, numerics.facts);
    for since in status.numerics.iter().filter(|_| status.numerics.len() > 1) {
        let class = since.numerics.as_ref().map(shown).unwrap_or_default();
        line("computed", format!("from version {} by class {class}", since.version));
    }
    let class =
        status.numerics_class.as_ref().filter(|_| !status.state().is_end() || status.numerics.len() == 1);
    line("numerics", class.map(shown).unwrap_or_default());
    line(
        "time",
        format!(
            "{} since it was submitted, {} of training",
            duration(Duration::from_millis(status.wall_ms)),
            duration(Duration::from_millis(status.training_ms))
        ),
    );
    let waited = status
        .data_wait
        .map(|share| format!("workers waited for records {:.1} % of their time", 100.0 * share));
    line("data", waited.unwrap_or_default());
    line("skipped", status.skipped.as_ref().map(skipped).unwrap_or_default());
    line("loss", status.loss.map(value).unwrap_or_default());
    for (set, measured) in by_set(&status.final_metrics) {
        line(set, metrics(&measured));
    }
    line("best", best(status).unwrap_or_default());
    line("predictions", predictions(status).unwrap_or_default().to_owned());
    let saved = status.checkpoint.map(|version| format!("version {version} in {}", status.checkpoints));
    line("checkpoint", saved.unwrap_or_default());
    for artifact in &status.artifacts {
        line("file", format!("{} ({} bytes, sha256 {})", artifact.name, artifact.size, artifact.sha256));
    }
    text
}

/// Returns the bad records that a job skips: `3 training records; the first: a.csv, record 5: ..`.
fn skipped(skipped: &pb::Skipped) -> String {
    let sets = [(skipped.train, "training"), (skipped.validation, "validation")];
    let sets = sets.into_iter().filter(|(number, _)| *number > 0);
    let counts: Vec<_> = sets
        .map(|(number, set)| count(number, &format!("{set} record"), &format!("{set} records")))
        .collect();
    let first = skipped.records.first();
    let first =
        first.map(|first| format!("; the first: {}, record {}: {}", first.file, first.record, first.reason));
    format!("{}{}", counts.join(" and "), first.unwrap_or_default())
}

/// Returns how far the files of a job are indexed: `12 of 240 files, 3.4 GiB`.
pub(crate) fn indexing(indexing: &pb::Indexing) -> String {
    let files = count(indexing.files, "file", "files");
    format!("{} of {files}, {}", indexing.files_done, proto::size::text(indexing.bytes_done))
}

fn progress(status: &JobStatus) -> String {
    if let Some(found) = &status.indexing {
        return format!("{} counted", indexing(found));
    }
    if measures(status).is_some() {
        return match status.records {
            0 => "the number of records is known once the data is counted".to_owned(),
            records => format!("{} of {}", status.records_done, count(records, "record", "records")),
        };
    }
    let epochs = count(status.epochs, "epoch", "epochs");
    match status.steps {
        0 => format!("{epochs}; the number of steps is known once the data is counted"),
        steps => format!("step {} of {steps}, {epochs}", status.steps_done),
    }
}

/// Workers without work, and why: `worker-1, worker-2 and 3 more: epoch 2 of 2 has no task left`.
fn idle_workers(idle: &pb::Idle) -> String {
    format!("{}: {}", names(&idle.workers, idle.count), idle.reason)
}

/// Workers that take part, by device: `cuda:0 with 79.6 GiB, class 3fa94c1d22e0: worker-1 and 3
/// more; 87 % busy, waits 5 % data 12 % weights 0 % pushes, 31.2 GiB used, 1 throttled`.
fn on_device(group: &pb::WorkersOnDevice) -> String {
    let memory = match group.memory_bytes {
        0 => String::new(),
        bytes => format!(" with {}", size::text(bytes)),
    };
    let class = group.numerics.as_ref().map(|numerics| format!(", class {}", numerics.class));
    let class = class.unwrap_or_default();
    let waits = [
        (group.waits_data_percent, "data"),
        (group.waits_weights_percent, "weights"),
        (group.waits_push_percent, "pushes"),
    ];
    let wait = |(share, cause): (Option<u32>, &str)| share.map(|percent| format!("{percent} % {cause}"));
    let waits: Vec<_> = waits.into_iter().filter_map(wait).collect();
    let state = [
        group.busy_percent.map(|percent| format!("{percent} % busy")),
        (!waits.is_empty()).then(|| format!("waits {}", waits.join(" "))),
        Some(group.memory_used_bytes)
            .filter(|bytes| *bytes > 0)
            .map(|bytes| format!("{} used", size::text(bytes))),
        Some(group.throttled).filter(|count| *count > 0).map(|count| format!("{count} throttled")),
        Some(group.failing).filter(|count| *count > 0).map(|count| format!("{count} FAILING")),
    ];
    let state = state.into_iter().flatten().collect::<Vec<_>>().join(", ");
    let state = if state.is_empty() { state } else { format!("; {state}") };
    format!("{}{memory}{class}: {}{state}", group.device, names(&group.workers, group.count))
}

/// Names of the first of `count` workers: `worker-1, worker-2 and 3 more`.
fn names(first: &[String], count: u32) -> String {
    let mut names = first.join(", ");
    let more = (count as usize).saturating_sub(first.len());
    if more > 0 {
        let _ = write!(names, " and {more} more");
    }
    names
}

/// Describes a worker that lives and makes no progress: ``worker `b` has been reading x.gz for 6
/// min 02 s; another worker is to count the records of `x.gz` ``.
fn hangs(hang: &pb::Hang) -> String {
    let doing = hang.phase().doing();
    let what = if hang.what.is_empty() { String::new() } else { format!(" {}", hang.what) };
    let time = duration(Duration::from_millis(hang.idle_ms));
    let work = match (hang.work.as_str(), hang.taken_over) {
        ("", _) => "another worker has done that work".to_owned(),
        (work, true) => format!("another worker is to {work}"),
        (work, false) => format!("it is to {work}, and no other worker is free for that"),
    };
    format!("worker `{}` has been {doing}{what} for {time}; {work}", hang.worker)
}

/// Returns all jobs, for `ebb jobs`.
pub(crate) fn table(jobs: &[JobStatus]) -> String {
    let header = ["JOB", "STATE", "STEPS", "LOSS", "WORKERS", "TIME", "REASON"].map(str::to_owned);
    let row = |job: &JobStatus| {
        [
            job.name.clone(),
            job.state().name().to_owned(),
            if job.steps == 0 { "-".to_owned() } else { format!("{}/{}", job.steps_done, job.steps) },
            job.loss.map_or_else(|| "-".to_owned(), value),
            format!("{}{}", job.workers, standby(job.workers_standby, "")),
            duration(Duration::from_millis(job.wall_ms)),
            job.reason.lines().next().unwrap_or_default().to_owned(),
        ]
    };
    let rows: Vec<_> = std::iter::once(header).chain(jobs.iter().map(row)).collect();
    let mut text = String::new();
    for row in &rows {
        let cells = row.iter().enumerate().map(|(column, cell)| {
            let width = rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
            format!("{cell:width$}")
        });
        let _ = writeln!(text, "{}", cells.collect::<Vec<_>>().join("  ").trim_end());
    }
    text
}

/// Returns the end of a job, in a few lines. `otherwise` is the note for a user if nothing was
/// written.
pub(crate) fn result(status: &JobStatus, written: Option<&Written>, otherwise: &str) -> String {
    let training = Duration::from_millis(status.training_ms);
    let measures = measures(status);
    let (mut text, samples) = match measures {
        None => (
            format!(
                "{} {}: {} of {}, {} samples in {}",
                status.name,
                status.state().name(),
                status.steps_done,
                count(status.steps, "step", "steps"),
                status.samples_applied,
                duration(training)
            ),
            status.samples_applied,
        ),
        Some(purpose) => (
            format!(
                "{} {}: {} of {} {} in {}",
                status.name,
                status.state().name(),
                status.records_done,
                count(status.records, "record", "records"),
                if purpose == JobPurpose::Predict { "predicted" } else { "evaluated" },
                duration(training)
            ),
            status.records_done,
        ),
    };
    if !training.is_zero() {
        let _ = write!(text, " ({} samples/s)", rate(samples as f64 / training.as_secs_f64()));
    }
    text.push('\n');
    let mut line = |name: &str, content: &str| {
        if !content.is_empty() {
            let _ = writeln!(text, "  {name:12} {content}");
        }
    };
    if !status.state().is_success() {
        line("reason", &status.reason);
    }
    line("skipped", &status.skipped.as_ref().map(skipped).unwrap_or_default());
    line("overflows", &overflowed(status));
    if status.final_metrics.is_empty() {
        line("training", &metrics(&final_metrics(status)));
    }
    for (set, measured) in by_set(&status.final_metrics) {
        line(set, &metrics(&measured));
    }
    line("best", &best(status).unwrap_or_default());
    if let Some(Written { dir, files, copy }) = written {
        line("results", &format!("{}: {}", dir.display(), files.join(", ")));
        line("copied to", copy.as_deref().unwrap_or_default());
    }
    line("predictions", predictions(status).unwrap_or_default());
    line("model_sha256", model_sha256(status).unwrap_or_default());
    if measures.is_some() {
        return text;
    }
    if model_sha256(status).is_none() {
        line("note", &format!("no {MODEL}: this job ended without exporting one"));
    } else if written.is_none() {
        line("note", otherwise);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake::succeeded;
    use client::report::json;
    use serde_json::json as value_of;

    #[test]
    fn numbers_are_as_precise_as_they_are_worth() {
        for (number, text) in [
            (0.0, "0"),
            (0.08123, "0.0812"),
            (0.975, "0.9750"),
            (2.345_678, "2.346"),
            (41.5678, "41.57"),
            (98765.4, "98765"),
            (1.5e-7, "1.500e-7"),
            (-0.5, "-0.5000"),
            (f64::NAN, "NaN"),
        ] {
            assert_eq!(value(number), text);
        }
        assert_eq!((rate(4490.3), rate(3.26)), ("4490".to_owned(), "3.3".to_owned()));
        for (seconds, text) in [(3.21, "3.2 s"), (245.0, "4 min 05 s"), (7650.0, "2 h 07 min")] {
            assert_eq!(duration(Duration::from_secs_f64(seconds)), text);
        }
    }

    #[test]
    fn a_result_says_state_metrics_files_and_hash() {
        let written = Written {
            dir: "out".into(),
            files: vec!["model.safetensors".into()],
            copy: Some("s3://bucket/line".into()),
        };
        let hash = proto::artifact::sha256_hex(b"weights");
        assert_eq!(
            result(&succeeded(), Some(&written), "-"),
            format!(
                "line-3 succeeded: 4 of 4 steps, 32 samples in 2.0 s (16.0 samples/s)\n  validation   loss 0.2500, accuracy 0.7500\n  \
                 results      out: model.safetensors\n  copied to    s3://bucket/line\n  model_sha256 {hash}\n"
            )
        );
        assert!(
            result(&succeeded(), None, "nothing was written").ends_with("note         nothing was written\n")
        );
    }

    #[test]
    fn a_job_that_does_not_train_shows_records_and_predictions() {
        let predicted = JobStatus {
            purpose: JobPurpose::Predict.into(),
            records: 600,
            records_done: 600,
            predictions: "/out/p.npy".to_owned(),
            final_metrics: BTreeMap::new(),
            loss: None,
            artifacts: Vec::new(),
            ..succeeded()
        };
        assert_eq!(
            result(&predicted, None, "-"),
            "line-3 succeeded: 600 of 600 records predicted in 2.0 s (300 samples/s)\n  predictions  /out/p.npy\n"
        );
        assert!(status(&predicted).contains("progress   600 of 600 records\n"), "{}", status(&predicted));
    }

    #[test]
    fn a_failed_result_says_why() {
        let failed = JobStatus {
            state: JobState::Failed.into(),
            reason: "data/x.csv: no such file".to_owned(),
            artifacts: Vec::new(),
            ..succeeded()
        };
        let text = result(&failed, None, "-");
        assert!(
            text.contains("failed") && text.contains("data/x.csv") && text.contains("without exporting one"),
            "{text}"
        );
    }

    #[test]
    fn the_progress_of_a_job_that_counts_its_data_is_that_of_its_files() {
        let indexing = Some(pb::Indexing { files_done: 12, files: 240, bytes_done: 7 << 29 });
        let job = JobStatus { state: JobState::Indexing.into(), steps: 0, indexing, ..succeeded() };
        assert!(status(&job).contains("progress   12 of 240 files, 3.5 GiB counted\n"), "{}", status(&job));
    }

    #[test]
    fn the_table_lines_up() {
        let waiting = JobStatus {
            name: "a-rather-long-name-12".to_owned(),
            state: JobState::Pending.into(),
            reason: "0 of 1 workers".to_owned(),
            ..JobStatus::default()
        };
        let text = table(&[succeeded(), waiting]);
        let columns: Vec<_> =
            text.lines().map(|line| line.find("STATE").or(line.find("succ")).or(line.find("pend"))).collect();
        assert_eq!(columns, [Some(23); 3], "{text}");
    }

    #[test]
    fn standby_is_shown_where_there_is_some_and_bounds_as_long_as_they_count() {
        let mut job = JobStatus {
            state: JobState::Paused.into(),
            reason: "a user paused it".to_owned(),
            workers: 1,
            workers_standby: 2,
            workers_min: 1,
            workers_max: 1,
            ..succeeded()
        };
        let text = status(&job);
        assert!(text.contains("paused: a user paused it"), "{text}");
        assert!(text.contains("workers    1 worker (+2 standing by), wants 1; 3 so far"), "{text}");
        assert!(table(std::slice::from_ref(&job)).contains("  1 (+2)  "));
        (job.workers, job.workers_standby, job.workers_max) = (3, 0, 4);
        assert_eq!(workers_wanted(&job), "3 workers, wants 1 to 4");
        job.state = JobState::Failed.into();
        assert!(status(&job).contains("workers    3 so far"));
    }

    #[test]
    fn status_names_a_worker_that_hangs_and_what_in() {
        let hang = pb::Hang {
            worker: "b".to_owned(),
            phase: pb::Phase::Reading.into(),
            what: "/data/x.gz".to_owned(),
            idle_ms: 362_000,
            work: "count the records of `x.gz`".to_owned(),
            taken_over: false,
        };
        let mut job = JobStatus { hangs: vec![hang], ..succeeded() };
        let line = "hangs      worker `b` has been reading /data/x.gz for 6 min 02 s; it is to count the records of `x.gz`, and no \
                    other worker is free for that";
        assert!(status(&job).contains(line), "{}", status(&job));
        assert_eq!(
            (&json(&job)["hangs"][0]["phase"], &json(&job)["hangs"][0]["idle_seconds"]),
            (&value_of!("reading"), &value_of!(362.0))
        );
        job.hangs[0].work = String::new();
        assert!(
            status(&job).contains("for 6 min 02 s; another worker has done that work"),
            "{}",
            status(&job)
        );
    }

    #[test]
    fn skipped_records_are_counted_and_the_first_is_named() {
        let first = pb::SkippedRecord { file: "a.csv".to_owned(), record: 5, ..Default::default() };
        let first = pb::SkippedRecord { reason: "column `x` has no value".to_owned(), ..first };
        let skipped = pb::Skipped { train: 3, validation: 1, records: vec![first], ..Default::default() };
        let job = JobStatus { skipped: Some(skipped), ..succeeded() };
        let line = "3 training records and 1 validation record; the first: a.csv, record 5: column `x` has no value\n";
        assert!(status(&job).contains(&format!("skipped    {line}")), "{}", status(&job));
        assert!(
            result(&job, None, "-").contains(&format!("  skipped      {line}")),
            "{}",
            result(&job, None, "-")
        );
        assert!(!status(&succeeded()).contains("skipped"));
    }

    #[test]
    fn status_names_idle_workers_with_the_reason() {
        let slow = pb::Idle {
            why: pb::Why::TooSlow.into(),
            reason: "takes 512.3 ms for a microbatch, others 140.0 ms; it is tried again in 1.9 s".to_owned(),
            count: 1,
            workers: vec!["b".to_owned()],
            slow: Some(pb::Slow { microbatch_us: 512_300, usual_us: 140_000, again_ms: 1900 }),
            numerics: None,
        };
        let done = pb::Idle {
            why: pb::Why::NothingLeft.into(),
            reason: "epoch 2 of 2 has no task left".to_owned(),
            count: 4,
            workers: vec!["c".to_owned(), "d".to_owned()],
            ..Default::default()
        };
        let job = JobStatus { idle: vec![slow, done], ..succeeded() };
        for line in [
            "idle       b: takes 512.3 ms for a microbatch, others 140.0 ms; it is tried again in 1.9 s",
            "idle       c, d and 2 more: epoch 2 of 2 has no task left",
        ] {
            assert!(status(&job).contains(line), "{}", status(&job));
        }
        assert_eq!(json(&job)["idle"][0]["again_seconds"], 1.9);
        assert_eq!(
            (&json(&job)["idle"][1]["why"], &json(&job)["idle"][1]["count"]),
            (&value_of!("nothing_left"), &value_of!(4))
        );
    }

    #[test]
    fn status_tells_the_devices_of_workers() {
        let numerics = Some(pb::Numerics { class: "3fa94c".to_owned(), facts: "facts".to_owned() });
        let group = |device: &str, memory_bytes, count, workers: &[&str]| pb::WorkersOnDevice {
            device: device.to_owned(),
            memory_bytes,
            numerics: numerics.clone(),
            count,
            workers: workers.iter().map(|&name| name.to_owned()).collect(),
            ..Default::default()
        };
        let hot = pb::WorkersOnDevice {
            busy_percent: Some(87),
            waits_data_percent: Some(5),
            waits_weights_percent: Some(12),
            waits_push_percent: Some(0),
            memory_used_bytes: 1 << 30,
            throttled: 2,
            failing: 1,
            ..group("cuda:1", 0, 3, &["d"])
        };
        let devices = vec![group("cuda:0", 85_520_809_984, 4, &["a", "b"]), group("cpu", 0, 1, &["c"]), hot];
        let job = JobStatus { devices, ..succeeded() };
        for line in [
            "device     cuda:0 with 79.6 GiB, class 3fa94c: a, b and 2 more",
            "device     cpu, class 3fa94c: c\n",
            "device     cuda:1, class 3fa94c: d and 2 more; 87 % busy, waits 5 % data 12 % weights 0 % pushes, \
             1.0 GiB used, 2 throttled, 1 FAILING",
        ] {
            assert!(status(&job).contains(line), "{}", status(&job));
        }
        let all = &json(&job)["devices"];
        assert_eq!(
            (&all[0]["memory_bytes"], &all[0]["count"]),
            (&value_of!(85_520_809_984_u64), &value_of!(4))
        );
        assert_eq!(
            (&all[1]["memory_bytes"], &all[1]["numerics_class"]),
            (&value_of!(null), &value_of!("3fa94c"))
        );
        assert_eq!((&all[1]["busy_percent"], &all[1]["throttled"]), (&value_of!(null), &value_of!(0)));
        assert_eq!(
            (&all[1]["waits_data_percent"], &all[2]["waits_weights_percent"]),
            (&value_of!(null), &value_of!(12))
        );
        assert_eq!((&all[2]["busy_percent"], &all[2]["failing"]), (&value_of!(87), &value_of!(1)));
        assert_eq!(json(&succeeded())["devices"], value_of!([]));
    }

    #[test]
    fn status_shows_what_is_known_and_leaves_out_what_is_not() {
        let text = status(&succeeded());
        for part in ["line-3", "succeeded: all steps applied", "step 4 of 4, 2 epochs", "3 so far", "0.7500"]
        {
            assert!(text.contains(part), "{part} missing in {text}");
        }
        assert!(!status(&JobStatus::default()).contains("validation"));
        let class =
            |name: &str| Some(pb::Numerics { class: name.to_owned(), facts: format!("facts of {name}") });
        let waits = JobStatus {
            numerics_class: class("aa"),
            idle: vec![pb::Idle {
                why: pb::Why::OtherClass.into(),
                reason: "standing by, of another numerics class: bb (facts of bb)".to_owned(),
                count: 2,
                workers: vec!["b".to_owned(), "c".to_owned()],
                numerics: class("bb"),
                slow: None,
            }],
            ..JobStatus::default()
        };
        let text = status(&waits);
        for part in
            ["numerics   aa (facts of aa)", "b, c: standing by, of another numerics class: bb (facts of bb)"]
        {
            assert!(text.contains(part), "{part} missing in {text}");
        }
        assert_eq!(json(&waits)["idle"][0]["numerics_class"], "bb");
        assert_eq!(json(&succeeded())["final"]["accuracy"], 0.75);
    }
}
