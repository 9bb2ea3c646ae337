"""TorchScript jobs by the PyTorch of this Python, for a program without libtorch.

Rust drives it (``python/src/extension/torchscript.rs``). The operations, their order, the settings
and the seeds are those of the linked engine in ``model/src/engines/torch``, so PyTorch of the same
version computes the same bits.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from ebbflow import _script_code
from ebbflow.numerics import numerics as numerics_of_loops

#: The version of libtorch to which programs are linked.
LINKED = "2.11.0"

_lock = threading.Lock()
#: The generators of torch belong to the process.
_generators = threading.Lock()
#: What gives torch the settings back that it had before :func:`start`; empty: it has them.
_undo: list[Callable[[], object]] = []
_runs = 0


def start() -> None:
    """Make torch compute with the settings of the linked engine, until :func:`kept` ends.

    A worker of a cluster keeps them.

    Raises:
        ImportError: There is no torch.
    """
    import torch

    with _lock:
        if _undo:
            return
        if torch.__version__.split("+")[0] != LINKED:
            warnings.warn(
                f"PyTorch {torch.__version__} computes TorchScript jobs here: the bits may differ "
                f"from those of a worker that is linked to libtorch {LINKED}; "
                f"pip install torch=={LINKED}",
                stacklevel=2,
            )
        _set(torch)


def _set(torch: Any) -> None:
    native = torch._C
    # New threads take over the number that any thread set last. This thread may have an older one.
    with ThreadPoolExecutor(1) as new:
        threads = new.submit(torch.get_num_threads).result()
    _undo.append(partial(torch.set_num_threads, threads))
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    strict = torch.are_deterministic_algorithms_enabled()
    _undo.append(partial(native._set_deterministic_algorithms, strict, warn_only=only_warns))
    native._set_deterministic_algorithms(True, warn_only=False)
    _swap(native, "deterministic_fill_uninitialized_memory", False)
    if hasattr(native, "_set_mkldnn_deterministic"):
        _swap(native, "mkldnn_deterministic", True)
    precision = torch.get_float32_matmul_precision()
    if precision != "highest":
        _undo.append(partial(torch.set_float32_matmul_precision, precision))
        torch.set_float32_matmul_precision("highest")
    # The profiling executor watches the first calls and then runs other, fused code with other
    # roundings.
    for name in ("_jit_set_profiling_executor", "_jit_set_profiling_mode"):
        switch = getattr(native, name)
        _undo.append(partial(switch, switch(False)))
    fuses = native._jit_texpr_fuser_enabled()
    _undo.append(partial(native._jit_set_texpr_fuser_enabled, fuses))
    native._jit_set_texpr_fuser_enabled(False)
    for place in ("cpu", "gpu"):
        override = getattr(native, f"_jit_override_can_fuse_on_{place}")
        _undo.append(partial(override, getattr(native, f"_jit_can_fuse_on_{place}")()))
        override(False)


def _swap(native: Any, name: str, value: bool) -> None:
    change = getattr(native, f"_set_{name}")
    _undo.append(partial(change, getattr(native, f"_get_{name}")()))
    change(value)


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Return a context of a run. At the end of the last one torch has its settings back."""
    global _runs
    with _lock:
        _runs += 1
    try:
        yield
    finally:
        with _lock:
            _runs -= 1
            while _runs == 0 and _undo:
                _undo.pop()()


def _enter(threads: int) -> None:
    """Make the settings of the calling thread."""
    import torch

    # A thread's first parallel loop takes over the process's default; asking first makes ours the
    # last word.
    torch.get_num_threads()
    torch.set_num_threads(threads)
    torch._C._set_graph_executor_optimize(False)


def numerics(threads: int) -> tuple[str, bytes]:
    """Return the numerics class of this engine: facts for people, and a hash of results."""
    _enter(threads)
    facts, results = numerics_of_loops(threads)
    return f"TorchScript, {facts}", results


class Module:
    """A TorchScript module on the CPU.

    Between calls its tensors hold exactly the loaded weights: a forward pass of training changes
    state in place, and :meth:`restore` puts it back.

    Args:
        path: The file. It is there as long as this object.
        threads: Threads of one computation.
        autocast: Type of torch's autocast around ``forward`` and the loss, as in
            ``torch.bfloat16``; ``None``: none.

    Raises:
        RuntimeError: It is no TorchScript file.
    """

    def __init__(self, path: str, threads: int, autocast: str | None = None) -> None:
        import torch

        self._torch = torch
        self._threads = threads
        self._autocast = None if autocast is None else getattr(torch, autocast)
        self._path = path
        self._whole = torch.jit.load(path, map_location="cpu")
        self._module = self._whole._c
        if not self._module._has_method("forward"):
            raise RuntimeError("the module has no method `forward`")
        self._forward = self._module._get_method("forward")
        self._modules = list(_modules(torch, self._module, ""))
        self._tie()
        self._entries: list[tuple[str, Any, bool, bool, bool]] = []
        self._watched: list[tuple[str, Any]] = []
        self._slots: list[tuple[str, Any, str]] = []
        self._draws = self._trains = False
        self._trained: list[tuple[Any, bool]] = []
        self._loaded: list[tuple[Any, Any]] = []
        self._outputs: Any = None
        self._own_loss: Any = None
        self._labels: Any = None
        self._loss: Any = None

    def attributes(
        self,
    ) -> list[tuple[str, tuple[str, list[int], bool] | None, bool, bool, bool]]:
        """Return the attributes that training has to know about.

        For each: its name; type, shape and whether it requires a gradient, or ``None`` if it is no
        tensor; whether it is a parameter; a buffer; whether ``forward`` may change it.
        """
        native = self._torch._C
        optimizes = native._get_graph_executor_optimize()
        # With the optimizer off, inlining stops at the first level of calls.
        native._set_graph_executor_optimize(True)
        try:
            graph = self._forward.inlined_graph
            classes = {module._type().qualified_name() for _, module in self._modules}
            effects = _script_code.effects(graph, native.OptionalType.ofTensor(), classes)
        finally:
            native._set_graph_executor_optimize(optimizes)
        self._draws = effects.draws
        declared = _script_code.declared(self._path)
        for prefix, module in self._modules:
            self._collect(prefix, module, effects, declared)
        return [
            (name, None if tensor is None else _described(tensor), parameter, buffer, written)
            for name, tensor, parameter, buffer, written in self._entries
        ]

    def _collect(
        self,
        prefix: str,
        module: Any,
        effects: _script_code.Effects,
        declared: dict[str, _script_code.Declared],
    ) -> None:
        native = self._torch._C
        of_class = declared.get(module._type().qualified_name())
        order = {} if of_class is None else of_class.order
        parameters = dict(native.ParameterDict(module).items())
        tensors = parameters | dict(native.BufferDict(module).items())
        # What is assigned need not be a tensor.
        assigned = {
            name.removeprefix(prefix)
            for name in effects.assigned
            if name.startswith(prefix) and "." not in name.removeprefix(prefix)
        }
        names = sorted(
            tensors.keys() | assigned, key=lambda name: (order.get(name, len(order)), name)
        )
        for name in names:
            path, tensor, is_parameter = prefix + name, tensors.get(name), name in parameters
            is_buffer = not is_parameter if of_class is None else name in of_class.buffers
            # A buffer that may change is state. Anything else is refused, so only for what is
            # seen: in the code, or when it happens.
            is_written = path in effects.surely
            if tensor is not None and is_buffer:
                is_written = path in effects.written or effects.writes_unknown
            is_slot = name in assigned and not (is_buffer and tensor is not None)
            if is_slot:
                self._slots.append((path, module, name))
            if tensor is not None and not is_written and not is_slot:
                kind = "parameter" if is_parameter else "buffer" if is_buffer else "attribute"
                self._watched.append((f"the {kind} `{path}` itself", tensor))
            if tensor is not None or is_written:
                self._entries.append((path, tensor, is_parameter, is_buffer, is_written))

    def _tie(self) -> None:
        """Make one tensor again of what is one tensor under several names, so that torch sums."""
        seen: dict[Any, Any] = {}
        for _, module in self._modules:
            for name, tensor in self._torch._C.ParameterDict(module).items():
                if tensor.numel() == 0:
                    continue
                place = (
                    tensor.untyped_storage().data_ptr(),
                    tensor.storage_offset(),
                    tuple(tensor.shape),
                    tensor.stride(),
                )
                first = seen.setdefault(place, tensor)
                if first is not tensor:
                    module.setattr(name, first)

    def arguments(self) -> list[tuple[str, bool, bool]]:
        """Return the arguments of ``forward`` without self.

        For each: its name; whether it is a dictionary of tensors; whether it has a default.
        """
        return [
            (
                argument.name,
                argument.type.annotation_str == "Dict[str, Tensor]",
                bool(argument.has_default_value()),
            )
            for argument in self._forward.schema.arguments[1:]
        ]

    def train(self, trained: Sequence[tuple[int, bool]]) -> None:
        """Take the tensors that travel: their indices, and whether each is a parameter."""
        self._trained = [(self._entries[at][1], parameter) for at, parameter in trained]
        with self._torch.no_grad():
            self._loaded = [
                (tensor, tensor.clone()) for tensor, parameter in self._trained if not parameter
            ]

    def values(self) -> list[bytes]:
        """Return the values of the tensors that travel, row-major."""
        return [_bytes(self._torch, tensor) for tensor, _ in self._trained]

    def constant(self, index: int) -> tuple[str, list[int], bytes]:
        """Return type, shape and values of an attribute."""
        tensor = self._entries[index][1]
        kind, shape, _ = _described(tensor)
        return kind, shape, _bytes(self._torch, tensor)

    def load(self, regions: Sequence[Any]) -> None:
        """Copy weights into the tensors that travel."""
        import numpy

        _enter(self._threads)
        for (tensor, _), region in zip(self._trained, regions, strict=True):
            # By NumPy: torch warns of memory that is for reading alone.
            values = numpy.asarray(region).reshape(tuple(tensor.shape))
            numpy.copyto(tensor.detach().numpy(), values)
        with self._torch.no_grad():
            for tensor, value in self._loaded:
                value.copy_(tensor)

    def restore(self) -> None:
        """Put the loaded state back, and forget the last forward pass."""
        self._outputs = self._own_loss = self._labels = self._loss = None
        with self._torch.no_grad():
            for tensor, value in self._loaded:
                tensor.copy_(value)

    def forward(
        self,
        inputs: Sequence[tuple[str, str, list[int], bytearray]],
        labels: tuple[str, str, list[int], bytearray],
        passing: int,
        own_loss: bool,
        key: int | None,
    ) -> tuple[tuple[str, list[int]], tuple[str, list[int]] | None]:
        """Call ``forward``. Returns type and shape of the outputs, and of its loss if it has one.

        Args:
            inputs: Name, type, shape and values of each input.
            labels: The labels, in the same form.
            passing: How ``forward`` takes them: 0 by position, 1 by name, 2 as a dictionary.
            own_loss: Whether it gets the labels and returns its loss.
            key: Seed of a training pass; ``None``: evaluation.

        Raises:
            RuntimeError: ``forward`` fails, returns something else, or changes what nobody keeps.
        """
        _enter(self._threads)
        for _, module in self._modules:
            if module.hasattr("training"):
                module.setattr("training", key is not None)
        self._labels = self._tensor(labels)
        named = {column[0]: self._tensor(column) for column in inputs}
        positional: list[Any] = []
        if passing == 0:
            positional = list(named.values())
        elif passing == 2:
            positional = [named]
        if own_loss and passing != 1:
            positional.append(self._labels)
        keywords = named if passing == 1 else {}
        if own_loss and passing == 1:
            keywords = keywords | {"labels": self._labels}
        self._outputs = self._own_loss = None
        self._trains = key is not None
        # Some code draws in evaluation too, from a fixed key.
        with (
            self._torch.set_grad_enabled(self._trains),
            self._seeded(key or 0),
            self._lowered(),
        ):
            answer = self._call(positional, keywords)
        self._outputs, self._own_loss = self._parts(answer, own_loss)
        loss = None if self._own_loss is None else _described(self._own_loss)[:2]
        return _described(self._outputs)[:2], loss

    def _tensor(self, column: tuple[str, str, list[int], bytearray]) -> Any:
        _, kind, shape, values = column
        dtype = getattr(self._torch, kind)
        if not values:
            return self._torch.empty(shape, dtype=dtype)
        # A copy in torch's own memory: vector code may take another path for other addresses.
        return self._torch.frombuffer(values, dtype=dtype).reshape(shape).clone()

    @contextlib.contextmanager
    def _seeded(self, key: int) -> Iterator[None]:
        """Seed torch's generators if the code draws. No other model draws meanwhile."""
        if not self._draws:
            yield
            return
        with _generators:
            self._torch.default_generator.manual_seed(key)
            yield

    def _lowered(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which operations that lose little compute in the type of autocast."""
        if self._autocast is None:
            return contextlib.nullcontext()
        # The cache of cast weights belongs to the process. With it, another thread would decide
        # whether two uses of a weight share one cast, and gradients would have other bits.
        context: contextlib.AbstractContextManager[Any] = self._torch.autocast(
            "cpu", dtype=self._autocast, cache_enabled=False
        )
        return context

    def _call(self, positional: Sequence[Any], keywords: dict[str, Any]) -> Any:
        """Call ``forward``, and refuse a change of what it is expected to leave as it is."""
        versions = [tensor._version for _, tensor in self._watched]
        values = [module.getattr(name) for _, module, name in self._slots]
        answer = self._forward(*positional, **keywords)
        for (what, tensor), version in zip(self._watched, versions, strict=True):
            if tensor._version != version:
                raise RuntimeError(
                    f"forward changes {what}; only the optimizer may change what is trained (for "
                    "max_norm and the like, normalise a copy), and code must show which buffers it "
                    "changes"
                )
        for (path, module, name), before in zip(self._slots, values, strict=True):
            now = module.getattr(name)
            is_tensor = isinstance(now, self._torch.Tensor)
            if now is not before and (is_tensor or now != before):
                raise RuntimeError(
                    f"forward changes the attribute `{path}`, so nobody would keep its value; make "
                    "it a buffer (register_buffer) or leave it unchanged"
                )
        return answer

    def _parts(self, answer: Any, own_loss: bool) -> tuple[Any, Any]:
        """Return the outputs and the loss of what ``forward`` returned."""
        tensor = self._torch.Tensor
        found = type(answer).__name__
        if not own_loss:
            if not isinstance(answer, tensor):
                raise RuntimeError(f"forward returns {found}, expected a Tensor")
            return answer, None
        is_pair = isinstance(answer, tuple) and len(answer) == 2
        if not is_pair or not all(isinstance(part, tensor) for part in answer):
            raise RuntimeError(
                f"forward returns {found}, expected Tuple[Tensor, Tensor]: (mean loss, outputs)"
            )
        return answer[1], answer[0]

    def loss(
        self, name: str, smoothing: float, ignored: int, is_second: bool | None, counts: bool
    ) -> tuple[float, bool]:
        """Compute the mean loss of the last forward pass.

        Args:
            name: The loss of the job file.
            smoothing: Share of each label for all classes.
            ignored: Class that does not count, where a record has several labels.
            is_second: Whether the classes of such outputs are in dimension 1; ``None``: a record
                has one label.
            counts: Whether a label counts.

        Returns:
            The loss, and whether it depends on the parameters.
        """
        with self._torch.set_grad_enabled(self._trains), self._lowered():
            self._loss = self._mean(name, smoothing, ignored, is_second, counts)
        return float(self._loss.item()), bool(self._loss.requires_grad)

    def _mean(
        self, name: str, smoothing: float, ignored: int, is_second: bool | None, counts: bool
    ) -> Any:
        if self._own_loss is not None:
            return self._own_loss.view(())
        functional = self._torch.nn.functional
        rows, labels = self._outputs, self._labels
        if is_second is None:
            # Labels are checked, so none is the class to ignore.
            ignored = -100
        else:
            rows = _rows(rows, is_second)
            if not counts:
                return rows.sum(dtype=self._torch.float32).mul(0.0)
            labels = labels.view(-1)
        if name == "cross_entropy":
            return functional.cross_entropy(
                rows, labels, ignore_index=ignored, label_smoothing=smoothing
            )
        if name == "nll":
            return functional.nll_loss(rows, labels, ignore_index=ignored)
        labels = labels.view(rows.shape)
        if name == "mse":
            return functional.mse_loss(rows, labels)
        return functional.binary_cross_entropy_with_logits(rows, labels)

    def gradients(self, weight: float, regions: Sequence[Any], scale: float | None = None) -> None:
        """Write what the last forward pass adds to a step into memory of the worker.

        Args:
            weight: Factor of the gradients of parameters.
            regions: Memory for each tensor that travels.
            scale: Factor of the loss, a power of two. The gradients are divided by it.
        """
        import numpy

        torch = self._torch
        if scale is not None:
            # In f32: a loss in f16 would overflow by its scale.
            self._loss = self._loss.to(torch.float32) * scale
            weight /= scale
        parameters = [tensor for tensor, parameter in self._trained if parameter]
        found = iter(torch.autograd.grad(self._loss, parameters, allow_unused=True))
        with torch.no_grad():
            for (tensor, parameter), region in zip(self._trained, regions, strict=True):
                place = torch.from_numpy(numpy.asarray(region)).view(tensor.shape)
                gradient = next(found) if parameter else tensor
                if gradient is None:
                    # It took no part in the loss.
                    place.zero_()
                elif parameter:
                    torch.mul(gradient, weight, out=place)
                else:
                    place.copy_(gradient)

    def rows(self, is_second: bool) -> bytes:
        """Return the outputs of the last forward pass as floats, the classes beside each other."""
        outputs = self._outputs.detach().to(self._torch.float32)
        return _bytes(self._torch, _rows(outputs, True) if is_second else outputs)

    def save(self) -> bytes:
        """Return the module in evaluation mode with its present weights, as a file."""
        for _, module in self._modules:
            if module.hasattr("training"):
                module.setattr("training", False)
        return bytes(self._module.save_to_buffer())


def _modules(torch: Any, module: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """Return a module and those inside, each with the prefix of its attributes."""
    yield prefix, module
    for name, child in torch._C.ModuleDict(module).items():
        yield from _modules(torch, child, f"{prefix}{name}.")


def _described(tensor: Any) -> tuple[str, list[int], bool]:
    kind = str(tensor.dtype).removeprefix("torch.")
    return kind, list(tensor.shape), bool(tensor.requires_grad)


def _rows(outputs: Any, is_second: bool) -> Any:
    """Return outputs of several labels a record as ``[labels, classes]``."""
    if is_second:
        outputs = outputs.movedim(1, -1)
    return outputs.contiguous().view(-1, outputs.shape[-1])


def _bytes(torch: Any, tensor: Any) -> bytes:
    flat = tensor.detach().contiguous().view(-1)
    content: bytes = flat.view(torch.uint8).numpy().tobytes()
    return content
