"""The worked examples of the developer guide do what the guide says, in real processes."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from holdfast.adapters import registry
from holdfast.errors import UnprotectedError
from holdfast.notice import Notice
from holdfast.store.base import MANIFEST, Backend
from holdfast.testing import BackendContract, CheckpointMachine, CrashingBackend
from holdfast.testing.store_machine import Power

ROOT = Path(__file__).parents[2]
EXTENDING = ROOT / "examples/extending"
GUIDE = ROOT / "docs/developing.md"
LIMIT_S = 120


@pytest.fixture(autouse=True)
def _examples(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The examples can be imported, and nothing of them stays behind."""
    monkeypatch.syspath_prepend(str(EXTENDING))
    yield
    for name in list(sys.modules):
        if name.partition(".")[0] in ("tinytrain", "tinytrain_adapter"):
            del sys.modules[name]


# ---------------------------------------------------------------------- the page


def snippets(kind: str) -> list[tuple[str, str, str]]:
    """The blocks of the guide below a comment ``not run: KIND FILE``: the file, the rest of the comment, the code."""
    pattern = rf"^( *)<!-- not run: {kind} (\S+)([^\n]*) -->\n *```python\n(.*?)^ *```$"
    found = re.findall(pattern, GUIDE.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    return [(path, more, re.sub(f"^{indent}", "", code, flags=re.MULTILINE)) for indent, path, more, code in found]


def test_the_snippets_of_the_guide_are_those_of_the_examples() -> None:
    names = {Path(path).name for path, _, _ in snippets("from")}
    assert names == {"sqlite_backend.py", "socket_source.py", "patches.py", "wrappers.py"}
    for path, _, code in snippets("from"):
        source = (ROOT / path).read_text("utf-8")
        for part in re.split(r"^ *…\n", code, flags=re.MULTILINE):
            assert part.strip("\n") in source, f"{path} has no\n{part}"


def test_every_package_is_in_the_table_of_the_guide() -> None:
    text = GUIDE.read_text(encoding="utf-8")
    named = set(re.findall(r"^\| `(\w+)/` \|", text, re.MULTILINE))
    packages = {path.parent.name for path in (ROOT / "src/holdfast").glob("*/__init__.py")}
    assert packages == named


# ---------------------------------------------------------------------- real processes


class Job:
    """A process, with its output in a file and a folder of its own for all that it writes."""

    def __init__(self, folder: Path, script: Path, *arguments: str, path: tuple[Path, ...] = (), **variables: str):
        ours = ("HOLDFAST_", "CHECKPOINT_", "TRAINING_PROGRESS", "RANK", "WORLD_SIZE", "RAY_TRAIN", "PYTHONPATH")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        more = {
            "HOLDFAST_KILL_WAIT": "0",
            "XDG_STATE_HOME": str(folder / "state"),
            "PYTHONPATH": os.pathsep.join(map(str, (*path, EXTENDING))),
        }
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self._log = folder / f"output-{len(list(folder.glob('output-*')))}"
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(script), *arguments],
                cwd=folder,
                env={**kept, **more, **variables},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    @property
    def output(self) -> str:
        return self._log.read_text(encoding="utf-8")

    @property
    def last_line(self) -> str:
        return self.output.splitlines()[-1]

    def journal(self) -> list[dict]:
        lines = [line for path in self.folder.rglob("journal.jsonl") for line in path.read_text().splitlines()]
        return [json.loads(line) for line in lines if line.endswith("}")]

    def until_training(self) -> None:
        until = time.monotonic() + LIMIT_S
        while not any(event["event"] == "training" for event in self.journal()):
            assert self.process.poll() is None, self.output
            assert time.monotonic() < until, self.output
            time.sleep(0.02)

    def wait(self) -> int:
        try:
            return self.process.wait(LIMIT_S)
        finally:
            self.process.kill()


def preempted_and_resumed(start: Callable[[], Job], notify: Callable[[Job], None]) -> Job:
    """Start a job, preempt it once it trains, and start it again; returns the second attempt."""
    job = start()
    try:
        job.until_training()
        notify(job)
    finally:
        code = job.wait()
    assert code == 143, job.output
    again = start()
    assert again.wait() == 0, again.output
    first, second = (event for event in again.journal() if event["event"] == "attempt")
    assert first["resumed_from"] is None
    assert second["resumed_from"] > 0
    return again


def send_sigterm(job: Job) -> None:
    job.process.send_signal(signal.SIGTERM)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What examples/train.py prints if nothing happens."""
    job = Job(tmp_path_factory.mktemp("undisturbed"), ROOT / "examples/train.py", "--epochs=20", HOLDFAST_ENABLED="0")
    assert job.wait() == 0, job.output
    return job.last_line


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package with the examples in it: files copied and lines added as the guide says."""
    copy = tmp_path_factory.mktemp("tree")
    shutil.copytree(ROOT / "src", copy / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    shutil.copytree(EXTENDING / "tinytrain_adapter", copy / "src/holdfast/adapters/tinytrain")
    shutil.copy(EXTENDING / "sqlite_backend.py", copy / "src/holdfast/store/sqlite.py")
    added = snippets("added to")
    assert len(added) == 3
    for path, more, code in added:
        line = more.removeprefix(" after `").removesuffix("`")
        before, found, after = (copy / path).read_text("utf-8").partition(f"{line}\n")
        assert found, f"{path} has no line {line}"
        (copy / path).write_text(before + found + code + after, "utf-8")
    install_tinytrain(copy / "src", "1.4")
    return copy / "src"


def install_tinytrain(folder: Path, version: str) -> None:
    """As far as pip's records say."""
    info = folder / f"tinytrain-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: tinytrain\nVersion: {version}\n")


# ---------------------------------------------------------------------- store backend


class TestSqlite(BackendContract):
    @pytest.fixture
    def backend(self, tmp_path: Path) -> Iterator[Backend]:
        from sqlite_backend import SqliteBackend

        backend = SqliteBackend(f"sqlite://{tmp_path}/not/there/yet.db")
        yield backend
        backend.close()

    def reopen(self, backend: Backend) -> Backend:
        return type(backend)(backend.uri)


class SqliteMachine(CheckpointMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.mkdtemp()
        self.path = f"{self.folder}/checkpoints.db"

    def open(self, power: Power) -> Backend:
        from sqlite_backend import SqliteBackend

        return CrashingBackend(SqliteBackend(f"sqlite://{self.path}"), power)

    def _sql(self, statement: str, *values: object) -> list:
        with contextlib.closing(sqlite3.connect(self.path)) as db, db:
            return db.execute(statement, values).fetchall()

    def stored(self, folder: str, path: str) -> bytes:
        if path == MANIFEST:
            return self._sql("SELECT manifest FROM folders WHERE name = ?", folder)[0][0]
        query = "SELECT data FROM files JOIN chunks USING (content) WHERE folder = ? AND path = ? ORDER BY start"
        return b"".join(data for (data,) in self._sql(query, folder, path))

    def store(self, folder: str, path: str, data: bytes | None) -> None:
        if path == MANIFEST:
            self._sql("UPDATE folders SET manifest = ? WHERE name = ?", data, folder)
        elif data is None:
            self._sql("DELETE FROM files WHERE folder = ? AND path = ?", folder, path)
        else:
            ((content,),) = self._sql("SELECT content FROM files WHERE folder = ? AND path = ?", folder, path)
            self._sql("DELETE FROM chunks WHERE content = ?", content)
            self._sql("INSERT INTO chunks VALUES (?, 0, ?)", content, data)

    def teardown(self) -> None:
        shutil.rmtree(self.folder)


def test_the_sqlite_backend_survives_any_history() -> None:
    few = settings(max_examples=20, stateful_step_count=20, deadline=None, database=None)
    run_state_machine_as_test(SqliteMachine, settings=settings(few, suppress_health_check=list(HealthCheck)))


@pytest.mark.core
def test_a_run_in_a_sqlite_file_is_preempted_and_resumes_bit_identically(
    tree: Path, tmp_path: Path, undisturbed: str
) -> None:
    location = f"sqlite://{tmp_path}/checkpoints.db"

    def start() -> Job:
        return Job(tmp_path, ROOT / "examples/train.py", "--epochs=20", path=(tree,), HOLDFAST_DIR=location)

    again = preempted_and_resumed(start, send_sigterm)
    assert again.last_line == undisturbed
    assert f"resuming from {location}/checkpoint-" in again.output


# ---------------------------------------------------------------------- notice source


@pytest.fixture
def short_path() -> Iterator[str]:
    """A path for a socket: at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="s-") as folder:
        yield f"{folder}/job.sock"


def send(path: str, message: bytes) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.sendto(message, path)


@pytest.mark.parametrize(
    ("message", "grace_s"),
    [
        (b'{"grace": 20}', 20.0),
        (b"stop, please", None),
        (b"", None),
        (b'{"grace": -1}', None),
        (b'{"grace": 1e999}', None),
        (b"[" * 4096, None),
        (b"\xff\x00\x1b[2J", None),
    ],
)
def test_a_message_is_one_notice_whatever_it_says(short_path: str, message: bytes, grace_s: float | None) -> None:
    from socket_source import SocketSource

    notices: queue.Queue[Notice] = queue.Queue()
    source = SocketSource(short_path)
    source.start(notices.put)
    send(short_path, message)
    notice = notices.get(timeout=20)
    assert (notice.source, notice.grace_s) == ("scheduler", grace_s)
    assert notice.detail.isprintable()
    source.stop()
    source.stop()
    assert notices.empty()
    assert not os.path.exists(short_path)


def test_after_its_stop_a_source_delivers_nothing_and_can_be_started_again(short_path: str) -> None:
    from socket_source import SocketSource

    notices: queue.Queue[Notice] = queue.Queue()
    source = SocketSource(short_path)
    source.start(notices.put)
    source.stop()
    with pytest.raises(FileNotFoundError):
        send(short_path, b"late")
    Path(short_path).touch()  # what a process that was killed leaves behind
    source.start(notices.put)
    send(short_path, b"now")
    assert notices.get(timeout=20).detail.endswith(": 'now'")
    source.stop()
    assert notices.empty()


@pytest.mark.core
def test_a_message_on_the_socket_preempts_a_run_and_it_resumes_bit_identically(
    tmp_path: Path, short_path: str, undisturbed: str
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, train\n"
        "from socket_source import listen_on\n"
        "listen_on(os.environ['SCHEDULER_SOCKET'])\n"
        "train.main()\n"
    )

    def start() -> Job:
        return Job(tmp_path, script, "--epochs=20", path=(ROOT / "examples",), SCHEDULER_SOCKET=short_path)

    again = preempted_and_resumed(start, lambda job: send(short_path, b'{"grace": 20}'))
    assert again.last_line == undisturbed
    (notice,) = (event for event in again.journal() if event["event"] == "notice")
    assert (notice["source"], notice["grace_s"]) == ("scheduler", 20.0)


# ---------------------------------------------------------------------- adapter


@pytest.mark.core
def test_an_unmodified_script_survives_sigterm_with_the_adapter(tree: Path, tmp_path: Path) -> None:
    script = EXTENDING / "train_tiny.py"
    plain = Job(tmp_path / "plain", script, HOLDFAST_ENABLED="0", path=(tree,))
    assert plain.wait() == 0, plain.output
    again = preempted_and_resumed(
        lambda: Job(tmp_path / "jobs", script, HOLDFAST_ENABLED="1", path=(tree,)), send_sigterm
    )
    assert again.last_line == plain.last_line


TARGETS = ["fit", "_epochs", "_batches", "_step", "model", "optimizer", "loader", "history"]


def tinytrain_without(name: str, folder: Path) -> Path:
    """A later version, in which the name is another one."""
    shutil.copytree(EXTENDING / "tinytrain", folder / "tinytrain", ignore=shutil.ignore_patterns("__pycache__"))
    trainer = folder / "tinytrain/trainer.py"
    trainer.write_text(re.sub(rf"\b{name}\b", f"other_{name}", trainer.read_text()))
    install_tinytrain(folder, "2.0")
    return folder


def install_and_fit(trainer: ModuleType) -> None:
    registry.install("tinytrain", trainer)  # raises where there is no fit that could refuse
    trainer.Trainer(None, None, [], None).fit(1)


@pytest.mark.parametrize("name", TARGETS)
def test_whichever_name_is_missing_tinytrain_stays_untouched_and_one_warning_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    monkeypatch.syspath_prepend(str(tinytrain_without(name, tmp_path)))
    from tinytrain import trainer
    from tinytrain_adapter import patches

    assert {target.rpartition(".")[2] for target in patches.TINYTRAIN.targets} == set(TARGETS)
    monkeypatch.setitem(sys.modules, "holdfast.adapters.tinytrain.patches", patches)
    before = dict(vars(trainer.Trainer))
    registry.install("tinytrain", trainer)
    assert dict(vars(trainer.Trainer)) == before
    (warning,) = (record.getMessage() for record in caplog.records)
    assert f"tinytrain 2.0 lacks tinytrain.trainer:Trainer.{name}; tested with tinytrain 1.0 to 1.4" in warning

    monkeypatch.setenv("HOLDFAST_ENABLED", "require")
    with pytest.raises(UnprotectedError, match=f"Trainer.{name}"):
        install_and_fit(trainer)


def test_a_script_with_an_untested_version_trains_as_without_holdfast_or_is_refused(tree: Path, tmp_path: Path) -> None:
    path = (tinytrain_without("_step", tmp_path / "later"), tree)
    script = Path(shutil.copy(EXTENDING / "train_tiny.py", tmp_path))

    def run(**variables: str) -> Job:
        return Job(tmp_path / "jobs", script, "--epochs=2", path=path, **variables)

    plain, unprotected, refused = run(HOLDFAST_ENABLED="0"), run(HOLDFAST_ENABLED="1"), run(HOLDFAST_ENABLED="require")
    assert [job.wait() for job in (plain, unprotected, refused)] == [0, 0, 1]
    assert unprotected.last_line == plain.last_line
    assert unprotected.output.count("holdfast leaves tinytrain alone") == 1
    assert refused.last_line.startswith("holdfast.errors.UnprotectedError: tinytrain 2.0 lacks")


@pytest.mark.parametrize("around", ["contextlib.nullcontext()", "holdfast.Run('outer')"])
def test_a_fit_that_somebody_else_protects_and_a_second_fit_are_left_alone(tmp_path: Path, around: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import contextlib, holdfast, torch, tinytrain.trainer as trainer\n"
        "from tinytrain_adapter import patches\n"
        "patches.install(trainer)\n"
        "def fit():\n"
        "    model = torch.nn.Linear(1, 1)\n"
        "    optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "    pairs = torch.utils.data.DataLoader([(torch.ones(1), torch.ones(1))] * 4)\n"
        "    return trainer.Trainer(model, optimizer, pairs, torch.nn.functional.mse_loss).fit(1)['steps']\n"
        f"with {around}:\n"
        "    print([fit(), fit()])\n"
    )
    job = Job(tmp_path / "job", script)
    assert job.wait() == 0, job.output
    assert job.last_line == "[4, 4]"
    protected = 0 if "Run" in around else 1
    assert len(list(job.folder.rglob("checkpoint-4"))) == protected
    assert job.output.count("the first fit of a process only") == protected
