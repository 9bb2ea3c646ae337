//! Reaches a validation loss below 0.012 (the noise in the data is 0.01): a network of your own,
//! with all of Ebbflow's commands.
//!
//!     cargo run --release --example custom_model -- run examples/custom_model/job.toml --out out

use ebbflow::data::predictions::PREDICTION;
use ebbflow::data::{Batch, Column};
use ebbflow::model::{Context, Evaluation, Gradients, Model, Registry};
use ebbflow::tensor::{TensorSpec, Values};
use ebbflow::{Error, Result};

/// The polynomial `y = w[0] + w[1] x + .. + w[degree] x^degree`, fitted by least squares.
struct Polynomial(Vec<f32>);

#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct Options {
    degree: usize,
}

fn build(context: &Context) -> Result<Box<dyn Model>> {
    let Options { degree } = context.options()?;
    let features = context.features()?;
    if features != [1] {
        let (model, expected) = ("polynomial".to_owned(), "[1]".to_owned());
        return Err(Error::Shape { model, expected, found: features.to_vec() });
    }
    Ok(Box::new(Polynomial(vec![0.0; degree + 1])))
}

impl Polynomial {
    /// Returns each record's x, and the error of the polynomial there.
    fn errors<'a>(&'a self, batch: &'a Batch) -> impl Iterator<Item = (f32, f32)> + 'a {
        let records = batch.features().iter().zip(batch.values().unwrap_or_default());
        records.map(|(&x, y)| (x, self.0.iter().rev().fold(0.0, |sum, w| sum * x + w) - y))
    }
}

impl Model for Polynomial {
    fn tensors(&self) -> Vec<TensorSpec> {
        vec![TensorSpec::parameter("weights", [self.0.len()])]
    }

    fn initial(&mut self, _seed: u64) -> Result<Vec<Values>> {
        Ok(vec![Values::F32(vec![0.0; self.0.len()])])
    }

    fn load(&mut self, weights: &[Values]) -> Result<()> {
        self.0 = weights.iter().filter_map(Values::as_f32).flatten().copied().collect();
        Ok(())
    }

    fn gradients(&mut self, batch: &Batch, _key: u64) -> Result<Gradients> {
        let (mut loss, mut gradient, n) = (0.0, vec![0.0; self.0.len()], batch.samples as f32);
        for (x, error) in self.errors(batch) {
            loss += error * error / n;
            let powers = std::iter::successors(Some(1.0), |power| Some(power * x));
            gradient.iter_mut().zip(powers).for_each(|(slope, power)| *slope += 2.0 * error * power / n);
        }
        Ok(Gradients { loss, values: vec![Values::F32(gradient)] })
    }

    fn evaluate(&mut self, batch: &Batch) -> Result<Evaluation> {
        let loss_sum = self.errors(batch).map(|(_, error)| f64::from(error * error)).sum();
        Ok(Evaluation { samples: batch.samples as u64, loss_sum, ..Evaluation::default() })
    }

    fn predict(&mut self, batch: &Batch) -> Result<Column> {
        let value = |x: &f32| self.0.iter().rev().fold(0.0, |sum, w| sum * x + w);
        let values: Vec<f32> = batch.features().iter().map(value).collect();
        Ok(Column::floats(PREDICTION, &[], batch.samples, &values))
    }
}

fn main() -> std::process::ExitCode {
    ebbflow::main(Registry::default().with("polynomial", build))
}
