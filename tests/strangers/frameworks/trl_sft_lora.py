"""TRL's SFT trainer documentation: ``SFTTrainer`` with a PEFT ``LoraConfig``, the adapter saved at the end."""

from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import SFTConfig, SFTTrainer

set_seed(1)
colors = "red green blue white black".split()
rows = [
    {"prompt": f"the color after {colors[k % 5]} is", "completion": f" {colors[(k + 1 + k % 2) % 5]}"}
    for k in range(96)
]
backend = Tokenizer(models.WordLevel(unk_token="<unk>"))
backend.pre_tokenizer = pre_tokenizers.Whitespace()
backend.train_from_iterator(
    [row["prompt"] + row["completion"] for row in rows],
    trainers.WordLevelTrainer(special_tokens=["<pad>", "<unk>", "<s>", "</s>"]),
)
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=backend, pad_token="<pad>", unk_token="<unk>", bos_token="<s>", eos_token="</s>"
)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=32,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
)
trainer = SFTTrainer(
    model=model,
    args=SFTConfig(
        output_dir="sft",
        num_train_epochs=3,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        gradient_checkpointing=False,
        learning_rate=1e-2,
        logging_steps=3,
        save_steps=10,
        save_total_limit=2,
        max_length=16,
        bf16=False,
        report_to="none",
        disable_tqdm=True,
    ),
    train_dataset=Dataset.from_list(rows),
    processing_class=tokenizer,
    peft_config=LoraConfig(r=4, lora_alpha=8, lora_dropout=0.1, target_modules="all-linear", task_type="CAUSAL_LM"),
)
trainer.train()
trainer.save_model("sft-adapter")
print("last loss", [entry["loss"] for entry in trainer.state.log_history if "loss" in entry][-1])
