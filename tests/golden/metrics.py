"""Golden numbers for metrics: scikit-learn 1.9 and PyTorch compute, `model::metrics` and `proto::metrics` must agree.

    pip install scikit-learn==1.9.1 numpy torch==2.11.0 && python tests/golden/metrics.py

writes `metrics.json` beside this file, for `model/src/engines/golden.rs` and the tests of the torch engine: for each case the loss of a job,
the outputs of its network (f32, row-major), the labels, and the value of each metric. scikit-learn computes what it has, from the same f32
in f64, and PyTorch computes every such number again, except `auc`, `f1` and the confusion matrix, which it lacks.
"""

import json
import warnings
from pathlib import Path

import numpy as np
import torch
from sklearn import metrics as sk
from torch.nn import functional as F

# Log-probabilities in f32 have sums that are not quite 1. Both take them as they are.
warnings.filterwarnings("ignore", message="The y_prob values do not sum to one")
random = np.random.default_rng(20)


def f32(array):
    return np.asarray(array, np.float32).astype(np.float64)


def both(ours, theirs):
    """A number of scikit-learn, after PyTorch has said the same."""
    assert abs(float(ours) - float(theirs)) <= 1e-12 * max(1, abs(float(ours))), (ours, theirs)
    return float(ours)


def classes(outputs, labels, log_probabilities=False, ks=(1, 3, 5)):
    """The metrics of outputs [n, classes] with a label each."""
    width = outputs.shape[1]
    every = list(range(width))
    tensor, target = torch.tensor(outputs), torch.tensor(labels)
    logs = tensor if log_probabilities else F.log_softmax(tensor, 1)
    probabilities = logs.exp().numpy()
    predicted = outputs.argmax(1)
    loss = both(sk.log_loss(labels, probabilities, labels=every), F.nll_loss(logs, target))
    found = dict(
        accuracy=both(sk.accuracy_score(labels, predicted), (tensor.argmax(1) == target).double().mean()),
        log_loss=loss,
        perplexity=both(np.exp(loss), F.nll_loss(logs, target).exp()),
        f1=sk.f1_score(labels, predicted, average="macro"),
        confusion_matrix=sk.confusion_matrix(labels, predicted, labels=every).tolist(),
    )
    for k in (k for k in ks if k < width):
        hits = (tensor.topk(k).indices == target[:, None]).any(1).double().mean()
        found[f"top{k}"] = both(sk.top_k_accuracy_score(labels, outputs, k=k, labels=every), hits)
    found[f"top{width}"] = 1.0
    return found


def binary(outputs, labels):
    """The metrics of logits [n, k], all of which count alike."""
    tensor, target = torch.tensor(outputs), torch.tensor(labels)
    outputs, labels = outputs.ravel(), labels.ravel()
    probabilities = torch.tensor(outputs).sigmoid().numpy()
    predicted = outputs > 0
    return dict(
        accuracy=both(sk.accuracy_score(labels, predicted), ((tensor > 0) == (target > 0.5)).double().mean()),
        log_loss=both(
            sk.log_loss(labels, probabilities), F.binary_cross_entropy_with_logits(tensor, target)
        ),
        mae=both(sk.mean_absolute_error(labels, outputs), F.l1_loss(tensor, target)),
        auc=sk.roc_auc_score(labels, outputs),
        f1=sk.f1_score(labels, predicted),
    )


def values(outputs, labels):
    tensor, target = torch.tensor(outputs), torch.tensor(labels)
    mse = both(sk.mean_squared_error(labels, outputs), F.mse_loss(tensor, target))
    return dict(
        mae=both(sk.mean_absolute_error(labels, outputs), F.l1_loss(tensor, target)),
        mse=mse,
        # For several outputs scikit-learn has the mean of their roots.
        rmse=both(np.sqrt(mse), F.mse_loss(tensor, target).sqrt()),
    )


def case(name, loss, outputs, labels, found, ignored=None):
    return dict(
        name=name,
        loss=loss,
        shape=list(outputs.shape),
        outputs=[float(f"{value:.9g}") for value in outputs.ravel()],
        labels=labels.ravel().tolist(),
        labels_shape=list(labels.shape),
        values=found,
        **({} if ignored is None else dict(ignored=ignored)),
    )


def cases():
    outputs, labels = f32(random.normal(size=(60, 7)) * 2), random.integers(0, 7, 60)
    outputs[np.arange(60), labels] += 1.0
    outputs = f32(outputs)
    yield case("logits", "cross_entropy", outputs, labels, classes(outputs, labels))

    # Class 4 has no label, and class 5 neither label nor prediction.
    outputs, labels = f32(random.normal(size=(40, 6))), random.integers(0, 4, 40)
    outputs[:, 5] = -30
    yield case("classes that do not occur", "cross_entropy", outputs, labels, classes(outputs, labels, ks=(2,)))

    outputs, labels = f32(random.normal(size=(30, 3)) * 20), random.integers(0, 3, 30)
    outputs[np.arange(30), labels] += 30  # scikit-learn clips probabilities below 2.2e-16
    outputs = f32(outputs)
    yield case("large logits", "cross_entropy", outputs, labels, classes(outputs, labels, ks=(1, 2)))

    outputs = f32(F.log_softmax(torch.tensor(random.normal(size=(50, 4))), 1).numpy())
    labels = random.integers(0, 4, 50)
    found = classes(outputs, labels, log_probabilities=True, ks=(2,))
    yield case("log-probabilities", "nll", outputs, labels, found)

    # Classes for each position; -100 counts nowhere.
    outputs, labels = f32(random.normal(size=(6, 5, 4))), random.integers(0, 4, (6, 5))
    labels[random.random((6, 5)) < 0.3] = -100
    labels[2] = -100
    kept = labels != -100
    found = classes(outputs[kept], labels[kept], ks=(2,))
    yield case("positions", "cross_entropy", outputs, labels, found, ignored=-100)

    # In quarters, so that many outputs are equal; 0 is on the negative side.
    outputs, labels = f32(np.round(random.normal(size=(80, 1)) * 4) / 4), random.integers(0, 2, (80, 1)) * 1.0
    yield case("binary with ties", "bce_with_logits", outputs, labels, binary(outputs, labels))

    outputs, labels = f32(random.normal(size=(25, 3))), random.integers(0, 2, (25, 3)) * 1.0
    yield case("binary, 3 outputs", "bce_with_logits", outputs, labels, binary(outputs, labels))

    outputs, labels = f32(random.normal(size=(20, 1)) - 9), random.integers(0, 2, (20, 1)) * 1.0
    yield case("binary, nothing predicted", "bce_with_logits", outputs, labels, binary(outputs, labels))

    for width in (1, 2):
        outputs, labels = f32(random.normal(size=(30, width)) * 5), f32(random.normal(size=(30, width)) * 5)
        yield case(f"values, {width}", "mse", outputs, labels, values(outputs, labels))


lines = ",\n".join(json.dumps(each) for each in cases())
Path(__file__).with_suffix(".json").write_text(f"[\n{lines}\n]\n")
