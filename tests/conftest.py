from __future__ import annotations

import itertools
import os
import signal
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.kube import Kube, cluster
from tests.kit.s3 import ACCESS_KEY, BUCKET, SECRET_KEY, s3_server

# Hundreds of processes are started here: each would compile what it imports again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Ignored in the background of a shell script, and then by all that is started here.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

_NUMBERS = itertools.count()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--whole", action="store_true", help="all cases of the tests that are marked with share")
    parser.addoption(
        "--cluster", choices=["with", "only", "without"], default="with", help="which tests: those on a cluster"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Take one case in n of a test that is marked with ``share(n)``, the first and every n-th after it."""
    wanted = config.getoption("--cluster")
    if wanted != "with":
        others = [item for item in items if ("kube" in getattr(item, "fixturenames", ())) != (wanted == "only")]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in set(others)]
    if config.getoption("--whole") or any("::" in argument for argument in config.args):
        return
    seen: Counter[str] = Counter()
    left_out = []
    for item in items:
        if (mark := item.get_closest_marker("share")) is not None:
            name = item.nodeid.partition("[")[0]
            if not mark.args[0] or seen[name] % mark.args[0]:
                left_out.append(item)
            seen[name] += 1
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in set(left_out)]


@pytest.fixture(scope="session", autouse=True)
def _state_of_runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Where runs on object storage keep their journals: not at the home of whoever runs the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(scope="session")
def server():
    """Runs real training jobs; see tests/jobs/torch/drill.py."""
    from tests.jobs.torch import drill

    server = drill.Server()
    yield server
    server.close()


@pytest.fixture(scope="session")
def kube() -> Iterator[Kube]:
    """One real cluster for all tests that need one."""
    # Not below pytest's own folder: the sockets of a cluster want short paths.
    with tempfile.TemporaryDirectory(prefix="k-", ignore_cleanup_errors=True) as folder, cluster(Path(folder)) as kube:
        yield kube


@pytest.fixture(scope="session")
def s3_endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real S3 server."""
    with s3_server(tmp_path_factory.mktemp("s3")) as endpoint:
        yield endpoint


@pytest.fixture
def s3_variables(s3_endpoint: str) -> dict[str, str]:
    """What a process must find in its environment to use the S3 server."""
    return {
        "AWS_ENDPOINT_URL": s3_endpoint,
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "AWS_REGION": "us-east-1",
    }


@pytest.fixture
def s3_env(s3_endpoint: str, s3_variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> str:
    """The environment of a process that uses the S3 server; gives its endpoint."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in s3_variables.items():
        monkeypatch.setenv(name, value)
    return s3_endpoint


@pytest.fixture
def s3_uri(s3_env: str) -> str:
    """An empty location on the S3 server."""
    return f"s3://{BUCKET}/runs/location-{os.getpid()}-{next(_NUMBERS)}"
