"""What is wrong with a trainer is said before anything is submitted; what is right becomes variables and a block."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kubeflow.trainer import CustomTrainer
from kubernetes.client import ApiException

from holdfast.errors import ConfigError
from holdfast.kubeflow import PeriodicCheckpointConfig, TransformersTrainer, carried
from holdfast.kubeflow.payload import carried_by
from holdfast.kubeflow.records import LIST
from holdfast.kubeflow.submit import SDK_MANAGER, check, completed, submit
from holdfast.operator.admission.trainjob import secured
from holdfast.operator.names import CHECKPOINTING, MANAGER


def train():
    pass


def counts(to):
    print(to)


def make(**given: Any) -> TransformersTrainer:
    return TransformersTrainer(func=train, **given)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"output_dir": "ftp://x/y"}, ["output_dir", "'ftp://x/y'", "scheme 'ftp'", "pvc://<claim>/<path>"]),
        ({"output_dir": "pvc://"}, ["output_dir", "names no claim"]),
        ({"output_dir": "pvc:///path"}, ["names no claim"]),
        ({"output_dir": "pvc://Upper_Case/path"}, ["names no claim"]),
        ({"output_dir": "pvc://claim/../etc"}, ["leaves the claim"]),
        ({"output_dir": "s3:///prefix"}, ["names no bucket"]),
        ({"output_dir": "s3://key:secret@bucket/x"}, ["credentials", "secret_name"]),
        ({"output_dir": ""}, ["output_dir", "''"]),
        ({"output_dir": 3}, ["output_dir", "3"]),
        ({"output_dir": "a\nb"}, ["output_dir"]),
        ({"enable_jit_checkpoint": True}, ["output_dir: is missing", "enable_jit_checkpoint"]),
        ({"enable_jit_checkpoint": "yes"}, ["enable_jit_checkpoint", "'yes'", "True or False"]),
        ({"num_nodes": 0}, ["num_nodes", "0", "1 or more"]),
        ({"num_nodes": True}, ["num_nodes"]),
        ({"grace_period_seconds": 3}, ["grace_period_seconds", "3", "5 or more"]),
        ({"grace_period_seconds": "60"}, ["grace_period_seconds", "'60'"]),
        ({"secret_name": "s"}, ["secret_name", "'s'", "object store"]),
        ({"secret_name": "s", "output_dir": "pvc://c/p"}, ["secret_name"]),
        ({"secret_name": "", "output_dir": "s3://b/x"}, ["secret_name: ''", "name of a secret"]),
        ({"secret_name": 3, "output_dir": "s3://b/x"}, ["secret_name: 3", "name of a secret"]),
        ({"output_dir": "s3:/b/x"}, ["output_dir: 's3:/b/x'", "lacks '//'", "s3://<bucket>/<prefix>"]),
        ({"output_dir": "pvc:/c/x"}, ["output_dir: 'pvc:/c/x'", "lacks '//'", "pvc://<claim>/<path>"]),
        ({"output_dir": "s3:b/x"}, ["lacks '//'"]),
        (
            {"output_dir": "/x", "env": {"HOLDFAST_ENABLED": "false"}},
            ["env['HOLDFAST_ENABLED']: 'false' contradicts enable_jit_checkpoint=True"],
        ),
        (
            {"output_dir": "/x", "env": {"CHECKPOINT_ENABLED": "0"}},
            ["env['CHECKPOINT_ENABLED']: '0' contradicts enable_jit_checkpoint=True"],
        ),
        ({"env": {"CHECKPOINT_ENABLED": "maybe"}}, ["env['CHECKPOINT_ENABLED']: 'maybe'", "0/false/no/off"]),
        (
            {"output_dir": "/x", "env": {"HOLDFAST_GRACE_PERIOD": "600"}},
            ["env['HOLDFAST_GRACE_PERIOD']: '600'", "grace_period_seconds, which is 60", "SIGKILL"],
        ),
        ({"env": {"HOLDFAST_GRACE_PERIOD": "long"}}, ["env['HOLDFAST_GRACE_PERIOD']: 'long' is not accepted"]),
        ({"env": {"A": 1}}, ["env['A']", "texts"]),
        ({"env": ["A=1"]}, ["env: ['A=1'] is not accepted", "dictionary"]),
        ({"env": {"A B": "1"}}, ["env: 'A B' is not accepted", "name of a variable"]),
        ({"env": {"": "1"}}, ["env: '' is not accepted"]),
        ({"env": {"HOLDFAST_SAVE_EVERY": "often"}}, ["env['HOLDFAST_SAVE_EVERY']: 'often' is not accepted"]),
        ({"env": {"HOLDFAST_KILL_WAIT": "soon"}}, ["env['HOLDFAST_KILL_WAIT']: 'soon' is not accepted"]),
        ({"env": {"HOLDFAST_KILL_WAIT": "60"}}, ["env['HOLDFAST_KILL_WAIT']: '60' leaves no time", "which is 60"]),
        ({"env": {"HOLDFAST_TRAINER_ARGUMENTS": "{"}}, ["env['HOLDFAST_TRAINER_ARGUMENTS']: '{' is not accepted"]),
        ({"env": {"CHECKPOINT_STRATEGY": "steps"}}, ["env: CHECKPOINT_STRATEGY", "CHECKPOINT_INTERVAL"]),
        ({"image": 3}, ["image: 3", "container image"]),
        ({"resources_per_node": "2"}, ["resources_per_node: '2'"]),
        ({"resources_per_node": {"gpu": -1}}, ["resources_per_node['gpu']: -1", "'16Gi'"]),
        ({"resources_per_node": {"memory": "much"}}, ["resources_per_node['memory']: 'much'"]),
        ({"packages_to_install": [""]}, ["packages_to_install: ['']", "list of texts"]),
        ({"packages_to_install": ["xxhash"], "pip_index_urls": []}, ["pip_index_urls: is empty"]),
        ({"output_dir": "pvc://c/$(X)/y"}, ["output_dir: 'pvc://c/$(X)/y'", "$("]),
        ({"env": {"CHECKPOINT_URI": "/x"}, "output_dir": "/y"}, ["CHECKPOINT_URI", "output_dir"]),
        ({"periodic_checkpoint_config": {"save_steps": 3}}, ["PeriodicCheckpointConfig"]),
        ({"packages_to_install": "xxhash"}, ["packages_to_install", "'xxhash'", "list of texts"]),
        ({"pip_index_urls": [3]}, ["pip_index_urls", "list of texts"]),
        (
            {"output_dir": "s3://b/x", "enable_jit_checkpoint": False},
            ["output_dir", "'s3://b/x'", "enable_jit_checkpoint=False", "pvc://<claim>/<path> or a path"],
        ),
        ({"save_final_model": True}, ["save_final_model", "enable_jit_checkpoint=True"]),
    ],
    ids=lambda value: None if isinstance(value, list) else json.dumps(value, default=str).replace("/", "|"),
)
def test_wrong_arguments_are_refused_by_name(given: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        make(**given)
    for word in words:
        assert word in str(caught.value)
    assert "secret@" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"save_strategy": "best"}, "save_strategy: 'best' is not accepted; it must be one of steps, epoch, no"),
        ({"save_strategy": "steps"}, "save_steps: is missing"),
        ({"save_strategy": "epoch", "save_steps": 5}, 'save_steps: 5 means something only with save_strategy="steps"'),
        ({"save_strategy": "steps", "save_steps": 0}, "save_steps: 0 is not accepted"),
        ({"save_strategy": "steps", "save_steps": 1.5}, "save_steps: 1.5 is not accepted"),
        ({"save_total_limit": 0}, "save_total_limit: 0 is not accepted; it must be a whole number, 1 or more"),
    ],
    ids=["strategy", "missing", "without", "zero", "float", "limit"],
)
def test_a_wrong_periodic_config_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        PeriodicCheckpointConfig(**given)
    assert words in str(caught.value)


@pytest.mark.parametrize("amount", [4, 0.5, "500m", "16Gi", "1e3", "10G"])
def test_amounts_as_kubernetes_writes_them_are_accepted(amount: Any) -> None:
    assert make(resources_per_node={"cpu": amount}).resources_per_node == {"cpu": amount}


def test_variables_that_agree_with_the_arguments_stay() -> None:
    env = {"HOLDFAST_ENABLED": "1", "HOLDFAST_GRACE_PERIOD": "30"}
    assert make(output_dir="/x", env=env).env["HOLDFAST_GRACE_PERIOD"] == "30"
    assert make(env={"CHECKPOINT_ENABLED": "0"}).env["CHECKPOINT_ENABLED"] == "0"
    env = {"HOLDFAST_GRACE_PERIOD": "600"}
    assert make(output_dir="/x", env=env, grace_period_seconds=600).env["HOLDFAST_GRACE_PERIOD"] == "600"
    without = make(output_dir="/x", enable_jit_checkpoint=False)
    assert "CHECKPOINT_ENABLED" not in dataclasses.replace(without, enable_jit_checkpoint=True).env


def test_a_relative_folder_is_one_of_where_the_trainer_was_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    trainer = make(output_dir="out")
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    assert trainer.output is not None
    assert trainer.output.location() == str(tmp_path / "out")
    assert json.loads(trainer.env["HOLDFAST_TRAINER_ARGUMENTS"])["output_dir"] == str(tmp_path / "out")


def test_it_is_a_custom_trainer_and_can_be_copied() -> None:
    trainer = make(
        num_nodes=2,
        resources_per_node={"cpu": 1},
        output_dir="pvc://claim/a/b/",
        periodic_checkpoint_config=PeriodicCheckpointConfig(save_strategy="steps", save_steps=7, save_total_limit=2),
        env={"MINE": "1"},
    )
    assert isinstance(trainer, CustomTrainer)
    assert trainer.enable_jit_checkpoint is True
    assert json.loads(trainer.env["HOLDFAST_TRAINER_ARGUMENTS"]) == {
        "save_strategy": "steps",
        "save_steps": 7,
        "save_total_limit": 2,
        "output_dir": "/mnt/kubeflow-checkpoints/a/b",
    }
    assert trainer.env["MINE"] == "1"
    assert trainer.env["HOLDFAST_ENABLED"] == "1"
    again = dataclasses.replace(trainer, num_nodes=3)
    assert (again.num_nodes, again.func, again.env) == (3, trainer.func, trainer.env)


def test_a_copy_with_other_arguments_has_their_variables_and_no_others() -> None:
    first = PeriodicCheckpointConfig(save_strategy="epoch")
    trainer = TransformersTrainer(
        func=counts, func_args={"to": 1}, output_dir="/x", periodic_checkpoint_config=first, env={"MINE": "1"}
    )
    second = PeriodicCheckpointConfig(save_strategy="steps", save_steps=7)
    again = dataclasses.replace(
        trainer, func_args={"to": 2}, periodic_checkpoint_config=second, output_dir="/y", save_final_model=False
    )
    expected = TransformersTrainer(
        func=counts,
        func_args={"to": 2},
        output_dir="/y",
        periodic_checkpoint_config=second,
        save_final_model=False,
        env={"MINE": "1"},
    )
    assert again.env == expected.env
    assert carried_by(again.func) == carried_by(expected.func)
    assert carried_by(again.func)[2] == {"to": 2}
    assert dataclasses.replace(again, env={**again.env, "MORE": "2"}).env == {**expected.env, "MORE": "2"}
    with pytest.raises(ConfigError, match="func_args: counts"):
        dataclasses.replace(trainer, func_args={"unknown": 2})


def test_what_is_asked_for_is_there_with_everything_else_off() -> None:
    off = {"enable_jit_checkpoint": False, "enable_progression_tracking": False}
    made = make(output_dir="/x", periodic_checkpoint_config=PeriodicCheckpointConfig(save_strategy="epoch"), **off)
    assert json.loads(made.env.pop("HOLDFAST_TRAINER_ARGUMENTS")) == {"save_strategy": "epoch", "output_dir": "/x"}
    assert made.env == {"HOLDFAST_ENABLED": "1", "CHECKPOINT_ENABLED": "false", "HOLDFAST_PROGRESS": "0"}
    assert make(output_dir="/x", **off).env["HOLDFAST_ENABLED"] == "1"


def test_everything_off_is_off_and_progress_alone_saves_nothing() -> None:
    assert make(enable_progression_tracking=False).env == {"HOLDFAST_ENABLED": "0"}
    alone = make().env
    assert alone == {"HOLDFAST_ENABLED": "1", "CHECKPOINT_ENABLED": "false"}
    quiet = make(output_dir="/x", enable_progression_tracking=False).env
    assert quiet["HOLDFAST_PROGRESS"] == "0"
    assert "CHECKPOINT_ENABLED" not in quiet


def body(**metadata: Any) -> dict[str, Any]:
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": "job", **metadata},
        "spec": {
            "runtimeRef": {"name": "torch"},
            "trainer": {"env": [{"name": "PYTHONPATH", "value": "/mine"}]},
            "runtimePatches": [{"manager": "trainer.kubeflow.org/kubeflow-sdk", "trainingRuntimeSpec": {}}],
        },
    }


def environment(made: dict[str, Any]) -> dict[str, Any]:
    return {variable["name"]: variable for variable in made["spec"]["trainer"]["env"]}


def patch(made: dict[str, Any], manager: str) -> dict[str, Any]:
    found = [one for one in made["spec"]["runtimePatches"] if one["manager"] == manager]
    assert len(found) == 1
    pod = found[0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]
    return pod["template"]["spec"]  # type: ignore[no-any-return]


def test_a_job_gets_its_claim_its_grace_period_and_its_variables_without_an_operator() -> None:
    made = completed(body(), make(output_dir="pvc://claim/a", grace_period_seconds=90), carries="job-holdfast-1")
    ours = patch(made, MANAGER)
    assert ours["volumes"] == [{"name": "holdfast-checkpoints", "persistentVolumeClaim": {"claimName": "claim"}}]
    assert ours["containers"][0]["volumeMounts"][0]["mountPath"] == "/mnt/kubeflow-checkpoints"
    sdk = patch(made, SDK_MANAGER)
    assert sdk["terminationGracePeriodSeconds"] == 90
    assert sdk["volumes"][0]["configMap"]["name"] == "job-holdfast-1"
    variables = environment(made)
    assert variables["CHECKPOINT_URI"]["value"] == "/mnt/kubeflow-checkpoints/a"
    assert variables["HOLDFAST_GRACE_PERIOD"]["value"] == "88"
    assert variables["PYTHONPATH"]["value"] == "/mine:/opt/holdfast-carried/holdfast.zip"
    assert len(made["spec"]["runtimePatches"]) == 3, "what the user gave stays"


def test_the_operator_changes_nothing_that_was_sent() -> None:
    """It does the same again: its own patch is replaced by an equal one, and that of the SDK stays."""
    made = completed(body(), make(output_dir="pvc://claim/a"), carries="job-holdfast-1")
    assert sorted(secured(made)["spec"]["runtimePatches"], key=str) == sorted(made["spec"]["runtimePatches"], key=str)
    assert secured(made)["spec"]["trainer"] == made["spec"]["trainer"]
    assert json.loads(made["metadata"]["annotations"][CHECKPOINTING])["storage"]["persistentVolume"] == {
        "claimName": "claim",
        "mountPath": "/mnt/kubeflow-checkpoints",
    }


def test_a_secret_is_taken_variable_by_variable_and_a_queue_gets_no_grace_period() -> None:
    trainer = make(output_dir="s3://bucket/prefix", secret_name="keys")
    keys = ["AWS_SECRET_ACCESS_KEY"]
    made = completed(body(labels={"kueue.x-k8s.io/queue-name": "q"}), trainer, carries=None, keys=keys)
    source = environment(made)["AWS_SECRET_ACCESS_KEY"]["valueFrom"]["secretKeyRef"]
    assert source == {"name": "keys", "key": "AWS_SECRET_ACCESS_KEY", "optional": True}
    assert environment(made)["CHECKPOINT_URI"]["value"] == "s3://bucket/prefix"
    assert not [one for one in made["spec"]["runtimePatches"] if one["manager"] == SDK_MANAGER]


@pytest.mark.parametrize(
    ("secret", "expected"),
    [
        (SimpleNamespace(data={"AWS_CA_BUNDLE": "", "ca.crt": "", "MINE": ""}), {"AWS_CA_BUNDLE", "MINE"}),
        (SimpleNamespace(data=None), set()),
        (ApiException(status=403), {"AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AZURE_STORAGE_ENDPOINT"}),
    ],
    ids=["seen", "empty", "hidden"],
)
def test_all_of_a_secret_becomes_variables(secret: Any, expected: set[str]) -> None:
    def read(*given: Any, **more: Any) -> Any:
        if isinstance(secret, Exception):
            raise secret
        return secret

    backend = SimpleNamespace(namespace="default", core_api=SimpleNamespace(read_namespaced_secret=read))
    trainer = make(output_dir="s3://bucket/prefix", secret_name="keys")
    keys = set(check(backend, trainer))
    assert keys >= expected if isinstance(secret, Exception) else keys == expected
    assert expected <= environment(completed(body(), trainer, carries=None, keys=sorted(keys))).keys()


def expanded(value: str, known: dict[str, str]) -> str:
    """As Kubernetes does it (``third_party/forked/golang/expansion``)."""
    done, rest = "", value
    while rest:
        if rest[0] != "$" or len(rest) == 1:
            done, rest = done + rest[0], rest[1:]
        elif rest[1] == "$":
            done, rest = done + "$", rest[2:]
        elif rest[1] == "(" and ")" in rest:
            name, _, rest = rest[2:].partition(")")
            done += known.get(name, f"$({name})")
        else:
            done, rest = done + rest[:2], rest[2:]
    return done


@pytest.mark.parametrize(
    "value", ["$(MINE)", "$$(MINE)", "$$$(MINE)", "a$$b", "$$", "$", "$x", "$(", "$((1+1))", "$(NONE)", "$x$(MINE)$"]
)
def test_a_value_with_dollars_arrives_as_it_was_given(value: str) -> None:
    sent = body()
    sent["spec"]["trainer"]["env"] += [{"name": "MINE", "value": "x"}, {"name": "GIVEN", "value": value}]
    made = environment(completed(sent, make(output_dir="/x"), carries=None))
    assert expanded(made["GIVEN"]["value"], {"MINE": "x"}) == value


class Cluster:
    """As much of two APIs as a submission needs."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.custom_api = self.core_api = self
        self.namespace = "default"
        self.error = error
        self.maps: dict[str, dict[str, Any]] = {}
        self.jobs: list[dict[str, Any]] = []

    def create_namespaced_config_map(self, namespace: str, body: dict[str, Any]) -> None:
        assert body["metadata"]["name"] not in self.maps
        self.maps[body["metadata"]["name"]] = body["metadata"]

    def patch_namespaced_config_map(self, name: str, namespace: str, body: dict[str, Any]) -> None:
        self.maps[name] |= body["metadata"]

    def delete_namespaced_config_map(self, name: str, namespace: str) -> None:
        del self.maps[name]

    def get_cluster_custom_object(self, group: str, version: str, plural: str, name: str, **more: Any) -> Any:
        assert (plural, name) == ("clustertrainingruntimes", "torch")
        container = {"name": "node", "env": [{"name": "PYTHONPATH", "value": "/of/the/runtime"}]}
        jobs = [{"name": "node", "template": {"spec": {"template": {"spec": {"containers": [container]}}}}}]
        return {"spec": {"template": {"spec": {"replicatedJobs": jobs}}}}

    def create_namespaced_custom_object(self, *place: str, **more: Any) -> Any:
        if self.error is not None:
            raise self.error
        body: Any = place[4]
        self.jobs.append({**body, "metadata": {**body["metadata"], "uid": f"uid-{len(self.jobs)}"}})
        return self.jobs[-1]


def submitted(cluster: Cluster, sent: dict[str, Any]) -> None:
    def train(backend: Any, runtime: Any, trainer: Any) -> str:
        place = ("trainer.kubeflow.org", "v1alpha1", "default", "trainjobs")
        backend.custom_api.create_namespaced_custom_object(*place, sent)
        return "job"

    submit(cluster, train, None, make(), None)


def test_each_submission_carries_a_config_map_of_its_own() -> None:
    cluster = Cluster()
    submitted(cluster, body())
    submitted(cluster, body())
    assert len(cluster.maps) == 2
    for number, job in enumerate(cluster.jobs):
        name = patch(job, SDK_MANAGER)["volumes"][0]["configMap"]["name"]
        assert cluster.maps[name]["ownerReferences"][0]["uid"] == f"uid-{number}"


@pytest.mark.parametrize("error", [ApiException(status=409), ConnectionError("reset"), KeyboardInterrupt()], ids=repr)
def test_a_submission_that_fails_leaves_no_config_map(error: BaseException) -> None:
    cluster = Cluster(error)
    with pytest.raises(type(error)):
        submitted(cluster, body())
    assert cluster.maps == {}


def test_the_path_of_the_runtime_stays_where_the_job_gives_none() -> None:
    cluster, plain = Cluster(), body()
    plain["spec"]["trainer"]["env"] = []
    submitted(cluster, plain)
    submitted(cluster, body())
    zipped = "/opt/holdfast-carried/holdfast.zip"
    values = [environment(job)["PYTHONPATH"]["value"] for job in cluster.jobs]
    assert values == [f"/of/the/runtime:{zipped}", f"/mine:{zipped}"]


def test_containers_of_this_machine_are_refused() -> None:
    from kubeflow.trainer.backends.container.backend import ContainerBackend

    trainer = make()
    with pytest.raises(ConfigError, match="ContainerBackendConfig is not accepted"):
        ContainerBackend.train(object(), trainer=trainer)


# ---------------------------------------------------------------------- images without holdfast


def run_python(
    tmp_path: Path, code: str, *, without: bool, xxhash: bool = True, **more: str
) -> subprocess.CompletedProcess[str]:
    """A Python whose path ends with the carried copy; ``without``: it has no holdfast of its own."""
    archive = tmp_path / carried.FILE
    archive.write_bytes(carried.archive())
    path = [str(archive)]
    if without:
        import xxhash as package

        site = Path(package.__file__).parent
        clean = tmp_path / "site"
        clean.mkdir(exist_ok=True)
        if xxhash and not (clean / "xxhash").exists():
            os.symlink(site, clean / "xxhash")
        path.append(str(clean))
        python = [os.path.realpath(sys.executable), "-s"]
    else:
        python = [sys.executable]
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": ":".join(path), "HOLDFAST_ENABLED": "1", **more}
    return subprocess.run(
        [*python, "-c", code], env=environment, capture_output=True, text=True, timeout=60, check=False
    )


_WHERE = "import holdfast, _holdfast_startup as s, sys; print(holdfast.__file__, s.started, s.Finder in sys.meta_path)"


def test_the_carried_copy_starts_where_there_is_no_other(tmp_path: Path) -> None:
    done = run_python(tmp_path, _WHERE, without=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[0].startswith(str(tmp_path / carried.FILE))
    assert done.stdout.split()[1:] == ["True", "True"]


def test_the_carried_copy_tells_the_checkpoints_of_a_claim(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for step in (3, 12):
        (run / f"checkpoint-{step}").mkdir(parents=True)
        (run / f"checkpoint-{step}" / "model.safetensors").write_bytes(b"x")
    code = f"import sys; sys.modules['typer'] = None; sys.argv = ['-c', {str(run)!r}]; {LIST}"
    done = run_python(tmp_path, code, without=True)
    assert [row["name"] for row in json.loads(done.stdout)] == ["checkpoint-12", "checkpoint-3"], done.stderr


def test_an_installed_holdfast_wins_over_the_carried_one(tmp_path: Path) -> None:
    done = run_python(tmp_path, _WHERE, without=False)
    assert done.returncode == 0, done.stderr
    assert carried.FILE not in done.stdout.split()[0]
    assert done.stdout.split()[1] == "True"


def test_without_xxhash_the_carried_copy_says_so_and_keeps_out(tmp_path: Path) -> None:
    done = run_python(
        tmp_path, "import importlib.util as u; print(u.find_spec('holdfast'))", without=True, xxhash=False
    )
    assert done.stdout.strip() == "None"
    assert "packages_to_install=['xxhash']" in done.stderr


def test_where_checkpoints_go_to_an_object_store_what_that_needs_is_named_too(tmp_path: Path) -> None:
    done = run_python(tmp_path, "print('script')", without=True, CHECKPOINT_URI="s3://bucket/x")
    assert "needs obstore" in done.stderr
    assert "packages_to_install=['obstore']" in done.stderr
    assert done.stdout == "script\n"


def test_the_start_imports_all_that_it_uses() -> None:
    with zipfile.ZipFile(io.BytesIO(carried.archive())) as file:
        source = file.read("sitecustomize.py").decode()
    for module in set(re.findall(r"importlib\.[a-z]+", source)):
        assert f"import {module}\n" in source


def test_a_sitecustomize_of_the_image_still_runs(tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text("print('of the image')\n")
    done = run_python(tmp_path, "print('script')", without=True)
    assert done.stdout.split("\n")[:2] == ["of the image", "script"], done.stderr


def test_the_carried_copy_fits_into_a_config_map_and_holds_no_more_than_it_needs() -> None:
    with zipfile.ZipFile(io.BytesIO(carried.archive())) as file:
        names = file.namelist()
    assert "holdfast/adapters/transformers/patches.py" in names
    assert not [name for name in names if "/operator/" in name or "/kubeflow/" in name]
