"""The operator's process: webhooks, and a controller that acts while it leads."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import tempfile
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import aiohttp
import kopf
from kubernetes_asyncio import client
from kubernetes_asyncio.client.exceptions import ApiException
from kubernetes_asyncio.leaderelection.electionconfig import Config
from kubernetes_asyncio.leaderelection.leaderelection import LeaderElection
from kubernetes_asyncio.leaderelection.resourcelock.leaselock import LeaseLock

from holdfast.operator import admission, certificates, crd, pods, push
from holdfast.operator.cluster import Cluster
from holdfast.operator.controller import Controller
from holdfast.operator.names import JOBSET_GROUP, JOBSET_VERSION, JOBSETS, TRAINER_GROUP, TRAINER_VERSION, TRAINJOBS

log = logging.getLogger("holdfast.operator")

CERTIFICATE_LOOK_S = 3600.0
LEASE = "holdfast-operator"


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
            bundle = await certificates.ensure(cluster, options.namespace, options.secret, options.server_name)
            bundle.write(Path(folder))
        registry = kopf.OperatorRegistry()
        settings = kopf.OperatorSettings()
        settings.posting.enabled = False
        settings.admission.server = kopf.WebhookServer(
            port=options.port, certfile=f"{folder}/tls.crt", pkeyfile=f"{folder}/tls.key", cafile=f"{folder}/ca.crt"
        )
        kopf.on.login(registry=registry)(_log_in)
        admission.register(registry, options.push(Path(folder)))
        _follow(registry, controller)
        chores: list[Coroutine[Any, Any, None]] = [
            controller.watch_pods(),
            _lead(cluster, controller, options, folder),
        ]
        if options.certificates is None:
            chores.append(_renew(cluster, options, Path(folder)))
        if options.push_port is not None:
            server = push.Server(cluster, controller)
            chores.append(server.serve(options.push_port, Path(folder, "tls.crt"), Path(folder, "tls.key")))
        tasks = [asyncio.create_task(chore) for chore in chores]
        operator = asyncio.create_task(
            kopf.operator(
                registry=registry,
                settings=settings,
                identity=cast(Any, identity()),
                standalone=True,
                clusterwide=True,
                stop_flag=stop,
                liveness_endpoint=f"http://0.0.0.0:{options.health_port}/healthz",
            )
        )
        try:
            done, _ = await asyncio.wait([operator, *tasks], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in (*tasks, operator):
                task.cancel()
            await asyncio.gather(operator, *tasks, return_exceptions=True)


def _log_in(**arguments: Any) -> Any:
    """As the pod's service account; outside a cluster as the user of kubectl."""
    return kopf.login_with_service_account(**arguments) or kopf.login_with_kubeconfig(**arguments)


def _follow(registry: kopf.OperatorRegistry, controller: Controller) -> None:
    for kind, group, version, plural in (
        ("TrainJob", TRAINER_GROUP, TRAINER_VERSION, TRAINJOBS),
        ("JobSet", JOBSET_GROUP, JOBSET_VERSION, JOBSETS),
        ("Job", "batch", "v1", "jobs"),
    ):

        def saw(event: Any, _kind: str = kind, **_: Any) -> None:
            controller.saw_job(_kind, event["type"], dict(event["object"]))

        kopf.on.event(group, version, plural, id=f"saw-{plural}", registry=registry)(saw)


class _Lock(LeaseLock):
    """A lease whose API server may be away for a moment: that is a look that failed, and ends nothing."""

    async def get(self, name: str, namespace: str) -> Any:
        return await self._steady(super().get(name, namespace))

    async def create(self, name: str, namespace: str, election_record: Any) -> Any:
        return await self._steady(super().create(name, namespace, election_record), refused=False)

    async def update(self, name: str, namespace: str, updated_record: Any) -> Any:
        return await self._steady(super().update(name, namespace, updated_record), refused=False)

    @staticmethod
    async def _steady(call: Coroutine[Any, Any, Any], refused: Any = None) -> Any:
        try:
            async with asyncio.timeout(5.0):
                return await call
        except (aiohttp.ClientError, OSError) as error:
            log.warning("cannot reach the lease: %s", type(error).__name__)
            return (False, ApiException(status=503, reason=type(error).__name__)) if refused is None else refused


async def _lead(cluster: Cluster, controller: Controller, options: Options, folder: str) -> None:
    """Try to become the one that acts, and act while it is. Raises what kept it from acting: the process ends then."""
    failed: list[BaseException] = []

    async def act() -> None:
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(controller.lead())
                if options.touch_crd:
                    group.create_task(crd.keep(cluster))
                if options.certificates is None:
                    group.create_task(_trust(cluster, options, Path(folder)))
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


async def _trust(cluster: Cluster, options: Options, folder: Path) -> None:
    while True:
        try:
            await certificates.tell_webhooks(cluster, options.configuration, (folder / "ca.crt").read_bytes())
        except asyncio.CancelledError:
            raise
        except Exception as error:
            log.warning("cannot tell the API server of the certificate: %s", str(error)[:300])
        await asyncio.sleep(30.0)


async def uninstall(options: Options) -> None:
    """Take out what the operator has put in beside what its chart has: fields of a CRD, certificate, lease."""
    async with Cluster() as cluster:
        if options.touch_crd:
            await crd.take_out(cluster)
        leases = client.CoordinationV1Api(cluster.api)
        for remove, name in (
            (cluster.core.delete_namespaced_secret, options.secret),
            (leases.delete_namespaced_lease, LEASE),
        ):
            try:
                await remove(name, options.namespace)
            except ApiException as error:
                if error.status != 404:
                    raise


async def _renew(cluster: Cluster, options: Options, folder: Path) -> None:
    while True:
        await asyncio.sleep(CERTIFICATE_LOOK_S)
        try:
            bundle = await certificates.ensure(cluster, options.namespace, options.secret, options.server_name)
            if bundle.certificate != (folder / "tls.crt").read_bytes():
                bundle.write(folder)  # the server sees that the files have changed
        except asyncio.CancelledError:
            raise
        except Exception as error:
            log.warning("cannot renew the certificate: %s; it is tried again in an hour", str(error)[:300])
