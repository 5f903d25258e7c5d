"""``spec.checkpointing``: parsed, checked, and as the environment of a training container.

The same block comes as a field of a TrainJob, where the API server has checked it against :mod:`.schema`, or as an
annotation, where nobody has. So everything is checked here again, with the same words.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from holdfast.config import Settings, parse_duration
from holdfast.errors import ConfigError
from holdfast.operator.names import CHECKPOINTING, PROGRESS_FILE

SCHEMES = ("s3", "gs", "az")
ACCESS_MODES = ("ReadWriteOnce", "ReadWriteMany", "ReadWriteOncePod")
FALLBACK_PATH = "/mnt/holdfast-fallback"
"""Where a fallback claim is mounted that does not say where."""
GRACE_S = 60
LEAVE_S = 2
"""Between the end of a save and SIGKILL, for the way out of the container."""
STRATEGIES = ("epoch", "steps", "time")
SAVE_TYPES = ("full", "incremental")

_NAME = re.compile(r"(?=.{1,253}$)[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_QUANTITY = re.compile(r"(?=.*[1-9])[0-9]{1,15}(\.[0-9]{1,9})?(Ki|Mi|Gi|Ti|Pi|k|M|G|T|P)?")
_LONGEST, _DEEPEST = 32768, 16
"""Characters and levels of a block in an annotation: the webhook answers nobody else while it reads one."""
_TOGETHER = ("HOLDFAST_SAVE_EVERY", "CHECKPOINT_INTERVAL", "CHECKPOINT_STRATEGY")
"""Variables that only make sense together."""
_MOST = 2**31 - 1
"""What the API server's ``int32`` holds."""


class SpecError(ConfigError):
    """A field of the block has a value that is not accepted. The message names field, value and what is accepted."""


@dataclass(frozen=True, slots=True)
class Volume:
    """A claim and where it is mounted."""

    claim: str
    path: str
    size: str | None = None
    """Make the claim, of this size, if it is not there."""
    storage_class: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpointing:
    """What a job asks for."""

    enabled: bool = True
    interval: str | None = None
    max_checkpoints: int | None = None
    resume: bool = True
    uri: str | None = None
    access_mode: str = "ReadWriteOnce"
    volume: Volume | None = None
    fallback: Volume | None = None
    secret: str | None = None
    grace_s: int = GRACE_S
    env: list[dict[str, Any]] = field(default_factory=list)
    where: str = field(default="spec.checkpointing", compare=False)
    """What messages call the block."""

    @property
    def location(self) -> str | None:
        """Where checkpoints go first."""
        return self.uri or (self.volume.path if self.volume else None)

    @property
    def env_names(self) -> set[str]:
        return {variable["name"] for variable in self.env}

    @property
    def volumes(self) -> list[Volume]:
        return [volume for volume in (self.volume, self.fallback) if volume is not None]

    def variables(self, run_id: dict[str, Any] | None = None) -> list[dict[str, Any]]:
        """For every training container. ``run_id``: where a container finds the name that its restarts share.

        What the block's own ``env`` says comes last and wins.
        """
        given: dict[str, Any] = {
            "HOLDFAST_ENABLED": "1",
            "TRAINING_PROGRESS_FILE": PROGRESS_FILE,
            "HOLDFAST_TERMINATION_LOG": "/dev/termination-log",
            "CHECKPOINT_ENABLED": "true" if self.enabled else "false",
            "HOLDFAST_GRACE_PERIOD": str(max(1, self.grace_s - LEAVE_S)),
            "PET_SHUTDOWN_TIMEOUT": str(self.grace_s),
        }
        if self.interval is not None:
            given["CHECKPOINT_INTERVAL"] = self.interval
        if self.enabled:
            fallback = self.fallback.path if self.fallback else None
            if self.uri and _scheme(self.uri) in SCHEMES and self.volume and not self.fallback:
                fallback = self.volume.path
            optional = {
                "CHECKPOINT_URI": self.location,
                "CHECKPOINT_MAX_CHECKPOINTS": None if self.max_checkpoints is None else str(self.max_checkpoints),
                # Not "never": pods that are started again have the same variables, and go on from what the job saved.
                "CHECKPOINT_RESUME": "auto" if self.resume else "own",
                "CHECKPOINT_FALLBACK_URI": fallback,
            }
            given |= {name: value for name, value in optional.items() if value is not None}
        own = {variable["name"]: variable for variable in self.env}
        variables = [{"name": name, "value": value} for name, value in given.items() if name not in own]
        if run_id is not None and "HOLDFAST_RUN_ID" not in own:
            variables.append({"name": "HOLDFAST_RUN_ID", "valueFrom": run_id})
        return [*variables, *own.values()]

    def check(self, variables: list[dict[str, Any]]) -> None:
        """Raises :class:`SpecError` if the training would not start with these variables of its container.

        Those that the block makes, and those that the job itself has beside it: what is wrong with them is better said
        to whoever creates the job than by each of its pods.
        """
        environ = {one["name"]: one["value"] for one in variables if one.get("value") and "$(" not in one["value"]}
        unknown = {one["name"] for one in variables} - environ.keys()
        if unknown & set(_TOGETHER):
            environ = {name: value for name, value in environ.items() if name not in _TOGETHER}
        if any(one["name"] == "HOLDFAST_RUN_ID" and one.get("valueFrom") for one in variables):
            environ["HOLDFAST_RUN_ID"] = "known to the pod"
        try:
            if environ.get("HOLDFAST_ENABLED", "").strip().lower() not in ("0", "false", "no", "off"):
                Settings.load(environ)
        except ConfigError as error:
            raise SpecError(self._said(str(error))) from None

    def _said(self, text: str) -> str:
        """What the training says of a variable, with the field that it comes from."""
        text = re.sub(r"://[^/'\s]*@", "://***@", text)
        name, _, rest = text.partition("=")
        places = {one["name"]: f"{self.where}.env[{index}] {one['name']}" for index, one in enumerate(self.env)}
        if "CHECKPOINT_INTERVAL" not in places:
            rest = rest.replace("CHECKPOINT_INTERVAL", f"{self.where}.interval")
        if name == "CHECKPOINT_INTERVAL":
            return f"{places.get(name, f'{self.where}.interval')}: {rest}"
        return f"{places.get(name, f'variable {name}')}: {rest}"

    @property
    def progress_file(self) -> str:
        """Where the containers write it."""
        found = [one.get("value") for one in self.env if one["name"] == "TRAINING_PROGRESS_FILE"]
        return str(found[0]) if found and found[0] else PROGRESS_FILE


def from_annotations(annotations: Mapping[str, str]) -> Checkpointing | None:
    """The block that an object without the field carries as an annotation; None if it carries none."""
    text = annotations.get(CHECKPOINTING)
    if text is None:
        return None
    where = f"annotation {CHECKPOINTING}"
    if text.strip().lower() in ("true", "false"):
        return Checkpointing(enabled=text.strip().lower() == "true", where=where)
    try:
        block = _load(text)
    except Exception:  # of any kind: the YAML of others makes the parser raise more than its own errors
        raise SpecError(
            f"{where}: {_without_credentials(text)[:20]!r}… is neither JSON nor YAML without aliases, "
            f"of at most {_LONGEST} characters; accepted is a block such as "
            '{"interval": "5m", "storage": {"uri": "s3://bucket/prefix"}}'
        ) from None
    return parse(block, where)


def _load(text: str) -> Any:
    if len(text) > _LONGEST:
        raise ValueError("too long")
    if text.lstrip().startswith("{"):
        try:
            return json.loads(text)
        except ValueError:
            pass  # YAML has braces too
    # A few lines of aliases stand for more than any memory holds, and each level costs the parser more than the last.
    depth = 0
    for event in yaml.parse(text, yaml.SafeLoader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if isinstance(event, yaml.AliasEvent) or depth > _DEEPEST:
            raise ValueError("an alias, or too deep")
    return yaml.safe_load(text)


def parse(block: Any, where: str = "spec.checkpointing") -> Checkpointing:
    """The block, checked; raises :class:`SpecError` for the first field that is not accepted."""
    known = {"enabled", "interval", "maxCheckpoints", "resumeFromCheckpoint", "storage", "gracePeriodSeconds", "env"}
    block = _object(block, where, known | {"persistentVolume"})
    storage = _object(
        _given(block, "storage", {}),
        f"{where}.storage",
        {"uri", "accessMode", "persistentVolume", "secretRef", "fallback"},
    )
    uri = _take(storage, "uri", f"{where}.storage", _uri)
    volume = _volume(storage.get("persistentVolume"), f"{where}.storage.persistentVolume")
    fallback_block = _object(_given(storage, "fallback", {}), f"{where}.storage.fallback", {"persistentVolume"})
    fallback = _volume(
        fallback_block.get("persistentVolume"), f"{where}.storage.fallback.persistentVolume", FALLBACK_PATH
    )
    beside = _volume(block.get("persistentVolume"), f"{where}.persistentVolume", FALLBACK_PATH)
    if fallback and beside:
        raise SpecError(
            f"{where}.persistentVolume: is a second fallback beside {where}.storage.fallback; accepted is one of them"
        )
    fallback = fallback or beside
    if volume is None and uri is None:
        volume, fallback = fallback, None
    if volume and fallback and volume.path == fallback.path:
        raise SpecError(
            f"{where}{'' if beside else '.storage.fallback'}.persistentVolume.mountPath: {fallback.path!r} is the "
            f"mount path of the first claim too; accepted is another one"
        )
    if uri and uri.startswith("/") and volume and not _below(uri, volume.path):
        raise SpecError(
            f"{where}.storage.uri: {uri!r} does not lie on the claim, which is mounted at {volume.path!r}; accepted "
            f"is a path below that, or none"
        )
    secret = _object(_given(storage, "secretRef", {}), f"{where}.storage.secretRef", {"name"})
    if storage.get("secretRef") is not None and secret.get("name") is None:
        raise SpecError(f"{where}.storage.secretRef.name: is missing; it must be the name of a secret")
    return Checkpointing(
        enabled=_take(block, "enabled", where, _bool, True),
        interval=_take(block, "interval", where, _interval),
        max_checkpoints=_take(block, "maxCheckpoints", where, _at_least(1)),
        resume=_take(block, "resumeFromCheckpoint", where, _bool, True),
        uri=uri,
        access_mode=_take(storage, "accessMode", f"{where}.storage", _one_of(*ACCESS_MODES), "ReadWriteOnce"),
        volume=volume,
        fallback=fallback,
        secret=_take(secret, "name", f"{where}.storage.secretRef", _name),
        grace_s=_take(block, "gracePeriodSeconds", where, _at_least(5), GRACE_S),
        env=_env(_given(block, "env", []), f"{where}.env"),
        where=where,
    )


# ---------------------------------------------------------------------- one kind of value each


def _wrong(where: str, value: Any, accepted: str) -> SpecError:
    shown = type(value).__name__
    if isinstance(value, str):
        shown = json.dumps(_without_credentials(value))
    elif isinstance(value, float | bool) or value is None or (isinstance(value, int) and abs(value) < 2**64):
        shown = json.dumps(value)
    return SpecError(f"{where}: {shown[:120]} is not accepted; it must be {accepted}")


def _without_credentials(text: str) -> str:
    scheme, _, rest = text.partition("://")
    return f"{scheme}://***@{rest.rpartition('@')[2]}" if "@" in rest else text


def _given(block: dict[str, Any], name: str, default: Any) -> Any:
    value = block.get(name)
    return default if value is None else value


def _object(value: Any, where: str, known: set[str]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _wrong(where, value, f"an object with some of {', '.join(sorted(known))}")
    for name in value:
        if name not in known:
            raise SpecError(f"{where}.{name}: is not known; accepted are {', '.join(sorted(known))}")
    return value


def _take(block: dict[str, Any], name: str, where: str, check: Callable[[Any], Any], default: Any = None) -> Any:
    value = block.get(name)
    if value is None:
        return default
    try:
        return check(value)
    except ValueError as error:
        raise _wrong(f"{where}.{name}", value, str(error)) from None


def _bool(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("true or false")
    return value


def _interval(value: Any) -> str:
    accepted = "a duration such as 30s, 5m or 1h30m, or a number of steps or epochs such as '500 steps' or '1 epoch'"
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise ValueError(accepted)
    text = str(value).strip()
    if len(text) > 32:
        raise ValueError(accepted)
    if re.fullmatch(r"[1-9][0-9]*( ?(steps?|epochs?))?", text):
        return text
    try:
        seconds = parse_duration(text)
    except ValueError:
        seconds = 0.0
    if seconds <= 0:
        raise ValueError(accepted)
    return text


def _at_least(least: int) -> Callable[[Any], int]:
    def check(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= _MOST:
            raise ValueError(f"a whole number, {least} or more, up to {_MOST}")
        return value

    return check


def _one_of(*names: str) -> Callable[[Any], str]:
    def check(value: Any) -> str:
        if value not in names:
            raise ValueError(f"one of {', '.join(names)}")
        return str(value)

    return check


def _name(value: Any) -> str:
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise ValueError("the name of a Kubernetes object: lower case letters, digits, '-' and '.'")
    return value


def _path(value: Any) -> str:
    if not isinstance(value, str) or not value.startswith("/") or not value.strip("/") or len(value) > 1024:
        raise ValueError("an absolute path other than /, without ':' and '..'")
    if ":" in value or ".." in value or any(ord(letter) < 32 for letter in value):
        raise ValueError("an absolute path other than /, without ':' and '..'")
    return value.rstrip("/")


def _scheme(uri: str) -> str:
    return uri.split("://", 1)[0] if "://" in uri else ""


def _uri(value: Any) -> str:
    accepted = f"{', '.join(f'{scheme}://bucket/prefix' for scheme in SCHEMES)}, or an absolute path"
    if not isinstance(value, str) or len(value) > 1024 or any(ord(letter) <= 32 for letter in value):
        raise ValueError(accepted)
    if value.startswith("/") and ".." not in value:
        return value.rstrip("/") or "/"
    if _scheme(value) not in SCHEMES or not re.match(r"[^/]", value.split("://", 1)[1]) or "@" in value:
        raise ValueError(f"{accepted} (credentials come from storage.secretRef)" if "@" in value else accepted)
    return value


def _volume(block: Any, where: str, default_path: str | None = None) -> Volume | None:
    if block is None:
        return None
    block = _object(block, where, {"claimName", "mountPath", "size", "storageClassName"})
    claim = _take(block, "claimName", where, _name)
    if claim is None:
        raise SpecError(f"{where}.claimName: is missing; it must be the name of a claim in the job's namespace")
    path = _take(block, "mountPath", where, _path, default_path)
    if path is None:
        raise SpecError(f"{where}.mountPath: is missing; it must be the path at which the claim is mounted")
    size = _take(block, "size", where, _quantity)
    return Volume(claim, path, size, _take(block, "storageClassName", where, _name))


def _below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder + "/")


def _quantity(value: Any) -> str:
    if not isinstance(value, str) or not _QUANTITY.fullmatch(value):
        raise ValueError("a quantity such as 10Gi")
    return value


def _env(items: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(items, list):
        raise _wrong(where, items, "a list of variables, each with name and value or valueFrom")
    checks: dict[str, Callable[[Any], Any]] = {
        "CHECKPOINT_STRATEGY": _one_of(*STRATEGIES),
        "CHECKPOINT_SAVE_TYPE": _one_of(*SAVE_TYPES),
        "PROGRESS_UPDATE_FREQUENCY": _positive_text,
        "TRAINING_PROGRESS_FILE": _path,
    }
    for index, item in enumerate(items):
        item = _object(item, f"{where}[{index}]", {"name", "value", "valueFrom"})
        name = item.get("name")
        if not isinstance(name, str) or not _VARIABLE.fullmatch(name):
            raise _wrong(f"{where}[{index}].name", name, "the name of an environment variable")
        value = item.get("value")
        if value is not None and not isinstance(value, str):
            raise _wrong(f"{where}[{index}].value", value, "a text; put numbers in quotes")
        source = item.get("valueFrom")
        if source is not None and (not isinstance(source, dict) or value):
            raise _wrong(f"{where}[{index}].valueFrom", source, "an object, and there must be no value beside it")
        if name in checks and value is not None:
            try:
                checks[name](value)
            except ValueError as error:
                raise SpecError(f"{where}[{index}] {name}: {value!r} is not accepted; it must be {error}") from None
    return list(items)


def _positive_text(value: str) -> None:
    if not re.fullmatch(r"[1-9][0-9]*", value):
        raise ValueError("a whole number of steps, 1 or more")
