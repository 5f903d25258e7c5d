"""torch.optim.swa_utils.AveragedModel as an exponential average, evaluated beside the model that is trained."""

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

torch.manual_seed(8)
n = 300
features = torch.randn(n, 7)
target = features @ torch.randn(7, 3) + 0.3 * torch.randn(n, 3)
model = nn.Sequential(nn.Linear(7, 24), nn.SiLU(), nn.Dropout(0.2), nn.Linear(24, 3))
ema_model = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.98), use_buffers=True)
optimizer = torch.optim.NAdam(model.parameters(), lr=4e-3)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(features, target), 30, shuffle=True, drop_last=True)

global_step = 0
while global_step < 90:
    for inp, tgt in loader:
        model.train()
        loss = (model(inp) - tgt).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ema_model.update_parameters(model)
        global_step += 1
        if global_step % 15 == 0:
            model.eval()
            ema_model.eval()
            with torch.inference_mode():
                a = (model(features) - target).pow(2).mean().item()
                b = (ema_model(features) - target).pow(2).mean().item()
            print(f"step {global_step}: model {a:.6f} ema {b:.6f} averaged {ema_model.n_averaged.item()}")
torch.save({"model": model.state_dict(), "ema": ema_model.module.state_dict()}, "last.ckpt")
