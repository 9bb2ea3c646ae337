"""Trains a network on handwritten digits as a task with retries and a cache."""

import argparse
import gzip
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import ebbflow
import numpy as np
import torch
from ebbflow.flow import Parameters, Resources, task, workflow
from torch import nn, optim
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

DIGITS = Path(__file__).resolve().parents[2] / "digits"

# The variable that is missing, empty or 0 means: no.
SANDBOX = os.environ.get("SANDBOX", "") not in ("", "0")

requests = Resources(mem="100Mi", storage="500Mi") if SANDBOX else Resources(mem="1Gi", cpu=1)


@dataclass(frozen=True)
class Hyperparameters(Parameters):
    """What a training depends on."""

    batch_size: int = 64
    test_batch_size: int = 360
    epochs: int = 10
    learning_rate: float = 0.05
    sgd_momentum: float = 0.9
    seed: int = 1


class TrainingOutputs(NamedTuple):
    """What a training leaves."""

    epoch_accuracies: list[float]
    model_state: Path


def digits():
    """Return 1,437 images of 8x8 pixels with their digits to train on, and 360 to test with."""
    images = gzip.decompress((DIGITS / "images.idx3.gz").read_bytes())
    labels = gzip.decompress((DIGITS / "labels.idx1.gz").read_bytes())
    x = torch.from_numpy(np.frombuffer(images, np.uint8, offset=16).reshape(-1, 1, 8, 8) / 16)
    y = torch.from_numpy(np.frombuffer(labels, np.uint8, offset=8).astype(np.int64))
    x = (x.float() - 0.305) / 0.376
    return TensorDataset(x[:1437], y[:1437]), TensorDataset(x[1437:], y[1437:])


def measure(model, batch):
    """Return the mean loss and the accuracy of a batch."""
    output = model(batch.x)
    right = (output.argmax(dim=1) == batch.y).float()
    return {"loss": functional.cross_entropy(output, batch.y), "accuracy": right.mean()}


@task(retries=2, cache=True, cache_version="1.2", requests=requests)
def train(hp: Hyperparameters) -> TrainingOutputs:
    """Train in this process, or as one of several of a cluster."""
    torch.manual_seed(hp.seed)
    train_data, test_data = digits()
    train_loader = DataLoader(train_data, batch_size=hp.batch_size, shuffle=True)
    test_loader = DataLoader(test_data, batch_size=hp.test_batch_size)
    features = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    model = nn.Sequential(*features, nn.Linear(256, 10))
    optimizer = optim.SGD(model.parameters(), lr=hp.learning_rate, momentum=hp.sgd_momentum)
    options = {"epochs": hp.epochs, "seed": hp.seed, "name": "flow"}
    with ebbflow.join(model, optimizer, train_loader, test_loader, **options) as job:
        for epoch in job.epochs():
            for x, y in epoch:
                job.step(functional.cross_entropy(model(x), y))
            job.evaluate(lambda batch: measure(model, batch))
    model_file = Path(tempfile.mkdtemp()) / "digits.pt"  # The cache has its own copy.
    torch.save(model.state_dict(), model_file)
    return TrainingOutputs([entry["accuracy"] for entry in job.history], model_file)


@workflow
def training(hp: Hyperparameters) -> TrainingOutputs:
    """Train once."""
    return train(hp=hp)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    args = parser.parse_args()
    accuracies, model = training(Hyperparameters(epochs=args.epochs))
    print(f"model: {model}, accuracies: {accuracies}")


if __name__ == "__main__":
    main()
