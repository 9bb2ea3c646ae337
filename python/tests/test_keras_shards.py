"""Data sets of `tf.data` as the data of a job."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from .conftest import keras_on, needs

BACKEND = keras_on("torch", "tensorflow")

needs(BACKEND)
keras = needs("keras")
tf = needs("tensorflow")

import ebbflow.keras  # noqa: E402
from ebbflow import errors  # noqa: E402
from ebbflow.keras import shards as shards_module  # noqa: E402
from ebbflow.keras.shards import Reader  # noqa: E402

RECORDS = [50, 10, 40, 30]

LOSS = keras.losses.MeanSquaredError()


def number_of(shard: int) -> int:
    """Return the number of a shard's first record."""
    return sum(RECORDS[:shard])


def make(shard: int) -> Any:
    """Return records of which the first feature is their number."""
    first = number_of(shard)
    numbers = tf.data.Dataset.range(first, first + RECORDS[shard])
    return numbers.map(lambda number: (tf.stack([number, 1]), number / 100))


def network() -> Any:
    keras.utils.set_random_seed(7)
    return keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, name="out")], name="network")


def loss_of(model: Any, x: Any, y: Any) -> Any:
    return LOSS(y, model(x, training=True))


def trained(shards: ebbflow.keras.Shards, **options: Any) -> tuple[Any, list[list[int]]]:
    """Train two epochs; returns the job and the records of each batch."""
    model, seen = network(), []
    given: dict[str, Any] = {"epochs": 2, "micro": 4, "effective": 8, "seed": 2} | options
    with ebbflow.keras.join(model, keras.optimizers.SGD(1e-6), shards, **given) as job:
        for epoch in job.epochs():
            for batch in epoch:
                x, y = batch
                assert x[:, 0].tolist() == batch.records
                assert (y * 100).round().astype(int).tolist() == batch.records
                seen.append(batch.records)
                job.step(functools.partial(loss_of, model, x.astype(np.float32), y))
    return job, seen


def test_each_record_is_trained_once_in_an_epoch_and_shards_are_read_forward() -> None:
    opened: Counter[int] = Counter()

    def counted(shard: int) -> Any:
        opened[shard] += 1
        return make(shard)

    shards = ebbflow.keras.Shards(counted, RECORDS, window=8, lanes=2)
    job, seen = trained(shards)
    for epoch in range(2):
        in_epoch = [record for batch in seen[epoch * 33 :][:33] for record in batch]
        assert sorted(in_epoch) == list(range(130))
    assert seen[:33] != seen[33:] and seen[0] != list(range(4))
    # Once for each epoch, and again where another lane pushed a shard out.
    assert max(opened.values()) <= 4
    assert job.summary is not None and job.summary["samples_applied"] == 260
    again, same = trained(ebbflow.keras.Shards(make, RECORDS, window=8, lanes=2))
    assert same == seen and again.model_sha256 == job.model_sha256


def test_without_shuffle_records_keep_their_order_and_evaluation_reads_shards_too() -> None:
    shards = ebbflow.keras.Shards(make, RECORDS)
    _, seen = trained(shards, shuffle=False, epochs=1)
    assert [record for batch in seen for record in batch] == list(range(130))
    model = network()
    model.compile(keras.optimizers.SGD(1e-6), "mse", metrics=["mae"])
    job = ebbflow.keras.fit(model, shards, shards, epochs=1, batch_size=8)
    x = np.stack([np.arange(130), np.ones(130)], 1).astype(np.float32)
    own = model.evaluate(x, np.arange(130) / 100, verbose=0, return_dict=True)
    assert job.metrics["mae"] == pytest.approx(own["mae"], rel=1e-5)


def unsteady() -> Callable[[int], Any]:
    made = iter(range(1000))
    return lambda shard: make(shard).map(lambda x, y: (x + next(made), y))


def changed_later(record: int) -> Callable[[int], Any]:
    """Return a function whose shards have another value in a record from the second time on."""
    made: Counter[int] = Counter()

    def make_changed(shard: int) -> Any:
        made[shard] += 1
        other = number_of(shard) + record if made[shard] > 1 else -1

        def with_words(x: Any, y: Any) -> Any:
            number = x[0]
            words = tf.stack([tf.strings.as_string(number), "of", "the", "same"])
            return {"x": x, "words": words, "y": tf.where(number == other, y + 1, y)}

        return make(shard).map(with_words)

    return make_changed


def test_a_record_that_is_another_one_when_it_is_read_again_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def reader() -> Reader:
        shards = ebbflow.keras.Shards(changed_later(37), RECORDS, window=2, lanes=1)
        return Reader(shards, "train_data")

    def read(reader: Reader, records: int) -> None:
        """Read so many records of the shard 2, one after the other."""
        for record in range(records):
            words = reader.load(0, [60 + record])["words"]
            assert words.tolist() == [[str(60 + record).encode(), b"of", b"the", b"same"]]

    whole = reader()
    read(whole, 40)
    read(whole, 37)
    for record in (37, 38):
        with pytest.raises(
            errors.RecordError,
            match=r"train_data: record 37 of shard 2 is another one than before; make\(shard\)",
        ):
            whole.load(0, [60 + record])
    # What was not read before is not compared with anything.
    part = reader()
    read(part, 37)
    read(part, 40)
    # The memory is bounded: 130 records have at most 20 checksums, of each seventh record.
    monkeypatch.setattr(shards_module, "_CHECKSUMS_MAX", 20)
    sparse = reader()
    read(sparse, 40)
    assert len(sparse._checksums[2]) == 6
    read(sparse, 40)


def test_data_sets_that_do_not_repeat_are_refused() -> None:
    cases: list[tuple[Any, list[int], type[Exception], str]] = [
        (
            make,
            [60, *RECORDS[1:]],
            errors.RecordError,
            "shard 0 ended after 50 records, expected 60; give Shards the number",
        ),
        (lambda shard: make(shard).take(0), RECORDS, errors.RecordError, "ended after 0 records"),
        (lambda shard: [1, 2], RECORDS, TypeError, "makes a tf.data.Dataset, found list"),
    ]
    for function, records, error, expected in cases:
        reader = Reader(ebbflow.keras.Shards(function, records), "train_data")
        with pytest.raises(error, match=expected):
            reader.load(0, list(range(records[0])))
    reader = Reader(ebbflow.keras.Shards(unsteady(), RECORDS, window=2, lanes=1), "train_data")
    reader.load(0, list(range(20)))
    with pytest.raises(errors.RecordError, match="record 0 of shard 0 is another one than before"):
        reader.load(0, [0])
    with pytest.raises(TypeError, match=r"give ebbflow.keras.Shards with a function that makes it"):
        trained(make(0))
    for records in ([], [3, 0]):
        with pytest.raises(ValueError, match="the number of records of each shard"):
            ebbflow.keras.Shards(make, records)
    with pytest.raises(ValueError, match="window = 0"):
        ebbflow.keras.Shards(make, RECORDS, window=0)


def test_a_shard_is_read_again_for_a_record_that_was_passed() -> None:
    reader = Reader(ebbflow.keras.Shards(make, RECORDS, window=2, lanes=1), "train_data")
    for records in ([0, 1], [48, 49], [3, 47], [59, 129, 0, 60], [5]):
        x, _ = reader.load(0, records)
        assert x[:, 0].tolist() == records
    reader.close()
