"""Names that everybody knows, in folders that everybody can write to: it harms nothing if another user was first."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.adapters.ray.marker import Marker, leave_marker, markers, remove_marker
from holdfast.base.private_folders import own_folder, runtime_folder
from holdfast.recorder import boxes
from holdfast.store import open_backend
from holdfast.store.checkpoints import whole
from tests.attacks.hostile import as_another_user, root
from tests.kit.checkpoints import make_checkpoint

MAKE = "os.umask(0); os.mkdir(sys.argv[1], int(sys.argv[2], 8))"
LINK = "os.symlink(sys.argv[2], sys.argv[1])"
NAME = f"holdfast-{os.getuid()}-ray"


@pytest.fixture
def tmp(shared: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files, which another user has as well."""
    monkeypatch.setattr(tempfile, "tempdir", str(shared))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    return shared


def marker() -> Marker:
    return Marker(name="run", location="/runs/a", rank=0, world=1)


@root
@pytest.mark.core
@pytest.mark.parametrize("how", ["0777", "0700", "link to a folder", "link to nothing", "file"])
def test_a_worker_of_ray_leaves_its_marker_where_nobody_else_writes(how: str, tmp: Path) -> None:
    victim = tmp / "victim"
    victim.mkdir(mode=0o700)
    file = victim / f"{os.getpid()}.json"
    file.write_text("precious")
    taken = tmp / NAME
    if how.startswith("0"):
        as_another_user(MAKE, taken, how)
        as_another_user(LINK, taken / f"{os.getpid()}.json", file)
        as_another_user(LINK, taken / f".{os.getpid()}", file)
    elif how == "file":
        as_another_user("os.mkfifo(sys.argv[1])", taken)
    else:
        as_another_user(LINK, taken, victim if how.endswith("folder") else tmp / "nothing")
    before = sorted(os.listdir(taken)) if how.startswith("0") else None
    leave_marker(marker())
    assert file.read_text() == "precious"
    assert not (tmp / "nothing").exists()
    if before is not None:
        assert sorted(os.listdir(taken)) == before
    assert markers() == [marker()]
    [left] = tmp.glob(f"{NAME}.*/*.json")
    assert stat.S_IMODE(left.stat().st_mode) == 0o600
    remove_marker()
    assert markers() == []


@root
def test_where_all_names_are_taken_the_worker_trains_without(tmp: Path) -> None:
    as_another_user(
        "[os.mkdir(name) for name in [sys.argv[1], *(f'{sys.argv[1]}.{n}' for n in range(1, 100))]]", tmp / NAME
    )
    leave_marker(marker())
    assert markers() == []
    with pytest.raises(PermissionError, match="belong to other users"):
        own_folder(str(tmp / NAME))


@root
def test_markers_of_another_user_are_not_believed(tmp: Path) -> None:
    leave_marker(marker())
    forged = (tmp / NAME / f"{os.getpid()}.json").read_text()
    remove_marker()
    shutil.rmtree(tmp / NAME)
    as_another_user(MAKE, tmp / NAME, "0777")
    as_another_user("open(sys.argv[1], 'w').write(sys.argv[2])", tmp / NAME / "1.json", forged)
    assert markers() == []


@root
def test_the_folder_of_the_session_is_used_where_it_is_set_and_the_users(
    tmp: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "own"
    own.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(own))
    assert runtime_folder() == str(own)
    leave_marker(marker())
    assert (own / NAME).is_dir()
    assert not (tmp / NAME).exists()
    assert markers() == [marker()]
    foreign = tmp / "foreign"
    as_another_user(MAKE, foreign, "0777")
    (tmp / "link").symlink_to(own)
    own_but_open = tmp_path / "open"
    own_but_open.mkdir()
    own_but_open.chmod(0o777)
    for odd in (foreign, tmp / "link", own_but_open, "own", ""):
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(odd))
        assert runtime_folder() == str(tmp)


def test_without_shared_memory_records_lie_in_the_folder_of_the_session(
    tmp: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "own"
    own.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(own))
    assert boxes.folder("job").startswith("/dev/shm/")
    access: Callable[..., bool] = os.access
    monkeypatch.setattr(os, "access", lambda path, *rest: path != "/dev/shm" and access(path, *rest))
    assert boxes.folder("job").startswith(f"{own}/")


@root
@pytest.mark.core
@pytest.mark.parametrize("how", ["0777", "link"])
def test_a_checkpoint_is_fetched_to_a_folder_of_the_user_alone(how: str, tmp: Path, tmp_path: Path) -> None:
    from holdfast.adapters.transformers.resume import download, remove_download

    make_checkpoint(tmp_path / "run", 4)
    [checkpoint] = whole([open_backend(str(tmp_path / "run"))])
    taken = tmp / f"holdfast-{os.getuid()}-token"
    if how == "link":
        (tmp / "elsewhere").mkdir(mode=0o700)
        as_another_user(LINK, taken, tmp / "elsewhere")
    else:
        as_another_user(MAKE, taken, how)
    folder = Path(download(checkpoint, "token"))
    assert os.listdir(taken) == []
    assert stat.S_IMODE(folder.parent.stat().st_mode) == 0o700
    assert (folder / "model.safetensors").read_bytes() == (tmp_path / "run/checkpoint-4/model.safetensors").read_bytes()
    assert download(checkpoint, "token") == str(folder), "all ranks find the same one"
    remove_download("token")
    assert not folder.exists()
    assert os.path.lexists(taken)


LOOK = """
import sys
from holdfast.adapters.replay.file_history import FileHistory
history = FileHistory(sys.argv[1])
history.recall()
print([one.kept for one in history.changes.values()])
"""


def recalled(history: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", LOOK, str(history)], capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout.strip()


@root
@pytest.mark.core
def test_a_replay_shows_the_script_no_file_that_another_user_has_put_there(shared: Path) -> None:
    """The script may unpickle what it takes for a file of its own."""
    from holdfast.adapters.replay.file_history import FileHistory

    own, data = shared / "own-0", shared / "data.pkl"
    data.write_text("own")
    history = FileHistory(str(own))
    history.note_read(str(data))
    history.note_change(str(data))
    history.begin(anew=True)
    history.close()
    assert recalled(own) == f"['{own}.kept/0']"

    forged = shared / "files-0"
    line = f'{{"path": "{data}", "absent": false, "kept": "0"}}\n'
    as_another_user(
        "os.umask(0); open(sys.argv[1], 'w').write(sys.argv[2]); os.mkdir(sys.argv[1] + '.kept'); "
        "open(sys.argv[1] + '.kept/0', 'w').write('theirs')",
        forged,
        line,
    )
    assert recalled(forged) == "['']"
    os.mkfifo(shared / "files-1")
    assert recalled(shared / "files-1") == "[]"
