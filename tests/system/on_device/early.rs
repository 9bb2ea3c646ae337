//! A worker sends a gradient that lies on a device while the device has others to compute.

use kernels::Device;
use net::channel::Dialer;
use proto::ids::Version;
use proto::parameters::{Outcome, Target, Want};
use proto::tensor::{DType, Values};
use proto::wire::WireType;
use ps::Options;
use worker::exchange::{ComingSum, Connector};

use super::{Driver, library};
use crate::shared_memory::{Served, leaf, train_in, until, values};

#[allow(dead_code, unreachable_pub, reason = "shared with the tests of the kernels")]
#[path = "../../../kernels/tests/cuda/fake.rs"]
mod fake;

/// Returns values on a device.
fn placed(device: &Device, values: &Values) -> Values {
    let mut storage = device.zeros(DType::F32, values.len()).unwrap();
    storage.place(0, values.bytes());
    storage.into()
}

#[tokio::test]
async fn a_gradient_of_a_device_is_sent_while_the_device_has_others_to_compute() {
    let Some(_) = Driver::of_tests("no gradient of a device was sent") else { return };
    library::load_nvrtc();
    let driver = fake::Driver::load();
    let device = Device::cuda(0, None).unwrap();
    for wire in [WireType::F32, WireType::Bf16] {
        let reference = Served::exchanging(wire, None, Options::default());
        let reference = train_in(wire, &reference.client(&Connector::socket(Dialer::tcp())), 1).await;
        let served = Served::exchanging(wire, None, Options::default());
        let client = served.client(&Connector::socket(Dialer::tcp()));
        client.push(Target::Initial, values(0)).await.unwrap();
        for index in [2, 0, 3, 1] {
            let (maker, sum) = ComingSum::new();
            let making = async {
                let gradients: Vec<_> = values(1 + index)
                    .iter()
                    .map(|values| {
                        let mut values = placed(&device, values);
                        kernels::values::round(wire, &mut values);
                        values
                    })
                    .collect();
                let mut later = device.zeros(DType::F32, 8).unwrap();
                device.settle().unwrap();
                // Calls are counted from now on.
                driver.fail(c"", 0, 0, 0);
                for (tensor, values) in gradients.into_iter().enumerate().rev() {
                    maker.tell(tensor, values);
                    // The push has not read it yet: it belongs to this thread.
                    later.fill(1.0);
                    let before = driver.calls(c"cuStreamSynchronize");
                    until(|| driver.calls(c"cuStreamSynchronize") > before).await;
                    assert_eq!(driver.waiting(), 1, "the fill has not run, {wire:?}, tensor {tensor}");
                }
                maker.finish();
            };
            let (pushed, ()) = tokio::join!(client.push_coming(leaf(0, index), &sum), making);
            assert_eq!(pushed.unwrap(), Outcome::Merged);
        }
        let trained = client.pull(Want::Exact(Version(1))).await.unwrap().unwrap();
        assert!(*trained == *reference, "other bits, {wire:?}");
    }
}
