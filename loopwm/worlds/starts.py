"""Starts of imagined episodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from loopwm.records.files import read_json_lines
from loopwm.records.template import CONTEXT_KINDS, Context, ContextKind, FormatError, window_context

SCIENCEWORLD = Path(__file__).with_name("data") / "scienceworld.jsonl.gz"
"""First observations of training variations, as an agent sees them: 518 of all 30 tasks."""
ALFWORLD = SCIENCEWORLD.with_name("alfworld.jsonl.gz")
"""First observations of 144 original training games of all 6 tasks."""


@dataclass(frozen=True)
class Start:
    """A context with its task and family, if known."""

    context: Context
    task: str | None = None
    family: str | None = None

    @property
    def observation(self) -> str:
        history = self.context.history
        return history[-1].observation if history else self.context.observation

    def info(self) -> dict[str, Any]:
        """Infos of an environment's reset."""
        context = self.context
        texts = {"goal": context.goal, "look": context.look, "inventory": context.inventory}
        return {**texts, "task": self.task, "family": self.family}


OPTIONS = ("context", "task", "family")
"""Options of a reset."""


class Starts:
    def __init__(self, starts: Sequence[Context | Start]) -> None:
        """Draw from these starts. Raises FormatError if empty."""
        if not starts:
            raise FormatError("starts", "must be at least one context, got none")
        self._starts = [start if isinstance(start, Start) else Start(start) for start in starts]

    def draw(self, random: np.random.Generator, options: Mapping[str, Any]) -> Start:
        """Draw a start. options: a "context", which is the start, or a required "task" or "family".

        Raises FormatError for a task or family without a start, and for any other option.
        """
        for name in options:
            if name not in OPTIONS:
                raise FormatError("options", f"must be one of {', '.join(OPTIONS)}, got {name!r}")
        if "context" in options:
            return Start(options["context"])
        fitting = self._starts
        for name in ("task", "family"):
            if (value := options.get(name)) is not None:
                known = sorted({str(getattr(start, name)) for start in fitting})
                fitting = [start for start in fitting if getattr(start, name) == value]
                if not fitting:
                    raise FormatError(name, f"no start of {value!r}; there are {', '.join(known)}")
        return fitting[int(random.integers(len(fitting)))]


def read_starts(path: str | Path, context_kind: ContextKind) -> list[Start]:
    """Read the contexts of a window file (.jsonl, .jsonl.gz), such as `python -m data_prep windows` writes.

    Raises FormatError for an unknown context and, naming the line, for a window that lacks a required field.
    """
    if context_kind not in CONTEXT_KINDS:
        raise FormatError("context", f"must be one of {', '.join(CONTEXT_KINDS)}, got {context_kind!r}")
    starts = []
    for number, window in read_json_lines(Path(path)):
        try:
            starts.append(Start(window_context(window, context_kind), window.get("task"), window.get("family")))
        except (KeyError, TypeError, FormatError) as error:
            raise FormatError("starts", f"{path}: line {number}: {error}") from error
    return starts
