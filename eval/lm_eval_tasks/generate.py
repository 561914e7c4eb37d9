"""Writes one task file for each suite, context, horizon and kind: `python -m eval.lm_eval_tasks.generate`."""

from __future__ import annotations

from itertools import product
from pathlib import Path

from eval.files import write_atomic
from eval.windows import SUITES

KINDS = ("observation", "loss")
CONTEXTS = ("observed", "snapshot")
HORIZONS = (1, 2, 3, 4, 5)
TASK = """include: ../_{kind}.yaml
task: loopwm_{suite}_{context}_{kind}_h{horizon}
tag: [loopwm_{suite}_{context}_{kind}]
dataset_kwargs: {{suite: {suite}, context: {context}, horizon: {horizon}}}
"""


def task_files() -> dict[str, str]:
    """Contents by path inside this folder."""
    suites = sorted(path.name.removesuffix(".jsonl.gz") for path in SUITES.glob("*.jsonl.gz"))
    files = {}
    for suite, context, kind, horizon in product(suites, CONTEXTS, KINDS, HORIZONS):
        text = TASK.format(suite=suite, context=context, kind=kind, horizon=horizon)
        files[f"{suite}/{context}-{kind}-h{horizon}.yaml"] = text
    return files


if __name__ == "__main__":
    for name, text in task_files().items():
        write_atomic(Path(__file__).parent / name, text)
