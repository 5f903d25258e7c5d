"""What both trainings share beside model and data: cores, callbacks, clocks, and what they write down at the end.

Time is counted in parts that add up. *Start-up* is everything before the first step: imports, data, model, and with Ray
the workers. *Warm-up* is what the first step and the first validation batch of a process take beyond the others, while
TensorFlow builds its graphs. *Training* is the rest of ``fit``: what grows with the number of epochs.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import platform
import socket
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from options import Job

ROUNDS = 5
"""Repetitions of what is measured apart."""


class RefusedError(Exception):
    """This machine cannot do what was asked for. The message says what, and what is accepted."""


def take_cores(job: Job, rank: int) -> list[int]:
    """Bind this thread, and all that it starts, to the cores of a rank. Before TensorFlow is imported."""
    os.environ["TF_USE_LEGACY_KERAS"] = "1"  # Keras 3's fit does not work under MultiWorkerMirroredStrategy
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    for name in ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"):
        os.environ[name] = str(job.cpus)
    if not job.pin:
        return []
    there = sorted(os.sched_getaffinity(0))
    cores = sorted({there[(rank * job.cpus + index) % len(there)] for index in range(job.cpus)})
    os.sched_setaffinity(0, cores)
    return cores


def begin(job: Job) -> None:
    """The same threads, GPUs and random numbers in every training. Raises where there are fewer GPUs than asked for."""
    import tensorflow as tf
    import tf_keras as keras

    tf.get_logger().setLevel("WARNING")
    tf.config.threading.set_intra_op_parallelism_threads(job.cpus)
    tf.config.threading.set_inter_op_parallelism_threads(job.cpus)
    there = tf.config.list_physical_devices("GPU")
    if len(there) < job.gpus:
        raise RefusedError(
            f"--gpus={job.gpus} is not accepted: TensorFlow finds {len(there)} GPUs for this process; take --gpus "
            f"{len(there)}, or a TensorFlow with CUDA on a machine that has them"
        )
    tf.config.set_visible_devices(there[: job.gpus], "GPU")
    keras.utils.set_random_seed(job.seed)


def make_callbacks(job: Job) -> list[Any]:
    """Those of the task itself."""
    import tf_keras as keras

    return [
        keras.callbacks.ReduceLROnPlateau(monitor="val_loss", factor=0.5, patience=max(1, job.patience // 2)),
        keras.callbacks.EarlyStopping(monitor="val_loss", patience=job.patience),
    ]


def make_clock(job_began: float) -> Any:
    """A callback that notes how long each step takes. What it notes survives a restart, being plain numbers."""
    import tf_keras as keras

    me = f"{socket.gethostname()}:{os.getpid()}"

    class Clock(keras.callbacks.Callback):
        def __init__(self) -> None:
            super().__init__()
            self.job_began = job_began
            """Of the first attempt."""
            self.steps: list[Any] = []
            """Of each: process, time since the epoch when it began, seconds, seconds of a processor."""
            self.validation: list[Any] = []
            self.epochs: list[Any] = []
            """Of each: when it began, when it ended, how many steps there were then."""

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            del self.epochs[epoch:]
            self.epochs.append([time.time(), 0.0, 0])

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.epochs[epoch][1:] = [time.time(), len(self.steps)]

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            self.began, self.used = time.time(), time.process_time()

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.steps.append([me, self.began, time.time() - self.began, time.process_time() - self.used])

        def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
            self.test_began = time.time()

        def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
            self.validation.append([me, self.test_began, time.time() - self.test_began, 0.0])

    return Clock()


def time_input(dataset: Any) -> float:
    """Seconds to read one epoch, with nothing else to do; the first time, which builds the pipeline, does not count."""
    for _ in dataset:
        pass
    began = time.perf_counter()
    for _ in dataset:
        pass
    return time.perf_counter() - began


def warm_ups(noted: list[Any]) -> list[tuple[float, float]]:
    """When and how much longer the first step of each process took than is usual."""
    usual = statistics.median(seconds for _, _, seconds, _ in noted)
    firsts: dict[str, tuple[float, float]] = {}
    for process, began, seconds, _ in noted:
        firsts.setdefault(process, (began, max(0.0, seconds - usual)))
    return list(firsts.values())


def gaps(steps: list[Any]) -> list[tuple[float, float]]:
    """When and for how long nothing was trained, between two processes that did the same training."""
    found = []
    for (process, began, seconds, _), (later, next_began, *_) in itertools.pairwise(steps):
        if later != process:
            found.append((began + seconds, next_began - began - seconds))
    return found


def timing(clock: Any) -> dict[str, Any]:
    """Where the time of a training went."""
    away = gaps(clock.steps)
    warm = [*warm_ups(clock.steps), *(warm_ups(clock.validation) if clock.validation else [])]
    # A validation that was interrupted is done between two steps of other processes: that time is counted already.
    warm = [one for one in warm if not any(at <= one[0] < at + seconds for at, seconds in away)]

    def within(spans: list[tuple[float, float]], began: float, ended: float) -> float:
        return sum(max(0.0, min(ended, at + seconds) - max(began, at)) for at, seconds in spans)

    epochs = [
        ended - began - within(warm, began, ended) - within(away, began, ended) for began, ended, _ in clock.epochs
    ]
    return {
        "training_time_seconds": sum(epochs),
        "startup_seconds": clock.steps[0][1] - clock.job_began,
        "warmup_seconds": sum(seconds for _, seconds in warm),
        "interruption_seconds": sum(seconds for _, seconds in away),
        "epoch_seconds": epochs,
        "step_seconds": statistics.median(seconds for _, _, seconds, _ in clock.steps),
        "processor_share": sum(step[3] for step in clock.steps) / sum(step[2] for step in clock.steps),
        "steps": len(clock.steps),
        "attempts": len({step[0] for step in clock.steps}),
    }


def digest(model: Any) -> str:
    """Of all weights. Under a strategy all workers must ask for it together."""
    hashed = hashlib.sha256()
    for weights in model.get_weights():
        hashed.update(weights.tobytes())
    return hashed.hexdigest()


def result_of(job: Job, model: Any, history: Any, clock: Any, test: Any, **more: Any) -> dict[str, Any]:
    """What a training writes down. ``test``: loss, accuracy and seconds of the evaluation at the end."""
    import tensorflow as tf

    loss, accuracy, seconds = test
    curves = {name: [float(value) for value in values] for name, values in history.history.items()}
    return {
        **more,
        **timing(clock),
        "evaluation_seconds": seconds,
        "total_seconds": time.time() - clock.job_began,
        "epochs_completed": len(curves["loss"]),
        "test_accuracy": float(accuracy),
        "test_loss": float(loss),
        "history": curves,
        "parameters": int(model.count_params()),
        "weights_sha256": digest(model),
        "job": job.as_dict(),
        "versions": {"python": platform.python_version(), "tensorflow": tf.__version__},
    }


def prepare(folder: str) -> None:
    """Make the folder of the results, before anything is trained for it. Raises where nothing can be written there."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        why = "it is a file" if isinstance(error, FileExistsError) else f"{error.strerror or error}"
        raise RefusedError(
            f"--save-path={folder!r} is not accepted: {why}; it must be a folder that can be written to, or the name "
            f"of a new one"
        ) from None


def write(folder: str, name: str, content: dict[str, Any]) -> Path:
    """As JSON, whole or not at all."""
    path = Path(folder, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{name}")
    beside.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    beside.replace(path)
    return path


def say(result: dict[str, Any]) -> None:
    """The result in a few lines."""
    print(f"data: {result['data']['name']}, {result['data']['training_images']} images for training", flush=True)
    if result["data"]["stand_in"]:
        print("data: A GENERATED STAND-IN, NOT CIFAR-10", flush=True)
    print(
        f"{result['training_type']}: {result['epochs_completed']} epochs in {result['training_time_seconds']:.1f} s "
        f"(start-up {result['startup_seconds']:.1f} s, warm-up {result['warmup_seconds']:.1f} s, "
        f"interruptions {result['interruption_seconds']:.1f} s), test accuracy {result['test_accuracy']:.2%}",
        flush=True,
    )
