"""Imports libraries once, and forks a process for each script that needs them.

    python fork_server.py SOCKET MODULE ...

A process that imports PyTorch, JAX, Keras or TensorFlow computes for seconds before it begins. A
child of this process has them already. ``Forked`` in ``conftest.py`` asks for children: a message
on the socket has a child's arguments for ``gated.py``, its variables and its folder, and brings its
stdin, stdout and stderr, and a socket. On that socket the child's pid and pidfd go back, and in the
end its exit code.

What is imported starts no thread, for none would be in a child, and draws no number that a child
keeps. A child ends as any process of Python does.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import socket
import sys
from typing import Any

import gated  # type: ignore[import-not-found]


def serve(requests: socket.socket, fixed: dict[str, str]) -> list[str] | None:
    """Fork until the tests end.

    Args:
        requests: Brings what is asked for.
        fixed: Variables that were set by what was imported.

    Returns:
        In a child, its arguments; in the server, nothing.
    """
    children: dict[int, tuple[int, socket.socket]] = {}
    poll = select.poll()
    poll.register(requests, select.POLLIN)
    while True:
        for ready, _ in poll.poll():
            if ready in children:
                pid, answers = children.pop(ready)
                poll.unregister(ready)
                os.close(ready)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                with contextlib.suppress(BrokenPipeError):
                    answers.send(str(code).encode())
                answers.close()
                continue
            message, files, _, _ = socket.recv_fds(requests, 1 << 20, 4)
            if not message:
                return None
            pid = os.fork()
            if pid == 0:
                requests.close()
                os.close(files[3])
                for _, answers in children.values():
                    answers.close()
                asked = json.loads(message)
                asked["variables"] |= fixed
                return become(asked, files[:3])
            answers, pidfd = socket.socket(fileno=files[3]), os.pidfd_open(pid)
            socket.send_fds(answers, [str(pid).encode()], [pidfd])
            children[pidfd] = (pid, answers)
            poll.register(pidfd, select.POLLIN)
            for file in files[:3]:
                os.close(file)


def become(asked: dict[str, Any], files: list[int]) -> list[str]:
    """Make this process what was asked for. Returns its arguments."""
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(asked["variables"])
    os.chdir(asked["folder"])
    if drawn := sys.modules.get("numpy.random"):
        # Otherwise all children draw the same numbers.
        drawn.seed()
    arguments: list[str] = asked["arguments"]
    return arguments


def main() -> None:
    number, *modules = sys.argv[1:]
    before = dict(os.environ)
    for module in modules:
        importlib.import_module(module)
    fixed = {name: value for name, value in os.environ.items() if before.get(name) != value}
    # No child looks at what was imported, and so copies it, when it collects garbage.
    gc.freeze()
    arguments = serve(socket.socket(fileno=int(number)), fixed)
    if arguments is not None:
        sys.argv = [gated.__file__, *arguments]
        gated.main()


if __name__ == "__main__":
    main()
