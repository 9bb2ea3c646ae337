"""`ebb run SCRIPT.py --on slurm`, on a real Slurm of two nodes of this machine.

Slurm needs root, and Debian's slurm-wlm and munge.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import ebbflow
import pytest
from ebbflow import errors

from .conftest import needs_programs, needs_there
from .test_launcher import WAITS, ended
from .test_launchers import losing, wait_for
from .test_scripts import TRAIN, code, trained_alone

needs_there("torch")

pytestmark = pytest.mark.usefixtures("launches")

ONE_NODE = Path(__file__).parents[2] / "deploy/slurm/one-node.sh"

#: Processors of an agent. A node has 16, so each node has one agent.
CPUS = 14


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Give the folder of a Slurm with two nodes, which ends with the tests of a file."""
    needs_programs("munged", "slurmctld", "slurmd", "sbatch", packages="slurm-wlm and munge")
    if os.geteuid() != 0:
        pytest.skip("slurmd needs root")
    folder = tmp_path_factory.mktemp("slurm")
    try:
        subprocess.run([ONE_NODE, "up", folder, "2"], check=True, stdout=subprocess.DEVNULL)
        with pytest.MonkeyPatch.context() as variables:
            variables.setenv("SLURM_CONF", str(folder / "slurm.conf"))
            yield folder
    finally:
        subprocess.run([ONE_NODE, "down", folder], check=True)


def jobs(form: str) -> list[str]:
    command = ["squeue", "--noheader", f"--format={form}"]
    said = subprocess.run(command, capture_output=True, text=True, check=True)
    return said.stdout.split()


def lose(node: str, folder: Path, agent: int) -> None:
    """Kill the daemon and the job of a node. Slurm is told what it would notice late."""
    daemon = int(Path(f"/proc/{agent}/stat").read_text().rpartition(")")[2].split()[1])
    assert Path(f"/proc/{daemon}/comm").read_text().startswith("slurmstepd")
    for process in (int((folder / f"slurmd.{node}.pid").read_text()), daemon, agent):
        os.kill(process, signal.SIGKILL)
    down = ["scontrol", "update", f"nodename={node}", "state=down", "reason=lost"]
    subprocess.run(down, check=True)


@pytest.mark.parametrize("force", [False, True])
def test_jobs_are_cancelled_with_their_launch(tmp_path: Path, slurm: Path, force: bool) -> None:
    script = tmp_path / "code/train.py"
    script.parent.mkdir()
    script.write_text(WAITS)
    launch = ebbflow.launch(script, out=tmp_path / "out", on="slurm")
    process = int(next(line for line in launch.logs() if "| process" in line).split()[-2])
    assert len(jobs("%i")) == 3, "a master, a ps and an agent"
    launch.cancel(force=force)
    with pytest.raises(errors.JobCancelledError):
        launch.wait()
    while force and jobs("%i"):
        # Nobody waits for the guard of a launcher that was killed.
        time.sleep(0.1)
    assert jobs("%i") == []
    ended(process)


def test_what_slurm_refuses_is_told_and_leaves_nothing(
    tmp_path: Path, slurm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "train.py"
    script.write_text(WAITS)
    monkeypatch.setenv("SBATCH_PARTITION", "missing")
    with pytest.raises(errors.ScriptError, match=r"sbatch refuses master: .*invalid partition"):
        ebbflow.launch(script, out=tmp_path / "out", on="slurm").wait()
    with monkeypatch.context() as without:
        without.setenv("PATH", str(tmp_path))
        with pytest.raises(errors.ScriptError, match="no sbatch on PATH"):
            ebbflow.launch(script, out=tmp_path / "out", on="slurm").wait()
    assert not list((tmp_path / "out/launch").glob("ebb-*"))


# The last one, because its Slurm is damaged.
def test_a_lost_node_changes_no_bit(tmp_path: Path, slurm: Path) -> None:
    alone = trained_alone(code(tmp_path, TRAIN))
    script = tmp_path / "code/train.py"
    script.write_text(losing('os.environ["SLURMD_NODENAME"] == "node1"'))
    out = tmp_path / "out"
    launch = ebbflow.launch(script, [str(tmp_path)], workers=2, out=out, on="slurm", cpus=CPUS)
    process, agent = map(int, wait_for(tmp_path / "held", launch).split())
    # Slurm fills the first node first.
    assert sorted(jobs("%N/%C")) == ["node0/1", "node0/1", f"node0/{CPUS}", f"node1/{CPUS}"]
    lose("node1", slurm, agent)
    lines = launch.logs()
    again = next(line for line in lines if "it is started again" in line)
    assert again.startswith("agent-1 has ended, and Slurm says NODE_FAIL of job"), again
    (tmp_path / "lost").touch()
    result = launch.wait()
    assert result.status.state == "succeeded" and result.model_sha256 == alone
    ended(process)
    assert jobs("%i") == []
    assert [path.name for path in (out / "launch").iterdir()] == [".gitignore"]
