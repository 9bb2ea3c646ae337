//! The optimizers of a model whose tensors have settings of their own (ADR 48).
//!
//! Always true here: a chunk belongs to one tensor, so one [`Update`] serves the whole chunk.
//! Without groups every chunk has the update of the one optimizer.

use std::sync::Arc;

use proto::ids::ChunkId;
use proto::optimizer::{InvalidOptimizer, OptimizerSpec};
use proto::placement::Layout;
use proto::tensor::{TensorRole, TensorSpec};

use crate::norm::Squares;
use crate::optimizer::{Optimizer, Update};

/// The optimizer of each tensor of a model. All have one kind and the same slots.
///
/// ```
/// use proto::optimizer::{GroupSpec, OptimizerKind, OptimizerSpec};
/// use proto::tensor::TensorSpec;
///
/// let group = GroupSpec { learning_rate: Some(0.5), ..GroupSpec::new(vec!["head.*".to_owned()]) };
/// let spec = OptimizerSpec { groups: vec![group], ..OptimizerSpec::new(OptimizerKind::Sgd, 0.1) };
/// let tensors = ["body.weight", "head.weight"].map(|name| TensorSpec::parameter(name, [2]));
/// let optimizers = kernels::Optimizers::new(&spec, &tensors, 10)?;
/// assert_eq!([0, 1].map(|tensor| optimizers.of(tensor).learning_rate(0)), [0.1, 0.5]);
/// # Ok::<(), proto::optimizer::InvalidOptimizer>(())
/// ```
#[derive(Clone, Debug)]
pub struct Optimizers {
    /// First that of the tensors without a group, then those of the groups.
    groups: Vec<Optimizer>,
    /// Index into `groups` for each tensor.
    of_tensors: Arc<[usize]>,
}

/// One step's updates of a model.
#[derive(Clone, Debug)]
pub struct Updates {
    groups: Vec<Update>,
    of_tensors: Arc<[usize]>,
}

impl Optimizers {
    /// Returns the optimizers of a job that will make `total_steps` updates. If the tensors have a
    /// loss scale, the norm of each gradient is measured.
    ///
    /// # Errors
    /// All violations of the specification, or of its groups for these tensors.
    pub fn new(
        spec: &OptimizerSpec,
        tensors: &[TensorSpec],
        total_steps: u64,
    ) -> Result<Self, InvalidOptimizer> {
        spec.validate()?;
        let of_tensors = spec.groups_of(tensors)?.into();
        let is_scaled = tensors.iter().any(|tensor| tensor.role == TensorRole::LossScale);
        let mut groups: Vec<Optimizer> = Vec::new();
        for group in spec.grouped() {
            let optimizer = Optimizer::new(&group, total_steps)?;
            let optimizer = if is_scaled { optimizer.measured() } else { optimizer };
            // A schedule may be a long table: groups with the same one share it.
            groups.push(match groups.first() {
                Some(first) => optimizer.sharing_schedule(first),
                None => optimizer,
            });
        }
        Ok(Self { groups, of_tensors })
    }

    /// Returns the optimizer of a tensor, by its number in the model.
    ///
    /// # Panics
    /// If the model has no such tensor.
    pub fn of(&self, tensor: usize) -> &Optimizer {
        &self.groups[self.of_tensors[tensor]]
    }

    /// Returns the number of slots beside each parameter.
    pub fn slots(&self) -> usize {
        self.groups[0].slots()
    }

    /// Names of the slots, in the order in which an update takes them.
    pub fn slot_names(&self) -> &'static [&'static str] {
        self.groups[0].slot_names()
    }

    /// Works out the scalars of one step for all tensors; see [`Optimizer::prepare_after`].
    pub fn prepare(&self, step: u64, overflows: u64, scale: f32) -> Updates {
        let groups = self.groups.iter().map(|group| group.prepare_after(step, overflows, scale)).collect();
        Updates { groups, of_tensors: self.of_tensors.clone() }
    }
}

impl Updates {
    /// Returns the update of a tensor, by its number in the model. It may lack norms.
    ///
    /// # Panics
    /// If the model has no such tensor.
    pub fn of(&self, tensor: usize) -> &Update {
        &self.groups[self.of_tensors[tensor]]
    }

    /// Returns whether the updates lack norms over the whole model; see [`Update::needs_norms`].
    pub fn needs_norms(&self) -> bool {
        self.groups[0].needs_norms()
    }

    /// Returns updates that write past the caches; see [`Update::past_the_caches`].
    #[must_use]
    pub fn past_the_caches(mut self) -> Self {
        self.groups.iter_mut().for_each(|update| *update = update.past_the_caches());
        self
    }

    /// Returns the update of each of `chunks`.
    pub fn of_chunks(&self, layout: &Layout, chunks: &[ChunkId]) -> Vec<Update> {
        chunks.iter().map(|&id| *self.of(layout.chunk(id).tensor)).collect()
    }

    /// Returns the update of each of `chunks`, from the squares of all parameter chunks of the
    /// model in the order of their numbers.
    ///
    /// # Panics
    /// The panics of [`Update::with_norms`].
    pub fn with_norms(
        &self,
        layout: &Layout,
        squares: &[(ChunkId, Squares)],
        chunks: &[ChunkId],
    ) -> Vec<Update> {
        let mut updates = self.of_chunks(layout, chunks);
        for (group, update) in self.groups.iter().enumerate() {
            let in_group = |id: ChunkId| self.of_tensors[layout.chunk(id).tensor] == group;
            let (places, members): (Vec<_>, Vec<_>) =
                chunks.iter().copied().enumerate().filter(|&(_, id)| in_group(id)).unzip();
            for (place, update) in places.into_iter().zip(update.with_norms(layout, squares, &members)) {
                updates[place] = update;
            }
        }
        updates
    }
}

#[cfg(test)]
mod tests {
    use proto::loss_scale::LossScale;
    use proto::optimizer::{GroupSpec, OptimizerKind, Schedule, ScheduleKind};

    use super::*;
    use crate::cpu;

    fn tensors() -> Vec<TensorSpec> {
        vec![
            TensorSpec::parameter("a.weight", [2]),
            TensorSpec::state("a.mean", [2]),
            TensorSpec::parameter("a.bias", [2]),
            TensorSpec::parameter("b.weight", [2]),
        ]
    }

    /// Biases without decay, and `b` with another rate and schedule.
    fn grouped(kind: OptimizerKind) -> OptimizerSpec {
        let table = vec![(0, 1.0), (2, 0.25)];
        let schedule = Schedule { kind: ScheduleKind::Table, table, ..Schedule::default() };
        let group = |name: &str| GroupSpec::new(vec![name.to_owned()]);
        let groups = vec![
            GroupSpec { weight_decay: Some(0.0), ..group("*.bias") },
            GroupSpec { learning_rate: Some(0.5), schedule: Some(schedule), ..group("b.*") },
        ];
        OptimizerSpec { weight_decay: Some(0.1), groups, ..OptimizerSpec::new(kind, 0.1) }
    }

    #[test]
    fn each_tensor_has_the_update_of_an_optimizer_with_its_settings() {
        for kind in OptimizerKind::ALL.into_iter().filter(|kind| kind.settings().contains(&"weight_decay")) {
            let spec = grouped(kind);
            let optimizers = Optimizers::new(&spec, &tensors(), 10).expect("valid");
            let rest = OptimizerSpec { groups: Vec::new(), ..spec.clone() };
            let bias = OptimizerSpec { weight_decay: Some(0.0), ..rest.clone() };
            let schedule = spec.groups[1].schedule.clone().expect("its own");
            let b = OptimizerSpec { learning_rate: 0.5, schedule, ..rest.clone() };
            for step in 0..4 {
                let updates = optimizers.prepare(step, 0, 0.25);
                for (tensor, alone) in [(0, &rest), (1, &rest), (2, &bias), (3, &b)] {
                    let alone = Optimizer::new(alone, 10).expect("valid").prepare(step, 0.25);
                    assert_eq!(*updates.of(tensor), alone, "{kind}, step {step}, tensor {tensor}");
                }
            }
        }
    }

    #[test]
    fn without_groups_every_chunk_has_the_update_of_the_one_optimizer() {
        let spec = OptimizerSpec::new(OptimizerKind::Adam, 0.1);
        let layout = Layout::new(tensors(), 1).expect("a model");
        let chunks = [0, 1, 2, 3].map(ChunkId);
        let updates = Optimizers::new(&spec, &tensors(), 10).expect("valid").prepare(3, 0, 0.5);
        let one = Optimizer::new(&spec, 10).expect("valid").prepare(3, 0.5);
        assert_eq!(updates.of_chunks(&layout, &chunks), vec![one; 4]);
        let written_past = updates.past_the_caches().of_chunks(&layout, &chunks);
        assert_eq!(written_past, vec![one.past_the_caches(); 4]);
    }

    #[test]
    fn a_clipped_gradient_has_one_norm_over_all_groups() {
        let spec = OptimizerSpec { clip_norm: Some(1.0), ..grouped(OptimizerKind::Sgd) };
        let layout = Layout::new(tensors(), 1).expect("a model");
        let updates = Optimizers::new(&spec, &tensors(), 10).expect("valid").prepare(0, 0, 1.0);
        assert!(updates.needs_norms());
        let gradient = [3.0_f32, 4.0];
        let measure = |chunk: u32| {
            let update = updates.of(layout.chunk(ChunkId(chunk)).tensor);
            (ChunkId(chunk), cpu::measure(update, &[0.0; 2], bytemuck::cast_slice(&gradient), &[]))
        };
        let squares = [0, 2, 3].map(measure);
        let chunks = [3, 0, 2].map(ChunkId);
        let clipped = updates.with_norms(&layout, &squares, &chunks);
        // The norm of three gradients of length 5 is 5 * sqrt(3).
        let factor = 1.0 / (5.0 * 3.0_f64.sqrt() + 1e-6);
        for (update, rate) in clipped.iter().zip([0.5, 0.1, 0.1]) {
            let mut next = [0.0; 2];
            cpu::apply::<Vec<f32>>(update, &[0.0; 2], &gradient, &mut [], &mut next);
            for (next, gradient) in next.iter().zip(gradient) {
                let expected = -rate * factor * f64::from(gradient);
                assert!((f64::from(*next) - expected).abs() < 1e-6, "{next} {expected}");
            }
        }
    }

    #[test]
    fn a_loss_scale_has_gradients_measured_and_changes_no_bit_of_theirs() {
        for kind in OptimizerKind::ALL {
            let spec = OptimizerSpec::new(kind, 0.1);
            let tensors = [tensors(), vec![LossScale::tensor()]].concat();
            let layout = Layout::new(tensors.clone(), 1).expect("a model");
            let updates = Optimizers::new(&spec, &tensors, 10).expect("valid").prepare(4, 0, 0.5);
            assert!(updates.needs_norms(), "{kind}");
            if kind == OptimizerKind::Lamb {
                continue;
            }
            let chunks = [0, 2, 3].map(ChunkId);
            let squares = chunks.map(|id| (id, Squares([1e30, 0.0])));
            let alone = Optimizer::new(&spec, 10).expect("valid").prepare(4, 0.5);
            assert_eq!(updates.with_norms(&layout, &squares, &chunks), vec![alone; 3], "{kind}");
        }
    }

    #[test]
    fn steps_that_overflowed_count_for_the_schedule_and_not_for_the_rule() {
        let table = vec![(0, 1.0), (2, 0.25)];
        let schedule = Schedule { kind: ScheduleKind::Table, table, ..Schedule::default() };
        let spec = OptimizerSpec { schedule, ..OptimizerSpec::new(OptimizerKind::Adam, 0.4) };
        let found = Optimizer::new(&spec, 10).expect("valid").prepare_after(5, 3, 0.5);
        let without = OptimizerSpec::new(OptimizerKind::Adam, 0.1);
        assert_eq!(found, Optimizer::new(&without, 10).expect("valid").prepare(2, 0.5));
    }

    #[test]
    fn groups_that_do_not_fit_the_model_are_refused() {
        let refused =
            Optimizers::new(&grouped(OptimizerKind::Sgd), &tensors()[..3], 10).expect_err("refused");
        assert!(refused.to_string().contains("optimizer.groups[1].tensors"), "{refused}");
    }
}
