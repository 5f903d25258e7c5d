"""GPT-2, trained further with TRL. Nothing in it knows that the job may be preempted.

``--model tiny`` builds a small GPT-2 with random weights and ``--dataset text`` a small text, both without a network.
"""

import argparse
from typing import Any

import torch
from datasets import Dataset, load_dataset
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer


def tiny() -> tuple[Any, Any]:
    """A model and a tokenizer of letters."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    letters = {letter: number for number, letter in enumerate(["<pad>", "<eos>", *map(chr, range(32, 127))])}
    words = Tokenizer(models.WordLevel(letters, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
    config = GPT2Config(vocab_size=len(letters), n_embd=32, n_layer=2, n_head=2, n_positions=64)
    return GPT2LMHeadModel(config), tokenizer


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="gpt2")
    parser.add_argument("--dataset", default="roneneldan/TinyStories", help="with a column text; or text")
    parser.add_argument("--output", default="/workspace/checkpoints")
    parser.add_argument("--steps", type=int, default=-1, help="-1: as many as the epochs have")
    arguments = parser.parse_args()
    model, tokenizer = tiny() if arguments.model == "tiny" else (arguments.model, None)
    if arguments.dataset == "text":
        dataset = Dataset.from_dict({"text": [f"the number after {n} is {n + 1}" for n in range(2000)]})
    else:
        dataset = load_dataset(arguments.dataset, split="train")
    settings = SFTConfig(
        output_dir=arguments.output,
        max_steps=arguments.steps,
        num_train_epochs=3,
        per_device_train_batch_size=4,
        learning_rate=5e-5,
        logging_steps=10,
        max_length=64 if arguments.model == "tiny" else 1024,
        bf16=torch.cuda.is_available(),
        use_cpu=not torch.cuda.is_available(),  # without it, several processes on CPUs train each for itself
        report_to="none",
    )
    trainer = SFTTrainer(model, args=settings, train_dataset=dataset, processing_class=tokenizer)
    trainer.train()
    trainer.save_model(f"{arguments.output}/final")


if __name__ == "__main__":
    main()
