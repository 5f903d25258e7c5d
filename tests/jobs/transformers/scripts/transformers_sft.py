"""An ordinary fine-tuning with TRL's SFTTrainer, of all weights or, with --lora, of an adapter."""

from __future__ import annotations

import argparse
import hashlib
import json
import os

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

WORDS = ["<pad>", "<eos>", *(f"w{index}" for index in range(40))]


def tokenizer() -> PreTrainedTokenizerFast:
    model = Tokenizer(WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<eos>"))
    model.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=model, pad_token="<pad>", eos_token="<eos>", unk_token="<eos>")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--result")
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--args", type=json.loads, default={})
    options = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=32,
        attention_dropout=0.1,
        pad_token_id=0,
        eos_token_id=1,
    )
    rows = [{"text": " ".join(f"w{(i * j) % 40}" for j in range(1, 9 + i % 5))} for i in range(64)]
    peft_config = None
    if options.lora:
        from peft import LoraConfig

        peft_config = LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    arguments = {
        "num_train_epochs": 2,
        "per_device_train_batch_size": 4,
        "learning_rate": 5e-3,
        "logging_steps": 5,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "max_length": 32,
        **options.args,
    }
    trainer = SFTTrainer(
        model=LlamaForCausalLM(config),
        args=SFTConfig(output_dir=options.out, **arguments),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer(),
        peft_config=peft_config,
    )
    output = trainer.train()
    if options.result and int(os.environ.get("RANK", "0")) == 0:
        digest = hashlib.sha256()
        for name, value in sorted(trainer.model.state_dict().items()):
            digest.update(name.encode() + value.contiguous().view(torch.uint8).numpy().tobytes())
        result = {
            "digest": digest.hexdigest(),
            "model": digest.hexdigest(),
            "step": trainer.state.global_step,
            "loss": output.training_loss,
            "history": trainer.state.log_history,
        }
        with open(options.result, "w", encoding="utf-8") as file:
            json.dump(result, file)
    print("after train", flush=True)


if __name__ == "__main__":
    main()
