"""Metrics as a table, and weights without a library."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ebbflow.errors import Error, OutputError
from ebbflow.result import Metrics, Result
from ebbflow.status import Status

from .conftest import needs

ROWS: list[dict[str, Any]] = [
    {"event": "state", "state": "running"},
    {"event": "train", "step": 0, "loss": 1.5, "workers": 1},
    {"event": "train", "step": 1, "loss": None, "workers": 2},
    {"event": "fleet", "generation": 2, "workers": 2, "reason": "one came"},
    {"event": "eval", "epoch": 0, "step": 2, "loss": 1, "accuracy": 0.5},
]


def safetensors(tensors: dict[str, tuple[str, list[int], bytes]]) -> bytes:
    """Return a file in this format, written from its definition."""
    header: dict[str, object] = {"__metadata__": {"x": "y"}}
    data = b""
    for name, (kind, shape, content) in tensors.items():
        offsets = [len(data), len(data) + len(content)]
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": offsets}
        data += content
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def result(content: bytes | None, rows: list[dict[str, Any]] = ROWS) -> Result:
    status = Status(job="x-1", status="succeeded", reason="done", steps_done=2, final={"loss": 1.0})
    return Result(status, Metrics(rows), weights=lambda: content)


def test_a_table_has_rows_and_columns_of_numbers() -> None:
    metrics = Metrics(ROWS)
    assert len(metrics) == 4
    assert metrics[0] == ROWS[1]
    assert metrics[1:] == ROWS[2:]
    assert repr(metrics) == "Metrics(2 train, 1 eval, 1 fleet)"
    train = metrics.arrays("train")
    assert train["step"].dtype == np.int64
    assert train["loss"].dtype == np.float64
    np.testing.assert_equal(train["loss"], [1.5, np.nan])
    assert "reason" not in metrics.arrays("fleet")
    assert metrics.arrays("rewind") == {}


def test_every_type_is_read_and_bf16_becomes_f32_exactly() -> None:
    values = {
        "f32": ("F32", np.array([[1.5, -2.0]], "<f4")),
        "f16": ("F16", np.array([0.5], "<f2")),
        "f64": ("F64", np.array(3.25, "<f8")),
        "i64": ("I64", np.array([-1, 2], "<i8")),
        "u8": ("U8", np.array([255], "u1")),
        "bool": ("BOOL", np.array([True, False])),
        "empty": ("F32", np.zeros((0, 3), "<f4")),
    }
    tensors = {
        name: (kind, list(array.shape), array.tobytes()) for name, (kind, array) in values.items()
    }
    tensors["bf16"] = ("BF16", [2], struct.pack("<HH", 0x3FC0, 0xC000))
    read = result(safetensors(tensors)).state_dict()
    assert list(read) == sorted(tensors)
    for name, (_, array) in values.items():
        assert read[name].shape == array.shape
        assert read[name].dtype == array.dtype
        assert np.array_equal(read[name], array)
    assert read["bf16"].dtype == np.float32
    assert read["bf16"].tolist() == [1.5, -2.0]


def test_torch_gets_tensors_of_the_types_in_the_file() -> None:
    torch = needs("torch")
    tensors = {"a": ("BF16", [1, 1], struct.pack("<H", 0x3FC0)), "e": ("F32", [0, 3], b"")}
    read = result(safetensors(tensors)).state_dict("torch")
    assert read["a"].dtype == torch.bfloat16
    assert read["a"].tolist() == [[1.5]]
    assert tuple(read["e"].shape) == (0, 3)


def test_another_framework_is_refused() -> None:
    with pytest.raises(ValueError, match="expected 'numpy' or 'torch'"):
        result(b"").state_dict("caffe")  # type: ignore[call-overload]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 16,
        safetensors({"a": ("F32", [1], b"1234")})[:-1],
        safetensors({"a": ("F8", [1], b"1")}),
        safetensors({"a": ("F32", [2], b"1234")}),
    ],
)
def test_what_is_no_model_is_an_error(content: bytes) -> None:
    with pytest.raises(OutputError, match="no safetensors file"):
        result(content).state_dict()


def test_a_job_without_a_model_says_so() -> None:
    with pytest.raises(Error, match="x-1 succeeded without a model: done"):
        result(None).weights()


def test_a_folder_without_a_result_is_named(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="no result of a job"):
        Result.read(tmp_path)


def test_a_plot_has_the_losses_and_the_other_metrics() -> None:
    matplotlib = needs("matplotlib")
    matplotlib.use("agg")
    losses, others = result(None).plot().axes
    assert [each.get_label() for each in losses.lines] == ["training", "validation"]
    assert [each.get_label() for each in others.lines] == ["accuracy"]
    assert result(None, []).plot().axes


def test_a_result_is_shown_on_one_line() -> None:
    assert repr(result(None)) == "<x-1 succeeded: 2 steps, loss 1>"
