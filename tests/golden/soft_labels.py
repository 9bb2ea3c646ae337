"""Golden losses of smoothed and mixed labels, from PyTorch's definition: the engines must agree.

    python tests/golden/soft_labels.py        # needs numpy

writes `soft_labels.json` beside this file, for `model/src/engines/golden.rs`. numpy computes what the documentation of
torch.nn.CrossEntropyLoss says, in f64 from f32 outputs:

- label_smoothing = s and classes: (1 - s) times the negative log likelihood of the class, plus s / C times the sum of those of all C
  classes; the mean over the labels that are not ignore_index;
- probabilities p as labels: the sum over the classes of -(p (1 - s) + s / C) log_softmax(outputs); the mean over the records.

The gradient is that of the loss with respect to the outputs: (sum(p) softmax(outputs) - p) / n, p after smoothing.
"""

import json
from pathlib import Path

import numpy as np


def log_softmax(outputs):
    shifted = outputs - outputs.max(1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(1, keepdims=True))


def by_class(outputs, labels, smoothing, ignored):
    """The loss of PyTorch's code for classes, which has no probabilities."""
    logs = log_softmax(outputs)
    counts = labels != ignored
    nll = -logs[np.arange(len(labels)), np.where(counts, labels, 0)][counts].sum()
    all_classes = -logs[counts].sum()
    classes = outputs.shape[1]
    return ((1 - smoothing) * nll + smoothing / classes * all_classes) / counts.sum()


def by_probability(outputs, probabilities, smoothing, counts):
    """The loss and the gradient of PyTorch's code for probabilities."""
    classes = outputs.shape[1]
    logs = log_softmax(outputs)
    smooth = (probabilities * (1 - smoothing) + smoothing / classes) * counts[:, None]
    loss = -(smooth * logs).sum() / counts.sum()
    gradient = (smooth.sum(1, keepdims=True) * np.exp(logs) - smooth) / counts.sum()
    return loss, gradient


def main():
    random, lines = np.random.default_rng(37), []
    for samples, classes, smoothing, kind in [
        (4, 3, 0.1, "classes"), (5, 2, 0.25, "classes"), (3, 7, 1.0, "classes"), (2, 4, 0.0, "classes"),
        (6, 5, 0.1, "ignored"), (6, 3, 0.0, "ignored"),
        (4, 3, 0.0, "mixed"), (5, 4, 0.1, "mixed"), (1, 2, 0.9, "mixed"),
    ]:
        outputs = (3 * random.standard_normal([samples, classes])).astype(np.float32)
        exact = outputs.astype(np.float64)
        labels, ignored, mixed = random.integers(0, classes, samples), None, None
        counts = np.ones(samples)
        if kind == "ignored":
            ignored = -7
            labels[[0, 3]] = ignored
            counts = (labels != ignored).astype(float)
        if kind == "mixed":
            other = np.eye(classes, dtype=np.float32)
            mixed = (other[labels] * np.float32(0.3) + np.roll(other[labels], 1, 0) * np.float32(0.7)).astype(np.float32)
            probabilities = mixed.astype(np.float64)
        else:
            probabilities = np.eye(classes)[np.where(labels == ignored, 0, labels) if ignored is not None else labels]
        loss, gradient = by_probability(exact, probabilities, smoothing, counts)
        plain, _ = by_probability(exact, probabilities, 0.0, counts)
        if kind != "mixed":
            assert abs(loss - by_class(exact, labels, smoothing, ignored)) < 1e-12
        lines.append(json.dumps({
            "classes": classes, "label_smoothing": smoothing, "ignored": ignored,
            "outputs": [float(value) for value in outputs.ravel()],
            "labels": None if kind == "mixed" else labels.tolist(),
            "mixed": None if mixed is None else [float(value) for value in mixed.ravel()],
            "loss": loss, "gradient": gradient.ravel().tolist(), "plain_loss": plain,
        }))
    Path(__file__).with_name("soft_labels.json").write_text("[\n" + ",\n".join(lines) + "\n]\n")


if __name__ == "__main__":
    main()
