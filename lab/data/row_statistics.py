"""Statistics of a text run's rows: the share of computed tokens that are targets, and their kinds.

python -m lab.data.row_statistics --config configs/text-small.yaml --steps 100
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from loopwm.records.command import doc_parser, exit_status
from loopwm.records.errors import InputError
from loopwm.text.data.collate import row_widths
from loopwm.text.data.data_loader import LoaderState, PlannedRow, partition
from loopwm.text.data.tree import IGNORED, TRUNK_HORIZON, Layout
from loopwm.text.training.config import load_config
from loopwm.text.training.program import TextProgram


@dataclass
class RowStatistics:
    """Sums over optimiser steps.

    tokens: computed tokens without padding; padded: with it. targets: target tokens by kind, and `served`: those with a
    prompt that is served. transitions: trunk steps with a target.
    """

    steps: int = 0
    rows: int = 0
    tokens: int = 0
    padded: int = 0
    served: int = 0
    transitions: int = 0
    by: dict[str, Counter[str]] = field(default_factory=dict)

    def add(self, rows: Sequence[PlannedRow], trunk_is_served: bool) -> None:
        """Add an optimiser step's rows."""
        self.steps += 1
        self.rows += len(rows)
        self.tokens += sum(len(planned.row) for planned in rows)
        for planned in rows:
            horizons = Counter(
                horizon
                for horizon, label in zip(planned.row.horizon, planned.row.label, strict=True)
                if label != IGNORED
            )
            targets = sum(horizons.values())
            self.served += targets if trunk_is_served else targets - horizons[TRUNK_HORIZON]
            first = planned.plan.targets_from
            self.transitions += 0 if first is None else planned.plan.last - first + 1
            self._count("context", planned.plan.context_kind, targets)
            self._count("world", planned.episode.env, targets)
            self._count("policy", planned.episode.policy, targets)
            self._count("task", planned.episode.task, targets)
            for horizon, count in horizons.items():
                self._count("horizon", "trunk" if horizon == TRUNK_HORIZON else str(horizon), count)

    def pad(self, rows: Sequence[PlannedRow], groups: int, layout: Layout) -> None:
        """Add the padded tokens of a step's micro-batches."""
        widths = row_widths([p.row for p in sorted(rows, key=lambda p: len(p.row), reverse=True)], layout)
        self.padded += sum((b - a) * int(widths[a:b].max(0).sum()) for a, b in partition(widths, groups))

    def _count(self, kind: str, name: str, targets: int) -> None:
        self.by.setdefault(kind, Counter())[name] += targets

    def lines(self) -> Iterable[str]:
        targets = sum(self.by["context"].values())
        yield f"{self.steps} steps of {self.rows / self.steps:.1f} rows and {self.tokens / self.steps:.0f} tokens"
        yield f"{self.transitions / self.steps:.1f} transitions a step are targets of a trunk"
        yield f"targets: {targets / self.tokens:.1%} of the tokens, in a served format: {self.served / self.tokens:.1%}"
        yield f"padding: {1 - self.tokens / self.padded:.1%} of what is computed"
        for kind, counts in self.by.items():
            shares = "  ".join(f"{name} {count / targets:.1%}" for name, count in sorted(counts.items()))
            yield f"targets by {kind}: {shares}"


def statistics(program: TextProgram, steps: int) -> RowStatistics:
    """Compute the statistics of the first `steps` optimiser steps."""
    stream, sums = program.train_stream, RowStatistics()
    for rows, _ in islice(stream.steps(LoaderState()), steps):
        sums.add(rows, program.model_config.trunk_is_served)
        sums.pad(rows, stream.batch.micro_batches, stream.layout)
    return sums


def run(config: Path, overrides: Sequence[str], steps: int) -> None:
    """Print the statistics. Raises InputError."""
    if steps < 1:
        raise InputError(f"--steps: must be at least 1, got {steps}")
    print("\n".join(statistics(TextProgram(load_config(config, overrides)), steps).lines()))


def main(argv: list[str] | None = None) -> int:
    parser = doc_parser("python -m lab.data.row_statistics", __doc__)
    parser.add_argument("--config", type=Path, required=True, help="training configuration")
    parser.add_argument("--steps", type=int, default=100, help="optimiser steps to look at (default: %(default)s)")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="changes to the configuration")
    arguments = parser.parse_args(argv)
    return exit_status(lambda: run(arguments.config, arguments.overrides, arguments.steps))


if __name__ == "__main__":
    sys.exit(main())
