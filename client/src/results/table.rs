//! The worst records as a table for people, in Markdown.

use proto::pb;

/// Numbers of a label, and outputs of the model, that a row shows.
const SHOWN: usize = 8;

/// Returns the image of a record as a PNG file.
pub(super) fn image(record: &pb::WorstRecord) -> Option<&[u8]> {
    let preview = record.found.as_ref()?.preview.as_ref()?;
    Some(&preview.png[..]).filter(|png| !png.is_empty())
}

/// Returns a row for each record. The column `image` counts the images of all rows, from 1, as
/// TensorBoard counts the samples of a tag.
pub(super) fn markdown(records: &[pb::WorstRecord]) -> String {
    let has_images = records.iter().any(|record| image(record).is_some());
    let has_texts = records.iter().any(|record| !text(record).is_empty());
    let mut rows = vec![vec!["record".to_owned(), "file".to_owned(), "row".to_owned()]];
    rows[0].extend(["loss", "label", "outputs"].map(str::to_owned));
    let mut images = 0;
    for record in records {
        let found = record.found.clone().unwrap_or_default();
        let (file, row) = (escaped(&record.file), record.row.to_string());
        let mut cells = vec![found.record.to_string(), file, row, found.loss.to_string()];
        cells.extend([label(&found), outputs(&found)]);
        if has_images {
            images += usize::from(image(record).is_some());
            cells.push(image(record).map_or_else(String::new, |_| images.to_string()));
        }
        if has_texts {
            cells.push(escaped(text(record)));
        }
        rows.push(cells);
    }
    rows[0].extend(has_images.then(|| "image".to_owned()));
    rows[0].extend(has_texts.then(|| "text".to_owned()));
    rows.insert(1, vec!["---".to_owned(); rows[0].len()]);
    rows.iter().map(|cells| cells.join(" | ") + "\n").collect()
}

fn text(record: &pb::WorstRecord) -> &str {
    let preview = record.found.as_ref().and_then(|found| found.preview.as_ref());
    preview.map_or("", |preview| &preview.text)
}

fn label(found: &pb::RecordLoss) -> String {
    match found.classes.is_empty() {
        true => some(&found.values),
        false => some(&found.classes),
    }
}

/// Returns the outputs, with their places if these are not all in order.
fn outputs(found: &pb::RecordLoss) -> String {
    if found.places.is_empty() {
        return some(&found.outputs);
    }
    let placed = found.places.iter().zip(&found.outputs);
    some(&placed.map(|(place, output)| format!("{place}: {output}")).collect::<Vec<_>>())
}

fn some<T: ToString>(list: &[T]) -> String {
    let shown = list.iter().take(SHOWN).map(ToString::to_string).collect::<Vec<_>>().join(", ");
    if list.len() > SHOWN { shown + ", .." } else { shown }
}

/// Returns a text that Markdown shows as it is, in one line.
fn escaped(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            // A backslash does not keep it from ending a cell.
            '|' => escaped.push_str("&#124;"),
            '\\' | '`' | '*' | '_' | '[' | ']' => escaped.extend(['\\', character]),
            _ if character.is_whitespace() => escaped.push(' '),
            _ => escaped.push(character),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(row: u64, found: pb::RecordLoss) -> pb::WorstRecord {
        let found = Some(pb::RecordLoss { record: 100 + row, loss: 1.5, ..found });
        pb::WorstRecord { file: "a_b.csv".to_owned(), row, found, ..Default::default() }
    }

    #[test]
    fn a_row_has_what_is_known_of_a_record() {
        let class = pb::RecordLoss { classes: vec![4], outputs: vec![0.5, -1.0], ..Default::default() };
        let placed = pb::RecordLoss { places: vec![7, 2], ..class.clone() };
        let long = pb::RecordLoss { values: vec![0.25; 9], ..Default::default() };
        let table = markdown(&[record(1, class), record(2, placed), record(3, long)]);
        let expected = [
            "record | file | row | loss | label | outputs",
            "--- | --- | --- | --- | --- | ---",
            "101 | a\\_b.csv | 1 | 1.5 | 4 | 0.5, -1",
            "102 | a\\_b.csv | 2 | 1.5 | 4 | 7: 0.5, 2: -1",
            "103 | a\\_b.csv | 3 | 1.5 | 0.25, 0.25, 0.25, 0.25, 0.25, 0.25, 0.25, 0.25, .. | ",
        ];
        assert_eq!(table.lines().collect::<Vec<_>>(), expected);
    }

    #[test]
    fn images_are_counted_and_texts_are_shown_as_they_are() {
        let of = |row, png: &[u8], text: &str| {
            let preview = Some(pb::Preview { png: png.to_vec().into(), text: text.to_owned() });
            record(row, pb::RecordLoss { preview, ..Default::default() })
        };
        let bare = record(2, pb::RecordLoss::default());
        let table = markdown(&[of(1, b"png", "<b>\n|"), bare, of(3, b"", ""), of(4, b"png", "*a*")]);
        let ends: Vec<_> = table.lines().map(|line| line.split(" | ").skip(6).collect::<Vec<_>>()).collect();
        let expected = [
            ["image", "text"],
            ["---", "---"],
            ["1", "&lt;b&gt; &#124;"],
            ["", ""],
            ["", ""],
            ["2", "\\*a\\*"],
        ];
        assert_eq!(ends, expected);
    }
}
