"""``TransformersTrainer``: Kubeflow's ``CustomTrainer`` for a training that survives preemption."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kubeflow.trainer.types.types import CustomTrainer

from holdfast.config import Settings, settings_table
from holdfast.errors import ConfigError
from holdfast.kubeflow import patches
from holdfast.kubeflow.payload import carrier
from holdfast.kubeflow.storage import Output, is_name, parse_output

STRATEGIES = ("steps", "epoch", "no")
GRACE_S = 60
_LEAST_GRACE_S = 5
_VARIABLE = re.compile(r"[-._a-zA-Z][-._a-zA-Z0-9]*")
_QUANTITY = re.compile(r"\+?[0-9]+(\.[0-9]*)?([numkMGTPE]|[KMGTPE]i|[eE]\+?[0-9]+)?")
_OURS = ("HOLDFAST_DIR", "CHECKPOINT_URI", "HOLDFAST_TRAINER_ARGUMENTS")
"""Variables that ``output_dir`` and ``periodic_checkpoint_config`` are for."""


@dataclass(kw_only=True)
class PeriodicCheckpointConfig:
    """Saves besides those before a preemption. They take the place of the script's own ``save_strategy``."""

    save_strategy: str = "epoch"
    """``steps``, ``epoch`` or ``no``."""
    save_steps: int | None = None
    """With ``steps``: a save every so many steps."""
    save_total_limit: int | None = None
    """How many checkpoints stay; None: as the script says."""

    def __post_init__(self) -> None:
        if self.save_strategy not in STRATEGIES:
            raise ConfigError(
                f"save_strategy: {self.save_strategy!r} is not accepted; it must be one of {', '.join(STRATEGIES)}"
            )
        _check_count("save_steps", self.save_steps)
        _check_count("save_total_limit", self.save_total_limit)
        if self.save_strategy == "steps" and self.save_steps is None:
            raise ConfigError('save_steps: is missing; save_strategy="steps" needs a whole number, 1 or more')
        if self.save_strategy != "steps" and self.save_steps is not None:
            raise ConfigError(
                f'save_steps: {self.save_steps!r} means something only with save_strategy="steps"; '
                f"save_strategy is {self.save_strategy!r}"
            )

    def arguments(self) -> dict[str, Any]:
        """As ``TrainingArguments`` calls them."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}


class _Environment(dict[str, str]):
    """Variables of a job, which knows those that were made for it."""

    def __init__(self, made: dict[str, str], own: dict[str, str]) -> None:
        super().__init__({**made, **own})
        self.made = made


@dataclass(kw_only=True)
class TransformersTrainer(CustomTrainer):  # type: ignore[misc]
    """Goes through ``TrainerClient().train(trainer=…)``, on Kubernetes and as processes of this machine.

    The training function stays as it is: a ``transformers.Trainer``, or a trainer of TRL, in it saves itself before a
    preemption, goes on from there when the job is started again, and tells its progress. What is wrong with the
    arguments is said here, or by ``train``, before anything is submitted.
    """

    enable_jit_checkpoint: bool | None = None
    """Save before a preemption, and resume. None: yes, where there is an ``output_dir``."""
    output_dir: str | None = None
    """Where checkpoints and the trained model go: ``pvc://claim/path`` (mounted at ``/mnt/kubeflow-checkpoints``),
    ``s3://bucket/prefix``, or a path."""
    periodic_checkpoint_config: PeriodicCheckpointConfig | None = None
    """Saves from time to time as well. None: as the script's ``TrainingArguments`` say."""
    secret_name: str | None = None
    """A secret whose keys are the variables of the object store, such as ``AWS_ACCESS_KEY_ID``."""
    enable_progression_tracking: bool = True
    """Tell the progress, for ``kubectl get trainjob``, :func:`holdfast.kubeflow.progress` and the operator."""
    grace_period_seconds: int = GRACE_S
    """From SIGTERM to SIGKILL, for the save."""
    save_final_model: bool | None = None
    """At the end, write the model to ``final/`` in ``output_dir``, adapters merged. None: yes, where
    ``enable_jit_checkpoint`` is on, without which there is none."""
    output: Output | None = field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        for name in ("enable_jit_checkpoint", "enable_progression_tracking", "save_final_model"):
            value = getattr(self, name)
            if not isinstance(value, bool) and (value is not None or name == "enable_progression_tracking"):
                raise ConfigError(f"{name}: {value!r} is not accepted; it must be True or False")
        _check_count("num_nodes", self.num_nodes)
        for name in ("packages_to_install", "pip_index_urls"):
            _check_texts(name, getattr(self, name))
        if self.packages_to_install and not self.pip_index_urls:
            raise ConfigError("pip_index_urls: is empty; packages_to_install come from the first of them")
        if self.image is not None and (not isinstance(self.image, str) or not self.image.strip()):
            raise ConfigError(f"image: {self.image!r} is not accepted; it must be the name of a container image")
        _check_resources(self.resources_per_node)
        self.output = parse_output(self.output_dir) if self.output_dir is not None else None
        if self.enable_jit_checkpoint is None:
            self.enable_jit_checkpoint = self.output is not None
        if self.enable_jit_checkpoint and self.output is None:
            raise ConfigError("output_dir: is missing; enable_jit_checkpoint=True needs a place for the checkpoints")
        if not self.enable_jit_checkpoint:
            self._check_without_jit()
        config = self.periodic_checkpoint_config
        if config is not None and not isinstance(config, PeriodicCheckpointConfig):
            raise ConfigError(f"periodic_checkpoint_config: {config!r} is not a PeriodicCheckpointConfig")
        if self.secret_name is not None and not is_name(self.secret_name):
            raise ConfigError(
                f"secret_name: {self.secret_name!r} is not accepted; it must be the name of a secret: lower case "
                f"letters, digits, '-' and '.'"
            )
        if self.secret_name is not None and (self.output is None or not self.output.is_object_store):
            raise ConfigError(
                f"secret_name: {self.secret_name!r} means something only with an object store's output_dir"
            )
        grace = self.grace_period_seconds
        if isinstance(grace, bool) or not isinstance(grace, int) or grace < _LEAST_GRACE_S:
            raise ConfigError(
                f"grace_period_seconds: {grace!r} is not accepted; it must be a whole number, {_LEAST_GRACE_S} or more"
            )
        self.env = self._environment()
        patches.install(TransformersTrainer)  # whoever makes no such trainer has the SDK as it is
        func, arguments = vars(self)["func"], vars(self)["func_args"]
        self.func, self.func_args = carrier(func, arguments), None  # the function carries them

    def _check_without_jit(self) -> None:
        if self.output is not None and self.output.is_object_store:
            raise ConfigError(
                f"output_dir: {self.output.text!r} is not accepted with enable_jit_checkpoint=False: transformers then "
                f"saves by itself, to folders alone; it must be pvc://<claim>/<path> or a path"
            )
        if self.save_final_model:
            raise ConfigError(
                "save_final_model: True is not accepted without enable_jit_checkpoint=True and an output_dir"
            )

    def _environment(self) -> dict[str, str]:
        # A copy with other arguments gets other variables, not those that were made before.
        if self.env is not None and not isinstance(self.env, Mapping):
            raise ConfigError(f"env: {self.env!r} is not accepted; it must be a dictionary of names and values")
        made = getattr(self.env, "made", {})
        own = {name: value for name, value in (self.env or {}).items() if made.get(name) != value}
        for name, value in own.items():
            if not isinstance(name, str) or not isinstance(value, str):
                raise ConfigError(f"env[{name!r}]: {value!r} is not accepted; names and values of variables are texts")
            if not _VARIABLE.fullmatch(name):
                raise ConfigError(f"env: {name!r} is not accepted; it must be the name of a variable, such as MY_VALUE")
        self._check_switches(own)
        given = {name for name in _OURS if name in own}
        if given and self.output is not None and not self._is_made(own):
            raise ConfigError(f"env[{sorted(given)[0]!r}]: output_dir says where checkpoints go; give one of the two")
        return _Environment(self._variables(), own)

    def _check_switches(self, own: dict[str, str]) -> None:
        """Raises ConfigError for variables that say something else than the arguments."""
        for key, setting in settings_table().items():
            for name in setting.env:
                if not own.get(name):
                    continue
                try:
                    value = setting.parse(own[name])
                except (ValueError, TypeError) as error:
                    raise ConfigError(f"env[{name!r}]: {own[name]!r} is not accepted; it must be {error}") from None
                if key == "grace_period" and value > self.grace_period_seconds:
                    raise ConfigError(
                        f"env[{name!r}]: {own[name]!r} is longer than grace_period_seconds, which is "
                        f"{self.grace_period_seconds}: SIGKILL would come first; give it as grace_period_seconds"
                    )
                if key == "kill_wait" and value >= self.grace_period_seconds:
                    raise ConfigError(
                        f"env[{name!r}]: {own[name]!r} leaves no time for a save; it must be shorter than "
                        f"grace_period_seconds, which is {self.grace_period_seconds}"
                    )
                if key in ("enabled", "checkpointing") and self.enable_jit_checkpoint and not value:
                    raise ConfigError(
                        f"env[{name!r}]: {own[name]!r} contradicts enable_jit_checkpoint=True; leave it out, or give "
                        f"enable_jit_checkpoint=False"
                    )
        try:
            Settings.load(own)
        except ConfigError as error:  # of several that do not go together
            raise ConfigError(f"env: {error}") from None

    def _is_made(self, own: dict[str, str]) -> bool:
        """Whether the variables are those of a trainer with the same arguments."""
        made = self._variables()
        return all(own.get(name) == made.get(name) for name in _OURS if name in own)

    def _variables(self) -> dict[str, str]:
        arguments: dict[str, Any] = {}
        if self.periodic_checkpoint_config is not None:
            arguments |= self.periodic_checkpoint_config.arguments()
        if self.output is not None and not self.output.is_object_store:
            arguments["output_dir"] = self.output.location()
        if not self.enable_jit_checkpoint and not self.enable_progression_tracking and not arguments:
            return {"HOLDFAST_ENABLED": "0"}
        variables = {"HOLDFAST_ENABLED": "1"}
        if arguments:
            variables["HOLDFAST_TRAINER_ARGUMENTS"] = json.dumps(arguments)
        if not self.enable_jit_checkpoint:
            variables["CHECKPOINT_ENABLED"] = "false"
        elif self.save_final_model is not False:
            variables["HOLDFAST_FINAL_MODEL"] = "1"
        if not self.enable_progression_tracking:
            variables["HOLDFAST_PROGRESS"] = "0"
        return variables

    def checkpointing(self) -> dict[str, Any]:
        """The block ``spec.checkpointing`` that says the same, for a TrainJob."""
        block: dict[str, Any] = {
            "enabled": bool(self.enable_jit_checkpoint),
            "gracePeriodSeconds": self.grace_period_seconds,
        }
        if self.output is not None:
            block["storage"] = self.output.block(self.secret_name)
        return block


def _check_count(name: str, value: Any) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ConfigError(f"{name}: {value!r} is not accepted; it must be a whole number, 1 or more")


def _check_texts(name: str, value: Any) -> None:
    if value is None:
        return
    if not isinstance(value, list | tuple) or not all(isinstance(one, str) and one.strip() for one in value):
        raise ConfigError(f"{name}: {value!r} is not accepted; it must be a list of texts")


def _check_resources(value: Any) -> None:
    if value is None:
        return
    if not isinstance(value, Mapping):
        raise ConfigError(f'resources_per_node: {value!r} is not accepted; it must be such as {{"cpu": 4, "gpu": 1}}')
    for name, amount in value.items():
        if not isinstance(name, str) or isinstance(amount, bool) or not _QUANTITY.fullmatch(str(amount)):
            raise ConfigError(
                f"resources_per_node[{name!r}]: {amount!r} is not accepted; it must be an amount, such as 4 or '16Gi'"
            )
