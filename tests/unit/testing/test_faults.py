"""Fault injection, as the tests of a user get it from ``holdfast.testing``."""

from __future__ import annotations

import errno
import inspect
import os
import signal
from pathlib import Path

import pytest

import holdfast.testing
from holdfast.store.local import LocalBackend
from holdfast.testing import Fault, InjectedError, Injector, notices, report_saves
from holdfast.testing.backend_contract import save_checkpoint


def test_every_public_name_is_there_and_says_what_it_is() -> None:
    for name in holdfast.testing.__all__:
        found = getattr(holdfast.testing, name)
        if inspect.isclass(found) or inspect.isfunction(found):
            assert (found.__doc__ or "").strip(), name
            assert not (found.__doc__ or "").startswith(f"{name}("), f"{name} has no docstring of its own"


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Injektor'"):
        _ = holdfast.testing.Injektor


def test_a_fault_happens_once_in_its_phase_of_its_step_on_its_rank() -> None:
    injector = Injector(rank=1).fail_at(1, 7, "backward", "RAISE").fail_at(0, 3, "forward", "RAISE")
    for phase, step in (("forward", 3), ("forward", 7), ("backward", 6)):
        injector.reached(phase, step)
    with pytest.raises(InjectedError, match="injected in backward of step 7"):
        injector.reached("backward", 7)
    injector.reached("backward", 7)


def test_a_phase_that_is_not_known_is_refused_with_those_that_are() -> None:
    with pytest.raises(ValueError, match="'bakward' is not known; accepted are start, forward, backward"):
        Injector(rank=0).fail_at(0, 1, "bakward")


def test_an_errno_becomes_its_error() -> None:
    injector = Injector(0, [Fault(0, 2, "commit", "ENOSPC")])
    with pytest.raises(OSError, match="injected in commit of step 2") as raised:
        injector.reached("commit", 2)
    assert raised.value.errno == errno.ENOSPC


def test_a_signal_arrives_before_the_phase_is_left() -> None:
    arrived: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: arrived.append(number))
    try:
        Injector(0, [Fault(0, 1, "forward", "USR1")]).reached("forward", 1)
        assert arrived == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_the_phases_of_a_save_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("create", "commit"):
        monkeypatch.setattr(LocalBackend, name, getattr(LocalBackend, name))  # put back at the end
    reported: list[tuple[str, int]] = []
    report_saves(lambda phase, step: reported.append((phase, step)))
    save_checkpoint(LocalBackend(str(tmp_path)), 5, {"model.bin": b"x", "optimizer.bin": b"y"})
    assert reported == [("save", 5), ("save", 5), ("commit", 5)]


def test_a_place_without_a_journal_has_heard_no_notice(tmp_path: Path) -> None:
    assert notices(os.fspath(tmp_path)) == notices(os.fspath(tmp_path), kill_wait=True) == 0
