"""A training function arrives as it was written, through the SDK's own script and a real shell."""

from __future__ import annotations

import base64
import functools
import inspect
import json
import linecache
import os
import pickle
import re
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kubeflow.trainer.backends.kubernetes import utils
from kubeflow.trainer.constants import constants
from kubeflow.trainer.types import types

from holdfast.errors import ConfigError
from holdfast.kubeflow import TransformersTrainer
from holdfast.kubeflow.payload import carrier, source_of

HOSTILE = [
    "$HOME ${PATH} $(date) `date` $((1+1)) $'x'",
    "\\ \\\\ \\n \\$ \\` \"double\" 'single' '''triple'''",
    "EOM\nEOM\n  EOM\n",
    "%s %d {func_code} {{x}} {func_file}",
    "ünïcödé 漢字 🦀 \u202e\u0000 \x1b[31m \r\n\t",
    "a" * 5_000,
    "!! !x #no comment ; & | > /tmp/x < y * ? [a-z] ~",
]


def shell_script(trainer: TransformersTrainer) -> list[str]:
    """The command of the container, as the SDK makes it; python instead of torchrun."""
    runtime = types.Runtime(
        name="torch",
        kind=types.RuntimeKind.TRAINING_RUNTIME,
        trainer=types.RuntimeTrainer(trainer_type=types.TrainerType.CUSTOM_TRAINER, framework="torch", image="x"),
    )
    runtime.trainer.set_command(constants.DEFAULT_COMMAND)
    command = utils.get_trainer_cr_from_custom_trainer(runtime, trainer).command
    return [str(part) for part in command]


def run(trainer: TransformersTrainer, folder: Path, **more: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}", **more}
    return subprocess.run(
        shell_script(trainer), cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False
    )


def told(hostile, path):
    text = "quotes ' \" ''' \"\"\" and $HOME $(echo oops) `echo oops` \\ \\n \\\\ %s {x} ü漢🦀"
    raw = r"\d+\s$ \' "
    block = """
    indented $(echo oops)
  less ${PATH}
EOM
    """
    import inspect
    import json
    import sys

    source = inspect.getsource(sys.modules["__main__"].told)
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"hostile": hostile, "text": text, "raw": raw, "block": block, "source": source}, file)


@pytest.mark.parametrize("hostile", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_source_and_arguments_come_through_a_real_shell_unchanged(hostile: str, tmp_path: Path) -> None:
    path = tmp_path / "told.json"
    done = run(TransformersTrainer(func=told, func_args={"hostile": hostile, "path": str(path)}), tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(path.read_text(encoding="utf-8"))
    assert found["source"] == inspect.getsource(told), "byte for byte"
    assert found["hostile"] == hostile
    assert found["text"] == "quotes ' \" ''' \"\"\" and $HOME $(echo oops) `echo oops` \\ \\n \\\\ %s {x} ü漢🦀"
    assert found["raw"] == r"\d+\s$ \' "
    assert found["block"] == "\n    indented $(echo oops)\n  less ${PATH}\nEOM\n    "


def test_a_function_inside_another_keeps_the_texts_in_it(tmp_path: Path) -> None:
    def inner(path):
        with open(path, "w") as file:
            file.write(
                """
        as deep
    less deep
"""
            )

    path = tmp_path / "text"
    assert run(TransformersTrainer(func=inner, func_args={"path": str(path)}), tmp_path).returncode == 0
    assert path.read_text() == "\n        as deep\n    less deep\n"


_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=200, deadline=None)
@given(_values)
def test_arguments_are_the_same_where_they_arrive(value: Any) -> None:
    def func(value):
        pass

    text = inspect.getsource(carrier(func, {"value": value}))
    assert not set("$`\\") & set(text), "letters that a shell looks at"
    packed = "".join(re.findall(r'^ +"([A-Za-z0-9+/=]+)"$', text, re.MULTILINE))
    source, _, given = pickle.loads(zlib.decompress(base64.b64decode(packed)))
    assert given == {"value": value}
    assert source == source_of(func)


def test_an_error_in_the_function_shows_its_own_lines(tmp_path: Path) -> None:
    def breaks():
        raise RuntimeError("deep $in it")

    done = run(TransformersTrainer(func=breaks), tmp_path)
    assert done.returncode == 1
    assert 'raise RuntimeError("deep $in it")' in done.stderr
    assert "RuntimeError: deep $in it" in done.stderr


def test_a_process_that_a_loader_spawns_does_not_train(tmp_path: Path) -> None:
    def spawns(path):
        import multiprocessing

        context = multiprocessing.get_context("spawn")
        child = context.Process(target=print, args=("child",))
        child.start()
        child.join()
        with open(path, "a") as file:
            file.write("trained\n")

    path = tmp_path / "count"
    done = run(TransformersTrainer(func=spawns, func_args={"path": str(path)}), tmp_path)
    assert done.returncode == 0, done.stderr
    assert path.read_text() == "trained\n"


def test_annotations_need_no_evaluation_where_the_module_says_so(tmp_path: Path) -> None:
    def annotated(path: "str") -> "Missing":  # noqa: F821, UP037
        with open(path, "w") as file:
            file.write("here")

    path = tmp_path / "text"
    assert run(TransformersTrainer(func=annotated, func_args={"path": str(path)}), tmp_path).returncode == 0
    assert path.read_text() == "here"


# ---------------------------------------------------------------------- what is refused

LEARNING_RATE = 0.1


def uses_a_global():
    return LEARNING_RATE


def uses_a_module():
    return os.getcwd()


def default_from_outside(rate=LEARNING_RATE):
    return rate


def attribute_of_the_same_name(x=1):
    import types as LEARNING_RATE_holder

    class Holder:
        os = 3
        settings = os + 1

    return LEARNING_RATE_holder, Holder.os, [json + 1 for json in range(x)]


@pytest.mark.parametrize(
    ("func", "words"),
    [
        (uses_a_global, ["LEARNING_RATE", "func_args"]),
        (uses_a_module, ["os", "import modules inside"]),
        (default_from_outside, ["LEARNING_RATE"]),
        (lambda: None, ["made with def"]),
        (print, ["made with def"]),
        ("train", ["made with def"]),
        (None, ["made with def"]),
        (TransformersTrainer, ["made with def"]),
    ],
    ids=["global", "module", "default", "lambda", "builtin", "text", "none", "class"],
)
def test_what_cannot_run_elsewhere_is_refused_with_its_name(func: Any, words: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"^func: ") as caught:
        TransformersTrainer(func=func)
    for word in words:
        assert word in str(caught.value)


def test_names_of_its_own_are_no_names_from_outside() -> None:
    assert "def attribute_of_the_same_name" in source_of(attribute_of_the_same_name)


def test_a_closure_is_refused_with_the_names_of_what_it_takes_along() -> None:
    rate, model = 0.1, object()

    def closes():
        return rate, model

    with pytest.raises(ConfigError, match=r"closes uses model, rate of the function around it.*func_args"):
        TransformersTrainer(func=closes)


def test_decorators_coroutines_and_generators_are_refused() -> None:
    import functools

    @functools.cache
    def cached():
        pass

    def decorate(func):
        func.decorated = True
        return func

    @decorate
    def decorated():
        pass

    async def waits():
        pass

    def yields():
        yield 1

    for func, word in (
        (cached, "made with def"),
        (decorated, "@decorate"),
        (waits, "coroutine"),
        (yields, "generator"),
    ):
        with pytest.raises(ConfigError, match=word):
            TransformersTrainer(func=func)


def test_a_function_without_source_is_refused() -> None:
    space: dict[str, Any] = {}
    exec("def made(): pass", space)
    with pytest.raises(ConfigError, match="source of made cannot be found"):
        TransformersTrainer(func=space["made"])


@pytest.mark.parametrize("letter", ["\u2028", "\u0085", "\x0b", "\x0c", "\x1c"], ids=ascii)
@pytest.mark.parametrize("quotes", ["'", "'''"], ids=["line", "block"])
def test_a_cell_that_a_notebook_does_not_keep_as_it_was_is_refused(letter: str, quotes: str) -> None:
    from IPython.core.compilerop import CachingCompiler

    def defined(text: str) -> Any:
        cell = f"def train():\n    return {quotes}a{text}b{quotes}\n"
        space: dict[str, Any] = {}
        exec(compile(cell, CachingCompiler().cache(cell, 1), "exec"), space)
        return space["train"]

    with pytest.raises(ConfigError, match=r"func: the source of train that is found is not .* write them as escapes"):
        TransformersTrainer(func=defined(letter))
    escaped = f"\\u{ord(letter):04x}"
    assert escaped in source_of(defined(escaped))


def plain():
    return 1


@functools.wraps(plain)
def around():
    return 2


def test_a_function_around_another_is_not_sent_as_that_one() -> None:
    with pytest.raises(ConfigError, match="func: plain is a function around another one"):
        TransformersTrainer(func=around)


def test_a_function_whose_file_has_changed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "written_twice.py"
    file.write_text("def train():\n    class A:\n        rate = 0.0\n    return A\n")
    import written_twice

    assert source_of(written_twice.train) == file.read_text()
    for changed in ("rate = -0.0", "rate = 0", "other = 0.0"):
        file.write_text(f"def train():\n    class A:\n        {changed}\n    return A\n")
        linecache.checkcache()
        with pytest.raises(ConfigError, match="it says something else"):
            source_of(written_twice.train)


def takes(steps, *, rate=1.0):
    pass


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "missing a required argument: 'steps'"),
        ({"steps": 1, "ste": 2}, "ste"),
        ({"steps": object()}, r"func_args\['steps'\].*object"),
        ({"steps": {"deep": [1, Path("x")]}}, r"func_args\['steps'\]\['deep'\]\[1\]"),
        ([1], "func_args"),
    ],
    ids=["missing", "unknown", "object", "deep", "list"],
)
def test_arguments_that_do_not_fit_are_refused(arguments: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        TransformersTrainer(func=takes, func_args=arguments)


def test_what_is_too_long_for_a_command_line_is_refused() -> None:
    with pytest.raises(ConfigError, match="accepted are 90,000"):
        TransformersTrainer(func=takes, func_args={"steps": os.urandom(80_000)})


def test_what_ipython_puts_beside_the_builtins_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builtins.display", print, raising=False)

    def shows():
        display("x")  # noqa: F821

    with pytest.raises(ConfigError, match="func: shows uses display, which is defined outside"):
        source_of(shows)
