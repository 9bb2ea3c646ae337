//! A thread beside a backward pass on a device. The pass tells the device what to compute, and the
//! thread waits for what is computed.

use std::panic::resume_unwind;
use std::sync::mpsc;
use std::thread;

use crate::error::{Error, Result};

/// Runs `pass`, which tells things, also in other threads. Meanwhile a thread hands over each, in
/// the order in which they were told. After an error of `hand_over` the other things are dropped.
///
/// # Errors
/// The error of the pass, or that of `hand_over`; or no thread could be started.
///
/// # Panics
/// If `hand_over` panics.
pub(super) fn beside<T: Send>(
    pass: impl FnOnce(&(dyn Fn(T) + Sync)) -> Result<()>,
    hand_over: impl FnMut(T) -> Result<()> + Send,
) -> Result<()> {
    let (told, coming) = mpsc::channel();
    thread::scope(|scope| {
        let handing = thread::Builder::new()
            .name("gradients".to_owned())
            .spawn_scoped(scope, move || coming.into_iter().try_for_each(hand_over))
            .map_err(|error| Error::Engine {
                what: "start a thread".to_owned(),
                reason: error.to_string(),
            })?;
        // After an error nobody receives.
        let tell = move |thing| drop(told.send(thing));
        let passed = pass(&tell);
        drop(tell);
        let handed = handing.join().unwrap_or_else(|panic| resume_unwind(panic));
        passed.and(handed)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failed(reason: &str) -> Error {
        Error::Engine { what: "gradients".to_owned(), reason: reason.to_owned() }
    }

    #[test]
    fn what_is_told_is_handed_over_in_order_while_the_pass_goes_on() {
        let (seen, sees) = mpsc::channel();
        let mut handed = Vec::new();
        let pass = |tell: &(dyn Fn(i32) + Sync)| {
            for number in 0..3 {
                // Another thread tells it, as libtorch does.
                thread::scope(|scope| drop(scope.spawn(|| tell(number))));
                assert_eq!(sees.recv(), Ok(number), "it is handed over before the pass ends");
            }
            Ok(())
        };
        let hand_over = |number| {
            handed.push(number);
            seen.send(number).map_err(|error| failed(&error.to_string()))
        };
        beside(pass, hand_over).unwrap();
        assert_eq!(handed, [0, 1, 2]);
    }

    #[test]
    fn an_error_ends_the_handing_over_and_the_pass_goes_on_to_its_own() {
        let mut handed = 0;
        let pass = |tell: &(dyn Fn(()) + Sync)| {
            (0..5).for_each(|_| tell(()));
            Ok(())
        };
        let hand_over = |()| {
            handed += 1;
            Err(failed("no memory"))
        };
        let said = beside(pass, hand_over).unwrap_err().to_string();
        assert!(said.contains("no memory"), "{said}");
        assert_eq!(handed, 1);
        let pass = |tell: &(dyn Fn(()) + Sync)| {
            tell(());
            Err(failed("shapes"))
        };
        let both = beside(pass, |()| Err(failed("no memory")));
        assert!(both.unwrap_err().to_string().contains("shapes"), "the error of the pass comes first");
    }

    #[test]
    #[should_panic(expected = "a broken invariant")]
    fn a_panic_of_the_thread_is_one_of_the_caller() {
        let pass = |tell: &(dyn Fn(()) + Sync)| {
            tell(());
            Ok(())
        };
        let _ = beside(pass, |()| panic!("a broken invariant"));
    }
}
