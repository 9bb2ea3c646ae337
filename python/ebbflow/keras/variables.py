"""The variables of a Keras model, as a job names, sends and exports them.

| in the model | becomes |
| --- | --- |
| trainable variable (float32) | parameter: the ps train it |
| moving statistics of a ``BatchNormalization`` that is not frozen (float32) | state |
| any other weight | constant: exported, never sent |
| state of a ``SeedGenerator`` | nothing: it is set by the position of each batch |

State is the mean over a step's microbatches. A name is the variable's ``path``.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

from ebbflow.errors import WrittenError
from ebbflow.tensors import Tensors

#: Name that Keras gives to the variable of each ``SeedGenerator``.
_SEED = "seed_generator_state"


class Roles:
    """Which variable of a model is what.

    Args:
        model: The model, with all its variables.
        state: Paths of further variables that a call changes, and that become state.

    Attributes:
        parameters: Paths and variables that the ps train.
        states: Paths and variables of the state.
        constants: Paths and variables that never change.
        seeds: Variables of seed generators.

    Raises:
        TypeError: ``model`` is no Keras model.
        ValueError: It has no variables yet, or some that cannot be trained. The message names one.
    """

    def __init__(self, model: Any, state: Sequence[str] = ()) -> None:
        import keras

        if not isinstance(model, keras.Model):
            raise TypeError(f"model: expected a keras.Model, found {type(model).__name__}")
        if not model.built or not model.weights:
            raise ValueError(
                "model: it has no variables yet; call it on a batch, or call model.build(shape)"
            )
        weights = [(str(variable.path), variable) for variable in model.weights]
        path, count = Counter(path for path, _ in weights).most_common(1)[0]
        if count > 1:
            raise ValueError(f"model: {count} variables have the path `{path}`; name the layers")
        unknown = sorted(set(state) - {path for path, _ in weights})
        if unknown:
            raise ValueError(f"state: `{unknown[0]}` is the path of no weight of the model")
        trained = {id(variable) for variable in model.trainable_variables}
        kept = _statistics(model)
        self.parameters = [pair for pair in weights if id(pair[1]) in trained]
        if not self.parameters:
            raise ValueError("model: no variable is trainable, so there is nothing to train")
        others = [pair for pair in weights if id(pair[1]) not in trained]
        self.states = [pair for pair in others if id(pair[1]) in kept or pair[0] in state]
        states = {id(variable) for _, variable in self.states}
        self.constants = [pair for pair in others if id(pair[1]) not in states]
        known = {id(variable) for _, variable in weights}
        rest = [variable for variable in model.variables if id(variable) not in known]
        self.seeds = [variable for variable in rest if variable.name == _SEED]
        for path, variable in self.parameters + self.states:
            _check(path, variable)


class TorchVariables(Tensors):
    """The tensors of variables on the backend torch."""

    def __init__(self, roles: Roles) -> None:
        self._keep(
            [(path, variable.value) for path, variable in roles.parameters],
            [(path, variable.value) for path, variable in roles.states],
            [(path, variable.value) for path, variable in roles.constants],
        )


class Variables:
    """The variables on a backend whose tensors NumPy does not see: they are copied."""

    def __init__(self, roles: Roles) -> None:
        self.parameters = roles.parameters
        self._states = roles.states
        self._constants = roles.constants
        self._first_constants = self.described_constants()
        self._loaded = 0
        # Once is enough: a call that writes a variable does so each time.
        self._checked = False

    def described(self) -> list[tuple[str, str, list[int], bytes]]:
        """Return path, role, shape and first values of each variable."""
        roles = [(path, "parameter", variable) for path, variable in self.parameters]
        roles += [(path, "state", variable) for path, variable in self._states]
        return [(path, role, list(v.shape), _bytes(v)) for path, role, v in roles]

    def described_constants(self) -> list[tuple[str, str, list[int], bytes]]:
        """Return path, type, shape and values of each constant."""
        return [(path, str(v.dtype), list(v.shape), _bytes(v)) for path, v in self._constants]

    def fingerprint(self, constants: Sequence[tuple[str, str, list[int], bytes]]) -> str:
        """Return a hash of paths, types and shapes, and of all that is never sent."""
        hashed = hashlib.sha256()
        for path, variable in self.parameters + self._states:
            hashed.update(f"{path} {variable.dtype} {tuple(variable.shape)};".encode())
        for path, dtype, shape, content in constants:
            hashed.update(f"{path} {dtype} {shape};".encode() + content)
        return hashed.hexdigest()

    def bind(self, request: Any) -> None:
        """Copy the weights of a request into the model."""
        import numpy

        variables = [variable for _, variable in self.parameters + self._states]
        first = 0 if request.loaded != self._loaded else len(self.parameters)
        regions = request.weights()
        for variable, region in zip(variables[first:], regions[first:], strict=True):
            # TensorFlow may keep the memory that it is given, and that of a request is used again.
            variable.assign(numpy.array(region).reshape(tuple(variable.shape)))
        self._loaded = request.loaded

    def load(self, weights: dict[str, Any]) -> None:
        """Copy a job's final weights into the model."""
        for path, variable in self.parameters + self._states:
            variable.assign(weights[path].reshape(tuple(variable.shape)))
        self._loaded = 0

    def collect(self, request: Any, gradients: Sequence[Any]) -> None:
        """Write gradients times the number of records, and the new state, into a request.

        Args:
            request: The request.
            gradients: One array for each parameter; ``None`` stands for zeros.
        """
        import numpy

        if not self._checked:
            self._check(request)
        regions = [numpy.asarray(region) for region in request.buffers()]
        count = len(self.parameters)
        weight = numpy.float32(request.weight)
        for gradient, region in zip(gradients, regions[:count], strict=True):
            if gradient is None:
                region[:] = 0
            else:
                numpy.multiply(gradient.reshape(-1), weight, out=region)
        for (_, variable), region in zip(self._states, regions[count:], strict=True):
            region[:] = variable.numpy().reshape(-1)

    def _check(self, request: Any) -> None:
        """Check that the first step of this process wrote nothing that only the job may change."""
        import numpy

        for (path, variable), region in zip(self.parameters, request.weights(), strict=False):
            if variable.numpy().tobytes() != numpy.asarray(region).tobytes():
                raise WrittenError(
                    f"the loop wrote the variable `{path}`; only the job's optimizer may: remove "
                    "optimizer.apply(..) and layers that write their weights, such as "
                    "SpectralNormalization"
                )
        for (path, variable), (*_, content) in zip(
            self._constants, self._first_constants, strict=True
        ):
            if _bytes(variable) != content:
                raise WrittenError(
                    f"the loop wrote `{path}`, which the job takes for a constant, so nobody would "
                    f'keep its value; pass state=["{path}"] to join if it is state of the model'
                )
        self._checked = True


def _check(path: str, variable: Any) -> None:
    if variable.dtype != "float32":
        raise ValueError(
            f"model: the variable `{path}` is {variable.dtype}; only float32 is trained: use the "
            'dtype policy "float32", or a mixed one whose variables are float32'
        )
    if getattr(variable, "constraint", None) is not None:
        raise ValueError(
            f"model: the variable `{path}` has a constraint, which the ps do not apply; remove it"
        )


def _statistics(model: Any) -> set[int]:
    """Return the ids of the moving statistics of normalisations."""
    import keras

    found = set()
    for layer in model._flatten_layers():
        if isinstance(layer, keras.layers.BatchNormalization) and layer.trainable:
            found |= {id(layer.moving_mean), id(layer.moving_variance)}
    return found


def _bytes(variable: Any) -> bytes:
    content: bytes = variable.numpy().tobytes()
    return content
