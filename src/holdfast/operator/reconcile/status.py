"""What a job's status says, from what is known of it: pure functions.

Everything that happened is found by comparing what is known now with what the status already says. So a controller
that was restarted says nothing twice and forgets nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from holdfast.operator.names import CONTAINER, EXIT_CODE, INDEX_LABEL, JOB_NAME_LABEL

PENDING, RUNNING, PREEMPTED, RESTARTING = "Pending", "Running", "Preempted", "Restarting"
SUSPENDED, COMPLETE, FAILED = "Suspended", "Complete", "Failed"
STALE_S = 300.0
STUCK_S = 30.0
"""A pod that cannot start is told of when it is older: a claim may be made, or an image be there, a moment later."""
_SWITCH = "HOLDFAST_ENABLED"
"""A variable that the webhook gives to the container that trains."""
_NO_CRASH = (0, EXIT_CODE, 137)
"""Well; saved just in time; killed, for which there are many reasons."""

_PROGRESS_KEYS = (
    "epoch",
    "totalEpochs",
    "step",
    "totalSteps",
    "loss",
    "accuracy",
    "validationLoss",
    "validationAccuracy",
    "learningRate",
    "percentComplete",
    "estimatedTimeRemaining",
    "lastUpdateTime",
    "resumedFrom",
    "checkpointing",
)


@dataclass(frozen=True, slots=True)
class Happened:
    """An Event to be told."""

    kind: str
    reason: str
    message: str


@dataclass(slots=True)
class Ended:
    """How the pods of a job ended, as far as it was seen."""

    preempted: bool = False
    disrupted: bool = False
    """Kubernetes itself says that it was stopped from outside."""
    oom: bool = False
    exit_codes: list[int] = field(default_factory=list)


def is_running(pod: dict[str, Any]) -> bool:
    if pod["metadata"].get("deletionTimestamp"):
        return False
    return any("running" in (status.get("state") or {}) for status in _trains(pod))


def _trains(pod: dict[str, Any]) -> list[dict[str, Any]]:
    """The status of the container that trains, once there is one. What others beside it do says nothing of the job."""
    name = container_of(pod)
    return [one for one in pod.get("status", {}).get("containerStatuses") or [] if one["name"] == name]


def how_ended(pod: dict[str, Any]) -> Ended:
    """Whether a pod was preempted: told to stop by somebody, or left with the exit code of a save just in time."""
    ended = Ended()
    for condition in pod.get("status", {}).get("conditions") or []:
        if condition.get("type") == "DisruptionTarget" and condition.get("status") == "True":
            ended.preempted = ended.disrupted = True
    for status in _trains(pod):
        for state in (status.get("state") or {}, status.get("lastState") or {}):
            terminated = state.get("terminated")
            if terminated:
                ended.exit_codes.append(int(terminated.get("exitCode", 0)))
                ended.oom = ended.oom or terminated.get("reason") == "OOMKilled"
                ended.preempted = ended.preempted or terminated.get("exitCode") == EXIT_CODE
    if pod["metadata"].get("deletionTimestamp") and not ended.oom:
        ended.preempted = True
    return ended


def _is_replaced(pod: dict[str, Any], pods: list[dict[str, Any]]) -> bool:
    """Whether a pod has ended and another was made for its place since: a Job keeps the old one until it is over."""
    if pod.get("status", {}).get("phase") not in ("Failed", "Succeeded"):
        return False
    ends = [((one.get("state") or {}).get("terminated") or {}).get("finishedAt") or "" for one in _trains(pod)]
    ended = max(ends, default="") or pod["metadata"].get("creationTimestamp") or ""
    others = [one for one in pods if one is not pod and _place(one) == _place(pod)]
    return any((one["metadata"].get("creationTimestamp") or "") >= ended for one in others)


def _place(pod: dict[str, Any]) -> tuple[str | None, str | None]:
    labels = pod["metadata"].get("labels") or {}
    return labels.get(JOB_NAME_LABEL), labels.get(INDEX_LABEL)


def waits_for(pod: dict[str, Any]) -> tuple[str, str] | None:
    """Why a pod does not start, as a word of Kubernetes and as a sentence; None: it has started, or nobody says why."""
    state = pod.get("status", {})
    if state.get("phase") != "Pending" or pod["metadata"].get("deletionTimestamp"):
        return None
    for condition in state.get("conditions") or []:
        if (condition.get("type"), condition.get("status")) == ("PodScheduled", "False"):
            return condition.get("reason") or "Unschedulable", condition.get("message") or ""
    for one in [*(state.get("initContainerStatuses") or []), *(state.get("containerStatuses") or [])]:
        waiting = (one.get("state") or {}).get("waiting") or {}
        why = waiting.get("reason") or "PodInitializing"
        if why not in ("ContainerCreating", "PodInitializing"):
            # The kubelet says one after the other, for ever.
            return "ImagePullBackOff" if why == "ErrImagePull" else why, waiting.get("message") or ""
    return None


def _stuck(pods: list[dict[str, Any]]) -> str:
    """The first pod that cannot start, and why, in words; empty: there is none."""
    for pod in pods:
        found = waits_for(pod)
        if found is not None and age_s(pod) > STUCK_S:
            said = " ".join(": ".join(filter(None, found)).split()).translate({ord("<"): "(", ord(">"): ")"})
            return f"pod {pod['metadata']['name']} cannot start: {said}"[:400]
    return ""


_CANNOT = re.compile(r"cannot start: (\w+)")


def phase_of(
    job: dict[str, Any], pods: list[dict[str, Any]], before: str | None, *, tells: bool = False
) -> tuple[str, str]:
    """Phase and, where there is one, the reason in words. ``tells``: one of the pods tells its progress, so it trains,
    though not all of them may be there."""
    conditions = {c["type"]: c for c in job.get("status", {}).get("conditions") or [] if c.get("status") == "True"}
    for names, phase in ((("Complete", "Completed"), COMPLETE), (("Failed",), FAILED)):
        for name in names:
            if name in conditions:
                found = conditions[name]
                reason = f"{found.get('reason', '')}: {found.get('message', '')}".strip(": ")
                return phase, reason if phase == FAILED else ""
    pods = [pod for pod in pods if not _is_replaced(pod, pods)]
    ends = [how_ended(pod) for pod in pods]
    if (job.get("spec") or {}).get("suspend"):
        return SUSPENDED, ""
    if any(end.oom for end in ends):
        return RESTARTING, "a container was killed since it used more memory than its limit (OOMKilled)"
    # Before the look at who is being stopped: after a crash of one pod, the others are deleted.
    codes = sorted({code for end in ends if not end.disrupted for code in end.exit_codes if code not in _NO_CRASH})
    if codes:
        return RESTARTING, f"a container ended with exit code {codes[0]}"
    if any(is_running(pod) for pod in pods):
        if any(end.preempted for end in ends):
            return PREEMPTED, "a pod is being stopped"
        # Those that have ended are not waited for: ranks need not end together.
        waiting = [pod for pod in pods if _is_waiting(pod)]
        if not waiting:
            return RUNNING, ""
        there = sum(map(is_running, pods))
        said = "; ".join(filter(None, (f"{there} of {there + len(waiting)} pods run", _stuck(waiting))))
        if tells or before == RUNNING:
            return RUNNING, said
        return (before if before in (PREEMPTED, RESTARTING) else PENDING), said
    stuck = _stuck(pods)
    if any(end.preempted for end in ends):
        return PREEMPTED, stuck or "its pods were stopped"
    if any(code for end in ends for code in end.exit_codes):
        return RESTARTING, "a container was killed"
    if before == RUNNING and any(end.exit_codes for end in ends):
        return RUNNING, ""  # done, and the job's own controller has not said so yet
    if before in (RUNNING, PREEMPTED, RESTARTING):
        return (PREEMPTED if before == RUNNING else before), stuck
    return PENDING, stuck


def _is_waiting(pod: dict[str, Any]) -> bool:
    """Whether it is still to come."""
    if pod["metadata"].get("deletionTimestamp") or is_running(pod):
        return False
    return pod.get("status", {}).get("phase") in (None, "Pending")


def combined(
    before: dict[str, Any],
    phase: str,
    reason: str,
    progress: dict[str, Any] | None,
    problem: str | None,
    pod: dict[str, Any] | None,
    now: datetime,
) -> tuple[dict[str, Any], list[Happened]]:
    """The new ``trainingProgress`` and what happened. ``progress``: just read from ``pod``; ``problem``: why not."""
    after = {key: value for key, value in before.items() if key not in ("conditions",)}
    happened: list[Happened] = []
    stale = progress is not None and is_stale(progress, phase, pod, now)
    if progress is not None and not stale:
        after = {key: value for key, value in after.items() if key not in _PROGRESS_KEYS} | progress
        uid = pod["metadata"]["uid"] if pod is not None else None
        resumed = progress.get("resumedFrom")
        if pod is not None and before.get("podUID") != uid:
            after["podUID"] = uid
            if resumed and (resumed != before.get("resumedFrom") or _is_new(pod, before, now)):
                after["recoveries"] = int(before.get("recoveries", 0)) + 1
                happened.append(Happened("Normal", "Resumed", f"Resumed from {resumed}"))
        latest = (progress.get("checkpointing") or {}).get("latestCheckpoint")
        if latest and latest != (before.get("checkpointing") or {}).get("latestCheckpoint"):
            happened.append(Happened("Normal", "CheckpointCommitted", f"Checkpoint committed: {latest}"))
    after.setdefault("recoveries", 0)
    if phase != before.get("phase"):
        news = [Happened("Normal", "Created", "Waiting for its pods")] if "phase" not in before else []
        if phase != PENDING or not news:
            news.append(_phase_event(phase, reason, after))
        happened = [*news, *happened]
        after["phase"] = phase
    if phase != RUNNING:
        after.pop("estimatedTimeRemaining", None)
    known = before.get("conditions") or []
    cannot = _CANNOT.search(reason)
    told = {found[1] for one in known if (found := _CANNOT.search(one.get("message") or ""))}
    if cannot is not None and cannot[1] not in told:
        happened.append(Happened("Warning", "CannotStart", reason[0].upper() + reason[1:]))
    after["conditions"] = conditions(known, phase, reason, progress, problem, now, stale=stale)
    return after, happened


def _is_new(pod: dict[str, Any], before: dict[str, Any], now: datetime) -> bool:
    """Whether a pod began after what is shown was written. Ranks of one attempt may all have one file, and any of them
    may be the one that was read."""
    written = before.get("lastUpdateTime")
    return written is None or _age_s(_began(pod), now) <= _age_s(written, now)


def _began(pod: dict[str, Any]) -> str | None:
    """When the training container of a pod was started."""
    for one in _trains(pod):
        for state in (one.get("state") or {}).values():
            if (state or {}).get("startedAt"):
                return str(state["startedAt"])
    made: str | None = pod["metadata"].get("creationTimestamp")
    return made


def age_s(pod: dict[str, Any]) -> float:
    """Of the training container of a pod."""
    return _age_s(_began(pod), datetime.now(UTC))


def is_stale(progress: dict[str, Any], phase: str, pod: dict[str, Any] | None, now: datetime) -> bool:
    """Not written for long, or by an earlier container: the file may lie on storage that outlives one."""
    written = progress.get("lastUpdateTime")
    if phase == RUNNING and _age_s(written, now) > STALE_S:
        return True
    for one in _trains(pod) if pod is not None else []:
        begin = ((one.get("state") or {}).get("running") or {}).get("startedAt")
        if begin:
            return _age_s(written, now) > _age_s(begin, now)
    return False


def is_older(progress: dict[str, Any], shown: dict[str, Any]) -> bool:
    """Whether it was written before what is shown."""
    now, known = datetime.now(UTC), shown.get("lastUpdateTime")
    return known is not None and _age_s(progress.get("lastUpdateTime"), now) > _age_s(known, now)


def container_of(pod: dict[str, Any]) -> str:
    """The one that trains."""
    containers = pod["spec"]["containers"]
    names = [container["name"] for container in containers]
    if CONTAINER in names:
        return CONTAINER
    # Others may have put one of theirs before it since.
    ours = [one["name"] for one in containers if any(env["name"] == _SWITCH for env in one.get("env") or [])]
    return str((ours or names)[0])


def _phase_event(phase: str, reason: str, after: dict[str, Any]) -> Happened:
    step = after.get("step")
    at = f" at step {step}" if step is not None else ""
    why = f": {reason}" if reason else ""
    return {
        PENDING: Happened("Normal", "Waiting", "Waiting for its pods"),
        RUNNING: Happened("Normal", "Running", f"Training{at}"),
        PREEMPTED: Happened("Warning", "Preempted", f"Preempted{at}{why}"),
        RESTARTING: Happened("Warning", "Restarting", f"Restarting{at}{why}"),
        SUSPENDED: Happened("Normal", "Suspended", f"Suspended{at}"),
        COMPLETE: Happened("Normal", "Complete", f"Complete{at}"),
        FAILED: Happened("Warning", "Failed", f"Failed{at}{why}"),
    }[phase]


def conditions(
    before: list[dict[str, Any]],
    phase: str,
    reason: str,
    progress: dict[str, Any] | None,
    problem: str | None,
    now: datetime,
    *,
    stale: bool = False,
) -> list[dict[str, Any]]:
    """``ProgressReadable``: whether the last look at the pods told anything; ``Running``: whether it trains."""
    known = {condition["type"]: condition for condition in before}

    def condition(name: str, status: str, why: str, message: str) -> dict[str, Any]:
        old = known.get(name)
        if old is not None and (old["status"], old["reason"], old["message"]) == (status, why, message):
            return old
        changed = old is None or old["status"] != status
        since = now.strftime("%Y-%m-%dT%H:%M:%SZ") if changed or old is None else old["lastTransitionTime"]
        return {"type": name, "status": status, "reason": why, "message": message, "lastTransitionTime": since}

    running = condition("Running", str(phase == RUNNING), phase, reason)
    if problem is not None:
        readable = condition("ProgressReadable", "False", "NotReadable", problem[:500])
    elif progress is not None and stale:
        said = f"the progress file was last written at {progress['lastUpdateTime']}, and is not believed any more"
        readable = condition("ProgressReadable", "False", "Stale", said)
    elif progress is not None:
        readable = condition("ProgressReadable", "True", "Read", "")
    else:
        readable = known.get("ProgressReadable") or condition("ProgressReadable", "Unknown", "NotYet", "")
    return [running, readable]


def _age_s(text: Any, now: datetime) -> float:
    """Of what does not say when it was written: none."""
    try:
        return (now - datetime.fromisoformat(str(text).replace("Z", "+00:00"))).total_seconds()
    except (ValueError, TypeError):
        return 0.0


_UNITS = {"d": 86400, "h": 3600, "m": 60, "s": 1}


def trainer_status(progress: dict[str, Any]) -> dict[str, Any]:
    """Upstream's own ``status.trainerStatus``."""
    status: dict[str, Any] = {
        "lastUpdatedTime": progress.get("lastUpdateTime") or datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    }
    try:
        status["progressPercentage"] = max(0, min(100, int(float(progress["percentComplete"]))))
    except (KeyError, ValueError, OverflowError):  # OverflowError: infinite
        pass
    remaining = progress.get("estimatedTimeRemaining")
    if isinstance(remaining, str):
        parts = re.findall(r"([0-9]+)([dhms])", remaining)
        if parts:
            status["estimatedRemainingSeconds"] = min(2**31 - 1, sum(int(n) * _UNITS[unit] for n, unit in parts))
    names = ("loss", "accuracy", "validationLoss", "validationAccuracy", "learningRate", "step", "epoch")
    metrics = [{"name": name, "value": str(progress[name])[:64]} for name in names if progress.get(name) is not None]
    if metrics:
        status["metrics"] = metrics
    return status
