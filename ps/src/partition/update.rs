//! How complete steps become versions: one update at a time, in the order that the ledger allows.

use std::sync::{Arc, PoisonError};

use net::timeline;
use proto::checkpoint::manifest::oldest;
use proto::ids::{Step, Version};
use proto::parameters::Address;
use proto::spec::Consistency;
use tokio::time::Instant;
use tracing::Span;

use super::{Life, Partition, State, Totals, Weights};
use crate::checkpoint::{Cut, Saver};
use crate::checks;
use crate::chunk::Advance;
use crate::optim::Update;
use crate::parallel;
use crate::pool::{Buffer, Use};
use crate::versions::Kept;

/// A partition of this size or more is written past the caches: when its last chunk has been written, its first is in none any more.
const STREAMED_BYTES_MIN: usize = 16 << 20;

/// A step that is being applied.
#[derive(Debug)]
pub(super) struct Begun {
    pub(super) step: Step,
    /// Of the weights before it.
    pub(super) version: Version,
    pub(super) weights: Weights,
    pub(super) totals: Totals,
    /// As the timeline shows it.
    pub(super) span: Span,
}

impl Partition {
    /// A step's sum is there: it is applied by whoever is updating, and that is the caller when nobody is.
    pub(super) fn complete(self: &Arc<Self>, step: Step, totals: Totals) {
        let mut state = self.state();
        state.ready.insert(step, totals);
        if !std::mem::replace(&mut state.updating, true) {
            drop(state);
            self.apply_ready();
        }
    }

    pub(super) fn apply_ready(self: &Arc<Self>) {
        while let Some(mut begun) = self.begin() {
            let update = self.prepare(&begun);
            if !update.needs_norms() {
                let updates = vec![update; begun.totals.len()];
                self.apply(begun, updates);
                continue;
            }
            let span = begun.span.clone();
            let own = span.in_scope(|| self.measure(&update, &mut begun));
            if self.others.is_some() {
                // Goes on when it knows what they have measured; until then it is the update that is under way.
                return self.ask_others(begun, update, own);
            }
            let updates = self.with_norms(&update, vec![own]);
            self.apply(begun, updates);
        }
    }

    /// The next step that may be applied; when there is none, nobody updates any more.
    fn begin(&self) -> Option<Begun> {
        let mut state = self.state();
        let may_apply = |step: &Step| matches!(state.life, Life::Open) && state.ledger.may_apply(*step);
        let Some(step) = state.ready.keys().copied().find(may_apply) else {
            state.updating = false;
            return None;
        };
        let totals = state.ready.remove(&step).expect("found just now");
        let (version, weights) = state.versions.newest().expect("a step is taken up after version 0");
        let weights = weights.clone();
        let gone = state.versions.make_room();
        let marks = state.marks.remove(&step).unwrap_or_default();
        drop(state);
        // Their buffers become those of the next version.
        drop(gone);
        let span = self.apply_span(step, version);
        timeline::join(&span, marks);
        Some(Begun { step, version, weights, totals, span })
    }

    /// Makes the next version, unless the job ended or was rewound meanwhile: nobody may see it then.
    pub(super) fn apply(&self, begun: Begun, updates: Vec<Update>) {
        let (step, version) = (begun.step, begun.version);
        let span = begun.span.clone();
        let next = span.in_scope(|| self.advance(begun, updates));

        let mut state = self.state();
        if !matches!(state.life, Life::Open) {
            return;
        }
        let gone = state.versions.insert(version.next(), next);
        state.ledger.apply(step);
        state.aggregator.forget(step);
        self.count_held(&mut state);
        checks::applied(self.opening.address, step, version.next(), state.versions.len());
        let cut = self.maybe_cut(&state);
        state.updates += 1;
        let reserves = state.updates == self.settled_after;
        drop(state);
        self.changed.notify_waiters();
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

    /// The partition as it is now, when this version is to be saved. Only between two updates: by whoever updates, or while nobody
    /// does.
    pub(super) fn maybe_cut(&self, state: &State) -> Option<(&Arc<Saver>, Cut)> {
        let (version, saver) = (state.version()?, self.saver.as_ref()?);
        if !saver.begins(&self.opening.plan, version) {
            return None;
        }
        let Consistency { order, delay } = self.consistency;
        let versions = (oldest(order, delay, version).get()..=version.get()).map(Version);
        let weights = versions.map(|version| match state.versions.get(version) {
            Kept::Here(weights) => (version, weights),
            other => panic!("version {version} is needed by the next steps, and {other:?}"),
        });
        let weights: Vec<_> = weights.collect();
        let slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        let (partition, applied) = (self.opening.address.partition, state.ledger.applied_steps());
        let cut = Cut::new(&self.layout, partition, &weights, &slots, self.optimizer.slot_names(), applied);
        Some((saver, cut))
    }

    /// The scalars of a step's update.
    fn prepare(&self, begun: &Begun) -> Update {
        let scale = (1.0 / self.opening.plan.samples_of(begun.step) as f64) as f32;
        let update = self.optimizer.prepare(begun.version.get(), scale);
        if self.bytes < STREAMED_BYTES_MIN { update } else { update.past_the_caches() }
    }

    /// The update: weights of one version and what a step says in, weights of the next version out.
    fn advance(&self, begun: Begun, updates: Vec<Update>) -> Weights {
        let begin = Instant::now();
        let Begun { step, weights, totals, .. } = begun;
        let microbatches = self.opening.plan.of(step);
        let mut next: Vec<Option<Arc<Buffer>>> = weights.iter().map(|_| None).collect();
        let mut slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        let chunks = slots.iter_mut().zip(weights.iter()).zip(totals).zip(&mut next).zip(updates);
        // Each chunk's memory is taken when it is needed, and that of its sum is free again before the next chunk needs some.
        parallel::for_each(self.threads, chunks, |((((slots, weights), total), next), update)| {
            let advance = Advance { update, microbatches, pool: &self.pool };
            let mut buffer = self.pool.take(Use::Weights, weights.dtype(), weights.len());
            slots.advance(&advance, weights, total, &mut buffer);
            *next = Some(Arc::new(buffer));
        });
        self.metrics.updates.add(1);
        self.metrics.update_nanos.add(u64::try_from(begin.elapsed().as_nanos()).unwrap_or(u64::MAX));
        next.into_iter().map(|next| next.expect("every chunk was worked on")).collect()
    }
}
