"""The network of this example, and how `model.pt` was made:

    PYTHONHASHSEED=0 python examples/mnist/model.py        # PyTorch 2.11; the seed orders the code in the file
"""

import pathlib
import zipfile

import torch
from torch import nn


class Net(nn.Module):
    """Two convolutions with BatchNorm, dropout, two linear layers: 56,810 parameters."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        )
        self.classifier = nn.Sequential(nn.Dropout(0.25), nn.Linear(32 * 5 * 5, 64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, images):
        return self.classifier(self.features(images).flatten(1))


def export(path):
    """`torch.jit.script(..).save(..)` is all it takes; what follows leaves out the debug files, which name this machine's
    folders."""
    torch.manual_seed(7)
    full = path.with_suffix(".full")
    torch.jit.script(Net()).save(str(full))
    with zipfile.ZipFile(full) as source, zipfile.ZipFile(path, "w") as target:
        for item in source.infolist():
            if not item.filename.endswith(".debug_pkl"):
                target.writestr(zipfile.ZipInfo(f"model/{item.filename.split('/', 1)[1]}"), source.read(item))
    full.unlink()


if __name__ == "__main__":
    export(pathlib.Path(__file__).with_name("model.pt"))
