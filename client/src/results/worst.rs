//! The records with the largest losses in the last evaluation: `worst.jsonl`, one in each line, and
//! what other programs show of them.

use proto::pb;
use serde::Serialize;

use super::{table, tensorboard};

/// The worst records of a job, for programs that show them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorstRecords {
    /// The line of each record in `worst.jsonl`, and its image as a PNG file if it has one.
    pub records: Vec<(String, Option<Vec<u8>>)>,
    /// What TensorBoard shows of all of them: an encoded message `Summary`.
    pub summary: Vec<u8>,
}

impl WorstRecords {
    /// Returns the worst records in the state of a job.
    pub fn of(status: &pb::JobStatus) -> Self {
        let record = |record| Some((line(record)?, table::image(record).map(<[u8]>::to_vec)));
        let records = status.worst.iter().filter_map(record).collect();
        Self { records, summary: tensorboard::worst_summary(&status.worst) }
    }
}

/// One line, in the order of its fields. Numbers that are NaN or infinite become `null`.
#[derive(Serialize)]
struct Line<'a> {
    /// Name of the validation set. Absent for the one without a name.
    #[serde(skip_serializing_if = "str::is_empty")]
    set: &'a str,
    /// Number of the record over all files of its set.
    record: u64,
    /// Absent: a loop in Python has the records.
    #[serde(skip_serializing_if = "str::is_empty")]
    file: &'a str,
    /// Number of the record in the file.
    row: u64,
    loss: f64,
    /// Absent: it has too many numbers.
    #[serde(skip_serializing_if = "Option::is_none")]
    label: Option<Label<'a>>,
    /// Absent: there are none, or too many.
    #[serde(skip_serializing_if = "<[f32]>::is_empty")]
    outputs: &'a [f32],
    /// Places of these outputs among all. Absent: they are all, in order.
    #[serde(skip_serializing_if = "<[u32]>::is_empty")]
    places: &'a [u32],
    /// Begin of its text. Absent: no input is a text, or it is not among the first records.
    #[serde(skip_serializing_if = "str::is_empty")]
    text: &'a str,
}

/// A label: its only number, or a list.
#[derive(Serialize)]
#[serde(untagged)]
enum Label<'a> {
    Class(i64),
    Classes(&'a [i64]),
    Value(f32),
    Values(&'a [f32]),
}

impl<'a> Label<'a> {
    const fn of(found: &'a pb::RecordLoss) -> Option<Self> {
        match (found.classes.as_slice(), found.values.as_slice()) {
            ([], []) => None,
            ([class], _) => Some(Self::Class(*class)),
            ([], [value]) => Some(Self::Value(*value)),
            ([], values) => Some(Self::Values(values)),
            (classes, _) => Some(Self::Classes(classes)),
        }
    }
}

/// Returns the content of the file.
pub(super) fn lines(worst: &[pb::WorstRecord]) -> String {
    worst.iter().filter_map(line).map(|line| line + "\n").collect()
}

/// Returns the line of a record, without its line end.
fn line(record: &pb::WorstRecord) -> Option<String> {
    let pb::WorstRecord { set, file, row, found } = record;
    let found = found.as_ref()?;
    let pb::RecordLoss { record, loss, outputs, places, .. } = found;
    let label = Label::of(found);
    let text = found.preview.as_ref().map_or("", |preview| preview.text.as_str());
    let line = Line { set, record: *record, file, row: *row, loss: *loss, label, outputs, places, text };
    Some(serde_json::to_string(&line).expect("plain fields"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_record_is_a_line_with_what_is_known_of_it() {
        let of = |set: &str, found: pb::RecordLoss| pb::WorstRecord {
            set: set.to_owned(),
            file: "v.csv".to_owned(),
            row: 3,
            found: Some(found),
        };
        let empty = pb::RecordLoss { record: 7, loss: f64::NAN, ..Default::default() };
        let class = pb::RecordLoss { classes: vec![4], outputs: vec![0.1, f32::INFINITY], ..empty.clone() };
        let many =
            pb::RecordLoss { classes: vec![4, 5], outputs: vec![2.0], places: vec![999], ..empty.clone() };
        let value = pb::RecordLoss { loss: 0.25, values: vec![0.1], ..empty.clone() };
        let values = pb::RecordLoss { loss: 0.25, values: vec![0.5, -1.0], ..empty.clone() };
        let preview = pb::Preview { png: vec![1].into(), text: "a \"b\"".to_owned() };
        let text = pb::RecordLoss { preview: Some(preview), ..empty.clone() };
        let found = [class, value, values, empty, text].map(|found| of("", found));
        let found = [&found[..1], &[of("dev", many)], &found[1..]].concat();
        let start = r#""record":7,"file":"v.csv","row":3"#;
        let expected = [
            format!(r#"{{{start},"loss":null,"label":4,"outputs":[0.1,null]}}"#),
            format!(r#"{{"set":"dev",{start},"loss":null,"label":[4,5],"outputs":[2.0],"places":[999]}}"#),
            format!(r#"{{{start},"loss":0.25,"label":0.1}}"#),
            format!(r#"{{{start},"loss":0.25,"label":[0.5,-1.0]}}"#),
            format!(r#"{{{start},"loss":null}}"#),
            format!(r#"{{{start},"loss":null,"text":"a \"b\""}}"#),
        ];
        assert_eq!(lines(&found).lines().collect::<Vec<_>>(), expected);
        let shown = WorstRecords::of(&pb::JobStatus { worst: found, ..Default::default() });
        let (lines, images): (Vec<_>, Vec<_>) = shown.records.into_iter().unzip();
        assert_eq!(lines, expected);
        assert_eq!(images, [None, None, None, None, None, Some(vec![1])]);
        assert!(shown.summary.windows(16).any(|window| window == b"validation/worst"));
    }
}
