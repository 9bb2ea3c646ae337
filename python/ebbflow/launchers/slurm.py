"""Each role is a job of Slurm, which one ``scancel`` ends together with the others.

The folder for results lies where all machines see it: Slurm writes the output of roles there, and
the URL of the master is in it. Slurm's own variables, such as ``SBATCH_PARTITION``, choose what is
not said here.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from ebbflow.errors import ClusterError, UnsupportedError
from ebbflow.launchers.platform import (
    ADDRESS,
    Guard,
    Master,
    Role,
    Settings,
    last_lines,
    plain_environment,
    url_in,
)

__all__ = ["Slurm"]

_PROGRAMS = ("sbatch", "squeue", "scancel")

#: States of jobs that have ended, or are about to. Slurm starts none of them again.
_ENDED = {
    "BOOT_FAIL",
    "CANCELLED",
    "COMPLETED",
    "COMPLETING",
    "DEADLINE",
    "FAILED",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "PREEMPTED",
    "REVOKED",
    "SPECIAL_EXIT",
    "TIMEOUT",
}

#: Longest wait for the end of jobs that are cancelled. Slurm kills them after its ``KillWait``, of
#: usually 30 s. A job whose machine is lost stays longer.
_LEAVE_SECS = 45.0

#: The first address of the machine, as ``deploy/slurm`` takes it.
_ADDRESS_OF_MACHINE = "address=$(hostname -I | cut -d ' ' -f 1)"


class Slurm:
    """Jobs of Slurm that have one name."""

    master_listens = f"{ADDRESS}:0"
    is_remote = True
    interval = 1.0
    master_url = None

    def __init__(self, settings: Settings) -> None:
        missing = [program for program in _PROGRAMS if shutil.which(program) is None]
        if missing:
            raise UnsupportedError(
                f"--on slurm: no {missing[0]} on PATH; launch where Slurm's commands are installed"
            )
        self._settings = settings
        self._environment = plain_environment()
        #: Full names of roles, by the numbers of their jobs.
        self._jobs: dict[str, str] = {}
        self._master: Path | None = None
        cancel = ["scancel", "--quiet", f"--name={settings.name}"]
        self._guard = Guard(cancel, self._environment)

    def start(self, role: Role) -> None:
        """Submit a job.

        Raises:
            ClusterError: Slurm refuses it.
        """
        command = [
            "sbatch",
            "--parsable",
            f"--job-name={self._settings.name}",
            f"--comment={role.full_name}",
            f"--output={self._log(role)}",
            f"--chdir={self._settings.folder}",
            "--ntasks=1",
            f"--cpus-per-task={role.cpus}",
            "--no-requeue",
        ]
        if role.gpu:
            command.append("--gres=gpu:1")
        try:
            said = subprocess.run(
                command,
                input=self._script(role),
                capture_output=True,
                text=True,
                check=True,
                env=self._environment,
                pass_fds=(self._guard.pipe,),
            )
        except subprocess.CalledProcessError as error:
            raise ClusterError(f"sbatch refuses {role.name}: {error.stderr.strip()}") from error
        # The number, and with several clusters the name of one.
        self._jobs[said.stdout.strip().partition(";")[0]] = role.full_name
        if role.name == "master":
            self._master = self._log(role)

    def master(self) -> Master | None:
        """Return the URL in the master's output."""
        url = None if self._master is None else url_in(self._master)
        return None if url is None else Master(url, url)

    def ended(self) -> Mapping[str, str]:
        """Return the states of jobs that have ended. An answer that Slurm does not give is none."""
        states = self._states()
        if states is None:
            return {}
        ended = {}
        for number, name in self._jobs.items():
            # Slurm forgets old jobs.
            state = states.get(number, "COMPLETED")
            if state in _ENDED:
                ended[name] = f"has ended, and Slurm says {state} of job {number}"
        return ended

    def output(self, role: Role) -> list[str]:
        """Return the last lines that Slurm wrote for a job."""
        return last_lines(self._log(role))

    def stop(self) -> None:
        """Cancel all jobs, and wait until they have left their machines.

        Raises:
            ClusterError: Slurm does not take the order.
        """
        if self._guard.release() != 0:
            cancel = f"scancel --name={self._settings.name}"
            raise ClusterError(f"jobs of this launch may go on; cancel them with: {cancel}")
        deadline = time.monotonic() + _LEAVE_SECS
        while time.monotonic() < deadline:
            states = self._states()
            if states is None or set(states.values()) <= _ENDED - {"COMPLETING"}:
                return
            time.sleep(self.interval / 4)

    def _states(self) -> dict[str, str] | None:
        """Return the state of each job by its number; ``None``: Slurm does not say it now."""
        command = ["squeue", "--noheader", f"--name={self._settings.name}"]
        said = subprocess.run(
            [*command, "--states=all", "--format=%i %T"],
            capture_output=True,
            text=True,
            check=False,
            env=self._environment,
        )
        if said.returncode != 0:
            return None
        return dict(line.split(maxsplit=1) for line in said.stdout.splitlines())

    def _script(self, role: Role) -> str:
        """Return the script of a role's job. Its shell becomes the role, which gets the signals."""
        python = self._settings.python or sys.executable
        arguments = role.at(ADDRESS, str(self._settings.folder / role.full_name))
        line = shlex.join([python, "-m", "ebbflow", *arguments])
        # It stands between quotes, which end before the variable and begin again behind it.
        line = line.replace(ADDRESS, "'\"$address\"'")
        return f"#!/bin/sh\n{_ADDRESS_OF_MACHINE}\nexec {line}\n"

    def _log(self, role: Role) -> Path:
        return self._settings.folder / f"{role.full_name}.log"
