"""Proves that just-in-time checkpoints work in the Python that runs this: the hook, the config, the constants and the
reading of the environment. Run while a Ray image is built, so that a broken image cannot be built.

One line per part, of all parts or of those named as arguments; the exit code is 1 if any is broken. Nothing is trained
and no Ray is started.
"""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

ENABLED = "RAY_TRAIN_JIT_CHECKPOINT_ENABLED"
KILL_WAIT = "RAY_TRAIN_JIT_CHECKPOINT_KILL_WAIT"
CALLBACK = "holdfast.adapters.ray.callback.JITCheckpointCallback"
OURS = ("HOLDFAST_", "RAY_TRAIN_", "CHECKPOINT_")


class BrokenError(Exception):
    """A part does not do what it must."""


def must(condition: object, text: str) -> None:
    """``assert`` would do nothing under ``python -O``."""
    if not condition:
        raise BrokenError(text)


def same(what: str, found: object, expected: object) -> None:
    must(found == expected, f"{what} is {found!r} and must be {expected!r}")


def refused(what: str, action: Callable[[], Any], *words: str) -> None:
    """``action`` must raise an error of holdfast that names each of ``words``."""
    from holdfast.errors import HoldfastError

    try:
        action()
    except HoldfastError as error:
        for word in words:
            must(word in str(error), f"the error for {what} does not say {word!r}: {error}")
    else:
        raise BrokenError(f"{what} is accepted")


def hook() -> None:
    """``holdfast.pth`` is read at the start of every Python, and makes Ray Train know holdfast if it is switched on."""
    import _holdfast_startup

    must(_holdfast_startup.started, "holdfast.pth was not read at the start of this Python")
    must("ray.train" in _holdfast_startup.TRIGGERS, "an import of ray.train triggers nothing")
    program = (
        "import os, ray.train\n"
        "print(hasattr(ray.train, 'JITCheckpointConfig'), os.environ.get('RAY_TRAIN_CALLBACKS', ''), sep='|')"
    )
    for variables, expected in (({ENABLED: "true"}, f"True|{CALLBACK}"), ({ENABLED: "false"}, "False|")):
        same(f"what `import ray.train` does with {variables}", _in_a_new_python(program, variables), expected)


def _in_a_new_python(program: str, variables: dict[str, str]) -> str:
    environ = {name: value for name, value in os.environ.items() if not name.startswith(OURS)}
    done = subprocess.run(
        [sys.executable, *subprocess._args_from_interpreter_flags(), "-c", program],  # type: ignore[attr-defined]
        env=environ | variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    must(done.returncode == 0, f"a new Python failed: {done.stderr.strip()[-500:]}")
    return done.stdout.strip()


def config() -> None:
    """``JITCheckpointConfig``: its fields and defaults, and a run config that takes it."""
    import ray.train

    from holdfast.adapters.ray.callback import check_version
    from holdfast.ray import JITCheckpointCallback, JITCheckpointConfig, RunConfig

    check_version()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        default = JITCheckpointConfig()
        given = JITCheckpointConfig(enabled=True, kill_wait=5.0)
        refused("kill_wait=-1", lambda: JITCheckpointConfig(kill_wait=-1.0), "kill_wait", "-1")
    same("the default of enabled", default.enabled, False)
    same("the default of kill_wait", default.kill_wait, 3.0)
    must(any(ENABLED in str(one.message) for one in caught), "the config does not say that it is deprecated")
    must(RunConfig is ray.train.RunConfig, "holdfast.ray.RunConfig is not ray.train.RunConfig")
    callbacks = RunConfig(name="proof", jit_checkpoint_config=given).callbacks
    same("the number of callbacks of a run config that is switched on", len(callbacks), 1)
    must(isinstance(callbacks[0], JITCheckpointCallback), f"a run config has the callback {callbacks[0]!r}")
    same("what the workers are told", callbacks[0].variables, {"HOLDFAST_KILL_WAIT": "5.0"})
    same("callbacks of a run config that is switched off", RunConfig(jit_checkpoint_config=default).callbacks, [])
    refused("jit_checkpoint_config=True", lambda: RunConfig(jit_checkpoint_config=True), "JITCheckpointConfig")


def constants() -> None:
    """The names that users, manifests and the operator rely on."""
    import _holdfast_startup
    from holdfast.adapters import registry
    from holdfast.config import settings_table

    table = settings_table()
    same("the variable of the hook", _holdfast_startup.RAY_ENABLED, ENABLED)
    same("the variable of the setting ray_enabled", table["ray_enabled"].env, (ENABLED,))
    must(KILL_WAIT in table["kill_wait"].env, f"{KILL_WAIT} does not set kill_wait")
    adapter = next(one for one in registry.ADAPTERS if one.name == "ray")
    must(ENABLED in adapter.switches, f"{ENABLED} does not switch the adapter on")
    same("the callback that Ray is told of", registry._RAY_CALLBACK, CALLBACK)
    module, _, name = CALLBACK.rpartition(".")
    must(hasattr(__import__(module, fromlist=[name]), name), f"{CALLBACK} cannot be imported")


def environment() -> None:
    """The two variables are read, win over the config, and wrong values are refused by name."""
    from _holdfast_startup import acts
    from holdfast.adapters.ray.callback import JITCheckpointConfig, is_enabled
    from holdfast.config import Settings

    for text, expected in (("1", True), ("TRUE", True), ("0", False), ("False", False)):
        same(f"{ENABLED}={text}", Settings.load({ENABLED: text}).ray_enabled, expected)
        same(f"whether the hook acts with {ENABLED}={text}", acts("ray", {ENABLED: text}), expected)
    same(f"no {ENABLED}", (Settings.load({}).ray_enabled, acts("ray", {})), (False, False))
    same(f"{KILL_WAIT}=7.5", Settings.load({KILL_WAIT: "7.5"}).kill_wait, 7.5)
    same(f"no {KILL_WAIT}", Settings.load({}).kill_wait, 3.0)
    same("HOLDFAST_ENABLED=0 over all", acts("ray", {"HOLDFAST_ENABLED": "0", ENABLED: "1"}), False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        on, off = JITCheckpointConfig(enabled=True), JITCheckpointConfig()
    same(f"{ENABLED}=0 with a config that is switched on", is_enabled({ENABLED: "0"}, on), False)
    same(f"{ENABLED}=1 with a config that is switched off", is_enabled({ENABLED: "1"}, off), True)
    for name, text in ((ENABLED, "maybe"), (KILL_WAIT, "soon"), (KILL_WAIT, "-1")):
        refused(f"{name}={text}", lambda name=name, text=text: Settings.load({name: text}), name, text)


PARTS = (hook, constants, environment, config)


def main(names: list[str]) -> int:
    for name in [name for name in os.environ if name.startswith(OURS)]:
        del os.environ[name]
    broken = 0
    known = {part.__name__: part for part in PARTS}
    if unknown := set(names) - set(known):
        sys.exit(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    for part in [known[name] for name in names or known]:
        try:
            part()
        except Exception as error:
            broken += 1
            print(f"BROKEN  {part.__name__}: {error if isinstance(error, BrokenError) else repr(error)}", flush=True)
        else:
            print(f"ok      {part.__name__}", flush=True)
    if not broken:
        print(f"holdfast {version('holdfast')} works with Ray {version('ray')} on Python {sys.version.split()[0]}")
    return min(broken, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
