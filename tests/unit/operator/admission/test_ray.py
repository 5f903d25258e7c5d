"""What the operator makes of RayClusters, RayJobs and RayServices, by their annotations."""

from __future__ import annotations

import copy
import re
from typing import Any

import jsonpatch
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from holdfast.operator.admission import ray
from holdfast.operator.admission import review as admission
from holdfast.operator.names import INJECTED, RAY_ENABLED, RAY_KILL_WAIT
from holdfast.operator.spec import SpecError
from tests.unit.operator.crds import complaints, schema_of
from tests.unit.operator.objects import is_within, merged, pod_template
from tests.unit.operator.strategies import UNHURRIED

ROOTS = {"RayCluster": None, "RayJob": "rayClusterSpec", "RayService": "rayClusterConfig"}


CRD_OF = {"RayCluster": "rayclusters.ray.io", "RayJob": "rayjobs.ray.io", "RayService": "rayservices.ray.io"}


def ray_thing(kind: str, annotations: dict[str, str] | None, *pod_templates: dict[str, Any]) -> dict[str, Any]:
    head, *workers = pod_templates or (pod_template(), pod_template())
    cluster = {
        "headGroupSpec": {"rayStartParams": {}, "template": head},
        "workerGroupSpecs": [
            {"groupName": "w", "minReplicas": 1, "maxReplicas": 1, "rayStartParams": {}, "template": one}
            for one in workers
        ],
    }
    root = ROOTS[kind]
    return copy.deepcopy(
        {
            "apiVersion": "ray.io/v1",
            "kind": kind,
            "metadata": {"name": "ray", "namespace": "default", "annotations": annotations},
            "spec": cluster if root is None else {root: cluster},
        }
    )


def ray_env(template: dict[str, Any]) -> dict[str, Any]:
    return {one["name"]: one.get("value") for one in template["spec"]["containers"][0].get("env") or []}


RAY_NAMES = st.sampled_from(
    ["A", "B", ray.ENABLED_VARIABLE, ray.KILL_WAIT_VARIABLE, ray.DRAIN_VARIABLE, "HOLDFAST_GRACE_PERIOD"]
)


RAY_VARIABLE = st.one_of(
    st.fixed_dictionaries({"name": RAY_NAMES, "value": st.sampled_from(["", "true", "50", "5.0"])}),
    st.fixed_dictionaries({"name": RAY_NAMES, "valueFrom": st.just({"secretKeyRef": {"name": "s", "key": "k"}})}),
    st.fixed_dictionaries({"name": RAY_NAMES}),
)


@st.composite
def ray_templates(draw: st.DrawFn) -> dict[str, Any]:
    container: dict[str, Any] = {"name": "ray", "image": "x"}
    if env := draw(st.lists(RAY_VARIABLE, max_size=4, unique_by=lambda one: one["name"])):
        container["env"] = env
    template: dict[str, Any] = {"spec": {"containers": [container, {"name": "side", "image": "y"}]}}
    if draw(st.booleans()):
        template["spec"]["terminationGracePeriodSeconds"] = draw(st.sampled_from([0, 5, 30, 60, 65, 600]))
    metadata = draw(st.sampled_from([None, {"labels": {"a": "b"}}, {"annotations": {"a": "b"}}]))
    if metadata is not None:
        template["metadata"] = copy.deepcopy(metadata)
    return template


RAY_ANNOTATIONS = st.fixed_dictionaries(
    {},
    optional={
        RAY_ENABLED: st.sampled_from(["true", "false", "1", "0", "True"]),
        RAY_KILL_WAIT: st.sampled_from(["0", "5.0", "2.5", "300"]),
        "other": st.just("x"),
    },
)


@st.composite
def ray_things(draw: st.DrawFn) -> dict[str, Any]:
    kind = draw(st.sampled_from(sorted(ROOTS)))
    return ray_thing(kind, draw(RAY_ANNOTATIONS), *draw(st.lists(ray_templates(), min_size=1, max_size=3)))


@UNHURRIED
@given(ray_things())
def test_a_ray_object_that_is_safe_is_not_changed_again(thing):
    once = ray.secured(thing)
    assert ray.secured(once) == once


@UNHURRIED
@given(ray_things())
def test_what_the_user_wrote_into_a_ray_object_stays_but_for_a_longer_grace_period(thing):
    before = copy.deepcopy(thing)
    after = ray.secured(thing)
    assert thing == before
    for old, new in zip(ray.templates(before), ray.templates(after), strict=True):
        wanted = old["spec"].pop("terminationGracePeriodSeconds", 0)
        assert new["spec"].get("terminationGracePeriodSeconds", 0) >= wanted
    assert is_within(before, after)


@UNHURRIED
@given(ray_things(), RAY_ANNOTATIONS)
def test_other_annotations_make_of_a_safe_ray_object_what_they_make_of_the_original(thing, annotations):
    other = {**thing, "metadata": {**thing["metadata"], "annotations": annotations}}
    safe = ray.secured(thing)
    changed = {**safe, "metadata": other["metadata"]}
    assert ray.secured(changed) == ray.secured(other)


@UNHURRIED
@given(ray_things())
def test_the_webhooks_patch_makes_of_a_ray_object_what_was_wanted_and_takes_it_back(thing):
    after = ray.secured(thing)
    released = {**after, "metadata": {"name": "ray"}}
    for one, other in ((thing, after), (released, ray.secured(released))):
        patch: dict[str, Any] = {}
        admission._differences(one, other, patch)
        assert merged(one, patch) == other
        assert jsonpatch.apply_patch(one, admission._operations(one, patch)) == other


@settings(UNHURRIED, max_examples=30)
@given(ray_things())
def test_a_ray_object_uses_only_fields_that_the_real_crd_knows(thing):
    known = schema_of(CRD_OF[thing["kind"]])["properties"]["spec"]
    assert complaints(ray.secured(thing)["spec"], known) == []


class RayObject(RuleBasedStateMachine):
    """A RayCluster that its owner changes again and again, each time through the webhook; beside it the manifest."""

    def __init__(self) -> None:
        super().__init__()
        self.manifest = ray_thing("RayCluster", {}, pod_template())
        self.stored = ray.secured(self.manifest)

    def _edit(self, change: Any) -> None:
        for thing in (self.manifest, self.stored):
            change(thing)
        self.stored = ray.secured(self.stored)

    @staticmethod
    def _container(thing: dict[str, Any]) -> dict[str, Any]:
        return thing["spec"]["headGroupSpec"]["template"]["spec"]["containers"][0]

    @rule(annotations=RAY_ANNOTATIONS)
    def annotate(self, annotations):
        self._edit(lambda thing: thing["metadata"].update(annotations=annotations))

    @rule(variable=RAY_VARIABLE)
    def add_a_variable(self, variable):
        def change(thing: dict[str, Any]) -> None:
            container = self._container(thing)
            others = [one for one in container.get("env", []) if one["name"] != variable["name"]]
            container["env"] = [*others, dict(variable)]

        # One that says the very same as ours cannot be told from ours.
        ours = ray_env(self.stored["spec"]["headGroupSpec"]["template"])
        if "value" not in variable or ours.get(variable["name"]) != variable["value"]:
            self._edit(change)

    @rule(image=st.sampled_from(["x", "y"]))
    def change_the_image(self, image):
        self._edit(lambda thing: self._container(thing).update(image=image))

    @rule(name=st.sampled_from(["A", "B"]))
    def remove_a_variable(self, name):
        def change(thing: dict[str, Any]) -> None:
            container = self._container(thing)
            container["env"] = [one for one in container.get("env", []) if one["name"] != name]
            if not container["env"]:
                del container["env"]

        self._edit(change)

    @invariant()
    def taking_the_annotations_away_gives_the_manifest(self):
        released = copy.deepcopy(self.stored)
        plain = copy.deepcopy(self.manifest)
        released["metadata"]["annotations"] = plain["metadata"]["annotations"] = {}
        assert ray.secured(released) == plain

    @invariant()
    def what_is_stored_is_what_the_manifest_would_become(self):
        def normal(thing: dict[str, Any]) -> dict[str, Any]:
            env = self._container(thing).get("env")
            if env:
                env.sort(key=lambda one: one["name"])
            return thing

        stored, fresh = copy.deepcopy(self.stored), ray.secured(self.manifest)
        for thing in (stored, fresh):
            thing["spec"]["headGroupSpec"]["template"].get("metadata", {}).get("annotations", {}).pop(INJECTED, None)
        assert normal(stored) == normal(fresh)


def test_a_ray_object_that_is_annotated_and_changed_is_the_original_once_the_annotations_are_gone():
    run_state_machine_as_test(RayObject, settings=settings(UNHURRIED, max_examples=60, stateful_step_count=12))


def test_a_variable_from_a_secret_survives_the_second_look():
    secret = {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}
    template = pod_template()
    template["spec"]["containers"][0]["env"] = [secret, {"name": "EMPTY"}]
    thing = ray_thing("RayCluster", {RAY_ENABLED: "true"}, template)
    twice = ray.secured(ray.secured(thing))
    assert twice["spec"]["headGroupSpec"]["template"]["spec"]["containers"][0]["env"][:2] == [secret, {"name": "EMPTY"}]


@pytest.mark.parametrize("kind", sorted(ROOTS))
def test_the_two_annotations_become_the_two_variables_in_head_and_workers(kind):
    thing = ray_thing(kind, {RAY_ENABLED: "true", RAY_KILL_WAIT: "5.0"})
    found = list(ray.templates(ray.secured(thing)))
    assert len(found) == 2
    for template in found:
        env = ray_env(template)
        assert env["RAY_TRAIN_JIT_CHECKPOINT_ENABLED"] == "true"
        assert env["RAY_TRAIN_JIT_CHECKPOINT_KILL_WAIT"] == "5.0"
        assert int(env["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"]) < template["spec"]["terminationGracePeriodSeconds"]


def test_the_kill_wait_alone_becomes_its_variable_and_switches_nothing_on():
    thing = ray_thing("RayCluster", {RAY_KILL_WAIT: "2.5"})
    for template in ray.templates(ray.secured(thing)):
        assert ray_env(template) == {ray.KILL_WAIT_VARIABLE: "2.5"}
        assert "terminationGracePeriodSeconds" not in template["spec"]


def test_the_users_own_value_of_a_variable_wins():
    template = pod_template()
    template["spec"]["containers"][0]["env"] = [{"name": ray.ENABLED_VARIABLE, "value": "false"}]
    after = ray.secured(ray_thing("RayCluster", {RAY_ENABLED: "true"}, template))
    env = after["spec"]["headGroupSpec"]["template"]["spec"]["containers"][0]["env"]
    assert [one["value"] for one in env if one["name"] == ray.ENABLED_VARIABLE] == ["false"]


@pytest.mark.parametrize("value", ["soon", "", "-1", "nan", "inf", "-inf", "1e9", "5s", "5,0", "0x5", "true"])
@pytest.mark.parametrize("enabled", [None, "true", "false"])
def test_a_bad_kill_wait_is_refused_even_where_it_is_not_used(value, enabled):
    annotations = {RAY_KILL_WAIT: value, **({} if enabled is None else {RAY_ENABLED: enabled})}
    with pytest.raises(SpecError, match=re.escape(f"{RAY_KILL_WAIT}: {value!r} is not accepted; it must be a number")):
        ray.secured(ray_thing("RayCluster", annotations))


@pytest.mark.parametrize("value", ["", "maybe", "2", "tru", "enabled", "null"])
def test_a_bad_switch_is_refused(value):
    with pytest.raises(SpecError, match=re.escape(f'{RAY_ENABLED}: {value!r} is not accepted; it must be "true"')):
        ray.secured(ray_thing("RayJob", {RAY_ENABLED: value}))


@pytest.mark.parametrize(
    "text",
    ["", "x", "null", "5", "[]", '"x"', '{"env": 5}', '{"env": [1]}', '{"grace": 5}', '{"grace": [1]}', "[" * 100_000],
)
def test_a_note_of_what_was_put_in_that_is_not_ours_is_dropped_and_breaks_nothing(text):
    template = {"metadata": {"annotations": {INJECTED: text}}, **pod_template()}
    assert ray.secured(ray_thing("RayCluster", None, template)) == ray_thing("RayCluster", None, pod_template())


@pytest.mark.parametrize(
    "template",
    [
        {"metadata": None, **pod_template()},
        {"metadata": {"annotations": None}, **pod_template()},
        {"spec": None},
        {"spec": {"containers": None}},
        {},
        None,
    ],
)
def test_a_part_of_a_ray_object_that_is_null_breaks_nothing(template):
    thing = ray_thing("RayCluster", {RAY_ENABLED: "true"}, template)  # type: ignore[arg-type]
    once = ray.secured(thing)
    assert ray.secured(once) == once
    ray.warnings(once)


def test_a_hook_that_stops_ray_is_warned_of_where_the_save_is_switched_on():
    template = pod_template()
    hook = {"preStop": {"exec": {"command": ["/bin/sh", "-c", "ray stop"]}}}
    template["spec"]["containers"][0]["lifecycle"] = hook
    [warning] = ray.warnings(ray_thing("RayCluster", {RAY_ENABLED: "true"}, template))
    assert "preStop" in warning
    for switched in (None, {RAY_ENABLED: "false"}):
        assert ray.warnings(ray_thing("RayCluster", switched, template)) == []
