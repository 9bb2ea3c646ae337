"""`ebbflow.launch`: a script in processes of this host, from Python."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from pathlib import Path

import ebbflow
import pytest
from ebbflow import errors
from ebbflow.launcher import jobs_of

from .conftest import needs_there

needs_there("torch")

SCRIPT = """
import os, sys, time, torch, ebbflow

model = torch.nn.Linear(2, 1)
with torch.no_grad():
    model.weight.zero_()
    model.bias.zero_()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
source = torch.utils.data.TensorDataset(torch.ones(8, 2), torch.ones(8, 1))
with ebbflow.join(model, optimizer, source, micro=4, epochs=1, name="mine") as job:
    for epoch in job.epochs():
        for batch in epoch:
            print("process", os.getpid(), flush=True)
            if "wait" in sys.argv:
                time.sleep(600)
            job.step(model(batch.x).mean())
print("of", os.environ.get("OWN"), os.getcwd(), sys.argv[1:], flush=True)
"""

#: Waits until it is ended, without a job: for tests that are about processes alone.
WAITS = """
import os, time
from pathlib import Path

# The parent of a process is the guard of its agent.
agent = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[1]
print("process", os.getpid(), agent, flush=True)
time.sleep(600)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def test_a_launch_has_the_lines_and_the_result_of_its_job(tmp_path: Path, script: Path) -> None:
    cwd = tmp_path / "elsewhere"
    cwd.mkdir()
    heard: list[str] = []
    launch = ebbflow.launch(
        script,
        ["--lr", "0.1"],
        workers=2,
        out=tmp_path / "out",
        environment={"OWN": "its own"},
        cwd=cwd,
        on_line=heard.append,
    )
    result = launch.wait()
    assert launch.state == "succeeded" and repr(launch).endswith("train.py: succeeded>")
    assert result.status.state == "succeeded" and result.status.job.startswith("mine")
    assert result.out == launch.out == tmp_path / "out"
    assert set(result.state_dict()) == {"weight", "bias"}
    lines = list(launch.logs())
    assert lines == heard
    for worker in ("worker-0", "worker-1"):
        assert f"{worker} | of its own {cwd} ['--lr', '0.1']" in lines
    assert launch.results()[0].model_sha256 == result.model_sha256


def test_a_launch_is_cancelled_in_order_or_by_force(tmp_path: Path, script: Path) -> None:
    for force in (False, True):
        launch = ebbflow.launch(script, ["wait"], out=tmp_path / str(force))
        process = next(line for line in launch.logs() if "| process" in line).split()[-1]
        with pytest.raises(TimeoutError, match=r"train\.py has not ended after 0 s"):
            launch.wait(timeout=0)
        assert launch.state == "running"
        launch.cancel(force=force)
        with pytest.raises(errors.JobCancelledError, match=r"train\.py was cancelled") as caught:
            launch.wait()
        assert launch.state == "cancelled" and caught.value.result is None
        ended(int(process))
        launch.cancel()
        assert launch.state == "cancelled"


def test_a_script_that_fails_is_told_with_its_last_lines(tmp_path: Path) -> None:
    script = tmp_path / "wrong.py"
    script.write_text("print('begun')\nraise ValueError('a wrong thing')\n")
    launch = ebbflow.launch(script, out=tmp_path / "out")
    with pytest.raises(errors.ScriptError) as caught:
        launch.wait()
    assert str(caught.value).startswith("wrong.py: worker-0 ended with exit code 1, and no process")
    # Both streams, in an order that nobody knows.
    assert {"begun", "ValueError: a wrong thing"} <= set(caught.value.lines)
    assert "begun\n" in (caught.value.logs / "worker-0.log").read_text()
    assert launch.state == "failed"


def test_a_script_that_fails_after_its_job_is_told(tmp_path: Path, script: Path) -> None:
    script.write_text(SCRIPT + "raise OSError('no space')\n")
    with pytest.raises(errors.ScriptError, match="after the end of the job") as caught:
        ebbflow.launch(script, out=tmp_path / "out").wait()
    assert "OSError: no space" in caught.value.lines


def test_what_ebb_run_does_not_take_is_refused(tmp_path: Path, script: Path) -> None:
    for wrong in (tmp_path / "no.py", tmp_path, script.with_suffix(".toml")):
        with pytest.raises(errors.InvalidJobError, match="no script"):
            ebbflow.launch(wrong)
    launch = ebbflow.launch(script, workers=0, out=tmp_path / "out")
    with pytest.raises(errors.InvalidJobError, match="--workers"):
        launch.wait()
    launch = ebbflow.launch(script, environment={"EBBFLOW_MASTER": "x"}, out=tmp_path / "out")
    with pytest.raises(errors.InvalidJobError, match="EBBFLOW_MASTER cannot be set"):
        launch.wait()
    launch = ebbflow.launch(script, python=tmp_path / "no-python", out=tmp_path / "out")
    with pytest.raises(errors.ScriptError, match="no-python"):
        launch.wait()
    with pytest.raises(FileNotFoundError):
        ebbflow.launch(script, cwd=tmp_path / "no", out=tmp_path / "out")


def test_an_exception_of_the_listener_ends_the_launch(tmp_path: Path, script: Path) -> None:
    script.write_text(WAITS)

    def listen(line: str) -> None:
        if "| process" in line:
            raise LookupError("enough")

    launch = ebbflow.launch(script, ["wait"], out=tmp_path / "out", on_line=listen)
    with pytest.raises(LookupError, match="enough"):
        launch.wait()
    assert launch.state == "cancelled"


def test_all_processes_end_with_the_program_that_launched_them(
    tmp_path: Path, script: Path
) -> None:
    script.write_text(WAITS)
    program = (
        "import ebbflow, sys\n"
        f"launch = ebbflow.launch({str(script)!r}, ['wait'], out={str(tmp_path / 'out')!r})\n"
        "for line in launch.logs():\n"
        "    print(line, flush=True)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as it:
        assert it.stdout is not None
        process = next(line for line in it.stdout if "| process" in line).split()[-2]
        it.send_signal(signal.SIGKILL)
    ended(int(process))


def ended(process: int) -> None:
    """Wait until a process has ended. Nobody may have asked for its exit code yet."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        while Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            time.sleep(0.02)


def test_messages_of_a_platform_among_the_jobs_are_left_out() -> None:
    said = b'\x1b[33m(raylet)\x1b[0m The node with node id: 1 is lost\n{"job": "mine-1"}\n\n'
    assert jobs_of(said + b'{"job": "mine-2"}\n') == ["mine-1", "mine-2"]
    assert jobs_of(b"") == []
