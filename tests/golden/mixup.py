"""Golden numbers of mixup, from its definition alone: `proto::spec::mixup` and `data::mixed` must agree.

    python tests/golden/mixup.py        # needs numpy

writes `mixup.json` beside this file. `shares` are numbers with a beta distribution, from two with a gamma distribution (Marsaglia and Tsang
2000) of keyed random numbers. `batches` are what torchvision.transforms.v2.MixUp computes of a batch with a given share, in f32:

    inputs.roll(1, 0).mul_(1.0 - share).add_(inputs.mul(share)), and the same of one_hot(labels)
"""

import json
import math
from pathlib import Path

import numpy as np
from orders import GOLDEN, MASK, key, mix


class Keyed:
    """SplitMix64 that starts at a key."""

    def __init__(self, seed, purpose, position):
        self.state = key(seed, purpose, position)

    def bits(self):
        self.state = (self.state + GOLDEN) & MASK
        return mix(self.state) >> 11

    def uniform(self):
        return self.bits() / 2**53

    def normal(self):
        u, v = (self.bits() + 1) / 2**53, self.uniform()
        return float(np.float32(math.sqrt(-2 * math.log(u)) * math.cos(2 * math.pi * v)))


def log_gamma(keyed, alpha):
    if alpha < 1:
        larger = log_gamma(keyed, alpha + 1)
        return larger + math.log(1 - keyed.uniform()) / alpha
    d = alpha - 1 / 3
    while True:
        x = keyed.normal()
        v = (1 + x / math.sqrt(9 * d)) ** 3
        if v > 0 and math.log(1 - keyed.uniform()) < 0.5 * x * x + d - d * v + d * math.log(v):
            return math.log(d) + math.log(v)


def share(alpha, seed, microbatch):
    keyed = Keyed(seed, "mixup", microbatch)
    own, other = log_gamma(keyed, alpha), log_gamma(keyed, alpha)
    return 1 / (1 + math.exp(min(other - own, 700)))


def mixed(values, share):
    """What torch makes of f32 tensors: a factor becomes f32 before it multiplies."""
    return np.roll(values, 1, 0) * np.float32(1.0 - share) + values * np.float32(share)


def main():
    shares = []
    for alpha in [0.001, 0.2, 0.8, 1.0, 1.5, 32.0]:
        for seed, microbatch in [(0, 0), (7, 0), (7, 1), (7, 2), (2**64 - 1, 10**12), (5, 4711)]:
            shares.append({"alpha": alpha, "seed": seed, "microbatch": microbatch, "share": share(alpha, seed, microbatch)})

    random, batches = np.random.default_rng(31), []
    for samples, shape, classes, part in [(1, [3], 2, 0.3), (2, [2, 2], 3, 0.7512345), (5, [3], 4, share(0.2, 7, 1)), (4, [1], 2, 1.0), (3, [2], 3, 0.0)]:
        features = random.standard_normal([samples, *shape]).astype(np.float32)
        labels = random.integers(0, classes, samples)
        found = mixed(features, part)
        soft = mixed(np.eye(classes, dtype=np.float32)[labels], part)
        assert found.dtype == soft.dtype == np.float32
        flat = lambda values: [float(value) for value in values.ravel()]
        batches.append({
            "share": part, "classes": classes, "shape": shape, "features": flat(features), "labels": labels.tolist(),
            "mixed_features": flat(found), "mixed_labels": flat(soft),
        })
    lines = lambda rows: ",\n".join(json.dumps(row) for row in rows)
    text = f'{{"shares": [\n{lines(shares)}\n], "batches": [\n{lines(batches)}\n]}}\n'
    Path(__file__).with_name("mixup.json").write_text(text)


if __name__ == "__main__":
    main()
