"""Training of two networks on one device in a plain PyTorch loop, and the files from which Ebbflow trains them.

    python benches/peers/device.py write all FOLDER --device cuda:0      writes what Ebbflow reads
    echo | python benches/peers/device.py plain resnet50 FOLDER --device cuda:0
    echo | python benches/peers/device.py free gpt2 FOLDER --device cuda:0

Each line of input measures one window, of about SECONDS (3): `{"samples_per_second": .., "steps": ..}`. The loop is as
fast as plain PyTorch can be: records lie in memory of the device, and the optimizer is fused. `plain` has the settings
of Ebbflow: deterministic algorithms, no TF32. `free` lets cuDNN choose. `--small` is for processors, and computes in f32.
"""

import argparse
import importlib.util
import math
import os
import pathlib

import common
import numpy as np
import torch
from torch import nn

EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "examples"

# Scaling of bytes: (byte / 255 - MEAN) / STD.
MEAN, STD = 0.449, 0.226
# JPEG files in the folder `files`, in as many classes as the network has, at most.
CLASSES_OF_FILES = 10


def example(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / name / "model.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Resnet:
    """ResNet-50 on images of 224x224: 26 million parameters. Small: ResNet-18 on images of 32x32."""

    def __init__(self, small):
        self.small = small
        self.depth, self.classes, self.side = (18, 10, 32) if small else (50, 1000, 224)
        self.batch, self.records = (4, 64) if small else (256, 4096)

    def module(self):
        return example("imagenet").ResNet(self.depth, self.classes)

    def optimizer(self, parameters):
        return torch.optim.SGD(parameters, lr=0.01, momentum=0.9, fused=True)

    def data(self):
        random = np.random.default_rng(3)
        images = random.integers(0, 256, (self.records, 3, self.side, self.side), np.uint8)
        return images, random.integers(0, self.classes, self.records)

    def write(self, folder):
        images, labels = self.data()
        np.save(folder / "images.npy", images)
        np.save(folder / "labels.npy", labels)
        self.write_files(folder / "files", images, labels)

    def write_files(self, folder, images, labels):
        from PIL import Image

        # Photographs are smoother than noise, and larger than what the network sees.
        for number, (image, label) in enumerate(zip(images, labels)):
            place = folder / f"{label % CLASSES_OF_FILES}"
            place.mkdir(parents=True, exist_ok=True)
            coarse = Image.fromarray(image.transpose(1, 2, 0)[::8, ::8])
            coarse.resize((self.side * 3 // 2, self.side * 4 // 3), Image.BICUBIC).save(place / f"{number}.jpg", quality=90)

    def batches(self, device):
        images, labels = (torch.from_numpy(array).to(device) for array in self.data())

        def batch(places):
            return images[places].float().div_(255).sub_(MEAN).div_(STD), labels[places]

        return batch

    def loss(self, outputs, labels):
        return nn.functional.cross_entropy(outputs, labels)


class Gpt:
    """GPT-2 small whose output weights are its own: 163 million parameters. Small: the network of examples/gpt."""

    def __init__(self, small):
        self.small = small
        self.shape = (64, 16, 32, 2, 2) if small else (50257, 1024, 768, 12, 12)
        self.batch, self.records = (4, 64) if small else (8, 512)

    def module(self):
        return example("gpt").Gpt(*self.shape)

    def optimizer(self, parameters):
        return torch.optim.AdamW(parameters, lr=3e-4, weight_decay=0.1, fused=True)

    def data(self):
        words, length = self.shape[:2]
        random = np.random.default_rng(4)
        # The next token of the last one ends a record.
        return random.integers(0, words, self.records * length + 1, np.uint16)

    def write(self, folder):
        self.data().tofile(folder / "tokens.bin")

    def batches(self, device):
        length = self.shape[1]
        tokens = torch.from_numpy(self.data().astype(np.int64)).to(device)
        given, next_one = tokens[:-1].view(-1, length), tokens[1:].view(-1, length)
        return lambda places: (given[places], next_one[places])

    def loss(self, outputs, labels):
        return nn.functional.cross_entropy(outputs.flatten(0, 1), labels.flatten())


NETWORKS = {"resnet50": Resnet, "gpt2": Gpt}


def trainer(network, device):
    """A function that takes one step."""
    torch.manual_seed(7)
    model = network.module().to(device).train()
    optimizer, batch = network.optimizer(model.parameters()), network.batches(device)
    random = torch.Generator().manual_seed(5)
    places = iter(())

    def step():
        nonlocal places
        now = next(places, None)
        if now is None or len(now) < network.batch:
            places = iter(torch.randperm(network.records, generator=random).split(network.batch))
            now = next(places)
        inputs, labels = batch(now.to(device))
        optimizer.zero_grad()
        # Loss and outputs are computed as `model.autocast = "bf16"` does.
        with torch.autocast(device.type, torch.bfloat16, enabled=not network.small, cache_enabled=False):
            loss = network.loss(model(inputs), labels)
        loss.backward()
        optimizer.step()

    return step


def settle(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["plain", "free", "write"])
    parser.add_argument("network", choices=[*NETWORKS, "all"])
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--seconds", type=float, default=3)
    args = parser.parse_args()
    if args.what == "write":
        for name, kind in NETWORKS.items():
            network = kind(args.small)
            network.write(args.folder)
            torch.manual_seed(7)
            torch.jit.script(network.module()).save(str(args.folder / f"{name}.pt"))
        return
    device, network = torch.device(args.device), NETWORKS[args.network](args.small)
    if device.type == "cpu":
        torch.set_num_threads(1)
    if args.what == "plain":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False
    torch.backends.cudnn.benchmark = args.what == "free"
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    step = trainer(network, device)

    def seconds_of(steps):
        settle(device)

        def last():
            common.seconds_of(step, steps)
            settle(device)

        return common.seconds_of(last, 1)

    seconds_of(common.WARMUP_STEPS)
    steps = max(4, math.ceil(args.seconds / seconds_of(common.WARMUP_STEPS) * common.WARMUP_STEPS))

    def measure(_):
        return {"samples_per_second": steps * network.batch / seconds_of(steps), "steps": steps}

    common.serve(measure)


if __name__ == "__main__":
    main()
