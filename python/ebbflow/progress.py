"""The progress of a job: one live line on a terminal, a bar in a notebook."""

from __future__ import annotations

import html
import shutil
import sys
from types import TracebackType
from typing import Any, TextIO

from ebbflow.status import Event

__all__ = ["Progress"]

#: Characters of the bar on a terminal.
_WIDTH = 20


class Progress:
    """Shows the events of one job, until it is closed.

    Args:
        shown: ``True`` shows it anywhere: as a line for each tenth of the steps where there is
            neither a terminal nor a notebook. ``None`` shows nothing there. ``False`` never shows
            anything.
        stream: A terminal, or a file for lines.
    """

    def __init__(self, shown: bool | None = None, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._notebook = _Notebook.here() if shown is not False and stream is None else None
        self._live = shown is not False and self._notebook is None and self._stream.isatty()
        self._plain = shown is True and not self._live and self._notebook is None
        self._tenth = -1
        self._files_tenth = 0
        self._first: tuple[int, int] | None = None
        self._is_line_open = False

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def event(self, event: Event) -> None:
        """Show an event."""
        if event.kind == "train":
            self._train(event)
            return
        if event.kind == "indexing":
            self._indexing(event)
            return
        if event.kind == "state":
            # The pace of before says nothing of the pace after a pause.
            self._first = None
        text = line(event)
        if text is not None:
            self._line(text)

    def close(self) -> None:
        """End the live line."""
        if self._is_line_open:
            self._is_line_open = False
            self._write("\n")

    def _train(self, event: Event) -> None:
        done, steps = event["step"] + 1, event.total_steps
        first = self._first = self._first or (event.unix_ms, done)
        text = training(event, seconds_left(first, (event.unix_ms, done), steps))
        self._show(done, steps, text)
        if self._plain and steps and done * 10 // steps > self._tenth:
            self._tenth = done * 10 // steps
            self._write(f"{text}\n")

    def _indexing(self, event: Event) -> None:
        done, files = event["files_done"], event["files"]
        text = f"indexing: {done} of {files} files, {event['bytes_done'] / 2**20:.1f} MiB"
        self._show(done, files, text)
        if self._plain and files and done * 10 // files > self._files_tenth:
            self._files_tenth = done * 10 // files
            self._write(f"{text}\n")

    def _show(self, done: int, of: int, text: str) -> None:
        """Show a bar in a notebook or on a terminal."""
        if self._notebook is not None:
            self._notebook.show(done, of, text)
        elif self._live:
            width = shutil.get_terminal_size().columns
            self._is_line_open = True
            self._write(f"\r\x1b[2K{f'{bar(done, of)} {text}'[: width - 1]}")

    def _line(self, text: str) -> None:
        if self._notebook is not None:
            self._notebook.note(text)
        elif self._live:
            self._is_line_open = False
            self._write(f"\r\x1b[2K{text}\n")
        elif self._plain:
            self._write(f"{text}\n")

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


def training(event: Event, left: float | None) -> str:
    """Return the state of training on one line. Epochs and steps count from 1 for people."""
    loss = event["loss"]
    parts = [
        f"epoch {event['epoch'] + 1}",
        f"step {event['step'] + 1}/{event.total_steps}",
        f"loss {'not finite' if loss is None else format(loss, '.4g')}",
        *([] if left is None else [f"{duration(left)} left"]),
        f"{event['samples_per_second'] or 0:.0f} samples/s",
        f"{event['workers']} worker{'' if event['workers'] == 1 else 's'}",
    ]
    return ", ".join(parts)


def line(event: Event) -> str | None:
    """Return the line of an event that is no training; ``None`` for one that has no line."""
    if event.kind == "state":
        return f"{event['state']}: {event['reason']}" if event["reason"] else str(event["state"])
    if event.kind == "eval":
        skipped = ("event", "epoch", "step", "sequence", "unix_ms")
        numbers = [
            f"{name} {'not finite' if value is None else format(value, '.4g')}"
            for name, value in event.items()
            if name not in skipped and (value is None or isinstance(value, int | float))
        ]
        return f"epoch {event['epoch'] + 1} done, validation: {', '.join(numbers)}"
    if event.kind == "fleet":
        return f"fleet: {event['workers']} workers: {event['reason']}"
    if event.kind == "warning":
        return f"warning: {event['message']}"
    if event.kind == "checkpoint":
        return f"checkpoint of version {event['version']} ({event['bytes']} bytes)"
    return None


def bar(done: int, steps: int) -> str:
    """Return a bar of characters, of which the part that is done is filled."""
    filled = min(_WIDTH, done * _WIDTH // steps) if steps else 0
    return f"[{'#' * filled}{'.' * (_WIDTH - filled)}]"


def seconds_left(first: tuple[int, int], now: tuple[int, int], steps: int) -> float | None:
    """Return the time until the last step, in seconds, at the mean pace since ``first``.

    Args:
        first: A time in milliseconds, and the number of steps that were done then.
        now: The same two numbers of now.
        steps: The number of steps of the job.
    """
    done = now[1] - first[1]
    if done <= 0 or not steps:
        return None
    return (now[0] - first[0]) / 1e3 * max(0, steps - now[1]) / done


def duration(seconds: float) -> str:
    """Return a time for people: ``7.2 s``, ``3 min 07 s``, ``2 h 05 min``."""
    whole = round(seconds)
    if whole < 120:
        return f"{seconds:.1f} s"
    if whole < 7200:
        return f"{whole // 60} min {whole % 60:02} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02} min"


class _Notebook:
    """A bar and the newest lines, as the output of a notebook's cell."""

    #: Lines below the bar.
    _LINES = 5

    def __init__(self, display: Any, html_of: Any) -> None:
        self._html = html_of
        self._bar = ""
        self._lines: list[str] = []
        self._handle = display(html_of(""), display_id=True)

    @classmethod
    def here(cls) -> _Notebook | None:
        """Return the output of this cell; ``None`` outside of notebooks."""
        shell = sys.modules.get("IPython.core.getipython")
        running = shell.get_ipython() if shell is not None else None
        # Terminals of IPython have no `kernel`.
        if running is None or not hasattr(running, "kernel"):
            return None
        from IPython.display import HTML, display

        return cls(display, HTML)

    def show(self, done: int, steps: int, text: str) -> None:
        self._bar = (
            f'<progress value="{done}" max="{max(steps, 1)}"></progress> {html.escape(text)}'
        )
        self._update()

    def note(self, text: str) -> None:
        self._lines = [*self._lines[1 - self._LINES :], html.escape(text)]
        self._update()

    def _update(self) -> None:
        if self._handle is not None:
            self._handle.update(self._html("<br>".join([self._bar, *self._lines])))
