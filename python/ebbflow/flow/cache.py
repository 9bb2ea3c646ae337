"""Results of tasks on disk, by the task, its version and its inputs.

    FOLDER/TASK/KEY/outputs.json        the result, its key as text, names and hashes of its files
    FOLDER/TASK/KEY/0-model.pt          files of the result

An entry is written into a folder beside its place and renamed, so a reader finds all of it or
nothing. Of two writers the first one wins, and both return its result. An entry is never changed.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ebbflow.flow.values import decoded, described, encoded

_LOG = logging.getLogger("ebbflow")

_OUTPUTS = "outputs.json"


def folder() -> Path:
    """Return the folder for results: the variable ``EBBFLOW_CACHE``, else below ``~/.cache``."""
    given = os.environ.get("EBBFLOW_CACHE")
    if given:
        return Path(given)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "ebbflow" / "flow"


def described_call(
    task: str, version: str, kinds: Mapping[str, Any], result: Any, inputs: Mapping[str, Any]
) -> str:
    """Return what the result of a task depends on, as text. Its SHA-256 is the key.

    These are its name, its version, the types of its arguments and of its result, and the values
    of its arguments; for a file, its content. The code of the task is not among them.

    Raises:
        OSError: A file among the inputs cannot be read.
    """
    values = {
        name: encoded(value, kinds[name], lambda path: {"sha256": sha256(path)})
        for name, value in inputs.items()
    }
    types = {name: described(kind) for name, kind in sorted(kinds.items())}
    call = {
        "task": task,
        "version": version,
        "arguments": types,
        "result": described(result),
        "inputs": values,
    }
    return json.dumps(call, sort_keys=True, allow_nan=False)


class Entry:
    """The place of one result.

    Args:
        task: Name of the task.
        call: What :func:`described_call` returned.
        result: Type of the result.
    """

    def __init__(self, task: str, call: str, result: Any) -> None:
        self._call = call
        self._kind = result
        self._name = task
        self.path = folder() / task / hashlib.sha256(call.encode()).hexdigest()

    def read(self) -> tuple[Any] | None:
        """Return the result alone in a tuple, or ``None`` if there is none.

        A damaged entry counts as none. A warning names it, and the next :meth:`write` replaces it.
        """
        try:
            text = (self.path / _OUTPUTS).read_bytes()
        except FileNotFoundError:
            return None
        try:
            found = json.loads(text)
            return (decoded(found["value"], self._kind, self._kept, self._name),)
        except (ValueError, TypeError, KeyError, OSError) as error:
            _LOG.warning("the result of %s in %s is damaged: %s", self._name, self.path, error)
            self._discard()
            return None

    def write(self, value: Any) -> Any:
        """Keep a result. Returns it with the kept files in place of its own.

        Raises:
            OSError: A file of the result cannot be read, or the folder cannot be written.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=".new-", dir=self.path.parent))
        try:
            count = 0

            def keep(path: Path) -> dict[str, str]:
                nonlocal count
                name = f"{count}-{path.name}"
                count += 1
                shutil.copyfile(path, made / name)
                (made / name).chmod(0o444)
                _sync(made / name)
                return {"file": name, "sha256": sha256(made / name)}

            content = {"value": encoded(value, self._kind, keep), "call": json.loads(self._call)}
            (made / _OUTPUTS).write_text(json.dumps(content, indent=1, allow_nan=False))
            _sync(made / _OUTPUTS)
            _sync(made)
            with contextlib.suppress(FileExistsError):
                self._rename(made)
            _sync(self.path.parent)
        finally:
            shutil.rmtree(made, ignore_errors=True)
        found = self.read()
        if found is None:
            raise OSError(errno.EIO, "the result that was just written is damaged", str(self.path))
        return found[0]

    def _rename(self, made: Path) -> None:
        try:
            made.rename(self.path)
        except OSError as error:
            if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
                raise FileExistsError(error.errno, error.strerror, str(self.path)) from error
            raise

    def _kept(self, found: Any) -> Path:
        path = self.path / Path(found["file"]).name
        if sha256(path) != found["sha256"]:
            raise ValueError(f"{path.name} has another content than when it was written")
        return path

    def _discard(self) -> None:
        """Move a damaged entry away whole, so that no reader sees a half of it."""
        with contextlib.suppress(OSError):
            away = Path(tempfile.mkdtemp(prefix=".old-", dir=self.path.parent))
            self.path.rename(away / "entry")
            shutil.rmtree(away, ignore_errors=True)


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file."""
    hashed = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            hashed.update(piece)
    return hashed.hexdigest()


def _sync(path: Path) -> None:
    """Let the disk have what a file or a folder holds."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
