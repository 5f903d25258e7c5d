"""The Transformers quick tour: tokenizer, ``map``, ``DataCollatorWithPadding``, ``Trainer``; evaluate and save."""

from datasets import Dataset, DatasetDict
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DataCollatorWithPadding,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    set_seed,
)

set_seed(42)
good, bad = "great fine lovely superb".split(), "awful poor boring dull".split()
nouns = "plot actor film scene score ending".split()


def reviews(count, offset):
    rows = []
    for index in range(offset, offset + count):
        words = good if index % 2 else bad
        text = " ".join(
            f"the {nouns[(index * 7 + k) % 6]} was {words[(index * 5 + k) % 4]}" for k in range(1 + index % 3)
        )
        rows.append({"text": text, "label": index % 2})
    return Dataset.from_list(rows)


dataset = DatasetDict(train=reviews(120, 0), test=reviews(24, 500))
backend = Tokenizer(models.WordLevel(unk_token="[UNK]"))
backend.pre_tokenizer = pre_tokenizers.Whitespace()
backend.train_from_iterator(
    dataset["train"]["text"], trainers.WordLevelTrainer(special_tokens=["[PAD]", "[UNK]", "[CLS]", "[SEP]"])
)
tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]")
dataset = dataset.map(lambda batch: tokenizer(batch["text"]), batched=True)
model = BertForSequenceClassification(
    BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        num_labels=2,
    )
)
training_args = TrainingArguments(
    output_dir="path/to/save/folder",
    learning_rate=2e-3,
    per_device_train_batch_size=8,
    per_device_eval_batch_size=8,
    num_train_epochs=3,
    logging_steps=5,
    save_steps=20,
    report_to="none",
)
trainer = Trainer(
    model=model,
    args=training_args,
    train_dataset=dataset["train"],
    eval_dataset=dataset["test"],
    processing_class=tokenizer,
    data_collator=DataCollatorWithPadding(tokenizer=tokenizer),
)
output = trainer.train()
print(f"steps {output.global_step}, training loss {output.training_loss:.6f}")
print("eval_loss %.8f" % trainer.evaluate()["eval_loss"])
trainer.save_model("final")
