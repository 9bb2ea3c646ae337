//! Metrics against scikit-learn and PyTorch, and merged in any way.

use proptest::prelude::*;

use super::*;
use crate::error::Error;

fn mean(sum: f64, count: u64) -> Tally {
    Tally::Mean { sum, count }
}

fn scores(of: &[(f32, bool)]) -> Tally {
    Scores::count(of.iter().copied()).map_or(Tally::Undefined, Tally::Scores)
}

fn counts(right: u64, predicted: u64, labelled: u64) -> ClassCounts {
    ClassCounts { right, predicted, labelled }
}

fn matrix(classes: usize, cells: &[(usize, usize, u64)]) -> Confusion {
    let mut matrix = Confusion::new(classes).unwrap();
    for &(class, predicted, labels) in cells {
        assert!(matrix.add(class, predicted, labels));
    }
    matrix
}

#[test]
fn names_are_read_as_they_are_written() {
    for metric in Metric::ALL.into_iter().chain([Metric::TopK(1), Metric::TopK(1000)]) {
        assert_eq!(metric.name().parse(), Ok(metric));
        let json = serde_json::to_string(&metric).unwrap();
        assert_eq!(json, format!("\"{metric}\""));
        assert_eq!(serde_json::from_str::<Metric>(&json).unwrap(), metric);
    }
}

#[test]
fn a_wrong_k_and_an_unknown_name_are_named() {
    for name in ["top", "top0", "top1001", "top05", "top+5", "top_k", "topk", "top99999999"] {
        let message = name.parse::<Metric>().unwrap_err();
        assert!(message.contains("from 1 to 1000, such as `top5`"), "{message}");
    }
    let message = "acuracy".parse::<Metric>().unwrap_err();
    assert!(message.starts_with("unknown variant `acuracy`, expected one of `accuracy`"), "{message}");
}

#[test]
fn a_metric_that_misfits_a_loss_names_one_that_fits() {
    for loss in [Loss::CrossEntropy, Loss::Nll, Loss::Mse, Loss::BceWithLogits, Loss::Module] {
        for (metric, (_, better)) in
            Metric::ALL.into_iter().filter_map(|metric| Some((metric, metric.misfit(loss)?)))
        {
            assert_eq!(better.misfit(loss), None, "{metric} with {loss:?}: {better} does not fit either");
        }
    }
    assert_eq!(Metric::Auc.misfit(Loss::CrossEntropy).unwrap().1, Metric::F1);
    assert_eq!(Metric::ConfusionMatrix.misfit(Loss::BceWithLogits).unwrap().1, Metric::F1);
}

#[test]
fn values_of_small_tallies() {
    let value = |metric: Metric, tally: Tally| metric.value(&tally).unwrap();
    assert_eq!(value(Metric::Accuracy, mean(3.0, 4)), 0.75);
    assert_eq!(value(Metric::Rmse, mean(9.0, 4)), 1.5);
    assert_eq!(value(Metric::Perplexity, mean(0.0, 4)), 1.0);
    // Precision 3/4 and recall 3/5.
    let positive = Tally::Classes(vec![counts(3, 4, 5)]);
    assert_eq!(value(Metric::F1, positive), 2.0 / 3.0);
    assert_eq!(value(Metric::F1, Tally::Classes(vec![counts(0, 0, 0)])), 0.0);
    // The last class does not occur and does not count.
    let classes = vec![counts(1, 1, 1), counts(0, 2, 1), counts(1, 1, 2), counts(0, 0, 0)];
    assert_eq!(value(Metric::F1, Tally::Classes(classes)), (1.0 + 0.0 + 2.0 / 3.0) / 3.0);
    let curve = [(0.1, false), (0.4, false), (0.35, true), (0.8, true)];
    assert_eq!(value(Metric::Auc, scores(&curve)), 0.75);
    let tie = [(0.5, false), (0.5, true)];
    assert_eq!(value(Metric::Auc, scores(&tie)), 0.5);
    assert_eq!(value(Metric::Auc, scores(&[(-0.0, false), (0.0, true)])), 0.5);
    assert_eq!(Metric::ConfusionMatrix.value(&Tally::Confusion(matrix(2, &[]))), None);
}

#[test]
fn a_value_that_does_not_exist_is_not_a_number() {
    for (metric, tally) in [
        (Metric::Accuracy, mean(0.0, 0)),
        (Metric::LogLoss, mean(f64::NAN, 3)),
        (Metric::Perplexity, mean(f64::NAN, 3)),
        (Metric::F1, Tally::Undefined),
        (Metric::F1, Tally::Classes(vec![counts(0, 0, 0); 3])),
        (Metric::Auc, Tally::Undefined),
        (Metric::Auc, scores(&[])),
        (Metric::Auc, scores(&[(1.0, true), (2.0, true)])),
        (Metric::Auc, scores(&[(1.0, true), (f32::NAN, false)])),
    ] {
        assert!(metric.value(&tally).unwrap().is_nan(), "{metric}: {tally:?}");
    }
}

#[test]
fn undefined_counts_stay_undefined() {
    for (metric, tally) in [
        (Metric::Auc, scores(&[(1.0, true)])),
        (Metric::F1, Tally::of_classes(3).unwrap()),
        (Metric::ConfusionMatrix, Tally::Confusion(matrix(3, &[]))),
    ] {
        for (mut one, other) in [(tally.clone(), Tally::Undefined), (Tally::Undefined, tally)] {
            one.merge(metric, other).unwrap();
            assert_eq!(one, Tally::Undefined);
        }
    }
}

#[test]
fn tallies_that_do_not_belong_together_are_refused() {
    let message = |metric: Metric, mut one: Tally, other: Tally| {
        let before = one.clone();
        let message = one.merge(metric, other).unwrap_err().to_string();
        assert_eq!(one, before);
        message
    };
    let found = message(Metric::F1, Tally::of_classes(3).unwrap(), Tally::of_classes(4).unwrap());
    assert!(found.contains("expected counts of 3 classes, found counts of 4 classes"), "{found}");
    let found = message(Metric::Accuracy, mean(1.0, 1), Tally::Undefined);
    assert!(found.contains("expected a mean, found undefined counts"), "{found}");
    assert!(message(Metric::Auc, scores(&[]), mean(1.0, 1)).contains("expected scores, found a mean"));
    let evaluation = Evaluation { tallies: [(Metric::F1, mean(1.0, 1))].into(), ..Evaluation::default() };
    assert!(evaluation.check(&[Metric::F1]).unwrap_err().to_string().contains("found a mean"));
    assert!(evaluation.check(&[Metric::Auc]).unwrap_err().to_string().contains("`auc`: expected a tally"));
    assert!(evaluation.check(&[]).is_ok());
}

#[test]
fn limits_are_named_with_what_to_do() {
    let message = Confusion::new(257).unwrap_err().to_string();
    assert!(message.contains("257 classes, expected at most 256; remove \"confusion_matrix\""), "{message}");
    assert!(Tally::of_classes(F1_CLASSES_MAX).is_ok() && Tally::of_classes(F1_CLASSES_MAX + 1).is_err());
}

/// Returns scores `[begin, end)`, each of one negative label.
fn range(begin: usize, end: usize) -> Scores {
    Scores::count((begin..end).map(|score| (score as f32, false))).unwrap()
}

#[test]
fn too_many_scores_are_refused_whatever_their_order() {
    let (half, whole) = (SCORES_MAX / 2, SCORES_MAX);
    let mut scores = range(0, half);
    scores.merge(range(half, whole)).unwrap();
    scores.merge(range(7, 9)).unwrap();
    assert!(scores.clone().finish().is_ok());
    for parts in [[range(0, whole), range(whole, whole + 1)], [range(0, 1), range(1, whole + 1)]] {
        let mut scores = Scores::default();
        let merged = parts.into_iter().try_for_each(|part| scores.merge(part)).and_then(|()| scores.finish());
        let error = merged.unwrap_err();
        assert!(matches!(error, Error::TooManyScores { max: SCORES_MAX }), "{error}");
        assert!(error.to_string().contains("use fewer validation records"), "{error}");
    }
}

#[test]
fn tables_from_outside_ascend_and_have_numbers() {
    let row = |score| ScoreCounts { score, positives: 1, negatives: 0 };
    let table = |scores: &[f32]| Scores::from_table(scores.iter().copied().map(row).collect());
    assert!(table(&[]).is_some() && table(&[f32::NEG_INFINITY, -0.0, 1.0, f32::INFINITY]).is_some());
    for wrong in [&[1.0, 1.0][..], &[2.0, 1.0], &[f32::NAN], &[-0.0, 0.0], &[0.0, f32::NAN]] {
        assert!(table(wrong).is_none(), "{wrong:?}");
    }
}

/// Counts pairs of a positive and a negative label, as in the definition.
fn auc_by_pairs(labelled: &[(f32, bool)]) -> f64 {
    let of = |positive: bool| labelled.iter().filter(move |one| one.1 == positive).map(|one| one.0);
    let pairs = of(true).flat_map(|positive| of(false).map(move |negative| (positive, negative)));
    let halves: u32 = pairs.clone().map(|(p, n)| if p > n { 2 } else { u32::from(p == n) }).sum();
    f64::from(halves) / (2.0 * pairs.count() as f64)
}

/// Returns an evaluation of records, each with a loss, a score, a label and a prediction.
fn evaluation(records: &[(f64, f32, bool, usize, usize)]) -> Evaluation {
    let sum: f64 = records.iter().map(|record| record.0).sum();
    let mut classes = vec![ClassCounts::default(); 3];
    let mut matrix = Confusion::new(3).unwrap();
    for &(_, _, _, class, predicted) in records {
        classes[predicted].predicted += 1;
        classes[class].labelled += 1;
        classes[class].right += u64::from(class == predicted);
        matrix.add(class, predicted, 1);
    }
    let labelled: Vec<_> = records.iter().map(|record| (record.1, record.2)).collect();
    let tallies = [
        (Metric::LogLoss, mean(sum, records.len() as u64)),
        (Metric::Auc, scores(&labelled)),
        (Metric::F1, Tally::Classes(classes)),
        (Metric::ConfusionMatrix, Tally::Confusion(matrix)),
    ];
    Evaluation {
        samples: records.len() as u64,
        loss_sum: sum,
        tallies: tallies.into(),
        ..Evaluation::default()
    }
}

fn bits(evaluation: &Evaluation) -> Vec<(String, u64)> {
    evaluation.values().into_iter().map(|(name, value)| (name, value.to_bits())).collect()
}

fn records() -> impl Strategy<Value = Vec<(f64, f32, bool, usize, usize)>> {
    let record = (-9.0f64..9.0, -6i8..6, any::<bool>(), 0usize..3, 0usize..3);
    let record = record.prop_map(|(loss, score, label, class, predicted)| {
        (loss, f32::from(score) / 4.0, label, class, predicted)
    });
    proptest::collection::vec(record, 1..60)
}

proptest! {
    #[test]
    fn the_area_is_the_share_of_ordered_pairs(records in records()) {
        let labelled: Vec<_> = records.iter().map(|record| (record.1, record.2)).collect();
        let (area, pairs) = (Metric::Auc.value(&scores(&labelled)).unwrap(), auc_by_pairs(&labelled));
        prop_assert!(area == pairs || area.is_nan() && pairs.is_nan(), "{area} and {pairs}");
    }

    /// Fixed data shards, any worker, any order of arrival: equal bits of every value.
    #[test]
    fn the_order_of_arrival_changes_no_bit(records in records(), size in 1usize..9, seed in any::<u64>()) {
        let shards: Vec<_> = records.chunks(size).map(evaluation).collect();
        let merged = |order: &[usize]| {
            let mut merger = Merger::new(shards.len());
            for &at in order {
                assert!(!merger.is_complete());
                merger.add(at, shards[at].clone()).unwrap();
                merger.add(at, shards[at].clone()).unwrap();
            }
            assert!(merger.is_complete());
            merger.finish().unwrap()
        };
        let order: Vec<_> = (0..shards.len()).collect();
        let mut other = order.clone();
        other.sort_by_key(|&at| (at as u64 + 1).wrapping_mul(seed | 1));
        let (one, other) = (merged(&order), merged(&other));
        prop_assert_eq!(bits(&one), bits(&other));
        prop_assert_eq!(one.confusion(), other.confusion());
    }

    /// What merges exactly does so with any cut into shards.
    #[test]
    fn no_cut_changes_a_count(records in records(), cuts in proptest::collection::vec(1usize..20, 1..20)) {
        let whole = evaluation(&records);
        let mut merged = Evaluation::default();
        let (mut rest, mut cuts) = (records.as_slice(), cuts.into_iter().cycle());
        while !rest.is_empty() {
            let (shard, later) = rest.split_at(cuts.next().unwrap().min(rest.len()));
            merged.merge(evaluation(shard)).unwrap();
            rest = later;
        }
        for metric in [Metric::Auc, Metric::F1, Metric::ConfusionMatrix] {
            prop_assert_eq!(&merged.tallies[&metric], &whole.tallies[&metric]);
        }
        prop_assert_eq!(merged.samples, whole.samples);
        let (one, other) = (merged.values()["log_loss"], whole.values()["log_loss"]);
        prop_assert!((one - other).abs() < 1e-12);
    }
}
