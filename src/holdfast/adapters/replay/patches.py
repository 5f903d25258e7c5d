"""The tables of plain loops: what is replaced and read in torch, in Python's library, in torchdata and in safetensors.

Nothing is in place for the life of the process. Each scope begins when it is needed and is taken back after it:

- ``script``: from the import of torch on, in the process that runs a script and in those that it starts.
- ``child process``: in a process of :mod:`multiprocessing`, whose script is a function.
- ``follow``: while a :class:`~holdfast.adapters.replay.follower.Follower` follows.
- ``first call``: from the making of an optimizer to the first training act.
- ``by hand``: in the first backward passes, until the loop is followed.
- ``read``: while the loop runs, from its first training act on.
- ``files``: while a follower follows, from the start of the script on; ``look``: while there is a layer over the files.
- ``replay``, ``answer``: while modules answer without computing; ``alone``: while one of them computes its answer.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

from _holdfast_startup import required
from holdfast.base.patching import MissingTargetsError, Patch, PatchSet, Reads
from holdfast.errors import UnprotectedError

TENSOR_READS = ("item", "tolist", "numpy", "__float__", "__int__", "__bool__", "__index__", "__repr__")
"""Methods of a tensor that give its values, or their text, to the script."""

_FOLLOW = "follow"
_SCHEDULERS = ("LRScheduler", "ReduceLROnPlateau", "SequentialLR", "ChainedScheduler")
"""Those that do not leave their making to another."""

_OPENS_BY_ITSELF = "it opens files by itself, where Python does not see it"

TORCH = PatchSet(
    framework="torch",
    oldest="2.6",
    newest="2.13.0",
    patches=(
        *(
            Patch(
                target=f"torch.nn.modules.module:Module.{name}",
                wrap="module_made",
                why="modules in the order of their making",
                scope=_FOLLOW,
                direct=True,
            )
            for name in ("__init__", "__setstate__")
        ),
        Patch(
            target="torch.nn.parallel.distributed:DistributedDataParallel.__init__",
            wrap="ddp_made",
            why="all ranks are here together",
            scope=_FOLLOW,
            direct=True,
        ),
        Patch(
            target="torch.optim.optimizer:Optimizer.__init__",
            wrap="optimizer_made",
            why="optimizers in the order of their making",
            scope=_FOLLOW,
            direct=True,
        ),
        *(
            Patch(
                target=f"torch.optim.lr_scheduler:{name}.__init__",
                wrap="scheduler_made",
                why="schedulers in the order of their making",
                scope=_FOLLOW,
                direct=True,
            )
            for name in _SCHEDULERS
        ),
        Patch(
            target="torch.amp.grad_scaler:GradScaler.__init__",
            wrap="scaler_made",
            why="scalers in the order of their making",
            scope=_FOLLOW,
            direct=True,
        ),
        Patch(
            target="torch.amp.grad_scaler:GradScaler.step",
            wrap="scaler_step",
            why="a step that a scaler skips counts too",
            scope=_FOLLOW,
            direct=True,
        ),
        Patch(
            target="torch.amp.grad_scaler:GradScaler.update",
            wrap="scaler_update",
            why="a step with a scaler is complete here",
            scope=_FOLLOW,
            direct=True,
        ),
        *(
            Patch(
                target=f"{module}:load",
                wrap="load",
                why="a script that loads a checkpoint of its own cannot be replayed",
                scope=_FOLLOW,
                direct=True,
            )
            for module in ("torch", "torch.serialization")
        ),
        Patch(
            target="torch.utils.data.dataloader:DataLoader.__iter__",
            wrap="iterate",
            why="passes over loaders",
            scope=_FOLLOW,
            direct=True,
        ),
        Patch(
            target="torch.nn.modules.module:Module.__call__",
            wrap="first_call",
            why="the loop begins",
            scope="first call",
            direct=True,
        ),
        Patch(
            target="torch.nn.utils.stateless:_functional_call",
            wrap="first_functional_call",
            why="the loop begins",
            scope="first call",
        ),
        Patch(
            target="torch.autograd:backward",
            wrap="backward",
            why="training without an optimizer is reported",
            scope="by hand",
        ),
        Patch(
            target="torch.autograd:grad",
            wrap="grad_by_hand",
            why="training without an optimizer is reported",
            scope="by hand",
        ),
        *(
            Patch(
                target=f"torch._tensor:Tensor.{name}",
                wrap=name,
                why="a replay gives the script the values that it read",
                scope="read",
                direct=True,
            )
            for name in TENSOR_READS
        ),
        Patch(
            target="torch.nn.modules.module:Module.__call__",
            wrap="call",
            why="a replay computes nothing",
            scope="answer",
            direct=True,
        ),
        Patch(
            target="torch.nn.utils.stateless:_functional_call",
            wrap="functional_call",
            why="a module that is given its parameters leads backward to them",
            scope="answer",
        ),
        Patch(
            target="torch.autograd:grad",
            wrap="grad",
            why="what leads through an answer is zero",
            scope="replay",
        ),
        *(
            Patch(
                target=f"{module}:save",
                wrap="save",
                why=_OPENS_BY_ITSELF,
                scope="files",
                direct=True,
            )
            for module in ("torch", "torch.serialization")
        ),
        Patch(
            target="torch.jit._script:RecursiveScriptModule.save",
            wrap="save_module",
            why=_OPENS_BY_ITSELF,
            scope="files",
            direct=True,
        ),
        Patch(
            target="torch.nn.modules.batchnorm:SyncBatchNorm.forward",
            wrap="forward_alone",
            why="a rank computes an answer without the others",
            scope="alone",
        ),
        Patch(
            target="torch.nn.modules.batchnorm:BatchNorm2d._check_input_dim",
            wrap="check_nothing",
            why="SyncBatchNorm takes inputs of any dimension",
            scope="alone",
        ),
    ),
    reads=(
        Reads("torch.nn.modules.module:Module._modules"),
        Reads("torch.nn.modules.module:Module._parameters"),
        Reads("torch.nn.modules.module:Module._buffers"),
        Reads("torch._tensor:Tensor._version"),
        Reads("torch._tensor:Tensor._backward_hooks"),
        Reads("torch._tensor:Tensor._post_accumulate_grad_hooks"),
        Reads("torch.autograd:Variable._execution_engine"),
        Reads("torch._C:_are_functorch_transforms_active"),
        Reads("torch.amp.grad_scaler:_refresh_per_optimizer_state"),
        Reads("torch.amp.grad_scaler:GradScaler._per_optimizer_states"),
        Reads("torch.utils.data.dataloader:DataLoader._get_iterator"),
        Reads("torch.utils.data.dataloader:DataLoader._auto_collation"),
        Reads("torch.utils.data.dataloader:DataLoader._index_sampler"),
        Reads("torch.utils.data.dataloader:DataLoader._iterator"),
        Reads("torch.utils.data.dataloader:DataLoader._DataLoader__multiprocessing_context"),
        Reads("torch._dynamo.eval_frame:skip_code", loaded=True),
        Reads("torch._dynamo.eval_frame:OptimizedModule._orig_mod", loaded=True),
    ),
)

PYTHON = PatchSet(
    framework="python",
    oldest="3.11",
    newest="3.11",
    patches=(
        Patch(target="sys:exit", wrap="exit", why="the code that the script ends with", scope="script"),
        Patch(
            target="warnings:_showwarnmsg",
            wrap="show_warning",
            why="a warning names the script's line, as without holdfast",
            scope="script",
            required=False,
            direct=True,
        ),
        Patch(
            target="multiprocessing.process:BaseProcess.start",
            wrap="start",
            why="processes learn where the run of their script is, and get its notices",
            scope="script",
            direct=True,
        ),
        Patch(
            target="multiprocessing.process:BaseProcess._bootstrap",
            wrap="bootstrap",
            why="a process learns whose run it works on before its function runs",
            scope="script",
            direct=True,
        ),
        Patch(
            target="multiprocessing.process:BaseProcess.run",
            wrap="run",
            why="how the function of a child process ended",
            scope="child process",
            direct=True,
        ),
    ),
    reads=(
        Reads("threading:_register_atexit"),
        Reads("multiprocessing.process:BaseProcess._config"),
        Reads("multiprocessing.process:BaseProcess._target"),
        Reads("multiprocessing.process:BaseProcess._args"),
        Reads("multiprocessing.process:BaseProcess._kwargs"),
        Reads("multiprocessing.process:BaseProcess._parent_pid"),
        Reads("sys:_getframe"),
        Reads("sys:_current_frames"),
    ),
)

TORCHDATA = PatchSet(
    framework="torchdata",
    oldest="0.10",
    newest="0.11.0",
    patches=(
        Patch(
            target="torchdata.stateful_dataloader:StatefulDataLoader.__iter__",
            wrap="iterate",
            why="passes over loaders",
            scope=_FOLLOW,
            loaded=True,
            direct=True,
        ),
    ),
)

SAFETENSORS = PatchSet(
    framework="safetensors",
    oldest="0.5",
    newest="0.8.0",
    patches=(
        Patch(
            target="safetensors.torch:serialize_file",
            wrap="serialize_file",
            why=_OPENS_BY_ITSELF,
            scope="files",
            loaded=True,
            direct=True,
        ),
        Patch(
            target="safetensors.torch:safe_open",
            wrap="safe_open",
            why=_OPENS_BY_ITSELF,
            scope="files",
            loaded=True,
            direct=True,
        ),
    ),
)

_CHANGES = (
    ("builtins:open", "open"),
    ("io:open", "open"),
    ("os:open", "os_open"),
    ("os:remove", "unlink"),
    ("os:unlink", "unlink"),
    ("os:rmdir", "rmdir"),
    ("os:mkdir", "mkdir"),
    ("os:rename", "rename"),
    ("os:replace", "rename"),
    ("os:link", "link"),
    ("os:symlink", "symlink"),
    ("os:truncate", "truncate"),
)
_LOOKS = (
    ("os:stat", "stat"),
    ("os:lstat", "lstat"),
    ("os:readlink", "readlink"),
    ("os:access", "access"),
    ("os:listdir", "listdir"),
    ("os:scandir", "scandir"),
    ("os:chmod", "change_attributes"),
    ("os:utime", "change_attributes"),
    ("os:chown", "change_attributes"),
    ("os:setxattr", "change_attributes"),
    ("os:removexattr", "change_attributes"),
    ("os:listxattr", "attributes"),
    ("os:getxattr", "attributes"),
)

FILES = PatchSet(
    framework="python",
    oldest="3.11",
    newest="3.11",
    patches=(
        *(
            Patch(
                target=name,
                wrap=wrap,
                why="changes of files",
                scope="files",
                direct=True,
                imported=True,
                required=False,
            )
            for name, wrap in _CHANGES
        ),
        *(
            Patch(
                target=name,
                wrap=wrap,
                why="a look into the layer",
                scope="look",
                direct=True,
                imported=True,
                required=False,
            )
            for name, wrap in _LOOKS
        ),
        Patch(
            target="shutil:_use_fd_functions",
            wrap="by_path",
            why="files of a layer have no folder that can be opened",
            scope="look",
            direct=True,
        ),
    ),
)
"""What changes files and looks at them in Python's library."""

TABLES = (TORCH, PYTHON, FILES, TORCHDATA, SAFETENSORS)


def check() -> None:
    """Raise MissingTargetsError if a name is missing that a loop needs to be followed and replayed."""
    for table in TABLES:
        if missing := table.missing():
            raise MissingTargetsError(table, missing)


def install(module: ModuleType) -> None:
    """Follow the script of this process if nobody else does. ``module``: torch."""
    try:
        check()
    except MissingTargetsError as error:
        if not required():
            raise
        # Frameworks with an adapter of their own, and holdfast.Run, are protected all the same.
        _module("refusal").refuse_steps(
            UnprotectedError(f"{error}. HOLDFAST_ENABLED=require refuses to train unprotected")
        )
        return
    _module("script").follow_script()


def _module(name: str) -> Any:
    """A module of this package, none of which is imported before the table is known to fit."""
    return importlib.import_module(f"holdfast.adapters.replay.{name}")
