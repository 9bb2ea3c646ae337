"""Data channels: named folders of data that a script finds by ``SM_CHANNEL_NAME``."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ebbflow.errors import InvalidJobError, UnsupportedError
from ebbflow.estimator.stores import download, local_path, upload

__all__ = ["S3Uploader", "TrainingInput", "channels", "local_files", "stage"]

#: The channel of an input without a name.
_UNNAMED = "training"

_NAME = re.compile(r"[A-Za-z0-9._-]+")

#: Arguments of SageMaker's ``TrainingInput``, with the values that are taken and what to do instead
#: of others.
_OPTIONS: dict[str, tuple[tuple[Any, ...], str]] = {
    "distribution": (
        ("FullyReplicated",),
        "every process sees all files, and leases share the records out; remove it",
    ),
    "compression": (("None",), "unpack the files before fit, or read them packed in the script"),
    "record_wrapping": (("None",), "there is no RecordIO; remove it"),
    "s3_data_type": (("S3Prefix",), "name the folder with the files"),
    "attribute_names": ((), "read the attributes in the script"),
    "target_attribute_name": ((), "read the attributes in the script"),
    "shuffle_config": ((), "records are shuffled by the seed of ebbflow.join; remove it"),
    "instance_groups": ((), "all processes are equal; remove it"),
    "hub_access_config": ((), "there is no hub; remove it"),
    "model_access_config": ((), "there is no hub; remove it"),
}


class TrainingInput:
    """Data of one channel.

    Args:
        s3_data: A file or a folder, as a path or a URL. ``file://`` is a path of this host. Other
            URLs, such as ``s3://``, are copied before the training, by ``fsspec``.
        content_type: Media type of the files, which the script finds in
            ``SM_INPUT_DATA_CONFIG``. Nothing else uses it.
        input_mode: ``File``. ``FastFile`` means the same for a path of this host: nothing is copied
            then.
        others: Further arguments of SageMaker, with the values that mean nothing else.

    Raises:
        UnsupportedError: There is an argument or a value that is not kept, with what to do instead.
        TypeError: SageMaker's class has no such argument either.
    """

    def __init__(
        self,
        s3_data: str | os.PathLike[str],
        content_type: str | None = None,
        input_mode: str | None = None,
        **others: Any,
    ) -> None:
        self.url = os.fspath(s3_data)
        self.content_type = content_type
        for name, value in others.items():
            if name not in _OPTIONS:
                raise TypeError(f"TrainingInput() got an unexpected keyword argument {name!r}")
            taken, instead = _OPTIONS[name]
            if value is not None and value not in taken:
                raise UnsupportedError(f"TrainingInput: {name} = {value!r} is not kept: {instead}")
        self.input_mode = "File" if input_mode is None else input_mode
        if self.input_mode == "FastFile" and local_path(self.url) is None:
            raise UnsupportedError(
                "TrainingInput: input_mode = 'FastFile' is not kept for a remote URL: use File, "
                "which copies the files first, or read the URL in the script"
            )
        if self.input_mode not in ("File", "FastFile"):
            raise UnsupportedError(
                f"TrainingInput: input_mode = {self.input_mode!r} is not kept: use File"
            )

    def config(self) -> dict[str, str]:
        """Return what ``SM_INPUT_DATA_CONFIG`` says about the channel."""
        config = {
            "TrainingInputMode": self.input_mode,
            "S3DistributionType": "FullyReplicated",
            "RecordWrapperType": "None",
        }
        if self.content_type is not None:
            config["ContentType"] = self.content_type
        return config


class S3Uploader:
    """Copies data to where channels find them."""

    @staticmethod
    def upload(
        local_path: str | os.PathLike[str],
        desired_s3_uri: str,
        kms_key: str | None = None,
        sagemaker_session: object = None,
    ) -> str:
        """Copy a folder's files, or a file, to a URL or path. Returns that.

        Raises:
            UnsupportedError: ``kms_key`` or ``sagemaker_session`` is given.
            InvalidJobError: There is no such file.
            ModuleNotFoundError: The package for this kind of URL is not installed.
            OSError: A file cannot be read or written.
        """
        if kms_key is not None or sagemaker_session is not None:
            raise UnsupportedError(
                "S3Uploader: `kms_key` and `sagemaker_session` are not kept: let the bucket "
                "encrypt, and set AWS_PROFILE"
            )
        source = Path(local_path)
        if not source.exists():
            raise InvalidJobError(f"{source}: no such file")
        if source.is_file():
            desired = f"{desired_s3_uri.rstrip('/')}/{source.name}"
            upload(source, desired)
            return desired
        upload(source, desired_s3_uri)
        return desired_s3_uri


def channels(
    inputs: str | os.PathLike[str] | TrainingInput | Mapping[str, Any] | None,
) -> dict[str, TrainingInput]:
    """Return the channels of the argument of ``fit``, by name. An input without a name is one.

    Raises:
        InvalidJobError: A name is wrong, or differs from another one in case only.
    """
    if inputs is None:
        return {}
    if not isinstance(inputs, Mapping):
        inputs = {_UNNAMED: inputs}
    found: dict[str, TrainingInput] = {}
    for name, data in inputs.items():
        if _NAME.fullmatch(name) is None or set(name) == {"."}:
            raise InvalidJobError(f"channel {name!r}: expected letters, digits, and . _ -")
        if name.upper() in (other.upper() for other in found):
            raise InvalidJobError(f"channel {name!r}: another one has the same variable")
        found[name] = data if isinstance(data, TrainingInput) else TrainingInput(data)
    return found


def local_files(found: Mapping[str, TrainingInput]) -> list[Path]:
    """Return the files and folders of this host to which :func:`stage` makes links."""
    paths = {local_path(data.url) for data in found.values()}
    return sorted(path.absolute() for path in paths if path is not None)


def stage(found: Mapping[str, TrainingInput], folder: Path) -> None:
    """Make a folder for each channel. Files of this host are linked, others are copied.

    Raises:
        InvalidJobError: A channel has no such file.
        ModuleNotFoundError: The package for a kind of URL is not installed.
        OSError: A file cannot be read or written.
    """
    for name, data in found.items():
        place = folder / name
        path = local_path(data.url)
        if path is None:
            place.mkdir(parents=True)
            download(data.url, place)
            continue
        path = path.absolute()
        if path.is_dir():
            place.parent.mkdir(parents=True, exist_ok=True)
            place.symlink_to(path, target_is_directory=True)
        elif path.is_file():
            place.mkdir(parents=True)
            (place / path.name).symlink_to(path)
        else:
            raise InvalidJobError(f"channel {name!r}: {path}: no such file or folder")
