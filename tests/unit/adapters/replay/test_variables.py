"""What a checkpoint holds of a script's variables, and what it says of the rest."""

from __future__ import annotations

import gc
import sys
import time
import weakref

import numpy as np
import pytest
import torch

from holdfast.adapters.replay import frames as module
from holdfast.adapters.replay.frames import Frames, Variables
from holdfast.adapters.replay.walk import Walk
from holdfast.torch.state import read_tree, write_tree


def here():
    return sys._getframe(1)


def through_a_file(variables: Variables) -> Variables:
    return Variables.of(read_tree(bytearray(write_tree(variables.tree()))))


def test_a_hundred_thousand_small_tensors_are_a_few_entries_and_quick():
    memory = [(torch.full((4,), float(index)), torch.full((1,), float(index))) for index in range(50_000)]
    began = time.monotonic()
    saved = Frames().content(here(), ())
    assert len(saved.tree()["variables"]) < 20
    assert not saved.cut
    saved = through_a_file(saved)
    assert time.monotonic() - began < 30
    for pair in memory:
        pair[0].zero_()
    assert Frames().put_back(here(), saved) == []
    assert [pair[0][0].item() for pair in memory[::7000]] == [float(index) for index in range(0, 50_000, 7000)]


def test_long_lists_of_plain_values_are_not_walked():
    vocabulary = {str(index): index for index in range(300_000)}
    rows = [{"ids": [index], "text": "x"} for index in range(300_000)]
    rare = [None] * 300_000
    rare[271_828] = torch.ones(2)
    saved = Frames().content(here(), ())
    assert [name for name in saved.content if "rare" in name] == [f"{_number(saved)} {_name()} rare[271828]"]
    assert not saved.cut
    assert vocabulary
    assert rows


def _name() -> str:
    return sys._getframe(1).f_code.co_qualname


def _number(saved: Variables) -> str:
    return next(name for name in saved.content if "rare" in name).split()[0]


def test_what_finds_no_room_is_named_and_unchanged_data_needs_none():
    frames = Frames()
    data, array = torch.ones(3 << 20), np.ones(3 << 20)
    frames.note_start(here())
    small, large = torch.ones(10), torch.ones(2 << 20)
    saved = frames.content(here(), (), 1 << 20)
    assert [what for what in saved.cut if "large, 8 MiB, found no room" in what]
    assert not [what for what in saved.cut if ": data" in what or ": array" in what]
    data.add_(1)
    array[-1] = 7.0
    saved = frames.content(here(), (), 1 << 30)
    held = {name.split()[-1] for name in saved.content}
    assert {"data", "array", "small", "large"} <= held
    assert not saved.cut
    assert small.sum() == 10
    assert large.sum() == 2 << 20


def test_answers_that_share_memory_do_not_get_each_others_content():
    first, second = torch.zeros(4), torch.ones(4)
    alike = second[:2]
    saved = through_a_file(Frames().content(here(), ()))
    second = first[:]
    alike = second[:2]
    Frames().put_back(here(), saved)
    assert first.tolist() == [0.0] * 4
    assert second.tolist() == [1.0] * 4
    assert alike.tolist() == [1.0] * 2


def test_the_dictionary_of_a_running_frames_variables_keeps_nothing_alive():
    logits = torch.zeros(1000)
    gone = weakref.ref(logits)
    Frames().content(here(), ())
    logits = None
    gc.collect()
    assert gone() is None
    assert logits is None


def test_a_dictionary_that_the_script_has_from_locals_stays_as_it_is():
    rate = 0.1
    options = locals()
    Frames().content(here(), ())
    assert options["rate"] == rate


def test_before_an_evaluation_large_things_are_not_copied_and_a_change_is_named():
    frames = Frames()
    kept, changed, array = torch.ones(1 << 20), torch.ones(1 << 20), np.zeros(1 << 20)
    noted = frames.note(here(), ())
    assert noted is not None
    changed.mul_(2)
    array[0] = 1.0
    saved = frames.content_of(noted)
    assert saved.content[next(name for name in noted if name.endswith("kept"))] is not None
    assert [what for what in saved.cut if "changed" in what and "array" in what]
    assert kept.sum() == 1 << 20


def test_variables_that_are_very_many_are_not_noted_before_evaluations(monkeypatch):
    monkeypatch.setattr(module, "_MANY", 1000)
    values = [torch.zeros(1) for _ in range(2000)]
    frames = Frames()
    assert frames.note(here(), ()) is None
    assert frames.content(here(), ()).content
    assert values


@pytest.mark.parametrize("tree", [{"variables": {"0 main x": torch.ones(2)}}])
def test_variables_of_a_checkpoint_of_0_1_0(tree):
    assert Variables.of(tree).content["0 main x"].tolist() == [1.0, 1.0]


def test_a_set_that_grows_while_it_is_looked_at():
    seen = set()

    def note(frame, event, argument):
        seen.add((frame.f_code.co_name, len(seen)))

    before = sys.gettrace()
    sys.settrace(note)
    try:
        walk = Walk().frames([sys._getframe()])
    finally:
        sys.settrace(before)
    assert walk.cut == []
    assert seen
