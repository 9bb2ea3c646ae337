//! TensorBoard event files: scalars, images and texts as TFRecords of `Event` messages.
//!
//! A record is `length (u64) | masked crc32c of it | message | masked crc32c of it`, little-endian;
//! the mask is TensorFlow's (`crc32c_masked` in tsl/lib/hash/crc32c.h). The messages below are the
//! used part of tensorflow's event.proto, summary.proto and tensor.proto.

use std::io::{self, Write};

use prost::Message;
use proto::pb;

use super::table;
use crate::Kind;

#[derive(Clone, PartialEq, Message)]
struct Event {
    /// Seconds since 1970.
    #[prost(double, tag = "1")]
    wall_time: f64,
    #[prost(int64, tag = "2")]
    step: i64,
    /// The version of the format, in the first event of a file only.
    #[prost(string, optional, tag = "3")]
    file_version: Option<String>,
    #[prost(message, optional, tag = "5")]
    summary: Option<Summary>,
}

#[derive(Clone, PartialEq, Message)]
struct Summary {
    #[prost(message, repeated, tag = "1")]
    values: Vec<Value>,
}

/// A scalar, or a tensor for the plugin that `metadata` names.
#[derive(Clone, PartialEq, Message)]
struct Value {
    #[prost(string, tag = "1")]
    tag: String,
    /// Part of a oneof, hence optional: a zero is written too.
    #[prost(float, optional, tag = "2")]
    simple_value: Option<f32>,
    #[prost(message, optional, tag = "8")]
    tensor: Option<Tensor>,
    #[prost(message, optional, tag = "9")]
    metadata: Option<Metadata>,
}

#[derive(Clone, PartialEq, Message)]
struct Metadata {
    #[prost(message, optional, tag = "1")]
    plugin: Option<Plugin>,
    /// What the tensor holds: [`TENSOR`] or [`BLOBS`].
    #[prost(int32, tag = "4")]
    data_class: i32,
}

#[derive(Clone, PartialEq, Message)]
struct Plugin {
    #[prost(string, tag = "1")]
    name: String,
}

/// A tensor of byte strings.
#[derive(Clone, PartialEq, Message)]
struct Tensor {
    #[prost(int32, tag = "1")]
    dtype: i32,
    #[prost(message, optional, tag = "2")]
    shape: Option<Shape>,
    #[prost(bytes = "vec", repeated, tag = "8")]
    strings: Vec<Vec<u8>>,
}

#[derive(Clone, PartialEq, Message)]
struct Shape {
    #[prost(message, repeated, tag = "2")]
    dims: Vec<Dim>,
}

#[derive(Clone, PartialEq, Message)]
struct Dim {
    #[prost(int64, tag = "1")]
    size: i64,
}

/// `DT_STRING` of tensorflow's types.proto.
const STRING: i32 = 7;

/// `DATA_CLASS_TENSOR` and `DATA_CLASS_BLOB_SEQUENCE` of summary.proto.
const TENSOR: i32 = 2;
const BLOBS: i32 = 3;

impl Value {
    const fn scalar(tag: String, value: f32) -> Self {
        Self { tag, simple_value: Some(value), tensor: None, metadata: None }
    }

    fn of_plugin(tag: String, plugin: &str, data_class: i32, tensor: Tensor) -> Self {
        let plugin = Some(Plugin { name: plugin.to_owned() });
        let metadata = Some(Metadata { plugin, data_class });
        Self { tag, simple_value: None, tensor: Some(tensor), metadata }
    }

    /// Returns a text in Markdown.
    fn text(tag: String, markdown: String) -> Self {
        let strings = vec![markdown.into_bytes()];
        let tensor = Tensor { dtype: STRING, shape: Some(Shape::default()), strings };
        Self::of_plugin(tag, "text", TENSOR, tensor)
    }

    /// Returns PNG files as the samples of one tag. `None`: there are none.
    fn images(tag: String, files: &[&[u8]]) -> Option<Self> {
        // Width and height of the first one come before the files.
        let of_first = |at: usize| {
            let bytes = files.first()?.get(at..at + 4)?.try_into().ok()?;
            Some(u32::from_be_bytes(bytes).to_string().into_bytes())
        };
        let mut strings = vec![of_first(16)?, of_first(20)?];
        strings.extend(files.iter().map(|file| file.to_vec()));
        let dims = vec![Dim { size: strings.len() as i64 }];
        let tensor = Tensor { dtype: STRING, shape: Some(Shape { dims }), strings };
        Some(Self::of_plugin(tag, "images", BLOBS, tensor))
    }
}

/// The end of our files' names, by which a later run finds them. TensorBoard looks for `tfevents`
/// anywhere in the name.
pub(crate) const SUFFIX: &str = ".ebb";

/// Name of the file for a job whose first event came at `unix_ms`.
pub(crate) fn file_name(job: &str, unix_ms: u64) -> String {
    format!("events.out.tfevents.{:010}.{job}{SUFFIX}", unix_ms / 1000)
}

/// Writes the begin of a file.
pub(crate) fn write_start(to: &mut impl Write, unix_ms: u64) -> io::Result<()> {
    let file_version = Some("brain.Event:2".to_owned());
    write_record(to, &Event { wall_time: unix_ms as f64 / 1e3, file_version, ..Event::default() })
}

/// Writes the scalars of an event, if it has some.
pub(crate) fn write_event(to: &mut impl Write, event: &crate::Event) -> io::Result<()> {
    let Some((step, scalars)) = scalars(event) else { return Ok(()) };
    let value = |(tag, value): (String, f64)| Value::scalar(tag, value as f32);
    write_values(to, event.unix_ms, step, scalars.into_iter().map(value).collect())
}

/// Writes the worst records of a version that was measured after `step` steps: of each validation
/// set a table, and the images of those that have one.
pub(crate) fn write_worst(
    to: &mut impl Write,
    unix_ms: u64,
    step: u64,
    worst: &[pb::WorstRecord],
) -> io::Result<()> {
    write_values(to, unix_ms, step, of_worst(worst))
}

/// Returns the message `Summary` of the worst records, encoded.
pub(super) fn worst_summary(worst: &[pb::WorstRecord]) -> Vec<u8> {
    Summary { values: of_worst(worst) }.encode_to_vec()
}

fn of_worst(worst: &[pb::WorstRecord]) -> Vec<Value> {
    let of_set = |records: &[pb::WorstRecord]| {
        let tag = format!("{}/worst", shown(&records[0].set));
        let images: Vec<_> = records.iter().filter_map(table::image).collect();
        let images = Value::images(format!("{tag}/images"), &images);
        [Value::text(tag, table::markdown(records))].into_iter().chain(images)
    };
    worst.chunk_by(|one, next| one.set == next.set).flat_map(of_set).collect()
}

fn write_values(to: &mut impl Write, unix_ms: u64, step: u64, values: Vec<Value>) -> io::Result<()> {
    let step = i64::try_from(step).unwrap_or(i64::MAX);
    let wall_time = unix_ms as f64 / 1e3;
    write_record(to, &Event { wall_time, step, summary: Some(Summary { values }), ..Event::default() })
}

/// Returns what a validation set is called in tags.
const fn shown(set: &str) -> &str {
    if set.is_empty() { "validation" } else { set }
}

fn scalars(event: &crate::Event) -> Option<(u64, Vec<(String, f64)>)> {
    match &event.kind {
        Kind::Train(train) => {
            let scalars = [
                ("loss", train.loss),
                ("learning_rate", train.learning_rate),
                ("samples_per_second", train.samples_per_second),
                ("workers", f64::from(train.workers)),
                ("epoch", train.epoch as f64),
            ];
            Some((train.step, scalars.map(|(name, value)| (format!("train/{name}"), value)).into()))
        }
        Kind::Evaluation(evaluation) => {
            let set = shown(&evaluation.set);
            let scalars = evaluation.metrics.iter();
            let scalars = scalars.map(|(name, &value)| (format!("{set}/{name}"), value)).collect();
            Some((evaluation.step, scalars))
        }
        _ => None,
    }
}

fn write_record(to: &mut impl Write, event: &Event) -> io::Result<()> {
    let message = event.encode_to_vec();
    let length = (message.len() as u64).to_le_bytes();
    // In one write, so that a reader at the end of a growing file sees whole records.
    let crc = |bytes: &[u8]| mask(crc32c::crc32c(bytes)).to_le_bytes();
    to.write_all(&[&length[..], &crc(&length), &message, &crc(&message)].concat())
}

const fn mask(crc: u32) -> u32 {
    crc.rotate_right(15).wrapping_add(0xa282_ead8)
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::fake::{evaluation, train};

    /// Reads records as TensorBoard does: lengths and checksums must fit.
    fn read(mut bytes: &[u8]) -> Vec<Event> {
        let mut events = Vec::new();
        while !bytes.is_empty() {
            let (length, rest) = bytes.split_at(8);
            let (length_crc, rest) = rest.split_at(4);
            assert_eq!(mask(crc32c::crc32c(length)).to_le_bytes(), length_crc);
            let (message, rest) = rest.split_at(u64::from_le_bytes(length.try_into().unwrap()) as usize);
            let (crc, rest) = rest.split_at(4);
            assert_eq!(mask(crc32c::crc32c(message)).to_le_bytes(), crc);
            events.push(Event::decode(message).unwrap());
            bytes = rest;
        }
        events
    }

    /// Returns step and tags of each event of a file.
    pub(in crate::results) fn tags(bytes: &[u8]) -> Vec<(i64, Vec<String>)> {
        let of_event = |event: Event| {
            let values = event.summary.unwrap_or_default().values;
            (event.step, values.into_iter().map(|value| value.tag).collect())
        };
        read(bytes).into_iter().map(of_event).collect()
    }

    #[test]
    fn the_mask_is_tensorflows() {
        // crc32c("123456789") is the check value of the CRC catalogue; masked by hand from
        // TensorFlow's formula.
        assert_eq!(crc32c::crc32c(b"123456789"), 0xe306_9283);
        assert_eq!(mask(0xe306_9283), 0xc78a_b0e5);
    }

    #[test]
    fn a_file_is_records_with_a_version_first() {
        let mut file = Vec::new();
        write_start(&mut file, 1_700_000_000_500).unwrap();
        for event in [train(3), evaluation(1)] {
            write_event(&mut file, &event).unwrap();
        }
        let events = read(&file);
        assert_eq!(events[0].file_version.as_deref(), Some("brain.Event:2"));
        assert_eq!(events[0].wall_time, 1_700_000_000.5);
        let tags = |event: &Event| -> Vec<_> {
            let values = event.summary.clone().unwrap().values;
            values.into_iter().map(|scalar| (scalar.tag, scalar.simple_value.unwrap())).collect()
        };
        assert_eq!(events[1].step, 3);
        let train = tags(&events[1]);
        assert_eq!(train[0], ("train/loss".to_owned(), 0.5));
        assert!(train.contains(&("train/learning_rate".to_owned(), 0.1)), "{train:?}");
        assert!(train.contains(&("train/samples_per_second".to_owned(), 100.0)), "{train:?}");
        let expected = [("validation/accuracy".to_owned(), 0.75), ("validation/loss".to_owned(), 0.25)];
        assert_eq!((events[2].step, tags(&events[2])), (4, expected.into()));
    }

    #[test]
    fn worst_records_are_a_table_and_the_samples_of_one_image() {
        let png =
            |width: u8, height: u8| [&[0; 16][..], &[0, 0, 0, width], &[0, 0, 0, height], b"pixels"].concat();
        let of = |set: &str, png: Option<Vec<u8>>| {
            let preview = png.map(|png| pb::Preview { png: png.into(), ..Default::default() });
            let found = Some(pb::RecordLoss { preview, ..Default::default() });
            pb::WorstRecord { set: set.to_owned(), found, ..Default::default() }
        };
        let worst = [
            of("", Some(png(3, 2))),
            of("", None),
            of("", Some(Vec::new())),
            of("", Some(png(4, 4))),
            of("test", None),
        ];
        let mut file = Vec::new();
        write_worst(&mut file, 1_700_000_000_500, 46, &worst).unwrap();
        let event = read(&file).remove(0);
        assert_eq!((event.step, event.wall_time), (46, 1_700_000_000.5));
        let values = event.summary.unwrap().values;
        let plugins = values.iter().map(|value| {
            let metadata = value.metadata.clone().unwrap();
            (value.tag.as_str(), metadata.plugin.unwrap().name, metadata.data_class)
        });
        let expected = [
            ("validation/worst", "text".to_owned(), TENSOR),
            ("validation/worst/images", "images".to_owned(), BLOBS),
            ("test/worst", "text".to_owned(), TENSOR),
        ];
        assert_eq!(plugins.collect::<Vec<_>>(), expected);
        let images = values[1].tensor.clone().unwrap();
        assert_eq!(images.strings, [b"3".to_vec(), b"2".to_vec(), png(3, 2), png(4, 4)]);
        assert_eq!((images.dtype, images.shape.unwrap().dims), (STRING, vec![Dim { size: 4 }]));
        let table = values[2].tensor.clone().unwrap();
        assert_eq!((table.shape, table.strings.len()), (Some(Shape::default()), 1));
        assert!(table.strings[0].starts_with(b"record | file"));
    }

    #[test]
    fn names_are_found_by_tensorboard_and_by_us() {
        assert_eq!(file_name("line-3", 1_700_000_000_500), "events.out.tfevents.1700000000.line-3.ebb");
    }
}
