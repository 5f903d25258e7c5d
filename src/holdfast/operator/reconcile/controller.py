"""Follows the jobs that the webhooks have made safe: reads their progress, writes it into their status, tells Events.

Both replicas see all events; only the one that leads acts. Each job has a time at which it is looked at next: at once
after an event of it or of its pods, else after 15 s, and after longer and longer times up to 60 s while nothing
changes. A few workers take the jobs whose time has come. Nothing is kept here that is not in the cluster too.
"""

from __future__ import annotations

import asyncio
import hashlib
import heapq
import json
import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from kubernetes_asyncio.client.exceptions import ApiException

from holdfast.errors import ConfigError
from holdfast.operator.admission import jobset
from holdfast.operator.admission.trainjob import asked_by, is_secured
from holdfast.operator.cluster import Cluster, FileNotReadError, PodReadError, PodSilentError, plain
from holdfast.operator.names import (
    INDEX_LABEL,
    JOB_INDEX_LABEL,
    JOB_NAME_LABEL,
    JOBSET_GROUP,
    JOBSET_NAME_LABEL,
    JOBSET_VERSION,
    MANAGED,
    PROGRESS,
    TRAINER_GROUP,
    TRAINER_VERSION,
    TRAINJOBS,
)
from holdfast.operator.reconcile import status
from holdfast.operator.spec import Checkpointing, Volume, from_annotations
from holdfast.progress import ProgressFileError, parse_progress

log = logging.getLogger("holdfast.operator")

SOONEST_S, LATEST_S = 15.0, 60.0
AFTER_EVENT_S = 0.5
"""Events come in bursts: a job is looked at once for all of them."""
WORKERS = 16
READ_S = 20.0
"""For the files of all pods of a job: one that does not answer costs 10 s."""
SILENT_S = 60.0
"""A pod that did not answer is not asked again for so long: each time would keep a worker waiting."""
LOST_S = 15.0
"""A pod that should have been gone for so long, on a node that does not answer, is given up."""

Key = tuple[str, str, str]
"""Kind, namespace and name of a job."""
_ENDED = (status.COMPLETE, status.FAILED)
_NOT_REACHED = (
    "The operator was not reached when the {} was made: a preemption counts as a failure, the pods have the grace "
    "period of the runtime, and no progress is shown. Delete the {}{}"
)
_UNPROTECTED = status.Happened(
    "Warning", "NotProtected", _NOT_REACHED.format("JobSet", "JobSet", ": it is made again, with all of it")
)
_UNTOUCHED = status.Happened(
    "Warning", "NotProtected", _NOT_REACHED.format("TrainJob", "TrainJob", " and create it again")
)


@dataclass(slots=True)
class Job:
    """A job and its pods, as last seen."""

    key: Key
    body: dict[str, Any] | None = None
    pods: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By UID. Those that are gone stay until the job has been looked at."""
    gone: set[str] = field(default_factory=set)
    pushed: dict[str, bytes] = field(default_factory=dict)
    """What pods have told by themselves, by UID."""
    left: tuple[dict[str, Any], dict[str, Any]] | None = None
    """The newest progress that a pod has left at its end, and that pod, until the job has been looked at."""
    looked: float = 0.0
    """When it was looked at last."""
    asked: Checkpointing | None = None
    pause_s: float = SOONEST_S
    due: float = 0.0
    """When it is looked at next; 0: it is not in the queue."""
    busy: bool = False
    claims_made: bool = False
    told_unprotected: bool = False
    """That the webhook was not asked when its JobSet was made."""
    missing: int = 0
    """How often in a row the API server has said that it is not there."""
    forgotten: bool = False
    """What was shown may not be there any more: it is written again."""
    silent: dict[str, tuple[float, str]] = field(default_factory=dict)
    """Pods that did not answer, by UID: until when they are not asked, and what is said of it."""
    by_log: set[str] = field(default_factory=set)
    """Pods, by UID, whose progress was found in the termination log and not in its file."""
    claim_refused: str = ""
    """What the API server last said against a claim: it is told once."""


class Controller:
    """All jobs of the cluster."""

    def __init__(
        self,
        cluster: Cluster,
        *,
        touch_crd: bool = True,
        execs: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.cluster = cluster
        self.touch_crd = touch_crd
        """Whether a TrainJob's status has a field for the progress; else it goes into an annotation."""
        self.execs = execs
        """Whether pods are looked into; else they tell their progress by themselves."""
        self.jobs: dict[Key, Job] = {}
        self._bare: dict[tuple[str, str], str | None] = {}
        """UIDs of JobSets of TrainJobs that were made without the webhook, by namespace and name."""
        self.leads = False
        self._leads_since = 0.0
        self.looks = 0
        self.late_s = 0.0
        """The longest that a job had to wait beyond its time, in this minute."""
        self._clock = clock
        self._queue: list[tuple[float, Key]] = []
        self._woken = asyncio.Event()

    # ------------------------------------------------------------------ what is seen

    def saw_job(self, kind: str, event: str | None, body: dict[str, Any]) -> None:
        """A TrainJob, JobSet or Job was made, changed or (``DELETED``) removed."""
        meta = body["metadata"]
        key = (kind, meta["namespace"], meta["name"])
        owners = [owner.get("kind") for owner in meta.get("ownerReferences") or []]
        if kind == "JobSet" and "TrainJob" in owners:
            self._saw_part(key[1:], meta.get("uid"), event, bare=not jobset.is_secured(body))
        known = self.jobs.get(key)
        # Events of two jobs of one name, one deleted and one made then, may come in any order.
        other = known is not None and known.body is not None and known.body["metadata"].get("uid") != meta.get("uid")
        if event == "DELETED":
            if not other:
                self.jobs.pop(key, None)
            return
        if other and known is not None:
            known = self.jobs[key] = Job(key, pods=known.pods, gone=known.gone, pushed=known.pushed, left=known.left)
        try:
            asked = asked_by(body) if kind == "TrainJob" else from_annotations(meta.get("annotations") or {})
        except ConfigError as error:  # written while no webhook was there
            log.warning("%s %s/%s: %s", *key, error)
            asked = known.asked if known is not None else None
        if asked is None or (kind != "TrainJob" and ("TrainJob" in owners or "JobSet" in owners)):
            if key in self.jobs:  # it does not ask any more
                self.jobs[key].body = self.jobs[key].asked = None
            return
        job = self.jobs.setdefault(key, Job(key))
        changed = job.body is None or _told(job.body) != _told(body)
        if job.body is not None and job.body["metadata"].get("uid") == meta.get("uid") and not self._shown(body):
            # While the CRD lacks the field, as it does for a moment when Kubeflow Trainer is upgraded, nobody reads it.
            self._note(body, self._shown(job.body))
        job.body, job.asked = body, asked
        if changed:
            self._look_soon(job)

    def _saw_part(self, name: tuple[str, str], uid: str | None, event: str | None, *, bare: bool) -> None:
        """The JobSet of a TrainJob, which may be seen before the TrainJob is."""
        if event == "DELETED":
            if self._bare.get(name) == uid:
                self._bare.pop(name, None)
        elif not bare:
            self._bare.pop(name, None)
        elif name not in self._bare:
            self._bare[name] = uid
            if (job := self.jobs.get(("TrainJob", *name))) is not None:
                job.told_unprotected = False
                self._look_soon(job)

    def show_again(self) -> None:
        """The field for it was gone from the CRD, and with it perhaps what was shown."""
        for job in self.jobs.values():
            if job.body is not None and self._in_status(job.body) and self._shown(job.body):
                job.forgotten = True
                self._look_soon(job)

    def saw_pod(self, event: str, pod: dict[str, Any]) -> None:
        key = job_of(pod)
        if key is None:
            return
        job = self.jobs.setdefault(key, Job(key))
        uid = pod["metadata"]["uid"]
        before = job.pods.get(uid)
        job.pods[uid] = pod
        changed = event == "DELETED" or before is None or _pod_told(before) != _pod_told(pod)
        if changed:
            self._hear_last_words(job, pod)
        if event == "DELETED" and (job.body is None or not self.leads):
            # Nobody is going to look at how it ended.
            del job.pods[uid]
            job.gone.discard(uid)
            if job.body is None and not job.pods:
                del self.jobs[key]
                return
        elif event == "DELETED":
            job.gone.add(uid)
        if changed:
            self._look_soon(job)

    def _hear_last_words(self, job: Job, pod: dict[str, Any]) -> None:
        """Now, since the pod may be gone at the next look, and whoever leads next has not looked at it."""
        try:
            progress = parse_progress(_last_words(pod))
        except ProgressFileError:
            return
        if job.left is None or not status.is_older(progress, job.left[0]):
            job.left = progress, pod

    def saw_push(self, uid: str, data: bytes) -> bool:
        """A pod has told its progress; returns whether its job is followed. No pod is looked at sooner than in turn."""
        for job in self.jobs.values():
            if uid in job.pods and job.body is not None:
                job.pushed[uid] = data
                self._schedule(job, max(AFTER_EVENT_S, job.looked + SOONEST_S - self._clock()))
                return True
        return False

    def _look_soon(self, job: Job) -> None:
        job.pause_s = SOONEST_S
        self._schedule(job, AFTER_EVENT_S)

    def _schedule(self, job: Job, in_s: float) -> None:
        due = self._clock() + in_s
        if job.due and job.due <= due:
            return
        job.due = due
        heapq.heappush(self._queue, (due, job.key))
        self._woken.set()

    # ------------------------------------------------------------------ what is done

    async def lead(self) -> None:
        """Follow all jobs until this is cancelled: another replica leads then."""
        log.info("leading")
        self.leads, self._leads_since = True, self._clock()
        for job in self.jobs.values():
            job.due, job.busy = 0.0, False
            self._schedule(job, 0.0)
        tasks = [asyncio.create_task(self._work()) for _ in range(WORKERS)]
        tasks.append(asyncio.create_task(self._tell_work()))
        try:
            await asyncio.gather(*tasks)
        finally:
            self.leads = False
            for task in tasks:
                task.cancel()
            log.info("not leading any more")

    async def watch_pods(self) -> None:
        """Learn of pods, for ever."""
        while True:
            try:
                async for event, pod in self.cluster.pods():
                    if event == "LISTED":
                        listed = {one["metadata"]["uid"] for one in pod["items"]}
                        for job in list(self.jobs.values()):
                            for uid in set(job.pods) - listed - job.gone:
                                self.saw_pod("DELETED", job.pods[uid])
                        for one in pod["items"]:
                            self.saw_pod("LISTED", one)
                    else:
                        self.saw_pod(event, pod)
            except asyncio.CancelledError:
                raise
            except Exception as error:
                log.warning("cannot watch pods (%s: %s); trying again", type(error).__name__, str(error)[:200])
                await asyncio.sleep(5.0)

    async def _tell_work(self) -> None:
        """Whether it keeps up, in the log."""
        while True:
            before, looks, self.late_s = Counter(self.cluster.calls), self.looks, 0.0
            await asyncio.sleep(60.0)
            calls = self.cluster.calls - before
            kinds = ", ".join(f"{count} {kind}" for kind, count in calls.most_common())
            log.info(
                "in the last minute: %d jobs followed, %d looks, at most %.1f s late, %d API calls (%s)",
                sum(job.body is not None for job in self.jobs.values()),
                self.looks - looks,
                self.late_s,
                calls.total(),
                kinds,
            )

    async def _work(self) -> None:
        while True:
            job = await self._next()
            job.busy = True
            try:
                await self._look(job)
                job.missing = 0
            except asyncio.CancelledError:
                raise
            except ApiException as error:
                job.missing = job.missing + 1 if error.status == 404 else 0
                if job.missing > 1:
                    job.body = None  # deleted while nobody watched; if it is there, the next event of it says so
                elif not job.missing:
                    log.warning("%s %s/%s: the API server answered %s %s", *job.key, error.status, error.reason)
                job.pause_s = LATEST_S / 2
            except Exception:
                log.exception("%s %s/%s: cannot be looked at", *job.key)
                job.pause_s = LATEST_S
            finally:
                job.busy = False
            if self.jobs.get(job.key) is not job:
                continue
            if job.body is None and not job.pods:
                del self.jobs[job.key]
            elif not self._is_over(job):
                self._schedule(job, job.pause_s)

    async def _next(self) -> Job:
        while True:
            self._woken.clear()
            now = self._clock()
            while self._queue and self._queue[0][0] <= now:
                due, key = heapq.heappop(self._queue)
                job = self.jobs.get(key)
                if job is None or job.due != due:
                    continue
                job.due = 0.0
                if job.busy:  # looked at by another worker: again when that is done
                    self._schedule(job, AFTER_EVENT_S)
                    continue
                self.late_s = max(self.late_s, now - due)
                return job
            wait_s = max(0.01, self._queue[0][0] - now) if self._queue else None
            try:
                await asyncio.wait_for(self._woken.wait(), wait_s)
            except TimeoutError:
                pass

    def _is_over(self, job: Job) -> bool:
        return job.body is not None and not job.pods and self._shown(job.body).get("phase") in _ENDED

    async def _look(self, job: Job) -> None:
        if job.body is None or job.asked is None:
            return
        self.looks += 1
        job.looked = self._clock()
        body, asked = job.body, job.asked
        if not job.claims_made:
            job.claims_made = await self._make_claims(job, asked)
        before = self._shown(body)
        if job.key[0] == "TrainJob" and job.key[1:] in self._bare and not job.told_unprotected:
            job.told_unprotected = True
            await self._tell(body, _UNPROTECTED if is_secured(body) else _UNTOUCHED, {})
        # Others are left from a job of the same name before it.
        since = body["metadata"].get("creationTimestamp") or ""

        def is_mine(pod: dict[str, Any]) -> bool:
            return (pod["metadata"].get("creationTimestamp") or since) >= since

        pods = sorted(filter(is_mine, job.pods.values()), key=_order)
        gone = set(job.gone)
        progress, problem, source = await self._read(job, pods, gone, asked)
        now = datetime.now(UTC)
        tells = progress is not None and not status.is_stale(progress, status.PENDING, source, now)
        phase, reason = status.phase_of(body, pods, before.get("phase"), tells=tells)
        left = job.left
        if progress is None and left is not None and is_mine(left[1]) and not status.is_older(left[0], before):
            (progress, source), problem = left, None
        after, happened = status.combined(before, phase, reason, progress, problem, source, now)
        # Before the status, which says that they have been told; under names by which the same one is not told twice.
        for one in happened:
            await self._tell(body, one, before)
        if after != before or job.forgotten or self._is_shown_elsewhere(body):
            stale = progress is not None and status.is_stale(progress, phase, source, now)
            await self._show(body, after, None if stale else progress)
            job.forgotten = False
        for uid in gone:
            job.pods.pop(uid, None)
            job.gone.discard(uid)
            job.pushed.pop(uid, None)
            job.silent.pop(uid, None)
            job.by_log.discard(uid)
        if job.left is left:
            job.left = None
        await self._give_up_lost(job)
        moved = after != before
        job.pause_s = SOONEST_S if moved else min(LATEST_S, job.pause_s * 1.5)
        # The API server's own answer comes as an event; until then this is what was shown.
        self._note(body, after)

    def _note(self, body: dict[str, Any], shown: dict[str, Any]) -> None:
        """Into a job as it is known here."""
        if self._in_status(body):
            body.setdefault("status", {})["trainingProgress"] = shown
        else:
            body["metadata"].setdefault("annotations", {})[PROGRESS] = json.dumps(shown, sort_keys=True)

    async def _tell(self, body: dict[str, Any], one: status.Happened, before: dict[str, Any]) -> None:
        told = json.dumps([body["metadata"]["uid"], before, one.reason, one.message], sort_keys=True)
        try:
            name = hashlib.sha256(told.encode()).hexdigest()[:16]
            await self.cluster.event(body, one.kind, one.reason, one.message, name)
        except ApiException as error:
            log.warning("%s %s/%s: cannot tell that it is %s: %s", *_key(body), one.reason, _said(error))

    def _in_status(self, body: dict[str, Any]) -> bool:
        return self.touch_crd and bool(body["kind"] == "TrainJob")

    def _shown(self, body: dict[str, Any]) -> dict[str, Any]:
        return shown(body, in_status=self._in_status(body))

    def _is_shown_elsewhere(self, body: dict[str, Any]) -> bool:
        """In the status, by an operator with other values: nobody would keep it up to date there."""
        inside = (body.get("status") or {}).get("trainingProgress")
        return body["kind"] == "TrainJob" and not self.touch_crd and bool(inside)

    async def _read(
        self, job: Job, pods: list[dict[str, Any]], gone: set[str], asked: Checkpointing
    ) -> tuple[dict[str, Any] | None, str | None, dict[str, Any] | None]:
        """The progress of the first pod that tells it, rank 0 first; else what is wrong with what the first said."""
        problem: str | None = None
        end = self._clock() + READ_S
        for pod in pods:
            meta = pod["metadata"]
            if meta["uid"] in gone or not _can_exec(pod):
                continue
            if self._clock() > end:  # the rest at the next look: how the job is doing must be shown in time
                break
            try:
                data = job.pushed.get(meta["uid"])
                if data is None and not self.execs:
                    if self._should_have_told(pod):
                        problem = problem or f"pod {meta['name']} has not told its progress"
                    continue
                until, said = job.silent.get(meta["uid"], (0.0, ""))
                if data is None and self._clock() < until:
                    problem = problem or said
                    continue
                if data is None:
                    data = await self._look_into(job, pod, asked)
                return parse_progress(data), None, pod
            except ProgressFileError as error:
                said = plain(str(error), 400)
                problem = problem or f"the progress file of pod {meta['name']} is not accepted: {said}"
            except PodReadError as error:
                if isinstance(error, PodSilentError):
                    job.silent[meta["uid"]] = (self._clock() + SILENT_S, str(error))
                problem = problem or str(error)
        return None, problem, None

    async def _look_into(self, job: Job, pod: dict[str, Any], asked: Checkpointing) -> bytes:
        """The progress file of a pod; else what its training wrote into the termination log, which it may write where
        it is not root, or its root is read only."""
        meta = pod["metadata"]
        place = (meta["namespace"], meta["name"], status.container_of(pod))
        paths = [_file(pod, asked), *filter(None, [_variable(pod, "HOLDFAST_TERMINATION_LOG")])]
        if meta["uid"] in job.by_log:
            paths.reverse()
        missing: FileNotReadError | None = None
        for path in paths:
            try:
                data = await self.cluster.read_file(*place, path)
            except FileNotReadError as error:
                missing = missing or error
                continue
            if data.strip() or len(paths) == 1 or path == _file(pod, asked):
                (job.by_log.discard if path == _file(pod, asked) else job.by_log.add)(meta["uid"])
                return data
        assert missing is not None
        raise missing

    def _should_have_told(self, pod: dict[str, Any]) -> bool:
        """Not to the replica that led before this one."""
        return min(self._clock() - self._leads_since, status.age_s(pod)) > status.STALE_S

    async def _show(self, body: dict[str, Any], after: dict[str, Any], progress: dict[str, Any] | None) -> None:
        new: dict[str, Any] = {}
        if body["kind"] == "TrainJob":  # upstream's own field
            there = (body.get("status") or {}).get("trainerStatus") or {}
            now = dict(there) if progress is None else status.trainer_status(progress)
            if after.get("phase") != status.RUNNING:
                now.pop("estimatedRemainingSeconds", None)
            if now != there:
                new["trainerStatus"] = _replacing(there, now)
        if self._in_status(body):
            # A merge patch: what is not there any more has to be named.
            new["trainingProgress"] = _replacing(self._shown(body), after)
        else:
            await self.cluster.annotate(_collection(body), body, {PROGRESS: json.dumps(after, sort_keys=True)})
            if self._is_shown_elsewhere(body):
                new["trainingProgress"] = None
        if new:
            await self.cluster.patch_status(TRAINER_GROUP, TRAINER_VERSION, TRAINJOBS, body, new)
            if new.get("trainingProgress", new) is None:
                del body["status"]["trainingProgress"]

    async def _make_claims(self, job: Job, asked: Checkpointing) -> bool:
        """Whether all of them are there. One that is refused is tried again at the next look."""
        assert job.body is not None
        for volume in asked.volumes:
            if not volume.size:
                continue
            try:
                made = await self.cluster.make_claim(job.key[1], claim(volume, asked.access_mode))
            except ApiException as error:
                refused = f"Cannot make the claim {volume.claim}: {_said(error)}"
                if refused != job.claim_refused:
                    job.claim_refused = refused
                    await self.cluster.event(job.body, "Warning", "ClaimFailed", refused)
                return False
            if made:
                message = f"Made the claim {volume.claim} of {volume.size}; it stays when the job is deleted"
                await self.cluster.event(job.body, "Normal", "ClaimCreated", message)
        return True

    async def _give_up_lost(self, job: Job) -> None:
        """A pod on a lost node never ends by itself, and its group would wait for it for ever."""
        for pod in list(job.pods.values()):
            until = pod["metadata"].get("deletionTimestamp")
            node = pod.get("spec", {}).get("nodeName")
            if not until or not node:
                continue
            late_s = (datetime.now(UTC) - datetime.fromisoformat(until.replace("Z", "+00:00"))).total_seconds()
            if late_s < LOST_S:
                self._schedule(job, max(1.0, LOST_S - late_s))
            elif not await self.cluster.is_ready(node):
                log.warning("pod %s is given up: its node %s does not answer", pod["metadata"]["name"], node)
                await self.cluster.give_up(pod)


def _key(body: dict[str, Any]) -> Key:
    return body["kind"], body["metadata"]["namespace"], body["metadata"]["name"]


def _said(error: ApiException) -> str:
    """The API server's own words, where it has some."""
    try:
        said = json.loads(error.body or "")["message"]
    except (ValueError, TypeError, KeyError):
        said = f"{error.status} {error.reason}"
    return plain(str(said), 300)


def claim(volume: Volume, access_mode: str) -> dict[str, Any]:
    """No owner: a claim outlives the job whose checkpoints it holds."""
    spec: dict[str, Any] = {"accessModes": [access_mode], "resources": {"requests": {"storage": volume.size}}}
    if volume.storage_class:
        spec["storageClassName"] = volume.storage_class
    return {"metadata": {"name": volume.claim, "labels": {MANAGED: "claim"}}, "spec": spec}


def job_of(pod: dict[str, Any]) -> Key | None:
    """The job that a pod belongs to. A TrainJob's JobSet has its name."""
    labels = pod["metadata"].get("labels") or {}
    kind = labels.get(MANAGED)
    name = labels.get(JOBSET_NAME_LABEL) if kind in ("TrainJob", "JobSet") else labels.get(JOB_NAME_LABEL)
    return (kind, pod["metadata"]["namespace"], name) if kind in ("TrainJob", "JobSet", "Job") and name else None


_INDICES = (JOB_INDEX_LABEL, INDEX_LABEL)


def _order(pod: dict[str, Any]) -> tuple[int, int, str]:
    labels = pod["metadata"].get("labels") or {}
    of_job, index = (int(text) if text.isdigit() else 0 for text in map(str, map(labels.get, _INDICES)))
    # Of two pods with one index the newer comes first: the other is on its way out.
    return of_job, index, _backwards(pod["metadata"].get("creationTimestamp") or "")


def _backwards(text: str) -> str:
    return "".join(chr(0x10FFFF - ord(letter)) for letter in text)


def _can_exec(pod: dict[str, Any]) -> bool:
    name = status.container_of(pod)
    statuses = pod.get("status", {}).get("containerStatuses") or []
    return any(one["name"] == name and "running" in (one.get("state") or {}) for one in statuses)


def _last_words(pod: dict[str, Any]) -> bytes:
    """What the training container left when it ended, as the kubelet keeps it."""
    for one in pod.get("status", {}).get("containerStatuses") or []:
        if one["name"] == status.container_of(pod):
            ended = (one.get("state") or {}).get("terminated") or {}
            return str(ended.get("message") or "").encode()
    return b""


def _file(pod: dict[str, Any], asked: Checkpointing) -> str:
    # As the training reads them.
    given = (_variable(pod, name) for name in ("HOLDFAST_PROGRESS_FILE", "TRAINING_PROGRESS_FILE"))
    return next(filter(None, given), asked.progress_file)


def _variable(pod: dict[str, Any], name: str) -> str | None:
    """Of the training container, as far as it stands in the pod itself."""
    for container in pod["spec"]["containers"]:
        if container["name"] == status.container_of(pod):
            values = {variable["name"]: variable.get("value") for variable in container.get("env") or []}
            return str(values[name]) if values.get(name) else None
    return None


def shown(body: dict[str, Any], *, in_status: bool) -> dict[str, Any]:
    """What the job says of itself so far: where it is shown, or else where an operator with other values showed it."""
    inside = (body.get("status") or {}).get("trainingProgress") or {}
    try:
        beside = json.loads((body["metadata"].get("annotations") or {}).get(PROGRESS, "{}"))
    except (ValueError, RecursionError):
        beside = {}
    beside = beside if _is_ours(beside) else {}
    return dict((inside or beside) if in_status else (beside or inside))


def _is_ours(shown: Any) -> bool:
    """Whether what stands in the annotation, which anybody may write, can be something that was shown."""
    if not isinstance(shown, dict) or not isinstance(shown.get("recoveries", 0), int):
        return False
    conditions, keys = shown.get("conditions", []), {"type", "status", "reason", "message", "lastTransitionTime"}
    if not isinstance(conditions, list) or not isinstance(shown.get("checkpointing", {}), dict):
        return False
    return all(isinstance(one, dict) and set(one) >= keys for one in conditions)


def _replacing(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """A merge patch after which ``after`` is there and nothing else of ``before``."""
    inner = {key: (before.get(key), value) for key, value in after.items()}
    merged = {
        key: _replacing(old, new) if isinstance(old, dict) and isinstance(new, dict) else new
        for key, (old, new) in inner.items()
    }
    return dict.fromkeys(before) | merged


def _told(body: dict[str, Any]) -> Any:
    """What of a job makes a look worth while: not what the controller itself has written."""
    theirs = {key: value for key, value in (body.get("status") or {}).items() if key in ("conditions", "restarts")}
    return body["metadata"].get("generation"), body.get("spec", {}).get("suspend"), theirs


def _pod_told(pod: dict[str, Any]) -> Any:
    state = [tuple(one.get("state") or {}) for one in pod.get("status", {}).get("containerStatuses") or []]
    waits = (status.waits_for(pod) or ("",))[0]
    return pod.get("status", {}).get("phase"), state, waits, pod["metadata"].get("deletionTimestamp")


def _collection(body: dict[str, Any]) -> str:
    namespace = body["metadata"]["namespace"]
    return {
        "TrainJob": f"/apis/{TRAINER_GROUP}/{TRAINER_VERSION}/namespaces/{namespace}/{TRAINJOBS}",
        "JobSet": f"/apis/{JOBSET_GROUP}/{JOBSET_VERSION}/namespaces/{namespace}/jobsets",
        "Job": f"/apis/batch/v1/namespaces/{namespace}/jobs",
    }[body["kind"]]
