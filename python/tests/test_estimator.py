"""The pure parts of `ebbflow.estimator`. Ids are those of ``docs/behaviours.md``."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest
from ebbflow import errors
from ebbflow.estimator import PyTorch, S3Uploader, TrainingInput
from ebbflow.estimator.channels import channels, stage
from ebbflow.estimator.metrics import Definitions
from ebbflow.estimator.output import merged, pack
from ebbflow.estimator.quota import processes
from ebbflow.estimator.refusals import check_versions
from ebbflow.estimator.stores import download, local_path, upload
from ebbflow.estimator.variables import Description, Host, arguments, gpus_of

from .conftest import needs

ENTRY = Path(sys.modules[PyTorch.__module__].__file__ or "").with_name("_entry.py")


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text("")
    return str(path)


def description(root: Path, **changes: Any) -> Description:
    settings: dict[str, Any] = {
        "job": "mine-1",
        "entry_point": "train.py",
        "instance_type": "local",
        "hosts": [Host(root, index) for index in range(2)],
        "cpus": 3,
        "gpus": [],
        "channels": {"train": TrainingInput("x", content_type="image/png").config(), "val": {}},
        "hyperparameters": {"epochs": 10, "lr": 3e-5, "name": "a b", "n": True},
    }
    return Description(**{**settings, **changes})


# S2-02
def test_hyperparameters_reach_a_script_as_arguments_and_variables(tmp_path: Path) -> None:
    given = {
        "batch_size": 32,
        "lr": 3e-5,
        "k": "v",
        "big": True,
        "none": None,
        "of": {"b": 2, "a": 1},
    }
    line = arguments(given)
    expected = "--batch_size 32 --big True -k v --lr 3e-05 --none  --of a=1,b=2"
    assert line == expected.split(" ")
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch_size", type=int)
    parser.add_argument("--lr", type=float)
    found = parser.parse_known_args(line)[0]
    assert (found.batch_size, found.lr) == (32, 3e-5)
    job = description(tmp_path)
    variables = job.environment(job.hosts[0])
    assert json.loads(variables["SM_HPS"]) == job.hyperparameters
    assert json.loads(variables["SM_USER_ARGS"]) == arguments(job.hyperparameters)
    assert (variables["SM_HP_EPOCHS"], variables["SM_HP_NAME"]) == ("10", "a b")
    assert (variables["SM_HP_LR"], variables["SM_HP_N"]) == ("3e-05", "true")


# S2-05
def test_a_host_has_variables_for_its_channels_and_its_folders(tmp_path: Path) -> None:
    job = description(tmp_path)
    first, second = (job.environment(host) for host in job.hosts)
    assert first["SM_CHANNEL_TRAIN"] == str(tmp_path / "algo-1/input/data/train")
    assert second["SM_CHANNEL_VAL"] == str(tmp_path / "algo-2/input/data/val")
    assert json.loads(first["SM_CHANNELS"]) == ["train", "val"]
    config = json.loads(first["SM_INPUT_DATA_CONFIG"])
    assert config["train"]["ContentType"] == "image/png"
    assert config["train"]["TrainingInputMode"] == "File"
    assert first["SM_MODEL_DIR"] == str(tmp_path / "algo-1/model")
    assert second["SM_OUTPUT_DATA_DIR"] == str(tmp_path / "algo-2/output/data")
    assert json.loads(second["SM_HOSTS"]) == ["algo-1", "algo-2"]
    assert [of["SM_CURRENT_HOST"] for of in (first, second)] == ["algo-1", "algo-2"]
    assert json.loads(second["SM_RESOURCE_CONFIG"])["current_host"] == "algo-2"
    assert (first["SM_NUM_CPUS"], first["SM_NUM_GPUS"]) == ("3", "0")
    assert (first["SM_USER_ENTRY_POINT"], first["SM_MODULE_NAME"]) == ("train.py", "train")
    assert json.loads(first["SM_TRAINING_ENV"])["hps"] == job.hyperparameters
    assert first["TRAINING_JOB_NAME"] == "mine-1"
    assert first["CUDA_VISIBLE_DEVICES"] == "", "without a GPU a process sees none"
    assert set(job.config_files(job.hosts[0])) == {
        "hyperparameters.json",
        "inputdataconfig.json",
        "resourceconfig.json",
    }


# S2-11
def test_a_process_sees_its_own_gpu_of_those_that_are_visible(tmp_path: Path) -> None:
    assert gpus_of(2, None) == ["0", "1"] == gpus_of(2, "")
    assert gpus_of(2, "3, 5,7") == ["3", "5"]
    job = description(tmp_path, gpus=["3", "5"])
    found = [job.environment(host) for host in job.hosts]
    assert [of["CUDA_VISIBLE_DEVICES"] for of in found] == ["3", "5"]
    assert {of["SM_NUM_GPUS"] for of in found} == {"1"}


# S2-20
def test_a_process_of_the_launcher_becomes_the_script_of_its_host(tmp_path: Path) -> None:
    code = tmp_path / "code"
    code.mkdir()
    (code / "train.py").write_text(
        "import os, sys; print(sys.argv, os.environ['SM_CURRENT_HOST'], os.getcwd(), sys.path[:2])"
    )
    for worker, host in [("worker-0", "algo-1"), ("worker-1", "algo-2")]:
        plan = {"arguments": ["train.py", "--lr", "0.1"], "environment": {"SM_CURRENT_HOST": host}}
        (tmp_path / f"{worker}.json").write_text(json.dumps(plan))
    # The second name is that of a process at an agent.
    for worker in ("worker-1", "my-train-7-1"):
        said = subprocess.run(
            [sys.executable, ENTRY, tmp_path],
            env={**os.environ, "EBBFLOW_WORKER": worker},
            capture_output=True,
            text=True,
            check=True,
        )
        places = f"{code} {[str(code), str(code)]}"
        assert said.stdout == f"['train.py', '--lr', '0.1'] algo-2 {places}\n"


# S2-04
def test_metrics_are_the_first_groups_of_expressions_in_lines_of_processes() -> None:
    definitions = Definitions(
        [
            {"Name": "train:loss", "Regex": r"loss: ([0-9.e+-]+|nan)"},
            {"Name": "accuracy", "Regex": r"accuracy=(\S+)"},
        ]
    )
    now = time.time()
    found = definitions.find("worker-3 | epoch 1 loss: 2.5e-1 accuracy=0.75 loss: 7", now)
    assert found == [(now, "train:loss", 0.25, "worker-3"), (now, "accuracy", 0.75, "worker-3")]
    assert [metric.value for metric in definitions.find("worker-0 | accuracy=3", now)] == [3.0]
    assert definitions.find("worker-0 | accuracy=high", now) == []
    assert definitions.find("my-train-2-1 | accuracy=3", now) == [
        (now, "accuracy", 3.0, "worker-1")
    ], "a process at an agent"
    assert definitions.find("step 3 of 10, loss: 0.5", now) == [], "a line of the launcher"
    assert definitions.find("worker-0 | nothing", now) == []
    assert Definitions(None).find("worker-0 | loss: 1", now) == []


# S2-04
@pytest.mark.parametrize(
    ("definition", "expected"),
    [
        ({"Name": "a", "Regex": "loss"}, "has no group"),
        ({"Name": "a", "Regex": "(loss"}, "Regex = '\\(loss': "),
        ({"Name": "a", "Regex": 3}, "Regex = 3: "),
        ({"Name": "a"}, "expected Name and Regex"),
        ("loss", "expected Name and Regex"),
    ],
)
def test_a_wrong_definition_is_named(definition: Any, expected: str) -> None:
    with pytest.raises(errors.InvalidJobError, match=rf"metric_definitions\[0\].*{expected}"):
        Definitions([definition])


# S2-04
def test_a_name_has_one_expression() -> None:
    with pytest.raises(errors.InvalidJobError, match="another metric 'a'"):
        Definitions([{"Name": "a", "Regex": "(1)"}, {"Name": "a", "Regex": "(2)"}])


# S2-10
def test_a_host_and_its_operator_limit_a_cluster() -> None:
    assert processes(2, "local", gpus=0, cpus=2, limit=None) == 2
    assert processes(4, "local", gpus=0, cpus=2, limit="4") == 4
    assert processes(1, "local_gpu", gpus=8, cpus=16, limit=None) == 8
    assert processes(256, "slurm", gpus=0, cpus=None, limit=None) == 256
    refused: list[tuple[int, str, int, int | None, str | None, str]] = [
        (3, "local", 0, 2, None, "3 processes, where 2 may be: the host has 2 processors"),
        (2, "local", 0, 8, "1", "2 processes, where 1 may be: EBBFLOW_WORKERS_MAX = 1"),
        (300, "local", 0, 999, None, "300 processes, where 256 may be"),
        (300, "local", 0, 2, "999", "300 processes, where 256 may be"),
        (1, "local_gpu", 0, 8, None, "no GPU that torch sees; use local"),
        (2, "local_gpu", 8, 64, None, "1 instance with 8 GPUs; use instance_count = 1"),
        (1, "local_gpu", 8, 4, None, "8 processes, where 4 may be"),
        (3, "compose", 0, 2, None, "where 2 may be: the Docker engine has 2 processors"),
        (2, "slurm", 0, None, "1", "where 1 may be: EBBFLOW_WORKERS_MAX = 1"),
        (257, "slurm", 0, None, None, "where 256 may be: there are at most 256"),
    ]
    for count, kind, gpus, cpus, limit, expected in refused:
        with pytest.raises(errors.ResourceLimitError, match=expected) as caught:
            processes(count, kind, gpus=gpus, cpus=cpus, limit=limit)
        assert f"instance_count = {count} of {kind}" in str(caught.value)
        assert isinstance(caught.value, errors.LimitError)
    with pytest.raises(errors.InvalidJobError, match="instance_count = 0"):
        processes(0, "local", gpus=0, cpus=2, limit=None)
    with pytest.raises(errors.InvalidJobError, match="EBBFLOW_WORKERS_MAX = 'many'"):
        processes(1, "local", gpus=0, cpus=2, limit="many")


# S2-13, S2-30, S2-31, S2-32, S2-33, S2-34, S2-35, S2-36, S2-37, S2-39
def test_a_strategy_other_than_data_parallelism_is_refused_by_name(
    script: str,
) -> None:
    smp = {"enabled": True, "parameters": {"partitions": 1, "pipeline": "interleaved"}}
    mpi = {"enabled": True, "processes_per_host": 8}
    refused: list[tuple[dict[str, Any], str]] = [
        ({"smdistributed": {"modelparallel": smp}, "mpi": mpi}, r"\['modelparallel'\]"),
        (
            {"smdistributed": {"dataparallel": {"enabled": True}, "modelparallel": smp}},
            "the ps share",
        ),
        ({"smdistributed": {"other": {}}}, r"\['other'\]"),
        ({"mpi": mpi}, "by MPI; instance_count"),
        ({"horovod": {"enabled": True}}, r"distribution\['horovod'\]"),
    ]
    for distribution, expected in refused:
        with pytest.raises(errors.UnsupportedError, match=expected):
            PyTorch(script, distribution=distribution)
    wrong: list[Any] = [{"smdistributed": True}, {"mpi": 8}]
    for given in wrong:
        with pytest.raises(errors.InvalidJobError, match="expected a dictionary"):
            PyTorch(script, distribution=given)


# S2-21
def test_names_of_data_parallelism_are_taken(script: str) -> None:
    taken: list[Any] = [
        None,
        {},
        {"smdistributed": {"dataparallel": {"enabled": True}}},
        {"smdistributed": {"modelparallel": {"enabled": False}}, "mpi": {"enabled": False}},
        {"pytorchddp": {"enabled": True}},
        {"torch_distributed": {"enabled": True}},
    ]
    for distribution in taken:
        PyTorch(script, distribution=distribution)


# S2-03, S2-06
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"role": "arn"}, "`role` is not kept: .*remove it"),
        ({"sagemaker_session": object()}, "`sagemaker_session`"),
        ({"debugger_hook_config": True}, "`debugger_hook_config`.*pass False"),
        ({"use_spot_instances": True}, "`use_spot_instances`.*started again"),
        ({"max_wait": 3600}, "`max_wait`.*max_run"),
        ({"checkpoint_s3_uri": "s3://b/c"}, "`checkpoint_s3_uri`.*checkpoints=URL"),
        ({"checkpoint_local_path": "/c"}, "`checkpoint_local_path`.*checkpoints=FOLDER"),
        ({"image_uri": "x"}, "`image_uri` is not kept with local: .*use compose"),
        ({"image_uri": "x", "instance_type": "slurm"}, "`image_uri` is not kept with slurm"),
        (
            {"image_uri": "x", "instance_type": "compose", "py_version": "py3"},
            "`py_version` are not kept with `image_uri`",
        ),
        ({"instance_type": "slurm", "output_path": "s3://b/c"}, "output_path = 's3://b/c'"),
        ({"input_mode": "Pipe"}, "`input_mode`.*TrainingInput"),
        ({"instance_type": "ml.p3.16xlarge"}, "'ml.p3.16xlarge': no machines are rented.*local"),
        ({"instance_type": "kubernetes"}, "'kubernetes': .*--on kubernetes"),
        ({"instance_type": "vm"}, "there are local, local_gpu, compose, slurm"),
        ({"framework_version": "0.4"}, "framework_version = '0.4'"),
        ({"py_version": "py2"}, "py_version = 'py2'"),
    ],
)
def test_what_is_not_kept_is_refused_with_what_to_do(
    script: str, options: dict[str, Any], expected: str
) -> None:
    with pytest.raises(errors.UnsupportedError, match=expected):
        PyTorch(script, **options)


# S2-03
def test_containers_without_an_image_are_refused_with_what_to_do(script: str) -> None:
    with pytest.raises(errors.InvalidJobError, match=r"`image_uri` is missing.*pip install"):
        PyTorch(script, instance_type="compose")


# S2-03
def test_values_that_switch_something_off_are_taken(script: str) -> None:
    PyTorch(
        script,
        role=None,
        debugger_hook_config=False,
        disable_profiler=True,
        use_spot_instances=False,
        input_mode="File",
        py_version="py3",
    )
    with pytest.raises(TypeError, match="unexpected keyword argument 'instnace_count'"):
        PyTorch(script, instnace_count=2)


# S2-02
def test_versions_are_those_of_the_interpreter() -> None:
    for framework, py in [("2.4", "py3"), ("2.4.1", "py311"), (None, None), ("2", "py3")]:
        check_versions(framework, "2.4.1+cpu", py, (3, 11))
    for framework, found, py, expected in [
        ("1.8.0", "2.4.1+cpu", None, r"'1.8.0': the script runs with PyTorch 2.4.1\+cpu"),
        ("2.40", "2.4.1", None, "'2.40'"),
        ("2.4", None, None, "PyTorch is not installed"),
        (None, None, "py310", r"'py310': the script runs with Python 3\.11"),
    ]:
        with pytest.raises(errors.UnsupportedError, match=expected):
            check_versions(framework, found, py, (3, 11))
    with pytest.raises(errors.InvalidJobError, match="expected py3"):
        check_versions(None, None, "3.10", (3, 11))


# S2-02
def test_wrong_arguments_are_named_when_the_estimator_is_made(tmp_path: Path, script: str) -> None:
    outside = tmp_path / "source"
    outside.mkdir()
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"entry_point": str(tmp_path / "no.py")}, "no.py: no such file"),
        ({"entry_point": "no.py", "source_dir": str(tmp_path)}, "no.py: no such file"),
        ({"entry_point": "../train.py", "source_dir": str(outside)}, "not below"),
        ({"hyperparameters": {"x": object()}}, r"hyperparameters\['x'\]"),
        ({"hyperparameters": {"": 1}}, "hyperparameters: '' is no name"),
        ({"environment": {"EBBFLOW_MASTER": "x"}}, "EBBFLOW_MASTER belongs to the job"),
        ({"environment": {"SM_HOSTS": "x"}}, "SM_HOSTS belongs to the job"),
        ({"environment": {"A": 1}}, r"environment\['A'\] = 1: expected a text"),
        ({"environment": {"A=B": "1"}}, "'A=B' is no name"),
        ({"dependencies": ["no"]}, "dependencies: no: no such"),
        ({"max_run": 0}, "max_run = 0"),
    ]
    for given, expected in wrong:
        with pytest.raises(errors.InvalidJobError, match=expected):
            PyTorch(**{"entry_point": script, **given})
    refused: list[dict[str, Any]] = [{"entry_point": "run.sh"}, {"source_dir": "s3://b/s.tar.gz"}]
    for given in refused:
        with pytest.raises(errors.UnsupportedError):
            PyTorch(**{"entry_point": script, **given})


# S2-05
def test_channels_have_names_and_links_to_the_data(tmp_path: Path) -> None:
    folder, file = tmp_path / "of it", tmp_path / "a.csv"
    folder.mkdir()
    (folder / "x").write_text("x")
    file.write_text("a")
    found = channels({"train": TrainingInput(folder.as_uri()), "val": str(file), "own": file})
    stage(found, tmp_path / "data")
    assert (tmp_path / "data/train/x").read_text() == "x"
    assert (
        (tmp_path / "data/val/a.csv").read_text()
        == "a"
        == (tmp_path / "data/own/a.csv").read_text()
    )
    assert list(channels(str(file))) == ["training"] == list(channels(TrainingInput(file)))
    assert channels(None) == {}
    for inputs, expected in [
        ({"a/b": "x"}, "channel 'a/b'"),
        ({"..": "x"}, "channel '..'"),
        ({"": "x"}, "channel ''"),
        ({"a": "x", "A": "y"}, "channel 'A'"),
    ]:
        with pytest.raises(errors.InvalidJobError, match=expected):
            channels(inputs)
    with pytest.raises(errors.InvalidJobError, match=r"channel 'train': .*no such file"):
        stage(channels({"train": tmp_path / "no"}), tmp_path / "other")


# S2-05
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"input_mode": "Pipe"}, "'Pipe' is not kept: use File"),
        ({"s3_data": "s3://b/k", "input_mode": "FastFile"}, "'FastFile' is not kept.*use File"),
        ({"distribution": "ShardedByS3Key"}, "leases share the records out"),
        ({"compression": "Gzip"}, "unpack"),
        ({"s3_data_type": "ManifestFile"}, "name the folder"),
        ({"shuffle_config": object()}, "ebbflow.join"),
    ],
)
def test_an_input_that_is_not_kept_is_refused_by_name(
    options: dict[str, Any], expected: str
) -> None:
    with pytest.raises(errors.UnsupportedError, match=expected):
        TrainingInput(**{"s3_data": "/data", **options})
    TrainingInput("/data", "image/png", "FastFile", distribution="FullyReplicated")
    with pytest.raises(TypeError, match="'contents'"):
        TrainingInput("/data", contents="x")


# S2-06
def test_files_are_uploaded_to_and_copied_from_a_store(tmp_path: Path) -> None:
    fsspec = needs("fsspec")
    source = tmp_path / "source"
    (source / "below").mkdir(parents=True)
    (source / "a").write_text("1")
    (source / "below/b").write_text("2")
    store = f"memory://bucket-{tmp_path.name}/data"
    assert S3Uploader.upload(source, store) == store
    download(store, tmp_path / "back")
    assert (tmp_path / "back/a").read_text() == "1"
    assert (tmp_path / "back/below/b").read_text() == "2"
    one = S3Uploader.upload(source / "a", store + "/one")
    assert one == f"{store}/one/a"
    stage(channels({"train": one}), tmp_path / "staged")
    assert (tmp_path / "staged/train/a").read_text() == "1"
    with pytest.raises(errors.InvalidJobError, match="no such file"):
        download(store + "/no", tmp_path / "no")
    with pytest.raises(errors.InvalidJobError, match="no such file"):
        S3Uploader.upload(tmp_path / "no", store)
    with pytest.raises(errors.UnsupportedError, match="AWS_PROFILE"):
        S3Uploader.upload(source, store, sagemaker_session=object())
    with pytest.raises(errors.InvalidJobError, match="nonsense"):
        download("nonsense://x", tmp_path / "no")
    assert fsspec.filesystem("memory").exists(f"/bucket-{tmp_path.name}/data/below/b")


# S2-01
def test_a_place_is_a_path_a_file_url_or_remote(tmp_path: Path) -> None:
    assert local_path("a/b") == Path("a/b")
    assert local_path("file:///a%20b/c") == Path("/a b/c")
    assert local_path("file://localhost/a") == Path("/a")
    assert local_path("s3://a/b") is None
    with pytest.raises(errors.InvalidJobError, match="another host"):
        local_path("file://elsewhere/a")
    (tmp_path / "x").write_text("x")
    upload(tmp_path / "x", (tmp_path / "of it/y").as_uri())
    assert (tmp_path / "of it/y").read_text() == "x"
    assert [path.name for path in (tmp_path / "of it").iterdir()] == ["y"], "no part is left"


# S2-09
def test_a_model_is_packed_with_the_same_bytes_wherever_it_was_written(
    tmp_path: Path,
) -> None:
    hashes: list[str] = []
    for name in ("one", "two"):
        hosts = [tmp_path / name / host for host in ("algo-1", "algo-2")]
        for host in hosts:
            (host / "code").mkdir(parents=True)
            (host / "code/inference.py").write_text(f"# {host.name}")
        (hosts[1] / "model.pth").write_bytes(b"weights")
        os.utime(hosts[1] / "model.pth", (len(name), len(hashes) * 1000))
        archive = tmp_path / f"{name}.tar.gz"
        pack(merged(hosts), archive)
        hashes.append(hashlib.sha256(archive.read_bytes()).hexdigest())
        with tarfile.open(archive) as tar:
            assert tar.getnames() == ["code/inference.py", "model.pth"]
            kept = tar.extractfile("code/inference.py")
            assert kept is not None and kept.read() == b"# algo-1", "the first host counts"
    assert hashes[0] == hashes[1]


def test_an_estimator_without_a_training_has_no_model_and_no_endpoint(script: str) -> None:
    estimator = PyTorch(script, hyperparameters={"a": 1})
    estimator.set_hyperparameters(b=2)
    assert estimator.hyperparameters() == {"a": 1, "b": 2}
    assert estimator.metrics == []
    with pytest.raises(errors.Error, match="call fit"):
        _ = estimator.model_data
    with pytest.raises(errors.UnsupportedError, match="ebb predict"):
        estimator.deploy(initial_instance_count=1)
    with pytest.raises(errors.UnsupportedError, match="MLflow"):
        estimator.fit(experiment_config={"ExperimentName": "x"})
    with pytest.raises(errors.InvalidJobError, match="job_name"):
        estimator.fit(job_name="a/b")
