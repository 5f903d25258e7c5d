"""What is done to a RayCluster, RayJob and RayService that has the two annotations.

They become the two variables in every Ray container. Ray drains a node that is told to stop for as long as its own
drain timeout says, and Kubernetes kills the pod at the end of its grace period: the first is made to fit into the
second, and both leave time for the save.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator
from typing import Any

from holdfast.operator.names import INJECTED, RAY_ENABLED, RAY_KILL_WAIT
from holdfast.operator.spec import SpecError

ENABLED_VARIABLE = "RAY_TRAIN_JIT_CHECKPOINT_ENABLED"
KILL_WAIT_VARIABLE = "RAY_TRAIN_JIT_CHECKPOINT_KILL_WAIT"
DRAIN_VARIABLE = "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"
GRACE_S = 60
_MARGIN_S = 10
"""Between the end of Ray's drain and SIGKILL."""
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


def asked_by(annotations: dict[str, str]) -> tuple[bool | None, float | None] | None:
    """Whether it is on, and the kill wait, each None where it is not said; None: the annotations say nothing.

    Raises SpecError for a bad value.
    """
    enabled, kill_wait = annotations.get(RAY_ENABLED), annotations.get(RAY_KILL_WAIT)
    seconds: float | None = None
    if kill_wait is not None:
        accepted = 'a number of seconds, 0 or more, in quotes: "5.0"'
        try:
            seconds = float(kill_wait)
        except ValueError:
            seconds = math.nan
        if not 0 <= seconds < 1e6:
            raise SpecError(f"annotation {RAY_KILL_WAIT}: {kill_wait!r} is not accepted; it must be {accepted}")
    if enabled is None:
        return None if seconds is None else (None, seconds)
    word = enabled.strip().lower()
    if word not in (*_TRUE, *_FALSE):
        raise SpecError(f'annotation {RAY_ENABLED}: {enabled!r} is not accepted; it must be "true" or "false"')
    return word in _TRUE, seconds


def secured(thing: dict[str, Any]) -> dict[str, Any]:
    """The object with what its Ray containers need, and without what it needed before and does not any more."""
    asked = asked_by(thing.get("metadata", {}).get("annotations") or {})
    thing = copy.deepcopy(thing)
    for template in templates(thing):
        _remove(template)
        if asked is not None:
            _secure(template, *asked)
    return thing


def warnings(thing: dict[str, Any]) -> list[str]:
    """What would keep the save from happening, in words for whoever creates the object."""
    asked = asked_by(thing.get("metadata", {}).get("annotations") or {})
    if asked is None or not asked[0]:
        return []
    found = []
    if thing["kind"] == "RayJob" and (thing.get("spec") or {}).get("clusterSelector"):
        found.append(
            f"spec.clusterSelector: this RayJob runs on a RayCluster that is there already, and {RAY_ENABLED} changes "
            f"nothing in it: annotate the RayCluster, when it is created"
        )
    for template in templates(thing):
        for container in template["spec"]["containers"]:
            hook = ((container.get("lifecycle") or {}).get("preStop") or {}).get("exec") or {}
            if "ray stop" in " ".join(hook.get("command") or []):
                found.append(
                    f"container {container['name']}: its preStop hook runs 'ray stop', which ends Ray before the "
                    f"training can be saved; remove the hook"
                )
    return found


def templates(thing: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The pod templates of all Ray nodes."""
    spec = thing.get("spec") or {}
    cluster = {
        "RayCluster": lambda: spec,
        "RayJob": lambda: spec.get("rayClusterSpec") or {},
        "RayService": lambda: spec.get("rayClusterConfig") or {},
    }[thing["kind"]]()
    for group in (cluster.get("headGroupSpec"), *(cluster.get("workerGroupSpecs") or [])):
        if group and ((group.get("template") or {}).get("spec") or {}).get("containers"):
            yield group["template"]


def _secure(template: dict[str, Any], enabled: bool | None, kill_wait: float | None) -> None:
    pod = template["spec"]
    variables = {} if enabled is None else {ENABLED_VARIABLE: "true" if enabled else "false"}
    injected: dict[str, Any] = {}
    if kill_wait is not None:
        variables[KILL_WAIT_VARIABLE] = str(kill_wait)
    if enabled:
        before = pod.get("terminationGracePeriodSeconds")
        grace = max(before or 0, GRACE_S + math.ceil(kill_wait or 0))
        if grace != before:
            injected["grace"] = [before, grace]
            pod["terminationGracePeriodSeconds"] = grace
        variables |= {"HOLDFAST_GRACE_PERIOD": str(grace - _MARGIN_S), DRAIN_VARIABLE: str(grace - _MARGIN_S)}
    container = pod["containers"][0]  # KubeRay starts Ray in the first one
    there = {variable["name"] for variable in container.get("env") or []}
    injected["env"] = {name: value for name, value in variables.items() if name not in there}
    more = [{"name": name, "value": value} for name, value in injected["env"].items()]
    container["env"] = [*(container.get("env") or []), *more]
    template["metadata"] = template.get("metadata") or {}
    annotations = template["metadata"].get("annotations") or {}
    template["metadata"]["annotations"] = {**annotations, INJECTED: json.dumps(injected, sort_keys=True)}


def _remove(template: dict[str, Any]) -> None:
    """Take out what an earlier look at this template put in, unless somebody has changed it since."""
    annotations = (template.get("metadata") or {}).get("annotations") or {}
    if INJECTED not in annotations:
        return
    text = annotations.pop(INJECTED)
    if not annotations:
        del template["metadata"]["annotations"]
    if not template["metadata"]:
        del template["metadata"]
    try:
        injected = json.loads(text)
        variables, (before, grace) = dict(injected.get("env") or {}), injected.get("grace") or (None, None)
    except (ValueError, TypeError, AttributeError, RecursionError):  # not written by us
        return
    pod = template["spec"]
    container = pod["containers"][0]
    if variables:
        ours = [{"name": name, "value": value} for name, value in variables.items()]
        container["env"] = [one for one in container.get("env") or [] if one not in ours]
        if not container["env"]:
            del container["env"]
    if grace is not None and pod.get("terminationGracePeriodSeconds") == grace:
        del pod["terminationGracePeriodSeconds"]
        if before is not None:
            pod["terminationGracePeriodSeconds"] = before
