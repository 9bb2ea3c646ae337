"""Each role is a process of an actor in a Ray cluster that runs already.

Ray ends the actors of a driver that is gone, and a process ends with its actor. So nothing of a
launcher that is killed stays.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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

__all__ = ["Ray"]

#: Time in which a role drains at the end.
_GRACE_SECS = 30.0

#: Longest wait for the actors at the end. Some may be on nodes that are lost.
_LEAVE_SECS = 40.0


@dataclass
class _State:
    """What an actor says of its process."""

    code: int | None
    url: str | None
    lines: list[str]


class Process:
    """The actor: one process of ``ebb`` on its node.

    Ray makes it on the main thread of a worker, with which the process ends.
    """

    def __init__(self, role: Role, python: str | None) -> None:
        import ray.util

        folder = tempfile.mkdtemp(prefix="ebb-")
        environment = plain_environment()
        # Ray sets it to the processors of the actor. `ebb` has a rule of its own.
        environment.pop("OMP_NUM_THREADS", None)
        self._guard = Guard(["rm", "-rf", folder], environment)
        self._log = Path(folder, "log")
        arguments = role.at(ray.util.get_node_ip_address(), str(Path(folder, "data")))
        with self._log.open("wb") as output:
            self._child = subprocess.Popen(
                [python or sys.executable, "-m", "ebbflow._launched", str(os.getpid()), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env=environment,
            )

    def look(self) -> _State:
        """Return how the process is."""
        return _State(self._child.poll(), url_in(self._log), last_lines(self._log))

    def stop(self) -> None:
        """End the process, and remove its folder."""
        self._child.terminate()
        try:
            self._child.wait(_GRACE_SECS)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        self._guard.release()


@dataclass
class _Actor:
    handle: Any
    #: The answer of ``look`` that is on its way.
    answer: Any
    #: The last answer; ``None``: the actor has not begun.
    state: _State | None = None
    #: Why it has ended.
    gone: str | None = None


class Ray:
    """Actors of one driver, which is this process."""

    master_listens = f"{ADDRESS}:0"
    is_remote = True
    interval = 0.5
    master_url = None

    def __init__(self, settings: Settings) -> None:
        try:
            import ray
        except ModuleNotFoundError as error:
            raise UnsupportedError(
                "--on ray: no package ray; pip install 'ebbflow[ray]'"
            ) from error
        self._ray: Any = ray
        self._settings = settings
        self._actors: dict[str, _Actor] = {}
        #: Agents that wait for a ps to begin.
        self._agents: list[Role] = []
        # Nodes import this package as this process does.
        paths = {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}
        address = os.environ.get("RAY_ADDRESS", "auto")
        try:
            ray.init(
                address=address,
                namespace=settings.name,
                log_to_driver=False,
                logging_level="ERROR",
                runtime_env={"env_vars": paths},
            )
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise ClusterError(
                f"--on ray: no Ray cluster at {address} ({error}); name one by RAY_ADDRESS, or "
                "start one with `ray start --head`"
            ) from error
        self._node: str = ray.get_runtime_context().get_node_id()

    def start(self, role: Role) -> None:
        """Make an actor. It waits until a node has room for it.

        The first agents come after the ps. Otherwise they could take the last room on this node,
        where the ps would wait for it for ever.
        """
        if role.name.startswith("agent") and role.attempt == 0:
            self._agents.append(role)
        else:
            self._make(role)
        self._look()

    def _make(self, role: Role) -> None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        # The end of this node is the end of the launch anyway. An agent may be lost.
        here = NodeAffinitySchedulingStrategy(node_id=self._node, soft=True)
        actor = self._ray.remote(Process).options(
            num_cpus=role.cpus,
            num_gpus=1 if role.gpu else 0,
            max_restarts=0,
            scheduling_strategy="SPREAD" if role.name.startswith("agent") else here,
        )
        handle = actor.remote(role, self._settings.python)
        self._actors[role.full_name] = _Actor(handle, handle.look.remote())

    def master(self) -> Master | None:
        """Return the URL that the master has printed."""
        self._look()
        states = [actor.state for name, actor in self._actors.items() if name == "master-0"]
        url = states[0].url if states and states[0] is not None else None
        return None if url is None else Master(url, url)

    def ended(self) -> Mapping[str, str]:
        """Return why processes and actors have ended."""
        self._look()
        return {name: actor.gone for name, actor in self._actors.items() if actor.gone is not None}

    def output(self, role: Role) -> list[str]:
        """Return the last lines that the actor told."""
        actor = self._actors.get(role.full_name)
        return [] if actor is None or actor.state is None else actor.state.lines

    def stop(self) -> None:
        """End all processes, and then the actors."""
        begun = [actor for actor in self._actors.values() if actor.state and not actor.gone]
        ends = [actor.handle.stop.remote() for actor in begun]
        if ends:
            self._ray.wait(ends, num_returns=len(ends), timeout=_LEAVE_SECS)
        for actor in self._actors.values():
            with contextlib.suppress(self._ray.exceptions.RayError):
                self._ray.kill(actor.handle)
        self._actors.clear()
        self._ray.shutdown()

    def _look(self) -> None:
        """Take the answers that are there, and ask again."""
        for actor in self._actors.values():
            if actor.gone is not None or not self._ray.wait([actor.answer], timeout=0)[0]:
                continue
            try:
                actor.state = self._ray.get(actor.answer)
            except self._ray.exceptions.RayError as error:
                what = str(error).strip().partition("\n")[0]
                actor.gone = f"was lost with its actor ({what})"
                continue
            if actor.state is not None and actor.state.code is not None:
                actor.gone = f"ended with exit code {actor.state.code}"
                # Its room is for whoever takes its place.
                self._ray.kill(actor.handle)
            else:
                actor.answer = actor.handle.look.remote()
        ps = [actor for name, actor in self._actors.items() if name.startswith("ps-")]
        if all(actor.state or actor.gone for actor in ps):
            for role in self._agents:
                self._make(role)
            self._agents.clear()
