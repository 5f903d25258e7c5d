"""The manifests of deploy/minikube, as install-ray.sh puts them together: against the CRDs of KubeRay and Kueue."""

from __future__ import annotations

import importlib
import json
import lzma
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.kit.kube import KUBE, program, schema_of
from tests.unit.minikube.stage import ROOT, SCRIPTS

Objects = list[dict[str, Any]]
COMPONENTS = sorted(path.name for path in (SCRIPTS / "components").iterdir())
CRDS = (
    "rayclusters.ray.io",
    "clusterqueues.kueue.x-k8s.io",
    "localqueues.kueue.x-k8s.io",
    "resourceflavors.kueue.x-k8s.io",
)
"""Those of the objects here: to read all takes its time."""
TEXT, TEXTS = {"type": "string"}, {"type": "array", "items": {"type": "string"}}
POD_MONITOR: dict[str, Any] = {
    "properties": {
        **{"apiVersion": TEXT, "kind": TEXT, "metadata": {"type": "object"}},
        "spec": {
            "properties": {
                "selector": {"properties": {"matchExpressions": {"type": "array"}, "matchLabels": {"type": "object"}}},
                "podMetricsEndpoints": {
                    "type": "array",
                    "items": {
                        "properties": {
                            **{"port": TEXT, "interval": TEXT},
                            "relabelings": {
                                "type": "array",
                                "items": {"properties": {"sourceLabels": TEXTS, "targetLabel": TEXT}},
                            },
                        }
                    },
                },
            }
        },
    }
}
"""Of Prometheus' operator, whose own definition is not in the tree: the fields that are used here."""
TOGETHER = [
    *((), *((name,) for name in COMPONENTS)),
    ("autoscaling", "claim", "gpu", "monitoring"),
    ("claim", "gpu", "kueue", "monitoring"),
]


@pytest.fixture(scope="session")
def kubectl(tmp_path_factory: pytest.TempPathFactory) -> str:
    return program("kubectl", tmp_path_factory.mktemp("kubectl"), packed="kubernetes")


@pytest.fixture(scope="session")
def kubeconform(tmp_path_factory: pytest.TempPathFactory) -> str:
    return program("kubeconform", tmp_path_factory.mktemp("kubeconform"))


@pytest.fixture(scope="session")
def render(kubectl: str) -> Callable[..., Objects]:
    """What install-ray.sh would apply, with the real kubectl."""
    seen: dict[str, Objects] = {}

    def rendered(*components: str, **environ: str) -> Objects:
        key = f"{components}{sorted(environ.items())}"
        if key not in seen:
            path = f"{Path(kubectl).parent}{os.pathsep}{os.environ['PATH']}"
            variables = {**os.environ, "PATH": path, "WITH": " ".join(components), **environ}
            command = ["bash", str(SCRIPTS / "install-ray.sh"), "--render"]
            done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False, timeout=60)
            assert done.returncode == 0, done.stderr
            seen[key] = [thing for thing in yaml.safe_load_all(done.stdout) if thing]
        return json.loads(json.dumps(seen[key]))

    return rendered


def one(objects: Objects, kind: str, name: str) -> dict[str, Any]:
    (found,) = (thing for thing in objects if thing["kind"] == kind and thing["metadata"]["name"] == name)
    return found


def cluster_of(objects: Objects) -> dict[str, Any]:
    return one(objects, "RayCluster", "parallel-training")


def pods_of(cluster: dict[str, Any]) -> list[dict[str, Any]]:
    groups = [cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"]]
    return [group["template"]["spec"] for group in groups]


# ------------------------------------------------------------------ schemas


def strict(schema: Any) -> Any:
    """The schema of a CRD; fields that it does not name are errors, as they would be lost."""
    if isinstance(schema, dict):
        schema = {key: strict(value) for key, value in schema.items()}
        if "properties" in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
            schema.setdefault("additionalProperties", False)
        if schema.pop("x-kubernetes-int-or-string", False):
            schema = {"type": ["integer", "string"]}
    elif isinstance(schema, list):
        schema = [strict(item) for item in schema]
    return schema


@pytest.fixture(scope="session")
def schemas(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of the real CRDs, and of the built-in kinds from the Kubernetes client."""
    models = pytest.importorskip("kubernetes_asyncio.client.models", reason="pip install 'holdfast[kubernetes]'")
    folder = tmp_path_factory.mktemp("schemas")
    for kind, model in {
        "Namespace": models.V1Namespace,
        "ServiceAccount": models.V1ServiceAccount,
        "Service": models.V1Service,
        "Role": models.V1Role,
        "RoleBinding": models.V1RoleBinding,
        "NetworkPolicy": models.V1NetworkPolicy,
        "ConfigMap": models.V1ConfigMap,
        "PersistentVolumeClaim": models.V1PersistentVolumeClaim,
    }.items():
        definitions: dict[str, Any] = {}
        schema = schema_of(model, models, definitions) | {"definitions": definitions}
        (folder / f"{kind.lower()}-v1.json").write_text(json.dumps(schema))
    (folder / "podmonitor-v1.json").write_text(json.dumps(strict(POD_MONITOR)))
    for name in ("kuberay", "kueue"):
        packed = KUBE / f"addons/{name}.yaml.xz"
        if not packed.exists():
            pytest.skip(f"needs the CRDs of {name}, in {packed.name} beside the repository")
        with lzma.open(packed, "rt") as file:
            parts = file.read().split("\n---\n")
        for text in parts:
            if any(f"\n  name: {crd}\n" in text[:2000] for crd in CRDS):
                thing = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
                kind = thing["spec"]["names"]["kind"].lower()
                for version in thing["spec"]["versions"]:
                    schema = strict(version["schema"]["openAPIV3Schema"])
                    schema["properties"]["metadata"] = {"type": "object"}
                    (folder / f"{kind}-{version['name']}.json").write_text(json.dumps(schema))
    return f"{folder}/{{{{ .ResourceKind }}}}-{{{{ .ResourceAPIVersion }}}}.json"


def conforms(kubeconform: str, schemas: str, objects: Objects) -> subprocess.CompletedProcess[str]:
    command = [kubeconform, "-strict", "-summary", "-schema-location", schemas]
    text = yaml.safe_dump_all(objects)
    return subprocess.run(command, input=text, capture_output=True, text=True, check=False, timeout=60)


def test_every_object_has_the_fields_that_its_definition_knows(
    kubeconform: str, schemas: str, render: Callable[..., Objects]
) -> None:
    everything = [thing for components in TOGETHER for thing in render(*components)]
    done = conforms(kubeconform, schemas, everything)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(everything)} resources found" in done.stdout


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("spec", "headGroupSpec", "template", "spec", "containers", 0, "readyProbe"), {}),
        (("spec", "workerGroupSpecs", 0, "replicas"), "two"),
        (("spec", "autoscalerOption"), {}),
    ],
)
def test_a_field_that_kuberay_does_not_know_would_be_found(
    kubeconform: str, schemas: str, render: Callable[..., Objects], path: tuple[Any, ...], value: Any
) -> None:
    cluster = cluster_of(render())
    place: Any = cluster
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    done = conforms(kubeconform, schemas, [cluster])
    assert done.returncode != 0
    assert str(path[-1]) in done.stdout


# ------------------------------------------------------------------ what they say


def test_one_head_and_two_workers_with_the_ports_that_people_use(render: Callable[..., Objects]) -> None:
    objects = render()
    spec = cluster_of(objects)["spec"]
    assert [group["replicas"] for group in spec["workerGroupSpecs"]] == [2]
    assert spec["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    external, gcs = one(objects, "Service", "ray-external")["spec"], one(objects, "Service", "ray-gcs")["spec"]
    assert {port["name"]: (port["port"], port["nodePort"]) for port in external["ports"]} == {
        "dashboard": (8265, 30265),
        "client": (10001, 30001),
    }
    assert external["type"] == "NodePort"
    assert (gcs["type"], [port["port"] for port in gcs["ports"]]) == ("ClusterIP", [6379])
    assert all(thing["metadata"].get("namespace", "ray-system") == "ray-system" for thing in objects)


def test_holdfast_is_on_with_its_operator_and_without(render: Callable[..., Objects]) -> None:
    """The manifests hold what the operator would put in: it has nothing to add."""
    from holdfast.operator.admission.ray import secured, warnings

    cluster = cluster_of(render())
    assert cluster["metadata"]["annotations"]["ray.io/jit-checkpoint-enabled"] == "true"
    assert warnings(cluster) == []
    for before, after in zip(pods_of(cluster), pods_of(secured(cluster)), strict=True):
        assert before == after
        variables = {variable["name"]: variable["value"] for variable in before["containers"][0]["env"]}
        assert variables["RAY_TRAIN_JIT_CHECKPOINT_ENABLED"] == "true"
        assert before["terminationGracePeriodSeconds"] > float(variables["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"])


def test_all_of_it_fits_on_two_nodes_of_minikube(render: Callable[..., Objects]) -> None:
    head, worker = (pod["containers"][0]["resources"]["requests"] for pod in pods_of(cluster_of(render())))
    # Kubernetes itself takes about 1 CPU and 1 GB of the first node.
    assert (head["cpu"], worker["cpu"]) == ("500m", "1")
    assert int(head["memory"].removesuffix("Gi")) + int(worker["memory"].removesuffix("Gi")) <= 6


def test_the_variables_of_the_script_are_in_the_cluster(render: Callable[..., Objects]) -> None:
    environ = {"WORKERS": "6", "WORKER_CPUS": "2", "WORKER_MEMORY": "2500Mi", "IMAGE": "example.com/ray:1"}
    cluster = cluster_of(render("claim", **environ))
    (group,) = cluster["spec"]["workerGroupSpecs"]
    assert (group["replicas"], group["maxReplicas"]) == (6, 6)
    (container,) = group["template"]["spec"]["containers"]
    assert container["resources"] == {key: {"cpu": "2", "memory": "2500Mi"} for key in ("requests", "limits")}
    assert {pod["containers"][0]["image"] for pod in pods_of(cluster)} == {"example.com/ray:1"}


def own_component(folder: Path, field: str) -> str:
    """One that sets this field of the cluster."""
    folder.mkdir(parents=True)
    patch = json.dumps([{"op": "add", "path": f"/spec/{field}", "value": True}])
    kind = {"apiVersion": "kustomize.config.k8s.io/v1alpha1", "kind": "Component"}
    patches = [{"target": {"kind": "RayCluster"}, "patch": patch}]
    (folder / "kustomization.yaml").write_text(yaml.safe_dump({**kind, "patches": patches}))
    return str(folder)


def test_components_of_ones_own_are_added_though_they_have_one_name(
    render: Callable[..., Objects], tmp_path: Path
) -> None:
    first = own_component(tmp_path / "a/mine", "suspend")
    second = own_component(tmp_path / "b/mine", "enableInTreeAutoscaling")
    assert cluster_of(render(first))["spec"]["suspend"] is True
    spec = cluster_of(render(first, "claim", second, "claim"))["spec"]
    assert (spec["suspend"], spec["enableInTreeAutoscaling"]) == (True, True)


def test_the_results_are_on_a_folder_of_the_machine_or_on_a_claim(render: Callable[..., Objects]) -> None:
    for pod in pods_of(cluster_of(render())):
        assert pod["volumes"][0]["hostPath"]["path"] == "/holdfast-results"
    objects = render("claim")
    assert one(objects, "PersistentVolumeClaim", "parallel-training-results")["spec"]["accessModes"] == [
        "ReadWriteMany"
    ]
    for pod in pods_of(cluster_of(objects)):
        assert pod["volumes"][0] == {
            "name": "results",
            "persistentVolumeClaim": {"claimName": "parallel-training-results"},
        }
        assert pod["containers"][0]["volumeMounts"] == [{"name": "results", "mountPath": "/results"}]
        assert pod["securityContext"]["fsGroup"] == 100  # Ray's own user is in it


def test_only_workers_get_a_gpu(render: Callable[..., Objects]) -> None:
    head, worker = pods_of(cluster_of(render("gpu")))
    assert worker["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert "nvidia.com/gpu" not in head["containers"][0]["resources"]["limits"]


def test_the_pods_have_no_rights_but_the_autoscaler(render: Callable[..., Objects]) -> None:
    for pod in pods_of(cluster_of(render())):
        assert (pod["serviceAccountName"], pod["automountServiceAccountToken"]) == ("ray", False)
    head, worker = pods_of(cluster_of(render("autoscaling")))
    assert (head["automountServiceAccountToken"], worker["automountServiceAccountToken"]) == (True, False)
    subjects = [name["name"] for thing in render() if thing["kind"] == "RoleBinding" for name in thing["subjects"]]
    assert subjects == ["ray-benchmark"]


def test_only_another_number_of_workers_leaves_the_pods_as_they_are(render: Callable[..., Objects]) -> None:
    """KubeRay replaces them with this strategy, and does not look at replicas, minReplicas and maxReplicas."""
    two, six = (cluster_of(render(WORKERS=count))["spec"] for count in ("2", "6"))
    assert two["upgradeStrategy"] == {"type": "Recreate"}
    for spec in (two, six):
        for field in ("replicas", "minReplicas", "maxReplicas"):
            del spec["workerGroupSpecs"][0][field]
    assert two == six


def test_a_queue_has_room_for_the_cluster(render: Callable[..., Objects]) -> None:
    objects = render("kueue", "gpu")
    queue = cluster_of(objects)["metadata"]["labels"]["kueue.x-k8s.io/queue-name"]
    local = one(objects, "LocalQueue", queue)
    (group,) = one(objects, "ClusterQueue", local["spec"]["clusterQueue"])["spec"]["resourceGroups"]
    quota = {each["name"]: each["nominalQuota"] for each in group["flavors"][0]["resources"]}
    head, worker = (pod["containers"][0]["resources"]["requests"] for pod in pods_of(cluster_of(objects)))
    assert int(quota["cpu"]) >= 0.5 + 2 * int(worker["cpu"])
    assert set(group["coveredResources"]) == set(quota) >= {*head, *worker}
    assert int(quota["nvidia.com/gpu"]) >= 2 * int(worker["nvidia.com/gpu"])
    gigabytes = [int(text.removesuffix("Gi")) for text in (quota["memory"], head["memory"], worker["memory"])]
    assert gigabytes[0] >= gigabytes[1] + 2 * gigabytes[2]


def test_the_network_policies_let_these_through_and_nothing_else(render: Callable[..., Objects]) -> None:
    objects = render()
    assert [thing["metadata"]["name"] for thing in objects if thing["kind"] == "NetworkPolicy"] == ["ray", "ray-head"]
    policy, head = (one(objects, "NetworkPolicy", name)["spec"] for name in ("ray", "ray-head"))
    labels = {"ray.io/cluster": "parallel-training"}
    pods = [{"podSelector": {"matchLabels": labels}}]

    def namespace(name: str) -> list[dict[str, Any]]:
        return [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": name}}}]

    assert policy == {
        "podSelector": {"matchLabels": labels},
        "policyTypes": ["Ingress", "Egress"],
        "ingress": [
            {"from": pods},
            {"from": namespace("monitoring"), "ports": [{"port": port} for port in (8080, 44217, 44227)]},
        ],
        "egress": [
            {"to": pods},
            {"to": namespace("kube-system"), "ports": [{"port": 53, "protocol": one} for one in ("UDP", "TCP")]},
            {"to": namespace("monitoring")},
            {"ports": [{"port": port} for port in (443, 6443, 8443)]},
        ],
    }
    assert head == {
        "podSelector": {"matchLabels": {**labels, "ray.io/node-type": "head"}},
        "policyTypes": ["Ingress"],
        "ingress": [{"ports": [{"port": port} for port in (8265, 10001)]}],
    }


def test_the_dashboard_of_grafana_asks_for_metrics_that_ray_has(render: Callable[..., Objects]) -> None:
    ray = pytest.importorskip("ray", reason="pip install 'holdfast[ray]'")
    (config,) = (thing for thing in render("monitoring") if thing["kind"] == "ConfigMap")
    assert config["metadata"]["labels"] == {"grafana_dashboard": "1"}
    dashboard = json.loads(config["data"]["parallel-training.json"])
    folder = Path(ray.__file__).parent / "dashboard/modules/metrics/dashboards"
    known = set(re.findall(r"ray_\w+", "".join(path.read_text() for path in folder.glob("*.py"))))
    for panel in dashboard["panels"]:
        asked = set(re.findall(r"\bray_(?:node|train)_\w+", panel["targets"][0]["expr"]))
        assert asked, panel["title"]
        assert asked <= known, panel["title"]


def test_prometheus_looks_for_the_pods_where_they_are(render: Callable[..., Objects]) -> None:
    """Also one that was there before: what it looks for comes with the cluster, not with its chart."""
    objects = render("monitoring")
    monitor = one(objects, "PodMonitor", "ray")
    assert monitor["metadata"]["namespace"] == cluster_of(objects)["metadata"]["namespace"] == "ray-system"
    assert monitor["metadata"]["labels"] == {"release": "prometheus"}
    assert "install_chart prometheus " in (SCRIPTS / "install-ray.sh").read_text()
    assert monitor["spec"]["selector"] == {"matchExpressions": [{"key": "ray.io/cluster", "operator": "Exists"}]}
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    for pod in pods_of(cluster_of(objects)):
        assert {"name": endpoint["port"], "containerPort": 8080} in pod["containers"][0]["ports"]
    assert not [thing for thing in render() if thing["kind"] == "PodMonitor"]
    values = yaml.safe_load((SCRIPTS / "components/monitoring/prometheus-values.yaml").read_text())
    assert values["grafana"]["sidecar"]["dashboards"]["searchNamespace"] == "ray-system"


def test_the_graphs_that_rays_dashboard_shows_are_those_that_are_loaded() -> None:
    """The head writes them to files of these names, and asks Grafana for them by these."""
    pytest.importorskip("ray", reason="pip install 'holdfast[ray]'")
    made = importlib.import_module("ray.dashboard.modules.metrics.grafana_dashboard_factory")
    head = Path(made.__file__).with_name("metrics_head.py").read_text()
    script = (SCRIPTS / "install-ray.sh").read_text()
    (named,) = re.findall(r"dashboards=\((.+?)\)", script)
    assert named.split() == [f"{kind}_grafana_dashboard.json" for kind in ("default", "train")]
    for name in named.split():
        assert f'"{name}"' in head
    for place in ('session_dir, "metrics")', '_metrics_root, "grafana")', '_grafana_config_output_path, "dashboards")'):
        assert place in head
    assert "/tmp/ray/session_latest/metrics/grafana/dashboards" in script
    contents = [made.generate_default_grafana_dashboard(), made.generate_train_grafana_dashboard()]
    assert [json.loads(text)["uid"] for text, _ in contents] == [uid for _, uid in contents]
    assert sum(len(text) for text, _ in contents) < 1_000_000  # what a ConfigMap can hold


def test_nothing_names_a_place_of_one_machine() -> None:
    for path in SCRIPTS.rglob("*"):
        if path.is_file():
            assert str(ROOT) not in path.read_text()
