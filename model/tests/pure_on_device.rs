//! Networks of the pure engine on a CUDA device have the bits of the host, and a device that is
//! full or lost is an error with its meaning.
//!
//! The driver is the one of `kernels/tests/cuda/driver.cpp`, which runs the kernels on the host and
//! each operation as late as it may. With `EBB_TEST_DRIVER=real` it is the machine's own.
#![expect(clippy::unwrap_used, reason = "a panic is a failed test")]

use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use data::{Batch, DeviceValues};
use kernels::device::Devices;
use model::fault::{Fault, fault};
use model::{Allocator, Context, Device, Error, Evaluation, Gradients, Model, OwnMemory, Registry, Weights};
use proto::column::{ColumnSpec, ElementType};
use proto::tensor::{TensorSpec, Values};

use self::fake::Driver;

#[allow(dead_code, unreachable_pub, reason = "shared with the tests of the kernels")]
#[path = "../../kernels/tests/cuda/fake.rs"]
mod fake;
#[allow(unreachable_pub, reason = "shared with the tests of the kernels")]
#[path = "../../kernels/tests/cuda/library.rs"]
mod library;
#[allow(dead_code, unreachable_pub, reason = "shared with the tests of the whole program")]
#[path = "../../tests/harness/skip.rs"]
mod skip;

/// Inputs of each record.
const INPUTS: usize = 21;

/// Networks of every kind, with a loss that fits.
const NETWORKS: [(&str, &str); 6] = [
    (r#"builtin = "linear", options = { outputs = 3 }"#, "mse"),
    (r#"builtin = "linear", options = { outputs = 1 }"#, "bce_with_logits"),
    (r#"builtin = "softmax", options = { classes = 3 }"#, "cross_entropy"),
    (r#"builtin = "mlp", options = { hidden = [17, 33], classes = 3 }"#, "cross_entropy"),
    (r#"builtin = "mlp", options = { hidden = [40], activation = "tanh", outputs = 3 }"#, "mse"),
    (
        r#"builtin = "mlp", options = { hidden = [5, 4, 7], activation = "tanh", classes = 3 }"#,
        "cross_entropy",
    ),
];

/// The devices of this process, for one test at a time: some change what the driver does.
struct Driven {
    devices: Devices,
    _alone: MutexGuard<'static, ()>,
}

impl Driven {
    /// Opens the device. `None`: there is no NVRTC.
    fn open() -> Option<Self> {
        static ALONE: Mutex<()> = Mutex::new(());
        static CACHE: OnceLock<tempfile::TempDir> = OnceLock::new();
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        library::load_nvrtc();
        if !is_real() {
            Driver::load();
        }
        let cache = CACHE.get_or_init(|| tempfile::tempdir().unwrap()).path().join("kernels");
        let devices = Devices::new(Some(cache));
        match devices.cuda(0) {
            Ok(_) => Some(Self { devices, _alone: alone }),
            Err(kernels::Error::NoCompiler) => {
                skip::skipped(skip::Lacks::Package, "no NVRTC: no network was computed by a driver");
                None
            }
            Err(error) => panic!("{error}"),
        }
    }

    /// Opens the driver of the tests. `None`: there is no NVRTC, or the driver is another one.
    fn open_fake() -> Option<(Self, &'static Driver)> {
        let driven = Self::open()?;
        match is_real() {
            true => {
                let what = "EBB_TEST_DRIVER=real: what only the driver of the tests does was not tested";
                skip::skipped(skip::Lacks::Machine, what);
                None
            }
            false => Some((driven, Driver::load())),
        }
    }

    /// Builds a network on the device, with the weights of a seed.
    fn build(&self, network: (&str, &str)) -> Box<dyn Model> {
        build(network, Device::Cuda(0), &self.devices)
    }
}

#[expect(clippy::disallowed_methods, reason = "a person says through the environment which driver to use")]
fn is_real() -> bool {
    std::env::var("EBB_TEST_DRIVER").is_ok_and(|driver| driver == "real")
}

fn context((model, loss): (&str, &str), device: Device, devices: &Devices) -> Context {
    let text = format!(
        r#"name = "t"
        epochs = 1
        model = {{ {model}, loss = "{loss}" }}
        batch = {{ micro = 2 }}
        data = {{ format = "csv", train = {{ features = ["a"] }} }}
        optimizer = {{ kind = "sgd", learning_rate = 0.1 }}"#
    );
    Context {
        spec: Arc::new(proto::spec::parse(&text, Path::new("job.toml"), &[]).unwrap()),
        inputs: vec![ColumnSpec::fixed("features", ElementType::F32, [INPUTS])],
        label_max: None,
        artifacts: Default::default(),
        device,
        devices: devices.clone(),
        threads: 1,
    }
}

/// Builds a network with the weights of a seed.
fn build(network: (&str, &str), device: Device, devices: &Devices) -> Box<dyn Model> {
    let mut model = Registry::default().build(&context(network, device, devices)).unwrap();
    let weights = model.initial(5).unwrap();
    model.load(&weights).unwrap();
    model
}

/// Returns records with labels that fit the loss and the outputs of the network.
fn batch((model, loss): (&str, &str), records: usize) -> Batch {
    let values = |salt: usize, length: usize| -> Vec<f32> {
        (0..length).map(|at| ((at * 37 + salt) % 101) as f32 / 31.0 - 1.6).collect()
    };
    let labels = match loss {
        "cross_entropy" => Values::I64((0..records as i64).map(|record| record % 3).collect()),
        "bce_with_logits" => Values::F32((0..records).map(|record| (record % 2) as f32).collect()),
        _ => Values::F32(values(9, records * if model.contains("outputs = 3") { 3 } else { 1 })),
    };
    Batch::of(&values(1, records * INPUTS), &[INPUTS], &labels, records)
}

/// Returns the bits of floats, wherever they lie.
fn bits(values: &[Values]) -> Vec<Vec<u8>> {
    values.iter().map(|values| values.on_host().unwrap().bytes().to_vec()).collect()
}

/// Returns everything that a model computes of some records, as bits and text.
fn computed(model: &mut dyn Model, batch: &Batch) -> (u32, [Vec<Vec<u8>>; 2], String) {
    let plain = model.gradients(batch, 0).unwrap();
    let weighted = model.weighted_gradients(batch, 0, &OwnMemory).unwrap();
    assert_eq!(plain.loss.to_bits(), weighted.loss.to_bits());
    let prediction = model.predict(batch).unwrap();
    let both = model.evaluate_and_predict(batch).unwrap();
    assert_eq!(format!("{both:?}"), format!("{:?}", (model.evaluate(batch).unwrap(), &prediction)));
    let outputs = prediction.values::<f32>().unwrap().iter().map(|value| value.to_bits());
    let text = format!("{:?} {:?}", both.0, outputs.collect::<Vec<_>>());
    (plain.loss.to_bits(), [bits(&plain.values), bits(&weighted.values)], text)
}

#[test]
fn a_network_on_a_device_has_the_bits_of_the_host() {
    let Some(driven) = Driven::open() else { return };
    for network in NETWORKS {
        let (mut here, mut there) = (build(network, Device::Cpu, &driven.devices), driven.build(network));
        assert_eq!((here.device().ordinal(), there.device().ordinal()), (None, Some(0)));
        for records in [1, 2, 31, 64] {
            let batch = batch(network, records);
            let expected = computed(here.as_mut(), &batch);
            assert_eq!(computed(there.as_mut(), &batch), expected, "{network:?}, {records} records");
        }
    }
}

#[test]
fn gradients_stay_on_the_device_and_weights_are_taken_from_it() {
    let Some(driven) = Driven::open() else { return };
    let network = NETWORKS[3];
    let (mut here, mut there) = (build(network, Device::Cpu, &driven.devices), driven.build(network));
    let batch = batch(network, 9);
    // The gradients are weights of the right shapes.
    let gradients = there.gradients(&batch, 0).unwrap().values;
    assert!(gradients.iter().all(|values| matches!(values, Values::Device(_))));
    let host: Vec<_> = gradients.iter().map(|values| values.on_host().unwrap().into_owned()).collect();
    there.load(&gradients).unwrap();
    here.load(&host).unwrap();
    let expected = computed(here.as_mut(), &batch);
    assert_eq!(computed(there.as_mut(), &batch), expected);
    let initial = there.initial(5).unwrap();
    there.load(&initial).unwrap();
    there.load_shared(&Weights::from(gradients.clone())).unwrap();
    assert_eq!(computed(there.as_mut(), &batch), expected, "the last ones count");
    // A worker on the host may be given weights of a device.
    here.load(&initial).unwrap();
    here.load(&gradients).unwrap();
    assert_eq!(computed(here.as_mut(), &batch), expected);
    let said = there.load(&gradients[1..]).unwrap_err().to_string();
    assert!(said.contains("the network has [357, 17, 561, 33, 99, 3]"), "{said}");
}

/// Memory that must not be asked for.
struct Unasked;

impl Allocator for Unasked {
    fn floats(&self, _: usize) -> Option<Values> {
        panic!("memory of the host for gradients of a device")
    }
}

#[test]
fn gradients_of_a_device_are_weighted_there() {
    let Some(driven) = Driven::open() else { return };
    let network = NETWORKS[2];
    let weighted = driven.build(network).weighted_gradients(&batch(network, 3), 0, &Unasked).unwrap();
    assert!(weighted.values.iter().all(|values| matches!(values, Values::Device(_))));
}

/// Returns what a model's error says.
fn said<T: std::fmt::Debug>(result: Result<T, Error>) -> (String, Option<Fault>) {
    match result.unwrap_err() {
        Error::Engine { reason, .. } => (reason.clone(), fault(&reason)),
        other => panic!("{other}"),
    }
}

#[test]
fn a_full_device_fails_a_microbatch_with_the_figures_and_goes_on() {
    let Some((driven, driver)) = Driven::open_fake() else { return };
    let network = NETWORKS[3];
    let (mut here, mut there) = (build(network, Device::Cpu, &driven.devices), driven.build(network));
    let (small, large) = (batch(network, 7), batch(network, 100_000));
    // The features of the large batch do not fit, then the answers of the first layer.
    for memory in [4 << 20, 10 << 20] {
        driver.memory(memory);
        for _ in 0..2 {
            for (text, fault) in [
                said(there.gradients(&large, 0)),
                said(there.weighted_gradients(&large, 0, &OwnMemory)),
                said(there.evaluate(&large)),
                said(there.predict(&large)),
            ] {
                assert_eq!(fault, Some(Fault::OutOfMemory), "{text}");
                assert!(text.ends_with(&format!("of {memory} bytes are free")), "{text}");
            }
            assert_eq!(computed(there.as_mut(), &small), computed(here.as_mut(), &small));
        }
    }
    driver.memory(64 << 20);
}

#[test]
fn a_device_that_fails_is_an_error_of_every_microbatch_and_no_panic() {
    let network = NETWORKS[5];
    // What the driver says for memory that is damaged, that is not there, and for a wrong argument.
    for (error, expected) in [(214, Fault::Lost), (700, Fault::Spoiled), (1, Fault::Spoiled)] {
        let Some((driven, driver)) = Driven::open_fake() else { return };
        let (mut there, batch) = (driven.build(network), batch(network, 5));
        computed(there.as_mut(), &batch);
        driver.breaks(error);
        let found = [
            said(there.gradients(&batch, 0)),
            said(there.weighted_gradients(&batch, 0, &OwnMemory)),
            said(there.evaluate(&batch)),
            said(there.predict(&batch)),
            said(there.evaluate_and_predict(&batch)),
        ];
        for (text, fault) in found {
            assert_eq!(fault, Some(expected), "{error}: {text}");
        }
        let weights = there.initial(5).unwrap();
        drop(there.load(&weights));
        // Before another test begins.
        driver.breaks(0);
        drop((there, driven));
    }
}

/// A network whose device fails when its gradients are there.
struct FailsLate(Box<dyn Model>, &'static Driver);

impl Model for FailsLate {
    fn tensors(&self) -> Vec<TensorSpec> {
        self.0.tensors()
    }

    fn device(&self) -> kernels::Device {
        self.0.device()
    }

    fn initial(&mut self, seed: u64) -> Result<Vec<Values>, Error> {
        self.0.initial(seed)
    }

    fn load(&mut self, weights: &[Values]) -> Result<(), Error> {
        self.0.load(weights)
    }

    fn gradients(&mut self, batch: &Batch, key: u64) -> Result<Gradients, Error> {
        let gradients = self.0.gradients(batch, key);
        self.1.breaks(700);
        gradients
    }

    fn evaluate(&mut self, batch: &Batch) -> Result<Evaluation, Error> {
        self.0.evaluate(batch)
    }
}

#[test]
fn a_device_that_fails_is_an_error_of_the_call_that_used_it() {
    let network = NETWORKS[2];
    // The call has another error, and nothing reads what the device computes for it.
    let Some((driven, driver)) = Driven::open_fake() else { return };
    let mut model = driven.build(network);
    let wrong = Batch::of(&[0.5; INPUTS], &[INPUTS], &Values::I64(vec![9]), 1);
    assert!(matches!(model.gradients(&wrong, 0), Err(Error::Label { label: 9, .. })));
    driver.breaks(700);
    assert_eq!(said(model.gradients(&wrong, 0)).1, Some(Fault::Spoiled));
    driver.breaks(0);
    drop((model, driven));
    // Gradients are there, and are multiplied by the number of records.
    let Some((driven, driver)) = Driven::open_fake() else { return };
    let mut model = FailsLate(driven.build(network), driver);
    let failed = model.weighted_gradients(&batch(network, 3), 0, &OwnMemory);
    assert_eq!(said(failed).1, Some(Fault::Spoiled));
    driver.breaks(0);
    drop((model, driven));
}

#[test]
fn a_device_that_is_not_there_is_named() {
    let Some(driven) = Driven::open() else { return };
    let context = context(NETWORKS[2], Device::Cuda(70), &driven.devices);
    let error = Registry::default().build(&context).err().unwrap();
    assert!(matches!(&error, Error::NoSuchDevice { device, .. } if device == "cuda:70"), "{error}");
    assert!(error.to_string().contains("no CUDA device 70: the driver shows"), "{error}");
    assert!(!error.is_fatal(), "another worker may have it");
}

#[test]
fn records_that_lie_on_the_device_already_are_read_there() {
    let Some(driven) = Driven::open() else { return };
    let network = NETWORKS[2];
    let plain = batch(network, 7);
    // Other content than on the host shows which of the two is read.
    let others: Vec<f32> = plain.features().iter().map(|value| value + 1.0).collect();
    let labels = Values::I64(plain.classes().unwrap().to_vec());
    let expected = build(network, Device::Cpu, &driven.devices)
        .gradients(&Batch::of(&others, &[INPUTS], &labels, 7), 0)
        .unwrap();
    let copy = driven.devices.cuda(0).unwrap().upload(&others[..]).unwrap();
    let placed = Batch { placed: DeviceValues::new(vec![Arc::new(copy)]), ..plain.clone() };
    let found = driven.build(network).gradients(&placed, 0).unwrap();
    assert_eq!(bits(&found.values), bits(&expected.values));
    // A copy of another length belongs to other records.
    let copy = driven.devices.cuda(0).unwrap().upload(&others[1..]).unwrap();
    let wrong = Batch { placed: DeviceValues::new(vec![Arc::new(copy)]), ..plain.clone() };
    let found = driven.build(network).gradients(&wrong, 0).unwrap();
    let expected = build(network, Device::Cpu, &driven.devices).gradients(&plain, 0).unwrap();
    assert_eq!(bits(&found.values), bits(&expected.values));
}
