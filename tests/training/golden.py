"""Losses of a few steps of a tiny run, to be seen if they change. After a change that is meant to change them:

OMP_NUM_THREADS=1 python -m tests.training.golden
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import yaml

from loopwm.text.training.config import load_config
from loopwm.text.training.program import TextProgram
from loopwm.trainer.trainer import Trainer
from tests.fixtures.shards import TOY_CONFIG, write_toy_shards

FILE = Path(__file__).with_name("golden.json")

SETTINGS = [
    "model.overrides={prediction_heads: true, monitor_head: true}",
    "objective={reward_coef: 1, continue_coef: 1, accept_coef: 1, consistency_coef: 1, contraction_coef: 1}",
    "depth.ramp_steps=4",
    "run={steps: 5, mixed_precision: 'no', log_every: 1, eval_every: 2, eval_batches: 2}",
]
TERMS = ("loss", "reward_loss", "continue_loss", "consistency_loss", "grad_norm")

Losses = dict[str, dict[str, list[float]]]


def losses(folder: Path) -> Losses:
    """Of a run in this empty folder, by `train` or `dev` and the name of the term."""
    shards, config_file = folder / "shards", folder / "toy.yaml"
    write_toy_shards(shards)
    data = TOY_CONFIG["data"] | {"train": [str(shards)], "dev": [str(shards)]}
    config_file.write_text(yaml.safe_dump(TOY_CONFIG | {"data": data}), encoding="utf-8")
    Trainer(load_config(config_file, SETTINGS), TextProgram, folder / "run").run()
    found: Losses = {}
    for line in (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        terms = found.setdefault(record["kind"], {})
        for term in TERMS:
            if term in record:
                terms.setdefault(term, []).append(float(f"{record[term]:.6g}"))
    return found


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        FILE.write_text(json.dumps(losses(Path(temporary)), indent=1) + "\n", encoding="utf-8")
