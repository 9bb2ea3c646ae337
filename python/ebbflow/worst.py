"""The records with the largest losses in the last evaluation of a job."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Any

__all__ = ["Worst"]

#: Columns of a table, in their order.
_COLUMNS = ("record", "file", "row", "loss", "label", "outputs", "places", "text", "image")


class Worst(Sequence[dict[str, Any]]):
    """The worst records of a job, the largest loss first, of one validation set after the other.

    Each is a dictionary with the fields of ``worst.jsonl``. Where an input is an image, or the loop
    returned ``images``, ``record["image"]`` has the bytes of a PNG file.

    Attributes:
        summary: What TensorBoard shows of them: an encoded message ``Summary``.
    """

    def __init__(self, records: list[tuple[str, bytes | None]], summary: bytes) -> None:
        self._records = [
            json.loads(line) | ({} if image is None else {"image": image})
            for line, image in records
        ]
        self.summary = summary

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: Any) -> Any:
        return self._records[index]

    def __repr__(self) -> str:
        return f"<{len(self)} worst records>"

    def tables(self) -> Iterator[tuple[str, list[str], list[list[Any]]]]:
        """Return name, columns and rows of each validation set.

        The name is that of the set, or ``validation``. Cells of a column are numbers, texts, or in
        the column ``image`` the bytes of PNG files, and may be ``None``. Of a column with lists
        each cell is a text in JSON.
        """
        for name, found in itertools.groupby(
            self._records, key=lambda record: record.get("set", "validation")
        ):
            records = list(found)
            columns = [each for each in _COLUMNS if any(each in record for record in records)]
            cells = [_cells([record.get(column) for record in records]) for column in columns]
            yield str(name), columns, [list(row) for row in zip(*cells, strict=True)]


def _cells(values: list[Any]) -> list[Any]:
    if not any(isinstance(value, list) for value in values):
        return values
    return [None if value is None else json.dumps(value) for value in values]
