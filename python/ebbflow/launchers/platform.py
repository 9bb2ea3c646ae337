"""What a platform does: it starts roles on its machines, and takes them away."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ebbflow.errors import InvalidJobError

__all__ = [
    "ADDRESS",
    "SCRATCH",
    "Guard",
    "Master",
    "Mount",
    "Platform",
    "Role",
    "Settings",
    "last_lines",
    "last_of",
    "plain_environment",
    "url_in",
    "url_of",
]

#: Stands in arguments for the address of the machine on which a role starts.
ADDRESS = "{address}"

#: Stands in arguments for a folder that the role may write. It is no longer needed at the end.
SCRATCH = "{scratch}"

#: A master prints this before its URL.
_LISTENING = "listening on "

#: Lines of a role that failed, in a message.
_LINES_SHOWN = 20

#: Bytes of a role's output that are read, at its end for these lines, at its beginning for a URL.
_READ_BYTES = 64 << 10


#: Behind the path of a :class:`Mount` that no container may write.
_READ_ONLY = ":ro"


@dataclass(frozen=True)
class Mount:
    """A file or folder of this host that containers see at the same path.

    Attributes:
        path: Its absolute path.
        is_read_only: Containers may not write it.
    """

    path: Path
    is_read_only: bool = False

    @classmethod
    def parse(cls, text: str) -> Mount:
        """Return the mount ``PATH`` or ``PATH:ro``.

        Raises:
            InvalidJobError: There is no such file or folder.
        """
        path = Path(text.removesuffix(_READ_ONLY)).absolute()
        if not path.exists():
            raise InvalidJobError(f"--mount {text}: {path}: no such file or folder")
        return cls(path, text.endswith(_READ_ONLY))


@dataclass(frozen=True)
class Settings:
    """What all platforms are told.

    Attributes:
        name: Name of the launch. No other launch has it.
        folder: Private folder of the launch, which is removed at its end.
        out: Folder for the results.
        python: Interpreter of roles and scripts. ``None``: the one that the platform has.
        cpus: Processors of an agent.
        gpu: Each agent gets a GPU.
        image: Image of containers, for Kubernetes and Compose.
        mounts: What the containers see of this host, for Compose.
    """

    name: str
    folder: Path
    out: Path
    python: str | None = None
    cpus: int = 1
    gpu: bool = False
    image: str | None = None
    mounts: Sequence[Mount] = ()


@dataclass(frozen=True)
class Role:
    """A process of ``ebb`` on a machine of the platform.

    Attributes:
        name: Such as ``ps-0``. The one that takes its place has it, too.
        attempt: How often a role of this name was started before.
        arguments: Arguments of ``ebb``, with :data:`ADDRESS` and :data:`SCRATCH` in them.
        cpus: Processors that it needs.
        gpu: It needs a GPU.
    """

    name: str
    attempt: int
    arguments: tuple[str, ...]
    cpus: int = 1
    gpu: bool = False

    @property
    def full_name(self) -> str:
        """Name that no other start of a role of this launch has."""
        return f"{self.name}-{self.attempt}"

    def at(self, address: str, scratch: str) -> list[str]:
        """Return the arguments on the machine with this address, and with this folder."""
        given = [argument.replace(ADDRESS, address) for argument in self.arguments]
        return [argument.replace(SCRATCH, scratch) for argument in given]


@dataclass(frozen=True)
class Master:
    """Where the master is: its URL for other roles, and the one for this process."""

    url: str
    url_here: str


class Platform(Protocol):
    """Starts roles. It is used from one thread."""

    #: Where the master listens on its machine.
    master_listens: str
    #: Roles listen on a network, and not on this host alone.
    is_remote: bool
    #: Seconds between two looks at the roles.
    interval: float

    @property
    def master_url(self) -> str | None:
        """URL of the master for other roles, if it is known before the master has one."""
        ...

    def start(self, role: Role) -> None:
        """Ask for a role. It begins when the platform has room for it.

        Raises:
            ClusterError: The platform refuses.
        """
        ...

    def master(self) -> Master | None:
        """Return where the master is; ``None``: it does not listen yet."""
        ...

    def ended(self) -> Mapping[str, str]:
        """Return why roles have ended, by their full names. Each is told at least once."""
        ...

    def output(self, role: Role) -> list[str]:
        """Return the last lines that a role printed, as far as they are known."""
        ...

    def stop(self) -> None:
        """Take everything away. It may be called at any time, and again."""
        ...


class Guard:
    """Runs a command when this process ends, however it ends, or when :meth:`release` is called.

    A shell waits for the end of a pipe that this process has. So roles on other machines do not
    outlive a launcher that is killed. Programs that start roles get the pipe, too: one that is
    still at it when the launcher dies ends before the command runs.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        reader, self._writer = os.pipe()
        try:
            self._shell: subprocess.Popen[bytes] | None = subprocess.Popen(
                ["/bin/sh", "-c", 'cat >/dev/null; exec "$@"', "sh", *command],
                stdin=reader,
                stdout=subprocess.DEVNULL,
                env=environment,
                # A signal to the launcher's group is not for it.
                start_new_session=True,
            )
        finally:
            os.close(reader)

    @property
    def pipe(self) -> int:
        """The descriptor for ``pass_fds`` of programs that start roles."""
        return self._writer

    def release(self) -> int:
        """Run the command now, and wait for it. Returns its exit code; 0 if it has run before."""
        if self._shell is None:
            return 0
        os.close(self._writer)
        shell, self._shell = self._shell, None
        return shell.wait()


def last_lines(path: Path) -> list[str]:
    """Return the last lines of a file. There are none if it is missing."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _READ_BYTES))
            content = file.read()
    except FileNotFoundError:
        return []
    return last_of(content.decode(errors="replace"))


def last_of(text: str) -> list[str]:
    """Return the last lines of a text."""
    return text.splitlines()[-_LINES_SHOWN:]


def url_in(path: Path) -> str | None:
    """Return the URL that a master has printed into a file; ``None``: none yet."""
    try:
        with path.open(errors="replace") as file:
            return url_of(file.read(_READ_BYTES))
    except FileNotFoundError:
        return None


def url_of(text: str) -> str | None:
    """Return the URL that a master has printed; ``None``: none yet."""
    # A line that is not whole has not its whole URL.
    for line in text.splitlines(True):
        _, found, url = line.partition(_LISTENING)
        if found and line.endswith("\n"):
            return url.strip()
    return None


def plain_environment() -> dict[str, str]:
    """Return the environment of this process without the settings of other clusters."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("EBB_", "EBBFLOW_"))
    }
