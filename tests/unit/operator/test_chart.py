"""The Helm chart, the plain manifests and the images: what is rendered, what is refused, and what the build proves."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from holdfast.operator.app import FROM_CERT_MANAGER
from tests.kit import ROOT
from tests.kit.kube import program, schema_of

CHART, MANIFESTS, DOCKER = ROOT / "deploy/chart", ROOT / "deploy/manifests", ROOT / "deploy/docker"
NAME, NAMESPACE = "holdfast-operator", "holdfast-system"
CRD = "trainjobs.trainer.kubeflow.org"

Objects = list[dict[str, Any]]


@pytest.fixture(scope="session")
def helm(tmp_path_factory: pytest.TempPathFactory) -> str:
    return program("helm", tmp_path_factory.mktemp("helm"))


@pytest.fixture(scope="session")
def kubeconform(tmp_path_factory: pytest.TempPathFactory) -> str:
    return program("kubeconform", tmp_path_factory.mktemp("kubeconform"))


def helm_template(helm: str, *options: str, chart: Path = CHART) -> subprocess.CompletedProcess[str]:
    command = [helm, "template", NAME, str(chart), "--namespace", NAMESPACE, "--kube-version", "1.36.0", *options]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def rendered(helm: str, *values: str, options: tuple[str, ...] = ()) -> Objects:
    """All objects, hooks included. ``values``: as for ``--set``."""
    done = helm_template(helm, *(part for value in values for part in ("--set", value)), *options)
    assert done.returncode == 0, done.stderr
    return [thing for thing in yaml.safe_load_all(done.stdout) if thing]


def one(objects: Objects, kind: str, name: str = NAME) -> dict[str, Any]:
    (found,) = (thing for thing in objects if thing["kind"] == kind and thing["metadata"]["name"] == name)
    return found


def kinds(objects: Objects) -> set[str]:
    return {thing["kind"] for thing in objects}


@pytest.fixture(scope="session")
def default(helm: str) -> Objects:
    return rendered(helm)


VALUES: dict[str, tuple[str, ...]] = {
    "default": (),
    "plain": ("createNamespace=true",),
    "cert-manager": ("certificates.mode=certManager",),
    "own issuer": (
        "certificates.mode=certManager",
        "certificates.certManager.issuerRef.name=corporate",
        "certificates.certManager.issuerRef.kind=ClusterIssuer",
    ),
    "CRD left alone": ("crd.patch=false",),
    "progress is pushed": ("progress.by=push",),
    "little": ("replicas=1", "podDisruptionBudget.enabled=false", "networkPolicy.enabled=false"),
    "everything": (
        "image.repository=registry.example.com:5000/team/operator",
        "image.tag=1.2.3",
        "image.pullPolicy=Always",
        "image.pullSecrets={pull,another}",
        "python=/opt/venv/bin/python",
        "extraArgs={--host=operator.example.com}",
        "extraEnv[0].name=HTTPS_PROXY",
        "extraEnv[0].value=http://proxy:3128",
        "priorityClassName=system-cluster-critical",
        "runtimeClassName=image",
        "nodeSelector.pool=system",
        "tolerations[0].key=system",
        "tolerations[0].operator=Exists",
        "affinity.nodeAffinity.preferredDuringSchedulingIgnoredDuringExecution[0].weight=1",
        "affinity.nodeAffinity.preferredDuringSchedulingIgnoredDuringExecution[0].preference.matchExpressions[0].key=a",
        "affinity.nodeAffinity.preferredDuringSchedulingIgnoredDuringExecution[0].preference.matchExpressions[0].operator=Exists",
        "topologySpreadConstraints[0].maxSkew=1",
        "topologySpreadConstraints[0].topologyKey=kubernetes.io/hostname",
        "topologySpreadConstraints[0].whenUnsatisfiable=DoNotSchedule",
        "podLabels.team=ml",
        "podAnnotations.note=hello",
        "securityContext.runAsUser=null",
        "securityContext.runAsGroup=null",
        "securityContext.fsGroup=null",
        "webhooks.excludedNamespaces={gatekeeper-system}",
        "networkPolicy.apiServerPorts={16443}",
    ),
}


# ------------------------------------------------------------------ the whole of it


def test_helm_finds_nothing_to_complain_about(helm: str) -> None:
    command = [helm, "lint", "--strict", str(CHART), "--namespace", NAMESPACE]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="session")
def schemas(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Where kubeconform finds the schemas of the built-in kinds, without a network."""
    models = pytest.importorskip("kubernetes_asyncio.client.models", reason="pip install 'holdfast[kubernetes]'")
    folder = tmp_path_factory.mktemp("schemas")
    for kind, model in {
        "Namespace": models.V1Namespace,
        "ServiceAccount": models.V1ServiceAccount,
        "Service": models.V1Service,
        "Deployment": models.V1Deployment,
        "Job": models.V1Job,
        "ClusterRole": models.V1ClusterRole,
        "ClusterRoleBinding": models.V1ClusterRoleBinding,
        "Role": models.V1Role,
        "RoleBinding": models.V1RoleBinding,
        "PodDisruptionBudget": models.V1PodDisruptionBudget,
        "NetworkPolicy": models.V1NetworkPolicy,
        "MutatingWebhookConfiguration": models.V1MutatingWebhookConfiguration,
    }.items():
        definitions: dict[str, Any] = {}
        schema = schema_of(model, models, definitions) | {"definitions": definitions}
        (folder / f"{kind.lower()}.json").write_text(json.dumps(schema))
    return f"{folder}/{{{{ .ResourceKind }}}}.json"


def conforms(kubeconform: str, schemas: str, text: str) -> subprocess.CompletedProcess[str]:
    command = [kubeconform, "-strict", "-summary", "-schema-location", schemas, "-skip", "Certificate,Issuer"]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_every_object_has_the_fields_that_kubernetes_knows(
    helm: str, kubeconform: str, schemas: str, values: tuple[str, ...]
) -> None:
    done = conforms(kubeconform, schemas, yaml.safe_dump_all(rendered(helm, *values)))
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_field_that_kubernetes_does_not_know_would_be_found(kubeconform: str, schemas: str, default: Objects) -> None:
    wrong = json.loads(json.dumps(one(default, "Deployment")))
    wrong["spec"]["template"]["spec"]["containers"][0]["readyProbe"] = {}
    done = conforms(kubeconform, schemas, yaml.safe_dump(wrong))
    assert done.returncode != 0
    assert "readyProbe" in done.stdout


def test_the_plain_manifests_are_those_of_the_chart(helm: str, tmp_path: Path) -> None:
    command = ["make", "--silent", "manifests", f"HELM={helm}", f"MANIFESTS={tmp_path}"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=60)
    for path in sorted(MANIFESTS.iterdir()):
        assert path.read_text() == (tmp_path / path.name).read_text(), f"{path.name} is stale: run `make manifests`"
    assert sorted(os.listdir(tmp_path)) == sorted(os.listdir(MANIFESTS))
    objects = list(yaml.safe_load_all((MANIFESTS / "operator.yaml").read_text()))
    assert objects[0]["kind"] == "Namespace"
    # How to remove it: the rights of the job stay until it has ended, and its image is one that the nodes have.
    header = (MANIFESTS / "operator.yaml").read_text().partition("apiVersion")[0]
    assert "deploy/manifests/*.yaml" in header
    assert "--timeout=180s job/holdfast-operator-uninstall &&" in header
    assert not any("helm.sh/hook" in (thing["metadata"].get("annotations") or {}) for thing in objects)


def test_every_value_is_commented_and_has_a_schema() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    text = (CHART / "values.yaml").read_text()

    def check(values: dict[str, Any], schema: dict[str, Any], path: str) -> None:
        assert schema["additionalProperties"] is False, path
        for key, value in values.items():
            assert key in schema["properties"], f"{path}{key}"
            if isinstance(value, dict) and "properties" in schema["properties"][key] and value:
                check(value, schema["properties"][key], f"{path}{key}.")

    check(yaml.safe_load(text), schema, "")
    for block in text.split("\n\n"):
        assert "# " in block, block


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("replicas=0", "'/replicas': minimum: got 0, want 1"),
        ("replicas=two", "'/replicas': got string, want integer"),
        ("replica=3", "'replica' not allowed"),
        ("image.tag=a:b", "'/image/tag'"),
        ("image.repository=operator:1.0", "'/image/repository'"),
        ("image.pullPolicy=Sometimes", "'Always', 'IfNotPresent', 'Never'"),
        ("certificates.mode=own", "'self', 'certManager'"),
        ("certificates.certManager.duration=90d", "'/certificates/certManager/duration'"),
        ("certificates.certManager.issuerRef.kind=ClusterIssuer", "'name' required"),
        ("webhooks.ray.failurePolicy=Open", "'Fail', 'Ignore'"),
        ("webhooks.failurePolicy=Fail", "'failurePolicy' not allowed"),
        ("webhooks.timeoutSeconds=31", "maximum: got 31, want 30"),
        ("securityContext.runAsUser=0", "'/securityContext/runAsUser': minimum: got 0, want 1"),
        ("crd.patch=perhaps", "'/crd/patch': got string, want boolean"),
        ("command=python", "'/command': got string, want array"),
        ("networkPolicy.apiServerPorts={https}", "'/networkPolicy/apiServerPorts/0': got string, want integer"),
    ],
)
def test_a_bad_value_is_refused_by_name(helm: str, value: str, message: str) -> None:
    done = helm_template(helm, "--set", value)
    assert done.returncode != 0
    assert message in done.stderr


def test_an_older_kubernetes_is_refused(helm: str) -> None:
    done = helm_template(helm, "--kube-version", "1.29.0")
    assert done.returncode != 0
    assert "chart requires kubeVersion: >=1.30" in done.stderr


def test_the_notes_say_what_to_type_next(helm: str, tmp_path: Path) -> None:
    shutil.copytree(CHART, tmp_path / "chart")
    shown = 'text: |\n{{ include (print $.Template.BasePath "/NOTES.txt") . | indent 2 }}\n'
    (tmp_path / "chart/templates/shown.yaml").write_text(shown)

    def notes(*values: str) -> str:
        options = [part for value in values for part in ("--set", value)]
        done = helm_template(helm, "--show-only", "templates/shown.yaml", *options, chart=tmp_path / "chart")
        assert done.returncode == 0, done.stderr
        return str(yaml.safe_load(done.stdout)["text"])

    assert f"kubectl -n {NAMESPACE} rollout status deployment/{NAME}" in notes()
    assert f"helm -n {NAMESPACE} uninstall {NAME}" in notes()
    assert "kubectl explain trainjob.spec.checkpointing" in notes()
    assert "holdfast.dev/training-progress" in notes("crd.patch=false")
    assert f"get certificate {NAME}" in notes("certificates.mode=certManager")


# ------------------------------------------------------------------ the pods


def pod_of(thing: dict[str, Any]) -> dict[str, Any]:
    pod: dict[str, Any] = thing["spec"]["template"]["spec"]
    return pod


@pytest.mark.parametrize(("kind", "name"), [("Deployment", NAME), ("Job", f"{NAME}-uninstall")])
def test_pods_meet_the_restricted_pod_security_standard(default: Objects, kind: str, name: str) -> None:
    pod = pod_of(one(default, kind, name))
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] > 0
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not any(pod.get(key) for key in ("hostNetwork", "hostPID", "hostIPC", "initContainers"))
    (container,) = pod["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert {"name": "tmp", "mountPath": "/tmp"} in container["volumeMounts"]
    assert all("emptyDir" in volume or "secret" in volume for volume in pod["volumes"])
    assert container["resources"]["requests"]["memory"]
    assert container["resources"]["limits"]["memory"]


def test_the_deployment_runs_two_replicas_that_are_ready_when_webhooks_are_served(default: Objects) -> None:
    deployment = one(default, "Deployment")
    (container,) = pod_of(deployment)["containers"]
    assert deployment["spec"]["replicas"] == 2
    assert deployment["spec"]["strategy"]["rollingUpdate"]["maxUnavailable"] == 0
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"webhooks": 9443, "health": 8080}
    assert container["startupProbe"]["tcpSocket"] == {"port": "webhooks"}
    for probe in ("readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"] == {"path": "/healthz", "port": "health"}
    assert {rule["topologyKey"] for rule in pod_of(deployment)["topologySpreadConstraints"]} == {
        "kubernetes.io/hostname",
        "topology.kubernetes.io/zone",
    }
    assert one(default, "PodDisruptionBudget")["spec"]["maxUnavailable"] == 1


def test_the_program_takes_the_arguments_that_it_is_given(helm: str, default: Objects) -> None:
    pytest.importorskip("kopf", reason="pip install 'holdfast[kubernetes]'")
    from holdfast.operator import __main__ as program

    everything = rendered(helm, *VALUES["cert-manager"], *VALUES["CRD left alone"])
    for thing in (
        one(default, "Deployment"),
        one(everything, "Deployment"),
        one(default, "Job", f"{NAME}-uninstall"),
    ):
        (container,) = pod_of(thing)["containers"]
        assert container["command"] == ["python", "-m", "holdfast.operator"]
        with pytest.raises(SystemExit) as stopped:  # it reads all arguments before it prints the help
            program.main([*container["args"], "--help"])
        assert stopped.value.code == 0
    assert pod_of(one(default, "Deployment"))["containers"][0]["args"][0] == "run"
    assert "--leave-crd" in pod_of(one(everything, "Deployment"))["containers"][0]["args"]


def test_values_reach_the_pods(helm: str) -> None:
    objects = rendered(helm, *VALUES["everything"])
    for thing in (one(objects, "Deployment"), one(objects, "Job", f"{NAME}-uninstall")):
        pod = pod_of(thing)
        (container,) = pod["containers"]
        assert container["image"] == "registry.example.com:5000/team/operator:1.2.3"
        assert container["imagePullPolicy"] == "Always"
        assert container["command"][0] == "/opt/venv/bin/python"
        assert {"name": "HTTPS_PROXY", "value": "http://proxy:3128"} in container["env"]
        assert pod["imagePullSecrets"] == [{"name": "pull"}, {"name": "another"}]
        assert (pod["priorityClassName"], pod["runtimeClassName"]) == ("system-cluster-critical", "image")
        assert pod["nodeSelector"] == {"pool": "system"}
        assert pod["tolerations"] == [{"key": "system", "operator": "Exists"}]
        assert pod["securityContext"] == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    template = one(objects, "Deployment")["spec"]["template"]
    assert template["spec"]["containers"][0]["args"][-1] == "--host=operator.example.com"
    assert template["metadata"]["labels"]["team"] == "ml"
    assert template["metadata"]["annotations"]["note"] == "hello"
    assert [rule["whenUnsatisfiable"] for rule in template["spec"]["topologySpreadConstraints"]] == ["DoNotSchedule"]
    objects = rendered(helm, "command={/bin/start,it}")
    assert pod_of(one(objects, "Deployment"))["containers"][0]["command"] == ["/bin/start", "it"]


def test_the_service_leads_to_the_pods_of_the_operator_alone(default: Objects) -> None:
    service = one(default, "Service")
    labels = one(default, "Deployment")["spec"]["template"]["metadata"]["labels"]
    uninstall = one(default, "Job", f"{NAME}-uninstall")["spec"]["template"]["metadata"]["labels"]
    assert [(port["port"], port["targetPort"]) for port in service["spec"]["ports"]] == [(443, "webhooks")]
    for selector in (
        service["spec"]["selector"],
        one(default, "Deployment")["spec"]["selector"]["matchLabels"],
        one(default, "PodDisruptionBudget")["spec"]["selector"]["matchLabels"],
        one(default, "NetworkPolicy")["spec"]["podSelector"]["matchLabels"],
    ):
        assert selector.items() <= labels.items()
        assert not selector.items() <= uninstall.items()


def test_the_network_policy_lets_in_webhooks_and_out_to_the_api_server(helm: str, default: Objects) -> None:
    spec = one(default, "NetworkPolicy")["spec"]
    assert spec["policyTypes"] == ["Ingress", "Egress"]
    assert [port["port"] for rule in spec["ingress"] for port in rule["ports"]] == ["webhooks", "health"]
    assert [port["port"] for rule in spec["egress"] for port in rule["ports"]] == [53, 53, 443, 6443, 8443]
    objects = rendered(helm, *VALUES["little"])
    assert kinds(objects).isdisjoint({"NetworkPolicy", "PodDisruptionBudget"})


# ------------------------------------------------------------------ rights


def rights(*roles: dict[str, Any]) -> set[tuple[str, str, str, str]]:
    """Group, resource, name (``*``: all) and verb."""
    return {
        (group, resource, name, verb)
        for role in roles
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for name in rule.get("resourceNames", ["*"])
        for verb in rule["verbs"]
    }


def expanded(group: str, resource: str, verbs: str, name: str = "*") -> set[tuple[str, str, str, str]]:
    return {(group, resource, name, verb) for verb in verbs.split()}


CLUSTER = (
    expanded("trainer.kubeflow.org", "trainjobs", "list watch")
    | expanded("trainer.kubeflow.org", "trainjobs/status", "patch")
    | expanded("jobset.x-k8s.io", "jobsets", "list watch patch")
    | expanded("batch", "jobs", "list watch patch")
    | expanded("", "pods", "list watch delete")
    | expanded("", "events", "create")
    | expanded("", "persistentvolumeclaims", "create")
    | expanded("", "nodes", "get")
    | expanded("apiextensions.k8s.io", "customresourcedefinitions", "list watch")
)
ANNOTATE = expanded("trainer.kubeflow.org", "trainjobs", "patch")
EXEC = expanded("", "pods/exec", "get create")
PUSH = expanded("authentication.k8s.io", "tokenreviews", "create")
TOUCH_CRD = expanded("apiextensions.k8s.io", "customresourcedefinitions", "get patch", CRD)
TRUST = expanded("admissionregistration.k8s.io", "mutatingwebhookconfigurations", "get patch", NAME)
LEASE = expanded("coordination.k8s.io", "leases", "create") | expanded(
    "coordination.k8s.io", "leases", "get update", NAME
)
SECRET = expanded("", "secrets", "create") | expanded("", "secrets", "get update", "holdfast-operator-tls")


def test_the_operator_may_do_what_it_must_and_nothing_else(helm: str, default: Objects) -> None:
    assert rights(one(default, "ClusterRole")) == CLUSTER | EXEC | TOUCH_CRD | TRUST
    assert rights(one(default, "Role")) == LEASE | SECRET
    objects = rendered(helm, *VALUES["cert-manager"], *VALUES["CRD left alone"])
    assert rights(one(objects, "ClusterRole")) == CLUSTER | EXEC | ANNOTATE
    assert rights(one(objects, "Role")) == LEASE
    pushing = rendered(helm, "progress.by=push")
    assert rights(one(pushing, "ClusterRole")) == CLUSTER | PUSH | TOUCH_CRD | TRUST


def test_where_pods_tell_their_progress_they_can_reach_the_operator(helm: str, default: Objects) -> None:
    pushing = rendered(helm, "progress.by=push")
    container = one(pushing, "Deployment")["spec"]["template"]["spec"]["containers"][0]
    assert "--push-port=9444" in container["args"]
    assert {"name": "push", "port": 9444, "targetPort": "push"} in one(pushing, "Service")["spec"]["ports"]
    rules = one(pushing, "NetworkPolicy")["spec"]["ingress"]
    assert any(port["port"] == "push" for rule in rules for port in rule["ports"])
    assert "push" not in str(one(default, "Service")) + str(one(default, "Deployment")["spec"])


def test_no_rule_has_a_wildcard_and_each_says_why_it_is_there(helm: str, default: Objects) -> None:
    for thing in default:
        if thing["kind"] in ("ClusterRole", "Role"):
            assert not any("*" in right[:2] or right[3] == "*" for right in rights(thing))
    for name in ("rbac.yaml", "uninstall.yaml"):
        lines = (CHART / "templates" / name).read_text().splitlines()
        rules = [number for number, line in enumerate(lines) if line.startswith("  - apiGroups:")]
        assert rules
        for number in rules:
            assert lines[number - 1].startswith("  # "), f"{name}:{number + 1} has no reason"


def test_every_binding_is_to_an_account_that_is_there(default: Objects) -> None:
    accounts = {thing["metadata"]["name"] for thing in default if thing["kind"] == "ServiceAccount"}
    bindings = [thing for thing in default if thing["kind"].endswith("Binding")]
    assert len(bindings) == 4
    for binding in bindings:
        role, (subject,) = binding["roleRef"], binding["subjects"]
        assert one(default, role["kind"], role["name"])
        assert subject["name"] in accounts
        assert subject["namespace"] == NAMESPACE
    assert pod_of(one(default, "Deployment"))["serviceAccountName"] == NAME


# ------------------------------------------------------------------ webhooks


def webhooks(objects: Objects) -> dict[str, dict[str, Any]]:
    """By the path at which the operator serves them."""
    configuration = one(objects, "MutatingWebhookConfiguration")
    return {webhook["clientConfig"]["service"]["path"]: webhook for webhook in configuration["webhooks"]}


def test_there_is_one_webhook_for_each_handler_of_the_operator(default: Objects) -> None:
    pytest.importorskip("kopf", reason="pip install 'holdfast[kubernetes]'")
    from holdfast.operator.admission.review import WEBHOOKS

    expected = {
        f"/{path}-{operation.lower()}": (group, version, plural, operation)
        for path, group, version, plural, _, operations in WEBHOOKS
        for operation in operations
    }
    found = {}
    for path, webhook in webhooks(default).items():
        (rule,) = webhook["rules"]
        found[path] = tuple(rule[key][0] for key in ("apiGroups", "apiVersions", "resources", "operations"))
        assert all(len(rule[key]) == 1 for key in ("apiGroups", "apiVersions", "resources", "operations"))
    assert found == expected


def test_webhooks_reach_the_service_and_keep_out_of_system_namespaces(helm: str, default: Objects) -> None:
    for path, webhook in webhooks(default).items():
        assert webhook["name"] == f"{path[1:]}.holdfast.dev"
        assert webhook["clientConfig"] == {
            "service": {"name": NAME, "namespace": NAMESPACE, "path": path, "port": 443}
        }, "a caBundle in the chart would be reset by an upgrade"
        assert (webhook["sideEffects"], webhook["reinvocationPolicy"]) == ("None", "IfNeeded")
        (expression,) = webhook["namespaceSelector"]["matchExpressions"]
        assert expression == {
            "key": "kubernetes.io/metadata.name",
            "operator": "NotIn",
            "values": ["kube-system", NAMESPACE],
        }
    for webhook in webhooks(rendered(helm, *VALUES["everything"])).values():
        assert webhook["namespaceSelector"]["matchExpressions"][0]["values"] == ["gatekeeper-system", NAMESPACE]


def test_each_kind_fails_open_or_closed_by_its_own_value(helm: str, default: Objects) -> None:
    def policies(objects: Objects) -> dict[str, str]:
        return {path.partition("-")[0]: webhook["failurePolicy"] for path, webhook in webhooks(objects).items()}

    ray = ("/raycluster", "/rayjob", "/rayservice")
    assert policies(default) == {"/trainjob": "Fail"} | dict.fromkeys(("/jobset", "/job", *ray), "Ignore")
    objects = rendered(
        helm,
        "webhooks.trainjob.failurePolicy=Ignore",
        "webhooks.ray.failurePolicy=Fail",
        "webhooks.timeoutSeconds=3",
    )
    assert policies(objects) == dict.fromkeys(("/trainjob", "/jobset", "/job"), "Ignore") | dict.fromkeys(ray, "Fail")
    assert {webhook["timeoutSeconds"] for webhook in webhooks(objects).values()} == {3}
    for found, kinds_let_through in (
        (default, {"jobs", "jobsets", "rayclusters", "rayjobs", "rayservices"}),
        (objects, {"trainjobs", "jobs", "jobsets"}),
    ):
        (container,) = one(found, "Deployment")["spec"]["template"]["spec"]["containers"]
        (argument,) = [argument for argument in container["args"] if argument.startswith("--open-for=")]
        assert set(argument.removeprefix("--open-for=").split(",")) == kinds_let_through


def cel(expression: str, **variables: Any) -> bool:
    """The few words of CEL that the chart uses, read as Python."""
    text = re.sub(r"([\w.]+)\.exists\((\w+), \2\.(\w+) == (\S+)\)", r"(\4 in [\2['\3'] for \2 in \1])", expression)
    text = re.sub(r"has\(([\w.]+)\.(\w+)\)", r"('\2' in \1)", text)
    text = text.replace("&&", "and").replace("||", "or").replace("!(", "not (")
    text = re.sub(r"\b(object|oldObject)((?:\.\w+)+)", lambda m: m[1] + re.sub(r"\.(\w+)", r"['\1']", m[2]), text)
    return bool(eval(text, {"__builtins__": {}}, variables))


def thing(*annotations: str, value: str = "true", **spec: Any) -> dict[str, Any]:
    meta = {"annotations": dict.fromkeys(annotations, value)} if annotations else {}
    return {"metadata": {"name": "x", **meta}, "spec": spec}


def template(*annotations: str) -> dict[str, Any]:
    return {"template": {"metadata": {"annotations": dict.fromkeys(annotations, "{}")}}}


def safe(*env: str, suspend: bool = False, patched: bool = True) -> dict[str, Any]:
    """A TrainJob as the operator has made it, with these variables."""
    patches = {"runtimePatches": [{"manager": "kueue"}, {"manager": "holdfast.dev/operator"}][: 2 if patched else 1]}
    return thing(checkpointing={}, suspend=suspend, trainer={"env": [{"name": name} for name in env]}, **patches)


ASKS, MADE, PUT_IN = "holdfast.dev/checkpointing", "holdfast.dev/managed", "holdfast.dev/injected"
RAY, WAIT = "ray.io/jit-checkpoint-enabled", "ray.io/jit-checkpoint-kill-wait"


@pytest.mark.parametrize(
    ("path", "new", "old", "acts"),
    [
        ("/trainjob-create", thing(), None, False),
        ("/trainjob-create", thing("other"), None, False),
        ("/trainjob-create", thing(checkpointing={}), None, True),
        ("/trainjob-create", thing(ASKS), None, True),
        ("/trainjob-update", thing(checkpointing={}), thing(), True),
        ("/trainjob-update", thing(ASKS), thing(), True),
        ("/trainjob-update", thing(checkpointing={}), thing(checkpointing={}), False),
        ("/trainjob-update", thing(ASKS), thing(ASKS), False),
        ("/trainjob-update", thing(ASKS), thing(ASKS, value="false"), True),
        ("/trainjob-update", thing("other"), thing(ASKS), False),
        ("/trainjob-update", safe("A", "B", suspend=True), safe("A", "B"), False),
        ("/trainjob-update", safe("A"), safe("A", "B"), True),
        ("/trainjob-update", safe("A", "B", patched=False), safe("A", "B"), True),
        ("/trainjob-update", thing(checkpointing={}), safe("A"), True),
        ("/trainjob-update", safe("A", "B", patched=False), safe("A", patched=False), False),
        ("/job-update", thing(ASKS, template={"a": 1}, suspend=True), thing(ASKS, template={"a": 1}), False),
        ("/job-update", thing(ASKS, template={"a": 1}), thing(ASKS, template={"a": 2}), True),
        ("/job-update", thing(template={"a": 1}), thing(template={"a": 2}), False),
        ("/job-update", thing(ASKS, template={}), thing(ASKS, template={}, podFailurePolicy={}), True),
        ("/job-update", thing(), thing(), False),
        ("/job-update", thing("other"), thing(), False),
        ("/job-update", thing(ASKS), thing(), True),
        ("/job-update", thing(ASKS, template={}), thing(ASKS, template={}), False),
        ("/job-update", thing(ASKS), thing(ASKS, value="false"), True),
        ("/trainjob-update", thing(), thing(checkpointing={}), False),
        ("/jobset-create", thing(), None, False),
        ("/jobset-create", thing(ASKS), None, True),
        ("/jobset-create", thing(MADE), None, True),
        ("/jobset-update", thing(MADE), thing(MADE), True),
        ("/job-create", thing(), None, False),
        ("/job-create", thing("other"), None, False),
        ("/job-create", thing(ASKS), None, True),
        ("/raycluster-create", thing(), None, False),
        ("/raycluster-create", thing(RAY), None, True),
        ("/raycluster-create", thing(headGroupSpec=template("other")), None, False),
        ("/raycluster-create", thing(headGroupSpec=template(PUT_IN)), None, True),
        ("/rayjob-create", thing(rayClusterSpec={"headGroupSpec": template(PUT_IN)}), None, True),
        ("/rayservice-create", thing(rayClusterConfig={"headGroupSpec": template(PUT_IN)}), None, True),
        ("/rayservice-create", thing(rayClusterConfig={}), None, False),
        ("/rayjob-create", thing(WAIT), None, True),
        ("/rayservice-update", thing(), thing(), False),
        ("/rayservice-update", thing(), thing(RAY), True),
        ("/rayservice-update", thing(RAY), thing(), True),
        ("/rayjob-update", thing("other"), thing(WAIT), True),
    ],
)
def test_the_api_server_asks_only_for_objects_that_ask_for_it(
    default: Objects, path: str, new: dict[str, Any], old: dict[str, Any] | None, acts: bool
) -> None:
    (condition,) = webhooks(default)[path]["matchConditions"]
    assert cel(condition["expression"], object=new, oldObject=old) is acts


def test_the_conditions_name_the_annotations_of_the_operator(default: Objects) -> None:
    from holdfast.operator import names

    assert (ASKS, MADE, PUT_IN) == (names.CHECKPOINTING, names.MANAGED, names.INJECTED)
    assert (RAY, WAIT) == (names.RAY_ENABLED, names.RAY_KILL_WAIT)
    assert names.TRAINJOB_CRD == CRD


# ------------------------------------------------------------------ certificates


def test_by_default_the_operator_makes_its_certificate(default: Objects) -> None:
    assert kinds(default).isdisjoint({"Certificate", "Issuer"})
    (container,) = pod_of(one(default, "Deployment"))["containers"]
    assert not any("--certificates" in argument for argument in container["args"])
    assert "annotations" not in one(default, "MutatingWebhookConfiguration")["metadata"]


def test_with_cert_manager_its_secret_is_mounted_and_its_authority_injected(helm: str) -> None:
    objects = rendered(helm, *VALUES["cert-manager"])
    certificate = one(objects, "Certificate")
    assert certificate["spec"]["dnsNames"] == [f"{NAME}.{NAMESPACE}.svc"]
    assert (
        one(objects, "Issuer", certificate["spec"]["issuerRef"]["name"])["spec"]["ca"]["secretName"]
        == (one(objects, "Certificate", f"{NAME}-authority")["spec"]["secretName"])
    )
    meta = one(objects, "MutatingWebhookConfiguration")["metadata"]
    assert meta["annotations"] == {"cert-manager.io/inject-ca-from": f"{NAMESPACE}/{NAME}"}
    pod = pod_of(one(objects, "Deployment"))
    (container,) = pod["containers"]
    (mount,) = (mount for mount in container["volumeMounts"] if mount["name"] == "certificates")
    (volume,) = (volume for volume in pod["volumes"] if volume["name"] == "certificates")
    assert f"--certificates={mount['mountPath']}" in container["args"]
    assert volume["secret"]["secretName"] == certificate["spec"]["secretName"] != "holdfast-operator-tls"
    objects = rendered(helm, *VALUES["own issuer"])
    assert one(objects, "Certificate")["spec"]["issuerRef"] == {"name": "corporate", "kind": "ClusterIssuer"}
    assert "Issuer" not in kinds(objects)


# ------------------------------------------------------------------ uninstall


def test_the_uninstall_runs_last_with_rights_of_its_own_and_leaves_nothing(helm: str, default: Objects) -> None:
    name = f"{NAME}-uninstall"
    hooks = [thing for thing in default if thing["metadata"]["name"] == name]
    assert {thing["kind"] for thing in hooks} == {
        "ServiceAccount",
        "ClusterRole",
        "ClusterRoleBinding",
        "Role",
        "RoleBinding",
        "Job",
    }
    weights = {}
    for hook in hooks:
        annotations = hook["metadata"]["annotations"]
        # After everything else: a leader that is still there would put the fields back.
        assert annotations["helm.sh/hook"] == "post-delete"
        assert annotations["helm.sh/hook-delete-policy"] == "before-hook-creation,hook-succeeded"
        weights[hook["kind"]] = int(annotations["helm.sh/hook-weight"])
    assert all(weight < weights["Job"] for kind, weight in weights.items() if kind != "Job")
    assert rights(one(default, "ClusterRole", name)) == TOUCH_CRD
    assert {right[3] for right in rights(one(default, "Role", name))} == {"delete"}
    assert all(right[2] != "*" for right in rights(one(default, "Role", name)))
    pod = pod_of(one(default, "Job", name))
    assert pod["serviceAccountName"] == name
    assert pod["containers"][0]["args"][0] == "uninstall"
    others = {json.dumps(thing, sort_keys=True) for thing in default if thing["metadata"]["name"] != name}
    without = {json.dumps(thing, sort_keys=True) for thing in rendered(helm, options=("--no-hooks",))}
    assert others == without
    # With other values before, the operator may have put fields into the CRD, and cert-manager made secrets.
    alone = one(rendered(helm, *VALUES["CRD left alone"]), "Job", name)
    assert "--leave-crd" not in pod_of(alone)["containers"][0]["args"]
    secrets = {right[2] for right in rights(one(default, "Role", name)) if right[1] == "secrets"}
    assert secrets == {"holdfast-operator-tls", *FROM_CERT_MANAGER}


# ------------------------------------------------------------------ images


def instructions(name: str) -> list[str]:
    text = re.sub(r"\\\n\s*", "", (DOCKER / name).read_text())
    return [line for line in text.splitlines() if line and not line.startswith("#")]


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built by the steps of the Dockerfiles, from nothing but what they copy."""
    source, wheels = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheels")
    copies = [line.split()[1:] for line in instructions("operator.Dockerfile") if line.startswith("COPY")]
    assert copies == [line.split()[1:] for line in instructions("ray.Dockerfile") if line.startswith("COPY")]
    for *names, target in copies:
        for name in names:
            if (ROOT / name).is_dir():
                left_out = shutil.ignore_patterns("*.egg-info", "__pycache__")
                shutil.copytree(ROOT / name, source / target, ignore=left_out)
            else:
                shutil.copy(ROOT / name, source / target)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", str(wheels), str(source)], check=True, capture_output=True, timeout=120)
    (built,) = wheels.glob("holdfast-*.whl")
    return built


def test_the_images_install_a_wheel_with_the_hook_and_the_operator(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = (archive.read(name).decode() for name in names if name.endswith("/METADATA"))
    assert {"holdfast.pth", "_holdfast_startup.py", "holdfast/operator/__main__.py", "holdfast/ray.py"} <= set(names)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    operator, ray = "\n".join(instructions("operator.Dockerfile")), "\n".join(instructions("ray.Dockerfile"))
    assert "holdfast-*.whl)[kubernetes]" in operator
    (wanted,) = re.findall(r"ARG EXTRAS=(\S+)", ray)
    for extra in ("kubernetes", *wanted.split(",")):
        assert extra in extras
        assert f"Provides-Extra: {extra}" in metadata


def test_the_operator_image_runs_as_the_user_that_the_chart_names(default: Objects) -> None:
    lines = instructions("operator.Dockerfile")
    pod = pod_of(one(default, "Deployment"))
    (user,) = (line.split()[1] for line in lines if line.startswith("USER"))
    assert user == f"{pod['securityContext']['runAsUser']}:{pod['securityContext']['runAsGroup']}"
    assert "ARG PYTHON_IMAGE=python:3.12-slim" in lines
    (entry,) = (json.loads(line.partition(" ")[2]) for line in lines if line.startswith("ENTRYPOINT"))
    assert entry == pod["containers"][0]["command"]
    assert lines[-1] == 'CMD ["run"]'


def prove(*options: str, parts: tuple[str, ...] = (), **environ: str) -> subprocess.CompletedProcess[str]:
    pytest.importorskip("ray", reason="pip install 'holdfast[ray]'")
    return subprocess.run(
        [sys.executable, *options, str(DOCKER / "prove_ray.py"), *parts],
        env=os.environ | environ,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_the_ray_image_is_proved_where_all_parts_work() -> None:
    assert any(line.startswith("RUN") and "prove_ray.py" in line for line in instructions("ray.Dockerfile"))
    done = prove(RAY_TRAIN_JIT_CHECKPOINT_ENABLED="maybe", HOLDFAST_KILL_WAIT="soon")
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.split() for line in done.stdout.splitlines()[:4]] == [
        ["ok", part] for part in ("hook", "constants", "environment", "config")
    ]
    assert done.stdout.splitlines()[4].startswith("holdfast ")


def test_the_proof_fails_where_the_hook_is_not_read() -> None:
    done = prove("-S", parts=("hook",), PYTHONPATH=os.pathsep.join(path for path in sys.path if path))
    assert done.returncode == 1
    assert "BROKEN  hook: holdfast.pth was not read" in done.stdout


def test_the_proof_fails_where_the_package_is_not_there() -> None:
    done = prove("-S", "-E")
    assert done.returncode == 1
    assert done.stdout.count("BROKEN") == 4


def test_the_proof_fails_where_a_part_is_broken() -> None:
    pytest.importorskip("ray", reason="pip install 'holdfast[ray]'")
    broken = f"""
import runpy, holdfast.adapters.ray.callback, holdfast.adapters.registry
holdfast.adapters.registry._RAY_CALLBACK = "elsewhere"
holdfast.adapters.ray.callback.is_enabled = lambda environ, config: True
holdfast.adapters.ray.callback.JITCheckpointConfig.__init__.__defaults__ = (False, 4.0)
runpy.run_path({str(DOCKER / "prove_ray.py")!r}, run_name="__main__")
"""
    done = subprocess.run(
        [sys.executable, "-c", broken, "constants", "environment", "config"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 1, done.stderr
    assert "BROKEN  constants: the callback that Ray is told of is 'elsewhere'" in done.stdout
    assert "BROKEN  environment: RAY_TRAIN_JIT_CHECKPOINT_ENABLED=0 with a config that is switched on" in done.stdout
    assert "BROKEN  config: the default of kill_wait is 4.0 and must be 3.0" in done.stdout
