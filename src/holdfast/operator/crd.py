"""Keeps the two fields in the CustomResourceDefinition of TrainJob, and takes them out at the uninstall."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from typing import Any

from kubernetes_asyncio.client.exceptions import ApiException

from holdfast.operator import schema
from holdfast.operator.cluster import Cluster
from holdfast.operator.names import TRAINJOB_CRD

log = logging.getLogger("holdfast.operator")

LOOK_S = 30.0


async def keep(cluster: Cluster, on_change: Callable[[], None]) -> None:
    """Look now and then, for ever: upgrades of Kubeflow Trainer replace its CRD. ``on_change``: some were missing."""
    while True:
        try:
            if await put_in(cluster):
                on_change()
        except asyncio.CancelledError:
            raise
        except Exception as error:
            log.warning("cannot add the fields to %s: %s", TRAINJOB_CRD, str(error)[:300])
        await asyncio.sleep(LOOK_S)


async def put_in(cluster: Cluster) -> bool:
    """Whether something had to be added. A cluster without Kubeflow Trainer is left alone."""
    return await _change(cluster, schema.patch, "added the fields for checkpointing to")


async def take_out(cluster: Cluster) -> bool:
    return await _change(cluster, schema.unpatch, "took the fields for checkpointing out of")


async def _change(cluster: Cluster, difference: Any, what: str) -> bool:
    for _ in range(5):
        try:
            answer = await cluster.crds.read_custom_resource_definition(TRAINJOB_CRD, _preload_content=False)
        except ApiException as error:
            if error.status == 404:
                return False
            raise
        cluster.calls["crd"] += 1
        operations = difference(json.loads(await answer.read()))
        if not operations:
            return False
        try:
            await cluster.crds.patch_custom_resource_definition(
                TRAINJOB_CRD, operations, _content_type="application/json-patch+json"
            )
        except ApiException as error:
            if error.status in (409, 422) and "resourceVersion" in str(error.body):
                continue  # somebody else has just changed it
            raise
        log.info("%s %s", what, TRAINJOB_CRD)
        return True
    return False
