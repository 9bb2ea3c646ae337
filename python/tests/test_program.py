"""The program ``ebb`` of the wheel behaves as the Rust program does."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import ebbflow

from .conftest import DIGITS, EBB


def test_the_wheel_carries_the_program_with_its_version() -> None:
    for command in ([str(EBB)], [sys.executable, "-m", "ebbflow"]):
        said = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
        assert said.stdout == f"ebb {ebbflow.__version__}\n"


def test_a_wrong_argument_is_explained_with_exit_code_2() -> None:
    said = subprocess.run([EBB, "runn"], capture_output=True, text=True, check=False)
    assert said.returncode == 2
    assert "unrecognized subcommand" in said.stderr


def test_a_failure_is_explained_with_exit_code_1(tmp_path: Path) -> None:
    said = subprocess.run(
        [EBB, "run", str(tmp_path / "no.toml")], capture_output=True, text=True, check=False
    )
    assert said.returncode == 1
    assert said.stderr.startswith("error: job file")


def test_a_job_runs_and_portable_instructions_start_the_program_again(tmp_path: Path) -> None:
    hashes = []
    for index, more in enumerate([[], ["--numerics", "portable"]]):
        out = tmp_path / str(index)
        command = [str(EBB), "run", str(DIGITS), "--set", "epochs=1", "--out", str(out)]
        command = [*command, "--json", *more]
        said = subprocess.run(command, capture_output=True, text=True, check=True)
        hashes.append(json.loads(said.stdout)["model_sha256"])
        assert (out / "model.safetensors").is_file()
    assert hashes[0] == hashes[1]


def test_ctrl_c_ends_the_program_cleanly_with_exit_code_130(tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [str(EBB), "run", str(DIGITS), "--set", "epochs=1000000", "--out", str(out)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as child:
        assert child.stderr is not None
        # The job has begun, so the program listens for signals.
        assert any("step " in line for line in child.stderr)
        child.send_signal(signal.SIGINT)
        child.stderr.read()
    assert child.returncode == 130
    assert (out / "model.safetensors").is_file()
