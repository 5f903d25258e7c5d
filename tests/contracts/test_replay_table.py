"""Plain PyTorch loops: whatever name is missing, nothing is touched; a loop that cannot be followed says so, or is
refused; and what was in place is gone when the follower stops."""

from __future__ import annotations

import contextlib
import copy
import importlib
import inspect
import multiprocessing
import os
import pickle
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.eval_frame  # with the compiler loaded, its names are needed too

from holdfast.adapters import registry
from holdfast.adapters.replay.patches import PYTHON, SAFETENSORS, TABLES, TENSOR_READS, TORCH
from holdfast.base.patching import MARK, PatchSet
from holdfast.errors import UnprotectedError
from tests.contracts.tables import differences, forked, snapshot, warnings_of_holdfast

GONE = "torch.amp.grad_scaler:_refresh_per_optimizer_state"
"""A name that torch itself does without in these loops."""

REQUIRED = [
    (table, target)
    for table in TABLES
    for target in dict.fromkeys(
        one.target
        for one in (*table.patches, *table.reads)
        if one.required and (not one.loaded or one.target.partition(":")[0] in sys.modules)
    )
]


@contextlib.contextmanager
def lacking(target: str) -> Iterator[None]:
    """While the block runs, the target is not to be found. Compiled classes cannot lose a name, so what holds it is
    replaced by a copy without it: for patch tables, not for torch."""
    # Every class has an __init__ and a __repr__: the class itself is gone.
    module, _, path = target.removesuffix(".__init__").removesuffix(".__repr__").partition(":")
    holder: Any = importlib.import_module(module)
    *outer, name = path.split(".")
    with pytest.MonkeyPatch.context() as patch:
        if outer:
            (kind,) = outer
            others = {one.rpartition(".")[2] for table in TABLES for one in table.targets if f":{kind}." in one}
            names = {*dir(getattr(holder, kind)), *others} - {name}
            patch.setattr(holder, kind, types.SimpleNamespace(**dict.fromkeys(names)))
        else:
            stand_in = types.ModuleType(module)
            vars(stand_in).update({key: value for key, value in vars(holder).items() if key != name})
            patch.setitem(sys.modules, module, stand_in)
        yield


def loop(steps: int = 4) -> list[float]:
    """The loss of each step, and the weights."""
    torch.manual_seed(5)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(torch.randn(2 * steps, 4), batch_size=2)
    losses = []
    for batch in loader:
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return [*losses, *model.weight.flatten().tolist()]


def switched_on(folder: Path, **variables: str) -> None:
    """The environment of the process that runs a scenario."""
    os.environ.update(HOLDFAST_ENABLED="1", HOLDFAST_DIR=str(folder), HOLDFAST_KILL_WAIT="0", **variables)
    sys.modules.pop("ipykernel", None)  # another test has imported it: the scenario is a script, not a notebook


def tells(text: str, table: PatchSet, target: str) -> bool:
    """Whether the text names the missing target, the installed version and the tested range."""
    begin, _, rest = text.partition(f"{table.framework} {table.version()} lacks ")
    missing, _, tested = rest.partition("; tested with ")
    return (
        bool(begin)
        and target in missing.split(", ")
        and tested.startswith(f"{table.framework} {table.oldest} to {table.newest}")
    )


def test_whichever_name_is_missing_nothing_is_touched_and_one_warning_says_what_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOLDFAST_ENABLED", "1")
    before = snapshot(TABLES)
    for table, target in REQUIRED:
        with warnings_of_holdfast() as heard:
            with lacking(target):
                registry.install("replay", torch)
            assert len(heard) == 1, target
            assert tells(heard[0], table, target)
        assert differences(before, snapshot(TABLES)) == [], target


def test_without_a_name_a_loop_trains_as_without_holdfast_and_nothing_is_saved(tmp_path: Path) -> None:
    def scenario() -> Any:
        expected = loop()
        switched_on(tmp_path)
        with warnings_of_holdfast() as heard, lacking(GONE):
            registry.install("replay", torch)
            return expected == loop(), heard

    same, heard = forked(scenario)
    assert same
    assert len(heard) == 1
    assert tells(heard[0], TORCH, GONE)
    assert list(tmp_path.iterdir()) == []


def test_with_require_it_is_refused_before_the_first_step_unless_somebody_protects_it(tmp_path: Path) -> None:
    def scenario() -> Any:
        from holdfast.runtime.ownership import claim

        expected = loop()
        switched_on(tmp_path)
        os.environ["HOLDFAST_ENABLED"] = "require"
        with lacking(GONE):
            registry.install("replay", torch)
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(1, 2)).sum().backward()
        before = model.weight.tolist()
        with pytest.raises(UnprotectedError) as refused:
            optimizer.step()
        with claim("somebody"):
            return str(refused.value), before == model.weight.tolist(), expected == loop()

    text, untouched, protected = forked(scenario)
    assert tells(f"holdfast: {text}", TORCH, GONE)
    assert "HOLDFAST_ENABLED=require" in text
    assert untouched
    assert protected


def refused(why: str, act: Any) -> str:
    with pytest.raises(UnprotectedError, match=why) as error:
        act()
    return str(error.value)


def test_require_refuses_the_first_step_of_ranks_that_have_not_met(tmp_path: Path) -> None:
    def scenario() -> Any:
        switched_on(tmp_path, WORLD_SIZE="2", RANK="0")
        os.environ["HOLDFAST_ENABLED"] = "require"
        registry.install("replay", torch)
        return refused("torch.distributed was not initialised, though WORLD_SIZE is 2", loop)

    assert forked(scenario)


def test_require_refuses_a_loop_with_a_state_that_cannot_be_saved_at_its_first_step(tmp_path: Path) -> None:
    def scenario() -> Any:
        switched_on(tmp_path)
        os.environ["HOLDFAST_ENABLED"] = "require"
        registry.install("replay", torch)
        parameter = torch.nn.Parameter(torch.ones(2))

        class Secretive(torch.optim.SGD):
            def state_dict(self) -> Any:
                return {**super().state_dict(), "secret": object()}

        optimizer = Secretive([parameter], lr=0.1)
        parameter.sum().backward()
        text = refused("its state cannot be saved", optimizer.step)
        return text, parameter.tolist()

    text, parameter = forked(scenario)
    assert "this loop goes on unprotected" in text
    assert parameter == [1.0, 1.0]


def test_require_refuses_the_second_backward_pass_of_steps_that_are_made_by_hand(tmp_path: Path) -> None:
    def scenario() -> Any:
        switched_on(tmp_path)
        os.environ["HOLDFAST_ENABLED"] = "require"
        registry.install("replay", torch)
        model = torch.nn.Linear(2, 1)

        def act() -> None:
            for _ in range(2):
                model(torch.ones(1, 2)).sum().backward()
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter -= 0.1 * parameter.grad

        return refused("trains without a torch.optim.Optimizer that steps", act)

    assert forked(scenario)


def test_an_interactive_session_is_left_alone_and_with_require_refused(tmp_path: Path) -> None:
    def scenario() -> Any:
        switched_on(tmp_path)
        importlib.import_module("holdfast.adapters.replay.script")  # which imports more of torch
        sys.ps1 = ">>> "
        before = snapshot(TABLES)
        registry.install("replay", torch)
        losses = loop()
        os.environ["HOLDFAST_ENABLED"] = "require"
        registry.install("replay", torch)
        refused("interactive session", loop)
        return len(losses), differences(before, snapshot(TABLES))

    assert forked(scenario) == [8, []]


def test_when_a_follower_stops_everything_is_as_before(tmp_path: Path) -> None:
    def scenario() -> Any:
        from holdfast.adapters.replay.follower import Follower
        from holdfast.config import Settings

        expected = loop()
        switched_on(tmp_path)
        before = snapshot(TABLES)
        follower = Follower(Settings.load())
        follower.start()
        trained = loop()
        inside = [target for target in TORCH.targets if getattr(found(target), MARK, None)]
        follower.finish()
        follower.close()
        return expected == trained, inside, differences(before, snapshot(TABLES))

    same, inside, left = forked(scenario)
    assert same
    assert {f"torch._tensor:Tensor.{name}" for name in TENSOR_READS} < set(inside)
    assert {patch.target for patch in TORCH.patches if patch.scope == "follow"} < set(inside)
    assert left == []


def test_what_the_function_of_a_child_process_reads_is_the_scripts(tmp_path: Path) -> None:
    def train(out: Path) -> None:
        from holdfast.adapters.replay.follower import current

        loop()
        follower = current()
        assert follower is not None
        out.write_text(str(len(follower.loop.seen)))

    def scenario() -> Any:
        switched_on(tmp_path / "run")
        registry.install("replay", torch)
        child = multiprocessing.get_context("fork").Process(target=train, args=(tmp_path / "reads",))
        child.start()
        child.join()
        return child.exitcode, (tmp_path / "reads").read_text()

    assert forked(scenario) == [0, "5"]  # the loss of each step, and the weights


def found(target: str) -> Any:
    module, _, path = target.partition(":")
    holder: Any = sys.modules[module]
    for name in path.split("."):
        holder = getattr(holder, name, None)
    return holder


def test_a_replay_takes_back_what_it_replaces_also_while_an_answer_is_computed() -> None:
    from holdfast.adapters.replay.files import Files
    from holdfast.adapters.replay.outputs import Outputs
    from holdfast.adapters.replay.reads import Reading, Seen

    before = snapshot([*TABLES])
    outputs, reading, files = Outputs(), Reading(Seen()), Files()
    inside = []
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.SyncBatchNorm(2))
    model.register_forward_hook(lambda *_: inside.append(getattr(torch.nn.Module.__call__, MARK, None)))
    files.begin("", again=False)
    outputs.begin()
    reading.begin()
    assert model(torch.ones(3, 2)).shape == model(torch.ones(3, 2)).shape == (3, 2)
    assert inside == [None]  # once: the second answer is the first one again
    assert torch.save is torch.serialization.save
    assert getattr(torch.save, MARK) in ("torch:save", "torch.serialization:save")
    assert ("safetensors.torch" not in sys.modules) or getattr(found(SAFETENSORS.targets[0]), MARK)
    reading.end()
    outputs.end()
    files.end()
    assert differences(before, snapshot([*TABLES])) == []


def test_what_others_wrap_meanwhile_stays_and_works() -> None:
    from holdfast.adapters.replay.outputs import Outputs
    from holdfast.adapters.replay.reads import Reading, Seen

    seen = Seen()
    outputs, reading = Outputs(), Reading(seen)
    call, item = torch.nn.Module.__call__, torch.Tensor.item
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.Module, "__call__", call)
        patch.setattr(torch.Tensor, "item", item)
        outputs.begin()
        reading.begin()
        for owner, name in ((torch.nn.Module, "__call__"), (torch.Tensor, "item")):
            ours = getattr(owner, name)
            setattr(owner, name, lambda self, *args, ours=ours: ours(self, *args))
        model = torch.nn.Linear(2, 1)
        for _ in range(3):
            assert model(torch.ones(1, 2)).shape == (1, 1)
        reading.end()
        outputs.end()
        assert torch.equal(model(torch.ones(1, 2)), torch.nn.functional.linear(torch.ones(1, 2), *model.parameters()))
        assert torch.ones(1).item() == 1.0
        assert len(seen) == 0
        assert torch.Tensor.item is not item  # theirs, which is theirs to take away


def test_what_is_patched_is_pickled_copied_and_described_as_before(tmp_path: Path) -> None:
    def facts() -> Any:
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = torch.utils.data.DataLoader([1, 2])
        kinds = (torch.nn.Linear, torch.nn.Module, torch.optim.SGD, torch.utils.data.DataLoader, torch.amp.GradScaler)
        functions = (torch.load, torch.save, torch.nn.Module.__call__, torch.optim.Optimizer.__init__, sys.exit)
        for thing in (model, optimizer, loader, torch.load, torch.save, torch.nn.Linear):
            assert pickle.loads(pickle.dumps(thing)) is not None
            assert copy.deepcopy(thing) is not None
        return [*(str(inspect.signature(one)) for one in (*kinds, *functions)), *(one.__doc__ for one in functions)]

    def scenario() -> Any:
        expected = facts()
        switched_on(tmp_path)
        registry.install("replay", torch)
        assert getattr(sys.exit, MARK) == PYTHON.patches[0].target
        assert getattr(torch.load, MARK) == "torch.serialization:load"
        return expected == facts()

    assert forked(scenario)
