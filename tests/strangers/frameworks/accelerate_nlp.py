"""Accelerate's complete NLP example: accumulation, a tracker, ``save_state`` by steps or epochs, its own resume."""

import argparse
import os

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed
from torch.optim import AdamW
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup


def get_dataloaders(batch_size):
    def pairs(count, seed):
        generator = torch.Generator().manual_seed(seed)
        rows = []
        for _ in range(count):
            length = int(torch.randint(4, 9, (1,), generator=generator))
            tokens = torch.randint(3, 40, (length,), generator=generator)
            rows.append({"input_ids": tokens, "labels": int(tokens[0] < tokens[-1])})
        return rows

    def collate_fn(examples):
        width = max(len(example["input_ids"]) for example in examples)
        ids = torch.zeros(len(examples), width, dtype=torch.long)
        for row, example in zip(ids, examples):
            row[: len(example["input_ids"])] = example["input_ids"]
        labels = torch.tensor([example["labels"] for example in examples])
        return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": labels}

    train = DataLoader(pairs(160, 1), shuffle=True, collate_fn=collate_fn, batch_size=batch_size)
    return train, DataLoader(pairs(48, 2), shuffle=False, collate_fn=collate_fn, batch_size=16)


def training_function(config, args):
    project = ProjectConfiguration(project_dir=args.project_dir, logging_dir=os.path.join(args.project_dir, "logs"))
    accelerator = Accelerator(
        cpu=args.cpu,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        log_with="tensorboard" if args.with_tracking else None,
        project_config=project,
    )
    if args.with_tracking:
        accelerator.init_trackers("complete_nlp_example", config)
    set_seed(config["seed"])
    train_dataloader, eval_dataloader = get_dataloaders(config["batch_size"])
    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=40,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=32,
            num_labels=2,
        )
    )
    optimizer = AdamW(params=model.parameters(), lr=config["lr"])
    lr_scheduler = get_linear_schedule_with_warmup(
        optimizer=optimizer,
        num_warmup_steps=5,
        num_training_steps=len(train_dataloader) * config["num_epochs"] // args.gradient_accumulation_steps,
    )
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )
    overall_step, starting_epoch, resume_step = 0, 0, None
    if args.resume_from_checkpoint:
        names = [f.name for f in os.scandir(args.project_dir) if f.is_dir() and f.name.startswith("step_")]
        if names:
            newest = max(names, key=lambda name: int(name.removeprefix("step_")))
            accelerator.print(f"Resumed from checkpoint: {newest}")
            accelerator.load_state(os.path.join(args.project_dir, newest))
            overall_step = int(newest.removeprefix("step_"))
            starting_epoch = overall_step // len(train_dataloader)
            resume_step = overall_step - starting_epoch * len(train_dataloader)

    for epoch in range(starting_epoch, config["num_epochs"]):
        model.train()
        total_loss = 0
        if args.resume_from_checkpoint and epoch == starting_epoch and resume_step is not None:
            active_dataloader = accelerator.skip_first_batches(train_dataloader, resume_step)
        else:
            active_dataloader = train_dataloader
        for batch in active_dataloader:
            with accelerator.accumulate(model):
                outputs = model(**batch)
                loss = outputs.loss
                total_loss += loss.detach().float()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
            overall_step += 1
            if args.checkpointing_steps.isdigit() and overall_step % int(args.checkpointing_steps) == 0:
                accelerator.save_state(os.path.join(args.project_dir, f"step_{overall_step}"))
            if overall_step % 5 == 0:
                accelerator.print(f"step {overall_step} loss {loss.item():.8f} lr {lr_scheduler.get_last_lr()[0]:.3e}")

        model.eval()
        correct = 0
        for batch in eval_dataloader:
            with torch.no_grad():
                outputs = model(**batch)
            predictions, references = accelerator.gather_for_metrics((outputs.logits.argmax(dim=-1), batch["labels"]))
            correct += int((predictions == references).sum())
        accelerator.print(f"epoch {epoch}: accuracy {correct / 48:.6f}")
        if args.with_tracking:
            train_loss = total_loss.item() / len(train_dataloader)
            accelerator.log({"accuracy": correct / 48, "train_loss": train_loss, "epoch": epoch}, step=epoch)
        if args.checkpointing_steps == "epoch":
            accelerator.save_state(os.path.join(args.project_dir, f"epoch_{epoch}"))
    accelerator.wait_for_everyone()
    accelerator.save_model(model, os.path.join(args.project_dir, "final"))
    accelerator.end_training()


def main():
    parser = argparse.ArgumentParser(description="Simple example of training script.")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--checkpointing_steps", type=str, default="none")
    parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
    parser.add_argument("--resume_from_checkpoint", action="store_true")
    parser.add_argument("--with_tracking", action="store_true")
    parser.add_argument("--project_dir", type=str, default="project")
    args = parser.parse_args()
    os.makedirs(args.project_dir, exist_ok=True)
    training_function({"lr": 2e-3, "num_epochs": 3, "seed": 42, "batch_size": 8}, args)


if __name__ == "__main__":
    main()
