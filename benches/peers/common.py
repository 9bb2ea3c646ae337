"""What the peers share: MNIST, the two networks, and the loop that measures when it is told to.

A peer stays up. Each line on its standard input is one measurement, answered by one JSON object on one line of its standard output;
it ends with its input. So windows of several systems can alternate, and only the one that is measured computes.
"""

import gzip
import json
import pathlib
import sys
import time

import numpy as np

BATCH = 64
CLASSES = 10
LEARNING_RATE = 0.01
MOMENTUM = 0.9
WARMUP_STEPS = 10
MLP = [784, 4096, 4096, 1024, CLASSES]


def mnist(folder):
    """Images `[n, 1, 28, 28]`, normalized, and labels."""
    folder = pathlib.Path(folder)
    images = gzip.open(folder / "t10k-images-idx3-ubyte.gz").read()
    labels = gzip.open(folder / "t10k-labels-idx1-ubyte.gz").read()
    images = np.frombuffer(images, np.uint8, offset=16).reshape(-1, 1, 28, 28).astype(np.float32)
    labels = np.frombuffer(labels, np.uint8, offset=8).astype(np.int64)
    return (images / 255 - 0.1307) / 0.3081, labels


def batches(count, seed):
    """Places of the records of one batch after another, without end: a new permutation for each epoch."""
    random = np.random.default_rng(seed)
    while True:
        order = random.permutation(count)
        for begin in range(0, count - BATCH + 1, BATCH):
            yield order[begin : begin + BATCH]


def seconds_of(step, steps):
    begin = time.perf_counter()
    for _ in range(steps):
        step()
    return time.perf_counter() - begin


def serve(measure):
    """One answer for each line of input; `measure` is given the line."""
    for line in sys.stdin:
        print(json.dumps(measure(line.strip())), flush=True)
