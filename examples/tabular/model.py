"""The network of this example, and how `model.pt` was made:

    PYTHONHASHSEED=0 python examples/tabular/model.py        # PyTorch 2.11; the seed orders the code in the file
"""

import pathlib
import zipfile

import torch
from torch import nn


class TwoTowers(nn.Module):
    """An embedding of users, one of items, and a small network over both and two numbers."""

    def __init__(self, users: int, items: int):
        super().__init__()
        self.users = nn.Embedding(users, 4)
        self.items = nn.Embedding(items, 4)
        # The products of unit vectors would drown what there is to learn.
        for embedding in (self.users, self.items):
            nn.init.normal_(embedding.weight, std=0.3)
        self.rest = nn.Sequential(nn.Linear(4 + 2, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, user, item, numbers):
        both = self.users(user) * self.items(item)
        scaled = (numbers - torch.tensor([49.0, 11.5])) / torch.tensor([18.0, 7.0])
        return (both.sum(1) + self.rest(torch.cat([both, scaled], 1)).squeeze(1)).unsqueeze(1)


def export(path):
    """Writes the script without its debug files, which name this machine's folders."""
    torch.manual_seed(7)
    full = path.with_suffix(".full")
    torch.jit.script(TwoTowers(60, 40)).save(str(full))
    with zipfile.ZipFile(full) as source, zipfile.ZipFile(path, "w") as target:
        for item in source.infolist():
            if not item.filename.endswith(".debug_pkl"):
                target.writestr(zipfile.ZipInfo(f"model/{item.filename.split('/', 1)[1]}"), source.read(item))
    full.unlink()


if __name__ == "__main__":
    export(pathlib.Path(__file__).with_name("model.pt"))
