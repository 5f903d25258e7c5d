"""Every setting, in one table: its name, environment variables, type, default, unit and meaning.

A value is taken from the caller's argument, else from the first environment variable of the setting
that is set, else from the default. Everything is parsed once, at start; a wrong value raises
:class:`~holdfast.errors.ConfigError` that names the variable, the value and what is accepted.
``docs/settings.md`` is generated from this table.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from holdfast.errors import ConfigError
from holdfast.locations import redacted, without_secrets

STOP_AT = "_HOLDFAST_STOP_AT"
"""Variable of ``holdfast check`` alone: the step at which its notice comes."""

_TRUE, _FALSE = {"1", "true", "yes", "on"}, {"0", "false", "no", "off"}
_DURATION = re.compile(r"(?:(\d+(?:\.\d+)?)d)?(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s)?")
_EVERY = re.compile(r"(\d+)\s*(steps?|epochs?)")


@dataclass(frozen=True, slots=True)
class Every:
    """How often to save: after so many steps, epochs, or seconds since the last commit. All None: never."""

    steps: int | None = None
    epochs: int | None = None
    seconds: float | None = None

    def __str__(self) -> str:
        if self.steps:
            return f"{self.steps} steps"
        if self.epochs:
            return f"{self.epochs} epochs"
        return f"{self.seconds:g}s" if self.seconds else "never"


NEVER = Every()


def parse_bool(value: Any) -> bool:
    """``1/true/yes/on`` or ``0/false/no/off``, in any case."""
    if isinstance(value, bool):
        return value
    text = str(value).strip().lower()
    if text in _TRUE or text in _FALSE:
        return text in _TRUE
    raise ValueError("1/true/yes/on or 0/false/no/off")


def parse_enabled(value: Any) -> bool:
    """As :func:`parse_bool`; ``require`` is on too, and refuses to train unprotected."""
    try:
        return str(value).strip().lower() == "require" or parse_bool(value)
    except ValueError as error:
        raise ValueError(f"{error}, or require") from None


def parse_duration(value: Any) -> float:
    """Seconds: a number, or text such as ``90s``, ``5m``, ``1h30m``, ``2d``."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        seconds = float(value)
    else:
        text = str(value).strip().lower()
        match = _DURATION.fullmatch(text.replace(" ", ""))
        if match and text:
            factors = (86400, 3600, 60, 1)
            seconds = sum(float(n) * factor for n, factor in zip(match.groups(), factors, strict=True) if n)
        else:
            try:
                seconds = float(text)
            except ValueError:
                raise ValueError("a number of seconds, or a duration such as 90s, 5m, 1h30m") from None
    if not 0 <= seconds < 1e9:
        raise ValueError("a duration of 0 seconds or more")
    return seconds


def parse_every(value: Any) -> Every:
    """``500 steps``, ``1 epoch``, ``5m``, a whole number (steps), or ``never``."""
    if isinstance(value, Every):
        return value
    if value is None or str(value).strip().lower() in ("never", "no", "none", ""):
        return Every()
    if isinstance(value, int) and not isinstance(value, bool):
        if value < 1:
            raise ValueError("at least 1 step")
        return Every(steps=value)
    text = str(value).strip().lower()
    if match := _EVERY.fullmatch(text):
        count = int(match[1])
        if count < 1:
            raise ValueError("at least 1 step or epoch")
        return Every(steps=count) if match[2].startswith("step") else Every(epochs=count)
    if text.isdigit():
        return parse_every(int(text))
    try:
        seconds = parse_duration(text)
    except ValueError:
        seconds = 0.0
    if seconds <= 0:
        raise ValueError("'500 steps', '1 epoch', a duration such as '5m', a number of steps, or 'never'")
    return Every(seconds=seconds)


def parse_signals(value: Any) -> tuple[signal.Signals, ...]:
    """Signal names or numbers separated by commas."""
    found: list[signal.Signals] = []
    items = value if isinstance(value, tuple | list) else str(value).split(",")
    accepted = "names or numbers of signals that can be caught, separated by commas, such as TERM,USR1"
    for item in items:
        try:
            if isinstance(item, int):
                one = signal.Signals(item)
            else:
                text = str(item).strip().upper()
                one = signal.Signals(int(text)) if text.isdigit() else signal.Signals["SIG" + text.removeprefix("SIG")]
        except (KeyError, ValueError):
            raise ValueError(accepted) from None
        if one in (signal.SIGKILL, signal.SIGSTOP):
            raise ValueError(f"{accepted} ({one.name} never reaches a program)")
        if one in (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL):
            raise ValueError(f"{accepted} ({one.name} reports a fault of the program)")
        if one not in found:
            found.append(one)
    if not found:
        raise ValueError(accepted)
    return tuple(found)


def _count(minimum: int) -> Callable[[Any], int]:
    def parse(value: Any) -> int:
        try:
            number = int(str(value).strip()) if not isinstance(value, bool) else -1
        except ValueError:
            number = minimum - 1
        if number < minimum:
            raise ValueError(f"a whole number of at least {minimum}")
        return number

    return parse


def _one_of(*choices: str) -> Callable[[Any], str]:
    def parse(value: Any) -> str:
        text = str(value).strip().lower()
        if text not in choices:
            raise ValueError(" or ".join(choices))
        return text

    return parse


def _text(value: Any) -> str:
    text = os.fspath(value) if not isinstance(value, str) else value
    if not text or "\0" in text:
        raise ValueError("a text that is not empty")
    return text


def _name(value: Any) -> str:
    text = _text(value)
    if len(text) > 500 or not text.isprintable():  # manifests refuse what is longer, or does something to a terminal
        raise ValueError("a text of at most 500 characters, without control characters")
    return text


def _http_url(value: Any) -> str:
    text = _text(value)
    scheme, _, rest = text.partition("://")
    if scheme not in ("http", "https") or not rest.strip("/") or "@" in rest.split("/")[0]:
        raise ValueError("an address such as https://host:port/path, without credentials")
    return text


def _trainer_arguments(value: Any) -> dict[str, Any]:
    kinds: dict[str, type] = {"output_dir": str, "save_strategy": str, "save_steps": int, "save_total_limit": int}
    accepted = f"a JSON object with some of {', '.join(kinds)}"
    try:
        given = json.loads(value) if isinstance(value, str) else dict(value)
    except (ValueError, TypeError, RecursionError):
        given = None
    if not isinstance(given, dict) or not all(
        name in kinds and isinstance(item, kinds[name]) and item is not True for name, item in given.items()
    ):
        raise ValueError(accepted)
    return given


@dataclass(frozen=True, slots=True)
class Setting:
    """One row of the table."""

    env: tuple[str, ...]
    """Environment variables, the first that is set wins. The first is the one that messages name."""
    parse: Callable[[Any], Any]
    meaning: str
    unit: str = ""
    shown_default: str | None = None


def _setting(
    default: Any, parse: Callable[[Any], Any], *env: str, meaning: str, unit: str = "", shown_default: str | None = None
) -> Any:
    return field(default=default, metadata={"setting": Setting(env, parse, meaning, unit, shown_default)})


LOCATIONS = ("dir", "fallback")
"""Settings that are locations. They hold no credentials, whatever was given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of one run. See the table in ``docs/settings.md``."""

    enabled: bool = _setting(
        True,
        parse_enabled,
        "HOLDFAST_ENABLED",
        meaning="`1` switches the adapters on, for any framework, without a change of code. `0` switches everything "
        "off, whatever else is set: no handler, no thread, no file. `require` is `1`, and refuses to train what cannot "
        "be protected.",
        shown_default="on where a script asks for it: `holdfast.Run`, `enable_jit_checkpoint=True`, `holdfast run`",
    )
    ray_enabled: bool = _setting(
        False,
        parse_bool,
        "RAY_TRAIN_JIT_CHECKPOINT_ENABLED",
        meaning="Switches the Ray Train adapter alone on, or with `0` off; `HOLDFAST_ENABLED=0` wins over it.",
        shown_default="as `HOLDFAST_ENABLED`",
    )
    ray_get_checkpoint: str = _setting(
        "own",
        _one_of("own", "jit"),
        "HOLDFAST_RAY_GET_CHECKPOINT",
        meaning="What `ray.train.get_checkpoint()` gives a training function that is started again: `own`, what it "
        "reported itself, and its loop is replayed; `jit`, the just-in-time checkpoint, which it loads itself.",
    )
    checkpointing: bool = _setting(
        True, parse_bool, "CHECKPOINT_ENABLED", meaning="`0`: no checkpoints are written or read; progress still is."
    )
    dir: str | None = _setting(
        None,
        _text,
        "HOLDFAST_DIR",
        "CHECKPOINT_URI",
        meaning="Where checkpoints go: a path, or an `s3://`, `gs://` or `az://` URI.",
        shown_default="`holdfast-runs/<script name>`",
    )
    fallback: str | None = _setting(
        None,
        _text,
        "HOLDFAST_FALLBACK_DIR",
        "CHECKPOINT_FALLBACK_URI",
        meaning="A second location, used when the first cannot be reached in time, and searched on resume.",
        shown_default="none",
    )
    save_every: Every = _setting(
        NEVER,
        parse_every,
        "HOLDFAST_SAVE_EVERY",
        "CHECKPOINT_INTERVAL",
        meaning="Periodic saves, counted from the last commit: `500 steps`, `1 epoch`, `5m`, or `never`.",
        shown_default="never",
    )
    strategy: str | None = _setting(
        None,
        _one_of("epoch", "steps", "time", "no"),
        "CHECKPOINT_STRATEGY",
        meaning="What a bare number in `CHECKPOINT_INTERVAL` counts: `epoch`, `steps` or `time` (seconds).",
        shown_default="steps",
    )
    keep: int = _setting(
        3, _count(1), "HOLDFAST_KEEP", "CHECKPOINT_MAX_CHECKPOINTS", meaning="How many whole checkpoints stay."
    )
    save_type: str = _setting(
        "full",
        _one_of("full", "incremental"),
        "HOLDFAST_SAVE_TYPE",
        "CHECKPOINT_SAVE_TYPE",
        meaning="`incremental` stores unchanged content once and refers to it again.",
    )
    resume: str = _setting(
        "auto",
        lambda value: (
            {"1": "auto", "true": "auto", "0": "never", "false": "never"}.get(str(value).strip().lower())
            or _one_of("auto", "never", "own")(value)
        ),
        "HOLDFAST_RESUME",
        "CHECKPOINT_RESUME",
        meaning="`auto` goes on from the newest whole checkpoint; `never` starts anew and sets the old ones aside; "
        "`own` goes on from what the run of this `HOLDFAST_RUN_ID` has saved, and sets aside what others have: its "
        "first start begins anew, and its restarts do not.",
    )
    kill_wait: float = _setting(
        3.0,
        parse_duration,
        "HOLDFAST_KILL_WAIT",
        "RAY_TRAIN_JIT_CHECKPOINT_KILL_WAIT",
        unit="s",
        meaning="Training goes on for this long after a notice before the ranks agree on the step to save.",
    )
    grace_period: float = _setting(
        30.0,
        parse_duration,
        "HOLDFAST_GRACE_PERIOD",
        unit="s",
        meaning="From the notice to the expected SIGKILL, where the notice itself does not say.",
    )
    exit_code: int = _setting(
        143, _count(0), "HOLDFAST_EXIT_CODE", meaning="How the process leaves after a just-in-time save."
    )
    signals: tuple[signal.Signals, ...] = _setting(
        (signal.SIGTERM,), parse_signals, "HOLDFAST_SIGNALS", meaning="Signals that are notices, such as `TERM,USR1`."
    )
    notice_file: str | None = _setting(
        None,
        _text,
        "HOLDFAST_NOTICE_FILE",
        meaning="A file whose appearance is a notice.",
        shown_default="none",
    )
    cloud: str | None = _setting(
        None,
        _one_of("aws", "gcp", "azure", "none"),
        "HOLDFAST_CLOUD",
        meaning="Watch this cloud's metadata endpoint for a preemption notice.",
        shown_default="none",
    )
    metadata_url: str | None = _setting(
        None,
        _text,
        "HOLDFAST_METADATA_URL",
        meaning="Base URL of the metadata endpoint, where it is not the cloud's usual one.",
        shown_default="the cloud's own",
    )
    agree_timeout: float = _setting(
        5.0,
        parse_duration,
        "HOLDFAST_AGREE_TIMEOUT",
        unit="s",
        meaning="A rank that says nothing for this long after a notice counts as dead, and the others rescue.",
    )
    progress_file: str | None = _setting(
        None,
        _text,
        "HOLDFAST_PROGRESS_FILE",
        "TRAINING_PROGRESS_FILE",
        meaning="Where rank 0 writes the progress file.",
        shown_default="`training_progress.json` beside the checkpoints",
    )
    progress: bool = _setting(True, parse_bool, "HOLDFAST_PROGRESS", meaning="`0`: no progress is told to anybody.")
    termination_log: str | None = _setting(
        None,
        _text,
        "HOLDFAST_TERMINATION_LOG",
        meaning="A file that gets the progress too and can be read after the container has ended, such as "
        "`/dev/termination-log`.",
        shown_default="none",
    )
    progress_url: str | None = _setting(
        None,
        _http_url,
        "HOLDFAST_PROGRESS_URL",
        meaning="An address that rank 0 tells the progress to by HTTP POST, at most once in ten seconds.",
        shown_default="none",
    )
    progress_token_file: str | None = _setting(
        None,
        _text,
        "HOLDFAST_PROGRESS_TOKEN_FILE",
        meaning="A file with the token that is sent to `progress_url`.",
        shown_default="none",
    )
    progress_ca: str | None = _setting(
        None,
        _text,
        "HOLDFAST_PROGRESS_CA",
        meaning="Certificates, as PEM text, that the server at `progress_url` is trusted by.",
        shown_default="those of the system",
    )
    progress_every: int | None = _setting(
        None,
        _count(1),
        "HOLDFAST_PROGRESS_EVERY",
        "PROGRESS_UPDATE_FREQUENCY",
        unit="steps",
        meaning="Write the progress file every so many steps.",
        shown_default="once a second",
    )
    run_id: str | None = _setting(
        None,
        _name,
        "HOLDFAST_RUN_ID",
        meaning="The job's identity. Restarts that share it take a location over from each other at once.",
        shown_default="made up at the first start",
    )
    takeover: bool = _setting(
        False,
        parse_bool,
        "HOLDFAST_TAKEOVER",
        meaning="Take an object-store location over from a run that is known to be gone, before its lease ends.",
    )
    final_model: bool = _setting(
        False,
        parse_bool,
        "HOLDFAST_FINAL_MODEL",
        meaning="At the end of a run of `transformers.Trainer`, the model in `final/` beside the checkpoints, ready "
        "for `from_pretrained`: adapters of PEFT are merged.",
    )
    trainer_arguments: dict[str, Any] | None = _setting(
        None,
        _trainer_arguments,
        "HOLDFAST_TRAINER_ARGUMENTS",
        meaning="A JSON object: `output_dir`, `save_strategy`, `save_steps` and `save_total_limit` that a platform "
        "sets over those of a script's `TrainingArguments`.",
        shown_default="none",
    )
    rescue: bool = _setting(
        True,
        parse_bool,
        "HOLDFAST_RESCUE",
        meaning="Keep what a surviving replica needs to save the run when another rank is killed.",
    )

    def __post_init__(self) -> None:
        for name in LOCATIONS:
            location = getattr(self, name)
            if location is not None:
                object.__setattr__(self, name, without_secrets(location))

    @classmethod
    def load(cls, environ: Mapping[str, str] | None = None, **given: Any) -> Settings:
        """Settings from arguments (None: not given), the environment and the defaults."""
        environ = os.environ if environ is None else environ
        values: dict[str, Any] = {}
        table = settings_table()
        unknown = given.keys() - table.keys()
        if unknown:
            raise ConfigError(f"unknown setting {sorted(unknown)[0]!r}; accepted are {', '.join(sorted(table))}")
        bare_interval, interval = False, ""
        for name, setting in table.items():
            origin, value = name, given.get(name)
            if value is None:
                for variable in setting.env:
                    if environ.get(variable, "") != "":
                        origin, value = variable, environ[variable]
                        break
            if value is None:
                continue
            try:
                values[name] = setting.parse(value)
            except (ValueError, TypeError) as error:
                raise ConfigError(f"{origin}={_shown(value)} is not accepted; it must be {error}") from None
            if name == "save_every":
                interval = str(value).strip()
                bare_interval = origin == "CHECKPOINT_INTERVAL" and interval.isdigit()
        strategy = values.get("strategy")
        if strategy and given.get("save_every") is None:
            values["save_every"] = _by_strategy(strategy, values.get("save_every", Every()), interval, bare_interval)
        if values.get("resume") == "own" and values.get("run_id") is None:
            raise ConfigError("HOLDFAST_RESUME='own' needs HOLDFAST_RUN_ID, by which a run knows what it has saved")
        if values.get("cloud") == "none":
            values["cloud"] = None
        return cls(**values)

    def resumes_from(self, run: str | None) -> bool:
        """Whether training may go on from what the run of this identity has saved."""
        return self.resume == "auto" or (self.resume == "own" and run == self.run_id)

    def replace(self, **changes: Any) -> Settings:
        return dataclasses.replace(self, **changes)


def _shown(value: Any) -> str:
    return repr(redacted(value) if isinstance(value, str) else value)


def _by_strategy(strategy: str, every: Every, interval: str, bare: bool) -> Every:
    """``interval``: as it was given; ``bare``: it is a number alone, which counts whatever the strategy says."""
    if strategy == "no":
        return Every()
    if strategy == "epoch":
        return Every(epochs=every.steps if bare and every.steps else every.epochs or 1)
    if strategy == "time":
        seconds = float(every.steps) if bare and every.steps else every.seconds
        if seconds is None:
            raise _other_interval("time", "a duration such as '5m'", interval)
        return Every(seconds=seconds)
    if every.steps is None:
        raise _other_interval("steps", "a number of steps such as '500'", interval)
    return every


def _other_interval(strategy: str, wanted: str, interval: str) -> ConfigError:
    also = f", and not {interval!r}, which is enough without CHECKPOINT_STRATEGY" if interval else ""
    return ConfigError(f"CHECKPOINT_STRATEGY={strategy!r} needs CHECKPOINT_INTERVAL, {wanted}{also}")


def without_credentials(environ: Mapping[str, str]) -> dict[str, str]:
    """A copy of some variables in which no location holds credentials."""
    names = {variable for name in LOCATIONS for variable in settings_table()[name].env}
    return {name: without_secrets(value) if name in names else value for name, value in environ.items()}


def settings_table() -> dict[str, Setting]:
    """Name and row of every setting, in the order of the documentation."""
    return {item.name: item.metadata["setting"] for item in dataclasses.fields(Settings)}


def settings_markdown() -> str:
    """The table as the documentation shows it."""
    rows = ["| setting | environment | default | meaning |", "|---|---|---|---|"]
    for item in dataclasses.fields(Settings):
        setting: Setting = item.metadata["setting"]
        default = setting.shown_default or (
            ",".join(one.name.removeprefix("SIG") for one in item.default)
            if isinstance(item.default, tuple)
            else f"{item.default:g}"
            if isinstance(item.default, float)
            else ("on" if item.default else "off")
            if isinstance(item.default, bool)
            else f"{item.default}"
        )
        unit = f" {setting.unit}" if setting.unit and not setting.shown_default else ""
        names = ", ".join(f"`{name}`" for name in setting.env)
        rows.append(f"| `{item.name}` | {names} | {default}{unit} | {setting.meaning} |")
    return "\n".join(rows) + "\n"
