"""Switched on by the environment alone: what is installed when, at what cost, and what must never break."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

import _holdfast_startup as startup
from holdfast.adapters.registry import ADAPTERS
from tests.kit import ROOT

HOOKS = {"transformers", "lightning", "keras", "ray", "replay", "torchrun"}

FRAMEWORKS = {
    "transformers/__init__.py": "",
    "transformers/trainer.py": "",
    "lightning/__init__.py": "",
    "lightning/pytorch/__init__.py": "",
    "lightning/pytorch/trainer/__init__.py": "",
    "lightning/pytorch/trainer/trainer.py": "",
    "pytorch_lightning/__init__.py": "",
    "pytorch_lightning/trainer/__init__.py": "",
    "pytorch_lightning/trainer/trainer.py": "",
    "keras/__init__.py": "value = object()\n",
    "tf_keras/__init__.py": "def broken():\n    return 1 / 0\n\n\nbroken()\n",
    "ray/__init__.py": "",
    "ray/train/__init__.py": "",
    "torch/__init__.py": "",
    "torch/distributed/__init__.py": "",
    "torch/distributed/launcher/__init__.py": "",
    "torch/distributed/launcher/api.py": "",
}

ADAPTERS_STAND_IN = """
import sys, types
installed = []
for name in ("transformers", "lightning", "keras", "ray", "replay", "torchrun"):
    adapter = types.ModuleType(f"holdfast.adapters.{name}.patches")
    adapter.install = lambda module, name=name: installed.append([name, module.__name__])
    sys.modules[adapter.__name__] = adapter
"""


def build(folder: Path, kind: str) -> Path:
    """The wheel that pip would make, from a copy of the sources."""
    source = folder / "source"
    if not source.exists():
        shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, source)
    code = f"import sys; from setuptools import build_meta; build_meta.build_{kind}(sys.argv[1])"
    out = folder / kind
    out.mkdir()
    done = subprocess.run([sys.executable, "-c", code, out], cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = out.glob("*.whl")
    return wheel


class Environment:
    """An environment of Python with nothing in it but the files of one wheel."""

    def __init__(self, folder: Path, wheel: Path | None) -> None:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
        self.python = folder / "bin/python"
        (self.site,) = folder.glob("lib/python*/site-packages")
        if wheel is not None:
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(self.site)

    def run(self, code: str, *options: str, path: Path | None = None, **variables: str) -> subprocess.CompletedProcess:
        ours = ("HOLDFAST_", "RAY_TRAIN_", "PYTHON", "CHECKPOINT_")
        environ = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        environ |= variables | ({"PYTHONPATH": str(path)} if path else {})
        command = [self.python, *options, "-c", code]
        return subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=60)

    def result(self, code: str, *options: str, path: Path | None = None, **variables: str) -> Any:
        """What ``code`` leaves in ``result``."""
        done = self.run(f"{code}\nimport json; print(json.dumps(result))", *options, path=path, **variables)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("activation")


@pytest.fixture(scope="module")
def installed(folder: Path) -> Environment:
    return Environment(folder / "installed", build(folder, "wheel"))


@pytest.fixture(scope="module")
def frameworks(folder: Path) -> Path:
    """Packages with the names of the frameworks and nothing in them."""
    for name, content in FRAMEWORKS.items():
        path = folder / "frameworks" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return folder / "frameworks"


def test_a_wheel_brings_what_switches_it_on(installed: Environment) -> None:
    assert (installed.site / "holdfast.pth").exists()
    (record,) = installed.site.glob("holdfast-*.dist-info/RECORD")
    assert re.search(r"^holdfast\.pth,sha256=", record.read_text(), re.MULTILINE)  # so that pip removes it again
    assert installed.result("import sys; result = sys.meta_path[0].__module__") == "_holdfast_startup"


def test_an_editable_install_brings_it_too_and_is_quiet_when_its_checkout_is_gone(folder: Path) -> None:
    environment = Environment(folder / "editable-environment", build(folder, "editable"))
    code = "import sys, _holdfast_startup; result = [_holdfast_startup.started, _holdfast_startup.__file__]"
    started, file = environment.result(code)
    assert started
    assert Path(file).is_relative_to(folder / "source")
    (folder / "source/src").rename(folder / "source/elsewhere")
    try:
        gone = environment.run("pass")
    finally:
        (folder / "source/elsewhere").rename(folder / "source/src")
    assert (gone.returncode, gone.stderr) == (0, "")


def test_a_process_that_needs_nothing_imports_one_small_module_and_no_other(
    folder: Path, installed: Environment
) -> None:
    code = "import sys; result = sorted(sys.modules)"
    without = set(Environment(folder / "empty", None).result(code))
    assert set(installed.result(code)) - without == {"_holdfast_startup"}
    assert set(installed.result(code, HOLDFAST_ENABLED="1")) - without == {"_holdfast_startup"}
    assert installed.result("import sys; result = len(sys.meta_path)", HOLDFAST_ENABLED="0") == 4


STAND_INS = """
import sys, types
from importlib.util import find_spec
sys.modules["holdfast.kubeflow"] = stand_in = types.ModuleType("holdfast.kubeflow")
stand_in.PeriodicCheckpointConfig = stand_in.TransformersTrainer = "ours"
from kubeflow.trainer.rhai.transformers import PeriodicCheckpointConfig, TransformersTrainer
import kubeflow.trainer.rhai
result = [PeriodicCheckpointConfig, TransformersTrainer, kubeflow.trainer.rhai.TransformersTrainer]
"""


@pytest.mark.parametrize("enabled", ["0", "1"])
def test_modules_that_documents_import_are_there_and_those_of_the_framework_win(
    installed: Environment, tmp_path: Path, enabled: str
) -> None:
    trainer = tmp_path / "kubeflow/trainer"
    trainer.mkdir(parents=True)
    for package in (trainer.parent, trainer):
        (package / "__init__.py").touch()
    assert installed.result(STAND_INS, path=tmp_path, HOLDFAST_ENABLED=enabled) == ["ours"] * 3
    (trainer / "rhai").mkdir()
    (trainer / "rhai/__init__.py").write_text("from kubeflow.trainer.rhai.transformers import TransformersTrainer")
    (trainer / "rhai/transformers.py").write_text("PeriodicCheckpointConfig = TransformersTrainer = 'theirs'")
    assert installed.result(STAND_INS, path=tmp_path, HOLDFAST_ENABLED=enabled) == ["theirs"] * 3
    absent = installed.run("import kubeflow.trainer.rhai", HOLDFAST_ENABLED=enabled)
    assert absent.stderr.endswith("ModuleNotFoundError: No module named 'kubeflow'\n")


def test_python_without_site_packages_starts_as_ever(installed: Environment) -> None:
    for options in (["-S"], ["-I"], ["-E", "-s"]):
        done = installed.run("import json", *options)
        assert (done.returncode, done.stderr) == (0, "")


IMPORT_ALL = """
import importlib
for name in ("transformers.trainer", "lightning.pytorch.trainer.trainer", "pytorch_lightning.trainer.trainer",
             "keras", "ray.train", "torch", "torch.distributed.launcher.api"):
    importlib.import_module(name)
result = sorted({name for name, _ in installed})
"""


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, {"transformers"}),
        ({"HOLDFAST_ENABLED": ""}, {"transformers"}),
        ({"HOLDFAST_ENABLED": "1"}, HOOKS),
        ({"HOLDFAST_ENABLED": " True "}, HOOKS),
        ({"HOLDFAST_ENABLED": "0"}, set()),
        ({"HOLDFAST_ENABLED": "FALSE", "RAY_TRAIN_JIT_CHECKPOINT_ENABLED": "1"}, set()),
        ({"RAY_TRAIN_JIT_CHECKPOINT_ENABLED": "true"}, {"transformers", "ray"}),
        ({"RAY_TRAIN_JIT_CHECKPOINT_ENABLED": "0"}, {"transformers"}),
        ({"HOLDFAST_ENABLED": "1", "RAY_TRAIN_JIT_CHECKPOINT_ENABLED": "0"}, HOOKS - {"ray"}),
    ],
)
def test_the_variables_decide_which_adapters_are_installed(
    installed: Environment, frameworks: Path, variables: dict[str, str], expected: set[str]
) -> None:
    assert set(installed.result(ADAPTERS_STAND_IN + IMPORT_ALL, path=frameworks, **variables)) == expected


@pytest.mark.parametrize("variable", ["HOLDFAST_ENABLED", "RAY_TRAIN_JIT_CHECKPOINT_ENABLED"])
def test_a_wrong_value_breaks_nothing_and_is_named_once_where_a_framework_is_imported(
    installed: Environment, frameworks: Path, variable: str
) -> None:
    assert installed.run("import json", **{variable: "maybe"}).stderr == ""
    done = installed.run(ADAPTERS_STAND_IN + IMPORT_ALL + "print(result)", path=frameworks, **{variable: "maybe"})
    assert done.returncode == 0
    assert done.stderr.count(f"{variable}='maybe' is not accepted; it must be 1/true/yes/on or 0/false/no/off") == 1
    assert done.stdout.strip() == ("[]" if variable == "HOLDFAST_ENABLED" else "['transformers']")


def test_the_switches_are_read_as_the_settings_read_them() -> None:
    from holdfast.config import parse_bool

    for text in (*startup._TRUE, *startup._FALSE, "On", " 0 "):
        assert startup.switch("X", {"X": text}) is parse_bool(text)
    with pytest.raises(ValueError) as ours:
        startup.switch("X", {"X": "2"})
    with pytest.raises(ValueError) as theirs:
        parse_bool("2")
    assert str(ours.value).endswith(str(theirs.value))


def test_a_variable_that_is_set_in_the_process_counts_too(installed: Environment, frameworks: Path) -> None:
    code = ADAPTERS_STAND_IN + 'import os; os.environ["HOLDFAST_ENABLED"] = "1"\nimport keras; result = installed'
    assert installed.result(code, path=frameworks) == [["keras", "keras"]]


def test_an_adapter_that_cannot_be_installed_is_one_warning_and_the_import_succeeds(
    installed: Environment, frameworks: Path
) -> None:
    code = ADAPTERS_STAND_IN + (
        "def fail(module): raise RuntimeError('no such thing')\n"
        "sys.modules['holdfast.adapters.keras.patches'].install = fail\n"
        "import importlib, keras; importlib.reload(keras); print(keras.value)"
    )
    done = installed.run(code, path=frameworks, HOLDFAST_ENABLED="1")
    assert done.returncode == 0
    (line,) = done.stderr.splitlines()
    assert line == "holdfast keeps out of keras, its adapter failed: RuntimeError: no such thing"


def test_a_framework_that_fails_to_import_fails_as_without_holdfast(installed: Environment, frameworks: Path) -> None:
    """The same traceback, without a line of holdfast or of importlib in it, and no adapter."""
    for code in ("import tf_keras", "import ray.train.nothing", "import keras.nothing"):
        told = {
            value: installed.run(ADAPTERS_STAND_IN + code, path=frameworks, HOLDFAST_ENABLED=value).stderr
            for value in ("0", "1")
        }
        assert told["1"] == told["0"]
        assert "Traceback" in told["1"]
        assert "importlib" not in told["1"]


def test_who_asks_for_a_framework_without_importing_it_sees_what_is_there(
    installed: Environment, frameworks: Path
) -> None:
    code = ADAPTERS_STAND_IN + (
        "import importlib.util, importlib.machinery, inspect\n"
        "spec = importlib.util.find_spec('keras')\n"
        "before = [type(spec.loader).__name__, spec.origin, 'keras' in sys.modules, len(installed)]\n"
        "import keras\n"
        "loader = keras.__spec__.loader\n"
        "same = loader == importlib.machinery.SourceFileLoader('keras', keras.__file__)\n"
        "after = [same, inspect.getsource(keras) == loader.get_source('keras'), len(installed)]\n"
        "result = before + after"
    )
    origin = str(frameworks / "keras/__init__.py")
    for value, count in (("0", 0), ("1", 1)):
        found = installed.result(code, path=frameworks, HOLDFAST_ENABLED=value)
        assert found == ["SourceFileLoader", origin, False, 0, True, True, count]


def test_it_acts_after_a_reload_in_forked_and_in_new_processes_and_on_what_was_imported_before(
    installed: Environment, frameworks: Path
) -> None:
    code = ADAPTERS_STAND_IN + (
        "import importlib, os, subprocess\n"
        "import keras; importlib.reload(keras)\n"
        "reloaded = len(installed)\n"
        "reading, writing = os.pipe()\n"
        "if not os.fork():\n"
        "    import ray.train\n"
        "    os.write(writing, installed[-1][0].encode()); os._exit(0)\n"
        "os.wait()\n"
        "program = 'import sys; import ray.train; print(sorted(n for n in sys.modules if \"registry\" in n))'\n"
        "new = subprocess.run([sys.executable, '-c', program], capture_output=True, text=True).stdout.strip()\n"
        "import _holdfast_startup\n"
        "sys.meta_path.remove(_holdfast_startup.Finder)\n"
        "import torch\n"
        "_holdfast_startup.start()\n"
        "result = [reloaded, os.read(reading, 9).decode(), new, installed[-2:]]"
    )
    found = installed.result(code, path=frameworks, HOLDFAST_ENABLED="1")
    assert found == [2, "ray", "['holdfast.adapters.registry']", [["keras", "keras"], ["replay", "torch"]]]


def test_it_lives_beside_other_import_hooks(installed: Environment, frameworks: Path) -> None:
    """Another tool's finder that asks all finders but itself, as some do."""
    code = ADAPTERS_STAND_IN + (
        "class Other:\n"
        "    @staticmethod\n"
        "    def find_spec(name, path=None, target=None):\n"
        "        for finder in sys.meta_path:\n"
        "            if finder is not Other and (spec := finder.find_spec(name, path, target)):\n"
        "                return spec\n"
        "sys.meta_path.insert(0, Other)\n"
        "import keras\n"
        "sys.meta_path.remove(Other); sys.meta_path.append(Other)\n"
        "import torch\n"
        "result = installed"
    )
    assert installed.result(code, path=frameworks, HOLDFAST_ENABLED="1") == [["keras", "keras"], ["replay", "torch"]]


def test_ray_is_told_of_the_callback_beside_those_of_the_user(installed: Environment, frameworks: Path) -> None:
    code = ADAPTERS_STAND_IN + (
        "import importlib, os, ray.train\nimportlib.reload(ray.train)\nresult = os.environ.get('RAY_TRAIN_CALLBACKS')"
    )
    ours = "holdfast.adapters.ray.callback.JITCheckpointCallback"
    on = {"RAY_TRAIN_JIT_CHECKPOINT_ENABLED": "1"}
    assert installed.result(code, path=frameworks) is None
    assert installed.result(code, path=frameworks, **on) == ours
    assert (
        installed.result(code, path=frameworks, RAY_TRAIN_CALLBACKS="my.One, my.Two", **on) == f"my.One,my.Two,{ours}"
    )
    assert installed.result(code, path=frameworks, HOLDFAST_ENABLED="1", RAY_TRAIN_CALLBACKS=ours) == ours


def test_the_table_and_the_extras_say_the_same() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {adapter.name for adapter in ADAPTERS} == HOOKS == set(startup.TRIGGERS.values())
    for adapter in ADAPTERS:
        assert adapter.extra in re.findall(r"\w+", extras["all"][0])
        for name, least in adapter.packages.items():
            needed = [line for line in extras[adapter.extra] if re.match(rf"{name}(\[\w+])?>=", line)]
            assert not needed or needed[0].endswith(f">={least}"), adapter.name


def test_a_launched_script_has_the_adapters_unless_it_was_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    from holdfast.launch.records import LaunchSpec
    from holdfast.launch.supervisor import child_environ

    for given, expected in ((None, "1"), ("", "1"), ("0", "0"), ("1", "1")):
        monkeypatch.delenv("HOLDFAST_ENABLED", raising=False)
        if given is not None:
            monkeypatch.setenv("HOLDFAST_ENABLED", given)
        assert child_environ(LaunchSpec(program=["train.py"]))["HOLDFAST_ENABLED"] == expected


def test_a_run_of_the_script_itself_keeps_the_adapters_still(tmp_path: Path) -> None:
    import torch

    import holdfast
    from holdfast.runtime.ownership import claimed_by

    model = torch.nn.Linear(2, 2)
    with holdfast.Run(tmp_path / "run", model=model):
        assert claimed_by() == "run"
    assert claimed_by() is None
    with pytest.raises(holdfast.StateError):
        holdfast.Run(tmp_path / "other", model=model, wrong=object())
    assert claimed_by() is None


@pytest.mark.parametrize(
    ("variables", "acting", "why"),
    [
        ({}, {"transformers"}, "HOLDFAST_ENABLED is not set"),
        ({"HOLDFAST_ENABLED": "1"}, HOOKS, "HOLDFAST_ENABLED=1"),
        ({"HOLDFAST_ENABLED": "0"}, set(), "HOLDFAST_ENABLED=0"),
    ],
)
def test_doctor_says_which_adapters_act_and_why(
    tmp_path: Path, variables: dict[str, str], acting: set[str], why: str
) -> None:
    ours = ("HOLDFAST_", "RAY_TRAIN_", "CHECKPOINT_")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(ours)} | variables
    command = [sys.executable, "-m", "holdfast.cli", "doctor", "--json", str(tmp_path)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=60)
    told = json.loads(done.stdout)
    assert {adapter["name"] for adapter in told["adapters"] if adapter["acts"]} == acting
    (lightning,) = (adapter for adapter in told["adapters"] if adapter["name"] == "lightning")
    assert lightning["why"] == why
    assert "lightning" in lightning["installed"]
    (place,) = (finding for finding in told["findings"] if finding["check"] == "startup")
    assert "holdfast.pth is read when Python starts" in place["found"]
