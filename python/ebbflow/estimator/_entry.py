"""Becomes a user's script, with the variables of its host. ``ebb run`` starts a copy of this file.

Beside it lies a file for each process, ``worker-0.json`` and so on.
"""

import json
import os
import sys
from pathlib import Path

_WORKER = os.environ["EBBFLOW_WORKER"]

_HOST = json.loads(Path(__file__).with_name(f"{_WORKER}.json").read_text(encoding="utf-8"))

# One pipe for both, so that lines keep their order.
os.dup2(1, 2)
os.execve(
    sys.executable,
    [sys.executable, *_HOST["arguments"]],
    {**os.environ, **_HOST["environment"]},
)
