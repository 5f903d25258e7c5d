"""An ordinary training with transformers.Trainer: a tiny language model on made-up sentences."""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import os
import time

import torch
from torch.utils.data import Dataset, IterableDataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

WORDS = 64


class Sentences(Dataset):
    """Rows of word numbers that follow each other by a rule."""

    def __init__(self, count: int, *, augment: bool = False, varied: bool = False) -> None:
        generator = torch.Generator().manual_seed(11)
        begin = torch.randint(WORDS, (count,), generator=generator)
        lengths = [5 + int(first) % 8 if varied else 12 for first in begin]
        self.rows = [(begin[i] * torch.arange(1, lengths[i] + 1)) % WORDS for i in range(count)]
        self.augment = augment

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = self.rows[index]
        if self.augment:
            row = torch.where(torch.rand(len(row)) < 0.1, torch.randint(WORDS, (len(row),)), row)
        return {"input_ids": row, "labels": row}


class Stream(IterableDataset):
    def __init__(self, count: int) -> None:
        self.rows = Sentences(count)

    def __iter__(self):
        for index in range(len(self.rows)):
            yield self.rows[index]


def pad(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    longest = max(len(row["input_ids"]) for row in rows)

    def filled(key: str, value: int) -> torch.Tensor:
        padded = [torch.cat([row[key], torch.full((longest - len(row[key]),), value)]) for row in rows]
        return torch.stack(padded)

    return {"input_ids": filled("input_ids", 0), "labels": filled("labels", -100)}


class Normalised(torch.nn.Module):
    """A layer with running statistics."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x.flatten(0, 1)).view_as(x)


class Recorder(TrainerCallback):
    """Writes down what it finds in a checkpoint when it is told of one."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_save(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            folder = os.path.join(args.output_dir, f"checkpoint-{state.global_step}")
            with open(self.path, "a", encoding="utf-8") as file:
                print(json.dumps({"step": state.global_step, "files": sorted(os.listdir(folder))}), file=file)


class Clock(TrainerCallback):
    """Notes where this training began, and how long a step takes."""

    def __init__(self, count: str | None) -> None:
        self.count = count
        self.first = self.warm_at = 0
        self.ended = self.warm = 0.0

    def on_train_begin(self, args, state, control, **kwargs):
        self.first = state.global_step

    def on_step_end(self, args, state, control, **kwargs):
        self.ended = time.perf_counter()
        if state.global_step == self.first + 5:
            self.warm, self.warm_at = self.ended, state.global_step
        if self.count and state.is_world_process_zero:
            with open(self.count, "ab") as file:
                file.write(b".")

    def step_s(self, last: int) -> float | None:
        return (self.ended - self.warm) / (last - self.warm_at) if last > self.warm_at > 0 else None


class ShortEpochs(TrainerCallback):
    """Ends an epoch before its time, after some steps and after some evaluations."""

    def on_step_end(self, args, state, control, **kwargs):
        control.should_epoch_stop = state.global_step % 7 == 0

    def on_evaluate(self, args, state, control, **kwargs):
        control.should_epoch_stop = state.global_step % 9 == 0


class Uploading(Trainer):
    """A Trainer whose hub is a file."""

    def init_hf_repo(self, token=None):
        self.push_in_progress = None

    def _push_from_checkpoint(self, checkpoint_folder):
        if self.is_world_process_zero():
            files = sorted(os.listdir(checkpoint_folder))
            with open(f"{self.args.output_dir}.pushed", "a", encoding="utf-8") as file:
                print(json.dumps({"folder": checkpoint_folder, "files": files}), file=file)


class Extra(Trainer):
    """A Trainer with a file of its own in each checkpoint, as people write them."""

    def _save_checkpoint(self, model, trial):
        super()._save_checkpoint(model, trial)
        folder = os.path.join(self.args.output_dir, f"checkpoint-{self.state.global_step}")
        torch.save({"step": self.state.global_step}, os.path.join(folder, "extra.pt"))
        with open(os.path.join(folder, "notes.txt"), "w", encoding="utf-8") as file:
            file.write(f"step {self.state.global_step}\n")


def check_memory(most: int, model, args, kwargs) -> None:
    model.seen = getattr(model, "seen", 0) + 1
    if model.seen > 2 and len(kwargs["input_ids"]) > most:
        raise RuntimeError("CUDA out of memory.")


def content(value) -> bytes:
    """All bits of a value; of one that is spread over the ranks, all ranks ask."""
    value = torch.as_tensor(value)
    if hasattr(value, "full_tensor"):
        value = value.full_tensor()
    return value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--result")
    parser.add_argument("--samples", type=int, default=48)
    parser.add_argument("--augment", action="store_true")
    parser.add_argument("--varied", action="store_true")
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--resume", default="", help="'', 'true', 'last' for get_last_checkpoint, or a folder")
    parser.add_argument("--record-saves")
    parser.add_argument("--short-epochs", action="store_true")
    parser.add_argument("--trainer", default="Trainer")
    parser.add_argument("--memory", type=int, help="batches of more rows do not fit, after two steps")
    parser.add_argument("--batchnorm", action="store_true")
    parser.add_argument("--again", action="store_true", help="train once more if it is interrupted by hand")
    parser.add_argument("--step-s", type=float, default=0.0, help="seconds that a step takes at least")
    parser.add_argument("--count", help="a file that gets a byte for each step")
    parser.add_argument("--times", type=int, default=1, help="how often to train")
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--args", type=json.loads, default={}, help="more arguments of TrainingArguments")
    options = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(3)
    config = GPT2Config(
        vocab_size=WORDS,
        n_positions=16,
        n_embd=options.width,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config)
    arguments = {
        "num_train_epochs": 3,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 5,
        "logging_steps": 5,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": 7,
        **options.args,
    }
    if options.step_s:
        model.register_forward_pre_hook(lambda *_: time.sleep(options.step_s))
    if options.batchnorm:
        model.transformer.ln_f = Normalised(options.width)
    if options.memory:
        model.register_forward_pre_hook(functools.partial(check_memory, options.memory), with_kwargs=True)
    kind = {"Trainer": Trainer, "Uploading": Uploading, "Extra": Extra}[options.trainer]
    clock = Clock(options.count)
    callbacks = [clock]
    if options.record_saves:
        callbacks.append(Recorder(options.record_saves))
    if options.short_epochs:
        callbacks.append(ShortEpochs())
    trainer = kind(
        model=model,
        args=TrainingArguments(output_dir=options.out, **arguments),
        train_dataset=Stream(options.samples)
        if options.stream
        else Sentences(options.samples, augment=options.augment, varied=options.varied),
        eval_dataset=Sentences(24),
        data_collator=pad,
        callbacks=callbacks,
    )
    resume: str | bool | None = options.resume or None
    if options.resume == "true":
        resume = True
    elif options.resume == "last":
        resume = get_last_checkpoint(options.out) if os.path.isdir(options.out) else None
    for _ in range(options.times):
        try:
            output = trainer.train(resume_from_checkpoint=resume)
        except KeyboardInterrupt:
            if not options.again:
                raise
            output = trainer.train(resume_from_checkpoint=resume)
    digest = hashlib.sha256()
    for name, value in sorted(trainer.model.state_dict().items()):
        digest.update(name.encode() + content(value))
    model_digest = digest.hexdigest()
    for state in trainer.optimizer.state.values() if trainer.optimizer is not None else ():
        for value in state.values():
            digest.update(content(value))
    if options.result and int(os.environ.get("RANK", "0")) == 0:
        result = {
            "digest": digest.hexdigest(),
            "model": model_digest,
            "step": trainer.state.global_step,
            "loss": output.training_loss,
            "history": trainer.state.log_history,
            "metrics": output.metrics,
            "best": trainer.state.best_model_checkpoint,
            "first": clock.first,
            "step_s": clock.step_s(trainer.state.global_step),
        }
        with open(options.result, "w", encoding="utf-8") as file:
            json.dump(result, file)
    print("after train", flush=True)


if __name__ == "__main__":
    main()
