"""What a loop in Keras computes with, for each of its backends: see ``ebbflow.engine.Engine``."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from ebbflow._device import CPU, name_on_host
from ebbflow.arrays import Arrays
from ebbflow.data import Source, refuse_inside
from ebbflow.engine import Engine, OnTorch
from ebbflow.errors import WrittenError
from ebbflow.keras import threads
from ebbflow.keras.optimizers import optimizer_settings
from ebbflow.keras.shards import Reader, Shards
from ebbflow.keras.variables import Roles, TorchVariables, Variables
from ebbflow.records import Records, seed_all, seed_host


class Keras(Engine):
    """A Keras model.

    Args:
        roles: Its variables.
        session: Class of the session.
        collate: Makes a batch of a list of records. Default: they are stacked.

    Attributes:
        has_threads: Whether a job may have several threads.
    """

    has_threads = False

    def __init__(self, roles: Roles, session: Any, collate: Callable[..., Any] | None) -> None:
        self.session = session
        self._seeds = roles.seeds
        self._states = [variable for _, variable in roles.states]
        self._collate = collate
        self._optimizer: Any = None

    def records(self, data: Any, what: str, seed: int) -> Any:
        return records_of(data, what, seed, self._collate)

    def settings(self, optimizer: Any, steps: int) -> dict[str, Any]:
        self._optimizer = optimizer
        return optimizer_settings(optimizer, steps)

    def seed(self, seed: int, *position: int) -> None:
        key = self._seed_libraries(seed, *position)
        for number, state in enumerate([*self._seeds, _unnamed()]):
            packed = hashlib.blake2b(f"{key} {number}".encode(), digest_size=4).digest()
            # The second number counts what the generator gave. The first one must fit an int32.
            state.assign([int.from_bytes(packed, "little") >> 1, 0])

    def changing(self) -> list[Any]:
        """Return the variables that a call of the model may change."""
        return [*self._states, *self._seeds, _unnamed()]

    def check(self) -> None:
        """Check that the loop left the update to the job.

        Raises:
            WrittenError: The optimizer was applied.
        """
        if int(self._optimizer.iterations) > 0:
            raise WrittenError(
                "the loop applied the optimizer; only the job does: remove optimizer.apply(..), "
                "model.fit(..) and model.train_on_batch(..)"
            )

    @abstractmethod
    def gradients(self, function: Callable[[], Any], request: Any) -> float:
        """Write the gradients of what a function returns into a request. Returns its value."""

    @abstractmethod
    def _seed_libraries(self, seed: int, *position: int) -> int:
        """Seed what Keras does not seed. Returns a key of the position."""


class TorchKeras(OnTorch, Keras):
    """Keras on PyTorch."""

    tensors: TorchVariables
    has_threads = True

    def __init__(
        self, model: Any, state: Sequence[str], session: Any, collate: Callable[..., Any] | None
    ) -> None:
        roles = Roles(model, state)
        super().__init__(roles, session, collate)
        self.tensors = TorchVariables(roles)

    def numerics(self, threads: int) -> tuple[str, bytes]:
        import keras

        facts, results = super().numerics(threads)
        return f"keras {keras.__version__}, {facts}", results

    def measuring(self) -> contextlib.AbstractContextManager[None]:
        import torch

        context: contextlib.AbstractContextManager[None] = torch.no_grad()
        return context

    def gradients(self, function: Callable[[], Any], request: Any) -> float:
        loss = _checked(function())
        self.tensors.check()
        loss.backward()
        self.tensors.collect(request)
        return float(loss.detach())

    def _seed_libraries(self, seed: int, *position: int) -> int:
        seed_all(seed, *position)
        return seed_host(seed, *position)


class TensorFlowKeras(Keras):
    """Keras on TensorFlow."""

    tensors: Variables

    def __init__(
        self, model: Any, state: Sequence[str], session: Any, collate: Callable[..., Any] | None
    ) -> None:
        threads.check()
        roles = Roles(model, state)
        super().__init__(roles, session, collate)
        self.tensors = Variables(roles)

    def use_threads(self, _: int) -> int:
        return 1

    def numerics(self, _: int) -> tuple[str, bytes]:
        return threads.numerics()

    def device(self) -> tuple[str, int]:
        import tensorflow as tf

        place = tf.DeviceSpec.from_string(self._place())
        if place.device_type != "GPU":
            return CPU
        # TensorFlow tells nobody how much memory a device has.
        return name_on_host(int(place.device_index), os.environ), 0

    def measuring(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def gradients(self, function: Callable[[], Any], request: Any) -> float:
        import tensorflow as tf

        trained = [variable.value for _, variable in self.tensors.parameters]
        with tf.GradientTape() as tape:
            # A layer that was frozen when it was made has variables that no tape watches.
            tape.watch(trained)
            loss = _checked(function())
        # Gradients of embeddings are sparse.
        found = [
            None if gradient is None else tf.convert_to_tensor(gradient).numpy()
            for gradient in tape.gradient(loss, trained)
        ]
        self.tensors.collect(request, found)
        return float(loss)

    def _place(self) -> str:
        """Return the name that TensorFlow gives to the device of the model."""
        return str(self.tensors.parameters[0][1].value.device)

    def _seed_libraries(self, seed: int, *position: int) -> int:
        # `tf.random.set_seed` drops all compiled kernels, so a batch would take ten times as long.
        return seed_host(seed, *position)


def engine_of(
    model: Any, state: Sequence[str], session: Any, collate: Callable[..., Any] | None = None
) -> Keras:
    """Return the engine of a model, for the backend of this process.

    Raises:
        TypeError: ``model`` is no Keras model.
        ValueError: The backend or the model cannot be trained.
    """
    import keras

    backend = keras.config.backend()
    if backend == "torch":
        return TorchKeras(model, state, session, collate)
    if backend == "tensorflow":
        return TensorFlowKeras(model, state, session, collate)
    raise ValueError(
        f"the backend of Keras is {backend}, and models are trained on torch and tensorflow; set "
        "KERAS_BACKEND before the import of keras"
    )


def records_of(
    data: Any, what: str, seed: int, collate: Callable[[list[Any]], Any] | None = None
) -> Any:
    """Return the records of a user's data set.

    Raises:
        TypeError: The data are of a kind whose records have no numbers.
        ValueError: There are no records, or the arrays have different numbers of them.
    """
    import keras

    if isinstance(data, Shards):
        return Reader(data, what)
    if isinstance(data, Source):
        raise TypeError(
            f"{what}: only loops of ebbflow.keras.join take ebbflow.data.source; write such a loop"
        )
    refuse_inside(data, what)
    kinds = {kind.__module__ for kind in type(data).__mro__}
    if any(kind.startswith("tensorflow.") for kind in kinds):
        raise TypeError(
            f"{what}: {type(data).__name__} has no records by number; give ebbflow.keras.Shards "
            "with a function that makes it"
        )
    if isinstance(data, keras.utils.PyDataset):
        raise TypeError(
            f"{what}: {type(data).__name__} has batches, and a job leases records; give a data set "
            "whose __getitem__ returns one record"
        )
    of_torch = any(kind.startswith("torch.utils.data") for kind in kinds)
    if of_torch and collate is None and keras.config.backend() == "torch":
        return Records(data, what, seed)
    return Arrays(data, what, seed, keras.tree.map_structure, collate)


def _checked(loss: Any) -> Any:
    import keras

    if not keras.ops.is_tensor(loss) or math.prod(loss.shape) != 1:
        shape = f" of shape {tuple(loss.shape)}" if hasattr(loss, "shape") else ""
        raise TypeError(
            "job.step(loss): expected a function that returns the mean loss over the batch, a "
            f"tensor of one element, found {type(loss).__name__}{shape}"
        )
    return loss


def _unnamed() -> Any:
    """Return the state of the generator of calls without one, such as ``keras.random.normal``."""
    from keras.src.random.seed_generator import global_seed_generator

    return global_seed_generator().state
