"""Writes the network of this example, a ResNet with weights drawn from a seed, as TorchScript:

    python examples/imagenet/model.py                              # resnet50.pt, 1000 classes, for job.toml
    python examples/imagenet/model.py --depth 18 --classes 20      # resnet18.pt, for job-small.toml
"""

import argparse
import pathlib

import torch
from torch import nn


def convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)


class Basic(nn.Module):
    """Two convolutions, beside what they got: the block of ResNet-18 and ResNet-34."""

    def __init__(self, inputs: int, width: int, stride: int):
        super().__init__()
        self.conv1, self.bn1 = convolution(inputs, width, 3, stride), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = convolution(width, width, 3), nn.BatchNorm2d(width)
        self.downsample = shortcut(inputs, width, stride)

    def forward(self, x):
        y = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(y)) + self.downsample(x))


class Bottleneck(nn.Module):
    """Three convolutions, beside what they got: the block of ResNet-50 and deeper networks.

    The stride is that of the second convolution, as in torchvision, and not of the first one, as in the paper.
    """

    def __init__(self, inputs: int, width: int, stride: int):
        super().__init__()
        self.conv1, self.bn1 = convolution(inputs, width, 1), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = convolution(width, width, 3, stride), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = convolution(width, 4 * width, 1), nn.BatchNorm2d(4 * width)
        self.downsample = shortcut(inputs, 4 * width, stride)

    def forward(self, x):
        y = torch.relu(self.bn1(self.conv1(x)))
        y = torch.relu(self.bn2(self.conv2(y)))
        return torch.relu(self.bn3(self.conv3(y)) + self.downsample(x))


def shortcut(inputs: int, outputs: int, stride: int) -> nn.Module:
    if inputs == outputs and stride == 1:
        return nn.Identity()
    return nn.Sequential(convolution(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))


# By depth: the block, how many times wider it is at its end, and the number of blocks in each of four layers.
DEPTHS = {18: (Basic, 1, [2, 2, 2, 2]), 34: (Basic, 1, [3, 4, 6, 3]), 50: (Bottleneck, 4, [3, 4, 6, 3])}


class ResNet(nn.Module):
    """He et al. (2015): images f32 `[n, 3, height, width]` to logits `[n, classes]`.

    Parameters and statistics have the names, shapes and initial distributions of torchvision's.
    """

    def __init__(self, depth: int, classes: int):
        super().__init__()
        block, wider, numbers = DEPTHS[depth]
        self.conv1, self.bn1 = convolution(3, 64, 7, 2), nn.BatchNorm2d(64)
        self.maxpool = nn.MaxPool2d(3, 2, padding=1)
        inputs, layers = 64, []
        for layer, number in enumerate(numbers):
            width, blocks = 64 << layer, []
            for place in range(number):
                stride = 2 if layer > 0 and place == 0 else 1
                blocks.append(block(inputs, width, stride))
                inputs = wider * width
            layers.append(nn.Sequential(*blocks))
        self.layer1, self.layer2, self.layer3, self.layer4 = layers
        self.fc = nn.Linear(inputs, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, image):
        x = self.maxpool(torch.relu(self.bn1(self.conv1(image))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(x.mean([2, 3]))


def main():
    parser = argparse.ArgumentParser(description="Writes a ResNet as TorchScript.")
    parser.add_argument("--depth", type=int, choices=sorted(DEPTHS), default=50, help="number of layers with weights")
    parser.add_argument("--classes", type=int, default=1000, help="number of outputs")
    parser.add_argument("--out", type=pathlib.Path, help="file to write [default: resnetDEPTH.pt beside this program]")
    arguments = parser.parse_args()
    out = arguments.out or pathlib.Path(__file__).with_name(f"resnet{arguments.depth}.pt")
    torch.manual_seed(7)
    torch.jit.script(ResNet(arguments.depth, arguments.classes)).save(str(out))
    print(f"{out}: ResNet-{arguments.depth}, {arguments.classes} classes")


if __name__ == "__main__":
    main()
