"""Writes a tiny model, its tokenizer and data sets as files, for scripts that take them as arguments."""

import json
import os

from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

set_seed(0)
colors = ["red", "green", "blue", "white", "black"]
rows = [(f"after {colors[k % 5]} comes", f" {colors[(k + 1) % 5]}", f" {colors[(k + 3) % 5]}") for k in range(80)]
for name, kinds in {
    "conversations": [{"prompt": prompt, "completion": good} for prompt, good, _ in rows],
    "pairs": [{"prompt": prompt, "chosen": good, "rejected": bad} for prompt, good, bad in rows],
    "labels": [
        {"prompt": prompt, "completion": (good, bad)[k % 2], "label": k % 2 == 0}
        for k, (prompt, good, bad) in enumerate(rows)
    ],
}.items():
    os.makedirs(name)
    with open(f"{name}/train.jsonl", "w") as file:
        file.writelines(json.dumps(row) + "\n" for row in kinds)
backend = Tokenizer(models.WordLevel(unk_token="<unk>"))
backend.pre_tokenizer = pre_tokenizers.Whitespace()
backend.train_from_iterator(
    [" ".join(row) for row in rows], trainers.WordLevelTrainer(special_tokens=["<pad>", "<unk>", "<s>", "</s>"])
)
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=backend, pad_token="<pad>", unk_token="<unk>", bos_token="<s>", eos_token="</s>"
)
tokenizer.save_pretrained("tiny")
LlamaForCausalLM(
    LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=32,
        attention_dropout=0.1,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
).save_pretrained("tiny")
