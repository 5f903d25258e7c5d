"""What is done to a JobSet and to a plain Job: the failure policy that tells a preemption from a crash.

A preempted pod must restart its whole group and cost nothing; a crash must count. Upstream's defaults charge each
deleted pod to a limit of six, and replace one pod while its peers go on waiting for the old one.
"""

from __future__ import annotations

import copy
from typing import Any

from holdfast.operator.admission import pods
from holdfast.operator.names import CHECKPOINTING, CONTAINER, EXIT_CODE, JOB_NAME_LABEL, JOBSET_NAME_LABEL, MANAGED
from holdfast.operator.spec import Checkpointing, SpecError, from_annotations

CRASHES = 3
"""Restarts of the group after crashes, where the JobSet does not say."""
JOBSET_UID_LABEL = "jobset.sigs.k8s.io/jobset-uid"
JOB_UID_LABEL = "batch.kubernetes.io/controller-uid"
_RULE = "holdfastPreempted"
_STEP_LABEL = "trainer.kubeflow.org/trainjob-ancestor-step"


def run_id(asked: Checkpointing) -> dict[str, Any]:
    """What all starts of a JobSet's pods share: a restart, or a suspend, makes new Jobs and pods and no new JobSet."""
    return pods.run_id(asked, JOBSET_NAME_LABEL, JOBSET_UID_LABEL)


def _tell_apart(spec: dict[str, Any], action: str) -> None:
    """Give a Job's spec our two rules, before the user's own, and what goes with a pod failure policy."""
    ours: list[dict[str, Any]] = [
        {"action": action, "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": action, "onExitCodes": {"operator": "In", "values": [EXIT_CODE]}},
    ]
    policy = spec.get("podFailurePolicy") or {}
    theirs = [rule for rule in policy.get("rules") or [] if rule not in ours]
    spec["podFailurePolicy"] = {**policy, "rules": [*ours, *theirs]}
    spec["template"]["spec"]["restartPolicy"] = "Never"
    # The API server has set its default by now, which it does not accept together with a pod failure policy.
    if spec.get("podReplacementPolicy") is not None:
        spec["podReplacementPolicy"] = "Failed"


def secured_jobset(
    jobset: dict[str, Any], push: pods.Push = pods.ASKED, old: dict[str, Any] | None = None
) -> dict[str, Any]:
    """A JobSet that was made from a TrainJob that asks for it, or that asks itself by annotation. ``old``: as it is."""
    annotations = jobset.get("metadata", {}).get("annotations") or {}
    from_trainjob = annotations.get(MANAGED) == "TrainJob"
    asked = from_annotations(annotations)
    if not from_trainjob and asked is None:
        return jobset
    jobset = copy.deepcopy(jobset)
    spec = jobset["spec"]
    replicated = [job for job in spec.get("replicatedJobs", []) if not from_trainjob or _trains(job)]
    for job in replicated:
        template = job["template"]["spec"]
        if from_trainjob:
            pod = template["template"]["spec"]
            # Here, where those of the runtime are seen: a runtime patch would replace them.
            pod["tolerations"] = pods.added(pod.get("tolerations"), pods.tolerations(), "key")
            if asked is not None:
                pod["terminationGracePeriodSeconds"] = max(asked.grace_s, pod.get("terminationGracePeriodSeconds") or 0)
                # The runtime patch reaches one replicated job; rank 0 may train in another, a launcher.
                trains = [container for container in pod["containers"] if container["name"] == CONTAINER]
                if old is None:
                    pods.mount(pod, trains, asked, push)
                else:  # neither more nor less: an operator with other values would make it one that cannot be changed
                    pods.mount_again(pod, trains, _pod_of(old, job["name"]))
                if asked.secret:
                    pods.add_secret(trains, asked.secret)
        elif asked is not None and old is None:
            pods.secure(template["template"], asked, run_id(asked), push)
        elif asked is not None and old is not None:
            pods.put_back(template["template"], {"spec": _pod_of(old, job["name"])}, asked)
        # One pod that leaves ends its Job, and with it the group, which is then started anew.
        _tell_apart(template, "FailJob")
        template["backoffLimit"] = 0
        _label(template["template"], "TrainJob" if from_trainjob else "JobSet")
    policy = spec["failurePolicy"] = spec.get("failurePolicy") or {}
    policy.setdefault(
        "maxRestarts", (((old or {}).get("spec") or {}).get("failurePolicy") or {}).get("maxRestarts", CRASHES)
    )
    rules = [rule for rule in policy.get("rules") or [] if rule.get("name") != _RULE]
    ours = {
        "name": _RULE,
        "action": "RestartJobSetAndIgnoreMaxRestarts",
        "onJobFailureReasons": ["PodFailurePolicy"],
        "targetReplicatedJobs": [job["name"] for job in replicated],
    }
    policy["rules"] = [ours, *rules]
    return jobset


def check_update(old: dict[str, Any], new: dict[str, Any]) -> None:
    """What it needs cannot be changed any more once a Job or JobSet is there: its failure policy and its pods."""
    before, after = (thing.get("metadata", {}).get("annotations") or {} for thing in (old, new))
    kind = new.get("kind")
    if CHECKPOINTING not in after or MANAGED in after or after[CHECKPOINTING] == before.get(CHECKPOINTING):
        return
    if CHECKPOINTING not in before:
        raise SpecError(
            f"annotation {CHECKPOINTING}: cannot be added to a {kind} that is there already; delete the {kind} and "
            f"create it with the annotation"
        )
    raise SpecError(f"annotation {CHECKPOINTING}: cannot be changed after the job was created: make a new {kind}")


def is_secured(jobset: dict[str, Any]) -> bool:
    """Whether our webhook was asked when it was made."""
    policy = (jobset.get("spec") or {}).get("failurePolicy") or {}
    return any(rule.get("name") == _RULE for rule in policy.get("rules") or [])


def is_secured_job(job: dict[str, Any]) -> bool:
    """The same of a plain Job."""
    labels = ((job.get("spec") or {}).get("template", {}).get("metadata") or {}).get("labels") or {}
    return bool(labels.get(MANAGED) == "Job")


def secured_job(job: dict[str, Any], push: pods.Push = pods.ASKED, old: dict[str, Any] | None = None) -> dict[str, Any]:
    """A plain Job that asks for it by annotation. Its pods are replaced one by one: all of them leave together.

    ``old``: as it is.
    """
    annotations = job.get("metadata", {}).get("annotations") or {}
    asked = from_annotations(annotations)
    if asked is None or _owner(job) == "JobSet":
        return job
    job = copy.deepcopy(job)
    spec = job["spec"]
    if old is None:
        pods.secure(spec["template"], asked, pods.run_id(asked, JOB_NAME_LABEL, JOB_UID_LABEL), push)
    else:
        pods.put_back(spec["template"], old["spec"]["template"], asked)
    _tell_apart(spec, "Ignore")
    _label(spec["template"], "Job")
    return job


def _label(template: dict[str, Any], kind: str) -> None:
    template["metadata"] = template.get("metadata") or {}
    template["metadata"]["labels"] = {**(template["metadata"].get("labels") or {}), MANAGED: kind}


def _trains(job: dict[str, Any]) -> bool:
    labels = (job["template"].get("metadata") or {}).get("labels") or {}
    return labels.get(_STEP_LABEL) == "trainer" or job["name"] == CONTAINER


def _pod_of(jobset: dict[str, Any], name: str) -> dict[str, Any]:
    """Of a replicated job."""
    found = [job for job in jobset["spec"].get("replicatedJobs", []) if job["name"] == name]
    return found[0]["template"]["spec"]["template"]["spec"] if found else {}


def _owner(thing: dict[str, Any]) -> str | None:
    owners = thing.get("metadata", {}).get("ownerReferences") or []
    return owners[0].get("kind") if owners else None
