"""`ebbflow.join` with `torch.compile`."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from .conftest import Place, needs

torch = needs("torch")

import ebbflow  # noqa: E402
from ebbflow.tensors import Tensors  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.data import TensorDataset  # noqa: E402

LOSS = nn.CrossEntropyLoss()

#: Compiles the graph and runs its operators as they are: no C++ compiler, and the bits of no
#: compiling.
FAST: dict[str, Any] = {"backend": "aot_eager", "dynamic": False}


@pytest.fixture(autouse=True)
def one_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile in this process: a pool of others would import torch again, for small graphs."""
    # torch reads it when it compiles for the first time.
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")


def network() -> Any:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3))


def data(records: int = 60) -> TensorDataset:
    x = torch.randn(records, 6, generator=torch.Generator().manual_seed(3))
    return TensorDataset(x, (x.sum(1) > 0).long() + (x[:, 0] > 1).long())


def measure(model: Any, batch: ebbflow.Batch) -> dict[str, float]:
    return {"loss": LOSS(model(batch.x), batch.y)}


def trained(model: Any, forward: Any = None, records: int = 60) -> ebbflow.Session:
    """Train, with batches of 8 records and what is left."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    settings: dict[str, Any] = {"micro": 8, "effective": 16, "epochs": 2, "seed": 5}
    with ebbflow.join(model, optimizer, data(records), data(records), **settings) as job:
        for epoch in job.epochs():
            for batch in epoch:
                job.step(LOSS((forward or model)(batch.x), batch.y))
            job.evaluate(lambda batch: measure(forward or model, batch))
    return job


def names(model: Any) -> list[str]:
    tensors = Tensors(model)
    return [name for name, _ in tensors.parameters + tensors.states + tensors.constants]


def test_names_are_those_of_the_module_that_was_compiled() -> None:
    plain = network()
    whole = torch.compile(plain)
    part = network()
    part[1] = torch.compile(part[1])
    assert next(iter(whole.state_dict())).startswith("_orig_mod.")
    assert names(whole) == names(part) == names(plain)
    assert "1.running_mean" in [name for name, _ in Tensors(whole).states]
    frozen = network().requires_grad_(False)
    frozen[3].weight.requires_grad_(True)
    frozen.register_buffer("count", torch.zeros(1))
    tensors = Tensors(torch.compile(frozen), state=["count"])
    assert [name for name, _ in tensors.parameters] == ["3.weight"]
    assert "count" in [name for name, _ in tensors.states]


def test_a_compiled_model_trains_and_its_module_has_the_final_weights() -> None:
    plain, module, other, after = network(), network(), network(), network()
    expected = trained(plain).model_sha256
    assert trained(torch.compile(module, **FAST)).model_sha256 == expected
    other.compile(**FAST)
    assert trained(other).model_sha256 == expected
    # Compiled only where the loop computes: the job does not know.
    assert trained(after, torch.compile(after, **FAST)).model_sha256 == expected
    for found in (module, other, after):
        pairs = zip(found.state_dict().items(), plain.state_dict().items(), strict=True)
        assert all(one[0] == two[0] and torch.equal(one[1], two[1]) for one, two in pairs)


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_code_of_inductor_trains_nearly_the_same_weights_and_always_the_same_bits() -> None:
    plain, x = network(), data().tensors[0]
    trained(plain)
    found = []
    # Epochs have batches of 8 records and a last one of 4. Each size has its own code, for training
    # and for measuring, whichever size the process has seen first.
    for size in (8, 4):
        torch.compiler.reset()
        torch.compile(network(), dynamic=False)(x[:size]).sum().backward()
        compiled = network()
        found.append(trained(torch.compile(compiled, dynamic=False)).model_sha256)
        for name, tensor in plain.state_dict().items():
            assert torch.allclose(compiled.state_dict()[name], tensor, atol=1e-5), name
    assert found[0] == found[1]


SCRIPT = """
import sys
import torch, ebbflow
from torch import nn

x = torch.randn(60, 6, generator=torch.Generator().manual_seed(3))
torch.manual_seed(7)
model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
if sys.argv[2] == "compiled":
    model = torch.compile(model, backend="aot_eager", dynamic=False)
source = torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long())
with ebbflow.join(model, optimizer, source, micro=8, epochs=2, name=sys.argv[1]) as job:
    for epoch in job.epochs():
        for x, y in epoch:
            job.step(nn.functional.cross_entropy(model(x), y))
"""


def test_processes_of_one_job_compile_all_or_none(place: Place, tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    first = place.script(path, "mixed", "compiled", gate="1")
    first.arrive()
    code, said = place.script(path, "mixed", "plain").end()
    assert code != 0 and "describes another job" in said and "model.options.compiled" in said
    first.go()
    assert first.result()["sha"] == place.script(path, "other", "plain").result()["sha"]
