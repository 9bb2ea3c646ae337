"""Golden numbers for the optimizers and the schedules: PyTorch 2.11 computes, `ebbflow-ps` must agree.

    pip install torch==2.11.0 numpy && python tests/golden/optimizers.py

writes beside this file, for `kernels/tests/optimizers_match_torch.rs`:

- `optimizers.json`: weights and slots after some of 100 steps, by PyTorch as it comes, with its AVX2 kernels. They fuse
  multiply and add in some places, and there only in the vectorised lanes and not in the scalar tail; the square root is
  MKL's, which is up to 0.75 of the last place off. So the last bits depend on the CPU and on the length of the tensor.
- `optimizers_ieee.json`: the same by its portable kernels (no fused multiply-add) and with the square root rounded as
  IEEE 754 says. Every operation is exactly defined, so these can be matched to the bit.
- `schedules.json`: the factor of the learning rate at each step.

Which kernels run is decided when torch is imported, so the script runs itself once for each.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, LinearLR, SequentialLR, StepLR

HERE = Path(__file__).parent
ELEMENTS = 33  # vectors of any width and a scalar tail
STEPS = 100
KEPT = (1, 2, 10, 100)
# One per element, repeated: ordinary gradients, none at all, some whose square is a subnormal f32 (1e-20) or zero
# (1e-30), some near Adam's eps, and huge ones whose square is still finite.
MAGNITUDES = [1, 0, 1e-30, 1e-20, 1e-8, 1e-3, 0.1, 10, 1e3, 1e6, 1e15]


def lcg(seed):
    """Knuth's MMIX generator: the top 24 bits as an f32 in [-1, 1). The Rust test has the same one."""
    state = seed
    while True:
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        yield np.float32((state >> 40) / 2**23 - 1.0)


def vector(numbers, magnitudes):
    return np.array([next(numbers) * np.float32(m) for m in magnitudes], dtype=np.float32)


def inputs():
    """Initial weights [33] and the gradients [100, 33]. Every seventh weight starts at zero."""
    numbers = lcg(20)
    weights = vector(numbers, [0 if i % 7 == 3 else 1 for i in range(ELEMENTS)])
    magnitudes = [MAGNITUDES[i % len(MAGNITUDES)] for i in range(ELEMENTS)]
    return weights, [vector(numbers, magnitudes) for _ in range(STEPS)]


# (name, the job's [optimizer] table, the PyTorch class, its arguments beside lr, scale of the gradient)
SGD, ADAM, ADAMW, ADAGRAD = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad
RMSPROP, ADADELTA = torch.optim.RMSprop, torch.optim.Adadelta
CASES = [
    ("sgd", dict(kind="sgd", learning_rate=0.1), SGD, {}, 1),
    ("sgd, mean of 3 samples", dict(kind="sgd", learning_rate=0.1), SGD, {}, 1 / 3),
    ("sgd, weight decay", dict(kind="sgd", learning_rate=0.05, weight_decay=0.01), SGD, dict(weight_decay=0.01), 1),
    ("momentum", dict(kind="momentum", learning_rate=0.01), SGD, dict(momentum=0.9), 1),
    (
        "momentum, dampening and weight decay",
        dict(kind="momentum", learning_rate=0.02, momentum=0.8, dampening=0.3, weight_decay=1e-3),
        SGD,
        dict(momentum=0.8, dampening=0.3, weight_decay=1e-3),
        1,
    ),
    ("nesterov", dict(kind="nesterov", learning_rate=0.01), SGD, dict(momentum=0.9, nesterov=True), 1),
    (
        "nesterov, weight decay",
        dict(kind="nesterov", learning_rate=0.03, momentum=0.95, weight_decay=5e-4),
        SGD,
        dict(momentum=0.95, nesterov=True, weight_decay=5e-4),
        1 / 7,
    ),
    ("adam", dict(kind="adam", learning_rate=1e-3), ADAM, {}, 1),
    ("adam, mean of 96 samples", dict(kind="adam", learning_rate=1e-3), ADAM, {}, 1 / 96),
    (
        "adam, other betas, eps and weight decay",
        dict(kind="adam", learning_rate=0.02, betas=[0.8, 0.99], eps=1e-6, weight_decay=0.01),
        ADAM,
        dict(betas=(0.8, 0.99), eps=1e-6, weight_decay=0.01),
        1,
    ),
    (
        # The new gradient's share is above one half: PyTorch's lerp computes from the other end.
        "adam, first beta below one half",
        dict(kind="adam", learning_rate=0.01, betas=[0.3, 0.9]),
        ADAM,
        dict(betas=(0.3, 0.9)),
        1,
    ),
    (
        "adam, warm-up and cosine",
        dict(kind="adam", learning_rate=0.01, schedule=dict(kind="cosine", warmup_steps=10)),
        ADAM,
        {},
        1,
    ),
    ("adamw", dict(kind="adamw", learning_rate=1e-3), ADAMW, {}, 1),
    (
        "adamw, strong decay",
        dict(kind="adamw", learning_rate=0.05, betas=[0.9, 0.95], weight_decay=0.1),
        ADAMW,
        dict(betas=(0.9, 0.95), weight_decay=0.1),
        1 / 5,
    ),
    ("adagrad", dict(kind="adagrad", learning_rate=0.01), ADAGRAD, {}, 1),
    (
        "adagrad, all settings",
        dict(
            kind="adagrad",
            learning_rate=0.1,
            lr_decay=0.05,
            weight_decay=0.01,
            initial_accumulator_value=0.1,
            eps=1e-8,
        ),
        ADAGRAD,
        dict(lr_decay=0.05, weight_decay=0.01, initial_accumulator_value=0.1, eps=1e-8),
        1 / 3,
    ),
    ("amsgrad", dict(kind="amsgrad", learning_rate=1e-3), ADAM, dict(amsgrad=True), 1),
    (
        "amsgrad, all settings",
        dict(kind="amsgrad", learning_rate=0.02, betas=[0.8, 0.9], eps=1e-6, weight_decay=0.01),
        ADAM,
        dict(amsgrad=True, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.01),
        1 / 3,
    ),
    ("rmsprop", dict(kind="rmsprop", learning_rate=0.01), RMSPROP, {}, 1),
    (
        # A small eps would make the decay of a weight near zero a step of full length, whose sign any rounding turns.
        "rmsprop, momentum and weight decay",
        dict(kind="rmsprop", learning_rate=0.002, alpha=0.95, eps=1e-3, momentum=0.8, weight_decay=0.01),
        RMSPROP,
        dict(alpha=0.95, eps=1e-3, momentum=0.8, weight_decay=0.01),
        1 / 3,
    ),
    ("rmsprop, centered", dict(kind="rmsprop", learning_rate=0.01, centered=True), RMSPROP, dict(centered=True), 1),
    (
        "rmsprop, centered with momentum",
        dict(kind="rmsprop", learning_rate=0.005, alpha=0.9, eps=1e-3, centered=True, momentum=0.7, weight_decay=0.02),
        RMSPROP,
        dict(alpha=0.9, eps=1e-3, centered=True, momentum=0.7, weight_decay=0.02),
        1 / 5,
    ),
    ("adadelta", dict(kind="adadelta", learning_rate=1.0), ADADELTA, {}, 1),
    (
        "adadelta, all settings",
        dict(kind="adadelta", learning_rate=0.5, rho=0.8, eps=1e-4, weight_decay=0.01),
        ADADELTA,
        dict(rho=0.8, eps=1e-4, weight_decay=0.01),
        1 / 3,
    ),
    # The norm of the gradients is far above 1 (there are huge ones), and for the second far below the bound.
    ("sgd, clipped", dict(kind="sgd", learning_rate=0.1, weight_decay=0.01, clip_norm=2.5), SGD, dict(weight_decay=0.01), 1 / 3),
    ("adam, not clipped", dict(kind="adam", learning_rate=0.01, clip_norm=1e20), ADAM, {}, 1),
]

# (name, the job's `schedule` table, steps compared, optimizer -> PyTorch scheduler). The cosine is compared up to its
# last step only: past it PyTorch's rises again (it has period 2 * T_max) and ours stays at the minimum.
RATE = 0.4


def after_warmup(steps, rest):
    """`warmup_steps` as PyTorch spells it: a LinearLR that starts one increment above zero, then the schedule."""
    return lambda o: SequentialLR(o, [LinearLR(o, 1 / (steps + 1), 1.0, steps), rest(o)], [steps])


SCHEDULES = [
    ("step", dict(kind="step", every_steps=30, factor=0.1), 120, lambda o: StepLR(o, 30, 0.1)),
    ("exponential", dict(kind="exponential", factor=0.95), 120, lambda o: ExponentialLR(o, 0.95)),
    ("cosine", dict(kind="cosine", total_steps=120), 121, lambda o: CosineAnnealingLR(o, 120)),
    (
        "cosine with a minimum",
        dict(kind="cosine", total_steps=111, minimum_factor=0.05),
        112,
        lambda o: CosineAnnealingLR(o, 111, 0.05 * RATE),
    ),
    ("warm-up", dict(warmup_steps=8), 120, lambda o: LinearLR(o, 1 / 9, 1.0, 8)),
    (
        "warm-up and step",
        dict(kind="step", every_steps=40, factor=0.5, warmup_steps=15),
        120,
        after_warmup(15, lambda o: StepLR(o, 40, 0.5)),
    ),
    (
        "warm-up and exponential",
        dict(kind="exponential", factor=0.9, warmup_steps=5),
        120,
        after_warmup(5, lambda o: ExponentialLR(o, 0.9)),
    ),
    (
        "warm-up and cosine",
        dict(kind="cosine", total_steps=120, warmup_steps=20, minimum_factor=0.1),
        121,
        after_warmup(20, lambda o: CosineAnnealingLR(o, 100, 0.1 * RATE)),
    ),
]


def numbers(tensor):
    """f32 values as the shortest decimals that read back to the same f32."""
    out = [float(str(value)) for value in tensor.detach().numpy()]
    assert np.array_equal(np.array(out, dtype=np.float32), tensor.detach().numpy())
    return out


clip = torch.nn.utils.clip_grad_norm_


def clip_with_exact_norm(weights, clip_norm):
    """The same with the norm in f64: f32 sums depend on their order, which PyTorch does not promise."""
    norm = weights.grad.double().square().sum().pow(0.5).item()
    weights.grad.mul_(min(1.0, clip_norm / (norm + 1e-6)))


def run_case(spec, optimizer_class, arguments, scale):
    """The weights and slots after each step of KEPT."""
    initial, gradients = inputs()
    weights = torch.nn.Parameter(torch.from_numpy(initial.copy()))
    optimizer = optimizer_class([weights], lr=spec["learning_rate"], foreach=False, **arguments)
    scheduler = None
    if "schedule" in spec:
        warmup = spec["schedule"]["warmup_steps"]
        scheduler = after_warmup(warmup, lambda o: CosineAnnealingLR(o, STEPS - warmup))(optimizer)
    after = {}
    for step, gradient in enumerate(gradients, start=1):
        weights.grad = torch.from_numpy(gradient * np.float32(scale))
        if "clip_norm" in spec:
            clip(weights, spec["clip_norm"])
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        if step in KEPT:
            slots = {k: v for k, v in optimizer.state[weights].items() if k != "step" and v is not None}
            after[str(step)] = dict(weights=numbers(weights), **{k: numbers(v) for k, v in slots.items()})
    return after


def run_schedule(steps, scheduler_of):
    """The factor (rate at a step over the base rate) of steps 0, 1, .."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=RATE)
    scheduler = scheduler_of(optimizer)
    factors = []
    for _ in range(steps):
        factors.append(optimizer.param_groups[0]["lr"] / RATE)
        optimizer.step()
        scheduler.step()
    return factors


def optimizers():
    return [
        dict(name=name, spec=spec, scale=float(str(np.float32(scale))), after=run_case(spec, kind, arguments, scale))
        for name, spec, kind, arguments, scale in CASES
    ]


def schedules():
    return [dict(name=name, schedule=table, factors=run_schedule(steps, of)) for name, table, steps, of in SCHEDULES]


def render(cases):
    """One case per line: small files, and a diff shows which cases changed."""
    lines = ",\n".join(json.dumps(case) for case in cases)
    version = torch.__version__.split("+")[0]  # without "+cpu" or "+cu130"
    return f'{{"torch": "{version}", "cases": [\n{lines}\n]}}\n'


def use_ieee_square_root():
    """In f64 and back, which rounds an f32's root correctly; the f64 root is off by far less than an f32 can see."""
    torch.Tensor.sqrt = lambda tensor: torch.pow(tensor.double(), 0.5).float()
    torch.Tensor.sqrt_ = lambda tensor: tensor.copy_(tensor.sqrt())


def main():
    assert torch.__version__.startswith("2.11."), f"golden numbers are PyTorch 2.11's, this is {torch.__version__}"
    kernels = os.environ.get("ATEN_CPU_CAPABILITY")
    if kernels is None:
        for kernels in ("avx2", "default"):
            subprocess.run([sys.executable, __file__], env=os.environ | {"ATEN_CPU_CAPABILITY": kernels}, check=True)
        return
    found = torch.backends.cpu.get_cpu_capability()
    assert found == kernels.upper(), f"asked for the {kernels} kernels, torch uses {found}"
    torch.set_num_threads(1)
    if kernels == "avx2":
        (HERE / "optimizers.json").write_text(render(optimizers()))
        (HERE / "schedules.json").write_text(render(schedules()))
    else:
        use_ieee_square_root()
        global clip
        clip = clip_with_exact_norm
        (HERE / "optimizers_ieee.json").write_text(render(optimizers()))


main()
