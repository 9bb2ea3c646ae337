"""The networks in PyTorch, their TorchScript for Ebbflow, and one process that trains.

    python benches/peers/torch_common.py FOLDER      writes FOLDER/convnet.pt and FOLDER/mlp.pt
"""

import pathlib
import sys

import common
import torch
from torch import nn


class Convnet(nn.Module):
    """Two convolutions and two linear layers: 1.2 million parameters."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2)
        )
        self.classifier = nn.Sequential(nn.Linear(9216, 128), nn.ReLU(), nn.Linear(128, common.CLASSES))

    def forward(self, images):
        return self.classifier(self.features(images).flatten(1))


class Mlp(nn.Module):
    """Four linear layers: 24 million parameters."""

    def __init__(self):
        super().__init__()
        layers = []
        for inputs, outputs in zip(common.MLP, common.MLP[1:]):
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        self.layers = nn.Sequential(*layers[:-1])

    def forward(self, images):
        return self.layers(images.flatten(1))


NETWORKS = {"convnet": Convnet, "mlp": Mlp}


def network(name):
    torch.manual_seed(7)
    return NETWORKS[name]()


def trainer(model, data, seed):
    """A function that takes one step, as fast as plain PyTorch can: the records are tensors in memory."""
    images, labels = (torch.from_numpy(array) for array in common.mnist(data))
    order = common.batches(len(images), seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=common.LEARNING_RATE, momentum=common.MOMENTUM)
    loss_of = nn.CrossEntropyLoss()

    def step():
        places = torch.from_numpy(next(order))
        optimizer.zero_grad()
        loss_of(model(images[places]), labels[places]).backward()
        optimizer.step()

    return step


if __name__ == "__main__":
    for name in NETWORKS:
        torch.jit.script(network(name)).save(str(pathlib.Path(sys.argv[1]) / f"{name}.pt"))
