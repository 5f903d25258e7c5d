from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def tmpfs_path() -> Iterator[Path]:
    """A folder in memory: fast, and a file system that may refuse direct I/O."""
    import shutil
    import tempfile

    if not os.path.isdir("/dev/shm"):
        pytest.skip("needs /dev/shm")
    folder = tempfile.mkdtemp(prefix="holdfast-test-", dir="/dev/shm")
    yield Path(folder)
    shutil.rmtree(folder, ignore_errors=True)
