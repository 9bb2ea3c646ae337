"""The client, against real processes."""

from __future__ import annotations

import asyncio
import multiprocessing
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import ebbflow
import pytest
from ebbflow import errors

from .conftest import DIGITS, EBB, Cluster, Process

SHORT = {"epochs": 2}
ENDLESS = {"epochs": 1_000_000}


@pytest.fixture
def endless(client: ebbflow.Client) -> Iterator[ebbflow.Job]:
    """Give a job that runs until the test has ended."""
    job = client.submit(DIGITS, changes=ENDLESS)
    yield job
    if not job.status().is_end:
        job.cancel(force=True)
        job.wait(progress=False, check=False)


# S0-11
def test_a_job_is_submitted_waited_for_and_fetched(client: ebbflow.Client, tmp_path: Path) -> None:
    job = client.submit(DIGITS, changes=SHORT, out=tmp_path / "waited")
    assert job.name == f"digits-{job.id}"
    result = job.wait(progress=False)
    assert result.status.state == "succeeded"
    assert result.out == tmp_path / "waited"
    fetched = job.fetch(tmp_path / "fetched")
    kept = client.wait(job.id, progress=False)
    assert kept.out is None
    assert len({result.weights(), fetched.weights(), kept.weights()}) == 1
    assert fetched.metrics.rows("eval") == ebbflow.Result.read(result.out).metrics.rows("eval")
    assert kept.model_sha256 == ebbflow.run(DIGITS, changes=SHORT, progress=False).model_sha256
    assert job.name in [status.job for status in client.jobs()]
    assert client.job("digits").status().job == client.jobs()[-1].job


def test_events_come_in_order_up_to_the_end(client: ebbflow.Client) -> None:
    job = client.submit(DIGITS, changes=SHORT)
    watch = job.watch()
    events = list(watch)
    numbers = [event.sequence for event in events]
    assert numbers == sorted(set(numbers))
    assert watch.status is not None
    assert watch.status.state == "succeeded"
    assert list(watch) == []

    async def twice() -> tuple[list[ebbflow.Event], list[ebbflow.Event]]:
        async def collect() -> list[ebbflow.Event]:
            return [event async for event in job.watch()]

        first, second = await asyncio.gather(collect(), collect())
        return first, second

    assert asyncio.run(twice()) == (events, events)


def test_a_cancelled_task_loses_no_event(client: ebbflow.Client) -> None:
    job = client.submit(DIGITS, changes=SHORT)
    job.wait(progress=False)

    async def interrupted() -> list[ebbflow.Event]:
        seen, watch = [], job.watch()
        for _ in range(20):
            task = asyncio.ensure_future(anext(watch))
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            if not task.cancelled():
                seen.append(task.result())
        return [*seen, *[event async for event in watch]]

    assert asyncio.run(interrupted()) == list(job.watch())


def test_an_event_loop_ends_while_a_job_goes_on(endless: ebbflow.Job) -> None:
    async def first() -> ebbflow.Event:
        watch = endless.watch()
        async for event in watch:
            left = asyncio.ensure_future(anext(watch))
            await asyncio.sleep(0)
            left.cancel()
            watch.close()
            return event
        raise AssertionError("no event")

    assert asyncio.run(first()).sequence == 1


def test_a_job_is_scaled_paused_resumed_and_cancelled(endless: ebbflow.Job) -> None:
    watch = endless.watch()
    assert any(event.kind == "train" for event in watch)
    assert endless.scale(1)["workers_max"] == 1
    endless.pause()
    assert any(event.kind == "state" and event["state"] == "paused" for event in watch)
    endless.resume()
    assert any(event.kind == "state" and event["state"] == "running" for event in watch)
    endless.cancel()
    with pytest.raises(errors.JobCancelledError) as raised:
        endless.wait(progress=False)
    assert raised.value.result.state_dict()
    for change in (endless.pause, endless.resume, lambda: endless.scale(2)):
        with pytest.raises(errors.EndedError):
            change()


def test_of_two_workers_one_trains_on_when_a_job_is_scaled_down(tmp_path: Path) -> None:
    with Cluster(tmp_path, workers=2) as cluster:
        job = ebbflow.Client(cluster.url).submit(DIGITS, changes=ENDLESS)
        watch = job.watch()

        def wait_for_step_of(workers: int) -> None:
            assert any(event.kind == "train" and event["workers"] == workers for event in watch)

        wait_for_step_of(2)
        assert job.status()["workers"] == 2
        assert job.scale(1)["workers_max"] == 1
        wait_for_step_of(1)
        assert job.status()["workers"] == 1
        job.scale(2)
        wait_for_step_of(2)
        job.cancel(force=True)


def test_other_threads_run_while_one_waits(endless: ebbflow.Job) -> None:
    # The main thread would wait for ever if it held the GIL.
    other = threading.Timer(0, lambda: endless.cancel(force=True))
    other.start()
    result = endless.wait(progress=False, check=False)
    other.join()
    assert result.status.state == "cancelled"


WAITING = """
import sys, ebbflow
job = ebbflow.Client(sys.argv[1]).job(sys.argv[2])
print("waiting", flush=True)
try:
    job.wait(progress=False)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


def test_ctrl_c_ends_the_wait_and_the_job_goes_on(cluster: Cluster, endless: ebbflow.Job) -> None:
    command = [sys.executable, "-c", WAITING, cluster.url, endless.name]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "waiting\n"
        child.send_signal(signal.SIGINT)
        output, _ = child.communicate()
    # The signal may come just before the wait begins.
    assert output == "interrupted\n" or child.returncode == -signal.SIGINT
    assert not endless.status().is_end


def test_a_job_that_is_not_there_or_not_over_is_an_error(
    client: ebbflow.Client, endless: ebbflow.Job, tmp_path: Path
) -> None:
    for call in (client.status, client.watch, client.cancel, client.job):
        with pytest.raises(errors.NotFoundError, match="no job `square`"):
            call("square")
    with pytest.raises(errors.NotEndedError, match="has no results yet"):
        endless.fetch(tmp_path / "out")


def test_a_wrong_job_is_not_sent(client: ebbflow.Client, tmp_path: Path) -> None:
    before = len(client.jobs())
    with pytest.raises(errors.InvalidJobError, match="epochs"):
        client.submit(DIGITS, changes={"epochs": 0})
    in_memory = {"checkpoint.url": "memory://c", "checkpoint.every_steps": 1}
    with pytest.raises(errors.InvalidJobError, match="memory of one process"):
        client.submit(DIGITS, changes=in_memory)
    assert len(client.jobs()) == before


def test_a_master_that_does_not_answer_is_named() -> None:
    client = ebbflow.Client("127.0.0.1:1", timeout=0.2)
    assert client.url == "http://127.0.0.1:1"
    with pytest.raises(errors.UnreachableError, match=r"no answer .* http://127.0.0.1:1") as raised:
        client.jobs()
    assert isinstance(raised.value, ConnectionError)


def test_a_url_that_is_none_and_a_time_that_is_none_are_refused() -> None:
    with pytest.raises(ebbflow.Error, match="ftp"):
        ebbflow.Client("ftp://m")
    with pytest.raises(errors.InvalidJobError, match="timeout"):
        ebbflow.Client("127.0.0.1:1", timeout=-1.0)


def test_a_forked_process_is_told_to_make_its_own_client(client: ebbflow.Client) -> None:
    context = multiprocessing.get_context("fork")
    answers: multiprocessing.SimpleQueue[str] = context.SimpleQueue()

    def child() -> None:
        try:
            client.jobs()
        except RuntimeError as error:
            answers.put(str(error))
        answers.put(str(len(ebbflow.Client(client.url).jobs()) >= 0))

    process = context.Process(target=child)
    process.start()
    assert "before the process forked" in answers.get()
    assert answers.get() == "True"
    process.join()


def test_a_token_is_shown(tmp_path: Path) -> None:
    table, file = tmp_path / "tokens.toml", str(tmp_path / "anna.token")
    command = [str(EBB), "certs", "token", "--name", "anna", "--role", "read", "--file", file]
    table.write_text(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    data = str(tmp_path / "data")
    master = Process(
        tmp_path,
        "master",
        *["master", "--listen", "127.0.0.1:0", "--data-dir", data, "--tokens", str(table)],
        *["--token-file", file],
    )
    try:
        url = master.url()
        text = Path(file).read_text().strip()
        assert ebbflow.Client(url, token=text).jobs() == []
        assert ebbflow.Client(url, token_file=file).jobs() == []
        with pytest.raises(errors.AccessError):
            ebbflow.Client(url, token="x" * len(text)).jobs()
        with pytest.raises(errors.AccessError):
            ebbflow.Client(url).jobs()
        with pytest.raises(errors.AccessError):
            ebbflow.Client(url, token=text).submit(DIGITS)
    finally:
        master.stop()
    with pytest.raises(errors.AccessError, match="expected a token"):
        ebbflow.Client(url, token="short")
    with pytest.raises(errors.AccessError, match=r"none\.pem"):
        ebbflow.Client(url, ca=tmp_path / "none.pem")
