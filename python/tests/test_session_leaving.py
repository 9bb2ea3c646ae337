"""SIGTERM to a process in `ebbflow.join`, and an exit of its own."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import pytest

from .conftest import Place, Script, needs
from .test_session_cluster import SCRIPT

torch = needs("torch")

import ebbflow  # noqa: E402

#: Status of a process that SIGTERM has ended.
TOLD = 128 + signal.SIGTERM


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """Give the script's file."""
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def test_a_process_that_is_told_to_end_hands_its_batch_to_another_one(
    place: Place, script: Path
) -> None:
    alone = Script(None, script, "400", "alone", "0").result()
    leaves = place.script(script, "400", "told", "0", gate="4")
    leaves.arrive()
    stays = place.script(script, "400", "told", "0", gate="join")
    stays.arrive()
    place.wait_for_workers("told", 2)
    leaves.child.send_signal(signal.SIGTERM)
    code, said = leaves.end()
    assert code == TOLD, said
    assert "ebbflow: SIGTERM: this process leaves the job `told` and hands its records back" in said
    stays.go()
    assert stays.result()["sha"] == alone["sha"]
    events = list(place.client.job("told").watch())
    reasons = [event["reason"] for event in events if event.kind == "fleet"]
    gone = [reason for reason in reasons if f"script-{leaves.child.pid}" in reason]
    assert any("has drained and left" in reason for reason in gone), reasons
    assert not [event for event in events if event.kind == "warning"], "no attempt has failed"


# S4-15
def test_a_process_that_exits_well_hands_its_batch_to_another_one(
    place: Place, script: Path, tmp_path: Path
) -> None:
    alone = Script(None, script, "400", "alone", "0").result()
    path = tmp_path / "exits.py"
    path.write_text(
        SCRIPT.replace(
            "            job.step(",
            "            if leaves_at < 0:\n                sys.exit()\n            job.step(",
            1,
        )
    )
    # It has its first batch before the other one comes.
    exits = place.script(path, "400", "exits", "-1", gate="join")
    exits.arrive()
    stays = place.script(path, "400", "exits", "0", gate="join")
    stays.arrive()
    place.wait_for_workers("exits", 2)
    exits.go()
    code, said = exits.end()
    assert code == 0, said
    stays.go()
    assert stays.result()["sha"] == alone["sha"]
    events = list(place.client.job("exits").watch())
    assert not [event for event in events if event.kind == "warning"], "no attempt has failed"


def test_a_process_alone_ends_with_its_job(script: Path) -> None:
    process = Script(None, script, "400", "mine", "0", gate="4")
    process.arrive()
    process.child.send_signal(signal.SIGTERM)
    code, said = process.end()
    assert code == TOLD
    assert "ebbflow: SIGTERM: the job `mine` ends with this process" in said
    assert "SystemExit" not in said


@pytest.mark.parametrize(("then", "expected"), [("pass", TOLD), ("sys.exit(7)", 7)])
def test_the_handler_of_the_user_is_called(tmp_path: Path, then: str, expected: int) -> None:
    path = tmp_path / "script.py"
    path.write_text(
        "import signal, sys\n"
        "def mine(number, frame):\n"
        "    print('mine', number, file=sys.stderr)\n"
        f"    {then}\n"
        "signal.signal(signal.SIGTERM, mine)\n" + SCRIPT
    )
    process = Script(None, path, "400", "mine", "0", gate="4")
    process.arrive()
    process.child.send_signal(signal.SIGTERM)
    code, said = process.end()
    assert code == expected, said
    assert f"mine {int(signal.SIGTERM)}" in said


# The loop catches what ends it, and goes on.
CATCHES = SCRIPT.replace(
    "            job.step(loss(model(batch.x), batch.y))\n",
    "            try:\n"
    "                job.step(loss(model(batch.x), batch.y))\n"
    "            except BaseException:\n"
    "                print('caught', file=sys.stderr)\n",
)

# A child of the loop's process is ended as if there were no job.
FORKS = SCRIPT.replace(
    "        for batch in epoch:\n",
    # Python forgets a signal that comes before the child has begun.
    "        ready, begun = os.pipe()\n"
    "        child = os.fork()\n"
    "        if child == 0:\n"
    "            os.write(begun, b'.')\n"
    "        while child == 0:\n"
    "            time.sleep(0.02)\n"
    "        os.read(ready, 1)\n"
    "        os.kill(child, signal.SIGTERM)\n"
    "        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM\n"
    "        for batch in epoch:\n",
)


def test_a_loop_that_catches_the_end_ends_at_its_next_call(tmp_path: Path) -> None:
    assert CATCHES != SCRIPT
    path = tmp_path / "script.py"
    path.write_text(CATCHES)
    process = Script(None, path, "400", "mine", "0", gate="4")
    process.arrive()
    process.child.send_signal(signal.SIGTERM)
    code, said = process.end()
    assert code == TOLD
    assert said.count("caught") == 1


def test_a_child_of_the_process_ends_by_the_signal(tmp_path: Path) -> None:
    assert FORKS != SCRIPT
    path = tmp_path / "script.py"
    path.write_text("import os, signal, time\n" + FORKS)
    code, said = Script(None, path, "400", "mine", "0").end()
    assert code == 0, said
    assert "SIGTERM" not in said


def joined() -> ebbflow.Session:
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    source = torch.utils.data.TensorDataset(torch.zeros(8, 4))
    return ebbflow.join(model, optimizer, source, micro=4, epochs=1)


def test_the_handler_of_before_is_set_again() -> None:
    def mine(*_: object) -> None:
        raise AssertionError("nobody sends a signal")

    before = signal.getsignal(signal.SIGTERM)
    try:
        for handler in (signal.SIG_DFL, mine):
            signal.signal(signal.SIGTERM, handler)
            with joined():
                assert signal.getsignal(signal.SIGTERM) not in (signal.SIG_DFL, mine)
            assert signal.getsignal(signal.SIGTERM) is handler
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        with joined():
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with joined():
            signal.signal(signal.SIGTERM, mine)
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_loop_on_another_thread_sets_no_handler() -> None:
    found = []

    def work() -> None:
        with joined():
            found.append(signal.getsignal(signal.SIGTERM))

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [before]
