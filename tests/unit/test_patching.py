"""A patch table is applied whole or not at all, marks what it does in one way, and can be taken back."""

from __future__ import annotations

import importlib
import sys
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from holdfast.base.patching import MARK, MissingTargetsError, Patch, PatchSet, Reads, exists
from holdfast.base.source_names import Sources

LIBRARY = """
class Base:
    def inherited(self):
        return "inherited"

class Trainer(Base):
    @staticmethod
    def still():
        return "still"

    @classmethod
    def made(cls):
        return cls.__name__

    def __init__(self):
        self._private = 1
        self.__mangled = 2

    def train(self, n):
        return [n]

    def save(self):
        return self._private

def newest(folder):
    return folder + "/last"

def barrier():
    return "waits"
"""


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    (tmp_path / "somelib.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "somelib", raising=False)
    yield importlib.import_module("somelib")
    sys.modules.pop("somelib", None)


def louder(original: Any) -> Any:
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return ("ours", original(*args, **kwargs))

    return wrapped


WRAPPERS = SimpleNamespace(louder=louder)


def table(*targets: str, reads: tuple[str, ...] = (), **more: Any) -> PatchSet:
    patches = tuple(Patch(target=target, wrap="louder", why="test", **more) for target in targets)
    return PatchSet(
        framework="somelib",
        oldest="1.0",
        newest="2.0",
        patches=patches,
        reads=tuple(Reads(target) for target in reads),
        entry="somelib:Trainer.train",
    )


ALL = ("somelib:Trainer.train", "somelib:Trainer.still", "somelib:Trainer.made", "somelib:Trainer.inherited")


def test_every_kind_of_name_is_replaced_and_put_back(library: ModuleType) -> None:
    before = dict(vars(library.Trainer))
    patches = table(*ALL, "somelib:newest")
    patches.apply(WRAPPERS)
    trainer = library.Trainer()
    assert trainer.train(1) == ("ours", [1])
    assert library.Trainer.still() == trainer.still() == ("ours", "still")
    assert library.Trainer.made() == ("ours", "Trainer")
    assert trainer.inherited() == ("ours", "inherited")
    assert library.Base().inherited() == "inherited"
    assert library.newest("x") == ("ours", "x/last")
    assert getattr(library.Trainer.train, MARK) == "somelib:Trainer.train"
    assert library.Trainer.train.__name__ == "train"
    patches.undo()
    assert dict(vars(library.Trainer)) == before
    assert library.newest("x") == "x/last"
    patches.undo()


@pytest.mark.parametrize("gone", range(len(ALL)))
def test_whichever_name_is_missing_nothing_is_touched_and_all_that_is_missing_is_named(
    library: ModuleType, gone: int
) -> None:
    target = ALL[gone]
    name = target.rpartition(".")[2]
    delattr(library.Base if name == "inherited" else library.Trainer, name)
    before = dict(vars(library.Trainer))
    with pytest.raises(MissingTargetsError) as caught:
        table(*ALL, "somelib:Trainer.never", reads=("somelib:Trainer._private", "somelib:Trainer._nothing")).apply(
            WRAPPERS
        )
    assert dict(vars(library.Trainer)) == before
    assert caught.value.missing == (target, "somelib:Trainer.never", "somelib:Trainer._nothing")
    assert "tested with somelib 1.0 to 2.0" in str(caught.value)


def test_a_method_that_is_gone_is_missing_though_others_still_call_it(library: ModuleType) -> None:
    library.Trainer.save = lambda self: self.train(1)
    del library.Trainer.train
    for scope in ("process", "save"):
        with pytest.raises(MissingTargetsError) as caught:
            table("somelib:Trainer.train", scope=scope).begin(scope, WRAPPERS)
        assert caught.value.missing == ("somelib:Trainer.train",)
    table(reads=("somelib:Trainer.train",)).apply(WRAPPERS)


def test_a_wrapper_that_fails_takes_back_what_was_placed_before_it(library: ModuleType) -> None:
    before = dict(vars(library.Trainer))

    def fail(original: Any) -> Any:
        raise RuntimeError("cannot wrap")

    patches = table("somelib:Trainer.train")
    patches.patches = (*patches.patches, Patch(target="somelib:Trainer.save", wrap="fail", why="test"))
    with pytest.raises(RuntimeError, match="cannot wrap"):
        patches.apply(SimpleNamespace(louder=louder, fail=fail))
    assert dict(vars(library.Trainer)) == before


def test_applied_twice_it_acts_once_and_after_a_reload_again(library: ModuleType) -> None:
    patches = table("somelib:Trainer.train")
    patches.apply(WRAPPERS)
    patches.apply(WRAPPERS)
    assert library.Trainer().train(1) == ("ours", [1])
    importlib.reload(library)
    assert library.Trainer().train(1) == [1]
    patches.apply(WRAPPERS)
    assert library.Trainer().train(1) == ("ours", [1])
    patches.undo()
    assert library.Trainer().train(1) == [1]


def test_a_function_that_was_imported_by_name_before_is_changed_in_place(library: ModuleType) -> None:
    imported = library.newest
    patches = table("somelib:newest", in_place=True)
    patches.apply(WRAPPERS)
    patches.apply(WRAPPERS)
    assert imported("x") == imported(folder="x") == ("ours", "x/last")
    patches.undo()
    assert imported("x") == "x/last"
    assert not hasattr(imported, MARK)


def test_a_function_is_changed_in_place_for_a_while_and_for_one_thread(library: ModuleType) -> None:
    imported = library.newest
    patches = table("somelib:newest", scope="save", in_place=True)
    seen: list[Any] = []
    with patches.applied("save", WRAPPERS, thread=True) as applied:
        other = threading.Thread(target=lambda: seen.append(imported("x")))
        other.start()
        other.join()
        assert imported("x") == ("ours", "x/last")
        assert applied.originals["somelib:newest"] is imported
    assert seen == ["x/last"]
    assert imported("x") == "x/last"
    with patches.applied("save", WRAPPERS), patches.applied("save", WRAPPERS):
        assert imported("x") == ("ours", ("ours", "x/last"))
    assert imported("x") == "x/last"


def test_a_function_that_cannot_be_changed_in_place_has_its_name_replaced(library: ModuleType) -> None:
    original = library.newest

    def theirs(folder: str) -> str:
        return str(original(folder))

    library.newest = theirs
    patches = table("somelib:newest", scope="save", in_place=True)
    with patches.applied("save", WRAPPERS):
        assert library.newest("x") == ("ours", "x/last")
    assert library.newest is theirs


def test_the_table_knows_what_was_there_before(library: ModuleType) -> None:
    original = library.Trainer.train
    patches = table("somelib:Trainer.train")
    patches.apply(WRAPPERS)
    assert patches.original("somelib:Trainer.train") is original
    patches.undo()


def test_what_others_wrapped_on_an_instance_stays_and_passes_through(library: ModuleType) -> None:
    trainer = library.Trainer()
    patches = table("somelib:Trainer.train", scope="attempt")
    with patches.applied("attempt", WRAPPERS, to=trainer):
        ours = trainer.train
        trainer.train = lambda n: ("theirs", ours(n))
    assert trainer.train(1) == ("theirs", [1])


def test_a_scope_ends_and_what_others_wrapped_meanwhile_stays_and_passes_through(library: ModuleType) -> None:
    patches = table("somelib:Trainer.train", scope="save")
    with patches.applied("save", WRAPPERS) as applied:
        assert library.Trainer().train(1) == ("ours", [1])
        assert applied.originals["somelib:Trainer.train"](None, 2) == [2]
        ours = library.Trainer.train
        library.Trainer.train = lambda self, n: ("theirs", ours(self, n))
    assert library.Trainer().train(1) == ("theirs", [1])


def test_scopes_that_overlap_end_in_any_order(library: ModuleType) -> None:
    original = library.barrier
    patches = table("somelib:barrier", scope="save")
    first = patches.begin("save", WRAPPERS)
    second = patches.begin("save", WRAPPERS)
    first.undo()
    assert library.barrier() == ("ours", "waits")
    second.undo()
    assert library.barrier() == "waits"
    third = patches.begin("save", WRAPPERS)
    third.undo()
    assert library.barrier() == "waits"
    assert original() == "waits"


def test_for_one_thread_others_are_as_before(library: ModuleType) -> None:
    patches = table("somelib:barrier", scope="save")
    seen: list[Any] = []
    with patches.applied("save", WRAPPERS, thread=True):
        other = threading.Thread(target=lambda: seen.append(library.barrier()))
        other.start()
        other.join()
        assert library.barrier() == ("ours", "waits")
    assert seen == ["waits"]


def test_on_one_instance_others_are_as_before(library: ModuleType) -> None:
    patches = table("somelib:Trainer.train", scope="attempt")
    mine, other = library.Trainer(), library.Trainer()
    with patches.applied("attempt", WRAPPERS, to=mine):
        assert mine.train(1) == ("ours", [1])
        assert other.train(1) == [1]
    assert "train" not in vars(mine)


def test_an_optional_name_that_is_missing_is_passed_over(library: ModuleType) -> None:
    patches = table("somelib:Trainer.train")
    optional = Patch(target="somelib:Trainer.future", wrap="louder", why="test", required=False)
    elsewhere = Patch(target="not_imported.anywhere:x", wrap="louder", why="test", loaded=True)
    patches.patches = (*patches.patches, optional, elsewhere)
    patches.apply(WRAPPERS)
    assert library.Trainer().train(1) == ("ours", [1])
    patches.undo()


def test_a_name_of_a_backend_is_needed_only_where_the_backend_is_loaded(library: ModuleType) -> None:
    patches = table("somelib:Trainer.train")
    elsewhere = Patch(target="not_imported.anywhere:x", wrap="louder", why="test", loaded=True)
    patches.patches = (*patches.patches, elsewhere)
    patches.reads = (Reads("not_imported.anywhere:_y", loaded=True),)
    assert patches.required == ("somelib:Trainer.train",)
    assert patches.missing() == []
    patches.reads = (Reads("somelib:_nothing", loaded=True),)
    assert patches.required == ("somelib:Trainer.train",)
    with pytest.raises(MissingTargetsError, match="lacks somelib:_nothing"):
        patches.apply(WRAPPERS)
    assert library.Trainer().train(1) == [1]


def test_a_name_of_our_own_is_added_and_removed(library: ModuleType) -> None:
    class Ours:
        pass

    patches = table("somelib:Trainer.train")
    added = Patch(target="somelib:Ours", wrap="ours", why="test", adds=True)
    patches.patches = (*patches.patches, added)
    wrappers = SimpleNamespace(louder=louder, ours=lambda there: Ours)
    assert patches.missing() == []
    assert patches.targets == patches.required == ("somelib:Trainer.train",)
    patches.apply(wrappers)
    patches.apply(wrappers)
    assert library.Ours is Ours
    patches.undo()
    assert not hasattr(library, "Ours")


def test_the_interpreter_has_a_table_too() -> None:
    patches = PatchSet(framework="python", oldest="3.11", newest="3.14", patches=(), reads=(Reads("sys:_getframe"),))
    assert patches.missing() == []
    assert patches.version() == ".".join(map(str, sys.version_info[:3]))
    assert Sources(sys.path).defines("sys:_getframe") is None


def test_the_function_that_trains_can_refuse(library: ModuleType) -> None:
    patches = table("somelib:Trainer.never")
    assert patches.refuse(RuntimeError("unprotected"))
    with pytest.raises(RuntimeError, match="unprotected"):
        library.Trainer().train(1)


def test_a_framework_under_another_name_has_the_same_table(tmp_path: Path, library: ModuleType) -> None:
    sys.modules["otherlib"] = library
    try:
        other = table(*ALL, reads=("somelib:Trainer._private",)).renamed("otherlib", {"somelib": "otherlib"})
        assert other.targets == (
            *(target.replace("somelib", "otherlib") for target in ALL),
            "otherlib:Trainer._private",
        )
        assert other.missing() == []
    finally:
        del sys.modules["otherlib"]


def test_the_source_and_the_process_agree_on_what_is_there(tmp_path: Path, library: ModuleType) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package/__init__.py").write_text("from .inner import *\nfrom somelib import Trainer as Renamed\n")
    (tmp_path / "package/inner.py").write_text(
        "import somelib\nfrom . import deeper\ntry:\n    import nothing_like_it\nexcept ImportError:\n"
        "    class Fallback:\n        x: int = 1\nclass Mine(somelib.Trainer):\n    def own(self): pass\n"
        "    def __hidden(self): self.__held = 1\n"
    )
    (tmp_path / "package/deeper.py").write_text("a, b = 1, 2\n")
    sources = Sources([str(tmp_path)])
    for target in (
        *ALL,
        "somelib:Trainer._private",
        "somelib:Trainer._Trainer__mangled",
        "somelib:Trainer.__mangled",
        "somelib:Trainer.nothing",
        "somelib:nothing",
        "nothing:nothing",
        "package:Renamed.train",
        "package:Renamed.nothing",
        "package:Mine.own",
        "package:Mine._Mine__hidden",
        "package:Mine._Mine__held",
        "package:Mine._Mine__nothing",
        "package:Mine.inherited",
        "package:Mine._private",
        "package:Mine.nothing",
        "package:Fallback.x",
        "package:deeper",
        "package.inner:deeper",
        "package.deeper:b",
        "package:Mine.__init__",
    ):
        assert sources.defines(target) is exists(target), target


def test_a_class_that_is_compiled_is_neither_there_nor_missing(tmp_path: Path) -> None:
    (tmp_path / "half.py").write_text("from _compiled import Base\nclass Tensor(Base):\n    pass\n")
    (tmp_path / "_compiled.so").write_bytes(b"")
    (tmp_path / "whole.py").write_text("from _compiled.inner import helper\n")
    assert Sources([str(tmp_path)]).defines("half:Tensor.item") is None
    assert Sources([str(tmp_path)]).defines("whole:helper.name") is None
