//! The numerics class of libtorch in this process: facts that decide how it rounds, and the results
//! of a fixed set of operations, forward and backward.
//!
//! The operations are those of usual networks. At their sizes the libraries below libtorch (oneDNN,
//! MKL, ATen's own kernels) choose vector widths, cut long sums into blocks, and share work among
//! threads.
//!
//! A worker has one class for all its jobs, so the operations whose types autocast decides are
//! computed under autocast too. TF32 is for NVIDIA GPUs alone, whose facts name the GPU and the
//! versions of its libraries: they decide how TF32 rounds.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use proto::numerics::Numerics;
use proto::random::Keyed;
use proto::spec::Autocast;
use tch::{Kind, TchError, Tensor};

use super::network::device as place;
use super::{settings, shim};
use crate::device::Device;
use crate::error::{Error, Result};

/// Returns the class of gradients computed on `device` with this number of threads.
pub(in crate::engines) fn numerics(device: Device, threads: usize) -> Result<Numerics> {
    static KNOWN: Mutex<BTreeMap<(String, usize), Numerics>> = Mutex::new(BTreeMap::new());
    // Held while the class is computed, so that workers of one process compute it once.
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    let key = (device.to_string(), threads);
    if let Some(numerics) = known.get(&key) {
        return Ok(numerics.clone());
    }
    // A thread of its own, because the number of threads is a setting of each thread.
    let computing = std::thread::spawn(move || compute(device, threads));
    let panicked =
        || Error::Engine { what: "the numerics class".to_owned(), reason: "it panicked".to_owned() };
    let numerics = computing.join().map_err(|_| panicked())??;
    known.insert(key, numerics.clone());
    Ok(numerics)
}

fn compute(device: Device, threads: usize) -> Result<Numerics> {
    settings::start()?;
    let failed = |reason: String| Error::Engine { what: "the numerics class".to_owned(), reason };
    let index = match device {
        Device::Cpu => -1,
        Device::Cuda(index) => index as i32,
    };
    let library = shim::facts(index).map_err(failed)?;
    let results = results(device, threads)?;
    let count = if threads == 1 { "1 thread".to_owned() } else { format!("{threads} threads") };
    let hash = proto::artifact::sha256_hex(&results);
    Ok(Numerics::computed(&format!("{library}, {count}, results {}", &hash[..8]), &results))
}

/// Returns the bytes of the results.
fn results(device: Device, threads: usize) -> Result<Vec<u8>> {
    let failed =
        |error: TchError| Error::Engine { what: "the numerics class".to_owned(), reason: error.to_string() };
    let mut results = Results::on(place(device));
    let _computation = settings::compute(threads, false)?;
    results.operations().map_err(failed)?;
    for autocast in [Autocast::Bf16, Autocast::F16] {
        // From the inputs of the first pass.
        (results.autocast, results.inputs) = (Some(autocast), 0);
        results.lowered().map_err(failed)?;
    }
    Ok(results.bytes)
}

/// Inputs of the operations, and the bytes of their results.
struct Results {
    device: tch::Device,
    inputs: u64,
    /// Type of the autocast under which forward computes.
    autocast: Option<Autocast>,
    bytes: Vec<u8>,
}

impl Results {
    const fn on(device: tch::Device) -> Self {
        Self { device, inputs: 0, autocast: None, bytes: Vec::new() }
    }

    /// Returns new values between -1 and 1 at each call.
    fn input(&mut self, shape: &[i64]) -> tch::Result<Tensor> {
        self.inputs += 1;
        let mut stream = Keyed::new(0, "numerics", self.inputs);
        let values: Vec<f32> =
            (0..shape.iter().product::<i64>()).map(|_| stream.uniform(-1.0, 1.0)).collect();
        Tensor::f_from_slice(&values)?.f_view(shape)?.f_to_device(self.device)?.f_set_requires_grad(true)
    }

    /// Computes an operation as forward does. With autocast its input is in that type, as behind a
    /// product.
    fn forward(&self, x: &Tensor, of: impl FnOnce(&Tensor) -> tch::Result<Tensor>) -> tch::Result<Tensor> {
        let Some(autocast) = self.autocast else { return of(x) };
        let x = x.f_to_kind(shim::kind(autocast))?;
        let _autocast = shim::Autocast::begin(self.device, autocast).map_err(TchError::Torch)?;
        of(&x)
    }

    /// Adds the result of an operation, and the gradients of its inputs.
    fn take(&mut self, output: &Tensor, inputs: &[&Tensor]) -> tch::Result<()> {
        let weights = self.input(&output.size())?.f_detach()?;
        let total = output.f_mul(&weights)?.f_sum(Kind::Float)?;
        let gradients = Tensor::f_run_backward(&[total], inputs, false, false)?;
        for tensor in std::iter::once(output).chain(&gradients) {
            let tensor =
                tensor.f_detach()?.f_to_kind(Kind::Float)?.f_to_device(tch::Device::Cpu)?.f_contiguous()?;
            let begin = self.bytes.len();
            self.bytes.resize(begin + tensor.numel() * size_of::<f32>(), 0);
            tensor.f_copy_data_u8(&mut self.bytes[begin..], tensor.numel())?;
        }
        Ok(())
    }

    fn operations(&mut self) -> tch::Result<()> {
        self.lowered()?;
        self.reductions()
    }

    /// Computes the operations whose types autocast decides.
    fn lowered(&mut self) -> tch::Result<()> {
        self.products()?;
        self.convolutions()?;
        self.norms()?;
        self.functions()
    }

    fn products(&mut self) -> tch::Result<()> {
        for (records, inputs, outputs) in [(33, 784, 65), (4, 2304, 10), (128, 64, 192)] {
            let (x, w, b) =
                (self.input(&[records, inputs])?, self.input(&[outputs, inputs])?, self.input(&[outputs])?);
            let y = self.forward(&x, |x| x.f_linear(&w, Some(&b)))?;
            self.take(&y, &[&x, &w, &b])?;
        }
        let (q, k, v) =
            (self.input(&[2, 4, 40, 16])?, self.input(&[2, 4, 40, 16])?, self.input(&[2, 4, 40, 16])?);
        let y = self.forward(&q, |q| {
            let scores = q.f_matmul(&k.f_transpose(-2, -1)?)?.f_softmax(-1, Kind::Float)?;
            scores.f_matmul(&v)
        })?;
        self.take(&y, &[&q, &k, &v])
    }

    fn convolutions(&mut self) -> tch::Result<()> {
        // Channels in, channels out, width of the kernel, stride, groups.
        let layers =
            [(1, 16, 5, 1, 1), (16, 32, 3, 1, 1), (32, 64, 3, 2, 1), (64, 32, 1, 1, 1), (32, 32, 3, 1, 32)];
        for (from, to, kernel, stride, groups) in layers {
            let x = self.input(&[4, from, 14, 14])?;
            let (w, b) = (self.input(&[to, from / groups, kernel, kernel])?, self.input(&[to])?);
            let (stride, pad) = ([stride, stride], [kernel / 2, kernel / 2]);
            let y = self.forward(&x, |x| x.f_conv2d(&w, Some(&b), stride, pad, [1, 1], groups))?;
            self.take(&y, &[&x, &w, &b])?;
            let y = self.forward(&x, |x| x.f_max_pool2d([2, 2], [2, 2], [0, 0], [1, 1], false))?;
            self.take(&y, &[&x])?;
            let y = self.forward(&x, |x| x.f_avg_pool2d([2, 2], [2, 2], [0, 0], false, true, None::<i64>))?;
            self.take(&y, &[&x])?;
        }
        Ok(())
    }

    fn norms(&mut self) -> tch::Result<()> {
        let x = self.input(&[8, 32, 12, 12])?;
        let (w, b) = (self.input(&[32])?, self.input(&[32])?);
        let none = None::<&Tensor>;
        let y =
            self.forward(&x, |x| x.f_batch_norm(Some(&w), Some(&b), none, none, true, 0.1, 1e-5, false))?;
        self.take(&y, &[&x, &w, &b])?;
        let y = self.forward(&x, |x| x.f_group_norm(4, Some(&w), Some(&b), 1e-5, false))?;
        self.take(&y, &[&x, &w, &b])?;
        let x = self.input(&[48, 200])?;
        let (w, b) = (self.input(&[200])?, self.input(&[200])?);
        let y = self.forward(&x, |x| x.f_layer_norm([200], Some(&w), Some(&b), 1e-5, false))?;
        self.take(&y, &[&x, &w, &b])
    }

    fn functions(&mut self) -> tch::Result<()> {
        type Function = fn(&Tensor) -> tch::Result<Tensor>;
        let functions: [Function; 8] = [
            |x| x.f_softmax(-1, Kind::Float),
            |x| x.f_log_softmax(-1, Kind::Float),
            |x| x.f_gelu("none"),
            Tensor::f_silu,
            Tensor::f_tanh,
            Tensor::f_sigmoid,
            Tensor::f_exp,
            Tensor::f_erf,
        ];
        let x = self.input(&[64, 130])?;
        for function in functions {
            let y = self.forward(&x, function)?;
            self.take(&y, &[&x])?;
        }
        Ok(())
    }

    /// Reduces tensors that are long enough to be shared among threads.
    fn reductions(&mut self) -> tch::Result<()> {
        let x = self.input(&[40, 2500])?;
        let along = [Some(&[0i64][..]), Some(&[1][..]), None];
        for dims in along {
            self.take(&x.f_sum_dim_intlist(dims, false, Kind::Float)?, &[&x])?;
            self.take(&x.f_mean_dim(dims, false, Kind::Float)?, &[&x])?;
            self.take(&x.f_var_dim(dims, true, false)?, &[&x])?;
        }
        self.take(&x.f_norm()?, &[&x])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_class_knows_the_results_of_autocast() {
        let mut plain = Results::on(tch::Device::Cpu);
        let _computation = settings::compute(1, false).unwrap();
        plain.operations().unwrap();
        let all = std::thread::spawn(|| results(Device::Cpu, 1).unwrap()).join().unwrap();
        let (first, lower) = all.split_at(plain.bytes.len());
        let (bf16, f16) = lower.split_at(lower.len() / 2);
        assert!(first == plain.bytes && !f16.is_empty());
        assert!(bf16 != &first[..bf16.len()] && f16 != &first[..f16.len()], "they are those of f32");
        assert!(bf16 != f16, "both types give the same results");
    }

    #[test]
    fn the_class_is_the_same_each_time_and_another_with_other_threads() {
        let once = compute(Device::Cpu, 1).unwrap();
        assert_eq!(compute(Device::Cpu, 1).unwrap(), once);
        let twice = compute(Device::Cpu, 2).unwrap();
        assert_ne!(twice.class, once.class);
        let results =
            |numerics: &Numerics| numerics.facts.rsplit_once("results ").map(|(_, hash)| hash.to_owned());
        assert_ne!(results(&once), results(&twice), "the results differ too: {once}, {twice}");
        assert!(Numerics::try_from(proto::pb::Numerics::from(once)).is_ok(), "it can travel");
    }
}
