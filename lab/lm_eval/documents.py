"""Functions that the tasks call: windows as documents, and scores of results. Nothing is downloaded.

In the template of the shipped checkpoint, a document's prompt is `render_prompt` of a window, its target the true
observation with its end mark. A prompt over the context limit loses its oldest steps, as in the service's chats,
counted with our tokenizer. Prompted documents are questions of `eval.models.fewshot` for any language model, with a
split of examples; nothing is truncated there.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from datasets import Dataset

import loopwm
from eval.models.fewshot import ask, load_shots
from eval.scores.metrics import HEADLINE, score_item
from eval.scores.suites import load_suite
from loopwm.records.template import (
    CONTEXT_LIMIT,
    END,
    OBS,
    Context,
    ContextKind,
    clean,
    fit_context,
    render_prompt,
    render_step,
    window_context,
)
from loopwm.records.windows import Window
from loopwm.text.model.configuration import LoopWMConfig
from loopwm.text.model.tokenizer import load_tokenizer

Document = dict[str, Any]
SHIPPED = Path(loopwm.__file__).parent / "pretrained"
MARK = "###"
"""Line after an observation in a prompt that is continued instead of answered."""


def load_template(suite: str, context: ContextKind, horizon: int, **_: object) -> dict[str, Dataset]:
    """Load the documents of a suite or window file, in its order. The harness adds keywords."""
    windows = load_suite(suite).windows
    return {"test": Dataset.from_list([_template_document(window, context, horizon) for window in windows])}


def load_prompted(
    suite: str, context: ContextKind, horizon: int, shots: int, examples: str | None, **_: object
) -> dict[str, Dataset]:
    """Load the documents as questions, and the examples. All windows are of one environment."""
    windows = load_suite(suite).windows
    shots_by_context = load_shots(windows, Path(examples) if examples else None, shots, context, [horizon])
    (shown,) = shots_by_context.examples.values()
    splits = {"test": windows, "examples": shown}
    return {name: Dataset.from_list(_questions(split, context, horizon)) for name, split in splits.items()}


def _template_document(window: Window, context_kind: ContextKind, horizon: int) -> Document:
    actions, observation = window["actions"][:horizon], window["observations"][horizon - 1]
    config = _config()
    slots = config.slots
    after = _count(slots.after_context + "".join(render_step(action, slots) for action in actions) + OBS)
    full_context, room, filled = (
        window_context(window, context_kind),
        CONTEXT_LIMIT - after,
        config.context_tokens - after,
    )
    context: Context
    context, _ = fit_context(full_context, _count, room, slots, filled)
    return {
        "id": window["id"],
        "env": window["env"],
        "prompt": render_prompt(context, actions, slots),
        "observation": observation,
        "target": clean(observation) + END,
    }


def _questions(windows: Sequence[Window], context_kind: ContextKind, horizon: int) -> list[Document]:
    """Render windows as questions that base and chat models can continue; an answer ends at a line `###`."""
    return [
        {
            "id": window["id"],
            "env": window["env"],
            "prompt": ask(window_context(window, context_kind), window["actions"][:horizon]) + "\nObservation:",
            "observation": window["observations"][horizon - 1],
            "target": window["observations"][horizon - 1].strip(),
        }
        for window in windows
    ]


@cache
def _config() -> LoopWMConfig:
    config: LoopWMConfig = LoopWMConfig.from_pretrained(SHIPPED)
    return config


@cache
def _count(text: str) -> int:
    return len(load_tokenizer()(text)["input_ids"])


def score_generation(document: Document, results: list[str]) -> dict[str, float]:
    scores = score_item(document["env"], read_continuation(results[0]), document["observation"])
    return {name: scores[name] for name in HEADLINE}


def score_target(document: Document, results: list[tuple[float, bool]]) -> dict[str, Any]:
    """Score the target. nats: of the observation with its end mark; greedy: 1 if greedy decoding produces it."""
    log_likelihood, greedy = results[0] if isinstance(results[0], tuple | list) else results
    size = len(document["observation"].encode())
    return {"nats": -log_likelihood, "greedy": float(greedy), "bits_per_byte": (log_likelihood, size)}


def read_continuation(text: str) -> str:
    """Return the answer in a continuation."""
    return text.split(f"\n{MARK}", 1)[0].strip()
