"""Clusters and clocks for a controller that is called step by step."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from holdfast.operator.cluster import FileNotReadError, PodReadError, PodSilentError
from holdfast.operator.reconcile.controller import Controller


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def due(follower: Controller) -> Any:
    """The next job whose time has come."""

    async def ask() -> Any:
        follower._woken = asyncio.Event()  # of this event loop
        try:
            return await asyncio.wait_for(follower._next(), 0.05)
        except TimeoutError:
            return None

    return asyncio.run(ask())


class Files:
    """A cluster whose pods have these files."""

    def __init__(self) -> None:
        self.files: dict[str, dict[str, Any]] = {}
        self.shown: dict[str, Any] = {}

    async def read_file(self, _namespace: str, pod: str, *_: str) -> bytes:
        if pod not in self.files:
            raise PodReadError(f"no file in {pod}")
        return json.dumps(self.files[pod]).encode()

    async def event(self, *_: Any) -> None: ...

    async def patch_status(self, *arguments: Any) -> None:
        self.shown |= arguments[-1]["trainingProgress"]


class Containers(Files):
    """A cluster whose pods have files by path, or do not answer."""

    def __init__(self, files: dict[tuple[str, str], bytes]) -> None:
        super().__init__()
        self.by_path = files
        self.silent: set[str] = set()
        self.asked: list[tuple[str, str]] = []

    async def read_file(self, _namespace: str, pod: str, _container: str, path: str = "") -> bytes:
        self.asked.append((pod, path))
        if pod in self.silent:
            raise PodSilentError(f"exec into pod {pod} failed: no answer within 10 s")
        if (pod, path) not in self.by_path:
            raise FileNotReadError(f"{path} in pod {pod} cannot be read: No such file or directory")
        return self.by_path[pod, path]
