"""Datasets' "Stream" guide with a Trainer: ``IterableDataset.from_generator``, a shuffle buffer, ``max_steps``."""

import random

from datasets import IterableDataset
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainingArguments,
    set_seed,
)

set_seed(11)


def shards_of_text(shards):
    for shard in shards:
        draw = random.Random(shard)
        for _ in range(40):
            start, stride = draw.randrange(50), draw.randrange(1, 5)
            yield {"numbers": [(start + stride * k) % 60 for k in range(16)]}


dataset = IterableDataset.from_generator(shards_of_text, gen_kwargs={"shards": list(range(4))})
dataset = dataset.map(lambda row: {"input_ids": row["numbers"], "labels": row["numbers"]}, remove_columns=["numbers"])
dataset = dataset.shuffle(seed=42, buffer_size=32)
model = GPT2LMHeadModel(
    GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
)
trainer = Trainer(
    model=model,
    args=TrainingArguments(
        output_dir="streamed",
        max_steps=60,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=5e-3,
        logging_steps=4,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    ),
    train_dataset=dataset,
)
result = trainer.train()
print(f"{result.global_step} steps, epoch {trainer.state.epoch:.4f}, loss {result.training_loss:.8f}")
trainer.save_model("streamed-model")
print("state of the control", trainer.state.stateful_callbacks["TrainerControl"]["args"])
