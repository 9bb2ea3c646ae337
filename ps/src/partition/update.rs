//! How complete steps become versions: one update at a time, in the order that the ledger allows.

use std::sync::Arc;

use kernels::Updates;
use net::timeline;
use proto::ids::{Step, Version};
use proto::parameters::Address;
use tokio::time::Instant;
use tracing::Span;

use super::dense::{ChunkUpdates, Dense, Measured, Totals};
use super::norms::KEPT;
use super::{BreaksByPanic, Life, Partition};
use crate::checks;
use crate::chunk::Weights;
use crate::opening::Place;

/// A step that is being applied.
#[derive(Debug)]
struct Begun {
    step: Step,
    /// Version of the weights before it.
    version: Version,
    weights: Weights,
    /// Records of the step: the divisor of its sums. Skipped ones are none.
    samples: u64,
    /// Steps before it that overflowed.
    overflows: u64,
    totals: Totals,
    /// The update as the timeline shows it.
    span: Span,
}

impl Partition {
    /// Records that the sum of a step is there. The caller applies it unless an update is under
    /// way, which then goes on with this step.
    pub(super) fn complete(self: &Arc<Self>, step: Step, samples: u64, totals: Totals) {
        let mut state = self.state();
        state.ready.insert(step, (samples, totals));
        if !std::mem::replace(&mut state.updating, true) {
            drop(state);
            self.apply_ready();
        }
    }

    /// Applies all complete steps that may be applied. The caller is the one that updates.
    fn apply_ready(self: &Arc<Self>) {
        while let Some(mut begun) = self.begin() {
            let updates = self.prepare(&begun);
            if !updates.needs_norms() {
                self.apply(begun, Some(self.dense.of_chunks(&updates)));
                continue;
            }
            let span = begun.span.clone();
            let own = span.in_scope(|| self.dense.measure(&updates, &begun.weights, &mut begun.totals));
            if self.others.is_some() {
                // Goes on when it knows what they have measured; until then it is the update that
                // is under way.
                return self.ask_others(begun, updates, own);
            }
            let updates = self.dense.with_norms(&updates, vec![own]);
            self.apply(begun, updates);
        }
    }

    /// Returns the next step that may be applied; when there is none, nobody updates any more.
    fn begin(&self) -> Option<Begun> {
        let mut state = self.state();
        let may_apply = |step: &Step| matches!(state.life, Life::Open) && state.ledger.may_apply(*step);
        let Some(step) = state.ready.keys().copied().find(may_apply) else {
            state.updating = false;
            let is_over = !matches!(state.life, Life::Open);
            drop(state);
            if is_over {
                self.release();
            }
            return None;
        };
        let (samples, totals) = state.ready.remove(&step).expect("found just now");
        let (version, weights) = state.versions.newest().expect("a step is taken up after version 0");
        let weights = weights.clone();
        let gone = state.versions.make_room();
        let marks = state.marks.remove(&step).unwrap_or_default();
        let overflows = state.ledger.overflows();
        drop(state);
        // Their buffers become those of the next version.
        drop(gone);
        self.move_pinned();
        let span = self.apply_span(step, version);
        timeline::join(&span, marks);
        Some(Begun { step, version, weights, samples, overflows, totals, span })
    }

    /// Moves the versions that only an evaluation needs from the device to the host.
    fn move_pinned(&self) {
        if !self.dense.is_on_device() {
            return;
        }
        let pinned = self.state().versions.pinned();
        for (version, weights) in pinned {
            if weights.iter().all(|weights| weights.is_on_host()) {
                continue;
            }
            match Dense::on_host(&weights) {
                Ok(copied) => drop(self.state().versions.replace(version, copied)),
                Err(error) => drop(self.fails(error)),
            }
        }
    }

    /// Tells the other partitions what this one contributes, learns what they do, and then goes on
    /// with the update. Returns at once.
    fn ask_others(self: &Arc<Self>, begun: Begun, updates: Updates, own: Measured) {
        let mut state = self.state();
        state.measured.push_back((begun.step, own.clone()));
        if state.measured.len() > KEPT {
            state.measured.pop_front();
        }
        drop(state);
        self.changed.notify_waiters();
        let partition = self.clone();
        tokio::spawn(async move {
            let others = partition.others.as_ref().expect("the caller has looked");
            let measured = tokio::select! {
                biased;
                () = partition.ended.cancelled() => return partition.release(),
                measured = others.ask_all(&partition.dense, begun.step, own) => measured,
            };
            let inline = partition.is_inline();
            let go_on = move || {
                let _breaks = BreaksByPanic(&partition);
                let updates = partition.dense.with_norms(&updates, measured);
                partition.apply(begun, updates);
                partition.apply_ready();
            };
            if inline {
                go_on();
            } else if let Err(error) = tokio::task::spawn_blocking(go_on).await {
                tracing::error!(%error, "the update ended; this is a bug");
            }
        });
    }

    /// Makes the next version, unless the job ended or was rewound meanwhile: nobody may see it
    /// then. Without `updates` the step overflowed.
    fn apply(&self, begun: Begun, updates: Option<ChunkUpdates>) {
        let (step, version, samples) = (begun.step, begun.version, begun.samples);
        let (span, overflowed) = (begun.span.clone(), updates.is_none());
        let next = span.in_scope(|| self.advance(begun, updates));
        if self.settle().is_err() {
            return;
        }

        let mut state = self.state();
        if !matches!(state.life, Life::Open) {
            return;
        }
        let gone = state.versions.insert(version.next(), next);
        state.ledger.apply(step, samples);
        if overflowed {
            state.ledger.overflow();
        }
        state.aggregator.forget(step);
        self.count_held(&mut state);
        checks::applied(self.opening.address, step, version.next(), state.versions.len());
        let cut = self.maybe_cut(&state);
        state.updates += 1;
        let reserves = state.updates == self.settled_after;
        drop(state);
        self.changed.notify_waiters();
        if overflowed {
            let place = Place::from(self.opening.address);
            tracing::info!(%place, %step, "the gradient overflowed: no weight changes in this step");
            self.metrics.overflows.add(1);
        }
        if reserves {
            self.reserve();
        }
        if let Some((saver, cut)) = cut {
            saver.save(cut);
        }
        // Now, outside the lock, their buffers go back to the pool.
        drop(gone);
    }

    fn apply_span(&self, step: Step, version: Version) -> Span {
        let Address { job, partition, .. } = self.opening.address;
        let (job, partition, step) = (job.get(), partition.get(), step.get());
        tracing::debug_span!(
            target: timeline::TARGET, parent: None, "apply", job, partition, step, version = version.next().get()
        )
    }

    /// Returns the scalars of a step's updates.
    fn prepare(&self, begun: &Begun) -> Updates {
        // The gradient of a step without records is zero, also for norms.
        let scale = if begun.samples == 0 { 0.0 } else { (1.0 / begun.samples as f64) as f32 };
        self.dense.prepare(begun.version, begun.overflows, scale)
    }

    /// Computes the weights of the next version from those of one version and the sums of a step. A
    /// step without records changes nothing. Without `updates` the step overflowed.
    fn advance(&self, begun: Begun, updates: Option<ChunkUpdates>) -> Weights {
        let begin = Instant::now();
        let Begun { step, weights, samples, totals, .. } = begun;
        let next = match (samples, updates) {
            (0, _) => self.dense.unchanged(&weights),
            (_, Some(updates)) => self.dense.advance(updates, self.opening.plan.of(step), &weights, totals),
            (_, None) => self.dense.overflowed(&weights, totals),
        };
        self.metrics.updates.add(1);
        self.metrics.update_nanos.add(u64::try_from(begin.elapsed().as_nanos()).unwrap_or(u64::MAX));
        next
    }
}
