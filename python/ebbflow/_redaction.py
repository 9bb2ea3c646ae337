"""Takes the values of a script's secrets out of what a process tells the master."""

from __future__ import annotations

import os
from collections.abc import Mapping

# Shorter lines of a value are found in many harmless texts.
_SHORTEST = 8


def redacted(text: str, environment: Mapping[str, str] = os.environ) -> str:
    """Return a text without secrets. The variable ``EBBFLOW_SECRETS`` has their names.

    >>> redacted("key=hunter2-and-more!", {"EBBFLOW_SECRETS": "KEY", "KEY": "hunter2-and-more"})
    'key=[secret KEY]!'
    """
    names = [name for name in environment.get("EBBFLOW_SECRETS", "").split(",") if name]
    lines = [(line, name) for name in names for line in environment.get(name, "").splitlines()]
    # A secret may be a part of another one.
    for line, name in sorted(lines, key=lambda found: -len(found[0].encode())):
        if len(line.encode()) >= _SHORTEST:
            text = text.replace(line, f"[secret {name}]")
    return text
