"""The tensors of a torch module, as a job names, sends and exports them.

| in the module | becomes |
| --- | --- |
| parameter with ``requires_grad`` (float32) | parameter: the ps train it |
| running statistics of a normalisation (float32) | state: the mean of a step's microbatches |
| its ``num_batches_tracked`` (int64) | counter: their maximum |
| frozen parameter, any other buffer | constant: exported, never sent |

Names are those of the module that the user wrote: without the prefix of ``torch.compile``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ebbflow._early import Early
from ebbflow._gradients import Gradients
from ebbflow._marks import Marks
from ebbflow.errors import SessionError, WrittenError

#: Parameters of fewer bytes are copied, which takes no longer than not to.
_SHARED_BYTES_MIN = 1 << 18


def is_keras(model: Any) -> bool:
    """Return whether a model is one of Keras, which on its backend torch is a torch module too.

    Raises:
        TypeError: It is one of Keras 2.
    """
    modules = {kind.__module__.partition(".")[0] for kind in type(model).__mro__}
    if "tf_keras" in modules:
        raise TypeError(
            f"model: {type(model).__name__} is a model of Keras 2 (tf_keras); make it with Keras 3"
        )
    return "keras" in modules


class Tensors:
    """The tensors of a module, in the order in which the job has them.

    Args:
        model: The module. Its values now are version 0 of the job.
        state: Names of further buffers that ``forward`` changes, and that become state (float32)
            or counters (int64).

    Raises:
        TypeError: ``model`` is no ``torch.nn.Module``, or one of Keras.
        ValueError: It has nothing to train, a trained tensor has a type other than float32, or a
            name in ``state`` is none of a buffer that may be one.
    """

    def __init__(self, model: Any, state: Sequence[str] = ()) -> None:
        import torch

        if is_keras(model):
            raise TypeError(
                f"model: {type(model).__name__} is a Keras model; call ebbflow.keras.join"
            )
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"model: expected a torch.nn.Module, found {type(model).__name__}")
        parameters = {plain_name(name): tensor for name, tensor in model.named_parameters()}
        trained = [(name, tensor) for name, tensor in parameters.items() if tensor.requires_grad]
        if not trained:
            raise ValueError("model: no parameter has requires_grad, so there is nothing to train")
        for name, tensor in trained:
            if tensor.dtype != torch.float32:
                raise ValueError(
                    f"model: parameter `{name}` is {tensor.dtype}; only torch.float32 is trained: "
                    "call model.float(), and use autocast for less"
                )
        saved = set(model.state_dict().keys())
        buffers = {
            plain_name(name): buffer for name, buffer in model.named_buffers() if name in saved
        }
        state = [plain_name(name) for name in state]
        kept = _statistics(model) | set(state)
        unknown = sorted(set(state) - buffers.keys())
        if unknown:
            raise ValueError(
                f"state: `{unknown[0]}` is no persistent buffer of the model; there are "
                f"{', '.join(buffers) or 'none'}"
            )
        states: list[tuple[str, Any]] = []
        constants: list[tuple[str, Any]] = [
            (name, tensor) for name, tensor in parameters.items() if not tensor.requires_grad
        ]
        for name, buffer in buffers.items():
            if name not in kept:
                constants.append((name, buffer))
            elif buffer.dtype in {torch.float32, torch.int64}:
                states.append((name, buffer))
            else:
                raise ValueError(
                    f"model: the buffer `{name}` is {buffer.dtype}; state is torch.float32 (its "
                    "mean over a step's microbatches) or torch.int64 (their maximum)"
                )
        self._keep(trained, states, constants)
        self.compiled = any(
            hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None
            for module in model.modules()
        )

    def _keep(
        self,
        parameters: list[tuple[str, Any]],
        states: list[tuple[str, Any]],
        constants: list[tuple[str, Any]],
    ) -> None:
        """Begin with the named tensors of a model."""
        self.parameters = parameters
        self.states = states
        self.constants = constants
        #: Whether a part of the module is compiled, so that it rounds in its own way.
        self.compiled = False
        self._loaded = 0
        tensors = [tensor for _, tensor in parameters + states]
        # Those of the request are among them.
        self._devices = {tensor.device for tensor in tensors if tensor.device.type == "cuda"}
        # Whether a parameter may have the memory of a request, and what memory it had before.
        self._shares = [_may_share(tensor) for _, tensor in self.parameters]
        self._own: list[Any] = [None] * len(self.parameters)
        self._early = Early([name for name, _ in parameters], [tensor for _, tensor in parameters])
        self._gradients = Gradients([tensor for _, tensor in self.parameters])
        # Where the gradients of the request at hand belong, and which of them are there.
        self._outs: list[Any] = []
        self._written: set[int] = set()
        # The request of which a backward pass has told the worker a part.
        self._spent: Any = None
        self._versions: list[int] = []
        self._constant_versions = [tensor._version for _, tensor in constants]
        self._marks = Marks([tensor for _, tensor in parameters])
        self._constant_marks = Marks([tensor for _, tensor in constants])
        self._constant_marks.keep()

    def names(self) -> dict[int, str]:
        """Return the name of each parameter by its ``id``."""
        return {id(tensor): name for name, tensor in self.parameters}

    def described(self) -> list[tuple[str, str, list[int], bytes]]:
        """Return name, role, shape and first values of each tensor."""
        import torch

        roles = [(name, "parameter", tensor) for name, tensor in self.parameters]
        for name, tensor in self.states:
            role = "state" if tensor.dtype == torch.float32 else "counter"
            roles.append((name, role, tensor))
        return [(name, role, list(tensor.shape), _bytes(tensor)) for name, role, tensor in roles]

    def described_constants(self) -> list[tuple[str, str, list[int], bytes]]:
        """Return name, type, shape and values of each constant."""
        return [
            (name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), _bytes(tensor))
            for name, tensor in self.constants
        ]

    def fingerprint(self, constants: Sequence[tuple[str, str, list[int], bytes]]) -> str:
        """Return a hash of names, roles and shapes, and of all that is never sent."""
        import hashlib

        hashed = hashlib.sha256()
        for name, tensor in self.parameters + self.states:
            hashed.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
        for name, dtype, shape, content in constants:
            hashed.update(f"{name} {dtype} {shape};".encode() + content)
        return hashed.hexdigest()

    def bind(self, request: Any) -> None:
        """Give the module the weights of a request.

        Large parameters are not copied: their memory is then that of the request, which nobody else
        reads or writes. State is copied, because ``forward`` changes it.

        Raises:
            WrittenError: The loop wrote a tensor since the last request.
        """
        if self._outs:
            # The loop goes on after an error between its backward pass and its answer.
            self._drop()
        self._spent = None
        count = len(self.parameters)
        first = 0 if request.loaded != self._loaded else count
        if self._versions:
            # Weights that stay are compared after the batch.
            self.check(values=first == 0)
        self._gradients.forget()
        views = _views(request.weights()[first:])
        try:
            for at, view in zip(range(first, count), views, strict=False):
                tensor = self.parameters[at][1]
                self._place(at, tensor, view.view(tensor.shape))
            for (_, tensor), view in zip(self.states, views[count - first :], strict=True):
                # `data` has no gradient and no count of writes.
                tensor.data.copy_(view.view(tensor.shape))
        finally:
            self._wait()
        if first == 0:
            self._marks.keep()
        self._loaded = request.loaded
        self._versions = [tensor._version for _, tensor in self.parameters]

    def load(self, weights: dict[str, Any]) -> None:
        """Copy a job's final weights into the module, in the memory that it had before the job.

        Raises:
            WrittenError: The loop wrote a tensor since the last request.
        """
        import torch

        if self._versions:
            self.check()
        for at, own in enumerate(self._own):
            tensor = self.parameters[at][1]
            if own is not None and not _is_seen_elsewhere(tensor):
                tensor.data = own
        self._own = [None] * len(self.parameters)
        for name, tensor in self.parameters + self.states:
            tensor.data.copy_(torch.from_numpy(weights[name]).view(tensor.shape))
        self._marks.keep()
        self._loaded = 0
        self._versions = [tensor._version for _, tensor in self.parameters]

    def _place(self, at: int, tensor: Any, view: Any) -> None:
        """Give a parameter the values of a view: its memory, or a copy."""
        # Whatever shares the memory of a parameter, such as `model.weight.data` in a variable,
        # expects to see each update there.
        if self._shares[at] and _is_seen_elsewhere(tensor):
            self._shares[at] = False
        if not self._shares[at]:
            tensor.data.copy_(view)
            return
        if self._own[at] is None:
            self._own[at] = tensor.data
        tensor.data = view

    def check(self, *, values: bool = True) -> None:
        """Check that the loop wrote nothing that only the job may change.

        Torch counts most writes. The others, such as those through ``data``, are found by
        :class:`Marks`: all in a small tensor, and in a large one those that change much of it.

        Args:
            values: Whether to look for writes that torch does not count.

        Raises:
            WrittenError: A parameter or a constant was written. The message names it.
        """
        # What was kept stays, so that whoever goes on hears it again.
        at = _moved(self.parameters, self._versions)
        if at is not None:
            name = self.parameters[at][0]
            raise WrittenError(
                f"the loop wrote the parameter `{name}`; only the job's optimizer may: remove "
                "optimizer.step() and other writes (for clipping, see clip_norm of join)"
            )
        at = self._marks.written() if values else None
        if at is not None:
            name = self.parameters[at][0]
            raise WrittenError(
                f"the loop wrote the parameter `{name}` in a way that torch does not count, such "
                "as through .data or an array of NumPy; only the job's optimizer may: remove the "
                "write, and bound or mask a weight where forward uses it"
            )
        at = _moved(self.constants, self._constant_versions)
        if at is None and values:
            at = self._constant_marks.written()
        if at is not None:
            name = self.constants[at][0]
            raise WrittenError(
                f"the loop wrote `{name}`, which the job takes for a constant, so nobody would "
                f'keep its value; pass state=["{name}"] to join if it is state of the model'
            )

    def watch(self) -> None:
        """Begin to watch backward passes."""
        self._gradients.watch()

    def backward(self, loss: Any, request: Any) -> None:
        """Compute the gradients of a loss. Large ones are written into a request meanwhile.

        Raises:
            SessionError: A backward pass of this request failed after the worker had a part of its
                gradients, or a gradient grew after the worker had it.
        """
        self._outs = self._outs_of(request)
        self._early.begin(self._outs, request.weight, request.made)
        is_whole = False
        try:
            loss.backward()
            is_whole = True
        finally:
            try:
                self._written = self._early.end(is_whole=is_whole)
            except BaseException:
                is_whole = False
                raise
            finally:
                self._spent = request if self._early.has_told else None
                if not is_whole:
                    self._drop()
                    self._wait()

    def _drop(self) -> None:
        """Drop what a backward pass has left, or the next one would add to it."""
        self._outs, self._written = [], set()
        for _, tensor in self.parameters:
            tensor.grad = None

    def collect(self, request: Any) -> None:
        """Write gradients times the number of records, and the new state, into a request.

        What :meth:`backward` has written into it is there already.

        Raises:
            WrittenError: The loop wrote a gradient after its backward pass, as clipping does.
        """
        at = self._gradients.written()
        if at is not None:
            raise WrittenError(
                f"the loop wrote the gradient of `{self.parameters[at][0]}` after its backward "
                "pass, as torch.nn.utils.clip_grad_norm_ does. The job clips the gradient of the "
                "whole update: use clip_norm of join. Other gradients of your own are assigned: "
                "parameter.grad = gradient"
            )
        self._gradients.forget()
        outs, written = self._outs or self._outs_of(request), self._written
        # No view of the memory may be left when the request is answered, or it would be copied.
        self._outs, self._written = [], set()
        try:
            self._write(outs, written, request.weight)
        finally:
            self._wait()

    def close(self) -> None:
        """Leave the module to its user."""
        self._early.close()
        self._gradients.close()
        self._outs = []

    def _write(self, outs: list[Any], written: set[int], weight: float) -> None:
        """Write gradients times ``weight``, and the new state, into the memory of a request.

        Gradients at the places ``written`` are there already.
        """
        import torch

        count = len(self.parameters)
        for at, ((_, tensor), out) in enumerate(zip(self.parameters, outs[:count], strict=True)):
            gradient = tensor.grad
            tensor.grad = None
            if at in written:
                continue
            if gradient is None:
                out.zero_()
                continue
            if gradient.is_sparse:
                gradient = gradient.to_dense()
            if gradient.device == out.device:
                torch.mul(gradient, weight, out=out)
            else:
                out.copy_(gradient * weight)
        for (_, tensor), out in zip(self.states, outs[count:], strict=True):
            out.copy_(tensor)

    def _wait(self) -> None:
        """Wait until CUDA devices have read and written the memory of a request.

        A device does what torch has told it later. The worker uses the memory again at once.
        """
        import torch

        for device in self._devices:
            torch.cuda.synchronize(device)

    def _outs_of(self, request: Any) -> list[Any]:
        """Return the memory of each tensor in a request.

        Raises:
            SessionError: The worker has a part of the gradients of this request.
        """
        if request is self._spent:
            raise SessionError(
                f"microbatch {request.microbatch}: a part of its gradients was handed to the job "
                "before an error, so it cannot be stepped again; leave the loop by the error: on a "
                "cluster the microbatch is computed anew"
            )
        tensors = [tensor for _, tensor in self.parameters + self.states]
        views = _views(request.buffers())
        return [view.view(tensor.shape) for view, tensor in zip(views, tensors, strict=True)]


def parsed(file: bytes) -> dict[str, Any]:
    """Return the float32 and int64 tensors of a safetensors file as flat arrays, by name."""
    import json

    import numpy

    header_bytes = int.from_bytes(file[:8], "little")
    begin = 8 + header_bytes
    types: dict[str, Any] = {"F32": numpy.dtype("<f4"), "I64": numpy.dtype("<i8")}
    tensors = {}
    for name, entry in json.loads(file[8:begin]).items():
        if entry.get("dtype") in types:
            first, end = entry["data_offsets"]
            values = bytearray(file[begin + first : begin + end])
            tensors[name] = numpy.frombuffer(values, types[entry["dtype"]])
    return tensors


def _statistics(model: Any) -> set[str]:
    """Return the names of the running statistics of normalisations."""
    from torch.nn.modules.batchnorm import _NormBase

    names = set()
    for prefix, module in model.named_modules():
        if isinstance(module, _NormBase) and module.track_running_stats:
            for name in ("running_mean", "running_var", "num_batches_tracked"):
                names.add(plain_name(f"{prefix}.{name}" if prefix else name))
    return names


def plain_name(name: str) -> str:
    """Return a name without the parts that ``torch.compile`` adds, at any depth."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def _moved(named: Sequence[tuple[str, Any]], versions: Sequence[int]) -> int | None:
    """Return the number of the first tensor whose count of writes is another one."""
    pairs = enumerate(zip(named, versions, strict=True))
    return next((at for at, ((_, tensor), version) in pairs if tensor._version != version), None)


def _bytes(tensor: Any) -> bytes:
    import torch

    plain = tensor.detach().cpu().contiguous().reshape(-1)
    content: bytes = plain.view(torch.uint8).numpy().tobytes()
    return content


def _may_share(tensor: Any) -> bool:
    """Return whether a parameter may get other memory, which is contiguous, for each version."""
    import torch

    plain = type(tensor) is torch.nn.Parameter and tensor.device.type == "cpu"
    large = plain and tensor.nbytes >= _SHARED_BYTES_MIN
    # Without this private function of torch nobody knows who else sees the memory.
    known = hasattr(torch._C, "_storage_Use_Count")
    return large and known and bool(tensor.is_contiguous()) and not tensor.is_shared()


def _is_seen_elsewhere(tensor: Any) -> bool:
    """Return whether another tensor, or an array, has the memory of a parameter."""
    import torch

    storage = tensor.untyped_storage()
    # The parameter's own use, and that of `storage`.
    return int(torch._C._storage_Use_Count(storage._cdata)) > 2


def _views(regions: Sequence[Any]) -> list[Any]:
    """Return flat tensors over regions, each on the device where the region lies."""
    import torch

    return [torch.from_dlpack(region) for region in regions]
