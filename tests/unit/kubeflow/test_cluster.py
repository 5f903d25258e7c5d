"""Jobs of a cluster that answers badly, late, or not at all. The API is made up."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kubernetes.client import ApiException
from typer.testing import CliRunner
from urllib3.exceptions import ProtocolError

from holdfast.cli import jobs as cli
from holdfast.errors import HoldfastError, JobNotFoundError, MissingExtraError
from holdfast.kubeflow import Panel, Progress, cluster, jobs, view
from holdfast.kubeflow.cluster import ClusterJobs
from holdfast.kubeflow.page import Page
from holdfast.operator.names import CHECKPOINTING, PROGRESS


class Backend:
    """One TrainJob; what is in ``answers`` is raised first, one after the other."""

    def __init__(self, *answers: Exception, annotations: dict[str, str] | None = None, **spec: Any) -> None:
        self.custom_api = self.core_api = self
        self.namespace = "default"
        self.answers = list(answers)
        block = json.dumps({"gracePeriodSeconds": 90, "storage": {"uri": "/claim/x"}})
        metadata = {"name": "job", "uid": "u1", "annotations": {CHECKPOINTING: block, **(annotations or {})}}
        self.body = {"metadata": metadata, "spec": spec}
        self.workloads: dict[str, dict[str, Any]] = {}
        """By version and name, where there is Kueue."""

    def get_namespaced_custom_object(self, *place: Any, **more: Any) -> dict[str, Any]:
        if self.answers:
            raise self.answers.pop(0)
        return self.body

    def list_namespaced_custom_object(self, *place: Any, **more: Any) -> dict[str, Any]:
        if place[0] == "kueue.x-k8s.io":
            if place[1] not in self.workloads:
                raise ApiException(status=404)
            assert more["label_selector"] == "kueue.x-k8s.io/job-uid=u1"
            return {"items": [{"metadata": {"name": name}} for name in self.workloads[place[1]]]}
        return {"items": [self.body, {"metadata": {"name": "other"}}]}

    def list_namespaced_pod(self, *place: Any, **more: Any) -> Any:
        return SimpleNamespace(items=[])

    def patch_namespaced_custom_object(self, *place: Any, **more: Any) -> None:
        if place[0] == "kueue.x-k8s.io":
            self.workloads[place[1]][place[4]] |= place[5]["spec"]
            return
        self.body["spec"] |= place[5]["spec"]

    def delete_job(self, name: str) -> None:
        raise RuntimeError("Failed to delete TrainJob") from ApiException(status=403, reason="Forbidden")


FLAKY = [ApiException(status=503), ProtocolError("reset"), ConnectionResetError("reset")]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "_LOOK_S", 0.01)


def on(monkeypatch: pytest.MonkeyPatch, backend: Backend) -> None:
    monkeypatch.setattr(jobs, "where", lambda *given, **more: ClusterJobs(backend))
    monkeypatch.setattr(view, "where", lambda *given, **more: ClusterJobs(backend))


@pytest.mark.parametrize("name", ["nosuch", "--on=kubernetes"])
def test_without_a_cluster_there_is_one_line(state: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    from kubeflow.trainer.backends.kubernetes import backend

    monkeypatch.setattr(backend.config, "load_kube_config", no_configuration)
    monkeypatch.setattr(backend.common_utils, "is_running_in_k8s", lambda: False)
    done = CliRunner().invoke(cli.app, ["progress", name] if name == "nosuch" else ["list", name])
    assert isinstance(done.exception, SystemExit), done.exception
    assert done.exit_code == (3 if name == "nosuch" else 1)
    assert "there is no cluster to look in: Invalid kube-config file" in done.output


def no_configuration(*given: Any, **more: Any) -> None:
    from kubernetes.config import ConfigException

    raise ConfigException("Invalid kube-config file. No configuration found.")


def test_whoever_waits_bears_with_a_cluster_that_is_away_for_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, Backend(*FLAKY, suspend=True))
    assert jobs.wait_for("job", "Paused", timeout_s=10).state == "Paused"
    on(monkeypatch, Backend(*FLAKY, suspend=True))
    assert view.watch("job", every_s=0.01).state == "Paused"
    monkeypatch.setattr(jobs, "_PATIENCE_S", 0.0)
    on(monkeypatch, Backend(*FLAKY))
    with pytest.raises(jobs.UnreachableError, match=r"refused: 503|does not answer"):
        jobs.wait_for("job", timeout_s=10)


def test_watching_ends_in_time_while_the_cluster_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Backend()
    on(monkeypatch, backend)
    jobs_of = ClusterJobs(backend)

    def look() -> Progress:
        seen = jobs_of.progress("job")
        backend.answers = [ProtocolError("reset")] * 1000
        return seen

    began = time.monotonic()
    assert view.follow(look, 0.01, timeout_s=0.2).state == "Created", "what was seen last"
    with pytest.raises(TimeoutError, match="out of reach after"):
        view.watch("job", every_s=0.01, timeout_s=0.2)
    assert time.monotonic() - began < 10


def test_what_is_refused_for_good_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, Backend(ApiException(status=403, reason="Forbidden")))
    with pytest.raises(HoldfastError, match="refused: 403 Forbidden"):
        jobs.wait_for("job", timeout_s=10)
    with pytest.raises(HoldfastError, match="Failed to delete TrainJob: 403 Forbidden"):
        ClusterJobs(Backend()).delete("job")
    with pytest.raises(JobNotFoundError):
        ClusterJobs(Backend(ApiException(status=404))).progress("job")


def test_a_page_and_a_panel_outlive_a_bad_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    with Page(ClusterJobs(Backend(ProtocolError("reset")))) as page:
        assert "does not answer" in page.content()
        assert "does not answer" not in page.content()
    backend = Backend()
    on(monkeypatch, backend)
    panel = Panel("job", every_s=0.02)
    assert ">Created<" in panel.view.value
    backend.answers = [*FLAKY] * 20

    def until(what: Callable[[], bool]) -> None:
        limit = time.monotonic() + 10
        while not what():
            assert time.monotonic() < limit, (panel.message.value, panel.view.value)
            time.sleep(0.005)

    until(lambda: "refused: 503" in panel.message.value or "does not answer" in panel.message.value)
    assert panel.resume.disabled
    backend.answers, backend.body["spec"]["suspend"] = [], True
    until(lambda: not panel.message.value and ">Paused<" in panel.view.value and not panel.resume.disabled)
    panel.close()


def test_a_job_that_has_not_begun_offers_no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, Backend())
    panel = Panel("job", every_s=60)
    panel.close()
    assert panel.pause.disabled
    with Page(ClusterJobs(Backend())) as page:
        assert 'title="Save, and stop" disabled' in page.content()


def test_a_progress_that_makes_no_sense_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ('{"percentComplete": "x"}', "[1]", "{", '{"step": "many"}'):
        assert ClusterJobs(Backend(annotations={PROGRESS: text})).progress("job").file == {}
    assert Progress("job", "Running", {"percentComplete": "x", "loss": [1]}).percent is None
    assert str(Progress("job", "Running", {"percentComplete": "x"})) == "job · Running"


def test_one_bad_row_does_not_hide_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, Backend(ApiException(status=500, reason="oops")))
    done = CliRunner().invoke(cli.app, ["list", "--on", "kubernetes", "--json"])
    assert done.exit_code == 0, done.output
    assert [row["name"] for row in json.loads(done.stdout)["jobs"]] == ["other"]
    assert "job: the API server refused: 500 oops" in done.stderr


def test_the_progress_file_is_the_one_that_the_job_names() -> None:
    variable = {"name": "TRAINING_PROGRESS_FILE", "value": "/data/mine.json"}
    assert cluster._progress_file(Backend(trainer={"env": [variable]}).body) == "/data/mine.json"
    assert cluster._progress_file(Backend().body) == "/workspace/training_progress.json"


def test_a_pod_that_says_nothing_is_not_waited_for_longer_than_all_of_them_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    closed: list[bool] = []
    silent = SimpleNamespace(
        is_open=lambda: True,
        update=lambda timeout: time.sleep(0.01),
        peek_stdout=lambda: "x",
        read_stdout=lambda timeout: "x",
        close=lambda: closed.append(True),
    )
    monkeypatch.setattr(cluster, "stream", lambda *given, **more: silent)
    monkeypatch.setattr(cluster, "_TIMEOUT_S", 0.2)
    backend = SimpleNamespace(
        custom_api=None, core_api=SimpleNamespace(connect_get_namespaced_pod_exec=None), namespace="x"
    )
    pod = SimpleNamespace(status=SimpleNamespace(phase="Running"), metadata=SimpleNamespace(name="pod"))
    began = time.monotonic()
    assert ClusterJobs(backend)._first([pod] * 20, ["cat"]) is None
    assert time.monotonic() - began < 20
    assert closed == [True]


def test_a_newest_checkpoint_of_any_name_is_shown() -> None:
    for name, step in (("checkpoint-12", 12), ("my-model", None)):
        text = json.dumps({"step": 12, "checkpointing": {"enabled": True, "latestCheckpoint": f"/claim/x/{name}"}})
        [row] = ClusterJobs(Backend(annotations={PROGRESS: text})).checkpoints("job")
        assert (row["name"], row["step"]) == (name, step)


def test_a_pause_waits_as_long_as_the_job_may_take_or_as_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []

    def wait(found: Any, name: str, there: Any, timeout_s: float) -> Progress:
        waited.append(timeout_s)
        return Progress(name, "Paused")

    monkeypatch.setattr(jobs, "_wait", wait)
    for given in (None, 0, 7):
        jobs.paused(ClusterJobs(Backend()), "job", given)
    assert waited == [90 + 120, 0, 7]
    on(monkeypatch, Backend())
    CliRunner().invoke(cli.app, ["pause", "job"])
    assert waited[-1] == 210


def test_a_job_without_checkpoints_is_not_paused() -> None:
    backend = Backend(annotations={CHECKPOINTING: "false"})
    with pytest.raises(HoldfastError, match="submitted without checkpoints"):
        ClusterJobs(backend).pause("job")
    assert "suspend" not in backend.body["spec"]


@pytest.mark.parametrize(
    ("block", "env", "in_pod", "words"),
    [
        (None, {}, {}, "neither spec.checkpointing nor HOLDFAST_ENABLED=1, and would begin anew"),
        (None, {"HOLDFAST_ENABLED": "false"}, {}, "HOLDFAST_ENABLED=false switches checkpoints off"),
        (None, {"HOLDFAST_ENABLED": "1", "CHECKPOINT_ENABLED": "0"}, {}, "CHECKPOINT_ENABLED=0 switches"),
        ("true", {"HOLDFAST_ENABLED": "0"}, {}, "HOLDFAST_ENABLED=0 switches"),
        (None, {}, {"HOLDFAST_ENABLED": "0"}, "HOLDFAST_ENABLED=0 switches"),
        (None, {"HOLDFAST_ENABLED": "1"}, {}, None),
        (None, {}, {"HOLDFAST_ENABLED": "1"}, None),
        ("true", {}, {}, None),
    ],
)
def test_a_job_that_would_lose_its_work_is_not_paused(
    block: str | None, env: dict[str, str], in_pod: dict[str, str], words: str | None
) -> None:
    backend = Backend(trainer={"env": [{"name": name, "value": value} for name, value in env.items()]})
    backend.body["metadata"]["annotations"] = {CHECKPOINTING: block} if block else {}
    variables = [SimpleNamespace(name=name, value=value) for name, value in in_pod.items()]
    pod = SimpleNamespace(
        status=SimpleNamespace(phase="Running"),
        metadata=SimpleNamespace(labels={}, deletion_timestamp=None),
        spec=SimpleNamespace(containers=[SimpleNamespace(name="node", env=variables)]),
    )
    backend.list_namespaced_pod = lambda *place, **more: SimpleNamespace(items=[pod])
    if words is None:
        ClusterJobs(backend).pause("job")
    else:
        with pytest.raises(HoldfastError, match=words):
            ClusterJobs(backend).pause("job")
    assert backend.body["spec"].get("suspend", False) is (words is None)


def test_a_job_that_has_failed_is_not_resumed() -> None:
    backend = Backend(suspend=True)
    backend.body["status"] = {"conditions": [{"type": "Failed", "status": "True"}]}
    with pytest.raises(HoldfastError, match="'job' has failed, and a TrainJob does not start again"):
        ClusterJobs(backend).resume("job")
    assert backend.body["spec"]["suspend"] is True
    backend.body["status"] = {}
    ClusterJobs(backend).resume("job")
    assert backend.body["spec"]["suspend"] is False


def test_watching_for_a_program_is_one_json_value(monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, Backend(suspend=True))
    done = CliRunner().invoke(cli.app, ["progress", "job", "--watch", "--json"])
    assert json.loads(done.stdout)["state"] == "Paused"


@pytest.mark.parametrize("version", ["v1beta2", "v1beta1"])
def test_a_job_of_a_queue_is_paused_by_asking_kueue(version: str) -> None:
    backend = Backend(trainer={"env": [{"name": "HOLDFAST_ENABLED", "value": "1"}]})
    backend.body["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "training"}
    backend.workloads = {version: {"trainjob-job": {}}}
    ClusterJobs(backend).pause("job")
    assert backend.workloads[version] == {"trainjob-job": {"active": False}}
    ClusterJobs(backend).resume("job")
    assert backend.workloads[version] == {"trainjob-job": {"active": True}}
    assert "suspend" not in backend.body["spec"]


@pytest.mark.parametrize("workloads", [{}, {"v1beta2": {}}], ids=["no Kueue", "not one of Kueue's"])
def test_a_job_of_a_queue_that_kueue_does_not_know_is_suspended(workloads: dict[str, Any]) -> None:
    backend = Backend()
    backend.body["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "training"}
    backend.workloads = workloads
    ClusterJobs(backend).pause("job")
    assert backend.body["spec"] == {"suspend": True}


def test_a_pause_waits_for_what_the_pods_said_last() -> None:
    """The operator writes it down a moment after they are gone."""
    backend, looks = Backend(suspend=True), []
    old = {"phase": "Suspended", "step": 130, "checkpointing": {"latestCheckpoint": "/claim/x/checkpoint-100"}}
    new = {"phase": "Suspended", "step": 137, "checkpointing": {"latestCheckpoint": "/claim/x/checkpoint-137"}}

    def get(*place: Any, **more: Any) -> dict[str, Any]:
        looks.append(1)
        return {**backend.body, "status": {"trainingProgress": old if len(looks) < 6 else new}}

    backend.get_namespaced_custom_object = get  # type: ignore[method-assign]
    assert jobs.paused(ClusterJobs(backend), "job", 10).latest_checkpoint == "/claim/x/checkpoint-137"


def test_a_pause_does_not_wait_for_an_operator_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "_LAST_WORDS_S", 0.05)
    backend = Backend(suspend=True)
    backend.body["status"] = {"trainingProgress": {"phase": "Running", "step": 7}}
    assert jobs.paused(ClusterJobs(backend), "job", 10).state == "Paused"


def test_a_wait_for_what_will_not_come_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Backend()
    conditions = [{"type": "Complete", "status": "True"}]
    backend.body["status"] = {"conditions": conditions, "trainingProgress": {"step": 100}}
    on(monkeypatch, backend)
    with pytest.raises(RuntimeError, match="the job job is complete at step 100: it will not come to step 101"):
        jobs.wait_for("job", step=101)
    with pytest.raises(RuntimeError, match="it will not come to Paused"):
        jobs.wait_for("job", "Paused")
    assert jobs.wait_for("job", step=100).step == 100


@pytest.mark.parametrize("options", [["--on", "local", "-n", "x"]])
@pytest.mark.parametrize("command", ["list", "page"])
def test_local_jobs_have_no_namespace(command: str, options: list[str]) -> None:
    done = CliRunner().invoke(cli.app, [command, *options])
    assert done.exit_code == 2
    assert "--namespace means something only for jobs of a cluster" in done.stderr


def test_the_checkpoints_of_an_object_store_need_nothing_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without obstore, what the progress says of the newest."""
    block = json.dumps({"storage": {"uri": "s3://bucket/x"}})
    backend = Backend(annotations={CHECKPOINTING: block})
    newest = {"latestCheckpoint": "s3://bucket/x/checkpoint-5"}
    backend.body["status"] = {"trainingProgress": {"step": 5, "checkpointing": newest}}

    def missing(location: str) -> Any:
        raise MissingExtraError("obstore", "s3", "for s3://")

    monkeypatch.setattr(cluster, "open_backend", missing)
    assert [row["name"] for row in ClusterJobs(backend).checkpoints("job")] == ["checkpoint-5"]
