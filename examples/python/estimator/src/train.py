"""Trains a small convolutional network on handwritten digits, as one process of a training job."""

import argparse
import os
from pathlib import Path

import ebbflow  # was: import smdistributed.dataparallel.torch.distributed as dist
import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset


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
        x = torch.flatten(self.dropout(functional.max_pool2d(x, 2)), 1)
        return functional.log_softmax(self.fc2(functional.relu(self.fc1(x))), dim=1)


def records(channel):
    """Return the records of a channel."""
    with np.load(Path(channel) / "digits.npz") as arrays:
        return TensorDataset(torch.from_numpy(arrays["x"]), torch.from_numpy(arrays["y"]))


def measure(model, batch):
    """Return the mean loss and the accuracy of a batch."""
    output = model(batch.x)
    right = (output.argmax(dim=1) == batch.y).float()
    return {"loss": functional.nll_loss(output, batch.y).item(), "accuracy": right.mean().item()}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=1.0)
    parser.add_argument("--gamma", type=float, default=0.7)
    parser.add_argument("--model-dir", default=os.environ["SM_MODEL_DIR"])
    parser.add_argument("--train-dir", default=os.environ["SM_CHANNEL_TRAIN"])
    parser.add_argument("--val-dir", default=os.environ["SM_CHANNEL_VAL"])
    args = parser.parse_args()

    torch.manual_seed(1)
    train = DataLoader(records(args.train_dir), batch_size=args.batch_size, shuffle=True)
    val = records(args.val_dir)
    model = Net()
    optimizer = torch.optim.Adadelta(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=args.gamma)
    options = {"scheduler": scheduler, "epochs": args.epochs, "effective": 2 * args.batch_size}
    with ebbflow.join(model, optimizer, train, val, **options) as job:
        for epoch in job.epochs():
            model.train()
            for x, y in epoch:
                job.step(functional.nll_loss(model(x), y))
            metrics = job.evaluate(lambda batch: measure(model, batch))
            print(f"val loss: {metrics['loss']:.4f}; val accuracy: {metrics['accuracy']:.4f};")
    if job.elected:  # was: if rank == 0:
        torch.save(model.state_dict(), Path(args.model_dir) / "model.pth")


if __name__ == "__main__":
    main()
