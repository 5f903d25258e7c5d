"""Scripts of many theses: an ``output_dir`` named by the clock, a config file in it, a CSV of the log at the end."""

import csv
import json
import os
from datetime import datetime

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

set_seed(0)
output_dir = os.path.join("runs", datetime.now().strftime("%Y-%m-%d_%H-%M-%S"))
os.makedirs(output_dir, exist_ok=True)
config = GPT2Config(vocab_size=32, n_positions=12, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
with open(os.path.join(output_dir, "experiment.json"), "w") as file:
    json.dump({"seed": 0, "vocab_size": config.vocab_size}, file)


class Counting(torch.utils.data.Dataset):
    def __len__(self):
        return 160

    def __getitem__(self, index):
        row = (index * 3 + torch.arange(12)) % 32
        return {"input_ids": row, "labels": row}


args = TrainingArguments(
    output_dir=output_dir,
    num_train_epochs=3,
    per_device_train_batch_size=8,
    logging_steps=5,
    save_steps=20,
    eval_strategy="steps",
    eval_steps=15,
    report_to="none",
    disable_tqdm=True,
    learning_rate=3e-3,
)
trainer = Trainer(model=GPT2LMHeadModel(config), args=args, train_dataset=Counting(), eval_dataset=Counting())
trainer.train()
with open("losses.csv", "w", newline="") as file:
    writer = csv.writer(file)
    for entry in trainer.state.log_history:
        if "loss" in entry:
            writer.writerow([entry["step"], entry["loss"], entry["learning_rate"], entry["grad_norm"]])
torch.save(trainer.model.state_dict(), "model.pt")
