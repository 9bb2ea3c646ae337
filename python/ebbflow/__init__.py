"""Ebbflow: elastic deep-learning training on sharded parameter servers.

Every record is applied once per epoch, and in canonical order the trained bits do not depend on
which process computed what.

``run`` trains a job in this process, and ``launch`` a script in processes of this host. ``Client``
talks to the master of a cluster. The program ``ebb`` comes with this package.

Importing this package is light: numpy, torch and other libraries are imported where they are used.
"""

from ebbflow import data, errors, export, initial
from ebbflow._native import __version__
from ebbflow.client import Client, Job, Watch
from ebbflow.errors import Error
from ebbflow.launcher import Launch, launch
from ebbflow.local import run
from ebbflow.records import seed_microbatch
from ebbflow.result import Metrics, Result
from ebbflow.session import Batch, Epoch, Session, join
from ebbflow.status import Event, Status

__all__ = [
    "Batch",
    "Client",
    "Epoch",
    "Error",
    "Event",
    "Job",
    "Launch",
    "Metrics",
    "Result",
    "Session",
    "Status",
    "Watch",
    "__version__",
    "data",
    "errors",
    "export",
    "initial",
    "join",
    "launch",
    "run",
    "seed_microbatch",
]
