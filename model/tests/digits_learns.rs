//! `examples/digits/job.toml` reaches the accuracy on its first line. The test uses the job's data,
//! network and numbering, with the optimizer written out here and without a cluster.
#![expect(clippy::unwrap_used, reason = "a panic is a failed test")]

use std::path::Path;
use std::sync::Arc;

use data::Dataset;
use model::Device;
use model::{Context, Model, Registry};
use proto::ids::{Epoch, Step};
use proto::optimizer::Rule;
use proto::plan::RecordOrder;
use proto::spec::{DataSet, JobSpec, Shuffle};
use proto::tensor::Values;

#[test]
fn digits_reaches_the_accuracy_that_its_first_line_states() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/digits/job.toml");
    let text = std::fs::read_to_string(&path).unwrap();
    let stated = text.lines().next().unwrap().split(' ').find_map(|word| word.parse::<f64>().ok()).unwrap();
    let spec = proto::spec::parse(&text, &path, &[]).unwrap();
    let accuracy = train(&spec);
    println!("accuracy {accuracy}");
    assert!(accuracy >= stated, "{accuracy}, stated is {stated}");
}

/// Trains, and returns the validation accuracy after the last step.
fn train(spec: &JobSpec) -> f64 {
    let train = Dataset::open(spec, DataSet::Train, None).unwrap();
    let validation = Dataset::open(spec, DataSet::Validation, None).unwrap();
    let context = Context {
        spec: Arc::new(spec.clone()),
        inputs: train.inputs(),
        label_max: train.label_range().unwrap().map(|(_, max)| max),
        artifacts: Default::default(),
        device: Device::Cpu,
        devices: Default::default(),
        threads: 1,
    };
    let mut model = Registry::default().build(&context).unwrap();
    let mut weights = model.initial(spec.seed).unwrap();
    let mut adam = Adam::new(spec, &weights);
    let plan = spec.plan(train.len());
    for step in (0..plan.steps()).map(Step) {
        model.load(&weights).unwrap();
        let mut sums: Vec<Values> =
            weights.iter().map(|values| Values::zeros(values.dtype(), values.len())).collect();
        for index in 0..plan.of(step) {
            let microbatch = plan.microbatch((plan.first_of(step).get() + u64::from(index)).into());
            let order = RecordOrder::new(
                plan.records,
                spec.seed,
                microbatch.epoch,
                spec.data.shuffle == Shuffle::Records,
            );
            let (begin, end) = microbatch.positions;
            let batch =
                train.batch(microbatch.epoch, (begin..end).map(|position| order.record(position))).unwrap();
            let mut gradients = model.gradients(&batch, 0).unwrap();
            for (sum, values) in sums.iter_mut().zip(&mut gradients.values) {
                values.as_f32_mut().unwrap().iter_mut().for_each(|value| *value *= batch.samples as f32);
                sum.merge(values);
            }
        }
        adam.step(step, plan.steps(), plan.samples_of(step), &mut weights, &sums);
    }
    accuracy(model.as_mut(), &weights, &validation)
}

fn accuracy(model: &mut dyn Model, weights: &[Values], data: &Dataset) -> f64 {
    model.load(weights).unwrap();
    model.evaluate(&data.batch(Epoch(0), 0..data.len()).unwrap()).unwrap().values()["accuracy"]
}

/// Adam as in the paper (Kingma and Ba, 2014), in f64.
struct Adam {
    spec: proto::optimizer::OptimizerSpec,
    betas: [f64; 2],
    eps: f64,
    moments: Vec<Vec<[f64; 2]>>,
}

impl Adam {
    fn new(spec: &JobSpec, weights: &[Values]) -> Self {
        let Ok(Rule::Adam { betas, eps, weight_decay: 0.0, .. }) = spec.optimizer.validate() else {
            panic!("this test has only plain Adam")
        };
        let moments = weights.iter().map(|values| vec![[0.0; 2]; values.len()]).collect();
        Self { spec: spec.optimizer.clone(), betas, eps, moments }
    }

    fn step(&mut self, step: Step, steps: u64, samples: u64, weights: &mut [Values], sums: &[Values]) {
        let rate = self.spec.learning_rate * self.spec.schedule.factor(step.get(), steps);
        let [beta1, beta2] = self.betas;
        let t = step.get() as i32 + 1;
        for ((weights, sums), moments) in weights.iter_mut().zip(sums).zip(&mut self.moments) {
            let (weights, sums) = (weights.as_f32_mut().unwrap(), sums.as_f32().unwrap());
            for ((weight, sum), [m, v]) in weights.iter_mut().zip(sums).zip(moments) {
                let gradient = f64::from(*sum) / samples as f64;
                *m = beta1 * *m + (1.0 - beta1) * gradient;
                *v = beta2 * *v + (1.0 - beta2) * gradient * gradient;
                let (m, v) = (*m / (1.0 - beta1.powi(t)), *v / (1.0 - beta2.powi(t)));
                *weight -= (rate * m / (v.sqrt() + self.eps)) as f32;
            }
        }
    }
}
