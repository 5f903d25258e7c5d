"""An ordinary Lightning script: python lightning_train.py OUT [--name value …]."""

import argparse
import datetime
import hashlib
import importlib
import itertools
import json
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset

options = argparse.ArgumentParser()
options.add_argument("out", type=Path)
options.add_argument("--package", default="lightning.pytorch")
options.add_argument("--devices", type=int, default=1)
options.add_argument("--epochs", type=int, default=3)
options.add_argument("--max-steps", type=int, default=-1)
options.add_argument("--samples", type=int, default=48)
options.add_argument("--accumulate", type=int, default=1)
options.add_argument("--workers", type=int, default=0)
options.add_argument("--val-interval", type=float, default=1.0)
options.add_argument("--val-every", type=int, default=1)
options.add_argument("--val-s", type=float, default=0.0, help="seconds that a batch of the validation takes")
options.add_argument("--step-s", type=float, default=0.0)
options.add_argument("--plateau", action="store_true")
options.add_argument("--manual", action="store_true")
options.add_argument("--loader", default="plain", choices=["plain", "iterable", "stateful", "pair"])
options.add_argument("--val-workers", type=int, default=0)
options.add_argument("--average", action="store_true", help="validate with averaged weights")
options.add_argument("--metric", action="store_true", help="log a torchmetrics object")
options.add_argument("--own-checkpoints", action="store_true", help="on exceptions too; goes on from them")
options.add_argument("--reload", type=int, default=0, help="make the loaders anew every so many epochs")
options.add_argument("--limit", type=float, default=1.0, help="limit_train_batches")
options.add_argument("--swa", action="store_true", help="stochastic weight averaging from the second epoch on")
options.add_argument("--find-rate", action="store_true", help="search for a learning rate first")
options.add_argument("--own-strategy", action="store_true")
options.add_argument("--ckpt", help="go on from this file")
options.add_argument("--silent", action="store_true", help="tell nobody which step is done")
options.add_argument("--fits", type=int, default=1)
options.add_argument("--logs", action="store_true", help="with loggers, and checkpoints in their folder")
options.add_argument("--dated", action="store_true", help="in a folder that is named by the clock")
args = options.parse_args()

L = importlib.import_module(args.package)
torch.set_num_threads(1)
L.seed_everything(7, workers=True, verbose=False)
out = args.out
out.mkdir(parents=True, exist_ok=True)


class Data(Dataset):
    def __init__(self, count, augment):
        generator = torch.Generator().manual_seed(5)
        self.x = torch.randn(count, 8, generator=generator)
        self.y = (self.x.sum(1) > 0).long()
        self.augment = augment

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        x = self.x[index]
        return (x + 0.1 * torch.randn(8) if self.augment else x), self.y[index]


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(Data(args.samples, augment=False))


TRACES = {}
"""By model, what it has trained in this process: an attribute of it would be restored."""


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = not args.manual
        self.net = torch.nn.Sequential(
            torch.nn.Linear(8, 16),
            torch.nn.BatchNorm1d(16),
            torch.nn.ReLU(),
            torch.nn.Dropout(0.2),
            torch.nn.Linear(16, 2),
        )
        self.seen = 0
        if args.metric:
            import torchmetrics

            self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=2)

    def on_save_checkpoint(self, checkpoint):
        checkpoint["seen"] = self.seen

    def on_load_checkpoint(self, checkpoint):
        self.seen = checkpoint["seen"]

    def training_step(self, batch, batch_idx):
        if args.loader == "pair":
            x, y = (torch.cat(parts) for parts in zip(batch["a"], batch["b"], strict=True))
        else:
            x, y = batch
        self.seen += len(x)
        scores = self.net(x)
        loss = torch.nn.functional.cross_entropy(scores, y)
        if args.metric:
            self.accuracy(scores, y)
            self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        if args.manual:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        TRACES.setdefault(id(self), []).append([self.global_step, batch_idx, loss.item()])
        time.sleep(args.step_s)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        if batch_idx == 1:
            (out / f"validating-{self.global_rank}").write_text(str(self.global_step))
        time.sleep(args.val_s)
        noise = torch.rand(())  # as evaluations in the wild do
        self.log("val_loss", torch.nn.functional.cross_entropy(self.net(x), y) + 0 * noise, sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        if args.plateau:
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=1.0)
            return [optimizer], [{"scheduler": scheduler, "monitor": "train_loss_epoch", "interval": "epoch"}]
        by_step = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=10_000)
        by_epoch = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.7)
        if args.swa:
            return [optimizer], [by_epoch]
        return [optimizer], [{"scheduler": by_step, "interval": "step"}, {"scheduler": by_epoch, "interval": "epoch"}]


class OwnStrategy(L.strategies.SingleDeviceStrategy):
    pass


class Beat(L.Callback):
    """Says which step is done, for who watches from outside, and how long training took."""

    seconds = cpu_seconds = 0.0

    def on_train_start(self, trainer, pl_module):
        self.began = time.perf_counter(), time.process_time()
        self.ends = []

    def on_train_end(self, trainer, pl_module):
        self.seconds, self.cpu_seconds = time.perf_counter() - self.began[0], time.process_time() - self.began[1]

    def step_s(self):
        """The usual time from step to step."""
        return sorted(after - before for before, after in itertools.pairwise(self.ends))[len(self.ends) // 2 - 1]

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if args.silent:
            self.ends.append(time.perf_counter())
        else:
            (out / f"step-{trainer.global_rank}").write_text(str(trainer.global_step))


def digest_of(model, optimizer):
    hashed = hashlib.sha256()
    tensors = dict(model.state_dict())
    for number, state in enumerate(optimizer.state.values()):
        tensors.update({f"{number}.{name}": value for name, value in state.items()})
    for name, value in sorted(tensors.items()):
        hashed.update(name.encode() + value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()


digests = []
for number in range(args.fits):
    kind = DataLoader
    if args.loader == "stateful":
        from torchdata.stateful_dataloader import StatefulDataLoader as kind
    data = Stream() if args.loader == "iterable" else Data(args.samples, augment=True)
    loader = kind(data, 4, shuffle=args.loader != "iterable", num_workers=args.workers)
    if args.loader == "pair":
        loader = {"a": loader, "b": DataLoader(Data(20, augment=True), 3, shuffle=True)}
    val_loader = DataLoader(Data(24, augment=False), 4, num_workers=args.val_workers)
    best = L.callbacks.ModelCheckpoint(dirpath=out / f"models-{number}", monitor="val_loss", save_top_k=1)
    stop = L.callbacks.EarlyStopping("val_loss", patience=50)
    beat = Beat()
    callbacks = [best, stop, beat]
    if args.average:
        callbacks.append(L.callbacks.EMAWeightAveraging(decay=0.9))
    if args.swa:
        callbacks.append(L.callbacks.StochasticWeightAveraging(1e-2, swa_epoch_start=1))
    if args.own_checkpoints:
        callbacks.append(L.callbacks.ModelCheckpoint(dirpath=out / "own", every_n_train_steps=5, save_last=True))
        callbacks.append(L.callbacks.OnExceptionCheckpoint(out / "own"))
    root = out / (f"{datetime.datetime.now():%Y%m%d-%H%M%S-%f}" if args.dated else "root")
    loggers = False
    if args.logs:
        kinds = importlib.import_module(f"{args.package}.loggers")
        loggers = [kinds.CSVLogger(root, flush_logs_every_n_steps=5), kinds.TensorBoardLogger(root, "tb")]
        for more in ({"monitor": "train_loss_epoch", "save_last": True}, {"every_n_train_steps": 6, "save_top_k": -1}):
            callbacks.append(L.callbacks.ModelCheckpoint(filename=f"{len(callbacks)}-{{step}}", **more))
    trainer = L.Trainer(
        default_root_dir=root,
        accelerator="cpu",
        devices=args.devices,
        strategy=OwnStrategy(torch.device("cpu")) if args.own_strategy else "ddp" if args.devices > 1 else "auto",
        max_epochs=args.epochs,
        max_steps=args.max_steps,
        accumulate_grad_batches=args.accumulate,
        val_check_interval=int(args.val_interval) if args.val_interval > 1 else args.val_interval,
        check_val_every_n_epoch=args.val_every,
        callbacks=callbacks,
        reload_dataloaders_every_n_epochs=args.reload,
        limit_train_batches=int(args.limit) if args.limit > 1 else args.limit,
        logger=loggers,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
    )
    model = Net()
    if args.find_rate:
        model.lr = 1e-2
        importlib.import_module(f"{args.package}.tuner").Tuner(trainer).lr_find(
            model, loader, val_loader, num_training=5
        )
    trainer.fit(model, loader, val_loader, ckpt_path="last" if args.own_checkpoints else args.ckpt)
    digests.append(digest_of(model, trainer.optimizers[0]))

result = {
    "digests": digests,
    "steps": trainer.global_step,
    "epochs": trainer.current_epoch,
    "trace": TRACES.get(id(model), []),
    "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
    "best": float(best.best_model_score) if best.best_model_score is not None else None,
    "lr": trainer.optimizers[0].param_groups[0]["lr"],
    "waited": stop.wait_count,
    "seen": model.seen,
    "seconds": beat.seconds,
    "cpu_seconds": beat.cpu_seconds,
    "step_s": beat.step_s() if args.silent else None,
}
(out / f"result-{trainer.global_rank}.json").write_text(json.dumps(result))
sys.stdout.flush()
