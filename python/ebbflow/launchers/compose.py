"""Each role is a service of one Compose project, on the Docker engine of this host.

The project is a file in the folder for results, which grows with each role. ``docker compose`` or
the older ``docker-compose`` starts the services, and takes the project away.
"""

from __future__ import annotations

import csv
import io
import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from ebbflow.errors import ClusterError, InvalidJobError, UnsupportedError
from ebbflow.launchers.platform import (
    ADDRESS,
    Guard,
    Master,
    Mount,
    Role,
    Settings,
    last_of,
    plain_environment,
    url_of,
)

__all__ = ["Compose", "engine_cpus"]

_PORT = 4700

#: What Compose is, wherever it is installed. The first one that answers is used.
_COMPOSE = (("docker", "compose"), ("docker-compose",))

#: The label by which Docker finds the containers of a project.
_PROJECT = "com.docker.compose.project"

#: Runs what follows. Compose tells its progress on stderr, which is for the lines of the script.
_SILENT = ("/bin/sh", "-c", 'exec "$@" 2>/dev/null', "sh")

#: A folder that every image has, and every user may write.
_TMP = "/tmp"

#: Most memory of files in ``/dev/shm``, by which the processes of a ``DataLoader`` talk.
_SHARED_MEMORY = "2gb"

#: Seconds from SIGTERM to SIGKILL at the end.
_GRACE_SECS = "10"

_ADDRESS_HERE = re.compile(r"127\.0\.0\.1:\d+")

_EXITED = re.compile(r"Exited \((\d+)\)")

#: Becomes ``ebb`` with the address of its container. The image needs no shell.
_BEGIN = f"""\
import os, socket, sys
address = socket.gethostbyname(socket.gethostname())
given = [argument.replace({ADDRESS!r}, address) for argument in sys.argv[1:]]
os.execv(sys.executable, [sys.executable, "-m", "ebbflow", *given])
"""


class Compose:
    """Containers of one project, on a network of their own."""

    master_listens = f"0.0.0.0:{_PORT}"
    is_remote = True
    interval = 0.5

    def __init__(self, settings: Settings) -> None:
        if settings.image is None:
            raise InvalidJobError(
                "--image: missing; Compose needs an image with Python, ebbflow and what the "
                "script imports"
            )
        if settings.gpu:
            raise UnsupportedError("--gpu: not with --on compose; use this host without --on")
        self._settings = settings
        self._environment = plain_environment()
        self._python = settings.python or "python3"
        engine_cpus()
        compose = _compose(self._environment)
        _check_image(settings.image, self._python, settings.mounts, self._environment)
        #: The project. It stays after the end of the launch.
        self._file = settings.out / "compose.yaml"
        self._services: dict[str, Any] = {}
        self._write()
        self._compose = [*compose, "--project-name", settings.name, "--file", str(self._file)]
        down = ["down", "--volumes", "--remove-orphans", "--timeout", _GRACE_SECS]
        self._guard = Guard([*_SILENT, *self._compose, *down], self._environment)

    @property
    def master_url(self) -> str:
        """URL of the master on the project's network."""
        return f"http://master-0:{_PORT}"

    def start(self, role: Role) -> None:
        """Add a service to the project, and start it.

        Raises:
            ClusterError: Compose or the engine refuses it.
        """
        self._services[role.full_name] = self._service(role)
        self._write()
        child = subprocess.Popen(
            [*self._compose, "up", "--detach", "--no-deps", "--no-recreate", role.full_name],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=self._environment,
            pass_fds=(self._guard.pipe,),
        )
        try:
            _, said = child.communicate()
        except BaseException:
            # What it asks the engine for would come after the end of the project.
            child.communicate()
            raise
        if child.returncode != 0:
            raise ClusterError(f"Compose refuses {role.name}: {said.strip()}")

    def master(self) -> Master | None:
        """Return the URL on the network, and the port of this host that leads to the master."""
        name = self._container("master-0")
        said = self._docker("logs", name)
        if said.returncode != 0 or url_of(said.stdout) is None:
            return None
        port = self._docker("port", name, f"{_PORT}/tcp")
        address = _ADDRESS_HERE.search(port.stdout)
        return None if address is None else Master(self.master_url, f"http://{address[0]}")

    def ended(self) -> Mapping[str, str]:
        """Return the exit codes of containers that have ended. Without an answer there are none."""
        of_project = f"label={_PROJECT}={self._settings.name}"
        form = "{{.Names}}\t{{.State}}\t{{.Status}}"
        said = self._docker("ps", "--all", "--filter", of_project, "--format", form)
        if said.returncode != 0:
            return {}
        lines = [line.split("\t") for line in said.stdout.splitlines()]
        found = {line[0]: line[1:] for line in lines if len(line) == 3}
        ended = {}
        for name in self._services:
            state, status = found.get(self._container(name), ["removed", ""])
            code = _EXITED.match(status)
            if state in ("exited", "dead", "removing", "removed"):
                ended[name] = f"ended with exit code {code[1]}" if code else f"was lost ({state})"
        return ended

    def output(self, role: Role) -> list[str]:
        """Return the last lines of a container."""
        said = self._docker("logs", self._container(role.full_name))
        return last_of(said.stdout) if said.returncode == 0 else []

    def stop(self) -> None:
        """End and remove all containers, and their network.

        Raises:
            ClusterError: Compose does not take the order.
        """
        if self._guard.release() != 0:
            label = f"label={_PROJECT}={self._settings.name}"
            raise ClusterError(
                "containers of this launch may go on; remove them with: "
                f"docker rm --force $(docker ps --all --quiet --filter {label})"
            )

    def _docker(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run ``docker``. What a container said on both streams is in ``stdout``."""
        return subprocess.run(
            ["docker", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
            env=self._environment,
        )

    def _container(self, full_name: str) -> str:
        return f"{self._settings.name}-{full_name}"

    def _write(self) -> None:
        # JSON is YAML. Compose would replace what begins with a dollar.
        text = json.dumps({"services": self._services}, indent=2).replace("$", "$$")
        part = self._file.with_name(f"{self._file.name}.part")
        part.write_text(f"{text}\n", encoding="utf-8")
        part.replace(self._file)

    def _service(self, role: Role) -> dict[str, Any]:
        service: dict[str, Any] = {
            "image": self._settings.image,
            "container_name": self._container(role.full_name),
            "entrypoint": [self._python, "-c", _BEGIN],
            # The container puts its address in.
            "command": role.at(ADDRESS, f"{_TMP}/ebbflow"),
            # Files that a script writes belong to who launches it.
            "user": f"{os.getuid()}:{os.getgid()}",
            "group_add": [str(group) for group in os.getgroups()],
            "working_dir": _TMP,
            # The image may not know the user, and PyTorch asks for a name.
            "environment": {"HOME": _TMP, "USER": "ebbflow"},
            "cap_drop": ["ALL"],
            "security_opt": ["no-new-privileges:true"],
            # The launcher starts roles again, and counts.
            "restart": "no",
            "volumes": [
                {
                    "type": "bind",
                    "source": str(mount.path),
                    "target": str(mount.path),
                    "read_only": mount.is_read_only,
                }
                for mount in self._settings.mounts
            ],
        }
        if role.name == "master":
            service["ports"] = [f"127.0.0.1::{_PORT}"]
        if role.name.startswith("agent"):
            service["cpus"] = role.cpus
            service["shm_size"] = _SHARED_MEMORY
        return service


def engine_cpus() -> int:
    """Return the number of processors of the Docker engine.

    Raises:
        UnsupportedError: There is no ``docker``, or no engine answers.
    """
    if shutil.which("docker") is None:
        raise UnsupportedError("compose: no docker on PATH; install Docker and its Compose")
    said = subprocess.run(
        ["docker", "info", "--format", "{{.NCPU}}"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    # Without an engine it says 0, and newer ones end with an error.
    count = said.stdout.strip()
    if said.returncode != 0 or not count.isdecimal() or int(count) == 0:
        why = (said.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise UnsupportedError(f"compose: no Docker engine answers ({why}); start one")
    return int(count)


def _compose(environment: Mapping[str, str]) -> list[str]:
    """Return the command that is Compose on this host.

    Raises:
        UnsupportedError: There is none.
    """
    for command in _COMPOSE:
        if shutil.which(command[0]) is None:
            continue
        said = subprocess.run(
            [*command, "version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
            env=environment,
        )
        if said.returncode == 0:
            return list(command)
    raise UnsupportedError(
        "compose: neither `docker compose` nor docker-compose is installed; install one of them"
    )


def _check_image(
    image: str, python: str, mounts: Sequence[Mount], environment: Mapping[str, str]
) -> None:
    """Check that an image has Python with ebbflow. Docker fetches one that is not there.

    Raises:
        InvalidJobError: It has not.
    """
    run = ["docker", "run", "--rm", "--network", "none", "--entrypoint", python]
    run += [f"--mount={_bind(mount)}" for mount in mounts]
    said = subprocess.run(
        [*run, image, "-c", "import ebbflow"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        env=environment,
    )
    if said.returncode != 0:
        lines = [line for line in said.stderr.splitlines() if "run --help" not in line]
        why = next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")
        raise InvalidJobError(
            f"image {image!r}: {python} in it cannot import ebbflow ({why}); name an image in "
            "which `pip install ebbflow` and what the script imports are installed"
        )


def _bind(mount: Mount) -> str:
    """Return a mount as ``docker run`` takes it: values with commas between them, as in CSV."""
    fields = ["type=bind", f"source={mount.path}", f"target={mount.path}"]
    text = io.StringIO()
    csv.writer(text).writerow([*fields, "readonly"] if mount.is_read_only else fields)
    return text.getvalue().strip()
