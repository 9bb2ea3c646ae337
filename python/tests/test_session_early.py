"""Large gradients of `job.step` are pushed while the backward pass computes others."""

from __future__ import annotations

import contextlib
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from .conftest import Cluster, needs

torch = needs("torch")

from ebbflow import _early, errors  # noqa: E402

from .test_scripts import agent, submit, trained_alone  # noqa: E402
from .test_session_memory import LOSS, Net, joined, trained  # noqa: E402

#: The first layer has its gradient last. Its hook waits until the ps receives a push. In `sync`
#: that can only be the push of this backward pass.
SCRIPT = """
import os, re, sys, time, urllib.request
import torch, ebbflow
from torch import nn

torch.manual_seed(7)
model = nn.Sequential(nn.Linear(6, 600), nn.Tanh(), nn.Linear(600, 600), nn.Linear(600, 2))
passes = 0

def received():
    with urllib.request.urlopen(sys.argv[1]) as answer:
        found = re.search(r"^ebb_ps_push_in_flight_bytes (\\S+)", answer.read().decode(), re.M)
    return float(found[1]) > 0

def wait(gradient):
    global passes
    passes += 1
    # The first pass shows that each gradient grows once.
    while passes > 1 and len(sys.argv) > 1 and not received():
        time.sleep(0.01)

model[0].weight.register_hook(wait)
x = torch.randn(48, 6, generator=torch.Generator().manual_seed(3))
source = torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with ebbflow.join(model, optimizer, source, micro=8, epochs=2) as job:
    for epoch in job.epochs():
        for x, y in epoch:
            job.step(nn.functional.cross_entropy(model(x), y))
    assert passes == 12, "its hook waited for each push"
print(job.model_sha256)
"""


def test_a_ps_receives_gradients_while_the_backward_pass_goes_on(tmp_path: Path) -> None:
    script = tmp_path / "code/train.py"
    script.parent.mkdir()
    script.write_text(SCRIPT)
    alone = trained_alone(script)
    with Cluster(tmp_path, workers=0, ps=0) as cluster:
        ps = cluster.start(
            *["ps-0", "ps", "--master", cluster.url, "--listen", "127.0.0.1:0"],
            *["--metrics", "127.0.0.1:0"],
        )
        metrics = ps.url("metrics at ")
        agent(cluster, 0, 1)
        submitted = submit(cluster.url, script, "--", metrics)
        result, said = submitted.communicate()
    assert submitted.returncode == 0, said
    assert json.loads(result)["model_sha256"] == alone


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Give an event that is set when a gradient was told, and cleared by the next pass."""
    event, begin = threading.Event(), _early.Early.begin

    def begins(early: Any, outs: list[Any], weight: float, tell: Any) -> None:
        event.clear()

        def tells(place: int) -> None:
            tell(place)
            event.set()

        begin(early, outs, weight, tells)

    monkeypatch.setattr(_early.Early, "begin", begins)
    return event


def test_a_gradient_is_told_once_and_never_in_the_first_pass(told: threading.Event) -> None:
    expected, model = trained(Net()), Net()
    were_told: list[bool] = []

    def last(_: Any) -> None:
        # Without the hand-over during the pass this waits for ever.
        if job._tensors._early.has_told:
            told.wait()
            at = [name for name, _ in model.named_parameters()].index("large.weight")
            with pytest.raises(RuntimeError, match="answered already"):
                job._current.made(at)
        were_told.append(told.is_set())

    model.first.weight.register_hook(last)
    with joined(model) as job:
        for epoch in job.epochs():
            for x, y in epoch:
                job.step(LOSS(model(x), y))
    assert job.model_sha256 == expected
    assert were_told == [False] + [True] * 11


def test_a_stream_is_waited_for_before_its_gradient_is_told(
    told: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch for CUDA does not run here, so this is about the order of calls alone."""
    expected, calls = trained(Net()), []

    class Stream:
        def wait_event(self, made: str) -> None:
            calls.append(made)

        def synchronize(self) -> None:
            calls.append("told too early" if told.is_set() else "synchronized")

    monkeypatch.setattr(_early, "_made", lambda _: "made")
    monkeypatch.setattr(_early, "_stream", lambda _: Stream())
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    assert trained(Net()) == expected
    # The layer has a gradient in each of 12 passes.
    assert calls == ["made", "synchronized"] * 12
    assert told.is_set()


@pytest.mark.usefixtures("told")
def test_a_pass_that_fails_after_a_gradient_was_told_is_not_repeated() -> None:
    model, passes = Net(), 0
    with pytest.raises(errors.SessionError, match="cannot be stepped again"), joined(model) as job:
        for epoch in job.epochs():
            for x, y in epoch:
                passes += 1
                loss = LOSS(model(x), y)
                if passes == 2:
                    hook = model.first.weight.register_hook(lambda _: 1 / 0)
                    with pytest.raises(ZeroDivisionError):
                        job.step(loss)
                    hook.remove()
                    with pytest.raises(
                        errors.SessionError, match="microbatch 1: a part of its gradients"
                    ):
                        job.step(LOSS(model(x), y))
                    with pytest.raises(errors.SessionError, match="cannot be stepped again"):
                        job.push(0.5)
                    raise errors.SessionError("it cannot be stepped again")
                job.step(loss)


def test_a_gradient_that_grows_after_it_was_told_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The process that goes on tells nothing early any more."""

    def run(model: Any, refused: list[str]) -> str | None:
        with joined(model) as job:
            for epoch in job.epochs():
                for x, y in epoch:
                    try:
                        job.step(LOSS(model(x), y))
                    except errors.SessionError as error:
                        refused.append(str(error))
                    # Each part of a reentrant checkpoint adds to the gradient of the layer.
                    model._checkpoints = True
        return job.model_sha256

    refused: list[str] = []
    found = run(Net(), refused)
    assert len(refused) == 1
    assert "`large.weight` grew again" in refused[0] and "use_reentrant=False" in refused[0]
    # Nothing is told when nothing is large.
    monkeypatch.setattr(_early, "BYTES_MIN", 1 << 40)
    assert run(Net(), refused) == found is not None
    assert len(refused) == 1


def halve(weight: Any) -> None:
    weight.grad.mul_(0.5)


def test_a_loop_that_goes_on_after_an_error_writes_into_the_next_request() -> None:
    expected, model, steps = trained(Net()), Net(), 0
    with joined(model) as job:
        for epoch in job.epochs():
            for x, y in epoch:
                steps += 1
                loss = LOSS(model(x), y)
                if steps == 3:
                    hook = model.large.weight.register_post_accumulate_grad_hook(halve)
                    with pytest.raises(errors.WrittenError, match=r"`large\.weight`"):
                        job.step(loss)
                    hook.remove()
                    with pytest.raises(errors.SessionError, match="cannot be stepped again"):
                        job.step(LOSS(model(x), y))
                elif steps == 4:
                    loss.backward()
                    job.push(loss.item())
                else:
                    job.step(loss)
    assert job.model_sha256 == expected and steps == 13
