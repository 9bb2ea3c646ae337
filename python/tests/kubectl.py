"""A stand-in for ``kubectl``: containers are processes of this host, below one folder.

It knows what the launcher calls. A service's name leads nowhere on this host, so the URL that the
master printed takes its place. Variables: ``KUBECTL_FOLDER``; ``KUBECTL_REFUSES`` is a role.

A container that was applied begins a moment later. Then its process has a file ``.pid``, and at its
end a file ``.code``.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

FOLDER = Path(os.environ["KUBECTL_FOLDER"])

#: Is there once everything is to be deleted. No container begins then.
DELETES = FOLDER / "deletes"


def url() -> str | None:
    for log in FOLDER.glob("*-master-0.log"):
        if found := re.search(r"listening on (\S+)\n", log.read_text()):
            return found[1]
    return None


def apply() -> int:
    for text in sys.stdin.read().split("---\n"):
        if not text:
            continue
        manifest = json.loads(text)
        name = manifest["metadata"]["name"]
        role = manifest["metadata"]["labels"].get("ebbflow/role")
        if role is not None and role == os.environ.get("KUBECTL_REFUSES"):
            print(f"Error from server (Forbidden): {role} is forbidden", file=sys.stderr)
            return 1
        (FOLDER / f"{name}.{manifest['kind']}").write_text(text)
        if manifest["kind"] == "Job":
            start(name, manifest["spec"]["template"]["spec"]["containers"][0])
    return 0


def write(path: Path, text: str) -> None:
    """Write a file that nobody reads before it is whole."""
    new = path.with_name(f"{path.name}.new")
    new.write_text(text)
    new.rename(path)


def start(name: str, container: dict[str, Any]) -> None:
    """Start a container; a process of its own waits for the master if that is needed."""
    if os.fork() == 0:
        os.setsid()
        # Whoever waits for the end of this program's pipes waits for nothing of the cluster.
        nowhere = os.open(os.devnull, os.O_RDWR)
        for descriptor in range(3):
            os.dup2(nowhere, descriptor)
        os.closerange(3, 1024)
        given = " ".join(container["args"])
        while "--master http" in given and url() is None and not DELETES.exists():
            time.sleep(0.05)
        if DELETES.exists():
            write(FOLDER / f"{name}.code", "0")
            os._exit(0)
        arguments = [
            re.sub(r"http://ebb-\w+-master:4700", url() or "", argument)
            .replace("$(POD_IP)", "127.0.0.1")
            .replace("0.0.0.0:4700", "127.0.0.1:0")
            .replace("/tmp/ebbflow", str(FOLDER / name))
            for argument in container["args"]
        ]
        with (FOLDER / f"{name}.log").open("wb") as log:
            command = [sys.executable, *container["command"][1:], *arguments]
            child = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        write(FOLDER / f"{name}.pid", str(child.pid))
        write(FOLDER / f"{name}.code", str(child.wait()))
        os._exit(0)


def jobs() -> list[dict[str, Any]]:
    found = []
    for path in FOLDER.glob("*.Job"):
        job = json.loads(path.read_text())
        code = path.with_suffix(".code")
        is_master = job["metadata"]["labels"]["ebbflow/role"] == "master"
        job["status"] = {"ready": int(is_master and url() is not None)}
        if code.exists():
            what = {"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded"}
            job["status"]["conditions"] = [what]
        found.append(job)
    return found


def main() -> int:
    match sys.argv[1:]:
        case ["apply", "--filename=-"]:
            return apply()
        case ["get", "jobs", selector, "--output=json"] if selector.startswith("--selector="):
            print(json.dumps({"items": jobs()}))
        case ["logs", job, "--tail=20"]:
            lines = (FOLDER / f"{job.removeprefix('job/')}.log").read_text().splitlines()
            print("\n".join(lines[-20:]))
        case ["port-forward", service, ports] if service.endswith("-master"):
            assert ports in (":4700", f"{(url() or '').rpartition(':')[2]}:4700"), ports
            port = (url() or "").rpartition(":")[2]
            print(f"Forwarding from 127.0.0.1:{port} -> 4700", flush=True)
            signal.pause()
        case ["delete", "jobs,services,networkpolicies", selector, *_]:
            assert selector.startswith("--selector=ebbflow/launch=ebb-")
            DELETES.touch()
            jobs_to_end = list(FOLDER.glob("*.Job"))
            for path in jobs_to_end:
                pid, code = path.with_suffix(".pid"), path.with_suffix(".code")
                while not pid.exists() and not code.exists():
                    time.sleep(0.05)
                # It may have ended just now.
                with contextlib.suppress(ProcessLookupError):
                    if not code.exists():
                        os.kill(int(pid.read_text()), signal.SIGTERM)
            for path in jobs_to_end:
                while not path.with_suffix(".code").exists():
                    time.sleep(0.05)
            (FOLDER / "deleted").touch()
        case others:
            raise SystemExit(f"kubectl of the test: {others}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
