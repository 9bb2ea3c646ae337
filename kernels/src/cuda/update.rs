//! What an update does on a device: it measures a chunk, and makes the next weights of it.
#![expect(unsafe_code, reason = "kernels work on addresses that no type guards")]

use std::sync::Arc;

use super::launch::{self, Address, Pass, SLOTS_MAX, SUMS_MAX};
use super::memory::{Buffer, Near};
use crate::cpu;
use crate::norm::Squares;
use crate::optimizer::Update;
use crate::storage::{Operand, Slot, Storage};

/// Applies a step to one chunk on a device. The gradient is one operand, or the sum of two.
///
/// # Panics
/// The panics of [`Update::apply`], and if a slot or the weights lie on no device or another one.
pub(crate) fn apply<'a>(
    update: &Update,
    weights: &Storage,
    (left, right): (Operand<'_>, Option<Operand<'_>>),
    slots: impl IntoIterator<Item = Slot<'a>>,
    next: &mut Storage,
) {
    assert!(!update.needs_norms(), "an update without the norms that it needs: {update:?}");
    let (size, length) = (next.size(), next.len() as u64);
    let check = |what: &str, found: usize| {
        assert_eq!(found, size, "{what} has {found} bytes, the next weights have {size}");
    };
    check("the weights", weights.size());
    check("the gradient", left.size());
    right.into_iter().for_each(|right| check("the gradient", right.size()));
    let next = next.on_any_device().unwrap_or_else(|| panic!("the next weights lie on no device"));
    let here = |storage: &Storage, what: &str| {
        check(what, storage.size());
        let buffer = storage.on_any_device().filter(|buffer| Arc::ptr_eq(buffer.device(), next.device()));
        buffer.unwrap_or_else(|| panic!("{what} lies elsewhere than the next weights")).address()
    };
    let (mut from, mut to, mut count) = ([Address::NOWHERE; SLOTS_MAX], [Address::NOWHERE; SLOTS_MAX], 0);
    for slot in slots {
        assert!(count < SLOTS_MAX, "more than {SLOTS_MAX} slots given");
        (from[count], to[count]) = match slot {
            Slot::InPlace(slot) => (here(slot, "a slot"), here(slot, "a slot")),
            Slot::Moved { from, to } => (here(from, "a slot"), here(to, "a slot")),
        };
        count += 1;
    }
    let (_, slots, _) = update.rule.kernel();
    assert_eq!(count, slots, "{count} slots given, the update rule has {slots}");
    let weights = here(weights, "the chunk of weights");
    next.queue(|next| {
        let (left, right) =
            (next.near(left.source())?, right.map(|right| next.near(right.source())).transpose()?);
        let right_address = right.as_ref().map_or(Address::NOWHERE, Near::address);
        let (left, next_weights) = (left.address(), next.address());
        // SAFETY: all have one length, checked above, and what is written is borrowed alone.
        unsafe {
            let pass = Pass { length, weights, left, right: right_address, from, to, next: next_weights };
            launch::apply(&**next.device(), update, &pass)
        }
    });
}

/// Returns what one chunk on a device contributes to the norms, or NaN if the device failed.
///
/// # Panics
/// The panics of [`Update::measure`], and if a slot lies on no device or another one.
pub(crate) fn measure<'a>(
    update: &Update,
    weights: &Storage,
    gradient: Operand<'_>,
    slots: impl IntoIterator<Item = &'a Storage>,
) -> Squares {
    let (size, length) = (weights.size(), weights.len() as u64);
    assert_eq!(gradient.size(), size, "bytes of the gradient");
    let weights = weights.on_any_device().unwrap_or_else(|| panic!("the weights lie on no device"));
    let (mut from, mut count) = ([Address::NOWHERE; SLOTS_MAX], 0);
    for slot in slots {
        assert!(count < SLOTS_MAX && slot.size() == size, "a slot of another length than the weights");
        let buffer = slot.on_any_device().filter(|buffer| Arc::ptr_eq(buffer.device(), weights.device()));
        from[count] = buffer.unwrap_or_else(|| panic!("a slot lies elsewhere than the weights")).address();
        count += 1;
    }
    let (_, slots, _) = update.rule.kernel();
    assert_eq!(count, slots, "{count} slots given, the update rule has {slots}");
    let measured = weights.near(gradient.source()).and_then(|gradient| {
        let sums = Buffer::zeros(weights.device(), SUMS_MAX * size_of::<f64>())?;
        let (to, right, next) = ([Address::NOWHERE; SLOTS_MAX], Address::NOWHERE, Address::NOWHERE);
        let (left, weights_address) = (gradient.address(), weights.address());
        let pass = Pass { length, weights: weights_address, left, right, from, to, next };
        // SAFETY: all have one length, checked above, and nobody else knows of the sums.
        unsafe { launch::measure(&**weights.device(), update, &pass, sums.address()) }?;
        sums.read()
    });
    match measured {
        Ok(sums) => {
            let mut values = [0.0; SUMS_MAX];
            for (value, raw) in values.iter_mut().zip(sums.as_chunks().0) {
                *value = f64::from_le_bytes(*raw);
            }
            cpu::squares_of(update, &values)
        }
        Err(error) => {
            weights.device().note(Err(error));
            Squares([f64::NAN; 2])
        }
    }
}
