//! Networks of the pure engine on a CUDA device have the bits of the host, and a device that is
//! full or lost is an error with its meaning.
//!
//! The driver is the one of `kernels/tests/cuda/driver.cpp`, which runs the kernels on the host and
//! each operation as late as it may. With `EBB_TEST_DRIVER=real` it is the machine's own.
#![expect(clippy::unwrap_used, reason = "a panic is a failed test")]

use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use data::{Batch, Column, Dataset, DeviceValues};
use kernels::device::Devices;
use model::fault::{Fault, fault};
use model::{
    Allocator, Context, Device, Error, Evaluation, Gradients, Inputs, Model, OwnMemory, Registry, Weights,
};
use proto::column::{ColumnSpec, ElementType};
use proto::ids::Epoch;
use proto::spec::DataSet;
use proto::tensor::{TensorSpec, Values};
use proto::wire::WireType;

use self::fake::{Call, Driver};

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
    let mut made = Vec::new();
    let mut take = |tensor, values| made.push((tensor, values));
    let loss = model.gradients_as_made(batch, 0, &OwnMemory, &mut take).unwrap();
    made.sort_by_key(|(tensor, _)| *tensor);
    let made: Vec<_> = made.into_iter().map(|(_, values)| values).collect();
    assert_eq!((loss.to_bits(), bits(&made)), (weighted.loss.to_bits(), bits(&weighted.values)));
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

#[test]
fn a_gradient_is_read_while_the_rest_of_the_pass_waits() {
    let Some((driven, driver)) = Driven::open_fake() else { return };
    let network = NETWORKS[5];
    let batch = batch(network, 9);
    let mut here = build(network, Device::Cpu, &driven.devices);
    let expected = here.weighted_gradients(&batch, 0, &OwnMemory).unwrap().values;
    let (mut first, mut waiting) = (None, Vec::new());
    let mut take = |tensor: usize, mut values: Values| {
        kernels::values::seal(&mut values);
        let (tensor, values) = first.get_or_insert((tensor, values));
        assert!(bits(std::slice::from_ref(values)) == bits(&expected[*tensor..=*tensor]));
        waiting.push(driver.waiting());
    };
    driven.build(network).gradients_as_made(&batch, 0, &OwnMemory, &mut take).unwrap();
    // Each read finds more operations that nobody has waited for.
    assert!(waiting.len() == expected.len() && waiting.is_sorted_by(|one, next| one < next), "{waiting:?}");
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
    let placed = Batch { placed: DeviceValues::new(vec![Some(Arc::new(copy))]), ..plain.clone() };
    let found = driven.build(network).gradients(&placed, 0).unwrap();
    assert_eq!(bits(&found.values), bits(&expected.values));
    // A copy of another length belongs to other records.
    let copy = driven.devices.cuda(0).unwrap().upload(&others[1..]).unwrap();
    let wrong = Batch { placed: DeviceValues::new(vec![Some(Arc::new(copy))]), ..plain.clone() };
    let found = driven.build(network).gradients(&wrong, 0).unwrap();
    let expected = build(network, Device::Cpu, &driven.devices).gradients(&plain, 0).unwrap();
    assert_eq!(bits(&found.values), bits(&expected.values));
}

/// Writes a file of u8 values.
fn npy(path: &Path, shape: &str, values: &[u8]) {
    let header = format!("{{'descr': '|u1', 'fortran_order': False, 'shape': ({shape}), }}\n");
    let length = (header.len() as u16).to_le_bytes();
    let bytes = [b"\x93NUMPY\x01\x00", &length[..], header.as_bytes(), values].concat();
    std::fs::write(path, bytes).unwrap();
}

/// Returns a data set of 9 records, whose input becomes 21 floats of one byte each.
fn bytes_on_disk(folder: &Path) -> Arc<Dataset> {
    npy(&folder.join("x"), "9, 21", &(0..9 * INPUTS).map(|at| (at * 53) as u8).collect::<Vec<_>>());
    npy(&folder.join("y"), "9", &[0, 1, 2, 0, 1, 2, 0, 1, 2]);
    let text = r#"name = "t"
        epochs = 1
        model = { builtin = "softmax", options = { classes = 3 }, loss = "cross_entropy" }
        batch = { micro = 7 }
        optimizer = { kind = "sgd", learning_rate = 0.1 }
        [data]
        format = "npy"
        train = { features = ["x"], labels = ["y"] }
        normalize = { scale = 255, mean = 0.1307, std = 0.3081 }"#;
    let spec = proto::spec::parse(text, &folder.join("job.toml"), &[]).unwrap();
    Dataset::open(&spec, DataSet::Train, None).unwrap()
}

/// Reads seven records, and leaves them on the device.
fn placed(inputs: &Inputs, data: &Dataset) -> Batch {
    let (batch, bad) = inputs.read(data, Epoch(0), [8, 0, 3, 5, 1, 2, 7], &Default::default()).unwrap();
    assert_eq!((batch.samples, bad.len()), (7, 0));
    inputs.placed(batch)
}

#[test]
fn records_cross_as_bytes_and_become_the_floats_of_the_host() {
    let Some((driven, driver)) = Driven::open_fake() else { return };
    let folder = tempfile::tempdir().unwrap();
    let (network, data) = (NETWORKS[2], bytes_on_disk(folder.path()));
    let device = driven.devices.cuda(0).unwrap();
    let on_host = placed(&Inputs::new(&kernels::Device::default(), &data, false), &data);
    assert_eq!(on_host.features().len(), 7 * INPUTS, "the host has floats");
    let expected = build(network, Device::Cpu, &driven.devices).gradients(&on_host, 0).unwrap();
    let uploaded = |inputs: &Inputs| {
        driver.count();
        let batch = placed(inputs, &data);
        (batch, driver.called(Call::UploadedByte))
    };
    let inputs = Inputs::new(&device, &data, false);
    let (batch, bytes) = uploaded(&inputs);
    assert_eq!((bytes, batch.inputs[0].bytes().len()), (7 * INPUTS as i64, 7 * INPUTS));
    let mut model = driven.build(network);
    assert_eq!(bits(&model.gradients(&batch, 0).unwrap().values), bits(&expected.values));
    let copy = batch.placed.get(0).unwrap();
    let floats = copy.read(WireType::F32, 0..copy.size()).unwrap();
    assert_eq!(floats, bytemuck::cast_slice::<f32, u8>(on_host.features()));
    // Floats of the host are what is mixed.
    let (batch, bytes) = uploaded(&Inputs::new(&device, &data, true));
    assert_eq!((bytes, batch.features()), (4 * 7 * INPUTS as i64, on_host.features()));
    assert_eq!(bits(&model.gradients(&batch, 0).unwrap().values), bits(&expected.values));

    // A device without room leaves it to the host, whatever is missing there.
    for allocation in 0..2 {
        driver.fail(c"cuMemAllocAsync", allocation, 2, 2);
        let batch = placed(&inputs, &data);
        assert_eq!(driver.calls(c"cuMemAllocAsync"), allocation + 2);
        driver.fail(c"", 0, 0, 0);
        assert!(batch.placed.get(0).is_none());
        assert_eq!(batch.features(), on_host.features());
        assert_eq!(bits(&model.gradients(&batch, 0).unwrap().values), bits(&expected.values));
    }
    driver.fail(c"cuMemAllocAsync", 0, 2, 2);
    let inputs = Inputs::new(&device, &data, false);
    driver.fail(c"", 0, 0, 0);
    let (batch, bytes) = uploaded(&inputs);
    assert_eq!((bytes, batch.features()), (4 * 7 * INPUTS as i64, on_host.features()), "no room for tables");
}

#[test]
fn integers_are_copied_ahead_and_other_types_stay_on_the_host() {
    let Some(driven) = Driven::open() else { return };
    let folder = tempfile::tempdir().unwrap();
    let data = bytes_on_disk(folder.path());
    let column = |dtype: ElementType, bytes: &[u8]| {
        let mut column = Column::with_capacity(ColumnSpec::fixed("x", dtype, []), 2);
        bytes.chunks(dtype.size()).for_each(|value| column.push(value));
        column
    };
    let words: [i64; 2] = [7, -9];
    let columns =
        vec![column(ElementType::I64, bytemuck::cast_slice(&words)), column(ElementType::I16, &[1, 2, 3, 4])];
    let batch = Batch { inputs: columns, ..Batch::of(&[0.0; 2], &[1], &Values::I64(vec![0, 1]), 2) };
    let placed = Inputs::new(&driven.devices.cuda(0).unwrap(), &data, true).placed(batch);
    let copy = placed.placed.get(0).unwrap();
    assert_eq!(copy.read(WireType::F32, 0..16).unwrap(), bytemuck::cast_slice::<i64, u8>(&words));
    assert!(placed.placed.get(1).is_none());
}
