"""A script whose folder is named by the clock: transformers_dated.py --out OUT --result FILE."""

import argparse
import hashlib
import json
import os
import signal
import time
from datetime import datetime
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

options = argparse.ArgumentParser()
options.add_argument("--out", type=Path)
options.add_argument("--result", type=Path)
options.add_argument("--args")
options.add_argument("--config", action="store_true", help="write a file into the folder first")
args = options.parse_args()
torch.set_num_threads(1)


class Counting(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        row = (index + torch.arange(16)) % 50
        return {"input_ids": row, "labels": row}


class Stop(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if os.environ.get("STOP_AT") == str(state.global_step):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.3)


torch.manual_seed(0)
folder = args.out / f"{datetime.now():%Y%m%d-%H%M%S-%f}"
if args.config:
    folder.mkdir(parents=True)
    (folder / "script.json").write_text("{}")
config = GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
arguments = TrainingArguments(
    output_dir=str(folder),
    num_train_epochs=2,
    per_device_train_batch_size=8,
    save_strategy="steps",
    save_steps=6,
    report_to="none",
    use_cpu=True,
    disable_tqdm=True,
    seed=int(os.environ.get("SEED", "1")),
)
trainer = Trainer(GPT2LMHeadModel(config), arguments, train_dataset=Counting(), callbacks=[Stop()])
trainer.train()
trainer.save_model()
(folder / "done").touch()
digest = hashlib.sha256()
for value in trainer.model.state_dict().values():
    digest.update(value.numpy().tobytes())
args.result.write_text(json.dumps({"digest": digest.hexdigest(), "folder": str(folder), "history": []}))
