"""``ebb submit SCRIPT.py`` on a cluster with certificates and tokens: a script has no keys."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from .conftest import EBB, Cluster, needs_there, variables
from .test_scripts import agent, code, trained_alone

needs_there("torch")

TRAIN = """
import os, sys
import torch, ebbflow, ebbflow.callbacks
from torch import nn
from net import network

class Heard(ebbflow.callbacks.Callback):
    def on_end(self, summary):
        print("heard the end", flush=True)

generator = torch.Generator().manual_seed(3)
x = torch.randn(120, 6, generator=generator)
y = (x.sum(1) > 0).long()
torch.manual_seed(7)
model = network()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
source = torch.utils.data.TensorDataset(x, y)
loss = nn.CrossEntropyLoss()
heard = [] if len(sys.argv) < 2 else [Heard()]
with ebbflow.join(
    model, optimizer, source, micro=8, effective=32, epochs=2, callbacks=heard
) as job:
    for epoch in job.epochs():
        for batch in epoch:
            job.step(loss(model(batch.x), batch.y))
print("trained", job.model_sha256, flush=True)
"""

# Opens a connection as a process of the cluster does, with a certificate or without one.
DIAL = """
import socket, ssl

def dial(url, *certificate):
    host, port = url.removeprefix("https://").rsplit(":", 1)
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if certificate:
        context.load_cert_chain(*certificate)
    with socket.create_connection((host, int(port))) as plain:
        with context.wrap_socket(plain) as secure:
            settings = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
            secure.sendall(b"PRI * HTTP/2.0\\r\\n\\r\\nSM\\r\\n\\r\\n" + settings)
            answer = secure.recv(1)
            if not answer:
                raise OSError("closed")
            return answer
"""

# Each line says what came of an attempt.
ATTEMPTS = """
import os, subprocess, sys
import ebbflow

def attempt(name, action):
    try:
        print(name, "SUCCEEDED", repr(action()), flush=True)
    except (ebbflow.Error, OSError) as error:
        print(name, "failed:", type(error).__name__, str(error).replace("\\n", " "), flush=True)

master, number = os.environ["EBBFLOW_MASTER"], int(os.environ["EBBFLOW_AGENT"])
print("keys", sorted(name for name in os.environ if name.startswith("EBB_")), flush=True)
attempt("client", lambda: ebbflow.Client(master, timeout=1).jobs())
for url in [master, *sys.argv[1:]]:
    attempt("dial", lambda: dial(url))
# By way of its agent, it does what a process of its script does and no more.
mine = ebbflow.Client(master, timeout=60, _agent=number)
print("list", [job["job"] for job in mine.jobs()], flush=True)
attempt("other", lambda: mine.status("other"))
attempt("cancel", lambda: mine.cancel(os.environ["EBBFLOW_JOB"]))
elsewhere = ebbflow.Client("https://127.0.0.1:1", timeout=1, _agent=number)
attempt("elsewhere", lambda: elsewhere.status("1"))
child = "import os, ebbflow; ebbflow.Client(%r, timeout=1, _agent=%d)" % (master, number)
said = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True)
print("child", said.returncode, said.stderr.strip().splitlines()[-1], flush=True)
sys.exit(3)
"""


def dial(url: str, *certificate: str) -> bytes:
    """Dial as the script does."""
    names: dict[str, Any] = {}
    exec(DIAL, names)
    answer: bytes = names["dial"](url, *certificate)
    return answer


def secured(folder: Path) -> Cluster:
    certs = folder / "certs"
    roles = ("anna=submit+scripts", "bob=submit", "olga=operate")
    users = [argument for user in roles for argument in ("--user", user)]
    subprocess.run(
        [EBB, "certs", "init", "--dir", str(certs), *users], check=True, capture_output=True
    )
    return Cluster(folder, workers=0, certs=certs)


def submit(cluster: Cluster, user: str, script: Path, *arguments: str) -> tuple[int, str, str]:
    """Send a script as ``user`` and wait for its end. Returns exit code, stdout and stderr."""
    assert cluster.certs is not None
    command = [str(EBB), "submit", str(script), "--master", cluster.url, "--follow", *arguments]
    keys = {**os.environ, **variables(cluster.certs, user)}
    done = subprocess.run(command, capture_output=True, text=True, env=keys)
    return done.returncode, done.stdout, done.stderr


def logs(cluster: Cluster, user: str, job: str, *more: str) -> tuple[int, str, str]:
    """Ask for the logs of a script as ``user``. Returns exit code, stdout and stderr."""
    assert cluster.certs is not None
    command = [str(EBB), "logs", job, "--master", cluster.url, *more]
    keys = {**os.environ, **variables(cluster.certs, user)}
    done = subprocess.run(command, capture_output=True, text=True, env=keys)
    return done.returncode, done.stdout, done.stderr


def test_a_script_without_keys_trains_through_its_agents(tmp_path: Path) -> None:
    script = code(tmp_path, TRAIN)
    alone = trained_alone(script)
    cluster = secured(tmp_path)
    try:
        for index in range(2):
            agent(cluster, index, 1)
        returned, said, errors = submit(
            cluster, "anna", script, "--json", "--workers", "2", "--", "with callbacks"
        )
        assert returned == 0, errors
        assert json.loads(said)["model_sha256"] == alone
        # Its processes end after its job.
        returned, said, errors = logs(cluster, "anna", "train", "--follow")
        assert returned == 0 and said.count("heard the end") == 1, said + errors
        returned, said, errors = submit(cluster, "bob", script)
        assert returned == 1 and "may not send scripts" in errors, errors
    finally:
        cluster.stop()


def test_a_script_reaches_nothing_but_its_jobs_and_another_user_not_its_logs(
    tmp_path: Path,
) -> None:
    script = code(tmp_path, DIAL + ATTEMPTS)
    cluster = secured(tmp_path)
    try:
        # What refuses the dials of the script is that it has no certificate.
        keys = variables(tmp_path / "certs", "worker")
        certificate = (keys["EBB_TLS_CERT"], keys["EBB_TLS_KEY"])
        for url in (cluster.url, *cluster.ps_urls):
            assert dial(url, *certificate)
            with pytest.raises(OSError):
                dial(url)
        agent(cluster, 0, 1)
        returned, said, errors = submit(cluster, "anna", script, "--", *cluster.ps_urls)
        assert returned == 1, said + errors
        returned, whole, errors = logs(cluster, "anna", "train")
        assert returned == 0, errors
        told = [line.partition(" | ")[2] for line in whole.splitlines()]
        print("\n".join(told))
        assert "keys []" in told and "list ['train-1']" in told
        assert not [line for line in told if "SUCCEEDED" in line]
        for name in ("client", "other", "cancel", "elsewhere"):
            assert [line for line in told if line.startswith(f"{name} failed: ")], name
        assert sum(line.startswith("dial failed: ") for line in told) == 3
        assert any(line.startswith("child 1 ") and "EBBFLOW_AGENT" in line for line in told)
        log = cluster.processes[-1].log.read_text()
        assert "refused: a process asks for what is not of its jobs" in log, log
        # What it said is for its owner and for operators.
        returned, said, errors = logs(cluster, "olga", "train")
        assert returned == 0 and said.startswith(whole), errors
        for job in ("train", "train-1"):
            returned, said, errors = logs(cluster, "bob", job)
            assert (returned, said) == (1, ""), errors
            assert "train-1 is not a script of `bob`; its owner and operators may read" in errors
        assert "logs of somebody else" in cluster.processes[0].log.read_text()
    finally:
        cluster.stop()
