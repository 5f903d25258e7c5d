"""Progress that pods push."""

from __future__ import annotations

import asyncio

from holdfast.operator.names import MANAGED
from holdfast.operator.reconcile.controller import Controller
from tests.unit.operator.objects import train_job


def test_what_a_pod_tells_is_read_in_its_turn_and_nobody_execs():
    clock = iter(range(1000, 2000))
    followed = Controller(None, execs=False, clock=lambda: float(next(clock)))
    body = {**train_job({"storage": {"uri": "s3://b/x"}}), "kind": "TrainJob"}
    body["metadata"] = {"namespace": "default", "name": "job", "uid": "j"}
    followed.saw_job("TrainJob", "ADDED", body)
    labels = {MANAGED: "TrainJob", "jobset.sigs.k8s.io/jobset-name": "job"}
    pod = {"metadata": {"uid": "p", "namespace": "default", "name": "pod", "labels": labels}}
    pod |= {"spec": {"containers": [{"name": "node"}]}}
    pod["status"] = {"containerStatuses": [{"name": "node", "state": {"running": {}}}]}
    followed.saw_pod("ADDED", pod)
    assert not followed.saw_push("stranger", b"{}")
    (job,) = followed.jobs.values()
    assert asyncio.run(followed._read(job, [pod], set(), job.asked)) == (None, None, None)
    assert followed.saw_push("p", b'{"step": 7}')
    progress, problem, source = asyncio.run(followed._read(job, [pod], set(), job.asked))
    assert (progress, problem, source) == ({"step": 7}, None, pod)
    followed.saw_push("p", b"<html>")
    progress, problem, _ = asyncio.run(followed._read(job, [pod], set(), job.asked))
    assert progress is None
    assert "pod is not accepted" in problem
