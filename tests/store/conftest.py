from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from store_servers import ACCESS_KEY, BUCKET, SECRET_KEY, s3_server

_NUMBERS = itertools.count()


@pytest.fixture(scope="session")
def s3_endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real S3 server."""
    with s3_server(tmp_path_factory.mktemp("s3")) as endpoint:
        yield endpoint


@pytest.fixture
def s3_env(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The environment of a process that uses the S3 server; gives its endpoint."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    return s3_endpoint


@pytest.fixture
def s3_uri(s3_env: str) -> str:
    """An empty location on the S3 server."""
    return f"s3://{BUCKET}/runs/location-{os.getpid()}-{next(_NUMBERS)}"


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
