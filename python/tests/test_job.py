"""Dictionaries become job files."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from ebbflow._job import prepare, toml
from ebbflow.errors import InvalidJobError


def read(value: object) -> object:
    tomllib = pytest.importorskip("tomllib")
    found: object = tomllib.loads(f"value = {toml(value)}")["value"]
    return found


@pytest.mark.parametrize(
    "value",
    [
        True,
        0,
        -7,
        2**40,
        0.1,
        1e-9,
        1e300,
        1.0,
        "plain",
        'quotes " and \\ and \n and \x00 \x7f \u2028 é 🙂',
        [],
        [1, [2.5, "x"]],
        {},
        {"a b": {"c.d": [True, {"e": "f"}]}},
    ],
)
def test_values_come_back_from_toml_as_they_were(value: object) -> None:
    found = read(value)
    assert found == value
    assert type(found) is type(value)


def test_numbers_that_are_not_finite_and_values_of_libraries_have_their_text() -> None:
    found = read([math.inf, -math.inf])
    assert found == [math.inf, -math.inf]
    assert toml(math.nan) == "nan"
    assert read(Path("a/b")) == "a/b"
    assert read(np.float32(0.5)) == 0.5
    assert read(np.arange(3)) == [0, 1, 2]
    assert read((1, 2)) == [1, 2]


@pytest.mark.parametrize("value", [None, object(), b"x", {1: 2}, [None]])
def test_a_value_that_no_job_file_has_is_named(value: object) -> None:
    with pytest.raises(InvalidJobError, match=r"expected|is no str"):
        toml(value)


def test_a_job_has_its_text_its_changes_and_the_settings_of_stores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_REGION", "eu-1")
    job = prepare({"name": "x", "model": {"builtin": "mlp"}}, {"a.b": 1, "c": "d"}, "anyway")
    assert job["text"] == '"name" = "x"\n"model" = { "builtin" = "mlp" }\n'
    assert job["overrides"] == ["a.b=1", 'c="d"']
    assert job["start"] == "resume_anyway"
    stores = job["stores"]
    assert isinstance(stores, dict)
    assert stores["AWS_REGION"] == "eu-1"
    assert "PATH" not in stores
