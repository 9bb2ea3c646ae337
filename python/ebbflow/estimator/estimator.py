"""The estimator: what a training needs, and ``fit``."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ebbflow.errors import Error, InvalidJobError, UnsupportedError
from ebbflow.estimator import quota
from ebbflow.estimator.channels import TrainingInput, channels, local_files, stage
from ebbflow.estimator.job import TrainingJob
from ebbflow.estimator.metrics import Definitions, Metric
from ebbflow.estimator.output import DEFAULT, Output
from ebbflow.estimator.refusals import (
    COMPOSE,
    LOCAL,
    LOCAL_GPU,
    SLURM,
    check_distribution,
    check_type,
    check_versions,
    refuse_options,
)
from ebbflow.estimator.stores import local_path
from ebbflow.estimator.variables import (
    Description,
    Host,
    arguments,
    check_environment,
    check_hyperparameters,
    gpus_of,
)
from ebbflow.launcher import launch

__all__ = ["PyTorch"]

_JOB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")

#: What a folder with source code has beside the source code.
_NO_SOURCE = shutil.ignore_patterns(".git", "__pycache__", ".venv")

#: Values of ``logs`` in ``fit`` that print none.
_NO_LOGS = (False, None, "None")


class PyTorch:
    """A training of a script with ``ebbflow.join``, in the manner of SageMaker's estimator.

    Args:
        entry_point: The script: a path below ``source_dir``, or a file of its own without one.
        source_dir: Folder with the script and its modules. The job trains with a copy of it, which
            is the current folder of the script. ``requirements.txt`` is not installed.
        instance_count: Processes that train, each a host of SageMaker.
        instance_type: ``local``: processes of this host that use no GPU. ``local_gpu``: a process
            for each GPU of this host, with ``instance_count=1``. ``compose``: containers of the
            Docker engine of this host. ``slurm``: jobs of Slurm, for which ``output_path``, the
            data and the Python environment lie where all machines see them.
        image_uri: Image of the containers for ``compose``, with Python, ebbflow, torch, and what
            the script imports.
        framework_version: Version of PyTorch that must be there, such as ``2.4``. An image has its
            own, so it is refused there.
        py_version: Version of Python that must be there, such as ``py3`` or ``py310``. It is not
            taken with an image either.
        hyperparameters: Arguments of the script: ``{"lr": 0.1}`` becomes ``--lr 0.1``.
        distribution: ``{"smdistributed": {"dataparallel": {"enabled": True}}}``, which is what
            always happens, or another name of data parallelism. Model parallelism is refused.
        metric_definitions: Dictionaries with ``Name`` and ``Regex``, whose first group is a number
            in a line of output.
        output_path: Folder or URL for the output of jobs. Default: ``out``.
        environment: Further variables of the script.
        dependencies: Further files and folders, which are copied beside the script.
        max_run: Longest time of a training in seconds. Default: none.
        base_job_name: Beginning of the names of jobs. Default: the name of the script.
        others: Refused: arguments of SageMaker's estimator that mean nothing here. A value that
            switches something off is taken.

    Raises:
        InvalidJobError: An argument is wrong, or names a file that is not there.
        UnsupportedError: There is an argument or a value that is not kept, with what to do instead.
    """

    def __init__(
        self,
        entry_point: str,
        source_dir: str | os.PathLike[str] | None = None,
        *,
        instance_count: int = 1,
        instance_type: str = LOCAL,
        image_uri: str | None = None,
        framework_version: str | None = None,
        py_version: str | None = None,
        hyperparameters: Mapping[str, Any] | None = None,
        distribution: Mapping[str, Any] | None = None,
        metric_definitions: Sequence[Mapping[str, str]] | None = None,
        output_path: str | os.PathLike[str] | None = None,
        environment: Mapping[str, str] | None = None,
        dependencies: Sequence[str | os.PathLike[str]] | None = None,
        max_run: float | None = None,
        base_job_name: str | None = None,
        **others: Any,
    ) -> None:
        refuse_options(others)
        check_type(instance_type, image_uri)
        check_distribution(distribution)
        if image_uri is None:
            check_versions(framework_version, _torch(), py_version, sys.version_info[:2])
        elif framework_version is not None or py_version is not None:
            raise UnsupportedError(
                "estimator: `framework_version` and `py_version` are not kept with `image_uri`: "
                "the image has both; remove them"
            )
        self._source, self.entry_point = _source(entry_point, source_dir)
        self.instance_count = instance_count
        self.instance_type = instance_type
        self.image_uri = image_uri
        self._hyperparameters = dict(hyperparameters or {})
        check_hyperparameters(self._hyperparameters)
        self._definitions = Definitions(metric_definitions)
        self.output_path = None if output_path is None else os.fspath(output_path)
        if instance_type == SLURM and local_path(self.output_path or "") is None:
            raise UnsupportedError(
                f"estimator: output_path = {self.output_path!r} is not kept with slurm: name a "
                "folder that all machines see"
            )
        self._environment = dict(environment or {})
        check_environment(self._environment)
        self._dependencies = [Path(path) for path in dependencies or ()]
        for path in self._dependencies:
            if not path.exists():
                raise InvalidJobError(f"dependencies: {path}: no such file or folder")
        if max_run is not None and not max_run > 0:
            raise InvalidJobError(f"max_run = {max_run}: expected seconds above 0")
        self.max_run = max_run
        self.base_job_name = base_job_name or Path(self.entry_point).stem
        #: The training that ``fit`` started last.
        self.latest_training_job: TrainingJob | None = None

    def fit(
        self,
        inputs: str | os.PathLike[str] | TrainingInput | Mapping[str, Any] | None = None,
        wait: bool = True,
        logs: bool | str | None = "All",
        job_name: str | None = None,
        **others: Any,
    ) -> None:
        """Start a cluster, train on it, end it, and leave the model at the output path.

        Args:
            inputs: Data channels: a :class:`TrainingInput`, a path or a URL by the name of each
                channel. One without a name is the channel ``training``.
            wait: Wait for the end of the job. Ctrl-C ends the job too. Without it
                :attr:`latest_training_job` waits, and a program does not end before its jobs.
            logs: Print the output of the processes while waiting. ``False``, ``None`` or
                ``"None"``: do not.
            job_name: Name of the job. Default: the base of names with the time.
            others: Refused.

        Raises:
            ResourceLimitError: The host, the Docker engine or the operator does not allow so many
                processes.
            InvalidJobError: An argument is wrong, there is an output of a job of this name, or the
                image lacks ebbflow.
            UnsupportedError: No Docker engine answers.
            ScriptError: The script failed, or the cluster. The message ends with its last lines.
            JobFailedError: The job of its ``ebbflow.join`` failed. With ``compose`` and ``slurm``
                the script may have failed before it, too.
            RunTimeoutError: It took longer than ``max_run``.
            OSError: Files cannot be copied, or the output cannot be written.
        """
        for name, value in others.items():
            if name != "experiment_config":
                raise TypeError(f"fit() got an unexpected keyword argument {name!r}")
            if value is not None:
                raise UnsupportedError(
                    "fit: `experiment_config` is not kept: pass callbacks=[ebbflow.trackers.MLflow("
                    "..)] to ebbflow.join"
                )
        found = channels(inputs)
        number = quota.of_type(self.instance_count, self.instance_type)
        job = self._job_name() if job_name is None else job_name
        if _JOB_NAME.fullmatch(job) is None:
            raise InvalidJobError(f"job_name = {job!r}: expected letters, digits, and . _ -")
        root = self._root()
        try:
            training = self._start(job, found, number, root)
        except BaseException:
            shutil.rmtree(root, ignore_errors=True)
            raise
        self.latest_training_job = training
        if not wait:
            return
        try:
            training.wait(logs not in _NO_LOGS)
        except KeyboardInterrupt:
            training.stop()
            raise

    def hyperparameters(self) -> dict[str, Any]:
        """Return the hyper-parameters."""
        return dict(self._hyperparameters)

    def set_hyperparameters(self, **hyperparameters: Any) -> None:
        """Change hyper-parameters for the next ``fit``.

        Raises:
            InvalidJobError: JSON does not have a value.
        """
        check_hyperparameters(hyperparameters)
        self._hyperparameters.update(hyperparameters)

    @property
    def model_data(self) -> str:
        """Path or URL of ``model.tar.gz`` of the last training, which is complete.

        Raises:
            Error: There is none.
        """
        training = self.latest_training_job
        if training is None or training.model_data is None:
            raise Error(f"{self.base_job_name}: no training is complete; call fit")
        return training.model_data

    @property
    def metrics(self) -> list[Metric]:
        """What the ``metric_definitions`` found in the last training."""
        return [] if self.latest_training_job is None else self.latest_training_job.metrics

    def deploy(self, *_: Any, **__: Any) -> None:
        """Refuse to serve the model.

        Raises:
            UnsupportedError: Always.
        """
        raise UnsupportedError(
            "estimator: `deploy` is not kept: load model.tar.gz in a server of your own; `ebb "
            "predict` computes outputs for files"
        )

    def _job_name(self) -> str:
        now = datetime.datetime.now(datetime.timezone.utc)
        return f"{self.base_job_name}-{now:%Y-%m-%d-%H-%M-%S}-{now.microsecond // 1000:03}"

    def _root(self) -> Path:
        """Make the folder of a job, which all its processes see."""
        place = None
        if self.instance_type == SLURM:
            place = local_path(self.output_path or DEFAULT)
            assert place is not None
            place.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=".ebbflow-job-", dir=place)).resolve()

    def _start(
        self, job: str, found: Mapping[str, TrainingInput], number: int, root: Path
    ) -> TrainingJob:
        """Make the folders of a job, and start it."""
        hosts = [Host(root, index) for index in range(number)]
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        is_here = self.instance_type in (LOCAL, LOCAL_GPU)
        description = Description(
            job=job,
            entry_point=self.entry_point,
            instance_type=self.instance_type,
            hosts=hosts,
            cpus=max(1, (quota.cpus(self.instance_type) or number) // number),
            gpus=gpus_of(number, visible) if self.instance_type == LOCAL_GPU else [],
            channels={name: data.config() for name, data in found.items()},
            hyperparameters=self._hyperparameters,
            network="lo" if is_here else "eth0",
        )
        stage(found, root / "data")
        self._copy_source(root / "code")
        for host in hosts:
            self._describe(description, host)
        # Alone in its folder, which travels to other machines. They see the rest in `root`.
        entry = root / "entry" / Path(self.entry_point).name
        entry.parent.mkdir()
        shutil.copyfile(Path(__file__).with_name("_entry.py"), entry)
        output = Output(self.output_path, job, root)
        output.open()
        where: dict[str, Any] = {} if is_here else {"on": self.instance_type}
        if self.instance_type == COMPOSE:
            data = [f"{path}:ro" for path in local_files(found)]
            where |= {"image": self.image_uri, "cpus": description.cpus, "mounts": [root, *data]}
        try:
            return TrainingJob(
                job,
                lambda line: launch(
                    entry, [root], workers=number, out=output.run, on_line=line, **where
                ),
                root,
                hosts,
                output,
                self._definitions,
                self.max_run,
            )
        except BaseException:
            output.discard()
            raise

    def _copy_source(self, code: Path) -> None:
        if self._source.is_dir():
            shutil.copytree(self._source, code, symlinks=True, ignore=_NO_SOURCE)
        else:
            code.mkdir()
            shutil.copyfile(self._source, code / self.entry_point)
        for path in self._dependencies:
            target = code / path.resolve().name
            if path.is_dir():
                shutil.copytree(path, target, dirs_exist_ok=True, ignore=_NO_SOURCE)
            else:
                shutil.copyfile(path, target)

    def _describe(self, description: Description, host: Host) -> None:
        """Make the folders of one host, and the file by which its process becomes the script."""
        inputs = host.folder / "input"
        for folder in (inputs / "config", host.model, host.output):
            folder.mkdir(parents=True)
        (host.folder / "output" / "intermediate").mkdir()
        (inputs / "data").symlink_to(host.root / "data", target_is_directory=True)
        for name, content in description.config_files(host).items():
            (inputs / "config" / name).write_text(json.dumps(content), encoding="utf-8")
        own = {**self._environment, **description.environment(host)}
        script = [self.entry_point, *arguments(self._hyperparameters)]
        plan = {"arguments": script, "environment": own}
        place = host.root / f"worker-{host.index}.json"
        place.write_text(json.dumps(plan), encoding="utf-8")


def _source(entry_point: str, source_dir: str | os.PathLike[str] | None) -> tuple[Path, str]:
    """Return the folder with the source, or the one file of it, and the script's path in it.

    Raises:
        InvalidJobError: There is no such script.
        UnsupportedError: The source is remote, or the script is not one of Python.
    """
    if source_dir is not None and "://" in os.fspath(source_dir):
        raise UnsupportedError(
            f"estimator: source_dir = {os.fspath(source_dir)!r}: copy the source to a folder here"
        )
    if not entry_point.endswith(".py"):
        raise UnsupportedError(
            f"estimator: entry_point = {entry_point!r}: only scripts of Python, whose names end in "
            ".py"
        )
    if source_dir is None:
        source, name = Path(entry_point).absolute(), Path(entry_point).name
        script = source
    else:
        source, name = Path(source_dir).absolute(), Path(entry_point).as_posix()
        script = source / name
        if not script.resolve().is_relative_to(source.resolve()):
            raise InvalidJobError(f"entry_point = {entry_point!r}: not below {source}")
    if not script.is_file():
        raise InvalidJobError(f"entry_point: {script}: no such file")
    return source, name


def _torch() -> str | None:
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None
