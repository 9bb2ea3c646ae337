"""Trains a small convolutional network on handwritten digits, as IBM's FabricModel does it."""

import argparse
import gzip
import os
from pathlib import Path

import numpy as np
import torch
from fabric_model import FabricModel
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

DATA_DIR = Path(os.environ.get("DATA_DIR", Path(__file__).resolve().parents[2] / "digits"))


class Net(nn.Module):
    """Two convolutions, two linear layers, and dropout."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.dropout = nn.Dropout(0.25)
        self.fc1 = nn.Linear(512, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, x):
        x = functional.relu(self.conv1(x))
        x = functional.relu(self.conv2(x))
        x = self.dropout(functional.max_pool2d(x, 2))
        return self.fc2(functional.relu(self.fc1(torch.flatten(x, 1))))


class Logger:
    """Prints a line for each test."""

    def on_train_begin(self):
        pass

    def on_train_end(self):
        pass

    def log_train_metrics(self, metrics, iteration, epoch, workers):
        pass

    def log_test_metrics(self, metrics, iteration, epoch):
        print(f"epoch {epoch}: loss {metrics['loss']:.4f}, accuracy {metrics['accuracy']:.4f}")


def get_dataset():
    """Return 1,437 images of 8x8 pixels with their digits to train on, and 360 to test with."""
    images = gzip.decompress((DATA_DIR / "images.idx3.gz").read_bytes())
    labels = gzip.decompress((DATA_DIR / "labels.idx1.gz").read_bytes())
    x = torch.from_numpy(np.frombuffer(images, np.uint8, offset=16).reshape(-1, 1, 8, 8) / 16)
    y = torch.from_numpy(np.frombuffer(labels, np.uint8, offset=8).astype(np.int64))
    x = (x.float() - 0.305) / 0.376
    return TensorDataset(x[:1437], y[:1437]), TensorDataset(x[1437:], y[1437:])


def accuracy(outputs, labels):
    return (outputs.argmax(dim=1) == labels).float().mean()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--lr", type=float, default=0.002)
    args = parser.parse_args()

    torch.manual_seed(1)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    edt_model = FabricModel(
        model,
        get_dataset,
        functional.cross_entropy,
        optimizer,
        metrics=[accuracy],
        driver_logger_callback=Logger(),
    )
    # The images are in memory, so processes that load records would only cost time.
    edt_model.train(args.epochs, args.batch_size, args.engines, num_dataloader_threads=0)


if __name__ == "__main__":
    main()
