//! `skipped.jsonl`: the bad records that a job left out, one in each line. Training records come
//! first, each set in the order of its files. If the list lacks records of a set, the last line of
//! the set says how many.

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

/// Last line of a set of which the list does not have all records.
#[derive(Serialize)]
struct Missing<'a> {
    set: &'a str,
    /// Number of skipped records that have no line.
    missing: u64,
}

/// Returns the content of the file.
pub(super) fn lines(skipped: &pb::Skipped) -> String {
    fn push(lines: &mut String, line: &impl Serialize) {
        *lines += &serde_json::to_string(line).expect("plain fields");
        lines.push('\n');
    }
    let mut lines = String::new();
    for (validation, set, count) in
        [(false, "train", skipped.train), (true, "validation", skipped.validation)]
    {
        let mut listed = 0u64;
        let mut add = |file, record, reason| {
            push(&mut lines, &Line { set, file, record, reason });
            listed += 1;
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
        let missing = count.saturating_sub(listed);
        if missing > 0 {
            push(&mut lines, &Missing { set, missing });
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

    #[test]
    fn the_last_line_of_a_set_says_how_many_records_are_missing() {
        let in_file = |validation, distances| {
            let file = "a.csv".to_owned();
            pb::SkippedInFile { validation, file, distances }
        };
        let further = vec![in_file(false, vec![7, 1]), in_file(true, vec![2])];
        let skipped = pb::Skipped { train: 900, validation: 1, records: Vec::new(), further };
        let train = r#"{"set":"train","file":"a.csv","record":7}
{"set":"train","file":"a.csv","record":8}
{"set":"train","missing":898}
"#;
        let validation = r#"{"set":"validation","file":"a.csv","record":2}
"#;
        assert_eq!(lines(&skipped), format!("{train}{validation}"));
        let none = pb::Skipped { train: 0, validation: 3, ..pb::Skipped::default() };
        assert_eq!(lines(&none), "{\"set\":\"validation\",\"missing\":3}\n");
    }
}
