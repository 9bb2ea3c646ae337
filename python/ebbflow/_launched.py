"""The program ``ebb`` as a child that ends no later than the process that started it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

from ebbflow.__main__ import main

#: Number of ``PR_SET_PDEATHSIG`` in Linux: the signal for this process when its parent ends.
_SET_PARENT_DEATH_SIGNAL = 1


def end_with(parent: int) -> bool:
    """Get SIGTERM when the parent ends. Returns whether it is still there.

    The signal belongs to the thread of the parent that started this process.
    """
    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)
    # The parent may have ended before the kernel knew.
    return os.getppid() == parent


def _launched() -> int:
    """Run ``ebb``. The first argument is the id of the parent, the rest are those of ``ebb``.

    With ``--exec`` the rest is another program.
    """
    parent = int(sys.argv.pop(1))
    if not end_with(parent):
        return 1
    if sys.argv[1:2] == ["--exec"]:
        os.execvp(sys.argv[2], sys.argv[2:])
    return main()


if __name__ == "__main__":
    sys.exit(_launched())
