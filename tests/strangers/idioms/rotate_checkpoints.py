"""diffusers' training scripts: the oldest checkpoint folders are removed with shutil.rmtree before a save."""

import os
import random
import shutil

import numpy as np
import torch
from torch import nn

random.seed(0)
np.random.seed(0)
torch.manual_seed(0)
output_dir, checkpointing_steps, total_limit = "sd-model", 8, 2
os.makedirs(output_dir, exist_ok=True)

images = torch.randn(64, 4, 4, 4)
dataset = torch.utils.data.TensorDataset(images)
train_dataloader = torch.utils.data.DataLoader(dataset, shuffle=True, batch_size=8)
unet = nn.Sequential(nn.Conv2d(4, 16, 3, padding=1), nn.SiLU(), nn.Conv2d(16, 4, 3, padding=1))
optimizer = torch.optim.AdamW(unet.parameters(), lr=1e-3)

global_step = 0
for _epoch in range(6):
    train_loss = 0.0
    for (latents,) in train_dataloader:
        noise = torch.randn_like(latents)
        timesteps = torch.randint(0, 100, (latents.shape[0],))
        weight = (timesteps / 100).view(-1, 1, 1, 1)
        noisy = latents * (1 - weight) + noise * weight
        loss = nn.functional.mse_loss(unet(noisy).float(), noise.float())
        train_loss += loss.item()
        loss.backward()
        nn.utils.clip_grad_norm_(unet.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        global_step += 1
        if global_step % checkpointing_steps == 0:
            checkpoints = [name for name in os.listdir(output_dir) if name.startswith("checkpoint")]
            checkpoints = sorted(checkpoints, key=lambda name: int(name.split("-")[1]))
            if len(checkpoints) >= total_limit:
                for name in checkpoints[: len(checkpoints) - total_limit + 1]:
                    print("removing", name)
                    shutil.rmtree(os.path.join(output_dir, name))
            save_path = os.path.join(output_dir, f"checkpoint-{global_step}")
            os.makedirs(save_path)
            torch.save(unet.state_dict(), os.path.join(save_path, "unet.bin"))
            torch.save(optimizer.state_dict(), os.path.join(save_path, "optimizer.bin"))
            print(f"Saved state to {save_path}")
    print(f"step {global_step} loss {train_loss / len(train_dataloader):.6f}")
torch.save(unet.state_dict(), os.path.join(output_dir, "unet.bin"))
