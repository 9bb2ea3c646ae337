"""`ebbflow.join` alone: a master, a ps and a worker in this process."""

import hashlib
import math
import multiprocessing
import runpy
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from .conftest import needs

torch = needs("torch")

import ebbflow  # noqa: E402
from ebbflow import errors  # noqa: E402
from ebbflow._device import bytes_of_ps, name_on_host  # noqa: E402
from ebbflow.engine import Torch  # noqa: E402
from ebbflow.optimizers import optimizer_settings, schedule_settings  # noqa: E402
from ebbflow.records import Records, seed_all  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.data import (  # noqa: E402
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    TensorDataset,
)


def data(records: int = 96) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(records, 6, generator=generator)
    y = (x.sum(1) > 0).long() + (x[:, 0] > 1).long()
    return TensorDataset(x, y)


def network(**options: Any) -> Any:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), *options.get("more", []), nn.Linear(16, 3))


LOSS = nn.CrossEntropyLoss()


def measure(model: nn.Module) -> Callable[[ebbflow.Batch], dict[str, float]]:
    def of(batch: ebbflow.Batch) -> dict[str, float]:
        outputs = model(batch.x)
        right = (outputs.argmax(1) == batch.y).float().mean()
        return {"loss": LOSS(outputs, batch.y), "accuracy": right}

    return of


def train(model: nn.Module, optimizer: Any, **options: Any) -> tuple[ebbflow.Session, list[Any]]:
    """Train to the end; returns the job and (epoch, step, records) of each batch."""
    seen = []
    given: dict[str, Any] = {"micro": 8, "effective": 16, "epochs": 3, "seed": 5} | options
    source = given.pop("train_data", None) or data()
    with ebbflow.join(model, optimizer, source, **given) as job:
        for epoch in job.epochs():
            for batch in epoch:
                seen.append((epoch.number, batch.step, batch.records))
                job.step(LOSS(model(batch.x), batch.y))
            if given.get("eval_data") is not None:
                job.evaluate(measure(model))
    return job, seen


def plain(model: nn.Module, optimizer: Any, seen: list[Any], source: Any) -> None:
    """Train with torch alone, on the batches that a job had."""
    steps: dict[int, list[list[int]]] = {}
    for _, step, records in seen:
        steps.setdefault(step, []).append(records)
    for step in sorted(steps):
        optimizer.zero_grad()
        total = sum(len(records) for records in steps[step])
        for records in steps[step]:
            x = torch.stack([source[record][0] for record in records])
            y = torch.stack([source[record][1] for record in records])
            (LOSS(model(x), y) * (len(records) / total)).backward()
        optimizer.step()


def difference(one: nn.Module, other: nn.Module) -> float:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs)


def test_each_epoch_has_every_record_once_and_the_model_has_the_final_weights() -> None:
    model = network()
    job, seen = train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for epoch in range(3):
        records = [r for number, _, batch in seen for r in batch if number == epoch]
        assert sorted(records) == list(range(96))
    orders = {tuple(tuple(batch) for number, _, batch in seen if number == e) for e in range(3)}
    assert len(orders) == 3
    assert job.elected and job.summary is not None
    assert job.summary["status"] == "succeeded" and job.summary["steps"] == 18
    assert job.model_sha256 == job.summary["model_sha256"]
    before = network().state_dict()
    assert difference(model, network()) > 0.01
    assert set(model.state_dict()) == set(before)


# S4-10
def test_sgd_gives_the_weights_of_a_plain_loop_of_the_same_order() -> None:
    model, other = network(), network()
    sgd = {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-3}
    source = data(100)
    job, seen = train(
        model, torch.optim.SGD(model.parameters(), **sgd), train_data=source, epochs=15
    )
    assert job.summary is not None and job.summary["steps"] == 105
    plain(other, torch.optim.SGD(other.parameters(), **sgd), seen, source)
    assert difference(model, other) < 1e-5


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("Adam", {"lr": 0.01}),
        ("Adam", {"lr": 0.01, "amsgrad": True}),
        ("AdamW", {"lr": 0.01, "weight_decay": 0.1}),
        ("AdamW", {"lr": 0.01, "weight_decay": 0.1, "amsgrad": True}),
        ("Adagrad", {"lr": 0.1, "lr_decay": 0.01}),
        ("RMSprop", {"lr": 0.01, "momentum": 0.5, "centered": True}),
        ("Adadelta", {"lr": 1.0}),
    ],
)
def test_adaptive_rules_give_the_weights_of_a_plain_loop(kind: str, options: Any) -> None:
    model, other = network(), network()
    rule = getattr(torch.optim, kind)
    job, seen = train(model, rule(model.parameters(), **options), epochs=17)
    assert job.summary is not None and job.summary["steps"] == 102
    plain(other, rule(other.parameters(), **options), seen, data())
    x, y = data().tensors
    with torch.no_grad():
        found, expected = float(LOSS(model(x), y)), float(LOSS(other(x), y))
    assert abs(found - expected) < 1e-4 * expected
    assert difference(model, other) < 1e-3


# S4-08
def test_the_same_script_gives_the_same_bits() -> None:
    def once(seed: int) -> str | None:
        model = network(more=[nn.Dropout(0.3)])
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        torch.manual_seed(seed)  # What the process drew before does not matter.
        return train(model, optimizer, eval_data=data(20))[0].model_sha256

    assert once(1) == once(2) is not None


# S4-08
def test_dropout_is_keyed_by_the_microbatch() -> None:
    model = nn.Sequential(nn.Linear(6, 3), nn.Dropout(0.5))
    seen: dict[tuple[int, int], Any] = {}
    for _ in range(2):
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-30)
        with ebbflow.join(model, optimizer, data(), micro=8, epochs=2) as job:
            for epoch in job.epochs():
                for batch in epoch:
                    outputs = model(batch.x)
                    dropped = (outputs == 0).tolist()
                    place = (epoch.number, batch.step)
                    assert seen.setdefault(place, dropped) == dropped
                    job.step(LOSS(outputs, batch.y))
    assert len({str(dropped) for dropped in seen.values()}) == len(seen) == 24


def test_a_plain_loop_draws_the_masks_of_a_job() -> None:
    model, seeded, unseeded = (network(more=[nn.Dropout(0.3)]) for _ in range(3))
    x, y = (source := data(100)).tensors
    job, seen = train(
        model,
        torch.optim.SGD(model.parameters(), lr=0.05),
        train_data=source,
        epochs=15,
        shuffle=False,
    )
    assert job.summary is not None and job.summary["steps"] == 105
    assert len(seen) == 15 * 13
    for other, seeds in [(seeded, True), (unseeded, False)]:
        optimizer = torch.optim.SGD(other.parameters(), lr=0.05)
        # An epoch has 13 batches of 8 records, the last of 4; an update has two, the last one.
        for epoch in range(15):
            for first in range(0, 13, 2):
                optimizer.zero_grad()
                total = min(16, 100 - first * 8)
                for number in range(first, min(first + 2, 13)):
                    rows = slice(number * 8, min(number * 8 + 8, 100))
                    if seeds:
                        ebbflow.seed_microbatch(5, epoch * 13 + number)
                    loss = LOSS(other(x[rows]), y[rows])
                    (loss * (len(x[rows]) / total)).backward()
                optimizer.step()
    assert difference(model, seeded) < 1e-5
    assert difference(model, unseeded) > 1e-3


#: The script of PyTorch's MNIST example without a job: convolutions, pooling and dropout.
EXAMPLE = runpy.run_path(str(Path(__file__).parents[2] / "examples/python/mnist/plain.py"))

RULES: list[tuple[Callable[[Any], Any], float]] = [
    (lambda weights: torch.optim.SGD(weights, lr=0.05, momentum=0.9), 1e-5),
    # That of the example.
    (lambda weights: torch.optim.Adadelta(weights, lr=1.0), 1e-3),
]


@pytest.mark.parametrize(("rule", "most"), RULES, ids=["sgd", "adadelta"])
def test_the_network_of_the_example_gives_the_weights_of_its_plain_loop(
    rule: Callable[[Any], Any], most: float
) -> None:
    def network() -> tuple[Any, Any, Any]:
        torch.manual_seed(1)
        model = EXAMPLE["Net"]()
        optimizer = rule(model.parameters())
        return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7)

    source = torch.utils.data.Subset(EXAMPLE["digits"](EXAMPLE["DIGITS"])[0], range(156))
    x, y = source[list(range(156))]
    model, optimizer, scheduler = network()
    steps: dict[int, list[tuple[int, list[int]]]] = {}
    with ebbflow.join(
        model, optimizer, source, micro=8, effective=16, epochs=10, seed=5, scheduler=scheduler
    ) as job:
        for epoch in job.epochs():
            for batch in epoch:
                steps.setdefault(batch.step, []).append((batch.microbatch, batch.records))
                job.step(nn.functional.nll_loss(model(batch.x), batch.y))
    assert job.summary is not None and job.summary["steps"] == len(steps) == 100

    def plain(seeds: bool) -> Any:
        model, optimizer, scheduler = network()
        for step, batches in sorted(steps.items()):
            optimizer.zero_grad()
            total = sum(len(records) for _, records in batches)
            for number, records in sorted(batches):
                if seeds:
                    ebbflow.seed_microbatch(5, number)
                loss = nn.functional.nll_loss(model(x[records]), y[records])
                (loss * (len(records) / total)).backward()
            optimizer.step()
            if step % 10 == 9:
                scheduler.step()
        return model

    def loss_of(model: Any) -> float:
        model.eval()
        with torch.no_grad():
            return float(nn.functional.nll_loss(model(x), y))

    seeded, unseeded = plain(seeds=True), plain(seeds=False)
    assert difference(model, seeded) < most
    assert abs(loss_of(model) / loss_of(seeded) - 1) < 1e-4
    # Other masks of dropout would be seen.
    assert difference(model, unseeded) > 1e-2
    assert abs(loss_of(model) / loss_of(unseeded) - 1) > 1e-2


def test_a_batch_has_the_number_by_which_it_is_seeded() -> None:
    model = nn.Sequential(nn.Linear(6, 3), nn.Dropout(0.5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    numbers = []
    with ebbflow.join(model, optimizer, data(), micro=8, epochs=2, seed=9) as job:
        for epoch in job.epochs():
            for batch in epoch:
                outputs = model(batch.x)
                ebbflow.seed_microbatch(9, batch.microbatch)
                assert torch.equal(outputs, model(batch.x))
                numbers.append(batch.microbatch)
                job.step(LOSS(outputs, batch.y))
    assert sorted(numbers) == list(range(24))


def test_statistics_of_a_normalisation_are_state_and_frozen_tensors_stay() -> None:
    model = network(more=[nn.BatchNorm1d(16)])
    model[0].bias.requires_grad_(False)
    model.register_buffer("mask", torch.tensor([True, False]))
    bias = model[0].bias.clone()
    trained = [tensor for tensor in model.parameters() if tensor.requires_grad]
    job, _ = train(model, torch.optim.SGD(trained, lr=0.1, weight_decay=0.1), eval_data=data(20))
    assert job.metrics["accuracy"] > 0.3
    state = model.state_dict()
    assert torch.equal(state["0.bias"], bias) and state["mask"].tolist() == [True, False]
    assert int(state["2.num_batches_tracked"]) == 18


def test_running_statistics_are_the_mean_of_what_the_batches_of_a_step_make_of_them() -> None:
    model, other = (network(more=[nn.BatchNorm1d(16)]) for _ in range(2))
    # The last batch of an epoch has 4 records, and counts as much as that of 8 beside it.
    source, options = data(92), {"lr": 0.05, "momentum": 0.9}
    job, seen = train(model, torch.optim.SGD(model.parameters(), **options), train_data=source)
    assert job.summary is not None and job.summary["steps"] == 18
    optimizer, normal = torch.optim.SGD(other.parameters(), **options), other[2]
    for step in range(18):
        first = {name: value.clone() for name, value in normal.named_buffers()}
        made: list[dict[str, Any]] = []
        batches = [batch for batch in seen if batch[1] == step]
        optimizer.zero_grad()
        for _, _, records in batches:
            normal.load_state_dict(first, strict=False)
            x, y = source[records]
            total = sum(len(records) for _, _, records in batches)
            (LOSS(other(x), y) * (len(records) / total)).backward()
            made.append({name: value.clone() for name, value in normal.named_buffers()})
        optimizer.step()
        for name in ("running_mean", "running_var"):
            getattr(normal, name).copy_(torch.stack([values[name] for values in made]).mean(0))
        # Each batch has counted itself from what the step began with.
        assert int(normal.num_batches_tracked) == step + 1
    assert int(model[2].num_batches_tracked) == 18
    assert difference(model, other) < 1e-5
    # They are no longer what a normalisation begins with.
    assert float(normal.running_mean.abs().max()) > 1e-2
    assert float((normal.running_var - 1).abs().max()) > 0.1


# S4-12, S4-13
def test_an_evaluation_is_over_all_records_at_the_end_of_each_epoch() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    held_out, found = data(1100), []
    with ebbflow.join(model, optimizer, data(), held_out, micro=8, effective=16, epochs=2) as job:
        for epoch in job.epochs():
            for batch in epoch:
                job.step(LOSS(model(batch.x), batch.y))
            found.append(job.evaluate(measure(model)))
            assert model.training
    assert [entry["epoch"] for entry in job.history] == [0, 1]
    assert job.metrics == found[-1] and found[0] != found[1]
    x, y = held_out.tensors
    with torch.no_grad():
        assert found[-1]["loss"] == pytest.approx(float(LOSS(model(x), y)), abs=1e-5)
        right = float((model(x).argmax(1) == y).float().mean())
    assert found[-1]["accuracy"] == pytest.approx(right, abs=1e-6)


def losses(model: nn.Module) -> float:
    with torch.no_grad():
        x, y = data().tensors
        return float(LOSS(model(x), y))


def grouped(model: nn.Module, kind: str, **options: Any) -> Any:
    """Two layers with rates of their own, and biases without decay."""
    first, last = model[0], model[-1]
    groups = [
        {"params": [first.weight], "weight_decay": 0.1},
        {"params": [last.weight], "weight_decay": 0.1, "lr": 0.03},
        {"params": [first.bias, last.bias], "weight_decay": 0.0},
    ]
    return getattr(torch.optim, kind)(groups, **options)


def test_sgd_with_groups_gives_the_weights_of_a_plain_loop() -> None:
    model, other = network(), network()
    options = {"lr": 0.1, "momentum": 0.9}
    job, seen = train(model, grouped(model, "SGD", **options), epochs=17)
    assert job.summary is not None and job.summary["steps"] == 102
    plain(other, grouped(other, "SGD", **options), seen, data())
    assert difference(model, other) < 1e-5
    # Groups that the ps lost would be seen.
    without = network()
    plain(without, torch.optim.SGD(without.parameters(), **options), seen, data())
    assert difference(model, without) > 1e-2


def test_adamw_with_groups_and_a_schedule_for_each_gives_the_losses_of_a_plain_loop() -> None:
    model, other = network(), network()

    def rule(model: nn.Module) -> Any:
        optimizer = grouped(model, "AdamW", lr=0.01)
        fall = torch.optim.lr_scheduler.LambdaLR(
            optimizer, [lambda epoch: 0.9**epoch, lambda epoch: 1 / (1 + epoch), lambda epoch: 1.0]
        )
        return optimizer, fall

    optimizer, scheduler = rule(model)
    _, seen = train(model, optimizer, scheduler=scheduler, scheduler_every="step", epochs=17)
    optimizer, scheduler = rule(other)
    for step in range(102):
        plain(other, optimizer, [batch for batch in seen if batch[1] == step], data())
        scheduler.step()
    assert abs(losses(model) / losses(other) - 1) < 1e-4
    assert difference(model, other) < 1e-4


def test_a_scheduler_becomes_a_table_and_is_left_as_it_was() -> None:
    model, other = network(), network()

    def rule(model: nn.Module) -> tuple[Any, Any]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.2, total_iters=2)
        decay = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        chain = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm_up, decay], [2])
        return optimizer, chain

    optimizer, scheduler = rule(model)
    before = optimizer.param_groups[0]["lr"], scheduler.state_dict()["last_epoch"]
    _, seen = train(model, optimizer, scheduler=scheduler, epochs=4)
    assert (optimizer.param_groups[0]["lr"], scheduler.state_dict()["last_epoch"]) == before
    optimizer, scheduler = rule(other)
    for epoch in range(4):
        of_epoch = [batch for batch in seen if batch[0] == epoch]
        plain(other, optimizer, of_epoch, data())
        scheduler.step()
    assert difference(model, other) < 1e-5


def test_a_norm_is_clipped_over_the_update() -> None:
    model, other = network(), network()
    _, seen = train(model, torch.optim.SGD(model.parameters(), lr=1.0), clip_norm=0.1)
    optimizer = torch.optim.SGD(other.parameters(), lr=1.0)
    clip = optimizer.register_step_pre_hook(
        lambda *_: nn.utils.clip_grad_norm_(other.parameters(), 0.1) and None
    )
    plain(other, optimizer, seen, data())
    clip.remove()
    assert difference(model, other) < 1e-5


class Named(Dataset[Any]):  # type: ignore[misc]
    """Records that are dictionaries, with noise of their own."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, record: int) -> Any:
        return {"x": torch.full((6,), float(record)) + torch.randn(6), "n": record}


# S1-07
@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_keeps_workers_and_collate_function_and_noise_is_keyed(workers: int) -> None:
    def collate(records: list[Any]) -> dict[str, Any]:
        return {"x": torch.stack([r["x"] for r in records]), "n": [r["n"] for r in records]}

    model = nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    loader = DataLoader(Named(), batch_size=4, num_workers=workers, collate_fn=collate)
    first: dict[tuple[int, int], float] = {}
    for _ in range(2):
        with ebbflow.join(model, optimizer, loader, epochs=2) as job:
            for epoch in job.epochs():
                for batch in epoch:
                    # Not shuffled, as the loader is not.
                    begin = batch.step % 6 * 4
                    assert batch["n"] == batch.records == list(range(begin, begin + 4))
                    for number, x in zip(batch["n"], batch["x"], strict=True):
                        value = float(x.sum())
                        assert first.setdefault((epoch.number, number), value) == value
                    job.step(model(batch["x"]).mean())
    assert len(first) == len(set(first.values())) == 48


# S2-23, S4-06
def test_a_sampler_of_one_process_among_several_is_replaced_by_the_leases() -> None:
    source = data()
    sampler: Any = DistributedSampler(source, num_replicas=2, rank=0)
    loader = DataLoader(source, batch_size=8, sampler=sampler)
    assert len(list(loader)) == 6
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _, seen = train(model, optimizer, train_data=loader)
    epochs = [
        [record for epoch, _, records in seen for record in records if epoch == number]
        for number in range(3)
    ]
    assert all(sorted(records) == list(range(96)) for records in epochs)
    assert epochs[0] != epochs[1] != epochs[2], "shuffled"


def begin(_: int) -> None:
    """Begin a process of a loader."""


# S1-07
def test_further_settings_of_a_loader_stay() -> None:
    given: dict[str, Any] = {
        "num_workers": 2,
        "pin_memory": True,
        "timeout": 9,
        "worker_init_fn": begin,
        "prefetch_factor": 3,
    }
    source = DataLoader(data(), batch_size=4, multiprocessing_context="spawn", **given)
    records = Records(source, "train_data", 1)
    made = records._batches.loader
    assert {name: getattr(made, name) for name in given} == given
    assert made.multiprocessing_context.get_start_method() == "spawn"
    assert records.batch_size == 4


class Counted(Dataset[Any]):  # type: ignore[misc]
    """Records that count in a semaphore how many of them were loaded. The 31st may be broken."""

    def __init__(self, loaded: Any, broken: bool = False) -> None:
        self.loaded = loaded
        self.broken = broken

    def __len__(self) -> int:
        return 48

    def __getitem__(self, record: int) -> Any:
        if self.broken and record == 30:
            raise KeyError("no such picture")
        self.loaded.release()
        return torch.full((6,), float(record))


class Late(Counted):
    """The first record comes after eight others."""

    def __getitem__(self, record: int) -> Any:
        if record == 0:
            assert all(self.loaded.acquire(timeout=120) for _ in range(8))
        return super().__getitem__(record)


def counted(kind: type[Counted] = Counted, broken: bool = False) -> tuple[Any, DataLoader[Any]]:
    context = multiprocessing.get_context("fork")
    loaded = context.Semaphore(0)
    records = kind(loaded, broken)
    loader = DataLoader(records, 4, num_workers=2, multiprocessing_context=context)
    return loaded, loader


def test_workers_of_a_loader_load_batches_before_the_loop_asks_for_them() -> None:
    model = nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    (trained, train), (measured, test) = counted(), counted()

    def evaluate(batch: ebbflow.Batch) -> dict[str, Any]:
        if batch.records[0] == 0:
            # Two processes with two batches at a time each.
            assert all(measured.acquire(timeout=120) for _ in range(4 * 4))
        assert batch.data[:, 0].tolist() == batch.records
        return {"loss": model(batch.data).mean()}

    with ebbflow.join(model, optimizer, train, test, epochs=2) as job:
        for epoch in job.epochs():
            for batch in epoch:
                if batch.step == 0:
                    # This batch, and the next one, whose lease may be on its way.
                    deadline = time.monotonic() + 120
                    while trained.get_value() < 2 * 4:
                        assert time.monotonic() < deadline
                        job._expect()
                        time.sleep(0.01)
                assert batch.data[:, 0].tolist() == batch.records
                job.step(model(batch.data).mean())
            job.evaluate(evaluate)


def test_batches_that_come_before_earlier_ones_are_loaded_once() -> None:
    loaded, loader = counted(Late)
    records = Records(loader, "train_data", 1)
    batches = [list(range(begin, begin + 4)) for begin in range(0, 48, 4)]
    for batch in batches[:6]:
        records.expect(0, batch)
    assert records.load(0, batches[0])[:, 0].tolist() == batches[0]
    for batch in batches[6:]:
        records.expect(0, batch)
    for batch in batches[1:]:
        assert records.load(0, batch)[:, 0].tolist() == batch
    records.close()
    assert loaded.get_value() == 48 - 8


def test_batches_that_nobody_asks_for_give_way_and_their_errors_are_not_seen() -> None:
    _, loader = counted(broken=True)
    records = Records(loader, "train_data", 1)
    batches = [list(range(begin, begin + 4)) for begin in range(0, 48, 4)]
    for batch in batches[:9]:
        records.expect(0, batch)
    # Out of order, and the broken one is the eighth.
    for batch in (batches[2], batches[0], batches[8], batches[10], batches[1]):
        assert records.load(0, batch)[:, 0].tolist() == batch
    with pytest.raises(errors.RecordError, match="record 30 of train_data: KeyError"):
        records.load(0, batches[7])
    assert records.load(0, batches[6])[:, 0].tolist() == batches[6]
    records.expect(0, batches[9])
    records.forget()
    assert records.load(1, batches[11])[:, 0].tolist() == batches[11]
    assert len(records._batches._early) <= records._batches.most == 4
    records.close()


def test_a_record_that_raises_is_named_with_its_error() -> None:
    class Broken(Named):
        def __getitem__(self, record: int) -> Any:
            if record == 13:
                raise KeyError("no such picture")
            return torch.zeros(6)

    model = nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        pytest.raises(errors.RecordError, match="record 13 of train_data: KeyError") as raised,
        ebbflow.join(model, optimizer, Broken(), micro=4, epochs=1) as job,
    ):
        for epoch in job.epochs():
            for batch in epoch:
                job.step(model(batch.data).mean())
    assert isinstance(raised.value.__cause__, KeyError)


def test_a_batch_without_a_step_is_a_failed_attempt() -> None:
    model, tried = network(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        pytest.raises(errors.SessionFailedError, match=r"without job\.step"),
        ebbflow.join(model, optimizer, data(), micro=8, epochs=1) as job,
    ):
        for epoch in job.epochs():
            for batch in epoch:
                if batch.step == 3:
                    tried.append(batch.records)
                    continue
                job.step(LOSS(model(batch.x), batch.y))
    assert len(tried) == 3 and tried[0] == tried[1] == tried[2]


def test_a_batch_that_is_left_once_is_trained_later() -> None:
    model, other, left = network(), network(), list[Any]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    with ebbflow.join(model, optimizer, data(), micro=8, effective=16, epochs=2, seed=5) as job:
        for epoch in job.epochs():
            for batch in epoch:
                if batch.step == 2 and not left:
                    left.append(batch.records)
                    break
                # The lease comes again as a whole, so other batches of it may be seen twice.
                if (epoch.number, batch.step, batch.records) not in seen:
                    seen.append((epoch.number, batch.step, batch.records))
                job.step(LOSS(model(batch.x), batch.y))
    plain(other, torch.optim.SGD(other.parameters(), lr=0.1), seen, data())
    assert left and difference(model, other) < 1e-5
    assert sorted(r for epoch, _, batch in seen for r in batch if epoch == 0) == list(range(96))
    assert job.summary is not None and job.summary["microbatches_applied"] == 24


def test_an_error_of_the_loop_ends_the_session_and_reaches_the_user() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        pytest.raises(ZeroDivisionError),
        ebbflow.join(model, optimizer, data(), micro=8, epochs=1) as job,
    ):
        for epoch in job.epochs():
            for _ in epoch:
                _ = 1 / 0


def test_a_loss_that_is_no_number_fails_the_job() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        pytest.raises(errors.SessionFailedError, match="the loss of step 1 is NaN"),
        ebbflow.join(model, optimizer, data(), micro=8, epochs=1) as job,
    ):
        for epoch in job.epochs():
            for batch in epoch:
                job.step(LOSS(model(batch.x), batch.y) * (math.nan if batch.step == 1 else 1))


def steps(model: nn.Module, **options: Any) -> Iterator[tuple[ebbflow.Session, ebbflow.Batch]]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ebbflow.join(model, optimizer, data(), micro=8, epochs=1, **options) as job:
        for epoch in job.epochs():
            for batch in epoch:
                yield job, batch


def test_a_write_to_the_weights_is_found_and_named() -> None:
    model = network()
    with pytest.raises(errors.WrittenError, match=r"wrote the parameter `0\.weight`"):
        for job, batch in steps(model):
            job.step(LOSS(model(batch.x), batch.y))
            with torch.no_grad():
                model[0].weight.mul_(0.9)
    model = network()
    model.register_buffer("count", torch.zeros(1))
    with pytest.raises(errors.WrittenError, match=r"`count`.*state=\[\"count\"\]"):
        for job, batch in steps(model):
            model.count += 1
            job.step(LOSS(model(batch.x), batch.y))
    for job, batch in steps(model, state=["count"]):
        model.count += 1
        job.step(LOSS(model(batch.x), batch.y))
    assert float(model.count) > 1


def test_gradients_of_a_backward_pass_of_ones_own_are_pushed() -> None:
    model, other = network(), network()
    for job, batch in steps(model):
        job.step(LOSS(model(batch.x), batch.y))
    for job, batch in steps(other):
        loss = LOSS(other(batch.x), batch.y)
        parameters = list(other.parameters())
        for tensor, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            tensor.grad = gradient
        assert job.push(loss.item()) == loss.item()
        assert all(tensor.grad is None for tensor in parameters)
    assert difference(model, other) == 0
    with pytest.raises(errors.SessionError, match=r"job\.push without a batch"):
        for job, _ in steps(other):
            job.push(0.5)
            job.push(0.5)


def test_what_is_no_loss_is_refused() -> None:
    for wrong, shown in [(1.0, "float"), (torch.ones(3), "shape"), (torch.ones(()), "Tensor")]:
        with pytest.raises(TypeError, match=shown):
            for job, _ in steps(network()):
                job.step(wrong)
    with pytest.raises(errors.SessionError, match="without a batch"):
        model = network()
        for job, batch in steps(model):
            job.step(LOSS(model(batch.x), batch.y))
            job.step(LOSS(model(batch.x), batch.y))


def test_evaluations_are_asked_for_in_the_loop_and_only_with_data() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        pytest.raises(errors.SessionError, match=r"did not call job\.evaluate after epoch 0"),
        ebbflow.join(model, optimizer, data(), data(9), micro=8, epochs=2) as job,
    ):
        for epoch in job.epochs():
            for batch in epoch:
                job.step(LOSS(model(batch.x), batch.y))
    with pytest.raises(errors.SessionError, match="needs eval_data"):
        for job, _ in steps(model):
            job.evaluate(measure(model))
    wrong: Any
    for wrong, expected in [
        (lambda batch: 3.0, "a dictionary with `loss`"),
        (lambda batch: {"loss": 1.0, "epoch": 1.0}, "another name than 'epoch'"),
        (lambda batch: {"loss": 1.0, "auc": 1.0}, "no mean over records"),
    ]:
        with (
            pytest.raises((TypeError, ValueError), match=expected),
            ebbflow.join(model, optimizer, data(), data(9), micro=8, epochs=2) as job,
        ):
            for epoch in job.epochs():
                for batch in epoch:
                    job.step(LOSS(model(batch.x), batch.y))
                job.evaluate(wrong)


class Stream(IterableDataset[Any]):  # type: ignore[misc]
    def __iter__(self) -> Iterator[Any]:
        return iter([1])


def test_data_without_numbers_is_refused_by_name() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for source, error, expected in [
        (Stream(), TypeError, "Stream is an IterableDataset"),
        (DataLoader(Stream()), TypeError, "Stream is an IterableDataset"),
        (iter([1]), TypeError, "no __len__"),
        ([], ValueError, "train_data: the data set has no records, and .*; check its path"),
        (DataLoader(data(), batch_size=None), ValueError, "batch_size=None"),
        (DataLoader(data(), batch_size=4, drop_last=True), ValueError, "drop_last=True"),
    ]:
        with pytest.raises(error, match=expected):
            ebbflow.join(model, optimizer, source, micro=4, epochs=1)


def test_optimizers_are_translated_by_exact_type() -> None:
    weights = [torch.zeros(2, requires_grad=True)]
    optim = torch.optim

    def settings(kind: Any, **options: Any) -> dict[str, Any]:
        return optimizer_settings(kind(weights, **options), {id(weights[0]): "w"})

    assert settings(optim.SGD, lr=0.1) == {"kind": "sgd", "learning_rate": 0.1, "weight_decay": 0.0}
    assert settings(optim.SGD, lr=0.1, momentum=0.9, nesterov=True)["kind"] == "nesterov"
    assert settings(optim.SGD, lr=0.1, momentum=0.9, dampening=0.5)["dampening"] == 0.5
    assert settings(optim.Adam, foreach=False, betas=(0.8, 0.9))["betas"] == [0.8, 0.9]
    assert settings(optim.Adam, amsgrad=True)["kind"] == "amsgrad"
    assert settings(optim.AdamW)["weight_decay"] == 1e-2
    assert settings(optim.AdamW, amsgrad=True)["kind"] == "amsgradw"

    class Mine(torch.optim.SGD):  # type: ignore[misc, name-defined]
        pass

    stepped = optim.Adam(weights)
    weights[0].grad = torch.ones(2)
    stepped.step()
    for optimizer, expected in [
        (Mine(weights, lr=0.1), "Mine is a subclass of SGD"),
        (optim.LBFGS(weights), "LBFGS is no optimizer that the ps have"),
        (optim.Adamax(weights), "Adamax is no optimizer"),
        (optim.SGD(weights, lr=0.1, maximize=True), "no setting maximize = True"),
        (optim.SGD(weights, lr=0.1, differentiable=True), "differentiable = True"),
        (optim.SGD(weights, lr=0.0), "lr = 0.0"),
        (stepped, "has stepped before"),
    ]:
        with pytest.raises(errors.UntranslatableError, match=expected):
            optimizer_settings(optimizer, {id(weights[0]): "w"})


def test_parameter_groups_become_groups_of_the_job() -> None:
    a, b, c, frozen = (torch.zeros(2, requires_grad=at < 3) for at in range(4))
    names = {id(a): "a", id(b): "b", id(c): "c"}

    def settings(kind: str, *groups: dict[str, Any], **options: Any) -> dict[str, Any]:
        # torch writes its defaults into what it is given.
        given = [dict(group) for group in groups]
        return optimizer_settings(getattr(torch.optim, kind)(given, **options), names)

    first: dict[str, Any] = {"params": [a]}
    rest: dict[str, Any] = {"params": [b, frozen, c]}
    assert settings("AdamW", first, rest | {"weight_decay": 0.0, "lr": 0.5}, lr=0.1)["groups"] == [
        {"tensors": ["b", "c"], "learning_rate": 0.5, "weight_decay": 0.0}
    ]
    assert "groups" not in settings("Adam", first, rest | {"foreach": True})
    both = ({"params": [frozen], "lr": 0.0}, {"params": [b]}, {"params": [a, c], "momentum": 0.8})
    assert settings("SGD", *both, lr=0.1, momentum=0.9) == {
        "kind": "momentum",
        "learning_rate": 0.1,
        "momentum": 0.9,
        "weight_decay": 0.0,
        "dampening": 0.0,
        "groups": [{"tensors": ["a", "c"], "momentum": 0.8}],
    }
    refused: list[tuple[str, dict[str, Any], str]] = [
        ("SGD", {"momentum": 0.9}, "groups 0 and 1 have different momentum"),
        ("SGD", {"momentum": 0.9, "nesterov": True}, "groups 0 and 1 have different nesterov"),
        ("Adam", {"amsgrad": True}, r"different amsgrad \(False and True\)"),
        ("Adam", {"decoupled_weight_decay": True}, "different decoupled_weight_decay"),
        ("RMSprop", {"centered": True}, "different centered"),
        ("RMSprop", {"momentum": 0.9}, "different momentum"),
        ("Adam", {"maximize": True}, "parameter group 1: the ps have no setting maximize"),
        ("Adam", {"lr": 0.0}, "parameter group 1: lr = 0.0"),
    ]
    for kind, own, expected in refused:
        with pytest.raises(errors.UntranslatableError, match=expected):
            settings(kind, first, rest | own, lr=0.1)


def test_schedulers_that_cannot_be_tabled_are_refused_by_name() -> None:
    weights = [torch.zeros(2, requires_grad=True)]
    optimizer = torch.optim.SGD(weights, lr=0.1, momentum=0.9)
    other = torch.optim.SGD(weights, lr=0.1)
    schedulers = torch.optim.lr_scheduler
    step = schedulers.StepLR(optimizer, 1, 0.5)
    table = {"kind": "table", "table": [(0, 1.0), (3, 0.5), (6, 0.25)]}
    assert schedule_settings(step, optimizer, 8, 3) == [table]
    constant = schedulers.StepLR(optimizer, 99)
    assert schedule_settings(constant, optimizer, 8, 3) == [{"kind": "constant"}]
    last = [torch.zeros(2, requires_grad=True)]
    two: list[dict[str, Any]] = [{"params": weights}, {"params": last, "lr": 0.4}]
    grouped = torch.optim.SGD(two, lr=0.1)
    each = schedulers.LambdaLR(grouped, [lambda epoch: 0.5**epoch, lambda epoch: 1.0])
    assert schedule_settings(each, grouped, 8, 3) == [table, {"kind": "constant"}]
    names = {id(group["params"][0]): name for group, name in zip(two, "ab", strict=True)}
    assert optimizer_settings(grouped, names, [table, {"kind": "constant"}])["groups"] == [
        {"tensors": ["b"], "learning_rate": 0.4, "schedule": {"kind": "constant"}}
    ]
    assert optimizer_settings(grouped, names, [table, table])["groups"] == [
        {"tensors": ["b"], "learning_rate": 0.4}
    ]
    for scheduler, expected in [
        (schedulers.ReduceLROnPlateau(optimizer), "ReduceLROnPlateau looks at metrics"),
        (schedulers.StepLR(other, 1), "belongs to another optimizer"),
        (schedulers.ExponentialLR(optimizer, 0.9999), "more than 65536 times"),
        (schedulers.OneCycleLR(optimizer, 0.2, 9), "changes momentum too"),
        (3, "scheduler int is none of"),
    ]:
        with pytest.raises(errors.UntranslatableError, match=expected):
            schedule_settings(scheduler, optimizer, 70_000, 1)


def test_models_and_settings_that_cannot_be_trained_are_refused_by_name() -> None:
    def join(model: Any, **options: Any) -> None:
        tensors = model.parameters() if isinstance(model, nn.Module) else []
        optimizer = options.pop("optimizer", None) or torch.optim.SGD(list(tensors), lr=0.1)
        ebbflow.join(model, optimizer, data(), **({"micro": 8, "epochs": 1} | options))

    frozen = network().requires_grad_(False)
    other = torch.optim.SGD(network().parameters(), lr=0.1)
    part = network()
    some = torch.optim.SGD(part[0].parameters(), lr=0.1)
    for model, options, error, expected in [
        (frozen, {}, ValueError, "nothing to train"),
        (network().double(), {}, ValueError, "`0.weight` is torch.float64"),
        (lambda x: x, {"optimizer": other}, TypeError, "expected a torch.nn.Module"),
        (part, {"optimizer": some}, ValueError, "`2.weight` requires a gradient and is not among"),
        (network(), {"state": ["nope"]}, ValueError, "`nope` is no persistent buffer"),
        (network(), {"micro": None}, ValueError, "micro: missing"),
        (network(), {"mode": "fast"}, ValueError, "mode = 'fast'"),
        (network(), {"epochs": 0}, ValueError, "epochs: 0 would train nothing"),
        (network(), {"effective": 4}, ValueError, "batch.effective = 4 is below"),
        (network(), {"scheduler_every": "day"}, ValueError, "scheduler_every = 'day'"),
    ]:
        with pytest.raises(error, match=expected):
            join(model, **options)


def test_seeds_are_a_function_of_the_position() -> None:
    def draw(*position: int) -> float:
        seed_all(*position)
        return float(torch.rand(()))

    assert draw(1, 2, 3) == draw(1, 2, 3)
    assert len({draw(1, 2, 3), draw(1, 3, 2), draw(2, 2, 3), draw(1, 2)}) == 4


def test_a_loop_tells_the_device_of_its_model(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Torch(network(), ())
    facts, results = engine.numerics(1)
    assert engine.device() == ("cpu", 0)
    monkeypatch.setattr(Torch, "cuda", lambda _: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "A100")
    memory = SimpleNamespace(total_memory=7)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: memory)
    monkeypatch.delenv("EBBFLOW_DEVICE", raising=False)
    assert engine.device() == ("cuda:0", 7)
    monkeypatch.setenv("EBBFLOW_DEVICE", "cuda:2")
    assert engine.device() == ("cuda:2", 7)
    assert engine.numerics(1) == (f"{facts}, A100, CUDA {torch.version.cuda}", results)


def test_the_summary_names_the_class_of_the_library_that_computed() -> None:
    model = network()
    engine = Torch(model, ())
    before = engine.use_threads(1)
    try:
        facts, results = engine.numerics(1)
        torch.set_default_device("meta")
        assert engine.numerics(1) == (facts, results)
    finally:
        torch.set_default_device(None)
        engine.use_threads(before)
    job, _ = train(model, torch.optim.SGD(model.parameters(), lr=0.1), epochs=1)
    assert job.summary is not None
    (numerics,) = job.summary["numerics"]
    assert (numerics["version"], numerics["facts"]) == (0, facts)
    assert numerics["class"] == hashlib.sha256(facts.encode() + b"\0" + results).hexdigest()[:12]


# S1-04
def test_the_number_of_a_device_is_that_of_the_host_if_a_launcher_says_it() -> None:
    assert name_on_host(0, {"EBBFLOW_DEVICE": "cuda:2"}) == "cuda:2"
    assert name_on_host(0, {}) == "cuda:0"
    # A process that sees several devices has not got one from a launcher.
    assert name_on_host(1, {"EBBFLOW_DEVICE": "cuda:2"}) == "cuda:1"


@pytest.mark.parametrize(
    ("kind", "said"), [("gpu", "expected one of cpu, cuda"), ("cuda", "this process is on cpu")]
)
def test_a_device_that_the_process_has_not_is_refused(kind: str, said: str) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=said):
        ebbflow.join(model, optimizer, data(), micro=8, epochs=1, fleet_device=kind)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"ps_device": "gpu"}, "expected one of cpu, cuda"),
        ({"ps_device": "cuda"}, r"is on cpu; move it with model\.cuda\(\)"),
        ({"ps_bytes_max": 1 << 30}, "only with ps_device='cuda'"),
    ],
)
def test_memory_that_the_ps_cannot_have_is_refused(given: dict[str, Any], said: str) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=said):
        ebbflow.join(model, optimizer, data(), micro=8, epochs=1, **given)
    assert bytes_of_ps("cuda", None, "cuda:0") == 0
    with pytest.raises(ValueError, match="expected at least 1 byte"):
        bytes_of_ps("cuda", 0, "cuda:0")
