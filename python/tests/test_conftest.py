"""What `conftest.py` promises the other files."""

from __future__ import annotations

import ast
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .conftest import DEAR, KEEP_COMPILED, LIMIT, Cluster, Process, Script, needs, needs_there

HERE = Path(__file__).parent

#: A fixture of a file that waits for a process without an end.
HANGS = """
import signal
from pathlib import Path

import pytest
from conftest import Script

HERE = Path(__file__).parent

@pytest.fixture(scope="module")
def hangs():
    assert signal.getitimer(signal.ITIMER_REAL)[0] > 0
    script = Script(None, HERE / "script.py")
    wait = script.child.communicate

    def communicate():
        # The signal comes after this file, so never before the wait.
        (HERE / "began").write_text(str(script.child.pid))
        (HERE / "began").rename(HERE / "pid")
        return wait()

    script.child.communicate = communicate
    return script.result()

def test_with_it(hangs):
    pass

def test_without_it():
    pass
"""

#: It lets the time of its parent be over, and then waits.
SCRIPT = """
import os, signal, time
from pathlib import Path

while not Path(__file__).with_name("pid").exists():
    time.sleep(0.02)
os.kill(os.getppid(), signal.SIGALRM)
while True:
    signal.pause()
"""


def test_a_fixture_that_hangs_fails_and_leaves_no_process(tmp_path: Path) -> None:
    for name in ("conftest.py", "gated.py"):
        shutil.copy(HERE / name, tmp_path)
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "test_hangs.py").write_text(HANGS)
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", tmp_path, tmp_path],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert (tmp_path / "pid").exists(), ended.stdout
    pid = int((tmp_path / "pid").read_text())
    left = Path(f"/proc/{pid}").exists()
    if left:
        os.kill(pid, signal.SIGKILL)
    assert not left
    assert ended.returncode == 1, ended.stdout
    assert "1 passed" in ended.stdout and "1 error" in ended.stdout
    assert f"no end within {LIMIT} s" in ended.stdout


#: Says what it is, once a line has come. `ebbflow.keras` counts as dear, is cheap itself, and sets
#: variables.
SAYS = """
import json, os, random, sys
import ebbflow.keras
import numpy

line = sys.stdin.readline()
print("hears", line, end="", flush=True)
sys.stdin.readline()
drawn = [random.random(), numpy.random.random()]
found = {"line": line, "arguments": sys.argv[1:], "folder": os.getcwd(), "drawn": drawn}
found |= {"parent": os.getppid(), "hash": hash("ebbflow"), "variables": dict(os.environ)}
sys.exit(json.dumps(found))
"""


@pytest.fixture
def says(tmp_path: Path) -> Path:
    """Give the script's file."""
    path = tmp_path / "script.py"
    path.write_text(SAYS)
    return path


def said_by(script: Script) -> dict[str, Any]:
    """Let a process that says what it is do it."""
    script.go()
    script.go()
    code, said = script.end()
    assert code == 1, said
    found: dict[str, Any] = json.loads(said)
    return found


def test_a_fork_is_a_process_of_its_own(
    says: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The library that draws numbers is there before the fork.
    monkeypatch.setitem(DEAR, "numpy", ("numpy.random",))
    begun = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        begun.append(Script("http://master", says, name, keys={"OF_THE_TEST": name}))
    one, two = (said_by(script) for script in begun)
    for name, found in (("one", one), ("two", two)):
        assert found["line"] == "\n" and found["arguments"] == [name]
        assert found["folder"] == str(tmp_path / name)
        expected = {**os.environ, "OF_THE_TEST": name, "EBBFLOW_MASTER": "http://master"}
        assert found["variables"].items() >= expected.items()
    assert one["parent"] == two["parent"] != os.getpid()
    assert one["hash"] == two["hash"]
    assert all(mine != theirs for mine, theirs in zip(one["drawn"], two["drawn"], strict=True))


def test_a_fork_has_the_variables_of_imports_and_a_fresh_process_imports_itself(
    says: Path,
) -> None:
    seeded = {"PYTHONHASHSEED": "5"}
    other = said_by(Script(None, says))
    fork, fresh = (said_by(Script(None, says, keys=seeded, fresh=fresh)) for fresh in (False, True))
    assert fork["parent"] not in (os.getpid(), other["parent"])
    assert fresh["parent"] == os.getpid()
    assert other["hash"] != fork["hash"] == fresh["hash"]
    # `ebbflow.keras` has set it, before any process began.
    assert fork["variables"]["TF_NUM_INTRAOP_THREADS"] == "1"
    assert fork["variables"].items() - KEEP_COMPILED.items() == fresh["variables"].items()
    assert fork["variables"].items() >= KEEP_COMPILED.items()
    assert not fresh["variables"].keys() & KEEP_COMPILED.keys()


def test_a_fork_is_told_signals_and_its_end_is_heard(says: Path) -> None:
    told, killed, left = (Script(None, says) for _ in range(3))
    for script in (told, killed, left):
        assert script.child.stdout is not None
        script.go()
        # It has begun, and waits.
        assert script.child.stdout.readline() == "hears \n"
        assert script.child.poll() is None
    told.child.send_signal(signal.SIGTERM)
    assert told.child.wait() == told.child.poll() == -signal.SIGTERM
    # To nobody, like a process that has taken its pid.
    told.child.send_signal(signal.SIGTERM)
    killed.kill()
    assert killed.child.returncode == -signal.SIGKILL
    assert not any(Path(f"/proc/{script.child.pid}").exists() for script in (told, killed))
    assert left.child.poll() is None
    left.kill()


def test_a_cluster_that_does_not_get_whole_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Process] = []
    whole = Process.url

    def url(process: Process) -> str:
        asked.append(process)
        if len(asked) == 3:
            raise TimeoutError("it says no URL")
        return whole(process)

    monkeypatch.setattr(Process, "url", url)
    with pytest.raises(TimeoutError, match="it says no URL"):
        Cluster(tmp_path, workers=0)
    assert [process.child.returncode for process in asked] == [-signal.SIGKILL] * 3


def test_a_missing_module_skips_a_test_and_fails_it_where_all_are_required(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for find in (needs, needs_there):
        find("json", "pytest")
        monkeypatch.delenv("EBB_REQUIRE_ALL", raising=False)
        with pytest.raises(pytest.skip.Exception):
            find("json", "not_installed_here")
        monkeypatch.setenv("EBB_REQUIRE_ALL", "1")
        with pytest.raises((AssertionError, ModuleNotFoundError), match="not_installed_here"):
            find("json", "not_installed_here")


def test_no_file_skips_a_module_in_another_way() -> None:
    # `tomllib` comes with Python 3.11, and the wheel is for 3.10 too.
    others = {"test_conftest.py", "test_job.py"}
    files = [file for file in HERE.glob("test_*.py") if file.name not in others]
    assert [file.name for file in files if "importorskip" in file.read_text()] == []


def changes(file: Path) -> Iterator[str]:
    """Yield what a file does to the variables of its process when it is imported."""
    body = ast.parse(file.read_text()).body
    called = {f"os.environ.{name}" for name in ("pop", "setdefault", "update")}
    for top in body:
        if isinstance(top, ast.FunctionDef | ast.ClassDef):
            continue
        for node in ast.walk(top):
            is_call = isinstance(node, ast.Call) and ast.unparse(node.func) in called
            is_place = isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del)
            if is_call or (is_place and ast.unparse(node).startswith("os.environ[")):
                yield f"{file.name}:{top.lineno}: {ast.unparse(node)}"


def test_no_file_of_tests_changes_variables_when_it_is_imported(tmp_path: Path) -> None:
    wrong = tmp_path / "test_wrong.py"
    wrong.write_text("import os\nA = os.environ.setdefault('A', '1')\nos.environ['B'] = A\n")
    assert len(list(changes(wrong))) == 2
    assert [found for file in HERE.glob("test_*.py") for found in changes(file)] == []
