"""`ebb run SCRIPT.py --on PLATFORM`: what all platforms share, with roles on this host."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import ebbflow
import pytest
from ebbflow import errors
from ebbflow.launchers.cluster import RESTARTS_MAX, RESTARTS_SECS, Restarts
from ebbflow.launchers.platform import Guard, last_lines, url_in

from .conftest import needs_there
from .test_launcher import SCRIPT, WAITS, ended
from .test_scripts import TRAIN, code, trained_alone

needs_there("torch")


def children(process: int) -> Iterator[int]:
    """Yield all processes below a process."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
        if parent == process:
            yield int(folder.name)
            yield from children(int(folder.name))


def role(launch: ebbflow.Launch, verb: str) -> int:
    """Return the process of one role of a launch."""
    assert launch._child is not None
    for process in children(launch._child.pid):
        # It may have ended since it was seen.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            words = Path(f"/proc/{process}/cmdline").read_bytes().decode().split("\0")
            if words[4:6] == [verb, "--listen"]:
                return process
    raise AssertionError(f"no {verb} below {launch._child.pid}")


def losing(is_lost: str) -> str:
    """Return a script for two processes, of which one is on a node that will be lost.

    That one keeps a batch, and writes its id and that of its agent into the file ``held``. The
    other one joins the job after that, because whoever is alone in a job gets all batches of a
    step. With its first batch it waits for the file ``lost``. ``is_lost`` is an expression that
    tells them apart.
    """
    begin = TRAIN.index("def first_batch")
    end = TRAIN.index("generator = torch")
    return f"""{TRAIN[:begin]}
def first_batch():
    if place is None:
        return
    if {is_lost}:
        (place / "begun").write_text(f"{{os.getpid()}} {{agent()}}")
        (place / "begun").rename(place / "held")
        while True:
            time.sleep(600)
    wait("lost")

if not ({is_lost}):
    wait("held")
{TRAIN[end:]}"""


def wait_for(path: Path, launch: ebbflow.Launch) -> str:
    while not path.exists():
        assert launch.state == "running", list(launch.logs())
        time.sleep(0.02)
    return path.read_text()


def test_a_killed_agent_is_started_again_and_changes_no_bit(tmp_path: Path) -> None:
    # The job goes on when the launcher has noticed that an agent is gone, and not before.
    text = TRAIN.replace('    wait("held")\n', '    wait("held")\n    wait("lost")\n', 1)
    assert text != TRAIN
    script = code(tmp_path, text)
    alone = trained_alone(script)
    out = tmp_path / "out"
    launch = ebbflow.launch(script, [str(tmp_path)], workers=3, ps=2, out=out, on="local")
    process, agent = map(int, wait_for(tmp_path / "held", launch).split())
    os.kill(agent, signal.SIGKILL)
    again = "was ended by SIGKILL; it is started again"
    assert any(again in line for line in launch.logs()), list(launch.logs())
    (tmp_path / "lost").touch()
    result = launch.wait()
    assert result.status.state == "succeeded" and result.model_sha256 == alone
    logs = sorted(path.name for path in (out / "logs").iterdir())
    # The process of the agent that was killed may come too late to say anything.
    assert {"train-1-0.log", "train-1-2.log"} <= set(logs)
    assert f"trained {alone}\n" in (out / "logs/train-1-0.log").read_text()
    # It dies with its agent.
    ended(process)
    assert [path.name for path in (out / "launch").iterdir()] == [".gitignore"], "nothing is left"


@pytest.mark.parametrize("force", [False, True])
def test_everything_is_taken_away_when_a_launch_is_cancelled(tmp_path: Path, force: bool) -> None:
    script = tmp_path / "code/train.py"
    script.parent.mkdir()
    script.write_text(SCRIPT)
    launch = ebbflow.launch(script, ["wait"], out=tmp_path / "out", on="local")
    process = int(next(line for line in launch.logs() if "| process" in line).split()[-1])
    assert launch._child is not None
    started = [process, *children(launch._child.pid)]
    launch.cancel(force=force)
    with pytest.raises(errors.JobCancelledError):
        launch.wait()
    for process in started:
        ended(process)


def test_a_launch_fails_with_its_master_and_says_what_it_said(tmp_path: Path) -> None:
    script = tmp_path / "code/train.py"
    script.parent.mkdir()
    script.write_text(WAITS)
    launch = ebbflow.launch(script, out=tmp_path / "out", on="local")
    process = int(next(line for line in launch.logs() if "| process" in line).split()[-2])
    os.kill(role(launch, "master"), signal.SIGKILL)
    with pytest.raises(
        errors.ScriptError, match="master was ended by SIGKILL; it said last"
    ) as caught:
        launch.wait()
    assert any("listening on" in line for line in caught.value.lines)
    ended(process)


def test_a_script_that_fails_everywhere_fails_its_job(tmp_path: Path) -> None:
    script = tmp_path / "code/wrong.py"
    script.parent.mkdir()
    script.write_text("raise OSError('no room')\n")
    launch = ebbflow.launch(script, out=tmp_path / "out", on="local")
    with pytest.raises(errors.JobFailedError, match="OSError: no room"):
        launch.wait()
    assert "OSError: no room" in (tmp_path / "out/logs/wrong-1-0.log").read_text()


def test_wrong_arguments_are_refused_before_anything_starts(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    with pytest.raises(errors.InvalidJobError, match="only with `on`"):
        ebbflow.launch(script, cpus=2)
    with pytest.raises(errors.InvalidJobError, match="cwd: not with `on`"):
        ebbflow.launch(script, cwd=tmp_path, on="local")
    for on, workers, said in (("pbs", 1, "invalid choice: 'pbs'"), ("local", 257, "1 to 256")):
        with pytest.raises(errors.InvalidJobError, match=said):
            ebbflow.launch(script, workers=workers, out=tmp_path / "out", on=on).wait()
    (tmp_path / "file").write_text("")
    with pytest.raises(errors.ScriptError, match=r"--out .*file"):
        ebbflow.launch(script, out=tmp_path / "file", on="local").wait()


def test_a_role_is_started_again_three_times_in_ten_minutes() -> None:
    restarts = Restarts()
    assert [restarts.allow(10.0 * start) for start in range(RESTARTS_MAX + 1)] == [
        *[True] * RESTARTS_MAX,
        False,
    ]
    assert not restarts.allow(RESTARTS_SECS - 0.1)
    assert restarts.allow(RESTARTS_SECS), "the first start is ten minutes ago"
    assert not restarts.allow(RESTARTS_SECS)


def test_a_guard_waits_for_its_owner_and_for_what_its_owner_starts(tmp_path: Path) -> None:
    done = tmp_path / "done"
    # The owner is killed while a program that it started still has the pipe.
    program = (
        "import os, signal, subprocess, sys\n"
        "from ebbflow.launchers.platform import Guard\n"
        f"guard = Guard(['touch', {str(done)!r}], os.environ)\n"
        "subprocess.Popen(['cat'], stdin=0, pass_fds=(guard.pipe,))\n"
        "print(guard._shell.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdin is not None and owner.stdout is not None
        shell = int(owner.stdout.readline())
        owner.wait()
        assert Path(f"/proc/{shell}").exists() and not done.exists()
        owner.stdin.close()
        ended(shell)
    assert done.exists()
    guard = Guard(["false"], os.environ)
    assert (guard.release(), guard.release()) == (1, 0)


def test_a_url_is_read_once_its_line_is_whole(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert url_in(log) is None and last_lines(log) == []
    log.write_text("a warning\nmaster listening on http://10.0.0.1:47")
    assert url_in(log) is None
    log.write_text("a warning\nmaster listening on http://10.0.0.1:4700\n" + "line\n" * 30)
    assert url_in(log) == "http://10.0.0.1:4700"
    assert last_lines(log) == ["line"] * 20
