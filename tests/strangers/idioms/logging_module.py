"""The logging module with a FileHandler and a RotatingFileHandler, warnings captured, a line for each few steps."""

import logging
import logging.handlers
import sys

import torch
from torch import nn

logger = logging.getLogger("train")
logger.setLevel(logging.DEBUG)
console = logging.StreamHandler(sys.stdout)
console.setLevel(logging.INFO)
to_file = logging.FileHandler("debug.log", mode="a")
rotating = logging.handlers.RotatingFileHandler("rotating.log", maxBytes=600, backupCount=3)
for handler in (console, to_file, rotating):
    handler.setFormatter(logging.Formatter("%(levelname)s %(funcName)s: %(message)s"))
    logger.addHandler(handler)


def main():
    torch.manual_seed(18)
    x = torch.randn(200, 8)
    y = x[:, :1].exp()
    model = nn.Sequential(nn.Linear(8, 16), nn.Softplus(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    logger.info("%d parameters", sum(p.numel() for p in model.parameters()))
    step = 0
    for epoch in range(5):
        for i in torch.randperm(200).split(10):
            loss = nn.functional.mse_loss(model(x[i]), y[i])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step % 4 == 0:
                logger.debug("step %d loss %.6f", step, loss.detach())
        logger.info("epoch %d loss %.6f", epoch, loss.item())
    logger.warning("finished after %d steps", step)


main()
logging.shutdown()
