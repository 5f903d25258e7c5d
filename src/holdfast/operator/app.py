"""The operator's process: webhooks, and a controller that acts while it leads."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import tempfile
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import aiohttp
import kopf
from aiohttp import web
from kubernetes_asyncio import client
from kubernetes_asyncio.client.exceptions import ApiException
from kubernetes_asyncio.leaderelection.electionconfig import Config
from kubernetes_asyncio.leaderelection.leaderelection import LeaderElection
from kubernetes_asyncio.leaderelection.resourcelock.leaselock import LeaseLock

from holdfast.operator import certificates, crd
from holdfast.operator.admission import pods
from holdfast.operator.admission import review as admission
from holdfast.operator.cluster import Cluster
from holdfast.operator.names import JOBSET_GROUP, JOBSET_VERSION, JOBSETS, TRAINER_GROUP, TRAINER_VERSION, TRAINJOBS
from holdfast.operator.reconcile import push
from holdfast.operator.reconcile.controller import Controller

log = logging.getLogger("holdfast.operator")

CERTIFICATE_LOOK_S = 3600.0
TRUST_LOOK_S = 30.0
KINDS_LOOK_S = 10.0
WATCHER_END_S = 60.0
HEARD_S = 5.0
"""Until all API servers have heard of a changed configuration."""
LEASE = "holdfast-operator"
FROM_CERT_MANAGER = ("holdfast-operator-certificate", "holdfast-operator-authority")
"""Secrets that cert-manager makes for the chart, and leaves behind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How the operator was started."""

    namespace: str
    service: str = "holdfast-operator"
    configuration: str = "holdfast-operator"
    """Name of the MutatingWebhookConfiguration."""
    port: int = 9443
    health_port: int = 8080
    certificates: str | None = None
    """A folder with tls.crt, tls.key and ca.crt; None: they are made here."""
    secret: str = "holdfast-operator-tls"
    touch_crd: bool = True
    push_port: int | None = None
    """Where pods tell their progress; None: they are asked."""
    open_for: frozenset[str] = frozenset()
    """Kinds, as in URLs, of which an object is let through that the webhooks cannot make sense of."""
    host: str | None = None
    """The name in the certificate where the webhooks are not reached through the service."""

    @property
    def server_name(self) -> str:
        return self.host or f"{self.service}.{self.namespace}.svc"

    def push(self, folder: Path) -> Callable[[], pods.Push]:
        if self.push_port is None:
            return lambda: pods.ASKED
        return push.Address(f"https://{self.server_name}:{self.push_port}{push.PATH}", folder / "ca.crt").variables


def identity() -> str:
    """Of this replica."""
    return f"{socket.gethostname()}-{os.getpid()}"


async def run(options: Options, stop: asyncio.Event | None = None) -> None:
    """Until it is told to stop."""
    async with Cluster() as cluster, contextlib.AsyncExitStack() as stack:
        controller = Controller(cluster, touch_crd=options.touch_crd, execs=options.push_port is None)
        folder = options.certificates
        if folder is None:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="holdfast-operator-"))
            await _serve(cluster, options, Path(folder))
        stop = stop or asyncio.Event()
        chores: list[Coroutine[Any, Any, None]] = [
            _answer(options, Path(folder)),
            _watch_jobs(cluster, controller),
            _tell_health(options.health_port),
            controller.watch_pods(),
            _lead(cluster, controller, options),
            _until(stop),
        ]
        if options.certificates is None:
            chores.append(_renew(cluster, options, Path(folder)))
        if options.push_port is not None:
            server = push.Server(cluster, controller)
            chores.append(server.serve(options.push_port, Path(folder, "tls.crt"), Path(folder, "tls.key")))
        tasks = [asyncio.create_task(chore) for chore in chores]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _until(stop: asyncio.Event) -> None:
    await stop.wait()


async def _answer(options: Options, folder: Path) -> None:
    """Serve the webhooks, for ever. Not by kopf's operator: that knows no resource which was installed a moment ago."""
    server = kopf.WebhookServer(
        port=options.port,
        certfile=str(folder / "tls.crt"),
        pkeyfile=str(folder / "tls.key"),
        cafile=str(folder / "ca.crt"),
    )
    reviews = admission.Reviews(options.push(folder), options.open_for)
    async for _ in server(cast(Any, reviews)):  # whenever it has begun to serve a certificate
        pass


async def _watch_jobs(cluster: Cluster, controller: Controller) -> None:
    """Learn of jobs, for ever. When a kind of them was installed, kopf begins anew: it looks once, and may be early."""
    while True:
        watcher = _Watcher(controller)
        watcher.start()
        ended, kinds = asyncio.create_task(watcher.ended.wait()), asyncio.create_task(_until_installed(cluster))
        try:
            await asyncio.wait([ended, kinds], return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                raise RuntimeError("jobs are not watched any more") from watcher.error
            log.info("%s installed: watching begins anew", kinds.result())
        finally:
            watcher.stop.set()
            kinds.cancel()
        async with asyncio.timeout(WATCHER_END_S):
            await ended


class _Watcher(threading.Thread):
    """kopf, with an event loop of its own: at its end it cancels whatever else runs in its loop."""

    def __init__(self, controller: Controller) -> None:
        super().__init__(name="watch-jobs", daemon=True)
        self.stop = threading.Event()
        self.ended = asyncio.Event()
        self.error: BaseException | None = None
        self._controller, self._loop = controller, asyncio.get_running_loop()

    def run(self) -> None:
        registry, settings = kopf.OperatorRegistry(), kopf.OperatorSettings()
        settings.posting.enabled = False
        kopf.on.login(registry=registry)(_log_in)
        for kind, (group, version, plural) in _KINDS.items():
            kopf.on.event(group, version, plural, id=f"saw-{plural}", registry=registry, param=kind)(self._saw)

        async def watch() -> None:
            try:
                await kopf.operator(
                    registry=registry,
                    settings=settings,
                    identity=cast(Any, identity()),
                    standalone=True,
                    clusterwide=True,
                    stop_flag=self.stop,
                )
            finally:
                self.stop.set()  # a thread of kopf's waits for it, and the loop for that thread

        try:
            asyncio.run(watch())
        except BaseException as error:
            self.error = error
        with contextlib.suppress(RuntimeError):  # the loop is closed: the process ends
            self._loop.call_soon_threadsafe(self.ended.set)

    async def _saw(self, event: Any, param: Any = None, **_: Any) -> None:
        self._loop.call_soon_threadsafe(self._controller.saw_job, param, event["type"], dict(event["object"]))


async def _tell_health(port: int) -> None:
    """As long as this loop turns, for ever."""

    async def healthy(_: web.Request) -> web.Response:
        return web.json_response({})

    health = web.Application()
    health.router.add_get("/healthz", healthy)
    runner = web.AppRunner(health, access_log=None, handle_signals=False)
    await runner.setup()
    try:
        await web.TCPSite(runner, port=port).start()
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()


async def _until_installed(cluster: Cluster) -> str:
    """Until a kind of job is served that was not there at first, for two looks in a row; returns which."""
    there: set[str] | None = None
    before: set[str] = set()
    while True:
        with contextlib.suppress(ApiException, aiohttp.ClientError, OSError):
            now = await cluster.served(_KINDS)
            there = now if there is None else there & now
            if came := (now & before) - there:
                return ", ".join(sorted(came))
            before = now
        await asyncio.sleep(KINDS_LOOK_S)


def _log_in(**arguments: Any) -> Any:
    """As the pod's service account; outside a cluster as the user of kubectl."""
    return kopf.login_with_service_account(**arguments) or kopf.login_with_kubeconfig(**arguments)


_KINDS = {
    "TrainJob": (TRAINER_GROUP, TRAINER_VERSION, TRAINJOBS),
    "JobSet": (JOBSET_GROUP, JOBSET_VERSION, JOBSETS),
    "Job": ("batch", "v1", "jobs"),
}
"""Kinds of jobs."""


class _Lock(LeaseLock):
    """A lease whose API server may be away for a moment: that is a look that failed, and ends nothing."""

    async def get(self, name: str, namespace: str) -> Any:
        found, record = await self._steady(super().get(name, namespace), refused=(False, ApiException(status=503)))
        if not found:
            # Who asks reads the code in the body, which an answer need not have.
            record.body = json.dumps({"code": record.status})
        return found, record

    async def create(self, name: str, namespace: str, election_record: Any) -> Any:
        return await self._steady(super().create(name, namespace, election_record), refused=False)

    async def update(self, name: str, namespace: str, updated_record: Any) -> Any:
        return await self._steady(super().update(name, namespace, updated_record), refused=False)

    @staticmethod
    async def _steady(call: Coroutine[Any, Any, Any], refused: Any) -> Any:
        try:
            async with asyncio.timeout(5.0):
                return await call
        except (aiohttp.ClientError, OSError) as error:
            log.warning("cannot reach the lease: %s", type(error).__name__)
            return refused


async def _lead(cluster: Cluster, controller: Controller, options: Options) -> None:
    """Try to become the one that acts, and act while it is. Raises what kept it from acting: the process ends then."""
    failed: list[BaseException] = []

    async def act() -> None:
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(controller.lead())
                if options.touch_crd:
                    group.create_task(crd.keep(cluster, controller.show_again))
                if options.certificates is None:
                    group.create_task(_trust(cluster, options))
        except Exception as error:
            failed.append(error)
            election.cancel()

    async def stopped() -> None:
        log.warning("the lease is lost")

    while True:
        config = Config(
            _Lock(LEASE, options.namespace, identity(), cluster.api),
            lease_duration=15,
            renew_deadline=10,
            retry_period=2,
            onstarted_leading=act,
            onstopped_leading=stopped,
        )
        election = asyncio.create_task(LeaderElection(config).run())
        try:
            await election
        except asyncio.CancelledError:
            if failed:
                raise failed[0] from None
            raise


async def _trust(cluster: Cluster, options: Options) -> None:
    """Put it back where somebody has removed it, such as who replaces the configuration."""
    while True:
        try:
            authority = await certificates.authority(cluster, options.namespace, options.secret)
            if authority is not None:
                await certificates.tell_webhooks(cluster, options.configuration, authority)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            log.warning("cannot tell the API server of the certificate: %s", str(error)[:300])
        await asyncio.sleep(TRUST_LOOK_S)


async def uninstall(options: Options) -> None:
    """Take out what the operator has put in beside what its chart has: fields of a CRD, certificates, lease.

    Whatever its values were at last: it may have had others before.
    """
    async with Cluster() as cluster:
        await crd.take_out(cluster)
        leases = client.CoordinationV1Api(cluster.api)
        for remove, name in (
            *((cluster.core.delete_namespaced_secret, secret) for secret in (options.secret, *FROM_CERT_MANAGER)),
            (leases.delete_namespaced_lease, LEASE),
        ):
            try:
                await remove(name, options.namespace)
            except ApiException as error:
                if error.status != 404:
                    raise


async def _serve(cluster: Cluster, options: Options, folder: Path) -> None:
    """The certificate of all replicas, from when the API server trusts it."""
    bundle = await certificates.ensure(cluster, options.namespace, options.secret, options.server_name)
    served = folder / "tls.crt"
    if served.exists() and served.read_bytes() == bundle.certificate:
        return
    for attempt in range(5):
        try:
            if await certificates.tell_webhooks(cluster, options.configuration, bundle.authority):
                await asyncio.sleep(HEARD_S)
            break
        except ApiException as error:  # another replica was quicker; or there is none yet, and _trust tells it later
            log.warning("cannot tell the API server of the certificate: %s %s", error.status, error.reason)
            if error.status == 404 or attempt == 4:
                break
            await asyncio.sleep(1.0)
    bundle.write(folder)  # a server that runs sees that the files have changed


async def _renew(cluster: Cluster, options: Options, folder: Path) -> None:
    while True:
        await asyncio.sleep(CERTIFICATE_LOOK_S)
        try:
            await _serve(cluster, options, folder)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            log.warning("cannot renew the certificate: %s; it is tried again in an hour", str(error)[:300])
