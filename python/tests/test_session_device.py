"""A loop whose weights and gradients cross in memory of a CUDA device, by the driver of the tests.

PyTorch for CUDA does not run on that driver: ``on_driver.py`` has what takes its place.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from .conftest import Place, Process, Script, needs

torch = needs("torch")

import ebbflow  # noqa: E402
from ebbflow.tensors import Tensors  # noqa: E402

ROOT = Path(__file__).parents[2]

#: A model with float parameters, float state and an integer counter. Its loop says in `more` what
#: it does with each batch.
LOOP = """
import sys
import torch, ebbflow
from torch import nn

name, mode = sys.argv[1:3]
generator = torch.Generator().manual_seed(3)
x = torch.randn(96, 6, generator=generator)
y = (x.sum(1) > 0).long()
torch.manual_seed(7)
# Values of a few bytes never cross in memory of others.
large = nn.Sequential(nn.Dropout(0.2), nn.Linear(64, 64))
model = nn.Sequential(nn.Linear(6, 64), nn.BatchNorm1d(64), large, nn.Linear(64, 2))
model.register_parameter("unused", nn.Parameter(torch.ones(3)))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
source = torch.utils.data.TensorDataset(x, y)
loss = nn.CrossEntropyLoss()

def measure(batch):
    outputs = model(batch.x)
    right = (outputs.argmax(1) == batch.y).float().mean()
    return {"loss": loss(outputs, batch.y), "accuracy": right}

def more(job):
    pass

#MORE
with ebbflow.join(
    model, optimizer, source, source, micro=8, effective=24, epochs=3, seed=5, name=name, mode=mode
) as job:
    for epoch in job.epochs():
        for batch in epoch:
            more(job)
            job.step(loss(model(batch.x), batch.y))
        job.evaluate(measure)
"""

#: The same loop in memory of the device.
ON_DEVICE = f"import on_driver\non_driver.install()\n{LOOP}\nassert on_driver.lent\n"


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Build driver and NVML. Give the variables with which a process finds them, and NVRTC."""
    nvrtc = os.environ.get("EBB_NVRTC")
    if not nvrtc:
        assert os.environ.get("EBB_REQUIRE_ALL") != "1", "no EBB_NVRTC"
        pytest.skip("no NVRTC: no loop used a device")
    folder = tmp_path_factory.mktemp("libraries")
    kernels = ROOT / "kernels/src/cuda"
    names = re.findall(r'include_str!\("cuda/(.+)"\)', kernels.with_suffix(".rs").read_text())
    text = "".join((kernels / name).read_text() for name in names)
    (folder / "kernels.cu").write_text(text)
    options = "-std=c++17 -O2 -ffp-contract=off -fno-math-errno -fPIC -shared -fvisibility=hidden"
    for source, library in [("driver.cpp", "libcuda.so"), ("nvml.cpp", "libnvidia-ml.so.1")]:
        compiler = ["c++", *options.split(), f"-I{folder}", f"-Wl,-soname,{library}"]
        places = ["-o", str(folder / library), str(ROOT / "kernels/tests/cuda" / source)]
        subprocess.run([*compiler, *places], check=True)
    # As pip installs it.
    installed = folder / "packages/nvidia/cu13/lib"
    installed.mkdir(parents=True)
    for file in Path(nvrtc).glob("libnvrtc*.so.*"):
        (installed / file.name).symlink_to(file)
    return {
        "LD_LIBRARY_PATH": str(folder),
        "PYTHONPATH": str(folder / "packages"),
        "EBB_TEST_NVML": str(folder / "values"),
    }


def script(folder: Path, text: str, more: str = "") -> Path:
    path = folder / "script.py"
    path.write_text(text.replace("#MORE", more))
    return path


def trained(path: Path, mode: str = "sync", **variables: str) -> dict[str, Any]:
    """Return what a process finds that trains alone."""
    return Script(None, path, "alone", mode, keys=variables).result()


@contextlib.contextmanager
def cluster(folder: Path, libraries: dict[str, str], device: str) -> Iterator[tuple[Place, str]]:
    """Start a master and a ps on a device. Gives the cluster, and the URL of the ps's metrics."""
    nvrtc = f"{libraries['LD_LIBRARY_PATH']}:{os.environ['EBB_NVRTC']}"
    environment = {**os.environ, **libraries, "LD_LIBRARY_PATH": nvrtc}
    environment["EBB_METRICS"] = "127.0.0.1:0"
    with contextlib.ExitStack() as left:

        def start(name: str, *arguments: str) -> Process:
            process = Process(folder, name, name, *arguments, env=environment)
            left.callback(process.stop)
            return process

        data = str(folder / "data")
        url = start("master", "--listen", "127.0.0.1:0", "--data-dir", data).url()
        ps = start("ps", "--master", url, "--listen", "127.0.0.1:0", "--device", device)
        metrics = ps.url("metrics at ")
        ps.url()
        whole: Any = SimpleNamespace(url=url)
        yield left.enter_context(Place(whole)), metrics


def joins(
    place: Place, path: Path, name: str, mode: str, gate: str = "none", **variables: str
) -> Script:
    """Start a process that trains the job of this name."""
    process = Script(place.cluster.url, path, name, mode, gate=gate, keys=variables)
    place.scripts.append(process)
    return process


def carried(metrics: str) -> list[bool]:
    """Return whether a ps was pushed values, and was asked for some, in memory of the device."""
    with urllib.request.urlopen(metrics) as answer:
        text = answer.read().decode()
    names = [f"ebb_ps_{call}_device_bytes_total" for call in ("push", "pull")]
    return [float(re.findall(rf"^{name} (\S+)$", text, re.MULTILINE)[0]) > 0 for name in names]


def widened(text: str) -> str:
    """Return a script with a layer whose gradient is pushed during the backward pass."""
    wide = text.replace("nn.Linear(64, 64)", "nn.Linear(64, 4200), nn.Linear(4200, 64)")
    assert wide != text
    return f"{wide}\nassert job._tensors._early.has_told\n"


@pytest.mark.parametrize(
    ("mode", "seed", "is_wide"),
    [("sync", "1", False), ("pipelined", "2", False), ("sync", "3", True)],
)
def test_a_loop_on_a_device_has_the_bits_of_one_on_the_host_alone_and_wherever_the_ps_is(
    mode: str, seed: str, is_wide: bool, libraries: dict[str, str], tmp_path: Path
) -> None:
    shaped = widened if is_wide else str
    expected = trained(script(tmp_path, shaped(LOOP)), mode)
    assert expected["sha"] == expected["held"]
    path = script(tmp_path, shaped(ON_DEVICE))
    # Streams of the driver run in another order.
    variables = {**libraries, "EBB_TEST_SEED": seed}
    found = trained(path, mode, **variables)
    assert (found["sha"], found["held"]) == (expected["sha"],) * 2
    assert found["metrics"] == expected["metrics"]
    for device, crosses in [("cuda:0", True), ("cpu", False)]:
        folder = tmp_path / device
        folder.mkdir()
        with cluster(folder, variables, device) as (place, metrics):
            found = joins(place, path, "job", mode, **variables).result()
            assert found["sha"] == expected["sha"], device
            assert carried(metrics) == [crosses, crosses], device


def test_processes_on_a_device_and_on_the_host_train_one_model(
    libraries: dict[str, str], tmp_path: Path
) -> None:
    host = script(tmp_path, LOOP)
    expected = trained(host)["sha"]
    folder = tmp_path / "device"
    folder.mkdir()
    path = script(folder, ON_DEVICE)
    with cluster(tmp_path, libraries, "cuda:0") as (place, _):
        processes = [joins(place, host, "both", "sync", "join")]
        processes += [joins(place, path, "both", "sync", "join", **libraries) for _ in range(2)]
        for process in processes:
            process.arrive()
        place.wait_for_workers("both", 3)
        for process in processes:
            process.go()
        assert {process.result()["sha"] for process in processes} == {expected}


def test_without_a_driver_values_go_through_the_host_and_that_is_said_once(
    libraries: dict[str, str], tmp_path: Path
) -> None:
    expected = trained(script(tmp_path, LOOP))["sha"]
    path = script(tmp_path, ON_DEVICE.replace("assert on_driver.lent", "assert not on_driver.lent"))
    for variables in ({}, {**libraries, "EBB_TEST_DEVICES": "0"}):
        process = Script(None, path, "alone", "sync", keys=variables)
        with process._waiting():
            out, said = process.child.communicate()
        assert f'"sha": "{expected}"' in out, said
        assert said.count("go to and from the loop through memory of the host; reason: ") == 1, said
        assert "no CUDA d" in said


#: Counts what the driver uploaded. The model crosses once if its ps is on the device, and once for
#: each version otherwise.
UPLOADS = """
import ctypes
driver = ctypes.CDLL("libcuda.so")
driver.fake_called.restype = ctypes.c_long
versions = driver.fake_called(3) / sum(4 * values.numel() for values in model.parameters())
assert (versions < 3) if ON_DEVICE else (versions > 10), versions
"""


def with_ps(arguments: str) -> str:
    """Return the loop on the device, with these arguments of ``join``."""
    text = ON_DEVICE.replace("mode=mode\n)", f"mode=mode{arguments}\n)")
    assert not arguments or text != ON_DEVICE
    return text


def test_the_ps_of_a_process_alone_keeps_the_model_on_its_device(
    libraries: dict[str, str], tmp_path: Path
) -> None:
    expected = trained(script(tmp_path, LOOP))
    for arguments in ("", ', ps_device="cuda"', ', ps_device="cuda", ps_bytes_max=1 << 20'):
        uploads = UPLOADS.replace("ON_DEVICE", str(bool(arguments)))
        found = trained(script(tmp_path, with_ps(arguments) + uploads), **libraries)
        assert (found["sha"], found["held"]) == (expected["sha"],) * 2, arguments
        assert found["metrics"] == expected["metrics"]


def test_a_device_on_which_the_ps_cannot_keep_the_model_is_told(
    libraries: dict[str, str], tmp_path: Path
) -> None:
    small = script(tmp_path, with_ps(', ps_device="cuda", ps_bytes_max=4096'))
    absent = {**libraries, "EBB_TEST_DEVICES": "0"}
    for variables, words in [(libraries, "4096"), (absent, "ps_device = 'cuda': no CUDA d")]:
        process = Script(None, small, "alone", "sync", keys=variables)
        with process._waiting():
            _, said = process.child.communicate()
        assert process.child.returncode != 0 and words in said, said
        assert "panicked" not in said


def test_the_master_hears_how_the_device_of_a_loop_is(
    libraries: dict[str, str], tmp_path: Path
) -> None:
    Path(libraries["EBB_TEST_NVML"]).write_text("busy 87\nmemory_total 100\nmemory_used 40\n")
    path = script(tmp_path, ON_DEVICE)
    with cluster(tmp_path, libraries, "cpu") as (place, _):
        process = joins(place, path, "watched", "sync", "1", **libraries)
        process.arrive()

        def heard() -> Any:
            (group,) = place.client.status("watched")["devices"]
            return group["device"], group["busy_percent"], group["memory_used_bytes"]

        while heard() != ("cuda:0", 87, 40):
            place._wait()
        process.go()
        process.result()


#: Looks at the memory of a request after the request, until nothing keeps it.
KEEPS = """
import ctypes
import numpy, pytest

requests, kept, places = [], [], []

def floats(address, count):
    return list((ctypes.c_float * count).from_address(address))

def more(job):
    requests.append(job._current)
    del requests[:-1]
    if not places:
        # The first one is `unused`.
        weights, gradients = job._current.weights()[1], job._current.buffers()[1]
        with pytest.raises(TypeError, match="lie on cuda:0, which NumPy does not reach"):
            numpy.asarray(weights)
        with pytest.raises(BufferError, match=r"dl_device=\\(1, 0\\): .* the device \\(2, 0\\)"):
            weights.__dlpack__(dl_device=(1, 0))
        with pytest.raises(BufferError, match="copy=True: this memory is lent and not copied"):
            weights.__dlpack__(copy=True)
        used = gradients.__dlpack__(stream=2, max_version=(1, 1), dl_device=(2, 0), copy=False)
        on_driver.taken(used)
        with pytest.raises(ValueError):
            on_driver.taken(used)
        kept.append(weights.__dlpack__())
        managed = on_driver.Managed.from_address(on_driver.address_in(kept[0]))
        places.append((managed.data, managed.shape[0]))
        places.append(floats(*places[0]))
        assert places[1] == model[0].weight.detach().view(-1).tolist()
    if job._current.step < 10:
        assert floats(*places[0]) == places[1]
    else:
        # Nobody takes it.
        kept.clear()
"""

#: What a thread has for its device at last, and what it did that no driver allows. PyTorch goes on
#: with the device of its thread, so nothing of a job may give it one.
LEAVES = """
assert floats(*places[0]) != places[1]
requests.clear()
driver, context = ctypes.CDLL("libcuda.so"), ctypes.c_void_p()
assert driver.cuCtxGetCurrent(ctypes.byref(context)) == 0 and context.value is None
driver.fake_harm.restype = ctypes.c_char_p
assert driver.fake_harm() is None, driver.fake_harm()
"""


def test_memory_stays_while_a_capsule_lives_and_its_end_leaves_the_thread_as_it_was(
    libraries: dict[str, str], tmp_path: Path
) -> None:
    trained(script(tmp_path, ON_DEVICE + LEAVES, KEEPS), **libraries)


def network() -> Any:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))


@pytest.mark.parametrize("fails", [False, True])
def test_a_request_is_answered_when_the_device_has_done_what_it_was_told(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = network()
    tensors = Tensors(model)
    named = [tensor for _, tensor in tensors.parameters + tensors.states]
    weights = [torch.full_like(tensor, 2).view(-1) for tensor in named]
    outs = [torch.zeros_like(tensor).view(-1) for tensor in named]
    request = SimpleNamespace(weight=3.0, loaded=1, weights=lambda: weights, buffers=lambda: outs)
    waits: list[Any] = []
    device = torch.device("cuda:0")
    tensors._devices = {device}
    monkeypatch.setattr(torch.cuda, "synchronize", waits.append)
    tensors.bind(request)
    assert waits == [device]
    assert all(bool((tensor == 2).all()) for tensor in named)
    model(torch.randn(4, 3)).sum().backward()
    gradients = [tensor.grad * 3 for _, tensor in tensors.parameters]
    if fails:
        request.weight = None
        with pytest.raises(TypeError):
            tensors.collect(request)
    else:
        tensors.collect(request)
        for gradient, out in zip(gradients, outs, strict=False):
            assert torch.equal(gradient.view(-1), out)
    assert waits == [device] * 2


def test_memory_of_the_host_is_lent_once_by_each_capsule() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.TensorDataset(torch.randn(16, 3), torch.zeros(16))
    kept: list[Any] = []
    with ebbflow.join(model, optimizer, data, micro=8, epochs=2) as job:
        for epoch in job.epochs():
            for x, _ in epoch:
                for region in job._current.weights() + job._current.buffers():
                    assert region.__dlpack_device__() == (1, 0)
                    with pytest.raises(BufferError, match=r"dl_device=\(2, 0\): these values lie"):
                        region.__dlpack__(dl_device=(2, 0))
                    capsule = region.__dlpack__()
                    view = torch.utils.dlpack.from_dlpack(capsule)
                    with pytest.raises(RuntimeError):
                        torch.utils.dlpack.from_dlpack(capsule)
                    # A library that knows newer capsules takes these.
                    newer = torch.from_dlpack(region)
                    assert newer.data_ptr() == view.data_ptr() and newer.dtype == view.dtype
                    # Nobody takes this one.
                    region.__dlpack__()
                weights = torch.from_dlpack(job._current.weights()[0])
                kept.append((weights, weights.clone()))
                job.step(model(x).square().mean())
    assert len(kept) == 4
    assert all(torch.equal(weights, before) for weights, before in kept)
    assert not torch.equal(kept[0][1], kept[-1][1])
