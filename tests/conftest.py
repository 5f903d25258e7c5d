from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def server():
    """Runs real training jobs; see drill.py."""
    import drill

    server = drill.Server()
    yield server
    server.close()
