"""Exit policies as predictors of the harness that also record the loops of each pass."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from eval.models.checkpoint import CheckpointPredictor
from eval.scores.predictions import Prediction, append_lines, drop_torn_line
from lab.studies.window_scores import encoded
from loopwm.core.exit_rules import ExitRule, Fixed, LoopView, SameInEveryPass, exit_rule
from loopwm.records.files import read_json_lines
from loopwm.records.template import LONGEST_OBSERVATION, ContextKind
from loopwm.records.windows import Window

LOOPS = "loops.jsonl"


@dataclass(frozen=True)
class Drawn(SameInEveryPass):
    """Exit after the number of loops drawn for each row."""

    loops: tuple[int, ...]

    @property
    def limit(self) -> int:
        return max(self.loops)

    def exits(self, view: LoopView) -> Tensor:
        return torch.tensor(self.loops, device=view.states[-1].device) <= view.loop


@exit_rule("random")
@dataclass(frozen=True)
class RandomExit:
    """Exit after each loop with this probability: the baseline of a rule at equal mean loops.

    Draws depend on (seed, pass, row of the batch) only, so use another seed for each batch. The mean is
    (1 - (1 - probability)^limit) / probability. Raises ValueError if the probability is not inside (0, 1) or the seed
    is below zero.
    """

    probability: float
    limit: int
    seed: int
    needs_gate: ClassVar[bool] = False
    depends_on_batch: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 < self.probability < 1:
            raise ValueError(f"probability: must be inside (0, 1), got {self.probability}")
        if self.seed < 0:
            raise ValueError(f"seed: must not be below 0, got {self.seed}")

    def for_pass(self, index: int, rows: Sequence[int]) -> Drawn:
        generators = (np.random.default_rng((self.seed, index, row)) for row in rows)
        return Drawn(tuple(min(int(rng.geometric(self.probability)), self.limit) for rng in generators))

    def exits(self, view: LoopView) -> Tensor:
        return self.for_pass(0, range(len(view.states[-1]))).exits(view)


@dataclass(frozen=True)
class ExitPolicy:
    """Exit rules of transitions and of decoded tokens. Contexts are encoded with `limit` loops."""

    name: str
    family: str
    advance: ExitRule
    decode: ExitRule
    limit: int


@dataclass(frozen=True)
class MeanLoops:
    """Mean loops over all transitions, and over all decoded tokens with the end marks."""

    advance: float
    decode: float


class PolicyPredictor(CheckpointPredictor):
    """Checkpoint with an exit policy. Writes loops to `loops.jsonl` in `out`, window by window."""

    def __init__(self, folder: Path, policy: ExitPolicy, out: Path) -> None:
        super().__init__(folder, policy.limit)
        self._policy, self._loops = policy, out / LOOPS
        if self._loops.exists():
            drop_torn_line(self._loops)

    @property
    def identity(self) -> Mapping[str, str | int]:
        return {**super().identity, "advance": repr(self._policy.advance), "decode": repr(self._policy.decode)}

    def predict(
        self, windows: Sequence[Window], context_kind: ContextKind, horizons: Sequence[int]
    ) -> list[Prediction]:
        world = encoded(self, windows, context_kind)
        predictions = [Prediction({}, cut) for cut in world.steps_cut]
        decoded_loops: list[list[tuple[int, ...]]] = [[] for _ in windows]
        advance, decode = (_seeded(rule, windows) for rule in (self._policy.advance, self._policy.decode))
        for k in range(1, max(horizons) + 1):
            world = self.world_model.advance(world, [window["actions"][k - 1] for window in windows], advance)
            if k in horizons:
                decoded = self.world_model.decode_traced(world, LONGEST_OBSERVATION, decode, greedy=True)
                for prediction, loops, traced in zip(predictions, decoded_loops, decoded, strict=True):
                    prediction.texts[k] = traced.text
                    loops.append(traced.loops)
        append_lines(
            self._loops,
            [
                {"id": window["id"], "advance": taken, "decode": sum(map(sum, loops)), "tokens": sum(map(len, loops))}
                for window, taken, loops in zip(windows, world.loops, decoded_loops, strict=True)
            ],
        )
        return predictions


def _seeded(rule: ExitRule, windows: Sequence[Window]) -> ExitRule:
    """Seed random exits by batch: they sample by row of a batch, so equal seeds would repeat across batches."""
    if not isinstance(rule, RandomExit):
        return rule
    return replace(rule, seed=rule.seed + zlib.crc32(" ".join(window["id"] for window in windows).encode()))


def read_mean_loops(out: Path) -> MeanLoops:
    """Read the mean loops. A window of an interrupted batch occurs twice in the file and counts once."""
    lines = {line["id"]: line for _, line in read_json_lines(out / LOOPS)}.values()
    advance = [loops for line in lines for loops in line["advance"]]
    return MeanLoops(
        sum(advance) / len(advance), sum(line["decode"] for line in lines) / sum(line["tokens"] for line in lines)
    )


def random_policy(policy: ExitPolicy, loops: MeanLoops) -> ExitPolicy:
    """Return random exits with the mean loops of `policy`, for transitions and decoding separately."""
    advance, decode = (
        _random_rule(mean, policy.limit, seed) for seed, mean in enumerate((loops.advance, loops.decode))
    )
    return ExitPolicy(f"{policy.name}, random", "random", advance, decode, policy.limit)


def _random_rule(mean: float, limit: int, seed: int) -> ExitRule:
    """Return a rule that exits after each loop with probability p, so that (1 - (1 - p)^limit) / p is `mean`."""
    if mean in (1, limit):
        return Fixed(round(mean))
    low, high = 0.0, 1.0  # the mean falls from limit to 1
    for _ in range(50):
        p = (low + high) / 2
        low, high = (p, high) if (1 - (1 - p) ** limit) / p > mean else (low, p)
    return RandomExit((low + high) / 2, limit, seed)
