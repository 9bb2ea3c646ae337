"""TorchScript jobs by the PyTorch of this Python."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ebbflow
import pytest
from ebbflow import _script_code, _torchscript, errors, numerics

from .conftest import EBB, needs

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests/golden"
STEPS = GOLDEN / "torch_steps.toml"
FIXTURES = ROOT / "model/tests/fixtures"


def trained(**changes: Any) -> ebbflow.Result:
    """Train the golden module, whose losses plain PyTorch has written."""
    workers = changes.pop("workers", 1)
    settings = {name.replace("__", "."): value for name, value in changes.items()}
    return ebbflow.run(STEPS, workers=workers, changes=settings, progress=False)


def in_new_thread(function: Callable[[], int]) -> int:
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(function).result()


@pytest.mark.parametrize(("case", "micro"), [("one", 32), ("two", 16)])
def test_each_step_has_the_loss_of_plain_pytorch(case: str, micro: int) -> None:
    needs("torch")
    golden = json.loads((GOLDEN / "torch_steps.json").read_text())["cases"][case]["losses"]
    losses = trained(batch__micro=micro).metrics.arrays("train")["loss"]
    assert len(losses) >= len(golden) == 50
    assert losses[:50] == pytest.approx(golden, rel=1e-4)


def test_any_number_of_workers_trains_the_same_bits_and_torch_gets_its_settings_back() -> None:
    torch = needs("torch")
    before = (torch.are_deterministic_algorithms_enabled(), torch._C._jit_texpr_fuser_enabled())
    threads = torch.get_num_threads()
    # No job computes with so many.
    torch.set_num_threads(threads + (os.cpu_count() or 1))
    try:
        own = in_new_thread(torch.get_num_threads)
        one, two = trained(batch__micro=8), trained(batch__micro=8, workers=2)
        assert in_new_thread(torch.get_num_threads) == own == torch.get_num_threads()
    finally:
        torch.set_num_threads(threads)
    assert one.model_sha256 == two.model_sha256
    assert hashlib.sha256(two.weights()).hexdigest() == two.model_sha256
    after = (torch.are_deterministic_algorithms_enabled(), torch._C._jit_texpr_fuser_enabled())
    assert after == before
    names = set(one.state_dict())
    assert {"fc1.weight", "bn.running_mean", "bn.num_batches_tracked"} <= names


def test_the_program_of_the_wheel_trains_the_bits_of_run(tmp_path: Path) -> None:
    torch = needs("torch")
    here = trained()
    command = [str(EBB), "run", str(STEPS), "--workers", "2", "--out", str(tmp_path)]
    subprocess.run(command, check=True, timeout=300, capture_output=True)
    there = ebbflow.Result.read(tmp_path)
    assert there.model_sha256 == here.model_sha256

    module = torch.jit.load(str(tmp_path / "model.pt"))
    assert not module.training
    exported, expected = module.state_dict(), there.state_dict("torch")
    assert exported.keys() == expected.keys()
    assert all(torch.equal(exported[name], expected[name]) for name in expected)


@pytest.mark.parametrize("autocast", ["bf16", "f16"])
def test_any_number_of_workers_trains_the_same_bits_under_autocast(autocast: str) -> None:
    needs("torch")
    settings = {"batch__micro": 8, "epochs": 2}
    lower = [trained(workers=count, model__autocast=autocast, **settings) for count in (1, 2)]
    single = [trained(**settings), trained(model__tf32=True, **settings)]
    assert len({result.model_sha256 for result in lower}) == 1
    assert len({result.model_sha256 for result in single}) == 1, "a CPU has no TF32"
    assert lower[0].model_sha256 != single[0].model_sha256
    assert lower[0].final == lower[1].final


@pytest.mark.parametrize("autocast", [None, "bfloat16", "float16"])
def test_gradients_have_the_bits_of_plain_pytorch(autocast: str | None, tmp_path: Path) -> None:
    torch = needs("torch")
    functional = torch.nn.functional

    class Net(torch.nn.Module):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.conv = torch.nn.Conv2d(1, 6, 3)
            self.bn = torch.nn.BatchNorm2d(6)
            self.fc1 = torch.nn.Linear(6 * 6 * 6, 33)
            self.fc2 = torch.nn.Linear(33, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[name-defined]
            x = functional.relu(self.bn(self.conv(x)))
            return self.fc2(functional.gelu(self.fc1(x.flatten(1))))

    net = Net()
    path = tmp_path / "net.pt"
    torch.jit.script(net).save(str(path))
    generator = torch.Generator().manual_seed(3)
    inputs, labels = torch.randn(7, 1, 8, 8, generator=generator), torch.arange(7) % 3
    names = dict(net.named_parameters())
    with _torchscript.kept():
        _torchscript.start()
        module = _torchscript.Module(str(path), 1, autocast)
        entries = module.attributes()
        module.train([(at, entry[2]) for at, entry in enumerate(entries)])
        columns = [
            (name, kind, list(tensor.shape), bytearray(tensor.numpy().tobytes()))
            for name, kind, tensor in [("x", "float32", inputs), ("labels", "int64", labels)]
        ]
        module.forward(columns[:1], columns[1], 0, False, 1)
        loss, _ = module.loss("cross_entropy", 0.0, -100, None, True)
        found = [torch.empty_like(net.state_dict()[entry[0]]) for entry in entries]
        # PyTorch's own gradients in f16 have a scale too, which a product by 2^-16 takes away.
        scale = 65536.0 if autocast == "float16" else None
        module.gradients(1.0, [tensor.numpy().reshape(-1) for tensor in found], scale)
        # As a user of PyTorch writes it, with one thread too.
        lower = None if autocast is None else getattr(torch, autocast)
        with torch.autocast("cpu", lower, enabled=autocast is not None):
            expected = functional.cross_entropy(net(inputs), labels)
        (expected * (scale or 1.0)).backward()
        for parameter in net.parameters():
            parameter.grad /= scale or 1.0
    assert loss == expected.item()
    for (name, *_), tensor in zip(entries, found, strict=True):
        plain = names[name].grad if name in names else net.state_dict()[name]
        assert torch.equal(tensor, plain), name


def test_the_class_knows_the_results_of_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = needs("torch")
    facts, results = numerics.numerics(1)
    assert numerics.numerics(1) == (facts, results)

    def single(*_: Any, **__: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    monkeypatch.setattr(torch, "autocast", single)
    assert numerics.numerics(1) != (facts, results)


@pytest.mark.parametrize("autocast", [None, "bf16", "f16"])
@pytest.mark.parametrize("name", ["batchnorm.pt", "dropout.pt", "tied.pt"])
def test_the_bits_are_those_of_the_program_that_is_linked_to_libtorch(
    name: str, autocast: str | None, tmp_path: Path
) -> None:
    torch = needs("torch")
    linked = os.environ.get("EBB_LINKED_PROGRAM")
    if linked is None:
        pytest.skip("no program that is linked to libtorch (cargo xtask test build test-python)")
    assert torch.__version__.split("+")[0] == _torchscript.LINKED
    lower = {} if autocast is None else {"autocast": autocast}
    job = of_fixture(name, tmp_path, metrics=["accuracy"], **lower)
    here = ebbflow.run(job, workers=2, progress=False)
    file = tmp_path / "job.toml"
    model, data, batch, optimizer = (job[part] for part in ("model", "data", "batch", "optimizer"))
    train = data["train"]
    file.write_text(
        f'name = "fixture"\nepochs = 2\n[model]\nscript = "{model["script"]}"\n'
        'metrics = ["accuracy"]\n'
        + "".join(f'{setting} = "{value}"\n' for setting, value in lower.items())
        + f'[data]\nformat = "npy"\nvalidation_fraction = {data["validation_fraction"]}\n'
        f"train = {{ features = {train['features']}, labels = {train['labels']} }}\n"
        f"[batch]\nmicro = {batch['micro']}\neffective = {batch['effective']}\n"
        f'[optimizer]\nkind = "sgd"\nlearning_rate = {optimizer["learning_rate"]}\n'
    )
    out = tmp_path / "out"
    command = [linked, "run", str(file), "--device", "cpu", "--out", str(out)]
    subprocess.run(command, check=True, timeout=300, capture_output=True)
    there = ebbflow.Result.read(out)
    assert there.model_sha256 == here.model_sha256
    assert there.final == here.final


def of_fixture(name: str, tmp_path: Path, **model: Any) -> dict[str, Any]:
    """Return a job of one of the scripts that the linked engine is tested with."""
    import numpy as np

    drawn = np.random.default_rng(7)
    np.save(tmp_path / "x.npy", drawn.normal(size=(24, 1, 8, 8)).astype(np.float32))
    np.save(tmp_path / "y.npy", np.arange(24) % 3)
    return {
        "name": "fixture",
        "epochs": 2,
        "model": {"script": str(FIXTURES / name), **model},
        "data": {
            "format": "npy",
            "train": {
                "features": [str(tmp_path / "x.npy")],
                "labels": [str(tmp_path / "y.npy")],
            },
            "validation_fraction": 0.25,
        },
        "batch": {"micro": 3, "effective": 6},
        "optimizer": {"kind": "sgd", "learning_rate": 0.05},
    }


@pytest.mark.parametrize("name", ["batchnorm.pt", "dropout.pt", "noisy.pt", "tied.pt"])
def test_random_numbers_state_and_tied_weights_do_not_depend_on_the_workers(
    name: str, tmp_path: Path
) -> None:
    needs("torch")
    job = of_fixture(name, tmp_path, metrics=["accuracy"])
    results = [ebbflow.run(job, workers=workers, progress=False) for workers in (1, 2)]
    assert len({result.model_sha256 for result in results}) == 1
    assert results[0].final == results[1].final
    assert 0 <= results[0].final["accuracy"] <= 1


def test_what_travels_is_what_the_linked_engine_sends() -> None:
    needs("torch")
    with _torchscript.kept():
        _torchscript.start()
        module = _torchscript.Module(str(FIXTURES / "batchnorm.pt"), 1)
        found = {
            name: (parameter, buffer, written)
            for name, _, parameter, buffer, written in module.attributes()
        }
    assert found == {
        "offset": (True, False, False),
        "scale": (False, True, False),
        "mask": (False, True, False),
        "conv.weight": (True, False, False),
        "bn.weight": (True, False, False),
        "bn.bias": (True, False, False),
        "bn.running_mean": (False, True, True),
        "bn.running_var": (False, True, True),
        "bn.num_batches_tracked": (False, True, True),
        "fc.weight": (True, False, False),
        "fc.bias": (True, False, False),
    }


def test_a_context_of_forward_writes_no_buffer(tmp_path: Path) -> None:
    torch = needs("torch")

    class Gated(torch.nn.Module):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.fc = torch.nn.Linear(64, 3)
            self.register_buffer("scale", torch.ones(64))
            self.register_buffer("mask", torch.arange(64) % 5 > 0)

        def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[name-defined]
            x = x.flatten(1)
            with torch.no_grad():
                scaled = x.masked_fill(~self.mask, 0.0) * self.scale
            return self.fc(scaled)

    path = tmp_path / "gated.pt"
    torch.jit.script(Gated()).save(str(path))
    with _torchscript.kept():
        _torchscript.start()
        attributes = _torchscript.Module(str(path), 1).attributes()
    assert not any(written for *_, written in attributes)
    job = of_fixture(str(path), tmp_path, metrics=["accuracy"])
    assert ebbflow.run(job, progress=False).final.keys() >= {"loss", "accuracy"}


def test_no_batch_sees_what_forward_changed_while_another_was_measured(tmp_path: Path) -> None:
    torch = needs("torch")

    class Counts(torch.nn.Module):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.fc = torch.nn.Linear(64, 3)
            self.register_buffer("calls", torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[name-defined]
            self.calls.add_(1.0)
            return self.fc(x.flatten(1)) * self.calls

    torch.jit.script(Counts()).save(str(tmp_path / "counts.pt"))
    job = of_fixture(str(tmp_path / "counts.pt"), tmp_path)
    # Four batches are measured, or one. No step changes the weights, and each adds 1 to `calls`.
    job["data"]["validation_fraction"] = 0.5
    job["optimizer"]["learning_rate"] = 1e-30
    losses = []
    for micro in (3, 12):
        job["batch"] = {"micro": micro, "effective": 12}
        losses.append(ebbflow.run(job, progress=False).final["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("counts_calls.pt", "attribute `calls`"),
        ("clamped.pt", "parameter `fc.weight`"),
        ("half.pt", "parameter `fc.weight` is float16"),
    ],
)
def test_scripts_that_the_linked_engine_refuses_are_refused(
    name: str, said: str, tmp_path: Path
) -> None:
    needs("torch")
    with pytest.raises(errors.JobFailedError, match=said):
        ebbflow.run(of_fixture(name, tmp_path), progress=False)


def test_without_torch_the_job_says_what_to_install(tmp_path: Path) -> None:
    job = of_fixture("tied.pt", tmp_path)
    code = (
        "import sys, json; sys.modules['torch'] = None\n"
        "import ebbflow\n"
        "try:\n"
        "    ebbflow.run(json.loads(sys.argv[1]), progress=False)\n"
        "except ebbflow.Error as error:\n"
        "    print(type(error).__name__, error)\n"
    )
    command = [sys.executable, "-c", code, json.dumps(job)]
    done = subprocess.run(command, check=True, timeout=300, capture_output=True, text=True)
    assert done.stdout.startswith("ClusterError"), done.stdout + done.stderr
    assert "pip install torch==2.11.0" in done.stdout


def test_another_version_of_torch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = needs("torch")
    monkeypatch.setattr(torch, "__version__", "2.4.1+cpu")
    with (
        pytest.warns(UserWarning, match=r"PyTorch 2\.4\.1\+cpu .* torch==2\.11\.0"),
        _torchscript.kept(),
    ):
        _torchscript.start()


def test_schemas_say_what_is_written_and_what_is_one_memory() -> None:
    found = _script_code.schema(
        "aten::add_.Tensor(Tensor(a!) self, Tensor other, *, Scalar alpha=1) -> Tensor(a!)"
    )
    assert found is not None
    assert [(term.name, term.is_written) for term in found[0]] == [
        ("self", True),
        ("other", False),
        ("alpha", False),
    ]
    parts = _script_code.schema(
        'aten::split.x(Tensor(a -> *) self, str by=",(", int dim=0) -> Tensor(a)[]'
    )
    assert parts is not None
    assert [term.name for term in parts[0]] == ["self", "by", "dim"]
    assert parts[0][0].aliases == parts[1][0].aliases == {"a"}
    assert not parts[0][0].is_written
    pair = _script_code.schema("aten::f(Tensor x) -> (Tensor, Tensor(b))")
    assert pair is not None
    assert [term.aliases for term in pair[1]] == [set(), {"b"}]
    assert _script_code.schema("(no schema)") is None


def test_the_file_says_which_attributes_are_buffers_and_their_order() -> None:
    root = _script_code.declared(str(FIXTURES / "batchnorm.pt"))["__torch__.BatchNormed"]
    assert root.buffers == {"scale", "mask"}
    assert sorted(root.buffers | {"offset"}, key=root.order.__getitem__) == [
        "offset",
        "scale",
        "mask",
    ]
