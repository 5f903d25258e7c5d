"""A small real training for the tests of the launcher: DDP on the CPU, dropout, shuffled data.

``tiny_training.py DIR [DELAY]``, in seconds a step, or a file that says so and may change meanwhile. The last line of
rank 0 is ``DONE <steps> <hash of the parameters>``.
"""

import hashlib
import os
import sys
import time
from pathlib import Path

import torch

import holdfast

torch.manual_seed(0)
torch.set_num_threads(1)
delay = sys.argv[2] if len(sys.argv) > 2 else "0"
distributed = "WORLD_SIZE" in os.environ
if distributed:
    torch.distributed.init_process_group("gloo")
rank = int(os.environ.get("RANK", "0"))
model = torch.nn.Sequential(
    torch.nn.Linear(16, 32), torch.nn.LayerNorm(32), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(32, 2)
)
trained = torch.nn.parallel.DistributedDataParallel(model) if distributed else model
torch.manual_seed(100 + rank)
optimizer = torch.optim.AdamW(trained.parameters(), 1e-2)
inputs = torch.randn(320, 16, generator=torch.Generator().manual_seed(1))
data = torch.utils.data.TensorDataset(inputs, (inputs.sum(1) > 0).long())
sampler = torch.utils.data.distributed.DistributedSampler(data) if distributed else None
loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=sampler is None, sampler=sampler)

with holdfast.Run(sys.argv[1], model=trained, optimizer=optimizer, settings={"kill_wait": 0.1}) as run:
    for epoch in run.epochs(3):
        if sampler is not None:
            sampler.set_epoch(epoch)
        for batch, target in run.batches(loader):
            loss = torch.nn.functional.cross_entropy(trained(batch), target)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.step(loss=loss)
            if delay != "0":
                time.sleep(float(Path(delay).read_text() if os.path.exists(delay) else delay))

if rank == 0:
    parameters = b"".join(value.numpy().tobytes() for value in model.state_dict().values())
    print("DONE", run.steps, hashlib.sha256(parameters).hexdigest()[:16], flush=True)
