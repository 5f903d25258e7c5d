"""TRL's DPO trainer documentation: preference pairs, a policy and its reference model."""

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import DPOConfig, DPOTrainer

set_seed(2)
colors = "red green blue white black".split()
rows = [
    {
        "prompt": f"after {colors[k % 5]} comes",
        "chosen": f" {colors[(k + 1) % 5]}",
        "rejected": f" {colors[(k + 3) % 5]}",
    }
    for k in range(80)
]
backend = Tokenizer(models.WordLevel(unk_token="<unk>"))
backend.pre_tokenizer = pre_tokenizers.Whitespace()
backend.train_from_iterator(
    [" ".join(row.values()) for row in rows],
    trainers.WordLevelTrainer(special_tokens=["<pad>", "<unk>", "<s>", "</s>"]),
)
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=backend, pad_token="<pad>", unk_token="<unk>", bos_token="<s>", eos_token="</s>"
)
config = LlamaConfig(
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
LlamaForCausalLM(config).save_pretrained("base")
tokenizer.save_pretrained("base")
trainer = DPOTrainer(
    model="base",
    args=DPOConfig(
        output_dir="dpo",
        num_train_epochs=2,
        per_device_train_batch_size=4,
        gradient_checkpointing=False,
        learning_rate=5e-3,
        logging_steps=4,
        save_strategy="no",
        bf16=False,
        model_init_kwargs={"dtype": "float32"},
        report_to="none",
        disable_tqdm=True,
    ),
    train_dataset=Dataset.from_list(rows),
    processing_class=tokenizer,
)
trainer.train()
trainer.save_model("dpo-model")
