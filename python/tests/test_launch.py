"""`ebb run SCRIPT.py`: processes of one host train the job of a script."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import EBB, Script, needs_there

needs_there("torch")

# The process worker-2 trains alone until it kills itself with a batch in its hands, once. The
# others begin when the run has told that.
SCRIPT = """
import os, signal, sys, time
from pathlib import Path
import torch, ebbflow
from torch import nn

dies = len(sys.argv) > 1
marker = Path(sys.argv[1]) if dies else None
worker = os.environ.get("EBBFLOW_WORKER")
while dies and worker != "worker-2" and not marker.with_name("told").exists():
    time.sleep(0.02)
generator = torch.Generator().manual_seed(3)
x = torch.randn(200, 6, generator=generator)
y = (x.sum(1) > 0).long()
torch.manual_seed(7)
model = nn.Sequential(nn.Linear(6, 32), nn.BatchNorm1d(32), nn.Dropout(0.2), nn.Linear(32, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
source = torch.utils.data.TensorDataset(x, y)
loss = nn.CrossEntropyLoss()
with ebbflow.join(model, optimizer, source, micro=8, effective=32, epochs=3, name="mine") as job:
    for epoch in job.epochs():
        for batch in epoch:
            if dies and worker == "worker-2" and not marker.exists():
                marker.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            job.step(loss(model(batch.x), batch.y))
print("trained", job.model_sha256, flush=True)
"""

TWICE = """
import torch, ebbflow

x = torch.zeros(8, 2)
for name in ("one", "two", "two"):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    source = torch.utils.data.TensorDataset(x, x[:, :1])
    with ebbflow.join(model, optimizer, source, micro=4, epochs=1, name=name) as job:
        for epoch in job.epochs():
            for batch in epoch:
                job.step(model(batch.x).mean())
"""


def launch(
    script: Path, out: Path, *arguments: str, workers: int = 1, tells: str | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a script. There is a file ``told`` once the run has told ``tells``."""
    command = [str(EBB), "run", str(script), "--workers", str(workers), "--out", str(out), "--json"]
    run = subprocess.Popen(
        [*command, "--", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "EBB_TLS_CA": "of another cluster"},
    )
    lines = []
    try:
        assert run.stdout is not None and run.stderr is not None
        # It prints a line for each job, which its pipe takes.
        for line in run.stderr:
            lines.append(line)
            if tells is not None and tells in line:
                out.with_name("told").touch()
        printed = run.stdout.read()
        code = run.wait()
    finally:
        run.kill()
        run.wait()
    return subprocess.CompletedProcess(run.args, code, printed, "".join(lines))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Give the hash of the model that one process trains."""
    script = tmp_path_factory.mktemp("alone") / "train.py"
    script.write_text(SCRIPT)
    sha: str = Script(None, script).result()["sha"]
    return sha


# S1-09, S1-12, S4-16
def test_three_processes_of_which_one_is_killed_train_the_bits_of_one_alone(
    alone: str, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    out = tmp_path / "out"
    again = "worker-2 was ended by signal 9; it is started again in 1.0 s"
    said = launch(script, out, str(tmp_path / "marker"), workers=3, tells=again)
    assert said.returncode == 0, said.stderr
    assert again in said.stderr
    assert json.loads(said.stdout)["model_sha256"] == alone
    assert json.loads((out / "summary.json").read_text())["status"] == "succeeded"
    for index in range(3):
        log = (out / f"logs/worker-{index}.log").read_text()
        assert f"trained {alone}" in log or (index == 2 and log == ""), (index, log)
        assert f"worker-{index} | trained {alone}" in said.stderr or index == 2


def test_a_process_that_ends_well_before_the_job_is_not_started_again(
    alone: str, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    # It holds a batch, which another process trains.
    script.write_text(SCRIPT.replace("os.kill(os.getpid(), signal.SIGKILL)", "sys.exit()", 1))
    out = tmp_path / "out"
    left = "worker-2 left before the end of the job"
    said = launch(script, out, str(tmp_path / "marker"), workers=3, tells=left)
    assert said.returncode == 0, said.stderr
    assert (tmp_path / "marker").exists()
    assert left in said.stderr
    assert "started again" not in said.stderr
    assert json.loads(said.stdout)["model_sha256"] == alone
    logs = [(out / f"logs/worker-{index}.log").read_text() for index in range(3)]
    assert [f"trained {alone}" in log for log in logs] == [True, True, False]


def test_a_process_that_comes_late_gets_the_end_of_the_job(tmp_path: Path) -> None:
    script = tmp_path / "late.py"
    # The second process begins when the first one has trained the whole job.
    script.write_text(
        SCRIPT.replace("dies = len(sys.argv) > 1", "dies = False").replace(
            "generator = ",
            "while worker == 'worker-1' and not Path(sys.argv[1]).exists():\n"
            "    time.sleep(0.02)\ngenerator = ",
            1,
        )
        + "Path(sys.argv[1]).touch()\n"
    )
    said = launch(script, tmp_path / "out", str(tmp_path / "marker"), workers=2)
    assert said.returncode == 0, said.stderr
    logs = [(tmp_path / f"out/logs/worker-{index}.log").read_text() for index in range(2)]
    assert logs[0] == logs[1] and "trained" in logs[0]
    assert len(said.stdout.splitlines()) == 1, "one job"


def test_jobs_of_one_script_have_folders_and_names_of_their_own(tmp_path: Path) -> None:
    script = tmp_path / "twice.py"
    script.write_text(TWICE)
    out = tmp_path / "out"
    said = launch(script, out)
    assert said.returncode == 1, said.stderr
    assert "each job of a script needs a name of its own" in said.stderr
    assert "worker-0 ended with exit code 1 after the end of the job" in said.stderr
    jobs = [json.loads(line)["job"] for line in said.stdout.splitlines()]
    assert jobs == ["one-1", "two-2"]
    assert json.loads((out / "summary.json").read_text())["job"] == "one-1"
    assert json.loads((out / "two-2/summary.json").read_text())["job"] == "two-2"


def test_a_job_that_elects_who_calls_callbacks_is_no_job_of_the_run(tmp_path: Path) -> None:
    script = tmp_path / "called.py"
    script.write_text(
        SCRIPT.replace(
            'name="mine")', 'name="mine", callbacks=[ebbflow.trackers.Csv(sys.argv[1])])', 1
        )
        .replace("dies = len(sys.argv) > 1", "dies = False")
        .replace("import torch, ebbflow", "import torch, ebbflow, ebbflow.trackers")
    )
    table = tmp_path / "metrics.csv"
    said = launch(script, tmp_path / "out", str(table))
    assert said.returncode == 0, said.stderr
    (job,) = [json.loads(line)["job"] for line in said.stdout.splitlines()]
    assert job.partition("-")[0] == "mine", "the election has the other number"
    assert "train/loss" in table.read_text()


def test_a_script_of_the_wheel_runs_with_the_interpreter_of_the_wheel(tmp_path: Path) -> None:
    script = tmp_path / "where.py"
    script.write_text("import sys, ebbflow; print(sys.executable)")
    said = launch(script, tmp_path / "out")
    assert said.returncode == 1
    assert f"worker-0 | {sys.executable}" in said.stderr
    assert "no process has joined a job of this run by ebbflow.join" in said.stderr
