//! Layers over named tensors, with PyTorch's names, defaults and distributions of initial values.

use proto::random::Keyed;
use tch::{Kind, TchError, Tensor};

use super::builtin::{Init, Weights};
use super::network::Mode;

/// `torch.nn.Linear`: `x W^T + b`.
#[derive(Debug)]
pub(super) struct Linear {
    weight: Tensor,
    bias: Tensor,
}

impl Linear {
    /// Adds `{name}.weight [outputs, inputs]` and `{name}.bias [outputs]`.
    pub(super) fn new(weights: &mut Weights, name: &str, inputs: usize, outputs: usize) -> tch::Result<Self> {
        let init = Init::fan_in(inputs);
        Ok(Self {
            weight: weights.parameter(&format!("{name}.weight"), &[outputs, inputs], init)?,
            bias: weights.parameter(&format!("{name}.bias"), &[outputs], init)?,
        })
    }

    /// Maps `[n, inputs]` to `[n, outputs]`.
    pub(super) fn forward(&self, x: &Tensor) -> tch::Result<Tensor> {
        x.f_linear(&self.weight, Some(&self.bias))
    }
}

/// `torch.nn.Conv2d` with a square kernel.
#[derive(Debug)]
pub(super) struct Conv {
    weight: Tensor,
    bias: Option<Tensor>,
    stride: i64,
    padding: i64,
}

impl Conv {
    /// Adds `{name}.weight [outputs, inputs, kernel, kernel]` and `{name}.bias [outputs]`; stride
    /// 1.
    pub(super) fn new(
        weights: &mut Weights,
        name: &str,
        channels: (usize, usize),
        kernel: usize,
        padding: i64,
    ) -> tch::Result<Self> {
        let (inputs, outputs) = channels;
        let init = Init::fan_in(inputs * kernel * kernel);
        let weight =
            weights.parameter(&format!("{name}.weight"), &[outputs, inputs, kernel, kernel], init)?;
        let bias = weights.parameter(&format!("{name}.bias"), &[outputs], init)?;
        Ok(Self { weight, bias: Some(bias), stride: 1, padding })
    }

    /// Adds `{name}.weight` alone. Its values are drawn as torchvision does for a convolution
    /// before a BatchNorm and a ReLU (He et al. 2015, `kaiming_normal_(mode="fan_out")`). The image
    /// keeps its size, divided by `stride`.
    pub(super) fn without_bias(
        weights: &mut Weights,
        name: &str,
        channels: (usize, usize),
        kernel: usize,
        stride: i64,
    ) -> tch::Result<Self> {
        let (inputs, outputs) = channels;
        let init = Init::Normal((2.0 / (outputs * kernel * kernel) as f64).sqrt() as f32);
        let weight =
            weights.parameter(&format!("{name}.weight"), &[outputs, inputs, kernel, kernel], init)?;
        Ok(Self { weight, bias: None, stride, padding: kernel as i64 / 2 })
    }

    /// Maps `[n, inputs, h, w]` to `[n, outputs, h', w']`.
    pub(super) fn forward(&self, x: &Tensor) -> tch::Result<Tensor> {
        x.f_conv2d(&self.weight, self.bias.as_ref(), self.stride, self.padding, 1, 1)
    }
}

/// `torch.nn.BatchNorm2d` (Ioffe, Szegedy 2015).
#[derive(Debug)]
pub(super) struct BatchNorm {
    name: String,
    weight: Tensor,
    bias: Tensor,
    mean: Tensor,
    variance: Tensor,
    batches: Tensor,
}

impl BatchNorm {
    /// Adds `{name}.weight`, `.bias`, `.running_mean`, `.running_var`, all `[channels]`, and
    /// `.num_batches_tracked`.
    pub(super) fn new(weights: &mut Weights, name: &str, channels: usize) -> tch::Result<Self> {
        Ok(Self {
            name: name.to_owned(),
            weight: weights.parameter(&format!("{name}.weight"), &[channels], Init::Constant(1.0))?,
            bias: weights.parameter(&format!("{name}.bias"), &[channels], Init::Constant(0.0))?,
            mean: weights.state(&format!("{name}.running_mean"), &[channels], Init::Constant(0.0))?,
            variance: weights.state(&format!("{name}.running_var"), &[channels], Init::Constant(1.0))?,
            batches: weights.counter(&format!("{name}.num_batches_tracked"))?,
        })
    }

    /// Normalises `[n, channels, h, w]` by the batch (training) or by the running statistics.
    pub(super) fn forward(&self, x: &Tensor, mode: Mode) -> tch::Result<Tensor> {
        let train = mode != Mode::Evaluate;
        if train {
            let values = x.numel() / self.mean.numel().max(1);
            if values < 2 {
                return Err(TchError::Shape(format!(
                    "`{}` has {values} value per channel, and one value has no variance; \
                     choose batch.micro so that no microbatch has a single record, or larger images",
                    self.name
                )));
            }
            let _ = tch::no_grad(|| self.batches.shallow_clone().f_add_scalar_(1))?;
        }
        let (weight, bias) = (Some(&self.weight), Some(&self.bias));
        x.f_batch_norm(weight, bias, Some(&self.mean), Some(&self.variance), train, 0.1, 1e-5, true)
    }
}

/// Applies dropout (Srivastava et al. 2014). The mask is a function of the microbatch's key and the
/// layer's name. No generator of libtorch's is involved, so CPU and CUDA draw the same mask, and
/// models on other threads are not disturbed.
pub(super) fn dropout(x: &Tensor, share: f32, name: &str, mode: Mode) -> tch::Result<Tensor> {
    let key = match mode {
        Mode::Train { key } if share > 0.0 => key,
        _ => return Ok(x.shallow_clone()),
    };
    let (keep, mut stream) = (1.0 - share, Keyed::new(key, name, 0));
    let draw = |_| if stream.next_f32() < keep { 1.0 / keep } else { 0.0 };
    let mask: Vec<f32> = (0..x.numel()).map(draw).collect();
    x.f_mul(&Tensor::f_from_slice(&mask)?.f_view_as(x)?.f_to_device(x.device())?)
}

/// Halves the image: keeps the largest value of each 2 x 2.
pub(super) fn halve(x: &Tensor) -> tch::Result<Tensor> {
    x.f_max_pool2d(2, 2, 0, 1, false)
}

/// Computes the mean of each channel, `[n, channels, h, w]` to `[n, channels]`, as
/// `AdaptiveAvgPool2d(1)` and a flatten do. This gradient is deterministic on CUDA too.
pub(super) fn mean_of_channels(x: &Tensor) -> tch::Result<Tensor> {
    x.f_mean_dim([2i64, 3].as_slice(), false, Kind::Float)
}
