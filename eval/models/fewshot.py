"""Few-shot prompts that ask a general language model for an observation: instruction, examples, window.

Examples are windows of train episodes, never of a suite. Eight for each known environment are committed
(`eval/data/examples-*.jsonl.gz`, made by `python -m lab build-examples`); --examples replaces them by a window file.
They have the horizon and the kind of context of the window to predict, so that a deferred observation is missing there
too. There is no system message: some chat templates refuse one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from eval.scores.metrics import DATA
from eval.scores.suites import load_suite
from loopwm.records.episodes import TRAIN_SPLITS
from loopwm.records.errors import InputError
from loopwm.records.files import sha256
from loopwm.records.template import Context, ContextKind, window_context
from loopwm.records.windows import Window, check_runnable

INSTRUCTION = """\
You simulate a text game. You are given the goal of the player, what is known of the world, what happened so far, and \
the actions that the player takes next. Observations marked (not shown) happened but are not given. Reply with the \
observation that the game prints after the last action: that text alone, as the game would print it."""


class Message(TypedDict):
    role: str
    content: str


@dataclass(frozen=True)
class Shots:
    """Examples by environment, `count` to show of each, and the hash of their source."""

    examples: dict[str, tuple[Window, ...]]
    count: int
    sha256: str

    @property
    def identity(self) -> dict[str, str | int]:
        return {"shots": self.count, "examples_sha256": self.sha256}

    def messages(self, window: Window, context: Context, context_kind: ContextKind, horizon: int) -> list[Message]:
        """Return user and assistant messages in turn, a user's last. context: the window's, of this kind."""
        turns: list[Message] = []
        for example in self.examples[window["env"]]:
            question = ask(window_context(example, context_kind), example["actions"][:horizon])
            turns.append({"role": "user", "content": question})
            turns.append({"role": "assistant", "content": example["observations"][horizon - 1].strip()})
        turns.append({"role": "user", "content": ask(context, window["actions"][:horizon])})
        turns[0]["content"] = f"{INSTRUCTION}\n\n{turns[0]['content']}"
        return turns


def load_shots(
    windows: Sequence[Window], examples: Path | None, shots: int, context_kind: ContextKind, horizons: Sequence[int]
) -> Shots:
    """Load `shots` examples for each environment of the windows, from a window file or the committed ones.

    Raises InputError for too few, for one outside the train split, or without what context and horizons need.
    """
    envs = sorted({window["env"] for window in windows})
    files = [examples] if examples is not None else [examples_path(env) for env in envs]
    # A file of --examples must exist; an environment may lack committed ones with --shots 0.
    suites = [load_suite(str(path)) for path in files if (shots and path.is_file()) or path == examples]
    by_env = {env: tuple(w for s in suites for w in s.windows if w["env"] == env)[:shots] for env in envs}
    for env, chosen in by_env.items():
        if len(chosen) < shots:
            raise InputError(f"--shots: {shots} examples of {env!r} are asked for, there are {len(chosen)}")
        for window in chosen:
            if window["split"] not in TRAIN_SPLITS:
                raise InputError(f"--examples: window {window['id']}: split: must be train, got {window['split']!r}")
            if (length := len(window["actions"])) < max(horizons):
                raise InputError(
                    f"--shots: example {window['id']} has {length} actions, {max(horizons)} are asked about; ask about "
                    "as many (--horizons, of rollouts --depth-limit), take --shots 0 or other --examples"
                )
        check_runnable(chosen, context_kind, horizons)
    return Shots(by_env, shots, sha256(" ".join(suite.sha256 for suite in suites)))


def examples_path(env: str) -> Path:
    return DATA / f"examples-{env}.jsonl.gz"


def ask(context: Context, actions: Sequence[str]) -> str:
    """Return the question: a context and the next actions, the last one to be predicted."""
    known = [
        ("Goal", context.goal),
        ("Hidden state at the first observation", context.hidden_state),
        ("Surroundings now", context.look),
        ("Inventory now", context.inventory),
        ("Observation", context.observation),
    ]
    parts = [f"{name}: {text.strip()}" for name, text in known if text is not None]
    for step in context.history:
        parts += [f"Action: {step.action.strip()}", f"Observation: {step.observation.strip()}"]
    for action in actions[:-1]:
        parts += [f"Action: {action.strip()}", "Observation: (not shown)"]
    return "\n".join([*parts, f"Action: {actions[-1].strip()}"])
