"""All roles on this host, as processes of this one: what the tests of the common part use."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from ebbflow.launchers.platform import (
    Master,
    Role,
    Settings,
    last_lines,
    plain_environment,
    url_in,
)

__all__ = ["Local"]

#: Time from SIGTERM to SIGKILL.
_GRACE_SECS = 30.0


class Local:
    """Processes of this host. They end with this process, however it ends."""

    master_listens = "127.0.0.1:0"
    is_remote = False
    interval = 0.1
    master_url = None

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._master: Path | None = None

    def start(self, role: Role) -> None:
        """Start a process, whose output goes to a file."""
        python = self._settings.python or sys.executable
        log = self._log(role)
        arguments = role.at("127.0.0.1", str(log.with_suffix("")))
        with log.open("wb") as output:
            self._children[role.full_name] = subprocess.Popen(
                [python, "-m", "ebbflow._launched", str(os.getpid()), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=plain_environment(),
                start_new_session=True,
            )
        if role.name == "master":
            self._master = log

    def master(self) -> Master | None:
        """Return the URL that the master has printed."""
        url = None if self._master is None else url_in(self._master)
        return None if url is None else Master(url, url)

    def ended(self) -> Mapping[str, str]:
        """Return the exit codes of processes that have ended."""
        codes = {name: child.poll() for name, child in self._children.items()}
        return {name: _exit(code) for name, code in codes.items() if code is not None}

    def output(self, role: Role) -> list[str]:
        """Return the last lines in the file of a process."""
        return last_lines(self._log(role))

    def stop(self) -> None:
        """Ask all processes to end, and kill them later."""
        children = [child for child in self._children.values() if child.poll() is None]
        for child in children:
            child.terminate()
        deadline = time.monotonic() + _GRACE_SECS
        for child in children:
            try:
                child.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()

    def _log(self, role: Role) -> Path:
        return self._settings.folder / f"{role.full_name}.log"


def _exit(code: int) -> str:
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"
