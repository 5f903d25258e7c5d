"""What importing holdfast costs and gives: the standard library alone, no thread, no handler, eleven names."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

import holdfast
from tests.kit import ROOT

PUBLIC = {
    "CheckpointCorruptError",
    "ConfigError",
    "HoldfastError",
    "LocationBusyError",
    "MissingExtraError",
    "Preempted",
    "Run",
    "StateError",
    "StoreError",
    "listen",
    "track",
}


def in_a_new_process(code: str) -> Any:
    """What ``code`` leaves in ``result``."""
    program = f"import json, sys\n{code}\nprint(json.dumps(result))\n"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def imported_by(statement: str) -> set[str]:
    """Top-level packages that a statement imports, besides holdfast and the standard library."""
    code = f"before = set(sys.modules)\n{statement}\nresult = sorted(set(sys.modules) - before)"
    found = {name.partition(".")[0] for name in in_a_new_process(code)}
    return {name for name in found if name not in sys.stdlib_module_names and name != "holdfast"}


def test_importing_holdfast_imports_the_standard_library_alone() -> None:
    assert imported_by("import holdfast") == set()


def test_reading_settings_and_listening_for_notices_need_no_other_package() -> None:
    assert imported_by("import holdfast, holdfast.config, holdfast.notice; holdfast.listen") == set()


def test_the_command_line_starts_without_torch() -> None:
    heavy = {"torch", "numpy", "safetensors", "matplotlib", "obstore"}
    assert imported_by("import holdfast.cli.main") & heavy == set()


def test_importing_holdfast_starts_no_thread_installs_no_handler_and_sets_up_no_logging() -> None:
    code = """
import logging, signal, threading

def handlers():
    return [str(signal.getsignal(number)) for number in signal.valid_signals()]

before = handlers()
import holdfast, holdfast.notice
result = [threading.active_count(), handlers() == before, signal.set_wakeup_fd(-1), len(logging.root.handlers)]
"""
    assert in_a_new_process(code) == [1, True, -1, 0]


def test_the_public_names_are_these_and_all_can_be_imported() -> None:
    assert set(holdfast.__all__) == PUBLIC
    assert len(holdfast.__all__) == len(PUBLIC)
    for name in PUBLIC:
        assert getattr(holdfast, name) is not None
    assert set(dir(holdfast)) == PUBLIC | {"__version__"}


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'run'"):
        holdfast.run  # noqa: B018


def test_without_torch_the_error_holds_the_pip_command() -> None:
    code = """
sys.modules["torch"] = None  # as if it were not installed
import holdfast
try:
    holdfast.Run
    result = "no error"
except holdfast.MissingExtraError as error:
    result = [str(error), isinstance(error, ImportError)]
"""
    message, is_import_error = in_a_new_process(code)
    assert "pip install 'holdfast[torch]'" in message
    assert is_import_error


def test_every_error_can_be_caught_as_one_and_as_a_builtin() -> None:
    for name in PUBLIC - {"HoldfastError", "Preempted", "Run", "listen", "track"}:
        error = getattr(holdfast, name)
        assert issubclass(error, holdfast.HoldfastError)
        assert issubclass(error, ValueError | TypeError | OSError | ImportError)
    assert issubclass(holdfast.Preempted, SystemExit)
    assert not issubclass(holdfast.Preempted, Exception)


def test_the_version_is_the_one_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert holdfast.__version__ == project["version"]
    assert f"## {holdfast.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_types_are_shipped() -> None:
    assert (Path(holdfast.__file__).parent / "py.typed").exists()
