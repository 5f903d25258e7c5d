"""``final/``: the trained model, ready for inference, beside the checkpoints of a run that has reached its end.

What lies there loads with plain ``from_pretrained``: adapters of PEFT are merged into the model, and the tokenizer or
processor is with it. What cannot be merged, such as a learnt prompt, is not put there. The folder is committed like a
checkpoint, so that one that is there is whole. Training itself never depends on it: what goes wrong here is a warning.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import shutil
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import xxhash

from holdfast.errors import StateError, StoreError
from holdfast.runtime.session import Session
from holdfast.store import Backend
from holdfast.store.manifest import FileEntry, Manifest

log = logging.getLogger("holdfast")

FINAL = "final"
_SCRATCH = "final-scratch"
_PIECE = 8 << 20
_WEIGHTS = (".safetensors", ".bin")
_ADAPTER = "adapter_"
"""Begins the names of files that PEFT makes of an adapter alone."""


def write_final(trainer: Any, session: Session, step: int, *, sharded: bool) -> None:
    """Write ``final/`` in the run's first location, unless the model of this step is there. All ranks call this."""
    leads = bool(trainer.args.should_save)
    if not sharded and not leads:
        return
    try:
        backend = session.backends[0]
        # Gathers the shards, whatever kind of files the checkpoints have: all ranks take part.
        state = trainer.accelerator.get_state_dict(trainer.model) if sharded else None
        if not leads or _is_there(backend, session, step):
            return
        # Beside the checkpoints, where there is room for a model, if they are in a folder. One that was killed here has
        # left its own.
        folder = os.path.join(session.home, _SCRATCH)
        shutil.rmtree(folder, ignore_errors=True)
        try:
            os.makedirs(folder)
            _save(trainer, folder, state)
            _publish(folder, backend, session, step)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        log.warning("the trained model is in %s/%s", backend.uri.rstrip("/"), FINAL)
    except Exception as error:  # of any kind: a model may refuse to be merged, and its training is done
        log.warning("the trained model could not be written to %s: %s: %s", FINAL, type(error).__name__, error)


def _is_there(backend: Backend, session: Session, step: int) -> bool:
    data = backend.read_manifest(FINAL)
    if data is None:
        return False
    with contextlib.suppress(StoreError):
        manifest = Manifest.decode(data)
        return manifest.step == step and manifest.run == session.run
    return False


def _save(trainer: Any, folder: str, state: dict[str, Any] | None) -> None:
    """``state``: all parameters of a model that is spread over the ranks, which has none of them whole itself."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    if _is_native(model) or hasattr(model, "merge_and_unload"):
        # Merging changes the model in place, and the script may go on with it: a copy is merged, in host memory.
        model = _merged(_copied_to_host(model) if state is None else _built_anew(model, state))
        state = None
    model.save_pretrained(folder, **({} if state is None else {"state_dict": state}))
    if trainer.processing_class is not None:
        trainer.processing_class.save_pretrained(folder)


def _is_native(model: Any) -> bool:
    """Whether the adapters were added by ``add_adapter`` of the model itself, without a model of PEFT around it."""
    return bool(getattr(model, "_hf_peft_config_loaded", False))


def _merged(model: Any) -> Any:
    if not _is_native(model):
        return model.merge_and_unload()
    import peft
    import torch

    # PEFT merges by the object that has put the adapters in, which transformers does not keep. Made as usual, it would
    # put them in again.
    kind = peft.PEFT_TYPE_TO_TUNER_MAPPING[next(iter(model.peft_config.values())).peft_type]
    tuner: Any = kind.__new__(kind)
    torch.nn.Module.__init__(tuner)
    tuner.model, tuner.peft_config = model, model.peft_config
    layers = peft.tuners.tuners_utils.BaseTunerLayer
    tuner.targeted_module_names = [name for name, module in model.named_modules() if isinstance(module, layers)]
    tuner.targeted_parameter_names = []
    merged = tuner.merge_and_unload()
    merged._hf_peft_config_loaded = False
    return merged


def _built_anew(model: Any, state: dict[str, Any]) -> Any:
    """A model with adapters and this state, in host memory: modules that are spread over ranks cannot be copied."""
    import peft

    native = _is_native(model)
    base = model if native else model.get_base_model()
    # Sharding puts a class of its own before that of the model.
    kind = next(kind for kind in type(base).__mro__ if not kind.__module__.startswith("torch.distributed"))
    built: Any = kind(copy.deepcopy(base.config))
    for name, config in copy.deepcopy(dict(model.peft_config)).items():
        if hasattr(config, "init_lora_weights"):
            config.init_lora_weights = False  # some begin with a decomposition of the model
        if native:
            built.add_adapter(config, name)
        elif hasattr(built, "peft_config"):
            built.add_adapter(name, config)
        else:
            built = peft.get_peft_model(built, config, adapter_name=name)
    built.load_state_dict(state, assign=True)
    (built if native else built.get_base_model()).tie_weights()
    if native:
        built.set_adapter(model.active_adapters())
    else:
        built.base_model.set_adapter(list(model.active_adapters))
    return built


def _copied_to_host(model: Any) -> Any:
    copies: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        kept = tensor.detach().to("cpu", copy=True)
        if type(tensor).__name__ == "Parameter":
            kept = type(tensor)(kept, requires_grad=tensor.requires_grad)
        copies[id(tensor)] = kept
    return copy.deepcopy(model, copies)


def _publish(folder: str, backend: Backend, session: Session, step: int) -> None:
    paths = list(_files(folder))
    weights = [path for path in paths if path.endswith(_WEIGHTS)]
    if not weights:
        raise StateError(f"no file of weights was written, only {', '.join(paths) or 'nothing'}; what was there stays")
    if all(os.path.basename(path).startswith(_ADAPTER) for path in weights):
        raise StateError(
            f"the adapter cannot be merged, and {', '.join(weights)} is no model by itself; the checkpoints have it, "
            f"and what was there stays"
        )
    backend.discard(FINAL)
    backend.begin(FINAL)
    entries = [_copy(backend, folder, path) for path in paths]
    manifest = Manifest(
        step=step,
        reason="final",
        world_size=session.world,
        files=tuple(entries),
        created=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        run=session.run,
        attempt=session.attempt,
        complete=True,
    )
    backend.commit(FINAL, manifest.encode())


def _files(folder: str) -> Iterator[str]:
    for parent, _, names in sorted(os.walk(folder)):
        for name in sorted(names):
            yield os.path.relpath(os.path.join(parent, name), folder)


def _copy(backend: Backend, folder: str, path: str) -> FileEntry:
    digest, buffer = xxhash.xxh3_128(), memoryview(bytearray(_PIECE))
    with open(os.path.join(folder, path), "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        sink = backend.create(FINAL, path, size)
        try:
            while count := file.readinto(buffer):
                digest.update(buffer[:count])
                sink.write(buffer[:count])
            sink.finish()
        except BaseException:
            sink.abort()
            raise
    return FileEntry(path, size, str(digest.hexdigest()))
