//! The optimizers and schedules give PyTorch 2.11's numbers: after 1, 2, 10 and 100 steps, weights
//! and slots.
//!
//! Two references from `tests/golden/optimizers.py`. One is PyTorch with every operation rounded as
//! IEEE 754 defines: ours have to be *equal* to it, which pins the order of operations. The other
//! is PyTorch as it comes, with fused multiply-adds and MKL's square root: there the relative error
//! is bounded by 1e-6.
//!
//! The bounded error is relative to `max(|torch|, floor)`. The floor is the largest magnitude of
//! the element so far, its initial value included. Rounding errors are proportional to the terms of
//! a sum, not to their difference: a weight that moves by 0.02 a step and passes through 3e-7
//! carries the rounding errors of 0.02. PyTorch's own kernels, portable and AVX-512, differ at this
//! weight by 1.3e-5 of its value.

use kernels::{Optimizer, Update, cpu};
use proto::ids::ChunkId;
use proto::optimizer::{OptimizerSpec, Schedule};
use proto::placement::Layout;
use proto::tensor::TensorSpec;
use serde_json::Value;

/// Gradients of the golden script: zero, with a subnormal square, near eps, ordinary and huge.
const MAGNITUDES: [f32; 11] = [1.0, 0.0, 1e-30, 1e-20, 1e-8, 1e-3, 0.1, 10.0, 1e3, 1e6, 1e15];
const ELEMENTS: usize = 33;
const STEPS: u64 = 100;

#[test]
fn every_optimizer_equals_torch_with_ieee_rounding() {
    for_each_value(include_str!("../../tests/golden/optimizers_ieee.json"), |place, ours, torch, _| {
        assert!(ours == torch, "{place}: {ours:e}, torch has {torch:e}");
    });
}

#[test]
fn every_optimizer_is_within_one_millionth_of_torch_as_it_comes() {
    let mut worst = 0.0_f64;
    for_each_value(include_str!("../../tests/golden/optimizers.json"), |place, ours, torch, floor| {
        let error = (ours - torch).abs() / torch.abs().max(floor);
        assert!(error <= 1e-6, "{place}: {ours:e}, torch has {torch:e}, relative error {error:e}");
        worst = worst.max(error);
    });
    println!("largest relative error {worst:e}");
    assert!(worst > 0.0, "PyTorch as it comes rounds differently somewhere; is this the other file?");
}

#[test]
fn every_schedule_equals_its_torch_scheduler() {
    let golden = read(include_str!("../../tests/golden/schedules.json"));
    let cases = golden["cases"].as_array().expect("cases");
    assert!(!cases.is_empty());
    for case in cases {
        let schedule: Schedule = serde_json::from_value(case["schedule"].clone()).expect("a schedule");
        let factors = numbers(&case["factors"]);
        assert!(factors.len() > 100);
        for (step, &torch) in factors.iter().enumerate() {
            let ours = schedule.factor(step as u64, 0);
            // PyTorch updates the rate of the step before, so that its rounding errors add up over
            // the steps.
            assert!((ours - torch).abs() <= 1e-13, "{} step {step}: {ours}, torch has {torch}", case["name"]);
        }
    }
}

/// Runs every case of a golden file; calls `compare(place, ours, torch, floor)` for each of its
/// values.
fn for_each_value(golden: &str, mut compare: impl FnMut(&str, f64, f64, f64)) {
    let golden = read(golden);
    let cases = golden["cases"].as_array().expect("cases");
    assert!(cases.len() >= 26, "{} cases", cases.len());
    for case in cases {
        let spec: OptimizerSpec = serde_json::from_value(case["spec"].clone()).expect("a specification");
        let optimizer = Optimizer::new(&spec, STEPS).expect("a valid specification");
        let scale = case["scale"].as_f64().expect("a scale") as f32;
        let ours = run(&optimizer, scale);
        for (number, array) in ["weights"].iter().chain(optimizer.slot_names()).enumerate() {
            let after = case["after"].as_object().expect("steps");
            assert_eq!(after.keys().collect::<Vec<_>>(), ["1", "2", "10", "100"]);
            for (step, torch) in after {
                let torch = singles(&torch[array]);
                assert_eq!(torch.len(), ELEMENTS);
                let step: usize = step.parse().expect("a step");
                for (index, torch) in torch.into_iter().enumerate() {
                    let history = ours[..=step].iter().map(|after| f64::from(after[number][index]));
                    let now = history.clone().next_back().expect("a step");
                    // Below the smallest normal f32 there is no relative precision.
                    let floor = history.map(f64::abs).fold(f64::from(f32::MIN_POSITIVE), f64::max);
                    compare(&format!("{}, step {step}, {array}[{index}]", case["name"]), now, torch, floor);
                }
            }
        }
    }
}

/// Returns the weights and then the slots of versions 0 to 100.
fn run(optimizer: &Optimizer, scale: f32) -> Vec<Vec<Vec<f32>>> {
    let mut random = Lcg(20);
    let magnitudes: Vec<f32> = (0..ELEMENTS).map(|index| MAGNITUDES[index % MAGNITUDES.len()]).collect();
    let starts_at = |index| if index % 7 == 3 { 0.0 } else { 1.0 };
    let mut weights: Vec<f32> = (0..ELEMENTS).map(|index| random.next() * starts_at(index)).collect();
    let mut slots: Vec<Vec<f32>> =
        (0..optimizer.slots()).map(|slot| vec![optimizer.slot_initial(slot); ELEMENTS]).collect();
    let mut versions = vec![[vec![weights.clone()], slots.clone()].concat()];
    for step in 0..STEPS {
        let gradient: Vec<f32> = magnitudes.iter().map(|magnitude| random.next() * magnitude).collect();
        let mut next = vec![f32::NAN; ELEMENTS];
        let update = with_norms(optimizer.prepare(step, scale), &weights, &gradient);
        cpu::apply(&update, &weights, &gradient, &mut slots, &mut next);
        weights = next;
        versions.push([vec![weights.clone()], slots.clone()].concat());
    }
    versions
}

/// Returns the update of a model of this one tensor.
fn with_norms(update: Update, weights: &[f32], gradient: &[f32]) -> Update {
    if !update.needs_norms() {
        return update;
    }
    let layout = Layout::new(vec![TensorSpec::parameter("w", [weights.len()])], 1).expect("a model");
    let squares = [(ChunkId(0), cpu::measure(&update, weights, bytemuck::cast_slice(gradient), &[]))];
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

fn read(golden: &str) -> Value {
    let golden: Value = serde_json::from_str(golden).expect("a golden file");
    assert!(golden["torch"].as_str().is_some_and(|version| version.starts_with("2.11.")));
    golden
}

/// The file has the shortest decimals that name an f32; this is that f32.
fn singles(array: &Value) -> Vec<f64> {
    numbers(array).into_iter().map(|number| f64::from(number as f32)).collect()
}

fn numbers(array: &Value) -> Vec<f64> {
    array.as_array().expect("an array").iter().map(|number| number.as_f64().expect("a number")).collect()
}
