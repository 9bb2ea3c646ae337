"""`ebbflow.join` with a cluster that has certificates and tokens."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import ebbflow
import pytest

from .conftest import EBB, Cluster, Script, needs, variables

torch = needs("torch")

SCRIPT = """
import sys
import torch, ebbflow

generator = torch.Generator().manual_seed(3)
x = torch.randn(64, 4, generator=generator)
torch.manual_seed(7)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
source = torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long())
loss = torch.nn.CrossEntropyLoss()
keys = dict(argument.split("=", 1) for argument in sys.argv[1:])
with ebbflow.join(
    model, optimizer, source, micro=4, effective=16, epochs=2, name="mine", **keys
) as job:
    for epoch in job.epochs():
        for batch in epoch:
            job.step(loss(model(batch.x), batch.y))
"""


class Place:
    """A cluster with keys, and a script."""

    def __init__(self, folder: Path) -> None:
        self.certs = folder / "certs"
        users = ["--user", "lab=script", "--user", "anna=submit"]
        subprocess.run(
            [EBB, "certs", "init", "--dir", str(self.certs), *users],
            capture_output=True,
            check=True,
        )
        self.path = folder / "script.py"
        self.path.write_text(SCRIPT)
        self.scripts: list[Script] = []
        self.cluster = Cluster(folder, workers=0, certs=self.certs)

    def script(self, user: str | None, *arguments: str, gate: str = "none") -> Script:
        """Start the script with the keys of a user in its variables."""
        keys = None if user is None else variables(self.certs, user)
        self.scripts.append(Script(self.cluster.url, self.path, *arguments, gate=gate, keys=keys))
        return self.scripts[-1]

    def arguments(self, user: str) -> list[str]:
        """Return the keys of a user as arguments of the script."""
        return [
            f"ca={self.certs / 'ca.pem'}",
            f"cert={self.certs / user}.pem",
            f"key={self.certs / user}.key",
            f"token_file={self.certs / user}.token",
        ]

    def wait_for_workers(self, number: int) -> None:
        """Wait until so many processes of the script take part in its job."""
        lab = dict(argument.split("=", 1) for argument in self.arguments("lab"))
        client = ebbflow.Client(self.cluster.url, **lab)  # type: ignore[arg-type]
        found = None
        while found != number:
            assert all(script.child.poll() is None for script in self.scripts[-number:])
            time.sleep(0.02)
            # The first process has not submitted the job yet.
            with contextlib.suppress(ebbflow.errors.NotFoundError):
                found = client.status("mine")["workers"]

    def stop(self) -> None:
        with self.cluster:
            for script in self.scripts:
                script.kill()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """Give a cluster with keys."""
    place = Place(tmp_path_factory.mktemp("secured"))
    yield place
    place.stop()


def test_processes_with_keys_in_variables_and_arguments_train_one_job(place: Place) -> None:
    alone = Script(None, place.path).result()["sha"]
    first = place.script("lab", gate="join")
    first.arrive()
    token = (place.certs / "lab.token").read_text().strip()
    second = place.script(None, *place.arguments("lab")[:3], f"token={token}", gate="join")
    second.arrive()
    # Otherwise the first one may end the job, and the second one would begin another one.
    place.wait_for_workers(2)
    first.go()
    second.go()
    found = [first.result(), second.result()]
    assert [process["sha"] for process in found] == [alone, alone]
    assert [process["elected"] for process in found].count(True) == 1


def test_a_process_without_good_keys_is_refused_with_what_it_lacks(place: Place) -> None:
    def said(script: Script) -> str:
        code, said = script.end()
        assert code != 0
        assert "AccessError" in said or "SessionFailedError" in said, said
        return said

    assert "certificate" in said(place.script(None))
    keys = place.arguments("lab")
    assert "needs a token" in said(place.script(None, *keys[:3]))
    assert "may not `Fleet/Register`" in said(place.script("anna"))
    assert "worker or ps or script" in said(place.script("anna"))
    assert "may not `Jobs/" in said(place.script("worker"))
    missing = f"token_file={place.certs / 'no.token'}"
    assert "no.token" in said(place.script(None, *keys[:3], missing))


def test_a_token_for_scripts_is_for_nothing_else(place: Place) -> None:
    keys = {**os.environ, **variables(place.certs, "lab")}
    said = subprocess.run(
        [EBB, "worker", "--master", place.cluster.url],
        capture_output=True,
        text=True,
        check=False,
        env=keys,
    )
    assert said.returncode == 1
    assert "for ebbflow.join alone" in said.stderr
    client = ebbflow.Client(
        place.cluster.url,
        token_file=place.certs / "lab.token",
        ca=place.certs / "ca.pem",
        cert=place.certs / "lab.pem",
        key=place.certs / "lab.key",
    )
    with pytest.raises(ebbflow.errors.AccessError, match="may not cancel `mine`"):
        client.cancel("mine")


def test_keys_without_a_cluster_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EBBFLOW_MASTER", raising=False)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.zeros(8, 2)
    source = torch.utils.data.TensorDataset(x, x)
    with pytest.raises(ValueError, match="token, ca: of use only with a cluster"):
        ebbflow.join(model, optimizer, source, micro=4, epochs=1, token="a", ca="b")
