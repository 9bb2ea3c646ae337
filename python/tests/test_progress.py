"""What a user sees of a job while it trains."""

from __future__ import annotations

import io
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from ebbflow.progress import Progress, bar, duration, line, seconds_left, training
from ebbflow.status import Event


class Terminal(io.StringIO):
    """A stream that is a terminal."""

    def isatty(self) -> bool:
        return True


def train(step: int, loss: float | None = 0.5) -> Event:
    event = Event(
        event="train",
        step=step,
        epoch=0,
        loss=loss,
        samples=8,
        samples_per_second=99.6,
        workers=2,
        sequence=step + 1,
        unix_ms=1000 * step,
    )
    event.total_steps = 40
    return event


# S4-11
def test_a_terminal_has_one_live_line_with_everything() -> None:
    stream = Terminal()
    with Progress(stream=stream) as progress:
        progress.event(train(0))
        progress.event(train(19))
        progress.event(Event(event="warning", message="slow", sequence=21, unix_ms=0))
        progress.event(train(20))
    lines = stream.getvalue().split("\r\x1b[2K")
    assert lines[1].startswith("[....................] epoch 1, step 1/40, loss 0.5, 100 samples/s")
    assert lines[2].startswith("[##########..........] epoch 1, step 20/40, loss 0.5, 20.0 s left")
    assert lines[3] == "warning: slow\n"
    assert lines[4].endswith("\n")


def test_a_file_gets_a_line_for_each_tenth_if_asked_and_else_nothing() -> None:
    for shown, count in ((True, 11), (None, 0), (False, 0)):
        stream = io.StringIO()
        with Progress(shown, stream) as progress:
            for step in range(40):
                progress.event(train(step))
        assert len(stream.getvalue().splitlines()) == count


def test_files_that_are_indexed_have_the_live_line_before_training() -> None:
    def indexing(done: int) -> Event:
        return Event(
            event="indexing",
            files_done=done,
            files=40,
            bytes_done=done << 20,
            sequence=done,
            unix_ms=0,
        )

    stream = Terminal()
    with Progress(stream=stream) as progress:
        progress.event(indexing(20))
        progress.event(train(0))
    lines = stream.getvalue().split("\r\x1b[2K")
    assert lines[1] == "[##########..........] indexing: 20 of 40 files, 20.0 MiB"
    plain = io.StringIO()
    with Progress(True, plain) as progress:
        for done in range(1, 40):
            progress.event(indexing(done))
    assert len(plain.getvalue().splitlines()) == 9


def test_a_terminal_stays_empty_if_nothing_is_to_be_shown() -> None:
    stream = Terminal()
    with Progress(False, stream) as progress:
        progress.event(train(0))
        progress.event(Event(event="warning", message="slow", sequence=2, unix_ms=0))
    assert stream.getvalue() == ""


def test_a_notebook_has_one_bar_and_the_newest_lines_below_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown: list[str] = []

    def display(first: str, display_id: bool) -> SimpleNamespace:
        shown.append(first)
        return SimpleNamespace(update=shown.append)

    modules: dict[str, dict[str, Any]] = {
        "IPython.core.getipython": {"get_ipython": lambda: SimpleNamespace(kernel=None)},
        "IPython.display": {"HTML": str, "display": display},
    }
    for name, content in modules.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    with Progress() as progress:
        progress.event(train(19))
        for number in range(6):
            message = f"<{number}>"
            progress.event(Event(event="warning", message=message, sequence=number, unix_ms=0))
    assert shown[0] == ""
    assert shown[1].startswith('<progress value="20" max="40"></progress> epoch 1, step 20/40')
    # A message is no HTML, and an output has five of them.
    assert shown[-1].split("<br>")[1:] == [f"warning: &lt;{number}&gt;" for number in range(1, 6)]
    assert len(shown) == 8
    assert capsys.readouterr() == ("", "")


def test_a_loss_that_is_not_finite_is_said() -> None:
    assert "loss not finite" in training(train(0, None), None)


def test_each_other_event_has_its_line() -> None:
    measured = Event(event="eval", epoch=0, step=7, loss=0.25, accuracy=None, sequence=1, unix_ms=2)
    assert line(measured) == "epoch 1 done, validation: loss 0.25, accuracy not finite"
    assert line(Event(event="state", state="running", reason="")) == "running"
    assert line(Event(event="state", state="paused", reason="a user")) == "paused: a user"
    fleet = Event(event="fleet", workers=2, reason="worker `b` left")
    assert line(fleet) == "fleet: 2 workers: worker `b` left"
    saved = Event(event="checkpoint", version=3, bytes=9)
    assert line(saved) == "checkpoint of version 3 (9 bytes)"
    assert line(Event(event="rewind", version=3, era=1)) is None


def test_a_bar_is_full_at_the_end_and_empty_while_nothing_is_known() -> None:
    assert bar(0, 0) == bar(0, 40) == f"[{'.' * 20}]"
    assert bar(40, 40) == f"[{'#' * 20}]"


def test_the_time_that_is_left_follows_the_mean_pace() -> None:
    assert seconds_left((0, 10), (10_000, 20), 100) == 80
    assert seconds_left((0, 10), (10_000, 100), 100) == 0
    assert seconds_left((0, 10), (10_000, 10), 100) is None
    assert seconds_left((0, 10), (10_000, 20), 0) is None


def test_times_are_for_people() -> None:
    assert [duration(each) for each in (7.24, 187, 7500)] == ["7.2 s", "3 min 07 s", "2 h 05 min"]
