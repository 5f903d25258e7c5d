from __future__ import annotations

import itertools
import os
import signal
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
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
HERE = Path(__file__).parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--whole", action="store_true", help="all cases of the tests that are marked with share")
    parser.addoption(
        "--cluster", choices=["with", "only", "without"], default="with", help="which tests: those on a cluster"
    )
    parser.addoption("--part", choices=["all", "core", "rest"], default="all", help="core: see core() in this file")
    parser.addoption("--failures-file", help="append the names of tests that fail to this file")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    chosen = [item for item in items if _on_wanted_side(config.getoption("--cluster"), item)]
    if not config.getoption("--whole") and not any("::" in argument for argument in config.args):
        chosen = shares(chosen)
    part = config.getoption("--part")
    if part != "all":
        among = core(chosen)
        chosen = [item for item in chosen if (item in among) == (part == "core")]
    kept = set(chosen)
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = chosen


def _on_wanted_side(wanted: str, item: pytest.Item) -> bool:
    return wanted == "with" or ("kube" in getattr(item, "fixturenames", ())) == (wanted == "only")


def shares(items: list[pytest.Item]) -> list[pytest.Item]:
    """Of a test that is marked with ``share(n)`` one case in n, the first and every n-th after it."""
    seen: Counter[str] = Counter()
    chosen = []
    for item in items:
        mark = item.get_closest_marker("share")
        if mark is not None:
            name = item.nodeid.partition("[")[0]
            seen[name] += 1
            if not mark.args[0] or (seen[name] - 1) % mark.args[0]:
                continue
        chosen.append(item)
    return chosen


CORE = ("contracts", "jobs/torch", "unit")
"""Folders whose tests are core, but for those marked with ``core(n)``, of which the first n cases are."""


def core(items: list[pytest.Item]) -> set[pytest.Item]:
    """What ``make test`` runs: the tests of some folders, and the first n cases of those marked ``core(n)``."""
    seen: Counter[str] = Counter()
    chosen = set()
    for item in items:
        mark = item.get_closest_marker("core")
        name = item.nodeid.partition("[")[0]
        seen[name] += 1
        most = mark.args[0] if mark is not None and mark.args else 1
        if seen[name] <= most if mark is not None else _is_in(item, CORE):
            chosen.add(item)
    return chosen


def _is_in(item: pytest.Item, folders: Sequence[str]) -> bool:
    return any(item.path.is_relative_to(HERE / folder) for folder in folders)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed and _failures_file is not None:
        with open(_failures_file, "a", encoding="utf-8") as file:
            file.write(f"{report.nodeid}\n")


_failures_file: str | None = None


def pytest_configure(config: pytest.Config) -> None:
    global _failures_file
    _failures_file = config.getoption("--failures-file")


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
