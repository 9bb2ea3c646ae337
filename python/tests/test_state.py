"""`job.state`: alone, and in several processes of one cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from .conftest import Place, Script, needs

torch = needs("torch")

import ebbflow  # noqa: E402
from ebbflow import _weights, errors  # noqa: E402
from ebbflow.state import BYTES_MAX, State  # noqa: E402
from torch import nn  # noqa: E402

LOSS = nn.CrossEntropyLoss()

#: Each step counts itself, and each batch finds the count of its version.
SCRIPT = """
import sys
import torch, ebbflow
from torch import nn

name, checkpoints = sys.argv[1], sys.argv[2]
generator = torch.Generator().manual_seed(3)
x = torch.randn(400, 6, generator=generator)
source = torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long())
torch.manual_seed(7)
model = nn.Sequential(nn.Linear(6, 64), nn.BatchNorm1d(64), nn.Linear(64, 2))
loss = nn.CrossEntropyLoss()
with ebbflow.join(
    model, torch.optim.Adam(model.parameters(), lr=0.01), source, micro=8, effective=64, epochs=3,
    seed=5, name=name, state_bytes=4096, checkpoints=checkpoints or None,
) as job:
    for epoch in job.epochs():
        for batch in epoch:
            assert job.state.get("steps", 0) == batch.step, (dict(job.state), batch.step)
            if job.state.elected:
                job.state["steps"] = batch.step + 1
                job.state["last"] = torch.full((2, 3), float(batch.step))
            job.step(loss(model(batch.x), batch.y))
assert job.state["steps"] == 21, dict(job.state)
assert (job.state["last"] == 20).all(), dict(job.state)
"""


def join(**options: Any) -> ebbflow.Session:
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(96, 6, generator=generator)
    source = torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long())
    given: dict[str, Any] = {"micro": 8, "effective": 16, "epochs": 3, "seed": 5} | options
    job = ebbflow.join(model, torch.optim.Adam(model.parameters(), lr=0.01), source, **given)
    job.model = model  # type: ignore[attr-defined]
    return job


def step(job: Any, batch: ebbflow.Batch) -> None:
    job.step(LOSS(job.model(batch.x), batch.y))


@pytest.mark.parametrize(
    ("delay", "options"),
    [(0, {}), (1, {"mode": "pipelined"}), (2, {"mode": "pipelined", "delay": 2})],
)
def test_a_batch_reads_what_the_steps_below_its_version_wrote(
    delay: int, options: dict[str, Any]
) -> None:
    seen = []
    with join(state_bytes=1000, **options) as job:
        for epoch in job.epochs():
            for batch in epoch:
                seen.append((batch.step, job.state.elected, job.state.get("next", 0)))
                if job.state.elected:
                    # Longer and shorter by turns: what is left of a long one is never read.
                    job.state["text"] = "x" * (batch.step % 3 * 100)
                    job.state["next"] = batch.step + 1
                    assert job.state["next"] == batch.step + 1
                step(job, batch)
    assert len(seen) == 36
    assert [elected for _, elected, _ in seen].count(True) == 18
    assert all(found == max(0, at - delay) for at, _, found in seen)
    assert dict(job.state) == {"next": 18, "text": "x" * 200}


def test_the_model_is_that_of_a_job_without_state() -> None:
    shas = []
    for options in ({}, {"state_bytes": 4096}):
        with join(**options) as job:
            for epoch in job.epochs():
                for batch in epoch:
                    if options and job.state.elected:
                        job.state["seen"] = batch.records
                    step(job, batch)
        shas.append(job.model_sha256)
    assert shas[0] == shas[1]


def test_values_are_read_as_they_were_written_and_are_copies() -> None:
    written = {
        "json": {"best": [0.5, None, True], "name": "Grün"},
        "bytes": np.arange(5, dtype=np.uint8),
        "empty": np.zeros((0, 3), dtype=np.float32),
        "scalar": np.array(2.5),
        "strided": np.arange(6, dtype=np.int64).reshape(2, 3).T,
        "torch": torch.tensor([True, False]),
    }
    with join(state_bytes=4096, epochs=1) as job:
        for epoch in job.epochs():
            for batch in epoch:
                if job.state.elected and batch.step == 0:
                    job.state.update(written)
                    job.state["gone"] = 1
                    del job.state["gone"]
                    written["bytes"][:] = 7
                    job.state["json"]["best"] = "a copy"
                step(job, batch)
    assert list(job.state) == sorted(written)
    assert job.state["json"] == {"best": [0.5, None, True], "name": "Grün"}
    assert job.state["bytes"].tolist() == [0, 1, 2, 3, 4]
    for name in ("empty", "scalar", "strided", "torch"):
        expected = np.asarray(written[name])
        assert (job.state[name].dtype, job.state[name].shape) == (expected.dtype, expected.shape)
        assert (job.state[name] == expected).all()
    with pytest.raises(KeyError):
        job.state["other"]


def test_what_cannot_be_kept_is_refused_by_name() -> None:
    with join(state_bytes=1000, epochs=1) as job:
        for epoch in job.epochs():
            for batch in epoch:
                if not job.state.elected:
                    with pytest.raises(
                        errors.SessionError, match=r"state\['x'\]: this process may"
                    ):
                        job.state["x"] = 1
                    step(job, batch)
                    continue
                job.state["kept"] = 1
                with pytest.raises(ValueError, match=r"'large'\]: .* room for 1000; .*16777216"):
                    job.state["large"] = np.zeros(1000, dtype=np.uint8)
                with pytest.raises(
                    TypeError, match=r"'wide'\]: safetensors has no type for uint64"
                ):
                    job.state["wide"] = np.zeros(1, dtype=np.uint64)
                with pytest.raises(
                    TypeError, match=r"'set'\]: expected what JSON has, or an array"
                ):
                    job.state["set"] = {1}
                with pytest.raises(TypeError, match="expected a name"):
                    job.state["__metadata__"] = 1
                with pytest.raises(KeyError):
                    del job.state["other"]
                assert dict(job.state) == {"kept": 1}
                step(job, batch)
                with pytest.raises(errors.SessionError, match="may not write it now"):
                    job.state["late"] = 1
    assert dict(job.state) == {"kept": 1}


def test_a_job_without_room_has_no_state_and_room_has_a_range() -> None:
    with join(epochs=1) as job, pytest.raises(errors.SessionError, match="state_bytes=4096"):
        job.state  # noqa: B018
    for wrong in (-1, BYTES_MAX + 1, 1.5, True):
        with pytest.raises(ValueError, match="state_bytes = "):
            join(state_bytes=wrong)


def test_16_mib_fit() -> None:
    class Request:
        loaded, leads = 1, True
        given = b""

        def state(self) -> bytes:
            return b""

        def set_state(self, content: bytes) -> None:
            self.given = content

    state, request = State(BYTES_MAX), Request()
    state.bind(request, trains=True)
    empty = len(_weights.to_bytes(_one(0), {}))
    state["x"] = np.ones(BYTES_MAX - empty - 64, dtype=np.uint8)
    with pytest.raises(ValueError, match="there is room for 16777216"):
        state["y"] = np.ones(64, dtype=np.uint8)
    state.commit(request)
    assert BYTES_MAX - 64 <= len(request.given) <= BYTES_MAX


def _one(size: int) -> dict[str, tuple[str, tuple[int, ...], memoryview]]:
    return {"x": ("U8", (size,), memoryview(bytes(size)))}


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give the script's file."""
    path = tmp_path_factory.mktemp("state") / "script.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture(scope="module")
def alone(script: Path) -> str:
    """Give the hash of the model that one process trains."""
    sha: str = Script(None, script, "alone", "").result()["sha"]
    return sha


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let masters hardly wait for ps that are gone."""
    monkeypatch.setenv("EBB_MASTER_PS_GRACE", "1s")


def test_processes_that_come_and_die_read_and_write_the_same_state(
    place: Place, script: Path, alone: str
) -> None:
    # It dies with a batch in its hands, in which it may have written.
    others = place.one_killed_and_two_that_join("several", script, "several", "", gate="3")
    assert [found["sha"] for found in others] == [alone] * 2


# S1-09, S1-10
def test_the_state_goes_back_to_a_checkpoint_with_the_weights(
    impatient: None, place: Place, script: Path, alone: str, tmp_path: Path
) -> None:
    checkpoints = str(tmp_path / "checkpoints")
    # Two epochs of 50 batches, and a part of the third one.
    process = place.script(script, "rewound", checkpoints, gate="120")
    process.arrive()
    for ps in place.cluster.ps:
        ps.stop()
    for name in ("ps-2", "ps-3"):
        address = ("--listen", "127.0.0.1:0")
        place.cluster.start(name, "ps", "--master", place.cluster.url, *address).url()
    process.go()
    found = process.result()
    assert found["sha"] == alone
    assert found["steps"] > 150, "a part of the job was trained again"
