"""The calls to the API server that the controller makes, counted."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from typing import Any

import aiohttp
from kubernetes_asyncio import client, config, watch
from kubernetes_asyncio.client.exceptions import ApiException
from kubernetes_asyncio.stream import WsApiClient

from holdfast.errors import HoldfastError
from holdfast.operator.names import AUDIENCE, MANAGED, MANAGER
from holdfast.progress import MAX_BYTES

EXEC_TIMEOUT_S = 10.0
_STDOUT, _STDERR, _ERROR = 1, 2, 3


class PodReadError(HoldfastError):
    """The progress file of a pod could not be read."""


class FileNotReadError(PodReadError):
    """The pod has answered: it has no such file, or it may not be read."""


class PodSilentError(PodReadError):
    """The pod has not answered in time."""


class Cluster:
    """A connection to the API server. ``calls`` says how often each kind of call was made."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    async def __aenter__(self) -> Cluster:
        try:
            config.load_incluster_config()
        except config.ConfigException:
            await config.load_kube_config()
        self._stack = contextlib.AsyncExitStack()
        self.api = await self._stack.enter_async_context(client.ApiClient())
        self._ws = await self._stack.enter_async_context(WsApiClient())
        self.core = client.CoreV1Api(self.api)
        self.custom = client.CustomObjectsApi(self.api)
        self.crds = client.ApiextensionsV1Api(self.api)
        self._exec = client.CoreV1Api(self._ws)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    async def read_file(self, namespace: str, pod: str, container: str, path: str) -> bytes:
        """Up to one byte more than a progress file may have. No shell takes part."""
        self.calls["exec"] += 1
        output, errors, status = bytearray(), bytearray(), bytearray()
        try:
            async with asyncio.timeout(EXEC_TIMEOUT_S):
                connecting = await self._exec.connect_get_namespaced_pod_exec(
                    pod,
                    namespace,
                    container=container,
                    command=["head", "-c", str(MAX_BYTES + 1), "--", path],
                    stdin=False,
                    stdout=True,
                    stderr=True,
                    tty=False,
                    _preload_content=False,
                )
                async with connecting as socket:
                    async for message in socket:
                        if message.type is not aiohttp.WSMsgType.BINARY or not message.data:
                            continue
                        channel, data = message.data[0], message.data[1:]
                        {_STDOUT: output, _STDERR: errors, _ERROR: status}.get(channel, bytearray()).extend(data)
                        if len(output) > MAX_BYTES or len(errors) > MAX_BYTES:
                            break
        except TimeoutError:
            raise PodSilentError(f"exec into pod {pod} failed: no answer within {EXEC_TIMEOUT_S:.0f} s") from None
        except (aiohttp.ClientError, ApiException, OSError) as error:
            raise PodReadError(f"exec into pod {pod} failed: {type(error).__name__}: {plain(str(error))}") from None
        if len(output) <= MAX_BYTES and not _succeeded(status):
            raise FileNotReadError(f"{path} in pod {pod} cannot be read: {plain(errors.decode('utf-8', 'replace'))}")
        return bytes(output)

    async def patch_status(self, group: str, version: str, plural: str, thing: dict[str, Any], status: Any) -> None:
        self.calls["patch status"] += 1
        meta = thing["metadata"]
        await self.custom.patch_namespaced_custom_object_status(
            group,
            version,
            meta["namespace"],
            plural,
            meta["name"],
            {"metadata": {"uid": meta["uid"]}, "status": status},
            field_manager=MANAGER,
            _content_type="application/merge-patch+json",
        )

    async def annotate(self, path: str, thing: dict[str, Any], annotations: dict[str, str]) -> None:
        """``path``: of the object's collection, such as ``/apis/batch/v1/namespaces/x/jobs``."""
        self.calls["annotate"] += 1
        meta = thing["metadata"]
        await self.api.call_api(
            f"{path}/{meta['name']}",
            "PATCH",
            header_params={"Content-Type": "application/merge-patch+json", "Accept": "application/json"},
            query_params=[("fieldManager", MANAGER)],
            body={"metadata": {"uid": meta["uid"], "annotations": annotations}},
            auth_settings=["BearerToken"],
            response_types_map={200: "object"},
        )

    async def event(self, thing: dict[str, Any], kind: str, reason: str, message: str, name: str | None = None) -> None:
        """An Event beside the object; ``kind``: Normal or Warning. One of the same name is not told again."""
        self.calls["event"] += 1
        meta = thing["metadata"]
        now = _now()
        body = {
            "metadata": {"name" if name else "generateName": f"{meta['name'][:200]}.{name or ''}"},
            "involvedObject": {
                "apiVersion": thing["apiVersion"],
                "kind": thing["kind"],
                "name": meta["name"],
                "namespace": meta["namespace"],
                "uid": meta["uid"],
            },
            "type": kind,
            "reason": reason,
            "message": message[:1000],
            "source": {"component": MANAGER},
            "reportingComponent": MANAGER,
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
        try:
            await self.core.create_namespaced_event(meta["namespace"], body)
        except ApiException as error:
            if error.status != 409 or name is None:
                raise

    async def make_claim(self, namespace: str, claim: dict[str, Any]) -> bool:
        """Whether it was made; False: it was there."""
        self.calls["claim"] += 1
        try:
            await self.core.create_namespaced_persistent_volume_claim(namespace, claim, field_manager=MANAGER)
        except ApiException as error:
            if error.status != 409:
                raise
            return False
        return True

    async def served(self, kinds: Mapping[str, tuple[str, str, str]]) -> set[str]:
        """Those that the API server has now, by name; of each, group, version and plural are given."""
        found = set()
        for name, (group, version, plural) in kinds.items():
            self.calls["discovery"] += 1
            try:
                listed = await self.custom.get_api_resources(group, version)
            except ApiException as error:
                if error.status != 404:
                    raise
                continue
            if any(resource.name == plural for resource in listed.resources):
                found.add(name)
        return found

    async def is_ready(self, node: str) -> bool:
        """Whether a node answers; one that is gone does not."""
        self.calls["node"] += 1
        try:
            found = await self.core.read_node(node)
        except ApiException as error:
            if error.status == 404:
                return False
            raise
        conditions = {condition.type: condition.status for condition in found.status.conditions or []}
        return bool(conditions.get("Ready") == "True")

    async def give_up(self, pod: dict[str, Any]) -> None:
        """Forget a pod whose node does not answer any more."""
        self.calls["delete pod"] += 1
        meta = pod["metadata"]
        with contextlib.suppress(ApiException):
            await self.core.delete_namespaced_pod(
                meta["name"],
                meta["namespace"],
                body=client.V1DeleteOptions(
                    grace_period_seconds=0, preconditions=client.V1Preconditions(uid=meta["uid"])
                ),
            )

    async def pod_of_token(self, token: str) -> str | None:
        """The UID of the pod that a token was made for, if it was made to be shown to us."""
        self.calls["token review"] += 1
        review = client.V1TokenReview(spec=client.V1TokenReviewSpec(token=token, audiences=[AUDIENCE]))
        found = (await client.AuthenticationV1Api(self.api).create_token_review(review)).status
        if not found.authenticated or AUDIENCE not in (found.audiences or []):
            return None
        uids = (found.user.extra or {}).get("authentication.kubernetes.io/pod-uid") or []
        return str(uids[0]) if uids else None

    async def pods(self) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        """All pods that the operator has made safe, and then what happens to them, for ever."""
        version: str | None = None
        while True:
            if version is None:
                self.calls["list"] += 1
                listed = await self.core.list_pod_for_all_namespaces(label_selector=MANAGED, _preload_content=False)
                content = json.loads(await listed.read())
                version = content["metadata"]["resourceVersion"]
                yield "LISTED", content
            self.calls["watch"] += 1
            async with watch.Watch(return_type=None) as watching:
                stream = watching.stream(
                    self.core.list_pod_for_all_namespaces,
                    label_selector=MANAGED,
                    resource_version=version,
                    timeout_seconds=240,
                )
                try:
                    async for event in stream:
                        if event["type"] == "ERROR":
                            version = None
                            break
                        pod = event["raw_object"]
                        version = pod["metadata"]["resourceVersion"]
                        yield event["type"], pod
                except ApiException:
                    version = None
                    await asyncio.sleep(1.0)
                except (aiohttp.ClientError, TimeoutError):
                    # On from there: of a pod that ended meanwhile, a list would not say how.
                    await asyncio.sleep(1.0)


def _succeeded(status: bytearray) -> bool:
    try:
        return bool(json.loads(status)["status"] == "Success")
    except (ValueError, KeyError, TypeError):
        return False


def plain(text: str, longest: int = 200) -> str:
    """One line of what a container or a server said, without what a terminal or a web page would act on."""
    line = " ".join(text.split()).translate({ord("<"): "(", ord(">"): ")", ord("&"): "+"})
    return "".join(letter for letter in line if letter.isprintable())[:longest]


def _now() -> str:
    from datetime import UTC, datetime

    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
