"""Which checkpoint the workers of a run of Ray Train go on from: the script's own, or ours."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray")

from ray.train import Checkpoint, RunConfig

from holdfast.adapters.ray.storage import Note, Origin, Reports, choose_origin, is_unnamed, location_of, run_id_of
from holdfast.errors import ConfigError
from tests.kit.checkpoints import make_checkpoint


class Run:
    """A run of Ray Train, as far as its storage goes."""

    def __init__(self, folder: Path, **config: Any) -> None:
        self.config = RunConfig(storage_path=str(folder), **config)
        storage = self.config.storage_context
        self.folder = Path(storage.experiment_fs_path)
        self.context: Any = SimpleNamespace(
            get_storage=lambda: storage,
            get_experiment_name=lambda: self.config.name,
            train_run_context=SimpleNamespace(run_config=self.config),
        )
        self.root = location_of(self.context)
        self.reports = Reports(self.context)

    def report(self, name: str, note: Note | None = None) -> str:
        (self.folder / name).mkdir()
        checkpoint = Checkpoint(path=str(self.folder / name), filesystem=self.context.get_storage().storage_filesystem)
        if note is not None:
            self.reports.write(self.reports.name_of(checkpoint), note)
        return self.reports.name_of(checkpoint)

    def origin(self, latest: str | None, **options: Any) -> Origin:
        return choose_origin(self.root, latest, self.reports, **options)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path, name="run")


def test_the_location_is_beside_rays_own_checkpoints(run: Run, tmp_path: Path) -> None:
    assert run.root == f"{tmp_path}/run/holdfast"
    assert run_id_of(run.context) == run_id_of(Run(tmp_path, name="run").context) != run_id_of(Run(tmp_path).context)


def test_a_run_without_a_name_is_known_as_one(run: Run, tmp_path: Path) -> None:
    assert not is_unnamed(run.context)
    assert is_unnamed(Run(tmp_path).context)


def test_a_file_system_that_only_ray_knows_is_refused_with_the_way_out(tmp_path: Path) -> None:
    from pyarrow.fs import LocalFileSystem, SubTreeFileSystem

    with pytest.raises(ConfigError, match=r"kind 'subtree'.*HOLDFAST_DIR"):
        Run(Path("results"), name="run", storage_filesystem=SubTreeFileSystem(str(tmp_path), LocalFileSystem()))


def test_from_scratch_until_something_is_saved(run: Run) -> None:
    assert run.origin(None) == Origin(run.root, None)
    make_checkpoint(run.root, 7)
    assert run.origin(None) == Origin(run.root, None, 7)


def test_ours_counts_if_it_is_at_least_as_new_as_the_scripts_own(run: Run) -> None:
    first = run.report("checkpoint_1", Note(None, 10))
    assert run.origin(first) == Origin(f"{run.root}/from-checkpoint_1", "checkpoint_1")
    make_checkpoint(run.root, 9)
    assert run.origin(first) == Origin(f"{run.root}/from-checkpoint_1", "checkpoint_1")
    make_checkpoint(run.root, 10)
    assert run.origin(first) == Origin(run.root, None, 10)


def test_after_a_failure_of_its_own_the_script_begins_with_its_own(run: Run) -> None:
    """And what is saved after that counts again, until it fails once more."""
    assert not run.reports.any()
    make_checkpoint(run.root, 15)
    first = run.report("checkpoint_1", Note(None, 10))
    assert run.reports.any()
    run.reports.write_failures(run.origin(first).failures + 1)
    location = f"{run.root}/after-failure-1/from-checkpoint_1"
    assert run.origin(first) == Origin(location, "checkpoint_1", failures=1)
    make_checkpoint(location, 5)
    assert run.origin(first) == Origin(location, "checkpoint_1", 5, failures=1)
    second = run.report("checkpoint_2", Note("checkpoint_1", 4, 1))
    assert run.origin(second) == Origin(location, "checkpoint_1", 5, failures=1)
    run.reports.write_failures(2)
    assert run.origin(second) == Origin(f"{run.root}/after-failure-2/from-checkpoint_2", "checkpoint_2", failures=2)
    assert run.origin(second, hand_over=True).failures == 0


def test_one_that_was_reported_without_holdfast_is_where_it_begins(run: Run) -> None:
    make_checkpoint(run.root, 9)
    assert run.origin(run.report("checkpoint_1")) == Origin(f"{run.root}/from-checkpoint_1", "checkpoint_1")


def test_a_second_beginning_is_followed_in_its_own_place(run: Run) -> None:
    make_checkpoint(run.root, 100)
    first = run.report("checkpoint_1", Note(None, 500))
    beginning = run.origin(first)
    make_checkpoint(beginning.location, 37)
    assert run.origin(first) == Origin(beginning.location, "checkpoint_1", 37)
    second = run.report("checkpoint_2", Note("checkpoint_1", 30))
    assert run.origin(second) == Origin(beginning.location, "checkpoint_1", 37)


def test_a_beginning_that_ray_has_removed_is_not_needed_but_missed(run: Run, caplog: Any) -> None:
    first = run.report("checkpoint_1")
    make_checkpoint(run.origin(first).location, 37)
    second = run.report("checkpoint_2", Note("checkpoint_1", 30))
    (run.folder / "checkpoint_1").rmdir()
    with caplog.at_level(logging.WARNING):
        assert run.origin(second) == Origin(f"{run.root}/from-checkpoint_2", "checkpoint_2")
    assert "which Ray has removed since" in caplog.text


def test_another_number_of_workers_begins_with_the_scripts_own(run: Run, caplog: Any) -> None:
    """A loop is replayed with as many workers as before; without a checkpoint of its own there is no other way."""
    make_checkpoint(run.root, 12)
    assert run.origin(None, world=2).step == 12
    first = run.report("checkpoint_1", Note(None, 10))
    with caplog.at_level(logging.WARNING):
        assert run.origin(first, world=2) == Origin(f"{run.root}/from-checkpoint_1", "checkpoint_1")
    assert "saved by 1 workers, and these are 2" in caplog.text
    make_checkpoint(f"{run.root}/from-checkpoint_1", 3)
    assert run.origin(first, world=1).step == 3
    assert run.origin(first, world=2) == Origin(f"{run.root}/from-checkpoint_1/of-2-workers", "checkpoint_1")


def test_a_script_that_loads_ours_begins_with_the_newest_each_time(run: Run) -> None:
    make_checkpoint(run.root, 12)
    first = run.origin(None, hand_over=True)
    assert (first.before, first.step) == (12, None)
    checkpoint = run.reports.checkpoint(first.base)
    assert checkpoint.path == f"{run.root}/checkpoint-12"
    make_checkpoint(first.location, 30)
    second = run.origin(None, hand_over=True)
    assert (second.before, second.step) == (30, None)
    assert len({run.root, first.location, second.location}) == 3
    newer = run.report("checkpoint_1", Note(second.base, 35))
    assert run.origin(newer, hand_over=True) == Origin(f"{run.root}/from-checkpoint_1", "checkpoint_1")
    make_checkpoint(second.location, 36)
    assert run.origin(newer, hand_over=True).before == 36
