//! What holds for every optimizer, checked on all of them.

use proptest::collection::vec;
use proptest::prelude::*;
use proto::ids::ChunkId;
use proto::optimizer::{OptimizerKind, OptimizerSpec};
use proto::placement::Layout;
use proto::tensor::TensorSpec;

use super::{Norms, Optimizer, Update};
use crate::cpu::dispatch::{Path, Write};
use crate::norm::Squares;
use crate::{Slot, cpu};

const TOTAL_STEPS: u64 = 50;

/// Returns each kind as it comes and with every setting moved off its default, and each variant of
/// a kind that has a kernel.
pub(crate) fn optimizers() -> Vec<Optimizer> {
    let plain = OptimizerKind::ALL.map(|kind| OptimizerSpec::new(kind, 0.03));
    let tuned = plain.clone().map(|mut spec| {
        let has = |name| spec.kind.settings().contains(&name);
        spec.momentum = has("momentum").then_some(0.7);
        spec.dampening = has("dampening").then_some(0.2);
        spec.weight_decay = has("weight_decay").then_some(0.05);
        spec.betas = has("betas").then_some([0.4, 0.95]);
        spec.eps = has("eps").then_some(1e-5);
        spec.eps_root = has("eps_root").then_some(1e-4);
        spec.eps_before_correction = has("eps_before_correction").then_some(true);
        spec.lr_decay = has("lr_decay").then_some(0.1);
        spec.initial_accumulator_value = has("initial_accumulator_value").then_some(0.3);
        spec.alpha = has("alpha").then_some(0.4);
        spec.centered = has("centered").then_some(true);
        spec.rho = has("rho").then_some(0.7);
        spec.beta = has("beta").then_some(0.3);
        spec.l1 = has("l1").then_some(0.2);
        spec.clip_norm = has("clip_norm").then_some(1.0);
        spec.l2 = has("l2").then_some(0.05);
        spec.schedule.warmup_steps = 5;
        spec
    });
    let mut variants = [true, false].map(|centered| OptimizerSpec {
        centered: Some(centered),
        ..OptimizerSpec::new(OptimizerKind::Rmsprop, 0.01)
    });
    variants[1].momentum = Some(0.9);
    let specs = plain.iter().chain(&tuned).chain(&variants);
    specs.map(|spec| Optimizer::new(spec, TOTAL_STEPS).expect("valid")).collect()
}

/// One step's operands for one slice.
#[derive(Clone, Debug)]
struct Operands {
    weights: Vec<f32>,
    gradient: Vec<f32>,
    slots: Vec<Vec<f32>>,
}

impl Operands {
    /// Returns the next weights and the next slots, as bits.
    fn update(&self, optimizer: &Optimizer, step: u64, scale: f32) -> Vec<Vec<u32>> {
        self.apply(optimizer, optimizer.prepare(step, scale))
    }

    fn apply(&self, optimizer: &Optimizer, update: Update) -> Vec<Vec<u32>> {
        let mut slots = self.slots[..optimizer.slots()].to_vec();
        let mut next = vec![f32::NAN; self.weights.len()];
        let update = Update { norms: Norms::Complete, ..update };
        cpu::apply(&update, &self.weights, &self.gradient, &mut slots, &mut next);
        [vec![next], slots].concat().iter().map(|values| bits(values)).collect()
    }

    fn part(&self, range: std::ops::Range<usize>) -> Self {
        Self {
            weights: self.weights[range.clone()].to_vec(),
            gradient: self.gradient[range.clone()].to_vec(),
            slots: self.slots.iter().map(|slot| slot[range.clone()].to_vec()).collect(),
        }
    }
}

/// All NaNs are one: which of two operands' bits it has is not defined.
pub(crate) fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| if value.is_nan() { f32::NAN } else { *value }.to_bits()).collect()
}

/// Returns every way but the scalar one that this machine has, writing into the caches and past
/// them.
fn ways() -> Vec<(Path, Write)> {
    let paths = Path::available().into_iter();
    paths.flat_map(|path| [Write::Cached, Write::Streamed].map(|write| (path, write))).collect()
}

/// Lengths around the widths of SIMD vectors; the slots are never negative, which suits squares and
/// velocities alike.
fn operands() -> impl Strategy<Value = Operands> {
    let any =
        || prop_oneof![4 => -10.0_f32..10.0, 1 => Just(0.0), 1 => -1e-20_f32..1e-20, 1 => -1e15_f32..1e15];
    (0..70_usize).prop_flat_map(move |length| {
        (vec(any(), length), vec(any(), length), vec(vec(0.0_f32..10.0, length), 3))
            .prop_map(|(weights, gradient, slots)| Operands { weights, gradient, slots })
    })
}

/// Values of every magnitude, and what is special about floats.
fn odd(index: usize) -> f32 {
    let special = [
        0.0,
        -0.0,
        f32::MIN_POSITIVE,
        -1e-40,
        1.0,
        -1.0,
        f32::MAX,
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::NAN,
    ];
    match index.wrapping_mul(2_654_435_761) >> 3 {
        hash if hash % 5 == 0 => special[hash / 5 % special.len()],
        hash => ((hash >> 4) as f32 % 2000.0 - 1000.0) * 10f32.powi((hash % 41) as i32 - 20),
    }
}

#[test]
fn every_path_gives_the_bits_of_its_scalar_twin_at_every_width() {
    for width in 1..=33_usize {
        for round in 0..8 {
            let values = |salt: usize| {
                (0..width).map(move |at| odd(at + 64 * round + 1000 * salt)).collect::<Vec<_>>()
            };
            let slots: Vec<Vec<f32>> =
                (0..3).map(|slot| values(2 + slot).iter().map(|value| value.abs()).collect()).collect();
            let operands = Operands { weights: values(0), gradient: values(1), slots };
            for optimizer in optimizers() {
                let prepared = optimizer.prepare(round as u64 % 2 * 7, 0.25);
                let scalar = Update { path: Path::SCALAR, write: Write::Cached, ..prepared };
                let expected = operands.apply(&optimizer, scalar);
                for (path, write) in ways() {
                    let found = operands.apply(&optimizer, Update { path, write, ..prepared });
                    assert_eq!(found, expected, "{path:?}, {write:?}, width {width}, {optimizer:?}");
                }
            }
        }
    }
}

#[test]
fn the_address_of_gradient_and_next_weights_does_not_reach_the_bits() {
    let values = |salt: usize| (0..67).map(|at| odd(at * 10 + 1 + salt)).collect::<Vec<_>>();
    let operands = Operands { weights: values(0), gradient: values(1), slots: vec![vec![0.5; 67]; 3] };
    for optimizer in optimizers() {
        let expected = operands.update(&optimizer, 3, 0.5);
        for shift in 0..20 {
            let mut raw = vec![0_u8; shift];
            raw.extend(operands.gradient.iter().flat_map(|value| value.to_le_bytes()));
            for (path, write) in ways() {
                let mut slots = operands.slots[..optimizer.slots()].to_vec();
                let mut next = vec![f32::NAN; shift + 67];
                let update = Update { path, write, norms: Norms::Complete, ..optimizer.prepare(3, 0.5) };
                let in_place = slots.iter_mut().map(|slot| Slot::InPlace(slot.as_mut_slice())).collect();
                cpu::apply_bytes(&update, &operands.weights, &raw[shift..], in_place, &mut next[shift..]);
                let found: Vec<_> =
                    [vec![next[shift..].to_vec()], slots].concat().iter().map(|v| bits(v)).collect();
                assert_eq!(found, expected, "{path:?}, {write:?}, {shift} off, {optimizer:?}");
                assert!(next[..shift].iter().all(|value| value.is_nan()), "wrote before the slice");
            }
        }
    }
}

#[test]
fn slots_that_move_have_the_bits_of_those_that_stay_and_stay_as_they_were() {
    let values = |salt: usize| (0..67).map(|at| odd(at * 10 + 1 + salt)).collect::<Vec<_>>();
    let operands = Operands { weights: values(0), gradient: values(1), slots: vec![vec![0.5; 67]; 3] };
    for optimizer in optimizers() {
        let expected = operands.update(&optimizer, 3, 0.5);
        // Slots at the alignment of the next weights, so that they are streamed too, and at others.
        for (shift, next_shift) in (0..20).flat_map(|shift| [(shift, shift), (shift, 3)]) {
            for ((path, write), stays) in ways().into_iter().flat_map(|way| [(way, 9), (way, 0)]) {
                let held = operands.slots[..optimizer.slots()].to_vec();
                // Slot number `stays` changes in place.
                let mut here = held.clone();
                let mut there = vec![vec![f32::NAN; shift + 67]; held.len()];
                let slots = here.iter_mut().zip(&mut there).enumerate().map(|(number, (from, to))| {
                    if number == stays {
                        Slot::InPlace(from.as_mut_slice())
                    } else {
                        Slot::Moved { from: from.as_slice(), to: &mut to[shift..] }
                    }
                });
                let slots = slots.collect();
                let mut next = vec![f32::NAN; next_shift + 67];
                let update = Update { path, write, norms: Norms::Complete, ..optimizer.prepare(3, 0.5) };
                let gradient = bytemuck::cast_slice(&operands.gradient);
                cpu::apply_bytes(&update, &operands.weights, gradient, slots, &mut next[next_shift..]);
                let after =
                    here.iter().zip(&there).enumerate().map(|(number, (here, there))| {
                        if number == stays { &here[..] } else { &there[shift..] }
                    });
                let found: Vec<_> = std::iter::once(&next[next_shift..]).chain(after).map(bits).collect();
                assert_eq!(found, expected, "{path:?}, {write:?}, {shift} off, {optimizer:?}");
                for (number, (here, held)) in here.iter().zip(&held).enumerate() {
                    assert!(number == stays || here == held, "what is held does not change");
                }
                assert!(there.iter().all(|to| to[..shift].iter().all(|value| value.is_nan())));
            }
        }
    }
}

#[test]
fn the_widest_path_of_this_machine_is_taken() {
    let taken =
        Optimizer::new(&OptimizerSpec::new(OptimizerKind::Sgd, 0.1), 1).expect("valid").prepare(0, 1.0).path;
    assert_eq!(Some(&taken), Path::available().last());
    println!("kernels run with {taken:?} of {:?}", Path::available());
}

proptest! {
    #[test]
    fn two_parts_updated_apart_equal_the_whole(
        operands in operands(), cut in 0.0..=1.0_f64, step in 0..TOTAL_STEPS, scale in 0.001_f32..=1.0,
    ) {
        let cut = (operands.weights.len() as f64 * cut) as usize;
        for optimizer in optimizers() {
            let whole = operands.update(&optimizer, step, scale);
            let left = operands.part(0..cut).update(&optimizer, step, scale);
            let right = operands.part(cut..operands.weights.len()).update(&optimizer, step, scale);
            let joined: Vec<_> = left.into_iter().zip(right).map(|(left, right)| [left, right].concat()).collect();
            prop_assert_eq!(&joined, &whole, "{:?}", optimizer);
        }
    }

    #[test]
    fn the_fused_scale_equals_a_gradient_scaled_before(
        operands in operands(), step in 0..TOTAL_STEPS, scale in 0.001_f32..=1.0,
    ) {
        let mut scaled = operands.clone();
        scaled.gradient.iter_mut().for_each(|gradient| *gradient *= scale);
        for optimizer in optimizers() {
            let fused = operands.update(&optimizer, step, scale);
            prop_assert_eq!(fused, scaled.update(&optimizer, step, 1.0), "{:?}", optimizer);
        }
    }

    #[test]
    fn weights_gradient_and_what_next_held_are_not_used_as_scratch(
        operands in operands(), step in 0..TOTAL_STEPS, garbage in any::<f32>(),
    ) {
        for optimizer in optimizers() {
            let (weights, gradient) = (operands.weights.clone(), operands.gradient.clone());
            let mut slots = operands.slots[..optimizer.slots()].to_vec();
            let mut next = vec![garbage; weights.len()];
            let update = Update { norms: Norms::Complete, ..optimizer.prepare(step, 0.5) };
            cpu::apply(&update, &weights, &gradient, &mut slots, &mut next);
            prop_assert_eq!(bits(&weights), bits(&operands.weights));
            prop_assert_eq!(bits(&gradient), bits(&operands.gradient));
            prop_assert_eq!(bits(&next), &operands.update(&optimizer, step, 0.5)[0][..]);
        }
    }
}

#[test]
fn every_slot_has_a_name_and_an_initial_value() {
    for optimizer in optimizers() {
        assert_eq!(optimizer.slot_names().len(), optimizer.slots());
        for slot in 0..optimizer.slots() {
            assert!(optimizer.slot_initial(slot) >= 0.0);
        }
    }
    let mut spec = OptimizerSpec::new(OptimizerKind::Adagrad, 0.1);
    spec.initial_accumulator_value = Some(0.25);
    assert_eq!(Optimizer::new(&spec, 1).expect("valid").slot_initial(0), 0.25);
}

#[test]
fn the_learning_rate_follows_the_schedule() {
    let mut spec = OptimizerSpec::new(OptimizerKind::Sgd, 0.8);
    spec.schedule.warmup_steps = 3;
    let optimizer = Optimizer::new(&spec, 10).expect("valid");
    assert_eq!([0, 1, 2, 3, 9].map(|step| optimizer.learning_rate(step)), [0.2, 0.4, 0.8 * 0.75, 0.8, 0.8]);
    let mut next = [0.0];
    cpu::apply::<Vec<f32>>(&optimizer.prepare(1, 1.0), &[1.0], &[1.0], &mut [], &mut next);
    assert_eq!(next, [1.0 - 0.4]);
}

#[test]
fn slots_may_be_borrowed_slices_of_a_row() {
    let optimizer = Optimizer::new(&OptimizerSpec::new(OptimizerKind::Adam, 0.1), 1).expect("valid");
    let mut row = [0.0_f32; 6]; // [ value(2) | m(2) | v(2) ]
    let (value, slots) = row.split_at_mut(2);
    let (mean, square) = slots.split_at_mut(2);
    let mut next = [0.0; 2];
    cpu::apply(&optimizer.prepare(0, 1.0), value, &[1.0, -1.0], &mut [mean, square], &mut next);
    assert!((next[0] + 0.1).abs() < 1e-6 && (next[1] - 0.1).abs() < 1e-6, "{next:?}");
    assert!(row[2] > 0.0 && row[4] > 0.0, "{row:?}");
}

#[test]
#[should_panic(expected = "slot 1 has 2 values, the weights have 3")]
fn a_slot_of_another_length_is_a_broken_invariant() {
    let optimizer = Optimizer::new(&OptimizerSpec::new(OptimizerKind::Adam, 0.1), 1).expect("valid");
    cpu::apply(
        &optimizer.prepare(0, 1.0),
        &[0.0; 3],
        &[0.0; 3],
        &mut [vec![0.0; 3], vec![0.0; 2]],
        &mut [0.0; 3],
    );
}

#[test]
#[should_panic(expected = "the gradient has 4 values, the weights have 3")]
fn a_gradient_of_another_length_is_a_broken_invariant() {
    let optimizer = Optimizer::new(&OptimizerSpec::new(OptimizerKind::Sgd, 0.1), 1).expect("valid");
    cpu::apply::<Vec<f32>>(&optimizer.prepare(0, 1.0), &[0.0; 3], &[0.0; 4], &mut [], &mut [0.0; 3]);
}

#[test]
#[should_panic(expected = "1 slots given")]
fn a_missing_slot_is_a_broken_invariant() {
    let optimizer = Optimizer::new(&OptimizerSpec::new(OptimizerKind::Adam, 0.1), 1).expect("valid");
    cpu::apply(&optimizer.prepare(0, 1.0), &[0.0; 3], &[0.0; 3], &mut [vec![0.0; 3]], &mut [0.0; 3]);
}

/// Returns the bits of what one chunk contributes to the norms, measured by each path.
fn measured(update: Update, operands: &Operands, shift: usize) -> Vec<[u64; 2]> {
    let mut raw = vec![0_u8; shift];
    raw.extend(operands.gradient.iter().flat_map(|value| value.to_le_bytes()));
    let slots: Vec<&[f32]> = operands.slots.iter().take(2).map(Vec::as_slice).collect();
    let measure = |path| {
        let Squares(squares) =
            cpu::measure(&Update { path, ..update }, &operands.weights, &raw[shift..], &slots);
        squares.map(f64::to_bits)
    };
    Path::available().into_iter().map(measure).collect()
}

proptest! {
    #[test]
    fn squares_have_the_same_bits_on_every_path_and_at_every_address(
        operands in operands(), repeat in 1..40_usize, shift in 0..5_usize, step in 0..TOTAL_STEPS,
    ) {
        let long = Operands {
            weights: operands.weights.repeat(repeat),
            gradient: operands.gradient.repeat(repeat),
            slots: operands.slots.iter().map(|slot| slot.repeat(repeat)).collect(),
        };
        for optimizer in optimizers().into_iter().filter(|optimizer| optimizer.prepare(0, 1.0).needs_norms()) {
            let update = optimizer.prepare(step, 0.25);
            let expected = measured(update, &long, 0)[0];
            prop_assert!(measured(update, &long, shift).iter().all(|found| *found == expected), "{:?}", optimizer);
        }
    }
}

#[test]
fn a_clipped_step_is_as_long_as_it_may_be_and_a_shorter_one_is_not_touched() {
    let layout = Layout::new(vec![TensorSpec::parameter("w", [2])], 1).expect("a model");
    let step = |clip_norm, gradient: [f32; 2]| {
        let spec =
            OptimizerSpec { clip_norm: Some(clip_norm), ..OptimizerSpec::new(OptimizerKind::Sgd, 1.0) };
        let update = Optimizer::new(&spec, 1).expect("valid").prepare(0, 1.0);
        let squares = [(ChunkId(0), cpu::measure(&update, &[0.0; 2], bytemuck::cast_slice(&gradient), &[]))];
        let mut next = [0.0; 2];
        cpu::apply::<Vec<f32>>(
            &update.with_norms(&layout, &squares, &[ChunkId(0)])[0],
            &[0.0; 2],
            &gradient,
            &mut [],
            &mut next,
        );
        next
    };
    let [x, y] = step(0.5, [3.0, -4.0]);
    assert!((x + 0.3).abs() < 1e-6 && (y - 0.4).abs() < 1e-6, "{x} {y}");
    assert_eq!(step(6.0, [3.0, -4.0]), [-3.0, 4.0]);
    assert!(step(0.5, [f32::NAN, 1.0]).iter().all(|value| value.is_nan()), "seen in the weights");
}

#[test]
#[should_panic(expected = "squares of other chunks")]
fn a_norm_that_lacks_a_chunk_is_a_broken_invariant() {
    let layout = Layout::new(vec![TensorSpec::parameter("w", [2])], 1).expect("a model");
    let optimizer = Optimizer::new(&OptimizerSpec::new(OptimizerKind::Lamb, 0.1), 1).expect("valid");
    let _ = optimizer.prepare(0, 1.0).with_norms(&layout, &[], &[ChunkId(0)]);
}

#[test]
#[should_panic(expected = "without the norms that it needs")]
fn an_update_without_its_norms_is_a_broken_invariant() {
    let optimizer = Optimizer::new(&OptimizerSpec::new(OptimizerKind::Lamb, 0.1), 1).expect("valid");
    cpu::apply(
        &optimizer.prepare(0, 1.0),
        &[0.0; 3],
        &[0.0; 3],
        &mut [vec![0.0; 3], vec![0.0; 3]],
        &mut [0.0; 3],
    );
}
