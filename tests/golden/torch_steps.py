"""Trains 50 steps of a TorchScript module with BatchNorm in plain PyTorch and writes the losses.

    PYTHONHASHSEED=0 python tests/golden/torch_steps.py        # PyTorch 2.11, NumPy

Writes, beside it: `torch_steps.pt` (the module with its initial weights), its data (`torch_steps_*.npy`, in the order of
training) and `torch_steps.json`. `torch_steps.toml` is the same job for Ebbflow. No dropout: random streams differ.

Two cases. `one`: a step is one microbatch, which is what plain PyTorch does. `two`: a step is two microbatches of half
the size; each starts from the step's running statistics, and the step's are their mean, as Ebbflow defines it.
"""

import json
import pathlib
import zipfile

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

HERE = pathlib.Path(__file__).parent
RECORDS, FEATURES, CLASSES, STEPS, EFFECTIVE, RATE = 256, 16, 4, 50, 32, 0.05


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(FEATURES, 24)
        self.bn = nn.BatchNorm1d(24)
        self.fc2 = nn.Linear(24, CLASSES)

    def forward(self, x):
        return self.fc2(F.relu(self.bn(self.fc1(x))))


def save(module, path):
    """Without the debug files, which name the folders of this machine."""
    full = path.with_suffix(".full")
    torch.jit.script(module).save(str(full))
    with zipfile.ZipFile(full) as source, zipfile.ZipFile(path, "w") as target:
        for item in source.infolist():
            if not item.filename.endswith(".debug_pkl"):
                target.writestr(zipfile.ZipInfo(f"model/{item.filename.split('/', 1)[1]}"), source.read(item))
    full.unlink()


def train(net, features, labels, micro):
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE, foreach=False)
    running = [net.bn.running_mean, net.bn.running_var]
    losses = []
    for step in range(STEPS):
        begin = step * EFFECTIVE % RECORDS
        optimizer.zero_grad()
        loaded, sums, total = [r.clone() for r in running], [torch.zeros_like(r) for r in running], 0.0
        for at in range(begin, begin + EFFECTIVE, micro):
            for r, value in zip(running, loaded):
                r.copy_(value)
            loss = F.cross_entropy(net(features[at : at + micro]), labels[at : at + micro])
            (loss * micro / EFFECTIVE).backward()
            total += loss.item() * micro
            for s, r in zip(sums, running):
                s += r
        for r, s in zip(running, sums):
            r.copy_(s / (EFFECTIVE // micro))
        optimizer.step()
        losses.append(total / EFFECTIVE)
    return {"losses": losses, "running_mean": running[0].tolist(), "running_var": running[1].tolist()}


def main():
    torch.manual_seed(11)
    torch.set_num_threads(1)
    rng = np.random.default_rng(11)
    labels = rng.permutation(np.arange(RECORDS) % CLASSES).astype(np.int64)
    centres = rng.normal(size=(CLASSES, FEATURES))
    features = (centres[labels] + rng.normal(size=(RECORDS, FEATURES))).astype(np.float32)
    np.save(HERE / "torch_steps_features.npy", features)
    np.save(HERE / "torch_steps_labels.npy", labels)
    initial = Net()
    save(initial, HERE / "torch_steps.pt")
    cases = {}
    for name, micro in [("one", EFFECTIVE), ("two", EFFECTIVE // 2)]:
        net = Net()
        net.load_state_dict(initial.state_dict())
        cases[name] = train(net, torch.from_numpy(features), torch.from_numpy(labels), micro)
    text = {"torch": torch.__version__.split("+")[0], "cases": cases}
    (HERE / "torch_steps.json").write_text(json.dumps(text, indent=1) + "\n")
    print({name: (case["losses"][0], case["losses"][-1]) for name, case in cases.items()})


if __name__ == "__main__":
    main()
