"""``python -m ebbflow.launchers``: what ``ebb run SCRIPT.py --on PLATFORM`` becomes."""

from __future__ import annotations

import argparse
import secrets
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from ebbflow._launched import end_with
from ebbflow.errors import Error, InvalidJobError, OutputError
from ebbflow.launchers import NAMES, Settings, platform
from ebbflow.launchers.cluster import Plan, Stopped, train
from ebbflow.launchers.platform import Mount

__all__ = ["main"]

_FAILURE = 1
_WRONG_ARGUMENT = 2

#: Most processes of a launch, and most processors of one of them.
_COUNT_MAX = 256


def main(arguments: Sequence[str] | None = None) -> int:
    """Launch a script and return the exit code. What follows ``--`` are the script and its own."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    # Only the first `--` is for this program, which old versions of argparse do not know.
    end = arguments.index("--") if "--" in arguments else len(arguments)
    try:
        given = _parser().parse_args(arguments[:end])
        script, *given.arguments = arguments[end + 1 :] or [""]
        given.script = Path(script)
        if given.parent is not None and not end_with(given.parent):
            return _FAILURE
        return _run(given)
    except InvalidJobError as error:
        code, what = _WRONG_ARGUMENT, str(error)
    except Error as error:
        code, what = _FAILURE, str(error)
    except Stopped as stopped:
        return 128 + stopped.number
    print(f"error: {what}", file=sys.stderr, flush=True)
    return code


def _run(given: argparse.Namespace) -> int:
    script: Path = given.script
    if script.suffix != ".py" or not script.is_file():
        raise InvalidJobError(f"{script}: no script; expected a file whose name ends in .py")
    out: Path = given.out.absolute()
    folder = _folder(out)
    with tempfile.TemporaryDirectory(
        prefix="ebb-", dir=folder, ignore_cleanup_errors=True
    ) as private:
        settings = Settings(
            name=f"ebb-{secrets.token_hex(4)}",
            folder=Path(private),
            out=out,
            python=given.python,
            cpus=given.cpus,
            gpu=given.gpu,
            image=given.image,
            mounts=[Mount.parse(text) for text in given.mount],
        )
        plan = Plan(
            script=script.absolute(),
            arguments=given.arguments,
            workers=given.workers,
            ps=given.ps,
            out=out,
            python=given.python,
            environment=given.env,
            json=given.json,
            cpus=given.cpus,
            gpu=given.gpu,
        )
        return train(plan, platform(given.on, settings), _say)


def _folder(out: Path) -> Path:
    """Make the folder for launches in the folder for results. It does not travel with a script."""
    folder = out / "launch"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".gitignore").write_text("*\n")
    except OSError as error:
        raise OutputError(f"--out {out}: {error}") from error
    return folder


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InvalidJobError(message)


def _count(text: str) -> int:
    count = int(text)
    if not 1 <= count <= _COUNT_MAX:
        raise argparse.ArgumentTypeError(f"{count}: expected 1 to {_COUNT_MAX}")
    return count


def _parser() -> _Parser:
    parser = _Parser(prog="ebb run", allow_abbrev=False)
    parser.add_argument("--on", required=True, choices=NAMES)
    parser.add_argument("--workers", type=_count, default=1)
    parser.add_argument("--ps", type=_count, default=1)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--python")
    parser.add_argument("--env", action="append", default=[])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--cpus", type=_count, default=1)
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--image")
    parser.add_argument("--mount", action="append", default=[])
    parser.add_argument("--parent", type=int)
    return parser


if __name__ == "__main__":
    sys.exit(main())
