"""Trains a small ResNet on folders of images, with one subfolder for each class, as in ImageNet."""

import argparse
from pathlib import Path

import ebbflow
import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset


class Folder(Dataset):
    """Images f32 `[3, side, side]` and their classes. In training a random crop, maybe flipped."""

    def __init__(self, place, side, training):
        self.classes = sorted(folder.name for folder in place.iterdir())
        self.files = sorted(place.glob("*/*.jpg"))
        self.side, self.training = side, training

    def __len__(self):
        return len(self.files)

    def __getitem__(self, record):
        file = self.files[record]
        image = Image.open(file).convert("RGB")
        # The shorter side becomes a little longer than the crop.
        scale = self.side * 1.15 / min(image.size)
        image = image.resize([round(length * scale) for length in image.size], Image.BILINEAR)
        left, top = (length - self.side for length in image.size)
        if self.training:
            left, top = (int(torch.randint(space + 1, ())) for space in (left, top))
        else:
            left, top = left // 2, top // 2
        pixels = np.asarray(image.crop((left, top, left + self.side, top + self.side)), np.float32)
        x = torch.from_numpy(pixels).permute(2, 0, 1) / 64 - 2
        if self.training and torch.rand(()) < 0.5:
            x = x.flip(2)
        return x, self.classes.index(file.parent.name)


class Block(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)

    def forward(self, x):
        y = functional.relu(self.norm1(self.conv1(x)))
        return functional.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


def network(classes, width):
    widths = [width, width, 2 * width, 4 * width]
    blocks = [Block(*pair, 2) for pair in zip(widths, widths[1:])]
    first = nn.Conv2d(3, width, 3, padding=1)
    return nn.Sequential(
        first, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, classes)
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path, help="folder with `train` and `validation`")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--side", type=int, default=32, help="pixels of the network's input")
    parser.add_argument("--width", type=int, default=24, help="channels of the first layer")
    parser.add_argument("--loaders", type=int, default=2, help="processes that read images")
    args = parser.parse_args()
    torch.manual_seed(1)
    train = Folder(args.data / "train", args.side, training=True)
    validation = Folder(args.data / "validation", args.side, training=False)
    reading = {"batch_size": 32, "num_workers": args.loaders}
    train_loader = DataLoader(train, shuffle=True, **reading)
    validation_loader = DataLoader(validation, **reading)
    model = network(len(train.classes), args.width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    steps = args.epochs * -(-len(train) // 32)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)

    def measure(batch):
        outputs = model(batch.x)
        right = (outputs.argmax(1) == batch.y).float().mean()
        return {"loss": functional.cross_entropy(outputs, batch.y), "accuracy": right}

    options = {"scheduler": scheduler, "scheduler_every": "step", "epochs": args.epochs, "seed": 1}
    with ebbflow.join(
        model, optimizer, train_loader, validation_loader, name="images", **options
    ) as job:
        for epoch in job.epochs():
            for images, classes in epoch:
                job.step(functional.cross_entropy(model(images), classes))
            print(job.evaluate(measure))


if __name__ == "__main__":
    main()
