"""A GPT-2 of two small layers with a tokenizer of whole words: ``tiny_gpt2.py FOLDER [causal|classes]``."""

import sys

import torch
from text_corpus import OBJECTS, SUBJECTS, VERBS
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2ForSequenceClassification, GPT2LMHeadModel, PreTrainedTokenizerFast

if __name__ == "__main__":
    folder, kind = (*sys.argv[1:], "causal")[:2]
    torch.manual_seed(0)
    words = ["<unk>", "<eos>", "<pad>", *sorted({word for text in SUBJECTS + VERBS + OBJECTS for word in text.split()})]
    words += [".", ":", "good", "bad", "1", "0"]
    backend = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", eos_token="<eos>", pad_token="<pad>", model_max_length=64
    )
    tokenizer.save_pretrained(folder)
    config = GPT2Config(
        vocab_size=len(words),
        n_positions=64,
        n_embd=32,
        n_layer=2,
        n_head=2,
        eos_token_id=1,
        bos_token_id=1,
        pad_token_id=2,
    )
    model = GPT2LMHeadModel(config) if kind == "causal" else GPT2ForSequenceClassification(config)
    model.save_pretrained(folder)
