"""A metric module for ``evaluate.load``, which would fetch it from a hub: ``accuracy_metric.py PATH``."""

import sys
from pathlib import Path

MODULE = """
import datasets
import evaluate


class Accuracy(evaluate.Metric):
    def _info(self):
        number = datasets.Value("int32")
        features = datasets.Features({"predictions": number, "references": number})
        return evaluate.MetricInfo(description="", citation="", inputs_description="", features=features)

    def _compute(self, predictions, references):
        right = sum(int(one == other) for one, other in zip(predictions, references))
        return {"accuracy": right / len(references)}
"""

path = Path(sys.argv[1])
path.parent.mkdir(parents=True, exist_ok=True)
path.write_text(MODULE)
