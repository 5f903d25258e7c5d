"""The notebooks against the real cluster: the same cells, with a TrainJob, a claim and pods."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.cluster.jobs import claim
from tests.cluster.trainings import folder_of
from tests.unit.kubeflow import notebooks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

RUNTIME = "notebooks"


@pytest.fixture
def runtime(operator):
    """The runtime of the example with manifests, with the image of this machine and without a network."""
    body = yaml.safe_load((notebooks.FOLDER.parent / "kubernetes/gpt2/runtime.yaml").read_text())
    body["metadata"]["name"] = RUNTIME
    pod = body["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    del pod["volumes"]
    (container,) = pod["containers"]
    del container["volumeMounts"]
    container |= {"image": "localhost/host:latest", "imagePullPolicy": "IfNotPresent"}
    container["env"] = [
        {"name": "HF_HUB_OFFLINE", "value": "1"},
        {"name": "HOME", "value": "/tmp"},
        {"name": "OMP_NUM_THREADS", "value": "1"},
    ]
    operator.apply(body)
    yield RUNTIME
    for name in jobs_of(operator):  # of a notebook that did not come to its last cell
        print(operator.kubectl("logs", "-l", f"jobset.sigs.k8s.io/jobset-name={name}", "--tail=30", check=False))
        operator.kubectl("delete", "trainjob", name)
    operator.kubectl("delete", "trainingruntime", RUNTIME)


def jobs_of(operator) -> list[str]:
    """TrainJobs of the notebooks that are there."""
    found = operator.get("trainjobs")["items"]
    return [job["metadata"]["name"] for job in found if job["spec"]["runtimeRef"]["name"] == RUNTIME]


@pytest.mark.parametrize(
    ("path", "check"),
    [
        pytest.param(notebooks.QWEN, notebooks.check_qwen, id="qwen"),
        pytest.param(notebooks.GPT2, notebooks.check_gpt2, id="gpt2"),
    ],
)
@pytest.mark.share(0)
def test_a_notebook_trains_in_pods_and_is_paused_in_the_middle(path, check, operator, runtime, tmp_path):
    name, steps = f"notebook-{check.__name__.removeprefix('check_')}", 1200
    operator.apply(claim(name))
    mount = Path(operator.until(lambda: folder_of(operator, name), message="the claim is bound"))
    mount.mkdir(parents=True, exist_ok=True)

    def before_clean_up() -> None:
        notebooks.check_final(mount / "out" / "run" / "final")

    done = notebooks.run(
        path,
        tmp_path,
        before_clean_up,
        operator.environ,
        BACKEND="kubernetes",
        NAMESPACE="default",
        CLAIM=name,
        MOUNT=mount,
        RUNTIME=runtime,
        OUTPUT_DIR="out",
        PACKAGES="",
        CPU="1",
        MEMORY="2Gi",
        GPUS=0,
        NODES=2,
        STEPS=steps,
        ROWS=400,
    )
    check(done, steps)
    operator.until(lambda: not jobs_of(operator), message="the job is gone")
    assert not (mount / "out").exists()
