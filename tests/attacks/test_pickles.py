"""A checkpoint whose pickles were crafted runs no code: not in a resume, and not in ``holdfast verify``."""

from __future__ import annotations

import builtins
import contextlib
import io
import os
import pickle
import shutil
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from holdfast.errors import StateError
from holdfast.store import MANIFEST
from holdfast.store.manifest import FileEntry, Manifest
from holdfast.store.pickled import is_pickle, refused
from tests.attacks.hostile import ended
from tests.jobs.lightning import drill as lightning
from tests.jobs.transformers import drill as transformers
from tests.kit.checks import assert_whole


class Call:
    """Calls a function when it is unpickled."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._call = (function, arguments)

    def __reduce__(self) -> Any:
        return self._call


class Own:
    """A class of a script."""


def crafted(checkpoint: Path, path: str, change: Callable[[Any], Any]) -> None:
    """Change what a pickle in a checkpoint holds."""
    file = checkpoint / path
    content = change(torch.load(file, weights_only=False))
    file.unlink()
    torch.save(content, file)
    sealed(checkpoint, path)


def sealed(checkpoint: Path, path: str) -> None:
    """Let size and checksum of a file fit, as whoever can write there can."""
    data = (checkpoint / path).read_bytes()
    manifest = Manifest.decode((checkpoint / MANIFEST).read_bytes())
    entry = FileEntry(path, len(data), xxhash.xxh3_128_hexdigest(data))
    files = tuple(entry if one.path == path else one for one in manifest.files)
    (checkpoint / MANIFEST).write_bytes(replace(manifest, files=files).encode())


def bytes_of(value: Any, **options: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(value, file, **options)
    file.seek(0)
    return file


# ---------------------------------------------------------------------- what is told without reading


@pytest.mark.parametrize("name", ["lightning.ckpt", "optimizer.pt", "rng_state_0.pth"])
@pytest.mark.parametrize(
    "value",
    [Call(os.system, "true"), Call(builtins.exec, "pass"), Call(torch.hub.load, "x", "y"), Own(), Own, np.load],
    ids=lambda value: type(value).__name__ if isinstance(value, Own) else None,
)
def test_whatever_is_called_besides_what_makes_values_is_named(name: str, value: Any) -> None:
    assert len(refused(name, bytes_of({"a": [value]}))) == 1
    assert refused(name, bytes_of({"a": [value]}, pickle_protocol=4)) != []


def test_other_containers_than_torch_saves_are_refused() -> None:
    assert "no archive" in refused("optimizer.pt", io.BytesIO(pickle.dumps(1)))[0]
    assert "no archive" in refused("optimizer.pt", bytes_of(1, _use_new_zipfile_serialization=False))[0]
    program = io.BytesIO()
    torch.jit.save(torch.jit.script(torch.nn.Linear(1, 1)), program)
    program.seek(0)
    assert refused("lightning.ckpt", program) != []


def test_what_passes_is_what_torch_lets_pass() -> None:
    from holdfast.adapters.lightning.file import _PLAIN

    value = {
        "tensors": [torch.zeros(2, dtype=kind) for kind in (torch.bfloat16, torch.bool, torch.complex64, torch.uint16)],
        "others": [torch.nn.Parameter(torch.ones(1)), torch.ones(2).to_sparse(), torch.Size([1]), torch.float16],
        "values": [1, 2.5, "x", b"y", None, {1}, bytearray(b"z"), 1j, OrderedDict(a=1), torch.device("cpu"), 1 << 80],
    }
    assert refused("optimizer.pt", bytes_of(value)) == []
    torch.load(bytes_of(value), weights_only=True)
    random = {**value, "numpy": np.random.get_state()}
    assert refused("rng_state.pth", bytes_of(random)) == []
    assert refused("optimizer.pt", bytes_of(random)) != []
    lightning_too = {**random, "more": [Path("a"), np.float32(1), np.zeros((2, 2)), range(3), frozenset({1})]}
    assert refused("lightning.ckpt", bytes_of(lightning_too)) == []
    with torch.serialization.safe_globals(list(_PLAIN)):
        again = torch.load(bytes_of(lightning_too), weights_only=True)
    assert again["more"][:2] == [Path("a"), np.float32(1)]
    assert is_pickle("lightning.ckpt")
    assert not is_pickle("model.safetensors")


# ---------------------------------------------------------------------- Lightning


@pytest.fixture(scope="module")
def lightning_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was interrupted. Its last folder is the one of its checkpoints."""
    folder = tmp_path_factory.mktemp("lightning")
    fault = {"rank": 0, "step": 3, "phase": "forward", "action": "TERM"}
    stopped = lightning.shared().run(lightning.Spec(str(folder), faults=[fault]))
    assert stopped.codes == [143], stopped.log
    assert_whole(str(folder / "root" / "holdfast"))
    return folder


@pytest.mark.core
@pytest.mark.parametrize(
    ("place", "function"), [("callbacks", os.system), ("state_dict", builtins.exec), ("hyper_parameters", os.system)]
)
def test_lightning_refuses_it(lightning_run: Path, tmp_path: Path, place: str, function: Callable[..., Any]) -> None:
    shutil.copytree(lightning_run, tmp_path / "run")
    location, ran = tmp_path / "run" / "root" / "holdfast", tmp_path / "ran"
    code = f"touch {ran}" if function is os.system else f"open({str(ran)!r}, 'w')"
    newest = next(location.glob("checkpoint-*"))
    crafted(
        newest,
        "lightning.ckpt",
        lambda content: {**content, place: {**content.get(place, {}), "x": Call(function, code)}},
    )
    again = lightning.shared().run(lightning.Spec(str(tmp_path / "run")))
    assert not ran.exists(), "the checkpoint ran code"
    assert again.codes == [1], again.log
    assert "could run code when it is read" in again.log
    assert "fit(weights_only=False)" in again.log
    verified = ended("verify", location)
    assert verified.returncode == 1
    assert "could run code when it is read" in verified.stdout


OBJECTS = Path(__file__).parent / "scripts" / "lightning_objects.py"


def fitted(out: Path, *words: str, on: bool = True) -> tuple[int, str]:
    out.mkdir(exist_ok=True)
    done = subprocess.run(
        [sys.executable, str(OBJECTS), str(out), *words],
        env={**os.environ, "HOLDFAST_ENABLED": str(int(on)), "HOLDFAST_KILL_WAIT": "0", "OMP_NUM_THREADS": "1"},
        cwd=out.parent,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def test_hyper_parameters_of_any_kind_are_no_obstacle_and_in_no_pickle(tmp_path: Path) -> None:
    code, said = fitted(tmp_path / "run")
    assert code == 143, said
    saved = assert_whole(str(tmp_path / "run" / "holdfast")).location
    assert torch.load(f"{saved}/lightning.ckpt", weights_only=True)["hyper_parameters"] == {"width": 4}
    code, said = fitted(tmp_path / "run")
    assert code == 0, said
    assert "had ['mode', 'optimizer', 'width'] a" in said
    (tmp_path / "undisturbed").mkdir()
    (tmp_path / "undisturbed" / "stopped").touch()
    assert said.splitlines()[-1] in fitted(tmp_path / "undisturbed", on=False)[1]


def test_a_script_that_says_so_has_its_own_objects_back_and_is_told_before(tmp_path: Path) -> None:
    code, said = fitted(tmp_path / "run", "callback")
    assert code == 143, said
    assert "checkpoints of this fit hold __main__.Mode, and are resumed from only if the script allows that" in said
    code, refusal = fitted(tmp_path / "run", "callback")
    assert code == 1
    assert "could run code when it is read: __main__.Mode" in refusal
    code, said = fitted(tmp_path / "run", "callback", "trusting")
    assert code == 0, said
    assert "kept kept" in said


# ---------------------------------------------------------------------- Transformers


@pytest.fixture(scope="module")
def trainers_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trainer")
    fault = {"rank": 0, "step": 3, "phase": "forward", "action": "TERM"}
    stopped = transformers.shared().run(transformers.Spec(str(folder), faults=[fault]))
    assert stopped.codes == [143], stopped.log
    assert_whole(str(folder))
    return folder


@pytest.mark.core
@pytest.mark.parametrize("path", ["optimizer.pt", "scheduler.pt"])
def test_the_trainer_refuses_it(trainers_run: Path, tmp_path: Path, path: str) -> None:
    shutil.copytree(trainers_run, tmp_path / "run")
    ran = tmp_path / "ran"
    newest = next((tmp_path / "run").glob("checkpoint-*"))
    crafted(newest, path, lambda content: {**content, "x": Call(os.system, f"touch {ran}")})
    again = transformers.shared().run(transformers.Spec(str(tmp_path / "run")))
    assert not ran.exists(), "the checkpoint ran code"
    assert again.codes == [1], again.log
    verified = ended("verify", tmp_path / "run")
    assert verified.returncode == 1
    assert "could run code when it is read" in verified.stdout


# ---------------------------------------------------------------------- shards of torch.distributed.checkpoint


def _unpickled_by_system(metadata: Path, ran: Path) -> None:
    """Put a call in place of DCP's metadata."""
    metadata.write_bytes(pickle.dumps(Call(os.system, f"touch {ran}")))


def _values_by_system(folder: Path, ran: Path) -> None:
    """Put a call in place of a value among the shards, as the metadata then says."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    shard = folder / "__0_0.distcp"
    content, value = shard.read_bytes(), bytes_of(Call(os.system, f"touch {ran}")).getvalue()
    kinds = BytesStorageMetadata
    names = [name for name, one in metadata.state_dict_metadata.items() if isinstance(one, kinds)]
    for index, info in metadata.storage_data.items():
        if index.fqn in names:
            info.relative_path, info.offset, info.length = shard.name, len(content), len(value)
    shard.write_bytes(content + value)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.core
@pytest.mark.parametrize(
    "craft", [lambda folder, ran: _unpickled_by_system(folder / ".metadata", ran), _values_by_system]
)
def test_shards_are_read_without_running_code(craft: Callable[..., None], tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    from holdfast.adapters.transformers.patches import SHARDS, TORCH
    from holdfast.adapters.transformers.shards import Readers

    def loaded() -> dict[str, Any]:
        state = {"weights": torch.zeros(3), "groups": {"lr": 0.0, "betas": (0.0, 0.0), "fused": True}}
        dcp.load(state, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
        return state

    folder, ran = tmp_path / "shards", tmp_path / "ran"
    state = {"weights": torch.ones(3), "groups": {"lr": 0.5, "betas": (0.9, 0.99), "fused": None}}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
    with TORCH.applied(SHARDS, Readers):
        assert loaded()["groups"] == state["groups"]
        with (folder / ".metadata").open("rb") as file:
            assert refused("x/.metadata", file) == []
        craft(folder, ran)
        with pytest.raises((StateError, CheckpointException), match=r"could run code when it is read: posix\.system"):
            loaded()
    assert not ran.exists()
    with contextlib.suppress(Exception, CheckpointException):
        loaded()
    assert ran.exists(), "the attack is none: torch alone does not fall for it"


@pytest.mark.slow
def test_a_sharded_trainer_refuses_it(tmp_path: Path) -> None:
    args = {"fsdp": "full_shard", "max_steps": 12}
    args["fsdp_config"] = {
        "fsdp_version": 2,
        "state_dict_type": "SHARDED_STATE_DICT",
        "transformer_layer_cls_to_wrap": ["GPT2Block"],
    }
    script = str(transformers.SCRIPTS / "transformers_fsdp.py")
    fault = {"rank": 0, "step": 3, "phase": "forward", "action": "TERM"}
    spec = transformers.Spec(str(tmp_path / "run"), world=2, script=script, args=args, faults=[fault])
    stopped = transformers.shared().run(spec)
    assert stopped.codes == [143, 143], stopped.log
    assert_whole(spec.dir)
    ran = tmp_path / "ran"
    newest = next((tmp_path / "run").glob("checkpoint-*"))
    _unpickled_by_system(newest / "optimizer_0" / ".metadata", ran)
    sealed(newest, "optimizer_0/.metadata")
    again = transformers.shared().run(spec.plain())
    assert not ran.exists(), "the checkpoint ran code"
    assert 0 not in again.codes, again.log
    verified = ended("verify", spec.dir)
    assert verified.returncode == 1
    assert "could run code when it is read: posix.system" in verified.stdout
