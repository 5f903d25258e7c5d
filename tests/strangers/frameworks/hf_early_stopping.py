"""Documentation of the Trainer's callbacks: ``compute_metrics``, the best model at the end, early stopping."""

import numpy as np
import torch
from transformers import (
    EarlyStoppingCallback,
    PretrainedConfig,
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)
from transformers.modeling_outputs import SequenceClassifierOutput

set_seed(3)


class MLPConfig(PretrainedConfig):
    model_type = "mlp"
    hidden = 24


class MLP(PreTrainedModel):
    config_class = MLPConfig

    def __init__(self, config):
        super().__init__(config)
        self.net = torch.nn.Sequential(
            torch.nn.Linear(8, config.hidden), torch.nn.GELU(), torch.nn.Dropout(0.2), torch.nn.Linear(config.hidden, 3)
        )
        self.post_init()

    def forward(self, features, labels=None):
        logits = self.net(features)
        loss = None if labels is None else torch.nn.functional.cross_entropy(logits, labels)
        return SequenceClassifierOutput(loss=loss, logits=logits)


class Blobs(torch.utils.data.Dataset):
    def __init__(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(3, (count,), generator=generator)
        self.features = torch.randn(count, 8, generator=generator) * 1.5
        self.features[torch.arange(count), self.labels] += 2

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return {"features": self.features[index], "labels": self.labels[index]}


def compute_metrics(eval_pred):
    logits, labels = eval_pred
    predictions = np.argmax(logits, axis=-1)
    return {"accuracy": float((predictions == labels).mean())}


class PrinterOfBest(TrainerCallback):
    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        best = "none" if state.best_metric is None else f"{state.best_metric:.6f}"
        print(f"epoch {state.epoch:.2f} accuracy {metrics['eval_accuracy']:.6f} best before {best}")


trainer = Trainer(
    model=MLP(MLPConfig()),
    args=TrainingArguments(
        output_dir="results",
        eval_strategy="epoch",
        save_strategy="epoch",
        logging_strategy="epoch",
        learning_rate=5e-3,
        lr_scheduler_type="cosine",
        warmup_steps=5,
        weight_decay=0.01,
        per_device_train_batch_size=8,
        num_train_epochs=20,
        load_best_model_at_end=True,
        metric_for_best_model="accuracy",
        save_total_limit=2,
        report_to="none",
        disable_tqdm=True,
    ),
    train_dataset=Blobs(80, 1),
    eval_dataset=Blobs(60, 2),
    compute_metrics=compute_metrics,
    callbacks=[EarlyStoppingCallback(early_stopping_patience=3), PrinterOfBest()],
)
trainer.train()
metrics = trainer.evaluate()
print(f"done after {trainer.state.global_step} steps, best {trainer.state.best_metric:.6f} at", end=" ")
print(trainer.state.best_model_checkpoint, f"evaluated {metrics['eval_accuracy']:.6f} {metrics['eval_loss']:.8f}")
trainer.save_metrics(
    "eval", {key: value for key, value in metrics.items() if "runtime" not in key and "per_" not in key}
)
