"""Trains a small convolutional network on images of handwritten digits."""

import argparse
import gzip
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

DIGITS = Path(__file__).resolve().parents[2] / "digits"


class Net(nn.Module):
    """Two convolutions, two linear layers, and dropout."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.dropout1 = nn.Dropout(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(512, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, x):
        x = functional.relu(self.conv1(x))
        x = functional.relu(self.conv2(x))
        x = self.dropout1(functional.max_pool2d(x, 2))
        x = functional.relu(self.fc1(torch.flatten(x, 1)))
        return functional.log_softmax(self.fc2(self.dropout2(x)), dim=1)


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
    x, y = batch
    output = model(x)
    right = (output.argmax(dim=1) == y).float()
    return {"loss": functional.nll_loss(output, y).item(), "accuracy": right.mean().item()}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=14)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1.0)
    parser.add_argument("--gamma", type=float, default=0.7)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--save", type=Path, help="file for the trained weights")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    train, test = digits()
    train_loader = DataLoader(train, batch_size=args.batch_size, shuffle=True)
    test_loader = DataLoader(test, batch_size=len(test))
    model = Net()
    optimizer = torch.optim.Adadelta(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=args.gamma)
    for epoch in range(args.epochs):
        model.train()
        for x, y in train_loader:
            optimizer.zero_grad()
            loss = functional.nll_loss(model(x), y)
            loss.backward()
            optimizer.step()
        scheduler.step()
        model.eval()
        with torch.no_grad():
            scores = [measure(model, batch) for batch in test_loader]
        print(scores)
    if args.save:
        torch.save(model.state_dict(), args.save)


if __name__ == "__main__":
    main()
