//! The disk of the master's journal. It is slow and sometimes full, and a master may die between an
//! append and its write.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use ebbflow::random::Keyed;
use master::{Batch, MemoryStore, Store, StoreError};

use crate::checks;
use crate::plan::{Dice, Plan};

/// A journal that outlives every master. Clones are the same journal.
#[derive(Clone, Debug)]
pub(crate) struct Journal {
    state: Arc<Mutex<State>>,
}

#[derive(Debug)]
struct State {
    written: MemoryStore,
    /// Every value that was ever written.
    said: BTreeSet<Vec<u8>>,
    dice: Dice,
    /// Longest time that one write takes.
    latency_ms: u64,
    /// Chance that a write fails.
    fails: f32,
    /// Chance that the master dies just before a write, or just after it.
    crash: f32,
    full: bool,
    /// Whether the master is to die now.
    crashes: bool,
}

impl Journal {
    pub(crate) fn new(seed: u64, plan: &Plan) -> Self {
        let state = State {
            written: MemoryStore::default(),
            said: BTreeSet::new(),
            dice: Dice(Keyed::new(seed, "journal", 0)),
            latency_ms: plan.journal_ms,
            fails: plan.journal_fails,
            crash: plan.journal_crash,
            full: false,
            crashes: false,
        };
        Self { state: Arc::new(Mutex::new(state)) }
    }

    /// Loses everything that was written.
    pub(crate) fn lose(&self) {
        let mut state = self.state();
        (state.written, state.said) = (MemoryStore::default(), BTreeSet::new());
    }

    fn written(&self) -> MemoryStore {
        self.state().written.clone()
    }

    /// Returns whether a value that was ever written contains this text. The record of a job's end
    /// replaces that of its placement, and a call from before may arrive later.
    pub(crate) fn has_said(&self, text: &str) -> bool {
        self.state().said.iter().any(|value| value.windows(text.len()).any(|part| part == text.as_bytes()))
    }

    /// Sets whether the disk is full from now on.
    pub(crate) fn fill(&self, full: bool) {
        self.state().full = full;
    }

    /// Ends all faults. The disk stays slow.
    pub(crate) fn heal(&self) {
        let mut state = self.state();
        (state.full, state.fails, state.crash) = (false, 0.0, 0.0);
    }

    /// Returns whether the master dies with its current write.
    pub(crate) fn take_crash(&self) -> bool {
        std::mem::take(&mut self.state().crashes)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    async fn wait(&self) {
        let ms = {
            let mut state = self.state();
            let longest = state.latency_ms;
            state.dice.range(0, longest / 2)
        };
        if ms > 0 {
            tokio::time::sleep(Duration::from_millis(ms)).await;
        }
    }

    /// Never returns: the master is gone at the end of this tick.
    async fn die(&self, when: &str) {
        self.state().crashes = true;
        checks::count(format!("masters that died {when} a write of the journal"));
        std::future::pending::<()>().await;
    }
}

#[async_trait::async_trait]
impl Store for Journal {
    async fn load(&self) -> Result<BTreeMap<String, Vec<u8>>, StoreError> {
        self.written().load().await
    }

    async fn commit(&self, batch: &Batch) -> Result<(), StoreError> {
        self.wait().await;
        let (fails, before, after) = {
            let mut state = self.state();
            let (fails, crash) = (state.fails, state.crash);
            let fails = state.dice.happens(fails) || state.full;
            (fails, state.dice.happens(crash / 2.0), state.dice.happens(crash / 2.0))
        };
        if fails {
            checks::count("writes of the journal that failed");
            return Err("no space left on device".into());
        }
        if before {
            self.die("before").await;
        }
        self.written().commit(batch).await?;
        self.state().said.extend(batch.keys.values().flatten().cloned());
        if after {
            self.die("after").await;
        }
        self.wait().await;
        Ok(())
    }
}
