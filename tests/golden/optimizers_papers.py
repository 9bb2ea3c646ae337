"""Golden numbers for the optimizers that PyTorch does not have, written down from their papers, for the crate `kernels`.

    pip install numpy && python tests/golden/optimizers_papers.py

writes `optimizers_papers.json` beside this file, for `kernels/tests/optimizers_match_papers.rs`. Each case has weights and slots
twice: `single` rounds every operation to f32, in the order of the paper's formula, and has to be matched to the bit;
`double` is the formula in f64, which shows what the roundings are worth.

LAMB: You et al., "Large batch optimization for deep learning: training BERT in 76 minutes", 2019, algorithm 2, with the
identity as phi.
FTRL: McMahan et al., "Ad click prediction: a view from the trenches", 2013, algorithm 1.

PyTorch has the following two, with epsilon in another place:

Adam: Kingma and Ba, "Adam: a method for stochastic optimization", 2014. Before the correction of the bias, epsilon is the
"epsilon hat" of the last formula of its section 2, which Keras has. Under the root it is the `eps_root` of optax.
RMSProp: epsilon under the root, as in Keras and optax.
"""

import json
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
ELEMENTS = 33
STEPS = 100
KEPT = (1, 2, 10, 100)


def lcg(seed):
    """Knuth's MMIX generator: the top 24 bits as an f32 in [-1, 1). The Rust test has the same one."""
    state = seed
    while True:
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        yield np.float32((state >> 40) / 2**23 - 1.0)


def inputs():
    """Initial weights [33] and the gradients [100, 33]; every fifth coordinate's gradients are small, every seventh's nil."""
    numbers = lcg(20)
    weights = np.array([next(numbers) for _ in range(ELEMENTS)], dtype=np.float32)
    sizes = [0 if i % 7 == 3 else 1e-3 if i % 5 == 2 else 1 for i in range(ELEMENTS)]
    gradients = [np.array([next(numbers) * np.float32(s) for s in sizes], dtype=np.float32) for _ in range(STEPS)]
    return weights, gradients


def ftrl(real, w, slots, g, _, alpha, beta=1.0, l1=0.0, l2=0.0, **_initial):
    """Algorithm 1's last lines, and then its first: the weights that the next step reads."""
    alpha, beta, l1, l2 = real(alpha), real(beta), real(l1), real(l2)
    z, n = slots["z"], slots["n"]
    sigma = (np.sqrt(n + g * g) - np.sqrt(n)) / alpha
    z = z + (g - sigma * w)
    n = n + g * g
    w = np.where(np.abs(z) <= l1, real(0), -(z - np.sign(z) * l1) / ((beta + np.sqrt(n)) / alpha + l2))
    return w, dict(z=z, n=n)


def lamb(real, w, slots, g, step, alpha, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.01):
    """All elements are one tensor. Norms are taken in f64: an f32 sum would depend on its order."""
    b1, b2 = betas
    m, v = slots["exp_avg"], slots["exp_avg_sq"]
    m = m + real(1 - b1) * (g - m)  # b1 m + (1 - b1) g
    v = v * real(b2) + real(1 - b2) * g * g
    ratio = m / real(1 - b1**step) / (np.sqrt(v / real(1 - b2**step)) + real(eps))
    u = ratio + real(weight_decay) * w
    norms = [np.sqrt(np.sum(np.square(x.astype(np.float64)))) for x in (w, u)]
    w = w - real(alpha * norms[0] / norms[1]) * u
    return w, dict(exp_avg=m, exp_avg_sq=v)


def adam(real, w, slots, g, step, alpha, betas=(0.9, 0.999), eps=1e-8, root=0, hat=False, decay=0, largest=False):
    """Two orders of one formula. `decay` shrinks the weights; `largest` is AMSGrad, without a correction of its maximum."""
    b1, b2 = betas
    slots = dict(slots)
    m = slots["exp_avg"] + real(1 - b1) * (g - slots["exp_avg"])  # b1 m + (1 - b1) g
    v = slots["exp_avg_sq"] * real(b2) + real(1 - b2) * g * g
    slots |= dict(exp_avg=m, exp_avg_sq=v)
    if largest:
        slots["max_exp_avg_sq"] = v = np.maximum(slots["max_exp_avg_sq"], v)
    rate, correction = alpha / (1 - b1**step), 1 - b2**step
    if hat:
        w = w * real(1 - alpha * decay) - real(rate * np.sqrt(correction)) * m / (np.sqrt(v + real(root)) + real(eps))
    else:
        # sqrt(v / correction + root)
        denominator = np.sqrt(v + real(root * correction)) / real(np.sqrt(correction)) + real(eps)
        w = w * real(1 - alpha * decay) - real(rate) * m / denominator
    return w, slots


def rmsprop(real, w, slots, g, _, alpha, rho=0.9, eps=1e-7, momentum=0, centered=False):
    """Epsilon under the root alone."""
    slots = dict(slots)
    s = slots["square_avg"] * real(rho) + real(1 - rho) * g * g
    slots["square_avg"] = s
    if centered:
        a = slots["grad_avg"] + real(1 - rho) * (g - slots["grad_avg"])
        slots["grad_avg"] = a
        s = s - a * a
    root = np.sqrt(s + real(eps))
    if not momentum:
        return w - real(alpha) * g / root, slots
    slots["momentum_buffer"] = slots["momentum_buffer"] * real(momentum) + g / root
    return w - real(alpha) * slots["momentum_buffer"], slots


# Added beside the root, where there is no other epsilon: the ps need one that is not 0, and this one no sum notices.
TINY = 2.0**-126

# (name, the job's [optimizer] table, the rule, its slots' first values, its settings, scale of the gradient)
CASES = [
    ("ftrl", dict(kind="ftrl", learning_rate=0.1), ftrl, dict(z=0, n=0), {}, 1),
    (
        "ftrl, sparse, mean of 3 samples",
        dict(kind="ftrl", learning_rate=0.5, beta=0.2, l1=0.9, l2=0.1, initial_accumulator_value=0.1),
        ftrl,
        dict(z=0, n=0.1),
        dict(beta=0.2, l1=0.9, l2=0.1),
        1 / 3,
    ),
    ("lamb", dict(kind="lamb", learning_rate=0.01), lamb, dict(exp_avg=0, exp_avg_sq=0), {}, 1),
    (
        "lamb, all settings",
        dict(kind="lamb", learning_rate=0.05, betas=[0.8, 0.95], eps=1e-4, weight_decay=0.1),
        lamb,
        dict(exp_avg=0, exp_avg_sq=0),
        dict(betas=(0.8, 0.95), eps=1e-4, weight_decay=0.1),
        1 / 3,
    ),
    (
        "adam, eps before the correction",
        dict(kind="adam", learning_rate=0.01, eps=1e-7, eps_before_correction=True),
        adam,
        dict(exp_avg=0, exp_avg_sq=0),
        dict(eps=1e-7, hat=True),
        1,
    ),
    (
        "adamw, eps before the correction and under the root",
        dict(
            # A weight shrinks by 2^-9: any other factor is rounded, a hundred times.
            kind="adamw",
            learning_rate=0.015625,
            betas=[0.8, 0.95],
            eps=1e-3,
            eps_root=1e-5,
            eps_before_correction=True,
            weight_decay=0.125,
        ),
        adam,
        dict(exp_avg=0, exp_avg_sq=0),
        dict(betas=(0.8, 0.95), eps=1e-3, root=1e-5, hat=True, decay=0.125),
        1 / 3,
    ),
    (
        "amsgrad, eps before the correction",
        dict(kind="amsgrad", learning_rate=0.01, eps=1e-4, eps_before_correction=True),
        adam,
        dict(exp_avg=0, exp_avg_sq=0, max_exp_avg_sq=0),
        dict(eps=1e-4, hat=True, largest=True),
        1,
    ),
    (
        "adam, eps_root",
        dict(kind="adam", learning_rate=0.01, eps_root=1e-4),
        adam,
        dict(exp_avg=0, exp_avg_sq=0),
        dict(root=1e-4),
        1,
    ),
    (
        "rmsprop, eps_root",
        dict(kind="rmsprop", learning_rate=0.01, alpha=0.9, eps=TINY, eps_root=1e-7),
        rmsprop,
        dict(square_avg=0),
        {},
        1,
    ),
    (
        "rmsprop, eps_root, centered with momentum, mean of 3 samples",
        dict(
            kind="rmsprop",
            learning_rate=0.005,
            alpha=0.8,
            eps=TINY,
            eps_root=1e-4,
            momentum=0.7,
            centered=True,
        ),
        rmsprop,
        dict(square_avg=0, grad_avg=0, momentum_buffer=0),
        dict(rho=0.8, eps=1e-4, momentum=0.7, centered=True),
        1 / 3,
    ),
]


def run_case(real, spec, rule, initial, settings, scale):
    """The weights and slots after each step of KEPT."""
    w, gradients = inputs()
    w = w.astype(real)
    slots = {name: np.full(ELEMENTS, real(np.float32(value))) for name, value in initial.items()}
    after = {}
    for step, gradient in enumerate(gradients, start=1):
        g = gradient.astype(real) * real(np.float32(scale))
        w, slots = rule(real, w, slots, g, step, spec["learning_rate"], **settings)
        assert w.dtype == real and all(slot.dtype == real for slot in slots.values()), "an operation was not rounded"
        if step in KEPT:
            after[str(step)] = {name: [float(str(x)) for x in values] for name, values in dict(weights=w, **slots).items()}
    return after


def main():
    lines = []
    for name, spec, rule, initial, settings, scale in CASES:
        single, double = (run_case(real, spec, rule, initial, settings, scale) for real in (np.float32, np.float64))
        zeros = sum(value == 0 for value in single["100"]["weights"])
        assert spec.get("l1", 0) == 0 or 0 < zeros < ELEMENTS, "l1 shall make some weights zero, not all"
        case = dict(name=name, spec=spec, scale=float(str(np.float32(scale))), single=single, double=double)
        lines.append(json.dumps(case))
    (HERE / "optimizers_papers.json").write_text('{"cases": [\n' + ",\n".join(lines) + "\n]}\n")


main()
