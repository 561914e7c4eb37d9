"""Fine-tune a checkpoint with prepared logs, within minutes: the second step of `loopwm train LOGS`.

The time is fixed instead of the number of steps: the learning rate falls to zero over it, dev is measured at every
tenth of it, and the model with the lowest dev loss is exported.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from loopwm.records.config import typed
from loopwm.records.files import read_json, write_atomic
from loopwm.runtime import keep_everything, product_rate, quick_products
from loopwm.text.model.configuration import LoopWMConfig
from loopwm.text.model.flops import training_flops
from loopwm.text.training.config import TrainingConfig
from loopwm.text.training.program import OF_WEIGHTS, TextProgram
from loopwm.trainer.trainer import Trainer

PARTS, PATIENCE = 10, 3
"""Dev measurements of a run, and how many in a row without a lower loss end it."""

EXPECTED_ROOF = 0.2
"""Share of the rate of large matrix products that such runs reach on one or two cores, for the estimate."""

COMPUTED = 5
"""Tokens that a pass computes for each target of a trunk: contexts, branches and marks beside it."""

MODEL = "model"

CARD = """# World model fine-tuned with logs

Fine-tuned from `{weights}` with `{data}`: {step} steps in {minutes:.1f} minutes. Dev loss {loss:.3f}, {exact} at
horizon 1. It answers for the environment of these logs only.
"""

REGIMES = {"observed": 0.7, "snapshot": 0.3}


def fine_tune_config(data: Path, model: Path, seed: int) -> TrainingConfig:
    """Return the configuration of a run on prepared logs."""
    base = LoopWMConfig.from_pretrained(model)
    heads, monitor = float(base.prediction_heads), float(base.monitor_head)
    return typed(
        TrainingConfig,
        {
            "model": {"preset": OF_WEIGHTS, "weights": str(model)},
            "data": {
                "train": [str(data / "shards-train")],
                "dev": [str(data / "shards-dev")],
                "trunk_tokens_max": read_json(data / "data.json")["row_tokens"],
                "regimes": {kind: REGIMES[kind] for kind in read_json(data / "data.json")["contexts"]},
            },
            "batch": {"rows": 1, "tokens": 512, "micro_batches": 1},  # in minutes, more steps beat larger ones
            "objective": {
                "reward_coef": heads,
                "continue_coef": heads,
                "accept_coef": heads,
                "consistency_coef": 0.1 * monitor,
                "bag_coef": 1.0,
            },
            "optimizer": {"learning_rate": 8.0e-3, "warmup_steps": 10, "decay_share": 0.7},
            "depth": {"backward_loops": 8},
            "run": {"steps": 1_000_000, "seed": seed, "mixed_precision": "auto", "log_every": 1, "eval_batches": 3},
        },
    )


class TunedProgram(TextProgram):
    """A text run whose checkpoints contain its progress on dev.

    first, best: dev measurements of the checkpoint as it came and of the exported model. worse: measurements since the
    best.
    """

    first: dict[str, float] | None = None
    best: dict[str, float] | None = None
    worse: int = 0

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"first": self.first, "best": self.best, "worse": self.worse}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.first, self.best, self.worse = state["first"], state["best"], state["worse"]


class FineTuner(Trainer[TrainingConfig]):
    """Trains for `minutes`, those before an interruption included; `clock` returns seconds."""

    program: TunedProgram

    def __init__(
        self, config: TrainingConfig, folder: Path, minutes: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(config, TunedProgram, folder, clock=clock)
        self.minutes = minutes  # not of the configuration: a finished run continues with more
        self._measured = int(PARTS * self._done())  # a resumed run measures at its next part

    def run(self, max_minutes: float | None = None) -> None:
        print(self.estimate(), flush=True)
        if self.program.first is None:
            self._measure()
        super().run(max_minutes)

    def estimate(self) -> str:
        """Return the expected number of passes over the logs in one line."""
        model, data = self.program.model_config, self.config.data
        cost = training_flops(model, model.mu_rec, self.config.depth.backward_loops, data.trunk_tokens_max // 4)
        rate = EXPECTED_ROOF * product_rate(self.precision, self.accelerator.device) / cost
        left = max(0.0, 60 * self.minutes - self.seconds)
        targets = sum(source.planner.targets for source in self.program.train_stream.sources)
        passes = rate * left / (COMPUTED * targets)
        return f"estimate: {left / 60:.1f} minutes at {rate:,.0f} tokens/s, {passes:.0f} passes over the logs"

    def _finished(self) -> bool:
        return super()._finished() or self.program.worse >= PATIENCE

    def _after_step(self) -> None:
        part = int(PARTS * self._done())
        if part > self._measured:
            self._measured = part
            self._measure()
            self._save()

    def _export(self) -> None:
        if self.program.worse >= PATIENCE:
            print(f"stopped early: dev loss has not fallen for {PATIENCE} tenths of the time; more bring nothing")
        if (self._measured < PARTS and self.program.worse < PATIENCE) or not (self.folder / MODEL).is_dir():
            self._measure()
        first, best = self.program.first or {}, self.program.best or {}
        print(f"dev loss {first['loss']:.2f} -> {best['loss']:.2f}; {_exactness(first)} -> {_exactness(best)}")
        episodes = Path(self.config.data.train[0]).parent / "train.jsonl.xz"
        print(f"next: loopwm serve --model {self.folder / MODEL} --memory {episodes}")

    def _measure(self) -> None:
        """Measure dev; export the model if its loss is the lowest so far."""
        record = self.evaluate()
        self._log("dev", record)
        self.program.first = self.program.first or record  # kept by a resumed run
        best = self.program.best
        self.program.worse += 1  # set back below if this is the best
        if best is None or record["loss"] < best["loss"] or not (self.folder / MODEL).is_dir():  # it may be deleted
            self.program.best, self.program.worse = record, 0
            self.program.export(self.folder / MODEL)
            weights, data = self.config.model.weights, self.config.data.train[0]
            state = {"step": self.step, "minutes": self.seconds / 60, "loss": record["loss"]}
            card = CARD.format(weights=weights, data=data, exact=_exactness(record), **state)
            write_atomic(self.folder / MODEL / "README.md", card)


def _exactness(record: Mapping[str, float]) -> str:
    """Describe the share of exact observations at horizon 1, teacher-forced; k0 is the trunk."""
    return f"{record.get('exact_k0', 0.0):.0%} exact"


def fine_tune(data: Path, model: Path, out: Path, minutes: float, seed: int) -> None:
    """Fine-tune a checkpoint, or resume. minutes: above 0. Raises InputError."""
    keep_everything()
    with quick_products():
        FineTuner(fine_tune_config(data.resolve(), model.resolve(), seed), out, minutes).run()
