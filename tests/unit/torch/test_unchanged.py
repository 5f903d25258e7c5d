"""Incremental saves: what has not changed is not written again, and whatever has changed is, however that happened."""

from __future__ import annotations

import json
import mmap
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.engine.saving import Save, Saver
from holdfast.recorder.blackbox import BlackBox
from holdfast.staging.images import flat_bytes
from holdfast.staging.pages import PAGE, Pages, whole_pages
from holdfast.store.checkpoints import whole
from holdfast.store.local import LocalBackend
from holdfast.torch import unchanged
from holdfast.torch.loop import Loop
from holdfast.torch.restore import Contents, restore
from holdfast.torch.state import Objects


class _Journal:
    def record(self, event: str, /, **fields: Any) -> None:
        pass


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.large = torch.nn.Parameter(torch.randn(700, 513), requires_grad=False)
        self.small = torch.nn.Parameter(torch.randn(100), requires_grad=False)
        self.register_buffer("table", torch.arange(300_000))
        self.trained = torch.nn.Parameter(torch.randn(1000))


class Run:
    """Saves and restores a model, without an engine."""

    def __init__(self, folder: Path) -> None:
        self.model = Model()
        self.backend = LocalBackend(str(folder))
        self.saver = Saver(
            backends=[self.backend], rank=0, world=1, run="r", attempt=1, token="", keep=9, journal=_Journal()
        )
        self.loop = Loop(Objects({"model": self.model}, 0, incremental=True), BlackBox(None, 0), 0, rescue=False)
        self.loop.saver = self.saver

    def files(self, live: bool) -> Any:
        return self.loop.files(live=live, at_boundary=True)

    def save(self, live: bool, files: Any = None) -> None:
        self.loop.step += 1
        files = files or self.files(live)
        files.settle()
        self.saver.write(Save(step=self.loop.step, reason="jit" if live else "periodic"), files, self.loop.size())

    def files_of(self, *names: str) -> set[int]:
        """The numbers of the files in which these tensors lie."""
        folder = Path(self.backend.root) / f"checkpoint-{self.loop.step}"
        places = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
        return {(folder / places[name]).stat().st_ino for name in names}

    def saved(self) -> dict[str, torch.Tensor]:
        model = Model()
        restore(Contents(next(whole([self.backend])), 0, 1), Objects({"model": model}, 0, incremental=True))
        return model.state_dict()


@pytest.fixture(params=["watched", "read"])
def run(request, tmp_path, monkeypatch):
    if request.param == "read":
        monkeypatch.setattr(Pages, "_works", lambda self: False)
    elif not Pages()._works():
        pytest.skip("this kernel does not tell which pages were written")
    return Run(tmp_path)


def _replaced(model: Model) -> None:
    model.large.data = model.large.data.clone() + 1


def _read_from_a_file(model: Model) -> None:
    with open("/dev/urandom", "rb") as file:
        os.preadv(file.fileno(), [memoryview(model.large.detach().numpy()).cast("B")[300_000:300_010]], 0)


def _in_the_other_process_only(model: Model) -> None:
    child = os.fork()
    if not child:
        model.large.detach().numpy()[:] = 0  # torch's own threads do not survive a fork
        os._exit(0)
    os.waitpid(child, 0)


CHANGES = {
    "in place": lambda model: model.large.add_(1),
    "behind autograd's back": lambda model: model.large.data[350].zero_(),
    "the first byte": lambda model: model.large.data.view(torch.uint8)[0, 0].bitwise_xor_(1),
    "the last byte": lambda model: model.large.data.view(torch.uint8)[-1, -1].bitwise_xor_(1),
    "through NumPy": lambda model: model.large.detach().numpy().__setitem__((400, 3), 7.0),
    "a small tensor": lambda model: model.small.data[99].add_(1),
    "a buffer": lambda model: model.table[150_000].add_(1),
    "other memory": _replaced,
    "by the kernel": _read_from_a_file,
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("live", [True, False], ids=["live", "staged"])
def test_every_change_of_what_is_frozen_is_saved(run, change, live):
    for _ in range(3):
        run.save(live)
    before = run.files_of("large", "table")
    assert len(before) == 2
    CHANGES[change](run.model)
    run.save(live)
    assert len(run.files_of("large", "table") & before) == 1
    expected = run.model.state_dict()
    for _ in range(2):
        saved = run.saved()
        # Byte by byte: random bytes may be a number that is not equal to itself.
        assert all(torch.equal(flat_bytes(saved[name]), flat_bytes(expected[name])) for name in expected)
        run.save(live)


@pytest.mark.parametrize("live", [True, False], ids=["live", "staged"])
@pytest.mark.parametrize(
    "not_a_change", [lambda model: None, lambda model: model.large.sum(), _in_the_other_process_only]
)
def test_what_has_not_changed_is_stored_once(run, live, not_a_change):
    numbers = set()
    for _ in range(4):
        run.model.trained.data += 1
        not_a_change(run.model)
        run.save(live)
        numbers |= run.files_of("large", "small", "table")
    assert len(numbers) == 2
    assert torch.equal(run.saved()["trained"], run.model.trained)


def test_memory_that_is_watched_is_read_once(tmp_path, monkeypatch):
    if not Pages()._works():
        pytest.skip("this kernel does not tell which pages were written")
    read: list[int] = []
    really = unchanged.digest_of
    monkeypatch.setattr(unchanged, "digest_of", lambda pieces: read.append(1) or really(pieces))
    run = Run(tmp_path)
    for _ in range(5):
        run.save(live=True)
        run.save(live=False)
    assert len(read) == len({"parameters", "buffers"})


def test_what_changes_all_the_time_is_not_watched_and_takes_nothing_along(tmp_path, monkeypatch):
    if not Pages()._works():
        pytest.skip("this kernel does not tell which pages were written")
    watched: list[int] = []
    really = Pages.watch
    monkeypatch.setattr(Pages, "watch", lambda self, ranges: watched.append(len(ranges)) or really(self, ranges))
    run = Run(tmp_path)
    numbers = set()
    for _ in range(6):
        run.model.table += 1
        run.save(live=False)
        numbers |= run.files_of("large")
        assert torch.equal(run.saved()["table"], run.model.table)
    assert len(numbers) == 1
    assert len(watched) == 2
    for _ in range(3):
        run.save(live=False)
    assert len(watched) == 3, "it has stopped changing"


def test_what_changes_once_training_goes_on_is_not_in_the_save(run):
    run.save(live=False)
    run.save(live=False)
    run.model.large.data += 1
    expected = {name: value.clone() for name, value in run.model.state_dict().items()}
    files = run.files(live=False)
    files.settle()
    for value in run.model.state_dict().values():
        value.zero_()
    run.save(live=False, files=files)
    saved = run.saved()
    assert all(torch.equal(saved[name], expected[name]) for name in expected)


def test_an_error_while_files_are_compared_fails_the_save_and_hangs_nobody(run, monkeypatch):
    run.save(live=False)

    def broken(*_: Any) -> bool:
        raise OSError("the device is gone")

    with monkeypatch.context() as patch:
        patch.setattr(unchanged.Memory, "matches", broken)
        files = run.files(live=False)
        with pytest.raises(OSError, match="gone"):
            files.settle()
        run.loop.step += 1
        with pytest.raises(OSError, match="gone"):
            run.saver.write(Save(step=run.loop.step, reason="periodic"), files, 1)
    run.save(live=True)
    assert torch.equal(run.saved()["large"], run.model.large)


# ---------------------------------------------------------------------- pages


@pytest.fixture
def pages():
    watched = Pages()
    if not watched._works():
        pytest.skip("this kernel does not tell which pages were written")
    return watched


def test_memory_of_others_cannot_be_watched(pages, tmp_path):
    shared = torch.ones(1 << 20, dtype=torch.uint8).share_memory_()
    assert not pages.watch([whole_pages(shared.data_ptr(), shared.nbytes)])
    (tmp_path / "file").write_bytes(bytes(1 << 20))
    for private in (True, False):
        with open(tmp_path / "file", "r+b") as file:
            flags = mmap.MAP_PRIVATE if private else mmap.MAP_SHARED
            mapped = torch.frombuffer(mmap.mmap(file.fileno(), 1 << 20, flags=flags), dtype=torch.uint8)
        assert not pages.watch([whole_pages(mapped.data_ptr(), mapped.nbytes)])


def test_memory_that_is_given_away_and_got_again_counts_as_written(pages):
    first = torch.ones(64 << 20, dtype=torch.uint8)
    place = [whole_pages(first.data_ptr(), first.nbytes)]
    assert pages.watch(place)
    assert pages.unwritten(place)
    del first
    again = torch.ones(64 << 20, dtype=torch.uint8)
    assert not pages.unwritten(place)
    del again
    assert not pages.unwritten(place)


def test_pages_that_the_system_took_back_count_as_written(pages):
    memory = mmap.mmap(-1, 1 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory[:] = b"x" * len(memory)
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    place = [whole_pages(tensor.data_ptr(), tensor.nbytes)]
    assert pages.watch(place)
    assert pages.unwritten(place)
    memory.madvise(mmap.MADV_DONTNEED, 16 * PAGE, PAGE)
    assert not pages.unwritten(place)


def test_a_forked_process_watches_nothing(pages):
    tensor = torch.ones(1 << 20, dtype=torch.uint8)
    place = [whole_pages(tensor.data_ptr(), tensor.nbytes)]
    assert pages.watch(place)
    child = os.fork()
    if not child:
        os._exit(0 if not pages.unwritten(place) and not pages.watch(place) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert pages.unwritten(place)
