//! The optimizers that PyTorch does not have, or with epsilon in another place, give the numbers of
//! their papers: after 1, 2, 10 and 100 steps, weights and slots.
//!
//! The reference is `tests/golden/optimizers_papers.py`, twice: with every operation rounded to f32
//! in the order of the paper's formula, to which ours have to be *equal*, and in f64, from which
//! they may be off by what rounding is worth.

use kernels::{Optimizer, Update, cpu};
use proto::ids::ChunkId;
use proto::optimizer::OptimizerSpec;
use proto::placement::Layout;
use proto::tensor::TensorSpec;
use serde_json::Value;

const ELEMENTS: usize = 33;
const STEPS: u64 = 100;

#[test]
fn every_optimizer_equals_its_paper_rounded_to_single_precision() {
    for_each_value("single", |place, ours, paper, _| {
        assert!(ours == f64::from(paper as f32), "{place}: {ours:e}, the paper has {paper:e}");
    });
}

#[test]
fn every_optimizer_is_within_one_millionth_of_its_paper() {
    for_each_value("double", |place, ours, paper, floor| {
        let error = (ours - paper).abs() / paper.abs().max(floor);
        assert!(error <= 1e-6, "{place}: {ours:e}, the paper has {paper:e}, relative error {error:e}");
    });
}

/// Runs every case; calls `compare(place, ours, the paper's, floor)` for each of its values. The
/// floor is the largest magnitude that the array has had so far: roundings are proportional to the
/// terms of a sum, not to what is left of it, and the terms of one coordinate are about as large as
/// those of its neighbours.
fn for_each_value(precision: &str, mut compare: impl FnMut(&str, f64, f64, f64)) {
    let golden = include_str!("../../tests/golden/optimizers_papers.json");
    let golden: Value = serde_json::from_str(golden).expect("a golden file");
    let cases = golden["cases"].as_array().expect("cases");
    assert!(cases.len() >= 10, "{} cases", cases.len());
    for case in cases {
        let spec: OptimizerSpec = serde_json::from_value(case["spec"].clone()).expect("a specification");
        let optimizer = Optimizer::new(&spec, STEPS).expect("a valid specification");
        let ours = run(&optimizer, case["scale"].as_f64().expect("a scale") as f32);
        for (number, array) in ["weights"].iter().chain(optimizer.slot_names()).enumerate() {
            let after = case[precision].as_object().expect("steps");
            assert_eq!(after.keys().collect::<Vec<_>>(), ["1", "2", "10", "100"]);
            for (step, paper) in after {
                let paper = paper[array].as_array().expect("an array");
                assert_eq!(paper.len(), ELEMENTS);
                let step: usize = step.parse().expect("a step");
                let so_far = ours[..=step].iter().flat_map(|after| &after[number]);
                let floor = so_far.fold(0.0, |floor: f64, value| floor.max(f64::from(value.abs())));
                for (index, paper) in paper.iter().enumerate() {
                    let now = f64::from(ours[step][number][index]);
                    let place = format!("{}, step {step}, {array}[{index}]", case["name"]);
                    compare(&place, now, paper.as_f64().expect("a number"), floor);
                }
            }
        }
    }
}

/// Returns the weights and then the slots of versions 0 to 100.
fn run(optimizer: &Optimizer, scale: f32) -> Vec<Vec<Vec<f32>>> {
    let mut random = Lcg(20);
    let mut weights: Vec<f32> = (0..ELEMENTS).map(|_| random.next()).collect();
    let size = |index| {
        if index % 7 == 3 {
            0.0
        } else if index % 5 == 2 {
            1e-3
        } else {
            1.0
        }
    };
    let mut slots: Vec<Vec<f32>> =
        (0..optimizer.slots()).map(|slot| vec![optimizer.slot_initial(slot); ELEMENTS]).collect();
    let mut versions = vec![[vec![weights.clone()], slots.clone()].concat()];
    for step in 0..STEPS {
        let gradient: Vec<f32> = (0..ELEMENTS).map(|index| random.next() * size(index)).collect();
        let mut next = vec![f32::NAN; ELEMENTS];
        let update = with_norms(optimizer.prepare(step, scale), &weights, &gradient, &slots);
        cpu::apply(&update, &weights, &gradient, &mut slots, &mut next);
        weights = next;
        versions.push([vec![weights.clone()], slots.clone()].concat());
    }
    versions
}

/// Returns the update of a model of this one tensor.
fn with_norms(update: Update, weights: &[f32], gradient: &[f32], slots: &[Vec<f32>]) -> Update {
    if !update.needs_norms() {
        return update;
    }
    let layout = Layout::new(vec![TensorSpec::parameter("w", [weights.len()])], 1).expect("a model");
    let slots: Vec<&[f32]> = slots.iter().map(Vec::as_slice).collect();
    let squares = [(ChunkId(0), cpu::measure(&update, weights, bytemuck::cast_slice(gradient), &slots))];
    update.with_norms(&layout, &squares, &[ChunkId(0)]).remove(0)
}

/// Knuth's MMIX generator, as in the golden script: the top 24 bits as an f32 in [-1, 1).
struct Lcg(u64);

impl Lcg {
    fn next(&mut self) -> f32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 40) as f64 / f64::from(1 << 23) - 1.0) as f32
    }
}
