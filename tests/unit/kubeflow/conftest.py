from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.unit.kubeflow.processes import processes_of


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where jobs of the test are kept. At its end none of their processes is left, whatever the test did."""
    folder = tmp_path / "state"
    monkeypatch.setenv("XDG_STATE_HOME", str(folder))
    monkeypatch.chdir(tmp_path)
    yield folder
    left = processes_of(str(folder))
    for process in left:
        with contextlib.suppress(psutil.Error):
            process.kill()
    assert not left, "processes that nobody ended"
