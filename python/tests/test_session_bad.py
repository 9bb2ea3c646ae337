"""Scripts with mistakes, and what their users see: processes that run `ebbflow.join`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import ebbflow
import pytest

from .conftest import EBB, Place, Script, needs_there

needs_there("torch")

# Lines with names in capitals are replaced.
SCRIPT = """
import os, sys
import torch, ebbflow
from torch import nn
from torch.utils.data import DataLoader, Dataset

class Records(Dataset):
    def __len__(self):
        return 96

    def __getitem__(self, record):
        RECORD
        x = torch.randn(6, generator=torch.Generator().manual_seed(record))
        return x + torch.rand(6), int(x.sum() > 0)

torch.manual_seed(7)
model = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.2), nn.Linear(16, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
# Newer versions of Python begin processes in another way, unless a loader says which.
forks = {"multiprocessing_context": "fork"} if int(sys.argv[1]) else {}
loader = DataLoader(Records(), batch_size=8, num_workers=int(sys.argv[1]), **forks)
with ebbflow.join(
    model, optimizer, loader, effective=16, epochs=2, seed=5, name=sys.argv[2]
) as job:
    for epoch in job.epochs():
        for x, y in epoch:
            loss = nn.functional.cross_entropy(model(x), y)
            LOSS
            job.step(loss)
"""


def script(folder: Path, **lines: str) -> Path:
    text = SCRIPT
    for place in ("RECORD", "LOSS"):
        text = text.replace(place, lines.get(place.lower(), "pass"))
    path = folder / "script.py"
    path.write_text(text)
    return path


@pytest.mark.parametrize("loaders", ["0", "2"])
def test_a_record_that_raises_is_named_with_the_line_of_the_script(
    place: Place, tmp_path: Path, loaders: str
) -> None:
    path = script(tmp_path, record="assert record != 13, 'no such picture'")
    for process in (Script(None, path, loaders, "alone"), place.script(path, loaders, "records")):
        code, said = process.end()
        assert code == 1
        assert "record 13 of train_data: AssertionError: no such picture" in said
        assert f'File "{path}", line 12, in __getitem__' in said


def test_a_loss_that_is_no_number_fails_the_job_and_every_process(
    place: Place, tmp_path: Path
) -> None:
    path = script(tmp_path, loss="loss = loss * (float('nan') if epoch.number == 1 else 1)")
    processes = [place.script(path, "0", "nan", gate="join") for _ in range(2)]
    for process in processes:
        process.arrive()
    place.wait_for_workers("nan", 2)
    for process in processes:
        process.go()
    for process in processes:
        code, said = process.end()
        assert code == 1 and "SessionFailedError" in said and "the loss of step 6 is NaN" in said


def test_a_missing_import_is_shown_with_the_process_that_lacks_it(tmp_path: Path) -> None:
    path = script(tmp_path)
    path.write_text("import not_installed_here\n" + path.read_text())
    out = str(tmp_path / "out")
    command = [str(EBB), "run", str(path), "--workers", "2", "--out", out, "--", "0", "lost"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    told = "ModuleNotFoundError: No module named 'not_installed_here'"
    assert f"worker-0 | {told}" in ended.stderr or f"worker-1 | {told}" in ended.stderr
    assert "no process has joined a job of this run by ebbflow.join" in ended.stderr


def test_a_traceback_reaches_the_master_and_its_journal_without_secrets(
    place: Place, tmp_path: Path
) -> None:
    secret = "hunter2-and-more"
    path = script(tmp_path, loss="raise RuntimeError('no access with ' + os.environ['API_KEY'])")
    path.write_text(path.read_text().replace("seed=5,", "seed=5, limits={'attempts_max': 1},"))
    keys = {"EBBFLOW_SECRETS": "API_KEY", "API_KEY": secret}
    place.scripts.append(Script(place.cluster.url, path, "0", "secret", keys=keys))
    code, said = place.scripts[-1].end()
    assert code == 1 and f"no access with {secret}" in said, "the user sees all of it"
    with pytest.raises(ebbflow.errors.JobFailedError) as raised:
        place.client.job("secret").wait(progress=False)
    told = "RuntimeError: no access with [secret API_KEY]"
    assert told in str(raised.value) and secret not in str(raised.value)
    kept = [file.read_bytes() for file in tmp_path.rglob("data/**/*") if file.is_file()]
    assert any(told.encode() in content for content in kept)
    assert not any(secret.encode() in content for content in kept)


def test_loaders_that_fork_in_two_processes_change_no_bit(place: Place, tmp_path: Path) -> None:
    path = script(tmp_path)
    alone = Script(None, path, "0", "alone").result()
    processes = [place.script(path, "2", "loaders", gate="join") for _ in range(2)]
    for process in processes:
        process.arrive()
    place.wait_for_workers("loaders", 2)
    for process in processes:
        process.go()
    assert {process.result()["sha"] for process in processes} == {alone["sha"]}


# The child of a fork leaves the loop as a mistake would, and then ends as the parent does.
FORK = """if epoch.number == 1 and job.workers and not globals().get("child"):
                child = os.fork()
                if child == 0:
                    try:
                        job.step(loss)
                    except ebbflow.errors.SessionError as error:
                        print(error, file=sys.stderr, flush=True)
                    sys.exit(5)
                assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5"""


def test_a_fork_has_no_part_in_the_job_and_ends_while_its_parent_trains(tmp_path: Path) -> None:
    alone = Script(None, script(tmp_path), "0", "alone").result()["sha"]
    path = script(tmp_path, loss=FORK)
    path.write_text(path.read_text() + "print(job.model_sha256)\n")
    command = [sys.executable, str(path), "0", "forks"]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ended.stdout == f"{alone}\n"
    assert "has no part in it; call ebbflow.join in the process that trains" in ended.stderr
