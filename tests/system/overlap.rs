//! Sums that are pushed while they are made, to a real ps: by every carrier the bits are those of
//! sums that are whole before, and a sum that is never made leaves nothing.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::collections::BTreeMap;
use std::sync::Arc;

use kernels::cpu::cast;
use model::weights::Weights;
use net::channel::Dialer;
use proto::ids::Version;
use proto::parameters::{Outcome, Parameters, Target, Want};
use proto::tensor::Values;
use proto::wire::WireType;
use ps::Options;
use worker::exchange::{ComingSum, Connector, Partitions, SumMaker};

use crate::shared_memory::{Served, leaf, memory, near, train_in, until, values};

/// Steps of a training.
const STEPS: u64 = 3;

fn served(wire: WireType) -> Served {
    Served::exchanging(wire, Some(memory()), Options::default())
}

/// Returns the values of a leaf of [`train_in`].
fn leaf_values(wire: WireType, step: u64, index: u32) -> Vec<Values> {
    let mut values = values(1 + 7 * step as u32 + index);
    values.iter_mut().for_each(|values| cast::round(wire, values.as_f32_mut().unwrap()));
    values
}

/// Waits until the ps receives a push.
async fn receives(served: &Served) {
    until(|| served.ps.metrics().push_bytes_in_flight.get() > 0).await;
}

/// Makes the last tensor, then the first. Between the two it waits for the ps, if the carrier sends
/// what is made.
async fn make(served: &Served, maker: &SumMaker, values: Vec<Values>, sends: bool) {
    for (tensor, values) in values.into_iter().enumerate().rev() {
        maker.tell(tensor, values);
        if sends {
            receives(served).await;
        }
    }
}

/// Trains as [`train_in`] does. Every sum is pushed while it is made.
async fn train_as_made(served: &Served, wire: WireType, client: &Partitions, sends: bool) -> Weights {
    client.push(Target::Initial, values(0)).await.unwrap();
    for step in 0..STEPS {
        client.pull(Want::Exact(Version(step))).await.unwrap().unwrap();
        for index in [2, 0, 3, 1] {
            let (maker, sum) = ComingSum::new();
            let making = async {
                make(served, &maker, leaf_values(wire, step, index), sends).await;
                maker.finish();
            };
            let (pushed, ()) = tokio::join!(client.push_coming(leaf(step, index), &sum), making);
            assert_eq!(pushed.unwrap(), Outcome::Merged);
        }
    }
    client.pull(Want::Exact(Version(STEPS))).await.unwrap().unwrap()
}

#[tokio::test]
async fn sums_that_are_pushed_as_they_are_made_give_the_same_bits_by_every_carrier() {
    for wire in [WireType::F32, WireType::Bf16, WireType::F16] {
        let reference = served(wire);
        let reference = train_in(wire, &reference.client(&Connector::socket(Dialer::tcp())), STEPS).await;
        for what in ["TCP", "a Unix socket", "another host", "shared memory", "one process"] {
            let served = served(wire);
            let (connector, sends) = match what {
                "TCP" => (Connector::socket(Dialer::tcp()), true),
                "a Unix socket" => (Connector::socket(Dialer::nearest()), true),
                "another host" => (Connector::shared_memory(Dialer::tcp(), memory(), Arc::default()), true),
                "shared memory" => (near(memory()).0, false),
                _ => {
                    let embedded: Arc<dyn Parameters> = Arc::new(served.ps.clone());
                    (Connector::embedded(BTreeMap::from([(served.url.clone(), embedded)])), false)
                }
            };
            let trained = train_as_made(&served, wire, &served.client(&connector), sends).await;
            assert!(*trained == *reference, "{what}, {wire}: other bits");
            assert_eq!(served.shared()[0], what == "shared memory", "{what}");
        }
    }
}

#[tokio::test]
async fn a_sum_that_is_never_made_leaves_nothing_and_its_repeat_counts_once() {
    let wire = WireType::F32;
    let reference = served(wire);
    let reference = train_in(wire, &reference.client(&Connector::socket(Dialer::tcp())), 1).await;
    let served = served(wire);
    let client = served.client(&Connector::socket(Dialer::tcp()));
    client.push(Target::Initial, values(0)).await.unwrap();
    for index in [2, 0, 3, 1] {
        let metrics = served.ps.metrics();
        let held = metrics.push_bytes_held.get();
        // The last one has sent all values, and was not finished.
        for count in [1, 2] {
            let (maker, sum) = ComingSum::new();
            let failing = async {
                let values = leaf_values(wire, 0, index).into_iter().enumerate().rev();
                values.take(count).for_each(|(tensor, values)| maker.tell(tensor, values));
                receives(&served).await;
                drop(maker);
            };
            let (pushed, ()) = tokio::join!(client.push_coming(leaf(0, index), &sum), failing);
            let error = pushed.unwrap_err().to_string();
            assert!(error.contains("its gradients were not all made"), "{error}");
            until(|| metrics.push_bytes_in_flight.get() == 0).await;
            assert_eq!(metrics.push_bytes_held.get(), held, "leaf {index}");
        }
        let push = async || client.push(leaf(0, index), leaf_values(wire, 0, index)).await.unwrap();
        assert_eq!(push().await, Outcome::Merged, "leaf {index}");
        assert_eq!(push().await, Outcome::Duplicate, "leaf {index}");
    }
    let trained = client.pull(Want::Exact(Version(1))).await.unwrap().unwrap();
    assert!(*trained == *reference, "other bits");
}
