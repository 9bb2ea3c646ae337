"""What a job left: its metrics, its weights, and its end."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from ebbflow import _weights
from ebbflow.errors import Error, OutputError
from ebbflow.status import Status

if TYPE_CHECKING:
    import os

    import numpy as np

__all__ = ["Metrics", "Result"]

#: Events that are measurements, as in ``metrics.jsonl``.
_MEASUREMENTS = ("train", "eval", "fleet", "checkpoint", "rewind")

#: Fields of rows that name a row and measure nothing.
_NAMES = ("event", "sequence", "unix_ms")


class Metrics(Sequence[dict[str, Any]]):
    """A table of what was measured, in the order in which it happened.

    Each row is a dictionary; ``row["event"]`` is ``train``, ``eval``, ``fleet``, ``checkpoint`` or
    ``rewind``. Steps and epochs count from 0. A number that is not finite is ``None``.
    """

    def __init__(self, rows: Iterable[dict[str, Any]]) -> None:
        self._rows = [row for row in rows if row.get("event") in _MEASUREMENTS]

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self._rows)

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> list[dict[str, Any]]: ...
    def __getitem__(self, index: int | slice) -> dict[str, Any] | list[dict[str, Any]]:
        return self._rows[index]

    def __repr__(self) -> str:
        counts = {kind: len(self.rows(kind)) for kind in _MEASUREMENTS}
        return f"Metrics({', '.join(f'{count} {kind}' for kind, count in counts.items() if count)})"

    def rows(self, event: str) -> list[dict[str, Any]]:
        """Return the rows of one event, such as ``train`` or ``eval``."""
        return [row for row in self._rows if row["event"] == event]

    def arrays(self, event: str) -> dict[str, np.ndarray[Any, Any]]:
        """Return the numbers of one event as columns.

        Each array has shape ``[rows]``. A column of whole numbers is int64. Any other one is
        float64, in which ``None`` and missing values are NaN. Texts are left out.
        """
        import numpy as np

        rows = self.rows(event)
        names = list(dict.fromkeys(name for row in rows for name in row if name not in _NAMES))
        arrays: dict[str, np.ndarray[Any, Any]] = {}
        for name in names:
            values = [row.get(name) for row in rows]
            if all(isinstance(value, int) for value in values):
                arrays[name] = np.array(values, dtype=np.int64)
            elif all(value is None or isinstance(value, int | float) for value in values):
                numbers = [float("nan") if value is None else value for value in values]
                arrays[name] = np.array(numbers, dtype=np.float64)
        return arrays


class Result:
    """The result of a job that ended.

    Attributes:
        status: The job's last state.
        metrics: What was measured, as a table.
        out: The folder with the job's files, or ``None`` if there is none.
    """

    def __init__(
        self,
        status: Status,
        metrics: Metrics,
        out: Path | None = None,
        weights: Callable[[], bytes | None] = lambda: None,
    ) -> None:
        self.status = status
        self.metrics = metrics
        self.out = out
        self._weights = weights

    def __repr__(self) -> str:
        final = ", ".join(f"{name} {value:.4g}" for name, value in self.final.items())
        return f"<{self.status.job} {self.status.state}: {self.status.steps_done} steps, {final}>"

    @classmethod
    def read(cls, out: str | os.PathLike[str]) -> Result:
        """Read the folder that ``ebb run --out`` or ``Client.fetch`` wrote.

        Raises:
            OutputError: The folder has no whole result.
        """
        out = Path(out)
        try:
            summary = json.loads((out / "summary.json").read_text(encoding="utf-8"))
            lines = (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
            rows = [json.loads(line) for line in lines]
        except (OSError, ValueError) as error:
            raise OutputError(f"{out}: no result of a job, or not a whole one: {error}") from error
        status = Status({"steps_done": summary["steps"], **summary})
        return cls(status, Metrics(rows), out, lambda: _read_model(out))

    @property
    def final(self) -> dict[str, float]:
        """Metrics of the last evaluation; without one, the training loss of the last step."""
        return self.status.final

    @property
    def model_sha256(self) -> str | None:
        """SHA-256 of the trained model. Two runs trained the same bits if theirs are equal."""
        return self.status.model_sha256

    def weights(self) -> bytes:
        """Return the trained model: the bytes of a safetensors file.

        Raises:
            Error: The job ended without a model.
        """
        content = self._weights()
        if content is None:
            raise Error(
                f"{self.status.job} {self.status.state} without a model: {self.status.reason}"
            )
        return content

    @overload
    def state_dict(self) -> dict[str, np.ndarray[Any, Any]]: ...
    @overload
    def state_dict(self, framework: Literal["numpy"]) -> dict[str, np.ndarray[Any, Any]]: ...
    @overload
    def state_dict(self, framework: Literal["torch"]) -> dict[str, Any]: ...
    def state_dict(self, framework: str = "numpy") -> dict[str, Any]:
        """Return a copy of every weight and state tensor by its name.

        Args:
            framework: ``numpy`` for arrays, ``torch`` for CPU tensors that
                ``Module.load_state_dict`` takes. NumPy lacks bf16: such values become float32,
                without loss.

        Raises:
            Error: The job ended without a model.
            ValueError: ``framework`` is another word.
        """
        if framework == "numpy":
            return _weights.to_numpy(self.weights())
        if framework == "torch":
            return _weights.to_torch(self.weights())
        raise ValueError(f"framework {framework!r}: expected 'numpy' or 'torch'")

    def plot(self) -> Any:
        """Draw the training loss and the metrics of evaluations over the steps.

        Returns:
            A figure of matplotlib, which has to be installed.
        """
        import matplotlib.pyplot as plt

        train, evaluation = self.metrics.arrays("train"), self.metrics.arrays("eval")
        others = [name for name in evaluation if name not in ("epoch", "step", "loss")]
        figure, axes = plt.subplots(
            1 + bool(others), 1, sharex=True, squeeze=False, layout="constrained"
        )
        losses = axes[0][0]
        for label, table in (("training", train), ("validation", evaluation)):
            if "loss" in table:
                losses.plot(table["step"], table["loss"], label=label)
        losses.set_ylabel("loss")
        for name in others:
            axes[1][0].plot(evaluation["step"], evaluation[name], label=name)
        for axis in axes.flat:
            if axis.lines:
                axis.legend()
        axes[-1][0].set_xlabel("step")
        losses.set_title(self.status.job)
        return figure


def _read_model(out: Path) -> bytes | None:
    model = out / "model.safetensors"
    try:
        return model.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise OutputError(f"{model}: {error}") from error
