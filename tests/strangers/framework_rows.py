"""Scripts of ``frameworks/``, and scripts that the frameworks ship, as rows."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from tests.strangers.rows import DURATIONS, Row, Verdict

FRAMEWORKS = Path(__file__).parent / "frameworks"

HUGGING_FACE = (
    "torch,datasets,accelerate,peft,transformers.trainer,trl.trainer.sft_trainer,trl.trainer.dpo_trainer,"
    "transformers.models.bert.modeling_bert,transformers.models.gpt2.modeling_gpt2,"
    "transformers.models.llama.modeling_llama,holdfast.adapters.transformers.run"
)
SPEED = (
    *DURATIONS,
    r"""['"]\w*(runtime|per_second|num_tokens_per_\w+)['"]: ['"]?[\d.e+-]+['"]?""",
    r'"should_(save|log|evaluate)": \w+',
)
"""What a Trainer logs of the clock, and what a checkpoint says is still to be done after its step."""
INTERRUPTION_SAVES = ("*/checkpoint-*[1-9]/*", "*/holdfast*.json", "*/holdfast*.safetensors", "*training_progress.json")
"""Checkpoints of steps at which the script does not save itself, and what holdfast adds to those of the script."""
CHECKPOINTS = ("*/checkpoint-*/*",)


def _script(name: str, **options: object) -> Row:
    """A row for ``frameworks/<name>.py``."""
    script = FRAMEWORKS / f"{options.pop('file', name)}.py"
    return Row(name, script, **options)  # type: ignore[arg-type]


def _trainer(name: str, **options: object) -> Row:
    """A script with a Trainer of Transformers: it prints its log."""
    defaults: dict[str, object] = {
        "preload": HUGGING_FACE,
        "lines": "loss|predicted|accuracy",
        "ignore": SPEED,
        "ignore_files": INTERRUPTION_SAVES,
        "more_files": CHECKPOINTS,
        "errors_differ": True,
    }
    return _script(name, **defaults | options)


def _shipped(package: str, *path: str) -> Path:
    """A file of an installed package, which is not imported for it."""
    spec = importlib.util.find_spec(package)
    return Path(((spec and spec.submodule_search_locations) or [""])[0], *path)


def _trl(name: str, data: str, *args: str) -> Row:
    """A script of TRL's own command line, on a tiny model."""
    common = ["--model_name_or_path=tiny", f"--dataset_name={data}", f"--output_dir={name}", "--num_train_epochs=2"]
    common += ["--per_device_train_batch_size=4", "--learning_rate=5e-3", "--logging_steps=4", "--save_steps=10"]
    common += ["--report_to=none", "--bf16=False", "--gradient_checkpointing=False", "--dtype=float32", "--use_cpu"]
    return Row(
        f"trl_script_{name}",
        _shipped("trl", "scripts", f"{name}.py"),
        args=(*common, "--disable_tqdm=True", *args),
        preload=HUGGING_FACE,
        prepare=((str(FRAMEWORKS / "trl_tiny_model.py"),),),
        lines="loss|saved",
        ignore=SPEED,
        ignore_files=INTERRUPTION_SAVES,
        more_files=CHECKPOINTS,
        errors_differ=True,
        idiom=f"trl.scripts.{name}, which TRL ships",
    )


def _accelerate(name: str, *args: str, **options: object) -> Row:
    return _script(
        name,
        file="accelerate_nlp",
        args=("--cpu", *args),
        preload=HUGGING_FACE,
        lines="^step|^epoch|^Resumed",
        errors_differ=True,
        **options,
    )


TRANSFORMERS_ROWS = (
    _trainer("hf_trainer"),
    _trainer("hf_early_stopping"),
    _trainer("hf_streaming", ignore_files=(*INTERRUPTION_SAVES, "streamed/checkpoint-60/*")),
    _trainer("hf_dated_output", ignore_files=("runs/*",)),
    _trainer("hf_two_trainers"),
    _trainer("trl_sft_lora"),
    _trainer("trl_dpo", ignore_files=(*INTERRUPTION_SAVES, "dpo/checkpoint-40/*", "dpo/README.md")),
)

HUGGING_FACE_ROWS = (
    *TRANSFORMERS_ROWS,
    _trl("sft", "conversations", "--use_peft", "--lora_r=4", "--lora_target_modules=all-linear"),
    _trl("dpo", "pairs"),
    _trl("reward", "pairs"),
    _trl("kto", "labels"),
    _accelerate("accelerate_nlp", "--checkpointing_steps=epoch"),
    _accelerate("accelerate_own_resume", "--checkpointing_steps=10", "--resume_from_checkpoint"),
)

LIGHTNING = (
    "torch,lightning.pytorch.trainer.trainer,lightning.pytorch.demos.boring_classes,lightning.fabric.fabric,"
    "lightning.pytorch.loggers.csv_logs,holdfast.adapters.lightning.fit"
)
WIKITEXT = ((str(FRAMEWORKS / "wikitext_file.py"),),)


def _lightning(name: str, **options: object) -> Row:
    """A script of Lightning, which writes what it does to standard error."""
    defaults: dict[str, object] = {
        "preload": LIGHTNING,
        "lines": "^epoch|^best|^test|^predicted",
        "errors_differ": True,
    }
    return _script(name, **defaults | options)


LIGHTNING_ROWS = (
    _lightning("lightning_boring"),
    _lightning("lightning_callbacks"),
    _lightning("lightning_gan"),
    _lightning("lightning_generators"),
    _lightning("lightning_fabric", lines="Epoch|Test"),
    _lightning("lightning_wikitext", prepare=WIKITEXT),
    _lightning("lightning_lstm_demo", prepare=WIKITEXT),
)

TENSORFLOW = {"KERAS_BACKEND": "tensorflow", "TF_ENABLE_ONEDNN_OPTS": "0", "CUDA_VISIBLE_DEVICES": "-1"}
TORCH = {"KERAS_BACKEND": "torch"}
KERAS_SPEED = (r" *\d+(\.\d+)?[mun]?s/(step|epoch)", *DURATIONS, r" *\d+us")


def _keras(name: str, **options: object) -> Row:
    """A script of Keras, which draws the lines of its epochs itself."""
    defaults: dict[str, object] = {
        "preload": "torch,tensorflow,keras,tf_keras,holdfast.adapters.keras.training",
        "env": TENSORFLOW,
        "lines": "^epoch|^epochs|evaluated|^fold|^average|^history",
        "ignore": KERAS_SPEED,
        "errors_differ": True,
    }
    return _script(name, **defaults | options)


KERAS_ROWS = (
    _keras("keras_callbacks", at_line="^epoch 3"),
    _keras("keras_callbacks_on_torch", file="keras_callbacks", at_line="^epoch 3", env=TORCH),
    _keras("keras_kfold", at_line="^Processing fold #2", resumes="resuming from |was complete at step"),
    _keras("keras_train_step", at_line="^Epoch 4", lines="evaluated"),
    _keras("keras_gan", at_line="^epoch 3"),
    _keras(
        "keras_gradient_tape",
        at_line="^epoch 6",
        verdict=Verdict.UNPROTECTED,
        says="GradientTape",
    ),
    _keras("keras_tf_data", at_line="^Epoch 5"),
    _keras("keras_torch_loop", env=TORCH),
    _keras("tf_keras_fit", at_line="^Epoch 5"),
)

RAY = {"RAY_AUTH_MODE": "disabled", "RAY_TRAIN_V2_ENABLED": "1", "RAY_DEDUP_LOGS": "0", "RAY_USAGE_STATS_ENABLED": "0"}


def _ray(name: str, **options: object) -> Row:
    """A script of Ray, which starts processes that have no fork server."""
    defaults: dict[str, object] = {
        "command": (f"{name}.py",),
        "env": RAY,
        "lines": "^result|^best",
        "errors_differ": True,
        "ignore_files": ("results/*",),
        "limit_s": 300.0,
    }
    return _script(name, **defaults | options)


RAY_ROWS = (
    _ray("ray_quick_start", kill_rank=1, slow=True),
    _ray("ray_tune", slow=True),
)

FRAMEWORK_ROWS = (*HUGGING_FACE_ROWS, *LIGHTNING_ROWS, *KERAS_ROWS, *RAY_ROWS)
