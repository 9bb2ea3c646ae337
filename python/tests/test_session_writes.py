"""What a loop may not write, and how it hears of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from .conftest import needs

torch = needs("torch")

import ebbflow  # noqa: E402
from ebbflow import _marks, errors  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.data import TensorDataset  # noqa: E402

LOSS = nn.CrossEntropyLoss()
WIDTH = 600


class Net(nn.Module):  # type: ignore[misc]
    """Has a layer of more than a megabyte, small ones, and a buffer that is a constant."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first = nn.Linear(6, WIDTH)
        self.large = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, 3)
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x: Any) -> Any:
        return self.last(torch.tanh(self.large(torch.tanh(self.first(x)) * self.scale)))


def data() -> TensorDataset:
    x = torch.randn(48, 6, generator=torch.Generator().manual_seed(3))
    return TensorDataset(x, (x.sum(1) > 0).long() + (x[:, 0] > 1).long())


def joined(model: Any, optimizer: Any = None) -> ebbflow.Session:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return ebbflow.join(model, optimizer, data(), micro=8, effective=16, epochs=2, seed=5)


def numpy_zeros(model: Net) -> None:
    model.large.weight.detach().numpy()[...] = 0


def new_memory(model: Net) -> None:
    model.large.weight.data = torch.zeros(WIDTH, WIDTH)


def one_value(model: Net) -> None:
    model.last.bias.data[1] = 5


# Each of them leaves torch's count of writes as it was.
WRITES: list[tuple[str, Callable[[Net], Any]]] = [
    ("first.weight", lambda model: model.first.weight.data.clamp_(-0.01, 0.01)),
    ("first.bias", lambda model: model.first.bias.data.mul_(0.5)),
    ("last.bias", one_value),
    ("large.weight", lambda model: model.large.weight.data.clamp_(-0.01, 0.01)),
    ("large.weight", numpy_zeros),
    ("large.weight", new_memory),
    ("scale", lambda model: model.scale.data.mul_(0.5)),
]


@pytest.mark.parametrize(("name", "write"), WRITES)
def test_a_write_that_torch_does_not_count_is_named_each_time(
    name: str, write: Callable[[Net], Any]
) -> None:
    model = Net()
    with pytest.raises(errors.WrittenError, match=f"`{name}`"), joined(model) as job:
        for epoch in job.epochs():
            for x, y in epoch:
                version = dict(model.state_dict(keep_vars=True))[name]._version
                write(model)
                assert dict(model.state_dict(keep_vars=True))[name]._version == version
                with pytest.raises(errors.WrittenError, match=f"`{name}`"):
                    job.step(LOSS(model(x), y))
                job.step(LOSS(model(x), y))


@pytest.mark.parametrize(("name", "write"), WRITES)
def test_a_write_between_two_batches_is_named(name: str, write: Callable[[Net], Any]) -> None:
    model = Net()
    stepped = 0
    with pytest.raises(errors.WrittenError, match=f"`{name}`"), joined(model) as job:
        for epoch in job.epochs():
            for x, y in epoch:
                job.step(LOSS(model(x), y))
                stepped += 1
                # An update has two batches: the next one has the same weights.
                if stepped == 3:
                    write(model)
    assert stepped == 3


def test_a_large_tensor_is_compared_in_all_of_its_parts() -> None:
    count = 4 * _marks.WHOLE_MAX * _marks.PARTS + 3
    tensor = torch.zeros(count)
    marks = _marks.Marks([torch.zeros(5), tensor])
    marks.keep()
    assert marks.written() is None
    part = count // _marks.PARTS + 1
    for begin in [0, 7 * part, count - 2 * part]:
        tensor[begin : begin + 2 * part] += 1
        assert marks.written() == 1
        marks.keep()
    for end in (0, count - 1):
        tensor[end] += 1
        assert marks.written() == 1
        marks.keep()
    # What is not found: a write to single elements, outside of the slab of this version.
    (compared,) = [int(places.numel()) for places in marks._places if places is not None]
    assert compared == _marks.PARTS + 2
    places = marks._places[1]
    assert places is not None
    missed = set(range(part)) - set(places.tolist())
    tensor[min(missed)] += 1
    assert marks.written() is None


def test_a_write_to_one_element_that_is_repeated_is_found_in_any_large_tensor() -> None:
    counts = [5, 3 * _marks.WHOLE_MAX, 40 * _marks.WHOLE_MAX + 3]
    turned = torch.zeros(40, 3 * _marks.WHOLE_MAX).t()
    assert not turned.is_contiguous()
    tensors = [*map(torch.zeros, counts), turned]
    marks = _marks.Marks(tensors)
    for number in (1, 2, 3):
        places = marks._places[number]
        assert places is not None
        chosen = set(places.tolist())
        for place in (4000, tensors[number].numel() // 2, tensors[number].numel() - 2):
            assert place not in chosen
            found = False
            for _ in range(_marks.SLABS + len(counts)):
                marks.keep()
                assert marks.written() is None
                tensors[number].data[divmod(place, 40) if number == 3 else place] += 1
                found = found or marks.written() == number
            assert found, (number, place)


def test_what_is_no_number_is_no_write() -> None:
    tensors = [torch.full((3,), float("nan")), torch.tensor([True, False]), torch.tensor(3)]
    marks = _marks.Marks(tensors)
    marks.keep()
    assert marks.written() is None
    tensors[2] += 1
    assert marks.written() == 2


def batches(model: Any, optimizer: Any = None) -> Iterator[tuple[ebbflow.Session, Any, Any]]:
    with joined(model, optimizer) as job:
        for epoch in job.epochs():
            for x, y in epoch:
                yield job, x, y


def test_a_step_of_the_optimizer_is_refused_by_its_name_and_works_after_the_job() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with pytest.raises(errors.WrittenError, match=r"step\(\) of SGD.*remove optimizer\.step\(\)"):
        for job, x, y in batches(model, optimizer):
            # The gradients are `None` then, so torch itself would say nothing.
            job.step(LOSS(model(x), y))
            optimizer.step()
    before = model.last.bias.clone()
    model.last.bias.grad = torch.ones(3)
    optimizer.step()
    assert not torch.equal(model.last.bias, before)


def clipped(model: Net) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1e3)


def masked(model: Net) -> None:
    model.large.weight.grad.mul_(2)


@pytest.mark.parametrize("write", [clipped, masked])
def test_a_write_to_the_gradients_before_a_push_is_named(write: Callable[[Net], None]) -> None:
    model = Net()
    with pytest.raises(errors.WrittenError, match=r"the gradient of `.*weight`.*use clip_norm"):
        for job, x, y in batches(model):
            loss = LOSS(model(x), y)
            loss.backward()
            write(model)
            with pytest.raises(errors.WrittenError, match="the gradient of"):
                job.push(loss.item())
            job.push(loss.item())


def test_gradients_may_be_assigned_added_up_and_made_zero() -> None:
    model, other = Net(), Net()
    for job, x, y in batches(model):
        job.step(LOSS(model(x), y))
    for job, x, y in batches(other):
        LOSS(other(x), 2 - y).backward()
        other.zero_grad(set_to_none=False)
        # Halves are exact in binary numbers.
        for _ in range(2):
            loss = LOSS(other(x), y)
            (loss / 2).backward()
        for tensor in other.parameters():
            tensor.grad = tensor.grad * 2
            tensor.grad.mul_(0.5)
        job.push(loss.item())
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    assert all(torch.equal(one, two) for one, two in pairs)
