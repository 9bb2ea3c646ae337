"""Golden numbers for the pure-Rust engine: PyTorch 2.11 computes, `ebbflow-model` must agree.

    pip install torch==2.11.0 && python tests/golden/pure_engine.py

writes `pure_engine.json` beside this file, for `model/tests/pure_engine_matches_torch.rs`: for each network and loss the
weights (by their `state_dict` names), a batch, and what PyTorch says of it: mean loss, metrics, gradients of the mean
loss. Weights and features are f32 values; PyTorch computes with them in f64, so that the rounding that the test measures
is ours alone.
"""

import json
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)  # before the first network is made
INPUTS, RECORDS = 21, 7  # wider than a vector, with a rest
RELU, TANH = nn.ReLU, nn.Tanh


def sequential(*widths, activation=RELU):
    """Linear, activation, Linear, ..: no activation at the end."""
    layers = []
    for inputs, outputs in zip(widths, widths[1:]):
        layers += [activation(), nn.Linear(inputs, outputs)]
    return nn.Sequential(*layers[1:])


# (name, the job's [model] table, the PyTorch network, factor on its weights)
CASES = [
    ("linear, mse", dict(builtin="linear", loss="mse", metrics=["mae"]), nn.Linear(INPUTS, 1), 1),
    (
        "linear, bce, 3 outputs",
        dict(builtin="linear", loss="bce_with_logits", metrics=["accuracy", "mae"], options=dict(outputs=3)),
        nn.Linear(INPUTS, 3),
        1,
    ),
    (
        "linear, bce, large logits",
        dict(builtin="linear", loss="bce_with_logits", metrics=["accuracy"], options=dict(outputs=2)),
        nn.Linear(INPUTS, 2),
        1000,
    ),
    ("softmax", dict(builtin="softmax", metrics=["accuracy"]), nn.Linear(INPUTS, 4), 1),
    ("softmax, large logits", dict(builtin="softmax", metrics=["accuracy"]), nn.Linear(INPUTS, 4), 1000),
    (
        "mlp, relu",
        dict(builtin="mlp", metrics=["accuracy"], options=dict(hidden=[17])),
        sequential(INPUTS, 17, 4),
        2,
    ),
    (
        "mlp, two hidden layers, tanh",
        dict(builtin="mlp", metrics=["accuracy"], options=dict(hidden=[18, 6], activation="tanh", classes=4)),
        sequential(INPUTS, 18, 6, 4, activation=TANH),
        2,
    ),
    (
        "mlp, mse",
        dict(builtin="mlp", loss="mse", metrics=["mae"], options=dict(hidden=[9], outputs=2)),
        sequential(INPUTS, 9, 2),
        2,
    ),
    (
        "mlp, bce",
        dict(builtin="mlp", loss="bce_with_logits", metrics=["accuracy"], options=dict(hidden=[9])),
        sequential(INPUTS, 9, 1),
        2,
    ),
]


def rounded(tensor):
    """The same values after rounding to f32."""
    return tensor.detach().float().double()


def case(name, model, network, factor):
    network = network.double()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(rounded(parameter * factor))
    features = rounded(torch.randn(RECORDS, INPUTS, dtype=torch.float64))
    outputs = network(features)
    width = outputs.shape[1]
    loss = model.get("loss", "cross_entropy")
    if loss == "cross_entropy":
        labels = torch.randint(0, width, (RECORDS,))
        labels[0] = width - 1  # so that the classes can be counted
        value = F.cross_entropy(outputs, labels)
        metrics = dict(accuracy=(outputs.argmax(1) == labels).double().sum())
    elif loss == "mse":
        labels = rounded(torch.randn_like(outputs))
        value = F.mse_loss(outputs, labels)
        metrics = dict(mae=(outputs - labels).abs().mean(1).sum())
    else:
        labels = torch.randint(0, 2, outputs.shape).double()
        labels[1, 0] = 0.25  # a probability need not be 0 or 1
        value = F.binary_cross_entropy_with_logits(outputs, labels)
        metrics = dict(
            accuracy=((outputs > 0) == (labels > 0.5)).double().mean(1).sum(),
            mae=(outputs - labels).abs().mean(1).sum(),
        )
    value.backward()
    return dict(
        name=name,
        model=model,
        tensors=[
            dict(name=name, shape=list(p.shape), weights=flat(p), gradients=flat(p.grad))
            for name, p in network.named_parameters()
        ],
        features=flat(features),
        labels=flat(labels),
        loss=value.item(),
        metric_sums={metric: metrics[metric].item() for metric in model["metrics"]},
    )


def flat(tensor):
    """With 9 digits: as many as name every f32, and far beyond the tolerance of the test."""
    return [float(f"{value:.9g}") for value in tensor.detach().flatten().tolist()]


golden = dict(torch=torch.__version__.split("+")[0], inputs=INPUTS, records=RECORDS)
lines = ",\n".join(json.dumps(case(*arguments)) for arguments in CASES)
text = json.dumps(golden)[:-1] + f', "cases": [\n{lines}\n]}}\n'
Path(__file__).with_suffix(".json").write_text(text)
