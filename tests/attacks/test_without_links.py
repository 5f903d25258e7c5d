"""File systems without hard links, such as those that show a bucket as a folder: saves and rescues work."""

from __future__ import annotations

import errno
import os
import platform
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.attacks.scripts.without_links import CALLS
from tests.kit.checks import assert_whole
from tests.unit.cli.cli_helpers import environ

HERE = Path(__file__).parent / "scripts"
REFUSALS = [errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP]


def refused(number: int, *command: str | Path) -> list[str]:
    """A command that gets this error for each hard link."""
    if platform.machine() not in CALLS:
        pytest.skip(f"needs the numbers of the system calls of {platform.machine()} in without_links.py")
    return [sys.executable, str(HERE / "without_links.py"), str(number), *map(str, command)]


def test_links_are_refused(tmp_path: Path) -> None:
    done = subprocess.run(
        refused(errno.ENOSYS, "ln", "/etc/hostname", tmp_path / "link"), capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert os.strerror(errno.ENOSYS) in done.stderr


def job(folder: Path, number: int, steps: int, **variables: str) -> list[subprocess.Popen[str]]:
    """Two ranks."""
    return [
        subprocess.Popen(
            refused(number, sys.executable, HERE / "steps.py", folder / "run", str(steps), folder / "board"),
            env=environ(RANK=str(rank), WORLD_SIZE="2", HOLDFAST_KILL_WAIT="0", **variables),
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]


def hear(process: subprocess.Popen[str], word: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(word):
            return
    raise AssertionError(f"it never said {word}")


@pytest.mark.core
@pytest.mark.parametrize("number", REFUSALS, ids=errno.errorcode.get)
def test_a_rank_that_is_killed_is_rescued(tmp_path: Path, number: int) -> None:
    ranks = job(tmp_path, number, 9, WAIT_AT=f"5:{tmp_path / 'never'}", HOLDFAST_AGREE_TIMEOUT="1")
    try:
        for rank in ranks:
            hear(rank, "step 5")
        ranks[1].kill()
        ranks[1].wait()
        ranks[0].send_signal(signal.SIGTERM)
        assert ranks[0].wait(60) == 143
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    newest = assert_whole(str(tmp_path / "run"))
    assert newest.step == 5
    assert newest.manifest.reason == "rescue"


CLAIM = """
import sys
from holdfast.store.local import LocalBackend
backend = LocalBackend(sys.argv[1])
backend.begin("checkpoint-1")
print("ready", flush=True)
sys.stdin.readline()
print(backend.claim_part("checkpoint-1", "heir", sys.argv[2].encode() * 1000), flush=True)
sys.stdin.readline()
print(backend.read_parts("checkpoint-1") == {"heir": b"".join(backend.read_parts("checkpoint-1").values())})
"""


def test_of_many_that_claim_a_save_one_gets_it(tmp_path: Path) -> None:
    processes = [
        subprocess.Popen(
            refused(errno.EPERM, sys.executable, "-c", CLAIM, tmp_path, str(number)),
            env=environ(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(4)
    ]
    told: list[str] = []

    def tell(process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("\n")
        process.stdin.flush()
        told.append(process.stdout.readline().strip())

    try:
        for process in processes:
            hear(process, "ready")
        for answers in (["False", "False", "False", "True"], ["True"] * 4):
            threads = [threading.Thread(target=tell, args=(process,)) for process in processes]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
            assert sorted(told) == answers
            told.clear()
    finally:
        for process in processes:
            process.communicate()


INCREMENTAL = """
import sys
from holdfast.engine.saving import Adopted, Files, Save, Saver
from holdfast.progress import Journal
from holdfast.store.local import LocalBackend
from tests.kit.checkpoints import Bytes
saver = Saver(backends=[LocalBackend(sys.argv[1])], rank=0, world=1, run="r", attempt=1, token="t", keep=2,
              journal=Journal(None, run_id="r", attempt=1, rank=0))
first = saver.write(Save(step=1, reason="periodic"), Files(own=lambda: [], shared=lambda: [Bytes("a", b"a" * 9)]), 9)
again = Adopted("a", 9, first.files[0], "checkpoint-1")
saver.write(Save(step=2, reason="periodic"), Files(own=lambda: [], shared=lambda: [again]), 9)
"""


def test_what_has_not_changed_is_copied(tmp_path: Path) -> None:
    subprocess.run(
        refused(errno.EPERM, sys.executable, "-c", INCREMENTAL, tmp_path), env=environ(), check=True, timeout=60
    )
    assert assert_whole(str(tmp_path), 2).step == 2
