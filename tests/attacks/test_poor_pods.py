"""A pod with no home, no user name, read-only or full folders: training starts, and says once what it does without."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.store import open_backend
from holdfast.store.checkpoints import whole
from tests.attacks.hostile import root
from tests.unit.cli.cli_helpers import environ

SCRIPT = Path(__file__).parent / "scripts" / "steps.py"
NOBODY_KNOWS = 54321
"""A user without an entry in the system's tables."""
STEPS = 6


def can_mount() -> bool:
    done = subprocess.run(
        ["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True, check=False
    )
    return done.returncode == 0


AS_NOBODY = [
    *("setpriv", f"--reuid={NOBODY_KNOWS}", f"--regid={NOBODY_KNOWS}", "--clear-groups"),
    *("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"),  # the interpreter may be root's alone
]


def trained(location: str, *, mounts: str = "", cwd: Path, **variables: str | None) -> subprocess.CompletedProcess[str]:
    """Run the script. ``mounts``: shell commands before it, in a mount namespace; a variable that is None is unset."""
    if mounts and not can_mount():
        pytest.skip("needs the right to mount a tmpfs: run as root in a container with CAP_SYS_ADMIN")
    variables = {"XDG_STATE_HOME": None, "XDG_RUNTIME_DIR": None, **variables}
    given = environ(**{name: value for name, value in variables.items() if value is not None})
    command = [*AS_NOBODY, sys.executable, str(SCRIPT), location, str(STEPS)]
    if mounts:
        command = ["unshare", "--mount", "sh", "-c", f'{mounts} && "$@"', "sh", *command]
    return subprocess.run(
        command,
        cwd=cwd,
        env={name: value for name, value in given.items() if variables.get(name, value) is not None},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def warnings(done: subprocess.CompletedProcess[str], of: str) -> list[str]:
    return [line for line in done.stderr.splitlines() if of in line]


@pytest.fixture
def open_folder(tmp_path: Path) -> Path:
    """A folder that any user can work in."""
    (folder := tmp_path / "work").mkdir()
    folder.chmod(0o777)
    return folder


@root
@pytest.mark.core
@pytest.mark.parametrize("home", ["/", None, "", "relative", "read-only"])
def test_a_user_without_a_home_trains_to_object_storage(
    home: str | None, open_folder: Path, s3_uri: str, tmp_path: Path
) -> None:
    (sealed := tmp_path / "sealed").mkdir(mode=0o755)
    (runtime := open_folder / "runtime").mkdir()
    runtime.chmod(0o777)
    variables = {"HOME": str(sealed) if home == "read-only" else home, "XDG_RUNTIME_DIR": str(runtime)}
    done = trained(s3_uri, cwd=open_folder, **variables)
    assert done.returncode == 0, done.stderr
    assert f"trained {STEPS}" in done.stdout
    assert len(warnings(done, "no home folder")) == 1, done.stderr
    assert list(runtime.glob("holdfast/*/journal.jsonl"))
    assert sorted(os.listdir(open_folder)) == ["runtime"]
    again = trained(s3_uri, cwd=open_folder, **variables)
    assert f"from checkpoint-{STEPS}" in again.stdout, again.stderr


SEALED = "mount -t tmpfs -o ro tmpfs {}"
"""Nobody can write there."""


@root
@pytest.mark.parametrize("left", ["temporary", "memory", "nothing"])
def test_the_home_is_in_what_is_left(left: str, open_folder: Path, s3_uri: str) -> None:
    places = {"temporary": "/tmp", "memory": "/dev/shm"}
    mounts = " && ".join(
        f"mount -t tmpfs -o {'mode=1777' if place == places.get(left) else 'ro'} tmpfs {place}"
        for place in ("/var/tmp", "/dev/shm", "/tmp")
    )
    if left != "nothing":
        # The namespace ends with the script: what it has left is listed before.
        mounts += f" && trap 'ls -R {places[left]}' EXIT"
    done = trained(s3_uri, mounts=mounts, cwd=Path("/"), HOME="/", TMPDIR=None)
    assert done.returncode == 0, done.stderr
    assert f"trained {STEPS}" in done.stdout
    assert [checkpoint.step for checkpoint in whole([open_backend(s3_uri)])] == [STEPS]
    if left == "nothing":
        assert len(warnings(done, "this run keeps no journal")) == 1, done.stderr
    else:
        assert len(warnings(done, "no home folder")) == 1, done.stderr
        assert "journal.jsonl" in done.stdout
        assert f"holdfast-state-{NOBODY_KNOWS}" in done.stdout
    assert not warnings(done, "cannot write"), done.stderr


@root
def test_a_folder_that_another_user_has_made_first_is_no_home(open_folder: Path, s3_uri: str) -> None:
    taken = open_folder / f"holdfast-state-{NOBODY_KNOWS}"
    taken.mkdir()
    taken.chmod(0o777)
    done = trained(s3_uri, cwd=open_folder, HOME="/", TMPDIR=str(open_folder))
    assert done.returncode == 0, done.stderr
    assert os.listdir(taken) == []
    memory = Path("/dev/shm", f"holdfast-state-{NOBODY_KNOWS}")
    assert str(memory) in done.stderr
    subprocess.run(["rm", "-r", str(memory)], check=True)


@root
def test_no_folder_is_named_like_a_home_that_is_not_known(open_folder: Path) -> None:
    done = trained("~/run", cwd=open_folder, HOME=None)
    assert done.returncode != 0
    assert "has no home folder" in done.stderr
    assert os.listdir(open_folder) == []


FIRST = {
    "full": "mount -t tmpfs -o size=256k,mode=777 tmpfs {0} && ! cat /dev/zero 2>/dev/null >{0}/filler",
    "read-only": "mount -t tmpfs -o ro tmpfs {0}",
    "somebody else's": "chmod 755 {0}",
    "a file": "rmdir {0} && touch {0}",
}
"""How the first location cannot be used: shell commands."""


@root
@pytest.mark.core
@pytest.mark.parametrize("how", FIRST)
def test_a_first_location_that_cannot_be_used_is_left_out(how: str, open_folder: Path) -> None:
    first, second = open_folder / "first", open_folder / "second"
    first.mkdir()
    for _ in range(2):
        mounts = f"{{ {FIRST[how].format(first)}; }}" if first.is_dir() else "true"
        done = trained(str(first), mounts=mounts, cwd=open_folder, HOLDFAST_FALLBACK_DIR=str(second))
        assert done.returncode == 0, done.stderr
        assert f"trained {STEPS}" in done.stdout
        assert len(warnings(done, f"{first} cannot be used, going on without it")) == 1, done.stderr
        assert [checkpoint.step for checkpoint in whole([open_backend(str(second))])] == [STEPS]
    assert f"from checkpoint-{STEPS}" in done.stdout


@root
@pytest.mark.parametrize("how", FIRST)
def test_where_no_location_can_be_used_the_error_names_all(how: str, open_folder: Path) -> None:
    first, second = open_folder / "first", open_folder / "second"
    first.mkdir()
    second.mkdir()
    mounts = " && ".join(f"{{ {FIRST[how].format(folder)}; }}" for folder in (first, second))
    done = trained(str(first), mounts=mounts, cwd=open_folder, HOLDFAST_FALLBACK_DIR=str(second))
    assert done.returncode != 0
    assert "step" not in done.stdout
    last = done.stderr.splitlines()[-1]
    assert last.startswith("holdfast.errors.StoreError: no location can be used"), done.stderr
    assert f"{first}: " in last
    assert f"{second}: " in last


@root
def test_a_location_that_has_room_again_is_used_again(open_folder: Path) -> None:
    first, second = open_folder / "first", open_folder / "second"
    first.mkdir()
    done = trained(
        str(first),
        mounts=f"{{ {FIRST['full'].format(first)}; }} && trap 'ls {first}' EXIT",
        cwd=open_folder,
        HOLDFAST_FALLBACK_DIR=str(second),
        HOLDFAST_SAVE_EVERY="2 steps",
        WAIT_AT=f"3:{second}/checkpoint-2/holdfast.json",
        REMOVE_AT=f"3:{first}/filler",
    )
    assert done.returncode == 0, done.stderr
    assert [checkpoint.step for checkpoint in whole([open_backend(str(second))])] == [2]
    assert f"{first} can be used again" in done.stderr
    assert "progress file" not in done.stderr
    assert {"checkpoint-4", "checkpoint-6"} <= set(done.stdout.splitlines())


@root
def test_a_read_only_first_location_is_resumed_from(open_folder: Path) -> None:
    first, second = open_folder / "first", open_folder / "second"
    first.mkdir()
    first.chmod(0o777)
    assert trained(str(first), cwd=open_folder).returncode == 0
    mounts = f"mount --bind {first} {first} && mount -o remount,ro,bind {first}"
    done = trained(str(first), mounts=mounts, cwd=open_folder, HOLDFAST_FALLBACK_DIR=str(second))
    assert done.returncode == 0, done.stderr
    assert f"from checkpoint-{STEPS}" in done.stdout
    assert len(warnings(done, "cannot be used, going on without it")) == 1
