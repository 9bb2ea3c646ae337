//! One trace follows a microbatch through two processes: from the lease over pull, compute and push
//! to the step that is applied.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::collections::{BTreeMap, BTreeSet};

use crate::harness::collector::{Collector, Span};
use crate::harness::{Cluster, root, summary, text};
use opentelemetry_proto::tonic::trace::v1::span::SpanKind;

/// Ps of the example's job.
const PS: usize = 2;

/// Spans of the processes, by trace.
struct Traces {
    spans: Vec<Span>,
    by_id: BTreeMap<(Vec<u8>, Vec<u8>), usize>,
}

impl Traces {
    fn new(spans: Vec<Span>) -> Self {
        let id = |(index, span): (usize, &Span)| ((span.trace.clone(), span.id.clone()), index);
        let by_id = spans.iter().enumerate().map(id).collect();
        Self { spans, by_id }
    }

    fn get(&self, trace: &[u8], id: &[u8]) -> Option<&Span> {
        self.by_id.get(&(trace.to_vec(), id.to_vec())).map(|&index| &self.spans[index])
    }

    /// Returns the parent of a span. It is always in the same trace.
    fn parent(&self, span: &Span) -> Option<&Span> {
        (!span.parent.is_empty()).then(|| self.get(&span.trace, &span.parent)).flatten()
    }

    fn children<'a>(
        &'a self,
        of: &'a Span,
        service: &'a str,
        name: &'a str,
    ) -> impl Iterator<Item = &'a Span> {
        let below = move |span: &&Span| span.trace == of.trace && span.parent == of.id;
        self.named(service, name).filter(below)
    }

    fn named<'a>(&'a self, service: &'a str, name: &'a str) -> impl Iterator<Item = &'a Span> {
        self.spans.iter().filter(move |span| span.service == service && span.name == name)
    }
}

/// Trains the example on so many workers. Returns the spans and the summary.
fn train(collector: &Collector, workers: usize, settings: &[&str]) -> (Traces, serde_json::Value) {
    // A process sends its remaining spans when it ends. Before that the queue must not overflow.
    let traced =
        [("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url.as_str()), ("OTEL_BSP_SCHEDULE_DELAY", "100")];
    let mut cluster = Cluster::with_environment(&crate::harness::ebb_path(), PS, 0, &traced);
    (0..workers).for_each(|_| cluster.add_worker_with(&traced));
    let out = cluster.dir.path().join("out");
    let output = cluster.submit(&root().join("examples/digits/job.toml"), &out, settings);
    assert!(output.status.success(), "{}", text(&output));
    // Workers before the processes that they call.
    let Cluster { master, ps, workers, .. } = &mut cluster;
    for process in workers.iter_mut().chain(ps).chain([master]) {
        process.signal("TERM");
        assert!(process.child.wait().unwrap().success(), "{}", process.log());
    }
    (Traces::new(collector.take()), summary(&out))
}

#[test]
fn one_trace_follows_a_microbatch_from_the_lease_to_the_applied_step() {
    let collector = Collector::start();
    let (traces, summary) = train(&collector, 2, &["--set", "epochs=1"]);
    let steps = summary["steps"].as_u64().unwrap() as usize;
    let microbatches = summary["microbatches_applied"].as_u64().unwrap() as usize;

    // Every parent exists, across processes and within them.
    for span in traces.spans.iter().filter(|span| !span.parent.is_empty()) {
        assert!(traces.parent(span).is_some(), "no parent of {span:?}");
        assert!(span.begin_ns <= span.end_ns, "{span:?}");
    }

    // Every microbatch was computed below its lease. The worker asked for the lease, or got it as
    // the answer to the report of another lease.
    let computed: Vec<_> = traces.named("ebb-worker", "compute").collect();
    assert!(computed.len() >= microbatches, "{} of {microbatches}", computed.len());
    for compute in &computed {
        let task = traces.parent(compute).unwrap();
        assert_eq!((task.name.as_str(), task.parent.len()), ("task", 0), "{task:?}");
        assert!(task.number("lease").is_some() && compute.number("load_us").is_some(), "{task:?}");
        if let Some(lease) = traces.children(task, "ebb-worker", "lease").next() {
            assert_eq!(lease.kind, SpanKind::Client);
        } else {
            let after = task.number("after");
            let mut tasks = traces.named("ebb-worker", "task");
            assert!(after.is_some() && tasks.any(|other| other.number("lease") == after), "{task:?}");
        }
    }

    // All that a worker did for a lease names its device.
    for name in ["task", "pull", "compute", "push"] {
        assert!(traces.named("ebb-worker", name).all(|span| span.text("device") == Some("cpu")), "{name}");
    }

    // Each step's weights were pulled and its gradients pushed, below what the worker did.
    for name in ["pull", "push"] {
        let sent: Vec<_> = traces.named("ebb-worker", name).collect();
        assert!(sent.iter().all(|span| span.kind == SpanKind::Client && !span.is("ahead")));
        assert!(sent.iter().all(|span| traces.parent(span).is_some_and(|task| task.name == "task")));
        let whole: BTreeSet<_> = sent.iter().filter_map(|span| span.number("step")).collect();
        assert_eq!(whole, (0..steps as i64).collect(), "{name}");
    }

    // Each ps updates each step once, from pushes of that step: below the last of them, with a link
    // to each.
    let applied: Vec<_> = traces.named("ebb-ps", "apply").collect();
    assert_eq!(applied.len(), PS * steps);
    for apply in applied {
        let last = traces.parent(apply).unwrap();
        let contributed: Vec<_> = apply
            .links
            .iter()
            .map(|(trace, id)| traces.get(trace, id).expect("a link leads somewhere"))
            .collect();
        assert!(contributed.iter().any(|push| push.id == last.id), "{apply:?}");
        for push in contributed {
            let at = (push.service.as_str(), push.name.as_str(), push.number("step"));
            assert_eq!(at, ("ebb-worker", "push", apply.number("step")), "{push:?} of {apply:?}");
        }
    }
    // So one trace leads from the task to the step. The first task was asked for.
    let mut leases = traces.named("ebb-worker", "lease");
    assert!(leases.any(|lease| traces.parent(lease).is_some_and(|task| task.name == "task")));

    // Nothing else has a span: they cost the processors that train.
    let names: BTreeSet<_> = traces.spans.iter().map(|span| span.name.as_str()).collect();
    println!("{:.1} spans a step", traces.spans.len() as f64 / steps as f64);
    assert_eq!(names, BTreeSet::from(["apply", "compute", "ebb", "job", "lease", "pull", "push", "task"]));
    assert!(collector.reports_of_numbers() >= 4, "each process tells its numbers when it ends");
}

#[test]
fn a_pull_ahead_begins_before_an_earlier_step_is_computed() {
    let collector = Collector::start();
    let settings = ["--set", "epochs=3", "--set", "consistency.mode=pipelined"];
    let (traces, _) = train(&collector, 1, &settings);
    let pulls = traces.named("ebb-worker", "pull").filter(|pull| pull.is("ahead"));
    let ahead: Vec<_> = pulls.collect();
    // A worker that is alone has runs of many steps, so it knows the next one.
    assert!(!ahead.is_empty(), "no pull ran ahead");
    for pull in ahead {
        let (step, task) = (pull.number("step").unwrap(), traces.parent(pull).unwrap());
        assert!(pull.kind == SpanKind::Client && task.name == "task", "{task:?}");
        let computed = traces.named("ebb-worker", "compute");
        let before = computed.filter(|compute| compute.number("step") == Some(step - 1));
        let computed_ns = before.map(|compute| compute.end_ns).max().unwrap();
        assert!(pull.begin_ns <= computed_ns, "{pull:?} after {computed_ns}");
    }
}
