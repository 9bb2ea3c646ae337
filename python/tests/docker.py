"""What tests with containers need: a Docker engine, Compose, and an image for this Python."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Iterator, Sequence
from io import BytesIO
from pathlib import Path

import pytest

#: Images of tests, by the processes that made them.
REPOSITORY = "ebbflow-test-python"


def docker(*arguments: str) -> str:
    """Run ``docker``, which must succeed. Returns what it says."""
    said = subprocess.run(["docker", *arguments], capture_output=True, text=True, check=False)
    assert said.returncode == 0, f"docker {arguments}: {said.stderr}"
    return said.stdout


def needs_compose() -> None:
    """Skip the tests without a Docker engine. With ``EBB_REQUIRE_ALL=1`` it must have Compose."""
    if not _answers("docker", "version"):
        pytest.skip("no Docker engine answers")
    if _answers("docker", "compose", "version") or _answers("docker-compose", "version"):
        return
    said = "neither docker-compose nor `docker compose`"
    assert os.environ.get("EBB_REQUIRE_ALL") != "1", said
    pytest.skip(said)


def environment() -> dict[str, Path]:
    """Return the folders with this interpreter, ebbflow and torch, as channels of an estimator."""
    packages = {path: f"packages{index}" for index, path in enumerate(_packages())}
    return {"interpreter": Path(sys.base_prefix), **{name: path for path, name in packages.items()}}


@contextlib.contextmanager
def image_for_this_python() -> Iterator[str]:
    """Make an image with the libraries of this machine, and remove it at the end.

    What :func:`environment` names is not in it and must be mounted: torch alone may have 2 GB.
    """
    _sweep()
    name = f"{REPOSITORY}:{os.getpid()}"
    settings = {
        "PATH": str(Path(sys.base_prefix) / "bin"),
        "PYTHONPATH": os.pathsep.join(map(str, _packages())),
        # Nobody may write there.
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    changes = [f"--change=ENV {key}={value}" for key, value in settings.items()]
    with subprocess.Popen(
        ["docker", "import", *changes, "-", name], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
    ) as child:
        assert child.stdin is not None
        with tarfile.open(fileobj=child.stdin, mode="w|", dereference=True) as tar:
            _fill(tar)
    assert child.returncode == 0, "docker import"
    try:
        yield name
    finally:
        docker("image", "rm", "--force", name)


def _answers(*command: str) -> bool:
    if shutil.which(command[0]) is None:
        return False
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _sweep() -> None:
    """Remove the images of tests that were killed."""
    for name in docker("images", "--format", "{{.Repository}}:{{.Tag}}", REPOSITORY).split():
        if not Path("/proc", name.rpartition(":")[2]).exists():
            docker("image", "rm", "--force", name)


def _packages() -> list[Path]:
    """Return the folders from which the packages of a script are imported, each once."""
    folders = {}
    for name in ("ebbflow", "torch", "numpy"):
        found = importlib.util.find_spec(name)
        assert found is not None and found.origin is not None, name
        folders[Path(found.origin).parents[1]] = name
    return list(folders)


def _fill(tar: tarfile.TarFile) -> None:
    temporary = tarfile.TarInfo("tmp")
    temporary.type, temporary.mode = tarfile.DIRTYPE, 0o1777
    tar.addfile(temporary)
    names = b"hosts: files dns\n"
    switch = tarfile.TarInfo("etc/nsswitch.conf")
    switch.size = len(names)
    tar.addfile(switch, BytesIO(names))
    binaries = list((Path(sysconfig.get_path("stdlib")) / "lib-dynload").glob("*.so"))
    for folder in _packages():
        for name in ("ebbflow", "torch", "numpy"):
            binaries += (folder / name).rglob("*.so*")
    for library in sorted(_libraries([Path(sys.base_prefix) / "bin/python3", *binaries])):
        if not any(library.is_relative_to(path) for path in environment().values()):
            tar.add(library, str(library).lstrip("/"), recursive=False)


def _libraries(programs: Sequence[Path]) -> set[Path]:
    """Return the libraries that programs and libraries load, with the loader."""
    said = subprocess.run(["ldd", *programs], capture_output=True, text=True, check=False).stdout
    found = re.findall(r"^\t(?:.* => )?(/\S+) \(0x", said, re.MULTILINE)
    return {Path(os.path.normpath(path)) for path in found}
