"""Writes a trained model for other programs: ONNX, TorchScript, PyTorch, Keras, Hugging Face.

After the end of a job the model of its loop has the final weights. One process writes them:

    if job.elected:
        ebbflow.export.onnx(model, examples, "model.onnx")

A file is written beside its place and then renamed, so what is there is whole.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ebbflow import _weights
from ebbflow.errors import ExportError, OutputError
from ebbflow.result import Result
from ebbflow.tensors import is_keras, plain_name

__all__ = ["keras", "onnx", "pretrained", "state_dict", "torchscript"]

#: Packages that write an ONNX file and compute with it.
_ONNX = ("onnx", "onnxscript", "onnxruntime")

#: Files of a tokenizer and of settings, which belong to a folder of Hugging Face.
_BESIDE = (
    "generation_config.json",
    "merges.txt",
    "preprocessor_config.json",
    "special_tokens_map.json",
    "spiece.model",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)


def onnx(
    model: Any,
    inputs: Any,
    path: str | os.PathLike[str],
    *,
    any_batch: bool = True,
    tolerance: float = 1e-5,
) -> Path:
    """Write a module as an ONNX file, and check its outputs with onnxruntime.

    Args:
        model: A ``torch.nn.Module``, or a ``keras.Model`` on the backend torch. It is exported in
            evaluation mode.
        inputs: An example of what ``forward`` takes: a tensor, several ones in a tuple, or a
            dictionary of tensors by the names of arguments. Of a Keras model what a call takes: an
            array or a tensor, or several ones in a list or in a dictionary by the names of inputs.
        path: The file. Folders above it are made.
        any_batch: Whether the first dimension of every input may have any size in the file.
        tolerance: Largest difference of an output of onnxruntime, beside the module's largest
            absolute output or 1, whichever is larger.

    Returns:
        The path of the file.

    Raises:
        ModuleNotFoundError: A package is missing: ``pip install 'ebbflow[onnx]'``.
        RuntimeError: torch is older than 2.6.
        ExportError: torch cannot export the module, onnxruntime computes other outputs, or Keras
            has another backend. There is no new file.
    """
    require_onnx("ebbflow.export.onnx", model)
    import torch

    of_keras, names = is_keras(model), None
    if of_keras:
        from ebbflow.keras.module import called

        model, inputs, names = called(model, inputs)
    module = _inner(model)
    positional, named = _arguments(inputs, module)
    tensors = [*positional, *named.values()]
    shapes: Any = None
    if any_batch:
        dimensions = [{0: torch.export.Dim.DYNAMIC} for _ in tensors]
        shapes = dict(zip(named, dimensions, strict=True)) if named else tuple(dimensions)
        # The module of a Keras model has one argument: `*tensors`.
        shapes = (shapes,) if of_keras else shapes
    with _evaluating(module), _whole(path) as partial:
        try:
            torch.onnx.export(
                module,
                tuple(positional),
                str(partial),
                kwargs=named,
                dynamo=True,
                dynamic_shapes=shapes,
                input_names=names,
                external_data=False,
                verbose=False,
            )
        except Exception as error:
            advice = "; pass any_batch=False if it takes one size of batch alone" * any_batch
            reason = str(error).strip().partition("\n")[0]
            raise ExportError(
                f"{path}: torch cannot export the module: {reason}{advice}"
            ) from error
        # Twice as many records show that the file takes any number.
        for times in (1, 2) if any_batch else (1,):
            _compare(module, positional, named, times, partial, tolerance)
    return Path(path)


def require_onnx(what: str, model: Any = None) -> None:
    """Check that ``what`` can write ONNX files, of ``model`` too, before a training.

    Raises:
        ExportError: ``model`` is one of Keras on another backend than torch.
        ModuleNotFoundError: A package is missing.
        RuntimeError: torch is too old.
    """
    if is_keras(model):
        from keras import config

        if config.backend() != "torch":
            raise ExportError(
                f"{what}: Keras writes ONNX on its backend torch, and here it has "
                f"{config.backend()}; write the model by ebbflow.export.keras, and load that file "
                "in a process with KERAS_BACKEND=torch"
            )
    for package in _ONNX:
        if importlib.util.find_spec(package) is None:
            raise ModuleNotFoundError(
                f"{what} needs the package `{package}`: pip install 'ebbflow[onnx]'"
            )
    import torch

    if not hasattr(torch.export.Dim, "DYNAMIC"):
        raise RuntimeError(f"{what} needs torch 2.6 or later, found {torch.__version__}")


def torchscript(model: Any, path: str | os.PathLike[str], inputs: Any = None) -> Path:
    """Write a module for ``torch.jit.load``, and for workers of ``ebb`` with libtorch.

    Args:
        model: A ``torch.nn.Module``. It is exported in evaluation mode.
        path: The file. Folders above it are made.
        inputs: A tensor, or several ones in a tuple, with which ``forward`` is traced. Without them
            it is scripted, so that its branches and loops stay.

    Returns:
        The path of the file.

    Raises:
        ExportError: torch cannot script or trace the module. There is no new file.
    """
    import torch

    module = _inner(model)
    with _evaluating(module), _whole(path) as partial:
        try:
            if inputs is None:
                scripted = torch.jit.script(module)
            else:
                positional, named = _arguments(inputs, module)
                scripted = torch.jit.trace(
                    module, tuple(positional) or None, example_kwarg_inputs=named or None
                )
            scripted.save(str(partial))
        except Exception as error:
            reason = str(error).strip().partition("\n")[0]
            way = "script; pass inputs to trace it" if inputs is None else "trace"
            raise ExportError(f"{path}: torch cannot {way}: {reason}") from error
    return Path(path)


def state_dict(model: Any, path: str | os.PathLike[str]) -> Path:
    """Write the weights as ``torch.save(model.state_dict())`` does, on the CPU.

    Args:
        model: A ``torch.nn.Module``, or the :class:`ebbflow.Result` of a job. The names of tensors
            are those of the module without ``torch.compile``.
        path: The file. Folders above it are made.

    Returns:
        The path of the file.
    """
    import torch

    if isinstance(model, Result):
        tensors = model.state_dict("torch")
    else:
        tensors = {
            plain_name(name): tensor.detach().cpu()
            for name, tensor in _inner(model).state_dict().items()
        }
    with _whole(path) as partial:
        torch.save(tensors, partial)
    return Path(path)


def keras(model: Any, path: str | os.PathLike[str], result: Result | None = None) -> Path:
    """Write a Keras model, or its weights alone, on any backend.

    Args:
        model: A ``keras.Model`` that has its variables.
        path: The file. Its name ends in ``.keras`` for the whole model, which
            ``keras.saving.load_model`` reads, or in ``.weights.h5`` for ``model.load_weights``.
            Folders above it are made.
        result: Result of a job that trained this model. Its weights are copied into ``model``
            first. Default: the weights that ``model`` has.

    Returns:
        The path of the file.

    Raises:
        TypeError: ``model`` is none of Keras.
        ValueError: ``path`` ends in something else.
        ExportError: The weights of ``result`` are those of another model, which is left as it was,
            or Keras cannot write the model. There is no new file.
    """
    if not is_keras(model):
        raise TypeError(f"model: expected a keras.Model, found {type(model).__name__}")
    write = {".keras": "save", ".weights.h5": "save_weights"}
    method = next((write[end] for end in write if str(path).endswith(end)), None)
    if method is None:
        raise ValueError(f"{path}: expected a name that ends in .keras or .weights.h5")
    if result is not None:
        _assign(model, result)
    with _whole(path) as partial:
        try:
            getattr(model, method)(partial)
        except Exception as error:
            reason = str(error).strip().partition("\n")[0]
            raise ExportError(f"{path}: Keras cannot write the model: {reason}") from error
    return Path(path)


def _assign(model: Any, result: Result) -> None:
    """Copy the weights of a result into a Keras model, by the paths of its variables."""
    saved = result.state_dict()
    own = {str(variable.path): variable for variable in model.weights}
    wrong = [name for name in own if name not in saved] + [
        name for name in saved if name not in own
    ]
    wrong += [name for name in own if name in saved and saved[name].shape != tuple(own[name].shape)]
    if wrong:
        raise ExportError(
            f"result: `{wrong[0]}` is not in both the job and the model, or has another shape; "
            "make the model as the script of the job does, with the same names of layers"
        )
    for name, variable in own.items():
        variable.assign(saved[name])


def pretrained(
    model: Any,
    folder: str | os.PathLike[str],
    config: Mapping[str, Any] | str | os.PathLike[str] | Any = None,
) -> Path:
    """Write a folder that ``from_pretrained`` of Hugging Face reads.

    Args:
        model: A module, or the :class:`ebbflow.Result` of a job. A model of ``transformers``, or
            another one with a ``save_pretrained``, writes its configuration itself.
        folder: The folder, with ``model.safetensors`` and ``config.json``.
        config: The configuration: a dictionary; an object with ``to_dict``; or a folder with a
            ``config.json``, such as the one that the first weights came from. Of a folder the
            files of its tokenizer are copied too.

    Returns:
        The path of the folder.

    Raises:
        TypeError: The model has no configuration of its own, and ``config`` is missing.
        OutputError: ``config`` is a folder without a configuration.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    inner = model if isinstance(model, Result) else _inner(model)
    save = getattr(inner, "save_pretrained", None)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".partial-") as partial:
        place = Path(partial)
        if config is None and save is not None:
            save(place)
        else:
            files = _configuration(config, inner)
            files["model.safetensors"] = _safetensors(inner)
            for name, content in files.items():
                (place / name).write_bytes(content)
        # The weights last: a reader that finds them finds the rest.
        for path in sorted(place.iterdir(), key=lambda path: path.suffix == ".safetensors"):
            path.replace(folder / path.name)
    return folder


def _configuration(config: Any, model: Any) -> dict[str, bytes]:
    """Return the files of a folder beside the weights, by name."""
    if isinstance(config, str | os.PathLike):
        place = Path(config)
        if not (place / "config.json").is_file():
            raise OutputError(f"{place}: no folder of Hugging Face: it has no config.json")
        found = [place / name for name in ("config.json", *_BESIDE)]
        return {path.name: path.read_bytes() for path in found if path.is_file()}
    if hasattr(config, "to_dict"):
        config = config.to_dict()
    if not isinstance(config, Mapping):
        raise TypeError(
            f"config: {type(model).__name__} has no configuration of its own; give a dictionary or "
            "a folder with a config.json"
        )
    return {"config.json": (json.dumps(dict(config), indent=2, sort_keys=True) + "\n").encode()}


def _safetensors(model: Any) -> bytes:
    # Libraries of Hugging Face read files that say of which framework they are.
    about = {"format": "pt"}
    if isinstance(model, Result):
        return _weights.to_bytes(_weights.tensors(model.weights()), about)
    saved = {plain_name(name) for name in model.state_dict()}
    # Each tensor once, by its first name: tied weights are tied again by whoever reads them.
    pairs = [*model.named_parameters(), *model.named_buffers()]
    own = {plain_name(name): tensor for name, tensor in pairs}
    return _weights.to_bytes(
        {name: _weights.of_torch(tensor) for name, tensor in own.items() if name in saved}, about
    )


def _inner(model: Any) -> Any:
    """Return the module as its author wrote it, without ``torch.compile``."""
    import torch

    module = getattr(model, "_orig_mod", model)
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, found {type(model).__name__}")
    return module


def _arguments(inputs: Any, module: Any) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of ``forward``, by position and by name, where the module is."""
    import torch

    device = next((tensor.device for tensor in module.parameters()), torch.device("cpu"))
    named = dict(inputs) if isinstance(inputs, Mapping) else {}
    positional = list(inputs) if isinstance(inputs, tuple | list) else [inputs]
    positional = [] if named else positional
    for value in (*positional, *named.values()):
        if not isinstance(value, torch.Tensor) or value.dim() == 0:
            raise TypeError(
                "inputs: expected a tensor, a tuple of tensors or a dictionary of tensors, each "
                f"with a dimension of records, found {type(value).__name__}"
            )
    return (
        [value.to(device) for value in positional],
        {str(name): value.to(device) for name, value in named.items()},
    )


def _compare(
    module: Any,
    positional: Sequence[Any],
    named: Mapping[str, Any],
    times: int,
    path: Path,
    tolerance: float,
) -> None:
    """Compute the same outputs with the module and with a file, for ``times`` as many records."""
    import onnxruntime
    import torch

    positional = [torch.cat([value] * times) for value in positional]
    named = {name: torch.cat([value] * times) for name, value in named.items()}
    with torch.no_grad():
        outputs = torch.utils._pytree.tree_leaves(module(*positional, **named))
    expected = [value for value in outputs if isinstance(value, torch.Tensor)]
    runner = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [each.name for each in runner.get_inputs()]
    given = named or dict(zip(names, positional, strict=True))
    found = runner.run(None, {name: given[name].cpu().numpy() for name in names})
    for number, (one, other) in enumerate(zip(expected, found, strict=True)):
        one, other = one.cpu().double(), torch.from_numpy(other).double()
        if one.shape != other.shape:
            raise ExportError(
                f"output {number} has the shape {tuple(one.shape)}, and in the ONNX file "
                f"{tuple(other.shape)}; pass any_batch=False, or export the model yourself"
            )
        scale = max(1.0, float(one.abs().max())) if one.numel() else 1.0
        difference = float((one - other).abs().max()) if one.numel() else 0.0
        if not difference <= tolerance * scale:
            raise ExportError(
                f"output {number} of the ONNX file differs by {difference:.2g}, more than "
                f"{tolerance:.2g} times {scale:.3g}; raise tolerance if that is good enough"
            )


@contextlib.contextmanager
def _evaluating(module: Any) -> Iterator[None]:
    """Put a module into evaluation mode for a while."""
    training = [part for part in module.modules() if part.training]
    module.eval()
    try:
        yield
    finally:
        for part in training:
            part.training = True


@contextlib.contextmanager
def _whole(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Give a path to write to, which is renamed to ``path`` at the end."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".partial-") as folder:
        partial = Path(folder) / path.name
        yield partial
        partial.replace(path)
