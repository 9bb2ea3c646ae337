"""Becomes a user's script, with the variables of its host. ``ebbflow.launch`` starts a copy of it.

The argument is the folder of the job, which every process sees at the same path. It has a file for
each process, ``worker-0.json`` and so on.
"""

import json
import os
import sys
from pathlib import Path

_ROOT = Path(sys.argv[1])

# A process is `worker-0` on this host, and `train-1-0` at an agent.
_INDEX = os.environ["EBBFLOW_WORKER"].rpartition("-")[2]

_HOST = json.loads((_ROOT / f"worker-{_INDEX}.json").read_text(encoding="utf-8"))

_CODE = _ROOT / "code"

_ENVIRONMENT = {**os.environ, **_HOST["environment"]}

_ENVIRONMENT["PYTHONPATH"] = os.pathsep.join(
    path for path in (str(_CODE), _ENVIRONMENT.get("PYTHONPATH")) if path
)

# One pipe for both, so that lines keep their order.
os.dup2(1, 2)
os.chdir(_CODE)
os.execve(sys.executable, [sys.executable, *_HOST["arguments"]], _ENVIRONMENT)
