"""Metrics of a loop's own in `job.evaluate`, which are merged over processes."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from .conftest import Place, Script, needs

torch = needs("torch")

import ebbflow  # noqa: E402
from ebbflow._measured import Function, Keras, metrics_of  # noqa: E402
from torch import nn  # noqa: E402

LOSS = nn.CrossEntropyLoss()

#: Three parts of an evaluation, and sums of fractions that depend on their order.
SCRIPT = """
import os, signal, sys
import torch, torchmetrics, torchmetrics.classification as of, ebbflow
from torch import nn

name, dies_at = sys.argv[1], int(sys.argv[2])
generator = torch.Generator().manual_seed(3)
x = torch.randn(2100, 6, generator=generator)
source = torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long())
train = torch.utils.data.Subset(source, range(400))
torch.manual_seed(7)
model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))
loss = nn.CrossEntropyLoss()
measured = 0

def measure(batch):
    global measured
    measured += 1
    if measured == dies_at:
        os.kill(os.getpid(), signal.SIGKILL)
    outputs = model(batch.x)
    return {"loss": loss(outputs, batch.y), "outputs": outputs, "margin": outputs.std()}

class Brier(torchmetrics.MeanMetric):
    def update(self, outputs, labels):
        super().update((outputs.softmax(1)[:, 1] - labels).square())

def confidence(outputs, labels):
    largest = outputs.softmax(1).amax(1)
    return float(largest.double().sum()), len(labels)

metrics = {
    "confidence": confidence,
    "macro": of.MulticlassAccuracy(num_classes=2, average="macro"),
    "matrix": of.MulticlassConfusionMatrix(num_classes=2),
    "brier": Brier(),
}

with ebbflow.join(
    model, torch.optim.Adam(model.parameters(), lr=0.01), train, source, micro=16, effective=64,
    epochs=2, seed=5, name=name,
) as job:
    for epoch in job.epochs():
        for batch in epoch:
            job.step(loss(model(batch.x), batch.y))
        job.evaluate(measure, metrics)
"""


def data(records: int = 2100) -> Any:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(records, 6, generator=generator)
    return torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long())


def trained(metrics: Any, measure: Any = None, epochs: int = 1) -> tuple[ebbflow.Session, Any]:
    """Train a little, and measure after each epoch."""
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def outputs(batch: ebbflow.Batch) -> dict[str, Any]:
        found = model(batch.x)
        return {"loss": LOSS(found, batch.y), "outputs": found}

    with ebbflow.join(model, optimizer, data(96), data(), epochs=epochs, micro=32, seed=5) as job:
        for epoch in job.epochs():
            for batch in epoch:
                job.step(LOSS(model(batch.x), batch.y))
            job.evaluate(measure or outputs, metrics)
    return job, model


def test_functions_return_a_mean_over_the_batch_or_a_sum_and_its_count() -> None:
    def share(outputs: Any, labels: Any) -> Any:
        return (outputs.argmax(1) == labels).float().mean()

    def of_positives(outputs: Any, labels: Any) -> tuple[Any, Any]:
        return ((outputs.argmax(1) == 1) & (labels == 1)).sum(), (labels == 1).sum()

    job, model = trained({"share": share, "recall": of_positives})
    x, y = data().tensors
    with torch.no_grad():
        found = model(x).argmax(1)
    assert job.metrics["share"] == pytest.approx(float((found == y).double().mean()), abs=1e-9)
    positives = int((y == 1).sum())
    assert job.metrics["recall"] == int(((found == 1) & (y == 1)).sum()) / positives
    assert job.summary is not None and job.summary["final"]["recall"] == job.metrics["recall"]
    assert job.history[-1]["recall"] == job.metrics["recall"]


def test_a_mean_of_another_name_is_one_over_all_records() -> None:
    seen = []

    def measure(batch: ebbflow.Batch) -> dict[str, Any]:
        seen.append((len(batch), float(batch.x.mean())))
        return {"loss": 1.0, "rmse_of_mine": batch.x.mean()}

    job, _ = trained(None, measure)
    expected = sum(count * value for count, value in seen) / 2100
    assert job.metrics["rmse_of_mine"] == pytest.approx(expected, abs=1e-12)


def test_metrics_of_torchmetrics_have_the_values_of_all_records_at_once() -> None:
    needs("torchmetrics")
    import torchmetrics.classification as of

    def metrics() -> dict[str, Any]:
        return {
            "macro": of.MulticlassF1Score(num_classes=2, average="macro"),
            "classes": of.MulticlassPrecision(num_classes=2, average="none"),
            "auroc": of.MulticlassAUROC(num_classes=2, thresholds=50),
            "jaccard": of.MulticlassJaccardIndex(num_classes=2),
        }

    job, model = trained(metrics())
    x, y = data().tensors
    with torch.no_grad():
        outputs = model(x)
    for name, metric in metrics().items():
        expected = metric(outputs, y).tolist()
        assert job.metrics[name] == expected, name
        assert job.history[-1][name] == expected, name
    assert len(job.metrics["classes"]) == 2


def test_a_metric_of_torchmetrics_that_keeps_outputs_is_refused() -> None:
    needs("torchmetrics")
    import torchmetrics
    import torchmetrics.classification as of

    for metric, expected in [
        (of.BinaryAUROC(), r"'mine'\]: the state `preds` of BinaryAUROC keeps all outputs.*thresh"),
        (torchmetrics.MaxMetric(), "the state `max_value` of MaxMetric is a"),
        (torchmetrics.MetricTracker(of.BinaryF1Score()), "has no states of its own"),
        (torchmetrics.MinMaxMetric(of.BinaryF1Score()), "has no states of its own"),
    ]:
        with pytest.raises(TypeError, match=expected):
            metrics_of({"mine": metric})
    both = torchmetrics.MetricCollection([of.BinaryF1Score(), of.BinaryPrecision()])
    assert set(metrics_of(both)) == {"BinaryF1Score", "BinaryPrecision"}


def test_metrics_of_keras_have_the_values_of_all_records_at_once() -> None:
    keras: Any = needs("keras")
    generator = torch.Generator().manual_seed(3)
    outputs = torch.rand(300, 1, generator=generator)
    labels = (torch.rand(300, 1, generator=generator) < outputs).float()
    kinds = [keras.metrics.AUC, keras.metrics.Precision, keras.metrics.BinaryAccuracy]
    for kind in kinds:
        whole = kind()
        whole.update_state(labels.numpy(), outputs.numpy())
        merged = Keras("mine", kind())
        parts = [
            merged.of(
                {"outputs": outputs[at : at + 90].numpy(), "labels": labels[at : at + 90].numpy()},
                90,
            )
            for at in range(0, 300, 90)
        ]
        sums = [sum(numbers) for numbers in zip(*parts, strict=True)]
        # Another process, which has measured nothing.
        other = Keras("mine", kind())
        assert other.value(sums) == pytest.approx(float(whole.result()), abs=1e-7), kind
    with pytest.raises(TypeError, match=r"'mine'\]: nobody knows whether .* MeanOfMine"):

        class MeanOfMine(keras.metrics.Metric):  # type: ignore[misc]
            pass

        metrics_of({"mine": MeanOfMine()})


def test_what_cannot_be_merged_is_refused_by_name() -> None:
    for wrong, expected in [
        ([len], "expected a dictionary of metrics by name, found list"),
        ({"loss": len}, r"\['loss'\]: a metric needs a name of its own"),
        ({"epoch": len}, r"\['epoch'\]: a metric needs a name of its own"),
        ({"mine": 3}, r"\['mine'\]: expected a function of outputs and labels"),
    ]:
        with pytest.raises(TypeError, match=expected):
            metrics_of(wrong)
    with pytest.raises(TypeError, match=r"\['mine'\]: expected the mean .* found 3 values"):
        Function("mine", lambda outputs, labels: (1, 2, 3)).of({"outputs": 0, "labels": 0}, 1)
    with pytest.raises(TypeError, match=r"metrics\['mine'\] needs the outputs of the model"):
        trained({"mine": len}, lambda batch: {"loss": 1.0})


def test_more_numbers_than_an_evaluation_holds_are_refused_by_name() -> None:
    needs("torchmetrics")
    import torchmetrics

    class Large(torchmetrics.Metric):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.add_state("counts", torch.zeros(90_000), dist_reduce_fx="sum")

        def update(self, outputs: Any, labels: Any) -> None:
            pass

        def compute(self) -> Any:
            return self.counts.sum()

    large = Large()
    with pytest.raises(ValueError, match="at most 65536 numbers, found 90000: `large` 90000"):
        trained({"large": large})


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """Give the script's file."""
    needs("torchmetrics")
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def test_several_processes_and_one_that_dies_measure_the_values_of_one(
    place: Place, script: Path
) -> None:
    alone = Script(None, script, "alone", "0").result()
    names = {"loss", "margin", "confidence", "macro", "matrix", "brier"}
    assert all(names <= row.keys() for row in alone["history"])
    # In the second part of the evaluation of the first epoch: it has told of the first part.
    assert place.script(script, "several", "75").end()[0] == -signal.SIGKILL
    two = [place.script(script, "several", "0", gate="join") for _ in range(2)]
    for process in two:
        process.arrive()
    place.wait_for_workers("several", 2)
    for process in two:
        process.go()
    for found in [process.result() for process in two]:
        assert found["history"] == alone["history"]
        assert found["metrics"] == alone["metrics"]
