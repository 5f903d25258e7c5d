"""A real cluster for tests, and the programs and schemas that go with it."""

from __future__ import annotations

import contextlib
import json
import lzma
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.kit import ROOT

KUBE = ROOT.parent / "shared/kube"
"""What lies beside the repository where a cluster can be made: programs and the manifests of other projects, packed."""
NAMESPACE = "holdfast-system"
CRDS = {
    "jobset": "jobsets.jobset.x-k8s.io",
    "trainer": "trainjobs.trainer.kubeflow.org",
    "kueue": "clusterqueues.kueue.x-k8s.io",
    "kuberay": "rayclusters.ray.io",
}
COMPILED = (
    *("torch", "numpy", "transformers", "accelerate", "peft", "trl", "datasets", "tokenizers", "huggingface_hub"),
    *("kopf", "kubernetes_asyncio", "aiohttp", "cryptography", "yaml", "ray", "pandas", "pyarrow", "sympy"),
)
"""Packages that trainings and the operator import."""
PATIENCE_S = 400.0
"""For what has no limit of its own: long enough for a machine with other work on its two cores."""
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

    def run(self, *words: str, stdin: str | None = None, check: bool = True, timeout: float = PATIENCE_S) -> str:
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
                self.run(self.script, "add", "--dir", str(self.folder / "cluster"), name)
                self.added.add(name)

    def until(self, what: Callable[[], Any], timeout_s: float = PATIENCE_S, message: str = "") -> Any:
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


def mounted() -> list[str]:
    """What pods must see: this folder, and the package where it lies elsewhere."""
    import holdfast

    package = Path(holdfast.__file__).parents[1]
    return [str(ROOT), *([] if package.is_relative_to(ROOT) else [str(package)])]


def compile_packages() -> None:
    """Pods see the environment read only: what is not compiled by then, each of them would compile again and again."""
    site = Path(sysconfig.get_path("purelib"))
    wanted = [str(site / name) for name in COMPILED if (site / name).is_dir()]
    subprocess.run([sys.executable, "-m", "compileall", "-qq", "-j", "2", *wanted], check=False, timeout=600)


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[Kube]:
    """The one that the variables name; it is made, and ended, if they name a script. Else the test is skipped."""
    given, script = os.environ.get("HOLDFAST_TEST_KUBECONFIG"), os.environ.get("HOLDFAST_TEST_CLUSTER")
    if given:
        yield Kube({**os.environ, "KUBECONFIG": given}, folder, None)
        return
    if not script:
        pytest.skip(HOW)
    if Path("/tmp") in ROOT.parents:
        pytest.skip("pods have a /tmp of their own and cannot see this folder: needs a clone elsewhere")
    compile_packages()
    options = ["--dir", str(folder / "cluster"), "--venv", str(Path(sys.prefix).resolve())]
    options += [option for path in mounted() for option in ("--mount", path)]
    try:
        up = subprocess.run([script, "up", *options], capture_output=True, text=True, timeout=PATIENCE_S, check=False)
        if up.returncode and "apt-get install" in up.stdout + up.stderr:
            pytest.skip(f"needs packages for a cluster: {(up.stdout + up.stderr).strip().splitlines()[-1]}")
        if up.returncode:
            pytest.fail(f"{script} up failed:\n{up.stdout[-2000:]}{up.stderr[-2000:]}")
        printed = subprocess.run([script, "env", *options[:2]], capture_output=True, text=True, check=True).stdout
        environ = dict(os.environ)
        for line in printed.splitlines():
            name, _, value = line.removeprefix("export ").partition("=")
            environ[name] = os.path.expandvars(shlex.split(value)[0]) if value else ""
        yield Kube(environ, folder, script)
    finally:
        subprocess.run([script, "down", *options[:2]], capture_output=True, timeout=PATIENCE_S, check=False)


def program(name: str, folder: Path, packed: str | None = None) -> str:
    """A program in PATH, else one that lies packed beside the repository, perhaps under another name."""
    if found := shutil.which(name):
        return found
    archive, unpacked = KUBE / f"bin/{packed or name}.xz", folder / name
    if not archive.exists():
        pytest.skip(f"{name} is not in PATH: install helm 3.14, kubectl 1.28 and kubeconform 0.6, or newer")
    with lzma.open(archive) as source, unpacked.open("wb") as target:
        shutil.copyfileobj(source, target)
    unpacked.chmod(0o755)
    return str(unpacked)


def schema_of(model: Any, models: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    """The JSON schema of a class of the Kubernetes client, which was made from the API server's own description."""

    def of(kind: str) -> dict[str, Any]:
        if match := re.fullmatch(r"list\[(.+)\]", kind):
            return {"type": "array", "items": of(match[1])}
        if match := re.fullmatch(r"dict\([^,]+, ?(.+)\)", kind):
            return {"type": "object", "additionalProperties": of(match[1])}
        simple = {"str": "string", "int": "integer", "bool": "boolean", "float": "number", "datetime": "string"}
        if kind in simple:
            return {"type": simple[kind]}
        if kind == "object":
            return {}
        if kind not in definitions:
            definitions[kind] = {}
            definitions[kind] = schema_of(getattr(models, kind), models, definitions)
        return {"$ref": f"#/definitions/{kind}"}

    fields = {model.attribute_map[name]: of(kind) for name, kind in model.openapi_types.items()}
    needed = [
        model.attribute_map[name]
        for name in model.openapi_types
        if any("must not be `None`" in str(text) for text in getattr(model, name).fset.__code__.co_consts)
    ]
    schema = {"type": "object", "properties": fields, "additionalProperties": False}
    return schema | ({"required": needed} if needed else {})
