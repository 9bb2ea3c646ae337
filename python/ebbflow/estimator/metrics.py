"""Numbers that regular expressions find in what a script prints. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ebbflow.errors import InvalidJobError

#: What stands before a line of a process: ``worker-0 | `` on this host, ``train-1-0 | `` elsewhere.
_PREFIX = re.compile(r"\S+-(\d+) \| ")


class Metric(NamedTuple):
    """A number that a process printed.

    Attributes:
        timestamp: When it was read, in seconds since 1970.
        metric_name: Name of its definition.
        value: The number.
        worker: The process, such as ``worker-0`` for the host ``algo-1``.
    """

    timestamp: float
    metric_name: str
    value: float
    worker: str


class Definitions:
    """Names and regular expressions, as SageMaker's ``metric_definitions``.

    Args:
        definitions: Dictionaries with ``Name`` and ``Regex``. The first group of the expression is
            the number.

    Raises:
        InvalidJobError: A definition is wrong.
    """

    def __init__(self, definitions: Sequence[Mapping[str, str]] | None) -> None:
        self._patterns: dict[str, re.Pattern[str]] = {}
        for index, definition in enumerate(definitions or ()):
            where = f"metric_definitions[{index}]"
            if not isinstance(definition, Mapping) or set(definition) != {"Name", "Regex"}:
                raise InvalidJobError(f"{where} = {definition!r}: expected Name and Regex")
            name = definition["Name"]
            if name in self._patterns:
                raise InvalidJobError(f"{where}: there is another metric {name!r}")
            regex = definition["Regex"]
            try:
                pattern = re.compile(regex)
            except (re.error, TypeError) as error:
                raise InvalidJobError(f"{where}: Regex = {regex!r}: {error}") from error
            if pattern.groups == 0:
                raise InvalidJobError(
                    f"{where}: Regex = {regex!r} has no group; put the number in brackets"
                )
            self._patterns[name] = pattern

    def find(self, line: str, timestamp: float) -> list[Metric]:
        """Return the metrics in a line of output, one at most for each definition.

        Lines of the launcher have none, nor has a group that is no number.
        """
        prefix = _PREFIX.match(line)
        if prefix is None:
            return []
        found = []
        for name, pattern in self._patterns.items():
            match = pattern.search(line, prefix.end())
            try:
                value = float(match[1]) if match is not None else None
            except (TypeError, ValueError):
                continue
            if value is not None:
                found.append(Metric(timestamp, name, value, f"worker-{prefix[1]}"))
        return found
