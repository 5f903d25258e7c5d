"""What a run begins with besides its arguments: the script's source, its settings, and what it has made by its loop.

A complete run that is started again is replayed, not trained again. That is right for the same command, and wrong once
the script was edited, or finds another setting in its environment or in a file: then it is another run. The same script
begins alike, so what it begins with is kept in the checkpoint and compared.

Only what both know is compared: a module that one of the two has not imported says nothing.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from holdfast.adapters.replay.files import is_of_script

_MOST = 500
_LARGEST = 1 << 20
_MOST_NAMED = 3
_QUOTED = re.compile(r"""["']([A-Za-z_]\w+)["']""")
_OF_AN_ATTEMPT = re.compile(
    r"(RANK|LOCAL_|GROUP_|ROLE_|WORLD_SIZE|MASTER_|NODE|TORCHELASTIC_|SLURM|PMI|OMPI_|HOST|USER|LOGNAME|HOME|PWD|OLDPWD|"
    r"PATH|PYTHON|TMP|TEMP|SHLVL|TERM|COLUMNS|LINES|LANG|LC_|SSH_|XDG_|KUBERNETES_|POD_|RAY_|CUDA_VISIBLE|HOLDFAST_|"
    r"CHECKPOINT_|TRAINING_PROGRESS|WANDB_RUN_ID|JOB_)|.*(TOKEN|KEY|SECRET|PASSW|_PORT|_ADDR|_PID)",
    re.IGNORECASE,
)
"""Variables that differ from one attempt of a run to the next, and credentials."""


def beginning(
    optimizers: Iterable[torch.optim.Optimizer], read: Iterable[str], environ: Mapping[str, str], drawn: int
) -> dict[str, Any]:
    """What this script begins with. ``read``: files of settings. ``environ``: variables that it was started with.
    ``drawn``: the seed that torch had drawn for its process."""
    sources = _sources()
    names = {name for text in sources.values() for name in _QUOTED.findall(text.decode("utf-8", "replace"))}
    contents = ((path, _content(path)) for path in sorted(read)[:_MOST])
    return {
        "source": {name: _digest(text) for name, text in sources.items()},
        "variables": {
            name: _digest(environ[name].encode("utf-8", "surrogateescape"))
            for name in sorted(names & environ.keys())
            if not _OF_AN_ATTEMPT.match(name)
        },
        "files": {path: _digest(content) for path, content in contents if content is not None},
        "optimizers": [_optimizer(optimizer) for optimizer in optimizers],
        "seed": seed if (seed := torch.initial_seed()) != drawn else None,
    }


def differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """How a script begins otherwise than the run of a checkpoint had begun, in words."""
    found = [
        f"{what} {name}"
        for kind, what in (("source", "the source of"), ("files", "the file"))
        for name in saved[kind].keys() & now[kind].keys()
        if saved[kind][name] != now[kind][name]
    ]
    before, after = saved["variables"], now["variables"]
    found += [f"the variable {name}" for name in before.keys() | after.keys() if before.get(name) != after.get(name)]
    if saved["optimizers"] != now["optimizers"]:
        found.append("what the optimizers were made with")
    if None not in (saved["seed"], now["seed"]) and saved["seed"] != now["seed"]:
        found.append("torch's seed")
    return sorted(found)


def in_words(found: list[str]) -> str:
    """Differences for a message."""
    more = f" and {len(found) - _MOST_NAMED} others" if len(found) > _MOST_NAMED else ""
    return f"{', '.join(found[:_MOST_NAMED])}{more}"


def _sources() -> dict[str, bytes]:
    """The source of the script and of the modules that belong to it, by name."""
    found: dict[str, bytes] = {}
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None)
        if len(found) < _MOST and isinstance(path, str) and path.endswith(".py") and is_of_script(path):
            content = _content(path)
            if content is not None:
                found["__main__" if name == "__mp_main__" else name] = content
    return found


def _content(path: str) -> bytes | None:
    try:
        if os.path.getsize(path) > _LARGEST:
            return None
        with open(path, "rb") as file:
            return file.read()
    except (OSError, ValueError):
        return None


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _optimizer(optimizer: torch.optim.Optimizer) -> list[Any]:
    groups = [
        {
            **{name: repr(value) for name, value in group.items() if _is_plain(value)},
            "params": [list(parameter.shape) for parameter in group["params"]],
        }
        for group in optimizer.param_groups
    ]
    return [type(optimizer).__qualname__, _digest(repr(groups).encode())]


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)
