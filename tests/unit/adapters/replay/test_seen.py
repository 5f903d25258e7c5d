"""What a script reads out of tensors comes back to its replay in the same order, or the replay says that it cannot."""

from __future__ import annotations

import logging
import sys

import pytest

from holdfast.adapters.replay import reads as replay_seen
from holdfast.adapters.replay.reads import Seen
from holdfast.errors import StateError


def script(seen: Seen, values: list) -> list:
    """Reads all of them at one place."""
    got = []
    for value in values:
        got.append(seen.read(value, "item", lambda same: same, sys._getframe()))
    return got


def replayed(first: Seen) -> Seen:
    again = Seen()
    again.recall(first.content())
    return again


def test_values_of_several_kinds_that_one_place_reads_come_back_in_their_order():
    values = [0.5, 3, True, 1 << 60, [1, 2], False, -2, 1.5, -(1 << 60), "text"]
    first = Seen()
    assert script(first, values) == values
    got = script(replayed(first), [None] * len(values))
    assert got == values
    assert list(map(type, got)) == list(map(type, values))


def test_a_read_that_is_not_known_is_an_error_also_if_the_script_catches_it():
    first = Seen()
    script(first, [0.5])
    again = replayed(first)
    with pytest.raises(StateError, match="that the run had not read there"):
        script(again, [None, None])
    with pytest.raises(StateError, match="that the run had not read there"):
        again.arrive(1)


def test_after_the_limit_nothing_large_is_kept_and_that_is_said_once(monkeypatch, caplog):
    monkeypatch.setattr(replay_seen, "LIMIT", 200)
    first = Seen()
    with caplog.at_level(logging.WARNING, "holdfast"):
        script(first, ["a", ["long"] * 10, "b", ["long"] * 10])
    assert [record.message.count("hand what follows from it") for record in caplog.records] == [1]
    again = replayed(first)
    assert script(again, ["?"] * 4) == ["a", "?", "?", "?"]
