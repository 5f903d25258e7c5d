"""Training functions as a notebook would have them."""

from __future__ import annotations


def tiny(steps, pause_s=0.0, lora=False, path=None):
    """A tiny GPT-2 learns to count; the parameters it ends with, and its losses, go to ``path``."""
    import hashlib
    import json
    import os
    import time

    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

    class Counting(torch.utils.data.Dataset):
        def __len__(self):
            return 160

        def __getitem__(self, index):
            row = (index + torch.arange(16)) % 50
            return {"input_ids": row, "labels": row}

    class Slow(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            time.sleep(pause_s)

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=50, n_positions=16, n_embd=32, n_layer=2, n_head=2, resid_pdrop=0.1, bos_token_id=0, eos_token_id=0
    )
    model = GPT2LMHeadModel(config)
    if lora:
        import peft

        model.save_pretrained(f"{lora}/base-{os.environ.get('RANK', '0')}")
        adapter = peft.LoraConfig(r=4, target_modules=["c_attn"], task_type="CAUSAL_LM", init_lora_weights=False)
        model = peft.get_peft_model(model, adapter)
    arguments = TrainingArguments(
        output_dir="elsewhere",
        max_steps=steps,
        per_device_train_batch_size=4,
        learning_rate=1e-3,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = Trainer(model, arguments, train_dataset=Counting(), callbacks=[Slow()])
    trainer.train()
    if path and trainer.is_world_process_zero():
        digest = hashlib.sha256()
        for value in trainer.model.state_dict().values():
            digest.update(value.numpy().tobytes())
        trace = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        with open(path, "w") as file:
            json.dump({"digest": digest.hexdigest(), "trace": trace, "output_dir": arguments.output_dir}, file)


def environment(path, given):
    import json
    import os
    import sys

    with open(path, "w") as file:
        json.dump({"given": given, "env": dict(os.environ), "python": sys.prefix, "cwd": os.getcwd()}, file)


def loads(path, seconds):
    """Takes so long before it trains, the first time."""
    import os
    import time

    if not os.path.exists(path):
        with open(path, "w"):
            pass
        time.sleep(seconds)


def fails():
    raise RuntimeError("no luck today")
