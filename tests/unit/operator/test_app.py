"""The operator's process: what it does when the API server is away or serves more kinds."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from kubernetes_asyncio.client.exceptions import ApiException
from kubernetes_asyncio.leaderelection.electionconfig import Config
from kubernetes_asyncio.leaderelection.leaderelection import LeaderElection

from holdfast.operator import app


def test_watching_begins_anew_when_a_kind_of_job_was_installed(monkeypatch):
    looks = [{"Job"}, {"Job"}, {"Job", "JobSet"}, OSError(), {"Job"}, {"Job", "JobSet", "TrainJob"}] + 2 * [
        {"Job", "JobSet"}
    ]

    class Cluster:
        async def served(self, _: Any) -> set[str]:
            look = looks.pop(0)
            if isinstance(look, OSError):
                raise look
            return look

    monkeypatch.setattr(app, "KINDS_LOOK_S", 0.0)
    assert asyncio.run(app._until_installed(Cluster())) == "JobSet"  # type: ignore[arg-type]
    assert looks == [{"Job", "JobSet"}]


def test_a_watcher_that_fails_is_noticed(monkeypatch):
    async def fails(stop_flag: Any, **_: Any) -> None:
        asyncio.get_running_loop().run_in_executor(None, stop_flag.wait)  # as kopf does
        raise OSError("no route")

    monkeypatch.setattr(app.kopf, "operator", fails)

    async def watch() -> None:
        async with asyncio.timeout(20):
            await app._watch_jobs(_Unreachable(), None)  # type: ignore[arg-type]

    with pytest.raises(RuntimeError, match="jobs are not watched any more") as raised:
        asyncio.run(watch())
    assert "no route" in str(raised.value.__cause__)


class _Unreachable:
    async def served(self, _: Any) -> set[str]:
        raise OSError


@pytest.mark.parametrize("answer", [OSError("no route"), TimeoutError(), ApiException(status=503), ApiException()])
def test_an_api_server_that_is_away_ends_no_replica(answer):
    class Away:
        async def read_namespaced_lease(self, *_: Any) -> Any:
            raise answer

    lock = app._Lock("lease", "here", "me", object())
    lock.api_instance = Away()
    config = Config(lock, 15, 10, 2, onstarted_leading=lambda: None, onstopped_leading=None)
    assert asyncio.run(LeaderElection(config).try_acquire_or_renew()) is False
