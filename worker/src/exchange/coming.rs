//! The sum of a node whose values are still being made: a *maker* tells them tensor by tensor, and
//! pushes take them as they are told.
//!
//! Always true here: a sum is whole only when its maker has said so. A maker that is dropped before
//! has failed, and then no push gets its last chunk ([`whole_or_not`]).

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures::stream::{self, Stream, StreamExt as _};
use kernels::values;
use proto::tensor::{ChunkValues, Values};
use tokio::sync::watch;

/// Tells the values of a sum.
#[derive(Debug)]
pub struct SumMaker(watch::Sender<State>);

/// A sum that is made while it is pushed. Clones are the same sum.
#[derive(Clone, Debug)]
pub struct ComingSum(watch::Receiver<State>);

#[derive(Debug, Default)]
struct State {
    /// Values in the order in which they were told, each with the number of its tensor.
    told: Vec<(usize, ChunkValues)>,
    is_whole: bool,
}

impl SumMaker {
    /// Tells the values of a tensor, once for each. A carrier can read those on a device while the
    /// device computes others.
    pub fn tell(&self, tensor: usize, mut values: Values) {
        values::seal(&mut values);
        self.0.send_modify(|state| state.told.push((tensor, values.into())));
    }

    /// Says that all values were told, and that they count.
    pub fn finish(self) {
        self.0.send_modify(|state| state.is_whole = true);
    }

    /// Returns a maker whose words reach this one later: each after a pause. For simulations.
    pub(crate) fn paced(self, mut pause: impl FnMut() -> Duration + Send + 'static) -> Self {
        let (maker, sum) = ComingSum::new();
        tokio::spawn(async move {
            let mut told = pin!(sum.told());
            while let Some(news) = told.next().await {
                let Ok(news) = news else { return };
                for (tensor, values) in news {
                    tokio::time::sleep(pause()).await;
                    self.0.send_modify(|state| state.told.push((tensor, values)));
                }
            }
            tokio::time::sleep(pause()).await;
            self.finish();
        });
        maker
    }
}

impl ComingSum {
    /// Creates a sum that is being made.
    pub fn new() -> (SumMaker, Self) {
        let (maker, sum) = watch::channel(State::default());
        (SumMaker(maker), Self(sum))
    }

    /// Creates a sum that is whole, from the values of all tensors.
    pub fn whole(values: Vec<Values>) -> Self {
        let (maker, sum) = Self::new();
        values.into_iter().enumerate().for_each(|(tensor, values)| maker.tell(tensor, values));
        maker.finish();
        sum
    }

    /// Returns whether all values were told.
    pub(crate) fn is_whole(&self) -> bool {
        self.0.borrow().is_whole
    }

    /// Waits until the first values are told. Never ends if there are none.
    pub(crate) async fn begun(&self) {
        let mut state = self.0.clone();
        if state.wait_for(|state| !state.told.is_empty()).await.is_err() {
            std::future::pending::<()>().await;
        }
    }

    /// Waits until the sum is whole, and returns the values of the tensors in their order. `None`:
    /// the maker has failed.
    pub(crate) async fn made(&self) -> Option<Arc<[ChunkValues]>> {
        let mut state = self.0.clone();
        let state = state.wait_for(|state| state.is_whole).await.ok()?;
        let mut told = state.told.clone();
        drop(state);
        told.sort_unstable_by_key(|(tensor, _)| *tensor);
        Some(told.into_iter().map(|(_, values)| values).collect())
    }

    /// Returns the values as they are told: in each item those that were told since the one before.
    /// The stream ends when the sum is whole. An item that is an error is the last: the maker has
    /// failed.
    pub(crate) fn told(self) -> impl Stream<Item = Result<Vec<(usize, ChunkValues)>, Failed>> + Send {
        stream::unfold(Some((self.0, 0)), async |state| {
            let (mut state, seen) = state?;
            let news = state.wait_for(|state| state.told.len() > seen || state.is_whole).await;
            let Ok(news) = news.map(|state| state.told[seen..].to_vec()) else {
                return Some((Err(Failed), None));
            };
            let seen = seen + news.len();
            (!news.is_empty()).then_some((Ok(news), Some((state, seen))))
        })
    }
}

/// Passes on batches of `count` things in all. The last thing comes only when `batches` have ended
/// without an error. So a receiver that counts them has all of them or an incomplete push.
///
/// The end of a request would not do: tonic's codec takes a request that was given up (`CANCEL`)
/// for one that has ended.
pub(crate) fn whole_or_not<T, E, S>(batches: S, count: usize) -> impl Stream<Item = Result<Vec<T>, E>>
where
    S: Stream<Item = Result<Vec<T>, E>> + Unpin,
{
    stream::unfold(Some((batches, count, None)), async |state| {
        let (mut batches, mut left, mut last) = state?;
        match batches.next().await {
            Some(Ok(mut batch)) => {
                left -= batch.len().min(left);
                if left == 0 && last.is_none() {
                    last = batch.pop();
                }
                Some((Ok(batch), Some((batches, left, last))))
            }
            Some(Err(error)) => Some((Err(error), None)),
            None => last.map(|last| (Ok(vec![last]), None)),
        }
    })
}

/// The maker of a sum has failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Failed;

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;

    fn values(value: f32) -> Values {
        Values::F32(vec![value])
    }

    fn read(values: &ChunkValues) -> Values {
        Values::from_bytes(proto::tensor::DType::F32, values.host())
    }

    #[test]
    fn values_are_there_as_they_are_told_and_whole_when_the_maker_says_so() {
        let (maker, sum) = ComingSum::new();
        let mut told = Box::pin(sum.clone().told());
        assert!(sum.begun().now_or_never().is_none() && told.next().now_or_never().is_none());
        maker.tell(2, values(2.0));
        maker.tell(0, values(0.5));
        assert!(sum.begun().now_or_never().is_some());
        let tensors = |news: &[(usize, ChunkValues)]| news.iter().map(|(at, _)| *at).collect::<Vec<_>>();
        assert_eq!(tensors(&told.next().now_or_never().unwrap().unwrap().unwrap()), [2, 0]);
        maker.tell(1, values(1.0));
        assert_eq!(tensors(&told.next().now_or_never().unwrap().unwrap().unwrap()), [1]);
        assert!(told.next().now_or_never().is_none() && sum.made().now_or_never().is_none());
        maker.finish();
        assert!(told.next().now_or_never().unwrap().is_none() && sum.is_whole());
        let made = sum.made().now_or_never().unwrap().unwrap();
        assert_eq!(made.iter().map(read).collect::<Vec<_>>(), [0.5, 1.0, 2.0].map(values));
    }

    #[test]
    fn a_maker_that_is_dropped_has_failed_although_all_values_were_told() {
        let (maker, sum) = ComingSum::new();
        maker.tell(0, values(1.0));
        drop(maker);
        let mut told = Box::pin(sum.clone().told());
        assert!(told.next().now_or_never().unwrap().unwrap().is_ok());
        assert_eq!(told.next().now_or_never().unwrap().unwrap().unwrap_err(), Failed);
        assert!(told.next().now_or_never().unwrap().is_none());
        assert!(!sum.is_whole() && sum.made().now_or_never().unwrap().is_none());
    }

    #[test]
    fn the_last_of_all_things_comes_only_after_a_good_end() {
        let all = |batches: Vec<Result<Vec<u8>, Failed>>, count| {
            let passed = whole_or_not(stream::iter(batches), count);
            passed.collect::<Vec<_>>().now_or_never().expect("nothing to wait for")
        };
        assert_eq!(all(vec![Ok(vec![1, 2]), Ok(vec![3])], 3), [Ok(vec![1, 2]), Ok(vec![]), Ok(vec![3])]);
        assert_eq!(all(vec![Ok(vec![1, 2, 3])], 3), [Ok(vec![1, 2]), Ok(vec![3])]);
        assert_eq!(all(vec![Ok(vec![1, 2, 3]), Ok(vec![])], 3), [Ok(vec![1, 2]), Ok(vec![]), Ok(vec![3])]);
        assert_eq!(all(vec![Ok(vec![1, 2, 3]), Err(Failed)], 3), [Ok(vec![1, 2]), Err(Failed)]);
        assert_eq!(all(vec![Ok(vec![1]), Err(Failed)], 3), [Ok(vec![1]), Err(Failed)]);
    }
}
