"""What lies in shared memory is nobody else's, and a full /dev/shm harms no training run."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from holdfast.recorder import boxes, shared
from holdfast.recorder.blackbox import BlackBox, read_box
from tests.kit.checks import assert_whole

SCRIPT = Path(__file__).parent / "scripts" / "shared_memory_fills.py"
NOBODY = 65534
root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: another user's process is started")


@pytest.fixture
def job():
    """The folder of a job whose token another user knows."""
    folder = boxes.folder(secrets.token_hex(8))
    yield folder
    if os.path.islink(folder):
        os.unlink(folder)
    shutil.rmtree(folder, ignore_errors=True)


def as_another_user(*command: str) -> None:
    subprocess.run(command, check=True, user=NOBODY, group=NOBODY)


@root
@pytest.mark.parametrize("mode", ["0777", "0700"])
def test_a_folder_that_another_user_has_made_first_is_not_used(job, mode, caplog, monkeypatch):
    monkeypatch.setattr(shared, "_told", threading.Event())
    as_another_user("/bin/mkdir", "--mode", mode, job)
    box = BlackBox(os.path.join(job, "rank-0"), 0)
    box.note(0, 1, 0, 0, 0)
    box.leave("position", b"secret")
    entries = subprocess.run(["/bin/ls", job], capture_output=True, text=True, check=True).stdout
    assert entries == ""
    assert [record.step for record in box.records()] == [1]
    assert "no record of this process can be kept" in caplog.text
    boxes.forget_old()
    assert os.path.isdir(job)


@root
def test_a_link_in_place_of_the_folder_or_of_a_file_leads_nowhere(job, tmp_path):
    victim = tmp_path / "victim"
    victim.mkdir(mode=0o700)
    (victim / "rank-0").write_text("precious")
    as_another_user("/bin/ln", "--symbolic", str(victim), job)
    BlackBox(os.path.join(job, "rank-0"), 0).leave("position", b"secret")
    assert (victim / "rank-0").read_text() == "precious"
    assert sorted(os.listdir(victim)) == ["rank-0"]


def test_other_kinds_of_files_are_not_read(job):
    os.mkdir(job, 0o700)
    path = os.path.join(job, "rank-0")
    os.mkfifo(path)
    with pytest.raises(OSError, match="not a file of user"):
        read_box(path)
    assert boxes.last_step(path) is None
    os.unlink(path)
    os.symlink("/dev/zero", path)
    assert boxes.last_step(path) is None
    BlackBox(path, 0).note(0, 7, 0, 0, 0)
    assert boxes.last_step(path) == 7
    assert os.stat(path).st_mode & 0o777 == 0o600


def small_shared_memory(kib: int) -> list[str]:
    """The beginning of a command that runs with a /dev/shm of this size."""
    return ["unshare", "--mount", "sh", "-c", f'mount -t tmpfs -o size={kib}k tmpfs /dev/shm && exec "$@"', "sh"]


def can_mount() -> bool:
    done = subprocess.run([*small_shared_memory(64), "true"], capture_output=True, check=False)
    return done.returncode == 0


def attempt(folder: Path, fill_at: int, *, kib: int = 1024, enabled: bool = True, stop_at: int = 0) -> tuple[int, str]:
    """Run the script; returns its exit code and what it said. ``stop_at``: the step after which SIGTERM comes."""
    folder.mkdir(exist_ok=True)
    process = subprocess.Popen(
        [*small_shared_memory(kib), sys.executable, str(SCRIPT), str(fill_at)],
        cwd=folder,
        env={**os.environ, "HOLDFAST_ENABLED": str(int(enabled)), "HOLDFAST_KILL_WAIT": "0"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    said = []
    for line in process.stdout:
        said.append(line)
        if stop_at and line == f"step {stop_at}\n":
            process.send_signal(signal.SIGTERM)
    return process.wait(60), "".join(said)


@root
@pytest.mark.core
@pytest.mark.parametrize(("kib", "fill_at"), [(28, 99), (16, 99), (1024, 0), (1024, 1), (1024, 9), (72, 99)])
def test_a_full_dev_shm_ends_no_run_and_loses_no_step(tmp_path, kib, fill_at):
    if not can_mount():
        pytest.skip("needs the right to mount a tmpfs: run as root in a container with CAP_SYS_ADMIN")
    code, said = attempt(tmp_path, fill_at, kib=kib, stop_at=10)
    assert code == 143, said
    assert assert_whole(str(tmp_path / "holdfast-runs" / SCRIPT.stem)).step >= 10
    code, said = attempt(tmp_path, fill_at, kib=kib)
    assert code == 0, said
    assert "resuming from" in said
    undisturbed = attempt(tmp_path / "undisturbed", fill_at, enabled=False)[1]
    assert said.splitlines()[-1] == undisturbed.splitlines()[-1]


def test_room_is_reserved_before_it_is_mapped(tmp_path):
    """Also where a record grows."""
    if os.geteuid() != 0 or not can_mount():
        pytest.skip("needs root and the right to mount a tmpfs")
    code = (
        "import os; from holdfast.recorder import shared\n"
        "os.mkdir('/dev/shm/own', 0o700)\n"
        "shared.new_map('/dev/shm/own/a', 8192)[:2] = b'ok'\n"
        "for act in (shared.new_map, shared.longer_map):\n"
        "    try: act('/dev/shm/own/' + ('b' if act is shared.new_map else 'a'), 1 << 20)\n"
        "    except OSError as error: print(error.errno)\n"
        "print(sorted(os.listdir('/dev/shm/own')), shared.longer_map('/dev/shm/own/a', 12288)[:2])\n"
    )
    done = subprocess.run(
        [*small_shared_memory(64), sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.split("\n")[:3] == ["28", "28", "['a'] b'ok'"], done.stderr


def test_what_could_not_be_left_is_not_there_in_an_older_version(tmp_path, monkeypatch):
    folder = tmp_path / "job"
    box = BlackBox(str(folder / "rank-0"), 0)
    box.note(0, 1, 0, 0, 0)
    box.leave("position", b"first")
    assert shared.read_left(f"{box.path}.position") == b"first"
    monkeypatch.setattr(os, "replace", lambda *_, **__: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    box.leave("position", b"second")
    assert not os.path.exists(f"{box.path}.position")
    with pytest.raises(ValueError, match="no black box"):
        read_box(str(folder / "rank-0"))
