"""`loss_scaling` of `ebbflow.join`: alone, and in several processes of one cluster."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from .conftest import Place, Script, needs

torch = needs("torch")

import ebbflow  # noqa: E402
from ebbflow import errors  # noqa: E402
from torch import nn  # noqa: E402

GOLDEN = Path(__file__).parents[2] / "tests/golden"

LOSS = nn.CrossEntropyLoss()

#: Trains in f16 on records so large that gradients overflow with the first scales.
SCRIPT = """
import sys
import torch, ebbflow
from torch import nn

generator = torch.Generator().manual_seed(3)
x = torch.randn(160, 6, generator=generator) * 40
source = torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long())
torch.manual_seed(7)
model = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 2))
with ebbflow.join(
    model, torch.optim.Adam(model.parameters(), lr=0.01), source, micro=8, effective=32, epochs=3,
    seed=5, name=sys.argv[1], state_bytes=64, loss_scaling=True,
) as job:
    for epoch in job.epochs():
        for batch in epoch:
            with torch.autocast("cpu", torch.float16):
                loss = nn.functional.cross_entropy(model(batch.x), batch.y)
            job.step(loss)
assert job.summary["overflows"] > 0, job.summary
"""


def join(model: Any, **options: Any) -> ebbflow.Session:
    features = torch.from_numpy(np.load(GOLDEN / "loss_scale_features.npy"))
    labels = torch.from_numpy(np.load(GOLDEN / "torch_steps_labels.npy"))
    source = torch.utils.data.TensorDataset(features, labels)
    given: dict[str, Any] = {"micro": 32, "epochs": 5, "shuffle": False} | options
    return ebbflow.join(model, torch.optim.Adam(model.parameters(), lr=0.01), source, **given)


def network() -> Any:
    script = torch.jit.load(str(GOLDEN / "loss_scale.pt"))
    values = list(script.parameters())
    first, second = values[0].shape, values[2].shape
    model = nn.Sequential(nn.Linear(first[1], first[0]), nn.ReLU(), nn.Linear(second[1], second[0]))
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), values, strict=True):
            parameter.copy_(value)
    return model


def with_step(job: Any, loss: Any) -> float:
    found: float = job.step(loss)
    return found


def with_push(job: Any, loss: Any) -> float:
    (loss.to(torch.float32) * job.loss_scale).backward()
    found: float = job.push(float(loss.detach()))
    return found


@pytest.mark.parametrize("hand_over", [with_step, with_push])
def test_a_loop_in_f16_overflows_where_that_of_gradscaler_does(
    hand_over: Callable[[Any, Any], float],
) -> None:
    golden = json.loads((GOLDEN / "loss_scale.json").read_text())
    model, losses, scales = network(), [], []
    with join(model, loss_scaling=True) as job:
        for epoch in job.epochs():
            for batch in epoch:
                scales.append(job.loss_scale)
                with torch.autocast("cpu", torch.float16, cache_enabled=False):
                    loss = LOSS(model(batch.x), batch.y)
                losses.append(hand_over(job, loss))
    assert scales == golden["scales"]
    assert losses == pytest.approx(golden["losses"], abs=2e-3)
    assert job.summary is not None
    assert job.summary["overflows"] == len(golden["overflows"]) > 0


def test_a_scale_changes_no_bit_of_what_f32_computes() -> None:
    shas = []
    for scaling in (False, True):
        model = network()
        with join(model, loss_scaling=scaling, state_bytes=16) as job:
            for epoch in job.epochs():
                for batch in epoch:
                    assert job.loss_scale == (65536 if scaling else 1)
                    job.step(LOSS(model(batch.x), batch.y))
        shas.append(job.model_sha256)
    assert shas[0] == shas[1]


def test_without_a_scale_that_fits_the_job_fails_and_says_what_to_do() -> None:
    model = network()
    with (
        pytest.raises(errors.SessionFailedError, match="bf16"),
        join(model, loss_scaling=True, epochs=6) as job,
    ):
        for epoch in job.epochs():
            for _ in epoch:
                for parameter in model.parameters():
                    parameter.grad = torch.full_like(parameter, float("inf"))
                job.push(1.0)


def test_a_scale_belongs_to_a_batch() -> None:
    model = network()
    with join(model, loss_scaling=True, epochs=1) as job:
        with pytest.raises(errors.SessionError, match=r"job\.loss_scale belongs to a batch"):
            _ = job.loss_scale
        for epoch in job.epochs():
            for batch in epoch:
                job.step(LOSS(model(batch.x), batch.y))
                with pytest.raises(
                    errors.SessionError, match=r"job\.loss_scale belongs to a batch"
                ):
                    _ = job.loss_scale


def test_processes_that_come_and_die_have_the_same_scale(place: Place, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    alone = Script(None, script, "alone").result()["sha"]
    # It dies with a batch in its hands, after overflows.
    others = place.one_killed_and_two_that_join("several", script, "several", gate="9")
    assert [found["sha"] for found in others] == [alone] * 2
