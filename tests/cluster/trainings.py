"""A TrainJob that really trains, seen from outside."""

from __future__ import annotations

import json
import os
import re
from typing import Any

import pytest

from tests.cluster.jobs import claim, trainjob
from tests.kit.kube import PATIENCE_S


def folder_of(kube: Any, name: str) -> str:
    """Where on this machine the content of a claim lies."""
    volume = kube.get("pvc", name)["spec"]["volumeName"]
    spec = kube.get("pv", volume)["spec"]
    path = spec.get("hostPath", spec.get("local", {})).get("path", "")
    if kube.script is None and not os.path.isdir(path):
        pytest.skip("needs a cluster whose volumes are folders of this machine: see CONTRIBUTING.md")
    return path


class Submitted:
    """What can be seen of a TrainJob from outside."""

    def __init__(self, kube: Any, name: str) -> None:
        self.kube, self.name = kube, name

    def progress(self) -> dict[str, Any]:
        return self.kube.get("trainjob", self.name).get("status", {}).get("trainingProgress", {})

    def until_step(self, step: int) -> int:
        return self.kube.until(lambda: self.at_least(step), message=f"{self.name} at step {step}")

    def at_least(self, step: int) -> int | None:
        found = self.file().get("step", 0)
        return found if found >= step else None

    def file(self) -> dict[str, Any]:
        """What the progress file in the pod of rank 0 says."""
        pod = self.pods()[0]
        path = "/workspace/training_progress.json"
        return json.loads(self.kube.kubectl("exec", pod, "-c", "node", "--", "cat", path))

    def pods(self) -> list[str]:
        """Names of the pods that run, by rank."""
        selector = f"jobset.sigs.k8s.io/jobset-name={self.name}"
        items = self.kube.get("pods", "-l", selector, "--field-selector=status.phase=Running")["items"]
        living = [item for item in items if not item["metadata"].get("deletionTimestamp")]
        order = "batch.kubernetes.io/job-completion-index"
        return [i["metadata"]["name"] for i in sorted(living, key=lambda item: item["metadata"]["labels"][order])]

    def until_complete(self) -> dict[str, Any]:
        words = ("wait", "trainjob", self.name, "--for=condition=Complete", f"--timeout={PATIENCE_S:.0f}s")
        output = self.kube.kubectl(*words, check=False, timeout=PATIENCE_S + 20)
        assert "condition met" in output, output + self.kube.state()
        return self.kube.until(lambda: self.progress().get("phase") == "Complete" and self.progress())

    def messages(self) -> list[str]:
        found = self.kube.get("events", "--field-selector", f"involvedObject.name={self.name}")["items"]
        return [event["message"] for event in found]

    def events(self) -> list[str]:
        found = self.kube.get("events", "--field-selector", f"involvedObject.name={self.name}")["items"]
        return [event["reason"] for event in found if event["source"].get("component") == "holdfast.dev/operator"]

    def step_of_resume(self) -> int:
        return int(re.fullmatch(r"checkpoint-(\d+)", self.progress()["resumedFrom"])[1])

    def remove(self) -> None:
        self.kube.kubectl("delete", "trainjob", self.name, "--wait=false")


class Training(Submitted):
    """A TrainJob of :mod:`jobs`, with a claim of its own name."""

    def __init__(self, kube: Any, name: str, labels: dict[str, str] | None = None, **options: Any) -> None:
        super().__init__(kube, name)
        kube.apply(claim(name))
        body = trainjob(name, **options)
        body["metadata"]["labels"] = labels or {}
        kube.apply(body)

    def digest(self) -> str:
        with open(f"{self.folder()}/digest", encoding="ascii") as file:
            return file.read()

    def folder(self) -> str:
        return folder_of(self.kube, self.name)

    def order(self, what: str) -> None:
        """Let something happen to rank 1 after its next step."""
        folder = self.kube.until(self.folder, message="the claim is bound")
        os.makedirs(folder, exist_ok=True)
        with open(f"{folder}/order.tmp", "w", encoding="ascii") as file:
            file.write(what)
        os.rename(f"{folder}/order.tmp", f"{folder}/order")
