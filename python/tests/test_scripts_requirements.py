"""``requirements.txt`` of a submitted script: checked, and installed where the operator lets it."""

from __future__ import annotations

import functools
import http.server
import io
import os
import pwd
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .conftest import EBB, Cluster, Place, Process, variables

# It says where it runs, waits until as many processes as it is told run, and fails.
SCRIPT = """
import os, sys, time
from pathlib import Path
import tiny

place, count = Path(sys.argv[1]), int(sys.argv[2])
worker = os.environ["EBBFLOW_WORKER"]
(place / f"{worker}.new").write_text(f"{tiny.WORD} {sys.prefix} {tiny.__file__}")
(place / f"{worker}.new").rename(place / f"{worker}.ran")
while len(list(place.glob("*.ran"))) < count:
    time.sleep(0.02)
sys.exit(3)
"""


class Index:
    """A folder of packages as pip's simple index, at a free port of this machine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.asked: list[str] = []
        #: Names of the variables of each pip that asked, and its user.
        self.pips: list[tuple[set[str], int]] = []
        self.is_open = threading.Event()
        self.is_open.set()
        index = self

        class Handler(http.server.SimpleHTTPRequestHandler):
            def do_GET(self) -> None:
                index.asked.append(self.path)
                index.pips += pips(index.url)
                index.is_open.wait()
                super().do_GET()

            def log_message(self, *_: Any) -> None:
                pass

        (folder / "simple/tiny").mkdir(parents=True)
        handler = functools.partial(Handler, directory=str(folder))
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/simple"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def wheel(
        self, word: str = "tiny", more: bytes = b"", needs: str = "", name: str = "tiny"
    ) -> None:
        """Put a wheel of version 1.0 into the index."""
        about = f"{name}-1.0.dist-info"
        path = self.folder / f"simple/{name}/{name}-1.0-py3-none-any.whl"
        path.parent.mkdir(exist_ok=True)
        with zipfile.ZipFile(path, "w") as wheel:
            wheel.writestr(f"{name}/__init__.py", f"WORD = {word!r}\n")
            wheel.writestr(f"{name}/more", more)
            metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n{needs}"
            wheel.writestr(f"{about}/METADATA", metadata)
            tag = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            wheel.writestr(f"{about}/WHEEL", tag)
            wheel.writestr(f"{about}/RECORD", "")

    def source(self) -> None:
        """Put the source of ``tiny`` 1.0 into the index, whose build would write a file."""
        setup = f"open({str(self.folder / 'built')!r}, 'w')\n".encode()
        with tarfile.open(self.folder / "simple/tiny/tiny-1.0.tar.gz", "w:gz") as source:
            entry = tarfile.TarInfo("tiny-1.0/setup.py")
            entry.size = len(setup)
            source.addfile(entry, io.BytesIO(setup))

    def wheels(self) -> int:
        """Return how often a wheel was fetched."""
        return sum(path.endswith(".whl") for path in self.asked)

    def stop(self) -> None:
        self.is_open.set()
        self.server.shutdown()
        self.server.server_close()


def pips(url: str) -> Iterator[tuple[set[str], int]]:
    """Give the names of the variables, and the user, of each pip that uses an index."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if url.encode() in (process / "cmdline").read_bytes().split(b"\0"):
                found = (process / "environ").read_bytes().split(b"\0")
                names = {variable.split(b"=")[0].decode() for variable in found if variable}
                # The agent has the URL in its arguments, too.
                if b"pip" in (process / "cmdline").read_bytes().split(b"\0"):
                    yield names, process.stat().st_uid
        except OSError:
            continue


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Index]:
    """Give an empty index."""
    (tmp_path / "index").mkdir()
    index = Index(tmp_path / "index")
    yield index
    index.stop()


def agent(cluster: Cluster, folder: Path, *more: str, python: str = sys.executable) -> Process:
    (folder / "scratch").mkdir(exist_ok=True)
    (folder / "ran").mkdir(exist_ok=True)
    return cluster.start(
        *["agent", "worker", "--master", cluster.url, "--name", "agent", "--device", "cpu"],
        *["--scripts", "--script-processes", "2", "--python", python],
        *["--scratch", str(folder / "scratch"), *more],
    )


def code(folder: Path, requirements: str, script: str = SCRIPT) -> Path:
    """Write the files of a script, and return the script."""
    (folder / "code").mkdir(exist_ok=True)
    (folder / "code/requirements.txt").write_text(requirements)
    (folder / "code/train.py").write_text(script)
    return folder / "code/train.py"


def start(
    cluster: Cluster, folder: Path, name: str, *more: str, count: int = 1, user: str | None = None
) -> subprocess.Popen[str]:
    """Send the script. It waits until ``count`` processes run."""
    keys = variables(cluster.certs, user) if cluster.certs is not None and user else {}
    return subprocess.Popen(
        [
            *[str(EBB), "submit", str(folder / "code/train.py"), "--master", cluster.url],
            *["--follow", "--name", name, *more, "--", str(folder / "ran"), str(count)],
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **keys},
    )


def said(submitted: subprocess.Popen[str]) -> str:
    """Wait for the end of a script, which never joins a job. Returns what the user reads."""
    output, _ = submitted.communicate()
    assert submitted.returncode == 1, output
    return output


def ran(folder: Path, job: str) -> list[str]:
    """Return the word, the prefix and the module that the only process of a job has found."""
    (found,) = folder.glob(f"ran/{job}-*.ran")
    return found.read_text().split(" ")


def left(folder: Path) -> list[Path]:
    """Return the folders of environments of the agent."""
    return list(folder.glob("scratch/ebb-scripts-*/environments/*"))


def logs(cluster: Cluster, job: str, user: str | None = None) -> str:
    keys = variables(cluster.certs, user) if cluster.certs is not None and user else {}
    command = [str(EBB), "logs", job, "--master", cluster.url]
    environment = {**os.environ, **keys}
    return subprocess.run(
        command, capture_output=True, text=True, check=True, env=environment
    ).stdout


def test_two_jobs_of_one_owner_share_what_was_installed_once(
    place: Place, index: Index, tmp_path: Path
) -> None:
    index.wheel("of-the-index")
    # Packages of the agent's interpreter are there, too.
    code(tmp_path, "tiny >= 0.5  # small\n", SCRIPT.replace("import tiny", "import pytest, tiny"))
    started = agent(place.cluster, tmp_path, "--script-requirements", index.url)
    both = [start(place.cluster, tmp_path, name, count=2) for name in ("one", "two")]
    for submitted in both:
        assert "exit code 3" in said(submitted)
    one, two = ran(tmp_path, "one"), ran(tmp_path, "two")
    assert one == two and one[0] == "of-the-index"
    assert one[2].startswith(one[1]) and one[1].startswith(str(tmp_path / "scratch"))
    assert index.wheels() == 1 and len(left(tmp_path)) == 1
    told = logs(place.cluster, "one") + logs(place.cluster, "two")
    assert told.count("installing from") == 1 and "Successfully installed tiny-1.0" in told, told
    assert f"requirements of scripts are installed from {index.url}" in started.log.read_text()


def test_without_leave_the_user_reads_what_the_interpreter_lacks(
    place: Place, tmp_path: Path
) -> None:
    code(tmp_path, "tiny==1.0\npytest>=9999\npytest[no-such-extra]\nold ; python_version < '3'\n")
    agent(place.cluster, tmp_path)
    told = said(start(place.cluster, tmp_path, "train"))
    for line in (
        "tiny: not installed, expected `tiny==1.0`",
        f"pytest: found {pytest.__version__}, expected `pytest>=9999`",
        "start the worker with --script-requirements, or change requirements.txt",
    ):
        assert line in told and line in logs(place.cluster, "train"), told
    assert "no-such-extra" not in told and "old" not in told
    assert not list((tmp_path / "ran").iterdir()) and not left(tmp_path)


def test_what_the_interpreter_satisfies_is_not_installed(
    place: Place, index: Index, tmp_path: Path
) -> None:
    code(
        tmp_path,
        "pytest>=1\n",
        SCRIPT.replace("import tiny", "import pytest as tiny; tiny.WORD = 1"),
    )
    agent(place.cluster, tmp_path, "--script-requirements", index.url)
    assert "exit code 3" in said(start(place.cluster, tmp_path, "train"))
    assert ran(tmp_path, "train")[1] == sys.prefix and not index.asked and not left(tmp_path)


def test_source_is_never_built_and_a_failure_leaves_nothing(
    place: Place, index: Index, tmp_path: Path
) -> None:
    index.source()
    code(tmp_path, "tiny\n")
    agent(place.cluster, tmp_path, "--script-requirements", index.url)
    told = said(start(place.cluster, tmp_path, "train", "--workers", "2"))
    assert "No matching distribution found for tiny" in told, told
    assert f"this worker installs wheels of {index.url} alone" in told, told
    assert index.asked == ["/simple/tiny/"], "the other process of the job does not try again"
    assert not (tmp_path / "index/built").exists() and not left(tmp_path)
    # Another job tries again.
    index.wheel()
    assert "exit code 3" in said(start(place.cluster, tmp_path, "second"))
    assert ran(tmp_path, "second")[0] == "tiny"


def test_what_a_package_requires_by_a_url_is_discarded(
    place: Place, index: Index, tmp_path: Path
) -> None:
    index.wheel(name="other")
    url = f"{index.url}/other/other-1.0-py3-none-any.whl"
    index.wheel(needs=f"Requires-Dist: other @ {url}\n")
    code(tmp_path, "tiny\n")
    agent(place.cluster, tmp_path, "--script-requirements", index.url)
    told = said(start(place.cluster, tmp_path, "train"))
    assert "other-1.0 came from a URL that another package names" in told, told
    assert not left(tmp_path)


def test_an_install_takes_no_more_time_than_its_bound(
    place: Place, index: Index, tmp_path: Path
) -> None:
    # It never answers.
    index.is_open.clear()
    code(tmp_path, "tiny\n")
    bound = ["--script-requirements-time", "500ms"]
    agent(place.cluster, tmp_path, "--script-requirements", index.url, *bound)
    told = said(start(place.cluster, tmp_path, "train"))
    assert "it takes longer than the 0.5 s of --script-requirements-time" in told, told
    assert not left(tmp_path) and not list(pips(index.url))


def test_an_install_takes_no_more_disk_than_its_bound(
    place: Place, index: Index, tmp_path: Path
) -> None:
    index.wheel(more=os.urandom(4_000_000))
    code(tmp_path, "tiny\n")
    bound = ["--script-requirements-disk", "3MB"]
    agent(place.cluster, tmp_path, "--script-requirements", index.url, *bound)
    told = said(start(place.cluster, tmp_path, "train"))
    assert "it takes more than the 3000000 bytes of --script-requirements-disk" in told, told
    assert not left(tmp_path)


def test_an_interrupted_install_begins_again(place: Place, index: Index, tmp_path: Path) -> None:
    index.wheel()
    index.is_open.clear()
    code(tmp_path, "tiny\n")
    agent(place.cluster, tmp_path, "--script-requirements", index.url)
    submitted = start(place.cluster, tmp_path, "train")
    while not index.asked:
        assert submitted.poll() is None, submitted.communicate()
        time.sleep(0.02)
    place.client.cancel("train", force=True)
    assert "cancelled" in said(submitted)
    while left(tmp_path) or any(pips(index.url)):
        time.sleep(0.02)
    index.is_open.set()
    assert "exit code 3" in said(start(place.cluster, tmp_path, "second"))
    assert ran(tmp_path, "second")[0] == "tiny"


def test_each_owner_has_an_environment_and_pip_has_nothing_of_the_agent(
    index: Index, tmp_path: Path
) -> None:
    certs = tmp_path / "certs"
    users = ["--user", "anna=submit+scripts", "--user", "bob=submit+scripts"]
    made = [str(EBB), "certs", "init", "--dir", str(certs), *users]
    subprocess.run(made, check=True, capture_output=True)
    cluster = Cluster(tmp_path, workers=0, certs=certs)
    try:
        index.wheel()
        code(tmp_path, "tiny\n")
        agent(cluster, tmp_path, "--script-requirements", index.url)
        prefixes = []
        for number, user in enumerate(("anna", "bob", "anna"), start=1):
            more = ["--env", "PIP_EXTRA_INDEX_URL=http://127.0.0.1:1/"]
            submitted = start(cluster, tmp_path, f"job{number}", *more, user=user)
            assert "exit code 3" in said(submitted)
            prefixes.append(ran(tmp_path, f"job{number}")[1])
        anna, bob, again = prefixes
        assert anna == again and anna != bob and index.wheels() == 2
        assert len(index.pips) >= 4
        usual = {"PATH", "LD_LIBRARY_PATH", "LANG", "HOME", "TMPDIR", "PIP_CONFIG_FILE"}
        assert all(names <= usual for names, _ in index.pips), index.pips
    finally:
        cluster.stop()


def test_the_user_of_scripts_has_the_environment_and_not_its_mark(
    place: Place, index: Index
) -> None:
    # Other users reach no interpreter in a home folder.
    python = "/usr/bin/python3"
    has_pip = [python, "-c", "import pip, venv"]
    if os.geteuid() != 0 or not Path(python).exists() or subprocess.run(has_pip).returncode != 0:
        pytest.skip(f"needs root, and {python} with pip")
    index.wheel()
    script = SCRIPT.replace(
        "{sys.prefix} {tiny.__file__}",
        "{os.getuid()} {os.stat(sys.prefix).st_uid} {os.access(Path(sys.prefix).parent, os.W_OK)}",
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        code(folder, "tiny\n", script)
        more = ["--script-requirements", index.url, "--script-user", "nobody"]
        started = agent(place.cluster, folder, *more, python=python)
        (folder / "ran").chmod(0o777)
        assert "exit code 3" in said(start(place.cluster, folder, "train"))
        nobody = pwd.getpwnam("nobody").pw_uid
        assert ran(folder, "train") == ["tiny", str(nobody), str(nobody), "False"]
        assert {user for _, user in index.pips} == {nobody}
        started.stop()


def test_lines_that_choose_where_code_comes_from_do_not_travel(
    place: Place, tmp_path: Path
) -> None:
    code(tmp_path, "tiny\n--index-url https://elsewhere/simple\n")
    told = said(start(place.cluster, tmp_path, "train"))
    assert "requirements.txt: line 2: `--index-url`: options are refused" in told, told
    assert place.client.jobs() == []
