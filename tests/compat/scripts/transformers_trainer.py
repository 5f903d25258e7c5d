"""An ordinary script with transformers.Trainer: a tiny GPT-2 learns to count."""

from __future__ import annotations

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from record import Record, of_torch

WORDS = 32


class Counting(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = (index * torch.arange(1, 9)) % WORDS
        return {"input_ids": row, "labels": row}


class Recorder(TrainerCallback):
    def __init__(self, record: Record) -> None:
        self.record = record

    def on_step_begin(self, args, state, control, model, **kwargs):
        self.record.begin(state.global_step + 1, of_torch(model))

    def on_step_end(self, args, state, control, model, **kwargs):
        self.record.end(state.global_step, of_torch(model))


torch.set_num_threads(1)
torch.manual_seed(3)
model = GPT2LMHeadModel(
    GPT2Config(vocab_size=WORDS, n_positions=8, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
)
arguments = TrainingArguments(
    "checkpoints",
    num_train_epochs=3,
    per_device_train_batch_size=4,
    learning_rate=1e-2,
    lr_scheduler_type="cosine",
    warmup_steps=5,
    logging_steps=5,
    save_strategy="no",
    report_to=[],
    disable_tqdm=True,
    use_cpu=True,
    seed=7,
)
record = Record()
Trainer(model, arguments, train_dataset=Counting(), callbacks=[Recorder(record)]).train()
record.close(of_torch(model))
