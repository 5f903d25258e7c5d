"""The scripts of deploy/minikube: what they call in which order, how they fail, and that they can be run again."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

from tests.unit.minikube.stage import ROOT, SCRIPTS, Done, Stage

NEEDS = {
    "setup-minikube.sh": ("docker", "minikube", "kubectl"),
    "build-and-push.sh": ("docker", "minikube"),
    "install-ray.sh": ("kubectl", "helm"),
    "run-benchmark.sh": ("kubectl",),
}
EVERY = [*NEEDS, "cleanup.sh"]
PAIRS = [(script, tool) for script, tools in NEEDS.items() for tool in tools]


def ok(done: Done) -> Done:
    assert done.code == 0, done.output + done.errors
    return done


def refused(done: Done, *texts: str) -> Done:
    """It failed, and its last line says all of this."""
    assert done.code == 1, done.output + done.errors
    last = done.errors.strip().splitlines()[-1]
    assert last.startswith("error: "), done.errors
    for text in texts:
        assert text in last, last
    return done


# ------------------------------------------------------------------ all of them


def test_shellcheck_finds_nothing_to_complain_about() -> None:
    if not (shellcheck := shutil.which("shellcheck")):
        pytest.skip("shellcheck is not in PATH: apt-get install shellcheck")
    command = [shellcheck, "--external-sources", *sorted(map(str, SCRIPTS.glob("*.sh")))]
    done = subprocess.run(command, cwd=SCRIPTS, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("script", EVERY)
def test_a_script_stops_at_the_first_error_and_explains_itself(stage: Stage, script: str) -> None:
    path = SCRIPTS / script
    assert path.stat().st_mode & 0o111
    assert re.search(r"^set -euo pipefail$", path.read_text(), re.MULTILINE)
    done = ok(stage.run(script, "--help"))
    assert "PROFILE=" in done.output or "KUBE_CONTEXT=" in done.output
    assert done.calls == []
    refused(stage.run(script, "--frobnicate"), "unknown argument: --frobnicate")


@pytest.mark.parametrize(("script", "tool"), PAIRS)
def test_a_missing_tool_is_named_with_its_version_and_where_to_get_it(stage: Stage, script: str, tool: str) -> None:
    stage.remove(tool)
    done = refused(stage.run(script), f"{tool} is not installed", "or newer is needed: https://")
    assert all(call[1] == "version" for call in done.calls)


@pytest.mark.parametrize(("script", "tool"), PAIRS)
def test_an_old_tool_is_refused_before_anything_is_done(stage: Stage, script: str, tool: str) -> None:
    stage.tell("versions", {tool: "v1.9.0"})
    done = refused(stage.run(script), f"{tool} 1.9.0 is too old", "or newer is needed: https://")
    assert all(call[1] == "version" for call in done.calls)


def test_a_docker_that_does_not_answer_is_told_from_one_that_is_missing(stage: Stage) -> None:
    stage.fail("docker version", message="Cannot connect to the Docker daemon")
    refused(stage.run("setup-minikube.sh"), "docker does not answer", "Cannot connect to the Docker daemon")


def test_the_versions_of_the_image_are_those_that_are_tested() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    dockerfile, scripts = (SCRIPTS / "Dockerfile").read_text(), (SCRIPTS / "build-and-push.sh").read_text()
    (ray,) = re.findall(r'"ray\[default,train\]==([\d.]+)"', project)
    assert f"rayproject/ray:{ray}-py312" in scripts
    assert f"rayVersion: {ray}" in (SCRIPTS / "base/raycluster.yaml").read_text()
    for name in ("keras", "tf-keras"):
        (pinned,) = re.findall(rf'"{name}==([\d.]+)"', project)
        assert f" {name}=={pinned}" in dockerfile
    (torch,) = re.findall(r"^TORCH \?= (torch==[\d.]+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    text = (SCRIPTS / "torch.Dockerfile").read_text()
    assert text.rstrip().endswith(torch)
    assert "https://download.pytorch.org/whl/cpu" in text
    assert f"rayproject/ray:{ray}-py312" in text
    (tensorflow,) = re.findall(r'"tensorflow-cpu==([\d.]+)"', project)
    assert f"${{TENSORFLOW}}=={tensorflow}" in dockerfile


# ------------------------------------------------------------------ setup-minikube.sh


def test_the_set_up_is_two_nodes_on_docker_with_metrics(stage: Stage) -> None:
    done = ok(stage.run("setup-minikube.sh"))
    start = done.calls[done.place("minikube", "start")]
    assert {"--driver=docker", "--nodes=2", "--cpus=4", "--memory=8g", "--profile", "holdfast"} <= set(start)
    assert f"--mount-string={stage.folder}/shared:/holdfast-results" in start
    assert not any(word.startswith("--gpus") for word in start)
    assert done.place("docker", "info") < done.place("minikube", "start")
    assert done.place("minikube", "start") < done.place("minikube", "addons", "enable", "metrics-server")
    assert done.place("metrics-server", "minikube") < done.place("kubectl", "wait", "nodes", "--all")
    assert done.place("kubectl", "wait", "nodes") < done.place("kubectl", "rollout", "deployment/metrics-server")
    asked = [call for call in done.calls if call[0] == "kubectl" and "version" not in call]
    assert all(call[1:3] == ["--context", "holdfast"] for call in asked)
    assert (stage.folder / "shared").stat().st_mode & 0o777 == 0o777


def test_the_set_up_takes_other_sizes(stage: Stage) -> None:
    done = ok(stage.run("setup-minikube.sh", CPUS="2", MEMORY_GB="4", GPUS="all", CNI="auto", PROFILE="other"))
    start = done.calls[done.place("minikube", "start")]
    assert {"--cpus=2", "--memory=4g", "--gpus=all", "--cni=auto", "other"} <= set(start)


@pytest.mark.parametrize(
    ("size", "texts"),
    [
        ("2 33000000000", ("docker has 2 CPUs, and a node wants 4", "CPUS=2")),
        ("8 8200000000", ("docker has 8 GB of memory, and 2 nodes want 8 GB each", "MEMORY_GB=4")),
    ],
)
def test_a_machine_that_is_too_small_is_told_what_would_fit(stage: Stage, size: str, texts: tuple[str, ...]) -> None:
    stage.tell("size", size)
    done = refused(stage.run("setup-minikube.sh"), *texts)
    assert not done.called("minikube", "start")


def test_a_start_that_fails_once_is_tried_again(stage: Stage) -> None:
    stage.fail("minikube start", times=1)
    done = ok(stage.run("setup-minikube.sh"))
    assert done.called("minikube", "start") == 2
    assert "warning: failed, try 2 of 2" in done.errors


def test_a_start_that_goes_on_failing_ends_the_set_up(stage: Stage) -> None:
    stage.fail("minikube start")
    done = refused(stage.run("setup-minikube.sh"), "Minikube does not start", "cleanup.sh")
    assert done.called("minikube", "start") == 2
    assert not done.called("minikube", "addons")


def test_a_cluster_with_another_number_of_nodes_is_not_taken_for_ours(stage: Stage) -> None:
    stage.tell("nodes", 1)
    refused(stage.run("setup-minikube.sh"), "the cluster has 1 nodes instead of 2", "cleanup.sh")


@pytest.mark.parametrize(
    ("script", "name", "value"),
    [
        ("setup-minikube.sh", "NODES", "0"),
        ("setup-minikube.sh", "CPUS", "four"),
        ("setup-minikube.sh", "MEMORY_GB", "8g"),
        ("install-ray.sh", "WORKERS", "-1"),
        ("install-ray.sh", "WORKER_CPUS", "0.5"),
        ("install-ray.sh", "WORKER_MEMORY", "3"),
        ("install-ray.sh", "IMAGE", "an image"),
        ("install-ray.sh", "GRAFANA_URL", "localhost"),
        ("run-benchmark.sh", "EPOCHS", "0"),
        ("run-benchmark.sh", "BATCH_SIZE", "09"),
        ("run-benchmark.sh", "WORKERS", "2 two"),
        ("run-benchmark.sh", "PREEMPT_AT", "soon"),
        ("run-benchmark.sh", "REQUIRE_TARGETS", "yes"),
    ],
)
def test_a_bad_value_is_refused_by_name(stage: Stage, script: str, name: str, value: str) -> None:
    done = refused(stage.run(script, **{name: value}), f"{name}={value.split()[-1] if name == 'WORKERS' else value}")
    assert not any("version" not in call for call in done.calls)


# ------------------------------------------------------------------ build-and-push.sh


def test_the_image_is_built_in_three_steps_and_goes_into_minikube(stage: Stage) -> None:
    done = ok(stage.run("build-and-push.sh"))
    torch = done.calls[done.place("docker", "build", str(SCRIPTS / "torch.Dockerfile"))]
    first = done.calls[done.place("docker", "build", str(ROOT / "deploy/docker/ray.Dockerfile"))]
    second = done.calls[done.place("docker", "build", str(SCRIPTS / "Dockerfile"))]
    assert "RAY_IMAGE=rayproject/ray:2.60.0-py312" in torch
    assert f"RAY_IMAGE={torch[torch.index('--tag') + 1]}" in first
    assert f"BASE={first[first.index('--tag') + 1]}" in second
    assert "DATASETS=dataset-fashion-mnist" in second
    image = second[second.index("--tag") + 1]
    assert done.calls[-1] == ["minikube", "image", "load", image, "--profile", "holdfast"]
    assert not done.called("docker", "push")
    assert ok(stage.run("build-and-push.sh", DATASETS="none")).called("docker", "build", "DATASETS=") == 1
    refused(stage.run("build-and-push.sh", DATASETS="a; rm"), "DATASETS=a; rm is not accepted", "or none")


def test_pods_with_an_image_of_the_same_name_and_other_content_are_replaced(stage: Stage) -> None:
    def noted(**environ: str) -> list[str]:
        text = ok(stage.run("install-ray.sh", "--render", **environ)).output
        return re.findall(r'annotations/parallel-training~1image, value: "(.+)"', text)

    assert noted() == ["unknown"] * 2
    stage.tell("image", f"sha256:{'0a' * 32}")
    assert noted() == [f"sha256:{'0a' * 32}"] * 2
    assert noted(KUBE_CONTEXT="theirs") == ["unknown"] * 2  # its nodes have what is in a registry
    stage.tell("image", "no such image")
    assert noted() == ["unknown"] * 2
    stage.remove("docker")
    assert noted() == ["unknown"] * 2


@pytest.mark.parametrize(
    ("image", "tag"), [("host:5000/team/training", "latest"), ("training", "latest"), ("host:5000/training:1.2", "1.2")]
)
def test_the_tag_of_an_image_is_not_the_port_of_its_registry(stage: Stage, image: str, tag: str) -> None:
    done = ok(stage.run("build-and-push.sh", IMAGE=image))
    assert done.called("docker", "build", f"holdfast-ray:{tag}") == 1
    assert done.called("docker", "build", f"BASE=holdfast-ray:{tag}", image) == 1
    operator = image.rpartition(":")[0] if tag == "1.2" else image
    done = ok(stage.run("install-ray.sh", OPERATOR_IMAGE=image))
    assert done.called("helm", "upgrade", f"image.repository={operator}", f"image.tag={tag}") == 1


def test_the_image_goes_to_a_registry_with_retries(stage: Stage) -> None:
    stage.remove("minikube")
    stage.fail("docker push", times=2)
    done = ok(stage.run("build-and-push.sh", REGISTRY="registry.example.com/team/"))
    assert done.called("docker", "push", "registry.example.com/team/holdfast-parallel-training:2.60.0") == 3
    assert "IMAGE=registry.example.com/team/holdfast-parallel-training:2.60.0 install-ray.sh" in done.output
    stage.fail("docker push")
    refused(stage.run("build-and-push.sh", REGISTRY="registry.example.com/team"), "docker login registry.example.com")


# ------------------------------------------------------------------ install-ray.sh


def test_the_operator_comes_before_the_cluster(stage: Stage) -> None:
    done = ok(stage.run("install-ray.sh"))
    install = done.calls[done.place("helm", "upgrade", "kuberay-operator")]
    assert {"--install", "kuberay/kuberay-operator", "--namespace", "ray-system", "--version", "1.6.1"} <= set(install)
    assert {"--kube-context", "holdfast", "--wait"} <= set(install)
    order = [
        done.place("helm", "repo", "add", "https://ray-project.github.io/kuberay-helm"),
        done.place("helm", "upgrade"),
        done.place("kubectl", "crd/rayclusters.ray.io"),
        done.place("kubectl", "apply"),
        done.place("kubectl", "raycluster/parallel-training", "--for=condition=HeadPodReady"),
        done.place("kubectl", "--for=jsonpath={.status.readyWorkerReplicas}=2"),
    ]
    assert order == sorted(order)
    assert done.called("helm", "upgrade") == 1


def test_what_is_asked_for_is_installed_too(stage: Stage) -> None:
    done = ok(stage.run("install-ray.sh", WITH="kueue monitoring claim", OPERATOR_IMAGE="example.com/operator:1.2"))
    apply = done.place("kubectl", "apply")
    assert done.place("helm", "kueue", "oci://registry.k8s.io/kueue/charts/kueue") < apply
    values = str(SCRIPTS / "components/monitoring/prometheus-values.yaml")
    assert done.place("helm", "prometheus", "monitoring", values) < apply
    operator = done.calls[done.place("helm", "holdfast-operator", str(ROOT / "deploy/chart"))]
    assert {"image.repository=example.com/operator", "image.tag=1.2"} <= set(operator)


def test_what_is_there_already_is_not_installed(stage: Stage) -> None:
    done = ok(stage.run("install-ray.sh", KUBERAY="skip", WITH="kueue", KUEUE="skip"))
    assert not [call for call in done.calls if call[0] == "helm" and call[1] != "version"]


def test_what_somebody_else_has_installed_stays_as_it_is(stage: Stage) -> None:
    stage.tell("releases", ["prometheus"])
    stage.tell("namespaces", {"monitoring": []})
    done = ok(stage.run("install-ray.sh", WITH="monitoring"))
    assert "warning: prometheus in namespace monitoring was there before: it stays as it is" in done.errors
    assert not done.called("helm", "upgrade", "prometheus")
    assert done.called("helm", "upgrade", "kuberay-operator") == 1
    again = ok(stage.run("install-ray.sh", WITH="monitoring"))
    assert again.called("helm", "upgrade", "kuberay-operator") == 1


def test_a_release_of_ours_that_failed_is_installed_again(stage: Stage) -> None:
    stage.fail("helm upgrade")
    refused(stage.run("install-ray.sh"), "kuberay-operator cannot be installed")
    stage.tell("releases", ["kuberay-operator"])
    stage.fail("nobody")
    assert ok(stage.run("install-ray.sh")).called("helm", "upgrade", "kuberay-operator") == 1


def test_after_a_change_the_new_pods_are_waited_for(stage: Stage) -> None:
    stage.tell("pods", ["pod/old-head", "pod/old-worker"])
    done = ok(stage.run("install-ray.sh"))
    assert not done.called("kubectl", "wait", "pod/old-head")
    stage.tell("reshaped", "otherwise")
    stage.tell("heads", ["old-head", "new-head"])
    done = ok(stage.run("install-ray.sh"))
    gone = done.place("kubectl", "wait", "pod/old-head", "pod/old-worker", "--for=delete")
    assert done.place("kubectl", "apply") < gone < done.place("kubectl", "--for=condition=HeadPodReady")
    assert sum("head.podName" in line for line in done.lines) == 2
    stage.tell("heads", ["old-head"])
    refused(stage.run("install-ray.sh", TIMEOUT_S="1"), "KubeRay still names the old head, old-head, after 1 s")
    stage.fail("--for=delete")
    refused(stage.run("install-ray.sh"), "pods from before the change are still there after 600 s")


def test_the_dashboard_shows_grafana_where_a_browser_reaches_it(stage: Stage) -> None:
    """The stand-in of kubectl does not put the parts together; the folder is looked at instead."""
    show = stage.bin / "kubectl"
    show.write_text(show.read_text().replace('"kustomization.yaml"', '"components/monitoring/kustomization.yaml"'))

    def said(**environ: str) -> str:
        done = ok(stage.run("install-ray.sh", "--render", WITH="monitoring", **environ))
        return done.output.rpartition("RAY_GRAFANA_IFRAME_HOST, value: ")[2]

    assert '"http://localhost:30300"' in said()
    stage.tell("ip", "192.168.49.2")
    assert '"http://192.168.49.2:30300"' in said()
    assert '"http://localhost:30300"' in said(KUBE_CONTEXT="theirs")
    assert '"https://grafana.example.com/x"' in said(GRAFANA_URL="https://grafana.example.com/x")


def test_rays_own_graphs_go_from_the_head_to_grafana(stage: Stage) -> None:
    names = ("default_grafana_dashboard.json", "train_grafana_dashboard.json")
    stage.tell("back", dict.fromkeys(names, "{}"))
    done = ok(stage.run("install-ray.sh", WITH="monitoring"))
    copied = done.place("exec", "the-head", "tar", "/tmp/ray/session_latest/metrics/grafana/dashboards", *names)
    assert done.place("kubectl", "--for=condition=HeadPodReady") < copied
    last = [place for place, call in enumerate(done.calls) if call[0] == "kubectl" and "apply" in call][-1]
    assert copied < last
    assert done.calls[last][-1].endswith("/graphs.yaml")
    assert not ok(stage.run("install-ray.sh")).called("exec")
    stage.fail("exec the-head", times=1)
    assert ok(stage.run("install-ray.sh", WITH="monitoring")).called("exec", "the-head") == 2
    stage.fail("exec the-head")
    refused(
        stage.run("install-ray.sh", WITH="monitoring"), "Ray's own graphs cannot be copied from the head to Grafana"
    )


def test_with_autoscaling_nobody_waits_for_workers(stage: Stage) -> None:
    done = ok(stage.run("install-ray.sh", WITH="autoscaling"))
    assert "--for=condition=HeadPodReady" in done.lines[-1]


def test_a_network_that_fails_now_and_then_is_no_problem(stage: Stage) -> None:
    stage.fail("helm repo add", times=2)
    assert ok(stage.run("install-ray.sh")).called("helm", "repo") == 3
    stage.fail("kubectl", "apply", times=4)
    assert ok(stage.run("install-ray.sh")).called("kubectl", "apply") == 5


@pytest.mark.parametrize(
    ("failing", "texts"),
    [
        ("get --raw /readyz", ("the cluster 'holdfast' does not answer", "setup-minikube.sh", "KUBE_CONTEXT")),
        ("helm repo add", ("the Helm repository of KubeRay cannot be reached",)),
        ("helm upgrade", ("kuberay-operator cannot be installed with Helm",)),
        ("crd/rayclusters", ("KubeRay is not installed",)),
        (" apply ", ("the manifests are not accepted",)),
        ("readyWorkerReplicas", ("the Ray cluster is not ready after 600 s", "TROUBLESHOOTING.md")),
    ],
)
def test_an_installation_that_fails_says_where(stage: Stage, failing: str, texts: tuple[str, ...]) -> None:
    stage.fail(failing)
    refused(stage.run("install-ray.sh"), *texts)


def test_parts_that_do_not_go_together_or_do_not_exist_are_refused(stage: Stage) -> None:
    refused(stage.run("install-ray.sh", WITH="kueue autoscaling"), "leave out one of the two")
    done = refused(stage.run("install-ray.sh", WITH="claim gpus"), "'gpus' is not a component", "autoscaling claim gpu")
    assert not done.called("kubectl", "apply")
    (stage.folder / "empty").mkdir()
    for part, why in (("/no/such/folder", "there is no such folder"), ("./empty", "it has no kustomization.yaml")):
        said = f"WITH: '{part}' is not a component: {why}; accepted are autoscaling claim gpu"
        done = refused(stage.run("install-ray.sh", WITH=f"claim {part}"), said, "a folder with a kustomization.yaml")
        assert not done.called("kubectl", "apply")


def test_each_part_is_taken_once_and_folders_of_one_name_are_two_parts(stage: Stage) -> None:
    for folder in ("a/mine", "b/mine"):
        (stage.folder / folder).mkdir(parents=True)
        (stage.folder / folder / "kustomization.yaml").write_text("")
    done = ok(stage.run("install-ray.sh", "--render", WITH="claim ./a/mine gpu claim ./b/mine ./a/mine"))
    parts = re.findall(r"^  - (\S+/\S+)$", done.output, re.MULTILINE)
    assert parts == ["components/claim", "own/1", "components/gpu", "own/2"]


# ------------------------------------------------------------------ run-benchmark.sh


def submitted(done: Done) -> list[list[str]]:
    """The commands of the jobs, from `python` on."""
    return [call[call.index("python") :] for call in done.calls if "submit" in call]


def test_the_benchmark_runs_baseline_then_ray_then_the_comparison_and_brings_the_results_back(stage: Stage) -> None:
    stage.tell("back", {"comparison.json": '{"speedup": 1.8}', "plots/speedup.png": "png"})
    done = ok(stage.run("run-benchmark.sh", EPOCHS="3", BATCH_SIZE="64", TRAINING_ARGS="--data generated"))
    baseline, ray, ceiling, comparison = submitted(done)
    assert baseline[1].endswith("/code/baseline_training.py")
    assert ray[1].endswith("/code/ray_training.py")
    assert comparison[1].endswith("/code/compare.py")
    assert ceiling[1].endswith("/code/ceiling.py")
    size = "--epochs 3 --batch-size 64 --images 4096 --test-images 1024 --cpus 1 --gpus 0 --data generated"
    for command in (baseline, ray, ceiling):
        assert " ".join(command).count(size) == 1
        assert command[command.index("--save-path") + 1].startswith("/results/benchmark-")
    assert ray[ray.index("--num-workers") + 1] == "2"
    # The baseline has the CPU of one worker, in a worker's pod; the drivers are on the head, which has none for Ray.
    cpus = [call[call.index("--entrypoint-num-cpus") + 1] for call in done.calls if "submit" in call]
    assert cpus == ["1", "0", "0", "0"]
    scripts = sorted(path.name for path in (ROOT / "examples/parallel-training").glob("*.py"))
    assert (stage.state / "sent.json").read_text() == str(scripts).replace("'", '"')
    assert (stage.folder / "results/comparison.json").read_text() == '{"speedup": 1.8}'
    assert (stage.folder / "results/plots/speedup.png").exists()
    assert "what the job prints" in done.output
    assert not done.called("kubectl", "patch")
    assert not done.called("kubectl", "delete")


def test_several_numbers_of_workers_are_trained_one_after_the_other(stage: Stage) -> None:
    done = ok(stage.run("run-benchmark.sh", WORKERS="1 2,4"))
    numbers = [command[command.index("--num-workers") + 1] for command in submitted(done) if "--num-workers" in command]
    assert numbers == ["1", "1", "2", "2", "4", "4"]  # a training and its ceiling
    patch = done.place("kubectl", "patch", "raycluster/parallel-training")
    assert '"value": 4' in done.lines[patch]
    assert (
        patch < done.place("kubectl", "wait", "--for=jsonpath={.status.readyWorkerReplicas}=4") < done.place("submit")
    )


def test_a_cluster_that_grows_by_itself_is_not_told_to(stage: Stage) -> None:
    stage.tell("autoscaling", "true")
    done = ok(stage.run("run-benchmark.sh", WORKERS="4"))
    assert not done.called("kubectl", "patch")
    assert not done.called("kubectl", "wait")


def test_both_trainings_have_a_gpu_where_the_workers_have_one(stage: Stage) -> None:
    stage.tell("gpus", "1")
    done = ok(stage.run("run-benchmark.sh"))
    assert [call[call.index("--entrypoint-num-gpus") + 1] for call in done.calls if "submit" in call] == [*"1000"]
    assert all("--gpus 1" in " ".join(command) for command in submitted(done)[:-1])


def test_a_worker_is_deleted_when_the_training_is_at_the_step(stage: Stage) -> None:
    stage.tell("trains_until_deleted", True)
    done = ok(stage.run("run-benchmark.sh", PREEMPT_AT="7"))
    assert done.called("kubectl", "delete", "pod", "a-worker-that-trains") == 1
    _, calm, _, interrupted, _ = submitted(done)
    assert interrupted[interrupted.index("--save-path") + 1] == calm[calm.index("--save-path") + 1] + "/interrupted"
    assert "step 7: deleting the pod of a worker, a-worker-that-trains" in done.output
    assert (stage.folder / "results/interrupted/.benchmark").exists()  # so that the next one may remove it
    done = refused(stage.run("run-benchmark.sh", PREEMPT_AT="8"), "PREEMPT_AT=8: the training ended before that step")
    assert not done.called("kubectl", "delete")
    assert (stage.folder / "results/comparison.json").exists()


def test_a_pod_that_cannot_be_deleted_is_no_preemption(stage: Stage) -> None:
    stage.fail("delete pod")
    refused(stage.run("run-benchmark.sh", PREEMPT_AT="7"), "no pod could be deleted: nothing was preempted")
    assert (stage.folder / "results/comparison.json").exists()


@pytest.mark.parametrize(
    ("size", "last"),
    [({}, 140), ({"EPOCHS": "3", "IMAGES": "1024", "BATCH_SIZE": "32"}, 84), ({"EPOCHS": "1", "IMAGES": "1030"}, 8)],
)
def test_a_step_that_the_training_does_not_have_is_refused_at_once(
    stage: Stage, size: dict[str, str], last: int
) -> None:
    done = refused(
        stage.run("run-benchmark.sh", PREEMPT_AT=str(last), **size),
        f"PREEMPT_AT={last} is not accepted: it must be below {last}, the last step",
    )
    assert not done.calls
    stage.tell("step", last)
    stage.tell("trains_until_deleted", True)
    ok(stage.run("run-benchmark.sh", PREEMPT_AT=str(last - 1), **size))


@pytest.mark.parametrize("option", ["--images", "--epochs", "--batch-size", "--test-images"])
def test_what_has_a_variable_of_its_own_is_not_an_option_too(stage: Stage, option: str) -> None:
    for given in (f"--filters 8 {option} 64", f"{option}=64"):
        done = refused(stage.run("run-benchmark.sh", TRAINING_ARGS=given), f"{option} has a variable of its own")
        assert not done.calls


def test_results_of_an_earlier_run_are_not_taken_for_those_of_this_one(stage: Stage) -> None:
    old = ("comparison.json", "ray_results_4workers.json", "ceiling_4workers.json", "speedup.png", "ray-4workers.log")
    results = stage.folder / "results"
    (results / "interrupted").mkdir(parents=True)
    (results / "interrupted/.benchmark").write_text("")
    for name in (*old, "interrupted/baseline_results.json", "mine.json"):
        (results / name).write_text("of yesterday")
    stage.tell("back", {"baseline_results.json": "{}"})
    refused(stage.run("run-benchmark.sh"), "there is no comparison.json among the results")
    assert {path.name for path in results.glob("*.json")} == {"baseline_results.json", "mine.json"}
    assert not any((results / name).exists() for name in (*old, "interrupted"))


def test_a_folder_of_somebody_else_is_not_removed(stage: Stage) -> None:
    theirs = stage.folder / "results/interrupted/thoughts.txt"
    theirs.parent.mkdir(parents=True)
    theirs.write_text("of years")
    done = refused(stage.run("run-benchmark.sh"), f"RESULTS={stage.folder}/results is not accepted", "interrupted")
    assert not done.calls
    assert theirs.exists()


def test_an_interruption_that_did_harm_fails_after_the_results_are_back(stage: Stage) -> None:
    stage.tell("trains_until_deleted", True)
    stage.tell("harmful", 1)
    refused(stage.run("run-benchmark.sh", PREEMPT_AT="7"), "lost steps or ended with other weights", "comparison.json")
    assert (stage.folder / "results/comparison.json").exists()


def test_a_log_that_breaks_off_is_followed_again(stage: Stage) -> None:
    stage.fail("job logs", "baseline", times=1)
    stage.tell("status", ["RUNNING"])
    done = refused(stage.run("run-benchmark.sh", TIMEOUT_S="2"), "baseline: it still runs after 2 s")
    assert done.called("logs") > 1
    assert done.output.count("what the job prints") == 1
    limits = [int(call[call.index("timeout") + 1]) for call in done.calls if "logs" in call]
    assert limits[0] == 2
    assert limits[-1] == 1
    assert done.called("stop") == 1
    assert len(submitted(done)) == 1


@pytest.mark.parametrize(
    ("failing", "texts"),
    [
        ("get --raw /readyz", ("does not answer",)),
        ("get raycluster", ("there is no Ray cluster 'parallel-training'", "install-ray.sh")),
        ("readyWorkerReplicas", ("does not have 2 workers that are ready", "TROUBLESHOOTING.md")),
        ("node-type=head", ("the pod of the head does not run",)),
        ("exec -i", ("the scripts cannot be copied into the cluster",)),
        ("job submit", ("baseline cannot be submitted",)),
        ("/api/jobs/", ("the head does not say how the job ended",)),
        ("tar -C", ("the results cannot be copied out of the cluster",)),
    ],
)
def test_a_benchmark_that_fails_says_where(stage: Stage, failing: str, texts: tuple[str, ...]) -> None:
    stage.fail(*failing.split(" -i")[:1], *(["-i"] if " -i" in failing else []))
    refused(stage.run("run-benchmark.sh"), *texts)


def test_a_training_that_fails_ends_the_benchmark(stage: Stage) -> None:
    stage.tell("status", ["FAILED 2"])
    done = refused(stage.run("run-benchmark.sh"), "baseline ended as FAILED, with the exit code 2", "baseline.log")
    assert len(submitted(done)) == 1
    assert (stage.folder / "results/baseline.log").read_text() == "what the job prints\n"
    stage.tell("status", ["SUCCEEDED 0", "FAILED 1"])
    done = refused(stage.run("run-benchmark.sh"), "ray-2workers ended as FAILED, with the exit code 1")
    assert len(submitted(done)) == 2  # Ray Train has tried it again by itself


def test_a_baseline_whose_pod_went_goes_on_in_another(stage: Stage) -> None:
    stage.tell("status", ["FAILED 143", "FAILED None", "SUCCEEDED 0"])
    done = ok(stage.run("run-benchmark.sh"))
    first, second, third, ray, *_ = [
        call[call.index("--submission-id") + 1 :] for call in done.calls if "submit" in call
    ]
    assert len({first[0], second[0], third[0], ray[0]}) == 4
    assert first[1:] == second[1:] == third[1:]  # with the same HOLDFAST_DIR
    (place,) = (word for word in first if word.startswith("HOLDFAST_DIR="))
    assert place.endswith("/baseline")
    assert ray[-1] == "300"
    assert "warning: baseline ended with the exit code 143: the same command again, try 2 of 3" in done.errors
    logs = {path.name for path in (stage.folder / "results").glob("baseline*.log")}
    assert logs == {"baseline-1.log", "baseline-2.log", "baseline.log"}
    stage.tell("status", ["FAILED None"])
    done = refused(stage.run("run-benchmark.sh"), "baseline ended as FAILED, with the exit code None")
    assert len(submitted(done)) == 3
    stage.tell("status", ["SUCCEEDED 0"])
    ok(stage.run("run-benchmark.sh"))
    assert not (stage.folder / "results/baseline-1.log").exists()


def test_a_pod_that_is_told_to_stop_tells_the_baseline(stage: Stage) -> None:
    done = ok(stage.run("run-benchmark.sh"))
    baseline, *others = (call for call in done.calls if "submit" in call)
    (notice,) = (word.partition("=")[2] for word in baseline if word.startswith("HOLDFAST_NOTICE_FILE="))
    assert f"command: [sh, -c, 'touch \"{notice}\"']" in (SCRIPTS / "base/raycluster.yaml").read_text()
    assert not any("HOLDFAST_NOTICE_FILE" in " ".join(call) for call in others)


def test_a_target_that_was_missed_fails_after_the_results_are_back(stage: Stage) -> None:
    stage.tell("status", [*["SUCCEEDED 0"] * 3, "FAILED 1"])
    refused(stage.run("run-benchmark.sh"), "comparison ended as FAILED, with the exit code 1")  # and said nothing of it
    stage.tell("status", [*["SUCCEEDED 0"] * 3, "FAILED 1"])
    stage.tell("log", "a table\nfailed: the accuracy of 2 workers differs")
    done = refused(stage.run("run-benchmark.sh"), "a target was missed: the accuracy of 2 workers differs. All results")
    assert (stage.folder / "results/comparison.json").exists()
    assert "--require-targets" not in submitted(done)[-1]
    stage.tell("status", ["SUCCEEDED 0"])
    assert "--require-targets" in submitted(ok(stage.run("run-benchmark.sh", REQUIRE_TARGETS="1")))[-1]
    stage.tell("status", [*["SUCCEEDED 0"] * 3, "FAILED 2"])
    refused(stage.run("run-benchmark.sh"), "comparison ended as FAILED, with the exit code 2")


def test_a_batch_that_cannot_be_divided_is_refused(stage: Stage) -> None:
    refused(stage.run("run-benchmark.sh", BATCH_SIZE="128", WORKERS="3"), "BATCH_SIZE=128", "3 workers", "multiple")


# ------------------------------------------------------------------ cleanup.sh


def test_the_clean_up_removes_the_minikube_and_can_run_twice(stage: Stage) -> None:
    stage.tell("containers", {"c1": "holdfast", "c2": "holdfast-m02", "c3": "holdfast-mine", "c4": "other"})
    first = ok(stage.run("cleanup.sh"))
    assert first.called("minikube", "delete", "--profile", "holdfast") == 1
    assert first.calls[first.place("docker", "rm")][-2:] == ["c1", "c2"]
    second = ok(stage.run("cleanup.sh"))
    assert second.called("minikube", "delete") == 1
    assert not second.called("docker", "rm")


def test_the_clean_up_after_a_set_up_that_stopped_half_way(stage: Stage) -> None:
    """Minikube fails on what it finds, and Docker knows what is left."""
    stage.tell("containers", {"c1": "holdfast-m02"})
    stage.fail("minikube delete", times=2)
    done = ok(stage.run("cleanup.sh"))
    assert done.called("docker", "rm", "c1") == 1
    assert done.place("docker", "rm") < len(done.calls) - 1 - [call[:2] for call in done.calls][::-1].index(
        ["minikube", "delete"]
    )


@pytest.mark.parametrize("tool", ["minikube", "kubectl", "helm", "docker"])
def test_the_clean_up_works_without_a_tool(stage: Stage, tool: str) -> None:
    stage.remove(tool)
    ok(stage.run("cleanup.sh"))


def test_the_clean_up_says_what_is_left(stage: Stage) -> None:
    stage.tell("containers", {"c1": "holdfast"})
    stage.fail("docker rm")
    done = refused(stage.run("cleanup.sh"), "what is left: containers of 'holdfast'", "run cleanup.sh again")
    assert done.called("minikube", "delete") == 1
    stage.fail("nobody")
    ok(stage.run("cleanup.sh"))


def test_the_clean_up_of_a_cluster_that_stays(stage: Stage) -> None:
    ok(stage.run("install-ray.sh", KUBE_CONTEXT="theirs"))
    done = ok(stage.run("cleanup.sh", "--keep-cluster", KUBE_CONTEXT="theirs"))
    cluster = done.place("kubectl", "delete", "raycluster/parallel-training")
    assert (
        cluster
        < done.place("kubectl", "wait", "pods", "--for=delete")
        < done.place("helm", "uninstall", "kuberay-operator")
    )
    assert all("theirs" in call for call in done.calls if call[0] in ("kubectl", "helm"))
    assert not done.called("minikube", "delete")
    assert done.called("namespace/ray-system") == 1
    done = ok(stage.run("cleanup.sh", "--keep-cluster"))
    assert not done.called("helm", "uninstall")
    assert not done.called("namespace/ray-system")


def test_the_clean_up_removes_the_queues_before_kueue(stage: Stage) -> None:
    stage.tell("present", ["crd/clusterqueues.kueue.x-k8s.io"])
    ok(stage.run("install-ray.sh", WITH="kueue"))
    done = ok(stage.run("cleanup.sh", "--keep-cluster"))
    queues = ("localqueue/trainings", "clusterqueue/trainings", "resourceflavor/any-node")
    assert (
        done.place("kubectl", "delete", "raycluster/parallel-training")
        < done.place("kubectl", "delete", "--ignore-not-found", *queues)
        < done.place("helm", "uninstall", "kueue")
    )
    assert {f"{kind.lower()}/{name}" for kind, name in queues_of_the_manifests()} == {*queues}
    stage.fail("delete", "clusterqueue/trainings")
    refused(stage.run("cleanup.sh", "--keep-cluster"), "what is left: Kueue's queues")
    stage.tell("present", [])
    assert not ok(stage.run("cleanup.sh", "--keep-cluster")).called("clusterqueue/trainings")


def test_the_clean_up_removes_what_monitoring_brought(stage: Stage) -> None:
    stage.tell("present", ["crd/podmonitors.monitoring.coreos.com"])
    done = ok(stage.run("cleanup.sh", "--keep-cluster"))
    assert done.called("kubectl", "delete", "configmap/grafana-parallel-training", "configmap/grafana-ray") == 1
    assert done.called("kubectl", "delete", "podmonitor/ray") == 1
    stage.tell("present", [])
    assert not ok(stage.run("cleanup.sh", "--keep-cluster")).called("podmonitor/ray")


def queues_of_the_manifests() -> list[tuple[str, str]]:
    text = (SCRIPTS / "components/kueue/queues.yaml").read_text()
    return re.findall(r"^kind: (\w+)\nmetadata:\n  name: ([\w-]+)$", text, re.MULTILINE)


def test_the_clean_up_leaves_what_was_there_before(stage: Stage) -> None:
    stage.tell("releases", ["prometheus", "kuberay-operator"])
    stage.tell("namespaces", {"monitoring": [], "ray-system": []})
    ok(stage.run("install-ray.sh", WITH="monitoring kueue", OPERATOR_IMAGE="operator:1"))
    stage.tell("other-releases-kueue-system", ["theirs"])
    done = ok(stage.run("cleanup.sh", "--keep-cluster"))
    removed = [call[2] for call in done.calls if call[:2] == ["helm", "uninstall"]]
    assert removed == ["holdfast-operator", "kueue"]
    gone = [word for call in done.calls if "delete" in call for word in call if word.startswith("namespace/")]
    assert gone == ["namespace/holdfast-system"]
    assert "namespace kueue-system stays: there are other releases in it" in done.output
