"""The whole benchmark for real: the scripts, KubeRay's own operator, two nodes, and a worker that goes."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import holdfast
from tests.kit.kube import Kube
from tests.unit.minikube.documents import Command, commands
from tests.unit.minikube.stage import SCRIPTS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

NAMESPACE = "ray-system"
EPOCHS, BATCH_SIZE, IMAGES = 8, 32, 768
STEPS = EPOCHS * (IMAGES - IMAGES // 8) // BATCH_SIZE
"""One image in eight is for validation."""
Script = Callable[..., str]


@pytest.fixture
def script(kube: Kube, tmp_path: Path) -> Iterator[Script]:
    """Runs a script of deploy/minikube against the cluster, and gives what it printed."""
    image = "localhost/host:latest" if kube.script else os.environ.get("HOLDFAST_TEST_RAY_IMAGE")
    if not image:
        pytest.skip("needs the image that build-and-push.sh makes: name it with HOLDFAST_TEST_RAY_IMAGE")
    kube.add("kuberay")
    configuration = tmp_path / "kubeconfig"
    configuration.write_text(kube.kubectl("config", "view", "--raw", "--minify"))
    configuration.chmod(0o600)
    kube.kubectl("config", "rename-context", current(kube), "holdfast", "--kubeconfig", str(configuration))
    ours = {
        **{"KUBECONFIG": str(configuration), "IMAGE": image, "KUBERAY": "skip"},
        **{"RESULTS": str(tmp_path / "results"), "WITH": f"claim {component(tmp_path)}"},
    }

    def run(name: str, *arguments: str, **environ: str) -> str:
        done = subprocess.run(
            [str(SCRIPTS / name), *arguments],
            env=kube.environ | ours | environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=900,
        )
        assert done.returncode == 0, f"{done.stdout[-6000:]}\n{kube.kubectl('get', 'pods', '-A', '-o', 'wide')}"
        return done.stdout

    yield run
    run("cleanup.sh", "--keep-cluster")
    kube.kubectl("delete", "pvc", "-n", NAMESPACE, "parallel-training-results", "--ignore-not-found", "--wait=false")


def current(kube: Kube) -> str:
    return kube.kubectl("config", "current-context").strip()


def component(folder: Path) -> Path:
    """Pods find the package that is tested here, and ask for little of a machine that has little."""
    own = folder / "small"
    own.mkdir()
    containers = [f"/spec/{group}/template/spec/containers/0" for group in ("headGroupSpec", "workerGroupSpecs/0")]
    variable = {"name": "PYTHONPATH", "value": str(Path(holdfast.__file__).parents[1])}
    patches = [{"op": "add", "path": f"{place}/env/-", "value": variable} for place in containers]
    patches += [{"op": "replace", "path": f"{place}/resources/requests/cpu", "value": "100m"} for place in containers]
    patch = {"target": {"kind": "RayCluster"}, "patch": json.dumps(patches)}
    kind = {"apiVersion": "kustomize.config.k8s.io/v1alpha1", "kind": "Component"}
    (own / "kustomization.yaml").write_text(yaml.safe_dump({**kind, "patches": [patch]}))
    return own


def as_benchmark(kube: Kube, configuration: str) -> str:
    """A context for the service account that has the rights of run-benchmark.sh and no others."""
    token = kube.kubectl("create", "token", "ray-benchmark", "-n", NAMESPACE, "--duration=1h").strip()
    words = ("kubectl", "config", "--kubeconfig", configuration)
    cluster = kube.kubectl("config", "view", "--minify", "-o", "jsonpath={.contexts[0].context.cluster}")
    kube.run(*words, "set-credentials", "benchmark", f"--token={token}")
    kube.run(*words, "set-context", "benchmark", f"--cluster={cluster}", "--user=benchmark")
    return "benchmark"


def kubectl_of_the_documents() -> list[Command]:
    """All but what needs metrics-server, Kueue or Grafana."""
    found = [command for command in commands() if command.program == "kubectl"]
    return [command for command in found if not {"top", "clusterqueues", "port-forward"} & {*command.words}]


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def test_the_benchmark_ends_with_the_same_weights_when_a_worker_goes(
    kube: Kube, script: Script, tmp_path: Path
) -> None:
    script("install-ray.sh", TIMEOUT_S="240")
    nodes = {
        pod["spec"]["nodeName"] for pod in kube.get("pods", "-n", NAMESPACE, "-l", "ray.io/node-type=worker")["items"]
    }
    assert len(nodes) == 2, nodes
    for command in kubectl_of_the_documents():
        kube.run(*command.words[:1], "--kubeconfig", str(tmp_path / "kubeconfig"), *command.words[1:])
    said = script(
        "run-benchmark.sh",
        KUBE_CONTEXT=as_benchmark(kube, str(tmp_path / "kubeconfig")),
        EPOCHS=str(EPOCHS),
        BATCH_SIZE=str(BATCH_SIZE),
        IMAGES=str(IMAGES),
        TEST_IMAGES="128",
        TRAINING_ARGS="--data generated --filters 8",
        PREEMPT_AT="50",
        TIMEOUT_S="600",
    )
    results = tmp_path / "results"
    baseline, ray = read(results / "baseline_results.json"), read(results / "ray_results_2workers.json")
    comparison = read(results / "comparison.json")
    assert (baseline["training_type"], ray["training_type"]) == ("baseline", "ray_distributed")
    assert (ray["num_workers"], ray["ray_cluster_cpus"], ray["ray_cluster_nodes"]) == (2, 2, 3)
    assert baseline["steps"] == ray["steps"] == STEPS
    assert comparison["speedup"] == pytest.approx(baseline["training_time_seconds"] / ray["training_time_seconds"])
    assert abs(comparison["accuracy_difference_points"]) <= 2
    assert comparison["ceiling"] > 0
    (entry,) = comparison["interrupted"]
    assert entry["how"] == "pod"
    assert entry["same_weights"] is True
    assert entry["steps"] == entry["steps_undisturbed"] == STEPS
    (cut,) = entry["interruptions"]
    assert cut["steps_lost"] == 0
    assert cut["step"] >= 50
    assert "deleting the pod of a worker" in said
    assert "speedup" in said
    script("cleanup.sh", "--keep-cluster")
    script("cleanup.sh", "--keep-cluster")
    assert not kube.get("pods", "-n", NAMESPACE, "-l", "ray.io/cluster=parallel-training")["items"]
