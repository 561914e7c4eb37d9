"""What the tasks call: windows as documents, and scores of what came back. Nothing is downloaded.

A document's prompt is `render_prompt` of a window, its target the true observation. A prompt over the context limit
loses its oldest steps, as in the service's chats, counted with this project's tokenizer. The template is that of the
checkpoint that ships.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from datasets import Dataset

import loopwm
from eval.metrics import score_item
from eval.windows import Window, load_suite
from loopwm.text.configuration import LoopWMConfig
from loopwm.text.format import (
    CONTEXT_LIMIT,
    END,
    OBS,
    Context,
    Regime,
    StateSlots,
    clean,
    fit_context,
    render_prompt,
    render_step,
    window_context,
)
from loopwm.text.tokenizer import load_tokenizer

Document = dict[str, Any]
SHIPPED = Path(loopwm.__file__).parent / "pretrained"
METRICS = ("em", "f1", "bleu4", "entity_recall")


def load(suite: str, context: Regime, horizon: int, **_: object) -> dict[str, Dataset]:
    """The documents of a committed suite, or of a window file, in its order. The harness adds keywords."""
    windows = load_suite(suite).windows
    return {"test": Dataset.from_list([_document(window, context, horizon) for window in windows])}


def _document(window: Window, regime: Regime, horizon: int) -> Document:
    actions, observation = window["actions"][:horizon], window["observations"][horizon - 1]
    slots = _slots()
    steps = "".join(render_step(action, slots) for action in actions)
    room = CONTEXT_LIMIT - _count(slots.after_context + steps + OBS)
    context: Context
    context, _ = fit_context(window_context(window, regime), _count, room, slots)
    return {
        "id": window["id"],
        "env": window["env"],
        "prompt": render_prompt(context, actions, slots),
        "observation": observation,
        "target": clean(observation) + END,
    }


@cache
def _slots() -> StateSlots:
    config: LoopWMConfig = LoopWMConfig.from_pretrained(SHIPPED)
    return config.slots


@cache
def _count(text: str) -> int:
    return len(load_tokenizer()(text)["input_ids"])


def score_generation(document: Document, results: list[str]) -> dict[str, float]:
    scores = score_item(document["env"], results[0], document["observation"])
    return {name: getattr(scores, name) for name in METRICS}


def score_target(document: Document, results: list[tuple[float, bool]]) -> dict[str, Any]:
    """nats: of the observation with its end mark. greedy: whether it is what greedy decoding gives."""
    log_likelihood, greedy = results[0] if isinstance(results[0], tuple | list) else results
    size = len(document["observation"].encode())
    return {"nats": -log_likelihood, "greedy": float(greedy), "bits_per_byte": (log_likelihood, size)}
