"""Trains a network on handwritten digits with a loop of ElasticDL's shape."""

import argparse
import gzip
import logging
from pathlib import Path

import numpy as np
import torch
from ebbflow.elastic import ElasticBroadcastObject, elastic_allreduce, run
from torch import nn, optim
from torch.nn import functional
from torch.utils.data import TensorDataset

DIGITS = Path(__file__).resolve().parents[2] / "digits"


def digits():
    """Return 1,437 images of 8x8 pixels with their digits to train on, and 360 to test with."""
    images = gzip.decompress((DIGITS / "images.idx3.gz").read_bytes())
    labels = gzip.decompress((DIGITS / "labels.idx1.gz").read_bytes())
    x = torch.from_numpy(np.frombuffer(images, np.uint8, offset=16).reshape(-1, 64) / 16).float()
    y = torch.from_numpy(np.frombuffer(labels, np.uint8, offset=8).astype(np.int64))
    return TensorDataset(x[:1437], y[:1437]), TensorDataset(x[1437:], y[1437:])


@elastic_allreduce
def train_step(optimizer):
    """Merge the gradients of a batch."""
    optimizer.step()


def elastic_train(dataset):
    """Train until the dataset, which has the batches of all epochs, ends."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10))
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    ElasticBroadcastObject.set_model(model)
    ElasticBroadcastObject.set_optimizer(optimizer)
    for step, (features, labels) in enumerate(dataset):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(features), labels)
        loss.backward()
        train_step(optimizer)
        if step % 20 == 0:
            logging.info("step = %s, loss = %.4f", step, loss.item())
    return dataset.job


def measure(model, batch):
    """Return the mean loss and the accuracy of a batch."""
    outputs = model(batch.x)
    right = (outputs.argmax(dim=1) == batch.y).float()
    return {"loss": functional.cross_entropy(outputs, batch.y), "accuracy": right.mean()}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--save", type=Path, help="file for the trained weights")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")

    def save(model, job):
        if args.save:
            torch.save(model.state_dict(), args.save)

    train, test = digits()
    settings = {"epochs": args.epochs, "micro": 16, "effective": 64, "seed": 1, "name": "elastic"}
    job = run(elastic_train, train, test, measure=measure, save_checkpoint=save, **settings)
    print(job.metrics, job.model_sha256)


if __name__ == "__main__":
    main()
