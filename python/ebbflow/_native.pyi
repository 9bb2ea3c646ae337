"""What Rust gives to the package. Everything here is private to it.

A job's state is a JSON object, as ``ebb status --json`` prints it. An event is a JSON object, as
``ebb watch --json`` prints it, with the job's number of steps, or 0 where it is not known.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

__version__: str

_Step: TypeAlias = tuple[tuple[str, int] | None, str | None]

def main(arguments: Sequence[str]) -> int:
    """Run ``ebb``; ``arguments[0]`` is the program's name. Returns the exit code."""

def run(
    job: Mapping[str, object],
    cluster: Mapping[str, object],
    out: str | None,
    on_event: Callable[[str, int], object],
) -> tuple[str, bytes | None]:
    """Train a job in this process. Returns its state, and its model if ``out`` is ``None``."""

class Client:
    """A connection to a master. Methods wait without the GIL."""

    def __init__(
        self,
        url: str,
        secrets: Mapping[str, object],
        timeout_secs: float,
        agent: int | None = None,
    ) -> None: ...
    def submit(self, job: Mapping[str, object]) -> tuple[str, int]: ...
    def submit_script(self, script: Mapping[str, object]) -> tuple[str, int]: ...
    def logs(self, job: str, worker: str | None, follow: bool) -> Logs: ...
    def status(self, job: str) -> str: ...
    def worst(self, job: str) -> tuple[list[tuple[str, bytes | None]], bytes]: ...
    def list(self) -> list[str]: ...
    def scale(self, job: str, workers: int) -> str: ...
    def pause(self, job: str) -> str: ...
    def resume(self, job: str, numerics: str | None) -> str: ...
    def cancel(self, job: str, force: bool) -> str: ...
    def watch(self, job: str) -> Events: ...
    def follow(
        self,
        job: str,
        out: str | None,
        resumes: bool,
        on_event: Callable[[str, int], object],
    ) -> str: ...
    def fetch(self, job: str, out: str) -> str: ...
    def weights(self, job: str) -> bytes | None: ...

class Events:
    """The events of a job, from its first one on."""

    def next(self) -> _Step:
        """Wait for the next event, or for the state of the job that ended."""

    def next_later(self, done: Callable[[_Step | None, Exception | None], object]) -> Waiting:
        """Call ``done`` on another thread when there is a next event, or a failure."""

class Logs:
    """What the processes of a script say."""

    def next(self) -> list[str] | None:
        """Wait for the next lines, or for the end."""

class Waiting:
    """A call of ``Events.next_later`` that has not ended."""

    def cancel(self) -> None: ...

def loss_scale() -> tuple[str, str, list[int], bytes]:
    """Return name, role, shape and first values of the tensor that holds a loss scale."""

def microbatch_key(seed: int, microbatch: int) -> int:
    """Return the seed of every random number of a microbatch, in a job with ``seed``."""

class Region:
    """The values of one tensor, flat, or of a column.

    ``numpy.asarray`` shares them if they lie on the host, and ``torch.from_dlpack`` wherever they
    lie.
    """

    @property
    def __array_interface__(self) -> dict[str, Any]: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...
    def __dlpack__(
        self,
        *,
        stream: object = None,
        max_version: object = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> object: ...

class Source:
    """The section ``[data]`` of a job that a loop drives, and its training records."""

    def __init__(self, section: str, stores: Mapping[str, str]) -> None: ...
    def section(self) -> str: ...
    def count(self) -> int: ...
    def record(self, record: int) -> list[tuple[str, str, Region]]: ...

class Train:
    """A question for the gradients of one microbatch."""

    @property
    def epoch(self) -> int: ...
    @property
    def step(self) -> int: ...
    @property
    def microbatch(self) -> int: ...
    @property
    def records(self) -> list[int]: ...
    def columns(self) -> list[tuple[str, str, Region]]: ...
    @property
    def key(self) -> int: ...
    @property
    def weight(self) -> float: ...
    @property
    def scale(self) -> float: ...
    @property
    def loaded(self) -> int: ...
    @property
    def leads(self) -> bool: ...
    def weights(self) -> list[Region]: ...
    def state(self) -> bytes | None: ...
    def set_state(self, state: bytes) -> None: ...
    def buffers(self) -> list[Region]: ...
    def made(self, tensor: int) -> None: ...
    def answer(self, loss: float) -> None: ...
    def fail(self, reason: str) -> None: ...
    def leave(self) -> None: ...

class Evaluate:
    """A question for the measurements of records."""

    @property
    def epoch(self) -> int: ...
    @property
    def worst(self) -> int: ...
    @property
    def records(self) -> list[int]: ...
    def columns(self) -> list[tuple[str, str, Region]]: ...
    @property
    def loaded(self) -> int: ...
    def weights(self) -> list[Region]: ...
    def state(self) -> bytes | None: ...
    def answer(
        self,
        loss_sum: float,
        means: list[tuple[str, float, int]],
        sums: list[tuple[str, list[float], bool]],
        worst: list[tuple[int, float, list[int], list[float], list[float], bytes]],
    ) -> None: ...
    def fail(self, reason: str) -> None: ...
    def leave(self) -> None: ...

class Session:
    """A process's part in a job."""

    def __init__(
        self,
        spec: str,
        tensors: list[tuple[str, str, list[int], bytes]],
        constants: list[tuple[str, str, list[int], bytes]],
        threads: int,
        numerics: tuple[str, bytes] | None = None,
        master: str | None = None,
        name: str | None = None,
        secrets: Mapping[str, object] | None = None,
        script: int = 0,
        device: tuple[str, int] | None = None,
        agent: int | None = None,
        data_patience: str | None = None,
        ahead: bool = False,
        cuda: int | None = None,
        ps_bytes_max: int | None = None,
    ) -> None: ...
    def ahead(self) -> list[tuple[Any, ...]]: ...
    def next(self) -> Train | Evaluate | tuple[Any, ...]: ...
    def leave(self) -> None: ...
    def stop(self) -> None: ...
