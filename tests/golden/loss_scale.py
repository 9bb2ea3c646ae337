"""Trains 40 steps in f16 with `torch.amp.GradScaler` and Adam, and writes losses, scales and which steps overflow.

    PYTHONHASHSEED=0 python tests/golden/loss_scale.py        # PyTorch 2.11, NumPy

Writes, beside it: `loss_scale.pt` (the module with its initial weights), `loss_scale_features.npy` and `loss_scale.json`. The
labels are those of `torch_steps.py`. Some records are so large that gradients overflow with the first scales.
`loss_scale.toml` is the same job for Ebbflow.
"""

import json
import pathlib

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch_steps import CLASSES, FEATURES, save

HERE = pathlib.Path(__file__).parent
RECORDS, STEPS, EFFECTIVE, RATE = 256, 40, 32, 0.01


def main():
    torch.manual_seed(11)
    torch.set_num_threads(1)
    features = np.load(HERE / "torch_steps_features.npy")
    # The batches 1 and 5 of each epoch.
    for begin, factor in [(32, 8), (160, 30)]:
        features[begin : begin + EFFECTIVE] *= np.float32(factor)
    np.save(HERE / "loss_scale_features.npy", features)
    features, labels = torch.from_numpy(features), torch.from_numpy(np.load(HERE / "torch_steps_labels.npy"))
    module = nn.Sequential(nn.Linear(FEATURES, 24), nn.ReLU(), nn.Linear(24, CLASSES))
    save(module, HERE / "loss_scale.pt")
    optimizer = torch.optim.Adam(module.parameters(), lr=RATE, foreach=False)
    scaler = torch.amp.GradScaler("cpu")
    losses, scales, overflows = [], [], []
    for step in range(STEPS):
        begin = step * EFFECTIVE % RECORDS
        scales.append(scaler.get_scale())
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16, cache_enabled=False):
            outputs = module(features[begin : begin + EFFECTIVE])
            loss = F.cross_entropy(outputs, labels[begin : begin + EFFECTIVE])
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
        if scaler.get_scale() < scales[-1]:
            overflows.append(step)
    text = {"torch": torch.__version__.split("+")[0], "losses": losses, "scales": scales, "overflows": overflows}
    (HERE / "loss_scale.json").write_text(json.dumps(text, indent=1) + "\n")
    print(scales, overflows, losses[:3], losses[-3:])


if __name__ == "__main__":
    main()
