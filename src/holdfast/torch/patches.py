"""The patch tables of the PyTorch toolkit: what it replaces and reads in torch and safetensors, whatever the adapter.

Each scope is in place only while it is needed: ``capture`` while a framework's own save is captured
(:mod:`holdfast.torch.capture`), for calls of the thread that captures; ``backward`` while a loop of several ranks
trains (:mod:`holdfast.torch.backward`).
"""

from __future__ import annotations

from holdfast.base.patching import MissingTargetsError, Patch, PatchSet, Reads

CAPTURE = "capture"
"""Scope: a framework's own save is captured."""
BACKWARD = "backward"
"""Scope: a loop trains whose ranks save for each other."""
SAVE = "torch:save"
SAVE_FILE = "safetensors.torch:save_file"

TORCH = PatchSet(
    framework="torch",
    oldest="2.6",
    newest="2.13.0",
    patches=(
        Patch(target=SAVE, wrap="save", why="keeps the object instead of writing the file", scope=CAPTURE),
        Patch(target="torch.autograd:backward", wrap="backward", why="a forward pass has ended", scope=BACKWARD),
    ),
    reads=(
        Reads("torch:Tensor._version"),
        Reads("torch.nn.modules.module:Module._buffers"),
        Reads("torch.utils.data.dataloader:DataLoader._iterator"),
        Reads("torch.utils.data.dataloader:_MultiProcessingDataLoaderIter._workers"),
        Reads("torch.utils.data.dataloader:_MultiProcessingDataLoaderIter._shutdown_workers"),
        Reads("torch.utils.data._utils.pin_memory:pin_memory"),
        Reads("torch.distributed.tensor._utils:compute_local_shape_and_global_offset", loaded=True),
        Reads("torch._dynamo.eval_frame:OptimizedModule._orig_mod", loaded=True),
    ),
)

SAFETENSORS = PatchSet(
    framework="safetensors",
    oldest="0.5",
    newest="0.8.0",
    patches=(
        Patch(
            target=SAVE_FILE,
            wrap="save_file",
            why="keeps the tensors instead of writing the file; frameworks import it by name",
            scope=CAPTURE,
            in_place=True,
        ),
    ),
)

TABLES = (TORCH, SAFETENSORS)


def check() -> None:
    """Raise MissingTargetsError if torch or safetensors lacks a name that the toolkit needs.

    An adapter that uses the toolkit calls this before it patches its framework: a save is too late to find out.
    """
    for table in TABLES:
        if missing := table.missing():
            raise MissingTargetsError(table, missing)
