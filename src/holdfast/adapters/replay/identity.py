"""Whose training run a process works on, and where that run is.

A location belongs to one run: a script with its arguments, or the ranks that it has started by :mod:`multiprocessing`.
Whoever else comes to it gets a place of its own below it, and is found there again at the next attempt:

- the same script with other arguments, by these arguments;
- a process of :mod:`multiprocessing` that trains by itself, by its name and by its function with its arguments;
- a second group of such processes, by the process that is its rank 0.

What has no identity that a later attempt could find is left alone: workers of a pool, which get their tasks by chance,
children of ``os.fork``, and processes that step one model in shared memory.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import multiprocessing
import os
import re
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from _holdfast_startup import required
from holdfast.adapters.replay.provenance import leave_state
from holdfast.base.process import process_start
from holdfast.base.run_directory import default_location, home_of
from holdfast.base.small_files import read_json
from holdfast.config import Settings
from holdfast.runtime.session import Place
from holdfast.store.local import write_durable

_OWNER = "run.json"
"""In the home of a location: whose it is."""
_PROCESSES = "processes"
"""In the home of a script's location: one file for each of its processes that has trained."""
INHERITED = "holdfast"
"""In the configuration that a process of multiprocessing inherits: what its parent hands down."""
_SPAWN = "torch.multiprocessing.spawn"
_POOLS = ("multiprocessing.pool", "concurrent.futures.process", "joblib.externals.loky", "loky", "multiprocess.pool")
_SERVANTS = ("multiprocessing.", "torch.utils.data.", "torch.multiprocessing.", "ray.", "tensorboard.", "wandb.")
"""Modules whose processes serve another one and never train."""
_BAGS = (["argparse", "Namespace"], ["types", "SimpleNamespace"])
"""Classes whose objects hold what a script has put there."""
WAIT_S = 1800.0
_CONTENT_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Work:
    """What a run does."""

    name: str
    """Of the process; empty for the script itself."""
    task: str
    """Digest of the script or function, without arguments."""
    exact: str
    """Digest of it with its arguments."""
    shown: str
    """Its arguments, for messages."""

    def as_dict(self) -> dict[str, Any]:
        return {"name": self.name, "task": self.task, "exact": self.exact, "shown": self.shown}

    def fits(self, owner: Mapping[str, Any], *, loosely: bool) -> bool:
        """Whether ``owner`` did the same. ``loosely``: an unfinished run may go on with other arguments."""
        if owner.get("exact") == self.exact:
            return True
        return loosely and owner.get("task") == self.task and not owner.get("complete")


def work_of_script() -> Work:
    """Call it before the script changes its arguments."""
    script = os.path.basename(sys.argv[0] or "")
    text = [*sys.orig_argv] if script == "-c" else []
    arguments = [one for one in sys.argv[1:] if not re.match(r"--local[-_]rank\b", one)]
    task = ["script", script, *text]
    return Work("", _digest(task), _digest([*task, *arguments]), " ".join(arguments)[:200] or "none")


def work_of_process(process: Any) -> Work:
    function, args, kwargs = _function_of(process)
    task = ["process", getattr(function, "__module__", ""), getattr(function, "__qualname__", "")]
    arguments = [_plain(list(args)), _plain(dict(kwargs))]
    name = re.sub(r"[^\w.-]+", "-", str(process.name)) or "process"
    return Work(name, _digest(task), _digest([*task, *arguments]), repr(arguments)[:200])


def _function_of(process: Any) -> tuple[Any, Sequence[Any], Mapping[str, Any]]:
    """What a process of multiprocessing runs. A class with a ``run`` of its own is that, with its attributes."""
    target = getattr(process, "_target", None)
    args: Sequence[Any] = getattr(process, "_args", ())
    kwargs: Mapping[str, Any] = getattr(process, "_kwargs", {})
    if target is None:
        own = {name: value for name, value in vars(process).items() if not name.startswith("_")}
        return type(process), (), own
    if (spawned := spawned_function(process)) is not None:  # _wrap(function, rank, arguments, error file)
        return spawned, [args[1], *args[2]], {}
    while hasattr(target, "func") and hasattr(target, "args"):  # functools.partial
        target, args, kwargs = target.func, [*target.args, *args], {**target.keywords, **kwargs}
    return target, args, kwargs


def spawned_function(process: Any) -> Any:
    """The function of a process of ``torch.multiprocessing.spawn``, which swallows a KeyboardInterrupt; else None."""
    target = getattr(process, "_target", None)
    args: Sequence[Any] = getattr(process, "_args", ())
    return args[0] if getattr(target, "__module__", "") == _SPAWN and len(args) == 4 else None


def may_train(process: Any) -> bool:
    """Whether a process that is about to be started may train a run of its own or be a rank of one."""
    return not _module_of(process).startswith((*_POOLS, *_SERVANTS))


def serves(process: Any) -> bool:
    """Whether a process serves the one that starts it, as a loader's worker does."""
    return _module_of(process).startswith(_SERVANTS)


def _module_of(process: Any) -> str:
    return str(getattr(_function_of(process)[0], "__module__", ""))


def _digest(parts: Sequence[Any]) -> str:
    return hashlib.sha256(repr(list(parts)).encode("utf-8", "surrogateescape")).hexdigest()[:16]


def _plain(value: Any) -> Any:
    """A value as something whose text is the same in every attempt."""
    if value is None or isinstance(value, bool | int | float | complex | str | bytes | os.PathLike):
        return os.fspath(value) if isinstance(value, os.PathLike) else value
    if isinstance(value, Mapping):
        return {str(_plain(key)): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(repr(_plain(item)) for item in value)
    if isinstance(value, torch.Tensor):
        return ["tensor", str(value.dtype), list(value.shape), _content(value)]
    if type(value).__module__ == "numpy":
        data = value.tobytes() if getattr(value, "nbytes", _CONTENT_BYTES + 1) <= _CONTENT_BYTES else b""
        return ["array", str(getattr(value, "dtype", "")), list(getattr(value, "shape", ())), _digest([data])]
    kind = [type(value).__module__, type(value).__qualname__]
    if isinstance(value, type) or (callable(value) and hasattr(value, "__qualname__")):
        return [getattr(value, "__module__", ""), value.__qualname__]
    attributes = getattr(value, "__dict__", None)
    if not isinstance(attributes, dict) or (_is_of_a_library(kind[0]) and kind not in _BAGS):
        return kind
    public = {name: item for name, item in attributes.items() if not name.startswith("_")}
    return [*kind, {name: item for name, item in public.items() if isinstance(item, bool | int | float | str)}]


def _is_of_a_library(module: str) -> bool:
    """Whether what objects of this module hold, such as process numbers, may differ from one attempt to the next."""
    return module.partition(".")[0] in {*sys.stdlib_module_names, "torch", "numpy"}


def _content(value: torch.Tensor) -> str:
    if value.device.type != "cpu" or value.is_sparse or value.numel() * value.element_size() > _CONTENT_BYTES:
        return ""
    return _digest([value.detach().reshape(-1).tolist()])


def below(location: str, name: str) -> str:
    """A location inside another, which may be an address with a query."""
    address, mark, query = location.partition("?") if "://" in location else (location, "", "")
    return f"{address.rstrip('/')}/{name}{mark}{query}"


class Identity:
    """Whose run this process works on; it changes when the process turns out to be another's child."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._base = settings.dir or default_location()
        self._script = self._work = work_of_script()
        self._folder = re.sub(r"[^\w.-]+", "-", os.path.splitext(os.path.basename(sys.argv[0] or ""))[0]).lstrip("-")
        self.left_alone = ""
        """Why nothing is followed here; empty if it is."""
        self.is_process = False
        """Whether it is a process of multiprocessing."""
        self.has_processes: Callable[[], bool] = bool
        """Whether processes that this one has started may be training."""
        self._parent = ""
        self._state_of_script: bytes | None = None
        self._slot = ""
        """Of a process: under which name it is known."""
        self._owner: dict[str, Any] = {}
        """Of the run, as rank 0 says it."""
        self._latch: socket.socket | None = None
        self._now: str | None = None
        self._others: dict[str, str] = {}
        """Locations of complete runs that began otherwise, and how."""
        self.location = self._place_of_script()
        """Of the script's run; of processes that train by themselves, below it."""
        self.said = ""
        """Why this run is not where it might be expected."""

    # ------------------------------------------------------------------ who it is

    def fork(self) -> None:
        """Be a child of ``os.fork``, as far as is known."""
        self.left_alone = "it is a child of os.fork, which a later attempt could not tell from another"
        self.is_process, self._parent = False, token(os.getppid())

    def become(self, process: Any) -> None:
        """Be a process of multiprocessing, whose function is about to run."""
        self.is_process, self.left_alone = True, ""
        self._parent = token(process._parent_pid)
        handed = getattr(process, "_config", {}).get(INHERITED) or {}
        self.location = handed.get("location", self.location)
        self._state_of_script = handed.get("state")
        if str(getattr(getattr(process, "_target", None), "__module__", "")).startswith(_POOLS):
            self.left_alone = "it is a worker of a pool, which gets its tasks by chance"
            return
        self._work = work_of_process(process)
        self._slot = self._slot_of()

    def random_file(self) -> str:
        """The file with the random numbers that this process begins with; empty: it is not known yet."""
        if getattr(multiprocessing.current_process(), "_inheriting", False):  # it learns yet whose child it is
            return ""
        if self.is_process and self._slot:
            return os.path.join(home_of(self.location), f"birth-{self._slot}")
        return self._random_file_of_script()

    def _random_file_of_script(self) -> str:
        return os.path.join(home_of(self.location), f"birth-{os.environ.get('RANK') or 0}")

    # ------------------------------------------------------------------ where it is

    def _place_of_script(self) -> str:
        """The base location, unless a run of the script with other arguments has it."""
        owner = owner_of(self._base)
        if not owner or self._settings.resume == "never":
            return self._base
        # A job that its platform names is the same job although an argument differs, such as the name of its pod,
        # unless it was at home elsewhere before.
        named = self._settings.run_id is not None and owner.get("run") == self._settings.run_id
        loosely = named and not owner.get("complete") and not owner_of(self._elsewhere())
        return self._base if self._script.fits(owner.get("script", {}), loosely=loosely) else self._elsewhere()

    def _elsewhere(self) -> str:
        return self._free(self._base, f"{self._folder or 'python'}-{self._script.exact[:8]}")

    def _free(self, base: str, name: str) -> str:
        """A location below another that is of none of the complete runs that began otherwise."""
        location, number = below(base, name), 1
        while location in self._others:
            number += 1
            location = below(base, f"{name}.{number}")
        return location

    def differ(self, how: str) -> None:
        """The run that is complete where this one was settled began otherwise, and is another one."""
        assert self._now is not None
        self._others[self._now] = how

    def _slot_of(self, *, loosely: bool = False) -> str:
        """Under which name this process is known: its own, unless that is of other work, or this very parent has used
        it already."""
        records = records_in(home_of(self.location))
        mine = records.get(self._work.name)
        loosely = loosely or bool(mine and mine.get("group"))
        if mine is None or (mine.get("parent") != self._parent and self._work.fits(mine, loosely=loosely)):
            return self._work.name
        for name, record in sorted(records.items()):
            if record.get("exact") == self._work.exact and record.get("parent") != self._parent:
                return name
        slot = other = f"{self._work.name}-{self._work.exact[:8]}"
        number = 1
        while slot in records:
            number += 1
            slot = f"{other}-{number}"
        return slot

    def settle(self, place: Place, *, unless: str = "") -> Settings | None:
        """The settings of this run, with its location; all ranks call it together. None: there is no place for it.

        ``unless``: why the place that the last call named is none: ``busy``, or it is ``another``'s.
        """
        if place.world == 1:
            answer = self._settled(False, unless)
        elif place.rank == 0:
            answer = self._settled(True, unless)
            place.board.put_once("location", json.dumps(answer).encode())
        else:
            told = place.board.wait("location", WAIT_S)
            if told is None:
                raise TimeoutError(f"rank 0 did not say where its run is within {WAIT_S:.0f} s")
            answer = json.loads(told)
        self._now, self._owner, self.said = answer
        if self._now is None:
            return None
        if self._now == self._base:
            return self._settings
        changes: dict[str, Any] = {"dir": self._now}
        if self._settings.fallback:
            inner = self._now.partition("?")[0][len(self._base.partition("?")[0].rstrip("/")) + 1 :]
            changes["fallback"] = below(self._settings.fallback, inner)
        if self.is_process and place.world == 1:  # one of several, which must not write over each other's
            changes |= {"progress_file": None, "termination_log": None, "progress_url": None}
            os.environ.pop("HOLDFAST_ANNOUNCE", None)
        return self._settings.replace(**changes)

    def _settled(self, group: bool, unless: str) -> tuple[str | None, dict[str, Any], str]:
        before = self._now if unless else None
        owner = {**self._work.as_dict(), "group": group, "script": self._script.as_dict()}
        if self.is_process:
            location = self._place_of_process(group, unless)
        else:
            location = self._elsewhere() if unless == "another" or self._others else self._place_of_script()
            self.location = location
        if location is None or location == before:
            return None, {}, ""
        said = ""
        if self._others:
            other, how = next(iter(self._others.items()))
            said = f"{other} holds a complete run that began otherwise ({how})"
        elif not self.is_process and location != self._base:
            said = f"{self._base} holds a run with other arguments ({owner_of(self._base).get('shown', 'not known')})"
        return location, owner, said

    def _place_of_process(self, group: bool, unless: str) -> str | None:
        if unless == "busy":
            return None
        if unless:
            name = f"{self._work.name}-{_digest([self._work.exact, self._script.exact])[:8]}"
            return self._free(self.location, name if group or not self._others else self._slot)
        if group:
            owner = owner_of(self.location)
            if not owner or (owner.get("name") == self._work.name and self._work.fits(owner, loosely=True)):
                return self.location
        return below(self.location, self._slot_of(loosely=True) if group else self._slot)

    # ------------------------------------------------------------------ what is left for later attempts

    def saved(self) -> dict[str, Any]:
        """What a checkpoint says of it."""
        return self._owner

    def is_of_another(self, saved: Mapping[str, Any] | None, *, complete: bool) -> bool:
        """Whether a checkpoint is of another run. Those of 0.1.0 do not say."""
        if not saved or self._settings.resume == "never":
            return False
        own = Work(*(self._owner[name] for name in ("name", "task", "exact", "shown")))
        named = self._settings.run_id is not None
        loosely = named or bool(self._owner["group"])
        return not (
            own.fits({**saved, "complete": complete}, loosely=loosely)
            and self._script.fits({**saved["script"], "complete": complete}, loosely=loosely)
        )

    def begin(self, home: str, run: str, rank: int, *, anew: bool) -> None:
        """This run trains now. ``home``: of its location."""
        if self.is_process and anew and self._state_of_script:
            leave_state(self._random_file_of_script(), self._state_of_script)
        with contextlib.suppress(OSError):  # then a later attempt asks the checkpoints
            if rank == 0:
                _write(os.path.join(home, _OWNER), {**self._owner, "run": run})
            if self.is_process:
                if not self._owner["group"]:
                    self._found_family(run)
                self._record(complete=False)

    def withdraw(self, home: str, rank: int) -> None:
        """Somebody else is in charge of this run."""
        with contextlib.suppress(OSError):
            if rank == 0:
                os.unlink(os.path.join(home, _OWNER))

    def _found_family(self, run: str) -> None:
        """The location of the script holds those of its processes, and so is taken."""
        path = os.path.join(home_of(self.location), _OWNER)
        if not os.path.exists(path):
            script = self._script.as_dict()
            _write(path, {"script": script, "shown": script["shown"], "run": run})

    def end(self, home: str, rank: int) -> None:
        """The run is complete."""
        with contextlib.suppress(OSError):
            path = os.path.join(home, _OWNER)
            if rank == 0 and (owner := read_json(path)):
                _write(path, {**owner, "complete": True})
            if self.is_process:
                self._record(complete=True)

    def _record(self, *, complete: bool) -> None:
        folder = os.path.join(home_of(self.location), _PROCESSES)
        os.makedirs(folder, exist_ok=True)
        record = {
            **self._work.as_dict(),
            "group": self._owner["group"],
            "parent": self._parent,
            "pid": os.getpid(),
            "started": process_start(os.getpid()),
            "complete": complete,
        }
        _write(os.path.join(folder, f"{self._slot}.json"), record)

    def shall_say(self) -> bool:
        """Whether this process is the first of its siblings to say that they are left alone."""
        if not self._parent or required():
            return True
        self._latch = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)  # its name is free when the process has ended
        try:
            self._latch.bind(f"\0holdfast-said-{os.getuid()}-{self._parent}")
        except OSError:
            return sys.platform != "linux"
        return True


def token(pid: int) -> str:
    return f"{pid}-{process_start(pid)}"


def owner_of(location: str) -> dict[str, Any]:
    return read_json(os.path.join(home_of(location), _OWNER))


def records_in(home: str) -> dict[str, dict[str, Any]]:
    """The processes of a script that have trained, by name."""
    folder = os.path.join(home, _PROCESSES)
    try:
        names = [name.removesuffix(".json") for name in os.listdir(folder) if name.endswith(".json")]
    except OSError:
        return {}
    return {name: read_json(os.path.join(folder, f"{name}.json")) for name in names}


def _write(path: str, content: Mapping[str, Any]) -> None:
    write_durable(path, json.dumps(content).encode())
