"""What a loop saves in copies changes no bit, and nothing that a user sees."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from .conftest import needs

torch = needs("torch")

import ebbflow  # noqa: E402
from ebbflow import _early, errors, tensors  # noqa: E402
from ebbflow.records import Records  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402
from torch.utils.data import DataLoader, Subset, TensorDataset, default_collate  # noqa: E402

LOSS = nn.CrossEntropyLoss()
WIDTH = 600


class Net(nn.Module):  # type: ignore[misc]
    """Has a layer of more than a megabyte, which it uses twice."""

    def __init__(self, checkpoints: bool = False) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first = nn.Linear(6, WIDTH)
        self.large = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, 3)
        self._checkpoints = checkpoints

    def forward(self, x: Any) -> Any:
        x = torch.tanh(self.first(x))
        for _ in range(2):
            # Each part of a reentrant checkpoint adds to the gradient of the layer by itself.
            x = checkpoint(self.part, x, use_reentrant=True) if self._checkpoints else self.part(x)
        return self.last(x)

    def part(self, x: Any) -> Any:
        return torch.tanh(self.large(x))


def data() -> TensorDataset:
    x = torch.randn(48, 6, generator=torch.Generator().manual_seed(3))
    return TensorDataset(x, (x.sum(1) > 0).long() + (x[:, 0] > 1).long())


def joined(model: Any) -> ebbflow.Session:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return ebbflow.join(model, optimizer, data(), micro=8, effective=16, epochs=2, seed=5)


def trained(model: Any) -> str | None:
    with joined(model) as job:
        for epoch in job.epochs():
            for x, y in epoch:
                job.step(LOSS(model(x), y))
    return job.model_sha256


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let everything be copied, on the thread of the loop."""
    monkeypatch.setattr(tensors, "_SHARED_BYTES_MIN", 1 << 40)
    monkeypatch.setattr(_early, "BYTES_MIN", 1 << 40)


@pytest.mark.parametrize("checkpoints", [False, True])
def test_large_layers_have_the_bits_of_copies(
    checkpoints: bool, request: pytest.FixtureRequest
) -> None:
    assert nn.Linear(WIDTH, WIDTH).weight.nbytes > _early.BYTES_MIN > tensors._SHARED_BYTES_MIN
    found = trained(Net(checkpoints))
    request.getfixturevalue("copies")
    assert trained(Net(checkpoints)) == found is not None


def test_memory_that_the_user_shares_with_a_weight_follows_it() -> None:
    plain = trained(Net())
    model = Net()
    before = model.large.weight.data
    with joined(model) as job:
        for epoch in job.epochs():
            within: Any = None
            for x, y in epoch:
                assert torch.equal(before, model.large.weight)
                assert within is None or torch.equal(within, model.first.weight)
                job.step(LOSS(model(x), y))
                within = model.first.weight.detach()
    assert job.model_sha256 == plain
    assert torch.equal(before, model.large.weight)


def test_a_model_has_its_own_memory_again_after_the_job() -> None:
    model = Net()
    before = model.large.weight.data_ptr()
    with joined(model) as job:
        for epoch in job.epochs():
            for x, y in epoch:
                assert model.large.weight.data_ptr() != before
                job.step(LOSS(model(x), y))
    assert model.large.weight.data_ptr() == before
    with torch.no_grad():
        model.large.weight.add_(1)


def test_a_write_to_a_large_weight_is_named_each_time() -> None:
    model = Net()
    with pytest.raises(errors.WrittenError, match=r"`large\.weight`"), joined(model) as job:
        for epoch in job.epochs():
            for x, y in epoch:
                with torch.no_grad():
                    model.large.weight.mul_(0.5)
                for _ in range(2):
                    with pytest.raises(errors.WrittenError, match=r"`large\.weight`"):
                        job.step(LOSS(model(x), y))


def test_a_backward_pass_that_fails_leaves_nothing_behind() -> None:
    expected, model = trained(Net()), Net()
    failed = False
    with joined(model) as job:
        for epoch in job.epochs():
            for x, y in epoch:
                loss = LOSS(model(x), y)
                if not failed:
                    failed = True
                    hook = model.first.weight.register_hook(lambda _: 1 / 0)
                    with pytest.raises(ZeroDivisionError):
                        job.step(loss)
                    hook.remove()
                    model.zero_grad()
                    loss = LOSS(model(x), y)
                loss.backward()
                job.push(loss.item())
    assert job.model_sha256 == expected


@pytest.mark.parametrize("whole", [True, False])
def test_tensors_are_collated_at_once_into_the_batches_of_the_loader(whole: bool) -> None:
    source: Any = data() if whole else Subset(data(), list(range(47, 3, -1)))
    records = Records(DataLoader(source, batch_size=4), "train_data", 1)
    assert records._rows is not None
    for numbers in ([3], [5, 1, 1, 40]):
        expected = default_collate([source[number] for number in numbers])
        found = records.load(0, numbers)
        assert type(found) is type(expected)
        assert all(torch.equal(one, two) for one, two in zip(found, expected, strict=True))


def test_a_record_of_tensors_that_cannot_be_read_is_named() -> None:
    source = Subset(data(), [0, 1, 48, 2])
    records = Records(source, "train_data", 1)
    assert records._rows is not None
    with pytest.raises(errors.RecordError, match="record 2 of train_data: IndexError: ") as raised:
        records.load(0, [1, 2])
    assert isinstance(raised.value.__cause__, IndexError)
    expected = default_collate([source[1], source[3]])
    found = records.load(0, [1, 3])
    assert all(torch.equal(one, two) for one, two in zip(found, expected, strict=True))


def test_data_sets_and_loaders_of_their_own_are_read_record_by_record() -> None:
    class Mine(TensorDataset):  # type: ignore[misc]
        def __getitem__(self, record: int) -> Any:
            return record

    def collate(records: list[Any]) -> list[Any]:
        return records

    assert Records(Mine(torch.zeros(3)), "train_data", 1).load(0, [2]).tolist() == [2]
    own = DataLoader(data(), batch_size=4, collate_fn=collate)
    assert len(Records(own, "train_data", 1).load(0, [2, 3])) == 2


KEEPS = """
import ctypes, sys
from ebbflow._memory import keep_free_memory

class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "abcdefghij"]

c = ctypes.CDLL(None)
c.mallinfo2.restype, c.malloc.restype = Info, ctypes.c_void_p
keep_free_memory()
mapped = c.mallinfo2().d
assert c.malloc(ctypes.c_size_t(256 << 20))
print(c.mallinfo2().d - mapped)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="options of glibc")
def test_memory_of_torch_is_kept_unless_the_user_says_otherwise() -> None:
    def mapped(**variables: str) -> str:
        environment = {**os.environ, **variables}
        command = [sys.executable, "-c", KEEPS]
        ended = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE)
        return ended.stdout.decode().strip()

    assert mapped(GLIBC_TUNABLES="") == "0"
    assert mapped(GLIBC_TUNABLES="glibc.malloc.mmap_max=100") == "1"
