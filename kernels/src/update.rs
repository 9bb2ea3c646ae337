//! What an update does to storage: it measures chunks, and makes the next weights of them.

use proto::tensor::DType;

use crate::cpu;
#[cfg(feature = "cuda")]
use crate::cuda::update;
use crate::merge::Merge;
use crate::norm::Squares;
use crate::optimizer::Update;
use crate::parallel;
use crate::storage::{Operand, Slot, Storage};

/// The gradient of one chunk: the sum over the samples of a step.
#[derive(Clone, Copy, Debug)]
pub enum Gradient<'a> {
    /// The sum.
    Sum(Operand<'a>),
    /// The sum of these two is the gradient. It is made on the way, and nowhere written to memory.
    Halves(Operand<'a>, Operand<'a>),
}

/// What a step reads and writes of one chunk. All storage and the gradient have one length.
#[derive(Debug)]
pub struct Pass<'a> {
    /// The update, with the norms that it needs.
    pub update: Update,
    /// The weights before the step.
    pub weights: &'a Storage,
    /// The gradient.
    pub gradient: Gradient<'a>,
    /// The slots, in the order of [`Optimizer::slot_names`](crate::Optimizer::slot_names).
    pub slots: Vec<Slot<'a>>,
    /// The weights after the step. What they hold before does not matter.
    pub next: &'a mut Storage,
}

/// What the norms of a step read of one chunk. All storage and the gradient have one length.
#[derive(Debug)]
pub struct Measurement<'a> {
    /// The update, which lacks norms.
    pub update: Update,
    /// The weights before the step.
    pub weights: &'a Storage,
    /// The gradient.
    pub gradient: Gradient<'a>,
    /// The slots before the step.
    pub slots: Vec<&'a Storage>,
}

impl<'a> Gradient<'a> {
    /// Returns the operands that are added up.
    #[cfg(feature = "cuda")]
    pub(crate) fn operands(self) -> impl Iterator<Item = Operand<'a>> {
        let (left, right) = match self {
            Self::Sum(sum) => (sum, None),
            Self::Halves(left, right) => (left, Some(right)),
        };
        std::iter::once(left).chain(right)
    }
}

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
            let (gradient, slots) = (Gradient::Sum(gradient), slots.into_iter().collect());
            let measured = update::measure_all([Measurement { update: *self, weights, gradient, slots }]);
            return measured[0];
        }
        let slots: Vec<_> = slots.into_iter().map(Storage::floats).collect();
        cpu::measure(self, weights.floats(), &gradient.host(), &slots)
    }

    /// Returns what each of many chunks contributes to the norms, in their order. On the host so
    /// many threads share them. On a device all chunks are one launch, and the host waits once.
    ///
    /// # Panics
    /// The panics of [`measure`](Self::measure), and if some chunks lie on the host and some on a
    /// device.
    pub fn measure_all(threads: usize, chunks: Vec<Measurement<'_>>) -> Vec<Squares> {
        #[cfg(feature = "cuda")]
        if chunks.first().is_some_and(|first| first.weights.on_any_device().is_some()) {
            return update::measure_all(chunks);
        }
        let mut squares = vec![Squares::default(); chunks.len()];
        parallel::for_each(threads, chunks.into_iter().zip(&mut squares), |(chunk, squares)| {
            *squares = chunk.measured();
        });
        squares
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
            let (gradient, slots) = (Gradient::Sum(gradient), slots.into_iter().collect());
            return update::apply_all([Pass { update: *self, weights, gradient, slots, next }]);
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
            let (gradient, slots) = (Gradient::Halves(left, right), slots.into_iter().collect());
            return update::apply_all([Pass { update: *self, weights, gradient, slots, next }]);
        }
        let slots = slots.into_iter().map(Slot::host).collect();
        let (left, right) = (left.host(), right.host());
        cpu::apply_halves(self, weights.floats(), (&left, &right), slots, next.floats_mut());
    }

    /// Applies a step to many chunks, each with its update. On the host so many threads share
    /// them. On a device all chunks are one launch.
    ///
    /// # Panics
    /// The panics of [`apply`](Self::apply), and if some chunks lie on the host and some on a
    /// device.
    pub fn apply_all(threads: usize, chunks: Vec<Pass<'_>>) {
        #[cfg(feature = "cuda")]
        if chunks.first().is_some_and(|first| first.next.on_any_device().is_some()) {
            return update::apply_all(chunks);
        }
        parallel::for_each(threads, chunks.into_iter(), Pass::apply);
    }
}

impl Pass<'_> {
    fn apply(self) {
        let Self { update, weights, gradient, slots, next } = self;
        match gradient {
            Gradient::Sum(sum) => update.apply(weights, sum, slots, next),
            Gradient::Halves(left, right) => update.apply_halves(weights, (left, right), slots, next),
        }
    }
}

impl Measurement<'_> {
    fn measured(self) -> Squares {
        let Self { update, weights, gradient, slots } = self;
        match gradient {
            Gradient::Sum(sum) => update.measure(weights, sum, slots),
            Gradient::Halves(left, right) => {
                let mut sum = Storage::zeros(DType::F32, weights.len());
                sum.merge_of(left, right, Merge::root(DType::F32));
                update.measure(weights, Operand::Stored(&sum), slots)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proto::optimizer::{OptimizerKind, OptimizerSpec};
    use proto::tensor::Values;

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
