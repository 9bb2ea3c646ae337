"""The wheel in a fresh virtual environment that has NumPy and nothing else, and then PyTorch."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import ebbflow
import pytest

from .conftest import DIGITS, needs_programs, needs_there

ROOT = Path(__file__).parents[2]

TRAIN = ROOT / "examples/python/mnist/train.py"

#: Runs a script, and says which weights it has trained and which the process holds.
GATED = Path(__file__).with_name("gated.py")

#: The only wheel in this folder is the one that the check built, and installed for these tests.
WHEELS = Path(sys.prefix).parent / "wheel"

#: Variables of the check and of its environment: packages, interpreters, masters, keys.
OF_TESTS = ("EBB", "PYTHON", "PIP_", "VIRTUAL_ENV", "CARGO_PKG_", "CARGO_MANIFEST_")

CLEAN = {name: value for name, value in os.environ.items() if not name.startswith(OF_TESTS)}

#: A pip that serves an environment without one.
PIP = ["python3", "-m", "pip", "--no-input", "--disable-pip-version-check", "--python"]

WHAT = """
import importlib.metadata
print(*sorted({found.name for found in importlib.metadata.distributions()}))
"""

RUN = """
import sys, ebbflow
result = ebbflow.run(sys.argv[1], changes={"epochs": 1}, progress=False)
print(result.model_sha256, {type(value).__module__ for value in result.state_dict().values()})
"""

JOIN = """
import ebbflow
ebbflow.join(object(), None, None, epochs=1)
"""

#: The job of the digits, whose model is a TorchScript file.
SCRIPTED = (
    DIGITS.read_text()
    .replace('builtin = "mlp"\noptions = { hidden = [128] }', 'script = "model.pt"')
    .replace("images.idx3.gz", str(DIGITS.parent / "images.idx3.gz"))
    .replace("labels.idx1.gz", str(DIGITS.parent / "labels.idx1.gz"))
)


def start(*command: str | Path, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env=CLEAN, cwd=folder
    )


def good(*command: str | Path, folder: Path) -> str:
    said = start(*command, folder=folder)
    assert said.returncode == 0, said.stdout + said.stderr
    return said.stdout


def lend_numpy(packages: Path) -> None:
    """Link NumPy and what pip knows of it, so that no index is asked."""
    numpy = importlib.metadata.distribution("numpy")
    # Its programs lie elsewhere.
    names = {file.parts[0] for file in numpy.files or [] if file.parts[0] != ".."}
    assert "numpy" in names
    for name in names:
        (packages / name).symlink_to(Path(str(numpy.locate_file(name))).resolve())


def packages_of(python: Path, folder: Path) -> Path:
    """Return the folder of an interpreter's packages."""
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    return Path(good(python, "-c", ask, folder=folder).strip())


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Give an environment in which pip has installed the wheel."""
    wheels = list(WHEELS.glob("ebbflow-*.whl"))
    if not wheels:
        said = f"no wheel in {WHEELS}, as `cargo xtask test python` leaves it"
        assert os.environ.get("EBB_REQUIRE_ALL") != "1", said
        pytest.skip(said)
    folder = tmp_path_factory.mktemp("fresh")
    environment = folder / "environment"
    good(sys.executable, "-m", "venv", "--without-pip", environment, folder=folder)
    python = environment / "bin/python"
    lend_numpy(packages_of(python, folder))
    # Without `--no-deps`: what else the wheel depended on would be missing.
    (wheel,) = wheels
    # One wheel is for CPython 3.10 and every later one.
    assert wheel.stem.split("-")[2:4] == ["cp310", "abi3"], wheel
    good(*PIP, python, "install", "--quiet", "--no-index", wheel, folder=folder)
    yield environment
    # pytest keeps such folders of several runs, and this one is large.
    shutil.rmtree(environment)


def test_the_wheel_needs_numpy_alone_and_brings_the_program(fresh: Path, tmp_path: Path) -> None:
    python, ebb = fresh / "bin/python", fresh / "bin/ebb"
    assert good(python, "-c", WHAT, folder=tmp_path).split() == ["ebbflow", "numpy"]
    assert good(ebb, "--version", folder=tmp_path) == f"ebb {ebbflow.__version__}\n"
    said = good(python, "-c", "import ebbflow; print(ebbflow.__file__)", folder=tmp_path)
    assert Path(said.strip()).is_relative_to(fresh)
    out = tmp_path / "out"
    said = good(*(ebb, "run", DIGITS, "--set", "epochs=1", "--out", out, "--json"), folder=tmp_path)
    trained = json.loads(said)["model_sha256"]
    assert (out / "model.safetensors").is_file()
    # The same job from Python, with its weights as arrays.
    assert good(python, "-c", RUN, DIGITS, folder=tmp_path) == f"{trained} {{'numpy'}}\n"
    assert ebbflow.run(DIGITS, changes={"epochs": 1}, progress=False).model_sha256 == trained


def test_what_needs_torch_says_so_where_it_is_missing(fresh: Path, tmp_path: Path) -> None:
    python, ebb = fresh / "bin/python", fresh / "bin/ebb"
    missing = "ModuleNotFoundError: No module named 'torch'"
    said = start(python, "-c", "import torch", folder=tmp_path)
    assert said.returncode == 1 and missing in said.stderr
    said = start(python, "-c", JOIN, folder=tmp_path)
    assert said.returncode == 1
    needed = "ModuleNotFoundError: ebbflow.join needs PyTorch: pip install 'ebbflow[torch]'"
    assert needed in said.stderr, said.stderr
    # A script of PyTorch runs with the interpreter of this wheel, too.
    said = start(ebb, "run", TRAIN, "--out", tmp_path / "example", folder=tmp_path)
    assert said.returncode == 1
    assert f"worker-0 | {missing}" in said.stderr, said.stderr
    # So does the engine of TorchScript modules.
    (tmp_path / "job.toml").write_text(SCRIPTED)
    (tmp_path / "model.pt").write_bytes(b"PK")
    said = start(python, "-c", RUN, "job.toml", folder=tmp_path)
    assert said.returncode == 1
    assert "ClusterError: a TorchScript model needs PyTorch here" in said.stderr, said.stderr
    assert "pip install torch==2.11.0" in said.stderr, said.stderr


@pytest.fixture
def with_torch(fresh: Path, tmp_path: Path) -> Iterator[Path]:
    """Give the environment while it finds the PyTorch of the tests, and what lies beside it."""
    needs_there("torch")
    torch = importlib.util.find_spec("torch")
    assert torch is not None and torch.origin is not None
    link = packages_of(fresh / "bin/python", tmp_path) / "torch-of-the-tests.pth"
    link.write_text(f"{Path(torch.origin).parents[1]}\n")
    yield fresh
    link.unlink()


def test_the_example_of_pytorch_trains_alone_and_in_four_processes(
    with_torch: Path, tmp_path: Path
) -> None:
    python, ebb = with_torch / "bin/python", with_torch / "bin/ebb"
    said = good(python, "-c", "import ebbflow; print(ebbflow.__file__)", folder=tmp_path)
    assert Path(said.strip()).is_relative_to(with_torch)
    arguments = ("--epochs", "2", "--save-model", tmp_path / "model.pt")
    said = good(python, GATED, "none", TRAIN, *arguments, folder=tmp_path)
    alone = json.loads(said.splitlines()[-1])
    assert alone["held"] == alone["sha"]
    assert (tmp_path / "model.pt").is_file()
    command: list[str | Path] = [ebb, "run", TRAIN, "--workers", "4", "--out", tmp_path / "out"]
    summary = json.loads(good(*command, "--json", "--", *arguments[:2], folder=tmp_path))
    assert summary["status"] == "succeeded" and summary["model_sha256"] == alone["sha"]
    model = (tmp_path / "out/model.safetensors").read_bytes()
    assert hashlib.sha256(model).hexdigest() == alone["sha"]


def test_pip_finds_out_how_to_build_a_checkout(tmp_path: Path) -> None:
    """Let pip do what precedes the build: read `pyproject.toml`, and ask maturin what it builds."""
    # The stage `python` of the check builds. pip would build with optimisation, and PyO3 is
    # compiled again for an interpreter at another path.
    needs_there("maturin")
    needs_programs("cargo", packages="rustup")
    maturin = importlib.util.find_spec("maturin")
    assert maturin is not None and maturin.origin is not None
    programs = Path(maturin.origin).parents[1] / "bin"
    report = tmp_path / "report.json"
    command = [*PIP, sys.executable, "install", "--quiet", "--dry-run", "--no-index"]
    said = subprocess.run(
        [*command, "--no-build-isolation", "--report", str(report), "."],
        capture_output=True,
        text=True,
        check=False,
        env={**CLEAN, "PATH": f"{programs}:{CLEAN['PATH']}"},
        cwd=ROOT,
    )
    assert said.returncode == 0, said.stdout + said.stderr
    (found,) = json.loads(report.read_text())["install"]
    metadata = found["metadata"]
    assert (metadata["name"], metadata["version"]) == ("ebbflow", ebbflow.__version__)
    required = [need for need in metadata["requires_dist"] if "extra ==" not in need]
    assert len(required) == 1 and required[0].startswith("numpy")
