"""One real cluster for all tests of the operator, with the operator installed from its chart."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

sys.path.insert(0, str(Path(__file__).parent))

from jobs import NAMESPACE, crd_spec
from trainings import Training

ROOT = Path(__file__).parents[2]
CRDS = {
    "jobset": "jobsets.jobset.x-k8s.io",
    "trainer": "trainjobs.trainer.kubeflow.org",
    "kueue": "clusterqueues.kueue.x-k8s.io",
    "kuberay": "rayclusters.ray.io",
}
HOW = (
    "needs a Kubernetes cluster: name one with HOLDFAST_TEST_KUBECONFIG (kind, minikube, k3d), or a script that makes "
    "one with HOLDFAST_TEST_CLUSTER"
)


@dataclass
class Kube:
    """kubectl and helm, with the cluster's configuration."""

    environ: dict[str, str]
    folder: Path
    script: str | None
    added: set[str] = field(default_factory=set)
    chart: str = str(ROOT / "deploy/chart")

    @property
    def values(self) -> str:
        """A file with the values that the operator is installed with."""
        return str(self.folder / "values.yaml")

    def run(self, *words: str, stdin: str | None = None, check: bool = True, timeout: float = 120) -> str:
        done = subprocess.run(
            words, env=self.environ, input=stdin, capture_output=True, text=True, timeout=timeout, check=False
        )
        if check and done.returncode:
            raise AssertionError(f"{shlex.join(words)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        return done.stdout + ("" if check else done.stderr)

    def kubectl(self, *words: str, **options: Any) -> str:
        return self.run("kubectl", *words, **options)

    def get(self, *words: str) -> dict[str, Any]:
        return json.loads(self.kubectl("get", *words, "-o", "json"))

    def apply(self, *things: dict[str, Any], namespace: str = "default") -> str:
        return self.kubectl("apply", "-n", namespace, "-f", "-", stdin=yaml.safe_dump_all(things))

    def refused(self, thing: dict[str, Any], namespace: str = "default") -> str:
        """What the API server says against it."""
        words = ("kubectl", "create", "-n", namespace, "-f", "-")
        done = subprocess.run(
            words, env=self.environ, input=yaml.safe_dump(thing), capture_output=True, text=True, check=False
        )
        assert done.returncode, f"accepted: {done.stdout}"
        return done.stderr

    def add(self, *controllers: str) -> None:
        """Install the real controllers of other projects, once."""
        for name in controllers:
            if name not in self.added:
                if self.script is None:
                    if CRDS[name] not in self.kubectl("get", "crd", "-o", "name"):
                        pytest.skip(f"needs {name} in the cluster that HOLDFAST_TEST_KUBECONFIG names")
                    continue
                self.run(self.script, "add", "--dir", str(self.folder / "cluster"), name, timeout=240)
                self.added.add(name)

    def until(self, what: Callable[[], Any], timeout_s: float = 60.0, message: str = "") -> Any:
        """The first true answer of ``what``."""
        end = time.monotonic() + timeout_s
        while True:
            try:
                found = what()
            except (AssertionError, KeyError, IndexError):
                found = None
            if found:
                return found
            if time.monotonic() > end:
                raise AssertionError(f"not within {timeout_s:g} s: {message}\n{self.state()}")
            time.sleep(0.5)

    def state(self) -> str:
        """For the message of a test that failed."""
        words = ("get", "pods,trainjobs,jobsets,jobs", "-A", "-o", "wide")
        operator = ("logs", "-n", NAMESPACE, "-l", "app.kubernetes.io/name=holdfast-operator", "--tail", "60")
        return "\n".join(self.kubectl(*command, check=False) for command in (words, operator))[-6000:]


@pytest.fixture(scope="session")
def kube(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kube]:
    folder = tmp_path_factory.mktemp("kube")
    given, script = os.environ.get("HOLDFAST_TEST_KUBECONFIG"), os.environ.get("HOLDFAST_TEST_CLUSTER")
    if given:
        yield Kube({**os.environ, "KUBECONFIG": given}, folder, None)
        return
    if not script:
        pytest.skip(HOW)
    options = ["--dir", str(folder / "cluster"), "--venv", str(Path(sys.prefix)), "--mount", str(ROOT)]
    up = subprocess.run([script, "up", *options], capture_output=True, text=True, timeout=240, check=False)
    if up.returncode and "apt-get install" in up.stdout + up.stderr:
        pytest.skip(f"needs packages for a cluster: {(up.stdout + up.stderr).strip().splitlines()[-1]}")
    if up.returncode:
        pytest.fail(f"{script} up failed:\n{up.stdout[-2000:]}{up.stderr[-2000:]}")
    try:
        printed = subprocess.run([script, "env", *options[:2]], capture_output=True, text=True, check=True).stdout
        environ = dict(os.environ)
        for line in printed.splitlines():
            name, _, value = line.removeprefix("export ").partition("=")
            environ[name] = os.path.expandvars(shlex.split(value)[0]) if value else ""
        yield Kube(environ, folder, script)
    finally:
        subprocess.run([script, "down", *options[:2]], capture_output=True, timeout=120, check=False)


@pytest.fixture(scope="session")
def operator(kube: Kube) -> Iterator[Kube]:
    """The cluster with Kubeflow Trainer, JobSet, and the operator installed as its chart says."""
    kube.add("jobset", "trainer")
    kube.kubectl("create", "namespace", NAMESPACE, check=False)
    values = {
        "image": {"repository": "localhost/host", "tag": "latest", "pullPolicy": "IfNotPresent"},
        "resources": {"requests": {"cpu": "10m", "memory": "64Mi"}, "limits": {"memory": "512Mi"}},
    }
    Path(kube.values).write_text(yaml.safe_dump(values))
    kube.run("helm", "install", "holdfast-operator", kube.chart, "-n", NAMESPACE, "-f", kube.values, timeout=180)
    kube.kubectl("rollout", "status", "-n", NAMESPACE, "deployment/holdfast-operator", "--timeout=90s")
    kube.until(lambda: "checkpointing" in crd_spec(kube), 60, "the fields are in the CRD")
    kube.until(lambda: ca_bundle(kube), 60, "the API server trusts the webhooks")
    yield kube
    kube.run("helm", "uninstall", "holdfast-operator", "-n", NAMESPACE, timeout=120)


def ca_bundle(kube: Kube) -> bool:
    webhooks = kube.get("mutatingwebhookconfiguration", "holdfast-operator")["webhooks"]
    return all(webhook["clientConfig"].get("caBundle") for webhook in webhooks)


@pytest.fixture
def training(operator: Kube) -> Iterator[Callable[..., Training]]:
    """Submits a TrainJob, which is deleted at the end."""
    submitted: list[Training] = []

    def submit(name: str, labels: dict[str, str] | None = None, **options: Any) -> Training:
        submitted.append(Training(operator, name, labels, **options))
        return submitted[-1]

    yield submit
    for one in submitted:
        one.remove()
