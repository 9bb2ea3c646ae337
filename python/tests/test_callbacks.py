"""`ebbflow.callbacks`: objects that hear a job, alone and in several processes."""

from __future__ import annotations

import csv
import json
import queue
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ebbflow
import numpy
import pytest
from ebbflow import _native, _vote, trackers
from ebbflow._vote import Elected
from ebbflow.callbacks import Callback, Caller, follow

from .conftest import DIGITS, Place, needs


class Heard(Callback):
    """Keeps what it hears, and may fail."""

    def __init__(self, fails_at: int = 0) -> None:
        self.calls: list[Any] = []
        self._fails_at = fails_at

    def on_begin(self, job: str) -> None:
        self.calls.append(job)

    def on_event(self, event: ebbflow.Event) -> None:
        self.calls.append(event.sequence)
        if event.sequence == self._fails_at:
            raise ZeroDivisionError("of the callback")

    def on_end(self, summary: Mapping[str, Any]) -> None:
        self.calls.append(summary["status"])


class Votes:
    """Elects as a test says."""

    def __init__(self) -> None:
        self.is_elected = False
        self.answers: list[bool] = []
        self.finished = 0

    def wait(self) -> bool:
        self.is_elected = self.answers.pop(0)
        return self.is_elected

    def finish(self) -> None:
        self.finished += 1

    def close(self) -> None:
        pass


def event(number: int) -> ebbflow.Event:
    return ebbflow.Event({"event": "warning", "sequence": number, "message": ""})


def test_a_process_calls_from_its_election_on_with_the_events_before_it() -> None:
    heard, votes = Heard(), Votes()
    caller = Caller("job", [heard], votes)
    caller.event(event(1))
    caller.event(event(2))
    assert heard.calls == []
    votes.is_elected = True
    caller.event(event(3))
    assert heard.calls == ["job", 1, 2, 3]
    votes.is_elected = False
    caller.event(event(4))
    assert heard.calls == ["job", 1, 2, 3]
    votes.answers = [True]
    caller.end({"status": "succeeded"})
    assert heard.calls == ["job", 1, 2, 3, 4, "succeeded"] and votes.finished == 1


def test_a_process_that_is_not_elected_calls_nothing() -> None:
    heard, votes = Heard(), Votes()
    caller = Caller("job", [heard], votes)
    caller.event(event(1))
    votes.answers = [False]
    caller.end({"status": "succeeded"})
    assert heard.calls == [] and votes.finished == 0


class Request:
    """A microbatch of the job that elects."""

    def __init__(self) -> None:
        self.value = numpy.ones(1, numpy.float32)
        self.losses: list[float] = []

    def buffers(self) -> list[Any]:
        return [self.value]

    def answer(self, loss: float) -> None:
        self.losses.append(loss)


class Native:
    """A session with what a test puts into it."""

    def __init__(self, *_: Any) -> None:
        self.messages: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def next(self) -> Any:
        message = self.messages.get()
        if message is None:
            raise RuntimeError("the session has ended")
        return message

    def stop(self) -> None:
        self.messages.put(None)


@pytest.fixture
def elected(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Elected, Any]]:
    """Give a vote with its session. A term has no length."""
    monkeypatch.setattr(_native, "Session", Native)
    monkeypatch.setattr(_native, "Train", Request)
    monkeypatch.setattr(_vote, "_TERM", 0.0)
    vote = Elected("job", "http://127.0.0.1:1", {})
    yield vote, vote._session
    vote.close()


def test_who_has_a_microbatch_is_elected_for_a_term(
    elected: tuple[Elected, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    vote, session = elected
    monkeypatch.setattr(_vote, "_TERM", 3600.0)
    request = Request()
    session.messages.put(("event", "{}"))
    assert not vote.is_elected
    session.messages.put(request)
    assert vote.wait()
    vote.close()
    # What is not answered goes to another process.
    assert not vote.is_elected and request.losses == []


def test_the_microbatch_of_a_term_is_answered_with_nothing(elected: tuple[Elected, Any]) -> None:
    vote, session = elected
    request = Request()
    session.messages.put(request)
    session.messages.put(("ended", "{}", None))
    vote._thread.join()
    assert not vote.wait()
    assert request.losses == [0.0] and request.value.tolist() == [0.0]


@pytest.mark.parametrize("why", [("ended", "{}", None), ("broken", "no master")])
def test_a_process_that_cannot_be_elected_any_more_waits_no_longer(
    why: Any, elected: tuple[Elected, Any], caplog: pytest.LogCaptureFixture
) -> None:
    vote, session = elected
    session.messages.put(why)
    assert not vote.wait()
    vote._thread.join()
    said = "callbacks of this process hear no more events: no master"
    assert (said in caplog.text) == (why[0] == "broken")


def test_a_job_that_elects_and_cannot_be_cancelled_is_named(
    elected: tuple[Elected, Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_vote, "Client", lambda url, **_: ebbflow.Client(url, timeout=0.1))
    elected[0].finish()
    assert "job.callbacks cannot be cancelled" in caplog.text


def train(*callbacks: Callback) -> ebbflow.Session:
    torch = needs("torch")
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = [(torch.ones(3), 1)] * 20
    with ebbflow.join(model, optimizer, data, micro=5, epochs=2, callbacks=callbacks) as job:
        for epoch in job.epochs():
            for batch in epoch:
                job.step(torch.nn.functional.cross_entropy(model(batch.x), batch.y))
    return job


def test_alone_each_object_hears_each_event_once_and_in_order() -> None:
    first, second = Heard(), Heard()
    job = train(first, second)
    assert first.calls == second.calls
    begin, *numbers, end = first.calls
    assert (begin, end) == ("script", "succeeded")
    assert numbers == sorted(set(numbers)) and len(numbers) >= 8
    assert job.workers == 1


def test_an_object_that_raises_ends_the_loop_with_its_error() -> None:
    with pytest.raises(ZeroDivisionError, match="of the callback"):
        train(Heard(fails_at=2))


def test_follow_calls_objects_in_a_process_that_does_not_train(client: ebbflow.Client) -> None:
    heard = Heard()
    job = client.submit(DIGITS, changes={"epochs": 1})
    status = follow(job, [heard])
    begin, *numbers, end = heard.calls
    assert (begin, end) == (job.name, "succeeded") and status.state == "succeeded"
    assert numbers == [event.sequence for event in job.watch()]


SCRIPT = """
import json, os, sys, time
import torch, ebbflow, ebbflow.trackers
from ebbflow.callbacks import Callback

folder, mine = sys.argv[1], sys.argv[2]

class Note(Callback):
    def __init__(self):
        self.file = open(f"{folder}/{mine}.jsonl", "a")
        self.calls = 0
    def note(self, value):
        print(json.dumps(value), file=self.file, flush=True)
        self.calls += 1
        if str(self.calls) == sys.argv[3]:
            self.wait()
    def wait(self):
        print("at the gate", flush=True)
        sys.stdin.readline()
    def on_begin(self, job):
        self.note(job)
    def on_event(self, event):
        self.note(event.sequence)
        if event.kind == sys.argv[3]:
            sys.argv[3] = "held"
            self.wait()
    def on_end(self, summary):
        self.note(summary["status"])

model = torch.nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = [(torch.ones(3), 1)] * 40
csv = ebbflow.trackers.Csv(f"{folder}/metrics.csv")
with ebbflow.join(model, optimizer, data, data, micro=5, epochs=2, name="heard",
                  callbacks=[csv, Note()]) as job:
    while sys.argv[3] != "0" and not job._caller._vote.is_elected:
        time.sleep(0.01)
    for epoch in job.epochs():
        for batch in epoch:
            job.step(torch.nn.functional.cross_entropy(model(batch.x), batch.y))
        job.evaluate(lambda batch: {
            "loss": torch.nn.functional.cross_entropy(model(batch.x), batch.y)
        })
"""


def notes(folder: Path, name: str) -> list[Any]:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """Give the script's file."""
    needs("torch")
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def test_another_process_is_elected_when_one_dies(
    place: Place, script: Path, tmp_path: Path
) -> None:
    first = place.script(script, str(tmp_path), "first", "2")
    # It has the first event in its hands.
    first.arrive()
    second = place.script(script, str(tmp_path), "second", "0", gate="join")
    second.arrive()
    place.wait_for_workers("heard", 2)
    first.kill()
    second.go()
    assert second.end()[0] == 0
    assert notes(tmp_path, "first") == ["heard", 1]
    begin, *numbers, end = notes(tmp_path, "second")
    assert (begin, end) == ("heard", "succeeded")
    assert numbers == [event.sequence for event in place.client.watch("heard")]


def rows(folder: Path) -> list[list[str]]:
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.reader(file))[1:]


def test_the_csv_of_the_process_that_is_elected_last_has_all_events(
    place: Place, script: Path, tmp_path: Path
) -> None:
    first = place.script(script, str(tmp_path), "first", "train")
    # It has recorded the first step. Until it goes on, the first epoch does not end.
    first.arrive()
    before = rows(tmp_path)
    second = place.script(script, str(tmp_path), "second", "0", gate="join")
    second.arrive()
    place.wait_for_workers("heard", 2)
    first.kill()
    second.go()
    assert second.end()[0] == 0
    expected = []
    for event in place.client.watch("heard"):
        updates, values = trackers.scalars(event) or (0, {})
        place_of = [event.sequence, event.unix_ms, event.get("epoch"), updates]
        for name, value in values.items():
            if not name.endswith("/epoch"):
                expected.append([*map(str, place_of), name, repr(value)])
    # A step has five metrics, an evaluation the loss.
    assert len(expected) == 16 * 5 + 2
    assert rows(tmp_path) == expected
    assert before and before == expected[: len(before)]


def test_of_several_processes_exactly_one_calls(place: Place, script: Path, tmp_path: Path) -> None:
    names = ["a", "b", "c"]
    processes = [place.script(script, str(tmp_path), name, "0", gate="join") for name in names]
    for process in processes:
        process.arrive()
    place.wait_for_workers("heard", 3)
    for process in processes:
        process.go()
    assert [process.end()[0] for process in processes] == [0, 0, 0]
    found = [calls for calls in (notes(tmp_path, name) for name in names) if calls]
    numbers = [event.sequence for event in place.client.watch("heard")]
    assert found == [["heard", *numbers, "succeeded"]]
    # The job that elected it has ended, too.
    status = follow(place.client.job("heard.callbacks"), [])
    assert status.state == "cancelled"
