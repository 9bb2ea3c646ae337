"""Where a job leaves its model: ``OUTPUT_PATH/JOB/output/model.tar.gz``."""

from __future__ import annotations

import contextlib
import gzip
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from ebbflow.errors import InvalidJobError
from ebbflow.estimator.stores import local_path, sync, upload

__all__ = ["DEFAULT", "Output", "merged", "pack"]

#: The output path of an estimator without one.
DEFAULT = "out"


class Output:
    """The output of one job.

    Attributes:
        url: Path or URL of the job's folder, as the user wrote its beginning.
        run: Folder of this host for the files of ``ebb run``.
    """

    def __init__(self, output_path: str | None, job: str, root: Path) -> None:
        place = output_path or DEFAULT
        self.url = f"{place.rstrip('/')}/{job}"
        path = local_path(self.url)
        self._folder = None if path is None else path.absolute()
        self.run = (root if self._folder is None else self._folder) / "run"

    def open(self) -> None:
        """Make the folder of the job, if it is one of this host.

        Raises:
            InvalidJobError: It is there, or cannot be made.
        """
        if self._folder is None:
            return
        try:
            self._folder.mkdir(parents=True)
        except FileExistsError as error:
            raise InvalidJobError(f"{self._folder} is there; choose another job_name") from error
        except OSError as error:
            raise InvalidJobError(f"output_path: {error}") from error

    def discard(self) -> None:
        """Remove the folder of the job if nothing is in it."""
        if self._folder is not None:
            with contextlib.suppress(OSError):
                self._folder.rmdir()

    def write(self, archive: Path) -> str:
        """Write an archive whole. Returns its path or URL.

        Raises:
            OSError: It cannot be written.
        """
        place = f"{self.url}/output/{archive.name}"
        upload(archive, place)
        return place

    def write_run(self) -> None:
        """Write the files of ``ebb run``. Those of this host are there already.

        Raises:
            OSError: They cannot be written.
        """
        if self._folder is None and self.run.is_dir():
            upload(self.run, f"{self.url}/run")


def merged(folders: Sequence[Path]) -> dict[str, Path]:
    """Return the files below folders by their names. Of two of one name the first one counts."""
    found: dict[str, Path] = {}
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            if path.is_symlink() or not path.is_dir():
                found.setdefault(str(path.relative_to(folder)), path)
    return found


def pack(files: Mapping[str, Path], archive: Path) -> None:
    """Write files into a ``tar.gz``. Equal files give equal bytes, whoever wrote them and when.

    Raises:
        OSError: A file cannot be read, or the archive cannot be written.
    """
    with (
        archive.open("wb") as raw,
        gzip.GzipFile(filename="", mode="wb", compresslevel=1, fileobj=raw, mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar,
    ):
        for name, path in sorted(files.items()):
            tar.add(path, arcname=name, recursive=False, filter=_plain)
    sync(archive)


def _plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.mtime = 0
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    member.mode = 0o755 if member.mode & 0o100 else 0o644
    return member
