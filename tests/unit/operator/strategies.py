"""Jobs of every kind that a user may write, for Hypothesis."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from holdfast.operator.admission import jobset, trainjob
from tests.unit.operator.objects import ASKS, FROM_TRAINJOB, FULL, job, job_set, train_job

UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=100)


NAMES = st.sampled_from(["A", "B", "HOLDFAST_ENABLED", "CHECKPOINT_URI", "TRAINING_PROGRESS_FILE", "HOLDFAST_RUN_ID"])


VARIABLE = st.one_of(
    st.fixed_dictionaries({"name": NAMES, "value": st.sampled_from(["", "1", "0"])}),
    st.fixed_dictionaries({"name": NAMES, "valueFrom": st.just({"secretKeyRef": {"name": "s", "key": "k"}})}),
    st.fixed_dictionaries({"name": NAMES}),
)


ENV = st.lists(VARIABLE, max_size=4, unique_by=lambda one: one["name"])


TOLERATIONS = st.lists(
    st.sampled_from(
        [
            {"key": "nvidia.com/gpu", "operator": "Exists"},
            {"operator": "Exists"},
            {"key": "node.kubernetes.io/unreachable", "operator": "Exists", "effect": "NoExecute"},
        ]
    ),
    max_size=3,
)


RULES = st.lists(
    st.sampled_from(
        [
            {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [42]}},
            {"action": "Ignore", "onPodConditions": [{"type": "ConfigIssue", "status": "True"}]},
        ]
    ),
    max_size=2,
)


@st.composite
def pod_templates(draw: st.DrawFn) -> dict[str, Any]:
    container: dict[str, Any] = {"name": draw(st.sampled_from(["node", "train"])), "image": "x"}
    if env := draw(ENV):
        container["env"] = env
    if draw(st.booleans()):
        container["volumeMounts"] = [{"name": "data", "mountPath": draw(st.sampled_from(["/data", "/first"]))}]
    pod: dict[str, Any] = {"containers": [container, {"name": "side", "image": "y"}]}
    if draw(st.booleans()):
        pod["volumes"] = [{"name": "data", "emptyDir": {}}]
    if tolerations := draw(TOLERATIONS):
        pod["tolerations"] = tolerations
    if draw(st.booleans()):
        pod["terminationGracePeriodSeconds"] = draw(st.sampled_from([120, 600]))
    template: dict[str, Any] = {"spec": pod}
    if draw(st.booleans()):
        template["metadata"] = {"labels": {"team": "x"}}
    return template


@st.composite
def train_jobs(draw: st.DrawFn) -> dict[str, Any]:
    spec: dict[str, Any] = {}
    if draw(st.booleans()):
        spec["trainer"] = {"numNodes": 2, "env": draw(ENV)}
    if draw(st.booleans()):
        spec["runtimePatches"] = [{"manager": "mine", "trainingRuntimeSpec": {"template": {}}}]
    asks = {key: value for key, value in FULL.items() if draw(st.booleans())}
    return train_job(asks, **spec)


@st.composite
def job_sets(draw: st.DrawFn) -> dict[str, Any]:
    thing = job_set(draw(st.sampled_from([ASKS, FROM_TRAINJOB])), names=("node", "other"))
    for one in thing["spec"]["replicatedJobs"]:
        one["template"]["spec"]["template"] = draw(pod_templates())
        if rules := draw(RULES):
            one["template"]["spec"]["podFailurePolicy"] = {"rules": rules}
    if draw(st.booleans()):
        mine = {"name": "mine", "action": "FailJobSet", "onJobFailureReasons": ["DeadlineExceeded"]}
        thing["spec"]["failurePolicy"] = {"maxRestarts": draw(st.integers(0, 9)), "rules": [mine]}
    return thing


@st.composite
def jobs(draw: st.DrawFn) -> dict[str, Any]:
    thing = job(ASKS, backoffLimit=draw(st.integers(0, 6)))
    thing["spec"]["template"] = draw(pod_templates())
    if rules := draw(RULES):
        thing["spec"]["podFailurePolicy"] = {"rules": rules}
    return thing


CHANGED = st.one_of(
    train_jobs().map(lambda thing: (trainjob.secured, thing)),
    job_sets().map(lambda thing: (jobset.secured_jobset, thing)),
    jobs().map(lambda thing: (jobset.secured_job, thing)),
)

TREES = st.recursive(
    st.booleans() | st.integers(2, 9) | st.text(max_size=3) | st.lists(st.integers(2, 9), max_size=2),
    lambda inner: st.dictionaries(st.sampled_from("abc/~"), inner, min_size=1, max_size=3),
    max_leaves=10,
)


OBJECTS = st.dictionaries(st.sampled_from("abc/~"), TREES, max_size=4)
