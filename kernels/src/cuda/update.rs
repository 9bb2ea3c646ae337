//! What an update does on a device: it measures chunks, and makes the next weights of them.
//!
//! Always true here: all chunks of a call whose operands lie on the device are in one launch, which
//! reads their addresses and scalars from a table. So the number of launches, copies, allocations
//! and waits does not grow with the number of chunks. Operands that lie elsewhere are copied to the
//! device first, a few chunks at a time.
#![expect(unsafe_code, reason = "kernels work on addresses that no type guards")]

use std::sync::Arc;

use super::device::Device;
use super::launch::{self, Address, Operands, Pass, SLOTS_MAX, SUMS_MAX, Table};
use super::memory::{Buffer, Near};
use crate::cpu;
use crate::error::Error;
use crate::norm::Squares;
use crate::optimizer::Update;
use crate::storage::{Operand, Slot, Storage};
use crate::update::{self, Gradient, Measurement};

/// Bytes of operands that are copied to the device for one launch, and the size of one more chunk.
/// A ps promises a part of the memory to nobody, for such copies.
const COPIED_BYTES_MAX: usize = 8 << 20;

/// What a chunk on a failed device contributes to the norms.
const UNKNOWN: Squares = Squares([f64::NAN; 2]);

/// Chunks that are collected for a launch. All have one kernel.
struct Batch<'a> {
    device: &'a Arc<Device>,
    /// An update with the kernel.
    update: Update,
    passes: Vec<Pass>,
    /// Copies of operands that lie elsewhere. They are freed when the launch has run.
    copies: Vec<Near<'a>>,
    copied_bytes: usize,
}

impl<'a> Batch<'a> {
    const fn new(device: &'a Arc<Device>, update: Update) -> Self {
        Self { device, update, passes: Vec::new(), copies: Vec::new(), copied_bytes: 0 }
    }

    /// Returns whether it may get one more chunk, of this update on this device.
    fn takes(&self, device: &Arc<Device>, update: &Update) -> bool {
        self.copied_bytes < COPIED_BYTES_MAX
            && Arc::ptr_eq(self.device, device)
            && self.update.rule.kernel().0 == update.rule.kernel().0
    }

    /// Returns where kernels read values, which are copied if they lie elsewhere.
    ///
    /// # Errors
    /// The device has too little memory, or it failed.
    fn near(&mut self, at: &Buffer, values: Operand<'a>) -> Result<Address, Error> {
        let near = at.near(values.source())?;
        let address = near.address();
        if let Near::Copied(_) = near {
            self.copied_bytes += values.size();
            self.copies.push(near);
        }
        Ok(address)
    }

    /// Adds a chunk. Its gradient is not among `operands` yet.
    ///
    /// # Errors
    /// The device has too little memory, or it failed. The chunk was not added.
    fn add(
        &mut self,
        update: &Update,
        at: &Buffer,
        gradient: Gradient<'a>,
        operands: Operands,
    ) -> Result<(), Error> {
        let (left, right) = match gradient {
            Gradient::Sum(sum) => (self.near(at, sum)?, Address::NOWHERE),
            Gradient::Halves(left, right) => (self.near(at, left)?, self.near(at, right)?),
        };
        self.passes.push(Pass::new(update, Operands { left, right, ..operands }));
        Ok(())
    }

    /// Copies the table of the passes to the device, and launches what needs it.
    ///
    /// # Errors
    /// The device has too little memory, or it failed.
    fn launch<T>(&self, launch: impl FnOnce(&Table) -> Result<T, Error>) -> Result<T, Error> {
        let table = Buffer::uploaded(self.device, bytemuck::cast_slice(&self.passes))?;
        launch(&Table::new(&self.passes, table.address()))
    }

    /// Applies the updates of the passes.
    fn apply(&self) {
        let applied = self.launch(|table| {
            // SAFETY: what a pass reads and writes has one length, which `apply_all` has checked.
            // What is written is borrowed alone, until the launch is queued.
            unsafe { launch::apply(&**self.device, &self.update, table) }
        });
        self.device.note(applied);
    }

    /// Returns what each chunk contributes to the norms.
    fn measure(&self) -> Vec<Squares> {
        self.measured().unwrap_or_else(|error| {
            self.device.note(Err(error));
            vec![UNKNOWN; self.passes.len()]
        })
    }

    fn measured(&self) -> Result<Vec<Squares>, Error> {
        let sums = self.launch(|table| {
            let sums = Buffer::zeros(self.device, self.passes.len() * SUMS_MAX * size_of::<f64>())?;
            // SAFETY: what a pass reads has one length, which `measure_all` has checked. Nobody
            // else knows of the sums.
            unsafe { launch::measure(&**self.device, &self.update, table, sums.address()) }?;
            sums.read()
        })?;
        let (sums, _) = sums.as_chunks::<{ SUMS_MAX * size_of::<f64>() }>();
        let squares = |sums: &[u8; SUMS_MAX * size_of::<f64>()]| {
            let mut values = [0.0; SUMS_MAX];
            for (value, raw) in values.iter_mut().zip(sums.as_chunks().0) {
                *value = f64::from_le_bytes(*raw);
            }
            cpu::squares_of(&self.update, &values)
        };
        Ok(sums.iter().map(squares).collect())
    }
}

/// Applies steps to chunks on a device.
///
/// # Panics
/// The panics of [`Update::apply`], and if a slot or the weights lie on no device or another one.
pub(crate) fn apply_all<'a>(passes: impl IntoIterator<Item = update::Pass<'a>>) {
    let mut collected: Option<Batch<'a>> = None;
    for update::Pass { update, weights, gradient, mut slots, next } in passes {
        assert!(!update.needs_norms(), "an update without the norms that it needs: {update:?}");
        for slot in &mut slots {
            let (Slot::InPlace(written) | Slot::Moved { to: written, .. }) = slot;
            written.unseal();
        }
        next.unseal();
        let next: &'a Storage = next;
        let buffer = next.on_any_device().unwrap_or_else(|| panic!("the next weights lie on no device"));
        let here = |storage: &Storage, what| here(storage, what, buffer, next.size(), "the next weights");
        let weights = here(weights, "the chunk of weights");
        check("the gradient", gradient, next.size());
        let slots = slots.iter().map(|slot| match slot {
            Slot::InPlace(slot) => (here(slot, "a slot"), here(slot, "a slot")),
            Slot::Moved { from, to } => (here(from, "a slot"), here(to, "a slot")),
        });
        let (from, to) = places(&update, slots);
        let operands = Operands { weights, from, to, next: buffer.address(), ..Operands::of(next.len()) };

        if let Some(batch) = collected.take_if(|batch| !batch.takes(buffer.device(), &update)) {
            batch.apply();
        }
        let batch = collected.get_or_insert_with(|| Batch::new(buffer.device(), update));
        buffer.device().note(batch.add(&update, buffer, gradient, operands));
    }
    collected.iter().for_each(Batch::apply);
}

/// Returns what each chunk on a device contributes to the norms, or NaN if the device failed.
///
/// # Panics
/// The panics of [`Update::measure`], and if a slot lies on no device or another one.
pub(crate) fn measure_all<'a>(chunks: impl IntoIterator<Item = Measurement<'a>>) -> Vec<Squares> {
    let mut squares = Vec::new();
    let mut collected: Option<Batch<'a>> = None;
    for Measurement { update, weights, gradient, slots } in chunks {
        let buffer = weights.on_any_device().unwrap_or_else(|| panic!("the weights lie on no device"));
        check("the gradient", gradient, weights.size());
        let here = |slot: &Storage| here(slot, "a slot", buffer, weights.size(), "the weights");
        let (from, _) = places(&update, slots.into_iter().map(|slot| (here(slot), Address::NOWHERE)));
        let operands = Operands { weights: buffer.address(), from, ..Operands::of(weights.len()) };

        if let Some(batch) = collected.take_if(|batch| !batch.takes(buffer.device(), &update)) {
            squares.extend(batch.measure());
        }
        let batch = collected.get_or_insert_with(|| Batch::new(buffer.device(), update));
        if let Err(error) = batch.add(&update, buffer, gradient, operands) {
            buffer.device().note(Err(error));
            squares.extend(collected.take().iter().flat_map(Batch::measure));
            squares.push(UNKNOWN);
        }
    }
    squares.extend(collected.iter().flat_map(Batch::measure));
    squares
}

/// Returns where the slots of a chunk are read and written.
///
/// # Panics
/// If the rule has more or fewer slots.
fn places(
    update: &Update,
    slots: impl Iterator<Item = (Address, Address)>,
) -> ([Address; SLOTS_MAX], [Address; SLOTS_MAX]) {
    let (mut from, mut to, mut count) = ([Address::NOWHERE; SLOTS_MAX], [Address::NOWHERE; SLOTS_MAX], 0);
    for slot in slots {
        assert!(count < SLOTS_MAX, "more than {SLOTS_MAX} slots given");
        (from[count], to[count]) = slot;
        count += 1;
    }
    let (_, slots, _) = update.rule.kernel();
    assert_eq!(count, slots, "{count} slots given, the update rule has {slots}");
    (from, to)
}

/// Returns where storage lies beside other storage of its length.
///
/// # Panics
/// If it has another length, or lies elsewhere.
fn here(storage: &Storage, what: &str, beside: &Buffer, size: usize, of: &str) -> Address {
    assert_eq!(storage.size(), size, "{what} has {} bytes, {of} have {size}", storage.size());
    let buffer = storage.on_any_device().filter(|buffer| Arc::ptr_eq(buffer.device(), beside.device()));
    buffer.unwrap_or_else(|| panic!("{what} lies elsewhere than {of}")).address()
}

fn check(what: &str, gradient: Gradient<'_>, size: usize) {
    for operand in gradient.operands() {
        let found = operand.size();
        assert_eq!(found, size, "{what} has {found} bytes, the weights have {size}");
    }
}
