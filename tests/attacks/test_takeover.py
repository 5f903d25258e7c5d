"""A writer that was stopped or cut off wakes up after a restart of its run took its location: one history stays."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import holdfast.store.local
from holdfast.base.process import Owner
from holdfast.errors import LocationBusyError, StoreError
from holdfast.store import Backend, open_backend
from holdfast.store.checkpoints import clean, retain, whole
from holdfast.store.local import LocalBackend
from holdfast.testing import Power
from holdfast.testing.backend_contract import save_checkpoint
from tests.attacks.hostile import root
from tests.kit.checks import assert_whole
from tests.unit.cli.cli_helpers import environ
from tests.unit.store.store_crashes import CrashingOs, CrashingShutil

SCRIPT = Path(__file__).parent / "scripts" / "steps.py"


def contents(folder: Path) -> dict[str, bytes]:
    """All files of all checkpoints."""
    return {
        str(path.relative_to(folder)): path.read_bytes() for path in folder.glob("checkpoint-*/**/*") if path.is_file()
    }


# ---------------------------------------------------------------------- jobs


@contextlib.contextmanager
def job(folder: Path, steps: int, *, rank: int = 0, world: int = 1, before: tuple[str, ...] = (), **variables: str):
    process = subprocess.Popen(
        [*before, sys.executable, str(SCRIPT), str(folder / "run"), str(steps), str(folder / "board")],
        env=environ(RANK=str(rank), WORLD_SIZE=str(world), HOLDFAST_KILL_WAIT="0", **variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def hear(process: subprocess.Popen[str], word: str) -> str:
    """All that it says until it says that."""
    assert process.stdout is not None
    said = ""
    for line in process.stdout:
        said += line
        if word in line:
            return said
    raise AssertionError(f"it never said {word}: {said}")


def rest(process: subprocess.Popen[str]) -> str:
    """What it says until it ends."""
    assert process.stdout is not None
    said = process.stdout.read()
    process.wait(60)
    return said


def test_a_stopped_rank_0_wakes_up_after_its_restart(tmp_path: Path) -> None:
    run, go = tmp_path / "run", tmp_path / "go"
    named = {"HOLDFAST_RUN_ID": "job", "HOLDFAST_SAVE_EVERY": "1 step", "HOLDFAST_KEEP": "2"}
    with job(tmp_path, 9, WAIT_AT=f"4:{go}", **named) as old:
        hear(old, "step 4")
        while not any(one.step >= 3 for one in whole([open_backend(str(run))])):
            time.sleep(0.01)
        old.send_signal(signal.SIGSTOP)
        with job(tmp_path, 7, **named) as new:
            said = rest(new)
            assert new.returncode == 0, said
        assert "taken over from an earlier attempt" in said
        assert "from checkpoint-3" in said or "from checkpoint-4" in said
        before = contents(run)
        go.touch()
        old.send_signal(signal.SIGCONT)
        said = rest(old)
        assert "has been taken over by another run, or by a restart of this one" in said
        assert old.returncode != 0
    assert contents(run) == before
    assert assert_whole(str(run), 2).step == 7
    with job(tmp_path, 8, **named) as third:
        said = rest(third)
        assert "from checkpoint-7" in said, said


def test_other_ranks_of_a_stopped_rank_0_do_not_save_over_its_restart(tmp_path: Path) -> None:
    run, go = tmp_path / "run", tmp_path / "go"
    named = {"HOLDFAST_RUN_ID": "job", "HOLDFAST_AGREE_TIMEOUT": "1"}
    with (
        job(tmp_path, 9, rank=0, world=2, WAIT_AT=f"4:{go}", **named) as old,
        job(tmp_path, 9, rank=1, world=2, WAIT_AT=f"5:{go}", **named) as other,
    ):
        hear(old, "step 4")
        hear(other, "step 5")
        old.send_signal(signal.SIGSTOP)
        with job(tmp_path, 3, **named) as new:
            said = rest(new)
            assert new.returncode == 0, said
        before = contents(run)
        other.send_signal(signal.SIGTERM)
        assert "has been taken over" in rest(other)
        go.touch()
        old.send_signal(signal.SIGCONT)
        old.send_signal(signal.SIGTERM)
        assert "has been taken over" in rest(old)
    assert contents(run) == before
    assert assert_whole(str(run)).step == 3


@root
def test_an_attempt_that_cannot_be_seen_from_here_is_taken_over(tmp_path: Path) -> None:
    """In another container or on another machine, where it may live on."""
    apart = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
    if subprocess.run([*apart, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("needs the right to make a process namespace: run as root in a container with CAP_SYS_ADMIN")
    run, go = tmp_path / "run", tmp_path / "go"
    with job(tmp_path, 9, before=apart, WAIT_AT=f"4:{go}", HOLDFAST_RUN_ID="job") as old:
        hear(old, "step 4")
        with job(tmp_path, 7, HOLDFAST_RUN_ID="another") as new:
            assert "LocationBusyError" in rest(new)
        with job(tmp_path, 7, HOLDFAST_RUN_ID="job") as new:
            said = rest(new)
            assert new.returncode == 0, said
        before = contents(run)
        go.touch()
        assert "has been taken over" in rest(old)
    assert contents(run) == before
    assert assert_whole(str(run)).step == 7


@pytest.mark.parametrize(
    ("first", "second", "stopped"),
    [("job", "another", True), ("job", "job", False), (None, None, True)],
    ids=["another run", "two starts beside each other", "a run without a name"],
)
def test_other_runs_are_refused(tmp_path: Path, first: str | None, second: str | None, stopped: bool) -> None:
    go = tmp_path / "go"
    with job(tmp_path, 6, WAIT_AT=f"4:{go}", **({"HOLDFAST_RUN_ID": first} if first else {})) as old:
        hear(old, "step 4")
        if stopped:
            old.send_signal(signal.SIGSTOP)
        with job(tmp_path, 7, **({"HOLDFAST_RUN_ID": second} if second else {})) as new:
            said = rest(new)
        assert new.returncode != 0
        assert "LocationBusyError" in said
        assert f"process {old.pid} " in said
        go.touch()
        old.send_signal(signal.SIGCONT)
        assert "trained 6" in rest(old)
    assert assert_whole(str(tmp_path / "run")).step == 6


# ---------------------------------------------------------------------- every moment


class Stop(Power):
    """Stops the process before one of its calls that change the disk."""

    def use(self) -> None:
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGSTOP)
        self.left = (self.left or 0) - 1


def files_of(writer: str, step: int) -> dict[str, bytes]:
    return {"model": f"{writer} {step}".encode() * 700, "deep/er/state": writer.encode()}


def amend(backend: LocalBackend) -> None:
    data = backend.read_manifest("checkpoint-3")
    assert data is not None
    backend.amend("checkpoint-3", data.replace(b"periodic", b"rescue"))


ACTIONS: dict[str, Callable[[LocalBackend], object]] = {
    "saves": lambda backend: save_checkpoint(backend, 4, files_of("old", 4)),
    "saves as another rank": lambda backend: save_checkpoint(backend, 4, files_of("old", 4)),
    "retains": lambda backend: retain(backend, 1),
    "cleans": clean,
    "sets aside": lambda backend: backend.set_aside("checkpoint-2"),
    "amends": amend,
}


def act(folder: str, action: str, call: int, grant: str) -> str:
    """What the old writer does; returns how it went."""
    backend = LocalBackend(folder)
    if "another rank" in action:
        backend.join(grant)
    else:
        backend.acquire(Owner("run"))
    if action == "cleans":
        backend.begin("checkpoint-4")
    power = Stop(call)
    holdfast.store.local.os = CrashingOs(power)  # type: ignore[assignment]
    holdfast.store.local.shutil = CrashingShutil(power)  # type: ignore[assignment]
    try:
        ACTIONS[action](backend)
        return "done"
    except LocationBusyError:
        return "displaced"
    except StoreError as error:
        return str(error)


def started(*arguments: str | int) -> tuple[int, int]:
    """A forked process that acts, and where it will say how it went."""
    told, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        said = "it raised"
        with contextlib.suppress(BaseException):
            said = act(*arguments)  # type: ignore[arg-type]
        os.write(tell, said.encode())
        os._exit(0)
    os.close(tell)
    return pid, told


@contextlib.contextmanager
def location(parent: str) -> Iterator[Path]:
    """Three checkpoints, and one that is not whole."""
    folder = Path(tempfile.mkdtemp(prefix="holdfast-test-", dir=parent))
    try:
        backend = LocalBackend(str(folder))
        for step in (1, 2, 3):
            save_checkpoint(backend, step, files_of("first", step))
        yield folder
    finally:
        shutil.rmtree(folder)


@pytest.mark.parametrize("action", ACTIONS)
def test_a_writer_that_stops_at_any_moment_harms_nothing_of_its_restart(action: str) -> None:
    fast = "/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()
    outcomes = set()
    for call in range(500):
        with location(fast) as folder:
            earlier: Backend = LocalBackend(str(folder))
            if "another rank" in action:
                earlier.acquire(Owner("run"))
            pid, told = started(str(folder), action, call, earlier.grant())
            stopped = os.WIFSTOPPED(os.waitpid(pid, os.WUNTRACED)[1])
            restart = LocalBackend(str(folder))
            restart.acquire(Owner("run"), takeover=True)
            clean(restart)
            found = [checkpoint.step for checkpoint in whole([restart])]
            if 4 not in found:
                save_checkpoint(restart, 4, files_of("new", 4))
            save_checkpoint(restart, 5, files_of("new", 5))
            before = contents(folder)
            if stopped:
                os.kill(pid, signal.SIGCONT)
                os.waitpid(pid, 0)
            with os.fdopen(told) as file:
                said = file.read()
            after = contents(folder)
            restart.release()
            earlier.release()
            assert after == before, f"stopped before call {call}, then {said}"
            if stopped and said == "done" and action.startswith("saves"):
                assert 4 in found, f"call {call}: it says that it committed, and its restart had not found that"
            outcomes.add(said)
        if not stopped:
            break
    assert not stopped
    assert "displaced" in outcomes
    assert outcomes <= {"done", "displaced"}, outcomes
