"""Hugging Face courses: pretrain a causal language model, save it, load it again and fine-tune in one script."""

import torch
from transformers import (
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    Trainer,
    TrainingArguments,
    set_seed,
)

set_seed(5)


class Rows(torch.utils.data.Dataset):
    def __init__(self, count, classify):
        self.count, self.classify = count, classify

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        row = (index * 3 + (1 + index % 2) * torch.arange(12)) % 32
        return {"input_ids": row, "labels": torch.tensor(index % 2) if self.classify else row}


def arguments(name, **more):
    return TrainingArguments(
        output_dir=name,
        per_device_train_batch_size=8,
        learning_rate=3e-3,
        logging_steps=5,
        report_to="none",
        disable_tqdm=True,
        **more,
    )


config = GPT2Config(
    vocab_size=32, n_positions=12, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0, pad_token_id=0
)
pretrainer = Trainer(
    GPT2LMHeadModel(config), arguments("pretraining", num_train_epochs=2, save_steps=20), train_dataset=Rows(160, False)
)
pretrainer.train()
pretrainer.save_model("pretrained")

model = GPT2ForSequenceClassification.from_pretrained("pretrained", num_labels=2)
trainer = Trainer(
    model,
    arguments("finetuning", num_train_epochs=3, save_strategy="epoch", eval_strategy="epoch"),
    train_dataset=Rows(80, True),
    eval_dataset=Rows(32, True),
)
trainer.train()
predictions = trainer.predict(Rows(16, True))
print("predicted", predictions.predictions.argmax(-1).tolist())
trainer.save_model("finetuned")
