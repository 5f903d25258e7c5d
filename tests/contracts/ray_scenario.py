"""A training of Ray Train on this machine, in a process of its own, with a name of Ray missing or not."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from typing import Any

import ray.train

from tests.contracts.tables import warnings_of_holdfast, without

GONE = "ray._private.state:GlobalState.get_draining_nodes"


def total_of(steps: int) -> float:
    total = 0.0
    for step in range(steps):
        total = total * 0.5 + step
    return total


def train(config: dict[str, Any]) -> None:
    total = total_of(config["steps"])
    ray.train.report({"total": total})
    with open(config["out"], "w") as file:
        json.dump(total, file)


def main() -> None:
    folder, way = sys.argv[1:]
    out = os.path.join(folder, "total")
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    from holdfast.adapters import registry
    from holdfast.errors import UnprotectedError

    os.environ["HOLDFAST_ENABLED"] = way
    told: dict[str, Any] = {}
    with warnings_of_holdfast() as heard:
        with without(GONE):
            registry.install("ray", ray.train)
        if way != "require":
            ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, object_store_memory=80_000_000)
        trainer = DataParallelTrainer(
            train,
            train_loop_config={"steps": 5, "out": out},
            scaling_config=ray.train.ScalingConfig(num_workers=1),
            run_config=ray.train.RunConfig(name="run", storage_path=folder),
        )
        try:
            trainer.fit()
            with open(out) as file:
                told["total"] = json.load(file)
        except UnprotectedError as error:
            told["refused"] = str(error)
        finally:
            with contextlib.suppress(Exception):
                ray.shutdown()
    told |= {"warnings": heard, "callbacks": os.environ.get("RAY_TRAIN_CALLBACKS")}
    print(json.dumps(told))


if __name__ == "__main__":
    main()
