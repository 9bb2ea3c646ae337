"""Measures a trained model in plain PyTorch, to compare with the run's `summary.json`.

    python examples/mnist/check.py out/model.safetensors        # PyTorch 2.11, NumPy, safetensors

Prints `correct/total` of the validation images. The file is loaded with `strict=True`: every weight and running
statistic is there under the name that PyTorch gives it, and nothing else.
"""

import argparse
import gzip
import pathlib

import numpy as np
import torch
from model import Net
from safetensors.torch import load_file

FIRST, END = 8000, 10000  # as in job.toml


def read(path, offset):
    with gzip.open(path) as file:
        return np.frombuffer(file.read()[offset:], np.uint8)


def main():
    parser = argparse.ArgumentParser(description="Measures a trained model on the validation images in plain PyTorch.")
    parser.add_argument("model", type=pathlib.Path, help="model.safetensors of a run")
    parser.add_argument("--data", type=pathlib.Path, default=pathlib.Path(__file__).with_name("data"), help="folder of the idx files")
    arguments = parser.parse_args()

    images = read(arguments.data / "t10k-images-idx3-ubyte.gz", 16).reshape(-1, 1, 28, 28)[FIRST:END]
    labels = read(arguments.data / "t10k-labels-idx1-ubyte.gz", 8)[FIRST:END].astype(np.int64)
    scale, mean, std = np.float32(255), np.float32(0.1307), np.float32(0.3081)
    features = torch.from_numpy((images.astype(np.float32) / scale - mean) / std)

    net = Net()
    net.load_state_dict(load_file(arguments.model), strict=True)
    net.eval()
    with torch.no_grad():
        correct = (net(features).argmax(1) == torch.from_numpy(labels)).sum().item()
    print(f"validation accuracy {correct / len(labels):.4f}: {correct}/{len(labels)}")


if __name__ == "__main__":
    main()
