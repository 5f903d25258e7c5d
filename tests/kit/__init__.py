"""Tools that tests of all subjects share: servers, real jobs, a cluster."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).parents[2]
"""The repository."""


def python_path() -> str:
    """PYTHONPATH for a process that imports from ``tests``."""
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
