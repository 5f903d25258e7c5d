"""The workers on Ray: what they reserve, how a cluster grows for them, and how they get the code."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import ray
import ray.autoscaler.sdk
import ray.cloudpickle

import data
import model
import options
import own
import sources
import training
from options import Job

MORE_S = 2.0
"""How often to look whether the cluster has grown."""
NEW = "local"
"""For ``ray.init``: a cluster of this machine alone, whatever other one runs here."""


def address_of(given: str | None) -> str:
    """For ``ray.init``: the cluster that was named, else that of ``RAY_ADDRESS``, else a new one.

    Ray itself would join any cluster that somebody has started on this machine.
    """
    return given or os.environ.get("RAY_ADDRESS") or NEW


def resources_of(job: Job) -> dict[str, int]:
    """Ray shows a GPU only to those that have reserved it."""
    return {"CPU": job.cpus, **({"GPU": job.gpus} if job.gpus else {})}


def send_by_value(job: Job) -> None:
    """The nodes have none of these files."""
    for module in (data, model, options, own, sources, training, sys.modules[job.model.partition(":")[0]]):
        ray.cloudpickle.register_pickle_by_value(module)


def describe_cluster() -> dict[str, Any]:
    there = ray.cluster_resources()
    return {
        "ray_cluster_cpus": int(there.get("CPU", 0)),
        "ray_cluster_nodes": sum(1 for node in ray.nodes() if node["Alive"]),
        "ray_cluster_memory_bytes": int(there.get("memory", 0)),
        "ray_version": ray.__version__,
    }


def room_for(resources: dict[str, int]) -> int:
    """Workers that the nodes have room for. One is never divided among nodes."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return sum(min(int(node.get(name, 0) // count) for name, count in resources.items()) for node in nodes)


def wait_for_room(workers: int, resources: dict[str, int], timeout_s: int) -> dict[str, Any]:
    """The cluster, once its nodes have room for all workers; one that can grow is asked to."""
    until = time.monotonic() + timeout_s
    if room_for(resources) >= workers:
        return describe_cluster()
    ray.autoscaler.sdk.request_resources(bundles=[resources] * workers)
    try:
        while (room := room_for(resources)) < workers:
            if time.monotonic() >= until:
                each = " and ".join(f"{count} {name}" for name, count in resources.items())
                raise data.DataError(
                    f"--num-workers={workers} is not accepted: with {each} for each, the cluster has room for {room} "
                    f"after {timeout_s} s; take fewer workers, less for each, more nodes, or a longer --cluster-timeout"
                )
            time.sleep(MORE_S)
    finally:
        ray.autoscaler.sdk.request_resources(bundles=[])  # it would hold for ever; from here on Ray Train asks itself
    return describe_cluster()
