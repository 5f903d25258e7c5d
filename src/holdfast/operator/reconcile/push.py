"""Progress that pods tell by themselves, for clusters in which nobody may exec into them.

A pod shows a token that Kubernetes has made for it, for this use alone. The API server says which pod it is, so that a
pod can tell the progress of its own job and of no other. What it says is believed as little as a file's content.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import ssl
import time
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web
from kubernetes_asyncio.client.exceptions import ApiException

from holdfast.operator.cluster import Cluster
from holdfast.operator.reconcile.controller import Controller
from holdfast.progress import MAX_BYTES

log = logging.getLogger("holdfast.operator")

PATH = "/progress"
_KNOWN_S = 300.0
"""How long a token is believed without asking again."""
_KNOWN = 4096
_REVIEWS = 8
"""Tokens that the API server is asked about at a time."""
_RELOAD_S = 60.0


@dataclass(frozen=True, slots=True)
class Address:
    """Where pods tell their progress."""

    url: str
    authority: Path
    """A file with the certificates that the server's is signed by."""

    def variables(self) -> dict[str, str]:
        return {"HOLDFAST_PROGRESS_URL": self.url, "HOLDFAST_PROGRESS_CA": self.authority.read_text()}


class Server:
    """Takes progress from pods and hands it to the controller."""

    def __init__(self, cluster: Cluster, controller: Controller) -> None:
        self._cluster = cluster
        self._controller = controller
        self._known: OrderedDict[bytes, tuple[str, float]] = OrderedDict()
        self._reviews = asyncio.Semaphore(_REVIEWS)

    async def serve(self, port: int, certificate: Path, key: Path) -> None:
        """For ever."""
        app = web.Application(client_max_size=MAX_BYTES)
        app.router.add_post(PATH, self._take)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        try:
            await web.TCPSite(runner, port=port, ssl_context=context).start()
            while True:
                await asyncio.sleep(_RELOAD_S)
                try:
                    context.load_cert_chain(certificate, key)  # renewed ones count for new connections
                except (OSError, ssl.SSLError) as error:
                    log.warning("the certificate cannot be read: %s", error)
        finally:
            await runner.cleanup()

    async def _take(self, request: web.Request) -> web.Response:
        kind, _, token = request.headers.get("Authorization", "").partition(" ")
        if kind != "Bearer" or not token:
            return _refused(401, "a bearer token is needed")
        if not self._controller.leads:
            return _refused(503, "another replica acts")
        try:
            uid = await self._whose(token)
        except ApiException as error:
            return _refused(502, f"the API server answered {error.status}")
        if uid is None:
            return _refused(401, "this is no token of a pod for this use")
        data = await request.read()  # raises 413 for what is too large
        if not self._controller.saw_push(uid, data):
            return _refused(404, "this pod belongs to no job that is followed")
        return web.Response(status=204)

    async def _whose(self, token: str) -> str | None:
        """The UID of the pod that a token is bound to; None: of none."""
        digest = hashlib.sha256(token.encode()).digest()
        uid, until = self._known.get(digest, ("", 0.0))
        if until > time.monotonic():
            return uid
        async with self._reviews:
            found = await self._cluster.pod_of_token(token)
        if found is not None:
            self._known[digest] = (found, time.monotonic() + _KNOWN_S)
            while len(self._known) > _KNOWN:
                self._known.popitem(last=False)
        return found


def _refused(status: int, why: str) -> web.Response:
    return web.json_response({"error": why}, status=status)
