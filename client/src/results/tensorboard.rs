//! TensorBoard event files: scalars as TFRecords of `Event` messages.
//!
//! A record is `length (u64) | masked crc32c of it | message | masked crc32c of it`, little-endian;
//! the mask is TensorFlow's (`crc32c_masked` in tsl/lib/hash/crc32c.h). The three messages below
//! are the used part of tensorflow's event.proto and summary.proto.

use std::io::{self, Write};

use prost::Message;

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
    values: Vec<Scalar>,
}

#[derive(Clone, PartialEq, Message)]
struct Scalar {
    #[prost(string, tag = "1")]
    tag: String,
    /// Part of a oneof, hence optional: a zero is written too.
    #[prost(float, optional, tag = "2")]
    simple_value: Option<f32>,
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
    let value = |(tag, value): (String, f64)| Scalar { tag, simple_value: Some(value as f32) };
    let values = scalars.into_iter().map(value).collect();
    let step = i64::try_from(step).unwrap_or(i64::MAX);
    let wall_time = event.unix_ms as f64 / 1e3;
    write_record(to, &Event { wall_time, step, summary: Some(Summary { values }), ..Event::default() })
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
            let set = Some(evaluation.set.as_str()).filter(|set| !set.is_empty()).unwrap_or("validation");
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
mod tests {
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
    fn names_are_found_by_tensorboard_and_by_us() {
        assert_eq!(file_name("line-3", 1_700_000_000_500), "events.out.tfevents.1700000000.line-3.ebb");
    }
}
