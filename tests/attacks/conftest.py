from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that every user of this machine can write into, as /tmp is one."""
    # Not below TMPDIR, which may be one user's alone.
    with tempfile.TemporaryDirectory(prefix="attacks-", dir="/tmp") as name:
        folder = Path(name)
        folder.chmod(0o1777)
        yield folder
