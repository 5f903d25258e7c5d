"""The operator with many TrainJobs: ``python benchmarks/operator_jobs.py [--jobs 500] [--minutes 3]``.

A real API server, and the operator as a process of its own. The jobs are real TrainJobs; their pods are real objects
too, but lie on a node that has no kubelet, since no machine here runs 500 of them. Each pod's progress is told to the
operator every ten seconds, with a token that the API server has made for that pod. Then a few real pods are read by
exec, as fast as the operator does it, to see how many jobs that is enough for.

Needs a cluster: one that HOLDFAST_TEST_KUBECONFIG names and that has Kubeflow Trainer's CRD but not its controller, or
one made by the script that HOLDFAST_TEST_CLUSTER names.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import lzma
import os
import re
import shlex
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
import yaml
from bench import spread
from kubernetes_asyncio import client
from kubernetes_asyncio.config import kube_config

from holdfast.operator.cluster import Cluster
from holdfast.operator.names import AUDIENCE, JOBSET_NAME_LABEL, MANAGED, TRAINER_GROUP, TRAINER_VERSION, TRAINJOBS
from holdfast.operator.reconcile.controller import SOONEST_S, WORKERS

NAMESPACE, NODE, SYSTEM = "default", "no-kubelet", "holdfast-system"
PUSH_S = 10.0
AT_A_TIME = 32


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def typical(values: list[float], unit: str = "") -> str:
    return f"{statistics.median(values):.0f} ± {spread(values):.0f}{unit}" if values else "?"


async def gather(calls: list[Any]) -> list[Any]:
    """All of them, some at a time."""
    limit = asyncio.Semaphore(AT_A_TIME)

    async def one(call: Any) -> Any:
        async with limit:
            return await call

    return await asyncio.gather(*map(one, calls))


class Node:
    """A node that answers, and runs nothing."""

    def __init__(self, cluster: Cluster) -> None:
        self._core = cluster.core
        self._leases = client.CoordinationV1Api(cluster.api)

    async def make(self) -> None:
        taint = {"key": "holdfast.dev/benchmark", "effect": "NoSchedule"}
        await self._core.create_node({"metadata": {"name": NODE}, "spec": {"taints": [taint]}})
        lease = {"metadata": {"name": NODE}, "spec": {"holderIdentity": NODE, "leaseDurationSeconds": 40}}
        await self._leases.create_namespaced_lease("kube-node-lease", lease)

    async def answer(self) -> None:
        """For ever."""
        while True:
            moment = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
            ready = {"type": "Ready", "status": "True", "reason": "Benchmark", "lastHeartbeatTime": now()}
            await self._core.patch_node_status(NODE, {"status": {"conditions": [ready]}})
            await self._leases.patch_namespaced_lease(NODE, "kube-node-lease", {"spec": {"renewTime": moment}})
            await asyncio.sleep(5.0)


def trainjob(name: str) -> dict[str, Any]:
    return {
        "apiVersion": f"{TRAINER_GROUP}/{TRAINER_VERSION}",
        "kind": "TrainJob",
        "metadata": {"name": name},
        "spec": {
            "runtimeRef": {"name": "torch-distributed"},
            "checkpointing": {"interval": "5m", "storage": {"uri": "s3://bucket/prefix"}},
            "trainer": {"numNodes": 1},
        },
    }


def pod(name: str, node: str | None, command: list[str]) -> dict[str, Any]:
    container = {
        "name": "node",
        "image": "localhost/host:latest",
        "imagePullPolicy": "IfNotPresent",
        "command": command,
        "resources": {"requests": {"cpu": "1m", "memory": "16Mi"}},
    }
    spec = {"containers": [container], "terminationGracePeriodSeconds": 0, "tolerations": [{"operator": "Exists"}]}
    labels = {MANAGED: "TrainJob", JOBSET_NAME_LABEL: name}
    return {"metadata": {"name": f"{name}-node-0-0", "labels": labels}, "spec": {**spec, "nodeName": node}}


async def submit(cluster: Cluster, name: str) -> str:
    """A job whose pod runs, as far as anybody can see; returns the pod's token."""
    place = (TRAINER_GROUP, TRAINER_VERSION, NAMESPACE, TRAINJOBS)
    await cluster.custom.create_namespaced_custom_object(*place, trainjob(name))
    made = await cluster.core.create_namespaced_pod(NAMESPACE, pod(name, NODE, ["sleep", "infinity"]))
    running = {"name": "node", "ready": True, "restartCount": 0, "image": "x", "imageID": "x"}
    running["state"] = {"running": {"startedAt": now()}}
    status = {"phase": "Running", "containerStatuses": [running]}
    await cluster.core.patch_namespaced_pod_status(made.metadata.name, NAMESPACE, {"status": status})
    bound = {"kind": "Pod", "apiVersion": "v1", "name": made.metadata.name, "uid": made.metadata.uid}
    request = {"spec": {"audiences": [AUDIENCE], "expirationSeconds": 3600, "boundObjectRef": bound}}
    token = await cluster.core.create_namespaced_service_account_token("default", NAMESPACE, request)
    return str(token.status.token)


class Pushing:
    """All pods, telling their progress."""

    def __init__(self, url: str, authority: bytes, tokens: list[str]) -> None:
        self._url = url
        self._tokens = tokens
        self._context = ssl.create_default_context(cadata=authority.decode())
        self.told: list[float] = []
        self.refused: dict[int, int] = {}

    async def run(self) -> None:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=self._context, limit=AT_A_TIME)) as session:
            await asyncio.gather(*(self._one(session, number) for number in range(len(self._tokens))))

    async def _one(self, session: aiohttp.ClientSession, number: int) -> None:
        await asyncio.sleep(PUSH_S * number / len(self._tokens))
        step = 0
        while True:
            step += 1
            progress = {"step": step, "totalSteps": 10**6, "loss": f"{1 / step:.4f}", "lastUpdateTime": now()}
            headers = {"Authorization": f"Bearer {self._tokens[number]}"}
            began = time.monotonic()
            async with session.post(self._url, json=progress, headers=headers) as answer:
                if answer.status == 204:
                    self.told.append(time.monotonic() - began)
                else:
                    self.refused[answer.status] = self.refused.get(answer.status, 0) + 1
            await asyncio.sleep(PUSH_S)


async def ages(cluster: Cluster) -> list[float]:
    """How old what each job's status says is."""
    found = await cluster.custom.list_namespaced_custom_object(TRAINER_GROUP, TRAINER_VERSION, NAMESPACE, TRAINJOBS)
    times = [item.get("status", {}).get("trainingProgress", {}).get("lastUpdateTime") for item in found["items"]]
    return [time.time() - datetime.fromisoformat(text).timestamp() for text in times if text]


async def exec_rate(cluster: Cluster, count: int, seconds: float) -> tuple[float, list[float]]:
    """Progress files read in a second, as many at a time as the operator reads, and how long each took."""
    write = "import time; open('/tmp/p', 'w').write('{\"step\": 1}'); time.sleep(1e6)"
    names = [f"real-{number}" for number in range(count)]
    for name in names:
        body = pod(name, None, ["python", "-c", write])
        body["metadata"]["labels"] = {}
        await cluster.core.create_namespaced_pod(NAMESPACE, body)
    taken: list[float] = []
    try:
        for name in names:
            async with asyncio.timeout(120):
                while (await cluster.core.read_namespaced_pod(f"{name}-node-0-0", NAMESPACE)).status.phase != "Running":
                    await asyncio.sleep(0.5)
        await asyncio.sleep(2.0)
        until = time.monotonic() + seconds

        async def read(worker: int) -> None:
            turn = worker
            while time.monotonic() < until:
                began = time.monotonic()
                assert await cluster.read_file(NAMESPACE, f"{names[turn % count]}-node-0-0", "node", "/tmp/p")
                taken.append(time.monotonic() - began)
                turn += 1

        await asyncio.gather(*(read(worker) for worker in range(WORKERS)))
    finally:
        for name in names:
            await cluster.core.delete_namespaced_pod(f"{name}-node-0-0", NAMESPACE)
    return len(taken) / seconds, taken


def usage(pid: int) -> tuple[float, float]:
    """Seconds of the processor so far, and MiB of memory."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"), pages * 4096 / 2**20


async def measure(jobs: int, minutes: int, log: Path, operator: subprocess.Popen[bytes], real: int) -> None:
    async with Cluster() as cluster:
        node = Node(cluster)
        await node.make()
        answering = asyncio.create_task(node.answer())
        began = time.monotonic()
        tokens = await gather([submit(cluster, f"job-{number:03d}") for number in range(jobs)])
        print(f"{jobs} jobs made in {time.monotonic() - began:.0f} s", flush=True)
        secret = await cluster.core.read_namespaced_secret("holdfast-operator-tls", SYSTEM)
        pushing = Pushing("https://localhost:9444/progress", base64.b64decode(secret.data["ca.crt"]), tokens)
        telling = asyncio.create_task(pushing.run())
        await asyncio.sleep(45.0)  # until each has been seen
        before, at = usage(operator.pid), time.monotonic()
        told, seen = len(pushing.told), len(log.read_text())
        old: list[float] = []
        while time.monotonic() - at < minutes * 60 + 5:
            old += await ages(cluster)
            await asyncio.sleep(5.0)
        lasted = time.monotonic() - at
        after = usage(operator.pid)
        said = re.findall(
            r"(\d+) jobs followed, (\d+) looks, at most ([\d.]+) s late, (\d+) API calls \((.*)\)",
            log.read_text()[seen:],
        )
        rows = [
            ["jobs followed", said[-1][0] if said else "?"],
            ["looks a minute", typical([float(line[1]) for line in said])],
            ["API calls a minute", typical([float(line[3]) for line in said])],
            ["  of these", said[-1][4] if said else "?"],
            ["a look was late by at most", f"{max(float(line[2]) for line in said):.1f} s"],
            ["told to the operator a minute", f"{(len(pushing.told) - told) / lasted * 60:.0f}"],
            ["  refused", str(pushing.refused or "none")],
            ["  answered after", typical([1000 * one for one in pushing.told[told:]], " ms")],
            ["age of what the status says", f"median {statistics.median(old):.0f} s, at most {max(old):.0f} s"],
            ["the operator's processor", f"{100 * (after[0] - before[0]) / lasted:.0f} % of a core"],
            ["the operator's memory", f"{after[1]:.0f} MiB"],
        ]
        telling.cancel()
        await asyncio.gather(telling, return_exceptions=True)
        if real:
            rate, taken = await exec_rate(cluster, real, 20.0)
            rows.append(["progress files read by exec", f"{rate:.0f} a second, {WORKERS} at a time"])
            rows.append(["  each after", typical([1000 * one for one in taken], " ms")])
            rows.append(["  enough for, one look in 15 s each", f"{rate * SOONEST_S:.0f} jobs"])
        answering.cancel()
    for what, value in rows:
        print(f"{what:<36} {value}")


@contextlib.contextmanager
def cluster_for(folder: Path) -> Any:
    """Variables for a cluster with the CRD of TrainJob."""
    given, script = os.environ.get("HOLDFAST_TEST_KUBECONFIG"), os.environ.get("HOLDFAST_TEST_CLUSTER")
    if given:
        yield {**os.environ, "KUBECONFIG": given}
        return
    if not script:
        sys.exit("name a cluster with HOLDFAST_TEST_KUBECONFIG, or a script that makes one with HOLDFAST_TEST_CLUSTER")
    options = ["--dir", str(folder / "cluster"), "--venv", sys.prefix, "--mount", str(Path(__file__).parents[1])]
    subprocess.run([script, "up", *options], check=True, stdout=subprocess.DEVNULL)
    try:
        printed = subprocess.run([script, "env", *options[:2]], capture_output=True, text=True, check=True).stdout
        environ = dict(os.environ)
        for line in printed.splitlines():
            name, _, value = line.removeprefix("export ").partition("=")
            environ[name] = os.path.expandvars(shlex.split(value)[0]) if value else ""
        with lzma.open(Path(script).parent / "addons/trainer.yaml.xz") as file:
            things = [one for one in yaml.safe_load_all(file) if one and one["kind"] == "CustomResourceDefinition"]
        words = ["kubectl", "apply", "--server-side", "-f", "-"]
        subprocess.run(
            words, env=environ, input=yaml.safe_dump_all(things).encode(), check=True, stdout=subprocess.DEVNULL
        )
        yield environ
    finally:
        subprocess.run([script, "down", *options[:2]], check=False, stdout=subprocess.DEVNULL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=500)
    parser.add_argument("--minutes", type=int, default=3)
    parser.add_argument("--real-pods", type=int, default=4, help="pods that are read by exec; 0: none")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as name, cluster_for(Path(name)) as environ:
        subprocess.run(["kubectl", "create", "namespace", SYSTEM], env=environ, check=False, stdout=subprocess.DEVNULL)
        kube_config.KUBE_CONFIG_DEFAULT_LOCATION = environ["KUBECONFIG"]  # read from the environment when imported
        log = Path(name, "operator.log")
        words = ["-m", "holdfast.operator", "run", "--namespace", SYSTEM, "--host", "localhost", "--push-port", "9444"]
        with log.open("wb") as output:
            operator = subprocess.Popen([sys.executable, *words], env=environ, stdout=output, stderr=output)
        try:
            end = time.monotonic() + 60
            while "leading" not in log.read_text() or not has_fields(environ):
                if time.monotonic() > end or operator.poll() is not None:
                    sys.exit(f"the operator does not start:\n{log.read_text()[-3000:]}")
                time.sleep(0.5)
            asyncio.run(measure(options.jobs, options.minutes, log, operator, options.real_pods))
        finally:
            operator.terminate()
            operator.wait(30)


def has_fields(environ: dict[str, str]) -> bool:
    words = ["kubectl", "get", "crd", "trainjobs.trainer.kubeflow.org", "-o", "yaml"]
    return "trainingProgress" in subprocess.run(words, env=environ, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    main()
