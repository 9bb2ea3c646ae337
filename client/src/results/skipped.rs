//! `skipped.jsonl`: the bad records that a job left out, one in each line. Training records come
//! first, each set in the order of its files.

use proto::pb;
use serde::Serialize;

/// One line, in the order of its fields.
#[derive(Serialize)]
struct Line<'a> {
    set: &'a str,
    file: &'a str,
    /// Number of the record in the file, from 0.
    record: u64,
    /// Absent: the master keeps the reasons of the first records only.
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<&'a str>,
}

/// Returns the content of the file.
pub(super) fn lines(skipped: &pb::Skipped) -> String {
    let mut lines = String::new();
    for validation in [false, true] {
        let set = if validation { "validation" } else { "train" };
        let mut add = |file, record, reason| {
            let line = Line { set, file, record, reason };
            lines += &serde_json::to_string(&line).expect("plain fields");
            lines.push('\n');
        };
        for found in skipped.records.iter().filter(|found| found.validation == validation) {
            add(found.file.as_str(), found.record, Some(found.reason.as_str()));
        }
        for places in skipped.further.iter().filter(|places| places.validation == validation) {
            let mut record = 0u64;
            for distance in &places.distances {
                record = record.saturating_add(*distance);
                add(places.file.as_str(), record, None);
            }
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_record_is_a_line_and_the_first_ones_have_their_reasons() {
        let first = |validation, record| pb::SkippedRecord {
            validation,
            file: "a.csv".to_owned(),
            record,
            reason: "column `x`".to_owned(),
        };
        let distances = vec![5, 2, 1];
        let further = vec![pb::SkippedInFile { validation: false, file: "b.csv".to_owned(), distances }];
        let records = vec![first(false, 3), first(true, 0)];
        let expected = r#"{"set":"train","file":"a.csv","record":3,"reason":"column `x`"}
{"set":"train","file":"b.csv","record":5}
{"set":"train","file":"b.csv","record":7}
{"set":"train","file":"b.csv","record":8}
{"set":"validation","file":"a.csv","record":0,"reason":"column `x`"}
"#;
        assert_eq!(lines(&pb::Skipped { train: 4, validation: 1, records, further }), expected);
        assert_eq!(lines(&pb::Skipped::default()), "");
    }
}
