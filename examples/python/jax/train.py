"""Trains a network on handwritten digits in JAX."""

import argparse
import functools
import gzip
from pathlib import Path

import ebbflow.jax
import jax
import numpy as np
import optax
from jax import numpy as jnp

DIGITS = Path(__file__).resolve().parents[2] / "digits"


def digits():
    """Return 1,437 images of 8x8 pixels with their digits to train on, and 360 to test with."""
    images = gzip.decompress((DIGITS / "images.idx3.gz").read_bytes())
    labels = gzip.decompress((DIGITS / "labels.idx1.gz").read_bytes())
    x = np.frombuffer(images, np.uint8, offset=16).reshape(-1, 8, 8, 1) / np.float32(16)
    y = np.frombuffer(labels, np.uint8, offset=8).astype(np.int32)
    return (x[:1437], y[:1437]), (x[1437:], y[1437:])


def first_params(key):
    """Return the parameters of two convolutions and a dense layer."""
    keys = jax.random.split(key, 3)
    init = jax.nn.initializers.he_normal()
    return {
        "conv1": {"kernel": init(keys[0], (3, 3, 1, 16)), "bias": jnp.zeros(16)},
        "conv2": {"kernel": init(keys[1], (3, 3, 16, 32)), "bias": jnp.zeros(32)},
        "out": {"kernel": init(keys[2], (512, 10)), "bias": jnp.zeros(10)},
    }


def convolved(layer, x):
    """Return the positive outputs of a convolution that keeps the size of images."""
    kernel, order = layer["kernel"], ("NHWC", "HWIO", "NHWC")
    x = jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=order)
    return jax.nn.relu(x + layer["bias"])


def apply(params, x, key=None):
    """Return the outputs for images; with a key, a half of the features is dropped."""
    x = convolved(params["conv2"], convolved(params["conv1"], x))
    x = x.reshape(-1, 4, 2, 4, 2, 32).max(axis=(2, 4)).reshape(-1, 512)
    if key is not None:
        x = jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x * 2, 0)
    return x @ params["out"]["kernel"] + params["out"]["bias"]


def loss_of(params, x, y, key=None):
    """Return the mean loss of a batch."""
    outputs = apply(params, x, key)
    return optax.softmax_cross_entropy_with_integer_labels(outputs, y).mean()


@jax.jit
def measure(params, x, y):
    """Return the mean loss and the accuracy of a batch."""
    right = apply(params, x).argmax(axis=1) == y
    return {"loss": loss_of(params, x, y), "accuracy": right.mean()}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--save", type=Path, help="file for the trained weights")
    args = parser.parse_args()

    train, test = digits()
    gradients_of = jax.jit(jax.value_and_grad(loss_of))
    params = first_params(jax.random.key(1))
    optimizer = functools.partial(optax.adam, 2e-3)
    settings = {"epochs": args.epochs, "micro": 16, "effective": 64, "seed": 1, "name": "jax"}
    with ebbflow.jax.join(params, optimizer, train, test, **settings) as job:
        for epoch in job.epochs():
            for batch in epoch:
                loss, gradients = gradients_of(job.params, batch.x, batch.y, batch.key)
                job.step(loss, gradients)
            print(job.evaluate(lambda batch: measure(job.params, batch.x, batch.y)))
    if args.save and job.elected:
        layers = job.params.items()
        named = {f"{layer}.{name}": a for layer, arrays in layers for name, a in arrays.items()}
        np.savez(args.save, **named)


if __name__ == "__main__":
    main()
