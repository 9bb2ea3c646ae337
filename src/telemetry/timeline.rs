//! The timeline of a process, as a Chrome trace: each span is written when it ends.
//!
//! The format is Google's "Trace Event Format": a JSON array of events. Each span is a pair of
//! *async* events (`b` and `e`), because spans of one thread overlap. Spans below one root share
//! its `id`, and so a track of the viewer. Times are microseconds since 1970, so that files of
//! several processes line up. The file of a killed process ends in the middle; viewers read what
//! there is.
//!
//! The thread that ends a span writes it into a buffer. To wake another thread for each span would
//! cost more than the writing.

use std::fs::File;
use std::io::{self, BufWriter, Write as _};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::SystemTime;

use opentelemetry::{KeyValue, Value};
use serde::{Serialize, Serializer};
use tracing::span::Id;
use tracing::{Metadata, warn};

/// Bytes that are written to the file at once.
const BUFFER: usize = 1 << 16;

/// A file that is being written.
pub(crate) struct Timeline(Out);

/// Ends the file when it is dropped.
#[must_use = "the file ends when it is dropped"]
pub(crate) struct Ending(Out);

/// The open file. `None` once it has ended, or cannot be written any more.
type Out = Arc<Mutex<Option<BufWriter<File>>>>;

/// A line of the file.
#[derive(Serialize)]
struct Event<'a> {
    ph: char,
    pid: u32,
    /// A number that viewers want. They sort by `id`.
    tid: u32,
    name: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    cat: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<&'a str>,
    /// Microseconds since 1970.
    #[serde(skip_serializing_if = "Option::is_none")]
    ts: Option<f64>,
    #[serde(skip_serializing_if = "<[_]>::is_empty", serialize_with = "object")]
    args: &'a [KeyValue],
}

impl Timeline {
    /// Begins `file`. `process` names this process there.
    ///
    /// # Errors
    /// The file cannot be written.
    pub(crate) fn new(file: File, process: &'static str) -> io::Result<(Self, Ending)> {
        let mut file = BufWriter::with_capacity(BUFFER, file);
        file.write_all(b"[\n")?;
        Event { args: &[KeyValue::new("name", process)], ..Event::new('M', "process_name") }
            .write(&mut file)?;
        let out = Arc::new(Mutex::new(Some(file)));
        Ok((Self(out.clone()), Ending(out)))
    }

    /// Writes a span that has ended, on the track of its `root`.
    pub(crate) fn write(
        &self,
        metadata: &Metadata<'_>,
        root: &Id,
        (begin, end): (SystemTime, SystemTime),
        args: &[KeyValue],
    ) {
        let id = format!("{:#x}", root.into_u64());
        let event = |ph, at: SystemTime, args| Event {
            cat: Some(metadata.target()),
            id: Some(&id),
            ts: at.duration_since(SystemTime::UNIX_EPOCH).ok().map(|at| at.as_nanos() as f64 / 1e3),
            args,
            ..Event::new(ph, metadata.name())
        };
        let mut out = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(file) = out.as_mut() else { return };
        let mut next = |event: Event<'_>| file.write_all(b",\n").and_then(|()| event.write(file));
        let written = next(event('b', begin, args)).and_then(|()| next(event('e', end, &[])));
        if let Err(error) = written {
            *out = None;
            drop(out);
            warn!("--trace: {error}; what comes now is not in the file");
        }
    }
}

impl<'a> Event<'a> {
    fn new(ph: char, name: &'a str) -> Self {
        let pid = std::process::id();
        Self { ph, pid, tid: pid, name, cat: None, id: None, ts: None, args: &[] }
    }

    fn write(&self, file: &mut BufWriter<File>) -> io::Result<()> {
        serde_json::to_writer(file, self).map_err(io::Error::from)
    }
}

/// A field's value in JSON.
struct Json<'a>(&'a Value);

impl Serialize for Json<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.0 {
            Value::Bool(value) => serializer.serialize_bool(*value),
            Value::I64(value) => serializer.serialize_i64(*value),
            Value::F64(value) => serializer.serialize_f64(*value),
            other => serializer.serialize_str(&other.as_str()),
        }
    }
}

fn object<S: Serializer>(args: &&[KeyValue], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_map(args.iter().map(|arg| (arg.key.as_str(), Json(&arg.value))))
}

impl Drop for Ending {
    fn drop(&mut self) {
        let file = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        let ended = file.map(|mut file| file.write_all(b"\n]\n").and_then(|()| file.flush()));
        if let Some(Err(error)) = ended {
            warn!("--trace: {error}; the end of the file is missing");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use net::timeline::TARGET;
    use serde_json::Value;
    use tracing::{debug_span, subscriber};
    use tracing_subscriber::layer::SubscriberExt as _;

    use super::{File, Timeline};
    use crate::telemetry::spans::Spans;

    /// Returns the events of the file that `spans` lead to.
    fn traced(spans: impl FnOnce()) -> Vec<Value> {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("trace.json");
        let (layer, ending) =
            Timeline::new(File::create(&path).expect("a file"), "ebb-test").expect("written");
        let layer = Spans { file: Some(layer), export: None };
        subscriber::with_default(tracing_subscriber::registry().with(layer), || {
            spans();
            drop(ending);
            drop(debug_span!(target: TARGET, "late").entered());
        });
        serde_json::from_slice(&fs::read(path).expect("a file")).expect("an array")
    }

    #[test]
    fn a_span_is_a_pair_of_events_on_the_track_of_its_root() {
        let events = traced(|| {
            let task = debug_span!(target: TARGET, "task", lease = tracing::field::Empty).entered();
            drop(debug_span!(target: TARGET, "pull", step = 7_u64, job = %"a \"b\"").entered());
            task.record("lease", 3);
            drop(task);
            drop(debug_span!(target: TARGET, "other").entered());
        });
        let text = |event: &Value, name: &str| event[name].as_str().map(str::to_owned);
        let seen: Vec<_> = events.iter().map(|event| (text(event, "ph"), text(event, "name"))).collect();
        let both = |name: &'static str| ["b", "e"].map(|ph| (Some(ph.to_owned()), Some(name.to_owned())));
        let begun = [(Some("M".to_owned()), Some("process_name".to_owned()))];
        assert_eq!(seen, [&begun[..], &both("pull"), &both("task"), &both("other")].concat());
        assert_eq!(events[0]["args"]["name"], "ebb-test");
        let (pull, task, other) = (&events[1..3], &events[3..5], &events[5..7]);
        assert_eq!(pull[0]["args"], serde_json::json!({"step": 7, "job": "a \"b\""}));
        assert_eq!(task[0]["args"], serde_json::json!({"lease": 3}));
        assert_eq!(other[0].get("args"), None);
        for pair in [pull, task, other] {
            assert_eq!(pair[0]["id"], pair[1]["id"]);
            assert!(pair[0]["ts"].as_f64() <= pair[1]["ts"].as_f64(), "{pair:?}");
        }
        assert_eq!(pull[0]["id"], task[0]["id"]);
    }

    #[test]
    fn a_file_without_a_span_is_whole() {
        assert_eq!(traced(|| ()).len(), 1);
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn a_full_disk_ends_the_timeline_and_not_the_program() {
        let full = File::options().write(true).open("/dev/full").expect("Linux has it");
        let (layer, ending) = Timeline::new(full, "ebb-test").expect("still in the buffer");
        let out = layer.0.clone();
        let layer = Spans { file: Some(layer), export: None };
        subscriber::with_default(tracing_subscriber::registry().with(layer), || {
            while out.lock().expect("no panic").is_some() {
                drop(debug_span!(target: TARGET, "span").entered());
            }
            drop(debug_span!(target: TARGET, "one more").entered());
        });
        drop(ending);
    }
}
