"""`ebb submit SCRIPT.py`: agents of a cluster run the processes of a script."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ebbflow.errors import InvalidJobError, JobFailedError, NotFoundError

from .conftest import EBB, Cluster, Place, Process, Script, needs, needs_there

needs_there("torch")

# Process 2 trains alone until it kills itself with a batch in its hands. When it has been started
# again, process 1 takes a batch and keeps it until somebody kills its agent. The others go on after
# that.
TRAIN = """
import os, signal, sys, time
from pathlib import Path
import torch, ebbflow
from torch import nn
from net import network

place = Path(sys.argv[1]) if len(sys.argv) > 1 else None
worker = os.environ.get("EBBFLOW_WORKER", "-").rsplit("-", 1)[1]

def wait(name):
    while place is not None and not (place / name).exists():
        time.sleep(0.02)

def agent():
    # The parent of a process is the guard of its agent.
    return int(Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[1])

def first_batch():
    if place is None:
        return
    if worker == "2" and not (place / "died").exists():
        (place / "died").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if worker == "1" and not (place / "held").exists():
        (place / "begun").write_text(f"{os.getpid()} {agent()}")
        (place / "begun").rename(place / "held")
        while True:
            time.sleep(600)

if worker == "2" and (place / "died").exists():
    (place / "back").touch()
if worker == "0" or (worker == "2" and (place / "died").exists()):
    wait("held")
if worker == "1":
    wait("back")
generator = torch.Generator().manual_seed(3)
x = torch.randn(200, 6, generator=generator)
y = (x.sum(1) > 0).long()
torch.manual_seed(7)
model = network()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
source = torch.utils.data.TensorDataset(x, y)
loss = nn.CrossEntropyLoss()
with ebbflow.join(model, optimizer, source, micro=8, effective=32, epochs=3) as job:
    for epoch in job.epochs():
        for batch in epoch:
            first_batch()
            job.step(loss(model(batch.x), batch.y))
print("trained", job.model_sha256, flush=True)
"""

NET = """
from torch import nn

def network():
    return nn.Sequential(nn.Linear(6, 32), nn.BatchNorm1d(32), nn.Dropout(0.2), nn.Linear(32, 2))
"""

# A model of FabricModel. Its records lie in a folder that a variable names. Processes of an agent
# begin to train when three of them are there.
FABRIC = """
import os, sys, time
from pathlib import Path
import numpy as np
from ebbflow.fabric import FabricModel

place = Path(os.environ["DATA_DIR"])
if "EBBFLOW_WORKER" in os.environ:
    (place / os.environ["EBBFLOW_WORKER"]).touch()
    while len(list(place.glob("train-*"))) < 3:
        time.sleep(0.02)

class Data:
    def __init__(self, name):
        self.x = np.load(place / name)
    def __len__(self):
        return len(self.x)
    def __getitem__(self, record):
        return self.x[record], int(self.x[record].sum() > 0)

def get_dataset():
    return Data("train.npy"), Data("test.npy")

if sys.argv[1] == "torch":
    import torch
    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))
    loss = torch.nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
else:
    import keras
    keras.utils.set_random_seed(7)
    layers = [keras.layers.Dense(16, "tanh", name="in"), keras.layers.Dense(2, name="out")]
    model = keras.Sequential([keras.Input((6,)), *layers], name="network")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.SGD(0.1)
edt_model = FabricModel(model, get_dataset, loss, optimizer)
# On a cluster they are the processes of the script.
engines = None if "EBBFLOW_WORKER" in os.environ else 3
edt_model.train(2, 8, engines_number=engines, num_dataloader_threads=0)
print("trained", edt_model.job.model_sha256, flush=True)
"""


def code(folder: Path, text: str) -> Path:
    """Write the files of a script, and return the script."""
    (folder / "code").mkdir()
    (folder / "code/net.py").write_text(NET)
    script = folder / "code/train.py"
    script.write_text(text)
    return script


def agent(cluster: Cluster, index: int, processes: int) -> Process:
    name = f"agent-{index}"
    python = ["--python", sys.executable, "--script-processes", str(processes)]
    return cluster.start(
        name,
        *["worker", "--master", cluster.url, "--name", name, "--device", "cpu", "--scripts"],
        *python,
    )


def submit(url: str, script: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [str(EBB), "submit", str(script), "--master", url, "--follow", "--json", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def trained_alone(script: Path, *arguments: str, **variables: str) -> str:
    """Return the hash of the model that one process trains without a cluster."""
    environment = {name: value for name, value in os.environ.items() if name[:7] != "EBBFLOW"}
    environment |= variables
    command = [sys.executable, str(script), *arguments]
    said = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return said.stdout.split()[-1]


def test_a_killed_process_and_a_killed_agent_change_no_bit(place: Place, tmp_path: Path) -> None:
    script = code(tmp_path, TRAIN)
    alone = trained_alone(script)
    agents = [agent(place.cluster, index, 2) for index in range(3)]
    out = tmp_path / "out"
    arguments = ["--workers", "3", "--out", str(out), "--", str(tmp_path)]
    submitted = submit(place.cluster.url, script, *arguments)
    held = tmp_path / "held"
    while not held.exists():
        assert submitted.poll() is None, submitted.communicate()
        time.sleep(0.02)
    process, parent = map(int, held.read_text().split())
    (lost,) = [agent for agent in agents if agent.child.pid == parent]
    lost.child.kill()
    lost.child.wait()
    said, errors = submitted.communicate()
    assert submitted.returncode == 0, errors
    summary = json.loads(said)
    assert summary["model_sha256"] == alone
    assert summary["job"] == "train-1", "the job has the name and the number of the script"
    assert json.loads((out / "summary.json").read_text())["status"] == "succeeded"
    # It dies with its agent. Until the system has noticed, somebody else may end the job.
    while Path(f"/proc/{process}").exists():
        time.sleep(0.02)
    logs = [agent.log.read_text() for agent in agents]
    assert any("was ended by signal 9; it is started again in 1.0 s" in log for log in logs), logs


def test_a_cancelled_job_ends_the_processes_of_its_script(place: Place, tmp_path: Path) -> None:
    script = code(tmp_path, TRAIN.replace('if worker == "1":\n    wait("back")\n', "", 1))
    agent(place.cluster, 0, 2)
    submitted = submit(place.cluster.url, script, "--workers", "2", "--", str(tmp_path))
    held = tmp_path / "held"
    while not held.exists():
        assert submitted.poll() is None, submitted.communicate()
        time.sleep(0.02)
    process = int(held.read_text().split()[0])
    place.client.cancel("train", force=True)
    assert submitted.wait() == 1
    said, _ = submitted.communicate()
    assert json.loads(said)["status"] == "cancelled"
    while Path(f"/proc/{process}").exists():
        time.sleep(0.02)
    assert place.client.status("train-1")["status"] == "cancelled"


def test_a_script_that_fails_everywhere_fails_its_job_with_what_it_said(
    place: Place, tmp_path: Path
) -> None:
    broken = TRAIN.replace("first_batch()\n", "raise OSError('no room')\n", 1)
    assert broken != TRAIN
    script = code(tmp_path, broken)
    agent(place.cluster, 0, 1)
    submitted = submit(place.cluster.url, script)
    said, errors = submitted.communicate()
    assert submitted.returncode == 1, errors
    summary = json.loads(said)
    assert summary["status"] == "failed"
    assert "OSError: no room" in summary["reason"]


def test_a_missing_import_on_an_agent_is_shown_with_its_line(place: Place, tmp_path: Path) -> None:
    script = code(tmp_path, "import not_installed_here\n" + TRAIN)
    agent(place.cluster, 0, 1)
    submitted = submit(place.cluster.url, script)
    said, errors = submitted.communicate()
    assert submitted.returncode == 1, errors
    reason = json.loads(said)["reason"]
    assert "Traceback (most recent call last):" in reason
    assert 'train.py", line 1, in <module>' in reason
    assert "ModuleNotFoundError: No module named 'not_installed_here'" in reason


def test_a_record_that_raises_on_an_agent_is_shown_with_its_line(
    place: Place, tmp_path: Path
) -> None:
    records = """class Pictures(torch.utils.data.TensorDataset):
    def __getitem__(self, record):
        assert record != 13, "no such picture"
        return super().__getitem__(record)

source = Pictures(x, y)
"""
    text = TRAIN.replace("source = torch.utils.data.TensorDataset(x, y)\n", records, 1)
    text = text.replace("epochs=3)", "epochs=3, limits={'attempts_max': 1})", 1)
    line = text.splitlines().index('        assert record != 13, "no such picture"') + 1
    script = code(tmp_path, text)
    agent(place.cluster, 0, 1)
    submitted = submit(place.cluster.url, script)
    said, errors = submitted.communicate()
    assert submitted.returncode == 1, errors
    reason = json.loads(said)["reason"]
    assert "record 13 of train_data: AssertionError: no such picture" in reason
    assert f'train.py", line {line}, in __getitem__' in reason


def test_a_script_reaches_no_setting_of_its_agent(place: Place, tmp_path: Path) -> None:
    text = "import os; print(sorted(name for name in os.environ if name.startswith('EBB'))); 1 / 0"
    script = code(tmp_path, text)
    agent(place.cluster, 0, 1)
    submitted = submit(place.cluster.url, script, "--env", "GIVEN=1")
    said, _ = submitted.communicate()
    assert submitted.returncode == 1
    reason = json.loads(said)["reason"]
    names = [f"EBBFLOW_{name}" for name in ("AGENT", "JOB", "MASTER", "SCRIPT")]
    names += ["EBBFLOW_WORKER", "EBBFLOW_WORKERS"]
    assert str(names) in reason
    assert "ZeroDivisionError" in reason


SAYS = """
import os, sys
print(os.environ["EBBFLOW_WORKER"], *sys.argv[1:], os.environ["GIVEN"], "\\x1b[2J")
print(os.environ["KEY"] == "hunter2-" * 2, os.environ["KEY"])
sys.exit(3)
"""


# S4-03
def test_a_script_is_sent_and_heard_from_python(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = code(tmp_path, SAYS)
    monkeypatch.setenv("KEY", "hunter2-" * 2)
    job = place.client.submit_script(
        script,
        ["--lr", Path("rate")],
        name="mine",
        workers=1,
        environment={"GIVEN": "this"},
        secrets=["KEY"],
        out=tmp_path / "out",
    )
    assert job.name == "mine-1"
    agent(place.cluster, 0, 1)
    said = list(job.logs(follow=True))
    words = ["mine-1-0 --lr rate this \x1b[2J", "True [secret KEY]"]
    assert said == [f"mine-1-0 | {line}" for line in words]
    assert list(place.client.logs("mine", worker="mine-1-0")) == words
    assert list(job.logs(worker=0)) == words
    assert list(job.logs(worker=1)) == []
    with pytest.raises(JobFailedError, match="exit code 3"):
        job.wait(progress=False)
    assert json.loads((tmp_path / "out/summary.json").read_text())["status"] == "failed"


def test_a_script_that_cannot_travel_is_refused_before_it_is_sent(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, client = code(tmp_path, SAYS), place.client
    monkeypatch.setenv("NO_TEXT", os.fsdecode(b"long enough \xff"))
    with pytest.raises(InvalidJobError, match="use submit_script"):
        client.submit(script)
    (tmp_path / "job.toml").touch()
    large = tmp_path / "large.py"
    with large.open("wb") as file:
        file.truncate(2 << 30)
    cases: list[tuple[Path, dict[str, Any], str]] = [
        (tmp_path / "job.toml", {}, "is no Python script"),
        (tmp_path / "none.py", {}, r"none\.py: cannot be read"),
        (large, {}, r"large\.py: has 2147483648 bytes, more than the 268435456 of a bundle"),
        (script, {"name": "a/b"}, r"Script\.name"),
        (script, {"workers": -1}, r"Script\.processes"),
        (script, {"environment": {"LD_PRELOAD": "x"}}, "LD_PRELOAD"),
        (script, {"secrets": ["NOT_SET_HERE"]}, "secret NOT_SET_HERE: the environment has no"),
        (script, {"secrets": ["NO_TEXT"]}, "secret NO_TEXT: the value of the variable is no UTF-8"),
    ]
    for path, given, words in cases:
        with pytest.raises(InvalidJobError, match=words):
            client.submit_script(path, **given)
    (script.parent / "requirements.txt").write_text("--pre\n")
    with pytest.raises(InvalidJobError, match=r"requirements\.txt: line 1"):
        client.submit_script(script)
    with pytest.raises(InvalidJobError, match='worker "first": expected a number'):
        client.logs("train", worker="first")
    with pytest.raises(NotFoundError, match="no job `train`"):
        client.logs("train")
    assert client.jobs() == []


# S0-03, S0-04, S0-10, S0-12, S0-13, S0-32
@pytest.mark.parametrize("library", ["torch", "keras"])
def test_fabric_models_of_both_libraries_are_submitted_in_one_way(
    place: Place, tmp_path: Path, library: str
) -> None:
    needs(library)
    script, data = code(tmp_path, FABRIC), tmp_path / "records"
    data.mkdir()
    random = np.random.default_rng(3)
    for name, records in (("train.npy", 100), ("test.npy", 20)):
        np.save(data / name, random.normal(size=(records, 6)).astype(np.float32))
    given = {"DATA_DIR": str(data), "KERAS_BACKEND": "torch", "EDT_PULL_WEIGHT_TIME_OUT": "60"}
    alone = trained_alone(script, library, **given)
    for index in range(2):
        agent(place.cluster, index, 2)
    variables = [word for pair in given.items() for word in ("--env", "=".join(pair))]
    submitted = submit(place.cluster.url, script, "--workers", "3", *variables, "--", library)
    said, errors = submitted.communicate()
    assert submitted.returncode == 0, errors
    assert json.loads(said)["model_sha256"] == alone
    assert sorted(path.name for path in data.glob("train-*")) == [f"train-1-{i}" for i in range(3)]


# S0-07, S0-09, S0-10
def test_variables_of_the_product_reach_a_submitted_job(place: Place, tmp_path: Path) -> None:
    text = FABRIC.replace("< 3", "< 1").replace("else 3", "else 1")
    # A process of an agent waits with a record in its hands.
    hold = """    def __getitem__(self, record):
        while "EBBFLOW_WORKER" in os.environ and (place / "hold").exists():
            time.sleep(0.02)
"""
    text = text.replace("    def __getitem__(self, record):\n", hold)
    script, data = code(tmp_path, text), tmp_path / "records"
    data.mkdir()
    random = np.random.default_rng(3)
    for name in ("train.npy", "test.npy"):
        np.save(data / name, random.normal(size=(20, 6)).astype(np.float32))
    given = {"DATA_DIR": str(data), "EDT_PULL_WEIGHT_TIME_OUT": "60"}
    agent(place.cluster, 0, 1)

    def submitted(limit: str) -> subprocess.Popen[str]:
        pairs = given | {"EDT_PULL_FAILED_LIMITS": limit}
        variables = [word for pair in pairs.items() for word in ("--env", "=".join(pair))]
        return submit(place.cluster.url, script, *variables, "--workers", "1", "--", "torch")

    wrong = submitted("many")
    said, errors = wrong.communicate()
    assert wrong.returncode == 1, errors
    reason = json.loads(said)["reason"]
    assert "ValueError: EDT_PULL_FAILED_LIMITS = 'many': expected a number from 1 to" in reason

    (data / "hold").touch()
    good = submitted("7")
    place.wait_for_workers("train", 1)
    # A process of the script without these variables has other limits. It is told those of the job.
    number = place.client.status("train").job.rpartition("-")[2]
    keys = {"DATA_DIR": str(data), "EBBFLOW_SCRIPT": number}
    code_of_other, told = Script(place.cluster.url, script, "torch", keys=keys).end()
    assert code_of_other == 1 and "describes another job" in told, told
    (data / "hold").unlink()
    said, errors = good.communicate()
    assert good.returncode == 0, errors
    assert "limits.pull_attempts_max: 7, not 5" in told, told
    assert re.search(r'limits\.pull_timeout: "(60s|1m)", not "30s"', told), told
