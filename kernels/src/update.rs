//! What an update does to storage: it measures a chunk, and makes the next weights of it.

use crate::cpu;
#[cfg(feature = "cuda")]
use crate::cuda::update;
use crate::norm::Squares;
use crate::optimizer::Update;
use crate::storage::{Operand, Slot, Storage};

impl Update {
    /// Returns what one chunk contributes to the norms. Nothing is changed; repeating it gives the
    /// same.
    ///
    /// # Panics
    /// If the number of slots or a length is wrong.
    pub fn measure<'a>(
        &self,
        weights: &Storage,
        gradient: Operand<'_>,
        slots: impl IntoIterator<Item = &'a Storage>,
    ) -> Squares {
        #[cfg(feature = "cuda")]
        if weights.on_any_device().is_some() {
            return update::measure(self, weights, gradient, slots);
        }
        let slots: Vec<_> = slots.into_iter().map(Storage::floats).collect();
        cpu::measure(self, weights.floats(), &gradient.host(), &slots)
    }

    /// Applies the step to one chunk, in one pass over memory.
    ///
    /// `gradient` is the sum over the step's samples. `weights`, `gradient`, each of `slots` and
    /// `next` have one length. What `next` holds before does not matter.
    ///
    /// # Panics
    ///
    /// If the number of slots or a length is wrong: the caller has checked what came over the
    /// network. If the update [needs norms](Update::needs_norms): one chunk does not know them.
    pub fn apply<'a>(
        &self,
        weights: &Storage,
        gradient: Operand<'_>,
        slots: impl IntoIterator<Item = Slot<'a>>,
        next: &mut Storage,
    ) {
        #[cfg(feature = "cuda")]
        if next.on_any_device().is_some() {
            return update::apply(self, weights, (gradient, None), slots, next);
        }
        let slots = slots.into_iter().map(Slot::host).collect();
        cpu::apply_bytes(self, weights.floats(), &gradient.host(), slots, next.floats_mut());
    }

    /// Applies the step to one chunk as [`apply`](Self::apply) does, with a gradient that is the
    /// sum of two. The sum is made on the way, and nowhere written to memory.
    ///
    /// # Panics
    ///
    /// The panics of [`apply`](Self::apply).
    pub fn apply_halves<'a>(
        &self,
        weights: &Storage,
        (left, right): (Operand<'_>, Operand<'_>),
        slots: impl IntoIterator<Item = Slot<'a>>,
        next: &mut Storage,
    ) {
        #[cfg(feature = "cuda")]
        if next.on_any_device().is_some() {
            return update::apply(self, weights, (left, Some(right)), slots, next);
        }
        let slots = slots.into_iter().map(Slot::host).collect();
        let (left, right) = (left.host(), right.host());
        cpu::apply_halves(self, weights.floats(), (&left, &right), slots, next.floats_mut());
    }
}

#[cfg(test)]
mod tests {
    use proto::optimizer::{OptimizerKind, OptimizerSpec};
    use proto::tensor::{DType, Values};

    use super::*;
    use crate::Optimizer;

    const LEN: usize = 5000;

    fn values(seed: usize) -> Vec<f32> {
        (0..LEN).map(|at| ((at * 7 + seed) % 1013) as f32 * 0.37 - 100.0).collect()
    }

    fn storage(values: &[f32]) -> Storage {
        let mut storage = Storage::zeros(DType::F32, values.len());
        storage.write(Operand::Payload(bytemuck::cast_slice(values)));
        storage
    }

    /// Bytes that begin `shift` bytes off alignment.
    fn payload(values: &[f32], shift: usize) -> Vec<u8> {
        [vec![0; shift], Values::F32(values.to_vec()).bytes().to_vec()].concat()
    }

    #[test]
    fn storage_gives_the_bits_of_slices_wherever_the_gradient_lies() {
        let optimizer = Optimizer::new(&OptimizerSpec::new(OptimizerKind::Adam, 0.1), 10).unwrap();
        let update = optimizer.prepare(3, 0.5);
        let (weights, left, right) = (values(1), values(2), values(3));
        let gradient: Vec<f32> = left.iter().zip(&right).map(|(left, right)| left + right).collect();
        let (mut slots, mut next) = (vec![vec![0.5; LEN]; 2], vec![f32::NAN; LEN]);
        cpu::apply(&update, &weights, &gradient, &mut slots, &mut next);
        let expected: Vec<_> = [vec![next], slots].concat().iter().map(|values| storage(values)).collect();

        let weights = storage(&weights);
        let stored = [&left, &right, &gradient].map(|values| storage(values));
        for shift in 0..5 {
            let received = [&left, &right, &gradient].map(|values| payload(values, shift));
            let [left, right, gradient] = received.each_ref().map(|raw| Operand::Payload(&raw[shift..]));
            for [left, right, gradient] in [[left, right, gradient], stored.each_ref().map(Operand::Stored)] {
                for halves in [None, Some((left, right))] {
                    let slots = [(); 2].map(|()| storage(&[0.5; LEN]));
                    let [mut moved, mut average] = [storage(&[f32::NAN; LEN]), storage(&[0.5; LEN])];
                    let mut next = storage(&[f32::NAN; LEN]);
                    let given =
                        [Slot::InPlace(&mut average), Slot::Moved { from: &slots[1], to: &mut moved }];
                    match halves {
                        None => update.apply(&weights, gradient, given, &mut next),
                        Some(halves) => update.apply_halves(&weights, halves, given, &mut next),
                    }
                    for (found, expected) in [next, average, moved].iter().zip(&expected) {
                        assert!(found.bytes() == expected.bytes(), "{shift} off");
                    }
                    assert!(slots[1].bytes() == storage(&[0.5; LEN]).bytes(), "what is held does not change");
                }
            }
        }
    }

    #[test]
    fn a_chunk_in_storage_has_the_norms_of_its_slices() {
        let optimizer = Optimizer::new(&OptimizerSpec::new(OptimizerKind::Lamb, 0.1), 10).unwrap();
        let update = optimizer.prepare(3, 0.5);
        let [weights, gradient, average] = [values(1), values(2), values(3)];
        let square: Vec<f32> = average.iter().map(|value| value * value).collect();
        let raw = payload(&gradient, 1);
        let expected = cpu::measure(&update, &weights, &raw[1..], &[&average, &square]);
        let [weights, gradient, average, square] =
            [weights, gradient, average, square].map(|values| storage(&values));
        for gradient in [Operand::Payload(&raw[1..]), Operand::Stored(&gradient)] {
            assert_eq!(update.measure(&weights, gradient, [&average, &square]), expected);
        }
    }
}
