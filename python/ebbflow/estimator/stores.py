"""Files at paths and URLs. Object stores are reached by ``fsspec``, which torch brings along."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

from ebbflow.errors import InvalidJobError

__all__ = ["download", "local_path", "upload"]


def local_path(place: str) -> Path | None:
    """Return the path of a plain path or a ``file://`` URL. ``None``: it is another URL.

    Raises:
        InvalidJobError: The URL names another host.
    """
    if "://" not in place:
        return Path(place)
    parts = urlsplit(place)
    if parts.scheme != "file":
        return None
    if parts.netloc not in ("", "localhost"):
        raise InvalidJobError(f"{place}: a file of another host; expected file:///PATH")
    return Path(url2pathname(parts.path))


def download(url: str, folder: Path) -> None:
    """Copy a remote file, or all files below a remote folder, into ``folder``.

    Raises:
        ModuleNotFoundError: The package for this kind of URL is not installed.
        InvalidJobError: There is no such file.
        OSError: A file cannot be read or written.
    """
    with _store(url) as (store, root):
        files = sorted(store.find(root))
        if not files:
            raise InvalidJobError(f"{url}: no such file")
        for file in files:
            below = file[len(root) :].lstrip("/") if file != root else file.rsplit("/", 1)[-1]
            target = folder / below
            if not target.resolve().is_relative_to(folder.resolve()):
                raise InvalidJobError(f"{url}: {file} would be written outside of its folder")
            target.parent.mkdir(parents=True, exist_ok=True)
            store.get_file(file, str(target))


def upload(source: Path, place: str) -> None:
    """Copy a file to a path or URL, or all files below a folder to below it.

    Raises:
        ModuleNotFoundError: The package for this kind of URL is not installed.
        OSError: A file cannot be read or written.
    """
    below_it = sorted(path for path in source.rglob("*") if path.is_file())
    files = below_it if source.is_dir() else [source]
    below = [str(path.relative_to(source)) if path != source else "" for path in files]
    local = local_path(place)
    if local is not None:
        for path, name in zip(files, below, strict=True):
            target = local / name
            target.parent.mkdir(parents=True, exist_ok=True)
            part = target.with_name(f"{target.name}.part")
            shutil.copyfile(path, part)
            sync(part)
            part.replace(target)
        return
    with _store(place) as (store, root):
        for path, name in zip(files, below, strict=True):
            store.put_file(str(path), f"{root.rstrip('/')}/{name}" if name else root)


def sync(path: Path) -> None:
    """Let the disk have what a file holds."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _store(url: str) -> Iterator[tuple[Any, str]]:
    """Give the file system of a URL, and the path in it."""
    try:
        import fsspec

        store, root = fsspec.core.url_to_fs(url)
    except ImportError as error:
        kind = urlsplit(url).scheme
        more = {"s3": " s3fs", "gs": " gcsfs", "az": " adlfs", "abfs": " adlfs"}.get(kind, "")
        raise ModuleNotFoundError(f"{url}: {error}; pip install fsspec{more}") from error
    except ValueError as error:
        raise InvalidJobError(f"{url}: {error}") from error
    yield store, root
