//! Measurements of records: what a worker counted, the confusion matrix of a job, and the worst
//! records.

use std::collections::BTreeMap;

use super::field;
use crate::error::{Error, Result};
use crate::metrics::{
    CONFUSION_CLASSES_MAX, ClassCounts, Confusion, Evaluation, F1_CLASSES_MAX, Metric, REPORT_SCORES_MAX,
    ScoreCounts, Scores, Sum, Sums, Tally, check_sums,
};
use crate::pb;
use crate::pb::tally::Kind;
use crate::worst::{Label, PREVIEW_BYTES_MAX, PREVIEW_CHARACTERS_MAX, Preview, RecordLoss, VALUES_MAX};

impl TryFrom<pb::Evaluated> for Evaluation {
    type Error = Error;

    fn try_from(found: pb::Evaluated) -> Result<Self> {
        let pb::Evaluated { loss_sum, samples, metric_sums, tallies, worst: _, sums } = found;
        let metric = |name: &str| {
            let unknown = |_| field("Evaluated", "tallies", "names of metrics", format!("`{name}`"));
            name.parse::<Metric>().map_err(unknown)
        };
        let mut evaluation = Self { samples, loss_sum, ..Self::default() };
        for (name, sum) in metric_sums {
            evaluation.tallies.insert(metric(&name)?, Tally::Mean { sum, count: samples });
        }
        for (name, tally) in tallies {
            evaluation.tallies.insert(metric(&name)?, tally.try_into()?);
        }
        evaluation.sums = sums.into_iter().map(|(name, sum)| (name, sum.into())).collect();
        check_sums(&evaluation.sums)?;
        Ok(evaluation)
    }
}

/// Encodes the measurements of a data shard.
///
/// # Errors
/// [`Error::ReportScores`]: the outputs have too many distinct values for a message.
/// [`Error::Field`]: sums are too many or too large.
pub fn evaluated(found: Evaluation) -> Result<pb::Evaluated> {
    let Evaluation { samples, loss_sum, tallies, sums } = found;
    check_sums(&sums)?;
    let encode = |(metric, tally): (Metric, Tally)| Ok((metric.name(), pb::Tally::try_from(tally)?));
    let tallies = tallies.into_iter().map(encode).collect::<Result<_>>()?;
    Ok(pb::Evaluated { loss_sum, samples, tallies, sums: metric_sums(sums), ..pb::Evaluated::default() })
}

/// Encodes sums of a program's own metrics.
pub fn metric_sums(sums: Sums) -> BTreeMap<String, pb::MetricSum> {
    let encode = |Sum { values, is_mean }| pb::MetricSum { values, mean: is_mean };
    sums.into_iter().map(|(name, sum)| (name, encode(sum))).collect()
}

impl From<pb::MetricSum> for Sum {
    fn from(pb::MetricSum { values, mean }: pb::MetricSum) -> Self {
        Self { values, is_mean: mean }
    }
}

impl TryFrom<Tally> for pb::Tally {
    type Error = Error;

    fn try_from(tally: Tally) -> Result<Self> {
        let kind = match tally {
            Tally::Mean { sum, count } => Kind::Mean(pb::MeanTally { sum, count }),
            Tally::Classes(classes) => Kind::Classes(pb::ClassesTally {
                right: classes.iter().map(|counts| counts.right).collect(),
                predicted: classes.iter().map(|counts| counts.predicted).collect(),
                labelled: classes.iter().map(|counts| counts.labelled).collect(),
            }),
            Tally::Confusion(matrix) => Kind::Confusion((&matrix).into()),
            Tally::Scores(scores) => {
                let table = scores.table();
                if table.len() > REPORT_SCORES_MAX {
                    return Err(Error::ReportScores { found: table.len(), max: REPORT_SCORES_MAX });
                }
                Kind::Scores(pb::ScoresTally {
                    scores: table.iter().map(|row| row.score).collect(),
                    positives: table.iter().map(|row| row.positives).collect(),
                    negatives: table.iter().map(|row| row.negatives).collect(),
                })
            }
            Tally::Undefined => Kind::Undefined(pb::UndefinedTally {}),
        };
        Ok(Self { kind: Some(kind) })
    }
}

impl TryFrom<pb::Tally> for Tally {
    type Error = Error;

    fn try_from(tally: pb::Tally) -> Result<Self> {
        Ok(match super::required("Tally", "kind", tally.kind)? {
            Kind::Mean(pb::MeanTally { sum, count }) => Self::Mean { sum, count },
            Kind::Classes(classes) => Self::Classes(counts(&classes)?),
            Kind::Confusion(matrix) => Self::Confusion(matrix.try_into()?),
            Kind::Scores(scores) => Self::Scores(table(&scores)?),
            Kind::Undefined(pb::UndefinedTally {}) => Self::Undefined,
        })
    }
}

/// Checks that three lists of `message` have one length, which is in range.
fn check_lengths(message: &'static str, lengths: [usize; 3], min: usize, max: usize) -> Result<()> {
    let [length, ..] = lengths;
    if lengths == [length; 3] && (min..=max).contains(&length) {
        return Ok(());
    }
    let expected = format!("three lists of one length, from {min} to {max}");
    Err(field(message, "lists", &expected, format!("{lengths:?}")))
}

fn counts(classes: &pb::ClassesTally) -> Result<Vec<ClassCounts>> {
    let pb::ClassesTally { right, predicted, labelled } = classes;
    check_lengths("ClassesTally", [right.len(), predicted.len(), labelled.len()], 1, F1_CLASSES_MAX)?;
    let lists = right.iter().zip(predicted).zip(labelled);
    let class = |((&right, &predicted), &labelled): ((&u64, &u64), &u64)| {
        if right > predicted.min(labelled) {
            let expected = format!("at most predicted = {predicted} and labelled = {labelled}");
            return Err(field("ClassesTally", "right", &expected, right));
        }
        Ok(ClassCounts { right, predicted, labelled })
    };
    lists.map(class).collect()
}

fn table(scores: &pb::ScoresTally) -> Result<Scores> {
    let pb::ScoresTally { scores, positives, negatives } = scores;
    check_lengths("ScoresTally", [scores.len(), positives.len(), negatives.len()], 0, REPORT_SCORES_MAX)?;
    let lists = scores.iter().zip(positives).zip(negatives);
    let row = |((&score, &positives), &negatives): ((&f32, &u64), &u64)| ScoreCounts {
        score,
        positives,
        negatives,
    };
    Scores::from_table(lists.map(row).collect())
        .ok_or_else(|| field("ScoresTally", "scores", "ascending numbers", "another order, or NaN"))
}

impl From<&Confusion> for pb::ConfusionMatrix {
    fn from(matrix: &Confusion) -> Self {
        let classes = matrix.classes();
        let at = |(class, predicted, _): (usize, usize, u64)| (class * classes + predicted) as u32;
        Self {
            classes: classes as u32,
            cells: matrix.cells().map(at).collect(),
            labels: matrix.cells().map(|(_, _, labels)| labels).collect(),
        }
    }
}

impl TryFrom<pb::ConfusionMatrix> for Confusion {
    type Error = Error;

    fn try_from(message: pb::ConfusionMatrix) -> Result<Self> {
        let pb::ConfusionMatrix { classes, cells, labels } = message;
        let wrong = |name, expected: &str, found: String| field("ConfusionMatrix", name, expected, found);
        let size = classes as usize;
        if !(1..=CONFUSION_CLASSES_MAX).contains(&size) {
            return Err(wrong("classes", &format!("1 to {CONFUSION_CLASSES_MAX}"), classes.to_string()));
        }
        if cells.len() != labels.len() {
            let expected = format!("{} numbers, as many as cells", cells.len());
            return Err(wrong("labels", &expected, labels.len().to_string()));
        }
        if !cells.is_sorted_by(|one, next| one < next) {
            return Err(wrong("cells", "ascending numbers", "another order".to_owned()));
        }
        let mut matrix = Self::new(size)?;
        for (cell, labels) in cells.into_iter().zip(labels) {
            let at = cell as usize;
            if !matrix.add(at / size, at % size, labels) {
                return Err(wrong("cells", &format!("below {}", size * size), cell.to_string()));
            }
        }
        Ok(matrix)
    }
}

impl From<RecordLoss> for pb::RecordLoss {
    fn from(found: RecordLoss) -> Self {
        let RecordLoss { record, loss, label, outputs, places, preview } = found;
        let (classes, values) = match label {
            Label::Classes(classes) => (classes, Vec::new()),
            Label::Values(values) => (Vec::new(), values),
            Label::Long => (Vec::new(), Vec::new()),
        };
        let preview = preview.map(|Preview { png, text }| pb::Preview { png, text });
        Self { record, loss, classes, values, outputs, places, preview }
    }
}

impl TryFrom<pb::Preview> for Preview {
    type Error = Error;

    fn try_from(message: pb::Preview) -> Result<Self> {
        let pb::Preview { png, text } = message;
        if png.len() > PREVIEW_BYTES_MAX {
            return Err(field("Preview", "png", &format!("at most {PREVIEW_BYTES_MAX} bytes"), png.len()));
        }
        let characters = text.chars().count();
        if characters > PREVIEW_CHARACTERS_MAX {
            let expected = format!("at most {PREVIEW_CHARACTERS_MAX} characters");
            return Err(field("Preview", "text", &expected, characters));
        }
        Ok(Self { png, text })
    }
}

impl TryFrom<pb::RecordLoss> for RecordLoss {
    type Error = Error;

    fn try_from(message: pb::RecordLoss) -> Result<Self> {
        let pb::RecordLoss { record, loss, classes, values, outputs, places, preview } = message;
        let lengths = [
            ("classes", classes.len()),
            ("values", values.len()),
            ("outputs", outputs.len()),
            ("places", places.len()),
        ];
        if let Some((name, found)) = lengths.into_iter().find(|(_, length)| *length > VALUES_MAX) {
            return Err(field("RecordLoss", name, &format!("at most {VALUES_MAX} numbers"), found));
        }
        if !classes.is_empty() && !values.is_empty() {
            return Err(field("RecordLoss", "values", "none beside classes", values.len()));
        }
        if !places.is_empty() && places.len() != outputs.len() {
            let expected = format!("{} numbers, as many as outputs", outputs.len());
            return Err(field("RecordLoss", "places", &expected, places.len()));
        }
        let label = match (classes.is_empty(), values.is_empty()) {
            (false, _) => Label::Classes(classes),
            (true, false) => Label::Values(values),
            (true, true) => Label::Long,
        };
        let preview = preview.map(Preview::try_from).transpose()?;
        Ok(Self { record, loss, label, outputs, places, preview })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use prost::Message as _;

    use super::*;
    use crate::worst::PREVIEWS_MAX;

    fn confusion(cells: &[(usize, usize, u64)]) -> Confusion {
        let mut matrix = Confusion::new(4).unwrap();
        for &(class, predicted, labels) in cells {
            matrix.add(class, predicted, labels);
        }
        matrix
    }

    fn tally() -> impl Strategy<Value = (Metric, Tally)> {
        let class = (0u64..9, 0u64..9, 0u64..9).prop_map(|(right, more, missed)| ClassCounts {
            right,
            predicted: right + more,
            labelled: right + missed,
        });
        prop_oneof![
            (-9.0f64..9.0, 0u64..9).prop_map(|(sum, count)| (Metric::Perplexity, Tally::Mean { sum, count })),
            proptest::collection::vec(class, 1..5).prop_map(|classes| (Metric::F1, Tally::Classes(classes))),
            proptest::collection::vec((0usize..4, 0usize..4, 0u64..99), 0..9)
                .prop_map(|cells| (Metric::ConfusionMatrix, Tally::Confusion(confusion(&cells)))),
            proptest::collection::vec((-9.0f32..9.0, any::<bool>()), 0..9)
                .prop_map(|scores| (Metric::Auc, Tally::Scores(Scores::count(scores).unwrap()))),
            Just((Metric::Auc, Tally::Undefined)),
            (1u16..=1000).prop_map(|k| (Metric::TopK(k), Tally::Mean { sum: 1.0, count: 2 })),
        ]
    }

    proptest! {
        #[test]
        fn measurements_survive_the_wire(samples in any::<u64>(), tallies in proptest::collection::vec(tally(), 0..9)) {
            let sum = Sum { values: vec![samples as f64, 0.5], is_mean: samples % 2 == 0 };
            let sums = [("mine".to_owned(), sum)].into();
            let found = Evaluation { samples, loss_sum: 0.25, tallies: tallies.into_iter().collect(), sums };
            let bytes = evaluated(found.clone()).unwrap().encode_to_vec();
            let read: Evaluation = pb::Evaluated::decode(&*bytes).unwrap().try_into().unwrap();
            prop_assert_eq!(read, found);
        }

        #[test]
        fn records_with_their_losses_survive_the_wire(
            (record, loss) in (any::<u64>(), -9.0f64..9.0),
            label in prop_oneof![
                proptest::collection::vec(any::<i64>(), 1..40).prop_map(Label::Classes),
                proptest::collection::vec(-9.0f32..9.0, 1..40).prop_map(Label::Values),
            ],
            outputs in proptest::collection::vec(-9.0f32..9.0, 0..99),
        ) {
            let found = RecordLoss::new(record, loss, label, &outputs);
            let bytes = pb::RecordLoss::from(found.clone()).encode_to_vec();
            let read: RecordLoss = pb::RecordLoss::decode(&*bytes).unwrap().try_into().unwrap();
            prop_assert_eq!(read, found);
        }

        #[test]
        fn any_bytes_are_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            if let Ok(message) = pb::Evaluated::decode(&*bytes) {
                let _ = Evaluation::try_from(message);
            }
            if let Ok(message) = pb::Tally::decode(&*bytes) {
                let _ = Tally::try_from(message);
            }
            if let Ok(message) = pb::RecordLoss::decode(&*bytes) {
                let _ = RecordLoss::try_from(message);
            }
        }
    }

    #[test]
    fn reports_from_before_tallies_are_means_over_the_records() {
        let metric_sums = [("accuracy".to_owned(), 3.0), ("mae".to_owned(), 1.0)].into();
        let old = pb::Evaluated { loss_sum: 2.0, samples: 4, metric_sums, ..Default::default() };
        let read = Evaluation::try_from(old).unwrap();
        assert_eq!(read.check(&[Metric::Accuracy, Metric::Mae]).ok(), Some(()));
        assert_eq!(
            (read.values()["accuracy"], read.values()["mae"], read.values()["loss"]),
            (0.75, 0.25, 0.5)
        );
    }

    #[test]
    fn the_largest_report_fits_into_a_message() {
        let scores = Scores::count((0..REPORT_SCORES_MAX).map(|at| (at as f32, at % 2 == 0))).unwrap();
        let mut classes = vec![ClassCounts { right: 300, predicted: 400, labelled: 500 }; F1_CLASSES_MAX];
        let mut found = Evaluation::default();
        found.tallies.insert(Metric::Auc, Tally::Scores(scores));
        found.tallies.insert(Metric::F1, Tally::Classes(std::mem::take(&mut classes)));
        let record = |record| {
            let outputs: Vec<f32> = (0..1000).map(|class| class as f32).collect();
            let found = RecordLoss::new(u64::MAX - record, 0.5, Label::Classes(vec![-1]), &outputs);
            let png = vec![0; PREVIEW_BYTES_MAX].into();
            let text = char::MAX.to_string().repeat(PREVIEW_CHARACTERS_MAX);
            let preview = (record < u64::from(PREVIEWS_MAX)).then_some(Preview { png, text });
            RecordLoss { preview, ..found }.into()
        };
        let mut report = evaluated(found).unwrap();
        report.worst = (0..u64::from(crate::spec::WORST_MAX)).map(record).collect();
        assert!(report.encoded_len() < 4 << 20, "{}", report.encoded_len());
        let many = Scores::count((0..=REPORT_SCORES_MAX).map(|at| (at as f32, true))).unwrap();
        let error = pb::Tally::try_from(Tally::Scores(many)).unwrap_err().to_string();
        assert!(error.contains("262145 distinct outputs") && error.contains("remove \"auc\""), "{error}");
    }

    #[test]
    fn malformed_records_with_losses_are_refused() {
        let said = |message: pb::RecordLoss| RecordLoss::try_from(message).unwrap_err().to_string();
        let whole = pb::RecordLoss { outputs: vec![0.5; 2], ..Default::default() };
        let long = pb::RecordLoss { outputs: vec![0.5; 33], ..whole.clone() };
        assert!(said(long).contains("RecordLoss.outputs: expected at most 32 numbers, found 33"));
        let both = pb::RecordLoss { classes: vec![1], values: vec![0.5], ..whole.clone() };
        assert!(said(both).contains("RecordLoss.values: expected none beside classes"));
        let lacking = pb::RecordLoss { places: vec![7], ..whole.clone() };
        assert!(said(lacking).contains("RecordLoss.places: expected 2 numbers, as many as outputs"));
        let shown = |preview| pb::RecordLoss { preview: Some(preview), ..whole.clone() };
        let large = pb::Preview { png: vec![0; PREVIEW_BYTES_MAX + 1].into(), ..Default::default() };
        assert!(said(shown(large)).contains("Preview.png: expected at most 16384 bytes, found 16385"));
        let long = pb::Preview { text: "é".repeat(1001), ..Default::default() };
        assert!(said(shown(long)).contains("Preview.text: expected at most 1000 characters, found 1001"));
        let most = pb::Preview { png: vec![7; PREVIEW_BYTES_MAX].into(), text: "é".repeat(1000) };
        let read = RecordLoss::try_from(shown(most.clone())).unwrap();
        assert_eq!(pb::RecordLoss::from(read).preview, Some(most));
    }

    #[test]
    fn malformed_tallies_are_refused() {
        let said = |kind: Option<Kind>| Tally::try_from(pb::Tally { kind }).unwrap_err().to_string();
        assert!(said(None).contains("Tally.kind: expected a value"));
        let classes = pb::ClassesTally { right: vec![1], predicted: vec![1], labelled: vec![1, 2] };
        assert!(said(Some(Kind::Classes(classes))).contains("three lists of one length"));
        let classes = pb::ClassesTally { right: vec![2], predicted: vec![1], labelled: vec![3] };
        assert!(
            said(Some(Kind::Classes(classes))).contains("at most predicted = 1 and labelled = 3, found 2")
        );
        let scores = pb::ScoresTally { scores: vec![1.0, 0.0], positives: vec![1; 2], negatives: vec![0; 2] };
        assert!(said(Some(Kind::Scores(scores))).contains("ascending numbers"));
        let matrix = |classes, cells: &[u32], labels: &[u64]| {
            let (cells, labels) = (cells.to_vec(), labels.to_vec());
            said(Some(Kind::Confusion(pb::ConfusionMatrix { classes, cells, labels })))
        };
        assert!(matrix(257, &[], &[]).contains("1 to 256, found 257"));
        assert!(matrix(0, &[], &[]).contains("1 to 256, found 0"));
        assert!(matrix(2, &[4], &[1]).contains("below 4, found 4"));
        assert!(matrix(2, &[1, 1], &[1, 1]).contains("ascending"));
        assert!(matrix(2, &[1], &[1, 1]).contains("1 numbers, as many as cells"));
        let tallies = [("acuracy".to_owned(), pb::Tally::default())].into();
        let error = Evaluation::try_from(pb::Evaluated { tallies, ..Default::default() }).unwrap_err();
        assert!(error.to_string().contains("names of metrics, found `acuracy`"), "{error}");
    }
}
