"""How a process reaches a master: its URL, and what it shows and trusts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, TypeAlias

Path: TypeAlias = "str | os.PathLike[str]"


def secrets(
    token: str | None = None,
    token_file: Path | None = None,
    ca: Path | None = None,
    cert: Path | None = None,
    key: Path | None = None,
    insecure: bool | None = None,
) -> dict[str, Any]:
    """Return what a process shows and trusts. What is missing comes from variables of ``ebb``."""
    if token is None and token_file is None:
        token_file = os.environ.get("EBB_TOKEN_FILE") or None
    return {
        "token": token,
        "token_file": None if token is not None else token_file,
        "ca": ca or os.environ.get("EBB_TLS_CA") or None,
        "cert": cert or os.environ.get("EBB_TLS_CERT") or None,
        "key": key or os.environ.get("EBB_TLS_KEY") or None,
        "insecure": _is_insecure() if insecure is None else insecure,
    }


def full(urls: str, secrets: dict[str, Any]) -> str:
    """Return URLs in full: ``HOST:PORT`` becomes ``SCHEME://HOST:PORT``."""
    scheme = "http" if secrets["ca"] is None else "https"
    each = [url.strip().rstrip("/") for url in urls.split(",")]
    return ",".join(url if "://" in url else f"{scheme}://{url}" for url in each if url)


def agent_of(environment: Mapping[str, str]) -> int | None:
    """Return the descriptor by which a process of a submitted script reaches its agent.

    >>> agent_of({"EBBFLOW_AGENT": "7"}), agent_of({})
    (7, None)
    """
    number = environment.get("EBBFLOW_AGENT")
    return int(number) if number else None


def _is_insecure() -> bool:
    return os.environ.get("EBB_INSECURE") in ("1", "true", "yes")
