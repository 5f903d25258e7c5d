"""A loop on accelerate: prepare, accumulate, clip, gather for metrics; one process or several."""

import hashlib

import torch
import torch.nn as nn
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, Dataset


class Points(Dataset):
    def __init__(self, count):
        self.x = torch.randn(count, 8, generator=torch.Generator().manual_seed(5))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return {"x": self.x[index] + 0.1 * torch.randn(8), "y": int(self.x[index].sum() > 0)}


def main():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    set_seed(9)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
    loader = DataLoader(Points(92), batch_size=4, shuffle=True)
    held_out = DataLoader(Points(20), batch_size=4)
    model, optimizer, loader, held_out, scheduler = accelerator.prepare(model, optimizer, loader, held_out, scheduler)
    set_seed(100 + accelerator.process_index)
    steps = 0
    for epoch in range(3):
        model.train()
        for batch in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(batch["x"]), batch["y"])
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                steps += 1
                mean = accelerator.gather(loss.detach()).mean().item()
                accelerator.print(f"step {steps} loss {mean:.8f}", flush=True)
        model.eval()
        correct = 0
        for index, batch in enumerate(held_out):
            with torch.no_grad():
                guesses = model(batch["x"]).argmax(1)
            guesses, truth = accelerator.gather_for_metrics((guesses, batch["y"]))
            correct += (guesses == truth).sum().item()
            accelerator.print(f"evaluation {index}", flush=True)
        accelerator.print(f"epoch {epoch} correct {correct}", flush=True)
    values = accelerator.unwrap_model(model).state_dict().values()
    digest = hashlib.sha256(b"".join(value.numpy().tobytes() for value in values)).hexdigest()
    print(f"end {accelerator.process_index} {digest}", flush=True)


if __name__ == "__main__":
    main()
