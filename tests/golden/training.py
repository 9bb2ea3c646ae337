"""Trains 50 steps in plain PyTorch what `ebb run` trains in `tests/system/matches_pytorch.rs`, and writes the losses.

    python tests/golden/training.py        # PyTorch 2.11, NumPy; writes tests/golden/training.json

Everything that makes a run is rebuilt here from its definition, not copied from a run: the keyed random numbers
(`proto/src/random.rs`), the record order (`proto/src/plan.rs`), the split, and the initial weights. So the numbers
also check that those are what they say they are. A step is `effective` consecutive records of the epoch's order.
"""

import gzip
import json
import math
import pathlib

import numpy as np
import torch
from torch import nn

HERE = pathlib.Path(__file__).parent
DIGITS = HERE.parent.parent / "examples" / "digits"
MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
STEPS, EFFECTIVE, SEED = 50, 128, 7


def mix(z):
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def key(seed, purpose, position):
    state = mix(seed ^ GOLDEN)
    for byte in purpose.encode():
        state = (mix(state ^ byte) + GOLDEN) & MASK
    return mix(state ^ mix((position + GOLDEN) & MASK))


def uniform(seed, purpose, count, low, high):
    state, out = key(seed, purpose, 0), np.empty(count, np.float32)
    for i in range(count):
        state = (state + GOLDEN) & MASK
        unit = np.float32(mix(state) >> 40) * np.float32(1.0 / (1 << 24))
        out[i] = np.float32(low) + (np.float32(high) - np.float32(low)) * unit
    return out


def permutation(length, k):
    """A Feistel network of twelve rounds on the next even power of two, walked until it lands inside."""
    bits = max(1, math.ceil((length - 1).bit_length() / 2))
    mask = (1 << bits) - 1

    def apply(at):
        while True:
            left, right = at >> bits, at & mask
            for r in range(12):
                left, right = right, left ^ (mix(right ^ mix(k ^ r)) & mask)
            at = (left << bits) | right
            if at < length:
                return at

    return [apply(i) for i in range(length)]


def idx(name, offset):
    return np.frombuffer(gzip.open(DIGITS / name).read()[offset:], np.uint8)


def digits():
    images = torch.from_numpy(idx("images.idx3.gz", 16).reshape(-1, 64).astype(np.float32) / np.float32(16))
    labels = torch.from_numpy(idx("labels.idx1.gz", 8).astype(np.int64))
    ranks = permutation(len(images), key(SEED, "split", 0))
    train = ranks[: len(images) - round(len(images) * 0.2)]
    return images[train], labels[train]


def mlp():
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            fan_in = 64 if name.startswith("0") else 32
            bound = 1 / math.sqrt(fan_in)
            tensor.copy_(torch.from_numpy(uniform(SEED, f"init/{name}", tensor.numel(), -bound, bound)).view_as(tensor))
    return model


def train(optimizer):
    images, labels = digits()
    model, losses = mlp(), []
    optimizer = optimizer(model.parameters())
    epoch = 0
    while len(losses) < STEPS:
        order = permutation(len(images), key(SEED, "order", epoch))
        for begin in range(0, len(order), EFFECTIVE):
            batch = order[begin : begin + EFFECTIVE]
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        epoch += 1
    return losses[:STEPS]


if __name__ == "__main__":
    torch.set_num_threads(1)
    cases = {
        "adam": train(lambda p: torch.optim.Adam(p, lr=3e-3, foreach=False)),
        "momentum": train(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=False)),
    }
    text = json.dumps({"torch": torch.__version__.split("+")[0], "losses": cases}, indent=1) + "\n"
    (HERE / "training.json").write_text(text)
    print({name: (losses[0], losses[-1]) for name, losses in cases.items()})
