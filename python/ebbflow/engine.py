"""What a loop computes gradients with, as a session sees it. Here for PyTorch."""

from __future__ import annotations

import contextlib
import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

from ebbflow._device import CPU, name_on_host
from ebbflow.errors import WrittenError
from ebbflow.numerics import numerics
from ebbflow.optimizers import optimizer_settings
from ebbflow.records import Records, seed_all
from ebbflow.tensors import Tensors


class Engine(ABC):
    """The library in which a loop is written.

    Attributes:
        tensors: The tensors of the model: what a request brings, and where gradients come from.
        compiled: Whether a part of the model is compiled apart from the loop.
        session: Class of the session; ``None`` stands for :class:`ebbflow.Session`.
        counts_steps: Whether the settings of an optimizer depend on the steps of the job.
    """

    tensors: Any
    compiled: bool = False
    session: Any = None
    counts_steps: bool = True

    @abstractmethod
    def records(self, data: Any, what: str, seed: int) -> Any:
        """Return the records of a data set of the user."""

    @abstractmethod
    def settings(self, optimizer: Any, steps: int) -> dict[str, Any]:
        """Return the ``[optimizer]`` section of a job of ``steps`` steps.

        ``steps`` is 0 if nobody counted them.
        """

    def array(self, array: Any) -> Any:
        """Return what the loop gets of a NumPy array that the worker has read."""
        return array

    @abstractmethod
    def use_threads(self, threads: int) -> int:
        """Compute with so many threads. Returns how many there were before."""

    @abstractmethod
    def numerics(self, threads: int) -> tuple[str, bytes]:
        """Return the numerics class: facts for people, and a hash of results."""

    def device(self) -> tuple[str, int]:
        """Return the device that computes gradients, with its memory in bytes (0: not known)."""
        return CPU

    def cuda(self) -> int | None:
        """Return the number in this process of the CUDA device on which ``tensors`` take weights.

        They leave gradients there too. ``None``: they do so in memory of the host.
        """
        return None

    @abstractmethod
    def seed(self, seed: int, *position: int) -> None:
        """Seed what draws random numbers, by a position of a job with ``seed``."""

    def key(self, number: int) -> Any:
        """Return what a loop draws random numbers with, beside what :meth:`seed` seeds."""
        return None

    def begin(self) -> None:  # noqa: B027
        """Watch what the loop does, from the beginning of the session on."""

    def close(self) -> None:  # noqa: B027
        """Leave the model to its user, at the end of the session."""

    @abstractmethod
    def measuring(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the model is measured and not trained."""


class OnTorch(Engine):
    """An engine whose gradients PyTorch computes."""

    def use_threads(self, threads: int) -> int:
        import torch

        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        return int(before)

    def numerics(self, threads: int) -> tuple[str, bytes]:
        facts, results = numerics(threads)
        index = self.cuda()
        if index is None:
            return facts, results
        import torch

        # A GPU of another model rounds differently, whatever the CPU beside it does.
        return f"{facts}, {torch.cuda.get_device_name(index)}, CUDA {torch.version.cuda}", results

    def device(self) -> tuple[str, int]:
        index = self.cuda()
        if index is None:
            return CPU
        import torch

        memory = torch.cuda.get_device_properties(index).total_memory
        return name_on_host(index, os.environ), int(memory)

    def cuda(self) -> int | None:
        import torch

        device = next((tensor.device for _, tensor in self.tensors.parameters), None)
        if device is None or device.type != "cuda":
            return None
        return int(torch.cuda.current_device() if device.index is None else device.index)


class Torch(OnTorch):
    """PyTorch, with a module."""

    counts_steps = False

    def __init__(self, model: Any, state: Sequence[str]) -> None:
        self.tensors = Tensors(model, state)
        self.compiled = self.tensors.compiled
        self._model = model
        self._optimizer: Any = None
        self._hook: Any = None

    def records(self, data: Any, what: str, seed: int) -> Records:
        return Records(data, what, seed)

    def array(self, array: Any) -> Any:
        import torch

        with warnings.catch_warnings():
            # Batches are for reading, of which torch has no notion.
            warnings.simplefilter("ignore", UserWarning)
            return torch.from_numpy(array)

    def settings(self, optimizer: Any, steps: int) -> dict[str, Any]:
        self._check(optimizer)
        self._optimizer = optimizer
        return optimizer_settings(optimizer, self.tensors.names())

    def seed(self, seed: int, *position: int) -> None:
        seed_all(seed, *position)

    def begin(self) -> None:
        self.tensors.watch()
        self._hook = self._optimizer.register_step_pre_hook(_refuse)

    def close(self) -> None:
        self.tensors.close()
        if self._hook is not None:
            self._hook.remove()

    @contextlib.contextmanager
    def measuring(self) -> Iterator[None]:
        import torch

        training = self._model.training
        self._model.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            self._model.train(training)

    def _check(self, optimizer: Any) -> None:
        """Check that an optimizer has the parameters of the model."""
        groups = getattr(optimizer, "param_groups", [])
        given = {id(tensor) for group in groups for tensor in group["params"]}
        for name, tensor in self.tensors.parameters:
            if id(tensor) not in given:
                raise ValueError(
                    f"optimizer: the parameter `{name}` requires a gradient and is not among its "
                    "parameters; add it, or freeze it with requires_grad_(False)"
                )
        known = {id(tensor) for _, tensor in self.tensors.parameters + self.tensors.constants}
        if given - known:
            raise ValueError(
                f"optimizer: {len(given - known)} of its parameters are not the model's; give it "
                "model.parameters()"
            )


def _refuse(optimizer: Any, _arguments: Any, _options: Any) -> None:
    raise WrittenError(
        f"the loop called step() of {type(optimizer).__name__}, which join got, and only the job "
        "applies updates: remove optimizer.step(); job.step(loss) stands for it"
    )
