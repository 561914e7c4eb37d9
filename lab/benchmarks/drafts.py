"""Compare texts and processor time of observations decoded with and without drafts, on windows of a suite.

    python -m lab.benchmarks.drafts --suite scienceworld-500 --limit 250

For each window, after --horizon deferred actions: alone and with drafts of its own context, in batches of 32 worlds
that draft from each other, and in the same batches without drafts. Windows come in the suite's order, so that those of
one game are often beside each other, as in a vector environment.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from eval.scores.suites import load_suite
from loopwm.records.files import PACKAGED
from loopwm.records.template import LONGEST_OBSERVATION, window_context
from loopwm.records.windows import Window
from loopwm.text.drafts import Lookup, SharedText, as_text
from loopwm.text.world import WorldModel
from loopwm.text.world_batch import World

BATCH = 32


class Silent(Lookup):
    """Drafts nothing."""

    def draft(self, most: int) -> list[int]:
        return []


def imagine(model: WorldModel, window: Window, horizon: int) -> tuple[World, str]:
    """Return the world after the window's actions, and its text up to the last of them."""
    context, _ = model.fit(window_context(window, "observed"))
    world = model.encode([context])
    for action in window["actions"][:horizon]:
        world = model.advance(world, [action])
    last = model.action_ids(window["actions"][horizon - 1])
    return world, as_text((*model.context_ids(context), *last))


def decode(
    model: WorldModel, worlds: Sequence[World], texts: Sequence[str], kind: type[Lookup], size: int
) -> tuple[list[str], float]:
    """Decode in batches of `size` with lookups of this kind; return the texts and seconds of the processor."""
    shared, decoded, started = SharedText(), [], time.process_time()
    for start in range(0, len(worlds), size):
        part = slice(start, start + size)
        lookups = [kind(shared if size > 1 else SharedText(), text) for text in texts[part]]
        decoded += [one.text for one in model.decode_each(worlds[part], lookups, LONGEST_OBSERVATION, greedy=True)]
    return decoded, time.process_time() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--model", type=Path, default=PACKAGED)
    parser.add_argument("--suite", default="scienceworld-500")
    parser.add_argument("--limit", type=int, default=250)
    parser.add_argument("--horizon", type=int, default=1)
    arguments = parser.parse_args()
    model = WorldModel.from_pretrained(arguments.model)
    windows = [one for one in load_suite(arguments.suite).windows if len(one["actions"]) >= arguments.horizon]
    worlds, texts = zip(*(imagine(model, one, arguments.horizon) for one in windows[: arguments.limit]), strict=True)
    plain, plain_seconds = decode(model, worlds, texts, Silent, BATCH)
    for name, size in (("in batches", BATCH), ("alone", 1)):
        drafted, seconds = decode(model, worlds, texts, Lookup, size)
        differ = sum(one != other for one, other in zip(drafted, plain, strict=True))
        undrafted = plain_seconds if size > 1 else decode(model, worlds, texts, Silent, 1)[1]
        print(
            f"{arguments.suite}, {len(plain)} observations {name}: {undrafted:.1f} s without drafts, "
            f"{seconds:.1f} s with, ratio {undrafted / seconds:.2f}; {differ} texts differ"
        )


if __name__ == "__main__":
    main()
